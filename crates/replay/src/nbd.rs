//! An NBD export as the target: one connection, requests out from the player's thread, answers
//! in on another.
//!
//! Fixed newstyle negotiation with `NBD_OPT_GO`, simple replies (proto.md of the NBD project).
//! Answers are timed by the thread that receives them, so that a player busy with sending does
//! not make them look late.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use hearth_fault::Fault;
use hearth_io::BufSlice;
use hearth_nbd::wire::{self, cmd, info, opt, rep, tflag};

use crate::error::ReplayError;
use crate::target::{Done, Job, Kind, LEN_MAX, Target};

/// How long a connection may take to be made: a healthy server takes milliseconds.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// How long the server may take nothing of a request. A server that reads answers even when its
/// disk does not; one that reads nothing for so long hangs.
const WRITE_LIMIT: Duration = Duration::from_secs(30);
/// How long a courtesy may take.
const GOODBYE_LIMIT: Duration = Duration::from_millis(200);
/// How long negotiation may take.
const SETUP_LIMIT: Duration = Duration::from_secs(30);
/// Longest option reply read: names and texts of servers are shorter.
const OPTION_REPLY_MAX: usize = 64 << 10;
/// Option replies read before a server is taken for mad.
const OPTION_REPLIES_MAX: usize = 64;

/// A stream that can be used from two threads.
enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    fn try_clone(&self) -> io::Result<Stream> {
        Ok(match self {
            Stream::Unix(s) => Stream::Unix(s.try_clone()?),
            Stream::Tcp(s) => Stream::Tcp(s.try_clone()?),
        })
    }

    fn set_read_timeout(&self, limit: Option<Duration>) -> io::Result<()> {
        match self {
            Stream::Unix(s) => s.set_read_timeout(limit),
            Stream::Tcp(s) => s.set_read_timeout(limit),
        }
    }

    fn set_write_timeout(&self, limit: Option<Duration>) -> io::Result<()> {
        match self {
            Stream::Unix(s) => s.set_write_timeout(limit),
            Stream::Tcp(s) => s.set_write_timeout(limit),
        }
    }

    fn shutdown(&self) {
        // It may be closed already; that is as good.
        let _ = match self {
            Stream::Unix(s) => s.shutdown(std::net::Shutdown::Both),
            Stream::Tcp(s) => s.shutdown(std::net::Shutdown::Both),
        };
    }
}

impl Read for Stream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(s) => s.read(buf),
            Stream::Tcp(s) => s.read(buf),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(s) => s.write(buf),
            Stream::Tcp(s) => s.write(buf),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Where an export is.
#[derive(Debug, PartialEq, Eq)]
enum Address {
    Unix(PathBuf),
    Tcp(String),
}

fn decode(text: &str) -> Option<String> {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(&b) = bytes.get(at) {
        if b == b'%' {
            let digits = text.get(at + 1..at + 3)?;
            out.push(u8::from_str_radix(digits, 16).ok()?);
            at += 3;
        } else {
            out.push(b);
            at += 1;
        }
    }
    String::from_utf8(out).ok()
}

/// Takes `nbd://HOST[:PORT]/EXPORT` or `nbd+unix:///EXPORT?socket=PATH` apart.
fn parse(uri: &str) -> Option<(Address, String)> {
    if let Some(rest) = uri.strip_prefix("nbd+unix:///") {
        let (export, query) = rest.split_once('?')?;
        let socket = query.split('&').find_map(|p| p.strip_prefix("socket="))?;
        return Some((Address::Unix(decode(socket)?.into()), decode(export)?));
    }
    let rest = uri.strip_prefix("nbd://")?;
    let (host, export) = rest.split_once('/').unwrap_or((rest, ""));
    let has_port = host.rsplit(']').next().is_some_and(|end| end.contains(':'));
    let host = match (host, has_port) {
        ("", _) => return None,
        (host, true) => host.to_owned(),
        (host, false) => format!("{host}:10809"),
    };
    Some((Address::Tcp(host), decode(export)?))
}

