//! What a start finds: logs and checkpoints that a device has written, read by another.

use super::shelf::Shelf;
use super::{Device, Mark, SEGMENT_BLOCKS, device, device_of, layout, written};
use crate::faults::Faults;
use crate::flash::checkpoint::{Kept, Lies, Part, Restore, Zeros};
use crate::flash::device::FlashOp;
use crate::flash::log::{Gone, Item, SegState, Slot};
use crate::flash::recover::{How, RecoverError, Recovered};
use crate::flash::replay::{Copied, Placed, Replay};
use crate::flash::survey::{BLOCK_BYTES, Content, READ_AHEAD};
use hearth_format::{BatchHeader, Entry, Kind, Layout, SummaryHeader};
use hearth_io::checksum::crc32c;
use hearth_io::{BLOCK, Buf, Media, OpKind};
use hearth_policy::cleaning::Why;
use smallvec::smallvec;
use std::collections::{BTreeMap, BTreeSet};
use std::io;

const HOW: How = How {
    accept_damage: false,
    keep_blocks: 16 << 20,
};

/// Keeps blocks that were written; one cannot be read.
pub(super) struct Sparse {
    blocks: BTreeMap<u64, Vec<u8>>,
    bad: u64,
}

impl Media for Sparse {
    fn len(&self) -> u64 {
        1 << 40
    }
    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        for (block, out) in (offset / BLOCK..).zip(data.chunks_mut(BLOCK_BYTES)) {
            if block == self.bad {
                return Err(io::ErrorKind::Other.into());
            }
            match self.blocks.get(&block) {
                Some(bytes) => out.copy_from_slice(bytes),
                None => out.fill(0),
            }
        }
        Ok(())
    }
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        for (block, bytes) in (offset / BLOCK..).zip(data.chunks(BLOCK_BYTES)) {
            self.blocks.insert(block, bytes.to_vec());
        }
        Ok(())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// All that is to be known of the blocks of disk 1 at a start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Known {
    /// Slot, checksum and dirtiness by block.
    pub(super) blocks: BTreeMap<u64, (Slot, u32, bool)>,
    zeros: BTreeSet<u64>,
    /// What a checkpoint keeps.
    table: Vec<u8>,
    evicted: u64,
}

impl Known {
    fn at(&self, slot: Slot) -> Option<(u64, bool)> {
        let mut all = self.blocks.iter();
        all.find_map(|(block, (at, _, dirty))| (*at == slot).then_some((*block, *dirty)))
    }
}

fn gone(block: u64, slot: Slot, dirty: bool) -> Gone {
    Gone {
        disk: 1,
        block,
        slot,
        dirty,
    }
}

impl Replay for Known {
    fn counts(&self, disk: u16, _: u64) -> Option<u64> {
        (disk == 1).then_some(1 << 36)
    }

    fn comes_soon(&self, _: u16, _: u64) {}

    fn copied(&mut self, copy: Copied) -> Placed {
        if self.at(copy.slot).is_some() {
            return Placed::Taken;
        }
        let is = (copy.slot, copy.crc, copy.dirty);
        let was = self.blocks.insert(copy.block, is);
        Placed::There(was.map(|(slot, _, dirty)| gone(copy.block, slot, dirty)))
    }

    fn cleaned(&mut self, _: u16, start: u64, end: u64, mut tell: impl FnMut(Slot)) {
        for (_, (slot, _, dirty)) in self.blocks.range_mut(start..end) {
            if *dirty {
                *dirty = false;
                tell(*slot);
            }
        }
    }

    fn dropped(&mut self, _: u16, start: u64, end: u64, mut tell: impl FnMut(Gone)) {
        for block in start..end {
            if let Some((slot, _, dirty)) = self.blocks.remove(&block) {
                tell(gone(block, slot, dirty));
            }
        }
    }

    fn zeroed(&mut self, _: u16, start: u64, end: u64) {
        self.zeros.extend(start..end);
    }

