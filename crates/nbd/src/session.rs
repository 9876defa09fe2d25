//! One client: greeting, haggling, transmission, goodbye.
//!
//! [`NbdSession`] is the protocol without TLS; [`TlsSession`](crate::tls::TlsSession) wraps it.

use crate::carried::{self, State};
use crate::export::Attached;
use crate::exporter::PROTOCOL;
use crate::handshake::{Agreement, Negotiation, Next, OPTION_MAX, OPTION_SKIP_MAX, TlsMode};
use crate::input::Input;
use crate::output::Output;
use crate::transmission::{Step, Transmission};
use crate::wire::{FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, INIT_MAGIC, OPTION_MAGIC, Reader};
use hearth_engine::api::Completion;
use hearth_io::BufSlice;
use hearth_reactor::{Caller, Memory, PeerAddress, SendList, Session, SessionCx, Shares};
use hearth_volume::{Catalog, Volume};
use std::sync::Arc;

/// Bytes of an option's header.
const OPTION_HEADER: usize = 16;

enum Phase {
    /// Waiting for the client's flags.
    Greeting(Negotiation),
    /// Waiting for an option.
    Options(Negotiation),
    /// Reading past an option too long.
    SkipOption(Negotiation, u64),
    /// `STARTTLS` was answered; nothing is read until TLS is up.
    AwaitTls(Negotiation),
    Transmission(Box<Transmission>),
    /// Only while one phase becomes the next, and once haggling has ended without success.
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    No,
    /// No more requests; what is in flight is answered first.
    Soft,
    /// Nothing more in either direction.
    Hard,
}

/// The protocol's state machine for one connection without TLS.
pub struct NbdSession {
    peer: String,
    caller: Caller,
    exports: Arc<Catalog>,
    input: Input,
    out: Output,
    phase: Phase,
    ending: Ending,
    /// The last `recv_buf` was the payload's own memory.
    direct: bool,
    /// Received bytes wait until something outstanding is finished.
    full: bool,
    /// Another process goes on with it: no further request is taken.
    frozen: bool,
}

impl NbdSession {
    /// A session that is about to greet its client. `peer` names it in the log.
    pub fn new(exports: Arc<Catalog>, tls: TlsMode, peer: String) -> NbdSession {
        let caller = Caller::new(PeerAddress::Unknown);
        NbdSession::of(exports, tls, caller, peer)
    }

    /// The same of a client that is known.
    pub fn of_caller(exports: Arc<Catalog>, tls: TlsMode, caller: Caller) -> NbdSession {
        let peer = caller.to_string();
        NbdSession::of(exports, tls, caller, peer)
    }

    fn of(exports: Arc<Catalog>, tls: TlsMode, caller: Caller, peer: String) -> NbdSession {
        let mut out = Output::default();
        let mut greeting = Vec::with_capacity(18);
        greeting.extend(INIT_MAGIC.to_be_bytes());
        greeting.extend(OPTION_MAGIC.to_be_bytes());
        greeting.extend(((FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES) as u16).to_be_bytes());
        out.bytes(&greeting);
        NbdSession {
            peer,
            caller,
            exports,
            input: Input::default(),
            out,
            phase: Phase::Greeting(Negotiation::new(tls)),
            ending: Ending::No,
            direct: false,
            full: false,
            frozen: false,
        }
    }

