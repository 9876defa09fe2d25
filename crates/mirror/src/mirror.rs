//! A mirror as the rest of Hearth sees it: one origin.

use crate::driver::{
    Driver, Inbox, Order, Rest, ToKeep, is_another, keep_notes, look, not_blank, why_text,
};
use crate::habits::{Habits, Wall};
use crate::machine::{LegReport, Limits, Machine, Opening};
use crate::marks::judge;
use crate::news::{News, Witness};
use crate::regions::Regions;
use crate::sample::{Likeness, Sample, strangers};
use crate::scrub::{Cache, ScrubOrder};
use hearth_fault::Fault;
use hearth_format::Uuid;
use hearth_format::mirror::{LegState, Mark, MirrorNotes, MirrorStamps, region_bytes};
use hearth_io::remote::LegStatus;
use hearth_io::{
    BLOCK, Device, Job, Link, ProactorError, Remote, Target, Targets, WakeHandle, now_ns, proactor,
};
use std::any::Any;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Longest wait for a mirror's thread at the end.
const END_TIME: Duration = Duration::from_secs(15);

/// Time in which it is noticed that a leg does not answer, and noted durably that it is out.
const TAKING_OUT: Duration = Duration::from_millis(250);

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where it is kept what is known of a mirror's legs.
pub trait Book: Send + Sync {
    /// Makes notes durable, somewhere where they are found again. Blocks. `changed`: their stamps are not
    /// those of the notes before.
    fn store(&self, notes: &MirrorNotes, changed: bool) -> io::Result<()>;

    /// Keeps how the mirror is copied to and scrubbed. Blocks.
    fn remember(&self, habits: &Habits) -> io::Result<()>;
}

/// Opens legs.
pub trait LegOpener: Send + Sync {
    /// Opens the leg that is called so. Blocks.
    fn open(&self, name: &str) -> Result<Device, Fault>;
}

/// How long a leg may take over an operation, if whoever asks the mirror is to have an answer within `timeout`: less by the
/// time in which it is noticed, and noted durably, that the leg is out.
pub fn leg_timeout(timeout: Duration) -> Duration {
    timeout - (timeout / 8).min(TAKING_OUT)
}

pub(crate) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// What a mirror is made of.
pub struct Setup {
    /// What it is called, for logs and people.
    pub name: String,
    /// The disk's serial number.
    pub serial: Uuid,
    /// Bytes.
    pub size: u64,
    /// What the disk's record says of the legs.
    pub stamps: MirrorStamps,
    /// What the state directory says, if there is something.
    pub notes: Option<MirrorNotes>,
    /// The legs, in the order of the stamps: what they are called, and what came of opening them.
    pub legs: Vec<(String, Result<Device, Fault>)>,
    /// Some of what each holds, of a disk of this size; nothing of one that is not there.
    pub samples: Vec<Vec<Sample>>,
    /// How long whoever asks waits for an answer at most, while there is a leg that gives one.
    pub timeout: Duration,
    /// Nothing is ever written.
    pub read_only: bool,
    /// Where notes go.
    pub book: Arc<dyn Book>,
    /// Opens legs again.
    pub opener: Arc<dyn LegOpener>,
    /// Who is told what happens to the legs.
    pub witness: Arc<dyn Witness>,
    /// How it is copied to and scrubbed.
    pub habits: Habits,
    /// What time it is: scrubs are due by the calendar.
    pub wall: Wall,
}

/// Why a mirror cannot be used.
#[derive(Debug)]
pub enum OpenError {
    /// No leg that holds the disk is there: these do, and why they are not.
    NoneCurrent(Vec<(String, Fault)>),
    /// All legs that hold the disk were changed by somebody else.
    Changed(Vec<String>),
    /// No leg that is there holds what was written last: what was found of each, and legs that are not there.
    RolledBack(Vec<(String, String)>, Vec<String>),
    /// No I/O driver.
    Driver(ProactorError),
    /// No thread, or nothing to wake it with.
    Thread(io::Error),
}

