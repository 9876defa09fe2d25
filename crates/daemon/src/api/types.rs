//! The bodies of the control API. The same types encode in the daemon and decode in its clients.
//!
//! Every request body refuses unknown fields, so that a misspelt setting is an error and not a
//! setting silently left alone. The settings of a disk in them are made from the table of settings
//! (`settings.rs`). Sizes are plain bytes.

use hearth_engine::api::Mode;
use hearth_fault::Fault;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::datastores::PinState;
use super::workload::Recording;
use crate::error::Error;
use crate::settings::{SettingsChanged, SettingsGiven, SettingsShown};

/// An error: what is wrong and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// What is wrong, and where: one sentence.
    pub error: String,
    /// What to do about it; empty if there is nothing.
    pub remedy: String,
}

impl From<Fault> for ErrorBody {
    fn from(fault: Fault) -> ErrorBody {
        ErrorBody {
            error: fault.what,
            remedy: fault.remedy,
        }
    }
}

impl From<Error> for ErrorBody {
    fn from(error: Error) -> ErrorBody {
        Fault::from(error).into()
    }
}

/// What may be wrong as two fields of an answer that is about something else.
pub(crate) fn fields(fault: Option<Fault>) -> (Option<String>, Option<String>) {
    match fault {
        None => (None, None),
        Some(Fault { what, remedy }) => (Some(what), Some(remedy).filter(|r| !r.is_empty())),
    }
}

/// An answer that has nothing to tell.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Done {
    /// Always true; failures are errors.
    pub done: bool,
}

/// How a disk is cached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CacheMode {
    /// Writes complete on flash and reach the origin later.
    #[default]
    WriteBack,
    /// Writes complete on the origin; the flash copy is renewed.
    WriteThrough,
    /// Reads are cached; writes go to the origin and drop the cached copy.
    WriteAround,
    /// Pass-through.
    Off,
    /// As write-back, and what reaches the origin keeps the order of the guest's flushes: should all flash be lost,
    /// the origin is as after a power cut some time ago.
    WriteBackOrdered,
}

impl CacheMode {
    /// The word used in the API, the command line and the documentation.
    pub fn word(self) -> &'static str {
        match self {
            CacheMode::WriteBack => "write-back",
            CacheMode::WriteThrough => "write-through",
            CacheMode::WriteAround => "write-around",
            CacheMode::Off => "off",
            CacheMode::WriteBackOrdered => "write-back-ordered",
        }
    }
}

impl From<CacheMode> for Mode {
    fn from(mode: CacheMode) -> Mode {
        match mode {
            CacheMode::WriteBack => Mode::WriteBack,
            CacheMode::WriteThrough => Mode::WriteThrough,
            CacheMode::WriteAround => Mode::WriteAround,
            CacheMode::Off => Mode::Off,
            CacheMode::WriteBackOrdered => Mode::WriteBackOrdered,
        }
    }
}

impl From<Mode> for CacheMode {
    fn from(mode: Mode) -> CacheMode {
        match mode {
            Mode::WriteBack => CacheMode::WriteBack,
            Mode::WriteThrough => CacheMode::WriteThrough,
            Mode::WriteAround => CacheMode::WriteAround,
            Mode::Off => CacheMode::Off,
            Mode::WriteBackOrdered => CacheMode::WriteBackOrdered,
        }
    }
}

/// Where the data of a disk lives in the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DiskHome {
    /// On its origin.
    #[default]
    Origin,
    /// On flash alone.
    Flash,
    /// On flash alone, and nothing of it is left after a crash.
    Scratch,
    /// On its origin, which it was given while it lived on flash, and which does not have everything yet; or on its way from there onto flash.
    Moving,
}

impl From<hearth_format::Home> for DiskHome {
    fn from(home: hearth_format::Home) -> DiskHome {
        match home {
            hearth_format::Home::Origin => DiskHome::Origin,
            hearth_format::Home::Flash => DiskHome::Flash,
            hearth_format::Home::Scratch => DiskHome::Scratch,
            hearth_format::Home::Moving => DiskHome::Moving,
        }
    }
}

