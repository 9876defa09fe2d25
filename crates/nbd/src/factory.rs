//! Makes a session of every connection to a listening socket.

use crate::handshake::TlsMode;
use crate::session::NbdSession;
use crate::tls::TlsSession;
use hearth_reactor::{Caller, PeerInfo, Session, SessionFactory};
use hearth_volume::Catalog;
use rustls::ServerConfig;
use std::sync::{Arc, PoisonError, RwLock};

/// The NBD server behind one listening socket.
pub struct NbdFactory {
    exports: Arc<Catalog>,
    mode: TlsMode,
    tls: RwLock<Option<Arc<ServerConfig>>>,
}

impl NbdFactory {
    /// A server without TLS: for unix sockets and loopback.
    pub fn plain(exports: Arc<Catalog>) -> NbdFactory {
        NbdFactory {
            exports,
            mode: TlsMode::Off,
            tls: RwLock::new(None),
        }
    }

    /// A server with TLS; `required`: clients get nothing without it. See
    /// [`certs::load`](crate::certs::load) for the configuration.
    pub fn with_tls(
        exports: Arc<Catalog>,
        config: Arc<ServerConfig>,
        required: bool,
    ) -> NbdFactory {
        let mode = if required {
            TlsMode::Required
        } else {
            TlsMode::Allowed
        };
        NbdFactory {
            exports,
            mode,
            tls: RwLock::new(Some(config)),
        }
    }

    /// New certificates, for connections from now on. Without effect on a server without TLS.
    pub fn renew_tls(&self, config: Arc<ServerConfig>) {
        if self.mode != TlsMode::Off {
            *self.tls.write().unwrap_or_else(PoisonError::into_inner) = Some(config);
        }
    }
}

impl SessionFactory for NbdFactory {
    fn connect(&self, peer: &PeerInfo) -> Option<Box<dyn Session>> {
        let caller = Caller::new(peer.address);
        let session = NbdSession::of_caller(self.exports.clone(), self.mode, caller);
        let tls = self
            .tls
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        Some(match tls {
            Some(config) => Box::new(TlsSession::new(session, config)),
            None => Box::new(session),
        })
    }
}
