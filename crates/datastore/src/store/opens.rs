//! Files that somebody else opens on this host while something of them is on flash only.
//!
//! Whoever does that (a backup, mostly) reads old bytes and is told nothing, so we tell. It is only looked at: nobody waits
//! for us, and where the kernel cannot tell who opens a file, nothing but the telling is missing.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use hearth_nfs::handle::Key;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::{Inner, lock, name_of};
use crate::body::Body;
use crate::opens::{Group, Inode, Opened};
use crate::seldom::Seldom;

/// See the module.
pub(super) struct Opens {
    group: Group,
    /// Rings when it is to end.
    bell: OwnedFd,
    watched: Mutex<HashMap<Inode, Key>>,
    failed: AtomicBool,
    told: Seldom,
}

/// It is said once, and not for every file.
fn cannot_see(error: &io::Error) {
    tracing::info!(
        "files of a datastore that are opened on this host while writes to them are on flash only cannot be seen here: {error}"
    );
}

/// A process, for people.
fn name_process(process: u32) -> String {
    if process == 0 {
        return "another process".to_owned();
    }
    // It may have ended.
    match std::fs::read_to_string(format!("/proc/{process}/comm")) {
        Ok(name) => format!("{} (process {process})", name.trim_end()),
        Err(_) => format!("process {process}"),
    }
}

impl Opens {
    /// Nothing is watched yet; `None` if nothing can be.
    pub(super) fn new() -> Option<Opens> {
        let bell = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let group = Group::new().and_then(|group| Ok((group, bell()?)));
        let (group, bell) = group.inspect_err(cannot_see).ok()?;
        Some(Opens {
            group,
            bell,
            watched: Mutex::default(),
            failed: AtomicBool::new(false),
            told: Seldom::default(),
        })
    }

    /// The file is a disk from now on.
    pub(super) fn watch(&self, key: &Key, body: &Body) {
        body.each_open(&mut |file: &File| match self.group.add(file) {
            Ok(inode) => {
                lock(&self.watched).insert(inode, *key);
            }
            Err(e) => {
                if !self.failed.swap(true, Ordering::SeqCst) {
                    cannot_see(&e);
                }
            }
        });
    }

    /// It is none any more.
    pub(super) fn leave(&self, key: &Key, body: &Body) {
        body.each_open(&mut |file: &File| self.group.remove(file));
        lock(&self.watched).retain(|_, of| of != key);
    }

    /// Makes [`keep`] return.
    pub(super) fn end(&self) {
        // Cannot fail but by being full, and then it has rung.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    fn of(&self, opened: &Opened) -> Option<Key> {
        let own = opened.process == std::process::id();
        let watched = lock(&self.watched);
        watched.get(&opened.inode).filter(|_| !own).copied()
    }
}

/// Tells of files that are opened, until it is to end.
pub(super) fn keep(opens: &Arc<Opens>, inner: &Weak<Inner>) {
    loop {
        let mut fds = [
            PollFd::new(&opens.group, PollFlags::IN),
            PollFd::new(&opens.bell, PollFlags::IN),
        ];
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return cannot_see(&e.into()),
        }
        let Some(inner) = inner.upgrade().filter(|inner| !inner.is_stopped()) else {
            return;
        };
        match opens.group.read() {
            Ok(all) => {
                for opened in all {
                    inner.opened_by_other(opens, &opened);
                }
            }
            Err(e) => return cannot_see(&e),
        }
    }
}

impl Inner {
    fn opened_by_other(&self, opens: &Opens, opened: &Opened) {
        let Some(key) = opens.of(opened) else { return };
        let file = lock(&self.files).get(&key).cloned();
        let Some(cached) = file.and_then(|file| file.cached()) else {
            return;
        };
        let owed = self.disks.owed(cached.disk);
        if owed > 0 && opens.told.is_due(&key) {
            let name = name_of(cached.origin.file(), &key);
            let by = name_process(opened.process);
            self.disks.opened_by_other(&name, owed, &by);
        }
    }
}
