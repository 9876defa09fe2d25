//! An image as an origin: its process, and our connection to it.

use crate::chain::{Backing, Chain, files_of};
use crate::child::{EXPORT, Guard, Supervisor, lock};
use crate::image::Image;
use hearth_fault::Fault;
use hearth_io::file::Identity;
use hearth_io::{Job, Link, Remote};
use hearth_nbd_client::{NbdOrigin, OpenError, Options};
use std::fmt;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// See the module. Dropping it closes the connection, then ends the process.
pub(crate) struct ImageOrigin {
    nbd: Option<NbdOrigin>,
    child: Arc<Supervisor>,
    path: Option<PathBuf>,
    /// Files the image is written through besides.
    parts: Vec<PathBuf>,
    name: String,
}

impl fmt::Debug for ImageOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ImageOrigin").field(&self.name).finish()
    }
}

/// Keeps the files of an image to those that were judged, over every restart of its process.
struct Kept {
    format: String,
    path: PathBuf,
    rules: Backing,
    /// As it was found before the last start.
    found: Mutex<Chain>,
}

impl Guard for Kept {
    fn before(&self) -> Result<(), Fault> {
        // The image may be another file by now, as after a copy in its place.
        let found = Chain::resolve(&self.format, &self.path, &self.rules);
        *lock(&self.found) = found.map_err(|e| e.fault())?;
        Ok(())
    }

    fn after(&self, pid: u32) -> Result<(), Fault> {
        let found = lock(&self.found).clone();
        match found.strangers(pid) {
            Ok(None) => Ok(()),
            Ok(Some(other)) => Err(Fault::new(
                format!(
                    "{} was changed while it was opened, so that {} was opened as well",
                    self.path.display(),
                    other.display()
                ),
                "see that nobody changes it any more, and who did",
            )),
            Err(e) => Err(Fault::bare(format!(
                "it cannot be seen which files belong to {}: {e}",
                self.path.display()
            ))),
        }
    }
}

impl ImageOrigin {
    /// Starts the process and connects to it. Blocks. `chain`: the files below the image, and what
    /// they may be.
    pub(crate) fn open(
        image: &Image,
        (chain, rules): (Chain, &Backing),
        dir: &Path,
        read_only: bool,
        timeout: Duration,
    ) -> Result<ImageOrigin, OpenError> {
        let files = files_of(&chain.text()).into_iter();
        let parts = files.filter(|(_, written)| *written).map(|(path, _)| path);
        let parts = parts.collect();
        let blockdev = image.blockdev(read_only, &chain);
        let guard = match image {
            Image::Local { format, path } => Some(Box::new(Kept {
                format: format.clone(),
                path: path.clone(),
                rules: Backing {
                    known: Some(chain.text()),
                    ..rules.clone()
                },
                found: Mutex::new(chain),
            }) as Box<dyn Guard>),
            Image::Remote { .. } => None,
        };
        let child = Supervisor::new(dir, image.name(), &blockdev, !read_only, guard)
            .map_err(OpenError::Thread)?;
        let child = Arc::new(child);
        let options = Options {
            export: EXPORT.to_owned(),
            read_only,
            timeout,
            errors_are_losses: image.is_remote(),
            shutdown_is_fencing: image.may_shut_out(),
            in_flight_max: image.in_flight_max(),
        };
        let nbd = NbdOrigin::open(child.clone(), options);
        if nbd.is_err() {
            child.stop();
        }
        Ok(ImageOrigin {
            nbd: Some(nbd?),
            child,
            path: image.path().map(Path::to_owned),
            parts,
            name: image.name(),
        })
    }

    /// There until dropped.
    fn nbd(&self) -> io::Result<&NbdOrigin> {
        self.nbd
            .as_ref()
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENODEV))
    }
}

/// When a file was modified and changed, nanoseconds since 1970.
fn times(meta: &Metadata) -> (i64, i64) {
    let ns = |s: i64, ns: i64| s.saturating_mul(1_000_000_000).saturating_add(ns);
    (
        ns(meta.mtime(), meta.mtime_nsec()),
        ns(meta.ctime(), meta.ctime_nsec()),
    )
}

/// With the latest times of all parts; `None` if one of them is no file.
fn with_times_of(mut found: Identity, parts: &[PathBuf]) -> Option<Identity> {
    for part in parts {
        let meta = std::fs::metadata(part).ok().filter(Metadata::is_file)?;
        let (mtime_ns, ctime_ns) = times(&meta);
        found.mtime_ns = found.mtime_ns.max(mtime_ns);
        found.ctime_ns = found.ctime_ns.max(ctime_ns);
    }
    Some(found)
}

