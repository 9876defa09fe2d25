//! Deliberate faults for the mutation check: each breaks one rule of the data path, and the
//! simulation must notice. They exist only with the `faults` feature, never in a release.

/// One broken rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Give the origin of an ordered disk what is of a later epoch.
    EpochEarly,
    /// Go on to the next epoch before the origin has the last one durably.
    EpochUnflushed,
    /// Go on to the next epoch before the log says that the origin has the last one.
    EpochUnmarked,
    /// Tell that the origin of an ordered disk has everything up to now.
    OrderToldEarly,
    /// Do not end an epoch with a write that was to be durable.
    FuaEndsNothing,
    /// Drop blocks of a disk that lives on flash as if an origin had them.
    EvictKept,
    /// Answer a flush of a disk that lives on flash although its discards are not durable.
    FlushForgetsDiscards,
    /// Drop what is dirty on a device that is emptied as if it were clean.
    EmptyForgetsDirty,
    /// After a device was lost, believe what the log on the others says of the time before: an older copy there, although what took its
    /// place was on the lost one.
    BelieveBelowFloor,
    /// Free what a device that is emptied holds before it is durable elsewhere.
    EmptyForgetsFlush,
    /// Use an area's segments for the log before the area is given back durably.
    AreaUsedEarly,
    /// Give an area back with what stands in it.
    AreaUnwiped,
    /// Take for the log what stands in an area.
    AreaRead,
    /// Drop what is dirty with the clean copies that are not as an origin's replicas are.
    DropUnlikeDirty,
    /// Keep what a crash left of a scratch disk.
    KeepScratch,
    /// Answer a flush without flushing the flash device.
    SkipDeviceFlush,
    /// Write the origin without recording the intent first.
    DropIntent,
    /// Serve flash reads without looking at the checksum.
    SkipChecksum,
    /// Put a miss on flash although a write overtook it.
    CacheRacedMiss,
    /// Replay segments newest first.
    ReplayBackwards,
    /// Reuse a segment before the record that frees it is durable.
    ReuseEarly,
    /// Call destaged blocks clean before the origin was flushed.
    CleanBeforeOriginFlush,
    /// Reuse a segment before the map says that it is free.
    ReuseBeforeMap,
    /// Reuse a segment when one copy of the map says that it is free.
    MapOneCopy,
    /// Leave heads out of the map.
    MapForgetsHead,
    /// Say in the map that what is only written is durable.
    MapAhead,
    /// Say that a segment is free before what takes the place of its content is durable.
    FreeUndurable,
    /// Believe after a crash segments that the map calls free.
    BelieveFreed,
    /// Free a segment although what it says would have to be written again as a whole.
    FreeForNothing,
    /// Free a segment without logging again that older copies elsewhere are void.
    SkipRelogVoid,
    /// Free a segment without logging again that copies elsewhere are clean.
    SkipRelogClean,
    /// Free a segment without logging again that the origin has zeros.
    SkipRelogTold,
    /// Log something of a segment again behind newer records.
    RelogBehindNewer,
    /// Answer a write before its batch is on flash.
    AckEarly,
    /// Forget to log that blocks dropped by a write are void.
    SkipDropRecord,
    /// Believe batches after the last durable one without checking their data.
    TrustUnverifiedTail,
    /// Answer FUA writes without a flush.
    IgnoreFua,
    /// Do not hold the range of a partial write.
    SkipRangeLock,
    /// Leave what a write replaces in the RAM stage.
    StageForgetsNot,
    /// Keep what was read ahead although a write overtook it.
    KeepRacedPrefetch,
    /// Do not look for something to destage behind a lost block.
    WaitBehindLost,
    /// Keep using flash that does not hold what was written to it.
    KeepUseless,
    /// Cache a disk again that was off without closing the heads whose records of it do not count.
    OffReturnsInHead,
    /// Do not list what a failed device no longer gives back.
    HideUnreadable,
    /// Wait for a free segment when the log has no room for the record that would free one.
    StarveForever,
    /// Answer a read from a copy on its way to flash that a write has replaced.
    ServeVoidedCopy,
    /// Answer reads from copies that were on their way to flash when it was given up.
    KeepGivenUpCopies,
    /// Append a copy of a block that is on flash or on its way there.
    AppendTwice,
    /// Let a disk grow before the copies of its padded last block are void on flash.
    GrowEarly,
    /// Do not log that a cancelled fill is void.
    SkipVoidFill,
    /// Count an item that was cut in two as applied with its first part.
    SplitCountsEarly,
    /// Apply a batch although one before it is not on flash yet.
    ApplyOutOfOrder,
    /// Say in a batch that what is only written is durable.
    ClaimUndurable,
    /// Say in a summary that its own batches are durable.
    SummaryClaimsItself,
    /// Point the index at a moved copy although a newer one was mapped meanwhile.
    MoveOverNewer,
    /// Leave copies in the index that a run of zeros replaces.
    ZeroKeepsCopies,
    /// Leave a block in the set of zeros although it was written since.
    WriteKeepsZeros,
    /// Put a disk on no list of those with work when it becomes dirty.
    OverlookDirty,
    /// Write past the cache without a record although evicted copies are still on flash.
    ForgetEvictedCopies,
    /// Write past the cache without a record although a fill is on its way to flash.
    ForgetCancelledFills,
    /// Leave the copy in the index that a write past the cache replaced.
    KeepOverwritten,
    /// Answer FUA writes past the cache without a flush of the origin.
    FuaLeavesOriginVolatile,
    /// Write the origin past newer data on flash.
    WritePastDirty,
    /// Write the origin past the cache while the destager writes the same blocks.
    WritePastDestaging,
    /// Write the origin past the cache before it is durable that the blocks are clean.
    WritePastUndurablyClean,
    /// Write without an intent with the cache off, though evicted copies are still on flash.
    OffForgetsEvicted,
    /// Write without an intent with the cache off, before it is durable that copies are void.
    OffForgetsDropped,
    /// Free a segment without logging the open intents it holds again.
    SkipRelogIntents,
    /// Free a segment without logging the runs of zeros it holds again.
    SkipRelogZeros,
    /// Append a moved copy behind a newer record.
    MoveSuperseded,
    /// Move a rotten copy with a checksum that makes it look sound.
    ResealRot,
    /// Evict dirty copies like clean ones.
    EvictDirty,
    /// Free a segment while reads of it are in flight.
    FreePinned,
    /// Log that a copy is void although a newer record is in the queue.
    DropBehindNewer,
    /// Write to the origin what is not durable on flash.
    DestageUndurable,
    /// Write rotten blocks to the origin.
    DestageRot,
    /// Call a block clean behind a newer record of it.
    CleanSuperseded,
    /// Call a block clean although it is not the one that was destaged.
    CleanMoved,
    /// Call zeros told behind a newer record of them.
    ///
    /// Breaks nothing. A block is among the zeros that are told as long as no newer write of it was applied, so
    /// at most one newer record of it is queued: a range has one writer at a time. Is that one data, a replay
    /// takes the block out of the zeros before the record that would do so again; is it zeros, the origin has
    /// those durably, and nothing was written in between.
    ZerosToldSuperseded,
    /// Call zeros told that were written and zeroed again since.
    VoidZerosCount,
    /// Take a write of the destager that failed for done.
    IgnoreDestageError,
    /// Count as durable what was written while the flush of flash was in flight.
    FlushCoversLater,
    /// Count as durable what was written while the flush of an origin was in flight.
    OriginFlushCoversLater,
    /// Take a flush of an origin that failed for done.
    IgnoreOriginFlushError,
    /// Take a flush of flash that failed for done.
    IgnoreFlashFlushError,
    /// Answer a flush without flushing the origin.
    FlushSkipsOrigin,
    /// Answer a flush although what it covers is on flash that failed.
    PromiseBroken,
    /// Write the origin before the intent is durable.
    IntentUnawaited,
    /// Record only the first of the regions that a write touches.
    IntentOneRegion,
    /// Close an intent before the origin was flushed.
    CloseUnflushed,
    /// Close an intent while a write of its region is under way.
    CloseInUse,
    /// Believe clean copies after a crash although their region was being written.
    TrustIntentRegions,
    /// Do not log after a crash that copies in regions being written are void.
    SkipRestoredVoid,
    /// Replay the first attempt of batches that were sent again.
    PlayTwice,
    /// Replay what lies behind a hole in the log.
    ReplayPastGap,
    /// Believe the summary of a segment that holds newer batches.
    TrustOldSummary,
    /// Take batches of an earlier use of the segment for the ones that follow.
    WalkStrangers,
    /// Take the batches of an earlier use of a segment for those its summary tells of.
    KeepStrangers,
    /// Ignore after a crash that copies are void.
    ReplayNoDrops,
    /// Ignore after a crash that origins were told of zeros.
    ReplayNoZerosTold,
    /// Ignore after a crash that blocks became clean.
    ReplayNoCleaned,
    /// Close all intents of all disks when one is closed.
    CloseAllIntents,
    /// Believe clean copies below the floor.
    IgnoreCleanFloor,
    /// Give intents up without raising the floor of clean copies.
    NoCleanFloor,
    /// List a block as lost that sound flash refused once.
    LoseTooSoon,
    /// Free a segment below the floor when only one copy of the superblock says so.
    RescueOneCopy,
    /// Send batches that failed again with new numbers.
    ResendRenumbered,
    /// Read a lost block from the origin.
    ServeLost,
    /// Take a rotten dirty block for a clean one, and read the origin.
    ForgetRotten,
    /// Cache what an origin may lose again in a power cut.
    CacheUnguarded,
    /// Take an origin of unknown state for one that was flushed.
    TrustUnknownOrigin,
    /// Remove a disk without closing the segment its records are in.
    ForgetInHead,
    /// Leave a pool marked as cleanly stopped while it is used.
    StayClean,
    /// Say after a crash that what was found is durable, before it is.
    SealUnflushed,
    /// Leave on flash what a recovery did not accept.
    SkipWipe,
    /// Leave behind the last batch that counts what stands there.
    SkipCut,
    /// Play what a closed segment says in one piece, whatever of other segments came between.
    ClosedInOnePiece,
    /// Play batches of two segments that follow one another in the wrong order.
    HeadsSwapped,
    /// Do not say which batch is sent again.
    AgainUntold,
    /// Give segments after a crash numbers that were given before.
    RepeatNumbers,
    /// Let a disk grow while its odd last block is dirty or on its way to the origin.
    GrowWhileDirty,
    /// Leave runs of zeros out of the checkpoint.
    CheckpointNoZeros,
    /// Leave out of the checkpoint which segment copies were evicted from.
    CheckpointNoEviction,
    /// Say in the last summary before the checkpoint that all is durable, before it is.
    CloseUnflushedHead,
    /// Destage what was dirty on flash that was given up before that is noted.
    DestageUnnoted,
    /// Leave a dirty block that goes among those its segment counts.
    DirtyStaysCounted,
    /// Leave a block that is dropped among those its disk counts.
    CachedStaysCounted,
    /// Leave segments whose summaries are never written pinned when flash is given up.
    GivenUpStaysPinned,
    /// Of several flash devices flush one.
    FlushOneDevice,
    /// Call the log flushed when the first of its devices is.
    FlushEndsEarly,
    /// Leave out that a device failed to be flushed.
    FlushForgetsOne,
    /// Where everything is there twice, flush one half.
    SecondHalfUnflushed,
    /// Go on without a device before it is durable that it is lost.
    LossUnnoted,
    /// Leave the halves of a segment as a crash left them.
    HalvesUnmended,
    /// Walk one half of a segment after a crash, whatever the other has.
    OneHalfWalked,
    /// What only the half has that is not read otherwise was promised to nobody, the beginning of a segment, too.
    BeginningOfOne,
    /// Where clean blocks are there once, write what is dirty to one half only, too.
    DirtyOnce,
    /// Where clean blocks are there once, end the log after a crash at a batch of which one is not there.
    CleanDecides,
    /// Drop clean blocks that went with a device before it is durable that it is lost.
    GoneEarly,
    /// Believe clean blocks that were on a lost device in the one that took its place.
    BelieveBehind,
    /// Answer reads from clean copies that were not compared with an origin that may have changed.
    ServeUnverified,
    /// Take the clean copies of a disk for verified when it is attached.
    AttachVerifies,
    /// Keep clean copies that were not compared because a write held their blocks.
    KeepUncompared,
    /// Do not log that clean copies which differ from the origin are void.
    DropUnrecorded,
}

