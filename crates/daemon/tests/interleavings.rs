//! A disk is opened, changed and tried again by several threads at once, in the order of steps that a
//! scheduler picks instead of the system. What is tried is the daemon's own code of the marks
//! (`marks.rs`), built a second time with the scheduler's locks; who takes and looks at them goes the
//! way the daemon does (`attach.rs`, `control.rs`).

mod sync {
    pub(crate) use shuttle::sync::{Arc, Condvar, Mutex, MutexGuard};
}
#[path = "../src/marks.rs"]
mod marks;

use hearth_engine::api::DiskId;
use marks::{Mark, Marks};
use shuttle::sync::{Arc, Mutex, MutexGuard};
use shuttle::{check_pct, check_random, thread};
use std::time::Duration;

/// Schedules tried of each kind: a second's worth.
const SCHEDULES: usize = 2000;
/// Places at which the second kind of schedules lets a thread overtake.
const DEPTH: usize = 4;
/// The scheduler's clock stands still: who waits is told, or waits for ever, which it reports.
const LONG: Duration = Duration::from_secs(3600);

const DISKS: [DiskId; 2] = [1, 2];

/// What the marks protect: who has each disk's origin open or changes it.
#[derive(Default)]
struct Daemon {
    marks: Arc<Marks>,
    ops: Mutex<()>,
    opening: Mutex<[bool; DISKS.len()]>,
    served: Mutex<[u32; DISKS.len()]>,
}

impl Daemon {
    /// Opens the origin, for as long as that takes, and serves the disk (`attach_marked`).
    fn attach_marked(&self, mark: Mark) {
        let at = usize::from(mark.id()) - 1;
        let before = std::mem::replace(&mut self.opening.lock().unwrap()[at], true);
        assert!(!before, "two have the origin open");
        thread::yield_now();
        let ops = self.ops.lock().unwrap();
        self.served.lock().unwrap()[at] += 1;
        drop(ops);
        self.opening.lock().unwrap()[at] = false;
        // The mark goes last: whoever may open it next finds it closed.
        drop(mark);
    }

    /// Tries a disk again, unless somebody is at work (`retry`).
    fn retry(&self, id: DiskId) {
        if self.marks.contains(id) {
            return;
        }
        let Ok(ops) = self.ops.try_lock() else { return };
        let Some(mark) = self.marks.take(id) else {
            return;
        };
        drop(ops);
        self.attach_marked(mark);
    }

    /// The lock of the operations, for a change of a disk (`ops_for`).
    fn ops_for(&self, id: DiskId) -> MutexGuard<'_, ()> {
        loop {
            let ops = self.ops.lock().unwrap();
            if let Some(ops) = self.marks.free_or_wait(id, ops, LONG) {
                return ops;
            }
        }
    }

    /// Changes a disk.
    fn change(&self, id: DiskId) {
        let ops = self.ops_for(id);
        let is_open = || self.opening.lock().unwrap()[usize::from(id) - 1];
        assert!(!is_open(), "changed while its origin is open");
        thread::yield_now();
        assert!(!is_open(), "its origin was opened during a change");
        drop(ops);
    }

    /// Decides about a disk, which opens it (`update` with `--trust`).
    fn decide(&self, id: DiskId) {
        let ops = self.ops_for(id);
        let mark = self.marks.take(id).expect("that was waited for");
        drop(ops);
        self.attach_marked(mark);
    }
}

#[test]
fn a_disk_being_opened_is_changed_by_nobody_and_everybody_comes_to_an_end() {
    let world = || {
        let daemon = Arc::new(Daemon::default());
        let work: [fn(&Daemon); 5] = [
            |d| d.retry(1),
            |d| d.change(1),
            |d| d.decide(1),
            |d| d.decide(2),
            |d| d.change(2),
        ];
        let threads = work.map(|work| {
            let daemon = daemon.clone();
            thread::spawn(move || work(&daemon))
        });
        for thread in threads {
            thread.join().expect("no thread panics");
        }
        let served = *daemon.served.lock().unwrap();
        assert!(matches!(served, [1 | 2, 1]), "{served:?}");
        assert!(DISKS.iter().all(|id| !daemon.marks.contains(*id)));
    };
    check_random(world, SCHEDULES);
    check_pct(world, SCHEDULES, DEPTH);
}
