//! Reactors with a toy protocol over a pass-through engine, on both drivers.

use crate::common::{PassThrough, Toy, command};
use hearth_engine::api::{ReqOp, Request};
use hearth_io::{Backend, BlockFile, Buf, Device, Target, Targets};
use hearth_reactor::{
    Config, Ended, PeerAddress, PeerInfo, ReactorError, Reactors, Session, SessionFactory, Shares,
    Watch, Watcher,
};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const SIZE: u64 = 64 << 20;

struct Rig {
    engine: Arc<PassThrough>,
    reactors: Reactors,
    dir: tempfile::TempDir,
}

fn rig(backend: Backend, change: impl FnOnce(&mut Config)) -> Rig {
    let dir = tempfile::tempdir().unwrap();
    let file = BlockFile::create_sized(dir.path().join("disk"), SIZE).unwrap();
    let targets = Targets::new();
    targets.set(Target::Origin(1), Some(Arc::new(Device::new(file))));
    let engine = Arc::new(PassThrough::default());
    let mut config = Config {
        threads: 2,
        backend: Some(backend),
        ..Config::default()
    };
    change(&mut config);
    let reactors = Reactors::start(engine.clone(), targets, config).unwrap();
    Rig {
        engine,
        reactors,
        dir,
    }
}

impl Rig {
    fn client(&self) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        self.reactors.adopt(theirs, Toy::new(1)).unwrap();
        // A test that would hang fails instead.
        ours.set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        ours
    }

    fn wait_for(&self, what: &str, mut done: impl FnMut() -> bool) {
        let start = Instant::now();
        while !done() {
            assert!(start.elapsed() < Duration::from_secs(30), "never: {what}");
            std::thread::yield_now();
        }
    }
}

fn reply(client: &mut impl Read) -> (u64, bool) {
    let mut head = [0; 16];
    client.read_exact(&mut head).unwrap();
    (
        u64::from_le_bytes(head[..8].try_into().unwrap()),
        head[8] == 0,
    )
}

fn is_closed(client: &mut impl Read) -> bool {
    let mut byte = [0];
    matches!(client.read(&mut byte), Ok(0) | Err(_))
}

fn writes_come_back(backend: Backend) {
    let rig = rig(backend, |_| {});
    let clients: Vec<_> = (0..4).map(|i| (i, rig.client())).collect();
    std::thread::scope(|scope| {
        for (i, mut client) in clients {
            scope.spawn(move || {
                let base = i as u64 * (8 << 20);
                for (round, len) in [4096usize, 128 << 10, 1 << 20, 3 << 20]
                    .into_iter()
                    .enumerate()
                {
                    let data: Vec<u8> = (0..len).map(|b| (b * 31 + round + i) as u8).collect();
                    client
                        .write_all(&command(b'W', base, len as u32, 1))
                        .unwrap();
                    client.write_all(&data).unwrap();
                    assert_eq!(reply(&mut client), (1, true));
                    client.write_all(&command(b'F', 0, 0, 2)).unwrap();
                    assert_eq!(reply(&mut client), (2, true));
                    client
                        .write_all(&command(b'R', base, len as u32, 3))
                        .unwrap();
                    assert_eq!(reply(&mut client), (3, true));
                    let mut back = vec![0; len];
                    client.read_exact(&mut back).unwrap();
                    assert!(back == data);
                }
            });
        }
    });
    assert!(rig.engine.ticks.load(Ordering::Relaxed) > 0);
}

/// Counts what it is told of.
#[derive(Default)]
struct Told {
    arrived: AtomicU64,
    ended: AtomicU64,
    settled: AtomicU64,
}

struct Witness(Arc<Told>);

impl Watch for Witness {
    fn arrived(&mut self, requests: &[Request]) {
        self.0
            .arrived
            .fetch_add(requests.len() as u64, Ordering::Relaxed);
    }

    fn ended(&mut self, ended: Ended) {
        assert!(ended.disk == 1 && ended.end_ns >= ended.start_ns && ended.start_ns > 0);
        self.0.ended.fetch_add(1, Ordering::Relaxed);
    }

    fn settle(&mut self) {
        let ended = self.0.ended.load(Ordering::Relaxed);
        self.0.settled.fetch_max(ended, Ordering::Relaxed);
    }
}

struct Witnesses(Arc<Told>);

impl Watcher for Witnesses {
    fn watch(&self) -> Box<dyn Watch> {
        Box::new(Witness(self.0.clone()))
    }
}

