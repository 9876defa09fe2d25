//! Connections and threads around the protocol.
//!
//! One thread moves bytes ([`net`](self)); it takes messages apart and puts answers out in the order in
//! which they come, but for short ones where little is under way ([`link`](self)). What has to do with files is done by each export's own workers, so that a disk that hangs
//! holds up its own export only, and a file that hangs not even that. No call waits longer than the
//! server's patience: then it is answered JUKEBOX, upon which clients ask again, and if its work had begun it goes on
//! behind the scenes.
//!
//! Everything a client can make us hold has a bound, after which nothing more is read from it:
//! connections, calls under way and their bytes, answers it does not take.

mod call;
mod flight;
mod link;
mod locking;
mod net;
mod pool;
mod repeated;
mod replies;
mod service;
mod writers;

pub use net::{Config, Server};
pub use pool::HUNG_READS_MAX;
pub(crate) use replies::{LOOKED_AT, content};
pub use service::Export;
