//! How a client gets the first handle (MOUNT version 3, RFC 1813, appendix I).
//!
//! The list of who has mounted what is not kept: the protocol itself calls it a hint, and nothing
//! may rest on it.

use crate::rpc;
use crate::v3::Status;
use crate::xdr::{Reader, Result, Writer};

/// The program's number.
pub const PROGRAM: u32 = 100_005;
/// The version spoken here.
pub const VERSION: u32 = 3;
/// Longest path of a mount.
pub const PATH_MAX: u32 = 1024;

/// What a call to MOUNT asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask<'a> {
    /// Nothing.
    Null,
    /// The handle of a path.
    Mount(&'a [u8]),
    /// Who has mounted what.
    Dump,
    /// A client mounts a path no longer.
    Unmount(&'a [u8]),
    /// A client mounts nothing any longer.
    UnmountAll,
    /// What there is to be mounted.
    Exports,
}

impl<'a> Ask<'a> {
    /// Takes the arguments off a call; `None` if there is no such procedure.
    pub fn read(procedure: u32, r: &mut Reader<'a>) -> Option<Result<Ask<'a>>> {
        Some(match procedure {
            0 => Ok(Ask::Null),
            1 => r.opaque(PATH_MAX).map(Ask::Mount),
            2 => Ok(Ask::Dump),
            3 => r.opaque(PATH_MAX).map(Ask::Unmount),
            4 => Ok(Ask::UnmountAll),
            5 => Ok(Ask::Exports),
            _ => return None,
        })
    }
}

/// The answer to a call that mounts.
pub fn mounted(xid: u32, handle: std::result::Result<&[u8], Status>) -> Writer {
    let mut w = rpc::success(xid);
    match handle {
        Ok(handle) => {
            // And the kinds of credential that are understood: who the caller says it is.
            w.u32(0).opaque(handle).u32(1).u32(1);
        }
        Err(status) => {
            w.u32(match status {
                // These numbers are the same in both protocols; for others MOUNT has no number.
                Status::Perm
                | Status::NoEnt
                | Status::Io
                | Status::Access
                | Status::NotDir
                | Status::Inval
                | Status::NameTooLong => status as u32,
                Status::NotSupp => 10004,
                _ => 10006,
            });
        }
    }
    w
}

/// The answer to a call that asks for a list of nothing.
pub fn nothing(xid: u32) -> Writer {
    let mut w = rpc::success(xid);
    w.bool(false);
    w
}

/// The answer to a call that asks what there is: paths, and who may mount them.
pub fn exports(xid: u32, list: impl IntoIterator<Item = (String, Vec<String>)>) -> Writer {
    let mut w = rpc::success(xid);
    for (path, networks) in list {
        w.bool(true).opaque(path.as_bytes());
        for network in networks {
            w.bool(true).opaque(network.as_bytes());
        }
        w.bool(false);
    }
    w.bool(false);
    w
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_look_like_this() {
        let head = rpc::success(5).into_vec();
        let body = |w: Writer| w.as_slice()[head.len()..].to_vec();
        assert_eq!(
            body(mounted(5, Ok(b"abcde"))),
            [
                0, 0, 0, 0, 0, 0, 0, 5, b'a', b'b', b'c', b'd', b'e', 0, 0, 0, 0, 0, 0, 1, 0, 0, 0,
                1
            ]
        );
        assert_eq!(body(mounted(5, Err(Status::Access))), [0, 0, 0, 13]);
        assert_eq!(body(mounted(5, Err(Status::Stale))), 10006u32.to_be_bytes());
        assert_eq!(
            body(exports(5, [("/vm".to_owned(), vec!["::/0".to_owned()])])),
            [
                0, 0, 0, 1, 0, 0, 0, 3, b'/', b'v', b'm', 0, //
                0, 0, 0, 1, 0, 0, 0, 4, b':', b':', b'/', b'0', 0, 0, 0, 0, 0, 0, 0, 0,
            ]
        );
        assert_eq!(body(nothing(5)), [0; 4]);
    }

    #[test]
    fn paths_are_bounded() {
        let mut w = Writer::new();
        w.opaque(&[b'a'; PATH_MAX as usize + 1]);
        assert!(matches!(
            Ask::read(1, &mut Reader::new(w.as_slice())),
            Some(Err(_))
        ));
        assert_eq!(Ask::read(6, &mut Reader::new(&[])), None);
    }
}
