//! Names of block devices that outlive a reboot.
//!
//! `/dev/sda` is the drive that the kernel found first; after a reboot that can be another one. What stays is what the
//! drive, the volume manager or the file below a loop device says of itself: a WWN, a serial number, a volume's UUID, an
//! inode. Some identities only name a position (a virtual drive without a serial number), and two drives cloned from one
//! another share the identifiers that are written on them, so an equal identity proves nothing about the content.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::beneath::{Kernel, Running, sys_dir, text};

/// Longest identity; what a drive says of itself is outside input.
pub const IDENTITY_MAX: usize = 200;
/// Layers below a partition or loop device that are followed.
const DEPTH_MAX: usize = 4;

/// What identifies the block device at a path; `None` if it is no block device or nothing identifies it.
///
/// Reads sysfs and udev's database, and opens loop devices for a moment.
pub fn identity(path: &Path) -> Option<String> {
    identity_of_number(block_number(path)?)
}

fn identity_of_number(rdev: u64) -> Option<String> {
    identity_of(&Running, Path::new("/run/udev/data"), rdev, 0)
}

/// Separates an inode from the identity of its file system's device.
const ON: &str = " on ";

/// True if two identities can belong to one device. One of them may lack the file system's device, which has no
/// identity until udev has run.
pub fn is_same(one: &str, other: &str) -> bool {
    let more = |long: &str, short: &str| {
        let rest = long.strip_prefix(short);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(ON))
    };
    more(one, other) || more(other, one)
}

/// The identity of the device with this number as a number that is never 0, without the file system of a file. It is kept
/// over restarts: FNV-1a, 64 bits.
pub(crate) fn number(rdev: u64) -> Option<u64> {
    let identity = identity_of_number(rdev)?;
    let identity = identity.split(ON).next()?;
    let add = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let hash = identity.bytes().fold(0xcbf2_9ce4_8422_2325, add);
    Some(hash.max(1))
}

/// True for an identity that a replacement device gets as well: an inode, which a new file gets when the old one is
/// removed, and the names of slots that QEMU gives to SCSI and ATA drives without a serial number.
pub fn is_position(identity: &str) -> bool {
    let is_slot = |part: &&str| identity.contains(*part);
    identity.starts_with("loop over inode")
        || identity.contains("QEMU HARDDISK") && ["drive-", "QM0"].iter().any(is_slot)
}

/// A name of the same block device that outlives a reboot, for a path such as `/dev/sda1` that need not. `None` if the
/// path is stable as it is, or there is no other.
pub fn stable_path(path: &Path) -> Option<PathBuf> {
    stable_path_below(Path::new("/dev"), path)
}

fn stable_path_below(dev: &Path, path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let numbered = ["sd", "hd", "vd", "xvd", "nvme", "mmcblk", "dm-"];
    if path.parent() != Some(dev) || !numbered.iter().any(|start| name.starts_with(start)) {
        return None;
    }
    let device = path.canonicalize().ok()?;
    // In the order of preference: a name that shows model and serial number says most.
    let rank = |name: &str| {
        let starts = [
            "ata-",
            "nvme-eui.",
            "nvme-",
            "scsi-",
            "virtio-",
            "usb-",
            "mmc-",
            "wwn-",
            "md-",
            "dm-uuid-",
        ];
        let at = starts.iter().position(|start| name.starts_with(start))?;
        // Two spellings of one drive: the EUI says nothing to a reader.
        Some(if at == 1 { starts.len() } else { at })
    };
    let links = fs::read_dir(dev.join("disk/by-id")).ok()?.flatten();
    let same = links.filter(|link| link.path().canonicalize().is_ok_and(|to| to == device));
    let names = same.filter_map(|link| link.file_name().into_string().ok());
    let ranked = names.filter_map(|name| Some((rank(&name)?, name)));
    let (_, best) = ranked.min()?;
    Some(dev.join("disk/by-id").join(best))
}

fn block_number(path: &Path) -> Option<u64> {
    let meta = fs::metadata(path).ok()?;
    meta.file_type().is_block_device().then(|| meta.rdev())
}

