//! What lies beneath a path: one stretch of data may have many names.
//!
//! A loop device *is* the file behind it, a partition is a stretch of its disk, a logical volume
//! lies somewhere on the disks below it, and a file somewhere on the device of its file system.
//! Two users who each believe to be alone on such data lose writes, and no lock on a path or an
//! inode tells them of each other. So a path is followed down to everything it lies on:
//!
//! ```no_run
//! # fn main() -> std::io::Result<()> {
//! use hearth_io::beneath::beneath;
//! let (a, b) = (beneath("/dev/loop0".as_ref())?, beneath("/vm/a.raw".as_ref())?);
//! assert!(a.overlaps(&b), "the loop device is made of that file");
//! # Ok(())
//! # }
//! ```
//!
//! Of some layers it is known where on the layer below they lie (loop devices, partitions), of
//! others only that they are somewhere on it (volumes, arrays, files on a file system). Two that
//! are each *somewhere* on a third are taken for disjoint, as two volumes of one group or two
//! files of one file system are; one that *is* a stretch of it, and one that is somewhere on that
//! stretch, overlap.
//!
//! What cannot be seen from here: two network paths to one disk without multipath, the same
//! export mounted twice, a file and its copy through an overlay file system, stretches that two
//! logical volumes share on purpose (snapshots).

use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::sys;

/// Most pieces that are listed of one path: a volume over a hundred disks has a few hundred.
const PARTS_MAX: usize = 1024;
/// Most layers that are followed.
const DEPTH_MAX: usize = 16;
/// Unit of sizes and offsets in sysfs.
const SECTOR: u64 = 512;

/// Something that holds data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Node {
    /// A regular file.
    File {
        /// Device number of its file system.
        dev: u64,
        /// Its inode.
        inode: u64,
    },
    /// A block device, by its number.
    Device(u64),
}

/// A stretch of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Of what.
    pub node: Node,
    /// First byte.
    pub start: u64,
    /// Byte after the last one; `u64::MAX` for "to the end".
    pub end: u64,
    /// The data is all of the stretch; else it is somewhere in it.
    pub exact: bool,
    /// A path it can be opened by, as far as known.
    pub path: Option<PathBuf>,
}

/// All that one path lies on, itself included.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Beneath {
    parts: Vec<Part>,
}

/// What a loop device says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoopStatus {
    /// Device number of the file system its file is on.
    pub dev: u64,
    /// The inode of its file.
    pub inode: u64,
    /// The number of the block device it is over, if it is over one; else 0.
    pub rdev: u64,
    /// First byte of the file that it shows.
    pub offset: u64,
    /// Most bytes that it shows; 0 for no limit.
    pub limit: u64,
}

/// The kernel's view of block devices; in tests a made-up one.
pub trait Kernel {
    /// Where sysfs is.
    fn sys(&self) -> &Path;
    /// What loop device `name` (as in `/sys/block`), of number `rdev`, is over.
    fn loop_status(&self, name: &str, rdev: u64) -> Option<LoopStatus> {
        self.loop_asked(name, rdev)
    }
    /// The same as the device itself says; nothing if it may not be asked.
    fn loop_asked(&self, name: &str, rdev: u64) -> Option<LoopStatus>;
}

/// The running kernel.
pub struct Running;

impl Kernel for Running {
    fn sys(&self) -> &Path {
        Path::new("/sys")
    }

    /// Asks the device: the path in sysfs may be that of another mount namespace, or a name the
    /// file had before. Only where the device may not be opened the path has to do.
    fn loop_status(&self, name: &str, rdev: u64) -> Option<LoopStatus> {
        self.loop_asked(name, rdev).or_else(|| {
            let dir = self.sys().join("block").join(name).join("loop");
            let number = |file: &str| number(&dir.join(file)).unwrap_or(0);
            let meta = fs::metadata(text(&dir.join("backing_file"))?).ok()?;
            Some(LoopStatus {
                dev: meta.dev(),
                inode: meta.ino(),
                rdev: block_number(&meta).unwrap_or(0),
                offset: number("offset"),
                limit: number("sizelimit"),
            })
        })
    }

