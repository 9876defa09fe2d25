//! The disks, one slot each, and whose turn it is to change one.
//!
//! Opening an origin may take as long as the origin likes, and a change may have to wait for what is in
//! flight. Neither may hold up another disk. So there is no lock of all operations: who changes a disk
//! has its *turn*, which nobody else has meanwhile, and the table's own lock is held only for a look or a
//! step that waits for nothing. A turn is given back whatever becomes of the work, and who waits for it
//! is told.
//!
//! Turns are of two kinds. While an origin is being opened, a stop does not wait: nothing that must be
//! finished has begun. Once that is done, the turn has to become one of the other kind before anything is
//! changed, and those a stop waits for. Whoever comes after the stop gets none.

use crate::sync::{Arc, Condvar, Mutex, MutexGuard};
use hearth_engine::api::DiskId;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// What a turn is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Opening the origin, or closing it. May never end.
    Opening,
    /// Changing the disk. Ends.
    Changing,
}

/// All disks.
#[derive(Debug)]
pub(crate) struct Table<S> {
    slots: Mutex<Slots<S>>,
    changed: Condvar,
}

/// What the table's lock holds.
#[derive(Debug)]
pub(crate) struct Slots<S> {
    /// In boxes: a tree's nodes have room for twice as many as they hold.
    by_id: BTreeMap<DiskId, Box<S>>,
    names: BTreeMap<String, DiskId>,
    turns: BTreeMap<DiskId, Purpose>,
    closed: bool,
}

/// The right to change one disk, until dropped.
#[derive(Debug)]
pub(crate) struct Turn<S> {
    table: Arc<Table<S>>,
    id: DiskId,
}

impl<S> Default for Table<S> {
    fn default() -> Table<S> {
        Table {
            slots: Mutex::new(Slots {
                by_id: BTreeMap::new(),
                names: BTreeMap::new(),
                turns: BTreeMap::new(),
                closed: false,
            }),
            changed: Condvar::new(),
        }
    }
}

impl<S> Slots<S> {
    /// The disk of this name.
    pub(crate) fn get(&self, name: &str) -> Option<&S> {
        self.by_id(*self.names.get(name)?)
    }

    /// The disk of this name.
    pub(crate) fn get_mut(&mut self, name: &str) -> Option<&mut S> {
        self.by_id_mut(*self.names.get(name)?)
    }

    /// The disk of this number, also one that has lost its name.
    pub(crate) fn by_id(&self, id: DiskId) -> Option<&S> {
        self.by_id.get(&id).map(|slot| &**slot)
    }

    /// The disk of this number, also one that has lost its name.
    pub(crate) fn by_id_mut(&mut self, id: DiskId) -> Option<&mut S> {
        self.by_id.get_mut(&id).map(|slot| &mut **slot)
    }

    /// All that have a name, in the order of their names.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &S)> {
        let named = self.names.iter();
        named.filter_map(|(name, id)| Some((name.as_str(), self.by_id(*id)?)))
    }

    /// All slots, in the order of their numbers.
    pub(crate) fn all(&self) -> impl Iterator<Item = (DiskId, &S)> {
        self.by_id.iter().map(|(id, slot)| (*id, &**slot))
    }

    /// All slots, to be changed.
    pub(crate) fn all_mut(&mut self) -> impl Iterator<Item = (DiskId, &mut S)> {
        self.by_id.iter_mut().map(|(id, slot)| (*id, &mut **slot))
    }

    /// Has this number a slot?
    pub(crate) fn contains(&self, id: DiskId) -> bool {
        self.by_id.contains_key(&id)
    }

    /// Puts a disk into the table.
    pub(crate) fn insert(&mut self, id: DiskId, name: &str, slot: S) {
        self.names.insert(name.to_owned(), id);
        self.by_id.insert(id, Box::new(slot));
    }

    /// From now on the name is free; the number is not.
    pub(crate) fn take_name(&mut self, id: DiskId) {
        self.names.retain(|_, named| *named != id);
    }

    /// Takes a disk out.
    pub(crate) fn remove(&mut self, id: DiskId) -> Option<S> {
        self.take_name(id);
        self.by_id.remove(&id).map(|slot| *slot)
    }

    /// Takes all disks out.
    pub(crate) fn take_all(&mut self) -> BTreeMap<DiskId, Box<S>> {
        self.names.clear();
        std::mem::take(&mut self.by_id)
    }

    /// What somebody has the disk's turn for, if anybody does.
    pub(crate) fn purpose(&self, id: DiskId) -> Option<Purpose> {
        self.turns.get(&id).copied()
    }
}

