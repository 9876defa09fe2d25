//! Flash that has only so much to give.

use anyhow::Result;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;

/// A block device that the kernel lets read or write only so fast (cgroup v1), until dropped.
#[derive(Debug)]
pub struct Throttled {
    rule: PathBuf,
    name: String,
}

impl Throttled {
    /// `node` reads so many bytes a second. `None`, with the reason said for `test`, where that cannot be had.
    pub fn reads(test: &str, node: &str, rate: u64) -> Result<Option<Throttled>> {
        Throttled::of(test, "read", node, rate)
    }

    /// `node` writes so many bytes a second.
    pub fn writes(test: &str, node: &str, rate: u64) -> Result<Option<Throttled>> {
        Throttled::of(test, "write", node, rate)
    }

    fn of(test: &str, way: &str, node: &str, rate: u64) -> Result<Option<Throttled>> {
        let meta = std::fs::metadata(node)?;
        anyhow::ensure!(meta.file_type().is_block_device(), "{node}");
        let (major, minor) = (libc::major(meta.rdev()), libc::minor(meta.rdev()));
        let name = format!("{major}:{minor}");
        let rule = format!("/sys/fs/cgroup/blkio/blkio.throttle.{way}_bps_device");
        // What the kernel swaps counts for the topmost group: so whoever else uses the device has to be there, too.
        let groups = std::fs::read_to_string("/proc/self/cgroup")?;
        let topmost = groups.lines().any(|line| line.ends_with(":blkio:/"));
        if !topmost || std::fs::write(&rule, format!("{name} {rate}")).is_err() {
            println!("SKIPPED {test}: how fast a device is cannot be limited here");
            return Ok(None);
        }
        let rule = rule.into();
        Ok(Some(Throttled { rule, name }))
    }
}

impl Drop for Throttled {
    fn drop(&mut self) {
        let _ = std::fs::write(&self.rule, format!("{} 0", self.name));
    }
}
