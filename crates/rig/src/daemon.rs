//! A pool and a daemon of their own for every test, driven through the real command line.

use crate::api::Api;
use crate::nbd::Client;
use crate::wait;
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

/// Longest a daemon may take to serve or to end before a test calls it wedged.
const LIFE_LIMIT: Duration = Duration::from_secs(60);
/// Longest name of a directory below which sockets are made: their paths have at most 107
/// bytes, and the longest here is `/r/vhost/NAME.sock` with a name of up to 32.
const DIR_MAX: usize = 107 - 46;
/// Bytes of a file that are written between two looks at whether to go on: under a second of a
/// hard disk.
const WRITE_STRETCH: u64 = 64 << 20;

/// A daemon, its pool and its directory. Killed and removed when dropped.
#[derive(Debug)]
pub struct Hearth {
    bin: PathBuf,
    dir: tempfile::TempDir,
    flash: PathBuf,
    child: Option<Child>,
    /// Where the sockets go if the directory's name is too long for them.
    short: Option<tempfile::TempDir>,
    /// A Ctrl-C on the terminal does not reach the daemon, and it dies with the thread that
    /// started it ([`crate::child::bound_to_us`]).
    pub bound: bool,
    /// More arguments for `hearth serve`.
    pub serve_args: Vec<String>,
    /// A program and its arguments that put themselves in front of `hearth serve` and become it
    /// (`prlimit`, say).
    pub wrap: Vec<String>,
    /// Environment variables of the daemon.
    pub env: Vec<(String, String)>,
    /// Where the daemon looks for programs, if not where the test does.
    pub path: Option<PathBuf>,
}

/// The binary under test: `$HEARTH_BIN`, else the newest one beside this test.
pub fn binary() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("HEARTH_BIN") {
        let path = PathBuf::from(path);
        ensure!(path.is_file(), "HEARTH_BIN={} is no file", path.display());
        return Ok(path);
    }
    let me = std::env::current_exe()?;
    let target = me
        .ancestors()
        .find(|d| d.join("CACHEDIR.TAG").exists())
        .context("no target directory")?;
    let newest = ["release/hearth", "debug/hearth"]
        .iter()
        .map(|p| target.join(p))
        .filter_map(|p| Some((fs::metadata(&p).ok()?.modified().ok()?, p)))
        .max();
    newest
        .map(|(_, p)| p)
        .context("no hearth binary: cargo build --release -p hearth, or set HEARTH_BIN")
}

/// Where test files go: `$HEARTH_TEST_DIR`, else the target directory, which is on a real disk
/// (a temporary directory is often in RAM, where O_DIRECT means nothing).
fn scratch() -> Result<PathBuf> {
    let dir = match std::env::var_os("HEARTH_TEST_DIR") {
        Some(dir) => PathBuf::from(dir),
        None => binary()?
            .parent()
            .and_then(Path::parent)
            .context("binary outside a target directory")?
            .join("e2e"),
    };
    fs::create_dir_all(&dir)?;
    Ok(dir)
}

impl Hearth {
    /// A directory with no pool yet.
    pub fn bare() -> Result<Hearth> {
        Hearth::bare_in(binary()?, &scratch()?)
    }

    /// A new pool for a debug build of the daemon, which alone can be made to fail
    /// ([`fail_at`](Self::fail_at)); `None` if there is none beside the binary under test.
    pub fn breakable(size: &str) -> Result<Option<Hearth>> {
        let bin = binary()?;
        let target = bin.parent().and_then(Path::parent);
        let debug = target.context("binary outside a target directory")?;
        let debug = debug.join("debug/hearth");
        if !debug.is_file() {
            eprintln!("skipped: no debug build of hearth beside {}", bin.display());
            return Ok(None);
        }
        let mut hearth = Hearth::bare_in(debug, &scratch()?)?;
        let file = path(&hearth.dir().join("fail")).to_owned();
        hearth.env.push(("HEARTH_FAILPOINT".to_owned(), file));
        hearth.create_pool(size)?;
        Ok(Some(hearth))
    }

