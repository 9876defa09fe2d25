//! Datastores: directories that are served whole over NFS.
//!
//! What a datastore is (its directory, who may come, where it listens) is in the pool's registry, beside
//! the disks. What its clients have of it must outlive the flash: a hypervisor keeps the handles of a
//! datastore's files for months, so the number and key of which they are made lie in the state directory, by
//! the datastore's serial number, and neither on flash nor in the directory.
//!
//! One server listens on each address, for all datastores on it. A datastore that cannot be served (its
//! directory is not mounted, its address is taken) is listed with the reason, and tried again
//! at the next start or when it is changed.
//!
//! Its large files are disks of the pool (`files.rs`), also while nobody can use the datastore: what waits on flash is
//! written back, if only its directory is there.

mod files;
mod gains;
mod matching;
mod trees;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hearth_datastore::rules::Rules;
use hearth_datastore::store::{Datastore, Pinned};
use hearth_datastore::twin::Twin;
use hearth_engine::api::DiskId;
use hearth_format::datastore::DatastoreRecord;
use hearth_format::{Uuid, check_name};
use hearth_io::BLOCK;
use hearth_nfs::access::{Access, Network, Rights};
use hearth_nfs::handle::Sealer;
use hearth_nfs::identity::Identity;
use hearth_nfs::ledger::Ledger;
use hearth_nfs::nlm::locks::Locks;
use hearth_nfs::portmap;
use hearth_nfs::rpcbind::{self, Registration};
use hearth_nfs::server::{Config, Export, Server};

use super::apart::is_below;
use super::{Daemon, lock};
use crate::api::datastores::{
    DatastoreAdd, DatastoreClient, DatastoreInfo, DatastoreSet, DatastoreUser, FileReport, PinState,
};
use crate::api::stats::Counters;
use crate::api::types::fields;
use crate::claims::Claim;
use crate::error::{Error, Kind, Result};
use crate::pool::format_error;
use crate::settings::SettingsShown;
use crate::size::human;

/// Clients named when a datastore is in use.
const NAMED_MAX: usize = 4;
/// Where NFS is expected.
const PORT: u16 = 2049;
/// How long a removal waits for what is written back while the datastore is in use, and when it is not any more.
const FLUSH_TIME: Duration = Duration::from_secs(60);
const LAST_FLUSH_TIME: Duration = Duration::from_secs(30);
/// Between two looks whether that is done.
const FLUSH_PACE: Duration = Duration::from_millis(50);
/// What they keep is in a directory of this name in the state directory.
const DATASTORES: &str = "datastores";
/// Most datastores of a pool: each has threads of its own.
const STORES_MAX: usize = 32;

/// All datastores.
pub(super) struct Stores {
    state_dir: PathBuf,
    /// Whoever adds, changes or removes one has this meanwhile.
    turn: Mutex<()>,
    by_name: Mutex<BTreeMap<String, Store>>,
    servers: Mutex<BTreeMap<SocketAddr, Arc<Listening>>>,
    /// The files that are disks.
    pub(super) numbers: files::Numbers,
    /// What is known of files that are not served any more.
    rested: Mutex<gains::Rested>,
}

/// One datastore.
struct Store {
    record: DatastoreRecord,
    /// Its directory, if that is there.
    opened: Option<Opened>,
    served: std::result::Result<Served, Error>,
}

/// A datastore whose directory is there.
#[derive(Clone)]
struct Opened {
    files: Arc<Datastore>,
    disks: Arc<files::Files>,
    identity: Arc<Identity>,
    /// Its directories, by device and inode.
    roots: Vec<(u64, u64)>,
    /// Its two directories, if it has two.
    twin: Option<Twin>,
}

/// The directories of a datastore.
fn directories(record: &DatastoreRecord) -> impl Iterator<Item = &Path> {
    let all = [&record.directory, &record.mirror].into_iter();
    all.filter(|path| !path.is_empty()).map(Path::new)
}

fn root_of(directory: &Path) -> Option<(u64, u64)> {
    let meta = std::fs::metadata(directory).ok()?;
    Some((meta.dev(), meta.ino()))
}

/// A datastore that clients can use.
struct Served {
    /// The number its handles carry.
    number: u64,
    on: Arc<Listening>,
}

/// A server, as long as a datastore is on it.
struct Listening {
    server: Server,
    /// Where the host has a portmapper of its own, which clients elsewhere ask.
    registered: Option<Registration>,
}

impl Listening {
    /// A portmapper tells clients its port.
    fn is_mapped(&self) -> bool {
        let is_registered = |r: &Registration| r.refused().is_none();
        self.server.portmap().is_some() || self.registered.as_ref().is_some_and(is_registered)
    }

    /// Clients can lock files.
    fn has_locks(&self) -> bool {
        self.server.locks().load(Ordering::Relaxed)
    }

    /// Why no portmapper knows of it, although clients elsewhere will ask one.
    fn unknown(&self) -> Option<String> {
        let why = self.registered.as_ref()?.refused()?;
        let port = self
            .server
            .addresses()
            .first()
            .map_or(PORT, SocketAddr::port);
        Some(format!(
            "no portmapper tells clients the port ({why}); ESXi cannot mount it so, others need nolock,port={port},mountport={port}"
        ))
    }
}

