//! The flash: the log on it, the devices under it, what is durable there, what makes room, what happens when it
//! fails, and what a start finds.

pub(crate) mod again;
pub(crate) mod append;
pub(crate) mod area;
pub(crate) mod checkpoint;
pub(crate) mod choose;
pub(crate) mod dead;
pub(crate) mod device;
pub(crate) mod devices;
pub(crate) mod durable;
pub(crate) mod emptying;
pub(crate) mod evict;
pub(crate) mod fail;
pub(crate) mod gone;
pub(crate) mod log;
pub(crate) mod map;
pub(crate) mod recover;
pub(crate) mod replay;
pub(crate) mod rescue;
mod survey;
#[cfg(test)]
mod tests;
pub(crate) mod twice;
pub(crate) mod without;
