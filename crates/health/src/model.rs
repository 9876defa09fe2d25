//! The one model of health.

use serde::{Deserialize, Serialize};

/// How something is. Later ones are worse: of several things the worst is told.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Condition {
    /// Nothing is wrong.
    #[default]
    Healthy,
    /// Nobody can say.
    Unknown,
    /// On its way back to healthy by itself.
    Rebuilding,
    /// It works, and something is wrong: less is left before it does not.
    Degraded,
    /// It does not do what it is for, or says that it is about to stop.
    Failed,
}

impl Condition {
    /// The word used in the API and the command line.
    pub fn word(self) -> &'static str {
        match self {
            Condition::Healthy => "healthy",
            Condition::Unknown => "unknown",
            Condition::Rebuilding => "rebuilding",
            Condition::Degraded => "degraded",
            Condition::Failed => "failed",
        }
    }

    /// The number that metrics tell: larger is worse.
    pub fn code(self) -> u8 {
        self as u8
    }
}

/// One thing that is so, and what to do about it. With condition `healthy` it is worth knowing and no more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reason {
    /// A name that stays, such as `smart-failed`: programs and alerts go by it.
    pub code: String,
    /// What it makes of what it is about.
    pub condition: Condition,
    /// What is so, for people.
    pub what: String,
    /// What to do about it; empty if there is nothing.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub remedy: String,
}

impl Reason {
    /// A reason for `condition`.
    pub fn new(
        code: &str,
        condition: Condition,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Reason {
        Reason {
            code: code.to_owned(),
            condition,
            what: what.into(),
            remedy: remedy.into(),
        }
    }

    /// Something that has failed.
    pub fn failed(code: &str, what: impl Into<String>, remedy: impl Into<String>) -> Reason {
        Reason::new(code, Condition::Failed, what, remedy)
    }

    /// Something that works, with less to spare.
    pub fn degraded(code: &str, what: impl Into<String>, remedy: impl Into<String>) -> Reason {
        Reason::new(code, Condition::Degraded, what, remedy)
    }

    /// Something on its way back.
    pub fn rebuilding(code: &str, what: impl Into<String>) -> Reason {
        Reason::new(code, Condition::Rebuilding, what, "")
    }

    /// Something nobody can judge.
    pub fn unknown(code: &str, what: impl Into<String>, remedy: impl Into<String>) -> Reason {
        Reason::new(code, Condition::Unknown, what, remedy)
    }

    /// Something worth knowing.
    pub fn note(code: &str, what: impl Into<String>, remedy: impl Into<String>) -> Reason {
        Reason::new(code, Condition::Healthy, what, remedy)
    }
}

/// The reasons, by code, that one with condition `rebuilding` is the way back from: while it is seen, what was wrong is being
/// mended and not over.
pub fn mends(code: &str) -> &'static [&'static str] {
    match code {
        "array-rebuilding" => &["array-degraded"],
        "lvm-rebuilding" => &["lvm-degraded", "lvm-refresh"],
        "zpool-resilvering" => &["zpool-degraded"],
        "leg-resyncing" => &["leg-out"],
        "tree-resyncing" => &["tree-out"],
        _ => &[],
    }
}

/// What sort of thing is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// The daemon itself.
    Daemon,
    /// The pool.
    Pool,
    /// A drive, an array, a volume, a pool of ZFS.
    Device,
    /// A file system.
    FileSystem,
    /// A virtual disk.
    Disk,
    /// A datastore.
    Datastore,
    /// This host.
    Host,
}

impl Kind {
    /// The word used for people.
    pub fn word(self) -> &'static str {
        match self {
            Kind::Daemon => "daemon",
            Kind::Pool => "pool",
            Kind::Device => "device",
            Kind::FileSystem => "file system",
            Kind::Disk => "disk",
            Kind::Datastore => "datastore",
            Kind::Host => "host",
        }
    }

    /// The word used in the API and metrics.
    pub fn label(self) -> &'static str {
        match self {
            Kind::FileSystem => "file-system",
            other => other.word(),
        }
    }
}

/// Something that is judged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Item {
    /// What sort of thing.
    pub kind: Kind,
    /// What it is called.
    pub name: String,
    /// What else people know it by: a model, a level of RAID.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub about: String,
    /// The worst of its reasons.
    pub condition: Condition,
    /// Why, the worst first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reasons: Vec<Reason>,
    /// The disks that are touched by it: for a device, those that lie on it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<String>,
}

