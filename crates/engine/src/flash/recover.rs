//! Opening a pool after a crash: the index from the log.
//!
//! The log is a sequence of batches, numbered without gaps, in segments, numbered upwards.
//! Recovery accepts a prefix of it: at least everything up to the highest `durable_seq` any
//! batch claims (those were covered by a device flush and are believed without reading their
//! data), then batch by batch as long as every block's checksum is right. Everything behind
//! the first hole never happened. `docs/format.md` has the argument.

use crate::faults::Fault;
use crate::flash::device::{FlashDevice, Users};
use crate::flash::log::{Sealing, SegState};
use crate::flash::replay::{Intents, Replay};
use crate::flash::survey::{Content, Found, WalkedBatch, first_batch};
use crate::paths::{Path, took};
use hearth_format::FormatError;
use hearth_io::{BLOCK, Media};
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
    /// Segments to be sealed with the entries that count.
    seal: Vec<Sealing>,
    /// Segments whose content never happened.
    wipe: Vec<u32>,
    /// Segment and block behind its last batch that counts, where one may stand that does not.
    cut: Vec<(u32, u32)>,
}

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
        let mut found = self.accept(media, replay, how)?;
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
        let mut found = self.survey(media, how)?;
        check_readable(&found, how)?;
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
                && !self.faults.has(Fault::TrustUnverifiedTail)
            {
                took(Path::SummaryDoubted);
                let (mut batches, claimed) = self.walk(media, f.seg);
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
            drop_first_attempts(&mut found);
        }
        let any_tail = self.faults.has(Fault::AnyTail);
        let tail = found
            .iter()
            .filter_map(|f| tail_within(f, if any_tail { u64::MAX } else { durable }))
            .max()
            .unwrap_or(0)
            .max(self.sb.log_floor);
        if tail > 0 && !found.iter().any(|f| f.seq == tail) && !how.accept_damage {
            return Err(RecoverError::Damaged(format!(
                "segment number {tail}, the oldest that counts, is missing"
            )));
        }
        let mut expected: Option<u64> = None;
        let mut accepted: Vec<(u32, u64)> = Vec::new();
        let mut tail_end = tail;
        if self.faults.has(Fault::ReplayBackwards) {
            found.reverse();
        }
        for f in found {
            if f.seq < tail && !self.faults.has(Fault::ReplayBelowTail) {
                continue;
            }
            let Found {
                seg, seq, content, ..
            } = f;
            let first = first_batch(&content);
            let backwards = self.faults.has(Fault::ReplayBackwards);
            let gap = match expected {
                Some(e) => first > e,
                // Nothing is known to be durable, and what came before this is not there.
                None => tail == 0 && names_older(&content, seq),
            };
            let past_gap = self.faults.has(Fault::ReplayPastGap);
            if gap && !backwards && !past_gap || first == u64::MAX {
                out.wipe.push(seg);
                out.discarded += 1;
                continue;
            }
            // Numbers say what is oldest and may go; with the same one twice, nothing ever would.
            if let Some((other, _)) = accepted.last().filter(|(_, s)| *s == seq) {
                if !how.accept_damage {
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
                        None => self.summary_again(media, seg, &h, how)?,
                    };
                    self.log.segments[seg as usize].seq = seq;
                    self.replay(seg, seq, &entries, replay, &mut out.intents);
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
                    self.log.segments[seg as usize].seq = seq;
                    for b in batches {
                        let trusted = b.header.batch_seq <= durable
                            || self.faults.has(Fault::TrustUnverifiedTail);
                        if !(b.data_ok || trusted) {
                            break;
                        }
                        self.replay(seg, seq, &b.entries, replay, &mut out.intents);
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
                    if used < self.log.data_blocks {
                        out.cut.push((seg, used));
                    }
                    expected = Some(last + 1);
                    tail_end = tail_end.max(seg_tail);
                    accepted.push((seg, seq));
                    out.seal.push(Sealing {
                        seg,
                        seq,
                        entries: kept.concat(),
                        first_batch: first,
                        last_batch: last,
                        tail_seq: seg_tail,
                    });
                }
            }
        }
        let last = expected.map_or(0, |e| e - 1);
        if last < durable && !how.accept_damage {
            return Err(RecoverError::Damaged(format!(
                "batches {} to {durable} were made durable but cannot be read",
                last + 1
            )));
        }
        out.last_batch = last;
        if out.discarded > 0 {
            took(Path::SegmentDiscarded);
        }
        self.drop_below_clean_floor(replay);
        self.adopt_segments(&accepted, tail_end, &mut out);
        Ok(out)
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
            let base = seg * self.log.segment_blocks;
            for slot in base..base + self.log.segment_blocks {
                if replay.drop_clean(slot) {
                    took(Path::CleanFloorApplied);
                    self.slot_emptied(slot, false);
                }
            }
        }
    }

    /// Accepted segments become the log; those before the tail are empty.
    fn adopt_segments(&mut self, accepted: &[(u32, u64)], tail: u64, out: &mut Recovered) {
        for (seg, seq) in accepted {
            let s = &mut self.log.segments[*seg as usize];
            if *seq < tail && s.live == 0 {
                out.seal.retain(|s| s.seg != *seg);
                continue;
            }
            s.state = SegState::Closed;
            self.log.order.push_back(*seg);
            out.segments += 1;
        }
        for seg in 0..self.log.segments.len() as u32 {
            if self.log.segments[seg as usize].state == SegState::Free {
                self.log.free.push_back(seg);
            }
        }
    }

    /// Makes what was accepted the only thing a later start can find.
    fn settle_log(
        &mut self,
        media: &mut dyn Media,
        found: &mut Recovered,
    ) -> Result<(), RecoverError> {
        self.log.next_batch_seq = found.last_batch + 1;
        self.log.applied_seq = found.last_batch;
        self.log.next_segment_seq = found.max_segment_seq + 1;
        // First what was accepted becomes durable; only then may anything on flash claim so.
        if !self.faults.has(Fault::SealUnflushed) {
            media.flush()?;
        }
        self.log.durable_seq = found.last_batch;
        let zeros = vec![0u8; BLOCK as usize];
        // The numbers of what was not accepted are used again: if the summary that follows should ever be
        // unreadable, a walk must not find it behind what was.
        let cuts = !self.faults.has(Fault::SkipCut);
        for (seg, at) in found.cut.drain(..).filter(|_| cuts) {
            let offset = self.layout.segment_offset(seg) + u64::from(at) * BLOCK;
            media.write_at(offset, &zeros)?;
        }
        for sealing in found.seal.drain(..) {
            let bytes = self.encode_summary(&sealing)?;
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
