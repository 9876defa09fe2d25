//! One line, one request: the CSV family, what `blkparse` prints, FIU's traces and fio's logs.
//!
//! Each parser takes a line without its end and returns a request, `None` for a line that holds
//! no data transfer, or a sentence about what is wrong with it.

use crate::format::Format;
use crate::record::{BLOCK, LENGTH_MAX, Op, Record};

/// Bytes of a disk sector, the unit of SPC and blktrace.
const SECTOR: u64 = 512;
/// Longest discard that is taken for one: 1 PiB. `mkfs` and `fstrim` discard gigabytes at a time.
const DISCARD_MAX: u64 = 1 << 50;
/// UTF-8's byte order mark, which spreadsheets put before a table.
const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";
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

/// A request as a line states it. A discard may be longer than a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    record: Record,
    length: u64,
}

impl Request {
    /// The next record of it, and what is left then.
    pub(crate) fn split(self) -> (Record, Option<Request>) {
        let length = self.length.min(LENGTH_MAX);
        let record = Record {
            length: length as u32,
            ..self.record
        };
        let rest = Request {
            record: Record {
                offset: self.record.offset.saturating_add(length),
                ..self.record
            },
            length: self.length - length,
        };
        (record, (rest.length > 0).then_some(rest))
    }
}

fn bounded(record: Record, length: u64) -> Result<Option<Request>, String> {
    if record.op == Op::Flush {
        return Ok(Some(Request {
            record: Record {
                offset: 0,
                length: 0,
                ..record
            },
            length: 0,
        }));
    }
    if length == 0 {
        return Ok(None);
    }
    let (most, words) = match record.op {
        Op::Discard => (DISCARD_MAX, "1 PiB"),
        _ => (LENGTH_MAX, "1 GiB"),
    };
    if length > most {
        return Err(format!("its length of {length} bytes is beyond {words}"));
    }
    if record.offset.checked_add(length).is_none() {
        return Err(format!("its offset {} is beyond any disk", record.offset));
    }
    Ok(Some(Request { record, length }))
}