/// The directories of datastores there are in a state directory.
pub(crate) fn kept(state_dir: &Path) -> BTreeSet<PathBuf> {
    let all = std::fs::read_dir(state_dir.join(DATASTORES));
    let all = all.into_iter().flatten().flatten();
    all.map(|entry| entry.path()).collect()
}

/// Removes the others.
pub(crate) fn keep_only(state_dir: &Path, kept: &BTreeSet<PathBuf>) {
    for new in self::kept(state_dir).difference(kept) {
        if let Err(e) = std::fs::remove_dir_all(new) {
            tracing::warn!("{} cannot be removed: {e}", new.display());
        }
    }
    if kept.is_empty() {
        // Only if it is empty; who made it, is not known.
        let _ = std::fs::remove_dir(state_dir.join(DATASTORES));
    }
}

impl Stores {
    pub(super) fn new(state_dir: Option<PathBuf>) -> Stores {
        Stores {
            state_dir: state_dir.unwrap_or_else(crate::rundir::default_state_dir),
            turn: Mutex::default(),
            by_name: Mutex::default(),
            servers: Mutex::default(),
            numbers: files::Numbers::default(),
            rested: Mutex::default(),
        }
    }

    /// Those whose directories are there.
    fn opened(&self) -> Vec<Opened> {
        let stores = lock(&self.by_name);
        let opened = stores.values().filter_map(|store| store.opened.clone());
        opened.collect()
    }

    /// Where is kept what must outlive the flash.
    pub(super) fn state_dir(&self) -> &Path {
        &self.state_dir
    }

    /// Where is kept what clients have of a datastore.
    fn state(&self, record: &DatastoreRecord) -> PathBuf {
        let serial = record.serial.to_string();
        self.state_dir.join(DATASTORES).join(serial)
    }

    /// The server on an address, started if there is none.
    fn listening(&self, at: SocketAddr) -> Result<Arc<Listening>> {
        let mut servers = lock(&self.servers);
        if let Some(listening) = servers.get(&at) {
            return Ok(listening.clone());
        }
        let listening = Arc::new(listen(at)?);
        servers.insert(at, listening.clone());
        Ok(listening)
    }

    /// Stops servers nothing is on any more.
    fn tidy(&self) {
        let mut servers = lock(&self.servers);
        let idle: Vec<SocketAddr> = servers
            .iter()
            .filter(|(_, listening)| Arc::strong_count(listening) == 1)
            .map(|(at, _)| *at)
            .collect();
        let gone: Vec<_> = idle.iter().filter_map(|at| servers.remove(at)).collect();
        drop(servers);
        // Waits for calls under way.
        drop(gone);
    }
}

/// Starts a server, and tells a portmapper of it if clients elsewhere will ask one.
fn listen(at: SocketAddr) -> Result<Listening> {
    let start = |portmap: Option<SocketAddr>| {
        Server::start(&Config {
            listen: vec![at],
            portmap,
            // Clients on this host have a lock manager in its kernel, which takes the program's number.
            locks: !at.ip().is_loopback(),
            ..Config::default()
        })
    };
    let refused = |e: std::io::Error| {
        Error::unavailable(
            format!("cannot listen on {at}: {e}"),
            if e.kind() == std::io::ErrorKind::AddrInUse {
                "stop the other NFS server of this host, or choose another port with --listen"
            } else {
                "choose an address of this host with --listen"
            },
        )
    };
    if at.ip().is_loopback() {
        return Ok(Listening {
            server: start(None).map_err(refused)?,
            registered: None,
        });
    }
    if let Ok(server) = start(Some(SocketAddr::new(at.ip(), portmap::PORT))) {
        return Ok(Listening {
            server,
            registered: None,
        });
    }
    // The port of portmappers is taken, or not ours to take.
    let server = start(None).map_err(refused)?;
    let (at, mappings, locks) = (rpcbind::ADDRESS, server.mappings(), server.locks());
    let registered = Registration::keep(at, &mappings, locks, rpcbind::EVERY).map_err(refused)?;
    Ok(Listening {
        server,
        registered: Some(registered),
    })
}

/// An address, or an address and a port.
fn parse_listen(text: &str) -> Result<SocketAddr> {
    let bare = text.trim_start_matches('[').trim_end_matches(']');
    text.parse()
        .or_else(|_| bare.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, PORT)))
        .map_err(|_| {
            Error::invalid(
                format!("\"{text}\" is no address to listen on"),
                "give an address of this host, such as 192.0.2.1, or an address and port, such as 127.0.0.1:2049",
            )
        })
}

/// Those of the registry. What a newer version allows somebody, this one does not.
fn clients_of(record: &DatastoreRecord) -> impl Iterator<Item = DatastoreClient> {
    record.clients.iter().filter_map(|text| text.parse().ok())
}

/// This host may come, without being root, and from privileged ports only: any account could say that it is another one.
fn own_host() -> Vec<DatastoreClient> {
    vec![
        DatastoreClient::new("127.0.0.0/8"),
        DatastoreClient::new("::1"),
    ]
}

