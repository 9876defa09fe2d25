//! The file side of a recording: frames, and two files that are never longer than allowed.
//!
//! When the file has half of the size it may take, it becomes FILE.1 (over the one before) and a
//! new one begins: the newest requests are kept, and never more than the size allowed. Both names
//! are taken when the recording begins, with files that were not there, and a name is given a file
//! again only while it still is this recording's: another recording, or anybody else's file, is
//! never written over.
//!
//! Everything here may wait for a file system. One thread owns it, and nobody waits for that
//! thread without a limit (`scribe.rs`).

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use hearth_fault::Fault;
use hearth_io::file::sync_names;
use hearth_trace::{FRAME_RECORDS, Format, Record, TraceError, Writer};

use crate::recording::{BYTES_MIN, RecordError, RecordOptions, RecordingStatus, room};

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

/// See the module.
pub(crate) struct Recorder {
    options: RecordOptions,
    writer: Option<Writer<Counting>>,
    /// FILE.1, empty until the first rotation.
    before: File,
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
    error: Option<Fault>,
}

fn failed(path: &Path) -> impl FnOnce(std::io::Error) -> RecordError {
    let path = path.to_owned();
    |source| RecordError::Create { path, source }
}

/// A file that was not there; a symbolic link is one that is.
fn create(path: &Path) -> Result<File, RecordError> {
    File::options()
        .write(true)
        .create_new(true)
        // Which blocks a guest reads is nobody else's business.
        .mode(0o600)
        .open(path)
        .map_err(failed(path))
}

fn begin(file: File) -> Result<Writer<Counting>, RecordError> {
    Ok(Writer::new(Counting { file, bytes: 0 }, Format::Hearth)?)
}

/// True if the name is that of the file, not of another or a link.
fn is_ours(path: &Path, file: &File) -> std::io::Result<bool> {
    let (named, ours) = (std::fs::symlink_metadata(path)?, file.metadata()?);
    Ok((named.dev(), named.ino()) == (ours.dev(), ours.ino()))
}

