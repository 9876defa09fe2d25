//! Received bytes, parsed where they lie.
//!
//! Many requests arrive in one system call; they are parsed in place and only payloads are
//! moved (into aligned buffers), so the buffer is empty again, or holds less than a header,
//! before it is handed to the kernel once more.

use hearth_io::{Buf, BufSlice};

/// Bytes of a connection's receive buffer: holds the largest option (64 KiB) with its header
/// and some thirty 4 KiB writes, and still fits in a second-level cache.
pub(crate) const RECV_LEN: usize = 128 << 10;

/// Unread bytes up to this many are moved to the front for free.
const MOVE_CHEAP: usize = 64;

/// A linear buffer: filled at the end, read at the start.
#[derive(Default)]
pub(crate) struct Input {
    buf: Option<Buf>,
    start: usize,
    end: usize,
}

impl Input {
    /// With `bytes` unread already, of which at most [`RECV_LEN`] are kept.
    pub(crate) fn of(bytes: &[u8]) -> Input {
        let mut input = Input::default();
        if !bytes.is_empty()
            && let Some(mut space) = input.space(bytes.len())
        {
            let n = space.len();
            space.bytes_mut().copy_from_slice(&bytes[..n]);
            input.filled(n);
        }
        input
    }

    /// A copy of what is unread.
    pub(crate) fn unread(&self) -> Vec<u8> {
        self.window().map_or_else(Vec::new, |w| w.bytes().to_vec())
    }

    /// The whole buffer; allocated on first use.
    fn buf(&mut self) -> &Buf {
        self.buf.get_or_insert_with(|| Buf::zeroed(RECV_LEN))
    }

    /// Where the next bytes may go, at most `limit` of them; `None` if the buffer is full.
    pub(crate) fn space(&mut self, limit: usize) -> Option<BufSlice> {
        let unread = self.len();
        if self.start > 0 && (unread <= MOVE_CHEAP || self.end == RECV_LEN) {
            let (start, end) = (self.start, self.end);
            if unread > 0 {
                self.buf().all().bytes_mut().copy_within(start..end, 0);
            }
            self.start = 0;
            self.end = unread;
        }
        let end = self.end;
        let room = (RECV_LEN - end).min(limit);
        (room > 0).then(|| self.buf().slice(end, room))
    }

    /// `n` bytes were put where [`space`](Self::space) said.
    pub(crate) fn filled(&mut self, n: usize) {
        self.end = (self.end + n).min(RECV_LEN);
    }

    /// Unread bytes.
    pub(crate) fn len(&self) -> usize {
        self.end - self.start
    }

    /// True if nothing is unread.
    pub(crate) fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// The unread bytes as a window.
    pub(crate) fn window(&self) -> Option<BufSlice> {
        self.buf.as_ref().map(|b| b.slice(self.start, self.len()))
    }

    /// The first `out.len()` unread bytes, copied; false if there are fewer.
    pub(crate) fn peek(&self, out: &mut [u8]) -> bool {
        match self.window() {
            Some(window) if window.len() >= out.len() => {
                out.copy_from_slice(&window.bytes()[..out.len()]);
                true
            }
            _ => false,
        }
    }

    /// Forgets the first `n` unread bytes.
    pub(crate) fn consume(&mut self, n: usize) {
        self.start = (self.start + n).min(self.end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(input: &mut Input, bytes: &[u8]) {
        let mut space = input.space(usize::MAX).expect("room");
        space.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        input.filled(bytes.len());
    }

    #[test]
    fn unread_bytes_survive_being_moved() {
        let mut input = Input::default();
        put(&mut input, b"abcdef");
        input.consume(4);
        put(&mut input, b"gh");
        let mut out = [0; 4];
        assert!(input.peek(&mut out));
        assert_eq!(&out, b"efgh");
        input.consume(100);
        assert!(input.is_empty());
        assert!(!input.peek(&mut out));
    }

    #[test]
    fn a_full_buffer_offers_no_room() {
        let mut input = Input::default();
        assert_eq!(input.space(usize::MAX).map(|s| s.len()), Some(RECV_LEN));
        input.filled(RECV_LEN);
        assert!(input.space(usize::MAX).is_none());
        input.consume(RECV_LEN / 2);
        assert_eq!(input.space(usize::MAX).map(|s| s.len()), Some(RECV_LEN / 2));
        assert_eq!(input.len(), RECV_LEN / 2);
    }
}
