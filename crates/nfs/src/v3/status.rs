//! How a procedure ended, in the protocol's numbers.

use std::io;

/// Why a procedure was not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{self:?}")]
#[allow(missing_docs)]
#[repr(u32)]
pub enum Status {
    Perm = 1,
    NoEnt = 2,
    Io = 5,
    NxIo = 6,
    Access = 13,
    Exist = 17,
    XDev = 18,
    NoDev = 19,
    NotDir = 20,
    IsDir = 21,
    Inval = 22,
    FBig = 27,
    NoSpace = 28,
    RoFs = 30,
    MLink = 31,
    NameTooLong = 63,
    NotEmpty = 66,
    DQuot = 69,
    Stale = 70,
    BadHandle = 10001,
    NotSync = 10002,
    BadCookie = 10003,
    NotSupp = 10004,
    TooSmall = 10005,
    ServerFault = 10006,
    BadType = 10007,
    JukeBox = 10008,
}

impl Status {
    /// What a client is told of an error of the operating system. An unknown one becomes
    /// [`Io`](Status::Io).
    pub fn of(error: &io::Error) -> Status {
        let Some(number) = error.raw_os_error() else {
            return Status::Io;
        };
        match number {
            libc::EPERM => Status::Perm,
            libc::ENOENT => Status::NoEnt,
            libc::ENXIO => Status::NxIo,
            // What is mounted there keeps it from being removed.
            libc::EACCES | libc::EBUSY => Status::Access,
            libc::EEXIST => Status::Exist,
            libc::EXDEV => Status::XDev,
            libc::ENODEV => Status::NoDev,
            libc::ENOTDIR => Status::NotDir,
            libc::EISDIR => Status::IsDir,
            // A symbolic link where none is followed.
            libc::EINVAL | libc::ELOOP => Status::Inval,
            libc::EFBIG => Status::FBig,
            libc::ENOSPC => Status::NoSpace,
            libc::EROFS => Status::RoFs,
            libc::EMLINK => Status::MLink,
            libc::ENAMETOOLONG => Status::NameTooLong,
            libc::ENOTEMPTY => Status::NotEmpty,
            libc::EDQUOT => Status::DQuot,
            libc::ESTALE => Status::Stale,
            libc::EOPNOTSUPP | libc::ENOSYS => Status::NotSupp,
            // Something here is used up that comes back: the client is to ask again.
            libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::EAGAIN | libc::EINTR => {
                Status::JukeBox
            }
            _ => Status::Io,
        }
    }
}

impl From<io::Error> for Status {
    fn from(error: io::Error) -> Status {
        Status::of(&error)
    }
}
