//! Getting what is dirty off a pool that nobody serves: read-only, from flash that may be damaged.
//!
//! A dead host's pool is imported on another one. This is for when that does not do: the device can only be read, parts
//! of it cannot be read at all, or the origin is to be put right without Hearth. What is found is checked against
//! its checksum, and what cannot be trusted is left out and told, block by block. Nothing is guessed: where the log
//! itself is damaged, so that an older state may have come out of it, that is said as well.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_engine::api::{DiskId, Home};
use hearth_engine::{Engine, KnownDisk, Owed};
use hearth_format::{DiskRecord, FormatError, Places, Registry, Superblock};
use hearth_io::checksum::crc32c;
use hearth_io::{BLOCK, BlockFile, Buf, Device, Media, OpenMode};
use serde::Serialize;

use crate::beside::Beside;
use crate::error::{Error, Kind, Result};
use crate::inspect::Unwritten;
use crate::pool::devices::{self, FlashDevices};
use crate::pool::{format_error, opening};
use crate::size::human;

mod files;
mod log;
mod onto;
mod target;

use files::Spot;
use log::{check_memory, concluded, read_log};
use target::Target;

/// Blocks that are asked for at once.
const BLOCKS_MAX: usize = 4096;
/// Ranges of a disk that are told one by one; of more, only their bytes are.
pub const RANGES_MAX: usize = 10_000;

/// A pool that is only read.
pub struct Rescue {
    flash: FlashDevices,
    engine: Engine,
    registry: Registry,
    doubts: Vec<String>,
    /// Disks whose origins went on without this flash.
    left: Vec<DiskId>,
}

/// A disk of such a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Found {
    /// Its name.
    pub disk: String,
    /// Of a file of a datastore, its path there: `vms/a.img`. It is named by that, too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Of such a file, where it is; in both directories, if the datastore has two.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Of such a file, why that is not known. Its size then is a guess.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lost: Option<String>,
    /// Its origin's name.
    pub origin: String,
    /// Its size in bytes.
    pub size: u64,
    /// Bytes that the origin does not have, zeros included.
    pub dirty: u64,
    /// The origin may be newer than what is here.
    pub left: bool,
}

/// A range of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Range {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// What came of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Its name.
    pub disk: String,
    /// Where it was written.
    pub to: String,
    /// Bytes written that were checked.
    pub written: u64,
    /// Of these, zeros.
    pub zeros: u64,
    /// What was written.
    pub ranges: Vec<Range>,
    /// What is dirty and could not be trusted: it was not written.
    pub untrusted: Vec<Range>,
    /// Bytes of that.
    pub untrusted_bytes: u64,
    /// There are more ranges than are listed.
    pub shortened: bool,
    /// What may be wrong with all of it.
    pub doubts: Vec<String>,
}

/// Where a disk is written.
#[derive(Clone, Debug)]
pub enum To {
    /// A new file of the disk's size, with holes where the origin has what counts.
    File(PathBuf),
    /// Over what is there: files or block devices with the origin's content, of a mirror all of its legs.
    Onto(Vec<PathBuf>),
}

fn note(ranges: &mut Vec<Range>, shortened: &mut bool, offset: u64, len: u64) {
    let full = ranges.len() >= RANGES_MAX;
    match ranges.last_mut() {
        Some(last) if last.offset + last.len == offset => last.len += len,
        _ if full => *shortened = true,
        _ => ranges.push(Range { offset, len }),
    }
}

impl Rescue {
    /// Opens a pool for reading. What its flash does not tell of itself any more is taken from what was kept beside it in
    /// `state_dir`.
    pub fn open(paths: &[PathBuf], state_dir: &Path) -> Result<Rescue> {
        let mode = OpenMode {
            read_only: true,
            unlocked: false,
        };
        let flash = match paths {
            [flash] => flash.as_path(),
            // Of several all have to say whose they are, so that it is certain what lies where.
            several => {
                let opened = devices::open(several, mode)?;
                let first = opened.flash.paths();
                let first = first.first().cloned().unwrap_or_default();
                return Self::of(&first, opened.flash, state_dir);
            }
        };
        let file = BlockFile::open(flash, mode).map_err(|e| opening(flash, e))?;
        let device = Arc::new(Device::new(file));
        if Superblock::load(&mut device.clone()).is_ok_and(|sb| sb.is_twice()) {
            // It has everything, if the other is the one that is missing.
            drop(device);
            let opened = devices::open(paths, mode)?;
            return Self::of(flash, opened.flash, state_dir);
        }
        Self::of(flash, FlashDevices::one(device), state_dir)
    }

