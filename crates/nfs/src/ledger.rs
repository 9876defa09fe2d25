//! Calls that had been begun when the daemon was killed.
//!
//! A client that hears nothing sends its call again, to the next process as well. There, what the call did before
//! is no longer known: a rename finds its source gone and fails, though it is this very call that
//! moved it, and somebody's `mv` ends with "no such file". So what changes names or attributes is written down before it
//! is begun and again when it has ended well, in a file beside the export's identity, and the process after a kill
//! looks there before it carries such a call out.
//!
//! Who was told to ask again (JUKEBOX), because the call took too long, does so under a *new* number, by which the call is
//! not known; and what was begun for the first one may have been done when the process is killed. So before a client is told so of something that
//! was begun, the call is written down by its content, number and all else that may differ left out ([`Ledger::told`]). The next process takes a call of
//! that content for the same one: once, within [`AGAIN_WITHIN`], and only if this client has done nothing else with the name
//! meanwhile, for one that waits does not: then it has given up, and means a new call.
//!
//! The file is a ring of [`SLOTS`] slots, written in place and never synced: what a process has
//! written outlives it, and that is all that is asked. A power cut may leave any mixture of old and new slots,
//! each with a sum of its own; then a repeated call may be told "no such file", as by any other server.
//! The format is in `docs/datastore.md`.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ring::hmac;

use crate::handle::Key;
use crate::identity::Identity;
use crate::rpc;
use crate::server::{LOOKED_AT, content};
use crate::v3::Time;

const NAME: &str = "calls";
const MAGIC: &[u8; 8] = b"HRTHCAL1";
/// Slots of the ring: more than all clients together have under way that change names.
const SLOTS: u32 = 1024;
/// Bytes of a slot.
const SLOT: usize = 64;
/// Where the first slot is.
const FIRST: u64 = 64;
/// How far the times of files may be behind the clock: they are those of its last tick.
pub(crate) const SLACK: Duration = Duration::from_millis(20);

/// What is said where the file cannot be used.
const UNNOTED: &str = "calls under way cannot be noted: after a kill a repeated rename may be told that there is no such file";

/// Within this time a client asks again that was told to: some take a minute, and one whose server was away
/// may need another to find it.
pub(crate) const AGAIN_WITHIN: Duration = Duration::from_secs(300);
/// Calls that clients are told to ask again for at once: more than can have been begun.
const TOLD_MAX: usize = 256;
// Each of them takes a slot of its own and spares that of its call; half of the ring stays for what comes and goes.
const _: () = assert!(2 * TOLD_MAX <= SLOTS as usize / 2);

const BEGUN: u8 = 1;
const ENDED: u8 = 2;
const TOLD: u8 = 3;
const ANSWERED: u8 = 4;

/// By what a call is known again: who sent it, its number, and what it says.
pub(crate) type Id = [u8; 16];
/// A name in a directory, for those who make one; the file, for those who move one.
pub(crate) type Place = [u8; 8];
/// No name is made.
pub(crate) const NOWHERE: Place = [0; 8];

/// What is known of a call when it comes.
#[derive(Clone, Copy)]
pub(crate) struct Known {
    /// By which it is known again under the same number.
    pub id: Id,
    /// The same under any number.
    pub content: Id,
    pub number: u32,
    /// The name it is about, as this client's.
    pub about: Place,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slot {
    state: u8,
    /// The call; its content, if its client was told to ask again.
    id: Id,
    /// What it makes or moves; of one whose client was told to ask again, the name it is about.
    place: Place,
    /// When it came to this state, since 1970.
    at: Duration,
    /// Of one whose client was told to ask again: the number it had, or that of the repetition which was answered.
    number: u32,
}

/// What is known of a call from before the kill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Before {
    /// It had been begun, and may have done all, something or nothing.
    Begun(Window),
    /// It had ended well.
    Ended,
}

/// The time in which a call of the process before was carried out, if it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    from: Duration,
    until: Duration,
    /// Nobody else made the same name then.
    pub alone: bool,
    /// What was noted with it.
    pub place: Place,
}

