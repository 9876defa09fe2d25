//! Block traces: what a disk was asked to do, one request after another.
//!
//! Traces come in many forms, most of them hostile in some small way: lengths that are not
//! multiples of a block, offsets that straddle blocks, opcodes that move no data, files cut off
//! in the middle. [`Reader`] turns all of them into a stream of [`Record`]s and says, when it
//! cannot, at which record and why. Nothing is held in memory but the record at hand.
//!
//! [`Writer`] writes Hearth's own compact form (`docs/trace-format.md`) and, as far as they can hold
//! it, what was read in the other forms; [`Info`] sums a trace up.

mod binary;
mod error;
mod foreign;
mod format;
mod frame;
mod info;
mod reader;
mod record;
mod source;
mod text;
mod varint;
mod writer;

pub use error::TraceError;
pub use foreign::Lost;
pub use format::Format;
pub use frame::{FRAME_RECORDS, HEADER_BYTES};
pub use info::{Bin, Info, Summary, sparkline};
pub use reader::{Options, Reader};
pub use record::{BLOCK, LENGTH_MAX, Op, Record};
pub use writer::Writer;
