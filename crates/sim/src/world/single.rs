//! The one I/O of a world that fails, and what it may do to requests.

use super::{Ending, Outcome, World, trace};
use crate::content::BLOCK;
use crate::model::End;
use crate::single::{Hit, How};
use crate::workload::Wish;
use hearth_engine::api::ReqOp;
use hearth_io::{IoOp, OpKind, Target};

impl World<'_> {
    /// An I/O begins: is it the one?
    pub(super) fn is_doomed(&mut self, op: &IoOp) -> bool {
        let number = self.begun_ios;
        self.begun_ios += 1;
        let Some(single) = self.single.as_mut().filter(|s| s.at == number) else {
            return false;
        };
        single.hit = Some(Hit {
            target: op.target,
            kind: op.kind,
            token: 0,
            offset: op.offset,
            len: op.len,
        });
        let how = single.how;
        // This life ends at once.
        self.cut_short |= matches!(how, How::Power | How::Kill);
        trace!(self, "   (it fails: {how:?})");
        true
    }

    /// The I/O that fails has this name.
    pub(super) fn doom(&mut self, token: u64) {
        if let Some(hit) = self.single.as_mut().and_then(|s| s.hit.as_mut()) {
            hit.token = token;
        }
    }

    /// It hangs for now.
    pub(super) fn hangs(&self) -> bool {
        self.single.as_ref().is_some_and(|s| s.how.hangs())
    }

    /// How an I/O is to fail that ends now, if it is the one: whether half of it is done.
    pub(super) fn fails(&self, ending: Ending) -> Option<bool> {
        let single = self.single.as_ref().filter(|s| s.how.is_error())?;
        let hit = single.hit.as_ref()?;
        (ending == Ending::Device(hit.target, hit.token)).then_some(single.how.tears())
    }

    /// How the process is to die, if the one failure is that it does.
    pub(crate) fn dies_by(&self) -> Option<End> {
        let single = self.single.as_ref().filter(|s| s.hit.is_some())?;
        match single.how {
            How::Power => Some(End::Power),
            How::Kill => Some(End::Process),
            _ => None,
        }
    }

    /// May the one failure have failed this request?
    pub(super) fn justify_single(&self, disk: usize, wish: &Wish) -> Outcome {
        let Some(single) = &self.single else {
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
        match (hit.target, hit.kind) {
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
            (Target::Origin(_), OpKind::Flush) if promises => Ok(()),
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
