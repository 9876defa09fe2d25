//! One of two flash devices answers ten times as slowly as the other: what that does to those who wait.
//!
//! Devices are modelled: each answers any number of operations at once, each in a time of its own. Time is virtual, so
//! the numbers are the same on every machine.

use hearth_engine::api::{DiskConfig, Effects, Home, Mode, OriginState, ReqOp, Request};
use hearth_engine::{Engine, EngineOptions};
use hearth_format::{DeviceEntry, Layout, Superblock, Uuid};
use hearth_io::{BLOCK, Buf, IoDone, IoOp, Joined, Media, OpKind, Sparse, Spread, Target};
use hearth_policy::cleaning::Heads;
use smallvec::{SmallVec, smallvec};
use std::collections::{BTreeMap, HashMap};

const DEVICE: u64 = 128 << 20;
const SEGMENT_BLOCKS: u32 = 256;
const DISK: u64 = 1 << 30;
/// What is used: it would fit on either device.
const WORKING: u64 = (40 << 20) / BLOCK;
/// Requests in flight at once.
const DEPTH: usize = 8;
/// Blocks of a request of one who writes on end.
const MANY: u64 = 32;
const GOOD_NS: u64 = 100_000;
const ORIGIN_NS: u64 = 4_000_000;
const SECOND: u64 = 1_000_000_000;

struct World {
    engine: Engine,
    media: Joined<Sparse>,
    spread: Spread,
    /// How long an operation takes on each device.
    takes: Vec<u64>,
    /// Nanoseconds, and bytes that each device reads at most in so long, and so many it writes, if that is limited; which of these times
    /// it has come to, and what of it is given away.
    share: Option<(u64, u64)>,
    given: Vec<[(u64, u64); 2]>,
    now: u64,
    tick_at: u64,
    busy: BTreeMap<(u64, u64), (IoOp, u64)>,
    fx: Effects,
    buf: Buf,
    /// Requests in flight at once.
    depth: usize,
    issued: u64,
    asked: HashMap<u64, (u64, bool)>,
    reads: Vec<u64>,
    writes: Vec<u64>,
    seed: u64,
}

fn format(devices: usize) -> (Joined<Sparse>, Spread) {
    let sizes = vec![DEVICE; devices];
    let (layout, extents) = Layout::for_devices(&sizes, SEGMENT_BLOCKS).expect("it fits");
    let device = |n: usize| Uuid::from_u128(1 + n as u128);
    let mut media: Vec<Sparse> = sizes.into_iter().map(Sparse::new).collect();
    let mut lead = Superblock::new(layout, device(99), device(0), "slow", 0);
    if devices > 1 {
        let entries = extents.into_iter().enumerate();
        let entries = entries.map(|(n, extent)| DeviceEntry {
            device: device(n),
            extent,
        });
        lead.set_devices(layout, entries.collect());
        lead.stamp = 1;
        for (n, media) in media.iter_mut().enumerate().skip(1) {
            let mut sb = lead.for_member(n as u16, device(n), 0);
            sb.store(media).expect("it is stored");
        }
    }
    lead.store(&mut media[0]).expect("it is stored");
    let spread = lead.spread();
    (Joined::new(spread.clone(), media), spread)
}

/// How long an operation waits until its device has a share left for it, as where the kernel or a provider limits that.
fn wait(given: &mut [(u64, u64); 2], op: &IoOp, (ns, share): (u64, u64), now: u64) -> u64 {
    let (slice, used) = &mut given[usize::from(op.kind == OpKind::Write)];
    if *slice < now / ns {
        (*slice, *used) = (now / ns, 0);
    }
    while *used >= share {
        (*slice, *used) = (*slice + 1, *used - share);
    }
    *used += op.len;
    (*slice * ns).saturating_sub(now)
}

impl World {
    fn new(devices: usize) -> World {
        // Devices are compared, and in a second in which the log is cleaned the 99th percentile of one
        // device alone is, with two heads, that of those who wait for an origin or that of those who do not.
        World::with(devices, Heads::One)
    }

    fn with(devices: usize, heads: Heads) -> World {
        let (mut media, spread) = format(devices);
        let opts = EngineOptions {
            prefetch: false,
            heads,
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
            home: Home::Origin,
        };
        engine
            .attach(cfg, OriginState::Flushed)
            .expect("it is attached");
        World {
            engine,
            media,
            spread,
            takes: vec![GOOD_NS; devices],
            share: None,
            given: vec![[(0, 0); 2]; devices],
            now: SECOND,
            tick_at: 0,
            busy: BTreeMap::new(),
            fx: Effects::default(),
            buf: Buf::zeroed((MANY * BLOCK) as usize),
            depth: DEPTH,
            issued: 0,
            asked: HashMap::new(),
            reads: Vec::new(),
            writes: Vec::new(),
            seed: 7,
        }
    }

