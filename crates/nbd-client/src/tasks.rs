//! Operations, the requests they are made of, and which of these are waiting.
//!
//! An operation may be longer than a server takes at once, or something it does not offer at
//! all; then it becomes several requests, or others. It is answered when the last of them has
//! ended, with the first error. A request that was lost with its connection waits again, before
//! those that were never sent.
//!
//! A discard or zeroing is cut into pieces only as they are sent ([`Long`]): a server may do each
//! as slowly as it writes, one may be of the whole disk, and others want to be served meanwhile.

use crate::handshake::Negotiated;
use crate::journal::{Change, Content, Journal};
use crate::transmission::{Pieces, Request};
use hearth_io::{Buf, BufSlice, IoError, IoOp, Job, OpKind};
use hearth_nbd_wire::{cflag, cmd, errno, tflag};
use smallvec::SmallVec;
use std::collections::{HashMap, VecDeque};

/// Most bytes discarded or zeroed in one request: a whole number of any block, and little enough
/// that a server which has to write them answers long before its patience or ours is over.
const EFFECT_MAX: u64 = 64 << 20;
/// Discards and zeroings in flight at most: the next is there when one ends, and a server that
/// does them slowly has places left for reads.
pub(crate) const EFFECTS_MAX: usize = 2;
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
    /// Requests that have not ended, also those not yet made.
    left: u64,
    error: Option<IoError>,
    /// Since when it waits for a server, once one was lost; it may be slow for longer.
    lost_ns: Option<u64>,
}

/// What is left of a long operation whose requests are made one by one.
struct Long {
    id: u64,
    request: Request,
    at: u64,
    end: u64,
    /// Bytes of a request at most.
    max: u64,
    /// Sent with each, for a server that cannot be asked for zeros.
    zeros: Option<BufSlice>,
}

impl Long {
    /// Requests not yet made.
    fn pieces(&self) -> u64 {
        (self.end - self.at).div_ceil(self.max)
    }

    fn piece(&self) -> Request {
        let len = (self.end - self.at).min(self.max);
        let zeros = self.zeros.iter().map(|z| z.sub(0, len as usize));
        Request {
            offset: self.at,
            len: len as u32,
            bufs: zeros.collect(),
            ..self.request.clone()
        }
    }
}

/// What an operation is made of.
enum Plan {
    Requests(Vec<Request>),
    Long(Long),
}

/// See the module.
#[derive(Default)]
pub(crate) struct Tasks {
    tasks: HashMap<u64, Task>,
    next: u64,
    waiting: VecDeque<Part>,
    long: VecDeque<Long>,
    /// The last request was one of a long operation: others have their turn.
    was_long: bool,
    zeros: Option<BufSlice>,
}

impl Tasks {
    /// Takes an operation apart and queues its requests. `down` says that there is no server
    /// now, so that it waits for one from the beginning.
    pub(crate) fn add(&mut self, job: Job, agreed: &Negotiated, down: bool) {
        let Some(op) = job.op() else {
            return;
        };
        let id = self.next;
        let plan = self.plan(id, op, agreed);
        let left = match &plan {
            Plan::Requests(requests) => requests.len() as u64,
            Plan::Long(long) => long.pieces(),
        };
        if left == 0 {
            return job.finish(Ok(()));
        }
        self.next += 1;
        let task = Task {
            left,
            error: None,
            lost_ns: down.then(|| job.start_ns()),
            job,
        };
        self.tasks.insert(id, task);
        match plan {
            Plan::Requests(requests) => {
                let owner = Owner::Task(id);
                let parts = requests.into_iter();
                self.waiting
                    .extend(parts.map(|request| Part { owner, request }));
            }
            Plan::Long(long) => self.long.push_back(long),
        }
    }

    fn plan(&mut self, id: u64, op: &IoOp, agreed: &Negotiated) -> Plan {
        let payload = u64::from(agreed.max_payload);
        Plan::Requests(match op.kind {
            OpKind::Read => split(cmd::READ, 0, op.offset, op.len, payload, &op.bufs),
            OpKind::Write => split(cmd::WRITE, 0, op.offset, op.len, payload, &op.bufs),
            OpKind::Flush if agreed.has(tflag::SEND_FLUSH) => vec![flush()],
            OpKind::Discard if agreed.has(tflag::SEND_TRIM) => {
                return Plan::Long(trims(id, op.offset, op.len));
            }
            // A server that cannot flush calls what it answers durable; a discard is a hint.
            OpKind::Flush | OpKind::Discard => Vec::new(),
            OpKind::WriteZeroes { punch } => {
                return Plan::Long(self.zeroes(id, op.offset, op.len, punch, agreed));
            }
        })
    }

    fn zeroes(&mut self, id: u64, offset: u64, len: u64, punch: bool, agreed: &Negotiated) -> Long {
        let native = agreed.has(tflag::SEND_WRITE_ZEROES);
        let (command, flags) = match (native, punch) {
            (true, true) => (cmd::WRITE_ZEROES, 0),
            (true, false) => (cmd::WRITE_ZEROES, cflag::NO_HOLE),
            (false, _) => (cmd::WRITE, 0),
        };
        let max = if native {
            EFFECT_MAX
        } else {
            u64::from(ZEROS.min(agreed.max_payload).max(1))
        };
        let zeros = (!native).then(|| {
            let zeros = self
                .zeros
                .get_or_insert_with(|| Buf::zeroed(ZEROS as usize).all());
            zeros.clone()
        });
        Long {
            id,
            request: Request {
                command,
                flags,
                ..flush()
            },
            at: offset,
            end: offset + len,
            max,
            zeros,
        }
    }

    /// Operations not answered.
    pub(crate) fn len(&self) -> usize {
        self.tasks.len()
    }

