//! What a file is made of: one open file, or one in each of two trees.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use hearth_io::{Claim, OpenError};
use hearth_nfs::handle::Key;
use hearth_nfs::local::Directory;
use hearth_nfs::tree::{Outcome, Tree};
use hearth_nfs::v3::Attributes;
use rustix::fs::{FallocateFlags, Mode, OFlags, SeekFrom, Stat, Timestamps};

use crate::twin::scrub::Reconciled;
use crate::twin::{Twin, TwinFile};

/// See the module.
pub enum Body {
    /// A file of one directory.
    One(File),
    /// The same file in two.
    Two(TwinFile),
}

/// A directory, or two, as somebody needs them who keeps some of their files in a cache.
pub trait Under: Tree {
    /// A regular file, open for reading and writing, on behalf of nobody; for reading alone if it cannot be written.
    fn open_body(&self, key: &Key) -> Outcome<Body>;
    /// What is known of an open file.
    fn attributes_of(&self, body: &Body) -> Outcome<Attributes>;
    /// The number that tells clients whether unstable data may be lost.
    fn verifier(&self) -> [u8; 8];
    /// Unstable data may have been lost.
    fn lost_unstable(&self);
    /// The two trees, if there are two.
    fn twin(&self) -> Option<&Twin> {
        None
    }
}

impl Under for Directory {
    fn open_body(&self, key: &Key) -> Outcome<Body> {
        Ok(Body::One(self.open_regular(key)?))
    }

    fn attributes_of(&self, body: &Body) -> Outcome<Attributes> {
        match body {
            Body::One(file) => self.attributes_of_open(file),
            Body::Two(file) => file.attributes(),
        }
    }

    fn verifier(&self) -> [u8; 8] {
        self.write_verifier()
    }

    fn lost_unstable(&self) {
        self.unstable_lost();
    }
}

impl Under for Twin {
    fn twin(&self) -> Option<&Twin> {
        Some(self)
    }

    fn open_body(&self, key: &Key) -> Outcome<Body> {
        Ok(Body::Two(self.open_regular(key)?))
    }

    fn attributes_of(&self, body: &Body) -> Outcome<Attributes> {
        match body {
            Body::One(_) => Err(hearth_nfs::v3::Status::ServerFault),
            Body::Two(file) => file.attributes(),
        }
    }

    fn verifier(&self) -> [u8; 8] {
        self.write_verifier()
    }

    fn lost_unstable(&self) {
        self.unstable_lost();
    }
}

/// A file system that cannot tell has data everywhere.
pub(crate) fn next_data(file: &File, from: u64) -> Option<u64> {
    match rustix::fs::seek(file, SeekFrom::Data(from)) {
        Ok(at) => Some(at),
        Err(rustix::io::Errno::NXIO) => None,
        Err(_) => Some(from),
    }
}

/// True if it is open for reading alone.
pub(crate) fn is_read_only(file: &File) -> bool {
    rustix::fs::fcntl_getfl(file).is_ok_and(|flags| flags & OFlags::RWMODE == OFlags::RDONLY)
}

/// Makes an open file durable. One that is open for reading alone has nothing of ours, and some file systems that are
/// always read-only refuse to sync.
pub(crate) fn sync_all(file: &File) -> io::Result<()> {
    match is_read_only(file) {
        true => Ok(()),
        false => file.sync_all(),
    }
}

