//! What is done with a message: whose it is, whether it may, and who carries it out.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use hearth_io::peer::User;

use super::call;
use super::flight::{About, Also, Flight, Job, aside};
use super::link::{Answer, Link};
use super::pool::Pool;
use super::replies::{Known, Replies};
use super::writers::Writers;
use crate::access::{Access, Peer, Rights, Who};
use crate::handle::{self, Key, Sealer};
use crate::ledger::Ledger;
use crate::message::Message;
use crate::mount::{self, Ask};
use crate::nlm::locks::{Locks, Monitored};
use crate::portmap::{self, Mapping};
use crate::rpc::{self, Call, Credential, Head};
use crate::tree::{Place, Tree};
use crate::v3::{self, Args, Kind, Procedure, Status, refusal};
use crate::xdr::{Reader, Writer};
use crate::{nlm, nsm};

/// Longest write that is begun on the thread that moves bytes: it sums them up meanwhile, and copies some. A read of any length is
/// only handed on.
const AT_HAND_MAX: u64 = 64 << 10;

/// A client that called within so many seconds uses the export. Clients that are idle call less often than once a minute.
const USED_S: u64 = 3600;
/// Clients of an export that are known by their last call.
const USERS_MAX: usize = 1024;
/// For how long it is remembered that a call was refused for its source port, and not logged again.
const REFUSED_FOR: Duration = Duration::from_secs(3600);

/// A tree on offer.
pub struct Export {
    /// Under which it is mounted: `/vms`. A client may mount a directory in it as well.
    pub path: String,
    /// Makes its handles.
    pub sealer: Sealer,
    /// The number its handles carry, and its files' attributes.
    pub store: u64,
    /// What is behind it.
    pub tree: Arc<dyn Tree>,
    /// Where calls are noted that a client may repeat after this process was killed. Without it, such a repetition may fail.
    pub ledger: Option<Arc<Ledger>>,
    /// Locks of its files.
    pub locks: Arc<Locks>,
}

/// An export with its workers.
pub(super) struct Served {
    pub export: Export,
    pub pool: Arc<Pool>,
    writers: Writers,
    /// Who may come now.
    access: RwLock<Access>,
    /// When a call was refused for its source port, and whose.
    refused: Mutex<Option<(Instant, SocketAddr)>>,
    /// When each client called last, seconds since 1970.
    users: Mutex<HashMap<IpAddr, u64>>,
    /// No more notices are sent to clients.
    closed: Arc<AtomicBool>,
}

pub(super) fn now_s() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// Who sent a message.
#[derive(Clone, Copy)]
pub(super) struct Caller {
    pub peer: Peer,
    pub user: User,
    /// The address of ours that it uses.
    pub own: IpAddr,
}

impl Served {
    pub fn new(export: Export, access: Access, pool: Arc<Pool>) -> Served {
        Served {
            export,
            pool,
            writers: Writers::new(),
            access: RwLock::new(access),
            refused: Mutex::default(),
            users: Mutex::default(),
            closed: Arc::default(),
        }
    }

    /// Sends notices to the clients of the process before, so that they reclaim their locks.
    pub fn notify(&self) -> io::Result<()> {
        let locks = Arc::clone(&self.export.locks);
        let clients = locks.before().iter().copied();
        let clients: Vec<Monitored> = clients
            .filter(|m| self.rights_of(m.client).is_some())
            .collect();
        if clients.is_empty() {
            return Ok(());
        }
        let closed = Arc::clone(&self.closed);
        let send = move || nsm::notify(&locks, &clients, portmap::PORT, &closed);
        thread::Builder::new()
            .name("nfs-notices".into())
            .spawn(send)
            .map(drop)
    }

