//! `hearth-bench --overcommit`: twice as much memory as there is, and one more guest starts.
//!
//! Five guests of 512 MiB share half of that. All are asked in a closed loop, without pauses. A
//! third into the run one more starts. What counts is how many answers web servers in the others
//! give and how long they take, with enough memory, with swap on a modelled hard disk, on flash,
//! and then with one means after the other added. All of it is scaled down: what is compared is
//! ratios within one run.
//!
//! The measuring is done by a child of this program. Whatever becomes of that, or of who typed
//! this, the parent takes away what was set up on the host; if it is killed as well, the next start
//! does.

mod guests;
mod host;
mod probe;
mod report;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use hearth_rig::child::bound_to_us;
use serde_json::json;

use crate::args::Args;
use guests::{Asked, Guest, ask};
use host::{Group, Swap};
use report::{Left, Measured, quantile, tables};

/// Set for the child that measures.
const CHILD: &str = "HEARTH_OVERCOMMIT_CHILD";
/// Guests that are there from the start, and what each is assigned.
const GUESTS: usize = 5;
const EACH: u64 = 512 << 20;
/// Longest that guests may take afterwards, without a limit, to say what they saw.
const COME_ROUND: Duration = Duration::from_secs(90);
/// After the limit, before anything is measured: so long nobody is asked, that it comes to rest.
const SETTLE: Duration = Duration::from_secs(10);
/// What a balloon leaves a guest where it is set by hand.
const BALLOON: u64 = EACH / 100 * 65;
const ZSWAP: &str = "/sys/module/zswap/parameters";

/// How memory is had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Contender {
    id: &'static str,
    what: &'static str,
    limited: bool,
    disk: bool,
    zswap: bool,
    balloons: bool,
    controller: bool,
}

const PLAIN: Contender = Contender {
    id: "ram",
    what: "enough RAM",
    limited: false,
    disk: false,
    zswap: false,
    balloons: false,
    controller: false,
};

const ALL: [Contender; 6] = [
    PLAIN,
    Contender {
        id: "disk",
        what: "swap on the modelled hard disk",
        limited: true,
        disk: true,
        ..PLAIN
    },
    Contender {
        id: "flash",
        what: "swap on flash",
        limited: true,
        ..PLAIN
    },
    Contender {
        id: "zswap",
        what: "+ compression",
        limited: true,
        zswap: true,
        ..PLAIN
    },
    Contender {
        id: "balloons",
        what: "+ balloons set by hand (65 %)",
        limited: true,
        zswap: true,
        balloons: true,
        ..PLAIN
    },
    Contender {
        id: "controller",
        what: "+ the controller instead of a hand",
        limited: true,
        zswap: true,
        controller: true,
        ..PLAIN
    },
];

