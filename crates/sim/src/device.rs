//! A device that keeps every promise a device makes and no other.
//!
//! Real devices acknowledge writes they have not stored, store them in any order, tear them at a
//! power cut, rot, fail, stall and die. [`SimDevice`] does all of that under a seed: what was
//! written is volatile until a flush that was *submitted after the write completed* completes;
//! at a crash every block keeps its durable content or any one of its volatile contents.

mod losses;

use crate::content::{BLOCK, Value, fill, stamp};
use crate::media::SimMedia;
use crate::prng::Prng;
use hearth_io::{IoDone, IoError, IoOp, OpKind, Target};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

type Block = [u8; BLOCK];

/// Mark of a content that reached the medium before its write completed: no flush covers it.
pub(crate) const NOT_COMPLETED: u64 = u64::MAX;

/// What a block may become when power fails while it has volatile contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tear {
    /// One of its contents, whole.
    Block,
    /// Each 512-byte sector keeps one of its contents.
    Sector,
    /// Cut at any byte: the first part of one content and the rest of another.
    Anywhere,
}

/// What untouched blocks of a device hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// Zeros (a fresh flash file).
    Zeros,
    /// An origin's first content: stamped as write 0 of disk `uid`; of every 8 blocks
    /// those in `holes` are zero. Bytes at and past `size` are zero.
    Stamped {
        /// The disk's uid in stamps.
        uid: u8,
        /// Bit `b % 8` set: block `b` is a hole.
        holes: u8,
        /// From here on there are zeros; perhaps far behind the end the disk has so far.
        size: u64,
    },
}

/// The value of a sector that was never written.
pub fn base_value(base: Base, sector: u64) -> Value {
    match base {
        Base::Zeros => Value::Zero,
        Base::Stamped { uid, holes, size } => {
            let hole = holes & (1 << (sector / 8 % 8)) != 0;
            if hole || sector * 512 >= size {
                Value::Zero
            } else {
                Value::Stamp(stamp(uid, 0, sector))
            }
        }
    }
}

/// Chances of trouble, each in 10 000 operations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Reads that fail with EIO.
    pub read_eio: u32,
    /// Writes (and discards, zeroing) that fail with EIO after storing some of their blocks.
    pub write_eio: u32,
    /// Flushes that fail with EIO.
    pub flush_eio: u32,
    /// Writes that fail with ENOSPC: a sparse file on a full file system.
    pub no_space: u32,
    /// Operations slower by a factor of a thousand.
    pub slow: u32,
    /// Operations that do not complete until the hurting ends.
    pub hang: u32,
    /// Of 100 that hang, those that are answered for after a while, and go on.
    pub overdue: u32,
    /// Byte ranges that cannot be read.
    pub bad_ranges: Vec<Range<u64>>,
    /// Byte ranges that cannot be written.
    pub bad_places: Vec<Range<u64>>,
    /// The file system under a sparse file is full: what has no place in it yet cannot be written.
    pub full: bool,
    /// The operation with this number (counting from 0) fails with EIO, whatever it is.
    pub fail_op: Option<u64>,
    /// Opening a pool, of the reads of the block that begins here so many go well, the next one fails, and all after it go well.
    pub read_fails_once: Option<(u64, u32)>,
}

#[derive(Clone, Debug, Default)]
struct Cell {
    /// Discarded since it was written: it has no place in a sparse file.
    hole: bool,
    durable: Option<Arc<Block>>,
    /// Volatile contents, oldest first, with the moment their write completed.
    pending: Vec<(u64, Arc<Block>)>,
}

/// What a device held at some time.
#[derive(Clone, Debug)]
pub(crate) struct Image(Vec<Option<Arc<Block>>>);

struct InFlight {
    op: IoOp,
    mark: u64,
    sum: u32,
    looks: Look,
    late: Late,
}

/// Is an operation answered before it ends?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Late {
    No,
    /// It will be.
    Will,
    /// It was: what it does is still to come.
    Told,
    /// Another one is owed: it fails at once, and does nothing.
    Refused,
}

/// How long an operation takes that is answered for.
const OVERDUE_NS: u64 = 2_000_000_000;

