//! Rules of a mirror that can be broken on purpose, to see that a simulation notices. They exist in tests and with the
//! feature `faults` only, never in a release.

use std::cell::Cell;

/// A rule broken on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A write goes out before the notes say what it touches.
    WriteBeforeIntent,
    /// A write is answered before the notes say which leg missed it.
    StampAfterWrite,
    /// A region is forgotten that the legs do not have durably.
    ClearBeforeFlush,
    /// A leg that is not current is used because it is the only one there.
    StaleBelieved,
    /// A leg comes back while a write of before may still arrive.
    ReturnsWithGhosts,
    /// Where legs may differ, any of them is read.
    ReadsFlip,
    /// What is read where legs may differ is not copied first.
    PinSkipped,
    /// A region that is being written is not copied.
    SkipTouched,
    /// A copy does not hold its range.
    CopyUnlocked,
    /// A repair of what could not be read does not hold its range, so that it may write old data over new.
    RepairUnlocked,
    /// What was copied is not flushed before it counts.
    JoinUnflushed,
    /// What legs hold behind their old end is taken for the same.
    GrownTaken,
    /// What is compared is not held against writes.
    CheckUnlocked,
    /// A leg is compared where it lacks something.
    CheckBehind,
    /// What a leg cannot read is not written again.
    CheckSkipsErrors,
    /// A place counts as repaired before it is durable.
    CheckUnflushed,
    /// A cached copy that was read from a leg decides between legs.
    CheckTrustsReads,
    /// What was damaged on its way is taken for what a leg holds.
    CheckOneLook,
    /// What is cached stays, though a leg with something else was preferred.
    CheckKeepsCopies,
    /// What is undecided is written to a leg that cannot read its own.
    CheckGuesses,
    /// What was written last is remembered before it is on all legs.
    MarksEarly,
    /// A leg that lacks what was written last is believed.
    OldCopyBelieved,
}

impl Fault {
    /// Those that show under an engine soon enough; the mirror's own simulation finds the others.
    pub const UNDER_AN_ENGINE: [Fault; 8] = [
        Fault::WriteBeforeIntent,
        Fault::ClearBeforeFlush,
        Fault::StaleBelieved,
        Fault::ReturnsWithGhosts,
        Fault::ReadsFlip,
        Fault::PinSkipped,
        Fault::SkipTouched,
        Fault::JoinUnflushed,
    ];
}

thread_local! {
    static BELIEVING: Cell<bool> = const { Cell::new(false) };
    static FORCED: Cell<Option<Fault>> = const { Cell::new(None) };
}

/// Whether [`Fault::StaleBelieved`] is in force on this thread: it is asked before there is a machine.
pub fn believe(on: bool) {
    BELIEVING.set(on);
}

/// The fault in force on this thread, for rules that are asked without a machine.
pub fn force(fault: Option<Fault>) {
    FORCED.set(fault);
}

pub(crate) fn is_forced(fault: Fault) -> bool {
    FORCED.get() == Some(fault)
}

pub(crate) fn is_believing() -> bool {
    BELIEVING.get()
}
