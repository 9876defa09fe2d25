//! Having a file or block device to oneself, under whatever name others may reach it.
//!
//! The locks of [`lock`](crate::lock) stand on one inode. The same data may also be reached from
//! above (a loop device over the file, a partition of the disk) or from below (the file a loop
//! device is made of), where the kernel knows of no connection. So who takes a file or device here
//! also marks the files beneath it, and looks whether somebody uses what lies above.
//!
//! Marks on a file beneath count for the whole file, as QEMU knows no others. Within this process
//! they are shared: two disks may be two partitions of one loop device, and whoever adds disks
//! compares their stretches. Another process with another stretch of the file is refused.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::beneath::{
    Beneath, Kernel, Node, Part, Running, beneath_device, device_number, sys_dir,
};
use crate::lock::{self, Use};
use crate::sys;
use crate::user::User;

/// Most block devices that are looked at for lying above.
const DEVICES_MAX: usize = 4096;

/// Somebody else uses a file or device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InUse {
    /// What was to be used.
    pub path: PathBuf,
    /// The other name under which it is in use, if it is another one, and whether that lies below.
    pub other: Option<(PathBuf, bool)>,
    /// By whom.
    pub user: User,
}

impl InUse {
    pub(crate) fn new(path: &Path) -> InUse {
        InUse {
            path: path.to_owned(),
            other: None,
            user: User::Unknown,
        }
    }

    /// Finds out who it is.
    pub(crate) fn named(mut self) -> InUse {
        let path = self.other.as_ref().map_or(&self.path, |(other, _)| other);
        self.user = User::of(path);
        self
    }

    /// True if it is this process.
    pub fn is_ours(&self) -> bool {
        matches!(self.user, User::Process { pid, .. } if pid == std::process::id())
    }

    /// What to do about it.
    pub fn remedy(&self) -> &'static str {
        self.user.remedy()
    }
}

impl fmt::Display for InUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        match &self.other {
            None => write!(f, "{path} {}", self.user),
            Some((other, true)) => write!(
                f,
                "{path} cannot be used: {}, of which it is made, {}",
                other.display(),
                self.user
            ),
            Some((other, false)) => write!(
                f,
                "{path} cannot be used: {}, which holds the same data, {}",
                other.display(),
                self.user
            ),
        }
    }
}

/// Why something could not be claimed.
#[derive(Debug)]
pub(crate) enum Refusal {
    InUse(InUse),
    Failed(io::Error),
}

impl From<io::Error> for Refusal {
    fn from(e: io::Error) -> Refusal {
        Refusal::Failed(e)
    }
}

/// A claim to a file or device; it ends when this is dropped and the file closed.
#[derive(Debug, Default)]
pub struct Claim {
    /// What it all lies on; of what was not locked, nothing is known.
    own: Option<Beneath>,
    /// Marks on the files beneath.
    _below: Vec<Arc<Below>>,
    /// Kept open for what it keeps away: of a block device that another process writes for us everybody
    /// who asks the kernel for a device of their own (mounts, volumes, other programs); of a file that
    /// another process reads for us those who would write it.
    _kept: Option<File>,
}

impl Claim {
    /// What the claimed data lies on, itself included.
    pub fn beneath(&self) -> Option<&Beneath> {
        self.own.as_ref()
    }
}

/// A file that something of ours is made of, with its marks.
#[derive(Debug)]
struct Below {
    node: Node,
    file: File,
    how: Mutex<Use>,
}

/// All of this process.
static BELOW: Mutex<Vec<Weak<Below>>> = Mutex::new(Vec::new());

/// Takes the locks of an open file or device, marks what lies beneath, and looks at what lies above. What lies above one of the
/// stretches `aside` is no concern: they were given to somebody else.
pub(crate) fn claim(
    file: &File,
    path: &Path,
    how: Use,
    aside: &[Range<u64>],
) -> Result<Claim, Refusal> {
    // Looked at first, before a lock is taken: our own lock would be found in the search for the user.
    let free = lock::may_mark(file, how).unwrap_or(true);
    let taken = free && lock::take_whole(file, how)? && lock::mark(file, how)?;
    if !taken {
        return Err(Refusal::InUse(InUse::new(path)));
    }
    around(&file.metadata()?, path, how, aside)
}

