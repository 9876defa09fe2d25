//! What threads share state with. Named here once, so that a test can put the same code on a scheduler
//! that tries every order of steps (`tests/it/interleavings.rs`).

pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard, atomic};
pub(crate) use std::thread;
