//! What a drive says of itself, through `smartctl --json -a`.
//!
//! smartctl's exit status is eight flags, of which most tell of the drive and only the lowest two say that
//! nothing could be asked. So the JSON is what is judged, and the status only adds what the JSON may lack. A
//! drive that cannot be asked (a virtual one, one behind a controller) is unknown, which is not failed.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::model::{Condition, Reason};

/// Exit status: the options were not understood.
const EXIT_USAGE: u8 = 1;
/// Exit status: the device could not be opened, or sleeps.
const EXIT_OPEN: u8 = 1 << 1;
/// Exit status: the drive says that it is failing.
const EXIT_FAILING: u8 = 1 << 3;
/// Exit status: the drive's log of self-tests has errors.
const EXIT_SELF_TEST: u8 = 1 << 7;

/// Warning bit of NVMe: little spare is left.
const NVME_SPARE: u64 = 1;
/// Warning bit of NVMe: too hot or too cold.
const NVME_TEMPERATURE: u64 = 1 << 1;
/// Warning bit of NVMe: no longer reliable.
const NVME_UNRELIABLE: u64 = 1 << 2;
/// Warning bit of NVMe: it takes no writes any more.
const NVME_READ_ONLY: u64 = 1 << 3;
/// Warning bit of NVMe: its volatile memory is not backed up.
const NVME_BACKUP: u64 = 1 << 4;

/// Percent of its rated endurance from which a drive counts as worn.
pub const WORN: u64 = 90;
/// Degrees above which a solid-state drive is hot.
pub const HOT_SSD: i64 = 75;
/// Degrees above which a hard disk is hot.
pub const HOT_HDD: i64 = 58;
/// Sectors a hard disk may have replaced before that counts: a few are found early in most lives.
const REALLOCATED: u64 = 8;

/// What is known of a drive.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drive {
    /// What its maker calls it.
    pub model: String,
    /// Its serial number.
    pub serial: String,
    /// Degrees Celsius.
    pub temperature: Option<i64>,
    /// Percent of its rated endurance used up; may exceed 100.
    pub worn: Option<u64>,
    /// Errors of the medium that it counted.
    pub media_errors: Option<u64>,
    /// What is to be said of it.
    pub reasons: Vec<Reason>,
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().trim().to_owned()
}

const REPLACE: &str =
    "replace the drive; Hearth goes on without a flash device, and a mirrored origin without a leg";

/// What smartctl told on standard output, and the status it ended with.
pub fn judge(output: &[u8], status: i32) -> Drive {
    let status = u8::try_from(status).unwrap_or(EXIT_USAGE);
    let Ok(json) = serde_json::from_slice::<Value>(output) else {
        return nobody_knows(Drive::default(), "smartctl's answer is not JSON".to_owned());
    };
    let mut drive = Drive {
        model: [&json["model_name"], &json["scsi_model_name"]]
            .map(text)
            .into_iter()
            .find(|t| !t.is_empty())
            .unwrap_or_default(),
        serial: text(&json["serial_number"]),
        temperature: json["temperature"]["current"].as_i64(),
        ..Drive::default()
    };
    let asked = json.get("smart_status").is_some()
        || json.get("nvme_smart_health_information_log").is_some()
        || json.get("ata_smart_attributes").is_some();
    let failing_alone = status & EXIT_FAILING != 0 && status & (EXIT_USAGE | EXIT_OPEN) == 0;
    if !asked && !failing_alone {
        let messages = json["smartctl"]["messages"].as_array();
        let said: Vec<String> = (messages.into_iter().flatten())
            .map(|m| text(&m["string"]))
            .collect();
        let said = match said.join("; ") {
            empty if empty.is_empty() => "it tells nothing of its health".to_owned(),
            said => said,
        };
        return nobody_knows(drive, said);
    }
    let nvme = &json["nvme_smart_health_information_log"];
    if nvme.is_object() {
        judge_nvme(&mut drive, nvme);
    }
    judge_ata(&mut drive, &json);
    judge_scsi(&mut drive, &json);
    wear(&mut drive, &json);
    heat(&mut drive, &json);

    let failing = json["smart_status"]["passed"] == false || status & EXIT_FAILING != 0;
    // Heat alone makes an NVMe drive say so, too; it passes with the heat.
    let only_hot = nvme["critical_warning"].as_u64() == Some(NVME_TEMPERATURE);
    if failing
        && !only_hot
        && !drive
            .reasons
            .iter()
            .any(|r| r.condition == Condition::Failed)
    {
        drive.reasons.insert(
            0,
            Reason::failed("smart-failed", "the drive says that it is failing", REPLACE),
        );
    }
    if status & EXIT_SELF_TEST != 0 {
        drive.reasons.push(Reason::degraded(
            "smart-self-test",
            "a self-test of the drive found errors",
            "see `smartctl -l selftest`; replace the drive if a long test fails again",
        ));
    }
    drive
}

