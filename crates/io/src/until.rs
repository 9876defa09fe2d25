//! A socket with one deadline for a whole exchange.
//!
//! A socket's own timeout is that of a single read or write: a peer that sends a byte now and then holds whoever reads from
//! it as long as it likes. [`Until`] gives each operation only the time that is left.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// A blocking stream whose operations can be limited in time.
pub trait Timed: Read + Write {
    /// Longest wait of each later read and write, which is not zero.
    fn limit(&self, left: Duration) -> io::Result<()>;
}

impl Timed for UnixStream {
    fn limit(&self, left: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(left))?;
        self.set_write_timeout(Some(left))
    }
}

impl Timed for TcpStream {
    fn limit(&self, left: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(left))?;
        self.set_write_timeout(Some(left))
    }
}

impl<T> Timed for &T
where
    for<'a> &'a T: Read + Write,
    T: Timed,
{
    fn limit(&self, left: Duration) -> io::Result<()> {
        T::limit(self, left)
    }
}

/// See the module. Operations after the deadline fail with [`io::ErrorKind::TimedOut`].
#[derive(Debug)]
pub struct Until<S> {
    stream: S,
    end: Instant,
}

impl<S: Timed> Until<S> {
    /// Everything has to be done by `end`.
    pub fn new(stream: S, end: Instant) -> Until<S> {
        Until { stream, end }
    }

    /// From now on, by `end`.
    pub fn extend(&mut self, end: Instant) {
        self.end = end;
    }

    /// The stream.
    pub fn get_ref(&self) -> &S {
        &self.stream
    }

    /// The stream, with the last timeouts set.
    pub fn into_inner(self) -> S {
        self.stream
    }

    fn prepare(&self) -> io::Result<()> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.limit(left)
    }
}

/// Sockets report the end of their time as if they did not block.
fn late(e: io::Error) -> io::Error {
    match e.kind() {
        io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
        _ => e,
    }
}

impl<S: Timed> Read for Until<S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.prepare()?;
        self.stream.read(buffer).map_err(late)
    }
}

impl<S: Timed> Write for Until<S> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.prepare()?;
        self.stream.write(data).map_err(late)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// Connects to a unix socket. A server that does not accept leaves clients in a queue, and clients for which that is full
/// would wait without limit.
pub fn connect_unix(path: &Path, limit: Duration) -> io::Result<UnixStream> {
    // SAFETY: plain numbers; the new descriptor is owned at once.
    let socket = unsafe {
        let fd = libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        UnixStream::from(OwnedFd::from_raw_fd(fd))
    };
    // The kernel applies it to connect(2) as well (unix(7) waits as a send does).
    socket.set_write_timeout(Some(limit.max(Duration::from_millis(1))))?;
    // SAFETY: zeros are a valid address without a path.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let bytes = path.as_os_str().as_bytes();
    if bytes.len() >= address.sun_path.len() || bytes.contains(&0) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    let len = std::mem::offset_of!(libc::sockaddr_un, sun_path) + bytes.len() + 1;
    // SAFETY: the kernel reads `len` bytes of the address, which is valid for the call and longer than that.
    let done = unsafe {
        libc::connect(
            socket.as_raw_fd(),
            (&raw const address).cast(),
            len as libc::socklen_t,
        )
    };
    if done < 0 {
        return Err(late(io::Error::last_os_error()));
    }
    socket.set_write_timeout(None)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    const LIMIT: Duration = Duration::from_millis(300);
    /// A tenth of this would do on an idle host.
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn dribbling_peer_ends_at_deadline() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let dribble = std::thread::spawn(move || {
            // Ends with the other side.
            while far.write_all(b"x").is_ok() {
                std::thread::sleep(LIMIT / 10);
            }
        });
        let mut near = Until::new(near, Instant::now() + LIMIT);
        let read = near.read_to_end(&mut Vec::new());
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(near);
        dribble.join().unwrap();
    }

    #[test]
    fn full_queue_ends_connect_at_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let begun = Instant::now();
        // Nobody accepts: sooner or later the queue is full.
        let mut kept = Vec::new();
        let error = loop {
            match connect_unix(&path, LIMIT) {
                Ok(stream) => kept.push(stream),
                Err(e) => break e,
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(begun.elapsed() < LONG);
        drop(kept.pop());
        drop(listener);
        assert!(connect_unix(&path, LIMIT).is_err());
    }
}