    fn of(flash: &Path, device: FlashDevices, state_dir: &Path) -> Result<Rescue> {
        let mut media = Unwritten::over(&device);
        let mut doubts = Vec::new();
        let failed = |e: FormatError| format_error(flash, &e);
        let (superblock, beside) = match Superblock::load(&mut media) {
            Ok(superblock) if usize::from(superblock.device_count) != device.iter().count() => {
                return Err(devices::incomplete(flash, &superblock));
            }
            Ok(superblock) => {
                let beside = Beside::look(state_dir, &superblock.pool)?;
                (superblock, beside)
            }
            Err(e @ (FormatError::Newer { .. } | FormatError::TruncatedDevice { .. })) => {
                return Err(failed(e));
            }
            Err(e) => {
                let Some(pool) = crate::beside::pool_at(state_dir, flash)? else {
                    return Err(failed(e));
                };
                let Some(beside) = Beside::look(state_dir, &pool)? else {
                    return Err(failed(e));
                };
                doubts.push(format!(
                    "no superblock can be read ({e}): where things are is concluded from the device's size"
                ));
                let size = device.first().map_or(0, |first| first.size());
                let superblock = concluded(flash, size, &beside)?;
                let mut stored = superblock.clone();
                stored.store(&mut media).map_err(failed)?;
                (superblock, Some(beside))
            }
        };
        let places = Places::load(&mut media, &superblock.layout, superblock.pool);
        let registry = match (places, &beside) {
            (Ok((registry, _)), None) => registry,
            (Ok((registry, _)), Some(beside)) => {
                match beside.says(|n| n.alone && n.device == superblock.device) {
                    true => beside.registry(),
                    false => registry,
                }
            }
            (Err(e), None) => return Err(failed(e)),
            (Err(e), Some(beside)) => {
                doubts.push(format!(
                    "the registry cannot be read ({e}): that kept in {} is used, which may lack what a disk was last removed or emptied with",
                    beside.path().display()
                ));
                beside.registry()
            }
        };
        let mut left: Vec<DiskId> = Vec::new();
        for record in &registry.disks {
            let noted = beside.as_ref().is_some_and(|b| {
                b.says(|n| n.device != superblock.device || n.left.contains(record.id))
            });
            if noted || crate::origin::is_distrusted(record) {
                left.push(record.id);
            }
        }
        let known: Vec<KnownDisk> = registry
            .disks
            .iter()
            .map(|d| KnownDisk {
                id: d.id,
                size: d.size,
                since_seq: d.since_seq,
                home: match d.is_flash_only() {
                    // What a crash left of a scratch disk may be just what is looked for.
                    true => Home::Flash,
                    false => Home::Origin,
                },
            })
            .collect();
        check_memory(&superblock)?;
        let engine = read_log(flash, &device, &superblock, &known, &mut doubts)?;
        Ok(Rescue {
            flash: device,
            engine,
            registry,
            doubts,
            left,
        })
    }

    /// What may be wrong with all that is found here.
    pub fn doubts(&self) -> &[String] {
        &self.doubts
    }

    /// Its disks. Files of datastores are looked for.
    pub fn disks(&self) -> Vec<Found> {
        let spots = files::find(&self.registry, &|_| true);
        let disks = self.registry.disks.iter();
        let found = disks.map(|record| {
            let spot = spots.get(&record.id);
            Found {
                disk: record.name.clone(),
                path: spot.and_then(|spot| spot.path.clone()),
                file: spot.and_then(Spot::shown),
                lost: spot.and_then(Spot::lost),
                origin: record.origin.clone(),
                size: spot.map_or(record.size, |spot| self.size_of(record, spot)),
                dirty: self.owed(record.id),
                left: self.left.contains(&record.id),
            }
        });
        found.collect()
    }

    fn owed(&self, disk: DiskId) -> u64 {
        let status = self.engine.status(disk);
        status.map_or(0, |status| status.owed_bytes())
    }

    /// Bytes of a file of a datastore. The record's are none of its own, but room for it to grow; of one that is not found,
    /// as many as are known of.
    fn size_of(&self, record: &DiskRecord, spot: &Spot) -> u64 {
        spot.size.unwrap_or_else(|| {
            let left = record.origin_identity.map_or(0, |left| left.size);
            let (mut from, mut end) = (0, 0);
            loop {
                let blocks = self.engine.owed(record.id, from, BLOCKS_MAX);
                let Some((last, _)) = blocks.last() else {
                    break left.max(end);
                };
                from = last + 1;
                let data = blocks.iter().rfind(|(_, place)| *place != Owed::Zeros);
                end = data.map_or(end, |(block, _)| (block + 1) * BLOCK);
            }
        })
    }

    /// The disk of this name, or of the file with this path in its datastore.
    fn named(&self, disk: &str) -> Result<&DiskRecord> {
        let by_path = || files::by_path(&self.registry, disk);
        let mut disks = self.registry.disks.iter();
        let record = disks.find(|record| record.name == disk);
        let record = record.or_else(|| {
            let id = by_path()?;
            self.registry.disks.iter().find(|record| record.id == id)
        });
        record.map(|record| &**record).ok_or_else(|| {
            Error::new(
                Kind::NotFound,
                format!("there is no disk {disk} on this flash, nor anything of a file of that path in a datastore"),
                "run `hearth rescue` without --disk for those there are",
            )
        })
    }

