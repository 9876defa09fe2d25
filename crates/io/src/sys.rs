//! The few system calls on files and block devices that `std` does not wrap.
//!
//! Each wrapper takes borrowed descriptors and plain numbers, returns `io::Result`, and
//! never touches memory it was not given.

use crate::beneath::LoopStatus;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

/// `BLKGETSIZE64` (linux/fs.h): size of a block device in bytes.
const BLKGETSIZE64: u32 = 0x8008_1272;
/// `BLKSSZGET` (linux/fs.h): logical block size in bytes.
const BLKSSZGET: u32 = 0x1268;
/// `BLKROGET` (linux/fs.h): whether a block device is read-only.
const BLKROGET: u32 = 0x125E;
/// `BLKDISCARD` (linux/fs.h): discard a byte range.
const BLKDISCARD: u32 = 0x1277;
/// `BLKZEROOUT` (linux/fs.h): make a byte range read as zeros.
const BLKZEROOUT: u32 = 0x127F;

/// Turns a `-1` return into the thread's last error.
pub(crate) fn check(ret: libc::c_int) -> io::Result<libc::c_int> {
    if ret < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(ret)
    }
}

/// Monotonic time in nanoseconds; the clock of every `now_ns` and `latency_ns`.
pub fn now_ns() -> u64 {
    let mut ts = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `ts` is a valid out-pointer for the call; CLOCK_MONOTONIC always exists on Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut ts) };
    (ts.tv_sec as u64) * 1_000_000_000 + ts.tv_nsec as u64
}

/// Rings an eventfd without waiting. A full counter is left alone: its owner has cause enough to
/// look. Between the two calls only a peer that means harm could fill it, and then the caller
/// waits; where that must not be, the write goes through the ring.
pub(crate) fn ring_eventfd(fd: RawFd) {
    if has_room(fd) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: eight readable bytes.
        unsafe { libc::write(fd, one.as_ptr().cast(), one.len()) };
    }
}

/// False if an eventfd's counter is full: then its owner has cause enough to look.
pub fn has_room(fd: RawFd) -> bool {
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLOUT,
        revents: 0,
    };
    // SAFETY: one pollfd, alive across the call, which does not wait.
    unsafe { libc::poll(&mut poll, 1, 0) == 1 && poll.revents & libc::POLLOUT != 0 }
}

/// Is that where the kernel tells of its devices?
pub(crate) fn is_sysfs(path: &std::path::Path) -> bool {
    use std::os::unix::ffi::OsStrExt;
    let Ok(name) = std::ffi::CString::new(path.as_os_str().as_bytes()) else {
        return false;
    };
    // SAFETY: all zeros are a valid value of this structure of numbers.
    let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: a string that ends with a zero, and a structure of ours that is filled.
    let told = unsafe { libc::statfs(name.as_ptr(), &mut stat) } == 0;
    // Its type is not the same in every C library.
    told && stat.f_type as u32 == libc::SYSFS_MAGIC as u32
}

/// Size in bytes of the block device `file`.
pub(crate) fn device_size(file: &File) -> io::Result<u64> {
    let mut size = 0u64;
    // SAFETY: BLKGETSIZE64 stores a u64 through the pointer, which is valid for the call.
    check(unsafe { libc::ioctl(file.as_raw_fd(), BLKGETSIZE64 as _, &mut size) })?;
    Ok(size)
}

