//! The thread of a mirror: what the rules ask for is done on the legs, and what the legs answer is told to
//! the rules.
//!
//! All legs share one I/O driver, so that nothing is handed from thread to thread between them. What may block
//! for long is done elsewhere: storing notes on a thread that does nothing else, opening a leg again on one
//! that ends with it.

use crate::habits::{Habits, Wall};
use crate::machine::{Action, Data, IoId, Machine, ReqId, What, Why};
use crate::marks::{Marks, is_unlike, last_sum};
use crate::mirror::{Book, LegOpener, Shared, leg_timeout, lock, nanoseconds};
use crate::news::News;
use crate::regions::Regions;
use crate::sample::{Likeness, Sample, sample};
use crate::scrub::{ScrubOrder, Scrubbing, compare, sums_of};
use hearth_fault::Fault;
use hearth_format::mirror::{LegState, Mark, MirrorNotes, MirrorStamps};
use hearth_io::{
    BLOCK, Buf, BufPool, BufSlice, Class, Device, IoDone, IoError, IoOp, Job, OpKind, Proactor,
    Target, Targets, Wait, now_ns,
};
use smallvec::{SmallVec, smallvec};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;

mod scrubs;

/// How often it is looked whether a leg is out of time.
const CHECK_NS: u64 = 100_000_000;
/// How often there is nothing to look at but regions that may be forgotten.
const IDLE_NS: u64 = 1_000_000_000;
/// First wait before a leg that went out is opened again; doubles up to [`BACK_MAX`], so that a disk that takes
/// what is written and fails again is not copied to without end.
const BACK: Duration = Duration::from_secs(1);
/// Longest wait: a leg that is well again is noticed this soon.
const BACK_MAX: Duration = Duration::from_secs(300);
/// A leg that went out, and has held everything for so long since, is one like others again.
const STEADY: Duration = Duration::from_secs(600);
/// How long the operating system may take to let go of a leg before it is opened again.
const LET_GO: Duration = Duration::from_secs(2);
/// How often it is told that a leg was repaired: one that reads nothing at all is repaired with every read.
const REPAIRED_NS: u64 = 10_000_000_000;
/// Longest wait, at the end, for what is under way.
const GOODBYE_NS: u64 = 10_000_000_000;

/// What others leave for the thread.
#[derive(Default)]
pub(crate) struct Inbox {
    pub(crate) jobs: Vec<Job>,
    pub(crate) noted: Option<(u64, bool)>,
    pub(crate) opened: Vec<(usize, Result<Opened, Fault>)>,
    pub(crate) orders: Vec<Order>,
    pub(crate) stop: bool,
    /// The thread has ended: nobody takes anything out any more.
    pub(crate) stopped: bool,
}

/// A leg that was opened again.
pub(crate) struct Opened {
    device: Device,
    /// It is not as it was left.
    changed: bool,
    /// Some of what it holds, and of what a current one does.
    samples: (Vec<Sample>, Vec<Sample>),
}

/// What somebody wants of a mirror. The answer goes back by the channel.
pub(crate) enum Order {
    /// A new leg, already open.
    Add {
        id: hearth_format::Uuid,
        name: String,
        device: Box<Device>,
        answer: Sender<()>,
    },
    /// A leg goes for good.
    Remove { leg: usize, answer: Sender<bool> },
    /// Copy no more for now, or go on.
    Pause(bool),
    /// Bytes a second that are copied at most; 0 is no limit.
    Rate(u64),
    /// How long whoever asks waits for an answer at most.
    Timeout(Duration),
    /// The legs have so many bytes now. The answer is the mirror's size from now on.
    Grow { size: u64, answer: Sender<u64> },
    /// What is to be done about scrubs.
    Scrub {
        what: ScrubOrder,
        answer: Sender<Result<(), Fault>>,
    },
}

/// What the notes' thread is given.
pub(crate) enum ToKeep {
    Note(ToNote),
    Habits(Box<Habits>),
}

/// What has to be durable before something else happens.
pub(crate) struct ToNote {
    pub(crate) seq: u64,
    pub(crate) stamps: MirrorStamps,
    pub(crate) touched: Regions,
}

