//! What is remembered of a mirror's legs: which of them hold the disk, and which do not any more.
//!
//! The legs are plain images, and nothing is written into them that would say how old they are. So it is
//! kept elsewhere, in two places: in the disk's record in the pool ([`MirrorStamps`]), and, with the regions
//! in which the legs may differ, in a file of the state directory ([`MirrorNotes`]). Neither of the two
//! devices alone takes the knowledge along when it dies.

use uuid::Uuid;

use crate::error::FormatError;
use crate::wire::{array_at, crc_with_hole, put, u16_at, u32_at, u64_at};

/// Most legs of a mirror.
pub const LEGS_MAX: usize = 8;
/// Most regions a mirror is divided into.
pub const REGIONS_MAX: u64 = 131_072;
/// Most places of which it is remembered what was written there last.
pub const MARKS_MAX: usize = 48;
/// Least bytes of a region.
pub const REGION_MIN: u64 = 16 << 20;
/// Bytes of the notes' file: two slots.
pub const NOTES_BYTES: usize = 2 * SLOT;

/// Bytes of a slot: a block, and a bit for each region.
const SLOT: usize = 32 << 10;
const BITS_AT: usize = 4096;
const HEAD: usize = 16;
const LEG: usize = 56;
const MARK: usize = 12;
const MAGIC: &[u8; 4] = b"HMIR";
const VERSION: u16 = 1;
const WHAT: &str = "mirror stamps";
const NOTES: &str = "mirror notes";

const OPEN: u8 = 1;
const UNKNOWN: u8 = 2;
const WHOLE: u8 = 1;

/// What a leg is to its mirror.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LegState {
    /// It holds every write that a flush has covered.
    Current = 1,
    /// It takes writes, and is being brought up to date.
    Behind = 2,
    /// It takes no writes.
    Out = 3,
}

/// What is known of a leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LegStamp {
    /// Tells it from every other leg, whatever its path.
    pub id: Uuid,
    /// The mirror's generation when it was current last.
    pub generation: u64,
    /// What it is.
    pub state: LegState,
    /// It has to be copied as a whole: what it missed is not known.
    pub whole: bool,
    /// Of such a copy, so many bytes from the start are done.
    pub copied: u64,
    /// What it looked like when it was left in order: time of modification in nanoseconds since 1970, and
    /// inode; zeros if that is not known, or says nothing.
    pub left: (i64, u64),
}

/// What was written to a block of the mirror last, and so is on every leg that is current, unless the block is in a
/// region where they may differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The block's number.
    pub block: u64,
    /// The CRC32C of what was written.
    pub sum: u32,
}

/// Which legs hold the disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MirrorStamps {
    /// Grows whenever a leg goes out or comes back, and when writing begins and ends.
    pub generation: u64,
    /// The legs may differ in the regions that are noted.
    pub open: bool,
    /// The regions could not be noted: while `open`, they are all.
    pub unknown: bool,
    /// The legs, in the order in which the origin names them.
    pub legs: Vec<LegStamp>,
    /// The places written last, the newest first.
    pub marks: Vec<Mark>,
}

impl MirrorStamps {
    /// The same for other legs than these: of one that these do not know nothing is believed.
    pub fn with_legs(&self, legs: &[LegStamp]) -> MirrorStamps {
        let noted = |own: &LegStamp| self.legs.iter().find(|l| l.id == own.id).copied();
        let unknown = |own: &LegStamp| LegStamp {
            generation: own.generation.min(self.generation),
            state: LegState::Out,
            whole: true,
            copied: 0,
            ..*own
        };
        let legs = legs
            .iter()
            .map(|own| noted(own).unwrap_or_else(|| unknown(own)));
        MirrorStamps {
            legs: legs.collect(),
            ..self.clone()
        }
    }

