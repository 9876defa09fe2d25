//! Which clients write a file: nobody locks anything here, so two who write the same one in turn are told of.
//!
//! A client is an address and the name it gives of itself, however many connections it has. A file that goes from one client to
//! another (a virtual machine that is moved) is written by one and then by the other, and that is all right: two write it
//! at a time if the first one comes again, within a [`SPAN`] of what it wrote before.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::handle::Key;

/// What is further apart is not at the same time.
const SPAN: Duration = Duration::from_secs(60);
/// Clients that are remembered of a file.
const CLIENTS_MAX: usize = 4;
/// Files that are remembered in each part.
const FILES_MAX: usize = 128;
/// So that connections of other files seldom wait for each other.
const PARTS: usize = 16;
/// Longest part of a client's name that is shown.
const NAME_MAX: usize = 64;

/// A client, as far as it can be told from others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Writer {
    address: IpAddr,
    machine: Box<[u8]>,
}

impl Writer {
    /// Who gives no name may be anybody at this address.
    fn is(&self, address: IpAddr, machine: &[u8]) -> bool {
        let unnamed = self.machine.is_empty() || machine.is_empty();
        self.address == address && (unnamed || *self.machine == *machine)
    }
}

impl fmt::Display for Writer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.address)?;
        if self.machine.is_empty() {
            return Ok(());
        }
        let shown = self.machine.iter().take(NAME_MAX);
        let shown: String = shown
            .map(|b| {
                if b.is_ascii_graphic() {
                    char::from(*b)
                } else {
                    '?'
                }
            })
            .collect();
        write!(f, " ({shown})")
    }
}

/// The clients that wrote a file, the last one first, and when they did so last.
type Lately = Vec<(Writer, Instant)>;

/// See the module.
pub(super) struct Writers {
    hasher: RandomState,
    parts: [Mutex<HashMap<Key, Lately>>; PARTS],
}

fn is_recent(at: Instant, now: Instant) -> bool {
    now.saturating_duration_since(at) <= SPAN
}

impl Writers {
    pub fn new() -> Writers {
        Writers {
            hasher: RandomState::new(),
            parts: Default::default(),
        }
    }

    /// Somebody writes a file. Tells with whom in turn, if that is so.
    pub fn note(&self, file: &Key, address: IpAddr, machine: &[u8]) -> Option<(Writer, Writer)> {
        self.note_at(file, address, machine, Instant::now())
    }

    fn note_at(
        &self,
        file: &Key,
        address: IpAddr,
        machine: &[u8],
        now: Instant,
    ) -> Option<(Writer, Writer)> {
        let part = self.hasher.hash_one(file) as usize % PARTS;
        let mut files = self
            .parts
            .get(part)?
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(lately) = files.get_mut(file) {
            if let Some((last, at)) = lately.first_mut()
                && last.is(address, machine)
            {
                *at = now;
                return None;
            }
            lately.retain(|(_, at)| is_recent(*at, now));
            let before = lately.iter().position(|(by, _)| by.is(address, machine));
            let before = before.map(|at| lately.remove(at).0);
            let writer = before.clone().unwrap_or_else(|| Writer {
                address,
                machine: machine.into(),
            });
            let other = lately.first().map(|(by, _)| by.clone());
            lately.insert(0, (writer, now));
            lately.truncate(CLIENTS_MAX);
            return before.zip(other);
        }
        if files.len() >= FILES_MAX {
            files.retain(|_, lately| lately.iter().any(|(_, at)| is_recent(*at, now)));
        }
        if files.len() >= FILES_MAX {
            // Rather miss two of them once than look through all at every write.
            files.clear();
        }
        let writer = Writer {
            address,
            machine: machine.into(),
        };
        files.insert(*file, vec![(writer, now)]);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
    const B: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2));

    fn key(n: usize) -> Key {
        Key::new(&n.to_ne_bytes()).unwrap()
    }

    #[test]
    fn two_who_write_in_turn_are_told_and_one_who_takes_over_is_not() {
        let (writers, now) = (Writers::new(), Instant::now());
        let note = |file, by, name: &str, seconds| {
            let at = now + Duration::from_secs(seconds);
            let told = writers.note_at(&key(file), by, name.as_bytes(), at);
            told.map(|(one, other)| format!("{one}, {other}"))
        };
        // One with several connections, and a file that moves to another host.
        assert_eq!(note(1, A, "a", 0), None);
        assert_eq!(note(1, A, "a", 1), None);
        assert_eq!(note(1, B, "b", 2), None);
        assert_eq!(note(1, B, "b", 3), None);
        // Another file has nothing to do with it.
        assert_eq!(note(2, A, "a", 3), None);
        // Back a minute later, as it may.
        assert_eq!(note(1, A, "a", 62), None);
        // And at the same time.
        let both = "192.0.2.2 (b), 192.0.2.1 (a)";
        assert_eq!(note(1, B, "b", 63).as_deref(), Some(both));
        let both = "192.0.2.1 (a), 192.0.2.2 (b)";
        assert_eq!(note(1, A, "a", 64).as_deref(), Some(both));
    }

    #[test]
    fn names_tell_clients_of_one_address_apart_and_no_name_is_everybodys() {
        let writers = Writers::new();
        let note = |name: &[u8]| {
            let told = writers.note(&key(1), A, name);
            told.map(|(one, other)| format!("{one}, {other}"))
        };
        assert_eq!(note(b"a"), None);
        assert_eq!(note(b""), None);
        assert_eq!(note(b"a"), None);
        assert_eq!(note(b"b\n"), None);
        assert_eq!(note(b"c"), None);
        assert_eq!(
            note(b"b\n").as_deref(),
            Some("192.0.2.1 (b?), 192.0.2.1 (c)")
        );
    }

    #[test]
    fn neither_files_nor_clients_grow_without_end() {
        let writers = Writers::new();
        for n in 0..10 * PARTS * FILES_MAX {
            writers.note(&key(n), A, b"a");
        }
        for n in 0..100u8 {
            writers.note(&key(0), A, &[n]);
        }
        for part in &writers.parts {
            let files = part.lock().unwrap();
            assert!(files.len() <= FILES_MAX);
            assert!(files.values().all(|lately| lately.len() <= CLIENTS_MAX));
        }
    }
}