/// As [`claim`], of a path that another process opens for us, which marks it itself. It has no block
/// device for itself alone: that is done here, for as long as the claim lasts, and does not keep it out.
pub(crate) fn claim_for_other(path: &Path, how: Use) -> Result<Claim, Refusal> {
    let in_use = || Refusal::InUse(InUse::new(path));
    let mut file = look_at(path, 0)?;
    let meta = file.metadata()?;
    let is_device = meta.file_type().is_block_device();
    if is_device && how == Use::Write {
        file = match look_at(path, libc::O_EXCL) {
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => return Err(in_use()),
            opened => opened?,
        };
        // The name may lead elsewhere by now, where this flag means nothing.
        if file.metadata()?.rdev() != meta.rdev() {
            return Err(in_use());
        }
    }
    if !lock::may_mark(&file, how).unwrap_or(true) {
        return Err(in_use());
    }
    let mut claim = around(&meta, path, how, &[])?;
    claim._kept = (is_device && how == Use::Write).then_some(file);
    Ok(claim)
}

/// As [`claim`], of something that another process only reads for us, and which it would let others
/// write: that is forbidden here, for as long as the claim lasts.
pub(crate) fn claim_unchanging(path: &Path) -> Result<Claim, Refusal> {
    let file = look_at(path, 0)?;
    if !lock::mark(&file, Use::Read)? {
        return Err(Refusal::InUse(InUse::new(path)));
    }
    let mut claim = around(&file.metadata()?, path, Use::Read, &[])?;
    claim._kept = Some(file);
    Ok(claim)
}

/// Opens something whose locks are of interest. Never waits for a peer, as with named pipes.
pub(crate) fn look_at(path: &Path, exclusive: i32) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_CLOEXEC | libc::O_NOCTTY | libc::O_NONBLOCK | exclusive)
        .open(path)
}

fn around(
    meta: &fs::Metadata,
    path: &Path,
    how: Use,
    aside: &[Range<u64>],
) -> Result<Claim, Refusal> {
    let own = Beneath::of(&Running, path, meta)?;
    let in_use = |other: &Path, below: bool| {
        Refusal::InUse(InUse {
            other: Some((other.to_owned(), below)),
            ..InUse::new(path)
        })
    };
    let mut below = Vec::new();
    // Itself comes first. What it is only somewhere on has other users, too.
    for part in own.parts().iter().skip(1).filter(|part| part.exact) {
        match part.node {
            Node::File { .. } => match mark_below(part, how) {
                Ok(Some(marked)) => below.push(marked),
                Ok(None) => {}
                Err(Refusal::InUse(e)) => return Err(in_use(&e.path, true)),
                Err(e) => return Err(e),
            },
            Node::Device(rdev) => {
                if let Some(node) = node_of(rdev).filter(|node| !is_free(node, how, false)) {
                    return Err(in_use(&node, true));
                }
            }
        }
    }
    if let Some(node) = used_above(&own, how, aside) {
        return Err(in_use(&node, false));
    }
    Ok(Claim {
        own: Some(own),
        _below: below,
        _kept: None,
    })
}

/// Marks a file beneath something of ours; nothing if it cannot be reached from here.
fn mark_below(part: &Part, how: Use) -> Result<Option<Arc<Below>>, Refusal> {
    // By its path, if that still leads there: in another mount namespace it may not.
    let path = part.path.as_deref().unwrap_or(Path::new(""));
    let unseen = || {
        tracing::warn!(
            path = %path.display(),
            "the file a loop device is made of cannot be reached from here: whether somebody else uses it is not seen"
        );
        Ok(None)
    };
    let Ok(file) = look_at(path, 0) else {
        return unseen();
    };
    let meta = file.metadata()?;
    let node = Node::File {
        dev: meta.dev(),
        inode: meta.ino(),
    };
    if node != part.node {
        return unseen();
    }
    let taken = || Refusal::InUse(InUse::new(path));
    let mut all = BELOW.lock().unwrap_or_else(PoisonError::into_inner);
    all.retain(|below| below.strong_count() > 0);
    let mut held = all.iter().filter_map(Weak::upgrade);
    if let Some(ours) = held.find(|below| below.node == node) {
        let mut had = ours.how.lock().unwrap_or_else(PoisonError::into_inner);
        if *had < how {
            if !lock::mark(&ours.file, how)? {
                return Err(taken());
            }
            *had = how;
        }
        drop(had);
        return Ok(Some(ours));
    }
    if !lock::mark(&file, how)? {
        return Err(taken());
    }
    let marked = Arc::new(Below {
        node,
        file,
        how: Mutex::new(how),
    });
    all.push(Arc::downgrade(&marked));
    Ok(Some(marked))
}

