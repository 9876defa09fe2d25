//! A trace as requests that fit a target.

use std::path::{Path, PathBuf};

use hearth_trace::{Op, Options as Form, Reader, Record};

use crate::error::ReplayError;
use crate::target::Kind;

/// Which of a trace's requests.
#[derive(Clone, Debug, Default)]
pub struct Select {
    /// The trace.
    pub path: PathBuf,
    /// Its form, if it is not to be found out.
    pub form: Form,
    /// Only this disk.
    pub disk: Option<u32>,
    /// Only reads.
    pub reads_only: bool,
    /// Not the first so many of these.
    pub skip: u64,
    /// No more than so many; all if `None`.
    pub limit: Option<u64>,
}

/// What a first look at the trace found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Requests to play.
    pub requests: u64,
    /// Of these, writes and discards.
    pub writes: u64,
    /// One past the last byte.
    pub end: u64,
    /// Time of the first request, microseconds.
    pub first_us: u64,
    /// Microseconds from the first to the last.
    pub span_us: u64,
    /// Requests of the disk left out because only reads are wanted.
    pub not_reads: u64,
    /// The first record that is missing, if the trace ends in an unfinished frame.
    pub torn: Option<u64>,
}

fn open(select: &Select) -> Result<Reader, ReplayError> {
    Ok(Reader::open(&select.path, select.form)?)
}

fn wanted(select: &Select, record: &Record) -> bool {
    select.disk.is_none_or(|d| d == record.disk) && (!select.reads_only || record.op == Op::Read)
}

/// Does a wanted request fall into the part of the trace that is played? `at` counts them.
fn in_part(select: &Select, at: &mut u64) -> bool {
    let number = *at;
    *at += 1;
    number >= select.skip && select.limit.is_none_or(|n| number - select.skip < n)
}

/// Looks through the trace once.
///
/// # Errors
///
/// When it cannot be read, holds nothing to play, or several disks and none was chosen.
pub fn scan(select: &Select) -> Result<Plan, ReplayError> {
    let mut plan = Plan::default();
    let (mut disks, mut last_us, mut any, mut at) = (0, 0, false, 0);
    let mut reader = open(select)?;
    for record in reader.by_ref() {
        let record = record?;
        disks = disks.max(record.disk.saturating_add(1));
        let chosen = select.disk.is_none_or(|d| d == record.disk);
        plan.not_reads += u64::from(chosen && select.reads_only && record.op != Op::Read);
        if !wanted(select, &record) || !in_part(select, &mut at) {
            continue;
        }
        if !any {
            (plan.first_us, any) = (record.time_us, true);
        }
        plan.first_us = plan.first_us.min(record.time_us);
        last_us = last_us.max(record.time_us);
        plan.requests += 1;
        plan.writes += u64::from(matches!(record.op, Op::Write | Op::Discard));
        plan.end = plan
            .end
            .max(record.offset.saturating_add(u64::from(record.length)));
    }
    plan.torn = reader.torn();
    plan.span_us = last_us.saturating_sub(plan.first_us);
    match select.disk {
        Some(disk) if disk >= disks => Err(ReplayError::NoDisk(disk)),
        None if disks > 1 => Err(ReplayError::Disks(disks)),
        _ if plan.requests == 0 => Err(ReplayError::Empty),
        _ => Ok(plan),
    }
}

/// A request, or a piece of one, in the target's own terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Microseconds after the trace's first request.
    pub time_us: u64,
    /// What.
    pub kind: Kind,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// The first piece of a request: counts as it.
    pub first: bool,
}

/// The pieces of a trace, one after another.
pub struct Source {
    reader: Reader,
    select: Select,
    first_us: u64,
    /// Wanted requests seen.
    at: u64,
    size: u64,
    align: u64,
    len_max: u64,
    /// What is left of the request at hand.
    rest: Option<(Record, u64, u64, bool)>,
}

impl Source {
    /// Opens the trace again, to be played into `size` bytes. Positions beyond are folded back
    /// (modulo the size); requests are made longer where they are not multiples of `align`, and
    /// cut where they are longer than `len_max`.
    ///
    /// # Errors
    ///
    /// When the trace cannot be read.
    pub fn open(
        select: &Select,
        plan: &Plan,
        size: u64,
        align: u64,
        len_max: u64,
    ) -> Result<Source, ReplayError> {
        let size = size / align * align;
        // Pieces are cut at it, and every piece is a multiple of the unit.
        let len_max = len_max / align * align;
        if size < align || len_max < align {
            return Err(ReplayError::TooSmall(size.min(len_max)));
        }
        Ok(Source {
            reader: open(select)?,
            select: select.clone(),
            first_us: plan.first_us,
            at: 0,
            size,
            align,
            len_max,
            rest: None,
        })
    }