impl Fault {
    /// Those that random worlds catch.
    pub const BY_WORLDS: [Fault; 99] = [
        Fault::ServeVoidedCopy,
        Fault::KeepGivenUpCopies,
        Fault::ServeUnverified,
        Fault::AttachVerifies,
        Fault::DropUnrecorded,
        Fault::KeepUseless,
        Fault::OffReturnsInHead,
        Fault::WaitBehindLost,
        Fault::BelieveBelowFloor,
        Fault::ClosedInOnePiece,
        Fault::HeadsSwapped,
        Fault::AgainUntold,
        Fault::EmptyForgetsDirty,
        Fault::EmptyForgetsFlush,
        Fault::AreaUsedEarly,
        Fault::AreaUnwiped,
        Fault::AreaRead,
        Fault::EpochEarly,
        Fault::EpochUnflushed,
        Fault::EpochUnmarked,
        Fault::OrderToldEarly,
        Fault::FuaEndsNothing,
        Fault::SkipDeviceFlush,
        Fault::DropIntent,
        Fault::SkipChecksum,
        Fault::CacheRacedMiss,
        Fault::ReplayBackwards,
        Fault::ReuseEarly,
        Fault::CleanBeforeOriginFlush,
        Fault::AckEarly,
        Fault::SkipDropRecord,
        Fault::TrustUnverifiedTail,
        Fault::IgnoreFua,
        Fault::SkipRangeLock,
        Fault::StageForgetsNot,
        Fault::KeepRacedPrefetch,
        Fault::HideUnreadable,
        Fault::StarveForever,
        Fault::KeepOverwritten,
        Fault::ReplayNoDrops,
        Fault::FlushCoversLater,
        Fault::ClaimUndurable,
        Fault::EvictDirty,
        Fault::ZeroKeepsCopies,
        Fault::OverlookDirty,
        Fault::WriteKeepsZeros,
        Fault::CleanMoved,
        Fault::DestageUndurable,
        Fault::DestageRot,
        Fault::ForgetRotten,
        Fault::ServeLost,
        Fault::FlushSkipsOrigin,
        Fault::ResealRot,
        Fault::FuaLeavesOriginVolatile,
        Fault::IgnoreDestageError,
        Fault::IgnoreOriginFlushError,
        Fault::ResendRenumbered,
        Fault::LoseTooSoon,
        Fault::TrustIntentRegions,
        Fault::PromiseBroken,
        Fault::TrustOldSummary,
        Fault::StayClean,
        Fault::CheckpointNoZeros,
        Fault::ForgetInHead,
        Fault::WritePastDirty,
        Fault::SkipRelogIntents,
        Fault::MoveSuperseded,
        Fault::CloseUnflushed,
        Fault::CloseInUse,
        Fault::CloseAllIntents,
        Fault::SkipRestoredVoid,
        Fault::OriginFlushCoversLater,
        Fault::WalkStrangers,
        Fault::ApplyOutOfOrder,
        Fault::SummaryClaimsItself,
        Fault::CleanSuperseded,
        Fault::IntentUnawaited,
        Fault::VoidZerosCount,
        Fault::WritePastUndurablyClean,
        Fault::ReuseBeforeMap,
        Fault::MapOneCopy,
        Fault::MapForgetsHead,
        Fault::MapAhead,
        Fault::FreeUndurable,
        Fault::BelieveFreed,
        Fault::SkipRelogVoid,
        Fault::SkipRelogTold,
        Fault::RelogBehindNewer,
        Fault::EvictKept,
        Fault::KeepScratch,
        Fault::DropUnlikeDirty,
        Fault::FlushOneDevice,
        Fault::FlushEndsEarly,
        Fault::FlushForgetsOne,
        Fault::SecondHalfUnflushed,
        Fault::DirtyOnce,
        Fault::CleanDecides,
        Fault::BelieveBehind,
        Fault::HalvesUnmended,
    ];