    fn random(&mut self) -> u64 {
        self.seed = hearth_policy::spread(self.seed);
        self.seed
    }

    fn take_effects(&mut self) {
        for op in self.fx.ios.drain(..) {
            let takes = match op.target {
                Target::Origin(_) => ORIGIN_NS,
                // A quarter more or less, so that not all end together.
                Target::Flash(n) => {
                    self.seed = hearth_policy::spread(self.seed);
                    let takes = self.takes[usize::from(n)];
                    let takes = takes * 3 / 4 + self.seed % (takes / 2) + op.len / 4;
                    let given = &mut self.given[usize::from(n)];
                    takes
                        + self
                            .share
                            .map_or(0, |share| wait(given, &op, share, self.now))
                }
            };
            self.issued += 1;
            self.busy
                .insert((self.now + takes, self.issued), (op, takes));
        }
        for c in self.fx.completions.drain(..) {
            c.result.expect("the devices fail nothing");
            let (asked, write) = self.asked.remove(&c.tag).expect("it was asked for");
            let into = match write {
                true => &mut self.writes,
                false => &mut self.reads,
            };
            into.push(self.now - asked);
        }
    }

    fn pass(&mut self) {
        let ends = self.busy.keys().next().map_or(u64::MAX, |(at, _)| *at);
        self.now = ends.min(self.tick_at).max(self.now);
        if ends == self.now
            && let Some((_, (mut op, latency_ns))) = self.busy.pop_first()
        {
            self.do_on_flash(&mut op);
            let mut done = vec![IoDone {
                op,
                result: Ok(()),
                bad_blocks: SmallVec::new(),
                latency_ns,
            }];
            self.engine.io_done(self.now, &mut done, &mut self.fx);
        }
        if self.tick_at <= self.now {
            let next = self.engine.tick(self.now, &mut self.fx);
            self.tick_at = next.unwrap_or(self.now + 1_000_000);
        }
        self.take_effects();
    }

