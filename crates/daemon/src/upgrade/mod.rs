//! Another program takes the place of this one, under its clients.
//!
//! The next program runs in the same process (execve(2)), so that the service manager notices nothing, and
//! descriptors need nobody to pass them on. Before, it is [asked](probe) whether it could serve this pool with
//! these arguments; if not, nothing happens. Then clients come to rest between two requests, the pool is closed as
//! at any stop, and the next program finds a [document] that names what it has inherited: sockets that listen,
//! connections, and how far each of those is. It opens the pool, warm, and goes on.
//!
//! What cannot go over: guests over vhost-user, whose memory belongs to this program, and connections through TLS.
//! They connect again if they can; who might not is named before.
//!
//! A crash at any moment is a crash as any other: until the pool is closed it is in use, and then it is clean.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hearth_nbd::carried::State;
use hearth_reactor::Carried;

use crate::api::upgrade::{UpgradeOutcome, UpgradeState};
use crate::error::{Error, Result};
use crate::notify::Notify;
use crate::rundir::RunDir;
use document::{Connection, Document};

pub mod document;
pub mod probe;
pub mod sockets;

/// The variable that tells a program the descriptor of its document.
pub const VARIABLE: &str = "HEARTH_HANDOVER";
/// This version of Hearth.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Longest wait for the reader of the log before this becomes another program.
const LOG_TIME: Duration = Duration::from_millis(200);
/// How long the end of one program, or the start of the next, may take before the service manager's watchdog may
/// end it.
const GOES_ON: Duration = Duration::from_secs(600);

/// Options of `hearth serve` that are for one start.
const ONE_START: &[&str] = &["--accept-damage", "--release-brake"];

#[derive(Default)]
struct Parting {
    /// Who comes next.
    program: Option<PathBuf>,
    /// Connections that go over, of so many.
    carried: Vec<Carried>,
    connections: u64,
    begun_ns: u64,
    generation: u64,
    last: Option<UpgradeOutcome>,
}

/// Which program takes the daemon's place, and whose place it took.
#[derive(Default)]
pub struct Succession(Mutex<Parting>);

impl Succession {
    fn lock(&self) -> MutexGuard<'_, Parting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who comes next; false if somebody does already.
    pub(crate) fn appoint(&self, program: &Path) -> bool {
        let mut parting = self.lock();
        let free = parting.program.is_none();
        parting.program.get_or_insert_with(|| program.to_owned());
        free
    }

    /// Connections that came to rest end after all, as in a crash.
    pub(crate) fn cut(&self) {
        self.lock().carried.clear();
    }

    /// Has `connections` come to rest, as far as they can; whether all threads have ended.
    pub(crate) fn part(
        &self,
        connections: u64,
        hand_over: impl FnOnce() -> (bool, Vec<Carried>),
    ) -> bool {
        let begun_ns = hearth_io::now_ns();
        let (ended, carried) = hand_over();
        let mut parting = self.lock();
        parting.begun_ns = begun_ns;
        parting.connections = connections;
        parting.carried = carried;
        ended
    }

    /// Whose place it took.
    pub(crate) fn succeeded(&self, inherited: &Predecessor) -> UpgradeOutcome {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let waited = hearth_io::now_ns().saturating_sub(inherited.begun_ns);
        let outcome = UpgradeOutcome {
            at: now.map_or(0, |d| d.as_secs()),
            from: inherited.from.clone(),
            to: VERSION.to_owned(),
            pause_ms: waited / 1_000_000,
            carried: inherited.carried,
            ended: inherited.ended,
            failure: inherited.failure.clone(),
        };
        let mut parting = self.lock();
        parting.generation = inherited.generation;
        parting.last = Some(outcome.clone());
        outcome
    }

    /// How often, and how the last time.
    pub(crate) fn state(&self) -> UpgradeState {
        let parting = self.lock();
        UpgradeState {
            version: VERSION.to_owned(),
            generation: parting.generation,
            last: parting.last.clone(),
        }
    }
}