    fn zeros_told(&mut self, _: u16, start: u64, end: u64) {
        self.zeros.retain(|block| !(start..end).contains(block));
    }

    fn drop_clean(&mut self, slot: Slot) -> Option<Gone> {
        let (block, dirty) = self.at(slot).filter(|(_, dirty)| !dirty)?;
        self.blocks.remove(&block)?;
        Some(gone(block, slot, dirty))
    }
}

impl Kept for Known {
    fn seed(&self) -> u64 {
        7
    }

    fn part_len(&self, part: Part) -> usize {
        match part {
            Part::Table => self.table.len(),
            Part::Slots | Part::Checksums => 0,
        }
    }

    fn part(&self, _: Part, at: usize, out: &mut [u8]) {
        out.copy_from_slice(&self.table[at..at + out.len()]);
    }

    fn zeros(&self) -> Vec<Zeros> {
        vec![Zeros {
            disk: 1,
            runs: self.zeros.iter().map(|block| (*block, 1)).collect(),
        }]
    }
}

impl Restore for Known {
    fn of_slots(&mut self, _: u32, _: bool) {}
    fn drop_gone(&mut self, _: impl Fn(Slot) -> bool) -> bool {
        true
    }

    fn set_part(&mut self, _: Part, at: usize, data: &[u8]) {
        self.table[at..at + data.len()].copy_from_slice(data);
    }

    fn adopt(&mut self, seed: u64) -> bool {
        seed == 7
    }

    fn zeroed(&mut self, _: u16, start: u64, end: u64, _: u64) {
        self.zeros.extend(start..end);
    }

    fn evicted(&mut self, seq: u64) {
        self.evicted = seq;
    }

    fn count(&mut self, slot: Slot, _: u64) -> Lies {
        let here = self
            .at(slot)
            .map(|(_, dirty)| Lies::Block { dirty, found: true });
        here.unwrap_or(Lies::Nothing)
    }

    fn drop_foreign(&mut self, _: impl FnMut(Gone)) {}
}

/// A device that was formatted: none of its segments counts.
pub(super) fn media() -> Sparse {
    formatted(layout())
}

fn formatted(layout: Layout) -> Sparse {
    let mut media = Sparse {
        blocks: BTreeMap::new(),
        bad: u64::MAX,
    };
    device_of(layout).store_whole_map(&mut media).unwrap();
    media
}

/// Appends a block that is all `byte`.
pub(super) fn put(d: &mut Device, kind: Kind, block: u64, byte: u8) -> u64 {
    let mut data = Buf::zeroed(BLOCK_BYTES).all();
    data.bytes_mut().fill(byte);
    let crcs = smallvec![crc(byte)];
    let token = Mark::Awaited(0);
    d.log
        .push(Item::data(kind, 1, block, data, crcs, Why::Filled, token))
}

pub(super) fn crc(byte: u8) -> u32 {
    crc32c(&[byte; BLOCK_BYTES])
}

pub(super) fn say(d: &mut Device, kind: Kind, block: u64, count: u64) -> u64 {
    d.log.record(kind, 1, block, count, Mark::Awaited(0))
}

/// Writes on `media` whatever a device wants written, until it wants nothing more. Flushes end well.
pub(super) fn perform(d: &mut Device, media: &mut Sparse) {
    d.log.urgent = true;
    d.pump(0);
    loop {
        let ops: Vec<_> = d.out.ios.drain(..).collect();
        d.out.events.clear();
        if ops.is_empty() {
            return;
        }
        for (op, io) in ops {
            if io.kind == OpKind::Write {
                let bytes: Vec<u8> = io.bufs.iter().flat_map(|b| b.bytes().to_vec()).collect();
                media.write_at(io.offset, &bytes).unwrap();
            }
            match op {
                FlashOp::Batch { seq } => {
                    written(d, seq);
                }
                FlashOp::Summary { seg } => d.summary_ended(seg, &Ok(())),
                FlashOp::Flush { ord, seq } => assert!(d.flush_ended(ord, seq, &Ok(()), 0)),
                FlashOp::Trim { seg } => d.trim_ended(seg),
                op => panic!("{op:?}"),
            }
        }
        d.log.urgent = true;
        d.pump(0);
    }
}

