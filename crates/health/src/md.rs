//! Linux' software arrays: from `/sys/block/*/md`, or `/proc/mdstat` where that cannot be read.
//!
//! The kernel tells how many members are missing, what it is doing about it, and how far it is. How many may be
//! missing before data is gone depends on the level.

use std::fs;
use std::path::Path;

use crate::model::{Item, Kind, Reason};

/// A member of an array.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Member {
    /// Its name, such as `sda1`.
    pub name: String,
    /// The kernel threw it out.
    pub faulty: bool,
}

/// An array.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Array {
    /// Its name, such as `md0`.
    pub name: String,
    /// `raid1`, `raid5`, …
    pub level: String,
    /// The kernel's word for its state.
    pub state: String,
    /// Members it is made for.
    pub wanted: u64,
    /// Members that are missing.
    pub missing: u64,
    /// What goes on: `idle`, `recover`, `resync`, `check`, `repair`, `reshape`, `frozen`.
    pub action: String,
    /// How far that is, 0 to 1.
    pub done: Option<f64>,
    /// Sectors that differed between members at the last check.
    pub mismatches: u64,
    /// Its members.
    pub members: Vec<Member>,
}

fn read(path: &Path) -> String {
    fs::read_to_string(path)
        .unwrap_or_default()
        .trim()
        .to_owned()
}

fn number(path: &Path) -> u64 {
    read(path).parse().unwrap_or(0)
}

/// `PART / WHOLE`, as the kernel writes progress.
fn fraction(text: &str) -> Option<f64> {
    let (part, whole) = text.split_once('/')?;
    let (part, whole): (f64, f64) = (part.trim().parse().ok()?, whole.trim().parse().ok()?);
    (whole > 0.0).then(|| (part / whole).clamp(0.0, 1.0))
}

/// The arrays below a directory like `/sys/block`.
pub fn from_sysfs(block: &Path) -> Vec<Array> {
    let mut arrays = Vec::new();
    for entry in fs::read_dir(block).into_iter().flatten().flatten() {
        let md = entry.path().join("md");
        if !md.is_dir() {
            continue;
        }
        let members = (fs::read_dir(&md).into_iter().flatten().flatten()).filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let name = name.strip_prefix("dev-")?.to_owned();
            let state = read(&entry.path().join("state"));
            let faulty = state.split(',').any(|word| word.trim() == "faulty");
            Some(Member { name, faulty })
        });
        let mut members: Vec<Member> = members.collect();
        members.sort_by(|a, b| a.name.cmp(&b.name));
        arrays.push(Array {
            name: entry.file_name().to_string_lossy().into_owned(),
            level: read(&md.join("level")),
            state: read(&md.join("array_state")),
            // While it is reshaped: "4 (3)".
            wanted: (read(&md.join("raid_disks")).split(' ').next())
                .and_then(|n| n.parse().ok())
                .unwrap_or(0),
            missing: number(&md.join("degraded")),
            action: read(&md.join("sync_action")),
            done: fraction(&read(&md.join("sync_completed"))),
            mismatches: number(&md.join("mismatch_cnt")),
            members,
        });
    }
    arrays.sort_by(|a, b| a.name.cmp(&b.name));
    arrays
}

/// The arrays that `/proc/mdstat` tells of.
pub fn from_mdstat(text: &str) -> Vec<Array> {
    let mut arrays: Vec<Array> = Vec::new();
    for line in text.lines() {
        if let Some((name, rest)) = line
            .split_once(':')
            .filter(|(name, _)| name.starts_with("md"))
        {
            let mut words = rest.split_whitespace().peekable();
            let mut array = Array {
                name: name.trim().to_owned(),
                state: words.next().unwrap_or_default().to_owned(),
                action: "idle".to_owned(),
                ..Array::default()
            };
            while words.peek().is_some_and(|word| word.starts_with('(')) {
                words.next();
            }
            if words.peek().is_some_and(|word| !word.contains('[')) {
                array.level = words.next().unwrap_or_default().to_owned();
            }
            array.members = words
                .filter_map(|word| {
                    let (name, flags) = word.split_once('[')?;
                    Some(Member {
                        name: name.to_owned(),
                        faulty: flags.contains("(F)"),
                    })
                })
                .collect();
            arrays.push(array);
            continue;
        }
        let Some(array) = arrays.last_mut() else {
            continue;
        };
        // [2/1] [_U]
        if let Some((wanted, there)) = line
            .split(['[', ']'])
            .find_map(|piece| piece.split_once('/'))
            .and_then(|(w, t)| Some((w.parse::<u64>().ok()?, t.parse::<u64>().ok()?)))
        {
            array.wanted = wanted;
            array.missing = wanted.saturating_sub(there);
        }
        for (word, action) in [
            ("recovery", "recover"),
            ("resync", "resync"),
            ("check", "check"),
            ("reshape", "reshape"),
        ] {
            if let Some((_, rest)) = line.split_once(&format!("{word} =")) {
                array.action = action.to_owned();
                let percent = rest.trim().split('%').next().unwrap_or_default();
                array.done = percent.trim().parse::<f64>().ok().map(|p| p / 100.0);
            }
        }
    }
    arrays
}

