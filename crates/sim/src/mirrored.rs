//! A disk's origin that is a mirror: the rules of [`hearth_mirror`], unchanged, over simulated legs.
//!
//! In the mirror's own simulation nobody caches what it answers. Here an engine does: it keeps answers for good, writes
//! back what it has promised, and relies on a flush. So what a mirror answers twice in different ways, or forgets, is
//! served from flash as well, and found.
//!
//! What the mirror's driver and the daemon do, this does: operations go to legs, notes to a file of the state directory
//! and to the disk's record in the pool, legs that went out are offered again. What of it goes wrong, and when, the seed
//! says: see [`trouble`].

mod lies;
pub(crate) mod trouble;

use crate::content::BLOCK;
use crate::device::{Base, SimDevice, Tear};
use crate::paths::Event;
use crate::prng::Prng;
use crate::single::Book;
use crate::subject::Subject;
use hearth_engine::api::DiskId;
use hearth_format::Uuid;
use hearth_format::mirror::{LegStamp, LegState, MirrorNotes, MirrorStamps};
use hearth_io::{Buf, BufSlice, Class, IoDone, IoError, IoOp, OpKind, Target};
use hearth_mirror::machine::{
    Action, Data, IoId, Limits, Machine, NoneCurrent, Opening, ReqId, What,
};
use hearth_mirror::{Cached, Regions, believed, compare};
use lies::Lie;
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};
use trouble::{Mood, Removal};

/// Bytes of a region: small, so that there are several.
const REGION: u64 = 16 * BLOCK as u64;
/// How often the mirror looks at the time while something is under way, and while nothing is.
const PACE_NS: [u64; 2] = [100_000_000, 1_000_000_000];
/// What an answer takes on its way to the engine.
const ANSWER_NS: u64 = 5_000;
/// Rounds in which a mirror is left in order.
const GOODBYE_ROUNDS: u32 = 2000;

/// How a mirror, or who keeps it, is broken on purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LegFault {
    /// It is not.
    #[default]
    None,
    /// A leg's removal is acknowledged before it stands anywhere.
    RemovalUnnoted,
    /// One of the mirror's own rules.
    #[cfg(feature = "mutations")]
    Rule(hearth_mirror::faults::Fault),
}

/// What of a mirror ends later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// An operation of the leg with this number.
    Leg(u8, u64),
    /// A step of the note under way.
    Note(u64),
    /// A request of the engine is answered.
    Answer(u64),
    /// It stands in the record that a leg was removed.
    Removed(u8),
    /// Time to look at the time.
    Tick(u64),
}

/// What a subject caches of a disk; nothing without a subject.
#[derive(Clone, Copy)]
pub(crate) struct DiskCache<'a>(pub Option<(&'a dyn Subject, DiskId)>);

impl DiskCache<'_> {
    fn clean(&self, offset: u64, len: u64) -> Vec<Cached> {
        let cached = |(block, sum, written)| Cached {
            block,
            sum,
            written,
        };
        let sums = self.0.map(|(s, id)| s.clean_sums(id, offset, len));
        sums.into_iter().flatten().map(cached).collect()
    }

    fn drop_unlike(&self, offset: u64, right: &[u32]) {
        if let Some((subject, id)) = self.0 {
            subject.drop_unlike(id, offset, right);
        }
    }
}

/// A note on its way: to the file first, and then, if the legs' states have changed, to the record.
struct Noting {
    seq: u64,
    stamps: MirrorStamps,
    touched: Regions,
    /// Legs of which it says that all of them has to be copied, or was, after what has become of them last. It may say
    /// the same of one that was not there, or comes back with something else only now, but that is older.
    knows: Vec<Uuid>,
    /// What came of the file.
    filed: Option<bool>,
}

struct Leg {
    id: Uuid,
    number: u8,
    device: SimDevice,
    mood: Mood,
    /// Its operations that are not answered, and those of them that hang, or take long.
    flying: BTreeMap<u64, IoId>,
    hung: BTreeSet<u64>,
    /// What it once held, to come back with.
    image: Option<crate::device::Image>,
    /// It holds something else than it was left with.
    changed: bool,
    next_ns: u64,
}

