//! How often worlds came to places that are hard to reach.
//!
//! Worlds drawn at random may never get where a bug is, and pass. So the engine marks its rare ways
//! ([`hearth_engine::paths`]), a world notes what happened to it, and a run of many seeds can ask that
//! nothing of the list was left out.

use hearth_engine::paths as engine;
use std::fmt;

macro_rules! events {
    ($($event:ident: $name:literal,)*) => {
        /// What can happen to a world.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Event {
            $(#[doc = $name] $event,)*
        }

        const EVENTS: [(Event, &str); [$(Event::$event),*].len()] = [$((Event::$event, $name)),*];
    };
}

events! {
    StopInTrouble: "a clean stop while devices fail or hang",
    StopNotWaited: "a stop that is not waited for",
    StopCalledOff: "a stop that is called off",
    StopCutOff: "the power fails while a stop writes",
    StartCutOff: "the power fails while a start writes",
    CrashAfterMove: "a crash soon after a disk on flash was given an origin",
    LetGo: "a disk that is held on flash is let go",
    OnFlash: "a disk with an origin lives on flash from then on",
    CrashBeforeOnFlash: "a crash when that is stored, and the engine does not know yet",
    CrashAfterOnFlash: "a crash soon after",
    CrashAfterModeSwitch: "a crash soon after a change of mode",
    CrashWithoutDisk: "a crash while a disk is not attached",
    OriginAlone: "the origin of an ordered disk is looked at as if all flash were gone",
    OriginBehind: "that origin lacks something that was promised since",
    LeftOut: "a known disk is left out at a start",
    StopWithoutDisk: "a clean stop while a disk is not attached",
    CameLater: "a disk that was left out comes later",
    TakenOut: "a disk is detached while others are served",
    RemovedWhileOut: "a disk that is not attached is removed",
    RemovedInUse: "a disk is removed while requests of it are in flight",
    RemovalRefused: "a disk is not removed because it is served",
    CrashAfterReplacement: "a crash soon after a disk took the number of a removed one",
    ScrubDeceived: "a scrub finds silent corruption",
    LossAccepted: "losses are accepted while requests run",
    WrittenAfterLoss: "a block that was accepted as lost is durably written again",
    RefusedNoDisk: "a request is refused because its disk is not attached",
    RefusedPastTheEnd: "a request is refused because it reaches past the end",
    RefusedStopping: "a request is refused because of a stop",
    OpenedAfterGivenUp: "a pool whose flash was given up is opened again",
    OpenedUntold: "it is opened again before anything says that it was given up",
    NotedElsewhere: "that flash was given up is noted elsewhere",
    FlashBack: "flash that did not answer comes back",
    FlashFull: "the file system under flash is full",
    BadPlaces: "segments of flash take no writes",
    DeviceEmptied: "a flash device is emptied to be taken out",
    Reshaped: "flash devices come, go or are replaced",
    ReshapeCutOff: "the power fails while flash devices are changed",
    OriginChanged: "something else writes an origin while nothing serves it",
    FlashOlder: "flash and the state directory are restored to an earlier time, and origins are newer",
    CopiesOfChangedDropped: "the clean copies of a disk are dropped while it is served, because its origin changed",
    AreaSet: "segments are set aside and written by somebody else",
    AreaBack: "an area is given back",
    AreaCutOff: "a crash while an area is set aside or given back",
    TimePassed: "an operation hangs for long",
    AnsweredFor: "an operation that hangs is answered for, and goes on",
    LegLost: "a leg of a mirror goes out",
    LegBack: "a leg of a mirror is current again",
    LegRepaired: "what a leg cannot read is written again from another one",
    LegCameOld: "a leg comes back with what it held long ago",
    LegAdded: "a leg is added to a mirror",
    LegRemoved: "a leg is removed from a mirror",
    NoLegHoldsIt: "no leg that is there holds the disk, which waits for one that does",
    NotesLost: "the file with a mirror's notes is lost",
    Scrubbed: "a mirror is scrubbed to its end while it is used",
    FlashReplaced: "all flash is lost, and another device takes its place",
    ServedWithoutFlash: "a disk that was known to be whole is served after its flash was lost",
    WentOn: "a flash device is lost, and the pool goes on without it",
    WarmWithout: "what the other flash devices hold is cached as before",
    HalfReplaced: "a flash device of a pool that holds everything twice is replaced",
    HalfReplacedByItself: "a flash device that was lost takes its own place again",
    HalfReplaceCutOff: "the power fails while a flash device of such a pool is replaced",
    HalfReplaceFailed: "the new flash device fails while it takes the place of another one",
    HalfCopied: "such a device was copied while the pool was served",
    OldCameInstead: "a flash device that was replaced is there, and the new one is not",
    OtherTurn: "after a flash device was lost, or replaced, the trouble is another one's",
    Erased: "flash is erased under the pool",
    LogFree: "a disk that is off is voided where it is known which disks there are",
    NotKnownWhole: "a disk that was not known to be whole goes with its flash",
}