/// How many members a level can lack; `None` where that depends on which.
fn spare(level: &str, wanted: u64) -> Option<u64> {
    match level {
        "raid1" => Some(wanted.saturating_sub(1)),
        "raid4" | "raid5" => Some(1),
        "raid6" => Some(2),
        "raid0" | "linear" => Some(0),
        _ => None,
    }
}

impl Array {
    /// What is to be said of it.
    pub fn judge(&self) -> Item {
        let mut reasons = Vec::new();
        let faulty: Vec<&str> = (self.members.iter())
            .filter(|m| m.faulty)
            .map(|m| m.name.as_str())
            .collect();
        let who = match faulty.join(", ") {
            none if none.is_empty() => String::new(),
            names => format!(" ({names} failed)"),
        };
        let percent = self
            .done
            .map_or(String::new(), |d| format!(", {:.1} % done", d * 100.0));
        let gone = spare(&self.level, self.wanted).is_some_and(|spare| self.missing > spare);
        let remedy = format!(
            "replace the member: `mdadm /dev/{} --remove failed`, then `--add` another",
            self.name
        );
        match self.state.as_str() {
            "broken" | "inactive" | "clear" => reasons.push(Reason::failed(
                "array-failed",
                format!("the array is {}{who}", self.state),
                format!("see `mdadm --detail /dev/{}`", self.name),
            )),
            _ if gone => reasons.push(Reason::failed(
                "array-failed",
                format!(
                    "{} of {} members are missing{who}",
                    self.missing, self.wanted
                ),
                format!("see `mdadm --detail /dev/{}`", self.name),
            )),
            _ if self.missing > 0 && self.action == "recover" => reasons.push(Reason::rebuilding(
                "array-rebuilding",
                format!("the array is being rebuilt{percent}{who}"),
            )),
            _ if self.missing > 0 => reasons.push(Reason::degraded(
                "array-degraded",
                format!(
                    "{} of {} members are missing{who}",
                    self.missing, self.wanted
                ),
                remedy,
            )),
            _ if !faulty.is_empty() => reasons.push(Reason::degraded(
                "array-member",
                format!("the array is whole, and holds a failed member{who}"),
                format!("`mdadm /dev/{} --remove failed`", self.name),
            )),
            _ => {}
        }
        if self.missing == 0 {
            match self.action.as_str() {
                "resync" | "recover" => reasons.push(Reason::rebuilding(
                    "array-rebuilding",
                    format!("the members are made equal again{percent}"),
                )),
                "reshape" => reasons.push(Reason::rebuilding(
                    "array-reshaping",
                    format!("the array is given another shape{percent}"),
                )),
                "check" | "repair" => reasons.push(Reason::note(
                    "array-checking",
                    format!("the array is being checked{percent}"),
                    "",
                )),
                _ => {}
            }
        }
        // Mirrors differ where memory changed while it was written, harmlessly.
        if self.mismatches > 0 && !matches!(self.level.as_str(), "raid1" | "raid10") {
            reasons.push(Reason::degraded(
                "array-mismatch",
                format!(
                    "members differed in {} sectors at the last check",
                    self.mismatches
                ),
                format!(
                    "`echo repair > /sys/block/{}/md/sync_action`, and see to the members",
                    self.name
                ),
            ));
        }
        Item::new(Kind::Device, &self.name, reasons).about(&self.level)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Condition;

    /// A tree as the kernel shows one.
    fn tree(dir: &Path, array: &str, files: &[(&str, &str)]) {
        for (file, text) in files {
            let path = dir.join(array).join("md").join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }
    }

    fn judged(files: &[(&str, &str)]) -> Item {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("sda")).unwrap();
        tree(dir.path(), "md0", files);
        let arrays = from_sysfs(dir.path());
        assert_eq!(arrays.len(), 1);
        arrays[0].judge()
    }

