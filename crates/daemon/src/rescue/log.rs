//! What a device that may be damaged tells: where things are on it, and what the log holds.

use std::path::Path;

use hearth_engine::{Engine, EngineOptions, KnownDisk};
use hearth_format::Superblock;
use hearth_format::superblock::{INCOMPAT_HEADS, INCOMPAT_MAP};

use crate::beside::Beside;
use crate::error::{Error, Kind, Result};
use crate::inspect::Unwritten;
use crate::memory;
use crate::pool::devices::FlashDevices;
use crate::pool::layout;
use crate::size::human;

/// What the engine makes of the log. Damage is a doubt, not an end.
pub(super) fn read_log(
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
            "the end of the log is not whole, as after a power cut: what was written last to {} segments does not count; a guest was told of none of it that it is durable, unless the device has lost what it had made durable",
            report.discarded
        ));
    }
    Ok(engine)
}

/// The superblock of a pool that has lost both of its own.
pub(super) fn concluded(flash: &Path, size: u64, beside: &Beside) -> Result<Superblock> {
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

pub(super) fn check_memory(superblock: &Superblock) -> Result<()> {
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
