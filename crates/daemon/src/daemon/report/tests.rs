use hearth_engine::api::DiskId;

use super::super::{StopReason, testing};
use super::*;
use crate::api::server::Control;
use crate::api::types::{CacheMode, DiskSet};
use crate::beside::Beside;

/// The cache being off says nothing good of a disk that is not served.
#[test]
fn what_is_said_of_a_disk_without_its_cache_is_so() {
    let said = |state, unknown, owed| goes_on(state, false, unknown, owed);
    assert_eq!(
        said(DiskState::Attached, false, 0),
        "the disk goes on from its origin"
    );
    for state in [DiskState::Refused, DiskState::Waiting, DiskState::Fenced] {
        for (unknown, owed) in [(false, 0), (true, 0), (false, 4096)] {
            let said = said(state, unknown, owed);
            assert!(!said.contains("goes on"), "{state:?}: {said}");
        }
    }
    assert!(said(DiskState::Refused, true, 0).contains("not known"));
    assert!(said(DiskState::Refused, false, 4096).contains("4 KiB"));
    let lives = goes_on(DiskState::Refused, true, false, 0);
    assert!(!lives.contains("can be read"), "{lives}");
}

/// A start whose flash is gone makes nothing up: neither that a clean stop left it, nor how large it is, nor that nothing of a
/// refused disk is lost.
#[test]
fn a_start_without_flash_says_what_is_known_and_what_is_not() {
    let (dir, daemon) = testing::with_disk("a");
    daemon.add(testing::disk(dir.path(), "b")).unwrap();
    let new = daemon.pool_info();
    assert_eq!(new.recovery.unwrap().how, "new flash");
    let id: DiskId = daemon.disk_info("a").unwrap().id;
    daemon.shut_down(StopReason::Signal).unwrap();
    let pool: hearth_format::Uuid = lock(&daemon.pool).uuid().parse().unwrap();
    drop(daemon);
    let state = dir.path().join("state");
    let beside = Beside::of(&state, &pool).unwrap().expect("it is kept");
    let noted = beside.note(|notes| {
        notes.dirty.insert(id);
    });
    noted.unwrap();
    drop(beside);
    std::fs::remove_file(dir.path().join("flash")).unwrap();

    let daemon = testing::start(dir.path());
    let refused = daemon.disk_info("a").unwrap();
    assert_eq!(refused.state, DiskState::Refused);
    assert!(refused.dirty_unknown);
    let note = refused.notices.join("; ");
    assert!(note.contains("the cache is off"), "{note}");
    assert!(!note.contains("goes on"), "{note}");
    let served = daemon.disk_info("b").unwrap();
    assert!(!served.dirty_unknown && served.state == DiskState::Attached);
    assert!(
        served
            .notices
            .join("; ")
            .contains("goes on from its origin")
    );

    let info = daemon.pool_info();
    let dirty: Vec<_> = info.disks.iter().map(|d| (&*d.name, d.dirty)).collect();
    assert_eq!(dirty, [("a", None), ("b", Some(0))]);
    assert_eq!(
        (info.capacity, info.segments, info.promised_most),
        (Some(0), 0, 0)
    );
    assert_eq!(daemon.stats_report().pool.capacity, 0);
    let recovery = info.recovery.unwrap();
    assert_eq!(recovery.how, "state directory alone");
    let page = daemon.metrics_page(hearth_metrics::Form::Plain);
    let of_disk = |name: &str| page.contains(&format!("hearth_disk_dirty_bytes{{disk=\"{name}\""));
    assert!(!of_disk("a") && of_disk("b"), "{page}");
    let said = super::super::found(&recovery, daemon.without_flash, true);
    assert!(said.contains("without a cache"), "{said}");

    // Once somebody has said that the origin counts, nothing of it is dirty.
    let trust = DiskSet {
        trust: Some(crate::api::types::Trust::Origin),
        ..DiskSet::default()
    };
    daemon.set("a", trust).unwrap();
    assert!(!daemon.disk_info("a").unwrap().dirty_unknown);
    daemon.shut_down(StopReason::Signal).unwrap();
}

/// Until flash has noted it there is no order to speak of, and nothing is wrong either.
#[test]
fn a_clean_disk_that_becomes_ordered_lacks_nothing() {
    let (_dir, daemon) = testing::with_disk("a");
    let mut ordered = DiskSet::default();
    ordered.settings.mode = Some(CacheMode::WriteBackOrdered);
    daemon.set("a", ordered).unwrap();
    let order = daemon.disk_info("a").unwrap().order.expect("it is ordered");
    assert!(order.in_order != order.begins, "{order:?}");
    let said = order.sentence();
    assert!(!said.contains("still lacks"), "{said}");
    daemon.shut_down(StopReason::Signal).unwrap();
}
