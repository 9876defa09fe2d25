//! vhost-user as the daemon sees it: a socket for each volume, there while the volume is on offer.

use crate::server::Server;
use hearth_volume::{Exporter, Fault, Host, Protocol, Socket, Volume};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What vhost-user is called.
pub const PROTOCOL: Protocol = Protocol("vhost-user");

/// The directory of the sockets in the run directory.
pub const DIRECTORY: &str = "vhost";

/// A volume's socket, seen from the run directory.
pub fn socket_name(volume: &str) -> PathBuf {
    Path::new(DIRECTORY).join(format!("{volume}.sock"))
}

/// See the module.
pub struct VhostExporter {
    host: Arc<dyn Host>,
    server: Server,
}

impl VhostExporter {
    /// Starts the server; it has no sockets yet.
    pub fn start(host: Arc<dyn Host>) -> Result<VhostExporter, Fault> {
        let server = Server::start(host.reactors().clone()).map_err(|e| {
            Fault::new(
                format!("cannot start the vhost-user server: {e}"),
                "check the limits on processes and open files",
            )
        })?;
        Ok(VhostExporter { host, server })
    }
}

impl Exporter for VhostExporter {
    fn protocol(&self) -> Protocol {
        PROTOCOL
    }

    fn offer(&self, volume: Arc<dyn Volume>) -> Result<(), Fault> {
        let name = volume.name().to_owned();
        if self.server.is_listening(&name) {
            return Ok(());
        }
        let Socket { listener, path } = self.host.listen(&socket_name(&name))?;
        tracing::info!(disk = %name, socket = %path.display(), "serving vhost-user");
        self.server.listen(volume, listener, path);
        Ok(())
    }

    fn withdraw(&self, name: &str) {
        self.server.unlisten(name);
    }

    fn disconnect(&self, name: &str) {
        self.server.disconnect(name);
    }

    fn resized(&self, name: &str) {
        self.server.resized(name);
    }

    fn close(&self) {
        self.server.close();
    }

    fn stop(&self) {
        self.server.stop();
    }
}
