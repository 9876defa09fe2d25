//! Which disks name the same origin or the same file, without reading through all of them.
//!
//! Names are what can be compared without asking a file system that may hang. A disk names its origin, and the
//! files below its image; two disks can be in each other's way by name only if they have one in common. So for
//! each name it is kept who has it, and only those records are looked at. What is kept of a name is a number
//! made of it: those that share it by chance are looked at for nothing, and that is all.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, RandomState};
use std::path::PathBuf;

use hearth_engine::api::DiskId;
use hearth_format::{DiskRecord, Registry};
use hearth_io::{OriginSpec, Source};

/// Who names what.
#[derive(Debug, Default)]
pub(crate) struct Named {
    by_name: BTreeSet<(u64, DiskId)>,
    /// Disks with files below their images.
    chained: usize,
    /// Keyed anew in every process, so that nobody chooses names that share a number.
    hasher: RandomState,
}

/// Something a disk names.
#[derive(Hash)]
enum Name<'a> {
    Path(PathBuf),
    Source(&'a str, &'a str),
}

impl Named {
    /// Of all disks of a registry.
    pub(crate) fn of(registry: &Registry) -> Named {
        let mut named = Named::default();
        for record in &registry.disks {
            named.put(record);
        }
        named
    }

    /// The numbers of what an origin and the files below it are called.
    fn keys(&self, spec: &OriginSpec, chain: &[String]) -> Vec<u64> {
        let files = hearth_origin::files_of(chain).into_iter();
        let parts = hearth_origin::parts(spec);
        let paths = files
            .map(|(path, _)| path)
            .chain(parts.iter().filter_map(hearth_origin::local_path));
        let mut keys: Vec<u64> = paths.map(|p| self.hasher.hash_one(Name::Path(p))).collect();
        keys.extend(parts.iter().map(|part| {
            self.hasher.hash_one(match &part.source {
                Source::File(path) => Name::Path(path.clone()),
                Source::Other { scheme, rest } => Name::Source(scheme, rest),
            })
        }));
        keys
    }

    fn keys_of(&self, record: &DiskRecord) -> Vec<u64> {
        // What nobody can read names nothing.
        let spec = crate::origin::parse(&record.origin);
        spec.map_or_else(|_| Vec::new(), |spec| self.keys(&spec, &record.chain))
    }

    fn put(&mut self, record: &DiskRecord) {
        for key in self.keys_of(record) {
            self.by_name.insert((key, record.id));
        }
        self.chained += usize::from(!record.chain.is_empty());
    }

    fn take(&mut self, record: &DiskRecord) {
        for key in self.keys_of(record) {
            self.by_name.remove(&(key, record.id));
        }
        self.chained -= usize::from(!record.chain.is_empty());
    }

    /// Follows what became of `old`.
    pub(crate) fn follow(&mut self, old: &Registry, new: &Registry) {
        // A record keeps its place or is taken out, as the registry's journal has it. Should one ever not, it
        // is taken out and put in again.
        let mut at = 0;
        let mut came = Vec::new();
        for was in &old.disks {
            match new.disks.get(at) {
                Some(is) if is.is(was) => at += 1,
                Some(is) if is.id == was.id => {
                    at += 1;
                    if (&is.origin, &is.chain) != (&was.origin, &was.chain) {
                        self.take(was);
                        came.push(is);
                    }
                }
                _ => self.take(was),
            }
        }
        came.extend(new.disks.get(at..).unwrap_or_default());
        for is in came {
            self.put(is);
        }
    }

    /// The disks that may have a name in common with an origin and the files below it.
    pub(crate) fn near(&self, spec: &OriginSpec, chain: &[String]) -> BTreeSet<DiskId> {
        let keys = self.keys(spec, chain).into_iter();
        let range = |key| self.by_name.range((key, 0)..=(key, DiskId::MAX));
        keys.flat_map(range).map(|(_, disk)| *disk).collect()
    }

    /// True if there are files below any disk's image.
    pub(crate) fn any_chain(&self) -> bool {
        self.chained > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ORIGINS: [&str; 6] = [
        "/a",
        "file:/a",
        "qcow2:/a",
        "/b",
        "nbd://h/x",
        "model-hdd:/b",
    ];
    const FILES: [&str; 3] = ["raw:/a", "data:/b", "raw:/c"];

    fn record() -> impl Strategy<Value = DiskRecord> {
        let chain = proptest::collection::vec(0..FILES.len(), 0..3);
        (1..9u16, 0..ORIGINS.len(), chain).prop_map(|(id, origin, chain)| DiskRecord {
            id,
            origin: ORIGINS[origin].to_owned(),
            chain: chain.into_iter().map(|n| FILES[n].to_owned()).collect(),
            ..DiskRecord::default()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        /// However a registry came to be what it is, it is found what reading all of it finds.
        #[test]
        fn it_finds_what_reading_all_finds(
            acts in proptest::collection::vec((record(), 0..4u8), 0..30),
            own in record(),
        ) {
            let mut registry = Registry::default();
            let mut named = Named::default();
            for (record, act) in acts {
                let old = registry.clone();
                match registry.position(record.id) {
                    Some(at) if act == 0 => drop(registry.disks.remove(at)),
                    Some(at) => registry.disks[at] = record.into(),
                    None => registry.disks.push(record.into()),
                }
                if act == 1 {
                    registry.disks.reverse();
                }
                named.follow(&old, &registry);
            }
            let spec = crate::origin::parse(&own.origin).unwrap();
            let names = |spec: &OriginSpec, chain: &[String]| -> BTreeSet<PathBuf> {
                let files = hearth_origin::files_of(chain).into_iter().map(|(path, _)| path);
                files.chain(hearth_origin::local_path(spec)).collect()
            };
            let mine = names(&spec, &own.chain);
            let shares = |record: &DiskRecord| {
                let other = crate::origin::parse(&record.origin).unwrap();
                other.source == spec.source || !names(&other, &record.chain).is_disjoint(&mine)
            };
            let all = registry.disks.iter().filter(|record| shares(record));
            let expected: BTreeSet<DiskId> = all.map(|record| record.id).collect();
            prop_assert_eq!(named.near(&spec, &own.chain), expected);
            let chained = registry.disks.iter().any(|record| !record.chain.is_empty());
            prop_assert_eq!(named.any_chain(), chained);
            named.follow(&registry, &Registry::default());
            prop_assert!(named.by_name.is_empty() && named.chained == 0);
        }
    }
}
