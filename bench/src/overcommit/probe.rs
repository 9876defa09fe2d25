//! How long one page takes to come back from swap, as a program of its own sees it.
//!
//! Guests say how long an answer took, in which there are many pages, or none. So a little memory beside them is swapped out on
//! purpose, and a page of it read now and then: what that takes is what the way to the swap device takes, with all the traffic of the
//! guests on it. It is so little that it changes nothing for them.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Result;
use hearth_rig::rng::Rng;

use crate::paged::Memory;

/// Pages that are swapped out.
const PAGES: usize = 1024;
/// Between two that are read.
const EVERY: Duration = Duration::from_millis(150);
/// Pages that are read before all are swapped out again: later there would be few left that are out.
const AGAIN: usize = PAGES / 4;

/// Milliseconds that single pages took to come back, until told to stop.
pub fn watch(data: &Path, seed: u64, stop: &Arc<AtomicBool>) -> Result<Vec<f64>> {
    let data = File::open(data)?;
    let memory = Memory::new(PAGES, |bytes| Ok(data.read_exact_at(bytes, 0)?))?;
    let mut rng = Rng::new(seed);
    let (mut took, mut read) = (Vec::new(), AGAIN);
    while !stop.load(Ordering::Relaxed) {
        if read >= AGAIN {
            match memory.out() {
                // The time may be over meanwhile.
                Err(e) if took.is_empty() && !stop.load(Ordering::Relaxed) => return Err(e),
                _ => read = 0,
            }
        }
        std::thread::sleep(EVERY);
        let page = rng.below(PAGES as u64) as usize;
        took.extend(memory.fetch(page).map(|t| t.as_secs_f64() * 1e3));
        read += 1;
    }
    Ok(took)
}
