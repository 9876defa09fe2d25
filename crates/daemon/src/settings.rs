//! The settings of a disk, one row each.
//!
//! A setting is given on the command line or in the API, checked, kept in the pool's registry, told to
//! the engine, the origin or the exports while the disk is served, and shown. All of that is in its row
//! of [`SETTINGS`]; who adds, changes or shows disks goes through the rows and knows none of them.
//! The bodies of the API that carry settings ([`SettingsGiven`], [`SettingsChanged`], [`SettingsShown`]) are
//! made from the same rows. What is left to a new setting besides its row is the field it is kept in
//! (`hearth_format::DiskRecord`).

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::marker::PhantomData;

use hearth_engine::ControlError;
use hearth_engine::api::{DiskConfig, Home, Mode};
use hearth_format::DiskRecord;
use hearth_io::{BLOCK, Device};
use serde::de::{DeserializeOwned, Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};
use utoipa::ToSchema;

use crate::api::types::{CacheMode, OnStart};
use crate::daemon::Daemon;
use crate::error::{Error, Result};
use crate::exports::DiskExport;
use crate::origin;
use crate::pool::{mode_of, mode_to};
use crate::size::human;

/// Cache block size of a disk that leaves it to us.
const BLOCK_SIZE_AUTO: u32 = BLOCK as u32;
/// Sequential bypass of a disk whose owner does not say: 1 MiB, as Open CAS has it.
const SEQ_CUTOFF: u64 = 1 << 20;
/// Most clients that can be asked for; more is no limit worth the name.
pub const CLIENTS_MAX: u32 = 1000;

/// How far behind the origin of an ordered disk may be, in seconds, if there is a limit.
pub const MAX_AGE: std::ops::RangeInclusive<f64> = 1.0..=1_000_000.0;

/// What a setting's value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    /// A cache mode.
    Mode,
    /// An answer to what happens at a start.
    OnStart,
    /// Bytes.
    Size,
    /// Seconds, perhaps with a fraction.
    Seconds,
    /// A time: seconds in the API, with a unit on the command line.
    Age,
    /// A number up to [`CLIENTS_MAX`].
    Count,
    /// On or off; when a disk is added, it is off unless named.
    Switch,
    /// Given when a disk is added, or not at all.
    Flag,
}

/// A setting of a disk.
pub struct Setting {
    /// Its name in the API; on the command line it has dashes.
    pub name: &'static str,
    /// Its value.
    pub takes: Takes,
    /// What it is, for people.
    pub help: &'static str,
    /// What else may be said where it is changed.
    pub help_set: &'static str,
    /// What else may be said where a disk is added: mostly what it is if it is not given.
    pub help_add: &'static str,
    /// What the record says, as the API shows it.
    get: fn(&DiskRecord) -> Value,
    /// Puts a value into the record, or says why it will not do.
    set: fn(&mut DiskRecord, &Value) -> Result<()>,
    /// Judges a record in which it was changed, beside the other settings.
    check: fn(&DiskRecord) -> Result<()>,
    /// Tells those who serve the disk, as far as they are there.
    tell: fn(Option<&DiskExport>, Option<&Device>, &DiskRecord),
    /// Tells the engine, which has the disk.
    engine: fn(&Daemon, &DiskRecord) -> std::result::Result<(), ControlError>,
}

/// A row to start from: a number nobody need be told of.
const QUIET: Setting = Setting {
    name: "",
    takes: Takes::Size,
    help: "",
    help_set: "",
    help_add: "",
    get: |_| Value::Null,
    set: |_, _| Ok(()),
    check: |_| Ok(()),
    tell: |_, _, _| {},
    engine: |_, _| Ok(()),
};

