//! What somebody needs of a directory who keeps some of its files in a cache, and so reads and writes
//! them himself.

use std::fs::File;
use std::os::fd::OwnedFd;

use rustix::fs::OFlags;

use super::Directory;
use crate::access::{Want, Who};
use crate::handle::Key;
use crate::tree::{Changed, Outcome};
use crate::v3::{Attributes, SetAttributes, Stability, Status};

impl Directory {
    /// A regular file, open for reading and writing, on behalf of nobody. One that cannot be written (its file system is
    /// read-only, it is immutable, or this process lacks the right) is open for reading alone.
    pub fn open_regular(&self, key: &Key) -> Outcome<File> {
        let node = self.node(key)?;
        match self.file(&node, OFlags::RDWR) {
            Err(Status::RoFs | Status::Perm | Status::Access) => self.file(&node, OFlags::RDONLY),
            other => other,
        }
    }

    /// A regular file, open for reading and writing, on behalf of nobody.
    pub fn open_to_write(&self, key: &Key) -> Outcome<File> {
        self.file(&self.node(key)?, OFlags::RDWR)
    }

    /// What is known of an open file.
    pub fn attributes_of_open(&self, file: &File) -> Outcome<Attributes> {
        self.stat(file)
    }

    /// The number that tells clients whether unstable data may be lost.
    pub fn write_verifier(&self) -> [u8; 8] {
        self.verifier.get()
    }

    /// Unstable data may have been lost.
    pub fn unstable_lost(&self) {
        self.verifier.replace();
    }
}

/// Whether somebody may read or write the data of a file that he has open: the owner always may.
pub fn may_use_data(who: &Who, attributes: &Attributes, write: bool) -> Outcome<()> {
    let want = if write { Want::Write } else { Want::Read };
    // A program is read to be run.
    let run = !write && who.may(attributes, Want::Search as u32);
    if who.uid == attributes.uid || run || who.may(attributes, want as u32) {
        Ok(())
    } else {
        Err(Status::Access)
    }
}

/// What somebody needs who keeps two directories the same.
impl Directory {
    /// A file of any kind, not open for reading or writing.
    pub fn open_path(&self, key: &Key) -> Outcome<OwnedFd> {
        Ok(self.node(key)?.fd)
    }

    /// A directory, to be read.
    pub fn open_names(&self, key: &Key) -> Outcome<OwnedFd> {
        Ok(self.directory(key)?.fd)
    }

    /// The root, as it was when it was opened.
    pub fn root_fd(&self) -> &OwnedFd {
        &self.root
    }

    /// Makes a file's data and attributes durable, whatever it is.
    pub fn make_durable(&self, key: &Key) -> Outcome<()> {
        self.sync_node(&self.node(key)?)
    }

    /// Changes attributes, on behalf of nobody, durably.
    pub fn dress(&self, key: &Key, set: &SetAttributes) -> Outcome<()> {
        let node = self.node(key)?;
        self.apply(&node, set)?;
        self.sync_node(&node)
    }

    /// Writes durably.
    pub fn write_durably(
        &self,
        who: &Who,
        key: &Key,
        offset: u64,
        data: &[u8],
    ) -> Changed<(u32, Attributes)> {
        self.change_file(key, |node| {
            self.require_data(who, node, true)?;
            let file = self.file(node, OFlags::RDWR)?;
            self.disarm(who, node, &file)?;
            let count = self.put(&file, data, offset, Stability::File)?;
            Ok((count, self.stat(&file)?))
        })
    }
}
