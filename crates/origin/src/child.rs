//! The process that opens an image for us, from its start to its end.
//!
//! QEMU knows image formats and remote disks better than anybody; its `qemu-storage-daemon`
//! opens one and offers it over NBD on a private socket, of which we are the only client. One
//! thread per image is the parent: it starts the process when somebody wants to connect, hands
//! its complaints to our log, and notices its end. The kernel ends the process when that thread
//! ends, so it does not outlive a daemon that was killed; should it linger, the next daemon finds
//! it by its pid file ([`sweep`]) before it opens anything.

use crate::process::{self, Identity};
use hearth_fault::Fault;
use hearth_nbd_client::{ConnectError, Dial};
use serde_json::{Value, json};
use std::fs::DirBuilder;
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The program.
const PROGRAM: &str = "qemu-storage-daemon";
/// Name of its export.
pub(crate) const EXPORT: &str = "disk";
/// How long it may take to end in order, which includes writing out what it holds.
const END_TIME: Duration = Duration::from_secs(20);
/// How long a killed process may take to disappear.
const KILL_TIME: Duration = Duration::from_secs(5);
/// How often a socket that is about to be listened on is tried.
const TRY_EVERY: Duration = Duration::from_millis(5);
/// Longest line of its complaints that is kept whole: it may repeat our arguments, and a path.
const LINE_MAX: u64 = 16 << 10;

struct State {
    child: Option<Child>,
    wanted: bool,
    /// The guard is being asked, which may hang with the image's storage.
    judging: bool,
    stopped: bool,
    /// Starts tried, so that one can wait for the result of the next.
    starts: u64,
    /// What it said last (an error and its hint come in two lines), or why there is none.
    last: Option<Fault>,
}

/// Says whether what a process is told to open is still what was judged.
pub(crate) trait Guard: Send + Sync {
    /// Asked before each start.
    fn before(&self) -> Result<(), Fault>;
    /// Asked when the process has opened the image, before anything is read or written through it.
    fn after(&self, pid: u32) -> Result<(), Fault>;
}

struct Shared {
    name: String,
    guard: Option<Box<dyn Guard>>,
    socket: PathBuf,
    pid_file: PathBuf,
    arguments: Vec<String>,
    state: Mutex<State>,
    changed: Condvar,
}

/// The parent of one image's process. Dropping it ends the process.
pub(crate) struct Supervisor {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a complaint of the process says, without its name and our own arguments before it.
fn said(line: &str) -> &str {
    let line = line
        .strip_prefix(PROGRAM)
        .and_then(|rest| rest.strip_prefix(": "))
        .unwrap_or(line);
    // The arguments are JSON objects.
    match line.strip_prefix("--") {
        Some(option) => option.rsplit_once("}: ").map_or(line, |(_, said)| said),
        None => line,
    }
}

/// Ends processes an earlier daemon left in a directory of sockets and pid files, and clears these
/// away. Only for a directory that is the caller's alone: what has such a name in it is removed.
pub fn sweep(dir: &Path) {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return;
    };
    for path in entries.flatten().map(|e| e.path()) {
        match path.extension().and_then(|e| e.to_str()) {
            Some("pid") => {
                if let Some(orphan) = Identity::read(&path) {
                    tracing::warn!(
                        pid = orphan.pid,
                        "ending a {PROGRAM} that a killed daemon left"
                    );
                    orphan.end(END_TIME, KILL_TIME);
                }
            }
            Some("sock") => {}
            _ => continue,
        }
        let _ = std::fs::remove_file(&path);
    }
}

