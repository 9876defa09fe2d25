//! A daemon that aborts again and again over the same pool stops using its flash.
//!
//! What is wrong may be in the pool: then each start finds it again, every few seconds, and no disk is
//! ever served. So each abort leaves a line in a file ([`crate::abort`]), and a start that finds three
//! of the last ten minutes leaves the flash alone: disks with nothing dirty on it are served from their
//! origins, the others are refused by name ([`Degraded::unused`]). If it aborts three times more even
//! so, it is not the flash, and it refuses to start.
//!
//! Only panics leave a line, which are faults in Hearth: not `kill -9`, not a power cut, nor a watchdog
//! that ends a daemon that hangs (whatever it hangs on, the flash is not to blame), nor an I/O driver
//! that the system refuses. Lines of another version of Hearth do not count: the fault may be mended.
//!
//! The file is not on the flash, which may be what is broken: it is in the directory the service manager
//! keeps for us (`STATE_DIRECTORY`); if it made the run directory, which it may take away between two
//! starts, in `/var/lib/hearth`; else in the run directory.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use hearth_events::{Event, Events};

use crate::degraded::{Degraded, STATE_DIR};
use crate::error::{Error, Result};

/// How long an abort counts.
const WINDOW_S: u64 = 600;
/// So many within that time take the flash out of use.
const ABORTS: usize = 3;
/// So many more, and the flash was not to blame.
const ABORTS_WITHOUT: usize = 6;
/// What is read of the file, from its end: a hundred lines.
const READ_MAX: u64 = 64 << 10;

/// Where aborts are noted, and whether they count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Brake {
    /// The directory of the file.
    pub dir: PathBuf,
    /// Those noted so far count no more.
    pub release: bool,
}

/// One abort.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Abort {
    at: u64,
    message: String,
}

/// What they mean for this start.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Go,
    WithoutFlash(String),
    Stop(String),
}

impl Brake {
    /// Where it belongs for a daemon with this run directory.
    pub fn beside(run_dir: &Path, release: bool) -> Brake {
        let given = |name| std::env::var_os(name).map(PathBuf::from);
        // systemd names several with colons; ours is one.
        let state = given("STATE_DIRECTORY").filter(|d| d.is_dir());
        let fleeting = given("RUNTIME_DIRECTORY").is_some();
        let kept = Path::new(STATE_DIR);
        let dir = match state {
            Some(dir) => dir,
            None if fleeting && std::fs::create_dir_all(kept).is_ok() => kept.to_owned(),
            None => run_dir.to_owned(),
        };
        Brake { dir, release }
    }

    /// Looks at what was noted about `pool`, and has further aborts noted. Says how to start.
    pub(crate) fn check(&self, pool: &str, events: &Events) -> Result<Option<Degraded>> {
        let file = self.dir.join(format!("{pool}.aborts"));
        if self.release {
            match std::fs::remove_file(&file) {
                Ok(()) => tracing::warn!("aborts noted so far count no more, as you said"),
                Err(e) if e.kind() == ErrorKind::NotFound => {}
                Err(e) => tracing::warn!(file = %file.display(), "cannot remove it: {e}"),
            }
        }
        crate::abort::record_to(file.clone());
        let text = match read_end(&file) {
            Ok(text) => text,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => {
                tracing::warn!(file = %file.display(), "cannot read what was noted of aborts: {e}");
                return Ok(None);
            }
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0, |d| d.as_secs());
        let recent = recent(&text, now, env!("CARGO_PKG_VERSION"));
        for abort in &recent {
            events.tell(Event::DaemonAbortedBefore {
                seconds_ago: now.saturating_sub(abort.at),
                message: abort.message.clone(),
            });
        }
        match verdict(&recent) {
            Verdict::Go => Ok(None),
            Verdict::WithoutFlash(why) => {
                tracing::error!(
                    "THE FLASH IS NOT USED: {why}. Disks with nothing dirty on flash are served from \
                     their origins, without a cache; those with something dirty are refused. To use \
                     the flash again, start with --release-brake, or ten minutes after the last \
                     abort, or with another version of Hearth"
                );
                Ok(Some(Degraded::unused(why)))
            }
            Verdict::Stop(why) => Err(Error::refused(
                why,
                "report it; to try again, start with --release-brake, or wait ten minutes",
            )),
        }
    }
}