    fn loop_asked(&self, name: &str, rdev: u64) -> Option<LoopStatus> {
        sys::loop_status(&opened(&Path::new("/dev").join(name), rdev)?).ok()
    }
}

/// Where a loop device is looked for by its name.
fn opened(node: &Path, rdev: u64) -> Option<fs::File> {
    let file = fs::File::open(node).ok()?;
    let same = file.metadata().is_ok_and(|meta| meta.rdev() == rdev);
    same.then_some(file)
}

fn block_number(meta: &fs::Metadata) -> Option<u64> {
    meta.file_type().is_block_device().then(|| meta.rdev())
}

pub(crate) fn text(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim_end().to_owned())
}

fn number(path: &Path) -> Option<u64> {
    text(path)?.parse().ok()
}

/// A device's number from sysfs, `MAJOR:MINOR`.
pub(crate) fn device_number(dir: &Path) -> Option<u64> {
    let text = text(&dir.join("dev"))?;
    let (major, minor) = text.split_once(':')?;
    Some(libc::makedev(major.parse().ok()?, minor.parse().ok()?))
}

/// Where sysfs describes a block device.
pub(crate) fn sys_dir(sys: &Path, rdev: u64) -> PathBuf {
    let (major, minor) = (libc::major(rdev), libc::minor(rdev));
    sys.join("dev/block").join(format!("{major}:{minor}"))
}

/// Follows a path to a file or block device down to all it lies on. Opens loop devices for a
/// moment, nothing else; locks nothing.
///
/// # Errors
///
/// When there is nothing at the path, or neither a regular file nor a block device.
pub fn beneath(path: &Path) -> io::Result<Beneath> {
    Beneath::of(&Running, path, &fs::metadata(path)?)
}

/// As [`beneath`], of a block device by its number.
pub fn beneath_device(rdev: u64) -> Beneath {
    Beneath::of_node(&Running, Node::Device(rdev), None)
}

impl Beneath {
    /// As [`beneath`], of what was already found, as `kernel` sees it.
    ///
    /// # Errors
    ///
    /// When it is neither a regular file nor a block device.
    pub fn of(kernel: &dyn Kernel, path: &Path, meta: &fs::Metadata) -> io::Result<Beneath> {
        let node = match block_number(meta) {
            Some(rdev) => Node::Device(rdev),
            None if meta.is_file() => Node::File {
                dev: meta.dev(),
                inode: meta.ino(),
            },
            None => return Err(io::ErrorKind::InvalidInput.into()),
        };
        Ok(Beneath::of_node(kernel, node, Some(path.to_owned())))
    }

    /// All that `node` lies on, as `kernel` sees it.
    pub fn of_node(kernel: &dyn Kernel, node: Node, path: Option<PathBuf>) -> Beneath {
        let mut found = Beneath::default();
        let top = Part {
            node,
            start: 0,
            end: u64::MAX,
            exact: true,
            path,
        };
        found.follow(kernel, top, 0);
        found.parts.shrink_to_fit();
        found
    }

