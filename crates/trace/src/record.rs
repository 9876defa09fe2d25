//! One request of a trace.

/// Bytes of a block, the unit in which requests are counted.
pub const BLOCK: u64 = 4096;

/// Longest request a trace may hold: 1 GiB. Longer ones are damage, not I/O.
pub const LENGTH_MAX: u64 = 1 << 30;

/// What a request does to its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Reads them.
    Read,
    /// Writes them.
    Write,
    /// Gives them up (trim, unmap).
    Discard,
    /// Makes earlier writes durable; has no bytes.
    Flush,
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// When it arrived, in microseconds. The zero is the trace's own.
    pub time_us: u64,
    /// Which disk, numbered in order of appearance where a trace has several.
    pub disk: u32,
    /// What it does.
    pub op: Op,
    /// First byte.
    pub offset: u64,
    /// Bytes; zero for [`Op::Flush`] only.
    pub length: u32,
}

impl Record {
    /// The blocks it touches: first, and one past the last. A request that begins or ends inside
    /// a block touches that block: rounding the length alone would lose blocks.
    pub fn blocks(&self) -> (u64, u64) {
        if self.length == 0 {
            return (self.offset / BLOCK, self.offset / BLOCK);
        }
        let last = self.offset.saturating_add(u64::from(self.length) - 1);
        (self.offset / BLOCK, last / BLOCK + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unaligned_requests_touch_both_ends() {
        let at = |offset, length| {
            Record {
                time_us: 0,
                disk: 0,
                op: Op::Read,
                offset,
                length,
            }
            .blocks()
        };
        assert_eq!(at(0, 4096), (0, 1));
        assert_eq!(at(512, 4096), (0, 2));
        assert_eq!(at(4095, 2), (0, 2));
        assert_eq!(at(8192, 1), (2, 3));
        assert_eq!(at(100, 0), (0, 0));
    }
}
