//! A boot storm: five guests of one image started together, three times.
//!
//! Every guest has a disk of its own, a copy of the image, all on one slow disk: one arm for five
//! guests that all want to read, which is what makes a storm. Nobody's blocks help anybody else,
//! so the first storm finds a cold cache and the third a warm one. A guest is up when it prints
//! its marker on the serial console. Guests are emulated (QEMU's tcg), which works everywhere and
//! costs CPU that flash cannot save: the rows of the flash show how much.

use super::lab::POOL_SLACK;
use super::report::{Point, Table};
use super::room::{self, Need};
use super::{BenchError, Mode, Options, Over, Run, Slow, scratch};
use crate::fixture;
use crate::report::Wanted;
use anyhow::{Context, Result, bail, ensure};
use hearth_rig::daemon::path;
use hearth_rig::machine::{attach_args, copy_sparse};
use hearth_rig::process::cpu_us;
use hearth_rig::{Hearth, child};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Guests started together, and how often.
pub(super) const GUESTS: usize = 5;
/// The table's name for programs.
pub(super) const ID: &str = "storm";
const ROUNDS: u32 = 3;
/// MiB of its files a guest reads before it is up: a larger system's boot.
const READ: u64 = 24;
/// RAM of a guest.
const MEMORY: &str = "192M";
/// What the guest prints when it is up, and when it cannot come up.
const UP: &str = "HEARTH-GUEST UP";
const FAILED: &str = "HEARTH-GUEST FAILED";
/// Longest a storm may take: ten times what five emulated guests take on a hard disk.
const LIMIT: Duration = Duration::from_secs(600);
/// How often a wait looks whether the user has called it off.
const LOOK: Duration = Duration::from_millis(100);
/// Lines of a guest's console kept for an error.
const LINES_MAX: usize = 20;
/// Bytes of flash per guest: what it reads and writes, several times over.
const FLASH_PER_GUEST: u64 = 256 << 20;
/// Bytes of the pool.
const POOL: u64 = GUESTS as u64 * FLASH_PER_GUEST + POOL_SLACK;
/// Seconds of a storm, and of copying five images: for the estimate of the time left only.
const STORM: f64 = 25.0;
const COPYING: f64 = 10.0;
/// Goals: the third storm over flash alone, the first over a cache that is off.
const WARM: f64 = 1.15;
const COLD: f64 = 1.0;

/// What a row measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Setup {
    /// QEMU opens the files on the slow disk.
    SlowRaw,
    /// Exports of the slow disk that were never cached.
    SlowAlone,
    /// Cached disks whose cache was switched off.
    Off,
    /// Cached disks, cold at first.
    Cached(Mode),
    /// Exports of files on the flash.
    FlashAlone,
}

impl Setup {
    fn all(options: &Options) -> Vec<Setup> {
        let mut all = Vec::new();
        // The model is part of the daemon: nobody reaches it without one.
        if options.slow != Slow::Model {
            all.push(Setup::SlowRaw);
        }
        all.extend([Setup::SlowAlone, Setup::Off]);
        all.extend(options.modes.first().map(|m| Setup::Cached(*m)));
        all.push(Setup::FlashAlone);
        all
    }

    fn name(self) -> String {
        match self {
            Setup::SlowRaw => "slow disk, no server".to_owned(),
            Setup::SlowAlone => "slow disk alone".to_owned(),
            Setup::Off => "cache off".to_owned(),
            Setup::Cached(mode) => format!("cache on, {}", mode.word()),
            Setup::FlashAlone => "flash alone".to_owned(),
        }
    }

    /// Where the images go.
    fn place(self, options: &Options) -> &Path {
        match (&options.slow, self) {
            (Slow::Model, _) | (_, Setup::FlashAlone) => &options.flash,
            (Slow::Directory(dir), _) => dir,
        }
    }
}

fn column(round: u32, which: &str) -> String {
    format!("round {round}, {which} up")
}

/// The columns of the last guest in the first round, with a cold cache, and in the last one.
pub(super) fn last_up() -> [String; 2] {
    [column(1, "last"), column(ROUNDS, "last")]
}

/// The rows of the slow disk alone, the cache (whether cold or warm depends on the round), twice,
/// and the flash alone.
pub(super) fn rows(mode: Mode) -> [String; 4] {
    let cached = Setup::Cached(mode).name();
    [
        Setup::SlowAlone.name(),
        cached.clone(),
        cached,
        Setup::FlashAlone.name(),
    ]
}