/// When a read in flight takes its data.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Look {
    /// Some time before it ends.
    Between,
    /// When it ends.
    AtEnd,
    /// It has.
    Done,
}

/// How an operation ended, besides its result.
pub struct Finished {
    /// To hand to the engine.
    pub done: IoDone,
    /// True if the failure was injected.
    pub injected: bool,
}

/// One simulated device, flash or origin.
pub struct SimDevice {
    /// Trouble to make.
    pub faults: Faults,
    /// First rule of the driver's contract the engine broke, in words.
    pub violation: Option<String>,
    /// Nanoseconds a flush takes besides what any operation does.
    pub flush_ns: u64,
    target: Target,
    align: u64,
    size: u64,
    base: Base,
    tear: Tear,
    cells: Vec<Cell>,
    volatile: BTreeSet<u32>,
    in_flight: BTreeMap<u64, InFlight>,
    pub(crate) seq: u64,
    ops: u64,
    dead: bool,
    doom: Option<u64>,
    pub(crate) rng: Prng,
}

impl SimDevice {
    /// A device of `size` bytes. `align` is what offsets and lengths must be multiples of.
    pub fn new(
        target: Target,
        size: u64,
        align: u64,
        base: Base,
        tear: Tear,
        rng: Prng,
    ) -> SimDevice {
        let blocks = size.div_ceil(BLOCK as u64) as usize;
        SimDevice {
            faults: Faults::default(),
            violation: None,
            flush_ns: 0,
            target,
            align,
            size,
            base,
            tear,
            cells: vec![Cell::default(); blocks],
            volatile: BTreeSet::new(),
            in_flight: BTreeMap::new(),
            seq: 0,
            ops: 0,
            dead: false,
            doom: None,
            rng,
        }
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Grows the device; the new part reads as its base says.
    pub fn grow(&mut self, size: u64) {
        self.size = self.size.max(size);
        self.cells
            .resize(self.size.div_ceil(BLOCK as u64) as usize, Cell::default());
    }

    /// The device fails for good: every operation from now on is an EIO.
    pub fn kill(&mut self) {
        self.dead = true;
    }

    /// It dies when so many writes and flushes more were made to it by who opens or closes the pool.
    pub fn dies_after(&mut self, steps: Option<u64>) {
        self.doom = steps;
    }

    /// One of them.
    pub(crate) fn doom(&mut self) {
        match &mut self.doom {
            None => {}
            Some(0) => self.dead = true,
            Some(steps) => *steps -= 1,
        }
    }

    /// The device answers again, with what it has.
    pub fn revive(&mut self) {
        (self.dead, self.doom) = (false, None);
    }

    /// True after [`kill`](Self::kill).
    pub fn is_dead(&self) -> bool {
        self.dead
    }

    /// What it holds now.
    pub(crate) fn image(&self) -> Image {
        let last = |c: &Cell| {
            c.pending
                .last()
                .map(|(_, b)| b)
                .or(c.durable.as_ref())
                .cloned()
        };
        Image(self.cells.iter().map(last).collect())
    }

    /// It holds, durably, what it held then.
    pub(crate) fn come_back_with(&mut self, image: &Image) {
        self.blank();
        for (cell, held) in self.cells.iter_mut().zip(&image.0) {
            cell.durable.clone_from(held);
        }
    }

    /// It holds what it held when it was new.
    pub(crate) fn blank(&mut self) {
        self.cells.fill_with(Cell::default);
        self.volatile.clear();
    }

    /// Somebody has written all of it.
    pub(crate) fn overwrite(&mut self, block: &Block) {
        self.blank();
        let block = Arc::new(*block);
        for cell in &mut self.cells {
            cell.durable = Some(block.clone());
        }
    }

    /// Somebody else writes a block, durably.
    pub(crate) fn put(&mut self, index: usize, block: Block) {
        let cell = &mut self.cells[index];
        *cell = Cell::default();
        cell.durable = Some(Arc::new(block));
        self.volatile.remove(&(index as u32));
    }

    /// How an untouched block looks.
    fn base_block(&self, index: usize) -> Block {
        let mut block = [0u8; BLOCK];
        for (s, sector) in block.chunks_mut(512).enumerate() {
            let number = (index * 8 + s) as u64;
            // The tail of an odd-sized origin ends inside a sector.
            let end = match self.base {
                Base::Zeros => 0,
                Base::Stamped { size, .. } => size.saturating_sub(number * 512).min(512) as usize,
            };
            fill(base_value(self.base, number), &mut sector[..end]);
        }
        block
    }

    fn durable_block(&self, index: usize) -> Block {
        self.cells[index]
            .durable
            .as_ref()
            .map_or_else(|| self.base_block(index), |b| **b)
    }

    /// A block as a read sees it now.
    pub fn visible_block(&self, index: usize) -> Block {
        let cell = &self.cells[index];
        match cell
            .pending
            .last()
            .map(|(_, b)| b)
            .or(cell.durable.as_ref())
        {
            Some(block) => **block,
            None => self.base_block(index),
        }
    }

    /// A block as it would be found if power failed now and nothing volatile survived.
    pub fn stored_block(&self, index: usize) -> Block {
        self.durable_block(index)
    }

    /// Blocks that a power cut may change.
    pub fn volatile_blocks(&self) -> impl Iterator<Item = u64> + '_ {
        self.volatile.iter().map(|index| u64::from(*index))
    }

