//! Storing superblock and registry while the device dies at every point, torn in every way,
//! twice in a row: what was acknowledged is never lost, what is found is never a mixture.

use crate::common::{Flash, TEARS};
use hearth_format::layout::{REGISTRY_BLOCKS, SUPERBLOCK_BLOCKS};
use hearth_format::{
    DiskRecord, FormatError, Layout, Places, PoolState, Registry, Superblock, Uuid,
};

/// A store is two writes and two flushes; dying after 4 is not dying.
const STEPS: usize = 4;

const POOL: Uuid = Uuid::from_u128(77);

fn layout() -> Layout {
    Layout::for_device(64 << 20, 1024).unwrap()
}

fn formatted() -> (Flash, Superblock) {
    let mut flash = Flash::new(64 << 20);
    let mut superblock = Superblock::new(layout(), POOL, Uuid::from_u128(2), "tank", 1);
    superblock.store(&mut flash).unwrap();
    (flash, superblock)
}

fn clean(id: u64) -> PoolState {
    PoolState::Clean {
        checkpoint_id: id,
        checkpoint_bytes: 0,
    }
}

fn checkpoint_id(superblock: &Superblock) -> u64 {
    match superblock.state {
        PoolState::Clean { checkpoint_id, .. } => checkpoint_id,
        _ => 0,
    }
}

/// Stores `next` on a device dying after `steps`, tears, and loads: must be `old` or `next`,
/// and `next` if the store was acknowledged.
fn superblock_round(
    flash: &mut Flash,
    old: u64,
    next: u64,
    steps: usize,
    tear: fn(usize) -> bool,
) -> u64 {
    let mut superblock = Superblock::load(flash).unwrap();
    assert_eq!(checkpoint_id(&superblock), old);
    superblock.state = clean(next);
    flash.left = steps;
    let stored = superblock.store(flash).is_ok();
    assert_eq!(stored, steps >= STEPS);
    flash.power_cycle(tear);
    let found = checkpoint_id(&Superblock::load(flash).unwrap());
    assert!(
        found == next || (!stored && found == old),
        "found {found} after {old} and {next}"
    );
    found
}

#[test]
fn superblocks_survive_two_crashes_in_a_row() {
    let (start, _) = formatted();
    for first in 0..=STEPS {
        for tear_first in TEARS {
            for second in 0..=STEPS {
                for tear_second in TEARS {
                    let mut flash = start.clone();
                    let found = superblock_round(&mut flash, 0, 1, first, tear_first);
                    let found = superblock_round(&mut flash, found, 2, second, tear_second);
                    superblock_round(&mut flash, found, 3, STEPS, |_| true);
                }
            }
        }
    }
}

#[test]
fn a_superblock_store_may_be_repeated_after_an_error() {
    let (start, superblock) = formatted();
    for first in 0..STEPS {
        for second in 0..=STEPS {
            for tear in TEARS {
                let (mut flash, mut superblock) = (start.clone(), superblock.clone());
                superblock.state = clean(1);
                flash.left = first;
                superblock.store(&mut flash).unwrap_err();
                flash.left = second;
                let stored = superblock.store(&mut flash).is_ok();
                flash.power_cycle(tear);
                let found = checkpoint_id(&Superblock::load(&mut flash).unwrap());
                assert!(found == 1 || (found == 0 && !stored));
            }
        }
    }
}

#[test]
fn one_copy_is_enough_and_none_is_told_apart() {
    let (start, _) = formatted();
    for copy in SUPERBLOCK_BLOCKS {
        let mut flash = start.clone();
        flash.rot(copy * 4096 + 100);
        Superblock::load(&mut flash).unwrap();
        flash.unreadable = Some(copy * 4096);
        Superblock::load(&mut flash).unwrap();
    }
    let mut flash = start.clone();
    for copy in SUPERBLOCK_BLOCKS {
        flash.rot(copy * 4096 + 100);
    }
    assert!(matches!(
        Superblock::load(&mut flash),
        Err(FormatError::Damaged { .. })
    ));

    let mut blank = Flash::new(64 << 20);
    assert!(matches!(
        Superblock::load(&mut blank),
        Err(FormatError::NotAPool)
    ));
    assert!(matches!(
        Superblock::load(&mut Flash::new(0)),
        Err(FormatError::NotAPool)
    ));

    let mut erased = start.clone();
    Superblock::erase(&mut erased).unwrap();
    assert!(matches!(
        Superblock::load(&mut erased),
        Err(FormatError::NotAPool)
    ));
}

#[test]
fn a_shorter_device_is_named_with_both_sizes() {
    let (mut flash, mut superblock) = formatted();
    for size in [4096, 1 << 20, (64 << 20) - 1] {
        flash.size = size;
        let error = Superblock::load(&mut flash).unwrap_err();
        assert!(
            matches!(error, FormatError::TruncatedDevice { recorded: 0x400_0000, actual } if actual == size),
            "{error}"
        );
        assert!(superblock.store(&mut flash).is_err());
    }
    flash.size = 128 << 20;
    Superblock::load(&mut flash).unwrap();
}