fn check_clients(clients: &[DatastoreClient]) -> Result<Vec<String>> {
    for client in clients {
        let network = client.network.parse::<Network>();
        network.map_err(|e| Error::of(Kind::Invalid, e.fault()))?;
        // What is kept must be read again; over the API it comes in parts.
        let read = client.to_string().parse::<DatastoreClient>();
        read.map_err(|fault| Error::of(Kind::Invalid, fault))?;
    }
    Ok(clients.iter().map(ToString::to_string).collect())
}

fn access(record: &DatastoreRecord) -> Access {
    clients_of(record).fold(Access::nobody(), |access, client| {
        match client.network.parse() {
            Ok(network) => access.allow(
                network,
                Rights {
                    write: client.write && !record.read_only,
                    root: client.root,
                    all_squash: client.all_squash,
                    anonymous: (client.anonuid, client.anongid),
                    insecure: client.insecure,
                },
            ),
            Err(_) => access,
        }
    })
}

/// What is said when the threads of a datastore cannot be started.
fn no_threads(record: &DatastoreRecord) -> impl Fn(std::io::Error) -> Error {
    |e| {
        Error::unavailable(
            format!("cannot start threads for datastore {}: {e}", record.name),
            "check the limit on processes",
        )
    }
}

/// Two directories of which one is in the other, or the same.
fn overlap(a: &Path, b: &Path) -> bool {
    a.starts_with(b) || b.starts_with(a)
}

impl Daemon {
    /// Knows the datastores of the registry, so that nobody is told there is none while they are being opened.
    pub fn note_datastores(&self) {
        let mut stores = lock(&self.stores.by_name);
        if !stores.is_empty() {
            return;
        }
        let records = match lock(&self.pool).registry().datastores() {
            Ok(records) => records,
            Err(e) => {
                let error = format_error(Path::new("the registry"), &e);
                tracing::error!("no datastore is served: {error}");
                return;
            }
        };
        stores.extend(records.into_iter().map(|record| {
            let store = Store {
                record,
                opened: None,
                served: Err(not_yet()),
            };
            (store.record.name.clone(), store)
        }));
    }

    /// Serves every datastore of the registry that can be.
    pub fn open_datastores(self: &Arc<Daemon>) {
        let _turn = lock(&self.stores.turn);
        self.find_datastores();
        let found: Vec<_> = lock(&self.stores.by_name)
            .values()
            .filter(|store| store.served.is_err())
            .map(|store| (store.record.clone(), store.opened.clone()))
            .collect();
        for (record, opened) in found {
            let served = opened.map(|opened| self.serve_datastore(&record, &opened));
            let mut stores = lock(&self.stores.by_name);
            let Some(store) = stores.get_mut(&record.name) else {
                continue;
            };
            if let Some(served) = served {
                store.served = served;
            }
            if let Err(e) = &store.served {
                self.events.tell(hearth_events::Event::DatastoreUnserved {
                    datastore: record.name.clone(),
                    why: e.to_string(),
                });
            }
        }
    }

    /// Opens the directory of every datastore of the registry. Nobody is served yet.
    fn find_datastores(self: &Arc<Daemon>) {
        self.note_datastores();
        let missing: Vec<DatastoreRecord> = lock(&self.stores.by_name)
            .values()
            .filter(|store| store.opened.is_none())
            .map(|store| store.record.clone())
            .collect();
        for record in missing {
            let opened = self.open_known(&record);
            if let Some(store) = lock(&self.stores.by_name).get_mut(&record.name) {
                match opened {
                    Ok(opened) => store.opened = Some(opened),
                    Err(e) => store.served = Err(e),
                }
            }
        }
    }

    /// Takes no more calls; those under way are answered.
    pub fn close_datastores(&self) {
        let _turn = lock(&self.stores.turn);
        for store in lock(&self.stores.by_name).values_mut() {
            if let Ok(served) = std::mem::replace(&mut store.served, Err(not_yet())) {
                served.on.server.withdraw(served.number);
            }
        }
        self.stores.tidy();
    }

    /// Ends what goes on in the background. Files that are disks stay so.
    pub(super) fn still_datastores(&self) {
        for opened in self.stores.opened() {
            opened.files.stop();
            if let Some(twin) = &opened.twin {
                twin.settle();
            }
        }
    }

    /// Makes every file a disk that has something only on flash, so that it can be written back.
    pub(super) fn open_dirty_files(self: &Arc<Daemon>) {
        self.find_datastores();
        for opened in self.stores.opened() {
            opened.files.open_dirty();
        }
    }

