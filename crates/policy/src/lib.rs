//! What goes on to flash and what leaves it: pure decisions, no I/O, no clock.
//!
//! The same types run inside the engine and over traces. Policy never decides correctness:
//! a wrong answer here costs speed, nothing else.

mod ghost;
mod sequential;

pub use ghost::Ghost;
pub use sequential::Sequential;
