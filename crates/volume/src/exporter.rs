//! A protocol as the daemon sees it, and the daemon as a protocol sees it.

use std::fmt;
use std::ops::Deref;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_reactor::Reactors;

use crate::{Fault, Volume};

/// The word a protocol goes by, in the API, in messages and in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Protocol(pub &'static str);

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

/// A protocol volumes are served over.
///
/// The daemon offers it every volume there is, then [opens](Self::open) it, and from then on tells it
/// of every volume that comes, grows and goes. Calls come from threads of the control plane, several at
/// a time; those about one volume come one after the other.
///
/// Clients are not asked for here: each is [admitted](Volume::admit) by its volume, which knows those of
/// all protocols.
pub trait Exporter: Send + Sync {
    /// Its name.
    fn protocol(&self) -> Protocol;
    /// Lets clients find a volume. One that is on offer already stays so, with those clients. Fails
    /// for this protocol alone: the volume is still offered over the others.
    fn offer(&self, volume: Arc<dyn Volume>) -> Result<(), Fault>;
    /// Takes no more clients for a volume; those that are connected stay.
    fn withdraw(&self, name: &str);
    /// Ends a volume's connections, where its being [gone](Volume::gone) does not end them, and returns
    /// when that is done, or after a while that is bounded.
    fn disconnect(&self, name: &str) {
        let _ = name;
    }
    /// Tells a volume's clients of its new size, as far as the protocol has words for it.
    fn resized(&self, name: &str) {
        let _ = name;
    }
    /// Everything that was there is on offer: clients may come.
    fn open(&self) {}
    /// Takes no more clients at all; its sockets are gone.
    fn close(&self);
    /// The same for a daemon that another program takes the place of. Sockets that [data threads](Reactors)
    /// listen on are left to them, and so are connections that can go over.
    fn hand_over(&self) {
        self.close();
    }
    /// Ends all connections that are not sessions of the data threads (these end by themselves);
    /// requests in flight are answered first. Called once, after [`close`](Self::close).
    fn stop(&self) {}
}

/// A unix socket that listens.
#[derive(Debug)]
pub struct Socket {
    /// Where connections come in.
    pub listener: UnixListener,
    /// Its file. Who stops listening drops it.
    pub path: SocketFile,
}

/// Told when nobody listens on a file any more.
type Gone = Box<dyn FnOnce(&Path) + Send + Sync>;

/// The file of a socket that listens. Dropped, it is removed, unless another program goes on listening there.
pub struct SocketFile {
    path: PathBuf,
    gone: Option<Gone>,
}

impl SocketFile {
    /// A file; `gone` is called when nobody listens any more.
    pub fn new(path: &Path, gone: impl FnOnce(&Path) + Send + Sync + 'static) -> SocketFile {
        SocketFile {
            path: path.to_owned(),
            gone: Some(Box::new(gone)),
        }
    }
}

impl Deref for SocketFile {
    type Target = Path;
    fn deref(&self) -> &Path {
        &self.path
    }
}

impl fmt::Debug for SocketFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.path.fmt(f)
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if let Some(gone) = self.gone.take() {
            gone(&self.path);
        }
    }
}

/// What an exporter may ask of the daemon it runs in.
pub trait Host: Send + Sync {
    /// The data threads.
    fn reactors(&self) -> &Arc<Reactors>;
    /// Listens on a unix socket in the run directory, for those who may use disks. `name` is relative
    /// to it, with at most one directory in front, which is made if need be. A left-over of a daemon
    /// that died is replaced.
    fn listen(&self, name: &Path) -> Result<Socket, Fault>;
}
