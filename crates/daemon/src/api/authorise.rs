//! Which call takes which right.
//!
//! The control socket is for root, for the user who runs the daemon and for the control group. The group adds disks and
//! changes them, but must not become root so: what has a program run, ends the daemon or opens a directory to a network is
//! root's, and of the host's files the group names only those that the administrator listed. The second service answers
//! browsers, so it has a socket of its own with the calls that it makes, and no others.
//!
//! A call without an entry requires root, so a new route is closed until it has one.

use std::path::PathBuf;
use std::sync::Arc;

use axum::body::{Body, to_bytes};
use axum::extract::{MatchedPath, Request, State};
use axum::http::{Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hearth_config::reach::{Look, Reach};
use hearth_fault::Fault;
use tokio::net::UnixStream;

use super::listen::{SEE, refusal};
use super::server::{BODY_MAX, Panel, run_at};
use crate::error::{Error, Kind};
use crate::rundir::own_uid;
use crate::spot;
use crate::workers::Class;

/// Which socket a call came over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Door {
    /// The control socket.
    Control,
    /// The second service's.
    Second,
}

/// The process at the other end of a connection, as the kernel knows it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peer {
    uid: Option<u32>,
    door: Door,
}

impl Peer {
    pub(super) fn of(stream: &UnixStream, door: Door) -> Peer {
        let uid = stream.peer_cred().ok().map(|c| c.uid());
        Peer { uid, door }
    }

    /// Root, or the user who runs the daemon.
    fn is_owner(self) -> bool {
        self.uid.is_some_and(|uid| uid == 0 || uid == own_uid())
    }
}

/// Files and servers that others than root may name.
#[derive(Clone, Debug, Default)]
pub struct Listed {
    /// Directories and devices.
    pub paths: Vec<PathBuf>,
    /// Servers of NBD exports.
    pub servers: Vec<String>,
}

impl Listed {
    fn reach(&self) -> Reach<'_> {
        Reach {
            paths: &self.paths,
            servers: &self.servers,
            path_remedy: "list its directory with allow-path in [serve] of /etc/hearth/hearth.toml, or run the command as root",
            server_remedy: "list the server with allow-server in [serve] of /etc/hearth/hearth.toml, or run the command as root",
        }
    }
}

/// The right that a call requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Right {
    /// To be root, or the user who runs the daemon.
    Owner,
    /// To be allowed to use the control socket. What the call names of the host has to be listed.
    Control(Look),
}

struct Call {
    method: Method,
    path: &'static str,
    right: Right,
    /// The second service makes it, too.
    second: bool,
}

const fn call(method: Method, path: &'static str, right: Right, second: bool) -> Call {
    Call {
        method,
        path,
        right,
        second,
    }
}

const fn see(path: &'static str) -> Call {
    call(Method::GET, path, Right::Control(Look::Nothing), true)
}

const fn order(path: &'static str) -> Call {
    call(Method::POST, path, Right::Control(Look::Nothing), true)
}

const fn names(method: Method, path: &'static str, look: Look) -> Call {
    call(method, path, Right::Control(look), true)
}

const fn own(path: &'static str) -> Call {
    call(Method::POST, path, Right::Owner, false)
}

