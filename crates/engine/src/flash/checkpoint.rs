//! The index as a whole, written at a clean stop and read back at the next start.
//!
//! Sections (numbers in `docs/format.md`): the slot words, the checksums, the hash table as
//! they are in RAM (little-endian), and the state: hash seed, segments, zero runs. A restart
//! reads them in large pieces and is ready; nothing is rebuilt but counters. The log on flash
//! stays complete, so a bad checkpoint only costs a recovery.

use crate::api::DiskId;
use crate::cache::index::Section as Part;
use crate::core::Core;
use crate::faults::Fault;
use crate::flash::append::FITS;
use crate::flash::log::{Sealing, SegState};
use crate::flash::recover::NUMBERS_END;
use crate::paths::{Path, took};
use hearth_format::checkpoint::Section;
use hearth_format::{CheckpointHeader, FormatError};
use hearth_io::checksum::{Crc32c, crc32c};
use hearth_io::{BLOCK, Media};
use std::collections::BTreeMap;
use std::io;

// In this crate a `Fault` is a deliberate mistake.
use hearth_fault::Fault as Failure;

/// 1 was the slot words when they had 8 bytes.
const SLOTS: u32 = 5;
const CHECKSUMS: u32 = 2;
/// 3 was the table when neighbours did not lie together in it.
const TABLE: u32 = 6;
const STATE: u32 = 4;
/// What the index consists of.
const PARTS: [(u32, Part); 3] = [
    (SLOTS, Part::Slots),
    (CHECKSUMS, Part::Checksums),
    (TABLE, Part::Table),
];
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

