//! Who uses a file or block device: the name for a refusal.
//!
//! The kernel does not say whose lock stands in the way: for locks of open file descriptions it
//! has no process number at all. What it does show, to who may look, are the locks of every open
//! descriptor of every process (`/proc/PID/fdinfo`), what is mounted, what swap is on, and what a
//! block device is part of. This is a look at things that change meanwhile, as this user may see
//! them: it is bounded, and who is not found is "another program".

use std::fmt;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::beneath::sys_dir;

/// Longest the processes are searched.
const SEARCH_TIME: Duration = Duration::from_millis(500);
/// Descriptors that are looked at in all.
const DESCRIPTORS_MAX: usize = 1 << 17;
/// Longest name of a command or guest that is shown.
const NAME_MAX: usize = 64;
/// Most bytes that are read of a list of the kernel's, or of a process's arguments.
const LIST_MAX: u64 = 4 << 20;

/// A user of a file or block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum User {
    /// A process.
    Process {
        /// Its number.
        pid: u32,
        /// The program's name, and the guest's if it is a QEMU that has one.
        command: String,
    },
    /// A file system.
    Mount(PathBuf),
    /// Swap is on it.
    Swap,
    /// It is part of another device: a volume, an array.
    Device(String),
    /// Nobody that can be seen from here.
    Unknown,
}

/// "is …", to follow what it is about.
impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            User::Process { pid, command } => write!(f, "is in use by {command} (pid {pid})"),
            User::Mount(point) => write!(f, "is mounted at {}", point.display()),
            User::Swap => f.write_str("is in use as swap"),
            User::Device(name) => write!(f, "is part of {name}"),
            User::Unknown => f.write_str("is in use by another program"),
        }
    }
}

impl User {
    /// What to do about it.
    pub fn remedy(&self) -> &'static str {
        match self {
            User::Process { .. } => "stop that first",
            User::Mount(_) => "unmount it first",
            User::Swap => "turn that off with `swapoff` first",
            User::Device(_) => "use that device instead, or take it apart first",
            User::Unknown => "stop its user first; `fuser -v` or `lsof`, run as root, may name it",
        }
    }

    /// False if it may be gone in a moment: nobody that can be seen, a process that is ending (its
    /// memory goes first, its files last, and memory takes a while), or udev, which locks a disk
    /// for as long as it looks at it, each time somebody who has written to it closes it.
    pub(crate) fn stays(&self) -> bool {
        match self {
            User::Unknown => false,
            User::Process { command, .. } if command.contains("udev") => false,
            // Without memory there are no arguments.
            User::Process { pid, .. } => {
                list(&Path::new("/proc").join(pid.to_string()).join("cmdline"))
                    .is_some_and(|arguments| !arguments.is_empty())
            }
            User::Mount(_) | User::Swap | User::Device(_) => true,
        }
    }

    /// Who uses what is at `path`.
    pub fn of(path: &Path) -> User {
        let Ok(meta) = fs::metadata(path) else {
            return User::Unknown;
        };
        if meta.file_type().is_block_device()
            && let Some(user) = of_device(Path::new("/sys"), meta.rdev())
        {
            return user;
        }
        of_process(path, &meta).unwrap_or(User::Unknown)
    }
}

fn list(path: &Path) -> Option<String> {
    use std::io::Read;
    let mut bytes = Vec::new();
    let file = fs::File::open(path).ok()?;
    file.take(LIST_MAX).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// What claims a block device, its partitions, or the disk it is a partition of.
fn of_device(sys: &Path, rdev: u64) -> Option<User> {
    let mounts = list(Path::new("/proc/self/mountinfo")).unwrap_or_default();
    let swaps = list(Path::new("/proc/swaps")).unwrap_or_default();
    let swaps: Vec<u64> = swaps
        .lines()
        .filter_map(|line| {
            let meta = fs::metadata(unescaped(line.split_whitespace().next()?)).ok()?;
            meta.file_type().is_block_device().then(|| meta.rdev())
        })
        .collect();
    let dir = sys_dir(sys, rdev).canonicalize().ok()?;
    let whole = dir.join("partition").exists();
    let around = dir.parent().filter(|_| whole).map(Path::to_owned);
    let inside = fs::read_dir(&dir).into_iter().flatten().flatten();
    let inside = inside
        .map(|entry| entry.path())
        .filter(|path| path.join("partition").exists());
    std::iter::once(dir.clone())
        .chain(inside)
        .chain(around)
        .find_map(|dir| {
            let number = fs::read_to_string(dir.join("dev")).ok()?;
            claims(&dir, number.trim_end(), &mounts, &swaps)
        })
}

fn claims(dir: &Path, number: &str, mounts: &str, swaps: &[u64]) -> Option<User> {
    if let Some(point) = mount_point(mounts, number) {
        return Some(User::Mount(point));
    }
    let (major, minor) = number.split_once(':')?;
    let rdev = libc::makedev(major.parse().ok()?, minor.parse().ok()?);
    if swaps.contains(&rdev) {
        return Some(User::Swap);
    }
    let holder = fs::read_dir(dir.join("holders")).ok()?.flatten().next()?;
    let node = holder.file_name().to_string_lossy().into_owned();
    let named = fs::read_to_string(holder.path().join("dm/name"));
    Some(User::Device(match named {
        Ok(name) => format!("/dev/mapper/{}", shown(name.trim_end())),
        Err(_) => format!("/dev/{}", shown(&node)),
    }))
}

/// Where the device `MAJOR:MINOR` is mounted, by the list in `/proc/PID/mountinfo`.
fn mount_point(mounts: &str, number: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ');
        (fields.nth(2)? == number).then_some(())?;
        Some(unescaped(fields.nth(1)?))
    })
}

