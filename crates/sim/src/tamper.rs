//! Pools whose bytes somebody has changed.
//!
//! What is on a flash device may come from anybody: a disk image that was bought, a host that was
//! broken into, a controller that mixes blocks up. Random bytes are of no use to try that: a checksum
//! turns them away at once. So here is a small real pool, with everything a pool can hold, of which
//! single fields are changed and the checksums above them put right; then the engine opens it, serves
//! its disks for a while, and stops. It may refuse whatever it likes. It must not panic, nor be without
//! an answer, nor take memory the pool's size does not explain.

use crate::prng::Prng;
use hearth_engine::api::{
    Completion, DiskConfig, DiskId, Effects, Mode, OriginState, ReqError, ReqOp, Request,
};
use hearth_engine::{Engine, EngineOptions, KnownDisk};
use hearth_format::layout::{FIXED_END, SUPERBLOCK_BLOCKS};
use hearth_format::{CheckpointHeader, Layout, Superblock, Uuid};
use hearth_io::checksum::crc32c;
use hearth_io::{BLOCK, Buf, IoError, IoOp, Media, OpKind, Target};
use std::collections::BTreeMap;
use std::io;

const BLOCK_BYTES: usize = BLOCK as usize;
/// The least a pool can be.
const SEGMENT_BLOCKS: u32 = 256;
const SEGMENTS: u64 = 8;
/// Blocks of a disk: together they are more than the flash holds.
const DISK_BLOCKS: u64 = 1500;
/// Changes made to one pool.
const CHANGES_MAX: usize = 24;
/// Requests a tampered pool has to serve.
const REQUESTS: u64 = 120;
/// Operations and ticks until a request is answered; more is a hang.
const STEPS_MAX: u32 = 20_000;
/// Nanoseconds between two ticks.
const TICK_NS: u64 = 20_000_000;

/// A device in memory, which does as it is told, at once.
#[derive(Clone)]
struct Bytes(Vec<u8>);

impl Bytes {
    fn range(&self, offset: u64, len: usize) -> io::Result<std::ops::Range<usize>> {
        let end = offset.checked_add(len as u64);
        match end.filter(|end| *end <= self.0.len() as u64) {
            Some(end) => Ok(offset as usize..end as usize),
            None => Err(io::Error::from_raw_os_error(libc::EINVAL)),
        }
    }

    fn run(&mut self, op: &mut IoOp) -> Result<(), IoError> {
        let refused = |_: io::Error| IoError::Os(libc::EINVAL);
        let range = self.range(op.offset, op.len as usize).map_err(refused)?;
        let mut at = range.start;
        match op.kind {
            OpKind::Flush => {}
            OpKind::Read | OpKind::Write => {
                for buf in &mut op.bufs {
                    let here = &mut self.0[at..(at + buf.len()).min(range.end)];
                    at += here.len();
                    if op.kind == OpKind::Read {
                        buf.bytes_mut()[..here.len()].copy_from_slice(here);
                    } else {
                        here.copy_from_slice(&buf.bytes()[..here.len()]);
                    }
                }
            }
            OpKind::Discard | OpKind::WriteZeroes { .. } => self.0[range].fill(0),
        }
        Ok(())
    }
}

impl Media for Bytes {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let range = self.range(offset, data.len())?;
        data.copy_from_slice(&self.0[range]);
        Ok(())
    }

    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let range = self.range(offset, data.len())?;
        self.0[range].copy_from_slice(data);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Two small pools, one stopped cleanly and one not.
pub struct Originals {
    clean: Vec<u8>,
    open: Vec<u8>,
    layout: Layout,
}

fn disks() -> [DiskConfig; 2] {
    let disk = |id, mode| DiskConfig {
        id,
        size: DISK_BLOCKS * BLOCK - 512,
        origin_align: 512,
        mode,
        block_size: 4096,
        min_bytes: 0,
        max_bytes: 0,
        seq_cutoff: 0,
        read_only: false,
        home: hearth_engine::api::Home::Origin,
    };
    [disk(1, Mode::WriteBack), disk(2, Mode::WriteThrough)]
}

