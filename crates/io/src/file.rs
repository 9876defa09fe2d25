//! A flash device or an origin as the kernel offers it: a regular file or a block device.
//!
//! The cache must see the device, not the page cache, so everything goes through `O_DIRECT`
//! where the file system allows it. `O_DIRECT` wants whole logical blocks, yet an origin may
//! have any size; its last partial block goes through a second, buffered descriptor. The two
//! never share a page: the last 4 KiB of such a file are always buffered. A write never makes
//! a file longer, and a second opener of the same file or device is refused, under whatever name.

use crate::buf::{BUF_ALIGN, Buf};
use crate::claim::{self, Claim, InUse, Refusal};
use crate::lock::Use;
use crate::media::Media;
use crate::op::{BLOCK, IoError};
use crate::sys;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hearth_fault::Fault;

/// Bytes of one piece when zeros are written by hand or memory must be bounced: large enough
/// to stream, small enough not to matter in RAM.
const CHUNK: u64 = 1 << 20;
/// How long an open waits for another holder of the lock. The kernel takes a killed process's
/// rings down, and with them its files, a moment after the process is gone; whoever starts in
/// its place must not be turned away for that.
const LOCK_WAIT: Duration = Duration::from_secs(2);
/// The same if the holder can be named and does not seem to be ending.
const LIVE_WAIT: Duration = Duration::from_millis(250);
/// How often it looks meanwhile.
const LOCK_POLL: Duration = Duration::from_millis(5);
/// Most extents [`BlockFile::extents`] lists in one call.
const EXTENTS_MAX: usize = 1 << 16;

/// True if opening failed because there is no device that works any more: it fails, was pulled out, or the server of the file
/// system it is on has ended. Not if somebody uses it, or it may not be opened.
pub fn is_dead(error: &io::Error) -> bool {
    let dead = [
        libc::EIO,
        libc::ENXIO,
        libc::ENODEV,
        libc::ENOMEDIUM,
        libc::ENOTCONN,
    ];
    error.raw_os_error().is_some_and(|e| dead.contains(&e))
}

/// Why a file or device could not be opened or created.
#[derive(Debug, thiserror::Error)]
#[error("{}", self.fault())]
pub enum OpenError {
    /// The kernel refused.
    Open {
        /// What was opened.
        path: PathBuf,
        /// Whether writing was asked for.
        writable: bool,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Somebody else uses it.
    InUse(Box<InUse>),
    /// Not a file or block device.
    NotBlock(PathBuf),
    /// Its logical blocks are larger than the unit of this program.
    Alignment {
        /// What was opened.
        path: PathBuf,
        /// What it asks for, in bytes.
        align: u32,
    },
    /// A new file could not be created with its size.
    Create {
        /// What was to be created.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
        /// The kernel's answer.
        source: io::Error,
    },
}

impl OpenError {
    /// What is wrong, and what to do about it.
    pub fn fault(&self) -> Fault {
        match self {
            OpenError::Open {
                path,
                writable,
                source,
            } => Fault::new(
                format!("cannot open {}: {source}", path.display()),
                format!(
                    "check that it exists and that this user may {}",
                    if *writable {
                        "read and write it"
                    } else {
                        "read it"
                    }
                ),
            ),
            OpenError::InUse(found) => Fault::new(found.to_string(), found.remedy()),
            OpenError::NotBlock(path) => Fault::new(
                format!(
                    "{} is neither a regular file nor a block device",
                    path.display()
                ),
                "give one of those",
            ),
            OpenError::Alignment { path, align } => Fault::new(
                format!(
                    "{} needs I/O aligned to {align} bytes, which is more than 4096",
                    path.display()
                ),
                "use one with sectors of at most 4096 bytes",
            ),
            OpenError::Create { path, size, source } => Fault::new(
                format!(
                    "cannot create {} with {size} bytes: {source}",
                    path.display()
                ),
                "check free space and that no such file exists",
            ),
        }
    }
}

/// How to open a [`BlockFile`].
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenMode {
    /// Refuse writes; several readers may share the file.
    pub read_only: bool,
    /// Do not lock: only for looking at something another process owns.
    pub unlocked: bool,
}

/// What identifies the content of an origin between two runs, as far as the kernel can tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Bytes.
    pub size: u64,
    /// Last modification, nanoseconds since 1970.
    pub mtime_ns: i64,
    /// Last change of the inode, nanoseconds since 1970.
    pub ctime_ns: i64,
    /// Device that holds the file; for a block device its own number.
    pub dev: u64,
    /// Inode.
    pub inode: u64,
}