    /// Refuses if a file has something only on flash and is not among the `open` disks: it cannot be written back.
    pub(super) fn check_files_open(&self, open: &[DiskId]) -> Result<()> {
        let pool = lock(&self.pool);
        let files = pool.registry().disks.iter().filter(|r| r.is_file());
        let owed = |id| self.engine.status(id).map_or(0, |s| s.owed_bytes());
        let mut left =
            files.filter(|r| !r.is_flash_only() && !open.contains(&r.id) && owed(r.id) > 0);
        let left = left
            .next()
            .map(|file| (owed(file.id), file.datastore.clone()));
        drop(pool);
        let Some((owed, store)) = left else {
            return Ok(());
        };
        let what = format!(
            "{} of a file of datastore {store} are only on flash, and it cannot be opened",
            human(owed)
        );
        Err(match self.opened_datastore(&store) {
            Err(e) => Error {
                what: format!("{what}: {}", e.what),
                ..e
            },
            Ok(_) => Error::unavailable(
                what,
                "see whether the datastore's directory is there and mounted",
            ),
        })
    }

    /// Opens a datastore that the pool names, if this host's administrator has confirmed it.
    fn open_known(self: &Arc<Daemon>, record: &DatastoreRecord) -> Result<Opened> {
        lock(&self.pool).check_confirmed(Some(Claim::of_datastore(record)))?;
        self.open_datastore(record)
    }

    fn open_datastore(self: &Arc<Daemon>, record: &DatastoreRecord) -> Result<Opened> {
        let state = self.stores.state(record);
        let ground = trees::open(self, record, state)?;
        let refused = no_threads(record);
        let disks = Arc::new(files::Files::new(self, record).map_err(&refused)?);
        let files = Datastore::open(
            ground.under,
            disks.clone(),
            &self.reactors,
            Rules::default(),
        );
        Ok(Opened {
            files: Arc::new(files.map_err(refused)?),
            disks,
            identity: Arc::new(ground.identity),
            roots: directories(record).filter_map(root_of).collect(),
            twin: ground.twin,
        })
    }

    fn serve_datastore(&self, record: &DatastoreRecord, opened: &Opened) -> Result<Served> {
        let at = parse_listen(&record.listen)?;
        let on = self.stores.listening(at)?;
        let identity = &opened.identity;
        let export = Export {
            path: format!("/{}", record.name),
            sealer: Sealer::new(identity.store, &identity.secret),
            store: identity.store,
            tree: opened.files.tree(),
            ledger: Ledger::beside(&self.stores.state(record), identity),
            locks: Arc::new(Locks::open(&self.stores.state(record))),
        };
        let offered = on.server.offer(export, access(record));
        offered.map_err(no_threads(record))?;
        for (client, at) in self.client_record.users_of(&record.name) {
            on.server.note_user(identity.store, client, at);
        }
        Ok(Served {
            number: identity.store,
            on,
        })
    }

    /// Refuses a directory that cannot be a datastore beside what there is.
    fn check_directory(&self, name: &str, directory: &Path) -> Result<PathBuf> {
        let invalid = |e: std::io::Error| {
            Error::invalid(
                format!("cannot use {}: {e}", directory.display()),
                "give a directory of this host",
            )
        };
        let real = directory.canonicalize().map_err(invalid)?;
        if !real.is_dir() {
            return Err(Error::invalid(
                format!("{} is no directory", directory.display()),
                "give the directory that holds the virtual machines",
            ));
        }
        if real.to_str().is_none() {
            return Err(Error::invalid(
                "the directory's name is no UTF-8",
                "rename it, or mount it elsewhere",
            ));
        }
        let flash: Vec<_> = lock(&self.pool).flash().iter().cloned().collect();
        let holds = |path: &Path| path.canonicalize().is_ok_and(|p| p.starts_with(&real));
        let own = [self.stores.state_dir.as_path(), &self.images];
        let mut own = flash.iter().map(|device| device.path()).chain(own);
        if let Some(own) = own.find(|path| holds(path)) {
            return Err(Error::refused(
                format!(
                    "{} holds {}, which is Hearth's own and must not be in a client's reach",
                    directory.display(),
                    own.display()
                ),
                "give a directory that holds virtual machines only",
            ));
        }
        if let Some((disk, file)) = root_of(&real).and_then(|root| self.disk_below(root)) {
            return Err(Error::conflict(
                format!(
                    "{} holds {}, the data of disk {disk}, which clients of a datastore could write",
                    directory.display(),
                    file.display()
                ),
                format!("give another directory, or `hearth disk remove {disk}` first"),
            ));
        }
        let stores = lock(&self.stores.by_name);
        let near = stores.values().find(|store| {
            let record = &store.record;
            record.name != name && directories(record).any(|path| overlap(path, &real))
        });
        if let Some(near) = near {
            return Err(Error::conflict(
                format!(
                    "{} and {}, the directory of datastore {}, have files in common",
                    directory.display(),
                    near.record.directory,
                    near.record.name
                ),
                "give another directory; clients can also mount one that is inside a datastore",
            ));
        }
        Ok(real)
    }

