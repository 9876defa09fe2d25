//! Where a message begins and ends in a stream of bytes (record marking, RFC 5531, section 11).
//!
//! Each message is one or more fragments; in front of each is a word with its length and a bit that
//! says whether it is the last. A peer may cut its message wherever it likes, also into fragments
//! of nothing, and may promise two gigabytes. So memory grows with what has arrived, never with what
//! was promised; a message has a longest size and a largest number of fragments, and who goes beyond is cut off, because
//! after that nobody knows where the next message begins.

use std::collections::VecDeque;
use std::sync::Arc;

use hearth_io::Shelf;

use crate::message::{LONG, Long, Message};

/// Longest message: a write of one mebibyte, with its header and credentials.
pub const MESSAGE_MAX: usize = (1 << 20) + (16 << 10);
/// Most fragments of one message. Those who cut at all cut into some kilobytes.
pub const FRAGMENTS_MAX: usize = 1 << 12;
/// Set in the word in front of a message's last fragment.
const LAST: u32 = 1 << 31;
/// How much is reserved at once for a message that has begun.
const STEP: usize = 64 << 10;
/// Of a long message, one part in so many has to be here before memory for all of it is taken.
const ARRIVED: usize = 32;

/// The peer's stream is no sequence of messages that we take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// A message is too long.
    #[error("a message of more than {MESSAGE_MAX} bytes")]
    Long,
    /// A message comes in too many pieces.
    #[error("a message in more than {FRAGMENTS_MAX} fragments")]
    Pieces,
}

/// Puts messages together from bytes that arrive in pieces of any size.
#[derive(Debug, Default)]
pub struct Assembler {
    /// The word in front of a fragment, as far as it has come.
    head: [u8; 4],
    head_len: usize,
    /// What is missing of the fragment.
    missing: usize,
    last: bool,
    fragments: usize,
    message: Vec<u8>,
    /// In place of that, a long message, and how much of it is here.
    long: Option<(Long, usize)>,
    whole: VecDeque<Message>,
    /// Memory of those.
    waiting: usize,
    shelf: Arc<Shelf>,
}

impl Assembler {
    /// Nothing has arrived.
    pub fn new() -> Assembler {
        Assembler::default()
    }

    /// The same, with memory for long messages from a shelf.
    pub fn with(shelf: &Arc<Shelf>) -> Assembler {
        Assembler {
            shelf: Arc::clone(shelf),
            ..Assembler::default()
        }
    }

    /// Where the next bytes of the stream may be put, up to the end of the message that is being received; nothing
    /// where they have to come by [`feed`](Self::feed).
    pub fn space(&mut self) -> &mut [u8] {
        match &mut self.long {
            Some((long, here)) => long.space().get_mut(*here..).unwrap_or_default(),
            None => &mut [],
        }
    }

    /// So many bytes were put there.
    pub fn filled(&mut self, len: usize) {
        if let Some((_, here)) = &mut self.long {
            let len = len.min(self.missing);
            *here += len;
            self.missing -= len;
            self.end();
        }
    }

    /// Takes bytes of the stream. Whole messages come out of [`next`](Self::next).
    pub fn feed(&mut self, mut bytes: &[u8]) -> Result<(), Broken> {
        while !bytes.is_empty() {
            if self.missing == 0 {
                let want = (4 - self.head_len).min(bytes.len());
                let (now, rest) = bytes.split_at(want);
                self.head[self.head_len..self.head_len + want].copy_from_slice(now);
                self.head_len += want;
                bytes = rest;
                if self.head_len < 4 {
                    break;
                }
                self.begin()?;
            } else {
                let (now, rest) = bytes.split_at(self.missing.min(bytes.len()));
                self.put(now);
                self.missing -= now.len();
                bytes = rest;
            }
            self.end();
        }
        Ok(())
    }

    /// Keeps bytes of a fragment.
    fn put(&mut self, now: &[u8]) {
        let (arrived, all) = (
            self.message.len() + now.len(),
            self.message.len() + self.missing,
        );
        let one = self.last && self.fragments == 1;
        if self.long.is_none() && one && all >= LONG && arrived * ARRIVED >= all {
            let mut long = Long::new(all, &self.shelf);
            let begun = self.message.len();
            long.space()[..begun].copy_from_slice(&self.message);
            self.message = Vec::new();
            self.long = Some((long, begun));
        }
        match &mut self.long {
            Some((long, here)) => {
                long.space()[*here..*here + now.len()].copy_from_slice(now);
                *here += now.len();
            }
            None => {
                if self.message.capacity() - self.message.len() < now.len() {
                    self.message.reserve(now.len().max(self.missing.min(STEP)));
                }
                self.message.extend_from_slice(now);
            }
        }
    }

    /// A message may be whole now.
    fn end(&mut self) {
        if self.head_len == 0 && self.missing == 0 && self.last {
            let message = match self.long.take() {
                Some((long, _)) => Message::from(long),
                None => Message::from(std::mem::take(&mut self.message)),
            };
            self.waiting += message.allocated();
            self.whole.push_back(message);
            self.last = false;
            self.fragments = 0;
        }
    }

