//! A guest's QEMU, asked over its QMP socket.
//!
//! QEMU speaks with one client at a time on a socket; another that connects waits. So all that is
//! done with a connection at a time has one deadline, however many answers that takes.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;

use hearth_io::until::{Until, connect_unix};
use serde_json::{Value, json};

/// Longest line: far more than any answer asked for here.
const LINE_MAX: u64 = 1 << 20;
/// Lines that may come before the answer: events.
const LINES_MAX: usize = 1000;

/// A connection.
#[derive(Debug)]
pub struct Qmp {
    stream: BufReader<Until<UnixStream>>,
    /// QEMU's process.
    pub pid: Option<u32>,
    /// The balloon device, if there is one.
    pub balloon: Option<String>,
}

/// What QEMU says of its guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// QEMU's process.
    pub pid: Option<u32>,
    /// Bytes it was made with.
    pub assigned: u64,
    /// Bytes its balloon leaves it.
    pub balloon: Option<u64>,
    /// Bytes its kernel could give to programs.
    pub available: Option<u64>,
    /// Bytes it has read back from its own swap.
    pub swap_in: Option<u64>,
    /// When it said so, in seconds of QEMU's clock; 0 for never.
    pub at: u64,
    /// Free-page reporting is on.
    pub reporting: Option<bool>,
    /// How often it is asked for its statistics, in seconds.
    pub polling: Option<u64>,
}

/// Most bytes that are believed: sums over all guests stay far below what a number holds. The kernel's word for a figure
/// that a guest does not tell is larger.
const BYTES_MAX: u64 = 1 << 50;

/// A number of bytes that a guest or its hypervisor told, unless it cannot be.
pub(crate) fn believed(bytes: u64) -> Option<u64> {
    (bytes <= BYTES_MAX).then_some(bytes)
}

fn bytes(value: &Value) -> Option<u64> {
    value.as_u64().and_then(believed)
}

