//! Taking requests: what can be refused is refused here, everything else will be answered.

use crate::api::{Effects, REQUEST_MAX, ReqError, ReqOp, Request};
use crate::core::Core;
use crate::paths::{Path, took};
use crate::request::answer::{Answer, Asker};
use hearth_io::BLOCK;

impl Core {
    /// Takes a client's request.
    pub fn submit(&mut self, r: Request, now: u64, fx: &mut Effects) {
        let refusal = self.refusal(&r);
        if let Some(error) = refusal {
            took(Path::Refused);
            if let Some(d) = self.disk_mut(r.disk) {
                d.counters.errors += 1;
            }
            Answer::to(Asker::client(&r)).client(Err(error), r.buf, fx);
            return;
        }
        self.reqs.last_foreground_ns = now;
        if let Some(d) = self.disk_mut(r.disk) {
            d.last_request_ns = now;
        }
        let asker = Asker::client(&r);
        self.start(r, asker, now, fx);
    }

    /// Takes a valid request, a client's or one that another needs.
    pub fn start(&mut self, r: Request, asker: Asker, now: u64, fx: &mut Effects) {
        let op = r.op;
        if let Some(d) = self.disk_mut(r.disk) {
            d.in_flight += 1;
        }
        let id = self.reqs.insert(r, asker);
        match op {
            ReqOp::Read => self.start_read(id, now, fx),
            ReqOp::Prefetch => self.start_prefetch(id, now, fx),
            ReqOp::Flush => self.start_flush(id, now, fx),
            ReqOp::Write { .. } => self.lock_or_wait(id, now, fx),
            ReqOp::Discard { .. } | ReqOp::WriteZeroes { .. } => {
                self.zeros_as_data(id);
                self.lock_or_wait(id, now, fx)
            }
        }
    }

    fn refusal(&self, r: &Request) -> Option<ReqError> {
        let Some(d) = self.disk(r.disk).filter(|d| d.attached) else {
            return Some(ReqError::NoDisk);
        };
        if d.fenced {
            return Some(ReqError::Io);
        }
        if self.quiescing {
            return Some(ReqError::Shutdown);
        }
        let Some(end) = r.offset.checked_add(r.len) else {
            return Some(ReqError::Invalid);
        };
        if end > d.cfg.size {
            return Some(ReqError::Invalid);
        }
        match r.op {
            ReqOp::Write { .. } if r.keeps => {
                let whole = r.offset % BLOCK == 0 && r.len % BLOCK == 0;
                let fits = whole && (1..=REQUEST_MAX).contains(&r.len);
                (!fits || !d.held).then_some(ReqError::Invalid)
            }
            ReqOp::Flush => None,
            ReqOp::Read | ReqOp::Write { .. } => {
                if matches!(r.op, ReqOp::Write { .. }) && d.cfg.read_only {
                    return Some(ReqError::ReadOnly);
                }
                let fits = r
                    .buf
                    .as_ref()
                    .is_some_and(|b| b.len() as u64 == Request::buffer_len(r.offset, r.len));
                (r.len == 0 || r.len > REQUEST_MAX || !fits).then_some(ReqError::Invalid)
            }
            ReqOp::Discard { .. } | ReqOp::WriteZeroes { .. } if d.cfg.read_only => {
                Some(ReqError::ReadOnly)
            }
            _ => (r.len == 0).then_some(ReqError::Invalid),
        }
    }
}
