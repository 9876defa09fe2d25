//! Operations, the requests they are made of, and which of these are waiting.
//!
//! An operation may be longer than a server takes at once, or something it does not offer at
//! all; then it becomes several requests, or others. It is answered when the last of them has
//! ended, with the first error. A request that was lost with its connection waits again, before
//! those that were never sent.

use crate::handshake::Negotiated;
use crate::journal::{Change, Content, Journal};
use crate::transmission::{Pieces, Request};
use hearth_io::{Buf, BufSlice, IoError, IoOp, Job, OpKind};
use hearth_nbd_wire::{cflag, cmd, errno, tflag};
use smallvec::SmallVec;
use std::collections::{HashMap, VecDeque};

/// Most bytes discarded or zeroed in one request: it fits the 32 bits of a length, and is a
/// whole number of any block.
const EFFECT_MAX: u64 = 1 << 30;
/// Zeros sent at once to a server that cannot be asked for them.
const ZEROS: u32 = 1 << 20;
/// Bytes read to see whether a server answers.
const PROBE: u64 = 4096;

/// Whose request it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// Of an operation.
    Task(u64),
    /// Sent again from the journal, or a probe.
    Replay,
    /// A flush of our own.
    Own,
}

/// A request and whose it is.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) owner: Owner,
    pub(crate) request: Request,
}

struct Task {
    job: Job,
    left: usize,
    error: Option<IoError>,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Tasks {
    tasks: HashMap<u64, Task>,
    next: u64,
    waiting: VecDeque<Part>,
    zeros: Option<BufSlice>,
}

impl Tasks {
    /// Takes an operation apart and queues its requests.
    pub(crate) fn add(&mut self, job: Job, agreed: &Negotiated) {
        let Some(op) = job.op() else {
            return;
        };
        let requests = self.requests(op, agreed);
        if requests.is_empty() {
            return job.finish(Ok(()));
        }
        let id = self.next;
        self.next += 1;
        let task = Task {
            job,
            left: requests.len(),
            error: None,
        };
        self.tasks.insert(id, task);
        self.waiting
            .extend(requests.into_iter().map(|request| Part {
                owner: Owner::Task(id),
                request,
            }));
    }

    fn requests(&mut self, op: &IoOp, agreed: &Negotiated) -> Vec<Request> {
        let payload = u64::from(agreed.max_payload);
        match op.kind {
            OpKind::Read => split(cmd::READ, 0, op.offset, op.len, payload, &op.bufs),
            OpKind::Write => split(cmd::WRITE, 0, op.offset, op.len, payload, &op.bufs),
            OpKind::Flush if agreed.has(tflag::SEND_FLUSH) => vec![flush()],
            OpKind::Discard if agreed.has(tflag::SEND_TRIM) => {
                split(cmd::TRIM, 0, op.offset, op.len, EFFECT_MAX, &[])
            }
            // A server that cannot flush calls what it answers durable; a discard is a hint.
            OpKind::Flush | OpKind::Discard => Vec::new(),
            OpKind::WriteZeroes { punch } => self.zeroes(op.offset, op.len, punch, agreed),
        }
    }

    fn zeroes(&mut self, offset: u64, len: u64, punch: bool, agreed: &Negotiated) -> Vec<Request> {
        if agreed.has(tflag::SEND_WRITE_ZEROES) {
            let flags = if punch { 0 } else { cflag::NO_HOLE };
            return split(cmd::WRITE_ZEROES, flags, offset, len, EFFECT_MAX, &[]);
        }
        let piece = ZEROS.min(agreed.max_payload);
        let zeros = self
            .zeros
            .get_or_insert_with(|| Buf::zeroed(ZEROS as usize).all());
        let mut requests = split(cmd::WRITE, 0, offset, len, u64::from(piece), &[]);
        for request in &mut requests {
            request.bufs.push(zeros.sub(0, request.len as usize));
        }
        requests
    }

    /// Operations not answered.
    pub(crate) fn len(&self) -> usize {
        self.tasks.len()
    }

    /// The next request that waits, if `may` says so.
    pub(crate) fn next(&mut self, may: impl FnOnce(&Request) -> bool) -> Option<Part> {
        if may(&self.waiting.front()?.request) {
            self.waiting.pop_front()
        } else {
            None
        }
    }

    /// Queues requests before all others.
    pub(crate) fn put_first(&mut self, parts: Vec<Part>) {
        for part in parts.into_iter().rev() {
            self.waiting.push_front(part);
        }
    }

    /// A request of an operation has ended.
    pub(crate) fn ended(&mut self, id: u64, result: Result<(), IoError>) {
        let Some(task) = self.tasks.get_mut(&id) else {
            return;
        };
        task.left -= 1;
        if let Err(e) = result {
            task.error.get_or_insert(e);
        }
        if task.left == 0
            && let Some(task) = self.tasks.remove(&id)
        {
            task.job.finish(task.error.map_or(Ok(()), Err));
        }
    }

    /// True if an operation was submitted before `before_ns`.
    pub(crate) fn any_before(&self, before_ns: u64) -> bool {
        self.tasks.values().any(|t| t.job.start_ns() < before_ns)
    }

