//! The registry: which disks a pool caches, and how.
//!
//! It makes a pool self-describing: carried to another host, the pool still knows its disks.
//! A change is a whole new registry, stored twice in turn, so that a crash leaves the old or
//! the new one, and rot in one area cannot bring back a change that was undone (which would
//! make void log records count again).

use crate::BLOCK_BYTES;
use crate::disk::{CRITICAL, DISK_ID_MAX, DiskRecord};
use crate::error::FormatError;
use crate::layout::{Layout, REGISTRY_AREA_BLOCKS, REGISTRY_BLOCKS};
use crate::wire::{array_at, crc_with_hole, put, u16_at, u32_at, u64_at};
use hearth_io::Media;
use std::collections::HashSet;
use uuid::Uuid;

/// `"HREG"` read as a little-endian number.
pub const REGISTRY_MAGIC: u32 = u32::from_le_bytes(*b"HREG");
/// Bytes before the first record.
pub const REGISTRY_HEADER_BYTES: usize = 64;
/// Most bytes of a registry: one area.
pub const REGISTRY_BYTES_MAX: usize = REGISTRY_AREA_BLOCKS as usize * BLOCK_BYTES;
/// Most disks of a pool.
pub const DISKS_MAX: usize = 4096;
/// Most records a registry may carry besides disks.
pub const OTHER_RECORDS_MAX: usize = 256;
/// Flag bits this version knows. Any other bit changes what the registry means.
pub const REGISTRY_FLAGS_KNOWN: u32 = 0;

const WHAT: &str = "registry";
const CRC_AT: usize = 4;
const RECORD_HEADER: usize = 8;
const RECORD_DISK: u16 = 1;