impl Originals {
    /// Makes them.
    ///
    /// # Panics
    ///
    /// If the engine does not serve an honest pool.
    pub fn make() -> Originals {
        let size = (1..)
            .map(|mib: u64| {
                (u64::from(SEGMENT_BLOCKS) * SEGMENTS + FIXED_END) * BLOCK + (mib << 20)
            })
            .find(|size| Layout::for_device(*size, SEGMENT_BLOCKS).is_ok())
            .expect("some size fits");
        let layout = Layout::for_device(size, SEGMENT_BLOCKS).expect("it fits");
        let mut flash = Bytes(vec![0; size as usize]);
        let mut sb = Superblock::new(layout, Uuid::from_u128(1), Uuid::from_u128(2), "small", 0);
        sb.store(&mut flash).expect("stored");
        let mut life = Life::open(flash, 1).expect("an empty pool opens");
        // Enough for several segments, discards and zeros between them.
        life.serve(400).expect("an honest pool serves");
        let open = life.flash.clone();
        life.stop().expect("an honest pool stops");
        Originals {
            clean: life.flash.0,
            open: open.0,
            layout,
        }
    }

    /// A pool tampered with as `plan` says, and what the engine makes of it: whether it served
    /// (else it refused the pool), or what went wrong.
    pub fn try_plan(&self, plan: &[u8]) -> Result<bool, String> {
        let mut plan = Plan(plan);
        let seed = plan.number(4);
        let clean = plan.byte() & 1 == 0;
        let mut image = if clean { &self.clean } else { &self.open }.clone();
        for _ in 0..CHANGES_MAX {
            if plan.0.is_empty() {
                break;
            }
            self.tamper(&mut image, &mut plan);
        }
        let Some(mut life) = Life::open(Bytes(image), seed) else {
            return Ok(false);
        };
        life.serve(REQUESTS)?;
        life.stop()?;
        // What it left must be no worse.
        if let Some(mut again) = Life::open(life.flash, seed) {
            again.serve(REQUESTS / 4)?;
        }
        Ok(true)
    }

    /// Changes one field of one structure, and puts its checksum right.
    fn tamper(&self, image: &mut [u8], plan: &mut Plan<'_>) {
        let what = plan.byte();
        let segment = plan.byte() % self.layout.segment_count as u8;
        let honest = what & 0x80 == 0 || what & 0x40 == 0;
        match what & 7 {
            0 => {
                let [first, second] = SUPERBLOCK_BLOCKS.map(|b| (b * BLOCK) as usize);
                let block = &mut image[first..first + BLOCK_BYTES];
                plan.change(block, 16, 304);
                seal(block, 12, BLOCK_BYTES, honest);
                image.copy_within(first..first + BLOCK_BYTES, second);
                let block = &mut image[second..second + BLOCK_BYTES];
                block[48] = 1;
                seal(block, 12, BLOCK_BYTES, honest);
            }
            1 => {
                let at = self.layout.checkpoint_offset() as usize;
                let block = &mut image[at..at + BLOCK_BYTES];
                plan.change(block, 8, 160);
                seal(block, 4, BLOCK_BYTES, honest);
            }
            2 | 3 => self.tamper_section(image, plan),
            4 | 5 => {
                let at = self.layout.summary_offset(u32::from(segment)) as usize;
                let room = self.layout.summary_blocks as usize * BLOCK_BYTES;
                let bytes = &mut image[at..at + room];
                let used = summary_used(bytes).min(room);
                plan.change(bytes, 8, if what & 8 == 0 { 64 } else { used });
                let used = summary_used(bytes);
                seal(bytes, 4, used, honest);
            }
            6 => {
                let start = self.layout.segment_offset(u32::from(segment)) as usize;
                // The descriptors come before their data: some batch of the segment.
                let mut at = start;
                for _ in 0..plan.byte() % 16 {
                    let blocks = usize::from(u16::from_le_bytes([image[at + 58], image[at + 59]]));
                    let next = at + (1 + blocks) * BLOCK_BYTES;
                    if next + BLOCK_BYTES > image.len() || &image[next..next + 4] != b"HBAT" {
                        break;
                    }
                    at = next;
                }
                let block = &mut image[at..at + BLOCK_BYTES];
                plan.change(block, 8, if what & 8 == 0 { 64 } else { 512 });
                seal(block, 4, BLOCK_BYTES, honest);
            }
            _ if what & 8 != 0 => self.tamper_map(image, plan, honest),
            _ => {
                // A whole segment's summary lost, or the same one twice.
                let room = self.layout.summary_blocks as usize * BLOCK_BYTES;
                let from = self.layout.summary_offset(u32::from(segment)) as usize;
                let to = u32::from(plan.byte()) % self.layout.segment_count;
                let to = self.layout.summary_offset(to) as usize;
                image.copy_within(from..from + room, to);
            }
        }
    }

