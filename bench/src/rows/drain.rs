//! What guests feel while a flash device is emptied and taken out, put in, and replaced: the rates are those nobody has set. Only
//! what is asked while the command runs is timed, from its first moment to its answer: a load of fixed length would water that down.
//! And how fast one is replaced when there are no guests to give way to.

use super::several::without;
use crate::args::Args;
use crate::devices::{self, Limited};
use crate::fixture;
use crate::load::{Job, Sample, run};
use crate::report::{Comparison, Outcome, Series, Wanted};
use anyhow::{Context, Result, ensure};
use hearth_rig::Hearth;
use hearth_rig::daemon::path;
use hearth_rig::nbd::Client;
use hearth_rig::rng::Rng;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Connections, each with one read at a time.
const READERS: u64 = 4;
const BLOCK: u64 = 4096;
/// Room for a pool's own structures, and for what cleaning keeps free.
const SLACK: u64 = 256 << 20;
/// The longest wait of a guest for its answer is at most so much of a second: the daemon begins anew in it.
const PAUSE_MS: f64 = 1e3;

/// What each of the devices is read and written at, at most, between which is copied when nobody asks, in bytes a second.
const RATE: u64 = 200_000_000;

/// Latencies of reads in nanoseconds, and the seconds in which they were asked.
struct Reads {
    took: Vec<u64>,
    seconds: f64,
}

impl Reads {
    fn sample(&self) -> Result<Sample> {
        let requests = self.took.len() as f64;
        ensure!(requests >= 100.0, "too few reads to speak of a percentile");
        Ok(Sample {
            iops: requests / self.seconds,
            mean_us: self.took.iter().sum::<u64>() as f64 / requests / 1e3,
            p99_us: self.took[self.took.len() * 99 / 100] as f64 / 1e3,
            requests,
            ..Sample::default()
        })
    }

    fn longest_ms(&self) -> f64 {
        self.took.last().copied().unwrap_or(0) as f64 / 1e6
    }
}

/// Reads blocks of the disk at random for as long as `work` takes.
fn beside(
    hearth: &Hearth,
    size: u64,
    seed: u64,
    work: impl FnOnce() -> Result<()>,
) -> Result<Reads> {
    let clients: Vec<Client> = (0..READERS)
        .map(|_| Client::connect(&hearth.socket(), "d"))
        .collect::<std::io::Result<_>>()?;
    let over = AtomicBool::new(false);
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let readers: Vec<_> = clients
            .into_iter()
            .zip(0..)
            .map(|(mut client, n)| {
                let over = &over;
                scope.spawn(move || -> Result<Vec<u64>> {
                    let mut rng = Rng::new(seed * READERS + n);
                    let mut took = Vec::new();
                    while !over.load(Ordering::Relaxed) {
                        let since = Instant::now();
                        client.read(rng.below(size / BLOCK) * BLOCK, BLOCK as u32)?;
                        took.push(since.elapsed().as_nanos() as u64);
                    }
                    Ok(took)
                })
            })
            .collect();
        let worked = work();
        let seconds = begun.elapsed().as_secs_f64();
        over.store(true, Ordering::Relaxed);
        let mut took = Vec::new();
        for reader in readers {
            took.extend(reader.join().ok().context("a reader panicked")??);
        }
        worked?;
        took.sort_unstable();
        Ok(Reads { took, seconds })
    })
}

