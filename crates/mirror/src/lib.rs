//! An origin of several legs that each hold all of it, so that any one of them may die.
//!
//! The engine sees one origin. Underneath, every write goes to all legs and a read to one of them. What
//! makes that more than writing twice is what happens in between: a crash leaves some legs with a write and
//! others without, a leg dies and comes back old, a leg hangs and its last write lands an hour later. None
//! of it may ever show: a read never flips between two answers, and a leg that missed a write is never read
//! before it has it.
//!
//! The rules are in [`machine`], which is told what happened and says what to do; it does no I/O and has no
//! clock, so that the simulation (`sim`) drives the very same code through crashes, errors and hangs.

#[cfg(any(test, feature = "faults"))]
pub mod faults;
pub mod habits;
pub mod machine;
pub mod regions;

mod driver;
mod locks;
mod marks;
mod mirror;
mod news;
mod sample;
mod scrub;

#[cfg(test)]
mod sim;

pub use habits::{Habits, ScrubState, Wall, host_time};
pub use machine::{Action, Cached, Machine};
pub use marks::is_unlike;
pub use mirror::{Book, LegOpener, Mirror, OpenError, Setup, believed, leg_timeout, marked};
pub use news::{News, Witness};
pub use regions::Regions;
pub use sample::{Sample, sample};
pub use scrub::{Cache, ScrubOrder, compare, sums_of};