fn nobody_knows(mut drive: Drive, why: String) -> Drive {
    let remedy = if why.contains("-d ") {
        "set the type that smartctl needs as its option -d in hearth.toml, such as sda = \"megaraid,0\" under [drives]; `smartctl --scan` lists types"
    } else {
        ""
    };
    drive
        .reasons
        .push(Reason::unknown("smart-none", why, remedy));
    drive
}

impl Drive {
    /// True if smartctl could not ask the drive the way it was called.
    pub fn is_mute(&self) -> bool {
        self.reasons.iter().any(|r| r.code == "smart-none")
    }
}

/// The types, in the form of smartctl's option `-d`, under which `smartctl --scan --json` lists this device, or the drives
/// of the controller with this SCSI host number. A type that smartctl tries by itself is not among them.
pub fn scanned(output: &[u8], device: &str, host: Option<u32>) -> Vec<String> {
    let json = serde_json::from_slice::<Value>(output).unwrap_or_default();
    let bus = host.map(|host| format!("/dev/bus/{host}"));
    let found = json["devices"].as_array().into_iter().flatten();
    found
        .filter(|d| d["name"] == device || bus.as_ref().is_some_and(|bus| d["name"] == **bus))
        .map(|d| text(&d["type"]))
        .filter(|kind| is_type(kind) && !matches!(kind.as_str(), "ata" | "scsi" | "nvme"))
        .collect()
}

/// True for text that can be a value of smartctl's option `-d`.
pub fn is_type(text: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || ",+/_".contains(c);
    !text.is_empty() && text.len() <= 64 && text.chars().all(allowed)
}

fn judge_nvme(drive: &mut Drive, log: &Value) {
    let warning = log["critical_warning"].as_u64().unwrap_or(0);
    let mut say = |bit: u64, code: &str, what: &str| {
        if warning & bit != 0 {
            drive.reasons.push(Reason::failed(code, what, REPLACE));
        }
    };
    say(
        NVME_READ_ONLY,
        "nvme-read-only",
        "the drive takes no writes any more",
    );
    say(
        NVME_UNRELIABLE,
        "nvme-unreliable",
        "the drive counts itself as no longer reliable",
    );
    say(
        NVME_SPARE,
        "nvme-spare",
        "the drive has less spare left than it needs",
    );
    say(
        NVME_BACKUP,
        "nvme-backup",
        "the drive can no longer save its volatile memory when power fails",
    );
    if warning & NVME_TEMPERATURE != 0 {
        drive.reasons.push(Reason::degraded(
            "hot",
            "the drive is outside the temperatures it is made for",
            "see to its cooling",
        ));
    }
    let number = |name: &str| log[name].as_u64();
    drive.temperature = drive.temperature.or(log["temperature"].as_i64());
    drive.media_errors = number("media_errors");
    drive.worn = number("percentage_used");
    if let Some(errors) = drive.media_errors.filter(|e| *e > 0) {
        drive.reasons.push(Reason::degraded(
            "media-errors",
            format!("{errors} errors of the medium that the drive could not mend"),
            "see whether they grow; if so, replace the drive",
        ));
    }
    if let (Some(spare), Some(least)) = (
        number("available_spare"),
        number("available_spare_threshold"),
    ) && least > 0
        && spare >= least
        && spare < least.saturating_add(5)
    {
        drive.reasons.push(Reason::degraded(
            "nvme-spare-low",
            format!("{spare} % of the drive's spare is left; it fails below {least} %"),
            "have another drive at hand",
        ));
    }
}

