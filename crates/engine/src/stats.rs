//! What a disk and a pool have done, as plain counters since the daemon started.
//!
//! Definitions are printed in `docs/statistics.md`. Counters only grow; windows (5 minutes,
//! hour, day) are differences of snapshots and are made by the daemon.

use crate::api::FlashFault;
use crate::tally::Tally;
use hdrhistogram::{Counter, Histogram};
use hearth_io::OpKind;
use hearth_policy::Percentiles;
use serde::{Deserialize, Serialize};

/// Counters of one disk. Requests are client requests; bytes are client bytes unless said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskCounters {
    /// Reads served wholly from flash, the RAM stage or known zeros.
    pub read_hits: u64,
    /// Reads served partly from flash: a miss in hit ratios by request.
    pub read_partial_hits: u64,
    /// Reads with nothing on flash, or passed by it on purpose.
    pub read_misses: u64,
    /// Bytes read from flash or RAM for clients.
    pub read_hit_bytes: u64,
    /// Of these, bytes from RAM: the RAM stage, and copies on their way to flash.
    pub stage_hit_bytes: u64,
    /// Bytes read from the origin for clients, without what larger cache blocks read around them.
    pub read_miss_bytes: u64,
    /// Writes of which every block was cached when they arrived.
    pub write_hits: u64,
    /// Writes of which some blocks were cached.
    pub write_partial_hits: u64,
    /// Writes of which no block was cached.
    pub write_misses: u64,
    /// Bytes written by clients.
    pub write_bytes: u64,
    /// Flush requests.
    pub flushes: u64,
    /// Discards and write-zeroes.
    pub discards: u64,
    /// Bytes discarded or zeroed.
    pub discard_bytes: u64,
    /// Read requests not admitted because they belong to a long sequential stream.
    pub bypassed_sequential: u64,
    /// Blocks of clean hits sent to the origin because flash was slower.
    pub bypassed_congested: u64,
    /// Blocks read from the origin and put on flash.
    pub fills: u64,
    /// Blocks read from the origin that policy kept off flash, at once or after their stay in RAM.
    pub fills_rejected: u64,
    /// Blocks read from the origin ahead of their use.
    pub prefetched: u64,
    /// Of these, blocks a client read.
    pub prefetch_used: u64,
    /// Of the used ones, blocks that were still on their way when a client asked for them.
    pub prefetch_late: u64,
    /// Blocks read ahead and given up without a use.
    pub prefetch_wasted: u64,
    /// Fills dropped because a write overtook them.
    pub fills_cancelled: u64,
    /// Clean blocks dropped to make room.
    pub evictions: u64,
    /// Blocks appended again because they had earned it or were dirty.
    pub reinsertions: u64,
    /// Blocks written to the origin by the destager.
    pub destaged: u64,
    /// Times the destager could not write a run of blocks, or flush, and left them dirty.
    pub destage_errors: u64,
    /// Operations sent to the origin: reads.
    pub origin_reads: u64,
    /// Bytes read from the origin.
    pub origin_read_bytes: u64,
    /// Operations sent to the origin: writes.
    pub origin_writes: u64,
    /// Bytes written to the origin.
    pub origin_write_bytes: u64,
    /// Origin flushes.
    pub origin_flushes: u64,
    /// Failed operations on the origin.
    pub origin_errors: u64,
    /// Clean blocks whose checksum failed; fetched again from the origin.
    pub bad_clean_blocks: u64,
    /// Dirty blocks whose checksum failed, or that a failed device did not give back: lost data.
    pub bad_dirty_blocks: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// Total origin read time, nanoseconds (device time of misses).
    pub origin_read_ns: u64,
    /// Total time of reads that did not fail as clients saw it, nanoseconds.
    pub read_ns: u64,
    /// Total time of writes as clients saw it, nanoseconds.
    pub write_ns: u64,
    /// Total origin write time, nanoseconds.
    pub origin_write_ns: u64,
}

/// Counters of a pool's flash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolCounters {
    /// Bytes written to flash, everything included.
    pub flash_write_bytes: u64,
    /// Of these, client data and fills (the denominator of write amplification).
    pub flash_payload_bytes: u64,
    /// Of these, blocks appended again.
    pub flash_reinsert_bytes: u64,
    /// Bytes read from flash.
    pub flash_read_bytes: u64,
    /// Batches appended.
    pub batches: u64,
    /// Device flushes.
    pub flash_flushes: u64,
    /// Segments sealed.
    pub segments_sealed: u64,
    /// Segments freed.
    pub segments_freed: u64,
    /// Failed flash operations.
    pub flash_errors: u64,
}

