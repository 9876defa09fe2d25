//! Hearth's own form, `docs/trace-format.md`: records as differences, in checksummed frames.
//!
//! A recording is made by a daemon that may be killed at any moment. So records go out in frames
//! that stand alone: each begins its differences afresh and carries the checksum of its bytes. A
//! reader that meets a frame cut off at the end of the file stops there without an error, because
//! that is what a kill leaves; a bad checksum with more bytes after it is damage and is said.

use crate::record::{LENGTH_MAX, Op, Record};
use crate::varint::{fold, put, take, unfold};

/// Bytes of the file's header.
pub const HEADER_BYTES: usize = 32;
/// Most records in one frame.
pub const FRAME_RECORDS: usize = 4096;
const MAGIC: [u8; 8] = *b"HTHTRACE";
/// Version written; readers refuse newer ones.
pub(crate) const VERSION: u16 = 1;
/// Bytes before a frame's records: mark, record count, length, checksum.
pub(crate) const FRAME_HEADER: usize = 16;
const FRAME_MARK: [u8; 4] = *b"HTFR";
/// Longest frame a reader accepts: every record at its longest.
pub(crate) const FRAME_BYTES_MAX: usize = FRAME_RECORDS * 32;
/// Sectors are the unit when both numbers are multiples of this.
const SECTOR: u64 = 512;

/// Is this the beginning of a file in Hearth's form?
pub(crate) fn is_hearth(head: &[u8]) -> bool {
    head.starts_with(&MAGIC)
}