/// Which side wins when an origin was changed behind Hearth's back while dirty blocks wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Trust {
    /// The dirty blocks on flash are written over what is in the origin now.
    Flash,
    /// The dirty blocks are thrown away; the origin is the disk.
    Origin,
}

/// A disk to add.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskAdd {
    /// Name, also the NBD export's: letters, digits, `-`, `_`, `.`; at most 64 bytes.
    pub name: String,
    /// The origin: the absolute path of a file or block device, or `nbd://HOST:PORT/EXPORT`,
    /// `nbd+unix:///EXPORT?socket=PATH`, or an image such as `qcow2:PATH` (docs/origins.md). Left out with
    /// `flash_only`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub origin: String,
    /// A disk of so many bytes that lives on flash alone: it has no origin (docs/flash-only.md).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flash_only: Option<u64>,
    /// With `flash_only`: after a crash nothing is left of it, and nothing waits for flash to be flushed.
    #[serde(default)]
    pub scratch: bool,
    /// Its settings.
    #[serde(flatten)]
    pub settings: SettingsGiven,
    /// Nobody but this pool writes the origin: asked for where that cannot be seen (an NBD export,
    /// iSCSI, ssh, nfs://).
    #[serde(default)]
    pub sole_user: bool,
    /// Take the origin from the pool that owns it, if that shows no sign of life. What that pool had
    /// on its flash and had not written back is missing then.
    #[serde(default)]
    pub takeover: bool,
    /// The image may name other files of this host: a backing file, a data file, extents.
    #[serde(default)]
    pub allow_backing: bool,
}

/// Settings to change; what is absent stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskSet {
    /// The settings to change.
    #[serde(flatten)]
    pub settings: SettingsChanged,
    /// The version of the settings that the change is based on: if it is another one by now, nothing is changed, and the
    /// answer is a conflict.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Of a disk that lives on flash: its new size in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Take over the origin's present size, if it has grown.
    #[serde(default)]
    pub size_from_origin: bool,
    /// The image may name the files of this host that it names now.
    #[serde(default)]
    pub allow_backing: bool,
    /// For a disk that is refused: which side wins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trust: Option<Trust>,
    /// Nobody but this pool writes the origin: for where that cannot be seen (an NBD export,
    /// iSCSI, ssh, nfs://).
    #[serde(default)]
    pub sole_user: bool,
    /// Take the origin from the pool that owns it, if that shows no sign of life. What that pool had
    /// on its flash and had not written back is missing then.
    #[serde(default)]
    pub takeover: bool,
}

/// What a disk is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DiskState {
    /// Served.
    Attached,
    /// Its origin is missing; tried again every few seconds.
    Waiting,
    /// Not served until told which side wins, or until the origin is put right.
    Refused,
    /// Its origin is another host's now. Not served, and nothing is written back, until told which side
    /// wins.
    Fenced,
    /// Served, while all its dirty blocks are being written to the origin.
    Flushing,
    /// Takes no new connections; goes away once its dirty blocks are in the origin.
    Removing,
}

impl DiskState {
    /// The word used in the API and the command line.
    pub fn word(self) -> &'static str {
        match self {
            DiskState::Attached => "attached",
            DiskState::Waiting => "waiting",
            DiskState::Refused => "refused",
            DiskState::Fenced => "fenced",
            DiskState::Flushing => "flushing",
            DiskState::Removing => "removing",
        }
    }
}

/// What becomes of the cached blocks of a disk at a start, where its origin may have changed and does not show it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum OnStart {
    /// They are used when a sample of them was compared with the origin.
    #[default]
    Sample,
    /// They are dropped.
    Drop,
    /// They are used at once.
    Keep,
}

/// A range of bytes of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ByteRange {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// Ranges named one by one; more are counted.
const RANGES_NAMED: usize = 3;

