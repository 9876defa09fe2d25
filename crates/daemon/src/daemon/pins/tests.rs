//! The keeper of pinned disks, a step at a time: who is read in, when, and when not.

use std::os::unix::fs::FileExt;
use std::path::Path;

use hearth_io::{BlockFile, OpenMode};

use super::super::{StopReason, testing};
use super::*;
use crate::api::server::Control;
use crate::api::types::DiskSet;

const MIB: u64 = 1 << 20;
/// Far longer than anything here takes.
const LIMIT: Duration = Duration::from_secs(60);

/// A daemon whose own keeper has ended, so that nobody goes on but the test.
fn daemon() -> (tempfile::TempDir, Arc<Daemon>) {
    let (dir, daemon) = testing::daemon();
    daemon.end_pins();
    (dir, daemon)
}

/// Adds a pinned disk of 16 MiB, of which so many from the second on are data.
fn pinned(dir: &Path, daemon: &Arc<Daemon>, name: &str, data: u64) -> DiskId {
    let mut add = testing::disk(dir, name);
    let file = std::fs::OpenOptions::new().write(true).open(&add.origin);
    let bytes = vec![7; (data * MIB) as usize];
    file.unwrap().write_all_at(&bytes, MIB).unwrap();
    add.settings.pin = Some(true);
    daemon.add(add).unwrap().id
}

struct Steps {
    daemon: Arc<Daemon>,
    keeper: Keeper,
    news: Receiver<News>,
}

impl Steps {
    fn of(daemon: &Arc<Daemon>) -> Steps {
        let (tell, news) = channel();
        let keeper = Keeper {
            daemon: Arc::downgrade(daemon),
            port: Port::open(&daemon.reactors).unwrap(),
            shown: Arc::default(),
            tell,
            jobs: BTreeMap::new(),
            list_due: Instant::now(),
            turn: 0,
        };
        Steps {
            daemon: daemon.clone(),
            keeper,
            news,
        }
    }

    /// Everybody whose time it would be has his turn once.
    fn round(&mut self) {
        for job in self.keeper.jobs.values_mut() {
            job.due = Instant::now();
        }
        self.keeper.round(&self.daemon);
    }

    /// Until a piece is on its way, and has come.
    fn piece(&mut self) {
        let waits = |s: &Steps| {
            s.keeper
                .jobs
                .values()
                .any(|j| matches!(j.step, Step::Wait(..)))
        };
        for _ in 0..100 {
            if waits(self) {
                let Ok(News::Read(id, result)) = self.news.recv_timeout(LIMIT) else {
                    panic!("a piece does not come");
                };
                return self.keeper.was_read(id, result);
            }
            self.round();
        }
        panic!("nothing is asked for");
    }

    fn shown(&self, id: DiskId) -> PinInfo {
        lock(&self.keeper.shown).get(&id).cloned().unwrap()
    }

    /// Reads all in.
    fn fill(&mut self, id: DiskId) {
        let begun = Instant::now();
        while self.keeper.jobs.is_empty() || self.shown(id).state != PinState::Filled {
            assert!(begun.elapsed() < LIMIT, "{:?}", self.shown(id));
            match self
                .keeper
                .jobs
                .get(&id)
                .map(|j| matches!(j.step, Step::Wait(..)))
            {
                Some(true) => self.piece(),
                _ => self.round(),
            }
        }
    }
}

#[test]
fn what_is_data_is_read_in_and_holes_are_not() {
    let (dir, daemon) = daemon();
    let id = pinned(dir.path(), &daemon, "a", 3);
    let mut steps = Steps::of(&daemon);
    steps.fill(id);
    let there = there(&daemon, id);
    assert!((3 * MIB..4 * MIB).contains(&there), "{there}");
    assert_eq!(steps.shown(id).bytes_left, Some(0));
    let told = daemon.events.query(&hearth_events::Query {
        limit: 100,
        ..Default::default()
    });
    let told = told.unwrap();
    let pinned = told.iter().filter(|r| r.event == "disk-pinned").count();
    assert_eq!(pinned, 1);
    drop(steps);
    daemon.shut_down(StopReason::Signal).unwrap();
}

#[test]
fn nothing_is_read_in_while_swap_on_the_same_flash_is_held_up() {
    let (dir, daemon) = daemon();
    let id = pinned(dir.path(), &daemon, "a", 3);
    let mut steps = Steps::of(&daemon);
    daemon.hold_swap_up(true);
    // More than it takes to count all of it and to begin.
    for _ in 0..50 {
        steps.round();
        let job = &steps.keeper.jobs[&id];
        assert!(!matches!(job.step, Step::Wait(..)), "{:?}", job.step);
    }
    assert_eq!(steps.shown(id).state, PinState::Filling);
    assert_eq!(steps.shown(id).bytes_left, Some(3 * MIB));
    daemon.hold_swap_up(false);
    steps.piece();
    steps.fill(id);
    drop(steps);
    daemon.shut_down(StopReason::Signal).unwrap();
}