/// How a file that is open stands to the name it was opened by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Names it has; 0: it was removed, and is gone when it is closed.
    pub links: u64,
    /// Bytes it has now.
    pub size: u64,
    /// Bytes of it that take space; fewer than `size`: it is sparse.
    pub allocated: u64,
    /// What its name leads to now.
    pub name: NameLeadsTo,
}

/// How much room the file system that holds a regular file has, and what the file may take of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Tells file systems of this host apart.
    pub file_system: u64,
    /// Bytes it gives to whoever asks first; [`u64::MAX`] if it does not say.
    pub free: u64,
    /// Some of the file takes no space yet.
    pub sparse: bool,
    /// What is written over takes new space all the same.
    pub copies_on_write: bool,
}

/// What the name of an open file leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameLeadsTo {
    /// The file.
    It,
    /// Another one.
    Another,
    /// Nothing.
    Nothing,
}

/// A run of a file that is data or a hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// False for a hole, which reads as zeros and takes no space.
    pub data: bool,
}

/// A regular file or block device, open for direct I/O and locked.
#[derive(Debug)]
pub struct BlockFile {
    path: PathBuf,
    direct: File,
    /// For pieces direct I/O cannot do; the same descriptor semantics if `O_DIRECT` was refused.
    buffered: File,
    is_direct: bool,
    is_device: bool,
    /// Submitting I/O on it may wait for another process.
    waits_for_others: bool,
    /// Asking where its holes are takes no longer than looking into a map of this host's.
    shows_holes: bool,
    read_only: bool,
    /// Offsets and lengths of direct I/O are multiples of this (a power of two, at most 4096).
    align: u32,
    mem_align: u32,
    size: AtomicU64,
    /// First byte of what always goes through `buffered`; the size if nothing does.
    direct_end: AtomicU64,
    /// Serialises buffered writers: two writers of one page must not interleave.
    tail: Mutex<()>,
    no_discard: AtomicBool,
    no_zero: AtomicBool,
    /// On what is the same data under other names; `direct` has the locks of this one.
    claim: Claim,
}

/// Has `attempt` made until it finds nobody using the file, up to [`LOCK_WAIT`]; then says who does.
fn wait_unused<T>(attempt: impl Fn() -> Result<T, OpenError>) -> Result<T, OpenError> {
    let start = Instant::now();
    let mut asked = false;
    loop {
        match attempt() {
            Err(OpenError::InUse(found)) => {
                let waited = start.elapsed();
                if waited >= LOCK_WAIT || (!asked && waited >= LIVE_WAIT) {
                    asked = true;
                    let found = found.named();
                    if found.user.stays() || waited >= LOCK_WAIT {
                        return Err(OpenError::InUse(Box::new(found)));
                    }
                }
                std::thread::sleep(LOCK_POLL);
            }
            other => return other,
        }
    }
}

impl Refusal {
    fn opening(self, path: &Path, writable: bool) -> OpenError {
        match self {
            Refusal::InUse(found) => OpenError::InUse(Box::new(found)),
            Refusal::Failed(source) => OpenError::Open {
                path: path.to_path_buf(),
                writable,
                source,
            },
        }
    }
}

