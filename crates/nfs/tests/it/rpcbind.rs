//! A server registered with rpcbind: Debian's, in a network of its own, and one that a test changes.

use std::net::{SocketAddr, UdpSocket};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use hearth_nfs::portmap::{self, Mapping, TCP, UDP};
use hearth_nfs::rpc::{self, Answer, Call, Credential, Head, read_answer};
use hearth_nfs::rpcbind::{ADDRESS, Registration};
use hearth_nfs::xdr::{Reader, Writer};

const INSIDE: &str = "HEARTH_TEST_INSIDE";
const NFS: Mapping = Mapping {
    program: 100_003,
    version: 3,
    protocol: TCP,
    port: 2049,
};
const MOUNT: Mapping = Mapping {
    program: 100_005,
    version: 3,
    protocol: TCP,
    port: 2049,
};

/// The port rpcbind tells for a program; `None` if it does not answer yet.
fn port(program: u32) -> Result<Option<u32>> {
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    socket.set_read_timeout(Some(Duration::from_millis(200)))?;
    let call = Call {
        xid: 8,
        program: portmap::PROGRAM,
        version: 2,
        procedure: 3,
        credential: Credential::None,
    };
    let mut w = Writer::new();
    call.write(&mut w);
    w.u32(program).u32(3).u32(TCP).u32(0);
    socket.send_to(w.as_slice(), ADDRESS)?;
    let mut bytes = [0; 128];
    let Ok(len) = socket.recv(&mut bytes) else {
        return Ok(None);
    };
    let mut r = Reader::new(&bytes[..len]);
    ensure!(read_answer(&mut r)? == (8, Answer::Success));
    Ok(Some(r.u32()?))
}

#[test]
fn the_hosts_portmapper_is_told_and_told_again() -> Result<()> {
    if std::env::var_os(INSIDE).is_some() {
        return inside();
    }
    let test = "rpcbind::the_hosts_portmapper_is_told_and_told_again";
    let there = |program: &str| {
        ["/usr/sbin", "/sbin", "/usr/bin"]
            .iter()
            .any(|d| Path::new(d).join(program).exists())
    };
    for program in ["rpcbind", "unshare", "ip"] {
        if !there(program) {
            // Installed, it would listen on this machine from then on: that is its owner's affair.
            eprintln!(
                "{test}: skipped: no {program}; install the package rpcbind to have this tried"
            );
            return Ok(());
        }
    }
    let own = std::env::current_exe()?;
    let script = format!(
        "mount -t tmpfs tmpfs /run && ip link set lo up && rpcbind -w 2>/run/said; \
         {} --exact {test} --nocapture; status=$?; kill $(cat /run/rpcbind.pid 2>/dev/null || pidof rpcbind) ; exit $status",
        own.display()
    );
    let output = Command::new("unshare")
        .args([
            "--net",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            &script,
        ])
        .env(INSIDE, "1")
        .stdin(Stdio::null())
        .output()?;
    let said = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    if said.contains("Operation not permitted") {
        eprintln!("{test}: skipped: this user may not make a network of its own");
        return Ok(());
    }
    ensure!(
        output.status.success() && said.contains("1 passed"),
        "{said}"
    );
    Ok(())
}

/// What tests register, and what the host's own lock manager does.
const fn mapping(program: u32, version: u32, protocol: u32, port: u16) -> Mapping {
    Mapping {
        program,
        version,
        protocol,
        port,
    }
}
const NLM: Mapping = mapping(100_021, 4, TCP, 2049);
const NSM_TCP: Mapping = mapping(100_024, 1, TCP, 2049);
const NSM: Mapping = mapping(100_024, 1, UDP, 2049);
const OURS: [Mapping; 5] = [NFS, MOUNT, NLM, NSM_TCP, NSM];
const KERNEL: [Mapping; 2] = [
    mapping(100_021, 1, TCP, 40_000),
    mapping(100_021, 4, UDP, 40_001),
];
const STATD: Mapping = mapping(100_024, 1, UDP, 40_002);

