//! What the second service does, in parts that cost each other nothing.
//!
//! A part is a thread. It may block for as long as it likes; if it panics or fails, it is started again
//! after a pause that grows, and the service says so in its log and to whoever asks. What it has to
//! remember over that is in the [state directory](crate::state).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use hearth_daemon::client::Client;
use hearth_daemon::error::{Error, Result};

use crate::api::PartInfo;
use crate::state::StateDir;
use crate::stop::Stop;
use crate::watch::Watched;

/// Pause before a part that ended is started again, at first; it doubles.
const PAUSE: Duration = Duration::from_secs(1);
/// Longest such pause.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// A part that ran for so long has overcome what ended it before.
const SETTLED: Duration = Duration::from_secs(300);

/// Something the second service does.
pub trait Part: Send + Sync + 'static {
    /// What it is called.
    fn name(&self) -> &'static str;

    /// Does it, until the service [stops](Context::stop). Called again if it returns earlier, fails or panics.
    fn run(&self, context: &Context) -> Result<()>;

    /// Reads what it answers questions from, before the first one is answered: what it remembers is not to look
    /// lost to whoever asks right after a start. What cannot be read is [`run`](Part::run)'s to say.
    fn prepare(&self, _context: &Context) {}

    /// Questions it answers on the service's socket. Handlers must not block: they look into memory, or
    /// hand over to `tokio::task::spawn_blocking`.
    fn routes(&self) -> Router {
        Router::new()
    }
}

/// What parts have in common.
#[derive(Clone, Debug)]
pub struct Context {
    /// A client of the daemon.
    pub client: Client,
    /// The daemon's run directory.
    pub run_dir: PathBuf,
    /// The service's own state directory.
    pub state: StateDir,
    /// The daemon as last seen.
    pub daemon: Watched,
    /// When to end.
    pub stop: Stop,
}

/// How a part fares.
#[derive(Debug, Default)]
struct Fare {
    restarts: u64,
    last: Option<Error>,
    running: bool,
}

/// A part that is looked after.
#[derive(Clone)]
pub(crate) struct Kept {
    part: Arc<dyn Part>,
    fare: Arc<Mutex<Fare>>,
}

impl Kept {
    pub(crate) fn new(part: Arc<dyn Part>) -> Kept {
        Kept {
            part,
            fare: Arc::default(),
        }
    }

    fn fare<T>(&self, change: impl FnOnce(&mut Fare) -> T) -> T {
        change(&mut self.fare.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// How it fares, for whoever asks.
    pub(crate) fn info(&self) -> PartInfo {
        self.fare(|fare| PartInfo {
            name: self.part.name().to_owned(),
            running: fare.running,
            restarts: fare.restarts,
            error: fare.last.as_ref().map(ToString::to_string),
        })
    }

    /// What it is called.
    pub(crate) fn name(&self) -> &'static str {
        self.part.name()
    }

    /// Questions it answers, from now on.
    pub(crate) fn routes(&self, context: &Context) -> Router {
        self.part.prepare(context);
        self.part.routes()
    }

    /// Runs it until the service stops.
    pub(crate) fn keep(&self, context: &Context) {
        self.keep_with(context, PAUSE);
    }

    fn keep_with(&self, context: &Context, first: Duration) {
        let name = self.part.name();
        let mut pause = first;
        while !context.stop.is_told() {
            let start = Instant::now();
            self.fare(|fare| fare.running = true);
            // What it leaves half done is in its own memory and files, which it looks at anew.
            let outcome = catch_unwind(AssertUnwindSafe(|| self.part.run(context)));
            self.fare(|fare| fare.running = false);
            if context.stop.is_told() {
                return;
            }
            let error = match outcome {
                Ok(Ok(())) => Error::internal(format!("the part {name} ended by itself")),
                Ok(Err(error)) => error,
                Err(_) => Error::internal(format!("the part {name} panicked")),
            };
            if start.elapsed() > SETTLED {
                pause = first;
            }
            tracing::error!(part = name, "{error}; it is started again");
            self.fare(|fare| {
                fare.restarts += 1;
                fare.last = Some(error);
            });
            if context.stop.wait(pause) {
                return;
            }
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// A context of a daemon that is not there.
    pub(crate) fn context(dir: &std::path::Path) -> Context {
        Context {
            client: Client::new(dir),
            run_dir: dir.to_owned(),
            state: StateDir::claim(&dir.join("state")).unwrap(),
            daemon: Watched::default(),
            stop: Stop::default(),
        }
    }

    struct Shaky(AtomicUsize);

    impl Part for Shaky {
        fn name(&self) -> &'static str {
            "shaky"
        }

        fn run(&self, context: &Context) -> Result<()> {
            match self.0.fetch_add(1, Ordering::SeqCst) {
                0 => panic!("once"),
                1 => Err(Error::unavailable("twice", "wait")),
                2 => Ok(()),
                _ => {
                    context.stop.tell();
                    Ok(())
                }
            }
        }
    }

    #[test]
    fn a_part_that_panics_fails_or_ends_is_started_again() {
        let dir = tempfile::tempdir().unwrap();
        let shaky = Arc::new(Shaky(AtomicUsize::new(0)));
        let kept = Kept::new(shaky.clone());
        kept.keep_with(&context(dir.path()), Duration::ZERO);
        assert_eq!(shaky.0.load(Ordering::SeqCst), 4);
        let info = kept.info();
        assert_eq!((info.restarts, info.running), (3, false));
        assert!(info.error.unwrap().contains("ended by itself"));
    }
}
