//! Why a trace could not be read or written.

use std::path::PathBuf;

use hearth_fault::Fault;

/// What is wrong with a trace, and at which record.
#[derive(Debug, thiserror::Error)]
#[error("{}", self.fault())]
pub enum TraceError {
    /// The file could not be opened.
    Open {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Reading or decompressing failed on the way.
    Io {
        /// Records read before, i.e. the number of the one that failed, from 0.
        record: u64,
        /// What the system or the decompressor said.
        source: std::io::Error,
    },
    /// A record that makes no sense.
    Record {
        /// Its number, from 0; in a text format the number of lines before it, header included.
        record: u64,
        /// The format it was read as.
        format: &'static str,
        /// What is wrong, with the offending value.
        why: String,
    },
    /// The file ends inside a record.
    Truncated {
        /// Its number, from 0.
        record: u64,
        /// Bytes there are.
        have: usize,
        /// Bytes there should be.
        need: usize,
    },
    /// No format fits the first bytes.
    Unknown,
    /// A name of a format nobody knows.
    NoSuchFormat(String),
    /// Written by a newer Hearth.
    Newer(u16),
    /// Writing failed.
    Write(#[source] std::io::Error),
    /// A record that the format cannot hold.
    Unwritable {
        /// The format.
        format: &'static str,
        /// What does not fit.
        why: &'static str,
        /// What to do instead.
        remedy: &'static str,
    },
}

impl TraceError {
    /// What is wrong, and what to do about it.
    pub fn fault(&self) -> Fault {
        match self {
            TraceError::Open { path, source } => Fault::new(
                format!(
                    "the trace {path} cannot be opened: {source}",
                    path = path.display()
                ),
                "check the path and its permissions",
            ),
            TraceError::Io { record, source } => Fault::new(
                format!("the trace cannot be read past record {record}: {source}"),
                "the file is cut off or damaged there, so fetch it again",
            ),
            TraceError::Record {
                record,
                format,
                why,
            } => Fault::new(
                format!("record {record} of the trace makes no sense: {why}"),
                format!("is --format {format} right?"),
            ),
            TraceError::Truncated { record, have, need } => Fault::new(
                format!("the trace ends inside record {record}: {have} of {need} bytes are there"),
                "fetch the whole file, or cut it off before that record",
            ),
            TraceError::Unknown => Fault::new(
                "the form of this trace is not recognised",
                format!("name it with --format ({})", crate::Format::names()),
            ),
            TraceError::NoSuchFormat(name) => Fault::new(
                format!("there is no trace format “{name}”"),
                format!("choose one of {}", crate::Format::names()),
            ),
            TraceError::Newer(version) => Fault::new(
                format!(
                    "the trace has version {version} of Hearth's format, which this Hearth does not know"
                ),
                "use a newer one",
            ),
            TraceError::Write(e) => Fault::new(
                format!("the trace cannot be written: {e}"),
                "check that there is room",
            ),
            TraceError::Unwritable {
                format,
                why,
                remedy,
            } => Fault::new(
                format!("the record cannot be written as {format}: {why}"),
                *remedy,
            ),
        }
    }
}