#[test]
fn a_watch_is_told_of_every_request_once() {
    let dir = tempfile::tempdir().unwrap();
    let file = BlockFile::create_sized(dir.path().join("disk"), SIZE).unwrap();
    let targets = Targets::new();
    targets.set(Target::Origin(1), Some(Arc::new(Device::new(file))));
    let told = Arc::new(Told::default());
    let reactors = Reactors::start_watched(
        Arc::new(PassThrough::default()),
        targets,
        Config::default(),
        Some(Arc::new(Witnesses(told.clone()))),
    )
    .unwrap();
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    reactors.adopt(theirs, Toy::new(1)).unwrap();
    ours.set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    let mut data = [0; 4096];
    for tag in 0..100 {
        ours.write_all(&command(b'R', tag * 4096, 4096, tag))
            .unwrap();
        assert_eq!(reply(&mut ours), (tag, true));
        ours.read_exact(&mut data).unwrap();
    }
    ours.write_all(&command(b'F', 0, 0, 100)).unwrap();
    assert_eq!(reply(&mut ours), (100, true));
    reactors.stop();
    let count = |n: &AtomicU64| n.load(Ordering::Relaxed);
    assert_eq!(
        (
            count(&told.arrived),
            count(&told.ended),
            count(&told.settled)
        ),
        (101, 101, 101)
    );
}

fn a_full_pipe_of_requests(backend: Backend) {
    let rig = rig(backend, |_| {});
    let mut client = rig.client();
    let mut sender = client.try_clone().unwrap();
    let count = 3000u64;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for tag in 0..count {
                sender
                    .write_all(&command(b'R', tag % 1000 * 4096, 4096, tag))
                    .unwrap();
            }
        });
        let mut seen = vec![false; count as usize];
        let mut data = [0; 4096];
        for _ in 0..count {
            let (tag, ok) = reply(&mut client);
            client.read_exact(&mut data).unwrap();
            assert!(ok && !std::mem::replace(&mut seen[tag as usize], true));
        }
    });
}

fn errors_are_answered(backend: Backend) {
    let rig = rig(backend, |_| {});
    let mut client = rig.client();
    client.write_all(&command(b'R', SIZE, 4096, 9)).unwrap();
    assert_eq!(reply(&mut client), (9, false));
    client.write_all(&command(b'Q', 0, 0, 0)).unwrap();
    assert!(is_closed(&mut client));
    rig.wait_for("slot given back", || rig.reactors.stats().connections == 0);
}

fn clients_that_die(backend: Backend) {
    let rig = rig(backend, |_| {});
    for i in 0..20 {
        let mut client = rig.client();
        // In the middle of a header, of a small and of a large payload, with replies unread.
        match i % 4 {
            0 => client.write_all(&command(b'R', 0, 4096, 1)[..7]).unwrap(),
            1 => client.write_all(&command(b'W', 0, 8192, 1)).unwrap(),
            2 => {
                client.write_all(&command(b'W', 0, 8 << 20, 1)).unwrap();
                client.write_all(&[1; 100_000]).unwrap();
            }
            _ => (0..100)
                .for_each(|tag| client.write_all(&command(b'R', 0, 256 << 10, tag)).unwrap()),
        }
        drop(client);
    }
    rig.wait_for("slots given back", || rig.reactors.stats().connections == 0);
    assert_eq!(rig.reactors.stats().payload_bytes, 0);
}

fn clients_that_stall(backend: Backend) {
    let rig = rig(backend, |c| c.stall = Duration::from_millis(50));
    let mut silent = rig.client();
    let mut half = rig.client();
    half.write_all(&command(b'W', 0, 8 << 20, 1)).unwrap();
    half.write_all(&[1; 70_000]).unwrap();
    // A little is missing of a payload that holds much.
    let mut nearly = rig.client();
    nearly.write_all(&command(b'W', 0, 8 << 20, 1)).unwrap();
    nearly.write_all(&vec![1; (8 << 20) - 1000]).unwrap();
    // Much was asked for, and nobody listens.
    let mut deaf = rig.client();
    deaf.write_all(&command(b'R', 0, 8 << 20, 1)).unwrap();
    let mut idle = rig.client();
    idle.write_all(&command(b'F', 0, 0, 1)).unwrap();
    assert_eq!(reply(&mut idle), (1, true));
    assert!(is_closed(&mut silent), "no handshake");
    assert!(is_closed(&mut half), "half a payload");
    assert!(is_closed(&mut nearly), "nearly all of a payload");
    rig.wait_for("the deaf one is let go", || {
        rig.reactors.stats().connections == 1
    });
    let mut answer = Vec::new();
    // What is in the socket is still there.
    let _ = deaf.read_to_end(&mut answer);
    assert!(answer.len() < 8 << 20, "all of it came");
    idle.write_all(&command(b'F', 0, 0, 2)).unwrap();
    assert_eq!(reply(&mut idle), (2, true), "an idle client is welcome");
    rig.wait_for("slots given back", || rig.reactors.stats().connections == 1);
}

