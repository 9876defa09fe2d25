//! Opening a pool: cache and disks from what the flash device finds, and what it keeps of them at a stop.

use crate::api::DiskId;
use crate::blocks::runset::RunSet;
use crate::cache::index::{Index, Key, Section, SlotNo};
use crate::core::Core;
use crate::core::ordered::Told;
use crate::core::rest::Rest;
use crate::disk::Disk;
use crate::engine::OpenReport;
use crate::faults::Fault;
use crate::flash::checkpoint::{CheckpointError, Kept, Lies, Part, Restore, Zeros};
use crate::flash::log::Gone;
use crate::flash::recover::{How, RecoverError, Recovered};
use crate::flash::replay::{Copied, Intents, Placed, Replay};
use crate::origin::order::Order;
use crate::paths::{Path, took};
use hearth_format::{DISK_ID_MAX, Mark};
use hearth_io::Media;
use std::collections::{BTreeMap, BTreeSet};
use std::{io, mem};

/// Blocks a disk can have. It may have grown since its size was stored, but what is absurd is not believed.
const BLOCKS_MAX: u64 = 1 << 36;

/// Which records of a disk count: those in segments with at least this number.
pub(crate) type Since = BTreeMap<DiskId, u64>;

/// The engine while it is made of what is on flash.
struct Rebuild<'a> {
    rest: Rest<'a>,
    since: &'a Since,
    /// The index as it was when there were more segments, or fewer.
    before: Option<Index>,
    /// Clean copies in slots that there are no more went with a device that was lost.
    some_lost: bool,
    /// What the log tells of ordered disks.
    told: BTreeMap<DiskId, Told>,
    /// What a checkpoint has of them.
    orders: Vec<(DiskId, Order)>,
    /// Of which batch the entries are.
    batch: u64,
    /// Copies in a checkpoint that belong to no disk (any more): slot, block, and whether it is dirty.
    foreign: Vec<(SlotNo, Key, bool)>,
}

impl Core {
    /// Rebuilds everything from the log on `media`.
    pub fn recover(
        &mut self,
        media: &mut dyn Media,
        since: &Since,
    ) -> Result<Recovered, RecoverError> {
        let how = How {
            accept_damage: self.opts.accept_damage,
            keep_blocks: self.opts.recovery_keep_blocks,
        };
        let ordered = self.opts.ordered.clone();
        let (flash, rest) = self.apart();
        let mut rebuild = Rebuild::new(rest, since);
        rebuild.told = ordered.iter().map(|id| (*id, Told::default())).collect();
        let mut found = flash.recover(media, &mut rebuild, &how)?;
        let told = rebuild.told;
        self.restore_orders(told);
        self.restore_intents(mem::take(&mut found.intents));
        Ok(found)
    }

    /// The last run did not end in order: nothing is left of scratch disks. The record that says so need not be
    /// durable: until it is, the next start does the same.
    pub fn drop_scratch(&mut self, report: &mut OpenReport) {
        if self.opts.faults.has(Fault::KeepScratch) {
            return;
        }
        let scratch = self.disks.iter().flatten().filter(|d| d.is_scratch());
        report.dropped = scratch.map(|d| d.cfg.id).collect();
        for id in report.dropped.clone() {
            took(Path::ScratchDropped);
            self.forget_range(id, 0, BLOCKS_MAX);
            self.change_zeros(id, RunSet::clear);
            self.record_drop(id, 0, BLOCKS_MAX);
        }
    }

    /// A disk that moved onto flash may have had runs of zeros when that was stored, which no origin is ever told. There they are what is not
    /// there. As with scratch disks, until that is durable the next start does the same.
    pub fn drop_zeros_of_homeless(&mut self) {
        for id in self.disk_ids() {
            if self.disk(id).is_some_and(|d| !d.has_origin()) {
                self.zeros_become_nothing(id);
            }
        }
    }

