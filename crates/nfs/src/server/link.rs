//! Answers on their way to a client.
//!
//! Whoever has carried a call out leaves its answer with the connection's [`Link`]. If many calls are under way, the
//! thread that moves bytes sends what has gathered, many answers in one system call. If hardly any is, that would cost more than it
//! saves: to wake another thread takes longer than to send a short answer. Then who has it sends it himself.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::record::mark;
use crate::tree::Data;
use crate::xdr::{Writer, padding};

/// Answers that are sent with one system call.
const GATHER: usize = 16;
/// Memory of one client's calls that go on although it was told to ask again. It is told so at once of further reads and writes.
const CLIENT_LATE_MAX: usize = 32 << 20;
/// The same of all clients.
const ALL_LATE_MAX: usize = 64 << 20;
/// Who has an answer sends it himself if the client has fewer further calls than that under way,
const ALONE_CALLS: usize = 4;
/// and if the answer is no longer than that: sending copies it.
const ALONE_BYTES: usize = 64 << 10;

/// An answer on its way: what was written for it, and the data behind that.
pub(super) struct Answer {
    mark: [u8; 4],
    head: Vec<u8>,
    data: Option<Data>,
    /// Until it is sent or dropped.
    charge: Option<Charge>,
}

impl From<Writer> for Answer {
    fn from(w: Writer) -> Answer {
        Answer::from(w.into_vec())
    }
}

impl From<Vec<u8>> for Answer {
    fn from(head: Vec<u8>) -> Answer {
        Answer {
            mark: mark(head.len()),
            head,
            data: None,
            charge: None,
        }
    }
}

impl Answer {
    pub fn with_data(w: Writer, data: Data) -> Answer {
        let len = (*data).as_ref().len();
        Answer {
            mark: mark(w.len() + len + padding(len)),
            head: w.into_vec(),
            data: Some(data),
            charge: None,
        }
    }

    /// Its bytes, if they are few.
    pub fn short(&self, max: usize) -> Option<Vec<u8>> {
        (self.data.is_none() && self.head.len() <= max).then(|| self.head.clone())
    }

    fn pieces(&self) -> [&[u8]; 4] {
        let data = self.data.as_ref().map_or(&[][..], |data| (**data).as_ref());
        [&self.mark, &self.head, data, &[0; 3][..padding(data.len())]]
    }

    fn len(&self) -> usize {
        self.pieces().iter().map(|p| p.len()).sum()
    }

    /// Memory it takes while it waits.
    fn allocated(&self) -> usize {
        let data = self.data.as_ref().map_or(0, |data| data.allocated());
        size_of::<Answer>() + self.head.capacity() + data
    }
}

/// Rings for the thread that moves bytes.
pub(super) struct Bell {
    pub fd: OwnedFd,
    rung: AtomicBool,
    /// Connections that have something to send.
    tokens: Mutex<Vec<u64>>,
    /// A connection waits for room, which an answer may have made.
    held_back: AtomicBool,
}

impl Bell {
    pub fn new(fd: OwnedFd) -> Bell {
        Bell {
            fd,
            rung: AtomicBool::new(false),
            tokens: Mutex::default(),
            held_back: AtomicBool::new(false),
        }
    }

