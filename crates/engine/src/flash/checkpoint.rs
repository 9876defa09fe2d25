//! The index as a whole, written at a clean stop and read back at the next start.
//!
//! It belongs to those whose blocks lie on the device; here it is bytes ([`Kept`], [`Restore`]).
//! Sections (numbers in `docs/format.md`): the slot words, the checksums, the hash table as
//! they are in RAM (little-endian), and the state: hash seed, segments, zero runs. A restart
//! reads them in large pieces and is ready; nothing is rebuilt but counters. The log on flash
//! stays complete, so a bad checkpoint only costs a recovery.

use crate::faults::Fault;
use crate::flash::append::FITS;
use crate::flash::dead::Dead;
use crate::flash::device::{FlashDevice, Users};
use crate::flash::log::{Gone, Log, Sealing, SegState, Segment, Slot, is_for_data};
use crate::flash::recover::NUMBERS_END;
use crate::paths::{Path, took};
use hearth_format::checkpoint::Section;
use hearth_format::superblock::INCOMPAT_MAP;
use hearth_format::{CheckpointHeader, FormatError, SegmentMap};
use hearth_io::checksum::{Crc32c, crc32c};
use hearth_io::{BLOCK, Media};
use hearth_policy::cleaning::Why;
use std::io;

// In this crate a `Fault` is a deliberate mistake.
use hearth_fault::Fault as Failure;

/// 1 was the slot words when they had 8 bytes.
const SLOTS: u32 = 5;
const CHECKSUMS: u32 = 2;
/// 3 was the table when neighbours did not lie together in it.
const TABLE: u32 = 6;
const STATE: u32 = 4;
/// What the log keeps in RAM of its segments.
const LOG: u32 = 7;
/// What origins of ordered disks do not have, if there are any such disks.
const ORDERS: u32 = 8;
/// What the index consists of.
const PARTS: [(u32, Part); 3] = [
    (SLOTS, Part::Slots),
    (CHECKSUMS, Part::Checksums),
    (TABLE, Part::Table),
];

/// A part of the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Which block lies in which slot.
    Slots,
    /// Their checksums.
    Checksums,
    /// Where blocks are found.
    Table,
}

/// A disk's zeros of which its origin does not know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Zeros {
    pub disk: u16,
    /// First block and blocks of each run.
    pub runs: Vec<(u64, u64)>,
}

/// What is kept of those whose blocks lie on the device.
pub(crate) trait Kept {
    fn seed(&self) -> u64;
    /// Bytes of a part.
    fn part_len(&self, part: Part) -> usize;
    /// Fills `out` with what stands in a part from `at` on.
    fn part(&self, part: Part, at: usize, out: &mut [u8]);
    fn zeros(&self) -> Vec<Zeros>;
    /// Of ordered disks.
    fn orders(&self) -> Vec<u8> {
        Vec::new()
    }
}

/// What lies in a slot, as the slot itself says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lies {
    Nothing,
    Block {
        dirty: bool,
        /// Whoever looks for the block finds it here.
        found: bool,
    },
}

/// Those who get back what was kept.
pub(crate) trait Restore: Kept {
    /// What follows was kept of a device with so many slots: others came since, or went. If they were `lost`, clean copies may have gone
    /// with them.
    fn of_slots(&mut self, slots: u32, lost: bool);
    fn set_part(&mut self, part: Part, at: usize, data: &[u8]);
    /// The parts are there; false if they do not fit this seed.
    fn adopt(&mut self, seed: u64) -> bool;
    /// Blocks `start..end` of a disk are zeros, says a segment with this number.
    fn zeroed(&mut self, disk: u16, start: u64, end: u64, seg_seq: u64);
    /// Copies may be gone by evictions up to this one.
    fn evicted(&mut self, eviction: u64);
    /// Counts what lies in a slot of the segment with this number, unless it belongs to nobody any more.
    fn count(&mut self, slot: Slot, seq: u64) -> Lies;
    /// What is known of ordered disks, when this was the last batch; false if it cannot be.
    fn set_orders(&mut self, _bytes: &[u8], _last_batch: u64) -> bool {
        true
    }
    /// Forgets clean copies in slots of which this says that they are gone, before anything is counted. False: something dirty lies there.
    fn drop_gone(&mut self, gone: impl Fn(Slot) -> bool) -> bool;
    /// Drops all that belongs to nobody; tells where it lay.
    fn drop_foreign(&mut self, tell: impl FnMut(Gone));
}

