//! Opening a pool after a crash: the index from the log.
//!
//! The log is a sequence of batches, numbered without gaps, in segments, numbered upwards.
//! Recovery accepts a prefix of it: at least everything up to the highest `durable_seq` any
//! batch claims (those were covered by a device flush and are believed without reading their
//! data), then batch by batch as long as every block's checksum is right. Everything behind
//! the first hole never happened. `docs/format.md` has the argument.

use crate::faults::Fault;
use crate::flash::device::{FlashDevice, Users};
use crate::flash::log::{Head, Sealing, SegState};
use crate::flash::replay::{Intents, Replay};
use crate::flash::survey::{Content, Found, Told, WalkedBatch, first_batch, read_what_can_be};
use crate::paths::{Path, took};
use hearth_format::superblock::INCOMPAT_MAP;
use hearth_format::{FormatError, Kind, MapEntry, SegmentMap, SummaryHeader};
use hearth_io::{BLOCK, Media, media};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::io;

/// Why the log cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecoverError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Format(#[from] FormatError),
    #[error("the log is damaged: {0}")]
    Damaged(String),
    /// The log goes on in segments whose beginning only the half has that is not read otherwise: all is to be looked at again, with
    /// those beginnings. What was written meanwhile is what every start would write.
    #[error("the log goes on in the other half of {} segments", .0.len())]
    BeginsThere(BTreeMap<u32, Beginning>),
    /// What was found may be on that device alone, so all is to be looked at again without it.
    #[error("a flash device was lost while the log was read")]
    DeviceLost,
}

/// The first batch of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Beginning {
    pub segment_seq: u64,
    pub batch_seq: u64,
    /// It was sent again.
    pub again: bool,
}

/// How a log is to be read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct How {
    /// A damaged log is used as far as it can be read.
    pub accept_damage: bool,
    /// Up to so many blocks of flash the entries of summaries are kept until it is known what counts; above,
    /// they are read twice.
    pub keep_blocks: u32,
}

/// What recovery found.
#[derive(Debug, Default)]
pub(crate) struct Recovered {
    pub segments: u32,
    pub discarded: u64,
    /// What was being written past the log.
    pub intents: Intents,
    last_batch: u64,
    max_segment_seq: u64,
    /// Segments that count, with their numbers.
    accepted: Vec<(u32, u64)>,
    /// Segments to be sealed with the entries that count.
    seal: Vec<Sealing>,
    /// Segments whose content never happened.
    wipe: Vec<u32>,
    /// Segment and block behind its last batch that counts, where one may stand that does not.
    cut: Vec<(u32, u32)>,
    /// Segments of which not all was durable.
    halved: Vec<Halved>,
    /// Those of them that are not whole in both halves even so: the next start is to look at them again.
    unlike: BTreeSet<u32>,
    /// Segments whose first block cannot be read in the half that is read first.
    unread_first: BTreeSet<u32>,
}

/// A segment of which not all was durable, as its halves have it.
#[derive(Debug)]
struct Halved {
    seg: u32,
    /// So many blocks of it count.
    used: u32,
    /// Those of them that the halves do not share.
    single: BTreeSet<u32>,
    /// Those that are as they should be in the half that is not read otherwise, and not in the one that is.
    better_there: BTreeSet<u32>,
    /// Those that are not as they should be in that one, and cannot be read in the other.
    unread_there: BTreeSet<u32>,
}

/// Blocks that are wiped by one write.
const WIPE_BLOCKS: usize = 256;
/// No pool counts so far. What claims to is not believed: the numbers that follow it must fit, too.
pub(crate) const NUMBERS_END: u64 = 1 << 62;
/// The same for generations of the superblock, which begin the numbers of segments.
pub(crate) const GENERATIONS_END: u64 = NUMBERS_END >> 32;

impl<U: Users> FlashDevice<U> {
    /// Rebuilds the log's state from what is on `media`, tells `replay` what counts of it, and makes sure that
    /// every later start finds the same.
    pub fn recover(
        &mut self,
        media: &mut dyn Media,
        replay: &mut impl Replay,
        how: &How,
    ) -> Result<Recovered, RecoverError> {
        let lost = |media: &dyn Media| media.spread().map(|spread| spread.lost());
        let before = lost(media);
        let mut found = self.accept(media, replay, how)?;
        self.log.next_batch_seq = found.last_batch + 1;
        self.log.applied_seq = found.last_batch;
        self.log.next_segment_seq = found.max_segment_seq + 1;
        self.make_halves_alike(media, &mut found)?;
        if lost(media) != before {
            return Err(RecoverError::DeviceLost);
        }
        self.settle_log(media, &mut found)?;
        Ok(found)
    }

