//! What a segment says must outlive it where what it speaks of does.
//!
//! A segment is freed when nothing in it counts as data. But its entries may be the last word on blocks of which
//! older copies lie elsewhere, or runs of zeros, or that something is clean. So its entries are read once
//! more, and what still holds is logged again before it goes:
//!
//! - *void*: a block that is not cached, and of which a dead copy lies in another segment. Where the segment says of it
//!   no more than that it is clean, whoever dropped the copy has logged that, with three exceptions: what lies below a
//!   clean floor is dropped without a word, and so is what goes with a lost device, or with a segment whose turn has
//!   begun. Without either record the copy would be dirty again, and go over what the origin was given since;
//! - *zeros* of which the origin does not know yet, and *told*: zeros that an older record elsewhere
//!   claims, and that the origin has had, or that were written since;
//! - *clean*: a copy elsewhere was logged as dirty, and the origin has it. Where nothing dirty is left in the
//!   segment it lies in, the map says so of all of that; or notes of one block each would fill whole segments,
//!   and be moved around for ever. The same is said of segments that were emptied, and wait to be free;
//! - *intents* that are open;
//! - the *mark* of an ordered disk, if it is the newest.
//!
//! The last entry about a block decides. So a record may only be logged as long as nothing newer about the
//! block is queued; else whoever asks has to ask again.

use crate::blocks::runset::RunSet;
use crate::faults::{Fault, Faults};
use crate::flash::dead::Dead;
use crate::flash::log::{Segment, Slot, ZeroRecords};
use hearth_format::{Entry, Kind};
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};

/// Something that is to be in the log again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Said {
    pub kind: Kind,
    pub disk: u16,
    pub block: u64,
    pub count: u64,
}

/// What is known of the blocks, beside the device.
pub(crate) trait Holds {
    /// Is there such a disk?
    fn is_known(&self, disk: u16) -> bool;
    /// Is the block cached?
    fn is_cached(&self, disk: u16, block: u64) -> bool;
    /// Clean blocks of a range that are cached, and where.
    fn clean_copies(&self, disk: u16, start: u64, end: u64) -> Vec<(u64, Slot)>;
    /// Parts of a range that are zeros of which the origin does not know.
    fn zeros(&self, disk: u16, start: u64, end: u64) -> Vec<(u64, u64)>;
    /// Ranges of open intents that meet this one.
    fn intents(&self, disk: u16, start: u64, end: u64) -> Vec<(u64, u64)>;
    /// What the newest mark of an ordered disk says, as it stands in an entry.
    fn mark(&self, _disk: u16) -> Option<(u64, u32)> {
        None
    }
}

/// A segment that is to be free, and what of the others bears on it.
pub(crate) struct Leaving<'a> {
    pub seg: u32,
    /// No older one is there: what it says of others speaks of nothing that a crash could bring back.
    pub oldest: bool,
    /// What it says, of disks of which it counts.
    pub entries: &'a [Entry],
    pub dead: &'a Dead,
    pub zeros: &'a ZeroRecords,
    pub segments: &'a [Segment],
    pub segment_blocks: u32,
    /// Clean copies may have been dropped without a record, as a start drops those below a clean floor
    /// ([`crate::flash::recover`]), or as their device is lost ([`crate::flash::gone`]). Then what says that a copy
    /// is clean may be the last word on it.
    pub unsaid_drops: bool,
    /// Others that were emptied and are not free yet, because there is no room for what they say again. What was
    /// dropped with them was not recorded, either.
    pub emptied: SmallVec<[u32; 4]>,
    /// Blocks about which something is on its way to the log, by disk.
    pub queued: BTreeMap<u16, RunSet>,
}

/// Blocks by what is to be said of them.
type Blocks = BTreeMap<(u16, u64), u64>;