impl Window {
    /// One that has not begun yet.
    #[cfg(test)]
    pub fn far_ahead() -> Window {
        Window {
            from: now() + Duration::from_secs(3600),
            until: Duration::ZERO,
            alone: true,
            place: NOWHERE,
        }
    }

    /// True if something that was changed at this time can have been changed by the call.
    pub fn holds(&self, time: Time) -> bool {
        let time =
            Duration::new(u64::from(time.seconds), 0) + Duration::from_nanos(u64::from(time.nanos));
        time + SLACK >= self.from && time <= self.until + SLACK
    }
}

/// See the module.
pub struct Ledger {
    file: File,
    key: hmac::Key,
    opened: Duration,
    state: Mutex<State>,
    /// Whoever notes what clients were told or answered has this until it is written: the file says last what was said last, and a slot is
    /// free only once nothing is on its way there.
    telling: Mutex<()>,
}

#[derive(Default)]
struct State {
    /// From before, until they are asked for.
    before: HashMap<Id, Slot>,
    /// By content: those whose clients were told to ask again, and have not had their answer.
    told: HashMap<Id, Told>,
    /// Slots of calls under way, and which these are.
    under_way: HashMap<u32, Id>,
    /// Slots of calls that this process has ended well, until something else is written there.
    ended: HashMap<u32, Id>,
    next: u32,
    failed: bool,
}

/// A call whose client was told to ask again.
#[derive(Clone, Copy)]
struct Told {
    at: u32,
    slot: Slot,
    /// The call itself; none if that was a process before.
    call: Option<Id>,
    /// The slot of that call: without it, a note that its client asks again says nothing. Of one that a process before noted it is not known,
    /// so a second kill may lose it, if a thousand changes come between the two and before the client.
    its: Option<u32>,
}

impl Told {
    /// This slot must stay as it is, for the client has not asked again.
    fn needs(&self, at: u32) -> bool {
        // Who was answered is known by the answer.
        self.at == at || (self.slot.state == TOLD && self.its == Some(at))
    }
}

impl State {
    /// A slot to be written next: not one that is still of use. Not all can be: those of use for what clients were told are two for each of
    /// [`TOLD_MAX`], and further ones only belong to calls under way, each of which holds a worker.
    fn free(&mut self) -> u32 {
        let mut at = self.next;
        let of_use = |at: u32| {
            self.under_way.contains_key(&at) || self.told.values().any(|told| told.needs(at))
        };
        for _ in 0..SLOTS {
            if !of_use(at) {
                break;
            }
            at = (at + 1) % SLOTS;
        }
        self.next = (at + 1) % SLOTS;
        self.ended.remove(&at);
        at
    }

    /// The slot of a call of this process.
    fn slot_of(&self, call: &Id) -> Option<u32> {
        let slots = self.under_way.iter().chain(&self.ended);
        let mut its = slots.filter(|(_, id)| *id == call);
        its.next().map(|(at, _)| *at)
    }
}

/// A call that is written down as begun.
#[derive(Clone, Copy)]
pub(crate) struct Entry {
    at: u32,
    slot: Slot,
}

pub(crate) fn now() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

impl Slot {
    fn write(&self) -> [u8; SLOT] {
        let mut bytes = [0; SLOT];
        bytes[0] = self.state;
        bytes[8..24].copy_from_slice(&self.id);
        bytes[24..32].copy_from_slice(&self.place);
        bytes[32..40].copy_from_slice(&self.at.as_secs().to_be_bytes());
        bytes[40..44].copy_from_slice(&self.at.subsec_nanos().to_be_bytes());
        bytes[44..48].copy_from_slice(&self.number.to_be_bytes());
        let sum = sum(&bytes[..48]);
        bytes[48..].copy_from_slice(&sum);
        bytes
    }

    /// `None` for one that was never used, or is damaged.
    fn read(bytes: &[u8; SLOT]) -> Option<Slot> {
        let state = bytes[0];
        if sum(&bytes[..48]) != bytes[48..] || !matches!(state, BEGUN | ENDED | TOLD | ANSWERED) {
            return None;
        }
        let seconds = u64::from_be_bytes(*bytes[32..].first_chunk()?);
        let nanos = u32::from_be_bytes(*bytes[40..].first_chunk()?);
        Some(Slot {
            state,
            id: *bytes[8..].first_chunk()?,
            place: *bytes[24..].first_chunk()?,
            at: Duration::from_secs(seconds).checked_add(Duration::from_nanos(nanos.into()))?,
            number: u32::from_be_bytes(*bytes[44..].first_chunk()?),
        })
    }
}

