//! What would be left if all flash were gone now.
//!
//! Of an ordered disk that is its origin as after a power cut, and it must be of one time, not older than what the
//! engine tells.

use super::{Outcome, World};
use crate::content::{BLOCK, PER_BLOCK, SECTOR, recognise};
use crate::paths::Event;
use hearth_engine::Upto;
use hearth_engine::api::Mode;

/// One step in so many the origins are looked at.
const STEPS_PER_LOOK: u64 = 60;

impl World<'_> {
    /// Looks at the origins now and then.
    pub(crate) fn look_at_origins(&mut self) -> Outcome {
        match self.profile.ordered && self.rng.chance(1, STEPS_PER_LOOK) {
            true => self.check_origins(),
            false => Ok(()),
        }
    }

    /// Looks at the origins of all ordered disks.
    pub(crate) fn check_origins(&mut self) -> Outcome {
        if !self.profile.ordered {
            return Ok(());
        }
        for index in 0..self.disks.len() {
            self.check_origin(index)?;
        }
        Ok(())
    }

    fn check_origin(&mut self, index: usize) -> Outcome {
        let now = self.clock.now();
        let disk = &self.disks[index];
        let ordered = disk.config.mode == Mode::WriteBackOrdered && !self.given_up;
        let told = match &self.subject {
            Some(subject) if ordered => subject.order(disk.config.id, now),
            // Nobody tells more than before.
            None if ordered && disk.told.is_some() => Some(Upto::Earlier),
            _ => None,
        };
        let Some(told) = told.filter(|told| *told != Upto::Mixed) else {
            self.disks[index].told = None;
            return Ok(());
        };
        if !disk.hurt.is_empty() || !disk.accepted.is_empty() {
            return Ok(());
        }
        if told == Upto::Earlier && disk.told.is_none() {
            // Nothing was told, so this says nothing.
            return Ok(());
        }
        let least = match told {
            Upto::At(ns) => {
                let before = disk.promises.partition_point(|(at, _)| *at < ns);
                disk.promises[..before].last().map_or(0, |(_, t)| *t)
            }
            _ => disk.told.unwrap_or(0),
        };
        if told != Upto::Earlier && disk.promises.last().is_some_and(|(_, t)| *t > least) {
            self.paths.note(Event::OriginBehind);
        }
        let (uid, size) = (disk.uid, disk.config.size);
        // What legs hold that are behind is the mirror's to say.
        let Some(origin) = disk.origin.device() else {
            return Ok(());
        };
        let mut found = Vec::new();
        let blocks = origin.blocks().min(size.div_ceil(BLOCK as u64) as usize);
        for block in (0..blocks).filter(|block| origin.touched(*block)) {
            let content = match self.rng.chance(1, 2) {
                true => origin.visible_block(block),
                false => origin.stored_block(block),
            };
            let len = (size - (block * BLOCK) as u64).min(BLOCK as u64) as usize;
            for (i, sector) in content[..len].chunks(SECTOR as usize).enumerate() {
                found.push((block as u64 * PER_BLOCK + i as u64, recognise(sector)));
            }
        }
        // What is not touched holds its first content, which nothing promised may have replaced.
        for block in self.model.written_blocks(uid) {
            let at = block as usize;
            if at < origin.blocks() && !origin.touched(at) {
                let content = origin.stored_block(at);
                let len = size.saturating_sub(block * BLOCK as u64).min(BLOCK as u64) as usize;
                for (i, sector) in content[..len].chunks(SECTOR as usize).enumerate() {
                    found.push((block * PER_BLOCK + i as u64, recognise(sector)));
                }
            }
        }
        self.paths.note(Event::OriginAlone);
        self.model
            .check_cut(uid, least, &found)
            .map_err(|e| format!("without flash (told: {told:?}): {e}"))?;
        let disk = &mut self.disks[index];
        disk.told = Some(disk.told.unwrap_or(0).max(least));
        Ok(())
    }
}