    /// Blocks of the device.
    pub fn blocks(&self) -> usize {
        self.cells.len()
    }

    /// True if the block was ever written.
    pub fn touched(&self, index: usize) -> bool {
        let cell = &self.cells[index];
        cell.durable.is_some() || !cell.pending.is_empty()
    }

    /// True if a sparse file has a place for the block.
    fn has_place(&self, index: usize) -> bool {
        self.touched(index) && !self.cells[index].hole
    }

    pub(crate) fn push(&mut self, index: usize, mark: u64, block: Block) {
        self.cells[index].pending.push((mark, Arc::new(block)));
        self.volatile.insert(index as u32);
    }

    pub(crate) fn complain(&mut self, what: String) {
        if self.violation.is_none() {
            self.violation = Some(format!("{:?}: {what}", self.target));
        }
    }

    fn check_contract(&mut self, op: &IoOp) {
        let (kind, offset, len, size) = (op.kind, op.offset, op.len, self.size);
        if kind == OpKind::Flush {
            return;
        }
        if offset.checked_add(len).is_none_or(|end| end > size) && kind != OpKind::Read {
            self.complain(format!(
                "{kind:?} of {len} bytes at {offset} reaches past the end at {size}"
            ));
        }
        let end_aligned = (offset + len).is_multiple_of(self.align) || offset + len == size;
        if !offset.is_multiple_of(self.align) || !end_aligned || len == 0 {
            self.complain(format!(
                "{kind:?} of {len} bytes at {offset} is not aligned to {}",
                self.align
            ));
        }
        if matches!(kind, OpKind::Read | OpKind::Write) {
            let sum: u64 = op.bufs.iter().map(|b| b.len() as u64).sum();
            if sum != len {
                self.complain(format!(
                    "{kind:?} of {len} bytes at {offset} carries {sum} bytes of buffers"
                ));
            }
            let pieces = op.bufs.len();
            if op
                .bufs
                .iter()
                .take(pieces.saturating_sub(1))
                .any(|b| b.len() % BLOCK != 0)
            {
                self.complain(format!(
                    "{kind:?} at {offset} has a broken block inside its buffers"
                ));
            }
        }
    }

