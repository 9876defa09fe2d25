//! The rules of a mirror, without I/O and without a clock: events in, actions out.
//!
//! **Legs.** One that is *current* holds every write that a flush has covered; only such legs are read. One
//! that is *behind* takes writes and is copied to; one that is *out* takes none. A leg that fails, or does
//! not answer in time, goes out, unless it is the last current one. From then on no write and no flush is
//! answered before the [notes](MirrorStamps) say so durably: else a crash could leave the wrong leg alone,
//! and it would be believed.
//!
//! **Regions.** Before a region is written, the notes say durably that it is touched: there the legs may
//! differ after a crash. It stays touched until all legs have the writes durably, and, while a leg is not
//! current, for as long as that leg lacks them.
//!
//! **After a crash** one leg is *chosen* for the touched regions, the others are copied from it. A read there
//! has to give the same answer for ever, also if the chosen leg dies next; so what it returns is first
//! copied to the other current legs (a *pin*), durably.
//!
//! **Order.** Writes, pins and copies hold their range; so all legs see two writes of one block in the same order,
//! and what is copied does not change under the copy.

mod copy;
mod legs;
mod notes;
mod requests;
mod scrub;

use crate::locks::Locks;
use crate::regions::Regions;
use copy::{Copy, Resync};
use hearth_format::Uuid;
use hearth_format::mirror::{LegStamp, LegState, MirrorStamps, REGIONS_MAX};
use hearth_io::IoError;
use requests::Request;
use scrub::Scrub;
pub use scrub::{
    Cached, Difference, Finding, Held, ScrubEnd, ScrubReport, Seen, UNDECIDED_MAX, decide,
};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Who asked, as the caller calls it.
pub type ReqId = u64;
/// An operation on a leg.
pub type IoId = u64;

/// What is done to a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Read it.
    Read,
    /// Write it.
    Write,
    /// Make what was written durable; has no range.
    Flush,
    /// Make it zeros; space may be freed.
    Zero {
        /// Space may be freed.
        punch: bool,
    },
}

/// Where the data of a write comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// There is none.
    None,
    /// What the request brought along.
    Request(ReqId),
    /// What this read of a leg has brought.
    Read(IoId),
    /// Of what this read of a leg has brought, what begins there.
    Part(IoId, u64),
}

/// What is to be done.
#[derive(Clone, Debug)]
pub enum Action {
    /// Do this on a leg and tell how it ended. A read gets memory of its own: one that hangs must not write into
    /// memory that somebody has taken back.
    Io {
        /// Its name.
        io: IoId,
        /// The leg.
        leg: usize,
        /// What.
        what: What,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// What is written.
        data: Data,
    },
    /// Answer. A read's data is what `data` has brought.
    Answer {
        /// Who asked.
        req: ReqId,
        /// How it ended.
        result: Result<(), IoError>,
        /// The read that brought it.
        data: Option<IoId>,
    },
    /// What this read has brought is not needed any more.
    Release(IoId),
    /// Make this durable and tell when it is.
    Note {
        /// Its number.
        seq: u64,
        /// What is known of the legs.
        stamps: MirrorStamps,
        /// Where they may differ.
        touched: Regions,
    },
    /// A leg went out.
    Lost {
        /// Which.
        leg: usize,
        /// Why.
        why: Why,
    },
    /// A leg is current again.
    Current {
        /// Which.
        leg: usize,
    },
    /// Compare what these reads of several legs have brought, with one another and with what else is known of it,
    /// and tell what was [found](Machine::compared).
    Compare {
        /// Its name.
        check: u64,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Legs and their reads.
        reads: Vec<(usize, IoId)>,
        /// The leg that is right where nothing else tells.
        prefer: Option<usize>,
    },
    /// From `offset` on all legs hold what this read has brought from its byte `from` on: what is cached of that and is
    /// something else has to be dropped, before this answers, and whatever is being read there.
    Settled {
        /// The read.
        read: IoId,
        /// Where in it.
        from: u64,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// A scrub has ended.
    Scrubbed(ScrubEnd),
    /// What could not be read from one leg was read from another and written to the first.
    Repaired {
        /// The leg that has it again.
        leg: usize,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
}

/// Why a leg went out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It answered with an error.
    Error(IoError),
    /// It did not answer in time.
    Silent,
    /// It was not there when the mirror was opened.
    Missing,
    /// Somebody took it out.
    Removed,
}

/// What bounds a mirror.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// How long a leg may take over an operation, nanoseconds.
    pub leg_ns: u64,
    /// For how long a region must not have been written before it is forgotten.
    pub idle_ns: u64,
    /// Bytes copied at a time.
    pub chunk: u64,
    /// Copies at a time, for each leg, while nobody else asks for anything.
    pub chunks: usize,
    /// Bytes a second that are copied at most; 0 is no limit.
    pub rate: u64,
    /// Bytes of the disk a second that a scrub compares at most; 0 is no limit.
    pub scrub_rate: u64,
    /// How long after notes that could not be made they are tried again.
    pub retry_ns: u64,
    /// How often regions are tried again that could be read nowhere.
    pub unstick_ns: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            leg_ns: 30_000_000_000,
            idle_ns: 5_000_000_000,
            chunk: 1 << 20,
            // One is read while another is written, and a little more where legs answer unevenly.
            chunks: 4,
            rate: 0,
            scrub_rate: SCRUB_RATE,
            retry_ns: 500_000_000,
            unstick_ns: 10_000_000_000,
        }
    }
}

