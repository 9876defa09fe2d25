//! Which piece of hardware a block device is, as far as it says so: what stays when a cable is pulled and put back, and is another
//! one when another disk is put in the same place.

use std::fs;
use std::path::Path;

use crate::beneath::sys_dir;

/// What may name a device, the best first, below its directory in sysfs.
const NAMES: [&str; 6] = [
    "wwid",
    "device/wwid",
    "uuid",
    "serial",
    "device/serial",
    "dm/uuid",
];
/// Bytes of a name that count.
const NAME_MAX: usize = 1024;

/// A number for the device of this number: never 0, and another one for another device. `None` if it says nothing of itself.
pub(crate) fn hardware(rdev: u64) -> Option<u64> {
    hardware_in(Path::new("/sys"), rdev)
}

fn hardware_in(sys: &Path, rdev: u64) -> Option<u64> {
    let dir = fs::canonicalize(sys_dir(sys, rdev)).ok()?;
    let text = |path: &Path| {
        let text = fs::read(path).ok()?;
        let text = text.trim_ascii();
        (!text.is_empty() && text.len() <= NAME_MAX).then(|| text.to_vec())
    };
    // A partition is described in its disk's directory, and begins somewhere on it.
    let part = text(&dir.join("partition")).and_then(|_| text(&dir.join("start")));
    let disk = match part {
        Some(_) => dir.parent()?,
        None => &dir,
    };
    let name = NAMES.iter().find_map(|name| text(&disk.join(name)))?;
    let mut hash = Fnv::default();
    hash.add(&name);
    hash.add(&[0]);
    hash.add(&part.unwrap_or_default());
    Some(hash.0.max(1))
}

/// FNV-1a of 64 bits: what it makes of a name is kept over restarts, and must not change with a library.
struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Fnv {
        Fnv(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv {
    fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_and_partitions_are_told_apart() {
        let sys = tempfile::tempdir().unwrap();
        let at = |rdev: u64| hardware_in(sys.path(), rdev);
        let block = sys.path().join("dev/block");
        fs::create_dir_all(&block).unwrap();
        let disk = |minor: u32, name: &str, file: &str| {
            let dir = sys.path().join(format!("devices/d{minor}"));
            fs::create_dir_all(dir.join("device")).unwrap();
            fs::write(dir.join(file), format!("{name}\n")).unwrap();
            for (part, start) in [(1, "2048"), (2, "4096")] {
                let part_dir = dir.join(format!("p{part}"));
                fs::create_dir_all(&part_dir).unwrap();
                fs::write(part_dir.join("partition"), part.to_string()).unwrap();
                fs::write(part_dir.join("start"), start).unwrap();
                let link = block.join(format!("8:{}", minor + part));
                std::os::unix::fs::symlink(&part_dir, link).unwrap();
            }
            std::os::unix::fs::symlink(&dir, block.join(format!("8:{minor}"))).unwrap();
        };
        disk(0, "naa.5000c500a1b2c3d4", "device/wwid");
        disk(16, "naa.5000c500a1b2c3d5", "device/wwid");
        disk(32, "", "serial");
        let of = |minor| at(libc::makedev(8, minor));
        let all = [of(0), of(1), of(2), of(16), of(17)];
        assert!(all.iter().all(Option::is_some));
        for (i, one) in all.iter().enumerate() {
            assert!(all[i + 1..].iter().all(|other| other != one));
        }
        assert_eq!(of(0), of(0));
        assert_eq!((of(32), of(33), of(99)), (None, None, None));
        assert_eq!(
            of(0),
            Some(6_402_983_705_870_754_774),
            "it is kept over restarts"
        );
    }
}
