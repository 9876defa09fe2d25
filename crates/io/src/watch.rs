//! Work on devices that may hang before anybody has set a limit for them: a start that opens and reads its flash.
//!
//! Such work blocks, and nothing can take a thread back from a device that does not answer. So a thread of its own does it, and whoever
//! waits for it gives up when a device has kept it for too long. Reads of a start are many and small, so none is
//! handed to a thread by itself, as [`Device`](crate::Device) does it once it has a limit: what is in flight is only noted, and only
//! while somebody watches.

use crate::helper::lock;
use crate::patience::LOOK_NS;
use crate::sys::now_ns;
use std::collections::BTreeMap;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// How many watch.
static WATCHING: AtomicUsize = AtomicUsize::new(0);
/// When anything that was noted began or ended last.
static MOVED_NS: AtomicU64 = AtomicU64::new(0);
static NOTED: Mutex<Noted> = Mutex::new(Noted {
    next: 0,
    flights: BTreeMap::new(),
});

struct Noted {
    next: u64,
    flights: BTreeMap<u64, Flight>,
}

/// Something a device was asked.
struct Flight {
    name: String,
    begun_ns: u64,
    len: u64,
}

/// An operation in flight; ends with this.
pub(crate) struct InFlight(u64);

/// A device is asked something of so many bytes.
pub(crate) fn begin(len: usize, name: impl FnOnce() -> String) -> Option<InFlight> {
    if WATCHING.load(Ordering::Relaxed) == 0 {
        return None;
    }
    let (name, begun_ns) = (name(), now_ns());
    MOVED_NS.store(begun_ns, Ordering::Relaxed);
    let mut noted = lock(&NOTED);
    noted.next += 1;
    let number = noted.next;
    let flight = Flight {
        name,
        begun_ns,
        len: len as u64,
    };
    noted.flights.insert(number, flight);
    Some(InFlight(number))
}

impl Drop for InFlight {
    fn drop(&mut self) {
        MOVED_NS.store(now_ns(), Ordering::Relaxed);
        lock(&NOTED).flights.remove(&self.0);
    }
}

/// Why it was given up.
#[derive(Debug)]
pub enum GaveUp {
    /// This device has not answered.
    Silent(String),
    /// Nothing was asked of any device, and none has answered: what looks for them by their names hangs.
    Still,
    /// There is no thread for it.
    NoThread(io::Error),
}

/// How work is watched.
#[derive(Clone, Copy, Debug)]
pub struct Watch {
    /// How long a device may take for an operation; zero: it is waited for.
    pub limit: Duration,
    /// The work does nothing but ask devices, so that it hangs if none is asked anything for as long.
    pub only_asks: bool,
}

impl Watch {
    /// Has a thread do it. If that is given up, the thread goes on, and whatever it has taken is kept by it: the process should end.
    pub fn run<T: Send + 'static>(
        self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, GaveUp> {
        if self.limit.is_zero() {
            return Ok(work());
        }
        WATCHING.fetch_add(1, Ordering::Relaxed);
        let outcome = self.watched(work);
        WATCHING.fetch_sub(1, Ordering::Relaxed);
        outcome
    }

    fn watched<T: Send + 'static>(
        self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, GaveUp> {
        let limit_ns = u64::try_from(self.limit.as_nanos()).unwrap_or(u64::MAX);
        let (told, done) = channel();
        let begun_ns = now_ns();
        let thread = std::thread::Builder::new().name("hearth-open".into());
        let thread = thread
            .spawn(move || {
                // Nobody listens any more if it was given up.
                let _ = told.send(work());
            })
            .map_err(GaveUp::NoThread)?;
        loop {
            match done.recv_timeout(Duration::from_nanos(LOOK_NS)) {
                Ok(result) => return Ok(result),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => match thread.join() {
                    Err(panic) => std::panic::resume_unwind(panic),
                    Ok(()) => unreachable!("it sends before it ends"),
                },
            }
            let now = now_ns();
            let noted = lock(&NOTED);
            let mut flights = noted.flights.values();
            if let Some(late) = flights.find(|f| f.is_late(limit_ns, now)) {
                return Err(GaveUp::Silent(late.name.clone()));
            }
            let moved_ns = MOVED_NS.load(Ordering::Relaxed).max(begun_ns);
            let still = noted.flights.is_empty() && now.saturating_sub(moved_ns) > limit_ns;
            if self.only_asks && still {
                return Err(GaveUp::Still);
            }
        }
    }
}

impl Flight {
    fn is_late(&self, limit_ns: u64, now_ns: u64) -> bool {
        crate::patience::is_late(limit_ns, now_ns.saturating_sub(self.begun_ns), self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    const LIMIT: Duration = Duration::from_millis(1);

    /// One after the other: what is noted is noted for all.
    static ALONE: Mutex<()> = Mutex::new(());

    #[test]
    fn a_device_that_does_not_answer_is_named_and_not_waited_for() {
        let _alone = lock(&ALONE);
        let watch = Watch {
            limit: LIMIT,
            only_asks: false,
        };
        let (end, ends) = channel::<()>();
        let (ended, has_ended) = channel::<()>();
        let gave_up = watch.run(move || {
            let flight = begin(4096, || "a device".to_owned());
            let _ = ends.recv();
            drop(flight);
            let _ = ended.send(());
        });
        assert!(matches!(gave_up, Err(GaveUp::Silent(name)) if name == "a device"));
        drop(end);
        has_ended.recv().expect("it goes on");
        assert!(lock(&NOTED).flights.is_empty());
        assert!(begin(0, || panic!("nobody watches")).is_none());
    }

    #[test]
    fn what_hangs_without_a_device_is_given_up_only_where_nothing_else_takes_time() {
        let _alone = lock(&ALONE);
        let (end, ends) = channel::<()>();
        let only_asks = Watch {
            limit: LIMIT,
            only_asks: true,
        };
        let gave_up = only_asks.run(move || ends.recv());
        assert!(matches!(gave_up, Err(GaveUp::Still)));
        drop(end);
        let works = Watch {
            only_asks: false,
            ..only_asks
        };
        // Longer than it looks once.
        let worked = works.run(|| std::thread::sleep(2 * Duration::from_nanos(LOOK_NS)));
        assert!(worked.is_ok());
    }
}