/// Stores notes, one after the other, until nobody has any more.
pub(crate) fn keep_notes(
    shared: &Shared,
    book: &dyn Book,
    first: MirrorNotes,
    given: &Receiver<ToKeep>,
) {
    let mut notes = first;
    while let Ok(next) = given.recv() {
        let next = match next {
            ToKeep::Note(note) => note,
            ToKeep::Habits(habits) => {
                if let Err(e) = book.remember(&habits) {
                    tracing::warn!(mirror = %shared.name, "how the legs are copied to and scrubbed is forgotten at the next start: {e}");
                }
                continue;
            }
        };
        // What was written last is not worth a store of its own.
        notes.stamps.marks.clone_from(&next.stamps.marks);
        let changed = next.stamps != notes.stamps;
        notes.sequence += 1;
        notes.stamps = next.stamps;
        notes.touched = next.touched.words().to_vec();
        notes.regions = u64::from(next.touched.count());
        let made = match book.store(&notes, changed) {
            Ok(()) => true,
            Err(e) => {
                tracing::error!(mirror = %shared.name, "what is known of the legs cannot be stored: {e}");
                false
            }
        };
        lock(&shared.inbox).noted = Some((next.seq, made));
        shared.wake.wake();
    }
}

struct Asked {
    job: Job,
    bufs: SmallVec<[BufSlice; 2]>,
}

/// A leg as the thread knows it.
struct Leg {
    /// Stretches of zeros take no room on it.
    sparse: bool,
    /// What ended may arrive yet, if it ended with an error.
    remote: bool,
    /// It is being opened.
    opening: bool,
    back: Back,
    next_ns: u64,
    /// What was told of it last.
    told: LegState,
    repaired: Repaired,
    /// What was written last before it went out.
    marks: Vec<Mark>,
}

/// How long a leg that is out is left alone.
#[derive(Clone, Copy)]
struct Back {
    wait: Duration,
    /// Since when it holds everything, if it does.
    current_ns: Option<u64>,
}

impl Back {
    fn new(now: u64) -> Back {
        Back {
            wait: BACK,
            current_ns: Some(now),
        }
    }

    fn is_current(&mut self, now: u64) {
        self.current_ns = Some(now);
    }

    /// It went out: until when it is not opened. What happened years ago does not count.
    fn went_out(&mut self, now: u64) -> u64 {
        let held = self
            .current_ns
            .take()
            .map_or(0, |at| now.saturating_sub(at));
        if u128::from(held) >= STEADY.as_nanos() {
            self.wait = BACK;
        }
        self.longer(now, BACK_MAX)
    }

    /// It could not be opened: the same.
    fn not_opened(&mut self, now: u64) -> u64 {
        self.longer(now, BACK_MAX / 10)
    }

    fn longer(&mut self, now: u64, most: Duration) -> u64 {
        let until = now.saturating_add(self.wait.as_nanos() as u64);
        self.wait = (self.wait * 2).min(most);
        until
    }
}

/// What else the thread is started with.
pub(crate) struct Rest {
    pub(crate) targets: Arc<Targets>,
    pub(crate) opener: Arc<dyn LegOpener>,
    pub(crate) notes: Sender<ToKeep>,
    pub(crate) legs: usize,
    pub(crate) habits: Habits,
    pub(crate) wall: Wall,
    pub(crate) read_only: bool,
    pub(crate) marks: Vec<Mark>,
}

/// What was repaired on a leg since it was told: ranges, bytes, and where the first one is.
#[derive(Default)]
struct Repaired {
    ranges: u64,
    bytes: u64,
    offset: u64,
    next_ns: u64,
}

pub(crate) struct Driver {
    shared: Arc<Shared>,
    machine: Machine,
    io: Box<dyn Proactor>,
    targets: Arc<Targets>,
    opener: Arc<dyn LegOpener>,
    notes: Sender<ToKeep>,
    legs: Vec<Leg>,
    asked: HashMap<ReqId, Asked>,
    /// What reads have brought, or are to bring.
    reads: HashMap<IoId, (Buf, usize)>,
    /// Operations on legs, with what has to be known when they end.
    flying: HashMap<IoId, (usize, bool)>,
    pool: BufPool,
    next_req: ReqId,
    habits: Habits,
    wall: Wall,
    scrubbing: Scrubbing,
    read_only: bool,
    marks: Marks,
    /// Sizes that hold when a note is durable, and who waits for that.
    growing: Vec<(u64, u64, Sender<u64>)>,
    /// How long a leg may take, if that was set since the mirror was opened.
    limit: Option<Duration>,
}

