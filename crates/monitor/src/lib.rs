//! The second service: what watches the daemon, judges its health, tells people, and shows.
//!
//! Only what serves disks lives in the process that serves disks. Whatever else an operator wants (a mail when
//! a device fails, pages in a browser, a memory of last week) talks to strangers, starts programs and keeps
//! files, and any of that may hang or crash. So it runs here, in a process of its own with rights of its
//! own, which knows of the daemon only what anybody may ask over its control socket. That also makes it
//! the one who can tell that the daemon is gone.
//!
//! What it does is divided into [parts](part::Part): each has a thread, and one that panics or fails is
//! started again without the others noticing. What all of them need is in their [`Context`]: the daemon as
//! last seen ([`watch`]), its events from where the part left off ([`events`]), a directory for what must
//! outlive a restart ([`state`]). Parts answer questions on the service's own socket ([`serve`]).

pub mod alerts;
pub mod api;
pub mod collect;
pub mod dirs;
pub mod events;
pub mod facts;
pub mod health;
pub mod history;
pub mod memory;
pub mod part;
pub mod run;
mod serve;
pub mod state;
pub mod stop;
mod tool;
pub mod watch;

pub use part::{Context, Part};
pub use run::{Options, run};
