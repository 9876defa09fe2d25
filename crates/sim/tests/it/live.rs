//! What `hearth simulate` promises, the engine keeps: the same trace at the same size gives the
//! same hit ratio within two points.
//!
//! The engine runs over devices that answer at once, in virtual time. All data is zeros, so that
//! the devices need to keep only the engine's own structures.

use crate::common;
use hearth_engine::api::{DiskConfig, Effects, Mode, OriginState, Request};
use hearth_engine::{Engine, EngineOptions};
use hearth_io::{Buf, IoOp, Media, OpKind, Sparse, Target};
use hearth_policy::spread;
use hearth_simulate::{Policy, Request as Access, Settings, Workload, run};
use std::collections::BTreeMap;

const BLOCK: usize = 4096;
/// Segments of the pool, of 1 MiB: enough that those being written or emptied hardly count.
const SEGMENTS: u64 = 256;
const SEGMENT_BLOCKS: u32 = 256;
/// Time between requests of one client.
const STEP_NS: u64 = 200_000;
/// What the devices take for an operation while many requests are in flight.
const FLASH_NS: u64 = 100_000;
const ORIGIN_NS: u64 = 8_000_000;

struct Live {
    flash: Sparse,
    engine: Engine,
    fx: Effects,
    now: u64,
    next_tick: u64,
}

impl Live {
    fn new(disk_blocks: u64, prefetch: bool) -> Live {
        Live::with_mode(disk_blocks, prefetch, Mode::WriteBack)
    }

    fn with_mode(disk_blocks: u64, prefetch: bool, mode: Mode) -> Live {
        let bytes = (SEGMENTS + 8) * u64::from(SEGMENT_BLOCKS) * BLOCK as u64;
        let mut flash = Sparse::new(bytes);
        common::format(&mut flash, bytes, SEGMENT_BLOCKS);
        let options = EngineOptions {
            prefetch,
            fast_origin_ns: 0,
            ..EngineOptions::default()
        };
        let (engine, _) = Engine::open(&mut flash, options, &[]).unwrap();
        let config = DiskConfig {
            origin_align: 4096,
            mode,
            seq_cutoff: match mode {
                Mode::WriteBack => 0,
                _ => 1 << 20,
            },
            ..common::disk(1, disk_blocks * BLOCK as u64)
        };
        engine.attach(config, OriginState::Flushed).unwrap();
        Live {
            flash,
            engine,
            fx: Effects::default(),
            now: 0,
            next_tick: 0,
        }
    }

    fn serve(&mut self, op: &IoOp) {
        let mut at = op.offset;
        for buf in &op.bufs {
            let mut buf = buf.clone();
            match (op.target, op.kind) {
                (Target::Flash(_), OpKind::Read) => self.flash.read_at(at, buf.bytes_mut()),
                (Target::Flash(_), OpKind::Write) => self.flash.write_at(at, buf.bytes()),
                (_, OpKind::Read) => {
                    buf.bytes_mut().fill(0);
                    Ok(())
                }
                _ => Ok(()),
            }
            .unwrap();
            at += buf.len() as u64;
        }
    }

    /// Carries out everything the engine asks for until it asks for nothing.
    fn settle(&mut self) {
        while !self.fx.ios.is_empty() {
            let mut dones = Vec::new();
            for op in std::mem::take(&mut self.fx.ios) {
                self.serve(&op);
                dones.push(op.done(Ok(()), 1000));
            }
            self.engine.io_done(self.now, &mut dones, &mut self.fx);
        }
    }

    fn read(&mut self, tag: u64, access: &Access) {
        self.now += STEP_NS;
        if self.now >= self.next_tick {
            self.next_tick = self.engine.tick(self.now, &mut self.fx).unwrap();
            self.settle();
        }
        let len = u64::from(access.count) * BLOCK as u64;
        let buf = Buf::zeroed(len as usize);
        let offset = access.block * BLOCK as u64;
        let mut list = vec![Request::read(tag, 1, offset, len, &buf, self.now)];
        self.engine.submit(self.now, &mut list, &mut self.fx);
        self.settle();
        assert_eq!(self.fx.completions.len(), 1, "{}", self.engine.explain());
        assert!(self.fx.completions.pop().unwrap().result.is_ok());
    }

