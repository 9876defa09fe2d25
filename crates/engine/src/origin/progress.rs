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
    /// Where a client last made the origin read: its arm is there, if it has one.
    pub near: u64,
    /// Ranges being written to the origin: (start, end, job).
    pub busy: Vec<(u64, u64, usize)>,
    /// Written, not yet flushed.
    pub written: Vec<Written>,
    /// Zeros in `written` that were written and zeroed again since: the origin may hold what was
    /// between, so the entry says nothing about them.
    pub zero_void: RunSet,
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

    /// The origin (or flash) failed: nothing is tried for some time.
    pub fn back_off(&mut self, now: u64) {
        self.not_before_ns = now + (BACKOFF_NS << self.failures.min(5));
        self.failures += 1;
        self.hangs = false;
        self.urgent.clear();
    }

    /// Is a flush of the origin due, because enough was written, nothing more is coming, or it is
    /// `awaited`? Then it covers all that was written so far.
    pub fn cover(&mut self, awaited: bool, now: u64) -> bool {
        let due = awaited || self.written.len() >= WRITTEN_MAX || self.busy.is_empty();
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
        assert!(!d.cover(true, 1), "nothing was written");
        d.busy.push((8, 16, 0));
        d.written.push(Written::Data { block: 1, slot: 1 });
        assert!(!d.cover(false, 1), "more is coming, and nobody waits");
        assert!(d.cover(true, 1));
        d.written.push(Written::Data { block: 2, slot: 2 });
        assert!(!d.cover(true, 2), "one at a time");
        assert_eq!((d.covered, d.covered_ns), (1, 1));
        d.covered = 0;
        d.busy.clear();
        assert!(d.cover(false, 3));
        assert_eq!(d.covered, 2);
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
