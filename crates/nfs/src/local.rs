//! A directory of a local file system as a [`Tree`].
//!
//! Clients name files by handles, which live on over renames and restarts; paths do not. So a file
//! is found by what the file system itself calls it (`name_to_handle_at`: inode and generation), and
//! opened by that. No path of more than one component is ever given to the kernel, no symbolic link
//! followed, and nothing that is mounted inside the directory entered. A file keeps its handle when it is moved, also when somebody on
//! this host moves it out of the directory: then it is still reached by those who know it, as with
//! other NFS servers.
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

mod changes;
mod entry;
mod names;
mod sys;
mod tree;
mod uncommitted;

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{Mode, OFlags};

use crate::handle::Key;
use crate::identity::{Identity, Verifier};
use crate::server::Export;
use crate::tree::Tree;
use changes::Changes;
use uncommitted::Uncommitted;

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
    #[error("the file system of {dir} does not let files be opened by handle: {error}")]
    Handles {
        /// The directory.
        dir: String,
        /// Why not.
        error: io::Error,
    },
}

/// See the module.
pub struct Directory {
    root: OwnedFd,
    root_key: Key,
    /// The number of the root, which `..` in it has as well.
    root_id: u64,
    mount: i32,
    store: u64,
    verifier: Verifier,
    changes: Changes,
    uncommitted: Uncommitted,
}

impl Directory {
    /// Opens a directory. What has to outlive restarts is kept in `state`, which is not in it.
    pub fn open(dir: &Path, state: &Path) -> Result<(Directory, Identity), OpenError> {
        let io = |what: String| move |error: io::Error| OpenError::Io { what, error };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let shown = dir.display().to_string();
        let root =
            rustix::fs::open(dir, flags, Mode::empty()).map_err(|e| io(shown.clone())(e.into()))?;
        let handles = |error: io::Error| OpenError::Handles {
            dir: shown.clone(),
            error,
        };
        let (root_key, mount) = sys::key_of(&root).map_err(handles)?;
        // Tried once, so that what is missing is told now and not to the first client.
        let again = sys::open(&root, &root_key, OFlags::PATH).map_err(handles)?;
        let stat = rustix::fs::fstat(&again).map_err(|e| handles(e.into()))?;
        let kept = || io(format!("what is kept of {shown} in {}", state.display()));
        let identity = Identity::load(state).map_err(kept())?;
        let verifier = Verifier::load(state).map_err(kept())?;
        let directory = Directory {
            root,
            root_key,
            root_id: stat.st_ino,
            mount,
            store: identity.store,
            verifier,
            changes: Changes::default(),
            uncommitted: Uncommitted::default(),
        };
        Ok((directory, identity))
    }

    /// An export of it, for those whom `access` names.
    pub fn export(self, path: &str, identity: &Identity, access: crate::access::Access) -> Export {
        Export {
            path: path.to_owned(),
            sealer: crate::handle::Sealer::new(identity.store, &identity.secret),
            store: identity.store,
            access,
            tree: std::sync::Arc::new(self) as std::sync::Arc<dyn Tree>,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v3::Status;

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
