//! Serving a pool whose flash cannot be written, or is not to be: the disks go on from their origins.
//!
//! A full file system under a sparse flash file, or an SSD that has turned read-only, must not take
//! down disks whose data is all in their origins (invariant 7). The log is then read without being
//! written, the engine starts with its flash given up, clean disks are served from their origins, and
//! what is dirty is read from flash and destaged, or, if the flash is not to be used at all, its disks
//! are refused by name.
//!
//! **Why no stale copy is ever read again.** While the cache is off, guests change the origins and the
//! log is not told, so its clean copies grow old (invariant 3). So before the first disk is served, a
//! durable note says that they do not count, in the first of these places that takes it:
//!
//! 1. the registry: the records of every disk with nothing dirty are void below a segment number that
//!    only later runs pass (`since_seq`). A disk with something dirty is marked as distrusted when it
//!    attaches, and voided when its last dirty block is durable in the origin. Both copies of the
//!    registry are overwritten in place, which needs no room on most file systems;
//! 2. the superblock: state `Failed`, one block, in place;
//! 3. a marker file beside the flash file or in the state directory, which counts as state `Failed`.
//!
//! If none takes it, the pool is not served.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use hearth_engine::api::Effects;
use hearth_engine::{Engine, EngineOptions, FlashFault, OpenError, OpenReport, OpenedFrom};
use hearth_format::FormatError;
use hearth_io::file::sync_names;

use crate::error::{Error, Kind, Result};
use crate::inspect::{Unwritten, known};
use crate::pool::Pool;

/// Where Hearth keeps what it needs beside its pools.
pub const STATE_DIR: &str = "/var/lib/hearth";

/// A pool is served without its cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Degraded {
    /// Why, as one sentence without a full stop.
    pub why: String,
    /// What becomes of disks with something dirty.
    pub dirty: Dirty,
    /// All it takes to have the cache back is room on a file system, and a start.
    pub for_room: bool,
}

/// What becomes of disks with something dirty while the cache is off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dirty {
    /// They are served, and it is read from flash and destaged.
    Destage,
    /// They are refused by name: flash is not to be used.
    Refuse,
    /// They are refused by name: flash is gone, and all that is known is what was noted beside it.
    Gone,
}

impl Degraded {
    /// For flash that holds what it has but takes no more.
    pub fn unwritable(why: impl Into<String>) -> Degraded {
        Degraded {
            why: why.into(),
            dirty: Dirty::Destage,
            for_room: false,
        }
    }

    /// For flash that is not to be trusted with anything in this run.
    pub fn unused(why: impl Into<String>) -> Degraded {
        Degraded {
            why: why.into(),
            dirty: Dirty::Refuse,
            for_room: false,
        }
    }
}

impl Degraded {
    /// For flash that is not there any more.
    pub(crate) fn gone(why: impl Into<String>) -> Degraded {
        Degraded {
            why: why.into(),
            dirty: Dirty::Gone,
            for_room: false,
        }
    }
}

/// Why flash refused a write.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    /// In words.
    why: String,
    /// For want of room on a file system.
    for_room: bool,
}

/// Why a write was refused.
pub(crate) fn refusal(path: &Path, error: &std::io::Error) -> Refusal {
    use std::io::ErrorKind::{QuotaExceeded, ReadOnlyFilesystem, StorageFull};
    let path = path.display();
    let why = match error.kind() {
        StorageFull => format!("the file system that holds {path} is full"),
        QuotaExceeded => format!("the disk quota for {path} is used up"),
        ReadOnlyFilesystem => format!("{path} is read-only"),
        _ => format!("{path} cannot be written ({error})"),
    };
    Refusal {
        why,
        for_room: error.kind() == StorageFull,
    }
}

/// An opened engine.
pub(crate) struct Started {
    pub engine: Engine,
    pub report: OpenReport,
    /// The cache is off.
    pub degraded: Option<Degraded>,
}