impl Leg {
    fn new(device: Option<&Device>) -> Leg {
        let file = device.and_then(Device::file);
        Leg {
            sparse: file.is_some_and(|f| !f.is_device()),
            remote: device.is_some_and(|d| d.as_remote().is_some()),
            opening: false,
            back: Back::new(now_ns()),
            next_ns: now_ns() + BACK.as_nanos() as u64,
            told: LegState::Out,
            repaired: Repaired::default(),
            marks: Vec::new(),
        }
    }
}

/// True if what looked so then cannot be what looks so now.
pub(crate) fn is_another(then: (i64, u64), now: (i64, u64)) -> bool {
    then.1 != 0 && now.1 != 0 && then.1 != now.1
}

/// Bytes at each end of a device in a leg's place that must be blank: file systems and partition tables begin there.
const BLANK: u64 = 1 << 20;

/// The reason not to overwrite another device in a leg's place: it holds data, so it may be a drive of another owner that
/// got the leg's name at a reboot.
pub(crate) fn not_blank(device: &Device) -> Option<Fault> {
    let len = BLANK.min(device.size());
    let mut bytes = vec![0; len as usize];
    for at in [0, device.size() - len] {
        match device.read_at(at, &mut bytes) {
            Ok(()) if bytes.iter().all(|byte| *byte == 0) => {}
            Ok(()) => {
                return Some(Fault::new(
                    "another device is in its place, and it holds something",
                    "if it is to be the leg, clear its first and last MiB; else give the leg's new name with `hearth disk replace`",
                ));
            }
            Err(e) => return Some(Fault::new(format!("it cannot be read: {e}"), "replace it")),
        }
    }
    None
}

/// What tells a regular file's content, or a device, from another's.
pub(crate) fn look(device: &Device) -> (i64, u64) {
    if device.is_device() {
        // It has no times; which one it is, it may tell.
        return (0, device.hardware().unwrap_or(0));
    }
    device.identity().map_or((0, 0), |i| (i.mtime_ns, i.inode))
}

fn give_limit(leg: &Device, limit: Duration) {
    leg.set_patience(limit);
    if let Some(remote) = leg.as_remote() {
        remote.set_timeout(limit);
    }
}

impl Driver {
    pub(crate) fn new(
        shared: Arc<Shared>,
        machine: Machine,
        io: Box<dyn Proactor>,
        rest: Rest,
    ) -> Driver {
        let Rest {
            targets,
            opener,
            notes,
            legs,
            habits,
            wall,
            read_only,
            marks,
        } = rest;
        let leg = |i| Leg::new(targets.get(Target::Origin(i as u16)).as_deref());
        let mut legs: Vec<Leg> = (0..legs).map(leg).collect();
        for (leg, now) in legs.iter_mut().zip(machine.report()) {
            leg.marks.clone_from(&marks);
            // Only what changes is news, and that a leg is copied to.
            if now.state != LegState::Behind {
                leg.told = now.state;
            }
        }
        Driver {
            legs,
            shared,
            machine,
            io,
            targets,
            opener,
            notes,
            asked: HashMap::new(),
            reads: HashMap::new(),
            flying: HashMap::new(),
            pool: BufPool::default(),
            next_req: 1,
            habits,
            wall,
            scrubbing: Scrubbing::default(),
            read_only,
            marks: Marks::new(&marks),
            growing: Vec::new(),
            limit: None,
        }
    }

