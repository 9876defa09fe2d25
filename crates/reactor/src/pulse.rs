//! Whether every thread still goes round.
//!
//! A data thread that hangs, in the kernel or in a loop of its own, takes its clients with it, while
//! all others and the control plane go on: nothing but the thread itself can tell. So each notes when
//! it last came out of its wait, and who wants to know wakes those that only sleep because nothing
//! happens. One that was woken and has not come round since is stuck.

use crate::reactors::Shared;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// One thread's notes, on a cache line of its own: it is written in every round.
#[derive(Default)]
#[repr(align(64))]
struct Beat {
    /// When it last came out of its wait; monotonic nanoseconds.
    last: AtomicU64,
    /// When it was first asked without having come round since; 0: it has answered.
    asked: AtomicU64,
    /// It runs no more.
    ended: AtomicBool,
}

/// The pulse of all threads.
pub(crate) struct Pulse(Vec<Beat>);

impl Pulse {
    pub(crate) fn new(threads: u32) -> Pulse {
        Pulse((0..=threads).map(|_| Beat::default()).collect())
    }

    /// Thread `index` has come round.
    #[inline]
    pub(crate) fn beat(&self, index: u32, now: u64) {
        if let Some(beat) = self.0.get(index as usize) {
            beat.last.store(now, Ordering::Relaxed);
        }
    }

    /// Thread `index` has ended, in order or not.
    pub(crate) fn end(&self, index: u32) {
        if let Some(beat) = self.0.get(index as usize) {
            beat.ended.store(true, Ordering::Relaxed);
        }
    }

    /// Asks every thread for a sign of life; those that were asked before and gave none.
    pub(crate) fn ask(&self, now: u64, shared: &Shared) -> Vec<Stuck> {
        let mut stuck = Vec::new();
        for (index, beat) in self.0.iter().enumerate() {
            if beat.ended.load(Ordering::Relaxed) {
                continue;
            }
            let asked = beat.asked.load(Ordering::Relaxed);
            if asked == 0 || beat.last.load(Ordering::Relaxed) >= asked {
                // One that is asleep comes round because of this, and notes a later time.
                beat.asked.store(now, Ordering::Relaxed);
            } else {
                stuck.push(Stuck {
                    thread: thread_name(index as u32, shared.threads),
                    for_ns: now.saturating_sub(asked),
                });
            }
            shared.inbox(index as u32).wake();
        }
        stuck
    }
}

/// A thread that does not come round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stuck {
    /// Its name, as the system knows it.
    pub thread: String,
    /// For how long it has given no sign of life, nanoseconds.
    pub for_ns: u64,
}

/// What thread `index` of `threads` data threads (and the one in the background) is called.
pub(crate) fn thread_name(index: u32, threads: u32) -> String {
    if index < threads {
        format!("hearth-data{index}")
    } else {
        "hearth-bg".to_owned()
    }
}