    fn tokens(&self) -> MutexGuard<'_, Vec<u64>> {
        self.tokens.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn ring(&self) {
        if !self.rung.swap(true, Ordering::AcqRel) {
            // Cannot fail but by being full, and then it has rung.
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }

    /// It was heard: the connections that have something to send.
    pub fn heard(&self) -> Vec<u64> {
        let mut count = [0u8; 8];
        let _ = rustix::io::read(&self.fd, &mut count);
        // In this order: who comes after it rings again.
        self.rung.store(false, Ordering::Release);
        std::mem::take(&mut *self.tokens())
    }

    /// Connections wait for room, or none does. To be followed by a look whether there is room now.
    pub fn hold_back(&self, any: bool) {
        self.held_back.store(any, Ordering::SeqCst);
    }
}

/// What a client, or all of them, hold.
#[derive(Default)]
pub(super) struct Budget {
    /// Memory of calls under way and of answers that wait to be sent.
    pub bytes: AtomicUsize,
    /// Memory of messages that arrive, or wait to be taken.
    pub arriving: AtomicUsize,
    /// Memory of calls that go on although their client was told to ask again.
    pub late: AtomicUsize,
    pub calls: AtomicUsize,
}

impl Budget {
    /// All memory but that of late calls, of whose end the thread that moves bytes is not told.
    pub fn memory(&self) -> usize {
        self.bytes.load(Ordering::Relaxed) + self.arriving.load(Ordering::Relaxed)
    }
}

/// The part of the budgets of a connection, of its client and of all that a call has until it is answered, or an answer until
/// it is sent.
pub(super) struct Charge {
    bytes: usize,
    calls: usize,
    late: usize,
    budgets: [Arc<Budget>; 3],
}

impl Charge {
    fn new(bytes: usize, calls: usize, budgets: &[Arc<Budget>; 3]) -> Charge {
        for budget in budgets {
            budget.bytes.fetch_add(bytes, Ordering::SeqCst);
            budget.calls.fetch_add(calls, Ordering::SeqCst);
        }
        Charge {
            bytes,
            calls,
            late: 0,
            budgets: budgets.clone(),
        }
    }

    /// The call's client was told to ask again, and the call goes on: its client may bring others.
    pub fn into_late(self) -> Charge {
        for budget in &self.budgets {
            budget.late.fetch_add(self.bytes, Ordering::SeqCst);
        }
        Charge {
            bytes: 0,
            calls: 0,
            late: self.bytes,
            budgets: self.budgets.clone(),
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        // In one order with what is held back: who finds no room is told of this.
        for budget in &self.budgets {
            budget.bytes.fetch_sub(self.bytes, Ordering::SeqCst);
            budget.calls.fetch_sub(self.calls, Ordering::SeqCst);
            budget.late.fetch_sub(self.late, Ordering::SeqCst);
        }
    }
}

/// The memory that a connection's messages take before they are taken.
pub(super) struct Arriving {
    bytes: usize,
    budgets: [Arc<Budget>; 2],
}

impl Arriving {
    pub fn new(budgets: [&Arc<Budget>; 2]) -> Arriving {
        Arriving {
            bytes: 0,
            budgets: budgets.map(Arc::clone),
        }
    }

    /// So much it is now.
    pub fn set(&mut self, bytes: usize) {
        let before = std::mem::replace(&mut self.bytes, bytes);
        for budget in &self.budgets {
            if bytes > before {
                budget.arriving.fetch_add(bytes - before, Ordering::SeqCst);
            } else {
                budget.arriving.fetch_sub(before - bytes, Ordering::SeqCst);
            }
        }
    }
}

impl Drop for Arriving {
    fn drop(&mut self) {
        self.set(0);
    }
}

struct Unsent {
    /// `None` once the connection is closed.
    stream: Option<Arc<TcpStream>>,
    answers: VecDeque<Answer>,
    /// Memory of all answers, those that are being sent among them.
    bytes: usize,
    /// How much of the first has gone out.
    sent: usize,
    /// Somebody is sending some that he has taken.
    busy: bool,
}

/// What came of sending.
pub(super) enum Out {
    /// Everything has gone out, or somebody else is at it.
    All,
    /// The client has to take something first.
    Full,
    /// One round of it was done, and there is more.
    More,
}

/// A connection as those see it who answer.
pub(super) struct Link {
    token: u64,
    unsent: Mutex<Unsent>,
    bell: Arc<Bell>,
    /// Its own, the client's, and that of all.
    budgets: [Arc<Budget>; 3],
}

impl Link {
    pub fn new(
        token: u64,
        stream: &Arc<TcpStream>,
        bell: &Arc<Bell>,
        [client, all]: [&Arc<Budget>; 2],
    ) -> Link {
        Link {
            token,
            unsent: Mutex::new(Unsent {
                stream: Some(Arc::clone(stream)),
                answers: VecDeque::new(),
                bytes: 0,
                sent: 0,
                busy: false,
            }),
            bell: Arc::clone(bell),
            budgets: [Arc::default(), Arc::clone(client), Arc::clone(all)],
        }
    }

    fn lock(&self) -> MutexGuard<'_, Unsent> {
        self.unsent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory of the answers that wait to be sent.
    pub fn unsent(&self) -> usize {
        self.lock().bytes
    }

