//! Login links: who can make one is who may do everything on this host anyway.
//!
//! `hearth console open` has no way to speak to the console but the files of the state directory, which only the
//! console's own user and root can write. A link is a file there, named after the digest of its secret; who comes
//! with the secret removes the file, and removing a file works once, whoever else tries at the same moment, and
//! over restarts.

use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hearth_fault::Fault;
use serde::{Deserialize, Serialize};

use crate::accounts::Role;
use crate::files;
use crate::secret::{self, Digest};
use crate::settings::Home;

/// How long a link is good for.
pub const GOOD_FOR: Duration = Duration::from_secs(300);
/// Length of a secret as digits.
const SECRET_LEN: usize = 64;

#[derive(Default, Serialize, Deserialize)]
struct Link {
    until: u64,
    operator: bool,
}

fn seconds(now: SystemTime) -> u64 {
    now.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// Makes a link; its secret.
pub fn make(home: &Home, role: Role) -> Result<String, Fault> {
    let dir = home.links_dir();
    files::make_dir(&dir)?;
    let now = SystemTime::now();
    sweep(&dir, now);
    let secret =
        secret::fresh().ok_or_else(|| Fault::bare("the system gives no random numbers"))?;
    let link = Link {
        until: seconds(now + GOOD_FOR),
        operator: role == Role::Operator,
    };
    files::write(&dir.join(Digest::of(&secret).word()), &link)?;
    Ok(secret)
}

/// What the link with this secret lets somebody be; it is used up.
pub(crate) fn take(home: &Home, secret: &str, now: SystemTime) -> Option<Role> {
    if secret.len() != SECRET_LEN {
        return None;
    }
    let path = home.links_dir().join(Digest::of(secret).word());
    let link: Link = files::read(&path).ok()?;
    // Of several who come with it, one removes it.
    fs::remove_file(&path).ok()?;
    (link.until > seconds(now)).then_some(match link.operator {
        true => Role::Operator,
        false => Role::Viewer,
    })
}

/// Removes what is too old to be used.
fn sweep(dir: &Path, now: SystemTime) {
    let all = fs::read_dir(dir).into_iter().flatten();
    for path in all.filter_map(|e: io::Result<fs::DirEntry>| Some(e.ok()?.path())) {
        let old = files::read::<Link>(&path).is_ok_and(|link| link.until <= seconds(now));
        if old {
            let _ = fs::remove_file(&path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_works_once_and_not_for_long() {
        let tmp = tempfile::tempdir().unwrap();
        let home = Home::new(tmp.path());
        let secret = make(&home, Role::Viewer).unwrap();
        let now = SystemTime::now();
        assert_eq!(take(&home, &"0".repeat(64), now), None);
        assert_eq!(take(&home, "../../settings", now), None);
        assert_eq!(take(&home, &secret, now), Some(Role::Viewer));
        assert_eq!(take(&home, &secret, now), None);

        let late = make(&home, Role::Operator).unwrap();
        assert_eq!(
            take(&home, &late, now + GOOD_FOR + Duration::from_secs(2)),
            None
        );
        assert_eq!(take(&home, &late, now), None);
    }

    #[test]
    fn of_many_who_come_with_one_link_one_gets_in() {
        let tmp = tempfile::tempdir().unwrap();
        let home = Home::new(tmp.path());
        let secret = make(&home, Role::Operator).unwrap();
        let now = SystemTime::now();
        let let_in = std::thread::scope(|scope| {
            let tries: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| take(&home, &secret, now)))
                .collect();
            let done = tries.into_iter().map(|t| t.join().unwrap());
            done.flatten().count()
        });
        assert_eq!(let_in, 1);
    }

    #[test]
    fn the_secret_is_not_on_disk() {
        let tmp = tempfile::tempdir().unwrap();
        let home = Home::new(tmp.path());
        let secret = make(&home, Role::Operator).unwrap();
        for entry in fs::read_dir(home.links_dir()).unwrap() {
            let path = entry.unwrap().path();
            assert!(!path.display().to_string().contains(&secret));
            assert!(!fs::read_to_string(path).unwrap().contains(&secret));
        }
    }
}
