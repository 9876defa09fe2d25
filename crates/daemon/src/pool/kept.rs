//! What of a pool is kept beside its flash, and what is believed of it when the flash is opened, or gone.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_format::{IdSet, Members, Places, PoolNotes, PoolState, Registry, Superblock};
use hearth_io::media::Sparse;
use hearth_io::{BlockFile, Device, OpenMode};

use super::{FlashDevices, Pool, devices, format_error, layout, opening};
use crate::beside::Beside;
use crate::claims::Confirmed;
use crate::error::{Error, Result};
use crate::named::Named;

/// Size of the flash that an engine believes in whose flash is gone: it is never used.
const WITHOUT_FLASH_BYTES: u64 = 64 << 20;

impl Pool {
    /// Notes beside the flash of which ordered disks the origin is of no one time, before anything is given to
    /// them.
    pub(crate) fn note_unordered(&self, engine: &hearth_engine::Engine) -> Result<()> {
        let Some(beside) = self.beside().filter(|_| !self.is_without_flash()) else {
            return Ok(());
        };
        let now = hearth_io::now_ns();
        let disks = self.registry().disks.iter();
        let mixed: Vec<_> = disks
            .filter(|d| d.mode == hearth_format::CacheMode::WriteBackOrdered)
            .filter(|d| {
                let order = engine.order(d.id, now);
                order.is_none_or(|o| o.upto == hearth_engine::Upto::Mixed)
            })
            .map(|d| (d.id, d.serial, 0))
            .collect();
        beside.note_order(&mixed).map_err(|e| {
            Error::unavailable(
                format!("cannot write beside {}: {e}", beside.path().display()),
                "make room there, and start again",
            )
        })
    }

    /// Where its flash was when that was noted last.
    pub(crate) fn noted_flash(&self, state_dir: &Path) -> Vec<PathBuf> {
        match Beside::of(state_dir, &self.superblock.pool) {
            Ok(Some(beside)) => {
                let noted = beside.notes().flash;
                let paths = noted.split('\n').filter(|path| !path.is_empty());
                paths.map(PathBuf::from).collect()
            }
            _ => Vec::new(),
        }
    }

    /// What is known of it beside its flash.
    pub(crate) fn beside(&self) -> Option<&Arc<Beside>> {
        self.beside.as_ref()
    }

    /// The flash has taken the place of another one, and is served for the first time.
    pub(crate) fn is_adopted(&self) -> bool {
        self.adopted
    }

    /// True if its flash is gone.
    pub(crate) fn is_without_flash(&self) -> bool {
        self.gone_from.is_some()
    }