    /// Takes an operation. Returns its handle and how many nanoseconds it will take;
    /// `None` means it hangs until [`World`](crate::world) lets it go.
    pub fn submit(&mut self, op: IoOp) -> (u64, Option<u64>) {
        self.check_contract(&op);
        self.seq += 1;
        let token = self.seq;
        let sum = if op.kind == OpKind::Write {
            checksum(&op)
        } else {
            0
        };
        let base = match self.target {
            Target::Flash(_) => self.rng.between(20_000, 200_000),
            Target::Origin(_) => self.rng.between(100_000, 12_000_000),
        };
        let base = base
            + if op.kind == OpKind::Flush {
                self.flush_ns
            } else {
                0
            };
        let hang = self.rng.chance(u64::from(self.faults.hang), 10_000);
        let slow = self.rng.chance(u64::from(self.faults.slow), 10_000);
        let looks = match self.rng.below(3) {
            0 => Look::Between,
            _ => Look::AtEnd,
        };
        let at_once = op.kind == OpKind::Read && self.rng.chance(1, 4);
        let late = match (self.owes(), hang && self.faults.overdue > 0) {
            (true, _) => Late::Refused,
            (_, true) if self.rng.chance(u64::from(self.faults.overdue), 100) => Late::Will,
            _ => Late::No,
        };
        self.in_flight.insert(
            token,
            InFlight {
                op,
                mark: token,
                sum,
                looks,
                late,
            },
        );
        if at_once {
            self.look_now(token);
        }
        let time = match late {
            Late::Refused => Some(base),
            Late::Will => Some(OVERDUE_NS),
            _ if hang => None,
            _ if slow => Some(base * 1000),
            _ => Some(base),
        };
        (token, time)
    }

    /// Operations submitted and not answered.
    pub fn busy(&self) -> usize {
        let told = self.in_flight.values().filter(|f| f.late == Late::Told);
        self.in_flight.len() - told.count()
    }

    /// Was one of its operations answered for, and has not ended?
    fn owes(&self) -> bool {
        self.in_flight.values().any(|f| f.late == Late::Told)
    }

    /// Does this operation go on although it was answered?
    pub fn is_owed(&self, token: u64) -> bool {
        let f = self.in_flight.get(&token);
        f.is_some_and(|f| f.late == Late::Told)
    }

    /// What was answered for ends.
    pub fn pay(&mut self) {
        let owed = self.in_flight.iter();
        let owed: Vec<u64> = owed
            .filter(|(_, f)| f.late == Late::Told)
            .map(|(token, _)| *token)
            .collect();
        for token in owed {
            self.complete(token, 0);
        }
    }

    /// A write may reach the medium any time before it completes, and a flush in between
    /// does not cover it. Called for a block that a read is about to look at.
    fn maybe_land_early(&mut self, index: usize) {
        let at = (index * BLOCK) as u64;
        let mut landed = None;
        for f in self.in_flight.values() {
            let touches = f.op.kind == OpKind::Write
                && f.late != Late::Refused
                && f.op.offset < at + BLOCK as u64
                && at < f.op.offset + f.op.len;
            if touches && self.rng.chance(1, 2) {
                let mut block = self.visible_block(index);
                overlay(&f.op, index, &mut block);
                landed = Some(block);
            }
        }
        if let Some(block) = landed {
            self.push(index, NOT_COMPLETED, block);
        }
    }

    /// A read in flight takes its data now: what is written until it ends, it does not see.
    fn look_now(&mut self, token: u64) {
        let Some(mut read) = self.in_flight.remove(&token) else {
            return;
        };
        if !self.dead && read.op.offset + read.op.len <= self.size {
            self.read_into(&mut read.op);
            read.looks = Look::Done;
        }
        self.in_flight.insert(token, read);
    }

