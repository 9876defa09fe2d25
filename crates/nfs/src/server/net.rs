//! The thread that moves bytes: listens, takes messages apart, sends answers, and looks at the clock.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{self, ErrorKind, IoSliceMut, Read};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use hearth_io::Shelf;
use hearth_io::peer::{self, User};
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};

use super::flight::Flight;
use super::link::{Arriving, Bell, Budget, Link, Out};
use super::pool::Pool;
use super::service::{Caller, Export, Served, Service, Taken, now_s};
use crate::access::{Access, Peer};
use crate::portmap::{self, Mapping};
use crate::record::Assembler;
use crate::{mount, nlm, nsm, v3};

/// Connections of all clients.
const CONNECTIONS_MAX: usize = 512;
/// Connections of one user, which is an address or an account of this host: hypervisors open a few for each datastore.
const CLIENT_CONNECTIONS_MAX: usize = 64;
/// How long a connection may be without its first call. Clients send one at once.
const FIRST_CALL: Duration = Duration::from_secs(30);
/// Calls of one client under way, and the memory of those and of answers that it has not taken. A client that sends
/// more is read from again when some are answered and taken. A connection for which nothing is held is always read from, so that
/// one whose answers nobody takes holds up no other.
const CLIENT_CALLS_MAX: usize = 1024;
const CLIENT_BYTES_MAX: usize = 16 << 20;
/// The same for all clients, with messages that are not whole yet (up to 64 of a client, each of a mebibyte).
const ALL_BYTES_MAX: usize = 32 << 20;
/// Memory of answers a connection does not take: then nothing more is read from it.
const UNSENT_MAX: usize = 8 << 20;
/// Read at once, beside what goes to where it is to lie.
const SCRATCH: usize = 64 << 10;
/// Calls that are answered and watched still, besides as many as are under way.
const WATCHED_SPARE: usize = 4096;
/// How often memory for long messages is let go that was not used since.
const AGING: Duration = Duration::from_secs(5);
/// Datagrams answered in a row, and their length; questions to a portmapper have 56 bytes and a credential, notices a name of up to 1024.
const DATAGRAMS: usize = 64;
const DATAGRAM_MAX: usize = 2048;
/// Addresses on which notices are taken over UDP.
const STATUS_MAX: usize = 8;
const _: () = assert!(TOKEN_DATAGRAM + (STATUS_MAX as u64) < TOKEN_LISTENERS);
/// After so much silence the kernel asks whether a client is still there.
const SILENCE: Duration = Duration::from_secs(60);
/// How long no connection is taken when one could not be: what is used up here comes back.
const DEAF: Duration = Duration::from_secs(1);
/// How long the calls under way may take when the server stops.
const FAREWELL: Duration = Duration::from_secs(5);

const TOKEN_WAKE: u64 = 0;
const TOKEN_DATAGRAM: u64 = 1;
const TOKEN_LISTENERS: u64 = 16;
const TOKEN_CONNECTIONS: u64 = 1 << 16;

/// How to serve.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where NFS and MOUNT are found, both on the same port.
    pub listen: Vec<SocketAddr>,
    /// Where to answer as a portmapper, if nobody else does on this host: TCP and UDP.
    pub portmap: Option<SocketAddr>,
    /// Serve locks and the notices that they need, on the same ports over TCP, and over UDP where that port is free. They are granted from the start where we
    /// are the portmapper, and otherwise as [`Server::locks`] says.
    pub locks: bool,
    /// Threads of each export.
    pub workers: usize,
    /// After which a call that takes longer is answered "ask again".
    pub patience: Duration,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            listen: Vec::new(),
            portmap: None,
            locks: false,
            workers: 16,
            patience: Duration::from_secs(4),
        }
    }
}

/// One client's connection.
struct Connection {
    stream: Arc<TcpStream>,
    caller: Caller,
    since: Instant,
    /// A complete call arrived, so the connection is never closed to make room.
    has_called: bool,
    budget: Arc<Budget>,
    assembler: Assembler,
    arriving: Arriving,
    link: Arc<Link>,
    /// What the kernel was asked to tell.
    interest: epoll::EventFlags,
}

/// A server that runs. Dropped, it stops.
pub struct Server {
    service: Arc<Service>,
    bell: Arc<Bell>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    addresses: Vec<SocketAddr>,
    portmap: Option<SocketAddr>,
    workers: usize,
}

