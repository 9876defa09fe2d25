//! What memory a pool takes: the RAM stage, and whether all of it fits.

use hearth_io::BLOCK;
use hearth_policy::Config;

use super::Pool;
use crate::error::{Error, Result};
use crate::size::human;

/// Refuses a RAM stage that the machine cannot hold; `free` is what it can.
pub fn check_stage(stage: Option<u64>, free: Option<u64>) -> Result<()> {
    match (stage, free) {
        (Some(stage), Some(free)) if stage > free => Err(Error::refused(
            format!(
                "--ram-stage {} is more than the {} of RAM that are free",
                human(stage),
                human(free)
            ),
            "lower it, or leave it out to have it chosen",
        )),
        _ => Ok(()),
    }
}

/// Bytes that the RAM stage may take if nobody said: what the pool's size asks for, as far as the
/// limit leaves it and a quarter of the free RAM does.
pub fn stage_within(pool: &Pool, limit: Option<u64>, free: Option<u64>) -> u64 {
    let slots = pool.superblock.layout.slots() as usize;
    let bytes = |blocks: usize| blocks as u64 * BLOCK;
    let least = bytes(Config::stage_of(slots, true));
    let mut most = bytes(Config::stage_most_of(slots));
    if let Some(free) = free {
        most = most.min(free / 4);
    }
    if let Some(limit) = limit {
        // A block of the stage takes more than its data: an entry, and a read ahead on its way.
        let each =
            (pool.footprint(Some(most)) - pool.footprint(Some(0))).div_ceil((most / BLOCK).max(1));
        let left = limit.saturating_sub(pool.footprint(Some(0)));
        most = most.min(left / each.max(1) * BLOCK);
    }
    most.max(least)
}

/// Refuses a pool that needs more RAM than it may have.
pub fn check_memory(pool: &Pool, limit: Option<u64>, stage: Option<u64>) -> Result<()> {
    let need = pool.footprint(stage);
    match limit {
        Some(limit) if need > limit => Err(Error::refused(
            format!(
                "the pool needs {} of RAM for its index, policy and RAM stage, more than --memory {}",
                human(need),
                human(limit)
            ),
            "raise --memory, or use a smaller flash device",
        )),
        _ => Ok(()),
    }
}
