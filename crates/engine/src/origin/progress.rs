//! How far destaging to one origin is.
//!
//! What is dirty is written to the origin in runs; what was written waits for a flush, which covers many; and
//! only what a flush covered is called clean. In between, any of it may be written again, zeroed, moved
//! or let go of, and then the flush says nothing of it.

use crate::blocks::blockset::BlockSet;
use crate::blocks::runset::RunSet;
use crate::origin::trouble::Trouble;
use hearth_io::IoError;

/// Runs written before the origin is flushed.
const WRITTEN_MAX: usize = 1024;
/// The same where there is time for more to come. Calling them clean takes the engine's lock for a while.
const GATHERED_MAX: usize = 2048;
/// While clients are active, what was written waits so long for more that the same flush may cover: on a device that
/// they share, every flush holds them up, and nobody waits for this one. Not longer: until then
/// what was written stays pinned on flash, and a crash repeats it.
const GATHER_NS: u64 = 300_000_000;
/// An origin that takes so long over a write or a flush of the destager hangs. Until it answers, what it
/// was given is dirty like the rest, and eviction need not wait for it.
pub(crate) const HANGS_NS: u64 = 10_000_000_000;
/// First wait after the origin failed a write; doubles up to 32 times this.
pub(crate) const BACKOFF_NS: u64 = 1_000_000_000;

/// A block written to the origin, waiting for the flush that lets it be called clean.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Written {
    Data { block: u64, slot: u32 },
    Zero { block: u64, count: u64 },
}

/// Destage state of one origin.
#[derive(Debug, Default)]
pub(crate) struct Destage {
    /// Where the sweep in disk order goes on.
    pub cursor: u64,
    /// Where a client made the origin read since the last run was begun: its arm is there, if it has one.
    pub near: Option<u64>,
    /// The origin answered a client's read since the last run was begun.
    pub let_by: bool,
    /// When the last run was begun.
    pub begun_ns: u64,
    /// Ranges being written to the origin: (start, end, job).
    pub busy: Vec<(u64, u64, usize)>,
    /// Written, not yet flushed.
    pub written: Vec<Written>,
    /// Zeros in `written` that were written and zeroed again since: the origin may hold what was
    /// between, so the entry says nothing about them.
    pub zero_void: RunSet,
    /// Zeros of which the flush in flight says nothing, though an entry that it covers names them: since it was
    /// sent, the origin was told of them anew.
    pub zero_anew: RunSet,
    /// Since when the oldest of `written` that no flush covers has been waiting.
    pub since_ns: u64,
    /// Of `written`, how many the flush in flight covers, and since when.
    pub covered: usize,
    pub covered_ns: u64,
    /// The origin has not answered for long, and nothing on flash waits for it.
    pub hangs: bool,
    /// Do not try before this time (the origin failed).
    pub not_before_ns: u64,
    /// Failures in a row.
    pub failures: u32,
    /// What goes wrong, since the origin last kept what it was given.
    pub trouble: Option<Trouble>,
    /// Blocks somebody waits for.
    pub urgent: BlockSet,
}

impl Destage {
    /// What zeros in the range were told to the origin does not count: something came after them.
    pub fn void_zeros(&mut self, start: u64, end: u64) {
        for w in &self.written {
            if let Written::Zero { block, count } = *w {
                self.zero_void
                    .insert_range(start.max(block), end.min(block + count));
            }
        }
    }

    /// The origin took zeros in the range: whatever was void there, it was so of what was told before. For the flush in
    /// flight it still is: that was sent before.
    pub fn told_zeros(&mut self, block: u64, count: u64, now: u64) {
        let (start, end) = (block, block + count);
        for w in &self.written[..self.covered] {
            if let Written::Zero { block, count } = *w {
                let (from, to) = (start.max(block), end.min(block + count));
                for (at, count) in self.zero_void.runs_within(from, to.max(from)) {
                    self.zero_anew.insert_range(at, at + count);
                }
            }
        }
        self.zero_void.remove_range(start, end);
        self.push(Written::Zero { block, count }, now);
    }

    /// Takes out of a set those zeros in a range of which a flush that has ended says nothing.
    pub fn take_void(&self, zeros: &mut RunSet, start: u64, end: u64) {
        for void in [&self.zero_void, &self.zero_anew] {
            for (block, count) in void.runs_within(start, end) {
                zeros.remove_range(block, block + count);
            }
        }
    }

