//! Records in other people's forms: what [`Writer`](crate::Writer) writes besides our own.
//!
//! No form holds everything. What one lacks is left out or rounded and counted, so that nobody takes the
//! result for the whole; what cannot be rounded (a second disk where there is one) is an error.

use std::collections::HashMap;
use std::io::Write;

use crate::binary::{ORACLE, scsi_code};
use crate::error::TraceError;
use crate::format::Format;
use crate::record::{BLOCK, Op, Record};
use crate::text::FILETIME_TICKS_PER_US;

/// Bytes of a disk sector.
const SECTOR: u64 = 512;
/// Blktrace knows devices by major and minor number; this major number is any block device's.
const MAJOR: u32 = 259;

/// What a form did not take of the records it was given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Lost {
    /// Discards and flushes that were left out.
    pub left_out: u64,
    /// Requests widened to whole sectors or blocks.
    pub widened: u64,
}

/// Writes the records of one form.
#[derive(Debug)]
pub(crate) struct Foreign {
    format: Format,
    number: u64,
    lost: Lost,
    oracle: Oracle,
}

/// An oracleGeneral record says when its object is next asked for: known only at the end.
#[derive(Debug, Default)]
struct Oracle {
    bytes: Vec<u8>,
    last: HashMap<u64, usize>,
    first_us: Option<u64>,
}

impl Foreign {
    pub(crate) fn new(format: Format) -> Foreign {
        Foreign {
            format,
            number: 0,
            lost: Lost::default(),
            oracle: Oracle::default(),
        }
    }

    pub(crate) fn lost(&self) -> Lost {
        self.lost
    }

    fn unfit(&self, why: &'static str, remedy: &'static str) -> TraceError {
        TraceError::Unwritable {
            format: self.format.name(),
            why,
            remedy,
        }
    }

    /// A line before all others, where the form has one that its readers expect.
    pub(crate) fn heading(&self) -> &'static [u8] {
        match self.format {
            Format::Csv => b"time_us,op,offset_bytes,length_bytes\n",
            _ => b"",
        }
    }

    pub(crate) fn push(&mut self, out: &mut impl Write, record: Record) -> Result<(), TraceError> {
        let disks = matches!(
            self.format,
            Format::Msr | Format::Alibaba | Format::Spc | Format::Blkparse
        );
        if !disks && record.disk != 0 {
            return Err(self.unfit("it has no disk numbers", "choose one disk with --disk"));
        }
        let takes = match record.op {
            Op::Read | Op::Write => true,
            Op::Discard => matches!(self.format, Format::Csv | Format::Blkparse),
            Op::Flush => matches!(self.format, Format::Csv | Format::Vscsi1 | Format::Vscsi2),
        };
        if !takes {
            self.lost.left_out += 1;
            return Ok(());
        }
        let record = self.widened(record)?;
        let Record {
            time_us: time,
            disk,
            offset,
            length,
            ..
        } = record;
        let word = if record.op == Op::Read {
            "Read"
        } else {
            "Write"
        };
        let letter = match record.op {
            Op::Read => 'R',
            Op::Write => 'W',
            Op::Discard => 'D',
            Op::Flush => 'F',
        };
        let (seconds, us) = (time / 1_000_000, time % 1_000_000);
        match self.format {
            Format::Csv => writeln!(out, "{time},{letter},{offset},{length}"),
            Format::Msr => {
                let ticks = time.checked_mul(FILETIME_TICKS_PER_US).ok_or_else(|| {
                    self.unfit("its time is beyond a Windows file time", "write csv")
                })?;
                // Nobody measured a response time; 0 cannot be mistaken for one.
                writeln!(out, "{ticks},hearth,{disk},{word},{offset},{length},0")
            }
            Format::Alibaba => writeln!(out, "{disk},{letter},{offset},{length},{time}"),
            Format::Spc => {
                let lba = offset / SECTOR;
                writeln!(out, "{disk},{lba},{length},{letter},{seconds}.{us:06}")
            }
            Format::Blkparse => writeln!(
                out,
                "{MAJOR},{disk} 0 {} {seconds}.{us:06}000 0 Q {letter} {} + {} [hearth]",
                self.number + 1,
                offset / SECTOR,
                u64::from(length) / SECTOR
            ),
            Format::Vscsi1 | Format::Vscsi2 => out.write_all(&self.vscsi(&record)),
            _ => return self.blocks(&record),
        }
        .map_err(TraceError::Write)?;
        self.number += 1;
        Ok(())
    }

    /// The request as the form can say it.
    fn widened(&mut self, record: Record) -> Result<Record, TraceError> {
        let (from, to) = match self.format {
            Format::Csv | Format::Msr | Format::Alibaba => (1, 1),
            // Their lengths are bytes.
            Format::Spc | Format::Vscsi1 | Format::Vscsi2 => (SECTOR, 1),
            Format::Blkparse => (SECTOR, SECTOR),
            _ => (BLOCK, BLOCK),
        };
        let offset = record.offset / from * from;
        let length = (record.offset - offset + u64::from(record.length)).next_multiple_of(to);
        self.lost.widened += u64::from(length != u64::from(record.length));
        let length = u32::try_from(length)
            .ok()
            .filter(|l| u64::from(*l) <= crate::record::LENGTH_MAX)
            .filter(|l| offset.checked_add(u64::from(*l)).is_some())
            .ok_or_else(|| self.unfit("in whole sectors it is too long", "write csv"))?;
        Ok(Record {
            offset,
            length,
            ..record
        })
    }

    fn vscsi(&self, record: &Record) -> Vec<u8> {
        let second = self.format == Format::Vscsi2;
        let mut b = Vec::with_capacity(40);
        let code = scsi_code(record.op).to_le_bytes();
        let version = (if second { 0x200u16 } else { 0x100 }).to_le_bytes();
        if second {
            b.extend(code);
            b.extend(version);
        }
        b.extend((self.number as u32).to_le_bytes());
        b.extend(record.length.to_le_bytes());
        // One piece of memory; we do not know how many there were.
        b.extend(1u32.to_le_bytes());
        if !second {
            b.extend(code);
            b.extend(version);
        }
        b.extend((record.offset / SECTOR).to_le_bytes());
        b.extend(record.time_us.to_le_bytes());
        if second {
            b.extend(0u64.to_le_bytes());
        }
        b
    }

    /// Every block of a request is an object of its own.
    fn blocks(&mut self, record: &Record) -> Result<(), TraceError> {
        let late = "it is more than 136 years after the first";
        let first = *self.oracle.first_us.get_or_insert(record.time_us);
        let seconds = u32::try_from(record.time_us.saturating_sub(first) / 1_000_000)
            .map_err(|_| self.unfit(late, "write csv"))?
            .to_le_bytes();
        let (start, end) = record.blocks();
        let oracle = &mut self.oracle;
        for block in start..end {
            let at = oracle.bytes.len();
            let index = (at / ORACLE) as i64;
            if let Some(before) = oracle.last.insert(block, at) {
                oracle.bytes[before + 16..before + 24].copy_from_slice(&index.to_le_bytes());
            }
            oracle.bytes.extend(seconds);
            oracle.bytes.extend(block.to_le_bytes());
            oracle.bytes.extend((BLOCK as u32).to_le_bytes());
            // Never again, until it is.
            oracle.bytes.extend((-1i64).to_le_bytes());
        }
        Ok(())
    }

    /// What could not be written before the end was known.
    pub(crate) fn rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.oracle.bytes)
    }
}
