//! A protocol of its own, as another crate would bring it: what such a crate needs is here, and what
//! the daemon needs is the one line that registers it.
//!
//! It is as plain as can be, over one socket: `open NAME`, then `read OFFSET LENGTH` and
//! `write OFFSET LENGTH` with so many bytes behind it, one at a time.

use hearth_daemon::api::server::Control;
use hearth_daemon::api::types::{DiskAdd, DiskInfo, DiskRemove, DiskSet, DiskState};
use hearth_daemon::daemon::{Daemon, Options, StopReason};
use hearth_daemon::host::Site;
use hearth_daemon::rights::Rights;
use hearth_engine::api::{Completion, Request};
use hearth_io::{BLOCK, Buf, BufSlice};
use hearth_reactor::{
    Caller, ListenerId, PeerInfo, Reactors, SendList, Session, SessionCx, SessionFactory,
};
use hearth_volume::{
    Catalog, Exporter, Fault, Host, Protocol, Socket, SocketFile, Status, Visit, Volume,
};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const PLAIN: Protocol = Protocol("plain");
/// Longest read or write.
const LONGEST: u64 = 64 << 10;
/// Far longer than anything here takes.
const LIMIT: Duration = Duration::from_secs(60);

/// The protocol, as the daemon sees it.
struct Plain {
    reactors: Arc<Reactors>,
    catalog: Arc<Catalog>,
    socket: Mutex<Option<UnixListener>>,
    path: Mutex<Option<SocketFile>>,
    listening: Mutex<Option<ListenerId>>,
    grown: Mutex<Vec<String>>,
}

impl Plain {
    fn start(host: &dyn Host) -> Result<Plain, Fault> {
        let Socket { listener, path } = host.listen(Path::new("plain/all.sock"))?;
        Ok(Plain {
            reactors: host.reactors().clone(),
            catalog: Arc::default(),
            socket: Mutex::new(Some(listener)),
            path: Mutex::new(Some(path)),
            listening: Mutex::default(),
            grown: Mutex::default(),
        })
    }
}

impl Exporter for Plain {
    fn protocol(&self) -> Protocol {
        PLAIN
    }
    fn offer(&self, volume: Arc<dyn Volume>) -> Result<(), Fault> {
        self.catalog.insert(volume);
        Ok(())
    }
    fn withdraw(&self, name: &str) {
        self.catalog.remove(name);
    }
    fn resized(&self, name: &str) {
        self.grown.lock().unwrap().push(name.to_owned());
    }
    fn open(&self) {
        let socket = self.socket.lock().unwrap().take().unwrap();
        let id = self
            .reactors
            .listen(socket, Arc::new(Clerk(self.catalog.clone())));
        *self.listening.lock().unwrap() = Some(id);
    }
    fn close(&self) {
        if let Some(id) = self.listening.lock().unwrap().take() {
            self.reactors.unlisten(id);
            drop(self.path.lock().unwrap().take());
        }
    }
}

struct Clerk(Arc<Catalog>);

impl SessionFactory for Clerk {
    fn connect(&self, peer: &PeerInfo) -> Option<Box<dyn Session>> {
        Some(Box::new(Talk {
            caller: Caller::new(peer.address),
            catalog: self.0.clone(),
            input: Vec::new(),
            chunk: Buf::zeroed(LONGEST as usize),
            out: Vec::new(),
            reply: None,
            sent: 0,
            used: None,
            pending: None,
            over: false,
        }))
    }
}

/// One connection.
struct Talk {
    caller: Caller,
    catalog: Arc<Catalog>,
    input: Vec<u8>,
    chunk: Buf,
    out: Vec<u8>,
    reply: Option<BufSlice>,
    sent: usize,
    used: Option<(Arc<dyn Volume>, Visit)>,
    /// Bytes a read gives, and where they begin; `None` for a write.
    pending: Option<(Option<(usize, usize)>, Buf)>,
    over: bool,
}

impl Talk {
    fn say(&mut self, text: &str) {
        self.out.extend(text.as_bytes());
        self.out.push(b'\n');
        self.ready();
    }

    fn ready(&mut self) {
        let buf = Buf::zeroed(self.out.len());
        let mut reply = buf.slice(0, self.out.len());
        reply.bytes_mut().copy_from_slice(&self.out);
        self.out.clear();
        self.reply = Some(reply);
        self.sent = 0;
    }

