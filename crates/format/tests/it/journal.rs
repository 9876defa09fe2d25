//! The registry's journal while the device dies at every point, torn in every way, and while any one
//! block rots: what was acknowledged is never lost, and nothing older comes back.

use crate::common::{Flash, TEARS};
use hearth_format::journal::{Change, ENTRY_BLOCKS_MAX, JournalEntry, replay};
use hearth_format::layout::{REGISTRY_AREA_BLOCKS, REGISTRY_BLOCKS};
use hearth_format::places::REGISTRY_PLAIN_BYTES;
use hearth_format::{DiskRecord, FormatError, Layout, Places, Registry, Uuid};
use proptest::prelude::*;

const POOL: Uuid = Uuid::from_u128(77);
const BLOCK: u64 = 4096;

/// Large enough for a registry to grow.
fn layout() -> Layout {
    Layout::for_device(4 << 30, 1024).unwrap()
}

fn disk(id: u16) -> DiskRecord {
    DiskRecord {
        id,
        name: format!("vm-{id}"),
        origin: format!("file:/srv/images/vm-{id}.img"),
        size: 1 << 30,
        ..DiskRecord::default()
    }
}

fn disks(count: u16) -> Registry {
    Registry {
        disks: (1..=count).map(disk).map(Into::into).collect(),
        ..Registry::default()
    }
}

/// A registry of that many large disks and a few small ones: large, and quickly read.
fn large(count: u16) -> Registry {
    let mut registry = disks(count + SMALL as u16);
    for disk in &mut registry.disks[SMALL..] {
        disk.unknown = vec![(500, vec![7; 8000])];
    }
    registry
}

/// Small disks in front.
const SMALL: usize = 20;

/// A pool as one program sees it that has opened it.
#[derive(Clone)]
struct Open {
    flash: Flash,
    registry: Registry,
    places: Places,
}

impl Open {
    fn new(registry: Registry) -> Open {
        let mut open = Open {
            flash: Flash::new(4 << 30),
            registry: Registry::default(),
            places: Places::new(&layout()).unwrap(),
        };
        open.change(|r| *r = registry).unwrap();
        open
    }

    fn change(&mut self, change: impl FnOnce(&mut Registry)) -> Result<(), FormatError> {
        let mut next = self.registry.clone();
        change(&mut next);
        let Open {
            flash,
            registry,
            places,
        } = self;
        places.store(flash, &layout(), POOL, registry, &mut next)?;
        self.registry = next;
        Ok(())
    }

    /// What a program finds that opens it now.
    fn reopened(&self) -> Result<Open, FormatError> {
        let mut flash = self.flash.clone();
        let (registry, places) = Places::load(&mut flash, &layout(), POOL)?;
        Ok(Open {
            flash,
            registry,
            places,
        })
    }

    /// Bytes written and flushes for one change.
    fn cost(&mut self, change: impl FnOnce(&mut Registry)) -> (usize, usize) {
        self.flash.written = (0, 0);
        self.change(change).unwrap();
        self.flash.written
    }
}

/// A change that can be recognised.
fn set(mark: u64) -> impl Fn(&mut Registry) {
    move |r| r.disks[mark as usize % SMALL].since_seq = mark
}

/// The same, of several blocks.
fn set_large(mark: u64) -> impl Fn(&mut Registry) {
    move |r| {
        let place = &mut r.disks[mark as usize % SMALL];
        (place.since_seq, place.unknown) = (mark, vec![(500, vec![mark as u8; 9000])]);
    }
}

fn mark(registry: &Registry) -> u64 {
    registry.disks.iter().map(|d| d.since_seq).max().unwrap()
}

#[test]
fn a_change_is_one_block_in_each_of_two_copies_and_one_flush() {
    for count in [1000, 4000, 8000] {
        let mut open = Open::new(disks(count));
        open.change(set(1)).unwrap();
        assert_eq!(open.cost(set(2)), (2 * 4096, 1), "{count}");
        assert_eq!(open.cost(|r| drop(r.disks.remove(7))), (2 * 4096, 1));
        assert_eq!(open.reopened().unwrap().registry, open.registry);
    }
    // A small one stays as it always was, for older versions.
    let mut open = Open::new(disks(10));
    assert_eq!(open.cost(set_small), (2 * 4096, 2));
    let mut old = open.flash.get(REGISTRY_BLOCKS[0] * BLOCK, 1);
    assert_eq!(old.split_off(40)[..4], [0; 4], "no flags");
}