pub(super) fn sync(d: &mut Device, media: &mut Sparse) {
    perform(d, media);
    d.flush(0);
    perform(d, media);
}

/// What a start finds on `media`, whose superblock has these bits too, and the device as it is then.
pub(super) fn start(media: &mut Sparse, incompat: u64) -> (Device, Known, Recovered) {
    let mut d = device_of(layout());
    d.sb.incompat |= incompat;
    let mut known = Known::default();
    let found = d.recover(media, &mut known, &HOW).unwrap();
    let live: u32 = d.log.segments.iter().map(|s| s.live).sum();
    assert_eq!(live as usize, known.blocks.len());
    let dirty: u32 = d.log.segments.iter().map(|s| s.dirty).sum();
    let counted = known.blocks.values().filter(|(_, _, dirty)| *dirty).count();
    assert_eq!(dirty as usize, counted);
    (d, known, found)
}

/// Blocks with what they hold, and whether they are dirty.
pub(super) fn contents(known: &Known) -> Vec<(u64, u32, bool)> {
    let all = known.blocks.iter();
    all.map(|(block, (_, crc, dirty))| (*block, *crc, *dirty))
        .collect()
}

#[test]
fn a_start_learns_what_the_log_says_in_its_order() {
    let (mut d, mut media) = (device(), media());
    put(&mut d, Kind::Dirty, 1, 1);
    put(&mut d, Kind::Dirty, 2, 2);
    put(&mut d, Kind::Clean, 3, 3);
    put(&mut d, Kind::Clean, 4, 4);
    say(&mut d, Kind::Intent, 0, 64);
    say(&mut d, Kind::Intent, 64, 64);
    // Another segment says what is newer.
    sync(&mut d, &mut media);
    d.roll();
    put(&mut d, Kind::Dirty, 2, 20);
    say(&mut d, Kind::CleanedRun, 1, 1);
    say(&mut d, Kind::DropRun, 3, 1);
    say(&mut d, Kind::ZeroRun, 4, 3);
    say(&mut d, Kind::ZeroDoneRun, 6, 1);
    say(&mut d, Kind::IntentClear, 0, 64);
    sync(&mut d, &mut media);

    let (_, known, found) = start(&mut media, 0);
    assert_eq!(contents(&known), [(1, crc(1), false), (2, crc(20), true)]);
    assert_eq!(known.zeros, BTreeSet::from([4, 5]));
    assert_eq!(found.intents.keys().collect::<Vec<_>>(), [&(1, 64)]);
    assert_eq!((found.segments, found.discarded), (2, 0));
}

#[test]
fn a_batch_that_is_not_whole_never_happened_nor_what_came_after_it() {
    let (mut d, mut media) = (device(), media());
    put(&mut d, Kind::Dirty, 1, 1);
    sync(&mut d, &mut media);
    for byte in 2..5 {
        put(&mut d, Kind::Dirty, u64::from(byte), byte);
        perform(&mut d, &mut media);
    }
    // The device lost its power and a part of the third batch.
    let wrong = vec![99; BLOCK_BYTES];
    let places: Vec<u64> = media.blocks.keys().copied().collect();
    let third = places
        .iter()
        .find(|at| media.blocks[at] == vec![3; BLOCK_BYTES]);
    media.blocks.insert(*third.expect("it was written"), wrong);

    let (d, known, found) = start(&mut media, 0);
    assert_eq!(contents(&known), [(1, crc(1), true), (2, crc(2), true)]);
    assert_eq!(found.discarded, 1);
    let next = (d.log.next_batch_seq, d.log.applied_seq, d.log.durable_seq);
    assert_eq!(next, (3, 2, 2));
    // The next start finds the same, though batches three and four may be there again by then.
    let (mut d, again, _) = start(&mut media, 0);
    assert_eq!(again, known);
    d.log.next_segment_seq = 100;
    put(&mut d, Kind::Dirty, 7, 7);
    sync(&mut d, &mut media);
    let (_, last, _) = start(&mut media, 0);
    assert_eq!(contents(&last)[2..], [(7, crc(7), true)]);
}

