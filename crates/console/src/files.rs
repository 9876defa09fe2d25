//! Small files of the console's own: read whole, replaced whole, for their owner alone.
//!
//! The console and the command line are two processes that read them. A file is
//! replaced by a rename, so nobody ever reads half of one; and who it was replaced for shows in its
//! inode and time, so that looking whether it changed is one `stat`.
//!
//! The console may run as a user of its own, and root sets it up: what root makes belongs to whom the directory
//! around it belongs.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{
    DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, fchown, lchown,
};
use std::path::Path;

use hearth_fault::Fault;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Longest file read.
const LENGTH_MAX: u64 = 1 << 20;

/// Which state of a file it is; `None` if there is none.
pub(crate) type Stamp = Option<(u64, i64, i64, u64)>;

/// The state a file is in.
pub(crate) fn stamp(path: &Path) -> Stamp {
    let meta = fs::metadata(path).ok()?;
    Some((meta.ino(), meta.mtime(), meta.mtime_nsec(), meta.len()))
}

/// To whom that belongs which is made in `dir`, if not to who makes it.
fn owner(dir: &Path) -> io::Result<Option<(u32, u32)>> {
    // SAFETY: geteuid has no preconditions and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        return Ok(None);
    }
    let meta = fs::metadata(dir)?;
    Ok(Some((meta.uid(), meta.gid())))
}

/// Makes a directory for its owner alone, unless it is there.
pub(crate) fn make_dir(dir: &Path) -> Result<(), Fault> {
    let make = || -> io::Result<()> {
        if dir.is_dir() {
            return Ok(());
        }
        DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        if let Some((uid, gid)) = dir.parent().map(owner).transpose()?.flatten() {
            lchown(dir, Some(uid), Some(gid))?;
        }
        Ok(())
    };
    make().map_err(|e| {
        Fault::new(
            format!("cannot make {}: {e}", dir.display()),
            "run this as the user who runs the console, or name its directory with --state-dir",
        )
    })
}

/// What is in a JSON file; the default if there is none.
pub(crate) fn read<T: DeserializeOwned + Default>(path: &Path) -> Result<T, Fault> {
    let mut text = String::new();
    let read = OpenOptions::new()
        .read(true)
        .open(path)
        .and_then(|file| file.take(LENGTH_MAX).read_to_string(&mut text));
    match read {
        Ok(_) => serde_json::from_str(&text).map_err(|e| {
            Fault::new(
                format!("{} is not understood: {e}", path.display()),
                "mend it, or remove it and set the console up anew",
            )
        }),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(T::default()),
        Err(e) => Err(Fault::new(
            format!("cannot read {}: {e}", path.display()),
            "run this as the user who runs the console",
        )),
    }
}

/// Puts `value` into a JSON file that only its owner can read.
pub(crate) fn write<T: Serialize>(path: &Path, value: &T) -> Result<(), Fault> {
    let failed = |e: io::Error| {
        Fault::new(
            format!("cannot write {}: {e}", path.display()),
            "run this as the user who runs the console, and see that there is room",
        )
    };
    let text = serde_json::to_vec_pretty(value).map_err(|e| failed(e.into()))?;
    let new = path.with_extension(format!("new-{}", std::process::id()));
    let put = || -> io::Result<()> {
        // What an earlier process of this number left behind.
        match fs::remove_file(&new) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&new)?;
        if let Some((uid, gid)) = path.parent().map(owner).transpose()?.flatten() {
            fchown(&file, Some(uid), Some(gid))?;
        }
        file.write_all(&text)?;
        file.sync_all()?;
        fs::rename(&new, path)
    };
    put().map_err(|e| {
        let _ = fs::remove_file(&new);
        failed(e)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_root_makes_belongs_to_whom_the_directory_belongs() {
        let dir = tempfile::tempdir().unwrap();
        // SAFETY: geteuid has no preconditions and cannot fail.
        let root = unsafe { libc::geteuid() } == 0;
        if root {
            lchown(dir.path(), Some(4711), Some(4712)).unwrap();
        }
        let of = |path: &Path| {
            let meta = fs::metadata(path).unwrap();
            (meta.uid(), meta.gid(), meta.mode() & 0o777)
        };
        let (uid, gid, _) = of(dir.path());
        let inner = dir.path().join("console");
        make_dir(&inner).unwrap();
        write(&inner.join("x.json"), &7).unwrap();
        assert_eq!(of(&inner), (uid, gid, 0o700));
        assert_eq!(of(&inner.join("x.json")), (uid, gid, 0o600));
        assert_eq!(read::<u32>(&inner.join("x.json")), Ok(7));
        // For others there is nothing to be given away.
        assert_eq!(uid == 4711, root, "{uid}");
    }
}
