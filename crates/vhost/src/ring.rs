//! A split virtqueue, seen from the device: what is available, what is used, who is told.
//!
//! Three areas in guest memory: descriptors, the available ring (the driver's) and the used ring
//! (ours). Each side owns its index and publishes it last. Source: virtio 1.2, 2.7.

use crate::chain::{DESC_LEN, Table};
use crate::error::VhostError;
use crate::memory::{GuestMemory, Pinned};
use std::sync::atomic::{AtomicU16, Ordering, fence};

/// Largest queue: QEMU's limit, and room for more requests than a device has in flight.
pub const QUEUE_SIZE_MAX: u16 = 1024;
/// The driver wants no call (available ring's flags).
const NO_INTERRUPT: u16 = virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT as u16;
/// The device wants no kick (used ring's flags).
const NO_NOTIFY: u16 = virtio_bindings::virtio_ring::VRING_USED_F_NO_NOTIFY as u16;

/// Where a ring is, in the client's addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingAddresses {
    /// The descriptors.
    pub desc: u64,
    /// The available ring.
    pub avail: u64,
    /// The used ring.
    pub used: u64,
}

/// See the module.
#[derive(Debug)]
pub struct SplitRing {
    desc: Pinned,
    avail: Pinned,
    used: Pinned,
    size: u16,
    event_idx: bool,
    /// The next request to take.
    next_avail: u16,
    /// The driver's index when we last looked.
    seen_avail: u16,
    /// Where the next used entry goes.
    next_used: u16,
    /// The used index the driver was last shown.
    published: u16,
    /// `next_avail` when the driver was last asked to kick; `None` while it need not.
    armed: Option<u16>,
}

/// Whether the other side asked to be told of index `event`, when going from `old` to `new`
/// (virtio 1.2, 2.7.10).
pub fn wants_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

impl SplitRing {
    /// A ring whose driver has seen everything up to the used index in memory, and whose next
    /// request is at `next_avail`.
    pub fn new(
        memory: &GuestMemory,
        at: RingAddresses,
        size: u16,
        event_idx: bool,
        next_avail: u16,
    ) -> Result<SplitRing, VhostError> {
        if size == 0 || size > QUEUE_SIZE_MAX || !size.is_power_of_two() {
            return Err(VhostError::QueueSize(size.into()));
        }
        let pin = |user: u64, len: u64, align: usize, what| {
            let pinned = memory.pin_user(user, len);
            pinned
                .filter(|p| p.ptr.addr() % align == 0)
                .ok_or(VhostError::RingAddress(what))
        };
        let n = u64::from(size);
        // The event index at the end of both rings is counted in even if it is not used.
        let mut ring = SplitRing {
            desc: pin(at.desc, n * DESC_LEN, 16, "descriptor table")?,
            avail: pin(at.avail, 6 + 2 * n, 2, "available ring")?,
            used: pin(at.used, 6 + 8 * n, 4, "used ring")?,
            size,
            event_idx,
            next_avail,
            seen_avail: next_avail,
            next_used: 0,
            published: 0,
            armed: None,
        };
        ring.next_used = ring.used_idx().load(Ordering::Acquire);
        ring.published = ring.next_used;
        Ok(ring)
    }

    fn u16_at(base: &Pinned, offset: usize) -> &AtomicU16 {
        // SAFETY: aligned and inside the pinned area (checked in `new` for every offset used
        // here), which `base` keeps mapped; the guest races with us, which atomics allow.
        unsafe { AtomicU16::from_ptr(base.ptr.add(offset).cast()) }
    }

    fn avail_flags(&self) -> &AtomicU16 {
        Self::u16_at(&self.avail, 0)
    }

    fn avail_idx(&self) -> &AtomicU16 {
        Self::u16_at(&self.avail, 2)
    }

    fn avail_entry(&self, index: u16) -> &AtomicU16 {
        Self::u16_at(&self.avail, 4 + 2 * usize::from(index % self.size))
    }

    /// The used index from which on the driver wants a call.
    fn used_event(&self) -> &AtomicU16 {
        Self::u16_at(&self.avail, 4 + 2 * usize::from(self.size))
    }

    fn used_flags(&self) -> &AtomicU16 {
        Self::u16_at(&self.used, 0)
    }

    fn used_idx(&self) -> &AtomicU16 {
        Self::u16_at(&self.used, 2)
    }

    /// The available index from which on we want a kick.
    fn avail_event(&self) -> &AtomicU16 {
        Self::u16_at(&self.used, 4 + 8 * usize::from(self.size))
    }

    /// The next request to be taken.
    pub fn next_avail(&self) -> u16 {
        self.next_avail
    }

