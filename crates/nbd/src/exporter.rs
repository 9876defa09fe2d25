//! NBD as the daemon sees it: one unix socket, perhaps TCP as well, and exports by name.

use crate::carried::State as Carried;
use crate::factory::NbdFactory;
use crate::session::NbdSession;
use hearth_reactor::{Caller, ListenerId, Reactors, SessionFactory};
use hearth_volume::{Catalog, Exporter, Fault, Host, Protocol, Socket, SocketFile, Volume};
use rustls::ServerConfig;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What NBD is called.
pub const PROTOCOL: Protocol = Protocol("nbd");

/// The socket in the run directory.
pub const SOCKET: &str = "nbd.sock";

/// NBD over TCP.
pub struct Tcp {
    /// Listens.
    pub listener: TcpListener,
    /// Its certificates and whether clients must use them; `None`: no TLS.
    pub tls: Option<(Arc<ServerConfig>, bool)>,
}

/// A socket nobody accepts from yet, and who will greet its clients.
type Waiting = (OwnedFd, Arc<dyn SessionFactory>, String);

#[derive(Default)]
struct State {
    waiting: Vec<Waiting>,
    accepting: Vec<ListenerId>,
    /// The unix socket's file, as long as it listens.
    path: Option<SocketFile>,
    /// Connections of the program before, until it is open.
    carried: Vec<(OwnedFd, Carried)>,
    /// So many of them are gone on with.
    resumed: u64,
}

/// See the module.
pub struct NbdExporter {
    reactors: Arc<Reactors>,
    exports: Arc<Catalog>,
    /// Of the listener on TCP.
    over_tcp: Option<Arc<NbdFactory>>,
    state: Mutex<State>,
}

impl NbdExporter {
    /// Listens on the socket of the run directory, and on `tcp`; clients wait until it is
    /// [opened](Exporter::open). Those who were connected to the program before go on then, if their exports are on
    /// offer; they do not wait for others.
    pub fn start(
        host: &dyn Host,
        tcp: Option<Tcp>,
        carried: Vec<(OwnedFd, Carried)>,
    ) -> Result<NbdExporter, Fault> {
        let exports = Arc::new(Catalog::default());
        let mut state = State {
            carried,
            ..State::default()
        };
        let mut over_tcp = None;
        if let Some(Tcp { listener, tls }) = tcp {
            let address = listener
                .local_addr()
                .map_or_else(|_| "TCP".to_owned(), |a| a.to_string());
            let factory = match tls {
                None => NbdFactory::plain(exports.clone()),
                Some((config, required)) => NbdFactory::with_tls(exports.clone(), config, required),
            };
            let factory = Arc::new(factory);
            over_tcp = Some(factory.clone());
            let waiting: Waiting = (listener.into(), factory, address);
            state.waiting.push(waiting);
        }
        let Socket { listener, path } = host.listen(Path::new(SOCKET))?;
        let factory = NbdFactory::plain(exports.clone());
        let shown = path.display().to_string();
        state
            .waiting
            .push((listener.into(), Arc::new(factory), shown));
        state.path = Some(path);
        Ok(NbdExporter {
            reactors: host.reactors().clone(),
            exports,
            over_tcp,
            state: Mutex::new(state),
        })
    }

    /// Uses other certificates for TLS from the next connection on; nothing without TLS.
    pub fn renew_tls(&self, config: Arc<ServerConfig>) {
        if let Some(factory) = &self.over_tcp {
            factory.renew_tls(config);
        }
    }

    /// Connections of the program before that are gone on with.
    pub fn resumed(&self) -> u64 {
        self.lock().resumed
    }

    /// Goes on with those connections of the program before that can be gone on with, and cuts the others.
    fn take_up(&self) {
        let waiting = std::mem::take(&mut self.lock().carried);
        for (socket, state) in waiting {
            let caller = Caller::of_connection(&socket);
            let who = caller.to_string();
            let session = NbdSession::resume(self.exports.clone(), caller, state);
            let outcome = session.map(|s| self.reactors.adopt(socket, Box::new(s)));
            match outcome {
                Some(Ok(())) => self.lock().resumed += 1,
                Some(Err(e)) => tracing::error!(peer = who, "an NBD client was cut off: {e}"),
                None => tracing::error!(
                    peer = who,
                    "an NBD client was cut off: its disk is not there, is another one, or does not take it"
                ),
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Exporter for NbdExporter {
    fn protocol(&self) -> Protocol {
        PROTOCOL
    }

    fn offer(&self, volume: Arc<dyn Volume>) -> Result<(), Fault> {
        self.exports.insert(volume);
        Ok(())
    }

    fn withdraw(&self, name: &str) {
        self.exports.remove(name);
    }

    fn open(&self) {
        self.take_up();
        let mut state = self.lock();
        for (socket, factory, address) in std::mem::take(&mut state.waiting) {
            state.accepting.push(self.reactors.listen(socket, factory));
            tracing::info!(%address, "serving NBD");
        }
    }

    fn close(&self) {
        let State {
            accepting, path, ..
        } = std::mem::take(&mut *self.lock());
        for listener in accepting {
            self.reactors.unlisten(listener);
        }
        drop(path);
    }

    fn hand_over(&self) {
        // Whoever comes before the data threads hand over is served, or goes over with the others.
        drop(self.lock().path.take());
    }
}