    /// Refuses a file that a datastore serves: its clients and a disk would undo each other's writes.
    pub(super) fn check_not_in_datastore(&self, file: &Path) -> Result<()> {
        let roots = |store: &Store| {
            let opened = store.opened.as_ref();
            opened.map_or_else(Vec::new, |opened| opened.roots.clone())
        };
        // Looking at the file may hang, so the lock is not held for it.
        let stores: Vec<_> = lock(&self.stores.by_name)
            .values()
            .map(|store| (store.record.clone(), roots(store)))
            .collect();
        for (record, roots) in stores {
            // A directory that was not there need not answer.
            let unknown = roots.len() < directories(&record).count();
            if roots.iter().any(|root| is_below(file, *root))
                || unknown && directories(&record).any(|dir| file.starts_with(dir))
            {
                return Err(Error::conflict(
                    format!(
                        "{} is a file of datastore {}, whose clients can write it",
                        file.display(),
                        record.name
                    ),
                    format!(
                        "move it out of {}, or remove the datastore first",
                        record.directory
                    ),
                ));
            }
        }
        Ok(())
    }

    pub(super) fn begin_datastore(self: &Arc<Daemon>, add: DatastoreAdd) -> Result<DatastoreInfo> {
        let _turn = lock(&self.stores.turn);
        if let Err(fault) = check_name(&add.name) {
            return Err(Error::invalid(
                format!("\"{}\" cannot be a datastore's name: {fault}", add.name),
                "choose another name with --name",
            ));
        }
        let stores = lock(&self.stores.by_name);
        if stores.contains_key(&add.name) {
            return Err(Error::conflict(
                format!("there is already a datastore named {}", add.name),
                "choose another name with --name",
            ));
        }
        if stores.len() >= STORES_MAX {
            return Err(Error::conflict(
                format!("there are {STORES_MAX} datastores already"),
                "remove one first",
            ));
        }
        drop(stores);
        let directory = self.check_directory(&add.name, Path::new(&add.directory))?;
        let mirror = match &add.mirror {
            None => String::new(),
            Some(mirror) => {
                let mirror = self.check_directory(&add.name, Path::new(mirror))?;
                if overlap(&mirror, &directory) {
                    return Err(Error::invalid(
                        format!(
                            "{} and {} have files in common",
                            directory.display(),
                            mirror.display()
                        ),
                        "give two directories, on two disks",
                    ));
                }
                mirror.display().to_string()
            }
        };
        let clients = add.clients.unwrap_or_else(own_host);
        let listen = match &add.listen {
            Some(text) => parse_listen(text)?,
            None => SocketAddr::new(Ipv4Addr::LOCALHOST.into(), PORT),
        };
        let record = DatastoreRecord {
            name: add.name,
            directory: directory.display().to_string(),
            serial: Uuid::new_v4(),
            listen: listen.to_string(),
            clients: check_clients(&clients)?,
            read_only: add.read_only,
            hold: false,
            rules: Vec::new(),
            mirror,
            trees: Vec::new(),
            unknown: Vec::new(),
        };
        trees::begin(&record)?;
        // Served first: what cannot be is not added.
        let tried = self.open_datastore(&record).and_then(|opened| {
            let served = self.serve_datastore(&record, &opened)?;
            self.store_datastore(&record).inspect_err(|_| {
                served.on.server.withdraw(served.number);
            })?;
            Ok((opened, served))
        });
        let (opened, served) = match tried {
            Ok(tried) => tried,
            Err(e) => {
                self.stores.tidy();
                // Nobody has a handle yet.
                let _ = std::fs::remove_dir_all(self.stores.state(&record));
                trees::undo(&record);
                return Err(e);
            }
        };
        let name = record.name.clone();
        let store = Store {
            record,
            opened: Some(opened),
            served: Ok(served),
        };
        lock(&self.stores.by_name).insert(name.clone(), store);
        self.datastore_info(&name)
    }

    fn store_datastore(&self, record: &DatastoreRecord) -> Result<()> {
        lock(&self.pool).change(|registry| {
            let mut record = record.clone();
            // Which trees are current is told by those who know.
            let known = registry.datastores().unwrap_or_default();
            if let Some(known) = known.into_iter().find(|known| known.name == record.name) {
                record.trees = known.trees;
            }
            let stored = registry.put_datastore(&record);
            stored.map_err(|e| format_error(Path::new(&record.directory), &e))
        })
    }

