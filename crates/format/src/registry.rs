//! The registry: which disks a pool caches, and how.
//!
//! It makes a pool self-describing: carried to another host, the pool still knows its disks.
//! This is the registry as a whole; [`crate::journal`] is one change of it, and
//! [`crate::places`] where both are stored, and in which order.

use crate::BLOCK_BYTES;
use crate::disk::{CRITICAL, DISK_ID_MAX, DiskRecord};
use crate::error::FormatError;
use crate::layout::REGISTRY_GROWN_BLOCKS_MAX;
use crate::wire::{array_at, crc_with_hole, put, u16_at, u32_at, u64_at};
use hearth_fault::Fault;
use std::collections::HashSet;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use uuid::Uuid;

/// `"HREG"` read as a little-endian number.
pub const REGISTRY_MAGIC: u32 = u32::from_le_bytes(*b"HREG");
/// Bytes before the first record.
pub const REGISTRY_HEADER_BYTES: usize = 64;
/// Most bytes of a registry: one area of the largest kind.
pub const REGISTRY_BYTES_MAX: usize = REGISTRY_GROWN_BLOCKS_MAX as usize * BLOCK_BYTES;
/// Most disks of a pool: every number a disk can have.
pub const DISKS_MAX: usize = DISK_ID_MAX as usize;
/// Most records a registry may carry besides disks.
pub const OTHER_RECORDS_MAX: usize = 256;
/// Flag: changes made since are behind it, see [`crate::journal`].
pub const REGISTRY_FLAG_JOURNAL: u32 = 1;
/// Flag: there are no disks here, only the place where the registry is.
pub const REGISTRY_FLAG_MOVED: u32 = 2;
/// Flag bits this version knows. Any other bit changes what the registry means.
pub const REGISTRY_FLAGS_KNOWN: u32 = REGISTRY_FLAG_JOURNAL | REGISTRY_FLAG_MOVED;

pub(crate) const WHAT: &str = "registry";
const CRC_AT: usize = 4;
const RECORD_HEADER: usize = 8;
pub(crate) const RECORD_DISK: u16 = 1;
/// Where a header with [`REGISTRY_FLAG_MOVED`] has the place: first block (8), blocks of an area (4).
const MOVED_AT: usize = 48;

/// What stands at the front of an area.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Front {
    /// A registry.
    Base {
        /// As it was when it was stored as a whole.
        registry: Registry,
        /// Changes made since are behind it.
        journal: bool,
        /// Blocks it takes.
        blocks: u64,
    },
    /// The place where the registry is.
    Moved(Moved),
}

/// Where a registry lies that has outgrown its first areas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Of this note, not of the registry.
    pub generation: u64,
    /// First block of area A; B is behind it.
    pub start: u64,
    /// Blocks of each area.
    pub blocks: u64,
}

impl Moved {
    /// The note's block.
    pub fn encode(&self, pool: Uuid) -> Vec<u8> {
        let mut out = vec![0u8; REGISTRY_HEADER_BYTES];
        put(&mut out, 24, &self.generation.to_le_bytes());
        put(&mut out, 40, &REGISTRY_FLAG_MOVED.to_le_bytes());
        put(&mut out, MOVED_AT, &self.start.to_le_bytes());
        put(&mut out, MOVED_AT + 8, &(self.blocks as u32).to_le_bytes());
        seal(&mut out, pool);
        out
    }
}

/// What is the same in every front: magic, pool, checksum, whole blocks.
fn seal(out: &mut Vec<u8>, pool: Uuid) {
    put(out, 0, &REGISTRY_MAGIC.to_le_bytes());
    put(out, 8, pool.as_bytes());
    let crc = crc_with_hole(out, CRC_AT);
    put(out, CRC_AT, &crc.to_le_bytes());
    out.resize(out.len().next_multiple_of(BLOCK_BYTES), 0);
}

/// A disk's record as registries hold it. Copies of a registry share it until one of them changes it: a
/// change is made in a copy, and thousands of disks that it does not touch are neither copied nor compared.
#[derive(Clone, Debug, Eq)]
pub struct SharedRecord(Arc<DiskRecord>);

