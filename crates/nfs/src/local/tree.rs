//! A directory as the protocol sees it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::fs::{OFlags, StatVfs};
use rustix::io::{Errno, ReadWriteFlags};

use super::Directory;
use super::entry::Node;
use crate::access::Who;
use crate::handle::Key;
use crate::tree::{Changed, Done, Entry, Found, Outcome, Read, Room, Tree, Write, Written};
use crate::v3::{Attributes, Create, Kind, SetAttributes, Stability, Status, Time, Wcc};

impl Directory {
    /// Changes one file, and says what became of it.
    pub(super) fn change_file<T>(
        &self,
        file: &Key,
        work: impl FnOnce(&Node) -> Outcome<T>,
    ) -> Changed<T> {
        let change = self.changes.begin(file);
        let node = match self.node(file) {
            Ok(node) => node,
            Err(status) => {
                return Changed {
                    outcome: Err(status),
                    wcc: Wcc::default(),
                };
            }
        };
        let outcome = work(&node);
        let after = self.refreshed(&node);
        let before = change.alone().then(|| node.attributes.before());
        Changed {
            outcome,
            wcc: Wcc { before, after },
        }
    }

    fn read_from(&self, who: &Who, file: &Key, offset: u64, count: u32) -> Outcome<Read> {
        let node = self.node(file)?;
        let open = self.file(&node, OFlags::RDONLY)?;
        self.require_data(who, &node, false)?;
        // Nothing is reserved for what is not there.
        let there = node
            .attributes
            .size
            .saturating_sub(offset)
            .min(u64::from(count)) as usize;
        let mut data = Vec::with_capacity(there);
        let mut met_end = false;
        while data.len() < there && !met_end {
            let at = offset + data.len() as u64;
            match rustix::io::pread(&open, rustix::buffer::spare_capacity(&mut data), at) {
                Ok(0) => met_end = true,
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
        data.truncate(there);
        let attributes = self.stat(&open).ok();
        let size = attributes.map_or(node.attributes.size, |a| a.size);
        let end = met_end || offset.saturating_add(data.len() as u64) >= size;
        Ok(Read {
            data: Box::new(data),
            end,
            attributes,
        })
    }

    fn write_to(&self, who: &Who, node: &Node, write: &Write) -> Outcome<Written> {
        self.require_data(who, node, true)?;
        let keep = |file: Arc<File>| {
            self.uncommitted.keep(&node.key, file).map_err(|error| {
                let _ = self.synced(Err(error));
                Status::JukeBox
            })
        };
        let unstable = write.stable == Stability::Unstable;
        let file = match self.uncommitted.get(&node.key) {
            Some(open) => open,
            None => {
                let open = Arc::new(self.file(node, OFlags::RDWR)?);
                // Open from before the write, so that a failure of its writing back is told to it.
                if unstable { keep(open)? } else { open }
            }
        };
        self.disarm(who, node, &file)?;
        // The number of before: should something be lost meanwhile, this write may be part of it.
        let verifier = self.verifier.get();
        let count = self.put(&file, write.data.as_ref(), write.offset, write.stable)?;
        if unstable {
            keep(file)?;
        }
        Ok(Written {
            count,
            stable: write.stable,
            verifier,
        })
    }

    pub(super) fn put(
        &self,
        file: &File,
        data: &[u8],
        offset: u64,
        stable: Stability,
    ) -> Outcome<u32> {
        let flags = match stable {
            Stability::Unstable => ReadWriteFlags::empty(),
            Stability::Data => ReadWriteFlags::DSYNC,
            Stability::File => ReadWriteFlags::SYNC,
        };
        let mut done = 0;
        while done < data.len() {
            let at = offset + done as u64;
            let rest = [io::IoSlice::new(&data[done..])];
            match rustix::io::pwritev2(file, &rest, at, flags) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(Errno::INTR) => {}
                // A file system that cannot sync one write.
                Err(Errno::OPNOTSUPP) if !flags.is_empty() => {
                    file.write_all_at(&data[done..], at)?;
                    self.synced(if stable == Stability::Data {
                        file.sync_data()
                    } else {
                        file.sync_all()
                    })?;
                    done = data.len();
                }
                // What was written so far is told; the rest comes again and fails by itself.
                Err(_) if done > 0 => break,
                Err(error) => {
                    let error = io::Error::from(error);
                    if error.raw_os_error() == Some(libc::EIO) && stable != Stability::Unstable {
                        self.synced(Err(io::Error::from_raw_os_error(libc::EIO)))?;
                    }
                    return Err(error.into());
                }
            }
        }
        if done == 0 && !data.is_empty() {
            Err(Status::NoSpace)
        } else {
            Ok(done as u32)
        }
    }

    fn commit_file(&self, node: &Node) -> Outcome<[u8; 8]> {
        // Its end is known before the number is: what fails replaces it.
        match self.uncommitted.take(&node.key) {
            Some(open) => {
                let synced = self.synced(open.sync_all());
                // Another write may have found it before it was taken. It commits for itself.
                synced?;
            }
            None => {
                let open = self.file(node, OFlags::RDWR)?;
                self.synced(open.sync_all())?;
            }
        }
        Ok(self.verifier.get())
    }
}

impl Tree for Directory {
    fn root(&self) -> Key {
        self.root_key
    }