    fn step(&mut self, cx: &mut SessionCx<'_>) {
        if self.pending.is_some() || self.reply.is_some() {
            return;
        }
        let Some(end) = self.input.iter().position(|b| *b == b'\n') else {
            return;
        };
        let line = String::from_utf8_lossy(&self.input[..end]).into_owned();
        let words: Vec<&str> = line.split(' ').collect();
        let mut taken = end + 1;
        match (words.as_slice(), &self.used) {
            (["open", name], None) => {
                let answer = match self.catalog.get(name) {
                    None => "no such volume".to_owned(),
                    Some(volume) => match volume.admit(&self.caller, PLAIN) {
                        Err(fault) => format!("no: {}", fault.what),
                        Ok(visit) => {
                            let can = volume.capabilities();
                            let mut extents = Vec::new();
                            volume.block_status(0, volume.size(), &mut extents);
                            let hole = matches!(extents.as_slice(), [(_, Status::Hole)]);
                            let answer = format!(
                                "ok {} {} {hole} {}",
                                volume.size(),
                                can.write,
                                uuid(volume.serial())
                            );
                            self.used = Some((volume, visit));
                            answer
                        }
                    },
                };
                self.say(&answer);
            }
            ([verb @ ("read" | "write"), at, len], Some((volume, visit))) => {
                let (at, len): (u64, u64) = (at.parse().unwrap(), len.parse().unwrap());
                if volume.closing() || len > LONGEST || at + len > volume.size() {
                    self.say("no");
                } else {
                    let buf = Buf::zeroed(Request::buffer_len(at, len) as usize);
                    let start = (at % BLOCK) as usize;
                    let disk = volume.disk();
                    if *verb == "read" {
                        let request = Request::read(1, disk, at, len, &buf, cx.now_ns);
                        cx.requests.push(request);
                        self.pending = Some((Some((start, len as usize)), buf));
                    } else if self.input.len() < taken + len as usize {
                        return;
                    } else {
                        let data = &self.input[taken..taken + len as usize];
                        buf.slice(start, len as usize)
                            .bytes_mut()
                            .copy_from_slice(data);
                        taken += len as usize;
                        visit.visitor.wrote();
                        let request = Request::write(1, disk, at, len, false, &buf, cx.now_ns);
                        cx.requests.push(request);
                        self.pending = Some((None, buf));
                    }
                }
            }
            _ => self.over = true,
        }
        self.input.drain(..taken);
    }
}

impl Session for Talk {
    fn recv_buf(&mut self, _: &mut SessionCx<'_>) -> Option<BufSlice> {
        let busy = self.over || self.pending.is_some() || self.reply.is_some();
        (!busy).then(|| self.chunk.all())
    }
    fn received(&mut self, n: usize, cx: &mut SessionCx<'_>) {
        self.over |= n == 0;
        let chunk = self.chunk.slice(0, n);
        self.input.extend(chunk.bytes());
        self.step(cx);
    }
    fn completed(&mut self, completion: Completion, _: &mut SessionCx<'_>) {
        let (read, buf) = self.pending.take().unwrap();
        match (completion.result, read) {
            (Ok(()), Some((start, len))) => {
                self.out.extend(buf.slice(start, len).bytes());
                self.ready();
            }
            (Ok(()), None) => self.say("ok"),
            (Err(_), _) => self.say("no"),
        }
    }
    fn send_list(&mut self, out: &mut SendList) {
        if let Some(reply) = &self.reply {
            out.push(reply.sub(self.sent, reply.len() - self.sent));
        }
    }
    fn sent(&mut self, n: usize, cx: &mut SessionCx<'_>) {
        self.sent += n;
        if self.reply.as_ref().is_some_and(|r| r.len() == self.sent) {
            self.reply = None;
            self.step(cx);
        }
    }
    fn closing(&self) -> bool {
        self.over || self.used.as_ref().is_some_and(|(volume, _)| volume.gone())
    }
    fn shutdown(&mut self) {
        self.over = true;
    }
    fn in_flight(&self) -> usize {
        usize::from(self.pending.is_some())
    }
}

fn uuid(serial: [u8; 16]) -> String {
    serial.iter().map(|b| format!("{b:02x}")).collect()
}

/// A client.
struct Client(BufReader<UnixStream>);

impl Client {
    fn open(socket: &Path, name: &str) -> (Client, String) {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let mut client = Client(BufReader::new(stream));
        let answer = client.ask(format!("open {name}\n").as_bytes());
        (client, answer)
    }
    fn ask(&mut self, bytes: &[u8]) -> String {
        self.0.get_mut().write_all(bytes).unwrap();
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }
    fn read(&mut self, at: u64, len: usize) -> Vec<u8> {
        writeln!(self.0.get_mut(), "read {at} {len}").unwrap();
        let mut data = vec![0; len];
        self.0.read_exact(&mut data).unwrap();
        data
    }
}

/// A daemon on a new pool in `dir`.
fn started(dir: &Path) -> Arc<Daemon> {
    let flash = dir.join("flash");
    let create = hearth_daemon::pool::CreateOptions {
        size: Some(64 << 20),
        ..Default::default()
    };
    hearth_daemon::pool::create(&flash, &create).unwrap();
    Daemon::start(&Options {
        flash: vec![flash],
        threads: 1,
        images: dir.join("images"),
        state_dir: Some(dir.join("state")),
        ..Options::default()
    })
    .unwrap()
}

