//! The run directory: sockets, and the lock that keeps a second daemon out.
//!
//! Unix sockets outlive a daemon that was killed, so a socket file alone proves nothing. The
//! lock does: the kernel releases it with the process. A left-over socket is replaced only while
//! we hold the lock and nobody answers on it.
//!
//! Whoever can write into the directory can put a socket of theirs in place of ours, or a link to
//! files of ours where left-overs are cleared away. The default may lie in `/tmp`, where anybody
//! can make it before us. So it must be ours alone, and so must what is used below it.

use std::fs::{DirBuilder, File, Metadata, OpenOptions, Permissions};
use std::io::{ErrorKind, Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearth_volume::{Socket, SocketFile};

use crate::error::{Error, Result};
use crate::rights::{self, Access, Rights};
use crate::upgrade::sockets::Sockets;

/// Longest path of a unix socket (`sun_path` in unix(7), less the final zero).
const SOCKET_PATH_MAX: usize = 107;

/// How long a left-over socket may go on answering. The kernel takes a killed daemon's rings down,
/// and with them its listeners, a moment after the process is gone.
const LISTENER_WAIT: Duration = Duration::from_secs(2);
/// How often we look meanwhile: no event tells of it, and whoever connects may wake a listener that stays.
const LISTENER_POLL: Duration = Duration::from_millis(5);

/// Where root's daemon has its sockets unless told otherwise.
pub const ROOTS_DIR: &str = "/run/hearth";

/// Where sockets are unless told otherwise: `/run/hearth` for root, `$XDG_RUNTIME_DIR/hearth`
/// for anybody else, `/tmp/hearth-UID` when there is no such directory.
pub fn default_dir() -> PathBuf {
    let uid = own_uid();
    if uid == 0 {
        return PathBuf::from(ROOTS_DIR);
    }
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|d| Path::new(d).is_absolute()) {
        Some(dir) => Path::new(&dir).join("hearth"),
        None => PathBuf::from(format!("/tmp/hearth-{uid}")),
    }
}

/// Where is kept what must outlive reboots and the flash, unless the user says otherwise.
pub fn default_state_dir() -> PathBuf {
    let uid = own_uid();
    if uid == 0 {
        return PathBuf::from(crate::degraded::STATE_DIR);
    }
    let absolute = |name: &str| {
        let dir = std::env::var_os(name).map(PathBuf::from);
        dir.filter(|dir| dir.is_absolute())
    };
    absolute("XDG_STATE_HOME")
        .or_else(|| Some(absolute("HOME")?.join(".local/state")))
        .map_or_else(
            || PathBuf::from(format!("/tmp/hearth-{uid}-state")),
            |dir| dir.join("hearth"),
        )
}

/// Whose files we may use.
pub(crate) fn own_uid() -> u32 {
    // SAFETY: geteuid has no preconditions and cannot fail.
    unsafe { libc::geteuid() }
}

/// Why a path is no directory that only user `uid` can change, if so.
fn fault(meta: &Metadata, uid: u32) -> Option<String> {
    if meta.is_symlink() {
        return Some("is a symbolic link".to_owned());
    }
    if !meta.is_dir() {
        return Some("is no directory".to_owned());
    }
    if meta.uid() != uid {
        return Some(format!(
            "belongs to user {}, not to user {uid}, who runs the daemon",
            meta.uid()
        ));
    }
    let mode = meta.permissions().mode();
    (mode & 0o022 != 0).then(|| format!("can be written by others (mode {:03o})", mode & 0o777))
}

/// Makes a directory (and those above it) unless it is there; refuses one that is not ours alone.
pub(crate) fn make_private(dir: &Path, mode: u32) -> Result<()> {
    make_private_for(dir, mode, "--run-dir")
}

/// The same for a directory that is named with another option.
pub fn make_private_for(dir: &Path, mode: u32, option: &str) -> Result<()> {
    let fail = |e: std::io::Error| {
        Error::unavailable(
            format!("cannot create the directory {}: {e}", dir.display()),
            format!("name a directory you may write with {option}"),
        )
    };
    // Without a slash or dot at its end, which would follow a link.
    let plain: PathBuf = dir.components().collect();
    DirBuilder::new()
        .recursive(true)
        .mode(mode)
        .create(&plain)
        .map_err(fail)?;
    let meta = std::fs::symlink_metadata(&plain).map_err(fail)?;
    match fault(&meta, own_uid()) {
        None => Ok(()),
        Some(fault) => Err(Error::refused(
            format!(
                "the directory {} {fault}, and what is in it could be replaced",
                plain.display()
            ),
            format!("name a directory only you can write with {option}, or remove this one"),
        )),
    }
}