    pub(super) fn change_datastore(
        self: &Arc<Daemon>,
        name: &str,
        set: DatastoreSet,
    ) -> Result<DatastoreInfo> {
        let _turn = lock(&self.stores.turn);
        let before = self.datastore_record(name)?;
        let mut record = before.clone();
        if let Some(listen) = &set.listen {
            record.listen = parse_listen(listen)?.to_string();
        }
        if let Some(clients) = &set.clients {
            record.clients = check_clients(clients)?;
        }
        record.read_only = set.read_only.unwrap_or(record.read_only);
        record.hold = set.hold.unwrap_or(record.hold);
        let mut rules = matching::read(&record.rules);
        if let Some(pattern) = &set.unmatch {
            matching::take(&mut rules, pattern)?;
        }
        let new_rules = set.unmatch.is_some() || set.rule.is_some();
        if let Some(rule) = set.rule {
            matching::put(&mut rules, rule)?;
        }
        if new_rules {
            record.rules = matching::write(&rules)?;
        }
        self.store_datastore(&record)?;
        let mut stores = lock(&self.stores.by_name);
        let store = stores.get_mut(name);
        let store = store.ok_or_else(|| Error::no_datastore(name))?;
        store.record = record.clone();
        if let Some(opened) = store.opened.as_ref().filter(|_| record.hold != before.hold) {
            opened.files.hold(record.hold);
        }
        if let Some(opened) = store.opened.as_ref().filter(|_| new_rules) {
            opened.disks.set_rules(&rules);
            opened.files.pins_changed();
        }
        match &store.served {
            Ok(served) if record.listen == before.listen => {
                served.on.server.set_access(served.number, access(&record));
                drop(stores);
            }
            _ => {
                if let Ok(served) = &store.served {
                    served.on.server.withdraw(served.number);
                }
                store.served = Err(not_yet());
                let before = store.opened.clone();
                drop(stores);
                self.stores.tidy();
                let opened = match before {
                    Some(opened) => Ok(opened),
                    None => self.open_known(&record),
                };
                let served = match &opened {
                    Ok(opened) => self.serve_datastore(&record, opened),
                    Err(e) => Err(e.clone()),
                };
                if let Some(store) = lock(&self.stores.by_name).get_mut(name) {
                    store.opened = opened.ok();
                    store.served = served;
                }
            }
        }
        self.datastore_info(name)
    }

    pub(super) fn begin_datastore_flush(&self, name: &str) -> Result<DatastoreInfo> {
        self.opened_datastore(name)?.files.begin_flush();
        self.datastore_info(name)
    }

    /// The directory of a datastore.
    fn opened_datastore(&self, name: &str) -> Result<Opened> {
        let stores = lock(&self.stores.by_name);
        let store = stores.get(name).ok_or_else(|| Error::no_datastore(name))?;
        match (&store.opened, &store.served) {
            (Some(opened), _) => Ok(opened.clone()),
            (None, Err(e)) => Err(e.clone()),
            (None, Ok(_)) => Err(not_yet()),
        }
    }

    /// Writes everything back within `limit`.
    fn flush_within(&self, name: &str, files: &Datastore, limit: Duration) -> Result<()> {
        files.begin_flush();
        let flushed = self.bell.wait(limit, FLUSH_PACE, || {
            let census = files.census();
            (!census.flushing && census.dirty == 0).then_some(())
        });
        flushed.ok_or_else(|| {
            Error::conflict(
                format!(
                    "{} of datastore {name} are only on flash still, and are being written to its directory",
                    human(files.census().dirty)
                ),
                format!("wait for `hearth datastore flush {name}`, and remove it then"),
            )
        })
    }

    /// Refuses what takes a datastore, or any, from clients that use it.
    pub(super) fn check_unused_datastores(&self, only: Option<&str>) -> Result<()> {
        let used = self.datastore_users();
        let used = used
            .iter()
            .filter(|(name, _)| only.is_none_or(|only| only == *name));
        let Some((name, clients)) = used.into_iter().find(|(_, clients)| !clients.is_empty())
        else {
            return Ok(());
        };
        let clients: Vec<String> = clients
            .keys()
            .take(NAMED_MAX)
            .map(IpAddr::to_string)
            .collect();
        Err(Error::refused(
            format!("datastore {name} is in use by {}", clients.join(", ")),
            "unmount it there first, or cut the clients off with --yes",
        ))
    }

    /// Clients of each datastore, with the time of their last call. Clients of an unserved datastore wait for it.
    pub(super) fn datastore_users(&self) -> BTreeMap<String, BTreeMap<IpAddr, u64>> {
        let stores = lock(&self.stores.by_name);
        let used = stores.iter().map(|(name, store)| {
            let used = match &store.served {
                Ok(_) => users(store),
                Err(_) => self.client_record.users_of(name),
            };
            (name.clone(), used)
        });
        used.collect()
    }

    pub(super) fn end_datastore(&self, name: &str) -> Result<()> {
        let _turn = lock(&self.stores.turn);
        let record = self.datastore_record(name)?;
        let known = lock(&self.pool)
            .registry()
            .disks
            .iter()
            .any(|d| d.datastore == name);
        let opened = match self.opened_datastore(name) {
            Err(e) if known => return Err(e),
            Err(_) => None,
            Ok(opened) => Some(opened),
        };
        if let Some(opened) = &opened {
            self.flush_within(name, &opened.files, FLUSH_TIME)?;
        }
        if let Some(store) = lock(&self.stores.by_name).get_mut(name)
            && let Ok(served) = std::mem::replace(&mut store.served, Err(not_yet()))
        {
            served.on.server.withdraw(served.number);
        }
        if let Some(opened) = &opened {
            let flushed = self
                .flush_within(name, &opened.files, LAST_FLUSH_TIME)
                .and_then(|()| {
                    if opened.files.dissolve() {
                        return Ok(());
                    }
                    Err(Error::unavailable(
                        format!("what is cached of datastore {name} cannot be dropped now"),
                        "see whether its directory or the flash hangs, and try again",
                    ))
                });
            if let Err(e) = flushed {
                let served = self.serve_datastore(&record, opened);
                if let Some(store) = lock(&self.stores.by_name).get_mut(name) {
                    store.served = served;
                }
                return Err(e);
            }
        }
        lock(&self.pool).change(|registry| {
            registry.take_datastore(name);
            Ok(())
        })?;
        let gone = lock(&self.stores.by_name).remove(name);
        drop(gone);
        self.stores.tidy();
        if let Err(e) = std::fs::remove_dir_all(self.stores.state(&record)) {
            tracing::warn!(
                datastore = name,
                "what was kept of its handles cannot be removed: {e}"
            );
        }
        Ok(())
    }

