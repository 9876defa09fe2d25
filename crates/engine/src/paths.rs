//! Which of the rare ways through the engine were taken.
//!
//! A simulation that never gets somewhere proves nothing about that place, and from outside nobody sees
//! whether it did. So places that are hard to reach are marked, and the simulation counts. The marks cost
//! nothing without the `paths` feature, which only the simulation turns on.
//!
//! They are counted per thread, not per engine: a world runs on one thread, and a mark needs nothing
//! at hand but its name.

#[cfg(feature = "paths")]
use std::cell::Cell;

macro_rules! paths {
    ($($path:ident: $name:literal,)*) => {
        /// A place worth reaching.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Path {
            $(#[doc = $name] $path,)*
        }

        impl Path {
            /// All there are, in the order of their numbers.
            pub const ALL: &'static [Path] = &[$(Path::$path,)*];

            /// What happens there, in words.
            pub fn name(self) -> &'static str {
                match self {
                    $(Path::$path => $name,)*
                }
            }
        }
    };
}

paths! {
    CopiesUnverified: "clean copies answer no reads until they were compared with the origin",
    CopiesVerified: "clean copies were compared with the origin and answer reads again",
    CopiesDropped: "clean copies of a served disk are void because its origin changed",
    CleanFloorRaised: "clean copies below the floor are given up so that intents are needless",
    CleanFloorApplied: "a start drops a clean copy because it lies below the floor",
    OldestWaitsNoMore: "the oldest segment of a starved log is empty, and goes without its records",
    IntentGivenUp: "an intent of a starved log is given up",
    BatchSentAgain: "a batch that failed is sent again",
    BatchAgainInPlace: "a batch that failed is written to the same place again, for there is no other",
    ResentBatchFound: "a start finds the first attempt of a batch that was sent again",
    DeviceEmptied: "a device is emptied to be taken out",
    SegmentsLent: "all that is free lies in what is to be emptied, and some of it stays in use until more is",
    AreaSetAside: "segments are set aside for something beside the log",
    AreaGivenBack: "an area beside the log is given back",
    SegmentBad: "a segment that took no batch is left alone",
    FlashBroken: "flash is given up because it failed",
    FlashUseless: "flash is given up because it does not hold what was written to it",
    FlashUnwritable: "flash is given up because it takes no more writes",
    FailureUnnoted: "flash takes no note that it was given up",
    WriteDiverted: "a write that flash was to take goes to the origin because flash was given up",
    ReadElsewhere: "a read begins anew in other memory, for a device may still write to what it had",
    DirtyOverdue: "a read of a dirty block fails because flash does not answer in time",
    BlockLost: "a dirty block is listed as lost",
    LostOnSoundFlash: "sound flash refused a dirty block so often that it is listed as lost",
    LostMoved: "a lost block is moved with a checksum that no read accepts",
    LostInCheckpoint: "a checkpoint holds lost blocks",
    LostFromCheckpoint: "a start finds lost blocks in a checkpoint",
    LossSuperseded: "a write past the cache takes the place of a lost block",
    LossAcceptedSound: "losses are accepted while flash is sound",
    LossAcceptedFailed: "losses are accepted after flash was given up",
    LossAcceptedBehindWrite: "a loss is accepted while a newer write of the block is on its way",
    RottenDestaged: "the destager meets a rotten block",
    RottenMoved: "eviction meets a rotten dirty block",
    WrittenDoubted: "what was destaged before is doubted, because the origin refused a write there or hangs",
    HungLetGo: "eviction does not wait for an origin that hangs",
    DestagedBehindWrite: "a destaged block does not become clean because a newer write is on its way",
    StuckLetGo: "a destaged block of a starved log is dropped although a newer write is on its way",
    FillVoided: "a fill that a write overtook is voided once it is on flash",
    QueuedRead: "a read is answered from a copy on its way to flash",
    ItemSplit: "an item is cut in two between batches",
    ZerosWait: "a request waits because there are too many runs of zeros",
    ZerosLoggedAgain: "runs of zeros are logged again before their segment goes",
    IntentLoggedAgain: "an intent is logged again before its segment goes",
    ToldLoggedAgain: "it is logged again that an origin has zeros, before the segment that says so goes",
    CleanLoggedAgain: "it is logged again that blocks are clean, before the segment that says so goes",
    VoidLoggedAgain: "it is logged again that copies are void, before the segment that says so goes",
    SegmentClean: "the map says that a segment is clean",
    SegmentPutOff: "a segment says so much again that another is freed before it",
    SegmentHeld: "a segment is not freed because that would write almost as much as it gives",
    SegmentAhead: "a segment in which nothing lives is freed before room is short",
    OldestGoes: "the oldest segment is freed because no other is worth it",
    SegmentUnreadable: "a segment is not freed because nobody can read what it says",
    RelogWaitsForWrite: "a segment stays because something newer than what it says is on its way",
    UnattachedKept: "eviction moves dirty blocks of a disk that is not attached",
    OwnBlocksDropped: "a disk at its maximum drops blocks of its own",
    Refused: "a request is refused",
    Reattached: "a known disk is attached",
    Detached: "a disk is detached",
    Removed: "a disk is removed",
    CheckpointRead: "a start reads a checkpoint",
    CheckpointLeftOut: "a clean stop writes no checkpoint because an origin may differ",
    SegmentDiscarded: "a start discards a segment, or the end of one",
    SummaryDoubted: "a start looks at batches one by one although they have a summary",
    IntentRestored: "a start finds an open intent",
    HeadResumed: "a start goes on in the segment that was being written",
    ScratchDropped: "a start drops what is left of a scratch disk",
    OrderBegun: "a disk becomes ordered",
    OrderMixed: "an ordered disk goes out of order",
    RunOfNoOrder: "a run waits for a mark that the log will never have",
    VersionLost: "the newest version of a block of an ordered disk is lost",
    OrderGivenUp: "a starved log has no room for the marks of ordered disks",
    EpochDestaged: "an origin has an epoch of an ordered disk",
    VersionDestaged: "an origin is given a version of a block that is not the newest",
    OrderLate: "writes wait because an origin is too far behind",
    OrderLetIn: "something is written although an origin is too far behind",
    OrderWaits: "writes wait because an ordered disk holds too many segments",
    ZerosAsData: "zeros of an ordered disk are written as data",
    ZerosInOrder: "zeros of an ordered disk wait until its origin has what came before",
    OrderRestored: "a start finds epochs of an ordered disk in the log",
    OrderFromCheckpoint: "a start finds epochs of an ordered disk in a checkpoint",
    MarkLoggedAgain: "the mark of an ordered disk is logged again before its segment goes",
    MovedToOrigin: "a disk that lived on flash is given an origin while it is served",
    MoveWaitsForDiscard: "it has to wait until a discard is in the index",
    MoveDone: "its origin has everything",
    Held: "a disk with an origin is held on flash",
    LetGo: "its origin is to have it after all",
    KeptOnFlash: "what its origin has is put on flash as its own",
    MovedToFlash: "it lives on flash alone from then on",
    ZerosOfHomeless: "runs of zeros of a disk that lives on flash become records that nothing is there",
    HomelessMoved: "eviction moves blocks of a disk that lives on flash",
    DeviceLost: "a device is lost, and the others have everything",
    WentOnWithout: "a pool is closed to go on without a device that failed",
    LetGoWithout: "and lets go of what is cached of a disk whose origin fails",
    OpenedWithout: "a start drops clean copies that were on a device which is gone",
    BaseRead: "after a crash a start begins with what was known when a device was left behind",
    BelowFloor: "a start reads a log, and leaves out what lies below its floor",
    ReadFromOther: "what one device does not give back is read from another",
    FirstHalfMended: "a start gives the first half of a segment what the second has, where the first is damaged",
    HalfMended: "a start gives the second half of a segment what the first has",
    HalfBegins: "a start goes on with a segment whose beginning only the second half has",
    HalfWiped: "a start wipes what only the second half of a segment has",
    CleanGone: "clean blocks that lay on a lost device only are dropped",
}

#[cfg(feature = "paths")]
thread_local! {
    static TAKEN: [Cell<u64>; Path::ALL.len()] = const { [const { Cell::new(0) }; Path::ALL.len()] };
}

/// Counts one.
#[inline]
pub(crate) fn took(path: Path) {
    #[cfg(feature = "paths")]
    TAKEN.with(|all| all[path as usize].set(all[path as usize].get() + 1));
    #[cfg(not(feature = "paths"))]
    let _ = path;
}

/// How often each was taken on this thread since this was last asked, in the order of [`Path::ALL`].
#[cfg(feature = "paths")]
pub fn taken() -> [u64; Path::ALL.len()] {
    TAKEN.with(|all| std::array::from_fn(|i| all[i].take()))
}