    /// True if calls that go on although their client was told to ask again take all that they may.
    pub fn is_overdue(&self) -> bool {
        let [_, client, all] = &self.budgets;
        client.late.load(Ordering::SeqCst) >= CLIENT_LATE_MAX
            || all.late.load(Ordering::SeqCst) >= ALL_LATE_MAX
    }

    /// Charges the client with an answer until that is sent or dropped.
    pub fn charge(&self, mut answer: Answer) -> Answer {
        if answer.charge.is_none() {
            answer.charge = Some(Charge::new(answer.allocated(), 0, &self.budgets));
        }
        answer
    }

    /// Charges the client with a call until that is answered.
    pub fn call(&self, bytes: usize) -> Charge {
        Charge::new(bytes, 1, &self.budgets)
    }

    /// No call of it is under way, and no answer waits.
    pub fn is_idle(&self) -> bool {
        let [own, ..] = &self.budgets;
        own.bytes.load(Ordering::SeqCst) == 0
    }

    /// Sends an answer, unless the connection is gone.
    pub fn send(&self, answer: Answer) {
        let answer = self.charge(answer);
        let len = answer.len();
        let mut unsent = self.lock();
        if unsent.stream.is_none() {
            return;
        }
        unsent.bytes += answer.allocated();
        unsent.answers.push_back(answer);
        let first = unsent.answers.len() == 1;
        let idle = first && !unsent.busy;
        drop(unsent);
        let [_, client, _] = &self.budgets;
        let alone = idle && len <= ALONE_BYTES && client.calls.load(Ordering::SeqCst) < ALONE_CALLS;
        if alone && matches!(self.send_some(), Ok(Out::All)) {
            // Room may have been made for others: the calls of one client share it.
            if self.bell.held_back.load(Ordering::SeqCst) {
                self.bell.ring();
            }
            return;
        }
        if first || alone {
            self.bell.tokens().push(self.token);
        }
        self.bell.ring();
    }

    /// Sends some of what there is, as far as the client takes it.
    pub fn send_some(&self) -> io::Result<Out> {
        let mut unsent = self.lock();
        if unsent.busy || unsent.answers.is_empty() {
            // Who is busy looks again when he has done.
            return Ok(Out::All);
        }
        let Some(stream) = unsent.stream.clone() else {
            return Ok(Out::All);
        };
        unsent.busy = true;
        let count = unsent.answers.len().min(GATHER);
        let mut taken: VecDeque<Answer> = unsent.answers.drain(..count).collect();
        let mut sent = unsent.sent;
        drop(unsent);

        let mut skip = sent;
        let mut slices: Vec<IoSlice<'_>> = Vec::with_capacity(GATHER * 4);
        for piece in taken.iter().flat_map(Answer::pieces) {
            let gone = skip.min(piece.len());
            skip -= gone;
            if gone < piece.len() {
                slices.push(IoSlice::new(&piece[gone..]));
            }
        }
        let written = (&*stream).write_vectored(&slices);
        drop(slices);
        drop(stream);

        if let Ok(len) = &written {
            sent += len;
        }
        let mut gone = 0;
        while let Some(first) = taken.front() {
            let whole = first.len();
            if sent < whole {
                break;
            }
            sent -= whole;
            gone += first.allocated();
            // Outside the lock: it gives memory back.
            taken.pop_front();
        }
        let mut unsent = self.lock();
        unsent.busy = false;
        if unsent.stream.is_none() {
            return Ok(Out::All);
        }
        unsent.bytes -= gone;
        unsent.sent = sent;
        while let Some(answer) = taken.pop_back() {
            unsent.answers.push_front(answer);
        }
        let more = !unsent.answers.is_empty();
        drop(unsent);
        match written {
            Ok(0) => Err(ErrorKind::WriteZero.into()),
            Ok(_) => Ok(if more { Out::More } else { Out::All }),
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(Out::More),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(Out::Full),
            Err(error) => Err(error),
        }
    }

