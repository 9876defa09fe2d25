//! The batch: one descriptor block and the data blocks behind it, the unit of the log.
//!
//! Data and the mapping that finds it become durable by one append. The price is that a
//! crash may leave any mixture of the blocks of the last batches; the descriptor therefore
//! carries its own checksum and one for every data block, and says how far back it is known
//! that nothing is missing (`durable_seq`) and what is still needed (`bound_seq`).

use crate::BLOCK_BYTES;
use crate::entry::{self, ENTRY_BYTES, Entry, Kind};
use crate::error::FormatError;
use crate::wire::{crc_with_hole, put, u16_at, u32_at, u64_at};

/// `"HBAT"` read as a little-endian number.
pub const BATCH_MAGIC: u32 = u32::from_le_bytes(*b"HBAT");

/// Bytes before the first entry.
pub const BATCH_HEADER_BYTES: usize = 64;

/// Most entries of a batch: what fits behind the header in one block.
pub const BATCH_ENTRIES_MAX: usize = (BLOCK_BYTES - BATCH_HEADER_BYTES) / ENTRY_BYTES;

/// Flag bits of a batch this version knows. Any other bit changes what the batch means.
pub const BATCH_FLAGS_KNOWN: u16 = BATCH_AGAIN;
/// Batches with this number or a larger one in segments that were opened before are void: they failed, and come again.
pub const BATCH_AGAIN: u16 = 1;

const WHAT: &str = "batch descriptor";
const CRC_AT: usize = 4;

/// The fields of a descriptor before its entries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchHeader {
    /// The pool, see [`crate::pool_tag`].
    pub pool_tag: u64,
    /// Number of the segment's present life; grows by one with every segment opened.
    pub segment_seq: u64,
    /// Number of this batch; unique in the pool, growing.
    pub batch_seq: u64,
    /// Segments with a smaller `segment_seq` are free, in a pool without a [map](crate::map). With one, 0.
    pub bound_seq: u64,
    /// Every batch up to and including this one was durable when this one was written.
    pub durable_seq: u64,
    /// Flush epoch of the writes in this batch.
    pub epoch: u64,
    /// Data blocks behind the descriptor; equals the number of data entries.
    pub data_blocks: u16,
    /// [`BATCH_FLAGS_KNOWN`] only.
    pub flags: u16,
}

impl BatchHeader {
    /// Writes the whole descriptor block, header, entries and checksum, to `out`.
    ///
    /// Fails if `out` is not one block, if there are more than [`BATCH_ENTRIES_MAX`] entries,
    /// if an entry breaks the rules of [`Entry`], or if `data_blocks` is not the number of
    /// data entries.
    pub fn encode(&self, entries: &[Entry], out: &mut [u8]) -> Result<(), FormatError> {
        if out.len() != BLOCK_BYTES {
            return Err(FormatError::unfit(
                WHAT,
                format!("it needs a buffer of 4096 bytes, not {}", out.len()),
            ));
        }
        if entries.len() > BATCH_ENTRIES_MAX {
            return Err(FormatError::unfit(
                WHAT,
                format!("{} entries, at most 252 fit", entries.len()),
            ));
        }
        if self.flags & !BATCH_FLAGS_KNOWN != 0 {
            return Err(FormatError::unfit(
                WHAT,
                format!("unknown flags {:#06x}", self.flags),
            ));
        }
        let (head, body) = out.split_at_mut(BATCH_HEADER_BYTES);
        let data = entry::encode_all(WHAT, entries, body)?;
        if data != usize::from(self.data_blocks) {
            return Err(FormatError::unfit(
                WHAT,
                format!("{data} data entries but {} data blocks", self.data_blocks),
            ));
        }
        if let Some(rest) = body.get_mut(entries.len() * ENTRY_BYTES..) {
            rest.fill(0);
        }
        put(head, 0, &BATCH_MAGIC.to_le_bytes());
        put(head, 8, &self.pool_tag.to_le_bytes());
        put(head, 16, &self.segment_seq.to_le_bytes());
        put(head, 24, &self.batch_seq.to_le_bytes());
        put(head, 32, &self.bound_seq.to_le_bytes());
        put(head, 40, &self.durable_seq.to_le_bytes());
        put(head, 48, &self.epoch.to_le_bytes());
        put(head, 56, &(entries.len() as u16).to_le_bytes());
        put(head, 58, &self.data_blocks.to_le_bytes());
        put(head, 60, &[ENTRY_BYTES as u8, 1]);
        put(head, 62, &self.flags.to_le_bytes());
        let crc = crc_with_hole(out, CRC_AT);
        put(out, CRC_AT, &crc.to_le_bytes());
        Ok(())
    }