    /// A fragment's word is there.
    fn begin(&mut self) -> Result<(), Broken> {
        let word = u32::from_be_bytes(self.head);
        self.head_len = 0;
        self.last = word & LAST != 0;
        self.missing = (word & !LAST) as usize;
        self.fragments += 1;
        if self.missing > MESSAGE_MAX - self.message.len() {
            return Err(Broken::Long);
        }
        if self.fragments > FRAGMENTS_MAX {
            return Err(Broken::Pieces);
        }
        Ok(())
    }

    /// The next whole message.
    pub fn next_message(&mut self) -> Option<Message> {
        let message = self.whole.pop_front()?;
        self.waiting -= message.allocated();
        Some(message)
    }

    /// Memory held for messages, whole or not.
    pub fn held(&self) -> usize {
        let long = self.long.as_ref().map_or(0, |(long, _)| long.allocated());
        self.message.capacity() + long + self.waiting
    }
}

/// The word in front of a message that is sent as one fragment.
///
/// # Panics
///
/// If the message is longer than any that is sent.
pub fn mark(len: usize) -> [u8; 4] {
    assert!(len < LAST as usize, "a message of {len} bytes");
    (LAST | len as u32).to_be_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(assembler: &mut Assembler) -> Vec<Vec<u8>> {
        std::iter::from_fn(|| assembler.next_message())
            .map(|message| message.to_vec())
            .collect()
    }

    fn fragment(last: bool, bytes: &[u8]) -> Vec<u8> {
        let mut word = mark(bytes.len());
        if !last {
            word[0] &= 0x7f;
        }
        [&word, bytes].concat()
    }

    #[test]
    fn fragments_become_one_message() {
        let stream = [
            fragment(false, b"abc"),
            fragment(false, b""),
            fragment(true, b"de"),
            fragment(true, b""),
            fragment(false, b"x"),
            fragment(true, b""),
        ]
        .concat();
        assert_eq!(&stream[..7], [0, 0, 0, 3, b'a', b'b', b'c']);
        let mut a = Assembler::new();
        a.feed(&stream).expect("three messages");
        assert_eq!(all(&mut a), [&b"abcde"[..], b"", b"x"]);
    }

    #[test]
    fn a_promise_reserves_nothing_and_too_long_is_refused() {
        let mut a = Assembler::new();
        a.feed(&(MESSAGE_MAX as u32).to_be_bytes())
            .expect("may be so long");
        a.feed(&[1]).expect("has begun");
        assert!(a.held() <= 2 * STEP, "{}", a.held());
        a.feed(&[1; 20 << 10]).expect("a little more");
        assert!(a.held() <= 2 * STEP, "{}", a.held());
        let mut a = Assembler::new();
        assert_eq!(a.feed(&mark(MESSAGE_MAX + 1)), Err(Broken::Long));
        let mut a = Assembler::new();
        a.feed(&fragment(false, &[7; 10])).expect("a piece");
        assert_eq!(a.feed(&mark(MESSAGE_MAX - 9)), Err(Broken::Long));
    }

    #[test]
    fn pieces_of_nothing_come_to_an_end() {
        let mut a = Assembler::new();
        for _ in 0..FRAGMENTS_MAX {
            a.feed(&[0; 4]).expect("still few");
        }
        assert_eq!(a.feed(&[0; 4]), Err(Broken::Pieces));
    }

    proptest! {
        /// Long ones are partly received where they are to lie.
        #[test]
        fn cuts_of_long_ones_do_not_matter(
            lens in proptest::collection::vec(1usize..200_000, 1..5),
            steps in proptest::collection::vec((1usize..70_000, any::<bool>()), 1..20),
        ) {
            let messages: Vec<Vec<u8>> = lens
                .iter()
                .map(|len| (0..*len).map(|n| (n * 31 + len) as u8).collect())
                .collect();
            let mut stream = Vec::new();
            for message in &messages {
                stream.extend(fragment(true, message));
            }
            let shelf = Arc::new(Shelf::default());
            let mut a = Assembler::with(&shelf);
            let mut rest = &stream[..];
            for (step, directly) in steps.iter().cycle() {
                if rest.is_empty() { break; }
                let (mut now, then) = rest.split_at((*step).min(rest.len()));
                if *directly {
                    let space = a.space();
                    let len = space.len().min(now.len());
                    space[..len].copy_from_slice(&now[..len]);
                    a.filled(len);
                    now = &now[len..];
                }
                a.feed(now).expect("well-formed");
                rest = then;
            }
            prop_assert_eq!(all(&mut a), messages);
        }

        #[test]
        fn cuts_do_not_matter(
            messages in proptest::collection::vec(proptest::collection::vec(
                proptest::collection::vec(any::<u8>(), 0..40), 1..4), 0..6),
            steps in proptest::collection::vec(1usize..50, 1..20),
        ) {
            let mut stream = Vec::new();
            for pieces in &messages {
                for (i, piece) in pieces.iter().enumerate() {
                    stream.extend(fragment(i + 1 == pieces.len(), piece));
                }
            }
            let mut a = Assembler::new();
            let mut rest = &stream[..];
            for step in steps.iter().cycle() {
                if rest.is_empty() { break; }
                let (now, then) = rest.split_at((*step).min(rest.len()));
                a.feed(now).expect("well-formed");
                rest = then;
            }
            let whole: Vec<Vec<u8>> = messages.iter().map(|m| m.concat()).collect();
            prop_assert_eq!(all(&mut a), whole);
        }
    }
}
