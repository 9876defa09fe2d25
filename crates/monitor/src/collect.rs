//! What lies under flash and origins, looked at: drives, arrays, volumes, pools of ZFS, file systems.
//!
//! Any of these looks may hang: a mount whose server is gone, a drive that is dying. They run in a part of
//! their own, each within a limit, so that the daemon goes on being watched and what is known goes on being
//! told. Drives are asked seldom, since that may wake them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hearth_daemon::error::Result;
use hearth_health::files::{self, FileSystem};
use hearth_health::{Item, Kind, Reason, lvm, md, smart, zfs};
use hearth_io::beneath::{Node, beneath};
use serde::Deserialize;

use crate::facts::{self, Place};
use crate::part::{Context, Part};
use crate::tool::{Mute, ask_as_root};

/// Between two rounds.
const EVERY: Duration = Duration::from_secs(30);
/// Between two questions to a drive.
const DRIVES_EVERY: Duration = Duration::from_secs(600);
/// Longest that a tool may take.
const TOOL_LIMIT: Duration = Duration::from_secs(30);
/// Longest that a look at a path may take.
const LOOK_LIMIT: Duration = Duration::from_secs(10);
/// Drives that are asked: more are no host's own.
const DRIVES_MAX: usize = 256;

/// What was found, the last time.
#[derive(Clone, Debug, Default)]
pub struct Collected {
    /// Devices and file systems.
    pub items: Vec<Item>,
    /// What could not be looked at.
    pub notes: Vec<String>,
    /// Rounds so far.
    pub rounds: u64,
}

/// Where the part leaves what it finds.
#[derive(Clone, Debug, Default)]
pub struct Findings(Arc<Mutex<Collected>>);

impl Findings {
    /// What was found, the last time.
    pub fn get(&self) -> Collected {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn set(&self, collected: Collected) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = collected;
    }
}

/// The part that looks.
#[derive(Debug, Default)]
pub struct Collecting {
    /// Where it leaves what it finds.
    pub findings: Findings,
    drives: DrivesConfig,
    memory: Mutex<Memory>,
}

impl Collecting {
    /// A part that asks drives the way the host's file says.
    pub fn new(drives: DrivesConfig) -> Collecting {
        Collecting {
            drives,
            ..Collecting::default()
        }
    }
}

/// The section `[drives]`: values of smartctl's option `-d` by the kernel's name of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct DrivesConfig(BTreeMap<String, Types>);

/// One drive behind a device, or several.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
enum Types {
    One(String),
    Several(Vec<String>),
}

impl DrivesConfig {
    /// What is wrong with it.
    pub fn check(&self) -> std::result::Result<(), String> {
        for name in self.0.keys() {
            if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric()) {
                return Err(format!(
                    "drives: {name:?} is not the kernel's name of a device, such as sda"
                ));
            }
            for kind in self.types(name) {
                if !smart::is_type(kind) {
                    return Err(format!(
                        "drives.{name}: {kind:?} is not a type of smartctl's option -d, such as sat or megaraid,0"
                    ));
                }
            }
        }
        Ok(())
    }

    fn types(&self, name: &str) -> &[String] {
        match self.0.get(name) {
            Some(Types::One(kind)) => std::slice::from_ref(kind),
            Some(Types::Several(kinds)) => kinds,
            None => &[],
        }
    }
}

/// Drives behind one device: the type that smartctl was told, and the answer.
type Drives = Vec<(Option<String>, smart::Drive)>;

/// What is remembered from round to round.
#[derive(Debug, Default)]
struct Memory {
    drives: BTreeMap<String, (Instant, Option<Drives>)>,
    /// Paths that are being looked at and have not answered.
    hanging: BTreeMap<PathBuf, std::sync::mpsc::Receiver<Option<Looked>>>,
}

/// What a path lies on.
#[derive(Clone, Debug, Default)]
struct Looked {
    devices: Vec<String>,
    size: u64,
    free: u64,
    is_file: bool,
    sparse: bool,
}

