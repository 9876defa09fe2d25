//! Origins that are no file of this host: exports of NBD servers.
//!
//! [`open`] makes a device of what an [`OriginSpec`] says, whatever its scheme; who uses the
//! device need not know which it was.

mod open;

pub use hearth_nbd_client::TIMEOUT_DEFAULT;
pub use open::{How, OpenError, check, is_there, open};
