//! Connections: how many, how long, and in the clear on loopback only.
//!
//! A silent client keeps no other client out: it is disconnected first when all places are taken.

use std::convert::Infallible;
use std::io::BufReader;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::Request;
use hearth_fault::Fault;
use hearth_io::limiter::{Limiter, Place};
use hearth_io::peer::user;
use hyper::body::Incoming;
use hyper::service::Service as _;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
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

impl Open {
    async fn serve(self, config: &Config) {
        let routes = router(config.clone(), self.settings);
        let limiter = Limiter::new(CONNECTIONS_MAX, CONNECTIONS_OF_ONE);
        let mut tasks = JoinSet::new();
        loop {
            let accepted = tokio::select! {
                Some(_) = tasks.join_next() => continue,
                accepted = self.listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, from)) => {
                    let own = stream.local_addr().unwrap_or(from);
                    let from = Peer(user(own, from));
                    if let Some(place) = limiter.enter(from.0) {
                        let task = tasks.spawn(connection(
                            stream,
                            from,
                            routes.clone(),
                            self.tls.clone(),
                            place.clone(),
                        ));
                        place.ends_with(move || task.abort());
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
