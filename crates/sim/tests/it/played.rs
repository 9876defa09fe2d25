//! The engine as a guest in virtual time finds it: an origin of one arm, flash that answers after 100 µs.
//!
//! All data is zeros, so that the devices need to keep only the engine's own structures.

// Not all who include it use all of it.
#![allow(dead_code)]

use hearth_engine::api::{DiskConfig, Effects, Mode, OriginState, ReqOp, Request};
use hearth_engine::faults::Faults;
use hearth_engine::{Engine, EngineOptions};
use hearth_format::{Layout, Superblock, Uuid};
use hearth_io::{Buf, IoOp, Media, OpKind, Sparse, Target};
use hearth_simulate::device::{Arm, Device};
use hearth_simulate::twin::{Disk, Freed};
use hearth_simulate::{
    Model, Outcome, Policy, Request as Access, Settings, Workload, WriteMode, run,
};
use std::collections::BTreeMap;

const BLOCK: u64 = 4096;
const SEGMENT_BLOCKS: u32 = 256;
/// Segments of a pool at least.
pub const SEGMENTS_MIN: u64 = 64;
const FLASH_NS: u64 = 100_000;
/// Events until a request is answered; it takes far fewer.
const STEPS_MAX: u64 = 1_000_000;
/// The disk, as policy's keys have its number.
const DISK: u64 = 1 << 36;
const DISK_BLOCKS: u64 = 1 << 35;
/// As `disk add` has it.
const SEQ_CUTOFF: u64 = 1 << 20;

/// The engine, its devices and its guest.
pub struct Live {
    flash: Sparse,
    engine: Engine,
    fx: Effects,
    arm: Arm,
    /// What is under way and since when, by when it ends.
    under_way: BTreeMap<(u64, u64), (IoOp, u64)>,
    ops: u64,
    now: u64,
    next_tick: u64,
    in_flight: usize,
    /// Bytes written to flash, whatever they are.
    flash_written: u64,
    /// Requests made with [`ask`](Self::ask), and since when those that are not answered wait.
    asked: u64,
    since: BTreeMap<u64, u64>,
    longest_ns: u64,
}

impl Live {
    fn new(segments: u64, mode: Mode, prefetch: bool, device: Device, faults: Faults) -> Live {
        let options = EngineOptions {
            prefetch,
            faults,
            ..EngineOptions::default()
        };
        Live::open(segments, mode, device, options)
    }

    fn open(segments: u64, mode: Mode, device: Device, options: EngineOptions) -> Live {
        let bytes = (segments + 8) * u64::from(SEGMENT_BLOCKS) * BLOCK;
        let mut flash = Sparse::new(bytes);
        let layout = Layout::for_device(bytes, SEGMENT_BLOCKS).expect("it fits");
        Superblock::new(layout, Uuid::from_u128(1), Uuid::from_u128(2), "agree", 0)
            .store(&mut flash)
            .expect("formatted");
        let options = EngineOptions {
            // The origin is what it is said to be, however fast.
            fast_origin_ns: 0,
            ..options
        };
        let (engine, _) = Engine::open(&mut flash, options, &[]).expect("a pool");
        let config = DiskConfig {
            id: 1,
            size: DISK_BLOCKS * BLOCK,
            origin_align: 4096,
            mode,
            block_size: BLOCK as u32,
            min_bytes: 0,
            max_bytes: 0,
            seq_cutoff: SEQ_CUTOFF,
            read_only: false,
            home: hearth_engine::api::Home::Origin,
        };
        engine
            .attach(config, OriginState::Flushed)
            .expect("attached");
        Live {
            flash,
            engine,
            fx: Effects::default(),
            arm: Arm::new(device),
            under_way: BTreeMap::new(),
            ops: 0,
            now: 0,
            next_tick: 0,
            in_flight: 0,
            flash_written: 0,
            asked: 0,
            since: BTreeMap::new(),
            longest_ns: 0,
        }
    }

