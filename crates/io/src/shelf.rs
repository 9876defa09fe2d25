//! Long buffers that several threads take and give back.
//!
//! Fresh memory for a long request costs more than its I/O: the kernel zeroes every page of it, a fault at a time, and then it
//! is zeroed once more. A [`BufPool`](crate::BufPool) keeps such memory, but for one thread. A shelf keeps it where one
//! thread receives, another one has the disk at work, and a third gives back.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::buf::{BUF_ALIGN, Buf};

/// What is shorter is left to the allocator, which keeps it itself.
const LONG: usize = 32 << 10;
/// Bytes kept: the depth of a sequential stream.
const KEPT_MAX: usize = 16 << 20;

#[derive(Debug, Default)]
struct Kept {
    /// Newest buffer last.
    bufs: Vec<Buf>,
    bytes: usize,
    /// Something was taken since the last [`Shelf::age`].
    used: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Shelf(Mutex<Kept>);

impl Shelf {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer of at least `len` bytes. What is in it is unspecified, and may be what somebody else had.
    pub fn take(&self, len: usize) -> Buf {
        if len < LONG {
            return Buf::zeroed(len);
        }
        let mut kept = self.lock();
        kept.used = true;
        // The requests of a stream are of one length; one that is much too long would be missed elsewhere.
        let fits = |buf: &Buf| (len..=len + len / 4 + BUF_ALIGN).contains(&buf.len());
        if let Some(at) = kept.bufs.iter().rposition(fits) {
            let buf = kept.bufs.remove(at);
            kept.bytes -= buf.len();
            return buf;
        }
        drop(kept);
        Buf::zeroed(len)
    }

    /// Takes a buffer back; kept only if this is its last handle.
    pub fn put(&self, buf: Buf) {
        let len = buf.len();
        if !(LONG..=KEPT_MAX).contains(&len) || buf.handles() != 1 {
            return;
        }
        let mut kept = self.lock();
        kept.bytes += len;
        kept.bufs.push(buf);
        // The oldest buffers may have a length that is no longer requested.
        let mut dropped = 0;
        while kept.bytes > KEPT_MAX {
            kept.bytes -= kept.bufs[dropped].len();
            dropped += 1;
        }
        let old: Vec<Buf> = kept.bufs.drain(..dropped).collect();
        drop(kept);
        drop(old);
    }

    /// Lets go of everything if nothing was taken since the last call.
    pub fn age(&self) {
        let mut kept = self.lock();
        let old = match std::mem::take(&mut kept.used) {
            true => Vec::new(),
            false => std::mem::take(&mut kept.bufs),
        };
        if !old.is_empty() {
            kept.bytes = 0;
        }
        drop(kept);
        drop(old);
    }

    /// True if something is kept, or was taken since the last [`age`](Self::age): it may come back.
    pub fn is_in_use(&self) -> bool {
        let kept = self.lock();
        kept.used || kept.bytes > 0
    }

    /// Bytes that are kept.
    pub fn kept(&self) -> usize {
        self.lock().bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_else_holds_is_kept_for_the_next() {
        let shelf = Shelf::default();
        let first = shelf.take(1 << 20);
        let held = first.clone();
        let at = first.all().as_ptr();
        shelf.put(first);
        assert_eq!(shelf.kept(), 0, "somebody holds it");
        shelf.put(held);
        assert_eq!(shelf.kept(), 1 << 20);
        assert!(shelf.take(64 << 10).len() < 1 << 20, "much too long");
        assert_eq!(shelf.take((1 << 20) - 5000).all().as_ptr(), at);
        assert_eq!(shelf.kept(), 0);
    }

    #[test]
    fn a_bounded_number_of_bytes_is_kept_and_none_when_idle() {
        let shelf = Shelf::default();
        let taken: Vec<Buf> = (0..40).map(|_| shelf.take(1 << 20)).collect();
        for buf in taken {
            shelf.put(buf);
            assert!(shelf.kept() <= KEPT_MAX);
        }
        // More that come back than are kept cost none that is kept.
        assert_eq!(shelf.kept(), KEPT_MAX);
        shelf.put(shelf.take(4096));
        assert!(shelf.is_in_use());
        shelf.age();
        assert!(shelf.kept() > 0, "it was used since");
        shelf.age();
        assert!(shelf.kept() == 0 && !shelf.is_in_use());
        shelf.put(Buf::zeroed(1 << 20));
        assert_eq!(shelf.kept(), 1 << 20);
    }
}
