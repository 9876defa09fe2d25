//! A client of the control API: HTTP/1.1 over a unix socket, one request per connection.
//!
//! The command line needs no connection pool, no TLS and no redirects, so this is all of HTTP it
//! has to know. What comes back is bounded and checked as if the peer were a stranger: the path
//! of the socket is the user's word only.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::api::types::ErrorBody;
use crate::error::{Error, Kind, Result};
use crate::{rundir, sign};
use hearth_io::until::{Until, connect_unix};

/// Largest answer read: a thousand disks' statistics are a few MiB.
const ANSWER_MAX: u64 = 64 << 20;
/// Longest the daemon may take for one answer to an order. Flushes and removals return at once and
/// are asked how far they are; but adding a disk may have to wait for a slow origin.
const ORDER_TIMEOUT: Duration = Duration::from_secs(120);
/// Longest it may take to tell something. It looks into its own memory for that, so what takes
/// longer is a daemon that is stuck.
const ASK_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest wait for a daemon that was not asked for, to mention it.
const LOOK_TIMEOUT: Duration = Duration::from_secs(2);
/// A daemon that has given no sign of life for so long stands still: it gives one every
/// [`sign::BEAT`].
const STILL: Duration = Duration::from_secs(3 * sign::BEAT.as_secs());

/// What is left to see of a daemon that did not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trace {
    /// It listens: it hangs, or is stopped in a debugger.
    Listens,
    /// There may be one, and this user may not ask it.
    Hidden,
    /// There is none.
    Absent,
}

/// Talks to the daemon behind one control socket.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
    /// The form of answer it prefers, where there are several.
    accept: Option<&'static str>,
    /// Longest wait for what is asked.
    patience: Duration,
}

impl Client {
    /// A client of the daemon that uses run directory `dir`.
    pub fn new(dir: &Path) -> Client {
        Client {
            socket: crate::rundir::api_socket(dir),
            accept: None,
            patience: ASK_TIMEOUT,
        }
    }

    /// The second service's client of that daemon.
    pub fn of_second(dir: &Path) -> Client {
        Client {
            socket: crate::rundir::second_socket(dir),
            ..Client::new(dir)
        }
    }

    /// The same one, which prefers answers of this kind.
    pub fn accepting(&self, kind: &'static str) -> Client {
        Client {
            accept: Some(kind),
            ..self.clone()
        }
    }

    /// The same, for somebody who cannot wait as long as a person does.
    pub fn patient_for(self, patience: Duration) -> Client {
        Client { patience, ..self }
    }

    /// True if a daemon listens.
    pub fn is_up(&self) -> bool {
        connect_unix(&self.socket, self.patience).is_ok()
    }

    /// Whether a daemon is there although it did not answer: for people, after a request failed.
    pub fn trace(&self) -> Trace {
        match connect_unix(&self.socket, self.patience.min(LOOK_TIMEOUT)) {
            Ok(_) => Trace::Listens,
            Err(e) if e.kind() == ErrorKind::TimedOut => Trace::Listens,
            Err(e) if e.kind() == ErrorKind::PermissionDenied => Trace::Hidden,
            Err(_) if self.roots_daemon().is_some() => Trace::Hidden,
            Err(_) => Trace::Absent,
        }
    }