    /// Takes what is kept of it in `state_dir`, and believes of the flash what still counts. Nothing is stored:
    /// what changes in the registry is stored when the pool is [settled](Self::settle).
    ///
    /// Without that directory a pool is served as well; then all that is known of it is on flash.
    pub(crate) fn remember(&mut self, state_dir: &Path) -> Result<()> {
        let superblock = &self.superblock;
        let (pool, device) = (superblock.pool, superblock.device);
        let confirmed = Confirmed::open(state_dir, &pool)?;
        let is_stored = confirmed.is_stored();
        self.confirmed = Some(confirmed);
        let Some(beside) = Beside::of(state_dir, &pool)? else {
            if !is_stored {
                // The next start would take all that a foreign pool names for confirmed by an earlier version.
                return Ok(());
            }
            let mut notes = PoolNotes::new(pool, device, superblock.created_unix_s);
            // As long as nobody has looked, it may be so of any disk.
            notes.dirty = self.registry.disks.iter().map(|disk| disk.id).collect();
            self.describe(&mut notes);
            match Beside::make(state_dir, notes, &self.registry) {
                Ok(made) => self.beside = Some(Arc::new(made)),
                Err(e) => tracing::warn!("{e}; if the flash dies, its disks have to be added anew"),
            }
            return Ok(());
        };
        let (noted, peer) = (beside.notes().device, superblock.peer);
        let opened = beside.notes().opened;
        if noted != device && noted == peer && superblock.generation < opened {
            return Err(Error::refused(
                format!(
                    "{} is older than pool {pool}: that was served since from a device which was to be replaced, and was not in the end",
                    self.path().display()
                ),
                format!(
                    "serve that one: the pool was on {} last",
                    crate::beside::listed(&beside.notes().flash)
                ),
            ));
        }
        if noted != device && noted == peer {
            // It has all that the other one had.
            let created = superblock.created_unix_s;
            let noted =
                beside.note(|notes| (notes.device, notes.device_created) = (device, created));
            noted.map_err(|e| beside.unwritten(e, "put that right, and try again"))?;
        }
        let notes = beside.notes();
        // Nobody has served it since it was formatted, and somebody had served the pool before.
        let unopened = notes.device != device || notes.opened == 0;
        self.adopted = unopened && superblock.created_unix_s >= notes.started;
        if notes.device != device && superblock.created_unix_s <= notes.device_created {
            return Err(Error::refused(
                format!(
                    "{} was flash of pool {pool} before another device took its place{}",
                    self.path().display(),
                    match notes.flash.as_str() {
                        "" => String::new(),
                        path => format!(", which is at {}", crate::beside::listed(path)),
                    }
                ),
                "serve that one; what was dirty on this one is found with `hearth rescue`",
            ));
        }
        if notes.device != device {
            // It took the other's place, and whoever had it do so was stopped before that was noted.
            let noted = beside.note(|notes| self.take_over(notes));
            noted.map_err(|e| beside.unwritten(e, "put that right, and try again"))?;
        }
        if notes.device == device && superblock.generation < notes.opened {
            tracing::warn!(
                path = %self.path().display(),
                "the flash holds an older state of the pool than the one served last"
            );
            // Opening it raises its generation: a start that is cut off must not make the next one believe it.
            let disks: Vec<u16> = self.registry.disks.iter().map(|disk| disk.id).collect();
            let noted = beside.note(|notes| {
                for id in disks {
                    notes.left.insert(id);
                }
            });
            noted.map_err(|e| beside.unwritten(e, "put that right, and try again"))?;
            self.distrust_in_ram(|_| true);
        }
        if notes.device == device && notes.alone {
            tracing::info!("the registry was changed while the flash took no writes; that counts");
            let generation = self.registry.generation;
            self.registry = Registry {
                generation,
                ..beside.registry()
            };
            self.named = Named::of(&self.registry);
            self.unsettled = true;
            self.places.begin_anew();
        }
        if !notes.left.is_empty() {
            tracing::warn!(
                "disks were served without this flash; what it holds of them may be old"
            );
            self.distrust_in_ram(|id| notes.left.contains(id));
        }
        self.beside = Some(Arc::new(beside));
        Ok(())
    }

    /// Makes origins look changed to disks, until their caches have been judged anew; stored when the pool is.
    pub(super) fn distrust_in_ram(&mut self, which: impl Fn(u16) -> bool) {
        self.unsettled = true;
        self.places.begin_anew();
        for record in &mut self.registry.disks {
            if which(record.id) {
                crate::origin::distrust(record);
            }
        }
    }

    /// This flash is in the place of the one that was noted.
    pub(super) fn take_over(&self, notes: &mut PoolNotes) {
        for id in notes.dirty.iter() {
            notes.lost.insert(id);
        }
        notes.dirty = IdSet::default();
        notes.left = IdSet::default();
        notes.alone = false;
        notes.opened = 0;
        notes.device = self.superblock.device;
        notes.device_created = self.superblock.created_unix_s;
    }

    fn describe(&self, notes: &mut PoolNotes) {
        notes.device = self.superblock.device;
        notes.device_created = self.superblock.created_unix_s;
        notes.started = crate::beside::now_unix();
        notes.flash = crate::beside::shown_all(&self.paths());
        notes.label.clone_from(&self.superblock.label);
    }

    /// Notes beside the flash what opening it has shown: which disks have something there that their origins
    /// lack. What was noted before counts on if the flash took no writes. Superblocks of generation `stored` are on flash: a
    /// device that was lost while they were stored has an older one.
    pub(crate) fn note_opened(&self, dirty: IdSet, writable: bool, stored: u64) -> Result<()> {
        let Some(beside) = &self.beside else {
            return Ok(());
        };
        let settled = writable && !self.unsettled;
        // As found: opening it for writing has stored the next one.
        let found = self.superblock.generation;
        let generation = match self.flash.lost().is_empty() {
            true => found + 1,
            false => stored.max(found + 1),
        };
        let noted = beside.note(|notes| {
            self.describe(notes);
            notes.dirty = dirty;
            if settled {
                notes.opened = notes.opened.max(generation);
                notes.alone = false;
                notes.left = IdSet::default();
            }
        });
        let followed =
            noted.and_then(|()| beside.follow(&self.registry).map_err(std::io::Error::other));
        followed.map_err(|e| {
            beside.unwritten(
                e,
                "see why; what is noted there would be believed if the flash were lost",
            )
        })
    }