impl Server {
    /// Listens. Nothing is offered yet.
    pub fn start(config: &Config) -> io::Result<Server> {
        let service = Arc::new(Service::new());
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let bell = Arc::new(Bell::new(bell));
        let stop = Arc::new(AtomicBool::new(false));
        let mut listeners = config
            .listen
            .iter()
            .map(|at| peer::listen(*at))
            .collect::<io::Result<Vec<_>>>()?;
        let addresses = listeners
            .iter()
            .map(TcpListener::local_addr)
            .collect::<io::Result<Vec<_>>>()?;
        let mut datagrams = Vec::new();
        let mut programs = Vec::new();
        if config.locks {
            for at in addresses.iter().take(STATUS_MAX) {
                // Without it, notices come over TCP only.
                datagrams.extend(UdpSocket::bind(at).ok());
            }
            programs = lock_programs(&addresses, !datagrams.is_empty());
        }
        let mut portmap_at = None;
        if let Some(at) = config.portmap {
            let tcp = peer::listen(at)?;
            let at = tcp.local_addr()?;
            datagrams.push(UdpSocket::bind(at)?);
            portmap_at = Some(at);
            listeners.push(tcp);
        }
        let mut mappings = mappings(&addresses, portmap_at);
        mappings.append(&mut programs);
        service.set_mappings(mappings);
        let granted = config.locks && portmap_at.is_some();
        service.locks.store(granted, Ordering::Relaxed);
        let mut net = Net {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            service: Arc::clone(&service),
            bell: Arc::clone(&bell),
            stop: Arc::clone(&stop),
            listeners,
            datagrams,
            connections: HashMap::new(),
            next: TOKEN_CONNECTIONS,
            budgets: HashMap::new(),
            all: Arc::default(),
            held_back: Vec::new(),
            deaf_until: None,
            patience: config.patience,
            watched: VecDeque::new(),
            scratch: vec![0; SCRATCH],
            shelf: Arc::default(),
            aging: None,
        };
        net.prepare()?;
        let thread = thread::Builder::new()
            .name("nfs-net".into())
            .spawn(move || net.run())?;
        let workers = config.workers;
        Ok(Server {
            service,
            bell,
            stop,
            thread: Some(thread),
            addresses,
            portmap: portmap_at,
            workers,
        })
    }

    /// Where it listens for NFS and MOUNT.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Where it answers as a portmapper.
    pub fn portmap(&self) -> Option<SocketAddr> {
        self.portmap
    }

    /// What a portmapper has to know of it.
    pub fn mappings(&self) -> Vec<Mapping> {
        self.service.mappings()
    }

    /// Offers a tree to those whom `access` names.
    pub fn offer(&self, export: Export, access: Access) -> io::Result<()> {
        let pool = Pool::start(self.workers)?;
        let served = Served::new(export, access, pool);
        if let Err(error) = served.notify() {
            tracing::warn!(%error, "clients are not notified to reclaim their NFS locks");
        }
        self.service.add(served);
        Ok(())
    }

    /// Changes who may come to a tree and what they may do there, from the next call on; false if it is not on
    /// offer.
    pub fn set_access(&self, store: u64, access: Access) -> bool {
        self.service.set_access(store, access)
    }

    /// Who of this host was refused last for its source port, within the last hour.
    pub fn refused(&self, store: u64) -> Option<SocketAddr> {
        let exports = self.service.exports();
        let served = exports.iter().find(|s| s.export.store == store)?;
        served.refused()
    }

    /// Clients that use a tree, with the time of their last call, seconds since 1970.
    pub fn users(&self, store: u64) -> BTreeMap<IpAddr, u64> {
        let exports = self.service.exports();
        let served = exports.iter().find(|s| s.export.store == store);
        served.map_or_else(BTreeMap::new, |served| served.users())
    }

    /// A client of an earlier run of the server called at `at`.
    pub fn note_user(&self, store: u64, client: IpAddr, at: u64) {
        let exports = self.service.exports();
        if let Some(served) = exports.iter().find(|s| s.export.store == store) {
            // A wrong time, from a damaged record or another clock, must not count for ever.
            served.note_user(client, at.min(now_s()));
        }
    }

    /// Offers a tree no longer. Calls under way are answered; later ones are told that their handles
    /// are stale.
    pub fn withdraw(&self, store: u64) {
        if let Some(served) = self.service.remove(store) {
            served.close();
        }
    }

