//! Writes traces: Hearth's own form, and CSV for everything else that reads traces.

use std::io::Write;

use crate::error::TraceError;
use crate::frame::{self, FRAME_RECORDS};
use crate::record::{Op, Record};

/// A form that can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Hearth's own.
    Hearth,
    /// `time_us,op,offset_bytes,length_bytes`. It has no disks: traces of several do not fit.
    Csv,
}

/// A trace being written. Call [`finish`](Self::finish): what is not flushed is lost.
#[derive(Debug)]
pub struct Writer<W: Write> {
    out: W,
    output: Output,
    pending: Vec<Record>,
    bytes: Vec<u8>,
}

impl<W: Write> Writer<W> {
    /// Begins a trace.
    ///
    /// # Errors
    ///
    /// When the header cannot be written.
    pub fn new(mut out: W, output: Output) -> Result<Writer<W>, TraceError> {
        match output {
            Output::Hearth => out.write_all(&frame::header()),
            Output::Csv => out.write_all(b"time_us,op,offset_bytes,length_bytes\n"),
        }
        .map_err(TraceError::Write)?;
        Ok(Writer {
            out,
            output,
            pending: Vec::new(),
            bytes: Vec::new(),
        })
    }

    /// Adds a record. Records of Hearth's form go out once a frame is full.
    ///
    /// # Errors
    ///
    /// When writing fails, or the form cannot hold the record.
    pub fn push(&mut self, record: Record) -> Result<(), TraceError> {
        let end = record.offset.checked_add(u64::from(record.length));
        if end.is_none() || (record.length == 0) != (record.op == Op::Flush) {
            return Err(TraceError::Unwritable {
                format: "hearth or csv",
                why: "its range is empty or beyond any disk",
            });
        }
        match self.output {
            Output::Hearth => {
                self.pending.push(record);
                if self.pending.len() == FRAME_RECORDS {
                    self.frame()?;
                }
                Ok(())
            }
            Output::Csv => {
                if record.disk != 0 {
                    return Err(TraceError::Unwritable {
                        format: "csv",
                        why: "CSV has no disk numbers; choose --disk, or write Hearth's own format",
                    });
                }
                let op = match record.op {
                    Op::Read => 'R',
                    Op::Write => 'W',
                    Op::Discard => 'D',
                    Op::Flush => 'F',
                };
                writeln!(
                    self.out,
                    "{},{op},{},{}",
                    record.time_us, record.offset, record.length
                )
                .map_err(TraceError::Write)
            }
        }
    }

    /// Ends the frame at hand, so that a kill from here on costs none of its records.
    ///
    /// # Errors
    ///
    /// When writing fails.
    pub fn frame(&mut self) -> Result<(), TraceError> {
        if !self.pending.is_empty() {
            self.bytes.clear();
            frame::encode(&self.pending, &mut self.bytes);
            self.pending.clear();
            self.out.write_all(&self.bytes).map_err(TraceError::Write)?;
        }
        self.out.flush().map_err(TraceError::Write)
    }

    /// The stream.
    pub fn get_ref(&self) -> &W {
        &self.out
    }

    /// Writes what is pending and gives the stream back.
    ///
    /// # Errors
    ///
    /// When writing fails.
    pub fn finish(mut self) -> Result<W, TraceError> {
        self.frame()?;
        Ok(self.out)
    }
}
