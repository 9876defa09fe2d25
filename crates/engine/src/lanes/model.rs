//! The parts that threads share without the core's lock, under every order in which they can run.
//!
//! `cargo test -p hearth-engine --features model model::`

use super::Rooms;
use crate::cache::index::{Index, Key};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering::Relaxed};
use loom::thread;

/// Switches between threads at places of their own choice that are tried.
const PREEMPTIONS: usize = 3;

fn explore(body: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(PREEMPTIONS);
    model.max_branches = 100_000;
    model.check(body);
}

/// In slot 1, whose word begins in the last byte of one and goes on in the next.
const SPLIT: u32 = 1;
/// In slot 6, of whose word only the last byte is in the next.
const LATE_SPLIT: u32 = 6;

/// `there` comes and goes, and is never taken for `half`, which is what half of its word says.
fn never_half(slot: u32, there: Key, half: Key) {
    explore(move || {
        let mut index = Index::new(7, 7);
        let lookup = index.lookup();
        let reader = thread::spawn(move || {
            assert_eq!(lookup.holds(slot, half), None);
            if let Some(found) = lookup.get(there) {
                assert_eq!((found.slot, found.crc), (slot, 55));
            }
        });
        index.set(there, slot, 55, false, 1);
        index.remove(there);
        reader.join().unwrap();
    });
}

#[test]
fn a_slot_being_filled_or_emptied_is_never_somebody_elses() {
    never_half(SPLIT, Key::new(1, 5), Key::new(1, 0));
    never_half(LATE_SPLIT, Key::new(0x81, 5), Key::new(1, 5));
}

#[test]
fn a_block_that_moves_is_found_with_the_checksum_of_its_place() {
    explore(|| {
        let mut index = Index::new(2, 7);
        let lookup = index.lookup();
        let key = Key::new(1, 5);
        index.set(key, 0, 50, false, 1);
        let reader = thread::spawn(move || {
            if let Some(found) = lookup.get(key) {
                assert_eq!(found.crc, 50 + found.slot);
            }
        });
        index.set(key, SPLIT, 51, true, 1);
        reader.join().unwrap();
    });
}

#[test]
fn what_a_hit_reads_is_not_written_again_under_it() {
    explore(|| {
        let mut index = Index::new(2, 7);
        let lookup = index.lookup();
        let (old, new) = (Key::new(1, 5), Key::new(2, 5));
        // What lies on flash, and who pins it: one thread's hits, one segment.
        let flash = Arc::new(AtomicU32::new(5));
        let rooms = Arc::new(Rooms::<u32>::new(1));
        index.set(old, SPLIT, 5, false, 1);
        let (device, lanes) = (flash.clone(), rooms.clone());
        let hit = thread::spawn(move || {
            let found = {
                let mut pins = lanes.enter(0);
                let found = lookup.get(old);
                *pins += u32::from(found.is_some());
                found
            };
            if let Some(found) = found {
                assert_eq!(found.crc, 5);
                assert_eq!(device.load(Relaxed), 5, "somebody else's block");
                *lanes.enter(0) -= 1;
            }
        });
        index.remove(old);
        let mut pinned = false;
        rooms.each(|pins| pinned |= *pins > 0);
        if !pinned {
            flash.store(6, Relaxed);
            index.set(new, SPLIT, 6, false, 1);
        }
        hit.join().unwrap();
    });
}