    /// Goes on with a connection that another process has [carried](Session::carry) this far. `None` if its
    /// export is not there, another disk, smaller, or does not take it.
    pub fn resume(exports: Arc<Catalog>, caller: Caller, state: State) -> Option<NbdSession> {
        if state.phase == carried::Phase::New {
            return Some(NbdSession::of_caller(exports, TlsMode::Off, caller));
        }
        let phase = match state.phase {
            carried::Phase::New | carried::Phase::Greeted => {
                Phase::Greeting(Negotiation::new(TlsMode::Off))
            }
            carried::Phase::Options(haggled) => Phase::Options(Negotiation::resume(haggled)),
            carried::Phase::SkipOption(haggled, left) => {
                Phase::SkipOption(Negotiation::resume(haggled), left)
            }
            carried::Phase::Transmission {
                export,
                serial,
                size,
                style,
                status,
                next,
            } => {
                // Another disk may have its name by now.
                let same = |v: &Arc<dyn Volume>| v.serial() == serial && v.size() >= size;
                let volume = exports.get(&export).filter(same)?;
                let visit = volume.admit(&caller, PROTOCOL).ok()?;
                let agreed = Agreement {
                    export: Attached::new(volume, visit),
                    style,
                    status,
                };
                Phase::Transmission(Box::new(Transmission::resume(agreed, next)?))
            }
        };
        Some(NbdSession {
            peer: caller.to_string(),
            caller,
            exports,
            input: Input::of(&state.input),
            out: Output::default(),
            phase,
            ending: Ending::No,
            direct: false,
            full: false,
            frozen: false,
        })
    }

    /// True as long as nothing was sent and nothing received.
    fn is_new(&self) -> bool {
        matches!(self.phase, Phase::Greeting(_)) && self.input.is_empty() && self.out.is_untouched()
    }

    /// Who the client is, for the log.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// True between the answer to `STARTTLS` and [`tls_started`](Self::tls_started).
    pub(crate) fn awaits_tls(&self) -> bool {
        matches!(self.phase, Phase::AwaitTls(_)) && self.ending == Ending::No
    }

    /// True if nothing is left to send.
    pub(crate) fn all_sent(&self) -> bool {
        self.out.is_empty() || self.ending == Ending::Hard
    }

    /// True if nothing received from now on will be looked at.
    pub(crate) fn takes_no_more(&self) -> bool {
        self.ending != Ending::No
    }

    /// Ends the connection for a reason found outside this layer.
    pub(crate) fn cut_off(&mut self, reason: &str) {
        self.end(Ending::Hard, reason);
    }

    /// The name in the certificate the client showed.
    pub(crate) fn named(&mut self, name: String) {
        self.caller.name = Some(name);
        self.peer = self.caller.to_string();
    }

    /// From now on bytes pass through TLS.
    pub(crate) fn tls_started(&mut self) {
        self.caller.encrypted = true;
        self.phase = match std::mem::replace(&mut self.phase, Phase::Over) {
            Phase::AwaitTls(mut haggling) => {
                haggling.tls_started();
                Phase::Options(haggling)
            }
            other => other,
        };
    }

    fn end(&mut self, ending: Ending, reason: &str) {
        if self.ending == Ending::No || ending == Ending::Hard {
            self.ending = ending;
        }
        let in_flight = self.in_flight();
        match ending {
            Ending::Hard => {
                tracing::info!(peer = self.peer, in_flight, "NBD client cut off: {reason}")
            }
            _ => tracing::debug!(peer = self.peer, in_flight, "NBD connection ends: {reason}"),
        }
    }

    /// Handles everything received that can be handled now.
    fn pump(&mut self, cx: &mut SessionCx<'_>) {
        // Each round consumes input, or ends, so the receive buffer's length bounds the loop.
        self.full = false;
        while self.ending == Ending::No {
            // A write whose payload is there belongs to the requests that are finished first.
            let whole = matches!(&self.phase, Phase::Transmission(t) if t.payload_is_whole());
            if self.frozen && !whole {
                return;
            }
            let step = match &mut self.phase {
                Phase::Transmission(t) => t.step(&mut self.input, &mut self.out, cx),
                Phase::AwaitTls(_) if !self.input.is_empty() => {
                    // Bytes in the clear must never be taken for bytes that came through TLS.
                    Step::Broken("data between STARTTLS and TLS")
                }
                Phase::AwaitTls(_) | Phase::Over => Step::Starved,
                _ => self.haggle(),
            };
            match step {
                Step::More => {}
                Step::Starved => return,
                Step::Full => {
                    self.full = true;
                    return;
                }
                Step::Goodbye => self.end(Ending::Soft, "the client said goodbye"),
                Step::Broken(reason) => self.end(Ending::Hard, reason),
            }
        }
    }