impl Core {
    /// Seals the head and writes the checkpoint; returns its length in bytes. Nothing may be in
    /// flight.
    pub fn write_checkpoint(
        &mut self,
        media: &mut dyn Media,
        id: u64,
    ) -> Result<u64, CheckpointError> {
        if let Some(head) = self.flash.log.head.take() {
            self.flash.log.segments[head.seg as usize].state = SegState::Closed;
            if head.entries.is_empty() {
                self.flash.log.segments[head.seg as usize].state = SegState::Free;
                self.flash.log.free.push_back(head.seg);
            } else {
                self.flash.log.order.push_back(head.seg);
                let sealing = Sealing {
                    seg: head.seg,
                    seq: head.seq,
                    entries: head.entries,
                    first_batch: head.first_batch,
                    last_batch: self.flash.log.next_batch_seq - 1,
                    tail_seq: self.flash.log.tail_seq(),
                };
                // Everything is on flash and about to be flushed: the summary may say so only after.
                if !self.opts.faults.has(Fault::CloseUnflushedHead) {
                    media.flush()?;
                }
                self.flash.log.durable_seq = self.flash.log.applied_seq;
                let bytes = self.flash.encode_summary(&sealing).expect(FITS);
                media.write_at(self.flash.layout.summary_offset(head.seg), &bytes)?;
            }
        }
        if self.disks.iter().flatten().any(|d| !d.lost.is_empty()) {
            took(Path::LostInCheckpoint);
        }
        let area = self.flash.layout.checkpoint_offset();
        let mut at = BLOCK;
        let mut sections = Vec::new();
        let state = self.encode_state();
        let mut parts = Vec::from(PARTS.map(|(kind, part)| {
            let len = self.cache.index.section_len(part);
            (kind, len, Some(part))
        }));
        parts.push((STATE, state.len(), None));
        let room = self.flash.layout.checkpoint_room();
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
                    Some(part) => self.cache.index.section(part, from, &mut block[..n]),
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
            pool_tag: self.flash.pool_tag,
            id,
            next_batch_seq: self.flash.log.next_batch_seq,
            next_segment_seq: self.flash.log.next_segment_seq,
            tail_seq: self.flash.log.tail_seq(),
            sections,
        };
        let block = header.encode(room)?;
        media.write_at(area, &block[..])?;
        media.flush()?;
        Ok(at)
    }

    fn encode_state(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend_from_slice(&self.cache.index.seed().to_le_bytes());
        out.extend_from_slice(&(self.flash.log.segments.len() as u32).to_le_bytes());
        for s in &self.flash.log.segments {
            // Everything is durable now, so a segment is either part of the log or free.
            out.push(u8::from(s.state == SegState::Closed));
            out.extend_from_slice(&s.seq.to_le_bytes());
        }
        let zero: Vec<_> = self
            .disks
            .iter()
            .flatten()
            .filter(|d| !d.zero.is_empty())
            .filter(|_| !self.opts.faults.has(Fault::CheckpointNoZeros))
            .collect();
        out.extend_from_slice(&(zero.len() as u32).to_le_bytes());
        for d in zero {
            let runs = d.zero.run_count() as u32;
            out.extend_from_slice(&d.cfg.id.to_le_bytes());
            out.extend_from_slice(&d.zero_seg_seq.unwrap_or(0).to_le_bytes());
            out.extend_from_slice(&runs.to_le_bytes());
            for (block, count) in d.zero.runs() {
                out.extend_from_slice(&block.to_le_bytes());
                out.extend_from_slice(&count.to_le_bytes());
            }
        }
        let forgets = self.opts.faults.has(Fault::CheckpointNoEviction);
        let evicting = match self.flash.victim() {
            Some(seg) if !forgets => seg + 1,
            _ => 0,
        };
        out.extend_from_slice(&evicting.to_le_bytes());
        out
    }

    /// Reads the checkpoint back. False: it is not usable, and the core must be built afresh.
    pub fn read_checkpoint(
        &mut self,
        media: &mut dyn Media,
        id: u64,
        since: &BTreeMap<DiskId, u64>,
    ) -> io::Result<bool> {
        let mut block = vec![0u8; BLOCK as usize];
        media.read_at(self.flash.layout.checkpoint_offset(), &mut block)?;
        let header = match CheckpointHeader::decode(&block, self.flash.layout.checkpoint_bytes()) {
            Ok(h)
                if h.pool_tag == self.flash.pool_tag
                    && h.id == id
                    && [h.next_batch_seq, h.next_segment_seq, h.tail_seq]
                        .iter()
                        .all(|n| *n < NUMBERS_END) =>
            {
                h
            }
            _ => return Ok(false),
        };
        let area = self.flash.layout.checkpoint_offset();
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
        for (kind, what) in PARTS {
            let Some(section) = part(kind, self.cache.index.section_len(what)) else {
                return Ok(false);
            };
            if !self.load_part(media, area, section, what)? {
                return Ok(false);
            }
        }
        Ok(self.adopt_state(&state, &header, since).is_some())
    }

    /// Reads a section of the index; false if its checksum is wrong.
    fn load_part(
        &mut self,
        media: &mut dyn Media,
        area: u64,
        section: &Section,
        what: Part,
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
                self.cache.index.set_section(what, from + i * CHUNK, chunk);
            }
        }
        Ok(crc.finish() == section.crc)
    }

    fn adopt_state(
        &mut self,
        state: &[u8],
        header: &CheckpointHeader,
        since: &BTreeMap<DiskId, u64>,
    ) -> Option<()> {
        let mut r = Reader(state);
        let seed = r.u64()?;
        if !self.cache.index.adopt(seed) || r.u32()? as usize != self.flash.log.segments.len() {
            return None;
        }
        let mut order: Vec<(u64, u32)> = Vec::new();
        for seg in 0..self.flash.log.segments.len() {
            let closed = r.u8()? == 1;
            let s = &mut self.flash.log.segments[seg];
            s.seq = r.u64().filter(|seq| *seq < NUMBERS_END)?;
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
        self.flash.log.next_segment_seq =
            self.flash.log.next_segment_seq.max(header.next_segment_seq);
        self.flash.log.order = order.iter().map(|(_, seg)| *seg).collect();
        self.flash.log.free = (0..self.flash.log.segments.len() as u32)
            .filter(|s| self.flash.log.segments[*s as usize].state == SegState::Free)
            .collect();
        for _ in 0..r.u32()? {
            let id = r.u16()?;
            let seg_seq = r.u64().filter(|seq| *seq < NUMBERS_END)?;
            let runs = r.u32()?;
            for _ in 0..runs {
                let (block, count) = (r.u64()?, r.u64()?);
                let end = block.checked_add(count).filter(|e| *e <= 1 << 36)?;
                if let Some(d) = self.disk_mut(id)
                    && since.get(&id).is_none_or(|s| seg_seq >= *s)
                {
                    d.zero_seg_seq = Some(seg_seq);
                    self.change_zeros(id, |zero| zero.insert_range(block, end));
                }
            }
        }
        // Copies of this segment may be gone that the log still has.
        let evicting = r.u32();
        // Of what was written before this was noted it may be so.
        self.flash
            .resume_victim(|seg| evicting.is_none_or(|e| e == seg + 1));
        if let Some(seg) = self.flash.victim() {
            let seq = self.flash.log.segments[seg as usize].seq;
            for d in self.disks.iter_mut().flatten() {
                d.evicted_seq = seq;
            }
        }
        self.flash.log.next_batch_seq = header.next_batch_seq.max(1);
        self.flash.log.applied_seq = self.flash.log.next_batch_seq - 1;
        self.flash.log.durable_seq = self.flash.log.applied_seq;
        self.recount(since)
    }

    /// Counts what the slots say, and drops what belongs to no disk.
    fn recount(&mut self, since: &BTreeMap<DiskId, u64>) -> Option<()> {
        let mut foreign = Vec::new();
        let segment_blocks = self.flash.log.segment_blocks;
        for seg in 0..self.flash.log.segments.len() {
            let base = seg as u32 * segment_blocks;
            let (closed, seq) = (
                self.flash.log.segments[seg].state == SegState::Closed,
                self.flash.log.segments[seg].seq,
            );
            for slot in base..base + segment_blocks {
                let Some(info) = self.cache.index.slot(slot) else {
                    continue;
                };
                // A log that is walked takes nothing there, and of what is dirty nothing may be left that
                // nobody finds: it would stay dirty for ever. Clean ones are looked at when they go.
                let found = !info.dirty || self.cache.index.get(info.key) == Some(slot);
                if !closed || slot - base >= self.flash.log.data_blocks || !found {
                    return None;
                }
                let s = &mut self.flash.log.segments[seg];
                s.live += 1;
                s.dirty += u32::from(info.dirty);
                self.dirty_total += u64::from(info.dirty);
                let disk = info.key.disk();
                let void = since.get(&disk).is_none_or(|s| seq < *s);
                match self.disk_mut(disk) {
                    Some(d) if !void => {
                        d.cached += 1;
                        if info.dirty {
                            d.dirty.insert(info.key.block());
                            if info.lost {
                                took(Path::LostFromCheckpoint);
                                d.lost.insert(info.key.block());
                            }
                        }
                    }
                    _ => foreign.push((slot, info.key, info.dirty)),
                }
            }
        }
        for (slot, key, dirty) in foreign {
            // Another slot may claim to hold the same block.
            if !self.cache.index.remove_orphan(slot) {
                self.cache.index.remove(key);
            }
            self.flash.slot_emptied(slot, dirty);
            self.dirty_total -= u64::from(dirty);
        }
        Some(())
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Engine, EngineOptions};
    use hearth_format::{Layout, Superblock, Uuid};

    /// Notes how far it was written.
    struct Written(u64);

    impl Media for Written {
        fn len(&self) -> u64 {
            u64::MAX
        }
        fn read_at(&mut self, _: u64, data: &mut [u8]) -> io::Result<()> {
            data.fill(0);
            Ok(())
        }
        fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
            self.0 = self.0.max(offset + data.len() as u64);
            Ok(())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The registry may have grown into the end of the area.
    #[test]
    fn a_checkpoint_fits_in_front_of_a_registry_that_has_grown_or_is_not_written_at_all() {
        for (bytes, segment_blocks) in [(2u64 << 30, 1024), (4 << 30, 256), (4 << 30, 16_384)] {
            let layout = Layout::for_device(bytes, segment_blocks).unwrap();
            let (room, _) = layout.registry_room().expect("a registry can grow here");
            let uuid = Uuid::from_u128(1);
            let sb = Superblock::new(layout, uuid, uuid, "test", 0);
            let mut core = Engine::blank(sb, EngineOptions::default(), &[]);
            let mut media = Written(0);
            core.write_checkpoint(&mut media, 1).unwrap();
            assert!((1..=room * BLOCK).contains(&media.0));
            // As if it had more in it.
            core.flash.layout.checkpoint_blocks = media.0 / BLOCK - layout.checkpoint_start - 1;
            media.0 = 0;
            let error = core.write_checkpoint(&mut media, 2).unwrap_err();
            assert!(matches!(error, CheckpointError::TooLarge { .. }), "{error}");
            assert_eq!(media.0, 0);
        }
    }
}
