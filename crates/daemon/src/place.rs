//! Where flash lies, and whether that is a place for it.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// What the file system that holds a path says of itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileSystem {
    /// Mounted read-only.
    pub read_only: bool,
}

impl FileSystem {
    /// Of the file system that holds `path`, which must exist.
    pub fn of(path: &Path) -> std::io::Result<FileSystem> {
        let name = CString::new(path.as_os_str().as_bytes())?;
        // SAFETY: all-zero bytes are a valid `statvfs` (plain integers).
        let mut vfs: libc::statvfs = unsafe { std::mem::zeroed() };
        // SAFETY: a NUL-terminated path and a structure to be filled in, both alive across the call.
        if unsafe { libc::statvfs(name.as_ptr(), &mut vfs) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        Ok(FileSystem {
            read_only: vfs.f_flag & libc::ST_RDONLY != 0,
        })
    }
}

/// True if nobody can write what is at `path`: a device that is read-only, a file on a read-only mount.
pub(crate) fn is_read_only(path: &Path) -> bool {
    let Ok(meta) = std::fs::metadata(path) else {
        return false;
    };
    if meta.file_type().is_block_device() {
        let (major, minor) = (libc::major(meta.rdev()), libc::minor(meta.rdev()));
        let told = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/ro"));
        return told.is_ok_and(|ro| ro.trim() == "1");
    }
    FileSystem::of(path).is_ok_and(|fs| fs.read_only)
}
