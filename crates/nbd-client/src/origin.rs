//! An export as an origin: what the rest of Hearth sees of it.

use crate::connect::{ConnectError, Connection, Dial};
use crate::handshake::Negotiated;
use crate::worker::{Worker, dial_all};
use hearth_io::{Job, Link, ProactorError, Remote, Targets, WakeHandle, proactor};
use hearth_nbd_wire::tflag;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use hearth_fault::Fault;

/// How long operations wait for a server that is gone, unless told otherwise: a daemon's or a
/// host's restart, but no guest's patience (Linux gives up on a disk after 30 s times 6).
pub const TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);
/// Alignment of sizes and offsets that guests use at least; what a server says it likes less
/// than that is of no use to it.
const ALIGN_MIN: u32 = 512;

/// How to use an export.
#[derive(Clone, Debug)]
pub struct Options {
    /// Its name.
    pub export: String,
    /// Never write.
    pub read_only: bool,
    /// How long operations wait for a server before they fail; see
    /// [`set_timeout`](hearth_io::Remote::set_timeout).
    pub timeout: Duration,
    /// The server answers with I/O errors when *its* storage is away, and does not find back to
    /// it: such an answer is taken as the loss of the server, which is begun anew
    /// ([`Dial::renew`]) and asked again until [`timeout`](Self::timeout).
    pub errors_are_losses: bool,
    /// A server that says it is shutting down speaks for its storage, which has shut us out: then
    /// there is no other server, nothing is sent any more, and every operation fails with
    /// [`IoError::SHUT_OUT`](hearth_io::IoError::SHUT_OUT).
    pub shutdown_is_fencing: bool,
    /// Requests in flight at most, on all connections together; at least one.
    pub in_flight_max: usize,
}

/// Why an export cannot be an origin.
#[derive(Debug, thiserror::Error)]
#[error("{}", self.fault())]
pub enum OpenError {
    /// No connection.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The server does not let us write.
    ReadOnly(String),
    /// No I/O driver.
    #[error(transparent)]
    Driver(#[from] ProactorError),
    /// No thread.
    Thread(io::Error),
}

impl OpenError {
    /// What is wrong, and what to do about it.
    pub fn fault(&self) -> Fault {
        match self {
            OpenError::Connect(e) => e.fault(),
            OpenError::ReadOnly(name) => Fault::new(
                format!("{name} is read-only there"),
                "add the disk with --read-only",
            ),
            OpenError::Driver(e) => e.fault(),
            OpenError::Thread(e) => Fault::new(
                format!("cannot start the thread of an origin: {e}"),
                "check the limit on processes",
            ),
        }
    }
}

#[derive(Default)]
pub(crate) struct Inbox {
    pub(crate) jobs: Vec<Job>,
    pub(crate) dialed: Option<Result<Vec<Connection>, Fault>>,
    pub(crate) hurry: bool,
    pub(crate) stop: bool,
    /// The thread has ended: nobody takes anything out any more.
    pub(crate) stopped: bool,
}

/// What the thread shares with those who use the origin.
pub(crate) struct Shared {
    pub(crate) inbox: Mutex<Inbox>,
    pub(crate) wake: WakeHandle,
    pub(crate) link: Mutex<Link>,
    /// How long operations wait for a server, in nanoseconds.
    timeout_ns: AtomicU64,
    name: String,
    size: AtomicU64,
    align: u32,
    read_only: bool,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Shared {
    /// How long operations wait for a server, in nanoseconds.
    pub(crate) fn timeout_ns(&self) -> u64 {
        self.timeout_ns.load(Ordering::Relaxed)
    }

    /// Whether a server that came back can take the place of the one that went.
    pub(crate) fn suits(&self, agreed: &Negotiated, options: &Options) -> Result<(), Fault> {
        let size = self.size.load(Ordering::Relaxed);
        if agreed.size < size {
            return Err(Fault::new(
                format!("the export shrank from {size} to {} bytes", agreed.size),
                "give it its size back",
            ));
        }
        if agreed.min_block > self.align {
            return Err(Fault::new(
                format!("the export now wants blocks of {} bytes", agreed.min_block),
                "remove the disk and add it again",
            ));
        }
        if agreed.has(tflag::READ_ONLY) && !options.read_only {
            return Err(Fault::new(
                "the export is read-only now",
                "allow writing there",
            ));
        }
        Ok(())
    }
}

/// Says, however the thread ends, that nobody takes jobs any more, and fails those left.
struct Ended(Arc<Shared>);

impl Drop for Ended {
    fn drop(&mut self) {
        let mut inbox = lock(&self.0.inbox);
        inbox.stopped = true;
        let left = std::mem::take(&mut inbox.jobs);
        drop(inbox);
        drop(left);
    }
}

/// An NBD export in use. Dropping it flushes what is not durable and closes the connections,
/// which may block for some seconds.
pub struct NbdOrigin {
    shared: Arc<Shared>,
    dial: Arc<dyn Dial>,
    options: Options,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for NbdOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("NbdOrigin").field(&self.shared.name).finish()
    }
}

impl NbdOrigin {
    /// Connects, and starts the thread. Blocks while connecting.
    pub fn open(dial: Arc<dyn Dial>, options: Options) -> Result<NbdOrigin, OpenError> {
        let connections = dial_all(&*dial, &options)?;
        // There is at least one.
        let Some(agreed) = connections.first().map(|c| c.agreed) else {
            return Err(ConnectError::Closed(dial.name()).into());
        };
        if agreed.has(tflag::READ_ONLY) && !options.read_only {
            return Err(OpenError::ReadOnly(dial.name()));
        }
        let (told, shared) = sync_channel(1);
        let (thread_dial, thread_options) = (dial.clone(), options.clone());
        let thread = std::thread::Builder::new()
            .name("hearth-nbd".to_owned())
            .spawn(move || {
                // A driver belongs to the thread that opens it.
                let io = match proactor::open(Targets::new(), None) {
                    Ok(io) => io,
                    Err(e) => return drop(told.send(Err(e))),
                };
                let shared = Arc::new(Shared {
                    inbox: Mutex::default(),
                    wake: io.wake_handle(),
                    link: Mutex::new(Link::up()),
                    timeout_ns: AtomicU64::new(nanoseconds(thread_options.timeout)),
                    name: thread_dial.name(),
                    size: AtomicU64::new(agreed.size),
                    align: agreed.min_block.max(ALIGN_MIN),
                    read_only: thread_options.read_only || agreed.has(tflag::READ_ONLY),
                });
                let _ended = Ended(shared.clone());
                if told.send(Ok(shared.clone())).is_ok() {
                    Worker::new(shared, thread_dial, thread_options, io, connections, agreed).run();
                }
            })
            .map_err(OpenError::Thread)?;
        let shared = shared
            .recv()
            .map_err(|_| OpenError::Thread(io::Error::other("it ended before it had begun")))??;
        Ok(NbdOrigin {
            shared,
            dial,
            options,
            thread: Some(thread),
        })
    }
}

impl Remote for NbdOrigin {
    fn name(&self) -> String {
        self.shared.name.clone()
    }

