//! Where the registry is stored, and in which order, so that a crash leaves the old or the new one
//! and rot in one place never brings back an older one, in which void log records would count again.
//!
//! There are two areas with the same content. A small registry is rewritten as a whole at every
//! change, one area after the other, in the form every version reads. A larger one is a *base* with a
//! journal behind it ([`crate::journal`]): a change is one entry in each area and one flush. One that
//! has outgrown the areas moves to larger ones, and leaves a note where it was.
//!
//! A base is only continued by who wrote it, as long as nothing failed: after opening the pool, and
//! after an error, the next change writes a new base, with a generation nothing on flash has had. So all
//! entries behind a base are from one run, each durable before the next was written.

use crate::error::FormatError;
use crate::journal::{Change, JournalEntry, replay};
use crate::layout::{Layout, REGISTRY_AREA_BLOCKS, REGISTRY_BLOCKS};
use crate::registry::{DISKS_MAX, Front, Moved, Registry, SharedRecord, WHAT, too_large};
use crate::{BLOCK_BYTES, copies};
use hearth_io::{Media, OtherHalf};
use uuid::Uuid;

/// Up to this size a registry is rewritten as a whole: the pool then opens in versions that know no
/// journal, and what that costs is a second flush and two writes that are no larger than one batch of the log.
pub const REGISTRY_PLAIN_BYTES: usize = 64 << 10;

/// Changed disks that are looked for one by one among all; of more, all are checked.
const CHECKED_ONE_BY_ONE: usize = 4;

/// Bytes read at once from behind a base.
const READ_BYTES: usize = 1 << 20;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// Two areas of the same size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Areas {
    /// First blocks.
    start: [u64; 2],
    /// Blocks of each.
    blocks: u64,
}

impl Areas {
    /// Those every pool has.
    fn first(layout: &Layout) -> Result<Areas, FormatError> {
        let fits = |start| start + REGISTRY_AREA_BLOCKS <= layout.checkpoint_start;
        if !REGISTRY_BLOCKS.into_iter().all(fits) {
            return Err(FormatError::damaged(
                WHAT,
                "its area overlaps the checkpoint area",
            ));
        }
        Ok(Areas {
            start: REGISTRY_BLOCKS,
            blocks: REGISTRY_AREA_BLOCKS,
        })
    }

    fn grown(layout: &Layout) -> Option<Areas> {
        let (start, blocks) = layout.registry_room()?;
        Some(Areas {
            start: [start, start + blocks],
            blocks,
        })
    }

    fn offset(&self, area: usize) -> u64 {
        self.start.get(area).copied().unwrap_or_default() * BLOCK
    }

    fn bytes(&self) -> usize {
        self.blocks as usize * BLOCK_BYTES
    }
}

/// Where a pool's registry is stored.
#[derive(Clone, Debug)]
pub struct Places {
    areas: Areas,
    /// They are not the first ones; a note there says so.
    moved: bool,
    /// Places of the note that do not have it.
    notes_missing: [bool; 2],
    /// Base that may be continued, and the block in both areas where the next entry goes.
    open_base: Option<(u64, u64)>,
    /// First block of an area that may be torn when power comes back, whatever it reads as now.
    doubtful: Option<u64>,
    /// What is there may have been written by a program that was killed before it could flush it.
    unflushed: bool,
    /// The largest generation that anything on flash may have.
    last: u64,
    sound: bool,
}

impl Places {
    /// On a device that is being formatted.
    pub fn new(layout: &Layout) -> Result<Places, FormatError> {
        Ok(Places {
            areas: Areas::first(layout)?,
            moved: false,
            notes_missing: [false; 2],
            open_base: None,
            doubtful: None,
            unflushed: false,
            last: 0,
            sound: false,
        })
    }

    /// True if every copy of the registry was whole when it was read. Else one more fault may be one
    /// too many, until something is stored.
    pub fn is_sound(&self) -> bool {
        self.sound
    }

    /// What is called old from now on is not quite what is on flash: the next store is of everything.
    pub fn begin_anew(&mut self) {
        self.open_base = None;
    }

