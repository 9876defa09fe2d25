//! Integration tests of `hearth-daemon`, one module per subject.

// Locks of the model checker: `interleavings` compiles some source files of the crate again with these.
mod sync {
    pub use shuttle::sync::{Arc, Condvar, Mutex, MutexGuard, atomic};
    pub use shuttle::thread;
}

mod interleavings;
mod third_protocol;
