//! Carries a call out and writes its answer.

use std::sync::Arc;

use hearth_io::BLOCK;

use super::flight::Flight;
use super::link::Answer;
use super::service::Export;
use crate::access::{Rights, Want, Who};
use crate::handle::Key;
use crate::message::Message;
use crate::rpc;
use crate::tree::{AtHand, Changed, Done, Entry, Found, Outcome, Payload, Read, Write, Written};
use crate::v3::{
    Args, Attributes, Kind, LISTING_MAX, NAME_MAX, Named, Procedure, Status, TRANSFER_MAX, Wcc,
    put_attributes, put_optional, put_wcc, refusal,
};
use crate::xdr::{Reader, Writer, padding};

/// A call's message, whose arguments were understood once.
pub(super) struct Whole {
    pub message: Message,
    /// Where its arguments begin.
    pub args_at: usize,
    /// And where they end.
    pub data_end: usize,
    pub procedure: Procedure,
}

/// Memory that a call and its answer may take, beyond the call's message.
pub(super) fn expected(args: &Args<'_>) -> usize {
    let own = size_of::<Flight>() + size_of::<Whole>();
    own + match args {
        // It lies in whole blocks.
        Args::Read { count, .. } => (*count).min(TRANSFER_MAX) as usize + 2 * BLOCK as usize,
        Args::ReadDir { bytes, .. } | Args::ReadDirPlus { bytes, .. } => {
            (*bytes).min(LISTING_MAX) as usize
        }
        _ => 512,
    }
}

/// A name that can be one.
pub(super) fn check_name(name: &[u8]) -> Outcome<()> {
    if name.len() > NAME_MAX {
        return Err(Status::NameTooLong);
    }
    if name.is_empty() || name.contains(&b'/') || name.contains(&0) {
        return Err(Status::Inval);
    }
    Ok(())
}

/// A name that can be made or removed.
fn plain_name(name: &[u8], dots: Status) -> Outcome<()> {
    check_name(name)?;
    if name == b"." || name == b".." {
        Err(dots)
    } else {
        Ok(())
    }
}

/// What is on the way from arguments to an answer.
pub(super) struct Cx<'a> {
    pub export: &'a Export,
    pub who: Who,
    rights: Rights,
    pub xid: u32,
    procedure: Procedure,
}

/// Does what a call asks, and ends its flight, at once or later.
pub(super) fn carry_out(
    export: &Export,
    who: Who,
    rights: Rights,
    whole: Whole,
    flight: &Arc<Flight>,
    at_hand: Option<Box<dyn AtHand>>,
) {
    let cx = Cx::new(export, who, rights, flight.about.xid, whole.procedure);
    let mut r = Reader::new(&whole.message[whole.args_at..]);
    let Ok(args) = Args::read(whole.procedure, &mut r) else {
        return flight.finish(Answer::from(rpc::garbage(cx.xid)));
    };
    let done = match args {
        Args::Read {
            file,
            offset,
            count,
        } => return cx.read(file, offset, count, flight, at_hand),
        Args::Write {
            file,
            offset,
            count,
            stable,
            data,
        } => {
            let Ok(key) = cx.key(file) else {
                return flight.finish(cx.refuse(Status::BadHandle));
            };
            let len = data.len();
            let start = whole.data_end - padding(len) - len;
            if count as usize != len {
                return flight.finish(cx.refuse(Status::Inval));
            }
            if offset
                .checked_add(len as u64)
                .is_none_or(|end| end > i64::MAX as u64)
            {
                return flight.finish(cx.refuse(Status::FBig));
            }
            let Some(data) = Payload::new(whole.message, start, len) else {
                return flight.finish(cx.refuse(Status::ServerFault));
            };
            return cx.write(
                &key,
                Write {
                    offset,
                    data,
                    stable,
                },
                flight,
                at_hand,
            );
        }
        Args::Commit {
            file,
            offset,
            count,
        } => return cx.commit(file, offset, count, flight),
        Args::Null => Ok(rpc::success(cx.xid)),
        Args::GetAttr { file } => cx.get_attr(file),
        Args::Lookup(at) => cx.lookup(&at),
        Args::Access { file, asked } => cx.access(file, asked),
        Args::ReadLink { link } => cx.read_link(link),
        Args::SetAttr { .. }
        | Args::Create { .. }
        | Args::Remove(_)
        | Args::RmDir(_)
        | Args::Rename { .. }
        | Args::Link { .. } => cx.noted(
            &args,
            flight.client(),
            &whole.message,
            Some(flight.as_ref()),
        ),
        Args::ReadDir {
            dir, cookie, bytes, ..
        } => cx.list(dir, cookie, None, bytes),
        Args::ReadDirPlus {
            dir,
            cookie,
            names,
            bytes,
            ..
        } => cx.list(dir, cookie, Some(names), bytes),
        Args::FsStat { root } => cx.fs_stat(root),
        Args::FsInfo { root } => cx.fs_info(root),
        Args::PathConf { file } => cx.path_conf(file),
    };
    let answer = done.map_or_else(|status| cx.refuse(status), Answer::from);
    flight.finish(answer);
}