impl Supervisor {
    /// Starts the parent thread, not yet the process.
    pub(crate) fn new(
        dir: &Path,
        name: String,
        blockdev: &Value,
        writable: bool,
        guard: Option<Box<dyn Guard>>,
    ) -> io::Result<Supervisor> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let socket = dir.join(format!("{number}.sock"));
        let server = json!({ "addr": { "type": "unix", "path": socket.to_string_lossy() } });
        let export = json!({
            "type": "nbd",
            "id": EXPORT,
            "node-name": "disk",
            "name": EXPORT,
            "writable": writable,
        });
        let arguments = vec![
            "--blockdev".to_owned(),
            blockdev.to_string(),
            "--nbd-server".to_owned(),
            server.to_string(),
            "--export".to_owned(),
            export.to_string(),
        ];
        let shared = Arc::new(Shared {
            name,
            guard,
            pid_file: dir.join(format!("{number}.pid")),
            socket,
            arguments,
            state: Mutex::new(State {
                child: None,
                wanted: false,
                judging: false,
                stopped: false,
                starts: 0,
                last: None,
            }),
            changed: Condvar::new(),
        });
        let parent = shared.clone();
        let thread = std::thread::Builder::new()
            .name("hearth-image".to_owned())
            .spawn(move || parent.run())?;
        Ok(Supervisor {
            shared,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Ends the process, in order if it can, so that another is started when it is needed: it opens
    /// the image anew.
    pub(crate) fn restart(&self) {
        let before = lock(&self.shared.state).child.as_ref().map(Child::id);
        let Some(before) = before else {
            return;
        };
        for (signal, time) in [(libc::SIGTERM, END_TIME), (libc::SIGKILL, KILL_TIME)] {
            let mut state = lock(&self.shared.state);
            let is_it = |s: &mut State| s.child.as_ref().is_some_and(|c| c.id() == before);
            if !is_it(&mut state) {
                return;
            }
            process::signal(before, signal);
            let (state, _) = self
                .shared
                .changed
                .wait_timeout_while(state, time, is_it)
                .unwrap_or_else(PoisonError::into_inner);
            drop(state);
        }
    }

    /// Ends the process, in order if it can, and waits for its end. Nothing starts it again.
    pub(crate) fn stop(&self) {
        {
            let mut state = lock(&self.shared.state);
            state.stopped = true;
            self.shared.changed.notify_all();
            for (signal, time) in [(libc::SIGTERM, END_TIME), (libc::SIGKILL, KILL_TIME)] {
                if let Some(child) = &state.child {
                    process::signal(child.id(), signal);
                }
                state = self
                    .shared
                    .changed
                    .wait_timeout_while(state, time, |s| s.child.is_some())
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
                if state.child.is_none() {
                    break;
                }
                tracing::warn!(image = %self.shared.name, "{PROGRAM} does not end");
            }
            if state.child.is_some() || state.judging {
                // It hangs in the kernel, or its parent may, which starts nothing any more.
                lock(&self.thread).take();
            }
        }
        if let Some(thread) = lock(&self.thread).take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    /// The parent's life.
    fn run(&self) {
        loop {
            let mut state = self
                .changed
                .wait_while(lock(&self.state), |s| !s.wanted && !s.stopped)
                .unwrap_or_else(PoisonError::into_inner);
            if state.stopped {
                return;
            }
            // Why there is none while the guard has not answered.
            state.last = Some(Fault::new(
                "the image's files cannot be looked at",
                "see whether their storage hangs",
            ));
            state.judging = true;
            drop(state);
            let judged = self.guard.as_ref().map_or(Ok(()), |guard| guard.before());
            let mut state = lock(&self.state);
            state.judging = false;
            state.wanted = false;
            state.starts += 1;
            state.last = None;
            if state.stopped {
                self.changed.notify_all();
                return;
            }
            match judged.and_then(|()| self.spawn()) {
                Ok(mut child) => {
                    let (pid, stderr) = (child.id(), child.stderr.take());
                    if let Err(e) = Identity::of(pid).and_then(|i| i.write(&self.pid_file)) {
                        tracing::warn!(image = %self.name, "cannot note the process of an image: {e}");
                    }
                    tracing::info!(image = %self.name, pid, "{PROGRAM} started");
                    state.child = Some(child);
                    self.changed.notify_all();
                    drop(state);
                    self.watch(pid, stderr);
                }
                Err(why) => {
                    state.last = Some(why);
                    self.changed.notify_all();
                }
            }
        }
    }

    fn spawn(&self) -> Result<Child, Fault> {
        let _ = std::fs::remove_file(&self.socket);
        let mut command = Command::new(PROGRAM);
        command
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            // Ctrl-C is for us: we still need it while we stop.
            .process_group(0);
        let parent = std::process::id();
        // SAFETY: between fork and exec only two system calls are made, which touch no memory.
        unsafe {
            command.pre_exec(move || process::die_with_parent(parent));
        }
        process::hand_on_nothing(&mut command);
        command.spawn().map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => Fault::new(
                format!("{PROGRAM} is not installed, which opens images for Hearth"),
                "install the package qemu-system-common (Debian, Ubuntu) or qemu-storage-daemon of your distribution",
            ),
            _ => Fault::new(
                format!("cannot run {PROGRAM}: {e}"),
                "see that the daemon's user may run it",
            ),
        })
    }

    /// Hands on what the process says until it ends.
    fn watch(&self, pid: u32, stderr: Option<impl Read>) {
        if let Some(stderr) = stderr {
            let mut lines = BufReader::new(stderr);
            let mut line = Vec::new();
            let mut before: Option<String> = None;
            // A line too long comes in pieces.
            while matches!(
                lines.by_ref().take(LINE_MAX).read_until(b'\n', &mut line),
                Ok(1..)
            ) {
                let text = String::from_utf8_lossy(&line).trim().to_owned();
                line.clear();
                if !text.is_empty() {
                    tracing::warn!(image = %self.name, "{text}");
                    let text = said(&text).to_owned();
                    let both = match before.replace(text.clone()) {
                        Some(before) => format!("{before}; {text}"),
                        None => text,
                    };
                    lock(&self.state).last = Some(Fault::bare(both));
                }
            }
        }
        // Not reaped yet: its pid stays its own until nobody signals it any more.
        process::wait_ended(pid);
        let mut state = lock(&self.state);
        if let Some(mut child) = state.child.take()
            && let Ok(status) = child.wait()
            && !state.stopped
        {
            tracing::warn!(image = %self.name, "{PROGRAM} ended: {status}");
            let said = state
                .last
                .take()
                .map_or(String::new(), |l| format!(": {l}"));
            state.last = Some(Fault::new(
                format!("{PROGRAM} ended ({status}){said}"),
                "see with `qemu-img info` whether it is there, whole and of this format",
            ));
        }
        let _ = std::fs::remove_file(&self.pid_file);
        let _ = std::fs::remove_file(&self.socket);
        self.changed.notify_all();
    }

    fn ended(&self, state: &State) -> ConnectError {
        let why = state.last.clone();
        let why = why.unwrap_or_else(|| Fault::bare("it ended"));
        ConnectError::Other(why.within(&self.name))
    }
}

impl Dial for Supervisor {
    /// Connects to the process, started if need be.
    fn dial(&self, deadline: Instant) -> Result<OwnedFd, ConnectError> {
        let shared = &*self.shared;
        let mut state = lock(&shared.state);
        if state.child.is_none() && !state.stopped {
            let before = state.starts;
            state.wanted = true;
            shared.changed.notify_all();
            let left = deadline.saturating_duration_since(Instant::now());
            state = shared
                .changed
                .wait_timeout_while(state, left, |s| s.starts == before && !s.stopped)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        loop {
            if state.stopped {
                return Err(ConnectError::Other(Fault::bare(format!(
                    "{} was closed",
                    shared.name
                ))));
            }
            let Some(pid) = state.child.as_ref().map(Child::id) else {
                return Err(shared.ended(&state));
            };
            // Not under the lock: a process that hangs could keep us here.
            drop(state);
            if let Ok(stream) = UnixStream::connect(&shared.socket) {
                return match shared.guard.as_ref().map_or(Ok(()), |g| g.after(pid)) {
                    Ok(()) => Ok(stream.into()),
                    Err(why) => {
                        self.renew();
                        Err(ConnectError::Other(why))
                    }
                };
            }
            state = lock(&shared.state);
            if Instant::now() >= deadline {
                return Err(ConnectError::Other(Fault::new(
                    format!("{}: {PROGRAM} did not open it in time", shared.name),
                    "see whether its storage hangs",
                )));
            }
            // Its end is told of; that it listens is not.
            state = shared
                .changed
                .wait_timeout(state, TRY_EVERY)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn name(&self) -> String {
        self.shared.name.clone()
    }

    /// Kills the process: what it had not made durable, we send again.
    fn renew(&self) {
        let state = lock(&self.shared.state);
        if let Some(child) = state.child.as_ref().filter(|_| !state.stopped) {
            process::signal(child.id(), libc::SIGKILL);
        }
    }

    fn why(&self) -> Option<Fault> {
        let state = lock(&self.shared.state);
        match state.child {
            Some(_) => None,
            None => state.last.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};

    /// A guard that waits for a word, as one whose files are on a mount that hangs.
    struct Hanging(Mutex<(Sender<()>, Receiver<()>)>);

    impl Guard for Hanging {
        fn before(&self) -> Result<(), Fault> {
            let both = lock(&self.0);
            let _ = both.0.send(());
            let _ = both.1.recv();
            Ok(())
        }

        fn after(&self, _pid: u32) -> Result<(), Fault> {
            Ok(())
        }
    }

    #[test]
    fn files_that_hang_keep_nobody_from_stopping() {
        let dir = tempfile::tempdir().unwrap();
        let (asked, was_asked) = channel();
        let (go, gone) = channel();
        let guard = Box::new(Hanging(Mutex::new((asked, gone))));
        let none = Value::Null;
        let new = Supervisor::new(dir.path(), "x".to_owned(), &none, true, Some(guard));
        let child = Arc::new(new.unwrap());
        let refused = child.dial(Instant::now() + TRY_EVERY).unwrap_err();
        was_asked.recv().unwrap();
        assert!(
            refused.fault().what.contains("cannot be looked at"),
            "{refused}"
        );
        assert!(child.why().unwrap().remedy.contains("hangs"));
        let (done, ended) = channel();
        let stopping = child.clone();
        std::thread::spawn(move || {
            stopping.stop();
            let _ = done.send(());
        });
        ended.recv_timeout(END_TIME).unwrap();
        // It comes back at last, and starts nothing.
        let shared = child.shared.clone();
        go.send(()).unwrap();
        let state = lock(&shared.state);
        let (state, late) = shared
            .changed
            .wait_timeout_while(state, END_TIME, |s| s.judging)
            .unwrap();
        assert!(!late.timed_out() && state.child.is_none());
    }

    #[test]
    fn complaints_are_freed_of_our_arguments() {
        for (line, what) in [
            (
                r#"qemu-storage-daemon: --blockdev {"driver":"qcow2","file":{"filename":"/x"},"node-name":"disk"}: Image is not in qcow2 format"#,
                "Image is not in qcow2 format",
            ),
            ("qemu-storage-daemon: warning: a: b", "warning: a: b"),
            (
                "Is another process using the image [/x}: y]?",
                "Is another process using the image [/x}: y]?",
            ),
        ] {
            assert_eq!(said(line), what);
        }
    }
}
