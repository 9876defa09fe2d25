//! Atomics and locks: those of the standard library, or those of the model checker, which tries every
//! order in which threads may see them (feature `model`, see `lanes/model.rs`).

#[cfg(feature = "model")]
pub(crate) use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU32, AtomicU64},
};
#[cfg(not(feature = "model"))]
pub(crate) use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU32, AtomicU64},
};

/// Words that are zero, in memory that the system only gives once it is used.
#[cfg(not(feature = "model"))]
pub(crate) fn zeroed<T: bytemuck::Zeroable>(n: usize) -> Box<[T]> {
    bytemuck::zeroed_slice_box(n)
}

#[cfg(feature = "model")]
pub(crate) fn zeroed<T: Default>(n: usize) -> Box<[T]> {
    (0..n).map(|_| T::default()).collect()
}
