//! Listening sockets that outlive the program.
//!
//! Whoever connects while one program takes the place of another waits, and is not refused: the sockets go on
//! listening, for the next program has their descriptors. So each one is known here by a name, with a
//! descriptor of its own, from when it begins to listen until its file is removed.

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hearth_volume::{Socket, SocketFile};

use crate::error::Result;
use crate::rights::Access;
use crate::rundir;

#[derive(Debug, Default)]
struct State {
    /// What the program before left.
    inherited: BTreeMap<String, OwnedFd>,
    /// What listens now.
    listening: BTreeMap<String, OwnedFd>,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Sockets {
    state: Mutex<State>,
    /// They stay for the next program.
    staying: AtomicBool,
}

impl Sockets {
    /// None yet, but for those the program before has left.
    pub fn inheriting(inherited: BTreeMap<String, OwnedFd>) -> Arc<Sockets> {
        Arc::new(Sockets {
            state: Mutex::new(State {
                inherited,
                ..State::default()
            }),
            staying: AtomicBool::new(false),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, name: &str, socket: &impl AsFd) {
        match socket.as_fd().try_clone_to_owned() {
            Ok(fd) => {
                self.lock().listening.insert(name.to_owned(), fd);
            }
            Err(e) => tracing::warn!("{name} will not outlive an upgrade: {e}"),
        }
    }

    fn take(&self, name: &str) -> Option<OwnedFd> {
        self.lock().inherited.remove(name)
    }

    /// Listens on `path`, for those who have `access`; `name` is what other programs know the socket by.
    pub fn unix(self: &Arc<Sockets>, name: &Path, path: &Path, access: Access) -> Result<Socket> {
        let name = format!("unix:{}", name.display());
        let left = self
            .take(&name)
            .map(UnixListener::from)
            .filter(|listener| take_up(listener, path, access));
        let listener = match left {
            Some(listener) => listener,
            None => rundir::listen(path, access)?,
        };
        self.note(&name, &listener);
        let sockets = self.clone();
        let gone = move |path: &Path| sockets.gone(&name, path);
        Ok(Socket {
            listener,
            path: SocketFile::new(path, gone),
        })
    }

    /// Listens on a TCP address.
    pub fn tcp(&self, address: SocketAddr) -> std::io::Result<TcpListener> {
        let name = format!("tcp:{address}");
        let same = |listener: &TcpListener| {
            let now = listener.local_addr();
            listens(listener)
                && now.is_ok_and(|now| {
                    now.ip() == address.ip()
                        && (address.port() == 0 || now.port() == address.port())
                })
        };
        let left = self.take(&name).map(TcpListener::from).filter(same);
        let listener = match left {
            Some(listener) => listener,
            None => hearth_io::peer::listen(address)?,
        };
        self.note(&name, &listener);
        Ok(listener)
    }

    /// Nobody listens on a socket any more.
    fn gone(&self, name: &str, path: &Path) {
        if self.staying.load(Ordering::Relaxed) {
            return;
        }
        self.lock().listening.remove(name);
        // Where it is gone already there is nothing to do.
        let _ = std::fs::remove_file(path);
    }

    /// From now on sockets and their files stay where they are, whoever is done with them.
    pub fn stay(&self) {
        self.staying.store(true, Ordering::Relaxed);
    }

    /// Nothing listens on a TCP address any more.
    pub fn close_tcp(&self) {
        self.lock()
            .listening
            .retain(|name, _| !name.starts_with("tcp:"));
    }

    /// There is no next program: nothing listens any more.
    pub fn give_up(&self) {
        self.staying.store(false, Ordering::Relaxed);
        for (name, fd) in self.leave() {
            remove(&name, fd);
        }
    }

    /// Everything that listens, and that this program need not hold any longer.
    pub fn leave(&self) -> Vec<(String, OwnedFd)> {
        std::mem::take(&mut self.lock().listening)
            .into_iter()
            .collect()
    }

    /// What the program before left, and nobody has taken up, listens no more.
    pub fn tidy(&self) {
        let left = std::mem::take(&mut self.lock().inherited);
        for (name, fd) in left {
            remove(&name, fd);
        }
    }
}

/// Removes the file of a socket that nobody will listen on.
fn remove(name: &str, fd: OwnedFd) {
    let address = UnixListener::from(fd).local_addr();
    if let Some(path) = address.as_ref().ok().and_then(|a| a.as_pathname())
        && name.starts_with("unix:")
    {
        let _ = std::fs::remove_file(path);
    }
}

/// Is this a socket that listens on the file `path`? Then it is for those who have `access`.
fn take_up(listener: &UnixListener, path: &Path, access: Access) -> bool {
    let bound = listener.local_addr();
    let bound_there = bound.is_ok_and(|a| a.as_pathname() == Some(path));
    let there = std::fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket());
    // In this order: never for more than have access, at no moment.
    listens(listener)
        && bound_there
        && there
        && std::os::unix::fs::chown(path, None, access.group).is_ok()
        && std::fs::set_permissions(path, Permissions::from_mode(access.mode)).is_ok()
}

fn listens(socket: &impl AsRawFd) -> bool {
    let (mut value, mut len): (libc::c_int, _) = (0, size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: an out-pointer to a C int with its size; the descriptor is open for the call.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ACCEPTCONN,
            (&raw mut value).cast(),
            &mut len,
        )
    };
    rc == 0 && value != 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    const OURS: Access = Access {
        mode: 0o600,
        group: None,
    };

    #[test]
    fn a_socket_goes_to_the_next_program_with_who_waits_at_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        let name = Path::new("a.sock");
        let first = Sockets::inheriting(BTreeMap::new());
        let Socket {
            listener,
            path: file,
        } = first.unix(name, &path, OURS).unwrap();
        first.stay();
        drop((listener, file));
        let _waiting = UnixStream::connect(&path).unwrap();
        let left: BTreeMap<String, OwnedFd> = first.leave().into_iter().collect();
        drop(first);
        let second = Sockets::inheriting(left);
        let socket = second.unix(name, &path, OURS).unwrap();
        socket.listener.set_nonblocking(true).unwrap();
        socket.listener.accept().expect("who waited is there");
        second.tidy();
        drop(socket);
        assert!(!path.exists() && second.leave().is_empty());
    }

    #[test]
    fn what_was_left_and_is_not_wanted_goes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        let left = UnixListener::bind(&path).unwrap();
        let inherited = BTreeMap::from([("unix:a.sock".to_owned(), OwnedFd::from(left))]);
        Sockets::inheriting(inherited).tidy();
        assert!(!path.exists());
    }

    #[test]
    fn what_is_no_such_socket_is_not_taken_up() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("a.sock"), dir.path().join("b.sock"));
        let elsewhere = UnixListener::bind(&other).unwrap();
        let (one, _end) = UnixStream::pair().unwrap();
        for fd in [OwnedFd::from(elsewhere), OwnedFd::from(one)] {
            let sockets = Sockets::inheriting(BTreeMap::from([("unix:a.sock".to_owned(), fd)]));
            let socket = sockets.unix(Path::new("a.sock"), &path, OURS).unwrap();
            UnixStream::connect(&path).expect("it listens where it should");
            drop(socket);
        }
    }
}
