//! Where things are on a flash device.
//!
//! Fixed places come first (superblocks, registry), so that any version finds them; the
//! checkpoint area and the segments take the rest. The layout is computed once, when the
//! device is formatted, and recorded: it never changes under a pool, and a later version may
//! compute new pools differently.

use hearth_fault::Fault;

use crate::BLOCK_BYTES;
use crate::entry::ENTRY_BYTES;
use crate::error::FormatError;
use crate::map::MAP_ENTRIES;
use crate::summary::SUMMARY_HEADER_BYTES;

/// Segment size of all but small devices, in blocks: 4 MiB.
pub const SEGMENT_BLOCKS_DEFAULT: u32 = 1024;
/// Segments a small device should have: a handful is always empty, being emptied or being
/// filled, and of fewer that would be a share of the flash that users notice.
const SEGMENTS_WANTED: u64 = 512;
/// Smallest segment: 1 MiB; below it summaries and seams cost too much.
pub const SEGMENT_BLOCKS_MIN: u32 = 256;
/// Largest segment: 64 MiB; slots in entries are 16 bits.
pub const SEGMENT_BLOCKS_MAX: u32 = 16384;
/// The same where clean blocks lie once: its summary has twice as many entries.
pub const SEGMENT_BLOCKS_ONCE_MAX: u32 = 8192;
/// Fewest segments of a device: the log needs room to move while its tail is cleaned.
pub const SEGMENTS_MIN: u32 = 8;

/// Blocks where the two superblock copies are. 1 MiB apart: no single erase block, partition
/// tool or stray `mkfs` header takes both.
pub const SUPERBLOCK_BLOCKS: [u64; 2] = [0, 256];
/// Blocks where the two registry areas start.
pub const REGISTRY_BLOCKS: [u64; 2] = [512, 768];
/// Blocks of one registry area: 1 MiB.
pub const REGISTRY_AREA_BLOCKS: u64 = 256;
/// Most blocks of one registry area where it has outgrown those: 16 MiB, 512 bytes for each of the
/// most disks a pool can have.
pub const REGISTRY_GROWN_BLOCKS_MAX: u64 = 4096;
/// First block behind the fixed places.
pub const FIXED_END: u64 = 1024;

/// Checkpoint bytes reserved per slot: room for index, checksum and state of every block.
const CHECKPOINT_BYTES_PER_SLOT: u64 = 24;
/// Checkpoint bytes reserved besides: header, segment table, policy state.
const CHECKPOINT_BYTES_FIXED: u64 = 1 << 20;
/// What of it checkpoints keep where a registry grows into their area: the index and the checksums take
/// 17 bytes per slot.
const CHECKPOINT_KEPT_PER_SLOT: u64 = 20;

const WHAT: &str = "device layout";
const BLOCK: u64 = BLOCK_BYTES as u64;

/// Where the areas of a flash device are, in 4 KiB blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Whole blocks of the device when it was formatted.
    pub device_blocks: u64,
    /// Blocks of a segment; a power of two.
    pub segment_blocks: u32,
    /// Blocks at the end of every segment that hold its summary.
    pub summary_blocks: u32,
    /// First block of the checkpoint area.
    pub checkpoint_start: u64,
    /// Blocks of the checkpoint area.
    pub checkpoint_blocks: u64,
    /// First block of segment 0; a multiple of `segment_blocks`.
    pub segment_start: u64,
    /// How many segments there are, on all devices of the pool.
    pub segment_count: u32,
    /// What came later, with devices that were added.
    pub added: Added,
    /// Each segment has two halves, and a clean block lies in one of them: a block of a half is two slots.
    pub once: bool,
}

/// What a pool grew by after its areas were laid out. They stay where they are, but for the segment map, which
/// has to tell of more segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Added {
    /// Segments among all that the areas were laid out without. Where devices have gone since, there may be fewer than
    /// the areas were laid out for: then it is that below zero, in 32 bits.
    pub segments: u32,
    /// Blocks by which the segment map ends further ahead than at first: each time it changed its size it went to
    /// another place than the one it had.
    pub map_shift: u32,
}

/// What of a pool's segments is on one of its devices, in blocks of that device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Whole blocks of the device when it was formatted.
    pub blocks: u64,
    /// First block of its segments.
    pub segment_start: u64,
    /// How many there are.
    pub segments: u32,
    /// So many numbers of segments before its first belong to no device: one that had them is gone.
    pub gap: u32,
}

