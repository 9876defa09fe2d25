//! Where events are told: into memory at once, into the file and the journal by a thread of its own.

use std::collections::VecDeque;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::file::{self, OpenError, Store};
use crate::journald::Journal;
use crate::time::now_ms;
use crate::{Event, Record, Severity};

/// Events in memory: whoever follows them asks for the newest again and again.
const IN_MEMORY: usize = 1000;
/// Events on their way to the file. More at once is a flood, of which the file need not have every drop.
const ON_THE_WAY: usize = 4096;

/// Which events somebody wants.
#[derive(Clone, Debug, Default)]
pub struct Query {
    /// Only this disk's.
    pub disk: Option<String>,
    /// Only from this time on, in milliseconds since 1970.
    pub since: u64,
    /// Only those with larger numbers.
    pub after: u64,
    /// At least so severe.
    pub severity: Option<Severity>,
    /// So many, the newest, at most; with `after`, the oldest.
    pub limit: usize,
}

impl Query {
    fn wants(&self, record: &Record) -> bool {
        record.id > self.after
            && record.at >= self.since
            && self.severity.is_none_or(|s| record.severity >= s)
            && (self.disk.is_none() || self.disk == record.disk)
    }
}

#[derive(Debug)]
struct State {
    next: u64,
    recent: VecDeque<Record>,
    left_out: u64,
}

/// The events of a daemon.
#[derive(Debug)]
pub struct Events {
    state: Mutex<State>,
    dir: Option<PathBuf>,
    writer: Mutex<Option<Writer>>,
    /// The journal has it with its fields: a line on standard error would be there twice.
    silent: bool,
}

#[derive(Debug)]
struct Writer {
    way: SyncSender<Record>,
    thread: JoinHandle<()>,
}

