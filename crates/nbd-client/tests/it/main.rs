//! Integration tests of `hearth-nbd-client`, one module per subject.

mod common;

mod handshake;
mod lies;
mod outage;
