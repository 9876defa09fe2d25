//! Starting, feeding and stopping the data threads.

use crate::background::Background;
use crate::budget::{CONNECTION, Room, Shares};
use crate::engine::BlockEngine;
use crate::inbox::{Command, EngineJob, Inbox};
use crate::peer::{ListenerId, SessionFactory, make_blocking};
use crate::pulse::{Pulse, Stuck, thread_name};
use crate::queue::{Queue, QueueId};
use crate::session::Session;
use crate::watch::{Watch, Watcher};
use crate::worker::Worker;
use hearth_engine::api::{Completion, Effects, ReqError, Request};
use hearth_io::proactor::{self, Proactor};
use hearth_io::{Backend, ProactorError, Targets};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hearth_fault::Fault;

/// Most data threads: beyond that, the engine's locks cost more than another thread gives.
const THREADS_MAX: usize = 8;
/// Orders of the control plane waiting for the background thread.
const COMMANDS_MAX: usize = 1024;

/// How to run.
#[derive(Clone, Debug)]
pub struct Config {
    /// Data threads, at most 8; 0: one per processor, at most 8.
    pub threads: usize,
    /// The I/O driver; `None` chooses (see [`hearth_io::proactor::open`]).
    pub backend: Option<Backend>,
    /// Most connections at a time; more are accepted and closed at once.
    pub max_connections: usize,
    /// Connections that have not said what they want yet, at a time. Beyond that the oldest of them
    /// is closed for a new one: a client that means well takes milliseconds over it.
    pub half_open: usize,
    /// Bytes of memory for connections, their requests and their replies, all together; queues of
    /// clients that share memory not included. Each connection takes 512 KiB of it by being there,
    /// the rest is for large requests, and divided so that nobody gets all of it.
    pub payload_memory: u64,
    /// How long a client may take over its handshake, over more of a payload it announced, over
    /// more of the replies it is sent (if either holds more than 256 KiB), and over the last
    /// replies, before it is cut off.
    pub stall: Duration,
    /// Longest a data thread looks for work before it sleeps, while work keeps coming that
    /// soon; zero never does. Trades processor time for latency.
    pub poll: Duration,
    /// How long connections have to finish when the daemon stops; as long again until their
    /// requests are given up.
    pub grace: Duration,
    /// Called by a thread, with its name, whose driver cannot go on. What it had in flight is never
    /// answered, and the engine waits for it: whoever serves disks ends the process here.
    pub on_failure: Option<fn(&str, &io::Error)>,
}

impl Default for Config {
    /// One thread per processor, 1024 connections, 256 of them half open, 1 GiB of memory, no
    /// polling, 30 s, 10 s.
    fn default() -> Config {
        Config {
            threads: 0,
            backend: None,
            max_connections: 1024,
            half_open: 256,
            payload_memory: 1 << 30,
            stall: Duration::from_secs(30),
            poll: Duration::ZERO,
            grace: Duration::from_secs(10),
            on_failure: None,
        }
    }
}

/// Why the data threads could not be started or used.
#[derive(Debug, thiserror::Error)]
#[error("{}", self.fault())]
pub enum ReactorError {
    /// No driver.
    #[error(transparent)]
    Proactor(#[from] ProactorError),
    /// No thread.
    Thread(io::Error),
    /// The threads have been stopped, or died.
    Stopped,
    /// Too many orders wait.
    Busy,
    /// Too many connections.
    Full,
}

impl ReactorError {
    /// What is wrong, and what to do about it.
    pub fn fault(&self) -> Fault {
        match self {
            ReactorError::Proactor(e) => e.fault(),
            ReactorError::Thread(e) => Fault::new(
                format!("cannot start a data thread: {e}"),
                "check the limit on processes",
            ),
            ReactorError::Stopped => {
                Fault::new("the data threads are stopping", "start the daemon again")
            }
            ReactorError::Busy => Fault::new(
                "more than 1024 control requests are waiting",
                "try again when some are done",
            ),
            ReactorError::Full => Fault::new(
                "the limit on connections is reached",
                "close some or raise it",
            ),
        }
    }
}

/// How long a thread may take for an order that only wants to be taken. One that takes longer is
/// stuck in the kernel, on something that hangs.
const ORDER_TIME: Duration = Duration::from_secs(5);
/// How much longer than the last of its connections a thread may take to end. Its driver waits 5 s
/// for what the kernel still has.
const END_TIME: Duration = Duration::from_secs(7);
/// Longest wait for the background thread, which itself waits 10 s for its I/O.
const BACKGROUND_TIME: Duration = Duration::from_secs(20);

/// A connection at rest, for another process to go on with.
#[derive(Debug)]
pub struct Carried {
    /// The socket.
    pub fd: OwnedFd,
    /// What its [session](Session::carry) left.
    pub state: Vec<u8>,
}

/// Counters of the data threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stats {
    /// Open connections.
    pub connections: usize,
    /// Bytes that count against the memory for payloads.
    pub payload_bytes: u64,
    /// Connections turned away because of the limit.
    pub refused: u64,
    /// Data threads.
    pub threads: u32,
    /// `"io_uring"` or `"threads"`.
    pub backend: &'static str,
}

