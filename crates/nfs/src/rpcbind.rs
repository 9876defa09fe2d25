//! The host's own portmapper, told of our ports.
//!
//! Where rpcbind runs, port 111 is taken, and clients that ask there for NFS have to be told of us by it. It takes
//! registrations from this host only, and only from a port below 1024, which is root's. It forgets
//! nothing by itself: what is registered is taken out again when we end, and what a predecessor that died left
//! behind is the same as what we register, or is in the way and told as such.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use hearth_fault::Fault;

use crate::portmap::{self, Mapping};

/// Where it listens.
pub const ADDRESS: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), portmap::PORT);
/// Ports from which it takes registrations.
const PRIVILEGED: std::ops::Range<u16> = 600..1024;
/// How often, and how long each time, it is waited for. It is on this host.
const TRIES: u32 = 3;
const WAIT: Duration = Duration::from_secs(1);

/// Why nothing was registered.
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

/// What is registered; taken out when it is dropped.
#[derive(Debug)]
pub struct Registration {
    at: SocketAddr,
    mappings: Vec<Mapping>,
}

impl Registration {
    /// Registers all, or nothing.
    pub fn make(at: SocketAddr, mappings: &[Mapping]) -> Result<Registration, Refused> {
        let socket = privileged().map_err(Refused::Port)?;
        let mut made = Registration {
            at,
            mappings: Vec::new(),
        };
        for mapping in mappings.iter().filter(|m| m.program != portmap::PROGRAM) {
            let taken =
                ask(&socket, at, mapping, false).map_err(|error| Refused::Silent(at, error))?;
            if !taken {
                let Mapping {
                    program, version, ..
                } = *mapping;
                // What was made so far is taken out by being dropped.
                return Err(Refused::No { program, version });
            }
            made.mappings.push(*mapping);
        }
        Ok(made)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if self.mappings.is_empty() {
            return;
        }
        let gone = privileged().and_then(|socket| {
            self.mappings
                .iter()
                .try_for_each(|mapping| ask(&socket, self.at, mapping, true).map(drop))
        });
        if let Err(error) = gone {
            tracing::warn!(%error, "the host's portmapper still names the NFS server");
        }
    }
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

/// Asks for one registration, or with `gone` for its end.
fn ask(socket: &UdpSocket, at: SocketAddr, mapping: &Mapping, gone: bool) -> io::Result<bool> {
    /// Each question has another number, so that a late answer to an earlier one is not taken for its own.
    static NEXT: AtomicU32 = AtomicU32::new(1);
    let xid = NEXT.fetch_add(1, Ordering::Relaxed) ^ std::process::id().rotate_left(16);
    let question = portmap::register(xid, mapping, gone);
    socket.connect(at)?;
    socket.set_read_timeout(Some(WAIT))?;
    let mut last = io::Error::from(io::ErrorKind::TimedOut);
    for _ in 0..TRIES {
        socket.send(&question)?;
        let mut answer = [0; 512];
        match socket.recv(&mut answer) {
            Ok(len) if answer.starts_with(&xid.to_be_bytes()) => {
                return portmap::registered(xid, &answer[..len])
                    .map_err(|malformed| io::Error::new(io::ErrorKind::InvalidData, malformed));
            }
            // An answer to something else.
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => return Err(error),
            Err(error) => last = error,
        }
    }
    Err(last)
}