#[test]
fn what_was_durable_and_cannot_be_read_is_damage() {
    let (mut d, mut media) = (device(), media());
    put(&mut d, Kind::Dirty, 1, 1);
    sync(&mut d, &mut media);
    put(&mut d, Kind::Dirty, 2, 2);
    sync(&mut d, &mut media);
    let first = layout().segment_offset(0) / BLOCK;
    let descriptor = media.blocks.insert(first, vec![0; BLOCK_BYTES]);
    // Nothing of the segment counts without its first batch, and nothing else tells of it.
    let (_, known, _) = start(&mut media, 0);
    assert!(known.blocks.is_empty());
    // Where another segment says so it is missed.
    media
        .blocks
        .insert(first, descriptor.expect("it was there"));
    d.roll();
    put(&mut d, Kind::Dirty, 3, 3);
    sync(&mut d, &mut media);
    say(&mut d, Kind::DropRun, 900, 1);
    sync(&mut d, &mut media);
    for at in [first, layout().summary_offset(0) / BLOCK] {
        media.blocks.insert(at, vec![0; BLOCK_BYTES]);
    }
    let mut d = device_of(layout());
    let error = d.recover(&mut media, &mut Known::default(), &HOW);
    assert!(matches!(error, Err(RecoverError::Damaged(_))), "{error:?}");
}

#[test]
fn below_a_clean_floor_only_dirty_copies_count() {
    let (mut d, mut media) = (device(), media());
    put(&mut d, Kind::Dirty, 1, 1);
    put(&mut d, Kind::Clean, 2, 2);
    sync(&mut d, &mut media);
    d.roll();
    let floor = d.log.next_segment_seq;
    put(&mut d, Kind::Clean, 3, 3);
    sync(&mut d, &mut media);
    let mut d = device_of(layout());
    d.sb.clean_floor = floor;
    let mut known = Known::default();
    d.recover(&mut media, &mut known, &HOW).unwrap();
    assert_eq!(contents(&known), [(1, crc(1), true), (3, crc(3), false)]);
    assert_eq!(d.log.segments.iter().map(|s| s.live).sum::<u32>(), 2);
}

/// Its copy would be dirty again at the start after that, and be destaged over what its disk was given since.
#[test]
fn a_clean_copy_dropped_below_a_clean_floor_is_void_when_what_says_that_it_is_clean_goes() {
    let cleaned = Entry {
        disk: 1,
        kind: Kind::CleanedRun,
        block: 1,
        word: 1,
        slot: 0,
        flags: 0,
    };
    for floored in [false, true] {
        let (mut d, mut media) = (device(), media());
        put(&mut d, Kind::Dirty, 1, 1);
        sync(&mut d, &mut media);
        d.roll();
        say(&mut d, Kind::CleanedRun, 1, 1);
        sync(&mut d, &mut media);
        d.roll();
        let floor = d.log.next_segment_seq;
        put(&mut d, Kind::Clean, 9, 9);
        sync(&mut d, &mut media);
        let mut d = device_of(layout());
        d.sb.clean_floor = if floored { floor } else { 0 };
        let mut known = Known::default();
        d.recover(&mut media, &mut known, &HOW).unwrap();
        let there = contents(&known).iter().any(|(block, ..)| *block == 1);
        assert_eq!(there, !floored, "{known:?}");
        let mut shelf = Shelf::default();
        if there {
            shelf.slots.insert(known.blocks[&1].0, (1, false));
        }
        // The second segment goes; the copy in the first says that it is dirty.
        let (said, _) = d.leaving(1, &[cleaned]).holding(&shelf, Faults::default());
        let said: Vec<_> = said.iter().map(|s| (s.kind, s.block, s.count)).collect();
        // Of what is cached, the map says that all there is clean.
        let expected: &[_] = match floored {
            true => &[(Kind::DropRun, 1, 1)],
            false => &[],
        };
        assert_eq!(said, expected);
    }
}

