//! Requests the engine is working on, found again by their tag.

use crate::output::REQUESTS_MAX;
use hearth_io::Buf;

/// What is remembered of a request until it completes.
#[derive(Debug)]
pub(crate) struct Pending {
    /// The client's name for it.
    pub cookie: u64,
    /// First byte.
    pub offset: u64,
    /// Reads: bytes to answer with. Everything else: 0.
    pub read_len: usize,
    /// Memory of the payload, to be given back to the pool.
    pub buf: Option<Buf>,
    /// Bytes it counts for in the connection's memory limit.
    pub cost: u64,
}

enum Place {
    Free,
    Used(Pending),
}

/// Places for pending requests, reused; a tag is a place and how often it was used, so a
/// completion delivered twice is noticed.
#[derive(Default)]
pub(crate) struct Slab {
    places: Vec<(u32, Place)>,
    free: Vec<u32>,
}

impl Slab {
    /// Requests inside.
    pub(crate) fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Stores a request; returns its tag. `None` if there are [`REQUESTS_MAX`] already.
    pub(crate) fn insert(&mut self, pending: Pending) -> Option<u64> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.places.len() < REQUESTS_MAX => {
                self.places.push((0, Place::Free));
                self.places.len() as u32 - 1
            }
            None => return None,
        };
        let (uses, place) = self.places.get_mut(index as usize)?;
        *uses = uses.wrapping_add(1);
        *place = Place::Used(pending);
        Some(u64::from(*uses) << 32 | u64::from(index))
    }

    /// Takes a request out; `None` if there is none of this tag.
    pub(crate) fn remove(&mut self, tag: u64) -> Option<Pending> {
        let index = tag as u32;
        let (uses, place) = self.places.get_mut(index as usize)?;
        if u64::from(*uses) != tag >> 32 {
            return None;
        }
        match std::mem::replace(place, Place::Free) {
            Place::Used(pending) => {
                self.free.push(index);
                Some(pending)
            }
            Place::Free => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pending(cookie: u64) -> Pending {
        Pending {
            cookie,
            offset: 0,
            read_len: 0,
            buf: None,
            cost: 0,
        }
    }

    #[test]
    fn tags_find_their_request_once() {
        let mut slab = Slab::default();
        let a = slab.insert(pending(1)).expect("room");
        let b = slab.insert(pending(2)).expect("room");
        assert_eq!(slab.remove(a).map(|p| p.cookie), Some(1));
        assert!(slab.remove(a).is_none());
        let c = slab.insert(pending(3)).expect("room");
        assert_ne!(a, c, "a used tag does not come back");
        assert!(slab.remove(a).is_none());
        assert_eq!(slab.remove(c).map(|p| p.cookie), Some(3));
        assert_eq!(slab.len(), 1);
        assert_eq!(slab.remove(b).map(|p| p.cookie), Some(2));
        assert!(slab.remove(u64::MAX).is_none());
    }

    #[test]
    fn the_number_of_requests_is_bounded() {
        let mut slab = Slab::default();
        for i in 0..REQUESTS_MAX as u64 {
            assert!(slab.insert(pending(i)).is_some());
        }
        assert!(slab.insert(pending(0)).is_none());
    }
}
