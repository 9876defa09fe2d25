//! Both drivers, the same tests: what one does the other must do.

use hearth_io::proactor::open;
use hearth_io::{
    BLOCK, Backend, BlockFile, Buf, BufSlice, Class, Device, Event, FaultKind, FaultRule, IoDone,
    IoError, IoOp, OpKind, OpenMode, OriginSpec, Proactor, SendList, Target, Targets, Wait,
    checksum::crc32c,
};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

const T: Target = Target::Origin(1);

struct Rig {
    driver: Box<dyn Proactor>,
    targets: Arc<Targets>,
    device: Arc<Device>,
    dir: tempfile::TempDir,
    next: u64,
}

impl Rig {
    fn new(backend: Backend, size: u64, wrap: &str) -> Rig {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        drop(BlockFile::create_sized(&path, size).unwrap());
        let spec: OriginSpec = format!("{wrap}{}", path.display()).parse().unwrap();
        let device = Arc::new(spec.open(OpenMode::default()).unwrap());
        let targets = Targets::new();
        targets.set(T, Some(device.clone()));
        let driver = open(targets.clone(), Some(backend)).unwrap();
        Rig {
            driver,
            targets,
            device,
            dir,
            next: 0,
        }
    }

    fn op(&mut self, kind: OpKind, offset: u64, len: u64, bufs: &[BufSlice]) -> IoOp {
        self.next += 1;
        let (bufs, crcs) = (bufs.iter().cloned().collect(), Default::default());
        IoOp {
            id: self.next,
            target: T,
            kind,
            offset,
            len,
            bufs,
            crcs,
            sums: false,
            class: Class::Foreground,
        }
    }

    fn finish(&mut self, n: usize) -> Vec<IoDone> {
        let (mut events, mut dones) = (Vec::new(), Vec::new());
        while dones.len() < n {
            self.driver
                .wait(Wait::Forever, &mut events, &mut dones)
                .unwrap();
        }
        assert_eq!(self.driver.io_in_flight(), 0);
        dones
    }

    fn run(&mut self, op: IoOp) -> IoDone {
        self.driver.submit_io(op);
        self.finish(1).remove(0)
    }

    fn read(&mut self, offset: u64, len: u64) -> Result<Vec<u8>, IoError> {
        let buf = Buf::zeroed(len as usize).slice(0, len as usize);
        let op = self.op(OpKind::Read, offset, len, &[buf]);
        let done = self.run(op);
        done.result.map(|()| done.op.bufs[0].bytes().to_vec())
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), IoError> {
        let mut buf = Buf::zeroed(data.len()).slice(0, data.len());
        buf.bytes_mut().copy_from_slice(data);
        let op = self.op(OpKind::Write, offset, data.len() as u64, &[buf]);
        self.run(op).result
    }

    fn simple(&mut self, kind: OpKind, offset: u64, len: u64) -> Result<(), IoError> {
        let op = self.op(kind, offset, len, &[]);
        self.run(op).result
    }
}

