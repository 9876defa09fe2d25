//! The same session inside TLS, once the client has asked for it.
//!
//! NBD upgrades a running connection (`STARTTLS`), so one layer carries both lives: bytes
//! pass through untouched until the upgrade, and through rustls afterwards. Memory is bounded:
//! ciphertext is only turned into plaintext as far as the session takes it, and plaintext is
//! only encrypted one send at a time.

use crate::names::common_name;
use crate::session::NbdSession;
use hearth_engine::api::Completion;
use hearth_io::{Buf, BufSlice};
use hearth_reactor::{Memory, SendList, Session, SessionCx, Shares};
use rustls::{ServerConfig, ServerConnection};
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::sync::Arc;

/// Received ciphertext held at once, bytes: four full records.
const CIPHER_IN: usize = 64 << 10;
/// Ciphertext made for one send, bytes.
const CIPHER_OUT: usize = 160 << 10;
/// Plaintext taken for one send, bytes; with the overhead of its records it fits [`CIPHER_OUT`].
const PLAIN_OUT: usize = 128 << 10;

/// Bytes on their way through rustls.
struct Pipe {
    tls: ServerConnection,
    cipher_in: Buf,
    in_start: usize,
    in_end: usize,
    cipher_out: Buf,
    out_start: usize,
    out_end: usize,
    /// Bytes of the inner session's send list that are encrypted, which it has not been told.
    taken: usize,
    goodbye_said: bool,
    failed: bool,
    /// The client's certificate was looked at.
    named: bool,
}

/// An [`NbdSession`] that can be upgraded to TLS.
pub struct TlsSession {
    inner: NbdSession,
    config: Arc<ServerConfig>,
    pipe: Option<Box<Pipe>>,
    list: SendList,
}

impl TlsSession {
    /// Wraps a session made with [`TlsMode::Allowed`](crate::TlsMode) or `Required`.
    pub fn new(inner: NbdSession, config: Arc<ServerConfig>) -> TlsSession {
        TlsSession {
            inner,
            config,
            pipe: None,
            list: SendList::new(),
        }
    }

    /// Hands on plaintext that waited for room. Without this a request already inside rustls
    /// would wait for bytes its client has no reason to send.
    fn pump(&mut self, cx: &mut SessionCx<'_>) {
        if let Some(pipe) = &mut self.pipe {
            pipe.pump(&mut self.inner, cx);
        }
    }

    /// Puts up TLS if the client was promised it and the promise is sent.
    fn upgrade(&mut self) {
        if self.pipe.is_some() || !self.inner.awaits_tls() || !self.inner.all_sent() {
            return;
        }
        match ServerConnection::new(self.config.clone()) {
            Ok(mut tls) => {
                tls.set_buffer_limit(Some(2 * PLAIN_OUT));
                self.pipe = Some(Box::new(Pipe {
                    tls,
                    cipher_in: Buf::zeroed(CIPHER_IN),
                    in_start: 0,
                    in_end: 0,
                    cipher_out: Buf::zeroed(CIPHER_OUT),
                    out_start: 0,
                    out_end: 0,
                    taken: 0,
                    goodbye_said: false,
                    failed: false,
                    named: false,
                }));
                self.inner.tls_started();
            }
            Err(error) => self.inner.cut_off(&format!("TLS cannot start: {error}")),
        }
    }
}

