//! Why a replay cannot begin or go on.

use hearth_trace::TraceError;

/// See the module.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// It has no reads or writes.
    #[error("the trace holds no requests to replay; see `hearth trace info`")]
    Empty,
    /// It holds several disks, and nobody said which.
    #[error("the trace holds {0} disks; choose one with --disk 0 to --disk {last}", last = .0 - 1)]
    Disks(u32),
    /// The disk chosen is not there.
    #[error("the trace has no disk {0}; see `hearth trace info`")]
    NoDisk(u32),
    /// It reaches beyond the target.
    #[error(
        "the trace reaches to byte {end}, the target has {size}; give a larger target, or --wrap to fold the trace into it"
    )]
    Beyond {
        /// One past its last byte.
        end: u64,
        /// The target's size.
        size: u64,
    },
    /// It writes, and nobody allowed that.
    #[error(
        "the trace holds {0} writes and discards, which would destroy what is on the target; say --overwrite if they may, or --reads-only to leave them out"
    )]
    WouldWrite(u64),
    /// It writes, and the target takes none.
    #[error("the target is read-only; say --reads-only to leave the trace's writes out")]
    ReadOnly,
    /// The target's address is none.
    #[error(
        "the target {0} is not understood; give nbd+unix:///EXPORT?socket=PATH, nbd://HOST:PORT/EXPORT or a path"
    )]
    Address(String),
    /// The target cannot be opened.
    #[error("{0}")]
    Open(String),
    /// The target is too small to hold a request.
    #[error("the target has {0} bytes, which is too small for a replay; give a larger one")]
    TooSmall(u64),
    /// The connection or the driver broke.
    #[error("the target {name} cannot be used any more: {why}; see whether its server still runs")]
    Broken {
        /// The target.
        name: String,
        /// What happened.
        why: String,
    },
}