    /// Writes, and waits until that is answered.
    fn write(&mut self, tag: u64, access: &Access) {
        self.now += STEP_NS;
        let len = u64::from(access.count) * BLOCK as u64;
        let buf = Buf::zeroed(len as usize);
        let offset = access.block * BLOCK as u64;
        let write = Request::write(tag, 1, offset, len, false, &buf, self.now);
        self.engine.submit(self.now, &mut vec![write], &mut self.fx);
        self.settle();
        while self.fx.completions.is_empty() || self.now >= self.next_tick {
            self.now = self.now.max(self.next_tick);
            self.next_tick = self.engine.tick(self.now, &mut self.fx).unwrap();
            self.settle();
        }
        assert!(self.fx.completions.pop().unwrap().result.is_ok());
    }

    /// Carries out reads of one block, `depth` of them in flight at any time, over devices that
    /// take their time. Returns how many of the blocks were hits.
    fn read_deep(&mut self, blocks: &[u64], depth: usize) -> u64 {
        let before = self.hits();
        let mut under_way = BTreeMap::new();
        let (mut ops, mut next, mut in_flight) = (0u64, 0, 0);
        while next < blocks.len() || in_flight > 0 {
            while in_flight < depth && next < blocks.len() {
                let buf = Buf::zeroed(BLOCK);
                let at = blocks[next] * BLOCK as u64;
                let read = Request::read(next as u64, 1, at, BLOCK as u64, &buf, self.now);
                self.engine.submit(self.now, &mut vec![read], &mut self.fx);
                next += 1;
                in_flight += 1;
                in_flight -= self.completed();
            }
            for op in std::mem::take(&mut self.fx.ios) {
                let took = match op.target {
                    Target::Flash(_) => FLASH_NS,
                    _ => ORIGIN_NS,
                };
                ops += 1;
                under_way.insert((self.now + took, ops), (op, took));
            }
            let first = under_way.first_key_value().map(|(key, _)| key.0);
            if first.is_none_or(|at| self.next_tick <= at) {
                self.now = self.now.max(self.next_tick);
                self.next_tick = self.engine.tick(self.now, &mut self.fx).unwrap();
            } else if let Some(((at, _), (op, took))) = under_way.pop_first() {
                self.now = self.now.max(at);
                self.serve(&op);
                let mut dones = vec![op.done(Ok(()), took)];
                self.engine.io_done(self.now, &mut dones, &mut self.fx);
            }
            in_flight -= self.completed();
        }
        self.hits() - before
    }

    fn completed(&mut self) -> usize {
        let all = self.fx.completions.drain(..);
        all.inspect(|c| assert!(c.result.is_ok())).count()
    }

    fn hits(&mut self) -> u64 {
        let stats = self.engine.stats(1, self.now).unwrap();
        stats.counters.read_hit_bytes / BLOCK as u64
    }

    /// Blocks that can be cached, as the simulator counts.
    fn blocks(&self) -> usize {
        let pool = self.engine.pool_stats();
        pool.capacity_blocks as usize
    }
}

fn reads(keys: impl IntoIterator<Item = u64>) -> Vec<Access> {
    let access = |(i, block)| Access {
        time_us: i as u64 * STEP_NS / 1000,
        block,
        count: 1,
        write: false,
    };
    keys.into_iter().enumerate().map(access).collect()
}

/// Blocks of the disk; block numbers are scattered over it.
const DISK_BLOCKS: u64 = 1 << 30;

fn zipf(n: u64, count: u64) -> impl Iterator<Item = u64> {
    (0..count).map(move |i| {
        let u = (spread(i) >> 11) as f64 / (1u64 << 53) as f64;
        spread((n as f64).powf(u) as u64) % DISK_BLOCKS
    })
}

/// A working set that is used all the time, and a scan that is read once, mixed.
fn washed(hot: u64, count: u64) -> impl Iterator<Item = u64> {
    (0..count).map(move |i| {
        let key = if spread(i).is_multiple_of(2) {
            spread(i ^ 1 << 50) % hot
        } else {
            1 << 40 | i
        };
        spread(key) % DISK_BLOCKS
    })
}

/// Requests of 8 blocks: a large file read over and over, now and then something else.
fn loops(blocks: u64, count: u64) -> Vec<Access> {
    let access = |i: u64| {
        let block = if i.is_multiple_of(7) {
            spread(i) % (DISK_BLOCKS - 8)
        } else {
            i * 8 % blocks
        };
        Access {
            time_us: i * STEP_NS / 1000,
            block,
            count: 8,
            write: false,
        }
    };
    (0..count).map(access).collect()
}