/// Bytes read or written at once.
const CHUNK: usize = 1 << 20;
/// So many of them are read in parallel.
const CHUNKS: usize = 16;

/// Why a checkpoint could not be written.
#[derive(Debug, thiserror::Error)]
#[error("{}", self.fault())]
pub enum CheckpointError {
    /// The device.
    Io(#[from] io::Error),
    /// A structure did not fit.
    Format(#[from] FormatError),
    /// It has more in it than there is room for: very many runs of zeros.
    TooLarge {
        /// Bytes of it.
        needed: u64,
        /// Bytes there are for it.
        room: u64,
    },
}

impl CheckpointError {
    /// What is wrong, and what to do about it.
    pub fn fault(&self) -> Failure {
        match self {
            CheckpointError::Io(e) => Failure::new(
                format!("cannot write the checkpoint: {e}"),
                "check the device's health",
            ),
            CheckpointError::Format(e) => e.fault().within("cannot write the checkpoint"),
            CheckpointError::TooLarge { needed, room } => Failure::bare(format!(
                "a checkpoint of {needed} bytes does not fit into {room}"
            )),
        }
    }
}

impl<U: Users> FlashDevice<U> {
    /// Seals the head and writes the checkpoint; returns its length in bytes. Nothing may be in
    /// flight.
    pub fn write_checkpoint(
        &mut self,
        media: &mut dyn Media,
        id: u64,
        kept: &impl Kept,
    ) -> Result<u64, CheckpointError> {
        for head in std::mem::take(&mut self.log.heads).into_iter().flatten() {
            self.log.segments[head.seg as usize].state = SegState::Closed;
            if head.entries.is_empty() {
                self.log.segments[head.seg as usize].state = SegState::Free;
                self.log.free.push_back(head.seg);
                self.cleaner.free(head.seg);
            } else {
                let last_batch = head.last_batch();
                self.log.segments[head.seg as usize].last_batch = last_batch;
                self.cleaner.close(head.seg);
                self.log.enlist(head.seg);
                // It may be on a device that has failed. Whoever needs what it says walks its batches.
                if !self.takes_writes() {
                    continue;
                }
                let sealing = Sealing {
                    seg: head.seg,
                    seq: head.seq,
                    entries: head.entries,
                    marks: head.marks,
                    first_batch: head.first_batch,
                    last_batch,
                };
                // Everything is on flash and about to be flushed: the summary may say so only after.
                if !self.faults.has(Fault::CloseUnflushedHead) {
                    media.flush()?;
                }
                self.log.durable_seq = self.log.applied_seq;
                let bytes = self.encode_summary(&sealing).expect(FITS);
                self.touched[head.seg as usize] += 1;
                media.write_at(self.layout.summary_offset(head.seg), &bytes)?;
            }
        }
        let area = self.layout.checkpoint_offset();
        let mut at = BLOCK;
        let mut sections = Vec::new();
        let state = self.encode_state(kept);
        let log = self.encode_log();
        let mut parts = Vec::from(PARTS.map(|(kind, part)| {
            let len = kept.part_len(part);
            (kind, len, Some(part))
        }));
        parts.push((STATE, state.len(), None));
        parts.push((LOG, log.len(), None));
        let orders = kept.orders();
        if !orders.is_empty() {
            parts.push((ORDERS, orders.len(), None));
        }
        let room = self.layout.checkpoint_room();
        // What lies behind is another's, so whether it fits is known before anything is written.
        let blocks = parts.iter().map(|(_, len, _)| *len as u64);
        let needed = BLOCK + blocks.map(|len| len.next_multiple_of(BLOCK)).sum::<u64>();
        if needed > room {
            return Err(CheckpointError::TooLarge { needed, room });
        }
        let mut block = vec![0u8; CHUNK];
        for (kind, len, part) in parts {
            let mut crc = Crc32c::default();
            for from in (0..len).step_by(CHUNK) {
                let n = CHUNK.min(len - from);
                match part {
                    Some(part) => kept.part(part, from, &mut block[..n]),
                    None if kind == LOG => block[..n].copy_from_slice(&log[from..from + n]),
                    None if kind == ORDERS => block[..n].copy_from_slice(&orders[from..from + n]),
                    None => block[..n].copy_from_slice(&state[from..from + n]),
                }
                crc.update(&block[..n]);
                let padded = n.next_multiple_of(BLOCK as usize);
                block[n..padded].fill(0);
                media.write_at(area + at + from as u64, &block[..padded])?;
            }
            sections.push(Section {
                kind,
                offset: at,
                len: len as u64,
                crc: crc.finish(),
            });
            at += (len as u64).next_multiple_of(BLOCK);
        }
        let header = CheckpointHeader {
            pool_tag: self.pool_tag,
            id,
            next_batch_seq: self.log.next_batch_seq,
            next_segment_seq: self.log.next_segment_seq,
            tail_seq: 0,
            sections,
        };
        let block = header.encode(room)?;
        media.write_at(area, &block[..])?;
        media.flush()?;
        Ok(at)
    }

    fn encode_state(&self, kept: &impl Kept) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend_from_slice(&kept.seed().to_le_bytes());
        out.extend_from_slice(&(self.log.segments.len() as u32).to_le_bytes());
        for s in &self.log.segments {
            // Everything is durable now, so a segment is either part of the log or free.
            out.push(u8::from(s.state == SegState::Closed));
            out.extend_from_slice(&s.seq.to_le_bytes());
        }
        let zeros = match self.faults.has(Fault::CheckpointNoZeros) {
            true => Vec::new(),
            false => kept.zeros(),
        };
        out.extend_from_slice(&(zeros.len() as u32).to_le_bytes());
        for zeros in zeros {
            out.extend_from_slice(&zeros.disk.to_le_bytes());
            out.extend_from_slice(&(self.log.next_segment_seq - 1).to_le_bytes());
            out.extend_from_slice(&(zeros.runs.len() as u32).to_le_bytes());
            for (block, count) in zeros.runs {
                out.extend_from_slice(&block.to_le_bytes());
                out.extend_from_slice(&count.to_le_bytes());
            }
        }
        out
    }

    /// What would cost a look at every segment to find out again.
    fn encode_log(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for s in &self.log.segments {
            out.extend_from_slice(&s.first_batch.to_le_bytes());
            out.extend_from_slice(&s.last_batch.to_le_bytes());
        }
        let begun = match self.faults.has(Fault::CheckpointNoEviction) {
            true => &[],
            false => self.begun(),
        };
        out.extend_from_slice(&(begun.len() as u32).to_le_bytes());
        for seg in begun {
            out.extend_from_slice(&seg.to_le_bytes());
        }
        let stays = |seg: u32| self.log.segments[seg as usize].state == SegState::Closed;
        let zeros = || self.log.zeros.iter().filter(|(seg, ..)| stays(*seg));
        out.extend_from_slice(&(zeros().count() as u64).to_le_bytes());
        for (seg, disk, start, end) in zeros() {
            out.extend_from_slice(&seg.to_le_bytes());
            out.extend_from_slice(&disk.to_le_bytes());
            out.extend_from_slice(&start.to_le_bytes());
            out.extend_from_slice(&end.to_le_bytes());
        }
        out.extend_from_slice(&self.dead.encode());
        out
    }

    fn adopt_log(
        &mut self,
        bytes: &[u8],
        kept: usize,
        lost: bool,
        restore: &mut impl Restore,
    ) -> Option<()> {
        let mut r = Reader(bytes);
        for seg in 0..kept {
            let (first, last) = (r.u64()?, r.u64().filter(|last| *last < NUMBERS_END)?);
            if let Some(s) = self.log.segments.get_mut(seg) {
                (s.first_batch, s.last_batch) = (first, last);
            }
        }
        let segments = self.log.segments.len() as u32;
        let mut begun = Vec::new();
        // Those of a device that was lost are not there.
        let known = |seg: &u32| *seg < segments || lost && (*seg as usize) < kept;
        let there = |seg: u32, log: &Log<U::Token>| {
            let s = log.segments.get(seg as usize);
            s.is_some_and(|s| s.state == SegState::Closed)
        };
        for _ in 0..r.u32()? {
            begun.push(r.u32().filter(known)?);
        }
        begun.retain(|seg| there(*seg, &self.log));
        self.resume(begun);
        if !self.begun().is_empty() {
            restore.evicted(self.evictions());
        }
        for _ in 0..r.u64()? {
            let seg = r.u32().filter(known)?;
            let (disk, start, end) = (r.u16()?, r.u64()?, r.u64()?);
            if start >= end {
                return None;
            }
            if !lost || there(seg, &self.log) {
                self.log.zeros.add(seg, disk, start, end);
            }
        }
        self.dead = Dead::decode(r.0)?;
        Some(())
    }

    /// Reads the checkpoint back, also one from before devices came or went. False: it is not usable, and this device and `restore` must be built afresh.
    pub fn read_checkpoint(
        &mut self,
        media: &mut dyn Media,
        id: u64,
        restore: &mut impl Restore,
    ) -> io::Result<bool> {
        let header = self.checkpoint_header(media)?;
        match header.filter(|header| header.id == id) {
            Some(header) => self.read_sections(media, header, None, restore),
            None => Ok(false),
        }
    }

    /// The same of what was known when the pool went on without a device, as long as that stands there: after a crash the log is read on top of
    /// it. Segments that were freed since do not count. False as above.
    pub fn read_base(
        &mut self,
        media: &mut dyn Media,
        restore: &mut impl Restore,
    ) -> io::Result<bool> {
        let header = self.checkpoint_header(media)?;
        let floor = self.sb.floor_of_log();
        let header = header.filter(|header| floor > 0 && header.next_segment_seq == floor);
        match (header, self.read_map(media)) {
            (Some(header), Some(map)) => self.read_sections(media, header, Some(&map), restore),
            _ => Ok(false),
        }
    }

    fn checkpoint_header(&self, media: &mut dyn Media) -> io::Result<Option<CheckpointHeader>> {
        let mut block = vec![0u8; BLOCK as usize];
        media.read_at(self.layout.checkpoint_offset(), &mut block)?;
        let header = CheckpointHeader::decode(&block, self.layout.checkpoint_bytes()).ok();
        let sane = |h: &CheckpointHeader| {
            let numbers = [h.next_batch_seq, h.next_segment_seq, h.tail_seq];
            h.pool_tag == self.pool_tag && numbers.iter().all(|n| *n < NUMBERS_END)
        };
        Ok(header.filter(sane))
    }

    /// With a `map`, of what it names only.
    fn read_sections(
        &mut self,
        media: &mut dyn Media,
        header: CheckpointHeader,
        map: Option<&SegmentMap>,
        restore: &mut impl Restore,
    ) -> io::Result<bool> {
        let area = self.layout.checkpoint_offset();
        let part = |kind: u32, len: usize| {
            header
                .sections
                .iter()
                .find(|s| s.kind == kind && s.len == len as u64)
        };
        let Some(state_at) = header
            .sections
            .iter()
            .find(|s| s.kind == STATE && s.len < 1 << 30)
        else {
            return Ok(false);
        };
        let mut state = vec![0u8; state_at.len as usize];
        if !load(media, area, state_at, &mut state)? {
            return Ok(false);
        }
        // A pool without a map has none of this, and is walked.
        let log_at = header
            .sections
            .iter()
            .find(|s| s.kind == LOG && s.len < 1 << 40);
        let Some(log_at) = log_at.filter(|_| self.sb.incompat & INCOMPAT_MAP != 0) else {
            return Ok(false);
        };
        let mut log = vec![0u8; log_at.len as usize];
        if !load(media, area, log_at, &mut log)? {
            return Ok(false);
        }
        if !self.fits(&state, &header, restore) {
            return Ok(false);
        }
        for (kind, what) in PARTS {
            let Some(section) = part(kind, restore.part_len(what)) else {
                return Ok(false);
            };
            if !load_part(media, area, section, what, restore)? {
                return Ok(false);
            }
        }
        let adopted = self.adopt_state(&state, &header, restore);
        if let Some(map) = map {
            self.leave_freed(map);
        }
        let lost = self.tells_of_lost(&header);
        let adopted = adopted.and_then(|kept| self.adopt_log(&log, kept, lost, restore));
        let adopted = adopted.and_then(|()| self.drop_lost(&header, restore));
        if adopted.and_then(|()| self.recount(restore)).is_none() {
            return Ok(false);
        }
        let sections = header.sections.iter();
        match sections
            .clone()
            .find(|s| s.kind == ORDERS && s.len < 1 << 40)
        {
            Some(at) => {
                let mut orders = vec![0u8; at.len as usize];
                let last = self.log.applied_seq;
                Ok(load(media, area, at, &mut orders)? && restore.set_orders(&orders, last))
            }
            None => Ok(true),
        }
    }

    /// Can it be that the checkpoint is of this pool? Its devices may have been others since; what lies on those
    /// that stayed has the numbers it had.
    fn fits(&self, state: &[u8], header: &CheckpointHeader, restore: &mut impl Restore) -> bool {
        let mut r = Reader(state);
        let count = r.u64().and_then(|_| r.u32());
        let Some(count) = count.filter(|n| *n as usize != self.log.segments.len()) else {
            return true;
        };
        let slots = u64::from(count) * u64::from(self.log.segment_slots);
        // Room is made for no more than lies here.
        let of_slots = |s: &Section| s.kind == SLOTS && s.len >= slots;
        if slots >= u64::from(u32::MAX) || !header.sections.iter().any(of_slots) {
            return false;
        }
        restore.of_slots(slots as u32, self.tells_of_lost(header));
        true
    }

    /// Is this checkpoint from before the pool went on without a device? Then it tells of segments that were there.
    fn tells_of_lost(&self, header: &CheckpointHeader) -> bool {
        header.next_segment_seq <= self.sb.floor_of_log()
    }

    /// Segments that this map does not name were freed since the checkpoint was written.
    fn leave_freed(&mut self, map: &SegmentMap) {
        took(Path::BaseRead);
        for (s, entry) in self.log.segments.iter_mut().zip(&map.entries) {
            if s.state == SegState::Closed && s.seq != entry.seq {
                s.state = SegState::Free;
            }
        }
        let there = |seg: &u32| self.log.segments[*seg as usize].state == SegState::Closed;
        self.log.order = self.log.order.iter().copied().filter(there).collect();
        // Which are free is known when the log was read.
        self.log.free.clear();
    }

    /// Drops the clean copies that went with a device. `None`: something else was there, too.
    fn drop_lost(&mut self, header: &CheckpointHeader, restore: &mut impl Restore) -> Option<()> {
        if !self.tells_of_lost(header) {
            return Some(());
        }
        took(Path::OpenedWithout);
        let (log, blocks) = (&self.log, self.log.segment_slots);
        let gone = |slot: Slot| {
            let s = log.segments.get((slot / blocks) as usize);
            s.is_none_or(|s| s.state != SegState::Closed)
        };
        restore.drop_gone(gone).then_some(())
    }

    fn adopt_state(
        &mut self,
        state: &[u8],
        header: &CheckpointHeader,
        restore: &mut impl Restore,
    ) -> Option<usize> {
        let mut r = Reader(state);
        let seed = r.u64()?;
        if !restore.adopt(seed) {
            return None;
        }
        let mut order: Vec<(u64, u32)> = Vec::new();
        let kept = r.u32()? as usize;
        for seg in 0..kept {
            let closed = r.u8()? == 1;
            let seq = r.u64().filter(|seq| *seq < NUMBERS_END)?;
            let there = |s: &&mut Segment| s.state != SegState::Bad;
            let Some(s) = self.log.segments.get_mut(seg).filter(there) else {
                // It was emptied before its device went, unless that was lost.
                if closed && !self.tells_of_lost(header) {
                    return None;
                }
                continue;
            };
            s.seq = seq;
            if closed {
                s.state = SegState::Closed;
                order.push((s.seq, seg as u32));
            }
        }
        order.sort_unstable();
        // What is written next is newer than all, and of two segments one is older; else nothing could
        // ever come free.
        let twice = order.windows(2).any(|pair| pair[0].0 == pair[1].0);
        if twice
            || order
                .last()
                .is_some_and(|(seq, _)| *seq >= header.next_segment_seq)
        {
            return None;
        }
        self.log.next_segment_seq = self.log.next_segment_seq.max(header.next_segment_seq);
        self.log.order = order.iter().map(|(_, seg)| *seg).collect();
        self.log.free = (0..self.log.segments.len() as u32)
            .filter(|s| self.log.segments[*s as usize].state == SegState::Free)
            .collect();
        for _ in 0..r.u32()? {
            let id = r.u16()?;
            let seg_seq = r.u64().filter(|seq| *seq < NUMBERS_END)?;
            let runs = r.u32()?;
            for _ in 0..runs {
                let (block, count) = (r.u64()?, r.u64()?);
                let end = block.checked_add(count).filter(|e| *e <= 1 << 36)?;
                restore.zeroed(id, block, end, seg_seq);
            }
        }
        self.log.next_batch_seq = header.next_batch_seq.max(1);
        self.log.applied_seq = self.log.next_batch_seq - 1;
        self.log.durable_seq = self.log.applied_seq;
        Some(kept)
    }

    /// Counts what the slots say, and drops what belongs to no disk. `None`: what they say cannot be.
    fn recount(&mut self, restore: &mut impl Restore) -> Option<()> {
        let segment_blocks = self.log.segment_slots;
        for seg in self.log.order.clone() {
            self.cleaner.open(seg, 0);
        }
        let (half, data_blocks) = (self.log.half, self.log.data_blocks);
        for (seg, s) in self.log.segments.iter_mut().enumerate() {
            let base = seg as u32 * segment_blocks;
            for slot in base..base + segment_blocks {
                let Lies::Block { dirty, found } = restore.count(slot, s.seq) else {
                    continue;
                };
                // A log that is walked takes nothing there, and of what is dirty nothing may be left that
                // nobody finds: it would stay dirty for ever. Clean ones are looked at when they go.
                let part_of_log =
                    s.state == SegState::Closed && is_for_data(half, data_blocks, slot - base);
                if !part_of_log || dirty && !found {
                    return None;
                }
                s.live += 1;
                s.dirty += u32::from(dirty);
                s.second += u32::from(half > 0 && slot - base >= half);
                self.cleaner.append(seg as u32, Why::of_found(dirty), dirty);
            }
        }
        for seg in self.log.order.clone() {
            self.cleaner.close(seg);
        }
        restore.drop_foreign(|gone| self.slot_gone(gone));
        Some(())
    }
}

/// Reads a section of the index; false if its checksum is wrong.
fn load_part(
    media: &mut dyn Media,
    area: u64,
    section: &Section,
    what: Part,
    restore: &mut impl Restore,
) -> io::Result<bool> {
    let len = section.len as usize;
    let mut crc = Crc32c::default();
    let mut bytes = vec![0u8; len.next_multiple_of(BLOCK as usize).min(CHUNKS * CHUNK)];
    for from in (0..len).step_by(CHUNKS * CHUNK) {
        let n = (len - from).min(CHUNKS * CHUNK);
        let base = area + section.offset + from as u64;
        let padded = n.next_multiple_of(BLOCK as usize);
        let mut reads: Vec<(u64, &mut [u8])> = (bytes[..padded].chunks_mut(CHUNK).enumerate())
            .map(|(i, chunk)| (base + (i * CHUNK) as u64, chunk))
            .collect();
        media.read_many(&mut reads)?;
        for (i, chunk) in bytes[..n].chunks(CHUNK).enumerate() {
            crc.update(chunk);
            restore.set_part(what, from + i * CHUNK, chunk);
        }
    }
    Ok(crc.finish() == section.crc)
}

/// Reads one section; false if its checksum is wrong.
fn load(media: &mut dyn Media, area: u64, section: &Section, out: &mut [u8]) -> io::Result<bool> {
    let whole = out.len() / BLOCK as usize * BLOCK as usize;
    let (body, tail) = out.split_at_mut(whole);
    let mut reads: Vec<(u64, &mut [u8])> = body
        .chunks_mut(CHUNK)
        .enumerate()
        .map(|(i, chunk)| (area + section.offset + (i * CHUNK) as u64, chunk))
        .collect();
    media.read_many(&mut reads)?;
    if !tail.is_empty() {
        let mut last = vec![0u8; BLOCK as usize];
        media.read_at(area + section.offset + whole as u64, &mut last)?;
        tail.copy_from_slice(&last[..tail.len()]);
    }
    Ok(crc32c(out) == section.crc)
}

/// Reads little-endian numbers from untrusted bytes.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }
    fn u8(&mut self) -> Option<u8> {
        self.take::<1>().map(|b| b[0])
    }
    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }
    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }
    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }
}