/// So often that no test waits for it.
const OFTEN: Duration = Duration::from_millis(20);
const NEVER: Duration = Duration::from_secs(3600);

fn keep(
    at: SocketAddr,
    ours: &[Mapping],
    every: Duration,
) -> Result<(Registration, Arc<AtomicBool>)> {
    let locks = Arc::new(AtomicBool::new(false));
    let registration = Registration::keep(at, ours, Arc::clone(&locks), every)?;
    Ok((registration, locks))
}

fn inside() -> Result<()> {
    let since = Instant::now();
    while port(portmap::PROGRAM)?.is_none() {
        if since.elapsed() > Duration::from_secs(20) {
            bail!(
                "rpcbind does not come up: {}",
                std::fs::read_to_string("/run/said")?
            );
        }
    }
    ensure!(port(NFS.program)? == Some(0));
    let (registration, locks) = keep(ADDRESS, &OURS, NEVER)?;
    ensure!(registration.refused().is_none() && locks.load(Ordering::Relaxed));
    let all = [NFS.program, MOUNT.program, NLM.program, NSM.program];
    for program in all {
        ensure!(port(program)? == Some(2049), "{program}");
    }
    // As after a death: what is left behind is no hindrance to the same server.
    std::mem::forget(registration);
    let (again, locks) = keep(ADDRESS, &OURS, NEVER)?;
    ensure!(again.refused().is_none() && locks.load(Ordering::Relaxed));
    // Somebody else does not get in between, and leaves nothing half done.
    let wanted = [
        mapping(400_000, 3, TCP, 2049),
        mapping(MOUNT.program, 3, TCP, 4000),
    ];
    let (other, _) = keep(ADDRESS, &wanted, NEVER)?;
    let refused = other.refused().context("refused")?;
    ensure!(refused.contains("100005"), "{refused}");
    drop(other);
    ensure!(port(400_000)? == Some(0) && port(MOUNT.program)? == Some(2049));
    drop(again);
    for program in all {
        ensure!(port(program)? == Some(0), "{program}");
    }
    // And where nobody is there.
    let nobody: SocketAddr = UdpSocket::bind("127.0.0.1:0")?.local_addr()?;
    let (none, locks) = keep(nobody, &OURS, NEVER)?;
    let refused = none.refused().context("nobody")?;
    ensure!(refused.contains("no portmapper answers"), "{refused}");
    ensure!(!locks.load(Ordering::Relaxed));
    Ok(())
}

/// A portmapper whose list a test sees and changes.
struct Puppet {
    at: SocketAddr,
    known: Arc<(Mutex<Vec<Mapping>>, Condvar)>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Puppet {
    fn start() -> Result<Puppet> {
        let socket = UdpSocket::bind("127.0.0.1:0")?;
        socket.set_read_timeout(Some(Duration::from_millis(50)))?;
        let at = socket.local_addr()?;
        let known: Arc<(Mutex<Vec<Mapping>>, Condvar)> = Arc::default();
        let stop: Arc<AtomicBool> = Arc::default();
        let (list, ended) = (Arc::clone(&known), Arc::clone(&stop));
        let thread = thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                let mut bytes = [0; 256];
                let Ok((len, from)) = socket.recv_from(&mut bytes) else {
                    continue;
                };
                let answer = Puppet::answer(&bytes[..len], &list.0);
                list.1.notify_all();
                let sent = answer.map(|bytes| socket.send_to(&bytes, from));
                assert!(matches!(sent, Ok(Ok(_))), "{sent:?}");
            }
        });
        Ok(Puppet {
            at,
            known,
            stop,
            thread: Some(thread),
        })
    }

    fn answer(question: &[u8], known: &Mutex<Vec<Mapping>>) -> Result<Vec<u8>> {
        let mut r = Reader::new(question);
        let Head::Call(call) = Call::read(&mut r)? else {
            bail!("no call");
        };
        let mut known = known.lock().expect("whole");
        if !(1..=2).contains(&call.procedure) {
            return Ok(portmap::answer(&call, &mut r, &known).into_vec());
        }
        let asked = mapping(r.u32()?, r.u32()?, r.u32()?, u16::try_from(r.u32()?)?);
        let is_same = |m: &Mapping| (m.program, m.version) == (asked.program, asked.version);
        let done = if call.procedure == 2 {
            let before = known.len();
            known.retain(|m| !is_same(m));
            known.len() < before
        } else {
            let taken = known
                .iter()
                .any(|m| is_same(m) && m.protocol == asked.protocol && *m != asked);
            if !taken && !known.contains(&asked) {
                known.push(asked);
            }
            !taken
        };
        let mut w = rpc::success(call.xid);
        w.bool(done);
        Ok(w.into_vec())
    }

    fn set(&self, list: &[Mapping]) {
        *self.known.0.lock().expect("whole") = list.to_vec();
    }

    /// Waits until the list is this one, in any order.
    fn wait(&self, list: &[Mapping]) -> Result<()> {
        let sorted = |list: &[Mapping]| {
            let mut list: Vec<_> = list
                .iter()
                .map(|m| (m.program, m.version, m.protocol, m.port))
                .collect();
            list.sort_unstable();
            list
        };
        let known = self.known.0.lock().expect("whole");
        let long = Duration::from_secs(30);
        let not_yet = |known: &mut Vec<Mapping>| sorted(known) != sorted(list);
        let (known, timeout) = self
            .known
            .1
            .wait_timeout_while(known, long, not_yet)
            .expect("whole");
        ensure!(!timeout.timed_out(), "{known:?} and not {list:?}");
        Ok(())
    }
}

