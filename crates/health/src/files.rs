//! File systems that origins and flash files lie on: nearly full, or read-only by themselves.

use crate::model::{Item, Kind, Reason};

/// Share in use from which a file system is nearly full.
pub const FULL: f64 = 0.95;
/// Room below which a file system is nearly full whatever its size.
pub const ROOM: u64 = 1 << 30;

/// A file system, as the kernel tells of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileSystem {
    /// Where it is mounted.
    pub mount: String,
    /// Its type.
    pub kind: String,
    /// Bytes in all.
    pub size: u64,
    /// Bytes free for whoever runs the daemon.
    pub free: u64,
    /// It takes no writes.
    pub read_only: bool,
    /// Something on it has to be written: an origin of a disk that is not read-only, or flash.
    pub written: bool,
    /// Files on it may grow: sparse ones do.
    pub grows: bool,
    /// The disks on it.
    pub disks: Vec<String>,
}

impl FileSystem {
    /// What is to be said of it.
    pub fn judge(&self) -> Item {
        let mut reasons = Vec::new();
        if self.read_only && self.written {
            reasons.push(Reason::failed(
                "read-only",
                "the file system is read-only, and disks on it are written",
                "the kernel does that after errors: see its log, check the file system, mount it again",
            ));
        }
        let used = 1.0 - self.free as f64 / self.size.max(1) as f64;
        let nearly = used >= FULL || self.free < ROOM.min(self.size / 10);
        if self.size > 0 && nearly {
            let what = format!("the file system is full to {:.1} %", used * 100.0);
            reasons.push(if self.written && self.grows {
                Reason::degraded(
                    "nearly-full",
                    what,
                    "make room: writes to sparse images on it fail when it is full",
                )
            } else {
                // All that is there has its space already.
                Reason::note("nearly-full", what, "")
            });
        }
        let mut item = Item::new(Kind::FileSystem, &self.mount, reasons).about(&self.kind);
        item.disks.clone_from(&self.disks);
        item
    }
}

/// A line of `/proc/self/mountinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The device's number, `major:minor`.
    pub device: String,
    /// Where it is mounted.
    pub at: String,
    /// The file system's type.
    pub kind: String,
    /// What it is made of.
    pub source: String,
    /// The file system itself takes no writes. How it is mounted says nothing: to a service that is kept from writing, as
    /// the one that looks is, all of them are mounted read-only.
    pub read_only: bool,
}

/// Spaces and the like are written as three octal digits.
fn unescape(text: &str) -> String {
    let mut out = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        let digits = after.get(..3).and_then(|d| std::str::from_utf8(d).ok());
        let value = digits.and_then(|d| u8::from_str_radix(d, 8).ok());
        match (first, value) {
            (b'\\', Some(value)) => {
                out.push(value);
                rest = &after[3..];
            }
            _ => {
                out.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// The mounts of `/proc/self/mountinfo`.
pub fn mounts(mountinfo: &str) -> Vec<Mount> {
    let line = |line: &str| {
        let (front, back) = line.split_once(" - ")?;
        let front: Vec<&str> = front.split(' ').collect();
        let mut back = back.split(' ');
        let (kind, source, options) = (back.next()?, back.next()?, back.next()?);
        // Since Linux 6.15, ext4 leaves itself writable in name after errors, and says so apart.
        let ro = |o: &str| matches!(o, "ro" | "emergency_ro" | "shutdown");
        Some(Mount {
            device: (*front.get(2)?).to_owned(),
            at: unescape(front.get(4)?),
            kind: kind.to_owned(),
            source: unescape(source),
            read_only: options.split(',').any(ro),
        })
    };
    mountinfo.lines().filter_map(line).collect()
}

/// The mount that a path lies on: the last of the longest.
pub fn mount_of<'a>(mounts: &'a [Mount], path: &std::path::Path) -> Option<&'a Mount> {
    mounts
        .iter()
        .filter(|m| path.starts_with(&m.at))
        .max_by_key(|m| m.at.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Condition;
    use std::path::Path;

    const INFO: &str = "22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw,errors=remount-ro\n\
        40 22 8:17 / /srv/vm\\040images rw,relatime shared:5 - ext4 /dev/sdb1 ro,errors=remount-ro\n\
        41 22 0:44 / /srv rw - nfs4 host:/srv rw,vers=4.2\n\
        42 22 253:2 / /srv/lv ro,relatime shared:9 - ext4 /dev/mapper/vg-lv rw,stripe=1\n\
        43 22 253:3 / /srv/aborted rw - ext4 /dev/mapper/vg-a rw,emergency_ro\n\
        nonsense\n";

    #[test]
    fn mounts_and_who_lies_on_them() {
        let mounts = mounts(INFO);
        assert_eq!(mounts.len(), 5);
        let of = |path: &str| mount_of(&mounts, Path::new(path)).unwrap();
        assert_eq!(of("/srv/vm images/a.raw").source, "/dev/sdb1");
        assert!(
            of("/srv/vm images/a.raw").read_only,
            "the kernel made it so"
        );
        assert!(
            !of("/srv/lv/a.raw").read_only,
            "so it looks to a service that may not write (ProtectSystem=strict)"
        );
        assert!(of("/srv/aborted/a.raw").read_only);
        assert_eq!(of("/srv/vm").kind, "nfs4");
        assert_eq!(of("/srvx").device, "254:1");
        assert!(!of("/").read_only);
    }

    fn judged(change: impl FnOnce(&mut FileSystem)) -> Item {
        let mut fs = FileSystem {
            mount: "/srv".to_owned(),
            size: 100 << 30,
            free: 50 << 30,
            written: true,
            grows: true,
            ..FileSystem::default()
        };
        change(&mut fs);
        fs.judge()
    }

    #[test]
    fn full_counts_where_something_grows_and_read_only_where_something_is_written() {
        assert_eq!(judged(|_| {}).condition, Condition::Healthy);
        let full = judged(|fs| fs.free = 4 << 30);
        assert_eq!(
            (full.condition, full.reasons[0].code.as_str()),
            (Condition::Degraded, "nearly-full")
        );
        assert!(full.reasons[0].what.contains("96.0 %"), "{full:?}");
        let written = judged(|fs| (fs.free, fs.grows) = (0, false));
        assert_eq!(
            (written.condition, written.reasons.len()),
            (Condition::Healthy, 1)
        );
        let silent = judged(|fs| (fs.size, fs.free) = (0, 0));
        assert_eq!(silent.reasons, [], "it does not say how large it is");
        let small = judged(|fs| (fs.size, fs.free) = (100 << 20, 20 << 20));
        assert_eq!(
            small.condition,
            Condition::Healthy,
            "a small one with a fifth free"
        );
        assert_eq!(
            judged(|fs| fs.read_only = true).condition,
            Condition::Failed
        );
        let reads = judged(|fs| (fs.read_only, fs.written) = (true, false));
        assert_eq!(reads.condition, Condition::Healthy);
    }
}