    /// Makes the next data thread that has work `panic`, `hang` (until this is called again), or lose its
    /// `driver`.
    pub fn fail_at(&self, how: &str) -> Result<()> {
        // Whole at once: the daemon may look at any time.
        let (new, file) = (self.dir().join("fail.new"), self.dir().join("fail"));
        fs::write(&new, how)?;
        Ok(fs::rename(new, file)?)
    }

    /// Waits until the daemon has ended by itself.
    pub fn ended(&mut self) -> Result<ExitStatus> {
        let child = self.child.as_mut().context("not running")?;
        let status = wait::until("the daemon ends", LIFE_LIMIT, || {
            child.try_wait().ok().flatten()
        })?;
        self.child = None;
        Ok(status)
    }

    /// The same with a given binary, below a given directory.
    pub fn bare_in(bin: PathBuf, parent: &Path) -> Result<Hearth> {
        let dir = tempfile::Builder::new().prefix("t").tempdir_in(parent)?;
        let flash = dir.path().join("flash.img");
        let short = (dir.path().as_os_str().len() > DIR_MAX)
            .then(tempfile::tempdir)
            .transpose()?;
        Ok(Hearth {
            bin,
            dir,
            flash,
            child: None,
            short,
            bound: false,
            serve_args: Vec::new(),
            wrap: Vec::new(),
            env: Vec::new(),
            path: None,
        })
    }

    /// A new pool of `size` (as `--size` spells it), not served yet.
    pub fn with_pool(size: &str) -> Result<Hearth> {
        let hearth = Hearth::bare()?;
        hearth.create_pool(size)?;
        Ok(hearth)
    }

    /// A new pool, served.
    pub fn serving(size: &str) -> Result<Hearth> {
        let mut hearth = Hearth::with_pool(size)?;
        hearth.start()?;
        Ok(hearth)
    }

    /// Formats the flash file.
    pub fn create_pool(&self, size: &str) -> Result<String> {
        ok(self.hearth(&[
            "pool",
            "create",
            "--flash",
            path(&self.flash),
            "--size",
            size,
        ])?)
    }

    /// The test's directory.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The flash file.
    pub fn flash(&self) -> &Path {
        &self.flash
    }

    /// Names another binary, before it is started.
    pub fn set_binary(&mut self, bin: PathBuf) {
        self.bin = bin;
    }

    /// From now on the daemon's writes beyond `end` of any file fail (setrlimit(2), RLIMIT_FSIZE). The signal
    /// that comes with it would end the daemon: whoever starts it ignores it.
    pub fn refuse_writes(&self, end: u64) -> Result<()> {
        let pid = self.pid().context("not running")?;
        let limit = libc::rlimit {
            rlim_cur: end,
            rlim_max: libc::RLIM_INFINITY,
        };
        // SAFETY: a pointer to a limit that lives across the call, and none to be filled in.
        let rc = unsafe {
            libc::prlimit(
                pid as libc::pid_t,
                libc::RLIMIT_FSIZE,
                &limit,
                std::ptr::null_mut(),
            )
        };
        ensure!(rc == 0, "prlimit: {}", std::io::Error::last_os_error());
        Ok(())
    }

    /// Names another flash file, before the pool is created, or where it is from now on.
    pub fn set_flash(&mut self, path: PathBuf) {
        self.flash = path;
    }

    /// The run directory. A name of its own, as short as can be: socket paths are limited.
    pub fn run_dir(&self) -> PathBuf {
        let short = self.short.as_ref().map(tempfile::TempDir::path);
        short.unwrap_or(self.dir()).join("r")
    }

    /// The NBD socket.
    pub fn socket(&self) -> PathBuf {
        self.run_dir().join("nbd.sock")
    }

