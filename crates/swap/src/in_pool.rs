//! An area inside the pool: a stretch of a flash device that the pool has set aside, which the kernel sees as a loop device.
//!
//! A pool that has a device to itself has no file system beside it. So the daemon empties segments at the end of the device and lists them
//! in the superblock as no part of its log; a loop device shows just that stretch, with direct I/O, and the kernel swaps to it. The daemon is not in
//! the way of a page, and the stretch is durable knowledge of the flash: nothing has to be noted here before it is there.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use hearth_fault::Fault;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::Result;
use crate::area;

/// Written at once.
const PIECE: usize = 4 << 20;

/// A stretch of a flash device that is set aside.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lent {
    /// The flash device or file.
    pub flash: PathBuf,
    /// Of which pool.
    pub pool: Uuid,
    /// The device's number for life.
    pub device: Uuid,
    /// From which byte on.
    pub offset: u64,
    /// How many.
    pub bytes: u64,
}

/// Whoever has the pool: the daemon.
pub trait Lender {
    /// Sets so many bytes aside; `false` from `goes_on` (bytes that are free for it, and all) calls it off: `Ok(None)`.
    fn lend(
        &mut self,
        size: u64,
        goes_on: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<Option<Lent>>;
    /// Takes a stretch back, which nobody writes to any more.
    fn take_back(&mut self, lent: &Lent) -> Result<()>;
    /// What is set aside.
    fn lent(&mut self) -> Result<Vec<Lent>>;
    /// Is it still what was noted: that device of that pool, with this stretch set aside? Whoever knows the flash looks at it:
    /// after a boot nobody serves the pool yet.
    fn check(&mut self, lent: &Lent) -> Result<()>;
}

impl Lent {
    /// The same stretch of the same device, whatever that is called now.
    pub fn is_same(&self, other: &Lent) -> bool {
        let of = |l: &Lent| (l.pool, l.device, l.offset, l.bytes);
        of(self) == of(other)
    }

    /// Loop devices over it.
    pub(crate) fn loops(&self) -> Result<Vec<PathBuf>> {
        let end = self.offset.saturating_add(self.bytes);
        hearth_io::loops_over(&self.flash, self.offset..end).map_err(|e| {
            Fault::new(
                format!("cannot tell what is over {}: {e}", self.flash.display()),
                "the device has to be there, and the host's /sys",
            )
        })
    }

    fn is_file(&self) -> bool {
        std::fs::metadata(&self.flash).is_ok_and(|meta| meta.is_file())
    }

    /// Refuses what would make holes in a file: room for them would have to be found when memory is short.
    pub(crate) fn check_discard(&self, off: bool) -> Result<()> {
        match off || !self.is_file() {
            true => Ok(()),
            false => Err(Fault::new(
                "the pool is a file, in which discarding makes holes",
                "leave --discard out",
            )),
        }
    }

    /// A loop device that shows it, and nothing else, past the page cache.
    pub(crate) fn show(&self) -> Result<PathBuf> {
        let wrong = |what: &str, remedy: &'static str| {
            Fault::new(
                format!(
                    "no loop device can be had over {}: {what}",
                    self.flash.display()
                ),
                remedy,
            )
        };
        if let Some(other) = self.loops()?.first() {
            let what = format!("{} is over that part of it already", other.display());
            return Err(wrong(
                &what,
                "detach it with `losetup -d` if nobody uses it",
            ));
        }
        let out = Command::new("losetup")
            .args(["--find", "--show", "--direct-io=on"])
            .args(["--offset", &self.offset.to_string()])
            .args(["--sizelimit", &self.bytes.to_string()])
            .arg(&self.flash)
            .output();
        let node = match out {
            Ok(out) if out.status.success() => {
                PathBuf::from(String::from_utf8_lossy(&out.stdout).trim())
            }
            Ok(out) => {
                let what = String::from_utf8_lossy(&out.stderr).trim().to_owned();
                return Err(wrong(
                    &what,
                    "run it as root, where the kernel has loop devices",
                ));
            }
            Err(e) => return Err(wrong(&e.to_string(), "install util-linux")),
        };
        // Through the page cache the kernel would need memory to get rid of memory; and it must be that stretch.
        let told = |file: &str| {
            let name = node.file_name().unwrap_or_default();
            let path = Path::new("/sys/block").join(name).join(file);
            std::fs::read_to_string(path).map(|text| text.trim().to_owned())
        };
        let direct = told("loop/dio").is_ok_and(|dio| dio == "1");
        let offset = told("loop/offset").is_ok_and(|o| o == self.offset.to_string());
        let size = told("size").is_ok_and(|s| s == (self.bytes / 512).to_string());
        if direct && offset && size {
            return Ok(node);
        }
        detach(&node)?;
        Err(wrong(
            "it would not have direct I/O, or not show just that part",
            "use a kernel and util-linux with direct I/O for loop devices over this device",
        ))
    }

    /// Where it is in a file, gives all of it its room there.
    pub(crate) fn fill(
        &self,
        node: &Path,
        goes_on: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<bool> {
        if !self.is_file() {
            return Ok(goes_on(self.bytes, self.bytes));
        }
        let failed = |e: io::Error| {
            Fault::new(
                format!("cannot write {}: {e}", node.display()),
                "make room in the file system of the pool, or check the device with smartctl and dmesg",
            )
        };
        let mut file = open(node, true).map_err(failed)?;
        let zeros = vec![0; PIECE];
        let mut done = 0;
        while done < self.bytes {
            if !goes_on(done, self.bytes) {
                return Ok(false);
            }
            let len = (self.bytes - done).min(PIECE as u64);
            file.write_all(&zeros[..len as usize]).map_err(failed)?;
            // Else it would fill the page cache.
            file.sync_data().map_err(failed)?;
            done += len;
        }
        Ok(goes_on(self.bytes, self.bytes))
    }
}

fn open(node: &Path, write: bool) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(write)
        .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW)
        .open(node)
}

/// Is there the swap on it that was made?
pub(crate) fn check_header(node: &Path, uuid: Uuid) -> Result<()> {
    let wrong = |what: &str| {
        Fault::new(
            format!("what is set aside of the pool is not taken as swap: {what}"),
            "`hearth swap off` gives it back; `hearth swap on --in-pool` makes new swap",
        )
    };
    let file = open(node, false).map_err(|e| wrong(&e.to_string()))?;
    let meta = file.metadata().map_err(|e| wrong(&e.to_string()))?;
    if !meta.file_type().is_block_device() {
        return Err(wrong("there is no block device"));
    }
    let mut header = [0; area::HEADER];
    file.read_exact_at(&mut header, 0)
        .map_err(|e| wrong(&e.to_string()))?;
    match area::header_uuid(&header) {
        Some(found) if found == uuid => Ok(()),
        Some(_) => Err(wrong("it is other swap than was made")),
        None => Err(wrong("there is no swap any more")),
    }
}

/// Takes a loop device away.
pub(crate) fn detach(node: &Path) -> Result<()> {
    let out = Command::new("losetup").arg("--detach").arg(node).output();
    let why = match out {
        Ok(out) if out.status.success() => return Ok(()),
        Ok(out) => String::from_utf8_lossy(&out.stderr).trim().to_owned(),
        Err(e) => e.to_string(),
    };
    Err(Fault::new(
        format!("cannot take {} away: {why}", node.display()),
        "`losetup -d` does so by hand; then use `hearth swap off` once more",
    ))
}
