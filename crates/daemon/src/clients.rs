//! Who uses a disk.
//!
//! Two virtual machines on one disk destroy its file system, and neither notices. So the clients of
//! a disk are known by what they are, not by their connections: a process of this host (over the
//! NBD socket or the disk's vhost-user socket), or, over TCP, an address and the name in the
//! certificate it showed. A disk may insist on a number of them ([`Clients::set_limit`]).
//!
//! Two at a time are no fault by themselves: in a live migration the second reads before the first
//! has stopped, and writes only after the first has written for the last time. So what is warned of
//! is a client that writes *again* after another one has written.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use hearth_events::{Event, Events};
use hearth_fault::Fault;
use hearth_reactor::{Caller, PeerAddress, Shares};
use hearth_volume::{Protocol, Visitor};
use serde::{Deserialize, Serialize};

use crate::api::types::ClientInfo;
use crate::bell::Bell;

/// Connections every export may have, whatever the others' clients do.
const RESERVE: u64 = 8;
/// Of these, what a single client may have.
const CLIENT_RESERVE: u64 = 4;
/// Clients listed; more are counted.
const LISTED_MAX: usize = 64;
/// Clients named in a sentence.
const NAMED_MAX: usize = 4;
/// Pairs of clients whose writes were warned of that are remembered.
const TOLD_MAX: usize = 64;
/// How long it is news that two clients wrote in turn.
pub(crate) const CLASH_TIME: Duration = Duration::from_secs(3600);
/// Longest command line shown, bytes.
const COMMAND_MAX: usize = 200;
/// How long reading a command line may take: the kernel reads it out of the process's own memory,
/// which may be on something that hangs.
const COMMAND_TIME: Duration = Duration::from_millis(200);
/// Such readers that hang at a time.
const READERS_MAX: usize = 8;

/// Connections of all exports' clients together.
#[derive(Debug)]
pub struct Crowd {
    /// Beyond every export's reserve.
    shared: AtomicU64,
    limit: u64,
    /// Rung when a connection has ended.
    fewer: Bell,
}

impl Crowd {
    /// At most `limit` connections beside the exports' reserves.
    pub fn new(limit: u64) -> Crowd {
        Crowd {
            shared: AtomicU64::new(0),
            limit,
            fewer: Bell::default(),
        }
    }

    /// Waits until `look`, which looks again whenever a connection has ended, finds something.
    pub(crate) fn wait<T>(&self, limit: Duration, look: impl FnMut() -> Option<T>) -> Option<T> {
        self.fewer.wait(limit, Duration::ZERO, look)
    }
}

/// What tells one client from another.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Who {
    /// A process, and when it started: numbers are used again.
    Process { pid: i32, started: u64 },
    /// Over TCP: a host, and the name in its certificate.
    Host { ip: IpAddr, name: Option<String> },
    /// The kernel does not say: everybody is somebody else.
    Stranger(u64),
}

struct Client {
    protocol: Protocol,
    who: Who,
    /// The same for the same client whichever way it comes.
    writer: u64,
    /// What the process calls itself.
    word: String,
    command: OnceLock<String>,
    since: u64,
    wrote: AtomicBool,
    connections: AtomicU64,
    /// Of these, in places of the export's own.
    reserved: AtomicU64,
    /// And through TLS.
    encrypted: AtomicU64,
    held: Arc<AtomicU64>,
}

impl Client {
    fn name(&self) -> String {
        match &self.who {
            Who::Process { pid, .. } if self.word.is_empty() => format!("process {pid}"),
            Who::Process { pid, .. } => format!("process {pid} ({})", self.word),
            Who::Host { ip, name: None } => ip.to_string(),
            Who::Host {
                ip,
                name: Some(name),
            } => format!("{name} at {ip}"),
            Who::Stranger(_) => "an unknown client".to_owned(),
        }
    }

    /// False for a process that has ended and whose connection is about to.
    fn is_alive(&self) -> bool {
        match self.who {
            Who::Process { pid, started } => started == 0 || start_of(pid) == Some(started),
            _ => true,
        }
    }

