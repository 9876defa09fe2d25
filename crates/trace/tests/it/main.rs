//! Integration tests of `hearth-trace`, one module per subject.

mod forms;