    fn attributes(&self, file: &Key) -> Outcome<Attributes> {
        Ok(self.node(file)?.attributes)
    }

    fn set_attributes(
        &self,
        who: &Who,
        file: &Key,
        set: &SetAttributes,
        only_if: Option<Time>,
    ) -> Changed<()> {
        self.change_file(file, |node| {
            if only_if.is_some_and(|time| time != node.attributes.changed) {
                return Err(Status::NotSync);
            }
            self.set(who, node, set)?;
            self.sync_node(node)
        })
    }

    fn lookup(&self, who: &Who, dir: &Key, name: &[u8]) -> Outcome<Found> {
        self.find(who, dir, name)
    }

    fn read_link(&self, _who: &Who, link: &Key) -> Outcome<Vec<u8>> {
        let node = self.node(link)?;
        if node.attributes.kind != Kind::Link {
            return Err(Status::Inval);
        }
        let to = rustix::fs::readlinkat(&node.fd, "", Vec::new()).map_err(io::Error::from)?;
        Ok(to.into_bytes())
    }

    fn read(&self, who: &Who, file: &Key, offset: u64, count: u32, done: Done<Outcome<Read>>) {
        done.tell(self.read_from(who, file, offset, count));
    }

    fn write(&self, who: &Who, file: &Key, write: Write, done: Done<Changed<Written>>) {
        done.tell(self.change_file(file, |node| self.write_to(who, node, &write)));
    }

    fn commit(
        &self,
        who: &Who,
        file: &Key,
        _offset: u64,
        _count: u32,
        done: Done<Changed<[u8; 8]>>,
    ) {
        done.tell(self.change_file(file, |node| {
            self.require_data(who, node, true)?;
            self.commit_file(node)
        }));
    }

    fn create(&self, who: &Who, dir: &Key, name: &[u8], what: &Create<'_>) -> Changed<Found> {
        self.make(who, dir, name, what)
    }

    fn remove(&self, who: &Who, dir: &Key, name: &[u8], directory: bool) -> Changed<()> {
        self.take_away(who, dir, name, directory)
    }

    fn rename(&self, who: &Who, from: (&Key, &[u8]), to: (&Key, &[u8])) -> (Outcome<()>, Wcc, Wcc) {
        self.move_name(who, from, to)
    }

    fn link(&self, who: &Who, file: &Key, dir: &Key, name: &[u8]) -> Changed<Attributes> {
        self.one_more_name(who, file, dir, name)
    }

    fn list(
        &self,
        who: &Who,
        dir: &Key,
        cookie: u64,
        whole: bool,
        take: &mut dyn FnMut(Entry<'_>) -> bool,
    ) -> Outcome<bool> {
        self.names(who, dir, cookie, whole, take)
    }

    fn room(&self) -> Outcome<Room> {
        let StatVfs {
            f_frsize,
            f_blocks,
            f_bfree,
            f_bavail,
            f_files,
            f_ffree,
            f_favail,
            ..
        } = rustix::fs::fstatvfs(&self.root).map_err(io::Error::from)?;
        Ok(Room {
            bytes: f_blocks * f_frsize,
            bytes_free: f_bfree * f_frsize,
            bytes_available: f_bavail * f_frsize,
            files: f_files,
            files_free: f_ffree,
            files_available: f_favail,
        })
    }
}