impl Item {
    /// Something with these reasons.
    pub fn new(kind: Kind, name: impl Into<String>, mut reasons: Vec<Reason>) -> Item {
        // Stable: equally bad ones stay in the order in which they were found.
        reasons.sort_by_key(|r| std::cmp::Reverse(r.condition));
        Item {
            kind,
            name: name.into(),
            about: String::new(),
            condition: reasons.first().map(|r| r.condition).unwrap_or_default(),
            reasons,
            disks: Vec::new(),
        }
    }

    /// Adds reasons.
    pub fn add(&mut self, reasons: Vec<Reason>) {
        let disks = std::mem::take(&mut self.disks);
        let mut all = std::mem::take(&mut self.reasons);
        all.extend(reasons);
        let about = std::mem::take(&mut self.about);
        *self = Item::new(self.kind, std::mem::take(&mut self.name), all).about(about);
        self.disks = disks;
    }

    /// The same, with what else it is known by.
    pub fn about(self, about: impl Into<String>) -> Item {
        Item {
            about: about.into(),
            ..self
        }
    }
}

/// Everything that was judged at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// When, in milliseconds since 1970.
    pub at: u64,
    /// The worst of all items.
    pub condition: Condition,
    /// What was judged: the daemon, the pool, devices, file systems, disks, this host.
    pub items: Vec<Item>,
    /// What could not be looked at, and why; each is said once and makes nothing worse.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

impl Report {
    /// The report on these items. What nobody can say of one drive does not make the whole unknown.
    pub fn new(at: u64, mut items: Vec<Item>, notes: Vec<String>) -> Report {
        items.sort_by(|a, b| (a.kind, &a.name).cmp(&(b.kind, &b.name)));
        let counts =
            |item: &&Item| item.kind != Kind::Device || item.condition != Condition::Unknown;
        Report {
            at,
            condition: (items.iter().filter(counts))
                .map(|item| item.condition)
                .max()
                .unwrap_or(Condition::Unknown),
            items,
            notes,
        }
    }

    /// The items that are not healthy, the worst first.
    pub fn bad(&self) -> Vec<&Item> {
        let mut bad: Vec<&Item> = (self.items.iter())
            .filter(|item| item.condition > Condition::Unknown)
            .collect();
        bad.sort_by_key(|item| std::cmp::Reverse(item.condition));
        bad
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_reason_and_the_worst_item_are_told() {
        let item = |name: &str, reasons| Item::new(Kind::Device, name, reasons);
        let bad = item(
            "sda",
            vec![
                Reason::note("a", "x", ""),
                Reason::failed("b", "y", "z"),
                Reason::degraded("c", "y", "z"),
            ],
        );
        assert_eq!(bad.condition, Condition::Failed);
        let codes: Vec<&str> = bad.reasons.iter().map(|r| r.code.as_str()).collect();
        assert_eq!(codes, ["b", "c", "a"]);
        let report = Report::new(1, vec![bad, item("vda", Vec::new())], Vec::new());
        assert_eq!(report.condition, Condition::Failed);
        assert_eq!(report.bad().len(), 1);
    }

    #[test]
    fn a_drive_nobody_can_ask_does_not_make_the_whole_unknown() {
        let vda = Item::new(
            Kind::Device,
            "vda",
            vec![Reason::unknown("smart-none", "x", "")],
        );
        let pool = Item::new(Kind::Pool, "p", Vec::new());
        let report = Report::new(1, vec![vda, pool], Vec::new());
        assert_eq!(report.condition, Condition::Healthy);
        assert_eq!(
            Report::new(1, Vec::new(), Vec::new()).condition,
            Condition::Unknown
        );
    }

    #[test]
    fn words_are_what_json_says() {
        for condition in [
            Condition::Healthy,
            Condition::Unknown,
            Condition::Rebuilding,
            Condition::Degraded,
            Condition::Failed,
        ] {
            assert_eq!(serde_json::to_value(condition).unwrap(), condition.word());
        }
        for kind in [
            Kind::Daemon,
            Kind::Pool,
            Kind::Device,
            Kind::FileSystem,
            Kind::Disk,
            Kind::Datastore,
            Kind::Host,
        ] {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.label());
        }
    }

    #[test]
    fn codes_are_those_of_the_documented_table() {
        let docs = include_str!("../../../docs/metrics.md");
        let all = [
            Condition::Healthy,
            Condition::Unknown,
            Condition::Rebuilding,
            Condition::Degraded,
            Condition::Failed,
        ];
        let told = all.map(|c| format!("{} {}", c.code(), c.word())).join(", ");
        assert!(docs.contains(&told), "docs/metrics.md lacks: {told}");
    }
}
