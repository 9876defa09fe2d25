//! What is remembered of a pool beside its flash, in a file of the state directory.
//!
//! Flash dies without a word, and takes along which disks there were and which of them were whole in their
//! origins. So a file on another device holds the registry once more, and notes ([`PoolNotes`]): of each disk
//! whether something may be on flash that the origin lacks. With those, the disks that lack nothing
//! are served when the flash is gone, and the others are refused.
//!
//! The notes are two slots at the start of the file. The registry is stored behind them as on flash
//! ([`Places`](crate::Places)), as if the file were a device of [`layout`].

use uuid::Uuid;

use crate::error::FormatError;
use crate::layout::{Layout, SEGMENT_BLOCKS_DEFAULT};
use crate::wire::{array_at, crc_with_hole, put, u16_at, u32_at, u64_at};

/// Bytes of both slots.
pub const POOL_NOTES_BYTES: usize = 2 * SLOT;
/// Bytes of the file that are written when it is made, so that they have room later: the slots and the first places of
/// the registry.
pub const BESIDE_BYTES: u64 = 4 << 20;
/// Longest path of flash that is remembered, in bytes.
pub const FLASH_PATH_MAX: usize = LABEL_AT - PATH_AT;

const SLOT: usize = 32 << 10;
const PATH_AT: usize = 128;
const LABEL_AT: usize = 3200;
const SETS_AT: usize = 4096;
const SET_BYTES: usize = 8192;
const LEN: usize = SETS_AT + 3 * SET_BYTES;
const MAGIC: &[u8; 4] = b"HPNB";
const VERSION: u16 = 1;
const ALONE: u16 = 1;
const WHAT: &str = "notes beside the flash";

/// Of a device of so many bytes is the layout by which the file's registry lies: it may grow as large as any.
const PRETENDED_BYTES: u64 = 64 << 30;

/// Where the registry lies in the file.
pub fn layout() -> Result<Layout, FormatError> {
    Layout::for_device(PRETENDED_BYTES, SEGMENT_BLOCKS_DEFAULT)
}

/// Numbers of disks.
#[derive(Clone, PartialEq, Eq)]
pub struct IdSet(Box<[u64; SET_BYTES / 8]>);

impl Default for IdSet {
    fn default() -> IdSet {
        IdSet(Box::new([0; SET_BYTES / 8]))
    }
}

impl std::fmt::Debug for IdSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

impl FromIterator<u16> for IdSet {
    fn from_iter<I: IntoIterator<Item = u16>>(ids: I) -> IdSet {
        let mut set = IdSet::default();
        for id in ids {
            set.insert(id);
        }
        set
    }
}

impl IdSet {
    /// True if `id` is one of them.
    pub fn contains(&self, id: u16) -> bool {
        let word = self.0.get(usize::from(id) / 64).copied();
        word.unwrap_or_default() & (1 << (id % 64)) != 0
    }

    /// Adds one; true if it is new.
    pub fn insert(&mut self, id: u16) -> bool {
        let new = !self.contains(id);
        if let Some(word) = self.0.get_mut(usize::from(id) / 64) {
            *word |= 1 << (id % 64);
        }
        new
    }

    /// Takes one out; true if it was there.
    pub fn remove(&mut self, id: u16) -> bool {
        let there = self.contains(id);
        if let Some(word) = self.0.get_mut(usize::from(id) / 64) {
            *word &= !(1 << (id % 64));
        }
        there
    }

    /// True if there is none.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    /// All of them, the smallest first.
    pub fn iter(&self) -> impl Iterator<Item = u16> + '_ {
        let words = self.0.iter().enumerate().filter(|(_, word)| **word != 0);
        words.flat_map(|(at, word)| {
            let bits = (0..64u16).filter(move |bit| word & (1 << bit) != 0);
            bits.map(move |bit| at as u16 * 64 + bit)
        })
    }

    fn put(&self, out: &mut [u8], at: usize) {
        for (i, word) in self.0.iter().enumerate() {
            put(out, at + i * 8, &word.to_le_bytes());
        }
    }

    fn at(bytes: &[u8], at: usize) -> IdSet {
        let mut set = IdSet::default();
        for (i, word) in set.0.iter_mut().enumerate() {
            *word = u64_at(bytes, at + i * 8);
        }
        set
    }
}