    /// The pool of which all that is left is what was kept beside its flash, if that is so: it says why there is no flash.
    /// Of several devices one that is gone is enough: what the others hold is of no use alone, unless everything is there
    /// twice.
    pub(crate) fn without_flash(
        state_dir: &Path,
        flash_given: &[PathBuf],
    ) -> Result<Option<(Pool, String)>> {
        let older = devices::older(flash_given);
        let mut found = None;
        for (at, path) in flash_given.iter().enumerate() {
            let older = || older.clone().filter(|(n, _)| *n == at);
            // Not before it is certain that something is known: a mistyped name is none of this.
            if crate::beside::pool_at(state_dir, path)?.is_some()
                && let Some(why) = crate::beside::gone(path)
                    .or_else(|| crate::beside::erased(path, flash_given))
                    .or_else(|| Some(older()?.1))
            {
                found = Some((path.as_path(), why));
                break;
            }
        }
        let Some((flash, why)) = found else {
            return Ok(None);
        };
        if devices::is_half_there(flash_given) {
            return Ok(None);
        }
        let Some(beside) = Beside::whose_flash_was_at(state_dir, flash)? else {
            return Ok(None);
        };
        let mut pool = Pool::of_notes(Arc::new(beside), flash, &why)?;
        pool.confirmed = Some(Confirmed::open(state_dir, &pool.superblock.pool)?);
        Ok(Some((pool, why)))
    }

    /// Was what is kept beside its flash kept when it was served last?
    pub(crate) fn is_known_beside(&self) -> bool {
        let beside = self.beside.as_ref();
        beside.is_some_and(|beside| beside.says(|notes| notes.opened > 0))
    }

    /// Is it known beside its flash that something of a disk may be there?
    pub(crate) fn knows_of_dirty(&self) -> bool {
        let beside = self.beside.as_ref().filter(|_| self.is_known_beside());
        beside.is_some_and(|beside| beside.says(|notes| !notes.dirty.is_empty()))
    }

    /// The same as [`without_flash`](Self::without_flash) of a pool whose log cannot be read.
    pub(crate) fn go_without_log(&mut self, why: &str) -> Result<()> {
        if let Some(beside) = self.beside.clone() {
            let confirmed = self.confirmed.take();
            *self = Pool::of_notes(beside, self.path(), why)?;
            self.confirmed = confirmed;
        }
        Ok(())
    }

    fn of_notes(beside: Arc<Beside>, flash: &Path, why: &str) -> Result<Pool> {
        let notes = beside.notes();
        let mode = OpenMode {
            read_only: true,
            unlocked: true,
        };
        // Nothing is asked of it: the engine has no flash.
        let stand_in =
            BlockFile::open(beside.path(), mode).map_err(|e| opening(beside.path(), e))?;
        let layout = layout(beside.path(), WITHOUT_FLASH_BYTES)?;
        let registry = beside.registry();
        let mut superblock = Superblock::new(
            layout,
            notes.pool,
            notes.device,
            &notes.label,
            notes.device_created,
        );
        superblock.state = PoolState::Failed;
        let served = |id: &u16| !notes.dirty.contains(*id) && !notes.lost.contains(*id);
        let left = registry.disks.iter().map(|disk| disk.id).filter(served);
        let left: Vec<u16> = left.collect();
        // Before the first of them is: from then on what is on flash of them is old.
        let noted = beside.note(|notes| {
            notes.started = crate::beside::now_unix();
            notes.alone = true;
            for id in left {
                notes.left.insert(id);
            }
        });
        noted.map_err(|e| {
            Error::unavailable(
                format!(
                    "{why}, and that its disks go on without it cannot be noted in {}: {e}",
                    beside.path().display()
                ),
                "put that right, or the flash back",
            )
        })?;
        let media = Arc::new(Device::new(stand_in));
        let places = Places::new(&superblock.layout).map_err(|e| format_error(flash, &e))?;
        let (devices, members) = (FlashDevices::one(media.clone()), Members::new(Vec::new()));
        Ok(Pool {
            beside: Some(beside),
            gone_from: Some(flash.to_owned()),
            ..Pool::of(media, devices, members, superblock, registry, places)
        })
    }

    /// A blank device in RAM of the pool's layout, for an engine whose flash is gone.
    pub(crate) fn blank(&self) -> Result<Sparse> {
        let mut blank = Sparse::new(WITHOUT_FLASH_BYTES);
        let mut superblock = Superblock {
            state: PoolState::Open,
            ..self.superblock.clone()
        };
        let stored = superblock.store(&mut blank);
        stored.map_err(|e| format_error(self.path(), &e))?;
        Ok(blank)
    }
}
