//! Settings of a datastore's files by what they are called.
//!
//! The disks of a datastore come and go with its files, so nobody can set each of them by hand. A rule says what the
//! names are like and what is set for such files; of several that fit, the last that says something of a setting
//! holds. A file gets its settings when it becomes a disk, when it is renamed and when the rules change.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use glob::{MatchOptions, Pattern};
use hearth_format::DiskRecord;
use serde_json::{Map, Value};

use crate::api::datastores::FileRule;
use crate::error::{Error, Result};
use crate::settings::{self, SettingsChanged};

/// What can be set by names. All else belongs to a disk that somebody knows by name.
const SETTABLE: &[&str] = &["mode", "block_size", "max", "seq_cutoff"];
/// Most rules of a datastore: each is tried for each file.
const RULES_MAX: usize = 256;

/// Names on a hypervisor's file systems differ in case by accident only.
const HOW: MatchOptions = MatchOptions {
    case_sensitive: false,
    require_literal_separator: true,
    require_literal_leading_dot: false,
};

fn pattern(text: &str) -> Result<Pattern> {
    let bad = |why: String| {
        Error::invalid(
            format!("“{text}” cannot be matched with names: {why}"),
            "write *.vmdk for names that end so, or web/* for all files of the directory web",
        )
    };
    if text.is_empty() || text.contains(['\n', '\t']) {
        return Err(bad(
            "it is empty or has a tab or a line break in it".to_owned()
        ));
    }
    if text.starts_with('/') {
        return Err(bad("it begins with “/”".to_owned()));
    }
    Pattern::new(text).map_err(|e| bad(e.to_string()))
}

fn named(settings: &SettingsChanged) -> Result<Map<String, Value>> {
    match serde_json::to_value(settings) {
        Ok(Value::Object(named)) => Ok(named),
        _ => Err(Error::internal("cannot read the settings of a file")),
    }
}

/// Refuses what cannot be set by names, or is no value.
fn check(rule: &FileRule) -> Result<()> {
    pattern(&rule.pattern)?;
    let named = named(&rule.settings)?;
    if let Some(other) = named.keys().find(|name| !SETTABLE.contains(&name.as_str())) {
        return Err(Error::invalid(
            format!(
                "{} cannot be set for files by their names",
                other.replace('_', "-")
            ),
            "mode, block-size, max and seq-cutoff can",
        ));
    }
    if named.is_empty() {
        return Err(Error::invalid(
            format!("nothing is said that is to hold for {}", rule.pattern),
            "give a setting beside --match, such as --mode write-through",
        ));
    }
    let mut record = settings::defaults();
    settings::change(&mut record, &rule.settings)?;
    if record.mode == hearth_format::CacheMode::WriteBackOrdered {
        return Err(Error::invalid(
            "files of a datastore cannot be ordered",
            "choose write-back or write-through, or add the image as a disk of its own",
        ));
    }
    Ok(())
}

/// Puts a rule behind the others, or into that with the same pattern.
pub(super) fn put(rules: &mut Vec<FileRule>, rule: FileRule) -> Result<()> {
    check(&rule)?;
    let Some(old) = rules.iter_mut().find(|old| old.pattern == rule.pattern) else {
        if rules.len() >= RULES_MAX {
            return Err(Error::conflict(
                format!("there are {RULES_MAX} rules for names already"),
                "take one out with --unmatch first",
            ));
        }
        rules.push(rule);
        return Ok(());
    };
    let mut both = named(&old.settings)?;
    both.extend(named(&rule.settings)?);
    old.settings = serde_json::from_value(Value::Object(both))
        .map_err(|e| Error::internal(format!("cannot join the settings of a file: {e}")))?;
    Ok(())
}

/// Takes out the rule of this pattern.
pub(super) fn take(rules: &mut Vec<FileRule>, pattern: &str) -> Result<()> {
    let before = rules.len();
    rules.retain(|rule| rule.pattern != pattern);
    if rules.len() == before {
        return Err(Error::invalid(
            format!("there is no rule for {pattern}"),
            "see `hearth datastore show` for those there are",
        ));
    }
    Ok(())
}

/// Those of a record. What only a newer version knows is not among them, and goes when the rules are changed.
pub(super) fn read(lines: &[String]) -> Vec<FileRule> {
    let one = |line: &String| {
        let mut words = line.split('\t');
        let pattern = words.next()?.to_owned();
        let known = words.filter_map(|word| {
            let (name, value) = word.split_once('=')?;
            let known = SETTABLE.contains(&name).then(|| name.to_owned())?;
            Some((known, serde_json::from_str(value).ok()?))
        });
        let settings = serde_json::from_value(Value::Object(known.collect())).ok()?;
        let rule = FileRule { pattern, settings };
        check(&rule).is_ok().then_some(rule)
    };
    lines.iter().filter_map(one).collect()
}

/// As a record keeps them.
pub(super) fn write(rules: &[FileRule]) -> Result<Vec<String>> {
    let one = |rule: &FileRule| {
        let words = named(&rule.settings)?.into_iter();
        let words = words.map(|(name, value)| format!("\t{name}={value}"));
        Ok(rule.pattern.clone() + &words.collect::<String>())
    };
    rules.iter().map(one).collect()
}

/// The rules of a datastore, ready to be asked.
pub(super) struct Matching {
    directory: PathBuf,
    rules: Mutex<Vec<(Pattern, SettingsChanged)>>,
}