impl From<DiskRecord> for SharedRecord {
    fn from(record: DiskRecord) -> SharedRecord {
        SharedRecord(Arc::new(record))
    }
}

impl Deref for SharedRecord {
    type Target = DiskRecord;

    fn deref(&self) -> &DiskRecord {
        &self.0
    }
}

impl DerefMut for SharedRecord {
    fn deref_mut(&mut self) -> &mut DiskRecord {
        Arc::make_mut(&mut self.0)
    }
}

impl PartialEq for SharedRecord {
    fn eq(&self, other: &SharedRecord) -> bool {
        self.is(other) || self.0 == other.0
    }
}

impl SharedRecord {
    /// True if it is the very same, so that there is nothing to compare.
    pub fn is(&self, other: &SharedRecord) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// The disks of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registry {
    /// Grows with every store; the larger one counts.
    pub generation: u64,
    /// Number the next new disk gets, if it is free.
    pub next_disk_id: u16,
    /// The disks; numbers and names unique.
    pub disks: Vec<SharedRecord>,
    /// Records of newer versions, carried along: kind and bytes.
    pub unknown_records: Vec<(u16, Vec<u8>)>,
}

impl Default for Registry {
    fn default() -> Registry {
        Registry {
            generation: 0,
            next_disk_id: 1,
            disks: Vec::new(),
            unknown_records: Vec::new(),
        }
    }
}

impl Registry {
    /// The disks that people know: those that are no files of datastores.
    pub fn plain_disks(&self) -> impl Iterator<Item = &SharedRecord> {
        self.disks.iter().filter(|record| !record.is_file())
    }

    /// The disk of this name.
    pub fn by_name(&self, name: &str) -> Option<&DiskRecord> {
        let mut all = self.disks.iter();
        all.find(|disk| disk.name == name).map(|disk| &**disk)
    }

    /// The disk of this number.
    pub fn by_id(&self, id: u16) -> Option<&DiskRecord> {
        self.disks.get(self.position(id)?).map(|disk| &**disk)
    }

    /// The disk of this number, to be changed.
    pub fn by_id_mut(&mut self, id: u16) -> Option<&mut DiskRecord> {
        let at = self.position(id)?;
        self.disks.get_mut(at).map(|disk| &mut **disk)
    }

    /// Where among the disks the one of this number stands.
    pub fn position(&self, id: u16) -> Option<usize> {
        // Disks stand in the order they were added, which is that of their numbers until the numbers have gone
        // round; whoever asks for every disk's record in turn should not walk through all of them each time.
        match self.disks.binary_search_by_key(&id, |disk| disk.id) {
            Ok(at) => Some(at),
            Err(_) => self.disks.iter().position(|disk| disk.id == id),
        }
    }

    /// A number no disk has, from `next_disk_id` on, wrapping past the end, so that a number is
    /// reused as late as possible. `None` if all are taken. `beside` are numbers that are promised or not
    /// free yet, although no disk of the registry has them.
    pub fn free_disk_id(&self, beside: impl Fn(u16) -> bool) -> Option<u16> {
        let mut taken = vec![false; usize::from(DISK_ID_MAX) + 1];
        for disk in &self.disks {
            if let Some(taken) = taken.get_mut(usize::from(disk.id)) {
                *taken = true;
            }
        }
        let first = match self.next_disk_id {
            id @ 1..=DISK_ID_MAX => id,
            _ => 1,
        };
        (first..=DISK_ID_MAX)
            .chain(1..first)
            .find(|id| taken.get(usize::from(*id)) == Some(&false) && !beside(*id))
    }

    /// A disk gets this number: the next one gets a later one.
    pub fn disk_id_taken(&mut self, id: u16) {
        self.next_disk_id = if id >= DISK_ID_MAX { 1 } else { id + 1 };
    }

    /// A number no disk has, which is taken.
    pub fn take_disk_id(&mut self) -> Option<u16> {
        let id = self.free_disk_id(|_| false)?;
        self.disk_id_taken(id);
        Some(id)
    }

