//! Origins: are they there, are they the same as when we last looked?
//!
//! A cache that outlives the daemon can be wrong: somebody may have mounted, restored or resized
//! the origin while Hearth was not looking. Two independent questions are asked before a disk is
//! served. Is the file still the one that was left (size, times, inode)? And do cached clean
//! blocks still equal the origin: the first and last MiB, where every file system leaves its mark
//! when it is mounted, and the blocks used most?

use std::io::ErrorKind;
use std::ops::RangeInclusive;
use std::path::Path;
use std::time::{Duration, Instant};

use hearth_engine::Engine;
use hearth_engine::api::DiskId;
use hearth_format::{DiskRecord, OriginIdentity};
use hearth_io::beneath::beneath;
use hearth_io::checksum::crc32c;
use hearth_io::file::Identity;
use hearth_io::spec::OpenSpecError;
use hearth_io::{BLOCK, BlockFile, Device, OpenError, OpenMode, OriginSpec, Source};
use hearth_origin::{Backing, How};

use crate::error::{Error, Result};
use crate::size::human;

/// Bytes at each end of an origin that are compared if cached.
const EDGE_BYTES: u64 = 1 << 20;
/// Blocks at the edges: two times 1 MiB.
const EDGES_MAX: usize = 512;
/// Blocks compared at most besides the edges, the most used ones.
const HOTTEST_MAX: usize = 64;
/// Time for comparing blocks besides the edges: a start must not wait long for a slow origin.
const SAMPLE_TIME: Duration = Duration::from_millis(40);
/// Blocks read at once.
const RUN_MAX: usize = 256;

/// Limits an origin's server may be given, seconds. Less would fail requests of a slow disk; more
/// than a day is a slip.
pub const ORIGIN_TIMEOUT: RangeInclusive<f64> = 0.5..=86_400.0;

/// What a spec says, checked for form.
pub fn parse(text: &str) -> Result<OriginSpec> {
    let spec: OriginSpec = text
        .parse()
        .map_err(|e| Error::invalid(format!("the origin is not understood: {e}"), ""))?;
    hearth_origin::check(&spec).map_err(failure)?;
    Ok(spec)
}

/// How long requests of a disk wait for its origin's server.
pub fn timeout(record: &DiskRecord) -> Duration {
    match record.origin_timeout_ms {
        0 => hearth_origin::TIMEOUT_DEFAULT,
        ms => Duration::from_millis(u64::from(ms)),
    }
}

/// Opens an origin and takes its lock.
///
/// `images` is the directory for the sockets of image processes; `backing` what may lie below one.
pub fn open(
    spec: &OriginSpec,
    record: &DiskRecord,
    images: &Path,
    backing: Backing,
) -> Result<Device> {
    let how = How {
        read_only: record.read_only,
        timeout: timeout(record),
        images: images.to_owned(),
        backing,
    };
    let device = hearth_origin::open(spec, &how).map_err(failure)?;
    if device.size() == 0 {
        return Err(Error::invalid(
            format!("the origin {} is empty", device.name()),
            "give it its size first, for instance with `truncate -s 100G`",
        ));
    }
    Ok(device)
}

/// What lies below the image a spec names.
pub fn chain(spec: &OriginSpec, rules: &Backing) -> Result<Vec<String>> {
    hearth_origin::chain(spec, rules).map_err(failure)
}

/// What the bytes of a plain path look like; `None` also if they cannot be read, which is said when
/// it is opened.
fn identify(path: &Path) -> Option<hearth_format::Found> {
    let mode = OpenMode {
        read_only: true,
        unlocked: true,
    };
    let file = BlockFile::open(path, mode).ok()?;
    let mut read = |offset, data: &mut [u8]| file.read_at(offset, data);
    hearth_format::identify(&mut read, file.size()).ok()?
}

