//! Buffers the kernel may write into while Rust code still holds handles to them.
//!
//! O_DIRECT needs memory aligned to the device's logical block, and a request's payload
//! must stay alive until every kernel operation on it has ended, whoever drops the request
//! first. So memory is reference-counted: each [`IoOp`](crate::op::IoOp) owns a handle to
//! what it reads or writes, and the last handle gives the memory back.
//!
//! A [`BufSlice`] is a window into such memory. The engine's range locks guarantee that at
//! any time either one operation writes a window or any number read it; this is what makes
//! the `unsafe` here sound in practice.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::sync::Arc;

/// Alignment of every buffer, and the size of a block: 4 KiB.
pub const BUF_ALIGN: usize = 4096;

struct Memory {
    ptr: *mut u8,
    len: usize,
    layout: Option<Layout>,
    /// Keeps foreign memory (a guest's RAM, a registered pool) mapped while in use.
    keepalive: Option<Arc<dyn Send + Sync>>,
}

// SAFETY: `Memory` is only a pointer to a heap allocation (or to foreign memory kept mapped
// by `keepalive`); it has no thread affinity. Access is coordinated by the engine's range locks.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(layout) = self.layout {
            // SAFETY: allocated in `Buf::zeroed` with exactly this layout, freed once, here.
            unsafe { dealloc(self.ptr, layout) }
        }
    }
}

/// A reference-counted, 4 KiB aligned piece of memory. Cloning clones the handle.
#[derive(Clone)]
pub struct Buf(Arc<Memory>);

impl Buf {
    /// Allocates `len` zeroed bytes (rounded up to a whole block, at least one block).
    pub fn zeroed(len: usize) -> Buf {
        let len = len.div_ceil(BUF_ALIGN).max(1) * BUF_ALIGN;
        let layout = Layout::from_size_align(len, BUF_ALIGN).expect("buffer sizes are bounded");
        // SAFETY: the layout has a non-zero size.
        let ptr = unsafe { alloc_zeroed(layout) };
        if ptr.is_null() {
            handle_alloc_error(layout);
        }
        Buf(Arc::new(Memory {
            ptr,
            len,
            layout: Some(layout),
            keepalive: None,
        }))
    }

    /// Wraps memory somebody else owns, such as a guest's RAM.
    ///
    /// # Safety
    /// `ptr..ptr+len` must stay mapped and writable while `keepalive` is alive.
    pub unsafe fn foreign(ptr: *mut u8, len: usize, keepalive: Arc<dyn Send + Sync>) -> Buf {
        Buf(Arc::new(Memory {
            ptr,
            len,
            layout: None,
            keepalive: Some(keepalive),
        }))
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// True if the buffer holds no byte.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// A window of `len` bytes at `start`. Panics if it does not fit: callers compute both.
    pub fn slice(&self, start: usize, len: usize) -> BufSlice {
        let end = start.checked_add(len).filter(|end| *end <= self.0.len);
        assert!(
            end.is_some_and(|end| u32::try_from(end).is_ok()),
            "slice outside its buffer, or beyond 4 GiB"
        );
        BufSlice {
            buf: self.clone(),
            start: start as u32,
            len: len as u32,
        }
    }

    /// The whole buffer as a window.
    pub fn all(&self) -> BufSlice {
        self.slice(0, self.0.len)
    }

    /// How many handles exist; 1 means the memory may be reused.
    pub fn handles(&self) -> usize {
        Arc::strong_count(&self.0)
    }
}

impl std::fmt::Debug for Buf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buf({} bytes)", self.0.len)
    }
}

/// A window into a [`Buf`]; owns a handle to it.
#[derive(Clone, Debug)]
pub struct BufSlice {
    buf: Buf,
    start: u32,
    len: u32,
}

impl BufSlice {
    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Length of the buffer it is a part of, which lives as long.
    pub fn allocated(&self) -> usize {
        self.buf.len()
    }

    /// True if the window is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the first byte, for handing to the kernel.
    pub fn as_ptr(&self) -> *mut u8 {
        // SAFETY: `start` lies inside the buffer (checked in `Buf::slice`).
        unsafe { self.buf.0.ptr.add(self.start as usize) }
    }

    /// The buffer that this is a window into.
    pub fn into_buf(self) -> Buf {
        self.buf
    }