fn octets(client: IpAddr) -> [u8; 16] {
    match client {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

fn len(message: &[u8]) -> [u8; 8] {
    (message.len() as u64).to_be_bytes()
}

fn sum(bytes: &[u8]) -> [u8; 16] {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    let mut sum = [0; 16];
    sum.copy_from_slice(&digest.as_ref()[..16]);
    sum
}

impl Ledger {
    /// The ledger kept in `state`, beside the export's identity; an empty one where there is none, or one of another version.
    pub fn open(state: &Path, identity: &Identity) -> io::Result<Ledger> {
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(state.join(NAME))?;
        let len = FIRST + u64::from(SLOTS) * SLOT as u64;
        let mut bytes = vec![0; len as usize];
        let whole = file.metadata()?.len() == len;
        if whole {
            file.read_exact_at(&mut bytes, 0)?;
        }
        let mut known = State::default();
        if whole && bytes.starts_with(MAGIC) {
            let slots = bytes[FIRST as usize..].as_chunks().0;
            let read = slots.iter().enumerate();
            let read = read.filter_map(|(n, bytes)| Some((n as u32, Slot::read(bytes)?)));
            let mut newest = Duration::ZERO;
            for (n, slot) in read {
                // The ring goes on behind what was written last.
                if slot.at >= newest {
                    newest = slot.at;
                    known.next = (n + 1) % SLOTS;
                }
                if matches!(slot.state, TOLD | ANSWERED) {
                    let told = Told {
                        at: n,
                        slot,
                        call: None,
                        its: None,
                    };
                    let kept = known.told.entry(slot.id).or_insert(told);
                    if slot.at >= kept.slot.at {
                        *kept = told;
                    }
                    continue;
                }
                // A repetition has a slot of its own.
                let kept = known.before.entry(slot.id).or_insert(slot);
                if slot.at >= kept.at {
                    *kept = slot;
                }
            }
        } else {
            file.set_len(0)?;
            file.set_len(len)?;
            file.write_all_at(MAGIC, 0)?;
        }
        Ok(Ledger {
            file,
            key: hmac::Key::new(hmac::HMAC_SHA256, &identity.secret),
            opened: now(),
            state: Mutex::new(known),
            telling: Mutex::default(),
        })
    }

    /// The same; none, and a warning, if it cannot be opened.
    pub fn beside(state: &Path, identity: &Identity) -> Option<Arc<Ledger>> {
        Ledger::open(state, identity)
            .map(Arc::new)
            .inspect_err(|error| {
                tracing::warn!(%error, state = %state.display(), "{UNNOTED}");
            })
            .ok()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn telling(&self) -> MutexGuard<'_, ()> {
        self.telling.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As if the disk it lies on hung: nothing is noted until this is dropped.
    #[cfg(test)]
    pub(crate) fn hung(&self) -> impl Drop + '_ {
        self.lock()
    }

    fn seal<const N: usize>(&self, parts: &[&[u8]]) -> [u8; N] {
        let mut context = hmac::Context::with_key(&self.key);
        for part in parts {
            context.update(&(part.len() as u64).to_be_bytes());
            context.update(part);
        }
        let mut sealed = [0; N];
        sealed.copy_from_slice(&context.sign().as_ref()[..N]);
        sealed
    }

    /// By what a message, which begins with its number, is known again. It is about a name in a directory, or a file.
    pub(crate) fn known(&self, client: IpAddr, message: &[u8], about: (&[u8], &[u8])) -> Known {
        let [head, rest] = content(message);
        let content = self.seal(&[b"content", &octets(client), &len(message), head, rest]);
        let number = message.first_chunk().map_or(0, |n| u32::from_be_bytes(*n));
        Known {
            id: self.id(client, message),
            content,
            number,
            about: self.about(client, message, about),
        }
    }

    fn id(&self, client: IpAddr, message: &[u8]) -> Id {
        let looked_at = &message[..message.len().min(LOOKED_AT)];
        self.seal(&[&octets(client), &len(message), looked_at])
    }

    /// A name as that of a client; several may be behind one address.
    fn about(&self, client: IpAddr, message: &[u8], (dir, name): (&[u8], &[u8])) -> Place {
        let machine = rpc::machine(message);
        self.seal(&[b"about", &octets(client), machine, dir, name])
    }

    /// The name that a call makes.
    pub(crate) fn place(&self, dir: &[u8], name: &[u8]) -> Place {
        self.seal(&[b"place", dir, name])
    }

    /// The file that a call moves.
    pub(crate) fn moved(&self, file: &Key) -> Place {
        self.seal(&[b"moved", file.bytes()])
    }

    /// What was known of a call before. Asked for once: further repetitions are found among this process's answers.
    pub(crate) fn recall(&self, id: &Id) -> Option<Before> {
        let mut state = self.lock();
        let slot = *state.before.get(id)?;
        if slot.state == ENDED {
            state.before.remove(id);
            return Some(Before::Ended);
        }
        // Of two that were making one name when the process was killed nobody can say who did; and one that
        // ended well meanwhile did. What has the same time is a repetition under another number.
        let rival = |other: &Slot| {
            other.id != slot.id
                && other.place == slot.place
                && (other.state != BEGUN || other.at != slot.at)
                && (other.state == BEGUN || other.at + SLACK >= slot.at)
        };
        let alone = slot.place == NOWHERE || !state.before.values().any(rival);
        // It stays while it may have rivals that ask after it.
        Some(Before::Begun(Window {
            from: slot.at,
            until: self.opened,
            alone,
            place: slot.place,
        }))
    }

    /// The same of a call that comes under a new number, because its client was told so by a process before: what was known, and
    /// by what it was known then.
    pub(crate) fn recall_told(
        &self,
        client: IpAddr,
        message: &[u8],
        known: &Known,
        now: Duration,
    ) -> Option<(Before, Id)> {
        let told = *self
            .lock()
            .told
            .get(&known.content)
            .filter(|t| t.call.is_none())?;
        if told.slot.state == ANSWERED {
            return (told.slot.number == known.number).then_some((Before::Ended, known.id));
        }
        let mut first = message.to_vec();
        first
            .first_chunk_mut::<4>()?
            .copy_from_slice(&told.slot.number.to_be_bytes());
        let id = self.id(client, &first);
        let last = {
            let state = self.lock();
            let slot = state.before.get(&id)?;
            match slot.state {
                ENDED => slot.at.max(told.slot.at),
                // It hung until the process was killed.
                _ => self.opened,
            }
        };
        if now > last + AGAIN_WITHIN {
            return None;
        }
        Some((self.recall(&id)?, id))
    }

    /// A client is about to be told to ask again for what was begun.
    pub(crate) fn told(&self, known: &Known) {
        let slot = Slot {
            state: TOLD,
            id: known.content,
            place: known.about,
            at: now(),
            number: known.number,
        };
        let _telling = self.telling();
        let at = {
            let mut state = self.lock();
            let same = state.told.get(&slot.id).map(|told| told.at);
            if same.is_none() && state.told.len() >= TOLD_MAX {
                return;
            }
            let at = same.unwrap_or_else(|| state.free());
            let told = Told {
                at,
                slot,
                call: Some(known.id),
                its: state.slot_of(&known.id),
            };
            state.told.insert(slot.id, told);
            at
        };
        self.put(at, &slot.write());
    }

    /// The client has asked again, under this number, and is about to be answered what came of it: that it went well, or not.
    pub(crate) fn answered(&self, known: &Known, number: u32, well: bool) {
        if !well {
            return self.untold(&known.content);
        }
        let _telling = self.telling();
        let told = {
            let mut state = self.lock();
            let Some(told) = state.told.get_mut(&known.content) else {
                return;
            };
            told.slot = Slot {
                state: ANSWERED,
                at: now(),
                number,
                ..told.slot
            };
            *told
        };
        self.put(told.at, &told.slot.write());
    }

    /// Nobody asks again for this any more.
    pub(crate) fn untold(&self, content: &Id) {
        let _telling = self.telling();
        let told = self.lock().told.get(content).copied();
        if let Some(told) = told {
            self.put(told.at, &[0; SLOT]);
            self.lock().told.remove(content);
        }
    }

    /// A client does something with these names: for nothing else that is about them will it ask again. Nor will anybody for what is long
    /// past.
    pub(crate) fn touched(
        &self,
        client: IpAddr,
        message: &[u8],
        known: &Known,
        names: &[(&[u8], &[u8])],
        now: Duration,
    ) {
        let gone: Vec<Id> = {
            let state = self.lock();
            if state.told.is_empty() {
                return;
            }
            let about: Vec<Place> = names
                .iter()
                .map(|name| self.about(client, message, *name))
                .collect();
            let other = |told: &&Told| {
                // While it is under way its client is told so over and over.
                let hangs = told
                    .call
                    .is_some_and(|call| state.under_way.values().any(|id| *id == call));
                let long_past = now > told.slot.at.max(self.opened) + AGAIN_WITHIN;
                told.slot.id != known.content
                    && ((long_past && !hangs)
                        || (told.slot.state == TOLD && about.contains(&told.slot.place)))
            };
            state
                .told
                .values()
                .filter(other)
                .map(|t| t.slot.id)
                .collect()
        };
        for content in gone {
            self.untold(&content);
        }
    }

    /// A call begins; again, if the process before was at it in this window.
    pub(crate) fn begin(&self, id: Id, place: Place, again: Option<Window>) -> Entry {
        let at = {
            let mut state = self.lock();
            let at = state.free();
            state.under_way.insert(at, id);
            at
        };
        let slot = Slot {
            state: BEGUN,
            id,
            place,
            at: again.map_or_else(now, |window| window.from),
            number: 0,
        };
        self.put(at, &slot.write());
        Entry { at, slot }
    }

    /// It has ended. What failed has changed nothing, and may be tried again.
    pub(crate) fn end(&self, entry: Entry, well: bool) {
        let slot = Slot {
            state: ENDED,
            at: now(),
            ..entry.slot
        };
        let bytes = if well { slot.write() } else { [0; SLOT] };
        self.put(entry.at, &bytes);
        let mut state = self.lock();
        state.under_way.remove(&entry.at);
        if well {
            state.ended.insert(entry.at, entry.slot.id);
        }
        state.before.remove(&entry.slot.id);
        let told = |told: &&mut Told| told.call == Some(entry.slot.id);
        if let Some(told) = state.told.values_mut().find(told) {
            told.slot.at = slot.at;
        }
    }

    fn put(&self, at: u32, bytes: &[u8; SLOT]) {
        let offset = FIRST + u64::from(at) * SLOT as u64;
        if let Err(error) = self.file.write_all_at(bytes, offset) {
            // Only the comfort of clients after a kill depends on it.
            if !std::mem::replace(&mut self.lock().failed, true) {
                tracing::warn!(%error, "{UNNOTED}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDENTITY: Identity = Identity {
        store: 7,
        secret: [9; 32],
    };

    fn open(dir: &Path) -> Ledger {
        Ledger::open(dir, &IDENTITY).expect("opened")
    }

    fn begun(ledger: &Ledger, id: &Id) -> Option<Window> {
        match ledger.recall(id) {
            Some(Before::Begun(window)) => Some(window),
            _ => None,
        }
    }

    #[test]
    fn a_slot_looks_like_this() {
        let slot = Slot {
            state: ENDED,
            id: *b"sixteen bytes id",
            place: *b"in a dir",
            at: Duration::new(0x0102_0304, 0x0a0b_0c0d),
            number: 0,
        };
        let bytes = slot.write();
        let head = b"\x02\0\0\0\0\0\0\0sixteen bytes idin a dir\0\0\0\0\x01\x02\x03\x04\x0a\x0b\x0c\x0d\0\0\0\0";
        assert_eq!(bytes[..48], head[..]);
        // By another program: the first half of SHA-256.
        let sum = [
            202, 90, 144, 196, 136, 194, 93, 222, 147, 238, 50, 212, 234, 189, 124, 239,
        ];
        assert_eq!(bytes[48..], sum);
        assert_eq!(Slot::read(&bytes), Some(slot));
        for at in 0..SLOT {
            let mut damaged = bytes;
            damaged[at] ^= 1;
            assert_eq!(Slot::read(&damaged), None, "byte {at}");
        }
        let told = Slot {
            state: TOLD,
            number: 0x1122_3344,
            ..slot
        };
        let bytes = told.write();
        assert_eq!((bytes[0], &bytes[44..48]), (3, &b"\x11\x22\x33\x44"[..]));
        assert_eq!(Slot::read(&bytes), Some(told));
    }

    const LOCK: (&[u8], &[u8]) = (b"dir", b"lock");

    fn at(client: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, client])
    }

    /// A call of some content, under a number.
    fn message(number: u32, content: &[u8]) -> Vec<u8> {
        [&number.to_be_bytes(), content].concat()
    }

    /// The process that began the call is killed, after it was ended or before, and after its client was told to ask again.
    fn told_and_killed(dir: &Path, ended: bool) -> Ledger {
        let ledger = open(dir);
        let known = ledger.known(at(1), &message(1, b"create"), LOCK);
        let entry = ledger.begin(known.id, ledger.place(LOCK.0, LOCK.1), None);
        ledger.told(&known);
        if ended {
            ledger.end(entry, true);
        }
        open(dir)
    }

    /// What is known of a call, in the eyes of a process, so long after now.
    fn again(ledger: &Ledger, client: u8, message: &[u8], later: Duration) -> Option<Before> {
        let known = ledger.known(at(client), message, LOCK);
        let before = ledger.recall(&known.id);
        before.or_else(|| {
            let told = ledger.recall_told(at(client), message, &known, now() + later)?;
            Some(told.0)
        })
    }

    #[test]
    fn what_a_client_was_told_to_ask_again_for_is_known_under_another_number() {
        for ended in [true, false] {
            let dir = tempfile::tempdir().expect("a directory");
            let ledger = told_and_killed(dir.path(), ended);
            let create = message(2, b"create");
            let soon = Duration::ZERO;
            // Neither of another client, nor another call, nor one that comes far too late.
            assert_eq!(again(&ledger, 2, &create, soon), None);
            assert_eq!(again(&ledger, 1, &message(2, b"created"), soon), None);
            let late = AGAIN_WITHIN + Duration::from_secs(1);
            assert_eq!(again(&ledger, 1, &create, late), None);
            let found = again(&ledger, 1, &create, soon);
            match ended {
                true => assert_eq!(found, Some(Before::Ended)),
                false => assert!(matches!(found, Some(Before::Begun(w)) if w.alone)),
            }
        }
    }

    #[test]
    fn a_client_that_does_something_else_with_the_name_does_not_ask_again() {
        let touch = |client: u8, what: &[u8], name: &[u8]| {
            let dir = tempfile::tempdir().expect("a directory");
            let ledger = told_and_killed(dir.path(), true);
            let about = (LOCK.0, name);
            let known = ledger.known(at(client), what, about);
            ledger.touched(at(client), what, &known, &[about], now());
            let found = again(&ledger, 1, &message(2, b"create"), Duration::ZERO);
            // The next process knows as much.
            let next = again(&open(dir.path()), 1, &message(2, b"create"), Duration::ZERO);
            assert_eq!(found, next);
            found
        };
        let remove = message(9, b"remove");
        assert_eq!(touch(1, &remove, b"lock"), None);
        assert_eq!(touch(1, &remove, b"lock2"), Some(Before::Ended));
        assert_eq!(touch(2, &remove, b"lock"), Some(Before::Ended));
        // The very repetition.
        let create = message(2, b"create");
        assert_eq!(touch(1, &create, b"lock"), Some(Before::Ended));
    }

    #[test]
    fn what_was_told_is_known_to_who_was_told_it_alone() {
        let dir = tempfile::tempdir().expect("a directory");
        for (well, told) in [(true, Some(Before::Ended)), (false, None)] {
            let first = open(dir.path());
            let known = first.known(at(1), &message(1, b"create"), LOCK);
            let entry = first.begin(known.id, NOWHERE, None);
            first.told(&known);
            first.end(entry, well);
            first.answered(&known, 2, well);
            let second = open(dir.path());
            let soon = Duration::ZERO;
            assert_eq!(again(&second, 1, &message(2, b"create"), soon), told);
            // A second attempt, which must fail.
            assert_eq!(again(&second, 1, &message(3, b"create"), soon), None);
            second.untold(&known.content);
        }
    }

    /// A machine may put another stamp into each call.
    #[test]
    fn a_stamp_makes_no_other_call() {
        let dir = tempfile::tempdir().expect("a directory");
        let ledger = open(dir.path());
        let message = |number: u8, stamp: u8, uid: u8| {
            let mut message = vec![0; 80];
            (message[3], message[27], message[35], message[60]) = (number, 1, stamp, uid);
            message
        };
        let content = |message: &[u8]| ledger.known(at(1), message, LOCK).content;
        assert_eq!(content(&message(1, 1, 1)), content(&message(2, 2, 1)));
        assert_ne!(content(&message(1, 1, 1)), content(&message(2, 2, 2)));
    }

    /// One that hangs while a thousand others come and go.
    #[test]
    fn the_ring_spares_what_is_under_way() {
        let dir = tempfile::tempdir().expect("a directory");
        let ledger = open(dir.path());
        let hung = ledger.known(at(1), &message(1, b"hangs"), LOCK);
        let entry = ledger.begin(hung.id, NOWHERE, None);
        ledger.told(&hung);
        for n in 0..2 * SLOTS {
            let id = ledger.id(at(2), &message(n, b"other"));
            ledger.end(ledger.begin(id, NOWHERE, None), true);
        }
        let next = open(dir.path());
        let again = again(&next, 1, &message(2, b"hangs"), Duration::ZERO);
        assert!(matches!(again, Some(Before::Begun(_))));
        ledger.end(entry, true);
        // It was its own slot that it wrote.
        let last = open(dir.path());
        let known = |n| {
            let id = last.id(at(2), &message(n, b"other"));
            last.recall(&id).is_some()
        };
        assert!((2 * SLOTS - 1000..2 * SLOTS).all(known));
    }

    /// Others are carried out meanwhile.
    fn come_and_go(ledger: &Ledger, numbers: std::ops::Range<u32>) {
        for n in numbers {
            let id = ledger.id(at(2), &message(n, b"other"));
            ledger.end(ledger.begin(id, NOWHERE, None), true);
        }
    }

    /// It ends at last, and a thousand others come and go before its client asks again.
    #[test]
    fn the_ring_spares_what_a_client_was_told_to_ask_again_for() {
        for noted_late in [false, true] {
            let dir = tempfile::tempdir().expect("a directory");
            let ledger = open(dir.path());
            let hung = ledger.known(at(1), &message(1, b"hangs"), LOCK);
            let entry = ledger.begin(hung.id, NOWHERE, None);
            match noted_late {
                false => {
                    ledger.told(&hung);
                    ledger.end(entry, true);
                }
                true => {
                    ledger.end(entry, true);
                    ledger.told(&hung);
                }
            }
            come_and_go(&ledger, 0..2 * SLOTS);
            let next = open(dir.path());
            let again = again(&next, 1, &message(2, b"hangs"), Duration::ZERO);
            assert_eq!(again, Some(Before::Ended), "noted late: {noted_late}");
        }
    }

    /// However many were told to ask again, half of the ring is there for others.
    #[test]
    fn the_ring_does_not_fill_up_with_what_it_spares() {
        let dir = tempfile::tempdir().expect("a directory");
        let ledger = open(dir.path());
        let hung = |n: u32| ledger.known(at(1), &message(n, &n.to_be_bytes()), LOCK);
        for n in 0..2 * SLOTS {
            let entry = ledger.begin(hung(n).id, NOWHERE, None);
            ledger.told(&hung(n));
            ledger.end(entry, true);
        }
        let of_use = |at: &u32| ledger.lock().told.values().any(|told| told.needs(*at));
        assert_eq!((0..SLOTS).filter(of_use).count(), 2 * TOLD_MAX);
        come_and_go(&ledger, 0..SLOTS / 2);
        let next = open(dir.path());
        let known = |n| {
            let id = next.id(at(2), &message(n, b"other"));
            next.recall(&id) == Some(Before::Ended)
        };
        assert!((0..SLOTS / 2).all(known));
        // What the client is not waiting for any more is spared no more.
        for n in 0..2 * SLOTS {
            ledger.untold(&hung(n).content);
        }
        assert_eq!((0..SLOTS).filter(of_use).count(), 0);
    }

    #[test]
    fn what_was_begun_and_what_ended_is_known_after_a_kill() {
        let dir = tempfile::tempdir().expect("a directory");
        let client = "192.0.2.1".parse().expect("an address");
        let first = open(dir.path());
        let id = |n: u8| first.id(client, &[n; 40]);
        let entries = [1, 2, 3].map(|n| first.begin(id(n), NOWHERE, None));
        first.end(entries[1], true);
        first.end(entries[2], false);
        assert_eq!(first.recall(&id(1)), None, "it was this process's");
        // Nothing is closed or synced, as after a kill.
        let second = open(dir.path());
        let window = begun(&second, &id(1)).expect("begun");
        assert!(window.alone && window.from <= window.until);
        assert_eq!(second.recall(&id(2)), Some(Before::Ended));
        assert_eq!(second.recall(&id(2)), None, "asked for once");
        assert_eq!(second.recall(&id(3)), None, "it failed");
        let other = "192.0.2.2".parse().expect("an address");
        assert_eq!(second.recall(&second.id(other, &[1; 40])), None);
        // Killed again while it was repeated: the time it may have been done in begins with the first.
        second.begin(id(1), NOWHERE, Some(window));
        let third = begun(&open(dir.path()), &id(1)).expect("begun");
        assert_eq!(third.from, window.from);
    }

    #[test]
    fn the_ring_goes_on_where_it_was() {
        let dir = tempfile::tempdir().expect("a directory");
        let client = "::1".parse().expect("an address");
        for round in 0..3u32 {
            let ledger = open(dir.path());
            for n in 0..SLOTS / 2 + 1 {
                let message = [round.to_be_bytes(), n.to_be_bytes()].concat();
                let entry = ledger.begin(ledger.id(client, &message), NOWHERE, None);
                ledger.end(entry, true);
            }
        }
        let ledger = open(dir.path());
        let known = |round: u32, n: u32| {
            let message = [round.to_be_bytes(), n.to_be_bytes()].concat();
            ledger.recall(&ledger.id(client, &message)).is_some()
        };
        assert!((0..SLOTS / 2 + 1).all(|n| known(2, n)));
        assert!(known(1, SLOTS / 2) && !known(1, 0) && !known(0, SLOTS / 2));
    }

    #[test]
    fn of_two_who_make_one_name_nobody_is_believed() {
        let dir = tempfile::tempdir().expect("a directory");
        let client = "::1".parse().expect("an address");
        let first = open(dir.path());
        let place = first.place(b"dir", b"lock");
        let id = |n: u8| first.id(client, &[n]);
        let entries = [1, 2, 3].map(|n| {
            let place = if n == 3 {
                first.place(b"dir", b"lock2")
            } else {
                place
            };
            first.begin(id(n), place, None)
        });
        let alone = |n| begun(&open(dir.path()), &id(n)).expect("begun").alone;
        assert!(!alone(1) && !alone(2) && alone(3));
        first.end(entries[0], true);
        assert!(!alone(2), "another made it meanwhile");
        first.end(entries[0], false);
        assert!(alone(2));
    }

    #[test]
    fn what_cannot_be_understood_is_begun_anew() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join(NAME);
        for bytes in [&b""[..], b"HRTHCAL1", &[0xff; 1 << 17]] {
            std::fs::write(&path, bytes).expect("written");
            let id = open(dir.path()).id("::1".parse().expect("an address"), b"x");
            assert_eq!(open(dir.path()).recall(&id), None);
            open(dir.path()).begin(id, NOWHERE, None);
            assert!(begun(&open(dir.path()), &id).is_some());
        }
    }
}
