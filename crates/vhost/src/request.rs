//! From a chain of pieces to a block request: which operation, where, which memory.
//!
//! A device may not assume how a driver cuts a request into descriptors (virtio 1.2, 2.7.4):
//! the header is the first 16 bytes of what can be read, the status the last byte of what can
//! be written, the data the rest. No I/O here either.

use crate::chain::{Chain, Guest, Outside, Piece};
use smallvec::SmallVec;
use virtio_bindings::virtio_blk as blk;

/// Bytes of a sector, whatever block size the device reports.
pub const SECTOR: u64 = 512;
/// Bytes of a request's header.
const HEADER_LEN: usize = 16;
/// Bytes of one range of a discard or write-zeroes request.
const RANGE_LEN: usize = 16;
/// Ranges of one discard or write-zeroes request, as told to the driver.
pub const RANGES_MAX: usize = 32;
/// Sectors of one such range, as told to the driver: 4 GiB.
pub const RANGE_SECTORS_MAX: u32 = 8 << 20;
/// A range may be freed (`VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP`).
const UNMAP: u32 = blk::VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP;

/// Outcome of a request, as the driver reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Done.
    Ok = blk::VIRTIO_BLK_S_OK as u8,
    /// Failed, or impossible.
    IoError = blk::VIRTIO_BLK_S_IOERR as u8,
    /// An operation or flag the device does not know.
    Unsupported = blk::VIRTIO_BLK_S_UNSUPP as u8,
}

/// A stretch of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Its space may be given back.
    pub punch: bool,
}

/// What the driver wants. Ranges lie on the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Fill the data.
    Read {
        /// First byte on the disk.
        offset: u64,
        /// Bytes; a whole number of sectors.
        len: u64,
    },
    /// Store the data.
    Write {
        /// First byte on the disk.
        offset: u64,
        /// Bytes; a whole number of sectors.
        len: u64,
    },
    /// Make completed writes durable.
    Flush,
    /// Forget these.
    Discard(SmallVec<[Range; 2]>),
    /// Zero these.
    WriteZeroes(SmallVec<[Range; 2]>),
    /// Write the serial number into the data.
    GetId,
    /// Nothing can be done but to answer.
    Answer(Status),
}

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// What.
    pub op: Op,
    /// Guest address of the status byte.
    pub status: u64,
    /// What of the device's there is to write besides the status, in bytes.
    pub writable: u64,
}

/// What the device is, as far as a request depends on it.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of the disk.
    pub size: u64,
    /// Refuses writes.
    pub read_only: bool,
    /// Longest read or write, in bytes.
    pub len_max: u64,
    /// Discards were agreed on.
    pub discard: bool,
    /// Write-zeroes were agreed on.
    pub write_zeroes: bool,
}

/// A chain without room for a status byte: nothing can even be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoStatus;

/// Takes `n` bytes off the front.
fn take_front(pieces: &mut SmallVec<[Piece; 4]>, mut n: usize) {
    let mut gone = 0;
    for piece in pieces.iter_mut() {
        let cut = n.min(piece.len as usize);
        piece.at += cut as u64;
        piece.len -= cut as u32;
        n -= cut;
        gone += usize::from(piece.len == 0);
        if n == 0 {
            break;
        }
    }
    pieces.drain(..gone);
}

/// Copies the first bytes of `pieces`; false if there are too few.
fn peek(guest: &dyn Guest, pieces: &[Piece], out: &mut [u8]) -> Result<bool, Outside> {
    let mut done = 0;
    for piece in pieces {
        let n = (out.len() - done).min(piece.len as usize);
        guest.read(piece.at, &mut out[done..done + n])?;
        done += n;
        if done == out.len() {
            return Ok(true);
        }
    }
    Ok(done == out.len())
}

fn total(pieces: &[Piece]) -> u64 {
    pieces.iter().map(|p| u64::from(p.len)).sum()
}

