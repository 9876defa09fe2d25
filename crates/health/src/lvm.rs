//! Volumes of LVM with legs: from `lvs --reportformat json`.

use serde_json::Value;

use crate::model::{Item, Kind, Reason};

/// What `lvs` is asked for, besides the names.
pub const FIELDS: &str = "vg_name,lv_name,segtype,lv_attr,lv_health_status,raid_sync_action,copy_percent,raid_mismatch_count";

/// The volumes of an answer that are worth a word: those with legs, and pools of thin ones.
pub fn judge(output: &[u8]) -> Option<Vec<Item>> {
    let json: Value = serde_json::from_slice(output).ok()?;
    let reports = json.get("report")?.as_array()?;
    let volumes = (reports.iter())
        .filter_map(|r| r["lv"].as_array())
        .flatten();
    Some(volumes.filter_map(volume).collect())
}

fn volume(lv: &Value) -> Option<Item> {
    let text = |name: &str| lv[name].as_str().unwrap_or_default().trim();
    let kind = text("segtype");
    let legs = kind.starts_with("raid") || kind == "mirror";
    if !legs && kind != "thin-pool" {
        return None;
    }
    let name = format!("{}/{}", text("vg_name"), text("lv_name"));
    let repair = format!("put the missing device back, or `lvconvert --repair {name}`");
    let mut reasons = Vec::new();
    let percent: Option<f64> = text("copy_percent").parse().ok();
    let incomplete = percent.is_some_and(|p| p < 100.0);
    let done = percent.map_or(String::new(), |p| format!(", {p:.1} % done"));
    match text("lv_health_status") {
        "" | "writemostly" => {}
        "partial" => reasons.push(if kind == "raid0" {
            Reason::failed(
                "lvm-failed",
                "a device of the volume is missing",
                repair.clone(),
            )
        } else {
            Reason::degraded(
                "lvm-degraded",
                "a device of the volume is missing",
                repair.clone(),
            )
        }),
        "refresh needed" => reasons.push(Reason::degraded(
            "lvm-refresh",
            "a device of the volume failed and is there again, but not used",
            format!("`lvchange --refresh {name}`"),
        )),
        "mismatches exist" => reasons.push(Reason::degraded(
            "lvm-mismatch",
            format!(
                "the legs differed in {} places at the last check",
                text("raid_mismatch_count")
            ),
            format!("`lvchange --syncaction repair {name}`"),
        )),
        "out_of_data" => reasons.push(Reason::failed(
            "lvm-full",
            "the pool of thin volumes is full",
            format!("`lvextend` {name}"),
        )),
        other => reasons.push(Reason::failed(
            "lvm-failed",
            format!("LVM says of the volume: {other}"),
            format!("see `lvs -a {name}`"),
        )),
    }
    if legs && incomplete && reasons.is_empty() {
        let what = match text("raid_sync_action") {
            "check" | "repair" => Reason::note(
                "lvm-checking",
                format!("the volume is being checked{done}"),
                "",
            ),
            _ => Reason::rebuilding(
                "lvm-rebuilding",
                format!("the volume's legs are made equal{done}"),
            ),
        };
        reasons.push(what);
    }
    Some(Item::new(Kind::Device, name, reasons).about(format!("LVM {kind}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Condition;

    #[test]
    fn volumes_with_legs_in_every_state() {
        let path = format!("{}/recorded/lvs.json", env!("CARGO_MANIFEST_DIR"));
        let items = judge(&std::fs::read(path).unwrap()).unwrap();
        let told: Vec<(&str, Condition, &str)> = (items.iter())
            .map(|i| {
                let code = i.reasons.first().map_or("", |r| r.code.as_str());
                (i.name.as_str(), i.condition, code)
            })
            .collect();
        assert_eq!(
            told,
            [
                ("vg/good", Condition::Healthy, ""),
                ("vg/partial", Condition::Degraded, "lvm-degraded"),
                ("vg/rebuilt", Condition::Rebuilding, "lvm-rebuilding"),
                ("vg/back", Condition::Degraded, "lvm-refresh"),
                ("vg/thin", Condition::Failed, "lvm-full"),
            ],
            "linear volumes are not listed"
        );
    }

    #[test]
    fn nonsense_is_nothing() {
        assert_eq!(judge(b""), None);
        assert_eq!(judge(b"{}"), None);
        assert_eq!(judge(br#"{"report":[{"lv":[]}]}"#), Some(Vec::new()));
    }
}
