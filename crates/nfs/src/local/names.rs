//! Names: made, removed, moved, listed.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use hearth_trees::names;
use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, RawDir, SeekFrom, Timespec, Timestamps, Uid,
};
use rustix::io::Errno;

use super::Directory;
use super::changes::Change;
use super::entry::Node;
use crate::access::{Want, Who};
use crate::handle::Key;
use crate::tree::{Changed, Entry, Found, Outcome};
use crate::v3::{Attributes, Before, Create, How, Kind, SetAttributes, SetTime, Status, Wcc};

/// Bytes of a directory read at once.
const LISTING: usize = 32 << 10;
/// Mode of a new file whose creator does not say.
const FILE_MODE: u32 = 0o644;
const DIRECTORY_MODE: u32 = 0o755;
/// Who runs the file runs it as its owner (set-user-ID) or its group (set-group-ID).
const SET_ID: u32 = 0o6000;
/// What is made in a directory gets its group.
const SET_GROUP_ID: u32 = 0o2000;

/// A directory that is about to change.
struct Changing<'a> {
    dir: Node,
    change: Change<'a>,
    before: Before,
}

fn sync(fd: &impl AsFd) -> Outcome<()> {
    Ok(rustix::fs::fsync(fd).map_err(io::Error::from)?)
}

fn os<T>(result: rustix::io::Result<T>) -> Outcome<T> {
    result.map_err(|error| io::Error::from(error).into())
}

/// A mode as somebody may give it: a program that runs as its owner or group is made by root alone, for the owner and
/// groups that others name are proved by nothing. The `inherited` bits are not given but there already.
fn mode_by(who: &Who, mode: u32, inherited: u32) -> u32 {
    match who.is_root() {
        true => mode,
        false => mode & !SET_ID | mode & inherited,
    }
}

/// The directory's steps, for those who know their order.
struct Steps<'a>(&'a Directory);

impl names::Names for Steps<'_> {
    type Node = Node;
    type Error = Status;

    fn find(&self, dir: &Node, name: &[u8]) -> Outcome<Node> {
        self.0.named(dir, name)
    }

    fn unlink(&self, dir: &Node, name: &[u8], directory: bool) -> Outcome<()> {
        let flags = if directory {
            AtFlags::REMOVEDIR
        } else {
            AtFlags::empty()
        };
        os(rustix::fs::unlinkat(&dir.fd, name, flags))
    }

    fn rename(&self, from: (&Node, &[u8]), to: (&Node, &[u8])) -> Outcome<()> {
        os(rustix::fs::renameat(&from.0.fd, from.1, &to.0.fd, to.1))
    }

    fn link(&self, file: &Node, dir: &Node, name: &[u8]) -> Outcome<()> {
        // Through the name among our open files, which takes no rights beyond those to the file.
        let own = format!(
            "/proc/self/fd/{}",
            std::os::fd::AsRawFd::as_raw_fd(&file.fd)
        );
        let follow = AtFlags::SYMLINK_FOLLOW;
        let cwd = rustix::fs::CWD;
        os(rustix::fs::linkat(cwd, own, &dir.fd, name, follow))
    }

    fn sync(&self, file: &Node) -> Outcome<()> {
        self.0.sync_node(file)
    }

    fn sync_names(&self, dir: &Node) -> Outcome<()> {
        sync(&dir.fd)
    }
}

/// An exclusive create's number, kept in the times of the file until its creator sets them. Some
/// file systems keep no more than 31 bits of each.
fn marks(verifier: [u8; 8]) -> (u32, u32) {
    let number = u64::from_be_bytes(verifier);
    (
        (number >> 32) as u32 & 0x7fff_ffff,
        number as u32 & 0x7fff_ffff,
    )
}

impl Directory {
    /// Changes a directory, and says what became of it.
    fn change<T>(
        &self,
        who: &Who,
        dir: &Key,
        work: impl FnOnce(&Node) -> Outcome<T>,
    ) -> Changed<T> {
        let changing = match self.begin(who, dir) {
            Ok(changing) => changing,
            Err(status) => {
                return Changed {
                    outcome: Err(status),
                    wcc: Wcc::default(),
                };
            }
        };
        let outcome = work(&changing.dir);
        Changed {
            outcome,
            wcc: self.end(changing),
        }
    }

