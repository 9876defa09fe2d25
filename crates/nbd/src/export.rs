//! Exports: volumes under the names clients ask for.

use hearth_reactor::Shares;
use hearth_volume::{Catalog, Visit, Volume};
use std::sync::Arc;

/// The export a client means by `name`; no name means the only export, if there is just one.
pub(crate) fn resolve(exports: &Catalog, name: &str) -> Option<Arc<dyn Volume>> {
    if !name.is_empty() {
        return exports.get(name);
    }
    match exports.list().as_slice() {
        [only] => Some(only.clone()),
        _ => None,
    }
}

/// An export in use by a session.
pub(crate) struct Attached {
    volume: Arc<dyn Volume>,
    visit: Visit,
}

impl Attached {
    pub(crate) fn new(volume: Arc<dyn Volume>, visit: Visit) -> Attached {
        Attached { volume, visit }
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
    type Target = dyn Volume;
    fn deref(&self) -> &(dyn Volume + 'static) {
        &*self.volume
    }
}
