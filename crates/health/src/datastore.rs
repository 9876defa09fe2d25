//! A datastore: whether it has both of its two directories, and whether clients write one file in turn.

use crate::model::{Item, Kind, Reason};

/// One of the directories.
#[derive(Clone, Debug, Default)]
pub struct Tree {
    /// Where it is.
    pub directory: String,
    /// The API's word for its state.
    pub state: String,
    /// Places that it lacks, if that is known.
    pub missing: Option<u64>,
    /// Why it is out.
    pub reason: String,
}

/// What the daemon tells of one.
#[derive(Clone, Debug, Default)]
pub struct Datastore {
    /// Its name.
    pub name: String,
    /// Its directories, if it has two.
    pub trees: Vec<Tree>,
    /// Two clients wrote a file of it in turn lately: which.
    pub two_writers: Option<String>,
}

impl Datastore {
    /// What is to be said of it.
    pub fn judge(&self) -> Item {
        let mut reasons = Vec::new();
        for tree in &self.trees {
            match tree.state.as_str() {
                "out" => reasons.push(Reason::degraded(
                    "tree-out",
                    format!("the tree {} is out: {}", tree.directory, tree.reason),
                    "bring it back, or put an empty directory of a new disk in its place",
                )),
                "resyncing" => {
                    let left = match tree.missing {
                        Some(places) => format!("{places} places left"),
                        None => "all of it".to_owned(),
                    };
                    reasons.push(Reason::rebuilding(
                        "tree-resyncing",
                        format!("the tree {} gets what it missed: {left}", tree.directory),
                    ));
                }
                _ => {}
            }
        }
        reasons.extend(self.two_writers.as_deref().map(crate::daemon::two_writers));
        Item::new(Kind::Datastore, &self.name, reasons)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Condition;

    #[test]
    fn one_tree_less_is_less_to_spare() {
        let tree = |state: &str| Tree {
            directory: "/mnt/a".to_owned(),
            state: state.to_owned(),
            ..Tree::default()
        };
        let judged = |other: &str| {
            let datastore = Datastore {
                name: "vms".to_owned(),
                trees: vec![tree("current"), tree(other)],
                two_writers: None,
            };
            datastore.judge().condition
        };
        assert_eq!(judged("current"), Condition::Healthy);
        assert_eq!(judged("out"), Condition::Degraded);
        assert_eq!(judged("resyncing"), Condition::Rebuilding);
    }

    #[test]
    fn two_writers_degrade_a_datastore() {
        let mut datastore = Datastore {
            name: "vms".to_owned(),
            ..Datastore::default()
        };
        assert_eq!(datastore.judge().condition, Condition::Healthy);
        datastore.two_writers = Some("two clients write /srv/a: b and c".to_owned());
        let item = datastore.judge();
        assert_eq!(item.condition, Condition::Degraded);
        assert_eq!(item.reasons[0].code, "two-clients-write");
    }
}
