//! One line, one request: the CSV family and what `blkparse` prints.
//!
//! Each parser takes a line without its end and returns a record, `None` for a line that holds
//! no data transfer, or a sentence about what is wrong with it.

use crate::format::Format;
use crate::record::{BLOCK, LENGTH_MAX, Op, Record};

/// Bytes of a disk sector, the unit of SPC and blktrace.
const SECTOR: u64 = 512;
/// Disks told apart in one trace; beyond that a trace is taken for damaged.
const DISKS_MAX: usize = 65_536;
/// Ticks of 100 ns per microsecond, the unit of Windows file times.
pub(crate) const FILETIME_TICKS_PER_US: u64 = 10;

/// Gives names of disks numbers, in order of appearance.
#[derive(Debug, Default)]
pub(crate) struct Disks {
    known: std::collections::HashMap<Vec<u8>, u32>,
    /// Name and number of the last answer: traces come in runs.
    last: Option<(Vec<u8>, u32)>,
}

impl Disks {
    fn number(&mut self, name: &[u8]) -> Result<u32, String> {
        if let Some((last, n)) = &self.last
            && last == name
        {
            return Ok(*n);
        }
        let n = match self.known.get(name) {
            Some(n) => *n,
            None if self.known.len() >= DISKS_MAX => {
                return Err(format!("it names more than {DISKS_MAX} disks"));
            }
            None => {
                let n = self.known.len() as u32;
                self.known.insert(name.to_vec(), n);
                n
            }
        };
        self.last = Some((name.to_vec(), n));
        Ok(n)
    }
}

fn shown(field: &[u8]) -> String {
    let cut = &field[..field.len().min(40)];
    String::from_utf8_lossy(cut)
        .chars()
        .map(|c| if c.is_control() { '\u{FFFD}' } else { c })
        .collect()
}

fn number(field: &[u8], what: &str) -> Result<u64, String> {
    let digits = field.trim_ascii();
    if digits.is_empty() {
        return Err(format!("{what} is missing"));
    }
    let mut n = 0u64;
    for d in digits {
        let d = d.wrapping_sub(b'0');
        if d > 9 {
            return Err(format!("{what} “{}” is not a number", shown(field)));
        }
        n = n
            .checked_mul(10)
            .and_then(|n| n.checked_add(u64::from(d)))
            .ok_or_else(|| format!("{what} “{}” is too large", shown(field)))?;
    }
    Ok(n)
}

/// Seconds with a fraction, as microseconds.
fn seconds(field: &[u8], what: &str) -> Result<u64, String> {
    let text = field.trim_ascii();
    let dot = text.iter().position(|c| *c == b'.');
    let (whole, fraction) = match dot {
        Some(at) => (&text[..at], &text[at + 1..]),
        None => (text, &b""[..]),
    };
    let whole = number(whole, what)?;
    let mut us = 0u64;
    for at in 0..6 {
        let d = fraction.get(at).map_or(0, |c| c.wrapping_sub(b'0'));
        if d > 9 {
            return Err(format!("{what} “{}” is not a time", shown(field)));
        }
        us = us * 10 + u64::from(d);
    }
    whole
        .checked_mul(1_000_000)
        .and_then(|s| s.checked_add(us))
        .ok_or_else(|| format!("{what} “{}” is too large", shown(field)))
}

fn bounded(record: Record, length: u64) -> Result<Option<Record>, String> {
    if length == 0 {
        return Ok(None);
    }
    if length > LENGTH_MAX {
        return Err(format!("its length of {length} bytes is beyond 1 GiB"));
    }
    if record.offset.checked_add(length).is_none() {
        return Err(format!("its offset {} is beyond any disk", record.offset));
    }
    Ok(Some(Record {
        length: length as u32,
        ..record
    }))
}

fn fields<const N: usize>(line: &[u8], least: usize) -> Result<[&[u8]; N], String> {
    let mut out = [&b""[..]; N];
    let mut n = 0;
    for (slot, field) in out.iter_mut().zip(line.split(|c| *c == b',')) {
        *slot = field.trim_ascii();
        n += 1;
    }
    if n < least {
        return Err(format!("it has {n} fields instead of {least}"));
    }
    Ok(out)
}

