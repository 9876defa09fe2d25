//! What stands on a device that was not closed: segments, with their summaries or their batches.
//!
//! Nothing here is believed yet ([`crate::flash::recover`] says what counts). Whatever is read may be damaged, of
//! an earlier life of the segment, or made up.

use crate::faults::Fault;
use crate::flash::device::{FlashDevice, Users};
use crate::flash::log::SegState;
use crate::flash::recover::{Beginning, How, NUMBERS_END, RecoverError};
use hearth_format::batch::BATCH_AGAIN;
use hearth_format::superblock::INCOMPAT_HEADS;
use hearth_format::{BatchHeader, BatchMark, Entry, Kind, Layout, SummaryHeader};
use hearth_io::checksum::crc32c;
use hearth_io::{BLOCK, Media, media};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;

pub(crate) const BLOCK_BYTES: usize = BLOCK as usize;
/// Segments whose ends are read at once ...
pub(crate) const READ_AHEAD: u32 = 256;
/// ... but fewer if that were more bytes than this, whatever an untrusted superblock says of them.
const READ_AHEAD_BYTES: usize = 8 << 20;
/// Segments of one device that are looked at to see whether it was erased.
const BLANK_SAMPLE: usize = 16;
/// It was if more than one of so many is not there.
const BLANK_SHARE: usize = 4;

#[derive(Debug)]
pub(crate) struct WalkedBatch {
    pub header: BatchHeader,
    pub entries: Vec<Entry>,
    /// Blocks behind its descriptor.
    pub rows: u32,
    pub data_ok: bool,
    /// Blocks of the segment that are as they should be in the half that is not read otherwise, and not in the one that is.
    pub better_there: Vec<u32>,
    /// Blocks that are not as they should be in that one, and cannot be read in the other.
    pub unread_there: Vec<u32>,
}

impl WalkedBatch {
    /// As a summary tells of it.
    pub fn mark(&self) -> BatchMark {
        BatchMark {
            seq: self.header.batch_seq,
            entries: self.entries.len() as u16,
        }
    }
}

/// What a summary tells: entries, and whose they are.
#[derive(Debug, Default)]
pub(crate) struct Told {
    pub entries: Vec<Entry>,
    pub marks: Vec<BatchMark>,
}

#[derive(Debug)]
pub(crate) enum Content {
    Sealed(SummaryHeader, Option<Told>),
    Walked(Vec<WalkedBatch>),
}

#[derive(Debug)]
pub(crate) struct Found {
    pub seg: u32,
    pub seq: u64,
    pub content: Content,
    /// The highest number that batches behind an unreadable one say is durable.
    pub claimed: u64,
    /// Its first block cannot be read: it may hold newer batches than its summary tells of.
    pub blind: bool,
    /// Its first batch is one that was sent again: what was there of it before is void.
    pub again: bool,
}

impl<U: Users> FlashDevice<U> {
    /// Reads both ends of every segment, and of those without a summary the whole.
    ///
    /// The next ones are read while those before are looked at.
    ///
    /// `unread` gets the segments whose first block cannot be read in the half that is read first, and can in the other.
    pub fn survey(
        &self,
        media: &mut dyn Media,
        how: &How,
        unread: &mut BTreeSet<u32>,
    ) -> Result<Vec<Found>, RecoverError> {
        let mut found = Vec::new();
        let mut unsealed = Vec::new();
        let layout = self.layout;
        let keep = layout.slots() <= how.keep_blocks;
        let stride = BLOCK_BYTES + layout.summary_bytes();
        let at_once = (READ_AHEAD_BYTES / stride).clamp(1, READ_AHEAD as usize) as u32;
        let total = layout.segment_count;
        let pieces = (0..total)
            .step_by(at_once as usize)
            .map(|base| base..total.min(base.saturating_add(at_once)));
        media::read_ahead(
            media,
            pieces,
            at_once.min(total) as usize * stride,
            |media, segs, bytes| read_ends(media, &layout, segs, bytes),
            |segs, bytes, sight| {
                let half_read = segs
                    .clone()
                    .zip(&sight)
                    .filter(|(_, s)| **s == Sight::Other);
                unread.extend(half_read.map(|(seg, _)| seg));
                let blind = sight.into_iter().map(|s| s == Sight::None);
                let ends = bytes.chunks(stride).zip(blind);
                self.look_at(keep, segs.zip(ends), &mut found, &mut unsealed);
            },
        );
        for (seg, known) in &self.begins_there {
            let mut start = vec![0u8; BLOCK_BYTES];
            media.read_other(self.layout.segment_offset(*seg), &mut start)?;
            // It was read a moment ago: without it, what it promises would be thrown away.
            if self.beginning(&start) != Some(*known) {
                let why = format!("the beginning of segment {seg} is not read twice alike");
                return Err(io::Error::other(why).into());
            }
            found.retain(|f| f.seg != *seg);
            unsealed.retain(|(other, ..)| other != seg);
            unsealed.push((*seg, known.segment_seq, false, known.again));
        }
        for (seg, seq, blind, again) in unsealed {
            let (batches, claimed) = self.walk(media, seg, Some(seq));
            found.push(Found {
                seg,
                seq,
                content: Content::Walked(batches),
                claimed,
                blind,
                again,
            });
        }
        Ok(found)
    }

