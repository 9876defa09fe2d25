//! A directory of a local file system as a [`Tree`].
//!
//! Clients name files by handles, which live on over renames and restarts; paths do not. So a file
//! is found by what the file system itself calls it (`name_to_handle_at`: inode and generation), and
//! opened by that; or, where that may not be, by its number and time of birth ([`By::Number`]). The kernel is never given a
//! path that could lead out of the directory, no symbolic link is followed, and nothing that is mounted inside entered. A file keeps its handle when it is moved, also when somebody on
//! this host moves it out of the directory: then those who know the handle of the file itself still reach it, as with
//! other NFS servers. A directory that is moved out is stale.
//!
//! Who may do what is decided here, by owner, group and mode, for the daemon itself may everything.
//! Access control lists are not looked at.
//!
//! # What is durable when
//!
//! A write is followed by as much of `fsync` as was asked for. A name is durable when the file behind
//! it was synced first and then its directory: a crash in between leaves a file without a name, never a
//! name without its file. A rename syncs both directories, the new one first: a crash in between leaves two names and
//! never none, where the file system itself does not keep the two together.

mod cached;
mod changes;
mod entry;
mod names;
mod sys;
mod tree;
mod uncommitted;
mod walk;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use crate::handle::Key;
use crate::identity::{self, Identity, Verifier};
use crate::ledger::Ledger;
use crate::server::Export;
use crate::tree::Tree;
pub use cached::may_use_data;
use changes::Changes;
pub use sys::{key_by_handle, key_of_open};
use uncommitted::Uncommitted;
use walk::Walk;

/// Why a directory cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It cannot be opened, or what is kept of it cannot be read.
    #[error("{what}: {error}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        error: io::Error,
    },
    /// Its file system gives files no lasting names, or we may not use them.
    #[error("the files of {dir} cannot be found again: {error}")]
    Lasting {
        /// The directory.
        dir: String,
        /// Why not.
        error: io::Error,
    },
}

/// How files are found again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// By the file system's own handles: takes root's rights (`CAP_DAC_READ_SEARCH`).
    Handle,
    /// By number and time of birth: takes a file system that tells it.
    Number,
}

impl By {
    /// The key of an open file, and what tells files of another file system.
    fn key_of(self, file: &impl AsFd) -> io::Result<(Key, u64)> {
        match self {
            By::Handle => sys::key_of(file).map(|(key, mount)| (key, mount as u64)),
            By::Number => walk::key_of(file),
        }
    }
}

/// All keys that an open file can have: how the files of its directory are found is not looked at. It may be open by path only.
pub fn keys_of_open(file: &impl AsFd) -> Vec<Key> {
    let keys = [By::Handle, By::Number].map(|by| by.key_of(file));
    keys.into_iter().flatten().map(|(key, _)| key).collect()
}

/// See the module.
pub struct Directory {
    root: OwnedFd,
    root_key: Key,
    /// The number of the root, which `..` in it has as well.
    root_id: u64,
    /// What tells a file of another file system.
    mount: u64,
    by: By,
    walk: Walk,
    /// We may give files to others.
    privileged: bool,
    store: u64,
    verifier: Verifier,
    /// Where what has to outlive restarts is kept.
    state: PathBuf,
    changes: Changes,
    uncommitted: Uncommitted,
}

impl Directory {
    /// Opens a directory, by handle if that can be. What has to outlive restarts is kept in `state`, which is not in it.
    /// How files are found is decided once: another way would make all handles stale.
    pub fn open(dir: &Path, state: &Path) -> Result<(Directory, Identity), OpenError> {
        let kept = |error| OpenError::Io {
            what: format!("what is kept of {} in {}", dir.display(), state.display()),
            error,
        };
        if let Some(by) = identity::way(state).map_err(kept)? {
            return Directory::open_by(by, dir, state);
        }
        let opened = match Directory::open_by(By::Handle, dir, state) {
            Err(OpenError::Lasting { error, .. }) => {
                tracing::info!(dir = %dir.display(), %error, "files are found by number, not by handle");
                Directory::open_by(By::Number, dir, state)?
            }
            other => other?,
        };
        identity::keep_way(state, opened.0.by).map_err(kept)?;
        Ok(opened)
    }

