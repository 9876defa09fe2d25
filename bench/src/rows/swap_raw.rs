//! Pages that come back from swap inside a pool, beside reads of the same loop device and of the file below it.
//!
//! The kernel's own way from a fault to the device is what is measured, so a program of its own memory is swapped out and read
//! again in random order, by one thread and by sixteen. fio reads the very same loop device at the same depth, and the pool's file
//! without one. Nothing else is swapped to meanwhile.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use hearth_rig::Hearth;
use hearth_rig::daemon::path;
use hearth_rig::rng::Rng;

use crate::args::Args;
use crate::devices::{loops_below, unused_below};
use crate::load::{Job, Sample, run};
use crate::paged::{Memory, PAGE};
use crate::peers::{At, Contender};
use crate::report::{Outcome, Series, Wanted};

/// Memory that is swapped out.
const MEMORY: u64 = 512 << 20;
/// What an area has beside that.
const MORE: u64 = 64 << 20;
const CLUSTER: &str = "/proc/sys/vm/page-cluster";

/// What is missing on this host, if anything is.
fn missing() -> Option<String> {
    // SAFETY: no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        return Some("it swaps: run it as root".into());
    }
    if !Path::new("/dev/loop-control").exists() {
        return Some("there are no loop devices".into());
    }
    let zswap = fs::read_to_string("/sys/module/zswap/parameters/enabled");
    if zswap.is_ok_and(|on| on.trim() == "Y") {
        return Some(
            "pages are compressed (zswap), so that they do not come from the device".into(),
        );
    }
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    let used = |line: &str| line.split_whitespace().nth_back(1) != Some("0");
    if swaps.lines().skip(1).any(used) {
        return Some("this host has swapped something out already".into());
    }
    None
}

pub fn row(args: &Args) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    if args.peers_only {
        return Ok(outcome);
    }
    if let Some(why) = missing() {
        outcome.notes.push(format!("Not measured: {why}."));
        return Ok(outcome);
    }
    let size = if args.smoke { MEMORY / 16 } else { MEMORY };
    // Beyond half of an area the kernel takes a page's place back as soon as it is read in again, so that the page would
    // have to be written once more to come from there.
    let swap = Swap::new(args, 2 * size + MORE)?;
    let mut rng = Rng::new(1);
    // Zeros are not written, and equal pages might be merged.
    let memory = Memory::new((size as usize) / PAGE, |bytes| {
        for word in bytes.chunks_exact_mut(8) {
            word.copy_from_slice(&rng.below(u64::MAX).to_le_bytes());
        }
        Ok(())
    })?;
    let device = |name: &str, at: &Path| Contender {
        name: name.to_owned(),
        at: At::File(at.to_owned()),
        pid: None,
    };
    let loop_device = device("loop device", &swap.node);
    let file = device("file", swap.hearth.flash());
    for depth in [1, 16] {
        let mut series = ["swap", "loop device", "file"].map(|name| Series {
            name: name.to_owned(),
            samples: Vec::new(),
        });
        for round in 1..=args.rounds as u64 {
            let job = Job {
                seed: round,
                ..Job::random("randread", depth, args.seconds, size)
            };
            let samples = [
                page_in(&memory, depth as usize, args.seconds, round)?,
                run(&job, &loop_device)?,
                run(&job, &file)?,
            ];
            for (series, sample) in series.iter_mut().zip(samples) {
                let name = &series.name;
                eprintln!(
                    "   round {round}: {name:12} depth {depth:2} {:9.0}/s",
                    sample.iops
                );
                series.samples.push(sample);
            }
        }
        let mut part = Outcome {
            series: series.into(),
            ..Outcome::default()
        };
        part.compare_iops("swap", "loop device", Wanted::AtLeast(0.95));
        part.compare_p99("swap", "loop device", Wanted::Shown);
        part.compare_iops("loop device", "file", Wanted::Shown);
        outcome.at_depth(depth, part);
    }
    drop(memory);
    swap.off()?;
    outcome.notes.push(
        "On a device or partition of its own swap needs no loop device; what that costs is loop device / file.".into(),
    );
    Ok(outcome)
}

