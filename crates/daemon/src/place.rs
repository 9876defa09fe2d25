//! Where flash lies, and whether that is a place for it.
//!
//! A mistyped device name is a path like any other: a "file of 100 GiB" made there lies in the RAM
//! behind `/dev`, and so do files on tmpfs. A cache that vanishes with the power takes with it what
//! guests were told is durable. A sparse file takes its room when it is written, which may be when
//! there is none left, and a file on another host makes flash as slow and as mortal as the network.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use hearth_io::BlockFile;
use hearth_io::file::sync_names;

use crate::degraded::STATE_DIR;
use crate::error::{Error, Result};
use crate::pool::CreateOptions;
use crate::size::human;

/// Devices named to somebody who named none.
const SIMILAR_MAX: usize = 6;
/// A file with this many bytes less allocated than it is long is called sparse; file systems count a
/// little apart.
const SPARSE_SLACK: u64 = 1 << 20;

/// What the file system that holds a path says of itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileSystem {
    /// Its magic number (statfs(2)).
    magic: u32,
    /// Bytes that may still be written by us; [`u64::MAX`] if it does not say.
    free: u64,
    /// Mounted read-only.
    read_only: bool,
}

impl FileSystem {
    /// Bytes that may still be written by us; [`u64::MAX`] if it does not say.
    pub fn free(&self) -> u64 {
        self.free
    }

