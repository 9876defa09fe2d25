//! One line of the log: what became of a block, or a run of blocks, of a disk.
//!
//! Millions of these are parsed at every start after a crash, so an entry is 16 bytes with
//! fixed fields, checked in a straight line. Batches and summaries share this form.

use crate::error::FormatError;

/// Bytes of an entry on flash.
pub const ENTRY_BYTES: usize = 16;

/// Block numbers are 48 bits on flash (1 EiB disks).
pub const BLOCK_NUMBER_END: u64 = 1 << 48;

/// What an entry says.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Data at `slot`, equal to the origin.
    Clean = 1,
    /// Data at `slot`, newer than the origin.
    Dirty = 2,
    /// Blocks logged dirty before now equal the origin.
    CleanedRun = 3,
    /// Cached copies are void.
    DropRun = 4,
    /// Blocks are zeros; the origin does not know yet.
    ZeroRun = 5,
    /// The origin now holds those zeros.
    ZeroDoneRun = 6,
    /// The origin is about to change here.
    Intent = 7,
    /// The change announced by an intent is over.
    IntentClear = 8,
    /// How far the origin of an ordered disk is; see [`Mark`].
    Through = 9,
}

/// What an entry of kind [`Through`](Kind::Through) says: of this disk, everything in batches up to
/// `batch` that something newer on flash has taken the place of does not count any more. Of several
/// the last one counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// A batch number.
    pub batch: u64,
    /// The origin has everything up to there, and nothing from behind it but parts of what comes next.
    /// Else what is dirty up to there reaches the origin in any order.
    pub in_order: bool,
}

/// So many bits of a mark's batch number stand in the place of the block.
const MARK_BLOCK_BITS: u32 = 36;

impl Mark {
    /// In the fields of an entry: block and word.
    pub fn to_fields(self) -> (u64, u32) {
        let high = (self.batch >> MARK_BLOCK_BITS) as u32;
        let block = self.batch & ((1 << MARK_BLOCK_BITS) - 1);
        (block, 1 + (high << 1 | u32::from(self.in_order)))
    }

    /// Back from there.
    pub fn from_fields(block: u64, word: u32) -> Mark {
        let rest = word.saturating_sub(1);
        Mark {
            batch: u64::from(rest >> 1) << MARK_BLOCK_BITS | block & ((1 << MARK_BLOCK_BITS) - 1),
            in_order: rest & 1 == 1,
        }
    }
}

impl Kind {
    /// The kind with this number, if this version knows it.
    #[inline]
    pub fn from_u8(raw: u8) -> Option<Kind> {
        Some(match raw {
            1 => Kind::Clean,
            2 => Kind::Dirty,
            3 => Kind::CleanedRun,
            4 => Kind::DropRun,
            5 => Kind::ZeroRun,
            6 => Kind::ZeroDoneRun,
            7 => Kind::Intent,
            8 => Kind::IntentClear,
            9 => Kind::Through,
            _ => return None,
        })
    }

    /// True if the entry names a data block on flash; otherwise it names a run of blocks.
    #[inline]
    pub fn is_data(self) -> bool {
        matches!(self, Kind::Clean | Kind::Dirty)
    }
}

/// One entry of a batch or summary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The disk's number in the pool; never 0. [`NO_DISK`](crate::disk::NO_DISK) in entries that
    /// say nothing and are only there because a batch was needed.
    pub disk: u16,
    /// First block, in 4 KiB units from the start of the disk; below 2^48.
    pub block: u64,
    /// Data kinds: CRC32C of the block. Run kinds: how many blocks, at least 1.
    pub word: u32,
    /// Data kinds: where the data is, in blocks from the start of the segment; never 0,
    /// since a descriptor comes first. Run kinds: 0.
    pub slot: u16,
    /// What the entry says.
    pub kind: Kind,
    /// No flag is defined yet; must be 0.
    pub flags: u8,
}

impl Entry {
    /// Checks the rules that hold for every entry, whoever made it.
    #[inline]
    fn fault(&self) -> Option<&'static str> {
        if self.disk == 0 {
            return Some("an entry names disk 0");
        }
        if self.flags != 0 {
            return Some("an entry has unknown flags");
        }
        if self.kind.is_data() {
            if self.slot == 0 {
                return Some("a data entry points at its segment's first block");
            }
        } else {
            if self.slot != 0 {
                return Some("a run entry has a slot");
            }
            if self.word == 0 {
                return Some("a run entry covers no block");
            }
            if self.block + u64::from(self.word) > BLOCK_NUMBER_END {
                return Some("a run entry reaches past the last block number");
            }
        }
        None
    }

    #[inline]
    fn from_bytes(raw: &[u8; ENTRY_BYTES]) -> Result<Entry, &'static str> {
        let raw = u128::from_le_bytes(*raw);
        let key = raw as u64;
        let Some(kind) = Kind::from_u8((raw >> 112) as u8) else {
            return Err("an entry has an unknown kind");
        };
        let entry = Entry {
            disk: (key >> 48) as u16,
            block: key & (BLOCK_NUMBER_END - 1),
            word: (raw >> 64) as u32,
            slot: (raw >> 96) as u16,
            kind,
            flags: (raw >> 120) as u8,
        };
        match entry.fault() {
            None => Ok(entry),
            Some(why) => Err(why),
        }
    }

    fn to_bytes(self) -> [u8; ENTRY_BYTES] {
        let key = u64::from(self.disk) << 48 | self.block;
        let raw = u128::from(key)
            | u128::from(self.word) << 64
            | u128::from(self.slot) << 96
            | u128::from(self.kind as u8) << 112
            | u128::from(self.flags) << 120;
        raw.to_le_bytes()
    }
}

/// Parses all of `bytes` (whole entries), appending to `entries`; returns how many are data
/// entries. On an error `entries` is as it was.
pub(crate) fn decode_all(
    what: &'static str,
    bytes: &[u8],
    entries: &mut Vec<Entry>,
) -> Result<usize, FormatError> {
    let before = entries.len();
    let (raws, _) = bytes.as_chunks::<ENTRY_BYTES>();
    entries.reserve(raws.len());
    let mut data = 0usize;
    for raw in raws {
        match Entry::from_bytes(raw) {
            Ok(entry) => {
                data += usize::from(entry.kind.is_data());
                entries.push(entry);
            }
            Err(why) => {
                entries.truncate(before);
                return Err(FormatError::damaged(what, why));
            }
        }
    }
    Ok(data)
}

/// Writes `entries` into the front of `out`, which has room for them; returns how many are
/// data entries.
pub(crate) fn encode_all(
    what: &'static str,
    entries: &[Entry],
    out: &mut [u8],
) -> Result<usize, FormatError> {
    let (places, _) = out.as_chunks_mut::<ENTRY_BYTES>();
    let mut data = 0usize;
    for (entry, place) in entries.iter().zip(places) {
        if entry.block >= BLOCK_NUMBER_END {
            return Err(FormatError::unfit(
                what,
                format!("block number {} needs more than 48 bits", entry.block),
            ));
        }
        if let Some(why) = entry.fault() {
            return Err(FormatError::unfit(what, format!("{why} ({entry:?})")));
        }
        data += usize::from(entry.kind.is_data());
        *place = entry.to_bytes();
    }
    Ok(data)
}
