//! The thread of an origin: operations in, answers out, and a server that may go and come back.
//!
//! It is always in one phase. *Up*: requests are sent as they come. *Closing*: the connections
//! were lost or given up; nothing is touched until the kernel has let go of all memory. *Down*:
//! what was not answered waits, first in line, while another thread connects. *Catching up*: a
//! new server is sent what the old one answered but may have lost ([`Journal`]); only when it
//! has answered all that is it trusted with anything else. If there is nothing to send again,
//! it must answer a read: accepting a connection proves little.
//!
//! Some servers answer with an I/O error when they lost what is behind them, and never find back
//! ([`Options::errors_are_losses`]). Then such an answer is the loss of the server.
//!
//! A server may also speak for storage that has shut us out ([`Options::shutdown_is_fencing`]). That is
//! the end: another client of that storage has gone on, and whatever we sent again would be older than
//! what that one wrote. The server is ended, nothing is sent or dialled any more, and everything fails.
//!
//! A server that owes answers and gives none for as long as the limit is lost. It may be slow over
//! one request for longer, as long as it answers others. An operation that waited for a server for
//! longer than the limit fails; so does, from then on, every other one at once, until a server has
//! caught up.

use crate::connect::{CONNECT_LIMIT, Connection, Dial, connect};
use crate::handshake::Negotiated;
use crate::journal::Journal;
use crate::line::Line;
use crate::origin::{Options, Shared, lock};
use crate::tasks::{EFFECTS_MAX, Owner, Part, Tasks, again, flush, io_error, probe};
use crate::transmission::{Broken, Finished, REQUESTS_MAX, Request};
use hearth_fault::Fault;
use hearth_io::{Event, IoError, Proactor, Wait, now_ns};
use hearth_nbd_wire::{cmd, errno, tflag};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Connections to a server that allows several: enough for one to send while another receives.
pub(crate) const CONNECTIONS_MAX: usize = 4;
/// Bytes of the journal from which on we flush without being asked.
const FLUSH_AT: u64 = 32 << 20;
/// Bytes of the journal at which changes wait for that flush.
const JOURNAL_MAX: u64 = 64 << 20;
/// First wait between two attempts to connect; doubles up to [`BACKOFF_MAX`]. The very first
/// attempt is at once.
const BACKOFF: Duration = Duration::from_millis(50);
/// Longest wait between two attempts: a server that is back is noticed this soon.
const BACKOFF_MAX: Duration = Duration::from_secs(2);
/// How often waiting operations are looked at for their limit.
const CHECK_NS: u64 = 100_000_000;
/// Connections are lost when one request is unanswered for so many limits although others are answered: its connection
/// may have died alone (a firewall forgot it), or the server answers it a byte at a time.
const REQUEST_LIMITS: u64 = 4;
/// Longest wait, at the end, for the last flush.
const GOODBYE_NS: u64 = 10_000_000_000;

#[derive(Debug, PartialEq)]
enum Phase {
    Up,
    CatchingUp { left: usize, quiet_since_ns: u64 },
    Closing,
    Down { next_ns: u64, dialing: bool },
}

/// A request in flight.
struct Flying {
    owner: Owner,
    /// How much of the journal a flush covers.
    mark: u64,
    since_ns: u64,
}

pub(crate) struct Worker {
    shared: Arc<Shared>,
    dial: Arc<dyn Dial>,
    options: Options,
    io: Box<dyn Proactor>,
    agreed: Negotiated,
    phase: Phase,
    tasks: Tasks,
    /// Requests in flight, by cookie. The connections have their content.
    flying: HashMap<u64, Flying>,
    /// Discards and zeroings among them.
    effects: usize,
    /// When the server last completed an answer, or first owed one after that. A part of an answer does not count: a server
    /// that sends a byte now and then would hold a request without limit.
    answered_ns: u64,
    journal: Journal,
    lines: Vec<Line>,
    next_cookie: u64,
    next_token: u64,
    /// What is still to be sent to a new server.
    replay: Vec<Request>,
    /// Operations whose memory went away, to be answered once the kernel has let go of it: one
    /// entry for each of their requests that was in flight.
    gone: Vec<u64>,
    own_flush: bool,
    /// Own flushes in a row that failed, and when the next is worth a try.
    flush_failures: u32,
    next_own_flush_ns: u64,
    attempts: u64,
    /// Servers given up in a row because of an error they answered.
    refusals: u64,
    failing: bool,
    /// The storage has shut us out.
    fenced: bool,
    stopping: bool,
    next_check_ns: u64,
}

