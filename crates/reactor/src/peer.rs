//! Who connects, and who makes a session of it.

use crate::session::Session;
use std::fmt;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};

/// Bytes of replies a unix socket takes before its client must read some.
const SEND_BUFFER: libc::c_int = 1 << 20;

/// A listening socket given to the reactors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ListenerId(pub(crate) u64);

/// Where a client comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerAddress {
    /// A process of this host, over a unix socket (`SO_PEERCRED`, unix(7)).
    Unix {
        /// Process.
        pid: i32,
        /// User.
        uid: u32,
        /// Group.
        gid: u32,
    },
    /// TCP.
    Tcp(SocketAddr),
    /// The kernel does not say.
    Unknown,
}

/// A client that has just connected.
#[derive(Clone, Copy, Debug)]
pub struct PeerInfo {
    /// Where it comes from.
    pub address: PeerAddress,
    /// Where it knocked.
    pub listener: ListenerId,
}

impl fmt::Display for PeerInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(f)
    }
}

impl fmt::Display for PeerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PeerAddress::Unix { pid, uid, .. } => write!(f, "process {pid} of user {uid}"),
            PeerAddress::Tcp(address) => address.fmt(f),
            PeerAddress::Unknown => f.write_str("unknown peer"),
        }
    }
}

/// A client, as far as it can be told who that is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Where it comes from.
    pub address: PeerAddress,
    /// The name in the certificate it showed, if it showed one that was checked.
    pub name: Option<String>,
    /// It speaks through TLS.
    pub encrypted: bool,
}

impl Caller {
    /// A client at `address`.
    pub fn new(address: PeerAddress) -> Caller {
        Caller {
            address,
            name: None,
            encrypted: false,
        }
    }

    /// Who is at the other end of a connection.
    pub fn of_connection(socket: &OwnedFd) -> Caller {
        let tcp = std::os::fd::AsFd::as_fd(socket)
            .try_clone_to_owned()
            .and_then(|fd| TcpStream::from(fd).peer_addr());
        match tcp {
            Ok(address) => Caller::new(PeerAddress::Tcp(address)),
            Err(_) => Caller::of_socket(socket),
        }
    }

    /// The process at the other end of a unix socket.
    pub fn of_socket(socket: &impl AsRawFd) -> Caller {
        Caller::new(credentials(socket).unwrap_or(PeerAddress::Unknown))
    }
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(f)?;
        match &self.name {
            Some(name) => write!(f, " ({name})"),
            None => Ok(()),
        }
    }
}

/// Makes sessions of connections; one per listening socket. Called on a data thread, so it
/// must not block.
pub trait SessionFactory: Send + Sync {
    /// A session for a new client, or `None` to turn it away.
    fn connect(&self, peer: &PeerInfo) -> Option<Box<dyn Session>>;
}

/// Prepares an accepted socket and finds out who it is.
pub(crate) fn identify(fd: OwnedFd) -> (OwnedFd, PeerAddress) {
    let stream = TcpStream::from(fd);
    if let Ok(address) = stream.peer_addr() {
        // Replies are small and must not wait for acknowledgements; failure costs speed only.
        let _ = stream.set_nodelay(true);
        keepalive(&stream);
        return (stream.into(), PeerAddress::Tcp(address));
    }
    send_buffer(&stream);
    let address = credentials(&stream).unwrap_or(PeerAddress::Unknown);
    (stream.into(), address)
}

/// Puts a socket into blocking mode, as the drivers need it.
pub(crate) fn make_blocking(fd: OwnedFd) -> OwnedFd {
    let stream = TcpStream::from(fd);
    // Fails only for descriptors that are no sockets; their first receive says so.
    let _ = stream.set_nonblocking(false);
    stream.into()
}

/// Lets several long replies wait in a unix socket for a client that is busy; by default one of
/// 128 KiB fills it, and server and client take turns. Failure costs speed only.
fn send_buffer(stream: &TcpStream) {
    for option in [libc::SO_SNDBUFFORCE, libc::SO_SNDBUF] {
        if set_option(stream, option, SEND_BUFFER) {
            return;
        }
    }
}

/// So that a client whose host died gives its slot back some day. Failure is harmless.
fn keepalive(stream: &TcpStream) {
    set_option(stream, libc::SO_KEEPALIVE, 1);
}

fn set_option(stream: &TcpStream, option: libc::c_int, value: libc::c_int) -> bool {
    // SAFETY: a C int passed with its size; the descriptor is open for the call.
    let ret = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (&raw const value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    ret == 0
}

fn credentials(stream: &impl AsRawFd) -> Option<PeerAddress> {
    let mut cred = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut len = size_of_val(&cred) as libc::socklen_t;
    // SAFETY: an out-pointer to `ucred` with its size; both live across the call.
    let ret = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut cred).cast(),
            &mut len,
        )
    };
    (ret == 0).then_some(PeerAddress::Unix {
        pid: cred.pid,
        uid: cred.uid,
        gid: cred.gid,
    })
}