fn identity_of(kernel: &dyn Kernel, udev: &Path, rdev: u64, depth: usize) -> Option<String> {
    if depth > DEPTH_MAX {
        return None;
    }
    let dir = sys_dir(kernel.sys(), rdev).canonicalize().ok()?;
    let read = |file: &str| text(&dir.join(file)).and_then(|said| cleaned(&said));
    let (major, minor) = (libc::major(rdev), libc::minor(rdev));
    let known = fs::read_to_string(udev.join(format!("b{major}:{minor}"))).unwrap_or_default();
    let udev_says = |key: &str| {
        let line = known.lines().find_map(|line| {
            line.strip_prefix("E:")?
                .strip_prefix(key)?
                .strip_prefix('=')
        });
        line.and_then(cleaned)
    };
    if let Some(number) = read("partition") {
        // The table of a clone has the same UUIDs, so the drive counts first.
        let parent = dir.parent().and_then(crate::beneath::device_number);
        let drive = parent.and_then(|drive| identity_of(kernel, udev, drive, depth + 1));
        return match (drive, udev_says("ID_PART_ENTRY_UUID")) {
            (Some(drive), _) => cleaned(&format!("{drive} partition {number}")),
            (None, uuid) => uuid.map(|uuid| format!("partuuid {uuid}")),
        };
    }
    if let Some(uuid) = read("dm/uuid") {
        return Some(format!("dm {uuid}"));
    }
    if let Some(uuid) = read("md/uuid").or_else(|| udev_says("MD_UUID")) {
        return Some(format!("md {uuid}"));
    }
    if dir.join("loop").exists() {
        let name = dir.file_name()?.to_str()?;
        let status = kernel.loop_status(name, rdev)?;
        return match status.rdev {
            0 => {
                let below = identity_of(kernel, udev, status.dev, depth + 1);
                let below = below.map_or_else(String::new, |below| format!("{ON}{below}"));
                cleaned(&format!(
                    "loop over inode {} at {}{below}",
                    status.inode, status.offset
                ))
            }
            below => cleaned(&format!(
                "loop over {} at {}",
                identity_of(kernel, udev, below, depth + 1)?,
                status.offset
            )),
        };
    }
    let wwn = read("wwid")
        .or_else(|| read("device/wwid"))
        .or_else(|| udev_says("ID_WWN_WITH_EXTENSION"));
    let serial = || {
        let said = read("serial")
            .or_else(|| read("device/serial"))
            .or_else(|| read("device/cid"));
        said.or_else(|| udev_says("ID_SERIAL"))
    };
    wwn.map(|wwn| format!("wwn {wwn}"))
        .or_else(|| serial().map(|serial| format!("serial {serial}")))
}

