//! Ctrl-C as a question: has the user called this off?

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Longest sleep between two looks at the flag.
const LOOK: Duration = Duration::from_millis(50);

/// From its making on, SIGINT and SIGTERM set a flag; a second one ends the program.
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Starts to watch.
    pub fn watch() -> Interrupt {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            // Order matters: the first signal finds the flag unset and only sets it.
            // Registration fails only for forbidden signals; then Ctrl-C just ends the program.
            let _ = signal_hook::flag::register_conditional_shutdown(signal, 130, flag.clone());
            let _ = signal_hook::flag::register(signal, flag.clone());
        }
        Interrupt(flag)
    }

    /// True once the user has pressed Ctrl-C.
    pub fn hit(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Sleeps for `time`, or less if interrupted; true if so.
    pub fn sleep(&self, time: Duration) -> bool {
        let end = Instant::now() + time;
        while !self.hit() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            std::thread::sleep(left.min(LOOK));
        }
        true
    }
}