/// Opens the engine of a pool: as it should be, or without its cache if `degraded` says so or its
/// flash takes no writes.
pub(crate) fn start(
    pool: &mut Pool,
    options: &EngineOptions,
    host: &str,
    degraded: Option<Degraded>,
) -> Result<Started> {
    if let Some(degraded) = degraded.clone().filter(|d| d.dirty == Dirty::Gone) {
        let (engine, report) = open_nothing(pool, options)?;
        return Ok(Started {
            engine,
            report,
            degraded: Some(degraded),
        });
    }
    let degraded = match degraded {
        Some(degraded) => degraded,
        None => match open(pool, options, host) {
            // What guests had written there is on no flash: it was erased.
            Ok((engine, report))
                if report.from == OpenedFrom::Log
                    && report.segments == 0
                    && pool.knows_of_dirty() =>
            {
                drop(engine);
                let why = format!("{} was erased: its log is empty", pool.path().display());
                return start_without_log(pool, options, why);
            }
            Ok((engine, report)) => {
                return Ok(Started {
                    engine,
                    report,
                    degraded: None,
                });
            }
            Err((e, Unopened::Damaged)) if pool.is_known_beside() => {
                return start_without_log(pool, options, e.what);
            }
            Err((e, Unopened::Damaged | Unopened::Otherwise)) => return Err(e),
            Err((_, Unopened::Unwritable(refusal))) => Degraded {
                for_room: refusal.for_room,
                ..Degraded::unwritable(refusal.why)
            },
        },
    };
    let (engine, report) = open_unwritten(pool, options)?;
    note(pool, &engine, &degraded)?;
    Ok(Started {
        engine,
        report,
        degraded: Some(degraded),
    })
}

/// Serves what is known to be whole in its origin.
fn start_without_log(pool: &mut Pool, options: &EngineOptions, why: String) -> Result<Started> {
    pool.go_without_log(&why)?;
    let (engine, report) = open_nothing(pool, options)?;
    Ok(Started {
        engine,
        report,
        degraded: Some(Degraded::gone(why)),
    })
}

/// Why a pool cannot be opened as it should be.
enum Unopened {
    /// Flash refused to be written.
    Unwritable(Refusal),
    /// The log is not what it should be, as on flash that was erased or written over.
    Damaged,
    Otherwise,
}

/// Opens it as it should be.
fn open(
    pool: &mut Pool,
    options: &EngineOptions,
    host: &str,
) -> std::result::Result<(Engine, OpenReport), (Error, Unopened)> {
    let prepared = pool
        .stamp()
        .and_then(|()| pool.note_host(host))
        .and_then(|()| pool.settle())
        // Before the mark of failure is overwritten by opening the pool.
        .and_then(|()| pool.distrust_if_failed());
    if let Err(e) = prepared {
        let refusal = pool.refusal().cloned();
        return Err((e, refusal.map_or(Unopened::Otherwise, Unopened::Unwritable)));
    }
    let mut media = pool.flash().joined();
    Engine::open(&mut media, options.clone(), &known(pool)).map_err(|e| {
        let why = match &e {
            OpenError::Io(e) | OpenError::Format(FormatError::Io { source: e, .. }) => {
                Unopened::Unwritable(refusal(pool.path(), e))
            }
            OpenError::Damaged(_) => Unopened::Damaged,
            OpenError::Format(e) if crate::pool::is_erased(e) => Unopened::Damaged,
            _ => Unopened::Otherwise,
        };
        let error = Error::of(Kind::Unavailable, e.fault().within(pool.path().display()));
        (error, why)
    })
}

/// Opens an engine that has no flash. That nothing on it counts any more is noted already.
fn open_nothing(pool: &Pool, options: &EngineOptions) -> Result<(Engine, OpenReport)> {
    let mut media = pool.blank()?;
    let (engine, report) = Engine::open(&mut media, options.clone(), &known(pool))
        .map_err(|e| Error::of(Kind::Unavailable, e.fault().within(pool.path().display())))?;
    let mut nothing = Effects::default();
    engine.give_flash_up(FlashFault::Unwritable, false, 0, &mut nothing);
    Ok((engine, report))
}