/// Lost ranges in words: how much, and where.
pub fn lost_sentence(ranges: &[ByteRange]) -> String {
    let bytes: u64 = ranges.iter().map(|r| r.length).sum();
    let named: Vec<String> = (ranges.iter().take(RANGES_NAMED))
        .map(|r| format!("{} at offset {}", r.length, r.offset))
        .collect();
    let more = match ranges.len().saturating_sub(RANGES_NAMED) {
        0 => String::new(),
        n => format!(" and {n} more ranges"),
    };
    format!(
        "{bytes} bytes are lost with the flash ({}{more})",
        named.join(", ")
    )
}

/// Why a disk's dirty blocks do not reach its origin.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct WriteBackTrouble {
    /// What the origin said last.
    pub error: String,
    /// The same as the system's number, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub errno: Option<i32>,
    /// For how many seconds nothing could be written back.
    pub seconds: f64,
    /// How often it was tried in vain since then.
    pub failures: u64,
    /// Bytes that are only on flash.
    pub dirty: u64,
}

/// How far a flush or removal is.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DrainProgress {
    /// Nothing dirty is left and the origin is durable.
    pub done: bool,
    /// Dirty blocks left.
    pub blocks_left: u64,
    /// The same in bytes.
    pub bytes_left: u64,
    /// Bytes per second, over the last seconds.
    pub bytes_per_second: f64,
    /// Seconds left; absent while nothing shrinks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eta_seconds: Option<f64>,
}

/// How far a disk is that is to be all on flash.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PinInfo {
    /// What is done about it.
    pub state: PinState,
    /// Bytes that are not on flash yet, as far as they were counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_left: Option<u64>,
    /// Bytes per second that were read in, over the last seconds.
    pub bytes_per_second: f64,
    /// Seconds left; absent while nothing shrinks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eta_seconds: Option<f64>,
    /// Why it is not read in just now, or not all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What to do about the reason, if there is something.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

/// How far the origin of an ordered disk is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct OrderInfo {
    /// What the origin holds is of one time: with all flash lost it would be the disk as after a power cut. Not so
    /// until it has what was dirty when the disk became ordered, and flash says so.
    pub in_order: bool,
    /// Not yet in order, though the origin has everything: all that is left is that flash says so durably, within seconds.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub begins: bool,
    /// Up to when it holds everything that was flushed, milliseconds since 1970; absent if that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upto: Option<u64>,
    /// Seconds for which it has lacked something that was flushed.
    pub behind: f64,
    /// Writes wait, because that is as long as it may be.
    pub late: bool,
}

