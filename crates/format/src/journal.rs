//! One change of the registry, appended behind it: storing all disks whenever one is added would cost
//! the more the more there are.
//!
//! The same entries stand in both areas, at the same places, and each is durable in both before the
//! next is written. So an entry that cannot be read in one is taken from the other; and if one is
//! unreadable in both, a later one that can be read says that it was there.

use crate::disk::DiskRecord;
use crate::error::FormatError;
use crate::registry::{
    RECORD_DISK, Registry, SharedRecord, WHAT, begin_record, end_record, split_record,
};
use crate::wire::{array_at, crc_with_hole, put, u16_at, u32_at, u64_at};
use crate::{BLOCK_BYTES, pool_tag};
use uuid::Uuid;

/// `"HRGJ"` read as a little-endian number.
pub const ENTRY_MAGIC: u32 = u32::from_le_bytes(*b"HRGJ");
/// Bytes before the first record.
pub const ENTRY_HEADER_BYTES: usize = 64;
/// Most blocks of an entry: a larger change is a new base.
pub const ENTRY_BLOCKS_MAX: usize = 16;
/// Flag bits this version knows. Any other bit changes what the entry means.
pub const ENTRY_FLAGS_KNOWN: u32 = 0;

const CRC_AT: usize = 4;
const RECORD_REMOVED: u16 = 2;

/// What happens to one disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// It is new, or has these settings now.
    Put(SharedRecord),
    /// The disk of this number is removed.
    Remove(u16),
}

/// One entry of the journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalEntry {
    /// Generation of the base it stands behind.
    pub base: u64,
    /// Generation of the registry it makes.
    pub generation: u64,
    /// Number the next new disk gets, if it is free.
    pub next_disk_id: u16,
    /// In the order in which they are applied.
    pub changes: Vec<Change>,
}

impl JournalEntry {
    /// The entry behind base `base` that makes `new` of `old`. `None` if they differ in more than
    /// disks.
    pub fn between(old: &Registry, new: &Registry, base: u64) -> Option<JournalEntry> {
        if old.unknown_records != new.unknown_records {
            return None;
        }
        // A record keeps its place or is removed; what is new comes last. So whatever was done to the
        // list, even a new order, the entry makes exactly that.
        let mut changes = Vec::new();
        let mut kept = 0;
        for was in &old.disks {
            match new.disks.get(kept) {
                Some(is) if is.is(was) => kept += 1,
                Some(is) if is.id == was.id => {
                    if is != was {
                        changes.push(Change::Put(is.clone()));
                    }
                    kept += 1;
                }
                _ => changes.push(Change::Remove(was.id)),
            }
        }
        let added = new.disks.get(kept..).unwrap_or_default();
        changes.extend(added.iter().cloned().map(Change::Put));
        Some(JournalEntry {
            base,
            generation: new.generation,
            next_disk_id: new.next_disk_id,
            changes,
        })
    }

    /// Its blocks. `None` if it has too many.
    pub fn encode(&self, pool: Uuid) -> Result<Option<Vec<u8>>, FormatError> {
        let mut out = vec![0u8; ENTRY_HEADER_BYTES];
        for change in &self.changes {
            let start = begin_record(&mut out);
            let kind = match change {
                Change::Put(disk) => {
                    disk.encode(&mut out)?;
                    RECORD_DISK
                }
                Change::Remove(id) => {
                    out.extend_from_slice(&id.to_le_bytes());
                    RECORD_REMOVED
                }
            };
            end_record(&mut out, start, kind);
            if out.len() > ENTRY_BLOCKS_MAX * BLOCK_BYTES {
                return Ok(None);
            }
        }
        let used = (out.len() - ENTRY_HEADER_BYTES) as u32;
        let blocks = out.len().div_ceil(BLOCK_BYTES);
        out.resize(blocks * BLOCK_BYTES, 0);
        put(&mut out, 0, &ENTRY_MAGIC.to_le_bytes());
        put(&mut out, 8, &pool_tag(&pool).to_le_bytes());
        put(&mut out, 16, &self.base.to_le_bytes());
        put(&mut out, 24, &self.generation.to_le_bytes());
        put(&mut out, 32, &used.to_le_bytes());
        put(&mut out, 36, &(blocks as u16).to_le_bytes());
        put(&mut out, 38, &self.next_disk_id.to_le_bytes());
        let crc = crc_with_hole(&out, CRC_AT);
        put(&mut out, CRC_AT, &crc.to_le_bytes());
        Ok(Some(out))
    }

    /// Reads the entry at the front of `bytes`.
    pub fn decode(bytes: &[u8], pool: Uuid) -> Result<JournalEntry, FormatError> {
        match Sealed::at(bytes, pool_tag(&pool)) {
            Some(sealed) => sealed.entry(),
            None => Err(FormatError::NotFound {
                what: "registry journal entry",
            }),
        }
    }
}

/// An entry whose checksum was found right.
struct Sealed<'a> {
    base: u64,
    generation: u64,
    bytes: &'a [u8],
}