    fn serve(&mut self, op: &IoOp) {
        let mut at = op.offset;
        for buf in &op.bufs {
            let mut buf = buf.clone();
            match (op.target, op.kind) {
                (Target::Flash(_), OpKind::Read) => self.flash.read_at(at, buf.bytes_mut()),
                (Target::Flash(_), OpKind::Write) => {
                    self.flash_written += buf.len() as u64;
                    self.flash.write_at(at, buf.bytes())
                }
                (_, OpKind::Read) => {
                    buf.bytes_mut().fill(0);
                    Ok(())
                }
                _ => Ok(()),
            }
            .expect("memory does not fail");
            at += buf.len() as u64;
        }
    }

    /// Sends off what the engine asked for, and takes in what it answered.
    fn take(&mut self) {
        for op in std::mem::take(&mut self.fx.ios) {
            let (first, count) = (op.offset / BLOCK, op.len.div_ceil(BLOCK));
            let at = match (op.target, op.kind) {
                (Target::Flash(_), _) => self.now + FLASH_NS,
                (_, OpKind::Read | OpKind::Write) => self.arm.serve(self.now, first, count),
                _ => self.now.max(self.arm.free_ns()),
            };
            self.ops += 1;
            self.under_way.insert((at, self.ops), (op, self.now));
        }
        for done in self.fx.completions.drain(..) {
            assert!(done.result.is_ok());
            self.in_flight -= 1;
            if let Some(at) = self.since.remove(&done.tag) {
                self.longest_ns = self.longest_ns.max(self.now - at);
            }
        }
    }

    /// The next thing happens, if it does before `until`.
    fn step(&mut self, until: u64) -> bool {
        let first = self.under_way.first_key_value().map(|(key, _)| key.0);
        let at = first.unwrap_or(u64::MAX).min(self.next_tick);
        if at > until || at == u64::MAX {
            return false;
        }
        self.now = self.now.max(at);
        if self.next_tick <= at {
            let next = self.engine.tick(self.now, &mut self.fx);
            self.next_tick = next.unwrap_or(u64::MAX);
        } else if let Some((_, (op, sent))) = self.under_way.pop_first() {
            self.serve(&op);
            let mut dones = vec![op.done(Ok(()), self.now - sent)];
            self.engine.io_done(self.now, &mut dones, &mut self.fx);
        }
        self.take();
        true
    }

    /// Makes a request when fewer than `depth` are in flight.
    fn ask(&mut self, depth: usize, limit_ns: u64, request: impl FnOnce(u64, u64) -> Request) {
        while self.in_flight >= depth {
            self.step_within(limit_ns);
        }
        self.asked += 1;
        self.since.insert(self.asked, self.now);
        self.in_flight += 1;
        let request = request(self.asked, self.now);
        self.engine
            .submit(self.now, &mut vec![request], &mut self.fx);
        self.take();
        self.next_tick = self.next_tick.min(self.now + 1_000_000);
    }

    fn step_within(&mut self, limit_ns: u64) {
        assert!(self.step(u64::MAX), "{}", self.engine.explain());
        let oldest = self.since.first_key_value().map_or(self.now, |(_, at)| *at);
        assert!(
            self.now - oldest <= limit_ns,
            "a request waits since {} ms\n{}",
            (self.now - oldest) / 1_000_000,
            self.engine.explain()
        );
    }

    /// Waits until every request is answered.
    fn rest(&mut self, limit_ns: u64) {
        while self.in_flight > 0 {
            self.step_within(limit_ns);
        }
    }

    /// Plays a workload as the simulator's guest does; returns hits among blocks read.
    fn play(&mut self, load: &Workload, depth: usize) -> f64 {
        let mut late = 0;
        for (tag, r) in (0..).zip(&load.requests) {
            let due = r.time_us * 1000 + late;
            let start = due.max(self.now);
            while self.step(start) {}
            let mut steps = 0;
            while self.in_flight >= depth {
                steps += 1;
                let ends = steps < STEPS_MAX && self.step(u64::MAX);
                assert!(ends, "{}", self.engine.explain());
            }
            self.now = self.now.max(start);
            late += self.now - due;
            let (offset, len) = ((r.block ^ DISK) * BLOCK, u64::from(r.count) * BLOCK);
            let buf = Buf::zeroed(len as usize);
            let request = if r.write {
                Request::write(tag, 1, offset, len, false, &buf, self.now)
            } else {
                Request::read(tag, 1, offset, len, &buf, self.now)
            };
            self.in_flight += 1;
            self.engine
                .submit(self.now, &mut vec![request], &mut self.fx);
            self.take();
            // What a request made necessary may be due before what was known to be.
            self.next_tick = self.next_tick.min(self.now + 1_000_000);
        }
        while self.in_flight > 0 {
            assert!(self.step(u64::MAX), "{}", self.engine.explain());
        }
        self.hit() as f64 / load.reads.max(1) as f64
    }

