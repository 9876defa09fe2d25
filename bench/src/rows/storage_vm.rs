//! A storage VM: two modelled hard disks, one flash file, and a datastore that lies on both, over NFS.

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use hearth_rig::daemon::path;
use hearth_rig::{Hearth, wait};

use super::nfs::{Side, evict, fill, in_turn, named};
use crate::args::Args;
use crate::esxi::{Host, Told};
use crate::fixture;
use crate::load::Job;
use crate::modelled::{self, Tree};
use crate::nfs::{Client, Wire};
use crate::peers;
use crate::report::{Comparison, Outcome, Wanted};

/// Largest file: it is written to both disks in full, and after each run again.
pub(super) const SIZE_MAX: u64 = 256 << 20;
/// Longest that the second tree is waited for.
const COPY_LIMIT: Duration = Duration::from_secs(1800);
/// Least seconds of the host under load.
const LOAD_MIN: u64 = 30;
/// Flash that a host fills, so that its writes wait for the disk.
const LITTLE: u64 = 128 << 20;
/// Longest a heartbeat may be unanswered, as it is wanted.
const BEAT_MS: f64 = 1000.0;

/// What this host lacks, in words for a report.
pub(super) fn lacks() -> Option<Outcome> {
    let lacks = modelled::missing()?;
    let note = format!("Not measured: a modelled hard disk below a directory takes {lacks}.");
    Some(Outcome {
        notes: vec![note],
        ..Outcome::default()
    })
}

/// Two disks.
fn disks(args: &Args, size: u64) -> Result<[Tree; 2]> {
    let one = |name: &str| Tree::new(&args.dir.join(name), &args.hearth, size);
    Ok([one("disk-a")?, one("disk-b")?])
}

/// An address that is given to nobody who asks for any: for a client that goes on with it after a restart.
fn lasting_address() -> Result<SocketAddr> {
    let free = (10_000..30_000u16).find_map(|port| TcpListener::bind(("127.0.0.1", port)).ok());
    Ok(free.context("a free port")?.local_addr()?)
}

/// The datastore `name`, below each of these disks, with a file of `size` bytes; where it is served.
pub(super) fn serve(hearth: &Hearth, disks: &[&Tree], name: &str, size: u64) -> Result<SocketAddr> {
    let dirs: Vec<PathBuf> = disks.iter().map(|disk| disk.root().join(name)).collect();
    for dir in &dirs {
        std::fs::create_dir_all(dir)?;
    }
    fixture::file(&dirs[0], "disk.img", size)?;
    let mut words = vec!["datastore", "add"];
    match &dirs[..] {
        [dir] => words.push(path(dir)),
        _ => {
            words.push(name);
            words.extend(dirs.iter().flat_map(|dir| ["--mirror", path(dir)]));
        }
    }
    let at = lasting_address()?;
    let listen = at.to_string();
    words.extend(["--nfs", "--listen", &listen]);
    words.extend(["--client", "127.0.0.1=rw,root,insecure"]);
    hearth.ok(&words)?;
    Ok(at)
}

fn shown(hearth: &Hearth, name: &str) -> Result<serde_json::Value> {
    let shown = hearth.ok(&["datastore", "show", name, "--json"])?;
    Ok(serde_json::from_str(&shown)?)
}

/// How the trees are.
fn states(hearth: &Hearth, name: &str) -> Result<Vec<String>> {
    let shown = shown(hearth, name)?;
    let trees = shown["trees"].as_array().context("trees")?.iter();
    let state = trees.map(|tree| tree["state"].as_str().unwrap_or_default().to_owned());
    Ok(state.collect())
}

fn wait_states(hearth: &Hearth, name: &str, wanted: impl Fn(&[String]) -> bool) -> Result<()> {
    wait::until("the trees are as they should be", COPY_LIMIT, || {
        wanted(&states(hearth, name).ok()?).then_some(())
    })
}

fn whole(states: &[String]) -> bool {
    states.iter().all(|state| state == "current")
}