impl DiskCounters {
    /// An operation on the disk's origin is on its way.
    pub(crate) fn note_sent(&mut self, kind: OpKind, len: u64) {
        match kind {
            OpKind::Read => {
                self.origin_reads += 1;
                self.origin_read_bytes += len;
            }
            OpKind::Write => {
                self.origin_writes += 1;
                self.origin_write_bytes += len;
            }
            OpKind::Flush => self.origin_flushes += 1,
            _ => {}
        }
    }
}

/// A mean in which the latest samples count most; 0: none yet.
pub(crate) fn ewma(old: u64, sample: u64) -> u64 {
    if old == 0 {
        sample
    } else {
        (old * 15 + sample) / 16
    }
}

/// A latency histogram in nanoseconds, 1 µs to 1000 s, two significant digits.
#[derive(Clone, Debug, Default)]
pub struct Latency(Counts);

/// Half the RAM, 12 KiB, does for a disk that never answers more than 2^32 requests of a kind, and none
/// for one that nobody has used yet.
#[derive(Clone, Debug, Default)]
enum Counts {
    #[default]
    None,
    Few(Histogram<u32>),
    Many(Histogram<u64>),
}

fn histogram() -> Histogram<u32> {
    let mut h = Histogram::new_with_bounds(1, 1_000_000_000, 2).expect("constant bounds are valid");
    h.auto(false);
    h
}

impl Latency {
    /// Records one sample.
    pub fn record(&mut self, ns: u64) {
        self.record_n(ns, 1);
    }

    fn record_n(&mut self, ns: u64, n: u32) {
        let us = (ns / 1000).max(1);
        if let Counts::Few(few) = &self.0
            && few.len() + u64::from(n) > u64::from(u32::MAX)
        {
            let mut many = Histogram::new_from(few);
            for v in few.iter_recorded() {
                many.saturating_record_n(v.value_iterated_to(), v.count_at_value().into());
            }
            self.0 = Counts::Many(many);
        }
        match &mut self.0 {
            Counts::None => {
                let mut few = histogram();
                few.saturating_record_n(us, n);
                self.0 = Counts::Few(few);
            }
            Counts::Few(few) => few.saturating_record_n(us, n),
            Counts::Many(many) => many.saturating_record_n(us, n.into()),
        }
    }

    /// Takes over all samples of another one.
    pub fn absorb(&mut self, other: &mut Latency) {
        let mut take = |us: u64, mut n: u64| {
            while n > 0 {
                let some = n.min(u64::from(u32::MAX)) as u32;
                self.record_n(us.saturating_mul(1000), some);
                n -= u64::from(some);
            }
        };
        match &mut other.0 {
            Counts::None => {}
            Counts::Few(few) => {
                for v in few.iter_recorded() {
                    take(v.value_iterated_to(), v.count_at_value().into());
                }
                few.reset();
            }
            Counts::Many(many) => {
                for v in many.iter_recorded() {
                    take(v.value_iterated_to(), v.count_at_value());
                }
                many.reset();
            }
        }
    }

    /// The counts in few bytes, to compare with later ones.
    pub fn tally(&self) -> Tally {
        match &self.0 {
            Counts::None => Tally::default(),
            Counts::Few(few) => tally(few),
            Counts::Many(many) => tally(many),
        }
    }

    /// The usual figures.
    pub fn percentiles(&self) -> Percentiles {
        match &self.0 {
            Counts::None => Percentiles::default(),
            Counts::Few(few) => percentiles(few),
            Counts::Many(many) => percentiles(many),
        }
    }
}

fn tally<T: Counter>(h: &Histogram<T>) -> Tally {
    let recorded = h.iter_recorded();
    Tally::of(recorded.map(|v| (v.value_iterated_to(), v.count_since_last_iteration())))
}

fn percentiles<T: Counter>(h: &Histogram<T>) -> Percentiles {
    Percentiles::of(h.len(), h.mean(), h.max() as f64, |share| {
        h.value_at_quantile(share) as f64
    })
}

/// A disk's latencies so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Latencies {
    /// Reads served from flash.
    pub read_hit: Tally,
    /// Reads that needed the origin.
    pub read_miss: Tally,
    /// Writes of blocks that were all cached.
    pub write_hit: Tally,
    /// Other writes.
    pub write_miss: Tally,
}

