//! The owner of a file on a network file system: a small file beside it.
//!
//! It comes into being by a link, which of two hosts only one gets. Its owner touches it every few
//! seconds, through the file it has open: what another host put in its place is never touched. Who
//! takes over looks for as long as three touches take, and compares what it sees with what it saw,
//! so that no two clocks are compared; then moves the record away, which of two hosts again only one
//! can, looks whether it is as it was all the time, and links its own.
//!
//! An owner that comes back touches its record as well, before it changes or removes it, and looks
//! whether what it touched still stands there. So whoever is about to take over finds it touched, and
//! puts it back; or the owner finds it gone.
//!
//! A pool whose record names another host was moved here with its flash. Or its flash was copied, and
//! it is served there as well: so that record must stand still, too, before it is renewed, and an owner
//! that finds another host in its record stops.

use super::{ClaimError, Owner, RECORD_MAX, Take, Watch, taken_over};
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hearth_fault::Fault;

/// How often the owner touches its record.
const BEAT: Duration = Duration::from_secs(5);
/// How long a record must stand still before its owner counts as gone.
const STILL: Duration = Duration::from_secs(15);
/// How often is looked meanwhile.
const LOOK: Duration = Duration::from_secs(1);
/// Attempts to take an origin others are taking at the same time.
const TRIES: usize = 3;

/// File systems whose files other hosts may have open: NFS, CIFS and SMB, Ceph, FUSE (GlusterFS,
/// sshfs, virtiofs and many more), 9p, GFS2, OCFS2, Lustre, GPFS, BeeGFS, AFS; see statfs(2).
const SHARED: [i64; 14] = [
    0x6969,
    0xFF53_4D42,
    0xFE53_4D42,
    0x517B,
    0x00C3_6400,
    0x6573_5546,
    0x0102_1997,
    0x0116_1970,
    0x7461_636F,
    0x0BD0_0BD0,
    0x4750_4653,
    0x1983_0326,
    0x5346_414F,
    0x6B41_4653,
];

/// The place of the record of a file that other hosts may reach; `None` for any other. A server that does
/// not answer is an error: taken for "no other host" it would let two of them write.
pub(super) fn shared(path: &Path) -> io::Result<Option<PathBuf>> {
    // By one name, whichever link leads to it.
    let path = match std::fs::canonicalize(path) {
        // Opening it says so.
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        found => found?,
    };
    let name = std::ffi::CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: all-zero bytes are a valid statfs.
    let mut found: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: a string that ends in zero, and a valid out-pointer for the call.
    if unsafe { libc::statfs(name.as_ptr(), &mut found) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // Its type differs from one C library to the other; the numbers have 32 bits.
    let kind = found.f_type as i64 & 0xFFFF_FFFF;
    if !SHARED.contains(&kind) || !std::fs::metadata(&path)?.is_file() {
        return Ok(None);
    }
    let mut beside = std::ffi::OsString::from(".");
    beside.push(path.file_name().unwrap_or_default());
    beside.push(".hearth-owner");
    Ok(Some(path.with_file_name(beside)))
}

/// What stands in a record's place.
#[derive(Debug, PartialEq)]
struct Seen {
    owner: Option<Owner>,
    inode: u64,
    touched: (i64, i64),
}

/// Opened anew each time: then a network file system asks its server.
fn read(place: &Path) -> io::Result<Option<Seen>> {
    let Some(file) = open(place, false)? else {
        return Ok(None);
    };
    content(&file).map(Some)
}

fn open(place: &Path, write: bool) -> io::Result<Option<File>> {
    let opened = OpenOptions::new()
        .read(true)
        .write(write)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW)
        .open(place);
    match opened {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some),
    }
}

fn content(file: &File) -> io::Result<Seen> {
    let meta = file.metadata()?;
    let mut text = Vec::new();
    file.take(RECORD_MAX as u64).read_to_end(&mut text)?;
    Ok(Seen {
        owner: Owner::from_json(&String::from_utf8_lossy(&text)),
        inode: meta.ino(),
        touched: (meta.mtime(), meta.mtime_nsec()),
    })
}

/// A file of ours beside the record, with what the record shall say.
fn draft(place: &Path, me: &Owner) -> io::Result<PathBuf> {
    let draft = own(place, me, "new");
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o644)
        .open(&draft)?;
    file.write_all(me.to_json().as_bytes())?;
    file.sync_all()?;
    Ok(draft)
}

/// A name nobody else uses.
fn own(place: &Path, me: &Owner, what: &str) -> PathBuf {
    let mut name = place.as_os_str().to_owned();
    name.push(format!(".{}.{what}", me.instance));
    PathBuf::from(name)
}