fn judge_ata(drive: &mut Drive, json: &Value) {
    let table = json["ata_smart_attributes"]["table"].as_array();
    for attribute in table.into_iter().flatten() {
        let name = text(&attribute["name"]);
        let words = name.replace('_', " ");
        let raw = raw_count(attribute);
        let prefail = attribute["flags"]["prefailure"] == true;
        match text(&attribute["when_failed"]).as_str() {
            "now" if prefail => drive.reasons.push(Reason::failed(
                "smart-attribute",
                format!("{words} is at its threshold: the drive foretells its failure"),
                REPLACE,
            )),
            "now" => drive.reasons.push(Reason::degraded(
                "smart-attribute-old",
                format!("{words} is at its threshold: the drive has reached its age"),
                "plan to replace the drive",
            )),
            "past" if prefail => drive.reasons.push(Reason::degraded(
                "smart-attribute-past",
                format!("{words} was at its threshold before"),
                "watch the drive, and have another at hand",
            )),
            _ => {}
        }
        let counted = match attribute["id"].as_u64() {
            Some(187) => Some("errors it could not correct"),
            Some(197) => Some("sectors it cannot read and waits to replace"),
            Some(198) => Some("sectors it could not read when it looked by itself"),
            _ => None,
        };
        if let Some(what) = counted.filter(|_| raw > 0) {
            drive.media_errors = Some(drive.media_errors.unwrap_or(0).saturating_add(raw));
            drive.reasons.push(Reason::degraded(
                "media-errors",
                format!("the drive counts {raw} {what}"),
                "see whether they grow; if so, replace the drive",
            ));
        }
        if attribute["id"] == 5 && raw > 0 {
            let what = format!("the drive has replaced {raw} bad sectors");
            drive.reasons.push(if raw >= REALLOCATED {
                Reason::degraded(
                    "reallocated",
                    what,
                    "see whether they grow; if so, replace the drive",
                )
            } else {
                Reason::note("reallocated", what, "")
            });
        }
        if attribute["id"] == 199 && raw > 0 {
            drive.reasons.push(Reason::note(
                "cable",
                format!("{raw} transfers to the drive were damaged on the way"),
                "if they grow, see to its cable",
            ));
        }
    }
}

fn judge_scsi(drive: &mut Drive, json: &Value) {
    let grown = json["scsi_grown_defect_list"].as_u64().unwrap_or(0);
    if grown >= REALLOCATED {
        drive.reasons.push(Reason::degraded(
            "reallocated",
            format!("the drive has replaced {grown} bad sectors"),
            "see whether they grow; if so, replace the drive",
        ));
    }
    let of = |what: &str| {
        json["scsi_error_counter_log"][what]["total_uncorrected_errors"]
            .as_u64()
            .unwrap_or(0)
    };
    let errors = of("read") + of("write") + of("verify");
    if errors > 0 {
        drive.media_errors = Some(errors);
        drive.reasons.push(Reason::degraded(
            "media-errors",
            format!("the drive counts {errors} errors it could not correct"),
            "see whether they grow; if so, replace the drive",
        ));
    }
}

