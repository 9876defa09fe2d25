//! Which segments count is written down, and then those that do not may be overwritten.
//!
//! A segment that was emptied is free when everything that takes the place of what was in it is durable in the
//! log, and the segment map on flash says so, too, in both its copies (docs/format.md). Several segments
//! come free with one map. Only blocks of its table that changed are written.
//!
//! A map tells of batches up to a number, `through`: those are durable, and every segment that has one of
//! them and counts is named. What is opened later is found by walking on from there. So a head is named as
//! soon as its first batch is durable, and not before, for until then a power cut may take it away.

use crate::ctx::Io;
use crate::faults::Fault;
use crate::flash::device::{FlashDevice, FlashOp, Users};
use crate::flash::log::{SegState, Segment};
use crate::flash::recover::NUMBERS_END;
use hearth_format::map::{MAP_ENTRIES, encode_table, table_crc};
use hearth_format::{MapEntry, MapHeader, SegmentMap};
use hearth_io::{BLOCK, Buf, IoError, Media, OpKind};
use std::collections::BTreeSet;
use std::io;

/// Writes of a map that may fail in a row before the device counts as failed: as many as segments are tried
/// for a batch.
const STORE_TRIES: u32 = 4;

/// What is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Blocks of a copy are being written.
    Write { copy: u8 },
    /// They are being flushed.
    Flush { copy: u8 },
}

/// The map as it is stored.
#[derive(Debug, Default)]
pub(crate) struct MapStore {
    generation: u64,
    /// Checksums of the table's blocks.
    crcs: Vec<u32>,
    /// Segments of which the map on flash may not say how they are.
    changed: BTreeSet<u32>,
    step: Option<Step>,
    /// Blocks of the map that is being written, with their places in it.
    blocks: Vec<(u64, Buf)>,
    /// Writes in flight.
    inflight: usize,
    failed: bool,
    failures: u32,
    /// Segments that come free with it.
    frees: Vec<u32>,
}

impl MapStore {
    /// Of so many segments, of which none counts.
    pub fn new(segments: u32) -> MapStore {
        let none = vec![MapEntry::default(); segments as usize];
        MapStore {
            crcs: crcs_of(&none),
            ..MapStore::default()
        }
    }

    /// A map is being written.
    pub fn is_storing(&self) -> bool {
        self.step.is_some()
    }
}

fn crcs_of(entries: &[MapEntry]) -> Vec<u32> {
    let tables = entries.chunks(MAP_ENTRIES).zip(0..);
    tables
        .map(|(part, place)| encode_table(place, part).1)
        .collect()
}

impl<U: Users> FlashDevice<U> {
    /// The map does not tell how this segment is any more.
    pub fn note_changed(&mut self, seg: u32) {
        self.map.changed.insert(seg);
    }

    /// What is to be said of a segment, and whether that is final.
    pub fn map_entry(&self, seg: u32, through: u64) -> (MapEntry, bool) {
        let s = &self.log.segments[seg as usize];
        let none = (MapEntry::default(), true);
        match s.state {
            SegState::Free | SegState::Trimming | SegState::Bad => return none,
            SegState::Freeing { .. } if self.map.frees.contains(&seg) => return none,
            SegState::Freeing { .. } | SegState::Open | SegState::Closed => {}
        }
        let forgotten = self.faults.has(Fault::MapForgetsHead) && s.state == SegState::Open;
        if s.first_batch > through || forgotten {
            return (MapEntry::default(), false);
        }
        let settled = s.state == SegState::Closed && s.last_batch <= through;
        let last_batch = match settled {
            true => s.last_batch,
            false => self.log.last_batch_of(seg, through),
        };
        // Until what is newer than its blocks is durable, they may be the newest there is.
        let durable = self.log.durable_ord;
        let clean = settled && s.clean_from.is_some_and(|ord| ord <= durable);
        (
            MapEntry {
                seq: s.seq,
                last_batch,
                clean,
            },
            settled && clean == s.clean_from.is_some(),
        )
    }

    /// The whole map as it is now. Everything that was appended is durable.
    fn whole_map(&self, copy: u8) -> SegmentMap {
        let through = self.log.durable_seq;
        let segments = 0..self.log.segments.len() as u32;
        SegmentMap {
            header: MapHeader {
                pool_tag: self.pool_tag,
                generation: self.map.generation,
                through,
                segments: segments.len() as u32,
                table_crc: 0,
            },
            entries: segments.map(|seg| self.map_entry(seg, through).0).collect(),
            copy,
        }
    }

    /// The newest map, if its numbers can be true.
    pub fn read_map(&self, media: &mut dyn Media) -> Option<SegmentMap> {
        let sane = |map: &SegmentMap| {
            let numbers = [map.header.generation, map.header.through];
            let segments = map.entries.iter().map(|e| e.seq);
            numbers.into_iter().chain(segments).all(|n| n < NUMBERS_END)
        };
        SegmentMap::load(media, &self.layout, self.pool_tag).filter(sane)
    }