    /// Ends an operation: applies its effect, or the failure the seed chose.
    pub fn complete(&mut self, token: u64, latency_ns: u64) -> Option<Finished> {
        let f = self.in_flight.get_mut(&token)?;
        let late = f.late;
        if late == Late::Will {
            f.late = Late::Told;
            return Some(Finished {
                done: f.op.copy().done(Err(IoError::OVERDUE), latency_ns),
                injected: true,
            });
        }
        let InFlight {
            mut op,
            mark,
            sum,
            looks,
            ..
        } = self.in_flight.remove(&token)?;
        if late == Late::Refused {
            return Some(Finished {
                done: op.done(Err(IoError::SILENT), latency_ns),
                injected: true,
            });
        }
        let reads = self.in_flight.iter();
        let between: Vec<u64> = reads
            .filter(|(_, f)| f.op.kind == OpKind::Read && f.looks == Look::Between)
            .map(|(token, _)| *token)
            .collect();
        for token in between {
            if self.rng.chance(1, 3) {
                self.look_now(token);
            }
        }
        self.seq += 1;
        let number = self.ops;
        self.ops += 1;
        if op.kind == OpKind::Write && checksum(&op) != sum {
            self.complain(format!(
                "the buffer of the write at {} changed while the device owned it",
                op.offset
            ));
        }
        let chance = match op.kind {
            OpKind::Read => self.faults.read_eio,
            OpKind::Flush => self.faults.flush_eio,
            OpKind::Write | OpKind::Discard | OpKind::WriteZeroes { .. } => self.faults.write_eio,
        };
        let range = op.offset..op.offset + op.len;
        let bad_range = op.kind == OpKind::Read
            && self
                .faults
                .bad_ranges
                .iter()
                .any(|r| r.start < range.end && range.start < r.end);
        let bad_place = op.kind == OpKind::Write
            && self
                .faults
                .bad_places
                .iter()
                .any(|r| r.start < range.end && range.start < r.end);
        let full = op.kind == OpKind::Write
            && (self.faults.full && blocks_of(&op).any(|i| !self.has_place(i))
                || self.rng.chance(u64::from(self.faults.no_space), 10_000));
        let fails =
            self.rng.chance(u64::from(chance), 10_000) || self.faults.fail_op == Some(number);
        let result = if self.dead || fails || bad_range || bad_place {
            if !self.dead {
                self.apply_some(&op);
            }
            Err(IoError::Os(libc::EIO))
        } else if full {
            self.apply_some(&op);
            Err(IoError::Os(libc::ENOSPC))
        } else if range.end > self.size {
            Err(IoError::UnexpectedEof)
        } else {
            if op.kind != OpKind::Read || looks != Look::Done {
                self.apply(&mut op, mark);
            }
            Ok(())
        };
        if op.kind == OpKind::Write && result.is_err() {
            self.settle_early(&blocks_of(&op).collect::<Vec<_>>());
        }
        let injected = matches!(result, Err(IoError::Os(_)));
        if late == Late::Told {
            // Nobody hears of it.
            return None;
        }
        Some(Finished {
            done: op.done(result, latency_ns),
            injected,
        })
    }

    /// Ends an operation with an error. `half`: half of what it writes is there nevertheless.
    pub fn fail(&mut self, token: u64, half: bool, latency_ns: u64) -> Option<Finished> {
        let InFlight { op, .. } = self.in_flight.remove(&token)?;
        self.seq += 1;
        self.ops += 1;
        if !matches!(op.kind, OpKind::Read | OpKind::Flush) {
            let blocks = blocks_of(&op);
            let some = blocks.len().div_ceil(2);
            for index in blocks.take(if half { some } else { 0 }) {
                self.apply_block(&op, index, self.seq);
            }
            self.settle_early(&blocks_of(&op).collect::<Vec<_>>());
        }
        Some(Finished {
            done: op.done(Err(IoError::Os(libc::EIO)), latency_ns),
            injected: true,
        })
    }

    fn apply(&mut self, op: &mut IoOp, mark: u64) {
        let completed = self.seq;
        match op.kind {
            OpKind::Read => self.read_into(op),
            OpKind::Flush => self.make_durable(mark),
            OpKind::Write | OpKind::Discard | OpKind::WriteZeroes { .. } => {
                for index in blocks_of(op) {
                    self.apply_block(op, index, completed);
                }
            }
        }
    }

    fn apply_block(&mut self, op: &IoOp, index: usize, mark: u64) {
        let mut block = self.visible_block(index);
        match (op.kind, self.target) {
            (OpKind::Discard, Target::Flash(_)) => {
                self.cells[index].hole = true;
                match self.rng.below(3) {
                    0 => return,
                    1 => block.fill(0),
                    _ => block.fill(self.rng.next_u64() as u8),
                }
            }
            _ => {
                self.cells[index].hole = false;
                overlay(op, index, &mut block);
            }
        }
        self.push(index, mark, block);
    }

    /// A failed write may have stored any of its blocks.
    fn apply_some(&mut self, op: &IoOp) {
        if matches!(op.kind, OpKind::Read | OpKind::Flush) {
            return;
        }
        let completed = self.seq;
        let all = self.rng.below(3);
        for index in blocks_of(op) {
            let inside = (index + 1) * BLOCK <= (self.size as usize).next_multiple_of(BLOCK);
            let room = !self.faults.full || self.has_place(index);
            if inside && room && (all == 2 || (all == 1 && self.rng.chance(1, 2))) {
                self.apply_block(op, index, completed);
            }
        }
    }