impl Pipe {
    /// Moves received bytes to the session, as far as it takes them.
    fn pump(&mut self, inner: &mut NbdSession, cx: &mut SessionCx<'_>) {
        // Each round moves bytes out of `cipher_in` or ends.
        while !self.failed {
            if !self.named && !self.tls.is_handshaking() {
                self.named = true;
                let shown = self.tls.peer_certificates().and_then(<[_]>::first);
                if let Some(name) = shown.and_then(|c| common_name(c)) {
                    inner.named(name);
                }
            }
            // As long as the session takes bytes and rustls has some.
            while let Some(mut space) = inner.recv_buf(cx) {
                match self.tls.reader().read(space.bytes_mut()) {
                    Ok(n) => {
                        // 0 is the client's goodbye inside TLS.
                        inner.received(n, cx);
                        if n == 0 {
                            return;
                        }
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(_) => return inner.received(0, cx),
                }
            }
            let window = self
                .cipher_in
                .slice(self.in_start, self.in_end - self.in_start);
            if window.is_empty() {
                return;
            }
            // An error here means that rustls holds all the plaintext it wants to: the session
            // takes no more for now.
            let Ok(n) = self.tls.read_tls(&mut window.bytes()) else {
                return;
            };
            self.in_start += n;
            if let Err(error) = self.tls.process_new_packets() {
                // rustls has an alert for the client; it is sent before the end.
                self.failed = true;
                inner.cut_off(&format!("TLS failed: {error}"));
            }
            if n == 0 {
                return;
            }
        }
    }

    fn recv_buf(&mut self) -> Option<BufSlice> {
        if self.failed {
            return None;
        }
        if self.in_start == self.in_end {
            (self.in_start, self.in_end) = (0, 0);
            return Some(self.cipher_in.all());
        }
        // What is left could not be handed on: the session is full.
        None
    }

    /// Offers ciphertext, making some if none is left.
    fn send_list(&mut self, inner: &mut NbdSession, list: &mut SendList, out: &mut SendList) {
        if self.out_start == self.out_end {
            (self.out_start, self.out_end) = (0, 0);
            if self.taken == 0 && !self.failed {
                list.clear();
                inner.send_list(list);
                self.encrypt(list);
                list.clear();
                if self.taken == 0 && inner.closing() && !self.goodbye_said {
                    self.goodbye_said = true;
                    self.tls.send_close_notify();
                }
            }
            self.take_records();
        }
        if self.out_start < self.out_end {
            out.push(
                self.cipher_out
                    .slice(self.out_start, self.out_end - self.out_start),
            );
        }
    }

    fn encrypt(&mut self, list: &SendList) {
        let mut pieces: smallvec::SmallVec<[IoSlice<'_>; 64]> = smallvec::SmallVec::new();
        let mut left = PLAIN_OUT;
        for piece in list {
            let n = piece.len().min(left);
            if n == 0 {
                break;
            }
            pieces.push(IoSlice::new(&piece.bytes()[..n]));
            left -= n;
        }
        if !pieces.is_empty() {
            // Never fails: it writes to memory. It takes less than offered at its limit.
            self.taken = self.tls.writer().write_vectored(&pieces).unwrap_or(0);
        }
    }

    /// Moves finished records into `cipher_out`; what does not fit stays in rustls.
    fn take_records(&mut self) {
        let mut space = self.cipher_out.all();
        let mut rest = space.bytes_mut();
        let room = rest.len();
        while self.tls.wants_write() && !rest.is_empty() {
            match self.tls.write_tls(&mut rest) {
                Ok(n) if n > 0 => {}
                _ => break,
            }
        }
        self.out_end = room - rest.len();
    }
}

impl Session for TlsSession {
    fn recv_buf(&mut self, cx: &mut SessionCx<'_>) -> Option<BufSlice> {
        self.upgrade();
        match &mut self.pipe {
            None => self.inner.recv_buf(cx),
            Some(pipe) => {
                pipe.pump(&mut self.inner, cx);
                if self.inner.takes_no_more() {
                    None
                } else {
                    pipe.recv_buf()
                }
            }
        }
    }

    fn received(&mut self, n: usize, cx: &mut SessionCx<'_>) {
        match &mut self.pipe {
            Some(pipe) if n > 0 => {
                pipe.in_end = (pipe.in_end + n).min(CIPHER_IN);
                pipe.pump(&mut self.inner, cx);
            }
            _ => self.inner.received(n, cx),
        }
    }

    fn completed(&mut self, completion: Completion, cx: &mut SessionCx<'_>) {
        self.inner.completed(completion, cx);
        self.pump(cx);
    }

    fn send_list(&mut self, out: &mut SendList) {
        match &mut self.pipe {
            None => self.inner.send_list(out),
            Some(pipe) => pipe.send_list(&mut self.inner, &mut self.list, out),
        }
    }

    fn sent(&mut self, n: usize, cx: &mut SessionCx<'_>) {
        match &mut self.pipe {
            None => {
                self.inner.sent(n, cx);
                self.upgrade();
            }
            Some(pipe) => {
                pipe.out_start = (pipe.out_start + n).min(pipe.out_end);
                let taken = std::mem::take(&mut pipe.taken);
                if taken > 0 {
                    self.inner.sent(taken, cx);
                }
                self.pump(cx);
            }
        }
    }

    fn closing(&self) -> bool {
        self.inner.closing()
    }

    fn memory(&self) -> Memory {
        self.inner.memory()
    }

    fn shares(&self) -> Option<&Shares> {
        self.inner.shares()
    }

    fn resume(&mut self, cx: &mut SessionCx<'_>) {
        self.inner.resume(cx);
        self.pump(cx);
    }

    fn shutdown(&mut self) {
        self.inner.shutdown();
    }

    fn freeze(&mut self) -> bool {
        // What rustls knows of a connection stays in this process.
        self.pipe.is_none() && self.inner.freeze()
    }

    fn carry(&mut self) -> Option<Vec<u8>> {
        self.inner.carry()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }

    fn handshaking(&self) -> bool {
        self.inner.handshaking()
    }
}