    /// Reads the checkpoint back. False: it is not usable, and the core must be built afresh.
    pub fn read_checkpoint(
        &mut self,
        media: &mut dyn Media,
        id: u64,
        since: &Since,
    ) -> io::Result<bool> {
        let (flash, rest) = self.apart();
        let mut rebuild = Rebuild::new(rest, since);
        if !flash.read_checkpoint(media, id, &mut rebuild)? {
            return Ok(false);
        }
        for (disk, order) in mem::take(&mut rebuild.orders) {
            if !order.held().all(|slot| self.flash.is_in_log(slot)) {
                return Ok(false);
            }
            took(Path::OrderFromCheckpoint);
            self.adopt_order(disk, order);
        }
        Ok(true)
    }

    /// Reads back what was known when the pool went on without a device; the log comes on top of it. False: it is not there any more, and
    /// the core must be built afresh.
    pub fn read_base(&mut self, media: &mut dyn Media, since: &Since) -> io::Result<bool> {
        let (flash, rest) = self.apart();
        flash.read_base(media, &mut Rebuild::new(rest, since))
    }

    /// Writes the checkpoint; returns its length in bytes. Nothing may be in flight.
    pub fn write_checkpoint(
        &mut self,
        media: &mut dyn Media,
        id: u64,
    ) -> Result<u64, CheckpointError> {
        if self.disks.iter().flatten().any(|d| !d.lost.is_empty()) {
            took(Path::LostInCheckpoint);
        }
        let (flash, rest) = self.apart();
        flash.write_checkpoint(media, id, &rest)
    }

    /// Regions that were being written: their clean copies may be older than the origin.
    ///
    /// That the intent is durable says that the origin may have been written, not whether, and the
    /// copies were unmapped in RAM only; so invariant 3 demands that the whole region's go. A
    /// smaller region would lose less and cost more device flushes while it is written.
    fn restore_intents(&mut self, recorded: Intents) {
        let mut intents: BTreeSet<(DiskId, u32)> = BTreeSet::new();
        for ((disk, start), end) in recorded {
            let Some(d) = self.disk(disk).filter(|d| d.has_origin()) else {
                continue;
            };
            let (first, last) = d.origin.intents.regions_of(start, end);
            intents.extend((first..=last).map(|region| (disk, region)));
        }
        if intents.is_empty() {
            return;
        }
        for slot in 0..self.cache.index.slots() {
            let Some(info) = self.cache.index.slot(slot) else {
                continue;
            };
            let (disk, block) = (info.key.disk(), info.key.block());
            let Some(d) = self.disk(disk) else { continue };
            let region = d.origin.intents.region_of(block);
            if !info.dirty
                && intents.contains(&(disk, region))
                && !self.opts.faults.has(Fault::DropIntent)
                && !self.opts.faults.has(Fault::TrustIntentRegions)
            {
                self.forget_block(disk, block);
            }
        }
        for (disk, region) in intents {
            let Some(d) = self.disk_mut(disk) else {
                continue;
            };
            took(Path::IntentRestored);
            // The record is on flash, so the intent holds until a flush of the origin; what it
            // covers is void, and must stay void after the intent is closed.
            d.origin.intents.restore(region);
            d.origin.sync.restore();
            // Dirty copies in the region stay: say again what is void, block by block around them.
            let (start, end) = d.origin.intents.blocks_of(region);
            let keep: Vec<u64> = d.dirty.range(start, end).collect();
            let mut at = start;
            for block in keep.into_iter().chain([end]) {
                if block > at && !self.opts.faults.has(Fault::SkipRestoredVoid) {
                    self.record_drop(disk, at, block - at);
                }
                at = block + 1;
            }
        }
    }
}

impl Kept for Rest<'_> {
    fn seed(&self) -> u64 {
        self.cache.index.seed()
    }

    fn part_len(&self, part: Part) -> usize {
        self.cache.index.section_len(section(part))
    }

    fn part(&self, part: Part, at: usize, out: &mut [u8]) {
        self.cache.index.section(section(part), at, out);
    }

    fn zeros(&self) -> Vec<Zeros> {
        let disks = self.disks.iter().flatten().filter(|d| !d.zero.is_empty());
        let zeros = disks.map(|d| Zeros {
            disk: d.cfg.id,
            runs: d.zero.runs().collect(),
        });
        zeros.collect()
    }

    fn orders(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for d in self.disks.iter().flatten() {
            if let Some(order) = d.order.as_deref() {
                out.extend_from_slice(&d.cfg.id.to_le_bytes());
                order.encode(&mut out);
            }
        }
        out
    }
}

