//! A datastore's files over NFS beside a disk of the same daemon over NBD, by one client.

use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use hearth_rig::Hearth;
use hearth_rig::daemon::path;
use hearth_rig::nbd;

use crate::args::Args;
use crate::bare_nfs;
use crate::fixture;
use crate::ganesha::{Ganesha, Limit};
use crate::load::{self, Job};
use crate::modelled;
use crate::nfs::{Client, Durable, Wire, run};
use crate::peers::{self, Contender};
use crate::report::{Outcome, Series, Wanted};

/// Bytes of a write by which a disk is brought into the cache. They come in no order: what is written in sequence may
/// go past the cache.
const PIECE: u64 = 64 << 10;
const PIECES_IN_FLIGHT: usize = 8;

/// What is measured.
pub(super) enum Side {
    /// Over a connection to our daemon.
    Own(Wire),
    /// Over a connection to another server, which this process is.
    Peer(Wire, u32),
    /// A file as it is.
    File(Contender),
}

/// A daemon with a disk and with a datastore of one file.
struct Lab {
    hearth: Hearth,
    server: SocketAddr,
}

impl Lab {
    fn new(args: &Args) -> Result<Lab> {
        Lab::below(args, &args.dir, args.disk, &[])
    }

    /// The same by a daemon with further options; both are below `dir`, and have `size` bytes.
    fn below(args: &Args, dir: &Path, size: u64, options: &[&str]) -> Result<Lab> {
        let state = args.dir.join("state");
        let options = [&["--state-dir", path(&state)], options].concat();
        let hearth = fixture::pool_served_with(args, size * 4, &options)?;
        let origin = fixture::file(dir, "origin.img", size)?;
        fixture::add(&hearth, "disk", path(&origin), "write-back")?;
        let vms = dir.join("vms");
        std::fs::create_dir_all(&vms)?;
        fixture::file(&vms, "disk.img", size)?;
        let server = serve(&hearth, &vms)?;
        Ok(Lab { hearth, server })
    }

    fn nbd(&self, durable: Durable) -> Result<Wire> {
        let client = nbd::Client::connect(&self.hearth.socket(), "disk")?;
        Ok(Wire::Nbd(client, durable))
    }

    fn client(&self) -> Result<Client> {
        Client::connect(self.server, "/vms", "disk.img")
    }

    fn nfs(&self) -> Result<Wire> {
        Ok(Wire::Nfs(self.client()?))
    }

    /// Brings all of a disk into the cache, and writes it back.
    fn warm(&self, wire: &mut Wire, size: u64) -> Result<()> {
        fill(wire, size)?;
        self.drain()
    }

    fn drain(&self) -> Result<()> {
        self.hearth.ok(&["disk", "flush", "disk"])?;
        self.hearth.ok(&["datastore", "flush", "vms"])?;
        Ok(())
    }

    /// Runs `job` over every wire in turn, round by round.
    fn rounds(&self, args: &Args, job: &Job, sides: &mut [(&str, Side)]) -> Result<Outcome> {
        self.rounds_after(args, job, sides, &|| Ok(()))
    }

    /// The same; `before` is done before each run.
    fn rounds_after(
        &self,
        args: &Args,
        job: &Job,
        sides: &mut [(&str, Side)],
        before: &dyn Fn() -> Result<()>,
    ) -> Result<Outcome> {
        let pid = self.hearth.pid().context("no daemon")?;
        in_turn(args, job, pid, sides, before, &|| self.drain())
    }
}

/// Runs `job` on every side in turn, round by round; `pid` is the daemon's. Before each run `before` is done, and after each that wrote
/// something, `drain`.
pub(super) fn in_turn(
    args: &Args,
    job: &Job,
    pid: u32,
    sides: &mut [(&str, Side)],
    before: &dyn Fn() -> Result<()>,
    drain: &dyn Fn() -> Result<()>,
) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    for (name, _) in sides.iter() {
        outcome.series.push(Series {
            name: (*name).to_owned(),
            samples: Vec::new(),
        });
    }
    for round in 0..args.rounds {
        for ((name, side), series) in sides.iter_mut().zip(&mut outcome.series) {
            let seed = round as u64 + 1;
            let job = Job {
                seed,
                ..job.clone()
            };
            before()?;
            let sample = match side {
                Side::Own(wire) => run(&job, wire, pid)?,
                Side::Peer(wire, pid) => run(&job, wire, *pid)?,
                Side::File(file) => load::run(&job, file)?,
            };
            eprintln!("   round {seed}: {name:16} {:9.0} requests/s", sample.iops);
            series.samples.push(sample);
            if !job.rw.ends_with("read") {
                drain()?;
            }
        }
    }
    Ok(outcome)
}

