//! A directory with a pool, a daemon, and the command line against it.

#![allow(dead_code)]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;

/// Longest wait for anything.
const LIMIT: Duration = Duration::from_secs(60);

/// Asks `condition` until it has an answer; fails the test after a minute.
pub fn until<T>(what: &str, condition: impl FnMut() -> Option<T>) -> T {
    hearth_rig::wait::until(what, LIMIT, condition).unwrap_or_else(|e| panic!("{e}"))
}

pub struct Bench {
    pub dir: tempfile::TempDir,
    daemon: Option<Child>,
}

impl Bench {
    /// An empty directory. Beside the binary: O_DIRECT needs a real file system.
    pub fn new() -> Bench {
        let parent = Path::new(env!("CARGO_TARGET_TMPDIR"));
        Bench {
            dir: tempfile::Builder::new()
                .prefix("c")
                .tempdir_in(parent)
                .unwrap(),
            daemon: None,
        }
    }

    /// A pool of 64 MiB.
    pub fn with_pool() -> Bench {
        let bench = Bench::new();
        bench.ok(&[
            "pool",
            "create",
            "--flash",
            &bench.path("flash"),
            "--size",
            "64M",
        ]);
        bench
    }

    pub fn serving() -> Bench {
        let mut bench = Bench::with_pool();
        bench.start();
        bench
    }

