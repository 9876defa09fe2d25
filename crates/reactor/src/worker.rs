//! The loop of one data thread.
//!
//! Each round: one entry into the kernel, then everything that happened is carried as far as
//! it goes (received bytes to requests, requests to the engine, effects to the ring and to
//! sessions, and again) until the thread has nothing left to do; only then replies are sent,
//! many in one call, and the kernel is entered once more.

use crate::conn::Conn;
use crate::effects::Carrier;
use crate::engine::BlockEngine;
use crate::inbox::{Command, Mail};
use crate::peer::{ListenerId, PeerInfo, SessionFactory, identify};
use crate::polling::Polling;
use crate::pulse::thread_name;
use crate::queues::{QUEUE, Queues};
use crate::reactors::{Carried, Shared};
use crate::session::{SMALL, SendList, Session, SessionCx};
use crate::tags::{Tag, Tags};
use crate::watch::{Ended, Watch};
use hearth_engine::api::{Completion, Request};
use hearth_io::{BufPool, Event, IoDone, Proactor, Wait};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Sender, SyncSender};

/// Rounds between two entries into the kernel: a session with much buffered input must not
/// keep the others waiting.
const ROUNDS_MAX: usize = 16;
/// How often timeouts are looked at; they are tens of seconds.
const SWEEP_NS: u64 = 1_000_000_000;
/// How often connections waiting for the memory budget are looked at.
const GATED_NS: u64 = 10_000_000;
/// How long a payload that was announced may take when its connection goes over to another process: all others
/// wait for it.
const ANNOUNCED_NS: u64 = 3_000_000_000;
/// Pause after the system ran out of descriptors or memory for a new connection.
const ACCEPT_RETRY_NS: u64 = 100_000_000;
/// Copies of a queue's requests above this many bytes count against the memory budget.
pub(crate) const LARGE: usize = SMALL as usize;

const RECV: u64 = 0;
const SEND: u64 = 1 << 32;
const ACCEPT: u64 = 2 << 32;
const KIND: u64 = 3 << 32;

struct Listener {
    id: ListenerId,
    fd: OwnedFd,
    factory: Arc<dyn SessionFactory>,
    accepting: bool,
    /// Dropped once the last accept has ended.
    removed: Option<Vec<SyncSender<()>>>,
}

/// See the module.
pub(crate) struct Worker {
    pub(crate) index: u32,
    engine: Arc<dyn BlockEngine>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) proactor: Box<dyn Proactor>,
    pub(crate) queues: Queues,
    poll: Polling,
    conns: Vec<Option<Box<Conn>>>,
    free: Vec<u32>,
    dirty: Vec<u32>,
    listeners: Vec<Option<Listener>>,
    pub(crate) tags: Tags<u32>,
    pub(crate) bufs: BufPool,
    pub(crate) requests: Vec<Request>,
    pub(crate) watch: Option<Box<dyn Watch>>,
    carrier: Carrier,
    dones: Vec<IoDone>,
    mail: Mail,
    pub(crate) now: u64,
    next_sweep: u64,
    accept_retry: Option<u64>,
    /// Connections that wait for memory, and when they are looked at again.
    gated: usize,
    next_gate: u64,
    /// When stopping: connections are cut at the first time, the thread ends at the second.
    stop: Option<(u64, u64)>,
    /// Where connections go when stopping, if another process goes on with them.
    successor: Option<Sender<Carried>>,
    /// And when those are cut that have announced a payload and do not send it.
    announced: u64,
}

impl Worker {
    pub(crate) fn new(
        index: u32,
        engine: Arc<dyn BlockEngine>,
        shared: Arc<Shared>,
        proactor: Box<dyn Proactor>,
        watch: Option<Box<dyn Watch>>,
    ) -> Worker {
        Worker {
            carrier: Carrier::new(index, &shared),
            index,
            engine,
            poll: Polling::new(shared.config.poll),
            shared,
            proactor,
            queues: Queues::default(),
            conns: Vec::new(),
            free: Vec::new(),
            dirty: Vec::new(),
            listeners: Vec::new(),
            tags: Tags::default(),
            bufs: BufPool::default(),
            requests: Vec::new(),
            watch,
            dones: Vec::new(),
            mail: Mail::default(),
            now: hearth_io::now_ns(),
            next_sweep: 0,
            accept_retry: None,
            gated: 0,
            next_gate: 0,
            stop: None,
            successor: None,
            announced: 0,
        }
    }