#[test]
fn a_checkpoint_gives_back_what_was_kept_and_nothing_that_cannot_be() {
    let (mut d, mut media) = (device(), media());
    put(&mut d, Kind::Dirty, 1, 1);
    put(&mut d, Kind::Clean, 2, 2);
    say(&mut d, Kind::ZeroRun, 8, 2);
    sync(&mut d, &mut media);
    let (mut d, mut known, _) = start(&mut media, 0);
    known.table = (0..5000u32).map(|i| i as u8).collect();
    d.dead.add(1, 99);
    d.resume(vec![0]);
    let len = d.write_checkpoint(&mut media, 5, &known).unwrap();
    assert!(len <= layout().checkpoint_room() * BLOCK);

    let empty = || Known {
        table: vec![0; known.table.len()],
        blocks: known.blocks.clone(),
        ..Known::default()
    };
    let (mut again, mut restored) = (device_of(layout()), empty());
    assert!(again.read_checkpoint(&mut media, 5, &mut restored).unwrap());
    known.evicted = 1;
    assert_eq!(restored, known);
    assert_eq!(again.begun(), [0]);
    assert_eq!(again.dead.count(1, 99), 1);
    assert_eq!(again.log.zeros.of(0), [(1, 8, 10)]);
    assert_eq!(
        again.log.segments[0].last_batch,
        d.log.segments[0].last_batch
    );
    assert_eq!(again.log.order, d.log.order);
    assert_eq!(again.log.free, d.log.free);
    let s = again.log.segments[0];
    assert_eq!((s.state, s.live, s.dirty), (SegState::Closed, 2, 1));
    assert_eq!(again.log.next_batch_seq, d.log.next_batch_seq);

    // Not of another stop, nor with a block in a segment that is free.
    let mut other = device_of(layout());
    assert!(!other.read_checkpoint(&mut media, 6, &mut empty()).unwrap());
    let mut wrong = empty();
    wrong.blocks.insert(3, (3 * SEGMENT_BLOCKS + 1, 0, false));
    let mut other = device_of(layout());
    assert!(!other.read_checkpoint(&mut media, 5, &mut wrong).unwrap());
    // Nor one that has rotted.
    let at = (layout().checkpoint_offset() / BLOCK) + 1;
    media.blocks.get_mut(&at).expect("a section")[17] ^= 1;
    let mut other = device_of(layout());
    assert!(!other.read_checkpoint(&mut media, 5, &mut empty()).unwrap());
}

