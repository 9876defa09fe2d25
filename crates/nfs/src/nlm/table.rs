//! Which ranges of which files are locked, and by which owner: the rules of fcntl(2).
//!
//! An owner never conflicts with itself: a new lock of it replaces what it holds of that range, and its neighbours of one kind are one range.
//! All of it is bounded, by user and in total, so that no client can fill it for others.

use std::collections::HashMap;
use std::net::IpAddr;

use hearth_io::peer::User;

use super::{Holder, LAST, Status};
use crate::handle::Key;

/// Ranges of an export, and those of one user. A range takes about 100 bytes.
pub const RANGES_MAX: usize = 16_384;
/// See [`RANGES_MAX`].
pub const USER_RANGES_MAX: usize = 4_096;
/// Clients of an export that hold ranges, and those of one user, by the names they give of themselves.
pub const CLIENTS_MAX: usize = 256;
/// See [`CLIENTS_MAX`].
pub const USER_CLIENTS_MAX: usize = 16;

/// A client of the table.
pub type ClientId = u32;

/// The owner of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub struct Owner {
    pub client: ClientId,
    pub process: i32,
    /// Digest of what the client calls its owner: this may have 1024 bytes.
    pub digest: [u8; 16],
}

/// A range that is to be locked or unlocked; both ends are part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Range {
    pub first: u64,
    pub last: u64,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    range: Range,
    owner: Owner,
    exclusive: bool,
    /// The number of the client's start.
    state: i32,
}

#[derive(Debug)]
struct Client {
    address: IpAddr,
    name: Box<[u8]>,
    user: User,
    ranges: usize,
    /// The number of the start it told of last.
    notified: Option<i32>,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Table {
    files: HashMap<Key, Vec<Held>>,
    clients: HashMap<ClientId, Client>,
    next: ClientId,
    ranges: usize,
}

impl Range {
    fn overlaps(&self, other: &Range) -> bool {
        self.first <= other.last && other.first <= self.last
    }

    /// Overlaps, or is next to it.
    fn touches(&self, other: &Range) -> bool {
        self.first <= other.last.saturating_add(1) && other.first <= self.last.saturating_add(1)
    }

    /// The parts of it before and after another.
    fn without(&self, other: &Range) -> [Option<Range>; 2] {
        let before = (self.first < other.first).then(|| Range {
            last: other.first - 1,
            ..*self
        });
        let after = (self.last > other.last).then(|| Range {
            first: other.last + 1,
            ..*self
        });
        [before, after]
    }
}

impl Table {
    /// The client of this address and name, if it is known.
    pub fn find(&self, address: IpAddr, name: &[u8]) -> Option<ClientId> {
        let mut clients = self.clients.iter();
        clients
            .find(|(_, c)| c.address == address && *c.name == *name)
            .map(|(id, _)| *id)
    }

    /// The same, made known if there is room; a client without ranges makes room.
    pub fn client(&mut self, address: IpAddr, name: &[u8], user: User) -> Option<ClientId> {
        if let Some(id) = self.find(address, name) {
            return Some(id);
        }
        let own = self.clients.values().filter(|c| c.user == user).count();
        let is_over = own >= USER_CLIENTS_MAX;
        if is_over || self.clients.len() >= CLIENTS_MAX {
            let mut idle = self.clients.iter();
            let idle = idle.find(|(_, c)| c.ranges == 0 && (c.user == user || !is_over));
            let idle = idle.map(|(id, _)| *id)?;
            self.clients.remove(&idle);
        }
        while self.clients.contains_key(&self.next) {
            self.next = self.next.wrapping_add(1);
        }
        let id = self.next;
        self.next = self.next.wrapping_add(1);
        let client = Client {
            address,
            name: name.into(),
            user,
            ranges: 0,
            notified: None,
        };
        self.clients.insert(id, client);
        Some(id)
    }

    /// The range that is in the way of a lock. An owner that is not known has no range of its own.
    pub fn conflict(
        &self,
        file: &Key,
        owner: Option<&Owner>,
        range: Range,
        exclusive: bool,
    ) -> Option<Holder> {
        let held = self.files.get(file)?;
        let in_the_way = held.iter().find(|h| {
            Some(&h.owner) != owner && (exclusive || h.exclusive) && h.range.overlaps(&range)
        })?;
        Some(Holder {
            exclusive: in_the_way.exclusive,
            process: in_the_way.owner.process,
            first: in_the_way.range.first,
            last: in_the_way.range.last,
        })
    }

