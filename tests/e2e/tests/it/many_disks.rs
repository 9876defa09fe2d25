//! One daemon with thousands of disks: a verified load on some of them while the others are idle and more come
//! and go; kill -9 in the middle of that; everything that was flushed is there afterwards.
//!
//! `DISKS` says how many there are; `make lab` runs 2048. What things take is printed and never judged. Each
//! figure of a single disk comes in two: of the first disks and of the last, which tells whether it grows with
//! their number.

use anyhow::{Context, Result, ensure};
use hearth_rig::api::Api;
use hearth_rig::daemon::path;
use hearth_rig::load::Writer;
use hearth_rig::nbd::Client;
use hearth_rig::pattern::{BLOCK, fill, version_of};
use hearth_rig::process::{count_of, cpu_us, resident};
use hearth_rig::{Hearth, wait};
use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

/// Disks of the gate.
const DISKS: usize = 256;
/// The same of the full size, at which the other numbers are as they are here.
const FULL: usize = 2048;
/// Disks with a load, a connection each.
const LOADED: usize = 24;
/// Disks that are added and removed meanwhile.
const CHURN: usize = 1000;
/// Blocks of a disk with a load, and of an idle one.
const LOADED_BLOCKS: u64 = 2048;
const IDLE_BLOCKS: u64 = 256;
/// Every so many idle disks one has been written to.
const WRITTEN_EVERY: usize = 8;
/// Bytes of flash: what is written by the load goes round in it.
const FLASH: &str = "512M";
/// How long a start may take until every disk is served.
const START_LIMIT: Duration = Duration::from_secs(300);
/// Answers the load gets before the daemon is killed, when nothing else is done any more.
const LAST_STEPS: u32 = 2_000;
/// How often each question is asked to time its answers.
const ASKED: usize = 11;
/// How long an idle daemon is watched.
const IDLE_TIME: Duration = Duration::from_secs(3);
/// The version of the blocks that were put into origins, and of those that were written over them.
const PUT: u64 = 1;
const WRITTEN: u64 = 2;

struct Sizes {
    disks: usize,
    loaded: usize,
    churn: usize,
}

impl Sizes {
    fn wanted() -> Sizes {
        let number = std::env::var("DISKS").ok().and_then(|n| n.parse().ok());
        let disks = number.unwrap_or(DISKS).max(32);
        Sizes {
            disks,
            loaded: LOADED.min(disks / 4),
            churn: (CHURN * disks / FULL).max(8),
        }
    }

    fn idle(&self) -> usize {
        self.disks - self.loaded
    }
}

fn idle_name(n: usize) -> String {
    format!("idle-{n}")
}

fn loaded_name(n: usize) -> String {
    format!("load-{n}")
}

/// The block of an idle disk that says whose it is.
fn mark(n: usize, version: u64) -> Vec<u8> {
    let mut block = vec![0; BLOCK];
    fill(&mut block, n as u64, version);
    block
}

/// A sparse origin that begins with `head`.
fn origin(dir: &Path, name: &str, blocks: u64, head: &[u8]) -> Result<PathBuf> {
    let path = dir.join(name);
    let file = File::create(&path)?;
    file.set_len(blocks * BLOCK as u64)?;
    file.write_all_at(head, 0)?;
    Ok(path)
}

/// What each of many equal steps took, and how much of the daemon's CPU time, in the order they were done.
struct Steps {
    daemon: u32,
    took: Vec<[Duration; 2]>,
}

impl Steps {
    fn new(daemon: u32) -> Steps {
        Steps {
            daemon,
            took: Vec::new(),
        }
    }

    fn time<T>(&mut self, step: impl FnOnce() -> Result<T>) -> Result<T> {
        let (start, cpu) = (Instant::now(), cpu_us(self.daemon)?);
        let outcome = step()?;
        let cpu = cpu_us(self.daemon)? - cpu;
        let cpu = Duration::from_micros(cpu as u64);
        self.took.push([start.elapsed(), cpu]);
        Ok(outcome)
    }

    /// The medians.
    fn print_middle(&self, what: &str) {
        let [took, cpu] = [0, 1].map(|which| median(&self.took, which));
        println!("{what}: {took:.2?}, of the daemon's CPU {cpu:.2?}");
    }

