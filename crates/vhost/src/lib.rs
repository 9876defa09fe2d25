//! vhost-user-blk: a virtual machine's disk without a copy and without a protocol on a socket.
//!
//! Over NBD every payload crosses a socket, which copies it. A hypervisor that speaks vhost-user
//! shares the guest's memory with us instead: requests lie in the guest's queues, and the device
//! reads straight into the guest's buffers. The socket carries only set-up messages.
//!
//! What comes out of that memory is input from outside, and its owner may change it at any
//! moment, even between two looks of ours. [`chain`] therefore copies each descriptor once and
//! judges the copy, without any I/O, so that a fuzzer can try everything; [`memory`] maps guest
//! memory and survives a client that takes it away ([`sigbus`]); [`ring`] and [`queue`] run on a
//! data thread; [`inflight`] is the memory that lets a restarted daemon go on; [`control`] and
//! [`server`] speak to the hypervisor; [`VhostExporter`] is what the daemon knows of all this. Sources: virtio 1.2 (split virtqueues, 5.2 block device)
//! and QEMU's docs/interop/vhost-user.rst.

pub mod backing;
pub mod chain;
pub mod channel;
pub mod config;
pub mod control;
pub mod error;
mod exporter;
pub mod inflight;
pub mod memory;
pub mod queue;
pub mod request;
pub mod ring;
pub mod serial;
pub mod server;
pub mod sigbus;

pub use error::VhostError;
pub use exporter::{DIRECTORY, PROTOCOL, VhostExporter, socket_name};
pub use server::Server;
