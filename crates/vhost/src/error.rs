//! Why a client was let go. Each of these ends its connection, never the daemon.

use std::io;

use hearth_fault::Fault;

/// What a client did wrong, or what failed for it.
#[derive(Debug, thiserror::Error)]
#[error("{}", self.fault())]
pub enum VhostError {
    /// A chain of descriptors breaks the rules of virtio.
    Chain(#[from] crate::chain::ChainError),
    /// Nowhere to put the outcome.
    NoStatus(u16),
    /// A chain was offered again before it was done.
    Twice(u16),
    /// The available ring claims more than fits.
    RingOverrun(u16, u16),
    /// A queue's size is unusable.
    QueueSize(u32),
    /// A queue nobody has.
    QueueIndex(u32),
    /// A queue's ring is not in memory.
    RingAddress(&'static str),
    /// Memory cannot be mapped.
    Map {
        /// Bytes.
        size: u64,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Memory whose pages may not be there at once.
    Backing(String),
    /// A region is longer than the file behind it.
    Truncated {
        /// End of the region in the file.
        end: u64,
        /// Bytes of the file.
        size: u64,
    },
    /// Regions lie over each other or beyond the address space.
    Region(u64, u64),
    /// Too many regions.
    Regions,
    /// The client cut its memory short while it was used.
    Gone,
    /// A descriptor is of the wrong kind.
    NotEventfd(&'static str),
    /// The in-flight region does not fit.
    Inflight(&'static str),
    /// The socket, or the data threads.
    Io(#[from] io::Error),
}

impl VhostError {
    /// What is wrong, and what to do about it.
    pub fn fault(&self) -> Fault {
        match self {
            VhostError::Chain(e) => Fault::new(
                format!("the guest's driver broke the rules of virtio: {e}"),
                "see the guest's log for its driver",
            ),
            VhostError::NoStatus(head) => Fault::bare(format!(
                "the request at descriptor {head} has no room for its status byte"
            )),
            VhostError::Twice(head) => Fault::bare(format!(
                "descriptor chain {head} was offered again before its request had ended"
            )),
            VhostError::RingOverrun(waiting, size) => Fault::bare(format!(
                "the available ring holds {waiting} requests, more than the queue's size of {size}"
            )),
            VhostError::QueueSize(size) => Fault::new(
                format!("a queue of {size} descriptors is offered"),
                format!(
                    "use a power of two up to {max}",
                    max = crate::ring::QUEUE_SIZE_MAX
                ),
            ),
            VhostError::QueueIndex(index) => Fault::new(
                format!(
                    "queue {index} is named, but there are only {max}",
                    max = crate::config::QUEUES_MAX
                ),
                "set num-queues lower",
            ),
            VhostError::RingAddress(part) => Fault::bare(format!(
                "the {part} of a queue is not aligned, or lies outside the memory the client shared"
            )),
            VhostError::Map { size, source } => Fault::new(
                format!("cannot map {size} bytes of the client's memory: {source}"),
                "share it (memfd or hugepages, share=on)",
            ),
            VhostError::Backing(why) => Fault::new(
                format!("the client's memory may hang the threads that touch it: {why}"),
                "share a memfd, or a file on tmpfs (/dev/shm) or hugetlbfs",
            ),
            VhostError::Truncated { end, size } => Fault::bare(format!(
                "a memory region ends at byte {end} of a file of {size} bytes"
            )),
            VhostError::Region(start, len) => Fault::bare(format!(
                "memory region {start:#x}+{len:#x} overlaps another one, or is empty or too large"
            )),
            VhostError::Regions => Fault::bare(format!(
                "more than {max} memory regions are shared",
                max = crate::memory::REGIONS_MAX
            )),
            VhostError::Gone => Fault::bare(
                "the client took memory away that it shares with us (it truncated the file behind it)",
            ),
            VhostError::NotEventfd(which) => {
                Fault::bare(format!("the {which} descriptor is no eventfd"))
            }
            VhostError::Inflight(why) => {
                Fault::bare(format!("the in-flight region does not fit: {why}"))
            }
            VhostError::Io(e) => Fault::bare(e.to_string()),
        }
    }
}
