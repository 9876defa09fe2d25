//! Which disks lie on the same data, without comparing each with each.
//!
//! What an origin lies on is a list of stretches of files and devices (`hearth_io::beneath`). Two disks share
//! data only where a stretch of one meets a stretch of the other on the same file or device. So the stretches
//! are kept by what they are part of, and a disk is compared only with those it meets there: on a file of its
//! own that is nobody, however many disks there are.
//!
//! That thousands of files lie *somewhere* on the device of one file system says nothing about two of them.
//! These are kept apart, and looked at only for an origin that is the device itself, or a known part of it.

use std::collections::btree_map::{BTreeMap, Entry};
use std::collections::{BTreeSet, HashMap};

use hearth_engine::api::DiskId;
use hearth_io::beneath::{Beneath, Node, Part};

/// A part of a file or device that a disk lies on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Stretch {
    disk: DiskId,
    start: u64,
    end: u64,
}

/// Who lies on one file or device.
#[derive(Debug, Default)]
struct Ground {
    /// Those whose data is all of a stretch.
    exact: Vec<Stretch>,
    /// Those whose data is somewhere in it. In order, so that one of thousands is found.
    within: BTreeSet<Stretch>,
}

/// What is remembered of all disks.
#[derive(Debug, Default)]
pub(crate) struct Grounds {
    places: BTreeMap<DiskId, Beneath>,
    nodes: HashMap<Node, Ground>,
    /// Disks of which it is not known, although they lie on this host.
    unknown: BTreeSet<DiskId>,
}

impl Ground {
    fn meets(&self, part: &Part) -> impl Iterator<Item = DiskId> {
        let within = part.exact.then_some(&self.within).into_iter().flatten();
        let all = self.exact.iter().chain(within);
        let (start, end) = (part.start, part.end);
        all.filter(move |s| s.start < end && start < s.end)
            .map(|s| s.disk)
    }

    fn forget(&mut self, disk: DiskId) {
        self.exact.retain(|stretch| stretch.disk != disk);
        let of = |n| Stretch {
            disk,
            start: n,
            end: n,
        };
        let gone: Vec<Stretch> = self.within.range(of(0)..=of(u64::MAX)).copied().collect();
        for stretch in gone {
            self.within.remove(&stretch);
        }
    }

    fn is_empty(&self) -> bool {
        self.exact.is_empty() && self.within.is_empty()
    }
}

impl Grounds {
    /// What a disk lies on, as last looked at, without the paths.
    pub(crate) fn of(&self, disk: DiskId) -> Option<&Beneath> {
        self.places.get(&disk)
    }

    /// Remembers what a disk lies on.
    pub(crate) fn put(&mut self, disk: DiskId, place: Beneath) {
        self.forget(disk);
        for part in place.parts() {
            let ground = self.nodes.entry(part.node).or_default();
            let stretch = Stretch {
                disk,
                start: part.start,
                end: part.end,
            };
            if !part.exact {
                ground.within.insert(stretch);
            } else if !ground.exact.contains(&stretch) {
                ground.exact.reserve_exact(1);
                ground.exact.push(stretch);
            }
        }
        self.places.insert(disk, place.without_names());
    }

    /// Remembers what looking at a disk's origin has shown. Of nothing: it is looked at again when somebody
    /// wants to know, if it is `here`, on this host.
    pub(crate) fn set(&mut self, disk: DiskId, place: Option<Beneath>, here: bool) {
        match place {
            Some(place) => self.put(disk, place),
            None if here => self.lose(disk),
            None => self.forget(disk),
        }
    }

    /// From now on it is not known what a disk lies on, although it lies on this host.
    pub(crate) fn lose(&mut self, disk: DiskId) {
        self.forget(disk);
        self.unknown.insert(disk);
    }

    /// Nothing is remembered of a disk any more, and nothing need be.
    pub(crate) fn forget(&mut self, disk: DiskId) {
        self.unknown.remove(&disk);
        let Entry::Occupied(place) = self.places.entry(disk) else {
            return;
        };
        for part in place.remove().parts() {
            if let Some(ground) = self.nodes.get_mut(&part.node) {
                ground.forget(disk);
                if ground.is_empty() {
                    self.nodes.remove(&part.node);
                }
            }
        }
    }

    /// Disks on this host of which nothing is known.
    pub(crate) fn unknown(&self) -> impl Iterator<Item = DiskId> {
        self.unknown.iter().copied()
    }

    /// The disks of which a byte may be a byte of `own`.
    pub(crate) fn overlapping(&self, own: &Beneath) -> BTreeSet<DiskId> {
        let parts = own.parts().iter();
        let met = parts.filter_map(|part| Some(self.nodes.get(&part.node)?.meets(part)));
        met.flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Few nodes and short stretches, so that many meet.
    fn part() -> impl Strategy<Value = Part> {
        let node = prop_oneof![
            (0..3u64).prop_map(|inode| Node::File { dev: 1, inode }),
            (0..3u64).prop_map(Node::Device),
        ];
        let path = proptest::option::of(Just("/a".into()));
        (node, 0..6u64, 0..4u64, any::<bool>(), path).prop_map(|(node, start, len, exact, path)| {
            let end = if len == 3 { u64::MAX } else { start + len };
            Part {
                node,
                start,
                end,
                exact,
                path,
            }
        })
    }

    fn place() -> impl Strategy<Value = Beneath> {
        proptest::collection::vec(part(), 0..4).prop_map(Beneath::from_parts)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        /// Whatever came and went, it finds whom comparing with each would find.
        #[test]
        fn it_finds_whom_comparing_with_each_finds(
            acts in proptest::collection::vec((0..8u16, proptest::option::of(place())), 0..40),
            own in place(),
        ) {
            let mut grounds = Grounds::default();
            let mut model: BTreeMap<DiskId, Beneath> = BTreeMap::new();
            for (disk, place) in acts {
                match place {
                    Some(place) => {
                        grounds.put(disk, place.clone());
                        model.insert(disk, place);
                    }
                    None => {
                        grounds.lose(disk);
                        model.remove(&disk);
                        prop_assert!(grounds.unknown().any(|d| d == disk));
                    }
                }
            }
            let expected: BTreeSet<DiskId> = model
                .iter()
                .filter(|(_, place)| place.overlaps(&own))
                .map(|(disk, _)| *disk)
                .collect();
            prop_assert_eq!(grounds.overlapping(&own), expected);
            for (disk, place) in &model {
                prop_assert_eq!(grounds.of(*disk), Some(&place.clone().without_names()));
                prop_assert!(grounds.unknown().all(|d| d != *disk));
            }
            for disk in 0..8 {
                grounds.forget(disk);
            }
            prop_assert!(grounds.nodes.is_empty() && grounds.places.is_empty());
            prop_assert!(grounds.unknown.is_empty());
        }
    }
}