/// The way the guests reach their disks.
pub(super) fn over(options: &Options) -> Over {
    options.over.last().copied().unwrap_or(Over::VhostUser)
}

/// Seconds the table will take.
pub fn seconds(options: &Options) -> f64 {
    let setups = Setup::all(options).len() as f64;
    f64::from(options.storms) * setups * (f64::from(ROUNDS) * STORM + COPYING)
}

/// Fails if a setup's images and pool would fill a disk.
pub(super) fn check_room(options: &Options) -> Result<()> {
    let image = options.guest.as_deref().ok_or(BenchError::NoGuest)?;
    let root = image.join("root.img");
    // A copy has holes where the image has, but a guest may fill them.
    let size = std::fs::metadata(&root)
        .with_context(|| format!("cannot look at {}", root.display()))?
        .len();
    for setup in Setup::all(options) {
        room::check(&[
            Need {
                place: setup.place(options).to_owned(),
                bytes: GUESTS as u64 * size,
            },
            Need {
                place: options.flash.clone(),
                bytes: POOL,
            },
        ])?;
    }
    Ok(())
}

/// Measures the table.
pub(super) fn run(run: &mut Run) -> Result<()> {
    let options = run.options;
    let image = options.guest.as_deref().ok_or(BenchError::NoGuest)?;
    for part in ["kernel", "initrd", "root.img"] {
        let file = image.join(part);
        ensure!(
            file.is_file(),
            "there is no {}; make a guest with `scripts/guest-lab.sh image` and give the directory it prints",
            file.display()
        );
    }
    let over = over(options);
    let setups = Setup::all(options);
    let mut table = Table::new(
        ID,
        &format!(
            "Boot storm: {GUESTS} guests started together over {}",
            over.word()
        ),
        "seconds",
        false,
        setups.iter().map(|s| s.name()),
        (1..=ROUNDS).flat_map(|r| [column(r, "first"), column(r, "last")]),
    );
    table.notes.push(format!(
        "Emulated guests (tcg) of {MEMORY}, each on a copy of {} of its own, all on one slow disk; \
         before it is up each reads {READ} MiB of its files. A cache is cold in round 1.",
        image.join("root.img").display()
    ));
    let table = run.report.open(table);
    for repetition in 0..options.storms {
        for setup in &setups {
            let name = setup.name();
            run.step(COPYING, &format!("boot storm, {name}: copying images"))?;
            let lab = Lab::set_up(run, *setup, image)?;
            for round in 1..=ROUNDS {
                let what = format!(
                    "boot storm {} of {}, {name}: round {round} of {ROUNDS}",
                    repetition + 1,
                    options.storms
                );
                run.step(STORM, &what)?;
                let [first, last] = lab.storm(image, over, &|| run.go_on())?;
                let table = run.report.table(table);
                table.add(&name, &column(round, "first"), first);
                table.add(&name, &column(round, "last"), last);
                judge(table, options);
                run.keep()?;
            }
        }
    }
    Ok(())
}

fn judge(table: &mut Table, options: &Options) {
    table.goals.clear();
    let Some(mode) = options.modes.first().filter(|_| options.goals) else {
        return;
    };
    let cached = Setup::Cached(*mode).name();
    let (off, slow) = (Setup::Off.name(), Setup::SlowAlone.name());
    let flash = Setup::FlashAlone.name();
    let [cold, warm] = last_up();
    table.compare(&cached, &flash, &warm, Wanted::AtMost(WARM));
    table.compare(&cached, &off, &cold, Wanted::AtMost(COLD));
    table.compare(&off, &slow, &cold, Wanted::Shown);
    table.compare(&slow, &cached, &warm, Wanted::Shown);
}

/// Five disks in one setup.
struct Lab {
    hearth: Hearth,
    disks: Vec<String>,
    files: Vec<PathBuf>,
    served: bool,
    /// Holds the images.
    _images: TempDir,
}

