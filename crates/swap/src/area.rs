//! The file that is swapped to.
//!
//! It is written in full before the kernel gets it. A file with holes is refused by some kernels, and where it is
//! taken, room would have to be found when memory is short: the moment at which there is none. It belongs to root and is readable by
//! nobody else, for it will hold what any program had in its memory.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use hearth_fault::Fault;
use uuid::Uuid;

use crate::Result;

/// Written at once; between pieces whoever waits may call it off.
const PIECE: usize = 4 << 20;
/// Pieces after which what was written leaves the page cache, which would else fill with zeros.
const SYNC_EVERY: u64 = 16;
/// Smallest area: below, it is not worth a file.
pub const SIZE_MIN: u64 = 1 << 20;
/// Of the file system's room, what must be left: other files there need some.
const SPARE: u64 = 64 << 20;
/// A page of the swap header's; its last ten bytes are the magic.
pub(crate) const HEADER: usize = 4096;
const MAGIC: &[u8] = b"SWAPSPACE2";
/// Where the UUID is in it, behind the version, the last page and the number of bad ones.
const UUID_AT: usize = 1024 + 12;

/// Behind the name of a flash file, the name of the area beside it.
const SUFFIX: &str = ".swap";

/// Where the area beside a flash file is.
pub fn beside(flash: &Path) -> Result<PathBuf> {
    let meta = std::fs::metadata(flash).map_err(|e| {
        Fault::new(
            format!("cannot look at {}: {e}", flash.display()),
            "name the pool's flash file with --flash",
        )
    })?;
    if !meta.is_file() {
        return Err(Fault::new(
            format!(
                "{} is no file, beside which another one could be",
                flash.display()
            ),
            "use --in-pool, while the daemon serves the pool",
        ));
    }
    // What it is called is the file's, wherever links to it are.
    let flash = std::fs::canonicalize(flash).map_err(|e| {
        Fault::new(
            format!("cannot look at {}: {e}", flash.display()),
            "check the path and its permissions",
        )
    })?;
    let mut name = flash.file_name().unwrap_or_default().to_owned();
    name.push(SUFFIX);
    Ok(flash.with_file_name(name))
}

/// Is there room for it?
pub fn room(path: &Path, size: u64) -> Result<()> {
    use std::os::unix::ffi::OsStrExt;
    let dir = path.parent().unwrap_or(Path::new("/"));
    let name = std::ffi::CString::new(dir.as_os_str().as_bytes())
        .map_err(|_| Fault::new("a path with a zero byte", "give another --flash"))?;
    // SAFETY: all zeros are a valid value of this structure of numbers.
    let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: a string that ends with a zero, and a structure of ours that is filled.
    if unsafe { libc::statvfs(name.as_ptr(), &mut stat) } != 0 {
        let e = io::Error::last_os_error();
        return Err(Fault::new(
            format!("cannot look at {}: {e}", dir.display()),
            "check the path and its permissions",
        ));
    }
    let free = hearth_io::free_bytes(stat.f_blocks, stat.f_bavail, stat.f_frsize);
    if free < size.saturating_add(SPARE) {
        return Err(Fault::new(
            format!(
                "{} bytes are free in {}, and {} are needed: the area and 64 MiB to spare",
                free,
                dir.display(),
                size.saturating_add(SPARE)
            ),
            "give a smaller --size, or make room",
        ));
    }
    Ok(())
}

/// Writes it, in full and durably; `false` from `goes_on` (called with what is written and all of it) calls it off. What is there
/// afterwards is removed by who noted it.
pub fn write(path: &Path, size: u64, goes_on: &mut dyn FnMut(u64, u64) -> bool) -> Result<bool> {
    let failed = |e: io::Error| {
        let remedy = match e.kind() {
            io::ErrorKind::AlreadyExists => "remove it if nobody needs it",
            io::ErrorKind::StorageFull => "give a smaller --size, or make room",
            _ => "check the device with smartctl and dmesg",
        };
        Fault::new(format!("cannot write {}: {e}", path.display()), remedy)
    };
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(path)
        .map_err(failed)?;
    let zeros = vec![0; PIECE];
    let mut done = 0;
    let mut pieces = 0;
    while done < size {
        if !goes_on(done, size) {
            return Ok(false);
        }
        let len = (size - done).min(PIECE as u64);
        file.write_all(&zeros[..len as usize]).map_err(failed)?;
        done += len;
        pieces += 1;
        if pieces % SYNC_EVERY == 0 || done == size {
            file.sync_data().map_err(failed)?;
            forget(&file);
        }
    }
    file.sync_all().map_err(failed)?;
    let dir = path.parent().unwrap_or(Path::new("/"));
    File::open(dir).and_then(|d| d.sync_all()).map_err(failed)?;
    goes_on(size, size);
    Ok(true)
}

/// What is durable need not be in memory.
fn forget(file: &File) {
    use std::os::fd::AsRawFd;
    // SAFETY: a descriptor that is open across the call; advice only.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
}

