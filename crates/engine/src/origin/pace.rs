//! How fast origins are given what is dirty: as fast as it must, and else so that clients do not feel it.

use crate::origin::job::DestageJob;
use crate::origin::progress::BACKOFF_NS;
use slab::Slab;
use std::ops::Range;

/// Runs on their way to the origins while somebody waits for them: enough to let a hard disk
/// reorder.
pub(crate) const JOBS_BUSY: usize = 16;
/// Blocks of a run that is read and written beside requests of clients: 128 KiB, which hold up a request that comes
/// behind them no longer than one of the guest's own would.
pub(crate) const RUN_PACED: u64 = 32;
/// Reads of flash that such a run consists of.
pub(crate) const PIECES_PACED: usize = 8;
/// The same while nobody waits.
const JOBS_IDLE: usize = 4;
/// The same for a disk that is to be written back because somebody asked for it, beside clients: each of them has
/// to wait for what is in the queue of the origin before it.
const JOBS_ASKED: usize = 2;
/// Clients asked for something within this time: background runs go one at a time, with pauses.
const ACTIVE_NS: u64 = 5_000_000;
/// Longest pause after a background run while clients are active, in times of the run's own
/// duration; it shrinks to nothing as the dirty share nears the point where haste begins.
const PAUSE_MAX: u64 = 16;

/// How much the destager wants to do for a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Need {
    None,
    Idle,
    Background,
    /// So much is dirty that writes may soon have to wait.
    Haste,
    /// Somebody asked for all of it to be written back, and may wait for that; no client's request does.
    Asked,
    /// A request waits, or there is no other way to keep things going.
    Urgent,
}

/// Destaging of all disks: what is on its way, and what it may take.
#[derive(Default)]
pub(crate) struct Destaging {
    pub jobs: Slab<DestageJob>,
    /// Those of them that may not write before it is noted that flash was given up.
    pub unnoted: Vec<usize>,
    pub tokens: i64,
    /// While clients are active, background destaging rests until this time.
    pub pause_ns: u64,
    pub refill_ns: u64,
    /// For each segment, the last batch that is known in it, if it was written in this run.
    pub newest: Vec<u64>,
    /// Hits in flight in lanes when the destager last looked.
    pub lane_hits: u64,
    /// Somebody beside this program is held up by what is done on the flash: the host that swaps to it.
    pub others_wait: bool,
}

/// Did a client ask for something lately?
pub(crate) fn is_active(last_ns: u64, now: u64) -> bool {
    now.saturating_sub(last_ns) < ACTIVE_NS
}

impl Destaging {
    /// A batch is on flash, in this segment.
    pub fn note_batch(&mut self, seg: u32, seq: u64) {
        let seg = seg as usize;
        if self.newest.len() <= seg {
            self.newest.resize(seg + 1, 0);
        }
        self.newest[seg] = seq;
    }

    /// Up to which batch the log must be durable so that what lies in these segments is.
    pub fn newest_of(&self, segments: impl Iterator<Item = usize>) -> u64 {
        let newest = segments.filter_map(|seg| self.newest.get(seg));
        newest.copied().max().unwrap_or(0)
    }

    /// How many runs of a disk in such need may be on their way at a time, and whether its tokens let one
    /// more begin: 0 if not. `paced`: clients are active; `hasty`: so many in haste beside them; `limited`: there
    /// is a limit on bandwidth.
    pub fn may_start(
        &self,
        need: Need,
        paced: bool,
        hasty: usize,
        limited: bool,
        now: u64,
    ) -> usize {
        let spent = limited && self.tokens <= 0;
        match need {
            Need::None => 0,
            Need::Haste if paced => hasty,
            Need::Asked if paced => JOBS_ASKED,
            Need::Haste | Need::Asked | Need::Urgent => JOBS_BUSY,
            Need::Background | Need::Idle if spent => 0,
            Need::Background if paced && self.pause_ns > now => 0,
            Need::Background if paced => 1,
            Need::Background | Need::Idle => JOBS_IDLE,
        }
    }

    /// A background run that took so long has ended: what is in the background pauses. `range` is from where it
    /// works at all to where haste begins, in dirty blocks: the nearer to its end, the shorter.
    pub fn pause(&mut self, took_ns: u64, dirty: u64, range: Range<u64>, now: u64) {
        let (low, haste) = (range.start, range.end);
        let left = haste.saturating_sub(dirty).min(haste - low.min(haste));
        let span = haste.saturating_sub(low).max(1);
        let pause = u128::from(took_ns) * u128::from(PAUSE_MAX * left) / u128::from(span);
        self.pause_ns = now + pause.min(u128::from(BACKOFF_NS)) as u64;
    }

