//! A disk is opened, changed and tried again by several threads at once, in the order of steps that a
//! scheduler picks instead of the system. What is tried is the daemon's own table of disks
//! (`table.rs`), built a second time with the scheduler's locks; who takes turns goes the way the daemon
//! does (`attach.rs`, `control.rs`, `stop.rs`). The same is done to the threads for what may block
//! (`workers.rs`), and to what is rung for those who wait (`bell.rs`).

// Not all of these is used here.
#![allow(dead_code)]

#[path = "../../src/bell.rs"]
mod bell;
#[path = "../../src/table.rs"]
mod table;
#[path = "../../src/workers.rs"]
mod workers;

use bell::Bell;

use hearth_engine::api::DiskId;
use shuttle::sync::{Arc, Condvar, Mutex};
use shuttle::{check_pct, check_random, thread};
use std::time::Duration;
use table::{Purpose, Table, Turn};
use workers::{Class, Spot, Workers};

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

/// Every job is done once, one that hangs keeps none elsewhere, and no thread is left that waits for ever.
#[test]
fn jobs_are_done_beside_one_that_hangs() {
    let world = || {
        let workers = Arc::new(Workers::default());
        let done = Arc::new((Mutex::new(Vec::new()), Condvar::new()));
        let (dead, sound) = (Spot::new("dead"), Spot::new("sound"));
        let gate = Arc::new((Mutex::new(false), Condvar::new()));
        let hang = {
            let gate = gate.clone();
            move || {
                let (open, opened) = &*gate;
                let mut open = open.lock().unwrap();
                while !*open {
                    open = opened.wait(open).unwrap();
                }
            }
        };
        workers.run(&dead, Class::Background, hang).unwrap();
        let askers: Vec<_> = [Class::Background, Class::Asked, Class::Due]
            .into_iter()
            .enumerate()
            .map(|(number, class)| {
                let (workers, done, sound) = (workers.clone(), done.clone(), sound.clone());
                let job = move || {
                    done.0.lock().unwrap().push(number);
                    done.1.notify_all();
                };
                thread::spawn(move || workers.run(&sound, class, job).unwrap())
            })
            .collect();
        let (list, more) = &*done;
        let mut list = list.lock().unwrap();
        while list.len() < askers.len() {
            list = more.wait(list).unwrap();
        }
        list.sort_unstable();
        assert_eq!(*list, [0, 1, 2]);
        drop(list);
        askers.into_iter().for_each(|asker| asker.join().unwrap());
        assert!(workers.census().threads <= 4);
        *gate.0.lock().unwrap() = true;
        gate.1.notify_all();
        // Idle threads end with the pool: the scheduler's clock stands still, and it reports whoever waits.
        drop(workers);
    };
    check_random(world, SCHEDULES);
    check_pct(world, SCHEDULES, DEPTH);
}

/// Who waits for what several bring about hears of it.
#[test]
fn nobody_misses_what_was_rung_for() {
    let world = || {
        let world = Arc::new((Bell::default(), Mutex::new(0)));
        let ringers: Vec<_> = (0..3)
            .map(|_| {
                let world = world.clone();
                thread::spawn(move || {
                    *world.1.lock().unwrap() += 1;
                    world.0.ring();
                })
            })
            .collect();
        let listener = {
            let world = world.clone();
            thread::spawn(move || {
                let look = || (*world.1.lock().unwrap() >= 2).then_some(());
                world.0.wait(LONG, Duration::ZERO, look)
            })
        };
        let all = || (*world.1.lock().unwrap() == 3).then_some(());
        assert!(world.0.wait(LONG, Duration::ZERO, all).is_some());
        assert!(listener.join().unwrap().is_some());
        ringers
            .into_iter()
            .for_each(|ringer| ringer.join().unwrap());
    };
    check_random(world, SCHEDULES);
    check_pct(world, SCHEDULES, DEPTH);
}
