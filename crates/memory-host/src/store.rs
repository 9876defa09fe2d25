//! The run directory: the notes of what was changed, the status, and the lock that keeps a second controller out.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use hearth_fault::Fault;
use hearth_memory::{Note, Notes, Status, Target};

use crate::Result;

/// File of the notes.
const NOTES: &str = "changed.json";
/// File of the status.
const STATUS: &str = "status.json";
/// Largest file that is read.
const FILE_MAX: u64 = 16 << 20;

/// The controller's run directory, for a daemon in this one: its name with `-memory` behind it.
pub fn run_dir(daemons: &Path) -> PathBuf {
    // Without what a trailing slash would make of it.
    let plain: PathBuf = daemons.components().collect();
    let mut name = plain.into_os_string();
    name.push("-memory");
    PathBuf::from(name)
}

fn bytes(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match File::open(path) {
        Ok(file) => {
            let mut bytes = Vec::new();
            file.take(FILE_MAX).read_to_end(&mut bytes)?;
            Ok(Some(bytes))
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// What the controller in `dir` says of itself; `None` if there is none.
pub fn status(dir: &Path) -> Result<Option<Status>> {
    let path = dir.join(STATUS);
    let wrong = |what: String| {
        Fault::new(
            format!("cannot use {}: {what}", path.display()),
            "is it a controller of another version? Stop it first",
        )
    };
    match bytes(&path).map_err(|e| wrong(e.to_string()))? {
        Some(bytes) => Status::parse(&bytes).map(Some).map_err(wrong),
        None => Ok(None),
    }
}

/// The directory, claimed.
#[derive(Debug)]
pub struct RunDir {
    dir: PathBuf,
    notes: Notes,
    /// Held for its lock.
    _lock: File,
}

impl RunDir {
    /// Makes it if it is not there, keeps others out, and reads what was changed before in this boot.
    pub fn claim(dir: &Path, boot: &str) -> Result<RunDir> {
        let fail = |e: io::Error| {
            Fault::new(
                format!("cannot use {}: {e}", dir.display()),
                "run it as root, or name another directory with --run-dir",
            )
        };
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(dir)
            .map_err(fail)?;
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(dir.join("lock"))
            .map_err(fail)?;
        // SAFETY: the descriptor is open; flock touches no memory.
        if unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
            return Err(Fault::new(
                format!("a memory controller is running in {}", dir.display()),
                "stop it first (systemctl stop hearth-memory); it sets back itself what it has changed",
            ));
        }
        let path = dir.join(NOTES);
        let notes = match bytes(&path).map_err(fail)? {
            None => Notes::none(boot),
            Some(bytes) => {
                Notes::parse(&String::from_utf8_lossy(&bytes), boot).map_err(|what| {
                    Fault::new(
                        format!("cannot use {}: {what}", path.display()),
                        "what was changed on this host ends with a boot; move the file away to begin anew",
                    )
                })?
            }
        };
        Ok(RunDir {
            dir: dir.to_owned(),
            notes,
            _lock: lock,
        })
    }

    /// Notes a change, durably; whoever calls this makes it next.
    pub fn about_to(&mut self, target: &Target, now: &str, set: &str, why: &str) -> io::Result<()> {
        let before = self.notes.clone();
        self.notes.about_to(target, now, set, why);
        if self.notes == before {
            return Ok(());
        }
        // What could not be noted is not done.
        self.store().inspect_err(|_| self.notes = before)
    }

    /// What has to be set back, the last change first.
    pub fn to_undo(&self) -> Vec<Note> {
        self.notes.to_undo()
    }

    /// It is as before.
    pub fn forget(&mut self, target: &Target) -> io::Result<()> {
        self.notes.forget(target);
        self.store()
    }

    fn store(&self) -> io::Result<()> {
        let text = serde_json::to_string_pretty(&self.notes)?;
        replace(&self.dir, NOTES, text.as_bytes(), 0o600, true)
    }

    /// Says how everything is.
    pub fn tell(&self, status: &Status) -> io::Result<()> {
        replace(
            &self.dir,
            STATUS,
            &serde_json::to_vec(status)?,
            0o644,
            false,
        )
    }

    /// Nothing more is said: there is no controller, in order.
    pub fn be_silent(&self) {
        // What is left is told of as a controller that has stopped.
        let _ = fs::remove_file(self.dir.join(STATUS));
    }
}

/// Replaces a file whole.
fn replace(dir: &Path, name: &str, bytes: &[u8], mode: u32, durably: bool) -> io::Result<()> {
    let new = dir.join(format!("{name}.new"));
    // A link somebody left there is not followed.
    match fs::remove_file(&new) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(&new)?;
    // Whoever watches is another user, whatever the service's umask.
    file.set_permissions(fs::Permissions::from_mode(mode))?;
    file.write_all(bytes)?;
    if durably {
        file.sync_all()?;
    }
    fs::rename(&new, dir.join(name))?;
    if durably {
        File::open(dir)?.sync_all()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_memory::{Level, Seen};

    #[test]
    fn notes_outlive_the_process_and_not_the_boot() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("r-memory");
        assert_eq!(run_dir(&dir.path().join("r/")), at);
        let target = Target::File("/x".into());
        let mut claimed = RunDir::claim(&at, "b").unwrap();
        claimed.about_to(&target, "0", "1", "w").unwrap();
        let second = RunDir::claim(&at, "b").unwrap_err();
        assert!(second.what.contains("is running"), "{second}");
        drop(claimed);
        let mut claimed = RunDir::claim(&at, "b").unwrap();
        assert_eq!(claimed.to_undo().len(), 1);
        assert_eq!(claimed.to_undo()[0].before, "0");
        claimed.about_to(&target, "1", "2", "w").unwrap();
        assert_eq!(claimed.to_undo()[0].set, ["1", "2"]);
        drop(claimed);
        assert_eq!(RunDir::claim(&at, "c").unwrap().to_undo(), []);
        fs::write(at.join(NOTES), "x").unwrap();
        assert!(RunDir::claim(&at, "b").unwrap_err().remedy.contains("boot"));
    }

    #[test]
    fn a_status_is_there_while_there_is_a_controller() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(status(dir.path()), Ok(None));
        let claimed = RunDir::claim(dir.path(), "b").unwrap();
        let told = Status::new(1, 2, Level::High, Seen::default());
        claimed.tell(&told).unwrap();
        assert_eq!(status(dir.path()), Ok(Some(told)));
        claimed.be_silent();
        assert_eq!(status(dir.path()), Ok(None));
        fs::write(dir.path().join(STATUS), "{}").unwrap();
        assert!(status(dir.path()).is_err());
    }
}