    /// The vhost-user socket of disk `name`.
    pub fn vhost_socket(&self, name: &str) -> PathBuf {
        self.run_dir().join("vhost").join(format!("{name}.sock"))
    }

    /// The control API.
    pub fn api(&self) -> Api {
        Api::at(self.run_dir().join("api.sock"))
    }

    /// Where a client finds disk `name`.
    pub fn uri(&self, name: &str) -> String {
        format!("nbd+unix:///{name}?socket={}", path(&self.socket()))
    }

    /// Contents of the daemon's log. A separate thread of the daemon writes it, so a line may be missing for a while: a
    /// test that expects a line of a running daemon waits for it with [`logged`](Self::logged).
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir().join("daemon.log")).unwrap_or_default()
    }

    /// Waits until the daemon has logged `text`; the error shows the log.
    pub fn logged(&self, text: &str) -> Result<()> {
        self.logged_times(text, 1)
    }

    /// Waits until the daemon has logged `text` N times; the error shows the log.
    pub fn logged_times(&self, text: &str, times: usize) -> Result<()> {
        wait::until(&format!("{text:?} is logged"), LIFE_LIMIT, || {
            (self.log().matches(text).count() >= times).then_some(())
        })
        .with_context(|| self.log())
    }

    /// Runs the command line to its end.
    pub fn hearth(&self, args: &[&str]) -> Result<Output> {
        Command::new(&self.bin)
            .arg("--run-dir")
            .arg(self.run_dir())
            .args(args)
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("cannot run hearth {}", args.join(" ")))
    }

    /// Begins a command, which may take long; what it says is kept for whoever waits for it.
    pub fn begin(&self, args: &[&str]) -> Result<Child> {
        Command::new(&self.bin)
            .arg("--run-dir")
            .arg(self.run_dir())
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot run hearth {}", args.join(" ")))
    }

    /// Runs the command line, which must succeed; what it printed.
    pub fn ok(&self, args: &[&str]) -> Result<String> {
        ok(self.hearth(args)?)
            .with_context(|| format!("hearth {}\ndaemon's log:\n{}", args.join(" "), self.log()))
    }

    /// All that the command line says, which must succeed: what was asked for, and what somebody
    /// should know besides.
    pub fn said(&self, args: &[&str]) -> Result<String> {
        let out = self.hearth(args)?;
        let words = String::from_utf8_lossy(&out.stderr).into_owned();
        Ok(ok(out)? + &words)
    }

    /// Runs the command line, which must fail with a plain sentence; that sentence.
    pub fn refused(&self, args: &[&str]) -> Result<String> {
        let out = self.hearth(args)?;
        let words = format!(
            "{}{}",
            String::from_utf8_lossy(&out.stderr),
            String::from_utf8_lossy(&out.stdout)
        );
        ensure!(
            !out.status.success(),
            "hearth {} should have been refused: {words}",
            args.join(" ")
        );
        plain(&words)?;
        Ok(words)
    }

    /// Starts the daemon and waits until it serves; how long that took.
    pub fn start(&mut self) -> Result<Duration> {
        ensure!(self.child.is_none(), "already running");
        let start = Instant::now();
        self.spawn()?;
        let socket = self.socket();
        let child = &mut self.child;
        let ended = wait::until("hearth serve listens", LIFE_LIMIT, || {
            if greets(&socket) {
                return Some(Ok(None));
            }
            match child.as_mut()?.try_wait() {
                Ok(None) => None,
                other => Some(other),
            }
        })
        .with_context(|| self.log())??;
        if let Some(status) = ended {
            self.child = None;
            bail!("hearth serve ended at start ({status}):\n{}", self.log());
        }
        Ok(start.elapsed())
    }

    /// What a daemon keeps beside its pool is the test's own, unless the test says where.
    fn state_args(&self) -> Vec<PathBuf> {
        if self.serve_args.iter().any(|arg| arg == "--state-dir") {
            return Vec::new();
        }
        vec!["--state-dir".into(), self.dir().join("state")]
    }

    /// Starts the daemon without waiting.
    pub fn spawn(&mut self) -> Result<()> {
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.dir().join("daemon.log"))?;
        let mut command = match self.wrap.split_first() {
            None => Command::new(&self.bin),
            Some((program, args)) => {
                let mut command = Command::new(program);
                command.args(args).arg(&self.bin);
                command
            }
        };
        if let Some(path) = &self.path {
            command.env("PATH", path);
        }
        command
            .envs(self.env.iter().map(|(k, v)| (k, v)))
            .args(["serve", "--flash"])
            .arg(&self.flash)
            .arg("--run-dir")
            .arg(self.run_dir())
            .args(self.state_args())
            .args(&self.serve_args)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        if self.bound {
            crate::child::bound_to_us(&mut command);
        }
        self.child = Some(command.spawn()?);
        Ok(())
    }

    /// Starts a daemon that must refuse to serve; what it said.
    pub fn start_refused(&mut self) -> Result<String> {
        let before = self.log().len();
        self.spawn()?;
        let Some(mut child) = self.child.take() else {
            bail!("not started")
        };
        let status = wait::until("hearth serve ends", LIFE_LIMIT, || {
            child.try_wait().ok().flatten()
        });
        if status.is_err() {
            child.kill()?;
            child.wait()?;
        }
        ensure!(!status?.success(), "hearth serve should have been refused");
        let words = self.log().split_off(before);
        plain(&words)?;
        Ok(words)
    }

    /// The daemon's process.
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// True while the daemon runs.
    pub fn running(&mut self) -> bool {
        self.child
            .as_mut()
            .is_some_and(|c| matches!(c.try_wait(), Ok(None)))
    }

    /// kill -9.
    pub fn kill9(&mut self) -> Result<()> {
        if let Some(mut child) = self.child.take() {
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }

    /// SIGTERM, and waits for the end.
    pub fn stop(&mut self) -> Result<ExitStatus> {
        let Some(mut child) = self.child.take() else {
            bail!("not running")
        };
        // SAFETY: a signal to a child that has not been waited for, so its pid is still its own.
        unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
        match wait::until("hearth ends after SIGTERM", LIFE_LIMIT, || {
            child.try_wait().ok().flatten()
        }) {
            Ok(status) => {
                ensure!(
                    status.success(),
                    "hearth ended with {status} after SIGTERM:\n{}",
                    self.log()
                );
                Ok(status)
            }
            Err(e) => {
                child.kill()?;
                child.wait()?;
                Err(e.context(self.log()))
            }
        }
    }

    /// An origin file of `size` bytes with random contents (of seed 7).
    pub fn origin(&self, name: &str, size: u64) -> Result<PathBuf> {
        let path = self.dir().join(name);
        write_random(&path, size, 7)?;
        Ok(path)
    }

    /// Adds a disk with more arguments.
    pub fn add(&self, name: &str, origin: &str, more: &[&str]) -> Result<String> {
        let mut args = vec!["disk", "add", name, "--origin", origin];
        args.extend(more);
        self.ok(&args)
    }

    /// Statistics of a disk, as `hearth stats NAME --json` prints them.
    pub fn stats(&self, name: &str) -> Result<Value> {
        let text = self.ok(&["stats", name, "--json"])?;
        let all: Value =
            serde_json::from_str(&text).with_context(|| format!("stats are no JSON: {text}"))?;
        if all["name"] == name {
            return Ok(all);
        }
        let disk = all["disks"]
            .as_array()
            .and_then(|disks| disks.iter().find(|d| d["name"] == name))
            .cloned();
        disk.with_context(|| format!("no disk {name} in {text}"))
    }

    /// The pool's figures: `pool` of `hearth stats --json`.
    pub fn pool_stats(&self) -> Result<Value> {
        let text = self.ok(&["stats", "--json"])?;
        let all: Value =
            serde_json::from_str(&text).with_context(|| format!("stats are no JSON: {text}"))?;
        Ok(all["pool"].clone())
    }

    /// A counter of a disk since the daemon's start.
    pub fn counter(&self, name: &str, counter: &str) -> Result<u64> {
        let stats = self.stats(name)?;
        stats["spans"][0]["counters"][counter]
            .as_u64()
            .with_context(|| format!("no counter {counter} in {stats}"))
    }

    /// A connection to disk `name`.
    pub fn connect(&self, name: &str) -> Result<Client> {
        Client::connect(&self.socket(), name)
            .with_context(|| format!("connect to {name}; daemon's log:\n{}", self.log()))
    }
}

