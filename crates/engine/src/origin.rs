//! Origins: bringing them what is dirty, and what keeps one from taking it.

pub(crate) mod destage;
pub(crate) mod fence;
pub(crate) mod trouble;
