//! Why a trace could not be read or written.

use std::path::PathBuf;

/// What is wrong with a trace, and at which record.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file could not be opened.
    #[error("the trace {path} cannot be opened: {source}; check the path and its permissions")]
    Open {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Reading or decompressing failed on the way.
    #[error(
        "the trace cannot be read past record {record}: {source}; the file is cut off or damaged there, so fetch it again"
    )]
    Io {
        /// Records read before, i.e. the number of the one that failed, from 0.
        record: u64,
        /// What the system or the decompressor said.
        source: std::io::Error,
    },
    /// A record that makes no sense.
    #[error("record {record} of the trace makes no sense: {why}; is --format {format} right?")]
    Record {
        /// Its number, from 0; in a text format the number of lines before it, header included.
        record: u64,
        /// The format it was read as.
        format: &'static str,
        /// What is wrong, with the offending value.
        why: String,
    },
    /// The file ends inside a record.
    #[error(
        "the trace ends inside record {record}: {have} of {need} bytes are there; fetch the whole file, or cut it off before that record"
    )]
    Truncated {
        /// Its number, from 0.
        record: u64,
        /// Bytes there are.
        have: usize,
        /// Bytes there should be.
        need: usize,
    },
    /// No format fits the first bytes.
    #[error(
        "the form of this trace is not recognised; name it with --format ({known})",
        known = crate::Format::names()
    )]
    Unknown,
    /// A name of a format nobody knows.
    #[error("there is no trace format “{0}”; known are {known}", known = crate::Format::names())]
    NoSuchFormat(String),
    /// Written by a newer Hearth.
    #[error(
        "the trace has version {0} of Hearth's format, which this Hearth does not know; use a newer one"
    )]
    Newer(u16),
    /// Writing failed.
    #[error("the trace cannot be written: {0}; check that there is room")]
    Write(#[source] std::io::Error),
    /// A record that the format cannot hold.
    #[error("the record cannot be written as {format}: {why}")]
    Unwritable {
        /// The format.
        format: &'static str,
        /// What does not fit.
        why: &'static str,
    },
}
