//! What the engine itself costs: its CPU per request as disks and outstanding requests grow in number,
//! how far a second thread helps, and what a disk costs that nobody uses.
//!
//! The engine is driven alone. Flash and origins answer at once and hold nothing, so neither a device,
//! a ring, a checksum nor a socket is in any of these numbers. Only a goal that is a ratio within one
//! round means the same on every machine.

use crate::args::Args;
use crate::report::{Comparison, Outcome, Wanted};
use crate::rows::cpu_ns;
use anyhow::{Context, Result, ensure};
use hearth_engine::api::{DiskConfig, DiskId, Effects, Mode, OriginState, ReqOp, Request};
use hearth_engine::{Engine, EngineOptions};
use hearth_format::{Layout, Superblock};
use hearth_io::{BLOCK, Buf, IoDone, IoOp, Sparse};
use smallvec::{SmallVec, smallvec};
use std::collections::{HashMap, VecDeque};
use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Bytes of the pool: 4 GiB, which takes no memory.
const POOL: u64 = 4 << 30;
/// Bytes of each disk.
const DISK: u64 = 1 << 30;
/// Blocks read and written: few enough that the processor's caches are not what is measured.
const WORKING_SET: u64 = 8192;
/// Requests handed to the engine at once.
const BATCH: u64 = 16;
/// Disks with something dirty, besides the one that is read.
const DIRTY_DISKS: [u16; 6] = [1, 8, 64, 512, 2048, 4096];
/// Bytes of a long write.
const LONG: u64 = 128 << 10;
/// Writes outstanding.
const OUTSTANDING: [usize; 4] = [16, 256, 1024, 4096];
/// Disks attached to see what one costs.
const IDLE_DISKS: u16 = 4096;
/// Virtual time between requests: about what they take, so that time passes as it would in a daemon.
const STEP_NS: u64 = 1_000;
/// CPU time of one measurement.
const MEASURED_NS: u64 = 400_000_000;
/// The same in a smoke run.
const SMOKE_NS: u64 = 5_000_000;
/// 4096 disks with something dirty may cost so much of what 8 cost, for each request.
const DISKS_GOAL: f64 = 1.3;
/// The same for 4096 outstanding writes and 16.
const WRITES_GOAL: f64 = 1.5;
/// Bytes of RAM there may be for each block of a pool, the RAM stage apart.
const BLOCK_GOAL: f64 = 24.0;
/// The same of what was written in sequence.
const SEQUENTIAL_GOAL: f64 = 16.0;
/// Bytes of RAM an idle disk may take.
const RAM_GOAL: f64 = 4096.0;
/// Microseconds attaching a disk may take.
const ATTACH_GOAL: f64 = 1000.0;

/// The operation went well, whatever it was.
fn answer(op: IoOp) -> IoDone {
    IoDone {
        op,
        result: Ok(()),
        bad_blocks: SmallVec::new(),
        latency_ns: 0,
    }
}

fn pool() -> Result<Engine> {
    let mut media = Sparse::new(POOL);
    let layout = Layout::for_device(POOL, Layout::segment_blocks_for(POOL))?;
    let uuid = Uuid::from_u128(1);
    Superblock::new(layout, uuid, uuid, "engine-cost", 0).store(&mut media)?;
    let opts = EngineOptions {
        // What is read ahead would be another number of requests each time.
        prefetch: false,
        ..EngineOptions::default()
    };
    let (engine, _) = Engine::open(&mut media, opts, &[])?;
    Ok(engine)
}

fn attach(engine: &Engine, id: DiskId) -> Result<()> {
    attach_of(engine, id, DISK)
}

fn attach_of(engine: &Engine, id: DiskId, size: u64) -> Result<()> {
    let cfg = DiskConfig {
        id,
        size,
        origin_align: 4096,
        mode: Mode::WriteBack,
        block_size: 4096,
        min_bytes: 0,
        max_bytes: 0,
        seq_cutoff: 0,
        read_only: false,
        home: hearth_engine::api::Home::Origin,
    };
    Ok(engine.attach(cfg, OriginState::Flushed)?)
}

