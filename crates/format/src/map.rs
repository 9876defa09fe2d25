//! The segment map: which segments of the log count.
//!
//! While segments went in the order of their age one number said it. Now any of them may be freed, so
//! there is a table with an entry for each. It lies on flash twice, and the copies are written one after the
//! other, each whole and durable before the other is touched: whatever a crash or a rotten block takes, one
//! of them is there. A copy is a header and behind it the table's blocks; the header's checksum
//! over theirs makes sure that they belong together, though only those are written that changed.

use crate::BLOCK_BYTES;
use crate::layout::Layout;
use crate::wire::{crc_with_hole, put, u32_at, u64_at};
use hearth_io::checksum::crc32c;
use hearth_io::{BLOCK, Media, OtherHalf};
use std::io;

/// `"HMAP"` read as a little-endian number.
pub const MAP_MAGIC: u32 = u32::from_le_bytes(*b"HMAP");
/// `"HMTB"` read as a little-endian number.
pub const MAP_TABLE_MAGIC: u32 = u32::from_le_bytes(*b"HMTB");
/// Segments told of by a block of the table.
pub const MAP_ENTRIES: usize = (BLOCK_BYTES - TABLE_HEADER_BYTES) / ENTRY_BYTES;

const TABLE_HEADER_BYTES: usize = 16;
const ENTRY_BYTES: usize = 16;
const CRC_AT: usize = 4;
/// Beside the number of a life: the segment is clean. Numbers never grow so large.
const CLEAN: u64 = 1 << 63;

/// What the map says of one segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MapEntry {
    /// Number of the life of the segment that counts; 0: nothing in it does.
    pub seq: u64,
    /// Its last batch that was durable when the map was written.
    pub last_batch: u64,
    /// Its blocks are clean, whatever it says itself: the origins have them, or something newer.
    pub clean: bool,
}

/// A copy of the map, but for its table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MapHeader {
    /// The pool, see [`crate::pool_tag`].
    pub pool_tag: u64,
    /// Grows with every map; the larger one counts.
    pub generation: u64,
    /// Batches up to this one are durable, and the map names every segment that has one of them and counts.
    pub through: u64,
    /// How many segments the table tells of.
    pub segments: u32,
    /// Checksum over the checksums of the table's blocks, each as 4 bytes, little-endian.
    pub table_crc: u32,
}

impl MapHeader {
    /// The block.
    pub fn encode(&self) -> Box<[u8; BLOCK_BYTES]> {
        let mut block = Box::new([0u8; BLOCK_BYTES]);
        let out = block.as_mut_slice();
        put(out, 0, &MAP_MAGIC.to_le_bytes());
        put(out, 8, &self.pool_tag.to_le_bytes());
        put(out, 16, &self.generation.to_le_bytes());
        put(out, 24, &self.through.to_le_bytes());
        put(out, 32, &self.segments.to_le_bytes());
        put(out, 36, &self.table_crc.to_le_bytes());
        let crc = crc_with_hole(out, CRC_AT);
        put(out, CRC_AT, &crc.to_le_bytes());
        block
    }

    /// Reads it; `None` if it is none or is damaged.
    pub fn decode(block: &[u8]) -> Option<MapHeader> {
        let block = block.first_chunk::<BLOCK_BYTES>()?;
        let whole =
            u32_at(block, 0) == MAP_MAGIC && u32_at(block, CRC_AT) == crc_with_hole(block, CRC_AT);
        whole.then(|| MapHeader {
            pool_tag: u64_at(block, 8),
            generation: u64_at(block, 16),
            through: u64_at(block, 24),
            segments: u32_at(block, 32),
            table_crc: u32_at(block, 36),
        })
    }
}

/// The block of the table at `place`, with its checksum. At most [`MAP_ENTRIES`] entries.
pub fn encode_table(place: u32, entries: &[MapEntry]) -> (Box<[u8; BLOCK_BYTES]>, u32) {
    let mut block = Box::new([0u8; BLOCK_BYTES]);
    let out = block.as_mut_slice();
    put(out, 0, &MAP_TABLE_MAGIC.to_le_bytes());
    put(out, 8, &place.to_le_bytes());
    for (entry, i) in entries.iter().zip(0..MAP_ENTRIES) {
        let at = TABLE_HEADER_BYTES + i * ENTRY_BYTES;
        let seq = match entry.clean {
            true => entry.seq | CLEAN,
            false => entry.seq,
        };
        put(out, at, &seq.to_le_bytes());
        put(out, at + 8, &entry.last_batch.to_le_bytes());
    }
    let crc = crc_with_hole(out, CRC_AT);
    put(out, CRC_AT, &crc.to_le_bytes());
    (block, crc)
}

/// Reads a block of the table, appending `count` entries; its checksum, or `None` if it is not the one at
/// `place` or is damaged.
fn decode_table(
    block: &[u8],
    place: u32,
    count: usize,
    entries: &mut Vec<MapEntry>,
) -> Option<u32> {
    let crc = u32_at(block, CRC_AT);
    let whole = u32_at(block, 0) == MAP_TABLE_MAGIC
        && u32_at(block, 8) == place
        && crc == crc_with_hole(block, CRC_AT);
    for i in 0..count.min(MAP_ENTRIES) {
        let at = TABLE_HEADER_BYTES + i * ENTRY_BYTES;
        entries.push(MapEntry {
            seq: u64_at(block, at) & !CLEAN,
            last_batch: u64_at(block, at + 8),
            clean: u64_at(block, at) & CLEAN != 0,
        });
    }
    whole.then_some(crc)
}

/// The checksum of a table whose blocks have these.
pub fn table_crc(crcs: &[u32]) -> u32 {
    let bytes: Vec<u8> = crcs.iter().flat_map(|crc| crc.to_le_bytes()).collect();
    crc32c(&bytes)
}

