//! Replies waiting to be sent, as one gather list.
//!
//! Headers of many replies lie in one small ring, so that runs of replies without payload
//! (acknowledged writes) become a single piece; a read's payload is sent from the very
//! buffer it was read into. The ring never overflows: every entry belongs to one of the
//! bounded number of outstanding requests.

use crate::wire::REPLY_HEADER_MAX;
use hearth_io::{Buf, BufPool, BufSlice};
use hearth_reactor::SendList;
use std::collections::VecDeque;

/// Requests of one connection being worked on or answered; further ones wait in the socket.
/// Enough to keep a flash device busy from one connection.
pub const REQUESTS_MAX: usize = 256;

/// Bytes of the header ring: one header for every outstanding request, and what wrapping wastes.
const RING_LEN: usize = ((REQUESTS_MAX + 2) * REPLY_HEADER_MAX).next_multiple_of(4096);

/// Bytes offered in one send: whoever takes longer over them than the reactor's patience is cut off,
/// and a slow line with a long reply must not be.
const SEND_MAX: usize = 4 << 20;

/// Pieces offered in one send: the kernel takes up to 1024; this many reads of 4 KiB already
/// fill a socket buffer.
const PIECES_MAX: usize = 64;

struct Item {
    /// Header: a window of the ring; possibly empty.
    start: usize,
    len: usize,
    payload: Option<BufSlice>,
    /// The payload's buffer, to be given back to the pool.
    buf: Option<Buf>,
    /// Bytes of request memory freed when this is sent.
    cost: u64,
}

impl Item {
    fn total(&self) -> usize {
        self.len + self.payload.as_ref().map_or(0, BufSlice::len)
    }
}

/// The queue. See the module.
#[derive(Default)]
pub(crate) struct Output {
    ring: Option<Buf>,
    /// Where the next header goes.
    head: usize,
    items: VecDeque<Item>,
    /// Bytes of the first item already sent.
    first_sent: usize,
    /// Request memory of all items.
    cost: u64,
    /// Buffers sent, but still held by whoever sent them.
    retired: Vec<Buf>,
}

impl Output {
    /// Replies not completely sent.
    pub(crate) fn len(&self) -> usize {
        self.items.len()
    }

    /// True if everything was sent.
    pub(crate) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// True while something waits of which nothing was sent or offered.
    pub(crate) fn is_untouched(&self) -> bool {
        self.items.len() == 1 && self.first_sent == 0
    }

    /// Bytes of request memory that wait to be sent.
    pub(crate) fn cost(&self) -> u64 {
        self.cost
    }

    /// Room for `len` header bytes in the ring.
    fn alloc(&mut self, len: usize) -> Option<usize> {
        let start = match self.items.front().map(|i| i.start) {
            None => 0,
            Some(tail) if self.head >= tail => {
                if self.head + len <= RING_LEN {
                    self.head
                } else if len < tail {
                    0
                } else {
                    return None;
                }
            }
            Some(tail) if self.head + len < tail => self.head,
            Some(_) => return None,
        };
        self.head = start + len;
        Some(start)
    }

    /// Queues a reply: `header`, then `payload`, a window of `buf`.
    pub(crate) fn reply(
        &mut self,
        header: &[u8],
        payload: Option<BufSlice>,
        buf: Option<Buf>,
        cost: u64,
    ) {
        self.cost += cost;
        let Some(start) = self.alloc(header.len()) else {
            // Cannot happen while entries are bounded by REQUESTS_MAX; costs a buffer, not a bug.
            self.bytes(header);
            self.items.push_back(Item {
                start: self.head,
                len: 0,
                payload,
                buf,
                cost,
            });
            return;
        };
        let ring = self.ring.get_or_insert_with(|| Buf::zeroed(RING_LEN));
        ring.slice(start, header.len())
            .bytes_mut()
            .copy_from_slice(header);
        self.items.push_back(Item {
            start,
            len: header.len(),
            payload,
            buf,
            cost,
        });
    }

