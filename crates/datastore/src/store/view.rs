//! What clients ask for, file by file: of the directory, or of the disk that a file is.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use hearth_engine::api::{DISK_MAX, ReqError, ReqOp, Request};
use hearth_io::{BLOCK, Buf, BufSlice, Shelf};
use hearth_nfs::access::Who;
use hearth_nfs::handle::Key;
use hearth_nfs::local::may_use_data;
use hearth_nfs::tree::{
    AtHand, Changed, Data, Done, Entry, Found, Memory, Outcome, Place, Read, Room, Tree, Write,
    Written,
};
use hearth_nfs::v3::{
    Attributes, Create, How, Kind, SetAttributes, SetTime, Stability, Status, Time, Wcc,
};

use hearth_trees::large;

use super::held::Held;
use super::{Inner, lock, used};
use crate::file::{Cached, Using};

/// What is known of a file that is a disk now.
fn told(cached: &Cached) -> Attributes {
    let mut known = lock(&cached.known).0;
    overlay(&mut known, cached);
    known
}

/// Bytes of the blocks that a range touches.
fn whole_blocks(from: u64, end: u64) -> u64 {
    end.div_ceil(BLOCK).saturating_sub(from / BLOCK) * BLOCK
}

fn overlay(attributes: &mut Attributes, cached: &Cached) {
    attributes.size = cached.origin.len();
    attributes.used = used(attributes, cached.written.load(Ordering::SeqCst));
    (attributes.modified, attributes.changed) = cached.origin.times();
}

fn status(error: ReqError) -> Status {
    match error {
        ReqError::NoSpace => Status::NoSpace,
        ReqError::Invalid => Status::Inval,
        ReqError::ReadOnly => Status::RoFs,
        // Whoever asks again finds a daemon that is back.
        ReqError::NoDisk | ReqError::Shutdown => Status::JukeBox,
        ReqError::Io => Status::Io,
    }
}

/// Bytes of a file, in the memory they were read into.
struct Piece {
    buf: Option<BufSlice>,
    start: usize,
    len: usize,
    shelf: Arc<Shelf>,
}

impl Drop for Piece {
    fn drop(&mut self) {
        if let Some(buf) = self.buf.take() {
            self.shelf.put(buf.into_buf());
        }
    }
}

impl Memory for Piece {
    fn allocated(&self) -> usize {
        self.buf.as_ref().map_or(0, BufSlice::allocated)
    }
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        let bytes = self.buf.as_ref().map_or(&[][..], BufSlice::bytes);
        bytes
            .get(self.start..self.start + self.len)
            .unwrap_or_default()
    }
}

/// The tree, as the server has it.
pub(super) struct View(pub(super) Arc<Inner>);

fn failed<T>(status: Status) -> Changed<T> {
    Changed {
        outcome: Err(status),
        wcc: Wcc::default(),
    }
}

impl Inner {
    /// Tells of a file as its disk has it.
    fn told_of(&self, key: &Key, attributes: &mut Attributes) {
        if attributes.kind != Kind::Regular {
            return;
        }
        let file = lock(&self.files).get(key).cloned();
        if let Some(cached) = file.and_then(|file| file.cached()) {
            let seen = lock(&cached.known).0.used;
            attributes.used = attributes.used.max(seen);
            overlay(attributes, &cached);
        }
    }

    /// A name of a file came or went. What is known of a file in use is asked of it anew only now and then.
    fn note_links(&self, key: &Key, links: u32) {
        let file = lock(&self.files).get(key).cloned();
        if let Some(cached) = file.and_then(|file| file.cached()) {
            lock(&cached.known).0.links = links;
        }
    }

    /// What is known of a file that may be opened with this answer: so it is looked at, whenever that was done last. `plain` is what the
    /// directory says, should it be no disk now.
    fn opened(
        &self,
        key: &Key,
        plain: impl FnOnce() -> Outcome<Attributes>,
    ) -> Outcome<Attributes> {
        let open = lock(&self.files).get(key).cloned();
        let Some(cached) = open.and_then(|open| open.cached()) else {
            if !self.is_owed(key) {
                return plain();
            }
            // What waits on flash since before a restart: its times are known once it is opened.
            drop(self.begin(key)?);
            let mut attributes = self.dir.attributes(key)?;
            self.told_of(key, &mut attributes);
            return Ok(attributes);
        };
        // Somebody else's change is not waited for here: a heartbeat must not wait for requests in flight.
        if self.look_now(&cached)? {
            return Ok(told(&cached));
        }
        drop(cached);
        let (using, cached) = self.begin(key)?;
        let attributes = cached.map(|cached| told(&cached));
        drop(using);
        attributes.map_or_else(|| self.dir.attributes(key), Ok)
    }

