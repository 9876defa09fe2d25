//! What is changed of a disk while it is on its way onto flash.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::super::{StopReason, testing};
use super::*;
use crate::api::server::Control;
use crate::api::types::{DiskMove, DiskSet, MirrorSet};

const MIB: u64 = 1 << 20;
/// Far longer than anything here takes.
const LIMIT: Duration = Duration::from_secs(60);

/// A daemon with a disk of 16 MiB on its way onto flash, which gets no further: swap is held up.
fn under_way() -> (tempfile::TempDir, Arc<Daemon>, DiskId, PathBuf) {
    let (dir, daemon) = testing::daemon();
    let add = testing::disk(dir.path(), "d");
    let file = PathBuf::from(&add.origin);
    let written = std::fs::OpenOptions::new().write(true).open(&file);
    let written = written.unwrap();
    written
        .write_all_at(&vec![7; 3 * MIB as usize], MIB)
        .unwrap();
    let id = daemon.add(add).unwrap().id;
    daemon.hold_swap_up(true);
    let order = DiskMove {
        flash_only: true,
        ..DiskMove::default()
    };
    let moves = daemon.move_disk("d", &order).unwrap();
    assert!(moves.onto_flash.is_some() && daemon.engine.is_held(id));
    (dir, daemon, id, file)
}

fn leg(dir: &Path, size: u64) -> (PathBuf, MirrorSet) {
    let path = dir.join("leg");
    std::fs::File::create(&path).unwrap().set_len(size).unwrap();
    let set = MirrorSet {
        add: Some(path.display().to_string()),
        ..MirrorSet::default()
    };
    (path, set)
}

fn until(what: &str, done: impl Fn() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < LIMIT, "{what}");
        std::thread::yield_now();
    }
}

fn told(daemon: &Daemon, event: &str) -> usize {
    let all = hearth_events::Query {
        limit: 100,
        ..Default::default()
    };
    let told = daemon.events.query(&all).unwrap();
    told.iter().filter(|record| record.event == event).count()
}

#[test]
fn what_will_have_no_origin_gets_no_leg() {
    let (dir, daemon, id, _) = under_way();
    let (path, set) = leg(dir.path(), 16 * MIB);
    let e = daemon.set_mirror("d", &set).unwrap_err();
    assert!(e.what.contains("on its way onto flash"), "{e}");
    assert!(e.remedy.contains("hearth disk flush d"), "{e}");
    assert!(daemon.engine.is_held(id), "it goes on");
    daemon.hold_swap_up(false);
    let home = || lock(&daemon.pool).record(id).map(|r| r.home);
    until("it lives on flash", || home() == Some(Home::Flash));
    assert!(lock(&daemon.pool).record(id).unwrap().mirror.is_none());
    // Nor does one that lives there.
    let e = daemon.set_mirror("d", &set).unwrap_err();
    assert!(e.what.contains("lives on flash"), "{e}");
    let untouched = std::fs::read(&path).unwrap();
    assert!(untouched.iter().all(|byte| *byte == 0));
    daemon.shut_down(StopReason::Signal).unwrap();
}

#[test]
fn what_is_called_off_by_a_flush_may_get_a_leg() {
    let (dir, daemon, id, _) = under_way();
    daemon.flush("d").unwrap();
    assert!(!daemon.engine.is_held(id));
    let (_, set) = leg(dir.path(), 16 * MIB);
    let info = daemon.set_mirror("d", &set).unwrap();
    assert_eq!(info.legs.len(), 2);
    daemon.hold_swap_up(false);
    until("the move is over", || told(&daemon, "disk-stays") == 1);
    assert_eq!(lock(&daemon.pool).record(id).unwrap().home, Home::Moving);
    daemon.shut_down(StopReason::Signal).unwrap();
}

#[test]
fn another_mode_lets_it_go() {
    let (_dir, daemon, id, _) = under_way();
    let mut set = DiskSet::default();
    set.settings.mode = Some(CacheMode::WriteThrough);
    daemon.set("d", set).unwrap();
    assert!(!daemon.engine.is_held(id));
    daemon.hold_swap_up(false);
    until("the move is over", || told(&daemon, "disk-stays") == 1);
    assert_eq!(told(&daemon, "disk-on-flash"), 0);
    let record = lock(&daemon.pool).record(id).cloned().unwrap();
    assert_ne!(record.home, Home::Flash);
    daemon.shut_down(StopReason::Signal).unwrap();
}

/// The registry knows first. Whoever asks between that and the engine's being told sees a disk that has arrived, not one that lives there
/// and is on its way.
#[test]
fn what_lives_there_is_not_on_its_way() {
    let (_dir, daemon, id, _) = under_way();
    let info = daemon.disk_info("d").unwrap();
    assert!(info.onto_flash.is_some());
    let home = |home: Home| {
        let change = |record: &mut DiskRecord| record.home = home;
        daemon.change_home("d", id, change).unwrap();
    };
    home(Home::Flash);
    assert!(daemon.engine.is_held(id), "the engine was not told");
    let info = daemon.disk_info("d").unwrap();
    assert!(info.onto_flash.is_none(), "{:?}", info.onto_flash);
    home(Home::Moving);
    assert!(daemon.disk_info("d").unwrap().onto_flash.is_some());
    daemon.shut_down(StopReason::Signal).unwrap();
}

/// What an origin has grown by is not on flash, and nobody looks for it there.
#[test]
fn what_grows_is_let_go_and_promised_what_it_grew_by() {
    let (_dir, daemon, id, file) = under_way();
    let grown = std::fs::OpenOptions::new().write(true).open(&file).unwrap();
    let larger = || DiskSet {
        size_from_origin: true,
        ..DiskSet::default()
    };
    // Half of a pool of 64 MiB may be promised, at most.
    grown.set_len(64 * MIB).unwrap();
    let e = daemon.set("d", larger()).unwrap_err();
    assert!(e.what.contains("cannot be promised to d"), "{e}");
    assert!(daemon.engine.is_held(id), "it goes on");
    grown.set_len(17 * MIB).unwrap();
    grown
        .write_all_at(&vec![9; MIB as usize], 16 * MIB)
        .unwrap();
    assert_eq!(daemon.set("d", larger()).unwrap().size, 17 * MIB);
    assert!(!daemon.engine.is_held(id));
    assert!(matches!(
        daemon.engine.hold_on(id),
        Err(ControlError::Dirty)
    ));
    assert!(
        !daemon.engine.is_held(id),
        "whoever goes on does not take it up again"
    );
    daemon.hold_swap_up(false);
    until("the move is over", || told(&daemon, "disk-stays") == 1);
    assert_ne!(lock(&daemon.pool).record(id).unwrap().home, Home::Flash);
    // From the start it comes along.
    let order = DiskMove {
        flash_only: true,
        ..DiskMove::default()
    };
    daemon.move_disk("d", &order).unwrap();
    let home = || lock(&daemon.pool).record(id).map(|r| r.home);
    until("it lives on flash", || home() == Some(Home::Flash));
    let cached = daemon.engine.status(id).unwrap().cached_blocks * BLOCK;
    assert_eq!(cached, 4 * MIB);
    daemon.shut_down(StopReason::Signal).unwrap();
}
