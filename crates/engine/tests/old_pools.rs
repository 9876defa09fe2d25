//! Pools that an earlier build left (commit 36e38b3, `KEEP_POOLS` in tests/e2e/tests/old_builds.rs): stopped, killed
//! with data only on flash, and given up. Every block is still what that build was told to keep. If this fails,
//! pools in use would not be read any more.

use hearth_engine::api::{DiskConfig, Effects, Mode, OriginState, Request};
use hearth_engine::{Engine, EngineOptions, KnownDisk};
use hearth_format::{Places, PoolState, Superblock};
use hearth_io::{BLOCK, Buf, IoDone, IoOp, Media, OpKind, Target};
use std::io;

/// Blocks of each disk.
const BLOCKS: u64 = 256;
const DISKS: [&str; 2] = ["back", "through"];
/// Bytes of a read.
const PIECE: u64 = 64 << 10;

/// A device in memory.
struct Mem(Vec<u8>);

impl Mem {
    fn unpack(packed: &[u8]) -> Mem {
        Mem(zstd::decode_all(packed).unwrap())
    }

    fn carry_out(&mut self, op: &mut IoOp) {
        let mut at = op.offset;
        for buf in &mut op.bufs {
            match op.kind {
                OpKind::Read => self.read_at(at, buf.bytes_mut()).unwrap(),
                OpKind::Write => self.write_at(at, buf.bytes()).unwrap(),
                _ => {}
            }
            at += buf.len() as u64;
        }
        if matches!(op.kind, OpKind::WriteZeroes { .. }) {
            self.0[op.offset as usize..][..op.len as usize].fill(0);
        }
    }
}

impl Media for Mem {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }
    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        data.copy_from_slice(&self.0[offset as usize..][..data.len()]);
        Ok(())
    }
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0[offset as usize..][..data.len()].copy_from_slice(data);
        Ok(())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What the build was told of a disk, as tests/e2e/tests/old_builds.rs told it.
fn known(disk: usize, failed: bool) -> Vec<u8> {
    let mut data = Vec::new();
    for block in 0..BLOCKS {
        let version: u64 = match block {
            62..70 if failed => 6,
            60..62 if failed => 5,
            16..20 => 3,
            8..24 => 2,
            200..203 => 4,
            40..48 => {
                data.extend([0; BLOCK as usize]);
                continue;
            }
            _ => 1,
        };
        let word = ((disk as u64 + 1) << 48 | version << 32 | block).to_le_bytes();
        data.extend(word.repeat(BLOCK as usize / 8));
    }
    let part = 100 * BLOCK as usize + 512;
    data[part..part + 1024].fill(0x5A);
    data
}

struct Rig {
    engine: Engine,
    flash: Mem,
    origins: [Mem; 2],
    /// The disks' numbers.
    ids: [u16; 2],
    fx: Effects,
    now: u64,
}

impl Rig {
    fn open(mut flash: Mem, origins: [Mem; 2]) -> Rig {
        let sb = Superblock::load(&mut flash).unwrap();
        let (registry, _) = Places::load(&mut flash, &sb.layout, sb.pool).unwrap();
        let records = DISKS.map(|name| {
            let found = registry.disks.iter().find(|d| d.name == name);
            found.unwrap().clone()
        });
        let known = records.each_ref().map(|d| KnownDisk {
            id: d.id,
            size: d.size,
            since_seq: d.since_seq,
        });
        let (engine, _) = Engine::open(&mut flash, EngineOptions::default(), &known).unwrap();
        for (record, mode) in records.iter().zip([Mode::WriteBack, Mode::WriteThrough]) {
            let config = DiskConfig {
                id: record.id,
                size: record.size,
                origin_align: 512,
                mode,
                block_size: 4096,
                min_bytes: 0,
                max_bytes: 0,
                seq_cutoff: 0,
                read_only: false,
            };
            engine.attach(config, OriginState::Unknown).unwrap();
        }
        Rig {
            engine,
            flash,
            origins,
            ids: records.map(|d| d.id),
            fx: Effects::default(),
            now: 1_000_000_000,
        }
    }

    fn done(&mut self, mut op: IoOp) -> IoDone {
        match op.target {
            Target::Flash(_) => self.flash.carry_out(&mut op),
            Target::Origin(id) => {
                let disk = self.ids.iter().position(|known| *known == id).unwrap();
                self.origins[disk].carry_out(&mut op);
            }
        }
        op.done(Ok(()), 10_000)
    }

    fn read(&mut self, disk: usize, offset: u64) -> Vec<u8> {
        let buf = Buf::zeroed(PIECE as usize);
        let request = Request::read(1, self.ids[disk], offset, PIECE, &buf, self.now);
        self.engine
            .submit(self.now, &mut vec![request], &mut self.fx);
        for _ in 0..10_000 {
            if let Some(answer) = self.fx.completions.pop() {
                answer.result.unwrap();
                return buf.all().bytes().to_vec();
            }
            self.now += 100_000;
            let ops: Vec<IoOp> = self.fx.ios.drain(..).collect();
            let mut dones = ops.into_iter().map(|op| self.done(op)).collect();
            self.engine.io_done(self.now, &mut dones, &mut self.fx);
            self.engine.tick(self.now, &mut self.fx);
        }
        panic!("a read is not answered");
    }
}

fn check(packed: [&[u8]; 3], left: fn(&PoolState) -> bool) {
    let [flash, back, through] = packed.map(Mem::unpack);
    let mut flash = flash;
    let state = Superblock::load(&mut flash).unwrap().state;
    assert!(left(&state), "{state:?}");
    let mut rig = Rig::open(flash, [back, through]);
    for (disk, name) in DISKS.iter().enumerate() {
        let known = known(disk, state == PoolState::Failed);
        for offset in (0..BLOCKS * BLOCK).step_by(PIECE as usize) {
            let found = rig.read(disk, offset);
            assert!(
                found == known[offset as usize..][..PIECE as usize],
                "{name} is not what was kept, from {offset} on"
            );
        }
    }
}

macro_rules! pool {
    ($name:literal) => {
        [
            include_bytes!(concat!("pools/", $name, ".flash.zst")),
            include_bytes!(concat!("pools/", $name, ".back.zst")),
            include_bytes!(concat!("pools/", $name, ".through.zst")),
        ]
    };
}

#[test]
fn a_pool_that_was_stopped() {
    check(pool!("stopped"), |s| matches!(s, PoolState::Clean { .. }));
}

#[test]
fn a_pool_that_was_killed() {
    check(pool!("killed"), |s| *s == PoolState::Open);
}

#[test]
fn a_pool_that_was_given_up() {
    check(pool!("failed"), |s| *s == PoolState::Failed);
}