/// Makes a request of a chain. What is left in `chain` is the data: to be read for a write, to
/// be written for a read.
pub fn parse(guest: &dyn Guest, chain: &mut Chain, limits: &Limits) -> Result<Request, NoStatus> {
    let last = chain.writable.last_mut().ok_or(NoStatus)?;
    last.len -= 1;
    let status = last.at + u64::from(last.len);
    if last.len == 0 {
        chain.writable.pop();
    }
    let writable = total(&chain.writable);
    let mut header = [0u8; HEADER_LEN];
    let op = match peek(guest, &chain.readable, &mut header) {
        Ok(true) => {
            take_front(&mut chain.readable, HEADER_LEN);
            operation(guest, chain, &header, limits)
        }
        Ok(false) | Err(Outside) => Op::Answer(Status::IoError),
    };
    Ok(Request {
        op,
        status,
        writable,
    })
}

fn operation(guest: &dyn Guest, chain: &Chain, header: &[u8; HEADER_LEN], limits: &Limits) -> Op {
    let [a, b, c, d, _, _, _, _, e, f, g, h, i, j, k, l] = *header;
    let kind = u32::from_le_bytes([a, b, c, d]);
    let sector = u64::from_le_bytes([e, f, g, h, i, j, k, l]);
    let failed = Op::Answer(Status::IoError);
    match kind {
        blk::VIRTIO_BLK_T_IN => match extent(sector, total(&chain.writable), limits) {
            Some((offset, len)) => Op::Read { offset, len },
            None => failed,
        },
        blk::VIRTIO_BLK_T_OUT if limits.read_only => failed,
        blk::VIRTIO_BLK_T_OUT => match extent(sector, total(&chain.readable), limits) {
            Some((offset, len)) => Op::Write { offset, len },
            None => failed,
        },
        blk::VIRTIO_BLK_T_FLUSH => Op::Flush,
        blk::VIRTIO_BLK_T_GET_ID => Op::GetId,
        blk::VIRTIO_BLK_T_DISCARD if limits.discard => {
            ranges(guest, chain, limits, false).map_or_else(Op::Answer, Op::Discard)
        }
        blk::VIRTIO_BLK_T_WRITE_ZEROES if limits.write_zeroes => {
            ranges(guest, chain, limits, true).map_or_else(Op::Answer, Op::WriteZeroes)
        }
        _ => Op::Answer(Status::Unsupported),
    }
}

/// A data range, if it is one.
fn extent(sector: u64, len: u64, limits: &Limits) -> Option<(u64, u64)> {
    let offset = sector.checked_mul(SECTOR)?;
    let fits = len > 0
        && len.is_multiple_of(SECTOR)
        && len <= limits.len_max
        && offset.checked_add(len)? <= limits.size;
    fits.then_some((offset, len))
}

