//! What guests ask for, and whether the answers are right.
//!
//! A request is made with what the oracle has to know of it (`Pending`). Its answer is a finding, unless it is
//! what the oracle allows, or a fault that was injected justifies that it failed.

use super::{Outcome, World, trace};
use crate::content::{BLOCK, SECTOR, Value, fill, stamp};
use crate::model::WriteId;
use crate::paths::Event;
use crate::workload::Wish;
use hearth_engine::api::{Completion, Mode, ReqError, ReqOp, Request};
use hearth_io::Buf;

pub(super) enum Pending {
    Read {
        mark: u64,
    },
    Write {
        id: WriteId,
    },
    /// Whole blocks become zeros; of the edges it is not said.
    Discard {
        id: Option<WriteId>,
        edges: [Option<WriteId>; 2],
    },
    Flush {
        mark: u64,
    },
    Prefetch,
    /// It changes nothing.
    Keep,
    /// It must be refused.
    Refused(ReqError),
}

pub(super) struct InFlight {
    disk: usize,
    wish: Wish,
    kind: Pending,
    since: u64,
    buf: Option<Buf>,
}

impl World<'_> {
    /// Requests not answered yet.
    pub(crate) fn open_requests(&self) -> usize {
        self.requests.len()
    }

    /// Open requests of one disk.
    pub(crate) fn open_requests_of(&self, disk: usize) -> usize {
        self.requests.values().filter(|r| r.disk == disk).count()
    }

    pub(crate) fn wants_more(&self) -> bool {
        (self.requests.len() as u64) < self.depth
    }

    /// Makes a request of disk `disk`.
    pub(crate) fn submit(&mut self, disk: usize, wish: Wish) -> Outcome {
        let now = self.clock.now();
        let tag = self.next_tag;
        self.next_tag += 1;
        let (uid, id) = (self.disks[disk].uid, self.disks[disk].config.id);
        let (first, count) = (wish.offset / SECTOR, wish.len.div_ceil(SECTOR));
        let room = Request::buffer_len(wish.offset, wish.len) as usize;
        let at = (wish.offset % BLOCK as u64) as usize;
        if let Some(error) = self.refusal(disk, &wish) {
            let request = match wish.op {
                ReqOp::Read => {
                    Request::read(tag, id, wish.offset, wish.len, &Buf::zeroed(room), now)
                }
                ReqOp::Write { fua } => {
                    let buf = Buf::zeroed(room);
                    Request::write(tag, id, wish.offset, wish.len, fua, &buf, now)
                }
                op => Request::new(tag, id, op, wish.offset, wish.len, None, now),
            };
            return self.hand_over(disk, wish, request, Pending::Refused(error), None);
        }
        let writes = !matches!(wish.op, ReqOp::Read | ReqOp::Flush | ReqOp::Prefetch);
        let d = &mut self.disks[disk];
        if writes && d.config.mode == Mode::WriteBack {
            (d.maybe_dirty, d.whole_before) = (true, false);
        }
        let (kind, request, buf) = match wish.op {
            ReqOp::Read => {
                let mark = self.model.begin_read();
                let buf = Buf::zeroed(room);
                // So that a read that fills nothing is not taken for zeros.
                buf.all().bytes_mut()[at..at + wish.len as usize].fill(0xAA);
                (
                    Pending::Read { mark },
                    Request::read(tag, id, wish.offset, wish.len, &buf, now),
                    Some(buf),
                )
            }
            ReqOp::Write { fua } => {
                let write = self.model.begin_write(uid, first, count, wish.zeros, fua);
                let buf = Buf::zeroed(room);
                let mut window = buf.all();
                let payload = &mut window.bytes_mut()[at..at + wish.len as usize];
                for (i, sector) in payload.chunks_mut(SECTOR as usize).enumerate() {
                    let value = Value::Stamp(stamp(uid, write, first + i as u64));
                    fill(if wish.zeros { Value::Zero } else { value }, sector);
                }
                let request = Request::write(tag, id, wish.offset, wish.len, fua, &buf, now);
                (Pending::Write { id: write }, request, Some(buf))
            }
            ReqOp::Discard { fua } => {
                let (middle, edges) = self.begin_discard(disk, wish, fua);
                (
                    Pending::Discard { id: middle, edges },
                    Request::new(tag, id, wish.op, wish.offset, wish.len, None, now),
                    None,
                )
            }
            ReqOp::WriteZeroes { fua, .. } => {
                let write = self.model.begin_write(uid, first, count, true, fua);
                (
                    Pending::Write { id: write },
                    Request::new(tag, id, wish.op, wish.offset, wish.len, None, now),
                    None,
                )
            }
            ReqOp::Flush => {
                let mark = self.model.begin_flush();
                (
                    Pending::Flush { mark },
                    Request::new(tag, id, wish.op, 0, 0, None, now),
                    None,
                )
            }
            ReqOp::Prefetch => (
                Pending::Prefetch,
                Request::new(tag, id, wish.op, wish.offset, wish.len, None, now),
                None,
            ),
        };
        self.hand_over(disk, wish, request, kind, buf)
    }

    /// Has what is there of a disk that is held put on flash. Nobody is promised anything by it.
    pub(crate) fn submit_keep(&mut self, disk: usize, offset: u64, len: u64) -> Outcome {
        let (now, tag) = (self.clock.now(), self.next_tag);
        self.next_tag += 1;
        self.disks[disk].kept = true;
        let wish = Wish {
            op: ReqOp::Prefetch,
            offset,
            len,
            zeros: false,
        };
        let request = Request::keep(tag, self.disks[disk].config.id, offset, len, now);
        self.hand_over(disk, wish, request, Pending::Keep, None)
    }

    /// How many of those are under way.
    pub(crate) fn keeps_of(&self, disk: usize) -> usize {
        let keeps = |r: &&InFlight| r.disk == disk && matches!(r.kind, Pending::Keep);
        self.requests.values().filter(keeps).count()
    }

    /// Gives a request to the subject.
    fn hand_over(
        &mut self,
        disk: usize,
        wish: Wish,
        request: Request,
        kind: Pending,
        buf: Option<Buf>,
    ) -> Outcome {
        let (now, tag, uid) = (self.clock.now(), request.tag, self.disks[disk].uid);
        let name = match &kind {
            Pending::Write { id } => format!(" as write {id}"),
            Pending::Discard { id: Some(id), .. } => format!(" as write {id}"),
            Pending::Refused(error) => format!(" to be refused: {error}"),
            _ => String::new(),
        };
        trace!(
            self,
            "request {tag} #{uid} {:?} at block {}+{} ({} bytes at {}){name}",
            wish.op,
            wish.offset / BLOCK as u64,
            wish.len.div_ceil(BLOCK as u64),
            wish.len,
            wish.offset
        );
        self.clock
            .note(tag ^ wish.offset.rotate_left(13) ^ wish.len.rotate_left(40));
        let since = self.model.now();
        self.requests.insert(
            tag,
            InFlight {
                disk,
                wish,
                kind,
                since,
                buf,
            },
        );
        let mut list = vec![request];
        let Some(subject) = &self.subject else {
            return Err("no subject is open".into());
        };
        subject.submit(now, &mut list, &mut self.effects);
        if !list.is_empty() {
            return Err(format!(
                "the subject left {} submitted requests in the list",
                list.len()
            ));
        }
        self.handle_effects()
    }

    /// Why the subject must refuse a request, if it must.
    fn refusal(&mut self, disk: usize, wish: &Wish) -> Option<ReqError> {
        let d = &self.disks[disk];
        let (event, error) = if !d.attached() {
            (Event::RefusedNoDisk, ReqError::NoDisk)
        } else if self.stopping {
            (Event::RefusedStopping, ReqError::Shutdown)
        } else if wish.offset + wish.len > d.config.size {
            (Event::RefusedPastTheEnd, ReqError::Invalid)
        } else {
            return None;
        };
        self.paths.note(event);
        Some(error)
    }

    /// A discard zeroes the whole blocks of its range; partial ones at its edges it may leave.
    fn begin_discard(
        &mut self,
        disk: usize,
        wish: Wish,
        fua: bool,
    ) -> (Option<WriteId>, [Option<WriteId>; 2]) {
        let (uid, size) = (self.disks[disk].uid, self.disks[disk].config.size);
        let block = BLOCK as u64;
        let (start, end) = (wish.offset, wish.offset + wish.len);
        let last = if end == size {
            end
        } else {
            end / block * block
        };
        let first = start.next_multiple_of(block).min(end);
        let mut begin = |from: u64, to: u64, fua: bool| {
            (from < to).then(|| {
                let count = (to - from).div_ceil(SECTOR);
                self.model.begin_write(uid, from / SECTOR, count, true, fua)
            })
        };
        if first >= last {
            return (None, [begin(start, end, false), None]);
        }
        let edges = [begin(start, first, false), begin(last, end, false)];
        (begin(first, last, fua), edges)
    }

    pub(super) fn end_request(&mut self, completion: Completion) -> Outcome {
        let tag = completion.tag;
        let Some(request) = self.requests.remove(&tag) else {
            return Err(format!("request {tag} completed twice, or was never made"));
        };
        self.done_requests += 1;
        trace!(self, "request {tag} ended: {:?}", completion.result);
        self.clock
            .note(tag.rotate_left(9) ^ u64::from(completion.result.is_ok()));
        let InFlight {
            disk,
            wish,
            kind,
            since,
            buf,
        } = request;
        let uid = self.disks[disk].uid;
        if let Pending::Refused(error) = kind {
            return match completion.result {
                Err(e) if e == error => Ok(()),
                other => Err(format!(
                    "request {tag} (#{uid} {wish:?}) should have been refused with \"{error}\" and ended with {other:?}"
                )),
            };
        }
        if let Err(e) = completion.result
            && let Err(why) = self.justify(disk, &wish, since, e)
        {
            return Err(format!(
                "request {tag} (#{uid} {wish:?}) failed with \"{e}\" and no fault justifies it: {why}"
            ));
        }
        let ok = completion.result.is_ok();
        match kind {
            Pending::Write { id } => {
                self.model.end_write(id, ok);
                self.note_promise(disk, ok && wish.op.is_fua());
                if ok && matches!(wish.op, ReqOp::Write { fua: true }) {
                    self.promise_again(disk, &wish, since);
                }
            }
            Pending::Discard { id, edges } => {
                if let Some(id) = id {
                    self.model.end_write(id, ok);
                    self.note_promise(disk, ok && wish.op.is_fua());
                }
                // "May have happened" is what a failed write means to the model.
                edges
                    .into_iter()
                    .flatten()
                    .for_each(|edge| self.model.end_write(edge, false));
            }
            Pending::Flush { mark } if ok => {
                self.model.end_flush(uid, mark);
                self.note_promise(disk, true);
            }
            Pending::Read { mark } if ok && self.is_accepted(disk, &wish, since) => {
                self.model.drop_read(mark);
            }
            Pending::Read { mark } if ok => {
                let at = (wish.offset % BLOCK as u64) as usize;
                let Some(buf) = buf else {
                    return Err("a read without a buffer".into());
                };
                if completion.buf.is_none() {
                    return Err(format!(
                        "request {tag} (a read) came back without its buffer"
                    ));
                }
                let window = buf.slice(at, wish.len as usize);
                let verdict = self
                    .model
                    .end_read(uid, mark, wish.offset / SECTOR, window.bytes());
                return verdict.map_err(|e| format!("request {tag} (read of #{uid}): {e}"));
            }
            Pending::Read { mark } => self.model.drop_read(mark),
            Pending::Flush { .. } | Pending::Prefetch | Pending::Keep | Pending::Refused(_) => {}
        }
        Ok(())
    }

    /// Something is durable from now on.
    fn note_promise(&mut self, disk: usize, promised: bool) {
        if promised && self.profile.ordered {
            let at = (self.clock.now(), self.model.now());
            self.disks[disk].promises.push(at);
        }
    }

    /// Does the range hold a block that was accepted as lost, or was so after `since`?
    fn is_accepted(&self, disk: usize, wish: &Wish, since: u64) -> bool {
        let mut blocks =
            wish.offset / BLOCK as u64..(wish.offset + wish.len).div_ceil(BLOCK as u64);
        let disk = &self.disks[disk];
        !disk.accepted.is_empty() && blocks.any(|block| disk.is_accepted(block, since))
    }

    /// Whole blocks that were written durably hold what was written, whatever was accepted before the
    /// write began.
    fn promise_again(&mut self, disk: usize, wish: &Wish, since: u64) {
        let now = self.model.now();
        let blocks = wish.offset.div_ceil(BLOCK as u64)..(wish.offset + wish.len) / BLOCK as u64;
        if self.disks[disk].accepted.is_empty() || blocks.is_empty() {
            return;
        }
        for (_, (from, until)) in self.disks[disk].accepted.range_mut(blocks) {
            if *from < since && *until == u64::MAX {
                *until = now;
                self.paths.note(Event::WrittenAfterLoss);
            }
        }
    }

    /// Does any injected fault explain that this request failed?
    fn justify(&self, disk: usize, wish: &Wish, since: u64, error: ReqError) -> Outcome {
        if wish.op == ReqOp::Prefetch {
            return Ok(());
        }
        if !matches!(error, ReqError::Io | ReqError::NoSpace) {
            return Err("the request was well formed and the disk attached".into());
        }
        if self.book.single.is_some() {
            return self.justify_single(disk, wish);
        }
        let disk = &self.disks[disk];
        let mut blocks =
            wish.offset / BLOCK as u64..(wish.offset + wish.len).div_ceil(BLOCK as u64);
        let may_read = wish.op == ReqOp::Read && !blocks.any(|block| disk.hurt.contains(&block));
        if disk.homeless() && self.given_up && !may_read {
            // It has no other place, whatever was accepted.
            return Ok(());
        }
        if self.all_accepted {
            return Err("whatever was lost has been accepted".into());
        }
        if disk.origin_failed >= since {
            return Ok(());
        }
        if !disk.dirty_once {
            return Err("its origin did not fail, and it never had anything dirty on flash".into());
        }
        let (first, last) = (
            wish.offset / BLOCK as u64,
            (wish.offset + wish.len).div_ceil(BLOCK as u64),
        );
        // Zeros that were lost are known for whose they are only when they are listed.
        let listed = self.zeros_hurt() > 0
            && self.subject.as_ref().is_some_and(|s| {
                let lost = s.unsaved(disk.config.id).lost;
                lost.iter().any(|block| (first..last).contains(block))
            });
        let hurt = listed
            || disk.hurt.range(first..last).next().is_some()
            || self.stung_unknown >= since
            || disk.stung.range(first..last).any(|(_, at)| *at >= since);
        let whole = wish.offset % BLOCK as u64 == 0 && (wish.offset + wish.len) % BLOCK as u64 == 0;
        match wish.op {
            ReqOp::Read if hurt => Ok(()),
            ReqOp::Read => Err("no flash block holding its data was hurt".into()),
            ReqOp::Flush
                if !disk.hurt.is_empty() || self.given_up || self.flash_failed >= since =>
            {
                Ok(())
            }
            _ if self.flash_failed >= since || (hurt && !whole) => Ok(()),
            _ => Err("flash did not fail meanwhile".into()),
        }
    }
}
