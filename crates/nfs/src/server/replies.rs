//! Answers that are kept, because their call may come again (a duplicate request cache).
//!
//! A client that hears nothing sends its call again, with the same number; often over a new connection, because
//! the old one was lost and the answer with it. To create the file a second time would answer
//! "exists" to the one who created it. So the answers to calls that change something are kept for a while, and
//! a call that is still being carried out is not begun again.
//!
//! There is a second kind of repetition. A call that takes too long is answered JUKEBOX: the client
//! asks again under a *new* number, while the first may yet succeed. Such a call, if it is about names or
//! attributes, is known again by its content, and gets the outcome of the first: once, and only if its client asks in time and has done
//! nothing else with the same name meanwhile. One that waits does not; one that does has given up, and a call that looks the same
//! is a new one. Writes are not known again: their repetition may bring newer
//! data; they wait (see [`pool`](super::pool)). What of this has to outlive the process is in the [ledger](crate::ledger).

use std::collections::hash_map::RandomState;
use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasher;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::flight::{Flight, Noted};
use super::link::Answer;
use crate::ledger::AGAIN_WITHIN;
use crate::rpc;
use crate::v3::{Args, Procedure};

/// Answers kept for each client: more than a client has under way at once.
const ANSWERS_MAX: usize = 1024;
/// Calls of a client that was told to ask again for them: their answers stay however many others come. More than can have been begun.
const ABANDONED_MAX: usize = 256;
/// Clients for which answers are kept.
const CLIENTS_MAX: usize = 256;
/// Longest answer that is kept: all answers to changes are far shorter.
const ANSWER_MAX: usize = 1024;
/// How much of a call is looked at to tell it from another of the same number: the longest header, with
/// the name of the machine in it (hosts behind one address may number alike), and all arguments but data.
pub(crate) const LOOKED_AT: usize = 1536;

/// By what a call is known again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Slip {
    client: IpAddr,
    xid: u32,
    content: Content,
    /// Names or files it is about, as its client's.
    about: [Option<u64>; 2],
}