/// The disks of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registry {
    /// Grows with every store; the larger one counts.
    pub generation: u64,
    /// Number the next new disk gets, if it is free.
    pub next_disk_id: u16,
    /// The disks; numbers and names unique.
    pub disks: Vec<DiskRecord>,
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
    /// The disk of this name.
    pub fn by_name(&self, name: &str) -> Option<&DiskRecord> {
        self.disks.iter().find(|disk| disk.name == name)
    }

    /// The disk of this number.
    pub fn by_id(&self, id: u16) -> Option<&DiskRecord> {
        self.disks.iter().find(|disk| disk.id == id)
    }

    /// A number no disk has, from `next_disk_id` on, wrapping past the end; advances
    /// `next_disk_id`, so that a number is reused as late as possible. `None` if all are taken.
    pub fn take_disk_id(&mut self) -> Option<u16> {
        let taken: HashSet<u16> = self.disks.iter().map(|disk| disk.id).collect();
        let mut id = match self.next_disk_id {
            id @ 1..=DISK_ID_MAX => id,
            _ => 1,
        };
        for _ in 1..=DISK_ID_MAX {
            let next = if id == DISK_ID_MAX { 1 } else { id + 1 };
            if !taken.contains(&id) {
                self.next_disk_id = next;
                return Some(id);
            }
            id = next;
        }
        None
    }

    /// Checks the bounds and that numbers and names are unique.
    pub fn check(&self) -> Result<(), FormatError> {
        if self.disks.len() > DISKS_MAX {
            return Err(FormatError::wrong(
                WHAT,
                format!("{} disks, at most 4096 are allowed", self.disks.len()),
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

    /// The bytes of an area, padded with zeros to whole blocks. Fails if they exceed the area
    /// (1 MiB: some 4096 disks with short origins) or a record breaks a rule.
    pub fn encode(&self, pool: Uuid) -> Result<Vec<u8>, FormatError> {
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
            return Err(FormatError::unfit(
                WHAT,
                format!(
                    "it has {used} bytes, at most {REGISTRY_BYTES_MAX} fit; remove disks or shorten origins"
                ),
            ));
        }
        let records = self.disks.len() + self.unknown_records.len();
        put(&mut out, 0, &REGISTRY_MAGIC.to_le_bytes());
        put(&mut out, 8, pool.as_bytes());
        put(&mut out, 24, &self.generation.to_le_bytes());
        put(
            &mut out,
            32,
            &((used - REGISTRY_HEADER_BYTES) as u32).to_le_bytes(),
        );
        put(&mut out, 36, &(records as u32).to_le_bytes());
        put(&mut out, 44, &self.next_disk_id.to_le_bytes());
        let crc = crc_with_hole(&out, CRC_AT);
        put(&mut out, CRC_AT, &crc.to_le_bytes());
        out.resize(used.next_multiple_of(BLOCK_BYTES), 0);
        Ok(out)
    }

    /// Reads an area; a registry of another pool counts as absent.
    pub fn decode(bytes: &[u8], pool: Uuid) -> Result<Registry, FormatError> {
        let Some(head) = bytes.first_chunk::<REGISTRY_HEADER_BYTES>() else {
            return Err(FormatError::damaged(WHAT, "fewer than 64 bytes"));
        };
        if u32_at(head, 0) != REGISTRY_MAGIC {
            return Err(FormatError::NotFound { what: WHAT });
        }
        let body_len = u32_at(head, 32) as usize;
        let covered = match body_len.checked_add(REGISTRY_HEADER_BYTES) {
            Some(used) if used <= REGISTRY_BYTES_MAX => bytes.get(..used),
            _ => None,
        };
        let Some(covered) = covered else {
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
        let flags = u32_at(head, 40) & !REGISTRY_FLAGS_KNOWN;
        if flags != 0 {
            return Err(FormatError::Newer {
                what: WHAT,
                feature: format!("registry features {flags:#x}"),
            });
        }
        let count = u32_at(head, 36) as usize;
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
                RECORD_DISK => registry.disks.push(DiskRecord::decode(body)?),
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
        Ok(registry)
    }

    /// Reads both areas and returns the newest valid registry of `pool`.
    ///
    /// A torn or damaged area is passed over if the other is good. An intact one that needs a
    /// newer version stops everything.
    pub fn load(
        media: &mut dyn Media,
        layout: &Layout,
        pool: Uuid,
    ) -> Result<Registry, FormatError> {
        let mut best: Option<Registry> = None;
        let mut failure: Option<FormatError> = None;
        for area in 0..REGISTRY_BLOCKS.len() {
            match read_area(media, layout, area, pool) {
                Ok(found) => {
                    if best
                        .as_ref()
                        .is_none_or(|b| found.generation > b.generation)
                    {
                        best = Some(found);
                    }
                }
                Err(newer @ FormatError::Newer { .. }) => return Err(newer),
                Err(other) => {
                    if failure.as_ref().is_none_or(FormatError::is_absent) {
                        failure = Some(other);
                    }
                }
            }
        }
        best.ok_or_else(|| failure.unwrap_or(FormatError::NotFound { what: WHAT }))
    }

    /// Stores the next generation in both areas, one after the other, each followed by a flush;
    /// when it returns `Ok`, both are durable.
    ///
    /// Which area goes first alternates with the generation. After a crash between the two, the
    /// torn area is the first of the next store; and should the area to be written second be
    /// unreadable, it goes first: the only good copy is never the one at risk.
    /// On an error the old registry or the new one is found later; `self` is unchanged.
    pub fn store(
        &mut self,
        media: &mut dyn Media,
        layout: &Layout,
        pool: Uuid,
    ) -> Result<(), FormatError> {
        let Some(generation) = self.generation.checked_add(1) else {
            return Err(FormatError::unfit(WHAT, "its generation is at its end"));
        };
        let next = Registry {
            generation,
            ..self.clone()
        };
        let bytes = next.encode(pool)?;
        let mut first = (generation % 2) as usize;
        if read_area(media, layout, 1 - first, pool).is_err() {
            first = 1 - first;
        }
        for area in [first, 1 - first] {
            let io = |source| FormatError::Io {
                doing: "writing the registry",
                source,
            };
            media
                .write_at(area_offset(layout, area)?, &bytes)
                .map_err(io)?;
            media.flush().map_err(io)?;
        }
        self.generation = generation;
        Ok(())
    }
}

fn area_offset(layout: &Layout, area: usize) -> Result<u64, FormatError> {
    match REGISTRY_BLOCKS.get(area) {
        Some(block) if block + REGISTRY_AREA_BLOCKS <= layout.checkpoint_start => {
            Ok(block * BLOCK_BYTES as u64)
        }
        _ => Err(FormatError::damaged(
            WHAT,
            "its area overlaps the checkpoint area",
        )),
    }
}

fn read_area(
    media: &mut dyn Media,
    layout: &Layout,
    area: usize,
    pool: Uuid,
) -> Result<Registry, FormatError> {
    let io = |source| FormatError::Io {
        doing: "reading the registry",
        source,
    };
    let offset = area_offset(layout, area)?;
    let mut bytes = vec![0u8; BLOCK_BYTES];
    media.read_at(offset, &mut bytes).map_err(io)?;
    // The length is not trusted yet, only bounded; the checksum judges it.
    let used = REGISTRY_HEADER_BYTES.saturating_add(u32_at(&bytes, 32) as usize);
    if u32_at(&bytes, 0) == REGISTRY_MAGIC && used > BLOCK_BYTES && used <= REGISTRY_BYTES_MAX {
        bytes.resize(used.next_multiple_of(BLOCK_BYTES), 0);
        media.read_at(offset, &mut bytes).map_err(io)?;
    }
    Registry::decode(&bytes, pool)
}

fn begin_record(out: &mut Vec<u8>) -> usize {
    let start = out.len();
    out.extend_from_slice(&[0; RECORD_HEADER]);
    start
}

fn end_record(out: &mut [u8], start: usize, kind: u16) {
    let len = out.len().saturating_sub(start + RECORD_HEADER) as u32;
    put(out, start, &kind.to_le_bytes());
    put(out, start + 4, &len.to_le_bytes());
}

fn split_record(rest: &[u8]) -> Result<(u16, &[u8], &[u8]), FormatError> {
    let short = || FormatError::damaged(WHAT, "a record is cut short");
    let (header, rest) = rest
        .split_first_chunk::<RECORD_HEADER>()
        .ok_or_else(short)?;
    let (body, rest) = rest
        .split_at_checked(u32_at(header, 4) as usize)
        .ok_or_else(short)?;
    Ok((u16_at(header, 0), body, rest))
}
