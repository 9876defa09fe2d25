//! A datastore of many files: what it costs that there are 20,000 of them, in one directory and in two.
//!
//! The same is asked of a daemon with a hundredth of the files, and of the one directory and the mirror of two. A tenth of the
//! files is large enough to be a disk of its own once it is used.

use std::fs::File;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use hearth_rig::daemon::path;
use hearth_rig::process::resident;
use hearth_rig::{Hearth, wait};

use crate::args::Args;
use crate::nfs::Client;
use crate::report::{Comparison, Outcome, Spread, Wanted};

/// Files of the small and of the large datastore.
const FEW: usize = 200;
const MANY: usize = 20_000;
/// Of these, one in so many is large.
const LARGE_EVERY: usize = 10;
const LARGE: u64 = 2 << 20;
const SMALL: usize = 1 << 10;
/// How often each thing is asked for in a round.
const TRIES: usize = 500;
/// Longest until two directories hold the same.
const SYNC_LIMIT: Duration = Duration::from_secs(900);
/// Longest until a daemon answers.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);

/// One daemon, and its datastore.
struct Store {
    hearth: Hearth,
    server: SocketAddr,
    files: usize,
}

fn is_large(n: usize) -> bool {
    n.is_multiple_of(LARGE_EVERY)
}

fn name(n: usize) -> String {
    format!("f{n:05}.{}", if is_large(n) { "img" } else { "vmx" })
}

fn fill(dir: &Path, files: usize) -> Result<()> {
    std::fs::create_dir_all(dir)?;
    for n in 0..files {
        let file = File::create(dir.join(name(n)))?;
        if is_large(n) {
            file.set_len(LARGE)?;
            file.write_all_at(&[n as u8; 4096], 0)?;
        } else {
            file.write_all_at(&[n as u8; SMALL], 0)?;
        }
    }
    Ok(())
}

impl Store {
    fn new(args: &Args, dir: &Path, files: usize, trees: usize) -> Result<Store> {
        let _ = std::fs::remove_dir_all(dir);
        std::fs::create_dir_all(dir)?;
        let trees: Vec<PathBuf> = (0..trees).map(|n| dir.join(format!("t{n}/vms"))).collect();
        for tree in &trees {
            std::fs::create_dir_all(tree)?;
        }
        let first = trees.first().context("no directory")?;
        fill(first, files)?;
        let mut hearth = Hearth::bare_in(args.hearth.clone(), dir)?;
        hearth.bound = true;
        hearth.create_pool("512M")?;
        hearth.start()?;
        let mut add = vec!["datastore", "add"];
        match &trees[..] {
            [one] => add.push(path(one)),
            more => {
                add.push("vms");
                for tree in more {
                    add.extend(["--mirror", path(tree)]);
                }
            }
        }
        add.extend(["--nfs", "--listen", "127.0.0.1:0"]);
        add.extend(["--client", "127.0.0.1=rw,root,insecure"]);
        hearth.ok(&add)?;
        wait::until("the directories hold the same", SYNC_LIMIT, || {
            let shown = shown(&hearth).ok()?;
            let trees = shown["trees"].as_array().cloned().unwrap_or_default();
            let done = trees.iter().all(|tree| tree["state"] == "current");
            (trees.len() < 2 || done).then_some(())
        })?;
        let server = listen(&hearth)?;
        Ok(Store {
            hearth,
            server,
            files,
        })
    }

    fn client(&self) -> Result<Client> {
        Client::connect(self.server, "/vms", &name(0))
    }

    /// The n-th of the large files; they come again after the last.
    fn large(&self, n: usize) -> String {
        name(n * LARGE_EVERY % self.files)
    }