fn set_small(registry: &mut Registry) {
    registry.disks[3].since_seq += 1;
}

#[test]
fn a_registry_that_shrinks_is_stored_for_older_versions_again() {
    let mut open = Open::new(disks(500));
    assert!(open.registry.encode(POOL).unwrap().len() > REGISTRY_PLAIN_BYTES);
    open.change(|r| r.disks.truncate(10)).unwrap();
    let mut again = open.reopened().unwrap();
    assert_eq!(again.registry, open.registry);
    again.change(set_small).unwrap();
    for area in REGISTRY_BLOCKS {
        let bytes = again.flash.get(area * BLOCK, 1);
        assert_eq!(bytes[40..44], [0; 4]);
        assert_eq!(Registry::decode(&bytes, POOL).unwrap(), again.registry);
    }
}

#[test]
fn a_journal_that_is_full_becomes_a_new_base() {
    let mut open = Open::new(disks(1500));
    let (mut bases, mut before) = (0, 0);
    for mark in 1..=600 {
        let (bytes, flushes) = open.cost(set(mark));
        if flushes == 2 {
            bases += 1;
            assert!(mark - before > 100, "after {}", mark - before);
            before = mark;
        } else {
            assert_eq!((bytes, flushes), (8192, 1));
        }
    }
    assert!(bases >= 2, "{bases}");
    assert_eq!(open.reopened().unwrap().registry, open.registry);
}

/// A change on a device that dies after so many steps. What is found must be whole, and the
/// change there if it was acknowledged.
fn round(
    open: &Open,
    steps: usize,
    tear: fn(usize) -> bool,
    change: impl FnOnce(&mut Registry),
) -> Open {
    let mut dying = open.clone();
    dying.flash.left = steps;
    let mut wanted = open.registry.clone();
    change(&mut wanted);
    let stored = dying.change(|r| *r = wanted.clone()).is_ok();
    dying.flash.power_cycle(tear);
    let found = dying.reopened().unwrap();
    let new = found.registry.disks == wanted.disks;
    assert!(new || (!stored && found.registry.disks == open.registry.disks));
    found
}

#[test]
fn a_crash_in_an_entry_and_in_the_base_after_it_leaves_the_old_or_the_new() {
    let mut start = Open::new(large(9));
    start.change(set(1)).unwrap();
    for steps in 0..=3 {
        for tear in TEARS {
            // Several blocks first, so that what is left of them lies where the next one goes.
            let found = round(&start, steps, tear, set_large(2));
            for steps in 0..=4 {
                for tear in TEARS {
                    let found = round(&found, steps, tear, set(3));
                    round(&found, usize::MAX, |_| true, set(4));
                }
            }
        }
    }
}

#[test]
fn what_failed_is_undone_by_the_next_store() {
    for registry in [disks(10), large(9)] {
        let mut start = Open::new(registry);
        start.change(set(1)).unwrap();
        for steps in 0..=2 {
            for tear in TEARS {
                let mut open = start.clone();
                open.flash.left = steps;
                open.change(set(2)).unwrap_err();
                open.flash.left = usize::MAX;
                open.change(|_| ()).unwrap();
                open.flash.power_cycle(tear);
                assert_eq!(mark(&open.reopened().unwrap().registry), 1);
            }
        }
        // What failed may be torn by a power cut in the next store, as if it were part of that.
        for failed in 0..=1 {
            for steps in 0..4 {
                for tear in TEARS {
                    let mut open = start.clone();
                    open.flash.left = failed;
                    open.change(set(2)).unwrap_err();
                    open.flash.left = steps;
                    let stored = open.change(set(3)).is_ok();
                    open.flash.power_cycle(tear);
                    let found = mark(&open.reopened().unwrap().registry);
                    assert!(found == 3 || !stored);
                }
            }
        }
    }
}

