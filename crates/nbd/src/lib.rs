//! NBD server as a sans-I/O state machine.
//!
//! Hypervisors reach a disk over NBD where they want snapshots, backup or live migration on
//! top. [`NbdSession`] speaks the protocol (fixed newstyle, structured replies, extended
//! headers, block status) for one connection without touching a socket: a data thread hands
//! it received bytes and completed requests and asks it what to send. [`NbdExporter`] has the
//! sockets, and the [volumes](hearth_volume::Volume) that are on offer.

pub mod carried;
pub mod certs;
mod export;
mod exporter;
pub mod tls;

mod der;
mod extents;
mod factory;
mod handshake;
mod input;
mod keys;
mod names;
mod output;
mod session;
mod slab;
mod transmission;

pub use hearth_nbd_wire as wire;

pub use exporter::{NbdExporter, PROTOCOL, SOCKET, Tcp};
pub use extents::EXTENTS_MAX;
pub use factory::NbdFactory;
pub use handshake::{LIST_MAX, OPTION_MAX, OPTION_SKIP_MAX, OPTIONS_MAX, TlsMode};
pub use output::REQUESTS_MAX;
pub use session::NbdSession;
pub use transmission::PAYLOAD_MAX;