/// A zeroing may take so long for so many bytes, beyond what anything may take: some disks have to write them.
const ZEROES_PER_SECOND: u64 = 16 << 20;

/// A scrub's rate unless another one is set: a third of what a hard disk can do, or less.
pub const SCRUB_RATE: u64 = 32 << 20;

/// What a mirror starts from.
#[derive(Clone, Debug)]
pub struct Opening {
    /// Bytes.
    pub size: u64,
    /// Bytes of a region.
    pub region: u64,
    /// What the notes say of the legs.
    pub stamps: MirrorStamps,
    /// Where they may differ; `None` if that is not known.
    pub touched: Option<Regions>,
    /// Which legs are there.
    pub present: Vec<bool>,
    /// A leg that counts, and the regions where others differ from it though nothing was noted.
    pub repair: Option<(usize, Regions)>,
    /// Bounds.
    pub limits: Limits,
}

/// Why a mirror cannot be used: no leg that is there is known to hold the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoneCurrent {
    /// Those that hold it, none of them there.
    pub missing: Vec<Uuid>,
}

/// One leg.
#[derive(Debug)]
struct Leg {
    stamp: LegStamp,
    /// A leg that is behind lacks what was written there. A current one may differ there from the chosen one.
    behind: Regions,
    /// Not to be copied for now: they cannot be read anywhere.
    stuck: Regions,
    resync: Option<Resync>,
    /// Operations it has not answered.
    load: usize,
    /// Those nobody waits for any more; they may still arrive.
    ghosts: HashSet<IoId>,
    /// What was sent to it may arrive yet, though it was answered.
    doubt: bool,
    /// The end of what it was asked for last.
    head: u64,
    /// Where most of what it is asked for lies.
    center: u64,
    /// It becomes current with this note.
    joining: Option<u64>,
    /// It was taken out of the mirror.
    removed: bool,
    /// It is there.
    present: bool,
    why: Option<Why>,
    /// Bytes copied to it.
    copied: u64,
}

/// Whose operation it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Request(u64),
    Copy(u64),
    Check(u64),
}

#[derive(Clone, Copy, Debug)]
struct Io {
    leg: usize,
    owner: Owner,
    what: What,
    len: u64,
    start_ns: u64,
}

/// What is known of a region that is touched.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    /// The note that says so.
    noted_by: u64,
    /// Writes under way.
    flying: u32,
    /// When the last one ended, counted in writes.
    last: u64,
    /// The same in time.
    last_ns: u64,
}

impl Use {
    /// One that the notes say of already, or that they have yet to say.
    fn known(known: bool) -> Use {
        Use {
            noted_by: u64::from(!known),
            ..Use::default()
        }
    }
}