/// A path as the kernel writes it in its lists, with `\040` for a space and the like.
fn unescaped(text: &str) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let Some((first, tail)) = rest.split_first() {
        let octal = tail
            .get(..3)
            .filter(|_| *first == b'\\')
            .and_then(|digits| {
                let digits = std::str::from_utf8(digits).ok()?;
                u8::from_str_radix(digits, 8).ok()
            });
        bytes.push(octal.unwrap_or(*first));
        rest = match octal {
            Some(_) => tail.get(3..).unwrap_or_default(),
            None => tail,
        };
    }
    std::ffi::OsString::from_vec(bytes).into()
}

/// The process that has a lock on a file, or has a block device open by the very path.
fn of_process(path: &Path, meta: &fs::Metadata) -> Option<User> {
    let end = Instant::now() + SEARCH_TIME;
    let path = fs::canonicalize(path).ok()?;
    let inode = format!(":{}", meta.ino());
    // As the kernel writes it: the device numbers in hexadecimal. Of a file on some file systems
    // (btrfs) they are not those that `stat` shows, and the path has to do.
    let exact = format!(
        "{:02x}:{:02x}{inode}",
        libc::major(meta.dev()),
        libc::minor(meta.dev())
    );
    let is_device = meta.file_type().is_block_device();
    let mut left = DESCRIPTORS_MAX;
    let mut opener = None;
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    for pid in pids {
        let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fdinfo")) else {
            continue;
        };
        for descriptor in descriptors.flatten() {
            if left == 0 || Instant::now() > end {
                return opener;
            }
            left -= 1;
            let number = descriptor.file_name();
            // Only the name: looking at the file itself may hang with its mount.
            let leads_here = || {
                let link = Path::new("/proc").join(pid.to_string()).join("fd");
                fs::read_link(link.join(&number)).is_ok_and(|to| to == path)
            };
            let Ok(info) = fs::read_to_string(descriptor.path()) else {
                continue;
            };
            let locks = info.lines().filter(|line| line.starts_with("lock:"));
            let mut nodes = locks.filter_map(|line| line.split_whitespace().nth(6));
            let has_lock =
                nodes.any(|node| node == exact || (node.ends_with(&inode) && leads_here()));
            if has_lock {
                return Some(process(pid));
            }
            if is_device && opener.is_none() && pid != std::process::id() && leads_here() {
                opener = Some(process(pid));
            }
        }
    }
    opener.or_else(|| of_lock_list(&exact))
}

/// The owner of a whole file's lock, from the list everybody may read.
fn of_lock_list(exact: &str) -> Option<User> {
    let locks = list(Path::new("/proc/locks"))?;
    let pid = locks.lines().find_map(|line| {
        let mut fields = line
            .split_whitespace()
            .skip_while(|field| *field != "FLOCK");
        let pid = fields.nth(3)?;
        (fields.next()? == exact).then(|| pid.parse::<u32>().ok())?
    })?;
    Path::new("/proc")
        .join(pid.to_string())
        .exists()
        .then(|| process(pid))
}

fn process(pid: u32) -> User {
    let arguments = list(&Path::new("/proc").join(pid.to_string()).join("cmdline"));
    let arguments = arguments.unwrap_or_default();
    let mut arguments = arguments.split('\0');
    let program = arguments.next().unwrap_or_default();
    let program = program.rsplit('/').next().unwrap_or_default();
    let program = match shown(program) {
        name if !name.is_empty() => name,
        // A thread of the kernel, or a process that is ending.
        _ => {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            match shown(name.trim_end()) {
                name if name.is_empty() => "a process".to_owned(),
                name => name,
            }
        }
    };
    let guest = guest_name(arguments).filter(|_| program.contains("qemu") || program == "kvm");
    let command = match guest {
        Some(guest) => format!("{program} running {guest}"),
        None => program,
    };
    User::Process { pid, command }
}