/// What is noted of a pool beside its flash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolNotes {
    /// The pool.
    pub pool: Uuid,
    /// Its flash device.
    pub device: Uuid,
    /// When that was formatted, seconds since 1970: of two devices of a pool the younger one counts.
    pub device_created: u64,
    /// Grows with every store.
    pub sequence: u64,
    /// Generation of the superblock when the pool was opened last: flash with a smaller one is an older copy.
    pub opened: u64,
    /// When a daemon was last started on it, seconds since 1970.
    pub started: u64,
    /// The registry beside the flash has changes that the flash does not have.
    pub alone: bool,
    /// Where the flash was.
    pub flash: String,
    /// The user's name for the pool.
    pub label: String,
    /// Disks of which something may be on flash that the origin lacks.
    pub dirty: IdSet,
    /// Disks that were served without the flash: what it holds of them may be old.
    pub left: IdSet,
    /// Disks that were dirty on flash which another device has taken the place of.
    pub lost: IdSet,
}

impl PoolNotes {
    /// Nothing is known of any disk.
    pub fn new(pool: Uuid, device: Uuid, device_created: u64) -> PoolNotes {
        PoolNotes {
            pool,
            device,
            device_created,
            sequence: 0,
            opened: 0,
            started: 0,
            alone: false,
            flash: String::new(),
            label: String::new(),
            dirty: IdSet::default(),
            left: IdSet::default(),
            lost: IdSet::default(),
        }
    }

    /// Where in the file, and what. The place is that of the store before the last, so that one that is
    /// cut short leaves the last one alone. A path or label that is too long is left out.
    pub fn encode(&self) -> (u64, Vec<u8>) {
        let fitting = |text: &str, most: usize| match text.len() <= most {
            true => text.as_bytes().to_vec(),
            false => Vec::new(),
        };
        let flash = fitting(&self.flash, FLASH_PATH_MAX);
        let label = fitting(&self.label, SETS_AT - LABEL_AT);
        let mut out = vec![0; LEN];
        put(&mut out, 0, MAGIC);
        put(&mut out, 8, &VERSION.to_le_bytes());
        put(
            &mut out,
            10,
            &(if self.alone { ALONE } else { 0 }).to_le_bytes(),
        );
        put(&mut out, 12, &(LEN as u32).to_le_bytes());
        put(&mut out, 16, self.pool.as_bytes());
        put(&mut out, 32, self.device.as_bytes());
        put(&mut out, 48, &self.sequence.to_le_bytes());
        put(&mut out, 56, &self.device_created.to_le_bytes());
        put(&mut out, 64, &self.opened.to_le_bytes());
        put(&mut out, 72, &self.started.to_le_bytes());
        put(&mut out, 80, &(flash.len() as u16).to_le_bytes());
        put(&mut out, 82, &(label.len() as u16).to_le_bytes());
        put(&mut out, PATH_AT, &flash);
        put(&mut out, LABEL_AT, &label);
        for (i, set) in [&self.dirty, &self.left, &self.lost].iter().enumerate() {
            set.put(&mut out, SETS_AT + i * SET_BYTES);
        }
        let crc = crc_with_hole(&out, 4);
        put(&mut out, 4, &crc.to_le_bytes());
        (self.sequence % 2 * SLOT as u64, out)
    }

    /// The newest notes in the first [`POOL_NOTES_BYTES`] of a file. Ones of a later version are refused, whichever
    /// slot they are in.
    pub fn newest(file: &[u8]) -> Result<PoolNotes, FormatError> {
        let mut newest: Result<PoolNotes, FormatError> =
            Err(FormatError::damaged(WHAT, "there are none"));
        for slot in file.chunks(SLOT).take(2) {
            match (PoolNotes::decode(slot), &newest) {
                (Err(e @ FormatError::Newer { .. }), _) => return Err(e),
                (Ok(found), Ok(other)) if found.sequence < other.sequence => {}
                (Ok(found), _) => newest = Ok(found),
                // Zeros are a slot that was never written.
                (Err(e), Err(_)) if slot.iter().any(|b| *b != 0) => newest = Err(e),
                (Err(_), _) => {}
            }
        }
        newest
    }

