//! What a call asks for.

use super::{Kind, Procedure, SetAttributes, Time};
use crate::xdr::{Malformed, Reader, Result, Writer};

/// Longest file handle of the protocol. Ours are shorter.
pub const HANDLE_MAX: u32 = 64;
/// Longest name of a file. Longer ones are understood, so that the answer can say so.
pub const NAME_MAX: usize = 255;
/// Longest content of a symbolic link.
pub const PATH_MAX: u32 = 4095;

/// A file handle as a client sent it: nothing is known of it yet.
pub type Handle<'a> = &'a [u8];

/// A name in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Named<'a> {
    pub dir: Handle<'a>,
    pub name: &'a [u8],
}

impl<'a> Named<'a> {
    fn read(r: &mut Reader<'a>) -> Result<Named<'a>> {
        Ok(Named {
            dir: handle(r)?,
            name: r.opaque(PATH_MAX)?,
        })
    }

    fn write(&self, w: &mut Writer) {
        w.opaque(self.dir).opaque(self.name);
    }
}

/// How far a write has to be durable before it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stability {
    /// Not at all: a COMMIT follows.
    Unstable = 0,
    /// The data, and what is needed to find it.
    Data = 1,
    /// Everything.
    File = 2,
}

/// How a file is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// Also if it is there.
    Unchecked(SetAttributes),
    /// Only if it is not there.
    Guarded(SetAttributes),
    /// Only if it is not there, or was created by this very call: the number tells.
    Exclusive([u8; 8]),
}

/// What is created that is no plain file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Create<'a> {
    File(How),
    Directory(SetAttributes),
    Link {
        to: &'a [u8],
        set: SetAttributes,
    },
    Device {
        block: bool,
        device: (u32, u32),
        set: SetAttributes,
    },
    Socket(SetAttributes),
    Fifo(SetAttributes),
    /// A kind that cannot be created so.
    Other,
}

/// What a call asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Args<'a> {
    Null,
    GetAttr {
        file: Handle<'a>,
    },
    SetAttr {
        file: Handle<'a>,
        set: SetAttributes,
        only_if: Option<Time>,
    },
    Lookup(Named<'a>),
    Access {
        file: Handle<'a>,
        asked: u32,
    },
    ReadLink {
        link: Handle<'a>,
    },
    Read {
        file: Handle<'a>,
        offset: u64,
        count: u32,
    },
    /// `data` is what was sent; `count` is what the call says it is.
    Write {
        file: Handle<'a>,
        offset: u64,
        count: u32,
        stable: Stability,
        data: &'a [u8],
    },
    Create {
        at: Named<'a>,
        what: Create<'a>,
    },
    Remove(Named<'a>),
    RmDir(Named<'a>),
    Rename {
        from: Named<'a>,
        to: Named<'a>,
    },
    Link {
        file: Handle<'a>,
        at: Named<'a>,
    },
    ReadDir {
        dir: Handle<'a>,
        cookie: u64,
        verifier: [u8; 8],
        bytes: u32,
    },
    ReadDirPlus {
        dir: Handle<'a>,
        cookie: u64,
        verifier: [u8; 8],
        names: u32,
        bytes: u32,
    },
    FsStat {
        root: Handle<'a>,
    },
    FsInfo {
        root: Handle<'a>,
    },
    PathConf {
        file: Handle<'a>,
    },
    Commit {
        file: Handle<'a>,
        offset: u64,
        count: u32,
    },
}

fn handle<'a>(r: &mut Reader<'a>) -> Result<Handle<'a>> {
    r.opaque(HANDLE_MAX)
}

