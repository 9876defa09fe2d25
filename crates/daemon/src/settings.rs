//! The settings of a disk, one row each.
//!
//! A setting is given on the command line or in the API, checked, kept in the pool's registry, told to
//! the engine, the origin or the exports while the disk is served, and shown. All of that is in its row
//! of [`SETTINGS`]; who adds, changes or shows disks goes through the rows and knows none of them.
//! What is left to a new setting besides its row is the field it is kept in (`hearth_format::DiskRecord`)
//! and its fields in the bodies of the API (`api/types.rs`), for which the tests below ask.

use std::time::Duration;

use hearth_engine::api::{DiskConfig, Mode};
use hearth_engine::{ControlError, Engine};
use hearth_format::DiskRecord;
use hearth_io::{BLOCK, Device};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

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

/// What a setting's value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    /// A cache mode.
    Mode,
    /// Bytes.
    Size,
    /// Seconds, perhaps with a fraction.
    Seconds,
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
    engine: fn(&Engine, &DiskRecord) -> std::result::Result<(), ControlError>,
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

/// All settings, in the order they are shown.
pub const SETTINGS: &[Setting] = &[
    Setting {
        name: "mode",
        takes: Takes::Mode,
        help: "Cache mode",
        get: |record| json!(mode_of(record.mode)),
        set: |record, value| put(&mut record.mode, value, |mode| Ok(mode_to(mode))),
        engine: |engine, record| engine.set_mode(record.id, Mode::from(mode_of(record.mode))),
        ..QUIET
    },
    Setting {
        name: "block_size",
        help: "Unit in which misses are filled, 4K to 1M",
        help_add: " [default: 4K]",
        get: |record| json!(block_size(record)),
        set: |record, value| put(&mut record.block_size, value, check_block_size),
        engine: |engine, record| engine.set_block_size(record.id, block_size(record)),
        ..QUIET
    },
    // What is kept for a disk depends on all others: `keep_shares` tells the engine.
    Setting {
        name: "min",
        help: "Flash kept for this disk",
        help_add: " [default: none]",
        get: |record| json!(record.min_bytes),
        set: |record, value| put(&mut record.min_bytes, value, Ok),
        check: check_limits,
        ..QUIET
    },
    Setting {
        name: "max",
        help: "Most flash it may use",
        help_set: "; 0 for no limit",
        help_add: " [default: no limit]",
        get: |record| json!(record.max_bytes),
        set: |record, value| put(&mut record.max_bytes, value, Ok),
        check: check_limits,
        ..QUIET
    },
    Setting {
        name: "seq_cutoff",
        help: "Sequential reads longer than this are not cached; 0 caches all",
        help_add: " [default: 1M]",
        get: |record| json!(record.seq_cutoff),
        set: |record, value| put(&mut record.seq_cutoff, value, Ok),
        engine: |engine, record| engine.set_seq_cutoff(record.id, record.seq_cutoff),
        ..QUIET
    },
    Setting {
        name: "read_only",
        takes: Takes::Flag,
        help: "Refuse writes",
        get: |record| json!(record.read_only),
        set: |record, value| put(&mut record.read_only, value, Ok),
        ..QUIET
    },
    Setting {
        name: "auto",
        takes: Takes::Switch,
        help: "Let the flash kept for it follow the advice, between --min and --max",
        get: |record| json!(record.auto),
        set: |record, value| put(&mut record.auto, value, Ok),
        ..QUIET
    },
    Setting {
        name: "origin_timeout",
        takes: Takes::Seconds,
        help: "Seconds that requests wait for an origin's server that is gone before they fail",
        help_add: " [default: 30]",
        get: |record| json!(origin::timeout(record).as_secs_f64()),
        set: |record, value| put(&mut record.origin_timeout_ms, value, check_timeout),
        tell: |_, device, record| {
            if let Some(remote) = device.and_then(|d| d.as_remote()) {
                remote.set_timeout(Duration::from_millis(record.origin_timeout_ms.into()));
            }
        },
        ..QUIET
    },
    Setting {
        name: "clients",
        takes: Takes::Count,
        help: "Most clients at a time: processes, not connections; over TCP, hosts. 1 keeps a second virtual machine out, and live migration [default: 0, any number]",
        get: |record| json!(record.clients),
        set: |record, value| put(&mut record.clients, value, Ok),
        tell: |export, _, record| {
            if let Some(export) = export {
                export.clients().set_limit(record.clients);
            }
        },
        ..QUIET
    },
];