    /// The origin (or flash) failed: nothing is tried for some time.
    pub fn back_off(&mut self, now: u64) {
        self.not_before_ns = now + (BACKOFF_NS << self.failures.min(5));
        self.failures += 1;
        self.hangs = false;
        self.urgent.clear();
    }

    /// The origin has taken a block, or a run of zeros.
    pub fn push(&mut self, written: Written, now: u64) {
        if self.written.len() == self.covered {
            self.since_ns = now;
        }
        self.written.push(written);
    }

    /// When a flush is due only because what was written has waited for long enough, if it waits for nothing
    /// else.
    pub fn gathers_until(&self) -> Option<u64> {
        let waits = self.covered == 0 && self.busy.is_empty() && !self.written.is_empty();
        waits.then_some(self.since_ns + GATHER_NS)
    }

    /// Is a flush of the origin due, because enough was written, nothing more is coming, or it is
    /// `awaited`? Then it covers all that was written so far. If it `may_gather`, there is time for more to
    /// come.
    pub fn cover(&mut self, awaited: bool, may_gather: bool, now: u64) -> bool {
        let enough = match may_gather {
            true => self.written.len() >= GATHERED_MAX,
            false => self.written.len() >= WRITTEN_MAX,
        };
        let early = may_gather && self.gathers_until().is_some_and(|until| now < until);
        let due = awaited || enough || self.busy.is_empty() && !early;
        if self.written.is_empty() || self.covered > 0 || !due {
            return false;
        }
        self.covered = self.written.len();
        self.covered_ns = now;
        true
    }

    /// A run could not be written back, or a flush failed.
    pub fn note_trouble(&mut self, error: Option<IoError>, now: u64) {
        let trouble = self.trouble.get_or_insert(Trouble {
            since_ns: now,
            failures: 0,
            error,
        });
        trouble.failures += 1;
        trouble.error = error.or(trouble.error);
    }

    /// True if a run that is being written to the origin touches the range.
    pub fn is_writing(&self, start: u64, end: u64) -> bool {
        self.busy.iter().any(|(s, e, _)| *s < end && start < *e)
    }

    /// True if the origin was given operations that it has not answered yet.
    pub fn is_given(&self) -> bool {
        !self.busy.is_empty() || self.covered > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_covers_what_was_written_and_the_next_one_waits_for_it() {
        let mut d = Destage::default();
        assert!(!d.cover(true, false, 1), "nothing was written");
        d.busy.push((8, 16, 0));
        d.push(Written::Data { block: 1, slot: 1 }, 1);
        assert!(
            !d.cover(false, false, 1),
            "more is coming, and nobody waits"
        );
        assert!(d.cover(true, false, 1));
        d.push(Written::Data { block: 2, slot: 2 }, 1);
        assert!(!d.cover(true, false, 2), "one at a time");
        assert_eq!((d.covered, d.covered_ns), (1, 1));
        d.covered = 0;
        d.busy.clear();
        assert!(d.cover(false, false, 3));
        assert_eq!(d.covered, 2);
    }

    #[test]
    fn beside_clients_a_flush_waits_for_more_but_not_for_long() {
        let data = |block: u64| Written::Data {
            block,
            slot: block as u32,
        };
        let mut d = Destage::default();
        d.push(data(1), 5);
        d.push(data(2), 9);
        assert_eq!(d.gathers_until(), Some(5 + GATHER_NS));
        assert!(!d.cover(false, true, 4 + GATHER_NS));
        assert!(d.cover(false, true, 5 + GATHER_NS), "long enough");
        // What comes while it is under way has a time of its own.
        d.push(data(3), 6 + GATHER_NS);
        d.written.drain(..2);
        d.covered = 0;
        assert_eq!(d.gathers_until(), Some(6 + 2 * GATHER_NS));
        assert!(!d.cover(false, true, 7 + GATHER_NS));
        for block in 4..3 + GATHERED_MAX as u64 {
            d.push(data(block), 7 + GATHER_NS);
        }
        assert!(d.cover(false, true, 8 + GATHER_NS), "enough");
        assert_eq!((d.covered, d.gathers_until()), (GATHERED_MAX, None));
        d.covered = 0;
        assert!(d.cover(true, true, 8 + GATHER_NS), "somebody waits");
    }

    #[test]
    fn an_origin_that_fails_again_and_again_is_asked_less_and_less_often() {
        let mut d = Destage::default();
        let waits: Vec<u64> = (0..8)
            .map(|_| {
                d.back_off(100);
                (d.not_before_ns - 100) / BACKOFF_NS
            })
            .collect();
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 32, 32]);
    }
}
