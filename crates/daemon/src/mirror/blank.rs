//! Whether a leg may be overwritten: it must hold nothing where whatever is on a device says so.
//!
//! That is at its ends: file systems and partition tables say so at the front (Btrfs 64 KiB behind it), a RAID (md 1.0) and the second
//! copy of a partition table at the very end. A larger leg has that behind the end of the disk; nothing is written there, but what lies in front of it is
//! somebody's.

use std::io;

use hearth_io::Device;

use crate::error::{Error, Result};

/// Bytes at each end that have to be blank.
const BLANK: u64 = 1 << 20;

/// Refuses to overwrite a leg of a new mirror that holds something else than the first one.
pub(super) fn check_blank(name: &str, leg: &Device, first: &Device) -> Result<()> {
    let size = first.size();
    for at in ends(size) {
        let here = read(name, leg, at, BLANK.min(size))?;
        let there = read(name, first, at, BLANK.min(size))?;
        if here != there && !is_blank(&here) {
            return Err(Error::refused(
                format!(
                    "{name} holds something, and all of it would be overwritten with the first leg's content"
                ),
                "name the leg first that holds the disk; if nothing on this one is needed, clear its first and last MiB, for instance with `dd`",
            ));
        }
    }
    check_own_end(name, leg, size)
}

/// Refuses to overwrite a new leg of a disk of `size` bytes that holds something.
pub(crate) fn check_unused(name: &str, leg: &Device, size: u64) -> Result<()> {
    for at in ends(size) {
        if !is_blank(&read(name, leg, at, BLANK.min(size))?) {
            return Err(Error::refused(
                format!("{name} holds something, and all of it would be overwritten"),
                "if nothing on it is needed, clear its first and last MiB, for instance with `dd`",
            ));
        }
    }
    check_own_end(name, leg, size)
}

/// Refuses a larger leg that holds something at its own end.
fn check_own_end(name: &str, leg: &Device, size: u64) -> Result<()> {
    let behind = leg.size().saturating_sub(size);
    if behind == 0 {
        return Ok(());
    }
    let length = BLANK.min(leg.size());
    let end = read(name, leg, leg.size() - length, length)?;
    // Of what reaches into the disk was judged already.
    let from = end
        .len()
        .saturating_sub(usize::try_from(behind).unwrap_or(usize::MAX));
    if end.get(from..).is_none_or(is_blank) {
        return Ok(());
    }
    Err(Error::refused(
        format!(
            "{name} holds something at its own end, behind the end of the disk, as a RAID or a partition table does, and what lies in front of it would be overwritten"
        ),
        "if nothing on it is needed, clear its first and last MiB, for instance with `dd`",
    ))
}

fn ends(size: u64) -> [u64; 2] {
    [0, size.saturating_sub(BLANK)]
}

fn is_blank(bytes: &[u8]) -> bool {
    bytes.iter().all(|b| *b == 0)
}

fn read(name: &str, leg: &Device, at: u64, length: u64) -> Result<Vec<u8>> {
    let mut bytes = vec![0; length as usize];
    let failed = |e: io::Error| {
        Error::unavailable(format!("the leg {name} cannot be read: {e}"), "replace it")
    };
    leg.read_at(at, &mut bytes).map_err(failed)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::path::Path;

    use hearth_io::{BlockFile, OpenMode};

    use super::*;

    const MIB: u64 = 1 << 20;

    /// A leg of so many bytes with something at these places.
    fn leg(dir: &Path, name: &str, size: u64, at: &[u64]) -> Device {
        let path = dir.join(name);
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(size).unwrap();
        for at in at {
            file.write_all_at(b"something", *at).unwrap();
        }
        Device::new(BlockFile::open(&path, OpenMode::default()).unwrap())
    }

    /// RAIDs (md 1.0) and the second copy of a partition table are there.
    #[test]
    fn a_larger_leg_with_something_at_its_own_end_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (size, large) = (4 * MIB, 8 * MIB);
        let first = leg(dir.path(), "first", size, &[0, size - 4096]);
        let blank = leg(dir.path(), "blank", large, &[]);
        check_blank("b", &blank, &first).unwrap();
        check_unused("b", &blank, size).unwrap();
        for (n, at) in [large - 4096, large - BLANK].into_iter().enumerate() {
            let raid = leg(dir.path(), &format!("raid{n}"), large, &[at]);
            for refused in [
                check_blank("r", &raid, &first),
                check_unused("r", &raid, size),
            ] {
                let why = refused.unwrap_err();
                assert!(why.what.contains("its own end"), "{why}");
            }
        }
        // In the middle nobody looks.
        let middle = leg(dir.path(), "middle", large, &[size + MIB]);
        check_blank("m", &middle, &first).unwrap();
    }

    /// A leg that is larger by less than what is looked at has the disk's end there, too.
    #[test]
    fn what_of_the_disk_lies_in_the_last_bytes_of_a_leg_is_not_its_own_end() {
        let dir = tempfile::tempdir().unwrap();
        let size = 4 * MIB;
        let at = [0, size - 4096];
        let first = leg(dir.path(), "first", size, &at);
        let same = leg(dir.path(), "same", size + 4096, &at);
        check_blank("s", &same, &first).unwrap();
        let more = leg(dir.path(), "more", size + 4096, &[0, size - 4096, size]);
        assert!(check_blank("m", &more, &first).is_err());
        let other = leg(dir.path(), "other", size, &[size - 4096 + 100]);
        assert!(check_blank("o", &other, &first).is_err());
    }

    /// Btrfs writes nothing before its superblock, which is 64 KiB behind the beginning.
    #[test]
    fn leg_with_btrfs_alone_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let size = 8 * MIB;
        let first = leg(dir.path(), "first", size, &[]);
        let btrfs = leg(dir.path(), "btrfs", size, &[65536 + 64]);
        assert!(check_blank("b", &btrfs, &first).is_err());
        assert!(check_unused("b", &btrfs, size).is_err());
    }
}