/// One thread that drives the engine.
struct Driver<'a> {
    engine: &'a Engine,
    /// Which data thread it is.
    owner: u32,
    now: u64,
    tick_at: u64,
    buf: Buf,
    reqs: Vec<Request>,
    fx: Effects,
    dones: Vec<IoDone>,
    /// Operations that are not answered yet, oldest first.
    waiting: VecDeque<IoOp>,
}

impl<'a> Driver<'a> {
    fn new(engine: &'a Engine) -> Driver<'a> {
        Driver::of(engine, 0)
    }

    fn of(engine: &'a Engine, owner: u32) -> Driver<'a> {
        Driver {
            engine,
            owner,
            now: 1_000_000_000,
            tick_at: 0,
            buf: Buf::zeroed(BLOCK as usize),
            reqs: Vec::new(),
            fx: Effects::default(),
            dones: Vec::new(),
            waiting: VecDeque::new(),
        }
    }

    fn read(&mut self, disk: DiskId, block: u64) {
        let mut r = Request::read(0, disk, block * BLOCK, BLOCK, &self.buf, self.now);
        r.owner = self.owner;
        self.reqs.push(r);
    }

    fn write(&mut self, disk: DiskId, block: u64) {
        let (op, window) = (ReqOp::Write { fua: false }, self.buf.all());
        let mut r = Request::new(0, disk, op, block * BLOCK, BLOCK, Some(window), self.now);
        // Whoever receives a write computes it outside the engine.
        r.crcs = smallvec![1];
        self.reqs.push(r);
    }

    /// The whole buffer, at `offset`.
    fn write_long(&mut self, disk: DiskId, offset: u64) {
        let (op, window) = (ReqOp::Write { fua: false }, self.buf.all());
        let len = window.len() as u64;
        let mut r = Request::new(0, disk, op, offset, len, Some(window), self.now);
        r.crcs = SmallVec::from_elem(1, (len / BLOCK) as usize);
        self.reqs.push(r);
    }

    /// Hands over what was made, and lets time pass.
    fn submit(&mut self) {
        self.now += STEP_NS * self.reqs.len() as u64;
        self.engine.submit(self.now, &mut self.reqs, &mut self.fx);
        if self.now >= self.tick_at {
            let next = self.engine.tick(self.now, &mut self.fx);
            self.tick_at = next.unwrap_or(self.now + 1_000_000);
        }
    }

    /// Answers operations until there are none; returns how many requests ended well.
    fn rest(&mut self) -> Result<u64> {
        let mut ended = self.ended()?;
        self.waiting.extend(self.fx.ios.drain(..));
        while !self.waiting.is_empty() {
            self.dones.extend(self.waiting.drain(..).map(answer));
            ended += self.hand_back()?;
        }
        Ok(ended)
    }

    /// Answers the oldest operation.
    fn step(&mut self) -> Result<u64> {
        self.waiting.extend(self.fx.ios.drain(..));
        let oldest = self.waiting.pop_front();
        self.dones.extend(oldest.map(answer));
        self.hand_back()
    }

    fn hand_back(&mut self) -> Result<u64> {
        self.engine.io_done(self.now, &mut self.dones, &mut self.fx);
        self.waiting.extend(self.fx.ios.drain(..));
        self.ended()
    }

    fn ended(&mut self) -> Result<u64> {
        let n = self.fx.completions.len() as u64;
        for c in self.fx.completions.drain(..) {
            c.result.context("a request failed")?;
            black_box(c.buf);
        }
        Ok(n)
    }

    /// Writes blocks `0..count` of a disk.
    fn fill(&mut self, disk: DiskId, count: u64) -> Result<()> {
        for block in 0..count {
            self.write(disk, block);
            if block % BATCH == BATCH - 1 || block + 1 == count {
                self.submit();
                self.rest()?;
            }
        }
        Ok(())
    }
}

/// Calls `round` until it has taken `budget` of this thread's CPU time; each returns how many requests
/// it was. Nanoseconds for each request.
fn each(budget: u64, mut round: impl FnMut() -> Result<u64>) -> Result<f64> {
    let (start, mut requests) = (cpu_ns(), 0);
    loop {
        // The clock costs as much as a few requests.
        for _ in 0..64 {
            requests += round()?;
        }
        let took = cpu_ns() - start;
        if took >= budget {
            return Ok(took as f64 / requests as f64);
        }
    }
}

/// Hits a second of `threads` threads together, in batches.
fn hits(engine: &Engine, threads: u64, budget: u64) -> Result<f64> {
    let barrier = Barrier::new(threads as usize);
    let run = Duration::from_nanos(budget);
    let thread = |seed: u64| -> Result<f64> {
        let mut driver = Driver::of(engine, seed as u32);
        let (mut state, mut requests) = (seed, 0u64);
        barrier.wait();
        let start = Instant::now();
        while start.elapsed() < run {
            for _ in 0..16 {
                for _ in 0..BATCH {
                    state = hearth_policy::spread(state);
                    driver.read(1, state % WORKING_SET);
                }
                driver.submit();
                requests += driver.rest()?;
            }
        }
        Ok(requests as f64 / start.elapsed().as_secs_f64())
    };
    let thread = &thread;
    let rates = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads)
            .map(|n| scope.spawn(move || thread(n + 1)))
            .collect();
        running
            .into_iter()
            .map(|t| t.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?)
            .collect::<Result<Vec<f64>>>()
    })?;
    Ok(rates.iter().sum())
}

