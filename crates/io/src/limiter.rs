//! Connections of a listener: how many at once, and which one makes room for another.
//!
//! A silent client keeps no other client out, and one user leaves places for others. The connection that has kept the server
//! waiting for the longest time makes room: among those of the same user if that has its share, among all otherwise. A
//! connection that is being answered is never ended.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::peer::User;

/// Ends a connection; called at most once, while the limiter is locked.
type End = Box<dyn FnOnce() + Send>;

struct Entry {
    id: u64,
    user: User,
    /// Since when it has kept the server waiting; none while it is answered.
    waits_since: Option<Instant>,
    end: Option<End>,
}

struct All {
    next: u64,
    entries: Vec<Entry>,
}

struct Inner {
    max: usize,
    of_one: usize,
    all: Mutex<All>,
}

/// All connections of a listener. Clones share them.
#[derive(Clone)]
pub struct Limiter(Arc<Inner>);

/// A connection's place among them; left when the last clone is dropped.
#[derive(Clone)]
pub struct Place(Arc<Left>);

struct Left {
    limiter: Limiter,
    id: u64,
}

impl Limiter {
    /// At most `max` connections, `of_one` of them of one user.
    pub fn new(max: usize, of_one: usize) -> Limiter {
        let all = All {
            next: 0,
            entries: Vec::new(),
        };
        Limiter(Arc::new(Inner {
            max,
            of_one,
            all: Mutex::new(all),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, All> {
        self.0.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a new connection, which keeps the server waiting at first; none if the connections that could make room are
    /// all being answered.
    pub fn enter(&self, user: User) -> Option<Place> {
        let mut all = self.lock();
        let own = all
            .entries
            .iter()
            .filter(|entry| entry.user == user)
            .count();
        let is_over = own >= self.0.of_one;
        if is_over || all.entries.len() >= self.0.max {
            all.evict(|entry| entry.user == user || !is_over)
                .then_some(())?;
        }
        let id = all.next;
        all.next += 1;
        all.entries.push(Entry {
            id,
            user,
            waits_since: Some(Instant::now()),
            end: None,
        });
        let limiter = self.clone();
        Some(Place(Arc::new(Left { limiter, id })))
    }

    /// Ends the connection that has kept the server waiting for the longest time; false if all are being answered.
    pub fn evict(&self) -> bool {
        self.lock().evict(|_| true)
    }
}

impl All {
    fn evict(&mut self, can_go: impl Fn(&Entry) -> bool) -> bool {
        let candidates = self.entries.iter().enumerate();
        let waiting = candidates.filter(|(_, entry)| can_go(entry));
        let waiting = waiting.filter_map(|(at, entry)| Some((entry.waits_since?, entry.id, at)));
        let Some((.., at)) = waiting.min() else {
            return false;
        };
        if let Some(end) = self.entries.swap_remove(at).end {
            end();
        }
        true
    }
}

impl Place {
    /// Sets how the connection is ended. One that made room already is ended at once.
    pub fn ends_with(&self, end: impl FnOnce() + Send + 'static) {
        let mut all = self.0.limiter.lock();
        match all.entries.iter_mut().find(|entry| entry.id == self.0.id) {
            Some(entry) => entry.end = Some(Box::new(end)),
            None => end(),
        }
    }

    /// Sets whether the connection keeps the server waiting, or is being answered.
    pub fn waits(&self, waits: bool) {
        let mut all = self.0.limiter.lock();
        if let Some(entry) = all.entries.iter_mut().find(|entry| entry.id == self.0.id) {
            entry.waits_since = waits.then(Instant::now);
        }
    }
}

impl Drop for Left {
    fn drop(&mut self) {
        let id = self.id;
        self.limiter.lock().entries.retain(|entry| entry.id != id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn entered(limiter: &Limiter, uid: u32) -> Option<(Place, Arc<AtomicBool>)> {
        let place = limiter.enter(User::Uid(uid))?;
        let ended = Arc::new(AtomicBool::new(false));
        let end = ended.clone();
        place.ends_with(move || end.store(true, Ordering::Relaxed));
        Some((place, ended))
    }

    #[test]
    fn longest_waiting_of_same_user_makes_room() {
        let limiter = Limiter::new(4, 2);
        let is_over = |it: &(Place, Arc<AtomicBool>)| it.1.load(Ordering::Relaxed);
        let other = entered(&limiter, 1).unwrap();
        let first = entered(&limiter, 2).unwrap();
        let second = entered(&limiter, 2).unwrap();
        first.0.waits(false);
        // The first is being answered, and the other user's is older.
        let third = entered(&limiter, 2).unwrap();
        assert!(is_over(&second) && !is_over(&first) && !is_over(&other));
        third.0.waits(false);
        assert!(entered(&limiter, 2).is_none());
        // All places are taken: the longest waiting of any user goes.
        let more = [entered(&limiter, 3), entered(&limiter, 4)];
        assert!(is_over(&other));
        assert!(more.iter().flatten().all(|it| !is_over(it)));
        drop(first);
        assert!(entered(&limiter, 2).is_some());
    }

    #[test]
    fn connection_that_made_room_early_ends_at_once() {
        let limiter = Limiter::new(1, 1);
        let early = limiter.enter(User::Uid(1)).unwrap();
        let _next = limiter.enter(User::Uid(1)).unwrap();
        let ended = Arc::new(AtomicBool::new(false));
        let end = ended.clone();
        early.ends_with(move || end.store(true, Ordering::Relaxed));
        assert!(ended.load(Ordering::Relaxed));
    }
}
