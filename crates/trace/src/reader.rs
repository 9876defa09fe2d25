//! Reads any trace as a stream of records.

use std::io::{BufRead, BufReader, Cursor, Read};
use std::path::Path;

use crate::binary;
use crate::error::TraceError;
use crate::format::Format;
use crate::frame::{self, BadHeader, FRAME_HEADER, HEADER_BYTES};
use crate::record::Record;
use crate::source;
use crate::text::{Lines, Request};

/// Longest line of a text format. Longer ones are damage.
const LINE_MAX: u64 = 64 << 10;

/// How to read a trace.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Its form; found out if `None`.
    pub format: Option<Format>,
}

/// Where a source failed: fails once, then is at its end.
struct Broken(Option<std::io::Error>);

impl Read for Broken {
    fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
        self.0.take().map_or(Ok(0), Err)
    }
}

/// A trace being read: an iterator of records. After an error it ends.
pub struct Reader {
    source: Box<dyn BufRead + Send>,
    format: Format,
    /// Records (in text formats lines) read.
    at: u64,
    line: Vec<u8>,
    lines: Lines,
    /// The rest of a discard that is longer than a record.
    rest: Option<Request>,
    /// A record was found.
    found: bool,
    frame: Vec<Record>,
    /// Next record of `frame`.
    next: usize,
    body: Vec<u8>,
    torn: bool,
    ended: bool,
}

impl std::fmt::Debug for Reader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reader")
            .field("format", &self.format)
            .field("at", &self.at)
            .finish_non_exhaustive()
    }
}

impl Reader {
    /// Opens a file, plain or compressed with gzip or zstd; `-` is standard input.
    ///
    /// # Errors
    ///
    /// When it cannot be read, or its form is neither given nor recognised.
    pub fn open(path: &Path, options: Options) -> Result<Reader, TraceError> {
        Reader::start(source::open(path)?, options)
    }

    /// Reads from any stream, plain or compressed.
    ///
    /// # Errors
    ///
    /// As for [`open`](Self::open).
    pub fn new(raw: impl BufRead + Send + 'static, options: Options) -> Result<Reader, TraceError> {
        let source = source::unpack(raw).map_err(|source| TraceError::Io { record: 0, source })?;
        Reader::start(source, options)
    }

    fn start(mut source: Box<dyn BufRead + Send>, options: Options) -> Result<Reader, TraceError> {
        // One read may bring less than detection needs, and what it sees is read again.
        let mut head = Vec::new();
        let failed = (&mut source)
            .take(source::HEAD as u64)
            .read_to_end(&mut head)
            .err();
        let whole = head.len() < source::HEAD;
        let rest: Box<dyn BufRead + Send> = match failed {
            Some(source) if head.is_empty() => return Err(TraceError::Io { record: 0, source }),
            // What came before the failure is a trace all the same; the failure comes after it.
            Some(error) => Box::new(BufReader::new(Broken(Some(error)))),
            None => source,
        };
        let format = match options.format {
            Some(format) => format,
            None => Format::detect(&head, whole).ok_or(TraceError::Unknown)?,
        };
        let lines = Lines::new(format, &head);
        let mut reader = Reader {
            source: Box::new(Cursor::new(head).chain(rest)),
            format,
            at: 0,
            line: Vec::new(),
            lines,
            rest: None,
            found: false,
            frame: Vec::new(),
            next: 0,
            body: Vec::new(),
            torn: false,
            ended: false,
        };
        if format == Format::Hearth {
            reader.hearth_header()?;
        }
        Ok(reader)
    }

    /// The trace's form.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The kind of blkparse's events that counts as a request, where the trace has no queue events. From inserts (`I`) on,
    /// requests were merged before.
    pub fn other_event(&self) -> Option<char> {
        self.lines.other_event()
    }

    /// The first record of a frame that was never finished, if the trace ended in one, as a kill
    /// leaves it: it and what followed in that frame are missing.
    pub fn torn(&self) -> Option<u64> {
        self.torn.then_some(self.at)
    }

    fn bad(&self, why: impl Into<String>) -> TraceError {
        TraceError::Record {
            record: self.at,
            format: self.format.name(),
            why: why.into(),
        }
    }

    fn hearth_header(&mut self) -> Result<(), TraceError> {
        let mut b = [0u8; HEADER_BYTES];
        let have = self.fill(&mut b)?;
        if have < HEADER_BYTES {
            return Err(TraceError::Truncated {
                record: 0,
                have,
                need: HEADER_BYTES,
            });
        }
        frame::check_header(&b).map_err(|e| match e {
            BadHeader::Damaged(why) => self.bad(why),
            BadHeader::Newer(version) => TraceError::Newer(version),
        })
    }