/// See the module.
pub(crate) struct Mirrored {
    target: Target,
    size: u64,
    align: u64,
    base: Base,
    tear: Tear,
    rng: Prng,
    fault: LegFault,
    limits: Limits,
    legs: Vec<Leg>,
    ever: u8,
    machine: Option<Machine>,
    /// What the disk's record says of the legs; and the file, unless it is lost.
    record: MirrorStamps,
    notes: Option<MirrorNotes>,
    sequence: u64,
    noting: Option<Noting>,
    /// The file could not be written: the record says so.
    void: bool,
    removing: Option<Removal>,
    lie: Option<Lie>,
    asked: BTreeMap<ReqId, IoOp>,
    next_req: ReqId,
    answers: BTreeMap<ReqId, IoDone>,
    reads: BTreeMap<IoId, (Buf, usize)>,
    /// The tick that counts, and whether it is on its way.
    tick: (u64, bool),
    due: Vec<(Option<u64>, Due)>,
    /// Legs get into trouble: now, and at starts.
    rough: bool,
    harsh: bool,
    /// Starts in a row without a leg that holds the disk.
    waits: u32,
    /// The time, as it was told last.
    last_ns: u64,
    /// It would be a good moment for the process to die.
    pub(crate) wants_crash: bool,
    /// The pool takes no records.
    pub(crate) pool_gone: bool,
    /// What happened to it, for who counts that; and in words, if anybody reads them.
    pub(crate) events: Vec<Event>,
    pub(crate) said: Vec<String>,
    pub(crate) tracing: bool,
    /// Lent by the world as long as something is asked of it.
    pub(crate) book: Book,
}

/// What an origin is made of.
pub(crate) struct Shape {
    pub target: Target,
    pub size: u64,
    pub align: u64,
    pub base: Base,
    pub tear: Tear,
    /// Legs at first.
    pub legs: u64,
    /// Some of them hold something else, and are to be copied to.
    pub fresh: bool,
    /// Not all of them are there at every start.
    pub harsh: bool,
    pub fault: LegFault,
}

impl Mirrored {
    pub fn new(shape: Shape, mut rng: Prng) -> Mirrored {
        let Shape {
            target,
            size,
            align,
            base,
            tear,
            legs,
            fresh,
            harsh,
            fault,
        } = shape;
        let limits = Limits {
            leg_ns: *rng.pick(&[2_000_000_000, 10_000_000_000]),
            idle_ns: *rng.pick(&[50_000_000, 1_000_000_000]),
            chunk: *rng.pick(&[4, 8, 16]) * BLOCK as u64,
            chunks: *rng.pick(&[1, 3]),
            rate: 0,
            scrub_rate: *rng.pick(&[0, 4 << 20]),
            retry_ns: 100_000_000,
            unstick_ns: 2_000_000_000,
        };
        let mut mirrored = Mirrored {
            target,
            size,
            align,
            base,
            tear,
            rng,
            fault,
            limits,
            legs: Vec::new(),
            ever: 0,
            machine: None,
            record: MirrorStamps {
                generation: 1,
                open: false,
                unknown: false,
                legs: Vec::new(),
                marks: Vec::new(),
            },
            notes: None,
            sequence: 0,
            noting: None,
            void: false,
            removing: None,
            lie: None,
            asked: BTreeMap::new(),
            next_req: 1,
            answers: BTreeMap::new(),
            reads: BTreeMap::new(),
            tick: (0, false),
            due: Vec::new(),
            rough: false,
            harsh,
            // Who makes a mirror has all of its legs.
            waits: 1,
            last_ns: 0,
            wants_crash: false,
            pool_gone: false,
            events: Vec::new(),
            said: Vec::new(),
            tracing: false,
            book: Book::default(),
        };
        for n in 0..legs {
            let whole = fresh && n > 0;
            let leg = mirrored.make_leg(whole);
            mirrored.record.legs.push(LegStamp {
                id: leg.id,
                generation: u64::from(!whole),
                state: match whole {
                    true => LegState::Behind,
                    false => LegState::Current,
                },
                whole,
                copied: 0,
                left: (0, 0),
            });
            mirrored.legs.push(leg);
        }
        mirrored
    }

