//! The cache engine: a pure state machine between requests and I/O.

pub mod api;
