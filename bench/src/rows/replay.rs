//! Traces on a modelled hard disk: what a cache smaller than the working set is worth.
//!
//! The first part of a trace warms the cache, the part after it is measured, on the disk alone and
//! behind the cache, one request at a time: so a mean latency is a device's, not a queue's. Real
//! traces come from the directory `HEARTH_TRACES` names; without it there is a made one.

use crate::args::Args;
use crate::load::Sample;
use crate::report::{Comparison, Outcome, Series, Wanted};
use crate::{fixture, made};
use anyhow::{Context, Result};
use hearth_replay::{NbdTarget, Options, Pace, Plan, Select, Source, Target, run, scan};
use hearth_rig::Hearth;
use hearth_rig::daemon::path;
use hearth_trace::{Info, Op, Reader};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Requests measured for every second of a run, ten seconds' work of the modelled disk; and how
/// many times as many warm the cache.
const PER_SECOND: u64 = 750;
const WARM_UP: u64 = 12;
/// Share of reads from which a trace is read-dominated.
const READS: f64 = 0.7;
/// Smallest pool: a few segments. A disk may use a fifth of its working set of it.
const FLASH_MIN: u64 = 64 << 20;
/// Mean latency without the cache over that with it that is wanted.
const GOAL: f64 = 5.0;

/// A trace that is played.
struct Piece {
    name: String,
    path: PathBuf,
    warm: u64,
    measured: u64,
    /// Bytes of different blocks in both parts.
    working_set: u64,
    end: u64,
}

impl Piece {
    /// The first requests of a trace; `None` if they are not mostly reads, of one disk.
    fn of(args: &Args, name: &str, file: &Path, reads: f64) -> Result<Option<Piece>> {
        let measured = if args.smoke {
            100
        } else {
            PER_SECOND * args.seconds
        };
        let all = measured * (WARM_UP + 1);
        let mut info = Info::new();
        let mut taken = 0;
        for record in Reader::open(file, hearth_trace::Options::default())?.take(all as usize) {
            let record = record?;
            if record.disk != 0 {
                return Ok(None);
            }
            taken += 1;
            if record.op != Op::Flush {
                info.add(&record);
            }
        }
        let sum = info.summary();
        if sum.read_share < reads || taken < all {
            return Ok(None);
        }
        let plan = scan(&select(file, 0, all))?;
        Ok(Some(Piece {
            name: name.to_owned(),
            path: file.to_owned(),
            warm: measured * WARM_UP,
            measured,
            working_set: sum.unique_blocks * 4096,
            end: plan.end,
        }))
    }

    fn flash(&self) -> u64 {
        (self.working_set / 5).next_multiple_of(1 << 20)
    }
}

/// The traces to play: those of `$HEARTH_TRACES` that are mostly reads, or a made one.
fn traces(args: &Args) -> Result<Vec<Piece>> {
    if let Some(dir) = std::env::var_os("HEARTH_TRACES").filter(|_| !args.smoke) {
        let files: BTreeSet<PathBuf> = std::fs::read_dir(&dir)
            .with_context(|| format!("HEARTH_TRACES={}", Path::new(&dir).display()))?
            .filter_map(|e| Some(e.ok()?.path()))
            .filter(|p| p.is_file())
            .collect();
        let mut out = Vec::new();
        for file in files {
            let name = file.file_name().and_then(|n| n.to_str()).unwrap_or("?");
            let name = name.split('.').next().unwrap_or(name).to_owned();
            // Other files lie beside traces.
            if let Ok(Some(piece)) = Piece::of(args, &name, &file, READS) {
                out.push(piece);
            }
        }
        return Ok(out);
    }
    let file = args.dir.join("made.trace");
    made::trace(&file, PER_SECOND * args.seconds.max(1) * (WARM_UP + 1), 1)?;
    let piece = Piece::of(args, "made", &file, READS)?;
    Ok(piece.into_iter().collect())
}

fn select(file: &Path, skip: u64, limit: u64) -> Select {
    Select {
        path: file.to_owned(),
        skip,
        limit: Some(limit),
        ..Select::default()
    }
}

/// Plays a part of a trace, one request at a time.
fn play(piece: &Piece, skip: u64, limit: u64, to: &str) -> Result<hearth_replay::Outcome> {
    let select = select(&piece.path, skip, limit);
    let plan: Plan = scan(&select)?;
    let mut target = NbdTarget::connect(to)?;
    let (size, align, most) = (target.size(), target.align(), target.len_max());
    let mut source = Source::open(&select, &plan, size, align, most)?;
    let options = Options {
        pace: Pace::Depth(1),
        verify: false,
        run: 1,
        grace_ns: hearth_replay::GRACE_NS,
    };
    let out = run(&mut source, &mut target, options, &mut |_| true)?;
    anyhow::ensure!(out.errors == 0, "{:?}", out.first_error);
    Ok(out)
}

/// A sparse file as large as the trace's disk: only its modelled speed counts.
fn origin(args: &Args, name: &str, piece: &Piece) -> Result<String> {
    let file = args.dir.join(name);
    let size = piece.end.next_multiple_of(1 << 20);
    let handle = std::fs::File::create(&file)?;
    handle.set_len(size)?;
    Ok(format!("model-hdd:{}", path(&file)))
}

