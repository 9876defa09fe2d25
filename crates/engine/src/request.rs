//! What clients ask, from the first look at the index to the answer.

pub(crate) mod flush;
pub(crate) mod read;
pub(crate) mod write;
pub(crate) mod zero;
