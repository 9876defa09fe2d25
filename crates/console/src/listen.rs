//! Connections: how many, how long, and in the clear on loopback only.
//!
//! A silent client keeps no other client out: it is disconnected first when all places are taken.

use std::convert::Infallible;
use std::io::BufReader;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::http::Request;
use hearth_fault::Fault;
use hearth_io::peer::{User, user};
use hyper::body::Incoming;
use hyper::service::Service as _;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio_rustls::TlsAcceptor;

use crate::accounts::Accounts;
use crate::files::{self, Stamp};
use crate::server::{Config, Peer, router, told};
use crate::settings::{Settings, TlsFiles};

/// Most connections, of all and of one user: an address, or an account of this host. A browser has six.
const CONNECTIONS_MAX: usize = 256;
const CONNECTIONS_OF_ONE: usize = 64;
/// Longest a client may take to agree on TLS, to send a header, or to lie idle.
const PATIENCE: Duration = Duration::from_secs(15);
/// Longest a connection lasts: one whose other end takes nothing must not stay for ever.
const CONNECTION_MAX: Duration = Duration::from_secs(15 * 60);
/// Longest header.
const HEADER_MAX: usize = 16 << 10;
/// How often is asked whether the settings have changed.
const LOOK: Duration = Duration::from_millis(500);
/// Pause after an address could not be had, or a connection not be taken.
const PAUSE: Duration = Duration::from_secs(2);
/// Longest wait for what is under way at the end.
const GRACE: Duration = Duration::from_secs(2);

/// Serves the console whenever and as it is enabled, until `stop` is sent or dropped.
///
/// It asks again and again for its settings, so that `hearth console enable` needs nobody to be told.
pub async fn run(config: Config, mut stop: watch::Receiver<bool>) {
    let mut failure = String::new();
    loop {
        // Taken before the settings are read: a change in between is seen as one.
        let stamp = stamps(&config);
        let mut wait = LOOK;
        let ended = match open(&config).await {
            Ok(None) => false,
            Ok(Some(open)) => {
                tracing::info!("the console is at {}", open.settings.url());
                failure.clear();
                let changed = async {
                    while stamps(&config) == stamp {
                        tokio::time::sleep(LOOK).await;
                    }
                };
                let over = tokio::select! {
                    () = changed => false,
                    _ = stop.wait_for(|stop| *stop) => true,
                    () = open.serve(&config) => false,
                };
                if !over {
                    tracing::info!("the settings of the console have changed");
                }
                over
            }
            Err(fault) => {
                let text = fault.to_string();
                if text != failure {
                    tracing::error!("there is no console: {text}");
                    failure = text;
                }
                wait = PAUSE;
                false
            }
        };
        if ended || *stop.borrow() {
            return;
        }
        tokio::select! {
            _ = stop.wait_for(|stop| *stop) => return,
            () = tokio::time::sleep(wait) => {}
        }
    }
}

/// Changes with the settings, and with the certificate, which is renewed every few months.
fn stamps(config: &Config) -> [Stamp; 3] {
    let tls = config.home.settings().ok().and_then(|s| s.tls);
    let of = |path: Option<&PathBuf>| path.and_then(|p| files::stamp(p));
    [
        config.home.settings_stamp(),
        of(tls.as_ref().map(|t| &t.cert)),
        of(tls.as_ref().map(|t| &t.key)),
    ]
}

struct Open {
    settings: Settings,
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
}

async fn open(config: &Config) -> Result<Option<Open>, Fault> {
    let settings = config.reach.applied(config.home.settings()?);
    if !settings.enabled {
        return Ok(None);
    }
    settings.check(&Accounts::read(&config.home)?)?;
    let tls = settings.tls.as_ref().map(acceptor).transpose()?;
    let listener = hearth_io::peer::listen(settings.listen).and_then(|listener| {
        listener.set_nonblocking(true)?;
        TcpListener::from_std(listener)
    });
    let listener = listener.map_err(|e| {
        Fault::new(
            format!("cannot listen on {}: {e}", settings.listen),
            "name another address with hearth console enable --listen",
        )
    })?;
    Ok(Some(Open {
        settings,
        listener,
        tls,
    }))
}

/// What a certificate and its key make.
pub(crate) fn acceptor(files: &TlsFiles) -> Result<TlsAcceptor, Fault> {
    let see = "give a PEM file of the certificate and those above it, and one of its key";
    let read = |path: &std::path::Path| {
        std::fs::File::open(path)
            .map(BufReader::new)
            .map_err(|e| Fault::new(format!("cannot read {}: {e}", path.display()), see))
    };
    let chain: Result<Vec<_>, _> = CertificateDer::pem_reader_iter(read(&files.cert)?).collect();
    let chain = chain.map_err(|e| {
        Fault::new(
            format!("{} is no certificate: {e}", files.cert.display()),
            see,
        )
    })?;
    let key = PrivateKeyDer::from_pem_reader(read(&files.key)?)
        .map_err(|e| Fault::new(format!("{} is no key: {e}", files.key.display()), see))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let server = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|b| b.with_no_client_auth().with_single_cert(chain, key));
    let mut server = server.map_err(|e| {
        Fault::new(
            format!("{} and its key do not fit: {e}", files.cert.display()),
            see,
        )
    })?;
    server.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(server)))
}

