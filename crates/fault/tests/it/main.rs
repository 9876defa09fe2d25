//! Integration tests of `hearth-fault`, one module per subject.

mod fields;
