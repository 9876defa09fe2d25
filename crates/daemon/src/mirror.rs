//! Mirrored origins: their legs are opened side by side, and what is known of them is kept in two places.
//!
//! The disk's record in the pool says which legs hold the disk; a file in the state directory says that, too, and
//! in which regions they may differ. Either of the two devices may die, or come back older than it was: whichever
//! says more counts. So a change of the legs is stored in both, and in one of them if the other cannot be.

mod blank;
mod habits;
pub(crate) mod news;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use hearth_engine::Engine;
use hearth_events::Events;
use hearth_fault::Fault;
use hearth_format::mirror::{LegStamp, LegState, Mark, MirrorNotes, MirrorStamps, NOTES_BYTES};
use hearth_format::{DiskRecord, Uuid};
use hearth_io::{BLOCK, Device, OriginSpec};
use hearth_mirror::{Book, Cache, Cached, Habits, LegOpener, Mirror, Sample, Setup, leg_timeout};
use hearth_origin::{Backing, How};

use crate::error::{Error, Kind, Result};
use crate::pool::Pool;

use blank::check_blank;
pub(crate) use blank::check_unused;

/// Longest wait for a leg when a mirror is opened; one that is slower is taken back later.
const LEG_TIME: Duration = Duration::from_secs(10);

/// What a new mirror starts from: the first leg's content counts.
pub(crate) fn new_stamps(legs: usize) -> MirrorStamps {
    let leg = |i: usize| LegStamp {
        id: Uuid::new_v4(),
        generation: u64::from(i == 0),
        state: if i == 0 {
            LegState::Current
        } else {
            LegState::Behind
        },
        whole: i > 0,
        copied: 0,
        left: (0, 0),
    };
    MirrorStamps {
        generation: 1,
        open: false,
        unknown: false,
        legs: (0..legs).map(leg).collect(),
        marks: Vec::new(),
    }
}

/// Where mirrors are noted in a state directory.
pub(crate) fn notes_dir(state_dir: &Path) -> PathBuf {
    state_dir.join("mirrors")
}

/// Forgets the notes of a disk that is gone.
pub(crate) fn forget(state_dir: &Path, serial: &Uuid) {
    let dir = notes_dir(state_dir);
    for path in [dir.join(serial.to_string()), habits::path(&dir, serial)] {
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                tracing::warn!("cannot remove {}: {e}", path.display());
            }
            _ => {}
        }
    }
}

/// Stores what is known of a mirror.
struct Shelf {
    serial: Uuid,
    path: PathBuf,
    habits: PathBuf,
    file: Mutex<Option<File>>,
    /// The file cannot be written: the record has to say that it says too little.
    void: AtomicBool,
    pool: Weak<Mutex<Pool>>,
}

impl Shelf {
    fn store_file(&self, notes: &MirrorNotes) -> io::Result<()> {
        let mut file = super::daemon::lock(&self.file);
        if file.is_none() {
            let made = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .custom_flags(libc::O_NOFOLLOW)
                .open(&self.path)?;
            if made.metadata()?.len() < NOTES_BYTES as u64 {
                // All of its room, now: later the file system may be full.
                let rest = vec![0; NOTES_BYTES];
                made.write_all_at(&rest, 0)?;
                made.sync_all()?;
                if let Some(dir) = self.path.parent() {
                    File::open(dir)?.sync_all()?;
                }
            }
            *file = Some(made);
        }
        let (at, bytes) = notes.encode().map_err(io::Error::other)?;
        let Some(file) = file.as_ref() else {
            return Err(io::ErrorKind::NotFound.into());
        };
        file.write_all_at(&bytes, at)?;
        file.sync_data()
    }

    /// True if the disk's record says so now; false if it has none yet, or none any more.
    fn store_record(&self, stamps: &MirrorStamps) -> io::Result<bool> {
        let Some(pool) = self.pool.upgrade() else {
            return Ok(false);
        };
        let stored = super::daemon::lock(&pool).change(|registry| {
            let mine = |disk: &&mut hearth_format::SharedRecord| disk.serial == self.serial;
            let id = registry.disks.iter_mut().find(mine).map(|disk| disk.id);
            let Some(record) = id.and_then(|id| registry.by_id_mut(id)) else {
                return Ok(false);
            };
            // Which legs there are is not the mirror's to say.
            record.mirror = Some(match &record.mirror {
                Some(known) => stamps.with_legs(&known.legs),
                None => stamps.clone(),
            });
            Ok(true)
        });
        stored.map_err(|e| io::Error::other(e.to_string()))
    }
}

