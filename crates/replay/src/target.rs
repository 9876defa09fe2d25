//! What a replay needs of the disk it plays against.

use crate::error::ReplayError;
use hearth_io::BufSlice;

/// Units that verification needs: data is stamped sector by sector. Bytes.
pub const SECTOR: u64 = 512;
/// Longest request in one piece, bytes, where the other side does not say: what NBD's protocol
/// document guarantees.
pub(crate) const LEN_MAX: u64 = 32 << 20;

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Fills the buffer.
    Read,
    /// Stores the buffer.
    Write,
    /// Gives the range up.
    Discard,
    /// Makes completed writes durable.
    Flush,
}

/// A request, with its memory.
#[derive(Debug)]
pub struct Job {
    /// The player's name for it, not used twice at a time.
    pub id: u64,
    /// What.
    pub kind: Kind,
    /// First byte, aligned as the target asks.
    pub offset: u64,
    /// Bytes, aligned too.
    pub len: u64,
    /// Exactly `len` bytes for reads and writes.
    pub buf: Option<BufSlice>,
}

/// A request that ended.
#[derive(Debug)]
pub struct Done {
    /// From the job.
    pub id: u64,
    /// From the job.
    pub buf: Option<BufSlice>,
    /// `Err` says why it failed.
    pub result: Result<(), String>,
    /// When, monotonic nanoseconds ([`hearth_io::now_ns`]).
    pub at_ns: u64,
}

/// A disk to play against. Used by one thread.
pub trait Target {
    /// Its address, for people.
    fn name(&self) -> &str;
    /// Bytes.
    fn size(&self) -> u64;
    /// Offsets and lengths are multiples of this power of two.
    fn align(&self) -> u64;
    /// Longest read or write in bytes, a multiple of [`align`](Self::align).
    fn len_max(&self) -> u64;
    /// Takes no writes.
    fn read_only(&self) -> bool;
    /// Understands this kind of request.
    fn can(&self, kind: Kind) -> bool;
    /// Sends a request. May wait for the other side to take it, not for its answer.
    ///
    /// # Errors
    ///
    /// When the target cannot be used any more.
    fn submit(&mut self, job: Job) -> Result<(), ReplayError>;
    /// Nobody waits for the other side any more: [`submit`](Self::submit) and what else it does must
    /// return soon, if need be with an error.
    fn abandon(&mut self) {}
    /// Appends what has ended; waits for the first one, at most until this monotonic time in
    /// nanoseconds.
    ///
    /// # Errors
    ///
    /// When the target cannot be used any more.
    fn wait(&mut self, until_ns: u64, done: &mut Vec<Done>) -> Result<(), ReplayError>;
}