/// Runs it.
pub fn run(args: &Args) -> Result<()> {
    if std::env::var_os(CHILD).is_some() {
        return measure(args);
    }
    let held = host::hold(&args.dir)?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [
        signal_hook::consts::SIGINT,
        signal_hook::consts::SIGTERM,
        signal_hook::consts::SIGHUP,
    ] {
        signal_hook::flag::register(signal, stop.clone())?;
    }
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(std::env::args_os().skip(1))
        .env(CHILD, "1")
        .stdin(Stdio::null());
    let mut child = bound_to_us(&mut command).spawn()?;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if stop.load(Ordering::Relaxed) {
            eprintln!("called off; cleaning up");
            child.kill()?;
            child.wait()?;
            break None;
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    undo(args, &held.dir);
    host::clean(&held.dir)?;
    match status {
        Some(status) if status.success() => Ok(()),
        Some(_) => bail!("the run failed"),
        None => bail!("called off; nothing was left behind"),
    }
}

/// Sets back what the controller has changed, if it could not.
fn undo(args: &Args, dir: &Path) {
    let run = dir.join("run");
    if !dir.join("run-memory").exists() {
        return;
    }
    let mut command = Command::new(&args.hearth);
    command.args(["memory", "undo", "--run-dir"]).arg(run);
    // If there is nothing to undo, or nobody to do it, cleaning goes on.
    let _ = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
}

fn measure(args: &Args) -> Result<()> {
    let dir = args.dir.join("overcommit");
    let picked: Vec<Contender> = if args.only.is_empty() {
        ALL.to_vec()
    } else {
        let named = |id: &String| {
            let found = ALL.into_iter().find(|c| c.id == *id);
            found.with_context(|| {
                format!("no contender {id}: ram, disk, flash, zswap, balloons, controller")
            })
        };
        args.only.iter().map(named).collect::<Result<_>>()?
    };
    eprintln!("making the guests' data");
    let sources = [
        args.hearth.clone(),
        PathBuf::from("/usr/bin/qemu-system-x86_64"),
    ];
    for number in 0..=GUESTS {
        guests::make_data(&dir.join(format!("data.{number}")), number, &sources)?;
    }
    let (mut all, mut left) = (Vec::new(), Vec::new());
    for round in 1..=args.rounds {
        for contender in &picked {
            eprintln!("\n== round {round}, {}: {}", contender.id, contender.what);
            let lacks = lacking(contender);
            let outcome = match &lacks {
                Some(why) => Err(anyhow::anyhow!("{why}")),
                None => one(args, &dir, contender, round),
            };
            match outcome {
                Ok(measured) => {
                    eprintln!(
                        "   p50 {:.0} ms, p99 {:.0} ms, longest {:.0} ms; a page back in {:.2} ms, p99 {:.2} ms",
                        measured.p50_ms,
                        measured.p99_ms,
                        measured.longest_ms,
                        measured.swap_in_p50_ms,
                        measured.swap_in_p99_ms
                    );
                    all.push(measured);
                }
                Err(e) => {
                    eprintln!("   {e:#}");
                    left.push(Left {
                        contender: contender.id.to_owned(),
                        what: contender.what.to_owned(),
                        round,
                        why: format!("{e:#}"),
                        lacks: lacks.is_some(),
                    });
                    undo(args, &dir);
                    // What it left must not be in the way of the next.
                    host::tidy(&dir)?;
                }
            }
            save(args, &all, &left)?;
        }
    }
    println!("{}", tables(&all, &left, args.seconds));
    let failed = left.iter().filter(|l| !l.lacks).count();
    ensure!(failed == 0, "{failed} could not be measured; see above");
    Ok(())
}

/// What this host lacks for a contender.
fn lacking(contender: &Contender) -> Option<String> {
    if contender.disk
        && let Some(what) = crate::modelled::missing()
    {
        return Some(format!("a modelled hard disk needs {what}"));
    }
    if contender.zswap && !Path::new(ZSWAP).join("enabled").exists() {
        return Some("this kernel has no compression of swap (zswap)".to_owned());
    }
    None
}

fn save(args: &Args, all: &[Measured], left: &[Left]) -> Result<()> {
    std::fs::create_dir_all(&args.out)?;
    let text = json!({
        "host": crate::host::describe(args), "seconds": args.seconds, "measured": all, "left": left
    });
    std::fs::write(
        args.out.join("overcommit.json"),
        serde_json::to_vec_pretty(&text)?,
    )?;
    let text = tables(all, left, args.seconds);
    Ok(std::fs::write(args.out.join("overcommit.md"), text)?)
}

/// Bytes swapped in, out, and compressed, since the host started.
fn counters() -> [u64; 3] {
    let text = std::fs::read_to_string("/proc/vmstat").unwrap_or_default();
    ["pswpin", "pswpout", "zswpout"].map(|name| {
        let line = text
            .lines()
            .find_map(|l| l.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|l| l.parse::<u64>().ok()).unwrap_or(0) << 12
    })
}

/// Compression takes a hundredth of the host at most. Version 1 does not count that to the guests' group, so it is taken off
/// their limit.
fn compress(dir: &Path) -> Result<u64> {
    // One that is not on takes any name.
    host::set(dir, &format!("{ZSWAP}/enabled"), "Y")?;
    // Not every kernel has the better ones.
    let compressor = ["lz4", "zstd", "lzo-rle", "lzo"]
        .into_iter()
        .find(|name| host::set(dir, &format!("{ZSWAP}/compressor"), name).is_ok());
    eprintln!(
        "   compressed with {}",
        compressor.context("this kernel has no compressor")?
    );
    host::set(dir, &format!("{ZSWAP}/max_pool_percent"), "1")?;
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let kib: u64 = text
        .split_whitespace()
        .nth(1)
        .and_then(|w| w.parse().ok())
        .context("/proc/meminfo")?;
    Ok((kib << 10) / 100)
}

/// The controller's process. Whatever becomes of the run, it ends with it.
struct Controls(Child);

impl Controls {
    /// Has it set back what it changed, and end.
    fn end(mut self, dir: &Path) -> Result<()> {
        // SAFETY: a child of ours that was not waited for yet.
        unsafe { libc::kill(self.0.id() as libc::pid_t, libc::SIGTERM) };
        let status = self.0.wait()?;
        ensure!(
            status.success(),
            "the controller ended with {status}: {}",
            std::fs::read_to_string(dir.join("memory.log")).unwrap_or_default()
        );
        Ok(())
    }
}

impl Drop for Controls {
    fn drop(&mut self) {
        // One that has ended is not there to be killed.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn controller(args: &Args, dir: &Path) -> Result<Controls> {
    let config = dir.join("memory.toml");
    std::fs::write(&config, "[memory]\nlibvirt = false\n")?;
    let mut command = Command::new(&args.hearth);
    command
        .args(["memory", "run", "--run-dir"])
        .arg(dir.join("run"));
    command.arg("--state-dir").arg(dir.join("state"));
    command.arg("--config").arg(&config);
    command.args(["--cgroup", Group::dir()]);
    for number in 0..=GUESTS {
        let socket = guests::socket(dir, number);
        command
            .arg("--guest")
            .arg(format!("g{number}={}", socket.display()));
    }
    let log = std::fs::File::create(dir.join("memory.log"))?;
    let child = bound_to_us(command.stdin(Stdio::null()).stderr(log)).spawn()?;
    Ok(Controls(child))
}

fn one(args: &Args, dir: &Path, contender: &Contender, round: usize) -> Result<Measured> {
    let began = Instant::now();
    let swap = match (contender.limited, contender.disk) {
        (false, _) => Swap::None,
        (true, true) => Swap::disk(dir, &args.hearth)?,
        (true, false) => Swap::flash(dir)?,
    };
    let mut limit = GUESTS as u64 * EACH / 2;
    if contender.zswap {
        limit = limit.saturating_sub(compress(dir)?);
    }
    let group = Group::new()?;
    let moved = contender.balloons || contender.controller;
    let mut running = Vec::new();
    for number in 0..GUESTS {
        running.push(Guest::power_on(dir, number, moved)?);
    }
    for guest in &mut running {
        guest.machine.wait_up(1)?;
    }
    let jobs: Vec<_> = running
        .iter_mut()
        .map(|g| g.prepare(moved))
        .collect::<Result<_>>()?;
    for (guest, job) in running.iter_mut().zip(&jobs) {
        guest.machine.wait_ok(job)?;
    }
    eprintln!(
        "   guests are up and take {} MiB ({:.0} s)",
        group.used() >> 20,
        began.elapsed().as_secs_f64()
    );
    if contender.balloons {
        for guest in &mut running {
            guest
                .machine
                .qmp
                .execute("balloon", json!({"value": BALLOON}))?;
        }
    }
    let controls = if contender.controller {
        Some(controller(args, dir)?)
    } else {
        None
    };
    let at_limit = counters();
    if contender.limited {
        group.limit(limit)?;
        eprintln!(
            "   limited to {} MiB ({:.0} s)",
            limit >> 20,
            began.elapsed().as_secs_f64()
        );
    }
    for guest in &mut running {
        guest.touch()?;
    }
    std::thread::sleep(SETTLE.min(Duration::from_secs(args.seconds)));
    let setup_s = began.elapsed().as_secs_f64();
    let before = counters();
    let (asked, mut late, seen) = busy_time(args, dir, &mut running, contender, round)?;
    let after = counters();
    // What is waited for from here on is not measured.
    group.unlimited()?;
    let mut measured = sum(contender, round, asked);
    for guest in &mut running {
        guest.stop_touching()?;
    }
    let until = Instant::now() + COME_ROUND;
    for guest in &mut running {
        let Some(touched) = guest.touched(until)? else {
            eprintln!("   guest {} does not come round", guest.number);
            measured.lost += 1;
            continue;
        };
        measured.touched_mib += touched.chunks;
        measured.touched_wrong += touched.wrong;
        measured.touch_longest_s = measured.touch_longest_s.max(touched.longest);
    }
    let [swapped_in, out, compressed] = [0, 1, 2].map(|n| (after[n] - before[n]) >> 20);
    measured.swapped_in_mib = swapped_in;
    measured.swapped_out_mib = out;
    measured.compressed_mib = compressed;
    measured.written_mib = (after[1] - at_limit[1]) >> 20;
    measured.started_s = seen.started_s;
    measured.out_mib = seen.out >> 20;
    measured.swap_in_peak_mib_s = seen.peak / f64::from(1 << 20);
    measured.swap_ins = seen.swap_ins.len();
    measured.swap_in_p50_ms = quantile(&seen.swap_ins, 0.50);
    measured.swap_in_p95_ms = quantile(&seen.swap_ins, 0.95);
    measured.swap_in_p99_ms = quantile(&seen.swap_ins, 0.99);
    ensure!(
        measured.wrong == 0 && measured.touched_wrong == 0,
        "memory was not right: {measured:?}"
    );
    measured.setup_s = setup_s;
    if let Some(controls) = controls {
        controls.end(dir)?;
    }
    late.take();
    drop(running);
    swap.off(dir)?;
    host::restore(dir)?;
    std::fs::remove_dir(Group::dir()).or_else(|_| {
        hearth_rig::wait::until(
            "the control group is empty",
            Duration::from_secs(30),
            || std::fs::remove_dir(Group::dir()).ok(),
        )
    })?;
    Ok(measured)
}

/// What is seen beside the answers.
#[derive(Default)]
struct Seen {
    /// Seconds until one more guest was up.
    started_s: Option<f64>,
    /// Milliseconds that single pages took to come back, sorted.
    swap_ins: Vec<f64>,
    /// Bytes that came back in the second in which most did.
    peak: f64,
    /// Most bytes that were swapped out at once.
    out: u64,
}

impl Seen {
    /// Looks once a second; `before` is when it looked last, and how much had come back by then.
    fn look(&mut self, before: &mut (Instant, u64)) {
        let passed = before.0.elapsed();
        if passed < Duration::from_secs(1) {
            return;
        }
        let now = counters()[0];
        let rate = now.saturating_sub(before.1) as f64 / passed.as_secs_f64();
        self.peak = self.peak.max(rate);
        self.out = self.out.max(host::swapped_out());
        *before = (Instant::now(), now);
    }
}

type Busy = (Vec<Asked>, Option<Guest>, Seen);

/// The time that is measured: everybody is asked, and a third into it one more guest starts.
fn busy_time(
    args: &Args,
    dir: &Path,
    running: &mut [Guest],
    contender: &Contender,
    round: usize,
) -> Result<Busy> {
    let moved = contender.balloons || contender.controller;
    let stop = Arc::new(AtomicBool::new(false));
    let whole = Duration::from_secs(args.seconds);
    let mut askers = Vec::new();
    for guest in running.iter() {
        let (address, data, stop) = (guest.address, guest.data.clone(), stop.clone());
        let seed = (round * 100 + guest.number) as u64;
        askers.push(std::thread::spawn(move || ask(address, &data, seed, &stop)));
    }
    let probe = contender.limited.then(|| {
        let (data, stop) = (dir.join("data.0"), stop.clone());
        std::thread::spawn(move || probe::watch(&data, round as u64, &stop))
    });
    let began = Instant::now();
    let mut late = None;
    let mut seen = Seen::default();
    let mut looked = (Instant::now(), counters()[0]);
    let outcome = (|| -> Result<()> {
        let mut job = None;
        while began.elapsed() < whole {
            std::thread::sleep(Duration::from_millis(20));
            seen.look(&mut looked);
            if began.elapsed() < whole / 3 {
                continue;
            }
            let Some(guest) = &mut late else {
                late = Some(Guest::power_on(dir, GUESTS, moved)?);
                continue;
            };
            match &job {
                None if guest.machine.greeted()? > 0 => job = Some(guest.prepare(moved)?),
                Some(job) if seen.started_s.is_none() && guest.machine.has_ended(job)? => {
                    guest.machine.wait_ok(job)?;
                    seen.started_s = Some((began.elapsed() - whole / 3).as_secs_f64());
                    eprintln!("   one more guest is up");
                }
                _ => {}
            }
        }
        Ok(())
    })();
    stop.store(true, Ordering::Relaxed);
    let ended = || anyhow::anyhow!("who asks ended abnormally");
    let mut asked = Vec::new();
    for asker in askers {
        asked.push(asker.join().map_err(|_| ended())??);
    }
    if let Some(probe) = probe {
        seen.swap_ins = probe.join().map_err(|_| ended())??;
        seen.swap_ins.sort_by(f64::total_cmp);
    }
    outcome?;
    Ok((asked, late, seen))
}

fn sum(contender: &Contender, round: usize, asked: Vec<Asked>) -> Measured {
    let mut all: Vec<f64> = asked.iter().flat_map(|a| a.latencies.clone()).collect();
    all.sort_by(f64::total_cmp);
    Measured {
        contender: contender.id.to_owned(),
        what: contender.what.to_owned(),
        round,
        requests: all.len(),
        p50_ms: quantile(&all, 0.50),
        p95_ms: quantile(&all, 0.95),
        p99_ms: quantile(&all, 0.99),
        longest_ms: quantile(&all, 1.0),
        unanswered: asked.iter().map(|a| a.unanswered).sum(),
        failed: asked.iter().map(|a| a.failed).sum(),
        wrong: asked.iter().map(|a| a.wrong).sum(),
        ..Measured::default()
    }
}