    /// Finds out what counts. Nothing is written.
    fn accept(
        &mut self,
        media: &mut dyn Media,
        replay: &mut impl Replay,
        how: &How,
    ) -> Result<Recovered, RecoverError> {
        let mut unread_first = BTreeSet::new();
        let mut found = self.survey(media, how, &mut unread_first)?;
        check_readable(&found, how)?;
        found.sort_by_key(|f| f.seq);
        let mut out = Recovered {
            max_segment_seq: found.last().map_or(0, |f| f.seq),
            unread_first,
            ..Recovered::default()
        };
        let map = match self.sb.incompat & INCOMPAT_MAP {
            0 => None,
            _ => self.load_map(media, how)?,
        };
        let map = self.above_floor(map, &mut found);
        let through = map.as_ref().map_or(0, |map| map.header.through);
        if let Some(map) = &map {
            self.keep_mapped(&mut found, map, how)?;
            for f in &found {
                let entry = map.entries[f.seg as usize];
                if entry.clean && entry.seq == f.seq {
                    self.log.segments[f.seg as usize].clean_from = Some(0);
                }
            }
        }
        let durable = found.iter().map(claims_durable).max().unwrap_or(0);
        let durable = durable.max(through);
        // A summary that reaches past what is durable is not enough: its batches are looked at one
        // by one, also because those which are durable may name a newer tail.
        for f in &mut found {
            if let Content::Sealed(h, _) = &f.content
                && h.last_batch_seq > durable
                && !self.faults.has(Fault::TrustUnverifiedTail)
            {
                took(Path::SummaryDoubted);
                // Batches of another life would be left out below.
                let life = (!self.faults.has(Fault::KeepStrangers)).then_some(f.seq);
                let (mut batches, claimed) = self.walk(media, f.seg, life);
                f.claimed = claimed;
                // The summary may have reached flash before the batches it tells of; what stands
                // in their place then is of an earlier use of the segment.
                if batches.iter().any(|b| b.header.segment_seq != f.seq)
                    && !self.faults.has(Fault::KeepStrangers)
                {
                    batches.clear();
                }
                f.content = Content::Walked(batches);
            }
        }
        if !self.faults.has(Fault::PlayTwice) {
            drop_first_attempts(&mut found, self.has_heads());
        }
        let start = match &map {
            Some(map) => {
                check_reach(&found, map, how)?;
                Some(through + 1)
            }
            None => self.drop_before_tail(&mut found, durable, how)?,
        };
        if let Some(pair) = found.windows(2).find(|pair| pair[0].seq == pair[1].seq)
            && !how.accept_damage
        {
            // Numbers say what is oldest and may go; with the same one twice, nothing ever would.
            return Err(RecoverError::Damaged(format!(
                "segments {} and {} have the same number, {}",
                pair[0].seg, pair[1].seg, pair[0].seq
            )));
        }
        let reach = Reach {
            start,
            through,
            durable,
        };
        self.play(media, replay, how, found, reach, &mut out)?;
        if out.last_batch < durable && !how.accept_damage {
            return Err(RecoverError::Damaged(format!(
                "batches {} to {durable} were made durable but cannot be read",
                out.last_batch + 1
            )));
        }
        if out.discarded > 0 {
            took(Path::SegmentDiscarded);
        }
        self.drop_below_clean_floor(replay);
        self.adopt_segments(&mut out);
        Ok(out)
    }

    /// The map, or none if it is damaged and that is accepted.
    fn load_map(
        &self,
        media: &mut dyn Media,
        how: &How,
    ) -> Result<Option<SegmentMap>, RecoverError> {
        match self.read_map(media) {
            None if !how.accept_damage => Err(RecoverError::Damaged(
                "neither copy of the map of its segments can be read".to_owned(),
            )),
            map => Ok(map),
        }
    }

    /// Leaves out what was written before the pool went on without a device: something there may be void, as only that one knew.
    /// What of it counts a checkpoint tells, and there is none.
    fn above_floor(
        &self,
        mut map: Option<SegmentMap>,
        found: &mut Vec<Found>,
    ) -> Option<SegmentMap> {
        let floor = self.sb.floor_of_log();
        if floor == 0 || self.faults.has(Fault::BelieveBelowFloor) {
            return map;
        }
        let all = found.len();
        found.retain(|f| f.seq >= floor);
        if found.len() < all {
            took(Path::BelowFloor);
        }
        for entry in map.iter_mut().flat_map(|map| &mut map.entries) {
            if entry.seq < floor {
                *entry = MapEntry::default();
            }
        }
        map
    }