impl Book for Shelf {
    fn remember(&self, habits: &Habits) -> io::Result<()> {
        habits::store(&self.habits, habits)
    }

    fn store(&self, notes: &MirrorNotes, changed: bool) -> io::Result<()> {
        let filed = self.store_file(notes);
        let void = self.void.swap(filed.is_err(), Ordering::Relaxed) || filed.is_err();
        if filed.is_ok() && !changed && !void {
            return Ok(());
        }
        let mut stamps = notes.stamps.clone();
        stamps.unknown = filed.is_err();
        let recorded = self.store_record(&stamps);
        match (filed, recorded) {
            (Ok(()), Ok(_)) | (Err(_), Ok(true)) => Ok(()),
            (Ok(()), Err(e)) => {
                tracing::warn!(
                    "which legs of a mirror are current is noted in {} alone: {e}",
                    self.path.display()
                );
                Ok(())
            }
            (Err(e), _) => Err(e),
        }
    }
}

/// Opens one leg after the other, as they are called.
struct Opener {
    how: How,
}

impl LegOpener for Opener {
    fn open(&self, name: &str) -> std::result::Result<Device, Fault> {
        let spec: OriginSpec = name
            .parse()
            .map_err(|e: hearth_io::spec::SpecError| e.fault())?;
        hearth_origin::open(&spec, &self.how).map_err(|e| e.fault())
    }
}

/// What came of opening a leg, and some of what it holds.
type Sampled = std::result::Result<(Device, Vec<Sample>), Fault>;

/// Does this for each leg side by side. A leg that does not answer within bounds counts as missing.
fn side_by_side<T: Send + 'static>(
    legs: usize,
    time: Duration,
    job: impl Fn(usize) -> T + Send + Sync + 'static,
) -> Vec<std::result::Result<T, Fault>> {
    let job = Arc::new(job);
    let (told, answers) = channel();
    let silent = || Err(Fault::new("it does not answer", "see whether it hangs"));
    let mut all: Vec<_> = (0..legs).map(|_| silent()).collect();
    for (i, place) in all.iter_mut().enumerate() {
        let (told, job) = (told.clone(), job.clone());
        // Nobody listens any more if it came too late.
        let work = move || drop(told.send((i, job(i))));
        let begun = std::thread::Builder::new()
            .name("hearth-leg".to_owned())
            .spawn(work);
        if let Err(e) = begun {
            *place = Err(Fault::new(
                format!("cannot start a thread: {e}"),
                "check the limit on processes",
            ));
        }
    }
    drop(told);
    let end = Instant::now() + time;
    while let Ok((i, done)) = answers.recv_timeout(end.saturating_duration_since(Instant::now())) {
        if let Some(place) = all.get_mut(i) {
            *place = Ok(done);
        }
    }
    all
}

/// Opens all legs, and looks at some of what they hold, also where something was written last. If one of them holds
/// something else there, all are looked at widely, before any of them is served.
fn open_legs(
    opener: &Arc<Opener>,
    legs: &[String],
    time: Duration,
    read_only: bool,
    size: u64,
    marks: &[Mark],
) -> Vec<(String, Sampled)> {
    let (opener, names, known) = (opener.clone(), legs.to_vec(), marks.to_vec());
    let open = move |i: usize| -> Sampled {
        let device = opener.open(names.get(i).map_or("", String::as_str))?;
        // What a program that was killed left in a cache must be as durable as what is read from it.
        if !read_only {
            let flushed = device.flush();
            flushed.map_err(|e| Fault::new(format!("it cannot be flushed: {e}"), "replace it"))?;
        }
        let size = size.min(device.size());
        let samples = hearth_mirror::sample(&device, size, &known, false);
        Ok((device, samples))
    };
    let opened = side_by_side(legs.len(), time, open).into_iter();
    let mut opened: Vec<Sampled> = opened.map(|leg| leg.and_then(|leg| leg)).collect();
    let unlike = |leg: &Sampled| {
        let held = leg.as_ref().map(|(_, held)| held);
        held.is_ok_and(|held| hearth_mirror::is_unlike(held, marks))
    };
    if opened.iter().any(unlike) {
        let there = opened.iter();
        let twins = there.map(|leg| leg.as_ref().ok().map(|(device, _)| device.twin()));
        let (twins, known): (Vec<Option<Device>>, _) = (twins.collect(), marks.to_vec());
        let look = move |i: usize| {
            let device = twins.get(i).and_then(Option::as_ref);
            device.map(|leg| hearth_mirror::sample(leg, size.min(leg.size()), &known, true))
        };
        let wide = side_by_side(legs.len(), time, look);
        // Legs can only be compared where all were looked at.
        if wide.iter().all(std::result::Result::is_ok) {
            for (leg, wide) in opened.iter_mut().zip(wide) {
                if let (Ok((_, held)), Ok(Some(wide))) = (leg, wide) {
                    *held = wide;
                }
            }
        }
    }
    legs.iter().cloned().zip(opened).collect()
}

