//! The log: lines on standard error, written by a thread of their own.
//!
//! A reader that stands still (a frozen journald, Ctrl-S in a terminal, a pager) must hold up nothing but the log. Threads put
//! lines into a queue with a bound. When it is full, lines are dropped and counted; a line with the count follows when
//! the reader continues.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Bytes of lines that wait for the reader.
const WAITING_MAX: usize = 1 << 20;

/// Longest wait for the reader at the end of the process.
const END_TIME: Duration = Duration::from_secs(1);

/// Lines dropped since the start of the process.
static DROPPED: AtomicU64 = AtomicU64::new(0);

static LOG: Log = Log::new();
/// The thread that writes runs.
static STARTED: AtomicBool = AtomicBool::new(false);

/// Lines that were dropped since the start of the process because nothing read the log.
pub fn dropped() -> u64 {
    DROPPED.load(Ordering::Relaxed)
}

/// Starts the thread that writes to standard error.
///
/// # Errors
/// There is no thread for it.
pub fn start() -> io::Result<()> {
    std::thread::Builder::new()
        .name("hearth-log".to_owned())
        .spawn(|| LOG.write_to(&mut io::stderr()))?;
    STARTED.store(true, Ordering::Release);
    Ok(())
}

/// Writes the last line of a process to standard error, behind what was logged before.
pub fn end_with(line: &str) {
    if STARTED.load(Ordering::Acquire) {
        LOG.put(format!("{line}\n").as_bytes());
        flush(END_TIME);
    } else {
        // There is nowhere to report that standard error is gone.
        let _ = writeln!(io::stderr(), "{line}");
    }
}

/// Waits until the lines that wait are written, for at most `limit`: before the process ends or becomes another program.
pub fn flush(limit: Duration) {
    if !STARTED.load(Ordering::Acquire) {
        return;
    }
    LOG.flush(limit);
}

/// Takes one line; never waits for the reader.
#[derive(Clone, Copy, Debug, Default)]
pub struct Line;

impl Write for Line {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        LOG.put(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Log {
    queue: Mutex<Queue>,
    more: Condvar,
    written: Condvar,
}

struct Queue {
    lines: VecDeque<Box<[u8]>>,
    bytes: usize,
    /// Dropped since the last line with their count.
    dropped: u64,
    /// A line is on its way to standard error.
    is_writing: bool,
}

impl Log {
    const fn new() -> Log {
        Log {
            queue: Mutex::new(Queue {
                lines: VecDeque::new(),
                bytes: 0,
                dropped: 0,
                is_writing: false,
            }),
            more: Condvar::new(),
            written: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, line: &[u8]) {
        let mut queue = self.lock();
        if queue.bytes + line.len() > WAITING_MAX {
            queue.dropped += 1;
            DROPPED.fetch_add(1, Ordering::Relaxed);
            return;
        }
        queue.bytes += line.len();
        queue.lines.push_back(line.into());
        drop(queue);
        self.more.notify_one();
    }

    fn write_to(&self, out: &mut dyn Write) {
        loop {
            self.write_one(out);
        }
    }

    /// Waits for a line and writes it.
    fn write_one(&self, out: &mut dyn Write) {
        let mut queue = self.lock();
        let line = loop {
            if let Some(line) = queue.lines.pop_front() {
                break line;
            }
            queue = self
                .more
                .wait(queue)
                .unwrap_or_else(PoisonError::into_inner);
        };
        queue.bytes -= line.len();
        queue.is_writing = true;
        // Those were dropped while the lines in the queue waited: the count comes behind these.
        let dropped = match queue.lines.is_empty() {
            true => std::mem::take(&mut queue.dropped),
            false => 0,
        };
        drop(queue);
        // A log without a reader is no reason to stop, and there is nowhere to report it.
        let _ = out.write_all(&line);
        if dropped > 0 {
            let _ = writeln!(
                out,
                "hearth: {dropped} lines of the log were dropped, because nothing read it"
            );
        }
        self.lock().is_writing = false;
        self.written.notify_all();
    }

    fn flush(&self, limit: Duration) {
        let waits = |queue: &mut Queue| !queue.lines.is_empty() || queue.is_writing;
        drop(self.written.wait_timeout_while(self.lock(), limit, waits));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

    /// A reader that takes a line when the test says so.
    struct Reader {
        wants: Receiver<()>,
        got: SyncSender<Vec<u8>>,
    }

    impl Write for Reader {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let _ = self.wants.recv();
            let _ = self.got.send(bytes.to_vec());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn stopped_reader_drops_and_counts_lines() {
        static LOG: Log = Log::new();
        let (want, wants) = sync_channel(1 << 16);
        let (got, lines) = sync_channel(1 << 16);
        std::thread::spawn(move || LOG.write_to(&mut Reader { wants, got }));
        let line = [b'x'; 1024];
        // Nothing is read, and none of these waits.
        let many = 3 * WAITING_MAX / line.len();
        for _ in 0..many {
            LOG.put(&line);
        }
        LOG.flush(Duration::from_millis(1));
        let lost = LOG.lock().dropped;
        assert!(lost as usize >= many / 2, "{lost}");
        for _ in 0..many {
            want.send(()).unwrap();
        }
        LOG.flush(Duration::from_secs(60));
        let all: Vec<Vec<u8>> = lines.try_iter().collect();
        let whole = all.iter().filter(|l| l[..] == line).count();
        assert_eq!(whole as u64 + lost, many as u64);
        let told = all.concat();
        let told = String::from_utf8_lossy(&told);
        assert!(told.contains(&format!("{lost} lines of the log were dropped")));
        assert_eq!(LOG.lock().bytes, 0);
    }
}
