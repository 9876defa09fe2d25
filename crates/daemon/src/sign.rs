//! Signs of life: so that whoever gets no answer from a daemon can say since when it stands still.
//!
//! The file with the daemon's pid is touched again and again, as long as housekeeping goes round.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use crate::daemon::Daemon;

/// How often a sign is given.
pub const BEAT: Duration = Duration::from_secs(5);

/// What is known of a daemon from its run directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sign {
    /// Its process.
    pub pid: u32,
    /// Time since it last gave a sign.
    pub age: Duration,
}

/// The last sign of life in a run directory, as far as it can be read.
pub fn last_sign(dir: &Path) -> Option<Sign> {
    let file = File::open(dir.join("hearth.pid")).ok()?;
    let at = file.metadata().ok()?.modified().ok()?;
    let mut text = String::new();
    file.take(16).read_to_string(&mut text).ok()?;
    Some(Sign {
        pid: text.trim().parse().ok()?,
        age: SystemTime::now().duration_since(at).unwrap_or_default(),
    })
}

/// Gives signs until dropped.
pub(crate) struct Signs {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Signs {
    /// Touches `pid` as long as the daemon's housekeeping goes round.
    pub fn start(pid: File, daemon: &Arc<Daemon>) -> Option<Signs> {
        let (stop, stopped) = channel();
        let daemon = daemon.clone();
        let work = move || {
            let mut seen = None;
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(BEAT) {
                let beats = daemon.beats();
                if seen.replace(beats) != Some(beats) {
                    // Only a help: without it, nobody can say since when.
                    let _ = pid.set_modified(SystemTime::now());
                }
            }
        };
        let thread = std::thread::Builder::new().name("hearth-sign".to_owned());
        match thread.spawn(work) {
            Ok(thread) => Some(Signs {
                stop: Some(stop),
                thread: Some(thread),
            }),
            Err(e) => {
                tracing::error!("cannot start a thread: {e}; there will be no signs of life");
                None
            }
        }
    }
}

impl Drop for Signs {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It only touches a file; whatever ended it, the daemon goes on.
            let _ = thread.join();
        }
    }
}
