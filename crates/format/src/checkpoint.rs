//! The checkpoint's table of contents.
//!
//! After a clean stop the index need not be rebuilt from the log: it is read back from the
//! checkpoint area. What the sections hold is the engine's; here is only where they are and
//! whether they are whole. A checkpoint counts only while the superblock names its id.

use crate::BLOCK_BYTES;
use crate::error::FormatError;
use crate::wire::{crc_with_hole, put, u16_at, u32_at, u64_at};

/// `"HCKP"` read as a little-endian number.
pub const CHECKPOINT_MAGIC: u32 = u32::from_le_bytes(*b"HCKP");
/// Most sections of a checkpoint.
pub const SECTIONS_MAX: usize = 64;
/// Bytes before the first section record.
pub const CHECKPOINT_HEADER_BYTES: usize = 64;
/// Bytes of a section record.
pub const SECTION_BYTES: usize = 24;
/// Flag bits this version knows. Any other bit changes what the checkpoint means.
pub const CHECKPOINT_FLAGS_KNOWN: u32 = 0;

const WHAT: &str = "checkpoint header";
const CRC_AT: usize = 4;

/// One piece of a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Section {
    /// What it holds; numbers are the engine's.
    pub kind: u32,
    /// Bytes from the start of the checkpoint area; at least one block, behind the header.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// CRC32C of those bytes.
    pub crc: u32,
}

/// The first block of the checkpoint area.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckpointHeader {
    /// The pool, see [`crate::pool_tag`].
    pub pool_tag: u64,
    /// Number of this checkpoint; the superblock repeats it.
    pub id: u64,
    /// Number the next batch gets.
    pub next_batch_seq: u64,
    /// Number the next opened segment gets.
    pub next_segment_seq: u64,
    /// Segments with a smaller number are free.
    pub tail_seq: u64,
    /// The pieces, at most [`SECTIONS_MAX`], not overlapping.
    pub sections: Vec<Section>,
}

impl CheckpointHeader {
    /// The header block for an area of `area_bytes`
    /// ([`Layout::checkpoint_bytes`](crate::Layout::checkpoint_bytes)).
    pub fn encode(&self, area_bytes: u64) -> Result<Box<[u8; BLOCK_BYTES]>, FormatError> {
        if let Some(why) = fault(&self.sections, area_bytes) {
            return Err(FormatError::unfit(WHAT, why));
        }
        let mut block = Box::new([0u8; BLOCK_BYTES]);
        let out = block.as_mut_slice();
        put(out, 0, &CHECKPOINT_MAGIC.to_le_bytes());
        put(out, 8, &self.pool_tag.to_le_bytes());
        put(out, 16, &self.id.to_le_bytes());
        put(out, 24, &self.next_batch_seq.to_le_bytes());
        put(out, 32, &self.next_segment_seq.to_le_bytes());
        put(out, 40, &self.tail_seq.to_le_bytes());
        put(out, 48, &(self.sections.len() as u16).to_le_bytes());
        put(out, 50, &(SECTION_BYTES as u16).to_le_bytes());
        let (places, _) = out[CHECKPOINT_HEADER_BYTES..].as_chunks_mut::<SECTION_BYTES>();
        for (section, place) in self.sections.iter().zip(places) {
            put(place, 0, &section.kind.to_le_bytes());
            put(place, 4, &section.crc.to_le_bytes());
            put(place, 8, &section.offset.to_le_bytes());
            put(place, 16, &section.len.to_le_bytes());
        }
        let crc = crc_with_hole(out, CRC_AT);
        put(out, CRC_AT, &crc.to_le_bytes());
        Ok(block)
    }

    /// Reads the header block of an area of `area_bytes`. Every section lies inside the area,
    /// behind the header, and overlaps no other; their checksums are for the caller.
    pub fn decode(block: &[u8], area_bytes: u64) -> Result<CheckpointHeader, FormatError> {
        let Some(block) = block.first_chunk::<BLOCK_BYTES>() else {
            return Err(FormatError::damaged(WHAT, "fewer than 4096 bytes"));
        };
        if u32_at(block, 0) != CHECKPOINT_MAGIC {
            return Err(FormatError::NotFound { what: WHAT });
        }
        if u32_at(block, CRC_AT) != crc_with_hole(block, CRC_AT) {
            return Err(FormatError::damaged(WHAT, "its checksum does not match"));
        }
        let flags = u32_at(block, 52) & !CHECKPOINT_FLAGS_KNOWN;
        let section_bytes = usize::from(u16_at(block, 50));
        if flags != 0 || section_bytes != SECTION_BYTES {
            return Err(FormatError::Newer {
                what: WHAT,
                feature: format!("section records of {section_bytes} bytes, features {flags:#x}"),
            });
        }
        let count = usize::from(u16_at(block, 48));
        if count > SECTIONS_MAX {
            return Err(FormatError::damaged(
                WHAT,
                "it claims more than 64 sections",
            ));
        }
        let (places, _) = block[CHECKPOINT_HEADER_BYTES..].as_chunks::<SECTION_BYTES>();
        let sections: Vec<Section> = places
            .iter()
            .take(count)
            .map(|place| Section {
                kind: u32_at(place, 0),
                crc: u32_at(place, 4),
                offset: u64_at(place, 8),
                len: u64_at(place, 16),
            })
            .collect();
        if let Some(why) = fault(&sections, area_bytes) {
            return Err(FormatError::damaged(WHAT, why));
        }
        Ok(CheckpointHeader {
            pool_tag: u64_at(block, 8),
            id: u64_at(block, 16),
            next_batch_seq: u64_at(block, 24),
            next_segment_seq: u64_at(block, 32),
            tail_seq: u64_at(block, 40),
            sections,
        })
    }
}

fn fault(sections: &[Section], area_bytes: u64) -> Option<&'static str> {
    if sections.len() > SECTIONS_MAX {
        return Some("more than 64 sections");
    }
    let mut ranges = Vec::with_capacity(sections.len());
    for section in sections {
        let Some(end) = section.offset.checked_add(section.len) else {
            return Some("a section's end overflows");
        };
        if section.offset < BLOCK_BYTES as u64 || end > area_bytes {
            return Some("a section lies outside the checkpoint area");
        }
        ranges.push((section.offset, end));
    }
    ranges.sort_unstable();
    let overlap = ranges
        .windows(2)
        .any(|pair| matches!(pair, [(_, end), (start, _)] if end > start));
    overlap.then_some("two sections overlap")
}