/// The control socket in a run directory.
pub fn api_socket(dir: &Path) -> PathBuf {
    dir.join("api.sock")
}

/// The second service's socket in a run directory.
pub fn second_socket(dir: &Path) -> PathBuf {
    dir.join("monitor.sock")
}

/// The NBD socket in a run directory.
pub fn nbd_socket(dir: &Path) -> PathBuf {
    dir.join(hearth_nbd::SOCKET)
}

/// The directory of the vhost-user sockets in a run directory.
pub fn vhost_dir(dir: &Path) -> PathBuf {
    dir.join(hearth_vhost::DIRECTORY)
}

/// The directory of the sockets of image processes in a run directory, as an absolute path.
pub fn images_dir(dir: &Path) -> PathBuf {
    let dir = dir.join("images");
    std::path::absolute(&dir).unwrap_or(dir)
}

/// The vhost-user socket of a disk in a run directory.
pub fn vhost_socket(dir: &Path, disk: &str) -> PathBuf {
    dir.join(hearth_vhost::socket_name(disk))
}

/// A run directory in use by this process. Removes its sockets when dropped.
#[derive(Debug)]
pub struct RunDir {
    dir: PathBuf,
    /// Holds the lock.
    pid: File,
    sockets: Arc<Sockets>,
    bound: Vec<SocketFile>,
}

impl RunDir {
    /// Creates the directory if needed, makes sure that it is ours alone, and takes its lock. Those
    /// who have rights get through it.
    pub fn claim(dir: &Path, rights: &Rights) -> Result<RunDir> {
        RunDir::claim_from(None, Arc::default(), dir, rights)
    }

    /// The same for a program that takes the place of another one: `lock` is the directory's, held already, and
    /// `sockets` may have some that listen there.
    pub fn claim_from(
        lock: Option<File>,
        sockets: Arc<Sockets>,
        dir: &Path,
        rights: &Rights,
    ) -> Result<RunDir> {
        let fail = |what: &str, e: std::io::Error| {
            Error::unavailable(
                format!("cannot {what} the run directory {}: {e}", dir.display()),
                "name a directory you may write with --run-dir",
            )
        };
        make_private(dir, 0o750)?;
        let path = dir.join("hearth.pid");
        let new = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o644)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&path)
            .map_err(|e| fail("write into", e))?;
        // Held at every moment: else somebody could come in between.
        let mut pid = match lock.filter(|held| is_same(held, &new)) {
            Some(held) => held,
            None => new,
        };
        if !self::lock(&pid) {
            let mut owner = String::new();
            let _ = Read::by_ref(&mut pid).take(16).read_to_string(&mut owner);
            return Err(Error::conflict(
                format!(
                    "another hearth daemon (pid {}) is using {}",
                    owner.trim(),
                    dir.display()
                ),
                "stop it first, or name another directory with --run-dir",
            ));
        }
        let write = |file: &mut File| -> std::io::Result<()> {
            file.set_len(0)?;
            file.rewind()?;
            writeln!(file, "{}", std::process::id())
        };
        write(&mut pid).map_err(|e| fail("write into", e))?;
        // It may have been open to others before; what they made below it would still be theirs.
        make_private(&images_dir(dir), 0o700)?;
        make_below(&vhost_dir(dir), rights)?;
        open_for(dir, rights.run_dir_mode()).map_err(|e| fail("let others through", e))?;
        Ok(RunDir {
            dir: dir.to_owned(),
            pid,
            sockets,
            bound: Vec::new(),
        })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// The file with our pid.
    pub(crate) fn pid_file(&self) -> std::io::Result<File> {
        self.pid.try_clone()
    }

    /// The sockets in it, and others, that may outlive this program.
    pub fn sockets(&self) -> &Arc<Sockets> {
        &self.sockets
    }

    /// Gives the lock to whoever goes on with it.
    pub(crate) fn into_lock(self) -> File {
        self.pid
    }

    /// Listens on `path`, replacing a socket nobody listens on.
    pub fn listen(&mut self, path: &Path, access: Access) -> Result<UnixListener> {
        let name = path.strip_prefix(&self.dir).unwrap_or(path);
        let Socket { listener, path } = self.sockets.unix(name, path, access)?;
        self.bound.push(path);
        Ok(listener)
    }
}