/// How often each path was taken, by the engine and by worlds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    engine: [u64; engine::Path::ALL.len()],
    world: [u64; EVENTS.len()],
}

impl Default for Taken {
    fn default() -> Taken {
        Taken {
            engine: [0; engine::Path::ALL.len()],
            world: [0; EVENTS.len()],
        }
    }
}

impl fmt::Debug for Taken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map()
            .entries(self.all().filter(|(_, n)| *n > 0))
            .finish()
    }
}

/// A world begins on this thread: forgets what the engine counted for another.
pub fn begin() {
    engine::taken();
}

impl Taken {
    /// Notes what happened to the world.
    pub fn note(&mut self, event: Event) {
        self.world[event as usize] += 1;
    }

    /// Adds what the engine did on this thread.
    pub fn gather(&mut self) {
        for (sum, n) in self.engine.iter_mut().zip(engine::taken()) {
            *sum += n;
        }
    }

    /// Counts the worlds that were there, not how often each was.
    pub fn add_world(&mut self, world: &Taken) {
        let sums = self.engine.iter_mut().chain(&mut self.world);
        for (sum, n) in sums.zip(world.engine.iter().chain(&world.world)) {
            *sum += u64::from(*n > 0);
        }
    }

    /// Adds numbers of worlds.
    pub fn add_counts(&mut self, more: &Taken) {
        let sums = self.engine.iter_mut().chain(&mut self.world);
        for (sum, n) in sums.zip(more.engine.iter().chain(&more.world)) {
            *sum += n;
        }
    }

    /// Every path in words, and how often it was taken.
    pub fn all(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        let names = engine::Path::ALL.iter().map(|p| p.name());
        let engine = names.zip(self.engine);
        let names = EVENTS.iter().map(|(_, name)| *name);
        engine.chain(names.zip(self.world))
    }

    /// Paths that no world took, without those in [`RARE`].
    pub fn missing(&self) -> impl Iterator<Item = &'static str> + '_ {
        let never = self.all().filter(|(_, n)| *n == 0).map(|(name, _)| name);
        never.filter(|name| !RARE.iter().any(|(rare, _)| rare == name))
    }
}

/// Paths that the worlds of the gate miss, and the search for them as well ([`crate::gate`]), and why.
pub const RARE: [(&str, &str); 4] = [
    (
        "a run waits for a mark that the log will never have",
        "the log must be starved between an epoch's mark and the next epoch's write",
    ),
    (
        "a segment says so much again that another is freed before it",
        "hundreds of runs of zeros must lie in one segment, and their origin be away",
    ),
    (
        "the oldest segment of a starved log is empty, and goes without its records",
        "the log must be starved by the records that would free it",
    ),
    (
        "a destaged block of a starved log is dropped although a newer write is on its way",
        "the log must be starved between a write and its batch",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_taken_is_named() {
        let mut world = Taken::default();
        world.note(Event::LeftOut);
        world.note(Event::LeftOut);
        let mut all = Taken::default();
        all.add_world(&world);
        all.add_world(&world);
        let left_out = EVENTS[Event::LeftOut as usize].1;
        assert!(all.all().any(|taken| taken == (left_out, 2)));
        assert!(all.missing().all(|name| name != left_out));
        assert_eq!(all.missing().count(), all.all().count() - RARE.len() - 1);
    }

    #[test]
    fn only_paths_there_are_may_be_rare() {
        for (rare, _) in RARE {
            assert!(Taken::default().all().any(|(name, _)| name == rare));
        }
    }
}
