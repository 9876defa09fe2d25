//! A server on a unix socket, one blocking thread per connection: for tests with real clients
//! that are about the protocol alone.

use super::{Disk, Server};
use hearth_io::BufPool;
use hearth_nbd::tls::TlsSession;
use hearth_nbd::{NbdSession, TlsMode};
use hearth_reactor::{SendList, Session, SessionCx};
use rustls::ServerConfig;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;

pub struct Running {
    pub socket: PathBuf,
    _dir: tempfile::TempDir,
}

impl Running {
    pub fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket.display())
    }
}

/// Serves until the test ends.
pub fn serve(disks: Vec<Arc<Disk>>, tls: Option<(TlsMode, Arc<ServerConfig>)>) -> Running {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("nbd.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (disks, tls) = (disks.clone(), tls.clone());
            std::thread::spawn(move || client(stream.unwrap(), disks, tls));
        }
    });
    Running { socket, _dir: dir }
}

fn client(
    mut stream: UnixStream,
    disks: Vec<Arc<Disk>>,
    tls: Option<(TlsMode, Arc<ServerConfig>)>,
) {
    let server = Arc::new(Server(disks.clone()));
    let mode = tls.as_ref().map_or(TlsMode::Off, |t| t.0);
    let inner = NbdSession::new(server, mode, "socket".into());
    let mut session: Box<dyn Session> = match tls {
        Some((_, config)) => Box::new(TlsSession::new(inner, config)),
        None => Box::new(inner),
    };
    let mut bufs = BufPool::default();
    let mut requests: Vec<hearth_engine::api::Request> = Vec::new();
    loop {
        let mut todo = std::mem::take(&mut requests);
        let idle = todo.is_empty();
        for request in todo.drain(..) {
            let disk = disks
                .iter()
                .find(|d| d.id == request.disk)
                .expect("a disk of this server");
            let completion = disk.serve(request);
            session.completed(
                completion,
                &mut SessionCx {
                    requests: &mut requests,
                    bufs: &mut bufs,
                    now_ns: 0,
                },
            );
        }
        let mut list = SendList::new();
        session.send_list(&mut list);
        let mut n = 0;
        for piece in &list {
            if stream.write_all(piece.bytes()).is_err() {
                return;
            }
            n += piece.len();
        }
        let mut cx = SessionCx {
            requests: &mut requests,
            bufs: &mut bufs,
            now_ns: 0,
        };
        if n > 0 {
            drop(list);
            session.sent(n, &mut cx);
            continue;
        }
        if !idle {
            continue;
        }
        if session.closing() {
            return;
        }
        let Some(mut space) = session.recv_buf(&mut cx) else {
            continue;
        };
        if !cx.requests.is_empty() {
            // Asking for memory may have found a request; the socket can wait, and is asked
            // for the same memory again.
            continue;
        }
        let n = stream.read(space.bytes_mut()).unwrap_or(0);
        session.received(n, &mut cx);
    }
}