/// What all threads share.
pub(crate) struct Shared {
    pub threads: u32,
    pub config: Config,
    /// Of each data thread, then of the background thread; set before any of them runs.
    inboxes: OnceLock<Vec<Inbox>>,
    connections: AtomicUsize,
    refused: AtomicU64,
    /// What connections hold, and what queues hold beside it.
    held: AtomicU64,
    of_queues: AtomicU64,
    turn: AtomicU32,
    pub pulse: Pulse,
}

impl Shared {
    /// The inbox of a thread. Indices are those handed out at start.
    pub(crate) fn inbox(&self, thread: u32) -> &Inbox {
        // Set by `start` before it lets any thread run.
        &self.inboxes.get().map_or(&[][..], Vec::as_slice)[thread as usize]
    }

    /// Counts a connection in; false if there are too many.
    pub(crate) fn admit(&self) -> bool {
        let fits = self.connections.fetch_add(1, Ordering::Relaxed) < self.config.max_connections;
        if !fits {
            self.release();
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
        fits
    }

    /// Counts a connection out.
    pub(crate) fn release(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    /// Gives a connection, counted already, to the next thread in turn that still runs.
    pub(crate) fn place(&self, fd: OwnedFd, session: Box<dyn Session>) -> bool {
        let mut command = Command::Adopt(fd, session);
        for _ in 0..self.threads {
            let thread = self.turn.fetch_add(1, Ordering::Relaxed) % self.threads;
            match self.inbox(thread).command(command) {
                Ok(()) => return true,
                Err(back) => command = *back,
            }
        }
        self.release();
        false
    }

    /// Takes `bytes` of memory outside the budget.
    pub(crate) fn hold(&self, bytes: u64) {
        if bytes > 0 {
            self.of_queues.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Gives them back.
    pub(crate) fn unhold(&self, bytes: u64) {
        if bytes > 0 {
            self.of_queues.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// A connection holds `now` bytes of the memory budget instead of `before`.
    pub(crate) fn recount(&self, before: u64, now: u64, shares: Option<&Shares>) {
        if now > before {
            self.held.fetch_add(now - before, Ordering::Relaxed);
        } else if before > now {
            self.held.fetch_sub(before - now, Ordering::Relaxed);
        } else {
            return;
        }
        if let Some(shares) = shares {
            shares.recount(before, now);
        }
    }

    /// What there is for further requests of a session.
    pub(crate) fn room(&self, shares: Option<&Shares>) -> Room {
        let total = self.config.payload_memory;
        let connections = self.connections.load(Ordering::Relaxed) as u64;
        // Connections take some of it by being there; that must not be all.
        let limit = total
            .saturating_sub(connections.saturating_mul(CONNECTION))
            .max(total / 4);
        Room::for_session(limit, self.held.load(Ordering::Relaxed), shares)
    }
}

/// The running data threads. Dropping it stops them.
pub struct Reactors {
    shared: Arc<Shared>,
    backend: &'static str,
    workers: Mutex<Vec<JoinHandle<()>>>,
    background: Mutex<Option<JoinHandle<()>>>,
    next_listener: AtomicU64,
    next_queue: AtomicU64,
}

/// What a new thread reports: its driver's wake handle and name.
type Report = Result<(u32, hearth_io::WakeHandle, &'static str), ProactorError>;

impl Reactors {
    /// Starts the data threads and the background thread.
    pub fn start(
        engine: Arc<dyn BlockEngine>,
        targets: Arc<Targets>,
        config: Config,
    ) -> Result<Reactors, ReactorError> {
        Self::start_watched(engine, targets, config, None)
    }

    /// The same, with somebody who is told of every client's requests.
    pub fn start_watched(
        engine: Arc<dyn BlockEngine>,
        targets: Arc<Targets>,
        config: Config,
        watcher: Option<Arc<dyn Watcher>>,
    ) -> Result<Reactors, ReactorError> {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let wanted = if config.threads == 0 {
            cores
        } else {
            config.threads
        };
        let threads = wanted.clamp(1, THREADS_MAX) as u32;
        let shared = Arc::new(Shared {
            threads,
            config,
            inboxes: OnceLock::new(),
            connections: AtomicUsize::new(0),
            refused: AtomicU64::new(0),
            held: AtomicU64::new(0),
            of_queues: AtomicU64::new(0),
            turn: AtomicU32::new(0),
            pulse: Pulse::new(threads),
        });
        let (report, reports) = channel::<Report>();
        let (mut handles, mut go) = (Vec::new(), Vec::new());
        for index in 0..=threads {
            let (start, started) = channel::<()>();
            go.push(start);
            let body = Body {
                index,
                engine: engine.clone(),
                targets: targets.clone(),
                watch: watcher.as_ref().map(|w| w.watch()),
                shared: shared.clone(),
                report: report.clone(),
                started,
            };
            let thread = std::thread::Builder::new()
                .name(thread_name(index, threads))
                .spawn(move || body.run());
            // On failure `go` is dropped, which ends the threads that did start.
            handles.push(thread.map_err(ReactorError::Thread)?);
        }
        drop(report);
        let mut wakes = Vec::new();
        for report in reports.iter().take(handles.len()) {
            wakes.push(report?);
        }
        wakes.sort_by_key(|(index, ..)| *index);
        if wakes.len() != handles.len() {
            return Err(ReactorError::Stopped);
        }
        let backend = wakes.first().map_or("", |w| w.2);
        let inboxes = wakes
            .into_iter()
            .map(|(_, wake, _)| Inbox::new(wake))
            .collect();
        // First and only call: the cell was made above.
        let _ = shared.inboxes.set(inboxes);
        for start in go {
            let _ = start.send(());
        }
        tracing::info!(threads, backend, "data threads started");
        let background = handles.pop();
        Ok(Reactors {
            shared,
            backend,
            workers: Mutex::new(handles),
            background: Mutex::new(background),
            next_listener: AtomicU64::new(0),
            next_queue: AtomicU64::new(0),
        })
    }

    /// Accepts connections on a listening socket, unix or TCP, from now on, and makes a
    /// session of each. They are spread over the threads in turn.
    pub fn listen(
        &self,
        socket: impl Into<OwnedFd>,
        factory: Arc<dyn SessionFactory>,
    ) -> ListenerId {
        let id = ListenerId(self.next_listener.fetch_add(1, Ordering::Relaxed));
        let thread = (id.0 % u64::from(self.shared.threads)) as u32;
        if self
            .shared
            .inbox(thread)
            .command(Command::Listen(id, socket.into(), factory))
            .is_err()
        {
            tracing::error!(
                "a listening socket was added while the data threads stop; it is closed"
            );
        }
        id
    }

    /// Accepts no more there and closes our descriptor of the socket; its connections go on.
    /// Returns when that is done, or after a while, if the thread hangs.
    pub fn unlisten(&self, id: ListenerId) {
        let (told, done) = sync_channel(1);
        let thread = (id.0 % u64::from(self.shared.threads)) as u32;
        if self
            .shared
            .inbox(thread)
            .command(Command::Unlisten(id, told))
            .is_ok()
        {
            // Nothing is ever sent: the other end is dropped with the socket, or with the thread.
            let _ = done.recv_timeout(ORDER_TIME);
        }
    }

    /// Serves a socket that is connected already.
    pub fn adopt(
        &self,
        socket: impl Into<OwnedFd>,
        session: Box<dyn Session>,
    ) -> Result<(), ReactorError> {
        if !self.shared.admit() {
            return Err(ReactorError::Full);
        }
        let fd = make_blocking(socket.into());
        if self.shared.place(fd, session) {
            Ok(())
        } else {
            Err(ReactorError::Stopped)
        }
    }

    /// Serves a queue, on the thread `turn` names (counted round). One connection's queues
    /// should have consecutive turns.
    pub fn add_queue(&self, turn: usize, queue: Box<dyn Queue>) -> Result<QueueId, ReactorError> {
        let id = QueueId {
            thread: (turn % self.shared.threads as usize) as u32,
            number: self.next_queue.fetch_add(1, Ordering::Relaxed),
        };
        self.shared
            .inbox(id.thread)
            .command(Command::AddQueue(id, queue))
            .map_err(|_| ReactorError::Stopped)?;
        Ok(id)
    }

    /// Takes no more requests from a queue, and returns when its last one has ended and the
    /// queue is dropped. Not for data threads.
    pub fn remove_queue(&self, id: QueueId) {
        let (told, done) = sync_channel(1);
        if self
            .shared
            .inbox(id.thread)
            .command(Command::RemoveQueue(id, told))
            .is_ok()
        {
            // Nothing is ever sent: the other end is dropped with the queue, or with the thread.
            let _ = done.recv();
        }
    }

    /// Rings a client's eventfd once, from the data thread `turn` names (counted round), which a
    /// full counter does not hold up.
    pub fn ring(&self, turn: usize, fd: Arc<OwnedFd>) {
        let thread = (turn % self.shared.threads as usize) as u32;
        // A thread that has ended serves nobody who could wait for the call.
        let _ = self.shared.inbox(thread).command(Command::Ring(fd));
    }

    /// Hands a request of the control plane to the engine, on the background thread. `owner`
    /// is filled in; the completion, with the request's own tag, comes out of the receiver,
    /// which is cut off without one if the threads stop first.
    pub fn request(&self, request: Request) -> Result<Receiver<Completion>, ReactorError> {
        let (answer, receiver) = sync_channel(1);
        self.background(Command::Request(request, answer))?;
        Ok(receiver)
    }

    /// Like [`request`](Self::request), and waits. Not for data threads.
    pub fn request_blocking(&self, request: Request) -> Result<Completion, ReqError> {
        let receiver = self.request(request).map_err(|_| ReqError::Shutdown)?;
        receiver.recv().map_err(|_| ReqError::Shutdown)
    }

    /// Calls the engine on the background thread, with the time, and carries out the effects
    /// it leaves. The job must not block.
    pub fn run(
        &self,
        job: impl FnOnce(u64, &mut Effects) + Send + 'static,
    ) -> Result<(), ReactorError> {
        self.background(Command::Job(Box::new(job) as EngineJob))
    }

    fn background(&self, command: Command) -> Result<(), ReactorError> {
        let gone = lock(&self.background)
            .as_ref()
            .is_none_or(JoinHandle::is_finished);
        if gone {
            return Err(ReactorError::Stopped);
        }
        self.shared
            .inbox(self.shared.threads)
            .try_command(command, COMMANDS_MAX)
            .map_err(|_| ReactorError::Busy)
    }

    /// Counters.
    pub fn stats(&self) -> Stats {
        Stats {
            connections: self.shared.connections.load(Ordering::Relaxed),
            payload_bytes: self.shared.held.load(Ordering::Relaxed)
                + self.shared.of_queues.load(Ordering::Relaxed),
            refused: self.shared.refused.load(Ordering::Relaxed),
            threads: self.shared.threads,
            backend: self.backend,
        }
    }

    /// Asks every thread for a sign of life; those that have given none since they were last asked.
    pub fn stuck(&self) -> Vec<Stuck> {
        self.shared.pulse.ask(hearth_io::now_ns(), &self.shared)
    }

    /// Asks every session whether it is [`closing`](Session::closing), because something it
    /// depends on has changed: an idle connection would not notice by itself.
    pub fn look(&self) {
        for thread in 0..self.shared.threads {
            // A thread that has ended has no connections.
            let _ = self.shared.inbox(thread).command(Command::Look);
        }
    }

    /// Ends all connections, each when its requests are answered or the grace is over, and
    /// the data threads. Background work and [`request`](Self::request) go on, so that disks
    /// can be flushed. Waits. False if a thread does not end, because the kernel does not let it
    /// go: it is left behind, and what its clients asked for is not answered.
    pub fn disconnect(&self) -> bool {
        let workers = std::mem::take(&mut *lock(&self.workers));
        for thread in 0..self.shared.threads {
            // A thread that has ended needs no order.
            let _ = self.shared.inbox(thread).command(Command::Stop);
        }
        join(workers, 2 * self.shared.config.grace + END_TIME)
    }

    /// The same for a daemon that is replaced by another program, which goes on with those connections that
    /// [can](Session::freeze): these come to rest between two requests and are returned. Listening sockets that
    /// somebody else has open as well go on taking connections, which wait there.
    pub fn hand_over(&self) -> (bool, Vec<Carried>) {
        let workers = std::mem::take(&mut *lock(&self.workers));
        let (successor, carried) = channel();
        for thread in 0..self.shared.threads {
            let command = Command::HandOver(successor.clone());
            // A thread that has ended has no connections.
            let _ = self.shared.inbox(thread).command(command);
        }
        drop(successor);
        let ended = join(workers, 2 * self.shared.config.grace + END_TIME);
        (ended, carried.try_iter().collect())
    }

    /// [`disconnect`](Self::disconnect)s, waits for background I/O, and ends all threads. False if
    /// one does not end.
    pub fn stop(&self) -> bool {
        let ended = self.disconnect();
        if let Some(thread) = lock(&self.background).take() {
            let _ = self
                .shared
                .inbox(self.shared.threads)
                .command(Command::Stop);
            return join(vec![thread], BACKGROUND_TIME) && ended;
        }
        ended
    }
}

impl Drop for Reactors {
    fn drop(&mut self) {
        self.stop();
    }
}

/// What a thread needs to start.
struct Body {
    index: u32,
    engine: Arc<dyn BlockEngine>,
    targets: Arc<Targets>,
    watch: Option<Box<dyn Watch>>,
    shared: Arc<Shared>,
    report: Sender<Report>,
    started: Receiver<()>,
}

impl Body {
    fn run(self) {
        // Drivers belong to the thread that opens them.
        let proactor: Box<dyn Proactor> =
            match proactor::open(self.targets, self.shared.config.backend) {
                Ok(proactor) => proactor,
                Err(e) => {
                    let _ = self.report.send(Err(e));
                    return;
                }
            };
        let report = (self.index, proactor.wake_handle(), proactor.backend_name());
        if self.report.send(Ok(report)).is_err() || self.started.recv().is_err() {
            return;
        }
        drop(self.report);
        let shared = self.shared.clone();
        let (index, told) = (self.index, shared.config.on_failure);
        let result = if index < shared.threads {
            let (engine, watch) = (self.engine, self.watch);
            Worker::new(index, engine, self.shared, proactor, watch).run(told)
        } else {
            Background::new(self.engine, self.shared, proactor).run(told)
        };
        shared.pulse.end(index);
        if let Err(e) = result {
            tracing::error!(
                "a data thread cannot go on: {e}; its connections are closed, restart the daemon"
            );
        }
    }
}

/// Waits for the end of threads; false if some have not ended after `limit`.
fn join(threads: Vec<JoinHandle<()>>, limit: Duration) -> bool {
    let (end, count) = (Instant::now() + limit, threads.len());
    let (told, ends) = channel();
    for thread in threads {
        let told = told.clone();
        // A thread that has done all of its work may still hang in the kernel, which waits for
        // what it was given: only joining tells, and that cannot be given up but by another thread.
        let wait = move || {
            // Nobody listens any more if that came too late.
            let _ = told.send(thread.join().is_err());
        };
        let spawned = std::thread::Builder::new().name("hearth-join".to_owned());
        if let Err(e) = spawned.spawn(wait) {
            tracing::error!("cannot start a thread: {e}; a data thread is not waited for");
        }
    }
    drop(told);
    let mut ended = 0;
    while let Ok(panicked) = ends.recv_timeout(end.saturating_duration_since(Instant::now())) {
        ended += 1;
        if panicked {
            tracing::error!("a data thread panicked; its connections are closed");
        }
    }
    if ended < count {
        tracing::error!(
            threads = count - ended,
            "data threads do not end; see whether an origin's device or mount hangs"
        );
    }
    ended == count
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}