    fn decode(slot: &[u8]) -> Result<PoolNotes, FormatError> {
        let damaged = |why: &'static str| FormatError::damaged(WHAT, why);
        if slot.get(..4) != Some(MAGIC) {
            return Err(damaged("there are none"));
        }
        let len = u32_at(slot, 12) as usize;
        let bytes = slot.get(..len).filter(|bytes| bytes.len() >= SETS_AT);
        let bytes = bytes.ok_or_else(|| damaged("their length is none"))?;
        if crc_with_hole(bytes, 4) != u32_at(bytes, 4) {
            return Err(damaged("their checksum does not fit"));
        }
        let (version, flags) = (u16_at(bytes, 8), u16_at(bytes, 10));
        if version > VERSION || flags & !ALONE != 0 {
            return Err(FormatError::Newer {
                what: WHAT,
                feature: format!("version {version}, flags {flags:#x}"),
            });
        }
        if len != LEN {
            return Err(damaged("their length is none"));
        }
        let text = |at: usize, len: u16, most: usize| {
            let bytes = bytes.get(at..at + usize::from(len).min(most));
            let text = std::str::from_utf8(bytes.unwrap_or_default());
            text.map(str::to_owned)
                .map_err(|_| damaged("a name in them is none"))
        };
        Ok(PoolNotes {
            pool: Uuid::from_bytes(array_at(bytes, 16)),
            device: Uuid::from_bytes(array_at(bytes, 32)),
            sequence: u64_at(bytes, 48),
            device_created: u64_at(bytes, 56),
            opened: u64_at(bytes, 64),
            started: u64_at(bytes, 72),
            alone: flags & ALONE != 0,
            flash: text(PATH_AT, u16_at(bytes, 80), FLASH_PATH_MAX)?,
            label: text(LABEL_AT, u16_at(bytes, 82), SETS_AT - LABEL_AT)?,
            dirty: IdSet::at(bytes, SETS_AT),
            left: IdSet::at(bytes, SETS_AT + SET_BYTES),
            lost: IdSet::at(bytes, SETS_AT + 2 * SET_BYTES),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notes(sequence: u64) -> PoolNotes {
        PoolNotes {
            sequence,
            opened: 7,
            started: 8,
            alone: true,
            flash: "/dev/nvme0n1".to_owned(),
            label: "host".to_owned(),
            dirty: [1, 64, 65535].into_iter().collect(),
            left: [2].into_iter().collect(),
            lost: [63].into_iter().collect(),
            ..PoolNotes::new(Uuid::from_bytes([1; 16]), Uuid::from_bytes([2; 16]), 9)
        }
    }

    fn file(of: &[PoolNotes]) -> Vec<u8> {
        let mut file = vec![0; POOL_NOTES_BYTES];
        for notes in of {
            let (at, bytes) = notes.encode();
            file[at as usize..][..bytes.len()].copy_from_slice(&bytes);
        }
        file
    }

    #[test]
    fn a_store_that_is_cut_short_leaves_the_one_before() {
        let whole = file(&[notes(6), notes(7)]);
        assert_eq!(PoolNotes::newest(&whole).unwrap(), notes(7));
        let mut next = notes(8);
        next.dirty.remove(1);
        let (at, bytes) = next.encode();
        for cut in [1, 512, 4096, 5000, LEN - 1] {
            let mut torn = whole.clone();
            torn[at as usize..][..cut].copy_from_slice(&bytes[..cut]);
            let found = PoolNotes::newest(&torn).unwrap();
            assert!(found == notes(7) || found == next, "{cut}");
            if cut <= 4096 {
                assert_eq!(found, notes(7), "{cut}");
            }
        }
        assert!(PoolNotes::newest(&[0; POOL_NOTES_BYTES]).is_err());
    }

    #[test]
    fn notes_of_a_later_version_are_refused_wherever_they_are() {
        let mut whole = file(&[notes(6), notes(7)]);
        // Slot 0 is the older one.
        whole[8] = 2;
        let crc = crc_with_hole(&whole[..LEN], 4);
        whole[4..8].copy_from_slice(&crc.to_le_bytes());
        let refused = PoolNotes::newest(&whole).unwrap_err();
        assert!(matches!(refused, FormatError::Newer { .. }), "{refused}");
    }

    #[test]
    fn numbers_come_and_go() {
        let mut set: IdSet = [5, 64, 32767].into_iter().collect();
        assert!(!set.insert(5) && set.insert(6) && set.remove(64) && !set.remove(64));
        assert_eq!(set.iter().collect::<Vec<_>>(), [5, 6, 32767]);
        for id in [5, 6, 32767] {
            set.remove(id);
        }
        assert!(set.is_empty());
    }
}