/// Makes it swap, by this UUID.
pub fn format(path: &Path, uuid: Uuid) -> Result<()> {
    let out = Command::new("mkswap")
        .args(["--label", "hearth", "--uuid", &uuid.to_string()])
        .arg(path)
        .output();
    let why = match out {
        Ok(out) if out.status.success() => return Ok(()),
        Ok(out) => String::from_utf8_lossy(&out.stderr).trim().to_owned(),
        Err(e) => e.to_string(),
    };
    Err(Fault::new(
        format!("mkswap cannot make {} swap: {why}", path.display()),
        "install util-linux, or look at the file system",
    ))
}

/// Is it still what was noted? It is opened without following links, and nobody but root may have a hand in it.
pub fn check(path: &Path, size: u64, uuid: Uuid) -> Result<()> {
    let wrong = |what: &str| {
        Fault::new(
            format!("{} is not taken as swap: {what}", path.display()),
            "`hearth swap off` forgets it; `hearth swap on` makes a new one",
        )
    };
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(path)
        .map_err(|e| wrong(&e.to_string()))?;
    let meta = file.metadata().map_err(|e| wrong(&e.to_string()))?;
    if !meta.is_file() {
        return Err(wrong("it is no file"));
    }
    if meta.uid() != 0 || meta.mode() & 0o077 != 0 {
        return Err(wrong("others than root may read or write it"));
    }
    if meta.len() != size {
        return Err(wrong(&format!(
            "it has {} bytes, and was made with {size}",
            meta.len()
        )));
    }
    let mut header = [0; HEADER];
    file.read_exact_at(&mut header, 0)
        .map_err(|e| wrong(&e.to_string()))?;
    match header_uuid(&header) {
        Some(found) if found == uuid => Ok(()),
        Some(_) => Err(wrong("it is other swap than was made")),
        None => Err(wrong("it is no swap any more")),
    }
}

/// Of which swap a file or device is, if of any.
pub(crate) fn uuid_at(path: &Path) -> io::Result<Option<Uuid>> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK)
        .open(path)?;
    let mut header = [0; HEADER];
    file.read_exact_at(&mut header, 0)?;
    Ok(header_uuid(&header))
}

/// Reads the header of a swap file from the device.
pub(crate) fn read_back(path: &Path) -> io::Result<()> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_DIRECT)
        .open(path)?;
    let mut header = hearth_io::Buf::zeroed(HEADER).all();
    file.read_exact_at(header.bytes_mut(), 0)
}

/// The UUID in a swap header (`mkswap(8)`, `union swap_header` of `linux/swap.h`).
pub(crate) fn header_uuid(header: &[u8; HEADER]) -> Option<Uuid> {
    if !header.ends_with(MAGIC) {
        return None;
    }
    let bytes = header[UUID_AT..UUID_AT + 16].try_into().ok()?;
    Some(Uuid::from_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_beside_the_file_wherever_links_are() {
        let dir = tempfile::tempdir().unwrap();
        let flash = dir.path().join("flash");
        std::fs::write(&flash, b"x").unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&flash, &link).unwrap();
        let wanted = dir.path().canonicalize().unwrap().join("flash.swap");
        assert_eq!(beside(&flash), Ok(wanted.clone()));
        assert_eq!(beside(&link), Ok(wanted));
        assert!(beside(&dir.path().join("none")).is_err());
        let device = beside(Path::new("/dev/null")).unwrap_err();
        assert!(device.what.contains("no file") && !device.remedy.is_empty());
    }

    #[test]
    fn it_has_no_holes_and_is_nobody_elses() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let size = PIECE as u64 + SIZE_MIN;
        let mut told = Vec::new();
        let whole = write(&path, size, &mut |done, all| {
            told.push((done, all));
            true
        });
        assert_eq!(whole, Ok(true));
        assert_eq!(told, [(0, size), (PIECE as u64, size), (size, size)]);
        let meta = std::fs::metadata(&path).unwrap();
        assert_eq!(meta.mode() & 0o777, 0o600);
        assert!(meta.len() == size && meta.blocks() * 512 >= size);
        // What is there already is nobody's to overwrite.
        let again = write(&path, size, &mut |_, _| true).unwrap_err();
        assert!(again.remedy.contains("remove"), "{again}");
        let off = dir.path().join("b");
        assert_eq!(write(&off, size, &mut |_, _| false), Ok(false));
        assert!(room(&path, 1 << 60).is_err());
        // A file system that has no blocks does not say what is free.
        assert_eq!(room(Path::new("/proc/swap"), 1 << 60), Ok(()));
    }

    #[test]
    fn a_header_as_mkswap_writes_it() {
        let mut header = [0; HEADER];
        assert_eq!(header_uuid(&header), None);
        let uuid = Uuid::from_u128(0x0123_4567_89ab_cdef_0011_2233_4455_6677);
        header[1024] = 1;
        header[1036..1052].copy_from_slice(uuid.as_bytes());
        header[4086..].copy_from_slice(b"SWAPSPACE2");
        assert_eq!(header_uuid(&header), Some(uuid));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        assert_eq!(write(&path, SIZE_MIN, &mut |_, _| true), Ok(true));
        if Command::new("mkswap").arg("--version").output().is_ok() {
            format(&path, uuid).unwrap();
            let made = std::fs::read(&path).unwrap();
            let made: &[u8; HEADER] = made[..HEADER].try_into().unwrap();
            assert_eq!(header_uuid(made), Some(uuid));
        }
    }
}
