//! The end of a process in which something is wrong that the code says cannot be.
//!
//! A thread that panics leaves locks in an unknown state and requests that nobody answers: every disk
//! would wait for it for ever, while the control API says that all is well. So a panic, in whatever
//! thread, ends the process at once, as `kill -9` would: nothing acknowledged is lost by that, a
//! service manager starts the daemon again, and hypervisors see a pause. Before, it says on standard
//! error what happened, with a backtrace, and leaves a line in a file for the next start
//! ([`crate::brake`]). A thread whose I/O driver fails ends the process, too, but leaves no line: that
//! is the host's doing.

use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt;
use std::panic::PanicHookInfo;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Exit status after the I/O driver of a thread failed (`EX_OSERR`).
const DRIVER_FAILED: i32 = 71;
/// Longest wait for the reader of standard error.
const SAY_TIME: Duration = Duration::from_secs(1);
/// Most characters of a message kept for the next start.
const MESSAGE_MAX: usize = 300;

/// Where the line goes.
static RECORD: OnceLock<PathBuf> = OnceLock::new();

/// From now on a panic in any thread aborts the process.
pub fn on_panic() {
    std::panic::set_hook(Box::new(|info| end(info)));
}

/// From now on it leaves a line in `file` as well.
pub fn record_to(file: PathBuf) {
    // The first one stays: there is one pool in a process.
    let _ = RECORD.set(file);
}

fn end(info: &PanicHookInfo<'_>) -> ! {
    static ENDING: AtomicBool = AtomicBool::new(false);
    if ENDING.swap(true, Ordering::SeqCst) {
        // Another thread's panic is being told of, or this one's telling panicked: one is enough, and is
        // given the time for that.
        std::thread::sleep(std::time::Duration::from_secs(1));
        std::process::abort();
    }
    let thread = std::thread::current();
    let thread = thread.name().unwrap_or("unnamed");
    let text = payload(info);
    let place = info
        .location()
        .map_or_else(String::new, |l| format!(" at {l}"));
    // First: what follows takes longer and may itself fail.
    if let Some(file) = RECORD.get() {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let line = line(now.map_or(0, |d| d.as_secs()), thread, text, &place);
        let kept = OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o640)
            .custom_flags(libc::O_NOFOLLOW)
            .open(file)
            .and_then(|mut file| file.write_all(line.as_bytes()));
        if let Err(e) = kept {
            say(&format!("cannot note this in {}: {e}\n", file.display()));
        }
    }
    let mut words = String::new();
    // Not through the logger: its locks may be what this thread holds.
    let _ = writeln!(
        words,
        "hearth: PANIC in thread {thread}{place}: {text}\n\
         hearth: this is a fault in Hearth; it ends at once, and what was flushed is safe. Please \
         report it with what follows.\n{}",
        std::backtrace::Backtrace::force_capture()
    );
    say(&words);
    std::process::abort();
}

fn payload<'a>(info: &'a PanicHookInfo<'_>) -> &'a str {
    let payload = info.payload();
    match payload.downcast_ref::<&'static str>() {
        Some(text) => text,
        None => payload
            .downcast_ref::<String>()
            .map_or("no message", String::as_str),
    }
}

/// One line: when, by which version, where, what.
fn line(now: u64, thread: &str, text: &str, place: &str) -> String {
    let message = format!("{thread}{place}: {text}").replace(['\n', '\r'], " ");
    let message: String = message.chars().take(MESSAGE_MAX).collect();
    format!("{now} {} {message}\n", env!("CARGO_PKG_VERSION"))
}

/// Writes to standard error, behind what was logged before. A reader that stands still must not keep the process from
/// ending.
fn say(words: &str) {
    let words = words.to_owned();
    let (done, ended) = sync_channel(1);
    let write = move || {
        crate::log::flush(SAY_TIME / 2);
        // Not by the standard library's handle, whose lock the thread of the log may hold.
        // SAFETY: a buffer of this length that outlives the call; a descriptor that this process never closes.
        unsafe { libc::write(libc::STDERR_FILENO, words.as_ptr().cast(), words.len()) };
        let _ = done.send(());
    };
    if std::thread::Builder::new().spawn(write).is_ok() {
        let _ = ended.recv_timeout(SAY_TIME);
    }
}

/// A thread cannot go on without its I/O driver, and all disks wait for what it had in flight.
pub fn driver_failed(thread: &str, why: &std::io::Error) {
    tracing::error!(
        thread,
        "the system refuses I/O to a data thread ({why}); Hearth ends at once, what was flushed is \
         safe. If it happens again after a restart, set HEARTH_IO=threads, which does without io_uring"
    );
    crate::log::flush(SAY_TIME);
    std::process::exit(DRIVER_FAILED);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_one_line_of_bounded_length() {
        let line = line(7, "hearth-data0", &"ä\n".repeat(1000), " at x.rs:1");
        assert_eq!(line.matches('\n').count(), 1);
        assert!(line.chars().count() < MESSAGE_MAX + 64);
        let version = env!("CARGO_PKG_VERSION");
        assert!(line.starts_with(&format!("7 {version} hearth-data0 at x.rs:1: ä")));
    }
}
