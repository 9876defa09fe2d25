//! Recordings: every request of a disk, into a bounded file in Hearth's trace format.
//!
//! Data threads append to a [`Tape`] of bounded length and never wait: what does not fit, because
//! the file is slower than the guest, is counted as dropped. A thread per recording writes tapes out
//! as whole frames at short intervals, so a daemon that is killed leaves all but the last of them.

use std::path::PathBuf;
use std::thread::Thread;
use std::time::Duration;

use hearth_engine::api::{ReqOp, Request};
use hearth_fault::Fault;
use hearth_trace::{LENGTH_MAX, Op, Record, TraceError};

/// Records a tape holds, 2 MiB: a tenth of a second of 600,000 requests per second.
const TAPE_RECORDS: usize = 65_536;
/// Its writer is woken when a tape holds so many.
const TAPE_WAKE: usize = TAPE_RECORDS / 4;
/// Smallest size a recording may be limited to: two files of several frames.
pub(crate) const BYTES_MIN: u64 = 1 << 20;

/// How to record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordOptions {
    /// The file; it must not be there yet.
    pub path: PathBuf,
    /// Ends by itself after so many nanoseconds.
    pub duration_ns: Option<u64>,
    /// Most bytes both files take together; at least 1 MiB.
    pub bytes_max: u64,
}

/// Why a recording cannot begin or end.
#[derive(Debug, thiserror::Error)]
#[error("{}", self.fault())]
pub enum RecordError {
    /// The disk is not watched.
    NoDisk,
    /// One is under way.
    Busy,
    /// None is under way.
    Idle,
    /// Too small a limit.
    TooSmall,
    /// The file.
    Create {
        /// Its path.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file system takes its time.
    Slow {
        /// The recording's file.
        path: PathBuf,
        /// How long it was waited for.
        waited: Duration,
    },
    /// Its first bytes.
    #[error(transparent)]
    Write(#[from] TraceError),
}

impl RecordError {
    /// What is wrong, and what to do about it.
    pub fn fault(&self) -> Fault {
        match self {
            RecordError::NoDisk => Fault::new(
                "the disk is not attached, so there is nothing to record",
                "`hearth disk show DISK` says why",
            ),
            RecordError::Busy => Fault::new(
                "the disk is being recorded already",
                "stop that with `hearth trace record DISK --stop`",
            ),
            RecordError::Idle => Fault::new(
                "the disk is not being recorded",
                "begin with `hearth trace record DISK --out FILE`",
            ),
            RecordError::TooSmall => {
                Fault::new("a recording needs at least 1 MiB", "raise --max-size")
            }
            RecordError::Create { path, source } => Fault::new(
                format!("{path} cannot be made: {source}", path = path.display()),
                "give the name of a file that is not there yet, where the daemon may write",
            ),
            RecordError::Slow { path, waited } => Fault::new(
                format!(
                    "the file {path} has not answered for {} seconds",
                    waited.as_secs(),
                    path = path.display()
                ),
                "see whether its file system hangs. The recording ends as soon as it answers",
            ),
            RecordError::Write(e) => e.fault(),
        }
    }
}

/// State of a recording.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordingStatus {
    /// The file.
    pub path: PathBuf,
    /// It goes on.
    pub active: bool,
    /// Requests written, those in files given up since included.
    pub records: u64,
    /// Requests that were not recorded, because the file was slower than they came or failed.
    pub dropped: u64,
    /// Requests that were given up with an older file.
    pub rotated: u64,
    /// Bytes in both files.
    pub bytes: u64,
    /// Seconds it has taken so far.
    pub seconds: f64,
    /// Why it ended early.
    pub error: Option<Fault>,
}

/// Requests on their way to the file.
pub(crate) struct Tape {
    records: Vec<Record>,
    start_ns: u64,
    dropped: u64,
    writer: Thread,
}

/// Room for a whole tape: a data thread must not make it, with a guest waiting.
pub(crate) fn room() -> Vec<Record> {
    Vec::with_capacity(TAPE_RECORDS)
}

impl Tape {
    /// An empty tape that `writer` is woken for.
    pub(crate) fn new(start_ns: u64, writer: Thread) -> Tape {
        Tape {
            records: room(),
            start_ns,
            dropped: 0,
            writer,
        }
    }

    /// Whom to wake.
    pub(crate) fn writer(&self) -> Thread {
        self.writer.clone()
    }

    pub(crate) fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Appends a request; true if the writer should look.
    pub(crate) fn push(&mut self, request: &Request) -> bool {
        let op = match request.op {
            ReqOp::Read => Op::Read,
            ReqOp::Write { .. } => Op::Write,
            // Neither moves data, and both read as zeros afterwards.
            ReqOp::Discard { .. } | ReqOp::WriteZeroes { .. } => Op::Discard,
            ReqOp::Flush => Op::Flush,
            // A hint, not a request for data.
            ReqOp::Prefetch => return false,
        };
        let before = self.records.len();
        let time_us = request.start_ns.saturating_sub(self.start_ns) / 1000;
        let (mut offset, mut left) = match op {
            Op::Flush => (0, 0),
            _ if request.len == 0 => return false,
            _ => (request.offset, request.len),
        };
        // Only discards are longer than a record may be.
        loop {
            let length = left.min(LENGTH_MAX);
            if self.records.len() >= TAPE_RECORDS {
                self.dropped += 1;
                break;
            }
            self.records.push(Record {
                time_us,
                disk: 0,
                op,
                offset,
                length: length as u32,
            });
            offset = offset.saturating_add(length);
            left -= length;
            if left == 0 {
                break;
            }
        }
        before < TAPE_WAKE && self.records.len() >= TAPE_WAKE
    }

    /// What is on it, and how many requests found no place; it goes on with `spare`.
    pub(crate) fn cut(&mut self, spare: Vec<Record>) -> (Vec<Record>, u64) {
        (
            std::mem::replace(&mut self.records, spare),
            std::mem::take(&mut self.dropped),
        )
    }

    /// The same, of a tape taken out.
    pub(crate) fn end(self) -> (Vec<Record>, u64) {
        (self.records, self.dropped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_file_costs_records_not_time() {
        let read = |i: u64| Request::new(0, 1, ReqOp::Read, i * 4096, 4096, None, i);
        let mut tape = Tape::new(0, std::thread::current());
        let room = tape.records.capacity();
        for i in 0..TAPE_RECORDS as u64 + 10 {
            tape.push(&read(i));
        }
        assert_eq!(tape.dropped(), 10);
        assert_eq!(tape.records.capacity(), room, "never made larger");
        let (records, dropped) = tape.cut(Vec::new());
        assert_eq!((records.len(), dropped), (TAPE_RECORDS, 10));
        tape.push(&read(0));
        assert_eq!((tape.dropped(), tape.records.len()), (0, 1));
    }
}
