//! Data threads: each owns a ring, its connections, and runs requests to completion.

pub mod session;

pub use session::{SendList, Session, SessionCx};
