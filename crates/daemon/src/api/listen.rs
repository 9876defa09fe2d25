//! Serving the control API to whoever connects, friend or not.
//!
//! The control socket is what an operator reaches for when something is wrong, so it must answer
//! just then. Whoever opens connections and says nothing, or half of something, must shut nobody
//! out: there are so many connections and no more, each has so long to ask, and when there is no
//! room, the one that has kept us waiting longest makes it. A few descriptors are kept aside, since
//! data connections may have used up all others. And whatever goes wrong is answered as JSON with a
//! remedy, because what reads it is a program.

use std::convert::Infallible;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use axum::response::{IntoResponse, Response};
use hearth_io::limiter::{Limiter, Place};
use hearth_io::peer::User;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::service::Service;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Sleep;

use super::authorise::{Door, Peer};
use super::caller::Caller;
use super::server::BODY_MAX;
use super::types::ErrorBody;

/// What a client may ask of us.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most connections at once.
    pub connections: usize,
    /// Most of one user.
    pub of_one: usize,
    /// Longest a client may take for a request's header; also how long a connection may lie idle.
    pub header: Duration,
    /// Longest it may take for a request's body.
    pub body: Duration,
    /// Longest it may take no byte of an answer.
    pub write: Duration,
}

impl Default for Limits {
    /// A person has one connection, a collector of statistics one per visit; a request is a few
    /// hundred bytes from a program on the same host.
    fn default() -> Limits {
        Limits {
            connections: 128,
            of_one: 64,
            header: Duration::from_secs(10),
            body: Duration::from_secs(10),
            write: Duration::from_secs(10),
        }
    }
}

/// Longest header, all of it. The client of this program sends about 150 bytes.
const HEADER_MAX: usize = 16 << 10;
/// Descriptors kept aside for control connections: they are given up one by one when accepting
/// fails for want of one.
const RESERVE: usize = 16;
/// Pause after a failed accept that nothing could be done about.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Where the API is described.
pub(super) const SEE: &str = "see the API's description at /v1/openapi.json";

/// An error as JSON, whatever its status.
pub(super) fn refusal(status: StatusCode, what: impl Into<String>, remedy: &str) -> Response {
    let body = ErrorBody {
        error: what.into(),
        remedy: remedy.to_owned(),
    };
    (status, axum::Json(body)).into_response()
}

/// Descriptors kept aside.
struct Reserve {
    kept: Vec<OwnedFd>,
}

impl Reserve {
    fn new() -> Reserve {
        let mut reserve = Reserve { kept: Vec::new() };
        reserve.refill();
        reserve
    }

    fn refill(&mut self) {
        while self.kept.len() < RESERVE {
            // None to be had: the next connection that ends leaves one.
            let Ok(file) = File::open("/dev/null") else {
                return;
            };
            self.kept.push(file.into());
        }
    }

    /// Makes room for one descriptor.
    fn give(&mut self) -> bool {
        self.kept.pop().is_some()
    }
}

