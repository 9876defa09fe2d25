//! Which connection a completion belongs to, and that each request has exactly one.
//!
//! Sessions name their requests as they like, so the engine is given names of our own: a
//! slot, and a generation that makes a second completion of the same request recognisable.

use hearth_engine::api::{DiskId, ReqOp, Request};

/// What a request's completion is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tag<T> {
    /// Who asked.
    pub owner: T,
    /// The session's name for it.
    pub tag: u64,
    /// Bytes to give back to the memory budget.
    pub budget: u64,
    /// Its disk, for whoever watches.
    pub disk: DiskId,
    /// What it wants.
    pub op: ReqOp,
    /// When it arrived, nanoseconds.
    pub start_ns: u64,
}

impl<T> Tag<T> {
    /// What there is to know of a request when it ends.
    pub(crate) fn new(owner: T, budget: u64, request: &Request) -> Tag<T> {
        Tag {
            owner,
            tag: request.tag,
            budget,
            disk: request.disk,
            op: request.op,
            start_ns: request.start_ns,
        }
    }
}

struct Slot<T> {
    generation: u32,
    value: Option<Tag<T>>,
}

/// The requests of one thread that the engine has not completed.
pub(crate) struct Tags<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
}

impl<T> Default for Tags<T> {
    fn default() -> Self {
        Tags {
            slots: Vec::new(),
            free: Vec::new(),
        }
    }
}

impl<T> Tags<T> {
    /// Remembers a request; returns its name for the engine. Bounded by what sessions have in
    /// flight, each of which has its own limit.
    pub(crate) fn put(&mut self, value: Tag<T>) -> u64 {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot {
                generation: 0,
                value: None,
            });
            (self.slots.len() - 1) as u32
        });
        let slot = &mut self.slots[index as usize];
        slot.value = Some(value);
        u64::from(slot.generation) << 32 | u64::from(index)
    }

    /// Forgets a request; `None` if the engine named one that is not outstanding.
    pub(crate) fn take(&mut self, name: u64) -> Option<Tag<T>> {
        let slot = self.slots.get_mut(name as u32 as usize)?;
        if slot.generation != (name >> 32) as u32 {
            return None;
        }
        let value = slot.value.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(name as u32);
        Some(value)
    }

    /// Requests outstanding.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_name_is_good_once() {
        let mut tags = Tags::default();
        let tag = |owner, tag, budget| {
            let request = Request::new(tag, 1, ReqOp::Flush, 0, 0, None, 0);
            Tag::new(owner, budget, &request)
        };
        let a = tags.put(tag(1, 10, 0));
        let b = tags.put(tag(2, 20, 5));
        assert_eq!(tags.take(a).map(|t| t.tag), Some(10));
        assert_eq!(tags.take(a), None);
        let c = tags.put(tag(3, 30, 0));
        assert_ne!(a, c, "the slot is reused, the name is not");
        assert_eq!(tags.take(a), None);
        assert_eq!(tags.take(c).map(|t| t.owner), Some(3));
        assert_eq!(tags.take(b).map(|t| t.budget), Some(5));
        assert_eq!(tags.take(999), None);
        assert_eq!(tags.len(), 0);
    }
}
