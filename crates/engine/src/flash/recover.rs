//! Opening a pool after a crash: the index from the log.
//!
//! The log is a sequence of batches, numbered without gaps, in segments, numbered upwards.
//! Recovery accepts a prefix of it: at least everything up to the highest `durable_seq` any
//! batch claims (those were covered by a device flush and are believed without reading their
//! data), then batch by batch as long as every block's checksum is right. Everything behind
//! the first hole never happened. `docs/format.md` has the argument.

use crate::api::DiskId;
use crate::cache::index::Key;
use crate::core::Core;
use crate::faults::Fault;
use crate::flash::log::SegState;
use crate::paths::{Path, took};
use hearth_format::{BatchHeader, Entry, Kind, Layout, SummaryHeader};
use hearth_io::checksum::crc32c;
use hearth_io::{BLOCK, Media, media};
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

const BLOCK_BYTES: usize = BLOCK as usize;
/// Segments whose ends are read at once ...
const READ_AHEAD: u32 = 256;
/// ... but fewer if that were more bytes than this, whatever an untrusted superblock says of them.
const READ_AHEAD_BYTES: usize = 8 << 20;
/// Entries between the one being replayed and the one whose place in the index is fetched.
const FETCH_AHEAD: usize = 24;

/// Why the log cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecoverError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("the log is damaged: {0}")]
    Damaged(String),
}

/// What recovery found.
#[derive(Debug, Default)]
pub(crate) struct Recovered {
    pub segments: u32,
    pub last_batch: u64,
    pub max_segment_seq: u64,
    pub discarded: u64,
    /// Segments to be sealed with the entries that count: (segment, seq, first, last, tail, entries).
    pub seal: Vec<(u32, u64, u64, u64, u64, Vec<Entry>)>,
    /// Segments whose content never happened.
    pub wipe: Vec<u32>,
    /// Segment and block behind its last batch that counts, where one may stand that does not.
    pub cut: Vec<(u32, u32)>,
}

/// Open intents: where the region begins, by disk, where it ends, and the number of the segment that
/// says so.
type Intents = BTreeMap<(DiskId, u64), (u64, u64)>;

#[derive(Debug)]
struct WalkedBatch {
    header: BatchHeader,
    entries: Vec<Entry>,
    data_ok: bool,
}

#[derive(Debug)]
enum Content {
    Sealed(SummaryHeader, Option<Vec<Entry>>),
    Walked(Vec<WalkedBatch>),
}

#[derive(Debug)]
struct Found {
    seg: u32,
    seq: u64,
    content: Content,
    /// The highest number that batches behind an unreadable one say is durable.
    claimed: u64,
    /// Its first block cannot be read: it may hold newer batches than its summary tells of.
    blind: bool,
}

/// No pool counts so far. What claims to is not believed: the numbers that follow it must fit, too.
pub(crate) const NUMBERS_END: u64 = 1 << 62;
/// The same for generations of the superblock, which begin the numbers of segments.
pub(crate) const GENERATIONS_END: u64 = NUMBERS_END >> 32;