    fn begin(&self, who: &Who, dir: &Key) -> Outcome<Changing<'_>> {
        // Looked at only after others can see that it is about to change.
        let change = self.changes.begin(dir);
        let dir = self.directory(dir)?;
        self.require(who, &dir, &[Want::Write, Want::Search])?;
        let before = dir.attributes.before();
        Ok(Changing {
            dir,
            change,
            before,
        })
    }

    fn end(&self, changing: Changing<'_>) -> Wcc {
        let after = self.refreshed(&changing.dir);
        let before = changing.change.alone().then_some(changing.before);
        Wcc { before, after }
    }

    pub(super) fn find(&self, who: &Who, dir: &Key, name: &[u8]) -> Outcome<Found> {
        let node = self.node(dir)?;
        if node.attributes.kind != Kind::Directory {
            return Err(Status::NotDir);
        }
        self.require(who, &node, &[Want::Search])?;
        let found = match name {
            b"." => node,
            b".." => self.above(&node)?,
            _ => self.named(&node, name)?,
        };
        Ok(Self::found(&found))
    }

    pub(super) fn make(
        &self,
        who: &Who,
        dir: &Key,
        name: &[u8],
        what: &Create<'_>,
    ) -> Changed<Found> {
        self.change(who, dir, |dir| match what {
            Create::File(how) => self.make_file(who, dir, name, how),
            Create::Directory(set) => {
                let make = || os(rustix::fs::mkdirat(&dir.fd, name, Mode::RWXU));
                let inherited = dir.attributes.mode & SET_GROUP_ID;
                let mode = set.mode.unwrap_or(DIRECTORY_MODE) | inherited;
                let set = SetAttributes {
                    mode: Some(mode),
                    size: None,
                    ..*set
                };
                self.settle(who, dir, name, &set, true, make)
            }
            Create::Link { to, set } => {
                if to.is_empty() || to.contains(&0) {
                    return Err(Status::Inval);
                }
                let make = || os(rustix::fs::symlinkat(*to, &dir.fd, name));
                // A link has no mode of its own.
                let set = SetAttributes {
                    mode: None,
                    size: None,
                    ..*set
                };
                self.settle(who, dir, name, &set, false, make)
            }
            Create::Socket(set) => self.make_special(who, dir, name, FileType::Socket, set),
            Create::Fifo(set) => self.make_special(who, dir, name, FileType::Fifo, set),
            // Whoever writes to our disks through a device would not be stopped by anything here.
            Create::Device { .. } => Err(Status::NotSupp),
            Create::Other => Err(Status::BadType),
        })
    }

    fn make_special(
        &self,
        who: &Who,
        dir: &Node,
        name: &[u8],
        kind: FileType,
        set: &SetAttributes,
    ) -> Outcome<Found> {
        let own = Mode::RUSR | Mode::WUSR;
        let make = || os(rustix::fs::mknodat(&dir.fd, name, kind, own, 0));
        let set = SetAttributes {
            mode: Some(set.mode.unwrap_or(FILE_MODE)),
            size: None,
            ..*set
        };
        self.settle(who, dir, name, &set, false, make)
    }

    fn make_file(&self, who: &Who, dir: &Node, name: &[u8], how: &How) -> Outcome<Found> {
        let flags =
            OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = rustix::fs::openat(&dir.fd, name, flags, Mode::RUSR | Mode::WUSR);
        match made {
            Ok(_) => {}
            Err(Errno::EXIST) => return self.is_there(who, dir, name, how),
            Err(error) => return Err(io::Error::from(error).into()),
        }
        let set = match how {
            How::Unchecked(set) | How::Guarded(set) => SetAttributes {
                mode: Some(set.mode.unwrap_or(FILE_MODE)),
                ..*set
            },
            How::Exclusive(verifier) => {
                let (accessed, modified) = marks(*verifier);
                let time = |seconds| SetTime::To(crate::v3::Time { seconds, nanos: 0 });
                SetAttributes {
                    mode: Some(FILE_MODE),
                    accessed: time(accessed),
                    modified: time(modified),
                    ..SetAttributes::default()
                }
            }
        };
        self.settle(who, dir, name, &set, false, || Ok(()))
    }

    /// A file that is to be created has a name already.
    fn is_there(&self, who: &Who, dir: &Node, name: &[u8], how: &How) -> Outcome<Found> {
        let node = self.named(dir, name)?;
        match how {
            How::Guarded(_) => Err(Status::Exist),
            How::Exclusive(verifier) => {
                let (accessed, modified) = marks(*verifier);
                let a = &node.attributes;
                let same = a.kind == Kind::Regular
                    && a.size == 0
                    && (a.accessed.seconds, a.modified.seconds) == (accessed, modified);
                if !same {
                    return Err(Status::Exist);
                }
                // The first answer may have been lost to a crash before it was durable.
                sync(&self.file(&node, OFlags::RDONLY)?)?;
                sync(&dir.fd)?;
                Ok(Self::found(&node))
            }
            How::Unchecked(set) => {
                if node.attributes.kind != Kind::Regular {
                    return Err(Status::Exist);
                }
                if set.size.is_some() {
                    let only = SetAttributes {
                        size: set.size,
                        ..SetAttributes::default()
                    };
                    self.set(who, &node, &only)?;
                }
                let attributes = self.refreshed(&node).unwrap_or(node.attributes);
                Ok(Found {
                    key: node.key,
                    attributes,
                })
            }
        }
    }

    /// Makes something, gives it its owner and attributes and makes it durable, or takes it away again.
    fn settle(
        &self,
        who: &Who,
        dir: &Node,
        name: &[u8],
        set: &SetAttributes,
        directory: bool,
        make: impl FnOnce() -> Outcome<()>,
    ) -> Outcome<Found> {
        // The group of a directory with the set-group bit is that of all in it.
        let inherited = dir.attributes.mode & SET_GROUP_ID;
        let gid = (inherited == 0).then_some(who.gid);
        let inherited = if directory { inherited } else { 0 };
        // Only root may give files away.
        let own = SetAttributes {
            mode: set.mode.map(|mode| mode_by(who, mode, inherited)),
            uid: Some(set.uid.filter(|_| who.is_root()).unwrap_or(who.uid)),
            gid: set
                .gid
                .filter(|gid| who.is_root() || who.is_in(*gid))
                .or(gid),
            ..*set
        };
        // Without root's rights all files are the daemon's own.
        let own = if self.privileged {
            own
        } else {
            SetAttributes {
                uid: None,
                gid: None,
                ..own
            }
        };
        let dress = |node: &Node| self.apply(node, &own);
        let node = names::create(&Steps(self), dir, name, directory, make, dress)?;
        let attributes = self.refreshed(&node).unwrap_or(node.attributes);
        Ok(Found {
            key: node.key,
            attributes,
        })
    }

    /// Changes what is asked, without asking who asks. The size first, the times last: each of
    /// the others changes them.
    pub(super) fn apply(&self, node: &Node, set: &SetAttributes) -> Outcome<()> {
        if let Some(size) = set.size {
            if size > i64::MAX as u64 {
                return Err(Status::FBig);
            }
            self.file(node, OFlags::WRONLY)?.set_len(size)?;
        }
        if set.uid.is_some() || set.gid.is_some() {
            // The numbers that mean "as it is" are nobody's.
            let valid = |id: Option<u32>| id.is_none_or(|id| id != u32::MAX);
            if !valid(set.uid) || !valid(set.gid) {
                return Err(Status::Inval);
            }
            let (uid, gid) = (set.uid.map(Uid::from_raw), set.gid.map(Gid::from_raw));
            os(rustix::fs::chownat(
                &node.fd,
                "",
                uid,
                gid,
                AtFlags::EMPTY_PATH,
            ))?;
        }
        // A link has no mode.
        if let Some(mode) = set.mode.filter(|_| node.attributes.kind != Kind::Link) {
            // What is open by path only is changed through its name among our open files.
            let own = format!(
                "/proc/self/fd/{}",
                std::os::fd::AsRawFd::as_raw_fd(&node.fd)
            );
            let mode = Mode::from_raw_mode(mode);
            os(rustix::fs::chmodat(
                rustix::fs::CWD,
                own,
                mode,
                AtFlags::empty(),
            ))?;
        }
        if set.accessed != SetTime::Keep || set.modified != SetTime::Keep {
            let to = |set| match set {
                SetTime::Keep => Timespec {
                    tv_sec: 0,
                    tv_nsec: rustix::fs::UTIME_OMIT,
                },
                SetTime::Now => Timespec {
                    tv_sec: 0,
                    tv_nsec: rustix::fs::UTIME_NOW,
                },
                SetTime::To(time) => Timespec {
                    tv_sec: i64::from(time.seconds),
                    tv_nsec: i64::from(time.nanos),
                },
            };
            for time in [set.accessed, set.modified] {
                if matches!(time, SetTime::To(time) if time.nanos >= 1_000_000_000) {
                    return Err(Status::Inval);
                }
            }
            let times = Timestamps {
                last_access: to(set.accessed),
                last_modification: to(set.modified),
            };
            os(rustix::fs::utimensat(
                &node.fd,
                "",
                &times,
                AtFlags::EMPTY_PATH,
            ))?;
        }
        Ok(())
    }

    /// Makes a file's attributes and data durable.
    pub(super) fn sync_node(&self, node: &Node) -> Outcome<()> {
        let flags = match node.attributes.kind {
            Kind::Regular => OFlags::RDONLY | OFlags::NONBLOCK,
            Kind::Directory => OFlags::RDONLY | OFlags::DIRECTORY,
            // These cannot be opened without effects; their file system can be synced.
            _ => return os(rustix::fs::syncfs(&self.root)),
        };
        let file: OwnedFd = self.open_key(&node.key, flags)?;
        self.synced(rustix::fs::fsync(&file).map_err(io::Error::from))
    }

    /// What a sync ended with. One that failed may have lost what was not committed.
    pub(super) fn synced(&self, result: io::Result<()>) -> Outcome<()> {
        result.map_err(|error| {
            tracing::error!(%error, "data could not be written back; clients will write it again");
            self.verifier.replace();
            Status::of(&error)
        })
    }

    pub(super) fn take_away(
        &self,
        who: &Who,
        dir: &Key,
        name: &[u8],
        directory: bool,
    ) -> Changed<()> {
        self.change(who, dir, |dir| {
            let victim = self.named(dir, name)?;
            self.require_removal(who, dir, &victim)?;
            names::remove(&Steps(self), dir, name, directory, || self.bury(&victim))
        })
    }

    /// A file has lost a name; if it was the last, nobody holds it open any longer.
    fn bury(&self, victim: &Node) {
        if victim.attributes.links <= 1 {
            drop(self.uncommitted.take(&victim.key));
        }
    }

    pub(super) fn move_name(
        &self,
        who: &Who,
        from: (&Key, &[u8]),
        to: (&Key, &[u8]),
    ) -> (Outcome<()>, Wcc, Wcc) {
        let (from_dir, to_dir) = match (self.begin(who, from.0), self.begin(who, to.0)) {
            (Ok(from), Ok(to)) => (from, to),
            (Err(status), _) | (_, Err(status)) => {
                return (Err(status), Wcc::default(), Wcc::default());
            }
        };
        let outcome = (|| {
            let (a, b) = (&from_dir.dir, &to_dir.dir);
            let moved = self.named(a, from.1)?;
            self.require_removal(who, a, &moved)?;
            let victim = match self.named(b, to.1) {
                Ok(victim) => Some(victim),
                Err(Status::NoEnt) => None,
                Err(status) => return Err(status),
            };
            if let Some(victim) = &victim {
                self.require_removal(who, b, victim)?;
            }
            let same = from.0 == to.0;
            names::rename(&Steps(self), (a, from.1), (b, to.1), same, || {
                self.walk.note(&moved.key, &b.key, to.1);
                if let Some(victim) = victim.filter(|victim| victim.key != moved.key) {
                    self.bury(&victim);
                }
            })
        })();
        let same = from.0 == to.0;
        let (mut a, mut b) = (self.end(from_dir), self.end(to_dir));
        if same {
            // Both were under way at once, and yet it is one change.
            a.before = None;
            b = a;
        }
        (outcome, a, b)
    }

    pub(super) fn one_more_name(
        &self,
        who: &Who,
        file: &Key,
        dir: &Key,
        name: &[u8],
    ) -> Changed<Attributes> {
        self.change(who, dir, |dir| {
            let node = self.node(file)?;
            if node.attributes.kind == Kind::Directory {
                return Err(Status::IsDir);
            }
            names::link(&Steps(self), &node, dir, name)?;
            Ok(self.refreshed(&node).unwrap_or(node.attributes))
        })
    }

    pub(super) fn names(
        &self,
        who: &Who,
        dir: &Key,
        cookie: u64,
        whole: bool,
        take: &mut dyn FnMut(Entry<'_>) -> bool,
    ) -> Outcome<bool> {
        let node = self.directory(dir)?;
        self.require(who, &node, &[Want::Read])?;
        if cookie > i64::MAX as u64 {
            return Err(Status::BadCookie);
        }
        if cookie != 0 && rustix::fs::seek(&node.fd, SeekFrom::Start(cookie)).is_err() {
            return Err(Status::BadCookie);
        }
        let above = || {
            if node.key == self.root_key {
                Ok(self.root_id)
            } else {
                self.above(&node).map(|n| n.attributes.id)
            }
        };
        let mut space = vec![MaybeUninit::uninit(); LISTING];
        let mut entries = RawDir::new(&node.fd, &mut space);
        while let Some(entry) = entries.next() {
            let entry = os(entry)?;
            let name = entry.file_name().to_bytes();
            let found = match name {
                _ if !whole => None,
                b"." => Some(Self::found(&node)),
                b".." => self.above(&node).ok().map(|node| Self::found(&node)),
                // Removed meanwhile, or something is mounted there: then only its name is told.
                _ => self.named(&node, name).ok().map(|node| Self::found(&node)),
            };
            let id = match &found {
                Some(found) => found.attributes.id,
                None if name == b".." => above().unwrap_or(entry.ino()),
                None => entry.ino(),
            };
            // 0 is where a listing begins; no file system gives it to what is behind a name.
            let cookie = entry.next_entry_cookie();
            if !take(Entry {
                id,
                name,
                cookie,
                found,
            }) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Changes attributes for somebody, if he may.
    pub(super) fn set(&self, who: &Who, node: &Node, set: &SetAttributes) -> Outcome<()> {
        let a = &node.attributes;
        let owner = who.is_root() || who.uid == a.uid;
        let gives_away = set.uid.is_some_and(|uid| uid != a.uid);
        let joins = set.gid.is_some_and(|gid| gid != a.gid);
        let foreign_group = joins && !set.gid.is_some_and(|gid| who.is_in(gid));
        if !who.is_root() && (gives_away || foreign_group) {
            return Err(Status::Perm);
        }
        let times = [set.accessed, set.modified];
        let dates = times.iter().any(|time| matches!(time, SetTime::To(_)));
        if !owner && (set.mode.is_some() || joins || dates) {
            return Err(Status::Perm);
        }
        if set.size.is_some() || times.contains(&SetTime::Now) {
            self.require_data(who, node, true)?;
        }
        let inherited = match a.kind {
            Kind::Directory => a.mode & SET_GROUP_ID,
            _ => 0,
        };
        // Who cuts a file writes to it.
        let armed = set.size.is_some() && a.mode & SET_ID != 0;
        let mode = set.mode.or(armed.then_some(a.mode));
        let mode = mode.map(|mode| mode_by(who, mode, inherited));
        self.apply(node, &SetAttributes { mode, ..*set })
    }

    /// A file that is written by somebody else than root runs as nobody's any more.
    pub(super) fn disarm(&self, who: &Who, node: &Node, file: &File) -> Outcome<()> {
        let armed = node.attributes.mode & SET_ID;
        if armed != 0 && !who.is_root() {
            os(rustix::fs::fchmod(
                file,
                Mode::from_raw_mode(node.attributes.mode & !SET_ID),
            ))?;
        }
        Ok(())
    }
}