    /// The medians of the first and the last tenth.
    fn print(&self, what: &str) {
        let tenth = self.took.len().div_ceil(10);
        let ends = [&self.took[..tenth], &self.took[self.took.len() - tenth..]];
        let [first, last] = ends.map(|some| [median(some, 0), median(some, 1)]);
        println!(
            "{what}: {:.2?} for the first, {:.2?} for the last; of the daemon's CPU {:.2?} and {:.2?}",
            first[0], last[0], first[1], last[1]
        );
    }
}

/// The median of the one figure or the other of some steps.
fn median(some: &[[Duration; 2]], which: usize) -> Duration {
    let mut some: Vec<Duration> = some.iter().map(|took| took[which]).collect();
    some.sort();
    some.get(some.len() / 2).copied().unwrap_or_default()
}

/// Waits until every disk is served: a start does not wait for all origins.
fn all_served(api: &Api, count: usize) -> Result<()> {
    let served = || -> Result<bool> {
        let disks = api.disks()?;
        let lacking = disks.iter().find(|(_, state)| state != "attached");
        if let Some((name, state)) = lacking
            && state != "waiting"
        {
            anyhow::bail!("{name} is {state}");
        }
        Ok(disks.len() == count && lacking.is_none())
    };
    wait::until("every disk is served", START_LIMIT, || match served() {
        Ok(false) => None,
        other => Some(other.map(drop)),
    })?
}

/// What idle disks cost: resident memory, threads, open files, CPU.
fn print_costs(hearth: &Hearth, sizes: &Sizes, before: u64) -> Result<()> {
    let pid = hearth.pid().context("no daemon")?;
    let grown = resident(pid)?.anonymous.saturating_sub(before);
    let (threads, files) = (count_of(pid, "task")?, count_of(pid, "fd")?);
    println!(
        "{} disks: {:.1} KiB of RAM for each, {threads} threads, {files} open files ({:.1} for each disk)",
        sizes.disks,
        grown as f64 / sizes.disks as f64 / 1024.0,
        files as f64 / sizes.disks as f64
    );
    let (cpu, since) = (cpu_us(pid)?, Instant::now());
    let watched = || Some(since.elapsed()).filter(|time| *time >= IDLE_TIME);
    let time = wait::until("it was watched", 2 * IDLE_TIME, watched)?;
    let busy = (cpu_us(pid)? - cpu) / time.as_micros() as f64;
    println!("idle, the daemon takes {:.2} % of a core", busy * 100.0);
    for question in ["/v1/disks", "/v1/stats", "/v1/pool", "/metrics"] {
        let mut asking = Steps::new(pid);
        let mut answer = String::new();
        for _ in 0..ASKED {
            answer = asking.time(|| hearth.api().text(question))?;
        }
        asking.print_middle(&format!("GET {question}, {} KiB", answer.len() / 1024));
    }
    Ok(())
}

/// Starts the daemon, and prints how long it took until it answered and until it served every disk.
fn start(hearth: &mut Hearth, sizes: &Sizes, what: &str) -> Result<()> {
    let begun = Instant::now();
    let answers = hearth.start()?;
    all_served(&hearth.api(), sizes.disks)?;
    let cpu = Duration::from_micros(cpu_us(hearth.pid().context("no daemon")?)? as u64);
    println!(
        "start {what}: answers after {answers:.2?}, every disk served after {:.2?}, {cpu:.2?} of CPU",
        begun.elapsed()
    );
    Ok(())
}

/// Adds disks and removes them again while there is a load, and prints what that took.
fn come_and_go(api: &Api, daemon: u32, dir: &Path, sizes: &Sizes) -> Result<()> {
    let (mut adding, mut removing) = (Steps::new(daemon), Steps::new(daemon));
    let name = |n| format!("guest-{n}");
    for n in 0..sizes.churn {
        let file = origin(dir, &name(n), IDLE_BLOCKS, &mark(n, PUT))?;
        adding.time(|| api.add(&name(n), path(&file)))?;
    }
    ensure!(api.disks()?.len() == sizes.disks + sizes.churn);
    for n in 0..sizes.churn {
        removing.time(|| api.remove(&name(n)))?;
    }
    adding.print("adding a disk under load");
    removing.print("removing a disk under load");
    Ok(())
}