/// The kernel's name of a device.
fn name_of(rdev: u64) -> Option<String> {
    let (major, minor) = (libc::major(rdev), libc::minor(rdev));
    let link = std::fs::read_link(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    Some(link.file_name()?.to_str()?.to_owned())
}

fn look(path: &Path) -> Option<Looked> {
    use std::os::unix::fs::MetadataExt;
    let meta = std::fs::metadata(path).ok()?;
    let mut looked = Looked {
        is_file: meta.is_file(),
        sparse: meta.is_file() && meta.blocks().saturating_mul(512) < meta.len(),
        ..Looked::default()
    };
    for part in beneath(path).ok()?.parts() {
        if let Node::Device(rdev) = part.node {
            looked.devices.extend(name_of(rdev));
        }
    }
    if let Some((size, free)) = space(path) {
        (looked.size, looked.free) = (size, free);
    }
    Some(looked)
}

/// Bytes of a path's file system, and those free.
fn space(path: &Path) -> Option<(u64, u64)> {
    use std::os::unix::ffi::OsStrExt;
    let path = std::ffi::CString::new(path.as_os_str().as_bytes()).ok()?;
    let mut stat = std::mem::MaybeUninit::<libc::statvfs>::zeroed();
    // SAFETY: the path ends with a zero, and `stat` has room for what is written; it is read only on success.
    let stat = unsafe {
        if libc::statvfs(path.as_ptr(), stat.as_mut_ptr()) != 0 {
            return None;
        }
        stat.assume_init()
    };
    let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
    Some((bytes(stat.f_blocks), bytes(stat.f_bavail)))
}

/// A whole drive, not something made of others.
fn is_drive(name: &str) -> bool {
    let made = [
        "loop", "dm-", "md", "ram", "zram", "nbd", "zd", "drbd", "bcache", "rbd",
    ];
    !made.iter().any(|m| name.starts_with(m))
        && !Path::new("/sys/class/block")
            .join(name)
            .join("partition")
            .exists()
}

impl Memory {
    /// What a path lies on; `Err` if that does not answer.
    fn look(&mut self, path: &Path) -> std::result::Result<Option<Looked>, ()> {
        let receiver = match self.hanging.remove(path) {
            Some(receiver) => receiver,
            None => {
                let (tell, told) = std::sync::mpsc::channel();
                let at = path.to_owned();
                let work = move || {
                    // Nobody may be waiting any more.
                    let _ = tell.send(look(&at));
                };
                match std::thread::Builder::new()
                    .name("mon-look".to_owned())
                    .spawn(work)
                {
                    Ok(_) => told,
                    Err(_) => return Ok(None),
                }
            }
        };
        match receiver.recv_timeout(LOOK_LIMIT) {
            Ok(looked) => Ok(looked),
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => Ok(None),
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {
                // One thread waits at it, however long.
                self.hanging.insert(path.to_owned(), receiver);
                Err(())
            }
        }
    }

    /// What the drives behind a device say, asked now or lately.
    fn drives(
        &mut self,
        name: &str,
        types: &[String],
        notes: &mut BTreeSet<String>,
    ) -> Option<Drives> {
        let due = |(at, _): &(Instant, _)| at.elapsed() >= DRIVES_EVERY;
        if self.drives.get(name).is_none_or(due) {
            let before = self.drives.remove(name).and_then(|(_, drives)| drives);
            let drives = ask_drives(name, types, before, notes);
            self.drives
                .insert(name.to_owned(), (Instant::now(), drives));
        }
        self.drives.get(name)?.1.clone()
    }
}

/// Asks all drives behind a device: with the types that were set, otherwise as smartctl finds it, and if that does not
/// answer with the types of a scan.
fn ask_drives(
    name: &str,
    types: &[String],
    before: Option<Drives>,
    notes: &mut BTreeSet<String>,
) -> Option<Drives> {
    let before = before.unwrap_or_default();
    let mut ask = |kind: Option<&String>| {
        let known = before.iter().find(|(k, _)| k.as_ref() == kind);
        let drive = ask_drive(name, kind, known.map(|(_, drive)| drive), notes)?;
        Some((kind.cloned(), drive))
    };
    if !types.is_empty() {
        return types.iter().map(|kind| ask(Some(kind))).collect();
    }
    let plain = ask(None)?;
    if !plain.1.is_mute() {
        return Some(vec![plain]);
    }
    let args = ["--scan", "--json=c"];
    let scan = ask_as_root("smart-scan", "smartctl", &args, TOOL_LIMIT);
    let output = scan.map(|said| said.output).unwrap_or_default();
    let found = smart::scanned(&output, &format!("/dev/{name}"), scsi_host(name));
    let answered = found.iter().take(DRIVES_MAX).filter_map(|k| ask(Some(k)));
    let answered: Drives = answered.filter(|(_, drive)| !drive.is_mute()).collect();
    Some(match answered {
        none if none.is_empty() => vec![plain],
        answered => answered,
    })
}

/// What one drive says; what it said before if it sleeps; `None` if smartctl cannot be run.
fn ask_drive(
    name: &str,
    kind: Option<&String>,
    before: Option<&smart::Drive>,
    notes: &mut BTreeSet<String>,
) -> Option<smart::Drive> {
    let device = format!("/dev/{name}");
    let mut args = vec!["--json=c", "-a", "-n", "standby"];
    let mut question = format!("smart {name}");
    if let Some(kind) = kind {
        args.extend(["-d", kind]);
        question = format!("{question} {kind}");
    }
    args.push(&device);
    match ask_as_root(&question, "smartctl", &args, TOOL_LIMIT) {
        Ok(said) => Some(match (said.status, before) {
            (2, Some(before)) => before.clone(),
            (status, _) => smart::judge(&said.output, status),
        }),
        Err(Mute::Missing) => {
            notes.insert(smart::MISSING.to_owned());
            None
        }
        Err(Mute::Late) => Some(late(&device)),
        Err(Mute::Io(e)) => {
            notes.insert(format!("smartctl cannot be run: {e}"));
            None
        }
    }
}

/// The number of the SCSI host that a device is attached to.
fn scsi_host(name: &str) -> Option<u32> {
    let link = std::fs::read_link(Path::new("/sys/class/block").join(name)).ok()?;
    let host = link
        .iter()
        .find_map(|part| part.to_str()?.strip_prefix("host"));
    host?.parse().ok()
}

fn late(device: &str) -> smart::Drive {
    smart::Drive {
        reasons: vec![Reason::degraded(
            "drive-silent",
            format!(
                "{device} did not answer smartctl within {} s",
                TOOL_LIMIT.as_secs()
            ),
            "see the kernel's log for resets and errors of the drive",
        )],
        ..smart::Drive::default()
    }
}

/// The device mapper's names of a volume: dashes of its own are doubled. Under thin volumes lies not what bears the name of
/// their pool, which is a device of its own beside them, but what both lie on.
fn mapped(volume: &str) -> Option<[String; 2]> {
    let (group, volume) = volume.split_once('/')?;
    let volume = volume.trim_matches(['[', ']']);
    let name = format!("{}-{}", group.replace('-', "--"), volume.replace('-', "--"));
    let pool = format!("{name}-tpool");
    Some([name, pool])
}

fn round(memory: &mut Memory, config: &DrivesConfig, places: &[Place]) -> Collected {
    let mut notes = BTreeSet::new();
    let mut items = Vec::new();
    // Devices and file systems, with the disks on each.
    let mut devices: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut systems: BTreeMap<String, FileSystem> = BTreeMap::new();
    let mut zpools: BTreeSet<String> = BTreeSet::new();
    let info = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mounts = files::mounts(&info);
    for place in places {
        let looked = match memory.look(&place.path) {
            Ok(Some(looked)) => looked,
            Ok(None) => continue,
            Err(()) => {
                let name = place.disk.clone().unwrap_or_else(|| "the flash".to_owned());
                let what = format!(
                    "{} has not answered for {} s",
                    place.path.display(),
                    LOOK_LIMIT.as_secs()
                );
                let reason = Reason::failed(
                    "path-hangs",
                    format!("{what}; {name} lies on it"),
                    "see whether a mount's server is gone, and the kernel's log",
                );
                items.push(Item::new(
                    Kind::FileSystem,
                    place.path.display().to_string(),
                    vec![reason],
                ));
                continue;
            }
        };
        for device in looked.devices {
            devices
                .entry(device)
                .or_default()
                .extend(place.disk.clone());
        }
        let real = std::fs::canonicalize(&place.path).unwrap_or_else(|_| place.path.clone());
        if let Ok(volume) = place.path.strip_prefix("/dev/zvol") {
            zpools.extend(
                volume
                    .iter()
                    .next()
                    .and_then(|p| p.to_str())
                    .map(str::to_owned),
            );
        }
        let Some(mount) = files::mount_of(&mounts, &real).filter(|_| looked.is_file) else {
            continue;
        };
        if mount.kind == "zfs" {
            zpools.extend(mount.source.split('/').next().map(str::to_owned));
        }
        let system = systems
            .entry(mount.at.clone())
            .or_insert_with(|| FileSystem {
                mount: mount.at.clone(),
                kind: mount.kind.clone(),
                size: looked.size,
                free: looked.free,
                read_only: mount.read_only,
                ..FileSystem::default()
            });
        system.written |= place.written;
        system.grows |= looked.sparse;
        system.disks.extend(place.disk.clone());
    }
    for system in systems.values_mut() {
        system.disks.sort();
        system.disks.dedup();
    }
    items.extend(systems.values().map(FileSystem::judge));
    let on = |name: &str| {
        devices
            .get(name)
            .into_iter()
            .flatten()
            .cloned()
            .collect::<Vec<_>>()
    };

    let drives = devices
        .keys()
        .filter(|name| is_drive(name))
        .take(DRIVES_MAX);
    for name in drives {
        let unknown = || {
            let reason = Reason::unknown("smart-none", "nothing is known of its health", "");
            vec![(
                None,
                smart::Drive {
                    reasons: vec![reason],
                    ..smart::Drive::default()
                },
            )]
        };
        let answers = memory.drives(name, config.types(name), &mut notes);
        let answers = answers.unwrap_or_else(unknown);
        let single = answers.len() == 1;
        for (kind, drive) in answers {
            let called = match kind.filter(|_| !single) {
                Some(kind) => format!("{name} {kind}"),
                None => name.clone(),
            };
            let mut item = Item::new(Kind::Device, called, drive.reasons).about(drive.model);
            item.disks = on(name);
            items.push(item);
        }
    }
    memory.drives.retain(|name, _| devices.contains_key(name));

    let block = Path::new("/sys/block");
    let mut arrays = md::from_sysfs(block);
    if arrays.is_empty() {
        arrays = md::from_mdstat(&std::fs::read_to_string("/proc/mdstat").unwrap_or_default());
    }
    for array in arrays
        .iter()
        .filter(|array| devices.contains_key(&array.name))
    {
        let mut item = array.judge();
        item.disks = on(&array.name);
        items.push(item);
    }

    let volumes: BTreeMap<String, &String> = (devices.keys())
        .filter_map(|name| {
            let dm = block.join(name).join("dm");
            let uuid = std::fs::read_to_string(dm.join("uuid")).ok()?;
            let mapped = std::fs::read_to_string(dm.join("name")).ok()?;
            uuid.starts_with("LVM-")
                .then(|| (mapped.trim().to_owned(), name))
        })
        .collect();
    if !volumes.is_empty() {
        match ask_as_root(
            "lvs",
            "lvs",
            &["--reportformat", "json", "-a", "-o", lvm::FIELDS],
            TOOL_LIMIT,
        ) {
            Ok(said) => {
                for mut item in lvm::judge(&said.output).unwrap_or_default() {
                    let names = mapped(&item.name).into_iter().flatten();
                    let found = names.filter_map(|name| volumes.get(&name).copied());
                    let disks: BTreeSet<String> = match found.collect::<Vec<_>>() {
                        devices if devices.is_empty() => continue,
                        devices => devices.into_iter().flat_map(|device| on(device)).collect(),
                    };
                    item.disks = disks.into_iter().collect();
                    items.push(item);
                }
            }
            Err(Mute::Missing) => {
                notes.insert(
                    "lvs is not installed, so nothing is known of volumes' legs".to_owned(),
                );
            }
            Err(Mute::Late) => {
                notes.insert("lvs did not answer in time".to_owned());
            }
            Err(Mute::Io(e)) => {
                notes.insert(format!("lvs cannot be run: {e}"));
            }
        }
    }

    if !zpools.is_empty() {
        let json = ask_as_root("zpool-json", "zpool", &["status", "-j"], TOOL_LIMIT)
            .ok()
            .and_then(|said| zfs::from_json(&said.output));
        // Before 2.3 there is only text.
        let pools = json.or_else(|| {
            let said = ask_as_root("zpool", "zpool", &["status"], TOOL_LIMIT).ok()?;
            Some(zfs::from_text(&String::from_utf8_lossy(&said.output)))
        });
        match pools {
            Some(pools) => items.extend(
                (pools.iter())
                    .filter(|p| zpools.contains(&p.name))
                    .map(zfs::Zpool::judge),
            ),
            None => {
                notes.insert(
                    "zpool could not be asked, so nothing is known of pools of ZFS".to_owned(),
                );
            }
        }
    }
    Collected {
        items,
        notes: notes.into_iter().collect(),
        rounds: 0,
    }
}

impl Part for Collecting {
    fn name(&self) -> &'static str {
        "collect"
    }

    fn run(&self, context: &Context) -> Result<()> {
        let mut said = BTreeSet::new();
        loop {
            if let Some(seen) = context.daemon.seen() {
                let places = facts::places(&seen);
                let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
                let mut collected = round(&mut memory, &self.drives, &places);
                drop(memory);
                collected.rounds = self.findings.get().rounds + 1;
                // Once, and again only after it was otherwise.
                for note in collected.notes.iter().filter(|note| !said.contains(*note)) {
                    tracing::warn!("{note}");
                }
                said = collected.notes.iter().cloned().collect();
                self.findings.set(collected);
                if context.stop.wait(EVERY) {
                    return Ok(());
                }
            } else if context.stop.wait(Duration::from_secs(1)) {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_have_two_names() {
        let names = |volume| mapped(volume).unwrap();
        assert_eq!(names("vg/[lv]"), ["vg-lv", "vg-lv-tpool"]);
        assert_eq!(names("my-vg/a-b"), ["my--vg-a--b", "my--vg-a--b-tpool"]);
        assert_eq!(mapped("none"), None);
    }

    #[test]
    fn a_file_lies_on_a_file_system_with_room() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sparse");
        std::fs::File::create(&path)
            .unwrap()
            .set_len(1 << 20)
            .unwrap();
        let place = Place {
            path,
            disk: Some("vm1".to_owned()),
            written: true,
        };
        let found = round(&mut Memory::default(), &DrivesConfig::default(), &[place]);
        let systems: Vec<&Item> = found
            .items
            .iter()
            .filter(|i| i.kind == Kind::FileSystem)
            .collect();
        assert_eq!(systems.len(), 1, "{found:?}");
        assert_eq!(systems[0].disks, ["vm1"]);
    }
}