    /// Checks the bounds and that numbers and names are unique.
    pub fn check(&self) -> Result<(), FormatError> {
        if self.disks.len() > DISKS_MAX {
            return Err(FormatError::wrong(
                WHAT,
                format!(
                    "{} disks, at most {DISKS_MAX} are allowed",
                    self.disks.len()
                ),
            ));
        }
        if self.unknown_records.len() > OTHER_RECORDS_MAX {
            return Err(FormatError::damaged(
                WHAT,
                "it has more than 256 unknown records",
            ));
        }
        if self
            .unknown_records
            .iter()
            .any(|(kind, _)| *kind == RECORD_DISK || kind & CRITICAL != 0)
        {
            return Err(FormatError::damaged(
                WHAT,
                "a record carried along has the kind of a known or critical one",
            ));
        }
        let mut ids = HashSet::with_capacity(self.disks.len());
        let mut names = HashSet::with_capacity(self.disks.len());
        for disk in &self.disks {
            disk.check()?;
            if !ids.insert(disk.id) {
                return Err(FormatError::wrong(
                    WHAT,
                    format!("two disks have the number {}", disk.id),
                ));
            }
            if !names.insert(disk.name.as_str()) {
                return Err(FormatError::wrong(
                    WHAT,
                    format!("two disks are named {:?}", disk.name),
                ));
            }
        }
        Ok(())
    }

    /// The bytes at the front of an area, padded with zeros to whole blocks, as every version reads
    /// them. Fails if they exceed the largest area or a record breaks a rule.
    pub fn encode(&self, pool: Uuid) -> Result<Vec<u8>, FormatError> {
        self.encode_base(pool, false)
    }

    /// The same; with `journal` as a base behind which changes may stand.
    pub fn encode_base(&self, pool: Uuid, journal: bool) -> Result<Vec<u8>, FormatError> {
        self.check()?;
        let mut out = vec![0u8; REGISTRY_HEADER_BYTES];
        for disk in &self.disks {
            let start = begin_record(&mut out);
            disk.encode(&mut out)?;
            end_record(&mut out, start, RECORD_DISK);
        }
        for (kind, bytes) in &self.unknown_records {
            let start = begin_record(&mut out);
            out.extend_from_slice(bytes);
            end_record(&mut out, start, *kind);
        }
        let used = out.len();
        if used > REGISTRY_BYTES_MAX {
            return Err(too_large(used, REGISTRY_BYTES_MAX));
        }
        let records = self.disks.len() + self.unknown_records.len();
        let flags = if journal { REGISTRY_FLAG_JOURNAL } else { 0 };
        put(&mut out, 24, &self.generation.to_le_bytes());
        put(
            &mut out,
            32,
            &((used - REGISTRY_HEADER_BYTES) as u32).to_le_bytes(),
        );
        put(&mut out, 36, &(records as u32).to_le_bytes());
        put(&mut out, 40, &flags.to_le_bytes());
        put(&mut out, 44, &self.next_disk_id.to_le_bytes());
        seal(&mut out, pool);
        Ok(out)
    }

    /// Reads a registry from the front of an area; one of another pool counts as absent.
    pub fn decode(bytes: &[u8], pool: Uuid) -> Result<Registry, FormatError> {
        match Front::decode(bytes, pool)? {
            Front::Base { registry, .. } => Ok(registry),
            Front::Moved(_) => Err(FormatError::NotFound { what: WHAT }),
        }
    }
}

impl Front {
    /// Bytes of the front of an area, told from its first block: not trusted yet, only bounded.
    /// `None` if no registry begins here.
    pub(crate) fn bytes(first_block: &[u8]) -> Option<usize> {
        let used = REGISTRY_HEADER_BYTES.saturating_add(u32_at(first_block, 32) as usize);
        (u32_at(first_block, 0) == REGISTRY_MAGIC && used <= REGISTRY_BYTES_MAX).then_some(used)
    }

    /// Its generation.
    pub fn generation(&self) -> u64 {
        match self {
            Front::Base { registry, .. } => registry.generation,
            Front::Moved(moved) => moved.generation,
        }
    }