impl Core {
    /// Rebuilds index, disks and segments from the log on `media`.
    pub fn recover(
        &mut self,
        media: &mut dyn Media,
        since: &BTreeMap<DiskId, u64>,
    ) -> Result<Recovered, RecoverError> {
        let mut found = self.survey(media)?;
        self.check_readable(&found)?;
        found.sort_by_key(|f| f.seq);
        let mut out = Recovered {
            max_segment_seq: found.last().map_or(0, |f| f.seq),
            ..Recovered::default()
        };
        let durable = found.iter().map(claims_durable).max().unwrap_or(0);
        // A summary that reaches past what is durable is not enough: its batches are looked at one
        // by one, also because those which are durable may name a newer tail.
        for f in &mut found {
            if let Content::Sealed(h, _) = &f.content
                && h.last_batch_seq > durable
                && !self.opts.faults.has(Fault::TrustUnverifiedTail)
            {
                took(Path::SummaryDoubted);
                let (mut batches, claimed) = self.walk(media, f.seg);
                f.claimed = claimed;
                // The summary may have reached flash before the batches it tells of; what stands
                // in their place then is of an earlier use of the segment.
                if batches.iter().any(|b| b.header.segment_seq != f.seq)
                    && !self.opts.faults.has(Fault::KeepStrangers)
                {
                    batches.clear();
                }
                f.content = Content::Walked(batches);
            }
        }
        if !self.opts.faults.has(Fault::PlayTwice) {
            drop_first_attempts(&mut found);
        }
        let any_tail = self.opts.faults.has(Fault::AnyTail);
        let tail = found
            .iter()
            .filter_map(|f| tail_within(f, if any_tail { u64::MAX } else { durable }))
            .max()
            .unwrap_or(0)
            .max(self.flash.sb.log_floor);
        if tail > 0 && !found.iter().any(|f| f.seq == tail) && !self.opts.accept_damage {
            return Err(RecoverError::Damaged(format!(
                "segment number {tail}, the oldest that counts, is missing"
            )));
        }
        let mut intents = Intents::new();
        let mut expected: Option<u64> = None;
        let mut accepted: Vec<(u32, u64)> = Vec::new();
        let mut tail_end = tail;
        if self.opts.faults.has(Fault::ReplayBackwards) {
            found.reverse();
        }
        for f in found {
            if f.seq < tail && !self.opts.faults.has(Fault::ReplayBelowTail) {
                continue;
            }
            let Found {
                seg, seq, content, ..
            } = f;
            let first = first_batch(&content);
            let backwards = self.opts.faults.has(Fault::ReplayBackwards);
            let gap = match expected {
                Some(e) => first > e,
                // Nothing is known to be durable, and what came before this is not there.
                None => tail == 0 && names_older(&content, seq),
            };
            let past_gap = self.opts.faults.has(Fault::ReplayPastGap);
            if gap && !backwards && !past_gap || first == u64::MAX {
                out.wipe.push(seg);
                out.discarded += 1;
                continue;
            }
            // Numbers say what is oldest and may go; with the same one twice, nothing ever would.
            if let Some((other, _)) = accepted.last().filter(|(_, s)| *s == seq) {
                if !self.opts.accept_damage {
                    return Err(RecoverError::Damaged(format!(
                        "segments {other} and {seg} have the same number, {seq}"
                    )));
                }
                out.wipe.push(seg);
                out.discarded += 1;
                continue;
            }
            match content {
                Content::Sealed(h, entries) => {
                    let entries = match entries {
                        Some(e) => e,
                        None => self.summary_again(media, seg, &h)?,
                    };
                    self.flash.log.segments[seg as usize].seq = seq;
                    self.replay(seg, seq, &entries, since, &mut intents);
                    expected = Some(h.last_batch_seq + 1);
                    tail_end = tail_end.max(h.tail_seq);
                    accepted.push((seg, seq));
                }
                Content::Walked(batches) => {
                    let mut kept = Vec::new();
                    let mut last = 0;
                    let mut seg_tail = 0;
                    let all = batches.len();
                    let mut used = 0;
                    self.flash.log.segments[seg as usize].seq = seq;
                    for b in batches {
                        let trusted = b.header.batch_seq <= durable
                            || self.opts.faults.has(Fault::TrustUnverifiedTail);
                        if !(b.data_ok || trusted) {
                            break;
                        }
                        self.replay(seg, seq, &b.entries, since, &mut intents);
                        last = b.header.batch_seq;
                        seg_tail = b.header.tail_seq;
                        used += 1 + u32::from(b.header.data_blocks);
                        kept.push(b.entries);
                    }
                    if kept.is_empty() {
                        out.wipe.push(seg);
                        out.discarded += 1;
                        continue;
                    }
                    out.discarded += u64::from(kept.len() < all);
                    if used < self.flash.log.data_blocks {
                        out.cut.push((seg, used));
                    }
                    expected = Some(last + 1);
                    tail_end = tail_end.max(seg_tail);
                    accepted.push((seg, seq));
                    out.seal
                        .push((seg, seq, first, last, seg_tail, kept.concat()));
                }
            }
        }
        let last = expected.map_or(0, |e| e - 1);
        if last < durable && !self.opts.accept_damage {
            return Err(RecoverError::Damaged(format!(
                "batches {} to {durable} were made durable but cannot be read",
                last + 1
            )));
        }
        out.last_batch = last;
        if out.discarded > 0 {
            took(Path::SegmentDiscarded);
        }
        self.drop_below_clean_floor();
        self.adopt_segments(&accepted, tail_end, &mut out);
        self.restore_intents(intents);
        Ok(out)
    }