fn wrong(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

impl Qmp {
    /// Connects; that, and what is asked next, is done by `end`.
    pub fn open(path: &Path, end: Instant) -> io::Result<Qmp> {
        let stream = connect_unix(path, end.saturating_duration_since(Instant::now()))?;
        let mut qmp = Qmp {
            pid: peer(&stream),
            stream: BufReader::new(Until::new(stream, end)),
            balloon: None,
        };
        if qmp.line()?.get("QMP").is_none() {
            return Err(wrong("no QEMU answers there"));
        }
        qmp.ask("qmp_capabilities", json!({}))?;
        qmp.balloon = qmp.find_balloon()?;
        Ok(qmp)
    }

    /// What is asked from now on is done by `end`.
    pub fn until(&mut self, end: Instant) {
        self.stream.get_mut().extend(end);
    }

    fn line(&mut self) -> io::Result<Value> {
        let mut line = Vec::new();
        let n = (&mut self.stream)
            .take(LINE_MAX)
            .read_until(b'\n', &mut line)
            .map_err(|e| match e.kind() {
                io::ErrorKind::TimedOut => io::Error::new(
                    io::ErrorKind::TimedOut,
                    "QEMU does not answer: it hangs, or another program holds its QMP socket",
                ),
                _ => e,
            })?;
        if n == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "QEMU ended"));
        }
        serde_json::from_slice(&line).map_err(|e| wrong(e.to_string()))
    }

    /// Asks.
    pub fn ask(&mut self, command: &str, arguments: Value) -> io::Result<Value> {
        let text = json!({"execute": command, "arguments": arguments}).to_string();
        let socket = self.stream.get_mut();
        socket.write_all(text.as_bytes())?;
        socket.write_all(b"\n")?;
        for _ in 0..LINES_MAX {
            let mut answer = self.line()?;
            if let Some(error) = answer.get("error") {
                let why = error["desc"].as_str().unwrap_or("no reason given");
                return Err(io::Error::other(format!("{command}: {why}")));
            }
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
        }
        Err(wrong(format!("{command}: nothing but events came")))
    }

    fn get(&mut self, device: &str, property: &str) -> io::Result<Value> {
        self.ask("qom-get", json!({"path": device, "property": property}))
    }

    fn find_balloon(&mut self) -> io::Result<Option<String>> {
        for place in ["/machine/peripheral", "/machine/peripheral-anon"] {
            let list = self.ask("qom-list", json!({"path": place}))?;
            for child in list.as_array().into_iter().flatten() {
                let kind = child["type"].as_str().unwrap_or_default();
                if kind.starts_with("child<virtio-balloon") {
                    let name = child["name"].as_str().unwrap_or_default();
                    return Ok(Some(format!("{place}/{name}")));
                }
            }
        }
        Ok(None)
    }

    /// All that is to be known.
    pub fn look(&mut self) -> io::Result<Told> {
        let size = self.ask("query-memory-size-summary", json!({}))?;
        let mut told = Told {
            pid: self.pid,
            assigned: bytes(&size["base-memory"]).unwrap_or(0)
                + bytes(&size["plugged-memory"]).unwrap_or(0),
            ..Told::default()
        };
        let Some(device) = self.balloon.clone() else {
            return Ok(told);
        };
        told.balloon = bytes(&self.ask("query-balloon", json!({}))?["actual"]);
        // Properties that an older QEMU does not have are not known.
        told.reporting = self
            .get(&device, "free-page-reporting")
            .ok()
            .and_then(|v| v.as_bool());
        told.polling = self
            .get(&device, "guest-stats-polling-interval")
            .ok()
            .and_then(|v| v.as_u64());
        if let Ok(stats) = self.get(&device, "guest-stats") {
            let of = |name: &str| bytes(&stats["stats"][name]);
            told.at = stats["last-update"].as_u64().unwrap_or(0);
            told.available = of("stat-available-memory").or_else(|| of("stat-free-memory"));
            told.swap_in = of("stat-swap-in");
        }
        Ok(told)
    }

    /// Leaves the guest so many bytes.
    pub fn set_balloon(&mut self, bytes: u64) -> io::Result<()> {
        self.ask("balloon", json!({"value": bytes})).map(drop)
    }

    /// Has the guest asked for its statistics every so many seconds; 0 for never.
    pub fn set_polling(&mut self, seconds: u64) -> io::Result<()> {
        let device = self.balloon.clone();
        let device = device.ok_or_else(|| io::Error::other("there is no balloon"))?;
        let set = json!({
            "path": device, "property": "guest-stats-polling-interval", "value": seconds,
        });
        self.ask("qom-set", set).map(drop)
    }
}

/// The process at the other end.
fn peer(stream: &UnixStream) -> Option<u32> {
    let mut cred = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: a descriptor that is open across the call, and a structure of ours of the length that is given.
    let got = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut cred).cast(),
            &raw mut len,
        )
    };
    (got == 0)
        .then(|| u32::try_from(cred.pid).ok())?
        .filter(|p| *p > 0)
}

#[cfg(test)]
pub mod fake {
    //! A QEMU that answers by the book.

    use super::*;
    use std::os::unix::net::UnixListener;

    /// Answers one client's questions until it goes.
    pub fn serve(listener: &UnixListener, mut answer: impl FnMut(&Value) -> Value) {
        let (mut stream, _) = listener.accept().unwrap();
        writeln!(stream, "{}", json!({"QMP": {"version": {}}})).unwrap();
        let mut lines = BufReader::new(stream.try_clone().unwrap());
        let mut line = String::new();
        while lines.read_line(&mut line).is_ok_and(|n| n > 0) {
            let question: Value = serde_json::from_str(&line).unwrap();
            line.clear();
            let said = answer(&question);
            let event = json!({"event": "SOMETHING"});
            if writeln!(stream, "{event}\n{said}").is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::time::Duration;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(2)
    }

    #[test]
    fn absurd_figures_are_not_believed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("q");
        let listener = UnixListener::bind(&path).unwrap();
        let qemu = std::thread::spawn(move || {
            fake::serve(&listener, |question| {
                let about = question["arguments"]["property"].as_str();
                match (question["execute"].as_str().unwrap(), about) {
                    ("qom-list", _) => json!({"return": [
                        {"name": "b", "type": "child<virtio-balloon-pci>"}]}),
                    ("query-memory-size-summary", _) => json!({"return": {
                        "base-memory": u64::MAX - 1, "plugged-memory": u64::MAX - 1}}),
                    ("query-balloon", _) => json!({"return": {"actual": u64::MAX - 1}}),
                    ("qom-get", Some("guest-stats")) => json!({"return": {
                        "last-update": u64::MAX, "stats": {
                            "stat-available-memory": u64::MAX - 1, "stat-swap-in": 1u64 << 63}}}),
                    _ => json!({"return": {}}),
                }
            });
        });
        let mut qmp = Qmp::open(&path, soon()).unwrap();
        let told = qmp.look().unwrap();
        assert_eq!(
            (told.assigned, told.balloon, told.available, told.swap_in),
            (0, None, None, None)
        );
        drop(qmp);
        qemu.join().unwrap();
    }