    /// Checks what must hold, whoever made them.
    pub fn check(&self) -> Result<(), FormatError> {
        let fault =
            if self.legs.is_empty() || self.legs.len() > LEGS_MAX {
                "it has no legs, or more than 8"
            } else if self.marks.len() > MARKS_MAX {
                "it has more than 48 places that were written last"
            } else if self.legs.iter().any(|l| l.generation > self.generation) {
                "a leg is newer than its mirror"
            } else if self.legs.iter().any(|l| {
                l.state == LegState::Current && (l.whole || l.generation != self.generation)
            }) {
                "a leg that is current is older than its mirror"
            } else if (1..self.legs.len()).any(|i| {
                let (before, at) = self.legs.split_at(i);
                before
                    .iter()
                    .any(|l| Some(l.id) == at.first().map(|l| l.id))
            }) {
                "two legs have the same identifier"
            } else {
                return Ok(());
            };
        Err(FormatError::wrong(WHAT, fault))
    }

    /// Their bytes.
    pub fn encode(&self) -> Result<Vec<u8>, FormatError> {
        self.check()?;
        let mut out = vec![0; HEAD];
        put(&mut out, 0, &self.generation.to_le_bytes());
        let flags = u8::from(self.open) * OPEN + u8::from(self.unknown) * UNKNOWN;
        let counts = [self.legs.len() as u8, self.marks.len() as u8];
        put(&mut out, 8, &[flags, counts[0], counts[1]]);
        for leg in &self.legs {
            let at = out.len();
            out.resize(at + LEG, 0);
            put(&mut out, at, leg.id.as_bytes());
            put(&mut out, at + 16, &leg.generation.to_le_bytes());
            put(&mut out, at + 24, &leg.copied.to_le_bytes());
            put(
                &mut out,
                at + 32,
                &[leg.state as u8, u8::from(leg.whole) * WHOLE],
            );
            put(&mut out, at + 40, &leg.left.0.to_le_bytes());
            put(&mut out, at + 48, &leg.left.1.to_le_bytes());
        }
        for mark in &self.marks {
            out.extend(mark.block.to_le_bytes());
            out.extend(mark.sum.to_le_bytes());
        }
        Ok(out)
    }

    /// Reads them from exactly their bytes.
    pub fn decode(bytes: &[u8]) -> Result<MirrorStamps, FormatError> {
        let damaged = |why: &'static str| FormatError::damaged(WHAT, why);
        let [flags, count, marks] = array_at(bytes, 8);
        let marks_at = HEAD + usize::from(count) * LEG;
        if bytes.len() != marks_at + usize::from(marks) * MARK {
            return Err(damaged("their length is not that of the legs"));
        }
        if flags & !(OPEN | UNKNOWN) != 0 {
            return Err(damaged("they have flags that this version does not know"));
        }
        let mut legs = Vec::new();
        for leg in bytes.get(HEAD..marks_at).unwrap_or_default().chunks(LEG) {
            let [state, flags] = array_at(leg, 32);
            let state = match state {
                1 => LegState::Current,
                2 => LegState::Behind,
                3 => LegState::Out,
                _ => return Err(damaged("a leg's state is none")),
            };
            if flags & !WHOLE != 0 {
                return Err(damaged("a leg has flags that this version does not know"));
            }
            legs.push(LegStamp {
                id: Uuid::from_bytes(array_at(leg, 0)),
                generation: u64_at(leg, 16),
                copied: u64_at(leg, 24),
                state,
                whole: flags & WHOLE != 0,
                left: (u64_at(leg, 40) as i64, u64_at(leg, 48)),
            });
        }
        let marks = bytes.get(marks_at..).unwrap_or_default().chunks(MARK);
        let mark = |mark| Mark {
            block: u64_at(mark, 0),
            sum: u32_at(mark, 8),
        };
        let stamps = MirrorStamps {
            generation: u64_at(bytes, 0),
            open: flags & OPEN != 0,
            unknown: flags & UNKNOWN != 0,
            legs,
            marks: marks.map(mark).collect(),
        };
        stamps.check()?;
        Ok(stamps)
    }
}