/// Everything about one disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DiskStats {
    /// Counters since start.
    pub counters: DiskCounters,
    /// Blocks on flash.
    pub cached_blocks: u64,
    /// Of these, blocks the origin does not have yet.
    pub dirty_blocks: u64,
    /// Zeroed blocks the origin does not know of yet.
    pub zero_blocks: u64,
    /// Nanoseconds since the disk last had nothing dirty; 0 if it is clean.
    pub dirty_for_ns: u64,
    /// How long the origin of an ordered disk has lacked something that was flushed.
    pub behind_ns: u64,
    /// Reads served from flash.
    pub read_hit_latency: Percentiles,
    /// Reads that needed the origin.
    pub read_miss_latency: Percentiles,
    /// Writes of blocks that were all cached.
    pub write_hit_latency: Percentiles,
    /// Other writes.
    pub write_miss_latency: Percentiles,
}

impl DiskStats {
    /// Bytes the origin does not have yet, zeroed ones included.
    pub fn owed_bytes(&self) -> u64 {
        (self.dirty_blocks + self.zero_blocks).saturating_mul(hearth_io::BLOCK)
    }
}

/// What was done on one flash device, and how it does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceFigures {
    /// Reads since the start.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Time they took together, nanoseconds.
    pub read_ns: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Time they took together, nanoseconds.
    pub write_ns: u64,
    /// Flushes.
    pub flushes: u64,
    /// Time they took together, nanoseconds.
    pub flush_ns: u64,
    /// Operations that failed.
    pub errors: u64,
}

/// What lies on one flash device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceStats {
    /// What was done on it.
    pub figures: DeviceFigures,
    /// Segments it has.
    pub segments: u64,
    /// Of these, free ones.
    pub free_segments: u64,
    /// Blocks cached on it. What is there twice counts on both devices; but what was dirty, and is clean since, on that one alone from which it is
    /// read, where clean blocks are there once.
    pub cached_blocks: u64,
    /// Of these, dirty ones.
    pub dirty_blocks: u64,
    /// It answers so slowly that it is left alone, as far as there is room on others.
    pub slow: bool,
    /// It is lost, and the others have everything that was on it.
    #[serde(default)]
    pub lost: bool,
}

/// Everything about the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PoolStats {
    /// Counters since start.
    pub counters: PoolCounters,
    /// Blocks of flash usable for data.
    pub capacity_blocks: u64,
    /// The same for data of which all is dirty, or lives on flash.
    pub dirty_capacity_blocks: u64,
    /// Blocks of flash that are set aside for something beside the log.
    pub set_aside_blocks: u64,
    /// Blocks cached.
    pub cached_blocks: u64,
    /// Dirty blocks.
    pub dirty_blocks: u64,
    /// Segments free to write.
    pub free_segments: u64,
    /// Segments there are.
    pub segments: u64,
    /// Bytes of RAM for index, policy and RAM stage.
    pub footprint_bytes: u64,
    /// Blocks in the RAM stage.
    pub stage_blocks: u64,
    /// Blocks it has room for now: what pays.
    pub stage_capacity_blocks: u64,
    /// Blocks it may have room for at most.
    pub stage_most_blocks: u64,
    /// Must what was read have been missed more often than what it displaces on flash?
    pub gate: bool,
    /// How often that was changed.
    pub rule_switches: u64,
    /// How much of the endurance budget is used up, in 256ths: fewer fills as it grows, none at
    /// 256. 0 without a budget.
    pub endurance_pressure: u32,
    /// Bytes a second that may be written to flash in the long run, and how many may be now; none without a budget.
    #[serde(default)]
    pub endurance: Option<(u64, i64)>,
    /// 0 healthy, 1 failed.
    pub flash_failed: bool,
    /// Why, if so.
    pub flash_fault: Option<FlashFault>,
    /// Flash took no note of that: unless it is noted elsewhere, a start after a crash would believe what
    /// is old on it.
    pub flash_unnoted: bool,
    /// Mean flash read latency lately, nanoseconds.
    pub flash_read_ns: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_are_counted_beyond_32_bits() {
        let mut latency = Latency::default();
        assert_eq!(latency.percentiles(), percentiles(&histogram()));
        assert_eq!(latency.tally(), tally(&histogram()));
        latency.record(7_000_000);
        for _ in 0..3 {
            latency.record_n(5_000, u32::MAX);
        }
        let (all, tally) = (latency.percentiles(), latency.tally());
        assert_eq!(all.count, 3 * u64::from(u32::MAX) + 1);
        assert_eq!((all.p50_us, all.p999_us), (5.0, 5.0));
        assert!((7_000.0..7_100.0).contains(&all.max_us), "{all:?}");
        assert_eq!(tally.percentiles().count, all.count);
        latency.record(5_000);
        assert_eq!(latency.tally().since(&tally).percentiles().count, 1);
    }
}