    fn info(&self) -> ClientInfo {
        let (mut pid, mut address, mut name) = (None, None, None);
        match &self.who {
            Who::Process { pid: number, .. } => pid = Some(*number),
            Who::Host { ip, name: shown } => {
                (address, name) = (Some(ip.to_string()), shown.clone());
            }
            Who::Stranger(_) => {}
        }
        let command = pid.map(|pid| {
            let line = || command_line(pid).unwrap_or_else(|| self.word.clone());
            self.command.get_or_init(line).clone()
        });
        ClientInfo {
            kind: self.protocol.to_string(),
            pid,
            command,
            address,
            name,
            since: self.since,
            connections: self.connections.load(Ordering::Relaxed),
            writes: self.wrote.load(Ordering::Relaxed),
            encrypted: self.encrypted.load(Ordering::Relaxed),
        }
    }
}

/// A process that uses a disk, as it is noted for the next run of the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Known {
    pub(crate) pid: i32,
    /// When it started, in the kernel's ticks.
    pub(crate) started: u64,
    /// The protocol.
    pub(crate) kind: String,
    /// When it connected, seconds since 1970.
    pub(crate) since: u64,
}

/// Connections: all of them, and those in places of the export's own.
#[derive(Clone, Copy, Default)]
struct Places {
    all: u64,
    reserved: u64,
}

impl Places {
    fn shared(self) -> u64 {
        self.all.saturating_sub(self.reserved)
    }
}

#[derive(Default)]
struct Ledger {
    list: Vec<Arc<Client>>,
    /// Processes that used the disk when the daemon ended, and have not connected since.
    expected: Vec<Arc<Client>>,
    next: u64,
    /// Who wrote last, and its name.
    last: Option<(u64, String)>,
    told: Vec<(u64, u64)>,
    notice: Option<String>,
    /// When two of them last wrote in turn.
    clash: Option<Instant>,
    connections: u64,
    reserved: u64,
}

/// The clients of one disk.
pub struct Clients {
    disk: String,
    crowd: Arc<Crowd>,
    limit: AtomicU32,
    /// Who wrote last; 0 for nobody.
    writer: AtomicU64,
    ledger: Mutex<Ledger>,
    held: Arc<AtomicU64>,
    events: Arc<Events>,
}

