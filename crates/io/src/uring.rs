//! The production driver: one io_uring per data thread, entered once per round of its loop.
//!
//! Every operation lives in a slot, boxed so that it never moves, from submission until its
//! completion has been reaped: the kernel writes into its buffers and reads its vectors in
//! between. A slot's index is the completion's user data. What would block (tails of odd-sized
//! files, block-device discards, zeros written by hand) goes to helper threads, what is
//! modelled to the model's thread; both answer through the outbox and the wake handle.

use crate::buf::BufSlice;
use crate::delay::Delayed;
use crate::device::Device;
use crate::file::{BlockFile, PUNCH, ZERO, unsupported_errno};
use crate::helper::{Finished, Helpers, Job, Outbox};
use crate::op::{IoDone, IoError, IoOp, OpKind};
use crate::patience::{Lending, answer_for, may_answer};
use crate::proactor::{Event, Proactor, SendList, Wait};
use crate::sys::{now_ns, set_nonblocking};
use crate::targets::{TargetView, Targets};
use crate::threads::settle_done;
use crate::wake::WakeHandle;
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use std::collections::VecDeque;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// Submissions prepared between two entries into the kernel; a full queue is submitted early.
const SQ_ENTRIES: u32 = 512;
/// Completions the ring holds; more are kept by the kernel (`IORING_FEAT_NODROP`).
const CQ_ENTRIES: u32 = 4096;
/// Block operations with the kernel or the helpers at a time; more wait here.
const IO_MAX: usize = 1024;
/// Threads for what blocks.
const HELPERS: usize = 4;
/// Block operations prepared before the device is told of them, although this thread has more
/// to do. A device that gets a connection's whole queue at once also ends it at once, and then
/// client, server and device take turns instead of working side by side.
const GATHER_IDLE: u32 = 2;
/// The same while the device has plenty to do: telling it costs as much as a small request.
const GATHER_BUSY: u32 = 8;
/// Block operations in flight that count as plenty.
const BUSY: usize = 8;
/// Times an operation is submitted again after `EAGAIN` or `EINTR` before that is its result.
const RETRIES_MAX: u8 = 16;
/// Times in a row the kernel may be short of memory before the ring counts as broken, and the pause
/// after each: a second in all.
const SHORT_MAX: u32 = 100;
const SHORT_PAUSE: std::time::Duration = std::time::Duration::from_millis(10);
/// I/O vectors per system call (`UIO_MAXIOV`); longer lists take several.
const IOV_MAX: usize = 1024;
/// How long a dying driver waits for the kernel before it leaks what is still in use.
const DRAIN_NS: u64 = 5_000_000_000;
/// `IORING_RECVSEND_POLL_FIRST`: do not try before the socket is readable.
const POLL_FIRST: u16 = 1;
/// User data of operations nobody waits for (cancellations).
const IGNORED: u64 = u64::MAX;

enum Work {
    Free,
    Io {
        op: IoOp,
        device: Arc<Device>,
        done: u64,
        tries: u8,
        start_ns: u64,
        /// The device owes its end.
        owed: bool,
        /// It was answered for.
        told: bool,
    },
    Recv {
        token: u64,
        _buf: BufSlice,
    },
    Send {
        token: u64,
        _list: SendList,
        /// Bytes that went out before.
        before: usize,
    },
    Accept {
        token: u64,
    },
    Watch {
        token: u64,
        cancelled: bool,
    },
    Signal {
        token: u64,
    },
    Wake,
}

struct Slot {
    work: Work,
    iov: Vec<libc::iovec>,
    msg: libc::msghdr,
    count: u64,
}

impl Slot {
    /// Makes the message header name what is in `bufs` from byte `skip` on.
    fn aim(&mut self, bufs: &[BufSlice], skip: u64) {
        vectors(&mut self.iov, bufs, skip);
        self.msg.msg_iov = self.iov.as_mut_ptr();
        self.msg.msg_iovlen = self.iov.len() as _;
    }
}

