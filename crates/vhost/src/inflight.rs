//! Requests that outlive the daemon.
//!
//! A guest's request that was taken and not answered when the daemon died would wait for ever:
//! the available ring does not hold it any more, the used ring not yet. So what is in flight is
//! noted in memory the client keeps for us (`VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD`): taken
//! requests are marked before anything is done about them, and the marks are removed in an order
//! that leaves no doubt after a crash between any two steps. Layout and order of a split queue's
//! region: QEMU's docs/interop/vhost-user.rst, "Inflight I/O tracking".
//!
//! The memory is the client's, and may hold anything: every number is checked before use.

use crate::error::VhostError;
use crate::memory::{Mapping, Pinned};
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering};

/// Bytes before the first descriptor's state.
const HEAD: usize = 16;
/// Bytes of a descriptor's state.
const STATE: usize = 16;
/// Regions of queues begin at multiples of this.
const ALIGN: u64 = 64;
/// The only version there is.
const VERSION: u16 = 1;

/// Bytes of one queue's region.
pub fn region_len(queue_size: u16) -> u64 {
    (HEAD as u64 + STATE as u64 * u64::from(queue_size)).next_multiple_of(ALIGN)
}

/// Makes the file for so many queues, all zero.
pub fn create(queues: u16, queue_size: u16) -> Result<(File, u64), VhostError> {
    let len = region_len(queue_size) * u64::from(queues);
    // SAFETY: a literal name and plain flags.
    let fd = unsafe {
        libc::memfd_create(
            c"hearth-inflight".as_ptr(),
            libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING,
        )
    };
    if fd < 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    // SAFETY: a descriptor just made by the kernel, owned by nobody else.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.set_len(len)?;
    // SAFETY: plain numbers; refusing the seals costs only a line of defence.
    unsafe {
        libc::fcntl(
            file.as_raw_fd(),
            libc::F_ADD_SEALS,
            libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL,
        )
    };
    Ok((file, len))
}

/// The whole area, mapped.
#[derive(Clone, Debug)]
pub struct Area {
    first: Pinned,
    queues: u16,
    queue_size: u16,
}

impl Area {
    /// Maps the area of a file.
    pub fn map(
        file: &File,
        offset: u64,
        len: u64,
        queues: u16,
        queue_size: u16,
    ) -> Result<Area, VhostError> {
        if region_len(queue_size) * u64::from(queues) > len || !offset.is_multiple_of(8) {
            return Err(VhostError::Inflight(
                "it is too small for its queues, or not aligned",
            ));
        }
        let (mapping, first) = Mapping::new(file, offset, len)?;
        Ok(Area {
            first: Pinned::new(first, mapping),
            queues,
            queue_size,
        })
    }

    /// Whether the area has room for queues of this size.
    pub fn fits(&self, queue: u16, size: u16) -> bool {
        queue < self.queues && size <= self.queue_size
    }

    /// One queue's part; `None` if the area has none for it.
    pub fn queue(&self, index: u16, size: u16) -> Option<Inflight> {
        if !self.fits(index, size) {
            return None;
        }
        let offset = region_len(self.queue_size) as usize * usize::from(index);
        let mut base = self.first.clone();
        base.ptr = base.ptr.wrapping_add(offset);
        Some(Inflight {
            base,
            size,
            counter: 0,
        })
    }
}

/// The notes of one queue.
#[derive(Debug)]
pub struct Inflight {
    base: Pinned,
    size: u16,
    counter: u64,
}

impl Inflight {
    fn u16_at(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: an even offset below the region's length, in memory kept mapped; the client
        // may race with us, which atomics allow.
        unsafe { AtomicU16::from_ptr(self.base.ptr.add(offset).cast()) }
    }

    fn version(&self) -> &AtomicU16 {
        self.u16_at(8)
    }

    fn desc_num(&self) -> &AtomicU16 {
        self.u16_at(10)
    }

    fn last_batch_head(&self) -> &AtomicU16 {
        self.u16_at(12)
    }

    fn used_idx(&self) -> &AtomicU16 {
        self.u16_at(14)
    }

    fn state(&self, head: u16) -> usize {
        HEAD + STATE * usize::from(head % self.size)
    }

    fn flag(&self, head: u16) -> &AtomicU8 {
        // SAFETY: as in `u16_at`, for one byte.
        unsafe { AtomicU8::from_ptr(self.base.ptr.add(self.state(head)).cast()) }
    }

    fn next(&self, head: u16) -> &AtomicU16 {
        self.u16_at(self.state(head) + 6)
    }

    fn counter(&self, head: u16) -> &AtomicU64 {
        // SAFETY: as in `u16_at`, at a multiple of eight.
        unsafe { AtomicU64::from_ptr(self.base.ptr.add(self.state(head) + 8).cast()) }
    }

    /// True once the client took the memory away.
    pub fn is_gone(&self) -> bool {
        self.base.is_gone()
    }