/// Makes the table of settings, and what the bodies of the API have of it.
///
/// Before a row stands what the API calls the setting, what its value is there, and how a record says it;
/// with `fixed` if it cannot be changed later, and with `shown as` if the API has another name for it in a
/// description of a disk.
macro_rules! settings {
    ($(
        $(#[$about:meta])*
        $name:ident: $value:ident $(, fixed $since:literal)? $(, shown as $shown:tt)?
            = $get:expr, $row:expr;
    )*) => {
        /// All settings, in the order they are shown.
        pub const SETTINGS: &[Setting] = &[$(
            Setting {
                name: stringify!($name),
                get: |record| {
                    let get: fn(&DiskRecord) -> $value = $get;
                    json!(get(record))
                },
                ..$row
            },
        )*];

        /// Settings of a disk to add; those that are absent are as they are by default.
        #[derive(Clone, Debug, Default, PartialEq, Serialize, ToSchema)]
        pub struct SettingsGiven {
            $(
                $(#[$about])*
                #[serde(skip_serializing_if = "Option::is_none")]
                pub $name: Option<$value>,
            )*
        }

        /// Settings of a disk to change; those that are absent stay as they are.
        #[derive(Clone, Debug, Default, PartialEq, Serialize, ToSchema)]
        pub struct SettingsChanged {
            $(
                $(#[$about])*
                $(
                    #[doc = $since]
                    #[schema(ignore)]
                )?
                #[serde(skip_serializing_if = "Option::is_none")]
                pub $name: Option<$value>,
            )*
        }

        /// Settings of a disk as they are. A daemon of before a setting does not tell it.
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
        #[serde(default)]
        pub struct SettingsShown {
            $(
                $(#[$about])*
                $(#[serde(rename = $shown)])?
                #[schema(required = true)]
                pub $name: $value,
            )*
        }

        impl SettingsShown {
            /// What a record says.
            pub fn of(record: &DiskRecord) -> SettingsShown {
                SettingsShown {
                    $($name: {
                        let get: fn(&DiskRecord) -> $value = $get;
                        get(record)
                    },)*
                }
            }
        }

        settings!(takes SettingsGiven, true: $($name)*);
        settings!(takes SettingsChanged, false: $($name)*);
    };
    // A body refuses what is no setting, so that a misspelt one is an error and not one silently left
    // alone.
    (takes $body:ident, $adds:literal: $($name:ident)*) => {
        impl Named for $body {
            const ADDS: bool = $adds;

            fn take<'de, A: MapAccess<'de>>(
                &mut self,
                name: &str,
                values: &mut A,
            ) -> std::result::Result<bool, A::Error> {
                $(if name == stringify!($name) {
                    if self.$name.is_some() {
                        return Err(A::Error::duplicate_field(stringify!($name)));
                    }
                    let value = values.next_value();
                    self.$name = value.map_err(|e| A::Error::custom(format_args!("{name}: {e}")))?;
                    return Ok(true);
                })*
                Ok(false)
            }
        }

        impl<'de> Deserialize<'de> for $body {
            fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<$body, D::Error> {
                from.deserialize_map(Reading(PhantomData))
            }
        }
    };
}

/// A body with settings as its fields.
trait Named: Default {
    /// It adds a disk, and may have those that cannot be changed.
    const ADDS: bool;

    /// Takes the value of a setting; false if there is none of that name.
    fn take<'de, A: MapAccess<'de>>(
        &mut self,
        name: &str,
        values: &mut A,
    ) -> std::result::Result<bool, A::Error>;
}

/// Reads a body's settings: all that is in it besides the fields of its own.
struct Reading<B>(PhantomData<B>);

impl<'de, B: Named> Visitor<'de> for Reading<B> {
    type Value = B;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("settings of a disk")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut given: A) -> std::result::Result<B, A::Error> {
        let mut body = B::default();
        while let Some(name) = given.next_key::<String>()? {
            let known = SETTINGS.iter().find(|s| s.name == name);
            let fits = known.is_some_and(|s| B::ADDS || s.takes != Takes::Flag);
            if !fits || !body.take(&name, &mut given)? {
                return Err(A::Error::custom(format_args!("unknown field `{name}`")));
            }
        }
        Ok(body)
    }
}

settings! {
    /// Cache mode.
    mode: CacheMode = |record| mode_of(record.mode), Setting {
        takes: Takes::Mode,
        help: "Cache mode",
        set: |record, value| put(&mut record.mode, value, |mode| Ok(mode_to(mode))),
        check: check_pin,
        engine: treat_writes,
        ..QUIET
    };
    /// Writes are in the origin before they are answered, whatever the mode: for the time of a backup of the origin.
    hold: bool = |record| record.hold, Setting {
        takes: Takes::Switch,
        help: "Write to the origin before a write is answered, whatever the mode: for the time of a backup of the origin, after a flush",
        set: |record, value| put(&mut record.hold, value, Ok),
        engine: treat_writes,
        ..QUIET
    };
    /// Unit of filling in bytes: a power of two from 4096 to 1048576.
    block_size: u64 = |record| block_size(record).into(), Setting {
        help: "Unit in which misses are filled, 4K to 1M",
        help_add: " [default: 4K]",
        set: |record, value| put(&mut record.block_size, value, check_block_size),
        engine: |daemon, record| daemon.engine().set_block_size(record.id, block_size(record)),
        ..QUIET
    };
    // What is kept for a disk depends on all others: `keep_shares` tells the engine.
    /// Bytes of flash kept for this disk: 0 or at least 4096.
    min: u64 = |record| record.min_bytes, Setting {
        help: "Flash kept for this disk",
        help_add: " [default: none]",
        set: |record, value| put(&mut record.min_bytes, value, Ok),
        check: check_limits,
        ..QUIET
    };
    /// Most bytes of flash it may use, at least 4096; 0 means no limit.
    max: u64 = |record| record.max_bytes, Setting {
        help: "Most flash it may use",
        help_set: "; 0 for no limit",
        help_add: " [default: no limit]",
        set: |record, value| put(&mut record.max_bytes, value, Ok),
        check: |record| check_limits(record).and_then(|()| check_pin(record)),
        ..QUIET
    };
    /// All of it is to be on flash: what is missing is read in, in the background, and stays.
    pin: bool = |record| record.pin, Setting {
        takes: Takes::Switch,
        help: "Have all of it on flash: what is missing is read in, in the background, and stays",
        set: |record, value| put(&mut record.pin, value, Ok),
        check: check_pin,
        ..QUIET
    };
    /// Bytes after which a sequential read stream is no longer cached; 0 caches all.
    seq_cutoff: u64 = |record| record.seq_cutoff, Setting {
        help: "Sequential reads longer than this are not cached; 0 caches all",
        help_add: " [default: 1M]",
        set: |record, value| put(&mut record.seq_cutoff, value, Ok),
        engine: |daemon, record| daemon.engine().set_seq_cutoff(record.id, record.seq_cutoff),
        ..QUIET
    };
    /// Refuse writes.
    read_only: bool, fixed "Decided when the disk is added." = |record| record.read_only, Setting {
        takes: Takes::Flag,
        help: "Refuse writes",
        set: |record, value| put(&mut record.read_only, value, Ok),
        ..QUIET
    };
    /// Let the flash kept for it follow the advice, within `min` and `max`.
    auto: bool = |record| record.auto, Setting {
        takes: Takes::Switch,
        help: "Let the flash kept for it follow the advice, between --min and --max",
        set: |record, value| put(&mut record.auto, value, Ok),
        ..QUIET
    };
    /// Seconds that requests wait for an origin that does not answer, or whose server is gone, before they fail.
    origin_timeout: f64 = |record| origin::timeout(record).as_secs_f64(), Setting {
        takes: Takes::Seconds,
        help: "Seconds that requests wait for an origin that does not answer, or whose server is gone, before they fail",
        help_add: " [default: 30]",
        set: |record, value| put(&mut record.origin_timeout_ms, value, check_timeout),
        tell: |_, device, record| {
            if let Some(device) = device {
                device.set_patience(origin::timeout(record));
                if let Some(remote) = device.as_remote() {
                    remote.set_timeout(origin::timeout(record));
                }
            }
        },
        ..QUIET
    };
    /// Of an ordered disk: seconds that its origin may lack something that was flushed, before its writes wait; 0 means
    /// no limit. While the disk is not ordered there is none.
    max_age: f64 = |record| if is_ordered(record) { f64::from(record.max_age_ms) / 1000.0 } else { 0.0 }, Setting {
        takes: Takes::Age,
        help: "How far behind the origin may be with --mode write-back-ordered, such as 30s, before writes wait for it",
        help_set: "; 0 for no limit",
        help_add: " [default: no limit]",
        set: |record, value| put(&mut record.max_age_ms, value, check_age),
        check: check_ordered,
        engine: |daemon, record| daemon.engine().set_max_age(record.id, max_age_ns(record)),
        ..QUIET
    };
    /// What becomes of cached blocks at a start, where the origin may have changed and does not show it: a block device,
    /// an NBD export, a file after a crash.
    on_start: OnStart = |record| on_start_of(record.on_start), Setting {
        takes: Takes::OnStart,
        help: "Cached blocks at a start, where the origin does not show whether it changed: sample compares some of them before they count, drop begins with an empty cache, keep uses them at once",
        help_add: " [default: sample]",
        set: |record, value| put(&mut record.on_start, value, |on_start| Ok(on_start_to(on_start))),
        ..QUIET
    };
    /// Most clients (processes, not connections) at a time; 0, the default, means any number.
    clients: u32, shown as "client_limit" = |record| record.clients, Setting {
        takes: Takes::Count,
        help: "Most clients at a time: processes, not connections; over TCP, hosts. 1 keeps a second virtual machine out, and live migration [default: 0, any number]",
        set: |record, value| put(&mut record.clients, value, Ok),
        tell: |export, _, record| {
            if let Some(export) = export {
                export.clients().set_limit(record.clients);
            }
        },
        ..QUIET
    };
}

fn on_start_of(kept: hearth_format::OnStart) -> OnStart {
    match kept {
        hearth_format::OnStart::Sample => OnStart::Sample,
        hearth_format::OnStart::Drop => OnStart::Drop,
        hearth_format::OnStart::Keep => OnStart::Keep,
    }
}

fn on_start_to(asked: OnStart) -> hearth_format::OnStart {
    match asked {
        OnStart::Sample => hearth_format::OnStart::Sample,
        OnStart::Drop => hearth_format::OnStart::Drop,
        OnStart::Keep => hearth_format::OnStart::Keep,
    }
}

/// A record with what holds where nothing is said.
pub(crate) fn defaults() -> DiskRecord {
    DiskRecord {
        seq_cutoff: SEQ_CUTOFF,
        ..DiskRecord::default()
    }
}

/// Names the settings of a record: another name for others.
pub(crate) fn version(record: &DiskRecord) -> String {
    let mut hasher = DefaultHasher::new();
    json!(SettingsShown::of(record))
        .to_string()
        .hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// Refuses a change of settings that is based on others than there are.
pub(crate) fn check_version(record: &DiskRecord, based_on: Option<&str>) -> Result<()> {
    match based_on {
        Some(known) if known != version(record) => Err(Error::conflict(
            format!(
                "the settings of disk {} were changed meanwhile",
                record.name
            ),
            "look at them again, and repeat the change if it is still wanted",
        )),
        _ => Ok(()),
    }
}

/// Puts the settings that `body` names into `record`, if all of them will do; returns which.
pub(crate) fn change(
    record: &mut DiskRecord,
    body: &impl Serialize,
) -> Result<Vec<&'static Setting>> {
    let named = serde_json::to_value(body)
        .map_err(|e| Error::internal(format!("cannot read the settings of a disk: {e}")))?;
    let mut wanted = record.clone();
    let mut changed = Vec::new();
    for setting in SETTINGS {
        if let Some(value) = named.get(setting.name).filter(|v| !v.is_null()) {
            (setting.set)(&mut wanted, value)?;
            changed.push(setting);
        }
    }
    // Who changes something else need not mend what an older version took.
    for setting in &changed {
        (setting.check)(&wanted)?;
    }
    *record = wanted;
    Ok(changed)
}

impl Setting {
    /// What `record` says, as the API shows it.
    pub fn shown(&self, record: &DiskRecord) -> Value {
        (self.get)(record)
    }

    /// Tells those who serve the disk, as far as they are there.
    pub(crate) fn tell(
        &self,
        export: Option<&DiskExport>,
        device: Option<&Device>,
        record: &DiskRecord,
    ) {
        (self.tell)(export, device, record);
    }

    /// Tells the engine, which has the disk.
    pub(crate) fn tell_engine(
        &self,
        daemon: &Daemon,
        record: &DiskRecord,
    ) -> std::result::Result<(), ControlError> {
        (self.engine)(daemon, record)
    }
}

/// How the engine treats writes of a disk: while it is held, none of them is on flash only.
pub(crate) fn mode(record: &DiskRecord, held: bool) -> Mode {
    match Mode::from(mode_of(record.mode)) {
        Mode::WriteBack | Mode::WriteBackOrdered if held && !record.is_flash_only() => {
            Mode::WriteThrough
        }
        mode => mode,
    }
}

fn treat_writes(daemon: &Daemon, record: &DiskRecord) -> std::result::Result<(), ControlError> {
    daemon.treat_writes(record.id, || Some(mode(record, record.hold)))
}

/// What the engine is told of a disk that it is given.
pub(crate) fn config(record: &DiskRecord, device: &Device) -> DiskConfig {
    DiskConfig {
        id: record.id,
        size: record.size,
        origin_align: device.align(),
        mode: mode(record, record.hold),
        block_size: block_size(record),
        min_bytes: record.kept_bytes(),
        max_bytes: record.max_bytes,
        seq_cutoff: record.seq_cutoff,
        read_only: record.read_only,
        home: home(record.home),
    }
}

/// Takes a value out of a body whose form was checked when it was read.
fn put<V: DeserializeOwned, T>(
    place: &mut T,
    value: &Value,
    check: impl FnOnce(V) -> Result<T>,
) -> Result<()> {
    let value = V::deserialize(value).map_err(|e| {
        Error::invalid(
            format!("a setting has no such value: {e}"),
            "see docs/api.md",
        )
    })?;
    *place = check(value)?;
    Ok(())
}

/// Where a disk lives, as the engine says it.
pub(crate) fn home(home: hearth_format::Home) -> Home {
    match home {
        hearth_format::Home::Origin => Home::Origin,
        hearth_format::Home::Flash => Home::Flash,
        hearth_format::Home::Scratch => Home::Scratch,
        hearth_format::Home::Moving => Home::Moving,
    }
}

fn block_size(record: &DiskRecord) -> u32 {
    match record.block_size {
        0 => BLOCK_SIZE_AUTO,
        bytes => bytes,
    }
}

fn check_block_size(bytes: u64) -> Result<u32> {
    match u32::try_from(bytes) {
        Ok(n) if n.is_power_of_two() && (4096..=1 << 20).contains(&n) => Ok(n),
        _ => Err(Error::invalid(
            format!("the cache block size {bytes} is no power of two from 4K to 1M"),
            "choose 4K, 8K, 16K, 32K, 64K, 128K, 256K, 512K or 1M",
        )),
    }
}

/// Milliseconds for the registry of a limit in seconds.
fn check_timeout(seconds: f64) -> Result<u32> {
    if origin::ORIGIN_TIMEOUT.contains(&seconds) {
        return Ok((seconds * 1000.0) as u32);
    }
    Err(Error::invalid(
        format!(
            "the origin timeout of {seconds} s is not between {} and {} s",
            origin::ORIGIN_TIMEOUT.start(),
            origin::ORIGIN_TIMEOUT.end()
        ),
        "30 s outlast the restart of most servers",
    ))
}

/// How far behind an ordered disk's origin may be, in nanoseconds.
pub(crate) fn max_age_ns(record: &DiskRecord) -> u64 {
    u64::from(record.max_age_ms) * 1_000_000
}

/// Milliseconds for the registry of an age in seconds.
fn check_age(seconds: f64) -> Result<u32> {
    if seconds == 0.0 || MAX_AGE.contains(&seconds) {
        return Ok((seconds * 1000.0) as u32);
    }
    Err(Error::invalid(
        format!(
            "the origin cannot be kept within {seconds} s: that is not between {} and {} s",
            MAX_AGE.start(),
            MAX_AGE.end()
        ),
        "30s suits most disks; 0 is no limit",
    ))
}

fn is_ordered(record: &DiskRecord) -> bool {
    record.mode == hearth_format::CacheMode::WriteBackOrdered
}

/// No other mode keeps to a limit of age.
fn check_ordered(record: &DiskRecord) -> Result<()> {
    if record.max_age_ms == 0 || is_ordered(record) {
        return Ok(());
    }
    Err(Error::invalid(
        format!(
            "a limit to how far behind the origin may be means nothing in mode {}",
            mode_of(record.mode).word()
        ),
        "choose --mode write-back-ordered, or leave --max-age out",
    ))
}

/// What is pinned is cached whole.
fn check_pin(record: &DiskRecord) -> Result<()> {
    if !record.pin {
        return Ok(());
    }
    let (fault, remedy) = if record.mode == hearth_format::CacheMode::Off {
        (
            "nothing of it is cached with --mode off",
            "choose another mode",
        )
    } else if record.max_bytes != 0 {
        ("it has a limit", "lift that with --max 0")
    } else {
        return Ok(());
    };
    Err(Error::invalid(
        format!("all of a disk cannot be kept on flash while {fault}"),
        format!("{remedy}, or unpin the disk with --no-pin"),
    ))
}

/// Flash is given in blocks: less than one would be no flash kept, and no limit.
fn check_limits(record: &DiskRecord) -> Result<()> {
    let (min, max) = (record.min_bytes, record.max_bytes);
    for (bytes, what, remedy) in [
        (
            min,
            "flash kept for the disk",
            "give --min 4K or more, or 0 to keep none",
        ),
        (
            max,
            "flash the disk may use",
            "give --max 4K or more, or 0 for no limit",
        ),
    ] {
        if (1..BLOCK).contains(&bytes) {
            return Err(Error::invalid(
                format!("the {what} ({}) is less than a block, 4 KiB", human(bytes)),
                remedy,
            ));
        }
    }
    if max != 0 && min > max {
        return Err(Error::invalid(
            format!(
                "the flash kept for the disk ({}) is more than its limit ({})",
                human(min),
                human(max)
            ),
            "lower --min or raise --max",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(body: &Value) -> Result<DiskRecord> {
        let mut record = defaults();
        change(&mut record, body).map(|_| record)
    }

    #[test]
    fn block_sizes() {
        assert_eq!(block_size(&defaults()), 4096);
        let given = changed(&json!({ "block_size": 65536 })).unwrap();
        assert_eq!(block_size(&given), 65536);
        for bad in [0, 512, 5000, 2 << 20, u64::MAX] {
            assert!(changed(&json!({ "block_size": bad })).is_err(), "{bad}");
        }
    }

    #[test]
    fn limits() {
        const K: u64 = 1 << 10;
        let given = |min: u64, max: u64| changed(&json!({ "min": min, "max": max }));
        assert!(given(0, 0).is_ok());
        assert!(given(10 * K, 0).is_ok());
        assert!(given(10 * K, 10 * K).is_ok());
        assert!(given(11 * K, 10 * K).is_err());
        assert!(given(4 * K, 4 * K).is_ok());
        let refused = |min, max| given(min, max).unwrap_err().remedy;
        for few in [1, 512, 4 * K - 1] {
            assert!(refused(0, few).contains("--max 4K"), "{few}");
            assert!(refused(few, 0).contains("--min 4K"), "{few}");
        }
    }

    #[test]
    fn max_age_needs_order() {
        for mode in ["write-back", "write-through", "off"] {
            let refused = changed(&json!({ "mode": mode, "max_age": 30 })).unwrap_err();
            assert!(refused.remedy.contains("write-back-ordered"), "{refused}");
        }
        let mut record = changed(&json!({ "mode": "write-back-ordered", "max_age": 30 })).unwrap();
        assert_eq!(SettingsShown::of(&record).max_age, 30.0);
        // Not shown as a promise while nothing keeps it.
        change(&mut record, &json!({ "mode": "write-back" })).unwrap();
        assert_eq!(SettingsShown::of(&record).max_age, 0.0);
        assert!(change(&mut record, &json!({ "max_age": 60 })).is_err());
        change(&mut record, &json!({ "max_age": 0 })).unwrap();
    }

    #[test]
    fn stale_version_is_a_conflict() {
        let mut record = defaults();
        let based_on = version(&record);
        check_version(&record, Some(&based_on)).unwrap();
        change(&mut record, &json!({ "seq_cutoff": 0 })).unwrap();
        check_version(&record, None).unwrap();
        let refused = check_version(&record, Some(&based_on)).unwrap_err();
        assert_eq!(refused.kind, crate::error::Kind::Conflict);
        check_version(&record, Some(&version(&record))).unwrap();
    }

    #[test]
    fn a_body_of_which_one_setting_will_not_do_changes_nothing() {
        let mut record = defaults();
        let body = json!({ "seq_cutoff": 0, "origin_timeout": 0.1 });
        assert!(change(&mut record, &body).is_err());
        assert_eq!(record, defaults());
    }

    #[test]
    fn the_api_takes_and_shows_every_setting() {
        let shown = serde_json::to_value(SettingsShown::of(&defaults())).unwrap();
        assert_eq!(shown.as_object().unwrap().len(), SETTINGS.len());
        for setting in SETTINGS {
            let name = setting.name;
            let body = json!({ name: setting.shown(&defaults()) });
            let given: SettingsGiven = serde_json::from_value(body.clone()).unwrap();
            assert_eq!(serde_json::to_value(given).unwrap(), body);
            let changed = serde_json::from_value::<SettingsChanged>(body.clone());
            match setting.takes {
                Takes::Flag => assert!(changed.unwrap_err().to_string().contains(name)),
                _ => assert_eq!(serde_json::to_value(changed.unwrap()).unwrap(), body),
            }
            let elsewhere = if name == "clients" {
                "client_limit"
            } else {
                name
            };
            assert_eq!(shown[elsewhere], body[name], "{name}");
        }
    }

    /// What else a change can ask for are decisions about a disk: none is kept as it was given.
    #[test]
    fn what_is_kept_is_in_the_table() {
        let document: Value =
            serde_json::from_str(include_str!("../../../docs/openapi.json")).unwrap();
        let own = document.pointer("/components/schemas/DiskSet/allOf/1/properties");
        let own: Vec<&String> = own.unwrap().as_object().unwrap().keys().collect();
        let decisions = [
            "allow_backing",
            "size",
            "size_from_origin",
            "sole_user",
            "takeover",
            "trust",
            "version",
        ];
        assert_eq!(own, decisions);
        let shown = document.pointer("/components/schemas/SettingsShown/properties");
        assert!(shown.unwrap().get("client_limit").is_some());
    }

    #[test]
    fn a_value_that_is_none_is_told_with_its_setting() {
        let body =
            |text: &str| serde_json::from_str::<SettingsChanged>(text).map_err(|e| e.to_string());
        assert!(
            body(r#"{"mode":"fast"}"#)
                .unwrap_err()
                .starts_with("mode: unknown variant `fast`")
        );
        assert!(
            body(r#"{"min":-1}"#)
                .unwrap_err()
                .starts_with("min: invalid value")
        );
        assert!(
            body(r#"{"moed":"off"}"#)
                .unwrap_err()
                .contains("unknown field `moed`")
        );
        assert!(
            body(r#"{"min":1,"min":2}"#)
                .unwrap_err()
                .contains("duplicate field `min`")
        );
        assert_eq!(body(r#"{"min":null}"#), Ok(SettingsChanged::default()));
    }

    #[test]
    fn what_is_set_is_kept_and_shown() {
        for setting in SETTINGS {
            let value = match setting.takes {
                Takes::Mode => json!("write-around"),
                Takes::OnStart => json!("keep"),
                Takes::Size => json!(65536),
                Takes::Seconds | Takes::Age => json!(7.5),
                Takes::Count => json!(3),
                Takes::Switch | Takes::Flag => json!(true),
            };
            let mut record = defaults();
            if setting.takes == Takes::Age {
                record.mode = hearth_format::CacheMode::WriteBackOrdered;
            }
            assert_ne!(setting.shown(&record), value, "{}", setting.name);
            let named = change(&mut record, &json!({ setting.name: value })).unwrap();
            assert_eq!(named.len(), 1);
            assert_eq!(setting.shown(&record), value, "{}", setting.name);
        }
    }
}