impl OrderInfo {
    /// The same for people.
    pub fn sentence(&self) -> String {
        let at = |ms: u64| hearth_events::time::utc(ms);
        match self.upto {
            _ if self.begins => {
                "origin holds everything; its order begins when flash has noted it, within seconds"
                    .to_owned()
            }
            _ if !self.in_order => {
                "origin is in no order: it still lacks what was dirty before, or flash has failed"
                    .to_owned()
            }
            Some(upto) if self.behind >= 1.0 => format!(
                "origin holds everything up to {}, {:.0} s behind{}",
                at(upto),
                self.behind,
                if self.late { "; writes wait" } else { "" }
            ),
            Some(upto) => format!("origin holds everything up to {}", at(upto)),
            None => "origin is of one time, which is not known".to_owned(),
        }
    }
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskInfo {
    /// Name, also the NBD export's.
    pub name: String,
    /// Number within the pool.
    pub id: u16,
    /// The origin as it was given.
    pub origin: String,
    /// Where its data lives.
    #[serde(default)]
    pub home: DiskHome,
    /// Bytes.
    pub size: u64,
    /// Its settings.
    #[serde(flatten)]
    pub settings: SettingsShown,
    /// Changes with its settings: `DiskSet` may name the version that a change is based on.
    #[serde(default)]
    #[schema(required = true)]
    pub version: String,
    /// How far it is, if it is to be all on flash.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pinned: Option<PinInfo>,
    /// How far it is, if it is on its way from its origin onto flash alone; `home` is `moving` meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub onto_flash: Option<OntoFlash>,
    /// Bytes of flash kept for it as advised, until the daemon stops or other advice is applied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<u64>,
    /// The image may name other files of this host, those of `chain`.
    #[serde(default)]
    pub allow_backing: bool,
    /// The files below the origin's image, from the top, as `FORMAT:PATH`, `data:PATH` or
    /// `extent:PATH`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chain: Vec<String>,
    /// What it is doing.
    pub state: DiskState,
    /// Why it is waiting or refused, or cannot be written back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What to do about the reason, if there is something.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
    /// What happened when it was attached and the user should know.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notices: Vec<String>,
    /// How far its cached blocks were compared with the origin, which may have changed while nothing served it. Until that
    /// ends, reads come from the origin and nothing is written back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub check: Option<CacheCheck>,
    /// What identifies the origin's block device: a WWN, serial number, volume UUID or the inode below a loop device.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub device: String,
    /// Bytes of it on flash.
    pub cached: u64,
    /// Bytes of it that the origin does not have yet; zeroed and discarded ranges, which take no
    /// flash, included. It says nothing while `dirty_unknown` is true.
    pub dirty: u64,
    /// Something of it may have been dirty on flash that is gone; how much is not known.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dirty_unknown: bool,
    /// How far its origin is, if it is ordered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<OrderInfo>,
    /// Connections of clients.
    pub connections: u64,
    /// The clients; of very many, the first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub clients: Vec<ClientInfo>,
    /// The connection to the origin's server; absent for files and block devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<OriginLink>,
    /// The legs of a mirrored origin.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub legs: Vec<MirrorLeg>,
    /// How a mirrored origin is copied to and scrubbed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upkeep: Option<MirrorUpkeep>,
    /// Two clients wrote it in turn within the last hour: which, and what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub two_writers: Option<String>,
    /// Why what is dirty cannot be written back to the origin, while that is so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cannot_write_back: Option<WriteBackTrouble>,
    /// Ranges whose only copy was lost with the flash; they fail until written again or
    /// accepted as lost.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<ByteRange>,
    /// When its origin became another host's, seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fenced_at: Option<u64>,
    /// Of a fenced disk: what the guest wrote that only the flash has.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stranded: Vec<ByteRange>,
    /// The recording of its requests under way, or the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recording: Option<Recording>,
    /// How far a flush or removal is, while one goes on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress: Option<DrainProgress>,
    /// Why the last flush or removal ended before it was done, unless somebody called it off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incomplete: Option<ErrorBody>,
}

/// How far the cached blocks of a disk were compared with its origin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CacheCheck {
    /// Blocks that are equal so far.
    pub compared: u64,
    /// Clean blocks that are cached.
    pub cached: u64,
}

/// Where a disk is to be: one of the two.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskMove {
    /// Of one that lives on flash, its origin: the path of a file that does not exist, which is made, or of one that is as large and has no data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// On flash alone. What its origin has is brought there in the background; then the origin is let go as it is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub flash_only: bool,
}

/// How far a disk is on its way onto flash alone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct OntoFlash {
    /// Bytes of the disk that are to be looked at yet; absent until it has begun.
    pub bytes_left: Option<u64>,
    /// Bytes a second, lately.
    pub bytes_per_second: f64,
    /// Seconds that it will take at that rate.
    pub eta_seconds: Option<f64>,
}

/// What is to change about the legs of a disk; what is absent stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MirrorSet {
    /// A new leg, as an origin is given. All of it is overwritten. A disk that is no mirror becomes one, with its origin
    /// as the first leg.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub add: Option<String>,
    /// A leg to take out for good, as it was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remove: Option<String>,
    /// Copy no more to legs that lack something, or go on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<bool>,
    /// Bytes a second that are copied at most; 0: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<u64>,
}