    /// Serves until told to stop.
    pub(crate) fn run(mut self) {
        self.take_up_habits();
        let (mut events, mut dones) = (Vec::new(), Vec::new());
        let mut goodbye_ns = 0;
        let mut next_tick = 0;
        loop {
            let now = now_ns();
            let stop = self.take_inbox(now);
            if now >= next_tick {
                self.machine.tick(now);
                self.call_back(now);
                self.tell_repaired(now);
                self.scrub_when_due(now);
                self.pool.age();
                let pace = if self.machine.is_busy() {
                    CHECK_NS
                } else {
                    IDLE_NS
                };
                next_tick = now + pace;
            }
            if stop {
                if goodbye_ns == 0 {
                    goodbye_ns = now + GOODBYE_NS;
                }
                if now >= goodbye_ns || self.asked.is_empty() && self.say_goodbye(now) {
                    break;
                }
                next_tick = next_tick.min(now + CHECK_NS);
            }
            self.act();
            if let Err(e) = self
                .io
                .wait(Wait::Until(next_tick), &mut events, &mut dones)
            {
                tracing::error!(mirror = %self.shared.name, "the I/O driver of a mirror failed: {e}; the mirror is out of use");
                break;
            }
            events.clear();
            for done in dones.drain(..) {
                self.ended(done);
            }
            self.act();
        }
        // What is still waiting is answered by being dropped.
        let left = {
            let mut inbox = lock(&self.shared.inbox);
            inbox.stopped = true;
            std::mem::take(&mut inbox.jobs)
        };
        drop(left);
    }

    /// True once the notes say that the mirror was left in order.
    fn say_goodbye(&mut self, now: u64) -> bool {
        for (i, leg) in self.machine.report().iter().enumerate() {
            let device = self.targets.get(Target::Origin(i as u16));
            if let Some(device) = device.filter(|_| leg.state == LegState::Current) {
                self.machine.left(i, look(&device));
            }
        }
        self.machine.close(now)
    }

    fn take_inbox(&mut self, now: u64) -> bool {
        let (jobs, noted, opened, orders, stop) = {
            let mut inbox = lock(&self.shared.inbox);
            (
                std::mem::take(&mut inbox.jobs),
                inbox.noted.take(),
                std::mem::take(&mut inbox.opened),
                std::mem::take(&mut inbox.orders),
                inbox.stop,
            )
        };
        if let Some((seq, made)) = noted {
            self.machine.noted(now, seq, made);
            let machine = &self.machine;
            for (_, size, answer) in
                (self.growing).extract_if(.., |(note, ..)| machine.is_noted(*note))
            {
                self.shared.set_size(size);
                // Whoever asked may have given up; then it is asked for again.
                let _ = answer.send(size);
            }
        }
        for (leg, opened) in opened {
            self.opened(now, leg, opened);
        }
        for order in orders {
            self.obey(now, order);
        }
        for job in jobs {
            self.ask(now, job);
        }
        stop
    }

    fn ask(&mut self, now: u64, job: Job) {
        let Some(op) = job.op() else {
            return;
        };
        let (kind, offset, len) = (op.kind, op.offset, op.len);
        let what = match kind {
            OpKind::Read => What::Read,
            OpKind::Write => What::Write,
            OpKind::Flush => What::Flush,
            OpKind::WriteZeroes { punch } => What::Zero { punch },
            // What a device has after a discard it may say differently each time, and another device differently
            // again. Files have zeros; on devices nothing is discarded.
            OpKind::Discard if self.legs.iter().all(|l| l.sparse) => What::Zero { punch: true },
            OpKind::Discard => return job.finish(Ok(())),
        };
        if len == 0 && what != What::Flush {
            return job.finish(Ok(()));
        }
        let mut bufs = op.bufs.clone();
        if what == What::Write && bufs.iter().any(BufSlice::is_shared) {
            // A guest may change it meanwhile, and the legs would not be the same.
            let mut copy = self.pool.get(len as usize).slice(0, len as usize);
            gather(&bufs, copy.bytes_mut());
            bufs = smallvec![copy];
        }
        match what {
            What::Write => self
                .marks
                .wrote(now, offset, len, last_sum(offset, len, &bufs)),
            What::Zero { .. } => self
                .marks
                .wrote(now, offset, len, last_sum(offset, len, &[])),
            What::Read | What::Flush => {}
        }
        let req = self.next_req;
        self.next_req += 1;
        self.asked.insert(req, Asked { job, bufs });
        self.machine.request(now, req, what, offset, len);
    }

    fn act(&mut self) {
        loop {
            let actions = self.machine.actions();
            if actions.is_empty() {
                return self.publish();
            }
            for action in actions {
                self.take(action);
            }
        }
    }

