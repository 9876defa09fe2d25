//! A message as it was received.
//!
//! Most are short and lie in a vector. A long one carries data to be written, and ends with it. So its memory comes from a
//! [`Shelf`], and it is laid so that it *ends* where a block ends: then data of whole blocks lies in whole blocks of
//! memory, and can go to a device from there, without having been copied.

use std::ops::Deref;
use std::sync::Arc;

use hearth_io::{BLOCK, BufSlice, Shelf};

/// From which length on a message's memory comes from a shelf.
pub(crate) const LONG: usize = 32 << 10;

/// Memory for a message that is being received.
#[derive(Debug)]
pub(crate) struct Long {
    window: Option<BufSlice>,
    shelf: Arc<Shelf>,
}

impl Long {
    /// For `len` bytes.
    pub fn new(len: usize, shelf: &Arc<Shelf>) -> Long {
        let block = BLOCK as usize;
        let whole = len.next_multiple_of(block);
        let window = shelf.take(whole).slice(whole - len, len);
        Long {
            window: Some(window),
            shelf: Arc::clone(shelf),
        }
    }

    /// Its bytes, to be written. Nobody else has them yet.
    pub fn space(&mut self) -> &mut [u8] {
        self.window.as_mut().map_or(&mut [], BufSlice::bytes_mut)
    }

    /// Bytes of memory.
    pub fn allocated(&self) -> usize {
        self.window.as_ref().map_or(0, BufSlice::allocated)
    }

    fn bytes(&self) -> &[u8] {
        self.window.as_ref().map_or(&[], BufSlice::bytes)
    }
}

impl Drop for Long {
    fn drop(&mut self) {
        if let Some(window) = self.window.take() {
            self.shelf.put(window.into_buf());
        }
    }
}

#[derive(Debug)]
enum Bytes {
    Short(Vec<u8>),
    Long(Long),
}

/// See the module.
#[derive(Debug)]
pub struct Message(Bytes);

impl Message {
    /// Bytes of memory it takes.
    pub fn allocated(&self) -> usize {
        let bytes = match &self.0 {
            Bytes::Short(bytes) => bytes.capacity(),
            Bytes::Long(long) => long.allocated(),
        };
        size_of::<Message>() + bytes
    }

    /// The `len` bytes from `start` on where they lie, if that is in whole blocks of memory.
    pub fn blocks(&self, start: usize, len: usize) -> Option<BufSlice> {
        let Bytes::Long(long) = &self.0 else {
            return None;
        };
        let window = long.window.as_ref()?;
        let end = start.checked_add(len)?;
        let whole = len > 0 && len.is_multiple_of(BLOCK as usize) && end <= window.len();
        let data = whole.then(|| window.sub(start, len))?;
        (data.as_ptr() as usize)
            .is_multiple_of(BLOCK as usize)
            .then_some(data)
    }
}

impl Deref for Message {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Bytes::Short(bytes) => bytes,
            Bytes::Long(long) => long.bytes(),
        }
    }
}

impl From<Vec<u8>> for Message {
    fn from(bytes: Vec<u8>) -> Message {
        Message(Bytes::Short(bytes))
    }
}

impl From<Long> for Message {
    fn from(long: Long) -> Message {
        Message(Bytes::Long(long))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_at_the_end_of_a_long_message_lies_in_whole_blocks() {
        let shelf = Arc::new(Shelf::default());
        for (head, data) in [(120, 64 << 10), (124, 1 << 20), (132, 36 << 10)] {
            let mut long = Long::new(head + data, &shelf);
            assert_eq!(long.space().len(), head + data);
            for (n, byte) in long.space().iter_mut().enumerate() {
                *byte = n as u8;
            }
            let message = Message::from(long);
            let blocks = message.blocks(head, data).expect("whole blocks");
            assert_eq!(blocks.bytes(), &message[head..]);
            assert!(message.blocks(head, data - 4).is_none());
            assert!(message.blocks(head - 4, data).is_none());
            assert!(message.blocks(head, data + 4096).is_none());
            assert!(message.blocks(usize::MAX, data).is_none());
            let before = shelf.kept();
            drop(message);
            assert_eq!(shelf.kept(), before, "a device may still read it");
            drop(blocks);
        }
        drop(Message::from(Long::new(100 << 10, &shelf)));
        assert!(shelf.kept() >= 100 << 10);
    }

    #[test]
    fn a_short_one_has_no_blocks() {
        let message = Message::from(vec![0; 8192]);
        assert!(message.blocks(0, 8192).is_none());
        assert_eq!(message.len(), 8192);
    }
}