/// Random reads and durable writes, one at a time and 24: a hard disk and the flash as they are, the datastore without its cache and with it.
pub fn table(args: &Args) -> Result<Outcome> {
    if args.peers_only {
        return Ok(Outcome::default());
    }
    if let Some(outcome) = lacks() {
        return Ok(outcome);
    }
    let size = args.disk.min(SIZE_MAX);
    let disks = disks(args, size * 3)?;
    let both = [&disks[0], &disks[1]];
    let mut all = Outcome::default();
    {
        let hearth = fixture::pool(args, size * 4)?;
        let bare = fixture::file(disks[0].root(), "bare.img", size)?;
        let flash = fixture::file(&args.dir, "raw.img", size)?;
        let cached = serve(&hearth, &both, "vms", size)?;
        let plain = serve(&hearth, &both, "plain", size)?;
        hearth.ok(&["datastore", "set", "plain", "--match", "*", "--mode", "off"])?;
        for name in ["vms", "plain"] {
            wait_states(&hearth, name, whole)?;
        }
        let wire = |at, export| Client::connect(at, export, "disk.img").map(Wire::Nfs);
        fill(&mut wire(cached, "/vms")?, size)?;
        let drain = || hearth.ok(&["datastore", "flush", "vms"]).map(drop);
        drain()?;
        let mut sides = [
            ("hard disk", Side::File(peers::raw(&bare))),
            ("flash", Side::File(peers::raw(&flash))),
            ("nfs, cache off", Side::Own(wire(plain, "/plain")?)),
            ("nfs, cache on", Side::Own(wire(cached, "/vms")?)),
        ];
        let pid = hearth.pid().context("no daemon")?;
        // The page cache is not what is measured.
        let cold = || {
            disks
                .iter()
                .try_for_each(|disk| evict(&disk.root().join("plain/disk.img")))
        };
        for rw in ["randread", "randwrite"] {
            for depth in [1, 24] {
                let job = Job::random(rw, depth, args.seconds, size);
                let mut outcome = in_turn(args, &job, pid, &mut sides, &cold, &drain)?;
                for other in ["nfs, cache off", "hard disk", "flash"] {
                    outcome.compare_iops("nfs, cache on", other, Wanted::Shown);
                }
                named(&mut outcome, rw);
                all.at_depth(depth, outcome);
            }
        }
        // Nobody may have a file of a tree open when it is taken away.
        drop((sides, hearth));
    }
    all.notes.push(format!(
        "Files of {} MiB, on two models of a 7200 rpm desktop drive below ext4 each; over NFS every write is durable when it is answered, \
         to the bare hard disk and the flash file it is one with O_DIRECT. What is written is written back after each run.",
        size >> 20
    ));
    Ok(all)
}

/// Puts down what a host was told in some seconds.
pub(super) fn put(outcome: &mut Outcome, when: &str, seconds: f64, told: &Told) {
    eprintln!("   {when}: {seconds:.1} s, {told:?}");
    let mut add = |what: &str, value: f64, unit: &str| {
        let what = format!("{when}: {what}");
        let comparison = Comparison::single(what, value, unit, Wanted::Shown);
        outcome.comparisons.push(comparison);
    };
    add("durable writes", told.writes as f64 / seconds, "/s");
    add("longest wait of a write", told.wait_ms, "ms");
    add("longest wait of a heartbeat", told.beat_ms, "ms");
    add("heartbeats", told.beats as f64, "");
    add("renewals of the lock", told.renewals as f64, "");
    add("calls to be asked again", told.again as f64, "");
}

fn works(host: &Host) -> Result<()> {
    ensure!(!host.has_failed(), "the host does not write any more");
    Ok(())
}

/// A host that writes for a while; what it was told.
pub(super) fn work_for(host: &Host, seconds: u64) -> Result<(f64, Told)> {
    let begun = Instant::now();
    for _ in 0..seconds {
        works(host)?;
        sleep(Duration::from_secs(1));
    }
    Ok((begun.elapsed().as_secs_f64(), host.told()))
}