/// A record with what holds where nothing is said.
pub(crate) fn defaults() -> DiskRecord {
    DiskRecord {
        seq_cutoff: SEQ_CUTOFF,
        ..DiskRecord::default()
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
        engine: &Engine,
        record: &DiskRecord,
    ) -> std::result::Result<(), ControlError> {
        (self.engine)(engine, record)
    }
}

/// What the engine is told of a disk that it is given.
pub(crate) fn config(record: &DiskRecord, device: &Device) -> DiskConfig {
    DiskConfig {
        id: record.id,
        size: record.size,
        origin_align: device.align(),
        mode: Mode::from(mode_of(record.mode)),
        block_size: block_size(record),
        min_bytes: record.min_bytes,
        max_bytes: record.max_bytes,
        seq_cutoff: record.seq_cutoff,
        read_only: record.read_only,
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
    fn a_body_of_which_one_setting_will_not_do_changes_nothing() {
        let mut record = defaults();
        let body = json!({ "seq_cutoff": 0, "origin_timeout": 0.1 });
        assert!(change(&mut record, &body).is_err());
        assert_eq!(record, defaults());
    }

    /// Fields of a body of the API, from the document it is described by.
    fn fields(schema: &str) -> Vec<String> {
        let document: Value =
            serde_json::from_str(include_str!("../../../docs/openapi.json")).unwrap();
        let pointer = format!("/components/schemas/{schema}/properties");
        let fields = document.pointer(&pointer).unwrap().as_object().unwrap();
        fields.keys().cloned().collect()
    }

    #[test]
    fn the_api_takes_and_shows_every_setting() {
        let (add, set, info) = (fields("DiskAdd"), fields("DiskSet"), fields("DiskInfo"));
        for Setting { name, takes, .. } in SETTINGS {
            let name = (*name).to_owned();
            assert!(add.contains(&name), "{name}");
            assert_eq!(set.contains(&name), *takes != Takes::Flag, "{name}");
            // Who the clients are has that name; the connection to an origin's server is told as a whole.
            let elsewhere = ["clients", "origin_timeout"].contains(&name.as_str());
            assert!(info.contains(&name) || elsewhere, "{name}");
        }
        // What is left are decisions about a disk, which are no settings: none is kept as it was given.
        let decisions = [
            "allow_backing",
            "size_from_origin",
            "sole_user",
            "takeover",
            "trust",
        ];
        let known = |name: &String| SETTINGS.iter().any(|s| s.name == name);
        for name in set.iter().filter(|name| !known(name)) {
            assert!(decisions.contains(&name.as_str()), "{name}");
        }
    }

    #[test]
    fn what_is_set_is_kept_and_shown() {
        for setting in SETTINGS {
            let value = match setting.takes {
                Takes::Mode => json!("write-around"),
                Takes::Size => json!(65536),
                Takes::Seconds => json!(7.5),
                Takes::Count => json!(3),
                Takes::Switch | Takes::Flag => json!(true),
            };
            let mut record = defaults();
            assert_ne!(setting.shown(&record), value, "{}", setting.name);
            let named = change(&mut record, &json!({ setting.name: value })).unwrap();
            assert_eq!(named.len(), 1);
            assert_eq!(setting.shown(&record), value, "{}", setting.name);
        }
    }
}