/// Writes the record if there is none; false if there is.
fn create(place: &Path, me: &Owner) -> io::Result<bool> {
    let draft = draft(place, me)?;
    let linked = std::fs::hard_link(&draft, place);
    let gone = std::fs::remove_file(&draft);
    match linked {
        Ok(()) => gone.map(|()| true),
        Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(false),
        // No links there. Half a record, should we die now, is a record all the same.
        Err(e)
            if matches!(
                e.raw_os_error(),
                Some(libc::EPERM | libc::EOPNOTSUPP | libc::ENOSYS)
            ) =>
        {
            let file = OpenOptions::new().write(true).create_new(true).open(place);
            match file {
                Ok(mut file) => {
                    file.write_all(me.to_json().as_bytes())?;
                    file.sync_all()?;
                    Ok(true)
                }
                Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(false),
                Err(e) => Err(e),
            }
        }
        Err(e) => Err(e),
    }
}

/// Makes the file ours; true if nobody owned it.
pub(super) fn claim(
    place: &Path,
    origin: &str,
    me: &Owner,
    take: Take,
) -> Result<bool, ClaimError> {
    let failed = |e: io::Error| match e.raw_os_error() {
        // The last two of those are a file system that makes no new files, such as one that shows a single one.
        Some(libc::EACCES | libc::EPERM | libc::EROFS | libc::ENOSYS | libc::EOPNOTSUPP) => {
            ClaimError::Unknown {
                origin: origin.to_owned(),
                why: format!("{} cannot be written: {e}", place.display()),
            }
        }
        _ => ClaimError::Unavailable {
            origin: origin.to_owned(),
            why: Fault::new(
                format!("{}: {e}", place.display()),
                "see that the storage can be reached",
            ),
        },
    };
    for _ in 0..TRIES {
        let Some(seen) = read(place).map_err(failed)? else {
            if create(place, me).map_err(failed)? {
                return Ok(true);
            }
            continue;
        };
        let Some(owner) = &seen.owner else {
            return Err(ClaimError::Garbled {
                origin: origin.to_owned(),
                place: place.display().to_string(),
            });
        };
        if owner.pool == me.pool {
            // Moved here with its flash, or this is a copy of the flash and the pool is served there, too.
            if owner.host != me.host && !stands_still(place, &seen).map_err(failed)? {
                return Err(ClaimError::InUse {
                    origin: origin.to_owned(),
                    who: format!("this same pool on host {}, which is at work", owner.host),
                });
            }
            if renew(place, me, &seen).map_err(failed)? {
                return Ok(false);
            }
            continue;
        }
        let (origin, owner) = (origin.to_owned(), Box::new(owner.clone()));
        if take == Take::Free {
            return Err(ClaimError::Owned { origin, owner });
        }
        let alive = |owner: Box<Owner>| ClaimError::Alive {
            origin: origin.clone(),
            owner,
            seen: "; it touched its record while we looked".to_owned(),
        };
        if !stands_still(place, &seen).map_err(failed)? {
            return Err(alive(owner));
        }
        match set_aside(place, me, &seen) {
            Ok(true) => {}
            Ok(false) => return Err(alive(owner)),
            Err(e) if e.kind() == ErrorKind::NotFound => continue,
            Err(e) => return Err(failed(e)),
        }
    }
    Err(ClaimError::Unavailable {
        origin: origin.to_owned(),
        why: Fault::new(
            format!("{} changes all the time", place.display()),
            "see who else writes it, and try again",
        ),
    })
}

