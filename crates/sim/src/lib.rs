//! Deterministic simulation of the Hearth engine.
//!
//! A cache between a guest and its disk has more states than tests written by hand can reach:
//! any I/O may end before any other, fail, stall or be torn by a crash, also while the crash
//! before is being recovered from. Here the engine, unchanged, runs over simulated devices under
//! a virtual clock; one seed chooses everything, an oracle checks every answer, and a failing
//! seed fails again each time it is run.
//!
//! [`device`] is the hardware, [`mirrored`] several devices that are one origin, [`workload`] the guests, [`model`] the oracle, [`world`] moves
//! them step by step, [`life`] crashes and reopens them, [`runner`] runs seeds, [`paths`] counts where they came. [`single`] lets one I/O
//! of a fixed workload fail, each in turn. [`tamper`] is apart:
//! an engine over pools that somebody changed.

mod area;
mod content;
pub mod device;
mod flashes;
pub mod gate;
mod left;
pub mod life;
pub mod media;
pub mod mirrored;
pub mod model;
mod origin;
pub mod paths;
pub mod prng;
pub mod profile;
pub mod real;
mod replace;
mod reshape;
pub mod runner;
pub mod single;
pub mod subject;
pub mod tamper;
#[cfg(test)]
mod toy;
pub mod workload;
pub mod world;
