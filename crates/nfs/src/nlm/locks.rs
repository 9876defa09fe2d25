//! The locks of an export: their table, the clients that must learn of our restart, and the time in which they reclaim what they held.
//!
//! Locks are in memory and end with the process. Clients do not lose them: the file `clients` in the export's state directory lists the addresses
//! of clients that may hold locks, written before the first lock of each is answered. The next process sends them a notice
//! ([`nsm`](crate::nsm)), and for [`GRACE`] grants only what they reclaim. Without such clients there is no grace period.
//!
//! The file, version 1; numbers are big-endian:
//!
//! | At | Bytes | Content |
//! |---|---|---|
//! | 0 | 8 | `HRTHNSM1` |
//! | 8 | 4 | the number of this process's start, odd, as NSM counts |
//! | 12 | n × 32 | the server's address that the client used, and the client's, as IPv6 addresses |
//! | last 32 | 32 | SHA-256 of all before |

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::table::{CLIENTS_MAX, Owner, Range, Table};
use super::{Lock, Status};
use crate::handle::Key;
use crate::identity::replace;
use hearth_io::peer::User;

/// After a restart, only what was held before is granted for so long.
pub const GRACE: Duration = Duration::from_secs(45);
const NAME: &str = "clients";
const MAGIC: &[u8; 8] = b"HRTHNSM1";
const ENTRY: usize = 32;

/// A client that learns of our restart, and the address at which it knows us.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
pub struct Monitored {
    pub server: IpAddr,
    pub client: IpAddr,
}

/// A client that asks for a lock.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Asking {
    pub address: IpAddr,
    pub user: User,
    /// Our address that it uses.
    pub server: IpAddr,
    /// The number of its start.
    pub state: i32,
    /// It wants to learn of our restart.
    pub monitored: bool,
}

#[derive(Debug, Default)]
struct State {
    table: Table,
    /// In the file.
    monitored: BTreeSet<Monitored>,
}

/// See the module.
#[derive(Debug)]
pub struct Locks {
    dir: Option<PathBuf>,
    /// The number of this process's start.
    start: i32,
    /// Clients of the process before, and until when they reclaim.
    before: BTreeSet<Monitored>,
    until: Instant,
    state: Mutex<State>,
    /// Held while the file is written, so that the last list is the one that stays.
    writing: Mutex<()>,
}

fn parse(bytes: &[u8]) -> Option<(i32, BTreeSet<Monitored>)> {
    let (body, sum) = bytes.split_at_checked(bytes.len().checked_sub(32)?)?;
    let (magic, rest) = body.split_first_chunk::<8>()?;
    let (start, entries) = rest.split_first_chunk()?;
    let digest = ring::digest::digest(&ring::digest::SHA256, body);
    let is_whole = magic == MAGIC
        && digest.as_ref() == sum
        && entries.len().is_multiple_of(ENTRY)
        && entries.len() / ENTRY <= CLIENTS_MAX;
    is_whole.then_some(())?;
    let address = |bytes: &[u8]| {
        let octets: [u8; 16] = bytes.try_into().ok()?;
        Some(Ipv6Addr::from(octets).to_canonical())
    };
    let entries = entries.chunks_exact(ENTRY).filter_map(|entry| {
        Some(Monitored {
            server: address(&entry[..16])?,
            client: address(&entry[16..])?,
        })
    });
    Some((i32::from_be_bytes(*start), entries.collect()))
}