/// Opens it without writing to flash, and gives flash up.
fn open_unwritten(pool: &mut Pool, options: &EngineOptions) -> Result<(Engine, OpenReport)> {
    let path = pool.path().to_owned();
    pool.distrust_in_ram_if_failed();
    let mut media = Unwritten::over(pool.flash());
    let (engine, report) = Engine::open(&mut media, options.clone(), &known(pool))
        .map_err(|e| Error::of(Kind::Unavailable, e.fault().within(path.display())))?;
    // What was accepted of the log may so far be in the device's own cache only. A device that cannot
    // even do this loses nothing by it that was promised.
    if let Err(e) = pool.flash().flush() {
        tracing::debug!("the flash cannot be flushed: {e}");
    }
    let mut nothing = Effects::default();
    engine.give_flash_up(FlashFault::Unwritable, false, 0, &mut nothing);
    Ok((engine, report))
}

/// Notes durably that clean copies on flash do not count any more.
fn note(pool: &mut Pool, engine: &Engine, degraded: &Degraded) -> Result<()> {
    let voided = pool.change(|registry| {
        for record in &mut registry.disks {
            if let Some(seq) = engine.void_seq(record.id) {
                record.since_seq = record.since_seq.max(seq);
            }
        }
        Ok(())
    });
    let first = match voided {
        // What is noted beside the flash alone does not go with it to another host.
        Ok(()) if pool.is_settled() => return Ok(()),
        Ok(()) => None,
        Err(e) => Some(e),
    };
    let marked = pool.mark_failed().or_else(|_| {
        let media = pool.media();
        write_marker(pool.path(), media.is_device(), &pool.uuid(), media.owes())
    });
    match marked {
        Ok(()) => {
            pool.set_covered();
            if let Some(first) = first {
                tracing::warn!("the registry cannot be stored: {first}");
            }
            Ok(())
        }
        // The next start here knows.
        Err(_) if first.is_none() => Ok(()),
        Err(e) => Err(Error::unavailable(
            format!(
                "{}, and nothing can note durably that the cache is off: {e}",
                degraded.why
            ),
            "make room, or make the flash or the state directory /var/lib/hearth writable",
        )),
    }
}

/// Where a marker may lie.
fn markers(flash: &Path, is_device: bool, uuid: &str) -> Vec<PathBuf> {
    let mut places = Vec::new();
    if !is_device {
        let mut beside = flash.as_os_str().to_owned();
        beside.push(format!(".{uuid}.failed"));
        places.push(PathBuf::from(beside));
    }
    places.push(Path::new(STATE_DIR).join(format!("{uuid}.failed")));
    places
}

/// Notes outside the flash that nothing clean on it counts any more. If it `hangs`, so may the directory in which it
/// lies, and that comes last.
pub(crate) fn write_marker(flash: &Path, is_device: bool, uuid: &str, hangs: bool) -> Result<()> {
    let mut failure = None;
    let mut places = markers(flash, is_device, uuid);
    if hangs {
        places.reverse();
    }
    for place in places {
        let written = (|| {
            if let Some(dir) = place.parent().filter(|dir| *dir == Path::new(STATE_DIR)) {
                std::fs::create_dir_all(dir)?;
            }
            let mut file = std::fs::OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&place)?;
            // That it is there says all. On a full file system the words may not fit.
            let _ = file.write_all(b"The disks of this pool went on without it.\n");
            file.sync_all()?;
            sync_names(&place)
        })();
        match written {
            Ok(()) => {
                tracing::warn!(marker = %place.display(), "noted beside the flash that what it holds may be older than the origins");
                return Ok(());
            }
            Err(e) => failure = Some(format!("cannot write {}: {e}", place.display())),
        }
    }
    Err(Error::unavailable(
        failure.unwrap_or_default(),
        "make room there, or let the daemon write there",
    ))
}