/// A program that is killed leaves writes that are there to be read, and that a power cut takes.
#[test]
fn a_kill_before_the_flush_and_then_a_power_cut_take_only_what_nobody_was_told() {
    for registry in [disks(10), large(9)] {
        let mut start = Open::new(registry);
        start.change(set_small).unwrap();
        let start = start.reopened().unwrap();
        for killed in 0..=3 {
            let mut open = start.clone();
            open.flash.left = killed;
            open.change(set_small).unwrap_err();
            open.flash.left = usize::MAX;
            let open = open.reopened().unwrap();
            for steps in 0..=5 {
                for tear in TEARS {
                    let mut open = open.clone();
                    open.flash.left = steps;
                    let stored = open.change(set_small).is_ok();
                    open.flash.power_cycle(tear);
                    let found = mark(&open.reopened().unwrap().registry);
                    assert!((1..=3).contains(&found) && (found >= 2 || !stored));
                }
            }
        }
    }
}

#[test]
fn rot_of_any_one_block_of_either_area_brings_back_nothing_old() {
    let mut open = Open::new(large(9));
    for mark in 1..=12 {
        match mark % 4 {
            0 => open.change(set_large(mark)).unwrap(),
            _ => open.change(set(mark)).unwrap(),
        }
    }
    // Nine entries of one block, three of three.
    let used = large(9).encode(POOL).unwrap().len() as u64 / BLOCK + 9 + 9;
    for area in REGISTRY_BLOCKS {
        for block in 0..REGISTRY_AREA_BLOCKS {
            let mut rotten = open.clone();
            rotten.flash.rot((area + block) * BLOCK + 70);
            let mut found = rotten.reopened().unwrap();
            assert_eq!(found.registry, open.registry, "block {block}");
            let hit = block < used;
            assert_eq!(found.places.is_sound(), !hit, "block {block}");
            let mut unread = open.clone();
            unread.flash.unreadable = Some((area + block) * BLOCK);
            assert_eq!(unread.reopened().unwrap().registry, open.registry);
            // And stays so while it is stored again, whatever happens meanwhile.
            if hit {
                for steps in 0..4 {
                    round(&found, steps, |n| n % 2 == 1, |_| ());
                }
                found.change(|_| ()).unwrap();
                assert!(found.reopened().unwrap().places.is_sound());
            }
        }
    }
}

#[test]
fn a_change_that_neither_copy_has_is_damage_and_not_the_end() {
    let mut open = Open::new(large(9));
    let base = open.registry.encode(POOL).unwrap().len() as u64;
    for mark in 1..=5 {
        open.change(set(mark)).unwrap();
    }
    for lost in 0..5 {
        let mut rotten = open.clone();
        for area in REGISTRY_BLOCKS {
            rotten.flash.rot(area * BLOCK + base + lost * BLOCK + 70);
        }
        let found = rotten.reopened();
        if lost < 4 {
            let error = found.map(drop).unwrap_err();
            assert!(matches!(error, FormatError::Damaged { .. }), "{error}");
        } else {
            // Nothing tells this from a crash while it was written; as it always was.
            assert_eq!(mark(&found.unwrap().registry), 4);
        }
    }
    // Different ones are no loss.
    let mut rotten = open.clone();
    for (area, lost) in REGISTRY_BLOCKS.into_iter().zip([1, 3]) {
        rotten.flash.rot(area * BLOCK + base + lost * BLOCK + 70);
    }
    assert_eq!(rotten.reopened().unwrap().registry, open.registry);
}

#[test]
fn a_registry_that_outgrows_its_areas_moves_in_one_store() {
    let mut start = Open::new(large(60));
    start.change(set(1)).unwrap();
    let (from, blocks) = layout().registry_room().unwrap();
    assert!(start.flash.get(from * BLOCK, 1).iter().all(|b| *b == 0));
    // Opened again, so that the next store is a base.
    let start = start.reopened().unwrap();
    let grow = |r: &mut Registry| {
        *r = Registry {
            unknown_records: vec![(9, vec![0])],
            ..large(100)
        }
    };
    // Two areas and two notes, each flushed.
    for steps in 0..=8 {
        for tear in TEARS {
            let found = round(&start, steps, tear, grow);
            for steps in [1, 3, 5, 7] {
                round(&found, steps, tear, |r| r.disks.truncate(110));
                // Small enough for the first areas.
                round(&found, steps, tear, |r| r.disks.truncate(10));
            }
        }
    }
    let mut grown = start.clone();
    grown.change(grow).unwrap();
    grown.change(set(2)).unwrap();
    // One note and one area are enough.
    for at in [REGISTRY_BLOCKS[0], REGISTRY_BLOCKS[1], from, from + blocks] {
        let mut rotten = grown.clone();
        rotten.flash.rot(at * BLOCK + 40);
        let mut found = rotten.reopened().unwrap();
        assert_eq!(found.registry, grown.registry);
        assert!(!found.places.is_sound());
        found.change(|_| ()).unwrap();
        assert!(found.reopened().unwrap().places.is_sound());
    }
    // Without any it is not an older registry that is found.
    let mut rotten = grown.clone();
    rotten.flash.rot(from * BLOCK + 40);
    rotten.flash.rot((from + blocks) * BLOCK + 40);
    assert!(rotten.reopened().is_err());
}

