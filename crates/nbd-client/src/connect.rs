//! From an address to a connection that is ready for requests; blocks, with a limit.
//!
//! Connecting happens once in a long while and may wait for name servers and dead hosts, so it
//! is done by a thread that may block, not by the one that serves requests.

use crate::handshake::{Handshake, HandshakeError, Negotiated};
use crate::uri::{Address, Uri};
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use hearth_fault::Fault;
use hearth_io::until::{Until, connect_unix};

/// Longest time to get a connection and agree on it. A server that takes longer is as good as
/// not there; it is asked again.
pub const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// Idle seconds before a connection over TCP is probed, and between probes; three unanswered
/// ones end it. A host that lost power says nothing by itself.
const KEEPALIVE_S: libc::c_int = 5;
/// Milliseconds data may stay unacknowledged over TCP before the connection is over.
const UNACKED_MS: libc::c_int = 20_000;

/// Gets a socket to a server, again and again.
pub trait Dial: Send + Sync {
    /// Connects before `deadline`. Blocks.
    fn dial(&self, deadline: Instant) -> Result<OwnedFd, ConnectError>;

    /// What is dialled, for logs and people.
    fn name(&self) -> String;

    /// More about why the server was lost, if anybody knows.
    fn why(&self) -> Option<Fault> {
        None
    }

    /// A server was given up whose errors may mean that it lost what is behind it
    /// ([`Options::errors_are_losses`](crate::Options::errors_are_losses)): the next one dialled
    /// must be another. Does not block.
    fn renew(&self) {}
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
#[error("{}", self.fault())]
pub enum ConnectError {
    /// Nobody there.
    Connect {
        /// What was dialled.
        name: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Somebody is there, but we do not get on.
    Handshake {
        /// What was dialled.
        name: String,
        /// Why.
        source: HandshakeError,
    },
    /// It hung up.
    Closed(String),
    /// It did not answer.
    Silent {
        /// What was dialled.
        name: String,
        /// How long it had.
        limit: Duration,
    },
    /// Whoever dials says why in its own words.
    Other(Fault),
}

impl ConnectError {
    /// What is wrong, and what to do about it.
    pub fn fault(&self) -> Fault {
        match self {
            ConnectError::Connect { name, source } => Fault::new(
                format!("cannot connect to {name}: {source}"),
                "see whether the server runs and may be reached",
            ),
            ConnectError::Handshake { name, source } => source.fault().within(name),
            ConnectError::Closed(name) => Fault::new(
                format!("{name} closed the connection while it was being set up"),
                "see the server's log",
            ),
            ConnectError::Silent { name, limit } => Fault::new(
                format!("{name} does not answer within {} s", limit.as_secs()),
                "see whether the server hangs",
            ),
            ConnectError::Other(fault) => fault.clone(),
        }
    }
}

/// A connection with what was agreed on it.
#[derive(Debug)]
pub struct Connection {
    /// The socket, blocking and close-on-exec.
    pub socket: OwnedFd,
    /// The agreement.
    pub agreed: Negotiated,
}

impl Dial for Uri {
    fn dial(&self, deadline: Instant) -> Result<OwnedFd, ConnectError> {
        match &self.address {
            Address::Unix(path) => {
                let left = deadline.saturating_duration_since(Instant::now());
                connect_unix(path, left).map(OwnedFd::from)
            }
            Address::Tcp { host, port } => tcp(host, *port, deadline).map(OwnedFd::from),
        }
        .map_err(|source| ConnectError::Connect {
            name: self.to_string(),
            source,
        })
    }

    fn name(&self) -> String {
        self.to_string()
    }
}

fn tcp(host: &str, port: u16, deadline: Instant) -> io::Result<TcpStream> {
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for address in (host, port).to_socket_addrs()? {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match TcpStream::connect_timeout(&address, left) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                option(&stream, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
                option(&stream, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, KEEPALIVE_S)?;
                option(&stream, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, KEEPALIVE_S)?;
                option(&stream, libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 3)?;
                option(
                    &stream,
                    libc::IPPROTO_TCP,
                    libc::TCP_USER_TIMEOUT,
                    UNACKED_MS,
                )?;
                return Ok(stream);
            }
            Err(e) => last = e,
        }
    }
    Err(last)
}

fn option(
    socket: &impl AsRawFd,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    let size = size_of_val(&value) as libc::socklen_t;
    // SAFETY: the kernel reads an int through the pointer, which is valid for the call.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            (&raw const value).cast(),
            size,
        )
    };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Gets one connection for an export.
pub fn connect(dial: &dyn Dial, export: &str, limit: Duration) -> Result<Connection, ConnectError> {
    let deadline = Instant::now() + limit;
    // Only reading, writing and time limits are used, which are the same for every socket.
    let stream = UnixStream::from(dial.dial(deadline)?);
    let mut stream = Until::new(stream, deadline);
    let agreed = agree(&mut stream, dial, export, limit)?;
    let stream = stream.into_inner();
    let lasting = stream
        .set_read_timeout(None)
        .and_then(|()| stream.set_write_timeout(None));
    lasting.map_err(|source| ConnectError::Connect {
        name: dial.name(),
        source,
    })?;
    Ok(Connection {
        socket: stream.into(),
        agreed,
    })
}

fn agree(
    stream: &mut Until<UnixStream>,
    dial: &dyn Dial,
    export: &str,
    limit: Duration,
) -> Result<Negotiated, ConnectError> {
    let name = || dial.name();
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::TimedOut => ConnectError::Silent {
            name: name(),
            limit,
        },
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => ConnectError::Closed(name()),
        _ => ConnectError::Connect {
            name: name(),
            source,
        },
    };
    let mut handshake = Handshake::new(export);
    let mut buffer = [0u8; 4096];
    loop {
        let n = match stream.read(&mut buffer) {
            Ok(0) => return Err(ConnectError::Closed(name())),
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(failed(e)),
        };
        let agreed = handshake
            .feed(&buffer[..n])
            .map_err(|source| ConnectError::Handshake {
                name: name(),
                source,
            })?;
        if let Some(agreed) = agreed {
            return Ok(agreed);
        }
        stream.write_all(&handshake.take_output()).map_err(failed)?;
    }
}