/// A sector's first byte.
fn sector(field: &[u8], what: &str) -> Result<u64, String> {
    let sector = number(field, what)?;
    sector
        .checked_mul(SECTOR)
        .ok_or_else(|| format!("{what} {sector} is beyond any disk"))
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

fn csv(line: &[u8]) -> Result<Option<Request>, String> {
    let [time, op, offset, length] = fields(line, 4)?;
    let record = Record {
        time_us: number(time, "the time")?,
        disk: 0,
        op: op_letter(op)?,
        offset: number(offset, "the offset")?,
        length: 0,
    };
    bounded(record, number(length, "the length")?)
}

fn keys(line: &[u8], index: u64) -> Result<Option<Request>, String> {
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

fn msr(line: &[u8], disks: &mut Disks) -> Result<Option<Request>, String> {
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

fn alibaba(line: &[u8], disks: &mut Disks) -> Result<Option<Request>, String> {
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

fn spc(line: &[u8], disks: &mut Disks) -> Result<Option<Request>, String> {
    let [asu, lba, size, op, time] = fields(line, 5)?;
    bounded(
        Record {
            time_us: seconds(time, "the time")?,
            disk: disks.number(asu)?,
            op: op_letter(op)?,
            offset: sector(lba, "the block address")?,
            length: 0,
        },
        number(size, "the size")?,
    )
}

/// `1456131600.010152,0.000167,R,0,1234944,8192`: offset and size are bytes.
fn systor(line: &[u8], disks: &mut Disks) -> Result<Option<Request>, String> {
    let [time, response, op, lun, offset, size] = fields(line, 6)?;
    // Empty for some requests.
    if !response.is_empty() {
        seconds(response, "the response time")?;
    }
    bounded(
        Record {
            time_us: seconds(time, "the time")?,
            disk: disks.number(lun)?,
            op: op_letter(op)?,
            offset: number(offset, "the offset")?,
            length: 0,
        },
        number(size, "the size")?,
    )
}

/// `1538323200,12910952,128,0,1063`: seconds; offset and size are sectors; 0 reads, 1 writes.
fn tencent(line: &[u8], disks: &mut Disks) -> Result<Option<Request>, String> {
    let [time, offset, size, op, volume] = fields(line, 5)?;
    let op = match op {
        b"0" => Op::Read,
        b"1" => Op::Write,
        other => return Err(format!("“{}” is neither 0 nor 1", shown(other))),
    };
    number(volume, "the volume")?;
    bounded(
        Record {
            time_us: seconds(time, "the time")?,
            disk: disks.number(volume)?,
            op,
            offset: sector(offset, "the offset")?,
            length: 0,
        },
        number(size, "the size")?.saturating_mul(SECTOR),
    )
}

fn words(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    line.split(|c| c.is_ascii_whitespace())
        .filter(|f| !f.is_empty())
}

/// `890000000000000 4892 syslogd 904265560 8 W 6 0 531e779b27df5f0f4a1b3b2e1a3a1f9c`: nanoseconds, process, sector,
/// sectors, operation, major and minor number, and the MD5 of each block, which some of these traces lack.
fn fiu(line: &[u8], disks: &mut Disks) -> Result<Option<Request>, String> {
    let mut all: Vec<&[u8]> = words(line).take(16).collect();
    let is_hash = |f: &&[u8]| f.len() == 32 && f.iter().all(u8::is_ascii_hexdigit);
    all.pop_if(|last| is_hash(&&**last));
    // The name of a process may have blanks in it.
    let &[time, pid, .., at, count, op, major, minor] = all.as_slice() else {
        return Err("it has fewer than 8 fields".to_owned());
    };
    number(pid, "the process")?;
    let device = [major, minor].join(&b':');
    number(major, "the major number").and(number(minor, "the minor number"))?;
    bounded(
        Record {
            time_us: number(time, "the time")? / 1000,
            disk: disks.number(&device)?,
            op: op_letter(op)?,
            offset: sector(at, "the sector")?,
            length: 0,
        },
        number(count, "the length")?.saturating_mul(SECTOR),
    )
}

/// Blktrace's events for one request on its way, in the order in which they are preferred: queued, allocated, inserted,
/// issued to the driver, completed.
const EVENTS: [u8; 5] = *b"QGIDC";

/// The events of a blkparse line.
struct Event<'a> {
    device: &'a [u8],
    time: &'a [u8],
    action: u8,
    op: Op,
    sector: &'a [u8],
    count: &'a [u8],
}

/// `8,16 3 11 0.009507758 697 Q W 223490 + 8 [kjournald]`; `None` for summaries, messages and events without data.
fn event(line: &[u8]) -> Option<Event<'_>> {
    let mut f = words(line);
    let (device, _cpu, _seq) = (f.next()?, f.next()?, f.next()?);
    let (time, _pid, action, rwbs) = (f.next()?, f.next()?, f.next()?, f.next()?);
    let (sector, plus, count) = (f.next()?, f.next()?, f.next()?);
    // Summaries and messages follow the events; only events begin with `major,minor`.
    let is_device = device.first().is_some_and(u8::is_ascii_digit) && device.contains(&b',');
    let &[action] = action else { return None };
    if !is_device || plus != b"+" || !EVENTS.contains(&action) {
        return None;
    }
    let op = if rwbs.contains(&b'D') {
        Op::Discard
    } else if rwbs.contains(&b'R') {
        Op::Read
    } else if rwbs.contains(&b'W') {
        Op::Write
    } else {
        return None;
    };
    Some(Event {
        device,
        time,
        action,
        op,
        sector,
        count,
    })
}

/// The kind of event that stands for a request in a recording that begins with `head`. Recordings may be filtered: some have
/// no queue events.
fn counted_event(head: &[u8]) -> u8 {
    let events = head.split(|c| *c == b'\n').filter_map(event);
    let rank = |e: Event<'_>| EVENTS.iter().position(|action| *action == e.action);
    let best = events.filter_map(rank).min().unwrap_or(0);
    EVENTS[best]
}

fn blkparse(line: &[u8], counted: u8, disks: &mut Disks) -> Result<Option<Request>, String> {
    let Some(e) = event(line).filter(|e| e.action == counted) else {
        return Ok(None);
    };
    bounded(
        Record {
            time_us: seconds(e.time, "the time")?,
            disk: disks.number(e.device)?,
            op: e.op,
            offset: sector(e.sector, "the sector")?,
            length: 0,
        },
        number(e.count, "the length")?.saturating_mul(SECTOR),
    )
}

/// The first line of fio's logs, by version.
const FIO: [&[u8]; 2] = [b"fio version 2 iolog", b"fio version 3 iolog"];

/// Version 2: `FILE ACTION [OFFSET LENGTH]`, and `FILE wait MICROSECONDS`. Version 3 begins each line with microseconds.
#[derive(Debug, Default)]
struct Fio {
    version: usize,
    waited_us: u64,
}

impl Fio {
    fn line(&mut self, line: &[u8], disks: &mut Disks) -> Result<Option<Request>, String> {
        if let Some(at) = FIO.iter().position(|first| line == *first) {
            self.version = 2 + at;
            return Ok(None);
        }
        let mut f = words(line);
        let time_us = match self.version {
            0 => return Err("it is not below a line “fio version 2 iolog” or 3".to_owned()),
            2 => self.waited_us,
            _ => number(f.next().unwrap_or_default(), "the time")?,
        };
        let (file, action) = (f.next().unwrap_or_default(), f.next().unwrap_or_default());
        let op = match action {
            b"read" => Op::Read,
            b"write" => Op::Write,
            b"trim" => Op::Discard,
            b"sync" | b"datasync" => Op::Flush,
            b"wait" => {
                let wait = number(f.next().unwrap_or_default(), "the wait")?;
                self.waited_us = self.waited_us.saturating_add(wait);
                return Ok(None);
            }
            b"add" | b"open" | b"close" | b"sync_file_range" => return Ok(None),
            other => return Err(format!("“{}” is no action of fio's log", shown(other))),
        };
        let record = Record {
            time_us,
            disk: disks.number(file)?,
            op,
            offset: 0,
            length: 0,
        };
        if op == Op::Flush {
            return bounded(record, 0);
        }
        let offset = number(f.next().unwrap_or_default(), "the offset")?;
        let length = number(f.next().unwrap_or_default(), "the length")?;
        bounded(Record { offset, ..record }, length)
    }
}

/// Understands the lines of a trace in a text format, one after another.
#[derive(Debug)]
pub(crate) struct Lines {
    format: Format,
    disks: Disks,
    /// Lines before the next one.
    index: u64,
    /// A line that is no comment was read: no heading follows.
    begun: bool,
    /// The kind of event that counts, of a blkparse text.
    event: u8,
    fio: Fio,
}

impl Lines {
    /// `head` is how the text begins.
    pub(crate) fn new(format: Format, head: &[u8]) -> Lines {
        let event = match format {
            Format::Blkparse => counted_event(head),
            _ => EVENTS[0],
        };
        Lines {
            format,
            disks: Disks::default(),
            index: 0,
            begun: false,
            event,
            fio: Fio::default(),
        }
    }

    /// The kind of event that counts as a request, where there are no queue events.
    pub(crate) fn other_event(&self) -> Option<char> {
        (self.format == Format::Blkparse && self.event != EVENTS[0]).then_some(self.event.into())
    }

    /// Understands the next line.
    pub(crate) fn parse(&mut self, line: &[u8]) -> Result<Option<Request>, String> {
        let index = self.index;
        self.index += 1;
        let line = match index {
            0 => line.strip_prefix(BYTE_ORDER_MARK).unwrap_or(line),
            _ => line,
        };
        let line = line.trim_ascii();
        if is_comment(line) {
            return Ok(None);
        }
        // A heading, in the formats that may have one.
        let first = !std::mem::replace(&mut self.begun, true);
        if first && line[0].is_ascii_alphabetic() && header(self.format, line) {
            return Ok(None);
        }
        let disks = &mut self.disks;
        match self.format {
            Format::Csv => csv(line),
            Format::Keys => keys(line, index),
            Format::Msr => msr(line, disks),
            Format::Alibaba => alibaba(line, disks),
            Format::Spc => spc(line, disks),
            Format::Systor => systor(line, disks),
            Format::Tencent => tencent(line, disks),
            Format::Fiu => fiu(line, disks),
            Format::Fio => self.fio.line(line, disks),
            _ => blkparse(line, self.event, disks),
        }
    }
}

fn is_comment(line: &[u8]) -> bool {
    line.is_empty() || line[0] == b'#'
}

fn header(format: Format, line: &[u8]) -> bool {
    let first: &[&[u8]] = match format {
        Format::Csv => &[b"time_us,"],
        Format::Keys => &[b"block"],
        Format::Systor => &[b"Timestamp,Response,"],
        Format::Tencent => &[b"Timestamp,Offset,", b"timestamp,offset,"],
        Format::Msr => &[b"Timestamp,", b"timestamp,"],
        Format::Alibaba => &[b"device_id,"],
        Format::Spc => &[b"ASU,", b"asu,"],
        _ => &[],
    };
    first.iter().any(|h| line.starts_with(h))
}

/// The text format whose shape the first line has that is no comment.
pub(crate) fn detect(head: &[u8], whole: bool) -> Option<Format> {
    let head = head.strip_prefix(BYTE_ORDER_MARK).unwrap_or(head);
    let mut lines = head.split(|c| *c == b'\n');
    let first = lines.find(|line| !is_comment(line.trim_ascii()))?;
    // A line without an end proves nothing, unless it is the file.
    if lines.next().is_none() && !whole {
        return None;
    }
    if first.iter().any(|c| !(*c >= 32 || c.is_ascii_whitespace())) {
        return None;
    }
    if FIO.contains(&first.trim_ascii()) {
        return Some(Format::Fio);
    }
    for format in [
        Format::Csv,
        Format::Keys,
        Format::Systor,
        Format::Tencent,
        Format::Msr,
        Format::Alibaba,
        Format::Spc,
    ] {
        if first.first().is_some_and(u8::is_ascii_alphabetic) && header(format, first) {
            return Some(format);
        }
    }
    // A request without bytes has the shape as well.
    let fits = |format| Lines::new(format, first).parse(first).is_ok();
    let commas = first.iter().filter(|c| **c == b',').count();
    match commas {
        5 if fits(Format::Systor) => Some(Format::Systor),
        5 | 6 if fits(Format::Msr) => Some(Format::Msr),
        // All three have five fields; the operation is the second of one, the fourth of the others, where it is a digit in
        // one.
        4 if fits(Format::Alibaba) => Some(Format::Alibaba),
        4 if fits(Format::Tencent) => Some(Format::Tencent),
        4 | 5 if fits(Format::Spc) => Some(Format::Spc),
        3 if fits(Format::Csv) => Some(Format::Csv),
        _ if blkparse_shape(first) => Some(Format::Blkparse),
        _ if fits(Format::Fiu) => Some(Format::Fiu),
        _ => None,
    }
}

fn blkparse_shape(line: &[u8]) -> bool {
    let mut f = words(line);
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
        let request = Lines::new(format, line.as_bytes()).parse(line.as_bytes());
        request.expect("understood").expect("a transfer").split().0
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
    fn blkparse_counts_best_events_there_are() {
        let q = "8,0    3       11     0.009507758   697  Q   W 223490 + 8 [kjournald]";
        let r = one(Format::Blkparse, q);
        assert_eq!((r.time_us, r.offset, r.length), (9507, 223_490 * 512, 4096));
        let c = q.replace(" Q ", " C ");
        let mut lines = Lines::new(Format::Blkparse, q.as_bytes());
        assert_eq!(lines.parse(c.as_bytes()), Ok(None));
        assert_eq!(lines.parse(b"Total (8,0):"), Ok(None));
        // A recording of issue events, or of completions, only.
        for (actions, counted) in [("DC", 'D'), ("C", 'C'), ("IDC", 'I'), ("CG", 'G')] {
            let text: Vec<String> = (actions.chars())
                .map(|a| q.replace(" Q ", &format!(" {a} ")))
                .collect();
            let mut lines = Lines::new(Format::Blkparse, text.join("\n").as_bytes());
            assert_eq!(lines.other_event(), Some(counted));
            let requests = text
                .iter()
                .filter_map(|l| lines.parse(l.as_bytes()).unwrap());
            assert_eq!(requests.count(), 1, "{actions}");
        }
    }

    #[test]
    fn disks_are_numbered_in_order_of_appearance() {
        let mut lines = Lines::new(Format::Alibaba, b"");
        let mut disk = |line: &str| {
            let request = lines.parse(line.as_bytes());
            request
                .expect("understood")
                .expect("a transfer")
                .split()
                .0
                .disk
        };
        assert_eq!(disk("725,R,126703644672,4096,1577808000000626"), 0);
        assert_eq!(disk("64,W,12,512,1577808000000627"), 1);
        assert_eq!(disk("725,W,0,512,1577808000000628"), 0);
    }

    #[test]
    fn nonsense_is_named() {
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
            (Format::Csv, "1,D,0,1125899906842625"),
            (Format::Systor, "1.5,x,R,0,0,4096"),
            (Format::Systor, "1.5,0.1,R,0,0"),
            (Format::Tencent, "1,0,8,2,7"),
            (Format::Tencent, "1,36028797018963968,8,1,7"),
            (Format::Fiu, "1 2 p 8 8 X 6 0"),
            (Format::Fiu, "1 2 8 8 W"),
            (Format::Fio, "20 /dev/sdb write 4096 8192"),
        ] {
            let parsed = Lines::new(format, line.as_bytes()).parse(line.as_bytes());
            assert!(parsed.is_err(), "{line}: {parsed:?}");
        }
    }

    #[test]
    fn public_forms_are_read_in_their_units() {
        let wanted = |time_us, op, offset, length| Record {
            time_us,
            disk: 0,
            op,
            offset,
            length,
        };
        for (format, line, record) in [
            (
                Format::Systor,
                "1456131600.010152,0.000167,R,0,1234944,8192",
                wanted(1_456_131_600_010_152, Op::Read, 1_234_944, 8192),
            ),
            (
                Format::Systor,
                "1456131600.5,,W,6,512,512",
                wanted(1_456_131_600_500_000, Op::Write, 512, 512),
            ),
            (
                Format::Tencent,
                "1538323200,12910952,128,0,1063",
                wanted(1_538_323_200_000_000, Op::Read, 12_910_952 * 512, 65536),
            ),
            (
                Format::Fiu,
                "890000000123456 4892 my prog 904265560 8 W 6 0 0123456789abcdef0123456789ABCDEF",
                wanted(890_000_000_123, Op::Write, 904_265_560 * 512, 4096),
            ),
            (
                Format::Fiu,
                "1000 1 p 1 8 R 6 0",
                wanted(1, Op::Read, 512, 4096),
            ),
        ] {
            assert_eq!(one(format, line), record, "{line}");
        }
    }

    /// Both versions; the times of version 2 are its waits.
    #[test]
    fn fio_logs_are_read_in_both_versions() {
        let read = |text: &str| -> Vec<(u64, u32, Op, u64, u32)> {
            let mut lines = Lines::new(Format::Fio, b"");
            let requests = text
                .lines()
                .map(|line| lines.parse(line.as_bytes()).unwrap());
            let records = requests.flatten().map(|request| request.split().0);
            let fields = |r: Record| (r.time_us, r.disk, r.op, r.offset, r.length);
            records.map(fields).collect()
        };
        let second = "fio version 2 iolog\n/a add\n/b add\n/a open\n/a write 4096 8192\n\
            /a wait 50\n/b read 0 512\n/b wait 7\n/a sync 0 0\n/a trim 0 4096\n/a close\n";
        let third = "fio version 3 iolog\n0 /a add\n0 /a open\n20 /a write 4096 8192\n\
            30 /b read 0 512\n31 /a datasync\n40 /a trim 0 4096\n41 /a close\n";
        for (text, times) in [(second, [0, 50, 57, 57]), (third, [20, 30, 31, 40])] {
            assert_eq!(
                read(text),
                [
                    (times[0], 0, Op::Write, 4096, 8192),
                    (times[1], 1, Op::Read, 0, 512),
                    (times[2], 0, Op::Flush, 0, 0),
                    (times[3], 0, Op::Discard, 0, 4096),
                ]
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
                "1456131600.010152,0.000167,R,0,1234944,8192\n",
                Format::Systor,
            ),
            (
                "Timestamp,Response,IOType,LUN,Offset,Size\n",
                Format::Systor,
            ),
            ("1538323200,12910952,128,0,1063\n", Format::Tencent),
            (
                "1 4892 syslogd 904265560 8 W 6 0 531e779b27df5f0f4a1b3b2e1a3a1f9c\n",
                Format::Fiu,
            ),
            ("1456131600.5,,W,6,512,0\n", Format::Systor),
            ("128166372003061629,hm,1,Write,0,0,5\n", Format::Msr),
            ("1538323200,12910952,0,0,1063\n", Format::Tencent),
            ("1 2 p 8 0 R 6 0\n", Format::Fiu),
            ("fio version 2 iolog\n", Format::Fio),
            ("fio version 3 iolog\n", Format::Fio),
            (
                "8,0 3 11 0.009507758 697 Q W 223490 + 8 [k]\n",
                Format::Blkparse,
            ),
        ] {
            assert_eq!(detect(line.as_bytes(), false), Some(format), "{line}");
            for before in ["\u{FEFF}", "# made by hand\n\n#\n"] {
                let text = format!("{before}{line}");
                assert_eq!(detect(text.as_bytes(), false), Some(format), "{text}");
            }
        }
        assert_eq!(detect(b"hello world\n", true), None);
    }
}