/// The first of the host's addresses that answers.
fn connect_tcp(host: &str) -> io::Result<TcpStream> {
    let mut last = bad("its name has no address");
    for address in host.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, CONNECT_LIMIT) {
            Ok(stream) => return Ok(stream),
            Err(e) => last = e,
        }
    }
    Err(last)
}

/// A unix socket whose listener takes no connections makes `connect` wait for ever, so it waits on
/// a thread of its own.
fn connect_unix(path: &Path) -> io::Result<UnixStream> {
    let (told, made) = channel();
    let path = path.to_owned();
    std::thread::Builder::new()
        .name("replay-connect".to_owned())
        .spawn(move || told.send(UnixStream::connect(path)))?;
    made.recv_timeout(CONNECT_LIMIT)
        .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

fn bad(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    if let Some(part) = bytes.get(at..at + N) {
        out.copy_from_slice(part);
    }
    out
}

/// What was agreed on.
struct Agreed {
    size: u64,
    flags: u16,
    align: u64,
    len_max: u64,
}

fn negotiate(stream: &mut Stream, export: &str) -> io::Result<Agreed> {
    let mut greeting = [0u8; 18];
    stream.read_exact(&mut greeting)?;
    let magics = (
        u64::from_be_bytes(number(&greeting, 0)),
        u64::from_be_bytes(number(&greeting, 8)),
    );
    if magics != (wire::INIT_MAGIC, wire::OPTION_MAGIC) {
        return Err(bad("it is no NBD server of the newer style"));
    }
    let mut hello = (wire::FLAG_FIXED_NEWSTYLE | wire::FLAG_NO_ZEROES)
        .to_be_bytes()
        .to_vec();
    hello.extend(wire::OPTION_MAGIC.to_be_bytes());
    hello.extend(opt::GO.to_be_bytes());
    hello.extend((4 + export.len() as u32 + 4).to_be_bytes());
    hello.extend((export.len() as u32).to_be_bytes());
    hello.extend(export.as_bytes());
    hello.extend(1u16.to_be_bytes());
    hello.extend(info::BLOCK_SIZE.to_be_bytes());
    stream.write_all(&hello)?;
    let mut agreed = Agreed {
        size: 0,
        flags: 0,
        align: 1,
        len_max: LEN_MAX,
    };
    for _ in 0..OPTION_REPLIES_MAX {
        let mut head = [0u8; 20];
        stream.read_exact(&mut head)?;
        if u64::from_be_bytes(number(&head, 0)) != wire::OPTION_REPLY_MAGIC {
            return Err(bad("its answer to an option is malformed"));
        }
        let kind = u32::from_be_bytes(number(&head, 12));
        let len = u32::from_be_bytes(number(&head, 16)) as usize;
        if len > OPTION_REPLY_MAX {
            return Err(bad("its answer to an option is too long"));
        }
        let mut payload = vec![0u8; len];
        stream.read_exact(&mut payload)?;
        match kind {
            rep::ACK => return Ok(agreed),
            rep::INFO => match u16::from_be_bytes(number(&payload, 0)) {
                info::EXPORT if len >= 12 => {
                    agreed.size = u64::from_be_bytes(number(&payload, 2));
                    agreed.flags = u16::from_be_bytes(number(&payload, 10));
                }
                info::BLOCK_SIZE if len >= 14 => {
                    let least = u64::from(u32::from_be_bytes(number(&payload, 2)));
                    let most = u64::from(u32::from_be_bytes(number(&payload, 10)));
                    if !least.is_power_of_two() || least > 65_536 || most < least {
                        return Err(bad("its block sizes make no sense"));
                    }
                    agreed.align = least;
                    agreed.len_max = most.min(LEN_MAX) / least * least;
                }
                _ => {}
            },
            refused => {
                let why = String::from_utf8_lossy(&payload).into_owned();
                return Err(bad(format!(
                    "it refuses the export {export:?} ({refused:#x}) {why}"
                )));
            }
        }
    }
    Err(bad("it answers an option without end"))
}

type InFlight = Arc<Mutex<HashMap<u64, Job>>>;

/// See the module.
pub struct NbdTarget {
    name: String,
    agreed: Agreed,
    stream: Stream,
    in_flight: InFlight,
    answers: Receiver<Done>,
    reader: Option<JoinHandle<io::Error>>,
}

impl NbdTarget {
    /// True if `address` is that of an NBD export, whether or not it is well written.
    pub fn is_address(address: &str) -> bool {
        address.starts_with("nbd:") || address.starts_with("nbd+")
    }

    /// The unix socket and the export an address names, if it does.
    pub fn unix_parts(address: &str) -> Option<(PathBuf, String)> {
        match parse(address)? {
            (Address::Unix(path), export) => Some((path, export)),
            (Address::Tcp(_), _) => None,
        }
    }

    /// Connects.
    ///
    /// # Errors
    ///
    /// When the address is none, nobody listens, or the export is refused.
    pub fn connect(address: &str) -> Result<NbdTarget, ReplayError> {
        let (place, export) =
            parse(address).ok_or_else(|| ReplayError::Address(address.to_owned()))?;
        let failed = |e: io::Error| {
            ReplayError::Open(Fault::new(
                format!("cannot use {address}: {e}"),
                "see whether its server runs and has this export",
            ))
        };
        let mut stream = match &place {
            Address::Unix(path) => Stream::Unix(connect_unix(path).map_err(failed)?),
            Address::Tcp(host) => {
                let stream = connect_tcp(host).map_err(failed)?;
                stream.set_nodelay(true).map_err(failed)?;
                Stream::Tcp(stream)
            }
        };
        stream.set_read_timeout(Some(SETUP_LIMIT)).map_err(failed)?;
        stream
            .set_write_timeout(Some(WRITE_LIMIT))
            .map_err(failed)?;
        let agreed = negotiate(&mut stream, &export).map_err(failed)?;
        stream.set_read_timeout(None).map_err(failed)?;
        let in_flight = InFlight::default();
        let (told, answers) = channel();
        let (mut input, waiting) = (stream.try_clone().map_err(failed)?, in_flight.clone());
        let receive = move || {
            loop {
                match answer(&mut input, &waiting) {
                    Ok(done) => {
                        if told.send(done).is_err() {
                            return bad("the replay ended");
                        }
                    }
                    Err(e) => return e,
                }
            }
        };
        let reader = std::thread::Builder::new()
            .name("replay-answers".to_owned())
            .spawn(receive)
            .map_err(failed)?;
        Ok(NbdTarget {
            name: address.to_owned(),
            agreed,
            stream,
            in_flight,
            answers,
            reader: Some(reader),
        })
    }

    fn broken(&mut self, why: String) -> ReplayError {
        ReplayError::Broken {
            name: self.name.clone(),
            why,
        }
    }
}

/// Receives one answer, a read's data included.
fn answer(input: &mut Stream, in_flight: &InFlight) -> io::Result<Done> {
    let mut head = [0u8; 16];
    input.read_exact(&mut head)?;
    if u32::from_be_bytes(number(&head, 0)) != wire::SIMPLE_REPLY_MAGIC {
        return Err(bad("an answer is malformed"));
    }
    let error = u32::from_be_bytes(number(&head, 4));
    let id = u64::from_be_bytes(number(&head, 8));
    let job = in_flight
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .remove(&id);
    let mut job = job.ok_or_else(|| bad("an answer came to a request nobody sent"))?;
    if error == 0
        && job.kind == Kind::Read
        && let Some(buf) = &mut job.buf
    {
        input.read_exact(buf.bytes_mut())?;
    }
    Ok(Done {
        id,
        buf: job.buf,
        // NBD's error numbers are Linux's.
        result: match error {
            0 => Ok(()),
            n => Err(io::Error::from_raw_os_error(n as i32).to_string()),
        },
        at_ns: hearth_io::now_ns(),
    })
}

impl Target for NbdTarget {
    fn name(&self) -> &str {
        &self.name
    }

    fn size(&self) -> u64 {
        self.agreed.size / self.agreed.align * self.agreed.align
    }

    fn align(&self) -> u64 {
        self.agreed.align
    }

    fn len_max(&self) -> u64 {
        self.agreed.len_max
    }

    fn read_only(&self) -> bool {
        self.agreed.flags & tflag::READ_ONLY != 0
    }

    fn can(&self, kind: Kind) -> bool {
        match kind {
            Kind::Read | Kind::Write => true,
            Kind::Discard => self.agreed.flags & tflag::SEND_TRIM != 0,
            Kind::Flush => self.agreed.flags & tflag::SEND_FLUSH != 0,
        }
    }

    fn submit(&mut self, job: Job) -> Result<(), ReplayError> {
        let kind = match job.kind {
            Kind::Read => cmd::READ,
            Kind::Write => cmd::WRITE,
            Kind::Discard => cmd::TRIM,
            Kind::Flush => cmd::FLUSH,
        };
        let mut message = [0u8; 28];
        message[..4].copy_from_slice(&wire::REQUEST_MAGIC.to_be_bytes());
        message[6..8].copy_from_slice(&kind.to_be_bytes());
        message[8..16].copy_from_slice(&job.id.to_be_bytes());
        message[16..24].copy_from_slice(&job.offset.to_be_bytes());
        message[24..28].copy_from_slice(&(job.len as u32).to_be_bytes());
        let payload: Option<BufSlice> = job.buf.clone().filter(|_| job.kind == Kind::Write);
        self.in_flight
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(job.id, job);
        let sent = self.stream.write_all(&message).and_then(|()| {
            payload.map_or(Ok(()), |payload| self.stream.write_all(payload.bytes()))
        });
        sent.map_err(|e| match e.kind() {
            // Linux says "would block" of a socket whose time is up.
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => self.broken(format!(
                "it has taken nothing for {} seconds",
                WRITE_LIMIT.as_secs()
            )),
            _ => self.broken(e.to_string()),
        })
    }

    fn abandon(&mut self) {
        self.stream.shutdown();
    }

    fn wait(&mut self, until_ns: u64, done: &mut Vec<Done>) -> Result<(), ReplayError> {
        let left = until_ns.saturating_sub(hearth_io::now_ns());
        match self.answers.recv_timeout(Duration::from_nanos(left)) {
            Ok(first) => done.push(first),
            Err(RecvTimeoutError::Timeout) => return Ok(()),
            Err(RecvTimeoutError::Disconnected) => {
                let ended = self.reader.take().and_then(|r| r.join().ok());
                let why = match ended {
                    Some(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                        "it closed the connection".to_owned()
                    }
                    Some(e) => e.to_string(),
                    None => "its answers cannot be received".to_owned(),
                };
                return Err(self.broken(why));
            }
        }
        done.extend(self.answers.try_iter());
        Ok(())
    }
}

impl Drop for NbdTarget {
    fn drop(&mut self) {
        let mut message = [0u8; 28];
        message[..4].copy_from_slice(&wire::REQUEST_MAGIC.to_be_bytes());
        message[6..8].copy_from_slice(&cmd::DISC.to_be_bytes());
        // A courtesy that nobody waits for; the server sees the end of the stream in any case.
        if self.stream.set_write_timeout(Some(GOODBYE_LIMIT)).is_ok() {
            let _ = self.stream.write_all(&message);
        }
        self.stream.shutdown();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        assert_eq!(
            parse("nbd+unix:///vm%201?socket=/run/h/nbd.sock"),
            Some((Address::Unix("/run/h/nbd.sock".into()), "vm 1".to_owned()))
        );
        for (uri, host) in [
            ("nbd://h/x", "h:10809"),
            ("nbd://h:7/x", "h:7"),
            ("nbd://[::1]/x", "[::1]:10809"),
            ("nbd://[::1]:9/x", "[::1]:9"),
        ] {
            assert_eq!(
                parse(uri),
                Some((Address::Tcp(host.to_owned()), "x".to_owned()))
            );
        }
        for nonsense in [
            "nbd+unix:///x",
            "nbd:///x",
            "nbd://",
            "nbd+unix:///%zz?socket=/a",
        ] {
            assert_eq!(parse(nonsense), None, "{nonsense}");
        }
    }
}
