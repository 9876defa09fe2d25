//! Who may hold how much of the memory for requests and replies.
//!
//! Memory is held by whoever is slow: a client that does not take its replies, a disk whose origin
//! hangs. Whatever the total is, a few of those would use it up and everybody else would wait for
//! them. So nobody gets all of what is there: an export takes no more than a quarter of what is
//! *free*, less what it holds already, and one client of it no more than half of that. The more is
//! held by others, the less a newcomer gets, but something is always left: with `n` exports stuck,
//! more than (4/5)ⁿ of the memory. (Switches divide their packet memory this way: Choudhury and
//! Hahne, "Dynamic queue length thresholds", 1998.) Two rules keep large requests from starving: an
//! export that holds nothing may take one request of whatever is free, and if nobody holds anything,
//! any request is taken.

use crate::session::SMALL;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Memory a connection takes beside its large requests: what it may hold in any case, its receive
/// buffer and the headers of its replies; with TLS about as much again.
pub const CONNECTION: u64 = 512 << 10;

/// What an export and one of its clients hold. Cloned by every connection of that client.
#[derive(Clone, Debug, Default)]
pub struct Shares {
    /// All clients of the export.
    pub export: Arc<AtomicU64>,
    /// This client, all of its connections.
    pub client: Arc<AtomicU64>,
}

impl Shares {
    fn load(&self) -> (u64, u64) {
        let load = |n: &AtomicU64| n.load(Ordering::Relaxed);
        (load(&self.export), load(&self.client))
    }

    /// A connection holds `now` bytes instead of `before`.
    pub(crate) fn recount(&self, before: u64, now: u64) {
        for count in [&self.export, &self.client] {
            if now > before {
                count.fetch_add(now - before, Ordering::Relaxed);
            } else {
                count.fetch_sub(before - now, Ordering::Relaxed);
            }
        }
    }
}

/// How much memory there is for requests and replies of one session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    limit: u64,
    held: u64,
    export: u64,
    client: u64,
}

impl Default for Room {
    fn default() -> Room {
        Room::AMPLE
    }
}

impl Room {
    /// Enough for everything.
    pub const AMPLE: Room = Room::of(u64::MAX, 0, 0, 0);

    /// Room where `limit` bytes are shared by all, who hold `held`, of which the session's export
    /// `export` and its client `client`.
    pub const fn of(limit: u64, held: u64, export: u64, client: u64) -> Room {
        Room {
            limit,
            held,
            export,
            client,
        }
    }

    pub(crate) fn for_session(limit: u64, held: u64, shares: Option<&Shares>) -> Room {
        let (export, client) = shares.map_or((held, held), Shares::load);
        Room::of(limit, held, export, client)
    }

    /// Whether a session that holds `held` bytes may take a request that needs `more`; if so, they
    /// are its own from now on.
    pub fn allows(&mut self, held: u64, more: u64) -> bool {
        if more == 0 || held.saturating_add(more) <= SMALL {
            return true;
        }
        let free = self.limit.saturating_sub(self.held);
        let fits = if self.held == 0 {
            true
        } else if self.export == 0 {
            more <= free
        } else {
            let wanted = self.export.saturating_add(self.client).saturating_add(more);
            wanted <= free / 4
        };
        if fits {
            for count in [&mut self.held, &mut self.export, &mut self.client] {
                *count = count.saturating_add(more);
            }
        }
        fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Takes requests of `size` for one client of one export until it gets no more.
    fn hog(limit: u64, held: &mut u64, export: &mut u64, size: u64) -> u64 {
        let mut client = 0;
        while client < 1 << 40 {
            // Each on a connection of its own, which holds nothing yet.
            if !Room::of(limit, *held, *export, client).allows(SMALL, size) {
                break;
            }
            for count in [&mut *held, &mut *export, &mut client] {
                *count += size;
            }
        }
        client
    }

    #[test]
    fn whoever_is_stuck_leaves_most_of_the_rest() {
        let limit = 512 * MIB;
        let mut held = 0;
        for stuck in 1..=12 {
            let mut export = 0;
            for _ in 0..3 {
                hog(limit, &mut held, &mut export, MIB);
            }
            let left = limit - held;
            let promised = limit as f64 * 0.8f64.powi(stuck);
            assert!(left as f64 >= promised, "{stuck}: {left} of {promised}");
            // Another export's large request, and another client's of the same one, get through.
            if left > 33 * MIB {
                assert!(Room::of(limit, held, 0, 0).allows(0, 33 * MIB), "{stuck}");
            }
            assert!(Room::of(limit, held, export, 0).allows(0, 0));
        }
    }

    #[test]
    fn one_client_leaves_something_to_others_of_its_export() {
        let limit = 512 * MIB;
        let (mut held, mut export) = (0, 0);
        let first = hog(limit, &mut held, &mut export, MIB);
        let second = hog(limit, &mut held, &mut export, MIB);
        assert!(first > 50 * MIB && second > 20 * MIB, "{first}, {second}");
    }

    #[test]
    fn small_requests_and_the_first_one_always_fit() {
        let mut none = Room::of(0, 100, 100, 100);
        assert!(none.allows(0, SMALL));
        assert!(!none.allows(1, SMALL));
        assert!(none.allows(u64::MAX, 0));
        let mut first = Room::of(MIB, 0, 0, 0);
        assert!(first.allows(0, 33 * MIB));
        assert!(!first.allows(33 * MIB, MIB));
    }
}