    /// Takes no more calls.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.pool.stop();
        self.export.locks.close();
    }

    fn rights_of(&self, client: IpAddr) -> Option<Rights> {
        let access = self.access.read().unwrap_or_else(PoisonError::into_inner);
        access.of(client)
    }

    /// What a call may do; `None` if it is refused.
    pub fn rights(&self, client: Peer) -> Option<Rights> {
        let rights = self.rights_of(client.address())?;
        if !client.is_anyone(rights) {
            self.note_user(client.address(), now_s());
            return Some(rights);
        }
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        if !refused.is_some_and(|(at, _)| at.elapsed() < REFUSED_FOR) {
            tracing::warn!(
                client = %client.from, export = self.export.path,
                "an NFS call was refused: a client on this host needs a privileged source port (below 1024), or the \
                 setting insecure: see `hearth datastore show`"
            );
            *refused = Some((Instant::now(), client.from));
        }
        None
    }

    /// A client called at `at`, in this run of the server or an earlier one.
    pub fn note_user(&self, client: IpAddr, at: u64) {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = users.get_mut(&client) {
            *last = at.max(*last);
            return;
        }
        if users.len() >= USERS_MAX {
            users.retain(|_, last| at.saturating_sub(*last) < USED_S);
        }
        if users.len() < USERS_MAX {
            users.insert(client, at);
        }
    }

    /// Clients that called within the last hour and have not unmounted since, with the time of the last call.
    pub fn users(&self) -> BTreeMap<IpAddr, u64> {
        let now = now_s();
        let users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        let recent = users
            .iter()
            .filter(|(_, last)| now.saturating_sub(**last) < USED_S);
        recent.map(|(client, last)| (*client, *last)).collect()
    }

    fn forget_user(&self, client: IpAddr) {
        self.users
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&client);
    }

    /// Who was refused for its source port lately.
    pub fn refused(&self) -> Option<SocketAddr> {
        let refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        refused
            .filter(|(at, _)| at.elapsed() < REFUSED_FOR)
            .map(|(_, from)| from)
    }

    /// A file is being written by a client that calls itself so.
    fn note_writer(&self, file: &Key, client: IpAddr, machine: &[u8]) {
        if let Some((one, other)) = self.writers.note(file, client, machine) {
            let names = [one.to_string(), other.to_string()];
            self.export.tree.written_by_two(file, names);
        }
    }
}

/// See the module.
pub(super) struct Service {
    exports: RwLock<Vec<Arc<Served>>>,
    pub replies: Arc<Replies>,
    /// Locks can be granted: clients find us, and tell us of their restarts.
    pub locks: Arc<AtomicBool>,
    /// What the portmapper says.
    mappings: RwLock<Vec<Mapping>>,
}

/// What becomes of a message.
pub(super) enum Taken {
    /// It is answered, now or later; the flight, if there is one, has to be watched.
    Answered(Option<Arc<Flight>>),
    /// Its sender does not speak this protocol.
    Nonsense,
}

/// What a call needs of a file that it could be carried out on without a worker; `None` if it needs one in any case.
fn at_hand(args: &Args<'_>) -> Option<Option<Place>> {
    match args {
        Args::Read { .. } => Some(None),
        Args::Write {
            offset,
            stable,
            data,
            ..
        } if data.len() as u64 <= AT_HAND_MAX => Some(Some(Place {
            offset: *offset,
            len: data.len() as u64,
            stable: *stable,
        })),
        _ => None,
    }
}

impl Service {
    pub fn new() -> Service {
        Service {
            exports: RwLock::default(),
            replies: Arc::default(),
            locks: Arc::default(),
            mappings: RwLock::default(),
        }
    }

