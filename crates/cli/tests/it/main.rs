//! Integration tests of `hearth`, one module per subject.

mod common;

mod bad_input;
mod block_size;
mod config;
mod events;
mod life;
mod metrics;
mod terminal;
mod workload;