    const WHOLE: &[(&str, &str)] = &[
        ("level", "raid1"),
        ("array_state", "clean"),
        ("raid_disks", "2"),
        ("degraded", "0"),
        ("sync_action", "idle"),
        ("sync_completed", "none"),
        ("mismatch_cnt", "128"),
        ("dev-sda1/state", "in_sync"),
        ("dev-sdb1/state", "in_sync"),
    ];

    fn but(changes: &[(&'static str, &'static str)]) -> Vec<(&'static str, &'static str)> {
        WHOLE.iter().chain(changes).copied().collect()
    }

    #[test]
    fn a_mirror_through_failure_replacement_and_rebuilding() {
        assert_eq!(judged(WHOLE).condition, Condition::Healthy);
        let failed = judged(&but(&[("degraded", "1"), ("dev-sdb1/state", "faulty")]));
        assert_eq!(failed.condition, Condition::Degraded);
        let reason = &failed.reasons[0];
        assert_eq!(reason.code, "array-degraded");
        assert_eq!(reason.what, "1 of 2 members are missing (sdb1 failed)");
        assert!(reason.remedy.contains("/dev/md0"), "{reason:?}");
        let rebuilding = judged(&but(&[
            ("degraded", "1"),
            ("sync_action", "recover"),
            ("sync_completed", "1000 / 4000"),
            ("dev-sdb1/state", "spare"),
        ]));
        assert_eq!(rebuilding.condition, Condition::Rebuilding);
        assert!(rebuilding.reasons[0].what.contains("25.0 % done"));
        let both = judged(&but(&[("degraded", "2")]));
        assert_eq!(both.condition, Condition::Failed);
        assert_eq!(
            judged(&but(&[("array_state", "broken")])).condition,
            Condition::Failed
        );
        let check = judged(&but(&[
            ("sync_action", "check"),
            ("sync_completed", "1 / 2"),
        ]));
        assert_eq!(check.condition, Condition::Healthy);
        assert_eq!(check.reasons[0].code, "array-checking");
    }

    #[test]
    fn parity_that_differs_is_trouble_and_a_mirror_that_does_is_not() {
        let raid5 = judged(&but(&[("level", "raid5"), ("raid_disks", "4 (3)")]));
        assert_eq!(raid5.reasons[0].code, "array-mismatch");
        let two = judged(&but(&[
            ("level", "raid5"),
            ("raid_disks", "3"),
            ("degraded", "2"),
        ]));
        assert_eq!(two.condition, Condition::Failed);
        let six = judged(&but(&[
            ("level", "raid6"),
            ("raid_disks", "6"),
            ("degraded", "2"),
            ("mismatch_cnt", "0"),
        ]));
        assert_eq!(six.condition, Condition::Degraded);
    }

    #[test]
    fn mdstat_says_the_same() {
        let text = "Personalities : [raid1] [raid6] [raid5] [raid4]\n\
            md1 : active raid5 sdd1[3] sdc1[1] sdb1[0](F)\n      \
            976630784 blocks super 1.2 level 5, 512k chunk, algorithm 2 [3/2] [_UU]\n      \
            [==>..................]  recovery = 12.6% (61700000/488315392) finish=127.5min speed=55000K/sec\n      \
            bitmap: 0/4 pages [0KB], 65536KB chunk\n\n\
            md0 : active (auto-read-only) raid1 sdf1[1] sde1[0]\n      \
            1047552 blocks super 1.2 [2/2] [UU]\n\n\
            md127 : inactive sdg1[0](S)\n      1047552 blocks super 1.2\n\n\
            unused devices: <none>\n";
        let arrays = from_mdstat(text);
        assert_eq!(arrays.len(), 3);
        assert_eq!((arrays[0].wanted, arrays[0].missing), (3, 1));
        assert_eq!(arrays[0].done, Some(0.126));
        assert_eq!(arrays[0].judge().condition, Condition::Rebuilding);
        assert!(arrays[0].judge().reasons[0].what.contains("sdb1 failed"));
        assert_eq!((arrays[1].level.as_str(), arrays[1].missing), ("raid1", 0));
        assert_eq!(arrays[1].judge().condition, Condition::Healthy);
        assert_eq!(arrays[2].judge().condition, Condition::Failed);
        for cut in 0..text.len() {
            from_mdstat(&text[..cut]);
        }
    }
}
