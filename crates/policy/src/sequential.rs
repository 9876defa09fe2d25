//! Finds sequential streams, so that a backup or a scan does not wash the cache out.
//!
//! Several streams interleave on one disk (guests read files side by side), so the last few
//! stream ends are remembered; a request that starts where one ended continues it.

/// Streams followed at once, as vscsiStats looks at the previous 16 requests.
const STREAMS: usize = 16;

/// Stream detector of one disk.
#[derive(Debug, Default)]
pub struct Sequential {
    /// (end of the stream in bytes, its length so far), most recent first.
    streams: Vec<(u64, u64)>,
}

impl Sequential {
    /// Notes a request; returns how many bytes its stream has covered, this request included.
    pub fn observe(&mut self, offset: u64, len: u64) -> u64 {
        let end = offset.saturating_add(len);
        if let Some(at) = self.streams.iter().position(|s| s.0 == offset) {
            let total = self.streams[at].1 + len;
            self.streams.remove(at);
            self.streams.insert(0, (end, total));
            return total;
        }
        if self.streams.len() == STREAMS {
            self.streams.pop();
        }
        self.streams.insert(0, (end, len));
        len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interleaved_streams_are_told_apart() {
        let mut s = Sequential::default();
        for i in 0..10 {
            assert_eq!(s.observe(i * 100, 100), (i + 1) * 100);
            assert_eq!(s.observe(1_000_000 + i * 10, 10), (i + 1) * 10);
        }
        assert_eq!(s.observe(5_000_000, 7), 7);
    }
}