    /// Reads a descriptor block, appending its entries to `entries` (untouched on an error).
    ///
    /// Whether the batch belongs here (pool, segment, order) and whether its slots point into
    /// it is for the caller, who knows the place: see [`BatchHeader::check_slots`].
    pub fn decode(block: &[u8], entries: &mut Vec<Entry>) -> Result<BatchHeader, FormatError> {
        let Some(block) = block.first_chunk::<BLOCK_BYTES>() else {
            return Err(FormatError::damaged(WHAT, "fewer than 4096 bytes"));
        };
        if u32_at(block, 0) != BATCH_MAGIC {
            return Err(FormatError::NotFound { what: WHAT });
        }
        if u32_at(block, CRC_AT) != crc_with_hole(block, CRC_AT) {
            return Err(FormatError::damaged(WHAT, "its checksum does not match"));
        }
        let flags = u16_at(block, 62);
        if flags & !BATCH_FLAGS_KNOWN != 0 {
            return Err(FormatError::Newer {
                what: WHAT,
                feature: format!("batch features {:#06x}", flags & !BATCH_FLAGS_KNOWN),
            });
        }
        let [entry_size, desc_blocks] = [block[60], block[61]];
        if usize::from(entry_size) != ENTRY_BYTES || desc_blocks != 1 {
            return Err(FormatError::Newer {
                what: WHAT,
                feature: format!("entries of {entry_size} bytes in {desc_blocks} blocks"),
            });
        }
        let count = usize::from(u16_at(block, 56));
        let Some(raw) = block.get(BATCH_HEADER_BYTES..BATCH_HEADER_BYTES + count * ENTRY_BYTES)
        else {
            return Err(FormatError::damaged(
                WHAT,
                "it claims more entries than fit",
            ));
        };
        let header = BatchHeader {
            pool_tag: u64_at(block, 8),
            segment_seq: u64_at(block, 16),
            batch_seq: u64_at(block, 24),
            bound_seq: u64_at(block, 32),
            durable_seq: u64_at(block, 40),
            epoch: u64_at(block, 48),
            data_blocks: u16_at(block, 58),
            flags,
        };
        let before = entries.len();
        let data = entry::decode_all(WHAT, raw, entries)?;
        if data != usize::from(header.data_blocks) {
            entries.truncate(before);
            return Err(FormatError::damaged(
                WHAT,
                "its data entries and data blocks differ in number",
            ));
        }
        Ok(header)
    }

    /// Blocks of each half behind the descriptor, which is at `descriptor_slot`, where a block of a half is two slots and a half has
    /// `half` of them. `half` 0: there are no halves.
    pub fn rows(&self, descriptor_slot: u32, half: u32, entries: &[Entry]) -> u32 {
        if half == 0 {
            return u32::from(self.data_blocks);
        }
        let data = entries.iter().filter(|e| e.kind.is_data());
        let rows = data.map(|e| (u32::from(e.slot) % half).saturating_sub(descriptor_slot));
        rows.max().unwrap_or(0)
    }

    /// The same as [`check_slots`](Self::check_slots) where clean blocks are in one half.
    pub fn check_rows(
        &self,
        descriptor_slot: u32,
        data_area: u32,
        half: u32,
        entries: &[Entry],
    ) -> Result<(), FormatError> {
        if half == 0 {
            return self.check_slots(descriptor_slot, data_area, entries);
        }
        for e in entries.iter().filter(|e| e.kind.is_data()) {
            let (side, row) = (u32::from(e.slot) / half, u32::from(e.slot) % half);
            if row <= descriptor_slot || row >= data_area || side > 1 {
                return Err(FormatError::damaged(
                    WHAT,
                    "an entry points outside its batch",
                ));
            }
            if side > 0 && e.kind == Kind::Dirty {
                return Err(FormatError::damaged(
                    WHAT,
                    "a block that is in both halves is said to be in the second",
                ));
            }
        }
        match descriptor_slot < data_area {
            true => Ok(()),
            false => Err(FormatError::damaged(
                WHAT,
                "the batch reaches past its segment's data area",
            )),
        }
    }

    /// Checks that every data entry of a batch whose descriptor is at `descriptor_slot` points
    /// into that batch, and that the batch ends within the `data_area` blocks of its segment.
    pub fn check_slots(
        &self,
        descriptor_slot: u32,
        data_area: u32,
        entries: &[Entry],
    ) -> Result<(), FormatError> {
        let end = u64::from(descriptor_slot) + 1 + u64::from(self.data_blocks);
        if end > u64::from(data_area) {
            return Err(FormatError::damaged(
                WHAT,
                "the batch reaches past its segment's data area",
            ));
        }
        let inside = |slot: u32| slot > descriptor_slot && u64::from(slot) < end;
        if entries
            .iter()
            .any(|e| e.kind.is_data() && !inside(u32::from(e.slot)))
        {
            return Err(FormatError::damaged(
                WHAT,
                "an entry points outside its batch",
            ));
        }
        Ok(())
    }
}
