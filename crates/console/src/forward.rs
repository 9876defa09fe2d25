//! What of the daemon's API is let through, for whom, and how it gets there.
//!
//! The list says what is allowed; what is not in it does not exist here. So a call that a later version of the
//! daemon learns is nobody's until somebody has thought about who may make it. The path that the daemon sees
//! is put together anew from the list and the names in the request: nothing of it is copied unread.

use std::path::Path;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, Method, Request, StatusCode, header};
use axum::response::Response;
use hearth_config::reach::Look;
use hearth_fault::Fault;
use http_body_util::Full;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;

use crate::accounts::Role;
use crate::answer::refusal;
use crate::settings::Settings;

/// Longest the daemon may take to tell something, and to carry out an order.
const ASK_TIMEOUT: Duration = Duration::from_secs(30);
const ORDER_TIMEOUT: Duration = Duration::from_secs(120);
/// Longest name of anything.
const NAME_MAX: usize = 128;

/// Who answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum To {
    /// The daemon.
    Daemon,
    /// The second service, which the console is a part of: health and alerts are its.
    Monitor,
}

struct Rule {
    method: Method,
    to: To,
    /// `*` stands for a name.
    path: &'static str,
    role: Role,
    look: Look,
}

const fn see(path: &'static str) -> Rule {
    Rule {
        method: Method::GET,
        to: To::Daemon,
        path,
        role: Role::Viewer,
        look: Look::Nothing,
    }
}

const fn order(path: &'static str, look: Look) -> Rule {
    Rule {
        method: Method::POST,
        to: To::Daemon,
        path,
        role: Role::Operator,
        look,
    }
}

const fn watch(method: Method, path: &'static str, role: Role) -> Rule {
    Rule {
        method,
        to: To::Monitor,
        path,
        role,
        look: Look::Nothing,
    }
}

const RULES: &[Rule] = &[
    see("/v1/pool"),
    see("/v1/pool/flash"),
    see("/v1/swap"),
    see("/v1/stats"),
    see("/v1/disks"),
    see("/v1/disks/*"),
    see("/v1/disks/*/stats"),
    see("/v1/disks/*/histogram"),
    see("/v1/disks/*/advice"),
    see("/v1/advice"),
    see("/v1/events"),
    see("/v1/datastores"),
    see("/v1/datastores/*"),
    see("/v1/datastores/*/files"),
    see("/v1/datastores/*/advice"),
    see("/v1/openapi.json"),
    watch(Method::GET, "/v1/health", Role::Viewer),
    watch(Method::GET, "/v1/alerts", Role::Viewer),
    watch(Method::GET, "/v1/alerts/events", Role::Viewer),
    watch(Method::POST, "/v1/alerts/test", Role::Operator),
    watch(Method::GET, "/v1/history", Role::Viewer),
    watch(Method::GET, "/v1/memory", Role::Viewer),
    order("/v1/disks", Look::Origin),
    order("/v1/origins/look", Look::Origin),
    Rule {
        method: Method::PATCH,
        to: To::Daemon,
        path: "/v1/disks/*",
        role: Role::Operator,
        look: Look::Settings,
    },
    order("/v1/disks/*/flush", Look::Nothing),
    order("/v1/disks/*/cancel", Look::Nothing),
    order("/v1/disks/*/remove", Look::Nothing),
    order("/v1/disks/*/accept-loss", Look::Nothing),
    order("/v1/disks/*/reset", Look::Nothing),
    order("/v1/disks/*/mirror", Look::Leg),
    order("/v1/disks/*/move", Look::Target),
    order("/v1/disks/*/scrub", Look::Nothing),
    order("/v1/disks/*/recording", Look::Recording),
    order("/v1/disks/*/recording/stop", Look::Nothing),
    order("/v1/disks/*/histogram/reset", Look::Nothing),
    order("/v1/disks/*/advice/apply", Look::Nothing),
    order("/v1/advice/apply", Look::Nothing),
    order("/v1/pool/flash", Look::Flash),
    order("/v1/pool/flash/cancel", Look::Nothing),
    order("/v1/datastores/*/flush", Look::Nothing),
    order("/v1/datastores/*/scrub", Look::Nothing),
    Rule {
        method: Method::PATCH,
        to: To::Daemon,
        path: "/v1/datastores/*",
        role: Role::Operator,
        look: Look::Datastore,
    },
];

