//! Clients that say nothing, half of something, too much, or nonsense.

use super::*;
use axum::routing::{get, post};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream as Client;
use std::path::Path;
use std::time::Instant;

/// Far longer than any answer takes.
const LIMIT: Duration = Duration::from_secs(30);
const QUICK: Limits = Limits {
    connections: 8,
    of_one: 8,
    header: Duration::from_millis(300),
    body: Duration::from_millis(300),
    write: Duration::from_millis(300),
};
/// So long that it never ends by itself while a test runs.
const PATIENT: Limits = Limits {
    connections: 8,
    of_one: 8,
    header: Duration::from_secs(600),
    body: Duration::from_secs(600),
    write: Duration::from_secs(600),
};

/// A server on a thread of its own, until dropped.
struct Server {
    dir: tempfile::TempDir,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

async fn panics() -> &'static str {
    let nothing: Option<&str> = std::hint::black_box(None);
    nothing.unwrap()
}

impl Server {
    fn start(limits: Limits) -> Server {
        let dir = tempfile::tempdir().unwrap();
        let listener = std::os::unix::net::UnixListener::bind(dir.path().join("s")).unwrap();
        listener.set_nonblocking(true).unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let router = Router::new()
            .route("/ok", get(|| async { "fine" }))
            .route("/big", get(|| async { vec![b'x'; 32 << 20] }))
            .route(
                "/text",
                get(|| async { (StatusCode::BAD_REQUEST, "no such thing") }),
            )
            .route("/never", get(std::future::pending::<&'static str>))
            .route("/panics", get(panics))
            .route("/take", post(|_: String| async { "taken" }));
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime
                .block_on(async {
                    let listener = UnixListener::from_std(listener).unwrap();
                    serve((listener, Door::Control), router, limits, stopped).await
                })
                .unwrap();
        });
        Server {
            dir,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn connect(&self) -> Client {
        let client = Client::connect(self.path().join("s")).unwrap();
        client.set_read_timeout(Some(LIMIT)).unwrap();
        client
    }

    /// Sends `bytes`; everything that is answered until the server closes.
    fn say(&self, bytes: &[u8]) -> String {
        let mut client = self.connect();
        // Whoever is refused early need not have been heard to the end.
        let _ = client.write_all(bytes);
        everything(client)
    }

    fn get(&self, path: &str) -> String {
        self.say(format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").as_bytes())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking());
    }
}

/// Waits until the server has closed its end. Reads nothing.
fn until_closed(client: &mut Client) {
    // Asked for no event, it waits for the end of the connection alone.
    let mut watched = libc::pollfd {
        fd: client.as_raw_fd(),
        events: 0,
        revents: 0,
    };
    // SAFETY: one pollfd, which lives as long as the call.
    let ready = unsafe { libc::poll(&mut watched, 1, LIMIT.as_millis() as i32) };
    assert_eq!(ready, 1, "the server keeps the connection");
}

fn everything(mut client: Client) -> String {
    let mut text = Vec::new();
    let _ = client.read_to_end(&mut text);
    String::from_utf8_lossy(&text).into_owned()
}

/// The answer has this status and a JSON body that says what is wrong and what to do.
#[track_caller]
fn refused(answer: &str, status: u16) {
    assert!(
        answer.starts_with(&format!("HTTP/1.1 {status} ")),
        "{answer}"
    );
    assert!(
        answer.contains("content-type: application/json"),
        "{answer}"
    );
    let body = answer.split("\r\n\r\n").nth(1).unwrap();
    let body: ErrorBody = serde_json::from_str(body).unwrap();
    assert!(
        !body.error.is_empty() && !body.remedy.is_empty(),
        "{answer}"
    );
}

#[test]
fn every_error_is_json_with_a_remedy() {
    let server = Server::start(PATIENT);
    assert!(server.get("/ok").ends_with("fine"));
    refused(&server.get("/text"), 400);
    refused(&server.get("/panics"), 500);
    refused(&server.get("/nowhere"), 404);
    refused(
        &server.say(b"DELETE /ok HTTP/1.1\r\nConnection: close\r\n\r\n"),
        405,
    );
    refused(&server.say(b"SSH-2.0-OpenSSH\r\n\r\n"), 400);
    refused(
        &server.say(&[&b"GET / HTTP/1.1\r\nX: "[..], &[b'x'; 64 << 10]].concat()),
        431,
    );
    let body = vec![b'x'; BODY_MAX + 1];
    let head = format!(
        "POST /take HTTP/1.1\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    refused(&server.say(&[head.as_bytes(), &body].concat()), 413);
    // The same without saying beforehand how long it is.
    let chunk = format!("{:x}\r\n", body.len());
    let head = b"POST /take HTTP/1.1\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n";
    refused(
        &server.say(&[&head[..], chunk.as_bytes(), &body, b"\r\n0\r\n\r\n"].concat()),
        413,
    );
    assert!(server.get("/ok").ends_with("fine"));
}

#[test]
fn whoever_takes_too_long_is_told_so() {
    let server = Server::start(QUICK);
    refused(&server.say(b"GET /ok HTTP/1.1\r\nHost:"), 408);
    refused(
        &server.say(b"POST /take HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf"),
        408,
    );
    // Who says nothing expects nothing.
    assert_eq!(server.say(b""), "");
    // Nor may a connection lie idle after a request.
    let idle = server.say(b"GET /ok HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(
        idle.starts_with("HTTP/1.1 200") && idle.ends_with("fine"),
        "{idle}"
    );
    // An answer that nobody takes is not kept for ever: this would wait for a place otherwise.
    let mut greedy = server.connect();
    greedy
        .write_all(b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n")
        .unwrap();
    until_closed(&mut greedy);
    assert!(everything(greedy).len() < 32 << 20);
}

#[test]
fn half_open_requests_shut_nobody_out() {
    let server = Server::start(PATIENT);
    let mut open = Vec::new();
    for i in 0..5 * PATIENT.connections {
        let mut client = server.connect();
        if i % 3 > 0 {
            let _ = client.write_all(b"POST /take HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n");
        }
        if i % 3 > 1 {
            let _ = client.write_all(b"\r\nhalf");
        }
        open.push(client);
        assert!(server.get("/ok").ends_with("fine"), "shut out by {i}");
    }
}

#[test]
fn too_many_at_work_are_told_so() {
    let server = Server::start(PATIENT);
    let mut working = Vec::new();
    // The last ones find no room; those before are not cut off for them.
    for _ in 0..PATIENT.connections {
        let mut client = server.connect();
        client
            .write_all(b"GET /never HTTP/1.1\r\nHost: x\r\n\r\n")
            .unwrap();
        working.push(client);
    }
    let end = Instant::now() + LIMIT;
    loop {
        // Until the last of them has been heard, it is the one to make room.
        let answer = server.get("/ok");
        if answer.starts_with("HTTP/1.1 503") {
            refused(&answer, 503);
            break;
        }
        assert!(Instant::now() < end, "{answer}");
        let mut client = server.connect();
        client
            .write_all(b"GET /never HTTP/1.1\r\nHost: x\r\n\r\n")
            .unwrap();
        working.push(client);
    }
    drop(working);
    let free = || server.get("/ok").ends_with("fine");
    while !free() {
        assert!(Instant::now() < end);
        std::thread::yield_now();
    }
}