    /// Leaves what the map names, and what was opened after it was written.
    fn keep_mapped(
        &self,
        found: &mut Vec<Found>,
        map: &SegmentMap,
        how: &How,
    ) -> Result<(), RecoverError> {
        let named = |f: &Found| {
            let seq = map.entries[f.seg as usize].seq;
            seq != 0 && seq == f.seq
        };
        let through = match self.faults.has(Fault::BelieveFreed) {
            true => 0,
            false => map.header.through,
        };
        found.retain(|f| named(f) || first_batch(&f.content) > through);
        // A segment ends where batches failed that were sent again elsewhere; they may be there all the same.
        for f in found.iter_mut().filter(|f| named(f)) {
            let last = map.entries[f.seg as usize].last_batch;
            if let Content::Walked(batches) = &mut f.content {
                batches.retain(|b| b.header.batch_seq <= last || b.header.batch_seq > through);
            }
        }
        let mut there = vec![false; map.entries.len()];
        for f in found.iter().filter(|f| named(f)) {
            there[f.seg as usize] = true;
        }
        let missing = (0..).zip(map.entries.iter().zip(there));
        let mut missing = missing.filter(|(_, (e, there))| e.seq != 0 && !there);
        match missing.next() {
            Some((seg, (e, _))) if !how.accept_damage => Err(RecoverError::Damaged(format!(
                "segment {seg}, number {}, counts, and is missing",
                e.seq
            ))),
            _ => Ok(()),
        }
    }

    /// Of a pool without a map: leaves what is not older than the tail. The number of the first batch, if it is
    /// known.
    fn drop_before_tail(
        &mut self,
        found: &mut Vec<Found>,
        durable: u64,
        how: &How,
    ) -> Result<Option<u64>, RecoverError> {
        let tail = found
            .iter()
            .filter_map(|f| tail_within(f, durable))
            .max()
            .unwrap_or(0)
            .max(self.sb.log_floor);
        if tail > 0 && !found.iter().any(|f| f.seq == tail) && !how.accept_damage {
            return Err(RecoverError::Damaged(format!(
                "segment number {tail}, the oldest that counts, is missing"
            )));
        }
        found.retain(|f| f.seq >= tail);
        // Nothing is known to be durable, and what came before this is not there.
        if tail == 0
            && let Some(f) = found.first()
            && names_older(&f.content, f.seq)
        {
            return Ok(Some(u64::MAX));
        }
        Ok(None)
    }

    /// Replays batches in their order as long as there is no hole, and no doubt about one.
    fn play(
        &mut self,
        media: &mut dyn Media,
        replay: &mut impl Replay,
        how: &How,
        found: Vec<Found>,
        reach: Reach,
        out: &mut Recovered,
    ) -> Result<(), RecoverError> {
        let mut played: Vec<Played> = found.into_iter().map(Played::of).collect();
        let mut next: BinaryHeap<Reverse<(u64, usize)>> = (0..played.len())
            .filter_map(|i| Some(Reverse((played[i].chunks.first()?.first, i))))
            .collect();
        let mut expected = reach.start;
        let backwards = self.faults.has(Fault::ReplayBackwards);
        let swapped = self.faults.has(Fault::HeadsSwapped);
        let mut held = None;
        let mut order: Vec<(usize, usize)> = Vec::new();
        while let Some(Reverse((_, i))) = next.pop() {
            self.part(media, how, &mut played[i])?;
            let p = &mut played[i];
            let at = p.accepted;
            let c = p.chunks[at];
            let old = c.last <= reach.through;
            // What was opened before the map was written may have been closed after.
            let follows = old || expected.is_none_or(|e| (c.first..=c.last).contains(&e));
            let trusted =
                c.sound || c.last <= reach.durable || self.faults.has(Fault::TrustUnverifiedTail);
            if !trusted || !follows && !self.faults.has(Fault::ReplayPastGap) {
                break;
            }
            if !old {
                expected = Some(c.last + 1);
            }
            p.accepted += 1;
            if let Some(c) = p.chunks.get(p.accepted) {
                next.push(Reverse((c.first, i)));
            }
            if swapped && held.is_none() && next.peek().is_some_and(|Reverse((_, n))| *n != i) {
                held = Some((i, at));
                continue;
            }
            match backwards {
                true => order.push((i, at)),
                false => self.play_chunk(media, replay, how, &mut played[i], at, out)?,
            }
            if let Some((i, at)) = held.take() {
                self.play_chunk(media, replay, how, &mut played[i], at, out)?;
            }
        }
        if let Some((i, at)) = held {
            self.play_chunk(media, replay, how, &mut played[i], at, out)?;
        }
        for (i, at) in order.into_iter().rev() {
            self.play_chunk(media, replay, how, &mut played[i], at, out)?;
        }
        // Without a map the first number is that of the first batch.
        let last = expected.filter(|e| *e != u64::MAX).map_or(0, |e| e - 1);
        out.last_batch = last.max(reach.through);
        for p in played {
            self.end_segment(p, out);
        }
        Ok(())
    }