    fn take(&mut self, action: Action) {
        match action {
            Action::Io {
                io,
                leg,
                what,
                offset,
                len,
                data,
            } => self.submit(io, leg, what, (offset, len), data),
            Action::Answer { req, result, data } => {
                let Some(asked) = self.asked.remove(&req) else {
                    return;
                };
                if let Some((buf, len)) = data.and_then(|io| self.reads.get(&io)) {
                    let mut at = 0;
                    for mut to in asked.bufs.iter().cloned() {
                        let n = to.len().min(len - at);
                        let from = buf.slice(at, n);
                        to.bytes_mut()[..n].copy_from_slice(from.bytes());
                        at += n;
                    }
                }
                let op = asked.job.op();
                if let Some(op) = op.filter(|op| result.is_err() && op.kind != OpKind::Read) {
                    self.marks.forget(op.offset, op.len);
                }
                asked.job.finish(result);
            }
            Action::Release(io) => {
                if let Some((buf, _)) = self.reads.remove(&io) {
                    self.pool.put(buf);
                }
            }
            Action::Note {
                seq,
                mut stamps,
                touched,
            } => {
                stamps.marks = self.machine.settled(self.marks.list());
                let note = ToNote {
                    seq,
                    stamps,
                    touched,
                };
                // Nobody takes it only when the thread that stores it has died.
                if self.notes.send(ToKeep::Note(note)).is_err() {
                    self.machine.noted(now_ns(), seq, false);
                }
            }
            // Whoever took it out knows; that it is done is told when the disk's record says so.
            Action::Lost {
                why: Why::Removed, ..
            } => {}
            Action::Lost { leg, why } => {
                self.shared.witness.tell(News::Lost {
                    leg: self.shared.leg_name(leg),
                    why: why_text(why),
                });
                if let Some(leg) = self.legs.get_mut(leg) {
                    leg.next_ns = leg.back.went_out(now_ns());
                    leg.marks = self.marks.list();
                }
            }
            Action::Current { leg } => {
                if let Some(leg) = self.legs.get_mut(leg) {
                    leg.back.is_current(now_ns());
                }
                self.shared.witness.tell(News::Current {
                    leg: self.shared.leg_name(leg),
                });
            }
            Action::Compare {
                check,
                offset,
                len,
                reads,
                prefer,
            } => {
                let read = |(leg, io): &(usize, IoId)| {
                    let (buf, _) = self.reads.get(io)?;
                    Some((*leg, buf.slice(0, len as usize)))
                };
                let read: Vec<(usize, BufSlice)> = reads.iter().filter_map(read).collect();
                let cache = lock(&self.shared.cache).clone();
                let known = cache.map_or_else(Vec::new, |cache| cache.clean(offset, len));
                let bytes: Vec<(usize, &[u8])> =
                    read.iter().map(|(leg, buf)| (*leg, buf.bytes())).collect();
                let found = compare(offset, &bytes, &known, prefer);
                self.machine.compared(now_ns(), check, found);
            }
            Action::Settled {
                read,
                from,
                offset,
                len,
            } => {
                self.marks.forget(offset, len);
                let cache = lock(&self.shared.cache).clone();
                if let Some((cache, (buf, _))) = cache.zip(self.reads.get(&read)) {
                    let held = buf.slice(from as usize, len as usize);
                    cache.drop_unlike(offset, &sums_of(held.bytes()));
                }
            }
            Action::Scrubbed(end) => self.scrubbed(&end),
            Action::Repaired { leg, offset, len } => {
                if let Some(leg) = self.legs.get_mut(leg) {
                    let repaired = &mut leg.repaired;
                    if repaired.ranges == 0 {
                        repaired.offset = offset;
                    }
                    repaired.ranges += 1;
                    repaired.bytes += len;
                }
                self.tell_repaired(now_ns());
            }
        }
    }