/// Are these the same file?
fn is_same(a: &File, b: &File) -> bool {
    let identity = |file: &File| file.metadata().map(|m| (m.dev(), m.ino()));
    matches!((identity(a), identity(b)), (Ok(a), Ok(b)) if a == b)
}

/// Makes a directory for sockets in a run directory that is ours, unless it is there. Those who may use
/// disks get through it.
pub(crate) fn make_below(dir: &Path, rights: &Rights) -> Result<()> {
    make_private(dir, 0o750)?;
    open_for(dir, rights.sockets_dir_mode()).map_err(|e| {
        Error::unavailable(
            format!(
                "cannot let others through the directory {}: {e}",
                dir.display()
            ),
            "name a directory you may write with --run-dir",
        )
    })
}

/// Adds to a directory's mode what those who have rights need. What its owner allowed beyond that
/// stays.
fn open_for(dir: &Path, mode: u32) -> std::io::Result<()> {
    let has = std::fs::symlink_metadata(dir)?.permissions().mode() & 0o777;
    if has & 0o111 == has & 0o111 | mode & 0o111 {
        return Ok(());
    }
    std::fs::set_permissions(dir, Permissions::from_mode(has | mode & 0o111))
}

/// Takes an exclusive lock on an open file for as long as it is open; false if another has it.
pub(crate) fn lock(file: &File) -> bool {
    // SAFETY: the descriptor is open for the duration of the call; flock touches no memory.
    unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) == 0 }
}