/// Claims a file or device that another process opens on our behalf, and locks as QEMU does:
/// refused if somebody uses it. What is returned holds what lies beneath. Waits as an open does.
pub fn claim_for_other(path: &Path, read_only: bool) -> Result<Claim, OpenError> {
    let how = if read_only { Use::Read } else { Use::Write };
    wait_unused(|| claim::claim_for_other(path, how).map_err(|e| e.opening(path, !read_only)))
}

/// Claims an open file; refused while another program uses it. One that is open for reading alone may have other readers. The
/// file is locked until its last descriptor is closed; the claim holds the files beneath. `path` is its name. Waits as an open does.
pub fn claim_open(file: &File, path: &Path, read_only: bool) -> Result<Claim, OpenError> {
    let how = if read_only { Use::Read } else { Use::Write };
    wait_unused(|| claim::claim(file, path, how, &[]).map_err(|e| e.opening(path, !read_only)))
}

/// Claims a file or device that another process reads on our behalf: refused if somebody may write it, and
/// as long as the claim lasts nobody who asks can. Waits as an open does.
pub fn claim_unchanging(path: &Path) -> Result<Claim, OpenError> {
    wait_unused(|| claim::claim_unchanging(path).map_err(|e| e.opening(path, false)))
}

/// Why a file or block device cannot be written, if the kernel says so. An open for writing does not
/// detect that: it succeeds on a read-only block device. Changes nothing; `None` also if the path
/// cannot be opened.
pub fn write_protection(path: &Path) -> Option<&'static str> {
    let file = claim::look_at(path, 0).ok()?;
    let is_device = file.metadata().ok()?.file_type().is_block_device();
    let (is_protected, why) = match is_device {
        true => (
            sys::device_is_read_only(&file),
            "the block device is read-only",
        ),
        false => (
            sys::mount_is_read_only(&file),
            "its file system is mounted read-only",
        ),
    };
    is_protected.unwrap_or(false).then_some(why)
}

/// Makes durable which names stand in the directory of `path`: what was made, renamed or removed there
/// could else come undone in a power cut.
pub fn sync_names(path: &Path) -> io::Result<()> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    File::open(dir.unwrap_or(Path::new(".")))?.sync_all()
}

impl BlockFile {
    /// Opens `path` and takes the lock, for which it waits up to [`LOCK_WAIT`].
    pub fn open(path: impl AsRef<Path>, mode: OpenMode) -> Result<BlockFile, OpenError> {
        wait_unused(|| BlockFile::open_now(path.as_ref(), mode, &[]))
    }

    /// The same; that somebody else uses one of the stretches `aside` is no concern.
    pub fn open_beside(
        path: impl AsRef<Path>,
        mode: OpenMode,
        aside: &[Range<u64>],
    ) -> Result<BlockFile, OpenError> {
        wait_unused(|| BlockFile::open_now(path.as_ref(), mode, aside))
    }