impl OpenError {
    /// What is wrong, and what to do about it.
    pub fn fault(&self) -> Fault {
        match self {
            OpenError::NoneCurrent(missing) => {
                let named: Vec<String> = missing
                    .iter()
                    .map(|(name, why)| format!("{name} ({})", why.what))
                    .collect();
                Fault::new(
                    format!(
                        "no leg of the mirror that is there holds the newest data; it is on {}",
                        named.join(", ")
                    ),
                    "bring that leg back; the others have missed writes and are not used",
                )
            }
            OpenError::Changed(names) => Fault::new(
                format!(
                    "somebody else has changed {} since Hearth left it, so that it is not known which leg is right",
                    names.join(" and ")
                ),
                "remove the disk with `hearth disk remove`, and add it again with the leg first that is right",
            ),
            OpenError::RolledBack(found, missing) => {
                let found: Vec<String> = (found.iter())
                    .map(|(name, why)| format!("{name} ({why})"))
                    .collect();
                let found = found.join(", ");
                let what = format!(
                    "no leg of the mirror that is there holds what was written last: {found}"
                );
                match missing.is_empty() {
                    true => Fault::new(
                        what,
                        "restore the newest state of a leg; or remove the disk with `hearth disk remove`, and add it again with the leg first that is right",
                    ),
                    false => Fault::new(what, format!("bring {} back", missing.join(" and "))),
                }
            }
            OpenError::Driver(e) => e.fault(),
            OpenError::Thread(e) => Fault::new(
                format!("cannot start the threads of a mirror: {e}"),
                "check the limits on processes and open files",
            ),
        }
    }
}

/// What the thread shares with those who use the mirror.
pub(crate) struct Shared {
    pub(crate) name: String,
    pub(crate) inbox: Mutex<Inbox>,
    pub(crate) wake: WakeHandle,
    pub(crate) report: Mutex<Vec<LegReport>>,
    pub(crate) witness: Arc<dyn Witness>,
    pub(crate) habits: Mutex<Habits>,
    pub(crate) cache: Mutex<Option<Arc<dyn Cache>>>,
    names: Mutex<Vec<(String, Option<Fault>)>>,
    size: AtomicU64,
}

impl Shared {
    pub(crate) fn leg_name(&self, leg: usize) -> String {
        let names = lock(&self.names);
        names
            .get(leg)
            .map_or_else(String::new, |(name, _)| name.clone())
    }

    pub(crate) fn set_fault(&self, leg: usize, fault: Option<Fault>) {
        if let Some((_, place)) = lock(&self.names).get_mut(leg) {
            *place = fault;
        }
    }

    pub(crate) fn add_leg(&self, name: String) {
        lock(&self.names).push((name, None));
    }

    pub(crate) fn set_size(&self, size: u64) {
        self.size.store(size, Ordering::Relaxed);
    }

    pub(crate) fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }
}

/// Several legs as one origin.
pub struct Mirror {
    shared: Arc<Shared>,
    targets: Arc<Targets>,
    align: u32,
    read_only: bool,
    since: Instant,
    /// Its other end is dropped when the thread ends.
    ended: Mutex<Option<std::sync::mpsc::Receiver<()>>>,
}

impl fmt::Debug for Mirror {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Mirror").field(&self.shared.name).finish()
    }
}

/// Of what the record says and what the state directory says, what counts; and where the legs may differ,
/// `None` if that is not known. `region` is how many bytes one has.
pub fn believed(
    stamps: MirrorStamps,
    notes: Option<MirrorNotes>,
    size: u64,
    region: u64,
) -> (MirrorStamps, Option<Regions>, u64) {
    let sequence = notes.as_ref().map_or(0, |n| n.sequence);
    let count = u32::try_from(size.div_ceil(region)).unwrap_or(u32::MAX);
    let Some(notes) = notes.filter(|n| n.stamps.generation >= stamps.generation) else {
        return (stamps, None, sequence);
    };
    // The record says that the regions could not be noted.
    let lost = stamps.unknown && notes.stamps.generation == stamps.generation;
    // A disk that has grown may have larger regions now.
    let fits = notes.region == region && !notes.stamps.unknown && !lost;
    let touched = fits.then(|| Regions::from_words(count, &notes.touched));
    (notes.stamps, touched, sequence)
}

/// What was written last to a mirror, and so is on every leg that is current.
pub fn marked(stamps: &MirrorStamps, notes: Option<&MirrorNotes>, size: u64) -> Vec<Mark> {
    let (stamps, touched, _) = believed(stamps.clone(), notes.cloned(), size, region_bytes(size));
    trusted(&stamps, touched.as_ref(), size)
}

