//! What is set on the host for swap on flash, and what it was before.
//!
//! * `vm.page-cluster` 0: one page is read where one is wanted. Reading its neighbours as well pays on a
//!   disk that seeks; on flash it reads what nobody asked for.
//! * `rotational` 0 of the device below: virtual disks, loop devices and some adapters call themselves hard disks, and
//!   then the kernel gives out swap as for one, from one end to the other, from one CPU at a time.

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// One setting, as it was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setting {
    /// The file it is in.
    pub path: PathBuf,
    /// What was in it.
    pub before: String,
    /// What is in it now.
    pub now: String,
    /// Why.
    pub why: String,
}

/// What has to be changed for swap in the file system of `path`, and is not as it should be.
pub fn wanted(path: &Path) -> Vec<Setting> {
    let mut files = vec![(
        PathBuf::from("/proc/sys/vm/page-cluster"),
        "flash has no neighbours: one page is read at a time",
    )];
    if let Some(rotational) = queue(path).map(|q| q.join("rotational")) {
        files.push((
            rotational,
            "flash that calls itself a hard disk gets swap given out as one",
        ));
    }
    let each = files.into_iter().filter_map(|(path, why)| {
        let before = std::fs::read_to_string(&path).ok()?.trim().to_owned();
        (before != "0").then(|| Setting {
            path,
            before,
            now: "0".into(),
            why: why.into(),
        })
    });
    each.collect()
}

/// The settings of a device, or of the one that holds a file system, where it is one device's.
fn queue(path: &Path) -> Option<PathBuf> {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    let dev = match std::fs::metadata(path).ok() {
        Some(meta) if meta.file_type().is_block_device() => meta.rdev(),
        _ => std::fs::metadata(path.parent()?).ok()?.dev(),
    };
    let (major, minor) = (libc::major(dev), libc::minor(dev));
    let device = std::fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    // Of a partition it is the disk's.
    let places = [device.join("queue"), device.parent()?.join("queue")];
    places.into_iter().find(|q| q.is_dir())
}

/// Sets it.
pub fn set(setting: &Setting) -> io::Result<()> {
    std::fs::write(&setting.path, &setting.now)
}

/// Sets it back, unless somebody has set something else meanwhile.
pub fn undo(setting: &Setting) -> io::Result<()> {
    if std::fs::read_to_string(&setting.path)?.trim() == setting.now {
        std::fs::write(&setting.path, &setting.before)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_set_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let setting = Setting {
            path: dir.path().join("page-cluster"),
            before: "3".into(),
            now: "0".into(),
            why: String::new(),
        };
        let read = || std::fs::read_to_string(&setting.path).unwrap();
        std::fs::write(&setting.path, "3\n").unwrap();
        set(&setting).unwrap();
        assert_eq!(read(), "0");
        undo(&setting).unwrap();
        assert_eq!(read(), "3");
        std::fs::write(&setting.path, "2\n").unwrap();
        undo(&setting).unwrap();
        assert_eq!(read(), "2\n");
    }
}
