//! How fast passwords can be guessed: not at all, after a few wrong ones.
//!
//! Wrong guesses are counted for the user they come from (an address, or an account of this host), so that one guesser does not lock others out, and
//! for the name they are for, so that many addresses together do not guess one account. The second limit is
//! wider and its pause shorter: whoever wants to keep an administrator out of his account by guessing wrong
//! for ever makes him wait a minute, not more.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

use hearth_io::peer::User;

/// Wrong guesses that cost nothing.
const FREE_BY_ADDRESS: u32 = 5;
const FREE_BY_NAME: u32 = 20;
/// Longest pause.
const PAUSE_BY_ADDRESS: Duration = Duration::from_secs(15 * 60);
const PAUSE_BY_NAME: Duration = Duration::from_secs(60);
/// Wrong guesses are forgotten after so long without another.
const FORGET: Duration = Duration::from_secs(60 * 60);
/// Most addresses or names watched; beyond, the one that was quiet for longest is forgotten.
const WATCHED_MAX: usize = 4096;

#[derive(Clone, Copy)]
struct Guesses {
    wrong: u32,
    last: Instant,
}

struct Watch<K> {
    by: HashMap<K, Guesses>,
    free: u32,
    pause_max: Duration,
}

impl<K: Hash + Eq + Clone> Watch<K> {
    fn new(free: u32, pause_max: Duration) -> Watch<K> {
        Watch {
            by: HashMap::new(),
            free,
            pause_max,
        }
    }

    fn wait(&self, key: &K, now: Instant) -> Duration {
        let Some(guesses) = self.by.get(key) else {
            return Duration::ZERO;
        };
        let Some(over) = guesses.wrong.checked_sub(self.free) else {
            return Duration::ZERO;
        };
        let pause = Duration::from_secs(1 << over.min(20)).min(self.pause_max);
        pause.saturating_sub(now.saturating_duration_since(guesses.last))
    }

    fn wrong(&mut self, key: &K, now: Instant) {
        self.by
            .retain(|_, g| now.saturating_duration_since(g.last) < FORGET);
        if self.by.len() >= WATCHED_MAX
            && !self.by.contains_key(key)
            && let Some(quiet) = self
                .by
                .iter()
                .min_by_key(|(_, g)| g.last)
                .map(|(k, _)| k.clone())
        {
            self.by.remove(&quiet);
        }
        let guesses = self.by.entry(key.clone()).or_insert(Guesses {
            wrong: 0,
            last: now,
        });
        guesses.wrong = guesses.wrong.saturating_add(1);
        guesses.last = now;
    }
}

/// Counts wrong guesses.
pub(crate) struct Throttle {
    addresses: Watch<User>,
    names: Watch<String>,
}

impl Throttle {
    pub(crate) fn new() -> Throttle {
        Throttle {
            addresses: Watch::new(FREE_BY_ADDRESS, PAUSE_BY_ADDRESS),
            names: Watch::new(FREE_BY_NAME, PAUSE_BY_NAME),
        }
    }

    /// How long this address has to wait before it may try this name.
    pub(crate) fn wait(&self, from: User, name: &str, now: Instant) -> Duration {
        let by_name = self.names.wait(&name.to_owned(), now);
        self.addresses.wait(&from, now).max(by_name)
    }

    /// A guess was wrong.
    pub(crate) fn wrong(&mut self, from: User, name: &str, now: Instant) {
        self.addresses.wrong(&from, now);
        self.names.wrong(&name.to_owned(), now);
    }

    /// Somebody is who he says. What others guessed from elsewhere still counts for the name.
    pub(crate) fn right(&mut self, from: User) {
        self.addresses.by.remove(&from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::IpAddr;

    fn at(last: u8) -> User {
        User::Address(IpAddr::from([192, 0, 2, last]))
    }

    #[test]
    fn guesses_get_slow_and_are_forgotten() {
        let mut throttle = Throttle::new();
        let start = Instant::now();
        for _ in 0..5 {
            assert!(throttle.wait(at(1), "anna", start).is_zero());
            throttle.wrong(at(1), "anna", start);
        }
        assert_eq!(throttle.wait(at(1), "anna", start), Duration::from_secs(1));
        // Another name does not help, another address is not held up.
        assert_eq!(throttle.wait(at(1), "otto", start), Duration::from_secs(1));
        assert!(throttle.wait(at(2), "anna", start).is_zero());
        let mut now = start;
        let mut tries = 0;
        while now < start + Duration::from_secs(24 * 3600) {
            now += throttle.wait(at(1), "anna", now);
            throttle.wrong(at(1), "anna", now);
            tries += 1;
        }
        assert!(tries < 120, "{tries} guesses in a day");
        assert!(throttle.wait(at(1), "x", now + FORGET + FORGET).is_zero());
    }

    #[test]
    fn many_addresses_guess_one_name_slowly() {
        let mut throttle = Throttle::new();
        let now = Instant::now();
        for n in 0..30 {
            throttle.wrong(at(n), "anna", now);
        }
        let wait = throttle.wait(at(200), "anna", now);
        assert!(
            wait > Duration::from_secs(30) && wait <= PAUSE_BY_NAME,
            "{wait:?}"
        );
        assert!(throttle.wait(at(200), "otto", now).is_zero());
    }

    /// All accounts of this host have one address.
    #[test]
    fn one_account_holds_back_no_other() {
        let mut throttle = Throttle::new();
        let now = Instant::now();
        for n in 0..19 {
            throttle.wrong(User::Uid(65534), &format!("name{}", n % 5), now);
        }
        assert!(!throttle.wait(User::Uid(65534), "anna", now).is_zero());
        assert!(throttle.wait(User::Uid(0), "anna", now).is_zero());
    }

    #[test]
    fn what_is_watched_is_bounded() {
        let mut throttle = Throttle::new();
        let now = Instant::now();
        for n in 0..10_000u32 {
            let from = User::Address(IpAddr::from(n.to_be_bytes()));
            throttle.wrong(from, &n.to_string(), now);
        }
        assert!(throttle.addresses.by.len() <= WATCHED_MAX);
        assert!(throttle.names.by.len() <= WATCHED_MAX);
    }
}
