//! Our ports, registered with the host's own portmapper.
//!
//! Where rpcbind runs, port 111 is taken, and clients that ask there for NFS must find us. It takes registrations from this host only, and
//! only from a port below 1024, which is root's. It keeps what is registered until that is taken out, or until it restarts. So a
//! [`Registration`] compares the list with ours every [`EVERY`], puts back what is missing, and takes its own out when it is dropped.
//!
//! Programs of others are left alone. NFS and MOUNT are needed; locks ([`nlm`], [`nsm`]) depend on what else is registered:
//!
//! | registered by others | ours | a lock is |
//! |---|---|---|
//! | neither NLM nor NSM | both | granted or denied |
//! | NSM (the host's statd) | NLM | refused: a client's restart would be reported to the statd only |
//! | NLM (the host's kernel, as it mounts NFSv3 itself) | neither | refused by the kernel |

use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use hearth_fault::Fault;

use crate::portmap::{self, Mapping};
use crate::{nlm, nsm};

/// Where it listens.
pub const ADDRESS: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), portmap::PORT);
/// How often the list is compared with ours.
pub const EVERY: Duration = Duration::from_secs(30);
/// Ports from which it takes registrations.
const PRIVILEGED: std::ops::Range<u16> = 600..1024;
/// How often, and how long each time, it is waited for. It is on this host.
const TRIES: u32 = 3;
const WAIT: Duration = Duration::from_secs(1);
/// Longest list of programs: what a datagram holds.
const ANSWER_MAX: usize = 64 << 10;

/// Why something is not registered.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// No port below 1024 can be had.
    #[error("only root may register with rpcbind: {0}")]
    Port(io::Error),
    /// Nobody answers.
    #[error("no portmapper answers at {0}: {1}")]
    Silent(SocketAddr, io::Error),
    /// It says no.
    #[error("{}", Refused::no(*program, *version))]
    No {
        /// The program.
        program: u32,
        /// Its version.
        version: u32,
    },
}

impl Refused {
    fn no(program: u32, version: u32) -> Fault {
        Fault::new(
            format!("rpcbind does not take program {program} version {version}"),
            "stop the other NFS server of this host, or ask rpcbind's settings who may register",
        )
    }
}

struct Shared {
    at: SocketAddr,
    ours: Vec<Mapping>,
    /// Locks are granted.
    locks: Arc<AtomicBool>,
    /// Why NFS is not registered.
    refused: Mutex<Option<Refused>>,
    stop: Mutex<bool>,
    stopped: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps programs registered; taken out when it is dropped.
pub struct Registration {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Registration {
    /// Registers `mappings` with the portmapper at `at`, and again every `every` if they are gone. `locks` is set when locks can be granted, and
    /// cleared when they cannot. The first try is over when this returns.
    pub fn keep(
        at: SocketAddr,
        mappings: &[Mapping],
        locks: Arc<AtomicBool>,
        every: Duration,
    ) -> io::Result<Registration> {
        let ours = mappings.iter().filter(|m| m.program != portmap::PROGRAM);
        let shared = Arc::new(Shared {
            at,
            ours: ours.copied().collect(),
            locks,
            refused: Mutex::default(),
            stop: Mutex::default(),
            stopped: Condvar::new(),
        });
        shared.look();
        let own = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("nfs-rpcbind".into())
            .spawn(move || own.run(every))?;
        Ok(Registration {
            shared,
            thread: Some(thread),
        })
    }

    /// Why clients do not find NFS there; `None` if they do.
    pub fn refused(&self) -> Option<String> {
        lock(&self.shared.refused).as_ref().map(Refused::to_string)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        *lock(&self.shared.stop) = true;
        self.shared.stopped.notify_all();
        if let Some(thread) = self.thread.take() {
            // It has nothing to tell.
            let _ = thread.join();
        }
        self.shared.locks.store(false, Ordering::Relaxed);
        match self.shared.take_out(|_| true) {
            // Where none answers, nothing is registered.
            Ok(()) | Err(Refused::Silent(..)) => {}
            Err(error) => {
                tracing::warn!(%error, "the host's portmapper still names the NFS server");
            }
        }
    }
}

impl Shared {
    fn run(&self, every: Duration) {
        let mut stop = lock(&self.stop);
        loop {
            let waited = self.stopped.wait_timeout_while(stop, every, |stop| !*stop);
            stop = waited.unwrap_or_else(PoisonError::into_inner).0;
            if *stop {
                return;
            }
            drop(stop);
            self.look();
            stop = lock(&self.stop);
        }
    }

    /// Compares the list with ours, and registers what is missing.
    fn look(&self) {
        let looked = self.register();
        let locks = matches!(looked, Ok(true));
        if self.locks.swap(locks, Ordering::Relaxed) != locks {
            tracing::info!(
                locks,
                "what rpcbind has of this host's NFS locks has changed"
            );
        }
        let refused = looked.err();
        if matches!(refused, Some(Refused::No { .. })) {
            // All of it, or nothing: what fails here fails again the next time.
            let _ = self.take_out(|_| true);
        }
        let mut before = lock(&self.refused);
        if before.is_some() != refused.is_some() {
            match &refused {
                None => tracing::info!("the NFS server is registered with rpcbind"),
                Some(why) => tracing::warn!(%why, "the NFS server is not registered with rpcbind"),
            }
        }
        *before = refused;
    }