impl Lab {
    fn set_up(run: &Run, setup: Setup, image: &Path) -> Result<Lab> {
        let options = run.options;
        let images = scratch(setup.place(options))?;
        let mut files = Vec::new();
        for guest in 1..=GUESTS {
            run.go_on()?;
            let file = images.path().join(format!("guest{guest}.img"));
            copy_sparse(&image.join("root.img"), &file)?;
            // What the kernel has yet to write would be in the first storm's way.
            std::fs::File::open(&file)?.sync_all()?;
            files.push(file);
        }
        let stop = || run.go_on();
        let hearth = fixture::pool_unless(&options.hearth, &options.flash, POOL, &stop)?;
        let served = setup != Setup::SlowRaw;
        let mut disks = Vec::new();
        for (guest, file) in files.iter().enumerate().filter(|_| served) {
            let disk = format!("guest{}", guest + 1);
            let (wrapper, mode) = match setup {
                Setup::FlashAlone => ("", "off"),
                Setup::Cached(mode) => (wrapper(options), mode.word()),
                Setup::Off => (wrapper(options), Mode::WriteBack.word()),
                Setup::SlowRaw | Setup::SlowAlone => (wrapper(options), "off"),
            };
            fixture::add(&hearth, &disk, &format!("{wrapper}{}", path(file)), mode)?;
            if setup == Setup::Off {
                hearth.ok(&["disk", "set", &disk, "--mode", "off"])?;
            }
            disks.push(disk);
        }
        Ok(Lab {
            hearth,
            disks,
            files,
            served,
            _images: images,
        })
    }

    /// Starts all guests and waits until the last is up; when the first and the last were.
    fn storm(&self, image: &Path, over: Over, stop: &dyn Fn() -> Result<()>) -> Result<[Point; 2]> {
        let drives = (0..GUESTS)
            .map(|guest| self.drive(guest, over))
            .collect::<Result<Vec<_>>>()?;
        let before = self.costs()?;
        let start = Instant::now();
        let (say, hear) = channel();
        // Killed when dropped: a storm ends when the last guest is up.
        let mut guests = Vec::new();
        for (number, drive) in drives.iter().enumerate() {
            guests.push(Guest::start(number, image, drive, say.clone())?);
        }
        drop(say);
        let mut up = all_up(&hear, start, stop)?;
        drop(guests);
        let after = self.costs()?;
        up.sort_unstable();
        let requests = (after.requests - before.requests).max(1.0);
        let point = |at: Option<&Duration>| Point {
            value: at.map_or(0.0, Duration::as_secs_f64),
            requests: self.served.then_some(requests),
            server_us: self
                .served
                .then_some((after.cpu_us - before.cpu_us) / requests),
            flash_bytes: self
                .served
                .then_some((after.flash - before.flash) / requests),
            ..Point::default()
        };
        Ok([point(up.first()), point(up.last())])
    }

    /// QEMU's arguments for a guest's disk.
    fn drive(&self, guest: usize, over: Over) -> Result<Vec<String>> {
        match self.disks.get(guest) {
            Some(disk) => {
                let args = attach_args(&self.hearth, disk, over.word())?;
                // attach-help speaks of a larger machine.
                let fit = |a: String| match a.starts_with("memory-backend-") {
                    true => a.replace("size=4G", &format!("size={MEMORY}")),
                    false => a,
                };
                Ok(args.into_iter().map(fit).collect())
            }
            None => Ok(vec![
                "-drive".to_owned(),
                format!(
                    "file={},format=raw,if=virtio,cache=none,aio=io_uring",
                    path(&self.files[guest]).replace(',', ",,")
                ),
            ]),
        }
    }

    fn costs(&self) -> Result<Costs> {
        let mut costs = Costs::default();
        if !self.served {
            return Ok(costs);
        }
        costs.cpu_us = cpu_us(self.hearth.pid().context("the daemon is not running")?)?;
        costs.flash = fixture::flash_written(&self.hearth)?;
        for disk in &self.disks {
            let stats = self.hearth.stats(disk)?;
            let counters = &stats["spans"][0]["counters"];
            for kind in ["read", "write"] {
                for outcome in ["hits", "partial_hits", "misses"] {
                    let name = format!("{kind}_{outcome}");
                    costs.requests += counters[&name]
                        .as_f64()
                        .with_context(|| format!("no {name} in the statistics"))?;
                }
            }
        }
        Ok(costs)
    }
}

fn wrapper(options: &Options) -> &'static str {
    match options.slow {
        Slow::Model => "model-hdd=storm:",
        Slow::Directory(_) => "",
    }
}