    /// Locks a range: granted, denied, or refused because there are too many.
    pub fn lock(
        &mut self,
        file: &Key,
        owner: Owner,
        range: Range,
        exclusive: bool,
        state: i32,
    ) -> Status {
        if self
            .conflict(file, Some(&owner), range, exclusive)
            .is_some()
        {
            return Status::Denied;
        }
        let mut new = Held {
            range,
            owner,
            exclusive,
            state,
        };
        let held = self.files.get(file).map_or(&[][..], Vec::as_slice);
        for near in held
            .iter()
            .filter(|h| h.owner == owner && h.exclusive == exclusive && h.range.touches(&range))
        {
            new.range.first = new.range.first.min(near.range.first);
            new.range.last = new.range.last.max(near.range.last);
        }
        self.replace(file, &owner, new.range, Some(new))
    }

    /// Unlocks what the owner holds of a range. Refused only if the rest would be too many ranges.
    pub fn unlock(&mut self, file: &Key, owner: &Owner, range: Range) -> Status {
        self.replace(file, owner, range, None)
    }

    /// Puts `new` in the place of all that the owner holds of a range.
    fn replace(&mut self, file: &Key, owner: &Owner, range: Range, new: Option<Held>) -> Status {
        let held = self.files.get(file).map_or(&[][..], Vec::as_slice);
        let is_cut = |h: &&Held| h.owner == *owner && h.range.overlaps(&range);
        let mut added: Vec<Held> = new.into_iter().collect();
        let mut removed = 0;
        for cut in held.iter().filter(is_cut) {
            removed += 1;
            let parts = cut.range.without(&range).into_iter().flatten();
            added.extend(parts.map(|range| Held { range, ..*cut }));
        }
        let user = self.clients.get(&owner.client).map(|c| c.user);
        let of_user = |c: &&Client| Some(c.user) == user;
        let own: usize = self
            .clients
            .values()
            .filter(of_user)
            .map(|c| c.ranges)
            .sum();
        let after = |before: usize| (before + added.len()).saturating_sub(removed);
        if added.len() > removed
            && (after(own) > USER_RANGES_MAX || after(self.ranges) > RANGES_MAX)
        {
            return Status::NoLocks;
        }
        self.ranges = after(self.ranges);
        if let Some(client) = self.clients.get_mut(&owner.client) {
            client.ranges = (client.ranges + added.len()).saturating_sub(removed);
        }
        if removed > 0 || !added.is_empty() {
            let held = self.files.entry(*file).or_default();
            held.retain(|h| !is_cut(&h));
            held.extend(added);
            if held.is_empty() {
                self.files.remove(file);
            }
        }
        Status::Granted
    }

    /// A client was started anew: it holds nothing from before. `state` is the number of the new start; without it everything goes.
    pub fn restarted(&mut self, address: IpAddr, name: &[u8], state: Option<i32>) {
        let at: Vec<ClientId> = self
            .clients
            .iter()
            .filter(|(_, c)| c.address == address)
            .map(|(id, _)| *id)
            .collect();
        for id in &at {
            let Some(client) = self.clients.get_mut(id) else {
                continue;
            };
            // A monitor may know its host by another name than the lock manager does.
            let is_named = at.len() > 1 || state.is_none();
            if is_named && !is_same_host(&client.name, name) {
                continue;
            }
            if state.is_some() && client.notified == state {
                continue;
            }
            client.notified = state.or(client.notified);
            if client.ranges == 0 {
                continue;
            }
            self.release(|h| h.owner.client == *id && Some(h.state) != state);
        }
    }

    /// Only clients at these addresses may hold ranges any more.
    pub fn retain(&mut self, mut may: impl FnMut(IpAddr) -> bool) {
        let gone: Vec<ClientId> = self
            .clients
            .iter()
            .filter(|(_, c)| !may(c.address))
            .map(|(id, _)| *id)
            .collect();
        self.release(|h| gone.contains(&h.owner.client));
        self.clients.retain(|id, _| !gone.contains(id));
    }