/// A call that is let through.
#[derive(Debug)]
pub(crate) struct Call {
    method: Method,
    /// Who is asked.
    pub to: To,
    path: String,
    look: Look,
}

/// Why a call is not let through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Not {
    /// There is no such call.
    Known,
    /// It takes another role.
    Allowed,
}

/// The call a request makes, if somebody with this role may.
pub(crate) fn call(
    role: Role,
    method: &Method,
    path: &str,
    query: Option<&str>,
) -> Result<Call, Not> {
    let (rule, names) = RULES
        .iter()
        .filter(|rule| rule.method == *method)
        .find_map(|rule| Some((rule, names(rule.path, path)?)))
        .ok_or(Not::Known)?;
    if role < rule.role {
        return Err(Not::Allowed);
    }
    let mut names = names.iter();
    let mut clean = String::new();
    for part in rule.path.split('/').skip(1) {
        clean.push('/');
        match part {
            "*" => clean.push_str(&escape(names.next().map_or("", String::as_str))),
            word => clean.push_str(word),
        }
    }
    if let Some(query) = query {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.=&%".contains(c);
        if query.len() > 1024 || !query.chars().all(plain) {
            return Err(Not::Known);
        }
        clean.push('?');
        clean.push_str(query);
    }
    Ok(Call {
        method: rule.method.clone(),
        to: rule.to,
        path: clean,
        look: rule.look,
    })
}

/// The names in `path`, if it is of this pattern.
fn names(pattern: &str, path: &str) -> Option<Vec<String>> {
    let mut names = Vec::new();
    let mut parts = path.split('/');
    for want in pattern.split('/') {
        let part = parts.next()?;
        if want == "*" {
            names.push(unescape(part).filter(|name| !name.is_empty() && name.len() <= NAME_MAX)?);
        } else if want != part {
            return None;
        }
    }
    parts.next().is_none().then_some(names)
}

/// A part of a path as text.
pub(crate) fn unescape(part: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let mut rest = part.as_bytes().iter();
    while let Some(&byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digit = |d: Option<&u8>| (*d? as char).to_digit(16);
        let high = digit(rest.next())?;
        let low = digit(rest.next())?;
        bytes.push(u8::try_from(high * 16 + low).ok()?);
    }
    String::from_utf8(bytes).ok()
}

/// Text as a part of a path.
fn escape(text: &str) -> String {
    let mut escaped = String::new();
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => escaped.push(byte as char),
            _ => escaped.push_str(&format!("%{byte:02X}")),
        }
    }
    escaped
}

impl Call {
    /// It changes nothing.
    pub(crate) fn asks(&self) -> bool {
        self.method == Method::GET
    }

    /// The body the daemon is to be sent: what it names is allowed, and named as it was found.
    pub(crate) fn body(&self, settings: &Settings, body: Bytes) -> Result<Bytes, Fault> {
        let checked = self.look.check(settings.reach(), &body)?;
        Ok(Bytes::from(checked))
    }

    /// Asks who is behind `socket`, on somebody's behalf.
    pub(crate) async fn send(self, socket: &Path, body: Bytes, by: &str) -> Response {
        let limit = match self.asks() {
            true => ASK_TIMEOUT,
            false => ORDER_TIMEOUT,
        };
        match tokio::time::timeout(limit, self.exchange(socket, body, by)).await {
            Ok(Ok(response)) => response,
            Ok(Err(what)) => refusal(
                StatusCode::BAD_GATEWAY,
                &Fault::new(what, "see whether the daemon is running: hearth status"),
            ),
            Err(_) => refusal(
                StatusCode::GATEWAY_TIMEOUT,
                &Fault::new(
                    format!("the daemon has not answered for {} s", limit.as_secs()),
                    "look at its log and whether an origin or the flash hangs",
                ),
            ),
        }
    }

