//! The steps on a file that is a disk, for those who know their order.

use hearth_nfs::tree::Outcome;
use hearth_nfs::v3::Status;
use hearth_trees::large::Large;

use super::{Inner, step};
use crate::file::Cached;

/// What makes a file another length, durably, with what else is to be changed.
type Set<'a> = Box<dyn Fn() -> Outcome<()> + 'a>;

/// A file that is a disk, in use.
pub(super) struct Held<'a> {
    inner: &'a Inner,
    cached: &'a Cached,
    set: Set<'a>,
}

impl<'a> Held<'a> {
    /// A file that is not cut now.
    pub fn new(inner: &'a Inner, cached: &'a Cached) -> Held<'a> {
        Held::to_set(inner, cached, || Err(Status::ServerFault))
    }

    /// A file that gets another length by `set`.
    pub fn to_set(
        inner: &'a Inner,
        cached: &'a Cached,
        set: impl Fn() -> Outcome<()> + 'a,
    ) -> Held<'a> {
        Held {
            inner,
            cached,
            set: Box::new(set),
        }
    }
}

impl Large for Held<'_> {
    type Error = Status;

    fn size(&self) -> u64 {
        self.cached.origin.len()
    }

    fn synced(&self) -> u64 {
        self.cached.origin.synced()
    }

    fn bound(&self) -> u64 {
        self.cached.origin.bound()
    }

    fn step(&self) -> u64 {
        step(self.cached.origin.is_scratch())
    }

    fn raise(&self, bound: u64) -> Outcome<()> {
        self.inner.disks.grow(self.cached.disk, bound)?;
        self.cached.origin.set_bound(bound);
        Ok(())
    }

    fn withdraw(&self) -> Outcome<()> {
        Ok(self.cached.origin.withdraw()?)
    }

    fn grow(&self, len: u64) -> Outcome<()> {
        Ok(self.cached.origin.grow(len)?)
    }

    fn set(&self, _len: u64) -> Outcome<()> {
        (self.set)()
    }

    fn sync(&self) -> Outcome<()> {
        Ok(self.cached.origin.sync()?)
    }

    fn zero(&self, from: u64, to: u64) -> Outcome<()> {
        if self.inner.disks.zero(self.cached.disk, from, to - from) {
            Ok(())
        } else {
            Err(Status::Io)
        }
    }
}