/// A map as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentMap {
    /// Its header.
    pub header: MapHeader,
    /// An entry for each segment.
    pub entries: Vec<MapEntry>,
    /// Which copy it was read from. The other one may be torn, so that one is written first.
    pub copy: u8,
}

impl SegmentMap {
    /// Reads the map that counts: of the copies that are whole and of this pool the newer one. `None`: there
    /// is none. What cannot be read is as good as damaged. Where everything is there twice, a copy that is damaged on one
    /// device is read from the other.
    pub fn load(media: &mut dyn Media, layout: &Layout, pool_tag: u64) -> Option<SegmentMap> {
        let copies = [0, 1].into_iter().filter_map(|copy| {
            let map = read_copy(media, layout, copy)
                .or_else(|| read_copy(&mut OtherHalf(media), layout, copy))?;
            (map.header.pool_tag == pool_tag).then_some(map)
        });
        copies.max_by_key(|map| map.header.generation)
    }

    /// Of the copies of a map, which are damaged as they are read, and whole on the other device.
    pub(crate) fn better_there(media: &mut dyn Media, layout: &Layout) -> [bool; 2] {
        [0, 1].map(|copy| {
            read_copy(media, layout, copy).is_none()
                && read_copy(&mut OtherHalf(media), layout, copy).is_some()
        })
    }

    /// Writes the map to both places, one after the other, each followed by a flush; the one it was read from
    /// comes last.
    pub fn store(&self, media: &mut dyn Media, layout: &Layout) -> io::Result<()> {
        let tables = self.entries.chunks(MAP_ENTRIES).zip(0..);
        let tables: Vec<_> = tables
            .map(|(part, place)| encode_table(place, part))
            .collect();
        let crcs: Vec<u32> = tables.iter().map(|(_, crc)| *crc).collect();
        let header = MapHeader {
            segments: self.entries.len() as u32,
            table_crc: table_crc(&crcs),
            ..self.header
        };
        for copy in [1 - (self.copy & 1), self.copy & 1] {
            let at = layout.map_offset(copy);
            for ((block, _), i) in tables.iter().zip(1..) {
                media.write_at(at + i * BLOCK, &block[..])?;
            }
            media.write_at(at, &header.encode()[..])?;
            media.flush()?;
        }
        Ok(())
    }
}

fn read_copy(media: &mut dyn Media, layout: &Layout, copy: u8) -> Option<SegmentMap> {
    let at = layout.map_offset(copy);
    let mut block = vec![0u8; BLOCK_BYTES];
    media.read_at(at, &mut block).ok()?;
    let header = MapHeader::decode(&block).filter(|h| h.segments == layout.segment_count)?;
    let mut entries = Vec::with_capacity(header.segments as usize);
    let mut crcs = Vec::new();
    let blocks = layout.map_blocks() - 1;
    for place in 0..blocks {
        media.read_at(at + (1 + place) * BLOCK, &mut block).ok()?;
        let left = header.segments as usize - entries.len();
        crcs.push(decode_table(&block, place as u32, left, &mut entries)?);
    }
    (table_crc(&crcs) == header.table_crc).then_some(SegmentMap {
        header,
        entries,
        copy,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Ram(Vec<u8>);

    impl Media for Ram {
        fn len(&self) -> u64 {
            self.0.len() as u64
        }
        fn read_at(&mut self, offset: u64, data: &mut [u8]) -> std::io::Result<()> {
            data.copy_from_slice(&self.0[offset as usize..][..data.len()]);
            Ok(())
        }
        fn write_at(&mut self, offset: u64, data: &[u8]) -> std::io::Result<()> {
            self.0[offset as usize..][..data.len()].copy_from_slice(data);
            Ok(())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn map(layout: &Layout, generation: u64) -> SegmentMap {
        let entries = (0..layout.segment_count).map(|seg| MapEntry {
            seq: u64::from(seg) * generation,
            last_batch: u64::from(seg) + 7,
            clean: seg % 3 == 1,
        });
        SegmentMap {
            header: MapHeader {
                pool_tag: 5,
                generation,
                through: 99,
                segments: layout.segment_count,
                table_crc: 0,
            },
            entries: entries.collect(),
            copy: 1,
        }
    }

    #[test]
    fn either_copy_is_enough_and_a_torn_one_does_not_count() {
        let layout = Layout::for_device(700 << 20, 256).unwrap();
        assert!(layout.map_blocks() > 2, "a table of several blocks");
        let mut ram = Ram(vec![0; layout.segment_start as usize * BLOCK_BYTES]);
        assert!(SegmentMap::load(&mut ram, &layout, 5).is_none());
        let old = map(&layout, 3);
        old.store(&mut ram, &layout).unwrap();
        let read = SegmentMap::load(&mut ram, &layout, 5).unwrap();
        assert_eq!(
            (read.entries, read.header.through),
            (old.entries.clone(), 99)
        );
        assert!(
            SegmentMap::load(&mut ram, &layout, 6).is_none(),
            "of another pool"
        );
        // The newer one got as far as any of its blocks, and no further.
        let mut newer = Ram(ram.0.clone());
        map(&layout, 4).store(&mut newer, &layout).unwrap();
        for torn in 0..layout.map_blocks() {
            let mut ram = Ram(ram.0.clone());
            for block in 0..layout.map_blocks() {
                let at = (layout.map_offset(0) + block * BLOCK) as usize;
                if block != torn {
                    ram.0[at..at + BLOCK_BYTES].copy_from_slice(&newer.0[at..at + BLOCK_BYTES]);
                }
            }
            let read = SegmentMap::load(&mut ram, &layout, 5).unwrap();
            assert_eq!(read.entries, old.entries);
        }
    }
}