impl Default for Events {
    fn default() -> Events {
        Events::in_memory()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Events {
    /// Events that end with the process.
    pub fn in_memory() -> Events {
        Events {
            state: Mutex::new(State {
                next: 1,
                recent: VecDeque::new(),
                left_out: 0,
            }),
            dir: None,
            writer: Mutex::default(),
            silent: false,
        }
    }

    /// Events kept in the files of `dir`, and given to `journal` if there is one.
    pub fn kept(dir: &Path, journal: Option<Journal>) -> Result<Events, OpenError> {
        let store = Store::open(dir)?;
        let (way, events) = sync_channel(ON_THE_WAY);
        let next = store.next();
        let silent = journal.is_some();
        let thread = std::thread::Builder::new()
            .name("hearth-events".to_owned())
            .spawn(move || write(store, journal, &events))?;
        Ok(Events {
            state: Mutex::new(State {
                next,
                recent: VecDeque::new(),
                left_out: 0,
            }),
            dir: Some(dir.to_owned()),
            writer: Mutex::new(Some(Writer { way, thread })),
            silent,
        })
    }

    /// Tells an event. Waits for no device, and cannot fail.
    pub fn tell(&self, event: Event) {
        if !self.silent {
            log(&event);
        }
        self.keep(&event);
    }

    /// The same without a line in the log.
    pub fn keep(&self, event: &Event) {
        let mut state = lock(&self.state);
        let record = state.keep(event);
        // The lock is held, so that they reach the file in order.
        let writer = lock(&self.writer);
        let Some(writer) = &*writer else { return };
        if state.left_out > 0 {
            let count = state.left_out;
            let told = state.keep(&Event::EventsLeftOut { count });
            match writer.way.try_send(told) {
                Ok(()) => state.left_out = 0,
                Err(_) => {
                    state.left_out += 1;
                    return;
                }
            }
        }
        match writer.way.try_send(record) {
            Err(TrySendError::Full(_)) => state.left_out += 1,
            // The thread has ended: it said why.
            Ok(()) | Err(TrySendError::Disconnected(_)) => {}
        }
    }

    /// The events somebody wants, oldest first.
    pub fn query(&self, query: &Query) -> io::Result<Vec<Record>> {
        let (recent, oldest) = {
            let state = lock(&self.state);
            let oldest = state.recent.front().map_or(state.next, |r| r.id);
            let recent = state.recent.iter().filter(|r| query.wants(r));
            (recent.cloned().collect::<Vec<Record>>(), oldest)
        };
        let ahead = query.after > 0;
        let mut found = VecDeque::new();
        let enough = recent.len() >= query.limit && !ahead;
        if let Some(dir) = self.dir.as_deref()
            && !enough
            && query.after + 1 < oldest
        {
            file::scan(dir, query.after + 1, &mut |record| {
                if record.id >= oldest {
                    return false;
                }
                if query.wants(&record) {
                    if found.len() >= query.limit {
                        if ahead {
                            return false;
                        }
                        found.pop_front();
                    }
                    found.push_back(record);
                }
                true
            })?;
        }
        found.extend(recent);
        let over = found.len().saturating_sub(query.limit);
        Ok(if ahead {
            found.truncate(query.limit);
            found.into()
        } else {
            found.into_iter().skip(over).collect()
        })
    }

    /// Writes what was told so far, and keeps later events in memory only.
    pub fn close(&self) {
        let Some(Writer { way, thread }) = lock(&self.writer).take() else {
            return;
        };
        drop(way);
        if thread.join().is_err() {
            tracing::error!("the thread that writes events ended abnormally");
        }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.close();
    }
}

impl State {
    fn keep(&mut self, event: &Event) -> Record {
        let record = Record {
            id: self.next,
            at: now_ms(),
            event: event.name().to_owned(),
            severity: event.severity(),
            disk: event.disk(),
            text: event.text(),
            details: event.details(),
        };
        self.next += 1;
        if self.recent.len() >= IN_MEMORY {
            self.recent.pop_front();
        }
        self.recent.push_back(record.clone());
        record
    }
}

fn log(event: &Event) {
    let (name, text) = (event.name(), event.text());
    let disk = event.disk();
    match (event.severity(), disk) {
        (Severity::Info | Severity::Notice, Some(disk)) => {
            tracing::info!(event = name, %disk, "{text}");
        }
        (Severity::Info | Severity::Notice, None) => tracing::info!(event = name, "{text}"),
        (Severity::Warning, Some(disk)) => tracing::warn!(event = name, %disk, "{text}"),
        (Severity::Warning, None) => tracing::warn!(event = name, "{text}"),
        (Severity::Error, Some(disk)) => tracing::error!(event = name, %disk, "{text}"),
        (Severity::Error, None) => tracing::error!(event = name, "{text}"),
    }
}

/// What the thread does: whatever has come meanwhile is written and flushed at once.
fn write(mut store: Store, journal: Option<Journal>, events: &Receiver<Record>) {
    let mut failing = false;
    while let Ok(first) = events.recv() {
        let mut batch = vec![first];
        batch.extend(events.try_iter().take(ON_THE_WAY));
        for record in &batch {
            if let Some(journal) = &journal
                && journal.send(record).is_err()
            {
                // The journal does not take it; standard error may, or nobody can be told.
                let _ = writeln!(io::stderr(), "{} {}", record.event, record.text);
            }
        }
        let outcome = store.append(&batch);
        // Once, until it works again: the next event tries anew.
        if let Err(e) = &outcome
            && !failing
        {
            tracing::warn!(dir = %store.dir().display(), "events cannot be kept: {e}");
        }
        failing = outcome.is_err();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attached(disk: &str) -> Event {
        Event::DiskAttached {
            disk: disk.to_owned(),
        }
    }

    fn ids(events: &Events, query: &Query) -> Vec<u64> {
        let found = events.query(query).unwrap();
        found.into_iter().map(|r| r.id).collect()
    }

    fn all() -> Query {
        Query {
            limit: usize::MAX,
            ..Query::default()
        }
    }

    #[test]
    fn what_was_told_is_there_at_once_and_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let events = Events::kept(dir.path(), None).unwrap();
        for disk in ["a", "b", "a"] {
            events.tell(attached(disk));
        }
        assert_eq!(ids(&events, &all()), [1, 2, 3]);
        drop(events);
        let events = Events::kept(dir.path(), None).unwrap();
        events.tell(attached("a"));
        let of = |query: Query| ids(&events, &query);
        assert_eq!(of(all()), [1, 2, 3, 4]);
        assert_eq!(of(Query { limit: 2, ..all() }), [3, 4]);
        assert_eq!(
            of(Query {
                disk: Some("a".to_owned()),
                ..all()
            }),
            [1, 3, 4]
        );
        assert_eq!(
            of(Query {
                after: 1,
                limit: 2,
                ..all()
            }),
            [2, 3],
            "whoever follows is given the oldest he has not seen"
        );
        assert_eq!(
            of(Query {
                since: now_ms() + 3_600_000,
                ..all()
            }),
            Vec::<u64>::new()
        );
        assert_eq!(
            of(Query {
                severity: Some(Severity::Warning),
                ..all()
            }),
            Vec::<u64>::new()
        );
    }

    #[test]
    fn memory_holds_the_newest_and_the_file_the_rest() {
        let dir = tempfile::tempdir().unwrap();
        let events = Events::kept(dir.path(), None).unwrap();
        let count = 2 * IN_MEMORY as u64 + 5;
        for _ in 0..count {
            events.tell(attached("a"));
        }
        // Closed, so that all of them are in the file.
        events.close();
        assert_eq!(ids(&events, &all()), (1..=count).collect::<Vec<_>>());
        assert_eq!(lock(&events.state).recent.len(), IN_MEMORY);
        let late = Query {
            after: count - 1,
            ..all()
        };
        assert_eq!(ids(&events, &late), [count]);
    }

    #[test]
    fn a_file_that_takes_nothing_holds_up_nobody() {
        let (way, events) = sync_channel(2);
        let thread = std::thread::spawn(|| {});
        let silent = Events::in_memory();
        *lock(&silent.writer) = Some(Writer { way, thread });
        for _ in 0..10 {
            silent.tell(attached("a"));
        }
        assert_eq!(lock(&silent.state).left_out, 8);
        let written: Vec<Record> = events.try_iter().collect();
        assert_eq!(written.len(), 2);
        silent.tell(attached("b"));
        let written: Vec<Record> = events.try_iter().collect();
        assert_eq!(written[0].event, "events-left-out");
        assert_eq!(written[0].details["count"], 8);
        assert_eq!(written[1].disk.as_deref(), Some("b"));
    }
}
