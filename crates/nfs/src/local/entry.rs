//! A file of the directory, found by key or by name, and what is known of it.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat};

use super::Directory;
use crate::access::{Want, Who};
use crate::handle::Key;
use crate::tree::{Found, Outcome};
use crate::v3::{Attributes, Kind, Status, Time};

/// Most directories above one another.
const DEPTH_MAX: usize = 4096;

/// A file that was found. It is not open for reading or writing.
pub(super) struct Node {
    pub fd: OwnedFd,
    pub key: Key,
    pub attributes: Attributes,
}

fn time(seconds: i64, nanos: u64) -> Time {
    // Times before 1970 and after 2106 cannot be told.
    Time {
        seconds: seconds.clamp(0, i64::from(u32::MAX)) as u32,
        nanos: nanos as u32,
    }
}

fn kind(mode: u32) -> Kind {
    match FileType::from_raw_mode(mode) {
        FileType::Directory => Kind::Directory,
        FileType::Symlink => Kind::Link,
        FileType::BlockDevice => Kind::Block,
        FileType::CharacterDevice => Kind::Character,
        FileType::Fifo => Kind::Fifo,
        FileType::Socket => Kind::Socket,
        FileType::RegularFile | FileType::Unknown => Kind::Regular,
    }
}

/// The directory above, wherever that is.
fn up(dir: &OwnedFd) -> std::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(dir, "..", flags, Mode::empty())?)
}

impl Directory {
    pub(super) fn attributes_of(&self, stat: &Stat) -> Attributes {
        Attributes {
            kind: kind(stat.st_mode),
            mode: stat.st_mode & 0o7777,
            links: u32::try_from(stat.st_nlink).unwrap_or(u32::MAX),
            uid: stat.st_uid,
            gid: stat.st_gid,
            size: stat.st_size as u64,
            used: stat.st_blocks as u64 * 512,
            device: (
                rustix::fs::major(stat.st_rdev),
                rustix::fs::minor(stat.st_rdev),
            ),
            tree: self.store,
            id: stat.st_ino,
            accessed: time(stat.st_atime, stat.st_atime_nsec),
            modified: time(stat.st_mtime, stat.st_mtime_nsec),
            changed: time(stat.st_ctime, stat.st_ctime_nsec),
        }
    }

    pub(super) fn stat(&self, file: &impl AsFd) -> Outcome<Attributes> {
        Ok(self.attributes_of(&rustix::fs::fstat(file).map_err(std::io::Error::from)?))
    }

    /// The file of a key.
    pub(super) fn node(&self, key: &Key) -> Outcome<Node> {
        let fd = self.open_key(key, OFlags::PATH)?;
        let attributes = self.stat(&fd)?;
        if attributes.links == 0 {
            // Still open somewhere, but without a name: gone, as far as clients are concerned.
            return Err(Status::Stale);
        }
        if attributes.kind == Kind::Directory {
            self.require_within(&fd, *key)?;
        }
        Ok(Node {
            fd,
            key: *key,
            attributes,
        })
    }

    /// A directory, open for what has to be done in it.
    pub(super) fn directory(&self, key: &Key) -> Outcome<Node> {
        let node = self.node(key)?;
        if node.attributes.kind != Kind::Directory {
            return Err(Status::NotDir);
        }
        let fd = self.open_key(key, OFlags::RDONLY | OFlags::DIRECTORY)?;
        Ok(Node { fd, ..node })
    }

    /// A regular file, open. Others are never opened: to open a device can have an effect.
    pub(super) fn file(&self, node: &Node, flags: OFlags) -> Outcome<File> {
        match node.attributes.kind {
            Kind::Regular => {}
            Kind::Directory => return Err(Status::IsDir),
            _ => return Err(Status::Inval),
        }
        Ok(File::from(self.open_key(
            &node.key,
            flags | OFlags::NONBLOCK | OFlags::NOCTTY,
        )?))
    }

    /// The file of a name in a directory. A link is found itself, other mounts are not entered.
    pub(super) fn named(&self, dir: &Node, name: &[u8]) -> Outcome<Node> {
        let resolve = ResolveFlags::BENEATH
            | ResolveFlags::NO_SYMLINKS
            | ResolveFlags::NO_MAGICLINKS
            | ResolveFlags::NO_XDEV;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = match rustix::fs::openat2(&dir.fd, name, flags, Mode::empty(), resolve) {
            Ok(fd) => fd,
            // Something is mounted there.
            Err(rustix::io::Errno::XDEV) => return Err(Status::Access),
            Err(error) => return Err(std::io::Error::from(error).into()),
        };
        let (key, mount) = self.by.key_of(&fd)?;
        if mount != self.mount {
            return Err(Status::Access);
        }
        self.walk.note(&key, &dir.key, name);
        let attributes = self.stat(&fd)?;
        Ok(Node {
            fd,
            key,
            attributes,
        })
    }

    /// The directory above. That of the root is the root itself; and a directory that was moved out of it
    /// has none.
    pub(super) fn above(&self, dir: &Node) -> Outcome<Node> {
        if dir.key == self.root_key {
            return self.node(&self.root_key);
        }
        let fd = up(&dir.fd)?;
        let (key, _) = self.by.key_of(&fd)?;
        self.require_within(&fd, key)?;
        let attributes = self.stat(&fd)?;
        Ok(Node {
            fd,
            key,
            attributes,
        })
    }

    /// A directory that somebody on this host moved out of the root is served no more, though its handle finds it.
    fn require_within(&self, dir: &OwnedFd, key: Key) -> Outcome<()> {
        let (mut key, mut at) = (key, None);
        for _ in 0..DEPTH_MAX {
            if key == self.root_key {
                return Ok(());
            }
            let above = up(at.as_ref().unwrap_or(dir))?;
            let (next, mount) = self.by.key_of(&above)?;
            if mount != self.mount || next == key {
                break;
            }
            (key, at) = (next, Some(above));
        }
        Err(Status::Stale)
    }

    /// What somebody may not do, is refused.
    pub(super) fn require(&self, who: &Who, node: &Node, wants: &[Want]) -> Outcome<()> {
        let want = wants.iter().fold(0, |all, want| all | *want as u32);
        if who.may(&node.attributes, want) {
            Ok(())
        } else {
            Err(Status::Access)
        }
    }

    /// Reading and writing data: the owner always may. Clients look at the mode when a file is
    /// opened, and who has it open goes on, also when it was made read-only since.
    pub(super) fn require_data(&self, who: &Who, node: &Node, write: bool) -> Outcome<()> {
        super::may_use_data(who, &node.attributes, write)
    }

    /// In a directory with the sticky bit only the owner of either may take a name away.
    pub(super) fn require_removal(&self, who: &Who, dir: &Node, victim: &Node) -> Outcome<()> {
        let sticky = dir.attributes.mode & 0o1000 != 0;
        let own = who.uid == victim.attributes.uid || who.uid == dir.attributes.uid;
        if !sticky || own || who.is_root() {
            Ok(())
        } else {
            Err(Status::Access)
        }
    }

    pub(super) fn found(node: &Node) -> Found {
        Found {
            key: node.key,
            attributes: node.attributes,
        }
    }

    /// What is known of a node now.
    pub(super) fn refreshed(&self, node: &Node) -> Option<Attributes> {
        let stat = rustix::fs::statat(&node.fd, "", AtFlags::EMPTY_PATH).ok()?;
        Some(self.attributes_of(&stat))
    }
}