    #[test]
    fn a_guest_is_looked_at() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("q");
        let listener = UnixListener::bind(&path).unwrap();
        let qemu = std::thread::spawn(move || {
            fake::serve(&listener, |question| {
                let about = question["arguments"]["property"]
                    .as_str()
                    .unwrap_or_default();
                let place = question["arguments"]["path"].as_str().unwrap_or_default();
                match (question["execute"].as_str().unwrap(), about) {
                    ("qom-list", _) if place.ends_with("anon") => json!({"return": [
                        {"name": "device[0]", "type": "child<virtio-balloon-pci>"}]}),
                    ("qom-list", _) => json!({"return": []}),
                    ("query-memory-size-summary", _) => json!({"return": {"base-memory": 512}}),
                    ("query-balloon", _) => json!({"return": {"actual": 300}}),
                    ("qom-get", "free-page-reporting") => json!({"return": true}),
                    ("qom-get", "guest-stats-polling-interval") => json!({"return": 2}),
                    ("qom-get", "guest-stats") => json!({"return": {"last-update": 5, "stats": {
                        "stat-available-memory": 100, "stat-swap-in": u64::MAX}}}),
                    ("balloon", _) => json!({"error": {"desc": "no driver"}}),
                    _ => json!({"return": {}}),
                }
            });
        });
        let mut qmp = Qmp::open(&path, soon()).unwrap();
        assert_eq!(qmp.pid, Some(std::process::id()));
        assert_eq!(
            qmp.look().unwrap(),
            Told {
                pid: Some(std::process::id()),
                assigned: 512,
                balloon: Some(300),
                available: Some(100),
                swap_in: None,
                at: 5,
                reporting: Some(true),
                polling: Some(2),
            }
        );
        qmp.set_polling(2).unwrap();
        let refused = qmp.set_balloon(1).unwrap_err();
        assert!(refused.to_string().contains("no driver"));
        drop(qmp);
        qemu.join().unwrap();
        assert!(Qmp::open(&dir.path().join("none"), soon()).is_err());
    }

    /// Each answer comes within the time, all of them together do not.
    #[test]
    fn slow_answers_share_one_deadline() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("q");
        let listener = UnixListener::bind(&path).unwrap();
        let qemu = std::thread::spawn(move || {
            fake::serve(&listener, |_| {
                // The pace of the answers: nothing is waited for.
                std::thread::sleep(Duration::from_millis(300));
                json!({"return": {}})
            });
        });
        let mut qmp = Qmp::open(&path, Instant::now() + Duration::from_secs(60)).unwrap();
        qmp.until(Instant::now() + Duration::from_millis(500));
        let late = (0..100).find_map(|_| qmp.ask("query-balloon", json!({})).err());
        assert_eq!(late.unwrap().kind(), io::ErrorKind::TimedOut);
        drop(qmp);
        qemu.join().unwrap();
    }

    /// A greeting that never ends is given up after its time.
    #[test]
    fn dribbled_greeting_is_given_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("q");
        let listener = UnixListener::bind(&path).unwrap();
        let qemu = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            // Ends with the client. The pause is the pace of the bytes: nothing is waited for.
            while stream.write_all(b" ").is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let error = Qmp::open(&path, soon()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        qemu.join().unwrap();
    }
}