impl Worker {
    pub(crate) fn new(
        shared: Arc<Shared>,
        dial: Arc<dyn Dial>,
        options: Options,
        io: Box<dyn Proactor>,
        connections: Vec<Connection>,
        agreed: Negotiated,
    ) -> Worker {
        let mut worker = Worker {
            shared,
            dial,
            options,
            io,
            agreed,
            phase: Phase::Up,
            tasks: Tasks::default(),
            flying: HashMap::new(),
            effects: 0,
            answered_ns: 0,
            journal: Journal::default(),
            lines: Vec::new(),
            next_cookie: 1,
            next_token: 1,
            replay: Vec::new(),
            gone: Vec::new(),
            own_flush: false,
            flush_failures: 0,
            next_own_flush_ns: 0,
            attempts: 0,
            refusals: 0,
            failing: false,
            fenced: false,
            stopping: false,
            next_check_ns: 0,
        };
        worker.install(connections);
        worker
    }

    /// Serves until told to stop.
    pub(crate) fn run(mut self) {
        let (mut events, mut dones) = (Vec::new(), Vec::new());
        let mut goodbye_ns = 0;
        loop {
            let now = now_ns();
            self.take_inbox(now);
            if self.stopping && goodbye_ns == 0 {
                goodbye_ns = now + GOODBYE_NS;
                if self.phase == Phase::Up && !self.journal.is_empty() {
                    self.flush_ourselves();
                }
            }
            if goodbye_ns > 0 && (now >= goodbye_ns || self.may_leave()) {
                break;
            }
            self.settle(now);
            self.pump();
            let wait = self.wait(now, goodbye_ns);
            if let Err(e) = self.io.wait(wait, &mut events, &mut dones) {
                tracing::error!(origin = %self.dial.name(), "the I/O driver of an origin failed: {e}; the origin is out of use");
                break;
            }
            for event in events.drain(..) {
                self.event(event);
            }
        }
        self.leave();
    }

    fn wait(&self, now: u64, goodbye_ns: u64) -> Wait {
        let mut until = u64::MAX;
        if goodbye_ns > 0 {
            until = goodbye_ns;
        }
        if self.tasks.len() > 0
            || !self.flying.is_empty()
            || matches!(self.phase, Phase::CatchingUp { .. })
        {
            until = until.min(now + CHECK_NS);
        }
        match self.phase {
            Phase::Down {
                next_ns,
                dialing: false,
            } => until = until.min(next_ns),
            Phase::Up if self.flush_failures > 0 && self.wants_flush() => {
                until = until.min(self.next_own_flush_ns);
            }
            _ => {}
        }
        if until == u64::MAX {
            Wait::Forever
        } else {
            Wait::Until(until)
        }
    }

    /// True if nothing is left to wait for before stopping.
    fn may_leave(&self) -> bool {
        match self.phase {
            Phase::Up => self.flying.is_empty() && self.tasks.len() == 0 && !self.own_flush,
            Phase::Down { .. } | Phase::CatchingUp { .. } => true,
            Phase::Closing => false,
        }
    }

    fn take_inbox(&mut self, now: u64) {
        let (jobs, dialed, hurry) = {
            let mut inbox = lock(&self.shared.inbox);
            self.stopping |= inbox.stop;
            (
                std::mem::take(&mut inbox.jobs),
                inbox.dialed.take(),
                inbox.hurry,
            )
        };
        let refuse =
            self.phase != Phase::Up && (self.failing || hurry || self.stopping || self.fenced);
        let error = self.refusal();
        for job in jobs {
            if refuse {
                job.finish(Err(error));
            } else {
                self.tasks.add(job, &self.agreed, self.phase != Phase::Up);
            }
        }
        if hurry && matches!(self.phase, Phase::Down { .. }) {
            self.tasks.fail(IoError::Os(libc::EIO), |_| true);
        }
        match dialed {
            Some(Ok(connections)) => self.connected(connections, now),
            Some(Err(why)) => self.not_connected(why, now),
            None => {}
        }
    }