/// What the daemon has done so far.
#[derive(Clone, Copy, Debug, Default)]
struct Costs {
    cpu_us: f64,
    flash: f64,
    requests: f64,
}

/// What a guest's console said.
type News = (usize, Result<Instant, String>);

/// A running guest. Killed when dropped.
struct Guest(Child);

impl Guest {
    fn start(number: usize, image: &Path, drive: &[String], say: Sender<News>) -> Result<Guest> {
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args(["-accel", "tcg", "-nodefaults", "-display", "none"])
            .args(["-no-reboot", "-m", MEMORY, "-serial", "stdio"])
            .arg("-kernel")
            .arg(image.join("kernel"))
            .arg("-initrd")
            .arg(image.join("initrd"))
            .arg("-append")
            // On a busy machine an emulated timer may fail the kernel's check of it.
            .arg(format!(
                "console=ttyS0 root=/dev/vda quiet panic=-1 no_timer_check hearth.read={READ}"
            ))
            .args(drive)
            .stdin(Stdio::null());
        // Errors of QEMU's own belong to what a failing guest says.
        let (stdout, words) = std::io::pipe()?;
        qemu.stderr(words.try_clone()?).stdout(words);
        let child = child::bound_to_us(&mut qemu)
            .spawn()
            .context("cannot start qemu-system-x86_64")?;
        // The command holds the pipe's other end: without this the console would never end.
        drop(qemu);
        std::thread::spawn(move || {
            let _ = say.send((number, watch(BufReader::new(stdout))));
        });
        Ok(Guest(child))
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Reads a console up to its marker; when that came, or the last lines of a guest that ended.
fn watch(console: impl BufRead) -> Result<Instant, String> {
    let mut last: Vec<String> = Vec::new();
    for line in console.split(b'\n') {
        let Ok(line) = line else { break };
        let line = String::from_utf8_lossy(&line).trim().to_owned();
        if line.contains(UP) {
            return Ok(Instant::now());
        }
        let failed = line.contains(FAILED);
        last.push(line);
        if last.len() > LINES_MAX {
            last.remove(0);
        }
        if failed {
            break;
        }
    }
    Err(last.join("\n"))
}

/// Waits for all guests; the time of each since `start`.
fn all_up(
    hear: &Receiver<News>,
    start: Instant,
    stop: &dyn Fn() -> Result<()>,
) -> Result<Vec<Duration>> {
    let mut up = Vec::new();
    while up.len() < GUESTS {
        stop()?;
        ensure!(
            start.elapsed() < LIMIT,
            "{} of {GUESTS} guests were not up after {LIMIT:?}",
            GUESTS - up.len()
        );
        match hear.recv_timeout(LOOK) {
            Ok((_, Ok(at))) => up.push(at.duration_since(start)),
            Ok((number, Err(said))) => {
                bail!("guest {} did not come up; it said:\n{said}", number + 1)
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => bail!("the guests ended"),
        }
    }
    Ok(up)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_console_is_read_up_to_its_marker() {
        let up = watch(&b"SeaBIOS\r\n\xff\n[    2.7] HEARTH-GUEST UP 2.78\r\nmore"[..]);
        assert!(up.is_ok());
        let said = watch(&b"one\nHEARTH-GUEST FAILED: no root\nmore\n"[..]).unwrap_err();
        assert_eq!(said, "one\nHEARTH-GUEST FAILED: no root");
        let long = "line\n".repeat(100);
        assert_eq!(
            watch(long.as_bytes()).unwrap_err().lines().count(),
            LINES_MAX
        );
    }

    #[test]
    fn a_guest_that_ends_ends_the_wait() {
        let (say, hear) = channel();
        let start = Instant::now();
        say.send((0, Ok(start + Duration::from_secs(3)))).unwrap();
        say.send((1, Err("panic".to_owned()))).unwrap();
        let error = all_up(&hear, start, &|| Ok(())).unwrap_err().to_string();
        assert!(error.contains("guest 2 did not come up"), "{error}");
        drop(say);
        assert!(all_up(&hear, start, &|| Ok(())).is_err());
        let called_off = all_up(&hear, start, &|| Err(BenchError::CalledOff.into()));
        assert!(called_off.unwrap_err().is::<BenchError>());
    }
}
