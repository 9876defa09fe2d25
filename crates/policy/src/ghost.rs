//! Remembers blocks that were asked for but are not on flash, so that a block read once
//! does not push out one that is read often.
//!
//! A direct-mapped table of 16-bit fingerprints: a new block overwrites whatever shares its
//! place, so old entries fade at the rate of misses and nothing needs a queue. One entry for
//! every four slots of flash, i.e. half a byte of RAM per cached block.

/// Flash slots per remembered block.
const SLOTS_PER_ENTRY: usize = 4;

/// A lossy set of recently seen keys.
#[derive(Debug)]
pub struct Ghost {
    table: Vec<u16>,
}

impl Ghost {
    /// Sized for a cache of `slots` blocks.
    pub fn new(slots: u32) -> Ghost {
        Ghost {
            table: vec![0; (slots as usize / SLOTS_PER_ENTRY).max(64)],
        }
    }

    fn place(&self, hash: u64) -> (usize, u16) {
        let at = (((hash & 0xFFFF_FFFF) * self.table.len() as u64) >> 32) as usize;
        (at, (hash >> 48) as u16 | 1)
    }

    /// Notes a key by its hash; true if it was remembered already.
    pub fn seen(&mut self, hash: u64) -> bool {
        let (at, tag) = self.place(hash);
        let known = self.table[at] == tag;
        // A hit takes the entry out: it has done its work, and the place is free for another.
        self.table[at] = if known { 0 } else { tag };
        known
    }

    /// Notes a key without asking.
    pub fn remember(&mut self, hash: u64) {
        let (at, tag) = self.place(hash);
        self.table[at] = tag;
    }

    /// Bytes of RAM for a cache of `slots` blocks.
    pub fn footprint(slots: u32) -> u64 {
        (slots as usize / SLOTS_PER_ENTRY).max(64) as u64 * 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_sight_is_known_and_spent() {
        let mut ghost = Ghost::new(4096);
        assert!(!ghost.seen(0x1234_5678_9abc_def0));
        assert!(ghost.seen(0x1234_5678_9abc_def0));
        assert!(!ghost.seen(0x1234_5678_9abc_def0));
    }
}