/// How long the engine's lock is held for a hit: what the core takes over from a lane, some hits at a time.
fn folded(engine: &Engine, budget: u64) -> Result<f64> {
    let mut driver = Driver::new(engine);
    driver.tick_at = u64::MAX;
    let (mut state, mut took, mut hits, mut held) = (1u64, 0, 0, 0);
    while took < budget {
        let start = cpu_ns();
        // Fewer than make the lane come by itself.
        for _ in 0..BATCH * 7 {
            state = hearth_policy::spread(state);
            driver.read(1, state % WORKING_SET);
            driver.submit();
            hits += driver.rest()?;
        }
        let before = cpu_ns();
        engine.tick(driver.now, &mut driver.fx);
        let with = cpu_ns();
        engine.tick(driver.now, &mut driver.fx);
        let without = cpu_ns();
        // The difference is the hits'; both have the clock's own time in them.
        held += (with - before) as i64 - (without - with) as i64;
        took += without - start;
    }
    Ok(held as f64 / hits as f64)
}

/// CPU of a hit, one at a time, beside `dirty` disks with something dirty.
fn single_hits(dirty: u16, budget: u64) -> Result<f64> {
    let engine = pool()?;
    let mut driver = Driver::new(&engine);
    for id in 1..=dirty {
        attach(&engine, id)?;
        driver.fill(id, 1)?;
    }
    // The same disks are read however many there are besides.
    let read = dirty.min(8);
    let per_disk = WORKING_SET / u64::from(read);
    for id in 1..=read {
        driver.fill(id, per_disk)?;
    }
    let mut state = 1u64;
    let ns = each(budget, || {
        state = hearth_policy::spread(state);
        let disk = 1 + (state >> 32) as u16 % read;
        driver.read(disk, state % per_disk);
        driver.submit();
        driver.rest()
    })?;
    ensure!(
        engine.dirty_disks().len() == usize::from(dirty),
        "disks became clean while they were measured beside"
    );
    Ok(ns)
}

