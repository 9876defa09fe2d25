//! Atomics: those of the standard library, or those of the model checker, which tries every order in
//! which threads may see them (feature `model`, see the tests in `model.rs`).

#[cfg(feature = "model")]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64};
#[cfg(not(feature = "model"))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64};

/// Words that are zero, in memory that the system only gives once it is used.
#[cfg(not(feature = "model"))]
pub(crate) fn zeroed<T: bytemuck::Zeroable>(n: usize) -> Box<[T]> {
    bytemuck::zeroed_slice_box(n)
}

#[cfg(feature = "model")]
pub(crate) fn zeroed<T: Default>(n: usize) -> Box<[T]> {
    (0..n).map(|_| T::default()).collect()
}