/// See the module.
pub(crate) struct RingDriver {
    ring: IoUring,
    /// Leaked, not freed, if the kernel still uses any at the end.
    #[expect(
        clippy::vec_box,
        reason = "the kernel holds addresses inside slots; the list grows"
    )]
    slots: ManuallyDrop<Vec<Box<Slot>>>,
    free: Vec<u32>,
    targets: TargetView,
    wake: WakeHandle,
    wake_armed: bool,
    helpers: Helpers,
    outbox: Arc<Outbox>,
    finished: Vec<Finished>,
    /// Block operations in slots, and at helpers.
    in_ring: usize,
    at_helpers: usize,
    /// Of those in slots, how many were answered for; and when it is looked for others.
    told: usize,
    look_ns: u64,
    lending: Lending,
    backlog: VecDeque<IoOp>,
    /// Submissions the ring had no room for.
    overflow: VecDeque<squeue::Entry>,
    ready: Vec<IoDone>,
    early: Vec<Event>,
    delayed: Delayed,
    reaped: Vec<(u64, i32, u32)>,
    now: u64,
    /// Block operations prepared since the kernel was last entered.
    gathered: u32,
    /// [`raise_workers`](Self::raise_workers) was called.
    workers_raised: bool,
    /// Entries in a row for which the kernel had no memory.
    short: u32,
}