    /// The device on which segments of the log are not there any more, while nothing is on its way to it. Where
    /// everything is there twice, the other device has them.
    pub fn blank_device(&self, media: &mut dyn Media) -> Option<u16> {
        if self.devices.are_twice() {
            return None;
        }
        let mut of_device: BTreeMap<u16, Vec<u32>> = BTreeMap::new();
        for (seg, s) in (0..).zip(&self.log.segments) {
            let written = s.state == SegState::Closed || s.state == SegState::Open && s.live > 0;
            if written && s.batches == 0 {
                let at = self.layout.segment_offset(seg);
                let device = self.devices.spread().device_of_side(at, 0);
                of_device.entry(device).or_default().push(seg);
            }
        }
        let mut devices = of_device.into_iter();
        let blank = devices.find(|(_, segs)| {
            let sample = segs.iter().step_by(segs.len().div_ceil(BLANK_SAMPLE));
            let looked_at = sample.len();
            let gone = sample.filter(|seg| self.is_segment_gone(media, **seg));
            gone.count() * BLANK_SHARE > looked_at
        });
        blank.map(|(device, _)| device)
    }

    /// Neither the beginning nor the summary of a segment is there. One that cannot be read is not known to be gone.
    fn is_segment_gone(&self, media: &mut dyn Media, seg: u32) -> bool {
        let seq = self.log.segments[seg as usize].seq;
        let mut start = vec![0u8; BLOCK_BYTES];
        let mut end = vec![0u8; self.layout.summary_bytes()];
        let read = media.read_at(self.layout.segment_offset(seg), &mut start);
        let read = read.and_then(|()| media.read_at(self.layout.summary_offset(seg), &mut end));
        let begins = self.beginning(&start).is_some_and(|b| b.segment_seq == seq);
        read.is_ok() && !begins && self.entries_of_summary(&end, seq).is_none()
    }

