//! One account of this host tries to fill every listener at once, while another one uses them.
//!
//! A thousand connections are kept open and opened again when they are closed: a quarter each to NFS, the console, the
//! metrics and the control socket, and at each of them a quarter that says nothing, sends a byte at a time, reads no
//! answers, and sends garbage. Connections belong to another user than the honest client's, as the listeners share their
//! places between users.

use std::fs::Permissions;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Barrier};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use hearth_nfs::record::mark;
use hearth_nfs::v3::Args;
use hearth_rig::daemon::path;
use hearth_rig::monitor::Monitor;
use hearth_rig::wait;

use crate::stored::{LIMIT, Lab, create, read, root, write};

/// Connections of the hostile account to each of four listeners.
const EACH: usize = 250;
/// Times that the honest client connects to each listener.
const ROUNDS: usize = 25;
/// An honest client that is not served in this time never is. What it takes is printed.
const SERVED: Duration = Duration::from_secs(20);
/// What both processes together may grow by while one account floods them (docs/security.md).
const GROWTH_MAX: u64 = 256 << 20;
/// Time between two rounds over the connections of a listener.
const PACE: Duration = Duration::from_millis(20);
/// The hostile account and the group that may use the control socket.
const STRANGER: u32 = 64_711;
const CONTROL: u32 = 64_712;

#[derive(Clone)]
enum Door {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Door {
    fn open(&self) -> std::io::Result<Stream> {
        match self {
            Door::Tcp(at) => {
                let stream = TcpStream::connect(at)?;
                stream.set_nonblocking(true)?;
                Ok(Stream::Tcp(stream))
            }
            Door::Unix(at) => {
                let stream = UnixStream::connect(at)?;
                stream.set_nonblocking(true)?;
                Ok(Stream::Unix(stream))
            }
        }
    }
}

impl Stream {
    /// Sends what the socket takes; false if the peer closed it.
    fn send(&mut self, bytes: &[u8]) -> bool {
        let sent = match self {
            Stream::Tcp(stream) => stream.write(bytes),
            Stream::Unix(stream) => stream.write(bytes),
        };
        sent.map_or_else(|e| e.kind() == std::io::ErrorKind::WouldBlock, |n| n > 0)
    }

    /// True if the peer closed it. Reads nothing of what has arrived.
    fn is_closed(&self) -> bool {
        let mut byte = [0];
        match self {
            Stream::Tcp(stream) => stream.peek(&mut byte).is_ok_and(|n| n == 0),
            Stream::Unix(_) => false,
        }
    }
}

/// A thread of the hostile account, until dropped.
struct Flood {
    /// Dropped to stop it.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Flood {
    /// `request` is a whole one, with an answer that is as long as possible.
    fn start(door: Door, request: Vec<u8>, ready: Arc<Barrier>, open: Arc<AtomicUsize>) -> Flood {
        let (stop, stopped) = channel();
        let thread = std::thread::spawn(move || {
            become_stranger();
            let mut all: Vec<Option<Stream>> = (0..EACH).map(|_| door.open().ok()).collect();
            open.fetch_add(all.iter().flatten().count(), Ordering::Relaxed);
            ready.wait();
            let many = request.repeat(16);
            let mut turn = 0usize;
            // The pace of the load: both cores are needed by the others as well.
            while stopped.recv_timeout(PACE) == Err(RecvTimeoutError::Timeout) {
                for (at, place) in all.iter_mut().enumerate() {
                    let Some(stream) = place else {
                        *place = door.open().ok();
                        continue;
                    };
                    let is_open = match at % 4 {
                        0 => !stream.is_closed(),
                        1 => stream.send(&request[turn % request.len()..][..1]),
                        2 => stream.send(&many),
                        _ => stream.send(&noise(at + turn)),
                    };
                    if !is_open {
                        *place = None;
                    }
                }
                turn += 1;
            }
        });
        Flood {
            stop: Some(stop),
            thread: Some(thread),
        }
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The sockets of this thread are another user's from now on.
fn become_stranger() {
    // SAFETY: the system calls change the credentials of the calling thread alone; the C library's functions would change
    // those of the process.
    unsafe {
        libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>());
        libc::syscall(libc::SYS_setresgid, CONTROL, CONTROL, CONTROL);
        libc::syscall(libc::SYS_setresuid, STRANGER, STRANGER, STRANGER);
    }
}

fn noise(seed: usize) -> Vec<u8> {
    let mut state = seed as u64 | 1;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u8
    };
    (0..64).map(|_| next()).collect()
}

fn http(target: &str) -> Vec<u8> {
    format!("GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n").into_bytes()
}

/// The status of a page that a new connection asks for.
fn status_of(mut stream: impl Read + Write, target: &str) -> Result<String> {
    let request = format!("GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let mut page = Vec::new();
    stream.read_to_end(&mut page)?;
    let page = String::from_utf8_lossy(&page).into_owned();
    Ok(page.lines().next().unwrap_or_default().to_owned())
}

fn over_tcp(to: SocketAddr, target: &str) -> Result<String> {
    let stream = TcpStream::connect(to)?;
    stream.set_read_timeout(Some(SERVED))?;
    stream.set_write_timeout(Some(SERVED))?;
    status_of(stream, target)
}

fn over_unix(to: &Path, target: &str) -> Result<String> {
    let stream = UnixStream::connect(to)?;
    stream.set_read_timeout(Some(SERVED))?;
    stream.set_write_timeout(Some(SERVED))?;
    status_of(stream, target)
}

fn resident(pid: u32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.context("no VmRSS")?.trim().trim_end_matches(" kB");
    Ok(kib.parse::<u64>()? << 10)
}

/// An address that nothing listens on.
fn free_address() -> Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}

/// More descriptors for this process: it holds all the connections.
fn allow_connections() -> Result<()> {
    let limit = libc::rlimit {
        rlim_cur: 4096,
        rlim_max: 4096,
    };
    // SAFETY: a limit of this process, from a structure that outlives the call.
    let rc = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) };
    ensure!(rc == 0, "setrlimit: {}", std::io::Error::last_os_error());
    Ok(())
}

