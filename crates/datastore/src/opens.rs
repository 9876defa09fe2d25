//! Who opens files on this host, as the kernel tells it (fanotify).
//!
//! A program that opens a file while data of it is on flash only (a backup, mostly) reads old bytes, so the daemon reports it.
//! The open itself is never delayed, and where the kernel does not report opens, only the report is missing.
//!
//! Files are told of one by one, not directory by directory: so only the opening of those that matter wakes anybody, and no
//! right is needed but that to open the file. The kernel names the file by its own handle, and says whether it was we who
//! opened it; who else it was is told only to those who may administer the system.

use std::collections::HashMap;
use std::ffi::{CString, c_int, c_uint};
use std::fs::File;
use std::hash::Hash;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use hearth_nfs::handle::Key;
use hearth_nfs::local::{key_by_handle, key_of_open};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use crate::seldom::Seldom;
use crate::store::lock;

/// Bytes of what happened that are read at once: some hundred openings.
const READ: usize = 16 << 10;
/// What begins each report: its length, the form, what happened and who did it.
const HEAD: usize = 24;
/// What begins a file's name in it: the kind, the length, the file system, and the handle's length and kind.
const NAME: usize = 20;
/// The form of reports this was written for.
const FORM: u8 = 3;

/// Watches files, each known to the caller by a key.
pub struct Opens<K> {
    group: Group,
    /// Signalled to make [`keep`](Self::keep) return.
    bell: OwnedFd,
    watched: Mutex<HashMap<Inode, K>>,
    failed: AtomicBool,
    told: Seldom<K>,
}

/// It is said once, and not for every file.
fn cannot_see(error: &io::Error) {
    tracing::info!(
        "files that are opened on this host while writes to them are on flash only cannot be seen here: {error}"
    );
}

/// A process, for people.
pub fn name_process(process: u32) -> String {
    if process == 0 {
        return "another process".to_owned();
    }
    // It may have ended.
    match std::fs::read_to_string(format!("/proc/{process}/comm")) {
        Ok(name) => format!("{} (process {process})", name.trim_end()),
        Err(_) => format!("process {process}"),
    }
}

impl<K: Copy + Eq + Hash> Opens<K> {
    /// Nothing is watched yet; `None` if nothing can be.
    pub fn new() -> Option<Opens<K>> {
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

    /// Reports opens of the file from now on. A handle that stands for the file (`O_PATH`) is enough.
    pub fn watch(&self, key: K, file: &File) {
        match self.group.add(file) {
            Ok(inode) => {
                lock(&self.watched).insert(inode, key);
            }
            Err(e) => {
                if !self.failed.swap(true, Ordering::SeqCst) {
                    cannot_see(&e);
                }
            }
        }
    }

    /// Stops watching a file of this key. May block with its file system.
    pub fn leave(&self, key: &K, file: &File) {
        self.group.remove(file);
        self.forget(key);
    }

    /// Stops reporting the files of this key, and does not block. The kernel keeps its marks until the files are removed
    /// or their file systems are unmounted.
    pub fn forget(&self, key: &K) {
        lock(&self.watched).retain(|_, of| of != key);
    }

    /// True if an hour has passed since it was last reported of this key.
    pub fn is_due(&self, key: &K) -> bool {
        self.told.is_due(key)
    }

    /// Makes [`keep`](Self::keep) return.
    pub fn end(&self) {
        // Cannot fail but by being full, and then it has rung.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    /// Reports openings by other processes, with the process unless that is unknown (0), until `report` returns
    /// false. [`end`](Self::end) makes it be asked.
    pub fn keep(&self, mut report: impl FnMut(&[(K, u32)]) -> bool) {
        loop {
            let mut fds = [
                PollFd::new(&self.group, PollFlags::IN),
                PollFd::new(&self.bell, PollFlags::IN),
            ];
            match poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return cannot_see(&e.into()),
            }
            let all = match self.group.read() {
                Ok(all) => all,
                Err(e) => return cannot_see(&e),
            };
            let own = std::process::id();
            let watched = lock(&self.watched);
            let others = all.iter().filter(|opened| opened.process != own);
            let found = others.filter_map(|o| Some((*watched.get(&o.inode)?, o.process)));
            let found: Vec<_> = found.collect();
            drop(watched);
            if !report(&found) {
                return;
            }
        }
    }
}

/// A file, as the kernel calls it: its file system and its handle there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Inode {
    system: [u8; 8],
    key: Key,
}

/// A file was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Opened {
    /// The file.
    pub inode: Inode,
    /// The process; 0 if it is another one than ours and that is all we may know.
    pub process: u32,
}

/// The files that are looked after.
#[derive(Debug)]
pub(crate) struct Group(OwnedFd);