#[test]
fn of_disks_at_one_place_one_is_read_at_a_time() {
    let (dir, daemon) = daemon();
    let ids = ["a", "b"].map(|name| pinned(dir.path(), &daemon, name, 2));
    let mut steps = Steps::of(&daemon);
    let begun = |steps: &Steps| ids.map(|id| steps.keeper.jobs[&id].is_begun());
    steps.piece();
    assert_eq!(begun(&steps), [true, false]);
    let waits = steps.shown(ids[1]);
    assert_eq!(waits.state, PinState::Waiting);
    assert!(waits.reason.unwrap().contains("read in first"));
    steps.fill(ids[0]);
    steps.fill(ids[1]);
    drop(steps);
    daemon.shut_down(StopReason::Signal).unwrap();
}

#[test]
fn what_cannot_be_read_is_said_and_does_not_end_it() {
    let (dir, daemon) = daemon();
    let id = pinned(dir.path(), &daemon, "a", 3);
    let mut steps = Steps::of(&daemon);
    while !matches!(
        steps.keeper.jobs.get(&id).map(|j| &j.step),
        Some(Step::Wait(..))
    ) {
        steps.round();
    }
    let Ok(News::Read(..)) = steps.news.recv_timeout(LIMIT) else {
        panic!("a piece does not come");
    };
    steps.keeper.was_read(id, Err(ReqError::Io));
    let shown = steps.shown(id);
    assert_eq!(shown.state, PinState::Filling);
    let reason = shown.reason.unwrap();
    assert!(reason.contains("not all of it can be read"), "{reason}");
    assert!(shown.remedy.unwrap().contains("tried again"));
    // It counted nothing for it, and goes on with what comes behind.
    assert_eq!(shown.bytes_left, Some(3 * MIB));
    assert!(matches!(steps.keeper.jobs[&id].step, Step::Fill(at) if at > MIB));
    steps.fill(id);
    assert_eq!(steps.shown(id).reason, None);
    drop(steps);
    daemon.shut_down(StopReason::Signal).unwrap();
}

#[test]
fn where_nothing_stays_it_is_not_asked_for_again_at_once() {
    let (dir, daemon) = daemon();
    let id = pinned(dir.path(), &daemon, "a", 1);
    let mut steps = Steps::of(&daemon);
    steps.round();
    let mut job = steps.keeper.jobs.remove(&id).unwrap();
    (job.left, job.before) = (5 * MIB, Some(5 * MIB));
    steps.keeper.counted(&daemon, id, &mut job);
    assert!(matches!(job.step, Step::Rest));
    assert!(
        job.due > Instant::now() + SOON,
        "it rests for longer than that"
    );
    // Less is lacking than before: it goes on.
    (job.left, job.before) = (4 * MIB, Some(5 * MIB));
    steps.keeper.counted(&daemon, id, &mut job);
    assert!(matches!(job.step, Step::Fill(0)));
    drop(steps);
    daemon.shut_down(StopReason::Signal).unwrap();
}

#[test]
fn a_disk_that_is_pinned_no_more_is_left_alone() {
    let (dir, daemon) = daemon();
    let id = pinned(dir.path(), &daemon, "a", 3);
    let mut steps = Steps::of(&daemon);
    steps.piece();
    let mut set = DiskSet::default();
    set.settings.pin = Some(false);
    daemon.set("a", set).unwrap();
    steps.keeper.list(&daemon);
    assert!(steps.keeper.jobs.is_empty());
    assert!(lock(&steps.keeper.shown).is_empty());
    // What comes late is nobody's.
    steps.keeper.was_read(id, Ok(()));
    assert!(steps.keeper.jobs.is_empty());
    drop(steps);
    daemon.shut_down(StopReason::Signal).unwrap();
}

#[test]
fn data_is_found_in_whole_blocks_and_within_the_range() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("origin");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(8 * MIB).unwrap();
    file.write_all_at(&vec![1; MIB as usize], 2 * MIB).unwrap();
    file.sync_all().unwrap();
    let device = Device::new(BlockFile::open(&path, OpenMode::default()).unwrap());
    assert_eq!(data_in(&device, 0, 8 * MIB), MIB);
    assert_eq!(data_in(&device, 2 * MIB + 4096, 8192), 8192);
    assert_eq!(data_of(&device, 0, 8 * MIB), Some((2 * MIB, MIB)));
    assert_eq!(
        data_of(&device, 2 * MIB + 4096, 8192),
        Some((2 * MIB + 4096, 8192))
    );
    assert_eq!(data_of(&device, 4 * MIB, 4 * MIB), None);
    assert_eq!(data_of(&device, 8 * MIB, 0), None);
    // Behind the end there is nothing.
    assert_eq!(data_in(&device, 8 * MIB, MIB), 0);
}
