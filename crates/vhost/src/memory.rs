//! The guest's memory, as the client shared it.
//!
//! A client names regions: where the guest sees them (guest-physical), where the client has them
//! mapped (its own addresses name the rings), and the file behind them. We map each file range
//! and hand out windows into the mapping as I/O buffers. A window keeps its mapping alive, so
//! memory that is unshared while the device still writes it stays mapped until that has ended.

use crate::backing::check_memory;
use crate::chain::{Guest, Outside};
use crate::error::VhostError;
use crate::sigbus::Watch;
use hearth_io::{Buf, BufSlice};
use smallvec::SmallVec;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

/// Regions a client may share: what vhost-user back ends commonly take, and more than QEMU has.
pub const REGIONS_MAX: usize = 64;
/// Longest request's data (`REQUEST_MAX`) and more fits in any two neighbouring windows' overlap.
const WINDOW_STEP: u64 = 1 << 30;
/// Windows overlap by half, so that every piece up to a step long lies in one of them whole;
/// their length stays below what [`BufSlice`] can address.
const WINDOW: u64 = 2 << 30;

/// A mapped range of a client's file; unmapped when the last buffer in it is gone.
#[derive(Debug)]
pub struct Mapping {
    base: *mut u8,
    len: usize,
    /// Dropped first: a mapping that is gone must not be replaced.
    watch: Option<Watch>,
}

// SAFETY: a mapping is memory without thread affinity; all access to its content goes through
// raw pointers, volatile or atomic, or hands it to the kernel.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `file` from `offset`, whatever their alignment, shared and writable.
    /// Returns the mapping and the address of the first byte asked for.
    pub fn new(file: &File, offset: u64, len: u64) -> Result<(Arc<Mapping>, *mut u8), VhostError> {
        check_memory(file)?;
        let fail = |source| VhostError::Map { size: len, source };
        let size = file.metadata().map_err(fail)?;
        let end = offset
            .checked_add(len)
            .ok_or(VhostError::Region(offset, len))?;
        if end > size.size() {
            return Err(VhostError::Truncated {
                end,
                size: size.size(),
            });
        }
        // Huge pages map only at multiples of their size, which the file system reports.
        let unit = size.blksize().max(4096);
        let from = offset / unit * unit;
        let lead = offset - from;
        let span = lead
            .checked_add(len)
            .and_then(|n| n.checked_next_multiple_of(unit))
            .and_then(|n| usize::try_from(n).ok())
            .ok_or(VhostError::Region(offset, len))?;
        // SAFETY: a fresh mapping at an address of the kernel's choice; nothing else is touched.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                span,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                file.as_raw_fd(),
                from as libc::off_t,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(fail(std::io::Error::last_os_error()));
        }
        let mut mapping = Mapping {
            base: base.cast(),
            len: span,
            watch: None,
        };
        // SAFETY: the range was just mapped; advice only. Guest memory must not be in core dumps.
        unsafe { libc::madvise(base, span, libc::MADV_DONTDUMP) };
        // A daemon that locks its own memory must not lock its guests', which the host may want to swap. Nothing of
        // it has been touched yet.
        // SAFETY: the range was just mapped, and stays mapped.
        unsafe { libc::munlock(base, span) };
        mapping.watch = Some(Watch::new(mapping.base, span).map_err(fail)?);
        let first = mapping.base.wrapping_add(lead as usize);
        Ok((Arc::new(mapping), first))
    }

    /// True once the client has taken the memory away: reads then give zeros.
    pub fn is_gone(&self) -> bool {
        self.watch.as_ref().is_some_and(Watch::is_gone)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        drop(self.watch.take());
        // SAFETY: mapped in `new` with this length, unmapped once, here; every buffer into it
        // held a reference, so none is left.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

/// One region.
#[derive(Clone, Debug)]
pub struct Region {
    guest: u64,
    user: u64,
    len: u64,
    first: *mut u8,
    mapping: Arc<Mapping>,
    windows: Arc<[Buf]>,
}

// SAFETY: as for `Mapping`, whose memory `first` points into.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Maps a region: `len` bytes of `file` from `offset`, at `guest` for the guest and at
    /// `user` for the client.
    pub fn new(
        guest: u64,
        user: u64,
        len: u64,
        file: &File,
        offset: u64,
    ) -> Result<Region, VhostError> {
        if len == 0 || guest.checked_add(len).is_none() || user.checked_add(len).is_none() {
            return Err(VhostError::Region(guest, len));
        }
        let (mapping, first) = Mapping::new(file, offset, len)?;
        let windows = (0..len.div_ceil(WINDOW_STEP))
            .map(|i| {
                let start = i * WINDOW_STEP;
                let size = WINDOW.min(len - start) as usize;
                let at = first.wrapping_add(start as usize);
                // SAFETY: the window lies inside the mapping, which the keepalive keeps mapped.
                unsafe { Buf::foreign(at, size, mapping.clone()) }
            })
            .collect();
        Ok(Region {
            guest,
            user,
            len,
            first,
            mapping,
            windows,
        })
    }

    /// Where the guest sees it.
    pub fn guest(&self) -> u64 {
        self.guest
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True for no region that exists; beside [`len`](Self::len) by custom.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A piece of at most a step's length as a buffer.
    fn slice(&self, at: u64, len: u64) -> BufSlice {
        let index = at / WINDOW_STEP;
        self.windows[index as usize].slice((at - index * WINDOW_STEP) as usize, len as usize)
    }
}

/// Memory at an address both sides see, kept mapped.
#[derive(Clone, Debug)]
pub struct Pinned {
    /// First byte.
    pub ptr: *mut u8,
    mapping: Arc<Mapping>,
}

// SAFETY: as for `Mapping`.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Memory of a mapping; `ptr` must point into it.
    pub fn new(ptr: *mut u8, mapping: Arc<Mapping>) -> Pinned {
        Pinned { ptr, mapping }
    }

    /// True once the client has taken the memory away.
    pub fn is_gone(&self) -> bool {
        self.mapping.is_gone()
    }
}

