//! A call from its arrival to its one answer.
//!
//! Three parties want to end it: the worker that has carried it out, the clock when patience is
//! over, and a repetition of it that comes over another connection and wants the answer
//! there as well. Whoever comes first answers; the others find it answered.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

use super::link::{Answer, Charge, Link};
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
    /// What it counts as where it is not answered in time; other programs have no word for "later".
    pub procedure: Option<Procedure>,
    /// The file or directory it is about.
    pub spot: Key,
    /// Under which its answer is kept, if it is.
    pub slip: Option<Slip>,
    /// Its answer if it is not answered in time, where it has no procedure of NFS.
    pub later: Vec<u8>,
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
    /// Who is told to ask again as soon as that is noted; `None` while nothing is being noted.
    told: Option<Telling>,
    /// What it holds of its client's share; given back with the answer.
    charge: Option<Charge>,
    /// It was begun and not finished in time.
    stuck: bool,
    /// It is begun, and a second time would have another outcome.
    noted: Option<Noted>,
}

/// Connections one answer goes to.
const LINKS_MAX: usize = 4;
/// Repetitions under other numbers that are answered when a call is noted. Further ones are not: who hears nothing sends his call again.
const OTHERS_MAX: usize = 64;

/// Who waits to be told to ask again.
struct Telling {
    links: Vec<Arc<Link>>,
    /// Who asked under another number, and his answer.
    others: Vec<(Arc<Link>, Answer)>,
}

/// What becomes of a repetition.
pub(super) enum Also {
    /// It will be answered, or told to ask again as soon as that is noted.
    Sent,
    /// It has ended just now.
    Ended,
    /// Its client was told to ask again, and it goes on.
    Hangs,
}