    /// Stores the map at a start, before anything is appended: what was found is what counts.
    pub fn store_whole_map(&mut self, media: &mut dyn Media) -> io::Result<()> {
        let before = self.read_map(media);
        // What it says of segments that are still there holds.
        for (seg, entry) in (0..).zip(before.iter().flat_map(|map| &map.entries)) {
            let s: &mut Segment = &mut self.log.segments[seg as usize];
            if entry.clean && entry.seq == s.seq && s.state == SegState::Closed {
                s.clean_from = Some(0);
            }
        }
        self.map.generation = before.as_ref().map_or(0, |map| map.header.generation) + 1;
        let map = self.whole_map(before.map_or(1, |map| map.copy));
        map.store(media, &self.layout)?;
        self.map.crcs = crcs_of(&map.entries);
        self.map.changed.clear();
        // A head that goes on is not settled by this map.
        self.map
            .changed
            .extend(self.log.heads.iter().flatten().map(|h| h.seg));
        Ok(())
    }

    /// Starts a map if segments wait for one and cannot wait for more of their kind, or are many.
    pub fn store_map_if_due(&mut self) {
        let many = (self.ahead_most() / 2).max(1);
        if self.is_short_of_free() || self.log.freeing.len() >= many && self.ahead_most() > 0 {
            self.store_map();
        }
    }

    /// Starts a map if segments wait for one.
    pub fn store_map(&mut self) {
        if self.map.is_storing() || !self.takes_writes() {
            return;
        }
        self.let_held_go();
        if self.any_held() {
            return;
        }
        let durable = match self.faults.has(Fault::FreeUndurable) {
            true => u64::MAX,
            false => self.log.durable_ord,
        };
        let log = &self.log;
        let ready = log.freeing.iter().copied().filter(|seg| {
            let state = log.segments[*seg as usize].state;
            matches!(state, SegState::Freeing { ord } if ord <= durable)
        });
        self.map.frees = ready.collect();
        if self.map.frees.is_empty() {
            return;
        }
        self.map.generation += 1;
        self.encode_map();
        if self.faults.has(Fault::ReuseBeforeMap) {
            self.release_freed();
        }
        self.write_copy(0);
    }

    /// Encodes those blocks that change.
    fn encode_map(&mut self) {
        let through = match self.faults.has(Fault::MapAhead) {
            true => self.log.applied_seq,
            false => self.log.durable_seq,
        };
        let places: BTreeSet<u32> = (self.map.changed.iter())
            .map(|seg| seg / MAP_ENTRIES as u32)
            .collect();
        let mut blocks = Vec::with_capacity(places.len() + 1);
        for place in places {
            let from = place * MAP_ENTRIES as u32;
            let to = (from + MAP_ENTRIES as u32).min(self.log.segments.len() as u32);
            let entries: Vec<MapEntry> = (from..to)
                .map(|seg| {
                    let (entry, settled) = self.map_entry(seg, through);
                    if settled {
                        self.map.changed.remove(&seg);
                    }
                    entry
                })
                .collect();
            let (block, crc) = encode_table(place, &entries);
            self.map.crcs[place as usize] = crc;
            blocks.push((1 + u64::from(place), block));
        }
        let header = MapHeader {
            pool_tag: self.pool_tag,
            generation: self.map.generation,
            through,
            segments: self.log.segments.len() as u32,
            table_crc: table_crc(&self.map.crcs),
        };
        blocks.push((0, header.encode()));
        let buf = |bytes: &[u8]| {
            let buf = Buf::zeroed(BLOCK as usize);
            buf.all().bytes_mut().copy_from_slice(bytes);
            buf
        };
        let blocks = blocks.iter().map(|(at, block)| (*at, buf(&block[..])));
        self.map.blocks = blocks.collect();
    }

    fn write_copy(&mut self, copy: u8) {
        self.map.step = Some(Step::Write { copy });
        self.map.inflight = self.map.blocks.len();
        self.map.failed = false;
        let target = self.target();
        let at = self.layout.map_offset(copy);
        for (place, block) in &self.map.blocks {
            let io = Io::write(target, at + place * BLOCK, [block.all()]);
            self.out.send(FlashOp::Map, io);
        }
    }

    /// A step of storing the map ended.
    pub fn map_ended(&mut self, kind: OpKind, result: &Result<(), IoError>, now: u64) {
        if !self.takes_writes() {
            self.map.step = None;
            return;
        }
        let step = self.map.step.expect("the map is being stored");
        if let Err(e) = result {
            self.counters.flash_errors += 1;
            self.note_refusal(e);
            self.map.failed = true;
            if kind == OpKind::Flush {
                // Nobody knows what the device kept.
                self.full = false;
                return self.fail(now);
            }
        }
        match step {
            Step::Write { copy } => {
                self.map.inflight -= 1;
                if self.map.inflight > 0 {
                    return;
                }
                if self.map.failed {
                    self.map.failures += 1;
                    match self.map.failures > STORE_TRIES {
                        true => self.fail(now),
                        false => self.write_copy(copy),
                    }
                    return;
                }
                self.map.step = Some(Step::Flush { copy });
                self.out.send(FlashOp::Map, Io::flush(self.target()));
            }
            Step::Flush { copy: 0 } if !self.faults.has(Fault::MapOneCopy) => self.write_copy(1),
            Step::Flush { .. } => {
                self.map.failures = 0;
                self.map.step = None;
                self.map.blocks.clear();
                self.release_freed();
                self.store_map_if_due();
            }
        }
    }

    /// The map says that they are free.
    fn release_freed(&mut self) {
        for seg in std::mem::take(&mut self.map.frees) {
            self.release(seg);
        }
    }
}
