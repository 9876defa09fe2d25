//! Volumes by name, for protocols whose clients say which one they mean.
//!
//! Read on data threads whenever a client connects, and changed by the control plane.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use crate::Volume;

/// See the module.
#[derive(Default)]
pub struct Catalog(RwLock<BTreeMap<String, Arc<dyn Volume>>>);

impl Catalog {
    /// Adds a volume, in place of another of its name.
    pub fn insert(&self, volume: Arc<dyn Volume>) {
        let name = volume.name().to_owned();
        let mut volumes = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let before = volumes.insert(name, volume);
        drop(volumes);
        // Dropped without the lock: it may be the last one that holds what is behind it.
        drop(before);
    }

    /// Takes a volume out; whoever has it keeps it.
    pub fn remove(&self, name: &str) {
        let mut volumes = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let before = volumes.remove(name);
        drop(volumes);
        drop(before);
    }

    /// The volume of exactly this name.
    pub fn get(&self, name: &str) -> Option<Arc<dyn Volume>> {
        let volumes = self.0.read().unwrap_or_else(PoisonError::into_inner);
        volumes.get(name).cloned()
    }

    /// All of them, in the order of their names.
    pub fn list(&self) -> Vec<Arc<dyn Volume>> {
        let volumes = self.0.read().unwrap_or_else(PoisonError::into_inner);
        volumes.values().cloned().collect()
    }
}

impl<V: Volume + 'static> FromIterator<Arc<V>> for Catalog {
    fn from_iter<I: IntoIterator<Item = Arc<V>>>(volumes: I) -> Catalog {
        let catalog = Catalog::default();
        volumes.into_iter().for_each(|v| catalog.insert(v));
        catalog
    }
}
