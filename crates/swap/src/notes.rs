//! What outlives a reboot: which areas there are, and what was set before.
//!
//! `swap.json` in the state directory, written anew as a whole and renamed into place. It belongs to the host, not to the
//! pool: a pool that is taken to another host, or a state directory that is restored there, does not make that one swap.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use hearth_fault::Fault;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::Result;
use crate::in_pool::Lent;
use crate::kernel::Discard;
use crate::tuning::Setting;

/// File in the state directory.
pub const NAME: &str = "swap.json";
/// Of its form.
const VERSION: u32 = 1;
/// The same where an area is in a pool: whoever does not know of that would remove the device as a file.
const VERSION_IN_POOL: u32 = 2;
/// The same where one is encrypted: whoever does not know of that would swap to it in the clear.
const VERSION_ENCRYPTED: u32 = 3;

/// How far an area is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// Its file may be there, in part.
    Making,
    /// It is to be swapped to, now and after a boot.
    Used,
    /// It is to be gone; a boot takes its file away.
    Going,
}

/// One area.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Noted {
    /// Its file, or the loop device over what is set aside of the pool.
    pub path: PathBuf,
    /// Bytes of the file.
    pub size: u64,
    /// In its header.
    pub uuid: Uuid,
    /// The kernel's.
    pub priority: u16,
    /// Is the device told of what is free?
    pub discard: Discard,
    /// How far it is.
    pub stage: Stage,
    /// What is set aside of the pool, if it is that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_pool: Option<Lent>,
    /// What is swapped out there is encrypted, with a key that is made anew each time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub encrypted: bool,
    /// Pages are compressed in memory first.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub zswap: bool,
}

/// All that is noted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notes {
    version: u32,
    /// Whose they are (`machine-id(5)`); empty where a host has none.
    pub host: String,
    /// At most one; an older version made several.
    pub areas: Vec<Noted>,
    /// To be undone with the last area, in the boot in which they were set: another one begins
    /// without them, and other disks may have the names of these.
    pub settings: Vec<Setting>,
    /// The boot in which these were set.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    boot: String,
}

/// This host, as `machine-id(5)` names it.
pub fn this_host() -> String {
    let id = fs::read_to_string("/etc/machine-id").unwrap_or_default();
    id.trim().to_owned()
}

fn this_boot() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

impl Notes {
    /// None yet.
    pub fn none(host: String) -> Notes {
        Notes {
            version: VERSION,
            host,
            areas: Vec::new(),
            settings: Vec::new(),
            boot: String::new(),
        }
    }