#[test]
fn a_registry_that_fits_nowhere_is_refused_with_a_remedy() {
    let mut open = Open::new(disks(100));
    let before = open.registry.clone();
    let error = open.change(|r| *r = disks(32_000)).unwrap_err().to_string();
    assert!(error.contains("larger device"), "{error}");
    assert_eq!(open.reopened().unwrap().registry, before);
    open.change(set_small).unwrap();
    let twice = open.change(|r| r.disks[4].name = "vm-1".to_owned());
    assert!(twice.is_err());
}

#[test]
fn an_entry_must_not_break_what_a_registry_must_keep() {
    let mut open = Open::new(disks(500));
    open.change(set(1)).unwrap();
    let before = open.registry.clone();
    let breaks: [fn(&mut Registry); 4] = [
        |r| r.disks[4].name = "vm-1".to_owned(),
        |r| r.disks.push(DiskRecord { id: 9, ..disk(900) }.into()),
        |r| r.disks.iter_mut().for_each(|d| d.name = "same".to_owned()),
        |r| r.disks[4].origin.clear(),
    ];
    for change in breaks {
        assert!(open.change(change).is_err());
    }
    assert_eq!(open.reopened().unwrap().registry, before);
}

fn entry(changes: Vec<Change>) -> JournalEntry {
    JournalEntry {
        base: 1,
        generation: 2,
        next_disk_id: 1,
        changes,
    }
}

#[test]
fn entries_that_make_no_sense_are_refused() {
    let base = || Registry {
        generation: 1,
        ..disks(2)
    };
    let refuse = |changes, edit: fn(&mut Vec<u8>)| {
        let mut bytes = entry(changes).encode(POOL).unwrap().unwrap();
        edit(&mut bytes);
        bytes[4..8].fill(0);
        let crc = hearth_io::checksum::crc32c(&bytes);
        bytes[4..8].copy_from_slice(&crc.to_le_bytes());
        replay(base(), [&bytes, &[]], POOL).unwrap_err()
    };
    let same = |_: &mut Vec<u8>| ();
    let taken = DiskRecord {
        name: "vm-2".to_owned(),
        ..disk(1)
    };
    for error in [
        refuse(vec![Change::Remove(9)], same),
        refuse(vec![Change::Remove(u16::MAX)], same),
        refuse(vec![Change::Put(taken.into())], same),
        refuse(vec![Change::Remove(1)], |b| b[32] = 12),
        refuse(vec![Change::Remove(1)], |b| b[32..36].fill(0xff)),
        refuse(vec![Change::Remove(1)], |b| b[64 + 4] = 1),
    ] {
        let damaged = matches!(
            error,
            FormatError::Damaged { .. } | FormatError::Wrong { .. }
        );
        assert!(damaged, "{error}");
    }
    for error in [
        refuse(vec![], |b| b[40] = 1),
        refuse(vec![Change::Remove(1)], |b| b[64] = 3),
    ] {
        assert!(matches!(error, FormatError::Newer { .. }), "{error}");
    }
    let many = vec![
        Change::Put(
            DiskRecord {
                unknown: vec![(500, vec![0; 60_000])],
                ..disk(1)
            }
            .into(),
        );
        2
    ];
    assert!(entry(many).encode(POOL).unwrap().is_none());
}