impl<S> Table<S> {
    /// For a look, or a step that waits for nothing.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Slots<S>> {
        self.slots.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Tells those who wait that something about a disk is not as it was.
    pub(crate) fn changed(&self) {
        // With the lock: between somebody's look and their waiting nothing may be missed.
        let slots = self.lock();
        self.changed.notify_all();
        drop(slots);
    }

    /// Waits until `look` finds what it looks for, at most `limit`.
    pub(crate) fn wait<T>(
        &self,
        limit: Duration,
        mut look: impl FnMut(&mut Slots<S>) -> Option<T>,
    ) -> Option<T> {
        let end = Instant::now() + limit;
        let mut slots = self.lock();
        loop {
            if let Some(found) = look(&mut slots) {
                return Some(found);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let waited = self.changed.wait_timeout(slots, left);
            slots = waited.unwrap_or_else(|e| e.into_inner()).0;
        }
    }

    /// A disk's turn, if nobody has it and the table takes changes.
    pub(crate) fn turn(self: &Arc<Table<S>>, id: DiskId, purpose: Purpose) -> Option<Turn<S>> {
        self.turn_if(id, purpose, |_| true)
    }

    /// The same, if `fits` says so.
    pub(crate) fn turn_if(
        self: &Arc<Table<S>>,
        id: DiskId,
        purpose: Purpose,
        fits: impl FnOnce(&Slots<S>) -> bool,
    ) -> Option<Turn<S>> {
        let mut slots = self.lock();
        let free = !slots.closed && !slots.turns.contains_key(&id) && fits(&slots);
        free.then(|| self.give(&mut slots, id, purpose))
    }

    /// The turn of a disk to which the caller, who has the lock, has just given a slot.
    pub(crate) fn give(
        self: &Arc<Table<S>>,
        slots: &mut Slots<S>,
        id: DiskId,
        purpose: Purpose,
    ) -> Turn<S> {
        slots.turns.insert(id, purpose);
        Turn {
            table: self.clone(),
            id,
        }
    }

    /// Waits for the turn of the disk that `find` finds, which is asked again whenever something has
    /// changed; its errors end the waiting. `Ok(None)`: somebody else had the turn for as long as
    /// `limit` allows for what they have it for.
    pub(crate) fn turn_within<E>(
        self: &Arc<Table<S>>,
        limit: impl Fn(Purpose) -> Duration,
        find: impl Fn(&Slots<S>) -> Result<DiskId, E>,
    ) -> Result<Option<Turn<S>>, E> {
        let begin = Instant::now();
        let mut slots = self.lock();
        loop {
            let id = find(&slots)?;
            let Some(purpose) = slots.purpose(id) else {
                if slots.closed {
                    return Ok(None);
                }
                return Ok(Some(self.give(&mut slots, id, Purpose::Changing)));
            };
            let left = limit(purpose).saturating_sub(begin.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            let waited = self.changed.wait_timeout(slots, left);
            slots = waited.unwrap_or_else(|e| e.into_inner()).0;
        }
    }

    /// From now on nobody gets a turn, and nobody who opens an origin may go on to change anything.
    /// Waits for the changes that have begun; false if that takes longer than `limit`.
    pub(crate) fn close(&self, limit: Duration) -> bool {
        self.lock().closed = true;
        self.changed();
        let ended = |slots: &mut Slots<S>| {
            let changing = slots.turns.values().any(|p| *p == Purpose::Changing);
            (!changing).then_some(())
        };
        self.wait(limit, ended).is_some()
    }
}

impl<S> Turn<S> {
    /// Whose it is.
    pub(crate) fn id(&self) -> DiskId {
        self.id
    }

    /// From here on the origin is being opened or closed, and a stop does not wait for that.
    pub(crate) fn begin_opening(&self) {
        self.table.lock().turns.insert(self.id, Purpose::Opening);
        self.table.changed();
    }

    /// The origin is open, or closed: from here on the disk is changed. False if that must not be any more.
    #[must_use]
    pub(crate) fn begin_change(&self) -> bool {
        let mut slots = self.table.lock();
        if slots.closed {
            return false;
        }
        slots.turns.insert(self.id, Purpose::Changing);
        true
    }
}

impl<S> Drop for Turn<S> {
    fn drop(&mut self) {
        self.table.lock().turns.remove(&self.id);
        self.table.changed();
    }
}