impl RingDriver {
    pub(crate) fn open(targets: Arc<Targets>) -> io::Result<RingDriver> {
        let ring = build()?;
        let need = ring.params();
        if !need.is_feature_ext_arg() || !need.is_feature_nodrop() || !need.is_feature_fast_poll() {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "the kernel is older than 5.11",
            ));
        }
        let wake = WakeHandle::new()?;
        Ok(RingDriver {
            ring,
            slots: ManuallyDrop::new(Vec::new()),
            free: Vec::new(),
            targets: TargetView::new(targets, wake.clone()),
            wake_armed: false,
            helpers: Helpers::new(HELPERS),
            outbox: Outbox::new(wake.clone()),
            wake,
            finished: Vec::new(),
            in_ring: 0,
            at_helpers: 0,
            told: 0,
            look_ns: 0,
            lending: Lending::default(),
            backlog: VecDeque::new(),
            overflow: VecDeque::new(),
            ready: Vec::new(),
            early: Vec::new(),
            delayed: Delayed::default(),
            reaped: Vec::new(),
            now: now_ns(),
            gathered: 0,
            workers_raised: false,
            short: 0,
        })
    }

    fn slot(&mut self, work: Work) -> u32 {
        let index = self.free.pop().unwrap_or_else(|| {
            // SAFETY: all-zero bytes are a valid msghdr (null pointers, zero lengths).
            let msg = unsafe { std::mem::zeroed() };
            self.slots.push(Box::new(Slot {
                work: Work::Free,
                iov: Vec::new(),
                msg,
                count: 0,
            }));
            (self.slots.len() - 1) as u32
        });
        self.slots[index as usize].work = work;
        index
    }

    fn release(&mut self, index: u32) -> Work {
        self.free.push(index);
        std::mem::replace(&mut self.slots[index as usize].work, Work::Free)
    }

    /// Queues a submission. Everything it points to lives in a slot until its completion.
    fn push(&mut self, entry: squeue::Entry) {
        // SAFETY: buffers, vectors and headers are owned by the slot named in the user data
        // and stay put until its completion is reaped (`Drop` waits, else leaks).
        if !self.overflow.is_empty() || unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.overflow.push_back(entry);
            self.refill();
        }
    }

    /// Moves what did not fit into the ring, submitting early if it must.
    fn refill(&mut self) {
        while let Some(entry) = self.overflow.front() {
            // SAFETY: as in `push`.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                self.overflow.pop_front();
            } else if self.ring.submit().is_err() || self.ring.submission().is_full() {
                // The kernel is busy; completions reaped by the next wait make room.
                return;
            }
        }
    }

    fn start_io(&mut self, op: IoOp) {
        let Some(device) = self.targets.get(op.target).cloned() else {
            return self.ready.push(op.done(Err(IoError::Os(libc::ENODEV)), 0));
        };
        if let Err(e) = device.admit(&op) {
            return self.ready.push(op.done(Err(e), 0));
        }
        let in_ring = device.ring_file().is_some_and(|file| match op.kind {
            OpKind::Read | OpKind::Write => op.len > 0 && fits_ring(file, &op),
            OpKind::Flush => !file.is_read_only(),
            OpKind::Discard | OpKind::WriteZeroes { punch: true } => {
                op.len > 0 && file.can_fallocate(false)
            }
            OpKind::WriteZeroes { punch: false } => op.len > 0 && file.can_fallocate(true),
        });
        if !in_ring || device.announces(op.kind) {
            return self.hand_over(op, device, self.now);
        }
        self.in_ring += 1;
        let start_ns = self.now;
        let index = self.slot(Work::Io {
            op,
            device,
            done: 0,
            tries: 0,
            start_ns,
            owed: false,
            told: false,
        });
        self.submit_slot(index);
    }

    fn hand_over(&mut self, op: IoOp, device: Arc<Device>, start_ns: u64) {
        self.at_helpers += 1;
        let lent = device.is_watched().then(|| self.lending.lend(&op, &device));
        let mut job = Job::new(op, device.clone(), start_ns, self.outbox.clone());
        if let Some(lent) = lent {
            job = job.watched(lent);
        }
        let announces = job.op().is_some_and(|op| device.announces(op.kind));
        let job = match announces {
            true => device.hold(job),
            false => Some(job),
        };
        if let Some(job) = job.and_then(|job| device.take(job)) {
            self.helpers.push(job);
        }
    }

    /// Submits what is left of the block operation in a slot.
    fn submit_slot(&mut self, index: u32) {
        let slot = &mut *self.slots[index as usize];
        let Work::Io {
            op, device, done, ..
        } = &slot.work
        else {
            return;
        };
        // Only what has a file comes here.
        let Some(file) = device.ring_file() else {
            return;
        };
        let fd = types::Fd(file.direct_fd());
        let offset = op.offset + done;
        let entry = match op.kind {
            OpKind::Flush => opcode::Fsync::new(fd)
                .flags(types::FsyncFlags::DATASYNC)
                .build(),
            OpKind::Discard | OpKind::WriteZeroes { punch: true } => {
                opcode::Fallocate::new(fd, op.len)
                    .offset(op.offset)
                    .mode(PUNCH)
                    .build()
            }
            OpKind::WriteZeroes { punch: false } => opcode::Fallocate::new(fd, op.len)
                .offset(op.offset)
                .mode(ZERO)
                .build(),
            OpKind::Read | OpKind::Write => {
                let read = op.kind == OpKind::Read;
                if let [buf] = op.bufs.as_slice() {
                    let at = buf.as_ptr().wrapping_add(*done as usize);
                    let len = (op.len - done) as u32;
                    if read {
                        opcode::Read::new(fd, at, len).offset(offset).build()
                    } else {
                        opcode::Write::new(fd, at, len).offset(offset).build()
                    }
                } else {
                    vectors(&mut slot.iov, &op.bufs, *done);
                    let (iov, n) = (slot.iov.as_ptr(), slot.iov.len() as u32);
                    if read {
                        opcode::Readv::new(fd, iov, n).offset(offset).build()
                    } else {
                        opcode::Writev::new(fd, iov, n).offset(offset).build()
                    }
                }
            }
        };
        let entry = if file.waits_for_others() {
            // Else the kernel begins by itself, in this thread, and waits with it for a server
            // that may hang.
            self.raise_workers();
            entry.flags(squeue::Flags::ASYNC)
        } else {
            entry
        };
        self.push(entry.user_data(u64::from(index)));
        self.gathered += 1;
        let max = if self.in_ring > BUSY {
            GATHER_BUSY
        } else {
            GATHER_IDLE
        };
        if self.gathered >= max {
            self.gathered = 0;
            // What it cannot take now is submitted by the next wait.
            let _ = self.ring.submit();
        }
    }

    /// Gives the kernel a worker for every operation there may be: a hanging server keeps as many
    /// of them as it has requests, and flushes of other devices need some, too.
    fn raise_workers(&mut self) {
        if !self.workers_raised {
            self.workers_raised = true;
            // Linux 5.15. Without it the kernel's own limit stands.
            let _ = self
                .ring
                .submitter()
                .register_iowq_max_workers(&mut [IO_MAX as u32, 0]);
        }
    }

    fn complete(
        &mut self,
        index: u32,
        res: i32,
        flags: u32,
        events: &mut Vec<Event>,
        dones: &mut Vec<IoDone>,
    ) {
        let Some(slot) = self.slots.get_mut(index as usize) else {
            return;
        };
        let result = || {
            if res >= 0 {
                Ok(res as usize)
            } else {
                Err(io::Error::from_raw_os_error(-res))
            }
        };
        match &mut slot.work {
            Work::Free => {}
            Work::Io {
                op,
                done,
                tries,
                told,
                ..
            } => {
                let progress = match op.kind {
                    _ if *told => Ok(true),
                    _ if res == -libc::EINTR || res == -libc::EAGAIN => {
                        *tries += 1;
                        if *tries > RETRIES_MAX {
                            Err(IoError::Os(-res))
                        } else {
                            Ok(false)
                        }
                    }
                    _ if res < 0 => Err(IoError::Os(-res)),
                    OpKind::Read | OpKind::Write if res == 0 => Err(IoError::UnexpectedEof),
                    OpKind::Read | OpKind::Write => {
                        *done += res as u64;
                        Ok(*done >= op.len)
                    }
                    _ => Ok(true),
                };
                match progress {
                    Ok(false) => self.submit_slot(index),
                    Ok(true) => self.end_io(index, Ok(()), dones),
                    Err(e) => self.end_io(index, Err(e), dones),
                }
            }
            Work::Recv { token, .. } => {
                events.push(Event::Recv {
                    token: *token,
                    result: result(),
                    more: cqueue::sock_nonempty(flags),
                });
                self.release(index);
            }
            Work::Send { token, before, .. } => {
                events.push(Event::Sent {
                    token: *token,
                    result: result().map(|n| *before + n),
                });
                self.release(index);
            }
            Work::Accept { token } => {
                // SAFETY: a descriptor just made by the kernel, owned by nobody else.
                let result = result().map(|fd| unsafe { OwnedFd::from_raw_fd(fd as RawFd) });
                events.push(Event::Accepted {
                    token: *token,
                    result,
                });
                self.release(index);
            }
            Work::Watch { token, cancelled } => {
                let (token, over) = (*token, !cqueue::more(flags));
                let ended = over && (res < 0 || *cancelled);
                if ended || res >= 0 {
                    events.push(Event::Rung {
                        token,
                        result: match res {
                            _ if !ended => Ok(()),
                            0.. => Err(io::Error::from_raw_os_error(libc::ECANCELED)),
                            _ => Err(io::Error::from_raw_os_error(-res)),
                        },
                    });
                }
                if ended {
                    self.release(index);
                } else if over {
                    self.arm_watch(index);
                }
            }
            Work::Signal { token } => {
                events.push(Event::Signalled { token: *token });
                self.release(index);
            }
            Work::Wake => {
                self.wake_armed = false;
                self.release(index);
            }
        }
    }

    fn end_io(&mut self, index: u32, result: Result<(), IoError>, dones: &mut Vec<IoDone>) {
        self.in_ring -= 1;
        let Work::Io {
            op,
            device,
            start_ns,
            owed,
            told,
            ..
        } = self.release(index)
        else {
            return;
        };
        device.patience().note_ended(self.now);
        if owed {
            device.patience().note_paid(&device.name());
        }
        if told {
            self.told -= 1;
            return;
        }
        if let Err(IoError::Os(errno)) = result
            && matches!(op.kind, OpKind::Discard | OpKind::WriteZeroes { .. })
            && unsupported_errno(errno)
        {
            // The blocking path knows how to do without, and remembers.
            return self.hand_over(op, device, start_ns);
        }
        let done = op.done(result, self.now.saturating_sub(start_ns));
        settle_done(
            done,
            start_ns,
            device.latency_ns(),
            self.now,
            &mut self.delayed,
            dones,
        );
    }

    fn arm_wake(&mut self) {
        if !self.wake_armed {
            self.wake_armed = true;
            let index = self.slot(Work::Wake);
            let count = (&raw mut self.slots[index as usize].count).cast::<u8>();
            self.push(
                opcode::Read::new(types::Fd(self.wake.fd()), count, 8)
                    .build()
                    .user_data(u64::from(index)),
            );
        }
    }

    /// Polls the descriptor of a watch, which lies in the slot's count. A multishot poll is told
    /// of every ring without the counter being read: no system call per ring, and nothing a
    /// blocking eventfd could block.
    fn arm_watch(&mut self, index: u32) {
        let fd = types::Fd(self.slots[index as usize].count as RawFd);
        self.push(
            opcode::PollAdd::new(fd, libc::POLLIN as u32)
                .multi(true)
                .build()
                .user_data(u64::from(index)),
        );
    }

    /// Enters the kernel: submits, and sleeps if `limit` says so. `Some(0)`: does not sleep.
    fn enter(&mut self, limit: Option<u64>) -> io::Result<()> {
        self.gathered = 0;
        let entered = match limit {
            Some(0) => {
                let sq = self.ring.submission();
                if sq.is_empty() && !sq.taskrun() && !sq.cq_overflow() {
                    return Ok(());
                }
                drop(sq);
                self.ring.submit()
            }
            None => self.ring.submit_and_wait(1),
            Some(at) => {
                let ns = at.saturating_sub(now_ns());
                let ts = types::Timespec::new()
                    .sec(ns / 1_000_000_000)
                    .nsec((ns % 1_000_000_000) as u32);
                self.ring
                    .submitter()
                    .submit_with_args(1, &types::SubmitArgs::new().timespec(&ts))
            }
        };
        match entered {
            Ok(_) => {
                self.short = 0;
                Ok(())
            }
            Err(e) => match e.raw_os_error() {
                // The kernel is short of memory, as it may be for a moment; what was not submitted
                // still is in the ring.
                Some(libc::ENOMEM) if self.short < SHORT_MAX => {
                    self.short += 1;
                    std::thread::sleep(SHORT_PAUSE);
                    Ok(())
                }
                // Timed out; interrupted; completions must be reaped first.
                Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN) => Ok(()),
                _ => Err(e),
            },
        }
    }

    fn reap(&mut self, events: &mut Vec<Event>, dones: &mut Vec<IoDone>) {
        let mut reaped = std::mem::take(&mut self.reaped);
        reaped.extend(
            self.ring
                .completion()
                .map(|c| (c.user_data(), c.result(), c.flags())),
        );
        for (data, res, flags) in reaped.drain(..) {
            if data != IGNORED {
                self.complete(data as u32, res, flags, events, dones);
            }
        }
        self.reaped = reaped;
    }

    fn collect_helpers(&mut self, dones: &mut Vec<IoDone>) {
        if self.at_helpers == 0 {
            return;
        }
        let mut finished = std::mem::take(&mut self.finished);
        self.outbox.take(&mut finished);
        self.at_helpers -= finished.len();
        for f in finished.drain(..) {
            if self.lending.is_told(f.number, self.now) {
                continue;
            }
            let latency_ns = f.latency_ns();
            let done = f.op.done(f.result, f.end_ns.saturating_sub(f.start_ns));
            settle_done(
                done,
                f.start_ns,
                latency_ns,
                self.now,
                &mut self.delayed,
                dones,
            );
        }
        self.finished = finished;
    }

    /// Answers for what the kernel should have ended by now.
    fn look(&mut self, dones: &mut Vec<IoDone>) {
        self.look_ns = self.lending.look(self.now, dones);
        if self.in_ring == self.told {
            return;
        }
        for slot in self.slots.iter_mut() {
            if let Work::Io {
                op,
                device,
                start_ns,
                owed,
                told,
                ..
            } = &mut slot.work
                && !*owed
                && let Some(at) = device.patience().over_at(*start_ns, op.len)
            {
                if at > self.now {
                    self.look_ns = self.look_ns.min(at);
                    continue;
                }
                *owed = true;
                device.patience().note_owed(&device.name());
                if !may_answer(op) {
                    continue;
                }
                *told = true;
                self.told += 1;
                dones.push(answer_for(op, *start_ns, self.now));
            }
        }
    }

    fn in_use(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    fn cancel_slots(&mut self, which: impl Fn(&Work) -> bool) {
        let hits: Vec<u64> = self
            .slots
            .iter()
            .enumerate()
            .filter(|(_, s)| which(&s.work))
            .map(|(i, _)| i as u64)
            .collect();
        for index in hits {
            self.push(opcode::AsyncCancel::new(index).build().user_data(IGNORED));
        }
    }
}