    fn submit(&mut self, io: IoId, leg: usize, what: What, range: (u64, u64), data: Data) {
        let (offset, len) = range;
        let mut kind = match what {
            What::Read => OpKind::Read,
            What::Write => OpKind::Write,
            What::Flush => OpKind::Flush,
            What::Zero { punch } => OpKind::WriteZeroes { punch },
        };
        let mut bufs: SmallVec<[BufSlice; 2]> = SmallVec::new();
        match (what, data) {
            (What::Read, _) => {
                let buf = self.pool.get(len as usize);
                bufs.push(buf.slice(0, len as usize));
                self.reads.insert(io, (buf, len as usize));
            }
            (What::Write, Data::Request(req)) => {
                bufs = self
                    .asked
                    .get(&req)
                    .map(|a| a.bufs.clone())
                    .unwrap_or_default();
            }
            (What::Write, Data::Part(read, from)) => {
                if let Some((buf, _)) = self.reads.get(&read) {
                    bufs.push(buf.slice(from as usize, len as usize));
                }
            }
            (What::Write, Data::Read(read)) => {
                if let Some((buf, len)) = self.reads.get(&read) {
                    bufs.push(buf.slice(0, *len));
                }
                // A copy takes no more room than what is copied.
                let sparse = self.legs.get(leg).is_some_and(|l| l.sparse);
                if sparse && bufs.iter().all(|b| is_zero(b.bytes())) {
                    kind = OpKind::WriteZeroes { punch: true };
                    bufs.clear();
                }
            }
            _ => {}
        }
        let changes = !matches!(what, What::Read | What::Flush);
        self.flying.insert(io, (leg, changes));
        self.io.submit_io(IoOp {
            id: io,
            target: Target::Origin(leg as u16),
            kind,
            offset,
            len,
            bufs,
            crcs: SmallVec::new(),
            sums: false,
            class: Class::Foreground,
        });
    }

    fn ended(&mut self, done: IoDone) {
        let io = done.op.id;
        let (leg, changes) = self.flying.remove(&io).unwrap_or((usize::MAX, false));
        let remote = self.legs.get(leg).is_some_and(|l| l.remote);
        // A server that was given up may have it still, and so may a device that was answered for.
        let doubt = changes && done.result.is_err() && (remote || done.goes_on());
        drop(done.op);
        self.machine.done(now_ns(), io, done.result, doubt);
    }

    /// Begins to open legs again that are out.
    fn call_back(&mut self, now: u64) {
        for (i, report) in self.machine.report().iter().enumerate() {
            let Some(leg) = self.legs.get_mut(i) else {
                continue;
            };
            let out = report.state == LegState::Out && !report.removed;
            if !out || leg.opening || now < leg.next_ns || !self.machine.has_ended(i) {
                continue;
            }
            leg.opening = true;
            let old = self.targets.set(Target::Origin(i as u16), None);
            let (shared, opener) = (self.shared.clone(), self.opener.clone());
            let name = self.shared.leg_name(i);
            let noted = self.machine.left_as(i);
            let marks = leg.marks.clone();
            let legs = self.machine.report();
            let current = legs
                .iter()
                .position(|l| l.state == LegState::Current && l.present);
            let current = current.and_then(|i| self.targets.get(Target::Origin(i as u16)));
            let work = move || {
                let opened = reopen(old, &*opener, &name, shared.size(), noted);
                let opened = opened.map(|mut opened| {
                    if let Some(current) = current.filter(|_| !opened.changed) {
                        let look = |device: &Device| sample(device, shared.size(), &marks, false);
                        opened.samples = (look(&opened.device), look(&current));
                    }
                    opened
                });
                lock(&shared.inbox).opened.push((i, opened));
                shared.wake.wake();
            };
            let begun = std::thread::Builder::new()
                .name("hearth-leg".to_owned())
                .spawn(work);
            if begun.is_err() {
                leg.opening = false;
                leg.next_ns = now + BACK_MAX.as_nanos() as u64;
            }
        }
    }

