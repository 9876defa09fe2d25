//! A pool and a disk as the tests that drive an engine step by step want them.

use hearth_engine::api::{DiskConfig, Mode};
use hearth_format::{Layout, Superblock, Uuid};
use hearth_io::Media;

/// Makes a pool of a device's `size` bytes.
pub fn format(media: &mut dyn Media, size: u64, segment_blocks: u32) {
    let layout = Layout::for_device(size, segment_blocks).expect("it fits");
    Superblock::new(layout, Uuid::from_u128(1), Uuid::from_u128(2), "test", 0)
        .store(media)
        .expect("formatted");
}

/// A write-back disk without limits, all of which may be cached.
pub fn disk(id: u16, size: u64) -> DiskConfig {
    DiskConfig {
        id,
        size,
        origin_align: 512,
        mode: Mode::WriteBack,
        block_size: 4096,
        min_bytes: 0,
        max_bytes: 0,
        seq_cutoff: 0,
        read_only: false,
        home: hearth_engine::api::Home::Origin,
    }
}
