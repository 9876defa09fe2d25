//! Writes that change nothing: what a range holds is read, and goes to flash as if a client had written it.
//!
//! A disk that is to live on flash has to have all of it there as its own, not as copies of an origin that may be dropped at
//! any time. Reading and writing it again from outside would bring back what a client has overwritten in between. So the range is
//! held from before it is read until what was read is on flash, as it is for a write of part of a block.

use crate::api::{Effects, ReqError, Request};
use crate::core::Core;
use crate::ids::ReqId;
use crate::paths::{Path, took};
use crate::request::answer::Asker;
use crate::request::state::Step;
use hearth_io::{Buf, BufSlice};

impl Core {
    /// It has its range: reads what is there.
    pub fn begin_keep(&mut self, id: ReqId, now: u64, fx: &mut Effects) {
        if !self.may_keep(id) {
            return self.cannot_keep(id, now, fx);
        }
        let r = &self.reqs[id];
        let (disk, offset, len) = (r.disk, r.offset, r.len);
        self.reqs[id].write_mut().step = Step::Merges { pending: 1 };
        let buf = Buf::zeroed(Request::buffer_len(offset, len) as usize);
        let read = Request::read(0, disk, offset, len, &buf, now);
        self.start(read, Asker::Request(id), now, fx);
    }

    /// That was read.
    pub fn keep_read(
        &mut self,
        id: ReqId,
        data: Option<BufSlice>,
        result: Result<(), ReqError>,
        now: u64,
        fx: &mut Effects,
    ) {
        let req = &mut self.reqs[id];
        let complete = req.write_mut().edge_read();
        debug_assert!(complete, "it reads all of it at once");
        if let Err(e) = result {
            req.failed = Some(e);
            return self.finish(id, now, fx);
        }
        req.buf = data;
        req.crcs.clear();
        req.write_mut().merged = true;
        if !self.may_keep(id) {
            return self.cannot_keep(id, now, fx);
        }
        took(Path::KeptOnFlash);
        self.append_or_stall(id, now, fx);
    }

    /// It can go to flash, and stays there.
    fn may_keep(&self, id: ReqId) -> bool {
        let req = &self.reqs[id];
        let held = self.disk(req.disk).is_some_and(|d| d.held);
        held && !req.write().through && self.flash.takes_writes()
    }

    /// The disk stays with its origin after all, which has what was to be kept.
    pub fn cannot_keep(&mut self, id: ReqId, now: u64, fx: &mut Effects) {
        self.reqs[id].failed = Some(ReqError::Io);
        self.finish(id, now, fx);
    }
}