    /// A segment's turn comes that was closed: its batches lie between those of others, as its summary says. One that
    /// does not say it is of a build that wrote one segment at a time.
    fn part(
        &mut self,
        media: &mut dyn Media,
        how: &How,
        p: &mut Played,
    ) -> Result<(), RecoverError> {
        if !self.has_heads() || !p.whole || self.faults.has(Fault::ClosedInOnePiece) {
            return Ok(());
        }
        p.whole = false;
        if let Some(h) = p.unread.take() {
            p.told = self.summary_again(media, p.seg, &h, how)?;
        }
        let c = p.chunks[0];
        let marks = &p.told.marks;
        let fits = marks.first().is_some_and(|m| m.seq == c.first)
            && marks.last().is_some_and(|m| m.seq == c.last)
            && marks.windows(2).all(|m| m[0].seq < m[1].seq);
        if !fits {
            return Ok(());
        }
        let mut from = 0;
        p.chunks = marks
            .iter()
            .map(|m| {
                let chunk = Chunk {
                    first: m.seq,
                    last: m.seq,
                    from,
                    to: from + usize::from(m.entries),
                    sound: false,
                };
                from = chunk.to;
                chunk
            })
            .collect();
        Ok(())
    }

    fn play_chunk(
        &mut self,
        media: &mut dyn Media,
        replay: &mut impl Replay,
        how: &How,
        p: &mut Played,
        at: usize,
        out: &mut Recovered,
    ) -> Result<(), RecoverError> {
        if let Some(h) = p.unread.take() {
            p.told = self.summary_again(media, p.seg, &h, how)?;
        }
        if !p.opened {
            p.opened = true;
            self.log.segments[p.seg as usize].seq = p.seq;
            self.cleaner.open(p.seg, self.log.heads_used - 1);
        }
        let c = p.chunks[at];
        let entries = p.told.entries.get(c.from..c.to.min(p.told.entries.len()));
        let entries = entries.unwrap_or_default();
        let clean = self.log.segments[p.seg as usize].clean_from.is_some();
        let life = (p.seg, p.seq, clean);
        if replay.asks_for_batches() {
            let mut rest = entries;
            let own = p.told.marks.iter();
            for mark in own.filter(|m| (c.first..=c.last).contains(&m.seq)) {
                let of_batch = rest.split_off(..usize::from(mark.entries).min(rest.len()));
                let of_batch = of_batch.unwrap_or_default();
                replay.batch(mark.seq);
                self.replay(life, of_batch, replay, &mut out.intents);
            }
            // Of a summary that does not say it, all is of the last one.
            replay.batch(c.last);
            self.replay(life, rest, replay, &mut out.intents);
        } else {
            self.replay(life, entries, replay, &mut out.intents);
        }
        // What was read a second time need not be kept.
        if p.again && p.accepted == p.chunks.len() && !self.faults.has(Fault::ReplayBackwards) {
            p.told = Told::default();
        }
        Ok(())
    }