const CALLS: &[Call] = &[
    see("/metrics"),
    see("/v1/openapi.json"),
    see("/v1/pool"),
    see("/v1/pool/flash"),
    see("/v1/swap"),
    see("/v1/stats"),
    see("/v1/events"),
    see("/v1/advice"),
    see("/v1/disks"),
    see("/v1/disks/{name}"),
    see("/v1/disks/{name}/stats"),
    see("/v1/disks/{name}/histogram"),
    see("/v1/disks/{name}/advice"),
    see("/v1/datastores"),
    see("/v1/datastores/{name}"),
    see("/v1/datastores/{name}/files"),
    see("/v1/datastores/{name}/advice"),
    call(
        Method::GET,
        "/v1/pool/areas",
        Right::Control(Look::Nothing),
        false,
    ),
    call(
        Method::GET,
        "/v1/upgrade",
        Right::Control(Look::Nothing),
        false,
    ),
    names(Method::POST, "/v1/disks", Look::Origin),
    names(Method::POST, "/v1/origins/look", Look::Origin),
    names(Method::PATCH, "/v1/disks/{name}", Look::Settings),
    names(Method::POST, "/v1/disks/{name}/mirror", Look::Leg),
    names(Method::POST, "/v1/disks/{name}/move", Look::Target),
    names(Method::POST, "/v1/disks/{name}/recording", Look::Recording),
    names(Method::POST, "/v1/pool/flash", Look::Flash),
    names(Method::PATCH, "/v1/datastores/{name}", Look::Datastore),
    order("/v1/disks/{name}/flush"),
    order("/v1/disks/{name}/cancel"),
    order("/v1/disks/{name}/remove"),
    order("/v1/disks/{name}/accept-loss"),
    order("/v1/disks/{name}/reset"),
    order("/v1/disks/{name}/scrub"),
    order("/v1/disks/{name}/recording/stop"),
    order("/v1/disks/{name}/histogram/reset"),
    order("/v1/disks/{name}/advice/apply"),
    order("/v1/advice/apply"),
    order("/v1/pool/flash/cancel"),
    order("/v1/datastores/{name}/flush"),
    order("/v1/datastores/{name}/scrub"),
    call(
        Method::POST,
        "/v1/datastores/{name}/remove",
        Right::Control(Look::Nothing),
        false,
    ),
    // A directory is opened to others.
    own("/v1/pool/accept"),
    own("/v1/datastores"),
    // The daemon ends.
    own("/v1/pool/export"),
    // The kernel swaps to it.
    own("/v1/pool/areas"),
    own("/v1/pool/areas/give-back"),
    // A program is run.
    own("/v1/upgrade"),
    own("/v1/upgrade/check"),
];

/// What becomes of a call.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Allowed,
    /// If what it names is listed.
    Look(Look),
    /// Why not, and what to do.
    Refused(Fault),
}

fn judge(method: &Method, path: &str, peer: Peer) -> Verdict {
    let asked = match *method {
        Method::HEAD => &Method::GET,
        _ => method,
    };
    let known = CALLS
        .iter()
        .find(|call| call.method == *asked && call.path == path);
    if peer.door == Door::Second && !known.is_some_and(|call| call.second) {
        return Verdict::Refused(Fault::new(
            format!("{method} {path} is no call for the second service"),
            "run the command on the host, as root",
        ));
    }
    if peer.is_owner() {
        return Verdict::Allowed;
    }
    match known.map_or(Right::Owner, |call| call.right) {
        Right::Control(Look::Nothing) => Verdict::Allowed,
        Right::Control(look) => Verdict::Look(look),
        Right::Owner => {
            let who = match peer.uid {
                Some(uid) => format!("user {uid}"),
                None => "an unknown user".to_owned(),
            };
            Verdict::Refused(Fault::new(
                format!(
                    "{who} may not {method} {path}: that is for root and the user who runs the daemon"
                ),
                "run the command with sudo",
            ))
        }
    }
}