/// Serves `router` on `listener`, which is a `door`, until `stop` is sent or dropped, and ends what is under way.
pub async fn serve(
    (listener, door): (UnixListener, Door),
    router: Router,
    limits: Limits,
    stop: tokio::sync::oneshot::Receiver<()>,
) -> io::Result<()> {
    let limiter = Limiter::new(limits.connections, limits.of_one);
    let mut reserve = Reserve::new();
    let mut tasks = JoinSet::new();
    let (end, ending) = watch::channel(false);
    let mut stop = std::pin::pin!(stop);
    loop {
        let accepted = tokio::select! {
            _ = &mut stop => break,
            Some(_) = tasks.join_next() => {
                reserve.refill();
                continue;
            }
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(e) => {
                let full = matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE));
                if full && reserve.give() {
                    continue;
                }
                tracing::warn!("the control API cannot take a connection: {e}");
                if full {
                    limiter.evict();
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Some(place) = limiter.enter(user(&stream)) else {
            turn_away(&stream, limits.connections);
            continue;
        };
        let task = tasks.spawn(connection(
            stream,
            (router.clone(), door),
            limits,
            place.clone(),
            ending.clone(),
        ));
        place.ends_with(move || task.abort());
    }
    let _ = end.send(true);
    while tasks.join_next().await.is_some() {}
    Ok(())
}

/// The account at the other end. One that the kernel does not name has no share but root's.
fn user(stream: &UnixStream) -> User {
    User::Uid(stream.peer_cred().map_or(0, |peer| peer.uid()))
}

/// Says that there are too many. The client may be writing, and is not waited for.
fn turn_away(stream: &UnixStream, limit: usize) {
    let answer = raw_answer(
        "503 Service Unavailable",
        &format!("{limit} control requests are being worked on, and there is room for no more"),
        "wait until some are done; see in the daemon's log whether an origin hangs",
    );
    // It goes into the socket's empty buffer as a whole, or the client is gone.
    let _ = stream.try_write(&answer);
}

/// A whole answer, for where no request was understood.
fn raw_answer(status: &str, what: &str, remedy: &str) -> Vec<u8> {
    let body = ErrorBody {
        error: what.to_owned(),
        remedy: remedy.to_owned(),
    };
    // Infallible: two strings.
    let body = serde_json::to_string(&body).unwrap_or_default();
    format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
         connection: close\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

async fn connection(
    stream: UnixStream,
    (router, door): (Router, Door),
    limits: Limits,
    place: Place,
    mut ending: watch::Receiver<bool>,
) {
    // Whatever is asked over this connection, the same one asks.
    let caller = Caller::of(&stream);
    let peer = Peer::of(&stream, door);
    let routes = TowerToHyperService::new(router);
    let of = place.clone();
    let service = hyper::service::service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(caller.clone());
        request.extensions_mut().insert(peer);
        let (routes, place) = (routes.clone(), of.clone());
        async move { Ok::<_, Infallible>(answer(routes, request, limits, &place).await) }
    });
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header)
        .max_buf_size(HEADER_MAX);
    let mut http =
        builder.serve_connection(TokioIo::new(Guarded::new(stream, limits.write)), service);
    let outcome = tokio::select! {
        outcome = &mut http => outcome,
        () = async { let _ = ending.wait_for(|end| *end).await; } => {
            Pin::new(&mut http).graceful_shutdown();
            (&mut http).await
        }
    };
    let late = outcome.as_ref().is_err_and(hyper::Error::is_timeout);
    if let Err(e) = outcome {
        tracing::debug!("a control connection ended: {e}");
    }
    if late {
        let mut io = http.into_parts().io.into_inner();
        // Whoever has said nothing is not waiting for an answer.
        if io.heard {
            let text = format!(
                "the request's header did not come whole within {} s",
                limits.header.as_secs()
            );
            let answer = raw_answer(
                "408 Request Timeout",
                &text,
                "send the whole request at once",
            );
            let _ = tokio::time::timeout(limits.write, io.stream.write_all(&answer)).await;
        }
    }
    drop(place);
}

/// Takes a whole request, then works for it.
async fn answer(
    routes: TowerToHyperService<Router>,
    request: Request<Incoming>,
    limits: Limits,
    place: &Place,
) -> Response {
    let (head, body) = request.into_parts();
    let whole = Limited::new(body, BODY_MAX).collect();
    let body = match tokio::time::timeout(limits.body, whole).await {
        Ok(Ok(body)) => body.to_bytes(),
        Ok(Err(e)) if e.is::<LengthLimitError>() => {
            return refusal(
                StatusCode::PAYLOAD_TOO_LARGE,
                format!("the request's body is longer than {BODY_MAX} bytes"),
                SEE,
            );
        }
        Ok(Err(e)) => {
            return refusal(
                StatusCode::BAD_REQUEST,
                format!("the request's body could not be read: {e}"),
                "send it again",
            );
        }
        Err(_) => {
            return refusal(
                StatusCode::REQUEST_TIMEOUT,
                format!(
                    "the request's body did not come whole within {} s",
                    limits.body.as_secs()
                ),
                "send the whole request at once",
            );
        }
    };
    place.waits(false);
    let request = Request::from_parts(head, Body::from(body));
    // A task of its own, so that a handler that panics is an answer and not a broken connection;
    // in a set, so that it ends with the connection.
    let mut work = JoinSet::new();
    work.spawn(async move { routes.call(request).await });
    let response = match work.join_next().await {
        Some(Ok(Ok(response))) => as_json(response).await,
        _ => refusal(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the request could not be worked on: a control operation ended abnormally",
            "look at the daemon's log, and report it",
        ),
    };
    place.waits(true);
    response
}