    /// Fails every operation that `which` picks by its time of submission, and forgets its
    /// requests. None of them may be in flight.
    pub(crate) fn fail(&mut self, error: IoError, which: impl Fn(u64) -> bool) {
        let waiting = &mut self.waiting;
        for (id, task) in self.tasks.extract_if(|_, t| which(t.job.start_ns())) {
            waiting.retain(|part| part.owner != Owner::Task(id));
            task.job.finish(Err(error));
        }
    }

    /// Fails operations that have a change waiting.
    pub(crate) fn fail_changes(&mut self, error: IoError) {
        let (failed, kept): (VecDeque<Part>, VecDeque<Part>) = std::mem::take(&mut self.waiting)
            .into_iter()
            .partition(|p| p.request.is_change() && matches!(p.owner, Owner::Task(_)));
        self.waiting = kept;
        for part in failed {
            if let Owner::Task(id) = part.owner {
                self.ended(id, Err(error));
            }
        }
    }
}

/// A flush.
pub(crate) fn flush() -> Request {
    Request {
        command: cmd::FLUSH,
        flags: 0,
        offset: 0,
        len: 0,
        bufs: Pieces::new(),
    }
}

/// A read that shows whether a server answers. Its data goes nowhere.
pub(crate) fn probe(size: u64) -> Request {
    let len = size.min(PROBE) as usize;
    Request {
        command: cmd::READ,
        flags: 0,
        offset: 0,
        len: len as u32,
        bufs: [Buf::zeroed(len).slice(0, len)].into_iter().collect(),
    }
}

/// The requests that do a remembered change again.
pub(crate) fn again(tasks: &mut Tasks, change: &Change, agreed: &Negotiated) -> Vec<Request> {
    let (offset, len) = (change.offset, change.len);
    match &change.content {
        Content::Data(buf) => {
            let max = u64::from(agreed.max_payload);
            split(cmd::WRITE, 0, offset, len, max, std::slice::from_ref(buf))
        }
        Content::Zeroes { punch } => tasks.zeroes(offset, len, *punch, agreed),
        Content::Trimmed if agreed.has(tflag::SEND_TRIM) => {
            split(cmd::TRIM, 0, offset, len, EFFECT_MAX, &[])
        }
        Content::Trimmed => Vec::new(),
    }
}

impl Request {
    /// True if it changes what the export holds.
    pub(crate) fn is_change(&self) -> bool {
        matches!(self.command, cmd::WRITE | cmd::WRITE_ZEROES | cmd::TRIM)
    }

    /// Has the journal remember what it did.
    pub(crate) fn remember(&self, journal: &mut Journal) {
        let content = match self.command {
            cmd::WRITE => return journal.written(self.offset, &self.bufs),
            cmd::WRITE_ZEROES => Content::Zeroes {
                punch: self.flags & cflag::NO_HOLE == 0,
            },
            cmd::TRIM => Content::Trimmed,
            _ => return,
        };
        journal.changed(self.offset, u64::from(self.len), content);
    }
}

/// Cuts a range into requests of at most `max` bytes.
fn split(
    command: u16,
    flags: u16,
    offset: u64,
    len: u64,
    max: u64,
    bufs: &[BufSlice],
) -> Vec<Request> {
    let mut requests = Vec::with_capacity(len.div_ceil(max.max(1)) as usize);
    let mut pieces = bufs.iter().cloned();
    let mut open: Option<BufSlice> = None;
    let mut done = 0;
    while done < len {
        let n = (len - done).min(max);
        let mut own: Pieces = SmallVec::new();
        let mut want = n as usize;
        while want > 0 {
            let Some(piece) = open.take().or_else(|| pieces.next()) else {
                break;
            };
            if piece.len() > want {
                open = Some(piece.sub(want, piece.len() - want));
                own.push(piece.sub(0, want));
                want = 0;
            } else {
                want -= piece.len();
                own.push(piece);
            }
        }
        requests.push(Request {
            command,
            flags,
            offset: offset + done,
            len: n as u32,
            bufs: own,
        });
        done += n;
    }
    requests
}

/// What an error of the protocol is to the rest of Hearth.
pub(crate) fn io_error(error: u32) -> IoError {
    IoError::Os(match error {
        errno::PERM => libc::EPERM,
        errno::NOMEM => libc::ENOMEM,
        errno::INVAL => libc::EINVAL,
        errno::NOSPC => libc::ENOSPC,
        errno::OVERFLOW => libc::EOVERFLOW,
        errno::NOTSUP => libc::EOPNOTSUPP,
        _ => libc::EIO,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_operations_are_cut_where_memory_is_not() {
        let bufs = [Buf::zeroed(8192).all(), Buf::zeroed(12288).all()];
        let parts = split(cmd::WRITE, 0, 4096, 20480, 10240, &bufs);
        let shape: Vec<(u64, u32, Vec<usize>)> = parts
            .iter()
            .map(|p| (p.offset, p.len, p.bufs.iter().map(BufSlice::len).collect()))
            .collect();
        assert_eq!(
            shape,
            [(4096, 10240, vec![8192, 2048]), (14336, 10240, vec![10240])]
        );
        let next = parts[0].bufs[1].as_ptr().wrapping_add(2048);
        assert_eq!(parts[1].bufs[0].as_ptr(), next);
    }
}