/// The marks, unless the mirror may have been written since they were noted. They are never of regions that the same
/// notes call touched.
pub(crate) fn trusted(stamps: &MirrorStamps, touched: Option<&Regions>, size: u64) -> Vec<Mark> {
    if touched.is_none() && stamps.open {
        return Vec::new();
    }
    let marks = stamps.marks.iter();
    let inside = marks.filter(|mark| mark.block < size / BLOCK);
    inside.copied().collect()
}

/// A leg that is not as it was left.
struct Changed {
    leg: usize,
    /// It is a device that says it is another one, and nothing else is known.
    hardware: bool,
    why: String,
}

/// Legs that do not hold what they must hold: other disks, most likely.
fn replaced(
    stamps: &MirrorStamps,
    samples: &[Vec<Sample>],
    changed: &[Changed],
    skip: impl Fn(u64) -> bool,
) -> Vec<Changed> {
    let known = |i: usize| changed.iter().all(|c| c.leg != i);
    let there = |i: usize| Some(&samples.get(i)?[..]).filter(|s| !s.is_empty());
    let mut current: Vec<(usize, &[Sample])> = Vec::new();
    for (i, stamp) in stamps.legs.iter().enumerate() {
        if let Some(held) = there(i).filter(|_| stamp.state == LegState::Current && known(i)) {
            current.push((i, held));
        }
    }
    let mut found = strangers(&current, &skip);
    let reference = current.iter().find(|(i, _)| !found.contains(i));
    for (i, stamp) in stamps.legs.iter().enumerate() {
        let other = stamp.state != LegState::Current && known(i);
        let Some(((_, its), mine)) = reference.zip(there(i).filter(|_| other)) else {
            continue;
        };
        let more = |at: u64| skip(at) || stamp.whole && at >= stamp.copied;
        if Likeness::of(mine, its, more).is_another() {
            found.push(i);
        }
    }
    let changed = |leg| Changed {
        leg,
        hardware: false,
        why: "it does not hold what it held, and may be another one".to_owned(),
    };
    found.into_iter().map(changed).collect()
}

