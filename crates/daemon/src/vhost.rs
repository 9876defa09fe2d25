//! The vhost-user sockets: one per disk, there while the disk is attached.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_reactor::Reactors;
use hearth_vhost::Server;

use crate::error::{Error, Result};
use crate::exports::DiskExport;
use crate::rights::Access;
use crate::rundir::{self, vhost_socket};

/// The sockets of a run directory, and the server behind them.
pub struct VhostSockets {
    run_dir: PathBuf,
    access: Access,
    server: Server,
}

impl VhostSockets {
    /// Starts the server; the run directory is ours already. Its sockets are for those who have
    /// `access`.
    pub fn open(run_dir: &Path, access: Access, reactors: Arc<Reactors>) -> Result<VhostSockets> {
        let server = Server::start(reactors)
            .map_err(|e| Error::internal(format!("cannot start the vhost-user server: {e}")))?;
        Ok(VhostSockets {
            run_dir: run_dir.to_owned(),
            access,
            server,
        })
    }

    /// Offers a disk. One that cannot be is still served over NBD.
    pub(crate) fn listen(&self, export: &Arc<DiskExport>) {
        let name = hearth_vhost::Disk::name(&**export);
        if self.server.is_listening(name) {
            return;
        }
        let path = vhost_socket(&self.run_dir, name);
        match rundir::listen(&path, self.access) {
            Ok(listener) => {
                tracing::info!(disk = name, socket = %path.display(), "serving vhost-user");
                self.server.listen(export.clone(), listener, path);
            }
            Err(e) => tracing::warn!(disk = name, "not served over vhost-user: {e}"),
        }
    }

    /// Takes no more clients for a disk.
    pub(crate) fn unlisten(&self, name: &str) {
        self.server.unlisten(name);
    }

    /// Ends a disk's connections.
    pub(crate) fn disconnect(&self, name: &str) {
        self.server.disconnect(name);
    }

    /// Tells a disk's clients of its new size.
    pub(crate) fn resized(&self, name: &str) {
        self.server.resized(name);
    }

    /// Ends all connections; requests in flight are answered first.
    pub(crate) fn stop(&self) {
        self.server.stop();
    }
}