/// A connection, as others see it.
struct Entry {
    id: u64,
    user: User,
    /// Since when it has kept us waiting for a request; none while one is answered.
    waits_since: Option<Instant>,
    abort: Option<AbortHandle>,
}

/// All connections.
#[derive(Clone, Default)]
struct Crowd(Arc<Mutex<Vec<Entry>>>);

/// A connection's place among them.
#[derive(Clone)]
struct Place(Arc<Left>);

struct Left {
    crowd: Crowd,
    id: u64,
}

impl Crowd {
    fn lock(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a connection, or none. The one that has kept us waiting for the longest time makes room: first among those
    /// of the same user, if these have their share, then among all.
    fn enter(&self, id: u64, user: User) -> Option<Place> {
        let mut all = self.lock();
        let of_one = all.iter().filter(|entry| entry.user == user).count();
        let is_over = of_one >= CONNECTIONS_OF_ONE;
        if is_over || all.len() >= CONNECTIONS_MAX {
            let waiting = all.iter().enumerate().filter_map(|(at, entry)| {
                let is_own = entry.user == user;
                let since = entry.waits_since.filter(|_| is_own || !is_over);
                Some((since?, at))
            });
            let (_, at) = waiting.min()?;
            if let Some(abort) = all.swap_remove(at).abort {
                abort.abort();
            }
        }
        all.push(Entry {
            id,
            user,
            waits_since: Some(Instant::now()),
            abort: None,
        });
        let crowd = self.clone();
        Some(Place(Arc::new(Left { crowd, id })))
    }

    /// How the connection can be ended. One that made room already is ended at once.
    fn can_abort(&self, id: u64, abort: AbortHandle) {
        match self.lock().iter_mut().find(|entry| entry.id == id) {
            Some(entry) => entry.abort = Some(abort),
            None => abort.abort(),
        }
    }
}

impl Place {
    fn waits(&self, waits: bool) {
        let mut all = self.0.crowd.lock();
        if let Some(entry) = all.iter_mut().find(|entry| entry.id == self.0.id) {
            entry.waits_since = waits.then(Instant::now);
        }
    }
}

impl Drop for Left {
    fn drop(&mut self) {
        self.crowd.lock().retain(|entry| entry.id != self.id);
    }
}

impl Open {
    async fn serve(self, config: &Config) {
        let routes = router(config.clone(), self.settings);
        let crowd = Crowd::default();
        let mut tasks = JoinSet::new();
        let mut last = 0;
        loop {
            let accepted = tokio::select! {
                Some(_) = tasks.join_next() => continue,
                accepted = self.listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, from)) => {
                    last += 1;
                    let own = stream.local_addr().unwrap_or(from);
                    let from = Peer(user(own, from));
                    if let Some(place) = crowd.enter(last, from.0) {
                        let task = tasks.spawn(connection(
                            stream,
                            from,
                            routes.clone(),
                            self.tls.clone(),
                            place,
                        ));
                        crowd.can_abort(last, task);
                    }
                }
                Err(e) => {
                    tracing::warn!("the console cannot take a connection: {e}");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }
}

async fn connection(
    stream: TcpStream,
    from: Peer,
    routes: Router,
    tls: Option<TlsAcceptor>,
    place: Place,
) {
    let _ = stream.set_nodelay(true);
    match tls {
        None => talk(stream, from, routes, place).await,
        Some(tls) => match tokio::time::timeout(PATIENCE, tls.accept(stream)).await {
            Ok(Ok(stream)) => talk(stream, from, routes, place).await,
            Ok(Err(e)) => {
                tracing::debug!("{} does not speak TLS with the console: {e}", told(from.0))
            }
            Err(_) => {}
        },
    }
}

async fn talk(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    from: Peer,
    routes: Router,
    place: Place,
) {
    let routes = TowerToHyperService::new(routes);
    let service = hyper::service::service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(from);
        let (routes, place) = (routes.clone(), place.clone());
        async move {
            place.waits(false);
            let Ok(response) = routes.call(request).await;
            place.waits(true);
            Ok::<_, Infallible>(response)
        }
    });
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(PATIENCE)
        .max_buf_size(HEADER_MAX);
    let mut http = std::pin::pin!(builder.serve_connection(TokioIo::new(stream), service));
    if tokio::time::timeout(CONNECTION_MAX, http.as_mut())
        .await
        .is_err()
    {
        // What is being answered now still is.
        http.as_mut().graceful_shutdown();
        let _ = tokio::time::timeout(GRACE, http).await;
    }
}