impl Mirror {
    /// Puts the legs together and starts the thread. Blocks only for that.
    pub fn open(setup: Setup) -> Result<Mirror, OpenError> {
        let Setup {
            name,
            serial,
            size,
            stamps,
            notes,
            legs,
            samples,
            timeout,
            read_only,
            book,
            opener,
            witness,
            habits,
            wall,
        } = setup;
        // Which legs there are is the record's to say: one may have been added or removed after the notes.
        let members = stamps.legs.clone();
        let (stamps, touched, sequence) = believed(stamps, notes, size, region_bytes(size));
        let marks = trusted(&stamps, touched.as_ref(), size);
        let mut stamps = stamps.with_legs(&members);
        let targets = Targets::new();
        let mut names = Vec::new();
        let mut present = Vec::new();
        let mut align = 512;
        let mut changed: Vec<Changed> = Vec::new();
        for (i, (leg, opened)) in legs.into_iter().enumerate() {
            let opened = opened.and_then(|device| match device.size() >= size {
                true => Ok(device),
                false => Err(Fault::new(
                    format!(
                        "it has {} bytes, fewer than the disk's {size}",
                        device.size()
                    ),
                    "replace it by a larger one",
                )),
            });
            present.push(opened.is_ok());
            let fault = match opened {
                Ok(device) => {
                    align = align.max(device.align());
                    if let Some(stamp) = stamps.legs.get_mut(i) {
                        let (then, now) = (stamp.left, look(&device));
                        let other = is_another(then, now);
                        let written = !stamps.open && then.0 != 0 && then.0 != now.0;
                        if other || written {
                            changed.push(Changed {
                                leg: i,
                                hardware: device.is_device(),
                                why: match device.is_device() {
                                    true => "another device is in its place".to_owned(),
                                    false => "somebody else has changed it since".to_owned(),
                                },
                            });
                        }
                        // From now on it is written by us: only which file it is can be told again.
                        stamp.left = (0, now.1);
                    }
                    targets.set(Target::Origin(i as u16), Some(Arc::new(device)));
                    None
                }
                Err(why) => Some(why),
            };
            names.push((leg, fault));
        }
        // A leg that somebody else wrote is not the disk any more, if another one still is.
        let current = |stamps: &MirrorStamps, i: usize| {
            stamps
                .legs
                .get(i)
                .is_some_and(|l| l.state == LegState::Current)
        };
        let untouched = |stamps: &MirrorStamps, changed: &[Changed]| {
            (0..stamps.legs.len()).any(|i| {
                current(stamps, i)
                    && present.get(i) == Some(&true)
                    && changed.iter().all(|c| c.leg != i)
            })
        };
        if !untouched(&stamps, &changed) {
            // All devices are others: they are on another host, or behind another adapter. What they hold tells.
            changed.retain(|c| !c.hardware);
        }
        let held = samples.iter().enumerate().filter(|(i, held)| {
            let known = changed.iter().any(|c| c.leg == *i);
            current(&stamps, *i) && !held.is_empty() && !known
        });
        let held: Vec<(usize, &[Sample])> = held.map(|(i, held)| (i, &held[..])).collect();
        let skip = |at: u64| {
            let region = (at / region_bytes(size)) as u32;
            touched.as_ref().is_none_or(|touched| touched.has(region))
        };
        let verdict = judge(&held, &marks, skip).map_err(|old| {
            let name = |leg: usize| names.get(leg).map_or_else(String::new, |(n, _)| n.clone());
            let known = changed.iter().filter(|c| current(&stamps, c.leg));
            let known = known.map(|c| (c.leg, c.why.clone()));
            let found: Vec<(usize, String)> = old.into_iter().chain(known).collect();
            // One of which nothing is known may hold it, there or not.
            let unknown = |i: &usize| found.iter().all(|(leg, _)| leg != i);
            let missing = (0..stamps.legs.len()).filter(|i| current(&stamps, *i) && unknown(i));
            let missing = missing.map(name).collect();
            let found = found.into_iter().map(|(leg, why)| (name(leg), why));
            OpenError::RolledBack(found.collect(), missing)
        })?;
        let old = verdict.old.into_iter().map(|(leg, why)| Changed {
            leg,
            hardware: false,
            why,
        });
        changed.extend(old);
        if let Some(touched) = &touched {
            let region = region_bytes(size);
            let skip = |offset: u64| touched.has((offset / region) as u32);
            let found = replaced(&stamps, &samples, &changed, skip);
            changed.extend(found);
        }
        if !untouched(&stamps, &changed) && changed.iter().any(|c| current(&stamps, c.leg)) {
            let name = |c: &Changed| names.get(c.leg).map(|(name, _)| name.clone());
            return Err(OpenError::Changed(
                changed.iter().filter_map(name).collect(),
            ));
        }
        for found in changed.iter().filter(|found| found.hardware) {
            let target = Target::Origin(found.leg as u16);
            let refusal = targets.get(target).and_then(|leg| not_blank(&leg));
            let name = names.get_mut(found.leg);
            if let Some((refusal, (_, fault))) = refusal.zip(name) {
                *fault = Some(refusal);
                targets.set(target, None);
                present[found.leg] = false;
            }
        }
        for found in &changed {
            if let Some((leg, _)) = names.get(found.leg) {
                witness.tell(News::Changed {
                    leg: leg.clone(),
                    why: found.why.clone(),
                });
            }
            if let Some(stamp) = stamps.legs.get_mut(found.leg) {
                stamp.state = LegState::Behind;
                stamp.whole = true;
                stamp.copied = 0;
            }
        }
        let region = region_bytes(size);
        let mut lacking = Regions::none(u32::try_from(size.div_ceil(region)).unwrap_or(u32::MAX));
        for at in verdict.lacking {
            lacking.insert((at / region) as u32);
        }
        let opening = Opening {
            size,
            region,
            stamps: stamps.clone(),
            touched: touched.clone(),
            present: present.clone(),
            repair: verdict.witness.map(|leg| (leg, lacking)),
            limits: Limits {
                leg_ns: nanoseconds(leg_timeout(timeout)),
                ..Limits::default()
            },
        };
        let machine = Machine::open(opening, now_ns()).map_err(|none| {
            for ((leg, _), _) in names.iter().zip(&present).filter(|(_, there)| **there) {
                witness.tell(News::Stale { leg: leg.clone() });
            }
            let missing = none.missing.iter().filter_map(|id| {
                let i = stamps.legs.iter().position(|l| l.id == *id)?;
                let (name, why) = names.get(i)?.clone();
                Some((name, why.unwrap_or_else(|| Fault::bare("it is there"))))
            });
            OpenError::NoneCurrent(missing.collect())
        })?;
        let first = MirrorNotes {
            serial,
            sequence,
            region,
            regions: size.div_ceil(region),
            stamps,
            touched: touched.unwrap_or_default().words().to_vec(),
        };
        let parts = Parts {
            name,
            names,
            size,
            machine,
            targets: targets.clone(),
            opener,
            book,
            first,
            witness,
            habits,
            wall,
            read_only,
            marks,
        };
        let (shared, ended) = start(parts)?;
        Ok(Mirror {
            shared,
            targets,
            align,
            read_only,
            since: Instant::now(),
            ended: Mutex::new(Some(ended)),
        })
    }