/// Refuses what a plain path names if it is rather something else, before it becomes a disk: an
/// image in another format, which its own disk would be served from, or a pool, whose every block
/// the guest would be free to overwrite. `flash` is what is being served: that is refused
/// elsewhere, in other words.
///
/// Only for new disks: what a guest writes into its disk is its own business, and must not lock it
/// out. `file:PATH` says that the bytes are meant as they are.
pub fn check_plain(spec: &OriginSpec, flash: &Path) -> Result<()> {
    let Source::File(path) = &spec.source else {
        return Ok(());
    };
    let Some(found) = identify(path) else {
        return Ok(());
    };
    let at = path.display();
    if found.is_pool() && !spec.raw_bytes && !is_same_data(flash, path) {
        return Err(Error::refused(
            format!("{at} carries a Hearth pool, not a disk"),
            format!(
                "give the disk's own path; if a guest has made that pool inside its disk, write file:{at}"
            ),
        ));
    }
    let Some(format) = found.image_format().filter(|_| !spec.raw_bytes) else {
        return Ok(());
    };
    let instead = if hearth_origin::is_image_format(format) {
        format!("to serve the disk in it, write {format}:{at}")
    } else {
        "to serve the disk in it, convert it to raw with `qemu-img convert`".to_owned()
    };
    Err(Error::refused(
        format!("{at} is {}, and its format was not given", found.what),
        format!("{instead}; to serve the file's own bytes, write file:{at}"),
    ))
}

/// For a disk that is older than [`check_plain`]: what would be refused today.
pub fn plain_notice(spec: &OriginSpec) -> Option<String> {
    let path = spec.path().filter(|_| !spec.raw_bytes)?;
    let found = identify(path)?;
    found.image_format()?;
    Some(format!(
        "{} is {}, and its raw bytes are served, as they were before; a new disk on it would have to say so with file:{}",
        path.display(),
        found.what,
        path.display()
    ))
}

/// An origin that will not open, in the words of the control plane.
fn failure(e: hearth_origin::OpenError) -> Error {
    use hearth_origin::OpenError as Origin;
    let file = match e {
        Origin::File(OpenSpecError::Open(file)) => file,
        Origin::Relative(path) => {
            return Error::invalid(
                format!("the origin's path {} is relative", path.display()),
                "give an absolute path",
            );
        }
        Origin::Scheme(_) | Origin::Uri(_) | Origin::Image(_) | Origin::ReadOnly(_) => {
            return Error::invalid(e.to_string(), "");
        }
        Origin::Chain(e) => {
            use hearth_origin::ChainError as Chain;
            let said = e.to_string();
            return match e {
                Chain::Missing { .. } => Error::unavailable(said, ""),
                Chain::Names { .. } | Chain::Unknown { .. } => Error::invalid(said, ""),
                _ => Error::refused(said, ""),
            };
        }
        Origin::Missing { .. } => return Error::unavailable(e.to_string(), ""),
        Origin::File(_) | Origin::Nbd(_) => {
            return Error::unavailable(format!("cannot use the origin: {e}"), "");
        }
    };
    match file {
        OpenError::InUse(found) => Error::conflict(format!("the origin {found}"), found.remedy()),
        OpenError::Open { path, source, .. } if source.kind() == ErrorKind::IsADirectory => {
            Error::invalid(
                format!("the origin {} is a directory", path.display()),
                "give a regular file or a block device",
            )
        }
        OpenError::Open { path, source, .. } => Error::unavailable(
            format!("cannot open the origin {}: {source}", path.display()),
            "check that it exists and that the daemon's user may read and write it",
        ),
        OpenError::NotBlock(path) => Error::invalid(
            format!(
                "the origin {} is neither a regular file nor a block device",
                path.display()
            ),
            "give one of those",
        ),
        other => Error::unavailable(format!("cannot use the origin: {other}"), ""),
    }
}

/// True if the origin is there and, as far as that can be seen, of at least `size` bytes. Looks
/// only; takes no lock.
pub fn is_found(text: &str, size: u64) -> bool {
    parse(text).is_ok_and(|spec| hearth_origin::is_there(&spec, size))
}

/// True if both paths lead to the same data, whatever they are.
fn is_same_data(a: &Path, b: &Path) -> bool {
    let (Ok(a), Ok(b)) = (beneath(a), beneath(b)) else {
        return false;
    };
    a.overlaps(&b)
}

/// True if both paths name the same file or device.
pub fn is_same_file(a: &Path, b: &Path) -> bool {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    let (Ok(a), Ok(b)) = (std::fs::metadata(a), std::fs::metadata(b)) else {
        return false;
    };
    if a.file_type().is_block_device() && b.file_type().is_block_device() {
        return a.rdev() == b.rdev();
    }
    (a.dev(), a.ino()) == (b.dev(), b.ino())
}

