//! The superblock: what makes a device part of a pool.
//!
//! It must be found by every version, survive a crash while it is being rewritten, and stop an
//! older version before it misreads a newer pool. So there are two copies far apart, written
//! one after the other with a flush between, and the first 32 bytes never move.

use crate::areas::{self, Area};
use crate::devices::{DEVICES_MAX, DeviceEntry, list_at, put_list};
use crate::error::FormatError;
use crate::layout::{Added, Layout, SUPERBLOCK_BLOCKS};
use crate::wire::{array_at, crc_with_hole, put, u16_at, u32_at, u64_at};
use crate::{BLOCK_BYTES, copies, pool_tag};
use hearth_io::Media;
use uuid::Uuid;

/// First bytes of a superblock.
pub const SUPERBLOCK_MAGIC: [u8; 8] = *b"HEARTHSB";
/// Format version written. A larger major number is refused; a larger minor one is fine.
pub const FORMAT_MAJOR: u16 = 1;
/// Minor format version written: informs only.
pub const FORMAT_MINOR: u16 = 0;
/// Features without which a pool cannot be opened at all, known to this version.
pub const INCOMPAT_KNOWN: u64 = INCOMPAT_AREAS
    | INCOMPAT_MAP
    | INCOMPAT_DEVICES
    | INCOMPAT_TWICE
    | INCOMPAT_CHANGED
    | INCOMPAT_ORDER
    | INCOMPAT_HEADS
    | INCOMPAT_FLOOR
    | INCOMPAT_ONCE;
/// Segments may be set aside for something that is no part of the log ([`crate::areas`]).
pub const INCOMPAT_AREAS: u64 = 1 << 0;
/// The [segment map](crate::map) says which segments count.
pub const INCOMPAT_MAP: u64 = 1 << 2;
/// The pool has several [devices](crate::devices).
pub const INCOMPAT_DEVICES: u64 = 1 << 3;
/// Everything is on two of its devices.
pub const INCOMPAT_TWICE: u64 = 1 << 4;
/// A device has gone, so that not all numbers of segments are of one; or this device is half on its way into the pool
/// or out of it ([`Part`]).
pub const INCOMPAT_CHANGED: u64 = 1 << 5;
/// The log may have [marks](crate::entry::Mark) of ordered disks.
pub const INCOMPAT_ORDER: u64 = 1 << 6;
/// Batches of several segments that are written at once follow one another.
pub const INCOMPAT_HEADS: u64 = 1 << 7;
/// A device was lost with what it held, and the pool has gone on without it: segments below
/// [`log_floor`](Superblock::log_floor) count where a checkpoint tells of them, and in no log that is read.
pub const INCOMPAT_FLOOR: u64 = 1 << 8;
/// Of everything that is on two devices, clean blocks are on one.
pub const INCOMPAT_ONCE: u64 = 1 << 9;
/// Features without which a pool must not be written, known to this version.
pub const RO_COMPAT_KNOWN: u64 = 0;
/// Longest label or host name, in bytes.
pub const LABEL_MAX: usize = 63;

const WHAT: &str = "superblock";
const CRC_AT: usize = 12;
const PEER_AT: usize = 3920;
const ONCE_AT: usize = 3936;
const BLOCK: u64 = BLOCK_BYTES as u64;

/// How the pool was left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolState {
    /// Stopped cleanly: the checkpoint describes all of the log.
    Clean {
        /// Must equal the id in the checkpoint's header.
        checkpoint_id: u64,
        /// Bytes of the checkpoint area in use.
        checkpoint_bytes: u64,
    },
    /// In use, or not stopped: the log must be walked.
    Open,
    /// The device failed and was given up; nothing on it counts any more.
    Failed,
}

/// Clean blocks that went with a device which has been replaced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OnceFloor {
    /// In segments numbered below.
    pub floor: u64,
    /// On these devices.
    pub behind: u64,
}

