//! Sets of block numbers: scattered ones, and those that come in runs.

pub(crate) mod blockset;
pub(crate) mod runset;