/// What a mirror is opened with.
pub(crate) struct Parts<'a> {
    pub(crate) images: &'a Path,
    pub(crate) state_dir: &'a Path,
    pub(crate) pool: &'a Arc<Mutex<Pool>>,
    pub(crate) events: &'a Arc<Events>,
    pub(crate) stale: &'a Arc<news::Stale>,
    /// It is being added.
    pub(crate) fresh: bool,
}

/// Opens a mirror whose legs are these.
pub(crate) fn open(legs: &[OriginSpec], record: &DiskRecord, parts: &Parts) -> Result<Device> {
    let timeout = crate::origin::timeout(record);
    let opener = Arc::new(opener(record, parts.images));
    let names: Vec<String> = legs.iter().map(ToString::to_string).collect();
    let mut size = record.size;
    let notes = stored(parts.state_dir, record);
    let marks = record.mirror.as_ref().filter(|_| !parts.fresh);
    let marks = marks.map_or_else(Vec::new, |m| hearth_mirror::marked(m, notes.as_ref(), size));
    // Of a new disk nothing is known that could be compared.
    let opened = open_legs(
        &opener,
        &names,
        timeout.min(LEG_TIME),
        record.read_only,
        if parts.fresh { 0 } else { size },
        &marks,
    );
    let mut samples = Vec::new();
    let apart = |(name, leg): (String, Sampled)| {
        let (leg, held) = match leg {
            Ok((device, held)) => (Ok(device), held),
            Err(why) => (Err(why), Vec::new()),
        };
        samples.push(held);
        (name, leg)
    };
    let opened: Vec<_> = opened.into_iter().map(apart).collect();
    if parts.fresh {
        let mut first = None;
        for (name, leg) in &opened {
            let leg = leg.as_ref().map_err(|why| {
                let why = why.clone().within(format!("cannot use the leg {name}"));
                Error::of(Kind::Unavailable, why)
            })?;
            match first {
                None => first = Some(leg),
                Some(first) if leg.size() < first.size() => {
                    return Err(Error::refused(
                        format!(
                            "the leg {name} has {} bytes, fewer than the first one's {}",
                            leg.size(),
                            first.size()
                        ),
                        "give one that is at least as large",
                    ));
                }
                Some(first) => check_blank(name, leg, first)?,
            }
        }
        size = first.map_or(0, Device::size);
        if size == 0 {
            return Err(Error::invalid(
                "the first leg of the mirror is empty",
                "give it its size first, for instance with `truncate -s 100G`",
            ));
        }
    }
    together(opened, samples, size, record, parts)
}

/// Makes a disk that is served from `device`, its origin called `leg`, a mirror of that one leg, for a record that
/// says so already. The leg is not opened again, nor closed if that fails.
pub(crate) fn over(
    leg: &OriginSpec,
    device: &Device,
    record: &DiskRecord,
    parts: &Parts,
) -> Result<Device> {
    let leg = (leg.to_string(), Ok(device.twin()));
    // With one leg there is nothing to compare.
    together(vec![leg], vec![Vec::new()], record.size, record, parts)
}

/// What the state directory says of a mirror, if there is something.
fn stored(state_dir: &Path, record: &DiskRecord) -> Option<MirrorNotes> {
    let path = notes_dir(state_dir).join(record.serial.to_string());
    let bytes = std::fs::read(path).ok()?;
    MirrorNotes::newest(&bytes, &record.serial)
}