/// One more connection to tell.
fn join(links: &mut Vec<Arc<Link>>, link: &Arc<Link>) {
    if !links.iter().any(|l| Arc::ptr_eq(l, link)) {
        if links.len() == LINKS_MAX {
            links.remove(0);
        }
        links.push(Arc::clone(link));
    }
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
        charge: Charge,
        pool: Arc<Pool>,
        replies: Arc<Replies>,
    ) -> Arc<Flight> {
        let state = State {
            stage: Stage::Waiting(job),
            links: vec![link],
            told: None,
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
        self.finish_in_time(answer);
    }

    /// The same; false if its client was answered before.
    pub fn finish_in_time(&self, answer: Answer) -> bool {
        let mut state = self.lock();
        if matches!(state.stage, Stage::Ended) {
            return false;
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
        !links.is_empty()
    }

    /// Patience is over. What was not begun never will be.
    pub fn expire(self: &Arc<Self>) {
        let mut state = self.lock();
        let links = std::mem::take(&mut state.links);
        if links.is_empty() {
            return;
        }
        let charge = state.charge.take();
        let stage = std::mem::replace(&mut state.stage, Stage::Ended);
        if let Stage::Waiting(job) = stage {
            drop(state);
            // It holds the message.
            drop(job);
            if let Some(slip) = &self.about.slip {
                self.replies.forget(slip);
            }
            drop(charge);
            return send(&links, self.later());
        }
        state.stage = stage;
        state.stuck = true;
        // What it holds it holds until it ends.
        state.charge = charge.map(Charge::into_late);
        self.pool.stuck(&self.about);
        let noted = state.noted.clone();
        if let Some(slip) = &self.about.slip {
            self.replies.abandoned(slip, noted.clone(), Instant::now());
        }
        let Some(noted) = noted else {
            drop(state);
            return send(&links, self.later());
        };
        // Who asks meanwhile is told no sooner.
        state.told = Some(Telling {
            links,
            others: Vec::new(),
        });
        drop(state);
        // The disk it is written to may be the one that hangs.
        let flight = Arc::clone(self);
        aside(move || {
            noted.ledger.told(&noted.known);
            let Some(told) = flight.lock().told.take() else {
                return;
            };
            send(&told.links, flight.later());
            for (link, later) in told.others {
                link.send(later);
            }
        });
    }

    /// The call came again, over this connection: the answer is to go there too. Where it came
    /// before may be gone without our having noticed, or be there still.
    pub fn also(&self, link: &Arc<Link>) -> Also {
        let mut state = self.lock();
        let State {
            stage, links, told, ..
        } = &mut *state;
        if matches!(stage, Stage::Ended) {
            return Also::Ended;
        }
        match told {
            Some(told) => join(&mut told.links, link),
            None if links.is_empty() => return Also::Hangs,
            None => join(links, link),
        }
        Also::Sent
    }

    /// The call came under another number, while it goes on: that is answered so, but not before this one is noted.
    pub fn put_off(&self, link: &Arc<Link>, later: Answer) {
        let mut state = self.lock();
        match &mut state.told {
            None => {
                drop(state);
                link.send(later);
            }
            Some(told) if told.others.len() < OTHERS_MAX => {
                told.others.push((Arc::clone(link), link.charge(later)));
            }
            Some(_) => {}
        }
    }

    /// The answer that asks the client to ask again.
    pub fn later(&self) -> Answer {
        match self.about.procedure {
            Some(procedure) => Answer::from(refusal(self.about.xid, procedure, Status::JukeBox)),
            None => Answer::from(self.about.later.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::net::{TcpListener, TcpStream};
    use std::sync::atomic::Ordering;

    use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

    use super::*;
    use crate::identity::Identity;
    use crate::server::link::{Bell, Budget};

    /// Longest wait for an answer's memory.
    const FREED_WITHIN: Timespec = Timespec {
        tv_sec: 60,
        tv_nsec: 0,
    };

    /// A connection, and the client's end of it.
    fn connected(budget: &Arc<Budget>, bell: &Arc<Bell>) -> (Arc<Link>, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let client = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
        let (server, _) = listener.accept().expect("accepted");
        let budgets = [budget, &Arc::default()];
        let link = Link::new(7, &Arc::new(server), bell, budgets);
        (Arc::new(link), client)
    }

    /// A client that connects anew and repeats its call while that is being written down.
    #[test]
    fn repeated_call_is_put_off_once_noted() {
        let dir = tempfile::tempdir().expect("a directory");
        let identity = Identity {
            store: 7,
            secret: [9; 32],
        };
        let ledger = Arc::new(Ledger::open(dir.path(), &identity).expect("opened"));
        let client = "192.0.2.1".parse().expect("an address");
        let known = ledger.known(client, &[0; 40], (b"dir", b"lock"));
        let noted = Noted {
            ledger: Arc::clone(&ledger),
            known,
        };
        let about = About {
            xid: 1,
            procedure: Some(Procedure::Create),
            spot: Key::new(&[1]).expect("a key"),
            slip: None,
            later: Vec::new(),
        };
        let own = Arc::<Budget>::default();
        // Signals when memory of an answer is given back, as to a connection that waits for it.
        let bell = eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd");
        let bell = Arc::new(Bell::new(bell));
        bell.hold_back(true);
        let (first, mut old) = connected(&own, &bell);
        let (second, mut new) = connected(&own, &bell);
        let pool = Pool::start(2).expect("workers");
        let flight = Flight::new(
            about,
            Box::new(|_, _| ()),
            Arc::clone(&first),
            first.call(1),
            Arc::clone(&pool),
            Arc::default(),
        );
        assert!(flight.begin().is_some() && flight.expects(&noted));
        let hung = ledger.hung();
        flight.expire();
        assert!(
            matches!(flight.also(&second), Also::Sent),
            "it is told before that is noted"
        );
        flight.put_off(&second, Answer::from(vec![0, 0, 0, 2]));
        new.set_nonblocking(true).expect("not blocking");
        assert!(new.read(&mut [0; 4]).is_err());
        new.set_nonblocking(false).expect("blocking");
        drop(hung);
        let told = |client: &mut TcpStream| {
            let mut mark = [0; 4];
            client.read_exact(&mut mark).expect("told");
            let len = u32::from_be_bytes(mark) & 0x7fff_ffff;
            let mut answer = vec![0; len as usize];
            client.read_exact(&mut answer).expect("told");
            answer.first_chunk().map(|xid| u32::from_be_bytes(*xid))
        };
        assert_eq!(told(&mut old), Some(1));
        assert_eq!([told(&mut new), told(&mut new)], [Some(1), Some(2)]);
        // From now on everybody is told at once.
        assert!(matches!(flight.also(&second), Also::Hangs));
        let mut bytes = std::fs::read(dir.path().join("calls")).expect("read");
        assert_eq!(bytes.split_off(64)[0], 3, "it is noted");
        // The thread that sends an answer gives its memory back after the client can read it.
        while own.memory() > 0 {
            let mut fds = [PollFd::new(&bell.fd, PollFlags::IN)];
            let freed = poll(&mut fds, Some(&FREED_WITHIN)).expect("polled");
            assert!(freed > 0, "an answer that was sent is charged");
            bell.heard();
        }
        let late = || own.late.load(Ordering::Relaxed);
        assert_eq!(late(), 1, "it goes on");
        flight.finish(flight.later());
        assert_eq!(late(), 0);
        pool.stop();
    }
}