impl Drop for Hearth {
    fn drop(&mut self) {
        let _ = self.kill9();
        if std::thread::panicking() {
            eprintln!("daemon's log:\n{}", self.log());
        }
    }
}

/// True if an NBD server answers on `socket`. A connection alone proves nothing: for a moment the
/// kernel goes on accepting them for a daemon that was killed.
fn greets(socket: &Path) -> bool {
    use std::io::Read;
    let mut greeting = [0u8; 8];
    std::os::unix::net::UnixStream::connect(socket).is_ok_and(|mut stream| {
        stream
            .set_read_timeout(Some(Duration::from_secs(1)))
            .is_ok()
            && stream.read_exact(&mut greeting).is_ok()
    })
}

/// Standard output of a program that must have succeeded.
pub fn ok(out: Output) -> Result<String> {
    let (stdout, stderr) = (
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr),
    );
    ensure!(
        out.status.success(),
        "failed with {}: {stderr}{stdout}",
        out.status
    );
    Ok(stdout.into_owned())
}

/// Words for a person: something was said, and it is no panic.
fn plain(words: &str) -> Result<()> {
    ensure!(!words.trim().is_empty(), "refused without a word");
    ensure!(!words.contains("panicked"), "a panic is no answer: {words}");
    Ok(())
}