    fn open_now(path: &Path, mode: OpenMode, aside: &[Range<u64>]) -> Result<BlockFile, OpenError> {
        let path = path.to_path_buf();
        let _noted = crate::watch::begin(0, || path.display().to_string());
        let fail = |source: io::Error| match source.raw_os_error() {
            Some(libc::EBUSY) => OpenError::InUse(Box::new(InUse::new(&path))),
            _ => OpenError::Open {
                path: path.clone(),
                writable: !mode.read_only,
                source,
            },
        };
        let options = |flags: i32| {
            let mut options = OpenOptions::new();
            options
                .read(true)
                .write(!mode.read_only)
                .custom_flags(flags | libc::O_CLOEXEC | libc::O_NOCTTY);
            options
        };
        // O_NONBLOCK keeps the open of a FIFO from waiting; it means nothing for what we accept.
        let kind = options(libc::O_NONBLOCK)
            .open(&path)
            .map_err(fail)?
            .metadata()
            .map_err(fail)?
            .file_type();
        let is_device = kind.is_block_device();
        if !is_device && !kind.is_file() {
            return Err(OpenError::NotBlock(path));
        }
        // O_EXCL on a block device: refused while mounted or claimed by anyone else.
        let exclusive = if is_device && !mode.read_only && !mode.unlocked {
            libc::O_EXCL
        } else {
            0
        };
        let (direct, mut is_direct) = match options(libc::O_DIRECT | exclusive).open(&path) {
            Ok(file) => (file, true),
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                (options(exclusive).open(&path).map_err(fail)?, false)
            }
            Err(e) => return Err(fail(e)),
        };
        let how = if mode.read_only {
            Use::Read
        } else {
            Use::Write
        };
        let claim = match mode.unlocked {
            true => Claim::default(),
            false => claim::claim(&direct, &path, how, aside)
                .map_err(|e| e.opening(&path, !mode.read_only))?,
        };
        let buffered = reopen(&direct, &path, !mode.read_only).map_err(fail)?;
        let (mut align, mut mem_align) = (512u32, 512u32);
        match sys::dio_align(&direct) {
            Some((0, _)) | Some((_, 0)) if !is_device => is_direct = false,
            Some((mem, offset)) if mem > 0 && offset > 0 => (mem_align, align) = (mem, offset),
            // Old kernels do not say; 4096 is right for every device we accept, and files
            // whose size is no multiple of it have their tail buffered.
            _ => (mem_align, align) = (BUF_ALIGN as u32, BLOCK as u32),
        }
        if is_device {
            align = align.max(sys::device_block(&direct).map_err(fail)?);
        }
        if !is_direct {
            sys::clear_direct(&direct).map_err(fail)?;
            (align, mem_align) = (512, 1);
            tracing::warn!(path = %path.display(), "the file system refuses direct I/O; reads and writes go through the page cache");
        }
        align = align.max(512);
        if !align.is_power_of_two() || u64::from(align) > BLOCK {
            return Err(OpenError::Alignment { path, align });
        }
        let file_system = sys::file_system(&direct).ok();
        let shows_holes = !is_device && file_system.is_some_and(has_own_map);
        // A server that does not even say what it is may be of any kind.
        let waits_for_others = !is_device && file_system.is_none_or(|magic| magic == FUSE);
        let file = BlockFile {
            path: path.clone(),
            direct,
            buffered,
            is_direct,
            is_device,
            waits_for_others,
            shows_holes,
            read_only: mode.read_only,
            align,
            mem_align: mem_align.max(1),
            size: AtomicU64::new(0),
            direct_end: AtomicU64::new(0),
            tail: Mutex::new(()),
            no_discard: AtomicBool::new(false),
            no_zero: AtomicBool::new(false),
            claim,
        };
        file.refresh_size().map_err(fail)?;
        Ok(file)
    }

    /// Creates a new file of `size` bytes, its space reserved where the file system can
    /// (otherwise sparse), and opens it. Fails if the file exists.
    pub fn create_sized(path: impl AsRef<Path>, size: u64) -> Result<BlockFile, OpenError> {
        let path = path.as_ref();
        let fail = |source| OpenError::Create {
            path: path.to_path_buf(),
            size,
            source,
        };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .custom_flags(libc::O_CLOEXEC)
            .open(path)
            .map_err(fail)?;
        let sized = (|| {
            file.set_len(size)?;
            if size > 0 {
                match sys::fallocate(file.as_raw_fd(), 0, 0, size) {
                    Err(e) if unsupported(&e) => {}
                    other => other?,
                }
            }
            file.sync_all()
        })();
        if let Err(e) = sized {
            // Best effort: the error that matters is the one reported below.
            let _ = std::fs::remove_file(path);
            return Err(fail(e));
        }
        drop(file);
        BlockFile::open(path, OpenMode::default())
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Size in bytes, as of the last [`refresh_size`](Self::refresh_size).
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// The size as the kernel has it now; [`size`](Self::size) stays what it is.
    pub fn current_size(&self) -> io::Result<u64> {
        if self.is_device {
            sys::device_size(&self.direct)
        } else {
            Ok(self.direct.metadata()?.len())
        }
    }

    /// Asks the kernel for the size again (the file or device may have been resized) and
    /// returns it.
    pub fn refresh_size(&self) -> io::Result<u64> {
        let size = self.current_size()?;
        let end = if size % u64::from(self.align) == 0 {
            size
        } else {
            size / BLOCK * BLOCK
        };
        // Shrink the direct part before, and grow it after, the size is seen to change.
        self.direct_end.store(
            end.min(self.direct_end.load(Ordering::Relaxed)),
            Ordering::Release,
        );
        self.size.store(size, Ordering::Release);
        self.direct_end.store(end, Ordering::Release);
        Ok(size)
    }

    /// Alignment in bytes of offsets and lengths for I/O without read-modify-write.
    pub fn align(&self) -> u32 {
        self.align
    }

    /// False if the file system refused `O_DIRECT`; say so to the user.
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// On what is the same data under other names.
    pub(crate) fn claim(&self) -> &Claim {
        &self.claim
    }

    /// True for a block device.
    pub fn is_device(&self) -> bool {
        self.is_device
    }

    /// True if submitting I/O on it may already wait for another process: it must not be done on
    /// a thread that others need.
    pub(crate) fn waits_for_others(&self) -> bool {
        self.waits_for_others
    }

    /// True if opened without the right to write.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// What the kernel says about the file now.
    pub fn identity(&self) -> io::Result<Identity> {
        let meta = self.direct.metadata()?;
        let ns = |s: i64, ns: i64| s.saturating_mul(1_000_000_000).saturating_add(ns);
        Ok(Identity {
            size: self.size(),
            mtime_ns: ns(meta.mtime(), meta.mtime_nsec()),
            ctime_ns: ns(meta.ctime(), meta.ctime_nsec()),
            dev: if self.is_device {
                meta.rdev()
            } else {
                meta.dev()
            },
            inode: meta.ino(),
        })
    }

    /// How the file stands to its name now; `None` of a device. May wait for the file system.
    pub fn standing(&self) -> io::Result<Option<Standing>> {
        if self.is_device {
            return Ok(None);
        }
        let meta = self.direct.metadata()?;
        let name = match std::fs::metadata(&self.path) {
            Ok(named) if (named.dev(), named.ino()) == (meta.dev(), meta.ino()) => NameLeadsTo::It,
            Ok(_) => NameLeadsTo::Another,
            Err(e) if e.kind() == io::ErrorKind::NotFound => NameLeadsTo::Nothing,
            Err(e) => return Err(e),
        };
        Ok(Some(Standing {
            links: meta.nlink(),
            size: meta.len(),
            allocated: meta.blocks().saturating_mul(512),
            name,
        }))
    }

    /// How much room its file system has; `None` of a device. May wait for the file system.
    pub fn space(&self) -> io::Result<Option<Space>> {
        if self.is_device {
            return Ok(None);
        }
        let meta = self.direct.metadata()?;
        let (magic, free) = sys::file_system_room(&self.direct)?;
        Ok(Some(Space {
            file_system: meta.dev(),
            free,
            sparse: meta.blocks().saturating_mul(512) < meta.len(),
            copies_on_write: copies_on_write(magic),
        }))
    }

    /// True if all of a range takes space already, as far as the file system tells. Blocks.
    pub fn has_place(&self, from: u64, to: u64) -> bool {
        match sys::seek(&self.direct, from, libc::SEEK_HOLE) {
            Ok(hole) => hole.is_none_or(|hole| hole >= to),
            Err(_) => false,
        }
    }

    /// Reserves the space of the first `len` bytes, where the file system can, so that no write there
    /// can lack room later.
    pub fn reserve(&self, len: u64) -> io::Result<()> {
        if self.is_device || len == 0 {
            return Ok(());
        }
        match sys::fallocate(self.direct_fd(), 0, 0, len.min(self.size())) {
            Err(e) if unsupported(&e) => Ok(()),
            other => other,
        }
    }

    /// The number of its descriptor, under which `/proc/PID/fd` shows it.
    pub fn descriptor(&self) -> i32 {
        self.direct.as_raw_fd()
    }

    /// Descriptor for direct I/O; drivers only.
    pub(crate) fn direct_fd(&self) -> RawFd {
        self.direct.as_raw_fd()
    }

    /// True if the descriptor of [`direct_fd`](Self::direct_fd) can do this range from or to
    /// memory at `addresses` whole. Reads and writes only.
    #[inline]
    pub(crate) fn fits_direct(&self, offset: u64, len: u64) -> bool {
        (offset | len) & (u64::from(self.align) - 1) == 0
            && offset
                .checked_add(len)
                .is_some_and(|end| end <= self.direct_end.load(Ordering::Relaxed))
    }

    /// True if memory at `address` may take part in direct I/O.
    #[inline]
    pub(crate) fn fits_memory(&self, address: *const u8, len: usize) -> bool {
        let mask = self.mem_align as usize - 1;
        (address as usize | len) & mask == 0
    }

    /// An error if the range reaches past the end.
    #[inline]
    pub(crate) fn check_range(&self, offset: u64, len: u64) -> Result<(), IoError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.size() => Ok(()),
            _ => Err(IoError::UnexpectedEof),
        }
    }

    /// True if a range of a regular file can be given to fallocate as it is.
    pub(crate) fn can_fallocate(&self, zeroes: bool) -> bool {
        let flag = if zeroes {
            &self.no_zero
        } else {
            &self.no_discard
        };
        !self.is_device && !self.read_only && !flag.load(Ordering::Relaxed)
    }

    /// Fills `data` from `offset`; an error if that reaches past the end. Blocks.
    pub fn read_at(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.in_range(offset, data.len() as u64)?;
        if !self.fits_direct(offset, data.len() as u64) {
            return self.buffered.read_exact_at(data, offset);
        }
        if self.fits_memory(data.as_ptr(), data.len()) {
            return self.direct.read_exact_at(data, offset);
        }
        let mut bounce = Buf::zeroed(data.len().min(CHUNK as usize)).all();
        let mut at = offset;
        for piece in data.chunks_mut(CHUNK as usize) {
            let window = &mut bounce.bytes_mut()[..piece.len()];
            self.direct.read_exact_at(window, at)?;
            piece.copy_from_slice(window);
            at += piece.len() as u64;
        }
        Ok(())
    }

    /// Stores `data` at `offset`; an error if that reaches past the end. Blocks.
    pub fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.in_range(offset, data.len() as u64)?;
        if !self.fits_direct(offset, data.len() as u64) {
            return self.write_mixed(offset, data);
        }
        if self.fits_memory(data.as_ptr(), data.len()) {
            return self.direct.write_all_at(data, offset);
        }
        self.write_bounced(offset, data)
    }

    fn write_bounced(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut bounce = Buf::zeroed(data.len().min(CHUNK as usize)).all();
        let mut at = offset;
        for piece in data.chunks(CHUNK as usize) {
            let window = &mut bounce.bytes_mut()[..piece.len()];
            window.copy_from_slice(piece);
            self.direct.write_all_at(window, at)?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    /// A write whose end (or whose very position) does not suit direct I/O: what does suit
    /// goes directly, the rest through the page cache.
    fn write_mixed(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let end = offset + data.len() as u64;
        let cut = (end / BLOCK * BLOCK)
            .clamp(offset, self.direct_end.load(Ordering::Relaxed).max(offset));
        let (head, rest) = data.split_at((cut - offset) as usize);
        if !head.is_empty() && self.fits_direct(offset, head.len() as u64) {
            if self.fits_memory(head.as_ptr(), head.len()) {
                self.direct.write_all_at(head, offset)?;
            } else {
                self.write_bounced(offset, head)?;
            }
            return self.write_buffered(cut, rest);
        }
        self.write_buffered(offset, data)
    }

    fn write_buffered(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let _guard = self.tail.lock().unwrap_or_else(|e| e.into_inner());
        self.buffered.write_all_at(data, offset)
    }

    /// Makes completed writes durable, buffered ones included. Blocks.
    pub fn flush(&self) -> io::Result<()> {
        if self.read_only {
            return Ok(());
        }
        // One inode behind both descriptors: this also writes its page cache.
        sys::fdatasync(&self.direct)
    }

    /// Makes the file's time stamps durable, which [`flush`](Self::flush) does not; a device has none
    /// that matter. Blocks.
    pub fn settle(&self) -> io::Result<()> {
        if self.is_device {
            return Ok(());
        }
        self.direct.sync_all()
    }

    /// Frees a range: it reads as zeros or as before. Succeeds where that is unsupported. Blocks.
    pub fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.in_range(offset, len)?;
        if self.read_only {
            return Err(io::Error::from_raw_os_error(libc::EROFS));
        }
        if len == 0 || self.no_discard.load(Ordering::Relaxed) {
            return Ok(());
        }
        let done = if self.is_device {
            let align = u64::from(self.align);
            let (start, end) = (
                offset.next_multiple_of(align),
                (offset + len) / align * align,
            );
            if start >= end {
                Ok(())
            } else {
                sys::device_discard(&self.direct, start, end - start)
            }
        } else {
            sys::fallocate(self.direct_fd(), PUNCH, offset, len)
        };
        match done {
            Err(e) if unsupported(&e) => {
                self.no_discard.store(true, Ordering::Relaxed);
                Ok(())
            }
            other => other,
        }
    }

    /// Makes a range read as zeros; with `punch` its space may be freed. Blocks.
    pub fn write_zeroes(&self, offset: u64, len: u64, punch: bool) -> io::Result<()> {
        self.in_range(offset, len)?;
        if self.read_only {
            return Err(io::Error::from_raw_os_error(libc::EROFS));
        }
        if len == 0 {
            return Ok(());
        }
        let flag = if punch && !self.is_device {
            &self.no_discard
        } else {
            &self.no_zero
        };
        if !flag.load(Ordering::Relaxed) {
            let done = if !self.is_device {
                sys::fallocate(
                    self.direct_fd(),
                    if punch { PUNCH } else { ZERO },
                    offset,
                    len,
                )
            } else if self.fits_direct(offset, len) {
                sys::device_zero(&self.direct, offset, len)
            } else {
                return self.write_zeros_by_hand(offset, len);
            };
            match done {
                Err(e) if unsupported(&e) => flag.store(true, Ordering::Relaxed),
                other => return other,
            }
        }
        self.write_zeros_by_hand(offset, len)
    }

    fn write_zeros_by_hand(&self, offset: u64, len: u64) -> io::Result<()> {
        let zeros = Buf::zeroed(len.min(CHUNK) as usize).all();
        let (mut at, end) = (offset, offset + len);
        while at < end {
            // Pieces end on block boundaries, so that an odd start costs one odd piece only.
            let n = (at / BLOCK * BLOCK + CHUNK).min(end) - at;
            self.write_at(at, &zeros.bytes()[..n.min(zeros.len() as u64) as usize])?;
            at += n.min(zeros.len() as u64);
        }
        Ok(())
    }

    /// Data and holes of `offset..offset+len`, in order, adjacent runs merged. Where holes are
    /// unknown the range is data, and so it is on file systems that would have to ask somebody
    /// else: the caller may be a data thread, which serves other disks as well, and must not wait
    /// for a mount that hangs. At most 65 536 extents: beyond that the rest is one data run.
    pub fn extents(&self, offset: u64, len: u64) -> io::Result<Vec<Extent>> {
        self.in_range(offset, len)?;
        let end = offset + len;
        let mut list: Vec<Extent> = Vec::new();
        let mut push = |from: u64, to: u64, data: bool| match list.last_mut() {
            _ if from >= to => true,
            Some(last) if last.data == data => {
                last.len += to - from;
                true
            }
            _ => {
                list.push(Extent {
                    offset: from,
                    len: to - from,
                    data,
                });
                list.len() < EXTENTS_MAX
            }
        };
        if !self.shows_holes {
            push(offset, end, true);
            return Ok(list);
        }
        let mut at = offset;
        while at < end {
            let data = match sys::seek(&self.direct, at, libc::SEEK_DATA) {
                Ok(found) => found.unwrap_or(end).min(end),
                Err(e) if unsupported(&e) => at,
                Err(e) => return Err(e),
            };
            let more = push(at, data, false);
            if data >= end {
                break;
            }
            let hole = match sys::seek(&self.direct, data, libc::SEEK_HOLE) {
                Ok(found) if more => found.unwrap_or(end).clamp(data + 1, end),
                Err(e) if !unsupported(&e) => return Err(e),
                _ => end,
            };
            push(data, hole, true);
            at = hole;
        }
        Ok(list)
    }

    fn in_range(&self, offset: u64, len: u64) -> io::Result<()> {
        self.check_range(offset, len).map_err(|_| {
            io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!(
                    "{}: bytes {offset}+{len} reach past its end at {}; it is smaller than recorded",
                    self.path.display(),
                    self.size()
                ),
            )
        })
    }
}