    /// A leg, which holds the disk or something else.
    fn make_leg(&mut self, foreign: bool) -> Leg {
        self.ever += 1;
        let number = self.ever;
        let base = match (self.base, foreign) {
            // No disk has this number.
            (Base::Stamped { holes, size, .. }, true) => Base::Stamped {
                uid: u8::MAX,
                holes,
                size,
            },
            (base, _) => base,
        };
        let rng = self.rng.fork();
        let mut device = SimDevice::new(self.target, self.size, self.align, base, self.tear, rng);
        device.flush_ns = *self.rng.pick(&[0, 0, 2_000_000]);
        Leg {
            id: Uuid::from_bytes([number; 16]),
            number,
            device,
            mood: Mood::Well,
            flying: BTreeMap::new(),
            hung: BTreeSet::new(),
            image: None,
            changed: false,
            next_ns: 0,
        }
    }

    fn say(&mut self, what: impl FnOnce() -> String) {
        if self.tracing {
            self.said.push(what());
        }
    }

    pub fn is_open(&self) -> bool {
        self.machine.is_some()
    }

    /// Operations of the engine that are not answered.
    pub fn busy(&self) -> usize {
        self.asked.len() + self.answers.len()
    }

    /// What is to happen from now on: after so much time, or when it is let go.
    pub fn take_due(&mut self) -> Vec<(Option<u64>, Due)> {
        std::mem::take(&mut self.due)
    }

    /// Starts it, with the legs that are there; false if none of them holds the disk.
    pub fn open(&mut self, now: u64, cache: DiskCache) -> Result<bool, String> {
        if self.is_open() {
            return Ok(true);
        }
        let members: Vec<LegStamp> = self.record.legs.clone();
        self.legs
            .retain(|leg| members.iter().any(|m| m.id == leg.id));
        let place = |leg: &Leg| members.iter().position(|m| m.id == leg.id);
        self.legs.sort_by_key(place);
        // One that the record is older than may not be lost: that would be a second failure.
        let generation = self.file_says().map(|says| says.generation);
        let told = !self.void && generation == Some(self.record.generation);
        if self.harsh && told && self.rng.chance(1, 20) {
            self.say(|| "the file with the mirror's notes is lost".to_owned());
            self.events.push(Event::NotesLost);
            self.notes = None;
        }
        let notes = self.notes.clone();
        let (stamps, touched, _) = believed(self.record.clone(), notes, self.size, REGION);
        let mut stamps = stamps.with_legs(&members);
        let all = !self.harsh || self.waits > 0 || self.rng.chance(2, 3);
        let present: Vec<bool> = (0..self.legs.len())
            .map(|_| all || self.rng.chance(2, 3))
            .collect();
        self.exchange(&mut stamps, &present);
        for (leg, present) in self.legs.iter_mut().zip(&present) {
            leg.mood = match present {
                true => Mood::Well,
                false => Mood::Gone,
            };
            leg.device.faults = crate::device::Faults::default();
            leg.device.revive();
            if *present {
                // As the daemon does: what a program that was killed left in a cache must be as durable as what is
                // read from it.
                leg.device.flush_now();
            }
        }
        let known = touched.is_some();
        self.say(|| format!("opens with {present:?}, regions known: {known}, {stamps:?}"));
        let opening = Opening {
            size: self.size,
            region: REGION,
            stamps,
            touched,
            present,
            repair: None,
            limits: self.limits,
        };
        #[cfg(feature = "mutations")]
        hearth_mirror::faults::believe(
            self.fault == LegFault::Rule(hearth_mirror::faults::Fault::StaleBelieved),
        );
        let machine = match Machine::open(opening, now) {
            Ok(machine) => machine,
            Err(NoneCurrent { missing }) if all => {
                return Err(format!(
                    "no leg holds the disk although all are there: {missing:?}"
                ));
            }
            Err(NoneCurrent { .. }) => {
                self.waits += 1;
                self.events.push(Event::NoLegHoldsIt);
                return Ok(false);
            }
        };
        #[cfg(feature = "mutations")]
        let machine = {
            let mut machine = machine;
            if let LegFault::Rule(rule) = self.fault {
                machine.break_rule(Some(rule));
            }
            machine
        };
        self.machine = Some(machine);
        self.waits = 0;
        self.act(now, cache)?;
        Ok(true)
    }

