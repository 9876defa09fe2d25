//! Telling people: what is told, when, over which way, until it has arrived.
//!
//! An alert is worth what its reader does about it. So what belongs together comes in one message; what
//! lasts is repeated once a day and not every minute; that it is over is told, too; and nothing is lost because a
//! mail server was away, or this host was.
//!
//! [`desk`] decides, and is pure: reports and events go in, messages and what is due come out, and all it
//! remembers is one value that its owner keeps in a file. [`send`] delivers, and may take as long as it likes.

pub mod config;
pub mod desk;
pub mod message;
pub mod secret;
pub mod send;

pub use config::AlertsConfig;
pub use desk::Desk;
pub use message::Message;