/// The program before, as far as it matters to those who ask.
#[derive(Clone, Debug)]
pub(crate) struct Predecessor {
    from: String,
    begun_ns: u64,
    generation: u64,
    /// Known [later](Self::goes_on_with).
    carried: u64,
    ended: u64,
    failure: Option<String>,
}

impl Predecessor {
    /// So many of its connections are really gone on with, of those that were to be.
    pub fn goes_on_with(&mut self, resumed: u64, of: u64) {
        self.carried = resumed;
        self.ended += of.saturating_sub(resumed);
    }
}

/// What the program before has left for this one.
pub(crate) struct Inherited {
    pub predecessor: Predecessor,
    pub lock: Option<File>,
    pub sockets: BTreeMap<String, OwnedFd>,
    pub connections: Vec<(OwnedFd, State)>,
}

impl Inherited {
    /// If this program takes the place of another one. To be called first of all: descriptors that were passed on
    /// are told from others by being the only ones that outlive an exec.
    pub fn take() -> Option<Inherited> {
        let variable = std::env::var(VARIABLE).ok()?;
        let mut seen = BTreeSet::new();
        let mut read = || {
            let fd = variable.parse().ok().and_then(|fd| adopt(fd, &mut seen));
            let file = fd.map(File::from).ok_or("there is no such descriptor")?;
            Document::parse(&contents(&file).map_err(|_| "it cannot be read")?)
        };
        match read() {
            Ok(document) => Some(Inherited::of(document, &mut seen)),
            Err(why) => {
                tracing::error!(
                    "what the program before has left is not understood: {why}; its clients have to connect again"
                );
                close_inherited();
                None
            }
        }
    }

    fn of(document: Document, seen: &mut BTreeSet<RawFd>) -> Inherited {
        let mut inherited = Inherited {
            lock: adopt(document.lock, seen).map(File::from),
            sockets: BTreeMap::new(),
            connections: Vec::new(),
            predecessor: Predecessor {
                from: document.from,
                begun_ns: document.begun_ns,
                generation: document.generation,
                carried: 0,
                ended: document.ended,
                failure: (!document.failure.is_empty()).then_some(document.failure),
            },
        };
        for (name, fd) in document.sockets {
            inherited
                .sockets
                .extend(adopt(fd, seen).map(|fd| (name, fd)));
        }
        for Connection { fd, state, .. } in document.connections {
            match (adopt(fd, seen), State::parse(&state)) {
                (Some(fd), Some(state)) => inherited.connections.push((fd, state)),
                _ => {
                    inherited.predecessor.ended += 1;
                    tracing::error!("a client of the program before cannot be gone on with");
                }
            }
        }
        inherited
    }
}

/// Closes what another program has left open, except what the service manager passes on: who is connected is to
/// see that nobody goes on with it.
fn close_inherited() {
    let ours = std::env::var("LISTEN_PID").is_ok_and(|p| p == std::process::id().to_string());
    let passed = std::env::var("LISTEN_FDS").ok().filter(|_| ours);
    let passed: RawFd = passed.and_then(|n| n.parse().ok()).unwrap_or(0);
    let Ok(open) = std::fs::read_dir("/proc/self/fd") else {
        return;
    };
    let open = open.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let open: Vec<RawFd> = open.collect();
    let mut seen: BTreeSet<RawFd> = (3..3i32.saturating_add(passed.clamp(0, 1 << 20))).collect();
    open.into_iter().for_each(|fd| drop(adopt(fd, &mut seen)));
}