/// Writes all of a disk, by which it is brought into the cache.
pub(super) fn fill(wire: &mut Wire, size: u64) -> Result<()> {
    let data = vec![0x5a; PIECE as usize];
    let pieces = size / PIECE;
    let mut flying = 0;
    for n in 0..pieces {
        // Odd, so that every piece comes once, and far from its neighbours.
        let at = n.wrapping_mul(0x9e37_79b1) % pieces.next_power_of_two();
        if at < pieces {
            wire.write(at * PIECE, &data)?;
            flying += 1;
        }
        if flying == PIECES_IN_FLIGHT {
            wire.receive()?;
            flying -= 1;
        }
    }
    for _ in 0..flying {
        wire.receive()?;
    }
    Ok(())
}

/// Serves a directory as a datastore of its name; its address.
fn serve(hearth: &Hearth, dir: &Path) -> Result<SocketAddr> {
    hearth.ok(&[
        "datastore",
        "add",
        path(dir),
        "--nfs",
        "--listen",
        "127.0.0.1:0",
        "--client",
        "127.0.0.1=rw,root,insecure",
    ])?;
    let name = dir.file_name().context("a directory with a name")?;
    let name = name.to_str().context("a name in UTF-8")?;
    let shown = hearth.ok(&["datastore", "show", name, "--json"])?;
    let shown: serde_json::Value = serde_json::from_str(&shown)?;
    Ok(shown["listen"].as_str().context("an address")?.parse()?)
}

/// Warm reads, one at a time and many.
pub fn reads(args: &Args) -> Result<Outcome> {
    if args.peers_only {
        return Ok(Outcome::default());
    }
    let lab = Lab::new(args)?;
    // On the flash itself: two files on one disk may differ in speed by half.
    let bare = bare_nfs::Server::start(lab.hearth.flash())?;
    let mut sides = [
        ("nbd", Side::Own(lab.nbd(Durable::Itself)?)),
        ("nfs", Side::Own(lab.nfs()?)),
        (
            "bare nfs loop",
            Side::Peer(Wire::Nfs(bare.client()?), bare.pid()),
        ),
    ];
    for wire in [&mut lab.nbd(Durable::Itself)?, &mut lab.nfs()?] {
        lab.warm(wire, args.disk)?;
    }
    let mut all = Outcome::default();
    let from_flash = || -> Result<f64> {
        let counters = &lab.hearth.pool_stats()?["spans"][0]["counters"];
        let bytes = counters["flash_read_bytes"].as_f64();
        bytes.context("no bytes read in the statistics")
    };
    let before = from_flash()?;
    for depth in [1, 32] {
        let job = Job::random("randread", depth, args.seconds, args.disk);
        let mut outcome = lab.rounds(args, &job, &mut sides)?;
        outcome.compare_iops("nfs", "nbd", Wanted::AtLeast(0.6));
        outcome.compare_cpu("nfs", "nbd", Wanted::Shown);
        outcome.compare_iops("nfs", "bare nfs loop", Wanted::Shown);
        all.at_depth(depth, outcome);
    }
    let ours = all.series.iter().filter(|s| !s.name.contains("bare"));
    let requests = ours.flat_map(|s| &s.samples);
    let asked: f64 = requests.map(|s| s.requests * 4096.0).sum();
    all.notes.push(format!(
        "{:.1} % of what was read came from flash.",
        (from_flash()? - before) / asked * 100.0
    ));
    Ok(all)
}

/// Durable writes, one at a time and many.
pub fn writes(args: &Args) -> Result<Outcome> {
    if args.peers_only {
        return Ok(Outcome::default());
    }
    let lab = Lab::new(args)?;
    let mut sides = [
        ("nbd, flushed", Side::Own(lab.nbd(Durable::ByFlush)?)),
        ("nbd, FUA", Side::Own(lab.nbd(Durable::Itself)?)),
        ("nfs", Side::Own(lab.nfs()?)),
    ];
    let mut all = Outcome::default();
    for (depth, wanted) in [(1, Wanted::AtLeast(0.7)), (32, Wanted::Shown)] {
        let job = Job::random("randwrite", depth, args.seconds, args.disk);
        let mut outcome = lab.rounds(args, &job, &mut sides)?;
        outcome.compare_iops("nfs", "nbd, flushed", wanted);
        outcome.compare_iops("nfs", "nbd, FUA", Wanted::Shown);
        outcome.compare_cpu("nfs", "nbd, FUA", Wanted::Shown);
        all.at_depth(depth, outcome);
    }
    Ok(all)
}

