//! Sockets and clients: one socket per disk, one client at a time per socket.
//!
//! A vhost-user socket has no export names, so each disk has its own, there while the disk is
//! attached. One thread waits on all of them; each client gets a thread for its messages, which
//! sleeps once the guest runs. A second client of the same disk waits until the first is gone:
//! two guests on one disk would destroy it, but a hypervisor that reconnects may be faster than
//! the end of its last connection.

use crate::channel;
use crate::control::Device;
use crate::exporter::PROTOCOL;
use crate::queue::Link;
use hearth_reactor::{Caller, Reactors};
use hearth_volume::{SocketFile, Visitor, Volume};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::mem::take;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vhost::vhost_user::{BackendReqHandler, Error};
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::poll::{PollContext, PollToken};

/// Clients of one disk at a time, those that wait for their turn included.
const CLIENTS_MAX: usize = 8;
/// How often a client that waits for its turn is looked after.
const TURN_POLL: Duration = Duration::from_millis(200);
/// Pause after the system ran out of descriptors.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// Longest wait for clients' threads at the end.
const STOP_TIME: Duration = Duration::from_secs(25);

/// A client that is connected.
struct Client {
    number: u64,
    link: Arc<Link>,
    channel: Mutex<Option<OwnedFd>>,
}

/// A disk on offer.
struct Offer {
    disk: Arc<dyn Volume>,
    listener: Option<Arc<UnixListener>>,
    /// As long as it listens.
    file: Option<SocketFile>,
    /// In the order they came; the first is served.
    clients: Vec<Arc<Client>>,
}

#[derive(Default)]
struct State {
    offers: BTreeMap<String, Offer>,
    next: u64,
    stopping: bool,
    /// Listeners that came and went since the accepting thread last looked, in this order where one did both.
    came: Vec<(String, Arc<UnixListener>)>,
    went: Vec<Arc<UnixListener>>,
}

struct Shared {
    reactors: Arc<Reactors>,
    state: Mutex<State>,
    /// A client has gone.
    changed: Condvar,
    wake: EventFd,
}