fn section(part: Part) -> Section {
    match part {
        Part::Slots => Section::Slots,
        Part::Checksums => Section::Checksums,
        Part::Table => Section::Table,
    }
}

impl<'a> Rebuild<'a> {
    fn new(rest: Rest<'a>, since: &'a Since) -> Rebuild<'a> {
        Rebuild {
            rest,
            since,
            before: None,
            some_lost: false,
            told: BTreeMap::new(),
            orders: Vec::new(),
            batch: 0,
            foreign: Vec::new(),
        }
    }
}

impl Kept for Rebuild<'_> {
    fn seed(&self) -> u64 {
        self.rest.seed()
    }

    fn part_len(&self, part: Part) -> usize {
        match &self.before {
            Some(before) => before.section_len(section(part)),
            None => self.rest.part_len(part),
        }
    }

    fn part(&self, part: Part, at: usize, out: &mut [u8]) {
        self.rest.part(part, at, out);
    }

    fn zeros(&self) -> Vec<Zeros> {
        self.rest.zeros()
    }
}

impl Restore for Rebuild<'_> {
    fn of_slots(&mut self, slots: u32, lost: bool) {
        self.some_lost = lost;
        self.before = Some(Index::new(slots, self.rest.seed()));
    }

    fn set_part(&mut self, part: Part, at: usize, data: &[u8]) {
        let index = self.before.as_mut().unwrap_or(&mut self.rest.cache.index);
        index.set_section(section(part), at, data);
    }

    fn adopt(&mut self, seed: u64) -> bool {
        let index = &mut self.rest.cache.index;
        match self.before.take() {
            Some(mut before) => before.adopt(seed) && index.take_over(&before, self.some_lost),
            None => index.adopt(seed),
        }
    }

    fn zeroed(&mut self, disk: DiskId, start: u64, end: u64, seg_seq: u64) {
        let void = self.since.get(&disk).is_some_and(|s| seg_seq < *s);
        if void || self.rest.disk(disk).is_none() {
            return;
        }
        let add = |zero: &mut RunSet| zero.insert_range(start, end);
        self.rest.change_zeros(disk, add);
    }

    fn evicted(&mut self, eviction: u64) {
        for d in self.rest.disks.iter_mut().flatten() {
            d.evicted = eviction;
        }
    }

    fn count(&mut self, slot: SlotNo, seq: u64) -> Lies {
        let Some(info) = self.rest.cache.index.slot(slot) else {
            return Lies::Nothing;
        };
        let dirty = info.dirty;
        let found = !dirty || self.rest.cache.index.get(info.key) == Some(slot);
        let (disk, block) = (info.key.disk(), info.key.block());
        let owed = dirty && !self.rest.disk(disk).is_some_and(Disk::is_promised);
        *self.rest.dirty_total += u64::from(owed);
        let void = self.since.get(&disk).is_none_or(|s| seq < *s);
        match self.rest.disk_mut(disk).filter(|_| !void) {
            Some(d) => {
                d.cached += 1;
                if dirty {
                    d.dirty.insert(block);
                    if info.lost {
                        took(Path::LostFromCheckpoint);
                        d.lost.insert(block);
                    }
                }
            }
            None => self.foreign.push((slot, info.key, dirty)),
        }
        Lies::Block { dirty, found }
    }

    fn set_orders(&mut self, mut bytes: &[u8], last_batch: u64) -> bool {
        while let Some((id, rest)) = bytes.split_first_chunk::<2>() {
            bytes = rest;
            let Some(order) = Order::decode(&mut bytes, last_batch) else {
                return false;
            };
            self.orders.push((u16::from_le_bytes(*id), order));
        }
        bytes.is_empty()
    }

    fn drop_gone(&mut self, gone: impl Fn(SlotNo) -> bool) -> bool {
        let index = &mut self.rest.cache.index;
        for slot in (0..index.slots()).filter(|slot| gone(*slot)) {
            let Some(info) = index.slot(slot) else {
                continue;
            };
            if info.dirty {
                return false;
            }
            // Another slot may claim to hold the same block.
            if !index.remove_orphan(slot) {
                index.remove(info.key);
            }
        }
        true
    }

    fn drop_foreign(&mut self, mut tell: impl FnMut(Gone)) {
        for (slot, key, dirty) in mem::take(&mut self.foreign) {
            // Another slot may claim to hold the same block.
            if !self.rest.cache.index.remove_orphan(slot) {
                self.rest.cache.index.remove(key);
            }
            let (disk, block) = (key.disk(), key.block());
            let owed = dirty && !self.rest.disk(disk).is_some_and(Disk::is_promised);
            *self.rest.dirty_total -= u64::from(owed);
            tell(Gone {
                disk,
                block,
                slot,
                dirty,
            });
        }
    }
}