/// Takes over a descriptor that another program has passed on, each once; none that this one has opened.
fn adopt(fd: RawFd, seen: &mut BTreeSet<RawFd>) -> Option<OwnedFd> {
    if fd <= 2 || !seen.insert(fd) {
        return None;
    }
    // SAFETY: a plain number; fails if it is no descriptor.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
    if flags < 0 || flags & libc::FD_CLOEXEC != 0 {
        return None;
    }
    // SAFETY: it is open, nothing in this program has opened it (that would be closed on exec), and nobody was
    // given it before.
    let owned = unsafe { OwnedFd::from_raw_fd(fd) };
    set_inherited(&owned, false).ok()?;
    Some(owned)
}

/// Whether a descriptor outlives an exec.
fn set_inherited(fd: &impl AsRawFd, yes: bool) -> std::io::Result<()> {
    let flags = if yes { 0 } else { libc::FD_CLOEXEC };
    // SAFETY: plain numbers; the descriptor is open for the call.
    match unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFD, flags) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// What cannot be changed any more, by whoever else has it.
const SEALS: libc::c_int =
    libc::F_SEAL_SEAL | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_WRITE;

/// The bytes of a sealed document.
fn contents(file: &File) -> std::io::Result<Vec<u8>> {
    let bad = || std::io::Error::from_raw_os_error(libc::EINVAL);
    // SAFETY: plain numbers; the descriptor is open for the call. Fails for what is no file in memory.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    let len = file.metadata()?.len();
    if seals < 0 || seals & SEALS != SEALS || len > document::LENGTH_MAX {
        return Err(bad());
    }
    let mut bytes = vec![0; len as usize];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

/// A sealed document of these bytes.
fn sealed(bytes: &[u8]) -> std::io::Result<File> {
    // SAFETY: a name that ends with a zero, and flags.
    let fd = unsafe {
        libc::memfd_create(
            c"hearth-handover".as_ptr(),
            libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING,
        )
    };
    if fd < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the call has just opened it for us.
    let mut file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.write_all(bytes)?;
    // SAFETY: plain numbers; the descriptor is open for the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) } {
        0 => Ok(file),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Becomes the program that was appointed. Returns only if neither that nor this one can be started anew. With `changed`
/// the next one gets these flash devices, and is told why they are those before, if they are.
pub(crate) fn become_next(
    succession: &Succession,
    run_dir: RunDir,
    changed: Option<(Vec<PathBuf>, String)>,
) -> Error {
    let (flash, failure) = match changed {
        Some((flash, failure)) => (Some(flash), failure),
        None => (None, String::new()),
    };
    let args = match &flash {
        Some(flash) => with_flash(own_arguments(), flash, Path::new(HOST_FILE)),
        None => own_arguments(),
    };
    let parting = std::mem::take(&mut *succession.lock());
    // Who is still choosing a disk was not counted among the connections.
    let use_one = |c: &&Carried| State::parse(&c.state).is_some_and(|s| s.export().is_some());
    let carried = parting.carried.iter().filter(use_one).count() as u64;
    let sockets = run_dir.sockets().leave();
    let lock = run_dir.into_lock();
    let mut document = Document {
        from: VERSION.to_owned(),
        generation: parting.generation + 1,
        begun_ns: parting.begun_ns,
        ended: parting.connections.saturating_sub(carried),
        failure,
        lock: lock.as_raw_fd(),
        sockets: (sockets.iter())
            .map(|(name, fd)| (name.clone(), fd.as_raw_fd()))
            .collect(),
        connections: Vec::new(),
    };
    let mut kept = Vec::new();
    for Carried { fd, state } in parting.carried {
        document.connections.push(Connection {
            // The only one whose sessions can be carried.
            protocol: hearth_nbd::PROTOCOL.to_string(),
            fd: fd.as_raw_fd(),
            state,
        });
        kept.push(fd);
    }
    kept.extend(sockets.into_iter().map(|(_, fd)| fd));
    kept.push(lock.into());
    let next = parting.program.unwrap_or_default();
    // A handler does not survive exec(2); the next program sets its own.
    crate::signals::ignore();
    crate::log::flush(LOG_TIME);
    let failed = execute(&next, &args, &document, &kept);
    tracing::error!(program = %next.display(), "cannot be started: {failed}; going on with the one before");
    // It is what runs now, wherever its file has gone.
    document.failure = format!("{} cannot be started: {failed}", next.display());
    crate::log::flush(LOG_TIME);
    let again = execute(Path::new("/proc/self/exe"), &args, &document, &kept);
    Error::unavailable(
        format!(
            "{}, and neither can this one again: {again}",
            document.failure
        ),
        "start the daemon anew; the pool is as at any stop",
    )
}

/// Becomes `program`, with these arguments and descriptors; returns if that fails.
fn execute(
    program: &Path,
    args: &[OsString],
    document: &Document,
    kept: &[OwnedFd],
) -> std::io::Error {
    let prepare = || -> std::io::Result<File> {
        let file = sealed(&document.encode())?;
        set_inherited(&file, true)?;
        kept.iter().try_for_each(|fd| set_inherited(fd, true))?;
        Ok(file)
    };
    let file = match prepare() {
        Ok(file) => file,
        Err(e) => return e,
    };
    let name = std::env::args_os().next();
    Command::new(program)
        .arg0(name.unwrap_or_else(|| OsString::from("hearth")))
        .args(args)
        .env(VARIABLE, file.as_raw_fd().to_string())
        .exec()
}

/// Tells the service manager that this goes on, until it is dropped: its watchdog runs while one program takes the
/// place of another, as it does not at other starts and stops.
pub(crate) struct Patience {
    /// Its other end goes with it, which ends the thread.
    _stop: Option<Sender<()>>,
}

impl Patience {
    pub fn ask() -> Patience {
        let notify = Notify::from_env();
        let Some(period) = notify.watchdog_period() else {
            return Patience { _stop: None };
        };
        let (stop, stopped) = channel::<()>();
        let rounds = 2 * (GOES_ON.as_nanos() / period.as_nanos().max(1)) as usize;
        let work = move || {
            notify.alive();
            for _ in 0..rounds {
                if stopped.recv_timeout(period / 2) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
                notify.alive();
            }
        };
        let thread = std::thread::Builder::new().name("hearth-patience".to_owned());
        if let Err(e) = thread.spawn(work) {
            tracing::error!("cannot start a thread: {e}; the watchdog may end a long start");
        }
        Patience { _stop: Some(stop) }
    }
}

/// The arguments with which this program was started, without its name, as the next one is to be.
pub(crate) fn own_arguments() -> Vec<OsString> {
    lasting(std::env::args_os().skip(1))
}

/// The host's settings, which a daemon reads that is told neither its flash nor another file.
const HOST_FILE: &str = "/etc/hearth/hearth.toml";

/// Arguments of `hearth serve` with other flash devices. Who is told its flash does not read the host's file: what it was
/// started with from there is named, so that all else stays as it was.
fn with_flash(args: Vec<OsString>, flash: &[PathBuf], host: &Path) -> Vec<OsString> {
    let mut out = Vec::new();
    let (mut told, mut args) = (false, args.into_iter());
    while let Some(arg) = args.next() {
        let word = arg.to_string_lossy();
        told |= arg == "--config" || word.starts_with("--config=");
        if arg == "--flash" {
            (told, _) = (true, args.next());
        } else if word.starts_with("--flash=") {
            told = true;
        } else {
            out.push(arg);
        }
    }
    if !told && host.exists() {
        let mut arg = OsString::from("--config=");
        arg.push(host);
        out.push(arg);
    }
    for path in flash {
        // One word, whatever the path begins with.
        let mut arg = OsString::from("--flash=");
        arg.push(path);
        out.push(arg);
    }
    out
}

/// Arguments without those that were meant for one start.
fn lasting(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    args.filter(|arg| !ONE_START.iter().any(|once| arg == once))
        .collect()
}

/// A program as it was named, if it can be one at all.
pub(crate) fn check_program(program: &str) -> Result<PathBuf> {
    let path = PathBuf::from(program);
    if !path.is_absolute() {
        return Err(Error::invalid(
            format!("{program} is no absolute path"),
            "name the program from the root directory on",
        ));
    }
    match std::fs::metadata(&path) {
        Ok(meta) if meta.is_file() => Ok(path),
        Ok(_) => Err(Error::invalid(
            format!("{program} is no file"),
            "name the program that is to take over",
        )),
        Err(e) => Err(Error::invalid(
            format!("the daemon cannot see {program}: {e}"),
            "name a program at a place that services see, such as /usr/bin/hearth",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_that_is_sealed_is_read_and_no_other_file() {
        let file = sealed(b"abc").unwrap();
        assert_eq!(contents(&file).unwrap(), b"abc");
        assert!((&file).write_all(b"d").is_err(), "sealed");
        let plain = tempfile::tempfile().unwrap();
        assert!(contents(&plain).is_err());
    }

    #[test]
    fn descriptors_of_our_own_are_not_taken_for_inherited_ones() {
        let mut seen = BTreeSet::new();
        let ours = tempfile::tempfile().unwrap();
        assert!(adopt(ours.as_raw_fd(), &mut seen).is_none());
        for fd in [-1, 0, 1, 2, 1 << 30] {
            assert!(adopt(fd, &mut seen).is_none(), "{fd}");
        }
        let passed = sealed(b"").unwrap();
        set_inherited(&passed, true).unwrap();
        let fd = std::os::fd::IntoRawFd::into_raw_fd(passed);
        let mut seen = BTreeSet::new();
        let owned = adopt(fd, &mut seen).unwrap();
        assert!(adopt(fd, &mut seen).is_none(), "taken twice");
        // SAFETY: a plain number; the descriptor is open for the call.
        let flags = unsafe { libc::fcntl(owned.as_raw_fd(), libc::F_GETFD) };
        assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
    }

    #[test]
    fn what_was_said_for_one_start_is_not_said_again() {
        let args = [
            "serve",
            "--accept-damage",
            "--flash",
            "f",
            "--release-brake",
        ];
        let kept = lasting(args.into_iter().map(OsString::from));
        assert_eq!(kept, ["serve", "--flash", "f"]);
    }

    #[test]
    fn the_next_one_gets_the_devices_of_the_pool_as_it_is_then() {
        let args = ["serve", "--flash", "a", "--threads", "2", "--flash=b"];
        let args = args.into_iter().map(OsString::from).collect();
        let flash = ["/a", "/c"].map(PathBuf::from);
        let host = tempfile::NamedTempFile::new().unwrap();
        let next = with_flash(args, &flash, host.path());
        assert_eq!(
            next,
            ["serve", "--threads", "2", "--flash=/a", "--flash=/c"]
        );
        // The service is told nothing: what it read of the host's file it reads again.
        let of = |args: &[&str], host: &Path| {
            let next = with_flash(args.iter().map(OsString::from).collect(), &flash[..1], host);
            next.into_iter()
                .map(|arg| arg.into_string().unwrap())
                .collect::<Vec<_>>()
        };
        let file = format!("--config={}", host.path().display());
        assert_eq!(of(&["serve"], host.path()), ["serve", &file, "--flash=/a"]);
        assert_eq!(
            of(&["serve", "--config", "/c"], host.path()),
            ["serve", "--config", "/c", "--flash=/a"]
        );
        assert_eq!(
            of(&["serve"], Path::new("/no/such/file")),
            ["serve", "--flash=/a"]
        );
    }

    #[test]
    fn what_is_no_program_is_said_so() {
        assert!(
            check_program("hearth")
                .unwrap_err()
                .what
                .contains("absolute")
        );
        assert!(check_program("/").unwrap_err().what.contains("no file"));
        assert!(check_program("/no/such/file").is_err());
    }
}