    /// Does what the time asks for.
    fn settle(&mut self, now: u64) {
        if now >= self.next_check_ns {
            self.next_check_ns = now + CHECK_NS;
            self.check_limit(now);
        }
        if self.phase == Phase::Closing && self.lines.iter().all(Line::at_rest) {
            self.closed(now);
        }
        if let Phase::Down {
            next_ns,
            dialing: false,
        } = self.phase
            && now >= next_ns
            && !self.stopping
            && !self.fenced
        {
            self.dial(now);
        }
    }

    /// True if the server completed no answer since before `before_ns` although requests are in flight, or if one request is
    /// far older.
    fn is_silent_since(&self, before_ns: u64, limit_ns: u64) -> bool {
        let long_before = before_ns.saturating_sub((REQUEST_LIMITS - 1).saturating_mul(limit_ns));
        !self.flying.is_empty() && self.answered_ns < before_ns
            || self.flying.values().any(|f| f.since_ns < long_before)
    }

    /// What operations are told that are not done.
    fn refusal(&self) -> IoError {
        if self.fenced {
            IoError::SHUT_OUT
        } else {
            IoError::Os(libc::EIO)
        }
    }

    /// The storage has shut us out.
    fn fence(&mut self) {
        if self.fenced {
            return;
        }
        self.fenced = true;
        self.failing = true;
        tracing::error!(
            origin = %self.dial.name(),
            unflushed = self.journal.bytes(),
            "the storage has shut this host out; nothing is sent there any more"
        );
        // What it answered and has not flushed is somebody else's to have or not to have now.
        self.journal = Journal::default();
        lock(&self.shared.link).fenced = true;
        self.lose(Fault::bare("the storage has shut this host out"));
        // What the server still holds must not get there, should the storage take it again.
        self.dial.renew();
    }

    /// Has anybody waited for too long?
    fn check_limit(&mut self, now: u64) {
        let limit_ns = self.shared.timeout_ns();
        let expired = now.saturating_sub(limit_ns);
        let silent = || {
            Fault::new(
                format!(
                    "the server did not answer for {} s",
                    limit_ns / 1_000_000_000
                ),
                "see whether the server hangs",
            )
        };
        let late = self.tasks.any_lost_before(expired);
        match self.phase {
            Phase::Up if self.is_silent_since(expired, limit_ns) => {
                self.failing = true;
                self.lose(silent());
            }
            Phase::CatchingUp { quiet_since_ns, .. } if quiet_since_ns < expired => {
                self.lose(silent());
            }
            Phase::CatchingUp { .. } | Phase::Down { .. } => {
                if late && !self.failing {
                    self.failing = true;
                    self.publish(None);
                }
                if self.failing {
                    // None of them is in flight.
                    self.tasks.fail(self.refusal(), |_| true);
                }
            }
            Phase::Up | Phase::Closing => {}
        }
    }

    /// Gives waiting requests to connections.
    fn pump(&mut self) {
        if matches!(self.phase, Phase::Closing | Phase::Down { .. }) {
            return;
        }
        if self.phase == Phase::Up && self.wants_flush() {
            if now_ns() >= self.next_own_flush_ns {
                self.flush_ourselves();
            } else if self.journal.bytes() > JOURNAL_MAX {
                // What changes would wait for has just failed, and reads would wait behind them.
                self.tasks.fail_changes(IoError::Os(libc::EIO));
            }
        }
        while let Some(i) = self.free_line() {
            let slow = self.effects >= EFFECTS_MAX;
            let (owner, request) = if self.phase == Phase::Up {
                let full = self.journal.bytes() > JOURNAL_MAX;
                let must_wait = |r: &Request| full && r.is_change() || slow && r.is_effect();
                match self.tasks.next(|r| !must_wait(r)) {
                    Some(part) => (part.owner, part.request),
                    None => break,
                }
            } else {
                match self.replay.pop_if(|r| !(slow && r.is_effect())) {
                    Some(request) => (Owner::Replay, request),
                    None => break,
                }
            };
            let cookie = self.next_cookie;
            self.next_cookie += 1;
            self.effects += usize::from(request.is_effect());
            let since_ns = now_ns();
            if self.flying.is_empty() {
                self.answered_ns = since_ns;
            }
            let mark = self.journal.mark();
            self.flying.insert(
                cookie,
                Flying {
                    owner,
                    mark,
                    since_ns,
                },
            );
            self.lines[i].request(cookie, &request);
        }
        for line in &mut self.lines {
            line.pump(&mut *self.io);
        }
    }