impl Group {
    /// None yet.
    pub(crate) fn new() -> io::Result<Group> {
        let how =
            libc::FAN_CLASS_NOTIF | libc::FAN_REPORT_FID | libc::FAN_CLOEXEC | libc::FAN_NONBLOCK;
        // SAFETY: takes two numbers.
        let fd = unsafe { libc::fanotify_init(how, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made it for us.
        Ok(Group(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// From now on it is told when this file is opened.
    pub(crate) fn add(&self, file: &File) -> io::Result<Inode> {
        let inode = inode_of(file)?;
        self.mark(libc::FAN_MARK_ADD, file)?;
        Ok(inode)
    }

    /// No longer.
    pub(crate) fn remove(&self, file: &File) {
        // One that is gone has been forgotten already.
        let _ = self.mark(libc::FAN_MARK_REMOVE, file);
    }

    fn mark(&self, what: c_uint, file: &File) -> io::Result<()> {
        // By its name among the open files: a handle that only stands for the file does not do by itself.
        let name = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
        // SAFETY: takes numbers, and a name that ends with a zero and outlives the call.
        let failed = unsafe {
            libc::fanotify_mark(
                self.0.as_raw_fd(),
                what,
                libc::FAN_OPEN,
                libc::AT_FDCWD,
                name.as_ptr(),
            )
        };
        match failed {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// What was opened since; nothing if nothing was.
    pub(crate) fn read(&self) -> io::Result<Vec<Opened>> {
        let mut bytes = [0; READ];
        match rustix::io::read(&self.0, &mut bytes) {
            Ok(len) => Ok(parse(bytes.get(..len).unwrap_or_default())),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(Vec::new()),
            Err(e) => Err(e.into()),
        }
    }
}

impl AsFd for Group {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn inode_of(file: &File) -> io::Result<Inode> {
    Ok(Inode {
        system: system_of(file)?,
        key: key_of_open(file)?,
    })
}

/// The number of a file's system, as reports have it.
fn system_of(file: &File) -> io::Result<[u8; 8]> {
    let mut found = std::mem::MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: there is room for what is told, and all zeros is a value of it.
    let found = unsafe {
        if libc::fstatfs(file.as_raw_fd(), found.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        found.assume_init()
    };
    const { assert!(size_of::<libc::fsid_t>() == 8) };
    // SAFETY: two numbers without anything between them.
    Ok(unsafe { std::mem::transmute_copy::<libc::fsid_t, [u8; 8]>(&found.f_fsid) })
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let four = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_ne_bytes(four.try_into().ok()?))
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    let two = bytes.get(at..at.checked_add(2)?)?;
    Some(u16::from_ne_bytes(two.try_into().ok()?))
}

/// Reads reports. Those that are in another form, or name no file, are passed over.
fn parse(mut rest: &[u8]) -> Vec<Opened> {
    let mut all = Vec::new();
    while let Some(len) = word(rest, 0).map(|len| len as usize)
        && len >= HEAD
        && let Some(report) = rest.get(..len)
    {
        all.extend(parse_one(report));
        rest = rest.get(len..).unwrap_or_default();
    }
    all
}

fn parse_one(report: &[u8]) -> Option<Opened> {
    if *report.get(4)? != FORM {
        return None;
    }
    let process = word(report, 20)?;
    let named = report.get(usize::from(half(report, 6)?)..)?;
    if *named.first()? != libc::FAN_EVENT_INFO_TYPE_FID {
        return None;
    }
    let system = named.get(4..12)?.try_into().ok()?;
    let len = word(named, 12)? as usize;
    let kind = word(named, 16)? as c_int;
    let handle = named.get(NAME..NAME.checked_add(len)?)?;
    Some(Opened {
        inode: Inode {
            system,
            key: key_by_handle(kind, handle)?,
        },
        process,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(group: &Group) -> Vec<Opened> {
        let mut fds = [rustix::event::PollFd::new(
            group,
            rustix::event::PollFlags::IN,
        )];
        rustix::event::poll(&mut fds, None).unwrap();
        group.read().unwrap()
    }

    #[test]
    fn who_opens_a_file_is_told_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let [one, two] = ["one", "two"].map(|name| dir.path().join(name));
        let file = File::create(&one).unwrap();
        File::create(&two).unwrap();
        let Ok(group) = Group::new() else {
            // A kernel, or a file system, that cannot tell.
            return;
        };
        let Ok(inode) = group.add(&file) else { return };
        assert_eq!(group.read().unwrap(), []);
        File::open(&two).unwrap();
        File::open(&one).unwrap();
        let process = std::process::id();
        assert_eq!(wait(&group), [Opened { inode, process }]);

        let done = std::process::Command::new("cat").arg(&one).status();
        assert!(done.unwrap().success());
        let told = wait(&group);
        assert_eq!(told.first().map(|opened| opened.inode), Some(inode));
        assert!(told.iter().all(|opened| opened.process != process));

        group.remove(&file);
        File::open(&one).unwrap();
        assert_eq!(group.read().unwrap(), []);
    }

    #[test]
    fn reports_that_are_cut_or_wrong_name_nothing() {
        let mut report = Vec::new();
        report.extend_from_slice(&52u32.to_ne_bytes());
        report.extend_from_slice(&[FORM, 0]);
        report.extend_from_slice(&(HEAD as u16).to_ne_bytes());
        report.extend_from_slice(&libc::FAN_OPEN.to_ne_bytes());
        report.extend_from_slice(&(-1i32).to_ne_bytes());
        report.extend_from_slice(&7u32.to_ne_bytes());
        report.extend_from_slice(&[libc::FAN_EVENT_INFO_TYPE_FID, 0]);
        report.extend_from_slice(&28u16.to_ne_bytes());
        report.extend_from_slice(&[9; 8]);
        report.extend_from_slice(&8u32.to_ne_bytes());
        report.extend_from_slice(&1u32.to_ne_bytes());
        report.extend_from_slice(&[5; 8]);
        let whole = parse(&report);
        assert_eq!(whole.len(), 1);
        assert_eq!(whole[0].process, 7);
        assert_eq!(parse(&report.repeat(3)).len(), 3);

        for cut in 0..report.len() {
            assert_eq!(parse(&report[..cut]), [], "{cut}");
        }
        for at in 0..HEAD + NAME {
            for value in [0, 1, 0x7f, 0xff] {
                let mut wrong = report.clone();
                wrong[at] = value;
                // Anything but a panic.
                parse(&wrong);
            }
        }
        report[HEAD + 12..HEAD + 16].fill(0xff);
        assert_eq!(parse(&report), []);
    }
}