    /// The directory lacks something of a file.
    fn is_owed(&self, key: &Key) -> bool {
        self.is_known(key)
            .is_some_and(|disk| self.disks.owed(disk) > 0)
    }

    /// The same of a file in a listing, where nobody may be waited for: nothing, if that would have to be. Clients ask again then.
    fn listed(&self, mut found: Found) -> Option<Found> {
        let open = lock(&self.files).get(&found.key).cloned();
        match open.and_then(|open| open.cached()) {
            Some(cached) if self.look_now(&cached) == Ok(true) => found.attributes = told(&cached),
            None if !self.is_owed(&found.key) => {}
            _ => return None,
        }
        Some(found)
    }

    fn next_turn(&self) -> usize {
        self.turn.fetch_add(1, Ordering::Relaxed)
    }

    /// True if nothing has to be done for a write but to write: the file is long enough, and there is room.
    fn is_prepared(&self, cached: &Cached, mode: u32, place: Place) -> bool {
        let durable = place.stable != Stability::Unstable;
        let Some(end) = place.offset.checked_add(place.len) else {
            return false;
        };
        mode & 0o6000 == 0
            && !cached.origin.is_read_only()
            && cached.origin.reaches(end, durable)
            && (!cached.origin.is_sparse()
                || self.budget.take_known(whole_blocks(place.offset, end)))
    }

    /// Sees to it that a write may be done, and that the file is long enough for it.
    fn prepare_write(&self, who: &Who, cached: &Cached, write: &Write) -> Outcome<()> {
        let known = told(cached);
        may_use_data(who, &known, true)?;
        if cached.origin.is_read_only() {
            // Nothing is answered that could never be written back.
            cached.origin.check_writable()?;
        }
        if known.mode & 0o6000 != 0 && !who.is_root() {
            // A file that is written by somebody else than root runs as nobody's any more.
            cached.origin.file().set_mode(known.mode & !0o6000)?;
            lock(&cached.known).0.mode = known.mode & !0o6000;
        }
        let len = write.data.as_ref().len() as u64;
        let end = write.offset.checked_add(len).filter(|end| *end <= DISK_MAX);
        let end = end.ok_or(Status::FBig)?;
        let needs_place = cached.origin.is_sparse() || end > cached.origin.len();
        if needs_place && !cached.origin.is_scratch() {
            // A full file system takes what is written over, as it would without a cache.
            let whole = whole_blocks(write.offset, end);
            if !self.has_room(whole) && !cached.origin.has_place(write.offset, end) {
                return Err(Status::NoSpace);
            }
        }
        let durable = write.stable != Stability::Unstable;
        if len > 0 && !cached.origin.reaches(end, durable) {
            // Before the data: what is answered never lies behind the end.
            large::reach(&Held::new(self, cached), end, durable, DISK_MAX)?;
        }
        Ok(())
    }
}

impl View {
    fn read_cached(
        &self,
        who: &Who,
        using: Using,
        cached: Arc<Cached>,
        offset: u64,
        count: u32,
        done: Done<Outcome<Read>>,
    ) {
        let attributes = told(&cached);
        if let Err(status) = may_use_data(who, &attributes, false) {
            return done.tell(Err(status));
        }
        let size = cached.origin.len();
        let len = size.saturating_sub(offset).min(u64::from(count));
        let end = offset.saturating_add(len) >= size;
        if len == 0 {
            return done.tell(Ok(Read {
                data: Box::new(Vec::new()),
                end: true,
                attributes: Some(attributes),
            }));
        }
        let shelf = self.0.shelf.clone();
        // What somebody else had is written over by what is read, or not shown.
        let buf = shelf.take(Request::buffer_len(offset, len) as usize);
        let request = Request::read(0, cached.disk, offset, len, &buf, 0);
        // The request's is the last handle but those of the device.
        drop(buf);
        let answer = move |result: Result<(), ReqError>, buf: Option<BufSlice>| {
            let read = result.map_err(status).map(|()| Read {
                data: Box::new(Piece {
                    buf,
                    start: (offset % BLOCK) as usize,
                    len: len as usize,
                    shelf,
                }) as Data,
                end,
                attributes: Some(attributes),
            });
            drop(using);
            done.tell(read);
        };
        self.0
            .port
            .ask(self.0.next_turn(), request, Box::new(answer));
    }

