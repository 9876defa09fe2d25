//! What is seen of a host and its guests at one time.

use serde::{Deserialize, Serialize};

/// A host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Seen {
    /// Milliseconds of a clock that never jumps.
    pub at_ms: u64,
    /// Bytes of memory; of a control group, its limit.
    pub total: u64,
    /// Bytes that programs could have without anything being swapped out.
    pub available: u64,
    /// Bytes of swap.
    pub swap_total: u64,
    /// Bytes of it that are free.
    pub swap_free: u64,
    /// Bytes read back from swap each second.
    pub swap_in: u64,
    /// Bytes swapped out each second, of the whole host; what is compressed in memory is not among them.
    #[serde(default)]
    pub swap_out: u64,
    /// Time lost to waiting for memory, where the kernel tells it.
    pub pressure: Option<Pressure>,
    /// Compression before swap, where the kernel has it.
    pub zswap: Option<Zswap>,
    /// The guests, by name.
    pub guests: Vec<Guest>,
    /// What could not be seen, and why.
    pub notes: Vec<String>,
}

/// Pressure stall information: percent of the last ten seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Pressure {
    /// In which something waited for memory.
    pub some: f64,
    /// In which everything did.
    pub full: f64,
}

/// Compression before swap.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Zswap {
    /// Pages are compressed.
    pub on: bool,
    /// How.
    pub compressor: String,
    /// Of the host's memory, what it may take.
    pub pool_percent: u64,
    /// Bytes it may take; 0 where that is not known.
    #[serde(default)]
    pub pool_max: u64,
    /// Bytes it takes, where the kernel tells it.
    pub pool: Option<u64>,
    /// Bytes that are in it, where the kernel tells it.
    pub stored: Option<u64>,
}

/// From so many percent of what it may take, the pool counts as full.
const FULL_PERCENT: u64 = 80;

impl Zswap {
    /// Is it full of pages that do not become smaller? Less than a third is saved then.
    pub fn is_in_vain(&self) -> bool {
        let (Some(pool), Some(stored)) = (self.pool, self.stored) else {
            return false;
        };
        let full = self.pool_max / 100 * FULL_PERCENT;
        self.on && full > 0 && pool >= full && stored < pool / 2 * 3
    }
}

/// A guest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Guest {
    /// What it is called.
    pub name: String,
    /// Its process.
    pub pid: Option<u32>,
    /// Bytes it was made with.
    pub assigned: u64,
    /// Bytes of the host's memory it takes.
    pub resident: u64,
    /// Bytes of it that are swapped out.
    pub swapped: u64,
    /// Of those, bytes that are compressed in memory, where the kernel tells it.
    pub compressed: Option<u64>,
    /// Bytes it is thought to use; see docs/memory.md.
    pub active: u64,
    /// Cores it kept busy lately.
    pub cpu: f64,
    /// Milliseconds it stood still for lack of memory since it started, where the kernel tells it.
    pub stalled_ms: Option<u64>,
    /// What it has been left by its balloon; `None` without a balloon.
    pub balloon: Option<u64>,
    /// What its own kernel says; `None` where that says nothing.
    pub inside: Option<Inside>,
    /// It gives back at once what it frees; `None` where that cannot be known.
    pub reporting: Option<bool>,
    /// Nothing is done to it.
    #[serde(default)]
    pub exempt: bool,
    /// What its balloon leaves it, in bytes.
    pub minimum: u64,
    /// What swapping out leaves it, in bytes.
    #[serde(default)]
    pub reserved: u64,
    /// What it gets, in bytes.
    pub maximum: u64,
    /// Against others'.
    pub share: u64,
}

/// What a guest's kernel says of its memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inside {
    /// Bytes it could give to its programs without swapping.
    pub available: u64,
    /// Bytes it reads back from its own swap each second.
    pub swap_in: u64,
}

impl Guest {
    /// A guest below this is short of memory itself.
    pub fn reserve(&self) -> u64 {
        (self.assigned / 24).max(24 << 20)
    }

    /// Bytes its programs and its kernel take, as it says, or as the host sees it.
    pub fn used(&self) -> u64 {
        match (self.balloon, self.inside) {
            (Some(has), Some(inside)) => has.saturating_sub(inside.available),
            _ => self
                .resident
                .saturating_add(self.swapped)
                .min(self.assigned),
        }
    }

    /// Is most of what it takes not in use?
    pub fn idle(&self) -> bool {
        self.active < self.resident.saturating_add(self.swapped) / 3
    }
}