fn op_letter(field: &[u8]) -> Result<Op, String> {
    match field {
        b"R" | b"r" | b"Read" | b"read" | b"READ" => Ok(Op::Read),
        b"W" | b"w" | b"Write" | b"write" | b"WRITE" => Ok(Op::Write),
        b"D" | b"d" => Ok(Op::Discard),
        b"F" | b"f" => Ok(Op::Flush),
        other => Err(format!("“{}” is neither read nor write", shown(other))),
    }
}

fn csv(line: &[u8]) -> Result<Option<Record>, String> {
    let [time, op, offset, length] = fields(line, 4)?;
    let record = Record {
        time_us: number(time, "the time")?,
        disk: 0,
        op: op_letter(op)?,
        offset: number(offset, "the offset")?,
        length: 0,
    };
    let length = number(length, "the length")?;
    if record.op == Op::Flush {
        return Ok(Some(record));
    }
    bounded(record, length)
}

fn keys(line: &[u8], index: u64) -> Result<Option<Record>, String> {
    let [block, count] = fields(line, 1)?;
    let block = number(block, "the block")?;
    let count = if count.is_empty() {
        1
    } else {
        number(count, "the count")?
    };
    let length = count.saturating_mul(BLOCK);
    let offset = block
        .checked_mul(BLOCK)
        .ok_or_else(|| format!("block {block} is beyond any disk"))?;
    bounded(
        Record {
            // There is no time: the position stands in for it.
            time_us: index,
            disk: 0,
            op: Op::Read,
            offset,
            length: 0,
        },
        length,
    )
}

fn msr(line: &[u8], disks: &mut Disks) -> Result<Option<Record>, String> {
    let [time, host, disk, op, offset, size, _] = fields::<7>(line, 6)?;
    let mut name = host.to_vec();
    name.push(b'_');
    name.extend_from_slice(disk);
    bounded(
        Record {
            time_us: number(time, "the time")? / FILETIME_TICKS_PER_US,
            disk: disks.number(&name)?,
            op: op_letter(op)?,
            offset: number(offset, "the offset")?,
            length: 0,
        },
        number(size, "the size")?,
    )
}

fn alibaba(line: &[u8], disks: &mut Disks) -> Result<Option<Record>, String> {
    let [disk, op, offset, length, time] = fields(line, 5)?;
    bounded(
        Record {
            time_us: number(time, "the time")?,
            disk: disks.number(disk)?,
            op: op_letter(op)?,
            offset: number(offset, "the offset")?,
            length: 0,
        },
        number(length, "the length")?,
    )
}

fn spc(line: &[u8], disks: &mut Disks) -> Result<Option<Record>, String> {
    let [asu, lba, size, op, time] = fields(line, 5)?;
    let lba = number(lba, "the block address")?;
    bounded(
        Record {
            time_us: seconds(time, "the time")?,
            disk: disks.number(asu)?,
            op: op_letter(op)?,
            offset: lba
                .checked_mul(SECTOR)
                .ok_or_else(|| format!("block address {lba} is beyond any disk"))?,
            length: 0,
        },
        number(size, "the size")?,
    )
}

