//! The rules of `hearth-memory` on a real host: looks at the kernel and the guests, does what is decided, and sets it back.
//!
//! Everything here may be slow, hang or be gone a moment later: a guest's QMP socket, libvirt, a process. So each has a
//! limit, and what one does not answer does not keep the others from being helped. What is changed is noted before, in
//! the run directory: whoever kills this process leaves a host that can be set back.

mod act;
mod ask;
mod guests;
mod kernel;
mod libvirt;
mod line;
mod look;
mod pages;
mod qmp;
mod run;
mod store;

pub use look::{Eyes, Places, host};
pub use run::{Options, run, undo};
pub use store::{RunDir, run_dir, status};

/// Its failures are told in words.
pub type Result<T> = std::result::Result<T, hearth_fault::Fault>;