    /// Those that tests of certain orders of events catch, which random worlds hardly ever meet.
    pub const BY_STEPS: [Fault; 39] = [
        Fault::KeepUncompared,
        Fault::FlushForgetsDiscards,
        Fault::GrowEarly,
        Fault::PlayTwice,
        Fault::CheckpointNoEviction,
        Fault::OffForgetsEvicted,
        Fault::OffForgetsDropped,
        Fault::GrowWhileDirty,
        Fault::SkipVoidFill,
        Fault::SplitCountsEarly,
        Fault::ForgetEvictedCopies,
        Fault::SkipRelogZeros,
        Fault::CacheUnguarded,
        Fault::IgnoreFlashFlushError,
        Fault::TrustUnknownOrigin,
        Fault::ReplayNoZerosTold,
        Fault::ReplayNoCleaned,
        Fault::IntentOneRegion,
        Fault::ForgetCancelledFills,
        Fault::WritePastDestaging,
        Fault::CloseUnflushedHead,
        Fault::SealUnflushed,
        Fault::DestageUnnoted,
        Fault::SkipWipe,
        Fault::ReplayPastGap,
        Fault::KeepStrangers,
        Fault::RepeatNumbers,
        Fault::SkipCut,
        Fault::NoCleanFloor,
        Fault::IgnoreCleanFloor,
        Fault::MoveOverNewer,
        Fault::DropBehindNewer,
        Fault::FreePinned,
        Fault::FreeForNothing,
        Fault::SkipRelogClean,
        Fault::RescueOneCopy,
        Fault::GoneEarly,
        Fault::OneHalfWalked,
        Fault::BeginningOfOne,
    ];