/// CPU of a write while `outstanding` are.
fn writes(outstanding: usize, budget: u64) -> Result<f64> {
    let engine = pool()?;
    attach(&engine, 1)?;
    let mut driver = Driver::new(&engine);
    driver.fill(1, WORKING_SET)?;
    let (mut next, mut open) = (0u64, 0usize);
    each(budget, || {
        while open < outstanding {
            let n = (outstanding - open).min(BATCH as usize);
            for _ in 0..n {
                // An odd factor visits every block once before any comes again.
                next = next.wrapping_add(1);
                driver.write(1, next.wrapping_mul(2_654_435_761) % WORKING_SET);
            }
            driver.submit();
            open += n;
            // Some end here, or elsewhere than in a step.
            open -= driver.ended()? as usize;
        }
        let ended = driver.step()?;
        open -= ended as usize;
        Ok(ended)
    })
}

/// CPU of a long write, in sequence over half of the pool again and again.
fn long_writes(budget: u64) -> Result<f64> {
    let engine = pool()?;
    attach_of(&engine, 1, POOL)?;
    let mut driver = Driver::new(&engine);
    driver.buf = Buf::zeroed(LONG as usize);
    let (span, mut at) = (POOL / 2 / LONG, 0);
    each(budget, || {
        for _ in 0..4 {
            driver.write_long(1, at % span * LONG);
            at += 1;
        }
        driver.submit();
        driver.rest()
    })
}

/// RAM for each block of a full pool, the stage apart, written in sequence or in no order.
fn cached(in_sequence: bool) -> Result<f64> {
    let before = heap_bytes();
    let engine = pool()?;
    attach_of(&engine, 1, POOL)?;
    let mut driver = Driver::new(&engine);
    let blocks = engine.pool_stats().capacity_blocks * 15 / 16;
    for n in 0..blocks {
        // An odd factor visits every block once.
        let scattered = n.wrapping_mul(2_654_435_761) % (POOL / BLOCK);
        driver.write(1, if in_sequence { n } else { scattered });
        if n % BATCH == BATCH - 1 || n + 1 == blocks {
            let mut open = driver.reqs.len() as u64;
            driver.submit();
            open -= driver.rest()?;
            // Where too much is dirty, writes wait for the destager.
            while open > 0 {
                driver.now += 1_000_000;
                driver.submit();
                open -= driver.rest()?;
            }
        }
    }
    let (all, stats) = (heap_bytes().saturating_sub(before), engine.pool_stats());
    ensure!(
        stats.cached_blocks > blocks / 2,
        "the pool did not become full"
    );
    let stage = stats.stage_capacity_blocks * BLOCK;
    // Of the blocks there is room for: single blocks take a descriptor each here, where nothing takes time.
    Ok(all.saturating_sub(stage) as f64 / stats.capacity_blocks as f64)
}

/// What the allocator has handed out.
#[cfg(not(target_env = "musl"))]
fn heap_bytes() -> u64 {
    // SAFETY: takes nothing and returns a struct by value.
    let info = unsafe { libc::mallinfo2() };
    (info.uordblks + info.hblkhd) as u64
}

/// The same where the C library does not tell: what of this process is in RAM and in no file.
#[cfg(target_env = "musl")]
fn heap_bytes() -> u64 {
    hearth_rig::process::resident(std::process::id()).map_or(0, |all| all.anonymous)
}

