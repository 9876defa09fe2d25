//! A pool as it is reported.

use std::path::{Path, PathBuf};

use hearth_format::PoolState;
use hearth_io::{BLOCK, OpenMode};
use hearth_policy::Config;

use super::{Pool, mode_of};
use crate::api::types::{DiskRef, PoolInfo};
use crate::error::{Kind, Result};
use crate::inspect;

impl Pool {
    /// The pool as reported.
    pub fn info(&self) -> PoolInfo {
        let layout = &self.superblock.layout;
        let state = match self.superblock.state {
            PoolState::Clean { .. } => "clean",
            // Opening a pool stores its superblock again.
            PoolState::Open if self.superblock.generation <= 1 => "new",
            PoolState::Open => "dirty",
            PoolState::Failed => "failed",
        };
        // What the layout says of flash that is gone is made up.
        let there = !self.is_without_flash();
        let of_flash = |n: u64| if there { n } else { 0 };
        PoolInfo {
            uuid: self.superblock.pool.to_string(),
            label: self.superblock.label.clone(),
            flash: self
                .paths()
                .iter()
                .map(|path| path.display().to_string())
                .collect(),
            state: state.to_owned(),
            notices: Vec::new(),
            swap_trouble: None,
            created: self.superblock.created_unix_s,
            device_bytes: of_flash(self.flash.iter().map(|device| device.size()).sum()),
            devices: self.devices(),
            dirty_copies: if self.superblock.is_twice() { 2 } else { 1 },
            clean_copies: match self.superblock.is_twice() && !layout.once {
                true => 2,
                false => 1,
            },
            capacity: None,
            log_bytes: of_flash(self.log_bytes()),
            segments: of_flash(self.segments()),
            segment_bytes: u64::from(layout.segment_blocks) * BLOCK,
            ram: self.footprint(None),
            ram_most: self.ram_most(
                Config::stage_most_of(layout.slots() as usize) as u64 * BLOCK,
                crate::memory::NBD_MIN,
            ),
            ram_stage: None,
            ram_stage_most: Config::stage_most_of(layout.slots() as usize) as u64 * BLOCK,
            cached: None,
            dirty: None,
            promised: 0,
            promised_most: 0,
            unknown: None,
            stuck: Vec::new(),
            recovery: None,
            io: None,
            threads: None,
            claims: (self.confirmed.as_ref())
                .map_or_else(Vec::new, |confirmed| confirmed.report(&self.registry)),
            disks: Vec::new(),
        }
    }

    /// The pool with its disks, looking for their origins.
    pub fn info_with_origins(&self) -> PoolInfo {
        let disks = self.registry.plain_disks().map(|disk| DiskRef {
            name: disk.name.clone(),
            origin: disk.origin.clone(),
            size: disk.size,
            mode: mode_of(disk.mode),
            // Looking can mean to connect to a server.
            origin_found: self.is_confirmed(disk)
                && crate::origin::is_found(&disk.origin, disk.size),
            cached: None,
            dirty: None,
        });
        PoolInfo {
            disks: disks.collect(),
            ..self.info()
        }
    }

    /// The same, with what is cached and dirty; of a pool that this process has locked.
    pub fn info_with_contents(&self) -> PoolInfo {
        let mut info = self.info_with_origins();
        info.notices = self.flash().troubles();
        match inspect::contents(self) {
            Ok((contents, lies)) => {
                super::show::add(&mut info.devices, &lies);
                info.cached = Some(contents.iter().map(|c| c.cached).sum());
                info.dirty = Some(contents.iter().fold(0, |n, c| c.dirty.saturating_add(n)));
                // Both are in the order of the registry.
                let all = self.registry.disks.iter().zip(contents);
                let plain = all.filter(|(record, _)| !record.is_file());
                for (disk, (_, found)) in info.disks.iter_mut().zip(plain) {
                    disk.cached = Some(found.cached);
                    disk.dirty = Some(found.dirty);
                }
            }
            Err(e) => info.unknown = Some(e.to_string()),
        }
        info
    }
}

/// A pool on `path` with what is cached and dirty, or, if somebody is using it, without. `state_dir` has the claims that are
/// confirmed.
pub fn show(paths: &[PathBuf], state_dir: &Path) -> Result<PoolInfo> {
    let mode = OpenMode {
        read_only: true,
        unlocked: false,
    };
    match Pool::load(paths, mode) {
        Ok(mut pool) => {
            pool.look_for_claims(state_dir)?;
            Ok(pool.info_with_contents())
        }
        Err(e) if e.kind == Kind::Conflict => {
            let mut pool = Pool::look_at(paths)?;
            pool.look_for_claims(state_dir)?;
            Ok(PoolInfo {
                unknown: Some(
                    "the pool is in use; its daemon tells it, with `hearth pool show` without --flash"
                        .to_owned(),
                ),
                ..pool.info_with_origins()
            })
        }
        Err(e) => Err(e),
    }
}