    /// Nothing is sent any more.
    pub fn close(&self) {
        let mut unsent = self.lock();
        let stream = unsent.stream.take();
        let answers = std::mem::take(&mut unsent.answers);
        drop(unsent);
        drop((stream, answers));
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    fn pair() -> (Arc<TcpStream>, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let client = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
        let (server, _) = listener.accept().expect("accepted");
        server.set_nonblocking(true).expect("not blocking");
        (Arc::new(server), client)
    }

    fn link(stream: &Arc<TcpStream>, budget: &Arc<Budget>) -> Link {
        let bell = Bell::new(eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd"));
        Link::new(7, stream, &Arc::new(bell), [budget, &Arc::default()])
    }

    #[test]
    fn who_has_a_short_answer_sends_it_unless_many_are_under_way() {
        let (server, mut client) = pair();
        let budget = Arc::<Budget>::default();
        let link = link(&server, &budget);
        link.send(Answer::from(vec![1, 2, 3, 4]));
        let mut got = [0; 8];
        client.read_exact(&mut got).expect("sent");
        assert_eq!(got, [0x80, 0, 0, 4, 1, 2, 3, 4]);
        assert!(link.bell.heard().is_empty() && link.unsent() == 0);
        // Somebody waits for the room.
        link.bell.hold_back(true);
        link.send(Answer::from(vec![0; 4]));
        assert!(link.bell.rung.load(Ordering::Relaxed) && link.bell.heard().is_empty());

        let charges: Vec<_> = (0..ALONE_CALLS).map(|_| link.call(1)).collect();
        for n in 0..3 {
            link.send(Answer::from(vec![n; 4]));
        }
        assert_eq!(link.bell.heard(), [7]);
        assert!(link.unsent() >= 3 * size_of::<Answer>());
        assert!(matches!(link.send_some(), Ok(Out::All)));
        assert_eq!(link.unsent(), 0);
        drop(charges);
        assert_eq!(budget.calls.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn what_a_client_does_not_take_waits_in_order() {
        let (server, mut client) = pair();
        let budget = Arc::<Budget>::default();
        let link = link(&server, &budget);
        let long = |n: u8| {
            let data: Data = Box::new(vec![n; 5 << 20]);
            Answer::with_data(Writer::new(), data)
        };
        link.send(long(1));
        assert_eq!(
            link.bell.heard(),
            [7],
            "too long to be sent by just anybody"
        );
        link.send(long(2));
        let full = || loop {
            match link.send_some().expect("connected") {
                Out::More => {}
                Out::Full => return true,
                Out::All => return false,
            }
        };
        assert!(full());
        link.send(Answer::from(vec![3; 4]));
        let total = 2 * (4 + (5 << 20)) + 8;
        let reader = std::thread::spawn(move || {
            let mut got = vec![0; total];
            client.read_exact(&mut got).expect("all of it");
            got
        });
        while full() {
            std::thread::yield_now();
        }
        let got = reader.join().expect("no panic");
        assert!(got[4..4 + (5 << 20)].iter().all(|b| *b == 1));
        assert!(got[8 + (5 << 20)..8 + (10 << 20)].iter().all(|b| *b == 2));
        assert_eq!(got[8 + (10 << 20)..], [0x80, 0, 0, 4, 3, 3, 3, 3]);
        assert_eq!(link.unsent(), 0);
    }

    #[test]
    fn late_call_stays_charged_until_it_ends() {
        let (server, _client) = pair();
        let budget = Arc::<Budget>::default();
        let link = link(&server, &budget);
        let charge = link.call(CLIENT_LATE_MAX);
        assert!(!link.is_overdue());
        let late = charge.into_late();
        assert_eq!(budget.calls.load(Ordering::Relaxed) + budget.memory(), 0);
        assert!(link.is_overdue());
        drop(late);
        assert!(!link.is_overdue());
        let budgets = [&Arc::default(), &link.budgets[2]];
        let other = Link::new(8, &server, &link.bell, budgets);
        let _late = other.call(ALL_LATE_MAX).into_late();
        assert!(link.is_overdue());
    }

    #[test]
    fn a_closed_one_takes_nothing() {
        let (server, mut client) = pair();
        let link = link(&server, &Arc::default());
        link.close();
        link.send(Answer::from(vec![1; 4]));
        drop(server);
        assert_eq!(client.read(&mut [0; 8]).expect("ended"), 0);
    }
}
