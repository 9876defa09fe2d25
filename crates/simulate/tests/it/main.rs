//! Integration tests of `hearth-simulate`, one module per subject.

mod advice;
mod chosen;
mod curves;
mod made;
mod traces;
