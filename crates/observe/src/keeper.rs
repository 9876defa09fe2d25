//! The thread beside the data threads: curves of samples, files of records.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::disk::{Disk, lock};
use crate::observer::Shared;
use crate::recording::{RecordError, RecordOptions, Recorder, RecordingStatus, Tape};

/// Longest sleep with nothing to record: samples may wait that long, not longer, or a quiet
/// disk's curve would be old when asked for at the next start of something that asks.
const ROUND_IDLE: Duration = Duration::from_secs(5);
/// Longest sleep while anything is recorded: what a kill may cost.
const ROUND_RECORDING: Duration = Duration::from_millis(100);

/// Goes round until the observer stops.
pub(crate) fn run(shared: &Shared) {
    while !shared.stopping.load(Ordering::Acquire) {
        let now_ns = hearth_io::now_ns();
        let mut recording = false;
        for disk in shared.all() {
            disk.digest(now_ns);
            recording |= write_out(&disk, now_ns);
        }
        std::thread::park_timeout(if recording {
            ROUND_RECORDING
        } else {
            ROUND_IDLE
        });
    }
}

/// Writes what was recorded; true if the recording goes on.
fn write_out(disk: &Disk, now_ns: u64) -> bool {
    let mut recorder = lock(&disk.recorder);
    let Some(recorder) = recorder.as_mut().filter(|r| r.is_active()) else {
        return false;
    };
    let over = recorder.is_over(now_ns);
    let tape = if over {
        disk.swap_tape(now_ns, None)
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
        // It may have ended with an error.
        disk.swap_tape(now_ns, None);
        tracing::info!(disk = disk.id, "recording ended");
        return false;
    }
    true
}

/// Begins a recording.
pub(crate) fn begin_recording(
    disk: &Disk,
    options: RecordOptions,
    now_ns: u64,
) -> Result<RecordingStatus, RecordError> {
    let mut recorder = lock(&disk.recorder);
    if recorder.as_ref().is_some_and(Recorder::is_active) {
        return Err(RecordError::Busy);
    }
    let new = recorder.insert(Recorder::create(options, now_ns)?);
    let status = new.status(0);
    disk.swap_tape(now_ns, Some(Tape::new(now_ns)));
    tracing::info!(disk = disk.id, file = %status.path.display(), "recording");
    Ok(status)
}

/// Ends a recording, if one is under way.
pub(crate) fn end_recording(disk: &Disk, now_ns: u64) {
    if let Some(recorder) = lock(&disk.recorder).as_mut() {
        recorder.end_at(now_ns);
    }
    write_out(disk, now_ns);
}
