//! What the protocol needs of a tree of files.
//!
//! A [`Tree`] is what is behind an export: a directory on a local file system, or one whose large
//! files are disks of a cache. Its methods are called on worker threads and may block, but for
//! [`at_hand`](Tree::at_hand) and [`written_by_two`](Tree::written_by_two); calls about one file never take all of them. Reads, writes and commits tell their outcome through a [`Done`], so
//! that a tree can also hand them to somebody else and return: then no thread waits for them.
//!
//! # What a tree promises
//!
//! - A [`Key`] names the same file as long as the file lives, over restarts and renames, and never
//!   another one afterwards.
//! - Changes of names and attributes are durable when they are answered.
//! - A write is as durable as was asked when it is answered; one that is not becomes durable
//!   by [`commit`](Tree::commit). The verifier both tell changes when data that was answered as
//!   [unstable](Stability::Unstable) may have been lost, and at no other time: clients keep such
//!   data until a commit tells them the verifier of their write.
//! - Attributes are those of what was answered before, wherever the data is by then.
//! - [`Wcc::before`] is told only where nobody else changed the file in between.

use hearth_io::BufSlice;

use crate::access::Who;
use crate::handle::Key;
use crate::message::Message;
use crate::v3::{Attributes, Create, SetAttributes, Stability, Status, Time, Wcc};

/// How something ended.
pub type Outcome<T> = Result<T, Status>;

/// Bytes of a file on their way to a client.
pub type Data = Box<dyn Memory>;

/// Bytes in memory that is given back when they are dropped.
pub trait Memory: AsRef<[u8]> + Send + Sync {
    /// How much memory that is.
    fn allocated(&self) -> usize;
}

impl Memory for Vec<u8> {
    fn allocated(&self) -> usize {
        self.capacity()
    }
}

/// A change, and what it did to what it changed, whether it succeeded or not.
#[derive(Debug)]
pub struct Changed<T> {
    /// How it ended.
    pub outcome: Outcome<T>,
    /// The file or directory before and after.
    pub wcc: Wcc,
}

/// A file that was found or made.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    /// What it is called.
    pub key: Key,
    /// What is known of it.
    pub attributes: Attributes,
}

/// What was read.
pub struct Read {
    /// The bytes. Fewer than were asked for only at the end.
    pub data: Data,
    /// True if the file ends with them, or before.
    pub end: bool,
    /// The file afterwards.
    pub attributes: Option<Attributes>,
}

/// What was written.
#[derive(Clone, Copy, Debug)]
pub struct Written {
    /// Bytes.
    pub count: u32,
    /// How durable they are: at least as was asked.
    pub stable: Stability,
    /// See [`Tree`].
    pub verifier: [u8; 8],
}

/// A name in a directory.
pub struct Entry<'a> {
    /// The number of the file.
    pub id: u64,
    /// The name.
    pub name: &'a [u8],
    /// Where to go on behind it: never 0.
    pub cookie: u64,
    /// The file, if that was asked for and could be found out.
    pub found: Option<Found>,
}

/// Room of a tree, bytes and files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Room {
    pub bytes: u64,
    pub bytes_free: u64,
    /// Free for those who are not root.
    pub bytes_available: u64,
    pub files: u64,
    pub files_free: u64,
    pub files_available: u64,
}

impl Room {
    /// Bytes that may be written by those who are not root; [`u64::MAX`] if that is not known.
    pub fn available(&self) -> u64 {
        match self.bytes {
            // No blocks at all: it does not say.
            0 => u64::MAX,
            _ => self.bytes_available,
        }
    }

    /// The least of both; one that does not say does not count.
    pub fn least(self, other: Room) -> Room {
        let least = |all: (u64, u64), some: (u64, u64)| match all {
            (0, _) => some.1,
            (_, 0) => some.0,
            _ => some.0.min(some.1),
        };
        let bytes = |some| least((self.bytes, other.bytes), some);
        let files = |some| least((self.files, other.files), some);
        Room {
            bytes: bytes((self.bytes, other.bytes)),
            bytes_free: bytes((self.bytes_free, other.bytes_free)),
            bytes_available: bytes((self.bytes_available, other.bytes_available)),
            files: files((self.files, other.files)),
            files_free: files((self.files_free, other.files_free)),
            files_available: files((self.files_available, other.files_available)),
        }
    }
}

/// Tells how something ended, once. Dropped without a word, it tells that something is wrong with us.
pub struct Done<T>(Option<Box<dyn FnOnce(T) + Send>>, fn() -> T);

impl<T> Done<T> {
    /// Calls `tell` with the outcome, or with what `lost` makes if there never is one.
    pub fn new(tell: impl FnOnce(T) + Send + 'static, lost: fn() -> T) -> Done<T> {
        Done(Some(Box::new(tell)), lost)
    }

    /// It ended like this.
    pub fn tell(mut self, outcome: T) {
        if let Some(tell) = self.0.take() {
            tell(outcome);
        }
    }
}

impl<T> Drop for Done<T> {
    fn drop(&mut self) {
        if let Some(tell) = self.0.take() {
            tell((self.1)());
        }
    }
}

/// Data that was received, inside the message it came with.
#[derive(Debug)]
pub struct Payload {
    message: Message,
    start: usize,
    len: usize,
}