    fn opened(&mut self, now: u64, i: usize, opened: Result<Opened, Fault>) {
        let Some(leg) = self.legs.get_mut(i) else {
            return;
        };
        leg.opening = false;
        match opened {
            Ok(opened) => {
                *leg = Leg {
                    back: leg.back,
                    told: leg.told,
                    repaired: std::mem::take(&mut leg.repaired),
                    marks: std::mem::take(&mut leg.marks),
                    ..Leg::new(Some(&opened.device))
                };
                let (mine, its) = &opened.samples;
                let machine = &self.machine;
                let like = Likeness::of(mine, its, |at| !machine.is_the_same(i, at));
                let same = |mark: &&Mark| machine.is_the_same(i, mark.block * BLOCK);
                let marks: Vec<Mark> = leg.marks.iter().filter(same).copied().collect();
                let why = match (opened.changed, like.is_another()) {
                    (true, _) => Some("it may be another one, or somebody else has written it"),
                    (_, true) => Some("it does not hold what it held, and may be another one"),
                    _ if is_unlike(mine, &marks) => {
                        Some("it lacks what was written before it went out")
                    }
                    _ => None,
                };
                if let Some(why) = why {
                    self.shared.witness.tell(News::Changed {
                        leg: self.shared.leg_name(i),
                        why: why.to_owned(),
                    });
                }
                let changed = why.is_some();
                self.machine.left(i, (0, look(&opened.device).1));
                let device = Arc::new(opened.device);
                // It was opened with what was set when the mirror was.
                if let Some(limit) = self.limit {
                    give_limit(&device, limit);
                }
                self.targets.set(Target::Origin(i as u16), Some(device));
                self.shared.set_fault(i, None);
                if !self.machine.returned(now, i, changed) {
                    // It was taken out for good meanwhile.
                    self.targets.set(Target::Origin(i as u16), None);
                }
            }
            Err(why) => {
                self.shared.set_fault(i, Some(why));
                leg.next_ns = leg.back.not_opened(now);
            }
        }
    }

    fn obey(&mut self, now: u64, order: Order) {
        match order {
            Order::Add {
                id,
                name,
                device,
                answer,
            } => {
                let i = self.machine.add(now, id);
                self.legs.push(Leg::new(Some(&device)));
                self.targets
                    .set(Target::Origin(i as u16), Some(Arc::new(*device)));
                self.shared.add_leg(name);
                // Whoever asked looks for it next, unless they have given up.
                self.publish();
                let _ = answer.send(());
            }
            Order::Remove { leg, answer } => {
                let gone = self.machine.remove(now, leg);
                if gone {
                    self.targets.set(Target::Origin(leg as u16), None);
                }
                // Whoever asked may have given up.
                let _ = answer.send(gone);
            }
            Order::Pause(paused) => {
                self.machine.pause(now, paused);
                self.habits.paused = paused;
                self.keep_habits();
            }
            Order::Rate(rate) => {
                self.machine.set_rate(now, rate);
                self.habits.rate = rate;
                self.keep_habits();
            }
            Order::Timeout(timeout) => {
                let limit = leg_timeout(timeout);
                self.machine.set_limit(now, nanoseconds(limit));
                self.limit = Some(limit);
                for i in 0..self.legs.len() {
                    if let Some(device) = self.targets.get(Target::Origin(i as u16)) {
                        give_limit(&device, limit);
                    }
                }
            }
            Order::Grow { size, answer } => match self.machine.grow(now, size) {
                Some(note) => self.growing.push((note, size, answer)),
                // Whoever asked may have given up.
                None => drop(answer.send(self.shared.size())),
            },
            Order::Scrub { what, answer } => {
                let done = self.scrub(now, &what);
                self.keep_habits();
                // Whoever asked may have given up.
                let _ = answer.send(done);
            }
        }
    }

    /// Tells those who look at the mirror from outside.
    fn publish(&mut self) {
        let report = self.machine.report();
        for (i, (leg, now)) in self.legs.iter_mut().zip(&report).enumerate() {
            let before = std::mem::replace(&mut leg.told, now.state);
            if now.state == LegState::Behind && before != LegState::Behind && !now.removed {
                self.shared.witness.tell(News::Resyncing {
                    leg: self.shared.leg_name(i),
                    bytes: now.behind,
                });
            }
        }
        *lock(&self.shared.report) = report;
        self.publish_scrub();
    }

    fn tell_repaired(&mut self, now: u64) {
        for (i, leg) in self.legs.iter_mut().enumerate() {
            let repaired = &mut leg.repaired;
            if repaired.ranges == 0 || now < repaired.next_ns {
                continue;
            }
            self.shared.witness.tell(News::Repaired {
                leg: self.shared.leg_name(i),
                ranges: repaired.ranges,
                bytes: repaired.bytes,
                offset: repaired.offset,
            });
            *repaired = Repaired {
                next_ns: now + REPAIRED_NS,
                ..Repaired::default()
            };
        }
    }
}

