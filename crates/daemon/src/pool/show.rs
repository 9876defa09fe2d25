//! What of a pool lies on which of its flash devices.

use hearth_engine::stats::DeviceStats;
use hearth_io::BLOCK;

use crate::api::types::{DeviceIo, PoolDevice};
use crate::pool::Pool;

impl Pool {
    /// Its flash devices, in their order, as far as the superblock knows them.
    pub(crate) fn devices(&self) -> Vec<PoolDevice> {
        let superblock = &self.superblock;
        let layout = &superblock.layout;
        let paths = self.paths().into_iter().zip(0..);
        let devices = paths.map(|(path, n)| {
            let entry = superblock.devices.get(n);
            let segments = entry.map_or(layout.segment_count, |e| e.extent.segments);
            PoolDevice {
                path: path.display().to_string(),
                uuid: entry.map_or(superblock.device, |e| e.device).to_string(),
                bytes: entry.map_or_else(|| self.media().size(), |e| e.bytes()),
                capacity: u64::from(segments) * u64::from(layout.data_blocks()) * BLOCK,
                segments: u64::from(segments),
                lost: self.flash.is_lost(n as u16),
                ..PoolDevice::default()
            }
        });
        devices.collect()
    }
}

/// Adds what lies on each.
pub(crate) fn add(devices: &mut [PoolDevice], lies: &[DeviceStats]) {
    for (device, lies) in devices.iter_mut().zip(lies) {
        device.cached = Some(lies.cached_blocks * BLOCK);
        device.dirty = Some(lies.dirty_blocks * BLOCK);
        device.free_segments = Some(lies.free_segments);
    }
}

/// Adds what was done on each.
pub(crate) fn add_io(devices: &mut [PoolDevice], lies: &[DeviceStats]) {
    for (device, lies) in devices.iter_mut().zip(lies) {
        let f = &lies.figures;
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