    /// Whether locks are granted; to be set by what the host's portmapper knows of them.
    pub fn locks(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.service.locks)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.bell.ring();
        if let Some(thread) = self.thread.take() {
            // It has nothing to tell.
            let _ = thread.join();
        }
        for served in self.service.exports() {
            served.close();
        }
    }
}

fn mappings(addresses: &[SocketAddr], portmap: Option<SocketAddr>) -> Vec<Mapping> {
    let tcp = |program, version, at: &SocketAddr| Mapping {
        program,
        version,
        protocol: portmap::TCP,
        port: at.port(),
    };
    let mut all = Vec::new();
    if let Some(first) = addresses.first() {
        all.push(tcp(v3::PROGRAM, v3::VERSION, first));
        all.push(tcp(mount::PROGRAM, mount::VERSION, first));
    }
    if let Some(at) = &portmap {
        let own = tcp(portmap::PROGRAM, portmap::VERSION, at);
        all.extend([
            own,
            Mapping {
                protocol: portmap::UDP,
                ..own
            },
        ]);
    }
    all
}

/// What a portmapper has to know of locks.
fn lock_programs(addresses: &[SocketAddr], datagrams: bool) -> Vec<Mapping> {
    let Some(first) = addresses.first() else {
        return Vec::new();
    };
    let mapping = |program, version, protocol| Mapping {
        program,
        version,
        protocol,
        port: first.port(),
    };
    let mut all = vec![
        mapping(nlm::PROGRAM, nlm::VERSION, portmap::TCP),
        mapping(nsm::PROGRAM, nsm::VERSION, portmap::TCP),
    ];
    all.extend(datagrams.then(|| mapping(nsm::PROGRAM, nsm::VERSION, portmap::UDP)));
    all
}

/// What the thread has.
struct Net {
    epoll: OwnedFd,
    service: Arc<Service>,
    bell: Arc<Bell>,
    stop: Arc<AtomicBool>,
    listeners: Vec<TcpListener>,
    datagrams: Vec<UdpSocket>,
    connections: HashMap<u64, Connection>,
    next: u64,
    budgets: HashMap<User, Arc<Budget>>,
    all: Arc<Budget>,
    /// Connections nothing is read from, for want of room.
    held_back: Vec<u64>,
    /// Until when no connection is taken.
    deaf_until: Option<Instant>,
    patience: Duration,
    /// Calls under way, in the order in which patience with them ends.
    watched: VecDeque<(Instant, Weak<Flight>)>,
    scratch: Vec<u8>,
    /// Memory for long messages, and when it is looked whether that is used.
    shelf: Arc<Shelf>,
    aging: Option<Instant>,
}

impl Net {
    fn prepare(&mut self) -> io::Result<()> {
        let readable = epoll::EventFlags::IN;
        let add = |fd: &dyn AsFdRef, token| {
            epoll::add(
                &self.epoll,
                fd.fd(),
                epoll::EventData::new_u64(token),
                readable,
            )
        };
        add(&self.bell.fd, TOKEN_WAKE)?;
        for (token, listener) in (TOKEN_LISTENERS..).zip(&self.listeners) {
            listener.set_nonblocking(true)?;
            add(listener, token)?;
        }
        for (token, socket) in (TOKEN_DATAGRAM..).zip(&self.datagrams) {
            socket.set_nonblocking(true)?;
            add(socket, token)?;
        }
        Ok(())
    }