/// Magic number of file systems that are served by a process (linux/magic.h).
const FUSE: u32 = 0x6573_5546;

/// True of the file systems that never write over what is there.
fn copies_on_write(magic: u32) -> bool {
    // linux/magic.h, and the sources of those that are not in it.
    const BTRFS: u32 = 0x9123_683E;
    const ZFS: u32 = 0x2FC1_2FC1;
    const BCACHEFS: u32 = 0xCA45_1A4E;
    const NILFS: u32 = 0x3434;
    matches!(magic, BTRFS | ZFS | BCACHEFS | NILFS)
}

/// True of the file systems that keep their maps on a disk of this host, or in memory.
fn has_own_map(magic: u32) -> bool {
    // linux/magic.h.
    const EXT: u32 = 0xEF53;
    const XFS: u32 = 0x5846_5342;
    const BTRFS: u32 = 0x9123_683E;
    const TMPFS: u32 = 0x0102_1994;
    matches!(magic, EXT | XFS | BTRFS | TMPFS)
}

/// fallocate mode that frees a range and never changes the size.
pub(crate) const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
/// fallocate mode that zeroes a range and never changes the size.
pub(crate) const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

/// True if the kernel says that it cannot do this at all here, as opposed to: it failed.
pub(crate) fn unsupported(e: &io::Error) -> bool {
    e.raw_os_error().is_some_and(unsupported_errno)
}