    /// The trace's path.
    pub fn path(&self) -> &Path {
        &self.select.path
    }

    /// The next piece.
    ///
    /// # Errors
    ///
    /// When the trace cannot be read any further.
    pub fn next_piece(&mut self) -> Result<Option<Piece>, ReplayError> {
        loop {
            if let Some((record, at, end, first)) = self.rest.take() {
                let kind = match record.op {
                    Op::Read => Kind::Read,
                    Op::Write => Kind::Write,
                    Op::Discard => Kind::Discard,
                    Op::Flush => Kind::Flush,
                };
                let offset = at % self.size;
                let len = (end - at).min(self.len_max).min(self.size - offset);
                if at + len < end {
                    self.rest = Some((record, at + len, end, false));
                }
                return Ok(Some(Piece {
                    time_us: record.time_us.saturating_sub(self.first_us),
                    kind,
                    offset,
                    len,
                    first,
                }));
            }
            let Some(record) = self.reader.next().transpose()? else {
                return Ok(None);
            };
            if self
                .select
                .limit
                .is_some_and(|n| self.at >= self.select.skip.saturating_add(n))
            {
                return Ok(None);
            }
            if wanted(&self.select, &record) && in_part(&self.select, &mut self.at) {
                let at = record.offset / self.align * self.align;
                let end = record
                    .offset
                    .saturating_add(u64::from(record.length))
                    .div_ceil(self.align)
                    .saturating_mul(self.align);
                let empty = record.op == Op::Flush;
                self.rest = Some((record, at, if empty { at } else { end }, true));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(lines: &str) -> (tempfile::TempDir, Select) {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("t.csv");
        let text = format!("time_us,op,offset_bytes,length_bytes\n{lines}");
        std::fs::write(&path, text).expect("written");
        let select = Select {
            path,
            ..Select::default()
        };
        (dir, select)
    }

    fn pieces(select: &Select, size: u64, align: u64, len_max: u64) -> Vec<(u64, u64, u64, bool)> {
        let plan = scan(select).expect("a plan");
        let mut source = Source::open(select, &plan, size, align, len_max).expect("opens");
        let mut out = Vec::new();
        while let Some(p) = source.next_piece().expect("reads") {
            assert!(p.offset + p.len <= size);
            out.push((p.time_us, p.offset, p.len, p.first));
        }
        out
    }

    #[test]
    fn requests_are_widened_cut_and_folded() {
        let (_dir, select) = trace("1000,R,512,1024\n1500,W,10000,5000\n");
        assert_eq!(
            scan(&select).expect("a plan"),
            Plan {
                requests: 2,
                writes: 1,
                end: 15_000,
                first_us: 1000,
                span_us: 500,
                ..Plan::default()
            }
        );
        assert_eq!(
            pieces(&select, 1 << 20, 4096, 4096 + 512),
            [
                (0, 0, 4096, true),
                (500, 8192, 4096, true),
                (500, 12_288, 4096, false)
            ]
        );
        assert_eq!(
            pieces(&select, 1 << 20, 1, 1 << 20),
            [(0, 512, 1024, true), (500, 10_000, 5000, true)]
        );
        // Folded at the end of a small target, across it too.
        assert_eq!(
            pieces(&select, 12_288, 4096, 1 << 20),
            [
                (0, 0, 4096, true),
                (500, 8192, 4096, true),
                (500, 0, 4096, false)
            ]
        );
    }

    #[test]
    fn only_reads() {
        let (_dir, mut select) = trace("0,R,0,512\n1,W,0,512\n2,F,0,0\n");
        assert_eq!(pieces(&select, 4096, 1, 4096).len(), 3);
        select.skip = 1;
        select.limit = Some(1);
        assert_eq!(pieces(&select, 4096, 1, 4096), [(0, 0, 512, true)]);
        (select.skip, select.limit) = (0, None);
        select.reads_only = true;
        assert_eq!(pieces(&select, 4096, 1, 4096).len(), 1);
        assert_eq!(scan(&select).expect("a plan").not_reads, 2);
        select.disk = Some(4);
        assert!(matches!(scan(&select), Err(ReplayError::NoDisk(4))));
    }
}
