//! Pools that an earlier build left (commit 36e38b3, `KEEP_POOLS` in tests/e2e/tests/it/old_builds.rs): stopped, killed
//! with data only on flash, killed after their log had gone round, and given up. Every block is still what that build was told to keep. If this fails,
//! pools in use would not be read any more.
//!
//! Those builds freed the oldest segment and knew no segment map. The first start gives a pool one, and may be
//! cut anywhere; then segments from before and new ones share the log until the old ones are gone.

use hearth_engine::api::{DiskConfig, Effects, Mode, OriginState, ReqOp, Request};
use hearth_engine::{Engine, EngineOptions, KnownDisk, OpenedFrom};
use hearth_format::superblock::{INCOMPAT_HEADS, INCOMPAT_MAP};
use hearth_format::{
    BatchHeader, Entry, Kind, Layout, Places, PoolState, SegmentMap, Superblock, Uuid, pool_tag,
};
use hearth_io::checksum::crc32c;
use hearth_io::{BLOCK, Buf, IoDone, IoOp, Media, OpKind, Target};
use std::io;
use std::ops::Range;

/// Blocks of each disk.
const BLOCKS: u64 = 256;
const DISKS: [&str; 2] = ["back", "through"];
/// Bytes of a read.
const PIECE: u64 = 64 << 10;

/// Overwrites that take the log round more than once.
const PASSES: u64 = 160;

/// A device in memory that forgets what was not flushed, and dies after some writes and flushes.
#[derive(Clone)]
struct Mem {
    bytes: Vec<u8>,
    /// What stood where it was written since the last flush.
    before: Vec<(usize, Vec<u8>)>,
    left: usize,
}

impl Mem {
    fn of(bytes: Vec<u8>) -> Mem {
        Mem {
            bytes,
            before: Vec::new(),
            left: usize::MAX,
        }
    }

    fn unpack(packed: &[u8]) -> Mem {
        Mem::of(zstd::decode_all(packed).unwrap())
    }

    fn step(&mut self) -> io::Result<()> {
        self.left = self.left.checked_sub(1).ok_or(io::ErrorKind::BrokenPipe)?;
        Ok(())
    }

    /// Power is back. Of what was not flushed, the writes that `keep` names are there.
    fn power_cycle(&mut self, keep: fn(usize) -> bool) {
        for (n, (at, bytes)) in self.before.drain(..).enumerate().rev() {
            if !keep(n) {
                self.bytes[at..at + bytes.len()].copy_from_slice(&bytes);
            }
        }
        self.left = usize::MAX;
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
        match op.kind {
            OpKind::WriteZeroes { .. } => {
                self.write_at(op.offset, &vec![0; op.len as usize]).unwrap();
            }
            OpKind::Flush => self.flush().unwrap(),
            _ => {}
        }
    }
}

impl Media for Mem {
    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }
    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        data.copy_from_slice(&self.bytes[offset as usize..][..data.len()]);
        Ok(())
    }
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.step()?;
        let there = &mut self.bytes[offset as usize..][..data.len()];
        self.before.push((offset as usize, there.to_vec()));
        there.copy_from_slice(data);
        Ok(())
    }
    fn flush(&mut self) -> io::Result<()> {
        self.step()?;
        self.before.clear();
        Ok(())
    }
}

/// How the build left a pool.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Left {
    Stopped,
    Killed,
    Worn,
    Failed,
}

/// Blocks of a disk in one of their versions.
fn fill(disk: usize, blocks: Range<u64>, version: u64) -> Vec<u8> {
    let word = |block: u64| ((disk as u64 + 1) << 48 | version << 32 | block).to_le_bytes();
    blocks
        .flat_map(|block| word(block).repeat(BLOCK as usize / 8))
        .collect()
}

/// What is overwritten in a pass.
fn pass(n: u64) -> Range<u64> {
    let start = n * 37 % BLOCKS;
    start..(start + 64).min(BLOCKS)
}

fn put(data: &mut [u8], disk: usize, blocks: Range<u64>, version: u64) {
    let at = (blocks.start * BLOCK) as usize;
    let new = fill(disk, blocks, version);
    data[at..at + new.len()].copy_from_slice(&new);
}