fn the_connection_limit(backend: Backend) {
    let rig = rig(backend, |c| c.max_connections = 2);
    let first = rig.client();
    let _second = rig.client();
    let (_a, b) = UnixStream::pair().unwrap();
    assert!(matches!(
        rig.reactors.adopt(b, Toy::new(1)),
        Err(ReactorError::Full)
    ));
    drop(first);
    rig.wait_for("a slot", || rig.reactors.stats().connections == 1);
    let mut third = rig.client();
    third.write_all(&command(b'F', 0, 0, 1)).unwrap();
    assert_eq!(reply(&mut third), (1, true));
    assert_eq!(rig.reactors.stats().refused, 1);
}

fn the_memory_budget(backend: Backend) {
    // One large payload at a time: eight clients take turns, and all get through.
    let rig = rig(backend, |c| c.payload_memory = 1 << 20);
    let clients: Vec<_> = (0..8).map(|_| rig.client()).collect();
    std::thread::scope(|scope| {
        for (i, mut client) in clients.into_iter().enumerate() {
            scope.spawn(move || {
                let data = vec![i as u8; 2 << 20];
                client
                    .write_all(&command(b'W', (i as u64) << 21, 2 << 20, 1))
                    .unwrap();
                client.write_all(&data).unwrap();
                assert_eq!(reply(&mut client), (1, true));
            });
        }
    });
    assert_eq!(rig.reactors.stats().payload_bytes, 0);
}

/// What clients of a disk that is stuck hold leaves most of the memory to the others.
fn a_stuck_disk_and_its_neighbours(backend: Backend) {
    const MIB: u32 = 1 << 20;
    let rig = rig(backend, |c| c.payload_memory = 64 << 20);
    let client = |shares: &Shares| {
        let (ours, theirs) = UnixStream::pair().unwrap();
        rig.reactors
            .adopt(theirs, Toy::of(1, shares.clone()))
            .unwrap();
        ours.set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        ours
    };
    *rig.engine.hold.lock().unwrap() = Some(Vec::new());
    rig.engine.hold_from.store(2 << 20, Ordering::Relaxed);
    rig.engine.hold_below.store(4 << 20, Ordering::Relaxed);
    // Three clients ask for all there is, and nothing of it is answered.
    let stuck = Shares::default();
    let mut hogs: Vec<UnixStream> = (0..3).map(|_| client(&stuck)).collect();
    for hog in &mut hogs {
        for tag in 0..32 {
            hog.write_all(&command(b'R', 0, 2 * MIB, tag)).unwrap();
        }
    }
    let held = || rig.reactors.stats().payload_bytes;
    rig.wait_for("they hold something", || held() > 4 << 20);
    // Another disk's clients: large requests go through beside them, over and over.
    let mut other = client(&Shares::default());
    let mut data = vec![0; 16 << 20];
    for _ in 0..4 {
        other
            .write_all(&command(b'R', 32 << 20, 16 * MIB, 7))
            .unwrap();
        assert_eq!(reply(&mut other), (7, true));
        other.read_exact(&mut data).unwrap();
        let most = held();
        assert!(most < 48 << 20, "{most} bytes are held");
    }
    let engine = rig.engine.clone();
    rig.reactors.run(move |_, fx| engine.release(fx)).unwrap();
    // What was answered counts until it is taken; then the rest has its turn.
    std::thread::scope(|scope| {
        for hog in &mut hogs {
            scope.spawn(move || {
                for _ in 0..32 {
                    assert!(reply(hog).1);
                    std::io::copy(&mut hog.take(2 * u64::from(MIB)), &mut std::io::sink()).unwrap();
                }
            });
        }
    });
    drop((other, hogs));
    rig.wait_for("slots given back", || rig.reactors.stats().connections == 0);
    assert_eq!(held(), 0);
    assert_eq!(stuck.export.load(Ordering::Relaxed), 0);
}

