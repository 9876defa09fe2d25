//! Why a replay cannot begin or go on.

use hearth_fault::Fault;
use hearth_trace::TraceError;

/// See the module.
#[derive(Debug, thiserror::Error)]
#[error("{}", self.fault())]
pub enum ReplayError {
    /// The trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// It has no reads or writes.
    Empty,
    /// It holds several disks, and nobody said which.
    Disks(u32),
    /// The disk chosen is not there.
    NoDisk(u32),
    /// It reaches beyond the target.
    Beyond {
        /// One past its last byte.
        end: u64,
        /// The target's size.
        size: u64,
    },
    /// It writes, and nobody allowed that.
    WouldWrite(u64),
    /// It writes, and the target takes none.
    ReadOnly,
    /// The target's address is none.
    Address(String),
    /// The target cannot be opened.
    Open(Fault),
    /// The target is too small to hold a request.
    TooSmall(u64),
    /// The connection or the driver broke.
    Broken {
        /// The target.
        name: String,
        /// What happened.
        why: String,
    },
}

impl ReplayError {
    /// What is wrong, and what to do about it.
    pub fn fault(&self) -> Fault {
        match self {
            ReplayError::Trace(e) => e.fault(),
            ReplayError::Empty => Fault::new(
                "the trace holds no requests to replay",
                "see `hearth trace info`",
            ),
            ReplayError::Disks(disks) => Fault::new(
                format!("the trace holds {disks} disks"),
                format!("choose one with --disk 0 to --disk {}", disks - 1),
            ),
            ReplayError::NoDisk(disk) => Fault::new(
                format!("the trace has no disk {disk}"),
                "see `hearth trace info`",
            ),
            ReplayError::Beyond { end, size } => Fault::new(
                format!("the trace reaches to byte {end}, the target has {size}"),
                "give a larger target, or --wrap to fold the trace into it",
            ),
            ReplayError::WouldWrite(writes) => Fault::new(
                format!(
                    "the trace holds {writes} writes and discards, which would destroy what is on the target"
                ),
                "say --overwrite if they may, or --reads-only to leave them out",
            ),
            ReplayError::ReadOnly => Fault::new(
                "the target is read-only",
                "say --reads-only to leave the trace's writes out",
            ),
            ReplayError::Address(address) => Fault::new(
                format!("the target {address} is not understood"),
                "give nbd+unix:///EXPORT?socket=PATH, nbd://HOST:PORT/EXPORT or a path",
            ),
            ReplayError::Open(fault) => fault.clone(),
            ReplayError::TooSmall(size) => Fault::new(
                format!("the target has {size} bytes, which is too small for a replay"),
                "give a larger one",
            ),
            ReplayError::Broken { name, why } => Fault::new(
                format!("the target {name} cannot be used any more: {why}"),
                "see whether its server still runs",
            ),
        }
    }
}