/// The best ring this kernel gives: completions run on our own entries into the kernel, no
/// interrupts between processors.
fn build() -> io::Result<IoUring> {
    let mut last = None;
    for attempt in 0..3 {
        let mut builder = IoUring::builder();
        builder.setup_clamp().setup_cqsize(CQ_ENTRIES).dontfork();
        match attempt {
            // Linux 6.1; 5.19; any.
            0 => builder
                .setup_single_issuer()
                .setup_defer_taskrun()
                .setup_taskrun_flag()
                .setup_submit_all(),
            1 => builder
                .setup_coop_taskrun()
                .setup_taskrun_flag()
                .setup_submit_all(),
            _ => &mut builder,
        };
        match builder.build(SQ_ENTRIES) {
            Ok(ring) => return Ok(ring),
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => last = Some(e),
            Err(e) => return Err(e),
        }
    }
    Err(last.unwrap_or_else(|| io::Error::from_raw_os_error(libc::EINVAL)))
}

/// True if the ring can do a read or write whole on the direct descriptor.
#[inline]
fn fits_ring(file: &BlockFile, op: &IoOp) -> bool {
    file.fits_direct(op.offset, op.len)
        && op
            .bufs
            .iter()
            .all(|b| file.fits_memory(b.as_ptr(), b.len()))
}

