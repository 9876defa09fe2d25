//! Formatting several flash devices as one pool.
//!
//! What is written last makes them one: the first device's superblock. Until it is there, the others say whose they
//! are going to be, and nothing can be opened.

use std::path::PathBuf;
use std::sync::Arc;

use hearth_format::{DeviceEntry, Layout, Members, Registry, Superblock, Uuid};
use hearth_io::{BLOCK, Device};

use crate::api::types::PoolInfo;
use crate::error::Result;
use crate::pool::devices::{self, FlashDevices};
use crate::pool::{
    CreateOptions, Pool, Prepared, first_registry, format_error, prepare, settle_name, tables,
    take_room,
};

/// A device that a new pool is to have.
#[derive(Clone, Debug)]
pub struct DeviceAt {
    /// Where.
    pub path: PathBuf,
    /// Make a new file of so many bytes.
    pub size: Option<u64>,
}

/// Formats devices as a new pool; the first of them carries its tables. `progress` as for one device, told of one
/// file after the other.
pub fn create_several(
    devices: &[DeviceAt],
    options: &CreateOptions,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<PoolInfo> {
    create_laid_out(devices, options, true, progress)
}

/// The same. Versions before this one made pools that keep everything twice with clean blocks twice, too: not `once`.
pub(super) fn create_laid_out(
    devices: &[DeviceAt],
    options: &CreateOptions,
    once: bool,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<PoolInfo> {
    let paths: Vec<PathBuf> = devices.iter().map(|d| d.path.clone()).collect();
    if let Some(error) = devices::too_many(&paths) {
        return Err(error);
    }
    devices::refuse_same(&paths)?;
    if options.twice && paths.len() < 2 {
        return Err(crate::error::Error::invalid(
            "two copies need two flash devices, and one is given",
            "name each of them with --flash",
        ));
    }
    let of = |device: &DeviceAt| CreateOptions {
        size: device.size,
        ..options.clone()
    };
    // What does not fit together is found out before anything is written, as far as sizes are known.
    if let Some(sizes) = devices.iter().map(|d| d.size).collect::<Option<Vec<u64>>>() {
        lay_out(&paths, &sizes, options.twice, once)?;
    }
    let mut prepared = Vec::new();
    for device in devices {
        prepared.push(prepare(&device.path, &of(device), progress)?);
    }
    let sizes: Vec<u64> = prepared.iter().map(|p| p.file.size()).collect();
    let (layout, entries) = lay_out(&paths, &sizes, options.twice, once)?;
    let mut media = Vec::new();
    let mut replaced = Vec::new();
    for ((p, path), entry) in prepared.into_iter().zip(&paths).zip(&entries) {
        let Prepared {
            file,
            replaced: old,
        } = p;
        take_room(path, &file, entry.extent.segment_start, true)?;
        media.push(Arc::new(Device::new(file)));
        replaced.push(old);
    }
    let now = crate::beside::now_unix().max(1);
    let first = entries.first().map_or(Uuid::nil(), |e| e.device);
    let mut superblock = Superblock::new(layout, Uuid::new_v4(), first, &options.label, now);
    match options.twice {
        true => superblock.set_twice(layout, entries.clone()),
        false => superblock.set_devices(layout, entries.clone()),
    }
    superblock.stamp = 1;
    for (device, path) in media.iter_mut().zip(&paths) {
        Superblock::erase(device).map_err(|e| format_error(path, &e))?;
    }
    let mut others = Vec::new();
    for (((device, path), entry), place) in (media.iter_mut().zip(&paths).zip(&entries).zip(0..))
        .skip(if options.twice { 2 } else { 1 })
    {
        let mut sb = superblock.for_member(place, entry.device, now);
        sb.store(device).map_err(|e| format_error(path, &e))?;
        others.push(sb);
    }
    let lead = media.first().ok_or_else(devices::none_given)?.clone();
    let lead_path = lead.path().to_owned();
    let flash = FlashDevices::several(media.clone(), superblock.spread());
    let mut tables = tables(&flash, &lead, false);
    let stored = first_registry(&mut *tables, &superblock, Registry::default())
        .and_then(|made| superblock.store_naming(&mut *tables).map(|()| made));
    drop(tables);
    let (registry, places) = stored.map_err(|e| format_error(&lead_path, &e))?;
    for ((device, path), old) in devices.iter().zip(&paths).zip(replaced) {
        settle_name(path, &of(device), old)?;
    }
    let notices = media.iter().zip(&paths);
    let notices = notices.flat_map(|(device, path)| crate::place::sparse_notice(device, path));
    let notices = notices.collect();
    let members = Members::new(others);
    let pool = Pool::of(lead, flash, members, superblock, registry, places);
    let info = pool.info();
    let shown = || paths.iter().map(|path| path.display().to_string());
    let mut devices = info.devices.clone();
    for (device, path) in devices.iter_mut().zip(shown()) {
        device.path = path;
    }
    Ok(PoolInfo {
        // Files may have been made under other names.
        flash: shown().collect(),
        devices,
        notices,
        ..info
    })
}

/// Where on them what goes. Segments are as large as for one device of all their bytes, but not so large that the
/// smallest has too few.
fn lay_out(
    paths: &[PathBuf],
    sizes: &[u64],
    twice: bool,
    once: bool,
) -> Result<(Layout, Vec<DeviceEntry>)> {
    let total: u64 = sizes.iter().fold(0, |sum, size| sum.saturating_add(*size));
    let least = sizes.iter().copied().min().unwrap_or(0);
    // A device should have some dozens of them.
    let segment =
        Layout::segment_blocks_for(total).min(Layout::segment_blocks_for(least.saturating_mul(16)));
    let laid_out = match twice {
        true => Layout::for_twice(sizes, segment, once),
        false => Layout::for_devices(sizes, segment),
    };
    let (layout, extents) = laid_out.map_err(|(place, e)| {
        let path = paths.get(place).cloned().unwrap_or_default();
        let error = format_error(&path, &e);
        match (place, sizes.len()) {
            (0, 2..) if !twice => crate::error::Error::invalid(
                error.what,
                "name a larger device first: it carries the tables of the pool, which take about 0.6 % of all its devices",
            ),
            _ => error,
        }
    })?;
    let entries = extents.into_iter().map(|extent| DeviceEntry {
        device: Uuid::new_v4(),
        extent,
    });
    debug_assert!(layout.segment_start * BLOCK <= sizes.first().copied().unwrap_or(0));
    Ok((layout, entries.collect()))
}