    /// What becomes of a segment of which so much was accepted.
    fn end_segment(&mut self, mut p: Played, out: &mut Recovered) {
        if p.accepted == 0 {
            out.wipe.push(p.seg);
            out.discarded += 1;
            return;
        }
        let chunks = &p.chunks[..p.accepted];
        let (first, last) = (chunks[0].first, chunks[p.accepted - 1].last);
        let s = &mut self.log.segments[p.seg as usize];
        (s.first_batch, s.last_batch) = (first, last);
        out.discarded += u64::from(p.accepted < p.chunks.len());
        out.accepted.push((p.seg, p.seq));
        if p.used.is_empty() && p.accepted < p.chunks.len() && p.told.marks.len() == p.chunks.len()
        {
            // Of a damaged log its summary tells more than counts.
            p.used = p.blocks_used(self.log.half);
        }
        let Some(used) = p.used.get(p.accepted - 1) else {
            return;
        };
        if *used < self.log.data_blocks {
            out.cut.push((p.seg, *used));
        }
        let used = *used;
        p.told.entries.truncate(chunks[p.accepted - 1].to);
        let half = self.log.half;
        let single = p
            .told
            .entries
            .iter()
            .filter(|e| half > 0 && e.kind == Kind::Clean);
        let single = single.map(|e| u32::from(e.slot) % half).collect();
        let better_there = p.better_there.into_iter().filter(|at| *at < used);
        out.halved.push(Halved {
            seg: p.seg,
            used,
            single,
            better_there: better_there.collect(),
            unread_there: p.unread_there.into_iter().collect(),
        });
        p.told.marks.truncate(p.accepted);
        out.seal.push(Sealing {
            seg: p.seg,
            seq: p.seq,
            entries: p.told.entries,
            marks: p.told.marks,
            first_batch: first,
            last_batch: last,
        });
    }

    /// Copies that may have been voided by records that never reached the log ([`crate::flash::rescue`]).
    fn drop_below_clean_floor(&mut self, replay: &mut impl Replay) {
        if self.sb.clean_floor == 0 || self.faults.has(Fault::IgnoreCleanFloor) {
            return;
        }
        for seg in 0..self.log.segments.len() as u32 {
            if self.log.segments[seg as usize].seq >= self.sb.clean_floor {
                continue;
            }
            let base = seg * self.log.segment_slots;
            for slot in base..base + self.log.segment_slots {
                if let Some(gone) = replay.drop_clean(slot) {
                    took(Path::CleanFloorApplied);
                    self.slot_gone(gone);
                }
            }
        }
    }

    /// Accepted segments become the log.
    fn adopt_segments(&mut self, out: &mut Recovered) {
        out.accepted.sort_unstable_by_key(|(_, seq)| *seq);
        let head = self.resumable(out);
        for (seg, _) in &out.accepted {
            if head == Some(*seg) {
                self.log.segments[*seg as usize].state = SegState::Open;
                out.segments += 1;
                continue;
            }
            self.log.segments[*seg as usize].state = SegState::Closed;
            self.log.order.push_back(*seg);
            self.cleaner.close(*seg);
            out.segments += 1;
        }
        for seg in 0..self.log.segments.len() as u32 {
            if self.log.segments[seg as usize].state == SegState::Free {
                self.log.free.push_back(seg);
            }
        }
    }

    /// The segment that was being written, if it has room and others are short.
    ///
    /// A crash closes the head, however little is in it. One crash after the other takes the last segment, and
    /// then what is moved needs a place before any can come free. That ends where all that is in the oldest
    /// segment can be brought to origins ([`crate::flash::rescue`]), but disks that live on flash have
    /// none. With them, a start takes none away.
    fn resumable(&self, out: &Recovered) -> Option<u32> {
        let free = self.log.usable().saturating_sub(out.accepted.len());
        if !self.resumes || free > self.log.free_wanted() {
            return None;
        }
        let (seg, seq) = *out.accepted.last()?;
        if self.log.segments[seg as usize].clean_from.is_some() {
            return None;
        }
        // What is said there of a disk that came later would not count.
        if self.since.values().any(|since| *since > seq) {
            return None;
        }
        let s = out.seal.iter().find(|s| s.seg == seg)?;
        let entries = s.entries.len() + s.marks.len() + 1;
        let fits =
            out.cut.iter().any(|(cut, _)| *cut == seg) && entries < self.log.summary_capacity;
        (fits && s.last_batch == out.last_batch).then_some(seg)
    }