/// What a device is to the pool that its superblock names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Part {
    /// A part of it.
    #[default]
    Member,
    /// It is to take the place of another one ([`peer`](Superblock::peer)), which still has it.
    Coming,
    /// It is none any more: another one has taken its place, and has all that it had, or it was emptied and taken out.
    Gone,
}

/// The superblock of one flash device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Which copy this is: 0, or 1 at 1 MiB. After [`load`](Self::load) and
    /// [`store`](Self::store): a copy known to be good.
    pub copy: u8,
    /// Grows with every store; the larger one counts.
    pub generation: u64,
    /// The pool.
    pub pool: Uuid,
    /// This device.
    pub device: Uuid,
    /// Its place among the pool's devices.
    pub device_index: u16,
    /// How many devices the pool has.
    pub device_count: u16,
    /// All of them, if there are several, by their places.
    pub devices: Vec<DeviceEntry>,
    /// Of several: which opening of the pool this device took part in last.
    pub stamp: u64,
    /// Of the first of several: the stamp that the others are being given, or have been; else 0.
    pub next_stamp: u64,
    /// What the device is to the pool.
    pub part: Part,
    /// The device whose place it took or is to take, or which has taken its place; nil if there is none.
    pub peer: Uuid,
    /// Of the first device: segments that are no part of the log, by their numbers.
    pub areas: Vec<Area>,
    /// Of a pool that keeps everything twice: bit `n` says that device `n` is lost, and nothing on it counts.
    pub lost: u64,
    /// Where clean blocks are on one device: those in segments numbered below `floor` do not count if they are on a device of
    /// which `behind` has the bit. It took the place of one that was lost.
    pub once: OnceFloor,
    /// Features a reader must know, else it must not open the pool.
    pub incompat: u64,
    /// Features a reader may ignore.
    pub compat: u64,
    /// Features a writer must know, else it must not change the pool.
    pub ro_compat: u64,
    /// Where the areas are, of all devices as one ([`spread`](Self::spread)).
    pub layout: Layout,
    /// When the device was formatted, seconds since 1970.
    pub created_unix_s: u64,
    /// How the pool was left.
    pub state: PoolState,
    /// Segments numbered below this do not count, whatever the log says; 0: the log alone says it. Of pools
    /// without a [map](crate::map), and of those that have gone on [without a device](INCOMPAT_FLOOR).
    pub log_floor: u64,
    /// Clean copies in segments numbered below this do not count; dirty blocks there do.
    pub clean_floor: u64,
    /// The user's name for the pool; at most [`LABEL_MAX`] bytes are kept.
    pub label: String,
    /// Host that last opened the pool, so that a second one can say who; bounded likewise.
    pub last_host: String,
}

impl Superblock {
    /// A superblock for a new one-device pool, not stored yet. For more devices there is
    /// [`set_devices`](Self::set_devices).
    pub fn new(
        layout: Layout,
        pool: Uuid,
        device: Uuid,
        label: &str,
        created_unix_s: u64,
    ) -> Superblock {
        Superblock {
            copy: 1,
            generation: 0,
            pool,
            device,
            device_index: 0,
            device_count: 1,
            devices: Vec::new(),
            stamp: 0,
            next_stamp: 0,
            part: Part::Member,
            peer: Uuid::nil(),
            areas: Vec::new(),
            lost: 0,
            once: OnceFloor::default(),
            incompat: 0,
            compat: 0,
            ro_compat: 0,
            layout,
            created_unix_s,
            state: PoolState::Open,
            log_floor: 0,
            clean_floor: 0,
            label: bounded(label).to_owned(),
            last_host: String::new(),
        }
    }

    /// The pool's tag in batches, summaries and checkpoints.
    pub fn pool_tag(&self) -> u64 {
        pool_tag(&self.pool)
    }