    /// Opens what a disk is written to. What there is to doubt is added.
    fn targets(
        &self,
        record: &DiskRecord,
        (name, spot): (&str, Option<&Spot>),
        to: &To,
        force: bool,
        doubts: &mut Vec<String>,
    ) -> Result<Vec<Target>> {
        match (to, spot) {
            (To::File(path), None) => Ok(vec![Target::make(path, record.size)?]),
            (To::File(path), Some(spot)) => {
                if let Some(lost) = spot.lost() {
                    doubts.push(format!(
                        "the file of disk {name} is {lost}: how long it is, is not known, and what is written may end too early or too late"
                    ));
                }
                Ok(vec![Target::make(path, self.size_of(record, spot))?])
            }
            (To::Onto(paths), None) => {
                doubts.extend(onto::check(record, paths, force)?);
                let open = |path: &PathBuf| Target::over(path, name, record.size);
                paths.iter().map(open).collect()
            }
            (To::Onto(paths), Some(spot)) => {
                doubts.extend(spot.check(record, name, paths, force)?);
                paths.iter().map(|path| Target::as_it_is(path)).collect()
            }
        }
    }

    /// Writes what is dirty of a disk. `force`: although the origin may be newer. `progress` is told how many bytes of how
    /// many are done, and calls it off by returning false.
    pub fn write(
        &self,
        disk: &str,
        to: &To,
        force: bool,
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<Report> {
        let record = self.named(disk)?;
        let spot = record.is_file().then(|| {
            let spot = files::find(&self.registry, &|other| other.id == record.id);
            spot.into_values().next().unwrap_or_default()
        });
        let path = spot.as_ref().and_then(|spot| spot.path.as_deref());
        let name = path.unwrap_or(&record.name);
        let mut doubts = self.doubts.clone();
        if self.left.contains(&record.id) {
            let left = format!(
                "disk {name} was, or may have been, served without this flash: its origin may be newer than what is here"
            );
            if matches!(to, To::Onto(_)) && !force {
                return Err(Error::refused(
                    left,
                    "compare first, with --to FILE; to overwrite the origin nevertheless, add --force",
                ));
            }
            doubts.push(left);
        }
        let targets = self.targets(record, (name, spot.as_ref()), to, force, &mut doubts)?;
        let names = targets
            .iter()
            .map(|target| target.path.display().to_string());
        let mut report = Report {
            disk: name.to_owned(),
            to: names.collect::<Vec<_>>().join(" and "),
            doubts,
            ..Report::default()
        };
        let total = self.owed(record.id);
        let written = self.write_blocks(record.id, &targets, total, &mut report, progress);
        if let (Err(_), To::File(path)) = (&written, to) {
            // Half of it would be taken for all of it.
            let _ = std::fs::remove_file(path);
        }
        written.map(|()| report)
    }

    fn write_blocks(
        &self,
        disk: DiskId,
        targets: &[Target],
        total: u64,
        report: &mut Report,
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<()> {
        let mut buf = Buf::zeroed(BLOCK as usize).all();
        let mut flash = self.flash.joined();
        // A disk ends where its origin does, and so does a file, whatever may be cached behind.
        let end = targets.iter().map(Target::end).max().unwrap_or(0);
        let (mut from, mut done, mut behind) = (0, 0, 0);
        loop {
            let blocks = self.engine.owed(disk, from, BLOCKS_MAX);
            let Some((last, _)) = blocks.last() else {
                break;
            };
            from = last + 1;
            for (block, place) in blocks {
                let offset = block * BLOCK;
                let len = BLOCK.min(end.saturating_sub(offset));
                if len == 0 {
                    done += BLOCK;
                    // Nothing but zeros is there that would be shown if the file grew.
                    behind += if place == Owed::Zeros { 0 } else { BLOCK };
                    continue;
                }
                let trusted = match place {
                    Owed::Zeros => {
                        buf.bytes_mut().fill(0);
                        true
                    }
                    Owed::Flash(at, crc) => {
                        let read = flash.read_at(at, buf.bytes_mut()).is_ok();
                        // Else the other half has it, if there is one.
                        read && crc32c(buf.bytes()) == crc
                            || flash.read_other(at, buf.bytes_mut()).unwrap_or(false)
                                && crc32c(buf.bytes()) == crc
                    }
                    Owed::Nowhere => false,
                };
                done += BLOCK;
                if !trusted {
                    report.untrusted_bytes += len;
                    note(&mut report.untrusted, &mut report.shortened, offset, len);
                    continue;
                }
                let bytes = buf.bytes().get(..len as usize).unwrap_or_default();
                for target in targets {
                    target.write(offset, bytes)?;
                }
                report.written += len;
                report.zeros += if place == Owed::Zeros { len } else { 0 };
                note(&mut report.ranges, &mut report.shortened, offset, len);
            }
            if !progress(done, total) {
                return Err(Error::unavailable(
                    "interrupted",
                    "run the command again: it begins anew, and what was written over an origin stays",
                ));
            }
        }
        if behind > 0 {
            report.doubts.push(format!(
                "{} lie behind the end of the file and were not written: a power cut leaves them of writes of which no client was told that they are durable; if somebody has cut the file since, they are of what was cut off",
                human(behind)
            ));
        }
        targets.iter().try_for_each(Target::finish)
    }
}