/// The device node of a block device, where it is usually found.
fn node_of(rdev: u64) -> Option<PathBuf> {
    let dir = sys_dir(Running.sys(), rdev).canonicalize().ok()?;
    let node = Path::new("/dev").join(dir.file_name()?);
    let meta = fs::metadata(&node).ok()?;
    (meta.rdev() == rdev).then_some(node)
}

/// True unless somebody's marks on a block device contradict `how`, or it is to have no owner and
/// has one: a file system, a volume, swap, or a program that has it for itself.
fn is_free(node: &Path, how: Use, ownerless: bool) -> bool {
    let exclusive = if ownerless { libc::O_EXCL } else { 0 };
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK | exclusive)
        .open(node);
    match opened {
        Ok(file) => lock::may_mark(&file, how).unwrap_or(true),
        Err(e) => e.raw_os_error() != Some(libc::EBUSY),
    }
}

/// A block device over the same data that somebody uses: a loop device over the file that is
/// mounted, a partition of the disk that a guest has.
///
/// Other layers need no look: the kernel lets nobody have a volume or array beside what it is made
/// of, but of a loop device it does not know what it is over. And a guest locks nothing but the
/// device node it opens.
fn used_above(own: &Beneath, how: Use, aside: &[Range<u64>]) -> Option<PathBuf> {
    let sys = Running.sys();
    let listed = |dir: &Path| fs::read_dir(dir).into_iter().flatten().flatten();
    let loops = listed(&sys.join("class/block"))
        .filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"loop"))
        .map(|entry| entry.path())
        .filter(|dir| dir.join("loop").exists() || dir.join("partition").exists());
    let top = own.parts().first().map(|part| part.node);
    let device = match top {
        Some(Node::Device(rdev)) => sys_dir(sys, rdev).canonicalize().ok(),
        _ => None,
    };
    let partitions = device
        .into_iter()
        .flat_map(|dir| listed(&dir).map(|entry| entry.path()).collect::<Vec<_>>())
        .filter(|dir| dir.join("partition").exists());
    let mine = |rdev: u64| {
        let mut parts = own.parts().iter();
        parts.any(|part| part.node == Node::Device(rdev))
    };
    loops.chain(partitions).take(DEVICES_MAX).find_map(|dir| {
        // Nobody writes through that one.
        if fs::read_to_string(dir.join("ro")).is_ok_and(|ro| ro.trim_end() == "1") {
            return None;
        }
        let rdev = device_number(&dir)?;
        let lies = beneath_device(rdev);
        if mine(rdev) || !lies.overlaps(own) || top.is_some_and(|top| lies.is_within(top, aside)) {
            return None;
        }
        let node = node_of(rdev)?;
        (!is_free(&node, how, dir.join("loop").exists())).then_some(node)
    })
}

/// Loop devices that show something of a stretch of a file or device, whoever uses them.
///
/// # Errors
///
/// Also where that cannot be told, as in a container: somebody may be writing there then.
pub fn loops_over(path: &Path, stretch: Range<u64>) -> io::Result<Vec<PathBuf>> {
    let own = Beneath::of(&Running, path, &fs::metadata(path)?)?;
    let Some(top) = own.parts().first().map(|part| part.node) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    if !sys::is_sysfs(Running.sys()) {
        return Err(unknown("/sys is not the kernel's"));
    }
    loops_over_node(&Running, top, &stretch)
}

fn unknown(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, what.to_owned())
}

