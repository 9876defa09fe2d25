//! Disks as the NBD server and the vhost-user server see them.
//!
//! The table is read on data threads whenever a client connects, and changed by the control
//! plane; an [`DiskExport`] outlives its entry as long as a client is connected to it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use hearth_engine::Engine;
use hearth_engine::api::{DiskId, ExtentState};
use hearth_io::Device;
use hearth_nbd::{Export, ExportSummary, Exports, Status, Visit};
use hearth_reactor::{Caller, Visitor};

use crate::api::types::ClientKind;
use crate::clients::Clients;
use crate::vhost::VhostSockets;

/// Bytes of an origin asked for holes in one call: bounds the time a data thread spends on it.
/// (What could hang is not asked at all: see [`BlockFile::extents`](hearth_io::BlockFile::extents).)
const STATUS_BYTES_MAX: u64 = 1 << 30;

/// A disk on offer.
pub struct DiskExport {
    id: DiskId,
    name: String,
    size: AtomicU64,
    read_only: bool,
    closing: AtomicBool,
    gone: AtomicBool,
    clients: Arc<Clients>,
    engine: Arc<Engine>,
    origin: Arc<Device>,
}

impl DiskExport {
    /// An export of an attached disk.
    pub fn new(
        id: DiskId,
        name: &str,
        read_only: bool,
        engine: Arc<Engine>,
        origin: Arc<Device>,
        clients: Arc<Clients>,
    ) -> DiskExport {
        DiskExport {
            id,
            name: name.to_owned(),
            size: AtomicU64::new(origin.size()),
            read_only,
            closing: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            clients,
            engine,
            origin,
        }
    }

    /// Who is connected.
    pub fn clients(&self) -> &Arc<Clients> {
        &self.clients
    }

    /// The disk has grown.
    pub fn set_size(&self, size: u64) {
        self.size.store(size, Ordering::Release);
    }

    /// Refuses further requests (or takes them again).
    pub fn set_closing(&self, closing: bool) {
        self.closing.store(closing, Ordering::Release);
    }

    /// The disk has been removed: connections to it end.
    pub fn set_gone(&self) {
        self.gone.store(true, Ordering::Release);
    }

    /// The origin's device.
    pub fn origin(&self) -> &Arc<Device> {
        &self.origin
    }

    /// Appends what the origin says of a range the cache knows nothing of.
    fn origin_status(&self, offset: u64, len: u64, out: &mut Vec<(u64, Status)>) {
        match self.origin.extents(offset, len) {
            Ok(extents) => {
                out.extend(
                    extents
                        .iter()
                        .map(|e| (e.len, if e.data { Status::Data } else { Status::Hole })),
                );
            }
            // "Data" is always a safe answer.
            Err(_) => out.push((len, Status::Data)),
        }
    }
}

impl Export for DiskExport {
    fn disk(&self) -> DiskId {
        self.id
    }

    fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    fn read_only(&self) -> bool {
        self.read_only
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn description(&self) -> String {
        format!("{} behind a Hearth cache", crate::size::human(self.size()))
    }

    fn can_fast_zero(&self) -> bool {
        true
    }

    fn block_status(&self, offset: u64, len: u64, out: &mut Vec<(u64, Status)>) {
        let mut cached = Vec::new();
        // The cache is asked first: what it calls the origin's business has reached the origin,
        // so a hole found there afterwards is one.
        self.engine
            .block_status(self.id, offset, len.min(STATUS_BYTES_MAX), &mut cached);
        let mut at = offset;
        for (bytes, state) in cached {
            match state {
                ExtentState::Data => out.push((bytes, Status::Data)),
                ExtentState::Zero => out.push((bytes, Status::Zero)),
                ExtentState::Origin => self.origin_status(at, bytes, out),
            }
            at += bytes;
        }
    }

    fn closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    fn gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    fn admit(&self, caller: &Caller) -> Result<Visit, String> {
        let pass = self.clients.admit(caller, ClientKind::Nbd)?;
        Ok(Visit {
            shares: pass.shares(),
            visitor: Box::new(pass),
        })
    }
}

impl hearth_vhost::Disk for DiskExport {
    fn id(&self) -> DiskId {
        self.id
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn size(&self) -> u64 {
        Export::size(self)
    }

    fn read_only(&self) -> bool {
        self.read_only
    }

    fn closing(&self) -> bool {
        Export::closing(self)
    }

    fn admit(&self, caller: &Caller) -> Result<Box<dyn Visitor>, String> {
        let pass = self.clients.admit(caller, ClientKind::VhostUser)?;
        Ok(Box::new(pass))
    }
}

/// All disks on offer, by name.
#[derive(Default)]
pub struct ExportTable {
    disks: RwLock<BTreeMap<String, Arc<DiskExport>>>,
    vhost: OnceLock<VhostSockets>,
}

impl ExportTable {
    /// Offers a disk.
    pub fn insert(&self, export: Arc<DiskExport>) {
        let mut table = self.disks.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(vhost) = self.vhost.get() {
            vhost.listen(&export);
        }
        table.insert(export.name.clone(), export);
    }

    /// From now on, every disk has a vhost-user socket, too.
    pub fn serve_vhost(&self, sockets: VhostSockets) {
        // Nobody adds a disk meanwhile, so that each is listened for once.
        let table = self.disks.write().unwrap_or_else(PoisonError::into_inner);
        let vhost = self.vhost.get_or_init(|| sockets);
        table.values().for_each(|export| vhost.listen(export));
    }

    /// The vhost-user sockets, if there are any.
    pub fn vhost(&self) -> Option<&VhostSockets> {
        self.vhost.get()
    }

    /// Offers it no more; clients that are connected stay.
    pub fn remove(&self, name: &str) {
        if let Some(vhost) = self.vhost.get() {
            vhost.unlisten(name);
        }
        self.disks
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(name);
    }
}

impl Exports for ExportTable {
    fn list(&self) -> Vec<ExportSummary> {
        let table = self.disks.read().unwrap_or_else(PoisonError::into_inner);
        table
            .values()
            .map(|e| ExportSummary {
                name: e.name.clone(),
                description: e.description(),
            })
            .collect()
    }

    fn open(&self, name: &str) -> Option<Arc<dyn Export>> {
        let export = self
            .disks
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(name)
            .cloned()?;
        Some(export)
    }
}