    fn datastore_record(&self, name: &str) -> Result<DatastoreRecord> {
        let stores = lock(&self.stores.by_name);
        let store = stores.get(name).ok_or_else(|| Error::no_datastore(name))?;
        Ok(store.record.clone())
    }

    pub(super) fn datastore_info(&self, name: &str) -> Result<DatastoreInfo> {
        let stores = lock(&self.stores.by_name);
        let store = stores.get(name).ok_or_else(|| Error::no_datastore(name))?;
        Ok(info(store))
    }

    /// The files that have a record, the busiest first.
    pub(super) fn datastore_files(&self, name: &str) -> Result<Vec<FileReport>> {
        let opened = self.opened_datastore(name)?;
        let directory = PathBuf::from(self.datastore_record(name)?.directory);
        let now = hearth_io::now_ns();
        let known = opened.files.files().into_iter().filter_map(|known| {
            let record = lock(&self.pool).record(known.disk).cloned()?;
            let stats = self.engine.stats(known.disk, now).unwrap_or_default();
            let counters = Counters::from(&stats.counters);
            let settings = SettingsShown::of(&record);
            let path = known.path.strip_prefix(&directory).unwrap_or(&known.path);
            Some(FileReport {
                path: path.display().to_string(),
                open: known.open,
                size: known.size,
                mode: settings.mode,
                block_size: settings.block_size,
                max: settings.max,
                seq_cutoff: settings.seq_cutoff,
                cached: stats.cached_blocks * BLOCK,
                dirty: match record.is_flash_only() {
                    true => 0,
                    false => (stats.dirty_blocks + stats.zero_blocks).saturating_mul(BLOCK),
                },
                scratch: record.is_flash_only(),
                pin: known.pinned.map(|pinned| match pinned {
                    Pinned::Filling => PinState::Filling,
                    Pinned::Filled => PinState::Filled,
                    Pinned::NoRoom => PinState::NoRoom,
                }),
                ratios: counters.ratios(&counters),
                counters,
                read_hit_latency: (&stats.read_hit_latency).into(),
                read_miss_latency: (&stats.read_miss_latency).into(),
                write_hit_latency: (&stats.write_hit_latency).into(),
                write_miss_latency: (&stats.write_miss_latency).into(),
            })
        });
        let mut files: Vec<FileReport> = known.collect();
        files.sort_by_key(|f| {
            let used = f.counters.reads() + f.counters.writes();
            (std::cmp::Reverse(used), f.path.clone())
        });
        Ok(files)
    }

    pub(super) fn datastore_infos(&self) -> Vec<DatastoreInfo> {
        lock(&self.stores.by_name).values().map(info).collect()
    }
}

fn info(store: &Store) -> DatastoreInfo {
    let record = &store.record;
    let opened = store.opened.as_ref();
    let census = opened
        .map(|opened| opened.files.census())
        .unwrap_or_default();
    let served = store.served.as_ref();
    let (reason, remedy) = fields(served.err().cloned().map(Into::into));
    let on = served.ok().map(|served| &served.on);
    let refused = served
        .ok()
        .and_then(|served| served.on.server.refused(served.number));
    // It may have been asked for any port that is free.
    let at = on.and_then(|on| on.server.addresses().first().copied());
    DatastoreInfo {
        name: record.name.clone(),
        directory: record.directory.clone(),
        trees: opened
            .and_then(|opened| opened.twin.as_ref())
            .map(trees::told)
            .unwrap_or_default(),
        scrub: opened
            .and_then(|opened| opened.files.scrub_state())
            .map(trees::scrub_info),
        served: served.is_ok(),
        reason,
        remedy,
        notices: on
            .and_then(|on| on.unknown())
            .into_iter()
            .chain(refused.map(|from| refused_port(record, from)))
            .collect(),
        two_writers: opened.and_then(|opened| opened.disks.two_writers()),
        listen: at.map_or_else(|| record.listen.clone(), |at| at.to_string()),
        portmapper: on.is_some_and(|on| on.is_mapped()),
        locks: on.is_some_and(|on| on.has_locks()),
        path: format!("/{}", record.name),
        clients: clients_of(record).collect(),
        used_by: users(store)
            .into_iter()
            .map(|(address, last)| DatastoreUser {
                address: address.to_string(),
                last,
            })
            .collect(),
        read_only: record.read_only,
        hold: record.hold,
        rules: matching::read(&record.rules),
        disks: census.disks,
        open: census.open,
        dirty: census.dirty,
        flushing: census.flushing,
    }
}