/// `8,16 3 11 0.009507758 697 Q W 223490 + 8 [kjournald]`
fn blkparse(line: &[u8], disks: &mut Disks) -> Result<Option<Record>, String> {
    let mut f = line
        .split(|c| c.is_ascii_whitespace())
        .filter(|f| !f.is_empty());
    let (Some(device), Some(_cpu), Some(_seq), Some(time), Some(_pid), Some(action), Some(rwbs)) = (
        f.next(),
        f.next(),
        f.next(),
        f.next(),
        f.next(),
        f.next(),
        f.next(),
    ) else {
        return Ok(None);
    };
    // Summaries and messages follow the events; only events begin with `major,minor`.
    if !device.first().is_some_and(u8::is_ascii_digit) || !device.contains(&b',') {
        return Ok(None);
    }
    if action != b"Q" {
        return Ok(None);
    }
    let (Some(sector), Some(plus), Some(count)) = (f.next(), f.next(), f.next()) else {
        return Ok(None);
    };
    if plus != b"+" {
        return Ok(None);
    }
    let op = if rwbs.contains(&b'D') {
        Op::Discard
    } else if rwbs.contains(&b'R') {
        Op::Read
    } else if rwbs.contains(&b'W') {
        Op::Write
    } else {
        return Ok(None);
    };
    let (sector, count) = (number(sector, "the sector")?, number(count, "the length")?);
    bounded(
        Record {
            time_us: seconds(time, "the time")?,
            disk: disks.number(device)?,
            op,
            offset: sector
                .checked_mul(SECTOR)
                .ok_or_else(|| format!("sector {sector} is beyond any disk"))?,
            length: 0,
        },
        count.saturating_mul(SECTOR),
    )
}

/// Understands line number `index` of a trace in a text format.
pub(crate) fn parse(
    format: Format,
    line: &[u8],
    index: u64,
    disks: &mut Disks,
) -> Result<Option<Record>, String> {
    let line = line.trim_ascii();
    if line.is_empty() || line[0] == b'#' {
        return Ok(None);
    }
    // A heading, in the formats that may have one.
    if index == 0 && line[0].is_ascii_alphabetic() && header(format, line) {
        return Ok(None);
    }
    match format {
        Format::Csv => csv(line),
        Format::Keys => keys(line, index),
        Format::Msr => msr(line, disks),
        Format::Alibaba => alibaba(line, disks),
        Format::Spc => spc(line, disks),
        _ => blkparse(line, disks),
    }
}

fn header(format: Format, line: &[u8]) -> bool {
    let first: &[&[u8]] = match format {
        Format::Csv => &[b"time_us,"],
        Format::Keys => &[b"block"],
        Format::Msr => &[b"Timestamp,", b"timestamp,"],
        Format::Alibaba => &[b"device_id,"],
        Format::Spc => &[b"ASU,", b"asu,"],
        _ => &[],
    };
    first.iter().any(|h| line.starts_with(h))
}

/// The text format whose shape the first line has.
pub(crate) fn detect(head: &[u8], whole: bool) -> Option<Format> {
    let mut lines = head.split(|c| *c == b'\n');
    let first = lines.next()?;
    // A line without an end proves nothing, unless it is the file.
    if first.len() == head.len() && !whole {
        return None;
    }
    if first.iter().any(|c| !(*c >= 32 || c.is_ascii_whitespace())) {
        return None;
    }
    for format in [
        Format::Csv,
        Format::Keys,
        Format::Msr,
        Format::Alibaba,
        Format::Spc,
    ] {
        if first.first().is_some_and(u8::is_ascii_alphabetic) && header(format, first) {
            return Some(format);
        }
    }
    let mut disks = Disks::default();
    let fits = |format, disks: &mut Disks| matches!(parse(format, first, 1, disks), Ok(Some(_)));
    let commas = first.iter().filter(|c| **c == b',').count();
    match commas {
        5 | 6 if fits(Format::Msr, &mut disks) => Some(Format::Msr),
        // Both have five fields; the operation is the second of one, the fourth of the other.
        4 if fits(Format::Alibaba, &mut disks) => Some(Format::Alibaba),
        4 | 5 if fits(Format::Spc, &mut disks) => Some(Format::Spc),
        3 if fits(Format::Csv, &mut disks) => Some(Format::Csv),
        _ if blkparse_shape(first) => Some(Format::Blkparse),
        _ => None,
    }
}