/// A client that sends a byte of a long payload now and then is no better than one that stops.
fn payloads_that_crawl(backend: Backend) {
    let rig = rig(backend, |c| c.stall = Duration::from_millis(300));
    let mut client = rig.client();
    client.write_all(&command(b'W', 0, 2 << 20, 1)).unwrap();
    let start = Instant::now();
    // Its pace, unless the connection ends before.
    let pace = Duration::from_millis(20);
    client.set_read_timeout(Some(pace)).unwrap();
    while client.write_all(&[1]).is_ok() {
        assert!(start.elapsed() < Duration::from_secs(30), "it still crawls");
        let _ = client.read(&mut [0; 64]);
    }
    rig.wait_for("its memory is given back", || {
        rig.reactors.stats().payload_bytes == 0
    });
}

/// Who opens connections and says nothing keeps nobody out.
fn half_open_connections(backend: Backend) {
    let rig = rig(backend, |c| c.half_open = 8);
    let mut silent: Vec<UnixStream> = (0..8).map(|_| rig.client()).collect();
    rig.wait_for("all are there", || rig.reactors.stats().connections == 8);
    for _ in 0..40 {
        let mut client = rig.client();
        client.write_all(&command(b'F', 0, 0, 1)).unwrap();
        assert_eq!(reply(&mut client), (1, true));
        silent.push(rig.client());
    }
    rig.wait_for("the oldest are closed", || {
        rig.reactors.stats().connections <= 8
    });
    assert!(is_closed(&mut silent[0]));
}

/// A reply counts until it is sent.
fn replies_nobody_takes(backend: Backend) {
    let rig = rig(backend, |_| {});
    let mut client = rig.client();
    client.write_all(&command(b'R', 0, 8 << 20, 1)).unwrap();
    assert_eq!(reply(&mut client), (1, true));
    let held = rig.reactors.stats().payload_bytes;
    assert!(held > 4 << 20, "{held} bytes are held");
    std::io::copy(&mut (&mut client).take(8 << 20), &mut std::io::sink()).unwrap();
    rig.wait_for("it is given back", || {
        rig.reactors.stats().payload_bytes == 0
    });
}

struct Door {
    peers: Mutex<Vec<PeerAddress>>,
    calls: AtomicUsize,
}

impl SessionFactory for Door {
    fn connect(&self, peer: &PeerInfo) -> Option<Box<dyn Session>> {
        self.peers.lock().unwrap().push(peer.address);
        // Every third client is turned away.
        (self.calls.fetch_add(1, Ordering::SeqCst) % 3 != 2)
            .then(|| Toy::new(1) as Box<dyn Session>)
    }
}

fn listeners(backend: Backend) {
    let rig = rig(backend, |_| {});
    let door = Arc::new(Door {
        peers: Mutex::default(),
        calls: AtomicUsize::new(0),
    });
    let path = rig.dir.path().join("sock");
    let unix = rig
        .reactors
        .listen(UnixListener::bind(&path).unwrap(), door.clone());
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = tcp.local_addr().unwrap();
    rig.reactors.listen(tcp, door.clone());
    let mut one = UnixStream::connect(&path).unwrap();
    one.write_all(&command(b'F', 0, 0, 1)).unwrap();
    assert_eq!(reply(&mut one), (1, true));
    let mut two = TcpStream::connect(address).unwrap();
    two.write_all(&command(b'R', 0, 4096, 2)).unwrap();
    assert_eq!(reply(&mut two), (2, true));
    assert!(
        is_closed(&mut UnixStream::connect(&path).unwrap()),
        "turned away"
    );
    rig.wait_for("two left", || rig.reactors.stats().connections == 2);
    let peers = door.peers.lock().unwrap().clone();
    // SAFETY: no arguments, cannot fail.
    let me = unsafe { libc::getuid() };
    assert!(
        matches!(peers[0], PeerAddress::Unix { uid, pid, .. } if uid == me && pid == std::process::id() as i32)
    );
    assert_eq!(peers[1], PeerAddress::Tcp(two.local_addr().unwrap()));
    rig.reactors.unlisten(unix);
    assert!(UnixStream::connect(&path).is_err(), "the socket is closed");
    one.write_all(&command(b'F', 0, 0, 5)).unwrap();
    assert_eq!(reply(&mut one), (5, true), "its connections go on");
}

fn completions_find_their_thread(backend: Backend) {
    let rig = rig(backend, |_| {});
    *rig.engine.hold.lock().unwrap() = Some(Vec::new());
    let mut clients: Vec<_> = (0..4).map(|_| rig.client()).collect();
    for (tag, client) in clients.iter_mut().enumerate() {
        client
            .write_all(&command(b'R', 0, 4096, tag as u64))
            .unwrap();
    }
    rig.wait_for("all held", || rig.engine.held() == 4);
    // Completed by the background thread, which none of them belongs to.
    let engine = rig.engine.clone();
    rig.reactors.run(move |_, fx| engine.release(fx)).unwrap();
    for (tag, client) in clients.iter_mut().enumerate() {
        assert_eq!(reply(client), (tag as u64, true));
    }
}

