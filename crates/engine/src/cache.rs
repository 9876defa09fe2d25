//! What is cached and where: the index, the RAM stage in front of flash, reading ahead.

pub(crate) mod ahead;
#[allow(clippy::len_without_is_empty)]
pub mod index;
pub(crate) mod sample;
pub(crate) mod stage;