/// Settings of a disk, as tests/e2e/tests/it/old_builds.rs passed them to that build.
fn known(disk: usize, left: Left) -> Vec<u8> {
    let mut data = fill(disk, 0..BLOCKS, 1);
    put(&mut data, disk, 8..24, 2);
    put(&mut data, disk, 16..20, 3);
    put(&mut data, disk, 200..203, 4);
    let part = 100 * BLOCK as usize + 512;
    data[part..part + 1024].fill(0x5A);
    data[40 * BLOCK as usize..48 * BLOCK as usize].fill(0);
    match left {
        Left::Stopped | Left::Killed => {}
        Left::Worn => (0..PASSES).for_each(|n| put(&mut data, disk, pass(n), 100 + n)),
        Left::Failed => {
            put(&mut data, disk, 60..64, 5);
            put(&mut data, disk, 62..70, 6);
        }
    }
    data
}

struct Rig {
    engine: Engine,
    from: OpenedFrom,
    flash: Mem,
    origins: [Mem; 2],
    /// The disks' numbers.
    ids: [u16; 2],
    /// What they hold.
    known: [Vec<u8>; 2],
    fx: Effects,
    now: u64,
}

fn disks(flash: &mut Mem) -> [KnownDisk; 2] {
    let sb = Superblock::load(flash).unwrap();
    let (registry, _) = Places::load(flash, &sb.layout, sb.pool).unwrap();
    DISKS.map(|name| {
        let found = registry.disks.iter().find(|d| d.name == name);
        let disk = found.unwrap();
        KnownDisk {
            id: disk.id,
            size: disk.size,
            since_seq: disk.since_seq,
            home: hearth_engine::api::Home::Origin,
        }
    })
}