/// Adds a disk with an origin in `dir`.
fn added(daemon: &Arc<Daemon>, dir: &Path, name: &str) -> DiskInfo {
    let origin = dir.join(format!("{name}.raw"));
    let file = std::fs::File::create(&origin).unwrap();
    file.set_len(16 << 20).unwrap();
    let mut disk = DiskAdd {
        name: name.to_owned(),
        origin: origin.display().to_string(),
        ..DiskAdd::default()
    };
    disk.settings.clients = Some(1);
    daemon.add(disk).unwrap()
}

/// Records the state that a disk is reported in when it becomes visible to clients.
struct Watcher {
    daemon: Arc<Daemon>,
    states: Mutex<Vec<DiskState>>,
}

impl Exporter for Watcher {
    fn protocol(&self) -> Protocol {
        PLAIN
    }
    fn offer(&self, volume: Arc<dyn Volume>) -> Result<(), Fault> {
        let info = self.daemon.disk(volume.name()).unwrap();
        self.states.lock().unwrap().push(info.state);
        Ok(())
    }
    fn withdraw(&self, _name: &str) {}
    fn close(&self) {}
}

/// A client that waits until a disk is attached must find it.
#[test]
fn disk_is_attached_only_once_offered() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = started(dir.path());
    let watcher = Arc::new(Watcher {
        daemon: daemon.clone(),
        states: Mutex::default(),
    });
    daemon.exports().register(watcher.clone());
    let info = added(&daemon, dir.path(), "vm1");
    assert_eq!(info.state, DiskState::Attached);
    assert_eq!(*watcher.states.lock().unwrap(), [DiskState::Waiting]);
    daemon.shut_down(StopReason::Signal).unwrap();
}

#[test]
fn a_third_protocol_takes_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = started(dir.path());
    let add = |name: &str| added(&daemon, dir.path(), name);
    add("before");
    let host = Site::new(dir.path(), Rights::default(), daemon.reactors().clone());
    let plain = Arc::new(Plain::start(&*host).unwrap());

    daemon.exports().register(plain.clone());

    // What was there is on offer, and what comes later.
    add("after");
    let keeper = {
        let daemon = daemon.clone();
        std::thread::spawn(move || daemon.housekeeping())
    };
    let socket = dir.path().join("plain/all.sock");
    let (mut first, answer) = Client::open(&socket, "before");
    assert!(
        answer.starts_with(&format!("ok {} true true ", 16 << 20)),
        "{answer}"
    );
    let (mut other, answer2) = Client::open(&socket, "after");
    assert!(answer2.starts_with("ok "), "{answer2}");
    let serial = |answer: &str| answer.rsplit(' ').next().unwrap().to_owned();
    assert_ne!(serial(&answer), serial(&answer2));
    assert_eq!(serial(&answer).len(), 32);
    assert_eq!(Client::open(&socket, "nobody").1, "no such volume");

    // Requests reach the engine, and are counted like any other's.
    let mut write = b"write 5000 700\n".to_vec();
    write.extend([7; 700]);
    assert_eq!(first.ask(&write), "ok");
    assert_eq!(first.read(4999, 702), [&[0][..], &[7; 700], &[0]].concat());
    assert_eq!(other.read(5000, 8), [0; 8]);

    // Who uses a disk is known, whatever he uses it over.
    let info = daemon.disk("before").unwrap();
    let client = &info.clients[0];
    assert_eq!((client.kind.as_str(), client.writes), ("plain", true));
    assert_eq!(client.pid, Some(std::process::id() as i32));

    // It hears of growth.
    let origin = std::fs::File::options()
        .write(true)
        .open(dir.path().join("before.raw"))
        .unwrap();
    origin.set_len(32 << 20).unwrap();
    let grow = DiskSet {
        size_from_origin: true,
        ..DiskSet::default()
    };
    daemon.set("before", grow).unwrap();
    assert_eq!(*plain.grown.lock().unwrap(), ["before"]);
    assert_eq!(first.read(31 << 20, 8), [0; 8]);

    // A disk in use is not taken from its client unasked; one that goes takes its clients along.
    let remove = |yes| DiskRemove {
        yes,
        ..DiskRemove::default()
    };
    assert!(daemon.remove("before", remove(false)).is_err());
    daemon.remove("before", remove(true)).unwrap();
    assert!(daemon.wait_gone("before", LIMIT), "the disk goes");
    assert!(daemon.disk("before").is_err());
    let mut end = Vec::new();
    first.0.read_to_end(&mut end).unwrap();
    assert!(end.is_empty());
    assert_eq!(Client::open(&socket, "before").1, "no such volume");
    assert_eq!(daemon.disk("after").unwrap().state, DiskState::Attached);
    assert_eq!(other.read(0, 4), [0; 4]);

    daemon.request_stop(StopReason::Signal);
    keeper.join().unwrap();
    daemon.shut_down(StopReason::Signal).unwrap();
    assert!(!socket.exists());
}
