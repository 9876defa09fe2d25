//! What destaging costs the guest who shares a device with it.
//!
//! Flash and origin are one modelled device that does one thing at a time, so whatever the destager asks of it
//! stands in the way of the writes behind it; or the origin is a modelled hard disk of its own, which serves what is near
//! its arm first. Time is virtual: the numbers are the same on every machine.

use hearth_engine::api::{DiskConfig, Effects, Mode, OriginState, ReqOp, Request};
use hearth_engine::{Engine, EngineOptions};
use hearth_format::{Layout, Superblock, Uuid};
use hearth_io::model::{HddCommand, HddModel, HddParams};
use hearth_io::{BLOCK, Buf, IoDone, IoOp, Media, OpKind, Sparse, Target};
use smallvec::{SmallVec, smallvec};
use std::collections::{BTreeMap, HashMap};

const POOL: u64 = 256 << 20;
const DISK: u64 = 1 << 30;
/// A guest's writes: one each so many nanoseconds in the mean.
const EVERY_NS: u64 = 500_000;
const MEASURED: u64 = 8_000;
const FLUSH_NS: u64 = 1_000_000;
/// Blocks of a long write.
const LONG: u64 = 32;
const OPERATION_NS: u64 = 20_000;

/// A pool and a disk on one device that takes a gigabyte a second, and time.
struct World {
    engine: Engine,
    /// What lies on flash; what an origin holds is not kept.
    media: Sparse,
    now: u64,
    tick_at: u64,
    /// When the device has done what it was given.
    free_at: u64,
    /// By the time they end.
    busy: BTreeMap<(u64, u64), IoOp>,
    /// The origin, if it is not on the same device, and what it was given.
    hard_disk: Option<HddModel>,
    given: HashMap<u64, IoOp>,
    fx: Effects,
    buf: Buf,
    issued: u64,
    asked_ns: HashMap<u64, u64>,
    latencies: Vec<u64>,
    origin_flushes: u64,
    flash_flushes: u64,
    /// Read from flash, in blocks.
    flash_reads: u64,
    destaged: u64,
    seed: u64,
}

impl World {
    fn new(destage_bytes_per_s: u64) -> World {
        let mut media = Sparse::new(POOL);
        let layout = Layout::for_device(POOL, Layout::segment_blocks_for(POOL)).expect("it fits");
        let uuid = Uuid::from_u128(1);
        let mut sb = Superblock::new(layout, uuid, uuid, "shared", 0);
        sb.store(&mut media).expect("it is stored");
        let opts = EngineOptions {
            prefetch: false,
            destage_bytes_per_s,
            ..EngineOptions::default()
        };
        let (engine, _) = Engine::open(&mut media, opts, &[]).expect("it opens");
        let cfg = DiskConfig {
            id: 1,
            size: DISK,
            origin_align: 4096,
            mode: Mode::WriteBack,
            block_size: 4096,
            min_bytes: 0,
            max_bytes: 0,
            seq_cutoff: 0,
            read_only: false,
            home: hearth_engine::api::Home::Origin,
        };
        engine
            .attach(cfg, OriginState::Flushed)
            .expect("it is attached");
        World {
            engine,
            media,
            now: 1_000_000_000,
            tick_at: 0,
            free_at: 0,
            busy: BTreeMap::new(),
            hard_disk: None,
            given: HashMap::new(),
            fx: Effects::default(),
            buf: Buf::zeroed((LONG * BLOCK) as usize),
            issued: 0,
            asked_ns: HashMap::new(),
            latencies: Vec::new(),
            origin_flushes: 0,
            flash_flushes: 0,
            flash_reads: 0,
            destaged: 0,
            seed: 7,
        }
    }

    fn random(&mut self) -> u64 {
        self.seed = hearth_policy::spread(self.seed);
        self.seed
    }