/// Bytes of a region of a mirror of `size` bytes.
pub fn region_bytes(size: u64) -> u64 {
    size.div_ceil(REGIONS_MAX)
        .next_power_of_two()
        .max(REGION_MIN)
}

/// What the state directory knows of a mirror.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirrorNotes {
    /// The disk's serial number.
    pub serial: Uuid,
    /// Grows with every store.
    pub sequence: u64,
    /// Bytes of a region.
    pub region: u64,
    /// How many there are.
    pub regions: u64,
    /// Which legs hold the disk.
    pub stamps: MirrorStamps,
    /// A bit for each region, the lowest first: the legs may differ there, or a leg that is not current
    /// has missed what was written there.
    pub touched: Vec<u64>,
}

impl MirrorNotes {
    /// Where in the file, and what. The place is that of the store before the last, so that one that is
    /// cut short leaves the last one alone.
    pub fn encode(&self) -> Result<(u64, Vec<u8>), FormatError> {
        let stamps = self.stamps.encode()?;
        if !self.region.is_power_of_two() || self.regions > REGIONS_MAX {
            return Err(FormatError::wrong(NOTES, "its regions are none"));
        }
        let bits = (self.regions.div_ceil(64) * 8) as usize;
        let len = (BITS_AT + bits).next_multiple_of(4096);
        let mut out = vec![0; len];
        put(&mut out, 0, MAGIC);
        put(&mut out, 8, &VERSION.to_le_bytes());
        put(&mut out, 10, &(stamps.len() as u16).to_le_bytes());
        put(&mut out, 12, &(len as u32).to_le_bytes());
        put(&mut out, 16, self.serial.as_bytes());
        put(&mut out, 32, &self.sequence.to_le_bytes());
        put(&mut out, 40, &self.region.to_le_bytes());
        put(&mut out, 48, &self.regions.to_le_bytes());
        put(&mut out, 64, &stamps);
        for (i, word) in self.touched.iter().take(bits / 8).enumerate() {
            put(&mut out, BITS_AT + i * 8, &word.to_le_bytes());
        }
        let crc = crc_with_hole(&out, 4);
        put(&mut out, 4, &crc.to_le_bytes());
        Ok((self.sequence % 2 * SLOT as u64, out))
    }

    /// The newest notes of this disk in the file's bytes; `None` if there are none.
    pub fn newest(file: &[u8], serial: &Uuid) -> Option<MirrorNotes> {
        let slots = file.chunks(SLOT).take(2);
        let found = slots.filter_map(|slot| MirrorNotes::decode(slot).ok());
        found
            .filter(|notes| notes.serial == *serial)
            .max_by_key(|notes| notes.sequence)
    }