    /// Runs until stopped. An error means that the driver cannot go on; `told` hears of it while the
    /// thread still has what it had in flight.
    pub(crate) fn run(mut self, told: Option<fn(&str, &io::Error)>) -> io::Result<()> {
        let result = self.rounds();
        if let (Err(e), Some(told)) = (&result, told) {
            told(&thread_name(self.index, self.shared.threads), e);
        }
        result
    }

    fn rounds(&mut self) -> io::Result<()> {
        let mut events = Vec::new();
        let mut wait = Wait::Poll;
        loop {
            self.now = self.proactor.wait(wait, &mut events, &mut self.dones)?;
            self.shared.pulse.beat(self.index, self.now);
            #[cfg(debug_assertions)]
            if self.tags.len() > 0 {
                crate::failpoint::obey()?;
            }
            let seen = self.poll.is_on()
                && (self.queues.look() || !events.is_empty() || !self.dones.is_empty());
            for event in events.drain(..) {
                self.event(event);
            }
            if self.now >= self.next_sweep {
                self.sweep();
            }
            self.cancel_calls();
            if self.gated > 0 && self.now >= self.next_gate {
                self.next_gate = self.now + GATED_NS;
                self.ungate();
            }
            let mut quiet = self.work();
            self.pump_sends();
            if let Some(watch) = &mut self.watch {
                watch.settle();
            }
            let polling = self.poll.goes_on(self.now, seen, wait != Wait::Poll);
            quiet &= !self.settle_queues(quiet && !polling) && !polling;
            if let Some((_, end)) = self.stop {
                if self.is_idle() {
                    return Ok(());
                }
                if self.now >= end {
                    tracing::error!(
                        requests = self.tags.len(),
                        "requests did not finish; the data thread stops without them"
                    );
                    return Ok(());
                }
            }
            wait = if quiet { self.wait() } else { Wait::Poll };
        }
    }

    fn is_idle(&self) -> bool {
        self.free.len() == self.conns.len()
            && self.listeners.iter().all(Option::is_none)
            && self.queues.is_empty()
            && self.proactor.io_in_flight() == 0
    }

