//! The thread of one recording, and what others know of it.
//!
//! A file system may hang for minutes; the control plane, the curves and the guests must not.
//! So a recording's files belong to a thread of its own, which tells how far it is in a small
//! lock that is never held across I/O. Whoever wants a recording to begin or end asks, and waits
//! no longer than a limit.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

use crate::disk::{Disk, lock};
use crate::recorder::Recorder;
use crate::recording::{RecordError, RecordOptions, RecordingStatus, Tape};

/// Longest sleep between two looks at the tape: what a kill may cost.
const ROUND: Duration = Duration::from_millis(100);
/// How long whoever asks waits for the file. A healthy disk under load answers in a second; longer
/// than this, and operators take the daemon for hung.
pub(crate) const LIMIT: Duration = Duration::from_secs(10);

/// Where a disk's recording is.
#[derive(Default)]
pub(crate) struct Place {
    /// The one under way or the last one.
    pub current: Option<Arc<Scribe>>,
    /// The disk is gone, or the daemon stops: nothing begins any more.
    pub closed: bool,
}

struct Told {
    status: RecordingStatus,
    begun: bool,
    /// The thread has ended.
    over: bool,
    failed: Option<RecordError>,
}

/// See the module.
pub(crate) struct Scribe {
    start_ns: u64,
    stop: AtomicBool,
    told: Mutex<Told>,
    changed: Condvar,
    thread: Mutex<Option<Thread>>,
}

impl Scribe {
    /// As it was last told.
    pub(crate) fn status(&self) -> RecordingStatus {
        let mut status = lock(&self.told).status.clone();
        if status.active {
            let ns = hearth_io::now_ns().saturating_sub(self.start_ns);
            status.seconds = ns as f64 / 1e9;
        }
        status
    }

    fn is_over(&self) -> bool {
        lock(&self.told).over
    }

    fn tell(&self, change: impl FnOnce(&mut Told)) {
        change(&mut lock(&self.told));
        self.changed.notify_all();
    }

    /// Waits until `what` is so; false if it is not within the limit.
    fn wait(&self, until: Instant, what: impl Fn(&Told) -> bool) -> bool {
        let told = lock(&self.told);
        let left = until.saturating_duration_since(Instant::now());
        let (told, _) = self
            .changed
            .wait_timeout_while(told, left, |told| !what(told))
            .unwrap_or_else(PoisonError::into_inner);
        what(&told)
    }

    fn ask_to_stop(&self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = &*lock(&self.thread) {
            thread.unpark();
        }
    }
}

/// Says that a thread has ended, however it did.
struct Ending(Arc<Scribe>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.tell(|told| {
            told.status.active = false;
            told.over = true;
        });
    }
}

/// Begins a recording of a disk.
pub(crate) fn begin(
    disk: &Arc<Disk>,
    options: RecordOptions,
    now_ns: u64,
) -> Result<RecordingStatus, RecordError> {
    let path = options.path.clone();
    let make = move || Recorder::create(options, now_ns);
    begin_with(disk, path, now_ns, LIMIT, make)
}

fn begin_with(
    disk: &Arc<Disk>,
    path: std::path::PathBuf,
    now_ns: u64,
    limit: Duration,
    make: impl FnOnce() -> Result<Recorder, RecordError> + Send + 'static,
) -> Result<RecordingStatus, RecordError> {
    let failed = |source| RecordError::Create {
        path: path.clone(),
        source,
    };
    let mut place = lock(&disk.place);
    if place.closed {
        return Err(RecordError::NoDisk);
    }
    if place.current.as_ref().is_some_and(|s| !s.is_over()) {
        return Err(RecordError::Busy);
    }
    let scribe = Arc::new(Scribe {
        start_ns: now_ns,
        stop: AtomicBool::new(false),
        told: Mutex::new(Told {
            status: RecordingStatus {
                path: path.clone(),
                active: true,
                records: 0,
                dropped: 0,
                rotated: 0,
                bytes: 0,
                seconds: 0.0,
                error: None,
            },
            begun: false,
            over: false,
            failed: None,
        }),
        changed: Condvar::new(),
        thread: Mutex::new(None),
    });
    let (theirs, watched) = (scribe.clone(), disk.clone());
    let thread = std::thread::Builder::new()
        .name("hearth-record".to_owned())
        .spawn(move || {
            let ending = Ending(theirs);
            match make() {
                Ok(recorder) => run(&watched, &ending.0, recorder),
                Err(e) => ending.0.tell(|told| told.failed = Some(e)),
            }
        })
        .map_err(failed)?;
    *lock(&scribe.thread) = Some(thread.thread().clone());
    let before = place.current.replace(scribe.clone());
    drop(place);
    let limit_at = Instant::now() + limit;
    if !scribe.wait(limit_at, |told| told.begun || told.over) {
        scribe.ask_to_stop();
        let waited = limit;
        return Err(RecordError::Slow { path, waited });
    }
    let error = lock(&scribe.told).failed.take();
    if let Some(e) = error {
        let mut place = lock(&disk.place);
        // What was known of the one before is worth more than nothing.
        if place
            .current
            .as_ref()
            .is_some_and(|s| Arc::ptr_eq(s, &scribe))
        {
            place.current = before;
        }
        return Err(e);
    }
    tracing::info!(disk = disk.id, file = %path.display(), "recording");
    Ok(scribe.status())
}

