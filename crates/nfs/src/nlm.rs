//! Locks of byte ranges over the network (NLM version 4, The Open Group's XNFS, specification C702, chapter 14).
//!
//! Linux clients ask a portmapper for this program before the first lock of a mount without `nolock`. If the portmapper has no port for it,
//! kernels since 6.4 ask again for ever, so the program is always registered where clients are sent to us. Where its number belongs
//! to another program of the host, or a client's restart is not reported to us, locks are refused at once
//! ([`Status::NoLocks`], the client's ENOLCK).
//!
//! Linux uses the procedures that answer in the same call and asks again every 30 s for a lock that was [`Status::Blocked`], so there are
//! no callbacks and no procedures of the asynchronous kind.
//!
//! | module | content |
//! | --- | --- |
//! | [`table`] | which ranges are locked |
//! | [`locks`] | the table of an export, its grace period and its monitored clients |

pub mod locks;
pub mod table;

use crate::rpc;
use crate::v3::Handle;
use crate::xdr::{Reader, Result, Writer};

/// The program's number.
pub const PROGRAM: u32 = 100_021;
/// The version spoken here.
pub const VERSION: u32 = 4;
/// Longest name of a client, and longest string of bytes that the protocol allows (`LM_MAXSTRLEN`, `MAXNETOBJ_SZ`).
pub const NAME_MAX: u32 = 1024;
/// Last byte of a file that can be locked, as in fcntl(2).
pub const LAST: u64 = i64::MAX as u64;

/// The result of a call, by its number in the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Status {
    Granted = 0,
    Denied = 1,
    /// No locks are to be had here: ENOLCK.
    NoLocks = 2,
    /// The client asks again.
    Blocked = 3,
    GracePeriod = 4,
    ReadOnly = 6,
    StaleHandle = 7,
    /// A range beyond what a file can have.
    TooBig = 8,
    Failed = 9,
}

/// A range of a file, and its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lock<'a> {
    /// The client's name for itself.
    pub caller: &'a [u8],
    /// The file.
    pub file: Handle<'a>,
    /// The owner, as bytes that only the client understands.
    pub owner: &'a [u8],
    /// The owner's process at the client.
    pub process: i32,
    /// First byte.
    pub offset: u64,
    /// Bytes; 0 for all up to the end of the file.
    pub len: u64,
}

impl<'a> Lock<'a> {
    fn read(r: &mut Reader<'a>) -> Result<Lock<'a>> {
        Ok(Lock {
            caller: r.opaque(NAME_MAX)?,
            file: r.opaque(NAME_MAX)?,
            owner: r.opaque(NAME_MAX)?,
            process: r.u32()? as i32,
            offset: r.u64()?,
            len: r.u64()?,
        })
    }

    fn write(&self, w: &mut Writer) {
        w.opaque(self.caller)
            .opaque(self.file)
            .opaque(self.owner)
            .u32(self.process as u32)
            .u64(self.offset)
            .u64(self.len);
    }

    /// Its first and last byte; `None` if no file has them.
    pub fn range(&self) -> Option<(u64, u64)> {
        let last = match self.len {
            0 => LAST,
            len => self.offset.checked_add(len - 1)?,
        };
        (self.offset <= last && last <= LAST).then_some((self.offset, last))
    }
}

/// A call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Args<'a> {
    Null,
    Test {
        exclusive: bool,
        lock: Lock<'a>,
    },
    Lock {
        /// The client waits for it.
        block: bool,
        exclusive: bool,
        lock: Lock<'a>,
        /// It was held before the server restarted.
        reclaim: bool,
        /// The number of the client's start.
        state: i32,
        /// The client wants to be told of our restart.
        monitored: bool,
    },
    Cancel,
    Unlock {
        lock: Lock<'a>,
    },
    /// Of a whole file, as DOS knows it. Refused: clients that use it have other protocols.
    Share,
    Unshare,
    /// A client that was started anew holds nothing.
    FreeAll {
        name: &'a [u8],
    },
}