/// Starts a mirror of legs that were opened.
fn together(
    opened: Vec<(String, std::result::Result<Device, Fault>)>,
    samples: Vec<Vec<Sample>>,
    size: u64,
    record: &DiskRecord,
    parts: &Parts,
) -> Result<Device> {
    let dir = notes_dir(parts.state_dir);
    crate::rundir::make_private(&dir, 0o700)?;
    let path = dir.join(record.serial.to_string());
    let habits = habits::path(&dir, &record.serial);
    let notes = stored(parts.state_dir, record);
    let stamps = record.mirror.clone().ok_or_else(|| {
        Error::refused(
            "nothing is known of the mirror's legs",
            "remove the disk and add it again with --mirror",
        )
    })?;
    let herald = Arc::new(news::Herald::new(&record.name, parts.events, parts.stale));
    let setup = Setup {
        witness: herald.clone(),
        habits: habits::load(&habits),
        wall: hearth_mirror::host_time(),
        name: record.name.clone(),
        serial: record.serial,
        size,
        stamps,
        notes,
        legs: opened,
        samples,
        timeout: crate::origin::timeout(record),
        read_only: record.read_only,
        book: Arc::new(Shelf {
            serial: record.serial,
            path,
            habits,
            file: Mutex::default(),
            void: AtomicBool::new(false),
            pool: Arc::downgrade(parts.pool),
        }),
        opener: Arc::new(opener(record, parts.images)),
    };
    let mirror = Mirror::open(setup).map_err(|e| {
        let kind = match e {
            hearth_mirror::OpenError::NoneCurrent(_) => Kind::Unavailable,
            hearth_mirror::OpenError::Changed(_) => Kind::Refused,
            // One that is not there may be the one that holds it.
            hearth_mirror::OpenError::RolledBack(_, ref missing) if missing.is_empty() => {
                Kind::Refused
            }
            _ => Kind::Unavailable,
        };
        Error::of(kind, e.fault())
    })?;
    herald.opened();
    Ok(Device::remote(Arc::new(mirror)))
}

/// The pool's cache of a disk.
pub(crate) struct DiskCache {
    engine: Weak<Engine>,
    id: u16,
}

impl DiskCache {
    pub(crate) fn new(engine: Weak<Engine>, id: u16) -> DiskCache {
        DiskCache { engine, id }
    }
}

impl Cache for DiskCache {
    fn clean(&self, offset: u64, len: u64) -> Vec<Cached> {
        let blocks = offset / BLOCK..(offset + len).div_ceil(BLOCK);
        let Some(engine) = self.engine.upgrade() else {
            return Vec::new();
        };
        let cached = |(block, sum, written)| Cached {
            block,
            sum,
            written,
        };
        let sums = engine.clean_sums(self.id, blocks);
        sums.into_iter().map(cached).collect()
    }

    fn drop_unlike(&self, offset: u64, right: &[u32]) {
        if let Some(engine) = self.engine.upgrade() {
            engine.drop_unlike(self.id, offset / BLOCK, right);
        }
    }
}

/// From now on a scrub of this origin compares with what is cached of the disk, too.
pub(crate) fn know_cache(device: &Device, engine: &Arc<Engine>, id: u16) {
    if let Some(mirror) = of(device) {
        mirror.set_cache(Arc::new(DiskCache::new(Arc::downgrade(engine), id)));
    }
}

/// The mirror a disk is served from, if it is one.
pub(crate) fn of(device: &Device) -> Option<&Mirror> {
    device.as_remote()?.as_any()?.downcast_ref()
}

/// Opens what is to become another leg of a mirror. Blocks.
pub(crate) fn open_leg(leg: &OriginSpec, record: &DiskRecord, images: &Path) -> Result<Device> {
    let opened = opener(record, images).open(&leg.to_string());
    let device = opened.map_err(|why| {
        let why = why.within(format!("cannot use the leg {leg}"));
        Error::of(Kind::Unavailable, why)
    })?;
    if device.size() < record.size {
        return Err(Error::refused(
            format!(
                "the leg {leg} has {} bytes, fewer than the disk's {}",
                device.size(),
                record.size
            ),
            "give one that is at least as large",
        ));
    }
    Ok(device)
}

/// A leg that nobody has copied anything to.
pub(crate) fn new_leg() -> LegStamp {
    LegStamp {
        id: Uuid::new_v4(),
        generation: 0,
        state: LegState::Behind,
        whole: true,
        copied: 0,
        left: (0, 0),
    }
}

fn opener(record: &DiskRecord, images: &Path) -> Opener {
    Opener {
        how: How {
            read_only: record.read_only,
            timeout: leg_timeout(crate::origin::timeout(record)),
            images: images.to_owned(),
            backing: Backing::default(),
        },
    }
}