/// Errors that the router makes of itself are text.
async fn as_json(response: Response) -> Response {
    let status = response.status();
    let json = (response.headers().get(header::CONTENT_TYPE))
        .is_some_and(|t| t.as_bytes().starts_with(b"application/json"));
    if json || !(status.is_client_error() || status.is_server_error()) {
        return response;
    }
    let text = axum::body::to_bytes(response.into_body(), BODY_MAX).await;
    let text = String::from_utf8_lossy(&text.unwrap_or_default()).into_owned();
    let what = match text.trim() {
        "" => format!("the request was refused with HTTP status {status}"),
        text => format!("the request is not understood: {text}"),
    };
    refusal(status, what, SEE)
}

/// A stream that does not wait for ever to be read, and on which errors are JSON.
struct Guarded {
    stream: UnixStream,
    /// Longest wait for a byte to be taken.
    patience: Duration,
    /// Something came.
    heard: bool,
    /// Running while no byte can be written.
    stuck: Option<Pin<Box<Sleep>>>,
    /// An answer put in place of another, and how much of it is written.
    instead: Option<(Vec<u8>, usize)>,
}

impl Guarded {
    fn new(stream: UnixStream, patience: Duration) -> Guarded {
        Guarded {
            stream,
            patience,
            heard: false,
            stuck: None,
            instead: None,
        }
    }

    fn write_some(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match Pin::new(&mut self.stream).poll_write(cx, bytes) {
            Poll::Ready(outcome) => {
                self.stuck = None;
                Poll::Ready(outcome)
            }
            Poll::Pending => {
                let patience = self.patience;
                let stuck = self
                    .stuck
                    .get_or_insert_with(|| Box::pin(tokio::time::sleep(patience)));
                match stuck.as_mut().poll(cx) {
                    Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
                    Poll::Pending => Poll::Pending,
                }
            }
        }
    }
}

/// What hyper answers by itself, to what it cannot take for a request, has no body; all answers of
/// ours that are errors have one.
fn replaced(bytes: &[u8]) -> Option<Vec<u8>> {
    let head = bytes.strip_prefix(b"HTTP/1.1 ")?;
    if head.first() != Some(&b'4') {
        return None;
    }
    let text = std::str::from_utf8(head).ok()?;
    if !text.contains("\r\ncontent-length: 0\r\n") {
        return None;
    }
    let status = text.lines().next()?;
    let what = match status.get(..3)? {
        "431" => format!("the request's header is longer than {HEADER_MAX} bytes"),
        "414" => "the request's path is too long".to_owned(),
        _ => "what was sent is no HTTP/1.1 request".to_owned(),
    };
    Some(raw_answer(status, &what, SEE))
}

impl AsyncRead for Guarded {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let outcome = Pin::new(&mut self.stream).poll_read(cx, buf);
        self.heard |= buf.filled().len() > before;
        outcome
    }
}

impl AsyncWrite for Guarded {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.instead.is_none() {
            self.instead = replaced(bytes).map(|answer| (answer, 0));
        }
        let Some((answer, mut done)) = self.instead.take() else {
            let outcome = self.write_some(cx, bytes);
            if matches!(outcome, Poll::Ready(Ok(_))) {
                // The request that was heard is answered.
                self.heard = false;
            }
            return outcome;
        };
        while done < answer.len() {
            match self.write_some(cx, &answer[done..]) {
                Poll::Ready(Ok(n)) => done += n,
                Poll::Ready(Err(e)) => return Poll::Ready(Err(e)),
                Poll::Pending => {
                    self.instead = Some((answer, done));
                    return Poll::Pending;
                }
            }
        }
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
#[path = "listen_tests.rs"]
mod tests;
