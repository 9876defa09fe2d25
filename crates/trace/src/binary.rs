//! Fixed-size binary records: ESXi vscsiStats and libCacheSim's oracleGeneral.
//!
//! Neither has a header, so a trace is told by two records in a row that fit. Layouts of the
//! vscsi records: libCacheSim, `traceReader/customizedReader/vscsi.h`, checked against its
//! published sample; of oracleGeneral: the same project's documentation.

use crate::record::{BLOCK, LENGTH_MAX, Op, Record};

/// Bytes of a vscsi version 1 record.
pub(crate) const VSCSI1: usize = 32;
/// Bytes of a vscsi version 2 record.
pub(crate) const VSCSI2: usize = 40;
/// Bytes of an oracleGeneral record.
pub(crate) const ORACLE: usize = 24;
/// Bytes of a disk sector, the unit of vscsi addresses.
const SECTOR: u64 = 512;
/// Records looked at to tell a format.
const LOOK: usize = 16;

fn u16_at(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}

fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from(u16_at(b, at)) | u32::from(u16_at(b, at + 2)) << 16
}

fn u64_at(b: &[u8], at: usize) -> u64 {
    u64::from(u32_at(b, at)) | u64::from(u32_at(b, at + 4)) << 32
}

struct Vscsi {
    command: u16,
    version: u16,
    length: u32,
    sector: u64,
    time_us: u64,
}

fn vscsi_fields(b: &[u8], second: bool) -> Vscsi {
    if second {
        Vscsi {
            command: u16_at(b, 0),
            version: u16_at(b, 2),
            length: u32_at(b, 8),
            sector: u64_at(b, 16),
            time_us: u64_at(b, 24),
        }
    } else {
        Vscsi {
            command: u16_at(b, 12),
            version: u16_at(b, 14),
            length: u32_at(b, 4),
            sector: u64_at(b, 16),
            time_us: u64_at(b, 24),
        }
    }
}

/// What a SCSI operation code does to data; `None` if it moves none. SPC-4 and SBC-3.
fn scsi_op(code: u16) -> Option<Op> {
    match code {
        0x08 | 0x28 | 0xA8 | 0x88 => Some(Op::Read),
        // Writes, WRITE SAME (10/16) and COMPARE AND WRITE all change the blocks they name.
        0x0A | 0x2A | 0xAA | 0x8A | 0x41 | 0x93 | 0x89 => Some(Op::Write),
        0x35 | 0x91 => Some(Op::Flush),
        // UNMAP names its ranges in a list that the trace does not have.
        _ => None,
    }
}

/// The operation code to write: the ones of 16 bytes, which can address any disk.
pub(crate) fn scsi_code(op: Op) -> u16 {
    match op {
        Op::Read => 0x88,
        Op::Flush => 0x91,
        Op::Write | Op::Discard => 0x8A,
    }
}

/// Understands a vscsi record, version 2 if `second`.
pub(crate) fn vscsi(b: &[u8], second: bool) -> Result<Option<Record>, String> {
    let v = vscsi_fields(b, second);
    let want = if second { 2 } else { 1 };
    if v.version >> 8 != want {
        return Err(format!("its version field is {:#06x}", v.version));
    }
    let Some(op) = scsi_op(v.command) else {
        return Ok(None);
    };
    let flush = op == Op::Flush;
    let length = if flush { 0 } else { v.length };
    if length == 0 && !flush {
        return Ok(None);
    }
    let offset = v
        .sector
        .checked_mul(SECTOR)
        .filter(|o| o.checked_add(u64::from(length)).is_some())
        .ok_or_else(|| format!("its address {} is beyond any disk", v.sector))?;
    if u64::from(length) > LENGTH_MAX {
        return Err(format!("its length of {length} bytes is beyond 1 GiB"));
    }
    Ok(Some(Record {
        time_us: v.time_us,
        disk: 0,
        op,
        offset: if flush { 0 } else { offset },
        length,
    }))
}

fn rows(head: &[u8], size: usize, whole: bool) -> Option<impl Iterator<Item = &[u8]>> {
    let fits = head.len() >= 2 * size || (whole && head.len() == size);
    fits.then(|| head.chunks_exact(size).take(LOOK))
}

pub(crate) fn looks_like_vscsi(head: &[u8], second: bool, whole: bool) -> bool {
    let size = if second { VSCSI2 } else { VSCSI1 };
    let Some(mut rows) = rows(head, size, whole) else {
        return false;
    };
    rows.all(|b| {
        let v = vscsi_fields(b, second);
        v.version >> 8 == if second { 2 } else { 1 }
            && v.command <= 0xFF
            && u64::from(v.length) <= LENGTH_MAX
    })
}