/// See the module. Stops when dropped.
pub struct Server {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Server {
    /// Starts the thread that accepts clients.
    pub fn start(reactors: Arc<Reactors>) -> io::Result<Server> {
        let shared = Arc::new(Shared {
            reactors,
            state: Mutex::default(),
            changed: Condvar::new(),
            wake: EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
        });
        let inner = shared.clone();
        let thread = std::thread::Builder::new()
            .name("hearth-vhost".to_owned())
            .spawn(move || accept_loop(&inner))?;
        Ok(Server {
            shared,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Offers a disk on a listening socket; its file is dropped when the offer ends.
    pub fn listen(&self, disk: Arc<dyn Volume>, listener: UnixListener, file: SocketFile) {
        if let Err(e) = listener.set_nonblocking(true) {
            tracing::error!(disk = disk.name(), "cannot listen: {e}");
            return;
        }
        let name = disk.name().to_owned();
        let mut state = self.shared.lock();
        let clients = match state.offers.remove(&name) {
            Some(old) => {
                state.went.extend(old.listener);
                old.clients
            }
            None => Vec::new(),
        };
        let listener = Arc::new(listener);
        state.came.push((name.clone(), listener.clone()));
        state.offers.insert(
            name,
            Offer {
                disk,
                listener: Some(listener),
                file: Some(file),
                clients,
            },
        );
        drop(state);
        self.wake();
    }

    /// True while a disk's clients may connect.
    pub fn is_listening(&self, name: &str) -> bool {
        let state = self.shared.lock();
        state.offers.get(name).is_some_and(|o| o.listener.is_some())
    }

    /// Takes no more clients for a disk; those that are connected stay.
    pub fn unlisten(&self, name: &str) {
        let mut state = self.shared.lock();
        let State { offers, went, .. } = &mut *state;
        went.extend(offers.get_mut(name).and_then(close));
        drop(state);
        self.wake();
    }

    /// Takes no more clients for any disk.
    pub fn close(&self) {
        let mut state = self.shared.lock();
        let State { offers, went, .. } = &mut *state;
        went.extend(offers.values_mut().filter_map(close));
        drop(state);
        self.wake();
    }

    /// Ends a disk's connections, and returns when its clients are gone.
    pub fn disconnect(&self, name: &str) {
        self.unlisten(name);
        let end = Instant::now() + STOP_TIME;
        let mut state = self.shared.lock();
        if let Some(offer) = state.offers.get(name) {
            offer.clients.iter().for_each(|c| c.link.hang_up());
        }
        while state
            .offers
            .get(name)
            .is_some_and(|o| !o.clients.is_empty())
            && Instant::now() < end
        {
            state = wait(&self.shared.changed, state);
        }
        if let Some(offer) = state.offers.remove(name) {
            offer.clients.iter().for_each(|c| c.link.close());
        }
    }

    /// Tells a disk's clients that its size has changed.
    pub fn resized(&self, name: &str) {
        let clients = match self.shared.lock().offers.get(name) {
            Some(offer) => offer.clients.clone(),
            None => return,
        };
        for client in clients {
            let channel = client
                .channel
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            if let Some(channel) = channel.as_ref()
                && let Err(e) = channel::config_changed(channel)
            {
                tracing::warn!(disk = name, "cannot tell the guest of the new size: {e}");
            }
        }
    }

    /// Ends everything: sockets, then clients. Requests in flight are answered first.
    pub fn stop(&self) {
        let mut state = self.shared.lock();
        state.stopping = true;
        for offer in state.offers.values_mut() {
            // The accepting thread ends, and with it what it waits for.
            drop(close(offer));
            offer.clients.iter().for_each(|c| c.link.hang_up());
        }
        let end = Instant::now() + STOP_TIME;
        while state.offers.values().any(|o| !o.clients.is_empty()) && Instant::now() < end {
            state = wait(&self.shared.changed, state);
        }
        // Nobody is let in any more. The disks go now: whoever stops us closes them next.
        let offers = std::mem::take(&mut state.offers);
        drop(state);
        // Whoever is left has had his time.
        for offer in offers.values() {
            offer.clients.iter().for_each(|c| c.link.close());
        }
        drop(offers);
        self.wake();
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            tracing::error!("the vhost-user thread ended abnormally");
        }
    }

    fn wake(&self) {
        // Fails only if the counter is full, and then the thread is awake anyway.
        let _ = self.shared.wake.write(1);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Ends an offer; its listener, if it still had one, is yet to be waited for no more.
fn close(offer: &mut Offer) -> Option<Arc<UnixListener>> {
    let listener = offer.listener.take()?;
    drop(offer.file.take());
    Some(listener)
}

fn wait<'a>(changed: &Condvar, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
    match changed.wait_timeout(state, TURN_POLL) {
        Ok((state, _)) => state,
        Err(poisoned) => poisoned.into_inner().0,
    }
}

/// What the accepting thread waits for.
enum Token {
    Wake,
    Listener(u32),
}

impl PollToken for Token {
    fn as_raw_token(&self) -> u64 {
        match self {
            Token::Wake => u64::MAX,
            Token::Listener(i) => u64::from(*i),
        }
    }

    fn from_raw_token(data: u64) -> Token {
        match data {
            u64::MAX => Token::Wake,
            i => Token::Listener(i as u32),
        }
    }
}

fn accept_loop(shared: &Arc<Shared>) {
    let mut waiting = Waiting::default();
    while !shared.lock().stopping {
        if let Err(e) = waiting.accept_some(shared) {
            tracing::warn!("cannot accept vhost-user clients: {e}; trying again shortly");
            waiting = Waiting::default();
            std::thread::sleep(ACCEPT_RETRY);
        }
    }
}

/// The listeners that are waited for. Kept from one time to the next: a disk that comes or goes costs a
/// call for its own listener, not one for that of every disk.
#[derive(Default)]
struct Waiting {
    poll: Option<PollContext<Token>>,
    /// By their descriptors, which are their tokens.
    listeners: HashMap<u32, (String, Arc<UnixListener>)>,
}

impl Waiting {
    /// Waits until something changes, or clients come, and takes these. After an error it is not known what is
    /// waited for.
    fn accept_some(&mut self, shared: &Arc<Shared>) -> io::Result<()> {
        self.follow(shared)?;
        let Some(poll) = &self.poll else {
            return Ok(());
        };
        for event in poll.wait()?.iter_readable() {
            match event.token() {
                Token::Wake => {
                    // Another thread's write; that it is gone already is no concern.
                    let _ = shared.wake.read();
                }
                Token::Listener(fd) => {
                    if let Some((name, listener)) = self.listeners.get(&fd) {
                        match listener.accept() {
                            Ok((socket, _)) => admit(shared, name, socket),
                            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                            Err(e) => return Err(e),
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Takes up what came and went; at first, everything there is.
    fn follow(&mut self, shared: &Shared) -> io::Result<()> {
        let (came, went) = {
            let mut state = shared.lock();
            let (came, went) = (take(&mut state.came), take(&mut state.went));
            if self.poll.is_some() {
                (came, went)
            } else {
                let all = state.offers.iter();
                let all = all.filter_map(|(name, o)| Some((name.clone(), o.listener.clone()?)));
                (all.collect(), Vec::new())
            }
        };
        let poll = match self.poll.take() {
            Some(poll) => poll,
            None => {
                let poll = PollContext::new()?;
                poll.add(&shared.wake, Token::Wake)?;
                poll
            }
        };
        for (name, listener) in came {
            let fd = token(&listener);
            poll.add(&*listener, Token::Listener(fd))?;
            self.listeners.insert(fd, (name, listener));
        }
        for listener in went {
            poll.delete(&*listener)?;
            self.listeners.remove(&token(&listener));
        }
        self.poll = Some(poll);
        Ok(())
    }
}

fn token(listener: &UnixListener) -> u32 {
    listener.as_raw_fd() as u32
}

/// Gives a client its thread.
fn admit(shared: &Arc<Shared>, name: &str, socket: UnixStream) {
    let (number, disk, client) = {
        let mut state = shared.lock();
        let number = state.next;
        state.next += 1;
        if state.stopping {
            return;
        }
        let Some(offer) = state.offers.get_mut(name) else {
            return;
        };
        if offer.clients.len() >= CLIENTS_MAX {
            tracing::warn!(
                disk = name,
                "vhost-user client refused: {CLIENTS_MAX} are connected or waiting"
            );
            return;
        }
        let link = match socket.try_clone() {
            Ok(clone) => Arc::new(Link::new(name, clone)),
            Err(e) => {
                tracing::warn!(disk = name, "vhost-user client refused: {e}");
                return;
            }
        };
        let client = Arc::new(Client {
            number,
            link,
            channel: Mutex::default(),
        });
        offer.clients.push(client.clone());
        (number, offer.disk.clone(), client)
    };
    let inner = shared.clone();
    let owned = name.to_owned();
    let body = move || {
        let gone = Gone {
            shared: inner.clone(),
            name: owned,
            number,
        };
        if turn(&inner, &gone.name, number, &socket) {
            serve(&inner, disk, &client, socket);
        }
        drop(gone);
    };
    let thread = std::thread::Builder::new()
        .name("hearth-vhost-fe".to_owned())
        .spawn(body);
    if let Err(e) = thread {
        tracing::error!(
            disk = name,
            "cannot start a thread for a vhost-user client: {e}"
        );
        forget(shared, name, number);
    }
}

/// Takes a client off the list, however its thread ends.
struct Gone {
    shared: Arc<Shared>,
    name: String,
    number: u64,
}

impl Drop for Gone {
    fn drop(&mut self) {
        forget(&self.shared, &self.name, self.number);
    }
}

fn forget(shared: &Shared, name: &str, number: u64) {
    if let Some(offer) = shared.lock().offers.get_mut(name) {
        offer.clients.retain(|c| c.number != number);
    }
    shared.changed.notify_all();
}

/// Waits until nobody else is served; false if the client is gone before.
fn turn(shared: &Shared, name: &str, number: u64, socket: &UnixStream) -> bool {
    let mut state = shared.lock();
    let mut told = false;
    loop {
        let first = state.offers.get(name).and_then(|o| o.clients.first());
        match first {
            Some(first) if first.number == number => return true,
            None => return false,
            Some(_) => {}
        }
        if state.stopping || is_hung_up(socket) {
            return false;
        }
        if !told {
            tracing::warn!(
                disk = name,
                "a second vhost-user client waits for the first to go: a disk takes one at a time"
            );
            told = true;
        }
        state = wait(&shared.changed, state);
    }
}

fn is_hung_up(socket: &UnixStream) -> bool {
    let mut poll = libc::pollfd {
        fd: socket.as_raw_fd(),
        events: libc::POLLRDHUP,
        revents: 0,
    };
    // SAFETY: one pollfd, alive across the call, which does not wait.
    let n = unsafe { libc::poll(&mut poll, 1, 0) };
    n == 1 && poll.revents & (libc::POLLHUP | libc::POLLRDHUP | libc::POLLERR) != 0
}

/// Handles a client's messages until it is gone.
fn serve(shared: &Shared, disk: Arc<dyn Volume>, client: &Client, socket: UnixStream) {
    let name = disk.name().to_owned();
    let outcome = socket
        .set_nonblocking(false)
        .and_then(|()| socket.try_clone());
    let own = match outcome {
        Ok(own) => own,
        Err(e) => {
            tracing::warn!(disk = %name, "vhost-user client let go: {e}");
            return;
        }
    };
    let visitor: Arc<dyn Visitor> = match disk.admit(&Caller::of_socket(&socket), PROTOCOL) {
        Ok(visit) => visit.visitor.into(),
        // Why is in the log.
        Err(_) => return client.link.close(),
    };
    let link = client.link.clone();
    let device = Device::new(disk.clone(), visitor.clone(), link, shared.reactors.clone());
    let device = Arc::new(Mutex::new(device));
    let mut handler = BackendReqHandler::from_stream(socket, device.clone());
    let end = loop {
        match message(&mut handler, &own, &device, client) {
            Ok(true) => {}
            Ok(false) => break None,
            Err(e) => break Some(e),
        }
    };
    // A reason found by a queue was told when it was found.
    if let Some(e) = end
        && !client.link.is_broken()
    {
        tracing::error!(disk = %name, "vhost-user client cut off: {e}");
    }
    drop(handler);
    // Waits for the requests in flight; only then the client may learn that it is over, and the
    // next one may come.
    device
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .stop_all();
    client.link.close();
    drop(visitor);
}

type Handler = BackendReqHandler<Mutex<Device>>;

/// Handles one message; false at the end of the stream.
fn message(
    handler: &mut Handler,
    socket: &UnixStream,
    device: &Mutex<Device>,
    client: &Client,
) -> Result<bool, Error> {
    let lost = |e: &io::Error| {
        matches!(
            e.raw_os_error(),
            Some(libc::ECONNRESET | libc::EPIPE | libc::ESHUTDOWN)
        )
    };
    match channel::next_code(socket) {
        Ok(None) => return Ok(false),
        Ok(Some(code)) if channel::is_channel(code) => {
            let acks = {
                let device = device.lock().unwrap_or_else(PoisonError::into_inner);
                device.protocol() & vhost::vhost_user::VhostUserProtocolFeatures::REPLY_ACK.bits()
            };
            let fd = channel::take(socket, acks != 0).map_err(Error::SocketError)?;
            *client
                .channel
                .lock()
                .unwrap_or_else(PoisonError::into_inner) = Some(fd);
            return Ok(true);
        }
        Ok(Some(_)) => {}
        Err(e) if lost(&e) => return Ok(false),
        Err(e) => return Err(Error::SocketError(e)),
    }
    match handler.handle_request() {
        Ok(()) => Ok(true),
        Err(Error::Disconnected) => Ok(false),
        Err(Error::SocketBroken(e) | Error::SocketError(e)) if lost(&e) => Ok(false),
        Err(e) => Err(e),
    }
}