    /// Of the file system that holds `path`, which must exist.
    pub fn of(path: &Path) -> std::io::Result<FileSystem> {
        let name = CString::new(path.as_os_str().as_bytes())?;
        // SAFETY: all-zero bytes are a valid `statfs` (plain integers).
        let mut fs: libc::statfs = unsafe { std::mem::zeroed() };
        // SAFETY: a NUL-terminated path and a structure to be filled in, both alive across the call.
        if unsafe { libc::statfs(name.as_ptr(), &mut fs) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: as above.
        let mut vfs: libc::statvfs = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        if unsafe { libc::statvfs(name.as_ptr(), &mut vfs) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: geteuid has no preconditions and cannot fail.
        let root = unsafe { libc::geteuid() } == 0;
        // What is set aside for root is root's.
        let blocks = if root { vfs.f_bfree } else { vfs.f_bavail };
        Ok(FileSystem {
            magic: fs.f_type as u32,
            free: hearth_io::free_bytes(vfs.f_blocks, blocks, vfs.f_frsize),
            read_only: vfs.f_flag & libc::ST_RDONLY != 0,
        })
    }

    /// True if what it holds is in RAM.
    fn is_ram(&self) -> bool {
        // linux/magic.h; devtmpfs calls itself one of these.
        const TMPFS: u32 = 0x0102_1994;
        const RAMFS: u32 = 0x8584_58F6;
        matches!(self.magic, TMPFS | RAMFS)
    }

    /// What a file system on another host or behind a process is called.
    fn elsewhere(&self) -> Option<&'static str> {
        // linux/magic.h.
        match self.magic {
            0x6969 => Some("NFS"),
            0xFF53_4D42 | 0xFE53_4D42 | 0x517B => Some("SMB"),
            0x00C3_6400 => Some("Ceph"),
            0x0102_1997 => Some("9P"),
            0x5346_414F => Some("AFS"),
            0x6573_5546 => Some("FUSE"),
            _ => None,
        }
    }
}

/// True if nobody can write what is at `path`: a device that is read-only, a file on a read-only mount.
pub(crate) fn is_read_only(path: &Path) -> bool {
    let Ok(meta) = std::fs::metadata(path) else {
        return false;
    };
    if meta.file_type().is_block_device() {
        let (major, minor) = (libc::major(meta.rdev()), libc::minor(meta.rdev()));
        let told = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/ro"));
        return told.is_ok_and(|ro| ro.trim() == "1");
    }
    FileSystem::of(path).is_ok_and(|fs| fs.read_only)
}

/// A path with `.`, `..` and links of what exists of it resolved.
fn resolved(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let mut rest = PathBuf::new();
    for ancestor in path.ancestors() {
        if let Ok(real) = ancestor.canonicalize() {
            return if rest.as_os_str().is_empty() {
                real
            } else {
                real.join(rest)
            };
        }
        let Some(name) = ancestor.file_name() else {
            break;
        };
        rest = if rest.as_os_str().is_empty() {
            PathBuf::from(name)
        } else {
            Path::new(name).join(rest)
        };
    }
    path
}

/// The first directory on the way to `path` that is missing.
fn missing_parent(path: &Path) -> Option<PathBuf> {
    let parents: Vec<&Path> = path.ancestors().skip(1).collect();
    let missing = parents.into_iter().rev().find(|dir| !dir.exists())?;
    Some(missing.to_owned())
}

/// Refuses a place that is none for flash, and makes the state directory if that is where a new file
/// goes. What is worth a word comes back.
pub fn check(path: &Path, options: &CreateOptions) -> Result<Vec<String>> {
    let mut notices = Vec::new();
    let real = resolved(path);
    let meta = std::fs::metadata(&real).ok();
    if meta
        .as_ref()
        .is_some_and(|m| m.file_type().is_block_device())
    {
        return Ok(notices);
    }
    let shown = path.display();
    if real.starts_with("/dev") {
        return Err(no_device(path, &real, meta.is_some()));
    }
    if meta.as_ref().is_some_and(|m| !m.is_file()) {
        // What it is, is said by who opens it.
        return Ok(notices);
    }
    if let Some(missing) = missing_parent(&real) {
        let parent = real.parent().unwrap_or(&real);
        if options.size.is_none() || parent != Path::new(STATE_DIR) {
            return Err(Error::invalid(
                format!("the directory {} does not exist", missing.display()),
                format!(
                    "check the path, or make it with `mkdir -p {}`",
                    parent.display()
                ),
            ));
        }
        make_state_dir(parent)?;
        notices.push(format!("made the directory {}", parent.display()));
    }
    let holder = if meta.is_some() {
        real.as_path()
    } else {
        real.parent().unwrap_or(&real)
    };
    let Ok(fs) = FileSystem::of(holder) else {
        return Ok(notices);
    };
    if fs.is_ram() || in_ram_below(&real) {
        if !options.force {
            return Err(Error::refused(
                format!(
                    "{shown} would be in RAM: what guests were told is durable would be gone after a power cut"
                ),
                "give a file on an SSD or the SSD itself; to try Hearth out with data that may be lost, add --force",
            ));
        }
        notices.push(format!(
            "{shown} is in RAM: all that is dirty is lost with the power"
        ));
    }
    if let Some(name) = fs.elsewhere() {
        notices.push(format!(
            "{shown} is on a file system of type {name}: if its server hangs or goes away, so does the cache; use an SSD of this host"
        ));
    }
    match options.size {
        Some(size) if size > fs.free => Err(Error::refused(
            format!(
                "{shown} would have {}, but the file system has room for {} only",
                human(size),
                human(fs.free)
            ),
            "choose a smaller --size, or make room",
        )),
        _ => Ok(notices),
    }
}

/// What to say of a place that is served, although it might be refused to a new pool.
pub(crate) fn notices(path: &Path, file: &BlockFile) -> Vec<String> {
    let mut notices = Vec::new();
    if file.is_device() {
        return notices;
    }
    let shown = path.display();
    if let Ok(fs) = FileSystem::of(path) {
        if fs.is_ram() || in_ram_below(&resolved(path)) {
            notices.push(format!(
                "the flash file {shown} is in RAM: all that is dirty is lost with the power"
            ));
        }
        if let Some(name) = fs.elsewhere() {
            notices.push(format!(
                "the flash file {shown} is on a file system of type {name}: if its server hangs or goes away, so does the cache"
            ));
        }
    }
    notices.extend(sparse(path, file));
    notices
}

/// What to say of a file that lacks a part of its room.
pub(crate) fn sparse(path: &Path, file: &BlockFile) -> Option<String> {
    let now = file.standing().ok().flatten()?;
    let short = now.size.saturating_sub(now.allocated);
    (short > SPARSE_SLACK).then(|| {
        format!(
            "{0} is sparse: {1} of its {2} have no room reserved. If the file system becomes full, the cache goes off; reserve it with `fallocate -l {3} {0}` while the pool is not served",
            path.display(),
            human(short),
            human(now.size),
            now.size,
        )
    })
}

/// The same of a device, if it is a file.
pub(crate) fn sparse_notice(media: &hearth_io::Device, path: &Path) -> Vec<String> {
    let file = media.file();
    file.and_then(|file| sparse(path, file))
        .into_iter()
        .collect()
}

/// Bytes that the file system lacks to give a flash file all its room; `None` if that is not known, or
/// room is not what matters.
pub(crate) fn lacks(path: &Path, file: &BlockFile) -> Option<u64> {
    let now = file.standing().ok().flatten()?;
    let fs = FileSystem::of(path).ok().filter(|fs| !fs.read_only)?;
    let short = now.size.saturating_sub(now.allocated);
    Some(short.saturating_sub(fs.free))
}

/// Makes the directory that is ours.
fn make_state_dir(dir: &Path) -> Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true).mode(0o700);
    builder
        .create(dir)
        .and_then(|()| sync_names(dir))
        .map_err(|e| {
            Error::unavailable(
                format!("cannot make the directory {}: {e}", dir.display()),
                "make it, or give another path",
            )
        })
}