impl Remote for ImageOrigin {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn size(&self) -> u64 {
        self.nbd().map_or(0, Remote::size)
    }

    /// Asks another process: an export has the size its image had when it was opened.
    fn refresh_size(&self) -> io::Result<u64> {
        let nbd = self.nbd()?;
        if nbd.link().fenced {
            return Err(io::Error::from_raw_os_error(libc::ESHUTDOWN));
        }
        self.child.restart();
        nbd.refresh_size()
    }

    fn align(&self) -> u32 {
        self.nbd().map_or(512, Remote::align)
    }

    fn is_read_only(&self) -> bool {
        self.nbd().map_or(true, Remote::is_read_only)
    }

    /// The image file's own, with the times of the latest change to any file it is written through:
    /// of an image that keeps its data elsewhere, its own file says little. None if some of it is on a device, whose times
    /// do not show a change.
    fn identity(&self) -> Option<Identity> {
        with_times_of(self.identity_of_top()?, &self.parts)
    }

    fn identity_of_top(&self) -> Option<Identity> {
        let meta = std::fs::metadata(self.path.as_ref()?)
            .ok()
            .filter(Metadata::is_file)?;
        let (mtime_ns, ctime_ns) = times(&meta);
        Some(Identity {
            size: self.size(),
            mtime_ns,
            ctime_ns,
            dev: meta.dev(),
            inode: meta.ino(),
        })
    }

    fn push(&self, job: Job) {
        // Dropped, it answers itself.
        if let Ok(nbd) = self.nbd() {
            nbd.push(job);
        }
    }

    fn link(&self) -> Link {
        match self.nbd() {
            Ok(nbd) => nbd.link(),
            Err(_) => Link::down(Fault::bare("closed")),
        }
    }

    fn set_timeout(&self, timeout: Duration) {
        if let Ok(nbd) = self.nbd() {
            nbd.set_timeout(timeout);
        }
    }

    fn hurry(&self) {
        if let Ok(nbd) = self.nbd() {
            nbd.hurry();
        }
    }
}

impl Drop for ImageOrigin {
    fn drop(&mut self) {
        // The last flush goes through the process.
        drop(self.nbd.take());
        self.child.stop();
    }
}

#[cfg(test)]
mod tests {
    use crate::{Backing, How, open};
    use std::fs::File;
    use std::process::Command;
    use std::time::{Duration, SystemTime};

    #[test]
    fn image_with_part_on_device_has_no_times() {
        let dir = tempfile::tempdir().unwrap();
        let part = dir.path().join("data.raw");
        std::fs::write(&part, "x").unwrap();
        let top = super::Identity::default();
        let found = super::with_times_of(top, std::slice::from_ref(&part));
        assert!(found.is_some_and(|found| found.mtime_ns > 0));
        assert_eq!(super::with_times_of(top, &[part, "/dev/null".into()]), None);
    }

    /// Its data lies in another file: who writes that changes the image.
    #[test]
    fn an_image_is_all_that_it_is_written_through() {
        let has = |tool: &str| Command::new(tool).arg("--version").output().is_ok();
        if !has("qemu-img") || !has("qemu-storage-daemon") {
            println!("SKIPPED identity of images: QEMU's tools are not installed");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (top, data) = (dir.path().join("top"), dir.path().join("data"));
        let made = Command::new("qemu-img")
            .args(["create", "-q", "-f", "qcow2", "-o"])
            .arg(format!("data_file={},data_file_raw=on", data.display()))
            .args([top.to_str().unwrap(), "1M"])
            .status();
        assert!(made.unwrap().success());
        let how = How {
            read_only: false,
            timeout: Duration::from_secs(30),
            images: dir.path().join("run"),
            backing: Backing {
                allowed: true,
                ..Backing::default()
            },
        };
        let spec = format!("qcow2:{}", top.display()).parse().unwrap();
        let device = open(&spec, &how).unwrap();
        let (before, of_top) = (
            device.identity().unwrap(),
            device.identity_of_top().unwrap(),
        );
        let later = SystemTime::now() + Duration::from_secs(1000);
        let file = File::options().write(true).open(&data).unwrap();
        file.set_modified(later).unwrap();
        let now = device.identity().unwrap();
        assert!(now.mtime_ns > before.mtime_ns + 900_000_000_000);
        assert_eq!((now.inode, now.size), (before.inode, before.size));
        assert_eq!(device.identity_of_top().unwrap(), of_top);
    }
}
