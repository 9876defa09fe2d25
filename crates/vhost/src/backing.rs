//! What lies behind a descriptor a client sent, and letting go of it without being held.
//!
//! Guest memory is touched by data threads: the kernel fills its pages on first use, and on a file
//! system that asks a program (FUSE), a server (NFS) or a suspended device, that may take for ever.
//! One client with such a file would stop a data thread and with it other clients' disks. So memory
//! is taken only from where its pages are the kernel's own: memfd, tmpfs, hugetlbfs, ramfs.
//!
//! Even the question may hang (FUSE answers `fstatfs` in the program), and so may closing a
//! descriptor (FUSE is told of every close). So the file system is known by its device number, which
//! `statx` gives without asking anybody. Only a mount that this process does not see has to be asked;
//! that, and closing, is done on threads of their own, a bounded number of which may be stuck at a time.

use crate::error::VhostError;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::Duration;

/// How long a file system may take to say what it is. Those that are safe answer at once.
const ANSWER_TIME: Duration = Duration::from_secs(2);
/// Threads that ask or close at a time, all clients together. Each that is stuck is one descriptor
/// of a client that means harm; with so many, further such clients hold only their own thread.
const ASIDE_MAX: usize = 32;

/// Not in `libc` for all targets (Linux's `include/uapi/linux/magic.h`).
const RAMFS_MAGIC: u32 = 0x8584_58f6;

static ASIDE: AtomicUsize = AtomicUsize::new(0);

/// Does `work` on a thread of its own; gives it back if there are too many, or none to be had.
fn aside<F: FnOnce() + Send + 'static>(work: F) -> Result<(), Option<F>> {
    if ASIDE.fetch_add(1, Ordering::Relaxed) >= ASIDE_MAX {
        ASIDE.fetch_sub(1, Ordering::Relaxed);
        return Err(Some(work));
    }
    let body = move || {
        work();
        ASIDE.fetch_sub(1, Ordering::Relaxed);
    };
    let thread = std::thread::Builder::new().name("hearth-vhost-fd".to_owned());
    match thread.spawn(body) {
        Ok(_) => Ok(()),
        Err(_) => {
            ASIDE.fetch_sub(1, Ordering::Relaxed);
            Err(None)
        }
    }
}

/// Closes descriptors of a client's that nothing is known of, and does not wait for it.
pub fn let_go(files: Vec<OwnedFd>) {
    if files.is_empty() {
        return;
    }
    if let Err(Some(close)) = aside(move || drop(files)) {
        close();
    }
}

/// True for an eventfd, and nothing else: anything else might block whoever reads or writes it.
pub fn is_eventfd(fd: &impl AsRawFd) -> bool {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
        .is_ok_and(|link| link.as_os_str() == "anon_inode:[eventfd]")
}

/// Types of file systems whose pages are the kernel's own, as mountinfo spells them.
const MEMORY: [&str; 3] = ["tmpfs", "hugetlbfs", "ramfs"];

/// Whether a file is memory, as far as that can be told without asking its file system.
fn is_memory(file: &File) -> Option<Result<(), String>> {
    // SAFETY: all-zero bytes are a valid statx.
    let mut found: libc::statx = unsafe { std::mem::zeroed() };
    // What is cached will do: a file system behind a program or a server is not asked.
    let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
    let (fd, name) = (file.as_raw_fd(), c"".as_ptr());
    // SAFETY: an empty name and an out-pointer that live across the call; the descriptor is open.
    if unsafe { libc::statx(fd, name, flags, libc::STATX_TYPE, &mut found) } != 0 {
        return None;
    }
    if u32::from(found.stx_mode) & libc::S_IFMT != libc::S_IFREG {
        return Some(Err("it is no regular file".to_owned()));
    }
    let (major, minor) = (found.stx_dev_major, found.stx_dev_minor);
    // The kernel's own mount, which no process sees.
    if memfd_device() == Some(libc::makedev(major, minor)) {
        return Some(Ok(()));
    }
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let kind = mounted_as(&mounts, &format!("{major}:{minor}"))?;
    Some(match MEMORY.contains(&kind) {
        true => Ok(()),
        false => Err(format!("its file system is of type {kind}")),
    })
}

/// The type of the file system with this device number among those mounted (proc_pid_mountinfo(5)).
fn mounted_as<'a>(mounts: &'a str, device: &str) -> Option<&'a str> {
    mounts.lines().find_map(|line| {
        let (mount, source) = line.split_once(" - ")?;
        let is_it = mount.split(' ').nth(2) == Some(device);
        is_it.then(|| source.split(' ').next())?
    })
}

