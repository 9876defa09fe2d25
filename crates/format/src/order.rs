//! Up to when the origin of an ordered disk holds what was flushed, noted beside the flash.
//!
//! With all flash gone nobody can ask the log. So it is noted now and then, in a file of the state directory
//! with two slots for each disk of the pool. What is noted may be older than the truth, never newer: the
//! origin goes forward only, and before it is given anything out of order the note says that nothing is known.

use uuid::Uuid;

use crate::error::FormatError;
use crate::wire::{array_at, crc_with_hole, put, u16_at, u32_at, u64_at};

/// Bytes of a disk's place: disk `n` begins at `n` times this.
pub const ORDER_NOTE_BYTES: usize = 2 * SLOT;

/// A sector: it is written whole or not at all.
const SLOT: usize = 512;
const MAGIC: &[u8; 4] = b"HORD";
const VERSION: u16 = 1;
const WHAT: &str = "note of an ordered disk";

/// What is noted of one disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OrderNote {
    /// The disk's serial number: its number in the pool may be another's by now.
    pub serial: Uuid,
    /// Grows with every store.
    pub sequence: u64,
    /// Milliseconds since 1970; 0: nothing is known.
    pub upto_ms: u64,
}

impl OrderNote {
    /// Where in the disk's place, and what. The slot is that of the store before the last.
    pub fn encode(&self) -> (u64, [u8; SLOT]) {
        let mut out = [0; SLOT];
        put(&mut out, 0, MAGIC);
        put(&mut out, 8, &VERSION.to_le_bytes());
        put(&mut out, 16, self.serial.as_bytes());
        put(&mut out, 32, &self.sequence.to_le_bytes());
        put(&mut out, 40, &self.upto_ms.to_le_bytes());
        let crc = crc_with_hole(&out, 4);
        put(&mut out, 4, &crc.to_le_bytes());
        (self.sequence % 2 * SLOT as u64, out)
    }

    /// The newest of a disk's place; `None` if there is none. One of a later version is refused, and one of which
    /// both slots are damaged tells nothing.
    pub fn newest(place: &[u8]) -> Result<Option<OrderNote>, FormatError> {
        let mut newest: Option<OrderNote> = None;
        for slot in place.chunks_exact(SLOT).take(2) {
            let whole = slot.starts_with(MAGIC) && crc_with_hole(slot, 4) == u32_at(slot, 4);
            if !whole {
                continue;
            }
            if u16_at(slot, 8) > VERSION {
                return Err(FormatError::Newer {
                    what: WHAT,
                    feature: format!("version {}", u16_at(slot, 8)),
                });
            }
            let note = OrderNote {
                serial: Uuid::from_bytes(array_at(slot, 16)),
                sequence: u64_at(slot, 32),
                upto_ms: u64_at(slot, 40),
            };
            if newest.is_none_or(|other| other.sequence < note.sequence) {
                newest = Some(note);
            }
        }
        Ok(newest)
    }
}
