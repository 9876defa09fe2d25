//! Who asks for something over the control socket: the kernel knows.
//!
//! The console asks on behalf of those who are logged in to it, and says for whom. What is told names both, so that
//! nothing is gained by lying. What a caller may do is decided by its user alone ([`super::authorise`]).

use std::convert::Infallible;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use tokio::net::UnixStream;

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
    fn names_that_stand_in_events_are_plain() {
        assert!(is_name("anna.b@example-1"));
        for bad in ["", "a b", "<script>", "x\u{1b}[0m", "a\nb", &"x".repeat(65)] {
            assert!(!is_name(bad), "{bad}");
        }
    }
}