    /// Reads both areas and returns the newest registry of `pool`.
    ///
    /// What is torn or damaged in one is taken from the other. Anything intact that needs a newer version
    /// stops everything. Where everything is there twice, what is damaged in both is read from the other device.
    pub fn load(
        media: &mut dyn Media,
        layout: &Layout,
        pool: Uuid,
    ) -> Result<(Registry, Places), FormatError> {
        match Places::load_half(media, layout, pool) {
            Err(e @ FormatError::Newer { .. }) => Err(e),
            Err(e) => match Places::load_half(&mut OtherHalf(media), layout, pool) {
                Ok((registry, places)) => {
                    let sound = false;
                    Ok((registry, Places { sound, ..places }))
                }
                Err(_) => Err(e),
            },
            read => read,
        }
    }

    /// Is it damaged as it is read, and whole on the other device, and no older there?
    pub(crate) fn better_there(media: &mut dyn Media, layout: &Layout, pool: Uuid) -> bool {
        let here = Places::load_half(media, layout, pool);
        let sound = |(_, places): &(Registry, Places)| places.is_sound();
        if here.as_ref().is_ok_and(sound) || matches!(here, Err(FormatError::Newer { .. })) {
            return false;
        }
        match (here, Places::load_half(&mut OtherHalf(media), layout, pool)) {
            (Err(_), there) => there.is_ok(),
            (Ok((here, _)), Ok(there)) => sound(&there) && there.0.generation >= here.generation,
            (Ok(_), Err(_)) => false,
        }
    }

    fn load_half(
        media: &mut dyn Media,
        layout: &Layout,
        pool: Uuid,
    ) -> Result<(Registry, Places), FormatError> {
        let mut areas = Areas::first(layout)?;
        let mut fronts = fronts(media, &areas, pool);
        let mut notes_missing = [false; 2];
        let mut last = 0;
        let note = match &fronts[newest(&fronts)?] {
            Ok(Front::Moved(moved)) => Some(*moved),
            _ => None,
        };
        if let Some(note) = note {
            last = note.generation;
            let here = (note.start, note.blocks);
            notes_missing = fronts
                .each_ref()
                .map(|front| !matches!(front, Ok(Front::Moved(n)) if (n.start, n.blocks) == here));
            areas = Areas::grown(layout)
                .filter(|grown| (grown.start[0], grown.blocks) == (note.start, note.blocks))
                .ok_or_else(|| FormatError::Newer {
                    what: WHAT,
                    feature: format!(
                        "a place of its own, {} blocks at block {}",
                        note.blocks, note.start
                    ),
                })?;
            fronts = self::fronts(media, &areas, pool);
        }
        let generations = fronts.iter().flatten().map(Front::generation);
        last = generations.fold(last, u64::max);
        let at = newest(&fronts)?;
        let [a, b] = fronts;
        let (counts, other) = if at == 0 { (a, b) } else { (b, a) };
        let mut sound =
            !notes_missing.contains(&true) && counts.as_ref().ok() == other.as_ref().ok();
        let Front::Base {
            mut registry,
            journal,
            blocks,
        } = counts?
        else {
            return Err(FormatError::damaged(
                WHAT,
                "it lies in two places, neither of which has it",
            ));
        };
        if journal {
            let tails = [0, 1].map(|area| tail(media, &areas, area, blocks));
            let chain = replay(registry, [&tails[0], &tails[1]], pool)?;
            sound &= chain.whole == [true; 2];
            registry = chain.registry;
        }
        last = last.max(registry.generation);
        let places = Places {
            areas,
            moved: note.is_some(),
            notes_missing,
            open_base: None,
            doubtful: None,
            unflushed: true,
            last,
            sound,
        };
        Ok((registry, places))
    }

