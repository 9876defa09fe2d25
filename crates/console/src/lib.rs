//! The web console: what the daemon's API tells, as pages for people.
//!
//! A browser cannot speak to a unix socket, and whoever may speak to that socket is as good as root. So between
//! the two stands a server of its own: it serves the page, knows who somebody is and what he may do, and passes on
//! what is allowed. It holds nothing of the daemon's and runs in another process; when it falls over, no guest
//! notices. `docs/console.md` says what it defends against, and how.
//!
//! | file | what it does |
//! | --- | --- |
//! | `settings.rs`, `accounts.rs`, `links.rs` | what is kept: whether and where there is a console, who may come in |
//! | `listen.rs` | connections and TLS |
//! | `gate.rs` | turns away what other sites send |
//! | `sessions.rs`, `throttle.rs` | who is logged in; guessing |
//! | `forward.rs`, `paths.rs` | what is passed on to the daemon, for whom, and which files it may name |
//! | `pack.rs` | compresses what is passed on |
//! | `server.rs` | puts them together |
//! | `assets.rs` | the page |

mod accounts;
mod answer;
mod assets;
mod files;
mod forward;
mod gate;
mod links;
mod listen;
mod pack;
mod paths;
mod secret;
mod server;
mod sessions;
mod settings;
mod throttle;

pub use accounts::{Account, Accounts, Role};
pub use assets::built;
pub use links::{GOOD_FOR as LINK_GOOD_FOR, make as make_link};
pub use listen::run;
pub use server::{Attach, Config, What, router};
pub use sessions::{IDLE, WHOLE};
pub use settings::{Home, LISTEN, Reach, Settings, TlsFiles};
