//! Small files of the console's own: read whole, replaced whole, for their owner alone.
//!
//! The console and the command line are two processes that read them. A file is
//! replaced by a rename, so nobody ever reads half of one; and who it was replaced for shows in its
//! inode and time, so that looking whether it changed is one `stat`.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
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

/// Makes a directory for its owner alone, unless it is there.
pub(crate) fn make_dir(dir: &Path) -> Result<(), Fault> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.map_err(|e| {
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
        file.write_all(&text)?;
        file.sync_all()?;
        fs::rename(&new, path)
    };
    put().map_err(|e| {
        let _ = fs::remove_file(&new);
        failed(e)
    })
}