/// Touches the record that was seen; false if it is not what stands there any more.
fn touch(place: &Path, seen: &Seen) -> io::Result<bool> {
    // A number alone may be given again when a file is gone.
    let is_it = |now: &Seen| now.inode == seen.inode && now.owner == seen.owner;
    let Some(file) = open(place, true)? else {
        return Ok(false);
    };
    if !is_it(&content(&file)?) {
        return Ok(false);
    }
    // SAFETY: an open descriptor; null means now.
    if unsafe { libc::futimens(file.as_raw_fd(), std::ptr::null()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(read(place)?.as_ref().is_some_and(is_it))
}

/// Goes on with a record of ours, and has it say where we are; false if it was taken over just now.
fn renew(place: &Path, me: &Owner, seen: &Seen) -> io::Result<bool> {
    if !touch(place, seen)? {
        return Ok(false);
    }
    let is_said = |owner: &Owner| (&owner.host, &owner.disk) == (&me.host, &me.disk);
    if !seen.owner.as_ref().is_some_and(is_said) {
        std::fs::rename(draft(place, me)?, place)?;
    }
    Ok(true)
}

/// Takes away another's record, if it is as it was seen; else puts it back.
fn set_aside(place: &Path, me: &Owner, seen: &Seen) -> io::Result<bool> {
    let aside = own(place, me, "old");
    std::fs::rename(place, &aside)?;
    let is_same = read(&aside)?.as_ref() == Some(seen);
    if !is_same {
        // Its owner has come back, or somebody else's came between. Should there be another by now,
        // that one counts.
        let _ = std::fs::hard_link(&aside, place);
    }
    std::fs::remove_file(&aside)?;
    Ok(is_same)
}

/// True if a record is not touched for long enough.
fn stands_still(place: &Path, seen: &Seen) -> io::Result<bool> {
    let end = Instant::now() + STILL;
    while Instant::now() < end {
        std::thread::sleep(LOOK);
        match read(place)? {
            Some(now) if now != *seen => return Ok(false),
            _ => {}
        }
    }
    Ok(true)
}

/// Removes our record, if it is ours.
pub(super) fn remove(place: &Path, me: &Owner) -> Result<(), Fault> {
    let failed = |e: io::Error| Fault::bare(format!("{}: {e}", place.display()));
    match read(place).map_err(failed)? {
        Some(seen)
            if seen
                .owner
                .as_ref()
                .is_some_and(|owner| owner.pool == me.pool) =>
        {
            match touch(place, &seen).map_err(failed)? {
                true => std::fs::remove_file(place).map_err(failed),
                false => Ok(()),
            }
        }
        _ => Ok(()),
    }
}

/// Touches the record, and sees whether it is still ours.
pub(super) fn watcher(place: &Path, me: &Owner) -> Watch {
    let (place, me) = (place.to_owned(), me.clone());
    let mut open: Option<File> = None;
    let mut told = false;
    let look = move || {
        let seen = match read(&place) {
            Ok(seen) => seen,
            Err(e) => {
                if !std::mem::replace(&mut told, true) {
                    tracing::warn!(disk = %me.disk, "cannot read {}: {e}", place.display());
                }
                return None;
            }
        };
        told = false;
        match seen.map(|seen| (seen.inode, seen.owner)) {
            Some((_, Some(owner))) if (&owner.pool, &owner.host) != (&me.pool, &me.host) => {
                return Some(taken_over(&owner));
            }
            // Half a record: somebody is about to write it.
            Some((_, None)) => {}
            Some((inode, Some(_))) => {
                let ours = |f: &File| f.metadata().is_ok_and(|m| m.ino() == inode);
                if !open.as_ref().is_some_and(ours) {
                    open = OpenOptions::new().write(true).open(&place).ok();
                }
                if let Some(file) = open.as_ref().filter(|f| ours(f)) {
                    // SAFETY: an open descriptor; null means now.
                    unsafe { libc::futimens(file.as_raw_fd(), std::ptr::null()) };
                }
            }
            None => {
                tracing::warn!(disk = %me.disk, "{} was removed; written again", place.display());
                // Should somebody be faster, the next look says so.
                let _ = create(&place, &me);
            }
        }
        None
    };
    Watch {
        first: BEAT,
        every: BEAT,
        look: Box::new(look),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(pool: &str, instance: &str) -> Owner {
        Owner {
            pool: pool.to_owned(),
            host: format!("host-of-{pool}"),
            disk: "d".to_owned(),
            instance: instance.to_owned(),
            since: 1,
        }
    }

    #[test]
    fn a_file_has_one_owner_that_finds_its_record_again() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join(".d.hearth-owner");
        assert!(claim(&place, "d", &owner("a", "1"), Take::Free).unwrap());
        let other = claim(&place, "d", &owner("b", "1"), Take::Free).unwrap_err();
        assert!(other.to_string().contains("host-of-a"), "{other}");
        // Another run of the same pool.
        assert!(!claim(&place, "d", &owner("a", "2"), Take::Free).unwrap());
        remove(&place, &owner("b", "1")).unwrap();
        assert!(place.exists());
        remove(&place, &owner("a", "3")).unwrap();
        assert!(claim(&place, "d", &owner("b", "1"), Take::Free).unwrap());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn of_many_who_come_at_once_one_gets_it() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join(".d.hearth-owner");
        let got: Vec<bool> = std::thread::scope(|s| {
            let all: Vec<_> = (0..8)
                .map(|i| {
                    let (place, me) = (&place, owner(&format!("p{i}"), &format!("i{i}")));
                    s.spawn(move || claim(place, "d", &me, Take::Free).is_ok())
                })
                .collect();
            all.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert_eq!(got.iter().filter(|got| **got).count(), 1, "{got:?}");
    }

    #[test]
    fn who_was_taken_over_notices_and_touches_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join(".d.hearth-owner");
        let (a, b) = (owner("a", "1"), owner("b", "1"));
        claim(&place, "d", &a, Take::Free).unwrap();
        let mut watch = watcher(&place, &a);
        assert_eq!((watch.look)(), None);
        let before = read(&place).unwrap();
        std::fs::remove_file(&place).unwrap();
        claim(&place, "d", &b, Take::Free).unwrap();
        let theirs = read(&place).unwrap();
        assert_ne!(before, theirs);
        assert!((watch.look)().unwrap().contains("host-of-b"));
        assert_eq!(read(&place).unwrap(), theirs);
    }

    /// A copy of the flash is the same pool; what it has is not the same data for long.
    #[test]
    fn one_pool_on_two_hosts_is_seen_by_both() {
        use std::sync::atomic::{AtomicBool, Ordering};
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join(".d.hearth-owner");
        let a = owner("a", "1");
        let copy = Owner {
            host: "elsewhere".to_owned(),
            ..owner("a", "2")
        };
        claim(&place, "d", &a, Take::Free).unwrap();
        let mut watch = watcher(&place, &a);
        let over = AtomicBool::new(false);
        let refused = std::thread::scope(|s| {
            s.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    assert_eq!((watch.look)(), None);
                    std::thread::yield_now();
                }
            });
            let refused = claim(&place, "d", &copy, Take::Free);
            over.store(true, Ordering::Relaxed);
            refused.unwrap_err().to_string()
        });
        assert!(
            refused.contains("this same pool on host host-of-a"),
            "{refused}"
        );
        // Where it came from is silent for long enough: it was moved.
        assert!(!claim(&place, "d", &copy, Take::Free).unwrap());
        assert!((watch.look)().unwrap().contains("elsewhere"));
        assert_eq!(read(&place).unwrap().unwrap().owner, Some(copy));
    }

    /// Somebody takes over between the owner's look and what it does then.
    #[test]
    fn an_owner_that_comes_back_too_late_overwrites_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join(".d.hearth-owner");
        let (a, b) = (owner("a", "1"), owner("b", "1"));
        // Also from another host, which its record has to say.
        let moved = Owner {
            host: "elsewhere".to_owned(),
            ..owner("a", "2")
        };
        for back in [&a, &moved] {
            claim(&place, "d", &a, Take::Free).unwrap();
            let seen = read(&place).unwrap().unwrap();
            assert!(set_aside(&place, &b, &seen).unwrap());
            assert!(!renew(&place, back, &seen).unwrap());
            claim(&place, "d", &b, Take::Free).unwrap();
            let theirs = read(&place).unwrap();
            assert!(!renew(&place, back, &seen).unwrap());
            assert!(claim(&place, "d", back, Take::Free).is_err());
            assert_eq!(read(&place).unwrap(), theirs);
            remove(&place, &b).unwrap();
        }
    }

    /// The owner comes back between the last look of who takes over and its taking the record away.
    #[test]
    fn an_owner_that_comes_back_in_time_keeps_its_record() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join(".d.hearth-owner");
        let (a, b) = (owner("a", "1"), owner("b", "1"));
        claim(&place, "d", &a, Take::Free).unwrap();
        // It stood still for long.
        let long_ago = std::fs::FileTimes::new().set_modified(std::time::UNIX_EPOCH);
        let file = OpenOptions::new().write(true).open(&place).unwrap();
        file.set_times(long_ago).unwrap();
        let seen = read(&place).unwrap().unwrap();
        assert!(!claim(&place, "d", &owner("a", "2"), Take::Free).unwrap());
        assert!(!set_aside(&place, &b, &seen).unwrap());
        assert_eq!(read(&place).unwrap().unwrap().owner, Some(a));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn nonsense_is_nobodys() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join(".d.hearth-owner");
        std::fs::write(&place, "x").unwrap();
        let refused = claim(&place, "d", &owner("a", "1"), Take::Over).unwrap_err();
        assert!(matches!(refused, ClaimError::Garbled { .. }));
        assert_eq!(shared(dir.path()).unwrap(), None);
        // Whatever keeps it from being looked at, that does not make it this host's own.
        let file = dir.path().join("file");
        std::fs::write(&file, b"").unwrap();
        assert!(shared(&file.join("below")).is_err());
        assert_eq!(shared(&dir.path().join("missing")).unwrap(), None);
    }
}