impl Rig {
    fn open(mut flash: Mem, origins: [Mem; 2], known: [Vec<u8>; 2]) -> Rig {
        let disks = disks(&mut flash);
        let (engine, report) = Engine::open(&mut flash, EngineOptions::default(), &disks).unwrap();
        for (disk, mode) in disks.iter().zip([Mode::WriteBack, Mode::WriteThrough]) {
            let config = DiskConfig {
                id: disk.id,
                size: disk.size,
                origin_align: 512,
                mode,
                block_size: 4096,
                min_bytes: 0,
                max_bytes: 0,
                seq_cutoff: 0,
                read_only: false,
                home: hearth_engine::api::Home::Origin,
            };
            engine.attach(config, OriginState::Unknown).unwrap();
        }
        Rig {
            engine,
            from: report.from,
            flash,
            origins,
            ids: disks.map(|d| d.id),
            known,
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

    fn go_on(&mut self) {
        self.now += 100_000;
        let ops: Vec<IoOp> = self.fx.ios.drain(..).collect();
        let mut dones = ops.into_iter().map(|op| self.done(op)).collect();
        self.engine.io_done(self.now, &mut dones, &mut self.fx);
        self.engine.tick(self.now, &mut self.fx);
    }

    fn ask(&mut self, request: Request) {
        self.engine
            .submit(self.now, &mut vec![request], &mut self.fx);
        for _ in 0..10_000 {
            if let Some(answer) = self.fx.completions.pop() {
                return answer.result.unwrap();
            }
            self.go_on();
        }
        panic!("a request is not answered: {}", self.engine.explain());
    }

    /// Every block is what it should be.
    fn check(&mut self, when: &str) {
        for (disk, name) in DISKS.iter().enumerate() {
            for offset in (0..BLOCKS * BLOCK).step_by(PIECE as usize) {
                let buf = Buf::zeroed(PIECE as usize);
                self.ask(Request::read(
                    1,
                    self.ids[disk],
                    offset,
                    PIECE,
                    &buf,
                    self.now,
                ));
                let known = &self.known[disk][offset as usize..][..PIECE as usize];
                assert!(
                    buf.all().bytes() == known,
                    "{name} is not what was kept, from {offset} on, {when}"
                );
            }
        }
    }

    /// Overwrites blocks of both disks, durably.
    fn write(&mut self, blocks: Range<u64>, version: u64) {
        let offset = blocks.start * BLOCK;
        for disk in 0..DISKS.len() {
            let data = fill(disk, blocks.clone(), version);
            put(&mut self.known[disk], disk, blocks.clone(), version);
            let buf = Buf::zeroed(data.len());
            buf.all().bytes_mut().copy_from_slice(&data);
            let (id, len) = (self.ids[disk], data.len() as u64);
            self.ask(Request::write(1, id, offset, len, false, &buf, self.now));
            self.ask(Request::new(1, id, ReqOp::Flush, 0, 0, None, self.now));
        }
    }

    /// The power fails: what nobody flushed is gone, of the origins, too.
    fn crash(mut self) -> Rig {
        self.flash.power_cycle(|_| false);
        self.origins
            .iter_mut()
            .for_each(|o| o.power_cycle(|_| false));
        Rig::open(self.flash, self.origins, self.known)
    }

    fn stop(mut self) -> Rig {
        self.engine.quiesce(true);
        for _ in 0..10_000 {
            if self.engine.idle() {
                self.engine.close(&mut self.flash).unwrap();
                return Rig::open(self.flash, self.origins, self.known);
            }
            self.go_on();
        }
        panic!("it does not come to rest: {}", self.engine.explain());
    }

    /// Lives of segments that the map says count.
    fn lives(&mut self) -> Vec<u64> {
        let sb = Superblock::load(&mut self.flash).unwrap();
        assert_eq!(sb.incompat, INCOMPAT_MAP | INCOMPAT_HEADS);
        let map = SegmentMap::load(&mut self.flash, &sb.layout, pool_tag(&sb.pool)).unwrap();
        let seqs = map.entries.iter().map(|e| e.seq);
        seqs.filter(|seq| *seq != 0).collect()
    }
}

/// The old pool has no map; opened, it has, and everything is there. Cut anywhere on the way, everything still is.
fn convert(packed: [&[u8]; 3], left: Left) -> Rig {
    let [flash, back, through] = packed.map(Mem::unpack);
    let known = [0, 1].map(|disk| known(disk, left));
    let mut looked = flash.clone();
    let sb = Superblock::load(&mut looked).unwrap();
    let as_left = match left {
        Left::Stopped => matches!(sb.state, PoolState::Clean { .. }),
        Left::Killed | Left::Worn => sb.state == PoolState::Open,
        Left::Failed => sb.state == PoolState::Failed,
    };
    assert!(as_left && sb.incompat == 0, "{:?}", sb.state);
    assert!(SegmentMap::load(&mut looked, &sb.layout, pool_tag(&sb.pool)).is_none());
    let disks = disks(&mut looked);
    let mut cuts = 0;
    for steps in 0.. {
        let mut cut = flash.clone();
        cut.left = steps;
        if Engine::open(&mut cut, EngineOptions::default(), &disks).is_ok() {
            break;
        }
        cuts += 1;
        let keeps: [fn(usize) -> bool; 3] = [|_| false, |_| true, |n| n % 2 == 0];
        for keep in keeps {
            let mut cut = cut.clone();
            cut.power_cycle(keep);
            let mut rig = Rig::open(cut, [back.clone(), through.clone()], known.clone());
            rig.check(&format!(
                "opened after a start that was cut at its step {steps}"
            ));
        }
    }
    // Two copies of a map and of the superblock, each with its flush.
    assert!(cuts >= 10, "a start of {cuts} steps");
    let mut rig = Rig::open(flash, [back, through], known);
    rig.check("opened");
    rig
}

fn check(packed: [&[u8]; 3], left: Left) {
    let mut rig = convert(packed, left);
    let old = rig.lives().into_iter().max().unwrap_or(0);
    rig = rig.crash();
    rig.check("opened again");
    for n in 0..PASSES {
        rig.write(pass(n), 1000 + n);
        if n % 40 == 20 {
            rig.check("while the log goes round");
            rig = rig.crash();
            rig.check("after a crash");
        }
    }
    // What is from before goes in the end.
    let mut n = PASSES;
    while rig.lives().iter().any(|life| *life <= old) {
        assert!(n < 10 * PASSES, "of {old} and before: {:?}", rig.lives());
        rig.write(pass(n), 1000 + n);
        n += 1;
    }
    rig = rig.stop();
    assert_eq!(rig.from, OpenedFrom::Checkpoint);
    assert!(!rig.lives().is_empty());
    rig.check("after a stop");
}

macro_rules! pool {
    ($name:literal) => {
        [
            include_bytes!(concat!("../pools/", $name, ".flash.zst")),
            include_bytes!(concat!("../pools/", $name, ".back.zst")),
            include_bytes!(concat!("../pools/", $name, ".through.zst")),
        ]
    };
}

#[test]
fn a_pool_that_was_stopped() {
    check(pool!("stopped"), Left::Stopped);
}

#[test]
fn a_pool_that_was_killed() {
    check(pool!("killed"), Left::Killed);
}

#[test]
fn a_pool_that_was_killed_after_its_log_went_round() {
    check(pool!("worn"), Left::Worn);
}

#[test]
fn a_pool_that_was_given_up() {
    check(pool!("failed"), Left::Failed);
}

/// A batch as earlier builds wrote them, into a segment from `slot` on: a block of data, and records.
fn batch(header: &BatchHeader, slot: u16, records: u64) -> Vec<u8> {
    let mut out = vec![0; 2 * BLOCK as usize];
    let (descriptor, data) = out.split_at_mut(BLOCK as usize);
    data.fill(header.batch_seq as u8);
    let entry = |block, word, slot, kind| Entry {
        disk: 1,
        block,
        word,
        slot,
        kind,
        flags: 0,
    };
    let mut entries = vec![entry(header.batch_seq, crc32c(data), slot + 1, Kind::Clean)];
    let drops = (0..records).map(|n| entry(1000 + n, 1, 0, Kind::DropRun));
    entries.extend(drops);
    header.encode(&entries, descriptor).unwrap();
    out
}

/// Earlier builds filled a segment with as many entries as a summary had room for, and it told of no batches. When
/// such a segment is sealed at a start there may be no room for those, and behind it begins the next segment.
#[test]
fn a_segment_with_as_many_entries_as_a_summary_holds() {
    let layout = Layout::for_device(16 << 20, 256).unwrap();
    let mut flash = Mem::of(vec![0; 16 << 20]);
    let mut sb = Superblock::new(layout, Uuid::from_u128(7), Uuid::from_u128(8), "old", 0);
    sb.state = PoolState::Open;
    sb.store(&mut flash).unwrap();
    let batches = layout.data_blocks() / 2;
    assert_eq!(batches as usize * 4, layout.summary_capacity());
    let (full, next) = (2, 3);
    let life = 1 << 32;
    for n in 0..=batches {
        let (seg, at) = match n < batches {
            true => (full, n * 2),
            false => (next, 0),
        };
        let header = BatchHeader {
            pool_tag: pool_tag(&sb.pool),
            segment_seq: life + u64::from(seg),
            batch_seq: u64::from(n) + 1,
            bound_seq: life + u64::from(full),
            durable_seq: u64::from(n),
            epoch: 1,
            data_blocks: 1,
            flags: 0,
        };
        let bytes = batch(&header, at as u16, 3);
        let offset = layout.segment_offset(seg) + u64::from(at) * BLOCK;
        flash.write_at(offset, &bytes).unwrap();
    }
    flash.flush().unwrap();
    let begins = layout.segment_offset(next) as usize..;
    let before = flash.bytes[begins.clone()][..2 * BLOCK as usize].to_vec();
    let disk = KnownDisk {
        id: 1,
        size: 1 << 20,
        since_seq: 0,
        home: hearth_engine::api::Home::Origin,
    };
    // From the old log, and from the map that then is there.
    for start in 1..=2 {
        let opened = Engine::open(&mut flash, EngineOptions::default(), &[disk]);
        let (_, report) = opened.unwrap();
        assert_eq!(
            (report.segments, report.discarded, report.cached_blocks),
            (2, 0, u64::from(batches) + 1),
            "start {start}"
        );
        assert!(
            flash.bytes[begins.clone()][..before.len()] == before,
            "start {start} wrote into the next segment"
        );
    }
}