    pub fn exports(&self) -> Vec<Arc<Served>> {
        self.exports
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    pub fn add(&self, served: Served) {
        self.exports
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .push(Arc::new(served));
    }

    pub fn remove(&self, store: u64) -> Option<Arc<Served>> {
        let mut exports = self.exports.write().unwrap_or_else(PoisonError::into_inner);
        let at = exports.iter().position(|s| s.export.store == store)?;
        Some(exports.remove(at))
    }

    /// False if there is no such export.
    pub fn set_access(&self, store: u64, access: Access) -> bool {
        let exports = self.exports.read().unwrap_or_else(PoisonError::into_inner);
        let served = exports.iter().find(|s| s.export.store == store);
        if let Some(served) = served {
            served
                .export
                .locks
                .retain(|client| access.of(client).is_some());
            *served
                .access
                .write()
                .unwrap_or_else(PoisonError::into_inner) = access;
            *served
                .refused
                .lock()
                .unwrap_or_else(PoisonError::into_inner) = None;
        }
        served.is_some()
    }

    pub fn set_mappings(&self, mappings: Vec<Mapping>) {
        *self
            .mappings
            .write()
            .unwrap_or_else(PoisonError::into_inner) = mappings;
    }

    pub fn mappings(&self) -> Vec<Mapping> {
        self.mappings
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Some export is for this address.
    pub fn knows(&self, client: IpAddr) -> bool {
        let exports = self.exports.read().unwrap_or_else(PoisonError::into_inner);
        exports.iter().any(|s| s.rights_of(client).is_some())
    }

    /// Answers a question to the portmapper, or a notice of a client's restart, that came in a datagram.
    pub fn datagram(&self, message: &[u8], from: SocketAddr) -> Option<Writer> {
        let mut r = Reader::new(message);
        match Call::read(&mut r).ok()? {
            Head::Call(call) if call.program == portmap::PROGRAM => {
                Some(portmap::answer(&call, &mut r, &self.mappings()))
            }
            Head::Call(call) if call.program == nsm::PROGRAM => {
                Some(self.nsm(Peer::of(from), &call, &mut r))
            }
            Head::Call(call) => Some(rpc::no_program(call.xid)),
            _ => None,
        }
    }

    /// Takes a message that a client sent.
    pub fn take(&self, link: &Arc<Link>, caller: &Caller, message: Message) -> Taken {
        let peer = caller.peer;
        let mut r = Reader::new(&message);
        let now = |answer: Writer| {
            link.send(Answer::from(answer));
            Taken::Answered(None)
        };
        let call = match Call::read(&mut r) {
            Ok(Head::Call(call)) => call,
            Ok(Head::WrongVersion(xid)) => return now(rpc::wrong_rpc_version(xid)),
            Ok(Head::BadCredential(xid)) => return now(rpc::bad_credential(xid)),
            Err(_) => return Taken::Nonsense,
        };
        match call.program {
            v3::PROGRAM => {}
            mount::PROGRAM => return self.mount(link, peer, &call, &mut r),
            nlm::PROGRAM => return self.nlm(link, caller, &call, &mut r),
            nsm::PROGRAM => return now(self.nsm(peer, &call, &mut r)),
            portmap::PROGRAM => return now(portmap::answer(&call, &mut r, &self.mappings())),
            _ => return now(rpc::no_program(call.xid)),
        }
        if call.version != v3::VERSION {
            return now(rpc::wrong_version(call.xid, v3::VERSION, v3::VERSION));
        }
        let Some(procedure) = Procedure::of(call.procedure) else {
            return now(rpc::no_procedure(call.xid));
        };
        if procedure == Procedure::Null {
            return now(rpc::success(call.xid));
        }
        if matches!(call.credential, Credential::Unknown(_)) {
            return now(rpc::weak_credential(call.xid));
        }
        let args_at = message.len() - r.rest().len();
        let Ok(args) = Args::read(procedure, &mut r) else {
            return now(rpc::garbage(call.xid));
        };
        let data_end = message.len() - r.rest().len();
        let no = |status| now(refusal(call.xid, procedure, status));
        let (served, rights, spot) = match self.judge(&args, peer) {
            Ok(judged) => judged,
            Err(status) => return no(status),
        };
        let client = peer.address();
        if matches!(args, Args::Read { .. } | Args::Write { .. }) && link.is_overdue() {
            return no(Status::JukeBox);
        }
        if matches!(args, Args::Write { .. }) {
            served.note_writer(&spot, client, rpc::machine(&message));
        }
        let cost = message.allocated() + call::expected(&args);
        let at_hand = at_hand(&args);
        let slip = procedure
            .changes()
            .then(|| self.replies.slip(client, call.xid, &args, &message));
        let about = About {
            xid: call.xid,
            procedure: Some(procedure),
            spot,
            slip,
            later: Vec::new(),
        };
        let who = Who::of(&call.credential, rights);
        let job: Job = {
            let served = Arc::clone(&served);
            let whole = call::Whole {
                message,
                args_at,
                data_end,
                procedure,
            };
            Box::new(move |flight, at_hand| {
                call::carry_out(&served.export, who, rights, whole, flight, at_hand);
            })
        };
        let make = || {
            Flight::new(
                about,
                job,
                Arc::clone(link),
                link.call(cost),
                Arc::clone(&served.pool),
                Arc::clone(&self.replies),
            )
        };
        let flight = match slip {
            None => make(),
            Some(slip) => match self.replies.take(&slip, Instant::now(), make) {
                (Known::New, Some(flight)) => flight,
                (Known::New, None) => return no(Status::JukeBox),
                (Known::Hangs(flight), _) => {
                    let later = refusal(call.xid, procedure, Status::JukeBox);
                    flight.put_off(link, Answer::from(later));
                    return Taken::Answered(None);
                }
                (Known::Ended(answer), _) => {
                    link.send(Answer::from(answer));
                    return Taken::Answered(None);
                }
                (Known::Taken(answer, noted), _) => {
                    match noted {
                        None => link.send(Answer::from(answer)),
                        Some(noted) => {
                            let link = Arc::clone(link);
                            aside(move || {
                                let well = rpc::result(&answer) == Some(0);
                                noted.ledger.answered(&noted.known, call.xid, well);
                                link.send(Answer::from(answer));
                            });
                        }
                    }
                    return Taken::Answered(None);
                }
                (Known::UnderWay(flight), _) => {
                    match flight.also(link) {
                        Also::Sent => {}
                        Also::Hangs => link.send(flight.later()),
                        Also::Ended => link.send(
                            self.replies
                                .of(&slip)
                                .map_or_else(|| flight.later(), Answer::from),
                        ),
                    }
                    return Taken::Answered(None);
                }
            },
        };
        // Without waking a worker, where nobody has to wait.
        let file = at_hand
            .filter(|_| !served.pool.holds_back(&flight))
            .and_then(|place| served.export.tree.at_hand(&spot, place));
        if let Some(file) = file {
            if let Some(job) = flight.begin() {
                job(&flight, Some(file));
            }
            return Taken::Answered(Some(flight));
        }
        if served.pool.submit(Arc::clone(&flight)) {
            Taken::Answered(Some(flight))
        } else {
            flight.expire();
            Taken::Answered(None)
        }
    }

    /// Whose files a call is about, and what its client may do with them.
    fn judge(&self, args: &Args<'_>, client: Peer) -> Result<(Arc<Served>, Rights, Key), Status> {
        let (first, second) = args.handles();
        let store = handle::store(first).ok_or(Status::BadHandle)?;
        let served = {
            let exports = self.exports.read().unwrap_or_else(PoisonError::into_inner);
            let served = exports.iter().find(|s| s.export.store == store);
            // Of a datastore that is served no more, or was another's.
            Arc::clone(served.ok_or(Status::Stale)?)
        };
        let rights = served.rights(client).ok_or(Status::Access)?;
        let key = served.export.sealer.open(first).ok_or(Status::BadHandle)?;
        if let Some(second) = second {
            if handle::store(second) != Some(store) {
                return Err(Status::XDev);
            }
            served.export.sealer.open(second).ok_or(Status::BadHandle)?;
        }
        if args.procedure().changes() && !rights.write {
            return Err(Status::RoFs);
        }
        Ok((served, rights, key))
    }

    fn mount(&self, link: &Arc<Link>, client: Peer, call: &Call, args: &mut Reader<'_>) -> Taken {
        let now = |answer: Writer| {
            link.send(Answer::from(answer));
            Taken::Answered(None)
        };
        let xid = call.xid;
        if call.version != mount::VERSION {
            return now(rpc::wrong_version(xid, mount::VERSION, mount::VERSION));
        }
        let path = match Ask::read(call.procedure, args) {
            None => return now(rpc::no_procedure(xid)),
            Some(Err(_)) => return now(rpc::garbage(xid)),
            Some(Ok(Ask::Unmount(path))) => {
                if let Some((served, _)) = self.find(path) {
                    served.forget_user(client.address());
                }
                return now(rpc::success(xid));
            }
            Some(Ok(Ask::UnmountAll)) => {
                for served in self.exports() {
                    served.forget_user(client.address());
                }
                return now(rpc::success(xid));
            }
            Some(Ok(Ask::Null)) => return now(rpc::success(xid)),
            Some(Ok(Ask::Dump)) => return now(mount::nothing(xid)),
            Some(Ok(Ask::Exports)) => return now(mount::exports(xid, self.list(client.address()))),
            Some(Ok(Ask::Mount(path))) => path,
        };
        let Some((served, below)) = self.find(path) else {
            return now(mount::mounted(xid, Err(Status::NoEnt)));
        };
        if served.rights(client).is_none() {
            return now(mount::mounted(xid, Err(Status::Access)));
        }
        let about = About {
            xid,
            procedure: None,
            spot: served.export.tree.root(),
            slip: None,
            later: mount::mounted(xid, Err(Status::Io)).into_vec(),
        };
        let job: Job = {
            let served = Arc::clone(&served);
            Box::new(move |flight, _| {
                let found = descend(&*served.export.tree, &below);
                let handle = found.map(|key| served.export.sealer.seal(&key));
                flight.finish(Answer::from(mount::mounted(
                    xid,
                    handle.as_deref().map_err(|s| *s),
                )));
            })
        };
        let flight = Flight::new(
            about,
            job,
            Arc::clone(link),
            link.call(1024),
            Arc::clone(&served.pool),
            Arc::clone(&self.replies),
        );
        if served.pool.submit(Arc::clone(&flight)) {
            Taken::Answered(Some(flight))
        } else {
            flight.expire();
            Taken::Answered(None)
        }
    }

    /// What a client may mount.
    fn list(&self, client: IpAddr) -> Vec<(String, Vec<String>)> {
        let mut list = Vec::new();
        for served in self.exports() {
            if served.rights_of(client).is_some() {
                let access = served.access.read();
                let networks = access
                    .unwrap_or_else(PoisonError::into_inner)
                    .networks()
                    .map(ToString::to_string)
                    .collect();
                list.push((served.export.path.clone(), networks));
            }
        }
        list
    }

    /// The export a path lies in (of several, the one with the longest name), and the names below it.
    fn find(&self, path: &[u8]) -> Option<(Arc<Served>, Vec<Vec<u8>>)> {
        let asked = components(path);
        let exports = self.exports();
        let fits = exports.iter().filter_map(|served| {
            let own = components(served.export.path.as_bytes());
            asked.starts_with(&own).then_some((served, own.len()))
        });
        let (served, depth) = fits.max_by_key(|(_, depth)| *depth)?;
        let below = asked[depth..].iter().map(|name| name.to_vec()).collect();
        Some((Arc::clone(served), below))
    }
}

fn components(path: &[u8]) -> Vec<&[u8]> {
    path.split(|b| *b == b'/')
        .filter(|name| !name.is_empty() && *name != b".")
        .collect()
}

/// Goes down to a directory that is mounted. What may be done in it, its own mode says.
fn descend(tree: &dyn Tree, below: &[Vec<u8>]) -> Result<Key, Status> {
    let root = Who::root();
    let mut at = tree.root();
    for name in below {
        call::check_name(name)?;
        at = tree.lookup(&root, &at, name)?.key;
    }
    let kind = tree.attributes(&at)?.kind;
    if kind == Kind::Directory {
        Ok(at)
    } else {
        Err(Status::NotDir)
    }
}
