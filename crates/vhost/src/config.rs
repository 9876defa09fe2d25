//! What the device says of itself: features, and the configuration space.
//!
//! Layout of `struct virtio_blk_config`: virtio 1.2, 5.2.4.

use crate::request::{RANGE_SECTORS_MAX, RANGES_MAX, SECTOR};
use hearth_volume::Volume;
use virtio_bindings::{virtio_blk as blk, virtio_config, virtio_ring};

/// Queues a client may use. Hypervisors take one per processor of the guest.
pub const QUEUES_MAX: u16 = 64;
/// Data segments of one request, as told to the driver: what QEMU says of its own device with
/// queues of 128, which leaves room for header and status.
const SEG_MAX: u32 = 126;
/// Bytes of the configuration space up to and including `write_zeroes_may_unmap`.
pub const CONFIG_LEN: usize = 60;
/// Where the write-cache switch is, the only field a driver might write.
pub const WRITEBACK_AT: u32 = 32;

/// The bit of a feature.
const fn bit(number: u32) -> u64 {
    1 << number
}

/// Event indices.
pub const EVENT_IDX: u64 = bit(virtio_ring::VIRTIO_RING_F_EVENT_IDX);
/// Indirect descriptors.
pub const INDIRECT: u64 = bit(virtio_ring::VIRTIO_RING_F_INDIRECT_DESC);
/// The driver knows of the write cache.
pub const FLUSH: u64 = bit(blk::VIRTIO_BLK_F_FLUSH);
/// The driver may turn the write cache off. Not offered: how the switch stood is lost with the
/// connection (no hypervisor tells it again), so that a guest that chose durable writes would
/// silently lose them at a restart of ours. A guest that agreed on it with another back end, or
/// with an older one of ours, comes back with it all the same ([`TOLERATED`], [`is_write_back`]).
pub const CONFIG_WCE: u64 = bit(blk::VIRTIO_BLK_F_CONFIG_WCE);
/// Taken from a client although it is not offered.
pub const TOLERATED: u64 = CONFIG_WCE;
/// Discards.
pub const DISCARD: u64 = bit(blk::VIRTIO_BLK_F_DISCARD);
/// Zeroing.
pub const WRITE_ZEROES: u64 = bit(blk::VIRTIO_BLK_F_WRITE_ZEROES);
/// Read-only.
pub const RO: u64 = bit(blk::VIRTIO_BLK_F_RO);
/// Protocol features are negotiated (vhost-user.rst).
pub const PROTOCOL_FEATURES: u64 = bit(30);

/// Features of a disk.
pub fn features(disk: &dyn Volume) -> u64 {
    let mut features = bit(virtio_config::VIRTIO_F_VERSION_1)
        | EVENT_IDX
        | INDIRECT
        | PROTOCOL_FEATURES
        | bit(blk::VIRTIO_BLK_F_SEG_MAX)
        | bit(blk::VIRTIO_BLK_F_BLK_SIZE)
        | bit(blk::VIRTIO_BLK_F_TOPOLOGY)
        | bit(blk::VIRTIO_BLK_F_MQ);
    let can = disk.capabilities();
    for (has, feature) in [
        (can.flush, FLUSH),
        (!can.write, RO),
        (can.discard, DISCARD),
        (can.write_zeroes, WRITE_ZEROES),
    ] {
        if has {
            features |= feature;
        }
    }
    features
}

/// The configuration space, for a driver that agreed on `features`.
pub fn space(disk: &dyn Volume, features: u64) -> [u8; CONFIG_LEN] {
    let mut out = [0u8; CONFIG_LEN];
    let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &(disk.size() / SECTOR).to_le_bytes());
    put(12, &SEG_MAX.to_le_bytes());
    put(20, &(SECTOR as u32).to_le_bytes());
    // Topology: smaller or unaligned writes cost a read, and the preferred size is the least good one.
    let sectors = (u64::from(disk.block_sizes().preferred) / SECTOR).max(1) as u32;
    let exponent = sectors.ilog2() as u8;
    put(24, &[exponent, 0]);
    put(26, &(sectors as u16).to_le_bytes());
    put(28, &sectors.to_le_bytes());
    let writeback = is_write_back(features);
    put(WRITEBACK_AT as usize, &[u8::from(writeback)]);
    put(34, &QUEUES_MAX.to_le_bytes());
    put(36, &RANGE_SECTORS_MAX.to_le_bytes());
    put(40, &(RANGES_MAX as u32).to_le_bytes());
    // Discards of parts of a block do nothing for them.
    put(44, &sectors.to_le_bytes());
    put(48, &RANGE_SECTORS_MAX.to_le_bytes());
    put(52, &(RANGES_MAX as u32).to_le_bytes());
    put(56, &[1]);
    out
}

/// Whether writes may complete before they are durable: the driver must know of the cache
/// (virtio 1.2, 5.2.6.2), and have no switch for it, for that may stand at "off".
pub fn is_write_back(features: u64) -> bool {
    features & FLUSH != 0 && features & CONFIG_WCE == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_write_cache_needs_a_driver_that_knows_it_and_has_no_switch() {
        assert!(is_write_back(FLUSH));
        assert!(!is_write_back(FLUSH | CONFIG_WCE));
        assert!(!is_write_back(CONFIG_WCE));
        assert!(!is_write_back(0));
    }
}