    /// Tells segments with a summary from those whose batches must be looked at: segment, its number, and
    /// whether it is blind.
    fn look_at<'a>(
        &self,
        keep: bool,
        ends: impl Iterator<Item = (u32, (&'a [u8], bool))>,
        found: &mut Vec<Found>,
        unsealed: &mut Vec<(u32, u64, bool, bool)>,
    ) {
        for (seg, (both, blind)) in ends {
            if self.log.segments[seg as usize].state == SegState::Bad {
                // It is on no device any more.
                continue;
            }
            let (start, end) = both.split_at(BLOCK_BYTES);
            let sealed = self.decode_summary(end);
            let head = BatchHeader::decode(start, &mut Vec::new())
                .ok()
                .filter(|h| self.is_ours(h));
            let again = head.as_ref().is_some_and(|b| b.flags & BATCH_AGAIN != 0);
            match (sealed, head) {
                (Some((h, told)), head)
                    if head.as_ref().is_none_or(|b| b.segment_seq <= h.segment_seq)
                        || self.faults.has(Fault::TrustOldSummary) =>
                {
                    found.push(Found {
                        seg,
                        seq: h.segment_seq,
                        content: Content::Sealed(h, keep.then_some(told)),
                        claimed: 0,
                        blind,
                        again,
                    });
                }
                (_, Some(b)) => unsealed.push((seg, b.segment_seq, blind, again)),
                _ if blind => found.push(Found {
                    seg,
                    seq: 0,
                    content: Content::Walked(Vec::new()),
                    claimed: 0,
                    blind,
                    again: false,
                }),
                _ => {}
            }
        }
    }

    /// May batches of one segment have numbers between which those of others lie?
    pub fn has_heads(&self) -> bool {
        self.sb.incompat & INCOMPAT_HEADS != 0
    }

    /// True if the batch is of this pool and its numbers are within what the pool can have.
    fn is_ours(&self, h: &BatchHeader) -> bool {
        let numbers = [
            h.segment_seq,
            h.batch_seq,
            h.bound_seq,
            h.durable_seq,
            h.epoch,
        ];
        h.pool_tag == self.pool_tag && numbers.iter().all(|n| *n < NUMBERS_END)
    }

    fn decode_summary(&self, bytes: &[u8]) -> Option<(SummaryHeader, Told)> {
        let mut told = Told::default();
        let h = SummaryHeader::decode(bytes, &mut told.entries, &mut told.marks)
            .ok()
            .filter(|h| {
                let numbers = [
                    h.segment_seq,
                    h.last_batch_seq,
                    h.bound_seq,
                    h.durable_seq,
                    h.epoch,
                ];
                h.pool_tag == self.pool_tag && numbers.iter().all(|n| *n < NUMBERS_END)
            })?;
        let inside = |e: &Entry| !e.kind.is_data() || self.log.is_for_data(e.slot.into());
        let inside = told.entries.iter().all(inside);
        inside.then_some((h, told))
    }

    /// Would a start take a segment with these ends for one that was opened after batch `last`?
    pub fn begins_after(&self, start: &[u8], end: &[u8], last: u64) -> bool {
        let batch = BatchHeader::decode(start, &mut Vec::new()).ok();
        let batch = batch.filter(|h| self.is_ours(h)).map(|h| h.batch_seq);
        let summary = self.decode_summary(end).map(|(h, _)| h.last_batch_seq);
        batch.max(summary).is_some_and(|seq| seq > last)
    }

    /// The batch that a segment with this first block begins with.
    pub fn beginning(&self, start: &[u8]) -> Option<Beginning> {
        let header = BatchHeader::decode(start, &mut Vec::new()).ok()?;
        self.is_ours(&header).then_some(Beginning {
            segment_seq: header.segment_seq,
            batch_seq: header.batch_seq,
            again: header.flags & BATCH_AGAIN != 0,
        })
    }

    /// What a summary tells that was read while the pool is served, if it is that of this life of the segment.
    pub fn entries_of_summary(&self, bytes: &[u8], seq: u64) -> Option<Vec<Entry>> {
        let (h, told) = self.decode_summary(bytes)?;
        (h.segment_seq == seq).then_some(told.entries)
    }

    /// The same from its batches.
    pub fn entries_of_batches(&self, bytes: &[u8], seq: u64, last: u64) -> Option<Vec<Entry>> {
        let all = Half {
            bytes,
            unread: &BTreeSet::new(),
        };
        let (mut batches, _) = self.walk_bytes(all, None, None);
        batches.retain(|b| b.header.segment_seq == seq && b.header.batch_seq <= last);
        let all = batches.last().is_some_and(|b| b.header.batch_seq == last);
        all.then(|| batches.into_iter().flat_map(|b| b.entries).collect())
    }

    /// The entries of a segment whose summary was whole when it was first read. All its batches are
    /// durable, so if it is not whole now, the batches themselves tell.
    pub fn summary_again(
        &self,
        media: &mut dyn Media,
        seg: u32,
        header: &SummaryHeader,
        how: &How,
    ) -> Result<Told, RecoverError> {
        let mut bytes = vec![0u8; self.layout.summary_bytes()];
        if media
            .read_at(self.layout.summary_offset(seg), &mut bytes)
            .is_ok()
            && let Some((h, told)) = self.decode_summary(&bytes)
            && h.segment_seq == header.segment_seq
        {
            return Ok(told);
        }
        let (batches, _) = self.walk(media, seg, Some(header.segment_seq));
        let whole = batches.last().is_some_and(|b| {
            b.header.segment_seq == header.segment_seq
                && b.header.batch_seq == header.last_batch_seq
        });
        if !whole && !how.accept_damage {
            return Err(RecoverError::Damaged(format!(
                "segment {seg} could be read once, and then not again"
            )));
        }
        let mut told = Told::default();
        for b in batches {
            told.marks.push(b.mark());
            told.entries.extend(b.entries);
        }
        Ok(told)
    }

    /// Reads a segment batch by batch, as far as descriptors are whole and in order. If one cannot
    /// be read, also returns the highest batch number those behind it say is durable.
    ///
    /// Where everything is there twice, what is not whole in one half is looked for in the other: a descriptor or a block may have rotted
    /// that was promised. It may be that the other half alone has got it, of what was promised to nobody; that may count or not.
    ///
    /// With the number of the segment, if that is known: batches of another life of it do not count.
    pub fn walk(
        &self,
        media: &mut dyn Media,
        seg: u32,
        life: Option<u64>,
    ) -> (Vec<WalkedBatch>, u64) {
        let mut bytes = vec![0u8; self.log.data_blocks as usize * BLOCK_BYTES];
        let start = self.layout.segment_offset(seg);
        // That half alone: with one block that cannot be read there, all would be the other's, and taken for what this one has.
        let unread = read_what_can_be(&mut media::FirstHalf(media), start, &mut bytes);
        let half = Half {
            bytes: &bytes,
            unread: &unread,
        };
        let (batches, claimed) = self.walk_bytes(half, None, life);
        let end = batches.iter().map(|b| 1 + b.rows).sum::<u32>();
        // Of a segment of which not even the beginning can be read nobody knows which life of it the other half has, but by its number.
        let begun = (end > 0 || life.is_some())
            && self.devices.are_twice()
            && !self.faults.has(Fault::OneHalfWalked);
        if !begun || end >= self.log.data_blocks && batches.iter().all(|b| b.data_ok) {
            return (batches, claimed);
        }
        let mut other = vec![0u8; bytes.len()];
        let unread = read_what_can_be(&mut media::OtherHalf(media), start, &mut other);
        let other = Half {
            bytes: &other,
            unread: &unread,
        };
        self.walk_bytes(half, Some(other), life)
    }

    /// The batch whose descriptor this is, if it may stand there, behind `last`.
    fn batch_of(
        &self,
        block: &[u8],
        at: u32,
        last: Option<&WalkedBatch>,
    ) -> Option<(BatchHeader, Vec<Entry>)> {
        let mut entries = Vec::new();
        let header = BatchHeader::decode(block, &mut entries).ok()?;
        let follows = last.is_none_or(|b| {
            b.header.segment_seq == header.segment_seq
                && match self.has_heads() {
                    // Those between are in other segments.
                    true => b.header.batch_seq < header.batch_seq,
                    false => b.header.batch_seq.checked_add(1) == Some(header.batch_seq),
                }
        });
        let (end, half) = (self.log.data_blocks, self.log.half);
        let fits = self.is_ours(&header)
            && (follows || self.faults.has(Fault::WalkStrangers))
            && header.check_rows(at, end, half, &entries).is_ok();
        fits.then_some((header, entries))
    }

    /// With the number of the segment, if that is known: batches of another life of it do not count.
    fn walk_bytes(
        &self,
        here: Half<'_>,
        other: Option<Half<'_>>,
        life: Option<u64>,
    ) -> (Vec<WalkedBatch>, u64) {
        let (data_blocks, half) = (self.log.data_blocks, self.log.half);
        let block = |at: u32| here.or_zeros(at);
        let there = |at: u32| other.and_then(|other| other.block(at));
        let mut batches: Vec<WalkedBatch> = Vec::new();
        let mut at = 0u32;
        while at < data_blocks {
            let mut better_there = Vec::new();
            let lives = |found: &(BatchHeader, Vec<Entry>)| {
                life.is_none_or(|seq| found.0.segment_seq == seq)
                    || self.faults.has(Fault::WalkStrangers)
            };
            let found = self.batch_of(block(at), at, batches.last()).filter(lives);
            let found = found.or_else(|| {
                let found = self.batch_of(there(at)?, at, batches.last());
                let found = found.filter(lives)?;
                better_there.push(at);
                Some(found)
            });
            let Some((header, entries)) = found else {
                break;
            };
            // A clean block that is in one half only may be gone with it, and the batch counts all the same.
            let once = half > 0 && !self.faults.has(Fault::CleanDecides);
            let judged = |e: &&Entry| e.kind.is_data() && !(once && e.kind == Kind::Clean);
            let (mut data_ok, mut unread_there) = (true, Vec::new());
            for e in entries.iter().filter(judged) {
                let slot = u32::from(e.slot);
                let row = if half > 0 { slot % half } else { slot };
                let is_it = |block: &[u8]| {
                    let crc = crc32c(block);
                    // The complement is that of a block which was lost before it was moved here.
                    crc == e.word || crc == !e.word
                };
                if here.block(row).is_some_and(is_it) {
                    continue;
                }
                match there(row).map(is_it) {
                    Some(true) => better_there.push(row),
                    Some(false) => data_ok = false,
                    None => {
                        data_ok = false;
                        unread_there.push(row);
                    }
                }
            }
            let rows = header.rows(at, half, &entries);
            at += 1 + rows;
            batches.push(WalkedBatch {
                header,
                entries,
                rows,
                data_ok,
                better_there,
                unread_there,
            });
        }
        let mut claimed = 0;
        if !here.unread.is_empty()
            && let Some(last) = batches.last()
        {
            for at in at..data_blocks {
                let behind = BatchHeader::decode(block(at), &mut Vec::new());
                let ours =
                    |h: &BatchHeader| self.is_ours(h) && h.segment_seq == last.header.segment_seq;
                claimed = claimed.max(behind.ok().filter(ours).map_or(0, |h| h.durable_seq));
            }
        }
        (batches, claimed)
    }
}

/// Where the first block of a segment can be read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sight {
    First,
    /// In the other half only.
    Other,
    None,
}