/// Listens on a socket in a run directory this process has claimed.
pub fn listen(path: &Path, access: Access) -> Result<UnixListener> {
    let fail = |e: std::io::Error| {
        Error::unavailable(
            format!("cannot listen on {}: {e}", path.display()),
            "name a directory you may write with --run-dir",
        )
    };
    if path.as_os_str().len() > SOCKET_PATH_MAX {
        return Err(Error::invalid(
            format!(
                "the socket path {} is longer than {SOCKET_PATH_MAX} bytes",
                path.display()
            ),
            "name a shorter directory with --run-dir",
        ));
    }
    match std::fs::symlink_metadata(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => {}
        Err(e) => return Err(fail(e)),
        Ok(meta) if !meta.file_type().is_socket() => {
            return Err(Error::conflict(
                format!("{} exists and is no socket", path.display()),
                "remove it, or name another directory with --run-dir",
            ));
        }
        Ok(_) => {
            let start = Instant::now();
            while UnixStream::connect(path).is_ok() {
                if start.elapsed() > LISTENER_WAIT {
                    return Err(Error::conflict(
                        format!("another program is listening on {}", path.display()),
                        "stop it first, or name another directory with --run-dir",
                    ));
                }
                std::thread::sleep(LISTENER_POLL);
            }
            std::fs::remove_file(path).map_err(fail)?;
        }
    }
    rights::bind(path, access).map_err(|e| match (e.kind(), access.group) {
        (ErrorKind::PermissionDenied, Some(gid)) => Error::unavailable(
            format!("cannot give {} to group {gid}: {e}", path.display()),
            "be a member of that group, or run the daemon as root",
        ),
        _ => fail(e),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    /// Nobody has rights but we.
    const NOBODY: &Rights = &Rights {
        guests: None,
        control: None,
        second: None,
    };

    #[test]
    fn second_claim_is_refused_and_names_the_first() {
        let tmp = tempfile::tempdir().unwrap();
        let dir = tmp.path().join("a/b");
        let first = RunDir::claim(&dir, NOBODY).unwrap();
        assert_eq!(
            std::fs::metadata(&dir).unwrap().permissions().mode() & 0o777,
            0o750
        );
        let error = RunDir::claim(&dir, NOBODY).unwrap_err();
        assert_eq!(error.kind, Kind::Conflict);
        assert!(
            error.what.contains(&std::process::id().to_string()),
            "{error}"
        );
        drop(first);
        RunDir::claim(&dir, NOBODY).unwrap();
    }

    fn refusal(dir: &Path) -> String {
        let error = RunDir::claim(dir, NOBODY).unwrap_err();
        assert_eq!(error.kind, Kind::Refused, "{error}");
        assert!(error.remedy.contains("--run-dir"), "{error}");
        error.what
    }

    #[test]
    fn a_directory_others_can_write_is_refused() {
        let tmp = tempfile::tempdir().unwrap();
        let dir = tmp.path().join("run");
        std::fs::create_dir(&dir).unwrap();
        for mode in [0o770, 0o702, 0o1777] {
            std::fs::set_permissions(&dir, Permissions::from_mode(mode)).unwrap();
            assert!(refusal(&dir).contains("by others"), "{mode:o}");
        }
        std::fs::set_permissions(&dir, Permissions::from_mode(0o755)).unwrap();
        RunDir::claim(&dir, NOBODY).unwrap();
        for below in ["images", "vhost"] {
            std::fs::set_permissions(dir.join(below), Permissions::from_mode(0o777)).unwrap();
            assert!(refusal(&dir).contains(below));
            std::fs::remove_dir(dir.join(below)).unwrap();
        }
    }

    #[test]
    fn those_who_have_rights_get_through() {
        let tmp = tempfile::tempdir().unwrap();
        let dir = tmp.path().join("run");
        let mode = |dir: &Path| std::fs::metadata(dir).unwrap().permissions().mode() & 0o777;
        let guests = Rights {
            guests: Some(36),
            ..*NOBODY
        };
        RunDir::claim(&dir, &guests).unwrap();
        // Through it, but not into it: nobody lists or writes it.
        assert_eq!(mode(&dir) & 0o023, 0o001);
        assert_eq!(mode(&vhost_dir(&dir)) & 0o023, 0o001);
        assert_eq!(mode(&images_dir(&dir)), 0o700);
    }

    #[test]
    fn a_directory_of_somebody_else_is_refused() {
        let tmp = tempfile::tempdir().unwrap();
        let meta = std::fs::symlink_metadata(tmp.path()).unwrap();
        assert_eq!(fault(&meta, meta.uid()), None);
        let other = fault(&meta, meta.uid() + 1).unwrap();
        assert!(other.contains("belongs to user"), "{other}");
    }

    #[test]
    fn links_are_not_followed() {
        let tmp = tempfile::tempdir().unwrap();
        let victim = tmp.path().join("victim");
        std::fs::create_dir(&victim).unwrap();
        std::fs::write(victim.join("1.sock"), b"precious").unwrap();
        let run = tmp.path().join("run");
        for name in ["run", "run/", "run/."] {
            std::os::unix::fs::symlink(&victim, &run).unwrap();
            assert!(refusal(&tmp.path().join(name)).contains("symbolic link"));
            std::fs::remove_file(&run).unwrap();
        }
        for below in ["images", "vhost"] {
            let _ = std::fs::remove_dir_all(&run);
            std::fs::create_dir(&run).unwrap();
            std::fs::set_permissions(&run, Permissions::from_mode(0o755)).unwrap();
            std::os::unix::fs::symlink(&victim, run.join(below)).unwrap();
            assert!(refusal(&run).contains("symbolic link"));
        }
        assert_eq!(std::fs::read(victim.join("1.sock")).unwrap(), b"precious");
        assert_eq!(std::fs::read_dir(&victim).unwrap().count(), 1);
    }

    #[test]
    fn stale_socket_is_replaced_live_one_is_not() {
        let tmp = tempfile::tempdir().unwrap();
        let mut run = RunDir::claim(tmp.path(), NOBODY).unwrap();
        let path = api_socket(tmp.path());
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let live = run.listen(&path, NOBODY.control()).unwrap();
        assert_eq!(
            run.listen(&path, NOBODY.control()).unwrap_err().kind,
            Kind::Conflict
        );
        drop(live);
        drop(run);
        assert!(!path.exists());
    }

    #[test]
    fn files_that_are_no_sockets_are_left_alone() {
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("api.sock");
        std::fs::write(&path, b"precious").unwrap();
        assert_eq!(
            listen(&path, NOBODY.control()).unwrap_err().kind,
            Kind::Conflict
        );
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn long_paths_are_refused_clearly() {
        let path = PathBuf::from(format!("/tmp/{}/api.sock", "x".repeat(120)));
        assert_eq!(
            listen(&path, NOBODY.control()).unwrap_err().kind,
            Kind::Invalid
        );
    }
}