/// A host that writes durably without pause for half a minute at least, to one hard disk behind the cache: with flash for all, and with so little
/// that writes wait for the disk.
pub fn heartbeats(args: &Args) -> Result<Outcome> {
    if args.peers_only {
        return Ok(Outcome::default());
    }
    if let Some(outcome) = lacks() {
        return Ok(outcome);
    }
    let size = args.disk.min(SIZE_MAX);
    let seconds = if args.smoke {
        3
    } else {
        args.seconds.max(LOAD_MIN)
    };
    let disk = Tree::new(&args.dir, &args.hearth, size)?;
    let mut all = Outcome::default();
    for (what, little) in [("flash for all", false), ("little flash", true)] {
        let hearth = match little {
            true => fixture::pool_of(args, LITTLE)?,
            false => fixture::pool(args, size * 2)?,
        };
        let at = serve(&hearth, &[&disk], "vms", size)?;
        let host = Host::start(at, "/vms", "disk.img", size)?;
        let (took, told) = work_for(&host, seconds)?;
        let written = host.end()?;
        put(&mut all, what, took, &told);
        if !args.smoke {
            all.comparisons.push(Comparison::single(
                format!("{what}: longest wait of a heartbeat, as it is wanted"),
                told.beat_ms,
                "ms",
                Wanted::AtMost(BEAT_MS),
            ));
        }
        hearth.ok(&["datastore", "flush", "vms"])?;
        written.check(&disk.root().join("vms/disk.img"))?;
        drop(hearth);
    }
    all.notes.push(format!(
        "Durable writes of 4 to 64 KiB, 32 in flight, for {seconds} s, all over a file of {} MiB on a modelled hard disk; a heartbeat each \
         second and a renewal of the lock each ten, over connections of their own. Afterwards the file held what was answered.",
        size >> 20
    ));
    Ok(all)
}

/// The same host while one of two hard disks is pulled and put back, the daemon being killed while it gets what it missed.
pub fn loss(args: &Args) -> Result<Outcome> {
    if args.peers_only {
        return Ok(Outcome::default());
    }
    if let Some(outcome) = lacks() {
        return Ok(outcome);
    }
    let size = args.disk.min(SIZE_MAX);
    let seconds = if args.smoke { 3 } else { args.seconds.max(10) };
    let disks = disks(args, size)?;
    let both = [&disks[0], &disks[1]];
    let mut all = Outcome::default();
    let mut hearth = fixture::pool(args, size * 2)?;
    let at = serve(&hearth, &both, "vms", size)?;
    wait_states(&hearth, "vms", whole)?;
    let host = Host::start(at, "/vms", "disk.img", size)?;
    let done = pulled(&host, &mut hearth, &disks[0], seconds, &mut all);
    let written = match (done, host.end()) {
        (Ok(()), written) => written?,
        (Err(e), Ok(_)) => return Err(e),
        (Err(e), Err(why)) => return Err(e.context(format!("{why:#}"))),
    };
    hearth.ok(&["datastore", "flush", "vms"])?;
    for disk in &disks {
        let places = written.check(&disk.root().join("vms/disk.img"))?;
        ensure!(places > 0, "nothing was written");
    }
    all.notes.push(format!(
        "A file of {} MiB on two modelled hard disks, and the load of `nfs-host`. Afterwards either disk alone held what was answered.",
        size >> 20
    ));
    drop(hearth);
    Ok(all)
}

/// One of two disks under a host's load is pulled and put back.
fn pulled(
    host: &Host,
    hearth: &mut Hearth,
    disk: &Tree,
    seconds: u64,
    all: &mut Outcome,
) -> Result<()> {
    let (took, told) = work_for(host, seconds)?;
    put(all, "both disks", took, &told);

    disk.pull()?;
    let begun = Instant::now();
    wait_states(hearth, "vms", |states| states[0] == "out")?;
    let (_, told) = work_for(host, seconds)?;
    put(all, "one pulled", begun.elapsed().as_secs_f64(), &told);

    disk.plug()?;
    let begun = Instant::now();
    wait_states(hearth, "vms", |states| states[0] != "out")?;
    hearth.kill9()?;
    let killed = Instant::now();
    host.told();
    hearth.start()?;
    wait::until("writes are answered again", COPY_LIMIT, || {
        (host.writes() > 0 || host.has_failed()).then_some(())
    })?;
    works(host)?;
    let silent = killed.elapsed();
    wait_states(hearth, "vms", whole)?;
    let took = begun.elapsed().as_secs_f64();
    let told = host.told();
    put(all, "put back, and the daemon killed", took, &told);
    for (what, value) in [
        (
            "from the kill to the next durable write",
            silent.as_secs_f64(),
        ),
        ("until the disk that was pulled had everything", took),
    ] {
        let comparison = Comparison::single(what, value, "s", Wanted::Shown);
        all.comparisons.push(comparison);
    }

    let (took, told) = work_for(host, seconds)?;
    put(all, "both again", took, &told);
    Ok(())
}