    /// Stores `next`, which was made from `old`, the registry on flash; gives it its generation. When it
    /// returns `Ok`, `next` is durable in both places. On an error `old` or `next` is found later, until
    /// something is stored.
    pub fn store(
        &mut self,
        media: &mut dyn Media,
        layout: &Layout,
        pool: Uuid,
        old: &Registry,
        next: &mut Registry,
    ) -> Result<(), FormatError> {
        let Some(generation) = self.last.max(old.generation).checked_add(1) else {
            return Err(FormatError::unfit(WHAT, "its generation is at its end"));
        };
        next.generation = generation;
        if let Some((base, at)) = self.open_base
            && let Some(entry) = JournalEntry::between(old, next, base)
            && let Some(bytes) = entry.encode(pool)?
            && at * BLOCK + bytes.len() as u64 <= self.areas.blocks * BLOCK
        {
            check_changes(&entry, old, next)?;
            self.begin(generation);
            for area in 0..self.areas.start.len() {
                write(media, self.areas.offset(area) + at * BLOCK, &bytes)?;
            }
            flush(media)?;
            self.open_base = Some((base, at + bytes.len() as u64 / BLOCK));
        } else {
            self.store_base(media, layout, pool, old.generation, next)?;
        }
        self.sound = true;
        Ok(())
    }

    /// Until it has succeeded, nothing on flash is continued, and nothing else gets this generation.
    fn begin(&mut self, generation: u64) {
        self.open_base = None;
        self.last = generation;
    }

    fn store_base(
        &mut self,
        media: &mut dyn Media,
        layout: &Layout,
        pool: Uuid,
        old: u64,
        next: &Registry,
    ) -> Result<(), FormatError> {
        let mut bytes = next.encode_base(pool, false)?;
        let first = Areas::first(layout)?;
        // With less than half an area left for entries, a change would cost more than two blocks on
        // the average.
        let outgrown = !self.moved && bytes.len() > self.areas.bytes() / 2;
        let grown = Areas::grown(layout).filter(|_| outgrown);
        let areas = grown.unwrap_or(self.areas);
        if bytes.len() > areas.bytes() {
            return Err(too_large(bytes.len(), areas.bytes()));
        }
        let journal = areas != first || bytes.len() > REGISTRY_PLAIN_BYTES;
        if journal {
            bytes = next.encode_base(pool, true)?;
        }
        self.begin(next.generation);
        if std::mem::take(&mut self.unflushed) {
            flush(media)?;
        }
        // Never both at once, even where nothing counts yet: a note of a store that failed may point there.
        self.store_both(media, &areas, pool, [next.generation, old], &bytes)?;
        let note = Moved {
            generation: next.generation,
            start: areas.offset(0) / BLOCK,
            blocks: areas.blocks,
        };
        if grown.is_some() {
            let note = note.encode(pool);
            self.store_both(media, &first, pool, [next.generation, old], &note)?;
            (self.areas, self.moved) = (areas, true);
        }
        for area in 0..first.start.len() {
            if self.notes_missing[area] {
                write(media, first.offset(area), &note.encode(pool))?;
                flush(media)?;
                self.notes_missing[area] = false;
            }
        }
        self.open_base = journal.then_some((next.generation, bytes.len() as u64 / BLOCK));
        Ok(())
    }

    /// Writes both areas for a registry of the first of `generations`, one after the other, each followed by
    /// a flush.
    ///
    /// Which goes first alternates with the generation. After a crash between the two, the torn area is
    /// the first of the next store; and should the area to be written second not have the second of
    /// `generations`, it goes first: the only good copy is never the one at risk.
    fn store_both(
        &mut self,
        media: &mut dyn Media,
        areas: &Areas,
        pool: Uuid,
        generations: [u64; 2],
        bytes: &[u8],
    ) -> Result<(), FormatError> {
        let [generation, old] = generations;
        let mut first = (generation % 2) as usize;
        let doubtful = |area| self.doubtful == areas.start.get(area).copied();
        let behind = |reach: Option<u64>| reach.is_none_or(|reach| reach < old);
        if doubtful(1 - first) || !doubtful(first) && behind(reach(media, areas, 1 - first, pool)) {
            first = 1 - first;
        }
        for area in [first, 1 - first] {
            self.doubtful = areas.start.get(area).copied();
            write(media, areas.offset(area), bytes)?;
            flush(media)?;
            self.doubtful = None;
        }
        Ok(())
    }
}

