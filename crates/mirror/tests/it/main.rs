//! Integration tests of `hearth-mirror`, one module per subject.

mod when_due;