    /// Those that only counting again catches: nothing a guest sees depends on them, or not for long.
    pub const BY_COUNTS: [Fault; 4] = [
        Fault::AppendTwice,
        Fault::DirtyStaysCounted,
        Fault::CachedStaysCounted,
        Fault::GivenUpStaysPinned,
    ];

    /// Those that break nothing, because another rule covers it: the reason stands beside each.
    pub const HARMLESS: [Fault; 1] = [Fault::ZerosToldSuperseded];

    /// Those that nothing catches so far. That is a debt of the tests, not a merit of the engine.
    pub const UNSEEN: [Fault; 1] = [Fault::LossUnnoted];

    /// All of them.
    pub fn all() -> impl Iterator<Item = Fault> {
        let lists: [&[Fault]; 5] = [
            &Self::BY_WORLDS,
            &Self::BY_STEPS,
            &Self::BY_COUNTS,
            &Self::HARMLESS,
            &Self::UNSEEN,
        ];
        lists.into_iter().flatten().copied()
    }
}

/// The fault in force, if any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults(#[cfg(feature = "faults")] pub Option<Fault>);

impl Faults {
    /// Nothing is broken.
    pub const fn none() -> Faults {
        Faults(
            #[cfg(feature = "faults")]
            None,
        )
    }

    /// True if this rule is to be broken. Always false without the feature, so the branch costs nothing.
    #[inline]
    pub fn has(&self, fault: Fault) -> bool {
        #[cfg(feature = "faults")]
        return self.0 == Some(fault);
        #[cfg(not(feature = "faults"))]
        {
            let _ = fault;
            false
        }
    }
}