fn stopping_answers_first(backend: Backend) {
    let rig = rig(backend, |_| {});
    *rig.engine.hold.lock().unwrap() = Some(Vec::new());
    let mut client = rig.client();
    client.write_all(&command(b'R', 0, 4096, 7)).unwrap();
    rig.wait_for("held", || rig.engine.held() == 1);
    std::thread::scope(|scope| {
        let stop = scope.spawn(|| rig.reactors.disconnect());
        assert!(!stop.is_finished());
        let engine = rig.engine.clone();
        rig.reactors.run(move |_, fx| engine.release(fx)).unwrap();
        assert_eq!(reply(&mut client), (7, true));
    });
    let mut data = [0; 4096];
    client.read_exact(&mut data).unwrap();
    assert!(is_closed(&mut client));
    // The background thread still takes requests.
    let buf = Buf::zeroed(4096);
    let completion = rig
        .reactors
        .request_blocking(Request::read(42, 1, 0, 4096, &buf, 0))
        .unwrap();
    assert_eq!((completion.tag, completion.result), (42, Ok(())));
    rig.reactors.stop();
    let flush = Request::new(1, 1, ReqOp::Flush, 0, 0, None, 0);
    assert!(rig.reactors.request_blocking(flush).is_err());
    let (_a, b) = UnixStream::pair().unwrap();
    assert!(rig.reactors.adopt(b, Toy::new(1)).is_err());
    assert_eq!(rig.reactors.stats().connections, 0);
}

fn stopping_does_not_wait_for_ever(backend: Backend) {
    let rig = rig(backend, |c| c.grace = Duration::from_millis(20));
    *rig.engine.hold.lock().unwrap() = Some(Vec::new());
    let mut client = rig.client();
    client.write_all(&command(b'R', 0, 4096, 7)).unwrap();
    rig.wait_for("held", || rig.engine.held() == 1);
    rig.reactors.stop();
    assert!(is_closed(&mut client));
}

/// Hangs on the data thread until it is let go.
struct Stuck {
    entered: AtomicUsize,
    free: Mutex<()>,
}

impl SessionFactory for Stuck {
    fn connect(&self, _peer: &PeerInfo) -> Option<Box<dyn Session>> {
        self.entered.fetch_add(1, Ordering::SeqCst);
        drop(self.free.lock());
        None
    }
}

#[test]
fn a_thread_that_hangs_is_left_behind() {
    let rig = rig(Backend::Uring, |c| {
        c.threads = 1;
        c.grace = Duration::from_millis(10);
    });
    let stuck = Arc::new(Stuck {
        entered: AtomicUsize::new(0),
        free: Mutex::new(()),
    });
    let held = stuck.free.lock().unwrap();
    let path = rig.dir.path().join("sock");
    let socket = UnixListener::bind(&path).unwrap();
    let id = rig.reactors.listen(socket, stuck.clone());
    let _client = UnixStream::connect(&path).unwrap();
    rig.wait_for("a hanging thread", || {
        stuck.entered.load(Ordering::SeqCst) == 1
    });
    std::thread::scope(|scope| {
        let (told, stopped) = channel();
        let reactors = &rig.reactors;
        scope.spawn(move || {
            reactors.unlisten(id);
            told.send(reactors.stop())
        });
        let ended = stopped.recv_timeout(Duration::from_secs(30));
        drop(held);
        let ended = ended.expect("the stop waits for the thread");
        assert!(!ended, "it says that all have ended");
    });
}

macro_rules! on_both {
    ($($name:ident),* $(,)?) => {
        mod uring {
            $(#[test] fn $name() { super::$name(super::Backend::Uring) })*
        }
        mod threads {
            $(#[test] fn $name() { super::$name(super::Backend::Threads) })*
        }
    };
}

on_both!(
    writes_come_back,
    a_full_pipe_of_requests,
    errors_are_answered,
    clients_that_die,
    clients_that_stall,
    half_open_connections,
    payloads_that_crawl,
    the_connection_limit,
    the_memory_budget,
    a_stuck_disk_and_its_neighbours,
    replies_nobody_takes,
    listeners,
    completions_find_their_thread,
    stopping_answers_first,
    stopping_does_not_wait_for_ever,
);