    fn follow(&mut self, kernel: &dyn Kernel, part: Part, depth: usize) {
        if self.parts.contains(&part) || self.parts.len() >= PARTS_MAX || depth >= DEPTH_MAX {
            return;
        }
        self.parts.push(part.clone());
        let sys = kernel.sys();
        let somewhere_on = |rdev: u64| Part {
            node: Node::Device(rdev),
            start: 0,
            end: u64::MAX,
            exact: false,
            path: None,
        };
        let rdev = match part.node {
            Node::Device(rdev) => rdev,
            // A file lies somewhere on the device of its file system, if that has one of its own.
            Node::File { dev, .. } => {
                if libc::major(dev) != 0 && sys_dir(sys, dev).exists() {
                    self.follow(kernel, somewhere_on(dev), depth + 1);
                }
                return;
            }
        };
        let Ok(dir) = sys_dir(sys, rdev).canonicalize() else {
            return;
        };
        // The same stretch of what is below, where this one begins at `base` and has `len` bytes.
        let shifted = |node: Node, base: u64, len: Option<u64>, path: Option<PathBuf>| {
            let most = len.map_or(u64::MAX, |len| base.saturating_add(len));
            Part {
                node,
                start: base.saturating_add(part.start).min(most),
                end: base.saturating_add(part.end).min(most),
                exact: part.exact,
                path,
            }
        };
        if dir.join("partition").exists() {
            if let Some(disk) = dir.parent().and_then(device_number) {
                let sectors = |file: &str| Some(number(&dir.join(file))?.saturating_mul(SECTOR));
                let base = sectors("start").unwrap_or(0);
                let below = shifted(Node::Device(disk), base, sectors("size"), None);
                self.follow(kernel, below, depth + 1);
            }
            return;
        }
        let name = dir.file_name().and_then(|name| name.to_str());
        if let Some(name) = name
            && dir.join("loop").exists()
            && let Some(status) = kernel.loop_status(name, rdev)
        {
            let node = match status.rdev {
                0 => Node::File {
                    dev: status.dev,
                    inode: status.inode,
                },
                rdev => Node::Device(rdev),
            };
            let limit = (status.limit != 0).then_some(status.limit);
            let path = text(&dir.join("loop/backing_file")).map(PathBuf::from);
            self.follow(kernel, shifted(node, status.offset, limit, path), depth + 1);
        }
        let slaves = fs::read_dir(dir.join("slaves")).into_iter().flatten();
        for slave in slaves.flatten().take(PARTS_MAX) {
            if let Some(rdev) = device_number(&slave.path()) {
                self.follow(kernel, somewhere_on(rdev), depth + 1);
            }
        }
    }

    /// What lies on these.
    pub fn from_parts(parts: Vec<Part>) -> Beneath {
        Beneath { parts }
    }

    /// The same without the paths: enough to compare, and smaller.
    pub fn without_names(mut self) -> Beneath {
        for part in &mut self.parts {
            part.path = None;
        }
        self
    }

    /// Everything it lies on; itself first.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// True if a byte of one may be a byte of the other.
    pub fn overlaps(&self, other: &Beneath) -> bool {
        self.parts.iter().any(|a| {
            other.parts.iter().any(|b| {
                a.node == b.node && a.start < b.end && b.start < a.end && (a.exact || b.exact)
            })
        })
    }

    /// True if what of `node` it lies on is all within one of these stretches of it.
    pub(crate) fn is_within(&self, node: Node, stretches: &[Range<u64>]) -> bool {
        let mut of_it = self
            .parts
            .iter()
            .filter(|part| part.node == node)
            .peekable();
        let within = |part: &Part| {
            let mut around = stretches.iter();
            part.exact && around.any(|s| s.start <= part.start && part.end <= s.end)
        };
        of_it.peek().is_some() && of_it.all(within)
    }

