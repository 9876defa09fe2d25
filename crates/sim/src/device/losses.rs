//! What a device has after the power failed, or after the process that used it died.

use super::{BLOCK, Block, Late, OpKind, Prng, SimDevice, Tear, blocks_of};
use std::sync::Arc;

impl SimDevice {
    /// Power fails: each block keeps its stored content, or one of those that were on their way
    /// (by the device's way of tearing). Operations in flight are forgotten, perhaps half done.
    pub fn power_cut(&mut self) {
        self.strand_in_flight();
        let volatile = std::mem::take(&mut self.volatile);
        // Some crashes lose nothing and some everything: both are special.
        let mood = self.rng.below(4);
        for index in volatile {
            let index = index as usize;
            let old = self.durable_block(index);
            let pending = std::mem::take(&mut self.cells[index].pending);
            let survivor = match mood {
                0 => pending.last().map(|(_, b)| **b).unwrap_or(old),
                1 => old,
                _ => self.survivor(old, &pending),
            };
            self.cells[index].durable = Some(Arc::new(survivor));
        }
    }

    fn survivor(&mut self, old: Block, pending: &[(u64, Arc<Block>)]) -> Block {
        let one = |rng: &mut Prng| match rng.below(pending.len() as u64 + 1) as usize {
            0 => old,
            n => *pending[n - 1].1,
        };
        let mut block = one(&mut self.rng);
        match self.tear {
            Tear::Block => {}
            Tear::Sector => {
                for s in 0..8 {
                    let other = one(&mut self.rng);
                    block[s * 512..(s + 1) * 512].copy_from_slice(&other[s * 512..(s + 1) * 512]);
                }
            }
            Tear::Anywhere if self.rng.chance(1, 4) => {
                let other = one(&mut self.rng);
                let cut = self.rng.below(BLOCK as u64) as usize;
                block[cut..].copy_from_slice(&other[cut..]);
            }
            Tear::Anywhere => {}
        }
        block
    }

    /// The process dies (kill -9) but the device lives: what it holds stays, volatile as it was;
    /// operations in flight happened or not, block by block.
    pub fn process_death(&mut self) {
        self.strand_in_flight();
        let all: Vec<usize> = self.volatile.iter().map(|i| *i as usize).collect();
        self.settle_early(&all);
        self.seq += 1;
    }

    /// What reached the medium early, of writes that will not complete, is there like any other.
    pub(super) fn settle_early(&mut self, blocks: &[usize]) {
        let seq = self.seq;
        for index in blocks {
            let Some(cell) = self.cells.get_mut(*index) else {
                continue;
            };
            for (mark, _) in &mut cell.pending {
                *mark = (*mark).min(seq);
            }
        }
    }

    fn strand_in_flight(&mut self) {
        for (_, f) in std::mem::take(&mut self.in_flight) {
            self.seq += 1;
            let all = self.rng.below(3);
            let changes = !matches!(f.op.kind, OpKind::Read | OpKind::Flush);
            if !self.dead && all > 0 && changes && f.late != Late::Refused {
                for index in blocks_of(&f.op)
                    .filter(|i| *i < self.cells.len())
                    .collect::<Vec<_>>()
                {
                    if all == 2 || self.rng.chance(1, 2) {
                        self.apply_block(&f.op, index, self.seq);
                    }
                }
            }
        }
        self.seq += 1;
    }
}