impl<'a> Args<'a> {
    /// To write what is durable when it is answered.
    pub fn durable(file: &'a [u8], offset: u64, data: &'a [u8]) -> Args<'a> {
        Args::Write {
            file,
            offset,
            count: data.len() as u32,
            stable: Stability::File,
            data,
        }
    }

    /// Takes a call's arguments off its message.
    pub fn read(procedure: Procedure, r: &mut Reader<'a>) -> Result<Args<'a>> {
        Ok(match procedure {
            Procedure::Null => Args::Null,
            Procedure::GetAttr => Args::GetAttr { file: handle(r)? },
            Procedure::SetAttr => Args::SetAttr {
                file: handle(r)?,
                set: SetAttributes::read(r)?,
                only_if: r.optional(Time::read)?,
            },
            Procedure::Lookup => Args::Lookup(Named::read(r)?),
            Procedure::Access => Args::Access {
                file: handle(r)?,
                asked: r.u32()?,
            },
            Procedure::ReadLink => Args::ReadLink { link: handle(r)? },
            Procedure::Read => Args::Read {
                file: handle(r)?,
                offset: r.u64()?,
                count: r.u32()?,
            },
            Procedure::Write => Args::Write {
                file: handle(r)?,
                offset: r.u64()?,
                count: r.u32()?,
                stable: match r.u32()? {
                    0 => Stability::Unstable,
                    1 => Stability::Data,
                    2 => Stability::File,
                    other => return Err(Malformed::Choice(other)),
                },
                data: r.opaque(super::TRANSFER_MAX)?,
            },
            Procedure::Create => {
                let at = Named::read(r)?;
                let how = match r.u32()? {
                    0 => How::Unchecked(SetAttributes::read(r)?),
                    1 => How::Guarded(SetAttributes::read(r)?),
                    2 => How::Exclusive(r.fixed()?),
                    other => return Err(Malformed::Choice(other)),
                };
                Args::Create {
                    at,
                    what: Create::File(how),
                }
            }
            Procedure::MkDir => Args::Create {
                at: Named::read(r)?,
                what: Create::Directory(SetAttributes::read(r)?),
            },
            Procedure::SymLink => {
                let at = Named::read(r)?;
                let set = SetAttributes::read(r)?;
                Args::Create {
                    at,
                    what: Create::Link {
                        to: r.opaque(PATH_MAX)?,
                        set,
                    },
                }
            }
            Procedure::MkNod => Args::Create {
                at: Named::read(r)?,
                what: special(r)?,
            },
            Procedure::Remove => Args::Remove(Named::read(r)?),
            Procedure::RmDir => Args::RmDir(Named::read(r)?),
            Procedure::Rename => Args::Rename {
                from: Named::read(r)?,
                to: Named::read(r)?,
            },
            Procedure::Link => Args::Link {
                file: handle(r)?,
                at: Named::read(r)?,
            },
            Procedure::ReadDir => Args::ReadDir {
                dir: handle(r)?,
                cookie: r.u64()?,
                verifier: r.fixed()?,
                bytes: r.u32()?,
            },
            Procedure::ReadDirPlus => Args::ReadDirPlus {
                dir: handle(r)?,
                cookie: r.u64()?,
                verifier: r.fixed()?,
                names: r.u32()?,
                bytes: r.u32()?,
            },
            Procedure::FsStat => Args::FsStat { root: handle(r)? },
            Procedure::FsInfo => Args::FsInfo { root: handle(r)? },
            Procedure::PathConf => Args::PathConf { file: handle(r)? },
            Procedure::Commit => Args::Commit {
                file: handle(r)?,
                offset: r.u64()?,
                count: r.u32()?,
            },
        })
    }

    /// The procedure that is asked.
    pub fn procedure(&self) -> Procedure {
        match self {
            Args::Null => Procedure::Null,
            Args::GetAttr { .. } => Procedure::GetAttr,
            Args::SetAttr { .. } => Procedure::SetAttr,
            Args::Lookup(_) => Procedure::Lookup,
            Args::Access { .. } => Procedure::Access,
            Args::ReadLink { .. } => Procedure::ReadLink,
            Args::Read { .. } => Procedure::Read,
            Args::Write { .. } => Procedure::Write,
            Args::Create {
                what: Create::File(_),
                ..
            } => Procedure::Create,
            Args::Create {
                what: Create::Directory(_),
                ..
            } => Procedure::MkDir,
            Args::Create {
                what: Create::Link { .. },
                ..
            } => Procedure::SymLink,
            Args::Create { .. } => Procedure::MkNod,
            Args::Remove(_) => Procedure::Remove,
            Args::RmDir(_) => Procedure::RmDir,
            Args::Rename { .. } => Procedure::Rename,
            Args::Link { .. } => Procedure::Link,
            Args::ReadDir { .. } => Procedure::ReadDir,
            Args::ReadDirPlus { .. } => Procedure::ReadDirPlus,
            Args::FsStat { .. } => Procedure::FsStat,
            Args::FsInfo { .. } => Procedure::FsInfo,
            Args::PathConf { .. } => Procedure::PathConf,
            Args::Commit { .. } => Procedure::Commit,
        }
    }

    /// The file or directory it is about, and the second one of those that have two.
    pub fn handles(&self) -> (Handle<'a>, Option<Handle<'a>>) {
        match *self {
            Args::Null => (&[], None),
            Args::GetAttr { file: handle }
            | Args::SetAttr { file: handle, .. }
            | Args::Access { file: handle, .. }
            | Args::ReadLink { link: handle }
            | Args::Read { file: handle, .. }
            | Args::Write { file: handle, .. }
            | Args::ReadDir { dir: handle, .. }
            | Args::ReadDirPlus { dir: handle, .. }
            | Args::FsStat { root: handle }
            | Args::FsInfo { root: handle }
            | Args::PathConf { file: handle }
            | Args::Commit { file: handle, .. } => (handle, None),
            Args::Lookup(at) | Args::Create { at, .. } | Args::Remove(at) | Args::RmDir(at) => {
                (at.dir, None)
            }
            Args::Rename { from, to } => (from.dir, Some(to.dir)),
            Args::Link { file, at } => (at.dir, Some(file)),
        }
    }

    /// What a change is about: names in directories, of which the first is the one that its outcome depends on, or a file by its handle and no
    /// name.
    pub fn about(&self) -> [Option<(Handle<'a>, &'a [u8])>; 2] {
        let named = |at: Named<'a>| Some((at.dir, at.name));
        match *self {
            Args::Create { at, .. } | Args::Remove(at) | Args::RmDir(at) => [named(at), None],
            Args::Rename { from, to } => [named(from), named(to)],
            Args::Link { file, at } => [named(at), Some((file, &[]))],
            Args::SetAttr { file, .. } | Args::Write { file, .. } => [Some((file, &[])), None],
            _ => [None, None],
        }
    }

    /// True if a second time has another outcome than the first: the name is there, or it is gone.
    pub fn is_done_once(&self) -> bool {
        match self {
            Args::Create { what, .. } => {
                !matches!(what, Create::File(How::Unchecked(_) | How::Exclusive(_)))
            }
            Args::SetAttr { only_if, .. } => only_if.is_some(),
            Args::Remove(_) | Args::RmDir(_) | Args::Rename { .. } | Args::Link { .. } => true,
            _ => false,
        }
    }

    /// Writes them, as a client does.
    pub fn write(&self, w: &mut Writer) {
        match *self {
            Args::Null => {}
            Args::GetAttr { file: handle }
            | Args::ReadLink { link: handle }
            | Args::FsStat { root: handle }
            | Args::FsInfo { root: handle }
            | Args::PathConf { file: handle } => {
                w.opaque(handle);
            }
            Args::SetAttr { file, set, only_if } => {
                w.opaque(file);
                set.write(w);
                w.optional(only_if, |w, time| {
                    w.u32(time.seconds).u32(time.nanos);
                });
            }
            Args::Lookup(at) | Args::Remove(at) | Args::RmDir(at) => at.write(w),
            Args::Access { file, asked } => {
                w.opaque(file).u32(asked);
            }
            Args::Read {
                file,
                offset,
                count,
            }
            | Args::Commit {
                file,
                offset,
                count,
            } => {
                w.opaque(file).u64(offset).u32(count);
            }
            Args::Write {
                file,
                offset,
                count,
                stable,
                data,
            } => {
                w.opaque(file)
                    .u64(offset)
                    .u32(count)
                    .u32(stable as u32)
                    .opaque(data);
            }
            Args::Create { at, what } => {
                at.write(w);
                what.write(w);
            }
            Args::Rename { from, to } => {
                from.write(w);
                to.write(w);
            }
            Args::Link { file, at } => {
                w.opaque(file);
                at.write(w);
            }
            Args::ReadDir {
                dir,
                cookie,
                verifier,
                bytes,
            } => {
                w.opaque(dir).u64(cookie).fixed(&verifier).u32(bytes);
            }
            Args::ReadDirPlus {
                dir,
                cookie,
                verifier,
                names,
                bytes,
            } => {
                w.opaque(dir)
                    .u64(cookie)
                    .fixed(&verifier)
                    .u32(names)
                    .u32(bytes);
            }
        }
    }
}

