//! Handing over between threads, in the order of steps that a scheduler picks instead of the system: a
//! wake-up that gets lost in one order of a million is found here in a second, and found again.
//!
//! What is tried is the very code of the data threads (`mailbox.rs`, and `doze.rs` of hearth-io), built
//! a second time with the scheduler's locks and atomics. The thread's driver and its eventfd are played.

#[path = "../../../io/src/doze.rs"]
mod doze;
#[path = "../../src/mailbox.rs"]
#[allow(dead_code)]
mod mailbox;

use doze::Doze;
use mailbox::{Letters, Mailbox, Wake};
use shuttle::sync::{Arc, Condvar, Mutex};
use shuttle::{check_pct, check_random, thread};

/// Schedules tried of each kind: a second's worth.
const SCHEDULES: usize = 3000;
/// Places at which the second kind of schedules lets a thread overtake.
const DEPTH: usize = 4;
/// Threads that leave something, and how much each.
const SENDERS: u64 = 2;
const EACH: u64 = 2;

/// What makes the kernel let a sleeping thread go: its eventfd, or I/O that ended.
#[derive(Default)]
struct Kernel {
    happened: Mutex<(u64, bool)>,
    changed: Condvar,
}

impl Kernel {
    fn io_ends(&self) {
        self.happened.lock().unwrap().1 = true;
        self.changed.notify_all();
    }

    /// Enters the kernel, and stays there until something happens if the thread means to sleep.
    fn enter(&self, sleep: bool) {
        let mut happened = self.happened.lock().unwrap();
        while sleep && *happened == (0, false) {
            happened = self.changed.wait(happened).unwrap();
        }
        *happened = (0, false);
    }
}

#[derive(Clone)]
struct Handle(Arc<(Doze, Kernel)>);

impl Handle {
    fn new() -> Handle {
        Handle(Arc::new((Doze::new(), Kernel::default())))
    }

    /// A driver's wait; true if the thread was woken.
    fn wait(&self) -> bool {
        let (doze, kernel) = &*self.0;
        let asleep = doze.prepare_sleep();
        kernel.enter(asleep);
        doze.awake()
    }
}

impl Wake for Handle {
    fn wake(&self) {
        let (doze, kernel) = &*self.0;
        if doze.call() {
            kernel.happened.lock().unwrap().0 += 1;
            kernel.changed.notify_all();
        }
    }
}

/// An order: a number, or to stop.
type Order = Option<u64>;
type Box_ = Mailbox<u64, Order, Handle>;

fn tried(world: impl Fn() + Copy + Send + Sync + 'static) {
    check_random(world, SCHEDULES);
    check_pct(world, SCHEDULES, DEPTH);
}

/// The thread looks into its box only when it is woken. If that were ever missed, it would sleep
/// for ever over what was left, which the scheduler reports.
#[test]
fn nothing_is_slept_over() {
    tried(|| {
        let handle = Handle::new();
        let mailbox = Arc::new(Box_::new(handle.clone()));
        let senders: Vec<_> = (0..SENDERS)
            .map(|sender| {
                let mailbox = mailbox.clone();
                thread::spawn(move || {
                    for n in sender * EACH..(sender + 1) * EACH {
                        if n % 2 == 0 {
                            mailbox.complete(&mut vec![n]);
                        } else {
                            mailbox.command(Some(n)).expect("it runs");
                        }
                    }
                })
            })
            .collect();
        let io = handle.clone();
        let io = thread::spawn(move || io.0.1.io_ends());
        let mut seen = Vec::new();
        let mut mail = Letters::default();
        while seen.len() < (SENDERS * EACH) as usize {
            if handle.wait() {
                mailbox.take(&mut mail);
                seen.append(&mut mail.completions);
                seen.extend(mail.commands.drain(..).flatten());
            }
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..SENDERS * EACH).collect::<Vec<_>>());
        for sender in senders.into_iter().chain([io]) {
            sender.join().expect("no sender panics");
        }
    });
}

/// While the thread is told to stop, each order is done, or found by who ends the thread, or given
/// back to who sent it: connections are counted in by one and counted out by exactly one.
#[test]
fn every_order_is_taken_once() {
    tried(|| {
        let handle = Handle::new();
        let mailbox = Arc::new(Box_::new(handle.clone()));
        let refused = Arc::new(Mutex::new(Vec::new()));
        let senders: Vec<_> = (0..SENDERS)
            .map(|sender| {
                let (mailbox, refused) = (mailbox.clone(), refused.clone());
                thread::spawn(move || {
                    for n in sender * EACH..(sender + 1) * EACH {
                        // One of them has a limit, as the control plane has.
                        let max = if sender == 0 { 1 } else { usize::MAX };
                        if let Err(back) = mailbox.try_command(Some(n), max) {
                            refused.lock().unwrap().extend(*back);
                        }
                    }
                })
            })
            .collect();
        let stopper = mailbox.clone();
        let stopper = thread::spawn(move || stopper.command(None).expect("it runs until told"));
        let (mut taken, mut mail, mut stop) = (Vec::new(), Letters::default(), false);
        while !stop {
            if handle.wait() {
                mailbox.take(&mut mail);
                for order in mail.commands.drain(..) {
                    stop |= order.is_none();
                    taken.extend(order);
                }
            }
        }
        taken.extend(mailbox.close().commands.into_iter().flatten());
        for sender in senders.into_iter().chain([stopper]) {
            sender.join().expect("no sender panics");
        }
        taken.append(&mut refused.lock().unwrap());
        taken.sort_unstable();
        assert_eq!(taken, (0..SENDERS * EACH).collect::<Vec<_>>());
        assert!(mailbox.close().commands.is_empty(), "left after the end");
    });
}