/// Understands an oracleGeneral record: the object is a block, its size is not used, because
/// all blocks of a cache are alike.
pub(crate) fn oracle(b: &[u8]) -> Result<Option<Record>, String> {
    let block = u64_at(b, 4);
    let offset = block
        .checked_mul(BLOCK)
        .filter(|o| o.checked_add(BLOCK).is_some())
        // Some of these traces hold hashes instead of block numbers; the low bits serve as well.
        .unwrap_or((block & (u64::MAX >> 13)) * BLOCK);
    Ok(Some(Record {
        time_us: u64::from(u32_at(b, 0)) * 1_000_000,
        disk: 0,
        op: Op::Read,
        offset,
        length: BLOCK as u32,
    }))
}

pub(crate) fn looks_like_oracle(head: &[u8], whole: bool) -> bool {
    let Some(rows) = rows(head, ORACLE, whole) else {
        return false;
    };
    let mut before = 0;
    for (index, b) in (0i64..).zip(rows) {
        let (time, size, next) = (u32_at(b, 0), u32_at(b, 12), u64_at(b, 16) as i64);
        // Times do not go back, the next access is later than this one or never (-1 or the
        // largest number), and sizes are those of objects.
        let later = next == -1 || next > index;
        if time < before || !later || size == 0 || u64::from(size) > LENGTH_MAX {
            return false;
        }
        before = time;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first record of the sample that libCacheSim publishes.
    const SAMPLE: [u8; 32] = [
        0xf4, 0x00, 0x00, 0x80, 0x00, 0x02, 0x00, 0x00, 0x01, 0x00, 0x00, 0x00, 0x2a, 0x00, 0x00,
        0x01, 0x09, 0x1a, 0x8f, 0x02, 0x00, 0x00, 0x00, 0x00, 0x22, 0xcf, 0x82, 0xbe, 0x1f, 0x05,
        0x00, 0x00,
    ];

    fn second_of(first: &[u8; 32]) -> [u8; 40] {
        let mut b = [0u8; 40];
        b[0..2].copy_from_slice(&first[12..14]);
        b[3] = 2;
        b[4..8].copy_from_slice(&first[0..4]);
        b[8..12].copy_from_slice(&first[4..8]);
        b[12..16].copy_from_slice(&first[8..12]);
        b[16..32].copy_from_slice(&first[16..32]);
        b
    }

    #[test]
    fn both_versions_say_the_same() {
        let want = Record {
            time_us: 5_633_898_368_802,
            disk: 0,
            op: Op::Write,
            offset: 42_932_745 * 512,
            length: 512,
        };
        assert_eq!(vscsi(&SAMPLE, false), Ok(Some(want)));
        assert_eq!(vscsi(&second_of(&SAMPLE), true), Ok(Some(want)));
        assert!(vscsi(&SAMPLE, true).is_err());
    }

    #[test]
    fn detection_wants_two_records() {
        let two = [SAMPLE, SAMPLE].concat();
        assert!(looks_like_vscsi(&two, false, true));
        assert!(!looks_like_vscsi(&two, true, true));
        assert!(!looks_like_vscsi(&SAMPLE, false, false));
        let s = second_of(&SAMPLE);
        assert!(looks_like_vscsi(&[s, s].concat(), true, true));
    }

    #[test]
    fn commands_without_data_are_not_reads() {
        let mut b = SAMPLE;
        for code in [0x00, 0x12, 0x25, 0x42, 0x1A] {
            b[12] = code;
            assert_eq!(vscsi(&b, false), Ok(None), "{code:#x}");
        }
        b[12] = 0x35;
        assert!(matches!(vscsi(&b, false), Ok(Some(r)) if r.op == Op::Flush));
    }

    #[test]
    fn oracle_objects_are_blocks() {
        let mut b = [0u8; 24];
        b[0] = 7;
        b[4] = 9;
        b[13] = 16;
        b[16..24].copy_from_slice(&(-1i64).to_le_bytes());
        let r = oracle(&b).expect("understood").expect("a transfer");
        assert_eq!((r.time_us, r.offset, r.length), (7_000_000, 9 * 4096, 4096));
        assert!(looks_like_oracle(&[b, b].concat(), true));
        b[13] = 0;
        assert!(!looks_like_oracle(&[b, b].concat(), true));
    }
}