/// What one program may do to a registry.
#[derive(Clone, Debug)]
enum Act {
    Add(u16),
    Remove(prop::sample::Index),
    Set(prop::sample::Index, u64),
    Turn(usize),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        (1u16..400).prop_map(Act::Add),
        any::<prop::sample::Index>().prop_map(Act::Remove),
        (any::<prop::sample::Index>(), any::<u64>()).prop_map(|(i, n)| Act::Set(i, n)),
        (0usize..20).prop_map(Act::Turn),
    ]
}

fn apply(registry: &mut Registry, act: Act) {
    let len = registry.disks.len();
    match act {
        Act::Add(id) if registry.by_id(id).is_none() => registry.disks.push(disk(id).into()),
        Act::Add(_) => registry.next_disk_id += 1,
        Act::Remove(i) if len > 0 => drop(registry.disks.remove(i.index(len))),
        Act::Set(i, n) if len > 0 => registry.disks[i.index(len)].since_seq = n,
        Act::Turn(by) if len > 0 => registry.disks.rotate_left(by % len),
        _ => {}
    }
}

/// A base, its entries one behind the other, and every registry on the way.
fn chain(acts: Vec<Vec<Act>>) -> (Registry, Vec<u8>, Vec<Registry>) {
    let base = Registry {
        generation: 5,
        ..disks(6)
    };
    let (mut bytes, mut steps) = (Vec::new(), vec![base.clone()]);
    for acts in acts {
        let old = steps.last().unwrap();
        let mut new = Registry {
            generation: old.generation + 1,
            ..old.clone()
        };
        acts.into_iter().for_each(|act| apply(&mut new, act));
        let entry = JournalEntry::between(old, &new, 5).unwrap();
        let block = entry.encode(POOL).unwrap().unwrap();
        assert!(block.len() <= ENTRY_BLOCKS_MAX * 4096);
        assert_eq!(JournalEntry::decode(&block, POOL).unwrap(), entry);
        bytes.extend(block);
        steps.push(new);
    }
    (base, bytes, steps)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn whatever_is_done_to_a_registry_its_journal_makes_the_same(
        acts in prop::collection::vec(prop::collection::vec(act(), 0..6), 0..12),
    ) {
        let (base, mut bytes, steps) = chain(acts);
        bytes.resize(bytes.len() + 8192, 0);
        let chain = replay(base, [&bytes, &bytes], POOL).unwrap();
        prop_assert_eq!(chain.whole, [true; 2]);
        prop_assert_eq!(Some(&chain.registry), steps.last());
    }

    #[test]
    fn a_torn_block_ends_the_chain_or_is_damage_but_never_something_else(
        acts in prop::collection::vec(prop::collection::vec(act(), 0..6), 1..8),
        at: prop::sample::Index, bytes_torn in 1usize..200,
    ) {
        let (base, bytes, steps) = chain(acts);
        let at = at.index(bytes.len());
        let mut torn = bytes.clone();
        torn[at..(at + bytes_torn).min(bytes.len())].iter_mut().for_each(|b| *b ^= 0x55);
        if let Ok(found) = replay(base.clone(), [&torn, &[]], POOL) {
            prop_assert!(steps.contains(&found.registry));
        }
        // The other area has it.
        let found = replay(base, [&torn, &bytes], POOL).unwrap();
        prop_assert_eq!(Some(&found.registry), steps.last());
        prop_assert_eq!(found.whole, [false, true]);
    }

    #[test]
    fn any_bytes_behind_a_base_are_refused_or_understood(
        mut bytes in prop::collection::vec(any::<u8>(), 4096..12_288), sealed: bool,
    ) {
        if sealed {
            bytes[..4].copy_from_slice(b"HRGJ");
            bytes[8..16].copy_from_slice(&hearth_format::pool_tag(&POOL).to_le_bytes());
            bytes[16..24].copy_from_slice(&5u64.to_le_bytes());
            bytes[24..32].copy_from_slice(&6u64.to_le_bytes());
            (bytes[36], bytes[37]) = (1, 0);
            bytes[40..44].fill(0);
            bytes[4..8].fill(0);
            let crc = hearth_io::checksum::crc32c(&bytes[..4096]);
            bytes[4..8].copy_from_slice(&crc.to_le_bytes());
        }
        let base = Registry { generation: 5, ..disks(2) };
        let _ = replay(base, [&bytes, &[]], POOL);
    }
}