    /// The next request that waits and of which `may` says so. Long operations and all others
    /// have their turns.
    pub(crate) fn next(&mut self, may: impl Fn(&Request) -> bool) -> Option<Part> {
        let first = !self.was_long;
        for long in [first, !first] {
            let part = if long {
                self.next_piece(&may)
            } else {
                self.next_waiting(&may)
            };
            if part.is_some() {
                self.was_long = long;
                return part;
            }
        }
        None
    }

    fn next_waiting(&mut self, may: impl Fn(&Request) -> bool) -> Option<Part> {
        if may(&self.waiting.front()?.request) {
            self.waiting.pop_front()
        } else {
            None
        }
    }

    fn next_piece(&mut self, may: impl Fn(&Request) -> bool) -> Option<Part> {
        let long = self.long.front_mut()?;
        let request = long.piece();
        if !may(&request) {
            return None;
        }
        let owner = Owner::Task(long.id);
        long.at += u64::from(request.len);
        if long.at == long.end {
            self.long.pop_front();
        }
        Some(Part { owner, request })
    }

    /// Queues requests before all others.
    pub(crate) fn put_first(&mut self, parts: Vec<Part>) {
        for part in parts.into_iter().rev() {
            self.waiting.push_front(part);
        }
    }

    /// A request of an operation has ended.
    pub(crate) fn ended(&mut self, id: u64, result: Result<(), IoError>) {
        self.end(id, 1, result);
    }

    fn end(&mut self, id: u64, requests: u64, result: Result<(), IoError>) {
        let Some(task) = self.tasks.get_mut(&id) else {
            return;
        };
        task.left = task.left.saturating_sub(requests);
        match result {
            // There is a server, and it does what this one wants.
            Ok(()) => task.lost_ns = None,
            Err(e) => {
                task.error.get_or_insert(e);
            }
        }
        if task.left == 0
            && let Some(task) = self.tasks.remove(&id)
        {
            task.job.finish(task.error.map_or(Ok(()), Err));
        }
    }

    /// The server is lost: from now on its operations wait for another, those that did before
    /// since then.
    pub(crate) fn lost(&mut self, now_ns: u64) {
        for task in self.tasks.values_mut() {
            task.lost_ns.get_or_insert(now_ns);
        }
    }

    /// True if an operation has waited for a server since before `before_ns`.
    pub(crate) fn any_lost_before(&self, before_ns: u64) -> bool {
        let mut tasks = self.tasks.values();
        tasks.any(|t| t.lost_ns.is_some_and(|since| since < before_ns))
    }

    /// Fails every operation that `which` picks by its time of submission, and forgets its
    /// requests. None of them may be in flight.
    pub(crate) fn fail(&mut self, error: IoError, which: impl Fn(u64) -> bool) {
        let (waiting, long) = (&mut self.waiting, &mut self.long);
        for (id, task) in self.tasks.extract_if(|_, t| which(t.job.start_ns())) {
            waiting.retain(|part| part.owner != Owner::Task(id));
            long.retain(|long| long.id != id);
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
        for long in std::mem::take(&mut self.long) {
            self.end(long.id, long.pieces(), Err(error));
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
        Content::Zeroes { punch } => all(tasks.zeroes(0, offset, len, *punch, agreed)),
        Content::Trimmed if agreed.has(tflag::SEND_TRIM) => all(trims(0, offset, len)),
        Content::Trimmed => Vec::new(),
    }
}

fn trims(id: u64, offset: u64, len: u64) -> Long {
    Long {
        id,
        request: Request {
            command: cmd::TRIM,
            ..flush()
        },
        at: offset,
        end: offset + len,
        max: EFFECT_MAX,
        zeros: None,
    }
}

/// All requests of a long operation at once.
fn all(mut long: Long) -> Vec<Request> {
    let mut requests = Vec::new();
    while long.at < long.end {
        let request = long.piece();
        long.at += u64::from(request.len);
        requests.push(request);
    }
    requests
}

impl Request {
    /// True if it changes what the export holds.
    pub(crate) fn is_change(&self) -> bool {
        matches!(self.command, cmd::WRITE | cmd::WRITE_ZEROES | cmd::TRIM)
    }

    /// True if it is one of few, for the server may take its time over it.
    pub(crate) fn is_effect(&self) -> bool {
        matches!(self.command, cmd::WRITE_ZEROES | cmd::TRIM)
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

    #[test]
    fn long_operations_are_cut_as_they_are_sent_and_others_have_their_turns() {
        let mut tasks = Tasks::default();
        let long = trims(7, 4096, 3 * EFFECT_MAX + 512);
        assert_eq!(long.pieces(), 4);
        tasks.long.push_back(long);
        tasks.put_first(vec![
            Part {
                owner: Owner::Own,
                request: flush(),
            };
            2
        ]);
        let mut next = |effects: bool| {
            let part = tasks.next(|r| effects || !r.is_effect())?;
            Some((part.request.command, part.request.offset, part.request.len))
        };
        let piece = |i: u64, len: u64| Some((cmd::TRIM, 4096 + i * EFFECT_MAX, len as u32));
        assert_eq!(next(true), piece(0, EFFECT_MAX));
        assert_eq!(next(true), Some((cmd::FLUSH, 0, 0)));
        // Enough of them are in flight: what is no such request need not wait.
        assert_eq!(next(false), Some((cmd::FLUSH, 0, 0)));
        assert_eq!(next(false), None);
        assert_eq!(next(true), piece(1, EFFECT_MAX));
        assert_eq!(next(true), piece(2, EFFECT_MAX));
        assert_eq!(next(true), piece(3, 512));
        assert_eq!(next(true), None);
    }
}