/// What the origin looks like now, as the registry keeps it. What it looks like is made durable: after
/// a power cut older time stamps would look like somebody else's writes. If that fails, a disk may be
/// asked about once too often.
pub fn identity(device: &Device) -> Option<OriginIdentity> {
    if let Err(e) = device.settle() {
        tracing::warn!(origin = %device.name(), "its time stamps are not durable: {e}");
    }
    let Identity {
        size,
        mtime_ns,
        ctime_ns,
        dev,
        inode,
    } = device.identity().ok()?;
    Some(OriginIdentity {
        size,
        mtime_ns,
        ctime_ns,
        dev,
        inode,
    })
}

/// Makes every origin look changed to a disk, until its cache has been judged anew.
pub fn distrust(record: &mut DiskRecord) {
    record.origin_identity = Some(OriginIdentity::default());
    record.clean_detach = true;
}

/// True if [`distrust`] was the last word on a disk's origin.
pub fn is_distrusted(record: &DiskRecord) -> bool {
    record.origin_identity.as_ref().is_some_and(is_void)
}

fn is_void(identity: &OriginIdentity) -> bool {
    identity.size == 0
}

/// Why the origin is not the one that was left, if so.
///
/// `untouched`: nobody, we included, has had a reason to write it since `then` was recorded.
/// Device nodes are made anew at every boot, so of a block device only the size counts; device
/// numbers of file systems change as well.
pub fn difference(
    then: &OriginIdentity,
    now: &OriginIdentity,
    is_device: bool,
    untouched: bool,
) -> Option<String> {
    if is_void(then) {
        return Some("what is on flash may be older than the origin".to_owned());
    }
    // A device that grew is a volume that was extended; a file that grew was written.
    let grew = is_device && now.size > then.size;
    if then.size != now.size && untouched && !grew {
        return Some(format!(
            "its size changed from {} to {}",
            human(then.size),
            human(now.size)
        ));
    }
    if is_device {
        return None;
    }
    if then.inode != now.inode {
        return Some("it was replaced by another file".to_owned());
    }
    if untouched && then.mtime_ns != now.mtime_ns {
        return Some("it was written by somebody else".to_owned());
    }
    if untouched && then.ctime_ns != now.ctime_ns {
        return Some("it was changed or restored by somebody else".to_owned());
    }
    None
}

/// Compares a sample of cached clean blocks with the origin; the first that differs, as its
/// byte offset. An origin that cannot be read is not different: it fails later, visibly.
pub fn compare_sample(engine: &Engine, id: DiskId, device: &Device) -> Option<u64> {
    let size = device.size();
    let blocks = size.div_ceil(BLOCK);
    let edge = EDGE_BYTES / BLOCK;
    let edges = [
        0..edge.min(blocks),
        blocks.saturating_sub(edge).max(edge.min(blocks))..blocks,
    ];
    let is_edge = |block: u64| edges.iter().any(|r| r.contains(&block));
    let mut at_edges = engine.sample_clean(id, &edges, EDGES_MAX);
    at_edges.retain(|(block, _)| is_edge(*block));
    let mut elsewhere = engine.sample_clean(id, &[], HOTTEST_MAX);
    elsewhere.retain(|(block, _)| !is_edge(*block));
    let mut buffer = hearth_io::Buf::zeroed(RUN_MAX * BLOCK as usize).all();
    let start = Instant::now();
    runs(&at_edges)
        .map(|run| (run, true))
        .chain(runs(&elsewhere).map(|run| (run, false)))
        .take_while(|(_, edge)| *edge || start.elapsed() < SAMPLE_TIME)
        .find_map(|(run, _)| first_difference(device, size, run, buffer.bytes_mut()))
}

/// Cuts a sorted sample into runs of adjacent blocks.
fn runs(sample: &[(u64, u32)]) -> impl Iterator<Item = &[(u64, u32)]> {
    sample
        .chunk_by(|a, b| a.0 + 1 == b.0)
        .flat_map(|run| run.chunks(RUN_MAX))
}

fn first_difference(
    device: &Device,
    size: u64,
    run: &[(u64, u32)],
    buffer: &mut [u8],
) -> Option<u64> {
    let (first, _) = run.first()?;
    let offset = first * BLOCK;
    let len = (run.len() as u64 * BLOCK).min(size.saturating_sub(offset)) as usize;
    let window = buffer.get_mut(..run.len() * BLOCK as usize)?;
    // The last block of an odd-sized origin is padded with zeros in the cache.
    window.get_mut(len..)?.fill(0);
    device.read_at(offset, window.get_mut(..len)?).ok()?;
    let differs = |((_, want), bytes): (&(u64, u32), &[u8])| crc32c(bytes) != *want;
    let at = run
        .iter()
        .zip(window.chunks(BLOCK as usize))
        .position(differs)?;
    Some(run.get(at)?.0 * BLOCK)
}

