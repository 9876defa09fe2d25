//! What goes on to flash and what leaves it: pure decisions, no I/O, no clock.
//!
//! The same types run inside the engine and over traces. Policy never decides correctness:
//! a wrong answer here costs speed, nothing else.

mod ghost;
pub mod reference;
mod sequential;
mod sketch;

pub use ghost::Ghost;
pub use sequential::Sequential;
pub use sketch::Sketch;