/// Reads both ends of consecutive segments; tells of each where its first block could be read.
///
/// One segment's summary and the first block of the next lie side by side, so in memory a segment's
/// first block stands before its summary, and most reads take one of each.
fn read_ends(
    media: &mut dyn Media,
    layout: &Layout,
    segs: &Range<u32>,
    bytes: &mut [u8],
) -> Vec<Sight> {
    let stride = BLOCK_BYTES + layout.summary_bytes();
    let bytes = &mut bytes[..segs.len() * stride];
    let (first, rest) = bytes.split_at_mut(BLOCK_BYTES);
    let mut reads = vec![(layout.segment_offset(segs.start), first)];
    for (seg, piece) in segs.clone().zip(rest.chunks_mut(stride)) {
        reads.push((layout.summary_offset(seg), piece));
    }
    if media.read_many(&mut reads).is_ok() {
        return vec![Sight::First; segs.len()];
    }
    let ends = segs.clone().zip(bytes.chunks_mut(stride));
    ends.map(|(seg, ends)| {
        let (start, end) = ends.split_at_mut(BLOCK_BYTES);
        read_what_can_be(media, layout.summary_offset(seg), end);
        let at = layout.segment_offset(seg);
        if !read_what_can_be(media, at, start).is_empty() {
            return Sight::None;
        }
        match media.read_first(at, &mut [0; BLOCK_BYTES]) {
            Ok(()) => Sight::First,
            Err(_) => Sight::Other,
        }
    })
    .collect()
}