    /// The engine asks for something.
    pub fn submit(&mut self, now: u64, op: IoOp, cache: DiskCache) -> Result<(), String> {
        let (kind, offset, len) = (op.kind, op.offset, op.len);
        let what = match kind {
            OpKind::Read => What::Read,
            OpKind::Write => What::Write,
            OpKind::Flush => What::Flush,
            OpKind::WriteZeroes { punch } => What::Zero { punch },
            OpKind::Discard => What::Zero { punch: true },
        };
        if what != What::Flush && (len == 0 || offset + len > self.size) {
            return Err(format!("{kind:?} of {len} bytes at {offset} of a mirror"));
        }
        let req = self.next_req;
        self.next_req += 1;
        self.asked.insert(req, op);
        let Some(machine) = &mut self.machine else {
            return Err("I/O of an origin that is not open".to_owned());
        };
        machine.request(now, req, what, offset, len);
        self.act(now, cache)
    }

    /// Something ends; what the engine asked for and is done.
    pub fn end(&mut self, now: u64, due: Due, cache: DiskCache) -> Result<Option<IoDone>, String> {
        match due {
            Due::Answer(req) => return Ok(self.answers.remove(&req)),
            Due::Leg(number, token) => {
                let Some(i) = self.legs.iter().position(|l| l.number == number) else {
                    return Ok(None);
                };
                self.end_leg(now, i, token)?;
            }
            Due::Note(seq) => self.note_on(now, seq),
            Due::Removed(number) => self.removed(number),
            Due::Tick(n) if n == self.tick.0 => {
                self.tick.1 = false;
                if let Some(machine) = &mut self.machine {
                    machine.tick(now);
                }
                self.act(now, cache)?;
                self.call_back(now);
            }
            Due::Tick(_) => {}
        }
        self.act(now, cache)?;
        Ok(None)
    }

    fn end_leg(&mut self, now: u64, i: usize, token: u64) -> Result<(), String> {
        let leg = &mut self.legs[i];
        leg.hung.remove(&token);
        let Some(io) = leg.flying.remove(&token) else {
            return Ok(());
        };
        let number = leg.number;
        let finished = match self.book.fails(self.target, Some(number), token) {
            Some(how) => {
                let failed = leg.device.fail(token, how.tears(), ANSWER_NS);
                if how.takes_device() {
                    leg.device.kill();
                    leg.mood = Mood::Broken;
                }
                failed
            }
            None => leg.device.complete(token, ANSWER_NS),
        };
        let Some(finished) = finished else {
            return Ok(());
        };
        if let Some(violation) = leg.device.violation.take() {
            return Err(format!("leg {}: {violation}", leg.number));
        }
        let result = finished.done.result;
        self.say(|| format!("leg {number} ends {io}: {result:?}"));
        if let Some(machine) = &mut self.machine {
            machine.done(now, io, result, false);
        }
        Ok(())
    }

    /// Does what the rules ask for.
    pub fn act(&mut self, now: u64, cache: DiskCache) -> Result<(), String> {
        self.last_ns = now;
        while let Some(machine) = &mut self.machine {
            let actions = machine.actions();
            if actions.is_empty() {
                break;
            }
            for action in actions {
                self.take(now, action, cache)?;
            }
        }
        self.want_tick();
        Ok(())
    }

    /// Sees to it that time is looked at again.
    fn want_tick(&mut self) {
        let Some(machine) = &self.machine else {
            return;
        };
        if self.tick.1 {
            return;
        }
        let out = |l: &hearth_mirror::machine::LegReport| l.state == LegState::Out && !l.removed;
        let busy = machine.is_busy() || !machine.is_idle();
        if busy || !machine.touched().is_empty() || machine.report().iter().any(out) {
            self.tick = (self.tick.0 + 1, true);
            let pace = PACE_NS[usize::from(!busy)];
            self.due.push((Some(pace), Due::Tick(self.tick.0)));
        }
    }