#[cfg(test)]
mod tests {
    use super::*;

    const THEN: OriginIdentity = OriginIdentity {
        size: 100,
        mtime_ns: 1,
        ctime_ns: 2,
        dev: 3,
        inode: 4,
    };

    fn open_file(path: &Path) -> Result<Device> {
        open(
            &OriginSpec::file(path),
            &DiskRecord::default(),
            Path::new(""),
            Backing::default(),
        )
    }

    #[test]
    fn what_counts_as_a_change() {
        let same = OriginIdentity { dev: 9, ..THEN };
        assert_eq!(difference(&THEN, &same, false, true), None);
        for now in [
            OriginIdentity { size: 99, ..THEN },
            OriginIdentity {
                mtime_ns: 9,
                ..THEN
            },
            OriginIdentity {
                ctime_ns: 9,
                ..THEN
            },
            OriginIdentity { inode: 9, ..THEN },
        ] {
            assert!(difference(&THEN, &now, false, true).is_some(), "{now:?}");
        }
    }

    #[test]
    fn our_own_writes_are_no_change() {
        let now = OriginIdentity {
            mtime_ns: 9,
            ctime_ns: 9,
            ..THEN
        };
        assert_eq!(difference(&THEN, &now, false, false), None);
        assert!(difference(&THEN, &OriginIdentity { inode: 9, ..now }, false, false).is_some());
    }

    #[test]
    fn device_nodes_come_and_go() {
        let now = OriginIdentity {
            mtime_ns: 9,
            ctime_ns: 9,
            inode: 9,
            dev: 9,
            size: 100,
        };
        assert_eq!(difference(&THEN, &now, true, true), None);
    }

    #[test]
    fn volumes_may_be_extended() {
        let grown = OriginIdentity { size: 200, ..THEN };
        assert_eq!(difference(&THEN, &grown, true, true), None);
        assert!(difference(&THEN, &OriginIdentity { size: 50, ..THEN }, true, true).is_some());
    }

    #[test]
    fn a_decision_that_was_cut_short_is_asked_for_again() {
        let nothing = OriginIdentity::default();
        assert!(difference(&nothing, &THEN, true, false).is_some());
    }

    #[test]
    fn runs_are_adjacent_and_bounded() {
        let sample: Vec<(u64, u32)> = (0..600).map(|b| (b, 0)).chain([(700, 0)]).collect();
        let lengths: Vec<usize> = runs(&sample).map(<[_]>::len).collect();
        assert_eq!(lengths, [256, 256, 88, 1]);
    }

    #[test]
    fn a_changed_block_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("o");
        let data: Vec<u8> = (0..3 * BLOCK as usize + 100)
            .map(|i| (i % 251) as u8)
            .collect();
        std::fs::write(&path, &data).unwrap();
        let device = open_file(&path).unwrap();
        let crc = |i: usize| {
            let mut block = data[i * 4096..data.len().min((i + 1) * 4096)].to_vec();
            block.resize(4096, 0);
            crc32c(&block)
        };
        let good: Vec<(u64, u32)> = (0..4).map(|i| (i as u64, crc(i))).collect();
        let mut buffer = vec![0xFF; RUN_MAX * 4096];
        assert_eq!(
            first_difference(&device, data.len() as u64, &good, &mut buffer),
            None
        );
        let mut bad = good.clone();
        bad[3].1 ^= 1;
        assert_eq!(
            first_difference(&device, data.len() as u64, &bad, &mut buffer),
            Some(3 * 4096)
        );
    }

    #[test]
    fn origins_that_will_not_do() {
        let dir = tempfile::tempdir().unwrap();
        let missing = open_file(&dir.path().join("none")).unwrap_err();
        assert!(missing.what.contains("none"), "{missing}");
        assert!(open_file(dir.path()).is_err());
        std::fs::write(dir.path().join("empty"), b"").unwrap();
        let empty = open_file(&dir.path().join("empty")).unwrap_err();
        assert!(empty.what.contains("empty"), "{empty}");
        assert!(parse("relative").is_err());
    }
}
