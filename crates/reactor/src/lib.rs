//! Data threads: each owns a ring, its connections, and runs requests to completion.
//!
//! A thread that receives a request looks it up, does the I/O on its own ring and answers;
//! a hit never changes threads. Start them with [`Reactors::start`], give them listening
//! sockets with a [`SessionFactory`] each, and stop them with [`Reactors::stop`].

mod background;
mod budget;
mod conn;
mod effects;
pub mod engine;
#[cfg(debug_assertions)]
mod failpoint;
mod inbox;
mod mailbox;
pub mod peer;
mod polling;
mod pulse;
pub mod queue;
mod queues;
pub mod reactors;
pub mod session;
mod sync;
mod tags;
pub mod watch;
mod worker;

pub use budget::{CONNECTION, Room, Shares};
pub use engine::BlockEngine;
pub use peer::{Caller, ListenerId, PeerAddress, PeerInfo, SessionFactory};
pub use pulse::Stuck;
pub use queue::{Queue, QueueId};
pub use reactors::{Carried, Config, ReactorError, Reactors, Stats};
pub use session::{Memory, SendList, Session, SessionCx};
pub use watch::{Ended, Watch, Watcher};