    fn write_cached(
        &self,
        who: &Who,
        using: Using,
        cached: Arc<Cached>,
        write: Write,
        done: Done<Changed<Written>>,
    ) {
        match self.0.prepare_write(who, &cached, &write) {
            Err(status) => done.tell(failed(status)),
            Ok(()) => self.ask_to_write(using, cached, write, done),
        }
    }

    /// Hands on a write for which everything is prepared.
    fn ask_to_write(
        &self,
        using: Using,
        cached: Arc<Cached>,
        write: Write,
        done: Done<Changed<Written>>,
    ) {
        let inner = &self.0;
        let data = write.data;
        let (offset, len) = (write.offset, data.as_ref().len() as u64);
        let verifier = inner.dir.verifier();
        let stable = write.stable;
        let tell = move |cached: &Cached, result: Result<(), ReqError>| {
            let outcome = result.map_err(status).map(|()| {
                let blocks = whole_blocks(offset, offset.saturating_add(len));
                cached.written.fetch_add(blocks, Ordering::SeqCst);
                cached.origin.written();
                Written {
                    count: len as u32,
                    stable,
                    verifier,
                }
            });
            Changed {
                outcome,
                wcc: Wcc {
                    before: None,
                    after: Some(told(cached)),
                },
            }
        };
        if len == 0 {
            return done.tell(tell(&cached, Ok(())));
        }
        let fua = stable != Stability::Unstable;
        let at = offset.is_multiple_of(BLOCK).then(|| data.blocks());
        // Written from where it was received, if it lies there as a device wants it.
        let request = if let Some(window) = at.flatten() {
            let mut request = Request::new(
                0,
                cached.disk,
                ReqOp::Write { fua },
                offset,
                len,
                Some(window),
                0,
            );
            request.sum_up();
            request
        } else {
            let buf = Buf::zeroed(Request::buffer_len(offset, len) as usize);
            let mut window = buf.slice((offset % BLOCK) as usize, len as usize);
            window.bytes_mut().copy_from_slice(data.as_ref());
            drop(window);
            Request::write(0, cached.disk, offset, len, fua, &buf, 0)
        };
        let answer = move |result: Result<(), ReqError>, buf: Option<BufSlice>| {
            let changed = tell(&cached, result);
            drop(using);
            done.tell(changed);
            // In this order: who has the message gives its memory back if nobody else has it.
            drop(buf);
            drop(data);
        };
        inner.port.ask(inner.next_turn(), request, Box::new(answer));
    }

    /// Cuts a file off, or makes it longer, and what else is to be set with it.
    fn set_cached(
        &self,
        who: &Who,
        cached: &Cached,
        file: &Key,
        set: &SetAttributes,
        only_if: Option<Time>,
    ) -> Changed<()> {
        let inner = &self.0;
        let before = told(cached);
        let outcome = (|| {
            if only_if.is_some_and(|time| time != before.changed) {
                return Err(Status::NotSync);
            }
            if let Some(size) = set.size {
                may_use_data(who, &before, true)?;
                if size > DISK_MAX {
                    return Err(Status::FBig);
                }
            }
            let timed = set.size.is_some() || set.modified != SetTime::Keep;
            let apply = || {
                let origin = &cached.origin;
                let set =
                    origin.changed_by(timed, || inner.dir.set_attributes(who, file, set, None));
                set?.outcome
            };
            match set.size {
                Some(size) => {
                    // Cutting makes zeros first: a file that cannot be cut must keep its data.
                    cached.origin.check_writable()?;
                    let held = Held::to_set(inner, cached, apply);
                    large::resize(&held, size, DISK_MAX)
                }
                None => apply(),
            }
        })();
        if inner.know(cached).is_ok() {
            lock(&cached.known).1 = Instant::now();
        }
        Changed {
            outcome,
            wcc: Wcc {
                before: Some(before.before()),
                after: Some(told(cached)),
            },
        }
    }

    /// A file that a name stood for may be gone now, and its cache with it.
    fn drop_if_gone(&self, victim: Option<Found>) {
        let Some(victim) = victim else { return };
        if let Some(disk) = self.0.is_known(&victim.key) {
            self.0.forget_if_gone(&victim.key, disk);
        }
        if let Ok(left) = self.0.dir.attributes(&victim.key) {
            self.0.note_links(&victim.key, left.links);
        }
    }

    /// What has a name, if that is a file.
    fn victim(&self, dir: &Key, name: &[u8]) -> Option<Found> {
        let found = self.0.dir.lookup(&Who::root(), dir, name).ok();
        found.filter(|found| found.attributes.kind == Kind::Regular)
    }
}