fn ranges(
    guest: &dyn Guest,
    chain: &Chain,
    limits: &Limits,
    zeroes: bool,
) -> Result<SmallVec<[Range; 2]>, Status> {
    let bytes = total(&chain.readable) as usize;
    if limits.read_only
        || bytes == 0
        || !bytes.is_multiple_of(RANGE_LEN)
        || bytes > RANGES_MAX * RANGE_LEN
    {
        return Err(Status::IoError);
    }
    let mut raw = [0u8; RANGES_MAX * RANGE_LEN];
    if peek(guest, &chain.readable, &mut raw[..bytes]) != Ok(true) {
        return Err(Status::IoError);
    }
    let mut out = SmallVec::new();
    for raw in raw[..bytes].as_chunks::<RANGE_LEN>().0 {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = *raw;
        let sector = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
        let sectors = u32::from_le_bytes([i, j, k, l]);
        let flags = u32::from_le_bytes([m, n, o, p]);
        // virtio 1.2, 5.2.6.2: unknown flags, and unmap in a discard, are not supported.
        if flags & !UNMAP != 0 || (!zeroes && flags & UNMAP != 0) {
            return Err(Status::Unsupported);
        }
        let anything = Limits {
            len_max: u64::MAX,
            ..*limits
        };
        if sectors > RANGE_SECTORS_MAX {
            return Err(Status::IoError);
        }
        let (offset, len) =
            extent(sector, u64::from(sectors) * SECTOR, &anything).ok_or(Status::IoError)?;
        out.push(Range {
            offset,
            len,
            punch: !zeroes || flags & UNMAP != 0,
        });
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chain::plain::Bytes;
    use smallvec::smallvec;

    const LIMITS: Limits = Limits {
        size: 1 << 20,
        read_only: false,
        len_max: 64 << 10,
        discard: true,
        write_zeroes: true,
    };

    fn header(kind: u32, sector: u64) -> [u8; 16] {
        let mut raw = [0u8; 16];
        raw[..4].copy_from_slice(&kind.to_le_bytes());
        raw[8..].copy_from_slice(&sector.to_le_bytes());
        raw
    }

    fn memory(kind: u32, sector: u64) -> Bytes {
        let mut bytes = Bytes(vec![0; 1 << 17]);
        bytes.0[..16].copy_from_slice(&header(kind, sector));
        bytes
    }

    fn piece(at: u64, len: u32) -> Piece {
        Piece { at, len }
    }

    fn op(memory: &Bytes, readable: &[Piece], writable: &[Piece], limits: &Limits) -> Op {
        let mut chain = Chain {
            readable: readable.into(),
            writable: writable.into(),
            ..Chain::default()
        };
        parse(memory, &mut chain, limits).unwrap().op
    }

    #[test]
    fn framing_does_not_matter() {
        let memory = memory(blk::VIRTIO_BLK_T_IN, 8);
        // The header in three pieces; data and status in one.
        let mut chain = Chain {
            readable: smallvec![piece(0, 3), piece(3, 12), piece(15, 1)],
            writable: smallvec![piece(0x1000, 4097)],
            ..Chain::default()
        };
        let request = parse(&memory, &mut chain, &LIMITS).unwrap();
        assert_eq!(
            request,
            Request {
                op: Op::Read {
                    offset: 4096,
                    len: 4096
                },
                status: 0x2000,
                writable: 4096,
            }
        );
        assert_eq!(&chain.writable[..], &[piece(0x1000, 4096)]);
        assert!(chain.readable.is_empty());
        // Header and data in one piece.
        let mut memory = memory;
        memory.0[..16].copy_from_slice(&header(blk::VIRTIO_BLK_T_OUT, 1));
        let mut chain = Chain {
            readable: smallvec![piece(0, 16 + 512)],
            writable: smallvec![piece(0x4000, 1)],
            ..Chain::default()
        };
        let request = parse(&memory, &mut chain, &LIMITS).unwrap();
        assert_eq!(
            request.op,
            Op::Write {
                offset: 512,
                len: 512
            }
        );
        assert_eq!(&chain.readable[..], &[piece(16, 512)]);
    }

    #[test]
    fn a_chain_without_status_is_no_request() {
        let mut chain = Chain {
            readable: smallvec![piece(0, 16)],
            writable: smallvec![],
            ..Chain::default()
        };
        assert_eq!(parse(&memory(0, 0), &mut chain, &LIMITS), Err(NoStatus));
    }

    #[test]
    fn ranges_stay_on_the_disk() {
        let status = piece(0x9000, 1);
        let failed = Op::Answer(Status::IoError);
        for (sector, len) in [
            (2048, 512),
            (2047, 1024),
            (u64::MAX, 512),
            (u64::MAX / 512, 512),
            (0, 100),
            (0, 128 << 10),
        ] {
            for kind in [blk::VIRTIO_BLK_T_IN, blk::VIRTIO_BLK_T_OUT] {
                let memory = memory(kind, sector);
                let data = piece(0, len);
                let got = if kind == blk::VIRTIO_BLK_T_IN {
                    op(&memory, &[piece(0, 16)], &[data, status], &LIMITS)
                } else {
                    op(&memory, &[piece(0, 16), data], &[status], &LIMITS)
                };
                assert_eq!(got, failed, "sector {sector}, {len} bytes");
            }
        }
        // No data at all, and half a header.
        assert_eq!(
            op(&memory(0, 0), &[piece(0, 16)], &[status], &LIMITS),
            failed
        );
        assert_eq!(
            op(&memory(0, 0), &[piece(0, 9)], &[status], &LIMITS),
            failed
        );
    }

    #[test]
    fn read_only_disks_refuse_changes() {
        let limits = Limits {
            read_only: true,
            ..LIMITS
        };
        let status = piece(0x9000, 1);
        for kind in [
            blk::VIRTIO_BLK_T_OUT,
            blk::VIRTIO_BLK_T_DISCARD,
            blk::VIRTIO_BLK_T_WRITE_ZEROES,
        ] {
            let got = op(
                &memory(kind, 0),
                &[piece(0, 16), piece(0x100, 512)],
                &[status],
                &limits,
            );
            assert_eq!(got, Op::Answer(Status::IoError), "{kind}");
        }
    }

    #[test]
    fn discards_and_zeroes() {
        let status = piece(0x9000, 1);
        let mut memory = memory(blk::VIRTIO_BLK_T_WRITE_ZEROES, 0);
        let put = |i: usize, sector: u64, sectors: u32, flags: u32, memory: &mut Bytes| {
            let at = 16 + i * 16;
            memory.0[at..at + 8].copy_from_slice(&sector.to_le_bytes());
            memory.0[at + 8..at + 12].copy_from_slice(&sectors.to_le_bytes());
            memory.0[at + 12..at + 16].copy_from_slice(&flags.to_le_bytes());
        };
        put(0, 1, 8, 1, &mut memory);
        put(1, 100, 2, 0, &mut memory);
        let got = op(&memory, &[piece(0, 48)], &[status], &LIMITS);
        let ranges = smallvec![
            Range {
                offset: 512,
                len: 4096,
                punch: true
            },
            Range {
                offset: 51200,
                len: 1024,
                punch: false
            }
        ];
        assert_eq!(got, Op::WriteZeroes(ranges));
        let unsupported = Op::Answer(Status::Unsupported);
        // A discard must not carry the flag; nobody may carry an unknown one.
        memory.0[..4].copy_from_slice(&blk::VIRTIO_BLK_T_DISCARD.to_le_bytes());
        assert_eq!(
            op(&memory, &[piece(0, 48)], &[status], &LIMITS),
            unsupported
        );
        put(0, 1, 8, 4, &mut memory);
        assert_eq!(
            op(&memory, &[piece(0, 32)], &[status], &LIMITS),
            unsupported
        );
        put(0, 2040, 9, 0, &mut memory);
        let failed = Op::Answer(Status::IoError);
        assert_eq!(op(&memory, &[piece(0, 32)], &[status], &LIMITS), failed);
        // Half a range; none; more than agreed.
        assert_eq!(op(&memory, &[piece(0, 40)], &[status], &LIMITS), failed);
        assert_eq!(op(&memory, &[piece(0, 16)], &[status], &LIMITS), failed);
        assert_eq!(
            op(&memory, &[piece(0, 16 + 33 * 16)], &[status], &LIMITS),
            failed
        );
        // Not agreed on at all.
        let without = Limits {
            discard: false,
            ..LIMITS
        };
        assert_eq!(
            op(&memory, &[piece(0, 32)], &[status], &without),
            unsupported
        );
    }

    #[test]
    fn others() {
        let status = piece(0x9000, 1);
        let one = |kind| op(&memory(kind, 0), &[piece(0, 16)], &[status], &LIMITS);
        assert_eq!(one(blk::VIRTIO_BLK_T_FLUSH), Op::Flush);
        assert_eq!(one(blk::VIRTIO_BLK_T_GET_ID), Op::GetId);
        assert_eq!(one(77), Op::Answer(Status::Unsupported));
    }
}