    /// Goes on in that segment behind what was accepted. Whatever stands there goes as a whole: it may be
    /// of batches that were not accepted, whose numbers come again.
    fn resume_head(
        &mut self,
        media: &mut dyn Media,
        found: &mut Recovered,
    ) -> Result<(), RecoverError> {
        let open = |s: &Sealing| self.log.segments[s.seg as usize].state == SegState::Open;
        let Some(at) = found.seal.iter().position(open) else {
            return Ok(());
        };
        let s = found.seal.remove(at);
        let at = found.cut.iter().position(|(seg, _)| *seg == s.seg);
        let (_, next) = found.cut.remove(at.expect("it has room"));
        let zeros = vec![0u8; BLOCK as usize * WIPE_BLOCKS];
        let start = self.layout.segment_offset(s.seg);
        let end = start + u64::from(self.layout.segment_blocks) * BLOCK;
        let mut from = start + u64::from(next) * BLOCK;
        while from < end {
            let len = (end - from).min(zeros.len() as u64);
            media.write_at(from, &zeros[..len as usize])?;
            from += len;
        }
        took(Path::HeadResumed);
        self.log.heads[self.log.heads_used - 1] = Some(Head {
            seg: s.seg,
            seq: s.seq,
            next,
            entries: s.entries,
            marks: s.marks,
            first_batch: s.first_batch,
        });
        Ok(())
    }

    /// Where everything is there twice: gives both halves what was accepted, and finds what only the half has that was not
    /// read.
    ///
    /// What no flush covered one device may have, and the other not. A start reads one half of a segment; the next one
    /// may have to read the other, and must find the same. What was durable is on both; so what remains are the ends of
    /// the log, and segments of which nothing was found here: if the other half has the beginning of one, that
    /// never happened either, and its numbers come again. But if that is the very batch that comes next, it may be that it rotted here, and
    /// was promised.
    fn make_halves_alike(
        &self,
        media: &mut dyn Media,
        found: &mut Recovered,
    ) -> Result<(), RecoverError> {
        if !self.devices.are_twice() || self.faults.has(Fault::HalvesUnmended) {
            return Ok(());
        }
        let bytes = self.layout.segment_blocks as usize * BLOCK as usize;
        let (mut one, mut other) = (vec![0u8; bytes], vec![0u8; bytes]);
        for halved in std::mem::take(&mut found.halved) {
            let at = self.layout.segment_offset(halved.seg);
            let len = halved.used as usize * BLOCK as usize;
            // What rotted where it is read, before that takes the place of the only good copy. What cannot be read there now
            // may be later, so it stays as it is.
            let mut left = halved.unread_there;
            for row in &halved.better_there {
                let (at, one) = (at + u64::from(*row) * BLOCK, &mut one[..BLOCK as usize]);
                match media.read_other(at, one) {
                    Ok(true) => {
                        took(Path::FirstHalfMended);
                        media.write_at(at, one)?;
                    }
                    Ok(false) => {}
                    Err(_) => {
                        left.insert(*row);
                    }
                }
            }
            // What cannot be read there is written.
            let there = media.read_other(at, &mut other[..BLOCK as usize]);
            if matches!(there, Ok(false)) {
                continue;
            }
            if !left.is_empty() {
                found.unlike.insert(halved.seg);
            }
            // Each half alone: of what is read from the other one nothing is known.
            let unread = read_what_can_be(&mut media::FirstHalf(media), at, &mut one[..len]);
            let unread_there =
                read_what_can_be(&mut media::OtherHalf(media), at, &mut other[..len]);
            let pairs = one[..len].chunks(BLOCK as usize);
            let pairs = pairs.zip(other.chunks(BLOCK as usize)).zip(0..);
            for ((one, other), n) in pairs {
                let shared = !halved.single.contains(&n) && !left.contains(&n);
                if shared && !unread.contains(&n) && (unread_there.contains(&n) || one != other) {
                    took(Path::HalfMended);
                    media.write_other(at + u64::from(n) * BLOCK, one)?;
                }
            }
        }
        let mut counts = vec![false; self.log.segments.len()];
        let known = found.accepted.iter().map(|(seg, _)| *seg);
        for seg in known.chain(found.wipe.iter().copied()) {
            counts[seg as usize] = true;
        }
        let summary = self.layout.summary_bytes();
        let next = found.last_batch + 1;
        // What a start before this one could not wipe is of an earlier life.
        let newest = found.accepted.iter().map(|(_, seq)| *seq).max();
        let looked_at = !self.begins_there.is_empty() || self.faults.has(Fault::BeginningOfOne);
        let (mut there, mut only_there) = (BTreeMap::new(), Vec::new());
        for seg in (0..)
            .zip(counts)
            .filter(|(_, counts)| !counts)
            .map(|(seg, _)| seg)
        {
            let (start, end) = (&mut one[..BLOCK as usize], &mut other[..summary]);
            let read = [
                media.read_other(self.layout.segment_offset(seg), start),
                media.read_other(self.layout.summary_offset(seg), end),
            ];
            // Of what cannot be read nothing is believed. Nor may a beginning ever be: a start that can read it would find what this one did
            // without. (A summary says nothing that is newer than the beginning.)
            for (read, bytes) in read.iter().zip([&mut *start, &mut *end]) {
                if !matches!(read, Ok(true)) {
                    bytes.fill(0);
                }
            }
            let unread = read[0].is_err() || found.unread_first.contains(&seg);
            if let Some(begins) = self.beginning(start)
                && newest.is_none_or(|newest| begins.segment_seq > newest)
            {
                there.insert(seg, begins);
            }
            if unread || self.begins_after(start, end, found.last_batch) {
                only_there.push(seg);
            }
        }
        if !looked_at && there.values().any(|begins| begins.batch_seq == next) {
            took(Path::HalfBegins);
            there.retain(|_, begins| begins.batch_seq >= next);
            return Err(RecoverError::BeginsThere(there));
        }
        for seg in only_there {
            took(Path::HalfWiped);
            found.wipe.push(seg);
        }
        Ok(())
    }

