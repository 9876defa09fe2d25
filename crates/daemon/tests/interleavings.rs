//! A disk is opened, changed and tried again by several threads at once, in the order of steps that a
//! scheduler picks instead of the system. What is tried is the daemon's own table of disks
//! (`table.rs`), built a second time with the scheduler's locks; who takes turns goes the way the daemon
//! does (`attach.rs`, `control.rs`, `stop.rs`).

// Not all of the table is used here.
#![allow(dead_code)]

mod sync {
    pub(crate) use shuttle::sync::{Arc, Condvar, Mutex, MutexGuard};
}
#[path = "../src/table.rs"]
mod table;

use hearth_engine::api::DiskId;
use shuttle::sync::{Arc, Mutex};
use shuttle::{check_pct, check_random, thread};
use std::time::Duration;
use table::{Purpose, Table, Turn};

/// Schedules tried of each kind: a second's worth.
const SCHEDULES: usize = 2000;
/// Places at which the second kind of schedules lets a thread overtake.
const DEPTH: usize = 4;
/// The scheduler's clock stands still: who waits is told, or waits for ever, which it reports.
const LONG: Duration = Duration::from_secs(3600);

const DISKS: [DiskId; 2] = [1, 2];

/// What turns protect: who has each disk's origin open or changes it.
struct Daemon {
    table: Arc<Table<()>>,
    opening: Mutex<[bool; DISKS.len()]>,
    served: Mutex<[u32; DISKS.len()]>,
    stopped: Mutex<bool>,
}

impl Daemon {
    fn new() -> Daemon {
        let table = Arc::new(Table::default());
        for id in DISKS {
            table.lock().insert(id, &id.to_string(), ());
        }
        Daemon {
            table,
            opening: Mutex::default(),
            served: Mutex::default(),
            stopped: Mutex::default(),
        }
    }

    /// Opens the origin, for as long as that takes, and serves the disk (`attach_within`).
    fn attach(&self, turn: Turn<()>) {
        let at = usize::from(turn.id()) - 1;
        let before = std::mem::replace(&mut self.opening.lock().unwrap()[at], true);
        assert!(!before, "two have the origin open");
        thread::yield_now();
        if turn.begin_change() {
            thread::yield_now();
            assert!(!*self.stopped.lock().unwrap(), "changed behind a stop");
            self.served.lock().unwrap()[at] += 1;
        }
        self.opening.lock().unwrap()[at] = false;
        // The turn goes last: whoever may open it next finds it closed.
        drop(turn);
    }

    /// Tries a disk again, unless somebody is at work (`retry`).
    fn retry(&self, id: DiskId) {
        if let Some(turn) = self.table.turn(id, Purpose::Opening) {
            self.attach(turn);
        }
    }

    /// A change of a disk (`turn_for`).
    fn turn_for(&self, id: DiskId) -> Option<Turn<()>> {
        self.table
            .turn_within(|_| LONG, |_| Ok::<_, ()>(id))
            .unwrap()
    }

    /// Changes a disk.
    fn change(&self, id: DiskId) {
        let Some(turn) = self.turn_for(id) else {
            return;
        };
        let is_open = || self.opening.lock().unwrap()[usize::from(id) - 1];
        assert!(!is_open(), "changed while its origin is open");
        thread::yield_now();
        assert!(!is_open(), "its origin was opened during a change");
        assert!(!*self.stopped.lock().unwrap(), "changed behind a stop");
        drop(turn);
    }

    /// Decides about a disk, which opens it (`set` with `--trust`).
    fn decide(&self, id: DiskId) {
        if let Some(turn) = self.turn_for(id) {
            turn.begin_opening();
            self.attach(turn);
        }
    }

    fn stop(&self) {
        assert!(self.table.close(LONG));
        *self.stopped.lock().unwrap() = true;
    }

    fn run(work: &[fn(&Daemon)]) -> Arc<Daemon> {
        let daemon = Arc::new(Daemon::new());
        let threads: Vec<_> = work
            .iter()
            .map(|work| {
                let (daemon, work) = (daemon.clone(), *work);
                thread::spawn(move || work(&daemon))
            })
            .collect();
        for thread in threads {
            thread.join().expect("no thread panics");
        }
        daemon
    }
}

#[test]
fn a_disk_being_opened_is_changed_by_nobody_and_everybody_comes_to_an_end() {
    let world = || {
        let daemon = Daemon::run(&[
            |d| d.retry(1),
            |d| d.change(1),
            |d| d.decide(1),
            |d| d.decide(2),
            |d| d.change(2),
        ]);
        let served = *daemon.served.lock().unwrap();
        assert!(matches!(served, [1 | 2, 1]), "{served:?}");
        let slots = daemon.table.lock();
        assert!(DISKS.iter().all(|id| slots.purpose(*id).is_none()));
    };
    check_random(world, SCHEDULES);
    check_pct(world, SCHEDULES, DEPTH);
}

#[test]
fn nothing_is_changed_behind_a_stop() {
    let world = || {
        Daemon::run(&[
            |d| d.retry(1),
            |d| d.change(1),
            |d| d.decide(2),
            |d| d.change(2),
            |d| d.stop(),
        ]);
    };
    check_random(world, SCHEDULES);
    check_pct(world, SCHEDULES, DEPTH);
}

/// Somebody's turn that never ends keeps nobody from another disk.
#[test]
fn a_disk_waits_for_no_other() {
    let world = || {
        let daemon = Daemon::new();
        let hangs = daemon.table.turn(1, Purpose::Changing).unwrap();
        daemon.change(2);
        daemon.decide(2);
        drop(hangs);
    };
    check_random(world, SCHEDULES);
}
