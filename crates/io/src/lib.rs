//! Block I/O: buffers, operations, and the drivers that execute them.
//!
//! Nothing here knows of caching or protocols.

pub mod beneath;
pub mod buf;
pub mod checksum;
pub mod claim;
mod delay;
pub mod device;
mod disk;
mod doze;
pub mod fault;
pub mod file;
mod helper;
pub mod identity;
pub mod limiter;
mod lock;
pub mod media;
pub mod model;
mod nowhere;
pub mod op;
mod patience;
pub mod peer;
pub mod proactor;
pub mod remote;
pub mod shelf;
pub mod spec;
pub mod spread;
mod sync;
mod sys;
pub mod targets;
mod threads;
pub mod until;
mod uring;
pub mod user;
pub mod wake;
pub mod watch;

pub use buf::{Buf, BufPool, BufSlice};
pub use claim::{Claim, InUse, loops_over};
pub use device::Device;
pub use fault::{FaultKind, FaultRule, Faults};
pub use file::{BlockFile, OpenError, OpenMode, is_dead};
pub use helper::Job;
pub use media::{Media, OtherHalf, Sparse};
pub use nowhere::Nowhere;
pub use op::{BLOCK, Class, IoDone, IoError, IoOp, OpKind, Target};
pub use proactor::{Backend, Event, Proactor, ProactorError, SendList, Wait};
pub use remote::{Link, Remote};
pub use shelf::Shelf;
pub use spec::{OriginSpec, Source};
pub use spread::{Joined, Spread, Twice};
pub use sys::{free_bytes, has_room, now_ns, prefetch};
pub use targets::Targets;
pub use wake::WakeHandle;
