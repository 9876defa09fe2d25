//! Silent corruption, as a scrub meets it: a leg that holds something else in a block, a block damaged on its way, a
//! cached copy that is wrong. Clients are not shown any of it, since what they may read then cannot be said; what legs
//! really hold and what is really cached stay right, so whatever a scrub writes or drops by mistake is found.

use super::{DiskCache, Mirrored};
use crate::content::BLOCK;
use crate::paths::Event;
use hearth_io::BufSlice;
use hearth_io::checksum::crc32c;
use hearth_mirror::Cached;
use hearth_mirror::machine::{Finding, IoId};

/// What is wrong, as it seems.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrong {
    /// What this leg holds, at every look.
    Leg(usize),
    /// What comes from this leg, at the first look.
    Way(usize),
    /// What is cached.
    Cache,
}

/// What the comparisons of a check are told.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lie {
    check: u64,
    block: u64,
    wrong: Wrong,
}

impl Mirrored {
    /// Changes what a scrub compares, now and then.
    pub(super) fn lie_about(
        &mut self,
        check: u64,
        (offset, len): (u64, u64),
        held: &mut [(usize, BufSlice)],
        known: &mut [Cached],
        prefer: Option<usize>,
    ) {
        let again = self.lie.is_some_and(|lie| lie.check == check);
        if !again {
            self.lie = self.new_lie(check, (offset, len), held, prefer);
        }
        let Some(lie) = self.lie else {
            return;
        };
        self.say(|| format!("a scrub is told something else: {lie:?}"));
        let leg = match lie.wrong {
            Wrong::Cache => {
                for cached in known.iter_mut().filter(|c| c.block == lie.block) {
                    cached.sum = !cached.sum;
                }
                return;
            }
            Wrong::Way(_) if again => return,
            Wrong::Way(leg) | Wrong::Leg(leg) => leg,
        };
        let at = (lie.block * BLOCK as u64 - offset) as usize;
        if let Some((_, data)) = held.iter_mut().find(|(i, _)| *i == leg) {
            let bytes = data.bytes_mut().iter_mut().skip(at).take(BLOCK);
            bytes.for_each(|byte| *byte ^= 0x5A);
        }
    }

    fn new_lie(
        &mut self,
        check: u64,
        (offset, len): (u64, u64),
        held: &[(usize, BufSlice)],
        prefer: Option<usize>,
    ) -> Option<Lie> {
        if !self.rough || held.len() < 2 || !self.rng.chance(1, 4) {
            return None;
        }
        let (leg, _) = self.rng.pick(held);
        let leg = *leg;
        let wrong = match self.rng.below(3) {
            0 => Wrong::Cache,
            // A leg that is preferred is right by definition.
            1 if prefer != Some(leg) => Wrong::Leg(leg),
            _ => Wrong::Way(leg),
        };
        let blocks = len.div_ceil(BLOCK as u64);
        let block = offset / BLOCK as u64 + self.rng.below(blocks);
        Some(Lie {
            check,
            block,
            wrong,
        })
    }

    /// Nothing is found but what was made up.
    pub(super) fn judge_findings(&mut self, check: u64, found: &[Finding]) -> Result<(), String> {
        let lie = self.lie.filter(|lie| lie.check == check);
        for finding in found {
            let offset = match finding {
                Finding::Right { offset, .. } => *offset,
                Finding::Undecided(difference) => difference.offset,
            };
            if lie.is_none_or(|lie| lie.block * BLOCK as u64 != offset) {
                return Err(format!(
                    "a scrub finds a difference that nobody has made: {finding:?}"
                ));
            }
            self.events.push(Event::ScrubDeceived);
        }
        Ok(())
    }

    /// What is not as the legs have it is dropped from the cache; now and then all that is clean there, as if it were not.
    pub(super) fn settle(
        &mut self,
        read: IoId,
        from: u64,
        (offset, len): (u64, u64),
        cache: DiskCache,
    ) -> Result<(), String> {
        let (buf, _) = self.reads.get(&read).ok_or("what was decided is gone")?;
        let held = buf.slice(from as usize, len as usize);
        let drops = self.rng.chance(1, 2);
        let sum = |block: &[u8]| {
            let mut whole = block.to_vec();
            whole.resize(BLOCK, 0);
            crc32c(&whole) ^ if drops { u32::MAX } else { 0 }
        };
        let right: Vec<u32> = held.bytes().chunks(BLOCK).map(sum).collect();
        cache.drop_unlike(offset, &right);
        Ok(())
    }
}
