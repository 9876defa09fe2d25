//! A trace in memory, ready to be run many times.

use hashbrown::HashMap;
use hearth_trace::{Op, Reader, Record, TraceError};

/// Bits of a block's address below the disk's number: 2^40 blocks of 4 KiB are 4 PiB.
const DISK_SHIFT: u32 = 40;
/// Records between two calls of `told`.
const TOLD_EVERY: u64 = 1 << 14;

/// A request in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// When, in microseconds of the trace's own time.
    pub time_us: u64,
    /// First block; the disk's number in the bits from 40.
    pub block: u64,
    /// Blocks.
    pub count: u32,
    /// Does it write?
    pub write: bool,
}

/// The reads and writes of one trace.
#[derive(Clone, Debug, Default)]
pub struct Workload {
    /// Its name in tables.
    pub name: String,
    /// In the trace's order.
    pub requests: Vec<Request>,
    /// The dense number of every block accessed, in order: requests one after another, blocks
    /// ascending.
    pub ids: Vec<u32>,
    /// Different blocks.
    pub unique: usize,
    /// Block accesses of reads.
    pub reads: u64,
    /// Block accesses of writes.
    pub writes: u64,
    /// The first record that is missing, if the trace ended in an unfinished frame.
    pub torn: Option<u64>,
}

impl Workload {
    /// Loads a trace. Only reads and writes count; trims and flushes are left out, because they
    /// neither hit nor miss. `told` hears now and then how many records have been read.
    ///
    /// # Errors
    ///
    /// When the trace cannot be read.
    pub fn load(
        name: &str,
        mut reader: Reader,
        mut told: impl FnMut(u64),
    ) -> Result<Workload, TraceError> {
        let mut builder = Builder::new(name);
        for (at, record) in (1u64..).zip(reader.by_ref()) {
            builder.push(record?);
            if at.is_multiple_of(TOLD_EVERY) {
                told(at);
            }
        }
        Ok(Workload {
            torn: reader.torn(),
            ..builder.finish()
        })
    }

    /// A workload of given requests, for tests and made loads.
    pub fn made(name: &str, requests: impl IntoIterator<Item = Request>) -> Workload {
        let mut builder = Builder::new(name);
        for request in requests {
            builder.add(request);
        }
        builder.finish()
    }

    /// Block accesses.
    pub fn accesses(&self) -> u64 {
        self.reads + self.writes
    }

    /// The cache size that is `fraction` of the different blocks, at least 1.
    pub fn capacity(&self, fraction: f64) -> usize {
        ((self.unique as f64 * fraction).round() as usize).max(1)
    }
}

struct Builder {
    load: Workload,
    numbers: HashMap<u64, u32>,
}

impl Builder {
    fn new(name: &str) -> Builder {
        Builder {
            load: Workload {
                name: name.to_owned(),
                ..Workload::default()
            },
            numbers: HashMap::new(),
        }
    }

    fn push(&mut self, record: Record) {
        let write = match record.op {
            Op::Read => false,
            Op::Write => true,
            Op::Discard | Op::Flush => return,
        };
        let (start, end) = record.blocks();
        self.add(Request {
            time_us: record.time_us,
            // Beyond 8 million disks or 4 PiB, addresses share numbers.
            block: start & ((1 << DISK_SHIFT) - 1)
                | u64::from(record.disk & 0x7F_FFFF) << DISK_SHIFT,
            count: (end - start) as u32,
            write,
        });
    }

    fn add(&mut self, request: Request) {
        for block in request.block..request.block + u64::from(request.count) {
            let next = self.numbers.len() as u32;
            let id = *self.numbers.entry(block).or_insert(next);
            self.load.ids.push(id);
        }
        let n = u64::from(request.count);
        if request.write {
            self.load.writes += n;
        } else {
            self.load.reads += n;
        }
        self.load.requests.push(request);
    }

    fn finish(mut self) -> Workload {
        self.load.unique = self.numbers.len();
        self.load.ids.shrink_to_fit();
        self.load
    }
}
