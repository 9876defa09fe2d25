//! Who may use which socket.
//!
//! A guest's disk and the control of the daemon are different rights: whoever runs virtual machines
//! must reach the sockets of the disks, and must not thereby be able to add, remove or redirect
//! them. So the two kinds of sockets have a group each, and the permissions of the sockets alone
//! decide: the directories on the way let everybody through, and nobody list them.

use std::ffi::CString;
use std::fs::{File, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use crate::error::{Error, Result};

/// The group of those who run virtual machines, on most distributions.
const GUESTS_GROUP: &str = "kvm";
/// Most bytes of a group's entry: its members' names, hundreds of them.
const GROUP_ENTRY_MAX: usize = 1 << 20;
/// Connections that may wait to be accepted: as many as the kernel lets by default.
const BACKLOG: i32 = 4096;

/// Groups that may use the sockets, besides the user who runs the daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rights {
    /// The sockets disks are used over.
    pub guests: Option<u32>,
    /// The control socket.
    pub control: Option<u32>,
    /// The second service's socket.
    pub second: Option<u32>,
}

/// Who may use one socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Its group, if not that of the process.
    pub group: Option<u32>,
    /// Its mode.
    pub mode: u32,
}

impl Access {
    /// Its owner, and a group if there is one.
    fn of_group(group: Option<u32>) -> Access {
        let mode = if group.is_some() { 0o660 } else { 0o600 };
        Access { group, mode }
    }
}

impl Rights {
    /// Finds the groups. Without a name for the guests' it is `kvm`, where there is one and we are
    /// root.
    pub fn find(
        guests: Option<&str>,
        control: Option<&str>,
        second: Option<&str>,
    ) -> Result<Rights> {
        let find = |name: &str, option: &str| match group(name) {
            Ok(Some(gid)) => Ok(gid),
            Ok(None) => Err(Error::invalid(
                format!("there is no group {name}"),
                format!("make it with `groupadd {name}`, or name another with {option}"),
            )),
            Err(e) => Err(Error::unavailable(
                format!("cannot look up the group {name}: {e}"),
                format!("give its number with {option}"),
            )),
        };
        let by_default = || match crate::rundir::own_uid() {
            0 => group(GUESTS_GROUP).ok().flatten(),
            _ => None,
        };
        Ok(Rights {
            guests: match guests {
                Some(name) => Some(find(name, "--socket-group")?),
                None => by_default(),
            },
            control: control
                .map(|name| find(name, "--control-group"))
                .transpose()?,
            second: second
                .map(|name| find(name, "--monitor-group"))
                .transpose()?,
        })
    }

    /// The sockets disks are used over.
    pub fn guests(&self) -> Access {
        Access {
            group: self.guests,
            mode: 0o660,
        }
    }

    /// The control socket.
    pub fn control(&self) -> Access {
        Access::of_group(self.control)
    }

    /// The second service's socket.
    pub fn second(&self) -> Access {
        Access::of_group(self.second)
    }

    /// The run directory's mode: others must get through it to their sockets.
    pub fn run_dir_mode(&self) -> u32 {
        match (self.guests, self.control, self.second) {
            (None, None, None) => 0o750,
            _ => 0o711,
        }
    }

    /// The mode of a directory of disks' sockets.
    pub fn sockets_dir_mode(&self) -> u32 {
        match self.guests {
            None => 0o750,
            Some(_) => 0o711,
        }
    }
}

/// The number of a group, given its name or number.
fn group(name: &str) -> io::Result<Option<u32>> {
    if let Ok(gid) = name.parse() {
        return Ok(Some(gid));
    }
    let Ok(name) = CString::new(name) else {
        return Ok(None);
    };
    let mut size = 4096;
    loop {
        // SAFETY: all-zero bytes are a valid `group`: pointers and numbers.
        let mut entry: libc::group = unsafe { std::mem::zeroed() };
        let mut found = std::ptr::null_mut();
        let mut buf = vec![0 as libc::c_char; size];
        // SAFETY: `name` ends with a zero; the entry, the buffer of the given size and the result
        // live across the call, and nothing of them is kept.
        let rc = unsafe {
            libc::getgrnam_r(
                name.as_ptr(),
                &mut entry,
                buf.as_mut_ptr(),
                buf.len(),
                &mut found,
            )
        };
        match rc {
            0 if found.is_null() => return Ok(None),
            0 => return Ok(Some(entry.gr_gid)),
            libc::ERANGE if size < GROUP_ENTRY_MAX => size *= 4,
            // What is said where there is no such entry differs.
            libc::ENOENT | libc::ESRCH => return Ok(None),
            e => return Err(io::Error::from_raw_os_error(e)),
        }
    }
}

/// Listens on `path`, where nothing is, for those who have `access`. At no moment for others.
pub(crate) fn bind(path: &Path, access: Access) -> io::Result<UnixListener> {
    use socket2::{Domain, SockAddr, Socket, Type};
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // A socket's file gets the mode that the socket has when it is bound.
    let file = File::from(OwnedFd::from(socket));
    file.set_permissions(Permissions::from_mode(0o600))?;
    let socket = Socket::from(OwnedFd::from(file));
    socket.bind(&SockAddr::unix(path)?)?;
    std::os::unix::fs::chown(path, None, access.group)?;
    std::fs::set_permissions(path, Permissions::from_mode(access.mode))?;
    socket.listen(BACKLOG)?;
    Ok(OwnedFd::from(socket).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn groups_by_name_and_by_number() {
        assert_eq!(group("root").unwrap(), Some(0));
        assert_eq!(group("4711").unwrap(), Some(4711));
        assert_eq!(group("no-such-group-here").unwrap(), None);
        let error = Rights::find(None, Some("no-such-group-here"), None).unwrap_err();
        assert!(error.remedy.contains("--control-group"), "{error}");
    }

    #[test]
    fn control_is_for_its_owner_unless_a_group_is_named() {
        let guests_only = Rights {
            guests: Some(36),
            ..Rights::default()
        };
        assert_eq!(
            (guests_only.control().mode, guests_only.control().group),
            (0o600, None)
        );
        assert_eq!(guests_only.guests().group, Some(36));
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("s");
        let _socket = bind(&path, guests_only.control()).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    }
}
