//! Integration tests of `hearth-reactor`, one module per subject.

// Locks of the model checker: `interleavings` compiles some source files of the crate again with these.
mod sync {
    pub use shuttle::sync::atomic::{AtomicU8, Ordering};
    pub use shuttle::sync::{Mutex, MutexGuard};
}

mod common;

mod interleavings;
mod reactors;
