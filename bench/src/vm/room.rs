//! Is there room for what a run writes? Asked before the first byte: a benchmark that finds out by
//! filling a disk takes the room from whatever else lives there, and the numbers of a full file
//! system say nothing.

use super::BenchError;
use anyhow::{Context, Result};
use std::collections::HashMap;
use std::ffi::CString;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Bytes that must stay free: for the file system's own books and for what others write meanwhile.
const HEADROOM: u64 = 256 << 20;

/// Bytes that will be written below a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    /// The directory.
    pub place: PathBuf,
    /// Bytes at the same time.
    pub bytes: u64,
}

/// Fails with the figures if the file systems have not room for all of `needs` together.
pub fn check(needs: &[Need]) -> Result<()> {
    // Directories of one file system share its room.
    let mut systems: HashMap<u64, Need> = HashMap::new();
    for need in needs {
        let device = std::fs::metadata(&need.place)
            .with_context(|| format!("cannot look at {}", need.place.display()))?
            .dev();
        systems
            .entry(device)
            .and_modify(|n| n.bytes = n.bytes.saturating_add(need.bytes))
            .or_insert_with(|| need.clone());
    }
    for need in systems.into_values() {
        let free = free(&need.place)?;
        if !fits(need.bytes, free) {
            return Err(BenchError::NoRoom {
                place: need.place,
                need: need.bytes >> 20,
                free: free >> 20,
                headroom: HEADROOM >> 20,
            }
            .into());
        }
    }
    Ok(())
}

fn fits(bytes: u64, free: u64) -> bool {
    bytes.saturating_add(HEADROOM) <= free
}

/// Bytes this user may still write to the file system of `place`.
fn free(place: &Path) -> Result<u64> {
    let what = || format!("cannot ask how full the disk of {} is", place.display());
    let name = CString::new(place.as_os_str().as_bytes()).with_context(what)?;
    let mut stat = MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: a string that ends with 0 and an out-pointer, both of which live across the call.
    let rc = unsafe { libc::statvfs(name.as_ptr(), stat.as_mut_ptr()) };
    if rc != 0 {
        return Err(std::io::Error::last_os_error()).with_context(what);
    }
    // SAFETY: the call succeeded and has filled it in.
    let stat = unsafe { stat.assume_init() };
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headroom_is_left() {
        assert!(fits(0, HEADROOM) && !fits(1, HEADROOM));
        assert!(!fits(u64::MAX, u64::MAX - 1));
    }

    #[test]
    fn directories_of_one_disk_share_its_room() {
        let dir = tempfile::tempdir().unwrap();
        let need = |bytes| Need {
            place: dir.path().to_owned(),
            bytes,
        };
        let room = free(dir.path()).unwrap();
        assert!(room > 0);
        // More than half each: one may fit, both cannot, however much others write meanwhile.
        let both = check(&[need(room / 4 * 3), need(room / 4 * 3)]);
        let words = both.unwrap_err().to_string();
        assert!(
            words.contains(&format!("{} MiB", (room / 4 * 3 * 2) >> 20)),
            "{words}"
        );
        assert!(check(&[need(u64::MAX), need(1)]).is_err());
        let gone = Need {
            place: dir.path().join("none"),
            bytes: 0,
        };
        assert!(check(&[gone]).is_err());
    }
}