    async fn exchange(self, socket: &Path, body: Bytes, by: &str) -> Result<Response, String> {
        let stream = UnixStream::connect(socket)
            .await
            .map_err(|_| "no daemon is serving the pool".to_owned())?;
        let broke = |e: hyper::Error| format!("the connection to the daemon broke: {e}");
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(broke)?;
        let mut request = Request::builder()
            .method(self.method)
            .uri(self.path)
            .header(header::HOST, "hearth")
            .header(header::CONNECTION, "close")
            .header("hearth-for", by);
        if !body.is_empty() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        let request = request
            .body(Full::new(body))
            .map_err(|e| format!("the request cannot be passed on: {e}"))?;
        // Ends with the answer; an answer that is dropped unread ends it, too.
        tokio::spawn(connection);
        let (head, body) = sender
            .send_request(request)
            .await
            .map_err(broke)?
            .into_parts();
        let mut response = Response::new(Body::new(body));
        *response.status_mut() = head.status;
        response.headers_mut().insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/json"),
        );
        Ok(response)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(role: Role, method: Method, path: &str) -> Result<String, Not> {
        call(role, &method, path, None).map(|c| c.path)
    }

    #[test]
    fn what_is_not_in_the_list_is_not_there() {
        for (method, bad) in [
            (Method::POST, "/v1/pool/export"),
            (Method::DELETE, "/v1/disks/vm1"),
            (Method::POST, "/v1/datastores"),
            (Method::GET, "/v1"),
            (Method::GET, "/v1/"),
            (Method::GET, "/v1/disks/"),
            (Method::GET, "/v1//disks"),
            (Method::GET, "/v1/disks/vm1/"),
            (Method::GET, "/v1/disks/vm1/../../pool"),
            (Method::GET, "/v1/disks/a/b"),
            (Method::GET, "/v1/disks/%zz"),
            (Method::GET, "/v1/disks/%ff"),
            (Method::GET, "/V1/pool"),
            (Method::HEAD, "/v1/pool"),
            (Method::PUT, "/v1/disks/vm1"),
        ] {
            assert_eq!(path(Role::Operator, method, bad), Err(Not::Known), "{bad}");
        }
        let query = |query| call(Role::Viewer, &Method::GET, "/v1/events", Some(query)).is_ok();
        assert!(query("limit=100&disk=vm-1"));
        assert!(!query("limit=1 HTTP/1.1"));
        assert!(!query("a/../b"));
    }

    #[test]
    fn names_arrive_as_one_part() {
        let get = |p| path(Role::Viewer, Method::GET, p).unwrap();
        assert_eq!(get("/v1/disks/vm-1.a/stats"), "/v1/disks/vm-1%2Ea/stats");
        assert_eq!(get("/v1/disks/.."), "/v1/disks/%2E%2E");
        assert_eq!(
            get("/v1/disks/..%2f..%2fpool%2fexport"),
            "/v1/disks/%2E%2E%2F%2E%2E%2Fpool%2Fexport"
        );
        assert_eq!(get("/v1/disks/%3Cscript%3E"), "/v1/disks/%3Cscript%3E");
        assert_eq!(get("/v1/disks/a%0d%0ab"), "/v1/disks/a%0D%0Ab");
    }

    #[test]
    fn viewers_change_nothing() {
        for rule in RULES {
            let asked = call(
                Role::Viewer,
                &rule.method,
                &rule.path.replace('*', "vm1"),
                None,
            );
            match rule.method == Method::GET {
                true => assert!(asked.is_ok(), "{}", rule.path),
                false => assert_eq!(asked.err(), Some(Not::Allowed), "{}", rule.path),
            }
        }
    }