/// A disk in use, and nothing stands in the way.
struct Ready {
    view: View,
    using: Using,
    cached: Arc<Cached>,
}

impl AtHand for Ready {
    fn read(self: Box<Self>, who: &Who, offset: u64, count: u32, done: Done<Outcome<Read>>) {
        self.view
            .read_cached(who, self.using, self.cached, offset, count, done);
    }

    fn write(self: Box<Self>, who: &Who, write: Write, done: Done<Changed<Written>>) {
        match may_use_data(who, &told(&self.cached), true) {
            Err(status) => done.tell(failed(status)),
            Ok(()) => self.view.ask_to_write(self.using, self.cached, write, done),
        }
    }
}

impl Tree for View {
    fn root(&self) -> Key {
        self.0.dir.root()
    }

    fn attributes(&self, file: &Key) -> Outcome<Attributes> {
        self.0.opened(file, || self.0.dir.attributes(file))
    }

    fn set_attributes(
        &self,
        who: &Who,
        file: &Key,
        set: &SetAttributes,
        only_if: Option<Time>,
    ) -> Changed<()> {
        let kind = self.0.dir.attributes(file).map(|a| a.kind);
        if kind != Ok(Kind::Regular) {
            return self.0.dir.set_attributes(who, file, set, only_if);
        }
        match self.0.begin(file) {
            Err(status) => failed(status),
            Ok((using, None)) => {
                let changed = self.0.dir.set_attributes(who, file, set, only_if);
                drop(using);
                changed
            }
            Ok((using, Some(cached))) => {
                if set.size.is_none() {
                    let changed = self.set_cached(who, &cached, file, set, only_if);
                    drop(using);
                    return changed;
                }
                drop((using, cached));
                // Nobody else reads or writes meanwhile.
                let alone = self.0.file(file).take();
                match alone.cached() {
                    Some(cached) => self.set_cached(who, &cached, file, set, only_if),
                    // It was closed in between, for nobody used it.
                    None => failed(Status::JukeBox),
                }
            }
        }
    }

    fn lookup(&self, who: &Who, dir: &Key, name: &[u8]) -> Outcome<Found> {
        let mut found = self.0.dir.lookup(who, dir, name)?;
        if found.attributes.kind == Kind::Regular {
            self.0.note_name(&found.key, name);
            found.attributes = self.0.opened(&found.key, || Ok(found.attributes))?;
        }
        Ok(found)
    }

    fn read_link(&self, who: &Who, link: &Key) -> Outcome<Vec<u8>> {
        self.0.dir.read_link(who, link)
    }

    fn written_by_two(&self, file: &Key, clients: [String; 2]) {
        self.0.note_in_turn(file, clients);
    }

    fn at_hand(&self, file: &Key, write: Option<Place>) -> Option<Box<dyn AtHand>> {
        let file = lock(&self.0.files).get(file).cloned()?;
        let (using, cached) = file.try_share()?;
        let mode = lock(&cached.known).0.mode;
        if !Inner::is_fresh(&cached)
            || write.is_some_and(|place| !self.0.is_prepared(&cached, mode, place))
        {
            return None;
        }
        let view = View(self.0.clone());
        Some(Box::new(Ready {
            view,
            using,
            cached,
        }))
    }

    fn read(&self, who: &Who, file: &Key, offset: u64, count: u32, done: Done<Outcome<Read>>) {
        match self.0.begin(file) {
            Err(status) => done.tell(Err(status)),
            Ok((using, Some(cached))) => self.read_cached(who, using, cached, offset, count, done),
            Ok((using, None)) => {
                self.0.dir.read(who, file, offset, count, done);
                drop(using);
            }
        }
    }

    fn write(&self, who: &Who, file: &Key, write: Write, done: Done<Changed<Written>>) {
        match self.0.begin(file) {
            Err(status) => done.tell(failed(status)),
            Ok((using, Some(cached))) => self.write_cached(who, using, cached, write, done),
            Ok((using, None)) => {
                self.0.dir.write(who, file, write, done);
                drop(using);
            }
        }
    }

