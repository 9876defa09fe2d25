//! Surviving a client that takes its memory away.
//!
//! Guest memory is a file of the client's, mapped by both sides. A client that truncates the
//! file turns every later touch of ours into SIGBUS, which would end the daemon and with it
//! everybody else's disks. Seals (`F_SEAL_SHRINK`) would forbid that, but neither files on
//! hugetlbfs or tmpfs nor all hypervisors have them, and copying through pread(2) would cost
//! every request a system call. So the signal is caught: if the address lies in a registered
//! mapping, the whole mapping is replaced by private zero pages, the mapping is marked as gone,
//! and the thread goes on with zeros until its owner notices the mark and lets the client go.
//! Any other SIGBUS is handed to whoever handled it before us.
//!
//! The kernel's own accesses (io_uring reads into a guest's buffer) do not raise signals; they
//! fail with EFAULT, and so does the request.

use std::io;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Mappings that can be watched at a time: 4096 clients with a handful of regions each would be
/// more than one host runs.
const SLOTS: usize = 16 << 10;

struct Slot {
    /// First byte; 0 if the slot is free.
    start: AtomicUsize,
    len: AtomicUsize,
    taken: AtomicBool,
    gone: AtomicBool,
}

#[expect(
    clippy::declare_interior_mutable_const,
    reason = "only the initial value of each slot of the table"
)]
const FREE: Slot = Slot {
    start: AtomicUsize::new(0),
    len: AtomicUsize::new(0),
    taken: AtomicBool::new(false),
    gone: AtomicBool::new(false),
};

/// A table of atomics, because a signal handler may neither lock nor allocate.
static TABLE: [Slot; SLOTS] = [FREE; SLOTS];
/// Slots in use lie below this, so that the handler need not look at all of them.
static HIGH: AtomicUsize = AtomicUsize::new(0);
static INSTALL: Once = Once::new();
static mut PREVIOUS: std::mem::MaybeUninit<libc::sigaction> = std::mem::MaybeUninit::uninit();

/// A mapping whose SIGBUS is survived, as long as this lives.
#[derive(Debug)]
pub struct Watch(usize);

impl Watch {
    /// Watches `start..start+len`, a whole mapping. It must stay mapped while this lives.
    pub fn new(start: *mut u8, len: usize) -> io::Result<Watch> {
        install();
        for (index, slot) in TABLE.iter().enumerate() {
            if slot.taken.load(Ordering::Relaxed) || slot.taken.swap(true, Ordering::Acquire) {
                continue;
            }
            slot.gone.store(false, Ordering::Relaxed);
            slot.len.store(len, Ordering::Relaxed);
            slot.start.store(start as usize, Ordering::Release);
            HIGH.fetch_max(index + 1, Ordering::SeqCst);
            return Ok(Watch(index));
        }
        Err(io::Error::other(
            "more guest memory regions are mapped than can be watched",
        ))
    }

    /// True once the memory was taken away.
    pub fn is_gone(&self) -> bool {
        TABLE[self.0].gone.load(Ordering::Acquire)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let slot = &TABLE[self.0];
        slot.start.store(0, Ordering::Release);
        slot.taken.store(false, Ordering::Release);
    }
}

fn install() {
    INSTALL.call_once(|| {
        // SAFETY: all-zero bytes are a valid sigaction; the handler below only touches atomics
        // and makes system calls. PREVIOUS is written before the handler can run, once.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_sigbus as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigemptyset(&mut action.sa_mask);
            let previous = &raw mut PREVIOUS;
            libc::sigaction(libc::SIGBUS, std::ptr::null(), (*previous).as_mut_ptr());
            libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut());
        }
    });
}

/// The handler. Async-signal-safe: atomics, mmap and sigaction only, errno kept.
extern "C" fn on_sigbus(
    _signal: libc::c_int,
    info: *mut libc::siginfo_t,
    _context: *mut libc::c_void,
) {
    // SAFETY: the kernel passes a valid siginfo; SIGBUS carries an address.
    let at = unsafe { (*info).si_addr() } as usize;
    // SAFETY: returns a pointer to this thread's errno, always valid.
    let errno = unsafe { *libc::__errno_location() };
    for slot in &TABLE[..HIGH.load(Ordering::SeqCst)] {
        let start = slot.start.load(Ordering::Acquire);
        let len = slot.len.load(Ordering::Relaxed);
        if start == 0 || at < start || at >= start + len {
            continue;
        }
        slot.gone.store(true, Ordering::Release);
        // SAFETY: replaces exactly one mapping that its `Watch` says is ours and mapped. The
        // whole of it: a part of a huge page cannot be replaced.
        let new = unsafe {
            libc::mmap(
                start as *mut libc::c_void,
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if new != libc::MAP_FAILED {
            // SAFETY: as above.
            unsafe { *libc::__errno_location() = errno };
            return;
        }
    }
    // Not ours: put back who was there before. Returning repeats the access, and the signal.
    // SAFETY: PREVIOUS was filled in before this handler was installed.
    unsafe {
        let previous = &raw const PREVIOUS;
        libc::sigaction(libc::SIGBUS, (*previous).as_ptr(), std::ptr::null_mut());
    }
}