fn loops_over_node(
    kernel: &dyn Kernel,
    top: Node,
    stretch: &Range<u64>,
) -> io::Result<Vec<PathBuf>> {
    if let Node::Device(rdev) = top
        && !sys_dir(kernel.sys(), rdev).exists()
    {
        return Err(unknown("/sys does not know the device"));
    }
    let mut found = Vec::new();
    for (n, entry) in fs::read_dir(kernel.sys().join("block"))?.enumerate() {
        if n >= DEVICES_MAX {
            return Err(unknown("there are too many block devices to look at"));
        }
        let dir = entry?.path();
        // One that is over nothing has no such directory.
        if !dir.join("loop").exists() {
            continue;
        }
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        let Some(rdev) = device_number(&dir) else {
            return Err(unknown(&format!(
                "/sys does not say which device {name} is"
            )));
        };
        if Node::Device(rdev) == top {
            continue;
        }
        let lies = Beneath::of_node(kernel, Node::Device(rdev), None);
        let over =
            |part: &Part| part.node == top && part.start < stretch.end && stretch.start < part.end;
        if lies.parts().iter().any(over) {
            found.push(node_of(rdev).unwrap_or(dir));
            continue;
        }
        // The name that /sys has for its file may be another one's here. Only where it shows bytes of other numbers it is none.
        let asked = kernel.loop_asked(&name, rdev).is_some();
        if !asked && may_show(&dir, stretch) {
            return Err(unknown(&format!(
                "/dev/{name} cannot be looked at, and may show that part"
            )));
        }
    }
    Ok(found)
}

/// Could a loop device show a byte of a stretch, if it were over what that is of?
fn may_show(dir: &Path, stretch: &Range<u64>) -> bool {
    let number = |file: &str| -> Option<u64> {
        let text = fs::read_to_string(dir.join(file)).ok()?;
        text.trim().parse().ok()
    };
    let (Some(offset), Some(sectors)) = (number("loop/offset"), number("size")) else {
        return true;
    };
    let end = offset.saturating_add(sectors.saturating_mul(512));
    offset < stretch.end && stretch.start < end
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::beneath::LoopStatus;
    use std::os::unix::fs::symlink;

    /// A host with one file and one loop device, which may or may not be asked.
    struct Host {
        dir: tempfile::TempDir,
        says: Option<LoopStatus>,
    }

    impl Kernel for Host {
        fn sys(&self) -> &Path {
            self.dir.path()
        }
        fn loop_asked(&self, _: &str, _: u64) -> Option<LoopStatus> {
            self.says.clone()
        }
    }

    const FILE: Node = Node::File { dev: 5, inode: 7 };

    fn host(says: Option<LoopStatus>, offset: u64, sectors: u64) -> Host {
        let dir = tempfile::tempdir().unwrap();
        let loop0 = dir.path().join("block/loop0");
        fs::create_dir_all(loop0.join("loop")).unwrap();
        fs::create_dir_all(dir.path().join("dev/block")).unwrap();
        symlink(&loop0, dir.path().join("dev/block/7:250")).unwrap();
        fs::write(loop0.join("dev"), "7:250\n").unwrap();
        fs::write(loop0.join("size"), format!("{sectors}\n")).unwrap();
        fs::write(loop0.join("loop/offset"), format!("{offset}\n")).unwrap();
        Host { dir, says }
    }

    fn over(host: &Host, stretch: Range<u64>) -> Option<usize> {
        let found = loops_over_node(host, FILE, &stretch);
        found.ok().map(|found| found.len())
    }

    #[test]
    fn a_loop_device_that_cannot_be_asked_may_show_it() {
        let status = |inode| LoopStatus {
            dev: 5,
            inode,
            rdev: 0,
            offset: 4096,
            limit: 4096,
        };
        let ours = host(Some(status(7)), 4096, 8);
        assert_eq!(over(&ours, 4096..8192), Some(1));
        assert_eq!(over(&ours, 8192..9000), Some(0));
        assert_eq!(over(&host(Some(status(8)), 4096, 8), 0..8192), Some(0));
        // It says nothing: only other bytes are none of it.
        let silent = host(None, 4096, 8);
        assert_eq!(over(&silent, 0..4096), Some(0));
        assert_eq!(over(&silent, 8192..9000), Some(0));
        assert_eq!(over(&silent, 8191..9000), None);
        fs::remove_file(silent.dir.path().join("block/loop0/loop/offset")).unwrap();
        assert_eq!(over(&silent, 8192..9000), None);
    }

    #[test]
    fn where_the_kernel_says_nothing_of_devices_nobody_knows() {
        let host = host(None, 0, 0);
        let device = Node::Device(libc::makedev(8, 0));
        assert!(loops_over_node(&host, device, &(0..1)).is_err());
        fs::remove_dir_all(host.dir.path().join("block")).unwrap();
        assert_eq!(over(&host, 0..1), None);
        assert!(sys::is_sysfs(Path::new("/sys")) && !sys::is_sysfs(host.dir.path()));
    }
}