/// A path as text; test paths are ASCII.
pub fn path(path: &Path) -> &str {
    path.to_str().unwrap_or("?")
}

/// Writes `size` random bytes of a seed to a file, allocating every extent.
pub fn write_random(path: &Path, size: u64, seed: u64) -> Result<()> {
    write_random_unless(path, size, seed, &|| Ok(()))
}

/// The same, but gives up with the error of `stop`, which is asked before every
/// [`WRITE_STRETCH`].
pub fn write_random_unless(
    path: &Path,
    size: u64,
    seed: u64,
    stop: &dyn Fn() -> Result<()>,
) -> Result<()> {
    use std::io::Write;
    let mut file = File::create(path).with_context(|| format!("create {}", path.display()))?;
    let mut rng = crate::rng::Rng::new(seed);
    let mut chunk = vec![0u8; 1 << 20];
    let mut left = size;
    while left > 0 {
        if (size - left) % WRITE_STRETCH == 0 {
            // Else the kernel would gather gigabytes, and the last call would write them all.
            file.sync_data()?;
            stop()?;
        }
        let n = left.min(chunk.len() as u64) as usize;
        rng.fill(&mut chunk[..n]);
        file.write_all(&chunk[..n])?;
        left -= n as u64;
    }
    file.sync_all()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn writing_a_file_can_be_called_off() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f");
        let asked = Cell::new(0);
        let stop = || {
            asked.set(asked.get() + 1);
            ensure!(asked.get() < 2, "enough");
            Ok(())
        };
        let outcome = write_random_unless(&file, 2 * WRITE_STRETCH, 1, &stop);
        assert_eq!(outcome.unwrap_err().to_string(), "enough");
        assert_eq!(fs::metadata(&file).unwrap().len(), WRITE_STRETCH);
    }
}
