//! Files by what their file system calls them.

use std::ffi::{CStr, c_int, c_uint};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use rustix::fs::OFlags;

use crate::handle::{KEY_MAX, Key};

/// First byte of our keys: found by the file system's own handle.
const BY_HANDLE: u8 = 1;
/// Room for a file system's handle in a key.
const ROOM: usize = KEY_MAX - 2;

/// What the kernel takes and gives: a length, a kind, and so many bytes.
#[repr(C)]
struct FileHandle {
    bytes: c_uint,
    kind: c_int,
    handle: [u8; ROOM],
}

/// The key of an open file, and the number of the mount it was reached by.
pub(super) fn key_of(file: &impl AsFd) -> io::Result<(Key, i32)> {
    let mut handle = FileHandle {
        bytes: ROOM as c_uint,
        kind: 0,
        handle: [0; ROOM],
    };
    let mut mount: c_int = 0;
    let empty: &CStr = c"";
    // SAFETY: the handle has room for as many bytes as it says, the name is a C string, and all
    // outlive the call.
    let failed = unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            file.as_fd().as_raw_fd(),
            empty.as_ptr(),
            &raw mut handle,
            &raw mut mount,
            libc::AT_EMPTY_PATH,
        )
    };
    if failed != 0 {
        let error = io::Error::last_os_error();
        return Err(match error.raw_os_error() {
            Some(libc::EOVERFLOW) => io::Error::other("its handles are longer than ours can be"),
            _ => error,
        });
    }
    u8::try_from(handle.kind)
        .map_err(|_| io::Error::other("a kind of handle that is unknown here"))?;
    let handle_bytes = handle.handle.get(..handle.bytes as usize);
    let key = key_by_handle(handle.kind, handle_bytes.unwrap_or_default())
        .ok_or_else(|| io::Error::other("a handle that is too long"))?;
    Ok((key, mount))
}

/// The key of an open file.
pub fn key_of_open(file: &impl AsFd) -> io::Result<Key> {
    key_of(file).map(|(key, _)| key)
}

/// The key of the file that its file system calls so.
pub fn key_by_handle(kind: c_int, handle: &[u8]) -> Option<Key> {
    let mut bytes = vec![BY_HANDLE, u8::try_from(kind).ok()?];
    bytes.extend_from_slice(handle);
    Key::new(&bytes)
}

/// Opens the file of a key, on the file system of `root`. `ESTALE` if it is gone.
pub(super) fn open(root: &impl AsFd, key: &Key, flags: OFlags) -> io::Result<OwnedFd> {
    let stale = || io::Error::from_raw_os_error(libc::ESTALE);
    let [BY_HANDLE, kind, bytes @ ..] = key.bytes() else {
        return Err(stale());
    };
    let mut handle = FileHandle {
        bytes: bytes.len() as c_uint,
        kind: c_int::from(*kind),
        handle: [0; ROOM],
    };
    handle
        .handle
        .get_mut(..bytes.len())
        .ok_or_else(stale)?
        .copy_from_slice(bytes);
    let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    // SAFETY: the handle holds as many bytes as it says and outlives the call.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_open_by_handle_at,
            root.as_fd().as_raw_fd(),
            &raw mut handle,
            flags.bits() as c_int,
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as c_int) })
}