    /// Copies that may have been voided by records that never reached the log ([`crate::flash::rescue`]).
    fn drop_below_clean_floor(&mut self) {
        if self.flash.sb.clean_floor == 0 || self.opts.faults.has(Fault::IgnoreCleanFloor) {
            return;
        }
        for slot in 0..self.cache.index.slots() {
            let Some(info) = self.cache.index.slot(slot) else {
                continue;
            };
            let seq = self.flash.log.segments[self.flash.log.segment_of(slot)].seq;
            if !info.dirty && seq < self.flash.sb.clean_floor {
                took(Path::CleanFloorApplied);
                self.forget_block(info.key.disk(), info.key.block());
            }
        }
    }

    /// Accepted segments become the log; those before the tail are empty.
    fn adopt_segments(&mut self, accepted: &[(u32, u64)], tail: u64, out: &mut Recovered) {
        for (seg, seq) in accepted {
            let s = &mut self.flash.log.segments[*seg as usize];
            if *seq < tail && s.live == 0 {
                out.seal.retain(|x| x.0 != *seg);
                continue;
            }
            s.state = SegState::Closed;
            self.flash.log.order.push_back(*seg);
            out.segments += 1;
        }
        for seg in 0..self.flash.log.segments.len() as u32 {
            if self.flash.log.segments[seg as usize].state == SegState::Free {
                self.flash.log.free.push_back(seg);
            }
        }
    }

    /// Regions that were being written: their clean copies may be older than the origin.
    ///
    /// That the intent is durable says that the origin may have been written, not whether, and the
    /// copies were unmapped in RAM only; so invariant 3 demands that the whole region's go. A
    /// smaller region would lose less and cost more device flushes while it is written.
    fn restore_intents(&mut self, recorded: Intents) {
        let mut intents: BTreeMap<(DiskId, u32), u64> = BTreeMap::new();
        for ((disk, start), (end, seg_seq)) in recorded {
            let Some(d) = self.disk(disk) else { continue };
            let (first, last) = d.origin.intents.regions_of(start, end);
            for region in first..=last {
                // The oldest record is the first that eviction must not take away.
                let oldest = intents.entry((disk, region)).or_insert(seg_seq);
                *oldest = seg_seq.min(*oldest);
            }
        }
        if intents.is_empty() {
            return;
        }
        for slot in 0..self.cache.index.slots() {
            let Some(info) = self.cache.index.slot(slot) else {
                continue;
            };
            let (disk, block) = (info.key.disk(), info.key.block());
            let Some(d) = self.disk(disk) else { continue };
            let region = d.origin.intents.region_of(block);
            if !info.dirty
                && intents.contains_key(&(disk, region))
                && !self.opts.faults.has(Fault::DropIntent)
                && !self.opts.faults.has(Fault::TrustIntentRegions)
            {
                self.forget_block(disk, block);
            }
        }
        for ((disk, region), seg_seq) in intents {
            let Some(d) = self.disk_mut(disk) else {
                continue;
            };
            took(Path::IntentRestored);
            // The record is on flash, so the intent holds until a flush of the origin; what it
            // covers is void, and must stay void after the intent is closed.
            d.origin.intents.restore(region, seg_seq);
            d.origin.sync.restore();
            // Dirty copies in the region stay: say again what is void, block by block around them.
            let (start, end) = d.origin.intents.blocks_of(region);
            let keep: Vec<u64> = d.dirty.range(start, end).collect();
            let mut at = start;
            for block in keep.into_iter().chain([end]) {
                if block > at && !self.opts.faults.has(Fault::SkipRestoredVoid) {
                    self.record_drop(disk, at, block - at);
                }
                at = block + 1;
            }
        }
    }

