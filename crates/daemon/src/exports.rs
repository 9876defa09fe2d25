//! Disks as protocols see them, and the protocols.
//!
//! What is on offer is offered over every protocol that is registered; nothing else in the daemon
//! knows one. A [`DiskExport`] outlives its entry as long as a client is connected to it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hearth_engine::Engine;
use hearth_engine::api::{DiskId, ExtentState};
use hearth_format::DiskRecord;
use hearth_io::Device;
use hearth_reactor::Caller;
use hearth_volume::{Capabilities, Exporter, Fault, Protocol, Status, Visit, Volume};

use crate::clients::Clients;
use crate::daemon::lock;

/// Bytes of an origin asked for holes in one call: bounds the time a data thread spends on it.
/// (What could hang is not asked at all: see [`BlockFile::extents`](hearth_io::BlockFile::extents).)
const STATUS_BYTES_MAX: u64 = 1 << 30;

/// A disk on offer.
pub struct DiskExport {
    id: DiskId,
    name: String,
    serial: [u8; 16],
    size: AtomicU64,
    read_only: bool,
    closing: AtomicBool,
    gone: AtomicBool,
    clients: Arc<Clients>,
    engine: Arc<Engine>,
    origin: Mutex<Arc<Device>>,
}

impl DiskExport {
    /// An export of an attached disk.
    pub fn new(
        record: &DiskRecord,
        engine: Arc<Engine>,
        origin: Arc<Device>,
        clients: Arc<Clients>,
    ) -> DiskExport {
        DiskExport {
            id: record.id,
            name: record.name.clone(),
            serial: record.serial.into_bytes(),
            size: AtomicU64::new(origin.size()),
            read_only: record.read_only,
            closing: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            clients,
            engine,
            origin: Mutex::new(origin),
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
    pub fn origin(&self) -> Arc<Device> {
        lock(&self.origin).clone()
    }

    /// From now on it is served from this device; the one before, which others may still be using.
    pub(crate) fn set_origin(&self, origin: Arc<Device>) -> Arc<Device> {
        std::mem::replace(&mut *lock(&self.origin), origin)
    }

    /// Appends what the origin says of a range the cache knows nothing of.
    fn origin_status(&self, offset: u64, len: u64, out: &mut Vec<(u64, Status)>) {
        match self.origin().extents(offset, len) {
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

impl Volume for DiskExport {
    fn disk(&self) -> DiskId {
        self.id
    }

    fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::all(!self.read_only)
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn serial(&self) -> [u8; 16] {
        self.serial
    }

    fn description(&self) -> String {
        format!("{} behind a Hearth cache", crate::size::human(self.size()))
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

    fn admit(&self, caller: &Caller, protocol: Protocol) -> Result<Visit, Fault> {
        let pass = self.clients.admit(caller, protocol)?;
        Ok(Visit {
            shares: pass.shares(),
            visitor: Box::new(pass),
        })
    }
}

#[derive(Default)]
struct Table {
    disks: BTreeMap<String, Arc<DiskExport>>,
    exporters: Vec<Arc<dyn Exporter>>,
    /// Nobody is let in any more.
    closed: bool,
}

/// All disks on offer, by name, and all protocols they are offered over.
#[derive(Default)]
pub struct ExportTable(Mutex<Table>);

impl ExportTable {
    /// Held while something is offered or withdrawn, so that every exporter hears of it once and in
    /// order; never while connections are waited for.
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn exporters(&self) -> Vec<Arc<dyn Exporter>> {
        self.lock().exporters.clone()
    }

    /// From now on every disk is served over this protocol, too.
    pub fn register(&self, exporter: Arc<dyn Exporter>) {
        let mut table = self.lock();
        for export in table.disks.values() {
            offer(&*exporter, export);
        }
        // A client that comes finds all there is.
        exporter.open();
        table.exporters.push(exporter);
    }

    /// Offers a disk.
    pub fn insert(&self, export: Arc<DiskExport>) {
        let mut table = self.lock();
        if !table.closed {
            table.exporters.iter().for_each(|e| offer(&**e, &export));
        }
        table.disks.insert(export.name.clone(), export);
    }

    /// Offers it no more; clients that are connected stay.
    pub fn remove(&self, name: &str) {
        let mut table = self.lock();
        table.exporters.iter().for_each(|e| e.withdraw(name));
        table.disks.remove(name);
    }

    /// Ends the connections of a disk that is not on offer any more; waits, within bounds.
    pub(crate) fn disconnect(&self, name: &str) {
        self.exporters().iter().for_each(|e| e.disconnect(name));
    }

    /// Tells a disk's clients of its new size.
    pub(crate) fn resized(&self, name: &str) {
        self.exporters().iter().for_each(|e| e.resized(name));
    }

    /// Takes no more clients, over no protocol.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.exporters().iter().for_each(|e| e.close());
    }

    /// Takes no more clients but over sockets that the next program has as well, and ends the connections that
    /// cannot go over to it and are not of the data threads.
    pub(crate) fn hand_over(&self) {
        self.lock().closed = true;
        let exporters = self.exporters();
        exporters.iter().for_each(|e| e.hand_over());
        exporters.iter().for_each(|e| e.stop());
    }

    /// Connections to all disks.
    pub(crate) fn connections(&self) -> u64 {
        let disks = self.lock();
        disks.disks.values().map(|d| d.clients.connections()).sum()
    }

    /// The same, and ends all connections but those of the data threads; requests in flight are
    /// answered first.
    pub(crate) fn stop(&self) {
        self.close();
        self.exporters().iter().for_each(|e| e.stop());
    }
}

/// Offers a disk over one protocol. If that cannot be, it is served over the others.
fn offer(exporter: &dyn Exporter, export: &Arc<DiskExport>) {
    if let Err(e) = exporter.offer(export.clone()) {
        tracing::warn!(disk = %export.name, "not served over {}: {e}", exporter.protocol());
    }
}