    /// Finishes what the last life left half done, given the used index in the queue; returns
    /// the heads of unfinished requests in the order they were taken, or nothing if there was no
    /// last life.
    pub fn recover(&mut self, used: u16) -> Result<Option<Vec<u16>>, VhostError> {
        if self.version().load(Ordering::Relaxed) == 0 {
            self.desc_num().store(self.size, Ordering::Relaxed);
            self.used_idx().store(used, Ordering::Relaxed);
            self.version().store(VERSION, Ordering::Release);
            return Ok(None);
        }
        if self.version().load(Ordering::Relaxed) != VERSION {
            return Err(VhostError::Inflight("its version is unknown"));
        }
        if self.desc_num().load(Ordering::Relaxed) != self.size {
            // The queue was set up anew with another size: nothing of the old one is left.
            for head in 0..self.size {
                self.flag(head).store(0, Ordering::Relaxed);
            }
            self.desc_num().store(self.size, Ordering::Relaxed);
            self.used_idx().store(used, Ordering::Relaxed);
            return Ok(None);
        }
        // We died between showing a batch and removing its marks: its members are done.
        let batch = used.wrapping_sub(self.used_idx().load(Ordering::Relaxed));
        if batch > self.size {
            return Err(VhostError::Inflight(
                "its used index is further from the queue's than the queue is long",
            ));
        }
        let mut head = self.last_batch_head().load(Ordering::Relaxed);
        for _ in 0..batch {
            if head >= self.size {
                return Err(VhostError::Inflight("its last batch names no descriptor"));
            }
            self.flag(head).store(0, Ordering::Relaxed);
            head = self.next(head).load(Ordering::Relaxed);
        }
        self.used_idx().store(used, Ordering::Release);
        let mut left: Vec<(u64, u16)> = (0..self.size)
            .filter(|h| self.flag(*h).load(Ordering::Relaxed) == 1)
            .map(|h| (self.counter(h).load(Ordering::Relaxed), h))
            .collect();
        left.sort_unstable();
        self.counter = left.last().map_or(0, |(c, _)| c.wrapping_add(1));
        Ok(Some(left.into_iter().map(|(_, h)| h).collect()))
    }

    /// A request was taken.
    pub fn taken(&mut self, head: u16) {
        self.counter(head).store(self.counter, Ordering::Relaxed);
        self.counter = self.counter.wrapping_add(1);
        self.flag(head).store(1, Ordering::Release);
    }

    /// A request is about to be shown as used.
    pub fn finishing(&mut self, head: u16) {
        let last = self.last_batch_head().load(Ordering::Relaxed);
        self.next(head).store(last, Ordering::Relaxed);
        self.last_batch_head().store(head, Ordering::Release);
    }

    /// These were shown, and the used index is now `used`.
    pub fn finished(&mut self, heads: &[u16], used: u16) {
        for head in heads {
            self.flag(*head).store(0, Ordering::Release);
        }
        self.used_idx().store(used, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn area(size: u16) -> Area {
        let (file, len) = create(2, size).unwrap();
        Area::map(&file, 0, len, 2, size).unwrap()
    }

    fn again(area: &Area, used: u16) -> Vec<u16> {
        let left = area.queue(1, 8).unwrap().recover(used).unwrap();
        left.expect("a last life")
    }

    #[test]
    fn unfinished_requests_come_back_in_order() {
        let area = area(8);
        let mut q = area.queue(1, 8).unwrap();
        assert!(q.recover(100).unwrap().is_none());
        for head in [5, 2, 7] {
            q.taken(head);
        }
        q.finishing(2);
        q.finished(&[2], 101);
        drop(q);
        assert_eq!(again(&area, 101), [5, 7]);
        assert_eq!(again(&area, 101), [5, 7], "as often as needed");
        // Order survives: what is taken now comes after what was left.
        let mut q = area.queue(1, 8).unwrap();
        q.recover(101).unwrap();
        q.taken(0);
        assert_eq!(again(&area, 101), [5, 7, 0]);
    }

    #[test]
    fn a_crash_between_any_two_steps_loses_and_repeats_nothing() {
        // Before the index is shown, the requests are not done.
        let area = area(8);
        let mut q = area.queue(1, 8).unwrap();
        q.recover(65535).unwrap();
        for head in [1, 3, 4] {
            q.taken(head);
        }
        q.finishing(1);
        q.finishing(4);
        assert_eq!(again(&area, 65535), [1, 3, 4]);
        // After it, they are, although no mark was removed.
        assert_eq!(again(&area, 1), [3]);
        assert_eq!(again(&area, 1), [3]);
    }

    #[test]
    fn nonsense_is_refused() {
        let area = area(8);
        area.queue(1, 8).unwrap().recover(0).unwrap();
        let q = area.queue(1, 8).unwrap();
        q.last_batch_head().store(99, Ordering::Relaxed);
        assert!(area.queue(1, 8).unwrap().recover(1).is_err());
        assert!(area.queue(1, 8).unwrap().recover(9).is_err());
        q.version().store(2, Ordering::Relaxed);
        assert!(area.queue(1, 8).unwrap().recover(0).is_err());
        assert!(area.queue(2, 8).is_none());
        assert!(area.queue(0, 16).is_none());
        let (file, len) = create(1, 8).unwrap();
        assert!(Area::map(&file, 0, len, 2, 8).is_err());
        assert!(
            Area::map(&file, 0, len * 2, 2, 8).is_err(),
            "beyond the file"
        );
    }
}