/// Who uses a datastore, with the time of the last call.
fn users(store: &Store) -> BTreeMap<IpAddr, u64> {
    let served = store.served.as_ref().ok();
    served.map_or_else(BTreeMap::new, |served| {
        served.on.server.users(served.number)
    })
}

/// What is said of a client on this host that was refused for its source port.
fn refused_port(record: &DatastoreRecord, from: SocketAddr) -> String {
    let fits = |client: &DatastoreClient| {
        let network = client.network.parse::<Network>();
        network.is_ok_and(|network| network.contains(from.ip()))
    };
    let clients = clients_of(record).map(|mut client| {
        client.insecure |= fits(&client);
        format!(" --client {client}")
    });
    format!(
        "a client on this host was refused: {from} is no privileged port. An account without rights, such as QEMU's nfs \
         driver, is let in by `hearth datastore set {}{}`; then every account of this host can claim any identity",
        record.name,
        clients.collect::<String>()
    )
}

/// What is said of one that nobody can use at this moment.
fn not_yet() -> Error {
    Error::unavailable("it is not served at this moment", "wait a moment")
}

#[cfg(test)]
mod tests {
    use super::super::{StopReason, testing};
    use super::*;

    fn add(name: &str, directory: &Path) -> DatastoreAdd {
        DatastoreAdd {
            name: name.to_owned(),
            directory: directory.display().to_string(),
            mirror: None,
            listen: Some("127.0.0.1:0".to_owned()),
            clients: None,
            read_only: false,
        }
    }

    #[test]
    fn what_cannot_be_a_datastore_is_refused_and_leaves_nothing() {
        let (dir, daemon) = testing::daemon();
        let place = tempfile::tempdir().unwrap();
        let vms = place.path().join("vms");
        std::fs::create_dir_all(vms.join("inner")).unwrap();
        let refused = |add: DatastoreAdd| daemon.begin_datastore(add).unwrap_err();
        assert!(refused(add("../x", &vms)).what.contains("name"));
        let e = refused(add("vms", dir.path()));
        assert!(e.what.contains("own"), "{e}");
        let e = refused(add("vms", &vms.join("none")));
        assert_eq!(e.kind, Kind::Invalid);
        let mut odd = add("vms", &vms);
        odd.clients = Some(vec![DatastoreClient::new("everybody")]);
        assert!(refused(odd).what.contains("everybody"));
        let mut odd = add("vms", &vms);
        odd.clients = Some(vec![DatastoreClient {
            anonuid: u32::MAX,
            ..DatastoreClient::new("::1")
        }]);
        assert!(refused(odd).what.contains("anonuid"));
        let mut odd = add("vms", &vms);
        odd.listen = Some("here".to_owned());
        assert!(refused(odd).what.contains("here"));
        assert_eq!(daemon.datastore_infos(), []);

        let info = daemon.begin_datastore(add("vms", &vms)).unwrap();
        assert!(info.served, "{info:?}");
        assert_eq!(refused(add("vms", &vms)).kind, Kind::Conflict);
        let e = refused(add("inner", &vms.join("inner")));
        assert!(e.what.contains("in common"), "{e}");
        daemon.close_datastores();
        daemon.shut_down(StopReason::Signal).unwrap();
    }

    #[test]
    fn a_datastore_is_there_again_with_its_clients_and_gone_when_removed() {
        let (_dir, daemon) = testing::daemon();
        let vms = tempfile::tempdir().unwrap();
        let mut wanted = add("vms", vms.path());
        let clients = vec![DatastoreClient {
            root: true,
            all_squash: true,
            anonuid: 1000,
            anongid: 1001,
            insecure: true,
            ..DatastoreClient::new("192.0.2.0/24")
        }];
        wanted.clients = Some(clients.clone());
        daemon.begin_datastore(wanted).unwrap();
        let number = |daemon: &Daemon| {
            let stores = lock(&daemon.stores.by_name);
            stores["vms"].served.as_ref().unwrap().number
        };
        let before = number(&daemon);
        // As at the next start.
        daemon.close_datastores();
        assert!(!daemon.datastore_info("vms").unwrap().served);
        daemon.still_datastores();
        lock(&daemon.stores.by_name).clear();
        // Who asks while it is being opened is not told that there is none.
        daemon.note_datastores();
        let info = daemon.datastore_info("vms").unwrap();
        assert!(!info.served && info.remedy.is_some(), "{info:?}");
        daemon.open_datastores();
        let info = daemon.datastore_info("vms").unwrap();
        assert!(info.served && info.clients == clients && !info.read_only);
        // Clients go on with the handles they have.
        assert_eq!(number(&daemon), before);
        let set = DatastoreSet {
            read_only: Some(true),
            ..DatastoreSet::default()
        };
        assert!(daemon.change_datastore("vms", set).unwrap().read_only);
        daemon.end_datastore("vms").unwrap();
        daemon.open_datastores();
        assert_eq!(daemon.datastore_infos(), []);
        assert_eq!(
            daemon.datastore_info("vms").unwrap_err().kind,
            Kind::NotFound
        );
        daemon.shut_down(StopReason::Signal).unwrap();
    }
}
