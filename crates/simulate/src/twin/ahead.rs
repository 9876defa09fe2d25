//! What is read ahead, as far as the arm and the stage have room for it.

use hearth_policy::Stay;
use hearth_policy::cleaning::Why;
use hearth_policy::prefetch::Source;

use super::{RUN_MAX, Then, Twin};

/// Share of the stage that blocks read ahead may take before they are used.
const UNUSED_SHARE: usize = 2;
/// Reads ahead in flight, and the same while a client waits for the disk.
const READS_MAX: usize = 4;
const BUSY_READS_MAX: usize = 2;

/// A read ahead on its way.
#[derive(Debug)]
pub(super) struct Coming {
    pub(super) key: u64,
    pub(super) count: u64,
    pub(super) source: Source,
    pub(super) ready_ns: u64,
    pub(super) used: Vec<bool>,
    pub(super) cancelled: bool,
}

impl Twin {
    /// Sends what may be read ahead now.
    pub(super) fn pump_ahead(&mut self) {
        let mut at = 0;
        while at < self.ahead.len() {
            let busy = if self.reading.is_empty() {
                READS_MAX
            } else {
                BUSY_READS_MAX
            };
            if self.coming.len() >= busy {
                return;
            }
            let (range, source) = self.ahead[at];
            let end = range.key + u64::from(range.count);
            match self.send_ahead(range.key, end, source) {
                Some(rest) if rest < end => {
                    if let Some((range, _)) = self.ahead.get_mut(at) {
                        range.key = rest;
                        range.count = (end - rest) as u32;
                    }
                }
                _ => {
                    self.ahead.remove(at);
                }
            }
            at = 0;
        }
    }

    /// Sends the first part of `from..end` that can be read; where to go on, or `None` if nothing can.
    pub(super) fn send_ahead(&mut self, from: u64, end: u64, source: Source) -> Option<u64> {
        let coming: u64 = self.coming.iter().map(|(_, r)| r.count).sum();
        let room = self.room / UNUSED_SHARE;
        let room = (room as u64).saturating_sub(self.unused as u64 + coming);
        let held = |at: u64| {
            let ahead = self.coming.iter().map(|(_, r)| (r.key, r.key + r.count));
            let misses = self.reading.iter().map(|r| (r.1, r.2));
            let writes = self.writing.iter().map(|w| (w.0, w.1));
            let queued = self.sent.iter().flatten().chain(&self.queue);
            ahead
                .chain(misses)
                .chain(writes)
                .chain(queued.map(|f| (f.key, f.key + 1)))
                .find(|(s, e)| (*s..*e).contains(&at))
                .map(|(_, e)| e)
        };
        let mut from = from;
        while from < end {
            if let Some(behind) = held(from) {
                from = behind;
            } else if self.present(from) {
                from += 1;
            } else {
                break;
            }
        }
        let most = end.min(from.saturating_add(room.min(RUN_MAX)));
        let mut to = from;
        while to < most && !self.present(to) && held(to).is_none() {
            to += 1;
        }
        if to <= from {
            return None;
        }
        let count = to - from;
        self.out.prefetched += count;
        self.out.prefetch_requests += 1;
        let ready_ns = self.arm.serve(self.now, from, count);
        self.note_disk_time();
        let n = self.number();
        let read = Coming {
            key: from,
            count,
            source,
            ready_ns,
            used: vec![false; count as usize],
            cancelled: false,
        };
        self.coming.push((n, read));
        self.later(ready_ns, Then::Ahead(n));
        Some(to)
    }

    pub(super) fn ahead_came(&mut self, n: u64) {
        let Some(at) = self.coming.iter().position(|(m, _)| *m == n) else {
            return;
        };
        let (_, read) = self.coming.swap_remove(at);
        for (i, used) in read.used.iter().enumerate() {
            let stay = Stay {
                freq: 0,
                covered: !used,
                unused: (!used).then_some(read.source),
                written: false,
            };
            if !read.cancelled {
                self.put_in_stage(read.key + i as u64, stay, Why::Filled);
            } else if !used {
                self.policy.leave(stay, true);
                self.out.prefetch_wasted += 1;
            }
        }
    }
}
