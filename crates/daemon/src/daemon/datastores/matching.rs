//! Settings of a datastore's files by what they are called.
//!
//! The disks of a datastore come and go with its files, so nobody can set each of them by hand. A rule says what the
//! names are like and what is set for such files; of several that fit, the last that says something of a setting
//! holds. A file gets its settings when it becomes a disk, when it is renamed and when the rules change.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use glob::{MatchOptions, Pattern};
use hearth_format::DiskRecord;
use serde_json::{Map, Value};

use crate::api::datastores::FileRule;
use crate::api::types::CacheMode;
use crate::error::{Error, Result};
use crate::settings;

/// What can be set by names. All else belongs to a disk that somebody knows by name.
const SETTABLE: &[&str] = &["mode", "block_size", "max", "seq_cutoff", "pin", "scratch"];
/// Of these, what is no setting of a disk.
const OWN: &[&str] = &["pin", "scratch"];
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

/// What a rule says, by name.
fn named(rule: &FileRule) -> Result<Map<String, Value>> {
    match serde_json::to_value(rule) {
        Ok(Value::Object(mut named)) => {
            named.remove("match");
            Ok(named)
        }
        _ => Err(Error::internal("cannot read the settings of a file")),
    }
}

/// The rule that says so.
fn ruled(pattern: &str, named: Map<String, Value>) -> serde_json::Result<FileRule> {
    let (own, settings): (Map<_, _>, Map<_, _>) = named
        .into_iter()
        .partition(|(name, _)| OWN.contains(&name.as_str()));
    let flag = |name: &str| {
        own.get(name)
            .cloned()
            .map(serde_json::from_value)
            .transpose()
    };
    Ok(FileRule {
        pattern: pattern.to_owned(),
        pin: flag("pin")?,
        scratch: flag("scratch")?,
        settings: serde_json::from_value(Value::Object(settings))?,
    })
}