/// A counter's raw value. Vendors pack several fields into the six bytes of some counters; the lowest 16 bits are
/// the count. smartctl's drive database shows most of these as `0 (0 16)`. Others are recognised by a figure that no counter
/// of sectors reaches, or that the normalised value contradicts.
fn raw_count(attribute: &Value) -> u64 {
    const FIELD: u64 = 0xFFFF;
    /// Normalised value of a counter that has counted nothing to speak of.
    const UNTOUCHED: u64 = 100;
    let raw = attribute["raw"]["value"].as_u64().unwrap_or(0);
    let shown = text(&attribute["raw"]["string"]);
    let digits = shown.split(|c: char| !c.is_ascii_digit()).next();
    let first = digits.and_then(|d| d.parse::<u64>().ok());
    if let Some(first) = first.filter(|n| *n < raw) {
        return first;
    }
    let untouched = (attribute["value"].as_u64()).is_some_and(|v| v >= UNTOUCHED);
    if raw > u64::from(u32::MAX) || (raw > FIELD && untouched) {
        raw & FIELD
    } else {
        raw
    }
}

/// Percent of its endurance that a flash drive has left, by its own normalised attributes. Their numbers mean different
/// things from vendor to vendor, so smartctl's names decide: its drive database knows the models.
fn life_left(json: &Value) -> Option<u64> {
    let table = json["ata_smart_attributes"]["table"].as_array();
    let turns = json["rotation_rate"].as_u64().is_some_and(|rate| rate > 0);
    let mut lives = Vec::new();
    let mut wears = Vec::new();
    for attribute in table.into_iter().flatten().filter(|_| !turns) {
        let Some(value) = attribute["value"].as_u64().filter(|v| *v <= 100) else {
            continue;
        };
        let name: String = (text(&attribute["name"]).chars())
            .filter(|c| !matches!(c, '_' | '-' | ' '))
            .map(|c| c.to_ascii_lowercase())
            .collect();
        let has = |words: &[&str]| words.iter().any(|w| name.contains(w));
        let is_life = has(&["life"]) && has(&["left", "remain", "used"]);
        match attribute["id"].as_u64() {
            // Normalised, all of these count down from 100, `Percent_Life_Used` as well.
            _ if is_life => lives.push(value),
            // The names of drives that the database does not know. Zero is no valid normalised value: SandForce
            // controllers keep figures of their own under these numbers, and say 0.
            Some(177) if name == "wearlevelingcount" && value > 0 => wears.push(value),
            Some(233) if name == "mediawearoutindicator" && value > 0 => wears.push(value),
            _ => {}
        }
    }
    lives.into_iter().min().or(wears.into_iter().min())
}

fn wear(drive: &mut Drive, json: &Value) {
    let left = life_left(json);
    let told = json["endurance_used"]["current_percent"].as_u64();
    let scsi = json["scsi_percentage_used_endurance_indicator"].as_u64();
    drive.worn = drive.worn.or(told).or(scsi).or(left.map(|left| 100 - left));
    if let Some(worn) = drive.worn.filter(|worn| *worn >= WORN) {
        drive.reasons.push(Reason::degraded(
            "worn",
            format!("{worn} % of the drive's rated endurance is used up"),
            "plan to replace the drive; `--endurance` makes Hearth write less to it",
        ));
    }
}

fn heat(drive: &mut Drive, json: &Value) {
    let turns = json["rotation_rate"].as_u64().is_some_and(|rate| rate > 0);
    let limit = if turns { HOT_HDD } else { HOT_SSD };
    if let Some(degrees) = drive.temperature.filter(|t| *t > limit)
        && !drive.reasons.iter().any(|r| r.code == "hot")
    {
        drive.reasons.push(Reason::degraded(
            "hot",
            format!("the drive has {degrees} °C"),
            "see to its cooling",
        ));
    }
}