/// Writes the vectors of `bufs` from byte `skip` on into `iov`, neighbours in memory merged.
fn vectors(iov: &mut Vec<libc::iovec>, bufs: &[BufSlice], mut skip: u64) {
    iov.clear();
    for buf in bufs {
        if skip >= buf.len() as u64 {
            skip -= buf.len() as u64;
            continue;
        }
        let start = buf.as_ptr().wrapping_add(skip as usize);
        let len = buf.len() - skip as usize;
        skip = 0;
        if let Some(last) = iov.last_mut()
            && last.iov_base.wrapping_byte_add(last.iov_len) == start.cast()
        {
            last.iov_len += len;
        } else if iov.len() < IOV_MAX {
            iov.push(libc::iovec {
                iov_base: start.cast(),
                iov_len: len,
            });
        } else {
            return;
        }
    }
}

impl Proactor for RingDriver {
    fn submit_io(&mut self, op: IoOp) {
        if self.in_ring + self.at_helpers >= IO_MAX {
            self.backlog.push_back(op);
        } else {
            self.start_io(op);
        }
    }

    fn recv(&mut self, token: u64, fd: RawFd, buf: BufSlice, more: bool, all: bool) {
        let (ptr, len) = (buf.as_ptr(), buf.len() as u32);
        let index = self.slot(Work::Recv { token, _buf: buf });
        let first = if more { 0 } else { POLL_FIRST };
        let flags = if all { libc::MSG_WAITALL } else { 0 };
        self.push(
            opcode::Recv::new(types::Fd(fd), ptr, len)
                .ioprio(first)
                .flags(flags)
                .build()
                .user_data(u64::from(index)),
        );
    }