/// Refuses what cannot be set by names, or is no value.
fn check(rule: &FileRule) -> Result<()> {
    pattern(&rule.pattern)?;
    let named = named(rule)?;
    if let Some(other) = named.keys().find(|name| !SETTABLE.contains(&name.as_str())) {
        return Err(Error::invalid(
            format!(
                "{} cannot be set for files by their names",
                other.replace('_', "-")
            ),
            "mode, block-size, max, seq-cutoff, pin and scratch can",
        ));
    }
    if named.is_empty() {
        return Err(Error::invalid(
            format!("nothing is said that is to hold for {}", rule.pattern),
            "give a setting beside --match, such as --mode write-through",
        ));
    }
    let is = |flag: Option<bool>| flag == Some(true);
    if is(rule.scratch) && named.len() > 1 {
        return Err(Error::invalid(
            "files that are on flash alone have no other setting than that",
            "give --scratch alone",
        ));
    }
    let limited = rule.settings.max.is_some_and(|max| max > 0);
    if is(rule.pin) && (limited || rule.settings.mode == Some(CacheMode::Off)) {
        return Err(Error::invalid(
            "what is to be all on flash can be neither limited nor kept off it",
            "leave out --max and --mode off",
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
    let mut both = named(old)?;
    both.extend(named(&rule)?);
    let both = ruled(&rule.pattern, both)
        .map_err(|e| Error::internal(format!("cannot join the settings of a file: {e}")))?;
    check(&both)?;
    *old = both;
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
        let rule = ruled(&pattern, known.collect()).ok()?;
        check(&rule).is_ok().then_some(rule)
    };
    lines.iter().filter_map(one).collect()
}

/// As a record keeps them.
pub(super) fn write(rules: &[FileRule]) -> Result<Vec<String>> {
    let one = |rule: &FileRule| {
        let words = named(rule)?.into_iter();
        let words = words.map(|(name, value)| format!("\t{name}={value}"));
        Ok(rule.pattern.clone() + &words.collect::<String>())
    };
    rules.iter().map(one).collect()
}

/// The rules of a datastore, ready to be asked.
pub(super) struct Matching {
    directory: PathBuf,
    rules: Mutex<Vec<(Pattern, FileRule)>>,
}

/// What rules say of a file beside its disk's settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Wanted {
    /// It is to be all on flash.
    pub pin: bool,
    /// It is to be on flash alone.
    pub scratch: bool,
}

/// True if a pattern is like the file's name, or if there is a `/` in it, like its path in the datastore.
fn fits(pattern: &Pattern, within: &Path) -> bool {
    if pattern.as_str().contains('/') {
        return pattern.matches_path_with(within, HOW);
    }
    let name = within.file_name();
    name.is_some_and(|name| pattern.matches_path_with(Path::new(name), HOW))
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
            Some((pattern, rule.clone()))
        });
        *self.rules.lock().unwrap_or_else(PoisonError::into_inner) = compiled.collect();
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(Pattern, FileRule)>> {
        self.rules.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn within<'a>(&self, path: &'a Path) -> &'a Path {
        path.strip_prefix(&self.directory).unwrap_or(path)
    }

    /// Some files are to be all on flash.
    pub(super) fn pins(&self) -> bool {
        self.lock().iter().any(|(_, rule)| rule.pin == Some(true))
    }

    /// Files of this name are to be on flash alone, from their first block on. Not said of those that are told by where they are.
    pub(super) fn is_scratch_name(&self, name: &Path) -> bool {
        let rules = self.lock();
        let mut by_name = rules.iter().filter(|(p, _)| !p.as_str().contains('/'));
        let last = by_name.rfind(|(p, rule)| rule.scratch.is_some() && fits(p, name));
        last.is_some_and(|(_, rule)| rule.scratch == Some(true))
    }

    /// What holds for a path beside settings.
    pub(super) fn wanted(&self, path: &Path) -> Wanted {
        let within = self.within(path);
        let mut wanted = Wanted::default();
        for (_, rule) in self.lock().iter().filter(|(p, _)| fits(p, within)) {
            wanted.pin = rule.pin.unwrap_or(wanted.pin);
            wanted.scratch = rule.scratch.unwrap_or(wanted.scratch);
        }
        wanted
    }

    /// Gives the record of a file the settings that hold for its path; true if that changed something.
    pub(super) fn settle(&self, record: &mut DiskRecord, path: &Path) -> bool {
        if record.is_flash_only() {
            // There is one way to serve it.
            return false;
        }
        let within = self.within(path);
        let pinned = self.wanted(path).pin;
        let mut fresh = settings::defaults();
        for (pattern, rule) in self.lock().iter().filter(|(p, _)| fits(p, within)) {
            // They were checked when they were given.
            if let Err(e) = settings::change(&mut fresh, &rule.settings) {
                tracing::warn!(pattern = pattern.as_str(), "is left out: {e}");
            }
        }
        let settled = DiskRecord {
            mode: fresh.mode,
            block_size: fresh.block_size,
            // What is to be all on flash has no limit there, and as much is kept for it as it takes.
            max_bytes: if pinned { 0 } else { fresh.max_bytes },
            min_bytes: if pinned { record.min_bytes } else { 0 },
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
        let mut rule = settings;
        rule["match"] = json!(pattern);
        serde_json::from_value(rule).unwrap()
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
    fn files_that_are_to_be_on_flash_are_told_by_name_and_place() {
        let mut rules = Vec::new();
        for (pattern, settings) in [
            ("*.vswp", json!({"scratch": true})),
            ("web/*", json!({"pin": true})),
            ("web/*.iso", json!({"pin": false})),
            ("*", json!({"max": 1 << 20})),
        ] {
            put(&mut rules, rule(pattern, settings)).unwrap();
        }
        let lines = write(&rules).unwrap();
        assert_eq!(lines[0], "*.vswp\tscratch=true");
        assert_eq!(read(&lines), rules);
        let matching = Matching::new("/srv/vms", &lines);
        let wanted = |path: &str| {
            let wanted = matching.wanted(Path::new(path));
            (wanted.pin, wanted.scratch)
        };
        assert_eq!(wanted("/srv/vms/a/a.vswp"), (false, true));
        assert_eq!(wanted("web/a.vmdk"), (true, false));
        assert_eq!(wanted("/srv/vms/web/a.iso"), (false, false));
        assert_eq!(wanted("/srv/vms/db/a.vmdk"), (false, false));
        assert!(matching.pins());
        assert!(matching.is_scratch_name(Path::new("x.VSWP")));
        assert!(!matching.is_scratch_name(Path::new("x.vmdk")));
        // What is kept for a file stays as long as it is to be there, and there is no limit then.
        let mut record = DiskRecord {
            min_bytes: 1 << 30,
            ..settings::defaults()
        };
        assert!(!matching.settle(&mut record, Path::new("web/a.vmdk")));
        assert_eq!((record.min_bytes, record.max_bytes), (1 << 30, 0));
        assert!(matching.settle(&mut record, Path::new("db/a.vmdk")));
        assert_eq!((record.min_bytes, record.max_bytes), (0, 1 << 20));
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
            ("*", json!({"scratch": true, "mode": "write-back"})),
            ("*", json!({"scratch": true, "pin": true})),
            ("*", json!({"pin": true, "max": 1 << 30})),
            ("*", json!({"pin": true, "mode": "off"})),
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
