//! Getting what is dirty off a pool that nobody serves: read-only, from flash that may be damaged.
//!
//! A dead host's pool is imported on another one. This is for when that does not do: the device can only be read, parts
//! of it cannot be read at all, or the origin is to be put right without Hearth. What is found is checked against
//! its checksum, and what cannot be trusted is left out and told, block by block. Nothing is guessed: where the log
//! itself is damaged, so that an older state may have come out of it, that is said as well.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_engine::api::{DiskId, Home};
use hearth_engine::{Engine, EngineOptions, KnownDisk, Owed};
use hearth_format::superblock::{INCOMPAT_HEADS, INCOMPAT_MAP};
use hearth_format::{DiskRecord, FormatError, Places, Registry, Superblock};
use hearth_io::checksum::crc32c;
use hearth_io::file::sync_names;
use hearth_io::{BLOCK, BlockFile, Buf, Device, Media, OpenMode};
use serde::Serialize;

use crate::beside::Beside;
use crate::error::{Error, Kind, Result};
use crate::inspect::Unwritten;
use crate::memory;
use crate::pool::devices::{self, FlashDevices};
use crate::pool::{format_error, layout, opening};
use crate::size::human;

mod onto;

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

    /// Its disks.
    pub fn disks(&self) -> Vec<Found> {
        let disks = self.registry.disks.iter();
        let found = disks.map(|record| Found {
            disk: record.name.clone(),
            origin: record.origin.clone(),
            size: record.size,
            dirty: self
                .engine
                .status(record.id)
                .map_or(0, |status| status.owed_bytes()),
            left: self.left.contains(&record.id),
        });
        found.collect()
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
        let mut disks = self.registry.disks.iter();
        let record = disks.find(|record| record.name == disk);
        let record = record.ok_or_else(|| Error::no_disk(disk))?;
        let mut doubts = self.doubts.clone();
        if self.left.contains(&record.id) {
            let left = format!(
                "disk {disk} was, or may have been, served without this flash: its origin may be newer than what is here"
            );
            if matches!(to, To::Onto(_)) && !force {
                return Err(Error::refused(
                    left,
                    "compare first, with --to FILE; to overwrite the origin nevertheless, add --force",
                ));
            }
            doubts.push(left);
        }
        let targets = match to {
            To::File(path) => vec![Target::make(path, record)?],
            To::Onto(paths) => {
                doubts.extend(onto::check(record, paths, force)?);
                let open = |path: &PathBuf| Target::open(path, record, false);
                paths.iter().map(open).collect::<Result<_>>()?
            }
        };
        let names = targets
            .iter()
            .map(|target| target.path.display().to_string());
        let mut report = Report {
            disk: disk.to_owned(),
            to: names.collect::<Vec<_>>().join(" and "),
            doubts,
            ..Report::default()
        };
        let total = self
            .engine
            .status(record.id)
            .map_or(0, |status| status.owed_bytes());
        let written = self.write_blocks(record, &targets, total, &mut report, progress);
        if let (Err(_), To::File(path)) = (&written, to) {
            // Half of it would be taken for all of it.
            let _ = std::fs::remove_file(path);
        }
        written.map(|()| report)
    }

    fn write_blocks(
        &self,
        record: &DiskRecord,
        targets: &[Target],
        total: u64,
        report: &mut Report,
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<()> {
        let mut buf = Buf::zeroed(BLOCK as usize).all();
        let mut flash = self.flash.joined();
        let (mut from, mut done) = (0, 0);
        loop {
            let blocks = self.engine.owed(record.id, from, BLOCKS_MAX);
            let Some((last, _)) = blocks.last() else {
                break;
            };
            from = last + 1;
            for (block, place) in blocks {
                let offset = block * BLOCK;
                let len = BLOCK.min(record.size.saturating_sub(offset));
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
        targets.iter().try_for_each(Target::finish)
    }
}

/// What the engine makes of the log. Damage is a doubt, not an end.
fn read_log(
    flash: &Path,
    device: &FlashDevices,
    superblock: &Superblock,
    known: &[KnownDisk],
    doubts: &mut Vec<String>,
) -> Result<Engine> {
    let open = |accept_damage| {
        let options = EngineOptions {
            accept_damage,
            ram_stage: Some(0),
            prefetch: false,
            trim: false,
            ..EngineOptions::default()
        };
        let mut media = Unwritten::over(device);
        // As it is, or as it was concluded.
        let mut stored = superblock.clone();
        stored
            .store(&mut media)
            .map_err(hearth_engine::OpenError::Format)?;
        Engine::open(&mut media, options, known)
    };
    let opened = match open(false) {
        Ok(opened) => Ok(opened),
        Err(e) => {
            doubts.push(format!(
                "the log is damaged ({e}): of any disk, what was written last may be missing, and what is here in its place older; which blocks these are cannot be known"
            ));
            open(true)
        }
    };
    let (engine, report) =
        opened.map_err(|e| Error::of(Kind::Unavailable, e.fault().within(flash.display())))?;
    if report.discarded > 0 {
        doubts.push(format!(
            "the end of the log is not whole, as after a power cut: {} batches written last do not count; a guest was told of none of them that they are durable, unless the device has lost what it had made durable",
            report.discarded
        ));
    }
    Ok(engine)
}

/// The superblock of a pool that has lost both of its own.
fn concluded(flash: &Path, size: u64, beside: &Beside) -> Result<Superblock> {
    let notes = beside.notes();
    if notes.flash.contains('\n') {
        return Err(Error::refused(
            format!(
                "the superblocks of {} cannot be read, and its pool has several devices ({}): what lies where is not known",
                flash.display(),
                crate::beside::listed(&notes.flash)
            ),
            "put a copy of the device in its place whose superblock can be read",
        ));
    }
    let mut superblock = Superblock::new(
        layout(flash, size)?,
        notes.pool,
        notes.device,
        &notes.label,
        notes.device_created,
    );
    superblock.generation = notes.opened;
    // A log of one head reads the same by the rules of two, but for batches that failed in its last run.
    superblock.incompat = INCOMPAT_MAP | INCOMPAT_HEADS;
    Ok(superblock)
}

fn check_memory(superblock: &Superblock) -> Result<()> {
    let need = Engine::footprint(superblock.layout.slots(), Some(0));
    match memory::available().filter(|free| need > *free) {
        None => Ok(()),
        Some(free) => Err(Error::unavailable(
            format!(
                "reading the log needs {} of RAM, and {} are free",
                human(need),
                human(free)
            ),
            "end other programs, or do it on a larger machine",
        )),
    }
}

/// Where blocks go.
struct Target {
    path: PathBuf,
    file: BlockFile,
    new: bool,
}

impl Target {
    /// A new file.
    fn make(path: &Path, record: &DiskRecord) -> Result<Target> {
        let made = std::fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(path)
            .and_then(|file| file.set_len(record.size));
        made.map_err(|e| {
            Error::unavailable(
                format!("cannot make {}: {e}", path.display()),
                "give the name of a file that is not there, where there is room",
            )
        })?;
        Target::open(path, record, true)
    }

    fn open(path: &Path, record: &DiskRecord, new: bool) -> Result<Target> {
        // Somebody else who uses it is noticed here.
        let file = BlockFile::open(path, OpenMode::default()).map_err(|e| opening(path, e))?;
        if file.size() < record.size {
            return Err(Error::refused(
                format!(
                    "{} has {} bytes, and disk {} has {}",
                    path.display(),
                    file.size(),
                    record.name,
                    record.size
                ),
                "give what holds all of the disk's origin",
            ));
        }
        Ok(Target {
            path: path.to_owned(),
            file,
            new,
        })
    }

    fn failed(&self, e: &std::io::Error) -> Error {
        Error::unavailable(
            format!("cannot write {}: {e}", self.path.display()),
            "check free space and the device's health",
        )
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        let written = self.file.write_at(offset, data);
        written.map_err(|e| self.failed(&e))
    }

    fn finish(&self) -> Result<()> {
        let done = self.file.flush();
        let done = done.and_then(|()| match self.new {
            true => sync_names(&self.path),
            false => Ok(()),
        });
        done.map_err(|e| self.failed(&e))
    }
}