/// The file's header.
pub(crate) fn header() -> [u8; HEADER_BYTES] {
    let mut b = [0u8; HEADER_BYTES];
    b[..8].copy_from_slice(&MAGIC);
    b[8..10].copy_from_slice(&VERSION.to_le_bytes());
    let crc = checksum(&b[..HEADER_BYTES - 4]);
    b[HEADER_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
    b
}

/// Why a header is refused.
pub(crate) enum BadHeader {
    Damaged(&'static str),
    Newer(u16),
}

pub(crate) fn check_header(b: &[u8; HEADER_BYTES]) -> Result<(), BadHeader> {
    if !is_hearth(b) {
        return Err(BadHeader::Damaged("the file does not begin with HTHTRACE"));
    }
    let version = u16::from_le_bytes([b[8], b[9]]);
    if version > VERSION {
        return Err(BadHeader::Newer(version));
    }
    let crc = u32::from_le_bytes([b[28], b[29], b[30], b[31]]);
    if version == 0 || crc != checksum(&b[..HEADER_BYTES - 4]) {
        return Err(BadHeader::Damaged("the header's checksum does not match"));
    }
    Ok(())
}

fn checksum(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// Appends one frame of `records` (at most [`FRAME_RECORDS`]) to `out`.
pub(crate) fn encode(records: &[Record], out: &mut Vec<u8>) {
    let start = out.len();
    out.extend_from_slice(&FRAME_MARK);
    out.extend_from_slice(&(records.len() as u32).to_le_bytes());
    out.extend_from_slice(&[0; 8]);
    let mut time = 0u64;
    let mut end = 0u64;
    let mut disk = 0u32;
    for r in records {
        let sectors =
            r.offset % SECTOR == 0 && u64::from(r.length) % SECTOR == 0 && end % SECTOR == 0;
        let unit = if sectors { SECTOR } else { 1 };
        let op = match r.op {
            Op::Read => 0u64,
            Op::Write => 1,
            Op::Discard => 2,
            Op::Flush => 3,
        };
        let other_disk = u64::from(r.disk != disk);
        put(
            out,
            ((u64::from(r.length) / unit) << 4)
                | (other_disk << 3)
                | (u64::from(sectors) << 2)
                | op,
        );
        if other_disk == 1 {
            put(out, u64::from(r.disk));
            disk = r.disk;
        }
        put(out, fold(r.time_us.wrapping_sub(time) as i64));
        // In sectors the difference is divided as a signed number: it may go either way.
        let delta = r.offset.wrapping_sub(end) as i64;
        put(
            out,
            fold(if sectors {
                delta / SECTOR as i64
            } else {
                delta
            }),
        );
        time = r.time_us;
        end = r.offset.wrapping_add(u64::from(r.length));
    }
    let length = (out.len() - start - FRAME_HEADER) as u32;
    out[start + 8..start + 12].copy_from_slice(&length.to_le_bytes());
    let crc = frame_checksum(&out[start..start + 12], &out[start + FRAME_HEADER..]);
    out[start + 12..start + 16].copy_from_slice(&crc.to_le_bytes());
}

fn frame_checksum(head: &[u8], body: &[u8]) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    digest.update(head);
    digest.update(body);
    digest.finalize() as u32
}

/// What a frame's first bytes promise.
pub(crate) struct FrameHeader {
    pub records: usize,
    pub bytes: usize,
}

/// Understands a frame's first bytes.
pub(crate) fn frame_header(b: &[u8; FRAME_HEADER]) -> Result<FrameHeader, &'static str> {
    if b[..4] != FRAME_MARK {
        return Err("a frame does not begin with HTFR");
    }
    let records = u32::from_le_bytes([b[4], b[5], b[6], b[7]]) as usize;
    let bytes = u32::from_le_bytes([b[8], b[9], b[10], b[11]]) as usize;
    if records == 0 || records > FRAME_RECORDS || bytes > FRAME_BYTES_MAX {
        return Err("a frame's size is out of bounds");
    }
    Ok(FrameHeader { records, bytes })
}

/// The records of a frame, into `out`.
pub(crate) fn decode(
    head: &[u8; FRAME_HEADER],
    body: &[u8],
    out: &mut Vec<Record>,
) -> Result<(), &'static str> {
    let want = u32::from_le_bytes([head[12], head[13], head[14], head[15]]);
    if frame_checksum(&head[..12], body) != want {
        return Err("a frame's checksum does not match");
    }
    let count = frame_header(head)?.records;
    let (mut time, mut end, mut disk) = (0u64, 0u64, 0u32);
    let mut rest = body;
    for _ in 0..count {
        let short = "a frame holds fewer records than it says";
        let first = take(&mut rest).ok_or(short)?;
        let op = match first & 3 {
            0 => Op::Read,
            1 => Op::Write,
            2 => Op::Discard,
            _ => Op::Flush,
        };
        let unit = if first & 4 != 0 { SECTOR } else { 1 };
        let length = (first >> 4)
            .checked_mul(unit)
            .filter(|l| *l <= LENGTH_MAX)
            .ok_or("a length is beyond 1 GiB")?;
        if first & 8 != 0 {
            let n = take(&mut rest).ok_or(short)?;
            disk = u32::try_from(n).map_err(|_| "a disk's number is out of bounds")?;
        }
        time = time.wrapping_add(unfold(take(&mut rest).ok_or(short)?) as u64);
        let delta = unfold(take(&mut rest).ok_or(short)?).wrapping_mul(unit as i64);
        let offset = end.wrapping_add(delta as u64);
        if (length == 0) != (op == Op::Flush) || offset.checked_add(length).is_none() {
            return Err("a range is out of bounds");
        }
        end = offset + length;
        out.push(Record {
            time_us: time,
            disk,
            op,
            offset,
            length: length as u32,
        });
    }
    if rest.is_empty() {
        Ok(())
    } else {
        Err("a frame holds more than its records")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn any_record() -> impl Strategy<Value = Record> {
        (
            any::<u64>(),
            any::<u32>(),
            0..4u8,
            0..1u64 << 62,
            1..=LENGTH_MAX as u32,
        )
            .prop_map(|(time_us, disk, op, offset, length)| {
                let op = [Op::Read, Op::Write, Op::Discard, Op::Flush][usize::from(op)];
                Record {
                    time_us,
                    disk,
                    op,
                    offset: if disk % 2 == 0 {
                        offset / 512 * 512
                    } else {
                        offset
                    },
                    length: if op == Op::Flush {
                        0
                    } else if disk % 2 == 0 {
                        length.div_ceil(512) * 512
                    } else {
                        length
                    },
                }
            })
    }

    proptest! {
        #[test]
        fn frames_survive(records in prop::collection::vec(any_record(), 1..50)) {
            let mut bytes = Vec::new();
            encode(&records, &mut bytes);
            let head: [u8; FRAME_HEADER] = bytes[..FRAME_HEADER].try_into().expect("long enough");
            let mut back = Vec::new();
            decode(&head, &bytes[FRAME_HEADER..], &mut back).expect("what was written is read");
            prop_assert_eq!(back, records);
        }

        #[test]
        fn every_flipped_bit_is_noticed(records in prop::collection::vec(any_record(), 1..5), bit: prop::sample::Index) {
            let mut bytes = Vec::new();
            encode(&records, &mut bytes);
            let bit = bit.index(bytes.len() * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
            let head: [u8; FRAME_HEADER] = bytes[..FRAME_HEADER].try_into().expect("long enough");
            let fine = frame_header(&head).and_then(|h| {
                let body = bytes.get(FRAME_HEADER..FRAME_HEADER + h.bytes).ok_or("short")?;
                decode(&head, body, &mut Vec::new())
            });
            prop_assert!(fine.is_err());
        }
    }

    #[test]
    fn golden_bytes() {
        let records = [
            Record {
                time_us: 0,
                disk: 0,
                op: Op::Read,
                offset: 4096,
                length: 8192,
            },
            Record {
                time_us: 150,
                disk: 0,
                op: Op::Write,
                offset: 12288,
                length: 512,
            },
            Record {
                time_us: 151,
                disk: 3,
                op: Op::Read,
                offset: 7,
                length: 100,
            },
            Record {
                time_us: 152,
                disk: 3,
                op: Op::Flush,
                offset: 0,
                length: 0,
            },
        ];
        let mut bytes = header().to_vec();
        encode(&records, &mut bytes);
        let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(
            hex,
            "4854485452414345010000000000000000000000000000000000000039cf0917\
             4854465204000000130000000f031edc\
             840200101\
             5ac0200\
             c80c0302f1c701\
             0302d501"
        );
    }
}