    fn size(&self) -> u64 {
        self.shared.size.load(Ordering::Relaxed)
    }

    /// Asks on a connection of its own: the protocol tells the size only at the beginning.
    fn refresh_size(&self) -> io::Result<u64> {
        if lock(&self.shared.link).fenced {
            return Err(io::Error::from_raw_os_error(libc::ESHUTDOWN));
        }
        let asked = crate::connect(
            &*self.dial,
            &self.options.export,
            crate::connect::CONNECT_LIMIT,
        );
        let size = asked.map_err(io::Error::other)?.agreed.size;
        // Requests past the old end reach the server only after its clients were told. One that shrank
        // is judged by what it was: it may have its size back before anybody asks again.
        self.shared.size.fetch_max(size, Ordering::Relaxed);
        Ok(size)
    }

    fn align(&self) -> u32 {
        self.shared.align
    }

    fn is_read_only(&self) -> bool {
        self.shared.read_only
    }

    fn push(&self, job: Job) {
        let mut inbox = lock(&self.shared.inbox);
        // Nobody would answer; dropped, it answers itself.
        if !inbox.stopped {
            inbox.jobs.push(job);
            drop(inbox);
            self.shared.wake.wake();
        }
    }

    fn link(&self) -> Link {
        lock(&self.shared.link).clone()
    }

    fn set_timeout(&self, timeout: Duration) {
        let ns = nanoseconds(timeout);
        self.shared.timeout_ns.store(ns, Ordering::Relaxed);
        // What waits already may have waited long enough.
        self.shared.wake.wake();
    }

    fn hurry(&self) {
        lock(&self.shared.inbox).hurry = true;
        self.shared.wake.wake();
    }
}

impl Drop for NbdOrigin {
    fn drop(&mut self) {
        lock(&self.shared.inbox).stop = true;
        self.shared.wake.wake();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            // One that panicked has answered its jobs by dropping them.
            let _ = thread.join();
        }
    }
}