fn octets(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

fn file(start: i32, monitored: &BTreeSet<Monitored>) -> Vec<u8> {
    let mut bytes = [&MAGIC[..], &start.to_be_bytes()].concat();
    for entry in monitored {
        bytes.extend(octets(entry.server));
        bytes.extend(octets(entry.client));
    }
    let sum = ring::digest::digest(&ring::digest::SHA256, &bytes);
    bytes.extend(sum.as_ref());
    bytes
}

impl Locks {
    /// Locks that nothing outlives.
    pub fn in_memory() -> Locks {
        Locks {
            dir: None,
            start: 1,
            before: BTreeSet::new(),
            until: Instant::now(),
            state: Mutex::default(),
            writing: Mutex::default(),
        }
    }

    /// The locks of an export whose state is kept in `dir`. A file that is damaged or cannot be read is one without clients, and is logged.
    pub fn open(dir: &Path) -> Locks {
        let read = match std::fs::read(dir.join(NAME)) {
            Ok(bytes) => parse(&bytes).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData)),
            Err(error) => Err(error),
        };
        let (last, before) = read.unwrap_or_else(|error| {
            if error.kind() != io::ErrorKind::NotFound {
                tracing::warn!(
                    %error, file = %dir.join(NAME).display(),
                    "clients cannot reclaim their NFS locks: the list of clients cannot be read"
                );
            }
            // Any number that clients have not seen; the clock's grows faster than by two for each start.
            let now = SystemTime::now().duration_since(UNIX_EPOCH);
            (
                now.map_or(0, |now| now.as_secs() as i32 & i32::MAX),
                BTreeSet::new(),
            )
        });
        let grace = if before.is_empty() {
            Duration::ZERO
        } else {
            GRACE
        };
        let locks = Locks {
            dir: Some(dir.to_owned()),
            start: (last.wrapping_add(2) & i32::MAX) | 1,
            until: Instant::now() + grace,
            state: Mutex::new(State {
                monitored: before.clone(),
                ..State::default()
            }),
            before,
            writing: Mutex::default(),
        };
        if !locks.before.is_empty()
            && let Err(error) = locks.write(None)
        {
            tracing::warn!(%error, "the list of clients with NFS locks cannot be written");
        }
        locks
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The clients of the process before, which reclaim their locks now.
    pub fn before(&self) -> &BTreeSet<Monitored> {
        &self.before
    }

    /// The number of this process's start.
    pub fn start(&self) -> i32 {
        self.start
    }

    /// When the grace period ends.
    pub fn grace_ends(&self) -> Instant {
        self.until
    }

    fn is_in_grace(&self) -> bool {
        Instant::now() < self.until
    }

    /// The answer to a lock that need not look at the table: none if it does.
    pub fn refused(&self, client: IpAddr, reclaim: bool) -> Option<Status> {
        match (self.is_in_grace(), reclaim) {
            (true, true) if self.before.iter().any(|m| m.client == client) => None,
            // This process knows nothing of its locks.
            (true, true) => Some(Status::NoLocks),
            (true, false) | (false, true) => Some(Status::GracePeriod),
            (false, false) => None,
        }
    }

    /// Locks a range. May wait for the disk of the state directory, for the first lock of a client.
    pub fn lock(&self, key: &Key, lock: &Lock<'_>, exclusive: bool, by: Asking) -> Status {
        let Some((first, last)) = lock.range() else {
            return Status::TooBig;
        };
        let range = Range { first, last };
        let (owner, new) = {
            let mut state = self.state();
            let Some(client) = state.table.client(by.address, lock.caller, by.user) else {
                return Status::NoLocks;
            };
            let owner = owner(client, lock);
            let status = state.table.lock(key, owner, range, exclusive, by.state);
            let new = Monitored {
                server: by.server,
                client: by.address,
            };
            if status != Status::Granted || !by.monitored || state.monitored.contains(&new) {
                return status;
            }
            if state.monitored.len() >= CLIENTS_MAX {
                let State { table, monitored } = &mut *state;
                monitored.retain(|m| table.holds(m.client));
            }
            if state.monitored.len() >= CLIENTS_MAX {
                state.table.unlock(key, &owner, range);
                return Status::NoLocks;
            }
            (owner, new)
        };
        // Listed here only when it is in the file, so that no further lock of it is granted before.
        let Err(error) = self.write(Some(new)) else {
            return Status::Granted;
        };
        tracing::warn!(
            %error,
            "an NFS lock is refused: the list of clients, from which they learn of a restart, cannot be written; see \
             whether the state directory has free space"
        );
        self.state().table.unlock(key, &owner, range);
        Status::NoLocks
    }

    /// The range in the way of a lock.
    pub fn test(
        &self,
        key: &Key,
        lock: &Lock<'_>,
        exclusive: bool,
        address: IpAddr,
    ) -> Result<Option<super::Holder>, Status> {
        let (first, last) = lock.range().ok_or(Status::TooBig)?;
        let state = self.state();
        let client = state.table.find(address, lock.caller);
        let owner = client.map(|client| owner(client, lock));
        Ok(state
            .table
            .conflict(key, owner.as_ref(), Range { first, last }, exclusive))
    }

    /// Unlocks a range. What is not held, or not by this owner, stays as it is.
    pub fn unlock(&self, key: &Key, lock: &Lock<'_>, address: IpAddr) -> Status {
        let Some((first, last)) = lock.range() else {
            return Status::TooBig;
        };
        let mut state = self.state();
        match state.table.find(address, lock.caller) {
            Some(client) => {
                let owner = owner(client, lock);
                state.table.unlock(key, &owner, Range { first, last })
            }
            None => Status::Granted,
        }
    }

    /// A client was started anew; see [`Table::restarted`].
    pub fn restarted(&self, address: IpAddr, name: &[u8], state: Option<i32>) {
        self.state().table.restarted(address, name, state);
    }

    /// Only clients at these addresses may hold locks any more.
    pub fn retain(&self, may: impl FnMut(IpAddr) -> bool) {
        self.state().table.retain(may);
    }

    /// The process ends in order: clients that hold nothing need not learn of it.
    pub fn close(&self) {
        {
            let mut state = self.state();
            // A client that has not reclaimed yet does so in the next process.
            if self.is_in_grace() {
                return;
            }
            let State { table, monitored } = &mut *state;
            let before = monitored.len();
            monitored.retain(|m| table.holds(m.client));
            if monitored.len() == before {
                return;
            }
        }
        if let Err(error) = self.write(None) {
            tracing::warn!(%error, "the list of clients with NFS locks cannot be written");
        }
    }

    /// Writes the list, with a new client if there is one.
    fn write(&self, new: Option<Monitored>) -> io::Result<()> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut monitored = self.state().monitored.clone();
        monitored.extend(new);
        if let Some(dir) = &self.dir {
            replace(dir, NAME, &file(self.start, &monitored))?;
        }
        self.state().monitored.extend(new);
        Ok(())
    }
}

