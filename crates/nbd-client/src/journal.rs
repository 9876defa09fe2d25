//! What a server has answered but not yet made durable, kept so that it can be sent again.
//!
//! A server that dies may lose every write since the last flush, although it answered them. A
//! file on this host does not: the kernel keeps what it took. So that nobody above has to know
//! the difference, answered writes are remembered until a flush that was sent after their
//! answers has succeeded; after a reconnect they are sent again, before anything else. A newer
//! write to the same place takes the older one's place, so that what is remembered does not
//! overlap and may be sent in any order. How much that may become is the caller's business: it
//! flushes on its own when [`bytes`](Journal::bytes) grows too large.

use hearth_io::{Buf, BufSlice};
use std::collections::BTreeMap;

/// Bytes a remembered write costs besides its data; keeps many small or empty ones bounded.
const PIECE_COST: u64 = 128;

/// What was done to a range.
#[derive(Clone, Debug)]
pub enum Content {
    /// Written.
    Data(BufSlice),
    /// Made zero; `punch` says that its space might be freed.
    Zeroes {
        /// Space may be freed.
        punch: bool,
    },
    /// Discarded.
    Trimmed,
}

#[derive(Clone, Debug)]
struct Piece {
    len: u64,
    seq: u64,
    content: Content,
}

impl Piece {
    fn cost(&self) -> u64 {
        PIECE_COST
            + match self.content {
                Content::Data(_) => self.len,
                _ => 0,
            }
    }

    /// The part of it from `skip` on, `len` bytes; in memory of its own, for a window would keep
    /// all of the old memory, unaccounted for.
    fn part(&self, skip: u64, len: u64) -> Piece {
        Piece {
            len,
            seq: self.seq,
            content: match &self.content {
                Content::Data(buf) => {
                    Content::Data(copy(&[buf.sub(skip as usize, len as usize)], len))
                }
                other => other.clone(),
            },
        }
    }
}

/// A remembered change.
#[derive(Clone, Debug)]
pub struct Change {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// What was done.
    pub content: Content,
}

/// Answered changes that no flush has covered.
#[derive(Debug, Default)]
pub struct Journal {
    /// By offset; disjoint.
    pieces: BTreeMap<u64, Piece>,
    next_seq: u64,
    bytes: u64,
}

impl Journal {
    /// About how much memory it takes, in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// True if everything answered is durable.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// A mark for [`forget`](Self::forget): taken when a flush is sent, it covers what was
    /// answered before.
    pub fn mark(&self) -> u64 {
        self.next_seq
    }

    /// Remembers a write that was just answered. The data is copied.
    pub fn written(&mut self, offset: u64, bufs: &[BufSlice]) {
        let len = bufs.iter().map(|b| b.len() as u64).sum();
        self.changed(offset, len, Content::Data(copy(bufs, len)));
    }

    /// Remembers a change that was just answered.
    pub fn changed(&mut self, offset: u64, len: u64, content: Content) {
        if len == 0 {
            return;
        }
        self.cut(offset, offset + len);
        let piece = Piece {
            len,
            seq: self.next_seq,
            content,
        };
        self.next_seq += 1;
        self.bytes += piece.cost();
        self.pieces.insert(offset, piece);
    }

    /// A flush that was sent when the mark was taken has succeeded.
    pub fn forget(&mut self, mark: u64) {
        if mark >= self.next_seq {
            self.pieces.clear();
            self.bytes = 0;
            return;
        }
        let bytes = &mut self.bytes;
        self.pieces.retain(|_, piece| {
            let keep = piece.seq >= mark;
            if !keep {
                *bytes -= piece.cost();
            }
            keep
        });
    }

    /// Everything remembered, in order of place.
    pub fn changes(&self) -> impl Iterator<Item = Change> {
        self.pieces.iter().map(|(offset, piece)| Change {
            offset: *offset,
            len: piece.len,
            content: piece.content.clone(),
        })
    }

