//! Block I/O: buffers, operations, and the drivers that execute them.
//!
//! Nothing here knows of caching or protocols.

pub mod buf;
pub mod checksum;
pub mod media;
pub mod op;

pub use buf::{Buf, BufPool, BufSlice};
pub use media::Media;
pub use op::{BLOCK, Class, IoDone, IoError, IoOp, OpKind, Target};
