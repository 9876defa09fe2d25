//! What the NBD server offers: exports, looked up by name.
//!
//! The protocol code knows neither the registry of disks nor the cache; it asks these traits.
//! Their methods are called on data threads and must not block.

use hearth_engine::api::DiskId;
use hearth_reactor::{Caller, Shares, Visitor};
use std::sync::Arc;

/// One line of an export list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportSummary {
    /// Name a client connects with; at most 4096 bytes.
    pub name: String,
    /// Text for people; may be empty.
    pub description: String,
}

/// What is known of a range of an export (`base:allocation`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Allocated, content unknown. Always a safe answer.
    Data,
    /// Not allocated; reads as zeroes.
    Hole,
    /// Allocated; reads as zeroes.
    Zero,
}

/// The exports of a server.
pub trait Exports: Send + Sync {
    /// All exports a client may see.
    fn list(&self) -> Vec<ExportSummary>;
    /// The export of exactly this name. The server asks for the only export of the list when
    /// a client names none; an implementation may also give meaning to the empty name.
    fn open(&self, name: &str) -> Option<Arc<dyn Export>>;
}

/// A disk as seen by an NBD client.
pub trait Export: Send + Sync {
    /// The disk requests go to.
    fn disk(&self) -> DiskId;
    /// Size in bytes; it may grow while clients are connected.
    fn size(&self) -> u64;
    /// True if writes are refused; it may change while clients are connected.
    fn read_only(&self) -> bool;
    /// Canonical name, at most 4096 bytes.
    fn name(&self) -> &str;
    /// Text for people; may be empty.
    fn description(&self) -> String;
    /// True if zeroing a range costs less than writing it; otherwise a client that insists
    /// (`FAST_ZERO`) gets `ENOTSUP`.
    fn can_fast_zero(&self) -> bool;
    /// Appends to `out` the states of consecutive ranges from `offset` on, as (bytes, state).
    /// They may cover less than `len` (the client asks again) or more (the rest is cut). An
    /// empty answer means "all data". At most [`EXTENTS_MAX`](crate::EXTENTS_MAX) are used.
    fn block_status(&self, offset: u64, len: u64, out: &mut Vec<(u64, Status)>);
    /// True once the export is being taken away: further requests get `ESHUTDOWN`.
    fn closing(&self) -> bool;
    /// True once the export is closed for good: its sessions end when nothing of theirs is in
    /// flight, so that nobody holds on to what is behind it. They notice when something happens
    /// to them; whoever closes an export has them looked at (`hearth_reactor::Reactors::look`).
    fn gone(&self) -> bool;
    /// A client wants to enter the transmission phase: what stands for it as long as it stays, or
    /// why it may not, for people.
    fn admit(&self, caller: &Caller) -> Result<Visit, String>;
}

/// A client of an export.
pub struct Visit {
    /// Told of what it does; dropped when it is gone.
    pub visitor: Box<dyn Visitor>,
    /// What it and the export's other clients hold.
    pub shares: Shares,
}

/// The export a client means by `name`; no name means the only export, if there is just one.
pub(crate) fn resolve(exports: &dyn Exports, name: &str) -> Option<Arc<dyn Export>> {
    if let Some(export) = exports.open(name) {
        return Some(export);
    }
    if !name.is_empty() {
        return None;
    }
    match exports.list().as_slice() {
        [only] => exports.open(&only.name),
        _ => None,
    }
}

/// An export in use by a session.
pub(crate) struct Attached {
    export: Arc<dyn Export>,
    visit: Visit,
}

impl Attached {
    pub(crate) fn new(export: Arc<dyn Export>, visit: Visit) -> Attached {
        Attached { export, visit }
    }

    /// The client changes the disk.
    pub(crate) fn wrote(&self) {
        self.visit.visitor.wrote();
    }

    pub(crate) fn shares(&self) -> &Shares {
        &self.visit.shares
    }
}

impl std::ops::Deref for Attached {
    type Target = dyn Export;
    fn deref(&self) -> &(dyn Export + 'static) {
        &*self.export
    }
}