/// What is to be done about scrubs of a mirrored origin or datastore; what is absent is left as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ScrubSet {
    /// Begin a scrub, or go on with one that was called off. If one goes on, nothing changes.
    #[serde(default)]
    pub begin: bool,
    /// With `begin`: at the start, whatever one that was called off has done.
    #[serde(default)]
    pub anew: bool,
    /// Call off the one that goes on.
    #[serde(default)]
    pub cancel: bool,
    /// A leg or directory, as it was given: where they differ and nothing shows which one is right, it is this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefer: Option<String>,
    /// Bytes of the disk a second that are compared at most; 0: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<u64>,
    /// Days from one scrub to the next; 0: only when asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_days: Option<u32>,
}

/// How a mirrored origin is copied to and scrubbed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MirrorUpkeep {
    /// Bytes a second that are copied to legs at most; 0: no limit.
    pub rate: u64,
    /// Nothing is copied to legs that lack something.
    pub paused: bool,
    /// Bytes of the disk a second that a scrub compares at most; 0: no limit.
    pub scrub_rate: u64,
    /// Days from one scrub to the next; 0: only when asked for.
    pub scrub_every_days: u32,
    /// The scrub that goes on, or the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scrub: Option<ScrubInfo>,
}

/// A scrub of a mirrored origin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ScrubInfo {
    /// It goes on, also after a restart.
    pub active: bool,
    /// Somebody called it off before it was through.
    pub called_off: bool,
    /// When it began, milliseconds since 1970.
    pub began: u64,
    /// When it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<u64>,
    /// All before this byte is done.
    pub at: u64,
    /// Bytes that were looked at.
    pub checked: u64,
    /// Of these, so many that not all legs took part in.
    pub partial: u64,
    /// Of these, so many that no leg could read.
    pub unread: u64,
    /// Places that were repaired.
    pub repairs: u64,
    /// Bytes of them.
    pub repaired: u64,
    /// Places where nothing tells what is right; of very many, the first.
    pub undecided: Vec<Undecided>,
    /// How many there are.
    pub undecided_all: u64,
}

/// A place where legs differ and nothing tells which one is right, or where the cache differs from all of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Undecided {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// What each leg holds there.
    pub legs: Vec<LegSum>,
    /// The legs hold the same, and what is cached is something else.
    pub cached: bool,
}

/// What a leg holds in the first block of a place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LegSum {
    /// The leg, as it was given.
    pub leg: String,
    /// CRC32C of the block.
    pub sum: u32,
}

/// A leg of a mirrored origin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MirrorLeg {
    /// What it is, as it was given.
    pub origin: String,
    /// `current`: it holds the disk. `checking`: it does, and where a crash may have left it different from the
    /// others it is being compared. `resyncing`: it takes writes and gets what it lacks. `out`: it takes no writes
    /// and is never read.
    pub state: String,
    /// Bytes it still has to get, at most.
    pub behind: u64,
    /// Bytes copied to it since the disk was attached.
    pub copied: u64,
    /// Why it is out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

/// A client of a disk: a process of this host, or, over TCP, an address with the name in its
/// certificate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClientInfo {
    /// The protocol it uses: `nbd` (over the socket, or TCP), `vhost-user` (through shared memory), or
    /// another one of a later version.
    pub kind: String,
    /// Its process, if it is on this host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// How that process was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// Its address, over TCP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The name in the certificate it showed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// When it connected, seconds since 1970.
    pub since: u64,
    /// Its connections.
    pub connections: u64,
    /// It has written to the disk.
    pub writes: bool,
    /// Of its connections, those through TLS.
    #[serde(default)]
    pub encrypted: u64,
}

/// How a pool is exported.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolExport {
    /// Also while clients are connected: they are cut off.
    #[serde(default)]
    pub yes: bool,
}

/// How a disk's origin is connected, if it is behind a server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct OriginLink {
    /// The server answers.
    pub connected: bool,
    /// Seconds since it was connected, or since the connection was lost.
    pub seconds: f64,
    /// Attempts to connect since it was lost; 0 while it is connected.
    pub attempts: u64,
    /// Requests fail because the server was gone for longer than `timeout`.
    pub failing: bool,
    /// Why the connection was lost (the last time) or cannot be had.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What to do about the reason, if there is something.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
    /// Times it was lost and found again.
    pub reconnects: u64,
    /// Seconds that requests wait for the server before they fail.
    pub timeout: f64,
}