    fn take(&mut self, now: u64, action: Action, cache: DiskCache) -> Result<(), String> {
        if self.tracing {
            let text = format!("{action:?}");
            self.say(|| text.chars().take(2000).collect());
        }
        match action {
            Action::Io {
                io,
                leg,
                what,
                offset,
                len,
                data,
            } => self.send(io, leg, what, (offset, len), data)?,
            Action::Answer { req, result, data } => self.answer(req, result, data)?,
            Action::Release(io) => {
                self.reads.remove(&io);
            }
            Action::Note {
                seq,
                stamps,
                touched,
            } => {
                stamps.check().map_err(|e| e.to_string())?;
                let knows = self.known_by(&stamps);
                let noting = Noting {
                    seq,
                    stamps,
                    touched,
                    knows,
                    filed: None,
                };
                if self.noting.replace(noting).is_some() {
                    return Err("a mirror makes two notes at a time".to_owned());
                }
                self.note_later(seq);
            }
            Action::Lost { leg, .. } => {
                self.events.push(Event::LegLost);
                let wait = self.rng.between(1, 20) * 100_000_000;
                if let Some(leg) = self.legs.get_mut(leg) {
                    leg.next_ns = now + wait;
                }
            }
            Action::Current { .. } => self.events.push(Event::LegBack),
            Action::Repaired { .. } => self.events.push(Event::LegRepaired),
            Action::Compare {
                check,
                offset,
                len,
                reads,
                prefer,
            } => {
                let mut held: Vec<(usize, BufSlice)> = Vec::new();
                for (leg, io) in &reads {
                    let (buf, _) = self.reads.get(io).ok_or("a scrub compares what is gone")?;
                    held.push((*leg, buf.slice(0, len as usize)));
                }
                let mut known = cache.clean(offset, len);
                self.lie_about(check, (offset, len), &mut held, &mut known, prefer);
                let held: Vec<(usize, &[u8])> = held.iter().map(|(l, b)| (*l, b.bytes())).collect();
                let found = compare(offset, &held, &known, prefer);
                self.judge_findings(check, &found.findings)?;
                if let Some(machine) = &mut self.machine {
                    machine.compared(now, check, found);
                }
            }
            Action::Settled {
                read,
                from,
                offset,
                len,
            } => self.settle(read, from, (offset, len), cache)?,
            Action::Scrubbed(end) => {
                if end.whole {
                    self.events.push(Event::Scrubbed);
                }
            }
        }
        Ok(())
    }