#[test]
fn more_segments_than_are_read_at_once_are_all_found() {
    let layout = Layout::for_device(650 << 20, 256).unwrap();
    assert!(layout.segment_count > 2 * READ_AHEAD + 10);
    assert!(!layout.segment_count.is_multiple_of(READ_AHEAD));
    let d = device_of(layout);
    let (free, unsealed, blind) = (7, 300, layout.segment_count - 2);
    let mut media = Sparse {
        blocks: BTreeMap::new(),
        bad: layout.segment_offset(blind) / BLOCK,
    };
    for seg in (0..layout.segment_count).filter(|seg| *seg != free) {
        let number = u64::from(seg) + 1;
        let data = [seg as u8; BLOCK_BYTES];
        let entries = [Entry {
            disk: 1,
            block: number,
            word: crc32c(&data),
            slot: 1,
            kind: Kind::Dirty,
            flags: 0,
        }];
        let header = BatchHeader {
            pool_tag: d.pool_tag,
            segment_seq: number,
            batch_seq: number,
            data_blocks: 1,
            ..BatchHeader::default()
        };
        let mut block = [0; BLOCK_BYTES];
        header.encode(&entries, &mut block).unwrap();
        let at = layout.segment_offset(seg);
        media.write_at(at, &block).unwrap();
        media.write_at(at + BLOCK, &data).unwrap();
        if seg != unsealed {
            let header = SummaryHeader {
                pool_tag: d.pool_tag,
                segment_seq: number,
                first_batch_seq: number,
                last_batch_seq: number,
                ..SummaryHeader::default()
            };
            let mut summary = Vec::new();
            header.encode(&entries, &[], &mut summary).unwrap();
            media
                .write_at(layout.summary_offset(seg), &summary)
                .unwrap();
        }
    }
    let mut found = d.survey(&mut media, &HOW, &mut BTreeSet::new()).unwrap();
    found.sort_by_key(|f| f.seg);
    let segs: Vec<u32> = found.iter().map(|f| f.seg).collect();
    let want: Vec<u32> = (0..layout.segment_count).filter(|s| *s != free).collect();
    assert_eq!(segs, want);
    for f in found {
        assert_eq!(f.seq, u64::from(f.seg) + 1);
        assert_eq!(f.blind, f.seg == blind);
        let entries = match f.content {
            Content::Sealed(_, told) if f.seg != unsealed => told.unwrap().entries,
            Content::Walked(batches) if f.seg == unsealed => {
                assert!(batches[0].data_ok);
                batches.into_iter().flat_map(|b| b.entries).collect()
            }
            other => panic!("segment {}: {other:?}", f.seg),
        };
        let blocks: Vec<u64> = entries.iter().map(|e| e.block).collect();
        assert_eq!(blocks, [f.seq]);
    }
}

#[test]
fn two_segments_with_the_same_number_are_not_both_believed() {
    let layout = Layout::for_device(16 << 20, 256).unwrap();
    for accept_damage in [false, true] {
        let mut d = device_of(layout);
        let how = How {
            accept_damage,
            ..HOW
        };
        let mut media = formatted(layout);
        let header = SummaryHeader {
            pool_tag: d.pool_tag,
            segment_seq: 5,
            first_batch_seq: 1,
            last_batch_seq: 1,
            bound_seq: 5,
            durable_seq: 1,
            ..SummaryHeader::default()
        };
        let mut summary = Vec::new();
        header.encode(&[], &[], &mut summary).unwrap();
        summary.resize(BLOCK_BYTES, 0);
        for seg in [2, 4] {
            let at = layout.summary_offset(seg);
            media.write_at(at, &summary).unwrap();
        }
        let found = d.recover(&mut media, &mut Known::default(), &how);
        if accept_damage {
            assert_eq!(found.unwrap().segments, 1);
            let mut wiped = vec![1; BLOCK_BYTES];
            let at = layout.summary_offset(4);
            media.read_at(at, &mut wiped).unwrap();
            assert!(wiped.iter().all(|byte| *byte == 0));
        } else {
            let why = found.unwrap_err().to_string();
            assert!(why.contains("segments 2 and 4"), "{why}");
        }
    }
}

#[test]
fn segments_as_large_as_may_be_are_not_read_all_at_once() {
    let mut layout = Layout::for_device(16 << 30, 16384).unwrap();
    layout.summary_blocks = 8192;
    layout.check().unwrap();
    let d = device_of(layout);
    let mut media = Sparse {
        blocks: BTreeMap::new(),
        bad: u64::MAX,
    };
    assert!(
        d.survey(&mut media, &HOW, &mut BTreeSet::new())
            .unwrap()
            .is_empty()
    );
}