    /// Time has passed, and with it as many bytes may be written as a limit of `rate` a second gives.
    pub fn refill(&mut self, rate: u64, now: u64) {
        let elapsed = now.saturating_sub(self.refill_ns).min(1_000_000_000);
        self.refill_ns = now;
        let add = (u128::from(elapsed) * u128::from(rate) / 1_000_000_000) as i64;
        self.tokens = (self.tokens + add).min(rate as i64 / 4 + 1);
    }
}

/// Runs on their way at a time in haste, beside clients: the nearer to where writes have to wait (the end of
/// `range`, in dirty blocks; haste begins with it), the more.
pub(crate) fn hasty(dirty: u64, range: Range<u64>) -> usize {
    let span = range.end.saturating_sub(range.start).max(1);
    let over = dirty.saturating_sub(range.start).min(span);
    1 + (over * (JOBS_BUSY as u64 - 1) / span) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_waits_for_stands_back_while_clients_are_active() {
        let mut d = Destaging::default();
        assert_eq!(d.may_start(Need::None, false, 3, false, 0), 0);
        assert_eq!(d.may_start(Need::Background, false, 3, false, 0), JOBS_IDLE);
        assert_eq!(d.may_start(Need::Background, true, 3, false, 0), 1);
        d.pause(1000, 0, 10..20, 0);
        assert_eq!(d.pause_ns, 1000 * PAUSE_MAX);
        assert_eq!(d.may_start(Need::Background, true, 3, false, 0), 0);
        assert_eq!(d.may_start(Need::Background, true, 3, false, d.pause_ns), 1);
        assert_eq!(d.may_start(Need::Urgent, true, 3, false, 0), JOBS_BUSY);
        assert_eq!(d.may_start(Need::Asked, true, 3, false, 0), JOBS_ASKED);
        assert_eq!(d.may_start(Need::Asked, false, 3, false, 0), JOBS_BUSY);
        assert_eq!(d.may_start(Need::Haste, true, 3, false, 0), 3);
        assert_eq!(d.may_start(Need::Haste, false, 3, false, 0), JOBS_BUSY);
        // Near where writes would have to wait there is no pause.
        d.pause(1000, 15, 10..20, 0);
        assert_eq!(d.pause_ns, 1000 * PAUSE_MAX / 2);
        d.pause(1000, 20, 10..20, 0);
        assert_eq!(d.pause_ns, 0);
    }

    #[test]
    fn haste_grows_until_writes_would_have_to_wait() {
        let runs = [0, 100, 150, 199, 200, 300].map(|dirty| hasty(dirty, 100..200));
        assert_eq!(runs, [1, 1, 8, 15, JOBS_BUSY, JOBS_BUSY]);
        assert_eq!(hasty(7, 7..7), 1, "a pool without a span between");
    }

    #[test]
    fn what_was_written_in_this_run_is_durable_with_its_segments_last_batch() {
        let mut d = Destaging::default();
        d.note_batch(3, 10);
        d.note_batch(1, 11);
        d.note_batch(3, 12);
        assert_eq!(d.newest_of([1].into_iter()), 11);
        assert_eq!(d.newest_of([1, 3].into_iter()), 12);
        assert_eq!(d.newest_of([0, 2, 70].into_iter()), 0, "from before");
    }

    #[test]
    fn a_limit_holds_back_what_nobody_waits_for() {
        let mut d = Destaging {
            tokens: -1_000_000,
            ..Destaging::default()
        };
        d.refill(1_000_000, 500_000_000);
        assert_eq!(d.tokens, -500_000);
        assert_eq!(d.may_start(Need::Idle, false, 3, true, 0), 0);
        assert_eq!(d.may_start(Need::Urgent, false, 3, true, 0), JOBS_BUSY);
        d.refill(1_000_000, 10_000_000_000);
        assert_eq!(
            d.tokens, 250_001,
            "a pause gives no more than a quarter of a second"
        );
        assert_eq!(d.may_start(Need::Idle, false, 3, true, 0), JOBS_IDLE);
    }
}