impl Payload {
    /// The data where it lies, if that is in whole blocks of memory.
    pub fn blocks(&self) -> Option<BufSlice> {
        self.message.blocks(self.start, self.len)
    }

    /// The `len` bytes from `start` on; `None` if the message has fewer.
    pub fn new(message: Message, start: usize, len: usize) -> Option<Payload> {
        let end = start.checked_add(len)?;
        (end <= message.len()).then_some(Payload {
            message,
            start,
            len,
        })
    }
}

impl AsRef<[u8]> for Payload {
    fn as_ref(&self) -> &[u8] {
        &self.message[self.start..self.start + self.len]
    }
}

/// A write.
#[derive(Debug)]
pub struct Write {
    /// Where.
    pub offset: u64,
    /// What.
    pub data: Payload,
    /// How durable it must be when it is answered.
    pub stable: Stability,
}

/// Where a write is to go.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// From there on.
    pub offset: u64,
    /// So many bytes.
    pub len: u64,
    /// See [`Write::stable`].
    pub stable: Stability,
}

/// A file that nobody has to wait for: what is asked of it is handed on, and told later. It may keep others from the file, so
/// it is used at once or dropped.
pub trait AtHand {
    /// As [`Tree::read`].
    fn read(self: Box<Self>, who: &Who, offset: u64, count: u32, done: Done<Outcome<Read>>);
    /// As [`Tree::write`], to the place that was asked for.
    fn write(self: Box<Self>, who: &Who, write: Write, done: Done<Changed<Written>>);
}

/// See the module. Names are one component, never empty, `.` or `..`, without `/` and zero bytes, and at
/// most [`NAME_MAX`](crate::v3::NAME_MAX) long; only [`lookup`](Self::lookup) gets `.` and `..`.
pub trait Tree: Send + Sync {
    /// The directory that is exported.
    fn root(&self) -> Key;
    /// What is known of a file.
    fn attributes(&self, file: &Key) -> Outcome<Attributes>;
    /// Changes attributes; the size among them. `only_if`: only if the file was last changed then.
    fn set_attributes(
        &self,
        who: &Who,
        file: &Key,
        set: &SetAttributes,
        only_if: Option<Time>,
    ) -> Changed<()>;
    /// Finds a name. `..` of the root is the root.
    fn lookup(&self, who: &Who, dir: &Key, name: &[u8]) -> Outcome<Found>;
    /// What a symbolic link holds. It is never followed here.
    fn read_link(&self, who: &Who, link: &Key) -> Outcome<Vec<u8>>;
    /// The file, if it can be read, or written in this place, without any waiting; called where nobody must wait.
    fn at_hand(&self, _file: &Key, _write: Option<Place>) -> Option<Box<dyn AtHand>> {
        None
    }
    /// Reads at most `count` bytes, which is at most [`TRANSFER_MAX`](crate::v3::TRANSFER_MAX).
    fn read(&self, who: &Who, file: &Key, offset: u64, count: u32, done: Done<Outcome<Read>>);
    /// Writes.
    fn write(&self, who: &Who, file: &Key, write: Write, done: Done<Changed<Written>>);
    /// Makes durable what was written in a range; a length of 0 means up to the end. Tells the verifier.
    fn commit(&self, who: &Who, file: &Key, offset: u64, count: u32, done: Done<Changed<[u8; 8]>>);
    /// Makes something new.
    fn create(&self, who: &Who, dir: &Key, name: &[u8], what: &Create<'_>) -> Changed<Found>;
    /// Removes a directory, or what is none.
    fn remove(&self, who: &Who, dir: &Key, name: &[u8], directory: bool) -> Changed<()>;
    /// Renames, in place of what has the new name. Tells of both directories.
    fn rename(&self, who: &Who, from: (&Key, &[u8]), to: (&Key, &[u8])) -> (Outcome<()>, Wcc, Wcc);
    /// Gives a file one more name. Tells of the directory.
    fn link(&self, who: &Who, file: &Key, dir: &Key, name: &[u8]) -> Changed<Attributes>;
    /// Lists the names behind `cookie` until `take` has no room for one more. True if there are no
    /// more. With `whole`, files are found as well.
    fn list(
        &self,
        who: &Who,
        dir: &Key,
        cookie: u64,
        whole: bool,
        take: &mut dyn FnMut(Entry<'_>) -> bool,
    ) -> Outcome<bool>;
    /// Two clients write a file in turn, who are called so. Told again and again while they do, and where nobody must wait.
    fn written_by_two(&self, _file: &Key, _clients: [String; 2]) {}
    /// How much room there is.
    fn room(&self) -> Outcome<Room>;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(bytes: u64, free: u64) -> Room {
        Room {
            bytes,
            bytes_free: free,
            bytes_available: free,
            files: bytes / 10,
            files_free: free / 10,
            files_available: free / 10,
        }
    }

    #[test]
    fn room_without_blocks_counts_as_unknown() {
        let (full, half, silent) = (room(100, 0), room(100, 50), room(0, 0));
        assert_eq!((full.available(), half.available()), (0, 50));
        assert_eq!(silent.available(), u64::MAX);
        assert_eq!(silent.least(half), half);
        assert_eq!(half.least(silent), half);
        assert_eq!(half.least(full), full);
        assert_eq!(silent.least(silent), silent);
    }
}