    /// Segments numbered below this count in a checkpoint only; 0: there are none.
    pub fn floor_of_log(&self) -> u64 {
        match self.incompat & INCOMPAT_FLOOR {
            0 => 0,
            _ => self.log_floor,
        }
    }

    /// True if a feature this version does not know forbids changing the pool.
    pub fn must_stay_read_only(&self) -> bool {
        self.ro_compat & !RO_COMPAT_KNOWN != 0
    }

    /// The bytes of copy `self.copy`. A label or host longer than [`LABEL_MAX`] is cut.
    pub fn encode(&self) -> Box<[u8; BLOCK_BYTES]> {
        let mut block = Box::new([0u8; BLOCK_BYTES]);
        let out = block.as_mut_slice();
        let (state, checkpoint_id, checkpoint_bytes) = match self.state {
            PoolState::Open => (0u8, 0, 0),
            PoolState::Clean {
                checkpoint_id,
                checkpoint_bytes,
            } => (1, checkpoint_id, checkpoint_bytes),
            PoolState::Failed => (2, 0, 0),
        };
        put(out, 0, &SUPERBLOCK_MAGIC);
        put(out, 8, &FORMAT_MAJOR.to_le_bytes());
        put(out, 10, &FORMAT_MINOR.to_le_bytes());
        put(out, 16, &self.incompat.to_le_bytes());
        put(out, 24, &self.generation.to_le_bytes());
        put(out, 32, &self.ro_compat.to_le_bytes());
        put(out, 40, &self.compat.to_le_bytes());
        put(out, 48, &[self.copy, state]);
        put(out, 50, &self.device_index.to_le_bytes());
        put(out, 52, &self.device_count.to_le_bytes());
        put(out, 56, self.pool.as_bytes());
        put(out, 72, self.device.as_bytes());
        put(out, 88, &self.layout.device_blocks.to_le_bytes());
        put(out, 96, &self.layout.segment_blocks.to_le_bytes());
        put(out, 100, &self.layout.summary_blocks.to_le_bytes());
        put(out, 104, &self.layout.checkpoint_start.to_le_bytes());
        put(out, 112, &self.layout.checkpoint_blocks.to_le_bytes());
        put(out, 120, &self.layout.segment_start.to_le_bytes());
        put(out, 128, &self.layout.segment_count.to_le_bytes());
        put(out, 132, &[self.part as u8]);
        put(out, 136, &self.created_unix_s.to_le_bytes());
        put(out, 144, &checkpoint_id.to_le_bytes());
        put(out, 152, &checkpoint_bytes.to_le_bytes());
        put_text(out, 160, &self.label);
        put_text(out, 224, &self.last_host);
        put(out, 288, &self.log_floor.to_le_bytes());
        put(out, 296, &self.clean_floor.to_le_bytes());
        put(out, 304, &self.stamp.to_le_bytes());
        put(out, 312, &self.next_stamp.to_le_bytes());
        put(out, 1344, &self.layout.added.segments.to_le_bytes());
        put(out, 1348, &self.layout.added.map_shift.to_le_bytes());
        put(out, 1352, &self.lost.to_le_bytes());
        areas::put_all(out, &self.areas);
        put_list(out, &self.devices);
        put(out, PEER_AT, self.peer.as_bytes());
        put(out, ONCE_AT, &self.once.floor.to_le_bytes());
        put(out, ONCE_AT + 8, &self.once.behind.to_le_bytes());
        let crc = crc_with_hole(out, CRC_AT);
        put(out, CRC_AT, &crc.to_le_bytes());
        block
    }