    /// Opens a directory whose files are to be found so.
    pub fn open_by(by: By, dir: &Path, state: &Path) -> Result<(Directory, Identity), OpenError> {
        let io = |what: String| move |error: io::Error| OpenError::Io { what, error };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let shown = dir.display().to_string();
        let root =
            rustix::fs::open(dir, flags, Mode::empty()).map_err(|e| io(shown.clone())(e.into()))?;
        let lasting = |error: io::Error| OpenError::Lasting {
            dir: shown.clone(),
            error,
        };
        let (root_key, mount) = by.key_of(&root).map_err(lasting)?;
        if by == By::Handle {
            // Tried once, so that what is missing is told now and not to the first client.
            sys::open(&root, &root_key, OFlags::PATH).map_err(lasting)?;
        }
        let stat = rustix::fs::fstat(&root).map_err(|e| io(shown.clone())(e.into()))?;
        let kept = || io(format!("what is kept of {shown} in {}", state.display()));
        let identity = Identity::load(state).map_err(kept())?;
        let verifier = Verifier::load(state).map_err(kept())?;
        let directory = Directory {
            root,
            root_key,
            root_id: stat.st_ino,
            mount,
            by,
            walk: Walk::default(),
            privileged: rustix::process::geteuid().is_root(),
            store: identity.store,
            verifier,
            state: state.to_owned(),
            changes: Changes::default(),
            uncommitted: Uncommitted::default(),
        };
        Ok((directory, identity))
    }

    /// The file of a key, opened.
    fn open_key(&self, key: &Key, flags: OFlags) -> io::Result<OwnedFd> {
        match self.by {
            By::Handle => sys::open(&self.root, key, flags),
            By::Number => self.walk.open(&self.root, &self.root_key, key, flags),
        }
    }

    /// An export of it.
    pub fn export(self, path: &str, identity: &Identity) -> Export {
        Export {
            path: path.to_owned(),
            sealer: crate::handle::Sealer::new(identity.store, &identity.secret),
            store: identity.store,
            ledger: Ledger::beside(&self.state, identity),
            locks: std::sync::Arc::new(crate::nlm::locks::Locks::open(&self.state)),
            tree: std::sync::Arc::new(self) as std::sync::Arc<dyn Tree>,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v3::Status;

    /// A daemon that had no rights once, and has them now, or the other way round.
    #[test]
    fn how_files_are_found_is_decided_once() {
        let place = tempfile::tempdir().expect("a directory");
        let state = place.path().join("state");
        let (first, _) = Directory::open(place.path(), &state).expect("opened");
        let (again, _) = Directory::open(place.path(), &state).expect("opened");
        assert_eq!((first.by, first.root_key), (again.by, again.root_key));
        identity::keep_way(&state, By::Number).expect("kept");
        let (other, _) = Directory::open(place.path(), &state).expect("opened");
        assert_eq!(other.by, By::Number);
        std::fs::write(state.join("files"), "by magic").expect("written");
        assert!(Directory::open(place.path(), &state).is_err());
    }

    /// A failed write-back cannot be made to happen on every machine; what follows from it can be seen.
    #[test]
    fn a_failed_sync_is_told_to_all_who_have_unstable_data() {
        let place = tempfile::tempdir().expect("a directory");
        let state = place.path().join("state");
        let open = || match Directory::open(place.path(), &state) {
            Ok((directory, _)) => Some(directory),
            Err(error) => {
                eprintln!("a_failed_sync_is_told_to_all_who_have_unstable_data: skipped: {error}");
                None
            }
        };
        let Some(directory) = open() else { return };
        let before = directory.verifier.get();
        assert_eq!(directory.synced(Ok(())), Ok(()));
        assert_eq!(directory.verifier.get(), before);
        let failed = directory.synced(Err(io::Error::from_raw_os_error(libc::EIO)));
        assert_eq!(failed, Err(Status::Io));
        let after = directory.verifier.get();
        assert_ne!(after, before);
        drop(directory);
        assert_eq!(open().expect("as before").verifier.get(), after);
    }
}