/// Reads pages that are out, each in its turn, by so many threads.
fn page_in(memory: &Memory, threads: usize, seconds: u64, seed: u64) -> Result<Sample> {
    let whole = Duration::from_secs(seconds);
    let (mut took, mut spent) = (Vec::new(), Duration::ZERO);
    let mut rng = Rng::new(seed);
    let mut order: Vec<usize> = (0..memory.pages()).collect();
    while spent < whole {
        memory.out()?;
        for n in (1..order.len()).rev() {
            order.swap(n, rng.below(n as u64 + 1) as usize);
        }
        let began = Instant::now();
        let share = order.len().div_ceil(threads.max(1));
        let left = || spent + began.elapsed() < whole;
        let each = |pages: &[usize]| memory.fetch_all(pages, left);
        let each = &each;
        let found: Vec<_> = std::thread::scope(|scope| {
            let all: Vec<_> = order
                .chunks(share)
                .map(|pages| scope.spawn(move || each(pages)))
                .collect();
            all.into_iter().map(|thread| thread.join()).collect()
        });
        spent += began.elapsed();
        let before = took.len();
        for one in found {
            took.extend(one.map_err(|_| anyhow::anyhow!("who reads pages ended abnormally"))?);
        }
        // The time can end before the threads begin their last turn.
        if took.len() == before {
            break;
        }
    }
    ensure!(!took.is_empty(), "no page came from the device");
    took.sort();
    let sum: Duration = took.iter().sum();
    let p99 = took[(took.len() * 99 / 100).min(took.len() - 1)];
    Ok(Sample {
        iops: took.len() as f64 / spent.as_secs_f64(),
        mean_us: sum.as_secs_f64() * 1e6 / took.len() as f64,
        p99_us: p99.as_secs_f64() * 1e6,
        requests: took.len() as f64,
        ..Sample::default()
    })
}

/// Swap inside a pool. Whatever becomes of this process, what was set up on the host for it is taken away.
struct Swap {
    hearth: Hearth,
    node: PathBuf,
    guard: Child,
}

impl Swap {
    fn new(args: &Args, size: u64) -> Result<Swap> {
        let dir = args.dir.join("swap-raw");
        unused_below(&dir)?;
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir)?;
        let cluster = fs::read_to_string(CLUSTER)?;
        let mut hearth = Hearth::bare_in(args.hearth.clone(), &dir)?;
        hearth.bound = true;
        hearth.create_pool(&format!("{}M", (size * 3) >> 20))?;
        hearth.start()?;
        let state = dir.join("state");
        let size = format!("{}M", size >> 20);
        hearth.ok(&[
            "swap",
            "on",
            "--in-pool",
            "--size",
            &size,
            "--state-dir",
            path(&state),
        ])?;
        let node = match loops_below(&dir)?.as_slice() {
            [one] => one.clone(),
            several => anyhow::bail!("{} loop devices over the pool", several.len()),
        };
        // It waits for this process to end without a word.
        let script = format!(
            "read word && exit 0; swapoff {node}; losetup -d {node}; echo {} >{CLUSTER}",
            cluster.trim(),
            node = path(&node)
        );
        let mut command = Command::new("sh");
        command.args(["-c", &script]).stdin(Stdio::piped());
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let guard = command.spawn().context("sh")?;
        Ok(Swap {
            hearth,
            node,
            guard,
        })
    }

    fn off(mut self) -> Result<()> {
        let state = self.hearth.dir().with_file_name("state");
        self.hearth
            .ok(&["swap", "off", "--state-dir", path(&state)])?;
        if let Some(mut to) = self.guard.stdin.take() {
            to.write_all(b"done\n")?;
        }
        self.guard.wait()?;
        self.hearth.stop()?;
        Ok(())
    }
}
