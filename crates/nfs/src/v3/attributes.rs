//! What is known of a file, and what a client wants changed of it.

use crate::xdr::{Malformed, Reader, Result, Writer};

/// What a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Kind {
    Regular = 1,
    Directory = 2,
    Block = 3,
    Character = 4,
    Link = 5,
    Socket = 6,
    Fifo = 7,
}

/// A point in time, since 1970.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time {
    /// Seconds.
    pub seconds: u32,
    /// And nanoseconds.
    pub nanos: u32,
}

impl Time {
    pub(crate) fn read(r: &mut Reader<'_>) -> Result<Time> {
        Ok(Time {
            seconds: r.u32()?,
            nanos: r.u32()?,
        })
    }

    fn write(self, w: &mut Writer) {
        w.u32(self.seconds).u32(self.nanos);
    }
}

/// What is known of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// What it is.
    pub kind: Kind,
    /// Who may do what with it: the lower twelve bits of a mode.
    pub mode: u32,
    /// Names it has.
    pub links: u32,
    /// Its owner.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Bytes it seems to have.
    pub size: u64,
    /// Bytes it takes up.
    pub used: u64,
    /// Major and minor number of a device.
    pub device: (u32, u32),
    /// Which tree it belongs to.
    pub tree: u64,
    /// Its number in the tree, which it keeps as long as it lives.
    pub id: u64,
    /// When it was last read.
    pub accessed: Time,
    /// When its content last changed.
    pub modified: Time,
    /// When anything about it last changed.
    pub changed: Time,
}

impl Attributes {
    /// What tells a later change.
    pub fn before(&self) -> Before {
        Before {
            size: self.size,
            modified: self.modified,
            changed: self.changed,
        }
    }
}

/// What a file looked like before a change, in as much as it shows that nobody else changed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Before {
    /// Bytes it had.
    pub size: u64,
    /// When its content last changed.
    pub modified: Time,
    /// When anything about it last changed.
    pub changed: Time,
}

/// A file before and after a change ("weak cache consistency"). A client that knows the file as it was before
/// may keep what it has cached. So `before` must be left out where others may have changed the
/// file in between: the client would take their change for its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wcc {
    /// Just before.
    pub before: Option<Before>,
    /// Just after.
    pub after: Option<Attributes>,
}

/// Writes a file's attributes.
pub fn put_attributes(w: &mut Writer, a: &Attributes) {
    w.u32(a.kind as u32)
        .u32(a.mode)
        .u32(a.links)
        .u32(a.uid)
        .u32(a.gid);
    w.u64(a.size)
        .u64(a.used)
        .u32(a.device.0)
        .u32(a.device.1)
        .u64(a.tree)
        .u64(a.id);
    a.accessed.write(w);
    a.modified.write(w);
    a.changed.write(w);
}

/// Writes attributes that may be missing.
pub fn put_optional(w: &mut Writer, attributes: Option<&Attributes>) {
    w.optional(attributes, put_attributes);
}

/// Writes a file before and after a change.
pub fn put_wcc(w: &mut Writer, wcc: &Wcc) {
    w.optional(wcc.before, |w, before| {
        w.u64(before.size);
        before.modified.write(w);
        before.changed.write(w);
    });
    put_optional(w, wcc.after.as_ref());
}

/// What a time is to become.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SetTime {
    /// It stays.
    #[default]
    Keep,
    /// The server's present.
    Now,
    /// What the client says.
    To(Time),
}

/// What a client wants changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct SetAttributes {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub accessed: SetTime,
    pub modified: SetTime,
}

impl SetAttributes {
    pub(crate) fn read(r: &mut Reader<'_>) -> Result<SetAttributes> {
        Ok(SetAttributes {
            mode: r.optional(Reader::u32)?.map(|mode| mode & 0o7777),
            uid: r.optional(Reader::u32)?,
            gid: r.optional(Reader::u32)?,
            size: r.optional(Reader::u64)?,
            accessed: set_time(r)?,
            modified: set_time(r)?,
        })
    }

    /// Writes them, as a client does.
    pub fn write(&self, w: &mut Writer) {
        let number = |w: &mut Writer, n: u32| {
            w.u32(n);
        };
        w.optional(self.mode, number)
            .optional(self.uid, number)
            .optional(self.gid, number);
        w.optional(self.size, |w, size| {
            w.u64(size);
        });
        for time in [self.accessed, self.modified] {
            match time {
                SetTime::Keep => {
                    w.u32(0);
                }
                SetTime::Now => {
                    w.u32(1);
                }
                SetTime::To(time) => {
                    w.u32(2);
                    time.write(w);
                }
            }
        }
    }
}

fn set_time(r: &mut Reader<'_>) -> Result<SetTime> {
    Ok(match r.u32()? {
        0 => SetTime::Keep,
        1 => SetTime::Now,
        2 => SetTime::To(Time::read(r)?),
        other => return Err(Malformed::Choice(other)),
    })
}