/// The generation that one area alone makes.
fn reach(media: &mut dyn Media, areas: &Areas, area: usize, pool: Uuid) -> Option<u64> {
    match front(media, areas, area, pool).ok()? {
        Front::Base {
            registry,
            journal: true,
            blocks,
        } => {
            let tail = tail(media, areas, area, blocks);
            let chain = replay(registry, [&tail, &[]], pool).ok()?;
            Some(chain.registry.generation)
        }
        front => Some(front.generation()),
    }
}

type Fronts = [Result<Front, FormatError>; 2];

fn fronts(media: &mut dyn Media, areas: &Areas, pool: Uuid) -> Fronts {
    [0, 1].map(|area| front(media, areas, area, pool))
}

fn front(
    media: &mut dyn Media,
    areas: &Areas,
    area: usize,
    pool: Uuid,
) -> Result<Front, FormatError> {
    let offset = areas.offset(area);
    let mut bytes = vec![0u8; BLOCK_BYTES];
    read(media, offset, &mut bytes)?;
    // The length is not trusted yet, only bounded; the checksum judges it.
    if let Some(used) = Front::bytes(&bytes)
        && (BLOCK_BYTES + 1..=areas.bytes()).contains(&used)
    {
        bytes.resize(used.next_multiple_of(BLOCK_BYTES), 0);
        read(media, offset, &mut bytes)?;
    }
    Front::decode(&bytes, pool)
}

/// Which of two fronts counts.
fn newest(fronts: &Fronts) -> Result<usize, FormatError> {
    copies::newest(fronts, Front::generation)
}

/// What stands behind a base of `blocks` blocks; zeros where the device gives nothing back.
fn tail(media: &mut dyn Media, areas: &Areas, area: usize, blocks: u64) -> Vec<u8> {
    let blocks = blocks.min(areas.blocks);
    let offset = areas.offset(area) + blocks * BLOCK;
    let mut bytes = vec![0u8; ((areas.blocks - blocks) * BLOCK) as usize];
    for (number, piece) in bytes.chunks_mut(READ_BYTES).enumerate() {
        let at = offset + (number * READ_BYTES) as u64;
        if media.read_at(at, piece).is_ok() {
            continue;
        }
        for (number, block) in piece.chunks_mut(BLOCK_BYTES).enumerate() {
            if media.read_at(at + number as u64 * BLOCK, block).is_err() {
                block.fill(0);
            }
        }
    }
    bytes
}

/// What an entry must not do to the registry it makes.
fn check_changes(entry: &JournalEntry, old: &Registry, next: &Registry) -> Result<(), FormatError> {
    // Names and numbers that were there before were unique then.
    let known = |disk: &SharedRecord| old.by_id(disk.id).is_some_and(|was| was.name == disk.name);
    let added = entry.changes.iter().filter_map(|change| match change {
        Change::Put(disk) if !known(disk) => Some(disk),
        _ => None,
    });
    let added: Vec<_> = added.collect();
    if added.len() > CHECKED_ONE_BY_ONE || next.disks.len() > DISKS_MAX {
        return next.check();
    }
    for disk in added {
        let same = |other: &&SharedRecord| other.id == disk.id || other.name == disk.name;
        if next.disks.iter().filter(same).count() != 1 {
            return next.check();
        }
    }
    Ok(())
}

fn read(media: &mut dyn Media, offset: u64, bytes: &mut [u8]) -> Result<(), FormatError> {
    media
        .read_at(offset, bytes)
        .map_err(|source| FormatError::Io {
            doing: "reading the registry",
            source,
        })
}

fn write(media: &mut dyn Media, offset: u64, bytes: &[u8]) -> Result<(), FormatError> {
    media
        .write_at(offset, bytes)
        .map_err(|source| FormatError::Io {
            doing: "writing the registry",
            source,
        })
}

fn flush(media: &mut dyn Media) -> Result<(), FormatError> {
    media.flush().map_err(|source| FormatError::Io {
        doing: "writing the registry",
        source,
    })
}
