//! What blocks are written to.

use std::path::{Path, PathBuf};

use hearth_io::file::sync_names;
use hearth_io::{BlockFile, OpenMode};

use crate::error::{Error, Result};
use crate::pool::opening;

/// See the module.
pub(super) struct Target {
    pub path: PathBuf,
    file: BlockFile,
    /// As far as that it is written; what lies behind is left out.
    end: u64,
    new: bool,
}

impl Target {
    /// A new file of this size.
    pub fn make(path: &Path, size: u64) -> Result<Target> {
        let made = std::fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(path)
            .and_then(|file| file.set_len(size));
        made.map_err(|e| {
            Error::unavailable(
                format!("cannot make {}: {e}", path.display()),
                "give the name of a file that is not there, where there is room",
            )
        })?;
        Target::open(path, size, true)
    }

    /// A file or device that has to hold a disk of this size.
    pub fn over(path: &Path, disk: &str, size: u64) -> Result<Target> {
        let target = Target::open(path, size, false)?;
        if target.file.size() < size {
            return Err(Error::refused(
                format!(
                    "{} has {} bytes, and disk {disk} has {size}",
                    path.display(),
                    target.file.size()
                ),
                "give what holds all of the disk's origin",
            ));
        }
        Ok(target)
    }

    /// A file that ends where it ends.
    pub fn as_it_is(path: &Path) -> Result<Target> {
        Target::open(path, u64::MAX, false)
    }

    fn open(path: &Path, most: u64, new: bool) -> Result<Target> {
        // Somebody else who uses it is noticed here.
        let file = BlockFile::open(path, OpenMode::default()).map_err(|e| opening(path, e))?;
        Ok(Target {
            path: path.to_owned(),
            end: file.size().min(most),
            file,
            new,
        })
    }

    /// How far it is written.
    pub fn end(&self) -> u64 {
        self.end
    }

    fn failed(&self, e: &std::io::Error) -> Error {
        Error::unavailable(
            format!("cannot write {}: {e}", self.path.display()),
            "check free space and the device's health",
        )
    }

    /// Writes as much of it as lies before the end.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        let most = self.end.saturating_sub(offset).min(data.len() as u64) as usize;
        let data = data.get(..most).unwrap_or_default();
        if data.is_empty() {
            return Ok(());
        }
        let written = self.file.write_at(offset, data);
        written.map_err(|e| self.failed(&e))
    }

    pub fn finish(&self) -> Result<()> {
        let done = self.file.flush();
        let done = done.and_then(|()| match self.new {
            true => sync_names(&self.path),
            false => Ok(()),
        });
        done.map_err(|e| self.failed(&e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_written_as_far_as_it_goes_and_gets_no_longer() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.img");
        std::fs::write(&path, [1; 5000]).unwrap();
        assert!(Target::over(&path, "d", 8192).is_err(), "it lacks some");
        let target = Target::as_it_is(&path).unwrap();
        assert_eq!(target.end(), 5000);
        for block in [1, 2, 1 << 40] {
            target.write(block * 4096, &[2; 4096]).unwrap();
        }
        target.finish().unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(bytes, [vec![1; 4096], vec![2; 904]].concat());
        drop(target);
        // A disk is no longer than it is, whatever its origin has behind it.
        assert_eq!(Target::over(&path, "d", 4096).unwrap().end(), 4096);
    }
}