/// What a device says of itself, as one short line of printable characters.
fn cleaned(said: &str) -> Option<String> {
    let words = said
        .split(|c: char| !c.is_ascii_graphic())
        .filter(|word| !word.is_empty());
    let mut line = words.collect::<Vec<_>>().join(" ");
    line.truncate(IDENTITY_MAX);
    (!line.is_empty()).then_some(line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::beneath::LoopStatus;
    use std::cell::Cell;

    /// A made-up kernel below a folder, with a loop device over a file of this file system.
    struct Made(PathBuf, Cell<u64>);

    impl Kernel for Made {
        fn sys(&self) -> &Path {
            &self.0
        }

        fn loop_asked(&self, _: &str, _: u64) -> Option<LoopStatus> {
            Some(LoopStatus {
                dev: self.1.get(),
                inode: 77,
                offset: 512,
                ..LoopStatus::default()
            })
        }
    }

    fn device(dir: &Path, name: &str, number: u32, files: &[(&str, &str)]) -> u64 {
        let at = dir.join("devices").join(name);
        fs::create_dir_all(&at).unwrap();
        for (file, text) in files.iter().chain([&("dev", &*format!("8:{number}\n"))]) {
            fs::create_dir_all(at.join(file).parent().unwrap()).unwrap();
            fs::write(at.join(file), text).unwrap();
        }
        fs::create_dir_all(dir.join("dev/block")).unwrap();
        std::os::unix::fs::symlink(&at, dir.join(format!("dev/block/8:{number}"))).unwrap();
        libc::makedev(8, number)
    }

    #[test]
    fn identity_follows_partitions_volumes_and_loops() {
        let dir = tempfile::tempdir().unwrap();
        let kernel = Made(dir.path().to_owned(), Cell::default());
        let udev = dir.path().join("udev");
        fs::create_dir(&udev).unwrap();
        let of = |rdev| identity_of(&kernel, &udev, rdev, 0);
        let drive = device(
            dir.path(),
            "sda",
            0,
            &[("device/wwid", "naa.5000c500\t 1\n")],
        );
        assert_eq!(of(drive).as_deref(), Some("wwn naa.5000c500 1"));
        let part = device(dir.path(), "sda/sda1", 1, &[("partition", "1\n")]);
        assert_eq!(of(part).as_deref(), Some("wwn naa.5000c500 1 partition 1"));
        let bare = device(dir.path(), "vda", 16, &[]);
        assert_eq!(of(bare), None);
        let bare_part = device(dir.path(), "vda/vda2", 18, &[("partition", "2")]);
        assert_eq!(of(bare_part), None);
        fs::write(udev.join("b8:18"), "S:x\nE:ID_PART_ENTRY_UUID=ab-cd\n").unwrap();
        assert_eq!(of(bare_part).as_deref(), Some("partuuid ab-cd"));
        let volume = device(dir.path(), "dm-0", 32, &[("dm/uuid", "LVM-x")]);
        assert_eq!(of(volume).as_deref(), Some("dm LVM-x"));
        let looped = device(dir.path(), "loop0", 48, &[("loop/offset", "512")]);
        assert_eq!(of(looped).as_deref(), Some("loop over inode 77 at 512"));
        // Two file systems can have a file with this inode each. Both names are those of a position.
        kernel.1.set(part);
        let on = "loop over inode 77 at 512 on wwn naa.5000c500 1 partition 1";
        assert_eq!(of(looped).as_deref(), Some(on));
        let other = on.replace("partition 1", "partition 2");
        assert!(is_position(on) && is_same(on, on) && !is_same(on, &other));
        assert!(
            is_same("loop over inode 77 at 512", on) && is_same(on, "loop over inode 77 at 512")
        );
        assert!(!is_same("loop over inode 77 at 51", on) && !is_same("wwn 1", "wwn 1 partition 1"));
        assert!(is_position("loop over inode 77 at 512"));
        assert!(is_position(
            "wwn t10.ATA QEMU QEMU HARDDISK drive-scsi0 partition 1"
        ));
        assert!(!is_position("wwn naa.5000c500 1"));
        assert!(!is_position("loop over dm LVM-x at 0"));
        let silly = "x".repeat(9000);
        let long = device(dir.path(), "sdb", 64, &[("serial", &silly)]);
        assert!(of(long).unwrap().len() <= IDENTITY_MAX + 10);
    }

    #[test]
    fn stable_path_prefers_model_and_serial() {
        let dir = tempfile::tempdir().unwrap();
        let dev = dir.path().canonicalize().unwrap();
        let by_id = dev.join("disk/by-id");
        fs::create_dir_all(&by_id).unwrap();
        for name in ["sda", "sdb", "loop0"] {
            fs::write(dev.join(name), "").unwrap();
        }
        let link = |name: &str, to: &str| {
            std::os::unix::fs::symlink(dev.join(to), by_id.join(name)).unwrap()
        };
        link("wwn-0x5000", "sda");
        link("lvm-pv-uuid-x", "sda");
        link("ata-WD_1", "sda");
        link("wwn-0x6000", "sdb");
        let stable = |path: PathBuf| stable_path_below(&dev, &path);
        assert_eq!(stable(dev.join("sda")), Some(by_id.join("ata-WD_1")));
        assert_eq!(stable(dev.join("sdb")), Some(by_id.join("wwn-0x6000")));
        assert_eq!(stable(dev.join("loop0")), None);
        assert_eq!(stable(by_id.join("ata-WD_1")), None, "it is stable already");
        assert_eq!(stable(dev.join("sdz")), None);
    }
}
