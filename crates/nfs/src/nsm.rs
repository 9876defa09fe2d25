//! How the two ends of a lock learn of each other's restart (NSM version 1, The Open Group's XNFS, specification C702, chapter 11).
//!
//! A client that restarts sends a notice, and its locks are released. After our own restart, [`notify`] sends notices to the clients
//! that held locks, and they reclaim them. No host is monitored on request: that is what the lock managers of one host ask
//! their own monitor for, and this host's own programs are not served ([`crate::server`]).

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::nlm::NAME_MAX;
use crate::nlm::locks::{Locks, Monitored};
use crate::portmap::{self, Mapping};
use crate::rpc::{self, Answer, Call, Credential};
use crate::xdr::{Reader, Result, Writer};

/// The program's number.
pub const PROGRAM: u32 = 100_024;
/// The version spoken here.
pub const VERSION: u32 = 1;

const NULL: u32 = 0;
const STAT: u32 = 1;
const MON: u32 = 2;
const UNMON: u32 = 3;
const UNMON_ALL: u32 = 4;
const NOTIFY: u32 = 6;
const FAILED: u32 = 1;

/// A client that was started anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notice<'a> {
    /// Its name for itself.
    pub name: &'a [u8],
    /// The number of its start.
    pub state: i32,
}

/// Answers a call, and returns the notice it brings.
pub fn answer<'a>(call: &Call, r: &mut Reader<'a>) -> (Writer, Option<Notice<'a>>) {
    if call.version != VERSION {
        return (rpc::wrong_version(call.xid, VERSION, VERSION), None);
    }
    let mut w = rpc::success(call.xid);
    match call.procedure {
        NULL => {}
        // No host is monitored on request.
        STAT | MON => {
            w.u32(FAILED).u32(0);
        }
        UNMON | UNMON_ALL => {
            w.u32(0);
        }
        NOTIFY => match notice(r) {
            Ok(notice) => return (w, Some(notice)),
            Err(_) => return (rpc::garbage(call.xid), None),
        },
        _ => return (rpc::no_procedure(call.xid), None),
    }
    (w, None)
}

fn notice<'a>(r: &mut Reader<'a>) -> Result<Notice<'a>> {
    Ok(Notice {
        name: r.opaque(NAME_MAX)?,
        state: r.u32()? as i32,
    })
}

/// A notice as it is sent.
pub fn write(xid: u32, notice: &Notice<'_>) -> Vec<u8> {
    let mut w = Writer::new();
    Call {
        xid,
        program: PROGRAM,
        version: VERSION,
        procedure: NOTIFY,
        credential: Credential::None,
    }
    .write(&mut w);
    w.opaque(notice.name).u32(notice.state as u32);
    w.into_vec()
}

/// How often a client that does not answer is sent its notice again.
const AGAIN: Duration = Duration::from_secs(2);
/// How long a stop waits for this thread.
const LOOK: Duration = Duration::from_millis(200);

/// Where a client is with its notice.
enum Step {
    /// Its portmapper was asked for its monitor.
    Ask(u32),
    /// The notice was sent there.
    Tell(u32, u16),
}

/// Sends notices to clients of the process before, until each has answered, the grace period is over or `stop` is set. Portmappers
/// are asked at `portmapper`, 111 but in tests. Errors of one address do not stop the others.
pub fn notify(locks: &Locks, clients: &[Monitored], portmapper: u16, stop: &AtomicBool) {
    let mut by_server = BTreeMap::<IpAddr, Vec<IpAddr>>::new();
    for Monitored { server, client } in clients {
        by_server.entry(*server).or_default().push(*client);
    }
    let mut all: Vec<Notifier> = by_server
        .into_iter()
        .filter_map(|(server, clients)| {
            Notifier::new(server, &clients)
                .inspect_err(|error| {
                    tracing::warn!(%error, %server, "clients cannot be notified to reclaim their NFS locks");
                })
                .ok()
        })
        .collect();
    let mut next = Instant::now();
    while !stop.load(Ordering::Acquire) {
        let now = Instant::now();
        all.retain(|notifier| !notifier.waiting.is_empty());
        if all.is_empty() || now >= locks.grace_ends() {
            break;
        }
        let send = now >= next;
        if send {
            next = now + AGAIN;
        }
        // The first waits for answers; the others have theirs by then.
        let wait = LOOK / all.len() as u32;
        for notifier in &mut all {
            if send {
                notifier.send(portmapper, locks.start());
            }
            notifier.receive(wait.max(Duration::from_millis(1)), locks.start());
        }
    }
    for client in all.iter().flat_map(|notifier| notifier.waiting.keys()) {
        tracing::warn!(%client, "client not notified to reclaim its NFS locks: it does not answer");
    }
}

