//! Writes traces: Hearth's own form, and the others for everything else that reads traces.

use std::io::Write;

use crate::error::TraceError;
use crate::foreign::{Foreign, Lost};
use crate::format::Format;
use crate::frame::{self, FRAME_RECORDS};
use crate::record::{Op, Record};

/// A trace being written. Call [`finish`](Self::finish): what is not flushed is lost.
#[derive(Debug)]
pub struct Writer<W: Write> {
    out: W,
    format: Format,
    foreign: Foreign,
    pending: Vec<Record>,
    bytes: Vec<u8>,
}

impl<W: Write> Writer<W> {
    /// Begins a trace.
    ///
    /// # Errors
    ///
    /// When the header cannot be written, or the form is one that is only read.
    pub fn new(mut out: W, format: Format) -> Result<Writer<W>, TraceError> {
        let foreign = Foreign::new(format);
        match format {
            Format::Hearth => out.write_all(&frame::header()),
            other if !other.is_written() => {
                return Err(TraceError::Unwritable {
                    format: format.name(),
                    why: "this form is only read",
                    remedy: "choose another, such as csv",
                });
            }
            _ => out.write_all(foreign.heading()),
        }
        .map_err(TraceError::Write)?;
        Ok(Writer {
            out,
            format,
            foreign,
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
                format: self.format.name(),
                why: "its range is empty or beyond any disk",
                remedy: "leave it out",
            });
        }
        if self.format != Format::Hearth {
            return self.foreign.push(&mut self.out, record);
        }
        self.pending.push(record);
        if self.pending.len() == FRAME_RECORDS {
            self.frame()?;
        }
        Ok(())
    }

    /// What the form did not take so far.
    pub fn lost(&self) -> Lost {
        self.foreign.lost()
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
        let rest = self.foreign.rest();
        self.out.write_all(&rest).map_err(TraceError::Write)?;
        self.frame()?;
        Ok(self.out)
    }
}
