//! Requests, one after the other: the page, logging in and out, and what is passed on to the daemon.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use axum::Json;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header};
use axum::response::{IntoResponse, Response};
use hearth_fault::Fault;
use hearth_io::peer::User;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::accounts::{Accounts, Role};
use crate::answer::{refusal, seal};
use crate::forward::{self, Not, To};
use crate::pack::{packed, takes_gzip};
use crate::sessions::{Sessions, Who};
use crate::settings::{Home, Reach, Settings};
use crate::throttle::Throttle;
use crate::{assets, gate, links, paths};

/// Longest request body: settings of one disk are a few hundred bytes.
const BODY_MAX: usize = 64 << 10;
/// Longest it may take to come.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// Most passwords being checked, or waiting for it: each check takes 19 MiB and tens of milliseconds.
const CHECKS_MAX: usize = 8;
/// The header that carries the page's half of a session.
const TOKEN: &str = "hearth-token";
/// The header of requests that nobody's hand made.
const PASSIVE: &str = "hearth-passive";

/// What somebody wants to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A disk, by guests.
    Disk,
    /// A datastore, by hosts.
    Datastore,
}

/// Tells what to type to use something of this name, for guests or hosts of a kind.
pub type Attach = Arc<dyn Fn(What, &str, &str) -> Result<Value, Fault> + Send + Sync>;

/// What a console needs.
#[derive(Clone)]
pub struct Config {
    /// Its folder.
    pub home: Home,
    /// What the host's file says of what users may reach.
    pub reach: Reach,
    /// The daemon's control socket.
    pub socket: PathBuf,
    /// The socket of the second service, which knows of health and alerts.
    pub monitor: PathBuf,
    /// The name of this host.
    pub host: String,
    /// How disks and datastores are used, if that is known.
    pub attach: Option<Attach>,
}

/// From where a connection comes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer(pub User);

/// A user, for people.
pub(crate) fn told(user: User) -> String {
    match user {
        User::Uid(uid) => format!("account {uid} of this host"),
        User::Address(address) => address.to_string(),
    }
}

