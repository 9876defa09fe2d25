//! Integration tests of `hearth-replay`, one module per subject.

mod play;
mod strangers;