/// Writes what comes until it is over.
fn run(disk: &Disk, scribe: &Scribe, mut recorder: Recorder) {
    let start_ns = scribe.start_ns;
    if !scribe.stop.load(Ordering::Acquire) {
        disk.swap_tape(start_ns, Some(Tape::new(start_ns, std::thread::current())));
    }
    scribe.tell(|told| {
        told.status = recorder.status(start_ns);
        told.begun = true;
    });
    loop {
        let now_ns = hearth_io::now_ns();
        let over = scribe.stop.load(Ordering::Acquire) || recorder.is_over(now_ns);
        let tape = if over {
            disk.swap_tape(now_ns, None).map(Tape::end)
        } else {
            let spare = recorder.spare();
            disk.with_tape(|tape| tape.cut(spare))
        };
        if let Some(tape) = tape {
            recorder.write(tape, now_ns);
        }
        if over {
            recorder.finish(now_ns);
        }
        if !recorder.is_active() {
            // It may have ended with an error: what came since is lost.
            if let Some(tape) = disk.swap_tape(now_ns, None) {
                recorder.lose(tape.end());
            }
        }
        scribe.tell(|told| told.status = recorder.status(now_ns));
        if !recorder.is_active() {
            tracing::info!(disk = disk.id, "recording ended");
            return;
        }
        std::thread::park_timeout(ROUND);
    }
}

/// Ends a recording, if one is under way; everything that arrived before is in its file then.
///
/// # Errors
///
/// When there is none, or the file does not answer in time; it still ends when it does.
pub(crate) fn end(disk: &Disk, limit: Duration) -> Result<RecordingStatus, RecordError> {
    let scribe = lock(&disk.place).current.clone();
    let scribe = scribe.filter(|s| !s.is_over()).ok_or(RecordError::Idle)?;
    scribe.ask_to_stop();
    if !scribe.wait(Instant::now() + limit, |told| told.over) {
        return Err(RecordError::Slow {
            path: scribe.status().path,
            waited: limit,
        });
    }
    Ok(scribe.status())
}

/// Ends the recordings of disks that are not recorded any more; waits for all together no longer
/// than the limit.
pub(crate) fn close(disks: &[Arc<Disk>], limit: Duration) {
    let mut open = Vec::new();
    for disk in disks {
        let mut place = lock(&disk.place);
        place.closed = true;
        open.extend(place.current.clone().filter(|s| !s.is_over()));
    }
    open.iter().for_each(|s| s.ask_to_stop());
    let until = Instant::now() + limit;
    for scribe in open {
        if !scribe.wait(until, |told| told.over) {
            let path = scribe.status().path;
            tracing::warn!(file = %path.display(), "a recording's file does not answer; its end may be missing");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_engine::api::{ReqOp, Request};
    use hearth_trace::{Op, Reader};
    use std::path::{Path, PathBuf};
    use std::sync::mpsc::channel;

    use crate::recording::BYTES_MIN;

    fn read(path: &Path) -> Vec<(u64, Op, u64, u32)> {
        Reader::open(path, hearth_trace::Options::default())
            .expect("opens")
            .map(|r| r.expect("is whole"))
            .map(|r| (r.time_us, r.op, r.offset, r.length))
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
        let disk = Arc::new(Disk::new(1, 512));
        assert!(matches!(end(&disk, LIMIT), Err(RecordError::Idle)));
        begin(&disk, options(path.clone()), 1_000_000).expect("begins");
        assert!(matches!(
            begin(&disk, options(dir.path().join("u")), 1_000_000),
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
        end(&disk, LIMIT).expect("ends");
        disk.arrived(&[request(ReqOp::Read, 0, 512, 6_000_000)]);
        assert_eq!(
            read(&path),
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
        // A second recording needs another file, and its failure does not hide the first.
        assert!(begin(&disk, options(path), 7_000_000).is_err());
        assert_eq!(disk.recording(), Some(status));
        // Nothing begins on a disk that is gone, even if it was found before it went.
        close(&[disk.clone()], LIMIT);
        assert!(matches!(
            begin(&disk, options(dir.path().join("v")), 1),
            Err(RecordError::NoDisk)
        ));
    }

    #[test]
    fn nobody_waits_for_a_file_system_that_hangs() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("t");
        let disk = Arc::new(Disk::new(1, 512));
        let (answer, hangs) = channel::<()>();
        let (wanted, soon) = (options(path.clone()), Duration::from_millis(1));
        let make = move || {
            // Until the test lets it go.
            let _ = hangs.recv();
            Recorder::create(wanted, 0)
        };
        let begun = begin_with(&disk, path.clone(), 0, soon, make);
        assert!(matches!(begun, Err(RecordError::Slow { .. })), "{begun:?}");
        // The daemon asks for this with its locks held.
        assert!(disk.recording().expect("known").active);
        disk.arrived(&[request(ReqOp::Read, 0, 4096, 5)]);
        disk.digest(6);
        assert!(matches!(end(&disk, soon), Err(RecordError::Slow { .. })));
        close(&[disk.clone()], soon);
        // It answers at last, and ends at once.
        drop(answer);
        let scribe = lock(&disk.place).current.clone().expect("is there");
        assert!(scribe.wait(Instant::now() + LIMIT, |told| told.over));
        let status = disk.recording().expect("known");
        assert_eq!((status.active, status.error), (false, None));
        assert_eq!(read(&path), []);
    }
}