    /// Handles the client's flags, or one option.
    fn haggle(&mut self) -> Step {
        let (phase, step) = match std::mem::replace(&mut self.phase, Phase::Over) {
            Phase::Greeting(mut haggling) => {
                let mut flags = [0; 4];
                if !self.input.peek(&mut flags) {
                    (Phase::Greeting(haggling), Step::Starved)
                } else {
                    self.input.consume(4);
                    let known = haggling.client_flags(u32::from_be_bytes(flags));
                    let step = if known {
                        Step::More
                    } else {
                        Step::Broken("unknown client flags")
                    };
                    (Phase::Options(haggling), step)
                }
            }
            Phase::SkipOption(haggling, left) => {
                let n = left.min(self.input.len() as u64);
                self.input.consume(n as usize);
                match left - n {
                    0 => (Phase::Options(haggling), Step::More),
                    left => (Phase::SkipOption(haggling, left), Step::Starved),
                }
            }
            Phase::Options(haggling) => self.option(haggling),
            other => (other, Step::Starved),
        };
        self.phase = phase;
        step
    }

    fn option(&mut self, mut haggling: Negotiation) -> (Phase, Step) {
        // A client waits for the answer before it sends the next option; if it does not, its
        // options wait, which bounds the memory of the answers.
        if !self.out.is_empty() {
            return (Phase::Options(haggling), Step::Full);
        }
        let mut raw = [0; OPTION_HEADER];
        if !self.input.peek(&mut raw) {
            return (Phase::Options(haggling), Step::Starved);
        }
        let mut r = Reader(&raw);
        let (Some(OPTION_MAGIC), Some(option), Some(len)) = (r.u64(), r.u32(), r.u32()) else {
            return (
                Phase::Over,
                Step::Broken("an option does not start with its magic number"),
            );
        };
        let mut answer = Vec::new();
        if len as usize > OPTION_MAX {
            if u64::from(len) > OPTION_SKIP_MAX || !haggling.count() {
                return (Phase::Over, Step::Broken("an option is absurdly long"));
            }
            let next = haggling.too_big(option, &mut answer);
            self.input.consume(OPTION_HEADER);
            self.out.bytes(&answer);
            return match next {
                Next::Drop(reason) => (Phase::Over, Step::Broken(reason)),
                _ => (Phase::SkipOption(haggling, u64::from(len)), Step::More),
            };
        }
        let Some(window) = self
            .input
            .window()
            .filter(|w| w.len() >= OPTION_HEADER + len as usize)
        else {
            return (Phase::Options(haggling), Step::Starved);
        };
        if !haggling.count() {
            return (Phase::Over, Step::Broken("more than 1024 options"));
        }
        let data = window.sub(OPTION_HEADER, len as usize);
        let next = haggling.option(
            option,
            data.bytes(),
            &self.exports,
            &self.caller,
            &mut answer,
        );
        self.input.consume(OPTION_HEADER + len as usize);
        self.out.bytes(&answer);
        match next {
            Next::Option => (Phase::Options(haggling), Step::More),
            Next::StartTls => (Phase::AwaitTls(haggling), Step::More),
            Next::Close => (Phase::Over, Step::Goodbye),
            Next::Drop(reason) => (Phase::Over, Step::Broken(reason)),
            Next::Enter(agreed) => {
                tracing::info!(
                    peer = self.peer,
                    export = agreed.export.name(),
                    style = ?agreed.style,
                    "NBD client connected"
                );
                (
                    Phase::Transmission(Box::new(Transmission::new(agreed))),
                    Step::More,
                )
            }
        }
    }
}

impl Session for NbdSession {
    fn recv_buf(&mut self, cx: &mut SessionCx<'_>) -> Option<BufSlice> {
        self.direct = false;
        if self.ending != Ending::No {
            return None;
        }
        self.pump(cx);
        if self.full || self.ending != Ending::No || self.closing() {
            return None;
        }
        let limit = match &self.phase {
            Phase::AwaitTls(_) | Phase::Over => return None,
            Phase::Transmission(t) => {
                if let Some(memory) = t.direct() {
                    self.direct = true;
                    return Some(memory);
                }
                t.recv_limit()
            }
            _ => usize::MAX,
        };
        self.input.space(limit)
    }