    fn send(
        &mut self,
        io: IoId,
        leg: usize,
        what: What,
        range: (u64, u64),
        data: Data,
    ) -> Result<(), String> {
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
                let buf = Buf::zeroed(len as usize);
                bufs.push(buf.slice(0, len as usize));
                self.reads.insert(io, (buf, len as usize));
            }
            (What::Write, Data::Request(req)) => {
                let op = self.asked.get(&req).ok_or("a write of what was answered")?;
                bufs = op.bufs.clone();
            }
            (What::Write, Data::Part(read, from)) => {
                let (buf, _) = self.reads.get(&read).ok_or("a copy of what is gone")?;
                bufs.push(buf.slice(from as usize, len as usize));
            }
            (What::Write, Data::Read(read)) => {
                let (buf, len) = self.reads.get(&read).ok_or("a copy of what is gone")?;
                bufs.push(buf.slice(0, *len));
                if bufs.iter().all(|b| b.bytes().iter().all(|byte| *byte == 0)) {
                    kind = OpKind::WriteZeroes { punch: true };
                    bufs.clear();
                }
            }
            _ => {}
        }
        let Some(leg) = self.legs.get_mut(leg) else {
            return Err("I/O of a leg that is not there".to_owned());
        };
        let op = IoOp {
            id: io,
            target: self.target,
            kind,
            offset,
            len,
            bufs,
            crcs: SmallVec::new(),
            sums: false,
            class: Class::Foreground,
        };
        let doomed = self.book.begin(&op, Some(leg.number), true);
        let (token, mut time) = leg.device.submit(op);
        if doomed {
            self.book.name(token);
            time = time.filter(|_| !self.book.hangs());
        }
        if let Some(violation) = leg.device.violation.take() {
            return Err(format!("leg {}: {violation}", leg.number));
        }
        leg.flying.insert(token, io);
        if time.is_none_or(|time| time > self.limits.leg_ns / 8) {
            leg.hung.insert(token);
        }
        self.due.push((time, Due::Leg(leg.number, token)));
        Ok(())
    }

    fn answer(
        &mut self,
        req: ReqId,
        result: Result<(), IoError>,
        data: Option<IoId>,
    ) -> Result<(), String> {
        let Some(mut op) = self.asked.remove(&req) else {
            return Err(format!("a mirror answers {req} twice"));
        };
        if op.kind == OpKind::Read && result.is_ok() {
            let read = data.and_then(|io| self.reads.get(&io));
            let (buf, len) = read.ok_or("a read is answered with what is gone")?;
            let mut at = 0;
            for to in &mut op.bufs {
                let n = to.len().min(len - at);
                to.bytes_mut()[..n].copy_from_slice(buf.slice(at, n).bytes());
                at += n;
            }
        }
        self.answers.insert(req, op.done(result, ANSWER_NS));
        self.due.push((Some(ANSWER_NS), Due::Answer(req)));
        Ok(())
    }

    fn note_later(&mut self, seq: u64) {
        let time = self.rng.between(50_000, 20_000_000);
        self.due.push((Some(time), Due::Note(seq)));
    }

    /// The file has it, or the record, or neither.
    fn note_on(&mut self, now: u64, seq: u64) {
        let Some(mut noting) = self.noting.take().filter(|n| n.seq == seq) else {
            return;
        };
        // One of the two has to be possible.
        if noting.filed == Some(false) && self.pool_gone {
            self.file(&noting);
            noting.filed = Some(true);
        }
        let Some(filed) = noting.filed else {
            // With the pool gone there would be no place left.
            let fails = self.rough && !self.pool_gone && self.rng.chance(1, 200);
            let changed = self.void || self.file_says() != Some(&noting.stamps);
            if !fails {
                self.file(&noting);
            }
            self.void |= fails;
            if fails || changed {
                noting.filed = Some(!fails);
                self.noting = Some(noting);
                return self.note_later(seq);
            }
            return self.noted(now, &noting, true);
        };
        let recorded = self.write_record(&noting.stamps, !filed);
        self.void &= !(filed && recorded);
        self.noted(now, &noting, filed || recorded);
    }

    /// Legs whose state a note that is begun now gives as the mirror was told it.
    fn known_by(&self, stamps: &MirrorStamps) -> Vec<Uuid> {
        let report = self.machine.as_ref().map_or_else(Vec::new, Machine::report);
        let live = |i: usize| report.get(i).is_some_and(|l| l.state != LegState::Out);
        let told = |leg: &Leg| {
            let stamp = stamps.legs.iter().find(|l| l.id == leg.id);
            stamp.is_some_and(|l| match l.state {
                LegState::Current => true,
                LegState::Behind => l.whole,
                LegState::Out => false,
            })
        };
        let legs = self.legs.iter().enumerate();
        let known = legs.filter(|(i, leg)| live(*i) && told(leg));
        known.map(|(_, leg)| leg.id).collect()
    }

    fn file_says(&self) -> Option<&MirrorStamps> {
        self.notes.as_ref().map(|n| &n.stamps)
    }

    fn file(&mut self, noting: &Noting) {
        self.sequence += 1;
        self.notes = Some(MirrorNotes {
            serial: Uuid::from_bytes([7; 16]),
            sequence: self.sequence,
            region: REGION,
            regions: u64::from(noting.touched.count()),
            stamps: noting.stamps.clone(),
            touched: noting.touched.words().to_vec(),
        });
    }

    fn write_record(&mut self, stamps: &MirrorStamps, unknown: bool) -> bool {
        if self.pool_gone {
            return false;
        }
        // Which legs there are is not the mirror's to say.
        self.record = stamps.with_legs(&self.record.legs);
        self.record.unknown = unknown;
        true
    }

    fn noted(&mut self, now: u64, noting: &Noting, made: bool) {
        let seq = noting.seq;
        for leg in self.legs.iter_mut().filter(|_| made) {
            // From now on it is known that all of it has to be copied; until then each start, and each return, finds
            // it out anew.
            leg.changed &= !noting.knows.contains(&leg.id);
        }
        self.say(|| format!("note {seq} is made: {made}"));
        if let Some(machine) = &mut self.machine {
            machine.noted(now, seq, made);
        }
    }

    /// The process has died. `power`: all legs have lost theirs as well; `some`: each may have.
    pub fn crash(&mut self, power: bool, some: bool) {
        if let Some(noting) = self.noting.take() {
            let filed = noting.filed.unwrap_or_else(|| {
                let filed = self.rng.chance(1, 2);
                if filed {
                    self.file(&noting);
                }
                filed
            });
            if filed && self.rng.chance(1, 2) {
                self.write_record(&noting.stamps, false);
            }
        }
        self.removal_at_crash();
        self.forget();
        for leg in &mut self.legs {
            match power || some && self.rng.chance(1, 2) {
                true => leg.device.power_cut(),
                false => leg.device.process_death(),
            }
        }
    }

    fn forget(&mut self) {
        self.machine = None;
        self.asked.clear();
        self.answers.clear();
        self.reads.clear();
        self.due.clear();
        self.tick = (self.tick.0 + 1, false);
        for leg in &mut self.legs {
            leg.flying.clear();
            leg.hung.clear();
        }
    }

    /// The process ends in order, and so does the mirror, if it has the time.
    pub fn leave(&mut self, now: u64) -> Result<(), String> {
        self.heal();
        let rounds = match self.rng.chance(1, 4) {
            true => self.rng.below(20) as u32,
            false => GOODBYE_ROUNDS,
        };
        let none = DiskCache(None);
        for round in 0..rounds {
            let now = now + u64::from(round) * PACE_NS[0];
            self.due.clear();
            if self.machine.as_mut().is_none_or(|m| m.close(now)) {
                break;
            }
            self.act(now, none)?;
            for i in 0..self.legs.len() {
                let tokens: Vec<u64> = self.legs[i].flying.keys().copied().collect();
                for token in tokens {
                    self.end_leg(now, i, token)?;
                }
            }
            if let Some(seq) = self.noting.as_ref().map(|n| n.seq) {
                self.note_on(now, seq);
            }
            self.act(now, none)?;
            if let Some(machine) = &mut self.machine {
                machine.tick(now);
            }
            self.act(now, none)?;
        }
        self.crash(false, false);
        Ok(())
    }

    /// All legs hold the disk, durably, and nothing is under way: so it has to be in the end.
    pub fn is_whole(&self) -> bool {
        let Some(machine) = &self.machine else {
            return false;
        };
        let whole = |l: &hearth_mirror::machine::LegReport| {
            l.removed || l.state == LegState::Current && l.behind == 0
        };
        machine.is_idle()
            && machine.scrub_report().is_none()
            && self.removing.is_none()
            && machine.report().iter().all(whole)
            && machine.touched().is_empty()
    }

    /// A block as it is stored on each leg that counts.
    pub fn stored(&self, block: usize) -> Vec<(u8, [u8; BLOCK])> {
        let counts =
            |l: &&Leg| self.record.legs.iter().any(|r| r.id == l.id) && !self.is_removed(l);
        let legs = self.legs.iter().filter(counts);
        legs.map(|l| (l.number, l.device.stored_block(block)))
            .collect()
    }

    fn is_removed(&self, leg: &Leg) -> bool {
        let at = self.legs.iter().position(|l| l.id == leg.id);
        let report = self.machine.as_ref().map(Machine::report);
        report
            .zip(at)
            .is_some_and(|(report, at)| report.get(at).is_some_and(|l| l.removed))
    }

    /// Blocks that a power cut may change on some leg.
    pub fn volatile_blocks(&self) -> BTreeSet<u64> {
        let legs = self.legs.iter();
        legs.flat_map(|l| l.device.volatile_blocks()).collect()
    }

    /// Somebody else than the engine flushes.
    pub fn flush_now(&mut self) {
        self.legs.iter_mut().for_each(|l| l.device.flush_now());
    }

    pub fn explain(&self) -> String {
        let legs: Vec<String> = (self.legs.iter())
            .map(|l| format!("{}: {:?}, {} in flight", l.number, l.mood, l.flying.len()))
            .collect();
        format!("legs {legs:?}, {:#?}", self.machine)
    }
}