impl Slip {
    /// Who sent it.
    pub fn client(&self) -> IpAddr {
        self.client
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Content {
    procedure: Procedure,
    len: usize,
    hash: u64,
}

enum Entry {
    UnderWay(Arc<Flight>),
    Ended(Vec<u8>),
}

#[derive(Default)]
struct Client {
    entries: HashMap<(u32, Content), Entry>,
    /// In the order in which they came.
    order: VecDeque<(u32, Content)>,
    /// Answered JUKEBOX and begun: by their content.
    abandoned: HashMap<Content, Abandoned>,
    used: u64,
}

/// A call that was answered JUKEBOX and begun.
struct Abandoned {
    xid: u32,
    about: Option<u64>,
    /// When its client was told so last.
    told: Instant,
    noted: Option<Noted>,
}

#[derive(Default)]
struct State {
    clients: HashMap<IpAddr, Client>,
    clock: u64,
}

/// What is known of a call that came.
pub(super) enum Known {
    /// Nothing; it is under way now.
    New,
    /// It came before: this was the answer.
    Ended(Vec<u8>),
    /// The same, and its client had been told to ask again: it does, and this is noted.
    Taken(Vec<u8>, Option<Noted>),
    /// It came before, and is being carried out.
    UnderWay(Arc<Flight>),
    /// It is a repetition, under a new number, of one that is still being carried out.
    Hangs(Arc<Flight>),
}

/// See the module.
#[derive(Default)]
pub(super) struct Replies {
    state: Mutex<State>,
    /// Nobody outside can make two calls look the same.
    hash: RandomState,
}

impl Replies {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// By what a call will be known again.
    pub fn slip(&self, client: IpAddr, xid: u32, args: &Args<'_>, message: &[u8]) -> Slip {
        let content = Content {
            procedure: args.procedure(),
            len: message.len(),
            hash: self.hash.hash_one(content(message)),
        };
        let machine = rpc::machine(message);
        let about = args
            .about()
            .map(|about| about.map(|(dir, name)| self.hash.hash_one((machine, dir, name))));
        Slip {
            client,
            xid,
            content,
            about,
        }
    }

    /// The answer to a call that has ended.
    pub fn of(&self, slip: &Slip) -> Option<Vec<u8>> {
        let state = self.lock();
        match state
            .clients
            .get(&slip.client)?
            .entries
            .get(&(slip.xid, slip.content))?
        {
            Entry::Ended(answer) => Some(answer.clone()),
            Entry::UnderWay(_) => None,
        }
    }

    /// A call has come; `make` begins it if it is new.
    pub fn take(
        &self,
        slip: &Slip,
        at: Instant,
        make: impl FnOnce() -> Arc<Flight>,
    ) -> (Known, Option<Arc<Flight>>) {
        let mut state = self.lock();
        state.clock += 1;
        let now = state.clock;
        if !state.clients.contains_key(&slip.client) && state.clients.len() >= CLIENTS_MAX {
            let idle = state
                .clients
                .iter()
                .min_by_key(|(_, c)| c.used)
                .map(|(ip, _)| *ip);
            if let Some(idle) = idle {
                state.clients.remove(&idle);
            }
        }
        let client = state.clients.entry(slip.client).or_default();
        client.used = now;
        let key = (slip.xid, slip.content);
        match client.entries.get(&key) {
            Some(Entry::Ended(answer)) => {
                let answer = answer.clone();
                // Who asks under the same number was not told to ask again: that was lost.
                let told = |a: &&Abandoned| a.xid == slip.xid;
                if client.abandoned.get(&slip.content).filter(told).is_none() {
                    return (Known::Ended(answer), None);
                }
                let gone = client.abandoned.remove(&slip.content);
                let noted = gone.and_then(|gone| gone.noted);
                return (Known::Taken(answer, noted), None);
            }
            Some(Entry::UnderWay(flight)) => return (Known::UnderWay(Arc::clone(flight)), None),
            None => {}
        }
        let Client {
            entries, abandoned, ..
        } = client;
        abandoned.retain(|content, other| {
            let hangs = || match entries.get(&(other.xid, *content)) {
                Some(Entry::UnderWay(_)) => true,
                Some(Entry::Ended(_)) | None => false,
            };
            let in_time = at.saturating_duration_since(other.told) <= AGAIN_WITHIN || hangs();
            // A write may well come beside it, and comes again itself.
            let other_change = slip.content.procedure != Procedure::Write;
            let touched =
                other_change && other.about.is_some() && slip.about.contains(&other.about);
            *content == slip.content || (in_time && !touched)
        });
        if let Some(first) = client.abandoned.get_mut(&slip.content) {
            match client.entries.get(&(first.xid, slip.content)) {
                Some(Entry::UnderWay(flight)) => {
                    first.told = at;
                    return (Known::Hangs(Arc::clone(flight)), None);
                }
                Some(Entry::Ended(answer))
                    if at.saturating_duration_since(first.told) <= AGAIN_WITHIN =>
                {
                    // Told once: who asks a third time means a new call.
                    let answer = renumbered(answer, slip.xid);
                    let gone = client.abandoned.remove(&slip.content);
                    client.put(key, Entry::Ended(answer.clone()));
                    let noted = gone.and_then(|gone| gone.noted);
                    return (Known::Taken(answer, noted), None);
                }
                _ => {
                    client.abandoned.remove(&slip.content);
                }
            }
        }
        let flight = make();
        client.put(key, Entry::UnderWay(Arc::clone(&flight)));
        (Known::New, Some(flight))
    }

    /// A call was carried out. `late`: after its client was told to ask again.
    pub fn ended(&self, slip: &Slip, answer: &Answer, late: bool) {
        let mut state = self.lock();
        let Some(client) = state.clients.get_mut(&slip.client) else {
            return;
        };
        let key = (slip.xid, slip.content);
        match answer.short(ANSWER_MAX) {
            Some(bytes) if client.entries.contains_key(&key) => {
                client.entries.insert(key, Entry::Ended(bytes));
            }
            _ => {
                client.entries.remove(&key);
            }
        }
        // A write's repetition is carried out, after this one.
        if late && slip.content.procedure == Procedure::Write {
            client.entries.remove(&key);
        }
    }

    /// A call's client was told to ask again, and the call is being carried out nevertheless.
    pub fn abandoned(&self, slip: &Slip, noted: Option<Noted>, at: Instant) {
        if slip.content.procedure == Procedure::Write {
            return;
        }
        let mut state = self.lock();
        if let Some(client) = state.clients.get_mut(&slip.client) {
            let abandoned = Abandoned {
                xid: slip.xid,
                about: slip.about[0],
                told: at,
                noted,
            };
            client.abandoned.insert(slip.content, abandoned);
        }
    }

    /// A call was not begun, and will not be.
    pub fn forget(&self, slip: &Slip) {
        let mut state = self.lock();
        if let Some(client) = state.clients.get_mut(&slip.client) {
            client.entries.remove(&(slip.xid, slip.content));
        }
    }
}

impl Client {
    fn put(&mut self, key: (u32, Content), entry: Entry) {
        self.entries.insert(key, entry);
        self.order.push_back(key);
        // Those under way stay, and those that will be asked for again, or a repetition would begin them again. There are not so many.
        let mut looked_at = 0;
        while self.order.len() > ANSWERS_MAX && looked_at < ANSWERS_MAX {
            looked_at += 1;
            let Some(oldest) = self.order.pop_front() else {
                break;
            };
            let asked_again = |a: &Abandoned| a.xid == oldest.0;
            let waited_for = self.abandoned.len() <= ABANDONED_MAX
                && self.abandoned.get(&oldest.1).is_some_and(asked_again);
            if waited_for || matches!(self.entries.get(&oldest), Some(Entry::UnderWay(_))) {
                self.order.push_back(oldest);
            } else if !self.order.contains(&oldest) {
                self.entries.remove(&oldest);
                let its = |a: &Abandoned| a.xid == oldest.0;
                if self.abandoned.get(&oldest.1).is_some_and(its) {
                    self.abandoned.remove(&oldest.1);
                }
            }
        }
    }
}

/// What of a message is the same when a client asks again under another number: the number is left out, and the stamp of the credential, which
/// a machine may choose anew each time.
pub(crate) fn content(message: &[u8]) -> [&[u8]; 2] {
    /// Number, kind, version; program, version, procedure; kind of the credential and its length.
    const STAMP: usize = 8 * 4;
    let looked_at = &message[..message.len().min(LOOKED_AT)];
    let rest = looked_at.get(4..).unwrap_or_default();
    match rest.split_at_checked(STAMP - 4) {
        Some((head, rest)) if rpc::has_stamp(message) => [head, rest.get(4..).unwrap_or_default()],
        _ => [rest, &[]],
    }
}

/// The same answer to a call of another number.
fn renumbered(answer: &[u8], xid: u32) -> Vec<u8> {
    let mut answer = answer.to_vec();
    if let Some(head) = answer.first_chunk_mut() {
        *head = xid.to_be_bytes();
    }
    answer
}