/// Long requests in sequence beside the flash file as it is. Writes are durable at the end, or each when it is answered.
/// Writing back waits until the run is over, as in the rows over NBD.
pub fn sequential(args: &Args) -> Result<Outcome> {
    if args.peers_only {
        return Ok(Outcome::default());
    }
    let lab = Lab::below(args, &args.dir, args.disk, &fixture::HELD_BACK)?;
    lab.hearth.ok(&[
        "datastore",
        "set",
        "vms",
        "--match",
        "*",
        "--seq-cutoff",
        "0",
    ])?;
    lab.warm(&mut lab.nfs()?, args.disk)?;
    let raw = fixture::file(&args.dir, "raw.img", args.disk)?;
    let unstable = || Ok::<_, anyhow::Error>(Side::Own(Wire::Nfs(lab.client()?.unstable())));
    let mut all = Outcome::default();
    for (rw, file) in [("read", lab.hearth.flash()), ("write", &raw)] {
        let job = Job {
            bs: 1 << 20,
            ..Job::sequential(rw, 8, args.seconds, args.disk)
        };
        let bare = bare_nfs::Server::start(file)?;
        let loop_at = Wire::Nfs(bare.client()?.unstable());
        let mut sides = vec![
            ("raw", Side::File(peers::raw(file))),
            ("bare nfs loop", Side::Peer(loop_at, bare.pid())),
            ("nfs", unstable()?),
        ];
        if rw == "write" {
            sides.push(("nfs, each durable", Side::Own(lab.nfs()?)));
        }
        let mut outcome = lab.rounds(args, &job, &mut sides)?;
        outcome.compare_iops("nfs", "raw", Wanted::AtLeast(0.8));
        outcome.compare_iops("nfs, each durable", "raw", Wanted::Shown);
        outcome.compare_iops("bare nfs loop", "raw", Wanted::Shown);
        outcome.compare_iops("nfs", "bare nfs loop", Wanted::Shown);
        outcome.compare_cpu("nfs", "bare nfs loop", Wanted::Shown);
        named(&mut outcome, &format!("{rw}s"));
        all.series.extend(outcome.series);
        all.comparisons.extend(outcome.comparisons);
    }
    all.notes.push(format!(
        "The origin gets {} a second while clients write (`--destage-rate`): the flash alone.",
        fixture::HELD_BACK[1]
    ));
    Ok(all)
}

/// Largest file on the modelled hard disk: it is written there in full, and written back after each run.
const ON_DISK_MAX: u64 = 256 << 20;

/// A datastore on a modelled hard disk: the same server with its cache and without, and a disk over NBD beside it.
pub fn hard_disk(args: &Args) -> Result<Outcome> {
    let mut all = Outcome::default();
    if args.peers_only {
        return Ok(all);
    }
    if let Some(lacks) = modelled::missing() {
        all.notes.push(format!(
            "Not measured: a modelled hard disk below a directory takes {lacks}."
        ));
        return Ok(all);
    }
    let size = args.disk.min(ON_DISK_MAX);
    let tree = modelled::Tree::new(&args.dir, &args.hearth, size * 3)?;
    {
        let lab = Lab::below(args, tree.root(), size, &[])?;
        let bare = tree.root().join("bare");
        std::fs::create_dir_all(&bare)?;
        let bare_file = fixture::file(&bare, "disk.img", size)?;
        let bare_at = serve(&lab.hearth, &bare)?;
        let off = ["datastore", "set", "bare", "--match", "*", "--mode", "off"];
        lab.hearth.ok(&off)?;
        let without = || Client::connect(bare_at, "/bare", "disk.img");
        for wire in [&mut lab.nbd(Durable::Itself)?, &mut lab.nfs()?] {
            lab.warm(wire, size)?;
        }
        let mut sides = [
            ("nfs, cache off", Side::Own(Wire::Nfs(without()?))),
            ("nfs", Side::Own(lab.nfs()?)),
            ("nbd, flushed", Side::Own(lab.nbd(Durable::ByFlush)?)),
        ];
        for rw in ["randwrite", "randread"] {
            for depth in [1, 32] {
                let job = Job::random(rw, depth, args.seconds, size);
                // The page cache is not what is measured.
                let cold = || evict(&bare_file);
                let mut outcome = lab.rounds_after(args, &job, &mut sides, &cold)?;
                // What is read takes no flush: over NBD it is the same either way.
                let (off, nbd) = match rw {
                    "randwrite" => (Wanted::AtLeast(20.0), Wanted::AtLeast(0.7)),
                    _ => (Wanted::Shown, Wanted::AtLeast(0.6)),
                };
                outcome.compare_iops("nfs", "nfs, cache off", off);
                outcome.compare_iops("nfs", "nbd, flushed", nbd);
                named(&mut outcome, rw);
                all.at_depth(depth, outcome);
            }
        }
        // Nobody may have a file of the tree open when it is taken away.
        drop((sides, lab));
    }
    all.notes.push(format!(
        "Files of {} MiB, that of the disk over NBD on the same hard disk. It is a model of a 7200 rpm desktop drive, below ext4; what is written is \
         written back after each run.",
        size >> 20
    ));
    Ok(all)
}

