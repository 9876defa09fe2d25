//! Files of a datastore that are kept on flash: a scratch file that a host like ESXi writes, as it does its swap of guests, and a pinned file
//! that is read for the first time. Each beside a file like any other, on the same modelled hard disk.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use hearth_rig::{Hearth, wait};
use serde_json::Value;

use super::nfs::{Side, evict, in_turn, named};
use super::storage_vm::{SIZE_MAX, lacks, put, serve, work_for};
use crate::args::Args;
use crate::esxi::Host;
use crate::fixture;
use crate::load::Job;
use crate::modelled::Tree;
use crate::nfs::{Client, Wire};
use crate::report::{Comparison, Outcome, Wanted};

/// Longest that a pinned file is waited for: it is read from the hard disk.
const PIN_LIMIT: Duration = Duration::from_secs(1800);
/// Least seconds of the host under load.
const LOAD_MIN: u64 = 10;
/// The share of reads of a pinned file that may miss, of what other reads flood out.
const FLOOD_MAX: f64 = 0.05;
const SWAP: &str = "vm.vswp";
const PINNED: &str = "pinned.img";
const PLAIN: &str = "plain.img";

/// What is known of a file of the datastore.
fn known(hearth: &Hearth, name: &str) -> Result<Value> {
    let text = hearth.ok(&["datastore", "files", "vms", "--json"])?;
    let all: Vec<Value> = serde_json::from_str(&text)?;
    let mut all = all.into_iter();
    all.find(|file| file["path"] == name)
        .with_context(|| format!("{name} is not known"))
}

/// See the module.
pub fn kept(args: &Args) -> Result<Outcome> {
    if args.peers_only {
        return Ok(Outcome::default());
    }
    if let Some(outcome) = lacks() {
        return Ok(outcome);
    }
    let size = args.disk.min(SIZE_MAX);
    let disk = Tree::new(&args.dir, &args.hearth, size * 4)?;
    let mut all = Outcome::default();
    {
        // Half of it may be promised to scratch files, and most of it be kept for pinned ones.
        let hearth = fixture::pool(args, size * 6)?;
        let set = |words: [&str; 2]| {
            let words = [&["datastore", "set", "vms", "--match"], &words[..]].concat();
            hearth.ok(&words)
        };
        let at = serve(&hearth, &[&disk], "vms", size)?;
        let dir = disk.root().join("vms");
        set(["*.vswp", "--scratch"])?;
        // It has its length and nothing in it, as hosts make it.
        std::fs::File::create(dir.join(SWAP))?.set_len(size)?;
        swap(args, &hearth, at, &dir, size, &mut all)?;

        for name in [PINNED, PLAIN] {
            evict(&fixture::file(&dir, name, size)?)?;
        }
        set([PINNED, "--pin"])?;
        wait::until("the pinned file is all on flash", PIN_LIMIT, || {
            (known(&hearth, PINNED).ok()?["pin"] == "filled").then_some(())
        })?;
        first_reads(args, &hearth, at, &dir, size, &mut all)?;
        drop(hearth);
    }
    all.notes.push(format!(
        "Files of {} MiB on a modelled hard disk. The host writes as in `nfs-host`; what it wrote to the scratch file was read back over NFS, and of \
         that file the hard disk had no block. The files that are read were in no cache but by their pin.",
        size >> 20
    ));
    Ok(all)
}

/// A host writes a scratch file, and one that is written back.
fn swap(
    args: &Args,
    hearth: &Hearth,
    at: std::net::SocketAddr,
    dir: &Path,
    size: u64,
    all: &mut Outcome,
) -> Result<()> {
    let seconds = match args.smoke {
        true => 3,
        false => args.seconds.max(LOAD_MIN),
    };
    let mut rates = Vec::new();
    for (what, name) in [("scratch", SWAP), ("written back", "disk.img")] {
        let host = Host::start(at, "/vms", name, size)?;
        let (took, told) = work_for(&host, seconds)?;
        let written = host.end()?;
        put(all, what, took, &told);
        rates.push(told.writes as f64 / took);
        let places = written.check_over(&mut Client::connect(at, "/vms", name)?)?;
        ensure!(places > 0, "nothing was written");
        hearth.ok(&["datastore", "flush", "vms"])?;
        if name == SWAP {
            ensure!(known(hearth, SWAP)?["scratch"] == true);
            let blocks = std::fs::metadata(dir.join(SWAP))?.blocks();
            ensure!(blocks == 0, "the hard disk has {blocks} blocks of it");
        } else {
            written.check(&dir.join(name))?;
        }
    }
    if let [scratch, back] = rates[..] {
        all.comparisons.push(Comparison::single(
            "durable writes: scratch / written back",
            scratch / back,
            "",
            Wanted::Shown,
        ));
    }
    Ok(())
}

/// A pinned file and another one are read for the first time.
fn first_reads(
    args: &Args,
    hearth: &Hearth,
    at: std::net::SocketAddr,
    dir: &Path,
    size: u64,
    all: &mut Outcome,
) -> Result<()> {
    let wire = |name| Client::connect(at, "/vms", name).map(|c| Side::Own(Wire::Nfs(c)));
    let mut sides = [
        ("nfs, pinned", wire(PINNED)?),
        ("nfs, not read before", wire(PLAIN)?),
    ];
    let pid = hearth.pid().context("no daemon")?;
    // The page cache is not what is measured.
    let cold = || evict(&dir.join(PLAIN));
    for depth in [1, 24] {
        let job = Job::random("randread", depth, args.seconds, size);
        let mut outcome = in_turn(args, &job, pid, &mut sides, &cold, &|| Ok(()))?;
        outcome.compare_iops("nfs, pinned", "nfs, not read before", Wanted::Shown);
        named(&mut outcome, "randread");
        all.at_depth(depth, outcome);
    }
    // What floods the cache may take a little of what is pinned, until it is read in again: docs/flash-only.md.
    let counters = &known(hearth, PINNED)?["counters"];
    let count = |name: &str| {
        let count = counters[name].as_f64();
        count.with_context(|| format!("no count of {name}: {counters}"))
    };
    let (hits, misses) = (count("read_hits")?, count("read_misses")?);
    let share = misses / (hits + misses).max(1.0);
    ensure!(
        share <= FLOOD_MAX,
        "{misses} of {} reads of the pinned file missed the flash",
        hits + misses
    );
    all.notes.push(format!(
        "{misses} of {} reads of the pinned file missed the flash.",
        hits + misses
    ));
    Ok(())
}