/// The guest's name among a QEMU's arguments: `-name NAME` or `-name guest=NAME,…`.
fn guest_name<'a>(mut arguments: impl Iterator<Item = &'a str>) -> Option<String> {
    arguments.find(|a| matches!(*a, "-name" | "--name"))?;
    let value = arguments.next()?.split(',').next()?;
    let name = shown(value.strip_prefix("guest=").unwrap_or(value));
    (!name.is_empty()).then_some(name)
}

/// A name another program chose, fit for a message.
fn shown(name: &str) -> String {
    let plain = name.chars().filter(|c| !c.is_control());
    plain.take(NAME_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn the_holder_of_a_lock_is_this_process() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(User::of(file.path()), User::Unknown);
        let held = file.reopen().unwrap();
        for take in [crate::lock::take_whole, crate::lock::mark] {
            let held = held.try_clone().unwrap();
            assert!(take(&held, crate::lock::Use::Write).unwrap());
            let User::Process { pid, command } = User::of(file.path()) else {
                panic!("nobody was found");
            };
            assert_eq!(pid, std::process::id());
            assert!(command.starts_with("hearth_io"), "{command}");
        }
    }

    #[test]
    fn who_is_ending_does_not_stay() {
        let user = |pid| User::Process {
            pid,
            command: String::new(),
        };
        assert!(user(std::process::id()).stays());
        let udev = User::Process {
            pid: std::process::id(),
            command: "(udev-worker)".to_owned(),
        };
        assert!(!udev.stays());
        let mut child = std::process::Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let pid = child.id();
        // Neither is at once: a new program first gets its arguments; a killed one, which is there
        // until it is waited for, loses its memory.
        let becomes = |stays: bool| {
            let end = Instant::now() + Duration::from_secs(10);
            while user(pid).stays() != stays {
                assert!(Instant::now() < end);
                std::thread::yield_now();
            }
        };
        becomes(true);
        child.kill().unwrap();
        becomes(false);
        child.wait().unwrap();
        assert!(!user(pid).stays() && !User::Unknown.stays());
    }

    #[test]
    fn a_guest_is_named() {
        let name = |arguments: &[&str]| guest_name(arguments.iter().copied());
        let libvirt = ["-name", "guest=web,debug-threads=on", "-S"];
        assert_eq!(name(&libvirt), Some("web".to_owned()));
        assert_eq!(name(&["-name", "web"]), Some("web".to_owned()));
        assert_eq!(name(&["-name"]), None);
        assert_eq!(name(&["-name", "guest=,x"]), None);
        assert_eq!(shown("a\x1b[2Jb\n").as_str(), "a[2Jb");
    }

    #[test]
    fn mounts_are_found_by_number() {
        let list = "22 1 254:0 / / rw - ext4 /dev/root rw\n\
                    30 22 7:0 / /mnt/a\\040b rw,relatime - ext4 /dev/loop0 rw\n";
        assert_eq!(mount_point(list, "7:0"), Some("/mnt/a b".into()));
        assert_eq!(mount_point(list, "7:1"), None);
        assert_eq!(mount_point("x\n\n1 2 7:0", "7:0"), None);
        assert_eq!(unescaped("a\\04"), Path::new("a\\04"));
    }

    #[test]
    fn what_a_device_is_part_of_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let sys = dir.path();
        // A number no real device has, or the lists of this host would be asked about it.
        let disk = sys.join("devices/xda");
        let part = disk.join("xda1");
        fs::create_dir_all(part.join("holders")).unwrap();
        fs::create_dir_all(sys.join("dev/block")).unwrap();
        fs::write(part.join("partition"), "1").unwrap();
        fs::write(disk.join("dev"), "4000:0\n").unwrap();
        fs::write(part.join("dev"), "4000:1\n").unwrap();
        symlink(&disk, sys.join("dev/block/4000:0")).unwrap();
        symlink(&part, sys.join("dev/block/4000:1")).unwrap();
        let user = |minor| of_device(sys, libc::makedev(4000, minor));
        assert_eq!(user(1), None);
        fs::create_dir_all(sys.join("dm-3/dm")).unwrap();
        fs::write(sys.join("dm-3/dm/name"), "vg-root\n").unwrap();
        symlink(sys.join("dm-3"), part.join("holders/dm-3")).unwrap();
        let volume = Some(User::Device("/dev/mapper/vg-root".into()));
        assert_eq!(user(1), volume);
        assert_eq!(
            user(0),
            volume,
            "the whole disk is used by way of its partition"
        );
    }
}