fn owner(client: u32, lock: &Lock<'_>) -> Owner {
    let sum = ring::digest::digest(&ring::digest::SHA256, lock.owner);
    let mut digest = [0; 16];
    digest.copy_from_slice(&sum.as_ref()[..16]);
    Owner {
        client,
        process: lock.process,
        digest,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SERVER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
    const A: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 7));
    const B: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 8));

    fn by(address: IpAddr) -> Asking {
        Asking {
            address,
            user: User::Address(address),
            server: SERVER,
            state: 1,
            monitored: true,
        }
    }

    const LOCK: Lock<'static> = Lock {
        caller: b"host",
        file: &[],
        owner: b"1@host",
        process: 1,
        offset: 0,
        len: 0,
    };

    #[test]
    fn clients_with_locks_survive_a_kill() {
        let dir = tempfile::tempdir().unwrap();
        let key = Key::new(&[1]).unwrap();
        let first = Locks::open(dir.path());
        assert_eq!(
            first.refused(A, false),
            None,
            "no grace period without clients"
        );
        assert_eq!(first.refused(A, true), Some(Status::GracePeriod));
        assert_eq!(first.lock(&key, &LOCK, true, by(A)), Status::Granted);
        assert_eq!(first.lock(&key, &LOCK, true, by(B)), Status::Denied);
        // Killed: the file is all that is left.
        let second = Locks::open(dir.path());
        let monitored = Monitored {
            server: SERVER,
            client: A,
        };
        assert_eq!(second.before().iter().collect::<Vec<_>>(), [&monitored]);
        assert!(second.start() != first.start() && second.start() % 2 == 1);
        assert_eq!(second.refused(A, false), Some(Status::GracePeriod));
        assert_eq!(second.refused(A, true), None);
        assert_eq!(second.refused(B, true), Some(Status::NoLocks));
        // Killed again before anything was reclaimed.
        let third = Locks::open(dir.path());
        assert!(third.before().contains(&monitored) && third.start() != second.start());
    }

    #[test]
    fn ordered_end_leaves_holders_only() {
        let dir = tempfile::tempdir().unwrap();
        let key = Key::new(&[1]).unwrap();
        let first = Locks::open(dir.path());
        assert_eq!(first.lock(&key, &LOCK, false, by(A)), Status::Granted);
        assert_eq!(first.lock(&key, &LOCK, false, by(B)), Status::Granted);
        assert_eq!(first.unlock(&key, &LOCK, A), Status::Granted);
        first.close();
        let second = Locks::open(dir.path());
        let clients: Vec<IpAddr> = second.before().iter().map(|m| m.client).collect();
        assert_eq!(clients, [B]);
    }

    #[test]
    fn lock_without_a_written_client_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let key = Key::new(&[1]).unwrap();
        let locks = Locks::open(&dir.path().join("gone"));
        assert_eq!(locks.lock(&key, &LOCK, true, by(A)), Status::NoLocks);
        assert_eq!(locks.test(&key, &LOCK, true, B), Ok(None), "it is not held");
        let unmonitored = Asking {
            monitored: false,
            ..by(A)
        };
        assert_eq!(locks.lock(&key, &LOCK, true, unmonitored), Status::Granted);
    }

    #[test]
    fn file_has_its_bytes_and_damage_is_noticed() {
        let monitored = Monitored {
            server: SERVER,
            client: "2001:db8::7".parse().unwrap(),
        };
        let bytes = file(5, &BTreeSet::from([monitored]));
        let hex: String = bytes[..44].iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(
            hex,
            "485254484e534d310000000500000000000000000000ffffc000020120010db8000000000000000000000007"
        );
        assert_eq!(parse(&bytes), Some((5, BTreeSet::from([monitored]))));
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert_eq!(parse(&damaged), None, "byte {at}");
            assert_eq!(parse(&bytes[..at]), None);
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(NAME), &bytes[1..]).unwrap();
        assert!(Locks::open(dir.path()).before().is_empty());
    }
}