/// RAM of a disk nobody uses in bytes, and the median and longest time to attach one in microseconds.
fn idle(used: bool) -> Result<(f64, f64, f64)> {
    let engine = pool()?;
    // What grows with the first few belongs to the pool.
    for id in 1..=8 {
        attach(&engine, id)?;
    }
    let before = heap_bytes();
    let mut times = Vec::with_capacity(usize::from(IDLE_DISKS));
    for id in 9..=8 + IDLE_DISKS {
        let start = Instant::now();
        attach(&engine, id)?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    if used {
        let mut driver = Driver::new(&engine);
        for id in 9..=8 + IDLE_DISKS {
            driver.read(id, 0);
            driver.submit();
            driver.rest()?;
            driver.fill(id, 1)?;
        }
    }
    let bytes = (heap_bytes().saturating_sub(before)) as f64 / f64::from(IDLE_DISKS);
    times.sort_by(f64::total_cmp);
    Ok((bytes, times[times.len() / 2], times[times.len() - 1]))
}

/// One value for each round.
struct Rows(Vec<Comparison>);

impl Rows {
    fn tell(&mut self, what: &str, value: f64, unit: &str, wanted: Wanted) {
        match self.0.iter_mut().find(|c| c.what == what) {
            Some(known) => known.values.push(value),
            None => self.0.push(Comparison::single(what, value, unit, wanted)),
        }
    }
}

pub fn run(args: &Args) -> Result<Outcome> {
    if args.peers_only {
        return Ok(Outcome::default());
    }
    let budget = if args.smoke { SMOKE_NS } else { MEASURED_NS };
    let mut rows = Rows(Vec::new());
    for _ in 0..args.rounds {
        let engine = pool()?;
        attach(&engine, 1)?;
        Driver::new(&engine).fill(1, WORKING_SET)?;
        let one = hits(&engine, 1, budget)?;
        let two = hits(&engine, 2, budget)?;
        let held = folded(&engine, budget)?;
        drop(engine);
        rows.tell(
            "hits of one thread, batches of 16",
            one / 1e6,
            "million/s",
            Wanted::Shown,
        );
        rows.tell(
            "hits of two threads, batches of 16",
            two / 1e6,
            "million/s",
            Wanted::Shown,
        );
        rows.tell("two threads / one", two / one, "", Wanted::Shown);
        rows.tell(
            "the engine's lock held for a hit",
            held,
            "ns",
            Wanted::Shown,
        );

        let mut by_disks = HashMap::new();
        for dirty in DIRTY_DISKS {
            let ns = single_hits(dirty, budget)?;
            by_disks.insert(dirty, ns);
            let what = format!("one hit at a time, {dirty} disks with something dirty");
            rows.tell(&what, ns, "ns", Wanted::Shown);
        }
        let ratio = by_disks[&4096] / by_disks[&8];
        rows.tell(
            "the same, 4096 disks / 8",
            ratio,
            "",
            Wanted::AtMost(DISKS_GOAL),
        );

        let mut by_writes = HashMap::new();
        for outstanding in OUTSTANDING {
            let ns = writes(outstanding, budget)?;
            by_writes.insert(outstanding, ns);
            let what = format!("one write, {outstanding} outstanding");
            rows.tell(&what, ns, "ns", Wanted::Shown);
        }
        let ratio = by_writes[&4096] / by_writes[&16];
        rows.tell(
            "the same, 4096 outstanding / 16",
            ratio,
            "",
            Wanted::AtMost(WRITES_GOAL),
        );

        let long = long_writes(budget)?;
        rows.tell(
            "one write of 128 KiB in sequence",
            long,
            "ns",
            Wanted::Shown,
        );
        if !args.smoke {
            rows.tell(
                "RAM for each block of a full pool of 4 GiB, written in no order, the stage apart",
                cached(false)?,
                "bytes",
                Wanted::AtMost(BLOCK_GOAL),
            );
            rows.tell(
                "the same written in sequence",
                cached(true)?,
                "bytes",
                Wanted::AtMost(SEQUENTIAL_GOAL),
            );
        }

        let (bytes, median, longest) = idle(false)?;
        rows.tell(
            "RAM of a disk nobody has used",
            bytes,
            "bytes",
            Wanted::AtMost(RAM_GOAL),
        );
        rows.tell(
            "attaching a disk, median",
            median,
            "µs",
            Wanted::AtMost(ATTACH_GOAL),
        );
        rows.tell(
            "attaching a disk, longest of 4096",
            longest,
            "µs",
            Wanted::Shown,
        );
        let (bytes, _, _) = idle(true)?;
        rows.tell(
            "RAM of a disk at rest after a read and a write",
            bytes,
            "bytes",
            Wanted::Shown,
        );
    }
    Ok(Outcome {
        comparisons: rows.0,
        notes: vec![
            "The engine alone: flash and origins answer at once and hold nothing. CPU time of the calling thread, ticks included; hits are counted by the clock, so that other work on the machine lowers them.".to_owned(),
        ],
        ..Outcome::default()
    })
}