/// Reads beside each change of a pool's devices, and beside nothing.
pub fn drain(args: &Args) -> Result<Outcome> {
    if args.peers_only {
        return Ok(Outcome::default());
    }
    let size = (args.disk / 4).max(64 << 20);
    let device = |name: &str| fixture::file(&args.dir, name, 2 * size + SLACK);
    let (a, b, c) = (
        device("flash-a.img")?,
        device("flash-b.img")?,
        device("flash-c.img")?,
    );
    let origin = fixture::file(&args.dir, "drain-origin.img", size)?;
    let mut series = ["idle", "remove-flash", "add-flash", "replace-flash"].map(|name| Series {
        name: name.to_owned(),
        samples: Vec::new(),
    });
    let mut lasted = [const { Vec::new() }; 4];
    let mut longest = [const { Vec::new() }; 4];
    for round in 0..args.rounds {
        let flash = [path(&a), path(&b)];
        let hearth = fixture::pool_on(args, &flash, &[], &fixture::HELD_BACK, Vec::new())?;
        fixture::add(&hearth, "d", path(&origin), "write-back")?;
        let changes: [Option<Vec<&str>>; 4] = [
            None,
            Some(vec!["pool", "remove-flash", path(&b)]),
            Some(vec!["pool", "add-flash", path(&b), "--force"]),
            Some(vec!["pool", "replace-flash", path(&b), path(&c), "--force"]),
        ];
        for (n, change) in changes.iter().enumerate() {
            if n != 2 {
                everything_is_dirty(&hearth, size, round)?;
            }
            let reads = beside(&hearth, size, round as u64 + 1, || match change {
                Some(words) => hearth.ok(words).map(drop),
                None => {
                    std::thread::sleep(std::time::Duration::from_secs(args.seconds));
                    Ok(())
                }
            })?;
            series[n].samples.push(reads.sample()?);
            lasted[n].push(reads.seconds);
            longest[n].push(reads.longest_ms());
        }
        drop(hearth);
    }
    let mut outcome = Outcome::default();
    let names = series.each_ref().map(|s| s.name.clone());
    outcome.series.extend(series);
    for (n, name) in names.iter().enumerate().skip(1) {
        outcome.compare_p99(name, "idle", Wanted::AtMost(3.0));
        for (what, values, unit, wanted) in [
            (
                "the longest wait for a read",
                &longest[n],
                "ms",
                Wanted::AtMost(PAUSE_MS),
            ),
            ("the command", &lasted[n], "s", Wanted::Shown),
        ] {
            outcome.comparisons.push(Comparison {
                what: format!("{name}: {what}"),
                values: values.clone(),
                unit: unit.to_owned(),
                wanted,
            });
        }
    }
    outcome.notes.push(format!(
        "Random 4 KiB reads over {READERS} connections of a disk of {} MiB that is dirty on two flash files of one device. What is taken out or replaced holds about half of it.",
        size >> 20
    ));
    let files: [&Path; 4] = [&a, &b, &c, &origin];
    files.iter().for_each(|file| fixture::remove(file));
    Ok(outcome)
}

/// A device is replaced, and nobody asks for anything.
pub fn replaced(args: &Args) -> Result<Outcome> {
    if args.peers_only {
        return Ok(Outcome::default());
    }
    if let Some(missing) = devices::no_limits() {
        return without(missing);
    }
    // Half of a device: of more, some would be written back meanwhile.
    let size = (args.disk / 8).max(64 << 20);
    let bytes = 2 * size + SLACK;
    let device = |name: &str| fixture::file(&args.dir, name, bytes);
    let files = [device("flash-a.img")?, device("flash-b.img")?];
    let origin = fixture::file(&args.dir, "replaced-origin.img", size)?;
    let limited = Limited::new("replaced", &files, RATE)?;
    let (mut shares, mut speeds) = (Vec::new(), Vec::new());
    for round in 0..args.rounds {
        let [old, new] = limited.devices()[..] else {
            return without("two loop devices");
        };
        let wrap = limited.wrap();
        let hearth = fixture::pool_on(args, &[old], &[], &fixture::HELD_BACK, wrap)?;
        fixture::add(&hearth, "d", path(&origin), "write-back")?;
        everything_is_dirty(&hearth, size, round)?;
        let begun = Instant::now();
        hearth.ok(&["pool", "replace-flash", old, new, "--force"])?;
        let speed = bytes as f64 / begun.elapsed().as_secs_f64();
        shares.push(speed / RATE as f64);
        speeds.push(speed / 1e6);
    }
    let mut outcome = Outcome::default();
    for (what, values, unit, wanted) in [
        (
            "bytes a second / what the devices can do",
            shares,
            "",
            Wanted::Shown,
        ),
        ("replaced", speeds, "MB/s", Wanted::Shown),
    ] {
        outcome.comparisons.push(Comparison {
            what: what.to_owned(),
            values,
            unit: unit.to_owned(),
            wanted,
        });
    }
    outcome.notes.push(format!(
        "From the command to its answer, for a device of {} MiB. The kernel lets the daemon read {} MB/s and write as much of each of the two, which are loop devices over files.",
        bytes >> 20,
        RATE / 1_000_000
    ));
    drop(limited);
    files.iter().for_each(|file| fixture::remove(file));
    fixture::remove(&origin);
    Ok(outcome)
}

/// Writes the whole disk once: all of it is on flash, and has to be moved if its device goes.
fn everything_is_dirty(hearth: &Hearth, size: u64, round: usize) -> Result<()> {
    let job = Job {
        once: true,
        seed: round as u64 + 1,
        ..Job::sequential("write", 8, 600, size)
    };
    run(&job, &fixture::contender(hearth, "d", "d")?)?;
    let stats = hearth.stats("d")?;
    let dirty = stats["dirty"]
        .as_u64()
        .context("no dirty bytes in the statistics")?;
    ensure!(
        dirty > size * 3 / 4,
        "only {dirty} of {size} bytes are dirty"
    );
    Ok(())
}
