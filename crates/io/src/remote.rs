//! Origins that are no file: what is behind a socket, with a thread of its own.
//!
//! A driver can submit to the kernel only what the kernel can do. An origin that speaks a
//! protocol keeps connections, waits for a server that restarts, and does things in an order of
//! its own; so its operations go to its own thread as [`Job`]s, and their answers come back
//! through the driver like those of any helper thread. Next to the latency of a network or of
//! another process the hand-over costs little.

use crate::file::Identity;
use crate::helper::Job;
use std::any::Any;
use std::fmt;
use std::io;
use std::time::{Duration, Instant};

use hearth_fault::Fault;

/// What executes the operations of an origin that is no file.
pub trait Remote: Send + Sync + fmt::Debug {
    /// What it is, for logs and people, such as its address. No secrets.
    fn name(&self) -> String;

    /// Size in bytes, as of the last [`refresh_size`](Self::refresh_size).
    fn size(&self) -> u64;

    /// Asks for the size again, and returns it. Blocks.
    fn refresh_size(&self) -> io::Result<u64>;

    /// Alignment in bytes of offsets and lengths: a power of two, at most 4096.
    fn align(&self) -> u32;

    /// True if it refuses writes.
    fn is_read_only(&self) -> bool;

    /// What tells its content from another's, beyond the size, if anything does: times and number
    /// of a file that changes when the content does.
    fn identity(&self) -> Option<Identity> {
        None
    }

    /// The same of its topmost file alone, whatever else it is written through.
    fn identity_of_top(&self) -> Option<Identity> {
        self.identity()
    }

    /// Takes an operation that lies within the size, and answers it exactly once. Does not block.
    /// Flushes are as an [`OpKind::Flush`](crate::OpKind::Flush) says, whatever happened to a
    /// connection or server between the writes and the flush.
    fn push(&self, job: Job);

    /// How it is connected now.
    fn link(&self) -> Link;

    /// From now on operations wait this long for a server that is gone before they fail; those
    /// that wait already, too.
    fn set_timeout(&self, timeout: Duration);

    /// The legs of a mirror; of what is none, none.
    fn legs(&self) -> Vec<LegStatus> {
        Vec::new()
    }

    /// Itself, for who knows of what kind it is and wants more of it than an origin does.
    fn as_any(&self) -> Option<&(dyn Any + Send + Sync)> {
        None
    }

    /// Nobody will wait for a server that is not there: what it would have to do fails at once.
    fn hurry(&self);
}

/// How a leg of a mirror is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LegStatus {
    /// What it is called.
    pub name: String,
    /// `current`, `checking` (where it may differ from the others after a crash), `resyncing` or `out`.
    pub state: &'static str,
    /// Bytes it still has to get.
    pub behind: u64,
    /// Bytes copied to it since the mirror was opened.
    pub copied: u64,
    /// Why it is out.
    pub reason: Option<Fault>,
}

/// Whether a [`Remote`] has its server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The server answers.
    pub connected: bool,
    /// Connected (or not) since then.
    pub since: Instant,
    /// Attempts to connect since the connection was lost; 0 while there is one.
    pub attempts: u64,
    /// Why it was lost or cannot be had; kept while connected, of the last loss.
    pub reason: Option<Fault>,
    /// The limit is over: operations fail instead of waiting.
    pub failing: bool,
    /// Times the connection was lost and found again.
    pub reconnects: u64,
    /// The storage has shut us out. There will be no other connection.
    pub fenced: bool,
}

impl Link {
    /// A connection that works, as of now.
    pub fn up() -> Link {
        Link {
            connected: true,
            since: Instant::now(),
            attempts: 0,
            reason: None,
            failing: false,
            reconnects: 0,
            fenced: false,
        }
    }

    /// No connection, for this reason.
    pub fn down(reason: Fault) -> Link {
        Link {
            connected: false,
            reason: Some(reason),
            failing: true,
            ..Link::up()
        }
    }
}
