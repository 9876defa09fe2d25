//! Why a client was let go. Each of these ends its connection, never the daemon.

use std::io;

/// What a client did wrong, or what failed for it.
#[derive(Debug, thiserror::Error)]
pub enum VhostError {
    /// A chain of descriptors breaks the rules of virtio.
    #[error(
        "the guest's driver broke the rules of virtio: {0}; see the guest's log for its driver"
    )]
    Chain(#[from] crate::chain::ChainError),
    /// Nowhere to put the outcome.
    #[error("the request at descriptor {0} has no room for its status byte")]
    NoStatus(u16),
    /// A chain was offered again before it was done.
    #[error("descriptor chain {0} was offered again before its request had ended")]
    Twice(u16),
    /// The available ring claims more than fits.
    #[error("the available ring holds {0} requests, more than the queue's size of {1}")]
    RingOverrun(u16, u16),
    /// A queue's size is unusable.
    #[error("a queue of {0} descriptors is offered; use a power of two up to {max}", max = crate::ring::QUEUE_SIZE_MAX)]
    QueueSize(u32),
    /// A queue nobody has.
    #[error("queue {0} is named, but there are only {max}; set num-queues lower", max = crate::config::QUEUES_MAX)]
    QueueIndex(u32),
    /// A queue's ring is not in memory.
    #[error("the {0} of a queue is not aligned, or lies outside the memory the client shared")]
    RingAddress(&'static str),
    /// Memory cannot be mapped.
    #[error(
        "cannot map {size} bytes of the client's memory: {source}; share it (memfd or hugepages, share=on)"
    )]
    Map {
        /// Bytes.
        size: u64,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Memory whose pages may not be there at once.
    #[error(
        "the client's memory may hang the threads that touch it: {0}; share a memfd, or a file on tmpfs (/dev/shm) or hugetlbfs"
    )]
    Backing(String),
    /// A region is longer than the file behind it.
    #[error("a memory region ends at byte {end} of a file of {size} bytes")]
    Truncated {
        /// End of the region in the file.
        end: u64,
        /// Bytes of the file.
        size: u64,
    },
    /// Regions lie over each other or beyond the address space.
    #[error("memory region {0:#x}+{1:#x} overlaps another one, or is empty or too large")]
    Region(u64, u64),
    /// Too many regions.
    #[error("more than {max} memory regions are shared", max = crate::memory::REGIONS_MAX)]
    Regions,
    /// The client cut its memory short while it was used.
    #[error("the client took memory away that it shares with us (it truncated the file behind it)")]
    Gone,
    /// A descriptor is of the wrong kind.
    #[error("the {0} descriptor is no eventfd")]
    NotEventfd(&'static str),
    /// The in-flight region does not fit.
    #[error("the in-flight region does not fit: {0}")]
    Inflight(&'static str),
    /// The socket, or the data threads.
    #[error("{0}")]
    Io(#[from] io::Error),
}