    /// Blocks read that were cached.
    fn hit(&self) -> u64 {
        let c = self.engine.stats(1, self.now).expect("attached").counters;
        c.read_hit_bytes / BLOCK
    }

    /// What was written to flash so far, in blocks.
    fn log_words(&self) -> String {
        let pool = self.engine.pool_stats();
        let c = pool.counters;
        let (client, again) = (
            c.flash_payload_bytes / BLOCK,
            c.flash_reinsert_bytes / BLOCK,
        );
        let all = self.flash_written / BLOCK;
        format!(
            "flash {all}: descriptors {} data {client} again {again} else {}; segments freed {}; cached {} dirty {} of {}",
            c.batches,
            all.saturating_sub(c.batches + client + again),
            c.segments_freed,
            pool.cached_blocks,
            pool.dirty_blocks,
            pool.capacity_blocks,
        )
    }

    fn words(&self, out: &Outcome) -> String {
        let c = self.engine.stats(1, self.now).expect("attached").counters;
        let pool = self.engine.pool_stats();
        format!(
            "  engine: fills {} again {} ahead {} used {} late {} wasted {} cached {} dirty {} stage hits {} until {} s\n  \
             {}\n  \
             simulated: fills {} again {} ahead {} used {} late {} wasted {} flash {}",
            c.fills,
            c.reinsertions,
            c.prefetched,
            c.prefetch_used,
            c.prefetch_late,
            c.prefetch_wasted,
            pool.cached_blocks,
            pool.dirty_blocks,
            c.stage_hit_bytes / BLOCK,
            self.now / 1_000_000_000,
            self.log_words(),
            out.insertions,
            out.reinsertions,
            out.prefetched,
            out.prefetch_hits + out.prefetch_late,
            out.prefetch_late,
            out.prefetch_wasted,
            out.flash_writes(),
        )
    }
}

/// A workload's first requests, on the disk there is.
pub fn cut(load: Workload, requests: usize) -> Workload {
    // Blocks are known to policy by disk and number, and which are sampled depends on both.
    let on_disk = load.requests.into_iter().take(requests).map(|r| Access {
        block: (r.block % DISK_BLOCKS) | DISK,
        ..r
    });
    Workload::made(&load.name, on_disk)
}

/// What a comparison is made with.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    pub mode: WriteMode,
    pub prefetch: bool,
    pub segments: u64,
    pub device: Device,
    pub depth: usize,
    pub freed: Freed,
}

/// Hits of the engine and of the simulator, in hundredths of the blocks read.
pub struct Both {
    pub engine: f64,
    pub simulated: f64,
    /// Bytes of the pool.
    pub capacity: u64,
    /// What either did, in words.
    pub words: String,
}

impl Both {
    /// How far the simulator is above the engine, in points.
    pub fn apart(&self) -> f64 {
        self.simulated - self.engine
    }
}

fn mode_of(mode: WriteMode) -> Mode {
    match mode {
        WriteMode::Back => Mode::WriteBack,
        WriteMode::Through => Mode::WriteThrough,
        WriteMode::Around => Mode::WriteAround,
    }
}

/// What the engine did with a part of a workload.
#[derive(Clone, Debug)]
pub struct Part {
    /// Of the blocks read, in hundredths.
    pub hits: f64,
    /// Blocks written to flash, with all that the log needs.
    pub flash: u64,
    /// Blocks that can be cached.
    pub capacity: u64,
    /// What these were, in words.
    pub words: String,
}