pub(crate) fn first_batch(content: &Content) -> u64 {
    match content {
        Content::Sealed(h, _) => h.first_batch_seq,
        Content::Walked(b) => b.first().map_or(u64::MAX, |b| b.header.batch_seq),
    }
}

/// A segment, as one half has it.
#[derive(Clone, Copy)]
struct Half<'a> {
    bytes: &'a [u8],
    /// Blocks that cannot be read.
    unread: &'a BTreeSet<u32>,
}

impl<'a> Half<'a> {
    /// What it has there. Zeros for what cannot be read would be taken for a block that is to hold zeros.
    fn block(&self, at: u32) -> Option<&'a [u8]> {
        (!self.unread.contains(&at)).then(|| self.or_zeros(at))
    }

    fn or_zeros(&self, at: u32) -> &'a [u8] {
        &self.bytes[at as usize * BLOCK_BYTES..][..BLOCK_BYTES]
    }
}

/// Reads block by block if it cannot be done at once; what cannot be read is zeros. Returns which
/// blocks that are.
///
/// What the log needs is told by its own numbers; a sector that went bad in a segment that was trimmed or in
/// one clean block must not take all disks with it.
pub(super) fn read_what_can_be(
    media: &mut dyn Media,
    offset: u64,
    out: &mut [u8],
) -> BTreeSet<u32> {
    let mut unread = BTreeSet::new();
    if media.read_at(offset, out).is_ok() {
        return unread;
    }
    for (row, block) in (0..).zip(out.chunks_mut(BLOCK_BYTES)) {
        if media
            .read_at(offset + u64::from(row) * BLOCK, block)
            .is_err()
        {
            block.fill(0);
            unread.insert(row);
        }
    }
    unread
}