    /// Reads the front of an area; one of another pool counts as absent.
    pub fn decode(bytes: &[u8], pool: Uuid) -> Result<Front, FormatError> {
        let Some(head) = bytes.first_chunk::<REGISTRY_HEADER_BYTES>() else {
            return Err(FormatError::damaged(WHAT, "fewer than 64 bytes"));
        };
        if u32_at(head, 0) != REGISTRY_MAGIC {
            return Err(FormatError::NotFound { what: WHAT });
        }
        let Some(covered) = Front::bytes(head).and_then(|used| bytes.get(..used)) else {
            return Err(FormatError::damaged(
                WHAT,
                "it claims to be larger than its area",
            ));
        };
        if u32_at(head, CRC_AT) != crc_with_hole(covered, CRC_AT) {
            return Err(FormatError::damaged(WHAT, "its checksum does not match"));
        }
        if array_at::<16>(head, 8) != *pool.as_bytes() {
            return Err(FormatError::NotFound { what: WHAT });
        }
        let flags = u32_at(head, 40);
        if flags & !REGISTRY_FLAGS_KNOWN != 0 {
            return Err(FormatError::Newer {
                what: WHAT,
                feature: format!("registry features {:#x}", flags & !REGISTRY_FLAGS_KNOWN),
            });
        }
        let count = u32_at(head, 36) as usize;
        if flags & REGISTRY_FLAG_MOVED != 0 {
            if flags != REGISTRY_FLAG_MOVED || count != 0 || covered.len() > head.len() {
                return Err(FormatError::damaged(
                    WHAT,
                    "it says that it lies elsewhere, and has records",
                ));
            }
            return Ok(Front::Moved(Moved {
                generation: u64_at(head, 24),
                start: u64_at(head, MOVED_AT),
                blocks: u64::from(u32_at(head, MOVED_AT + 8)),
            }));
        }
        if count > DISKS_MAX + OTHER_RECORDS_MAX {
            return Err(FormatError::damaged(WHAT, "it claims too many records"));
        }
        let mut registry = Registry {
            generation: u64_at(head, 24),
            next_disk_id: u16_at(head, 44),
            ..Registry::default()
        };
        let mut rest = covered.get(REGISTRY_HEADER_BYTES..).unwrap_or_default();
        for _ in 0..count {
            let (kind, body, after) = split_record(rest)?;
            rest = after;
            match kind {
                RECORD_DISK => registry.disks.push(DiskRecord::decode(body)?.into()),
                kind if kind & CRITICAL != 0 => {
                    return Err(FormatError::Newer {
                        what: WHAT,
                        feature: format!("record kind {kind:#06x}"),
                    });
                }
                kind => registry.unknown_records.push((kind, body.to_vec())),
            }
        }
        if !rest.is_empty() {
            return Err(FormatError::damaged(
                WHAT,
                "bytes are left behind its last record",
            ));
        }
        registry.check()?;
        Ok(Front::Base {
            registry,
            journal: flags & REGISTRY_FLAG_JOURNAL != 0,
            blocks: covered.len().div_ceil(BLOCK_BYTES) as u64,
        })
    }
}

/// A registry of `used` bytes where at most `max` fit.
pub(crate) fn too_large(used: usize, max: usize) -> FormatError {
    FormatError::Unfit {
        what: WHAT,
        why: Fault::new(
            format!("it has {used} bytes, and at most {max} fit on a flash device of this size"),
            "remove disks, shorten origins, or make the pool on a larger device",
        ),
    }
}

pub(crate) fn begin_record(out: &mut Vec<u8>) -> usize {
    let start = out.len();
    out.extend_from_slice(&[0; RECORD_HEADER]);
    start
}

pub(crate) fn end_record(out: &mut [u8], start: usize, kind: u16) {
    let len = out.len().saturating_sub(start + RECORD_HEADER) as u32;
    put(out, start, &kind.to_le_bytes());
    put(out, start + 4, &len.to_le_bytes());
}

pub(crate) fn split_record(rest: &[u8]) -> Result<(u16, &[u8], &[u8]), FormatError> {
    let short = || FormatError::damaged(WHAT, "a record is cut short");
    let (header, rest) = rest
        .split_first_chunk::<RECORD_HEADER>()
        .ok_or_else(short)?;
    let (body, rest) = rest
        .split_at_checked(u32_at(header, 4) as usize)
        .ok_or_else(short)?;
    Ok((u16_at(header, 0), body, rest))
}
