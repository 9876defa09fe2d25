//! Integration tests of `hearth-io`, one module per subject.

mod devices;
mod drivers;
mod locks;