    pub fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }

    pub fn run_dir(&self) -> PathBuf {
        self.dir.path().join("r")
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hearth"));
        command
            .env_remove("HEARTH_RUN_DIR")
            .arg("--run-dir")
            .arg(self.run_dir())
            .args(args)
            .stdin(Stdio::null());
        // What a daemon keeps beside its pool is the test's own.
        if args.first() == Some(&"serve") && !args.contains(&"--state-dir") {
            command
                .arg("--state-dir")
                .arg(self.dir.path().join("state"));
        }
        command
    }

    pub fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    pub fn ok(&self, args: &[&str]) -> String {
        let out = self.run(args);
        let (stdout, stderr) = (text(&out.stdout), text(&out.stderr));
        assert!(
            out.status.success(),
            "hearth {args:?} failed: {stderr}\n{}",
            self.log()
        );
        stdout
    }

    pub fn json(&self, args: &[&str]) -> Value {
        let mut args = args.to_vec();
        args.push("--json");
        serde_json::from_str(&self.ok(&args)).unwrap()
    }

    /// Runs a command that must fail with one plain sentence; the sentence.
    pub fn refused(&self, args: &[&str]) -> String {
        one_sentence(&self.run(args), 1)
    }

    pub fn spawn_daemon(&self, more: &[&str]) -> Child {
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.dir.path().join("log"))
            .unwrap();
        let flash = self.path("flash");
        let mut args = vec!["serve", "--flash", &flash];
        args.extend(more);
        self.command(&args)
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap()
    }

    pub fn start(&mut self) {
        self.start_with(&[]);
    }

    /// Starts a daemon with more arguments than it needs.
    pub fn start_with(&mut self, args: &[&str]) {
        let mut child = self.spawn_daemon(args);
        let socket = self.run_dir().join("nbd.sock");
        until("the daemon serves", || {
            if let Some(status) = child.try_wait().unwrap() {
                panic!("the daemon ended with {status}:\n{}", self.log());
            }
            greets(&socket).then_some(())
        });
        self.daemon = Some(child);
    }

    /// Starts a daemon that must refuse; what it said.
    pub fn start_refused(&self) -> String {
        let flash = self.path("flash");
        one_sentence(&self.run(&["serve", "--flash", &flash, "--log", "off"]), 1)
    }

    pub fn signal(&self, signal: i32) {
        let pid = self.daemon.as_ref().expect("a daemon runs").id() as i32;
        // SAFETY: a signal to a child that has not been waited for.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    }

    /// From now on the daemon's writes beyond `end` of any file fail (setrlimit(2), RLIMIT_FSIZE).
    /// Only for a daemon started after [`outlive_refused_writes`].
    pub fn refuse_writes(&self, end: u64) {
        let pid = self.daemon.as_ref().expect("a daemon runs").id() as i32;
        let limit = libc::rlimit {
            rlim_cur: end,
            rlim_max: libc::RLIM_INFINITY,
        };
        // SAFETY: a pointer to a limit that lives across the call, and none to be filled in.
        let rc = unsafe { libc::prlimit(pid, libc::RLIMIT_FSIZE, &limit, std::ptr::null_mut()) };
        assert_eq!(rc, 0);
    }

    pub fn wait_end(&mut self) -> std::process::ExitStatus {
        let mut child = self.daemon.take().expect("a daemon runs");
        until("the daemon ends", || child.try_wait().unwrap())
    }

    pub fn stop(&mut self) {
        self.signal(libc::SIGTERM);
        let status = self.wait_end();
        assert!(status.success(), "{status}\n{}", self.log());
    }

    pub fn kill(&mut self) {
        self.signal(libc::SIGKILL);
        self.wait_end();
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// An origin with known content: byte `i` is a function of `i` and `seed`.
    pub fn origin(&self, name: &str, size: usize, seed: u64) -> String {
        let path = self.path(name);
        std::fs::write(&path, content(size, seed)).unwrap();
        path
    }

    pub fn connect(&self, export: &str) -> Option<Nbd> {
        Nbd::connect(&self.run_dir().join("nbd.sock"), export)
    }

    pub fn disk(&self, name: &str) -> Value {
        self.json(&["disk", "show", name])
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        if let Some(mut child) = self.daemon.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Programs started from now on are not ended by a write beyond their limit.
pub fn outlive_refused_writes() {
    // SAFETY: no handler is installed; ignored signals stay so in programs that are started.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// True if a server answers. A connection alone proves nothing: for a moment the kernel goes on
/// accepting them for a daemon that was killed.
fn greets(socket: &Path) -> bool {
    let mut greeting = [0u8; 18];
    UnixStream::connect(socket).is_ok_and(|mut stream| stream.read_exact(&mut greeting).is_ok())
}

pub fn content(size: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    std::iter::repeat_with(next).take(size).collect()
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Exactly one line on standard error, nothing like a panic, and the exit status.
pub fn one_sentence(out: &Output, status: i32) -> String {
    let words = text(&out.stderr);
    assert_eq!(out.status.code(), Some(status), "{words}");
    assert_eq!(
        words.trim_end().lines().count(),
        1,
        "not one sentence: {words}"
    );
    assert!(
        words.starts_with("hearth: ") && !words.contains("panicked"),
        "{words}"
    );
    words
}

/// The least an NBD client must do: fixed newstyle, `EXPORT_NAME`, simple replies.
pub struct Nbd {
    stream: UnixStream,
    pub size: u64,
}

impl Nbd {
    pub fn connect(socket: &Path, export: &str) -> Option<Nbd> {
        let mut stream = UnixStream::connect(socket).ok()?;
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let mut greeting = [0u8; 18];
        stream.read_exact(&mut greeting).ok()?;
        assert_eq!(&greeting[..8], b"NBDMAGIC");
        // Fixed newstyle, no zeroes; then NBD_OPT_EXPORT_NAME (1).
        let mut hello = 3u32.to_be_bytes().to_vec();
        hello.extend(b"IHAVEOPT");
        hello.extend(1u32.to_be_bytes());
        hello.extend((export.len() as u32).to_be_bytes());
        hello.extend(export.as_bytes());
        stream.write_all(&hello).ok()?;
        let mut answer = [0u8; 10];
        stream.read_exact(&mut answer).ok()?;
        let size = u64::from_be_bytes(answer[..8].try_into().unwrap());
        Some(Nbd { stream, size })
    }

    fn call(&mut self, kind: u16, offset: u64, len: u32, payload: &[u8]) -> std::io::Result<u32> {
        let mut request = 0x2560_9513u32.to_be_bytes().to_vec();
        request.extend(0u16.to_be_bytes());
        request.extend(kind.to_be_bytes());
        request.extend(7u64.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend(len.to_be_bytes());
        request.extend(payload);
        self.stream.write_all(&request)?;
        let mut reply = [0u8; 16];
        self.stream.read_exact(&mut reply)?;
        assert_eq!(reply[..4], 0x6744_6698u32.to_be_bytes());
        Ok(u32::from_be_bytes(reply[4..8].try_into().unwrap()))
    }

    pub fn read(&mut self, offset: u64, len: usize) -> Vec<u8> {
        assert_eq!(
            self.call(0, offset, len as u32, &[]).unwrap(),
            0,
            "read failed"
        );
        let mut data = vec![0; len];
        self.stream.read_exact(&mut data).unwrap();
        data
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) {
        assert_eq!(
            self.call(1, offset, data.len() as u32, data).unwrap(),
            0,
            "write failed"
        );
    }

    pub fn zero(&mut self, offset: u64, len: u32) {
        assert_eq!(self.call(6, offset, len, &[]).unwrap(), 0, "zero failed");
    }

    pub fn flush(&mut self) {
        assert_eq!(self.call(3, 0, 0, &[]).unwrap(), 0, "flush failed");
    }
}
