//! Pools of ZFS: from `zpool status -j` (since 2.3), or its text.

use serde_json::{Map, Value};

use crate::model::{Item, Kind, Reason};

/// A pool, as far as it is told.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Zpool {
    /// Its name.
    pub name: String,
    /// ZFS's word for its state.
    pub state: String,
    /// What ZFS says is wrong.
    pub status: String,
    /// What ZFS says is to be done.
    pub action: String,
    /// A resilver is under way, and how far it is, 0 to 1, if that is known.
    pub resilvering: Option<Option<f64>>,
    /// Errors that data was lost to.
    pub data_errors: u64,
    /// Members that are not well: name and state or what they counted.
    pub members: Vec<String>,
}

fn text(value: &Value) -> String {
    value
        .as_str()
        .unwrap_or_default()
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
}

/// A count; numbers are strings there.
fn count(value: &Value) -> u64 {
    value
        .as_u64()
        .or_else(|| value.as_str()?.parse().ok())
        .unwrap_or(0)
}

/// Levels of members looked at: ZFS has four.
const DEPTH: usize = 8;

fn members(vdevs: &Value, depth: usize, found: &mut Vec<String>) {
    let Some(map) = vdevs.as_object().filter(|_| depth < DEPTH) else {
        return;
    };
    for (name, vdev) in map {
        let inner = vdev["vdevs"].as_object().is_some_and(|v| !v.is_empty());
        let state = text(&vdev["state"]);
        let errors: u64 = ["read_errors", "write_errors", "checksum_errors"]
            .iter()
            .map(|e| count(&vdev[e]))
            .sum();
        if inner {
            members(&vdev["vdevs"], depth + 1, found);
        } else if !matches!(state.as_str(), "ONLINE" | "AVAIL" | "INUSE" | "") {
            found.push(format!("{name} {state}"));
        } else if errors > 0 {
            found.push(format!("{name} {errors} errors"));
        }
    }
}

/// The pools of `zpool status -j`; `None` if it is not that.
pub fn from_json(output: &[u8]) -> Option<Vec<Zpool>> {
    let json: Value = serde_json::from_slice(output).ok()?;
    let pools = json.get("pools")?.as_object()?;
    let pool = |(name, pool): (&String, &Value)| {
        let scan = &pool["scan_stats"];
        let under_way = scan["function"] == "RESILVER" && scan["state"] == "SCANNING";
        let (done, whole) = (count(&scan["issued"]), count(&scan["to_examine"]));
        let mut bad = Vec::new();
        // Devices of other classes are listed beside `vdevs`: `logs`, `special`, `dedup`, `l2cache`, `spares`.
        for (class, group) in pool.as_object().into_iter().flatten() {
            let is_group = |g: &Map<String, Value>| g.values().any(|v| v["state"].is_string());
            if group.as_object().is_some_and(is_group) {
                let at = bad.len();
                members(group, 0, &mut bad);
                if class != "vdevs" {
                    (bad.iter_mut().skip(at)).for_each(|m| *m = format!("{class}: {m}"));
                }
            }
        }
        Zpool {
            name: name.clone(),
            state: text(&pool["state"]),
            status: text(&pool["status"]),
            action: text(&pool["action"]),
            resilvering: under_way.then(|| (whole > 0).then(|| done as f64 / whole as f64)),
            data_errors: count(&pool["error_count"]),
            members: bad,
        }
    };
    Some(pools.iter().map(pool).collect())
}

