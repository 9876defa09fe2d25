//! Origins of every kind: files, exports of NBD servers, and images that QEMU opens for us.
//!
//! [`open`] makes a device of what an [`OriginSpec`] says, whatever its scheme; who uses the
//! device need not know which it was.

mod chain;
mod child;
mod image;
mod imaged;
mod legs;
pub mod names;
mod open;
pub mod owner;
mod process;

pub use chain::{Backing, Chain, ChainError, Link, Role, files_of, is_same_chain};
pub use child::sweep;
pub use hearth_nbd_client::TIMEOUT_DEFAULT;
pub use image::{Image, ImageError};
pub use legs::{legs, mirror, parts};
pub use open::{
    FLASH, How, OpenError, absolute, chain, check, check_writable, decoded, is_image_format,
    is_there, local_path, may_have_chain, open, socket,
};