    /// Makes what was accepted the only thing a later start can find.
    fn settle_log(
        &mut self,
        media: &mut dyn Media,
        found: &mut Recovered,
    ) -> Result<(), RecoverError> {
        // First what was accepted becomes durable; only then may anything on flash claim so.
        if !self.faults.has(Fault::SealUnflushed) {
            media.flush()?;
        }
        self.store_if_lost(media)?;
        self.log.durable_seq = found.last_batch;
        self.resume_head(media, found)?;
        let zeros = vec![0u8; BLOCK as usize];
        // The numbers of what was not accepted are used again: if the summary that follows should ever be
        // unreadable, a walk must not find it behind what was.
        let cuts = !self.faults.has(Fault::SkipCut);
        for (seg, at) in found.cut.drain(..).filter(|_| cuts) {
            let offset = self.layout.segment_offset(seg) + u64::from(at) * BLOCK;
            media.write_at(offset, &zeros)?;
        }
        for sealing in found.seal.drain(..) {
            let bytes = match found.unlike.contains(&sealing.seg) {
                // With a summary that reaches no further than what is durable the next start would not look.
                true => vec![0u8; self.layout.summary_bytes()],
                false => self.encode_summary(&sealing)?,
            };
            media.write_at(self.layout.summary_offset(sealing.seg), &bytes)?;
        }
        // What was not accepted must not be met again between newer batches.
        let wiped = !self.faults.has(Fault::SkipWipe);
        for seg in found.wipe.drain(..).filter(|_| wiped) {
            media.write_at(self.layout.segment_offset(seg), &zeros)?;
            media.write_at(self.layout.summary_offset(seg), &zeros)?;
        }
        Ok(())
    }
}

/// How far the log goes.
#[derive(Clone, Copy, Debug)]
struct Reach {
    /// The batch that must come next; `None` if any may be the first.
    start: Option<u64>,
    /// Batches up to this one are durable, and those that are not there were freed.
    through: u64,
    /// Batches up to this one are durable.
    durable: u64,
}

/// Batches of a segment that lie one behind the other.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    first: u64,
    last: u64,
    /// Which entries of the segment are theirs.
    from: usize,
    to: usize,
    /// All checksums were looked at, and are right.
    sound: bool,
}

/// A segment while the log is replayed.
struct Played {
    seg: u32,
    seq: u64,
    chunks: Vec<Chunk>,
    told: Told,
    /// A summary that was not kept, until it is read again.
    unread: Option<SummaryHeader>,
    /// It was one of those.
    again: bool,
    /// Of a segment without a summary: blocks up to the end of each chunk.
    used: Vec<u32>,
    /// The same: blocks that the other half has better.
    better_there: Vec<u32>,
    /// The same: blocks that are not right, and cannot be read in the other half.
    unread_there: Vec<u32>,
    /// So many chunks count.
    accepted: usize,
    opened: bool,
    /// It was closed, and is taken for one piece.
    whole: bool,
}