    /// Forgets what is remembered of a range.
    fn cut(&mut self, start: u64, end: u64) {
        let before = self.pieces.range(..start).next_back();
        let first = match before {
            Some((at, piece)) if at + piece.len > start => *at,
            _ => start,
        };
        let hit: Vec<u64> = self.pieces.range(first..end).map(|(at, _)| *at).collect();
        for at in hit {
            let Some(piece) = self.pieces.remove(&at) else {
                continue;
            };
            self.bytes -= piece.cost();
            let piece_end = at + piece.len;
            if at < start {
                self.keep(at, piece.part(0, start - at));
            }
            if piece_end > end {
                self.keep(end, piece.part(end - at, piece_end - end));
            }
        }
    }

    fn keep(&mut self, at: u64, piece: Piece) {
        self.bytes += piece.cost();
        self.pieces.insert(at, piece);
    }
}

/// The data in memory of its own: what the caller lent goes back to it.
fn copy(bufs: &[BufSlice], len: u64) -> BufSlice {
    let mut own = Buf::zeroed(len as usize).slice(0, len as usize);
    let mut rest = own.bytes_mut();
    for buf in bufs {
        let (place, later) = rest.split_at_mut(buf.len().min(rest.len()));
        place.copy_from_slice(&buf.bytes()[..place.len()]);
        rest = later;
    }
    own
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn data(byte: u8, len: usize) -> BufSlice {
        let mut buf = Buf::zeroed(len).slice(0, len);
        buf.bytes_mut().fill(byte);
        buf
    }

    fn write(journal: &mut Journal, offset: u64, len: u64, byte: u8) {
        journal.written(offset, &[data(byte, len as usize)]);
    }

    #[test]
    fn a_flush_covers_what_was_answered_before_it_was_sent() {
        let mut journal = Journal::default();
        write(&mut journal, 0, 512, 1);
        let mark = journal.mark();
        write(&mut journal, 4096, 512, 2);
        journal.forget(mark);
        let left: Vec<u64> = journal.changes().map(|c| c.offset).collect();
        assert_eq!(left, [4096]);
        journal.forget(journal.mark());
        assert!(journal.is_empty());
        assert_eq!(journal.bytes(), 0);
    }

    #[test]
    fn an_overwrite_is_covered_only_by_its_own_flush() {
        let mut journal = Journal::default();
        write(&mut journal, 0, 1024, 1);
        let mark = journal.mark();
        write(&mut journal, 0, 512, 2);
        journal.forget(mark);
        let left: Vec<(u64, u64)> = journal.changes().map(|c| (c.offset, c.len)).collect();
        assert_eq!(left, [(0, 512)]);
    }

    proptest! {
        /// Sent again in any order, the journal makes of what was durable what was answered.
        #[test]
        fn replaying_restores_what_was_answered(
            steps in proptest::collection::vec((0u64..40, 1u64..20, 0u8..4), 1..60),
            flush_at in 0usize..60,
        ) {
            const SIZE: usize = 64;
            let mut journal = Journal::default();
            let mut answered = [0u8; SIZE];
            let mut durable = [0u8; SIZE];
            for (i, (offset, len, what)) in steps.iter().enumerate() {
                if i == flush_at {
                    journal.forget(journal.mark());
                    durable = answered;
                }
                let range = *offset as usize..(*offset + *len) as usize;
                let byte = i as u8 + 1;
                if *what == 0 {
                    answered[range].fill(0);
                    journal.changed(*offset, *len, Content::Zeroes { punch: true });
                } else {
                    answered[range].fill(byte);
                    write(&mut journal, *offset, *len, byte);
                }
            }
            let mut end = 0;
            let mut cost = 0;
            for change in journal.changes() {
                prop_assert!(change.offset >= end);
                end = change.offset + change.len;
                let place = &mut durable[change.offset as usize..end as usize];
                cost += PIECE_COST;
                match change.content {
                    Content::Data(buf) => {
                        cost += change.len;
                        place.copy_from_slice(buf.bytes());
                    }
                    _ => place.fill(0),
                }
            }
            prop_assert_eq!(durable, answered);
            prop_assert_eq!(cost, journal.bytes());
        }
    }
}