const NULL: u32 = 0;
const TEST: u32 = 1;
const LOCK: u32 = 2;
const CANCEL: u32 = 3;
const UNLOCK: u32 = 4;
const SHARE: u32 = 20;
const UNSHARE: u32 = 21;
const NM_LOCK: u32 = 22;
const FREE_ALL: u32 = 23;

impl<'a> Args<'a> {
    /// Takes the arguments off a call, with the bytes that its answer returns; `None` if there is no such procedure.
    pub fn read(procedure: u32, r: &mut Reader<'a>) -> Option<Result<(Args<'a>, &'a [u8])>> {
        matches!(procedure, NULL..=UNLOCK | SHARE..=FREE_ALL).then(|| Args::parse(procedure, r))
    }

    fn parse(procedure: u32, r: &mut Reader<'a>) -> Result<(Args<'a>, &'a [u8])> {
        match procedure {
            NULL => return Ok((Args::Null, &[])),
            FREE_ALL => {
                let name = r.opaque(NAME_MAX)?;
                r.u32()?;
                return Ok((Args::FreeAll { name }, &[]));
            }
            _ => {}
        }
        let cookie = r.opaque(NAME_MAX)?;
        let args = match procedure {
            TEST => Args::Test {
                exclusive: r.bool()?,
                lock: Lock::read(r)?,
            },
            LOCK | NM_LOCK => Args::Lock {
                block: r.bool()?,
                exclusive: r.bool()?,
                lock: Lock::read(r)?,
                reclaim: r.bool()?,
                state: r.u32()? as i32,
                monitored: procedure == LOCK,
            },
            CANCEL => {
                r.bool()?;
                r.bool()?;
                Lock::read(r)?;
                Args::Cancel
            }
            UNLOCK => Args::Unlock {
                lock: Lock::read(r)?,
            },
            _ => {
                for _ in 0..3 {
                    r.opaque(NAME_MAX)?;
                }
                r.u32()?;
                r.u32()?;
                r.bool()?;
                if procedure == UNSHARE {
                    Args::Unshare
                } else {
                    Args::Share
                }
            }
        };
        Ok((args, cookie))
    }

    /// The procedure's number, and the arguments as a client writes them; `None` for those that are only read here.
    pub fn write(&self, cookie: &[u8], w: &mut Writer) -> Option<u32> {
        Some(match self {
            Args::Null => NULL,
            Args::FreeAll { name } => {
                w.opaque(name).u32(0);
                FREE_ALL
            }
            Args::Test { exclusive, lock } => {
                w.opaque(cookie).bool(*exclusive);
                lock.write(w);
                TEST
            }
            Args::Lock {
                block,
                exclusive,
                lock,
                reclaim,
                state,
                monitored,
            } => {
                w.opaque(cookie).bool(*block).bool(*exclusive);
                lock.write(w);
                w.bool(*reclaim).u32(*state as u32);
                if *monitored { LOCK } else { NM_LOCK }
            }
            Args::Unlock { lock } => {
                w.opaque(cookie);
                lock.write(w);
                UNLOCK
            }
            Args::Cancel | Args::Share | Args::Unshare => return None,
        })
    }
}

/// A range that is in the way of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Holder {
    pub exclusive: bool,
    pub process: i32,
    pub first: u64,
    pub last: u64,
}

/// An answer without further results.
pub fn answer(xid: u32, cookie: &[u8], status: Status) -> Writer {
    let mut w = rpc::success(xid);
    w.opaque(cookie).u32(status as u32);
    w
}

/// The answer to a test: the range that is in the way, if there is one. Its owner is not told: it means nothing to others.
pub fn tested(xid: u32, cookie: &[u8], holder: Option<Holder>) -> Writer {
    let Some(holder) = holder else {
        return answer(xid, cookie, Status::Granted);
    };
    let mut w = answer(xid, cookie, Status::Denied);
    let len = match holder.last {
        LAST => 0,
        last => last - holder.first + 1,
    };
    w.bool(holder.exclusive)
        .u32(holder.process as u32)
        .opaque(&[])
        .u64(holder.first)
        .u64(len);
    w
}