    /// `GET path`.
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        self.call("GET", path, None::<&()>)
    }

    /// `POST path` with a JSON body.
    pub fn post<B: Serialize, T: DeserializeOwned>(&self, path: &str, body: &B) -> Result<T> {
        self.call("POST", path, Some(body))
    }

    /// `POST path` without a body.
    pub fn order<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        self.call("POST", path, None::<&()>)
    }

    /// `PATCH path` with a JSON body.
    pub fn patch<B: Serialize, T: DeserializeOwned>(&self, path: &str, body: &B) -> Result<T> {
        self.call("PATCH", path, Some(body))
    }

    /// `DELETE path`.
    pub fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        self.call("DELETE", path, None::<&()>)
    }

    fn call<B: Serialize, T: DeserializeOwned>(
        &self,
        method: &str,
        path: &str,
        body: Option<&B>,
    ) -> Result<T> {
        let body = match body {
            Some(body) => serde_json::to_vec(body)
                .map_err(|e| Error::internal(format!("cannot encode a request: {e}")))?,
            None => Vec::new(),
        };
        let answer = self.answer(method, path, &body)?;
        serde_json::from_slice(&answer).map_err(|e| {
            Error::unavailable(
                format!("the daemon's answer to {method} {path} is not understood: {e}"),
                "check that client and daemon are of the same version",
            )
        })
    }

    /// `GET path`, of what is no JSON.
    pub fn text(&self, path: &str) -> Result<String> {
        let body = self.answer("GET", path, &[])?;
        String::from_utf8(body)
            .map_err(|_| Error::internal(format!("the daemon's answer to GET {path} is no text")))
    }

    fn answer(&self, method: &str, path: &str, body: &[u8]) -> Result<Vec<u8>> {
        let raw = self.exchange(method, path, body)?;
        let answer = parse_answer(&raw).map_err(|what| {
            Error::unavailable(
                format!(
                    "{} does not answer like a hearth daemon: {what}",
                    self.socket.display()
                ),
                "check --run-dir, and that client and daemon are of the same version",
            )
        })?;
        if answer.status >= 400 {
            return Err(refusal(answer.status, &answer.body));
        }
        Ok(answer.body)
    }

    fn exchange(&self, method: &str, path: &str, body: &[u8]) -> Result<Vec<u8>> {
        let limit = match method {
            "GET" => self.patience,
            _ => ORDER_TIMEOUT,
        };
        self.exchange_within(method, path, body, limit)
    }

    fn exchange_within(
        &self,
        method: &str,
        path: &str,
        body: &[u8],
        limit: Duration,
    ) -> Result<Vec<u8>> {
        let end = Instant::now() + limit;
        let stream = connect_unix(&self.socket, limit).map_err(|e| match e.kind() {
            ErrorKind::TimedOut => self.stuck(limit),
            _ => self.no_daemon(&e),
        })?;
        let mut stream = Until::new(stream, end);
        let talk = |stream: &mut Until<UnixStream>| -> std::io::Result<Vec<u8>> {
            let mut request =
                format!("{method} {path} HTTP/1.1\r\nHost: hearth\r\nConnection: close\r\n");
            if let Some(kind) = self.accept {
                request.push_str(&format!("Accept: {kind}\r\n"));
            }
            if !body.is_empty() {
                request.push_str("Content-Type: application/json\r\n");
            }
            request.push_str(&format!("Content-Length: {}\r\n\r\n", body.len()));
            let mut bytes = request.into_bytes();
            bytes.extend_from_slice(body);
            // A daemon that refuses before it has read everything closes its end; what it had
            // to say is still there to be read.
            match stream.write_all(&bytes) {
                Err(e) if e.kind() != ErrorKind::BrokenPipe => return Err(e),
                _ => {}
            }
            read_all(stream)
        };
        talk(&mut stream).map_err(|e| match e.kind() {
            ErrorKind::TimedOut => self.stuck(limit),
            _ => Error::unavailable(
                format!(
                    "the connection to the daemon behind {} broke: {e}",
                    self.socket.display()
                ),
                "see whether it is still running",
            ),
        })
    }

    /// A daemon is there and does not answer.
    fn stuck(&self, limit: Duration) -> Error {
        let seen = self.socket.parent().and_then(sign::last_sign);
        let who = match seen {
            Some(sign) => format!(" (pid {})", sign.pid),
            None => String::new(),
        };
        let since = match seen {
            Some(sign) if sign.age > STILL => format!(
                "; it is stuck, and gave its last sign of life {} ago",
                crate::progress::human_seconds(sign.age.as_secs_f64())
            ),
            Some(_) => "; the rest of it is alive, so this request is what is stuck".to_owned(),
            None => "; it is stuck".to_owned(),
        };
        Error::unavailable(
            format!(
                "the hearth daemon{who} behind {} has not answered for {} s{since}",
                self.socket.display(),
                limit.as_secs()
            ),
            "look at its log and whether an origin or the flash hangs; if it has to be ended with \
             `kill -9`, what guests have flushed is on flash and is found at the next start",
        )
    }

    fn no_daemon(&self, e: &std::io::Error) -> Error {
        match e.kind() {
            ErrorKind::NotFound | ErrorKind::ConnectionRefused => {
                let what = format!("no hearth daemon is listening on {}", self.socket.display());
                match self.roots_daemon() {
                    Some(remedy) => {
                        let roots = rundir::api_socket(Path::new(rundir::ROOTS_DIR));
                        Error::unavailable(
                            format!(
                                "{what}, but root's daemon has its socket at {}",
                                roots.display()
                            ),
                            remedy,
                        )
                    }
                    None => Error::unavailable(
                        what,
                        "start it with `hearth serve --flash PATH`, or name its directory with --run-dir",
                    ),
                }
            }
            ErrorKind::PermissionDenied => Error::unavailable(
                format!(
                    "you may not use the control socket {}",
                    self.socket.display()
                ),
                "run this with sudo or as the user who runs the daemon; `hearth serve --control-group \
                 GROUP` lets a group control it, and --monitor-group the second service watch it",
            ),
            _ => Error::unavailable(
                format!("cannot connect to {}: {e}", self.socket.display()),
                "check --run-dir",
            ),
        }
    }

    /// How to reach root's daemon, if there is one and it is not what was asked for.
    fn roots_daemon(&self) -> Option<&'static str> {
        let roots = rundir::api_socket(Path::new(rundir::ROOTS_DIR));
        if self.socket == roots {
            return None;
        }
        match connect_unix(&roots, LOOK_TIMEOUT) {
            Ok(_) => Some("use it with --run-dir /run/hearth"),
            Err(e) if e.kind() == ErrorKind::PermissionDenied => Some(
                "use it with sudo; `hearth serve --control-group GROUP` lets a group control it",
            ),
            Err(_) => None,
        }
    }
}