    fn run(&mut self) {
        let mut events = Vec::with_capacity(256);
        let mut stopping: Option<Instant> = None;
        loop {
            let now = Instant::now();
            self.expire(now);
            if self.deaf_until.is_some_and(|until| until <= now) {
                self.deaf_until = None;
                self.hear(true);
            }
            self.age(now);
            if self.stop.load(Ordering::Acquire) && stopping.is_none() {
                stopping = Some(now + FAREWELL);
                self.listeners.clear();
                self.datagrams.clear();
            }
            if let Some(last) = stopping {
                let idle = self.all.calls.load(Ordering::Relaxed) == 0
                    && self.connections.values().all(|c| c.link.unsent() == 0);
                if idle || now >= last {
                    return;
                }
            }
            events.clear();
            let wait = self.until_next(now, stopping);
            match epoll::wait(
                &self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                wait.as_ref(),
            ) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    // There is nothing left with which to serve.
                    tracing::error!(%error, "the NFS server cannot wait for its connections and ends");
                    return;
                }
            }
            for event in events.drain(..) {
                let (token, flags) = (event.data.u64(), event.flags);
                match token {
                    TOKEN_WAKE => self.woken(),
                    TOKEN_DATAGRAM..TOKEN_LISTENERS => {
                        self.answer_datagrams((token - TOKEN_DATAGRAM) as usize);
                    }
                    TOKEN_CONNECTIONS.. => self.connection(token, flags, stopping.is_some()),
                    listener => self.accept((listener - TOKEN_LISTENERS) as usize),
                }
            }
            if stopping.is_none() {
                self.let_go_on();
            }
        }
    }

    /// How long nothing has to be done unless something happens.
    fn until_next(&self, now: Instant, stopping: Option<Instant>) -> Option<Timespec> {
        let next = self.watched.front().map(|(at, _)| *at);
        let next = [next, stopping, self.deaf_until, self.aging]
            .into_iter()
            .flatten()
            .min()?;
        let wait = next.saturating_duration_since(now);
        Some(Timespec {
            tv_sec: wait.as_secs() as i64,
            tv_nsec: i64::from(wait.subsec_nanos()),
        })
    }

    /// Lets go of memory that is not used any more.
    fn age(&mut self, now: Instant) {
        if self.aging.is_some_and(|at| at <= now) {
            self.shelf.age();
            self.close_silent(now);
            self.aging = None;
        }
        let is_watched = self.shelf.is_in_use() || self.connections.values().any(|c| !c.has_called);
        if self.aging.is_none() && is_watched {
            self.aging = Some(now + AGING);
        }
    }

    fn expire(&mut self, now: Instant) {
        while let Some((at, _)) = self.watched.front() {
            if *at > now {
                break;
            }
            if let Some(flight) = self
                .watched
                .pop_front()
                .and_then(|(_, flight)| flight.upgrade())
            {
                flight.expire();
            }
        }
        // Those that are answered are not worth waking up for.
        while self
            .watched
            .front()
            .is_some_and(|(_, flight)| flight.strong_count() == 0)
        {
            self.watched.pop_front();
        }
    }

    fn woken(&mut self) {
        for token in self.bell.heard() {
            self.send(token);
        }
    }

    fn answer_datagrams(&mut self, socket: usize) {
        let Some(socket) = self.datagrams.get(socket) else {
            return;
        };
        let mut bytes = [0; DATAGRAM_MAX];
        for _ in 0..DATAGRAMS {
            let Ok((len, from)) = socket.recv_from(&mut bytes) else {
                return;
            };
            // Nobody else gets a packet from us, or one could be sent in the name of others.
            if !self.service.knows(from.ip()) {
                continue;
            }
            if let Some(answer) = self.service.datagram(&bytes[..len], from) {
                // Who asks by datagram asks again.
                let _ = socket.send_to(answer.as_slice(), from);
            }
        }
    }

    fn accept(&mut self, listener: usize) {
        let Some(listener) = self.listeners.get(listener) else {
            return;
        };
        let (stream, from) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                return;
            }
            Err(error) => {
                tracing::warn!(%error, "an NFS client's connection could not be taken");
                // It waits still: to be told of it again and again would help nobody.
                self.hear(false);
                self.deaf_until = Some(Instant::now() + DEAF);
                return;
            }
        };
        let mut peer = Peer::of(from);
        let client = peer.address();
        if !self.service.knows(client) {
            tracing::info!(%client, "an NFS client was turned away: no export is for it");
            return;
        }
        let own = stream.local_addr().unwrap_or(from);
        let user = peer::user(own, from);
        peer.is_root = user == User::Uid(0);
        if !self.make_room(user) {
            tracing::warn!(%client, "an NFS client was turned away: too many connections");
            return;
        }
        let caller = Caller {
            peer,
            user,
            own: own.ip().to_canonical(),
        };
        if let Err(error) = self.welcome(stream, caller) {
            tracing::warn!(%client, %error, "an NFS client's connection could not be set up");
        }
    }

    /// Makes room for a connection of a user: the oldest without a call goes, of the same user if that has its share. False if
    /// all have called.
    fn make_room(&mut self, user: User) -> bool {
        let of_user = |c: &Connection| c.caller.user == user;
        let is_over =
            self.connections.values().filter(|c| of_user(c)).count() >= CLIENT_CONNECTIONS_MAX;
        if !is_over && self.connections.len() < CONNECTIONS_MAX {
            return true;
        }
        let silent = self.connections.iter();
        let silent = silent.filter(|(_, c)| !c.has_called && (of_user(c) || !is_over));
        let oldest = silent.min_by_key(|(_, c)| c.since).map(|(token, _)| *token);
        oldest.is_some_and(|token| {
            self.close(token);
            true
        })
    }

    /// Closes connections without a first call in time.
    fn close_silent(&mut self, now: Instant) {
        let late = self
            .connections
            .iter()
            .filter(|(_, c)| !c.has_called && now.saturating_duration_since(c.since) >= FIRST_CALL);
        let late: Vec<u64> = late.map(|(token, _)| *token).collect();
        late.into_iter().for_each(|token| self.close(token));
    }

    /// Has the kernel tell, or not tell, of new connections.
    fn hear(&self, new: bool) {
        let interest = if new {
            epoll::EventFlags::IN
        } else {
            epoll::EventFlags::empty()
        };
        for (token, listener) in (TOKEN_LISTENERS..).zip(&self.listeners) {
            let data = epoll::EventData::new_u64(token);
            if let Err(error) = epoll::modify(&self.epoll, listener, data, interest) {
                tracing::error!(%error, "the NFS server cannot tell whether it is called");
            }
        }
    }

    fn welcome(&mut self, stream: TcpStream, caller: Caller) -> io::Result<()> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        // A client that is gone without a word must not keep its place for hours.
        rustix::net::sockopt::set_socket_keepalive(&stream, true)?;
        rustix::net::sockopt::set_tcp_keepidle(&stream, SILENCE)?;
        rustix::net::sockopt::set_tcp_keepintvl(&stream, SILENCE / 6)?;
        rustix::net::sockopt::set_tcp_user_timeout(&stream, 2 * SILENCE.as_millis() as u32)?;
        let token = self.next;
        self.next += 1;
        let stream = Arc::new(stream);
        let budget = Arc::clone(self.budgets.entry(caller.user).or_default());
        let budgets = [&budget, &self.all];
        let arriving = Arriving::new(budgets);
        let link = Arc::new(Link::new(token, &stream, &self.bell, budgets));
        let interest = epoll::EventFlags::IN;
        epoll::add(
            &self.epoll,
            &stream,
            epoll::EventData::new_u64(token),
            interest,
        )?;
        let connection = Connection {
            stream,
            caller,
            since: Instant::now(),
            has_called: false,
            budget,
            assembler: Assembler::with(&self.shelf),
            arriving,
            link,
            interest,
        };
        self.connections.insert(token, connection);
        self.aging.get_or_insert(Instant::now() + AGING);
        Ok(())
    }

    fn connection(&mut self, token: u64, flags: epoll::EventFlags, stopping: bool) {
        if flags.contains(epoll::EventFlags::OUT) {
            self.send(token);
        }
        let ended = flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::ERR);
        if flags.contains(epoll::EventFlags::IN) || ended {
            let held_back = self
                .connections
                .get(&token)
                .is_none_or(|c| !c.interest.contains(epoll::EventFlags::IN));
            if held_back {
                // There is no room for what it sends; its end can be seen nevertheless.
                if ended {
                    self.close(token);
                }
            } else if !stopping {
                self.receive(token);
            } else {
                self.listen(token, false);
            }
        }
    }

    /// True if a connection may bring further calls.
    fn has_room(&self, connection: &Connection) -> bool {
        let (own, all) = (&connection.budget, &self.all);
        own.calls.load(Ordering::Relaxed) < CLIENT_CALLS_MAX
            && connection.link.unsent() < UNSENT_MAX
            && (connection.link.is_idle()
                || own.bytes.load(Ordering::Relaxed) < CLIENT_BYTES_MAX
                    && all.memory() < ALL_BYTES_MAX)
    }

    fn receive(&mut self, token: u64) {
        let Some(connection) = self.connections.get_mut(&token) else {
            return;
        };
        let space = connection.assembler.space();
        let direct = space.len();
        let mut parts = [IoSliceMut::new(space), IoSliceMut::new(&mut self.scratch)];
        let parts = &mut parts[usize::from(direct == 0)..];
        let len = match (&*connection.stream).read_vectored(parts) {
            Ok(0) => return self.close(token),
            Ok(len) => len,
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                return;
            }
            Err(_) => return self.close(token),
        };
        connection.assembler.filled(len.min(direct));
        let more = len.saturating_sub(direct);
        if let Err(broken) = connection.assembler.feed(&self.scratch[..more]) {
            tracing::warn!(client = %connection.caller.peer.address(), %broken, "an NFS client was cut off");
            return self.close(token);
        }
        self.take_messages(token);
    }

    /// Takes the messages that have arrived, as long as there is room for what they ask; the rest
    /// waits, and nothing more is read. A few bytes may ask for many.
    fn take_messages(&mut self, token: u64) {
        self.take_some(token);
        if let Some(connection) = self.connections.get_mut(&token) {
            connection.arriving.set(connection.assembler.held());
        }
    }

    fn take_some(&mut self, token: u64) {
        while let Some(connection) = self.connections.get(&token) {
            if !self.has_room(connection) {
                self.held_back.push(token);
                // There may be room by now; looked at once more before this thread sleeps.
                self.bell.hold_back(true);
                return self.listen(token, false);
            }
            let Some(connection) = self.connections.get_mut(&token) else {
                return;
            };
            let Some(message) = connection.assembler.next_message() else {
                return self.listen(token, true);
            };
            connection.has_called = true;
            match self
                .service
                .take(&connection.link, &connection.caller, message)
            {
                Taken::Answered(None) => {}
                Taken::Answered(Some(flight)) => {
                    let until = Instant::now() + self.patience;
                    self.watch(until, &flight);
                }
                Taken::Nonsense => {
                    let client = connection.caller.peer.address();
                    tracing::warn!(%client, "an NFS client was cut off: it does not speak RPC");
                    return self.close(token);
                }
            }
        }
    }

    /// Watches a call until it is answered or `until` is over. One that is answered keeps its memory while it is watched.
    fn watch(&mut self, until: Instant, flight: &Arc<Flight>) {
        let under_way = self.all.calls.load(Ordering::Relaxed);
        if self.watched.len() > WATCHED_SPARE + 2 * under_way {
            self.watched.retain(|(_, flight)| flight.strong_count() > 0);
        }
        self.watched.push_back((until, Arc::downgrade(flight)));
    }

    /// Goes on with connections for which there is room again.
    fn let_go_on(&mut self) {
        if self.held_back.is_empty() {
            return;
        }
        for token in std::mem::take(&mut self.held_back) {
            self.take_messages(token);
        }
        if self.held_back.is_empty() {
            self.bell.hold_back(false);
        }
    }

    /// Has the kernel tell, or not tell, of bytes that arrive.
    fn listen(&mut self, token: u64, read: bool) {
        let Some(connection) = self.connections.get(&token) else {
            return;
        };
        let mut interest = connection.interest;
        interest.set(epoll::EventFlags::IN, read);
        self.ask(token, interest);
    }

    fn ask(&mut self, token: u64, interest: epoll::EventFlags) {
        let Some(connection) = self.connections.get_mut(&token) else {
            return;
        };
        if connection.interest == interest {
            return;
        }
        connection.interest = interest;
        if epoll::modify(
            &self.epoll,
            &connection.stream,
            epoll::EventData::new_u64(token),
            interest,
        )
        .is_err()
        {
            self.close(token);
        }
    }

    /// Sends what there is, as far as the client takes it.
    fn send(&mut self, token: u64) {
        let Some(connection) = self.connections.get_mut(&token) else {
            return;
        };
        let more = loop {
            match connection.link.send_some() {
                Ok(Out::All) => break false,
                Ok(Out::Full) => break true,
                Ok(Out::More) => {}
                Err(_) => return self.close(token),
            }
        };
        let mut interest = connection.interest;
        interest.set(epoll::EventFlags::OUT, more);
        self.ask(token, interest);
    }

    fn close(&mut self, token: u64) {
        let Some(connection) = self.connections.remove(&token) else {
            return;
        };
        connection.link.close();
        // Its calls go on: they may come again over another connection, which is told how they ended.
        drop(connection);
        // Whoever has connections or calls under way holds it by them.
        self.budgets
            .retain(|_, budget| Arc::strong_count(budget) > 1);
    }
}

/// Anything that can be waited for.
trait AsFdRef {
    fn fd(&self) -> std::os::fd::BorrowedFd<'_>;
}

impl<T: AsFd> AsFdRef for T {
    fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.as_fd()
    }
}
