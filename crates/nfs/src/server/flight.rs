//! A call from its arrival to its one answer.
//!
//! Three parties want to end it: the worker that has carried it out, the clock when patience is
//! over, and a repetition of it that comes over another connection and wants the answer
//! there as well. Whoever comes first answers; the others find it answered.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

use super::link::{Answer, Link};
use super::pool::Pool;
use super::replies::{Replies, Slip};
use crate::handle::Key;
use crate::ledger::{Known, Ledger};
use crate::tree::AtHand;
use crate::v3::{Procedure, Status, refusal};

/// What is done for a call, with the file it is about if that is at hand; it ends by [`Flight::finish`].
pub(super) type Job = Box<dyn FnOnce(&Arc<Flight>, Option<Box<dyn AtHand>>) + Send>;

/// What a call is.
pub(super) struct About {
    pub xid: u32,
    /// What it counts as where it is not answered in time; MOUNT has no word for "later".
    pub procedure: Option<Procedure>,
    /// The file or directory it is about.
    pub spot: Key,
    /// Under which its answer is kept, if it is.
    pub slip: Option<Slip>,
}

impl About {
    pub fn changes(&self) -> bool {
        self.procedure.is_some_and(Procedure::changes)
    }

    pub fn reads(&self) -> bool {
        self.procedure == Some(Procedure::Read)
    }
}

/// What is written down before its client is told to ask again.
#[derive(Clone)]
pub(super) struct Noted {
    pub ledger: Arc<Ledger>,
    pub known: Known,
}

/// Does something that may wait for a disk, where nobody else has to: it is seldom.
pub(super) fn aside(work: impl FnOnce() + Send + 'static) {
    fn once(work: &Mutex<Option<impl FnOnce()>>) {
        let work = work.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(work) = work {
            work();
        }
    }
    // To be had back if no thread can be started.
    let work = Arc::new(Mutex::new(Some(work)));
    let own = Arc::clone(&work);
    let spawned = thread::Builder::new()
        .name("nfs-noting".to_owned())
        .spawn(move || once(&own));
    if spawned.is_err() {
        once(&work);
    }
}

enum Stage {
    Waiting(Job),
    Running,
    Ended,
}

struct State {
    stage: Stage,
    /// Where the answer goes; nowhere once there was one.
    links: Vec<Arc<Link>>,
    /// What it holds of its client's share; given back with the answer.
    charge: Option<super::link::Charge>,
    /// It was begun and not finished in time.
    stuck: bool,
    /// It is begun, and a second time would have another outcome.
    noted: Option<Noted>,
}

/// Connections one answer goes to.
const LINKS_MAX: usize = 4;

/// What becomes of a repetition.
pub(super) enum Also {
    /// It will be answered.
    Sent,
    /// It has ended just now.
    Ended,
    /// Its client was told to ask again, and it goes on.
    Hangs,
}

/// Sends an answer to all who wait for it. Only short ones are waited for by several.
fn send(links: &[Arc<Link>], answer: Answer) {
    let Some((last, others)) = links.split_last() else {
        return;
    };
    for link in others {
        if let Some(bytes) = answer.short(usize::MAX) {
            link.send(Answer::from(bytes));
        }
    }
    last.send(answer);
}

/// See the module.
pub(super) struct Flight {
    pub about: About,
    state: Mutex<State>,
    pool: Arc<Pool>,
    replies: Arc<Replies>,
}

impl Flight {
    pub fn new(
        about: About,
        job: Job,
        link: Arc<Link>,
        charge: super::link::Charge,
        pool: Arc<Pool>,
        replies: Arc<Replies>,
    ) -> Arc<Flight> {
        let state = State {
            stage: Stage::Waiting(job),
            links: vec![link],
            charge: Some(charge),
            stuck: false,
            noted: None,
        };
        Arc::new(Flight {
            about,
            state: Mutex::new(state),
            pool,
            replies,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who sent it, if it changes something.
    pub fn client(&self) -> Option<IpAddr> {
        self.about.slip.as_ref().map(Slip::client)
    }

    /// A worker begins it; `None` if it was answered while it waited.
    pub fn begin(&self) -> Option<Job> {
        let mut state = self.lock();
        match std::mem::replace(&mut state.stage, Stage::Running) {
            Stage::Waiting(job) => Some(job),
            other => {
                state.stage = other;
                None
            }
        }
    }

    /// A change is about to be made that has another outcome the second time. False if its client was told already to ask again.
    pub fn expects(&self, noted: &Noted) -> bool {
        let mut state = self.lock();
        state.noted = Some(noted.clone());
        let waited_for = !state.links.is_empty();
        drop(state);
        if let Some(slip) = self.about.slip.as_ref().filter(|_| !waited_for) {
            self.replies
                .abandoned(slip, Some(noted.clone()), Instant::now());
        }
        waited_for
    }

    /// It was carried out, or could not be.
    pub fn finish(&self, answer: Answer) {
        let mut state = self.lock();
        if matches!(state.stage, Stage::Ended) {
            return;
        }
        state.stage = Stage::Ended;
        let links = std::mem::take(&mut state.links);
        let (charge, stuck) = (state.charge.take(), state.stuck);
        // Kept before anybody can see that it has ended: a repetition finds it either here or there.
        if let Some(slip) = &self.about.slip {
            self.replies.ended(slip, &answer, links.is_empty());
        }
        drop(state);
        if stuck {
            self.pool.unstuck(&self.about);
        }
        drop(charge);
        send(&links, answer);
    }

    /// Patience is over. What was not begun never will be.
    pub fn expire(&self) {
        let mut state = self.lock();
        let links = std::mem::take(&mut state.links);
        if links.is_empty() {
            return;
        }
        let charge = state.charge.take();
        let noted = state.noted.clone();
        let begun = match std::mem::replace(&mut state.stage, Stage::Ended) {
            Stage::Waiting(job) => {
                drop(state);
                // It holds the message.
                drop(job);
                false
            }
            stage => {
                state.stage = stage;
                state.stuck = true;
                self.pool.stuck(&self.about);
                true
            }
        };
        if let Some(slip) = &self.about.slip {
            if begun {
                self.replies.abandoned(slip, noted.clone(), Instant::now());
            } else {
                self.replies.forget(slip);
            }
        }
        drop(charge);
        let later = self.later();
        match noted.filter(|_| begun) {
            None => send(&links, later),
            // The disk it is written to may be the one that hangs.
            Some(noted) => aside(move || {
                noted.ledger.told(&noted.known);
                send(&links, later);
            }),
        }
    }

    /// The call came again, over this connection: the answer is to go there too. Where it came
    /// before may be gone without our having noticed, or be there still.
    pub fn also(&self, link: &Arc<Link>) -> Also {
        let mut state = self.lock();
        if state.links.is_empty() {
            return if matches!(state.stage, Stage::Ended) {
                Also::Ended
            } else {
                Also::Hangs
            };
        }
        if !state.links.iter().any(|l| Arc::ptr_eq(l, link)) {
            if state.links.len() == LINKS_MAX {
                state.links.remove(0);
            }
            state.links.push(Arc::clone(link));
        }
        Also::Sent
    }

    /// The answer that asks the client to ask again.
    pub fn later(&self) -> Answer {
        match self.about.procedure {
            Some(procedure) => Answer::from(refusal(self.about.xid, procedure, Status::JukeBox)),
            None => Answer::from(crate::mount::mounted(self.about.xid, Err(Status::Io))),
        }
    }
}