impl Matching {
    pub(super) fn new(directory: &str, lines: &[String]) -> Matching {
        let matching = Matching {
            directory: PathBuf::from(directory),
            rules: Mutex::default(),
        };
        matching.replace(&read(lines));
        matching
    }

    pub(super) fn replace(&self, rules: &[FileRule]) {
        let compiled = rules.iter().filter_map(|rule| {
            let pattern = pattern(&rule.pattern).ok()?;
            Some((pattern, rule.settings.clone()))
        });
        *self.rules.lock().unwrap_or_else(PoisonError::into_inner) = compiled.collect();
    }

    /// Gives the record of a file the settings that hold for its path; true if that changed something.
    pub(super) fn settle(&self, record: &mut DiskRecord, path: &Path) -> bool {
        let within = path.strip_prefix(&self.directory).unwrap_or(path);
        let mut fresh = settings::defaults();
        for (pattern, wanted) in self
            .rules
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
        {
            let fits = if pattern.as_str().contains('/') {
                pattern.matches_path_with(within, HOW)
            } else {
                within
                    .file_name()
                    .is_some_and(|name| pattern.matches_path_with(Path::new(name), HOW))
            };
            // They were checked when they were given.
            if fits && let Err(e) = settings::change(&mut fresh, wanted) {
                tracing::warn!(pattern = pattern.as_str(), "is left out: {e}");
            }
        }
        let settled = DiskRecord {
            mode: fresh.mode,
            block_size: fresh.block_size,
            max_bytes: fresh.max_bytes,
            seq_cutoff: fresh.seq_cutoff,
            ..record.clone()
        };
        let changed = settled != *record;
        *record = settled;
        changed
    }
}

#[cfg(test)]
mod tests {
    use hearth_format::CacheMode;
    use serde_json::json;

    use super::*;

    fn rule(pattern: &str, settings: Value) -> FileRule {
        FileRule {
            pattern: pattern.to_owned(),
            settings: serde_json::from_value(settings).unwrap(),
        }
    }

    #[test]
    fn the_last_that_fits_holds_for_each_setting() {
        let mut rules = Vec::new();
        put(
            &mut rules,
            rule(
                "*.vmdk",
                json!({"mode": "write-through", "block_size": 65536}),
            ),
        )
        .unwrap();
        put(&mut rules, rule("web/*", json!({"mode": "write-around"}))).unwrap();
        put(&mut rules, rule("*.ISO", json!({"mode": "off"}))).unwrap();
        put(&mut rules, rule("*.iso", json!({"max": 1 << 30}))).unwrap();
        let lines = write(&rules).unwrap();
        assert_eq!(read(&lines), rules);
        let matching = Matching::new("/srv/vms", &lines);
        let settled = |path: &str| {
            let mut record = settings::defaults();
            let changed = matching.settle(&mut record, Path::new(path));
            assert!(!matching.settle(&mut record, Path::new(path)), "{path}");
            assert_eq!(changed, record != settings::defaults(), "{path}");
            (record.mode, record.block_size, record.max_bytes)
        };
        assert_eq!(
            settled("/srv/vms/a/A.VMDK"),
            (CacheMode::WriteThrough, 65536, 0)
        );
        assert_eq!(
            settled("/srv/vms/web/a.vmdk"),
            (CacheMode::WriteAround, 65536, 0)
        );
        // Only in that directory, not further in.
        assert_eq!(settled("/srv/vms/web/x/a.vmdk").0, CacheMode::WriteThrough);
        assert_eq!(settled("/srv/vms/x.iso"), (CacheMode::Off, 0, 1 << 30));
        assert_eq!(settled("/srv/vms/x.img"), (CacheMode::WriteBack, 0, 0));
        take(&mut rules, "web/*").unwrap();
        matching.replace(&rules);
        assert_eq!(settled("/srv/vms/web/a.vmdk").0, CacheMode::WriteThrough);
    }

    #[test]
    fn one_pattern_is_one_rule() {
        let mut rules = Vec::new();
        put(&mut rules, rule("*", json!({"mode": "off"}))).unwrap();
        put(&mut rules, rule("*", json!({"seq_cutoff": 0}))).unwrap();
        assert_eq!(rules, [rule("*", json!({"mode": "off", "seq_cutoff": 0}))]);
        put(&mut rules, rule("*", json!({"mode": "write-back"}))).unwrap();
        assert_eq!(
            rules,
            [rule("*", json!({"mode": "write-back", "seq_cutoff": 0}))]
        );
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (pattern, settings) in [
            ("", json!({"mode": "off"})),
            ("/srv/*", json!({"mode": "off"})),
            ("a\tb", json!({"mode": "off"})),
            ("a[", json!({"mode": "off"})),
            ("*", json!({})),
            ("*", json!({"min": 1 << 30})),
            ("*", json!({"clients": 1})),
            ("*", json!({"block_size": 5000})),
        ] {
            let refused = put(&mut Vec::new(), rule(pattern, settings.clone()));
            assert!(refused.is_err(), "{pattern:?} {settings}");
        }
        assert!(take(&mut Vec::new(), "*").is_err());
        // What a newer version wrote is left out, not taken for something else.
        let lines = [
            "*.x\tmode=\"faster\"",
            "*.y\tcolour=3",
            "*.z\tmode=\"off\"\tcolour=3",
        ];
        let read = read(&lines.map(str::to_owned));
        assert_eq!(read, [rule("*.z", json!({"mode": "off"}))]);
    }
}