    /// Fills `b` as far as the source goes; returns how far.
    fn fill(&mut self, b: &mut [u8]) -> Result<usize, TraceError> {
        let mut have = 0;
        while have < b.len() {
            match self.source.read(&mut b[have..]) {
                Ok(0) => break,
                Ok(n) => have += n,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(source) => {
                    return Err(TraceError::Io {
                        record: self.at,
                        source,
                    });
                }
            }
        }
        Ok(have)
    }

    fn next_text(&mut self) -> Result<Option<Record>, TraceError> {
        if let Some(request) = self.rest.take() {
            return Ok(Some(self.record(request)));
        }
        loop {
            self.line.clear();
            let n = (&mut self.source)
                .take(LINE_MAX)
                .read_until(b'\n', &mut self.line)
                .map_err(|source| TraceError::Io {
                    record: self.at,
                    source,
                })?;
            if n == 0 && self.format == Format::Blkparse && !self.found {
                return Err(self.bad("it ends without an event of a read, write or discard"));
            }
            if n == 0 {
                return Ok(None);
            }
            if n as u64 == LINE_MAX && self.line.last() != Some(&b'\n') {
                return Err(self.bad("its line is longer than 64 KiB"));
            }
            let parsed = self.lines.parse(&self.line);
            let parsed = parsed.map_err(|why| self.bad(why))?;
            self.at += 1;
            if let Some(request) = parsed {
                return Ok(Some(self.record(request)));
            }
        }
    }

    fn record(&mut self, request: Request) -> Record {
        let (record, rest) = request.split();
        (self.rest, self.found) = (rest, true);
        record
    }

    fn next_binary(&mut self) -> Result<Option<Record>, TraceError> {
        let size = match self.format {
            Format::Vscsi1 => binary::VSCSI1,
            Format::Vscsi2 => binary::VSCSI2,
            _ => binary::ORACLE,
        };
        let mut b = [0u8; 40];
        loop {
            let have = self.fill(&mut b[..size])?;
            if have == 0 {
                return Ok(None);
            }
            if have < size {
                return Err(TraceError::Truncated {
                    record: self.at,
                    have,
                    need: size,
                });
            }
            let parsed = match self.format {
                Format::Oracle => binary::oracle(&b[..size]),
                format => binary::vscsi(&b[..size], format == Format::Vscsi2),
            }
            .map_err(|why| self.bad(why))?;
            self.at += 1;
            if parsed.is_some() {
                return Ok(parsed);
            }
        }
    }

    fn next_hearth(&mut self) -> Result<Option<Record>, TraceError> {
        if self.next == self.frame.len() {
            self.frame.clear();
            self.next = 0;
            let mut head = [0u8; FRAME_HEADER];
            let have = self.fill(&mut head)?;
            if have < FRAME_HEADER {
                self.torn = have > 0;
                return Ok(None);
            }
            let promised = frame::frame_header(&head);
            let bytes = promised.as_ref().map_or(0, |p| p.bytes);
            let mut body = std::mem::take(&mut self.body);
            body.resize(bytes, 0);
            let have = self.fill(&mut body)?;
            self.body = body;
            if have < bytes {
                self.torn = true;
                return Ok(None);
            }
            let decoded = promised.and_then(|_| frame::decode(&head, &self.body, &mut self.frame));
            if let Err(why) = decoded {
                self.frame.clear();
                // The file's last frame may be half written in any order of its pages.
                if self.at_end()? {
                    self.torn = true;
                    return Ok(None);
                }
                return Err(self.bad(why));
            }
        }
        let record = self.frame.get(self.next).copied();
        self.next += 1;
        self.at += 1;
        Ok(record)
    }

    fn at_end(&mut self) -> Result<bool, TraceError> {
        let mut b = [0u8; 1];
        Ok(self.fill(&mut b)? == 0)
    }
}

impl Iterator for Reader {
    type Item = Result<Record, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let next = match self.format {
            Format::Hearth => self.next_hearth(),
            Format::Vscsi1 | Format::Vscsi2 | Format::Oracle => self.next_binary(),
            _ => self.next_text(),
        };
        match next {
            Ok(Some(record)) => return Some(Ok(record)),
            Ok(None) => self.ended = true,
            Err(e) => {
                self.ended = true;
                return Some(Err(e));
            }
        }
        None
    }
}