fn blkparse_shape(line: &[u8]) -> bool {
    let mut f = line
        .split(|c| c.is_ascii_whitespace())
        .filter(|f| !f.is_empty());
    let device = f.next().unwrap_or_default();
    let pair = device.split(|c| *c == b',').all(|n| number(n, "").is_ok());
    pair && device.contains(&b',')
        && f.next().is_some_and(|f| number(f, "").is_ok())
        && f.next().is_some_and(|f| number(f, "").is_ok())
        && f.next().is_some_and(|f| seconds(f, "").is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(format: Format, line: &str) -> Record {
        parse(format, line.as_bytes(), 1, &mut Disks::default())
            .expect("understood")
            .expect("a transfer")
    }

    #[test]
    fn msr_times_are_file_times_and_offsets_stay_unaligned() {
        let r = one(
            Format::Msr,
            "128166372003061629,hm,1,Read,8483584512,24576,41286",
        );
        assert_eq!(r.time_us, 12_816_637_200_306_162);
        assert_eq!((r.op, r.offset, r.length), (Op::Read, 8_483_584_512, 24576));
    }

    #[test]
    fn spc_counts_sectors_and_seconds() {
        let r = one(Format::Spc, "2,20941264,8192,W,0.551706");
        assert_eq!((r.time_us, r.op), (551_706, Op::Write));
        assert_eq!((r.offset, r.length), (20_941_264 * 512, 8192));
    }

    #[test]
    fn blkparse_counts_queue_events_only() {
        let q = "8,0    3       11     0.009507758   697  Q   W 223490 + 8 [kjournald]";
        let r = one(Format::Blkparse, q);
        assert_eq!((r.time_us, r.offset, r.length), (9507, 223_490 * 512, 4096));
        let c = q.replace(" Q ", " C ");
        let mut disks = Disks::default();
        assert_eq!(
            parse(Format::Blkparse, c.as_bytes(), 1, &mut disks),
            Ok(None)
        );
        let total = b"Total (8,0):";
        assert_eq!(parse(Format::Blkparse, total, 1, &mut disks), Ok(None));
    }

    #[test]
    fn disks_are_numbered_in_order_of_appearance() {
        let mut disks = Disks::default();
        let mut disk = |line: &str| {
            parse(Format::Alibaba, line.as_bytes(), 1, &mut disks)
                .expect("understood")
                .expect("a transfer")
                .disk
        };
        assert_eq!(disk("725,R,126703644672,4096,1577808000000626"), 0);
        assert_eq!(disk("64,W,12,512,1577808000000627"), 1);
        assert_eq!(disk("725,W,0,512,1577808000000628"), 0);
    }

    #[test]
    fn nonsense_is_named() {
        let mut disks = Disks::default();
        for (format, line) in [
            (Format::Csv, "1,R,x,4096"),
            (Format::Csv, "1,Q,0,4096"),
            (Format::Csv, "1,R,0"),
            (Format::Csv, "1,R,18446744073709551615,4096"),
            (Format::Csv, "1,R,18446744073709551616,4096"),
            (Format::Csv, "1,R,0,99999999999"),
            (Format::Keys, "-3,1"),
            (Format::Keys, "9999999999999999999,1"),
            (Format::Msr, "1,a,0,Trim,0,512,1"),
            (Format::Spc, "0,18446744073709551615,512,r,0.1"),
            (Format::Spc, "0,1,512,r,0.1x"),
        ] {
            assert!(
                parse(format, line.as_bytes(), 1, &mut disks).is_err(),
                "{line}"
            );
        }
    }

    #[test]
    fn shapes_are_told_apart() {
        for (line, format) in [
            ("time_us,op,offset_bytes,length_bytes\n", Format::Csv),
            ("block,count\n1,1\n", Format::Keys),
            (
                "128166372003061629,hm,1,Read,8483584512,24576,41286\n",
                Format::Msr,
            ),
            (
                "725,R,126703644672,4096,1577808000000626\n",
                Format::Alibaba,
            ),
            ("0,20941264,8192,W,0.551706\n", Format::Spc),
            ("0,W,512,4096\n", Format::Csv),
            (
                "8,0 3 11 0.009507758 697 Q W 223490 + 8 [k]\n",
                Format::Blkparse,
            ),
        ] {
            assert_eq!(detect(line.as_bytes(), false), Some(format), "{line}");
        }
        assert_eq!(detect(b"hello world\n", true), None);
    }
}