/// Pieces of guest memory, in order.
pub type Pieces = SmallVec<[BufSlice; 4]>;

/// All regions of a client, by guest address.
#[derive(Clone, Debug, Default)]
pub struct GuestMemory {
    regions: Vec<Region>,
}

impl GuestMemory {
    /// Memory of these regions, which must not overlap.
    pub fn new(mut regions: Vec<Region>) -> Result<GuestMemory, VhostError> {
        if regions.len() > REGIONS_MAX {
            return Err(VhostError::Regions);
        }
        regions.sort_by_key(|r| r.guest);
        for pair in regions.windows(2) {
            if pair[0].guest + pair[0].len > pair[1].guest {
                return Err(VhostError::Region(pair[1].guest, pair[1].len));
            }
        }
        Ok(GuestMemory { regions })
    }

    /// The regions, by guest address.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// True once the client has taken any of it away.
    pub fn is_gone(&self) -> bool {
        self.regions.iter().any(|r| r.mapping.is_gone())
    }

    fn region(&self, guest: u64) -> Option<&Region> {
        // A handful: a search from the front beats a clever one.
        self.regions
            .iter()
            .find(|r| guest >= r.guest && guest - r.guest < r.len)
    }

    /// Memory at one of the client's own addresses; must lie in one region whole.
    pub fn pin_user(&self, user: u64, len: u64) -> Option<Pinned> {
        self.regions.iter().find_map(|r| {
            let at = user.checked_sub(r.user)?;
            (at.checked_add(len)? <= r.len).then(|| Pinned {
                ptr: r.first.wrapping_add(at as usize),
                mapping: r.mapping.clone(),
            })
        })
    }

    /// Calls `f` with each stretch of memory of a guest range, in order.
    fn each(
        &self,
        mut guest: u64,
        mut len: u64,
        mut f: impl FnMut(&Region, u64, u64),
    ) -> Result<(), Outside> {
        while len > 0 {
            let region = self.region(guest).ok_or(Outside)?;
            let at = guest - region.guest;
            let n = len.min(region.len - at);
            f(region, at, n);
            (guest, len) = (guest + n, len - n);
        }
        Ok(())
    }

    /// Appends the buffers of a guest range of at most 1 GiB; neighbours become one.
    pub fn pieces(&self, guest: u64, len: u64, out: &mut Pieces) -> Result<(), Outside> {
        self.each(guest, len, |region, at, n| {
            let piece = region.slice(at, n);
            match out.last_mut() {
                Some(last) if last.adjoins(&piece) => last.extend(piece.len()),
                _ => out.push(piece),
            }
        })
    }

    /// Writes into guest memory.
    pub fn write(&self, guest: u64, mut data: &[u8]) -> Result<(), Outside> {
        self.each(guest, data.len() as u64, |region, at, n| {
            let (now, rest) = data.split_at(n as usize);
            // SAFETY: `at + n` lies inside the region's mapping; the guest may race with us, and
            // then has only itself to blame for what it finds.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    now.as_ptr(),
                    region.first.wrapping_add(at as usize),
                    now.len(),
                );
            }
            data = rest;
        })
    }
}

impl Guest for GuestMemory {
    fn read(&self, guest: u64, out: &mut [u8]) -> Result<(), Outside> {
        let mut done = 0;
        self.each(guest, out.len() as u64, |region, at, n| {
            let to = &mut out[done..done + n as usize];
            // SAFETY: as in `write`; each byte is read once, and only the copy is judged.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    region.first.wrapping_add(at as usize),
                    to.as_mut_ptr(),
                    to.len(),
                );
            }
            done += n as usize;
        })
    }

    fn holds(&self, guest: u64, len: u64) -> bool {
        self.each(guest, len, |_, _, _| {}).is_ok()
    }
}
