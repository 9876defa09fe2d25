//! Memory that is swapped out on purpose, and what it takes to read a page of it again.

use std::io;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

/// What the kernel swaps.
pub const PAGE: usize = 4096;
/// Longest that swapping it out may take: a modelled hard disk has other things to do.
const OUT_LIMIT: Duration = Duration::from_secs(120);
/// Pages that are fetched before it is asked again whether that goes on.
const ASKED: usize = 16;

/// Memory that nobody else has.
#[derive(Debug)]
pub struct Memory {
    at: *mut u8,
    pages: usize,
}

// SAFETY: the mapping is its own for as long as it lives, and after `new` has returned it is only read.
unsafe impl Send for Memory {}
// SAFETY: likewise; reading from several threads is what it is for.
unsafe impl Sync for Memory {}

impl Memory {
    /// So many pages, with what `fill` puts there.
    pub fn new(pages: usize, fill: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<Memory> {
        let len = pages * PAGE;
        let (protection, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: new memory at a place of the kernel's choice.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error()).context("memory to be swapped out");
        }
        let memory = Memory {
            at: at.cast(),
            pages,
        };
        // SAFETY: our own mapping of that length. A huge page would come back as one.
        unsafe { libc::madvise(at, len, libc::MADV_NOHUGEPAGE) };
        // SAFETY: `len` bytes of our own, zeroed by the kernel, that nobody else refers to.
        fill(unsafe { std::slice::from_raw_parts_mut(memory.at, len) })?;
        Ok(memory)
    }

    /// How many pages.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Swaps it out, and returns when next to nothing of it is in memory any more.
    ///
    /// What was written to swap stays in memory until somebody needs that, and would be found there. Read once more it is clean
    /// and mapped, and is dropped when it is swapped out again.
    pub fn out(&self) -> Result<()> {
        let began = Instant::now();
        loop {
            // SAFETY: our own mapping; what is in it stays.
            let done =
                unsafe { libc::madvise(self.at.cast(), self.pages * PAGE, libc::MADV_PAGEOUT) };
            if done != 0 {
                return Err(io::Error::last_os_error())
                    .context("this kernel does not swap out on demand");
            }
            let here = self.resident()?;
            if here.len() * 50 <= self.pages {
                return Ok(());
            }
            ensure!(
                began.elapsed() < OUT_LIMIT,
                "{} of {} pages stay in memory: is there swap, and room in it?",
                here.len(),
                self.pages
            );
            // What is on its way to the device is not dropped.
            std::thread::sleep(Duration::from_millis(20));
            for page in here {
                self.read(page);
            }
        }
    }

    /// Pages that are in memory, mapped or not.
    fn resident(&self) -> Result<Vec<usize>> {
        let mut told = vec![0; self.pages];
        // SAFETY: our own mapping, and a byte of ours for each page of it.
        let done = unsafe { libc::mincore(self.at.cast(), self.pages * PAGE, told.as_mut_ptr()) };
        if done != 0 {
            return Err(io::Error::last_os_error()).context("mincore");
        }
        Ok((0..self.pages)
            .filter(|page| told[*page] & 1 != 0)
            .collect())
    }

    fn read(&self, page: usize) {
        // SAFETY: within our own mapping, which nobody changes.
        unsafe { std::ptr::read_volatile(self.at.add(page % self.pages * PAGE)) };
    }

    /// Reads a byte of each of these pages, in this order, while `goes_on`; how long those took that had to be fetched.
    ///
    /// Asking the kernel page by page would cost more than the few that it had in memory are worth: they are the fastest.
    pub fn fetch_all(&self, pages: &[usize], goes_on: impl Fn() -> bool) -> Vec<Duration> {
        let before = major_faults();
        let mut took = Vec::with_capacity(pages.len());
        for some in pages.chunks(ASKED) {
            if !goes_on() {
                break;
            }
            for page in some {
                let began = Instant::now();
                self.read(*page);
                took.push(began.elapsed());
            }
        }
        let fetched = usize::try_from(major_faults() - before).unwrap_or(0);
        took.sort_by(|a, b| b.cmp(a));
        took.truncate(fetched);
        took
    }

    /// Reads a byte of a page; how long it took, if it had to be fetched.
    pub fn fetch(&self, page: usize) -> Option<Duration> {
        let before = major_faults();
        let began = Instant::now();
        self.read(page);
        let took = began.elapsed();
        (major_faults() > before).then_some(took)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: our own mapping; nothing refers to it any more.
        unsafe { libc::munmap(self.at.cast(), self.pages * PAGE) };
    }
}

/// Of this thread.
fn major_faults() -> i64 {
    // SAFETY: all zeros are a valid value, and the call fills it.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &mut usage);
        usage.ru_majflt
    }
}