    fn commit(&self, who: &Who, file: &Key, offset: u64, count: u32, done: Done<Changed<[u8; 8]>>) {
        let (using, cached) = match self.0.begin(file) {
            Err(status) => return done.tell(failed(status)),
            Ok((using, Some(cached))) => (using, cached),
            Ok((using, None)) => {
                self.0.dir.commit(who, file, offset, count, done);
                drop(using);
                return;
            }
        };
        let inner = &self.0;
        let ready = may_use_data(who, &told(&cached), true)
            // Unstable writes may have made it longer.
            .and_then(|()| large::commit(&Held::new(inner, &cached)));
        if let Err(status) = ready {
            if status == Status::Io {
                inner.dir.lost_unstable();
            }
            return done.tell(failed(status));
        }
        let request = Request::new(0, cached.disk, ReqOp::Flush, 0, 0, None, 0);
        let dir = inner.dir.clone();
        let answer = move |result: Result<(), ReqError>, _: Option<BufSlice>| {
            if result == Err(ReqError::Io) {
                dir.lost_unstable();
            }
            let changed = Changed {
                outcome: result.map_err(status).map(|()| dir.verifier()),
                wcc: Wcc {
                    before: None,
                    after: Some(told(&cached)),
                },
            };
            drop(using);
            done.tell(changed);
        };
        inner.port.ask(inner.next_turn(), request, Box::new(answer));
    }

    fn create(&self, who: &Who, dir: &Key, name: &[u8], what: &Create<'_>) -> Changed<Found> {
        // A file that is there may be a disk: what its creator wants of its length is done as with any disk.
        let mut cut = None;
        let mut what = *what;
        if let Create::File(How::Unchecked(set)) = &mut what
            && set.size.is_some()
            && self.victim(dir, name).is_some()
        {
            cut = set.size.take();
        }
        let mut changed = self.0.dir.create(who, dir, name, &what);
        if let Ok(found) = &mut changed.outcome {
            if found.attributes.kind == Kind::Regular {
                self.0.note_name(&found.key, name);
            }
            if let Some(size) = cut {
                let set = SetAttributes {
                    size: Some(size),
                    ..SetAttributes::default()
                };
                let set = self.set_attributes(who, &found.key, &set, None);
                match (set.outcome, set.wcc.after) {
                    (Err(status), _) => {
                        changed.outcome = Err(status);
                        return changed;
                    }
                    (Ok(()), Some(after)) => found.attributes = after,
                    (Ok(()), None) => {}
                }
            }
            if found.attributes.kind == Kind::Regular {
                match self.0.opened(&found.key, || Ok(found.attributes)) {
                    Ok(attributes) => found.attributes = attributes,
                    Err(status) => changed.outcome = Err(status),
                }
            }
        }
        changed
    }

    fn remove(&self, who: &Who, dir: &Key, name: &[u8], directory: bool) -> Changed<()> {
        let victim = self.victim(dir, name);
        let changed = self.0.dir.remove(who, dir, name, directory);
        if changed.outcome.is_ok() {
            self.drop_if_gone(victim);
        }
        changed
    }

    fn rename(&self, who: &Who, from: (&Key, &[u8]), to: (&Key, &[u8])) -> (Outcome<()>, Wcc, Wcc) {
        let victim = self.victim(to.0, to.1);
        let renamed = self.0.dir.rename(who, from, to);
        if renamed.0.is_ok() {
            self.drop_if_gone(victim);
            if let Some(found) = self.victim(to.0, to.1) {
                self.0.note_name(&found.key, to.1);
                if let Some(cached) = self.0.file(&found.key).cached() {
                    self.0.disks.renamed(cached.disk, &cached.origin);
                    self.0.pin_if_wanted(&found.key, &cached.origin);
                }
            }
        }
        renamed
    }

    fn link(&self, who: &Who, file: &Key, dir: &Key, name: &[u8]) -> Changed<Attributes> {
        let mut changed = self.0.dir.link(who, file, dir, name);
        if let Ok(attributes) = &mut changed.outcome {
            self.0.note_links(file, attributes.links);
            self.0.told_of(file, attributes);
        }
        changed
    }

    fn list(
        &self,
        who: &Who,
        dir: &Key,
        cookie: u64,
        whole: bool,
        take: &mut dyn FnMut(Entry<'_>) -> bool,
    ) -> Outcome<bool> {
        let mut tell = |mut entry: Entry<'_>| {
            if let Some(found) = entry.found
                && found.attributes.kind == Kind::Regular
            {
                self.0.note_name(&found.key, entry.name);
                entry.found = self.0.listed(found);
            }
            take(entry)
        };
        self.0.dir.list(who, dir, cookie, whole, &mut tell)
    }

    fn room(&self) -> Outcome<Room> {
        let mut room = self.0.dir.room()?;
        let promised = self.0.owed_by_sparse();
        room.bytes_free = room.bytes_free.saturating_sub(promised);
        room.bytes_available = room.bytes_available.saturating_sub(promised);
        Ok(room)
    }
}
