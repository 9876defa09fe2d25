//! Watches the threads, and tells the service manager, the log and the control API.
//!
//! The daemon is alive as long as every data thread is: one that hangs takes its clients with it and
//! perhaps a lock that all disks need. So the service manager's watchdog is fed only while every
//! thread has come round within the period, and so has the daemon's own housekeeping. Without a
//! watchdog nothing is ended by itself: what hangs in the kernel may come back (a mount whose server
//! was away), a new process would hang at the same place, and the other threads' disks go on. But the
//! log says which thread is stuck, at once and then at growing intervals, and so do `hearth stats`
//! and `hearth pool show`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use hearth_events::{Event, Events};

use crate::api::stats::StuckThread;
use crate::daemon::Daemon;
use crate::notify::Notify;

/// How often the threads are asked, at the longest: each idle thread wakes up for it.
const ASK: Duration = Duration::from_secs(2);
/// How long a thread may be silent before the log says so.
const STUCK: Duration = Duration::from_secs(5);
/// Longest pause between two lines about the same thread; it doubles up to that.
const SAY_MAX: Duration = Duration::from_secs(600);
/// What the daemon's own rounds are called.
const HOUSEKEEPING: &str = "housekeeping";

/// The watch over a daemon's threads; ends when dropped.
pub(crate) struct Monitor {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Monitor {
    pub(crate) fn start(daemon: &Arc<Daemon>) -> Monitor {
        let notify = Notify::from_env();
        let (stop, stopped) = channel::<()>();
        let daemon = daemon.clone();
        let watch = move || {
            let period = notify.watchdog_period();
            // Twice within the period, so that one answer that comes late does not matter.
            let ask = period.map_or(ASK, |p| (p / 2).min(ASK));
            let mut state = State::default();
            while stopped.recv_timeout(ask) == Err(RecvTimeoutError::Timeout) {
                let silent = state.silent(&daemon);
                if let Some(period) = period
                    && silent.values().all(|s| *s < period)
                {
                    notify.alive();
                }
                daemon.note_stuck(state.tell(&silent, daemon.events()));
            }
        };
        let thread = std::thread::Builder::new()
            .name("hearth-watchdog".to_owned())
            .spawn(watch);
        if let Err(e) = &thread {
            tracing::error!("cannot start the watchdog thread: {e}");
        }
        Monitor {
            stop: Some(stop),
            thread: thread.ok(),
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It only looks and tells; whatever ended it, the daemon goes on.
            let _ = thread.join();
        }
    }
}

/// What was said of a stuck thread.
struct Said {
    since: SystemTime,
    next: Instant,
    pause: Duration,
}

#[derive(Default)]
struct State {
    beats: Option<(u64, Instant)>,
    said: BTreeMap<String, Said>,
}

impl State {
    /// For how long which thread has been silent.
    fn silent(&mut self, daemon: &Daemon) -> BTreeMap<String, Duration> {
        let stuck = daemon.reactors().stuck().into_iter();
        let mut silent: BTreeMap<String, Duration> = stuck
            .map(|s| (s.thread, Duration::from_nanos(s.for_ns)))
            .collect();
        let beats = daemon.beats();
        match self.beats {
            Some((seen, at)) if seen == beats => {
                silent.insert(HOUSEKEEPING.to_owned(), at.elapsed());
            }
            _ => self.beats = Some((beats, Instant::now())),
        }
        silent
    }

    /// Says in the log what has changed; those that count as stuck.
    fn tell(&mut self, silent: &BTreeMap<String, Duration>, events: &Events) -> Vec<StuckThread> {
        let now = Instant::now();
        self.said.retain(|thread, said| {
            let still = silent.contains_key(thread);
            if !still {
                let seconds = said.since.elapsed().map_or(0, |d| d.as_secs());
                events.tell(Event::ThreadGoesOn {
                    thread: thread.clone(),
                    seconds,
                });
            }
            still
        });
        let mut stuck = Vec::new();
        for (thread, quiet) in silent.iter().filter(|(_, quiet)| **quiet >= STUCK) {
            let said = self.said.entry(thread.clone()).or_insert_with(|| Said {
                since: SystemTime::now() - *quiet,
                next: now,
                pause: STUCK,
            });
            let since = said
                .since
                .duration_since(UNIX_EPOCH)
                .map_or(0, |d| d.as_secs());
            if now >= said.next {
                events.tell(Event::ThreadStuck {
                    thread: thread.clone(),
                    seconds: quiet.as_secs(),
                });
                said.next = now + said.pause;
                said.pause = (said.pause * 2).min(SAY_MAX);
            }
            stuck.push(StuckThread {
                thread: thread.clone(),
                since,
                seconds: quiet.as_secs(),
            });
        }
        stuck
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_stuck_is_said_once_at_first_and_until_it_goes_on() {
        let mut state = State::default();
        let events = Events::in_memory();
        let quiet = |s: u64| BTreeMap::from([("hearth-data0".to_owned(), Duration::from_secs(s))]);
        assert!(state.tell(&quiet(2), &events).is_empty());
        assert!(state.said.is_empty());
        let stuck = state.tell(&quiet(7), &events);
        assert_eq!(
            (stuck[0].thread.as_str(), stuck[0].seconds),
            ("hearth-data0", 7)
        );
        let first = stuck[0].since;
        let next = state.said["hearth-data0"].next;
        let stuck = state.tell(&quiet(9), &events);
        assert_eq!(stuck[0].since, first);
        assert_eq!(state.said["hearth-data0"].next, next, "said twice at once");
        assert!(state.tell(&BTreeMap::new(), &events).is_empty());
        assert!(state.said.is_empty());
    }
}