    /// The used index the driver has been shown.
    pub fn published(&self) -> u16 {
        self.published
    }

    /// Goes on at another request: used once, when unfinished requests are taken over.
    pub fn set_next_avail(&mut self, index: u16) {
        self.next_avail = index;
        self.seen_avail = index;
    }

    /// True once the client took the ring's memory away.
    pub fn is_gone(&self) -> bool {
        self.desc.is_gone() || self.avail.is_gone() || self.used.is_gone()
    }

    /// True if a request waits.
    pub fn has_work(&self) -> bool {
        u16::from_le(self.avail_idx().load(Ordering::Relaxed)) != self.next_avail
    }

    /// Takes the next request's head.
    pub fn pop(&mut self) -> Result<Option<u16>, VhostError> {
        if self.seen_avail == self.next_avail {
            // Acquire: what the index announces is read after it.
            self.seen_avail = u16::from_le(self.avail_idx().load(Ordering::Acquire));
            let waiting = self.seen_avail.wrapping_sub(self.next_avail);
            if waiting > self.size {
                return Err(VhostError::RingOverrun(waiting, self.size));
            }
            if waiting == 0 {
                return Ok(None);
            }
        }
        let head = u16::from_le(self.avail_entry(self.next_avail).load(Ordering::Relaxed));
        self.next_avail = self.next_avail.wrapping_add(1);
        Ok(Some(head))
    }

    /// Puts a request into the used ring; the driver does not see it before [`publish`](Self::publish).
    pub fn push(&mut self, head: u16, written: u32) {
        let at = 4 + 8 * usize::from(self.next_used % self.size);
        // SAFETY: eight aligned bytes inside the pinned used ring; only we write entries.
        unsafe {
            let entry = self.used.ptr.add(at).cast::<u32>();
            entry.write_volatile(u32::from(head).to_le());
            entry.add(1).write_volatile(written.to_le());
        }
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// Entries pushed and not published.
    pub fn unpublished(&self) -> u16 {
        self.next_used.wrapping_sub(self.published)
    }

    /// Shows the driver what was pushed; true if it wants a call.
    pub fn publish(&mut self) -> bool {
        let old = std::mem::replace(&mut self.published, self.next_used);
        let new = self.next_used;
        if old == new {
            return false;
        }
        // Release: entries, status bytes and data come before the index.
        self.used_idx().store(new.to_le(), Ordering::Release);
        // The driver writes its event index, then looks at ours: one of us must see the other.
        fence(Ordering::SeqCst);
        if self.event_idx {
            let event = u16::from_le(self.used_event().load(Ordering::Relaxed));
            wants_event(event, new, old)
        } else {
            u16::from_le(self.avail_flags().load(Ordering::Relaxed)) & NO_INTERRUPT == 0
        }
    }

    /// Asks the driver to kick when it adds a request; true if it has added one already.
    pub fn arm(&mut self) -> bool {
        if self.armed != Some(self.next_avail) {
            self.armed = Some(self.next_avail);
            if self.event_idx {
                let next = self.next_avail.to_le();
                self.avail_event().store(next, Ordering::Relaxed);
            } else {
                self.used_flags().store(0, Ordering::Relaxed);
            }
            // As in `publish`, the other way round.
            fence(Ordering::SeqCst);
        }
        self.has_work()
    }

    /// Tells the driver that it need not kick: somebody looks anyway. With event indices there
    /// is nothing to do, one index asks for one kick.
    pub fn disarm(&mut self) {
        if self.armed.is_some() && !self.event_idx {
            self.armed = None;
            self.used_flags()
                .store(NO_NOTIFY.to_le(), Ordering::Relaxed);
        }
    }
}

impl Table for SplitRing {
    fn size(&self) -> u16 {
        self.size
    }

    fn get(&self, index: u16) -> [u8; DESC_LEN as usize] {
        let at = usize::from(index % self.size) * DESC_LEN as usize;
        // SAFETY: sixteen aligned bytes inside the pinned table, copied once.
        let halves = unsafe {
            let desc = self.desc.ptr.add(at).cast::<u64>();
            [desc.read_volatile(), desc.add(1).read_volatile()]
        };
        let mut raw = [0u8; DESC_LEN as usize];
        raw[..8].copy_from_slice(&halves[0].to_ne_bytes());
        raw[8..].copy_from_slice(&halves[1].to_ne_bytes());
        raw
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_wanted_once_passed() {
        assert!(wants_event(0, 1, 0));
        assert!(!wants_event(1, 1, 0));
        assert!(wants_event(3, 7, 2));
        assert!(!wants_event(7, 7, 2));
        assert!(wants_event(u16::MAX, 0, u16::MAX), "across the end");
        assert!(!wants_event(5, 4, 2));
    }
}