/// Puts before the names of all what was done.
pub(super) fn named(outcome: &mut Outcome, what: &str) {
    for series in &mut outcome.series {
        series.name = format!("{what}: {}", series.name);
    }
    for comparison in &mut outcome.comparisons {
        comparison.what = format!("{what}: {}", comparison.what);
    }
}

/// Writes a file and drops it from the page cache. It was written by this process, so that no limit of a server's RAM would
/// count what is there of it.
pub(super) fn evict(file: &Path) -> Result<()> {
    let file = std::fs::File::open(file)?;
    file.sync_all()?;
    // SAFETY: a descriptor that is open; a length of 0 means up to the end.
    let failed = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    ensure!(failed == 0, std::io::Error::from_raw_os_error(failed));
    Ok(())
}

/// Of a file, so much fits into the RAM that each server may use: what is measured is not the page cache.
const RAM_SHARE: u64 = 8;

/// Beside nfs-ganesha, which has the same directory's file on the same SSD and no cache but the kernel's, in as little
/// memory as ours.
pub fn ganesha(args: &Args) -> Result<Outcome> {
    if args.peers_only {
        return Ok(Outcome::default());
    }
    let plain = args.dir.join("plain");
    std::fs::create_dir_all(&plain)?;
    let theirs_at = fixture::file(&plain, "disk.img", args.disk)?;
    let peer = match Ganesha::start(&plain, &args.dir) {
        Ok(peer) => peer,
        Err(e) => {
            let mut outcome = Outcome::default();
            outcome
                .notes
                .push(format!("Not measured: nfs-ganesha does not run here: {e:#}. It takes the packages nfs-ganesha-vfs and rpcbind, and root."));
            return Ok(outcome);
        }
    };
    let lab = Lab::new(args)?;
    lab.warm(&mut lab.nfs()?, args.disk)?;
    let pids = [peer.pid(), lab.hearth.pid().context("no daemon")?];
    let mut limits = Vec::new();
    for (name, pid) in ["ganesha", "hearth"].into_iter().zip(pids) {
        if let Some(limit) = Limit::of(name, args.disk / RAM_SHARE) {
            limit.holds(pid)?;
            limits.push(limit);
        }
    }
    let root = std::fs::canonicalize(&plain)?;
    let root = root.to_str().context("a path in UTF-8")?;
    let theirs = || Client::over(peer.connect()?, root, "disk.img");
    let mut sides = [
        ("nfs-ganesha", Side::Peer(Wire::Nfs(theirs()?), peer.pid())),
        ("nfs", Side::Own(lab.nfs()?)),
    ];
    let mut all = Outcome::default();
    for rw in ["randread", "randwrite"] {
        for depth in [1, 32] {
            let job = Job::random(rw, depth, args.seconds, args.disk);
            let mut outcome = lab.rounds_after(args, &job, &mut sides, &|| evict(&theirs_at))?;
            outcome.compare_iops("nfs", "nfs-ganesha", Wanted::AtLeast(1.0));
            outcome.compare_cpu("nfs", "nfs-ganesha", Wanted::AtMost(1.0));
            named(&mut outcome, rw);
            all.at_depth(depth, outcome);
        }
    }
    all.notes.push(match limits.len() {
        2 => format!(
            "Each server may use RAM for one {RAM_SHARE}th of the file, page cache included; nfs-ganesha's file is written \
             and dropped from the page cache before each run."
        ),
        _ => "The servers' RAM could not be limited here: nfs-ganesha's file is written and dropped from the page cache \
              before each run, but what it reads twice it reads from there."
            .to_owned(),
    });
    // The processes first, then their groups.
    drop((sides, peer, lab));
    Ok(all)
}
