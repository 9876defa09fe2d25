//! Threads that ask what may not answer. A guest that hangs, or whose QMP socket another program
//! holds, keeps its own thread waiting, and nothing else.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use crate::qmp::Qmp;

/// Longest all answers to one question may take together, a connection included.
pub const PATIENCE: Duration = Duration::from_secs(2);
/// Questions that may wait for the one before.
const QUESTIONS: usize = 4;

/// What is to be done with a connection, which is made anew where it is missing.
type Job = Box<dyn FnOnce(&mut Option<Qmp>) + Send>;

/// The answer to a question, once it is there.
#[derive(Debug)]
pub struct Answer<T> {
    told: Receiver<io::Result<T>>,
    asked: Instant,
}

impl<T> Answer<T> {
    /// Waits for it until `end`; `None` if it has not come by then.
    pub fn by(&self, end: Instant) -> Option<io::Result<T>> {
        let left = end.saturating_duration_since(Instant::now());
        match self.told.recv_timeout(left) {
            Ok(told) => Some(told),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                Some(Err(io::Error::other("the thread that asks has ended")))
            }
        }
    }

    /// The same, where the answer is needed: it is an error that it has not come.
    pub fn needed_by(&self, end: Instant) -> io::Result<T> {
        self.by(end).unwrap_or_else(|| Err(self.late()))
    }

    /// That it has not come.
    pub fn late(&self) -> io::Error {
        let seconds = self.asked.elapsed().as_secs_f64();
        io::Error::new(
            io::ErrorKind::TimedOut,
            format!("there has been no answer for {seconds:.1} s"),
        )
    }
}

/// Does something that may take its time in a thread of its own.
pub fn once<T: Send + 'static>(
    what: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<Answer<T>> {
    let (tell, told) = sync_channel(1);
    // Without a receiver the answer came too late.
    std::thread::Builder::new().spawn(move || drop(tell.send(what())))?;
    Ok(Answer {
        told,
        asked: Instant::now(),
    })
}

/// The connection to one guest's QEMU, and the thread that uses it.
#[derive(Debug)]
pub struct Line {
    /// The QMP socket.
    pub path: PathBuf,
    jobs: SyncSender<Job>,
}

impl Line {
    /// To the socket at `path`. Nothing is asked yet.
    pub fn new(path: &Path) -> io::Result<Line> {
        let (jobs, todo) = sync_channel::<Job>(QUESTIONS);
        std::thread::Builder::new().spawn(move || {
            let mut qmp = None;
            for job in todo {
                job(&mut qmp);
            }
        })?;
        Ok(Line {
            path: path.to_owned(),
            jobs,
        })
    }

    /// Asks something, within [`PATIENCE`] from when its turn comes.
    pub fn ask<T: Send + 'static>(
        &self,
        what: impl FnOnce(&mut Qmp) -> io::Result<T> + Send + 'static,
    ) -> io::Result<Answer<T>> {
        let (tell, told) = sync_channel(1);
        let path = self.path.clone();
        let job = move |kept: &mut Option<Qmp>| {
            let end = Instant::now() + PATIENCE;
            let qmp = match kept.take() {
                Some(mut qmp) => {
                    qmp.until(end);
                    Ok(qmp)
                }
                None => Qmp::open(&path, end),
            };
            let answer = qmp.and_then(|mut qmp| {
                let answer = what(&mut qmp);
                // A half-read answer would be taken for that to the next question; a refusal is a
                // whole one.
                let whole = !matches!(&answer, Err(e) if e.kind() != io::ErrorKind::Other);
                *kept = whole.then_some(qmp);
                answer
            });
            // Without a receiver the answer came too late.
            drop(tell.send(answer));
        };
        self.jobs.try_send(Box::new(job)).map_err(|_| {
            io::Error::new(
                io::ErrorKind::WouldBlock,
                "the questions before are not answered yet",
            )
        })?;
        Ok(Answer {
            told,
            asked: Instant::now(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qmp::fake;
    use serde_json::json;
    use std::os::unix::net::UnixListener;

    #[test]
    fn silent_guest_holds_up_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        // Connections wait in its queue, as where another program holds the socket.
        let _held = UnixListener::bind(at("held")).unwrap();
        let listener = UnixListener::bind(at("good")).unwrap();
        let qemu = std::thread::spawn(move || fake::serve(&listener, |_| json!({"return": {}})));
        let (held, good) = (
            Line::new(&at("held")).unwrap(),
            Line::new(&at("good")).unwrap(),
        );
        let silent: Vec<_> = (0..QUESTIONS)
            .map(|_| held.ask(Qmp::look).unwrap())
            .collect();
        let end = Instant::now() + 10 * PATIENCE;
        good.ask(Qmp::look).unwrap().needed_by(end).unwrap();
        let error = silent[0].needed_by(end).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(
            silent[1].needed_by(Instant::now()).unwrap_err().kind(),
            io::ErrorKind::TimedOut
        );
        drop(good);
        qemu.join().unwrap();
    }
}