/// See the module.
#[derive(Debug)]
pub struct Machine {
    size: u64,
    region: u64,
    limits: Limits,
    now: u64,
    legs: Vec<Leg>,
    /// The leg that counts where current ones may differ.
    chosen: usize,
    /// It counts since another one went out; true while what was copied to it is made durable.
    promoted: Option<(usize, bool)>,
    generation: u64,
    open: bool,
    uses: BTreeMap<u32, Use>,
    /// Writes that ended; and how many of them all legs have durably.
    clock: u64,
    flushed: u64,
    locks: Locks<Owner>,
    requests: HashMap<u64, Request>,
    ios: HashMap<IoId, Io>,
    copies: HashMap<u64, Copy>,
    scrub: Option<Scrub>,
    next: u64,
    /// The number of the note after the last, the one under way, and the last durable one.
    next_note: u64,
    flying_note: Option<u64>,
    note_wanted: bool,
    durable: u64,
    retry_note_ns: u64,
    /// Nothing that changes, and after an opening nothing at all, is answered before this note.
    barrier: u64,
    read_barrier: u64,
    held: Vec<(u64, Action)>,
    /// Who waits for a note, to write.
    waiting: Vec<(u64, Owner)>,
    paused: bool,
    budget: i64,
    budget_ns: u64,
    unstuck_ns: u64,
    next_clean_ns: u64,
    closing: Option<u64>,
    actions: Vec<Action>,
    #[cfg(any(test, feature = "faults"))]
    pub(crate) fault: Option<crate::faults::Fault>,
}

/// How a leg is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LegReport {
    /// What it is.
    pub state: LegState,
    /// Bytes it still has to get.
    pub behind: u64,
    /// Bytes copied to it since the mirror was opened.
    pub copied: u64,
    /// Why it is out.
    pub why: Option<Why>,
    /// It is there.
    pub present: bool,
    /// It was taken out for good.
    pub removed: bool,
}

impl Machine {
    /// Starts, or says why not.
    pub fn open(opening: Opening, now: u64) -> Result<Machine, NoneCurrent> {
        let Opening {
            size,
            region,
            stamps,
            touched,
            present,
            repair,
            limits,
        } = opening;
        let count = u32::try_from(size.div_ceil(region)).unwrap_or(u32::MAX);
        let known = touched.is_some();
        let mut touched = match touched {
            Some(touched) => touched,
            None if stamps.open => Regions::all(count),
            None => Regions::none(count),
        };
        let mut uses: BTreeMap<u32, Use> = touched.iter().map(|r| (r, Use::known(known))).collect();
        let (witness, differ) = match repair {
            Some((leg, differ)) => (Some(leg), differ),
            None => (None, Regions::none(count)),
        };
        for region in differ.iter().filter(|region| touched.insert(*region)) {
            uses.insert(region, Use::known(false));
        }
        let legs: Vec<Leg> = stamps
            .legs
            .iter()
            .zip(present)
            .map(|(stamp, present)| Leg::new(*stamp, count, present))
            .collect();
        let mut machine = Machine {
            size,
            region,
            limits,
            now,
            legs,
            chosen: 0,
            promoted: None,
            generation: stamps.generation,
            open: stamps.open,
            note_wanted: uses.values().any(|used| used.noted_by > 0),
            uses,
            clock: 0,
            flushed: 0,
            locks: Locks::new(),
            requests: HashMap::new(),
            ios: HashMap::new(),
            copies: HashMap::new(),
            scrub: None,
            next: 1,
            next_note: 1,
            flying_note: None,
            durable: 0,
            retry_note_ns: 0,
            barrier: 0,
            read_barrier: 0,
            held: Vec::new(),
            waiting: Vec::new(),
            paused: false,
            budget: 0,
            budget_ns: now,
            unstuck_ns: now,
            next_clean_ns: now,
            closing: None,
            actions: Vec::new(),
            #[cfg(any(test, feature = "faults"))]
            fault: None,
        };
        let legs = machine.legs.len().max(1) as u64;
        for (i, leg) in (0..).zip(&mut machine.legs) {
            leg.center = size / legs * i + size / legs / 2;
        }
        machine.begin(&touched, witness)?;
        Ok(machine)
    }

    /// Breaks a rule on purpose.
    #[cfg(any(test, feature = "faults"))]
    pub fn break_rule(&mut self, fault: Option<crate::faults::Fault>) {
        self.fault = fault;
    }

    #[cfg(any(test, feature = "faults"))]
    fn is_broken(&self, fault: crate::faults::Fault) -> bool {
        self.fault == Some(fault)
    }

    /// What is to be done now.
    pub fn actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// True if there is something to do for [`tick`](Self::tick) sooner than usual: what is out of time, or copied.
    pub fn is_busy(&self) -> bool {
        !self.ios.is_empty()
            || !self.copies.is_empty()
            || self.scrub.is_some()
            || self.legs.iter().any(Leg::is_copied_to)
    }