/// What smartctl is not there for is said once for all drives.
pub const MISSING: &str = "smartctl is not installed, so nothing is known of what drives say of themselves; install smartmontools";

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn codes(drive: &Drive) -> Vec<(&str, Condition)> {
        (drive.reasons.iter())
            .map(|r| (r.code.as_str(), r.condition))
            .collect()
    }

    fn read(name: &str, status: i32) -> Drive {
        let path = format!("{}/recorded/{name}", env!("CARGO_MANIFEST_DIR"));
        judge(&std::fs::read(path).unwrap(), status)
    }

    #[test]
    fn a_virtual_disk_is_unknown_and_not_failed() {
        let drive = read("smart-virtio.json", 1);
        assert_eq!(codes(&drive), [("smart-none", Condition::Unknown)]);
        assert!(
            drive.reasons[0]
                .what
                .contains("Unable to detect device type")
        );
    }

    #[test]
    fn an_nvme_drive_that_takes_no_writes_has_failed() {
        let drive = read("smart-nvme-read-only.json", 8);
        assert_eq!(codes(&drive), [("nvme-read-only", Condition::Failed)]);
        assert_eq!(drive.temperature, Some(50));
    }

    #[test]
    fn a_good_nvme_drive_is_healthy_and_a_worn_one_is_not() {
        let good = read("smart-nvme.json", 0);
        assert_eq!(codes(&good), []);
        assert_eq!((good.worn, good.media_errors), (Some(3), Some(0)));
        assert!(good.model.contains("NVMe"), "{good:?}");
        let worn = read("smart-nvme-worn.json", 0);
        assert_eq!(
            codes(&worn),
            [
                ("media-errors", Condition::Degraded),
                ("nvme-spare-low", Condition::Degraded),
                ("worn", Condition::Degraded)
            ]
        );
        assert_eq!(worn.worn, Some(97));
    }

    #[test]
    fn heat_alone_is_no_failure_though_the_drive_does_not_pass() {
        let hot = read("smart-nvme-hot.json", 8);
        assert_eq!(codes(&hot), [("hot", Condition::Degraded)]);
    }

    #[test]
    fn hard_disks_and_their_attributes() {
        let good = read("smart-sata.json", 0);
        assert_eq!(
            codes(&good),
            [
                ("reallocated", Condition::Healthy),
                ("cable", Condition::Healthy)
            ]
        );
        assert_eq!(good.worn, None, "a hard disk does not wear");
        let bad = read("smart-sata-failing.json", 0x18);
        assert_eq!(
            codes(&bad),
            [
                ("smart-attribute", Condition::Failed),
                ("reallocated", Condition::Degraded),
                ("media-errors", Condition::Degraded),
                ("hot", Condition::Degraded)
            ]
        );
    }

    #[test]
    fn a_sata_flash_drive_wears() {
        let worn = read("smart-sata-ssd.json", 0x80);
        assert_eq!(
            codes(&worn),
            [
                ("worn", Condition::Degraded),
                ("smart-self-test", Condition::Degraded)
            ]
        );
        assert_eq!(worn.worn, Some(94));
    }

    #[test]
    fn wear_is_read_by_name_not_by_number() {
        for (model, attributes, worn) in [
            (
                "SandForce",
                vec![
                    (177, "Wear_Range_Delta", 0),
                    (231, "SSD_Life_Left", 95),
                    (233, "SandForce_Internal", 0),
                ],
                Some(5),
            ),
            // The same drive, unknown to the database.
            (
                "SandForce, default names",
                vec![
                    (177, "Wear_Leveling_Count", 0),
                    (231, "Unknown_SSD_Attribute", 95),
                    (233, "Media_Wearout_Indicator", 0),
                ],
                None,
            ),
            (
                "Kingston at its end",
                vec![
                    (169, "Remaining_Lifetime_Perc", 0),
                    (231, "SSD_Life_Left", 0),
                ],
                Some(100),
            ),
            (
                "WD Blue",
                vec![
                    (230, "Media_Wearout_Indicator", 1),
                    (233, "NAND_GB_Written_TLC", 100),
                ],
                None,
            ),
            ("Intel", vec![(233, "Media_Wearout_Indicator", 7)], Some(93)),
            ("Samsung", vec![(177, "Wear_Leveling_Count", 4)], Some(96)),
            (
                "Crucial",
                vec![(202, "Percent_Lifetime_Remain", 3)],
                Some(97),
            ),
            ("Micron", vec![(202, "Perc_Rated_Life_Used", 88)], Some(12)),
            (
                "Plextor",
                vec![(169, "Bad_Block_Rate", 0), (177, "Wear_Leveling_Count", 99)],
                Some(1),
            ),
        ] {
            let table: Vec<Value> = (attributes.iter())
                .map(|(id, name, value)| {
                    json!({"id": id, "name": name, "value": value, "raw": {"value": 4_294_967_296u64}})
                })
                .collect();
            let answer = json!({"smart_status": {"passed": true}, "rotation_rate": 0,
                "ata_smart_attributes": {"table": table}});
            let drive = judge(answer.to_string().as_bytes(), 0);
            assert_eq!(drive.worn, worn, "{model}");
            let said = codes(&drive).contains(&("worn", Condition::Degraded));
            assert_eq!(said, worn >= Some(WORN), "{model}: {drive:?}");
        }
    }

    #[test]
    fn drives_behind_controller_are_found_by_scan() {
        let scan = br#"{"devices":[
            {"name":"/dev/sda","type":"scsi"},{"name":"/dev/sdb","type":"sat"},
            {"name":"/dev/bus/0","type":"megaraid,0"},{"name":"/dev/bus/0","type":"megaraid,1"},
            {"name":"/dev/bus/1","type":"megaraid,7"},{"name":"/dev/bus/0","type":"x; reboot"}]}"#;
        assert_eq!(
            scanned(scan, "/dev/sda", Some(0)),
            ["megaraid,0", "megaraid,1"]
        );
        assert_eq!(scanned(scan, "/dev/sdb", None), ["sat"]);
        assert!(scanned(scan, "/dev/sda", None).is_empty());
        assert!(scanned(b"{}", "/dev/sda", Some(0)).is_empty());
        let refused =
            br#"{"smartctl":{"messages":[{"string":"please try adding '-d megaraid,N'"}]}}"#;
        let drive = judge(refused, 2);
        assert!(drive.is_mute() && drive.reasons[0].remedy.contains("[drives]"));
    }

    #[test]
    fn packed_raw_value_counts_its_lowest_field() {
        for (id, value, raw, string, count) in [
            (5, 100, 0x10_0000_0000u64, "0 (0 16)", 0),
            (5, 100, 0x10_0000_0000, "68719476736", 0),
            (5, 90, 0x10_0000_0009, "9 (0 16)", 9),
            (197, 100, 0x1_0000_0000, "4294967296", 0),
            (198, 200, 0x2_0002_0002, "8590065666", 2),
            (187, 100, 0x1_0000, "65536", 0),
            (197, 1, 70_000, "70000", 70_000),
            (5, 100, 12, "12", 12),
            (5, 100, 12, "", 12),
        ] {
            let attribute =
                json!({"id": id, "value": value, "raw": {"value": raw, "string": string}});
            assert_eq!(raw_count(&attribute), count, "{attribute}");
            let answer = json!({"smart_status": {"passed": true}, "rotation_rate": 7200,
                "ata_smart_attributes": {"table": [attribute]}});
            let drive = judge(answer.to_string().as_bytes(), 0);
            assert_eq!(drive.reasons.is_empty(), count == 0, "{drive:?}");
        }
    }

    #[test]
    fn nothing_that_comes_makes_it_panic() {
        for bytes in ["", "{", "[]", "null", r#"{"smart_status":7}"#] {
            for status in [-1, 0, 1, 2, 255, 256] {
                judge(bytes.as_bytes(), status);
            }
        }
        let whole = std::fs::read(format!(
            "{}/recorded/smart-nvme.json",
            env!("CARGO_MANIFEST_DIR")
        ))
        .unwrap();
        for cut in 0..whole.len() {
            judge(&whole[..cut], 0);
        }
    }

    #[test]
    fn the_status_alone_tells_of_failure() {
        let drive = judge(b"{}", 8);
        assert_eq!(codes(&drive), [("smart-failed", Condition::Failed)]);
        assert_eq!(
            codes(&judge(b"{}", 2)),
            [("smart-none", Condition::Unknown)]
        );
    }
}