/// A disk to remove.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskRemove {
    /// Throw dirty blocks away instead of writing them to the origin: the newest writes are lost.
    #[serde(default)]
    pub discard_dirty: bool,
    /// Also while clients are connected: they are cut off at the end.
    #[serde(default)]
    pub yes: bool,
}

/// How the pool was found at start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Recovery {
    /// `checkpoint of a clean stop`, `log` (read, as after a crash), `new flash` (never served before), or `state directory
    /// alone` (the flash is gone).
    pub how: String,
    /// Milliseconds it took.
    pub millis: u64,
    /// Blocks found on flash.
    pub cached_blocks: u64,
    /// Of these, dirty.
    pub dirty_blocks: u64,
}

/// A pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolInfo {
    /// The pool's number for life.
    pub uuid: String,
    /// The user's name for it; may be empty.
    pub label: String,
    /// Flash devices, where there are several the first of the pool first.
    pub flash: Vec<String>,
    /// What of the pool is on which of them, in the same order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<PoolDevice>,
    /// On how many devices all is that is dirty, as long as none is lost: 1 or 2.
    #[serde(default = "one_copy")]
    pub dirty_copies: u32,
    /// On how many of them clean blocks are, of which the origin has another copy: 1, or as many. 0: not told.
    #[serde(default)]
    pub clean_copies: u32,
    /// `serving`, `new` (never served), `clean` (stopped cleanly, as after an export), `dirty` (in
    /// use, or not stopped cleanly), `failed`, or, while serving from the origins alone, `cache-off`
    /// (the flash takes no writes) or `leaving` (the flash file was removed).
    pub state: String,
    /// What somebody should know about the flash.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notices: Vec<String>,
    /// Why the host's swap file cannot be read back; only while serving.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub swap_trouble: Option<String>,
    /// When it was created, seconds since 1970.
    pub created: u64,
    /// Bytes of all devices.
    pub device_bytes: u64,
    /// Bytes of flash for cached data, as in the statistics: what stays free for cleaning is left out. Only while serving.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<u64>,
    /// Bytes for data in all segments of the log, those that stay free included; 0 while the flash is gone.
    pub log_bytes: u64,
    /// Segments of the log.
    pub segments: u64,
    /// Bytes in a segment.
    pub segment_bytes: u64,
    /// Bytes of RAM the pool takes when it is full and its RAM stage as small as it may be.
    pub ram: u64,
    /// Bytes of RAM that the index, the RAM stage and the buffers of clients take together at most.
    pub ram_most: u64,
    /// Bytes the RAM stage has room for now; only while serving.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ram_stage: Option<u64>,
    /// Bytes it may have room for at most; before it is served, if neither memory nor a setting allows less.
    pub ram_stage_most: u64,
    /// Bytes cached.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cached: Option<u64>,
    /// Bytes the origins do not have yet; zeroed and discarded ranges included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dirty: Option<u64>,
    /// Bytes promised to disks that live on flash, written or not; only while serving.
    #[serde(default)]
    pub promised: u64,
    /// Of the flash, how many bytes may be.
    #[serde(default)]
    pub promised_most: u64,
    /// Why `cached` and `dirty` are absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unknown: Option<String>,
    /// Threads of the daemon that do not come round, and whose clients get no answers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stuck: Vec<super::stats::StuckThread>,
    /// How it was opened; only while serving.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recovery: Option<Recovery>,
    /// The kernel interface that does the I/O; only while serving.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub io: Option<String>,
    /// Data threads; only while serving.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<u64>,
    /// What it names outside itself: origins of disks, directories, addresses and clients of datastores. Not told when the
    /// pool is created.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub claims: Vec<PoolClaim>,
    /// The disks in its registry: name and origin.
    pub disks: Vec<DiskRef>,
}

