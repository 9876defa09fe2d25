//! Integration tests of `hearth-format`, one module per subject.

mod common;

mod crash;
mod golden;
mod journal;
mod refusals;
mod roundtrip;
