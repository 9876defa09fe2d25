//! The summary: all entries of a sealed segment in one place, at its end.
//!
//! Reading every descriptor of a large pool means one small read per batch; reading summaries
//! means a few blocks per segment. A summary only repeats what the batches say, so a segment
//! whose summary is missing or damaged is walked batch by batch and nothing is lost.

use crate::BLOCK_BYTES;
use crate::entry::{self, ENTRY_BYTES, Entry};
use crate::error::FormatError;
use crate::wire::{crc_with_hole, put, u16_at, u32_at, u64_at};

/// `"HSUM"` read as a little-endian number.
pub const SUMMARY_MAGIC: u32 = u32::from_le_bytes(*b"HSUM");

/// Bytes before the first entry; chosen so that four blocks describe a 1024-block segment.
pub const SUMMARY_HEADER_BYTES: usize = 64;

/// Most entries of a summary: those of the largest allowed segment, 16384 blocks, whose
/// summary is 64 blocks.
pub const SUMMARY_ENTRIES_MAX: usize = (64 * BLOCK_BYTES - SUMMARY_HEADER_BYTES) / ENTRY_BYTES;

/// Flag bits of a summary this version knows. Any other bit changes what it means.
pub const SUMMARY_FLAGS_KNOWN: u8 = SUMMARY_BATCHES;

/// Behind the entries it says which batch each of them is of.
const SUMMARY_BATCHES: u8 = 1;
/// In front of them is how many there are.
const MARKS_HEADER_BYTES: usize = 4;
const MARK_BYTES: usize = 12;

/// Bytes behind the entries.
fn marks_bytes(flags: u8, batches: usize) -> usize {
    match flags & SUMMARY_BATCHES {
        0 => 0,
        _ => MARKS_HEADER_BYTES + batches * MARK_BYTES,
    }
}

/// A batch in a summary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchMark {
    /// Its number.
    pub seq: u64,
    /// How many of the entries are its own, behind those of the batches before it.
    pub entries: u16,
}

const WHAT: &str = "segment summary";
const CRC_AT: usize = 4;

/// The fields of a summary before its entries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SummaryHeader {
    /// The pool, see [`crate::pool_tag`].
    pub pool_tag: u64,
    /// Number of the segment's present life.
    pub segment_seq: u64,
    /// First batch of the segment.
    pub first_batch_seq: u64,
    /// Last batch of the segment; at most 2^32 - 1 after the first.
    pub last_batch_seq: u64,
    /// As in a batch, see [`BatchHeader::bound_seq`](crate::BatchHeader::bound_seq).
    pub bound_seq: u64,
    /// Every batch up to and including this one was durable when the summary was written.
    pub durable_seq: u64,
    /// Flush epoch of the last batch.
    pub epoch: u64,
    /// Entries that follow; set from the slice by [`SummaryHeader::encode`].
    pub entry_count: u32,
}

impl SummaryHeader {
    /// Replaces `out` by the encoded summary, padded with zeros to whole blocks.
    ///
    /// `entries` are those of the segment's batches in order, and `batches` those batches; without them,
    /// a reader takes all as one. `self.entry_count` is not
    /// looked at. Fails if there are more than [`SUMMARY_ENTRIES_MAX`], if an entry breaks the
    /// rules of [`Entry`], or if the batch numbers do not fit. That the result fits the
    /// segment is for the caller: see `Layout::summary_capacity`.
    pub fn encode(
        &self,
        entries: &[Entry],
        batches: &[BatchMark],
        out: &mut Vec<u8>,
    ) -> Result<(), FormatError> {
        out.clear();
        let told: usize = batches.iter().map(|b| usize::from(b.entries)).sum();
        if !batches.is_empty() && told != entries.len() {
            return Err(FormatError::unfit(
                WHAT,
                format!("{} entries, and {told} in its batches", entries.len()),
            ));
        }
        if entries.len() > SUMMARY_ENTRIES_MAX {
            return Err(FormatError::unfit(
                WHAT,
                format!(
                    "{} entries, at most {SUMMARY_ENTRIES_MAX} fit",
                    entries.len()
                ),
            ));
        }
        let delta = self
            .last_batch_seq
            .checked_sub(self.first_batch_seq)
            .and_then(|d| u32::try_from(d).ok());
        let Some(delta) = delta else {
            return Err(FormatError::unfit(
                WHAT,
                format!(
                    "batches {} to {} are no valid range",
                    self.first_batch_seq, self.last_batch_seq
                ),
            ));
        };
        let marks_at = SUMMARY_HEADER_BYTES + entries.len() * ENTRY_BYTES;
        let flags = if batches.is_empty() {
            0
        } else {
            SUMMARY_BATCHES
        };
        let used = marks_at + marks_bytes(flags, batches.len());
        out.resize(used.next_multiple_of(BLOCK_BYTES), 0);
        if flags != 0 {
            put(out, marks_at, &(batches.len() as u32).to_le_bytes());
        }
        for (i, b) in batches.iter().enumerate() {
            let at = marks_at + MARKS_HEADER_BYTES + i * MARK_BYTES;
            put(out, at, &b.seq.to_le_bytes());
            put(out, at + 8, &b.entries.to_le_bytes());
        }
        let (head, body) = out.split_at_mut(SUMMARY_HEADER_BYTES);
        entry::encode_all(WHAT, entries, body)?;
        put(head, 0, &SUMMARY_MAGIC.to_le_bytes());
        put(head, 8, &self.pool_tag.to_le_bytes());
        put(head, 16, &self.segment_seq.to_le_bytes());
        put(head, 24, &self.first_batch_seq.to_le_bytes());
        put(head, 32, &self.bound_seq.to_le_bytes());
        put(head, 40, &self.durable_seq.to_le_bytes());
        put(head, 48, &self.epoch.to_le_bytes());
        put(head, 56, &delta.to_le_bytes());
        put(head, 60, &(entries.len() as u16).to_le_bytes());
        put(head, 62, &[ENTRY_BYTES as u8, flags]);
        let crc = crc_with_hole(out.get(..used).unwrap_or_default(), CRC_AT);
        put(out, CRC_AT, &crc.to_le_bytes());
        Ok(())
    }