    /// Gives the device what the engine wants done.
    fn take_effects(&mut self) {
        for op in self.fx.ios.drain(..) {
            let origin = matches!(op.target, Target::Origin(_));
            let takes = match op.kind {
                OpKind::Flush => FLUSH_NS,
                _ => OPERATION_NS + op.len,
            };
            self.origin_flushes += u64::from(origin && op.kind == OpKind::Flush);
            self.flash_flushes += u64::from(!origin && op.kind == OpKind::Flush);
            self.flash_reads += match op.kind {
                OpKind::Read if !origin => op.len / BLOCK,
                _ => 0,
            };
            self.destaged += match op.kind {
                OpKind::Write if origin => op.len / BLOCK,
                _ => 0,
            };
            self.issued += 1;
            if let Some(disk) = self.hard_disk.as_mut().filter(|_| origin) {
                let command = match op.kind {
                    OpKind::Read => HddCommand::Read,
                    OpKind::Flush => HddCommand::Flush,
                    _ => HddCommand::Write,
                };
                disk.submit(self.now, self.issued, command, op.offset, op.len);
                self.given.insert(self.issued, op);
                continue;
            }
            self.free_at = self.free_at.max(self.now) + takes;
            self.busy.insert((self.free_at, self.issued), op);
        }
        for c in self.fx.completions.drain(..) {
            c.result.expect("the device fails nothing");
            let asked = self.asked_ns.remove(&c.tag).expect("it was asked for");
            self.latencies.push(self.now - asked);
        }
    }

    /// Lets time pass up to `until`, or until the device or the engine has something to say.
    fn pass(&mut self, until: u64) {
        let ends = self.busy.keys().next().map_or(u64::MAX, |(at, _)| *at);
        let turns = self.hard_disk.as_ref().and_then(HddModel::next_event);
        let first = ends.min(turns.unwrap_or(u64::MAX));
        self.now = until.min(first).min(self.tick_at).max(self.now);
        if ends == self.now
            && let Some((_, op)) = self.busy.pop_first()
        {
            self.done(op);
        }
        let mut finished = Vec::new();
        if let Some(disk) = &mut self.hard_disk {
            disk.advance(self.now, &mut finished);
        }
        for id in finished {
            let op = self.given.remove(&id).expect("it was given");
            self.done(op);
        }
        if self.tick_at <= self.now {
            let next = self.engine.tick(self.now, &mut self.fx);
            self.tick_at = next.unwrap_or(self.now + 1_000_000);
        }
        self.take_effects();
    }

    fn done(&mut self, mut op: IoOp) {
        self.do_on_flash(&mut op);
        let mut done = vec![IoDone {
            op,
            result: Ok(()),
            bad_blocks: SmallVec::new(),
            latency_ns: 1_000,
        }];
        self.engine.io_done(self.now, &mut done, &mut self.fx);
    }

    fn do_on_flash(&mut self, op: &mut IoOp) {
        if op.target != Target::Flash(0) {
            return;
        }
        let mut at = op.offset;
        for buf in &mut op.bufs {
            let done = match op.kind {
                OpKind::Read => self.media.read_at(at, buf.bytes_mut()),
                OpKind::Write => self.media.write_at(at, buf.bytes()),
                _ => Ok(()),
            };
            done.expect("it is within the device");
            at += buf.len() as u64;
        }
    }

    fn write(&mut self, block: u64, blocks: u64) {
        self.ask(ReqOp::Write { fua: false }, block, blocks);
    }

    fn ask(&mut self, op: ReqOp, block: u64, blocks: u64) {
        self.issued += 1;
        let len = blocks * BLOCK;
        let write = matches!(op, ReqOp::Write { .. });
        let buf = match write {
            true => self.buf.clone(),
            false => Buf::zeroed(len as usize),
        };
        let window = buf.slice(0, len as usize);
        let (at, tag) = (block * BLOCK, self.issued);
        let mut r = Request::new(tag, 1, op, at, len, Some(window), self.now);
        if write {
            r.crcs = smallvec![1; blocks as usize];
        }
        self.asked_ns.insert(tag, self.now);
        self.engine.submit(self.now, &mut vec![r], &mut self.fx);
        self.take_effects();
    }

