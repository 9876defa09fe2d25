//! Origins: are they there, are they the same as when we last looked?
//!
//! A cache that outlives the daemon can be wrong: somebody may have mounted, restored or resized
//! the origin while Hearth was not looking. Two independent questions are asked before a disk is
//! served. Is the file still the one that was left (size, times, inode)? And do cached clean
//! blocks still equal the origin ([`crate::compare`])?

use std::io::ErrorKind;
use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use hearth_format::{DiskRecord, OriginIdentity};
use hearth_io::beneath::beneath;
use hearth_io::file::Identity;
use hearth_io::spec::OpenSpecError;
use hearth_io::{BlockFile, Device, OpenError, OpenMode, OriginSpec, Source};
use hearth_origin::{Backing, How};

use crate::error::{Error, Kind, Result};
use crate::size::human;

/// Limits an origin's server may be given, seconds. Less would fail requests of a slow disk; more
/// than a day is a slip.
pub const ORIGIN_TIMEOUT: RangeInclusive<f64> = 0.5..=86_400.0;

/// The first rules under which all files an image is written through count for what it looks like.
pub const ALL_FILES_COUNT: u8 = 2;

/// What a spec says, checked for form.
pub fn parse(text: &str) -> Result<OriginSpec> {
    let spec: OriginSpec = text.parse().map_err(not_understood)?;
    hearth_origin::check(&spec).map_err(failure)?;
    Ok(spec)
}

/// A spec that is none, in the words of the control plane.
pub fn not_understood(e: hearth_io::spec::SpecError) -> Error {
    Error::of(
        Kind::Invalid,
        e.fault().within("the origin is not understood"),
    )
}

/// Refuses a disk that is to be written on an origin that cannot be.
pub fn check_writable(spec: &OriginSpec, read_only: bool) -> Result<()> {
    if read_only {
        return Ok(());
    }
    hearth_origin::check_writable(spec).map_err(failure)
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
    device.set_patience(how.timeout);
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
    // `qemu-img convert` takes a fixed VHD for raw, and so copies the footer. It adds nothing but a sector.
    let extension = path.extension().and_then(|e| e.to_str()).unwrap_or("");
    let is_raw = matches!(extension.to_ascii_lowercase().as_str(), "raw" | "img");
    if is_raw && found.is_footer_only() {
        return Ok(());
    }
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
        Origin::Scheme(_)
        | Origin::Uri(_)
        | Origin::Image(_)
        | Origin::Mirror(_)
        | Origin::ReadOnly { .. } => {
            return Error::of(Kind::Invalid, e.fault());
        }
        Origin::Chain(e) => {
            use hearth_origin::ChainError as Chain;
            let kind = match e {
                Chain::Missing { .. } => Kind::Unavailable,
                Chain::Names { .. } | Chain::Unknown { .. } => Kind::Invalid,
                _ => Kind::Refused,
            };
            return Error::of(kind, e.fault());
        }
        Origin::Missing { .. } => return Error::of(Kind::Unavailable, e.fault()),
        Origin::File(_) | Origin::Nbd(_) => {
            return Error::of(Kind::Unavailable, e.fault().within("cannot use the origin"));
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
        other => Error::of(
            Kind::Unavailable,
            other.fault().within("cannot use the origin"),
        ),
    }
}

/// True if the origin is there and, as far as that can be seen, of at least `size` bytes. Looks
/// only; takes no lock.
pub fn is_found(text: &str, size: u64) -> bool {
    parse(text).is_ok_and(|spec| hearth_origin::is_there(&spec, size))
}

/// True if the origin's times show every change while nothing served it. A mirror's legs are judged one by one where they are
/// opened; here counts whether all of them are files.
pub fn has_times(record: &DiskRecord, device: &Device, now: Option<&OriginIdentity>) -> bool {
    let legs = parse(&record.origin)
        .ok()
        .and_then(|spec| hearth_origin::legs(&spec));
    match legs {
        Some(legs) => legs.iter().all(|leg| {
            let path = hearth_origin::local_path(leg);
            path.is_some_and(|path| path.is_file())
        }),
        None => !device.is_device() && now.is_some_and(|now| now.mtime_ns != 0),
    }
}

/// The same origin with names of block devices that outlive a reboot; `None` if all have.
pub fn stable(spec: &OriginSpec) -> Option<OriginSpec> {
    let renamed = |part: &OriginSpec| {
        let decoded = hearth_origin::decoded(part);
        let part = decoded.as_ref().unwrap_or(part);
        let stable = match &part.source {
            Source::File(path) => hearth_io::identity::stable_path(path),
            Source::Other { .. } => None,
        };
        let renamed = stable.map(|path| OriginSpec {
            source: Source::File(path),
            ..part.clone()
        });
        renamed.or_else(|| decoded.clone())
    };
    let Some(legs) = hearth_origin::legs(spec) else {
        return renamed(spec);
    };
    let stable: Vec<OriginSpec> = legs
        .iter()
        .map(|leg| renamed(leg).unwrap_or_else(|| leg.clone()))
        .collect();
    (stable != legs)
        .then(|| hearth_origin::mirror(&stable).parse().ok())
        .flatten()
}