/// Logical block size in bytes of the block device `file`.
pub(crate) fn device_block(file: &File) -> io::Result<u32> {
    let mut size: libc::c_int = 0;
    // SAFETY: BLKSSZGET stores a C int through the pointer, which is valid for the call.
    check(unsafe { libc::ioctl(file.as_raw_fd(), BLKSSZGET as _, &mut size) })?;
    u32::try_from(size).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

/// Whether the block device `file` refuses all writes, as one that is write-protected does.
pub(crate) fn device_is_read_only(file: &File) -> io::Result<bool> {
    let mut is_read_only: libc::c_int = 0;
    // SAFETY: BLKROGET stores a C int through the pointer, which is valid for the call.
    check(unsafe { libc::ioctl(file.as_raw_fd(), BLKROGET as _, &mut is_read_only) })?;
    Ok(is_read_only != 0)
}

/// Whether `file` is reached through a mount that is read-only (fstatvfs(3)).
pub(crate) fn mount_is_read_only(file: &File) -> io::Result<bool> {
    // SAFETY: all-zero bytes are a valid `statvfs` (plain integers).
    let mut fs: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open and `fs` a valid out-pointer for the call.
    check(unsafe { libc::fstatvfs(file.as_raw_fd(), &mut fs) })?;
    Ok(fs.f_flag & libc::ST_RDONLY != 0)
}

/// Discards a byte range of a block device; both ends must be whole logical blocks.
pub(crate) fn device_discard(file: &File, offset: u64, len: u64) -> io::Result<()> {
    let range = [offset, len];
    // SAFETY: BLKDISCARD reads two u64 through the pointer, which is valid for the call.
    check(unsafe { libc::ioctl(file.as_raw_fd(), BLKDISCARD as _, range.as_ptr()) }).map(drop)
}

/// Zeroes a byte range of a block device; both ends must be whole logical blocks.
pub(crate) fn device_zero(file: &File, offset: u64, len: u64) -> io::Result<()> {
    let range = [offset, len];
    // SAFETY: BLKZEROOUT reads two u64 through the pointer, which is valid for the call.
    check(unsafe { libc::ioctl(file.as_raw_fd(), BLKZEROOUT as _, range.as_ptr()) }).map(drop)
}

/// What the loop device `file` is over; an error if it is none, or over nothing.
pub(crate) fn loop_status(file: &File) -> io::Result<LoopStatus> {
    /// `LOOP_GET_STATUS64` (linux/loop.h).
    const LOOP_GET_STATUS64: u32 = 0x4C05;
    /// `struct loop_info64` (linux/loop.h), as far as it is read here.
    #[repr(C)]
    struct LoopInfo {
        device: u64,
        inode: u64,
        rdevice: u64,
        offset: u64,
        sizelimit: u64,
        rest: [u64; 24],
    }
    const _: () = assert!(size_of::<LoopInfo>() == 232);
    // SAFETY: all-zero bytes are a valid `LoopInfo` (plain integers).
    let mut info: LoopInfo = unsafe { std::mem::zeroed() };
    // SAFETY: LOOP_GET_STATUS64 stores a `loop_info64`, 232 bytes, through the pointer, which is
    // valid for the call.
    check(unsafe { libc::ioctl(file.as_raw_fd(), LOOP_GET_STATUS64 as _, &mut info) })?;
    Ok(LoopStatus {
        dev: info.device,
        inode: info.inode,
        rdev: info.rdevice,
        offset: info.offset,
        limit: info.sizelimit,
    })
}

/// fallocate(2) with `mode`, retried while interrupted.
pub(crate) fn fallocate(fd: RawFd, mode: i32, offset: u64, len: u64) -> io::Result<()> {
    let bad = |_| io::Error::from_raw_os_error(libc::EFBIG);
    let (offset, len) = (
        libc::off_t::try_from(offset).map_err(bad)?,
        libc::off_t::try_from(len).map_err(bad)?,
    );
    retry_interrupted(|| {
        // SAFETY: plain numbers; the kernel checks the descriptor.
        check(unsafe { libc::fallocate(fd, mode, offset, len) }).map(drop)
    })
}

/// fdatasync(2), retried while interrupted.
pub(crate) fn fdatasync(file: &File) -> io::Result<()> {
    retry_interrupted(|| {
        // SAFETY: plain numbers; the descriptor is open for the call.
        check(unsafe { libc::fdatasync(file.as_raw_fd()) }).map(drop)
    })
}

/// Advisory lock on the whole file without waiting; `WouldBlock` if somebody else holds it.
pub(crate) fn try_flock(file: &File, exclusive: bool) -> io::Result<()> {
    let how = if exclusive {
        libc::LOCK_EX
    } else {
        libc::LOCK_SH
    };
    // SAFETY: plain numbers; the descriptor is open for the call.
    check(unsafe { libc::flock(file.as_raw_fd(), how | libc::LOCK_NB) }).map(drop)
}

fn byte_lock(kind: libc::c_int, byte: i64) -> libc::flock {
    // SAFETY: all-zero bytes are a valid `flock` (plain integers). The process number must be 0 for
    // locks of open file descriptions.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = byte;
    lock.l_len = 1;
    lock
}

/// Takes a shared lock on one byte for the open file description, without waiting; fails with
/// `EAGAIN` or `EACCES` if somebody has it exclusively.
pub(crate) fn lock_byte(file: &File, byte: i64) -> io::Result<()> {
    let lock = byte_lock(libc::F_RDLCK, byte);
    retry_interrupted(|| {
        // SAFETY: F_OFD_SETLK reads a `flock` through the pointer, which is valid for the call.
        check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &lock) }).map(drop)
    })
}

