//! Locks on an open file, in both languages that programs which use disk images speak.
//!
//! `flock` on the whole file is what Hearth always took. QEMU does not look at it: it marks single
//! bytes of the image with shared locks of the open file description. Byte 100 + n says "I use
//! permission n", byte 200 + n "I do not share permission n with others"; nobody's data is touched,
//! as these locks only advise. To open, one marks the bytes, and then looks whether somebody else
//! has marked what contradicts: for each permission wanted, that nobody refuses to share it, and
//! for each not shared, that nobody uses it. (QEMU has done so since 2.10.)
//!
//! Both are taken, so that a running guest's image is refused here and an origin in use here is
//! refused there. Both belong to the open file description: they last until its last descriptor is
//! closed, whatever other descriptors of the same file do, and end with the process, however it
//! ends.

use std::fs::File;
use std::io;
use std::sync::Once;

use crate::sys;

/// Byte that stands for using permission 0.
const USED: i64 = 100;
/// Byte that stands for not sharing permission 0.
const UNSHARED: i64 = 200;

/// Permissions, by their number in QEMU's protocol.
const CONSISTENT_READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;

/// What a user of a file or device does with it. Nobody else may write it meanwhile, either way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Use {
    /// Reads only; others may read, too.
    Read,
    /// Reads and writes. Others may read, unless they insist that nobody writes.
    Write,
}

impl Use {
    fn used(self) -> &'static [i64] {
        match self {
            Use::Read => &[CONSISTENT_READ],
            Use::Write => &[CONSISTENT_READ, WRITE],
        }
    }

    /// What is not shared: the content and the size stay what they are unless we change them.
    const UNSHARED: &'static [i64] = &[WRITE, RESIZE];
}

/// Takes the whole file's lock, without waiting; false if somebody else has it.
pub(crate) fn take_whole(file: &File, how: Use) -> io::Result<bool> {
    match sys::try_flock(file, how == Use::Write) {
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(false),
        other => other.map(|()| true),
    }
}

/// Marks the bytes for `how`, without waiting; false if somebody else's marks contradict, in which
/// case the caller closes the file, and its marks go with it. Where the file system has no such
/// locks this succeeds, and the log says so once.
pub(crate) fn mark(file: &File, how: Use) -> io::Result<bool> {
    if !has_marks(sys::file_system(file).ok()) {
        return judged(Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)));
    }
    let marked = (|| {
        // Looked at before as well: who is refused anyhow leaves no marks, not even for a moment.
        if !may_mark(file, how)? {
            return Ok(false);
        }
        let used = how.used().iter().map(|n| USED + n);
        for byte in used.chain(Use::UNSHARED.iter().map(|n| UNSHARED + n)) {
            sys::lock_byte(file, byte)?;
        }
        may_mark(file, how)
    })();
    judged(marked)
}

/// What the kernel's answer means for who wants to go on.
fn judged(marked: io::Result<bool>) -> io::Result<bool> {
    match marked {
        Err(e) if is_taken(&e) => Ok(false),
        Err(e) if is_unsupported(&e) => {
            static SAID: Once = Once::new();
            SAID.call_once(|| {
                tracing::warn!(
                    "the file system of a file in use has no locks of open file descriptions ({e}): \
                     QEMU and Hearth do not see each other on such files"
                );
            });
            Ok(true)
        }
        other => other,
    }
}

/// SMB and CIFS, as the kernel's clients of different age call themselves; see statfs(2).
const SMB: [u32; 3] = [0xFF53_4D42, 0xFE53_4D42, 0x517B];

/// True if single bytes can be locked on such a file system beside a lock of the whole file. An SMB
/// server has but one kind of lock: there `flock` locks all bytes, and our own marks would find it in
/// their way. One that cannot be asked is taken to have both.
fn has_marks(file_system: Option<u32>) -> bool {
    file_system.is_none_or(|kind| !SMB.contains(&kind))
}

/// True if nobody's marks contradict `how`. Looks only.
pub(crate) fn may_mark(file: &File, how: Use) -> io::Result<bool> {
    if !has_marks(sys::file_system(file).ok()) {
        return Ok(true);
    }
    for n in how.used() {
        if sys::is_byte_locked(file, UNSHARED + n)? {
            return Ok(false);
        }
    }
    for n in Use::UNSHARED {
        if sys::is_byte_locked(file, USED + n)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn is_taken(e: &io::Error) -> bool {
    // A byte somebody has locked exclusively, for reasons of their own.
    matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EACCES))
}

fn is_unsupported(e: &io::Error) -> bool {
    matches!(
        e.raw_os_error(),
        Some(libc::EINVAL | libc::ENOLCK | libc::ENOSYS | libc::EOPNOTSUPP)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    fn opened(path: &std::path::Path) -> File {
        File::options().read(true).write(true).open(path).unwrap()
    }

    #[test]
    fn marks_contradict_as_in_qemu() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let can = |first: Use, second: Use| {
            let (a, b) = (opened(file.path()), opened(file.path()));
            assert!(mark(&a, first).unwrap());
            let can = may_mark(&b, second).unwrap();
            assert_eq!(mark(&b, second).unwrap(), can);
            can
        };
        assert!(can(Use::Read, Use::Read));
        assert!(!can(Use::Read, Use::Write));
        assert!(!can(Use::Write, Use::Read));
        assert!(!can(Use::Write, Use::Write));
    }

    /// The marks belong to the open file description: other descriptors of the file come and go.
    #[test]
    fn marks_last_as_long_as_the_description() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let held = opened(file.path());
        assert!(mark(&held, Use::Write).unwrap());
        let free = || mark(&opened(file.path()), Use::Read).unwrap();
        drop(opened(file.path()));
        let copy = File::from(held.as_fd().try_clone_to_owned().unwrap());
        assert!(!free());
        drop(held);
        assert!(!free(), "the description is open under another number");
        drop(copy);
        assert!(free());
    }

    #[test]
    fn without_such_locks_work_goes_on() {
        let answer = |errno| judged(Err(io::Error::from_raw_os_error(errno)));
        // NFS without a lock service, an old kernel, a file system that has none.
        for errno in [libc::ENOLCK, libc::EINVAL, libc::EOPNOTSUPP] {
            assert!(answer(errno).unwrap());
        }
        assert!(!answer(libc::EAGAIN).unwrap());
        assert!(answer(libc::EIO).is_err());
    }

    #[test]
    fn one_kind_of_lock_does_not_stand_in_its_own_way() {
        for smb in [0xFF53_4D42, 0xFE53_4D42, 0x517B] {
            assert!(!has_marks(Some(smb)));
        }
        // ext4, XFS, tmpfs, NFS, one that does not say.
        for other in [0xEF53, 0x5846_5342, 0x0102_1994, 0x6969] {
            assert!(has_marks(Some(other)));
        }
        assert!(has_marks(None));
    }

    #[test]
    fn who_is_refused_leaves_no_mark() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (held, refused, other) = (
            opened(file.path()),
            opened(file.path()),
            opened(file.path()),
        );
        assert!(mark(&held, Use::Read).unwrap());
        assert!(!mark(&refused, Use::Write).unwrap());
        drop(held);
        assert!(mark(&other, Use::Write).unwrap());
    }
}