    /// Reads one copy. The version is judged only after the checksum, so that rot is not
    /// taken for the future.
    pub fn decode(bytes: &[u8]) -> Result<Superblock, FormatError> {
        let Some(block) = bytes.first_chunk::<BLOCK_BYTES>() else {
            return Err(FormatError::damaged(WHAT, "fewer than 4096 bytes"));
        };
        if array_at::<8>(block, 0) != SUPERBLOCK_MAGIC {
            return Err(FormatError::NotAPool);
        }
        if u32_at(block, CRC_AT) != crc_with_hole(block, CRC_AT) {
            return Err(FormatError::damaged(WHAT, "its checksum does not match"));
        }
        let (major, minor) = (u16_at(block, 8), u16_at(block, 10));
        if major > FORMAT_MAJOR {
            return Err(FormatError::Newer {
                what: WHAT,
                feature: format!("format version {major}.{minor}"),
            });
        }
        let incompat = u64_at(block, 16);
        if incompat & !INCOMPAT_KNOWN != 0 {
            let bits = incompat & !INCOMPAT_KNOWN;
            return Err(FormatError::Newer {
                what: WHAT,
                feature: format!(
                    "incompatible features {bits:#x} (format version {major}.{minor})"
                ),
            });
        }
        if major == 0 {
            return Err(FormatError::damaged(WHAT, "format version 0 never existed"));
        }
        let copy = block[48];
        if copy > 1 {
            return Err(FormatError::damaged(
                WHAT,
                "its copy number is neither 0 nor 1",
            ));
        }
        let layout = Layout {
            device_blocks: u64_at(block, 88),
            segment_blocks: u32_at(block, 96),
            summary_blocks: u32_at(block, 100),
            checkpoint_start: u64_at(block, 104),
            checkpoint_blocks: u64_at(block, 112),
            segment_start: u64_at(block, 120),
            segment_count: u32_at(block, 128),
            // Without a bit it is a pool of a version that left these bytes zero.
            added: match incompat & (INCOMPAT_DEVICES | INCOMPAT_CHANGED) {
                0 => Added::default(),
                _ => Added {
                    segments: u32_at(block, 1344),
                    map_shift: u32_at(block, 1348),
                },
            },
            once: incompat & INCOMPAT_ONCE != 0,
        };
        layout.check()?;
        let changed = incompat & INCOMPAT_CHANGED != 0;
        if !changed && !layout.has_only_grown() {
            return Err(FormatError::damaged(
                WHAT,
                "more segments came later than there are",
            ));
        }
        let part = match (block[132], changed) {
            (0, _) => Part::Member,
            (1, true) => Part::Coming,
            (2, true) => Part::Gone,
            (2, false) if incompat & INCOMPAT_TWICE != 0 => Part::Gone,
            _ => {
                return Err(FormatError::damaged(
                    WHAT,
                    "what it says of the device's part in the pool is unknown",
                ));
            }
        };
        let state = match block[49] {
            0 => PoolState::Open,
            1 => {
                let checkpoint_bytes = u64_at(block, 152);
                if checkpoint_bytes > layout.checkpoint_bytes() {
                    return Err(FormatError::damaged(
                        WHAT,
                        "its checkpoint is larger than the area for it",
                    ));
                }
                PoolState::Clean {
                    checkpoint_id: u64_at(block, 144),
                    checkpoint_bytes,
                }
            }
            2 => PoolState::Failed,
            _ => return Err(FormatError::damaged(WHAT, "its state is unknown")),
        };
        let (device_index, device_count) = (u16_at(block, 50), u16_at(block, 52));
        if device_index >= device_count || device_count > DEVICES_MAX {
            return Err(FormatError::damaged(
                WHAT,
                "its device number and count do not fit",
            ));
        }
        let several = incompat & INCOMPAT_DEVICES != 0;
        if several != (device_count > 1) {
            return Err(FormatError::damaged(
                WHAT,
                "its number of devices and its features do not fit",
            ));
        }
        let device = Uuid::from_bytes(array_at(block, 72));
        let twice = incompat & INCOMPAT_TWICE != 0;
        if twice && (!several || incompat & INCOMPAT_CHANGED != 0) {
            return Err(FormatError::damaged(
                WHAT,
                "it keeps everything twice on one device, or on devices that were changed",
            ));
        }
        if layout.once && !twice {
            return Err(FormatError::damaged(
                WHAT,
                "clean blocks are there once, and nothing is there twice",
            ));
        }
        let (mut devices, mut stamps) = (Vec::new(), [0, 0]);
        if several {
            devices = list_at(block, device_count, &layout, twice)
                .map_err(|why| FormatError::damaged(WHAT, why))?;
            if devices.get(usize::from(device_index)).map(|d| d.device) != Some(device) {
                return Err(FormatError::damaged(
                    WHAT,
                    "its list of devices has another one in its place",
                ));
            }
        }
        if several || changed {
            stamps = [u64_at(block, 304), u64_at(block, 312)];
        }
        let [stamp, next_stamp] = stamps;
        // Without the bit these bytes are not read.
        let lost = if twice { u64_at(block, 1352) } else { 0 };
        if lost.checked_shr(u32::from(device_count)).unwrap_or(0) != 0 {
            return Err(FormatError::damaged(
                WHAT,
                "a device is lost that it does not have",
            ));
        }
        let mut found = Superblock {
            copy,
            generation: u64_at(block, 24),
            pool: Uuid::from_bytes(array_at(block, 56)),
            device,
            device_index,
            device_count,
            devices,
            stamp,
            next_stamp,
            part,
            peer: Uuid::from_bytes(array_at(block, PEER_AT)),
            areas: Vec::new(),
            lost,
            // Without the bit these bytes are not read.
            once: match layout.once {
                true => OnceFloor {
                    floor: u64_at(block, ONCE_AT),
                    behind: u64_at(block, ONCE_AT + 8),
                },
                false => OnceFloor::default(),
            },
            incompat,
            compat: u64_at(block, 40),
            ro_compat: u64_at(block, 32),
            layout,
            created_unix_s: u64_at(block, 136),
            state,
            log_floor: u64_at(block, 288),
            clean_floor: u64_at(block, 296),
            label: text_at(block, 160)?,
            last_host: text_at(block, 224)?,
        };
        // Without the bit these bytes are not read.
        if incompat & INCOMPAT_AREAS != 0 {
            found.areas = areas::all_at(block).map_err(|why| FormatError::damaged(WHAT, why))?;
            (found.check_areas()).map_err(|why| FormatError::damaged(WHAT, why))?;
        }
        Ok(found)
    }

