//! Who asks for something over the control socket: the kernel knows.
//!
//! The console asks on behalf of those who are logged in to it, and says for whom. What is told names both, so that
//! nothing is gained by lying. What a caller may do is decided by its user alone ([`super::authorise`]).

use std::convert::Infallible;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use tokio::net::UnixStream;

use crate::error::Error;
use crate::rundir::own_uid;

/// The header that says on whose behalf.
const FOR: &str = "hearth-for";

/// Who is at the other end.
#[derive(Clone, Debug)]
pub(super) struct Caller(pub String);

impl Caller {
    /// Of a connection.
    pub(super) fn of(stream: &UnixStream) -> Caller {
        let uid = stream.peer_cred().map(|c| c.uid());
        Caller(uid.map_or_else(|_| "somebody".to_owned(), Caller::named))
    }

    fn named(uid: u32) -> String {
        match uid {
            0 => "root".to_owned(),
            uid => format!("user {uid}"),
        }
    }
}

/// A caller that is root, or who runs the daemon, on nobody else's behalf.
pub(super) struct Administrator(pub String);

impl<S: Sync> FromRequestParts<S> for Administrator {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Error> {
        let known = parts.extensions.get::<Caller>().cloned();
        let own = Caller::named(own_uid());
        match known.filter(|Caller(by)| *by == own || *by == Caller::named(0)) {
            Some(Caller(by)) if !parts.headers.contains_key(FOR) => Ok(Administrator(by)),
            _ => Err(Error::refused(
                "only root and the user who runs the daemon may do this",
                "run the command as root",
            )),
        }
    }
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        let known = parts.extensions.get::<Caller>().cloned();
        let Caller(by) = known.unwrap_or_else(|| Caller("somebody".to_owned()));
        let behalf = parts.headers.get(FOR).and_then(|v| v.to_str().ok());
        Ok(Caller(match behalf.filter(|name| is_name(name)) {
            Some(name) => format!("{name} (console, as {by})"),
            None => by,
        }))
    }
}

/// It stands in events and in the journal, so it is short and of plain letters.
fn is_name(name: &str) -> bool {
    let letter = |c: char| c.is_ascii_alphanumeric() || "-_.@".contains(c);
    !name.is_empty() && name.len() <= 64 && name.chars().all(letter)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_root_and_the_daemons_user_administrate() {
        let runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = { runtime }.build().unwrap();
        let may = |by: Option<String>, behalf: bool| {
            let mut request = axum::http::Request::builder();
            if behalf {
                request = request.header(FOR, "anna");
            }
            let (mut parts, ()) = request.body(()).unwrap().into_parts();
            if let Some(by) = by {
                parts.extensions.insert(Caller(by));
            }
            let asked = Administrator::from_request_parts(&mut parts, &());
            runtime.block_on(asked).is_ok()
        };
        let own = Caller::named(own_uid());
        assert!(may(Some(Caller::named(0)), false) && may(Some(own.clone()), false));
        assert!(!may(Some(Caller::named(own_uid() + 1)), false));
        assert!(!may(Some("somebody".to_owned()), false) && !may(None, false));
        // The console's users are not the console's user.
        assert!(!may(Some(own), true));
    }

    #[test]
    fn names_that_stand_in_events_are_plain() {
        assert!(is_name("anna.b@example-1"));
        for bad in ["", "a b", "<script>", "x\u{1b}[0m", "a\nb", &"x".repeat(65)] {
            assert!(!is_name(bad), "{bad}");
        }
    }
}