#[test]
fn flood_of_one_account_keeps_nobody_out() -> Result<()> {
    // SAFETY: geteuid has no preconditions and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        println!("SKIPPED flood: needs root for the hostile account");
        return Ok(());
    }
    allow_connections()?;
    let mut lab = Lab::new()?;
    // The control socket is open to a group, and its directory to all.
    lab.hearth.stop()?;
    let group = CONTROL.to_string();
    lab.hearth
        .serve_args
        .extend(["--control-group".to_owned(), group]);
    lab.hearth.start()?;
    for dir in [lab.hearth.run_dir(), lab.hearth.dir().to_owned()] {
        std::fs::set_permissions(dir, Permissions::from_mode(0o711))?;
    }
    let parent = lab.hearth.run_dir();
    let parent = parent.parent().context("no parent")?;
    std::fs::set_permissions(parent, Permissions::from_mode(0o711))?;

    let (metrics, console) = (free_address()?, free_address()?);
    let config = lab.hearth.dir().join("hearth.toml");
    std::fs::write(&config, format!("[metrics]\nlisten = '{metrics}'\n"))?;
    let state = lab.hearth.dir().join("monitor");
    let monitor = Monitor::start(&lab.hearth, &["--config", path(&config)])?;
    monitor.link_is("up")?;
    lab.hearth.ok(&[
        "console",
        "enable",
        "--listen",
        &console.to_string(),
        "--state-dir",
        path(&state),
    ])?;
    let control = lab.hearth.run_dir().join("api.sock");
    wait::until("all listeners answer", LIMIT, || {
        let pages = [over_tcp(metrics, "/metrics"), over_tcp(console, "/")];
        let good = pages
            .iter()
            .all(|page| page.as_ref().is_ok_and(|line| line.contains("200")));
        good.then_some(())
    })?;

    // A megabyte for each call of the client that reads nothing.
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let file = create(&mut client, &dir, "big.img")?;
    for at in (0..4u64 << 20).step_by(64 << 10) {
        write(&mut client, &file, at, &[7; 64 << 10])?;
    }
    let large = Args::Read {
        file: &file,
        offset: 0,
        count: 1 << 20,
    };
    let message = client.message(1, &large);
    let call = [&mark(message.len())[..], &message].concat();

    let served = lab.hearth.pid().context("no daemon")?;
    let before = resident(served)? + resident(monitor.pid())?;
    let (ready, open) = (Arc::new(Barrier::new(5)), Arc::new(AtomicUsize::new(0)));
    let floods = [
        (Door::Tcp(lab.address()?), call),
        (Door::Tcp(console), http("/")),
        (Door::Tcp(metrics), http("/metrics")),
        (Door::Unix(control.clone()), http("/v1/disks")),
    ]
    .map(|(door, request)| Flood::start(door, request, ready.clone(), open.clone()));
    ready.wait();
    let open = open.load(Ordering::Relaxed);
    ensure!(
        open > EACH * 3,
        "only {open} hostile connections were opened"
    );

    let mut slowest = [Duration::ZERO; 5];
    let mut peak = 0;
    let serial = AtomicU32::new(0);
    for _ in 0..ROUNDS {
        let mut timed =
            |at: usize, what: &str, act: &mut dyn FnMut() -> Result<()>| -> Result<()> {
                let began = Instant::now();
                act()
                    .with_context(|| format!("{what}, round {}", serial.load(Ordering::Relaxed)))?;
                slowest[at] = slowest[at].max(began.elapsed());
                Ok(())
            };
        timed(0, "NFS", &mut || {
            let mut fresh = lab.client()?;
            fresh.stream.set_read_timeout(Some(SERVED))?;
            ensure!(read(&mut fresh, &file, 0, 4096)? == [7; 4096]);
            Ok(())
        })?;
        timed(1, "the connection of before", &mut || {
            ensure!(read(&mut client, &file, 0, 4096)? == [7; 4096]);
            Ok(())
        })?;
        let good = |line: String| -> Result<()> {
            ensure!(line.contains(" 200 "), "{line:?}");
            Ok(())
        };
        timed(2, "console", &mut || good(over_tcp(console, "/")?))?;
        timed(3, "metrics", &mut || good(over_tcp(metrics, "/metrics")?))?;
        timed(4, "control", &mut || good(over_unix(&control, "/v1/pool")?))?;
        serial.fetch_add(1, Ordering::Relaxed);
        peak = peak.max(resident(served)? + resident(monitor.pid())?);
    }
    drop(floods);
    let grown = peak.saturating_sub(before);
    println!(
        "{open} hostile connections; slowest of {ROUNDS} (new NFS, old NFS, console, metrics, control): {slowest:?}; \
         grown by {} MiB",
        grown >> 20
    );
    ensure!(grown <= GROWTH_MAX, "grown by {grown} bytes");
    drop(client);
    monitor.end()?;
    lab.hearth.stop()?;
    Ok(())
}
