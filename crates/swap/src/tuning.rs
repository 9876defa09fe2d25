//! What is set on the host for swap on flash, and what it was before.
//!
//! * `vm.page-cluster` 0: one page is read where one is wanted. Reading its neighbours as well pays
//!   on a disk that seeks; on flash it reads what nobody asked for.
//! * `rotational` 0 of the device below: virtual disks, loop devices and some adapters call
//!   themselves hard disks, and then the kernel gives out swap as for one, from one end to the
//!   other, from one CPU at a time.
//! * zswap `enabled` Y, where it is asked for: pages are compressed in memory first, and fewer
//!   reach the flash.
//! * `scheduler` none of a loop device: what it hands on is put in order by the device below, and
//!   once is enough. Some systems give every device that calls itself a hard disk one that makes
//!   single reads wait for others beside them. That of a device below is its owner's: others use
//!   it, too.
//!
//! How many requests a device takes at a time is left as it is: a program waits for one page at a
//! time, and a shorter queue would hold up what is swapped out.

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The switch of compression before swap.
const ZSWAP: &str = "/sys/module/zswap/parameters/enabled";

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
    /// Number of the disk that it is a setting of (`diskseq`), which no other disk has in this
    /// boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<u64>,
}

/// What has to be changed for swap in the file system of `path`, and is not as it should be.
pub fn wanted(path: &Path, zswap: bool) -> Vec<Setting> {
    let page_cluster = PathBuf::from("/proc/sys/vm/page-cluster");
    let zswap = zswap.then_some(Path::new(ZSWAP));
    needed(page_cluster, queue(path).as_deref(), zswap)
}

/// Whether pages are compressed in memory first; `None` where the kernel cannot.
pub fn zswap() -> Option<bool> {
    Some(std::fs::read_to_string(ZSWAP).ok()?.trim() == "Y")
}

/// The same, of the settings that are given.
fn needed(page_cluster: PathBuf, queue: Option<&Path>, zswap: Option<&Path>) -> Vec<Setting> {
    let mut files = vec![(
        page_cluster,
        "0",
        "flash has no neighbours: one page is read at a time",
    )];
    if let Some(zswap) = zswap {
        files.push((
            zswap.to_owned(),
            "Y",
            "pages are compressed in memory first, and fewer are written to the flash",
        ));
    }
    if let Some(queue) = queue {
        files.push((
            queue.join("rotational"),
            "0",
            "flash that calls itself a hard disk gets swap given out as one",
        ));
        // Only loop devices have this directory.
        if queue.with_file_name("loop").is_dir() {
            files.push((
                queue.join("scheduler"),
                "none",
                "the device below puts requests in order; once is enough",
            ));
        }
    }
    let each = files.into_iter().filter_map(|(path, now, why)| {
        let text = std::fs::read_to_string(&path).ok()?;
        let before = value(&text);
        let offered = !text.contains('[') || text.split_whitespace().any(|choice| choice == now);
        (before != now && offered).then(|| Setting {
            disk: disk_of(&path),
            path,
            before,
            now: now.into(),
            why: why.into(),
        })
    });
    each.collect()
}

/// What is set: of a choice, what stands in brackets.
fn value(text: &str) -> String {
    let chosen = text
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'));
    chosen.map_or(text, |(chosen, _)| chosen).trim().to_owned()
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

/// The number of the disk that a file in its `queue` is about, where the kernel gives it one
/// (5.15). A loop device is the same whatever it shows, and its number is not.
fn disk_of(setting: &Path) -> Option<u64> {
    let disk = setting.parent()?.parent()?;
    if disk.file_name()?.as_encoded_bytes().starts_with(b"loop") {
        return None;
    }
    let number = std::fs::read_to_string(disk.join("diskseq")).ok()?;
    number.trim().parse().ok()
}

/// Sets it back, unless somebody has set something else meanwhile, or another disk is there by now.
pub fn undo(setting: &Setting) -> io::Result<()> {
    if setting.disk != disk_of(&setting.path) {
        return Ok(());
    }
    if value(&std::fs::read_to_string(&setting.path)?) == setting.now {
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
            disk: None,
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

    #[test]
    fn another_disk_in_its_place_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let queue = dir.path().join("sdx/queue");
        std::fs::create_dir_all(&queue).unwrap();
        let page_cluster = dir.path().join("page-cluster");
        let number = |n: &str| std::fs::write(dir.path().join("sdx/diskseq"), n).unwrap();
        std::fs::write(queue.join("rotational"), "1\n").unwrap();
        number("7\n");
        let needed = needed(page_cluster, Some(&queue), None);
        let [setting] = &needed[..] else {
            panic!("{needed:?}")
        };
        assert_eq!(setting.disk, Some(7));
        set(setting).unwrap();
        // Flash that says so itself, under the name that the disk had.
        number("8\n");
        let read = || std::fs::read_to_string(queue.join("rotational")).unwrap();
        undo(setting).unwrap();
        assert_eq!(read(), "0");
        number("7\n");
        undo(setting).unwrap();
        assert_eq!(read(), "1");
    }

    #[test]
    fn only_a_loop_device_gets_another_scheduler_and_has_it_back() {
        let dir = tempfile::tempdir().unwrap();
        let page_cluster = dir.path().join("page-cluster");
        std::fs::write(&page_cluster, "0\n").unwrap();
        let queue = dir.path().join("queue");
        std::fs::create_dir(&queue).unwrap();
        let file = |name: &str, text: &str| std::fs::write(queue.join(name), text).unwrap();
        file("rotational", "0\n");
        file("scheduler", "none mq-deadline kyber [bfq] \n");
        let needed = || needed(page_cluster.clone(), Some(&queue), None);
        assert_eq!(needed(), []);
        std::fs::create_dir(dir.path().join("loop")).unwrap();
        let [setting] = &needed()[..] else {
            panic!("{:?}", needed())
        };
        assert_eq!(
            (
                &*setting.before,
                &*setting.now,
                setting.path.ends_with("queue/scheduler")
            ),
            ("bfq", "none", true)
        );
        // As the kernel says it then.
        file("scheduler", "[none] mq-deadline kyber bfq \n");
        assert_eq!(needed(), []);
        undo(setting).unwrap();
        let read = || std::fs::read_to_string(queue.join("scheduler")).unwrap();
        assert_eq!(read(), "bfq");
        file("scheduler", "none [mq-deadline] kyber bfq \n");
        undo(setting).unwrap();
        assert!(read().contains("[mq-deadline]"), "{}", read());
        // A kernel that has no choice, and one that does not offer this.
        file("rotational", "1\n");
        for text in ["none\n", "[noop] deadline cfq\n"] {
            file("scheduler", text);
            assert_eq!(needed().len(), 1, "{text}");
        }
    }
}