    /// Kills the daemon; seconds until a file's first block is read again.
    fn again(&mut self) -> Result<f64> {
        self.hearth.kill9()?;
        let start = Instant::now();
        self.hearth.spawn()?;
        loop {
            let read = listen(&self.hearth).and_then(|server| {
                self.server = server;
                self.client()?.read_now(0, 4096)
            });
            match read {
                Ok(()) => return Ok(start.elapsed().as_secs_f64()),
                Err(e) => ensure!(
                    start.elapsed() < ANSWER_LIMIT,
                    "no answer: {e:#}\n{}",
                    self.hearth.log()
                ),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn shown(hearth: &Hearth) -> Result<serde_json::Value> {
    let shown = hearth.ok(&["datastore", "show", "vms", "--json"])?;
    Ok(serde_json::from_str(&shown)?)
}

fn listen(hearth: &Hearth) -> Result<SocketAddr> {
    let shown = shown(hearth)?;
    Ok(shown["listen"].as_str().context("an address")?.parse()?)
}

/// Microseconds that each of these takes, in the median.
fn timed(count: usize, mut one: impl FnMut(usize) -> Result<()>) -> Result<f64> {
    let mut took = Vec::with_capacity(count);
    for n in 0..count {
        let start = Instant::now();
        one(n)?;
        took.push(start.elapsed().as_secs_f64() * 1e6);
    }
    Ok(Spread::of(&took).median)
}

/// What is measured of a datastore: names, and values in the order of the rounds.
type Figures = Vec<(&'static str, &'static str, Vec<f64>)>;

fn measure(args: &Args, dir: &Path, files: usize, trees: usize) -> Result<Figures> {
    let mut store = Store::new(args, dir, files, trees)?;
    let large = files / LARGE_EVERY;
    let mut figures: Figures = Vec::new();
    let mut add = |name, unit, value| {
        match figures.iter_mut().find(|figure| figure.0 == name) {
            Some(figure) => figure.2.push(value),
            None => figures.push((name, unit, vec![value])),
        };
    };
    let pid = store.hearth.pid().context("no daemon")?;
    let before = resident(pid)?.anonymous;
    let mut client = store.client()?;
    let mut first_used = Vec::new();
    for n in 0..large {
        client.find(&store.large(n))?;
        first_used.push(timed(1, |_| client.read_now(0, 4096))?);
    }
    add("first read of a file", "µs", Spread::of(&first_used).median);
    for round in 0..args.rounds {
        let mut at = round * 7919;
        let look = timed(TRIES, |n| {
            at = at.wrapping_mul(31).wrapping_add(n) % files;
            client.find(&name(at))
        })?;
        add("lookup of a name", "µs", look);
        let start = Instant::now();
        let listed = client.list()?;
        ensure!(listed as usize >= files, "{listed} of {files} are listed");
        let each = start.elapsed().as_secs_f64() * 1e6 / listed as f64;
        add("listing, each name", "µs", each);
        let opened = timed(TRIES, |n| {
            client.find(&store.large(n + round))?;
            client.read_now(0, 4096)
        })?;
        add("lookup and read of a file used before", "µs", opened);
        let renamed = timed(TRIES / 5, |n| {
            let (from, to) = (store.large(n), format!("moved-{n}.img"));
            client.rename(&from, &to)?;
            client.rename(&to, &from)
        })?;
        add("two renames", "µs", renamed);
    }
    let used = resident(pid)?.anonymous.saturating_sub(before);
    add(
        "RAM, all files used",
        "MiB",
        used as f64 / f64::from(1 << 20),
    );
    drop(client);
    for _ in 0..args.rounds {
        let took = store.again()?;
        add("first answer after kill -9", "s", took);
    }
    Ok(figures)
}

/// See the module.
pub fn many(args: &Args) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    if args.peers_only {
        return Ok(outcome);
    }
    let most = if args.smoke { FEW * 2 } else { MANY };
    for (trees, said) in [(1, "one directory"), (2, "two directories")] {
        let few = measure(args, &args.dir.join("few"), FEW, trees)?;
        let many = measure(args, &args.dir.join("many"), most, trees)?;
        for ((what, unit, few), (_, _, many)) in few.into_iter().zip(many) {
            let known = match what {
                "first answer after kill -9" => {
                    let most = Spread::of(&few).median + 2.0;
                    Wanted::AtMost(most)
                }
                _ => Wanted::Shown,
            };
            for (files, values, wanted) in [(FEW, few, Wanted::Shown), (most, many, known)] {
                outcome.comparisons.push(Comparison {
                    what: format!("{said}, {files} files: {what}"),
                    values,
                    unit: unit.to_owned(),
                    wanted,
                });
            }
        }
        for left in ["few", "many"] {
            std::fs::remove_dir_all(args.dir.join(left))?;
        }
    }
    outcome.notes.push(format!(
        "One file in {LARGE_EVERY} is of {} MiB and becomes a disk when it is first used; all are used before anything else is measured.",
        LARGE >> 20
    ));
    Ok(outcome)
}