    #[test]
    fn bodies_name_only_what_is_allowed() {
        let tmp = tempfile::tempdir().unwrap();
        let root = std::fs::canonicalize(tmp.path()).unwrap();
        std::fs::write(root.join("a.raw"), "x").unwrap();
        std::os::unix::fs::symlink("a.raw", root.join("l.raw")).unwrap();
        let settings = Settings {
            paths: vec![root.clone()],
            ..Settings::default()
        };
        let body = |method, path: &str, text: String| {
            let call = call(Role::Operator, &method, path, None).unwrap();
            let body = call.body(&settings, Bytes::from(text));
            body.map(|b| String::from_utf8(b.to_vec()).unwrap())
        };
        let root = root.display();
        let good = body(
            Method::POST,
            "/v1/disks",
            format!("{{\"name\":\"a\",\"origin\":\"{root}/l.raw\"}}"),
        );
        assert_eq!(
            good,
            Ok(format!("{{\"name\":\"a\",\"origin\":\"{root}/a.raw\"}}"))
        );
        for (path, text) in [
            (
                "/v1/disks",
                "{\"name\":\"a\",\"origin\":\"/etc/passwd\"}".to_owned(),
            ),
            (
                "/v1/disks",
                "{\"name\":\"a\",\"origin\":[\"/etc/passwd\"]}".to_owned(),
            ),
            ("/v1/disks", "[]".to_owned()),
            ("/v1/disks", String::new()),
            (
                "/v1/disks",
                format!("{{\"origin\":\"{root}/a.raw\",\"allow_backing\":true}}"),
            ),
            (
                "/v1/disks",
                format!(
                    "{{\"origin\":\"/etc/passwd\",\"origin\":\"/etc/passwd\",\"name\":\"{root}\"}}"
                ),
            ),
            (
                "/v1/origins/look",
                "{\"origin\":\"/etc/passwd\"}".to_owned(),
            ),
            ("/v1/origins/look", "{\"origin\":\"json:{}\"}".to_owned()),
            ("/v1/disks/a/mirror", "{\"add\":\"/etc/passwd\"}".to_owned()),
            ("/v1/disks/a/recording", "{\"file\":\"/etc/x\"}".to_owned()),
            ("/v1/disks/a/move", "{\"origin\":\"/etc/x\"}".to_owned()),
            (
                "/v1/disks/a/move",
                "{\"origin\":\"/etc/passwd\"}".to_owned(),
            ),
            (
                "/v1/disks/a/move",
                format!("{{\"origin\":\"qcow2:{root}/new.qcow2\"}}"),
            ),
            (
                "/v1/pool/flash",
                "{\"action\":\"add\",\"new\":\"/dev/sda\"}".to_owned(),
            ),
            (
                "/v1/pool/flash",
                format!("{{\"new\":\"qcow2:{root}/a.raw\"}}"),
            ),
            (
                "/v1/pool/flash",
                "{\"new\":\"/etc/x\",\"size\":1048576}".to_owned(),
            ),
            (
                "/v1/pool/flash",
                format!("{{\"new\":\"{root}/a.raw\",\"force\":true}}"),
            ),
        ] {
            assert!(
                body(Method::POST, path, text.clone()).is_err(),
                "{path} {text}"
            );
        }
        // A field given twice is the last one here and, passed on anew, the only one there.
        let twice = format!("{{\"origin\":\"/etc/passwd\",\"origin\":\"{root}/a.raw\"}}");
        let twice = body(Method::POST, "/v1/disks", twice).unwrap();
        assert!(!twice.contains("passwd"), "{twice}");
        let backing = "{\"allow_backing\":true}".to_owned();
        assert!(body(Method::PATCH, "/v1/disks/a", backing).is_err());
        let flash = format!("{{\"new\":\"{root}/l.raw\"}}");
        assert_eq!(
            body(Method::POST, "/v1/pool/flash", flash),
            Ok(format!("{{\"new\":\"{root}/a.raw\"}}"))
        );
        let made = format!("{{\"new\":\"{root}/new\",\"size\":1048576}}");
        assert!(body(Method::POST, "/v1/pool/flash", made).is_ok());
        let twice = "{\"clients\":[],\"clients\":null}".to_owned();
        let twice = body(Method::PATCH, "/v1/datastores/a", twice);
        assert_eq!(twice, Ok("{\"clients\":null}".to_owned()));
        for open in ["{\"clients\":[]}", "{\"listen\":\"0.0.0.0:2049\"}"] {
            assert!(body(Method::PATCH, "/v1/datastores/a", open.to_owned()).is_err());
        }
        let hold = "{\"hold\":true}".to_owned();
        assert_eq!(
            body(Method::PATCH, "/v1/datastores/a", hold.clone()),
            Ok(hold)
        );
        let mode = "{\"mode\":\"off\"}".to_owned();
        assert_eq!(body(Method::PATCH, "/v1/disks/a", mode.clone()), Ok(mode));
    }
}