    /// True if nobody waits for an answer.
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty() && self.held.is_empty()
    }

    /// Time has passed.
    pub fn tick(&mut self, now: u64) {
        self.now = now;
        self.expire();
        self.clean();
        self.write_note();
        self.pump_copies();
        self.pump_scrub();
    }

    /// A leg has answered. `Err` of a write may be `in_doubt`: it may still arrive.
    pub fn done(&mut self, now: u64, io: IoId, result: Result<(), IoError>, in_doubt: bool) {
        self.now = now;
        let Some(found) = self.ios.remove(&io) else {
            // Nobody waits for it any more.
            let late = |leg: &&mut Leg| leg.ghosts.contains(&io);
            if let Some(leg) = self.legs.iter_mut().find(late) {
                leg.ghosts.remove(&io);
                leg.load = leg.load.saturating_sub(1);
                leg.doubt |= in_doubt;
            }
            self.actions.push(Action::Release(io));
            return;
        };
        if let Some(leg) = self.legs.get_mut(found.leg) {
            leg.load = leg.load.saturating_sub(1);
            leg.doubt |= in_doubt && result.is_err();
        }
        self.settle(io, found, result);
        self.pump_copies();
        self.pump_scrub();
    }

    /// What an operation's end means to its owner.
    fn settle(&mut self, id: IoId, io: Io, result: Result<(), IoError>) {
        match io.owner {
            Owner::Request(req) => self.request_io_ended(req, id, io, result),
            Owner::Copy(copy) => self.copy_io_ended(copy, id, io, result),
            Owner::Check(check) => self.check_io_ended(check, id, io, result),
        }
    }

    fn name(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    fn regions_of(&self, offset: u64, len: u64) -> std::ops::RangeInclusive<u32> {
        let last = (offset + len.max(1) - 1) / self.region;
        (offset / self.region) as u32..=last as u32
    }

    fn send(
        &mut self,
        leg: usize,
        owner: Owner,
        what: What,
        range: (u64, u64),
        data: Data,
    ) -> IoId {
        let io = self.name();
        let (offset, len) = range;
        if let Some(leg) = self.legs.get_mut(leg) {
            leg.load += 1;
            if what != What::Flush {
                leg.head = offset + len;
            }
            if what == What::Read {
                leg.drift(offset);
            }
        }
        self.ios.insert(
            io,
            Io {
                leg,
                owner,
                what,
                len,
                start_ns: self.now,
            },
        );
        self.actions.push(Action::Io {
            io,
            leg,
            what,
            offset,
            len,
            data,
        });
        io
    }

    /// Who has their turn on a range goes on.
    fn turns(&mut self, turns: Vec<Owner>) {
        for owner in turns {
            match owner {
                Owner::Request(req) => self.request_has_range(req),
                Owner::Copy(copy) => self.copy_has_range(copy),
                Owner::Check(check) => self.check_has_range(check),
            }
        }
    }

    /// The legs have grown, and so does the mirror: what is there of them is nobody's, and not the same. It may be used
    /// when this note [is durable](Self::is_noted). `None` if the mirror cannot become so large as it is.
    pub fn grow(&mut self, now: u64, size: u64) -> Option<u64> {
        self.now = now;
        if size < self.size || size.div_ceil(self.region) > REGIONS_MAX {
            return None;
        }
        let first = (self.size / self.region) as u32;
        self.size = size;
        let count = self.count();
        for (i, leg) in self.legs.iter_mut().enumerate() {
            leg.behind.grow(count);
            leg.stuck.grow(count);
            #[cfg(any(test, feature = "faults"))]
            if self.fault == Some(crate::faults::Fault::GrownTaken) {
                continue;
            }
            if i == self.chosen || !leg.is_live() {
                continue;
            }
            for region in first..count {
                leg.behind.insert(region);
                if let Some(resync) = &mut leg.resync {
                    resync.again(region);
                }
            }
        }
        let next = self.next_note;
        for region in first..count {
            self.uses.entry(region).or_insert_with(|| Use {
                noted_by: next,
                ..Use::default()
            });
        }
        if !self.open {
            self.open = true;
            self.generation += 1;
        }
        self.note_wanted = true;
        self.write_note();
        self.pump_copies();
        Some(next)
    }

    /// True if this note is durable.
    pub fn is_noted(&self, note: u64) -> bool {
        self.durable >= note
    }

    /// How the legs are.
    pub fn report(&self) -> Vec<LegReport> {
        let report = |leg: &Leg| LegReport {
            state: leg.stamp.state,
            behind: (u64::from(leg.behind.len()) * self.region).min(self.size),
            copied: leg.copied,
            why: leg.why,
            present: leg.present,
            removed: leg.removed,
        };
        self.legs.iter().map(report).collect()
    }
}
