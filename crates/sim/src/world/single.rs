//! The one I/O of a world that fails, and what it may do to requests.

use super::{Ending, Outcome, World, trace};
use crate::content::BLOCK;
use crate::model::End;
use crate::single::How;
use crate::workload::Wish;
use hearth_engine::api::{Mode, ReqOp};
use hearth_io::{IoOp, OpKind, Target};

impl World<'_> {
    /// An I/O of a device begins: is it the one?
    pub(super) fn is_doomed(&mut self, op: &IoOp) -> bool {
        let spare = matches!(op.target, Target::Flash(_)) && self.flash.are_twice();
        let doomed = self.book.begin(op, None, spare);
        self.note_doom(doomed);
        doomed
    }

    /// The one that fails may have begun.
    pub(super) fn note_doom(&mut self, doomed: bool) {
        self.cut_short |= std::mem::take(&mut self.book.cuts);
        if let Some(single) = self.book.single.as_ref().filter(|_| doomed) {
            let how = single.how;
            trace!(self, "   (it fails: {how:?})");
        }
    }

    /// How an I/O is to fail that ends now, if it is the one.
    pub(super) fn fails(&self, ending: Ending) -> Option<How> {
        match ending {
            Ending::Device(target, token) => self.book.fails(target, None, token),
            // The mirror knows.
            Ending::Mirror(..) => None,
        }
    }

    /// How the process is to die, if the one failure is that it does.
    pub(crate) fn dies_by(&self) -> Option<End> {
        let single = self.book.single.as_ref().filter(|s| s.hit.is_some())?;
        match single.how {
            How::Power | How::Returns => Some(End::Power),
            How::Kill => Some(End::Process),
            _ => None,
        }
    }

    /// May the one failure have failed this request?
    pub(super) fn justify_single(&self, disk: usize, wish: &Wish) -> Outcome {
        let Some(single) = &self.book.single else {
            return Ok(());
        };
        let Some(hit) = &single.hit else {
            return Err("nothing has failed".into());
        };
        if !single.how.is_error() {
            return Err(format!(
                "what has happened is {:?}, and no error",
                single.how
            ));
        }
        let disk = &self.disks[disk];
        let promises = matches!(
            wish.op,
            ReqOp::Flush
                | ReqOp::Write { fua: true }
                | ReqOp::Discard { fua: true }
                | ReqOp::WriteZeroes { fua: true, .. }
        );
        // Zeros of an ordered disk may go past the cache, when the origin has durably all that came before.
        let zeros = matches!(wish.op, ReqOp::Discard { .. } | ReqOp::WriteZeroes { .. });
        let behind = zeros && disk.config.mode == Mode::WriteBackOrdered;
        match (hit.target, hit.kind) {
            (target, kind) if hit.leg.is_some() || self.flash.are_twice() && is_flash(target) => {
                Err(format!(
                    "one {kind:?} of {target:?} has failed, and another device has the same"
                ))
            }
            // What was dirty there may not be durable, and nothing can be promised of it until the origin has it.
            (Target::Flash(_), OpKind::Flush) if self.given_up && disk.dirty_once && promises => {
                Ok(())
            }
            (Target::Flash(_), kind) => Err(format!(
                "one {kind:?} of flash has failed, of which nobody may notice anything"
            )),
            (Target::Origin(id), _) if id != disk.config.id => Err(format!(
                "the origin of disk {id} has failed, which is another one"
            )),
            (Target::Origin(_), OpKind::Flush) if promises || behind => Ok(()),
            (Target::Origin(_), OpKind::Flush) => {
                Err("a flush of the origin has failed, and no flush was asked for".into())
            }
            (Target::Origin(_), kind) => {
                // The origin is read and written in whole blocks at least, and in larger pieces where that pays.
                let block = BLOCK as u64;
                let (start, end) = (
                    hit.offset / block * block,
                    (hit.offset + hit.len).next_multiple_of(block),
                );
                let meets = wish.offset < end && start < wish.offset + wish.len;
                match meets {
                    true => Ok(()),
                    false => Err(format!(
                        "{kind:?} of the origin has failed at {}+{}, and this needs nothing there",
                        hit.offset, hit.len
                    )),
                }
            }
        }
    }
}

fn is_flash(target: Target) -> bool {
    matches!(target, Target::Flash(_))
}
