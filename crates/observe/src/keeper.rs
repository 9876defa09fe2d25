//! The thread beside the data threads that makes curves of samples. It never does I/O.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::observer::Shared;

/// Longest sleep: samples may wait that long, not longer, or a quiet disk's curve would be old
/// when asked for at the next start of something that asks.
const ROUND: Duration = Duration::from_secs(5);

/// Goes round until the observer stops.
pub(crate) fn run(shared: &Shared) {
    while !shared.stopping.load(Ordering::Acquire) {
        let now_ns = hearth_io::now_ns();
        for disk in shared.all() {
            disk.digest(now_ns);
        }
        std::thread::park_timeout(ROUND);
    }
}