impl Drop for Puppet {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(!matches!(ended, Some(Err(_))) || thread::panicking());
    }
}

fn is_root(test: &str) -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("{test}: skipped: only root has ports below 1024");
    }
    is_root
}

fn wait_for(locks: &AtomicBool, value: bool) -> Result<()> {
    let since = Instant::now();
    while locks.load(Ordering::Relaxed) != value {
        ensure!(since.elapsed() < Duration::from_secs(30), "not {value}");
        thread::yield_now();
    }
    Ok(())
}

#[test]
fn registration_returns_after_rpcbind_restarts() -> Result<()> {
    if !is_root("registration_returns_after_rpcbind_restarts") {
        return Ok(());
    }
    let puppet = Puppet::start()?;
    let (registration, locks) = keep(puppet.at, &OURS, OFTEN)?;
    ensure!(registration.refused().is_none() && locks.load(Ordering::Relaxed));
    puppet.wait(&OURS)?;
    puppet.set(&[]);
    puppet.wait(&OURS)?;
    drop(registration);
    puppet.wait(&[])
}

#[test]
fn programs_of_others_are_left_alone() -> Result<()> {
    if !is_root("programs_of_others_are_left_alone") {
        return Ok(());
    }
    let puppet = Puppet::start()?;
    // A host that mounts NFSv3 itself: its kernel answers, and refuses locks of our files at once.
    let host = [KERNEL[0], KERNEL[1], STATD];
    puppet.set(&host);
    let (registration, locks) = keep(puppet.at, &OURS, OFTEN)?;
    ensure!(registration.refused().is_none() && !locks.load(Ordering::Relaxed));
    puppet.wait(&[&host[..], &[NFS, MOUNT]].concat())?;
    // It unmounts.
    puppet.set(&[NFS, MOUNT]);
    puppet.wait(&OURS)?;
    wait_for(&locks, true)?;
    // Its statd alone runs: a first lock must find a port, and be refused there.
    puppet.set(&[NFS, MOUNT, STATD]);
    puppet.wait(&[NFS, MOUNT, STATD, NLM])?;
    wait_for(&locks, false)?;
    // Its kernel has taken the number while ours was registered: its statd has to find its own free.
    puppet.set(&[NFS, MOUNT, NSM, NSM_TCP, KERNEL[0], KERNEL[1]]);
    puppet.wait(&[NFS, MOUNT, KERNEL[0], KERNEL[1]])?;
    puppet.set(&host);
    drop(registration);
    // Also those that came last.
    puppet.wait(&host)
}
