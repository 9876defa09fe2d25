//! Who is logged in.
//!
//! A session is two secrets. One is a cookie, which the browser sends by itself and the page cannot read; the
//! other is kept by the page and sent in a header, which no other site can make a browser do. Either alone opens
//! nothing: not for reading either, because a browser sends the cookies of a host to every port of it, so that
//! any other server on loopback may come by the first.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::accounts::{Account, Role};
use crate::files::Stamp;
use crate::secret::{self, Digest};

/// A session ends after so long without a request by a person.
pub const IDLE: Duration = Duration::from_secs(60 * 60);
/// And after so long in any case.
pub const WHOLE: Duration = Duration::from_secs(12 * 60 * 60);
/// Most sessions; beyond, the one that was used longest ago ends.
const SESSIONS_MAX: usize = 512;

/// Somebody who is logged in.
#[derive(Clone, Debug)]
pub(crate) struct Who {
    /// The account; `None` for who came with a link.
    pub account: Option<String>,
    /// What he may do.
    pub role: Role,
    /// The account as it was then.
    pub as_of: Option<Account>,
    /// State of the accounts when this was last found true.
    pub seen: Stamp,
}

impl Who {
    /// Somebody who came with a link.
    pub(crate) fn with_link(role: Role) -> Who {
        Who {
            account: None,
            role,
            as_of: None,
            seen: None,
        }
    }

    /// Somebody with an account, as it was in the file of this state.
    pub(crate) fn with_account(name: &str, account: &Account, seen: Stamp) -> Who {
        Who {
            account: Some(name.to_owned()),
            role: account.role,
            as_of: Some(account.clone()),
            seen,
        }
    }

    /// What to call him.
    pub(crate) fn name(&self) -> &str {
        self.account.as_deref().unwrap_or("link")
    }
}

struct Session {
    who: Who,
    token: Digest,
    began: Instant,
    used: Instant,
}

/// What somebody who logs in is given.
pub(crate) struct Given {
    pub cookie: String,
    pub token: String,
}

/// All sessions.
#[derive(Default)]
pub(crate) struct Sessions {
    by_cookie: HashMap<Digest, Session>,
}

impl Sessions {
    /// Begins one; `None` if the system gives no random numbers.
    pub(crate) fn begin(&mut self, who: Who, now: Instant) -> Option<Given> {
        self.by_cookie.retain(|_, s| s.lives(now));
        if self.by_cookie.len() >= SESSIONS_MAX {
            let oldest = self.by_cookie.iter().min_by_key(|(_, s)| s.used);
            if let Some(oldest) = oldest.map(|(key, _)| *key) {
                self.by_cookie.remove(&oldest);
            }
        }
        let given = Given {
            cookie: secret::fresh()?,
            token: secret::fresh()?,
        };
        let session = Session {
            who,
            token: Digest::of(&given.token),
            began: now,
            used: now,
        };
        self.by_cookie.insert(Digest::of(&given.cookie), session);
        Some(given)
    }

    /// The session these two secrets open. Asked by a page that only renews what it shows (`passive`), it
    /// does not stay open for that.
    pub(crate) fn find(
        &mut self,
        cookie: &str,
        token: &str,
        passive: bool,
        now: Instant,
    ) -> Option<&mut Who> {
        let key = Digest::of(cookie);
        if self.by_cookie.get(&key).is_some_and(|s| !s.lives(now)) {
            self.by_cookie.remove(&key);
        }
        let session = self.by_cookie.get_mut(&key)?;
        if session.token != Digest::of(token) {
            return None;
        }
        if !passive {
            session.used = now;
        }
        Some(&mut session.who)
    }

    /// Ends the session of this cookie.
    pub(crate) fn end(&mut self, cookie: &str) {
        self.by_cookie.remove(&Digest::of(cookie));
    }
}

impl Session {
    fn lives(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.used) < IDLE
            && now.saturating_duration_since(self.began) < WHOLE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn somebody() -> Who {
        Who::with_link(Role::Viewer)
    }

    #[test]
    fn it_takes_both_secrets() {
        let mut sessions = Sessions::default();
        let now = Instant::now();
        let given = sessions.begin(somebody(), now).unwrap();
        let other = sessions.begin(somebody(), now).unwrap();
        assert!(
            sessions
                .find(&given.cookie, &given.token, false, now)
                .is_some()
        );
        assert!(sessions.find(&given.cookie, "", false, now).is_none());
        assert!(
            sessions
                .find(&given.cookie, &given.cookie, false, now)
                .is_none()
        );
        assert!(
            sessions
                .find(&given.cookie, &other.token, false, now)
                .is_none()
        );
        assert!(sessions.find("", &given.token, false, now).is_none());
        sessions.end(&given.cookie);
        assert!(
            sessions
                .find(&given.cookie, &given.token, false, now)
                .is_none()
        );
        assert!(
            sessions
                .find(&other.cookie, &other.token, false, now)
                .is_some()
        );
    }

    #[test]
    fn sessions_end() {
        let mut sessions = Sessions::default();
        let start = Instant::now();
        let step = Duration::from_secs(60);
        let idle = sessions.begin(somebody(), start).unwrap();
        let used = sessions.begin(somebody(), start).unwrap();
        let mut now = start;
        while now < start + WHOLE - step {
            now += step;
            // A page that lies open and shows itself anew is nobody.
            let open = sessions
                .find(&idle.cookie, &idle.token, true, now)
                .is_some();
            assert_eq!(open, now < start + IDLE, "{:?}", now - start);
            assert!(
                sessions
                    .find(&used.cookie, &used.token, false, now)
                    .is_some()
            );
        }
        now += step;
        assert!(
            sessions
                .find(&used.cookie, &used.token, false, now)
                .is_none()
        );
    }

    #[test]
    fn there_are_only_so_many() {
        let mut sessions = Sessions::default();
        let start = Instant::now();
        let first = sessions.begin(somebody(), start).unwrap();
        for n in 1..=SESSIONS_MAX as u64 {
            sessions
                .begin(somebody(), start + Duration::from_millis(n))
                .unwrap();
        }
        assert_eq!(sessions.by_cookie.len(), SESSIONS_MAX);
        assert!(
            sessions
                .find(&first.cookie, &first.token, false, start)
                .is_none()
        );
    }
}
