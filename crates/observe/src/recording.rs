//! Recordings: every request of a disk, into a bounded file in Hearth's trace format.
//!
//! Data threads append to a [`Tape`] of bounded length and never wait: what does not fit, because
//! the file is slower than the guest, is counted as dropped. The keeper writes tapes out as whole
//! frames at short intervals, so a daemon that is killed leaves all but the last of them. When the
//! file has half of the size it may take, it becomes FILE.1 (over the one before) and a new one
//! begins: the newest requests are kept, and never more than the size allowed.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use hearth_engine::api::{ReqOp, Request};
use hearth_trace::{FRAME_RECORDS, LENGTH_MAX, Op, Output, Record, TraceError, Writer};

/// Records a tape holds, 2 MiB: a tenth of a second of 600,000 requests per second.
const TAPE_RECORDS: usize = 65_536;
/// The keeper is woken when a tape holds so many.
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
pub enum RecordError {
    /// The disk is not watched.
    #[error("the disk is not attached, so there is nothing to record")]
    NoDisk,
    /// One is under way.
    #[error("the disk is being recorded already; stop that with `hearth trace record --stop`")]
    Busy,
    /// None is under way.
    #[error("the disk is not being recorded")]
    Idle,
    /// Too small a limit.
    #[error("a recording needs at least 1 MiB; raise --max-size")]
    TooSmall,
    /// The file.
    #[error(
        "{path} cannot be made: {source}; give the name of a file that is not there yet, where the daemon may write"
    )]
    Create {
        /// Its path.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Its first bytes.
    #[error(transparent)]
    Write(#[from] TraceError),
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
    /// Requests that were not recorded, because the file was slower than they came.
    pub dropped: u64,
    /// Requests that were given up with an older file.
    pub rotated: u64,
    /// Bytes in both files.
    pub bytes: u64,
    /// Seconds it has taken so far.
    pub seconds: f64,
    /// Why it ended early.
    pub error: Option<String>,
}

/// Requests on their way to the file.
pub(crate) struct Tape {
    records: Vec<Record>,
    start_ns: u64,
    dropped: u64,
}

impl Tape {
    pub(crate) fn new(start_ns: u64) -> Tape {
        Tape {
            records: Vec::new(),
            start_ns,
            dropped: 0,
        }
    }

    pub(crate) fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Appends a request; true if the keeper should look.
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

    /// What is on it; it goes on with `spare`.
    pub(crate) fn cut(&mut self, spare: Vec<Record>) -> Tape {
        Tape {
            records: std::mem::replace(&mut self.records, spare),
            start_ns: self.start_ns,
            dropped: std::mem::take(&mut self.dropped),
        }
    }
}

/// A file whose bytes are counted.
struct Counting {
    file: File,
    bytes: u64,
}

impl Write for Counting {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        let n = self.file.write(buf)?;
        self.bytes += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}

/// The file side of a recording.
pub(crate) struct Recorder {
    options: RecordOptions,
    writer: Option<Writer<Counting>>,
    spare: Vec<Record>,
    start_ns: u64,
    end_ns: Option<u64>,
    records: u64,
    dropped: u64,
    rotated: u64,
    /// Of the file at hand.
    records_here: u64,
    bytes_here: u64,
    /// Of FILE.1.
    records_before: u64,
    bytes_before: u64,
    error: Option<String>,
}

fn create(path: &Path) -> Result<Writer<Counting>, RecordError> {
    use std::os::unix::fs::OpenOptionsExt;
    let file = File::options()
        .write(true)
        .create_new(true)
        // Which blocks a guest reads is nobody else's business.
        .mode(0o600)
        .open(path)
        .map_err(|source| RecordError::Create {
            path: path.to_owned(),
            source,
        })?;
    Ok(Writer::new(Counting { file, bytes: 0 }, Output::Hearth)?)
}

/// Where the file before goes.
pub(crate) fn older(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

impl Recorder {
    pub(crate) fn create(options: RecordOptions, now_ns: u64) -> Result<Recorder, RecordError> {
        if options.bytes_max < BYTES_MIN {
            return Err(RecordError::TooSmall);
        }
        let before = older(&options.path);
        if before.exists() {
            return Err(RecordError::Create {
                path: before,
                source: std::io::ErrorKind::AlreadyExists.into(),
            });
        }
        Ok(Recorder {
            writer: Some(create(&options.path)?),
            end_ns: options.duration_ns.map(|d| now_ns.saturating_add(d)),
            options,
            spare: Vec::new(),
            start_ns: now_ns,
            records: 0,
            dropped: 0,
            rotated: 0,
            records_here: 0,
            bytes_here: hearth_trace::HEADER_BYTES as u64,
            records_before: 0,
            bytes_before: 0,
            error: None,
        })
    }

    pub(crate) fn is_active(&self) -> bool {
        self.writer.is_some()
    }

    pub(crate) fn is_over(&self, now_ns: u64) -> bool {
        self.end_ns.is_some_and(|at| now_ns >= at)
    }

    pub(crate) fn end_at(&mut self, now_ns: u64) {
        self.end_ns = Some(self.end_ns.map_or(now_ns, |at| at.min(now_ns)));
    }

    pub(crate) fn spare(&mut self) -> Vec<Record> {
        std::mem::take(&mut self.spare)
    }

    /// Writes a tape as whole frames. An error ends the recording and is remembered.
    pub(crate) fn write(&mut self, mut tape: Tape, now_ns: u64) {
        self.dropped += tape.dropped;
        for frame in tape.records.chunks(FRAME_RECORDS) {
            if let Err(e) = self.write_frame(frame) {
                tracing::error!("a recording ends: {e}");
                self.error = Some(e.to_string());
                self.writer = None;
                self.end_at(now_ns);
                return;
            }
        }
        tape.records.clear();
        self.spare = tape.records;
    }

    fn write_frame(&mut self, frame: &[Record]) -> Result<(), RecordError> {
        // A frame is shorter than a sixteenth of the smallest limit, so looking first keeps it.
        let room = self.options.bytes_max / 2 - BYTES_MIN / 8;
        if self.bytes_here >= room {
            self.rotate()?;
        }
        let Some(writer) = self.writer.as_mut() else {
            return Ok(());
        };
        for record in frame {
            writer.push(*record)?;
        }
        writer.frame()?;
        self.bytes_here = writer.get_ref().bytes;
        self.records += frame.len() as u64;
        self.records_here += frame.len() as u64;
        Ok(())
    }

    fn rotate(&mut self) -> Result<(), RecordError> {
        let path = self.options.path.clone();
        let failed = |source| RecordError::Create {
            path: older(&path),
            source,
        };
        std::fs::rename(&path, older(&path)).map_err(failed)?;
        self.rotated += self.records_before;
        (self.records_before, self.bytes_before) = (self.records_here, self.bytes_here);
        self.writer = Some(create(&path)?);
        self.records_here = 0;
        self.bytes_here = hearth_trace::HEADER_BYTES as u64;
        Ok(())
    }

    /// Closes the file durably.
    pub(crate) fn finish(&mut self, now_ns: u64) {
        let Some(writer) = self.writer.take() else {
            return;
        };
        self.end_at(now_ns);
        let closed = writer
            .finish()
            .and_then(|out| out.file.sync_all().map_err(TraceError::Write));
        if let Err(e) = closed {
            tracing::error!("a recording's end cannot be written: {e}");
            self.error = Some(e.to_string());
        }
    }

    pub(crate) fn status(&self, dropped: u64) -> RecordingStatus {
        let until = if self.is_active() {
            hearth_io::now_ns()
        } else {
            self.end_ns.unwrap_or(self.start_ns)
        };
        RecordingStatus {
            path: self.options.path.clone(),
            active: self.is_active(),
            records: self.records,
            dropped: self.dropped + dropped,
            rotated: self.rotated,
            bytes: self.bytes_here + self.bytes_before,
            seconds: until.saturating_sub(self.start_ns) as f64 / 1e9,
            error: self.error.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::Disk;
    use crate::keeper::{begin_recording, end_recording};
    use hearth_trace::Reader;

    fn read(path: &Path) -> Vec<Record> {
        Reader::open(path, hearth_trace::Options::default())
            .expect("opens")
            .map(|r| r.expect("is whole"))
            .collect()
    }

    fn options(path: PathBuf) -> RecordOptions {
        RecordOptions {
            path,
            duration_ns: None,
            bytes_max: BYTES_MIN,
        }
    }

    fn request(op: ReqOp, offset: u64, len: u64, now_ns: u64) -> Request {
        Request::new(0, 1, op, offset, len, None, now_ns)
    }

    #[test]
    fn what_is_recorded_is_read() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("t");
        let disk = Disk::new(1, 512);
        begin_recording(&disk, options(path.clone()), 1_000_000).expect("begins");
        assert!(matches!(
            begin_recording(&disk, options(dir.path().join("u")), 1_000_000),
            Err(RecordError::Busy)
        ));
        let fua = false;
        disk.arrived(&[
            request(ReqOp::Read, 4096, 8192, 1_000_000),
            request(ReqOp::Write { fua }, 512, 512, 3_000_000),
            request(ReqOp::Flush, 0, 0, 3_000_000),
            request(ReqOp::Prefetch, 0, 4096, 3_000_000),
            request(ReqOp::Discard { fua }, 0, (1 << 30) + 4096, 4_000_000),
        ]);
        end_recording(&disk, 5_000_000);
        disk.arrived(&[request(ReqOp::Read, 0, 512, 6_000_000)]);
        let got: Vec<_> = read(&path)
            .iter()
            .map(|r| (r.time_us, r.op, r.offset, r.length))
            .collect();
        assert_eq!(
            got,
            [
                (0, Op::Read, 4096, 8192),
                (2000, Op::Write, 512, 512),
                (2000, Op::Flush, 0, 0),
                (3000, Op::Discard, 0, 1 << 30),
                (3000, Op::Discard, 1 << 30, 4096),
            ]
        );
        let status = disk.recording().expect("remembered");
        assert_eq!(
            (status.active, status.records, status.dropped),
            (false, 5, 0)
        );
        assert_eq!(
            status.bytes,
            std::fs::metadata(&path).expect("is there").len()
        );
        // A second recording needs another file.
        assert!(begin_recording(&disk, options(path), 7_000_000).is_err());
    }

    #[test]
    fn a_slow_file_costs_records_not_time() {
        let mut tape = Tape::new(0);
        for i in 0..TAPE_RECORDS as u64 + 10 {
            tape.push(&request(ReqOp::Read, i * 4096, 4096, i));
        }
        assert_eq!(tape.dropped(), 10);
        assert_eq!(tape.cut(Vec::new()).records.len(), TAPE_RECORDS);
        tape.push(&request(ReqOp::Read, 0, 4096, 9));
        assert_eq!((tape.dropped(), tape.records.len()), (0, 1));
    }

    #[test]
    fn files_are_bounded_and_keep_the_newest() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("t");
        let mut recorder = Recorder::create(options(path.clone()), 0).expect("begins");
        let mut state = 1u64;
        let mut last = 0;
        let total = 40 * 4096;
        for n in 0..40u64 {
            let mut tape = Tape::new(0);
            for i in 0..4096u64 {
                state = hearth_policy::spread(state);
                last = (n * 4096 + i) * 1000;
                tape.push(&request(ReqOp::Read, state >> 20, 4096, last));
            }
            recorder.write(tape, 0);
            let on_disk: u64 = [path.clone(), older(&path)]
                .iter()
                .filter_map(|p| std::fs::metadata(p).ok())
                .map(|m| m.len())
                .sum();
            assert!(on_disk <= BYTES_MIN, "{on_disk}");
            assert_eq!(recorder.status(0).bytes, on_disk);
        }
        recorder.finish(0);
        let (before, now) = (read(&older(&path)), read(&path));
        let status = recorder.status(0);
        assert_eq!(status.records, total);
        assert_eq!(
            status.records - status.rotated,
            (before.len() + now.len()) as u64
        );
        assert!(status.rotated > 0);
        assert_eq!(now.last().map(|r| r.time_us), Some(last / 1000));
        assert_eq!(
            before.last().map(|r| r.time_us + 1),
            now.first().map(|r| r.time_us)
        );
    }

    #[test]
    fn a_recording_ends_by_itself() {
        let dir = tempfile::tempdir().expect("a directory");
        let recorder = Recorder::create(
            RecordOptions {
                duration_ns: Some(50),
                ..options(dir.path().join("t"))
            },
            100,
        )
        .expect("begins");
        assert!(!recorder.is_over(149) && recorder.is_over(150));
    }
}
