//! A start at which one of several flash devices is missing, of a pool that keeps everything once. One that is an
//! older copy counts as missing.
//!
//! If the pool was closed in order, its first device has a checkpoint, and that tells what was where. When nothing dirty was on flash at all, the
//! missing device took nothing with it but clean copies: the pool goes on without it, colder. From then on that device is none of its
//! devices any more, and is refused if it comes back, however little it missed. With anything dirty on flash it is left as it is: perhaps the
//! device is only late, and what is dirty there must not be given up unasked.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_engine::{Engine, EngineOptions, Hindrance, KnownDisk, LeftWithout};
use hearth_format::change;
use hearth_format::devices::judge;
use hearth_format::{FormatError, Misfit, Places, Superblock};
use hearth_io::{BLOCK, BlockFile, Device, Joined, OpenMode};

use super::devices::Missing;
use super::opening;
use crate::beside::pool_at;
use crate::error::{Error, Result};
use crate::size::human;

/// How a pool goes on.
pub(crate) struct Rest {
    /// The devices that are left.
    pub flash: Vec<PathBuf>,
    /// The one that is not, as it was named.
    pub device: String,
    /// Blocks cached on the others.
    pub kept_blocks: u64,
    /// What was lost, in words.
    pub words: String,
}

/// One that is there, and what it says.
struct There {
    path: PathBuf,
    superblock: Superblock,
    device: Arc<Device>,
}

/// Takes a missing device out of the pool if nothing needs it. `None`: this is no such case, or it is not known whose; an error says why the pool
/// cannot go on.
pub(crate) fn go_on(paths: &[PathBuf], state_dir: &Path) -> Result<Option<Rest>> {
    let (mut there, mut gone) = (Vec::new(), Vec::new());
    for path in paths {
        match look(path) {
            Ok(Some(found)) => there.push(found),
            Ok(None) => gone.push(path),
            // In use, of a newer version, or something else: its name may have gone to another one.
            Err(_) => return Ok(None),
        }
    }
    let superblocks = |there: &[There]| -> Vec<Superblock> {
        there.iter().map(|t| t.superblock.clone()).collect()
    };
    let mut what = "missing";
    // Under another name than it had it may be a copy that was named by mistake.
    let was_served = |t: &There| matches!(pool_at(state_dir, &t.path), Ok(Some(_)));
    let older = match judge(&superblocks(&there)) {
        Err(Misfit::Older(at, _)) if gone.is_empty() && there.get(at).is_some_and(was_served) => {
            Some(there.remove(at))
        }
        _ => None,
    };
    if let Some(older) = &older {
        what = "older than the others";
        gone.push(&older.path);
    }
    // One that is not even named is forgotten, not missing.
    let [missing] = gone.as_slice() else {
        return Ok(None);
    };
    let name = missing.display().to_string();
    let found = superblocks(&there);
    let Err(Misfit::Missing(place, _)) = judge(&found) else {
        return Ok(None);
    };
    there.sort_by_key(|t| t.superblock.device_index);
    let Some(lead) = there.first().map(|t| t.superblock.clone()) else {
        return Ok(None);
    };
    let several = lead.device_index == 0 && !lead.is_twice();
    if place == 0 || !several || there.len() + 1 != lead.devices.len() {
        return Ok(None);
    }
    let mut devices: Vec<Arc<Device>> = there.iter().map(|t| t.device.clone()).collect();
    let missing = Arc::new(Device::remote(Arc::new(Missing(name.clone()))));
    devices.insert(usize::from(place), missing);
    let refused = |why: &str| refused(&name, what, why);
    let Some(left) = left(&lead, devices, place).map_err(|e| refused(&e))? else {
        return Ok(None);
    };
    if let Some(hindrance) = left.hindrance {
        return Err(refused(words(hindrance)));
    }
    let mut rest: Vec<Arc<Device>> = there.iter().map(|t| t.device.clone()).collect();
    change::go_on_without(&mut rest, usize::from(place), left.floor)
        .map_err(|(_, e)| refused(&e.to_string()))?;
    Ok(Some(Rest {
        flash: there.into_iter().map(|t| t.path).collect(),
        kept_blocks: left.kept_blocks,
        device: name.clone(),
        words: format!(
            "flash device {name} is {what}, and held nothing but {} of clean copies: the pool goes on without it, with {} cached on the others; if it comes back, it is not used any more",
            human(left.gone_blocks * BLOCK),
            human(left.kept_blocks * BLOCK)
        ),
    }))
}

fn refused(name: &str, what: &str, why: &str) -> Error {
    Error::unavailable(
        format!("flash device {name} is {what}, and the pool cannot go on without it: {why}"),
        "put it back; if it is dead, have a blank device take the place of the flash with `hearth pool adopt-flash`",
    )
}

fn words(hindrance: Hindrance) -> &'static str {
    match hindrance {
        Hindrance::LivesOnFlash => "a disk lives on flash, and nobody else has what it holds",
        Hindrance::Lost => "something is listed as lost",
        Hindrance::Dirty | Hindrance::Unflushed | Hindrance::OriginFails => {
            "something that was written is on flash and not in its origin"
        }
    }
}

/// One of them; none if it is not there, or does not say what it is.
fn look(path: &Path) -> Result<Option<There>> {
    let file = match BlockFile::open(path, OpenMode::default()) {
        Ok(file) => file,
        Err(hearth_io::OpenError::Open { .. }) => return Ok(None),
        Err(e) => return Err(opening(path, e)),
    };
    let mut device = Arc::new(Device::new(file));
    match Superblock::load(&mut device) {
        Ok(superblock) => Ok(Some(There {
            path: path.to_owned(),
            superblock,
            device,
        })),
        Err(FormatError::Io { .. } | FormatError::TruncatedDevice { .. }) => Ok(None),
        Err(e) => Err(super::format_error(path, &e)),
    }
}

/// What the checkpoint says.
fn left(
    lead: &Superblock,
    devices: Vec<Arc<Device>>,
    place: u16,
) -> std::result::Result<Option<LeftWithout>, String> {
    let Some(mut first) = devices.first().cloned() else {
        return Ok(None);
    };
    let loaded = Places::load(&mut first, &lead.layout, lead.pool);
    let (registry, _) = loaded.map_err(|e| e.to_string())?;
    let known: Vec<KnownDisk> = (registry.disks.iter())
        .map(|d| KnownDisk {
            id: d.id,
            size: d.size,
            since_seq: d.since_seq,
            home: crate::settings::home(d.home),
        })
        .collect();
    let options = EngineOptions {
        ram_stage: Some(0),
        prefetch: false,
        trim: false,
        ..EngineOptions::default()
    };
    let mut media = Joined::new(lead.spread(), devices);
    Engine::look_without(&mut media, place, options, &known).map_err(|e| e.to_string())
}
