//! NBD client: somebody else's export as an origin.
//!
//! Origins need not be files of this host. [`NbdOrigin`] makes an export of any NBD server a
//! [`Remote`](hearth_io::Remote): many requests in flight, over several connections where the
//! server allows it, data received straight into the memory it is wanted in. A server that dies
//! is a stall, not an error, and loses nothing: what it answered and had not flushed is sent
//! again to its successor ([`journal`]).
//!
//! The protocol itself is without I/O: [`handshake`] and [`transmission`] take bytes and give
//! bytes, and believe nothing.

pub mod connect;
pub mod handshake;
pub mod journal;
pub mod origin;
pub mod transmission;
pub mod uri;

mod line;
mod tasks;
mod worker;

pub use connect::{ConnectError, Connection, Dial, connect};
pub use handshake::{Handshake, HandshakeError, Negotiated};
pub use origin::{NbdOrigin, OpenError, Options, TIMEOUT_DEFAULT};
pub use uri::{Address, Uri, UriError};
