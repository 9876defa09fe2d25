//! The control API: what it says (`types`, `stats`, `workload`) and how it is served (`server` has the
//! routes, `listen` the connections).

pub mod advice;
pub mod areas;
pub mod authorise;
mod caller;
pub mod datastores;
pub mod events;
pub mod flash;
pub mod listen;
pub mod look;
pub mod server;
pub mod stats;
pub mod swap;
pub mod types;
pub mod upgrade;
mod watching;
pub mod workload;
