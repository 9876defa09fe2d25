//! What is cached and where: the index, the RAM stage in front of flash, reading ahead.

pub(crate) mod ahead;
#[allow(clippy::len_without_is_empty)]
pub mod index;
pub(crate) mod stage;

use crate::cache::ahead::Ahead;
use crate::cache::index::Index;
use crate::cache::stage::Stage;
use hearth_policy::Policy;

/// What the pool caches, and what it thinks of it.
pub(crate) struct Cache {
    pub index: Index,
    pub policy: Policy,
    pub stage: Stage,
    pub ahead: Ahead,
    /// Where in which segment the next victim was last looked for.
    pub rival_at: (u32, u32),
    /// Newcomers that victim has turned away.
    pub rival_losses: u32,
}

impl Cache {
    /// An empty one.
    pub fn new(index: Index, policy: Policy, stage: Stage) -> Cache {
        Cache {
            index,
            policy,
            stage,
            ahead: Ahead::default(),
            rival_at: (u32::MAX, 0),
            rival_losses: 0,
        }
    }
}
