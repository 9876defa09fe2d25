//! What was changed on the host, and what it was before: so that everything can be set back, also by somebody who comes
//! after a controller that was killed.
//!
//! A change is noted before it is made. Whoever finds the note cannot know whether it was: so what is found must be
//! one of the values that are noted, or somebody else has set it meanwhile, and it is left alone. Notes hold for one boot, for
//! a boot sets all of this back by itself.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Of their form.
pub const VERSION: u32 = 1;

/// Something that is changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Target {
    /// A file of the kernel's.
    File(PathBuf),
    /// What a guest's balloon leaves it, in bytes.
    Balloon {
        /// The guest.
        guest: String,
        /// Its QMP socket; `None` where libvirt runs it.
        qmp: Option<PathBuf>,
        /// Its process: another of this name was never changed.
        pid: Option<u32>,
    },
    /// How often a guest tells of its memory, in seconds.
    Polling {
        /// The guest.
        guest: String,
        /// Its QMP socket.
        qmp: PathBuf,
        /// Its process.
        pid: Option<u32>,
    },
}

impl Target {
    /// For people.
    pub fn text(&self) -> String {
        match self {
            Target::File(path) => path.display().to_string(),
            Target::Balloon { guest, .. } => format!("memory of guest {guest}"),
            Target::Polling { guest, .. } => format!("how often guest {guest} tells of its memory"),
        }
    }
}

/// One change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// Of what.
    pub target: Target,
    /// What it was before the first change.
    pub before: String,
    /// What it may have been set to: the last change, and the one before it, which may still hold if the last was not made.
    pub set: Vec<String>,
    /// Why.
    pub why: String,
}

/// All changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notes {
    version: u32,
    /// The boot they hold for.
    pub boot: String,
    /// In the order of the first change.
    pub notes: Vec<Note>,
}

impl Notes {
    /// None yet.
    pub fn none(boot: &str) -> Notes {
        Notes {
            version: VERSION,
            boot: boot.to_owned(),
            notes: Vec::new(),
        }
    }

    /// Understands what was stored. Those of another boot are none.
    pub fn parse(text: &str, boot: &str) -> Result<Notes, String> {
        let value: serde_json::Value = serde_json::from_str(text).map_err(|e| e.to_string())?;
        match value["version"].as_u64() {
            Some(v) if v == u64::from(VERSION) => {}
            Some(v) => return Err(format!("it is of version {v}, this build knows {VERSION}")),
            None => return Err("it has no version".to_owned()),
        }
        let notes: Notes = serde_json::from_value(value).map_err(|e| e.to_string())?;
        Ok(if notes.boot == boot {
            notes
        } else {
            Notes::none(boot)
        })
    }

    /// Notes a change that is about to be made. What is there now counts as "before" only at the first change.
    pub fn about_to(&mut self, target: &Target, now: &str, set: &str, why: &str) {
        match self.notes.iter_mut().find(|n| n.target == *target) {
            Some(note) => {
                if note.set.last().map(String::as_str) != Some(set) {
                    note.set.push(set.to_owned());
                    let over = note.set.len().saturating_sub(2);
                    note.set.drain(..over);
                }
                note.why = why.to_owned();
            }
            None => self.notes.push(Note {
                target: target.clone(),
                before: now.to_owned(),
                set: vec![set.to_owned()],
                why: why.to_owned(),
            }),
        }
    }

    /// What has to be set back, the last change first.
    pub fn to_undo(&self) -> Vec<Note> {
        self.notes.iter().rev().cloned().collect()
    }

    /// It is as before, or no business of ours any more.
    pub fn forget(&mut self, target: &Target) {
        self.notes.retain(|n| n.target != *target);
    }
}

impl Note {
    /// Is what is there now ours to set back?
    pub fn is_ours(&self, now: &str) -> bool {
        now != self.before && self.set.iter().any(|s| s == now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn file(n: u8) -> Target {
        Target::File(PathBuf::from(format!("/f{n}")))
    }

    #[test]
    fn the_form_stays() {
        let mut notes = Notes::none("b");
        notes.about_to(&file(1), "0", "1", "w");
        let balloon = Target::Balloon {
            guest: "vm".into(),
            qmp: Some("/q".into()),
            pid: Some(7),
        };
        notes.about_to(&balloon, "512", "256", "w");
        let golden = r#"{"version":1,"boot":"b","notes":[{"target":{"file":"/f1"},"before":"0","set":["1"],"why":"w"},{"target":{"balloon":{"guest":"vm","qmp":"/q","pid":7}},"before":"512","set":["256"],"why":"w"}]}"#;
        assert_eq!(serde_json::to_string(&notes).unwrap(), golden);
        assert_eq!(Notes::parse(golden, "b"), Ok(notes));
        assert_eq!(Notes::parse(golden, "c"), Ok(Notes::none("c")));
        assert!(
            Notes::parse("{\"version\":9}", "b")
                .unwrap_err()
                .contains("9")
        );
        assert!(Notes::parse("{", "b").is_err());
    }

    #[derive(Clone, Debug)]
    enum Move {
        Ours(u8, u8),
        Others(u8, u8),
    }

    fn moves() -> impl Strategy<Value = Vec<Move>> {
        let one = prop_oneof![
            8 => (0..4u8, 0..4u8).prop_map(|(f, v)| Move::Ours(f, v)),
            1 => (0..4u8, 10..12u8).prop_map(|(f, v)| Move::Others(f, v)),
        ];
        proptest::collection::vec(one, 0..30)
    }

    proptest! {
        /// Killed at any moment, between any note and its change: what nobody else touched is as before.
        #[test]
        fn undo_restores(moves in moves(), kill in any::<bool>()) {
            let before: BTreeMap<u8, String> = (0..4).map(|f| (f, format!("{}", 20 + f))).collect();
            let mut host = before.clone();
            let mut touched = BTreeMap::new();
            let mut stored = Notes::none("b");
            for (at, one) in moves.iter().enumerate() {
                match one {
                    Move::Ours(f, v) => {
                        // A controller does not fight with somebody else.
                        if touched.contains_key(f) {
                            continue;
                        }
                        stored.about_to(&file(*f), &host[f], &v.to_string(), "");
                        if !(kill && at + 1 == moves.len()) {
                            host.insert(*f, v.to_string());
                        }
                    }
                    Move::Others(f, v) => {
                        touched.insert(*f, v.to_string());
                        host.insert(*f, v.to_string());
                    }
                }
            }
            for note in stored.to_undo() {
                let Target::File(path) = &note.target else { continue };
                let f: u8 = path.to_str().unwrap()[2..].parse().unwrap();
                if note.is_ours(&host[&f]) {
                    host.insert(f, note.before.clone());
                }
                stored.forget(&note.target);
            }
            prop_assert!(stored.notes.is_empty());
            for f in 0..4 {
                let expected = touched.get(&f).unwrap_or(&before[&f]);
                prop_assert_eq!(&host[&f], expected);
            }
        }
    }
}
