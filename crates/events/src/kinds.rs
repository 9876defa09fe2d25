//! The kinds of events: name, severity, fields and sentence of each, in one table.
//!
//! A name is never changed and never used for something else: rules and scripts rely on it. Fields may be
//! added. `docs/events.md` lists them, which a test sees to.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// How much an event matters, in the words of syslog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// What was asked for.
    Info,
    /// Nothing is wrong, but somebody may want to know.
    Notice,
    /// Something is wrong that may right itself.
    Warning,
    /// Something is wrong that somebody has to see to.
    Error,
}

impl Severity {
    /// The word used in the API, the command line and the file.
    pub fn word(self) -> &'static str {
        match self {
            Severity::Info => "info",
            Severity::Notice => "notice",
            Severity::Warning => "warning",
            Severity::Error => "error",
        }
    }

    /// Syslog's number.
    pub fn priority(self) -> u8 {
        match self {
            Severity::Info => 6,
            Severity::Notice => 5,
            Severity::Warning => 4,
            Severity::Error => 3,
        }
    }
}

macro_rules! kinds {
    ($($(#[doc = $doc:literal])+ $name:literal $severity:ident $kind:ident { $($field:ident: $type:ty),* $(,)? } $text:literal)*) => {
        /// Something that happened.
        #[derive(Clone, Debug, PartialEq)]
        #[allow(missing_docs)] // The fields are what their names say.
        pub enum Event {
            $($(#[doc = $doc])+ $kind { $($field: $type),* },)*
        }

        /// Every kind: its name, its severity, and what it means.
        pub const KINDS: &[(&str, Severity, &str)] = &[
            $(($name, Severity::$severity, concat!($($doc),+)),)*
        ];

        impl Event {
            /// The name that stays.
            pub fn name(&self) -> &'static str {
                match self { $(Event::$kind { .. } => $name,)* }
            }

            /// How much it matters.
            pub fn severity(&self) -> Severity {
                match self { $(Event::$kind { .. } => Severity::$severity,)* }
            }

            /// What happened, for people.
            #[allow(unused_variables)] // Not every field is in the sentence.
            pub fn text(&self) -> String {
                match self { $(Event::$kind { $($field),* } => format!($text),)* }
            }

            /// The kind's own fields.
            pub fn details(&self) -> Map<String, Value> {
                let mut map = Map::new();
                match self {
                    $(Event::$kind { $($field),* } => {
                        $(map.insert(stringify!($field).to_owned(), json!($field));)*
                    })*
                }
                // It has a place of its own in the record.
                map.remove("disk");
                map
            }

            /// The disk it is about.
            #[allow(unused_mut, unused_assignments)]
            pub fn disk(&self) -> Option<String> {
                match self {
                    $(Event::$kind { $($field),* } => {
                        let mut found: Option<String> = None;
                        $(kinds!(@disk found, $field $field);)*
                        found
                    })*
                }
            }
        }
    };
    (@disk $found:ident, disk $field:ident) => { $found = Option::<String>::from($field.clone()) };
    (@disk $found:ident, $other:ident $field:ident) => { let _ = $field; };
}

kinds! {
    /// The daemon serves its pool: every disk that can be is on offer. The message says what of the cache was found (`found`).
    "daemon-started" Notice DaemonStarted { version: String, pool: String, found: String, cached_blocks: u64, dirty_blocks: u64, millis: u64 }
        "serving pool {pool} with Hearth {version}, {found}"
    /// The same, but the run before did not end in order: it was killed, it crashed, or the host did.
    "daemon-started-after-crash" Warning DaemonStartedAfterCrash { version: String, pool: String, cached_blocks: u64, dirty_blocks: u64, millis: u64 }
        "serving pool {pool} with Hearth {version} after a crash; {cached_blocks} blocks were found again in the log, {dirty_blocks} of them dirty"
    /// The daemon could not start.
    "daemon-start-failed" Error DaemonStartFailed { why: String }
        "could not start: {why}"
    /// The daemon aborted lately; the message is that of the abort.
    "daemon-aborted-before" Error DaemonAbortedBefore { seconds_ago: u64, message: String }
        "Hearth aborted {seconds_ago} s before this start: {message}"
    /// The daemon begins to stop, and why.
    "daemon-stopping" Notice DaemonStopping { why: String }
        "stopping: {why}"
    /// The daemon stopped and left the pool clean.
    "daemon-stopped" Notice DaemonStopped {}
        "stopped; the pool is clean"
    /// The daemon stopped and could not leave the pool clean.
    "daemon-stopped-badly" Error DaemonStoppedBadly { why: String }
        "stopped, and the pool is not clean: {why}"
    /// Another program, mostly a newer version, begins to take over.
    "daemon-upgrading" Notice DaemonUpgrading { from: String, to: String, program: String }
        "{program} (Hearth {to}) takes over from Hearth {from}"
    /// It has: clients waited for so long, and so many connections went over or had to end.
    "daemon-upgraded" Notice DaemonUpgraded { from: String, to: String, pause_millis: u64, carried: u64, ended: u64 }
        "Hearth {to} has taken over from Hearth {from}: clients waited for {pause_millis} ms, {carried} connections went over, {ended} had to end"
    /// It could not be started, and the program before goes on.
    "daemon-upgrade-failed" Error DaemonUpgradeFailed { why: String, pause_millis: u64 }
        "the upgrade failed, and the program before goes on after {pause_millis} ms: {why}"
    /// A thread that serves clients does not come round.
    "thread-stuck" Error ThreadStuck { thread: String, seconds: u64 }
        "a thread is stuck: {thread} has not come round for {seconds} s, and the clients it serves get no answers; see whether an origin's device or mount, or the flash, hangs. Restart the daemon if it does not come back"
    /// It does again.
    "thread-goes-on" Notice ThreadGoesOn { thread: String, seconds: u64 }
        "thread {thread} goes on after {seconds} s"
    /// The flash failed or is not used, and why.
    "flash-trouble" Error FlashTrouble { what: String, dirty_bytes: u64 }
        "{what}"
    /// What was said of the flash is over.
    "flash-well" Notice FlashWell {}
        "the flash is well again"
    /// The flash is not there any more; disks that are known to be whole in their origins are served without it.
    "flash-gone" Error FlashGone { flash: String, why: String, served: u64, refused: u64 }
        "the flash is gone: {why}; {served} disks that are whole in their origins are served without a cache, {refused} may lack what was only on it and are not"
    /// The flash is there and is not used by this run of the daemon.
    "flash-unused" Error FlashUnused { flash: String, why: String }
        "the disks are served without their cache: {why}"
    /// A blank device has taken the place of flash that is gone.
    "flash-adopted" Notice FlashAdopted { flash: String, lost: u64 }
        "{flash} has taken the place of flash that is gone, and the cache fills again; {lost} disks had something on the old one that their origins lack"
    /// One of several flash devices failed, and the pool goes on with what the others hold.
    "flash-device-left" Error FlashDeviceLeft { device: String, kept_bytes: u64 }
        "flash device {device} is lost: the pool goes on without it, with {kept_bytes} bytes cached on the others; put another one in with `hearth pool add-flash`"
    /// There is less flash than is kept for disks in all: each keeps its part of its minimum.
    "shares-scaled" Warning SharesScaled { wanted_bytes: u64, kept_bytes: u64, percent: u64 }
        "{wanted_bytes} bytes of flash are to be kept for disks, and {kept_bytes} can be: each disk keeps {percent} % of its minimum; give the pool more flash, or lower --min"
    /// There is enough again.
    "shares-whole" Notice SharesWhole {}
        "each disk keeps all of its minimum again"
    /// A flash device of several answers much more slowly than the others: new data goes to those, and what is read from it moves there.
    "flash-device-slow" Warning FlashDeviceSlow { device: String, read_us: u64, write_us: u64 }
        "the flash device {device} answers much more slowly than the others (reads {read_us} µs, writes {write_us} µs in the mean lately); new data goes to those, and what is read from it moves there"
    /// It gets its share again.
    "flash-device-quick" Notice FlashDeviceQuick { device: String }
        "the flash device {device} has its share of new data again"
    /// Operations on the flash failed; the count is of those since the last such event.
    "flash-errors" Warning FlashErrors { count: u64 }
        "{count} operations on the flash failed"
    /// A disk was added to the registry.
    "disk-added" Info DiskAdded { disk: String, origin: String, mode: String, by: String }
        "added on {origin}, {mode}, by {by}"
    /// Settings of a disk were changed, and by whom.
    "disk-changed" Info DiskChanged { disk: String, what: String, by: String }
        "changed by {by}: {what}"
    /// A disk is served.
    "disk-attached" Info DiskAttached { disk: String }
        "attached"
    /// All of a pinned disk is on flash, after something of it had to be read in.
    "disk-pinned" Info DiskPinned { disk: String, bytes: u64 }
        "all of its {bytes} bytes are on flash"
    /// Pages that come back from swap on the pool's flash take several times what is usual: destaging, reading ahead and the reading in of
    /// pinned disks stand back.
    "swap-slow" Notice SwapSlow { microseconds: u64, usual: u64 }
        "a page comes back from swap in {microseconds} µs instead of {usual}: the cache stands back"
    /// Pages come back from swap as usual; the cache does not stand back any more.
    "swap-well" Info SwapWell {}
        "pages come back from swap as usual"
    /// A disk that lives on flash was given an origin, to which all that it has is written.
    "disk-moving" Info DiskMoved { disk: String, origin: String }
        "moves to {origin}"
    /// The origin that a disk was given has everything.
    "disk-moved" Info DiskHasMoved { disk: String, origin: String }
        "{origin} has everything"
    /// A disk with an origin is on its way onto flash alone.
    "disk-moving-onto-flash" Info DiskGoesOntoFlash { disk: String }
        "moves onto flash"
    /// A disk lives on flash alone from now on; what its origin was is left as it is, and gets old.
    "disk-on-flash" Notice DiskLivesOnFlash { disk: String, origin: String }
        "lives on flash; {origin} is left as it is, and gets old"
    /// A disk does not live on flash after all: its move was called off, or flash cannot hold it; it stays on its origin.
    "disk-stays" Notice DiskStays { disk: String }
        "stays on its origin"
    /// A disk is not served, because its origin is missing; it is tried again.
    "disk-waiting" Warning DiskWaiting { disk: String, why: String }
        "waiting: {why}"
    /// A disk is not served until somebody decides something.
    "disk-refused" Error DiskRefused { disk: String, why: String }
        "refused: {why}"
    /// A disk's origin is another host's now.
    "disk-fenced" Error DiskFenced { disk: String, why: String }
        "stopped, because {why}"
    /// Everything dirty of a disk is in its origin, as somebody had asked.
    "disk-flushed" Info DiskFlushed { disk: String }
        "flushed"
    /// A flush or a removal was called off.
    "disk-flush-cancelled" Info DiskFlushCancelled { disk: String }
        "flush or removal called off"
    /// A flush, a removal or an attachment could not be completed.
    "disk-incomplete" Error DiskIncomplete { disk: String, why: String }
        "cannot be completed now: {why}"
    /// A disk was taken out of the registry.
    "disk-removed" Info DiskRemoved { disk: String }
        "removed"
    /// The server of an origin is not connected; requests that need it wait or fail.
    "origin-lost" Warning OriginLost { disk: String, origin: String, why: String }
        "the origin is not connected: {why}"
    /// It is again.
    "origin-back" Notice OriginBack { disk: String, origin: String, reconnects: u64 }
        "the origin is connected again"
    /// An origin became smaller than its disk.
    "origin-shrank" Error OriginShrank { disk: String, what: String }
        "{what}"
    /// It has its size back.
    "origin-size-back" Notice OriginSizeBack { disk: String }
        "the origin has its size back"
    /// A write to a disk was answered with "no space left": the file system of its origin has no room for more than what is dirty.
    "origin-no-room" Warning OriginNoRoom { disk: String, dirty_bytes: u64 }
        "the file system of the origin has no room for more than the {dirty_bytes} bytes that still have to be written there; writes to places that take no space yet fail until there is some"
    /// Writes to it are taken again.
    "origin-has-room" Notice OriginHasRoom { disk: String }
        "the file system of the origin has room again"
    /// Operations on a disk's origin failed; the count is of those since the last such event.
    "origin-errors" Warning OriginErrors { disk: String, count: u64, last: String }
        "{count} operations on the origin failed, the last one: {last}"
    /// A leg of a mirrored disk takes no part any more; the disk goes on from the others.
    "leg-lost" Warning LegLost { disk: String, leg: String, why: String }
        "the leg {leg} is out: {why}"
    /// A leg of a mirrored disk is being copied to.
    "leg-resyncing" Notice LegResyncing { disk: String, leg: String, bytes: u64 }
        "the leg {leg} gets what it lacks, at most {bytes} bytes"
    /// A leg of a mirrored disk holds the disk, and is read again.
    "leg-current" Notice LegCurrent { disk: String, leg: String }
        "the leg {leg} holds the disk"
    /// What a leg of a mirrored disk could not read was written to it again, as another leg has it; counted since the last such event.
    "leg-repaired" Warning LegRepaired { disk: String, leg: String, ranges: u64, bytes: u64, offset: u64 }
        "the leg {leg} could not read {ranges} ranges, the first at {offset}; they were written to it again from another leg"
    /// A leg of a mirrored disk is not as Hearth left it; all of it is copied to.
    "leg-changed" Error LegChanged { disk: String, leg: String, why: String }
        "the leg {leg} is not as it was left: {why}; all of it is copied to"
    /// A leg of a mirrored disk is there that has missed writes, and none that has them: it is not used.
    "leg-stale" Error LegStale { disk: String, leg: String }
        "the leg {leg} has missed writes, and no leg is there that has them: it is not used"
    /// A leg was added to a mirrored disk.
    "leg-added" Info LegAdded { disk: String, leg: String }
        "the leg {leg} was added"
    /// A leg was taken from a mirrored disk for good.
    "leg-removed" Info LegRemoved { disk: String, leg: String }
        "the leg {leg} was removed"
    /// A scrub of a mirrored disk begins, or goes on where it was.
    "scrub-started" Info ScrubStarted { disk: String, at: u64 }
        "a scrub begins at {at}"
    /// A scrub of a mirrored disk is through, and all that it could compare is the same.
    "scrub-done" Info ScrubDone { disk: String, bytes: u64, partial: u64, seconds: u64 }
        "a scrub has compared {bytes} bytes, and all of it is the same; {partial} of them not on all legs"
    /// A scrub of a mirrored disk is through; it has repaired what a leg could not read or held wrong.
    "scrub-repaired" Warning ScrubRepaired { disk: String, bytes: u64, partial: u64, seconds: u64, repairs: u64, repaired: u64 }
        "a scrub has compared {bytes} bytes and repaired {repairs} places of {repaired} bytes; {partial} bytes were not on all legs"
    /// A scrub of a mirrored disk is through, and there are places where nothing tells which leg is right, or that no leg can read.
    "scrub-undecided" Error ScrubUndecided { disk: String, bytes: u64, partial: u64, seconds: u64, repairs: u64, repaired: u64, undecided: u64, offset: u64, length: u64, unread: u64 }
        "a scrub has found {undecided} places where legs differ and nothing tells which one is right, and {unread} bytes that no leg can read; `hearth disk scrub {disk} --show` lists them"
    /// A scrub of a mirrored disk was called off before it was through.
    "scrub-called-off" Info ScrubCalledOff { disk: String, at: u64 }
        "a scrub was called off at {at}"
    /// What is dirty cannot be written back.
    "write-back-failing" Error WriteBackFailing { disk: String, origin: String, dirty_bytes: u64, seconds: u64, what: String }
        "{what}"
    /// It can again.
    "write-back-works" Notice WriteBackWorks { disk: String, origin: String, dirty_bytes: u64 }
        "the origin takes what is written back again"
    /// Writes of an ordered disk wait, because its origin is as far behind as it may be (`--max-age`).
    "origin-too-far-behind" Warning OriginTooFarBehind { disk: String, seconds: u64 }
        "writes wait for the origin, which is {seconds} s behind"
    /// None has had to wait for 10 s.
    "origin-in-time" Notice OriginInTime { disk: String, seconds: u64 }
        "the origin is in time again, {seconds} s behind"
    /// Blocks on flash did not match their checksums and were read from the origin again.
    "bad-blocks-repaired" Warning BadBlocksRepaired { disk: String, blocks: u64 }
        "{blocks} bad blocks on flash were read again from the origin"
    /// Blocks that were only on flash are lost.
    "data-lost" Error DataLost { disk: String, blocks: u64 }
        "{blocks} blocks that were only on flash are lost; `hearth disk show` lists them"
    /// Somebody gave up lost blocks: they read as the origin has them.
    "loss-accepted" Warning LossAccepted { disk: String, blocks: u64, by: String }
        "{blocks} lost blocks given up by {by}; they read as the origin has them"
    /// The share of flash of a disk was changed as advised.
    "share-changed" Info ShareChanged { disk: String, bytes: u64 }
        "flash kept as advised: {bytes} bytes"
    /// A datastore of the registry is not served.
    "datastore-unserved" Error DatastoreUnserved { datastore: String, why: String }
        "datastore {datastore} is not served: {why}"
    /// One of the two directories of a mirrored datastore takes no part any more; clients go on with the other.
    "tree-lost" Warning TreeLost { datastore: String, directory: String, why: String }
        "the tree {directory} of datastore {datastore} is out: {why}"
    /// One of the two directories of a mirrored datastore gets what it missed.
    "tree-resyncing" Notice TreeResyncing { datastore: String, directory: String, places: u64 }
        "the tree {directory} of datastore {datastore} gets what it missed, {places} places as far as is known"
    /// One of the two directories of a mirrored datastore holds everything.
    "tree-current" Notice TreeCurrent { datastore: String, directory: String }
        "the tree {directory} of datastore {datastore} holds everything"
    /// A scrub compared the two directories of a datastore, and they are the same.
    "datastore-scrub-done" Info DatastoreScrubDone { datastore: String, bytes: u64 }
        "a scrub compared {bytes} bytes of datastore {datastore}; its directories are the same"
    /// A scrub of a datastore in two directories repaired one of them from copies that guests wrote.
    "datastore-scrub-repaired" Warning DatastoreScrubRepaired { datastore: String, bytes: u64, repairs: u64, repaired: u64 }
        "a scrub compared {bytes} bytes of datastore {datastore} and repaired {repairs} places of {repaired} bytes"
    /// A scrub of a datastore in two directories found places where nothing shows which directory is right, or that could not be read.
    "datastore-scrub-undecided" Error DatastoreScrubUndecided { datastore: String, bytes: u64, repairs: u64, repaired: u64, undecided: u64, unread: u64 }
        "the directories of datastore {datastore} differ in {undecided} places and nothing shows which one is right; {unread} bytes could not be compared; `hearth datastore scrub {datastore} --show` lists the places"
    /// A file of a datastore, or the origin of a disk, was opened on this host while writes to it were on flash only: a program that reads it there sees old data. Told once an hour for each file or disk.
    "dirty-file-opened" Warning DirtyFileOpened { datastore: Option<String>, disk: Option<String>, file: String, dirty_bytes: u64, by: String, hold: String }
        "{file} was opened on this host by {by}, and {dirty_bytes} bytes written to it are on flash only: a program that reads it there sees old data; '{hold}' brings it up to date and keeps it so, and then it is to be read again"
    /// Two clients write a large file of a datastore in turn, within a minute, or write the same disk. Told once an hour for each file, and once for the same two clients of a disk.
    "two-clients-write" Warning TwoClientsWrite { datastore: Option<String>, disk: Option<String>, file: Option<String>, what: String, one: String, other: String }
        "two clients write {what} at the same time, {one} and {other}: unless they share a cluster file system they destroy what is in it; stop one of them, then check the file system"
    /// A directory is served as a datastore.
    "datastore-added" Info DatastoreAdded { datastore: String, by: String }
        "datastore {datastore} added by {by}"
    /// Settings of a datastore were changed.
    "datastore-changed" Info DatastoreChanged { datastore: String, by: String }
        "datastore {datastore} changed by {by}"
    /// A datastore is no longer served.
    "datastore-removed" Info DatastoreRemoved { datastore: String, by: String }
        "datastore {datastore} removed by {by}"
    /// Somebody asked for the pool to be emptied and the daemon to stop.
    "pool-export" Notice PoolExport { by: String }
        "export of the pool asked for by {by}"
    /// The memory controller has begun; `changed` is what one before it changed and left.
    "memory-started" Notice MemoryStarted { changed: u64 }
        "the memory controller runs"
    /// The memory controller has ended in order; `left` is what could not be set back.
    "memory-stopped" Notice MemoryStopped { left: u64 }
        "the memory controller has ended; {left} changes could not be set back"
    /// How short memory is has changed: high, clear, soft, hard, low.
    "memory-level" Notice MemoryLevel { level: String, before: String }
        "memory is {level}, and was {before}"
    /// The memory controller has done something, and why.
    "memory-step" Info MemoryStep { step: String, guest: String, bytes: u64, about: String, why: String }
        "{about}: {why}"
    /// The memory controller could not do something.
    "memory-step-failed" Warning MemoryStepFailed { step: String, guest: String, bytes: u64, about: String, why: String }
        "this could not be done: {about}: {why}"
    /// Memory is short and nothing is left to do about it.
    "memory-helpless" Warning MemoryHelpless { why: String }
        "nothing helps any more: {why}"
    /// It is not so any more.
    "memory-helped" Notice MemoryHelped {}
        "memory is not short without a remedy any more"
    /// What the memory controller had changed is as before, or left to who changed it since.
    "memory-set-back" Info MemorySetBack { what: String, value: String, how: String }
        "{what}: {how} ({value})"
    /// A message about what is wrong, or that it is over, has reached one of those who are told.
    "alert-sent" Info AlertSent { way: String, message: u64, attempts: u64, subject: String }
        "told {way}: {subject}"
    /// Messages to one of those who are told were given up: too many waited for it, or it is configured no longer.
    "alert-given-up" Warning AlertGivenUp { way: String, count: u64, why: String }
        "{count} messages to {way} were given up: {why}"
    /// There is more to tell than messages an hour; it waits, and comes in one.
    "alerts-held-back" Notice AlertsHeldBack { count: u64, most_per_hour: u64 }
        "{count} things are to be told and wait: {most_per_hour} messages were written within the hour"
    /// Events that came too fast to be written to the file.
    "events-left-out" Warning EventsLeftOut { count: u64 }
        "{count} events came too fast and are not in the file"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_one_of_a_kind_and_spelt_alike() {
        let names: std::collections::BTreeSet<&str> = KINDS.iter().map(|k| k.0).collect();
        assert_eq!(names.len(), KINDS.len());
        for name in names {
            let good = |c: char| c.is_ascii_lowercase() || c == '-';
            assert!(name.chars().all(good), "{name}");
        }
    }

    #[test]
    fn the_documentation_lists_every_kind() {
        let page = include_str!("../../../docs/events.md");
        for (name, severity, doc) in KINDS {
            let row = format!("| `{name}` | {} | {} |", severity.word(), doc.trim());
            assert!(page.contains(&row), "docs/events.md lacks this row:\n{row}");
        }
    }

    #[test]
    fn a_sentence_and_its_fields() {
        let event = Event::DiskWaiting {
            disk: "vm1".to_owned(),
            why: "gone".to_owned(),
        };
        assert_eq!(event.text(), "waiting: gone");
        assert_eq!(event.disk().as_deref(), Some("vm1"));
        assert_eq!(
            event.details(),
            json!({"why": "gone"}).as_object().cloned().unwrap()
        );
        let event = Event::FlashErrors { count: 3 };
        assert_eq!(event.disk(), None);
        assert_eq!(event.details()["count"], 3);
    }
}