    /// The connection with the least to do, if any can take a request.
    fn free_line(&self) -> Option<usize> {
        if self.flying.len() >= self.options.in_flight_max.max(1) {
            return None;
        }
        let (i, line) = self
            .lines
            .iter()
            .enumerate()
            .min_by_key(|(_, l)| l.in_flight())?;
        (line.in_flight() < REQUESTS_MAX).then_some(i)
    }

    /// So much was answered and not flushed that we have to do it, and are not about it.
    fn wants_flush(&self) -> bool {
        self.journal.bytes() > FLUSH_AT && !self.own_flush
    }

    /// Flushes so that the journal can be forgotten.
    fn flush_ourselves(&mut self) {
        if !self.own_flush {
            self.own_flush = true;
            self.tasks.put_first(vec![Part {
                owner: Owner::Own,
                request: flush(),
            }]);
        }
    }

    fn event(&mut self, event: Event) {
        let token = match &event {
            Event::Recv { token, .. } | Event::Sent { token, .. } => *token,
            _ => return,
        };
        let Some(line) = self.lines.iter_mut().find(|l| l.token == token) else {
            return;
        };
        let over = self.phase == Phase::Closing;
        match event {
            Event::Sent { result: Ok(n), .. } => line.sent(n),
            Event::Sent { result: Err(e), .. } => {
                line.send_ended();
                self.failed(token, &e);
            }
            Event::Recv { result: Ok(_), .. } if over => line.receive_ended(),
            Event::Recv { result: Ok(0), .. } => {
                line.receive_ended();
                self.lose(Fault::new(
                    "the server closed the connection",
                    "see its log",
                ));
            }
            Event::Recv {
                result: Ok(n),
                more,
                ..
            } => {
                // What was answered before the stream broke is answered: it is not in flight any more,
                // so nobody would ask again.
                let (finished, sound) = line.received(n, more);
                finished.into_iter().for_each(|f| self.finished(f));
                match sound {
                    Err(Broken::Shutdown) if self.options.shutdown_is_fencing => self.fence(),
                    Err(why) => {
                        // Another will perhaps say the same, as often as it is asked.
                        self.refusals += u64::from(why == Broken::Shutdown);
                        self.lose(Fault::bare(why.to_string()));
                    }
                    Ok(()) => {}
                }
            }
            Event::Recv { result: Err(e), .. } => {
                line.receive_ended();
                self.failed(token, &e);
            }
            _ => {}
        }
    }

    /// A send or receive failed.
    fn failed(&mut self, token: u64, error: &std::io::Error) {
        if error.raw_os_error() == Some(libc::EFAULT)
            && let Some(line) = self.lines.iter().find(|l| l.token == token)
        {
            // A guest took its memory away. Its requests cannot be repeated; the others can.
            for cookie in line.faulted() {
                if let Some(Flying {
                    owner: Owner::Task(id),
                    ..
                }) = self.flying.remove(&cookie)
                {
                    self.gone.push(id);
                }
            }
        }
        self.lose(Fault::bare(format!("the connection failed: {error}")));
    }

    fn finished(&mut self, done: Finished) {
        let Some(Flying { owner, mark, .. }) = self.flying.remove(&done.cookie) else {
            return;
        };
        self.answered_ns = now_ns();
        self.effects -= usize::from(done.request.is_effect()).min(self.effects);
        if done.result.is_ok() && done.request.command == cmd::FLUSH {
            self.journal.forget(mark);
            self.flush_failures = 0;
            self.next_own_flush_ns = 0;
        }
        if self.options.errors_are_losses && matches!(done.result, Err(errno::IO | errno::INVAL)) {
            return self.refused(owner, done.request);
        }
        match owner {
            Owner::Task(id) => {
                self.refusals = 0;
                // One that cannot flush calls what it answers durable.
                if done.result.is_ok() && self.agreed.has(tflag::SEND_FLUSH) {
                    done.request.remember(&mut self.journal);
                }
                self.tasks.ended(id, done.result.map_err(io_error));
            }
            Owner::Own => {
                self.own_flush = false;
                if let Err(e) = done.result {
                    if self.flush_failures == 0 {
                        tracing::warn!(origin = %self.dial.name(), "the server cannot flush: {}", io_error(e));
                    }
                    let wait = backoff(u64::from(self.flush_failures));
                    self.flush_failures = self.flush_failures.saturating_add(1);
                    self.next_own_flush_ns = now_ns() + wait.as_nanos() as u64;
                    // Nothing more may be taken that could be lost.
                    self.tasks.fail_changes(io_error(e));
                }
            }
            Owner::Replay => self.replayed(&done),
        }
    }