struct Console {
    config: Config,
    settings: Settings,
    cookie: String,
    sessions: Mutex<Sessions>,
    throttle: Mutex<Throttle>,
    checks: Semaphore,
    places: Semaphore,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The console as these settings have it. Over TLS if they say so: cookies are marked by that.
pub fn router(config: Config, settings: Settings) -> Router {
    // Cookies belong to a host, whatever the port; two consoles on one host keep apart by name.
    let port = settings.listen.port();
    let cookie = match settings.tls {
        Some(_) => format!("__Host-hearth-{port}"),
        None => format!("hearth-{port}"),
    };
    let console = Arc::new(Console {
        config,
        settings,
        cookie,
        sessions: Mutex::default(),
        throttle: Mutex::new(Throttle::new()),
        checks: Semaphore::new(1),
        places: Semaphore::new(CHECKS_MAX),
    });
    Router::new().fallback(handle).with_state(console)
}

async fn handle(State(console): State<Arc<Console>>, request: Request<Body>) -> Response {
    let secure = console.settings.tls.is_some();
    seal(console.answer(request).await, secure)
}

fn no_session() -> Response {
    refusal(
        StatusCode::UNAUTHORIZED,
        &Fault::new(
            "you are not logged in",
            "log in, or use the link that hearth console open prints",
        ),
    )
}

fn not_found() -> Response {
    refusal(
        StatusCode::NOT_FOUND,
        &Fault::bare("the console has nothing of this name"),
    )
}

fn bad(fault: &Fault) -> Response {
    refusal(StatusCode::BAD_REQUEST, fault)
}

/// A session's two halves, as a request carries them.
struct Shown {
    cookie: String,
    token: String,
    passive: bool,
}

impl Console {
    async fn answer(self: Arc<Console>, request: Request<Body>) -> Response {
        let (head, body) = request.into_parts();
        let path = head.uri.path();
        let api = path.starts_with("/v1/") || path.starts_with("/console/");
        let secure = self.settings.tls.is_some();
        if let Err((status, fault)) = gate::check(&head.method, &head.headers, api, secure) {
            return refusal(status, &fault);
        }
        if !api {
            return match head.method == Method::GET || head.method == Method::HEAD {
                true => assets::serve(path, &head.headers),
                false => StatusCode::METHOD_NOT_ALLOWED.into_response(),
            };
        }
        if path == "/console/login" {
            let from = head.extensions.get::<Peer>();
            let from = from.map_or(User::Address(Ipv4Addr::UNSPECIFIED.into()), |p| p.0);
            return match head.method == Method::POST && is_json(&head.headers) {
                true => self.log_in(from, body).await,
                false => bad(&Fault::bare("logging in is a POST of JSON")),
            };
        }
        // Nothing of the rest is read, nor told, without a session.
        let shown = self.shown(&head.headers);
        let Some((who, shown)) = shown.and_then(|s| Some((self.who(&s)?, s))) else {
            return no_session();
        };
        let query = head.uri.query();
        match (&head.method, path) {
            (&Method::GET, "/console/session") => Json(self.session(&who)).into_response(),
            (&Method::POST, "/console/logout") => {
                lock(&self.sessions).end(&shown.cookie);
                self.with_cookie(Json(json!({"done": true})).into_response(), "", 0)
            }
            (&Method::GET, "/console/browse") => self.browse(&who, query).await,
            (&Method::GET, p) if p.starts_with("/console/attach/") => {
                let name = &p["/console/attach/".len()..];
                self.attach(What::Disk, name, query).await
            }
            (&Method::GET, p) if p.starts_with("/console/mount/") => {
                let name = &p["/console/mount/".len()..];
                self.attach(What::Datastore, name, query).await
            }
            (method, path) => match forward::call(who.role, method, path, query) {
                Ok(call) => match whole(body).await {
                    Err(response) => response,
                    Ok(body) => {
                        let packs = call.asks() && takes_gzip(&head.headers);
                        let response = self.pass_on(call, body, &who).await;
                        match packs && response.status() == StatusCode::OK {
                            true => packed(response),
                            false => response,
                        }
                    }
                },
                Err(Not::Known) => not_found(),
                Err(Not::Allowed) => refusal(
                    StatusCode::FORBIDDEN,
                    &Fault::new(
                        format!("a {} may not do that", who.role.word()),
                        "log in as an operator",
                    ),
                ),
            },
        }
    }

    fn shown(&self, headers: &HeaderMap) -> Option<Shown> {
        let cookie = gate::cookie(headers, &self.cookie)?;
        let token = headers.get(TOKEN)?.to_str().ok()?;
        Some(Shown {
            cookie: cookie.to_owned(),
            token: token.to_owned(),
            passive: headers.contains_key(PASSIVE),
        })
    }

    /// Who that is, if he still may: an account that is gone, or has another password or role since, may not.
    fn who(&self, shown: &Shown) -> Option<Who> {
        let now = Instant::now();
        let mut sessions = lock(&self.sessions);
        let who = sessions.find(&shown.cookie, &shown.token, shown.passive, now)?;
        let Some(name) = who.account.clone() else {
            return Some(who.clone());
        };
        let stamp = Accounts::stamp(&self.config.home);
        if stamp != who.seen {
            let accounts = Accounts::read(&self.config.home).ok();
            let same = accounts.as_ref().and_then(|a| a.get(&name));
            if same.is_none_or(|account| Some(account) != who.as_of.as_ref()) {
                sessions.end(&shown.cookie);
                return None;
            }
            who.seen = stamp;
        }
        Some(who.clone())
    }