impl Clients {
    /// Nobody yet; at most `limit` of them at a time, 0 for any number.
    pub fn new(disk: &str, limit: u32, crowd: Arc<Crowd>, events: Arc<Events>) -> Arc<Clients> {
        Arc::new(Clients {
            disk: disk.to_owned(),
            events,
            crowd,
            limit: AtomicU32::new(limit),
            writer: AtomicU64::new(0),
            ledger: Mutex::default(),
            held: Arc::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Clients at a time, for those that come from now on.
    pub fn set_limit(&self, limit: u32) {
        self.limit.store(limit, Ordering::Relaxed);
    }

    /// Expects processes that used the disk when the daemon ended: each is a client until it ends.
    pub(crate) fn expect(&self, known: &[Known]) {
        let mut ledger = self.lock();
        for known in known {
            let protocols = [hearth_nbd::PROTOCOL, hearth_vhost::PROTOCOL];
            let Some(protocol) = protocols.into_iter().find(|p| p.0 == known.kind) else {
                continue;
            };
            ledger.next += 1;
            let client = Client {
                protocol,
                who: Who::Process {
                    pid: known.pid,
                    started: known.started,
                },
                writer: ledger.next,
                word: word_of(known.pid),
                command: OnceLock::new(),
                since: known.since,
                wrote: AtomicBool::new(false),
                connections: AtomicU64::new(0),
                reserved: AtomicU64::new(0),
                encrypted: AtomicU64::new(0),
                held: Arc::default(),
            };
            if known.started != 0 && client.is_alive() {
                ledger.expected.push(Arc::new(client));
            }
        }
    }

    /// The processes that use the disk, for the next run of the daemon.
    pub(crate) fn known(&self) -> Vec<Known> {
        let mut ledger = self.lock();
        ledger.expected.retain(|client| client.is_alive());
        let all = ledger.list.iter().chain(&ledger.expected);
        let known = all.filter_map(|client| match client.who {
            Who::Process { pid, started } if started != 0 => Some(Known {
                pid,
                started,
                kind: client.protocol.to_string(),
                since: client.since,
            }),
            _ => None,
        });
        known.collect()
    }

    /// True if the disk has a client, connected or expected to connect again.
    pub fn is_used(&self) -> bool {
        let ledger = self.lock();
        ledger.connections > 0 || ledger.expected.iter().any(|client| client.is_alive())
    }

    /// Connections open.
    pub fn connections(&self) -> u64 {
        self.lock().connections
    }

    /// The clients, the first of many.
    pub fn list(&self) -> Vec<ClientInfo> {
        let list: Vec<Arc<Client>> = {
            let ledger = self.lock();
            let expected = ledger.expected.iter().filter(|client| client.is_alive());
            let all = ledger.list.iter().chain(expected);
            all.take(LISTED_MAX).cloned().collect()
        };
        list.iter().map(|client| client.info()).collect()
    }

    /// What its owner should know of its clients.
    pub fn notice(&self) -> Option<String> {
        self.lock().notice.clone()
    }

    /// The same while it is news: two clients wrote in turn within the last hour.
    pub fn two_writers(&self) -> Option<String> {
        let ledger = self.lock();
        let is_recent = ledger.clash.is_some_and(|at| at.elapsed() < CLASH_TIME);
        ledger.notice.clone().filter(|_| is_recent)
    }

    /// Lets a client in, or says why not. Called on data threads.
    pub fn admit(self: &Arc<Clients>, caller: &Caller, protocol: Protocol) -> Result<Pass, Fault> {
        let outcome = self.try_admit(caller, protocol);
        if let Err(why) = &outcome {
            tracing::warn!(disk = %self.disk, client = %caller, "client refused: {why}");
        }
        outcome
    }

    fn try_admit(self: &Arc<Clients>, caller: &Caller, protocol: Protocol) -> Result<Pass, Fault> {
        let mut ledger = self.lock();
        let who = match caller.address {
            PeerAddress::Unix { pid, .. } if pid > 0 => Who::Process {
                pid,
                started: start_of(pid).unwrap_or(0),
            },
            PeerAddress::Tcp(address) => Who::Host {
                ip: address.ip().to_canonical(),
                name: caller.name.clone(),
            },
            _ => Who::Stranger(ledger.next),
        };
        ledger.expected.retain(|client| client.who != who);
        let known = ledger.list.iter().find(|c| c.who == who).cloned();
        let limit = self.limit.load(Ordering::Relaxed) as usize;
        if limit > 0 && known.is_none() {
            let mut others: Vec<&Arc<Client>> = Vec::new();
            for client in ledger.list.iter().filter(|c| c.is_alive()) {
                if others.iter().all(|o| o.who != client.who) {
                    others.push(client);
                }
            }
            if others.len() >= limit {
                // Who the others are is nothing for anybody who can reach the port.
                let used = match caller.address {
                    PeerAddress::Unix { .. } => names(others.iter().map(|c| c.name())),
                    _ => "others".to_owned(),
                };
                return Err(Fault::new(
                    format!(
                        "disk {} takes {limit} client{} at a time, and is used by {used}",
                        self.disk,
                        if limit == 1 { "" } else { "s" },
                    ),
                    format!(
                        "stop that one, or change it with `hearth disk set {} --clients`",
                        self.disk
                    ),
                ));
            }
        }
        let same = ledger.list.iter().filter(|c| c.who == who);
        let mut mine = Places::default();
        for client in same {
            mine.all += client.connections.load(Ordering::Relaxed);
            mine.reserved += client.reserved.load(Ordering::Relaxed);
        }
        let all = Places {
            all: ledger.connections,
            reserved: ledger.reserved,
        };
        let reserved = self.make_room(all, mine)?;
        ledger.next += 1;
        let number = ledger.next;
        let found = ledger
            .list
            .iter()
            .find(|c| c.who == who && c.protocol == protocol);
        let client = match found {
            Some(client) => client.clone(),
            None => {
                let word = match who {
                    Who::Process { pid, .. } => word_of(pid),
                    _ => String::new(),
                };
                let since = SystemTime::now().duration_since(UNIX_EPOCH);
                let client = Arc::new(Client {
                    protocol,
                    writer: known.as_ref().map_or(number, |k| k.writer),
                    held: known.map_or_else(Arc::default, |k| k.held.clone()),
                    who,
                    word,
                    command: OnceLock::new(),
                    since: since.map_or(0, |d| d.as_secs()),
                    wrote: AtomicBool::new(false),
                    connections: AtomicU64::new(0),
                    reserved: AtomicU64::new(0),
                    encrypted: AtomicU64::new(0),
                });
                tracing::info!(disk = %self.disk, client = %client.name(), over = %protocol, "client connected");
                ledger.list.push(client.clone());
                client
            }
        };
        client.connections.fetch_add(1, Ordering::Relaxed);
        client
            .reserved
            .fetch_add(u64::from(reserved), Ordering::Relaxed);
        let encrypted = u64::from(caller.encrypted);
        client.encrypted.fetch_add(encrypted, Ordering::Relaxed);
        ledger.connections += 1;
        ledger.reserved += u64::from(reserved);
        Ok(Pass {
            clients: self.clone(),
            client,
            reserved,
            encrypted,
        })
    }

    /// A connection's place: one of the export's own, which gives `true`, or one of those all share,
    /// of which nobody gets all: an export no more than half of what is left, a client of it no more
    /// than half of that.
    fn make_room(&self, export: Places, client: Places) -> Result<bool, Fault> {
        if export.reserved < RESERVE && client.reserved < CLIENT_RESERVE {
            return Ok(true);
        }
        let shared = self.crowd.shared.load(Ordering::Relaxed);
        let left = self.crowd.limit.saturating_sub(shared);
        if left == 0 || export.shared() + client.shared() >= left {
            return Err(Fault::new(
                format!(
                    "disk {} has {} connections, {} of them from this client, and {left} are left for all disks",
                    self.disk, export.all, client.all
                ),
                "close some, or give more with --nbd-memory",
            ));
        }
        self.crowd.shared.fetch_add(1, Ordering::Relaxed);
        Ok(false)
    }

    /// Somebody else than the last one writes.
    fn turn(&self, client: &Client) {
        let mut ledger = self.lock();
        let before = ledger.last.replace((client.writer, client.name()));
        self.writer.store(client.writer, Ordering::Relaxed);
        let again = client.wrote.swap(true, Ordering::Relaxed)
            || ledger.list.iter().any(|c| {
                c.writer == client.writer
                    && c.wrote.load(Ordering::Relaxed)
                    && !std::ptr::eq(&**c, client)
            });
        let Some((writer, other)) = before.filter(|b| again && b.0 != client.writer) else {
            return;
        };
        ledger.clash = Some(Instant::now());
        let pair = (writer.min(client.writer), writer.max(client.writer));
        if ledger.told.contains(&pair) {
            return;
        }
        if ledger.told.len() >= TOLD_MAX {
            ledger.told.remove(0);
        }
        ledger.told.push(pair);
        let what = format!(
            "two clients write to it at the same time: {} and {other}",
            client.name()
        );
        ledger.notice = Some(format!(
            "{what}; unless they share a cluster file system, its contents are damaged: stop one of them and check the file system; `hearth disk set {} --clients 1` keeps a second one out",
            self.disk
        ));
        drop(ledger);
        // Does not block.
        self.events.tell(Event::TwoClientsWrite {
            datastore: None,
            disk: Some(self.disk.clone()),
            file: None,
            what: "the disk".to_owned(),
            one: client.name(),
            other,
        });
    }

    fn leave(&self, client: &Arc<Client>, reserved: bool) {
        let mut ledger = self.lock();
        let place = u64::from(reserved);
        ledger.reserved = ledger.reserved.saturating_sub(place);
        client.reserved.fetch_sub(place, Ordering::Relaxed);
        ledger.connections = ledger.connections.saturating_sub(1);
        if client.connections.fetch_sub(1, Ordering::Relaxed) == 1 {
            ledger.list.retain(|c| !Arc::ptr_eq(c, client));
            tracing::info!(disk = %self.disk, client = %client.name(), "client disconnected");
        }
    }
}

/// One connection of a client.
pub struct Pass {
    clients: Arc<Clients>,
    client: Arc<Client>,
    /// In one of the export's own places.
    reserved: bool,
    /// 1 for a connection through TLS.
    encrypted: u64,
}

impl Pass {
    /// What the client and the export's clients together hold.
    pub fn shares(&self) -> Shares {
        Shares {
            export: self.clients.held.clone(),
            client: self.client.held.clone(),
        }
    }
}

impl Visitor for Pass {
    fn wrote(&self) {
        if self.clients.writer.load(Ordering::Relaxed) != self.client.writer {
            self.clients.turn(&self.client);
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        if !self.reserved {
            self.clients.crowd.shared.fetch_sub(1, Ordering::Relaxed);
        }
        let encrypted = &self.client.encrypted;
        encrypted.fetch_sub(self.encrypted, Ordering::Relaxed);
        self.clients.leave(&self.client, self.reserved);
        self.clients.crowd.fewer.ring();
    }
}

/// Clients in a sentence.
pub fn sentence(clients: &[ClientInfo]) -> String {
    names(
        clients
            .iter()
            .map(|c| match (&c.pid, &c.command, &c.address, &c.name) {
                (Some(pid), Some(command), ..) if !command.is_empty() => {
                    format!("process {pid} ({command})")
                }
                (Some(pid), ..) => format!("process {pid}"),
                (None, _, Some(address), Some(name)) => format!("{name} at {address}"),
                (None, _, Some(address), None) => address.clone(),
                _ => "an unknown client".to_owned(),
            }),
    )
}

fn names(all: impl Iterator<Item = String>) -> String {
    let all: Vec<String> = all.collect();
    let more = all.len().saturating_sub(NAMED_MAX);
    let mut text = all
        .get(..all.len() - more)
        .unwrap_or_default()
        .join(" and ");
    if more > 0 {
        text.push_str(&format!(" and {more} more"));
    }
    text
}

/// When a process started, in the kernel's ticks; `None` if it is gone or has ended.
fn start_of(pid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in front may hold anything, brackets too (proc(5)).
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    // State is the third field, the start the twenty-second.
    let started = fields.nth(18)?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(started)
}

/// What a process calls itself; does not touch its memory.
fn word_of(pid: i32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/comm"))
        .unwrap_or_default()
        .trim_end()
        .to_owned()
}

/// How a process was started, unless finding out hangs.
fn command_line(pid: i32) -> Option<String> {
    static READERS: AtomicUsize = AtomicUsize::new(0);
    if READERS.fetch_add(1, Ordering::Relaxed) >= READERS_MAX {
        READERS.fetch_sub(1, Ordering::Relaxed);
        return None;
    }
    let (answer, answered) = sync_channel(1);
    let read = move || {
        let raw = std::fs::read(format!("/proc/{pid}/cmdline"));
        // The one who asked may have stopped waiting.
        let _ = answer.send(raw);
        READERS.fetch_sub(1, Ordering::Relaxed);
    };
    let reader = std::thread::Builder::new().name("hearth-cmdline".to_owned());
    if reader.spawn(read).is_err() {
        READERS.fetch_sub(1, Ordering::Relaxed);
        return None;
    }
    let raw = answered.recv_timeout(COMMAND_TIME).ok()?.ok()?;
    let line = String::from_utf8_lossy(&raw).replace('\0', " ");
    let mut line = line.trim().to_owned();
    while line.len() > COMMAND_MAX {
        line.pop();
    }
    (!line.is_empty()).then_some(line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_events::Query;
    use hearth_nbd::PROTOCOL as NBD;
    use hearth_vhost::PROTOCOL as VHOST;

    fn host(last: u8) -> Caller {
        let address = std::net::SocketAddr::from(([10, 0, 0, last], 4000 + u16::from(last)));
        Caller::new(PeerAddress::Tcp(address))
    }

    fn disk(limit: u32, connections: u64) -> Arc<Clients> {
        Clients::new(
            "d",
            limit,
            Arc::new(Crowd::new(connections)),
            Arc::default(),
        )
    }

    fn all_events() -> Query {
        Query {
            limit: 100,
            ..Query::default()
        }
    }

    fn two_clients_events(clients: &Clients) -> usize {
        let all = clients.events.query(&all_events()).unwrap();
        let of_this = all.iter().filter(|e| e.event == "two-clients-write");
        of_this.filter(|e| e.disk.as_deref() == Some("d")).count()
    }

    #[test]
    fn writes_in_turn_are_a_migration_and_writes_across_are_not() {
        let clients = disk(0, 100);
        let a = clients.admit(&host(1), NBD).unwrap();
        a.wrote();
        a.wrote();
        let b = clients.admit(&host(2), NBD).unwrap();
        // The destination has read and now writes; the source is silent for ever.
        b.wrote();
        b.wrote();
        assert_eq!(clients.notice(), None);
        drop(a);
        // Several connections of one client, and another way in, are one writer.
        let more = clients.admit(&host(2), VHOST).unwrap();
        more.wrote();
        b.wrote();
        assert_eq!(clients.notice(), None);
        let c = clients.admit(&host(3), NBD).unwrap();
        c.wrote();
        assert_eq!((clients.notice(), clients.two_writers()), (None, None));
        assert_eq!(two_clients_events(&clients), 0);
        b.wrote();
        c.wrote();
        b.wrote();
        assert_eq!(two_clients_events(&clients), 1);
        assert_eq!(clients.two_writers(), clients.notice());
        let notice = clients.notice().unwrap();
        assert!(
            notice.contains("10.0.0.2") && notice.contains("10.0.0.3"),
            "{notice}"
        );
    }

    #[test]
    fn a_limit_counts_clients_and_not_connections() {
        let clients = disk(1, 100);
        let a = clients.admit(&host(1), NBD).unwrap();
        let more: Vec<Pass> = (0..3)
            .map(|_| clients.admit(&host(1), NBD).unwrap())
            .collect();
        let refused = clients.admit(&host(2), NBD).err().unwrap().what;
        // Strangers learn nothing of each other; who may use the socket may know.
        assert!(
            refused.contains("used by others") && !refused.contains("10.0.0.1"),
            "{refused}"
        );
        let local = Caller::new(PeerAddress::Unix {
            pid: std::process::id() as i32,
            uid: 0,
            gid: 0,
        });
        let refused = clients.admit(&local, NBD).err().unwrap().what;
        assert!(refused.contains("10.0.0.1"), "{refused}");
        let named = Caller {
            name: Some("other".to_owned()),
            ..host(1)
        };
        assert!(clients.admit(&named, NBD).is_err());
        assert_eq!(clients.list().len(), 1);
        assert_eq!(clients.list()[0].connections, 4);
        drop(more);
        clients.set_limit(2);
        let b = clients.admit(&host(2), VHOST).unwrap();
        drop(a);
        clients.set_limit(1);
        drop(b);
        assert!(clients.admit(&host(3), NBD).is_ok());
        assert_eq!(clients.connections(), 0);
    }

    #[test]
    fn idle_connections_lock_nobody_out() {
        let crowd = Arc::new(Crowd::new(64));
        let mut kept = Vec::new();
        let take_all = |clients: &Arc<Clients>, last: u8, kept: &mut Vec<Pass>| {
            let before = kept.len();
            while let Ok(pass) = clients.try_admit(&host(last), NBD) {
                kept.push(pass);
            }
            kept.len() - before
        };
        for disk in 0..20u8 {
            let clients = Clients::new("d", 0, crowd.clone(), Arc::default());
            let first = take_all(&clients, 1, &mut kept);
            let second = take_all(&clients, 2, &mut kept);
            assert!(first >= 4 && second >= 4, "{disk}: {first}, {second}");
        }
        assert!(kept.len() as u64 <= 64 + 20 * RESERVE);
        drop(kept);
        assert_eq!(crowd.shared.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_process_is_known_by_its_start() {
        let own = std::process::id() as i32;
        assert!(start_of(own).is_some() && !word_of(own).is_empty());
        // Each look has a deadline, which a busy machine may miss.
        let mut looks = (0..100).map(|_| command_line(own));
        assert!(looks.any(|line| line.is_some()));
        assert_eq!(start_of(i32::MAX), None);
        let caller = Caller::new(PeerAddress::Unix {
            pid: own,
            uid: 0,
            gid: 0,
        });
        let clients = disk(1, 10);
        let _pass = clients.admit(&caller, NBD).unwrap();
        let listed = clients.list();
        assert_eq!(listed[0].pid, Some(own));
        assert!(sentence(&listed).contains(&format!("process {own} (")));
        assert!(clients.admit(&host(1), NBD).is_err());
    }
}