/// Opens a leg again, when nobody uses it any more. Blocks.
fn reopen(
    old: Option<Arc<Device>>,
    opener: &dyn LegOpener,
    name: &str,
    size: u64,
    noted: (i64, u64),
) -> Result<Opened, Fault> {
    let then = old.as_ref().map(|device| look(device));
    if let Some(old) = old
        && Targets::wait_unused(old, LET_GO).is_err()
    {
        return Err(Fault::new(
            "what it was asked has not ended",
            "see whether the disk hangs",
        ));
    }
    let device = opener.open(name)?;
    if device.size() < size {
        return Err(Fault::new(
            format!(
                "it has {} bytes, fewer than the disk's {size}",
                device.size()
            ),
            "replace it by a larger one",
        ));
    }
    // One that is there but answers nothing must not hold up the mirror again.
    let mut probe = [0; 4096];
    let n = probe.len().min(size as usize);
    device
        .read_at(0, &mut probe[..n])
        .map_err(|e| Fault::new(format!("it cannot be read: {e}"), "replace it"))?;
    let now = look(&device);
    // Of a file that was not there before it is not known how it was left.
    let changed = match then {
        _ if device.is_device() => {
            is_another(noted, now) || then.is_some_and(|t| is_another(t, now))
        }
        Some(then) => then != now,
        None => true,
    };
    if changed
        && device.is_device()
        && let Some(refusal) = not_blank(&device)
    {
        return Err(refusal);
    }
    Ok(Opened {
        device,
        changed,
        samples: Default::default(),
    })
}

/// Why a leg is out, in words.
pub(crate) fn why_text(why: Why) -> String {
    match why {
        Why::Error(IoError::Os(errno)) if errno == libc::ETIMEDOUT => {
            "it did not answer in time".to_owned()
        }
        Why::Error(e) => e.to_string(),
        Why::Silent => "it did not answer in time".to_owned(),
        Why::Missing => "it was not there".to_owned(),
        Why::Removed => "it was taken out".to_owned(),
    }
}

fn gather(bufs: &[BufSlice], mut to: &mut [u8]) {
    for buf in bufs {
        let n = buf.len().min(to.len());
        let (here, rest) = std::mem::take(&mut to).split_at_mut(n);
        here.copy_from_slice(&buf.bytes()[..n]);
        to = rest;
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    let (chunks, rest) = bytes.as_chunks::<16>();
    chunks.iter().all(|c| u128::from_ne_bytes(*c) == 0) && rest.iter().all(|b| *b == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn only_blank_ends_may_be_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("leg");
        let file = std::fs::File::create(&path).unwrap();
        let size = 8 << 20;
        for (at, is_blank) in [
            (2 << 20, true),
            (0, false),
            (BLANK - 1, false),
            (size - BLANK, false),
            (size - 1, false),
        ] {
            file.set_len(0).unwrap();
            file.set_len(size).unwrap();
            file.write_all_at(&[1], at).unwrap();
            let spec = hearth_io::OriginSpec::file(&path);
            let device = spec.open(hearth_io::OpenMode::default()).unwrap();
            assert_eq!(not_blank(&device).is_none(), is_blank, "{at}");
        }
    }

    #[test]
    fn a_leg_that_goes_out_again_and_again_waits_longer_and_one_that_was_well_for_long_does_not() {
        const SECOND: u64 = 1_000_000_000;
        let mut back = Back::new(0);
        let mut waits = Vec::new();
        for round in 0..10 {
            let now = round * SECOND;
            waits.push((back.went_out(now) - now) / SECOND);
            back.is_current(now);
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]);
        // It is there and cannot be opened: looked for more often.
        assert_eq!(back.not_opened(0), 300 * SECOND);
        assert_eq!(back.not_opened(0), 30 * SECOND);
        // A copy that takes long is no proof.
        assert_eq!(back.went_out(0), 30 * SECOND);
        assert_eq!(
            back.went_out(5 * STEADY.as_nanos() as u64),
            5 * STEADY.as_nanos() as u64 + 60 * SECOND
        );
        let then = 10 * STEADY.as_nanos() as u64;
        back.is_current(then);
        let later = then + STEADY.as_nanos() as u64;
        assert_eq!(back.went_out(later) - later, SECOND);
    }
}