/// The device number of every plain memfd.
fn memfd_device() -> Option<u64> {
    static DEVICE: std::sync::OnceLock<Option<u64>> = std::sync::OnceLock::new();
    *DEVICE.get_or_init(|| {
        // SAFETY: a literal name and plain flags.
        let fd = unsafe { libc::memfd_create(c"hearth".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return None;
        }
        // SAFETY: a descriptor just made by the kernel, owned by nobody else.
        let file = unsafe { File::from_raw_fd(fd) };
        file.metadata().ok().map(|meta| meta.dev())
    })
}

/// Refuses memory whose pages may not be there at once.
pub fn check_memory(file: &File) -> Result<(), VhostError> {
    if let Some(known) = is_memory(file) {
        return known.map_err(VhostError::Backing);
    }
    let own = file.try_clone().map_err(VhostError::Io)?;
    let (answer, answered) = sync_channel(1);
    let ask = move || {
        let kind = kind(&own);
        // The one who asked may have stopped waiting.
        let _ = answer.send(kind);
    };
    aside(ask).map_err(|_| VhostError::Backing("other clients' files do not answer".to_owned()))?;
    match answered.recv_timeout(ANSWER_TIME) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(why)) => Err(VhostError::Backing(why)),
        Err(_) => Err(VhostError::Backing(
            "its file system does not answer".to_owned(),
        )),
    }
}

/// What the file system says of a file; may hang.
fn kind(file: &File) -> Result<(), String> {
    // SAFETY: all-zero bytes are a valid statfs.
    let mut fs: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: an out-pointer that lives across the call; the descriptor is open.
    if unsafe { libc::fstatfs(file.as_raw_fd(), &mut fs) } != 0 {
        let e = std::io::Error::last_os_error();
        return Err(format!("its file system cannot be asked what it is: {e}"));
    }
    // Its type is not the same in every C library.
    let magic = fs.f_type as u32;
    let known = [
        libc::TMPFS_MAGIC as u32,
        libc::HUGETLBFS_MAGIC as u32,
        RAMFS_MAGIC,
    ];
    if !known.contains(&magic) {
        return Err(format!("its file system is of type {magic:#x}"));
    }
    // Device nodes lie on a tmpfs, too.
    match file.metadata() {
        Ok(meta) if meta.is_file() => Ok(()),
        Ok(_) => Err("it is no regular file".to_owned()),
        Err(e) => Err(format!("it cannot be looked at: {e}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_found_by_its_number() {
        let mounts = "22 1 254:0 / / rw shared:1 - ext4 /dev/vda rw\n\
             30 22 0:25 / /dev/shm rw,nosuid - tmpfs tmpfs rw\n\
             41 22 0:44 / /mnt/a\\040-\\040b rw - fuse.sshfs x rw\n\
             cut short\n";
        assert_eq!(mounted_as(mounts, "0:25"), Some("tmpfs"));
        assert_eq!(mounted_as(mounts, "0:44"), Some("fuse.sshfs"));
        assert_eq!(mounted_as(mounts, "0:2"), None);
    }

    /// No thread is needed for what a client may send as often as it likes.
    #[test]
    fn what_can_be_told_without_asking_is() {
        assert_eq!(is_memory(&memfd()), Some(Ok(())));
        let program = File::open(std::env::current_exe().unwrap()).unwrap();
        assert!(is_memory(&program).is_none_or(|told| told.is_err()));
    }

    fn memfd() -> File {
        // SAFETY: a literal name and plain flags.
        let fd = unsafe { libc::memfd_create(c"backing".as_ptr(), libc::MFD_CLOEXEC) };
        assert!(fd >= 0);
        // SAFETY: a descriptor just made by the kernel, owned by nobody else.
        unsafe { File::from_raw_fd(fd) }
    }

    #[test]
    fn memory_is_taken_from_memory_only() {
        check_memory(&memfd()).unwrap();
        for path in ["/dev/null", "/dev/zero", "/proc/self/status", "/"] {
            let refused = check_memory(&File::open(path).unwrap()).unwrap_err();
            assert!(refused.to_string().contains("memfd"), "{path}: {refused}");
        }
    }

    #[test]
    fn only_eventfds_are_eventfds() {
        // SAFETY: plain numbers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        // SAFETY: a descriptor just made by the kernel, owned by nobody else.
        let event = unsafe { OwnedFd::from_raw_fd(fd) };
        assert!(is_eventfd(&event));
        assert!(!is_eventfd(&memfd()));
        let_go(vec![event]);
    }
}