/// Opens for writing, under the same descriptor, a file that is open for reading alone.
fn make_writable(file: &File) -> io::Result<()> {
    let writable = File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    // SAFETY: takes numbers. The descriptor stays `file`'s own, and both stand for the same file.
    let same = unsafe { libc::dup3(writable.as_raw_fd(), file.as_raw_fd(), libc::O_CLOEXEC) };
    match same {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn path_of(file: &File) -> io::Result<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Locks an open file.
pub(crate) fn claim(file: &File) -> Result<Claim, OpenError> {
    // Its name is for people.
    let path = path_of(file).unwrap_or_else(|_| "a file of the datastore".into());
    hearth_io::file::claim_open(file, &path, is_read_only(file))
}

fn os<T>(result: rustix::io::Result<T>) -> io::Result<T> {
    result.map_err(io::Error::from)
}

impl Body {
    /// What it looks like, and in which tree.
    pub(crate) fn stat(&self) -> io::Result<(Stat, usize)> {
        match self {
            Body::One(file) => Ok((os(rustix::fs::fstat(file))?, 0)),
            Body::Two(file) => file.stat(),
        }
    }

    pub(crate) fn path(&self) -> Option<PathBuf> {
        match self {
            Body::One(file) => path_of(file).ok(),
            Body::Two(file) => file.path(),
        }
    }

    /// The files it is, as far as they are open.
    pub(crate) fn each_open(&self, see: &mut dyn FnMut(&File)) {
        match self {
            Body::One(file) => see(file),
            Body::Two(file) => file.each_open(see),
        }
    }

    /// Calls `see` with the files it is, and with each that is opened for it later.
    pub(crate) fn when_opened(&self, see: impl Fn(&File) + Send + Sync + 'static) {
        match self {
            Body::One(file) => see(file),
            Body::Two(file) => file.when_opened(see),
        }
    }

    pub(crate) fn has_place(&self, from: u64, to: u64) -> bool {
        match self {
            Body::One(file) => {
                let hole = rustix::fs::seek(file, SeekFrom::Hole(from));
                hole.is_ok_and(|hole| hole >= to)
            }
            Body::Two(file) => file.has_place(from, to),
        }
    }

    /// Where the next data is from an offset on, if there is any.
    pub(crate) fn next_data(&self, from: u64) -> Option<u64> {
        match self {
            Body::One(file) => next_data(file, from),
            Body::Two(file) => file.next_data(from),
        }
    }

    pub(crate) fn set_times(&self, times: Timestamps) -> io::Result<()> {
        match self {
            Body::One(file) => os(rustix::fs::futimens(file, &times)),
            Body::Two(file) => file.set_times(times),
        }
    }

    pub(crate) fn set_mode(&self, mode: u32) -> io::Result<()> {
        match self {
            Body::One(file) => os(rustix::fs::fchmod(file, Mode::from_raw_mode(mode))),
            Body::Two(file) => file.set_mode(mode),
        }
    }

    pub(crate) fn set_len(&self, len: u64) -> io::Result<()> {
        match self {
            Body::One(file) => file.set_len(len),
            Body::Two(file) => file.set_len(len),
        }
    }

    pub(crate) fn sync_all(&self) -> io::Result<()> {
        match self {
            Body::One(file) => sync_all(file),
            Body::Two(file) => file.sync(),
        }
    }

    pub(crate) fn allocate(&self, how: FallocateFlags, at: u64, len: u64) -> io::Result<()> {
        match self {
            Body::One(file) => os(rustix::fs::fallocate(file, how, at, len)),
            Body::Two(file) => file.allocate(how, at, len),
        }
    }

    /// Reads a range; behind the end there are zeros.
    pub(crate) fn read(&self, mut at: u64, mut rest: &mut [u8]) -> io::Result<()> {
        let file = match self {
            Body::One(file) => file,
            Body::Two(file) => {
                let data = file.read(at, rest.len())?;
                let (there, behind) = rest.split_at_mut(data.len());
                there.copy_from_slice(&data);
                behind.fill(0);
                return Ok(());
            }
        };
        while !rest.is_empty() {
            match rustix::io::preadv(file, &mut [IoSliceMut::new(rest)], at) {
                Ok(0) => {
                    rest.fill(0);
                    return Ok(());
                }
                Ok(n) => {
                    at += n as u64;
                    rest = rest.get_mut(n..).unwrap_or_default();
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    /// Compares a range in two trees; none if there are not two, or one is not current.
    pub(crate) fn reconcile(
        &self,
        offset: u64,
        len: u64,
        cache: &dyn hearth_mirror::Cache,
        prefer: Option<usize>,
    ) -> Option<Reconciled> {
        match self {
            Body::One(_) => None,
            Body::Two(file) => file.reconcile(offset, len, cache, prefer),
        }
    }

    /// Writes pieces that lie one behind the other.
    pub(crate) fn write(&self, pieces: &[(u64, &[u8])]) -> io::Result<()> {
        let file = match self {
            Body::One(file) => file,
            Body::Two(file) => {
                let Some((at, _)) = pieces.first() else {
                    return Ok(());
                };
                // What hangs in a tree keeps what it was given: its own copy.
                let data: Vec<u8> = pieces.iter().flat_map(|(_, data)| *data).copied().collect();
                return match data.is_empty() {
                    true => Ok(()),
                    false => file.write(*at, data),
                };
            }
        };
        for (at, data) in pieces {
            let (mut at, mut rest) = (*at, *data);
            while !rest.is_empty() {
                match rustix::io::pwritev(file, &[IoSlice::new(rest)], at) {
                    Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                    Ok(n) => {
                        rest = rest.get(n..).unwrap_or_default();
                        at += n as u64;
                    }
                    Err(rustix::io::Errno::INTR) => {}
                    Err(e) => return Err(e.into()),
                }
            }
        }
        Ok(())
    }

    /// True if it is open for reading alone. A file of two trees is opened for writing when it is first written.
    pub(crate) fn is_read_only(&self) -> bool {
        match self {
            Body::One(file) => is_read_only(file),
            Body::Two(_) => false,
        }
    }

    /// Opens it for writing if it is open for reading alone. Its locks are gone then.
    pub(crate) fn make_writable(&self) -> io::Result<()> {
        match self {
            Body::One(file) => make_writable(file),
            Body::Two(_) => Ok(()),
        }
    }

    /// Locks it, so that no other program on this host can use it as an image, until it is closed.
    pub(crate) fn claim(&self) -> Result<Vec<Claim>, OpenError> {
        match self {
            Body::One(file) => Ok(vec![claim(file)?]),
            // It keeps them itself: they change with its files.
            Body::Two(file) => file.claim().map(|()| Vec::new()),
        }
    }
}