/// Four fifths of the reads go to a fifth of the disk.
fn skewed(n: u64, count: u64) -> impl Iterator<Item = u64> {
    (0..count).map(move |i| {
        let r = spread(i);
        let hot = n / 5;
        let at = spread(i ^ 1 << 50);
        if r % 5 < 4 {
            at % hot
        } else {
            hot + at % (n - hot)
        }
    })
}

fn compare(name: &str, policy: Policy, accesses: Vec<Access>) {
    let mut live = Live::new(DISK_BLOCKS, policy == Policy::Hearth);
    let blocks_read: u64 = accesses.iter().map(|a| u64::from(a.count)).sum();
    for (i, access) in accesses.iter().enumerate() {
        live.read(i as u64, access);
    }
    let c = live.engine.stats(1, live.now).unwrap().counters;
    let real = (c.read_hit_bytes / BLOCK as u64) as f64 / blocks_read as f64;
    let blocks = live.blocks();
    let load = Workload::made(name, accesses);
    let (out, _) = run(policy, &load, blocks, &Settings::default());
    let simulated = out.score();
    println!(
        "{name}: live {:.2} %, simulated {:.2} % with {blocks} blocks; appended again {}, fills {}, rejected {}, ahead {} of which used {}",
        real * 100.0,
        simulated * 100.0,
        c.reinsertions,
        c.fills,
        c.fills_rejected,
        c.prefetched,
        c.prefetch_used
    );
    assert!(
        (real - simulated).abs() < 0.02,
        "{name}: live {real:.4}, simulated {simulated:.4}"
    );
}

#[test]
fn the_engine_hits_as_often_as_simulated() {
    compare("zipf", Policy::HearthDemand, reads(zipf(400_000, 500_000)));
    compare(
        "washed",
        Policy::HearthDemand,
        reads(washed(30_000, 500_000)),
    );
    compare("loops", Policy::Hearth, loops(200_000, 100_000));
}

/// While everybody misses, a cache of nearly all that is hot shows whether what was used stays: once
/// the engine let go of a quarter of each old segment whatever it held, and hit 7 points less.
#[test]
fn what_is_hot_stays_when_the_cache_holds_little_else() {
    const DISK: u64 = 320_000;
    const READS: u64 = 1_500_000;
    const DEPTH: usize = 24;
    let keys: Vec<u64> = skewed(DISK, 2 * READS).collect();
    let (warming, measured) = keys.split_at(READS as usize);
    let mut live = Live::new(DISK, false);
    live.read_deep(warming, DEPTH);
    let real = live.read_deep(measured, DEPTH) as f64 / READS as f64;
    let blocks = live.blocks();
    let hits = |keys: &[u64]| {
        let load = Workload::made("skewed", reads(keys.iter().copied()));
        let (out, _) = run(Policy::HearthDemand, &load, blocks, &Settings::default());
        out.read_hits
    };
    let simulated = (hits(&keys) - hits(warming)) as f64 / READS as f64;
    let share = blocks as f64 / DISK as f64;
    println!("{share:.3} of the disk: live {real:.4}, simulated {simulated:.4}");
    assert!((real - simulated).abs() < 0.02);
    // Four fifths of the reads go to a fifth of the disk.
    assert!(real > (share / 0.2).min(1.0) * 0.8 - 0.05);
}

/// A hot set of half the cache is still there after a restore of four times the cache.
#[test]
fn restore_leaves_hot_set() {
    for mode in [Mode::WriteBack, Mode::WriteThrough, Mode::WriteAround] {
        let mut live = Live::with_mode(DISK_BLOCKS, false, mode);
        let blocks = live.blocks() as u64;
        let hot = blocks / 2;
        let access = |block: u64, count: u32| Access {
            time_us: 0,
            block,
            count,
            write: count > 1,
        };
        let read_all = |live: &mut Live, turns: u64| {
            let before = live.hits();
            for i in 0..hot * turns {
                // Every block once per turn, not in disk order.
                let block = i * 7919 % hot * 3;
                live.read(i, &access(block, 1));
            }
            (live.hits() - before) as f64 / (hot * turns) as f64
        };
        read_all(&mut live, 3);
        let before = read_all(&mut live, 1);
        for i in 0..blocks * 4 / 64 {
            live.write(i, &access(1 << 28 | (i * 64), 64));
        }
        let after = read_all(&mut live, 1);
        let written = live.engine.stats(1, live.now).unwrap().counters.fills;
        println!("{mode:?}: {before:.3} before, {after:.3} after; fills {written}");
        assert!(
            before > 0.99 && after > 0.9,
            "{mode:?}: {before:.3}, {after:.3}"
        );
    }
}
