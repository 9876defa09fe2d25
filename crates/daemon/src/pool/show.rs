//! What of a pool lies on which of its flash devices.
//!
//! Whoever asks may hold the pool's lock, and one of the devices may hang. So nothing here asks a device anything, not even a
//! file for its name.

use std::path::{Component, Path, PathBuf};

use hearth_engine::stats::DeviceStats;
use hearth_io::BLOCK;

use crate::api::types::{DeviceIo, PoolDevice};
use crate::pool::Pool;

impl Pool {
    /// Its flash devices, in their order, as far as the superblock knows them.
    pub(crate) fn devices(&self) -> Vec<PoolDevice> {
        let superblock = &self.superblock;
        let layout = &superblock.layout;
        // What the layout says of flash that is gone is made up.
        let there = !self.is_without_flash();
        let of_flash = |n: u64| if there { n } else { 0 };
        let paths = self.paths().into_iter().zip(0..);
        let devices = paths.map(|(path, n)| {
            let entry = superblock.devices.get(n);
            let segments = entry.map_or(layout.segment_count, |e| e.extent.segments);
            let aside = superblock.areas_on(n as u16).map(|a| a.segments);
            let aside: u32 = aside.sum();
            let segments = segments.saturating_sub(aside);
            let segment = u64::from(layout.segment_blocks) * BLOCK;
            PoolDevice {
                path: path.display().to_string(),
                uuid: entry.map_or(superblock.device, |e| e.device).to_string(),
                model: model(&path),
                // Other paths may lie on a mount that hangs.
                device: path
                    .starts_with("/dev")
                    .then(|| hearth_io::identity::identity(&path))
                    .flatten(),
                state: "in-use".to_owned(),
                bytes: of_flash(entry.map_or_else(|| self.media().size(), |e| e.bytes())),
                log_bytes: of_flash(u64::from(segments) * u64::from(layout.data_blocks()) * BLOCK),
                segments: of_flash(u64::from(segments)),
                swap: u64::from(aside) * segment,
                lost: self.flash.is_lost(n as u16),
                ..PoolDevice::default()
            }
        });
        devices.collect()
    }
}

/// Links followed from a name to a drive; `/dev/disk/by-id` takes one or two.
const LINKS_MAX: usize = 8;

/// What the kernel says a drive is, or the drive of a partition.
fn model(path: &Path) -> Option<String> {
    let name = drive(path, Path::new("/dev"))?;
    let block = Path::new("/sys/class/block")
        .join(name.file_name()?)
        .canonicalize()
        .ok()?;
    let at = [Some(block.as_path()), block.parent()];
    let told = at.into_iter().flatten();
    let told = told.filter_map(|at| std::fs::read_to_string(at.join("device/model")).ok());
    let mut models = told.map(|model| model.trim().to_owned());
    models.find(|model| !model.is_empty())
}

/// The name of a drive, of one of its names. Only below `dev` is anything looked at: what lies elsewhere may be a file on a mount
/// that hangs, and whoever asks for its name waits as long as that does.
fn drive(path: &Path, dev: &Path) -> Option<PathBuf> {
    let mut at = plain(path);
    for _ in 0..LINKS_MAX {
        if !at.starts_with(dev) {
            return None;
        }
        match std::fs::read_link(&at) {
            Ok(target) => at = plain(&at.parent()?.join(target)),
            Err(_) => return Some(at),
        }
    }
    None
}

/// A path without `.` and `..`, by its text alone.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => drop(plain.pop()),
            Component::CurDir => {}
            other => plain.push(other),
        }
    }
    plain
}

/// Adds which one is being emptied, and how far that is.
pub(crate) fn add_emptied(devices: &mut [PoolDevice], emptied: Option<(u16, u64)>) {
    let Some((place, percent)) = emptied else {
        return;
    };
    if let Some(device) = devices.get_mut(usize::from(place)) {
        device.state = "emptying".to_owned();
        device.emptied_percent = Some(percent);
    }
}

/// Adds what lies on each.
pub(crate) fn add(devices: &mut [PoolDevice], lies: &[DeviceStats]) {
    for (device, lies) in devices.iter_mut().zip(lies) {
        device.cached = Some(lies.cached_blocks * BLOCK);
        device.clean = Some(lies.cached_blocks.saturating_sub(lies.dirty_blocks) * BLOCK);
        device.dirty = Some(lies.dirty_blocks * BLOCK);
        // What stands on a lost one nobody looks at.
        device.free_segments = Some(lies.free_segments).filter(|_| !device.lost);
    }
}

/// Adds what was done on each.
pub(crate) fn add_io(devices: &mut [PoolDevice], lies: &[DeviceStats]) {
    for (device, lies) in devices.iter_mut().zip(lies) {
        let f = &lies.figures;
        device.slow = lies.slow;
        device.io = Some(DeviceIo {
            reads: f.reads,
            read_bytes: f.read_bytes,
            read_us: f.read_ns / 1000,
            writes: f.writes,
            write_bytes: f.write_bytes,
            write_us: f.write_ns / 1000,
            flushes: f.flushes,
            flush_us: f.flush_ns / 1000,
            errors: f.errors,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_drive_is_found_by_its_other_names_and_nothing_elsewhere_is_looked_at() {
        let dir = tempfile::tempdir().unwrap();
        let dev = dir.path().join("dev");
        std::fs::create_dir_all(dev.join("disk/by-id")).unwrap();
        std::fs::write(dev.join("sda1"), b"").unwrap();
        let by_id = dev.join("disk/by-id/x");
        symlink("../../sda1", &by_id).unwrap();
        assert_eq!(drive(&by_id, &dev), Some(dev.join("sda1")));
        assert_eq!(drive(&dev.join("./sda1"), &dev), Some(dev.join("sda1")));
        // Behind these a mount may hang, and they are never followed, also where they would lead back.
        let file = dir.path().join("flash");
        symlink(dev.join("sda1"), &file).unwrap();
        assert_eq!(drive(&file, &dev), None);
        symlink(&file, dev.join("away")).unwrap();
        assert_eq!(drive(&dev.join("away"), &dev), None);
        assert_eq!(drive(&dev.join("../flash"), &dev), None);
        symlink("loop", dev.join("loop")).unwrap();
        assert_eq!(drive(&dev.join("loop"), &dev), None);
    }
}
