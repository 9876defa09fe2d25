//! Calls that had been begun when the daemon was killed.
//!
//! A client that hears nothing sends its call again, to the next process as well. There, what the call did before
//! is no longer known: a rename finds its source gone and fails, though it is this very call that
//! moved it, and somebody's `mv` ends with "no such file". So what changes names or attributes is written down before it
//! is begun and again when it has ended well, in a file beside the export's identity, and the process after a kill
//! looks there before it carries such a call out.
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
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ring::hmac;

use crate::identity::Identity;
use crate::server::LOOKED_AT;
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
const SLACK: Duration = Duration::from_millis(20);

/// What is said where the file cannot be used.
const UNNOTED: &str = "calls under way cannot be noted: after a kill a repeated rename may be told that there is no such file";

const BEGUN: u8 = 1;
const ENDED: u8 = 2;

/// By what a call is known again: who sent it, its number, and what it says.
pub(crate) type Id = [u8; 16];
/// A name in a directory, for those who make one.
pub(crate) type Place = [u8; 8];
/// No name is made.
pub(crate) const NOWHERE: Place = [0; 8];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slot {
    state: u8,
    id: Id,
    place: Place,
    /// When it came to this state, since 1970.
    at: Duration,
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
}

impl Window {
    /// One that has not begun yet.
    #[cfg(test)]
    pub fn far_ahead() -> Window {
        Window {
            from: now() + Duration::from_secs(3600),
            until: Duration::ZERO,
            alone: true,
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
}

#[derive(Default)]
struct State {
    /// From before, until they are asked for.
    before: HashMap<Id, Slot>,
    next: u32,
    failed: bool,
}

/// A call that is written down as begun.
#[derive(Clone, Copy)]
pub(crate) struct Entry {
    at: u32,
    slot: Slot,
}

fn now() -> Duration {
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
        let sum = sum(&bytes[..48]);
        bytes[48..].copy_from_slice(&sum);
        bytes
    }

    /// `None` for one that was never used, or is damaged.
    fn read(bytes: &[u8; SLOT]) -> Option<Slot> {
        let state = bytes[0];
        if sum(&bytes[..48]) != bytes[48..] || !matches!(state, BEGUN | ENDED) {
            return None;
        }
        let seconds = u64::from_be_bytes(*bytes[32..].first_chunk()?);
        let nanos = u32::from_be_bytes(*bytes[40..].first_chunk()?);
        Some(Slot {
            state,
            id: *bytes[8..].first_chunk()?,
            place: *bytes[24..].first_chunk()?,
            at: Duration::from_secs(seconds).checked_add(Duration::from_nanos(nanos.into()))?,
        })
    }
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
        })
    }

    /// The same; none, and a warning, if it cannot be opened.
    pub fn beside(state: &Path, identity: &Identity) -> Option<Ledger> {
        Ledger::open(state, identity)
            .inspect_err(|error| {
                tracing::warn!(%error, state = %state.display(), "{UNNOTED}");
            })
            .ok()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// By what a message, which begins with its number, is known again.
    pub(crate) fn id(&self, client: IpAddr, message: &[u8]) -> Id {
        let client = match client {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        let len = (message.len() as u64).to_be_bytes();
        let looked_at = &message[..message.len().min(LOOKED_AT)];
        self.seal(&[&client.octets(), &len, looked_at])
    }

    /// The name that a call makes.
    pub(crate) fn place(&self, dir: &[u8], name: &[u8]) -> Place {
        self.seal(&[b"place", dir, name])
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
        // ended well meanwhile did.
        let rival = |other: &Slot| {
            other.id != slot.id
                && other.place == slot.place
                && (other.state == BEGUN || other.at + SLACK >= slot.at)
        };
        let alone = slot.place == NOWHERE || !state.before.values().any(rival);
        // It stays while it may have rivals that ask after it.
        Some(Before::Begun(Window {
            from: slot.at,
            until: self.opened,
            alone,
        }))
    }

    /// A call begins; again, if the process before was at it in this window.
    pub(crate) fn begin(&self, id: Id, place: Place, again: Option<Window>) -> Entry {
        let mut state = self.lock();
        let at = state.next;
        state.next = (at + 1) % SLOTS;
        drop(state);
        let slot = Slot {
            state: BEGUN,
            id,
            place,
            at: again.map_or_else(now, |window| window.from),
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
        self.lock().before.remove(&entry.slot.id);
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