struct Notifier {
    socket: UdpSocket,
    /// Our address: the name by which clients know us.
    name: String,
    waiting: BTreeMap<IpAddr, Step>,
    xid: u32,
}

impl Notifier {
    fn new(server: IpAddr, clients: &[IpAddr]) -> io::Result<Notifier> {
        let xid = std::process::id().rotate_left(12) ^ 0x4e53_4d00;
        Ok(Notifier {
            // Clients also compare the address a notice comes from.
            socket: UdpSocket::bind((server, 0))?,
            name: server.to_string(),
            waiting: clients.iter().map(|c| (*c, Step::Ask(0))).collect(),
            xid,
        })
    }

    fn send(&mut self, portmapper: u16, state: i32) {
        let question = Mapping {
            program: PROGRAM,
            version: VERSION,
            protocol: portmap::UDP,
            port: 0,
        };
        for (client, step) in &mut self.waiting {
            let (bytes, port) = match step {
                Step::Ask(xid) => {
                    self.xid = self.xid.wrapping_add(1);
                    *xid = self.xid;
                    (portmap::get_port(*xid, &question), portmapper)
                }
                Step::Tell(xid, port) => (tell(*xid, &self.name, state), *port),
            };
            // It is sent again, whatever came of it.
            let _ = self.socket.send_to(&bytes, SocketAddr::new(*client, port));
        }
    }

    /// Takes the answers that have arrived, and waits for the first.
    fn receive(&mut self, wait: Duration, state: i32) {
        if self.socket.set_read_timeout(Some(wait)).is_err() {
            return;
        }
        let mut bytes = [0; 512];
        let until = Instant::now() + wait;
        while let Ok((len, from)) = self.socket.recv_from(&mut bytes) {
            self.answered(from.ip().to_canonical(), &bytes[..len], state);
            if Instant::now() >= until {
                return;
            }
        }
    }

    fn answered(&mut self, client: IpAddr, answer: &[u8], state: i32) {
        let Some(step) = self.waiting.get_mut(&client) else {
            return;
        };
        let mut r = Reader::new(answer);
        match (rpc::read_answer(&mut r), &*step) {
            (Ok((xid, Answer::Success)), Step::Ask(asked)) if xid == *asked => {
                let port = r.u32().ok().and_then(|port| u16::try_from(port).ok());
                if let Some(port) = port.filter(|port| *port != 0) {
                    self.xid = self.xid.wrapping_add(1);
                    *step = Step::Tell(self.xid, port);
                    let notice = tell(self.xid, &self.name, state);
                    let _ = self.socket.send_to(&notice, SocketAddr::new(client, port));
                }
            }
            (Ok((xid, Answer::Success)), Step::Tell(told, _)) if xid == *told => {
                tracing::info!(%client, "client notified to reclaim its NFS locks");
                self.waiting.remove(&client);
            }
            _ => {}
        }
    }
}