    /// An error that may not be the disk's: its request waits for another server.
    fn refused(&mut self, owner: Owner, request: Request) {
        if let Owner::Task(_) = owner {
            self.tasks.put_first(vec![Part { owner, request }]);
        }
        if self.phase != Phase::Closing {
            self.refusals += 1;
        }
        self.lose(Fault::new("it answered with an I/O error", "see its log"));
    }

    fn replayed(&mut self, done: &Finished) {
        let Phase::CatchingUp { left, .. } = self.phase else {
            return;
        };
        // To a probe, any answer is one.
        if let (Err(e), true) = (done.result, done.request.is_change()) {
            return self.lose(Fault::new(
                format!(
                    "the server does not take again what it may have lost: {}",
                    io_error(e)
                ),
                "see its log",
            ));
        }
        if left > 1 {
            self.phase = Phase::CatchingUp {
                left: left - 1,
                quiet_since_ns: now_ns(),
            };
            return;
        }
        self.phase = Phase::Up;
        self.failing = false;
        self.attempts = 0;
        let waited = {
            let mut link = lock(&self.shared.link);
            let waited = link.since.elapsed();
            link.connected = true;
            link.since = Instant::now();
            link.attempts = 0;
            link.failing = false;
            link.reconnects += 1;
            waited
        };
        tracing::info!(origin = %self.dial.name(), ms = waited.as_millis() as u64, "the origin is connected again");
    }

    /// Gives the connections up.
    fn lose(&mut self, why: Fault) {
        if self.phase == Phase::Closing {
            return;
        }
        let was_up = self.phase == Phase::Up;
        let why = self.dial.why().unwrap_or(why);
        if was_up {
            tracing::warn!(origin = %self.dial.name(), unanswered = self.flying.len(), "the origin is not connected: {why}");
            let mut link = lock(&self.shared.link);
            link.connected = false;
            link.since = Instant::now();
        }
        self.phase = Phase::Closing;
        self.tasks.lost(now_ns());
        self.publish(Some(why));
        if self.options.errors_are_losses && !self.fenced {
            self.dial.renew();
        }
        for line in &self.lines {
            line.shut();
            self.io.cancel(line.token);
        }
    }

    fn publish(&self, reason: Option<Fault>) {
        let mut link = lock(&self.shared.link);
        link.attempts = self.attempts;
        link.failing = self.failing;
        if reason.is_some() {
            link.reason = reason;
        }
    }

    /// The kernel has let go of the connections: what they did not answer waits again.
    fn closed(&mut self, now: u64) {
        let mut again: Vec<(u64, Part)> = Vec::new();
        for line in self.lines.drain(..) {
            for (cookie, request) in line.abandon() {
                if let Some(Flying {
                    owner: owner @ Owner::Task(_),
                    ..
                }) = self.flying.remove(&cookie)
                {
                    again.push((cookie, Part { owner, request }));
                }
            }
        }
        again.sort_by_key(|(cookie, _)| *cookie);
        self.tasks
            .put_first(again.into_iter().map(|(_, part)| part).collect());
        for id in self.gone.drain(..) {
            self.tasks.ended(id, Err(IoError::Os(libc::EFAULT)));
        }
        self.flying.clear();
        self.effects = 0;
        self.own_flush = false;
        self.replay.clear();
        if self.fenced {
            // None of them is in flight any more.
            self.tasks.fail(IoError::SHUT_OUT, |_| true);
        }
        let wait = match self.attempts.max(self.refusals) {
            0 => Duration::ZERO,
            n => backoff(n),
        };
        self.phase = Phase::Down {
            next_ns: if self.fenced {
                u64::MAX
            } else {
                now + wait.as_nanos() as u64
            },
            dialing: false,
        };
    }