    fn session(&self, who: &Who) -> Value {
        json!({
            "name": who.name(),
            "role": who.role,
            "link": who.account.is_none(),
            "host": self.config.host,
            "browse": !self.settings.paths.is_empty(),
            "servers": self.settings.servers,
            "attach": self.config.attach.is_some(),
            "version": env!("CARGO_PKG_VERSION"),
        })
    }

    async fn log_in(self: &Arc<Console>, from: User, body: Body) -> Response {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields, untagged)]
        enum Asked {
            Link { link: String },
            Password { name: String, password: String },
        }
        let body = match whole(body).await {
            Ok(body) => body,
            Err(response) => return response,
        };
        // What was in it is not repeated: it may be a password.
        let Ok(asked) = serde_json::from_slice(&body) else {
            return bad(&Fault::bare("this is no way to log in"));
        };
        let (name, password) = match asked {
            Asked::Link { link } => {
                return match links::take(&self.config.home, &link, SystemTime::now()) {
                    Some(role) => self.begin(Who::with_link(role)),
                    None => refusal(
                        StatusCode::UNAUTHORIZED,
                        &Fault::new(
                            "this link is used up, too old, or none of ours",
                            "hearth console open prints a new one",
                        ),
                    ),
                };
            }
            Asked::Password { name, password } => (name, password),
        };
        let slow = |wait: Duration| {
            let seconds = wait.as_secs() + 1;
            let fault = Fault::new(
                "there were too many wrong passwords",
                format!("try again in {seconds} s"),
            );
            let mut response = refusal(StatusCode::TOO_MANY_REQUESTS, &fault);
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, HeaderValue::from(seconds));
            response
        };
        // Names longer than any account's need not be remembered.
        let name: String = name.chars().take(64).collect();
        let Ok(_place) = self.places.try_acquire() else {
            return slow(Duration::from_secs(1));
        };
        let Ok(_turn) = self.checks.acquire().await else {
            return slow(Duration::from_secs(1));
        };
        // Asked in one's turn: of many guesses sent at once each is counted before the next.
        let wait = lock(&self.throttle).wait(from, &name, Instant::now());
        if !wait.is_zero() {
            return slow(wait);
        }
        let console = self.clone();
        let asked = name.clone();
        let checked = tokio::task::spawn_blocking(move || {
            let stamp = Accounts::stamp(&console.config.home);
            let accounts = Accounts::read(&console.config.home)?;
            let found = accounts.check(&asked, &password);
            Ok::<_, Fault>(found.map(|account| Who::with_account(&asked, account, stamp)))
        });
        match checked.await {
            Ok(Ok(Some(who))) => {
                lock(&self.throttle).right(from);
                tracing::info!("{name} logged in to the console from {}", told(from));
                self.begin(who)
            }
            Ok(Ok(None)) => {
                lock(&self.throttle).wrong(from, &name, Instant::now());
                tracing::warn!(
                    from = told(from),
                    "a wrong name or password was given to the console"
                );
                refusal(
                    StatusCode::UNAUTHORIZED,
                    &Fault::bare("there is no such account, or the password is another one"),
                )
            }
            Ok(Err(fault)) => {
                tracing::error!("nobody can log in to the console: {fault}");
                let told = Fault::new("nobody can log in now", "see the log of the console");
                refusal(StatusCode::INTERNAL_SERVER_ERROR, &told)
            }
            Err(_) => refusal(
                StatusCode::INTERNAL_SERVER_ERROR,
                &Fault::bare("the password could not be checked"),
            ),
        }
    }

    fn begin(&self, who: Who) -> Response {
        let mut told = self.session(&who);
        let Some(given) = lock(&self.sessions).begin(who, Instant::now()) else {
            return refusal(
                StatusCode::INTERNAL_SERVER_ERROR,
                &Fault::bare("the system gives no random numbers"),
            );
        };
        told["token"] = Value::String(given.token);
        let age = crate::sessions::WHOLE.as_secs();
        self.with_cookie(Json(told).into_response(), &given.cookie, age)
    }

    fn with_cookie(&self, mut response: Response, value: &str, age: u64) -> Response {
        let secure = match self.settings.tls {
            Some(_) => "; Secure",
            None => "",
        };
        let text = format!(
            "{}={value}; Path=/; HttpOnly; SameSite=Strict; Max-Age={age}{secure}",
            self.cookie
        );
        if let Ok(value) = HeaderValue::from_str(&text) {
            response.headers_mut().insert(header::SET_COOKIE, value);
        }
        response
    }

    /// What may be reached in a directory. Viewers see disks, not the host.
    async fn browse(self: &Arc<Console>, who: &Who, query: Option<&str>) -> Response {
        if who.role < Role::Operator {
            let fault = Fault::new("a viewer may not do that", "log in as an operator");
            return refusal(StatusCode::FORBIDDEN, &fault);
        }
        let path = match query {
            None => None,
            Some(query) => {
                let given = query.strip_prefix("path=");
                match given.and_then(forward::unescape) {
                    Some(path) => Some(path),
                    None => return bad(&Fault::bare("the question is not understood")),
                }
            }
        };
        let console = self.clone();
        let look = move || paths::browse(&console.settings, path.as_deref());
        match tokio::task::spawn_blocking(look).await {
            Ok(Ok(listing)) => Json(listing).into_response(),
            Ok(Err(fault)) => refusal(StatusCode::FORBIDDEN, &fault),
            Err(_) => refusal(
                StatusCode::INTERNAL_SERVER_ERROR,
                &Fault::bare("the directory could not be read"),
            ),
        }
    }

    async fn attach(&self, what: What, name: &str, query: Option<&str>) -> Response {
        let hypervisor = query.and_then(|q| q.strip_prefix("for="));
        let (Some(attach), Some(hypervisor), Some(name)) = (
            self.config.attach.clone(),
            hypervisor,
            forward::unescape(name),
        ) else {
            return not_found();
        };
        let hypervisor = hypervisor.to_owned();
        let text = tokio::task::spawn_blocking(move || attach(what, &name, &hypervisor));
        match text.await {
            Ok(Ok(text)) => Json(text).into_response(),
            Ok(Err(fault)) => bad(&fault),
            Err(_) => refusal(
                StatusCode::INTERNAL_SERVER_ERROR,
                &Fault::bare("what to type could not be put together"),
            ),
        }
    }

    async fn pass_on(&self, call: forward::Call, body: Bytes, who: &Who) -> Response {
        let body = match call.body(&self.settings, body) {
            Ok(body) => body,
            Err(fault) => return refusal(StatusCode::FORBIDDEN, &fault),
        };
        let socket = match call.to {
            To::Daemon => &self.config.socket,
            To::Monitor => &self.config.monitor,
        };
        call.send(socket, body, who.name()).await
    }
}

fn is_json(headers: &HeaderMap) -> bool {
    // A form of another site can send text, but nothing that calls itself this.
    let kind = headers
        .get(header::CONTENT_TYPE)
        .and_then(|v| v.to_str().ok());
    kind.is_some_and(|k| {
        k.split(';')
            .next()
            .is_some_and(|k| k.trim() == "application/json")
    })
}

async fn whole(body: Body) -> Result<Bytes, Response> {
    match tokio::time::timeout(BODY_TIMEOUT, Limited::new(body, BODY_MAX).collect()).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(e)) if e.is::<LengthLimitError>() => Err(refusal(
            StatusCode::PAYLOAD_TOO_LARGE,
            &Fault::bare(format!(
                "the request's body is longer than {BODY_MAX} bytes"
            )),
        )),
        Ok(Err(_)) => Err(bad(&Fault::new(
            "the request's body broke off",
            "send it again",
        ))),
        Err(_) => Err(refusal(
            StatusCode::REQUEST_TIMEOUT,
            &Fault::new("the request's body did not come whole", "send it at once"),
        )),
    }
}