/// Every idle disk is itself, and holds what was flushed to it.
fn check_idle(hearth: &Hearth, sizes: &Sizes) -> Result<()> {
    for n in 0..sizes.idle() {
        let name = idle_name(n);
        let block = hearth.connect(&name)?.read(0, BLOCK as u32)?;
        let found = version_of(&block, n as u64).map_err(anyhow::Error::msg);
        let found = found.with_context(|| name.clone())?;
        let wanted = if n % WRITTEN_EVERY == 0 { WRITTEN } else { PUT };
        ensure!(found == wanted, "{name} holds version {found}");
    }
    Ok(())
}

fn names(sizes: &Sizes) -> BTreeSet<String> {
    let idle = (0..sizes.idle()).map(idle_name);
    idle.chain((0..sizes.loaded).map(loaded_name)).collect()
}

#[test]
fn thousands_of_disks_on_one_daemon() -> Result<()> {
    let sizes = Sizes::wanted();
    let mut hearth = Hearth::serving(FLASH)?;
    let api = hearth.api();
    let dir = hearth.dir().to_owned();
    let daemon = hearth.pid().context("no daemon")?;
    let before = resident(daemon)?.anonymous;
    let mut adding = Steps::new(daemon);
    for n in 0..sizes.loaded {
        let file = origin(&dir, &loaded_name(n), LOADED_BLOCKS, &[])?;
        api.add(&loaded_name(n), path(&file))?;
    }
    for n in 0..sizes.idle() {
        let file = origin(&dir, &idle_name(n), IDLE_BLOCKS, &mark(n, PUT))?;
        adding.time(|| api.add(&idle_name(n), path(&file)))?;
    }
    adding.print("adding a disk");
    print_costs(&hearth, &sizes, before)?;
    for n in (0..sizes.idle()).step_by(WRITTEN_EVERY) {
        let mut client = hearth.connect(&idle_name(n))?;
        client.write(0, &mark(n, WRITTEN))?;
        client.flush()?;
    }

    // A load while disks come and go; then the daemon is killed in the middle of it.
    let mut writers: Vec<Writer> = (0..sizes.loaded)
        .map(|n| Writer::of(LOADED_BLOCKS, n as u64))
        .collect();
    let (going, ended) = (AtomicBool::new(true), AtomicBool::new(false));
    let clients = (0..sizes.loaded).map(|n| hearth.connect(&loaded_name(n)));
    let clients = clients.collect::<Result<Vec<Client>>>()?;
    std::thread::scope(|scope| -> Result<()> {
        let (going, ended) = (&going, &ended);
        let (step, steps) = std::sync::mpsc::channel();
        let load = move |(writer, mut client): (&mut Writer, Client), step: Sender<()>| {
            let goes_on = || {
                if ended.load(Ordering::Relaxed) {
                    // Who counted them may have enough.
                    let _ = step.send(());
                }
                going.load(Ordering::Relaxed)
            };
            writer.load_while(&mut client, goes_on, || Ok(()))
        };
        let running: Vec<_> = (writers.iter_mut().zip(clients))
            .map(|one| {
                let step = step.clone();
                scope.spawn(move || load(one, step))
            })
            .collect();
        drop(step);
        let churned = come_and_go(&api, daemon, &dir, &sizes);
        ended.store(true, Ordering::Relaxed);
        // None is told of if all loads have failed; then joining them says why.
        for _ in 0..LAST_STEPS {
            if steps.recv().is_err() {
                break;
            }
        }
        going.store(false, Ordering::Relaxed);
        let killed = hearth.kill9();
        for one in running {
            one.join().ok().context("a load panicked")??;
        }
        churned.and(killed)
    })?;

    start(&mut hearth, &sizes, "after kill -9")?;
    let found: BTreeSet<String> = api.disks()?.into_iter().map(|(name, _)| name).collect();
    ensure!(found == names(&sizes), "other disks than there were");
    for (n, writer) in writers.iter_mut().enumerate() {
        let mut client = hearth.connect(&loaded_name(n))?;
        writer.check(&mut client).with_context(|| loaded_name(n))?;
        writer.check_stable(&mut client)?;
    }
    check_idle(&hearth, &sizes)?;

    let begun = Instant::now();
    hearth.stop()?;
    println!("clean stop: {:.2?}", begun.elapsed());
    start(&mut hearth, &sizes, "after a clean stop")?;
    for (n, writer) in writers.iter_mut().enumerate() {
        writer
            .check_stable(&mut hearth.connect(&loaded_name(n))?)
            .with_context(|| loaded_name(n))?;
    }
    check_idle(&hearth, &sizes)
}