    fn order(&self, order: Order) {
        lock(&self.shared.inbox).orders.push(order);
        self.shared.wake.wake();
    }

    /// A new leg, which gets everything. Waits until the thread knows it.
    pub fn add(&self, id: Uuid, name: String, device: Device) {
        let (answer, answered) = channel();
        self.order(Order::Add {
            id,
            name,
            device: Box::new(device),
            answer,
        });
        // If it is late, the leg is seen a little later.
        let _ = answered.recv_timeout(END_TIME);
    }

    /// Takes the leg that is called so out for good; false if no other one holds the disk. Waits for the thread.
    pub fn remove(&self, name: &str) -> bool {
        let report = lock(&self.shared.report).clone();
        let names = lock(&self.shared.names).clone();
        let mut legs = names.iter().zip(report).enumerate();
        let mine = legs.find(|(_, ((n, _), leg))| n == name && !leg.removed);
        let Some(leg) = mine.map(|(i, _)| i) else {
            return true;
        };
        let (answer, answered) = channel();
        self.order(Order::Remove { leg, answer });
        answered.recv_timeout(END_TIME).unwrap_or(false)
    }

    /// Copies no more for now, or goes on.
    pub fn pause(&self, paused: bool) {
        self.order(Order::Pause(paused));
    }

    /// Bytes a second that are copied at most; 0 is no limit.
    pub fn set_rate(&self, rate: u64) {
        self.order(Order::Rate(rate));
    }

    /// The legs that are written now.
    pub fn devices(&self) -> Vec<Arc<Device>> {
        let report = lock(&self.shared.report).clone();
        let written = |leg: &LegReport| leg.present && !leg.removed && leg.state != LegState::Out;
        let written = report.iter().enumerate().filter(|(_, leg)| written(leg));
        let device = |(i, _): (usize, _)| self.targets.get(Target::Origin(i as u16));
        written.filter_map(device).collect()
    }

    /// Does what is asked about scrubs. Waits for the thread.
    pub fn scrub(&self, what: ScrubOrder) -> Result<(), Fault> {
        let (answer, answered) = channel();
        self.order(Order::Scrub { what, answer });
        let late = |_| Fault::new("the mirror does not answer", "try again later");
        answered.recv_timeout(END_TIME).map_err(late)?
    }

    /// How it is copied to and scrubbed, and what the scrub under way or the last one has found.
    pub fn habits(&self) -> Habits {
        lock(&self.shared.habits).clone()
    }

    /// From now on a scrub compares with what this cache has as well.
    pub fn set_cache(&self, cache: Arc<dyn Cache>) {
        *lock(&self.shared.cache) = Some(cache);
    }
}

type Started = (Arc<Shared>, std::sync::mpsc::Receiver<()>);

/// What the threads are started with.
struct Parts {
    name: String,
    names: Vec<(String, Option<Fault>)>,
    size: u64,
    machine: Machine,
    targets: Arc<Targets>,
    opener: Arc<dyn LegOpener>,
    book: Arc<dyn Book>,
    first: MirrorNotes,
    witness: Arc<dyn Witness>,
    habits: Habits,
    wall: Wall,
    read_only: bool,
    marks: Vec<Mark>,
}