impl Played {
    /// Blocks up to the end of each batch that a summary tells of.
    fn blocks_used(&self, half: u32) -> Vec<u32> {
        let mut used = 0;
        let each = self.chunks.iter().map(|c| {
            let entries = self.told.entries.get(c.from..c.to).unwrap_or_default();
            let data = entries.iter().filter(|e| e.kind.is_data());
            let rows = match half {
                0 => data.count() as u32,
                half => {
                    let rows = data.map(|e| (u32::from(e.slot) % half).saturating_sub(used));
                    rows.max().unwrap_or(0)
                }
            };
            used += 1 + rows;
            used
        });
        each.collect()
    }

    fn of(found: Found) -> Played {
        let mut p = Played {
            seg: found.seg,
            seq: found.seq,
            chunks: Vec::new(),
            told: Told::default(),
            unread: None,
            again: false,
            used: Vec::new(),
            better_there: Vec::new(),
            unread_there: Vec::new(),
            accepted: 0,
            opened: false,
            whole: false,
        };
        match found.content {
            Content::Sealed(h, told) => {
                // Whether something of other segments came between is seen when its turn comes.
                p.chunks.push(Chunk {
                    first: h.first_batch_seq,
                    last: h.last_batch_seq,
                    from: 0,
                    to: usize::MAX,
                    sound: false,
                });
                p.whole = true;
                p.again = told.is_none();
                match told {
                    Some(told) => p.told = told,
                    None => p.unread = Some(h),
                }
            }
            Content::Walked(batches) => {
                let mut used = 0;
                for b in batches {
                    let from = p.told.entries.len();
                    used += 1 + b.rows;
                    p.used.push(used);
                    p.better_there.extend(&b.better_there);
                    p.unread_there.extend(&b.unread_there);
                    p.told.marks.push(b.mark());
                    p.chunks.push(Chunk {
                        first: b.header.batch_seq,
                        last: b.header.batch_seq,
                        from,
                        to: from + b.entries.len(),
                        sound: b.data_ok,
                    });
                    p.told.entries.extend(b.entries);
                }
            }
        }
        p
    }
}

/// What was durable in a segment that the map names must be found there.
fn check_reach(found: &[Found], map: &SegmentMap, how: &How) -> Result<(), RecoverError> {
    for f in found {
        let entry = map.entries[f.seg as usize];
        let last = match &f.content {
            Content::Sealed(h, _) => h.last_batch_seq,
            Content::Walked(b) => b.last().map_or(0, |b| b.header.batch_seq),
        };
        if entry.seq == f.seq && last < entry.last_batch && !how.accept_damage {
            return Err(RecoverError::Damaged(format!(
                "segment {} ends with batch {last}, and batch {} in it was durable",
                f.seg, entry.last_batch
            )));
        }
    }
    Ok(())
}

/// A segment whose beginning cannot be read may be the newest, with batches that were made
/// durable and that nothing else tells of.
fn check_readable(found: &[Found], how: &How) -> Result<(), RecoverError> {
    match found.iter().find(|f| f.blind) {
        Some(f) if !how.accept_damage => Err(RecoverError::Damaged(format!(
            "the beginning of segment {} cannot be read",
            f.seg
        ))),
        _ => Ok(()),
    }
}

/// Did older segments count when a segment that was walked got its first batch?
fn names_older(content: &Content, seq: u64) -> bool {
    match content {
        Content::Sealed(..) => false,
        Content::Walked(b) => b.first().is_some_and(|b| b.header.bound_seq < seq),
    }
}

/// Batches that failed are sent again, with the same numbers, into a later segment. What stands in
/// the earlier one was answered to nobody; it would be played twice, around what came after it.
///
/// Where several segments are written at once, a later one may well begin with a smaller number; there the first batch that
/// is sent again says so, and is durable before any other follows.
fn drop_first_attempts(found: &mut [Found], heads: bool) {
    let mut again = u64::MAX;
    for f in found.iter_mut().rev() {
        if let Content::Walked(batches) = &mut f.content {
            let first_attempt = |b: &WalkedBatch| b.header.batch_seq >= again;
            if batches.iter().any(first_attempt) {
                took(Path::ResentBatchFound);
            }
            batches.retain(|b| !first_attempt(b));
        }
        if f.again || !heads {
            again = again.min(first_batch(&f.content));
        }
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

/// The newest tail that durable structures of a segment name.
fn tail_within(f: &Found, durable: u64) -> Option<u64> {
    match &f.content {
        Content::Sealed(h, _) => (h.last_batch_seq <= durable).then_some(h.bound_seq),
        Content::Walked(b) => b
            .iter()
            .filter(|b| b.header.batch_seq <= durable)
            .map(|b| b.header.bound_seq)
            .max(),
    }
}