/// Lets a request through to its handler, or refuses it.
pub(super) async fn authorise(
    State((panel, listed)): State<(Panel, Arc<Listed>)>,
    request: Request,
    next: Next,
) -> Response {
    let nobody = Peer {
        uid: None,
        door: Door::Second,
    };
    let peer = request.extensions().get().copied().unwrap_or(nobody);
    let path = request.extensions().get::<MatchedPath>();
    let path = path.map_or("", MatchedPath::as_str);
    let refused = |fault: Fault| refusal(StatusCode::FORBIDDEN, fault.what, &fault.remedy);
    let look = match judge(request.method(), path, peer) {
        Verdict::Allowed => return next.run(request).await,
        Verdict::Refused(fault) => {
            tracing::warn!(uid = peer.uid, door = ?peer.door, "a control request was refused: {}", fault.what);
            return refused(fault);
        }
        Verdict::Look(look) => look,
    };
    let (mut head, body) = request.into_parts();
    let Ok(body) = to_bytes(body, BODY_MAX).await else {
        let what = format!("the request's body is longer than {BODY_MAX} bytes");
        let fault = Fault::new(what, SEE);
        return refused(fault);
    };
    // Files may be where nothing answers: they are looked at where an origin there would be.
    let named: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
    let field = look.field().and_then(|field| named.get(field)?.as_str());
    let at = spot::of(field.unwrap_or_default());
    let work = move |_: &dyn super::server::Control| {
        let checked = look.check(listed.reach(), &body);
        checked.map_err(|fault| Error::of(Kind::Refused, fault))
    };
    match run_at(panel, at, Class::Asked, work).await {
        Ok(axum::Json(body)) => {
            head.headers.remove(header::CONTENT_LENGTH);
            next.run(Request::from_parts(head, Body::from(body))).await
        }
        Err(error) if error.kind == Kind::Refused => {
            refusal(StatusCode::FORBIDDEN, error.what, &error.remedy)
        }
        Err(error) => error.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::server::document;
    use super::*;

    /// Neither root nor who runs the tests.
    fn stranger(door: Door) -> Peer {
        Peer {
            uid: Some(own_uid() ^ 4711),
            door,
        }
    }

    #[test]
    fn every_route_has_one_entry() {
        let document: serde_json::Value = serde_json::from_str(&document()).unwrap();
        let mut routes = Vec::new();
        for (path, methods) in document["paths"].as_object().unwrap() {
            for method in methods.as_object().unwrap().keys() {
                routes.push(format!("{} {path}", method.to_uppercase()));
            }
        }
        let mut entries: Vec<String> = CALLS
            .iter()
            .map(|call| format!("{} {}", call.method, call.path))
            .collect();
        routes.sort();
        entries.sort();
        assert_eq!(entries, routes);
    }

    #[test]
    fn owner_calls_are_refused_to_others() {
        let own = [
            "/v1/upgrade/check",
            "/v1/upgrade",
            "/v1/pool/export",
            "/v1/pool/accept",
            "/v1/pool/areas",
            "/v1/datastores",
            "/v1/new",
        ];
        for uid in [0, own_uid()] {
            let owner = Peer {
                uid: Some(uid),
                door: Door::Control,
            };
            assert_eq!(judge(&Method::POST, own[0], owner), Verdict::Allowed);
        }
        for path in own {
            for door in [Door::Control, Door::Second] {
                for peer in [stranger(door), Peer { uid: None, door }] {
                    let verdict = judge(&Method::POST, path, peer);
                    assert!(matches!(verdict, Verdict::Refused(_)), "{path} {verdict:?}");
                }
            }
        }
        let member = stranger(Door::Control);
        assert_eq!(judge(&Method::GET, "/v1/upgrade", member), Verdict::Allowed);
        assert_eq!(judge(&Method::HEAD, "/v1/pool", member), Verdict::Allowed);
        let add = judge(&Method::POST, "/v1/disks", member);
        assert_eq!(add, Verdict::Look(Look::Origin));
    }

    #[test]
    fn second_service_has_its_calls_only() {
        let root = Peer {
            uid: Some(0),
            door: Door::Second,
        };
        for (method, path) in [
            (Method::POST, "/v1/pool/export"),
            (Method::POST, "/v1/upgrade/check"),
            (Method::GET, "/v1/upgrade"),
            (Method::POST, "/v1/datastores/{name}/remove"),
        ] {
            let verdict = judge(&method, path, root);
            assert!(matches!(verdict, Verdict::Refused(_)), "{path}");
        }
        let service = stranger(Door::Second);
        assert_eq!(judge(&Method::GET, "/metrics", service), Verdict::Allowed);
        let leg = judge(&Method::POST, "/v1/disks/{name}/mirror", service);
        assert_eq!(leg, Verdict::Look(Look::Leg));
    }
}
