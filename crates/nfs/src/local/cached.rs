//! What somebody needs of a directory who keeps some of its files in a cache, and so reads and writes
//! them himself.

use std::fs::File;

use rustix::fs::OFlags;

use super::Directory;
use crate::access::{Want, Who};
use crate::handle::Key;
use crate::tree::Outcome;
use crate::v3::{Attributes, Status};

impl Directory {
    /// A regular file, open for reading and writing, on behalf of nobody.
    pub fn open_regular(&self, key: &Key) -> Outcome<File> {
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
