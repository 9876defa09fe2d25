//! What guests do to live disks: histograms, miss-ratio curves and recordings.
//!
//! A cache is only as good as what is known of the workload behind it: how long requests are,
//! how far apart, how often the same block comes back. All of it must be seen where requests
//! pass, on the data threads, and may cost them next to nothing. So a data thread only counts
//! (histograms), filters by hash (the sample a curve is made of) and appends to a bounded buffer
//! (recordings), under a lock per disk that is held for some ten nanoseconds a request. One
//! thread beside them, the keeper, makes curves of the samples. It does no I/O: each recording has
//! a thread of its own, so that a file system that hangs stalls that recording and nothing else.
//!
//! Nothing is allocated for a disk before its first request. An [`Observer`] is shared by the
//! data threads, which get their part through [`hearth_reactor::Watcher`], and by the control
//! plane, which asks.

mod disk;
mod keeper;
mod kept;
mod observer;
mod recorder;
mod recording;
mod scribe;
mod thread;

pub use disk::{Counted, Curve};
pub use kept::{KEPT_MAX, KeptError, KeptOf};
pub use observer::Observer;
pub use recording::{RecordError, RecordOptions, RecordingStatus};