/// What a disk or datastore of a pool names outside the pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolClaim {
    /// `disk NAME` or `datastore NAME`.
    pub of: String,
    /// What is named, and how it would be used.
    pub reaches: String,
    /// The administrator of this host has confirmed it. Otherwise it is not used.
    pub confirmed: bool,
}

/// A flash device of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolDevice {
    /// Where it is.
    pub path: String,
    /// Its number for life.
    pub uuid: String,
    /// What the kernel calls its model, if it is a drive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// What identifies its hardware: a WWN, serial number, volume UUID or the inode below a loop device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// How it is used: `in-use`, or `emptying`.
    #[serde(default)]
    pub state: String,
    /// When emptying: per cent of its segments that hold nothing any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub emptied_percent: Option<u64>,
    /// Bytes it has.
    pub bytes: u64,
    /// Bytes of them for data in its segments of the log.
    pub log_bytes: u64,
    /// Bytes that are set aside for the kernel's swap, and are no part of the log.
    #[serde(default)]
    pub swap: u64,
    /// Segments of the log on it.
    pub segments: u64,
    /// Of these, free ones, if that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free_segments: Option<u64>,
    /// Bytes cached on it, if that is known: clean ones and dirty ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached: Option<u64>,
    /// Of these, clean ones: on this device alone, if the pool has `clean_copies` 1, else on another one as well. What was dirty, and has been
    /// written to its origin since, counts once, although its second copy is still there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clean: Option<u64>,
    /// Of these, dirty ones: on another device as well, if the pool has `dirty_copies` 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirty: Option<u64>,
    /// It is missing, failed, or older than the others, which have everything that was on it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lost: bool,
    /// What was done on it; only while serving.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io: Option<DeviceIo>,
    /// It answers so slowly that it gets no more than it must.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub slow: bool,
}

fn one_copy() -> u32 {
    1
}

/// What was done on a flash device since the daemon started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceIo {
    /// Reads.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Microseconds that all reads took together.
    pub read_us: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Microseconds that all writes took together.
    pub write_us: u64,
    /// Flushes.
    pub flushes: u64,
    /// Microseconds that all flushes took together.
    pub flush_us: u64,
    /// Operations that failed.
    pub errors: u64,
}

/// A disk as the registry has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskRef {
    /// Name.
    pub name: String,
    /// Origin as it was given.
    pub origin: String,
    /// Bytes.
    pub size: u64,
    /// Cache mode.
    pub mode: CacheMode,
    /// Its origin is there now and of the recorded size.
    pub origin_found: bool,
    /// Bytes of it on flash, if that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached: Option<u64>,
    /// Bytes of it that the origin does not have yet, if that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirty: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_fields_are_refused() {
        let ok = r#"{"name":"a","origin":"/a"}"#;
        let least = serde_json::from_str::<DiskAdd>(ok).unwrap();
        assert_eq!(least.settings, SettingsGiven::default());
        let typo = r#"{"name":"a","origin":"/a","blocksize":4096}"#;
        assert!(
            serde_json::from_str::<DiskAdd>(typo)
                .unwrap_err()
                .to_string()
                .contains("blocksize")
        );
        assert!(serde_json::from_str::<DiskSet>(r#"{"moed":"off"}"#).is_err());
    }

    #[test]
    fn words_are_what_json_says() {
        for mode in [
            CacheMode::WriteBack,
            CacheMode::WriteBackOrdered,
            CacheMode::WriteThrough,
            CacheMode::WriteAround,
            CacheMode::Off,
        ] {
            assert_eq!(serde_json::to_value(mode).unwrap(), mode.word());
            assert_eq!(CacheMode::from(Mode::from(mode)), mode);
        }
        for state in [
            DiskState::Attached,
            DiskState::Waiting,
            DiskState::Refused,
            DiskState::Fenced,
            DiskState::Flushing,
            DiskState::Removing,
        ] {
            assert_eq!(serde_json::to_value(state).unwrap(), state.word());
        }
    }
}