    fn do_on_flash(&mut self, op: &mut IoOp) {
        let Target::Flash(device) = op.target else {
            return;
        };
        if op.kind == OpKind::Flush {
            return;
        }
        let mut at = self
            .spread
            .whole(device, op.offset)
            .expect("it lies on the device");
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

    fn ask(&mut self, block: u64, blocks: u64, write: bool) {
        self.issued += 1;
        let (len, at) = (blocks * BLOCK, block * BLOCK);
        let window = self.buf.slice(0, len as usize);
        let op = match write {
            true => ReqOp::Write { fua: false },
            false => ReqOp::Read,
        };
        let mut r = Request::new(self.issued, 1, op, at, len, Some(window), self.now);
        if write {
            r.crcs = smallvec![1; blocks as usize];
        }
        self.asked.insert(self.issued, (self.now, write));
        self.engine.submit(self.now, &mut vec![r], &mut self.fx);
        self.take_effects();
        while self.asked.len() >= self.depth {
            self.pass();
        }
    }

    /// Writes all that is used, once.
    fn fill(&mut self) {
        for block in 0..WORKING {
            self.ask(block, 1, true);
        }
    }

    /// Reads, and some writes, of what is used, for so long.
    fn use_for(&mut self, ns: u64) {
        self.reads.clear();
        self.writes.clear();
        let end = self.now + ns;
        while self.now < end {
            let block = self.random() % WORKING;
            let write = self.random() % 5 == 0;
            self.ask(block, 1, write);
        }
    }

    /// Reads or writes on end for so long; how many blocks that were.
    fn on_end(&mut self, write: bool, ns: u64) -> u64 {
        let (end, mut block) = (self.now + ns, 0);
        while self.now < end {
            self.ask(block % WORKING, MANY, write);
            block += MANY;
        }
        block
    }

    /// Reads here and there for so long; how many blocks that were.
    fn here_and_there(&mut self, ns: u64) -> u64 {
        let (end, mut blocks) = (self.now + ns, 0);
        while self.now < end {
            let block = self.random() % (WORKING / MANY) * MANY;
            self.ask(block, MANY, false);
            blocks += MANY;
        }
        blocks
    }

    /// Hardly reads anything for so long.
    fn use_now_and_then(&mut self, ns: u64) {
        let end = self.now + ns;
        while self.now < end {
            let block = self.random() % WORKING;
            self.ask(block, 1, false);
            let next = self.now + 5_000_000;
            while self.now < next {
                self.pass();
            }
        }
    }

    /// The 99th percentile of reads and of writes lately, in microseconds.
    fn p99(&mut self) -> (u64, u64) {
        let at = |all: &mut Vec<u64>| {
            all.sort_unstable();
            all[all.len() * 99 / 100] / 1000
        };
        (at(&mut self.reads), at(&mut self.writes))
    }

    fn writes_of(&self, device: usize) -> u64 {
        self.engine.device_stats()[device].figures.writes
    }
}

#[test]
fn at_ten_times_the_latency_of_one_of_two_the_p99_is_at_most_twice_that_of_the_good_one_alone() {
    let mut alone = World::new(1);
    alone.fill();
    alone.use_for(2 * SECOND);
    alone.use_for(SECOND);
    let good = alone.p99();

    let mut w = World::new(2);
    w.fill();
    w.use_for(2 * SECOND);
    w.use_for(SECOND);
    let both = w.p99();
    w.takes[1] = 10 * GOOD_NS;
    w.use_for(SECOND);
    let at_first = w.p99();
    w.use_for(6 * SECOND);
    let before = w.writes_of(1);
    w.use_for(SECOND);
    let slow = w.p99();
    let written = w.writes_of(1) - before;
    println!(
        "p99 of reads and writes in µs: {good:?} on the good one alone, {both:?} on two good ones, \
         {at_first:?} when one became slow, {slow:?} after 6 s more; {written} writes went to it in the second after"
    );
    assert!(w.engine.device_stats()[1].slow, "it is not said to be slow");
    // Else nothing is shown.
    assert!(
        at_first.0 > 2 * good.0 && at_first.1 > 2 * good.1,
        "{at_first:?}"
    );
    assert!(slow.0 <= 2 * good.0, "reads: {slow:?}, and {good:?} alone");
    assert!(slow.1 <= 2 * good.1, "writes: {slow:?}, and {good:?} alone");

    // It is quick again, and has its share again.
    w.takes[1] = GOOD_NS;
    w.use_now_and_then(60 * SECOND);
    assert!(
        !w.engine.device_stats()[1].slow,
        "it is left alone for good"
    );
    let (before, good) = (w.writes_of(1), w.writes_of(0));
    w.use_for(SECOND);
    let (written, good) = (w.writes_of(1) - before, w.writes_of(0) - good);
    assert!(
        written * 4 > good,
        "{written} writes, and {good} to the other"
    );
}

/// Each device reads and writes 200 MB/s and no more, in shares of so many milliseconds, and has to do more than that: what is
/// done in ten seconds, MB/s, and in how many of them a device was said to be slow.
fn under_load(
    devices: usize,
    ms: u64,
    depth: usize,
    step: fn(&mut World, u64) -> u64,
) -> (u64, usize) {
    let mut w = World::with(devices, Heads::MovesApart);
    (w.share, w.depth) = (Some((ms * SECOND / 1000, ms * 200_000)), depth);
    w.on_end(true, SECOND);
    let (mut done, mut slow) = (0, 0);
    for _ in 0..10 {
        done += step(&mut w, SECOND);
        slow += w.engine.device_stats().iter().filter(|d| d.slow).count();
    }
    (done * BLOCK / 10_000_000, slow)
}

/// Which of two has the queue is chance, and then stays so for long: it is no slower for that.
#[test]
fn equal_devices_under_load_are_both_used() {
    let look =
        |what: &str, ms: u64, depth: usize, step: fn(&mut World, u64) -> u64, wanted: u64| {
            let (one, two) = (
                under_load(1, ms, depth, step),
                under_load(2, ms, depth, step),
            );
            println!(
                "{what}, shares of {ms} ms, depth {depth}: {} MB/s on one, {two:?} on two",
                one.0
            );
            assert!(
                two.0 * 100 > one.0 * wanted,
                "{what}, {ms} ms, {depth}: {one:?}, {two:?}"
            );
            assert!(
                two.1 <= 3,
                "{what}, {ms} ms, {depth}: a device is called slow"
            );
        };
    // What is written is read once more, when it is destaged.
    look("writes on end", 100, 16, |w, ns| w.on_end(true, ns), 130);
    look("reads on end", 100, 16, |w, ns| w.on_end(false, ns), 150);
    for (ms, depth) in [(1, 16), (100, 16), (1, 64), (100, 64)] {
        look(
            "reads here and there",
            ms,
            depth,
            World::here_and_there,
            150,
        );
    }
}