/// True if `path` is on an overlay whose upper layer is in RAM, as far as this can be told.
fn in_ram_below(path: &Path) -> bool {
    let Ok(mounts) = std::fs::read_to_string("/proc/self/mountinfo") else {
        return false;
    };
    upper_of(path, &mounts)
        .and_then(|upper| FileSystem::of(&upper).ok())
        .is_some_and(|fs| fs.is_ram())
}

/// The upper layer of the overlay that `path` is on, from the text of `/proc/self/mountinfo`.
fn upper_of(path: &Path, mounts: &str) -> Option<PathBuf> {
    let of = |line: &str| -> Option<(usize, Option<PathBuf>)> {
        let (left, right) = line.split_once(" - ")?;
        let at = left.split(' ').nth(4)?;
        let mut right = right.split(' ');
        let overlay = right.next()? == "overlay";
        let upper = right
            .nth(1)
            .and_then(|options| options.split(',').find_map(|o| o.strip_prefix("upperdir=")))
            .filter(|_| overlay);
        path.starts_with(at)
            .then(|| (at.len(), upper.map(PathBuf::from)))
    };
    // Of mounts at one place the last counts.
    let mut best: (usize, Option<PathBuf>) = (0, None);
    for found in mounts.lines().filter_map(of) {
        if found.0 >= best.0 {
            best = found;
        }
    }
    best.1
}

/// Nothing below `/dev` but a device is a place for flash.
fn no_device(path: &Path, real: &Path, exists: bool) -> Error {
    let shown = path.display();
    let similar = similar(real, &devices(Path::new("/sys/block")));
    let list = match similar.is_empty() {
        true => String::new(),
        false => format!("; there are: {}", similar.join(", ")),
    };
    if exists {
        return Error::invalid(
            format!("{shown} is no block device, and files below /dev are in RAM{list}"),
            "give a device, or a file on an SSD",
        );
    }
    Error::invalid(
        format!("there is no device {shown}{list}"),
        "check the name; for a file, give a path on an SSD's file system",
    )
}

/// A block device that may be meant: name, bytes, model.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Named {
    name: String,
    size: u64,
    model: String,
}