    fn read_into(&mut self, op: &mut IoOp) {
        let mut at = op.offset;
        let writing = self.in_flight.values().any(|f| {
            f.op.kind == OpKind::Write
                && f.op.offset < op.offset + op.len
                && op.offset < f.op.offset + f.op.len
        });
        for buf in &mut op.bufs {
            let bytes = buf.bytes_mut();
            let mut done = 0;
            while done < bytes.len() {
                let (index, skip) = ((at / BLOCK as u64) as usize, (at % BLOCK as u64) as usize);
                if writing {
                    self.maybe_land_early(index);
                }
                let n = (BLOCK - skip).min(bytes.len() - done);
                let out = &mut bytes[done..done + n];
                let cell = &self.cells[index];
                match cell
                    .pending
                    .last()
                    .map(|(_, b)| b)
                    .or(cell.durable.as_ref())
                {
                    Some(block) => out.copy_from_slice(&block[skip..skip + n]),
                    None => out.copy_from_slice(&self.base_block(index)[skip..skip + n]),
                }
                done += n;
                at += n as u64;
            }
        }
    }

    /// Stores everything that completed, as a flush by somebody else than the engine.
    pub fn flush_now(&mut self) {
        self.make_durable(self.seq + 1);
    }

    /// Everything that completed before `mark` is stored.
    pub(crate) fn make_durable(&mut self, mark: u64) {
        let cells = &mut self.cells;
        self.volatile.retain(|index| {
            let cell = &mut cells[*index as usize];
            if let Some(last) = cell.pending.iter().rposition(|(done, _)| *done < mark) {
                cell.durable = Some(cell.pending[last].1.clone());
                cell.pending.drain(..=last);
            }
            !cell.pending.is_empty()
        });
    }

    /// Flips bits of a stored block, as flash left alone for years does.
    pub fn rot(&mut self, index: usize) {
        let at = self.rng.below(BLOCK as u64) as usize;
        let bit = 1u8 << self.rng.below(8);
        let mut block = self.durable_block(index);
        block[at] ^= bit;
        self.cells[index].durable = Some(Arc::new(block));
        for (_, pending) in &mut self.cells[index].pending {
            Arc::make_mut(pending)[at] ^= bit;
        }
    }

    /// The device as [`Media`], for opening and closing a pool. After `cut` writes and flushes,
    /// the plug is pulled: that operation and all after it fail.
    pub fn media(&mut self, cut: Option<u64>) -> SimMedia<'_> {
        SimMedia::new(self, cut)
    }
}

/// Blocks a write-like operation touches.
fn blocks_of(op: &IoOp) -> std::ops::Range<usize> {
    let (start, end) = (
        op.offset / BLOCK as u64,
        (op.offset + op.len).div_ceil(BLOCK as u64),
    );
    start as usize..end as usize
}

/// Lays what `op` writes into block `index` over `block`.
fn overlay(op: &IoOp, index: usize, block: &mut Block) {
    let base = (index * BLOCK) as u64;
    let (start, end) = (
        op.offset.max(base),
        (op.offset + op.len).min(base + BLOCK as u64),
    );
    if start >= end {
        return;
    }
    let out = &mut block[(start - base) as usize..(end - base) as usize];
    if op.kind != OpKind::Write {
        out.fill(0);
        return;
    }
    let (mut skip, mut filled) = ((start - op.offset) as usize, 0);
    for buf in &op.bufs {
        if skip >= buf.len() {
            skip -= buf.len();
            continue;
        }
        let n = (buf.len() - skip).min(out.len() - filled);
        out[filled..filled + n].copy_from_slice(&buf.bytes()[skip..skip + n]);
        filled += n;
        skip = 0;
        if filled == out.len() {
            return;
        }
    }
}

fn checksum(op: &IoOp) -> u32 {
    op.bufs.iter().fold(0, |sum: u32, b| {
        sum.rotate_left(5) ^ hearth_io::checksum::crc32c(b.bytes())
    })
}

#[cfg(test)]
mod tests;