    /// Reads both copies and returns the newest valid one.
    ///
    /// One good copy is enough. Fails with `Newer` if either copy, intact, needs a newer
    /// version; with `TruncatedDevice` if the device is shorter than recorded; with `Damaged`
    /// if a superblock was there but no copy is intact; else with `NotAPool`.
    ///
    /// A device that is only half on its way into the pool, or out of it, is refused: [`Coming`](FormatError::Coming),
    /// [`Gone`](FormatError::Gone).
    pub fn load(media: &mut dyn Media) -> Result<Superblock, FormatError> {
        let found = Superblock::load_any(media)?;
        match found.part {
            Part::Member => Ok(found),
            Part::Coming => Err(FormatError::Coming { of: found.peer }),
            Part::Gone => Err(FormatError::Gone { by: found.peer }),
        }
    }

    /// The same, whatever the device is to the pool.
    pub fn load_any(media: &mut dyn Media) -> Result<Superblock, FormatError> {
        let mut copies = [read_copy(media, 0), read_copy(media, 1)];
        let newest = copies::newest(&copies, |copy| copy.generation)?;
        let best = std::mem::replace(&mut copies[newest], Err(FormatError::NotAPool))?;
        let recorded = best.own_bytes();
        if media.len() < recorded {
            return Err(FormatError::TruncatedDevice {
                recorded,
                actual: media.len(),
            });
        }
        Ok(best)
    }

    /// Which of the two copies can be used: it is intact and where it belongs.
    pub fn whole_copies(media: &mut dyn Media) -> [bool; 2] {
        [0, 1].map(|copy| read_copy(media, copy).is_ok())
    }