    /// Has another thread connect.
    fn dial(&mut self, now: u64) {
        self.attempts += 1;
        let (shared, dial) = (self.shared.clone(), self.dial.clone());
        let options = self.options.clone();
        let work = move || {
            let dialed = dial_all(&*dial, &options).map_err(|e| e.fault());
            lock(&shared.inbox).dialed = Some(dialed);
            shared.wake.wake();
        };
        let started = std::thread::Builder::new()
            .name("hearth-dial".to_owned())
            .spawn(work);
        match started {
            Ok(_) => {
                self.phase = Phase::Down {
                    next_ns: now,
                    dialing: true,
                };
                self.publish(None);
            }
            Err(e) => {
                let why = Fault::new(
                    format!("cannot start a thread: {e}"),
                    "check the limit on processes",
                );
                self.not_connected(why, now);
            }
        }
    }

    fn not_connected(&mut self, why: Fault, now: u64) {
        if self.attempts == 1 {
            tracing::warn!(origin = %self.dial.name(), "cannot connect again: {why}");
        }
        let wait = backoff(self.attempts);
        self.phase = Phase::Down {
            next_ns: now + wait.as_nanos() as u64,
            dialing: false,
        };
        self.publish(Some(why));
    }

    /// A server is there: is it the one we know, and what may it have lost?
    fn connected(&mut self, connections: Vec<Connection>, now: u64) {
        let Some(agreed) = connections.first().map(|c| c.agreed) else {
            return self.not_connected(Fault::bare("no connection"), now);
        };
        if let Err(why) = self.shared.suits(&agreed, &self.options) {
            return self.not_connected(why, now);
        }
        self.agreed = agreed;
        self.install(connections);
        let changes: Vec<_> = self.journal.changes().collect();
        let mut replay = Vec::new();
        for change in &changes {
            replay.extend(again(&mut self.tasks, change, &agreed));
        }
        if replay.is_empty() {
            replay.push(probe(agreed.size));
        }
        // Taken from the end.
        replay.reverse();
        if !changes.is_empty() {
            tracing::info!(origin = %self.dial.name(), bytes = self.journal.bytes(), "sending again what was answered but not flushed");
        }
        self.phase = Phase::CatchingUp {
            left: replay.len(),
            quiet_since_ns: now,
        };
        self.replay = replay;
    }

    fn install(&mut self, connections: Vec<Connection>) {
        for connection in connections {
            self.lines.push(Line::new(self.next_token, connection));
            self.next_token += 1;
        }
    }

    /// Says goodbye, closes everything and fails what is left.
    fn leave(mut self) {
        if !self.journal.is_empty() {
            tracing::error!(
                origin = %self.dial.name(),
                bytes = self.journal.bytes(),
                "the server answered these writes but was lost before it was flushed; what the cache does not hold as dirty may be missing there"
            );
        }
        if self.phase == Phase::Up {
            let goodbye = Request {
                command: cmd::DISC,
                ..flush()
            };
            for line in &mut self.lines {
                line.request(self.next_cookie, &goodbye);
                self.next_cookie += 1;
                line.pump(&mut *self.io);
            }
        }
        for line in &self.lines {
            line.shut();
            self.io.cancel(line.token);
        }
        let end = now_ns() + GOODBYE_NS;
        let (mut events, mut dones) = (Vec::new(), Vec::new());
        self.phase = Phase::Closing;
        while !self.lines.iter().all(Line::at_rest) && now_ns() < end {
            if self
                .io
                .wait(Wait::Until(end), &mut events, &mut dones)
                .is_err()
            {
                break;
            }
            for event in events.drain(..) {
                self.event(event);
            }
        }
        // The driver goes first: it owns what the kernel may still use. Then every job left is
        // answered by being dropped.
        drop(self.io);
        drop(self.tasks);
    }
}

/// How long to wait after so many failures before it is tried again.
fn backoff(failures: u64) -> Duration {
    BACKOFF_MAX.min(BACKOFF * (1 << failures.min(6)))
}

/// As many connections as the server allows and are of use.
pub(crate) fn dial_all(
    dial: &dyn Dial,
    options: &Options,
) -> Result<Vec<Connection>, crate::ConnectError> {
    let first = connect(dial, &options.export, CONNECT_LIMIT)?;
    let agreed = first.agreed;
    let mut all = vec![first];
    if agreed.has(tflag::CAN_MULTI_CONN) {
        while all.len() < CONNECTIONS_MAX {
            match connect(dial, &options.export, CONNECT_LIMIT) {
                Ok(more) if more.agreed == agreed => all.push(more),
                // One is enough.
                _ => break,
            }
        }
    }
    Ok(all)
}