    fn decode(slot: &[u8]) -> Result<MirrorNotes, FormatError> {
        let damaged = |why: &'static str| FormatError::damaged(NOTES, why);
        if slot.get(..4) != Some(MAGIC) {
            return Err(damaged("there are none"));
        }
        let len = u32_at(slot, 12) as usize;
        let slot = slot.get(..len).filter(|s| s.len() >= BITS_AT);
        let slot = slot.ok_or_else(|| damaged("their length is none"))?;
        if crc_with_hole(slot, 4) != u32_at(slot, 4) {
            return Err(damaged("their checksum does not fit"));
        }
        if u16_at(slot, 8) != VERSION {
            return Err(damaged("they are of another version"));
        }
        let stamps = slot.get(64..64 + usize::from(u16_at(slot, 10)));
        let stamps = MirrorStamps::decode(stamps.ok_or_else(|| damaged("they are cut short"))?)?;
        let (region, regions) = (u64_at(slot, 40), u64_at(slot, 48));
        let bits = (regions.min(REGIONS_MAX).div_ceil(64) * 8) as usize;
        let touched = slot.get(BITS_AT..BITS_AT + bits);
        if !region.is_power_of_two() || regions > REGIONS_MAX || touched.is_none() {
            return Err(damaged("their regions are none"));
        }
        let words = touched.unwrap_or_default().chunks(8);
        Ok(MirrorNotes {
            serial: Uuid::from_bytes(array_at(slot, 16)),
            sequence: u64_at(slot, 32),
            region,
            regions,
            stamps,
            touched: words.map(|word| u64_at(word, 0)).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamps() -> MirrorStamps {
        let leg = |n: u8, generation, state, whole, copied| LegStamp {
            id: Uuid::from_bytes([n; 16]),
            generation,
            state,
            whole,
            copied,
            left: (-5, u64::from(n)),
        };
        MirrorStamps {
            generation: 9,
            open: true,
            unknown: false,
            legs: vec![
                leg(1, 9, LegState::Current, false, 0),
                leg(2, 7, LegState::Behind, true, 32 << 20),
                leg(3, 4, LegState::Out, false, 0),
            ],
            marks: vec![mark(1 << 40), mark(7)],
        }
    }

    fn mark(block: u64) -> Mark {
        Mark {
            block,
            sum: 0x0102_0304,
        }
    }

    fn notes(sequence: u64) -> MirrorNotes {
        MirrorNotes {
            serial: Uuid::from_bytes([5; 16]),
            sequence,
            region: REGION_MIN,
            regions: 130,
            stamps: stamps(),
            touched: vec![1, 1 << 63, 2],
        }
    }

    #[test]
    fn stamps_read_and_write() {
        let bytes = stamps().encode().unwrap();
        assert_eq!(MirrorStamps::decode(&bytes).unwrap(), stamps());
        for len in 0..bytes.len() {
            assert!(MirrorStamps::decode(&bytes[..len]).is_err());
        }
        let mut newer = stamps();
        newer.legs[1].state = LegState::Current;
        assert!(newer.encode().is_err(), "a leg is current that is older");
        let mut many = stamps();
        many.marks = vec![mark(1); MARKS_MAX + 1];
        assert!(many.encode().is_err(), "there is no room for so many");
    }

    #[test]
    fn a_store_that_is_cut_short_leaves_the_one_before() {
        let mut file = vec![0; NOTES_BYTES];
        for sequence in [6, 7] {
            let (at, bytes) = notes(sequence).encode().unwrap();
            file[at as usize..][..bytes.len()].copy_from_slice(&bytes);
        }
        let serial = notes(0).serial;
        assert_eq!(MirrorNotes::newest(&file, &serial), Some(notes(7)));
        // What stays of the store before the last is not what this one says.
        let mut next = notes(8);
        next.touched = vec![0, 0, 2];
        let (at, bytes) = next.encode().unwrap();
        for cut in [1, 512, 4096, 4100] {
            let mut torn = file.clone();
            torn[at as usize..][..cut].copy_from_slice(&bytes[..cut]);
            assert_eq!(MirrorNotes::newest(&torn, &serial), Some(notes(7)));
        }
        assert_eq!(MirrorNotes::newest(&file, &Uuid::nil()), None);
    }

    #[test]
    fn the_largest_disk_has_room() {
        let size = 256u64 << 40;
        let region = region_bytes(size);
        assert!(size.div_ceil(region) <= REGIONS_MAX);
        let largest = MirrorNotes {
            regions: REGIONS_MAX,
            touched: vec![u64::MAX; REGIONS_MAX as usize / 64],
            stamps: MirrorStamps {
                legs: (1..=8)
                    .map(|n| LegStamp {
                        id: Uuid::from_bytes([n; 16]),
                        generation: 9,
                        state: LegState::Current,
                        whole: false,
                        copied: 0,
                        left: (0, 0),
                    })
                    .collect(),
                marks: vec![mark(9); MARKS_MAX],
                ..stamps()
            },
            ..notes(1)
        };
        let (at, bytes) = largest.encode().unwrap();
        assert!(bytes.len() <= SLOT);
        let mut file = vec![0; NOTES_BYTES];
        file[at as usize..][..bytes.len()].copy_from_slice(&bytes);
        assert_eq!(MirrorNotes::newest(&file, &largest.serial), Some(largest));
    }
}