/// True if another open file description, or another process, has any lock on one byte.
pub(crate) fn is_byte_locked(file: &File, byte: i64) -> io::Result<bool> {
    let mut lock = byte_lock(libc::F_WRLCK, byte);
    // SAFETY: F_OFD_GETLK reads and stores a `flock` through the pointer, valid for the call.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &mut lock) })?;
    Ok(lock.l_type != libc::F_UNLCK as libc::c_short)
}

/// What kind of file system `file` is on: its magic number (statfs(2)).
pub(crate) fn file_system(file: &File) -> io::Result<u32> {
    Ok(file_system_room(file)?.0)
}

/// Bytes that are free on a file system of `blocks` blocks, of which `free` are; [`u64::MAX`] if it has no blocks: then it does not say
/// (FUSE without statfs, procfs), which is not to be taken for full.
pub fn free_bytes(blocks: u64, free: u64, unit: u64) -> u64 {
    match blocks {
        0 => u64::MAX,
        _ => free.saturating_mul(unit),
    }
}

/// The same, and the bytes it has left for those who are not privileged; [`u64::MAX`] if it does not say.
pub(crate) fn file_system_room(file: &File) -> io::Result<(u32, u64)> {
    // SAFETY: all-zero bytes are a valid `statfs` (plain integers).
    let mut fs: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open and `fs` a valid out-pointer for the call.
    check(unsafe { libc::fstatfs(file.as_raw_fd(), &mut fs) })?;
    let unit = if fs.f_frsize > 0 {
        fs.f_frsize
    } else {
        fs.f_bsize
    };
    let free = free_bytes(fs.f_blocks as u64, fs.f_bavail as u64, unit as u64);
    Ok((fs.f_type as u32, free))
}

/// lseek(2) with `SEEK_DATA` or `SEEK_HOLE`; `None` past the last one (`ENXIO`).
pub(crate) fn seek(file: &File, offset: u64, whence: libc::c_int) -> io::Result<Option<u64>> {
    let offset =
        libc::off_t::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    // SAFETY: plain numbers; all other I/O here is positioned, so moving the cursor is harmless.
    let at = unsafe { libc::lseek(file.as_raw_fd(), offset, whence) };
    if at >= 0 {
        return Ok(Some(at as u64));
    }
    let err = io::Error::last_os_error();
    if err.raw_os_error() == Some(libc::ENXIO) {
        Ok(None)
    } else {
        Err(err)
    }
}

/// Direct-I/O alignment of a file as (memory, offset) in bytes, if the kernel and file system
/// report it (`STATX_DIOALIGN`, Linux 6.1). `Some((0, 0))` means: no direct I/O on this file.
pub(crate) fn dio_align(file: &File) -> Option<(u32, u32)> {
    // SAFETY: all-zero bytes are a valid `statx` (plain integers).
    let mut stx: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the path is a NUL-terminated empty string (AT_EMPTY_PATH) and `stx` outlives the call.
    let ret = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            &mut stx,
        )
    };
    (ret == 0 && stx.stx_mask & libc::STATX_DIOALIGN != 0)
        .then_some((stx.stx_dio_mem_align, stx.stx_dio_offset_align))
}

/// Runs `call` again while a signal interrupts it.
pub(crate) fn retry_interrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// Turns `O_DIRECT` off on an open file.
pub(crate) fn clear_direct(file: &File) -> io::Result<()> {
    // SAFETY: plain numbers; the descriptor is open for both calls.
    let flags = check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) })?;
    // SAFETY: as above.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags & !libc::O_DIRECT) })
        .map(drop)
}

/// Sets or clears `O_NONBLOCK`. io_uring waits for blocking sockets only; the poll loop must
/// never be caught in an `accept`.
pub(crate) fn set_nonblocking(fd: RawFd, on: bool) -> io::Result<()> {
    // SAFETY: plain numbers; the kernel checks the descriptor.
    let flags = check(unsafe { libc::fcntl(fd, libc::F_GETFL) })?;
    let want = if on {
        flags | libc::O_NONBLOCK
    } else {
        flags & !libc::O_NONBLOCK
    };
    if want == flags {
        return Ok(());
    }
    // SAFETY: as above.
    check(unsafe { libc::fcntl(fd, libc::F_SETFL, want) }).map(drop)
}

/// Asks the processor to fetch the cache line at `at`, which is needed soon. Only a hint.
#[inline]
pub fn prefetch<T>(at: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch changes nothing, and the address is that of a reference.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(at).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}