/// What identifies the block device of a disk's origin, over reboots; empty if nothing does.
pub fn device_identity(record: &DiskRecord) -> String {
    let spec = parse(&record.origin).ok();
    let path = spec.and_then(|spec| hearth_origin::local_path(&spec));
    let mut found = path
        .and_then(|path| hearth_io::identity::identity(&path))
        .unwrap_or_default();
    found.truncate(hearth_format::DEVICE_MAX);
    found
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
    device.identity().ok().map(kept)
}

fn kept(found: Identity) -> OriginIdentity {
    let Identity {
        size,
        mtime_ns,
        ctime_ns,
        dev,
        inode,
    } = found;
    OriginIdentity {
        size,
        mtime_ns,
        ctime_ns,
        dev,
        inode,
    }
}

/// What the origin looks like now (`now`) to who has recorded what it was under `rules`: under the
/// first ones, of an image that is written through several files only the topmost counted.
pub fn as_recorded(device: &Device, rules: u8, now: OriginIdentity) -> OriginIdentity {
    if rules >= ALL_FILES_COUNT {
        return now;
    }
    device.identity_of_top().map_or(now, kept)
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

/// How an origin differs from the one that was left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Only its time of change is another, as after chmod, chown or a move. Its content may be the same.
    pub touched: bool,
    /// In words.
    pub said: String,
}

fn when(ns: i64) -> String {
    hearth_origin::owner::utc(u64::try_from(ns / 1_000_000_000).unwrap_or_default())
}

/// Since when, as far as its times tell: nobody can set the time of change.
pub fn since(then: &OriginIdentity, now: &OriginIdentity) -> String {
    format!(
        "changed between {} and {}, last modified {}",
        when(then.ctime_ns),
        when(now.ctime_ns),
        when(now.mtime_ns)
    )
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
) -> Option<Difference> {
    let differs = |said: String| {
        Some(Difference {
            touched: false,
            said,
        })
    };
    if is_void(then) {
        return differs("what is on flash may be older than the origin".to_owned());
    }
    // A device that grew is a volume that was extended; a file that grew was written.
    let grew = is_device && now.size > then.size;
    if then.size != now.size && untouched && !grew {
        let sizes = format!(
            "its size changed from {} to {}",
            human(then.size),
            human(now.size)
        );
        return differs(match is_device {
            true => sizes,
            false => format!("{sizes}: it was {}", since(then, now)),
        });
    }
    if is_device {
        return None;
    }
    if then.inode != now.inode {
        return differs(format!(
            "it was replaced by another file, {}",
            since(then, now)
        ));
    }
    if untouched && then.mtime_ns != now.mtime_ns {
        return differs(format!(
            "it was written by somebody else: it was {}",
            since(then, now)
        ));
    }
    if untouched && then.ctime_ns != now.ctime_ns {
        return Some(Difference {
            touched: true,
            said: format!(
                "its time of change is {}, after Hearth left it at {}, though it was not modified, as after chmod, chown or mv",
                when(now.ctime_ns),
                when(then.ctime_ns)
            ),
        });
    }
    None
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
            let found = difference(&THEN, &now, false, true);
            // Alone the time of change proves nothing; the content has to.
            let only = now.ctime_ns != THEN.ctime_ns;
            assert_eq!(found.map(|d| d.touched), Some(only), "{now:?}");
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

    /// An image that keeps its data in another file. A version that looked at the topmost file alone
    /// has recorded that; since then the data file may have been written, by that version itself.
    #[test]
    fn what_an_earlier_version_has_recorded_still_fits() {
        let tool = |name: &str| std::process::Command::new(name);
        let has = |name: &str| tool(name).arg("--version").output().is_ok();
        if !has("qemu-img") || !has("qemu-storage-daemon") {
            println!("SKIPPED identity of images: QEMU's tools are not installed");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (top, data) = (dir.path().join("top"), dir.path().join("data"));
        let made = tool("qemu-img")
            .args(["create", "-q", "-f", "qcow2", "-o"])
            .arg(format!("data_file={},data_file_raw=on", data.display()))
            .args([top.to_str().unwrap(), "1M"])
            .status();
        assert!(made.unwrap().success());
        let allowed = Backing {
            allowed: true,
            ..Backing::default()
        };
        let spec = parse(&format!("qcow2:{}", top.display())).unwrap();
        let images = dir.path().join("run");
        let device = open(&spec, &DiskRecord::default(), &images, allowed).unwrap();
        let of_top = kept(device.identity_of_top().unwrap());
        let whole = identity(&device).unwrap();
        let file = std::fs::File::options().write(true).open(&data).unwrap();
        let later = std::time::SystemTime::now() + Duration::from_secs(1000);
        file.set_modified(later).unwrap();
        let now = identity(&device).unwrap();
        let differs = |then: &OriginIdentity, rules: u8| {
            difference(then, &as_recorded(&device, rules, now), false, true)
        };
        for rules in [0, 1] {
            assert_eq!(differs(&of_top, rules), None);
        }
        let said = differs(&whole, ALL_FILES_COUNT).unwrap().said;
        assert!(said.contains("written by somebody else"), "{said}");
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