    /// Makes about so much of the pool dirty, eight writes at a time; `place` says where.
    fn fill(&mut self, blocks: u64, place: impl Fn(u64, u64) -> u64) {
        for n in 0..blocks {
            let random = self.random();
            self.write(place(n, random), 1);
            while self.asked_ns.len() >= 8 {
                self.pass(u64::MAX);
            }
        }
    }

    /// Writes at random places, one after the other whether or not those before have ended; the 99th percentile of
    /// how long they took, and the longest, in microseconds.
    fn measure(&mut self) -> (u64, u64) {
        self.latencies.clear();
        (self.origin_flushes, self.destaged) = (0, 0);
        for _ in 0..MEASURED {
            let until = self.now + self.random() % (2 * EVERY_NS);
            while self.now < until {
                self.pass(until);
            }
            let block = self.random() % (DISK / BLOCK);
            self.write(block, 1);
        }
        self.latencies.sort_unstable();
        let at = |part: usize| self.latencies[(self.latencies.len() - 1) * part / 100] / 1000;
        (at(99), at(100))
    }
}

/// What is written over again and again dies on flash: nobody has to read it back and give it to an origin to
/// make room, and no flush of its own is needed for each segment that is dead.
#[test]
fn what_is_written_over_in_sequence_stays_away_from_the_origin() {
    const OVER: u64 = POOL / 8 / BLOCK;
    let mut w = World::new(0);
    let write_over = |w: &mut World, blocks: u64| {
        for n in 0..blocks / LONG {
            w.write(n * LONG % OVER, LONG);
            while w.asked_ns.len() >= 16 {
                w.pass(u64::MAX);
            }
        }
    };
    // Until the log goes round.
    write_over(&mut w, POOL / BLOCK * 3 / 2);
    (w.destaged, w.flash_flushes, w.flash_reads) = (0, 0, 0);
    let blocks = POOL / BLOCK * 2;
    write_over(&mut w, blocks);
    let segment = u64::from(Layout::segment_blocks_for(POOL));
    let (segments, flushes) = (blocks / segment, w.flash_flushes);
    println!(
        "{segments} segments written over: {} blocks destaged, {} read from flash, {flushes} flushes of flash",
        w.destaged, w.flash_reads
    );
    assert!(w.destaged * 50 <= blocks, "{} destaged", w.destaged);
    assert!(w.flash_reads * 20 <= blocks, "{} read", w.flash_reads);
    assert!(flushes * 2 <= segments, "{flushes} for {segments} segments");
}

/// Somebody beside this program, who swaps to the same flash, is held up: nothing has to go for what is read. Who reads and who writes is served as ever.
#[test]
fn nothing_is_evicted_for_what_is_read_while_somebody_else_is_held_up() {
    let mut w = World::new(0);
    // Twice what fits.
    let read = |w: &mut World, blocks: u64| {
        let evicted = |w: &World| {
            w.engine
                .counts(1, w.now)
                .expect("it is known")
                .counters
                .evictions
        };
        let before = evicted(w);
        for _ in 0..blocks {
            let block = w.random() % (2 * POOL / BLOCK);
            w.ask(ReqOp::Read, block, 1);
            while w.asked_ns.len() >= 8 {
                w.pass(u64::MAX);
            }
        }
        evicted(w) - before
    };
    let some = POOL / BLOCK / 2;
    read(&mut w, 8 * some);
    let usual = read(&mut w, some);
    w.engine.stand_back(true);
    // What was being emptied is.
    let at_first = read(&mut w, some / 16);
    let held_up = read(&mut w, some);
    w.fill(some / 8, |n, _| n);
    let written = read(&mut w, some);
    w.engine.stand_back(false);
    let after = read(&mut w, some);
    println!(
        "evicted for {some} reads: {usual} usually, {at_first} and {held_up} while somebody is held up, {written} after some were written, {after} after that"
    );
    assert!(usual > some / 100, "{usual}");
    // What is noted of what is read is written as ever, and may need a segment.
    assert!(
        (held_up + written) * 8 <= usual,
        "{held_up} and {written}, and {usual} usually"
    );
    assert!(after * 2 > usual, "{after}, and {usual} before");
}