/// The answer to a share or its end.
pub fn shared(xid: u32, cookie: &[u8], status: Status) -> Writer {
    let mut w = answer(xid, cookie, status);
    w.u32(0);
    w
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lock(offset: u64, len: u64) -> Lock<'static> {
        Lock {
            caller: b"c",
            file: b"f",
            owner: b"o",
            process: -1,
            offset,
            len,
        }
    }

    #[test]
    fn ranges_end_where_files_can() {
        assert_eq!(lock(0, 0).range(), Some((0, LAST)));
        assert_eq!(lock(5, 1).range(), Some((5, 5)));
        assert_eq!(lock(LAST, 1).range(), Some((LAST, LAST)));
        for (offset, len) in [
            (LAST, 2),
            (LAST + 1, 0),
            (1, u64::MAX),
            (u64::MAX, u64::MAX),
        ] {
            assert_eq!(lock(offset, len).range(), None, "{offset} {len}");
        }
    }

    /// A LOCK of Linux, byte for byte.
    #[test]
    fn lock_call_has_its_bytes() {
        let bytes = [
            &[0, 0, 0, 4, 1, 2, 3, 4][..], // cookie
            &[0, 0, 0, 0, 0, 0, 0, 1],     // does not wait, exclusive
            &[0, 0, 0, 1, b'h', 0, 0, 0, 0, 0, 0, 2, 7, 8, 0, 0],
            &[0, 0, 0, 3, b'7', b'@', b'h', 0, 0, 0, 0, 7],
            &[0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0],
            &[0, 0, 0, 1, 0, 0, 0, 3], // a reclaim, the client's third start
        ]
        .concat();
        let mut r = Reader::new(&bytes);
        let expected = Args::Lock {
            block: false,
            exclusive: true,
            lock: Lock {
                caller: b"h",
                file: &[7, 8],
                owner: b"7@h",
                process: 7,
                offset: 16,
                len: 0,
            },
            reclaim: true,
            state: 3,
            monitored: true,
        };
        assert_eq!(
            Args::read(2, &mut r),
            Some(Ok((expected, &[1, 2, 3, 4][..])))
        );
        assert_eq!(r.end(), Ok(()));
    }

    #[test]
    fn answers_have_their_bytes() {
        let head = rpc::success(5).len();
        let body = |w: Writer| w.as_slice()[head..].to_vec();
        let denied = [0, 0, 0, 1, 9, 0, 0, 0, 0, 0, 0, 1];
        assert_eq!(body(answer(5, &[9], Status::Denied)), denied);
        let holder = Holder {
            exclusive: true,
            process: 7,
            first: 16,
            last: 31,
        };
        let held = [
            0, 0, 0, 1, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 16,
        ];
        assert_eq!(
            body(tested(5, &[9], Some(holder))),
            [&denied[..], &held].concat()
        );
    }

    #[test]
    fn too_long_names_and_other_procedures_are_refused() {
        let name = [b'n'; NAME_MAX as usize + 1];
        let mut w = Writer::new();
        Args::FreeAll { name: &name }.write(&[], &mut w);
        assert!(matches!(
            Args::read(23, &mut Reader::new(w.as_slice())),
            Some(Err(_))
        ));
        for procedure in [5, 6, 16, 19, 24, u32::MAX] {
            assert_eq!(Args::read(procedure, &mut Reader::new(&[])), None);
        }
    }

    proptest! {
        #[test]
        fn no_bytes_upset_the_reader(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            for procedure in 0..25 {
                if let Some(Ok((args, cookie))) = Args::read(procedure, &mut Reader::new(&bytes)) {
                    let mut w = Writer::new();
                    if let Some(procedure) = args.write(cookie, &mut w) {
                        let again = Args::read(procedure, &mut Reader::new(w.as_slice()));
                        prop_assert_eq!(again, Some(Ok((args, cookie))));
                    }
                }
            }
        }
    }
}