/// Blocks a summary needs so that it can hold one entry for every data block.
fn summary_blocks_for(segment_blocks: u32, once: bool) -> u32 {
    // s blocks hold 256 s - 4 entries, which must be at least segment_blocks - s, or twice that.
    let per_block = (BLOCK_BYTES / ENTRY_BYTES) as u32;
    let header = (SUMMARY_HEADER_BYTES / ENTRY_BYTES) as u32;
    match once {
        false => (segment_blocks + header).div_ceil(per_block + 1),
        true => (2 * segment_blocks + header).div_ceil(per_block + 2),
    }
}

/// First block of the segments if there are `count` of them.
fn segment_start_for(count: u64, segment_blocks: u64) -> u64 {
    let slots = count * segment_blocks;
    let checkpoint = (slots * CHECKPOINT_BYTES_PER_SLOT + CHECKPOINT_BYTES_FIXED).div_ceil(BLOCK);
    (FIXED_END + checkpoint).next_multiple_of(segment_blocks)
}

impl Layout {
    /// The segment size, in blocks, that suits a device of `bytes` bytes.
    pub fn segment_blocks_for(bytes: u64) -> u32 {
        let wanted = bytes / BLOCK / SEGMENTS_WANTED;
        let max = u64::from(SEGMENT_BLOCKS_DEFAULT);
        let blocks = (wanted.min(max) as u32).max(SEGMENT_BLOCKS_MIN);
        1 << blocks.ilog2()
    }

    /// Lays out a device of `bytes` bytes in segments of `segment_blocks` blocks.
    ///
    /// A tail that is no whole segment stays unused, as does what lies behind 2^32 slots
    /// (16 TiB). Fails if fewer than [`SEGMENTS_MIN`] segments fit, naming the size needed.
    pub fn for_device(bytes: u64, segment_blocks: u32) -> Result<Layout, FormatError> {
        if !segment_blocks.is_power_of_two()
            || !(SEGMENT_BLOCKS_MIN..=SEGMENT_BLOCKS_MAX).contains(&segment_blocks)
        {
            return Err(FormatError::Unfit {
                what: WHAT,
                why: Fault::new(
                    format!("segments of {segment_blocks} blocks"),
                    format!(
                        "choose a power of two from {SEGMENT_BLOCKS_MIN} to {SEGMENT_BLOCKS_MAX}"
                    ),
                ),
            });
        }
        let segment = u64::from(segment_blocks);
        let device_blocks = bytes / BLOCK;
        let fits =
            |count: u64| segment_start_for(count, segment) + count * segment <= device_blocks;
        if !fits(u64::from(SEGMENTS_MIN)) {
            let least = u64::from(SEGMENTS_MIN);
            let needed = (segment_start_for(least, segment) + least * segment) * BLOCK;
            return Err(FormatError::TooSmall {
                needed,
                actual: bytes,
            });
        }
        // Largest count that fits; `fits` is monotone, and the range halves at every step.
        let most = u64::from((u32::MAX - 1) / segment_blocks);
        let (mut low, mut high) = (u64::from(SEGMENTS_MIN), (device_blocks / segment).min(most));
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if fits(middle) {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        let segment_start = segment_start_for(low, segment);
        let layout = Layout {
            device_blocks,
            segment_blocks,
            summary_blocks: summary_blocks_for(segment_blocks, false),
            checkpoint_start: FIXED_END,
            checkpoint_blocks: segment_start - FIXED_END,
            segment_start,
            segment_count: low as u32,
            added: Added::default(),
            once: false,
        };
        layout.check()?;
        Ok(layout)
    }

    /// Lays out a pool of several devices of `sizes` bytes, in segments of `segment_blocks` blocks: the
    /// [`Layout`] of all of them as one, of which the areas before the segments are on the first, and what of the
    /// segments is where. Fails with the place of the device that is too small.
    pub fn for_devices(
        sizes: &[u64],
        segment_blocks: u32,
    ) -> Result<(Layout, Vec<Extent>), (usize, FormatError)> {
        let (first, others) = sizes.split_first().unwrap_or((&0, &[]));
        // Checks the size of a segment and the least of the first one.
        let alone = Layout::for_device(*first, segment_blocks).map_err(|e| (0, e))?;
        let segment = u64::from(segment_blocks);
        let start = Self::other_start(segment_blocks);
        let least = u64::from(SEGMENTS_MIN);
        // What lies behind 2^32 slots stays unused, but each device has its least.
        let most = u64::from((u32::MAX - 1) / segment_blocks);
        let mut spare = most.saturating_sub(least * sizes.len() as u64);
        let mut extents = Vec::new();
        for (bytes, place) in others.iter().zip(1..) {
            let blocks = bytes / BLOCK;
            let fit = blocks.saturating_sub(start) / segment;
            if fit < least {
                let (needed, actual) = ((start + least * segment) * BLOCK, *bytes);
                return Err((place, FormatError::TooSmall { needed, actual }));
            }
            let more = (fit - least).min(spare);
            spare -= more;
            extents.push(Extent {
                blocks,
                segment_start: start,
                segments: (least + more) as u32,
                gap: 0,
            });
        }
        let elsewhere: u64 = extents.iter().map(|e| u64::from(e.segments)).sum();
        let front = |count: u64| segment_start_for(count + elsewhere, segment);
        let fits = |count: u64| front(count) + count * segment <= alone.device_blocks;
        if !fits(least) {
            let (needed, actual) = ((front(least) + least * segment) * BLOCK, *first);
            return Err((0, FormatError::TooSmall { needed, actual }));
        }
        let (mut low, mut high) = (least, u64::from(alone.segment_count).min(least + spare));
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            match fits(middle) {
                true => low = middle,
                false => high = middle - 1,
            }
        }
        let segment_start = front(low);
        let count = low + elsewhere;
        let layout = Layout {
            device_blocks: segment_start + count * segment,
            checkpoint_blocks: segment_start - FIXED_END,
            segment_start,
            segment_count: count as u32,
            ..alone
        };
        layout.check().map_err(|e| (0, e))?;
        let lead = Extent {
            blocks: alone.device_blocks,
            segment_start,
            segments: low as u32,
            gap: 0,
        };
        extents.insert(0, lead);
        Ok((layout, extents))
    }