pub(super) type Answered = Outcome<Writer>;

impl<'a> Cx<'a> {
    pub(super) fn new(
        export: &'a Export,
        who: Who,
        rights: Rights,
        xid: u32,
        procedure: Procedure,
    ) -> Cx<'a> {
        Cx {
            export,
            who,
            rights,
            xid,
            procedure,
        }
    }

    /// Changes names or attributes.
    pub(super) fn change(&self, args: &Args<'_>) -> Answered {
        let tree = &self.export.tree;
        match args {
            Args::SetAttr { file, set, only_if } => {
                let key = self.key(file)?;
                Ok(self.changed(&tree.set_attributes(&self.who, &key, set, *only_if)))
            }
            Args::Create { at, what } => {
                let dir = self.named(at, Status::Exist)?;
                Ok(self.created(&tree.create(&self.who, &dir, at.name, what)))
            }
            Args::Remove(at) | Args::RmDir(at) => {
                let dir = self.named(at, Status::Inval)?;
                let directory = matches!(args, Args::RmDir(_));
                Ok(self.changed(&tree.remove(&self.who, &dir, at.name, directory)))
            }
            Args::Rename { from, to } => self.rename(from, to),
            Args::Link { file, at } => self.link(file, at),
            _ => Err(Status::ServerFault),
        }
    }

    pub(super) fn key(&self, handle: &[u8]) -> Outcome<Key> {
        self.export.sealer.open(handle).ok_or(Status::BadHandle)
    }

    pub(super) fn named(&self, at: &Named<'_>, dots: Status) -> Outcome<Key> {
        plain_name(at.name, dots)?;
        self.key(at.dir)
    }

    fn refuse(&self, status: Status) -> Answer {
        Answer::from(refusal(self.xid, self.procedure, status))
    }

    pub(super) fn ok(&self) -> Writer {
        let mut w = rpc::success(self.xid);
        w.u32(0);
        w
    }

    /// The beginning of an answer to something that may have failed.
    fn begin<T>(&self, outcome: &Outcome<T>) -> Writer {
        let mut w = rpc::success(self.xid);
        w.u32(outcome.as_ref().err().map_or(0, |status| *status as u32));
        w
    }

    fn after(&self, key: &Key) -> Option<Attributes> {
        self.export.tree.attributes(key).ok()
    }

    fn get_attr(&self, file: &[u8]) -> Answered {
        let attributes = self.export.tree.attributes(&self.key(file)?)?;
        let mut w = self.ok();
        put_attributes(&mut w, &attributes);
        Ok(w)
    }

    /// The answer to a change of which nothing but the change is told.
    pub(super) fn changed(&self, changed: &Changed<()>) -> Writer {
        let mut w = self.begin(&changed.outcome);
        put_wcc(&mut w, &changed.wcc);
        w
    }

    fn put_found(&self, w: &mut Writer, found: &Found) {
        w.bool(true).opaque(&self.export.sealer.seal(&found.key));
        put_optional(w, Some(&found.attributes));
    }

    pub(super) fn created(&self, made: &Changed<Found>) -> Writer {
        let mut w = self.begin(&made.outcome);
        if let Ok(found) = &made.outcome {
            self.put_found(&mut w, found);
        }
        put_wcc(&mut w, &made.wcc);
        w
    }

    fn lookup(&self, at: &Named<'_>) -> Answered {
        check_name(at.name)?;
        let dir = self.key(at.dir)?;
        let found = self.export.tree.lookup(&self.who, &dir, at.name);
        let mut w = self.begin(&found);
        if let Ok(found) = &found {
            w.opaque(&self.export.sealer.seal(&found.key));
            put_optional(&mut w, Some(&found.attributes));
        }
        // Told also where there is no such name: clients remember that, until the directory changes.
        put_optional(&mut w, self.after(&dir).as_ref());
        Ok(w)
    }

    fn access(&self, file: &[u8], asked: u32) -> Answered {
        let attributes = self.export.tree.attributes(&self.key(file)?)?;
        let mut w = self.ok();
        put_optional(&mut w, Some(&attributes));
        w.u32(asked & granted(&attributes, &self.who, self.rights));
        Ok(w)
    }

    fn read_link(&self, link: &[u8]) -> Answered {
        let key = self.key(link)?;
        let to = self.export.tree.read_link(&self.who, &key)?;
        let mut w = self.ok();
        put_optional(&mut w, self.after(&key).as_ref());
        w.opaque(&to);
        Ok(w)
    }

    fn read(
        &self,
        file: &[u8],
        offset: u64,
        count: u32,
        flight: &Arc<Flight>,
        at_hand: Option<Box<dyn AtHand>>,
    ) {
        let Ok(key) = self.key(file) else {
            return flight.finish(self.refuse(Status::BadHandle));
        };
        let (xid, procedure) = (self.xid, self.procedure);
        let flight = Arc::clone(flight);
        let tell = move |read: Outcome<Read>| {
            flight.finish(match read {
                Err(status) => Answer::from(refusal(xid, procedure, status)),
                Ok(read) => {
                    let mut w = rpc::success(xid);
                    w.u32(0);
                    put_optional(&mut w, read.attributes.as_ref());
                    let len = (*read.data).as_ref().len() as u32;
                    w.u32(len).bool(read.end).u32(len);
                    Answer::with_data(w, read.data)
                }
            });
        };
        let done = Done::new(tell, || Err(Status::ServerFault));
        let (who, count) = (&self.who, count.min(TRANSFER_MAX));
        match at_hand {
            Some(at_hand) => at_hand.read(who, offset, count, done),
            None => self.export.tree.read(who, &key, offset, count, done),
        }
    }

    fn write(
        &self,
        key: &Key,
        write: Write,
        flight: &Arc<Flight>,
        at_hand: Option<Box<dyn AtHand>>,
    ) {
        let xid = self.xid;
        let flight = Arc::clone(flight);
        let tell = move |changed: Changed<Written>| {
            let mut w = rpc::success(xid);
            w.u32(
                changed
                    .outcome
                    .as_ref()
                    .err()
                    .map_or(0, |status| *status as u32),
            );
            put_wcc(&mut w, &changed.wcc);
            if let Ok(written) = changed.outcome {
                w.u32(written.count)
                    .u32(written.stable as u32)
                    .fixed(&written.verifier);
            }
            flight.finish(Answer::from(w));
        };
        let done = Done::new(tell, || Changed {
            outcome: Err(Status::ServerFault),
            wcc: Wcc::default(),
        });
        match at_hand {
            Some(at_hand) => at_hand.write(&self.who, write, done),
            None => self.export.tree.write(&self.who, key, write, done),
        }
    }

    fn commit(&self, file: &[u8], offset: u64, count: u32, flight: &Arc<Flight>) {
        let Ok(key) = self.key(file) else {
            return flight.finish(self.refuse(Status::BadHandle));
        };
        let xid = self.xid;
        let flight = Arc::clone(flight);
        let tell = move |changed: Changed<[u8; 8]>| {
            let mut w = rpc::success(xid);
            w.u32(
                changed
                    .outcome
                    .as_ref()
                    .err()
                    .map_or(0, |status| *status as u32),
            );
            put_wcc(&mut w, &changed.wcc);
            if let Ok(verifier) = changed.outcome {
                w.fixed(&verifier);
            }
            flight.finish(Answer::from(w));
        };
        let done = Done::new(tell, || Changed {
            outcome: Err(Status::ServerFault),
            wcc: Wcc::default(),
        });
        self.export
            .tree
            .commit(&self.who, &key, offset, count, done);
    }

    fn rename(&self, from: &Named<'_>, to: &Named<'_>) -> Answered {
        let from_dir = self.named(from, Status::Inval)?;
        let to_dir = self.named(to, Status::Inval)?;
        let tree = &self.export.tree;
        let (outcome, a, b) = tree.rename(&self.who, (&from_dir, from.name), (&to_dir, to.name));
        let mut w = self.begin(&outcome);
        put_wcc(&mut w, &a);
        put_wcc(&mut w, &b);
        Ok(w)
    }

    fn link(&self, file: &[u8], at: &Named<'_>) -> Answered {
        let key = self.key(file)?;
        let dir = self.named(at, Status::Exist)?;
        let linked = self.export.tree.link(&self.who, &key, &dir, at.name);
        let mut w = self.begin(&linked.outcome);
        put_optional(&mut w, linked.outcome.as_ref().ok());
        put_wcc(&mut w, &linked.wcc);
        Ok(w)
    }

    /// Lists a directory. With `names` (how many bytes names and numbers alone may take), files are told of as well.
    fn list(&self, dir: &[u8], cookie: u64, names: Option<u32>, bytes: u32) -> Answered {
        /// That there are no more entries, and whether the directory ends.
        const TAIL: usize = 8;
        let key = self.key(dir)?;
        let attributes = self.after(&key);
        let mut w = self.ok();
        put_optional(&mut w, attributes.as_ref());
        // What cookies are valid for: they stay valid as long as their directory lives.
        w.fixed(&[0; 8]);
        let head = rpc::success(self.xid).len();
        let most = head + bytes.min(LISTING_MAX) as usize;
        let names_most = names.unwrap_or(u32::MAX).min(LISTING_MAX) as usize;
        let (mut names_so_far, mut count) = (0, 0u32);
        let mut take = |entry: Entry<'_>| {
            let before = w.len();
            w.bool(true)
                .u64(entry.id)
                .opaque(entry.name)
                .u64(entry.cookie);
            if names.is_some() {
                put_optional(&mut w, entry.found.as_ref().map(|f| &f.attributes));
                w.optional(entry.found.as_ref(), |w, found| {
                    w.opaque(&self.export.sealer.seal(&found.key));
                });
            }
            names_so_far += 20 + entry.name.len() + padding(entry.name.len());
            // One has to fit, whatever was asked of names alone, or the listing never ends.
            if w.len() + TAIL > most || (count > 0 && names_so_far > names_most) {
                w.truncate(before);
                return false;
            }
            count += 1;
            true
        };
        let end = self
            .export
            .tree
            .list(&self.who, &key, cookie, names.is_some(), &mut take)?;
        if count == 0 && !end {
            return Err(Status::TooSmall);
        }
        w.bool(false).bool(end);
        Ok(w)
    }

    fn fs_stat(&self, root: &[u8]) -> Answered {
        let key = self.key(root)?;
        let room = self.export.tree.room()?;
        let mut w = self.ok();
        put_optional(&mut w, self.after(&key).as_ref());
        w.u64(room.bytes)
            .u64(room.bytes_free)
            .u64(room.bytes_available);
        w.u64(room.files)
            .u64(room.files_free)
            .u64(room.files_available);
        // For how long this holds: anybody may write meanwhile.
        w.u32(0);
        Ok(w)
    }

    fn fs_info(&self, root: &[u8]) -> Answered {
        /// Unit in which transfers are best a multiple.
        const MULTIPLE: u32 = 4096;
        /// A listing that fits in few packets.
        const LISTING: u32 = 64 << 10;
        /// Hard and symbolic links; the same everywhere; times can be set.
        const PROPERTIES: u32 = 0x1 | 0x2 | 0x8 | 0x10;
        let key = self.key(root)?;
        let attributes = self.export.tree.attributes(&key)?;
        let mut w = self.ok();
        put_optional(&mut w, Some(&attributes));
        for _reading_and_writing in 0..2 {
            w.u32(TRANSFER_MAX).u32(TRANSFER_MAX).u32(MULTIPLE);
        }
        w.u32(LISTING)
            .u64(i64::MAX as u64)
            .u32(0)
            .u32(1)
            .u32(PROPERTIES);
        Ok(w)
    }

    fn path_conf(&self, file: &[u8]) -> Answered {
        let attributes = self.export.tree.attributes(&self.key(file)?)?;
        let mut w = self.ok();
        put_optional(&mut w, Some(&attributes));
        // Links; a name's length; longer ones are refused, owners are given by root only, case
        // matters and is kept.
        w.u32(32000)
            .u32(NAME_MAX as u32)
            .bool(true)
            .bool(true)
            .bool(false)
            .bool(true);
        Ok(w)
    }
}

/// What somebody may do with a file, in the protocol's bits.
fn granted(attributes: &Attributes, who: &Who, rights: Rights) -> u32 {
    const READ: u32 = 1;
    const LOOKUP: u32 = 2;
    const MODIFY: u32 = 4;
    const EXTEND: u32 = 8;
    const DELETE: u32 = 16;
    const EXECUTE: u32 = 32;
    let directory = attributes.kind == Kind::Directory;
    let mut bits = 0;
    if who.may(attributes, Want::Read as u32) {
        bits |= READ;
    }
    if who.may(attributes, Want::Search as u32) {
        bits |= if directory { LOOKUP } else { EXECUTE };
    }
    if rights.write && who.may(attributes, Want::Write as u32) {
        bits |= MODIFY | EXTEND;
        if directory {
            bits |= DELETE;
        }
    }
    bits
}