fn read_end(file: &Path) -> std::io::Result<String> {
    let mut file = File::open(file)?;
    let len = file.metadata()?.len();
    file.seek(SeekFrom::Start(len.saturating_sub(READ_MAX)))?;
    let mut bytes = Vec::new();
    file.take(READ_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The aborts of this version within the window before `now`. A line that makes no sense counts not.
fn recent(text: &str, now: u64, version: &str) -> Vec<Abort> {
    let parse = |line: &str| {
        let mut parts = line.splitn(3, ' ');
        let at = parts.next()?.parse().ok()?;
        let same = parts.next()? == version;
        let message = parts.next()?.to_owned();
        same.then_some(Abort { at, message })
    };
    text.lines()
        .filter_map(parse)
        // A clock that was set back must not let old ones count for years.
        .filter(|a| a.at <= now && now - a.at <= WINDOW_S)
        .collect()
}

fn verdict(recent: &[Abort]) -> Verdict {
    let last = recent.last().map_or("", |a| a.message.as_str());
    match recent.len() {
        0..ABORTS => Verdict::Go,
        n @ ABORTS..ABORTS_WITHOUT => Verdict::WithoutFlash(format!(
            "Hearth aborted {n} times within ten minutes, last in {last}"
        )),
        n => Verdict::Stop(format!(
            "Hearth aborted {n} times within ten minutes, also without its flash, last in {last}"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_recent_aborts_of_this_version_count() {
        let text = "100 1.0 hearth-data0: old\n\
                    650 1.0 hearth-data0 at a.rs:1: boom\n\
                    700 0.9 hearth-data0: mended since\n\
                    nonsense\n\
                    -1 1.0 x\n\
                    9999999 1.0 hearth-data0: a clock ahead\n\
                    800 1.0 hearth-bg: bang\n";
        let found = recent(text, 1000, "1.0");
        let at: Vec<u64> = found.iter().map(|a| a.at).collect();
        assert_eq!(at, [650, 800]);
        assert_eq!(found[0].message, "hearth-data0 at a.rs:1: boom");
    }

    #[test]
    fn three_leave_the_flash_alone_and_six_are_enough() {
        let aborts = |n: usize| -> Vec<Abort> {
            let abort = |i| Abort {
                at: i as u64,
                message: format!("t: {i}"),
            };
            (0..n).map(abort).collect()
        };
        assert_eq!(verdict(&aborts(0)), Verdict::Go);
        assert_eq!(verdict(&aborts(2)), Verdict::Go);
        let Verdict::WithoutFlash(why) = verdict(&aborts(3)) else {
            panic!("three are too many");
        };
        assert!(why.contains("3 times") && why.contains("t: 2"), "{why}");
        assert!(matches!(verdict(&aborts(5)), Verdict::WithoutFlash(_)));
        assert!(matches!(verdict(&aborts(6)), Verdict::Stop(_)));
    }

    #[test]
    fn a_release_forgets_them() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("p.aborts");
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap()
            .as_secs();
        let line = format!("{now} {} t: boom\n", env!("CARGO_PKG_VERSION"));
        std::fs::write(&file, line.repeat(3)).unwrap();
        let brake = |release| Brake {
            dir: dir.path().to_owned(),
            release,
        };
        assert!(
            brake(false)
                .check("p", &Events::in_memory())
                .unwrap()
                .is_some()
        );
        assert!(
            brake(false)
                .check("other", &Events::in_memory())
                .unwrap()
                .is_none()
        );
        assert!(
            brake(true)
                .check("p", &Events::in_memory())
                .unwrap()
                .is_none()
        );
        assert!(
            brake(false)
                .check("p", &Events::in_memory())
                .unwrap()
                .is_none()
        );
        std::fs::write(&file, line.repeat(6)).unwrap();
        assert!(brake(false).check("p", &Events::in_memory()).is_err());
    }
}