/// The pools of `zpool status`.
pub fn from_text(output: &str) -> Vec<Zpool> {
    let mut pools: Vec<Zpool> = Vec::new();
    // The heading under which the lines are that have none.
    let mut heading = String::new();
    // The class of devices that lines of `config` are about; empty for data.
    let mut class = String::new();
    for line in output.lines() {
        let headed = line.trim_start().split_once(':').filter(|(h, _)| {
            matches!(
                *h,
                "pool"
                    | "state"
                    | "status"
                    | "action"
                    | "scan"
                    | "see"
                    | "config"
                    | "errors"
                    | "remove"
            )
        });
        let rest = match headed {
            Some((h, rest)) => {
                heading = h.to_owned();
                rest.trim()
            }
            None => line.trim(),
        };
        if headed.is_some() && heading == "pool" {
            class.clear();
            pools.push(Zpool {
                name: rest.to_owned(),
                ..Zpool::default()
            });
            continue;
        }
        let Some(pool) = pools.last_mut() else {
            continue;
        };
        let add = |to: &mut String| {
            if !to.is_empty() && !rest.is_empty() {
                to.push(' ');
            }
            to.push_str(rest);
        };
        match heading.as_str() {
            "state" if headed.is_some() => pool.state = rest.to_owned(),
            "status" => add(&mut pool.status),
            "action" => add(&mut pool.action),
            "scan" => {
                if rest.starts_with("resilver in progress") {
                    pool.resilvering = Some(None);
                } else if let (Some(_), Some((before, _))) =
                    (pool.resilvering, rest.split_once("% done"))
                {
                    let percent = before
                        .rsplit([' ', ','])
                        .next()
                        .and_then(|p| p.parse::<f64>().ok());
                    pool.resilvering = Some(percent.map(|p| p / 100.0));
                }
            }
            "config" => {
                let words: Vec<&str> = rest.split_whitespace().collect();
                // Lines of spares have no counts, headings of classes no state.
                let [name, state, counts @ ..] = words.as_slice() else {
                    if let &[heading] = words.as_slice() {
                        class = format!("{heading}: ");
                    }
                    continue;
                };
                let (name, state) = (*name, *state);
                let counted = |n: &str| n.starts_with(|c: char| c.is_ascii_digit());
                let counts = match counts {
                    [read, write, sum, ..] if counted(read) => [*read, *write, *sum],
                    _ => ["0"; 3],
                };
                let inner = name == pool.name
                    || ["mirror-", "raidz", "draid", "replacing-", "spare-"]
                        .iter()
                        .any(|p| name.starts_with(p));
                if name == "NAME" || inner {
                    continue;
                }
                if !matches!(state, "ONLINE" | "AVAIL" | "INUSE") {
                    pool.members.push(format!("{class}{name} {state}"));
                } else if counts.iter().any(|n| *n != "0" && *n != "-") {
                    let counts = counts.join("/");
                    pool.members.push(format!("{class}{name} errors {counts}"));
                }
            }
            "errors" if headed.is_some() && !rest.starts_with("No known") => {
                pool.data_errors = rest
                    .split(' ')
                    .next()
                    .and_then(|n| n.parse().ok())
                    .unwrap_or(1);
            }
            _ => {}
        }
    }
    pools
}

