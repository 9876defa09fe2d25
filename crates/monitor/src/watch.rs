//! The daemon, looked at from outside again and again.
//!
//! Three things may be wrong with a daemon that is not there: nobody listens, somebody listens and does not
//! answer, or it answers with an error. A monitor must tell them apart, because what to do differs, and must
//! never wait long to find out.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hearth_daemon::api::datastores::DatastoreInfo;
use hearth_daemon::api::stats::StatsReport;
use hearth_daemon::api::types::{DiskInfo, PoolInfo};
use hearth_daemon::client::Client;
use hearth_daemon::error::{Error, Result};
use hearth_events::time::now_ms;

use crate::api::{DaemonInfo, Link};
use crate::part::{Context, Part};

/// Between two looks at a daemon that is there. Each asks for everything: statistics of hundreds of disks are a few
/// hundred KiB.
pub const EVERY: Duration = Duration::from_secs(5);
/// How often it is seen whether somebody listens. So a daemon that has gone, or come back, is noticed at once.
const GLANCE: Duration = Duration::from_secs(1);

/// Everything the daemon told at one time.
#[derive(Clone, Debug)]
pub struct Seen {
    /// When, in milliseconds since 1970.
    pub at: u64,
    /// The pool.
    pub pool: PoolInfo,
    /// The disks, by name.
    pub disks: Vec<DiskInfo>,
    /// The datastores, by name.
    pub datastores: Vec<DatastoreInfo>,
    /// Their figures.
    pub stats: StatsReport,
}

impl Seen {
    /// Asks the daemon.
    pub fn ask(client: &Client) -> Result<Seen> {
        Ok(Seen {
            pool: client.get("/v1/pool")?,
            disks: client.get("/v1/disks")?,
            datastores: client.get("/v1/datastores")?,
            stats: client.get("/v1/stats")?,
            at: now_ms(),
        })
    }
}

#[derive(Debug, Default)]
struct View {
    link: Link,
    since: u64,
    error: Option<Error>,
    seen: Option<Arc<Seen>>,
}

/// The daemon as last seen.
#[derive(Clone, Debug, Default)]
pub struct Watched(Arc<Mutex<View>>);

impl Watched {
    fn view<T>(&self, look: impl FnOnce(&mut View) -> T) -> T {
        look(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether it is there, and since when it is so.
    pub fn info(&self) -> DaemonInfo {
        self.view(|view| DaemonInfo {
            link: view.link,
            since: view.since,
            error: view.error.as_ref().map(ToString::to_string),
            seen: view.seen.as_ref().map(|seen| seen.at),
        })
    }

    /// What it told last, however long ago.
    pub fn seen(&self) -> Option<Arc<Seen>> {
        self.view(|view| view.seen.clone())
    }

    /// Looks once.
    pub fn look(&self, client: &Client) {
        let outcome = Seen::ask(client);
        let link = match &outcome {
            Ok(_) => Link::Up,
            // Somebody who listens and says nothing hangs; nobody at all is down.
            Err(_) if client.is_up() => Link::Hanging,
            Err(_) => Link::Down,
        };
        self.view(|view| {
            if view.link != link || view.since == 0 {
                view.link = link;
                view.since = now_ms();
                tracing::info!("the daemon is {}", link.word());
            }
            match outcome {
                Ok(seen) => {
                    view.seen = Some(Arc::new(seen));
                    view.error = None;
                }
                Err(error) => view.error = Some(error),
            }
        });
    }
}

/// The part that looks.
#[derive(Debug)]
pub struct Watching;

impl Part for Watching {
    fn name(&self) -> &'static str {
        "watch"
    }

    fn run(&self, context: &Context) -> Result<()> {
        loop {
            context.daemon.look(&context.client);
            let looked = Instant::now();
            let was_up = context.daemon.info().link == Link::Up;
            loop {
                if context.stop.wait(GLANCE) {
                    return Ok(());
                }
                if looked.elapsed() >= EVERY || context.client.is_up() != was_up {
                    break;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_daemon_that_is_down_and_one_that_hangs_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let client = Client::of_second(dir.path()).patient_for(Duration::from_millis(50));
        let watched = Watched::default();
        assert_eq!(watched.info().link, Link::Unknown);
        watched.look(&client);
        assert_eq!(watched.info().link, Link::Down);
        let _silent = UnixListener::bind(hearth_daemon::rundir::second_socket(dir.path())).unwrap();
        watched.look(&client);
        let info = watched.info();
        assert_eq!(info.link, Link::Hanging);
        assert!(info.error.unwrap().contains("has not answered"));
        assert!(watched.seen().is_none());
    }
}
