//! What `hearth simulate` promises, the engine keeps: the same trace at the same size gives the
//! same hit ratio within two points.
//!
//! The engine runs over devices that answer at once, in virtual time. All data is zeros, so that
//! the devices need to keep only the engine's own structures.

mod common;

use hearth_engine::api::{DiskConfig, Effects, OriginState, Request};
use hearth_engine::{Engine, EngineOptions};
use hearth_io::{Buf, IoOp, Media, OpKind, Target};
use hearth_policy::spread;
use hearth_simulate::{Policy, Request as Access, Settings, Workload, run};
use std::collections::HashMap;
use std::io;

const BLOCK: usize = 4096;
/// Segments of the pool, of 1 MiB: enough that those being written or emptied hardly count.
const SEGMENTS: u64 = 256;
const SEGMENT_BLOCKS: u32 = 256;
/// Free segments the engine keeps at this size, the head and those being emptied.
const SPARE: u64 = 4 + 4 + 3;
/// Time between requests.
const STEP_NS: u64 = 200_000;

/// A device that keeps only blocks that are not zeros.
#[derive(Default)]
struct Sparse {
    blocks: HashMap<u64, Box<[u8]>>,
    bytes: u64,
}

impl Media for Sparse {
    fn len(&self) -> u64 {
        self.bytes
    }
    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        for (i, out) in data.chunks_mut(BLOCK).enumerate() {
            match self.blocks.get(&(offset / BLOCK as u64 + i as u64)) {
                Some(block) => out.copy_from_slice(&block[..out.len()]),
                None => out.fill(0),
            }
        }
        Ok(())
    }
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        for (i, bytes) in data.chunks(BLOCK).enumerate() {
            let at = offset / BLOCK as u64 + i as u64;
            if bytes.iter().all(|b| *b == 0) {
                self.blocks.remove(&at);
            } else {
                self.blocks.insert(at, bytes.into());
            }
        }
        Ok(())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Live {
    flash: Sparse,
    engine: Engine,
    fx: Effects,
    now: u64,
    next_tick: u64,
}

impl Live {
    fn new(disk_blocks: u64, prefetch: bool) -> Live {
        let mut flash = Sparse {
            bytes: (SEGMENTS + 8) * u64::from(SEGMENT_BLOCKS) * BLOCK as u64,
            ..Sparse::default()
        };
        let bytes = flash.bytes;
        common::format(&mut flash, bytes, SEGMENT_BLOCKS);
        let options = EngineOptions {
            prefetch,
            fast_origin_ns: 0,
            ..EngineOptions::default()
        };
        let (engine, _) = Engine::open(&mut flash, options, &[]).unwrap();
        let config = DiskConfig {
            origin_align: 4096,
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

fn compare(name: &str, policy: Policy, accesses: Vec<Access>) {
    let mut live = Live::new(DISK_BLOCKS, policy == Policy::Hearth);
    let blocks_read: u64 = accesses.iter().map(|a| u64::from(a.count)).sum();
    for (i, access) in accesses.iter().enumerate() {
        live.read(i as u64, access);
    }
    let c = live.engine.stats(1, live.now).unwrap().counters;
    let real = (c.read_hit_bytes / BLOCK as u64) as f64 / blocks_read as f64;
    let pool = live.engine.pool_stats();
    let data = pool.capacity_blocks / pool.segments;
    let blocks = (pool.capacity_blocks - SPARE * data) as usize;
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