    /// Reads a summary from the last `summary_blocks` of a segment, appending its entries to
    /// `entries` and its batches, if it tells of them, to `batches` (both untouched on an error). Slots
    /// are checked against nothing but 16 bits: the caller knows the segment's size.
    pub fn decode(
        bytes: &[u8],
        entries: &mut Vec<Entry>,
        batches: &mut Vec<BatchMark>,
    ) -> Result<SummaryHeader, FormatError> {
        let Some(head) = bytes.first_chunk::<SUMMARY_HEADER_BYTES>() else {
            return Err(FormatError::damaged(WHAT, "fewer than 64 bytes"));
        };
        if u32_at(head, 0) != SUMMARY_MAGIC {
            return Err(FormatError::NotFound { what: WHAT });
        }
        // The entry size is part of what the checksum covers, so it must be used before the
        // checksum can be verified: another size is reported only if the checksum agrees.
        let [entry_size, flags] = [head[62], head[63]];
        let entry_count = u16_at(head, 60);
        let marks_at = SUMMARY_HEADER_BYTES + usize::from(entry_count) * usize::from(entry_size);
        let count = bytes.get(marks_at..).map_or(0, |rest| u32_at(rest, 0)) as usize;
        // More than there are entries is nonsense, and what it says may be anything still.
        let count = count.min(usize::from(entry_count) + 1);
        let used = marks_at + marks_bytes(flags, count);
        let Some(covered) = bytes.get(..used) else {
            return Err(FormatError::damaged(
                WHAT,
                "it claims more entries than fit",
            ));
        };
        if u32_at(head, CRC_AT) != crc_with_hole(covered, CRC_AT) {
            return Err(FormatError::damaged(WHAT, "its checksum does not match"));
        }
        if flags & !SUMMARY_FLAGS_KNOWN != 0 || usize::from(entry_size) != ENTRY_BYTES {
            return Err(FormatError::Newer {
                what: WHAT,
                feature: format!("entries of {entry_size} bytes, features {flags:#04x}"),
            });
        }
        let first_batch_seq = u64_at(head, 24);
        let Some(last_batch_seq) = first_batch_seq.checked_add(u64::from(u32_at(head, 56))) else {
            return Err(FormatError::damaged(
                WHAT,
                "its last batch number overflows",
            ));
        };
        let header = SummaryHeader {
            pool_tag: u64_at(head, 8),
            segment_seq: u64_at(head, 16),
            first_batch_seq,
            last_batch_seq,
            bound_seq: u64_at(head, 32),
            durable_seq: u64_at(head, 40),
            epoch: u64_at(head, 48),
            entry_count: u32::from(entry_count),
        };
        let marks = covered.get(marks_at..).unwrap_or_default();
        let marks = marks.get(MARKS_HEADER_BYTES..).unwrap_or_default();
        let marks = marks.chunks_exact(MARK_BYTES).map(|m| BatchMark {
            seq: u64_at(m, 0),
            entries: u16_at(m, 8),
        });
        if flags & SUMMARY_BATCHES != 0 && !add_up(marks.clone(), &header) {
            return Err(FormatError::damaged(
                WHAT,
                "its batches are not those of its entries",
            ));
        }
        let all = covered.get(SUMMARY_HEADER_BYTES..marks_at);
        entry::decode_all(WHAT, all.unwrap_or_default(), entries)?;
        batches.extend(marks);
        Ok(header)
    }
}

/// Are these the batches of a summary: in order, from its first to its last, with all of its entries?
fn add_up(marks: impl Iterator<Item = BatchMark>, header: &SummaryHeader) -> bool {
    let (mut next, mut last, mut entries) = (header.first_batch_seq, None, 0);
    for mark in marks {
        let first = last.is_none();
        if mark.seq < next || first && mark.seq != next {
            return false;
        }
        let Some(after) = mark.seq.checked_add(1) else {
            return false;
        };
        (next, last) = (after, Some(mark.seq));
        entries += u32::from(mark.entries);
    }
    last == Some(header.last_batch_seq) && entries == header.entry_count
}
