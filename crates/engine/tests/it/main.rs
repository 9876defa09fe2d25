//! Integration tests of `hearth-engine`, one module per subject.

mod house;
mod old_pools;
mod shared_device;
mod slow_device;
