//! The records of NFS version 3 (RFC 1813): what a call asks for, and how its answer is written.
//!
//! Nothing is done here. [`Args::read`] makes of a call's bytes what is asked for, borrowing names
//! and data from the message; [`refusal`] writes the answer to a call that was not carried out, whose
//! shape is another for each procedure.

mod args;
mod attributes;
mod status;

pub use args::{Args, Create, HANDLE_MAX, Handle, How, NAME_MAX, Named, PATH_MAX, Stability};
pub use attributes::{
    Attributes, Before, Kind, SetAttributes, SetTime, Time, Wcc, put_attributes, put_optional,
    put_wcc,
};
pub use status::Status;

use crate::rpc;
use crate::xdr::Writer;

/// The program's number.
pub const PROGRAM: u32 = 100_003;
/// The version spoken here.
pub const VERSION: u32 = 3;

/// Longest read and write, and what clients are told to prefer.
pub const TRANSFER_MAX: u32 = 1 << 20;
/// Longest answer to a listing of a directory.
pub const LISTING_MAX: u32 = 256 << 10;

/// A procedure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Procedure {
    Null,
    GetAttr,
    SetAttr,
    Lookup,
    Access,
    ReadLink,
    Read,
    Write,
    Create,
    MkDir,
    SymLink,
    MkNod,
    Remove,
    RmDir,
    Rename,
    Link,
    ReadDir,
    ReadDirPlus,
    FsStat,
    FsInfo,
    PathConf,
    Commit,
}

impl Procedure {
    /// All of them, in the order of their numbers.
    pub const ALL: [Procedure; 22] = [
        Procedure::Null,
        Procedure::GetAttr,
        Procedure::SetAttr,
        Procedure::Lookup,
        Procedure::Access,
        Procedure::ReadLink,
        Procedure::Read,
        Procedure::Write,
        Procedure::Create,
        Procedure::MkDir,
        Procedure::SymLink,
        Procedure::MkNod,
        Procedure::Remove,
        Procedure::RmDir,
        Procedure::Rename,
        Procedure::Link,
        Procedure::ReadDir,
        Procedure::ReadDirPlus,
        Procedure::FsStat,
        Procedure::FsInfo,
        Procedure::PathConf,
        Procedure::Commit,
    ];

    /// The procedure of this number.
    pub fn of(number: u32) -> Option<Procedure> {
        Procedure::ALL.get(number as usize).copied()
    }

    /// True if it changes something, so that to carry it out a second time because its answer was
    /// lost could do harm: the file is created and "exists", or a write that comes late covers a newer one.
    pub fn changes(self) -> bool {
        use Procedure::*;
        matches!(
            self,
            SetAttr | Write | Create | MkDir | SymLink | MkNod | Remove | RmDir | Rename | Link
        )
    }
}

/// The answer to a call that was not carried out. None of them tells attributes, which are optional
/// in all of them.
pub fn refusal(xid: u32, procedure: Procedure, status: Status) -> Writer {
    use Procedure::*;
    let mut w = rpc::success(xid);
    let absent = match procedure {
        Null => return w,
        GetAttr => 0,
        Lookup | Access | ReadLink | Read | ReadDir | ReadDirPlus | FsStat | FsInfo | PathConf => 1,
        SetAttr | Write | Create | MkDir | SymLink | MkNod | Remove | RmDir | Commit => 2,
        Link => 3,
        Rename => 4,
    };
    w.u32(status as u32);
    for _ in 0..absent {
        w.bool(false);
    }
    w
}
