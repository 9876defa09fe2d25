//! Answering a request, exactly once.
//!
//! A guest whose request is never answered hangs; one that is answered twice has the second answer taken
//! for another request's. So the duty to answer is a thing ([`Answer`]) that comes with the request,
//! cannot be copied, and is used up by answering. Who loses it hears of it at once.

use crate::api::{Completion, Effects, ReqError, ReqOp, Request};
use crate::core::Core;
use crate::disk::Disk;
use crate::ids::ReqId;
use crate::request::req::Req;
use hearth_io::BufSlice;

/// Who asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asker {
    /// A client, by way of a data thread.
    Client {
        /// The thread.
        owner: u32,
        /// Its name for the request.
        tag: u64,
    },
    /// A request that needs this read.
    Request(ReqId),
    /// Somebody who was told already, by a deliberate fault.
    Told,
}

impl Asker {
    pub fn client(r: &Request) -> Asker {
        Asker::Client {
            owner: r.owner,
            tag: r.tag,
        }
    }
}

/// The duty to answer.
#[derive(Debug)]
#[must_use]
pub(crate) struct Answer {
    to: Asker,
    owed: bool,
}

impl Answer {
    pub fn to(asker: Asker) -> Answer {
        Answer {
            to: asker,
            owed: true,
        }
    }

    /// The request that waits for this one; `None` if a client does.
    pub fn request(&self) -> Option<ReqId> {
        match self.to {
            Asker::Request(id) => Some(id),
            Asker::Client { .. } | Asker::Told => None,
        }
    }

    #[cfg(test)]
    pub fn is_to(&self, asker: Asker) -> bool {
        self.to == asker
    }

    pub fn is_to_request(&self) -> bool {
        self.request().is_some()
    }

    /// Tells a client.
    pub fn client(mut self, result: Result<(), ReqError>, buf: Option<BufSlice>, fx: &mut Effects) {
        self.owed = false;
        match self.to {
            Asker::Client { owner, tag } => fx.completions.push(Completion {
                owner,
                tag,
                result,
                buf,
            }),
            Asker::Told => {}
            Asker::Request(id) => unreachable!("a read for {id:?} is answered as if for a client"),
        }
    }

    /// A request is told, which the caller does with what was read.
    pub fn told(mut self) {
        self.owed = false;
    }

    /// Nobody can be told any more: the engine goes.
    pub fn void(mut self) {
        self.owed = false;
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        // While a panic unwinds, what it drops is not what went wrong.
        if self.owed && !std::thread::panicking() {
            panic!("a request is dropped, and {:?} was not answered", self.to);
        }
    }
}

impl Core {
    /// Ends a request: gives back what it holds, answers, wakes who waited for its range.
    pub fn finish(&mut self, id: ReqId, now: u64, fx: &mut Effects) {
        let held = self.reqs[id].holds_range();
        if held {
            self.unlock(id);
        }
        self.leave_regions(id, now);
        let mut req = self.reqs.remove(id);
        if req.made_data {
            req.buf = None;
        }
        let disk = req.disk;
        let result = match req.failed {
            Some(e) => Err(e),
            // What is answered now, whoever goes on with the origin does not have.
            None if self.fenced(disk) => Err(ReqError::Io),
            None => Ok(()),
        };
        let d = self.known_mut(disk);
        d.in_flight -= 1;
        match req.answer.request() {
            Some(parent) => self.read_for(parent, req, result, now, fx),
            None => {
                count(d, &req, result, now);
                req.answer.client(result, req.buf, fx);
            }
        }
        if held {
            self.wake_locks(disk, now, fx);
        }
    }

    /// A read that another request needs ended: that is a partial write or a prefetch.
    fn read_for(
        &mut self,
        parent: ReqId,
        req: Req,
        result: Result<(), ReqError>,
        now: u64,
        fx: &mut Effects,
    ) {
        req.answer.told();
        match self.reqs[parent].op {
            ReqOp::Prefetch => self.prefetch_step(parent, result, now, fx),
            ReqOp::Write { .. } if self.reqs[parent].keeps => {
                self.keep_read(parent, req.buf, result, now, fx)
            }
            ReqOp::Write { .. } | ReqOp::Discard { .. } | ReqOp::WriteZeroes { .. } => {
                let edge = (req.offset / 4096, req.buf);
                self.merged(parent, edge, result, now, fx)
            }
            op @ (ReqOp::Read | ReqOp::Flush) => unreachable!("{op:?} needs no other request"),
        }
    }
}

/// Counts a client's request among those of its disk.
fn count(d: &mut Disk, req: &Req, result: Result<(), ReqError>, now: u64) {
    if req.keeps {
        // No client asked for it.
        return;
    }
    let ns = now.saturating_sub(req.start_ns);
    let c = &mut d.counters;
    if result.is_err() {
        c.errors += 1;
    }
    match req.op {
        // However it failed, that says nothing about what the cache is good for.
        ReqOp::Read if result.is_err() => {}
        ReqOp::Read => {
            c.read_ns += ns;
            if req.missed {
                if req.read().hit {
                    c.read_partial_hits += 1
                } else {
                    c.read_misses += 1
                }
                d.miss_latency.record(ns);
            } else {
                c.read_hits += 1;
                d.hit_latency.record(ns);
            }
        }
        ReqOp::Write { .. } => {
            c.write_bytes += req.len;
            c.write_ns += ns;
            if req.missed {
                d.write_miss_latency.record(ns);
            } else {
                d.write_hit_latency.record(ns);
            }
        }
        ReqOp::Flush => c.flushes += 1,
        ReqOp::Discard { .. } | ReqOp::WriteZeroes { .. } => {
            c.discards += 1;
            c.discard_bytes += req.len;
        }
        ReqOp::Prefetch => {}
    }
}
