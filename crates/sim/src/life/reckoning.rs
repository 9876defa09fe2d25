//! The final reckoning: everything is read back, all that is dirty reaches the origins, and they alone are the disks.

use crate::workload::Wish;
use crate::world::{Outcome, World, trace};
use hearth_engine::api::ReqOp;

/// Longest read of a check, in blocks.
const CHECK_RUN_MAX: u64 = 48;

impl World<'_> {
    /// Reads back everything ever written, and some of what was not.
    pub(super) fn verify(&mut self) -> Outcome {
        trace!(self, "VERIFY");
        for index in 0..self.disks.len() {
            if !self.disks[index].attached() {
                continue;
            }
            let (uid, size) = (self.disks[index].uid, self.disks[index].config.size);
            let mut blocks = self.model.written_blocks(uid);
            blocks.extend((0..4).map(|_| self.rng.below(size.div_ceil(4096))));
            if self.disks[index].kept {
                blocks.extend(0..size.div_ceil(4096));
            }
            blocks.sort_unstable();
            blocks.dedup();
            let mut rest = &blocks[..];
            while let Some(first) = rest.first() {
                let hurt = self.disks[index].hurt.contains(first);
                let max = if hurt { 1 } else { CHECK_RUN_MAX };
                let clean = |i: usize| hurt || !self.disks[index].hurt.contains(&rest[i]);
                let run = (1..rest.len())
                    .take_while(|i| (*i as u64) < max && rest[*i] == first + *i as u64 && clean(*i))
                    .count()
                    + 1;
                let offset = first * 4096;
                let len = (run as u64 * 4096).min(size - offset);
                self.submit(
                    index,
                    Wish {
                        op: ReqOp::Read,
                        offset,
                        len,
                        zeros: false,
                    },
                )?;
                rest = &rest[run..];
                self.settle("verifying", |w| w.wants_more())?;
            }
        }
        self.settle("verifying", |w| w.open_requests() == 0)
    }

    /// The hurting has ended: everything must come to rest, and be right.
    pub(super) fn finale(&mut self) -> Outcome {
        trace!(self, "FINALE");
        self.hurt(false)?;
        for disk in &mut self.disks {
            if let Some(mirror) = disk.origin.mirror() {
                mirror.spare_starts();
            }
        }
        self.settle("answering the last requests", |w| w.open_requests() == 0)?;
        for index in 0..self.disks.len() {
            if !self.disks[index].attached() {
                self.attach(index)?;
            }
        }
        self.verify()?;
        if !self.flash.is_dead() {
            self.drain_and_compare()?;
            if !self.erased && self.rng.chance(1, 2) {
                // What rotted in batches that no later one vouches for looks like a torn write after
                // a power cut, so profiles that rot end with a stop.
                if self.rng.chance(1, 2) && self.profile.rot == 0 {
                    self.crash();
                } else {
                    self.stop()?;
                }
                self.reopen()?;
                self.verify()?;
            }
        } else if self.given_up {
            self.accept_losses()?;
        }
        self.count_again()
    }

    /// The flash device is gone for good. What only it held must be listed, all of it and nothing
    /// else; what is written again, or accepted as lost, must work again; the rest must be on the
    /// origins.
    pub(super) fn accept_losses(&mut self) -> Outcome {
        for index in 0..self.disks.len() {
            self.subject()?.drain(self.disks[index].config.id, true)?;
        }
        self.settle("listing what is lost", |w| {
            w.subject.as_ref().is_some_and(|s| {
                w.disks.iter().filter(|d| !d.homeless()).all(|d| {
                    let unsaved = s.unsaved(d.config.id);
                    unsaved.dirty == unsaved.lost.len() as u64
                })
            })
        })?;
        for index in 0..self.disks.len() {
            let (uid, id) = (self.disks[index].uid, self.disks[index].config.id);
            let (lost, now) = (self.lost_of(index)?, self.model.now());
            self.disks[index].accept(lost.iter().copied(), now);
            let whole = |b: &&u64| (**b + 1) * 4096 <= self.disks[index].config.size;
            let again = lost.iter().find(whole).copied();
            if let Some(block) = again.filter(|_| !self.disks[index].homeless()) {
                self.disks[index].accepted.remove(&block);
                let wish = Wish {
                    op: ReqOp::Write { fua: false },
                    offset: block * 4096,
                    len: 4096,
                    zeros: false,
                };
                self.submit(index, wish)?;
                self.settle("writing a lost block again", |w| w.open_requests() == 0)?;
                if self.subject()?.unsaved(id).lost.contains(&block) {
                    return Err(format!(
                        "block {block} of #{uid} was written again and is still listed as lost"
                    ));
                }
            }
            self.subject()?.accept_loss(id)?;
        }
        self.all_accepted = true;
        self.verify()?;
        self.settle("draining after the losses were accepted", |w| {
            w.subject
                .as_ref()
                .is_some_and(|s| w.disks.iter().all(|d| d.homeless() || s.clean(d.config.id)))
        })?;
        (0..self.disks.len()).try_for_each(|index| self.compare(index))
    }

    pub(super) fn drain_and_compare(&mut self) -> Outcome {
        for index in 0..self.disks.len() {
            self.submit(index, Wish::flush())?;
            self.subject()?.drain(self.disks[index].config.id, true)?;
        }
        self.settle("the last flush", |w| w.open_requests() == 0)?;
        for index in 0..self.disks.len() {
            // A block of zeros that was lost is known only from the list; its disk stays dirty.
            self.lost_of(index)?;
        }
        self.settle("draining", |w| {
            w.subject.as_ref().is_some_and(|s| {
                w.disks.iter().all(|d| {
                    let unsaved = s.unsaved(d.config.id);
                    // Lost blocks keep nothing else from the origin.
                    let saved = unsaved.dirty == unsaved.lost.len() as u64;
                    d.homeless() || s.clean(d.config.id) || !d.hurt.is_empty() && saved
                })
            })
        })?;
        for index in 0..self.disks.len() {
            if self.disks[index].hurt.is_empty() {
                self.compare(index)?;
            }
            let id = self.disks[index].config.id;
            self.subject()?.drain(id, false)?;
        }
        Ok(())
    }

    /// The origin alone must be the disk, but for what was accepted as lost.
    pub(super) fn compare(&mut self, index: usize) -> Outcome {
        let uid = self.disks[index].uid;
        if self.disks[index].homeless() {
            // All that is to be seen of it was read.
            return Ok(());
        }
        if self.book.is_hit() {
            // A leg that has died since the hurting ended.
            self.disks[index].origin.heal();
            self.gather_due()?;
        }
        self.settle("the legs of a mirror becoming the same", |w| {
            w.disks[index].origin.is_whole()
        })?;
        for block in self.model.written_blocks(uid) {
            if self.disks[index].is_accepted(block, u64::MAX) {
                continue;
            }
            for (place, stored) in self.disks[index].origin.stored(block as usize) {
                let checked = self.model.check_block(uid, block, &stored);
                checked.map_err(|e| {
                    format!("after a drain, the origin alone is not the disk ({place}): {e}")
                })?;
            }
        }
        let size = self.disks[index].config.size;
        if !self.disks[index].origin.is_mirror() {
            return Ok(());
        }
        for block in 0..size.div_ceil(4096) {
            // What lies behind the end is nobody's.
            let len = (size - block * 4096).min(4096) as usize;
            let stored = self.disks[index].origin.stored(block as usize);
            let Some((first, held)) = stored.first() else {
                return Err("a mirror has no legs".into());
            };
            if let Some((other, _)) = stored.iter().find(|(_, s)| s[..len] != held[..len]) {
                return Err(format!(
                    "after a drain, the legs {first} and {other} differ in block {block} of #{uid}"
                ));
            }
        }
        Ok(())
    }
}