    /// The same for a pool that keeps everything twice: the log has half as many segments as the devices, and
    /// the areas before the segments are on the first two. A device holds at most as many segments as the log has, so the
    /// halves of none of them, which are as far apart as the log has segments, are on the same device.
    ///
    /// With `once`, clean blocks are in one half of their segment.
    pub fn for_twice(
        sizes: &[u64],
        segment_blocks: u32,
        once: bool,
    ) -> Result<(Layout, Vec<Extent>), (usize, FormatError)> {
        if once && segment_blocks > SEGMENT_BLOCKS_ONCE_MAX {
            let why = Fault::new(
                format!("segments of {segment_blocks} blocks where clean blocks are there once"),
                format!("choose at most {SEGMENT_BLOCKS_ONCE_MAX}"),
            );
            return Err((0, FormatError::Unfit { what: WHAT, why }));
        }
        let segment = u64::from(segment_blocks);
        let least = u64::from(SEGMENTS_MIN);
        let tables = if once { 2 } else { 1 };
        let front = |count: u64| {
            let slots = tables * count * segment;
            let checkpoint =
                (slots * CHECKPOINT_BYTES_PER_SLOT + CHECKPOINT_BYTES_FIXED).div_ceil(BLOCK);
            (FIXED_END + checkpoint).next_multiple_of(segment.max(1))
        };
        let start = |place: usize, count: u64| match place {
            0 | 1 => front(count),
            _ => Self::other_start(segment_blocks),
        };
        let fit = |place: usize, bytes: u64, count: u64| {
            (bytes / BLOCK).saturating_sub(start(place, count)) / segment
        };
        for (place, bytes) in sizes.iter().enumerate() {
            // Checks the size of a segment, too.
            Layout::for_device(*bytes, segment_blocks).map_err(|e| (place, e))?;
            if fit(place, *bytes, least) < least {
                let (needed, actual) = ((start(place, least) + least * segment) * BLOCK, *bytes);
                return Err((place, FormatError::TooSmall { needed, actual }));
            }
        }
        if sizes.len() < 2 {
            let why = "two copies need two devices";
            return Err((0, FormatError::unfit(WHAT, why)));
        }
        let counts = |count: u64| -> Vec<u64> {
            let each = sizes.iter().enumerate();
            each.map(|(place, bytes)| fit(place, *bytes, count).min(count))
                .collect()
        };
        // With one segment more each device has at most one more, and two more are needed: once it does not fit, it
        // never does.
        let fits = |count: u64| counts(count).iter().sum::<u64>() >= 2 * count;
        let total: u64 = sizes.iter().fold(0, |sum, size| sum.saturating_add(*size));
        let most = u64::from((u32::MAX - 1) / segment_blocks) / tables;
        let most = (total / BLOCK / segment / 2).min(most);
        let (mut low, mut high) = (least, most.max(least));
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            match fits(middle) {
                true => low = middle,
                false => high = middle - 1,
            }
        }
        let mut counts = counts(low);
        let mut spare = counts.iter().sum::<u64>().saturating_sub(2 * low);
        for count in counts.iter_mut().rev() {
            let less = spare.min(*count - 1);
            *count -= less;
            spare -= less;
        }
        let segment_start = front(low);
        let layout = Layout {
            device_blocks: segment_start + low * segment,
            segment_blocks,
            summary_blocks: summary_blocks_for(segment_blocks, once),
            checkpoint_start: FIXED_END,
            checkpoint_blocks: segment_start - FIXED_END,
            segment_start,
            segment_count: low as u32,
            added: Added::default(),
            once,
        };
        layout.check().map_err(|e| (0, e))?;
        let extents = sizes.iter().zip(counts).enumerate();
        let extents = extents.map(|(place, (bytes, count))| Extent {
            blocks: bytes / BLOCK,
            segment_start: start(place, low),
            segments: count as u32,
            gap: 0,
        });
        Ok((layout, extents.collect()))
    }

    /// First block of the segments on a device that is not the first of its pool: what lies before is kept free
    /// but for the superblocks.
    pub fn other_start(segment_blocks: u32) -> u64 {
        FIXED_END.next_multiple_of(u64::from(segment_blocks.max(1)))
    }

    /// The layout with `segments` more, on a device that is added. The segment map gets a new place, as nothing
    /// may be written where the old one is, which counts until the superblock says otherwise.
    pub fn grown(&self, segments: u32) -> Result<Layout, FormatError> {
        let count = self.segment_count.checked_add(segments);
        let count = count.ok_or_else(Self::too_many)?;
        self.resized(count, self.added.segments.wrapping_add(segments))
    }

    /// The layout without the last `segments`, of a device that is gone.
    pub fn cut(&self, segments: u32) -> Result<Layout, FormatError> {
        let count = self.segment_count.checked_sub(segments);
        let count = count.ok_or(FormatError::unfit(WHAT, "there are fewer segments"))?;
        self.resized(count, self.added.segments.wrapping_sub(segments))
    }

    fn too_many() -> FormatError {
        FormatError::unfit(WHAT, "there are too many segments")
    }

    fn resized(&self, count: u32, added: u32) -> Result<Layout, FormatError> {
        let slots = u64::from(count) * u64::from(self.segment_blocks);
        if slots >= u64::from(u32::MAX) {
            return Err(Self::too_many());
        }
        let mut layout = Layout {
            device_blocks: self.segment_start + slots,
            segment_count: count,
            added: Added {
                segments: added,
                map_shift: 0,
            },
            ..*self
        };
        // Back to the first place if the map that counts is not there, else before that one.
        let shift = u64::from(self.added.map_shift);
        if shift < 2 * layout.map_blocks() {
            let further = u32::try_from(shift + 2 * self.map_blocks());
            layout.added.map_shift = further.map_err(|_| Self::too_many())?;
        }
        layout.check()?;
        Ok(layout)
    }

    /// Checks a layout read from flash: sizes in bounds, areas in order and inside the device.
    pub fn check(&self) -> Result<(), FormatError> {
        let wrong = |why: &'static str| Err(FormatError::damaged(WHAT, why));
        if !self.segment_blocks.is_power_of_two()
            || !(SEGMENT_BLOCKS_MIN..=SEGMENT_BLOCKS_MAX).contains(&self.segment_blocks)
        {
            return wrong("the segment size is no power of two from 256 to 16384 blocks");
        }
        if self.summary_blocks == 0 || self.summary_blocks > self.segment_blocks / 2 {
            return wrong("the summaries are empty or larger than half a segment");
        }
        if self.segment_count < SEGMENTS_MIN {
            return wrong("there are fewer than 8 segments");
        }
        let segment = u64::from(self.segment_blocks);
        let slots = u64::from(self.segment_count) * segment;
        let per_block = if self.once { 2 } else { 1 };
        if slots * per_block >= u64::from(u32::MAX) {
            return wrong("there are more than 2^32 slots");
        }
        if self.once && self.segment_blocks > SEGMENT_BLOCKS_ONCE_MAX {
            return wrong("its segments are too large for clean blocks that are there once");
        }
        if self.device_blocks.checked_mul(BLOCK).is_none() {
            return wrong("the device size overflows 64 bits");
        }
        if self.checkpoint_start < FIXED_END || self.checkpoint_blocks == 0 {
            return wrong("the checkpoint area is empty or lies in the fixed places");
        }
        match self.checkpoint_start.checked_add(self.checkpoint_blocks) {
            Some(end) if end <= self.segment_start => {}
            _ => return wrong("the checkpoint area reaches into the segments"),
        }
        let first = self.first_count();
        if first < SEGMENTS_MIN || u64::from(first) * segment >= u64::from(u32::MAX) {
            return wrong("more segments came later than there are");
        }
        let shift = u64::from(self.added.map_shift);
        if self.checkpoint_blocks <= 2 * self.map_blocks() + shift
            || self.map_end() < self.checkpoint_start + 2 * self.map_blocks()
        {
            return wrong("the checkpoint area has no room for the map of the segments");
        }
        if !self.segment_start.is_multiple_of(segment) {
            return wrong("the first segment is not aligned");
        }
        match self.segment_start.checked_add(slots) {
            Some(end) if end <= self.device_blocks => Ok(()),
            _ => wrong("the segments reach past the end of the device"),
        }
    }

    /// Segments that the areas were laid out for.
    fn first_count(&self) -> u32 {
        self.segment_count.wrapping_sub(self.added.segments)
    }

    /// Have only segments come since that was done?
    pub(crate) fn has_only_grown(&self) -> bool {
        self.added.segments <= self.segment_count.saturating_sub(SEGMENTS_MIN)
    }

    /// Byte offset of segment `seg`, which must be below `segment_count`.
    pub fn segment_offset(&self, seg: u32) -> u64 {
        debug_assert!(seg < self.segment_count);
        (self.segment_start + u64::from(seg) * u64::from(self.segment_blocks)) * BLOCK
    }

    /// Byte offset of the summary of segment `seg`.
    pub fn summary_offset(&self, seg: u32) -> u64 {
        self.segment_offset(seg) + u64::from(self.data_blocks()) * BLOCK
    }

    /// Bytes of a summary.
    pub fn summary_bytes(&self) -> usize {
        self.summary_blocks as usize * BLOCK_BYTES
    }

    /// Blocks of a segment for descriptors and data.
    pub fn data_blocks(&self) -> u32 {
        self.segment_blocks.saturating_sub(self.summary_blocks)
    }

    /// Places of blocks in all segments, summaries included; every place in the log has a number below.
    pub fn slots(&self) -> u32 {
        self.segment_count.saturating_mul(self.segment_slots())
    }

    /// The same of one segment.
    pub fn segment_slots(&self) -> u32 {
        match self.once {
            true => self.segment_blocks.saturating_mul(2),
            false => self.segment_blocks,
        }
    }

    /// Blocks of a half, if a block of a half is two slots; else 0.
    pub fn half_blocks(&self) -> u32 {
        if self.once { self.segment_blocks } else { 0 }
    }

    /// Byte offset of a slot. What is in the second half of its segment lies behind all first ones.
    pub fn slot_offset(&self, slot: u32) -> u64 {
        if !self.once {
            return (self.segment_start + u64::from(slot)) * BLOCK;
        }
        let blocks = self.segment_blocks.max(1);
        let (half, row) = (slot / blocks, slot % blocks);
        let (seg, side) = (u64::from(half / 2), u64::from(half % 2));
        let number = seg + side * u64::from(self.segment_count);
        (self.segment_start + number * u64::from(blocks) + u64::from(row)) * BLOCK
    }

    /// Entries that fit a summary. The log seals a segment before it holds more.
    pub fn summary_capacity(&self) -> usize {
        self.summary_bytes().saturating_sub(SUMMARY_HEADER_BYTES) / ENTRY_BYTES
    }

    /// Byte offset of the checkpoint area.
    pub fn checkpoint_offset(&self) -> u64 {
        self.checkpoint_start * BLOCK
    }

    /// Bytes of the checkpoint area.
    pub fn checkpoint_bytes(&self) -> u64 {
        self.checkpoint_blocks * BLOCK
    }

    /// Bytes of the checkpoint area that a checkpoint may be written to: what lies behind belongs to the
    /// segment map, and behind that to the registry, whether or not it is there yet.
    pub fn checkpoint_room(&self) -> u64 {
        self.map_end()
            .saturating_sub(self.checkpoint_start + 2 * self.map_blocks())
            * BLOCK
    }

    /// Blocks of a copy of the segment map: its header and its table.
    pub fn map_blocks(&self) -> u64 {
        1 + u64::from(self.segment_count).div_ceil(MAP_ENTRIES as u64)
    }

    /// Byte offset of a copy of the segment map, 0 or 1.
    pub fn map_offset(&self, copy: u8) -> u64 {
        (self.map_end() - (2 - u64::from(copy & 1)) * self.map_blocks()) * BLOCK
    }

    /// Block behind both copies of the segment map.
    fn map_end(&self) -> u64 {
        let end = self.checkpoint_start + self.checkpoint_blocks;
        let registry = 2 * self.registry_room().map_or(0, |(_, blocks)| blocks);
        end.saturating_sub(registry + u64::from(self.added.map_shift))
    }

    /// Where a registry goes that has outgrown its first areas: first block of area A, and blocks of
    /// each area; B lies behind A. It is the end of the checkpoint area, which was always larger than
    /// a checkpoint, so that every pool has it. `None` where it would not be twice as large as the first areas.
    pub fn registry_room(&self) -> Option<(u64, u64)> {
        // Devices that came later move nothing.
        let slots = u64::from(self.first_count()) * u64::from(self.segment_slots());
        let kept = slots * CHECKPOINT_KEPT_PER_SLOT + CHECKPOINT_BYTES_FIXED;
        let spare = self.checkpoint_blocks.saturating_sub(kept.div_ceil(BLOCK));
        let blocks = (spare / 2).min(REGISTRY_GROWN_BLOCKS_MAX);
        let end = self.checkpoint_start + self.checkpoint_blocks;
        (blocks >= 2 * REGISTRY_AREA_BLOCKS).then(|| (end - 2 * blocks, blocks))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn where_clean_blocks_are_there_once_each_block_of_a_half_is_two_slots() {
        let sizes = [64 << 20, 96 << 20, 48 << 20];
        let (twice, _) = Layout::for_twice(&sizes, 256, false).unwrap();
        let (once, extents) = Layout::for_twice(&sizes, 256, true).unwrap();
        assert_eq!((twice.segment_slots(), once.segment_slots()), (256, 512));
        assert_eq!((twice.half_blocks(), once.half_blocks()), (0, 256));
        assert!(once.summary_capacity() >= 2 * once.data_blocks() as usize);
        assert!(once.checkpoint_bytes() >= 24 * u64::from(once.slots()) + (1 << 20));
        // Every slot is a place of its own, and all of them are those of the devices' segments.
        let mut places: Vec<u64> = (0..once.slots()).map(|s| once.slot_offset(s)).collect();
        places.sort_unstable();
        places.dedup();
        let all: u64 = extents.iter().map(|e| u64::from(e.segments) * 256).sum();
        assert_eq!(places.len() as u64, all);
        let start = once.segment_start * BLOCK;
        assert_eq!(
            (places[0], places[all as usize - 1]),
            (start, start + (all - 1) * BLOCK)
        );
        // The first half of a segment begins where the segment does.
        assert_eq!(once.slot_offset(3 * 512), once.segment_offset(3));
        let (largest, _) = Layout::for_twice(&[8 << 30; 2], SEGMENT_BLOCKS_ONCE_MAX, true).unwrap();
        assert!(largest.summary_capacity() >= 2 * largest.data_blocks() as usize);
        assert!(largest.summary_capacity() <= crate::summary::SUMMARY_ENTRIES_MAX);
        assert!(Layout::for_twice(&[8 << 30; 2], SEGMENT_BLOCKS_MAX, true).is_err());
    }

    #[test]
    fn small_devices_have_small_segments() {
        let blocks = |mib: u64| Layout::segment_blocks_for(mib << 20);
        assert_eq!([blocks(0), blocks(54), blocks(256)], [256; 3]);
        assert_eq!([blocks(1023), blocks(1024), blocks(2047)], [256, 512, 512]);
        assert_eq!([blocks(2048), blocks(1 << 20)], [1024; 2]);
    }

    #[test]
    fn default_layout_of_one_gib() {
        let layout = Layout::for_device(1 << 30, SEGMENT_BLOCKS_DEFAULT).unwrap();
        assert_eq!(
            layout,
            Layout {
                device_blocks: 262_144,
                segment_blocks: 1024,
                summary_blocks: 4,
                checkpoint_start: 1024,
                checkpoint_blocks: 2048,
                segment_start: 3072,
                segment_count: 253,
                added: Added::default(),
                once: false,
            }
        );
        assert_eq!(layout.data_blocks(), 1020);
        assert_eq!(layout.summary_capacity(), 1020);
        assert_eq!(layout.segment_offset(1), 4096 * 4096);
        assert_eq!(layout.summary_offset(0), (3072 + 1020) * 4096);
    }

    #[test]
    fn summaries_hold_every_data_block() {
        for shift in 8..=14 {
            let layout = Layout::for_device(8 << 30, 1 << shift).unwrap();
            assert!(
                layout.summary_capacity() >= layout.data_blocks() as usize,
                "{layout:?}"
            );
            assert!(layout.summary_capacity() <= crate::summary::SUMMARY_ENTRIES_MAX);
        }
    }

    #[test]
    fn the_named_minimum_is_enough_and_one_block_less_is_not() {
        for shift in 8..=14 {
            let Err(FormatError::TooSmall { needed, .. }) = Layout::for_device(0, 1 << shift)
            else {
                panic!("an empty device was laid out");
            };
            assert_eq!(
                Layout::for_device(needed, 1 << shift)
                    .unwrap()
                    .segment_count,
                SEGMENTS_MIN
            );
            assert!(Layout::for_device(needed - 4096, 1 << shift).is_err());
        }
    }

    #[test]
    fn huge_devices_stop_at_32_bit_slots() {
        let layout = Layout::for_device(u64::MAX, SEGMENT_BLOCKS_MAX).unwrap();
        assert!(layout.slots() < u32::MAX);
        assert_eq!(layout.segment_count, (u32::MAX - 1) / SEGMENT_BLOCKS_MAX);
    }

    #[test]
    fn a_registry_has_room_to_grow_where_many_disks_are_likely() {
        let room = |gib: u64| Layout::for_device(gib << 30, 1024).unwrap().registry_room();
        assert_eq!(room(1), None);
        let (start, blocks) = room(4).unwrap();
        let layout = Layout::for_device(4 << 30, 1024).unwrap();
        assert_eq!(
            start + 2 * blocks,
            layout.checkpoint_start + layout.checkpoint_blocks
        );
        assert!((512..1024).contains(&blocks), "{blocks}");
        assert_eq!(room(64).unwrap().1, REGISTRY_GROWN_BLOCKS_MAX);
        assert_eq!(room(1024).unwrap().1, REGISTRY_GROWN_BLOCKS_MAX);
    }

    #[test]
    fn devices_of_unequal_size_share_the_segments_and_the_first_has_room_for_all_of_them() {
        let sizes = [256 << 20, 1 << 30, 64 << 20];
        let (layout, extents) = Layout::for_devices(&sizes, 256).unwrap();
        let counts: Vec<u32> = extents.iter().map(|e| e.segments).collect();
        assert_eq!(counts.iter().sum::<u32>(), layout.segment_count);
        assert_eq!(counts[1..], [1020, 60]);
        assert_eq!(extents[0].segment_start, layout.segment_start);
        assert!(layout.checkpoint_bytes() >= 24 * u64::from(layout.slots()) + (1 << 20));
        for (extent, bytes) in extents.iter().zip(sizes) {
            let end = extent.segment_start + u64::from(extent.segments) * 256;
            assert!(end <= bytes / 4096, "{extent:?}");
        }
        assert_eq!(
            layout.device_blocks,
            layout.segment_start + u64::from(layout.slots())
        );
    }

    #[test]
    fn a_device_that_is_too_small_is_named_with_what_it_needs() {
        let (place, e) = Layout::for_devices(&[1 << 30, 64 << 20, 1 << 20], 256).unwrap_err();
        assert_eq!((place, e.to_string().contains("12 MiB")), (2, true), "{e}");
        // The tables of 16 TiB do not fit a device of 64 MiB.
        let Err((0, FormatError::TooSmall { needed, .. })) =
            Layout::for_devices(&[64 << 20, 1 << 40], 1024)
        else {
            panic!("a small first device was laid out");
        };
        assert!(Layout::for_devices(&[needed, 1 << 40], 1024).is_ok());
        assert!(Layout::for_devices(&[needed - 4096, 1 << 40], 1024).is_err());
    }

    #[test]
    fn all_devices_together_stop_at_32_bit_slots() {
        let sizes = [1 << 50, 1 << 50, 1 << 50];
        let (layout, extents) = Layout::for_devices(&sizes, 16384).unwrap();
        assert!(layout.slots() < u32::MAX);
        assert_eq!(layout.segment_count, (u32::MAX - 1) / 16384);
        assert!(extents.iter().all(|e| e.segments >= SEGMENTS_MIN));
    }

    #[test]
    fn what_is_added_moves_nothing_and_gives_the_map_a_place_of_its_own() {
        let mut layout = Layout::for_device(4 << 30, 1024).unwrap();
        let room = layout.registry_room().unwrap();
        let mut taken = Vec::new();
        taken.push(room.0 * BLOCK..(room.0 + 2 * room.1) * BLOCK);
        for more in [100, 20_000, 8] {
            for copy in [0, 1] {
                let at = layout.map_offset(copy);
                taken.push(at..at + layout.map_blocks() * BLOCK);
            }
            layout = layout.grown(more).unwrap();
            assert_eq!(layout.registry_room(), Some(room));
            for copy in [0, 1] {
                let at = layout.map_offset(copy);
                let end = at + layout.map_blocks() * BLOCK;
                assert!(taken.iter().all(|t| end <= t.start || t.end <= at));
                assert!(layout.checkpoint_offset() + layout.checkpoint_room() <= at);
            }
        }
        assert!(layout.grown(u32::MAX / 1024).is_err());
    }

    #[test]
    fn what_comes_and_goes_uses_two_places_for_the_map_and_never_one_that_counts() {
        let first = Layout::for_device(4 << 30, 1024).unwrap();
        let place = |layout: &Layout| {
            let at = layout.map_offset(0);
            at..at + 2 * layout.map_blocks() * BLOCK
        };
        let mut layout = first;
        for _ in 0..1000 {
            let more = layout.grown(300).unwrap();
            let back = more.cut(300).unwrap();
            for (old, new) in [(&layout, &more), (&more, &back)] {
                let (old, new) = (place(old), place(new));
                assert!(new.end <= old.start || old.end <= new.start);
            }
            assert_eq!(back.registry_room(), first.registry_room());
            layout = back;
        }
        // As after the second of two devices of one size that the areas were laid out for.
        let less = layout.cut(400).unwrap();
        assert_eq!(less.registry_room(), first.registry_room());
        assert!(!less.has_only_grown() && layout.has_only_grown());
        assert!(layout.cut(layout.segment_count - 7).is_err());
    }

    #[test]
    fn odd_segment_sizes_are_refused() {
        for blocks in [0, 1, 128, 1000, 32768, u32::MAX] {
            assert!(Layout::for_device(1 << 40, blocks).is_err());
        }
    }

    proptest! {
        #[test]
        fn every_layout_checks_and_has_room(bytes in any::<u64>(), shift in 8u32..=14) {
            if let Ok(layout) = Layout::for_device(bytes, 1 << shift) {
                layout.check().unwrap();
                prop_assert!(layout.checkpoint_bytes() >= 24 * u64::from(layout.slots()) + (1 << 20));
                let map = 2 * layout.map_blocks() * BLOCK;
                prop_assert!(layout.checkpoint_room() + map >= 20 * u64::from(layout.slots()) + (1 << 20));
            }
        }

        #[test]
        fn checked_layouts_do_not_overflow(
            device_blocks: u64, segment_blocks: u32, summary_blocks: u32, checkpoint_start: u64,
            checkpoint_blocks: u64, segment_start: u64, segment_count: u32,
            segments: u32, map_shift: u32, once: bool,
        ) {
            let layout = Layout {
                device_blocks, segment_blocks, summary_blocks, checkpoint_start,
                checkpoint_blocks, segment_start, segment_count,
                added: Added { segments, map_shift },
                once,
            };
            if layout.check().is_ok() {
                prop_assert!(layout.checkpoint_room() <= layout.checkpoint_bytes());
                let last = layout.summary_offset(segment_count - 1) + layout.summary_bytes() as u64;
                prop_assert!(last <= device_blocks * 4096);
            }
        }
    }
}