    fn wait(&self) -> Wait {
        let sweep =
            (self.free.len() < self.conns.len() || self.stop.is_some()).then_some(self.next_sweep);
        let gated = (self.gated > 0).then_some(self.next_gate);
        match [sweep, gated, self.accept_retry, self.queues.next_cancel()]
            .into_iter()
            .flatten()
            .min()
        {
            Some(at) => Wait::Until(at),
            None => Wait::Forever,
        }
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Recv {
                token,
                result,
                more,
            } => self.received(token as u32, result, more),
            Event::Sent { token, result } => self.sent(token as u32, result),
            Event::Rung { token, result } => self.rung(token, result),
            Event::Signalled { token } => self.signalled(token),
            Event::Accepted { token, result } => self.accepted((token & !KIND) as usize, result),
            Event::Woken => {
                let mut mail = std::mem::take(&mut self.mail);
                self.shared.inbox(self.index).take(&mut mail);
                for completion in mail.completions.drain(..) {
                    self.deliver(completion);
                }
                for command in mail.commands.drain(..) {
                    self.command(command);
                }
                self.mail = mail;
            }
        }
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Adopt(fd, session) => self.adopt(fd, session),
            Command::AddQueue(id, queue) => self.add_queue(id, queue),
            Command::RemoveQueue(id, told) => self.remove_queue(id, told),
            Command::Ring(fd) => self.ring(fd),
            Command::Listen(id, fd, factory) => {
                let listener = Listener {
                    id,
                    fd,
                    factory,
                    accepting: false,
                    removed: None,
                };
                let index = self
                    .listeners
                    .iter()
                    .position(Option::is_none)
                    .unwrap_or_else(|| {
                        self.listeners.push(None);
                        self.listeners.len() - 1
                    });
                self.listeners[index] = Some(listener);
                self.accept(index);
            }
            Command::Unlisten(id, told) => {
                let found = self
                    .listeners
                    .iter_mut()
                    .position(|l| l.as_ref().is_some_and(|l| l.id == id));
                if let Some(index) = found {
                    self.unlisten(index, Some(told));
                }
            }
            Command::Look => (0..self.conns.len() as u32).for_each(|i| self.mark(i)),
            Command::Stop => {
                let grace = self.shared.config.grace.as_nanos() as u64;
                self.stop(grace);
            }
            Command::HandOver(successor) => {
                self.successor = Some(successor);
                let grace = self.shared.config.grace.as_nanos() as u64;
                self.stop(grace);
                self.announced = self.now + ANNOUNCED_NS.min(grace);
            }
            // Sent to the background thread only; dropping them tells the sender.
            Command::Request(..) | Command::Job(_) => {}
        }
    }

    /// Ends everything: connections within `grace`, the thread within twice that.
    fn stop(&mut self, grace: u64) {
        self.stop = Some((self.now + grace, self.now + 2 * grace));
        self.next_sweep = self.now + grace.min(SWEEP_NS);
        (0..self.listeners.len()).for_each(|i| self.unlisten(i, None));
        self.stop_queues();
        (0..self.conns.len() as u32).for_each(|index| self.end(index));
    }

    /// Has a connection come to its end, here or altogether.
    fn end(&mut self, index: u32) {
        let handing = self.successor.is_some();
        let Some(conn) = self.conn(index) else {
            return;
        };
        conn.frozen = handing && !conn.dead && !conn.ended && conn.session.freeze();
        if !conn.frozen {
            conn.session.shutdown();
        // A receive that waits for a full window may have bytes already, which not every kernel tells of
        // when it is cancelled. What it waits for was announced, and is on its way.
        } else if conn.receiving > 0 && !conn.whole {
            self.proactor.cancel(RECV | u64::from(index));
        }
        self.mark(index);
    }

    fn accept(&mut self, index: usize) {
        let stopping = self.stop.is_some();
        if let Some(Some(listener)) = self.listeners.get_mut(index)
            && !listener.accepting
        {
            if stopping || listener.removed.is_some() {
                self.listeners[index] = None;
                return;
            }
            listener.accepting = true;
            self.proactor
                .accept(ACCEPT | index as u64, listener.fd.as_raw_fd());
        }
    }

    fn unlisten(&mut self, index: usize, told: Option<SyncSender<()>>) {
        let Some(Some(listener)) = self.listeners.get_mut(index) else {
            return;
        };
        listener.removed.get_or_insert_default().extend(told);
        if listener.accepting {
            self.proactor.cancel(ACCEPT | index as u64);
        } else {
            self.listeners[index] = None;
        }
    }

    fn accepted(&mut self, index: usize, result: io::Result<OwnedFd>) {
        let Some(Some(listener)) = self.listeners.get_mut(index) else {
            return;
        };
        listener.accepting = false;
        match result {
            // The successor takes up whoever has come this far: it was told that it is connected.
            Ok(fd)
                if self.successor.is_some()
                    || self.stop.is_none() && listener.removed.is_none() =>
            {
                let (fd, address) = identify(fd);
                let peer = PeerInfo {
                    address,
                    listener: listener.id,
                };
                if !self.shared.admit() {
                    tracing::warn!(%peer, "connection refused: the limit on connections is reached");
                } else if let Some(session) = listener.factory.connect(&peer) {
                    if self.successor.is_some() {
                        // Another thread may have ended already.
                        self.adopt(fd, session);
                    } else {
                        self.shared.place(fd, session);
                    }
                } else {
                    self.shared.release();
                }
            }
            Err(e) if is_shortage(&e) && listener.removed.is_none() => {
                tracing::warn!("cannot accept a connection: {e}; trying again shortly");
                self.accept_retry = Some(self.now + ACCEPT_RETRY_NS);
                self.next_sweep = self.next_sweep.min(self.now + ACCEPT_RETRY_NS);
                return;
            }
            // Ours to close: we are stopping. Or it went away while it waited, or was cancelled.
            Ok(_) | Err(_) => {}
        }
        self.accept(index);
    }

    fn adopt(&mut self, fd: OwnedFd, session: Box<dyn Session>) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.conns.push(None);
            (self.conns.len() - 1) as u32
        });
        let conn = Box::new(Conn::new(fd, session, self.now));
        if self.free.len() + 1 == self.conns.len() {
            self.next_sweep = self.now + SWEEP_NS;
        }
        self.conns[index as usize] = Some(conn);
        if self.stop.is_some() {
            self.end(index);
        }
        self.mark(index);
        self.bound_half_open();
    }

    /// Closes the oldest connection that has not said what it wants, if there are too many: else
    /// whoever opens many and says nothing keeps everybody out.
    fn bound_half_open(&mut self) {
        let most = (self.shared.config.half_open / self.shared.threads as usize).max(1);
        if self.conns.len() - self.free.len() <= most {
            return;
        }
        let (mut count, mut oldest) = (0, None::<(u64, u32)>);
        for (index, conn) in self.conns.iter().enumerate() {
            if let Some(conn) = conn
                && !conn.dead
                && conn.session.handshaking()
            {
                count += 1;
                let this = (conn.since_ns, index as u32);
                oldest = Some(oldest.map_or(this, |o| o.min(this)));
            }
        }
        if count > most
            && let Some((_, index)) = oldest
            && let Some(conn) = self.conn(index)
        {
            tracing::info!(
                "connection cut: too many others have begun and not said what they want"
            );
            conn.kill();
            self.mark(index);
        }
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stop.is_some()
    }

    fn conn(&mut self, index: u32) -> Option<&mut Conn> {
        self.conns.get_mut(index as usize)?.as_deref_mut()
    }

    fn mark(&mut self, index: u32) {
        if let Some(conn) = self.conn(index)
            && !conn.dirty
        {
            conn.dirty = true;
            self.dirty.push(index);
        }
    }

    /// Calls a session and takes the requests it made.
    fn call(&mut self, index: u32, f: impl FnOnce(&mut Conn, &mut SessionCx<'_>)) {
        let Some(Some(conn)) = self.conns.get_mut(index as usize) else {
            return;
        };
        let before = self.requests.len();
        let mut cx = SessionCx {
            requests: &mut self.requests,
            bufs: &mut self.bufs,
            now_ns: self.now,
            room: self.shared.room(conn.session.shares()),
        };
        f(conn, &mut cx);
        for request in &mut self.requests[before..] {
            conn.requests += 1;
            request.owner = self.index;
            // The session tells what it holds; a reply outlives its request.
            request.tag = self.tags.put(Tag::new(index, 0, request));
        }
        let memory = conn.session.memory();
        let counted = memory.held.saturating_sub(SMALL);
        self.shared
            .recount(conn.counted, counted, conn.session.shares());
        conn.counted = counted;
        self.gated += usize::from(memory.waits);
        self.gated -= usize::from(conn.memory.waits).min(self.gated);
        conn.memory = memory;
        if let Some(watch) = &mut self.watch
            && let Some(new @ [_, ..]) = self.requests.get(before..)
        {
            watch.arrived(new);
        }
    }

    fn received(&mut self, index: u32, result: io::Result<usize>, more: bool) {
        let now = self.now;
        self.call(index, |conn, cx| {
            conn.receiving = 0;
            if conn.frozen && is_cancelled(&result) {
                // Nothing has ended: what comes next is received elsewhere.
                return;
            }
            // A reset connection has ended like any other.
            let n = result.unwrap_or(0);
            conn.more = more;
            conn.recv_ns = now;
            conn.receipts.moved(n);
            conn.ended |= n == 0;
            conn.session.received(n, cx);
        });
        self.mark(index);
    }

    fn sent(&mut self, index: u32, result: io::Result<usize>) {
        let now = self.now;
        self.call(index, |conn, cx| {
            conn.sending = false;
            conn.send_ns = now;
            match result {
                Ok(n) if n > 0 => {
                    conn.sends.moved(n);
                    conn.session.sent(n, cx);
                }
                _ => conn.kill(),
            }
        });
        self.mark(index);
    }

    fn deliver(&mut self, mut completion: Completion) {
        let Some(tag) = self.tags.take(completion.tag) else {
            tracing::error!(
                tag = completion.tag,
                "the engine completed a request that is not outstanding"
            );
            return;
        };
        self.shared.unhold(tag.budget);
        completion.tag = tag.tag;
        if let Some(watch) = &mut self.watch {
            watch.ended(Ended {
                disk: tag.disk,
                op: tag.op,
                start_ns: tag.start_ns,
                end_ns: self.now,
            });
        }
        if tag.owner & QUEUE != 0 {
            return self.deliver_to_queue(tag.owner & !QUEUE, completion);
        }
        self.call(tag.owner, |conn, cx| {
            conn.requests = conn.requests.saturating_sub(1);
            conn.session.completed(completion, cx);
        });
        self.mark(tag.owner);
    }

    /// Carries everything as far as it goes without the kernel; false if some is left.
    fn work(&mut self) -> bool {
        for _ in 0..ROUNDS_MAX {
            if !self.dones.is_empty() {
                self.engine
                    .io_done(self.now, &mut self.dones, &mut self.carrier.fx);
                self.apply();
            }
            self.pump_recvs();
            let more = self.pump_queues();
            if self.requests.is_empty() {
                return !more;
            }
            self.engine
                .submit(self.now, &mut self.requests, &mut self.carrier.fx);
            self.apply();
        }
        false
    }

    fn apply(&mut self) {
        self.carrier.carry_out(&mut *self.proactor, &self.shared);
        let mut own = std::mem::take(&mut self.carrier.own);
        own.drain(..).for_each(|c| self.deliver(c));
        self.carrier.own = own;
    }

    /// Asks sessions that something happened to where the next bytes go.
    fn pump_recvs(&mut self) {
        for i in 0..self.dirty.len() {
            let index = self.dirty[i];
            let mut window = None;
            self.call(index, |conn, cx| {
                if conn.dead && !conn.ended && conn.receiving == 0 {
                    conn.ended = true;
                    conn.session.received(0, cx);
                }
                if conn.receiving > 0 || conn.dead || conn.ended || conn.frozen {
                    return;
                }
                if let Some(buf) = conn.session.recv_buf(cx).filter(|b| !b.is_empty()) {
                    conn.receiving = buf.len();
                    conn.recv_ns = cx.now_ns;
                    // No longer than what a peer may take its time over: of that, every piece is to be seen.
                    let all = conn.session.wants_all() && buf.len() as u64 <= SMALL;
                    conn.whole = all;
                    window = Some((conn.fd(), buf, conn.more, all));
                }
            });
            if let Some((fd, buf, more, all)) = window {
                let token = RECV | u64::from(index);
                self.proactor.recv(token, fd, buf, more, all);
            }
        }
    }

    /// Sends what the round produced; closes what is finished.
    fn pump_sends(&mut self) {
        let mut dirty = std::mem::take(&mut self.dirty);
        for index in dirty.drain(..) {
            let now = self.now;
            let Some(conn) = self
                .conns
                .get_mut(index as usize)
                .and_then(|c| c.as_deref_mut())
            else {
                continue;
            };
            conn.dirty = false;
            if !conn.dead && !conn.sending {
                let mut list = SendList::new();
                conn.session.send_list(&mut list);
                if list.is_empty() {
                    if conn.is_still() && !conn.session.closing() {
                        self.part(index);
                        continue;
                    }
                    if conn.session.closing() || (conn.ended && conn.requests == 0) {
                        conn.kill();
                    }
                } else {
                    conn.sending = true;
                    conn.send_ns = now;
                    self.proactor.send(SEND | u64::from(index), conn.fd(), list);
                }
            }
            if conn.closing_ns == 0 && conn.session.closing() {
                conn.closing_ns = now;
            }
            if conn.is_over() {
                drop(self.take(index));
            }
        }
        // Nothing marks a connection while replies are collected.
        self.dirty = dirty;
    }

    /// Takes a connection out; its place is free.
    fn take(&mut self, index: u32) -> Option<Box<Conn>> {
        let conn = self.conns.get_mut(index as usize)?.take()?;
        self.gated -= usize::from(conn.memory.waits).min(self.gated);
        self.shared.recount(conn.counted, 0, conn.session.shares());
        self.free.push(index);
        self.shared.release();
        if self.free.len() == self.conns.len() {
            // No more sweeps either, which would let go of them.
            self.bufs.clear();
        }
        Some(conn)
    }

    /// Sends a connection that has come to rest to whoever goes on with it.
    fn part(&mut self, index: u32) {
        let Some(mut conn) = self.take(index) else {
            return;
        };
        if let (Some(successor), Some(state)) = (&self.successor, conn.session.carry()) {
            let fd = conn.into_fd();
            // Nobody listens any more if this took too long; then the connection ends.
            let _ = successor.send(Carried { fd, state });
        }
    }

    /// Lets connections go on that waited for memory.
    fn ungate(&mut self) {
        for index in 0..self.conns.len() as u32 {
            if self.conn(index).is_some_and(|c| c.memory.waits) {
                self.call(index, |conn, cx| conn.session.resume(cx));
                self.mark(index);
            }
        }
    }

    /// Looks for clients that stall, and for what else waits for time to pass.
    fn sweep(&mut self) {
        let now = self.now;
        self.next_sweep = now + SWEEP_NS;
        self.bufs.age();
        let stall = self.shared.config.stall.as_nanos() as u64;
        let cut = self.stop.is_some_and(|(at, _)| now >= at);
        let announced = self.successor.is_some() && now >= self.announced;
        for index in 0..self.conns.len() as u32 {
            let Some(conn) = self.conn(index) else {
                continue;
            };
            let since = |then: u64| now.saturating_sub(then) > stall;
            let takes = conn.receiving > 0 && conn.memory.payload > SMALL;
            let gives = conn.sending && conn.memory.replies > SMALL;
            let crawls =
                conn.receipts.is_slow(takes, now, stall) | conn.sends.is_slow(gives, now, stall);
            let why = if conn.dead {
                None
            } else if cut {
                Some("the daemon is stopping")
            } else if announced && conn.frozen && conn.receiving > 0 {
                Some("a payload did not come, and the daemon is being replaced")
            } else if conn.session.handshaking() && since(conn.since_ns) {
                Some("the handshake took too long")
            } else if takes && since(conn.recv_ns) {
                Some("a payload stopped half-way")
            } else if gives && since(conn.send_ns) {
                Some("the peer does not take its replies")
            } else if crawls {
                Some("a payload or its replies move too slowly")
            } else if conn.closing_ns > 0 && since(conn.closing_ns) {
                Some("the peer does not take the last replies")
            } else {
                None
            };
            if let Some(why) = why {
                tracing::info!("connection cut: {why}");
                conn.kill();
                self.mark(index);
            }
        }
        if self.accept_retry.is_some_and(|at| now >= at) {
            self.accept_retry = None;
            (0..self.listeners.len()).for_each(|i| self.accept(i));
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        for command in self.shared.inbox(self.index).close().commands {
            if let Command::Adopt(fd, mut session) = command {
                self.shared.release();
                if let Some(successor) = &self.successor
                    && session.freeze()
                    && let Some(state) = session.carry()
                {
                    let _ = successor.send(Carried { fd, state });
                }
            }
        }
        for _ in self.conns.iter().flatten() {
            self.shared.release();
        }
    }
}

/// A receive ended because it was called off.
fn is_cancelled(result: &io::Result<usize>) -> bool {
    matches!(result, Err(e) if matches!(e.raw_os_error(), Some(libc::ECANCELED | libc::EINTR)))
}

/// The system is short of something a closed connection would give back.
fn is_shortage(e: &io::Error) -> bool {
    matches!(
        e.raw_os_error(),
        Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)
    )
}