fn compare(place: impl Fn(u64, u64) -> u64) {
    let blocks = POOL / BLOCK * 35 / 100;
    let mut alone = World::new(1);
    alone.fill(blocks, &place);
    let (p99_alone, longest_alone) = alone.measure();
    let mut beside = World::new(0);
    beside.fill(blocks, &place);
    let (p99, longest) = beside.measure();
    println!(
        "p99 {p99_alone} µs alone (longest {longest_alone}), {p99} ({longest}) beside {} blocks destaged with {} flushes of the origin",
        beside.destaged, beside.origin_flushes
    );
    assert!(beside.destaged > MEASURED / 4, "it destages on");
    assert!(
        beside.origin_flushes <= 16 + beside.destaged / 1500,
        "flushes are shared"
    );
    // Two flushes, of flash and origin, and what has gathered behind them.
    assert!(
        longest <= 5_000,
        "{longest} µs: somebody waited for a second"
    );
    // A run of 128 KiB, read in pieces or written, may stand in the way.
    assert!(
        p99 <= p99_alone + 300,
        "{p99} µs beside the destager, {p99_alone} alone"
    );
}

#[test]
fn small_writes_hardly_feel_small_runs_being_destaged() {
    compare(|_, random| random % (DISK / BLOCK));
}

#[test]
fn small_writes_hardly_feel_long_runs_being_destaged() {
    compare(|n, _| n);
}

const READS: usize = 2_000;
const READ_DEPTH: usize = 4;

/// Reads at random places of a hard disk, four at a time, of what is not on flash: the 99th percentile of how long they
/// took, in milliseconds. So much of the pool is dirty in single blocks all over the disk, and somebody may have asked
/// for all of it to be written back.
fn reads_of_a_hard_disk(dirty_percent: u64, flush: bool) -> (u64, u64) {
    let mut w = World::new(0);
    let dirty = POOL / BLOCK * dirty_percent / 100;
    let blocks = DISK / BLOCK;
    let apart = blocks / dirty.max(1);
    w.hard_disk = Some(HddModel::new(DISK, HddParams::default()));
    w.fill(dirty, |n, _| n * apart);
    w.engine.drain(1, flush).expect("it is attached");
    w.latencies.clear();
    w.destaged = 0;
    for _ in 0..READS {
        while w.asked_ns.len() >= READ_DEPTH {
            w.pass(u64::MAX);
        }
        let block = w.random() % (blocks / 2) * 2 + 1;
        w.ask(ReqOp::Read, block, 1);
    }
    w.latencies.sort_unstable();
    (
        w.latencies[(w.latencies.len() - 1) * 99 / 100] / 1_000_000,
        w.destaged,
    )
}

/// A drive serves what is near its arm first, and the next run of a sweep always is.
#[test]
fn reads_of_a_hard_disk_are_let_by_while_all_that_is_dirty_is_written_back() {
    let (idle, none) = reads_of_a_hard_disk(12, false);
    let (flush, asked) = reads_of_a_hard_disk(12, true);
    let (background, runs) = reads_of_a_hard_disk(40, false);
    println!(
        "p99 {idle} ms idle, {flush} ms beside {asked} blocks asked for, {background} ms beside {runs} in the background"
    );
    assert_eq!(none, 0, "nothing calls for it");
    assert!(asked > READS as u64 / 2 && runs > 0, "it goes on");
    assert!(flush <= 2 * idle, "{flush} ms beside a flush of all");
    assert!(background <= 2 * idle, "{background} ms");
}