    fn release(&mut self, mut gone: impl FnMut(&Held) -> bool) {
        let clients = &mut self.clients;
        let ranges = &mut self.ranges;
        self.files.retain(|_, held| {
            held.retain(|h| {
                let stays = !gone(h);
                if !stays {
                    *ranges = ranges.saturating_sub(1);
                    if let Some(client) = clients.get_mut(&h.owner.client) {
                        client.ranges = client.ranges.saturating_sub(1);
                    }
                }
                stays
            });
            !held.is_empty()
        });
    }

    /// True if a client at this address holds a range.
    pub fn holds(&self, address: IpAddr) -> bool {
        let mut clients = self.clients.values();
        clients.any(|c| c.address == address && c.ranges > 0)
    }

    /// Ranges that are locked.
    pub fn len(&self) -> usize {
        self.ranges
    }

    /// True if nothing is locked.
    pub fn is_empty(&self) -> bool {
        self.ranges == 0
    }
}

/// A host calls itself by its name alone in one protocol and by its whole name in the other.
fn is_same_host(a: &[u8], b: &[u8]) -> bool {
    let label = |name: &[u8]| {
        let end = name.iter().position(|c| *c == b'.');
        name[..end.unwrap_or(name.len())].to_ascii_lowercase()
    };
    a.eq_ignore_ascii_case(b) || !a.is_empty() && label(a) == label(b)
}

const _: () = assert!(LAST < u64::MAX, "the byte after the last has a number");

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const A: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
    const B: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2));

    fn file(n: u8) -> Key {
        Key::new(&[n]).unwrap()
    }

    fn range(first: u64, last: u64) -> Range {
        Range { first, last }
    }

    fn owner(client: ClientId, process: i32) -> Owner {
        Owner {
            client,
            process,
            digest: [0; 16],
        }
    }

    fn client(table: &mut Table, address: IpAddr, name: &str) -> ClientId {
        let user = User::Address(address);
        table.client(address, name.as_bytes(), user).unwrap()
    }

    #[test]
    fn ranges_of_one_user_are_bounded() {
        let mut table = Table::default();
        let (a, b) = (client(&mut table, A, "a"), client(&mut table, B, "b"));
        let whole = range(0, LAST);
        assert_eq!(
            table.lock(&file(0), owner(a, 1), whole, true, 0),
            Status::Granted
        );
        let mut refused = 0;
        for n in 0..100_000 {
            let hole = range(2 * n + 1, 2 * n + 1);
            refused += usize::from(table.unlock(&file(0), &owner(a, 1), hole) == Status::NoLocks);
        }
        assert_eq!(table.len(), USER_RANGES_MAX);
        assert_eq!(refused, 100_000 - (USER_RANGES_MAX - 1));
        // Another name of the same user has no share of its own.
        let other = client(&mut table, A, "other");
        assert_eq!(
            table.lock(&file(1), owner(other, 1), range(0, 0), true, 0),
            Status::NoLocks
        );
        assert_eq!(
            table.lock(&file(1), owner(b, 1), range(0, 0), true, 0),
            Status::Granted
        );
        // What needs no further range is granted: all of it can be unlocked.
        assert_eq!(table.unlock(&file(0), &owner(a, 1), whole), Status::Granted);
        assert_eq!(table.len(), 1);
    }

    #[test]
    fn clients_of_one_user_are_bounded() {
        let mut table = Table::default();
        let user = User::Address(A);
        for n in 0..10_000u32 {
            let Some(id) = table.client(A, &n.to_be_bytes(), user) else {
                assert!(n >= USER_CLIENTS_MAX as u32);
                continue;
            };
            let n = u64::from(n);
            assert_eq!(
                table.lock(&file(0), owner(id, 1), range(n, n), true, 0),
                Status::Granted
            );
        }
        assert_eq!(table.clients.len(), USER_CLIENTS_MAX);
        client(&mut table, B, "b");
        // A client without ranges makes room.
        assert_eq!(
            table.unlock(&file(0), &owner(3, 1), range(0, LAST)),
            Status::Granted
        );
        client(&mut table, A, "new");
        assert_eq!(table.clients.len(), USER_CLIENTS_MAX + 1);
    }

    #[test]
    fn restarted_client_loses_its_own_ranges() {
        let mut table = Table::default();
        let (a, b) = (client(&mut table, A, "a"), client(&mut table, B, "b"));
        let lock = |table: &mut Table, id, n, state| {
            let granted = table.lock(&file(0), owner(id, 1), range(n, n), true, state);
            assert_eq!(granted, Status::Granted);
        };
        lock(&mut table, a, 0, 1);
        lock(&mut table, b, 2, 1);
        // Another address has no say, and a client alone at its address need not know its name.
        table.restarted("192.0.2.3".parse().unwrap(), b"a", Some(3));
        assert_eq!(table.len(), 2);
        // It locks again before its notice arrives.
        lock(&mut table, a, 4, 3);
        table.restarted(A, b"a.example.org", Some(3));
        assert!(table.len() == 2 && table.holds(A) && table.holds(B));
        // The notice again (its answer was lost): not what was locked since.
        lock(&mut table, a, 6, 0);
        table.restarted(A, b"a.example.org", Some(3));
        assert_eq!(table.len(), 3);
        // Of several at one address, the one of that name.
        let other = client(&mut table, A, "c");
        lock(&mut table, other, 8, 1);
        table.restarted(A, b"C.example.org", Some(7));
        assert_eq!(table.len(), 3);
        table.restarted(A, b"a", None);
        assert_eq!(table.len(), 1);
        table.retain(|address| address == A);
        assert!(table.is_empty() && table.files.is_empty());
    }

    const SPAN: u64 = 24;

    #[derive(Clone, Debug)]
    struct Step {
        owner: usize,
        file: u8,
        first: u64,
        last: u64,
        /// Unlock, shared, exclusive.
        kind: u8,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = (0..3usize, 0..2u8, 0..SPAN, 0..SPAN, 0..3u8);
        let step = step.prop_map(|(owner, file, a, b, kind)| Step {
            owner,
            file,
            first: a.min(b),
            last: a.max(b),
            kind,
        });
        proptest::collection::vec(step, 0..60)
    }

    proptest! {
        /// Against a model that knows each byte.
        #[test]
        fn table_agrees_with_bytes(steps in steps()) {
            let mut table = Table::default();
            let (a, b) = (client(&mut table, A, "a"), client(&mut table, B, "b"));
            let owners = [owner(a, 1), owner(a, 2), owner(b, 1)];
            let mut model = HashMap::<(u8, u64, usize), bool>::new();
            for Step { owner, file: f, first, last, kind } in steps {
                let exclusive = kind == 2;
                let range = range(first, last);
                if kind == 0 {
                    prop_assert_eq!(table.unlock(&file(f), &owners[owner], range), Status::Granted);
                    for n in first..=last {
                        model.remove(&(f, n, owner));
                    }
                } else {
                    let conflict = (first..=last).any(|n| (0..3).any(|other| {
                        other != owner && model.get(&(f, n, other)).is_some_and(|e| *e || exclusive)
                    }));
                    let tested = table.conflict(&file(f), Some(&owners[owner]), range, exclusive);
                    prop_assert_eq!(tested.is_some(), conflict);
                    let status = table.lock(&file(f), owners[owner], range, exclusive, 0);
                    prop_assert_eq!(status == Status::Granted, !conflict);
                    if !conflict {
                        for n in first..=last {
                            model.insert((f, n, owner), exclusive);
                        }
                    }
                }
                // The same bytes, each once, in as few ranges as there can be.
                let mut bytes = HashMap::new();
                let mut ranges = 0;
                for f in 0..2 {
                    for held in table.files.get(&file(f)).into_iter().flatten() {
                        ranges += 1;
                        let owner = owners.iter().position(|o| *o == held.owner).unwrap();
                        for n in held.range.first..=held.range.last {
                            prop_assert!(bytes.insert((f, n, owner), held.exclusive).is_none());
                        }
                        let whole = |n: u64| bytes_of(&model, (f, n, owner)) != Some(held.exclusive);
                        prop_assert!(whole(held.range.last + 1));
                        prop_assert!(held.range.first == 0 || whole(held.range.first - 1));
                    }
                }
                prop_assert_eq!(&bytes, &model);
                let counted: usize = table.clients.values().map(|c| c.ranges).sum();
                prop_assert_eq!([ranges, counted], [table.len(); 2]);
            }
        }
    }

    fn bytes_of(model: &HashMap<(u8, u64, usize), bool>, at: (u8, u64, usize)) -> Option<bool> {
        model.get(&at).copied()
    }
}