    /// Changes the map of the segments, the same in both copies. It is small enough for one block of table.
    fn tamper_map(&self, image: &mut [u8], plan: &mut Plan<'_>, honest: bool) {
        let [first, second] = [0, 1].map(|copy| self.layout.map_offset(copy) as usize);
        let map = &mut image[first..first + 2 * BLOCK_BYTES];
        let (header, table) = map.split_at_mut(BLOCK_BYTES);
        match plan.byte() & 1 {
            0 => plan.change(header, 8, 36),
            _ => plan.change(table, 8, 16 + 16 * self.layout.segment_count as usize),
        }
        seal(table, 4, BLOCK_BYTES, honest);
        header[36..40].copy_from_slice(&crc32c(&table[4..8]).to_le_bytes());
        seal(header, 4, BLOCK_BYTES, honest);
        image.copy_within(first..first + 2 * BLOCK_BYTES, second);
    }

    /// Changes what a section of the checkpoint holds, and its checksum in the header.
    fn tamper_section(&self, image: &mut [u8], plan: &mut Plan<'_>) {
        let at = self.layout.checkpoint_offset() as usize;
        let area = self.layout.checkpoint_bytes();
        let head = &image[at..at + BLOCK_BYTES];
        let Ok(mut header) = CheckpointHeader::decode(head, area) else {
            return;
        };
        let count = header.sections.len().max(1);
        let Some(section) = header.sections.get_mut(usize::from(plan.byte()) % count) else {
            return;
        };
        let start = at + section.offset as usize;
        let bytes = &mut image[start..start + section.len as usize];
        let used = bytes.len();
        plan.change(bytes, 0, used);
        section.crc = crc32c(bytes);
        if let Ok(block) = header.encode(area) {
            image[at..at + BLOCK_BYTES].copy_from_slice(block.as_slice());
        }
    }
}

/// Bytes of a summary.
fn summary_used(bytes: &[u8]) -> usize {
    let batches = 64 + usize::from(u16::from_le_bytes([bytes[60], bytes[61]])) * 16;
    match bytes.get(batches..).and_then(|rest| rest.first_chunk()) {
        Some(count) if bytes[63] & 1 != 0 => {
            batches + 4 + (u32::from_le_bytes(*count) as usize).saturating_mul(12)
        }
        _ => batches,
    }
}

/// Puts the checksum at `at` of the first `used` bytes right.
fn seal(bytes: &mut [u8], at: usize, used: usize, honest: bool) {
    if honest && used <= bytes.len() && at + 4 <= used {
        bytes[at..at + 4].fill(0);
        let crc = crc32c(&bytes[..used]);
        bytes[at..at + 4].copy_from_slice(&crc.to_le_bytes());
    }
}

/// What to do, as a fuzzer or a random generator says.
struct Plan<'a>(&'a [u8]);

impl Plan<'_> {
    fn byte(&mut self) -> u8 {
        match self.0.split_first() {
            Some((first, rest)) => {
                self.0 = rest;
                *first
            }
            None => 0,
        }
    }

    fn number(&mut self, bytes: u32) -> u64 {
        (0..bytes).fold(0, |n, _| n << 8 | u64::from(self.byte()))
    }

    /// Changes a number of one, two, four or eight bytes between `from` and `to`.
    fn change(&mut self, bytes: &mut [u8], from: usize, to: usize) {
        let how = self.byte();
        let width = 1usize << (how & 3);
        let to = to.min(bytes.len());
        if to < from + width {
            return;
        }
        let at = from + self.number(3) as usize % (to - from - width + 1);
        // Fields are aligned.
        let at = if how & 0x80 == 0 {
            at / width * width
        } else {
            at
        };
        let Some(field) = bytes.get_mut(at..at + width) else {
            return;
        };
        let mut word = [0u8; 8];
        word[..width].copy_from_slice(field);
        let old = u64::from_le_bytes(word);
        let new = match how >> 2 & 7 {
            0 => 0,
            1 => u64::MAX,
            2 => u64::MAX >> 1,
            3 => old.wrapping_add(1),
            4 => old.wrapping_sub(1),
            5 => old ^ 1 << (self.byte() & 63),
            6 => u64::from(self.byte()),
            _ => self.number(width as u32),
        };
        field.copy_from_slice(&new.to_le_bytes()[..width]);
    }
}

/// A daemon's life on a pool, its devices in memory.
struct Life {
    engine: Engine,
    flash: Bytes,
    origins: BTreeMap<DiskId, Bytes>,
    attached: Vec<DiskConfig>,
    rng: Prng,
    now: u64,
    tag: u64,
    fx: Effects,
}