struct Lcg(u64);
impl Lcg {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

fn random_io_against_a_model(backend: Backend) {
    let size = 200 * BLOCK + 777;
    let mut rig = Rig::new(backend, size, "");
    let mut model = vec![0u8; size as usize];
    let mut lcg = Lcg(7);
    for round in 0..300u64 {
        // Disjoint ranges in flight together, as the engine's range locks guarantee.
        let mut at = 0;
        let mut ops = 0;
        while at < size {
            let offset = at;
            let len = (lcg.below(12) * BLOCK + if lcg.below(4) == 0 { 512 } else { BLOCK })
                .min(size - offset);
            let len = if offset + len < size {
                len.next_multiple_of(BLOCK).min(size - offset)
            } else {
                len
            };
            at = offset + len + lcg.below(20) * BLOCK;
            let range = offset as usize..(offset + len) as usize;
            let kind = match lcg.below(10) {
                0 => OpKind::WriteZeroes {
                    punch: lcg.below(2) == 0,
                },
                1..5 => OpKind::Write,
                _ => OpKind::Read,
            };
            let mut bufs = Vec::new();
            if !matches!(kind, OpKind::WriteZeroes { .. }) {
                // Pieces of whole blocks, the last of any length.
                let cut = (lcg.below(3) * BLOCK).min(len / BLOCK * BLOCK);
                let memory = Buf::zeroed(len as usize + BLOCK as usize);
                bufs.push(memory.slice(BLOCK as usize, cut as usize));
                let other = if lcg.below(2) == 0 {
                    memory.clone()
                } else {
                    Buf::zeroed(len as usize + BLOCK as usize)
                };
                bufs.push(other.slice((BLOCK + cut) as usize, (len - cut) as usize));
                bufs.retain(|b| !b.is_empty());
            }
            match kind {
                OpKind::Write => {
                    let mut start = range.start;
                    for buf in &mut bufs {
                        buf.bytes_mut()
                            .iter_mut()
                            .enumerate()
                            .for_each(|(i, b)| *b = (round + i as u64 % 249) as u8);
                        model[start..start + buf.len()].copy_from_slice(buf.bytes());
                        start += buf.len();
                    }
                }
                OpKind::WriteZeroes { .. } => model[range].fill(0),
                _ => {}
            }
            let op = rig.op(kind, offset, len, &bufs);
            rig.driver.submit_io(op);
            ops += 1;
        }
        for done in rig.finish(ops) {
            done.result.unwrap();
            if done.op.kind == OpKind::Read {
                let mut at = done.op.offset as usize;
                for buf in &done.op.bufs {
                    assert!(
                        buf.bytes() == &model[at..at + buf.len()],
                        "round {round}, offset {at}"
                    );
                    at += buf.len();
                }
            }
        }
    }
    rig.simple(OpKind::Flush, 0, 0).unwrap();
    assert_eq!(std::fs::read(rig.dir.path().join("disk")).unwrap(), model);
}

fn end_of_file(backend: Backend) {
    let mut rig = Rig::new(backend, 4 * BLOCK, "");
    assert_eq!(rig.read(3 * BLOCK, 2 * BLOCK), Err(IoError::UnexpectedEof));
    assert_eq!(rig.read(u64::MAX - 100, BLOCK), Err(IoError::UnexpectedEof));
    assert_eq!(
        rig.write(4 * BLOCK, &[1; 4096]),
        Err(IoError::UnexpectedEof)
    );
    // Shortened behind our back: the kernel's short read must come out as the same error.
    std::fs::OpenOptions::new()
        .write(true)
        .open(rig.dir.path().join("disk"))
        .unwrap()
        .set_len(2 * BLOCK)
        .unwrap();
    assert_eq!(rig.read(BLOCK, 2 * BLOCK), Err(IoError::UnexpectedEof));
    assert!(rig.read(BLOCK, BLOCK).is_ok());
    rig.targets.set(T, None);
    assert_eq!(rig.read(0, BLOCK), Err(IoError::Os(libc::ENODEV)));
}

fn unaligned_tail(backend: Backend) {
    let size = 3 * BLOCK + 100;
    let mut rig = Rig::new(backend, size, "");
    let data: Vec<u8> = (0..BLOCK + 100).map(|i| i as u8).collect();
    rig.write(2 * BLOCK, &data).unwrap();
    rig.simple(OpKind::Flush, 0, 0).unwrap();
    assert_eq!(rig.read(2 * BLOCK, BLOCK + 100).unwrap(), data);
    assert_eq!(rig.read(3 * BLOCK, 100).unwrap(), data[BLOCK as usize..]);
    assert_eq!(rig.read(3 * BLOCK, 101), Err(IoError::UnexpectedEof));
    assert_eq!(
        std::fs::metadata(rig.dir.path().join("disk"))
            .unwrap()
            .len(),
        size
    );
}

fn discard_and_zeroes(backend: Backend) {
    let mut rig = Rig::new(backend, 64 * BLOCK, "");
    rig.write(0, &vec![9; 64 * 4096]).unwrap();
    rig.simple(OpKind::Flush, 0, 0).unwrap();
    rig.simple(OpKind::WriteZeroes { punch: true }, 0, 8 * BLOCK)
        .unwrap();
    rig.simple(OpKind::WriteZeroes { punch: false }, 8 * BLOCK, 8 * BLOCK)
        .unwrap();
    rig.simple(OpKind::Discard, 16 * BLOCK, 8 * BLOCK).unwrap();
    rig.simple(OpKind::Discard, 0, 0).unwrap();
    assert!(rig.read(0, 16 * BLOCK).unwrap().iter().all(|b| *b == 0));
    assert!(
        rig.read(24 * BLOCK, 40 * BLOCK)
            .unwrap()
            .iter()
            .all(|b| *b == 9)
    );
    assert_eq!(
        rig.simple(OpKind::Discard, 60 * BLOCK, 8 * BLOCK),
        Err(IoError::UnexpectedEof)
    );
    assert_eq!(
        std::fs::metadata(rig.dir.path().join("disk"))
            .unwrap()
            .len(),
        64 * BLOCK
    );
}

fn checksums_are_verified(backend: Backend) {
    let mut rig = Rig::new(backend, 8 * BLOCK, "");
    rig.write(0, &[3; 8192]).unwrap();
    let buf = Buf::zeroed(8192).all();
    let mut op = rig.op(OpKind::Read, 0, 8192, &[buf]);
    op.crcs = [crc32c(&[3; 4096]), 1].into_iter().collect();
    let done = rig.run(op);
    assert_eq!(done.result, Ok(()));
    assert_eq!(done.bad_blocks.as_slice(), [1]);
    rig.write(4096, &[4; 4096]).unwrap();
    let mut op = rig.op(OpKind::Read, 0, 8192, &[Buf::zeroed(8192).all()]);
    op.sums = true;
    let done = rig.run(op);
    let told = [crc32c(&[3; 4096]), crc32c(&[4; 4096])];
    assert_eq!(done.op.crcs.as_slice(), told);
}

fn faults_and_latency(backend: Backend) {
    let mut rig = Rig::new(backend, 64 * BLOCK, "model-latency=5ms:");
    rig.device.faults().arm(FaultRule {
        kind: FaultKind::Read,
        offset: 4096,
        len: 4096,
        errno: libc::EIO,
    });
    assert_eq!(rig.read(0, 2 * BLOCK), Err(IoError::Os(libc::EIO)));
    rig.device.faults().clear();
    let start = hearth_io::now_ns();
    for i in 0..32 {
        let op = rig.op(OpKind::Read, i * BLOCK, BLOCK, &[Buf::zeroed(4096).all()]);
        rig.driver.submit_io(op);
    }
    let dones = rig.finish(32);
    assert!(hearth_io::now_ns() - start >= 5_000_000);
    assert!(
        dones
            .iter()
            .all(|d| d.result.is_ok() && d.latency_ns >= 5_000_000)
    );
}

fn modelled_disk(backend: Backend) {
    let mut rig = Rig::new(backend, 1024 * BLOCK, "model-hdd:");
    let data = vec![5; 4096];
    rig.write(512 * BLOCK, &data).unwrap();
    rig.simple(OpKind::Flush, 0, 0).unwrap();
    assert_eq!(rig.read(512 * BLOCK, BLOCK).unwrap(), data);
    let start = hearth_io::now_ns();
    let ops = 12;
    for i in 0..ops {
        let op = rig.op(
            OpKind::Read,
            (i * 397 % 1024) * BLOCK,
            BLOCK,
            &[Buf::zeroed(4096).all()],
        );
        rig.driver.submit_io(op);
    }
    assert!(rig.finish(ops as usize).iter().all(|d| d.result.is_ok()));
    // Twelve random reads cannot take less than twelve of the model's shortest moves.
    assert!(hearth_io::now_ns() - start > ops * 1_000_000);
}

fn more_than_fits(backend: Backend) {
    let mut rig = Rig::new(backend, 64 * BLOCK, "");
    for i in 0..5000 {
        let op = rig.op(
            OpKind::Read,
            (i % 64) * BLOCK,
            BLOCK,
            &[Buf::zeroed(4096).all()],
        );
        rig.driver.submit_io(op);
    }
    let mut ids: Vec<u64> = rig.finish(5000).iter().map(|d| d.op.id).collect();
    ids.sort_unstable();
    assert!(
        ids.windows(2).all(|w| w[0] + 1 == w[1]),
        "each exactly once"
    );
}

/// Waits for the next socket event.
fn event(rig: &mut Rig) -> Event {
    let (mut events, mut dones) = (Vec::new(), Vec::new());
    loop {
        rig.driver
            .wait(Wait::Forever, &mut events, &mut dones)
            .unwrap();
        events.retain(|e| !matches!(e, Event::Woken));
        if let Some(event) = events.pop() {
            assert!(events.is_empty());
            return event;
        }
    }
}

fn sockets(backend: Backend) {
    let mut rig = Rig::new(backend, BLOCK, "");
    let path = rig.dir.path().join("sock");
    let listener = UnixListener::bind(&path).unwrap();
    rig.driver.accept(1, listener.as_raw_fd());
    let client = UnixStream::connect(&path).unwrap();
    let Event::Accepted {
        token: 1,
        result: Ok(server),
    } = event(&mut rig)
    else {
        panic!("no connection")
    };
    let (client_fd, server_fd) = (client.as_raw_fd(), server.as_raw_fd());
    let buf = Buf::zeroed(4096);
    rig.driver
        .recv(2, server_fd, buf.slice(0, 100), false, false);
    let mut list = SendList::new();
    let mut out = Buf::zeroed(8192).all();
    out.bytes_mut()[..3].copy_from_slice(b"abc");
    out.bytes_mut()[4096..4098].copy_from_slice(b"de");
    list.push(out.sub(0, 3));
    list.push(out.sub(4096, 2));
    rig.driver.send(3, client_fd, list);
    let (mut got, mut sent) = (0, 0);
    for _ in 0..2 {
        let (mut events, mut dones) = (Vec::new(), Vec::new());
        while got == 0 || sent == 0 {
            rig.driver
                .wait(Wait::Forever, &mut events, &mut dones)
                .unwrap();
            for e in events.drain(..) {
                match e {
                    Event::Recv {
                        token: 2, result, ..
                    } => got = result.unwrap(),
                    Event::Sent { token: 3, result } => sent = result.unwrap(),
                    Event::Woken => {}
                    other => panic!("{other:?}"),
                }
            }
        }
    }
    assert_eq!((got, sent), (5, 5));
    assert_eq!(&buf.all().bytes()[..5], b"abcde");
    // A cancelled accept leaves the listener usable.
    rig.driver.accept(4, listener.as_raw_fd());
    rig.driver.cancel(4);
    assert!(matches!(
        event(&mut rig),
        Event::Accepted {
            token: 4,
            result: Err(_)
        }
    ));
    drop(UnixStream::connect(&path).unwrap());
    listener.set_nonblocking(false).unwrap();
    listener.accept().unwrap();
    // Asked for all at once, what came before the peer went is told nevertheless, and then that it went.
    let (mut theirs, ours) = UnixStream::pair().unwrap();
    theirs.write_all(&[7; 60]).unwrap();
    drop(theirs);
    for came in [60, 0] {
        let fd = ours.as_raw_fd();
        rig.driver.recv(7, fd, buf.slice(0, 100), true, true);
        let Event::Recv {
            token: 7,
            result: Ok(n),
            ..
        } = event(&mut rig)
        else {
            panic!("nothing came")
        };
        assert_eq!(n, came);
    }
    assert_eq!(buf.all().bytes()[..60], [7; 60]);
    // A peer that goes away.
    rig.driver
        .recv(5, server_fd, buf.slice(0, 100), false, false);
    drop(client);
    assert!(matches!(
        event(&mut rig),
        Event::Recv {
            token: 5,
            result: Ok(0),
            ..
        }
    ));
    let mut list = SendList::new();
    list.push(buf.slice(0, 10));
    rig.driver.send(6, server_fd, list);
    assert!(matches!(
        event(&mut rig),
        Event::Sent {
            token: 6,
            result: Err(_)
        }
    ));
}

/// A send ends although nothing else happens on the thread: a protocol may have to know that its
/// reply is out before it asks for more. One that does not fit goes out as the peer reads.
fn sends_alone(backend: Backend) {
    use std::io::Read;
    let mut rig = Rig::new(backend, BLOCK, "");
    let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    for len in [10usize, 8 << 20] {
        let mut out = Buf::zeroed(len).slice(0, len);
        for (i, b) in out.bytes_mut().iter_mut().enumerate() {
            *b = (i % 251) as u8;
        }
        let peer = {
            let mut theirs = theirs.try_clone().unwrap();
            std::thread::spawn(move || {
                let mut got = vec![0; len];
                theirs.read_exact(&mut got).unwrap();
                got
            })
        };
        let mut at = 0;
        while at < len {
            let mut list = SendList::new();
            list.push(out.sub(at, len - at));
            rig.driver.send(9, ours.as_raw_fd(), list);
            match event(&mut rig) {
                Event::Sent {
                    token: 9,
                    result: Ok(n),
                } => at += n,
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(peer.join().unwrap(), out.bytes());
    }
    drop(ours);
    assert_eq!(theirs.read(&mut [0; 1]).unwrap(), 0);
}

fn waking_and_timers(backend: Backend) {
    let mut rig = Rig::new(backend, BLOCK, "");
    let (mut events, mut dones) = (Vec::new(), Vec::new());
    let until = hearth_io::now_ns() + 3_000_000;
    let mut now = 0;
    while now < until {
        now = rig
            .driver
            .wait(Wait::Until(until), &mut events, &mut dones)
            .unwrap();
    }
    assert!(events.is_empty());
    let wake = rig.driver.wake_handle();
    for _ in 0..50 {
        let wake = wake.clone();
        let thread = std::thread::spawn(move || wake.wake());
        while !events.iter().any(|e| matches!(e, Event::Woken)) {
            rig.driver
                .wait(Wait::Forever, &mut events, &mut dones)
                .unwrap();
        }
        thread.join().unwrap();
        events.clear();
    }
    wake.wake();
    rig.driver
        .wait(Wait::Poll, &mut events, &mut dones)
        .unwrap();
    assert!(matches!(events[..], [Event::Woken]));
}

fn dropped_with_work_in_flight(backend: Backend) {
    let mut rig = Rig::new(backend, 64 * BLOCK, "");
    let (a, _b) = UnixStream::pair().unwrap();
    let memory = Buf::zeroed(64 * 4096);
    for i in 0..64u64 {
        let op = rig.op(
            OpKind::Read,
            i * BLOCK,
            BLOCK,
            &[memory.slice(i as usize * 4096, 4096)],
        );
        rig.driver.submit_io(op);
    }
    rig.driver
        .recv(1, a.as_raw_fd(), memory.slice(0, 10), false, false);
    rig.driver
        .wait(Wait::Poll, &mut Vec::new(), &mut Vec::new())
        .unwrap();
    drop(rig.driver);
    assert_eq!(
        memory.handles(),
        1,
        "all operations ended and gave their memory back"
    );
    drop(rig.targets);
    Targets::wait_unused(rig.device, std::time::Duration::from_secs(5)).unwrap();
}

/// What is to be noted before the first write of a device is waited for by its own changes, and by nobody else: not by its
/// reads, not by another device of the same thread.
fn the_first_write_is_announced(backend: Backend) {
    let mut rig = Rig::new(backend, 64 * BLOCK, "");
    let (go_on, waits) = std::sync::mpsc::channel::<()>();
    let calls = Arc::new(std::sync::atomic::AtomicU32::new(0));
    let (path, count) = (rig.dir.path().join("noted"), calls.clone());
    let file = BlockFile::create_sized(&path, 64 * BLOCK).unwrap();
    let noted = Arc::new(Device::new(file).before_first_write(move || {
        waits.recv().unwrap();
        count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }));
    let other = Target::Origin(2);
    rig.targets.set(other, Some(noted.clone()));
    let mut window = Buf::zeroed(BLOCK as usize).all();
    window.bytes_mut().fill(7);
    let kinds = [
        OpKind::Write,
        OpKind::WriteZeroes { punch: true },
        OpKind::Discard,
        OpKind::Write,
        OpKind::Read,
        OpKind::Flush,
    ];
    assert!(noted.is_untouched());
    for (at, kind) in (0..).zip(kinds) {
        let bufs = match kind {
            OpKind::Write => vec![window.clone()],
            OpKind::Read => vec![Buf::zeroed(BLOCK as usize).all()],
            _ => Vec::new(),
        };
        let len = if kind == OpKind::Flush { 0 } else { BLOCK };
        let mut op = rig.op(kind, at * BLOCK, len, &bufs);
        op.target = other;
        rig.driver.submit_io(op);
    }
    let op = rig.op(
        OpKind::Write,
        0,
        BLOCK,
        &[Buf::zeroed(BLOCK as usize).all()],
    );
    rig.driver.submit_io(op);
    let (mut events, mut dones) = (Vec::new(), Vec::new());
    // The read, the flush, and the write of the other device.
    while dones.len() < 3 {
        rig.driver
            .wait(Wait::Forever, &mut events, &mut dones)
            .unwrap();
    }
    let mut ended: Vec<(Target, OpKind)> = dones.iter().map(|d| (d.op.target, d.op.kind)).collect();
    ended.sort_by_key(|(target, kind)| (*target == other, *kind == OpKind::Flush));
    let expected = [
        (T, OpKind::Write),
        (other, OpKind::Read),
        (other, OpKind::Flush),
    ];
    assert_eq!(ended, expected);
    assert!(!noted.is_untouched());
    let holds = |byte: u8| {
        let held = std::fs::read(&path).unwrap();
        held[..BLOCK as usize].iter().all(|b| *b == byte)
    };
    assert!(holds(0));
    go_on.send(()).unwrap();
    while dones.len() < 7 {
        rig.driver
            .wait(Wait::Forever, &mut events, &mut dones)
            .unwrap();
    }
    assert!(dones.iter().all(|d| d.result.is_ok()));
    assert_eq!(rig.driver.io_in_flight(), 0);
    assert!(holds(7));
    // And from then on nothing waits any more.
    let mut op = rig.op(OpKind::Write, 9 * BLOCK, BLOCK, &[window]);
    op.target = other;
    assert_eq!(rig.run(op).result, Ok(()));
    assert_eq!(calls.load(std::sync::atomic::Ordering::Relaxed), 1);
}

fn detached_devices_are_closed(backend: Backend) {
    let mut rig = Rig::new(backend, 4 * BLOCK, "");
    rig.read(0, BLOCK).unwrap();
    let old = rig.targets.set(T, None).unwrap();
    rig.driver
        .wait(Wait::Poll, &mut Vec::new(), &mut Vec::new())
        .unwrap();
    drop(old);
    Targets::wait_unused(rig.device, std::time::Duration::ZERO).unwrap();
    BlockFile::open(rig.dir.path().join("disk"), OpenMode::default()).unwrap();
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
    random_io_against_a_model,
    end_of_file,
    unaligned_tail,
    discard_and_zeroes,
    checksums_are_verified,
    faults_and_latency,
    modelled_disk,
    more_than_fits,
    sockets,
    sends_alone,
    waking_and_timers,
    dropped_with_work_in_flight,
    the_first_write_is_announced,
    detached_devices_are_closed,
);