    /// Reads them; none where there is no file.
    pub fn read(dir: &Path, host: &str) -> Result<Notes> {
        let path = dir.join(NAME);
        let wrong = |what: String| {
            Fault::new(
                format!("cannot use {}: {what}", path.display()),
                "swap that is on stays on; move the file away to begin anew",
            )
        };
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Ok(Notes::none(host.to_owned()));
            }
            Err(e) => return Err(wrong(e.to_string())),
        };
        let value: serde_json::Value =
            serde_json::from_str(&text).map_err(|e| wrong(e.to_string()))?;
        match value["version"].as_u64() {
            Some(v) if (u64::from(VERSION)..=u64::from(VERSION_ENCRYPTED)).contains(&v) => {}
            Some(v) => {
                return Err(wrong(format!(
                    "it is of version {v}, this build knows 1 to {VERSION_ENCRYPTED}"
                )));
            }
            None => return Err(wrong("it has no version".into())),
        }
        let mut notes: Notes = serde_json::from_value(value).map_err(|e| wrong(e.to_string()))?;
        let boot = std::mem::take(&mut notes.boot);
        if boot != this_boot() {
            notes.settings.clear();
        }
        Ok(notes)
    }

    /// Stores them durably; with nothing to remember there is no file.
    pub fn store(&self, dir: &Path) -> Result<()> {
        let path = dir.join(NAME);
        self.stored(dir, &path).map_err(|e| {
            Fault::new(
                format!("cannot write {}: {e}", path.display()),
                "check the directory, or name another with --state-dir",
            )
        })
    }

    fn stored(&self, dir: &Path, path: &Path) -> io::Result<()> {
        fs::create_dir_all(dir)?;
        if self.areas.is_empty() && self.settings.is_empty() {
            match fs::remove_file(path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        } else {
            let new = dir.join(format!("{NAME}.new"));
            let mut file = File::create(&new)?;
            let mut notes = self.clone();
            if !notes.settings.is_empty() {
                notes.boot = this_boot();
            }
            let any = |what: &dyn Fn(&Noted) -> bool| self.areas.iter().any(what);
            notes.version = match (any(&|a| a.encrypted), any(&|a| a.in_pool.is_some())) {
                (true, _) => VERSION_ENCRYPTED,
                (false, true) => VERSION_IN_POOL,
                (false, false) => VERSION,
            };
            file.write_all(serde_json::to_string_pretty(&notes)?.as_bytes())?;
            file.sync_all()?;
            fs::rename(&new, path)?;
        }
        File::open(dir)?.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some() -> Notes {
        Notes {
            areas: vec![Noted {
                path: "/srv/flash.swap".into(),
                size: 8 << 30,
                uuid: Uuid::from_u128(5),
                priority: 100,
                discard: Discard::Off,
                stage: Stage::Used,
                in_pool: None,
                encrypted: false,
                zswap: false,
            }],
            ..Notes::none("h".into())
        }
    }

    #[test]
    fn they_come_back_and_go() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("state");
        assert_eq!(Notes::read(&at, "h"), Ok(Notes::none("h".into())));
        some().store(&at).unwrap();
        assert_eq!(Notes::read(&at, "other"), Ok(some()));
        Notes::none("h".into()).store(&at).unwrap();
        assert!(!at.join(NAME).exists());
    }

    #[test]
    fn settings_of_another_boot_are_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let mut notes = some();
        notes.settings.push(Setting {
            path: "/sys/block/sdx/queue/rotational".into(),
            before: "1".into(),
            now: "0".into(),
            why: "w".into(),
            disk: Some(3),
        });
        notes.store(dir.path()).unwrap();
        assert_eq!(Notes::read(dir.path(), "h"), Ok(notes));
        let path = dir.path().join(NAME);
        let text = fs::read_to_string(&path).unwrap();
        for boot in ["another", ""] {
            let other = text.replace(&this_boot(), boot);
            assert_ne!(other, text);
            fs::write(&path, other).unwrap();
            assert_eq!(Notes::read(dir.path(), "h"), Ok(some()), "{boot}");
        }
    }

    #[test]
    fn the_form_stays() {
        let golden = r#"{"version":1,"host":"h","areas":[{"path":"/srv/flash.swap","size":8589934592,"uuid":"00000000-0000-0000-0000-000000000005","priority":100,"discard":"off","stage":"used"}],"settings":[]}"#;
        assert_eq!(serde_json::to_string(&some()).unwrap(), golden);
    }

    #[test]
    fn an_area_in_a_pool_is_of_another_version() {
        let golden = r#"{"path":"/dev/loop7","size":4096,"uuid":"00000000-0000-0000-0000-000000000005","priority":100,"discard":"off","stage":"used","in_pool":{"flash":"/dev/sdb","pool":"00000000-0000-0000-0000-000000000001","device":"00000000-0000-0000-0000-000000000002","offset":1048576,"bytes":4096}}"#;
        let mut notes = some();
        notes.areas[0] = serde_json::from_str(golden).unwrap();
        assert_eq!(serde_json::to_string(&notes.areas[0]).unwrap(), golden);
        let dir = tempfile::tempdir().unwrap();
        notes.store(dir.path()).unwrap();
        let text = fs::read_to_string(dir.path().join(NAME)).unwrap();
        assert!(text.contains("\"version\": 2"), "{text}");
        let read = Notes::read(dir.path(), "h").unwrap();
        assert_eq!(read.areas, notes.areas);
        // One that is encrypted is of yet another.
        assert!(!text.contains("encrypted"), "{text}");
        notes.areas[0].encrypted = true;
        notes.store(dir.path()).unwrap();
        let text = fs::read_to_string(dir.path().join(NAME)).unwrap();
        assert!(text.contains("\"version\": 3") && text.contains("\"encrypted\": true"));
        let read = Notes::read(dir.path(), "h").unwrap();
        assert_eq!(read.areas, notes.areas);
        // Without it an older build can read them again.
        some().store(dir.path()).unwrap();
        let text = fs::read_to_string(dir.path().join(NAME)).unwrap();
        assert!(text.contains("\"version\": 1"), "{text}");
    }

    #[test]
    fn others_are_refused_in_words() {
        let dir = tempfile::tempdir().unwrap();
        for (text, word) in [
            ("{\"version\": 4}", "version 4"),
            ("{}", "no version"),
            ("x", "expected"),
            ("{\"version\": 1}", "missing"),
        ] {
            std::fs::write(dir.path().join(NAME), text).unwrap();
            let fault = Notes::read(dir.path(), "h").unwrap_err();
            assert!(fault.what.contains(word), "{fault}");
        }
    }
}