    /// Reads both ends of every segment, and of those without a summary the whole.
    ///
    /// The next ones are read while those before are looked at.
    fn survey(&mut self, media: &mut dyn Media) -> Result<Vec<Found>, RecoverError> {
        let mut found = Vec::new();
        let mut unsealed = Vec::new();
        let layout = self.flash.layout;
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
            |segs, bytes, blind| {
                let ends = bytes.chunks(stride).zip(blind);
                self.look_at(segs.zip(ends), &mut found, &mut unsealed);
            },
        );
        for (seg, seq, blind) in unsealed {
            let (batches, claimed) = self.walk(media, seg);
            found.push(Found {
                seg,
                seq,
                content: Content::Walked(batches),
                claimed,
                blind,
            });
        }
        Ok(found)
    }

    /// Tells segments with a summary from those whose batches must be looked at: segment, its number, and
    /// whether it is blind.
    fn look_at<'a>(
        &self,
        ends: impl Iterator<Item = (u32, (&'a [u8], bool))>,
        found: &mut Vec<Found>,
        unsealed: &mut Vec<(u32, u64, bool)>,
    ) {
        let keep = self.cache.index.slots() <= self.opts.recovery_keep_blocks;
        for (seg, (both, blind)) in ends {
            let (start, end) = both.split_at(BLOCK_BYTES);
            let sealed = self.decode_summary(end);
            let head = BatchHeader::decode(start, &mut Vec::new())
                .ok()
                .filter(|h| self.is_ours(h));
            match (sealed, head) {
                (Some((h, entries)), head)
                    if head.as_ref().is_none_or(|b| b.segment_seq <= h.segment_seq)
                        || self.opts.faults.has(Fault::TrustOldSummary) =>
                {
                    found.push(Found {
                        seg,
                        seq: h.segment_seq,
                        content: Content::Sealed(h, keep.then_some(entries)),
                        claimed: 0,
                        blind,
                    });
                }
                (_, Some(b)) => unsealed.push((seg, b.segment_seq, blind)),
                _ if blind => found.push(Found {
                    seg,
                    seq: 0,
                    content: Content::Walked(Vec::new()),
                    claimed: 0,
                    blind,
                }),
                _ => {}
            }
        }
    }

    /// True if the batch is of this pool and its numbers are within what the pool can have.
    fn is_ours(&self, h: &BatchHeader) -> bool {
        let numbers = [
            h.segment_seq,
            h.batch_seq,
            h.tail_seq,
            h.durable_seq,
            h.epoch,
        ];
        h.pool_tag == self.flash.pool_tag && numbers.iter().all(|n| *n < NUMBERS_END)
    }

    fn decode_summary(&self, bytes: &[u8]) -> Option<(SummaryHeader, Vec<Entry>)> {
        let mut entries = Vec::new();
        let h = SummaryHeader::decode(bytes, &mut entries)
            .ok()
            .filter(|h| {
                let numbers = [
                    h.segment_seq,
                    h.last_batch_seq,
                    h.tail_seq,
                    h.durable_seq,
                    h.epoch,
                ];
                h.pool_tag == self.flash.pool_tag && numbers.iter().all(|n| *n < NUMBERS_END)
            })?;
        let data_blocks = self.flash.log.data_blocks;
        let inside = entries
            .iter()
            .all(|e| !e.kind.is_data() || u32::from(e.slot) < data_blocks);
        inside.then_some((h, entries))
    }

    /// The entries of a segment whose summary was whole when it was first read. All its batches are
    /// durable, so if it is not whole now, the batches themselves tell.
    fn summary_again(
        &self,
        media: &mut dyn Media,
        seg: u32,
        header: &SummaryHeader,
    ) -> Result<Vec<Entry>, RecoverError> {
        let mut bytes = vec![0u8; self.flash.layout.summary_bytes()];
        if media
            .read_at(self.flash.layout.summary_offset(seg), &mut bytes)
            .is_ok()
            && let Some((h, entries)) = self.decode_summary(&bytes)
            && h.segment_seq == header.segment_seq
        {
            return Ok(entries);
        }
        let (batches, _) = self.walk(media, seg);
        let whole = batches.last().is_some_and(|b| {
            b.header.segment_seq == header.segment_seq
                && b.header.batch_seq == header.last_batch_seq
        });
        if !whole && !self.opts.accept_damage {
            return Err(RecoverError::Damaged(format!(
                "segment {seg} could be read once, and then not again"
            )));
        }
        Ok(batches.into_iter().flat_map(|b| b.entries).collect())
    }

    /// A segment whose beginning cannot be read may be the newest, with batches that were made
    /// durable and that nothing else tells of.
    fn check_readable(&self, found: &[Found]) -> Result<(), RecoverError> {
        match found.iter().find(|f| f.blind) {
            Some(f) if !self.opts.accept_damage => Err(RecoverError::Damaged(format!(
                "the beginning of segment {} cannot be read",
                f.seg
            ))),
            _ => Ok(()),
        }
    }

    /// Reads a segment batch by batch, as far as descriptors are whole and in order. If one cannot
    /// be read, also returns the highest batch number those behind it say is durable.
    fn walk(&self, media: &mut dyn Media, seg: u32) -> (Vec<WalkedBatch>, u64) {
        let data_blocks = self.flash.log.data_blocks;
        let mut bytes = vec![0u8; data_blocks as usize * BLOCK_BYTES];
        let unread = read_what_can_be(media, self.flash.layout.segment_offset(seg), &mut bytes);
        let block = |at: u32| &bytes[at as usize * BLOCK_BYTES..][..BLOCK_BYTES];
        let mut batches: Vec<WalkedBatch> = Vec::new();
        let mut at = 0u32;
        while at < data_blocks {
            let mut entries = Vec::new();
            let Ok(header) = BatchHeader::decode(block(at), &mut entries) else {
                break;
            };
            let follows = batches.last().is_none_or(|b| {
                b.header.segment_seq == header.segment_seq
                    && b.header.batch_seq.checked_add(1) == Some(header.batch_seq)
            });
            if !self.is_ours(&header)
                || !follows && !self.opts.faults.has(Fault::WalkStrangers)
                || header.check_slots(at, data_blocks, &entries).is_err()
            {
                break;
            }
            let data_ok = entries.iter().filter(|e| e.kind.is_data()).all(|e| {
                let crc = crc32c(block(u32::from(e.slot)));
                // The complement is that of a block which was lost before it was moved here.
                crc == e.word || crc == !e.word
            });
            at += 1 + u32::from(header.data_blocks);
            batches.push(WalkedBatch {
                header,
                entries,
                data_ok,
            });
        }
        let mut claimed = 0;
        if unread > 0
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

    /// Applies entries in log order.
    fn replay(
        &mut self,
        seg: u32,
        seg_seq: u64,
        entries: &[Entry],
        since: &BTreeMap<DiskId, u64>,
        intents: &mut Intents,
    ) {
        let base = seg * self.flash.log.segment_blocks;
        let mut last = (0, false);
        for (i, e) in entries.iter().enumerate() {
            let soon = entries.get(i + FETCH_AHEAD).filter(|e| e.kind.is_data());
            if let Some(e) = soon.filter(|e| e.disk <= hearth_format::DISK_ID_MAX) {
                let key = Key::new(e.disk, e.block & ((1 << 36) - 1));
                self.cache.index.prefetch(key);
            }
            if last.0 != e.disk {
                let counts = since.get(&e.disk).is_some_and(|s| seg_seq >= *s)
                    && self.disk(e.disk).is_some();
                last = (e.disk, counts);
            }
            if last.1 {
                self.replay_entry(e, base, seg_seq, intents);
            }
        }
    }

    fn replay_entry(&mut self, e: &Entry, base: u32, seg_seq: u64, intents: &mut Intents) {
        let Some(blocks) = self.disk(e.disk).map(|d| d.blocks) else {
            return;
        };
        // A disk may have grown since its size was stored; what is absurd is not believed.
        let limit = (1u64 << 36).max(blocks);
        if e.block >= limit {
            return;
        }
        let end = (e.block
            + if e.kind.is_data() {
                1
            } else {
                u64::from(e.word)
            })
        .min(limit);
        match e.kind {
            Kind::Clean | Kind::Dirty => {
                let slot = base + u32::from(e.slot);
                if self.cache.index.slot(slot).is_none() {
                    self.map(e.disk, e.block, slot, e.word, e.kind == Kind::Dirty, 0, 0);
                }
            }
            Kind::CleanedRun if self.opts.faults.has(Fault::ReplayNoCleaned) => {}
            Kind::CleanedRun => self.replay_cleaned(e.disk, e.block, end),
            Kind::DropRun if self.opts.faults.has(Fault::ReplayNoDrops) => {}
            Kind::DropRun => {
                self.forget_range(e.disk, e.block, end);
            }
            Kind::ZeroRun => {
                self.forget_range(e.disk, e.block, end);
                if let Some(d) = self.disk_mut(e.disk) {
                    d.zero_seg_seq.get_or_insert(seg_seq);
                }
                self.change_zeros(e.disk, |zero| zero.insert_range(e.block, end));
            }
            Kind::ZeroDoneRun if self.opts.faults.has(Fault::ReplayNoZerosTold) => {}
            Kind::ZeroDoneRun => self.zeros_told(e.disk, e.block, end.saturating_sub(e.block)),
            Kind::Intent => {
                let open = intents.entry((e.disk, e.block)).or_default();
                *open = (open.0.max(end), seg_seq);
            }
            // Regions grow with the disk, so one may have been recorded in other sizes: only what
            // is closed whole is closed.
            Kind::IntentClear => {
                if self.opts.faults.has(Fault::CloseAllIntents) {
                    intents.clear();
                }
                let range = (e.disk, e.block)..(e.disk, end);
                let closed = intents.range(range).filter(|(_, (to, _))| *to <= end);
                let closed: Vec<_> = closed.map(|(at, _)| *at).collect();
                for at in closed {
                    intents.remove(&at);
                }
            }
        }
    }

    fn replay_cleaned(&mut self, disk: DiskId, start: u64, end: u64) {
        let Some(d) = self.disk(disk) else { return };
        let blocks: Vec<u64> = d.dirty.range(start, end).collect();
        for block in blocks {
            let Some(slot) = self.cache.index.get(Key::new(disk, block)) else {
                continue;
            };
            self.cache.index.set_dirty(slot, false);
            self.flash.slot_cleaned(slot);
            self.dirty_total -= 1;
            if let Some(d) = self.disk_mut(disk) {
                d.dirty.remove(block);
            }
        }
    }
}

/// Reads both ends of consecutive segments; tells of each whether its first block could not be read.
///
/// One segment's summary and the first block of the next lie side by side, so in memory a segment's
/// first block stands before its summary, and most reads take one of each.
fn read_ends(
    media: &mut dyn Media,
    layout: &Layout,
    segs: &Range<u32>,
    bytes: &mut [u8],
) -> Vec<bool> {
    let stride = BLOCK_BYTES + layout.summary_bytes();
    let bytes = &mut bytes[..segs.len() * stride];
    let (first, rest) = bytes.split_at_mut(BLOCK_BYTES);
    let mut reads = vec![(layout.segment_offset(segs.start), first)];
    for (seg, piece) in segs.clone().zip(rest.chunks_mut(stride)) {
        reads.push((layout.summary_offset(seg), piece));
    }
    if media.read_many(&mut reads).is_ok() {
        return vec![false; segs.len()];
    }
    let ends = segs.clone().zip(bytes.chunks_mut(stride));
    ends.map(|(seg, ends)| {
        let (start, end) = ends.split_at_mut(BLOCK_BYTES);
        read_what_can_be(media, layout.summary_offset(seg), end);
        read_what_can_be(media, layout.segment_offset(seg), start) > 0
    })
    .collect()
}

fn first_batch(content: &Content) -> u64 {
    match content {
        Content::Sealed(h, _) => h.first_batch_seq,
        Content::Walked(b) => b.first().map_or(u64::MAX, |b| b.header.batch_seq),
    }
}

/// Did older segments count when a segment that was walked got its first batch?
fn names_older(content: &Content, seq: u64) -> bool {
    match content {
        Content::Sealed(..) => false,
        Content::Walked(b) => b.first().is_some_and(|b| b.header.tail_seq < seq),
    }
}

/// Batches that failed are sent again, with the same numbers, into a later segment. What stands in
/// the earlier one was answered to nobody; it would be played twice, around what came after it.
fn drop_first_attempts(found: &mut [Found]) {
    let mut again = u64::MAX;
    for f in found.iter_mut().rev() {
        if let Content::Walked(batches) = &mut f.content {
            let first_attempt = |b: &WalkedBatch| b.header.batch_seq >= again;
            if batches.iter().any(first_attempt) {
                took(Path::ResentBatchFound);
            }
            batches.retain(|b| !first_attempt(b));
        }
        again = again.min(first_batch(&f.content));
    }
}

/// The highest batch number a segment's structures say was durable when they were written.
fn claims_durable(f: &Found) -> u64 {
    let said = match &f.content {
        Content::Sealed(h, _) => h.durable_seq,
        Content::Walked(b) => b.iter().map(|b| b.header.durable_seq).max().unwrap_or(0),
    };
    said.max(f.claimed)
}

/// Reads block by block if it cannot be done at once; what cannot be read is zeros. Returns how many
/// blocks that are.
///
/// What the log needs is told by its own numbers; a sector that went bad in a segment that was trimmed or in
/// one clean block must not take all disks with it.
fn read_what_can_be(media: &mut dyn Media, offset: u64, out: &mut [u8]) -> usize {
    if media.read_at(offset, out).is_ok() {
        return 0;
    }
    let mut unread = 0;
    for (at, block) in (offset..)
        .step_by(BLOCK_BYTES)
        .zip(out.chunks_mut(BLOCK_BYTES))
    {
        if media.read_at(at, block).is_err() {
            block.fill(0);
            unread += 1;
        }
    }
    unread
}

/// The newest tail that durable structures of a segment name.
fn tail_within(f: &Found, durable: u64) -> Option<u64> {
    match &f.content {
        Content::Sealed(h, _) => (h.last_batch_seq <= durable).then_some(h.tail_seq),
        Content::Walked(b) => b
            .iter()
            .filter(|b| b.header.batch_seq <= durable)
            .map(|b| b.header.tail_seq)
            .max(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Engine, EngineOptions, KnownDisk};
    use hearth_format::{Layout, Superblock, Uuid};

    #[test]
    fn closing_a_region_leaves_its_neighbour_open_though_regions_grew() {
        let layout = Layout::for_device(16 << 20, 256).unwrap();
        let uuid = Uuid::from_u128(1);
        let known = KnownDisk {
            id: 1,
            size: 100 << 30,
            since_seq: 0,
        };
        let sb = Superblock::new(layout, uuid, uuid, "test", 0);
        let mut core = Engine::blank(sb, EngineOptions::default(), &[known]);
        let half = core.disk(1).unwrap().origin.intents.region_blocks() as u32 / 2;
        let entry = |kind, block: u32| Entry {
            disk: 1,
            block: u64::from(block),
            word: half,
            slot: 0,
            kind,
            flags: 0,
        };
        let mut log = vec![
            entry(Kind::Intent, 0),
            entry(Kind::Intent, half),
            entry(Kind::IntentClear, 0),
        ];
        let since = BTreeMap::from([(1, 0)]);
        let mut open = Intents::new();
        core.replay(0, 7, &log, &since, &mut open);
        assert_eq!(
            open.keys().copied().collect::<Vec<_>>(),
            [(1, u64::from(half))]
        );
        log.push(Entry {
            word: 2 * half,
            ..entry(Kind::IntentClear, 0)
        });
        let mut none = Intents::new();
        core.replay(0, 7, &log, &since, &mut none);
        assert!(none.is_empty());
        core.restore_intents(open);
        let restored = core.disk(1).unwrap().origin.intents.records();
        assert_eq!(restored, [(0, 7)]);
    }

    /// Keeps blocks that were written; one cannot be read.
    struct Sparse {
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

    #[test]
    fn more_segments_than_are_read_at_once_are_all_found() {
        let layout = Layout::for_device(650 << 20, 256).unwrap();
        assert!(layout.segment_count > 2 * READ_AHEAD + 10);
        assert!(!layout.segment_count.is_multiple_of(READ_AHEAD));
        let uuid = Uuid::from_u128(1);
        let sb = Superblock::new(layout, uuid, uuid, "test", 0);
        let mut core = Engine::blank(sb, EngineOptions::default(), &[]);
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
                pool_tag: core.flash.pool_tag,
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
                    pool_tag: core.flash.pool_tag,
                    segment_seq: number,
                    first_batch_seq: number,
                    last_batch_seq: number,
                    ..SummaryHeader::default()
                };
                let mut summary = Vec::new();
                header.encode(&entries, &mut summary).unwrap();
                media
                    .write_at(layout.summary_offset(seg), &summary)
                    .unwrap();
            }
        }
        let mut found = core.survey(&mut media).unwrap();
        found.sort_by_key(|f| f.seg);
        let segs: Vec<u32> = found.iter().map(|f| f.seg).collect();
        let want: Vec<u32> = (0..layout.segment_count).filter(|s| *s != free).collect();
        assert_eq!(segs, want);
        for f in found {
            assert_eq!(f.seq, u64::from(f.seg) + 1);
            assert_eq!(f.blind, f.seg == blind);
            let entries = match f.content {
                Content::Sealed(_, entries) if f.seg != unsealed => entries.unwrap(),
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
        let uuid = Uuid::from_u128(1);
        let sb = Superblock::new(layout, uuid, uuid, "test", 0);
        for accept_damage in [false, true] {
            let options = EngineOptions {
                accept_damage,
                ..EngineOptions::default()
            };
            let mut core = Engine::blank(sb.clone(), options, &[]);
            let mut media = Sparse {
                blocks: BTreeMap::new(),
                bad: u64::MAX,
            };
            let header = SummaryHeader {
                pool_tag: core.flash.pool_tag,
                segment_seq: 5,
                first_batch_seq: 1,
                last_batch_seq: 1,
                tail_seq: 5,
                durable_seq: 1,
                ..SummaryHeader::default()
            };
            let mut summary = Vec::new();
            header.encode(&[], &mut summary).unwrap();
            summary.resize(BLOCK_BYTES, 0);
            for seg in [2, 4] {
                let at = layout.summary_offset(seg);
                media.write_at(at, &summary).unwrap();
            }
            let found = core.recover(&mut media, &BTreeMap::new());
            if accept_damage {
                let found = found.unwrap();
                assert_eq!((found.segments, found.wipe), (1, vec![4]));
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
        let uuid = Uuid::from_u128(1);
        let sb = Superblock::new(layout, uuid, uuid, "test", 0);
        let mut core = Engine::blank(sb, EngineOptions::default(), &[]);
        let mut media = Sparse {
            blocks: BTreeMap::new(),
            bad: u64::MAX,
        };
        assert!(core.survey(&mut media).unwrap().is_empty());
    }
}
