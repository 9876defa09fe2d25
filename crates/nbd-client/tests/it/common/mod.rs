//! A server for tests, which can do what real ones do only on bad days: lose what was not
//! flushed, hang, and lie.
#![allow(dead_code)]

use hearth_io::{
    Buf, Class, Device, Event, IoDone, IoError, IoOp, OpKind, Proactor, Target, Targets, Wait,
    proactor,
};
use hearth_nbd_client::{NbdOrigin, Options, Uri};
use hearth_nbd_wire::{RequestHeader, Style, cmd, info, opt, rep, tflag};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How long a test waits before it calls something wedged.
pub const LIMIT: Duration = Duration::from_secs(60);
pub const SIZE: u64 = 1 << 20;

/// What the export holds: now, and after a crash.
pub struct State {
    pub now: Vec<u8>,
    pub durable: Vec<u8>,
    pub connections: Vec<UnixStream>,
    pub flags: u16,
    /// Connections accepted in all.
    pub accepted: u64,
}

/// Steers a server.
pub struct Server {
    pub state: Mutex<State>,
    changed: Condvar,
    /// Requests are taken and not answered.
    pub hang: AtomicBool,
    /// Every flush fails.
    pub flush_fails: AtomicBool,
    /// With this error.
    pub flush_error: AtomicU32,
    /// How long it zeroes before it answers, in milliseconds.
    pub zeroing_ms: AtomicU64,
    /// The size it tells new connections, whatever it holds.
    pub size: AtomicU64,
    pub writes: AtomicU64,
    pub flushes: AtomicU64,
    /// Sent instead of the reply to the next read.
    /// Reads are answered a byte at a time, so slowly that the data does not end within any limit.
    pub dribble: AtomicBool,
    pub lie: Mutex<Option<Vec<u8>>>,
    up: AtomicBool,
    pub path: PathBuf,
}

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap()
}

impl Server {
    /// A server that listens at `dir/s`.
    pub fn start(dir: &Path) -> Arc<Server> {
        Server::start_sized(dir, SIZE)
    }

    /// One with an export of that size.
    pub fn start_sized(dir: &Path, size: u64) -> Arc<Server> {
        let server = Arc::new(Server {
            state: Mutex::new(State {
                now: vec![0; size as usize],
                durable: vec![0; size as usize],
                connections: Vec::new(),
                flags: tflag::HAS_FLAGS
                    | tflag::SEND_FLUSH
                    | tflag::SEND_TRIM
                    | tflag::SEND_WRITE_ZEROES,
                accepted: 0,
            }),
            changed: Condvar::new(),
            hang: AtomicBool::new(false),
            flush_fails: AtomicBool::new(false),
            flush_error: AtomicU32::new(5),
            zeroing_ms: AtomicU64::new(0),
            size: AtomicU64::new(size),
            writes: AtomicU64::new(0),
            flushes: AtomicU64::new(0),
            dribble: AtomicBool::new(false),
            lie: Mutex::new(None),
            up: AtomicBool::new(false),
            path: dir.join("s"),
        });
        server.up();
        server
    }

    pub fn uri(&self) -> Uri {
        Uri::parse("nbd+unix", &format!("///?socket={}", self.path.display())).unwrap()
    }

    pub fn options(&self, timeout: Duration) -> Options {
        Options {
            export: String::new(),
            read_only: false,
            timeout,
            errors_are_losses: false,
            shutdown_is_fencing: false,
            in_flight_max: usize::MAX,
        }
    }

    pub fn open(&self, timeout: Duration) -> NbdOrigin {
        NbdOrigin::open(Arc::new(self.uri()), self.options(timeout)).unwrap()
    }