    /// True if locks can be granted.
    fn register(&self) -> Result<bool, Refused> {
        let known = self.known()?;
        let others = |program| {
            let mut of_it = known.iter().filter(|m| m.program == program);
            of_it.any(|m| !self.ours.contains(m))
        };
        let has_locks = self.ours.iter().any(|m| m.program == nlm::PROGRAM);
        let (nlm, nsm) = (others(nlm::PROGRAM), others(nsm::PROGRAM));
        let mut asker = None;
        for mapping in &self.ours {
            let is_left = match mapping.program {
                nlm::PROGRAM => nlm,
                nsm::PROGRAM => nlm || nsm,
                _ => false,
            };
            if is_left || known.contains(mapping) {
                continue;
            }
            let asker = match &mut asker {
                Some(asker) => asker,
                none => none.insert(Asker::privileged(self.at)?),
            };
            if !asker.register(mapping, false)? {
                if [nlm::PROGRAM, nsm::PROGRAM].contains(&mapping.program) {
                    return Ok(false);
                }
                let Mapping {
                    program, version, ..
                } = *mapping;
                return Err(Refused::No { program, version });
            }
        }
        if nlm {
            // The host's own statd is wanted, and does not start where there seems to be one.
            self.take_out(|m| m.program == nsm::PROGRAM)?;
        }
        Ok(has_locks && !nlm && !nsm)
    }

    fn known(&self) -> Result<Vec<Mapping>, Refused> {
        Asker::any(self.at)?.known()
    }

    /// Takes out those of ours that `which` names. A version that others registered as well stays: it can only be taken out as a whole.
    fn take_out(&self, which: impl Fn(&Mapping) -> bool) -> Result<(), Refused> {
        let known = self.known()?;
        let is_ours = |mapping: &&Mapping| {
            let same = |m: &&Mapping| (m.program, m.version) == (mapping.program, mapping.version);
            which(mapping)
                && known.contains(mapping)
                && known.iter().filter(same).all(|m| self.ours.contains(m))
        };
        let mut ours: Vec<&Mapping> = self.ours.iter().filter(is_ours).collect();
        // One call takes out a program on all protocols; a second could take out what another program registers just then.
        ours.sort_by_key(|m| (m.program, m.version));
        ours.dedup_by_key(|m| (m.program, m.version));
        if ours.is_empty() {
            return Ok(());
        }
        let asker = Asker::privileged(self.at)?;
        ours.into_iter()
            .try_for_each(|mapping| asker.register(mapping, true).map(drop))
    }
}

/// Asks the portmapper.
struct Asker {
    at: SocketAddr,
    socket: UdpSocket,
}

impl Asker {
    fn any(at: SocketAddr) -> Result<Asker, Refused> {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).map_err(Refused::Port)?;
        Ok(Asker { at, socket })
    }

    fn privileged(at: SocketAddr) -> Result<Asker, Refused> {
        let socket = privileged().map_err(Refused::Port)?;
        Ok(Asker { at, socket })
    }

    /// What is registered.
    fn known(&self) -> Result<Vec<Mapping>, Refused> {
        self.ask(portmap::dump, |xid, answer| {
            let failed = || io::Error::from(io::ErrorKind::Unsupported);
            portmap::dumped(xid, answer)
                .map_err(invalid)?
                .ok_or_else(failed)
        })
    }

    /// Asks for one registration, or with `gone` for its end; true if it is done.
    fn register(&self, mapping: &Mapping, gone: bool) -> Result<bool, Refused> {
        self.ask(
            |xid| portmap::register(xid, mapping, gone),
            |xid, answer| portmap::registered(xid, answer).map_err(invalid),
        )
    }

    fn ask<T>(
        &self,
        question: impl Fn(u32) -> Vec<u8>,
        read: impl Fn(u32, &[u8]) -> io::Result<T>,
    ) -> Result<T, Refused> {
        self.try_ask(question, read)
            .map_err(|error| Refused::Silent(self.at, error))
    }

    fn try_ask<T>(
        &self,
        question: impl Fn(u32) -> Vec<u8>,
        read: impl Fn(u32, &[u8]) -> io::Result<T>,
    ) -> io::Result<T> {
        /// Each question has another number, so that a late answer to an earlier one is not taken for its own.
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let xid = NEXT.fetch_add(1, Ordering::Relaxed) ^ std::process::id().rotate_left(16);
        let question = question(xid);
        self.socket.connect(self.at)?;
        self.socket.set_read_timeout(Some(WAIT))?;
        let mut last = io::Error::from(io::ErrorKind::TimedOut);
        let mut answer = vec![0; ANSWER_MAX];
        for _ in 0..TRIES {
            self.socket.send(&question)?;
            match self.socket.recv(&mut answer) {
                Ok(len) if answer.starts_with(&xid.to_be_bytes()) => {
                    return read(xid, &answer[..len]);
                }
                // An answer to something else.
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    return Err(error);
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

fn invalid(malformed: crate::xdr::Malformed) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, malformed)
}

fn privileged() -> io::Result<UdpSocket> {
    let mut last = None;
    for port in PRIVILEGED.rev() {
        match UdpSocket::bind((Ipv4Addr::LOCALHOST, port)) {
            Ok(socket) => return Ok(socket),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => last = Some(error),
            Err(error) => return Err(error),
        }
    }
    Err(last.unwrap_or_else(|| io::ErrorKind::AddrInUse.into()))
}