#[test]
fn a_shifted_device_is_not_taken_for_the_pool() {
    let (flash, _) = formatted();
    let mut shifted = flash.shifted(1 << 20);
    let error = Superblock::load(&mut shifted).unwrap_err();
    assert!(
        error.to_string().contains("start at another place"),
        "{error}"
    );
}

#[test]
fn a_newer_copy_stops_an_older_version() {
    let (mut flash, superblock) = formatted();
    let mut newer = superblock.clone();
    (newer.copy, newer.incompat) = (1, 1 << 63);
    flash.put(SUPERBLOCK_BLOCKS[1] * 4096, newer.encode().as_slice());
    assert!(matches!(
        Superblock::load(&mut flash),
        Err(FormatError::Newer { .. })
    ));
}

/// Storing a registry that was just read begins with a flush of what was found.
const REGISTRY_STEPS: usize = STEPS + 1;

/// A registry of several blocks, recognisable by its only disk's size.
fn registry(generation: u64, mark: u64) -> Registry {
    let disk = DiskRecord {
        id: 1,
        name: "a".to_owned(),
        origin: "x".repeat(4096),
        size: mark,
        unknown: vec![(500, vec![mark as u8; 9000])],
        ..DiskRecord::default()
    };
    Registry {
        generation,
        disks: vec![disk.into()],
        ..Registry::default()
    }
}

fn mark(registry: &Registry) -> u64 {
    registry.disks[0].size
}

fn with_registry() -> Flash {
    let (mut flash, _) = formatted();
    let mut places = Places::new(&layout()).unwrap();
    let old = Registry::default();
    places
        .store(&mut flash, &layout(), POOL, &old, &mut registry(0, 0))
        .unwrap();
    flash
}

fn load(flash: &mut Flash, pool: Uuid) -> Result<Registry, FormatError> {
    Places::load(flash, &layout(), pool).map(|(registry, _)| registry)
}

fn registry_round(
    flash: &mut Flash,
    old: u64,
    next: u64,
    steps: usize,
    tear: fn(usize) -> bool,
) -> u64 {
    let (found, mut places) = Places::load(flash, &layout(), POOL).unwrap();
    assert_eq!(mark(&found), old);
    let mut changed = registry(0, next);
    flash.left = steps;
    let stored = places
        .store(flash, &layout(), POOL, &found, &mut changed)
        .is_ok();
    assert_eq!(stored, steps >= REGISTRY_STEPS);
    assert_eq!(changed.generation, found.generation + 1);
    flash.power_cycle(tear);
    let found = mark(&load(flash, POOL).unwrap());
    assert!(
        found == next || (!stored && found == old),
        "found {found} after {old} and {next}"
    );
    found
}

#[test]
fn registries_survive_two_crashes_in_a_row() {
    let start = with_registry();
    for first in 0..=REGISTRY_STEPS {
        for tear_first in TEARS {
            for second in 0..=REGISTRY_STEPS {
                for tear_second in TEARS {
                    let mut flash = start.clone();
                    let found = registry_round(&mut flash, 0, 1, first, tear_first);
                    let found = registry_round(&mut flash, found, 2, second, tear_second);
                    registry_round(&mut flash, found, 3, REGISTRY_STEPS, |_| true);
                }
            }
        }
    }
}

#[test]
fn rot_in_one_area_never_brings_back_an_older_registry() {
    for area in REGISTRY_BLOCKS {
        for generation in 0..2 {
            let mut flash = with_registry();
            for next in 1..=generation + 1 {
                registry_round(&mut flash, next - 1, next, REGISTRY_STEPS, |_| true);
            }
            flash.rot(area * 4096 + 5000);
            let found = mark(&load(&mut flash, POOL).unwrap());
            assert_eq!(found, generation + 1);
            // The only good area is not the one at risk in the next store.
            for steps in 0..=REGISTRY_STEPS {
                for tear in TEARS {
                    registry_round(&mut flash.clone(), found, 9, steps, tear);
                }
            }
        }
    }
}

#[test]
fn missing_damaged_and_newer_registries() {
    let (mut flash, _) = formatted();
    assert!(load(&mut flash, POOL).unwrap_err().is_absent());

    let mut flash = with_registry();
    assert!(
        load(&mut flash, Uuid::from_u128(5))
            .unwrap_err()
            .is_absent()
    );
    for area in REGISTRY_BLOCKS {
        flash.rot(area * 4096 + 200);
    }
    let error = load(&mut flash, POOL).unwrap_err();
    assert!(matches!(error, FormatError::Damaged { .. }), "{error}");
}
