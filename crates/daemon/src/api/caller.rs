//! Who asks for something over the control socket: the kernel knows.

use std::convert::Infallible;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use tokio::net::UnixStream;

/// Who is at the other end.
#[derive(Clone, Debug)]
pub(super) struct Caller(pub String);

impl Caller {
    /// Of a connection.
    pub(super) fn of(stream: &UnixStream) -> Caller {
        Caller(match stream.peer_cred().map(|c| c.uid()) {
            Ok(0) => "root".to_owned(),
            Ok(uid) => format!("user {uid}"),
            Err(_) => "somebody".to_owned(),
        })
    }
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        let known = parts.extensions.get::<Caller>().cloned();
        Ok(known.unwrap_or_else(|| Caller("somebody".to_owned())))
    }
}