    fn send(&mut self, token: u64, fd: RawFd, list: SendList) {
        let total: usize = list.iter().map(BufSlice::len).sum();
        let index = self.slot(Work::Free);
        let slot = &mut *self.slots[index as usize];
        slot.aim(&list, 0);
        // Nearly every reply fits into the socket at once. Sent through the ring, its completion
        // would only end the next wait before anything else has happened.
        // SAFETY: the header and its vectors are in the slot, the memory they name in `list`.
        let n = unsafe { libc::sendmsg(fd, &slot.msg, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
        let before = match usize::try_from(n) {
            Ok(n) if n >= total => {
                self.release(index);
                self.early.push(Event::Sent {
                    token,
                    result: Ok(n),
                });
                return;
            }
            Ok(n) => {
                slot.aim(&list, n as u64);
                n
            }
            // Whatever is wrong, the ring finds it again, or waits.
            Err(_) => 0,
        };
        slot.work = Work::Send {
            token,
            _list: list,
            before,
        };
        let flags = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
        let entry = opcode::SendMsg::new(types::Fd(fd), &slot.msg)
            .flags(flags as u32)
            .build();
        self.push(entry.user_data(u64::from(index)));
    }

    fn accept(&mut self, token: u64, fd: RawFd) {
        // io_uring answers EAGAIN for a non-blocking listener instead of waiting.
        if let Err(e) = set_nonblocking(fd, false) {
            return self.early.push(Event::Accepted {
                token,
                result: Err(e),
            });
        }
        let index = self.slot(Work::Accept { token });
        let null = std::ptr::null_mut();
        let accept =
            opcode::Accept::new(types::Fd(fd), null, null.cast()).flags(libc::SOCK_CLOEXEC);
        self.push(accept.build().user_data(u64::from(index)));
    }

    fn watch(&mut self, token: u64, fd: RawFd) {
        let index = self.slot(Work::Watch {
            token,
            cancelled: false,
        });
        self.slots[index as usize].count = fd as u64;
        self.arm_watch(index);
    }

    fn signal(&mut self, token: u64, fd: RawFd) {
        // Through the ring: it costs no system call of its own, and an eventfd that would block
        // (its counter is full and its owner made it blocking) blocks a worker of the kernel's.
        let index = self.slot(Work::Signal { token });
        self.slots[index as usize].count = 1;
        let count = (&raw const self.slots[index as usize].count).cast::<u8>();
        self.push(
            opcode::Write::new(types::Fd(fd), count, 8)
                .build()
                .user_data(u64::from(index)),
        );
    }

    fn cancel(&mut self, token: u64) {
        for slot in self.slots.iter_mut() {
            if let Work::Watch {
                token: t,
                cancelled,
            } = &mut slot.work
                && *t == token
            {
                *cancelled = true;
            }
        }
        self.cancel_slots(|work| match work {
            Work::Recv { token: t, .. }
            | Work::Send { token: t, .. }
            | Work::Accept { token: t }
            | Work::Watch { token: t, .. }
            | Work::Signal { token: t } => *t == token,
            _ => false,
        });
    }

    fn wake_handle(&self) -> WakeHandle {
        self.wake.clone()
    }

    fn wait(
        &mut self,
        wait: Wait,
        events: &mut Vec<Event>,
        dones: &mut Vec<IoDone>,
    ) -> io::Result<u64> {
        if !self.early.is_empty() {
            // What follows from these goes with the next entry into the kernel.
            events.append(&mut self.early);
            return Ok(self.now);
        }
        self.refill();
        self.arm_wake();
        let pending = !self.ready.is_empty() || !self.early.is_empty() || !self.overflow.is_empty();
        let limit = match (wait, self.delayed.next()) {
            _ if pending => Some(0),
            (Wait::Poll, _) => Some(0),
            (Wait::Until(at), Some(due)) => Some(at.min(due)),
            (Wait::Until(at), None) => Some(at),
            (Wait::Forever, due) => due,
        };
        let limit = match self.in_ring + self.at_helpers > self.told + self.lending.told() {
            true => Some(
                limit
                    .unwrap_or(u64::MAX)
                    .min(self.look_ns.max(self.now + 1)),
            ),
            false => limit,
        };
        let asleep = limit != Some(0) && self.wake.prepare_sleep();
        let entered = self.enter(if asleep { limit } else { Some(0) });
        if self.wake.awake() {
            events.push(Event::Woken);
            self.targets.refresh();
        }
        entered?;
        self.now = now_ns();
        self.reap(events, dones);
        self.collect_helpers(dones);
        if self.now >= self.look_ns {
            self.look(dones);
        }
        events.append(&mut self.early);
        dones.append(&mut self.ready);
        if self.delayed.len() > 0 {
            self.delayed.release(self.now, dones);
        }
        while self.in_ring + self.at_helpers < IO_MAX
            && let Some(op) = self.backlog.pop_front()
        {
            self.start_io(op);
        }
        Ok(self.now)
    }

    fn io_in_flight(&self) -> usize {
        let told = self.told + self.lending.told();
        let held = self.backlog.len() + self.ready.len() + self.delayed.len();
        self.in_ring + self.at_helpers - told + held
    }

    fn backend_name(&self) -> &'static str {
        "io_uring"
    }
}

impl Drop for RingDriver {
    /// Ends socket operations, waits for block operations, and frees their memory only if the
    /// kernel is done with all of it.
    fn drop(&mut self) {
        self.backlog.clear();
        let end = now_ns() + DRAIN_NS;
        self.cancel_slots(|work| !matches!(work, Work::Free | Work::Io { .. }));
        let (mut events, mut dones) = (Vec::new(), Vec::new());
        while self.in_use() > 0 && now_ns() < end {
            self.refill();
            if self.enter(Some(end)).is_err() {
                break;
            }
            self.reap(&mut events, &mut dones);
        }
        if self.in_use() == 0 {
            // SAFETY: dropped once, here; no slot is known to the kernel any more.
            unsafe { ManuallyDrop::drop(&mut self.slots) };
        } else {
            tracing::error!(
                operations = self.in_use(),
                "the kernel did not finish these operations; their memory is leaked"
            );
        }
    }
}