impl<'a> Sealed<'a> {
    fn at(bytes: &'a [u8], tag: u64) -> Option<Sealed<'a>> {
        let head = bytes.first_chunk::<ENTRY_HEADER_BYTES>()?;
        if u32_at(head, 0) != ENTRY_MAGIC || u64_at(head, 8) != tag {
            return None;
        }
        let blocks = usize::from(u16_at(head, 36));
        if blocks == 0 || blocks > ENTRY_BLOCKS_MAX {
            return None;
        }
        let bytes = bytes.get(..blocks * BLOCK_BYTES)?;
        (u32_at(head, CRC_AT) == crc_with_hole(bytes, CRC_AT)).then(|| Sealed {
            base: u64_at(head, 16),
            generation: u64_at(head, 24),
            bytes,
        })
    }

    fn blocks(&self) -> usize {
        self.bytes.len() / BLOCK_BYTES
    }

    fn entry(&self) -> Result<JournalEntry, FormatError> {
        let flags = u32_at(self.bytes, 40) & !ENTRY_FLAGS_KNOWN;
        if flags != 0 {
            return Err(newer(format!("journal features {flags:#x}")));
        }
        let used = ENTRY_HEADER_BYTES.saturating_add(u32_at(self.bytes, 32) as usize);
        let Some(mut rest) = self.bytes.get(ENTRY_HEADER_BYTES..used) else {
            return Err(FormatError::damaged(
                WHAT,
                "a journal entry claims to be larger than its blocks",
            ));
        };
        let mut changes = Vec::new();
        while !rest.is_empty() {
            let (kind, body, after) = split_record(rest)?;
            rest = after;
            changes.push(match kind {
                RECORD_DISK => Change::Put(DiskRecord::decode(body)?.into()),
                RECORD_REMOVED if body.len() == 2 => {
                    Change::Remove(u16::from_le_bytes(array_at(body, 0)))
                }
                RECORD_REMOVED => {
                    return Err(FormatError::damaged(
                        WHAT,
                        "a removal in its journal does not have 2 bytes",
                    ));
                }
                kind => return Err(newer(format!("journal record kind {kind:#06x}"))),
            });
        }
        Ok(JournalEntry {
            base: self.base,
            generation: self.generation,
            next_disk_id: u16_at(self.bytes, 38),
            changes,
        })
    }
}

fn newer(feature: String) -> FormatError {
    FormatError::Newer {
        what: WHAT,
        feature,
    }
}

/// A registry with the changes behind it.
#[derive(Debug)]
pub struct Chain {
    /// As the last change made it.
    pub registry: Registry,
    /// Blocks behind the base that the changes take.
    pub blocks: usize,
    /// Which of the two areas has all of them.
    pub whole: [bool; 2],
}

/// Applies the changes behind `base`. `tails` are what stands behind it in the two areas; one whose
/// own base is damaged has them at the same places.
pub fn replay(base: Registry, tails: [&[u8]; 2], pool: Uuid) -> Result<Chain, FormatError> {
    let tag = pool_tag(&pool);
    let number = base.generation;
    let mut disks = Disks::new(base.disks);
    let (mut generation, mut next_disk_id) = (number, base.next_disk_id);
    let (mut at, mut whole) = (0, [true; 2]);
    let sealed = |area: usize, at: usize| {
        let rest = tails[area].get(at * BLOCK_BYTES..)?;
        Sealed::at(rest, tag).filter(|found| found.base == number)
    };
    // Ends: the entries lie within the tails, one behind the other.
    loop {
        let next =
            |area| sealed(area, at).filter(|e| Some(e.generation) == generation.checked_add(1));
        let found = [next(0), next(1)];
        let Some(entry) = found[0].as_ref().or(found[1].as_ref()) else {
            break;
        };
        for (whole, found) in whole.iter_mut().zip(&found) {
            *whole &= found.is_some();
        }
        let blocks = entry.blocks();
        let entry = entry.entry()?;
        for change in entry.changes {
            disks.apply(change)?;
        }
        (generation, next_disk_id) = (entry.generation, entry.next_disk_id);
        at += blocks;
    }
    for (area, tail) in tails.iter().enumerate() {
        let later = at + 1..tail.len() / BLOCK_BYTES;
        let mut later = later.filter_map(|at| sealed(area, at));
        if later.any(|entry| entry.generation > generation) {
            return Err(FormatError::damaged(
                WHAT,
                "a change can be read in neither of its copies, and later ones were made",
            ));
        }
    }
    let registry = Registry {
        generation,
        next_disk_id,
        disks: disks.records.into_iter().flatten().collect(),
        unknown_records: base.unknown_records,
    };
    registry.check()?;
    Ok(Chain {
        registry,
        blocks: at,
        whole,
    })
}

/// The disks while changes are applied: found by number, however many there are.
struct Disks {
    /// Holes are disks that were removed.
    records: Vec<Option<SharedRecord>>,
    /// By number: where in `records`.
    places: Vec<Option<usize>>,
}

impl Disks {
    fn new(records: Vec<SharedRecord>) -> Disks {
        let mut disks = Disks {
            records: Vec::with_capacity(records.len()),
            places: Vec::new(),
        };
        records.into_iter().for_each(|disk| disks.put(disk));
        disks
    }

    fn put(&mut self, disk: SharedRecord) {
        let id = usize::from(disk.id);
        if self.places.len() <= id {
            self.places.resize(id + 1, None);
        }
        let Some(place) = self.places.get_mut(id) else {
            return;
        };
        match place.and_then(|at| self.records.get_mut(at)) {
            Some(record) => *record = Some(disk),
            None => {
                *place = Some(self.records.len());
                self.records.push(Some(disk));
            }
        }
    }

    fn apply(&mut self, change: Change) -> Result<(), FormatError> {
        match change {
            Change::Put(disk) => self.put(disk),
            Change::Remove(id) => {
                let place = self.places.get_mut(usize::from(id)).and_then(Option::take);
                let Some(record) = place.and_then(|at| self.records.get_mut(at)) else {
                    return Err(FormatError::wrong(
                        WHAT,
                        format!("its journal removes disk {id}, which is not there"),
                    ));
                };
                *record = None;
            }
        }
        Ok(())
    }
}
