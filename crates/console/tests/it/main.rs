//! Integration tests of `hearth-console`, one module per subject.

mod common;

mod attacks;
mod tls;