impl Life {
    /// `None`: the pool was refused.
    fn open(mut flash: Bytes, seed: u64) -> Option<Life> {
        let known: Vec<KnownDisk> = disks()
            .iter()
            .map(|d| KnownDisk {
                id: d.id,
                size: d.size,
                since_seq: 0,
                home: hearth_engine::api::Home::Origin,
            })
            .collect();
        let options = EngineOptions {
            ram_stage: Some(64),
            hash_seed: 1,
            ..EngineOptions::default()
        };
        let (engine, _) = Engine::open(&mut flash, options, &known).ok()?;
        let mut life = Life {
            engine,
            flash,
            origins: BTreeMap::new(),
            attached: Vec::new(),
            rng: Prng::new(seed),
            now: 1,
            tag: 0,
            fx: Effects::default(),
        };
        for disk in disks() {
            let origin = Bytes(vec![disk.id as u8; (DISK_BLOCKS * BLOCK) as usize]);
            life.origins.insert(disk.id, origin);
            if life
                .engine
                .attach(disk.clone(), OriginState::Unknown)
                .is_ok()
            {
                life.attached.push(disk);
            }
        }
        Some(life)
    }

    /// Serves so many requests; an error is one that was not answered.
    fn serve(&mut self, requests: u64) -> Result<(), String> {
        for _ in 0..requests {
            if self.attached.is_empty() {
                break;
            }
            let disk = self.rng.pick(&self.attached).clone();
            let blocks = self.rng.between(1, 16);
            let start = self.rng.below(DISK_BLOCKS - blocks) * BLOCK;
            let len = (blocks * BLOCK).min(disk.size - start);
            self.tag += 1;
            let (tag, now) = (self.tag, self.now);
            let fua = self.rng.chance(1, 4);
            let request = match self.rng.below(10) {
                0..=3 => {
                    let buf = Buf::zeroed((blocks * BLOCK) as usize);
                    Request::read(tag, disk.id, start, len, &buf, now)
                }
                4..=6 => {
                    let buf = Buf::zeroed((blocks * BLOCK) as usize);
                    buf.all().bytes_mut().fill(tag as u8);
                    Request::write(tag, disk.id, start, len, fua, &buf, now)
                }
                7 => Request::new(tag, disk.id, ReqOp::Discard { fua }, start, len, None, now),
                8 => {
                    let op = ReqOp::WriteZeroes { fua, punch: true };
                    Request::new(tag, disk.id, op, start, len, None, now)
                }
                _ => Request::new(tag, disk.id, ReqOp::Flush, 0, 0, None, now),
            };
            self.engine
                .submit(self.now, &mut vec![request], &mut self.fx);
            // Whatever the answer is.
            let _ = self.drive(Some(tag))?;
        }
        self.look();
        Ok(())
    }

    /// Everything the control plane asks of an engine.
    fn look(&mut self) {
        let _ = (self.engine.pool_stats(), self.engine.explain());
        for disk in &self.attached {
            let _ = self.engine.status(disk.id);
            let _ = self.engine.stats(disk.id, self.now);
            let _ = self
                .engine
                .clean_within(disk.id, std::slice::from_ref(&(0..DISK_BLOCKS)), 16);
            let mut extents = Vec::new();
            self.engine
                .block_status(disk.id, 0, disk.size, &mut extents);
        }
    }

    /// Carries out what the engine asks for, until a request is answered, or for one tick.
    fn drive(&mut self, tag: Option<u64>) -> Result<Option<Result<(), ReqError>>, String> {
        for _ in 0..STEPS_MAX {
            let mine = |c: &Completion| Some(c.tag) == tag;
            if let Some(answer) = self.fx.completions.drain(..).find(mine) {
                return Ok(Some(answer.result));
            }
            let mut dones = Vec::new();
            for mut op in self.fx.ios.drain(..) {
                let result = match op.target {
                    Target::Flash(_) => self.flash.run(&mut op),
                    Target::Origin(id) => match self.origins.get_mut(&id) {
                        Some(origin) => origin.run(&mut op),
                        None => Err(IoError::Os(libc::ENODEV)),
                    },
                };
                dones.push(op.done(result, 50_000));
            }
            if !dones.is_empty() {
                self.now += 50_000;
                self.engine.io_done(self.now, &mut dones, &mut self.fx);
            } else if tag.is_none() {
                return Ok(None);
            } else {
                self.now += TICK_NS;
                self.engine.tick(self.now, &mut self.fx);
            }
        }
        Err(format!("no answer: {}", self.engine.explain()))
    }

    /// Stops as the daemon does: without a checkpoint where the engine does not come to rest.
    fn stop(&mut self) -> Result<(), String> {
        self.engine.quiesce(true);
        for _ in 0..200 {
            if self.engine.idle() {
                break;
            }
            self.now += TICK_NS;
            self.engine.tick(self.now, &mut self.fx);
            self.drive(None)?;
        }
        // It may refuse; the next start then reads the log.
        let _ = self.engine.close(&mut self.flash);
        Ok(())
    }
}
