//! What of the log is durable: flushes of the device, each shared by all who wait.
//!
//! A flush covers what had been applied when it was sent. Who comes later waits for the next one, which
//! starts as soon as this one ends: that is all there is to group commit.

use crate::ctx::Io;
use crate::faults::Fault;
use crate::flash::device::{FlashDevice, FlashEvent, FlashOp, Users};
use hearth_format::BatchMark;
use hearth_io::IoError;

/// A flush of the flash device is started when this much was appended since the last one was: after
/// a crash every batch behind the last flush is read to see whether it is whole, and a fast device
/// takes gigabytes within the second of the tick. 64 MiB are read in less than a second by any SSD, and a flush
/// per 64 MiB costs no SSD a noticeable share of its time.
pub const FLUSH_AFTER_BYTES: u64 = 64 << 20;
/// What was appended is flushed after this long, even if nobody waits for it.
const FLUSH_AFTER_NS: u64 = 1_000_000_000;

/// How far the log has to be durable.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Until {
    /// Up to what was appended with this number.
    Ord(u64),
    /// Up to this batch.
    Batch(u64),
}

/// Somebody who waits for that.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting<W> {
    pub until: Until,
    pub who: W,
}

impl<U: Users> FlashDevice<U> {
    /// Is what was appended with this number durable?
    pub fn is_durable(&self, ord: u64) -> bool {
        ord <= self.log.durable_ord
    }

    /// Is all durable that is on flash?
    pub fn is_all_durable(&self) -> bool {
        self.log.applied_ord <= self.log.durable_ord
    }

    /// Tells `who` when the log is durable that far. Somebody will ask for a flush.
    pub fn tell_when_durable(&mut self, until: Until, who: U::Waiter) {
        self.waiters.push(Waiting { until, who });
    }

    /// Tells `who` when the log is durable that far, and starts a flush.
    pub fn wait_durable(&mut self, until: Until, who: U::Waiter, now: u64) {
        self.tell_when_durable(until, who);
        self.flush(now);
    }

    /// Are free segments so few that those which are to be free cannot wait for a flush that comes anyway? A device
    /// that is written as fast as it takes it would be flushed thrice for every segment, once for what took the
    /// place of its content and once for each copy of the map, were they not to wait for others.
    pub fn is_short_of_free(&self) -> bool {
        let target = self.free_target();
        let ahead = target - self.log.reserve();
        self.free_to_stay() < target - (ahead / 2).min(ahead.saturating_sub(2))
    }

    /// Starts a flush unless one is in flight; waiters it does not cover start the next.
    pub fn flush(&mut self, now: u64) {
        if self.flush_inflight || !self.takes_writes() {
            return;
        }
        if self.log.applied_seq <= self.log.durable_seq && !self.waiters.is_empty() {
            // Nothing new is on flash yet; what is waited for is still queued.
            self.log.urgent = true;
            return;
        }
        self.flush_inflight = true;
        self.last_flush_ns = now;
        self.unflushed_bytes = 0;
        self.log.epoch += 1;
        self.counters.flash_flushes += 1;
        let op = FlashOp::Flush {
            ord: self.log.applied_ord,
            seq: self.log.applied_seq,
        };
        self.out.send(op, Io::flush(self.target()));
    }

    /// A flush has ended; it covers the log up to `ord` and batch `seq`. False: the device has failed.
    pub fn flush_ended(
        &mut self,
        ord: u64,
        seq: u64,
        result: &Result<(), IoError>,
        now: u64,
    ) -> bool {
        self.flush_inflight = false;
        if result.is_err() && !self.faults.has(Fault::IgnoreFlashFlushError) {
            // After a failed flush nobody knows what the device kept: it has failed.
            self.counters.flash_errors += 1;
            self.full = false;
            self.fail(now);
            return false;
        }
        let (ord, seq) = match self.faults.has(Fault::FlushCoversLater) {
            true => (self.log.applied_ord, self.log.applied_seq),
            false => (ord, seq),
        };
        self.log.durable_ord = self.log.durable_ord.max(ord);
        self.log.durable_seq = self.log.durable_seq.max(seq);
        let through = self.log.durable_seq;
        let later = |marks: &[BatchMark]| marks.last().is_some_and(|m| m.seq > through);
        self.log.sealed.retain(|(_, marks)| later(marks));
        self.store_map_if_due();
        let (ord, seq) = (self.log.durable_ord, self.log.durable_seq);
        let out = &mut self.out;
        self.waiters.retain(|w| {
            let ready = match w.until {
                Until::Ord(n) => n <= ord,
                Until::Batch(n) => n <= seq,
            };
            if ready {
                out.tell(FlashEvent::Durable { who: w.who });
            }
            !ready
        });
        true
    }

    /// Those who waited for the last flush have been told: starts the next one if somebody still waits.
    pub fn flush_again(&mut self, now: u64) {
        if !self.waiters.is_empty() {
            self.flush(now);
        }
        self.flush_if_much(0, now);
    }

    /// Batches of `bytes` are on flash: bounds what a crash leaves to be read.
    pub fn flush_if_much(&mut self, bytes: u64, now: u64) {
        self.unflushed_bytes += bytes;
        if self.unflushed_bytes >= FLUSH_AFTER_BYTES {
            self.flush(now);
        }
    }

    /// The same for what has lain there for long.
    pub fn flush_if_old(&mut self, now: u64) {
        if !self.is_all_durable() && now.saturating_sub(self.last_flush_ns) > FLUSH_AFTER_NS {
            self.flush(now);
        }
    }

    /// Takes all who wait: nothing becomes durable any more.
    pub fn take_waiters(&mut self) -> Vec<U::Waiter> {
        self.waiters.drain(..).map(|w| w.who).collect()
    }
}