impl Zpool {
    /// What is to be said of it.
    pub fn judge(&self) -> Item {
        let mut reasons = Vec::new();
        let who = match self.members.join(", ") {
            none if none.is_empty() => String::new(),
            names => format!(" ({names})"),
        };
        let see = format!("see `zpool status -v {}`", self.name);
        let remedy = match self.action.trim_end_matches('.') {
            "" => see.clone(),
            action => action.to_owned(),
        };
        let percent = |done: Option<f64>| {
            done.map_or(String::new(), |d| format!(", {:.1} % done", d * 100.0))
        };
        match (self.state.as_str(), self.resilvering) {
            ("ONLINE", None) if who.is_empty() => {}
            ("ONLINE", None) => reasons.push(Reason::degraded(
                "zpool-errors",
                format!("devices of the pool have failed or had errors{who}"),
                remedy,
            )),
            ("ONLINE" | "DEGRADED", Some(done)) => reasons.push(Reason::rebuilding(
                "zpool-resilvering",
                format!("the pool is being resilvered{}{who}", percent(done)),
            )),
            ("DEGRADED", None) => reasons.push(Reason::degraded(
                "zpool-degraded",
                format!("the pool is degraded{who}"),
                remedy,
            )),
            ("", _) => reasons.push(Reason::unknown(
                "zpool-unknown",
                "the pool's state is not told",
                see.clone(),
            )),
            (state, _) => reasons.push(Reason::failed(
                "zpool-failed",
                format!("the pool is {state}{who}"),
                remedy,
            )),
        }
        if self.data_errors > 0 {
            reasons.push(Reason::failed(
                "zpool-data-lost",
                format!("ZFS counts {} errors that cost data", self.data_errors),
                see,
            ));
        }
        Item::new(Kind::Device, format!("zfs:{}", self.name), reasons).about("ZFS pool")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Condition;

    fn recorded(name: &str) -> Vec<u8> {
        std::fs::read(format!("{}/recorded/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
    }

    /// What is recorded, told as JSON or as text, is judged the same way.
    fn are_as_recorded(items: &[Item]) {
        let told: Vec<(&str, Condition)> = items
            .iter()
            .map(|i| (i.name.as_str(), i.condition))
            .collect();
        assert_eq!(
            told,
            [
                ("zfs:backup", Condition::Rebuilding),
                ("zfs:good", Condition::Healthy),
                ("zfs:lost", Condition::Failed),
                ("zfs:tank", Condition::Degraded)
            ]
        );
        assert!(
            items[0].reasons[0].what.contains("25.0 % done"),
            "{items:?}"
        );
        assert!(
            items[3].reasons[0].what.contains("sdb FAULTED"),
            "{items:?}"
        );
    }

    #[test]
    fn json_of_a_good_a_degraded_and_a_resilvering_pool() {
        let pools = from_json(&recorded("zpool.json")).unwrap();
        let items: Vec<Item> = pools.iter().map(Zpool::judge).collect();
        are_as_recorded(&items);
        assert!(items[3].reasons[0].remedy.contains("Replace"), "{items:?}");
        assert_eq!(items[2].reasons.len(), 2);
    }

    #[test]
    fn text_says_the_same() {
        let text = String::from_utf8(recorded("zpool.txt")).unwrap();
        let items: Vec<Item> = from_text(&text).iter().map(Zpool::judge).collect();
        are_as_recorded(&items);
        assert!(
            items[3].reasons[0]
                .remedy
                .starts_with("Replace the faulted device"),
            "{items:?}"
        );
        for (cut, _) in text.char_indices() {
            from_text(&text[..cut]);
        }
    }

    const CLASSES: [&str; 5] = ["logs", "special", "dedup", "l2cache", "spares"];

    #[test]
    fn failed_device_of_any_class_degrades_its_pool() {
        for class in CLASSES {
            for state in ["FAULTED", "UNAVAIL", "REMOVED", "OFFLINE"] {
                let json = format!(
                    r#"{{"pools":{{"p":{{"name":"p","state":"ONLINE","scan_stats":{{"state":"FINISHED"}},
                    "vdevs":{{"p":{{"state":"ONLINE","vdevs":{{"sda":{{"state":"ONLINE"}}}}}}}},
                    "{class}":{{"sdb":{{"state":"{state}","read_errors":"0"}}}},"error_count":"0"}}}}}}"#
                );
                let item = from_json(json.as_bytes()).unwrap()[0].judge();
                assert_eq!(item.condition, Condition::Degraded, "{class} {state}");
                let wanted = format!("{class}: sdb {state}");
                assert!(item.reasons[0].what.contains(&wanted), "{item:?}");
            }
            let json = format!(
                r#"{{"pools":{{"p":{{"state":"ONLINE","vdevs":{{}},"{class}":{{"mirror-1":{{"state":"ONLINE",
                "vdevs":{{"sdb":{{"state":"ONLINE","checksum_errors":"3"}}}}}}}}}}}}}}"#
            );
            let item = from_json(json.as_bytes()).unwrap()[0].judge();
            assert_eq!(item.condition, Condition::Degraded, "{item:?}");
        }
        let spares = r#"{"pools":{"p":{"state":"ONLINE","vdevs":{},
            "spares":{"sdb":{"state":"AVAIL"},"sdc":{"state":"INUSE"}}}}}"#;
        let item = from_json(spares.as_bytes()).unwrap()[0].judge();
        assert_eq!(item.condition, Condition::Healthy, "{item:?}");
    }

    #[test]
    fn text_names_failed_device_of_any_class() {
        let status = |lines: &str| {
            let text = format!(
                "  pool: p\n state: ONLINE\nconfig:\n\n\tNAME  STATE  READ WRITE CKSUM\n\tp  ONLINE  0  0  0\n\
                \t  sda  ONLINE  0  0  0\n{lines}\nerrors: No known data errors\n"
            );
            from_text(&text)[0].judge()
        };
        for (class, line) in [
            ("logs", "sdb  FAULTED  0  0  0  too many errors"),
            ("cache", "sdb  UNAVAIL  0  0  0  cannot open"),
            ("special", "sdb  REMOVED  0  0  0"),
            ("spares", "sdb  FAULTED   corrupted data"),
            ("spares", "sdb  UNAVAIL"),
        ] {
            let item = status(&format!("\t{class}\n\t  {line}\n"));
            assert_eq!(item.condition, Condition::Degraded, "{class} {line}");
            assert!(
                item.reasons[0].what.contains(&format!("{class}: sdb ")),
                "{item:?}"
            );
        }
        let well = status("\tspares\n\t  sdb  AVAIL\n\t  sdc  INUSE     currently in use\n");
        assert_eq!(well.condition, Condition::Healthy, "{well:?}");
    }

    #[test]
    fn no_pools_and_nonsense() {
        assert_eq!(from_text("no pools available\n"), []);
        assert_eq!(from_json(b"{}"), None);
        assert_eq!(from_json(br#"{"pools":{}}"#), Some(Vec::new()));
    }
}