/// Everything that comes until the peer closes.
fn read_all(stream: &mut impl Read) -> std::io::Result<Vec<u8>> {
    let mut raw = Vec::new();
    let mut piece = vec![0; 64 << 10];
    while (raw.len() as u64) < ANSWER_MAX {
        match stream.read(&mut piece) {
            Ok(0) => break,
            Ok(n) => raw.extend_from_slice(&piece[..n]),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            // It closed without having read all we wrote; what it said came before.
            Err(e) if e.kind() == ErrorKind::ConnectionReset && !raw.is_empty() => break,
            Err(e) => return Err(e),
        }
    }
    Ok(raw)
}

/// The path `/v1/disks/NAME` with `rest` appended. Names that are no disk names cannot exist;
/// they are percent-encoded so that they arrive as what they are.
pub fn disk_path(name: &str, rest: &str) -> String {
    named_path("/v1/disks/", name, rest)
}

/// The path `/v1/datastores/NAME` with `rest` appended.
pub fn datastore_path(name: &str, rest: &str) -> String {
    named_path("/v1/datastores/", name, rest)
}

/// `text` as a part of a path or of a question.
pub fn escape(text: &str) -> String {
    let mut escaped = String::new();
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => escaped.push(byte as char),
            // A lone "." or ".." segment could be folded away by an intermediary.
            _ => escaped.push_str(&format!("%{byte:02X}")),
        }
    }
    escaped
}

fn named_path(front: &str, name: &str, rest: &str) -> String {
    format!("{front}{}{rest}", escape(name))
}

fn refusal(status: u16, body: &[u8]) -> Error {
    let kind = match status {
        404 => Kind::NotFound,
        409 => Kind::Conflict,
        403 | 412 => Kind::Refused,
        500 => Kind::Internal,
        503 => Kind::Unavailable,
        _ => Kind::Invalid,
    };
    match serde_json::from_slice::<ErrorBody>(body) {
        Ok(body) => Error::new(kind, body.error, body.remedy),
        Err(_) => Error::new(
            kind,
            format!("the daemon answered with HTTP status {status}"),
            "check that client and daemon are of the same version",
        ),
    }
}

#[derive(Debug, PartialEq)]
struct Answer {
    status: u16,
    body: Vec<u8>,
}

/// Takes an HTTP/1.x answer apart. The peer closes after it, so a body without a length is
/// everything that came.
fn parse_answer(raw: &[u8]) -> std::result::Result<Answer, String> {
    let end = raw
        .windows(4)
        .position(|w| w == b"\r\n\r\n")
        .ok_or("its answer has no end of header")?;
    let (head, rest) = (
        raw.get(..end).unwrap_or_default(),
        raw.get(end + 4..).unwrap_or_default(),
    );
    let head = std::str::from_utf8(head).map_err(|_| "its header is not text")?;
    let mut lines = head.split("\r\n");
    let status = lines
        .next()
        .filter(|line| line.starts_with("HTTP/1."))
        .and_then(|line| line.split(' ').nth(1))
        .and_then(|code| code.parse::<u16>().ok())
        .ok_or("it does not speak HTTP/1.1")?;
    let mut length = None;
    let mut chunked = false;
    for (name, value) in lines.filter_map(|line| line.split_once(':')) {
        let value = value.trim();
        if name.eq_ignore_ascii_case("content-length") {
            length = Some(
                value
                    .parse::<usize>()
                    .map_err(|_| "it gives a malformed length")?,
            );
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            chunked = value.eq_ignore_ascii_case("chunked");
        }
    }
    let body = if chunked {
        unchunk(rest).ok_or("its answer is cut short")?
    } else if let Some(length) = length {
        rest.get(..length)
            .ok_or("its answer is cut short")?
            .to_vec()
    } else {
        rest.to_vec()
    };
    Ok(Answer { status, body })
}