/// True if a marker says that nothing clean on this flash counts.
pub(crate) fn is_marked(flash: &Path, is_device: bool, uuid: &str) -> bool {
    markers(flash, is_device, uuid)
        .iter()
        .any(|place| place.symlink_metadata().is_ok())
}

/// Removes the markers: what they say is on flash now.
pub(crate) fn remove_markers(flash: &Path, is_device: bool, uuid: &str) {
    for place in markers(flash, is_device, uuid) {
        if place.symlink_metadata().is_ok()
            // A marker that a power cut brings back would void the next run's cache, too.
            && let Err(e) = std::fs::remove_file(&place).and_then(|()| sync_names(&place))
        {
            tracing::warn!(marker = %place.display(), "cannot remove a marker: {e}; the cache will be dropped at every start until it is gone");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::server::Control;
    use crate::api::types::DiskState;
    use crate::daemon::{Daemon, Options, StopReason, testing};
    use hearth_engine::api::{DiskConfig, Mode, OriginState, Request};
    use hearth_io::{BLOCK, Buf, FaultKind, FaultRule, OpKind, Target};

    fn every_write_fails(pool: &Pool) {
        pool.media().faults().arm(FaultRule {
            offset: 0,
            len: u64::MAX,
            ..FaultRule::eio(FaultKind::Write)
        });
    }

    /// A pool with a disk, at rest.
    fn at_rest() -> tempfile::TempDir {
        let (dir, daemon) = testing::with_disk("a");
        daemon.shut_down(StopReason::Signal).unwrap();
        dir
    }

    /// Leaves the first block of a disk dirty in the log, durably, as a daemon that was killed does.
    fn leave_dirty(flash: &Path, name: &str) {
        let mut pool = Pool::open(flash).unwrap();
        let started = start(&mut pool, &EngineOptions::default(), "host", None).unwrap();
        let record = pool
            .registry()
            .disks
            .iter()
            .find(|r| r.name == name)
            .unwrap();
        let config = DiskConfig {
            id: record.id,
            size: record.size,
            origin_align: 512,
            mode: Mode::WriteBack,
            block_size: 4096,
            min_bytes: 0,
            max_bytes: 0,
            seq_cutoff: 0,
            read_only: false,
            home: hearth_engine::api::Home::Origin,
        };
        let engine = started.engine;
        engine.attach(config, OriginState::Flushed).unwrap();
        let buf = Buf::zeroed(BLOCK as usize);
        buf.all().bytes_mut().fill(0xAB);
        let mut fx = Effects::default();
        let write = Request::write(1, record.id, 0, BLOCK, true, &buf, 1);
        engine.submit(1, &mut vec![write], &mut fx);
        for now in 2..100 {
            let mut done = Vec::new();
            for op in fx.ios.drain(..) {
                assert_eq!(op.target, Target::Flash(0));
                match op.kind {
                    OpKind::Write => {
                        let mut at = op.offset;
                        for piece in &op.bufs {
                            pool.media()
                                .file()
                                .unwrap()
                                .write_at(at, piece.bytes())
                                .unwrap();
                            at += piece.len() as u64;
                        }
                    }
                    OpKind::Flush => pool.media().flush().unwrap(),
                    other => panic!("{other:?}"),
                }
                done.push(op.done(Ok(()), 1));
            }
            engine.io_done(now, &mut done, &mut fx);
            if let Some(answer) = fx.completions.pop() {
                return answer.result.unwrap();
            }
        }
        panic!("not answered: {}", engine.explain());
    }

    #[test]
    fn flash_that_takes_no_write_at_all_is_marked_beside_it_and_the_next_start_believes_that() {
        let dir = at_rest();
        let flash = dir.path().join("flash");
        let files = || {
            let names = std::fs::read_dir(dir.path()).unwrap();
            let names = names.map(|e| e.unwrap().file_name().into_string().unwrap());
            names.filter(|name| name.ends_with(".failed")).count()
        };
        let mut pool = Pool::open(&flash).unwrap();
        every_write_fails(&pool);
        let started = start(&mut pool, &EngineOptions::default(), "another-host", None).unwrap();
        let why = started.degraded.expect("the cache is off").why;
        assert!(why.contains("cannot be written"), "{why}");
        assert!(started.engine.pool_stats().flash_failed);
        assert_eq!(files(), 1);
        // What is found out about origins goes on in RAM.
        pool.change_or_keep(|registry| {
            registry.disks[0].size = 7 * BLOCK;
            Ok(())
        })
        .unwrap();
        assert_eq!(pool.registry().disks[0].size, 7 * BLOCK);
        let removed = pool.change(|registry| {
            registry.disks.clear();
            Ok(())
        });
        assert!(removed.is_err());
        drop((pool, started.engine));

        let mut pool = Pool::open(&flash).unwrap();
        assert!(!crate::origin::is_distrusted(&pool.registry().disks[0]));
        let started = start(&mut pool, &EngineOptions::default(), "host", None).unwrap();
        assert!(started.degraded.is_none());
        assert!(crate::origin::is_distrusted(&pool.registry().disks[0]));
        assert_eq!(files(), 0);
    }

    #[test]
    fn clean_copies_are_void_before_the_first_disk_is_served_without_the_cache() {
        let dir = at_rest();
        let flash = dir.path().join("flash");
        let mut pool = Pool::open(&flash).unwrap();
        let before = pool.registry().disks[0].since_seq;
        let asked = Some(Degraded::unused("a test says so"));
        start(&mut pool, &EngineOptions::default(), "host", asked).unwrap();
        drop(pool);
        let void = Pool::open(&flash).unwrap().registry().disks[0].since_seq;
        assert!(void > before, "{void} after {before}");
    }

    #[test]
    fn unused_flash_keeps_its_dirty_disks_to_itself_and_the_others_are_served() {
        let (dir, daemon) = testing::with_disk("dirty");
        daemon.add(testing::disk(dir.path(), "clean")).unwrap();
        daemon.shut_down(StopReason::Signal).unwrap();
        drop(daemon);
        leave_dirty(&dir.path().join("flash"), "dirty");
        let options = Options {
            flash: vec![dir.path().join("flash")],
            threads: 1,
            images: dir.path().join("images"),
            degraded: Some(Degraded::unused("it was given up three times")),
            state_dir: Some(dir.path().join("state")),
            ..Options::default()
        };
        let daemon = Daemon::start(&options).unwrap();
        assert_eq!(daemon.disk("clean").unwrap().state, DiskState::Attached);
        let refused = daemon.disk("dirty").unwrap();
        assert_eq!(refused.state, DiskState::Refused);
        let reason = refused.reason.unwrap();
        assert!(reason.contains("it was given up three times"), "{reason}");
        let trust = crate::api::types::DiskSet {
            trust: Some(crate::api::types::Trust::Origin),
            ..Default::default()
        };
        let error = daemon.set("dirty", trust).unwrap_err();
        assert_eq!(error.kind, Kind::Refused);
        // What waits on flash is no reason to end badly: it is there for the next start.
        daemon.shut_down(StopReason::Signal).unwrap();
        drop(daemon);
        let daemon = testing::start(dir.path());
        assert_eq!(daemon.disk("dirty").unwrap().state, DiskState::Attached);
        // The engine writes back what waited once nobody asks for anything.
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while std::fs::read(dir.path().join("dirty.raw")).unwrap()[0] != 0xAB {
            assert!(
                std::time::Instant::now() < end,
                "what waited on flash is gone"
            );
            std::thread::yield_now();
        }
        daemon.shut_down(StopReason::Signal).unwrap();
    }
}