    /// Queues bytes of any length in memory of their own (handshake).
    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let payload = Buf::zeroed(bytes.len()).slice(0, bytes.len());
        payload.clone().bytes_mut().copy_from_slice(bytes);
        if self.items.is_empty() {
            self.head = 0;
        }
        self.items.push_back(Item {
            start: self.head,
            len: 0,
            payload: Some(payload),
            buf: None,
            cost: 0,
        });
    }

    /// Fills `out` with what to send next.
    pub(crate) fn list(&self, out: &mut SendList) {
        let mut skip = self.first_sent;
        let mut left = SEND_MAX;
        for item in &self.items {
            let header = match &self.ring {
                Some(ring) if item.len > 0 => Some(ring.slice(item.start, item.len)),
                _ => None,
            };
            for piece in header.into_iter().chain(item.payload.clone()) {
                if skip >= piece.len() {
                    skip -= piece.len();
                    continue;
                }
                let piece = piece.sub(skip, (piece.len() - skip).min(left));
                skip = 0;
                left -= piece.len();
                if let Some(last) = out.last_mut()
                    && last.adjoins(&piece)
                {
                    last.extend(piece.len());
                } else if out.len() < PIECES_MAX {
                    out.push(piece);
                } else {
                    return;
                }
                if left == 0 {
                    return;
                }
            }
        }
    }

    /// `n` bytes went out: returns the bytes of request memory this freed.
    pub(crate) fn sent(&mut self, n: usize, pool: &mut BufPool) -> u64 {
        self.first_sent += n;
        let mut freed = 0;
        while let Some(total) = self.items.front().map(Item::total) {
            if self.first_sent < total {
                return freed;
            }
            self.first_sent -= total;
            if let Some(item) = self.items.pop_front() {
                freed += item.cost;
                self.cost = self.cost.saturating_sub(item.cost);
                drop(item.payload);
                if let Some(buf) = item.buf {
                    self.recycle(buf, pool);
                }
            }
        }
        self.first_sent = 0;
        freed
    }

    /// Gives a buffer back to the pool, now or as soon as nobody else holds it.
    fn recycle(&mut self, buf: Buf, pool: &mut BufPool) {
        if buf.handles() == 1 {
            pool.put(buf);
        } else if self.retired.len() < REQUESTS_MAX {
            self.retired.push(buf);
        }
    }

    /// Gives back buffers whose sender has let go of them meanwhile.
    pub(crate) fn reclaim(&mut self, pool: &mut BufPool) {
        if self.retired.is_empty() {
            return;
        }
        let mut index = 0;
        while let Some(buf) = self.retired.get(index) {
            if buf.handles() == 1 {
                pool.put(self.retired.swap_remove(index));
            } else {
                index += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(out: &mut Output, step: usize) -> Vec<u8> {
        let mut pool = BufPool::default();
        let mut got = Vec::new();
        while !out.is_empty() {
            let mut list = SendList::new();
            out.list(&mut list);
            let all: Vec<u8> = list.iter().flat_map(|s| s.bytes().to_vec()).collect();
            let n = all.len().min(step);
            got.extend(&all[..n]);
            drop(list);
            out.sent(n, &mut pool);
        }
        got
    }

    #[test]
    fn replies_without_payload_are_one_piece() {
        let mut out = Output::default();
        for i in 0..100u8 {
            out.reply(&[i; 16], None, None, 0);
        }
        let mut list = SendList::new();
        out.list(&mut list);
        assert_eq!(list.len(), 1);
        assert_eq!(list[0].len(), 1600);
    }

    #[test]
    fn bytes_keep_their_order_whatever_is_sent_at_once() {
        for step in [1, 7, 16, 100, 5000, usize::MAX] {
            let mut out = Output::default();
            let mut want = Vec::new();
            out.bytes(b"greeting");
            want.extend(b"greeting");
            for i in 0..REQUESTS_MAX {
                let header = vec![i as u8; 16 + i % 80];
                let buf = Buf::zeroed(4096);
                let mut payload = buf.slice(3, i % 50);
                payload.bytes_mut().fill(!(i as u8));
                out.reply(&header, Some(payload.clone()), Some(buf), 1);
                want.extend(&header);
                want.extend(payload.bytes());
            }
            assert_eq!(drain(&mut out, step), want, "step {step}");
        }
    }

    #[test]
    fn the_ring_is_reused_while_replies_come_and_go() {
        let mut out = Output::default();
        let mut pool = BufPool::default();
        let (mut want, mut got) = (Vec::new(), Vec::new());
        for round in 0..5000usize {
            while out.len() < REQUESTS_MAX {
                let header =
                    vec![round as u8; 16 + (round * 7 + out.len()) % (REPLY_HEADER_MAX - 16)];
                out.reply(&header, None, None, 0);
                want.extend(&header);
            }
            let mut list = SendList::new();
            out.list(&mut list);
            let all: Vec<u8> = list.iter().flat_map(|s| s.bytes().to_vec()).collect();
            let n = all.len().min(777);
            got.extend(&all[..n]);
            out.sent(n, &mut pool);
        }
        got.extend(drain(&mut out, usize::MAX));
        assert!(got == want);
    }

    #[test]
    fn a_sent_buffer_returns_to_the_pool_once_nobody_holds_it() {
        let mut out = Output::default();
        let mut pool = BufPool::default();
        let buf = pool.get(4096);
        let address = buf.all().as_ptr();
        out.reply(&[0; 16], Some(buf.all()), Some(buf), 4096);
        let mut list = SendList::new();
        out.list(&mut list);
        assert_eq!(out.sent(16 + 4096, &mut pool), 4096);
        out.reclaim(&mut pool);
        assert_eq!(out.retired.len(), 1);
        drop(list);
        out.reclaim(&mut pool);
        assert_eq!(pool.get(4096).all().as_ptr(), address);
    }
}
