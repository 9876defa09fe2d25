//! NFS locks of two hosts, as the kernel's client asks for them: found by the portmapper, granted to one host, denied to the other, and
//! reclaimed after the daemon was killed.
//!
//! The test runs once more in a network of its own, which is the host's. Each client is a network namespace with a cable to it.

use std::env;
use std::fs::File;
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::stored::nfs::{Client, nlm as call, port_of};
use crate::stored::{Lab, create};
use anyhow::{Context, Result, bail, ensure};
use hearth_nfs::nlm::{self, Args, Lock, Status};
use hearth_nfs::nsm::{self, Notice};
use hearth_nfs::portmap::{self, Mapping, UDP};
use hearth_nfs::rpc::{self, Call, Head};
use hearth_nfs::xdr::Reader;
use hearth_rig::wait;

const TEST: &str = "datastore_nlm::locks_of_a_kernel_client_survive_a_kill";
const INSIDE: &str = "HEARTH_TEST_INSIDE";
const SERVER: &str = "192.0.2.1";
const ALPHA: (&str, &str) = ("alpha", "192.0.2.10");
const BETA: (&str, &str) = ("beta", "198.51.100.10");
/// A first lock that takes longer hangs.
const AT_ONCE: Duration = Duration::from_secs(10);
const LIMIT: Duration = Duration::from_secs(30);

const NETWORK: &str = r#"
set -e
mount -t tmpfs tmpfs /run
ip link set lo up
cable() {
    ip netns add "$1"
    ip link add "$1" type veth peer name eth0 netns "$1"
    ip addr add "$2/24" dev "$1"
    ip link set "$1" up
    ip -n "$1" addr add "$3/24" dev eth0
    ip -n "$1" link set eth0 up
    ip -n "$1" link set lo up
    ip -n "$1" route add default via "$2"
}
cable alpha 192.0.2.1 192.0.2.10
cable beta 198.51.100.1 198.51.100.10
exec "$0" --exact "$1" --nocapture
"#;

#[test]
fn locks_of_a_kernel_client_survive_a_kill() -> Result<()> {
    if env::var_os(INSIDE).is_some() {
        return inside();
    }
    let mut command = Command::new("unshare");
    command.args(["--net", "--mount", "sh", "-c", NETWORK]);
    let output = command
        .arg(env::current_exe()?)
        .arg(TEST)
        .env(INSIDE, "1")
        .output()
        .context("unshare or ip")?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    if let Some(why) = said.lines().find(|line| line.contains("not permitted")) {
        eprintln!("{TEST}: skipped: {why}");
        return Ok(());
    }
    ensure!(said.contains("1 passed"), "{said}");
    Ok(())
}

/// Does something in the network of a client.
fn at<T: Send>(client: (&str, &str), work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let network = File::open(format!("/run/netns/{}", client.0))?;
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: no memory is given to it; the descriptor is open.
            let entered = unsafe { libc::setns(network.as_raw_fd(), libc::CLONE_NEWNET) };
            ensure!(entered == 0, "{}", std::io::Error::last_os_error());
            work()
        });
        match thread.join() {
            Ok(done) => done,
            Err(_) => bail!("it panicked at {}", client.0),
        }
    })
}

fn server(port: u16) -> Result<SocketAddr> {
    Ok(SocketAddr::new(SERVER.parse()?, port))
}

/// A connection to a program, found as a kernel finds it.
fn connect(client: (&str, &str), program: u32) -> Result<Client> {
    let stream = at(client, || {
        let port = port_of(server(portmap::PORT)?, program)?;
        ensure!(
            port != 0,
            "program {program} is not registered, and a kernel asks for it for ever"
        );
        Ok(TcpStream::connect_timeout(&server(port)?, AT_ONCE)?)
    })?;
    let mut client = Client::over(stream)?;
    client.patient = true;
    Ok(client)
}