/// Disks and partitions below `/sys/block`, but for those made of files and RAM.
fn devices(sys: &Path) -> Vec<Named> {
    let text = |path: PathBuf| {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.trim().to_owned()
    };
    let listed = |dir: &Path| -> Vec<PathBuf> {
        std::fs::read_dir(dir)
            .map(|entries| entries.filter_map(|e| Some(e.ok()?.path())).collect())
            .unwrap_or_default()
    };
    let named = |dir: &Path, model: &str| -> Option<Named> {
        let name = dir.file_name()?.to_str()?.replace('!', "/");
        let size = text(dir.join("size"))
            .parse::<u64>()
            .ok()?
            .saturating_mul(512);
        (size > 0).then(|| Named {
            name,
            size,
            model: model.to_owned(),
        })
    };
    let mut found = Vec::new();
    for disk in listed(sys) {
        let name = disk
            .file_name()
            .and_then(|n| n.to_str())
            .unwrap_or_default();
        if ["loop", "ram", "zram", "sr", "fd"]
            .iter()
            .any(|p| name.starts_with(p))
        {
            continue;
        }
        let model = text(disk.join("device/model"));
        found.extend(named(&disk, &model));
        let parts = listed(&disk);
        let parts = parts.iter().filter(|part| part.join("partition").exists());
        found.extend(parts.filter_map(|part| named(part, &model)));
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

/// Devices in words, those first whose names begin most like that of `path`.
fn similar(path: &Path, devices: &[Named]) -> Vec<String> {
    let asked = path
        .strip_prefix("/dev")
        .unwrap_or(path)
        .to_string_lossy()
        .into_owned();
    let alike = |name: &str| {
        asked
            .bytes()
            .zip(name.bytes())
            .take_while(|(a, b)| a == b)
            .count()
    };
    let mut devices: Vec<&Named> = devices.iter().collect();
    devices.sort_by_key(|d| std::cmp::Reverse(alike(&d.name)));
    let words = |d: &Named| {
        let model = match d.model.as_str() {
            "" => String::new(),
            model => format!(", {model}"),
        };
        format!("/dev/{} ({}{model})", d.name, human(d.size))
    };
    devices.into_iter().take(SIMILAR_MAX).map(words).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistyped_device_is_told_from_a_file_and_its_like_are_named() {
        let sys = tempfile::tempdir().unwrap();
        let disk = |name: &str, sectors: &str, model: &str| {
            let dir = sys.path().join(name);
            std::fs::create_dir_all(dir.join("device")).unwrap();
            std::fs::write(dir.join("size"), sectors).unwrap();
            std::fs::write(dir.join("device/model"), model).unwrap();
        };
        disk("sda", "2097152\n", "OLD DISK  \n");
        disk("nvme0n1", "4194304\n", "FAST SSD\n");
        disk("loop0", "4194304\n", "");
        disk("sdb", "0\n", "EMPTY\n");
        let part = sys.path().join("nvme0n1/nvme0n1p1");
        std::fs::create_dir(&part).unwrap();
        std::fs::write(part.join("partition"), "1\n").unwrap();
        std::fs::write(part.join("size"), "2097152\n").unwrap();
        let found = devices(sys.path());
        assert_eq!(
            similar(Path::new("/dev/nvme1n1"), &found),
            [
                "/dev/nvme0n1 (2 GiB, FAST SSD)",
                "/dev/nvme0n1p1 (1 GiB, FAST SSD)",
                "/dev/sda (1 GiB, OLD DISK)"
            ]
        );
        // With and without --size and --force.
        for (size, force) in [
            (None, false),
            (Some(64 << 20), false),
            (Some(64 << 20), true),
        ] {
            let options = CreateOptions {
                size,
                force,
                ..CreateOptions::default()
            };
            let error = check(Path::new("/dev/nvme9n9x"), &options).unwrap_err();
            assert!(
                error.what.contains("there is no device /dev/nvme9n9x"),
                "{error}"
            );
            assert!(!error.remedy.contains("--size"), "{error}");
            let error = check(Path::new("/dev/../dev/nvme9n9x"), &options).unwrap_err();
            assert!(error.what.contains("there is no device"), "{error}");
        }
    }

    #[test]
    fn missing_directories_and_missing_room_are_named_before_anything_is_made() {
        let dir = tempfile::tempdir().unwrap();
        let flash = dir.path().join("a/b/flash");
        let options = |size| CreateOptions {
            size: Some(size),
            force: true,
            ..CreateOptions::default()
        };
        let error = check(&flash, &options(64 << 20)).unwrap_err();
        let first = dir.path().join("a").display().to_string();
        assert!(
            error.what.ends_with(&format!("{first} does not exist")),
            "{error}"
        );
        assert!(error.remedy.contains("mkdir -p"), "{error}");
        let error = check(&dir.path().join("flash"), &options(1 << 60)).unwrap_err();
        assert!(error.what.contains("has room for"), "{error}");
        // procfs has no blocks, like FUSE without statfs: it does not say what is free.
        let silent = FileSystem::of(Path::new("/proc")).unwrap();
        assert_eq!(silent.free(), u64::MAX);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn the_upper_layer_of_the_overlay_beneath_a_path_is_found() {
        let mounts = "\
            1 0 8:1 / / rw - ext4 /dev/sda1 rw\n\
            2 1 0:5 / /live rw - overlay overlay rw,lowerdir=/l,upperdir=/run/up,workdir=/w\n\
            3 2 8:2 / /live/data rw - ext4 /dev/sda2 rw\n";
        let upper = |path: &str| upper_of(Path::new(path), mounts);
        assert_eq!(upper("/live/flash"), Some(PathBuf::from("/run/up")));
        assert_eq!(upper("/live/data/flash"), None);
        assert_eq!(upper("/flash"), None);
    }
}