    /// True if it is all of `other`'s data, and all of its own is in there: another name, nothing
    /// more.
    pub fn is_same(&self, other: &Beneath) -> bool {
        match (self.parts.first(), other.parts.first()) {
            (Some(a), Some(b)) => a.node == b.node,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::os::unix::fs::symlink;

    /// A host that was made up.
    struct Host {
        dir: tempfile::TempDir,
        loops: BTreeMap<String, LoopStatus>,
    }

    const FS: u64 = libc::makedev(8, 1);

    impl Kernel for Host {
        fn sys(&self) -> &Path {
            self.dir.path()
        }
        fn loop_asked(&self, name: &str, _rdev: u64) -> Option<LoopStatus> {
            self.loops.get(name).cloned()
        }
    }

    impl Host {
        fn new() -> Host {
            let dir = tempfile::tempdir().unwrap();
            fs::create_dir_all(dir.path().join("dev/block")).unwrap();
            Host {
                dir,
                loops: BTreeMap::new(),
            }
        }

        /// A device at `devices/PLACE`.
        fn add(&self, place: &str, major: u32, minor: u32) -> PathBuf {
            let dir = self.dir.path().join("devices").join(place);
            fs::create_dir_all(dir.join("slaves")).unwrap();
            let number = format!("{major}:{minor}");
            fs::write(dir.join("dev"), format!("{number}\n")).unwrap();
            symlink(&dir, self.dir.path().join("dev/block").join(number)).unwrap();
            dir
        }

        fn partition(&self, place: &str, minor: u32, start: u64, size: u64) {
            let dir = self.add(place, 8, minor);
            fs::write(dir.join("partition"), "1\n").unwrap();
            fs::write(dir.join("start"), format!("{start}\n")).unwrap();
            fs::write(dir.join("size"), format!("{size}\n")).unwrap();
        }

        fn over(&self, upper: &Path, lower: &Path) {
            symlink(lower, upper.join("slaves").join(lower.file_name().unwrap())).unwrap();
        }

        fn looped(&mut self, minor: u32, status: LoopStatus) -> Beneath {
            let name = format!("loop{minor}");
            let dir = self.add(&name, 7, minor);
            fs::create_dir(dir.join("loop")).unwrap();
            fs::write(dir.join("loop/backing_file"), "/somewhere/else\n").unwrap();
            self.loops.insert(name, status);
            self.device(7, minor)
        }

        fn device(&self, major: u32, minor: u32) -> Beneath {
            Beneath::of_node(self, Node::Device(libc::makedev(major, minor)), None)
        }

        fn file(&self, inode: u64) -> Beneath {
            Beneath::of_node(self, Node::File { dev: FS, inode }, None)
        }
    }

    fn overlap(a: &Beneath, b: &Beneath) -> bool {
        assert_eq!(a.overlaps(b), b.overlaps(a));
        a.overlaps(b)
    }

    fn over_file(inode: u64, offset: u64, limit: u64) -> LoopStatus {
        LoopStatus {
            dev: FS,
            inode,
            rdev: 0,
            offset,
            limit,
        }
    }

    #[test]
    fn a_loop_device_is_the_stretch_of_its_file() {
        let mut host = Host::new();
        let whole = host.looped(0, over_file(5, 0, 0));
        let first = host.looped(1, over_file(5, 0, 4096));
        let second = host.looped(2, over_file(5, 4096, 4096));
        let other = host.looped(3, over_file(6, 0, 0));
        let stacked = host.looped(
            4,
            LoopStatus {
                rdev: libc::makedev(7, 2),
                inode: 5,
                ..LoopStatus::default()
            },
        );
        let file = host.file(5);
        for part in [&whole, &first, &second, &stacked] {
            assert!(overlap(part, &file) && overlap(part, &whole) && overlap(part, part));
        }
        assert!(!overlap(&first, &second) && !overlap(&first, &stacked));
        assert!(overlap(&second, &stacked));
        assert!(!overlap(&other, &file) && !overlap(&other, &whole));
    }

    #[test]
    fn partitions_of_one_disk_are_apart_and_all_in_it() {
        let mut host = Host::new();
        host.add("sda", 8, 0);
        host.partition("sda/sda1", 1, 2048, 2048);
        host.partition("sda/sda2", 2, 4096, 2048);
        let (disk, one, two) = (host.device(8, 0), host.device(8, 1), host.device(8, 2));
        assert!(overlap(&disk, &one) && overlap(&disk, &two) && !overlap(&one, &two));
        // A file on the first one's file system (FS is its number).
        let file = host.file(5);
        assert!(overlap(&file, &one) && overlap(&file, &disk) && !overlap(&file, &two));
        assert!(!overlap(&file, &host.file(6)));
        // And a loop device over that file.
        let looped = host.looped(0, over_file(5, 0, 0));
        assert!(overlap(&looped, &one) && overlap(&looped, &disk) && !overlap(&looped, &two));
    }

    #[test]
    fn partitions_of_a_loop_device_are_stretches_of_the_file() {
        let mut host = Host::new();
        host.looped(0, over_file(5, 1 << 20, 0));
        for (n, start) in [(1, 8), (2, 16)] {
            let dir = host.add(&format!("loop0/loop0p{n}"), 259, n);
            fs::write(dir.join("partition"), "1\n").unwrap();
            fs::write(dir.join("start"), format!("{start}\n")).unwrap();
            fs::write(dir.join("size"), "8\n").unwrap();
        }
        let (one, two) = (host.device(259, 1), host.device(259, 2));
        let same_as_one = host.looped(1, over_file(5, (1 << 20) + 4096, 4096));
        assert!(overlap(&one, &same_as_one) && !overlap(&two, &same_as_one));
        assert!(overlap(&one, &host.file(5)) && !overlap(&one, &two));
    }

    #[test]
    fn volumes_are_somewhere_on_what_is_below() {
        let host = Host::new();
        let sda = host.add("sda", 8, 0);
        let sdb = host.add("sdb", 8, 16);
        let (one, two) = (host.add("dm-0", 253, 0), host.add("dm-1", 253, 1));
        host.over(&one, &sda);
        host.over(&one, &sdb);
        host.over(&two, &sda);
        let crypt = host.add("dm-2", 253, 2);
        host.over(&crypt, &one);
        let (volume, other, crypt) = (
            host.device(253, 0),
            host.device(253, 1),
            host.device(253, 2),
        );
        assert!(!overlap(&volume, &other), "two volumes of one group");
        assert!(overlap(&volume, &crypt), "one volume, once encrypted");
        for disk in [host.device(8, 0), host.device(8, 16)] {
            assert!(overlap(&volume, &disk) && overlap(&crypt, &disk));
        }
        assert!(!overlap(&other, &host.device(8, 16)));
    }

    #[test]
    fn arrays_on_partitions_of_the_same_disks_are_apart() {
        let host = Host::new();
        host.add("sda", 8, 0);
        host.partition("sda/sda1", 1, 2048, 2048);
        host.partition("sda/sda2", 2, 4096, 2048);
        for n in [1, 2] {
            let array = host.add(&format!("md{n}"), 9, n);
            let member = host.dir.path().join(format!("devices/sda/sda{n}"));
            host.over(&array, &member);
        }
        let (one, two) = (host.device(9, 1), host.device(9, 2));
        assert!(!overlap(&one, &two));
        assert!(overlap(&one, &host.device(8, 1)) && !overlap(&one, &host.device(8, 2)));
        assert!(overlap(&one, &host.device(8, 0)));
    }

    #[test]
    fn a_ring_of_devices_ends() {
        let host = Host::new();
        let (one, two) = (host.add("dm-0", 253, 0), host.add("dm-1", 253, 1));
        host.over(&one, &two);
        host.over(&two, &one);
        assert!(overlap(&host.device(253, 0), &host.device(253, 1)));
    }

    #[test]
    fn links_lead_to_one_file_and_what_is_no_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b, c) = (
            dir.path().join("a"),
            dir.path().join("b"),
            dir.path().join("c"),
        );
        fs::write(&a, "x").unwrap();
        fs::hard_link(&a, &b).unwrap();
        symlink(&b, &c).unwrap();
        let of = |path: &Path| beneath(path).unwrap();
        assert!(overlap(&of(&a), &of(&b)) && overlap(&of(&b), &of(&c)));
        assert!(of(&a).is_same(&of(&c)));
        fs::write(dir.path().join("d"), "x").unwrap();
        assert!(!overlap(&of(&a), &of(&dir.path().join("d"))));
        assert!(beneath(dir.path()).is_err() && beneath("/dev/null".as_ref()).is_err());
    }
}