fn unchunk(mut rest: &[u8]) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let line_end = rest.windows(2).position(|w| w == b"\r\n")?;
        let line = std::str::from_utf8(rest.get(..line_end)?).ok()?;
        let size = usize::from_str_radix(line.split(';').next()?.trim(), 16).ok()?;
        rest = rest.get(line_end + 2..)?;
        if size == 0 {
            return Some(body);
        }
        body.extend_from_slice(rest.get(..size)?);
        rest = rest.get(size.checked_add(2)?..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_and_chunked_answers() {
        let plain = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}garbage";
        assert_eq!(
            parse_answer(plain),
            Ok(Answer {
                status: 200,
                body: b"{}".to_vec()
            })
        );
        let chunked = b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1;x=y\r\n}\r\n0\r\n\r\n";
        assert_eq!(
            parse_answer(chunked),
            Ok(Answer {
                status: 404,
                body: b"{}".to_vec()
            })
        );
    }

    #[test]
    fn answers_of_strangers_are_refused() {
        for raw in [
            &b""[..],
            b"SSH-2.0-OpenSSH\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{}",
            b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n{}",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n{}",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{}",
        ] {
            assert!(parse_answer(raw).is_err());
        }
    }

    #[test]
    fn nobody_listens() {
        let tmp = tempfile::tempdir().unwrap();
        let error = Client::new(tmp.path())
            .get::<serde_json::Value>("/v1/pool")
            .unwrap_err();
        assert_eq!(error.kind, Kind::Unavailable);
        assert!(error.to_string().contains("hearth serve"), "{error}");
    }

    const OWN: crate::rights::Access = crate::rights::Access {
        group: None,
        mode: 0o600,
    };

    #[test]
    fn a_daemon_that_does_not_answer_is_given_up() {
        let tmp = tempfile::tempdir().unwrap();
        let mut run = rundir::RunDir::claim(tmp.path(), &crate::rights::Rights::default()).unwrap();
        let _silent = run.listen(&rundir::api_socket(tmp.path()), OWN).unwrap();

        let client = Client::new(tmp.path());
        let limit = Duration::from_millis(200);
        let error = client
            .exchange_within("GET", "/v1/pool", b"", limit)
            .unwrap_err();
        let pid = format!("(pid {})", std::process::id());
        assert!(error.what.contains(&pid), "{error}");
        assert!(error.what.contains("the rest of it is alive"), "{error}");
        // Its last sign of life was long ago.
        let pid_file = std::fs::File::open(tmp.path().join("hearth.pid")).unwrap();
        let old = std::time::SystemTime::now() - Duration::from_secs(3600);
        pid_file.set_modified(old).unwrap();
        let error = client
            .exchange_within("GET", "/v1/pool", b"", limit)
            .unwrap_err();
        assert!(
            error.what.contains("last sign of life 1 h 0 min ago"),
            "{error}"
        );
        // One that accepts nothing any more, and whose queue is full.
        let full = tmp.path().join("full.sock");
        let socket =
            socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None).unwrap();
        socket
            .bind(&socket2::SockAddr::unix(&full).unwrap())
            .unwrap();
        socket.listen(1).unwrap();
        let mut waiting = Vec::new();
        let full = loop {
            match connect_unix(&full, limit) {
                Ok(stream) => waiting.push(stream),
                Err(e) => break e,
            }
        };
        assert_eq!(full.kind(), ErrorKind::TimedOut);
    }

    #[test]
    fn names_are_encoded() {
        assert_eq!(disk_path("vm-1", "/flush"), "/v1/disks/vm-1/flush");
        assert_eq!(disk_path("../x y", ""), "/v1/disks/%2E%2E%2Fx%20y");
    }
}