/// A pool of so many segments plays one part of a workload after the other.
pub fn parts(loads: &[Workload], terms: &Terms) -> Vec<Part> {
    parts_with(loads, terms, EngineOptions::default())
}

/// The same with an engine that is set otherwise.
pub fn parts_with(loads: &[Workload], terms: &Terms, options: EngineOptions) -> Vec<Part> {
    let mode = mode_of(terms.mode);
    let options = EngineOptions {
        prefetch: terms.prefetch,
        ..options
    };
    let mut live = Live::open(terms.segments, mode, terms.device, options);
    let mut play = |load: &Workload| {
        let before = (live.hit(), live.flash_written);
        live.play(load, terms.depth);
        let words = live.log_words();
        Part {
            words,
            hits: (live.hit() - before.0) as f64 * 100.0 / load.reads.max(1) as f64,
            flash: (live.flash_written - before.1) / BLOCK,
            capacity: live.engine.pool_stats().capacity_blocks,
        }
    };
    loads.iter().map(&mut play).collect()
}

/// What a flood met.
#[derive(Clone, Copy, Debug)]
pub struct Flood {
    /// Segments that came free while it was written.
    pub freed: u64,
    /// Blocks written to flash, with all that the log needs.
    pub flash: u64,
    /// The longest that a write took, in nanoseconds.
    pub longest_ns: u64,
}

/// Fills a pool of so many segments with what the origin has, then writes blocks in a given mode, many at a time. A
/// write that takes longer than `limit_ns` fails the test.
pub fn flood(
    segments: u64,
    fill: u64,
    mode: Mode,
    blocks: &[(u64, u64)],
    depth: usize,
    limit_ns: u64,
    faults: Faults,
) -> Flood {
    let device = Device {
        access_us: 20,
        ..Device::HARD_DISK
    };
    let mut live = Live::new(segments, mode, false, device, faults);
    live.engine.set_mode(1, Mode::WriteThrough).expect("set");
    for at in (0..fill).step_by(64) {
        live.ask(4, u64::MAX, |tag, now| Request {
            op: ReqOp::Prefetch,
            ..Request::read(
                tag,
                1,
                at * BLOCK,
                64 * BLOCK,
                &Buf::zeroed(64 * BLOCK as usize),
                now,
            )
        });
    }
    live.rest(u64::MAX);
    live.engine.set_mode(1, mode).expect("set");
    let before = (
        live.engine.pool_stats().counters.segments_freed,
        live.flash_written,
    );
    for (at, count) in blocks {
        let buf = Buf::zeroed((count * BLOCK) as usize);
        live.ask(depth, limit_ns, |tag, now| {
            Request::write(tag, 1, at * BLOCK, count * BLOCK, false, &buf, now)
        });
    }
    live.rest(limit_ns);
    let fault = live.engine.pool_stats().flash_fault;
    assert_eq!(fault, None, "sound flash was given up");
    Flood {
        freed: live.engine.pool_stats().counters.segments_freed - before.0,
        flash: (live.flash_written - before.1) / BLOCK,
        longest_ns: live.longest_ns,
    }
}

/// The same requests through both.
pub fn compare(load: &Workload, terms: &Terms) -> Both {
    let mode = mode_of(terms.mode);
    let mut live = Live::new(
        terms.segments,
        mode,
        terms.prefetch,
        terms.device,
        Faults::none(),
    );
    let engine = live.play(load, terms.depth) * 100.0;
    let pool = live.engine.pool_stats();
    let disk = Disk {
        segments: Some(pool.segments as u32),
        seq_cutoff: SEQ_CUTOFF,
        freed: terms.freed,
        device: terms.device,
        depth: terms.depth,
        ..Disk::default()
    };
    let settings = Settings {
        model: Model::Engine(disk),
        write_mode: terms.mode,
        ..Settings::default()
    };
    let policy = match terms.prefetch {
        true => Policy::Hearth,
        false => Policy::HearthDemand,
    };
    let (out, _) = run(policy, load, pool.capacity_blocks as usize, &settings);
    Both {
        engine,
        simulated: out.score() * 100.0,
        capacity: pool.capacity_blocks * BLOCK,
        words: live.words(&out),
    }
}