    /// Listens.
    pub fn up(self: &Arc<Server>) {
        let _ = std::fs::remove_file(&self.path);
        let listener = UnixListener::bind(&self.path).unwrap();
        self.up.store(true, Ordering::SeqCst);
        let server = self.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else { return };
                let mut state = lock(&server.state);
                if !server.up.load(Ordering::SeqCst) {
                    return;
                }
                state.accepted += 1;
                state.connections.push(stream.try_clone().unwrap());
                drop(state);
                server.changed.notify_all();
                let server = server.clone();
                std::thread::spawn(move || server.serve(stream));
            }
        });
    }

    /// Dies: what was not flushed is lost.
    pub fn crash(&self) {
        self.up.store(false, Ordering::SeqCst);
        // Ends the accepting thread.
        let _ = UnixStream::connect(&self.path);
        std::fs::remove_file(&self.path).unwrap();
        self.cut();
        let mut state = lock(&self.state);
        state.now = state.durable.clone();
    }

    /// Ends every connection.
    pub fn cut(&self) {
        for connection in lock(&self.state).connections.drain(..) {
            let _ = connection.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Lets hung requests go (into nothing, as a rule: their connections are gone).
    pub fn resume(&self) {
        self.hang.store(false, Ordering::SeqCst);
        self.changed.notify_all();
    }

    fn serve(&self, mut stream: UnixStream) {
        let _ = self.session(&mut stream);
        let _ = stream.shutdown(std::net::Shutdown::Both);
    }

    fn session(&self, stream: &mut UnixStream) -> std::io::Result<()> {
        stream.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
        let mut client_flags = [0; 4];
        stream.read_exact(&mut client_flags)?;
        let size = self.size.load(Ordering::SeqCst);
        let structured = loop_options(stream, &lock(&self.state), size)?;
        loop {
            let mut raw = [0; 28];
            stream.read_exact(&mut raw)?;
            let Some(Ok(request)) = RequestHeader::parse(Style::Structured, &raw) else {
                return Ok(());
            };
            let mut data = vec![
                0;
                if request.command == cmd::WRITE {
                    request.len
                } else {
                    0
                } as usize
            ];
            stream.read_exact(&mut data)?;
            if self.hang.load(Ordering::SeqCst) {
                let guard = lock(&self.state);
                let _guard = self
                    .changed
                    .wait_while(guard, |_| self.hang.load(Ordering::SeqCst))
                    .unwrap();
                return Ok(());
            }
            if request.command == cmd::WRITE_ZEROES {
                let time = Duration::from_millis(self.zeroing_ms.load(Ordering::SeqCst));
                let up = |_: &mut _| self.up.load(Ordering::SeqCst);
                let waited = self.changed.wait_timeout_while(lock(&self.state), time, up);
                drop(waited.unwrap());
            }
            let range = request.offset as usize..(request.offset + request.len) as usize;
            let mut state = lock(&self.state);
            // A dead server does nothing more.
            if !self.up.load(Ordering::SeqCst) {
                return Ok(());
            }
            let mut error = 0u32;
            match request.command {
                cmd::READ => {
                    let data = state.now[range].to_vec();
                    drop(state);
                    if let Some(lie) = lock(&self.lie).take() {
                        let lie = with_cookie(&lie, request.cookie);
                        stream.write_all(&lie)?;
                        continue;
                    }
                    let style = if structured {
                        Style::Structured
                    } else {
                        Style::Simple
                    };
                    let head = hearth_nbd_wire::ReplyHeader::data(
                        style,
                        request.cookie,
                        request.offset,
                        request.len,
                    );
                    stream.write_all(head.bytes())?;
                    if self.dribble.load(Ordering::SeqCst) {
                        for byte in &data {
                            stream.write_all(&[*byte])?;
                            let pace = Duration::from_millis(50);
                            let dribbles = |_: &mut _| self.dribble.load(Ordering::SeqCst);
                            let state = lock(&self.state);
                            drop(self.changed.wait_timeout_while(state, pace, dribbles));
                        }
                        continue;
                    }
                    stream.write_all(&data)?;
                    continue;
                }
                cmd::WRITE => {
                    self.writes.fetch_add(1, Ordering::SeqCst);
                    state.now[range].copy_from_slice(&data);
                }
                cmd::WRITE_ZEROES | cmd::TRIM => state.now[range].fill(0),
                cmd::FLUSH => {
                    self.flushes.fetch_add(1, Ordering::SeqCst);
                    if self.flush_fails.load(Ordering::SeqCst) {
                        error = self.flush_error.load(Ordering::SeqCst);
                    } else {
                        state.durable = state.now.clone();
                    }
                }
                _ => return Ok(()),
            }
            drop(state);
            let head = if error == 0 {
                hearth_nbd_wire::ReplyHeader::ok(Style::Simple, request.cookie, 0)
            } else {
                hearth_nbd_wire::ReplyHeader::error(Style::Simple, request.cookie, 0, error, "")
            };
            stream.write_all(head.bytes())?;
        }
    }
}

/// Puts a cookie wherever a lie has eight bytes `C`.
pub fn with_cookie(lie: &[u8], cookie: u64) -> Vec<u8> {
    let mut lie = lie.to_vec();
    while let Some(at) = lie.windows(8).position(|w| w == b"CCCCCCCC") {
        lie[at..at + 8].copy_from_slice(&cookie.to_be_bytes());
    }
    lie
}

fn loop_options(stream: &mut UnixStream, state: &State, size: u64) -> std::io::Result<bool> {
    let mut structured = false;
    loop {
        let mut head = [0; 16];
        stream.read_exact(&mut head)?;
        let option = u32::from_be_bytes(head[8..12].try_into().unwrap());
        let len = u32::from_be_bytes(head[12..].try_into().unwrap());
        let mut payload = vec![0; len as usize];
        stream.read_exact(&mut payload)?;
        let mut reply = |kind: u32, data: &[u8]| {
            let mut raw = 0x0003_e889_0455_65a9u64.to_be_bytes().to_vec();
            raw.extend(option.to_be_bytes());
            raw.extend(kind.to_be_bytes());
            raw.extend((data.len() as u32).to_be_bytes());
            raw.extend(data);
            stream.write_all(&raw)
        };
        match option {
            opt::STRUCTURED_REPLY => {
                structured = true;
                reply(rep::ACK, &[])?;
            }
            opt::GO => {
                let mut export = info::EXPORT.to_be_bytes().to_vec();
                export.extend(size.to_be_bytes());
                export.extend(state.flags.to_be_bytes());
                reply(rep::INFO, &export)?;
                reply(rep::ACK, &[])?;
                return Ok(structured);
            }
            _ => reply(rep::ERR_UNSUP, &[])?,
        }
    }
}

/// An origin behind a driver, as data threads use it.
pub struct Rig {
    io: Box<dyn Proactor>,
    pub targets: Arc<Targets>,
    next: u64,
    dones: Vec<IoDone>,
}

impl Rig {
    pub fn new(origin: NbdOrigin) -> Rig {
        let targets = Targets::new();
        targets.set(
            Target::Origin(1),
            Some(Arc::new(Device::remote(Arc::new(origin)))),
        );
        Rig {
            io: proactor::open(targets.clone(), None).unwrap(),
            targets,
            next: 1,
            dones: Vec::new(),
        }
    }

    pub fn device(&self) -> Arc<Device> {
        self.targets.get(Target::Origin(1)).unwrap()
    }

    pub fn link(&self) -> hearth_io::Link {
        self.device().as_remote().unwrap().link()
    }

    pub fn submit(&mut self, kind: OpKind, offset: u64, data: Vec<u8>, len: u64) -> u64 {
        let id = self.next;
        self.next += 1;
        let mut bufs = smallvec::SmallVec::new();
        if matches!(kind, OpKind::Read | OpKind::Write) {
            let mut buf = Buf::zeroed(len as usize).slice(0, len as usize);
            if kind == OpKind::Write {
                buf.bytes_mut().copy_from_slice(&data);
            } else {
                buf.bytes_mut().fill(0xEE);
            }
            bufs.push(buf);
        }
        self.io.submit_io(IoOp {
            id,
            target: Target::Origin(1),
            kind,
            offset,
            len,
            bufs,
            crcs: smallvec::SmallVec::new(),
            sums: false,
            class: Class::Foreground,
        });
        id
    }

    /// Waits for an operation.
    pub fn wait(&mut self, id: u64) -> (Result<(), IoError>, Vec<u8>) {
        let end = Instant::now() + LIMIT;
        loop {
            if let Some(i) = self.dones.iter().position(|d| d.op.id == id) {
                let done = self.dones.swap_remove(i);
                let data = done.op.bufs.first().map(|b| b.bytes().to_vec());
                return (done.result, data.unwrap_or_default());
            }
            assert!(Instant::now() < end, "operation {id} does not end");
            let mut events: Vec<Event> = Vec::new();
            let until = hearth_io::now_ns() + 50_000_000;
            self.io
                .wait(Wait::Until(until), &mut events, &mut self.dones)
                .unwrap();
        }
    }

    /// True if the operation has not ended within a moment.
    pub fn waits(&mut self, id: u64, time: Duration) -> bool {
        let end = Instant::now() + time;
        while Instant::now() < end {
            let mut events: Vec<Event> = Vec::new();
            let until = hearth_io::now_ns() + 5_000_000;
            self.io
                .wait(Wait::Until(until), &mut events, &mut self.dones)
                .unwrap();
        }
        self.dones.iter().all(|d| d.op.id != id)
    }

    pub fn read(&mut self, offset: u64, len: u64) -> (Result<(), IoError>, Vec<u8>) {
        let id = self.submit(OpKind::Read, offset, Vec::new(), len);
        self.wait(id)
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), IoError> {
        let id = self.submit(OpKind::Write, offset, data.to_vec(), data.len() as u64);
        self.wait(id).0
    }

    pub fn flush(&mut self) -> Result<(), IoError> {
        let id = self.submit(OpKind::Flush, 0, Vec::new(), 0);
        self.wait(id).0
    }
}

/// Looks until something is so.
pub fn until(what: &str, mut so: impl FnMut() -> bool) {
    hearth_rig::wait::until(what, LIMIT, || so().then_some(())).unwrap_or_else(|e| panic!("{e}"));
}