    /// True for memory somebody else may write at any moment ([`Buf::foreign`]). What was read
    /// from it once proves nothing about what a second look, or the device, will find there.
    pub fn is_shared(&self) -> bool {
        self.buf.0.keepalive.is_some()
    }

    /// The bytes. The caller must hold the range (no operation in flight that writes it).
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the window lies inside live memory; no writer by the module's rule.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len()) }
    }

    /// The bytes, to write. The caller must hold the range alone, by the module's rule.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as `bytes`; `&mut self` and the range rule keep other access away.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), self.len()) }
    }

    /// A window into this window.
    pub fn sub(&self, start: usize, len: usize) -> BufSlice {
        assert!(
            start.checked_add(len).is_some_and(|end| end <= self.len()),
            "slice outside its window"
        );
        BufSlice {
            buf: self.buf.clone(),
            start: self.start + start as u32,
            len: len as u32,
        }
    }

    /// True if `next` begins in memory where this window ends (they can be one I/O vector).
    pub fn adjoins(&self, next: &BufSlice) -> bool {
        Arc::ptr_eq(&self.buf.0, &next.buf.0) && self.start + self.len == next.start
    }

    /// Grows the window by `len` bytes; only for a neighbour that [`adjoins`](Self::adjoins).
    pub fn extend(&mut self, len: usize) {
        assert!(
            self.start as usize + self.len() + len <= self.buf.len(),
            "window outside its buffer"
        );
        self.len += len as u32;
    }
}

/// A bounded free list of buffers of a few sizes, so that the data path does not allocate.
///
/// Not shared: each data thread has its own. Its owner calls [`age`](Self::age) now and then,
/// so that a thread nobody talks to holds nothing.
#[derive(Debug, Default)]
pub struct BufPool {
    free: Vec<(usize, Vec<Buf>)>,
    /// Bytes in `free`.
    kept: usize,
    /// Buffers were taken since the last [`age`](Self::age).
    used: bool,
}

/// Largest buffer kept for reuse: guests split what is longer, so larger ones are rare.
const POOL_MAX_LEN: usize = 2 << 20;
/// Bytes kept: enough for the depth of a sequential stream. Without them each long request pays
/// for the page faults of fresh memory, more than for its I/O.
const POOL_BYTES: usize = 8 << 20;

impl BufPool {
    /// A buffer of at least `len` bytes. Contents are unspecified (never uninitialised).
    pub fn get(&mut self, len: usize) -> Buf {
        let class = len.div_ceil(BUF_ALIGN).max(1).next_power_of_two() * BUF_ALIGN;
        if class > POOL_MAX_LEN {
            return Buf::zeroed(len);
        }
        self.used = true;
        if let Some((_, list)) = self.free.iter_mut().find(|(c, _)| *c == class)
            && let Some(buf) = list.pop()
        {
            self.kept -= class;
            return buf;
        }
        Buf::zeroed(class)
    }

    /// Takes a buffer back; kept only if this is its last handle.
    pub fn put(&mut self, buf: Buf) {
        let len = buf.len();
        if len > POOL_MAX_LEN || buf.handles() != 1 || !(len / BUF_ALIGN).is_power_of_two() {
            return;
        }
        if self.kept + len > POOL_BYTES {
            // What is kept may be of sizes nobody asks for any more.
            self.clear();
        }
        self.kept += len;
        match self.free.iter_mut().find(|(c, _)| *c == len) {
            Some((_, list)) => list.push(buf),
            None => self.free.push((len, vec![buf])),
        }
    }

    /// Frees what is kept if nothing was taken since the last call.
    pub fn age(&mut self) {
        if !std::mem::take(&mut self.used) {
            self.clear();
        }
    }

    /// Frees what is kept.
    pub fn clear(&mut self) {
        self.free.clear();
        self.kept = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_keeps_a_bounded_number_of_bytes_and_lets_go_when_idle() {
        let mut pool = BufPool::default();
        let taken: Vec<Buf> = (0..40).map(|_| pool.get(1 << 20)).collect();
        for buf in taken {
            pool.put(buf);
            assert!(pool.kept <= POOL_BYTES);
        }
        let small = pool.get(4096);
        pool.put(small);
        assert!(pool.kept > 0);
        pool.age();
        assert!(pool.kept > 0, "it was used since");
        pool.age();
        assert_eq!((pool.kept, pool.free.len()), (0, 0));
    }
}
