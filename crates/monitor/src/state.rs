//! What must outlive a restart of the second service: small files in a directory of its own.
//!
//! A file is replaced whole: what is read after a crash is what was there before or after, never a piece.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_daemon::error::{Error, Result};
use hearth_daemon::rundir;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Largest file read back.
const FILE_MAX: u64 = 64 << 20;

/// The state directory, claimed by this process.
#[derive(Clone, Debug)]
pub struct StateDir {
    dir: PathBuf,
    /// Held for its lock.
    _lock: Arc<File>,
}

impl StateDir {
    /// Makes the directory if it is not there, and keeps other services out of it.
    pub fn claim(dir: &Path) -> Result<StateDir> {
        rundir::make_private_for(dir, 0o700, "--state-dir")?;
        let fail = |e: io::Error| {
            Error::unavailable(
                format!("cannot write into {}: {e}", dir.display()),
                "name a directory you may write with --state-dir",
            )
        };
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
            return Err(Error::conflict(
                format!("another `hearth monitor` is using {}", dir.display()),
                "stop it first, or name another directory with --state-dir",
            ));
        }
        Ok(StateDir {
            dir: dir.to_owned(),
            _lock: Arc::new(lock),
        })
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Where a file of this name is.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// What a file holds; `None` if it is not there, or makes no sense, which is logged.
    pub fn load<T: DeserializeOwned>(&self, name: &str) -> io::Result<Option<T>> {
        let path = self.path(name);
        let bytes = match File::open(&path) {
            Ok(file) => {
                let mut bytes = Vec::new();
                io::Read::read_to_end(&mut io::Read::take(file, FILE_MAX), &mut bytes)?;
                bytes
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        match serde_json::from_slice(&bytes) {
            Ok(value) => Ok(Some(value)),
            Err(e) => {
                tracing::warn!(file = %path.display(), "not understood, and begun anew: {e}");
                Ok(None)
            }
        }
    }

    /// Replaces a file durably.
    pub fn store<T: Serialize>(&self, name: &str, value: &T) -> io::Result<()> {
        let bytes = serde_json::to_vec(value)?;
        let new = self.path(&format!("{name}.new"));
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(true)
            .write(true)
            .mode(0o600)
            .open(&new)?;
        file.write_all(&bytes)?;
        file.sync_data()?;
        std::fs::rename(&new, self.path(name))?;
        File::open(&self.dir)?.sync_data()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_stored_is_there_and_nonsense_is_begun_anew() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("s");
        let state = StateDir::claim(&at).unwrap();
        assert_eq!(state.load::<u32>("n").unwrap(), None);
        state.store("n", &7u32).unwrap();
        assert_eq!(state.load::<u32>("n").unwrap(), Some(7));
        // A crash before the name changed.
        std::fs::write(state.path("n.new"), "8").unwrap();
        assert_eq!(state.load::<u32>("n").unwrap(), Some(7));
        std::fs::write(state.path("n"), "{").unwrap();
        assert_eq!(state.load::<u32>("n").unwrap(), None);
        assert!(StateDir::claim(&at).is_err());
        drop(state);
        StateDir::claim(&at).unwrap();
    }
}
