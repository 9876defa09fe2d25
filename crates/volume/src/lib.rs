//! What a protocol needs of a disk, and what the daemon needs of a protocol.
//!
//! Disks come and go, grow, are drained and fenced, whatever protocol they are served over; and a
//! protocol has its own sockets, names and rules, whatever is behind a disk. Between the two stand
//! three small interfaces. A [`Volume`] is a disk as every protocol sees it. An [`Exporter`] is a
//! protocol as the daemon sees it. A [`Host`] is what an exporter may ask of the daemon it runs in:
//! data threads, and sockets that the right people may open.
//!
//! Requests do not pass through here. A session or queue of the exporter
//! ([`hearth_reactor::Session`], [`hearth_reactor::Queue`]) names the volume's
//! [number](Volume::disk) in a [`Request`](hearth_engine::api::Request), and its data thread hands
//! that to the engine, tells whoever [watches](hearth_reactor::Watch), and brings the answer back.
//! So watching, counting and limiting work for every protocol alike.
//!
//! # A new protocol
//!
//! is a crate that depends on this one and on `hearth-reactor`, with a type that implements
//! [`Exporter`], and one line in the daemon (`serve.rs`, `register`). What differs between protocols
//! fits in between:
//!
//! - one socket for all volumes (NBD) or one for each (vhost-user): when an exporter asks its host
//!   for sockets is its own affair;
//! - several volumes behind one name (an iSCSI target and its units): the volume's number never
//!   changes as long as the disk is in its pool, and names the unit;
//! - volumes that appear by being used (files of a datastore): offers may come at any time, and an
//!   exporter leaves alone what is not for its clients;
//! - clients that sit in the kernel of this host (block devices): they are admitted like others.

mod catalog;
mod exporter;
mod volume;

pub use catalog::Catalog;
pub use exporter::{Exporter, Host, Protocol, Socket, SocketFile};
pub use hearth_fault::Fault;
pub use volume::{BlockSizes, Capabilities, Status, Visit, Visitor, Volume};