impl Leaving<'_> {
    /// Everything of it that still holds, and segments of which the map is to say that they are clean. `None`:
    /// that is about to change.
    pub fn still_said(
        &self,
        holds: &impl Holds,
        faults: Faults,
    ) -> Option<(Vec<Said>, BTreeSet<u32>)> {
        let (said, all_clean) = self.holding(holds, faults);
        let newer = |s: &Said| {
            !matches!(s.kind, Kind::Intent | Kind::Through)
                && !faults.has(Fault::RelogBehindNewer)
                && self.is_queued(s.disk, s.block, s.block + s.count)
        };
        (!said.iter().any(newer)).then_some((said, all_clean))
    }

    /// The same, as it is now.
    pub fn holding(&self, holds: &impl Holds, faults: Faults) -> (Vec<Said>, BTreeSet<u32>) {
        let mut all_clean = BTreeSet::new();
        let own = self.own_copies();
        let (mut void, mut clean, mut told) = (Blocks::new(), Blocks::new(), Blocks::new());
        let mut said = Vec::new();
        for e in self.entries.iter().filter(|e| holds.is_known(e.disk)) {
            let (start, end) = (e.block, e.block + run_of(e));
            match e.kind {
                Kind::Clean | Kind::Dirty => {}
                Kind::DropRun | Kind::ZeroDoneRun => {}
                Kind::CleanedRun if self.oldest => {}
                Kind::CleanedRun => {
                    for (block, slot) in holds.clean_copies(e.disk, start, end) {
                        let seg = slot / self.segment_blocks;
                        match self.is_all_clean(seg) {
                            true => _ = all_clean.insert(seg),
                            false => add(&mut clean, e.disk, block, block + 1),
                        }
                    }
                }
                Kind::ZeroRun => {
                    for (from, to) in holds.zeros(e.disk, start, end) {
                        said.push(Said::of(Kind::ZeroRun, e.disk, from, to));
                    }
                }
                Kind::Intent => {
                    for (from, to) in holds.intents(e.disk, start, end) {
                        said.push(Said::of(Kind::Intent, e.disk, from, to));
                    }
                    continue;
                }
                Kind::Through => {
                    let said_now = holds.mark(e.disk).filter(|m| *m == (e.block, e.word));
                    said.extend(said_now.map(|(block, word)| Said {
                        kind: Kind::Through,
                        disk: e.disk,
                        block,
                        count: word.into(),
                    }));
                    continue;
                }
                Kind::IntentClear => continue,
            }
            if self.oldest {
                continue;
            }
            if matches!(e.kind, Kind::Dirty | Kind::ZeroDoneRun | Kind::ZeroRun) {
                for (from, to) in self.zeros.of_others(self.seg, e.disk, start, end) {
                    gaps(from, to, &holds.zeros(e.disk, from, to), |from, to| {
                        add(&mut told, e.disk, from, to);
                    });
                }
            }
            let cleaned = e.kind == Kind::CleanedRun;
            if cleaned && !self.unsaid_drops && self.emptied.is_empty() {
                continue;
            }
            for block in self.dead.within(e.disk, start, end) {
                let own = own.get(&(e.disk, block)).copied().unwrap_or(0);
                let elsewhere = self.dead.count(e.disk, block).saturating_sub(own);
                if elsewhere == 0 || holds.is_cached(e.disk, block) {
                    continue;
                }
                match cleaned && !self.unsaid_drops {
                    true => all_clean.extend(self.emptied.iter().copied()),
                    false => add(&mut void, e.disk, block, block + 1),
                }
            }
        }
        let kinds = [
            (Kind::DropRun, void),
            (Kind::CleanedRun, clean),
            (Kind::ZeroDoneRun, told),
        ];
        for (kind, blocks) in kinds {
            merge(kind, blocks, &mut said);
        }
        said.retain(|s| match s.kind {
            Kind::DropRun => !faults.has(Fault::SkipRelogVoid),
            Kind::CleanedRun => !faults.has(Fault::SkipRelogClean),
            Kind::ZeroDoneRun => !faults.has(Fault::SkipRelogTold),
            Kind::ZeroRun => !faults.has(Fault::SkipRelogZeros),
            Kind::Through => true,
            _ => !faults.has(Fault::SkipRelogIntents),
        });
        said.sort_unstable_by_key(|s| (s.kind as u8, s.disk, s.block, s.count));
        said.dedup();
        if faults.has(Fault::SkipRelogClean) {
            all_clean.clear();
        }
        (said, all_clean)
    }

    /// Is nothing dirty in a segment, and never will be again?
    fn is_all_clean(&self, seg: u32) -> bool {
        self.segments[seg as usize].is_all_clean()
    }

    fn is_queued(&self, disk: u16, start: u64, end: u64) -> bool {
        let queued = self.queued.get(&disk);
        queued.is_some_and(|runs| runs.first_in(start, end).is_some())
    }

    /// How many copies of each block it has itself: all are dead by now.
    fn own_copies(&self) -> BTreeMap<(u16, u64), u64> {
        let mut own = BTreeMap::new();
        for e in self.entries.iter().filter(|e| e.kind.is_data()) {
            *own.entry((e.disk, e.block)).or_insert(0) += 1;
        }
        own
    }
}

impl Said {
    fn of(kind: Kind, disk: u16, start: u64, end: u64) -> Said {
        Said {
            kind,
            disk,
            block: start,
            count: end - start,
        }
    }
}

/// Blocks an entry is about.
pub(crate) fn run_of(e: &Entry) -> u64 {
    match e.kind.is_data() {
        true => 1,
        false => u64::from(e.word),
    }
}

fn add(blocks: &mut Blocks, disk: u16, start: u64, end: u64) {
    let at = blocks.entry((disk, start)).or_insert(end);
    *at = end.max(*at);
}

/// One record for what lies side by side.
fn merge(kind: Kind, blocks: Blocks, said: &mut Vec<Said>) {
    let mut run: Option<(u16, u64, u64)> = None;
    for ((disk, start), end) in blocks {
        match &mut run {
            Some((d, _, to)) if *d == disk && start <= *to => *to = end.max(*to),
            _ => {
                if let Some((disk, from, to)) = run.replace((disk, start, end)) {
                    said.push(Said::of(kind, disk, from, to));
                }
            }
        }
    }
    if let Some((disk, from, to)) = run {
        said.push(Said::of(kind, disk, from, to));
    }
}

/// The parts of `start..end` that lie in none of `runs`, which are in order and do not overlap.
fn gaps(start: u64, end: u64, runs: &[(u64, u64)], mut tell: impl FnMut(u64, u64)) {
    let mut at = start;
    for (from, to) in runs {
        if at < *from {
            tell(at, *from);
        }
        at = at.max(*to);
    }
    if at < end {
        tell(at, end);
    }
}
