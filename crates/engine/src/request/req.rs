//! A request on its way: what was asked, by whom, and where it stands.

use crate::api::{DiskId, ReqError, ReqOp, Request};
use crate::ids::ReqId;
use crate::request::answer::Answer;
use crate::request::state::{Read, State, Write};
use hearth_io::BufSlice;
use smallvec::SmallVec;

/// A request the engine has taken.
#[derive(Debug)]
pub(crate) struct Req {
    pub id: ReqId,
    /// Whom it is owed to.
    pub answer: Answer,
    pub disk: DiskId,
    pub op: ReqOp,
    /// First byte, and how many. Of a prefetch, what is left to do.
    pub offset: u64,
    pub len: u64,
    pub buf: Option<BufSlice>,
    /// Checksums that came with it; empty if it does not cover whole blocks, or does no more.
    pub crcs: SmallVec<[u32; 4]>,
    pub start_ns: u64,
    pub failed: Option<ReqError>,
    /// Something of its range was not cached.
    pub missed: bool,
    pub state: State,
    /// It was zeros, and is written as data: the memory is ours.
    pub made_data: bool,
    /// It has no data of its own; see [`crate::request::keep`].
    pub keeps: bool,
}

impl Req {
    pub fn new(id: ReqId, r: Request, answer: Answer) -> Req {
        Req {
            id,
            answer,
            disk: r.disk,
            op: r.op,
            offset: r.offset,
            len: r.len,
            buf: r.buf,
            crcs: r.crcs,
            start_ns: r.start_ns,
            failed: None,
            missed: false,
            state: State::new(r.op),
            made_data: r.keeps,
            keeps: r.keeps,
        }
    }

    /// Did a client ask, not another request?
    pub fn is_clients(&self) -> bool {
        !self.answer.is_to_request()
    }

    pub fn is_prefetch(&self) -> bool {
        matches!(self.state, State::Prefetch)
    }

    pub fn read(&self) -> &Read {
        match &self.state {
            State::Read(read) => read,
            other => unreachable!("{:?} is no read, but {other:?}", self.id),
        }
    }

    pub fn read_mut(&mut self) -> &mut Read {
        match &mut self.state {
            State::Read(read) => read,
            other => unreachable!("{:?} is no read, but {other:?}", self.id),
        }
    }

    pub fn write(&self) -> &Write {
        match &self.state {
            State::Write(write) => write,
            other => unreachable!("{:?} is no write, but {other:?}", self.id),
        }
    }

    pub fn write_mut(&mut self) -> &mut Write {
        match &mut self.state {
            State::Write(write) => write,
            other => unreachable!("{:?} is no write, but {other:?}", self.id),
        }
    }

    /// Does it hold a range of its disk?
    pub fn holds_range(&self) -> bool {
        matches!(&self.state, State::Write(write) if write.holds_range())
    }

    /// The regions whose intents count it.
    pub fn regions(&self) -> Option<(u32, u32)> {
        match &self.state {
            State::Write(write) => write.regions,
            _ => None,
        }
    }

    /// The blocks it touches.
    pub fn blocks(&self) -> (u64, u64) {
        (self.offset / 4096, (self.offset + self.len).div_ceil(4096))
    }
}
