//! What is done in which order when files of a datastore change, so that a crash at any step leaves nothing that was
//! answered undone.
//!
//! A change of a file is several steps: of the file system, of the log on flash, of the pool's registry. Each of them may be the
//! last before a power cut, and of what was not made durable the file system keeps what it likes. So the order is what a
//! datastore's promises rest on, and it is all here, over steps that somebody else takes:
//!
//! | module | order of what |
//! | --- | --- |
//! | [`names`] | making, removing, renaming and linking, in a directory of a file system |
//! | [`large`] | growing, cutting, closing and opening a file that is a disk of the cache |
//! | [`pair`] | changing, losing and bringing back one of two trees that hold the same |
//!
//! A kernel is behind these steps in production (`hearth-nfs`, `hearth-datastore`), and a modelled file system with a modelled log in the
//! tests (`sim`), which crash the very same code at each step, keep any part of what was not durable, and judge what is
//! left by what was answered.

pub mod large;
pub mod names;
pub mod pair;

#[cfg(test)]
mod sim;
#[cfg(test)]
use sim::dice as sim_dice;
