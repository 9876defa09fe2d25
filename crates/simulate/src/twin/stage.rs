//! What waits in RAM, and what gathers there on its way to flash.

use hearth_policy::cleaning::Why;
use hearth_policy::{Place, Stay};

use super::{FLASH_NS, Fill, LAZY_BLOCKS, Staged, Then, Twin};

/// Places the stage grows by, when none is empty.
const GROWTH: usize = 64;

impl Twin {
    pub(super) fn put_in_stage(&mut self, key: u64, stay: Stay, why: Why) {
        if self.present(key) || self.queued(key).is_some() {
            return;
        }
        let aim = self.policy.stage();
        if self.room < aim && !self.has_empty_place() {
            self.room = aim.min(self.room + GROWTH);
        }
        if self.room == 0 {
            return;
        }
        self.empty_oldest();
        if self.room > aim {
            self.room -= 1;
            self.empty_oldest();
        }
        let seq = self.number();
        self.places.push_back((key, seq));
        self.unused += usize::from(stay.unused.is_some());
        self.stage.insert(key, Staged { seq, stay, why });
    }

    /// Is the place that is needed next empty?
    fn has_empty_place(&self) -> bool {
        let lives = |(key, seq): &(u64, u64)| self.stage.get(key).is_some_and(|s| s.seq == *seq);
        self.places.len() < self.room || !self.places.front().is_some_and(lives)
    }

    /// Empties the place that is needed next.
    fn empty_oldest(&mut self) {
        if self.places.len() >= self.room
            && let Some((oldest, seq)) = self.places.pop_front()
            && self.stage.get(&oldest).is_some_and(|s| s.seq == seq)
            && let Some(staged) = self.stage.remove(&oldest)
        {
            self.leave_stage(oldest, staged);
        }
    }

    pub(super) fn leave_stage(&mut self, key: u64, staged: Staged) {
        let stay = staged.stay;
        if stay.unused.is_some() {
            self.unused -= 1;
            self.out.prefetch_wasted += 1;
        }
        let freq = match self.policy.leave(stay, !self.filling()) {
            Place::Drop => return,
            Place::Put(freq) => freq,
            Place::Compete if self.wins(stay, key) => self.policy.credit(stay),
            Place::Compete => return,
        };
        if self.own_room(key, 1) {
            self.fill(key, freq, staged.why);
        }
    }

    /// A clean copy goes to flash.
    pub(super) fn fill(&mut self, key: u64, freq: u8, why: Why) {
        if self.index.contains_key(&key) || self.queued(key).is_some() {
            return;
        }
        if self.queue.is_empty() {
            self.queued_ns = self.now;
        }
        self.out.insertions += 1;
        self.queue.push(Fill {
            key,
            freq,
            why,
            used: false,
            void: false,
        });
        if self.queue.len() >= LAZY_BLOCKS as usize {
            self.send_queued();
        }
    }

    pub(super) fn send_queued(&mut self) {
        if !self.queue.is_empty() {
            self.sent.push_back(std::mem::take(&mut self.queue));
            self.later(self.now + FLASH_NS, Then::Appended);
        }
    }

    pub(super) fn appended(&mut self) {
        for fill in self.sent.pop_front().unwrap_or_default() {
            let freq = fill.freq + u8::from(fill.used);
            self.append(fill.key, fill.why, freq, false);
            if fill.void
                && let Some(copy) = self.index.get(&fill.key).copied()
            {
                self.remove(fill.key, copy);
            }
        }
    }

    /// Takes out of the stage what a write covers.
    pub(super) fn forget_staged(&mut self, key: u64, end: u64) {
        for key in key..end {
            if let Some(staged) = self.stage.remove(&key)
                && staged.stay.unused.is_some()
            {
                self.unused -= 1;
                self.out.prefetch_wasted += 1;
            }
        }
    }
}