impl Replay for Rebuild<'_> {
    fn counts(&self, disk: DiskId, seg_seq: u64) -> Option<u64> {
        let counts = self.since.get(&disk).is_some_and(|s| seg_seq >= *s);
        let d = self.rest.disk(disk).filter(|_| counts)?;
        Some(BLOCKS_MAX.max(d.blocks))
    }

    fn comes_soon(&self, disk: DiskId, block: u64) {
        if disk <= DISK_ID_MAX {
            let key = Key::new(disk, block & (BLOCKS_MAX - 1));
            self.rest.cache.index.prefetch(key);
        }
    }

    fn copied(&mut self, copy: Copied) -> Placed {
        if self.rest.cache.index.slot(copy.slot).is_some() {
            return Placed::Taken;
        }
        if let Some(told) = self.told.get_mut(&copy.disk) {
            match copy.dirty {
                true => {
                    let versions = told.versions.entry(copy.block).or_default();
                    versions.push((self.batch, copy.slot, copy.crc));
                }
                false => told.forget(copy.block, copy.block + 1),
            }
        }
        Placed::There(self.rest.map(copy, 0, 0))
    }

    fn cleaned(&mut self, disk: DiskId, start: u64, end: u64, mut tell: impl FnMut(SlotNo)) {
        if let Some(told) = self.told.get_mut(&disk) {
            told.forget(start, end);
        }
        let blocks: Vec<u64> = self.rest.known(disk).dirty.range(start, end).collect();
        for block in blocks {
            let slot = self.rest.cache.index.get(Key::new(disk, block));
            let slot = slot.expect("a dirty block has a copy");
            self.rest.cache.index.set_clean(slot);
            let owed = !self.rest.known(disk).is_promised();
            *self.rest.dirty_total -= u64::from(owed);
            self.rest.known_mut(disk).dirty.remove(block);
            tell(slot);
        }
    }

    fn dropped(&mut self, disk: DiskId, start: u64, end: u64, tell: impl FnMut(Gone)) {
        if let Some(told) = self.told.get_mut(&disk) {
            told.forget(start, end);
        }
        self.rest.forget_range(disk, start, end, tell);
    }

    fn zeroed(&mut self, disk: DiskId, start: u64, end: u64) {
        let add = |zero: &mut RunSet| zero.insert_range(start, end);
        self.rest.change_zeros(disk, add);
    }

    fn zeros_told(&mut self, disk: DiskId, start: u64, end: u64) {
        self.rest.zeros_told(disk, start, end - start);
    }

    fn batch(&mut self, seq: u64) {
        self.batch = seq;
    }

    fn asks_for_batches(&self) -> bool {
        !self.told.is_empty()
    }

    fn marked(&mut self, disk: DiskId, block: u64, word: u32) {
        if let Some(told) = self.told.get_mut(&disk) {
            told.mark = Some(Mark::from_fields(block, word));
        }
    }

    fn drop_clean(&mut self, slot: SlotNo) -> Option<Gone> {
        let clean = self.rest.cache.index.slot(slot).filter(|s| !s.dirty);
        let info = clean?;
        let gone = self.rest.forget_block(info.key.disk(), info.key.block());
        debug_assert_eq!(gone.map(|g| g.slot), Some(slot));
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Engine, EngineOptions, KnownDisk};
    use hearth_format::{Entry, Kind, Layout, Superblock, Uuid};
    use hearth_io::BLOCK;

    #[test]
    fn closing_a_region_leaves_its_neighbour_open_though_regions_grew() {
        let layout = Layout::for_device(16 << 20, 256).unwrap();
        let uuid = Uuid::from_u128(1);
        let known = KnownDisk {
            id: 1,
            size: 100 << 30,
            since_seq: 0,
            home: crate::api::Home::Origin,
        };
        let sb = Superblock::new(layout, uuid, uuid, "test", 0);
        let mut core = Engine::blank(sb, None, EngineOptions::default(), &[known]);
        let half = core.disk(1).unwrap().origin.intents.region_blocks() as u32 / 2;
        let entry = |kind, block: u32| Entry {
            disk: 1,
            block: u64::from(block),
            word: half,
            slot: 0,
            kind,
            flags: 0,
        };
        let mut log = vec![
            entry(Kind::Intent, 0),
            entry(Kind::Intent, half),
            entry(Kind::IntentClear, 0),
        ];
        let replay = |core: &mut Core, log: &[Entry], open: &mut Intents| {
            let since = BTreeMap::from([(1, 0)]);
            let (flash, rest) = core.apart();
            flash.replay((0, 7, false), log, &mut Rebuild::new(rest, &since), open);
        };
        let mut open = Intents::new();
        replay(&mut core, &log, &mut open);
        assert_eq!(
            open.keys().copied().collect::<Vec<_>>(),
            [(1, u64::from(half))]
        );
        log.push(Entry {
            word: 2 * half,
            ..entry(Kind::IntentClear, 0)
        });
        let mut none = Intents::new();
        replay(&mut core, &log, &mut none);
        assert!(none.is_empty());
        core.restore_intents(open);
        let restored = core.disk(1).unwrap().origin.intents.records();
        assert_eq!(restored, [0]);
    }

    /// Notes how far it was written.
    struct Written(u64);

    impl Media for Written {
        fn len(&self) -> u64 {
            u64::MAX
        }
        fn read_at(&mut self, _: u64, data: &mut [u8]) -> io::Result<()> {
            data.fill(0);
            Ok(())
        }
        fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
            self.0 = self.0.max(offset + data.len() as u64);
            Ok(())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The registry may have grown into the end of the area.
    #[test]
    fn a_checkpoint_fits_in_front_of_a_registry_that_has_grown_or_is_not_written_at_all() {
        for (bytes, segment_blocks) in [(2u64 << 30, 1024), (4 << 30, 256), (4 << 30, 16_384)] {
            let layout = Layout::for_device(bytes, segment_blocks).unwrap();
            let (room, _) = layout.registry_room().expect("a registry can grow here");
            let uuid = Uuid::from_u128(1);
            let sb = Superblock::new(layout, uuid, uuid, "test", 0);
            let mut core = Engine::blank(sb, None, EngineOptions::default(), &[]);
            let mut media = Written(0);
            core.write_checkpoint(&mut media, 1).unwrap();
            assert!((1..=room * BLOCK).contains(&media.0));
            // As if it had more in it.
            core.flash.layout.checkpoint_blocks = media.0 / BLOCK - layout.checkpoint_start - 1;
            media.0 = 0;
            let error = core.write_checkpoint(&mut media, 2).unwrap_err();
            assert!(matches!(error, CheckpointError::TooLarge { .. }), "{error}");
            assert_eq!(media.0, 0);
        }
    }
}