/// As [`unsupported`], of an errno.
pub(crate) fn unsupported_errno(errno: i32) -> bool {
    matches!(
        errno,
        libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::ENOTTY | libc::ENODEV
    )
}

/// A buffered descriptor of the very file `direct` refers to, even if its path changed since.
fn reopen(direct: &File, path: &Path, writable: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(writable)
        .custom_flags(libc::O_CLOEXEC);
    let file = options
        .open(format!("/proc/self/fd/{}", direct.as_raw_fd()))
        .or_else(|_| options.open(path))?;
    let (a, b) = (direct.metadata()?, file.metadata()?);
    if (a.dev(), a.ino()) != (b.dev(), b.ino()) {
        return Err(io::Error::other(
            "the file was replaced while it was being opened",
        ));
    }
    Ok(file)
}

impl Media for BlockFile {
    fn len(&self) -> u64 {
        self.size()
    }
    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        BlockFile::read_at(self, offset, data)
    }
    fn read_many(&mut self, reads: &mut [(u64, &mut [u8])]) -> io::Result<()> {
        crate::media::read_parallel(reads, |offset, data| BlockFile::read_at(self, offset, data))
    }
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        BlockFile::write_at(self, offset, data)
    }
    fn flush(&mut self) -> io::Result<()> {
        BlockFile::flush(self)
    }
}

#[cfg(test)]
mod tests;
