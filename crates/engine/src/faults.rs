//! Deliberate faults for the mutation check: each breaks one rule of the data path, and the
//! simulation must notice. They exist only with the `faults` feature, never in a release.

/// One broken rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
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
    /// Do not list what a failed device no longer gives back.
    HideUnreadable,
    /// Wait for a free segment when the log has no room for the record that would free one.
    StarveForever,
    /// Let a disk grow before the copies of its padded last block are void on flash.
    GrowEarly,
}

impl Fault {
    /// All of them.
    pub const ALL: [Fault; 17] = [
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
        Fault::GrowEarly,
    ];
}

/// The fault in force, if any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults(#[cfg(feature = "faults")] pub Option<Fault>);

impl Faults {
    /// Is this rule to be broken? Always false without the feature, so the branch costs nothing.
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