fn check_ours(path: &Path, file: &File) -> Result<(), RecordError> {
    match is_ours(path, file) {
        Ok(true) => Ok(()),
        Ok(false) => Err(failed(path)(std::io::Error::other(
            "somebody has put another file there meanwhile",
        ))),
        Err(e) => Err(failed(path)(e)),
    }
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
        let file = create(&options.path)?;
        let made = create(&older(&options.path)).and_then(|before| match begin(file) {
            Ok(writer) => Ok((before, writer)),
            Err(e) => {
                // Empty, and made a moment ago.
                let _ = std::fs::remove_file(older(&options.path));
                Err(e)
            }
        });
        let (before, writer) = made.inspect_err(|_| {
            let _ = std::fs::remove_file(&options.path);
        })?;
        Ok(Recorder {
            writer: Some(writer),
            before,
            end_ns: options.duration_ns.map(|d| now_ns.saturating_add(d)),
            options,
            spare: room(),
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

    fn end_at(&mut self, now_ns: u64) {
        self.end_ns = Some(self.end_ns.map_or(now_ns, |at| at.min(now_ns)));
    }

    pub(crate) fn spare(&mut self) -> Vec<Record> {
        std::mem::take(&mut self.spare)
    }

    /// Counts what a tape held as lost.
    pub(crate) fn lose(&mut self, (records, dropped): (Vec<Record>, u64)) {
        self.dropped += records.len() as u64 + dropped;
    }

    /// Writes a tape as whole frames. An error ends the recording and is remembered.
    pub(crate) fn write(&mut self, (mut records, dropped): (Vec<Record>, u64), now_ns: u64) {
        self.dropped += dropped;
        let mut written = 0;
        for frame in records.chunks(FRAME_RECORDS) {
            if let Err(e) = self.write_frame(frame) {
                tracing::error!("a recording ends: {e}");
                self.error = Some(e.fault());
                self.dropped += (records.len() - written) as u64;
                self.close(now_ns);
                return;
            }
            written += frame.len();
        }
        records.clear();
        self.spare = records;
    }

    fn write_frame(&mut self, frame: &[Record]) -> Result<(), RecordError> {
        // Looking before a frame is enough: none is longer than an eighth of the smallest limit,
        // which is kept free of each half.
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
        let Some(writer) = &self.writer else {
            return Ok(());
        };
        let (path, older) = (self.options.path.clone(), older(&self.options.path));
        // Until it has its new name it stays the file at hand, which the end makes durable.
        check_ours(&path, &writer.get_ref().file)?;
        check_ours(&older, &self.before)?;
        std::fs::rename(&path, &older).map_err(failed(&older))?;
        if let Some(writer) = self.writer.take() {
            self.before = writer.finish()?.file;
        }
        self.rotated += self.records_before;
        (self.records_before, self.bytes_before) = (self.records_here, self.bytes_here);
        (self.records_here, self.bytes_here) = (0, 0);
        let begun = begin(create(&path)?).inspect_err(|_| {
            // Empty, and made a moment ago.
            let _ = std::fs::remove_file(&path);
        });
        self.writer = Some(begun?);
        self.bytes_here = hearth_trace::HEADER_BYTES as u64;
        Ok(())
    }

    /// Closes the files durably.
    pub(crate) fn finish(&mut self, now_ns: u64) {
        if self.is_active() {
            self.close(now_ns);
        }
    }

    /// The end, whether asked for or not. What cannot be done any more keeps nothing else from it: a
    /// file system that is full still gives back a name.
    fn close(&mut self, now_ns: u64) {
        self.end_at(now_ns);
        let older = older(&self.options.path);
        // Whole frames only: what an error left of one is counted as lost.
        let writer = self.writer.take();
        let here = writer.map_or(Ok(()), |writer| writer.get_ref().file.sync_all());
        let before = if self.bytes_before > 0 {
            self.before.sync_all()
        } else if is_ours(&older, &self.before).unwrap_or(false) {
            // It only kept the name.
            std::fs::remove_file(&older)
        } else {
            Ok(())
        };
        let names = sync_names(&older);
        if let Err(e) = here.and(before).and(names) {
            let e = TraceError::Write(e);
            tracing::error!("a recording's end cannot be written: {e}");
            // Why it ended early says more.
            self.error.get_or_insert(e.fault());
        }
    }

    /// As of now. While it goes on, seconds are those until `now_ns`.
    pub(crate) fn status(&self, now_ns: u64) -> RecordingStatus {
        let until = if self.is_active() {
            now_ns
        } else {
            self.end_ns.unwrap_or(self.start_ns)
        };
        RecordingStatus {
            path: self.options.path.clone(),
            active: self.is_active(),
            records: self.records,
            dropped: self.dropped,
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
    use hearth_trace::{Op, Reader};
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

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

    /// Records that do not compress, `n` from the `at`-th on.
    fn noise(at: u64, n: u64) -> (Vec<Record>, u64) {
        let records = (at..at + n)
            .map(|i| Record {
                time_us: i,
                disk: 0,
                op: Op::Read,
                offset: hearth_policy::spread(i) >> 20,
                length: 4096,
            })
            .collect();
        (records, 0)
    }

    #[test]
    fn files_are_bounded_and_keep_the_newest() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("t");
        let mut recorder = Recorder::create(options(path.clone()), 0).expect("begins");
        let total = 40 * 4096;
        for n in 0..40u64 {
            recorder.write(noise(n * 4096, 4096), 0);
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
        assert_eq!(now.last().map(|r| r.time_us), Some(total - 1));
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

    #[test]
    fn nobody_elses_file_is_written_over() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("t");
        let mut first = Recorder::create(options(path.clone()), 0).expect("begins");
        // The name its rotation will need is taken from the start.
        assert!(Recorder::create(options(older(&path)), 0).is_err());
        // One that cannot have both names leaves neither.
        let link = dir.path().join("u");
        std::os::unix::fs::symlink(dir.path().join("nowhere"), older(&link)).expect("linked");
        assert!(Recorder::create(options(link.clone()), 0).is_err());
        assert!(!link.exists() && !dir.path().join("nowhere").exists());
        // Somebody puts his file in its place all the same.
        std::fs::remove_file(older(&path)).expect("removed");
        std::fs::write(older(&path), "precious").expect("written");
        first.write(noise(0, 200_000), 0);
        assert!(!first.is_active(), "{:?}", first.status(0));
        assert_eq!(
            std::fs::read(older(&path)).expect("is there"),
            b"precious".to_vec()
        );
        let status = first.status(0);
        assert!(status.error.is_some());
        assert_eq!(status.records + status.dropped, 200_000);
        assert_eq!(read(&path).len() as u64, status.records);
    }

    #[test]
    fn a_name_kept_in_vain_is_given_back() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("t");
        let mut recorder = Recorder::create(options(path.clone()), 0).expect("begins");
        recorder.write(noise(0, 10), 0);
        recorder.finish(5);
        assert_eq!(recorder.status(9).error, None);
        assert!(path.exists() && !older(&path).exists());
    }

    #[test]
    fn an_error_gives_it_back_too() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("t");
        let mut recorder = Recorder::create(options(path.clone()), 0).expect("begins");
        // Takes the header, then nothing any more, and cannot be made durable either.
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        recorder.writer = Some(begin(File::from(OwnedFd::from(ours))).expect("begins"));
        drop(theirs);
        recorder.write(noise(0, 10), 5);
        let status = recorder.status(9);
        assert_eq!((status.active, status.dropped), (false, 10));
        let error = status.error.expect("told");
        assert!(error.what.contains("Broken pipe"), "{error}");
        assert!(path.exists() && !older(&path).exists());
        recorder.finish(7);
        assert_eq!(recorder.status(9).error, Some(error));
        assert_eq!(recorder.end_ns, Some(5));
    }
}