/// All reads and writes of a replay as a sample; median and mean in words.
fn sample(out: &hearth_replay::Outcome) -> Sample {
    Sample {
        iops: (out.reads.count + out.writes.count) as f64 / out.seconds.max(1e-9),
        mean_us: out.reads.mean_us,
        p99_us: out.reads.p99_us,
        ..Sample::default()
    }
}

fn hits(hearth: &Hearth, disk: &str) -> Result<(u64, u64)> {
    let counter = |name| hearth.counter(disk, name);
    let hits = counter("read_hits")?;
    Ok((
        hits,
        hits + counter("read_partial_hits")? + counter("read_misses")?,
    ))
}

/// Warms a new disk behind the cache and measures it; the outcome and the hit ratio.
fn cached(
    args: &Args,
    piece: &Piece,
    more: &[&str],
) -> Result<(Hearth, hearth_replay::Outcome, f64)> {
    let hearth = fixture::pool_of(args, piece.flash().max(FLASH_MIN))?;
    let max = piece.flash().to_string();
    let mut words = vec!["--mode", "write-back", "--max", &max];
    words.extend(more);
    hearth.add("cached", &origin(args, "replay.img", piece)?, &words)?;
    play(piece, 0, piece.warm, &hearth.uri("cached"))?;
    let before = hits(&hearth, "cached")?;
    let out = play(piece, piece.warm, piece.measured, &hearth.uri("cached"))?;
    let after = hits(&hearth, "cached")?;
    let ratio = (after.0 - before.0) as f64 / (after.1 - before.1).max(1) as f64;
    Ok((hearth, out, ratio))
}

fn about(piece: &Piece, ratio: f64, out: &hearth_replay::Outcome) -> String {
    format!(
        "{}: {} requests after {} to warm, working set {} MiB, flash {} MiB; reads: hit ratio {:.1} %, mean {:.0} µs, median {:.0} µs, 99 % {:.0} µs",
        piece.name,
        piece.measured,
        piece.warm,
        piece.working_set >> 20,
        piece.flash() >> 20,
        ratio * 100.0,
        out.reads.mean_us,
        out.reads.p50_us,
        out.reads.p99_us,
    )
}

/// Measures a trace without and with the cache; and the hit ratio.
fn both(
    args: &Args,
    piece: &Piece,
) -> Result<(hearth_replay::Outcome, hearth_replay::Outcome, f64)> {
    let bare = fixture::pool_of(args, FLASH_MIN)?;
    let origin = origin(args, "replay-off.img", piece)?;
    bare.add("off", &origin, &["--mode", "off"])?;
    let off = play(piece, piece.warm, piece.measured, &bare.uri("off"))?;
    drop(bare);
    let (_, with, ratio) = cached(args, piece, &[])?;
    Ok((off, with, ratio))
}

/// Row `replay-hdd`.
pub fn hdd(args: &Args) -> Result<Outcome> {
    let mut all = Outcome::default();
    if args.peers_only {
        return Ok(all);
    }
    for piece in traces(args)? {
        let (off, with, ratio) = match both(args, &piece) {
            Ok(both) => both,
            // A trace of a disk larger than files can be must not cost the others.
            Err(e) => {
                all.notes
                    .push(format!("{} could not be played: {e:#}", piece.name));
                continue;
            }
        };
        for (name, out) in [("modelled disk", &off), ("hearth", &with)] {
            all.series.push(Series {
                name: format!("{}: {name}", piece.name),
                samples: vec![sample(out)],
            });
        }
        all.comparisons.push(Comparison::single(
            format!("{}: mean read without the cache / with it", piece.name),
            off.reads.mean_us / with.reads.mean_us.max(1e-9),
            "",
            Wanted::AtLeast(GOAL),
        ));
        all.notes.push(about(&piece, ratio, &with));
        all.notes.push(format!(
            "{}, without: mean {:.0} µs, median {:.0} µs, 99 % {:.0} µs",
            piece.name, off.reads.mean_us, off.reads.p50_us, off.reads.p99_us
        ));
        eprintln!("   {}", all.notes[all.notes.len() - 2]);
    }
    all.notes.push(
        "The hard disk is a model of a 7200 rpm desktop drive; its file is sparse. Depth 1, sequential bypass as by default.".to_owned(),
    );
    Ok(all)
}

/// Row `block-size`.
pub fn block_sizes(args: &Args) -> Result<Outcome> {
    let mut all = Outcome::default();
    if args.peers_only {
        return Ok(all);
    }
    for piece in traces(args)? {
        for size in ["4K", "16K", "64K", "256K", "1M"] {
            let (hearth, out, ratio) = cached(args, &piece, &["--block-size", size])?;
            let ram = hearth.pool_stats()?["ram"].as_u64().unwrap_or(0);
            let filled = hearth.counter("cached", "fills")? * 4096;
            let slots = hearth.pool_stats()?["capacity"].as_u64().unwrap_or(0) / 4096;
            all.series.push(Series {
                name: format!("{}: {size}", piece.name),
                samples: vec![sample(&out)],
            });
            all.notes.push(format!(
                "{size}, {}; filled {} MiB; RAM {:.1} bytes per 4 KiB of flash",
                about(&piece, ratio, &out),
                filled >> 20,
                ram as f64 / slots.max(1) as f64
            ));
            eprintln!("   {}", all.notes[all.notes.len() - 1]);
        }
    }
    all.notes
        .push("The hard disk is a model of a 7200 rpm desktop drive.".to_owned());
    Ok(all)
}