    /// Stores the next generation in both copies, one after the other, each followed by a
    /// flush; when it returns `Ok`, both are durable.
    ///
    /// The copy *not* known to be good is written first, so that a torn write never hits the
    /// only good one; repeating a failed store keeps that rule.
    pub fn store(&mut self, media: &mut dyn Media) -> Result<(), FormatError> {
        // Where two carry it, `media` is all devices as one.
        let needed = match self.is_twice() && self.device_index < 2 {
            true => self.layout.device_blocks.saturating_mul(BLOCK),
            false => self.own_bytes(),
        };
        if media.len() < needed {
            return Err(FormatError::TruncatedDevice {
                recorded: needed,
                actual: media.len(),
            });
        }
        let Some(generation) = self.generation.checked_add(1) else {
            return Err(FormatError::unfit(WHAT, "its generation is at its end"));
        };
        self.generation = generation;
        let good = self.copy & 1;
        for copy in [1 - good, good] {
            let mut next = self.clone();
            next.copy = copy;
            let offset = SUPERBLOCK_BLOCKS[usize::from(copy)] * BLOCK;
            let io = |source| FormatError::Io {
                doing: "writing the superblock",
                source,
            };
            media
                .write_at(offset, next.encode().as_slice())
                .map_err(io)?;
            media.flush().map_err(io)?;
            self.copy = copy;
        }
        Ok(())
    }

    /// Overwrites both copies with zeros, so that the device is no pool any more.
    pub fn erase(media: &mut dyn Media) -> Result<(), FormatError> {
        let io = |source| FormatError::Io {
            doing: "erasing the superblock",
            source,
        };
        for block in SUPERBLOCK_BLOCKS {
            if (block + 1) * BLOCK <= media.len() {
                media
                    .write_at(block * BLOCK, &[0; BLOCK_BYTES])
                    .map_err(io)?;
            }
        }
        media.flush().map_err(io)
    }
}

fn read_copy(media: &mut dyn Media, copy: usize) -> Result<Superblock, FormatError> {
    let offset = SUPERBLOCK_BLOCKS.get(copy).copied().unwrap_or_default() * BLOCK;
    if media.len() < offset + BLOCK {
        return Err(FormatError::NotAPool);
    }
    let mut block = [0u8; BLOCK_BYTES];
    media
        .read_at(offset, &mut block)
        .map_err(|source| FormatError::Io {
            doing: "reading the superblock",
            source,
        })?;
    let found = Superblock::decode(&block)?;
    if usize::from(found.copy) != copy {
        return Err(FormatError::wrong(
            WHAT,
            format!(
                "copy {} is where copy {copy} belongs (does the device start at another place than before?)",
                found.copy
            ),
        ));
    }
    Ok(found)
}

/// The longest start of `text` within [`LABEL_MAX`] bytes that cuts no character.
fn bounded(text: &str) -> &str {
    let end = (0..=LABEL_MAX.min(text.len()))
        .rev()
        .find(|at| text.is_char_boundary(*at));
    text.get(..end.unwrap_or(0)).unwrap_or_default()
}

fn put_text(out: &mut [u8], at: usize, text: &str) {
    let text = bounded(text);
    put(out, at, &[text.len() as u8]);
    put(out, at + 1, text.as_bytes());
}

fn text_at(block: &[u8], at: usize) -> Result<String, FormatError> {
    let field: [u8; 1 + LABEL_MAX] = array_at(block, at);
    let [len, text @ ..] = field;
    let Some(text) = text.get(..usize::from(len)) else {
        return Err(FormatError::damaged(WHAT, "a text is longer than 63 bytes"));
    };
    match std::str::from_utf8(text) {
        Ok(text) => Ok(text.to_owned()),
        Err(_) => Err(FormatError::damaged(WHAT, "a text is not UTF-8")),
    }
}