fn special<'a>(r: &mut Reader<'a>) -> Result<Create<'a>> {
    const BLOCK: u32 = Kind::Block as u32;
    const CHARACTER: u32 = Kind::Character as u32;
    const SOCKET: u32 = Kind::Socket as u32;
    const FIFO: u32 = Kind::Fifo as u32;
    Ok(match r.u32()? {
        kind @ (BLOCK | CHARACTER) => {
            let set = SetAttributes::read(r)?;
            Create::Device {
                block: kind == BLOCK,
                device: (r.u32()?, r.u32()?),
                set,
            }
        }
        SOCKET => Create::Socket(SetAttributes::read(r)?),
        FIFO => Create::Fifo(SetAttributes::read(r)?),
        1..=7 => Create::Other,
        other => return Err(Malformed::Choice(other)),
    })
}

impl Create<'_> {
    fn write(&self, w: &mut Writer) {
        match *self {
            Create::File(How::Unchecked(set)) => set.write(w.u32(0)),
            Create::File(How::Guarded(set)) => set.write(w.u32(1)),
            Create::File(How::Exclusive(verifier)) => {
                w.u32(2).fixed(&verifier);
            }
            Create::Directory(set) => set.write(w),
            Create::Link { to, set } => {
                set.write(w);
                w.opaque(to);
            }
            Create::Device { block, device, set } => {
                w.u32(if block { Kind::Block } else { Kind::Character } as u32);
                set.write(w);
                w.u32(device.0).u32(device.1);
            }
            Create::Socket(set) => set.write(w.u32(Kind::Socket as u32)),
            Create::Fifo(set) => set.write(w.u32(Kind::Fifo as u32)),
            Create::Other => {
                w.u32(Kind::Regular as u32);
            }
        }
    }
}
