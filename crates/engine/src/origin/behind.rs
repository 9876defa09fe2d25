//! What may be written while an origin is further behind than it may be.
//!
//! Were nothing let in until the origin is in time again, a guest would stand still for as long as the origin takes for all that
//! waits: an origin that became slow with a thousand flushes waiting, for a minute. So a part of what the origin takes is let in: the
//! guest goes on, and what waits grows less all the same.
//!
//! An origin's time goes into epochs, as each costs it a flush, however few blocks it has. So one is let in for two that were taken,
//! with at most half their blocks. But one epoch may take an origin for minutes, so whoever has waited for as long as
//! the origin may be behind is let in as well, if the origin takes anything at all.

/// Epochs taken for each one that is let in.
const TAKEN_FOR_ONE: u32 = 2;
/// Blocks that may be let in for them, however small they are: 64 KiB, what a guest's file system writes with one flush. A
/// request goes in with [so many](crate::request) of its blocks as are appended at a time.
const LET_IN_MIN: u64 = 16;
/// Nobody is told of a write that waits less than this for the origin's first epoch.
const UNKNOWN_TOLD_NS: u64 = 1_000_000_000;

/// How far behind an origin is, and what that lets in.
#[derive(Clone, Debug, Default)]
pub(crate) struct Behind {
    /// Writes wait because the origin is further behind than it may be.
    late: bool,
    /// How often that was found when a write came. It may be over before anybody looks at whether it is late.
    waits: u64,
    /// Epochs that the origin has taken since something was let in.
    epochs: u32,
    /// Blocks that it has taken since.
    blocks: u64,
    /// Blocks that were let in for that.
    let_in: u64,
    /// When the last of them were let in, or since when it is late.
    since_ns: u64,
    /// Since when writes wait because nobody knows how long the origin takes; 0: they do not.
    unknown_ns: u64,
}

impl Behind {
    pub fn is_late(&self) -> bool {
        self.late
    }

    pub fn waits(&self) -> u64 {
        self.waits
    }

    /// A write came, and the origin is too far behind.
    pub fn found(&mut self, now: u64) {
        if !self.late {
            *self = Behind {
                late: true,
                waits: self.waits,
                since_ns: now,
                unknown_ns: self.unknown_ns,
                ..Behind::default()
            };
        }
        self.waits += 1;
    }

    /// A write came; does it wait because nobody knows how long the origin takes? True if that is so for so long that it is
    /// too far behind, whatever its age: the guest stands still.
    pub fn note_unknown(&mut self, unknown: bool, now: u64) -> bool {
        self.unknown_ns = match (unknown, self.unknown_ns) {
            (false, _) => 0,
            (true, 0) => now.max(1),
            (true, since) => since,
        };
        unknown && now.saturating_sub(self.unknown_ns) >= UNKNOWN_TOLD_NS
    }

    /// It is in time again.
    pub fn is_over(&mut self) {
        self.late = false;
    }

    /// The origin has taken a block, perhaps not durably.
    pub fn took_block(&mut self) {
        self.blocks += 1;
    }

    /// It has an epoch.
    pub fn took_epoch(&mut self) {
        self.epochs = self.epochs.saturating_add(1);
    }

    /// May something be written although the origin is further behind than `max_age_ns`?
    pub fn lets_in(&self, now: u64, max_age_ns: u64) -> bool {
        let has_waited = now.saturating_sub(self.since_ns) >= max_age_ns;
        let goes_on = self.blocks > 0 && has_waited;
        self.late && (self.let_in > 0 || self.epochs >= TAKEN_FOR_ONE || goes_on)
    }

    /// So many blocks were let in.
    pub fn note_let_in(&mut self, blocks: u64, now: u64) {
        self.let_in += blocks;
        self.since_ns = now;
        if self.let_in >= (self.blocks / u64::from(TAKEN_FOR_ONE)).max(LET_IN_MIN) {
            self.begin_again();
        }
    }

    /// What was let in is an epoch, and all that is let in for what the origin has taken so far.
    pub fn ended_epoch(&mut self) {
        if self.let_in > 0 {
            self.begin_again();
        }
    }

    fn begin_again(&mut self) {
        (self.epochs, self.blocks, self.let_in) = (0, 0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AGE: u64 = 1000;

    fn late() -> Behind {
        let mut behind = Behind::default();
        assert!(!behind.lets_in(5 * AGE, AGE));
        behind.found(10);
        assert!(behind.is_late() && !behind.lets_in(10, AGE));
        behind
    }

    #[test]
    fn one_epoch_is_let_in_for_two() {
        let mut behind = late();
        let mut let_in = 0;
        for _ in 0..40 {
            behind.took_block();
            behind.took_epoch();
            // A guest that flushes whatever it writes.
            while behind.lets_in(20, AGE) {
                behind.note_let_in(1, 20);
                behind.ended_epoch();
                let_in += 1;
            }
        }
        assert_eq!(let_in, 20);
    }

    #[test]
    fn of_a_guest_that_does_not_flush_half_the_blocks_are_let_in() {
        let mut behind = late();
        let mut let_in = 0;
        for _ in 0..10 {
            (0..1000).for_each(|_| behind.took_block());
            behind.took_epoch();
            while behind.lets_in(20, AGE) {
                behind.note_let_in(10, 20);
                let_in += 10;
            }
        }
        assert_eq!(let_in, 5000);
    }

    #[test]
    fn nobody_waits_for_a_long_epoch_while_the_origin_goes_on() {
        let mut behind = late();
        assert!(!behind.lets_in(20 * AGE, AGE), "it takes nothing");
        behind.took_block();
        assert!(!behind.lets_in(AGE, AGE) && behind.lets_in(10 + AGE, AGE));
        // All that a guest flushes together.
        for _ in 1..LET_IN_MIN {
            behind.note_let_in(1, 10 + AGE);
            assert!(behind.lets_in(10 + AGE, AGE));
        }
        behind.ended_epoch();
        behind.took_block();
        assert!(!behind.lets_in(20 + AGE, AGE) && behind.lets_in(10 + 2 * AGE, AGE));
    }

    #[test]
    fn a_guest_that_stands_still_is_told_of_though_nothing_is_old() {
        let mut behind = Behind::default();
        assert!(!behind.note_unknown(true, 7));
        assert!(!behind.note_unknown(true, 6 + UNKNOWN_TOLD_NS));
        assert!(behind.note_unknown(true, 7 + UNKNOWN_TOLD_NS));
        behind.found(7 + UNKNOWN_TOLD_NS);
        assert!(behind.note_unknown(true, 8 + UNKNOWN_TOLD_NS), "it goes on");
        // The origin has taken something, and it begins anew.
        assert!(!behind.note_unknown(false, 9 + UNKNOWN_TOLD_NS));
        assert!(!behind.note_unknown(true, 10 + UNKNOWN_TOLD_NS));
    }

    #[test]
    fn what_was_taken_before_lets_nobody_in() {
        let mut behind = Behind::default();
        behind.took_block();
        behind.took_epoch();
        behind.took_epoch();
        behind.found(10);
        assert!(!behind.lets_in(10, AGE));
        behind.took_block();
        behind.is_over();
        assert!(!behind.lets_in(20 * AGE, AGE));
        behind.found(21 * AGE);
        behind.found(22 * AGE);
        assert!(!behind.lets_in(22 * AGE, AGE));
        assert_eq!(behind.waits(), 3);
    }
}