fn range<'a>(file: &'a [u8], client: (&'a str, &str), offset: u64) -> Lock<'a> {
    Lock {
        caller: client.0.as_bytes(),
        file,
        owner: client.0.as_bytes(),
        process: 1,
        offset,
        len: 1,
    }
}

fn lock(client: &mut Client, lock: Lock<'_>, reclaim: bool, status: Status) -> Result<()> {
    let since = Instant::now();
    let args = Args::Lock {
        block: false,
        exclusive: true,
        lock,
        reclaim,
        state: 3,
        monitored: true,
    };
    let answered = call(client, &args)?;
    ensure!(
        answered == status as u32,
        "{answered} and not {status:?}: {args:?}"
    );
    ensure!(since.elapsed() < AT_ONCE, "{:?}", since.elapsed());
    Ok(())
}

/// Sends the notice of a client that has restarted, and waits for its answer.
fn restarts(client: (&str, &str), name: &str, state: i32) -> Result<()> {
    at(client, || {
        let socket = UdpSocket::bind((client.1, 0))?;
        socket.set_read_timeout(Some(LIMIT))?;
        let notice = Notice {
            name: name.as_bytes(),
            state,
        };
        socket.send_to(&nsm::write(7, &notice), server(2049)?)?;
        let mut bytes = [0; 64];
        let (len, _) = socket
            .recv_from(&mut bytes)
            .context("no answer to a notice")?;
        ensure!(&bytes[..len] == rpc::success(7).as_slice());
        Ok(())
    })
}

/// The portmapper and the monitor of a client.
struct Monitor {
    portmapper: UdpSocket,
    monitor: UdpSocket,
}

impl Monitor {
    fn new(client: (&str, &str)) -> Result<Monitor> {
        at(client, || {
            let bind = |port| {
                let socket = UdpSocket::bind((client.1, port))?;
                socket.set_read_timeout(Some(LIMIT))?;
                anyhow::Ok(socket)
            };
            Ok(Monitor {
                portmapper: bind(portmap::PORT)?,
                monitor: bind(0)?,
            })
        })
    }

    /// The server's name for itself in its next notice, and the number of its start.
    fn notice(&self) -> Result<(String, i32)> {
        let mut bytes = [0; 512];
        let (len, from) = self
            .portmapper
            .recv_from(&mut bytes)
            .context("no question")?;
        let mut r = Reader::new(&bytes[..len]);
        let asked = read(&mut r)?;
        let known = [Mapping {
            program: nsm::PROGRAM,
            version: nsm::VERSION,
            protocol: UDP,
            port: self.monitor.local_addr()?.port(),
        }];
        let answer = portmap::answer(&asked, &mut r, &known);
        self.portmapper.send_to(answer.as_slice(), from)?;
        let (len, from) = self.monitor.recv_from(&mut bytes).context("no notice")?;
        let mut r = Reader::new(&bytes[..len]);
        let told = read(&mut r)?;
        let (answer, notice) = nsm::answer(&told, &mut r);
        self.monitor.send_to(answer.as_slice(), from)?;
        let notice = notice.context("a notice")?;
        Ok((
            String::from_utf8_lossy(notice.name).into_owned(),
            notice.state,
        ))
    }
}

fn read(r: &mut Reader<'_>) -> Result<Call> {
    match Call::read(r)? {
        Head::Call(call) => Ok(call),
        other => bail!("{other:?}"),
    }
}

fn inside() -> Result<()> {
    let mut lab = Lab::with(&[], None, "192.0.2.1:2049")?;
    let networks = ["192.0.2.0/24=rw,root", "198.51.100.0/24=rw,root"];
    let [one, two] = networks;
    let set = ["datastore", "set", "vms", "--client", one, "--client", two];
    lab.hearth.ok(&set)?;
    let mut files = connect(ALPHA, hearth_nfs::v3::PROGRAM)?;
    let root = files.mount("/vms")?.ok().context("mounted")?;
    let disk = create(&mut files, &root, "a.lock")?;

    let mut alpha = connect(ALPHA, nlm::PROGRAM)?;
    let mut beta = connect(BETA, nlm::PROGRAM)?;
    lock(&mut alpha, range(&disk, ALPHA, 0), false, Status::Granted)?;
    lock(&mut beta, range(&disk, BETA, 0), false, Status::Denied)?;
    ensure!(lab.show()?["locks"] == true, "{}", lab.show()?);
    let help = lab.hearth.ok(&["attach-help", "vms", "--for", "linux"])?;
    ensure!(!help.contains("nolock"), "{help}");
    // Under another's name it has no say: what counts is the address.
    call(
        &mut beta,
        &Args::Unlock {
            lock: range(&disk, ALPHA, 0),
        },
    )?;
    call(&mut beta, &Args::FreeAll { name: b"alpha" })?;
    restarts(BETA, "alpha", 5)?;
    lock(&mut beta, range(&disk, BETA, 0), false, Status::Denied)?;
    // The host of the first restarts.
    restarts(ALPHA, "alpha.example.org", 5)?;
    lock(&mut beta, range(&disk, BETA, 0), false, Status::Granted)?;
    call(
        &mut beta,
        &Args::Unlock {
            lock: range(&disk, BETA, 0),
        },
    )?;
    let monitor = Monitor::new(ALPHA)?;
    // This host's own programs find no monitor here, so that they start their own.
    let own = port_of(server(portmap::PORT)?, nsm::PROGRAM)?;
    let mut own = Client::connect(server(own)?)?;
    let state = nsm::write(
        9,
        &Notice {
            name: b"x",
            state: 1,
        },
    );
    own.send_raw(&state)?;
    ensure!(own.answer(9)? == rpc::no_program(9).into_vec());

    lock(&mut alpha, range(&disk, ALPHA, 1), false, Status::Granted)?;
    lab.hearth.kill9()?;
    lab.hearth.start()?;
    lab.address()?;
    let (name, first) = monitor.notice()?;
    ensure!(name == SERVER, "{name}");
    let mut alpha = connect(ALPHA, nlm::PROGRAM)?;
    let mut beta = connect(BETA, nlm::PROGRAM)?;
    lock(&mut beta, range(&disk, BETA, 1), false, Status::GracePeriod)?;
    lock(&mut beta, range(&disk, BETA, 2), false, Status::GracePeriod)?;
    lock(&mut alpha, range(&disk, ALPHA, 1), true, Status::Granted)?;
    // The grace period ends, for both.
    let test = Args::Test {
        exclusive: true,
        lock: range(&disk, BETA, 1),
    };
    let status = wait::until("the grace period ends", 3 * LIMIT, || {
        match call(&mut beta, &test) {
            Ok(status) if status == Status::GracePeriod as u32 => None,
            status => Some(status),
        }
    })??;
    ensure!(status == Status::Denied as u32, "{status}");
    lock(&mut beta, range(&disk, BETA, 2), false, Status::Granted)?;
    // Again, with another number.
    lab.hearth.kill9()?;
    lab.hearth.start()?;
    let (_, second) = monitor.notice()?;
    ensure!(second != first && second % 2 == 1, "{first} {second}");
    Ok(())
}