/// Starts the two threads. The I/O driver belongs to the one that opens it.
fn start(parts: Parts) -> Result<Started, OpenError> {
    let (notes, given) = channel::<ToKeep>();
    let (told, opened) = sync_channel(1);
    let (ending, ended) = sync_channel::<()>(1);
    let Parts {
        name,
        names,
        size,
        machine,
        targets,
        opener,
        book,
        first,
        witness,
        habits,
        wall,
        read_only,
        marks,
    } = parts;
    let work = move || {
        let io = match proactor::open(targets.clone(), None) {
            Ok(io) => io,
            // Nobody listens only if who asked has died.
            Err(e) => return drop(told.send(Err(OpenError::Driver(e)))),
        };
        let legs = names.len();
        let shared = Arc::new(Shared {
            name,
            inbox: Mutex::default(),
            wake: io.wake_handle(),
            report: Mutex::new(machine.report()),
            witness,
            habits: Mutex::new(habits.clone()),
            cache: Mutex::default(),
            names: Mutex::new(names),
            size: AtomicU64::new(size),
        });
        if told.send(Ok(shared.clone())).is_err() {
            return;
        }
        let rest = Rest {
            targets,
            opener,
            notes,
            legs,
            habits,
            wall,
            read_only,
            marks,
        };
        Driver::new(shared, machine, io, rest).run();
        drop(ending);
    };
    let thread = |name: &str| std::thread::Builder::new().name(name.to_owned());
    thread("hearth-mirror")
        .spawn(work)
        .map_err(OpenError::Thread)?;
    let shared = opened
        .recv()
        .map_err(|_| OpenError::Thread(io::ErrorKind::BrokenPipe.into()))??;
    let of = shared.clone();
    let keep = move || keep_notes(&of, &*book, first, &given);
    thread("hearth-notes")
        .spawn(keep)
        .map_err(OpenError::Thread)?;
    Ok((shared, ended))
}

impl Remote for Mirror {
    fn name(&self) -> String {
        self.shared.name.clone()
    }

    fn size(&self) -> u64 {
        self.shared.size()
    }

    /// The mirror has grown when all its legs have.
    fn refresh_size(&self) -> io::Result<u64> {
        let size = self.shared.size();
        let report = lock(&self.shared.report).clone();
        let mut least = u64::MAX;
        for (i, leg) in report.iter().enumerate().filter(|(_, leg)| !leg.removed) {
            let device = self.targets.get(Target::Origin(i as u16));
            let there = device.filter(|_| leg.present && leg.state != LegState::Out);
            let Some(device) = there else {
                let name = self.shared.leg_name(i);
                return Err(io::Error::other(format!("its leg {name} is out")));
            };
            least = least.min(device.refresh_size()?);
        }
        if report.is_empty() || least <= size {
            return Ok(size);
        }
        let (answer, answered) = channel();
        self.order(Order::Grow {
            size: least,
            answer,
        });
        let late = |_| io::Error::other("it was not noted in time that the legs may differ there");
        let now = answered.recv_timeout(END_TIME).map_err(late)?;
        match now < least {
            true => Err(io::Error::other(
                "its legs are noted in pieces that are too small for that size while it is served",
            )),
            false => Ok(now),
        }
    }

    fn align(&self) -> u32 {
        self.align
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn push(&self, job: Job) {
        let mut inbox = lock(&self.shared.inbox);
        if inbox.stopped {
            drop(inbox);
            return drop(job);
        }
        inbox.jobs.push(job);
        drop(inbox);
        self.shared.wake.wake();
    }

    fn link(&self) -> Link {
        let mut link = Link::up();
        link.since = self.since;
        link
    }

    fn set_timeout(&self, timeout: Duration) {
        self.order(Order::Timeout(timeout));
    }

    fn hurry(&self) {}

    fn as_any(&self) -> Option<&(dyn Any + Send + Sync)> {
        Some(self)
    }

    fn legs(&self) -> Vec<LegStatus> {
        let names = lock(&self.shared.names).clone();
        let report = lock(&self.shared.report).clone();
        names
            .into_iter()
            .zip(report)
            .filter(|(_, leg)| !leg.removed)
            .map(|((name, fault), leg)| LegStatus {
                name,
                state: match (leg.state, leg.behind) {
                    (LegState::Current, 0) => "current",
                    (LegState::Current, _) => "checking",
                    (LegState::Behind, _) => "resyncing",
                    (LegState::Out, _) => "out",
                },
                behind: leg.behind,
                copied: leg.copied,
                reason: leg.why.map(|why| match fault {
                    Some(fault) => fault,
                    None => Fault::new(
                        why_text(why),
                        "see whether the device, mount or server works, or replace it with `hearth disk replace`",
                    ),
                }),
            })
            .collect()
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        lock(&self.shared.inbox).stop = true;
        self.shared.wake.wake();
        // A leg that hangs may hold the thread up; it ends when that does.
        if let Some(ended) = lock(&self.ended).take() {
            let _ = ended.recv_timeout(END_TIME);
        }
    }
}