fn tell(xid: u32, name: &str, state: i32) -> Vec<u8> {
    let name = name.as_bytes();
    write(xid, &Notice { name, state })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::Head;

    fn ask(procedure: u32, args: &Writer) -> (Vec<u8>, Option<(Vec<u8>, i32)>) {
        let call = Call {
            xid: 1,
            program: PROGRAM,
            version: VERSION,
            procedure,
            credential: Credential::None,
        };
        let (w, notice) = answer(&call, &mut Reader::new(args.as_slice()));
        (w.into_vec(), notice.map(|n| (n.name.to_vec(), n.state)))
    }

    #[test]
    fn only_notices_mean_something() {
        let mut w = Writer::new();
        w.opaque(b"host").u32(7);
        assert_eq!(
            ask(NOTIFY, &w),
            (rpc::success(1).into_vec(), Some((b"host".to_vec(), 7)))
        );
        for procedure in [NULL, STAT, MON, UNMON, UNMON_ALL] {
            assert_eq!(ask(procedure, &w).1, None);
        }
        assert_eq!(ask(5, &w), (rpc::no_procedure(1).into_vec(), None));
        let mut long = Writer::new();
        long.opaque(&[b'n'; 1025]).u32(7);
        assert_eq!(ask(NOTIFY, &long), (rpc::garbage(1).into_vec(), None));
    }

    #[test]
    fn written_notice_is_read() {
        let sent = Notice {
            name: b"192.0.2.1",
            state: 5,
        };
        let bytes = write(9, &sent);
        let mut r = Reader::new(&bytes);
        let Ok(Head::Call(call)) = Call::read(&mut r) else {
            panic!("a call");
        };
        assert_eq!((call.program, call.procedure), (PROGRAM, NOTIFY));
        assert_eq!(answer(&call, &mut r).1, Some(sent));
    }

    /// The monitor of a client that loses the first notice.
    #[test]
    fn client_of_the_process_before_is_told_until_it_answers() {
        let dir = tempfile::tempdir().unwrap();
        let local = IpAddr::from([127, 0, 0, 1]);
        let key = crate::handle::Key::new(&[1]).unwrap();
        let lock = crate::nlm::Lock {
            caller: b"c",
            file: &[],
            owner: b"o",
            process: 1,
            offset: 0,
            len: 1,
        };
        let by = crate::nlm::locks::Asking {
            address: local,
            user: hearth_io::peer::User::Uid(0),
            server: local,
            state: 1,
            monitored: true,
        };
        assert_eq!(
            Locks::open(dir.path()).lock(&key, &lock, true, by),
            crate::nlm::Status::Granted
        );
        let locks = Locks::open(dir.path());
        let [portmapper, monitor] = [(); 2].map(|()| UdpSocket::bind((local, 0)).unwrap());
        let port = |socket: &UdpSocket| socket.local_addr().unwrap().port();
        let at = port(&portmapper);
        let known = [Mapping {
            program: PROGRAM,
            version: VERSION,
            protocol: portmap::UDP,
            port: port(&monitor),
        }];
        let receive = |socket: &UdpSocket| {
            let mut bytes = vec![0; 512];
            let (len, from) = socket.recv_from(&mut bytes).unwrap();
            bytes.truncate(len);
            (bytes, from)
        };
        let read = |bytes: &[u8]| match Call::read(&mut Reader::new(bytes)) {
            Ok(Head::Call(call)) => (call, bytes.len()),
            other => panic!("{other:?}"),
        };
        let stop = AtomicBool::new(false);
        let clients: Vec<Monitored> = locks.before().iter().copied().collect();
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| notify(&locks, &clients, at, &stop));
            let (bytes, from) = receive(&portmapper);
            let (call, _) = read(&bytes);
            let answer = portmap::answer(&call, &mut Reader::new(&bytes[40..]), &known);
            portmapper.send_to(answer.as_slice(), from).unwrap();
            let (lost, _) = receive(&monitor);
            let (again, from) = receive(&monitor);
            assert_eq!(lost, again, "the same call");
            assert!(again.windows(9).any(|w| w == b"127.0.0.1"));
            assert!(again.ends_with(&locks.start().to_be_bytes()));
            // Answers of others, and to other calls, end nothing.
            let stranger = UdpSocket::bind("127.0.0.2:0").unwrap();
            stranger
                .send_to(rpc::success(read(&again).0.xid).as_slice(), from)
                .unwrap();
            monitor.send_to(rpc::success(0).as_slice(), from).unwrap();
            assert_eq!(receive(&monitor).0, again);
            monitor
                .send_to(rpc::success(read(&again).0.xid).as_slice(), from)
                .unwrap();
            sender.join().unwrap();
        });
        assert!(Instant::now() < locks.grace_ends());
    }
}