    fn wants_all(&self) -> bool {
        self.direct
    }

    fn received(&mut self, n: usize, cx: &mut SessionCx<'_>) {
        self.out.reclaim(cx.bufs);
        if n == 0 {
            return self.end(Ending::Soft, "the client closed it");
        }
        match &mut self.phase {
            Phase::Transmission(t) if self.direct => t.received_direct(n),
            _ => self.input.filled(n),
        }
        self.direct = false;
        self.pump(cx);
    }

    fn completed(&mut self, completion: Completion, cx: &mut SessionCx<'_>) {
        self.out.reclaim(cx.bufs);
        if let Phase::Transmission(t) = &mut self.phase {
            t.completed(completion, &mut self.out, cx);
        }
        self.pump(cx);
    }

    fn send_list(&mut self, out: &mut SendList) {
        if self.ending != Ending::Hard {
            self.out.list(out);
        }
    }

    fn sent(&mut self, n: usize, cx: &mut SessionCx<'_>) {
        let freed = self.out.sent(n, cx.bufs);
        if let Phase::Transmission(t) = &mut self.phase {
            t.freed(freed);
        }
        self.pump(cx);
    }

    fn closing(&self) -> bool {
        match self.ending {
            // A client that goes on asking would keep a disk that was removed; the others learn
            // of it now, and not from their next request.
            Ending::No => {
                matches!(&self.phase, Phase::Transmission(t) if t.is_over())
                    && self.in_flight() == 0
            }
            Ending::Soft => self.in_flight() == 0,
            Ending::Hard => true,
        }
    }

    fn memory(&self) -> Memory {
        let held = match &self.phase {
            Phase::Transmission(t) => t.memory(),
            _ => Memory::default(),
        };
        Memory {
            replies: self.out.cost(),
            waits: held.waits && self.ending == Ending::No,
            ..held
        }
    }

    fn shares(&self) -> Option<&Shares> {
        match &self.phase {
            Phase::Transmission(t) => Some(t.shares()),
            _ => None,
        }
    }

    fn resume(&mut self, cx: &mut SessionCx<'_>) {
        self.pump(cx);
    }

    fn shutdown(&mut self) {
        // Requests not yet taken are not refused either: a client told ESHUTDOWN passes an
        // error on to its guest, one that is cut off reconnects and asks again.
        if self.ending == Ending::No {
            self.end(Ending::Soft, "the server is stopping");
        }
    }

    fn freeze(&mut self) -> bool {
        self.frozen = self.ending == Ending::No
            && match &self.phase {
                Phase::Greeting(h) | Phase::Options(h) | Phase::SkipOption(h, _) => {
                    h.carry().is_some()
                }
                Phase::AwaitTls(_) | Phase::Over => false,
                Phase::Transmission(_) => true,
            };
        self.frozen
    }

    fn carry(&mut self) -> Option<Vec<u8>> {
        let new = self.is_new();
        let at_rest = self.frozen && self.ending == Ending::No && self.in_flight() == 0;
        if !at_rest || !(new || self.out.is_empty()) {
            return None;
        }
        let phase = match &self.phase {
            Phase::Greeting(_) if new => carried::Phase::New,
            Phase::Greeting(_) => carried::Phase::Greeted,
            Phase::Options(haggling) => carried::Phase::Options(haggling.carry()?),
            Phase::SkipOption(haggling, left) => {
                carried::Phase::SkipOption(haggling.carry()?, *left)
            }
            Phase::Transmission(t) => t.carry(),
            Phase::AwaitTls(_) | Phase::Over => return None,
        };
        let input = self.input.unread();
        Some(State { phase, input }.encode())
    }

    fn in_flight(&self) -> usize {
        match &self.phase {
            Phase::Transmission(t) => t.in_flight(),
            _ => 0,
        }
    }

    fn handshaking(&self) -> bool {
        !matches!(self.phase, Phase::Transmission(_))
    }
}

impl Drop for NbdSession {
    fn drop(&mut self) {
        tracing::debug!(peer = self.peer, "NBD connection closed");
    }
}
