//! Advice from live curves, and shares of flash that follow it.
//!
//! The pure part is `hearth_policy::advise`; here its inputs come together (a disk's curve, its
//! measured latencies, its settings) and its division of the pool is turned into flash kept for
//! disks. What is kept is a floor, not a ceiling: flash another disk does not use is not wasted.

use std::sync::atomic::Ordering;

use hearth_engine::ControlError;
use hearth_format::DiskRecord;
use hearth_io::BLOCK;
use hearth_observe::{Counted, Curve};
use hearth_policy::advise::{self, Demand, Share};

use super::{Daemon, Phase, Slot, control_error, lock};
use crate::api::advice::{Advice, AdviceReport, Applied, CurvePoint, Expected, Suggestion};
use crate::api::stats::Counters;
use crate::api::types::CacheMode;
use crate::error::{Error, Result};
use crate::pool::mode_of;
use crate::size::human;

/// Seconds between two looks at the shares of disks that follow the advice: often enough for a
/// working day's changes, seldom enough that every division is over many requests.
pub(super) const AUTO_SECONDS: u64 = 600;
/// Part of its division that is kept for a disk. The rest of the flash stays everybody's:
/// eviction needs blocks it may drop, or it would only move what is kept around.
const KEPT: f64 = 0.75;
/// Changes below this part of a share are not worth disturbing anything.
const CHANGE_MIN: f64 = 0.05;
/// Blocks read before there is advice.
const READS_MIN: f64 = 2000.0;
/// A step of flash, blocks: 1 GiB.
const STEP: f64 = (1 << 30) as f64 / BLOCK as f64;
/// More hits such a step has to bring to pay: one point.
const GAIN: f64 = 0.01;
/// Points of a curve reported.
const POINTS_MAX: usize = 200;
/// Latencies while nothing is measured, microseconds: an SSD's, a hard disk's.
const HIT_US: f64 = 100.0;
const MISS_US: f64 = 8000.0;
/// Share of writes below which write-back has little to win.
const FEW_WRITES: f64 = 0.1;
/// Best possible hit ratio below which reads have little to win.
const FEW_HITS: f64 = 0.05;

fn blocks(bytes: u64) -> f64 {
    bytes as f64 / BLOCK as f64
}

fn bytes(blocks: f64) -> u64 {
    (blocks.max(0.0).round() as u64).saturating_mul(BLOCK)
}

/// What is known of one disk.
struct Known {
    name: String,
    record: DiskRecord,
    attached: bool,
    cached: u64,
    hit_us: Option<f64>,
    miss_us: Option<f64>,
    measured: Option<f64>,
    curve: Option<Curve>,
    counted: Option<Counted>,
}

impl Known {
    fn enough(&self) -> Option<&Curve> {
        self.curve
            .as_ref()
            .filter(|c| self.attached && c.accesses >= READS_MIN)
    }

    fn max_blocks(&self) -> f64 {
        if self.record.max_bytes == 0 {
            f64::INFINITY
        } else {
            blocks(self.record.max_bytes)
        }
    }

    fn demand(&self, hit_us: f64, miss_us: f64) -> Demand {
        let curve = self.enough();
        Demand {
            name: self.name.clone(),
            curve: curve.map_or(Vec::new(), |c| c.points.clone()),
            rate: curve.map_or(0.0, |c| c.rate),
            hit_us,
            miss_us,
            min: blocks(self.record.min_bytes),
            max: self.max_blocks(),
        }
    }

    fn block_size(&self) -> Option<Suggestion<u64>> {
        let counted = self.counted.as_ref()?;
        let advised = advise::block_size(&counted.histograms.read_octaves)?;
        let now = match self.record.block_size {
            0 => BLOCK,
            n => u64::from(n),
        };
        Some(Suggestion {
            now,
            advised,
            because: if advised == BLOCK {
                "more than a quarter of the reads are shorter than 8 KiB: longer fills would bring in what nobody asked for".to_owned()
            } else {
                format!(
                    "three of four reads are {} or longer: one fill serves each",
                    human(advised)
                )
            },
        })
    }

    fn mode(&self, best: f64) -> Option<Suggestion<CacheMode>> {
        let counted = self.counted.as_ref()?;
        let length = &counted.histograms.length;
        let all = length.all.count();
        if all == 0 {
            return None;
        }
        let writes = length.writes.count() as f64 / all as f64;
        let now = mode_of(self.record.mode);
        let (advised, because) = if writes >= FEW_WRITES && !self.record.read_only {
            (
                CacheMode::WriteBack,
                format!(
                    "{:.0} % of the requests are writes, which then end on flash; choose write-through if a broken flash device must not cost the newest of them",
                    writes * 100.0
                ),
            )
        } else if best < FEW_HITS {
            (
                CacheMode::Off,
                format!(
                    "hardly anything is written, and only {:.1} % of what is read was read before: no cache of any size helps",
                    best * 100.0
                ),
            )
        } else {
            (
                CacheMode::WriteThrough,
                format!(
                    "only {:.1} % of the requests are writes: the origin can have each of them at once",
                    writes * 100.0
                ),
            )
        };
        Some(Suggestion {
            now,
            advised,
            because,
        })
    }
}

/// At most so many points of a curve, the last one among them.
fn thin(points: &[(f64, f64)]) -> Vec<CurvePoint> {
    let step = points.len().div_ceil(POINTS_MAX - 1).max(1);
    let last = points.len().saturating_sub(1);
    points
        .iter()
        .enumerate()
        .filter(|(i, _)| i % step == 0 || *i == last)
        .map(|(_, p)| CurvePoint {
            bytes: bytes(p.0),
            hit_ratio: p.1,
        })
        .collect()
}

impl Daemon {
    fn known(&self) -> Vec<Known> {
        let now = self.now_s();
        let disks = lock(&self.disks);
        let pool = lock(&self.pool);
        let flash_us = Some(self.engine.pool_stats().flash_read_ns)
            .filter(|ns| *ns > 0)
            .map(|ns| ns as f64 / 1000.0);
        let list: Vec<(u16, Known)> = disks
            .iter()
            .filter_map(|(name, slot)| {
                let record = pool.record(slot.id)?.clone();
                let stats = self
                    .engine
                    .stats(slot.id, hearth_io::now_ns())
                    .unwrap_or_default();
                let hit = stats.read_hit_latency;
                let miss = stats.read_miss_latency;
                let counters = Counters::from(&stats.counters);
                let hour = slot.windows.values(now, &counters);
                let measured = hour
                    .iter()
                    .find(|w| w.span.name == "1h")
                    .and_then(|w| w.value.ratios(&counters).read_hit_ratio_bytes);
                let known = Known {
                    name: name.clone(),
                    record,
                    attached: matches!(slot.phase, Phase::Attached(_)),
                    cached: stats.cached_blocks,
                    hit_us: (hit.count > 0).then_some(hit.mean_us).or(flash_us),
                    miss_us: (miss.count > 0).then_some(miss.mean_us),
                    measured,
                    curve: None,
                    counted: None,
                };
                Some((slot.id, known))
            })
            .collect();
        // Curves take longer than anybody should wait for these locks.
        drop(pool);
        drop(disks);
        list.into_iter()
            .map(|(id, mut known)| {
                known.curve = self.observer.curve(id);
                known.counted = self.observer.histograms(id, false);
                known
            })
            .collect()
    }

    /// Advice for one disk or all; the division is over all in any case.
    pub(super) fn advise(&self, only: Option<&str>) -> Result<AdviceReport> {
        let all = self.known();
        if let Some(name) = only
            && !all.iter().any(|k| k.name == name)
        {
            return Err(Error::no_disk(name));
        }
        let mean = |of: fn(&Known) -> Option<f64>, guess: f64| {
            let (sum, n) = all
                .iter()
                .filter_map(of)
                .fold((0.0, 0.0), |(sum, n), us| (sum + us, n + 1.0));
            if n > 0.0 { sum / n } else { guess }
        };
        let (hit_us, miss_us) = (mean(|k| k.hit_us, HIT_US), mean(|k| k.miss_us, MISS_US));
        let capacity = lock(&self.pool).capacity();
        let demands: Vec<Demand> = all
            .iter()
            .map(|k| k.demand(k.hit_us.unwrap_or(hit_us), k.miss_us.unwrap_or(miss_us)))
            .collect();
        let shares = advise::divide(&demands, blocks(capacity));
        let given: f64 = shares.iter().map(|s| s.blocks).sum();
        let disks = all
            .iter()
            .zip(demands.iter().zip(&shares))
            .filter(|(k, _)| only.is_none_or(|name| k.name == name))
            .map(|(k, (demand, share))| advice(k, demand, share))
            .collect();
        Ok(AdviceReport {
            capacity,
            left_over: bytes(blocks(capacity) - given),
            disks,
            applied: Vec::new(),
        })
    }

    /// Keeps for one disk, or all, what the division gives it.
    pub(super) fn apply_shares(&self, only: Option<&str>) -> Result<AdviceReport> {
        let mut report = self.advise(only)?;
        for advice in report.disks.iter().filter(|a| a.reason.is_none()) {
            let kept = (advice.share.bytes as f64 * KEPT) as u64;
            {
                let mut disks = lock(&self.disks);
                // It may have gone meanwhile.
                let Some(slot) = disks.get_mut(&advice.name) else {
                    continue;
                };
                slot.share = Some(kept / BLOCK * BLOCK);
            }
            self.keep_share(&advice.name)
                .map_err(|e| control_error(&format!("apply advice to {}", advice.name), e))?;
            report.applied.push(Applied {
                name: advice.name.clone(),
                kept: kept / BLOCK * BLOCK,
            });
            tracing::info!(disk = %advice.name, kept, "flash kept as advised");
        }
        Ok(report)
    }

    /// Tells the engine what a disk keeps: what its owner set, or more if so advised.
    pub(super) fn keep_share(&self, name: &str) -> std::result::Result<(), ControlError> {
        let disks = lock(&self.disks);
        let pool = lock(&self.pool);
        let Some(slot) = disks.get(name) else {
            return Err(ControlError::NoDisk);
        };
        let Some(record) = pool.record(slot.id) else {
            return Err(ControlError::NoDisk);
        };
        let kept = floor(slot, record);
        self.engine.set_limits(slot.id, kept, record.max_bytes)
    }

    /// Renews the shares of disks that follow the advice, every few minutes.
    pub(super) fn auto_round(&self) {
        let now = self.now_s();
        if now < self.auto_due.load(Ordering::Relaxed) {
            return;
        }
        self.auto_due.store(now + AUTO_SECONDS, Ordering::Relaxed);
        let auto: Vec<(String, Option<u64>)> = {
            let disks = lock(&self.disks);
            let pool = lock(&self.pool);
            disks
                .iter()
                .filter(|(_, slot)| pool.record(slot.id).is_some_and(|r| r.auto))
                .map(|(name, slot)| (name.clone(), slot.share))
                .collect()
        };
        if auto.is_empty() {
            return;
        }
        let Ok(report) = self.advise(None) else {
            return;
        };
        for (name, share) in auto {
            let Some(advice) = report
                .disks
                .iter()
                .find(|a| a.name == name && a.reason.is_none())
            else {
                continue;
            };
            let want = advice.share.bytes as f64 * KEPT;
            let have = share.unwrap_or(0) as f64;
            if (want - have).abs() <= have * CHANGE_MIN {
                continue;
            }
            if let Some(slot) = lock(&self.disks).get_mut(&name) {
                slot.share = Some(want as u64 / BLOCK * BLOCK);
            }
            match self.keep_share(&name) {
                Ok(()) => {
                    tracing::info!(disk = %name, kept = want as u64, "flash kept follows the advice")
                }
                Err(e) => tracing::debug!(disk = %name, "its share stays as it is: {e}"),
            }
        }
    }
}

/// Bytes kept for a disk.
fn floor(slot: &Slot, record: &DiskRecord) -> u64 {
    let most = if record.max_bytes == 0 {
        u64::MAX
    } else {
        record.max_bytes
    };
    slot.share.unwrap_or(0).min(most).max(record.min_bytes)
}

fn advice(known: &Known, demand: &Demand, share: &Share) -> Advice {
    let mut advice = Advice {
        name: known.name.clone(),
        measured_hit_ratio: known.measured,
        hit_us: demand.hit_us,
        miss_us: demand.miss_us,
        latency_guessed: known.hit_us.is_none() || known.miss_us.is_none(),
        ..Advice::default()
    };
    let Some(curve) = known.enough() else {
        let read = known.curve.as_ref().map_or(0.0, |c| c.accesses);
        advice.reason = Some(if known.attached {
            format!(
                "only {} read so far; there is advice from {} on",
                human(bytes(read)),
                human(bytes(READS_MIN))
            )
        } else {
            "the disk is not attached".to_owned()
        });
        return advice;
    };
    let expected = |size: f64| Expected {
        bytes: bytes(size),
        hit_ratio: advise::at(&curve.points, size),
        latency_us: advise::latency(demand, size),
    };
    let best = curve.points.last().map_or(0.0, |p| p.1);
    advice.seconds = curve.seconds;
    advice.bytes_per_second = curve.rate * BLOCK as f64;
    advice.working_set = bytes(curve.working_set);
    advice.present = expected(known.cached as f64);
    advice.advised = expected(advise::pays(&curve.points, STEP, GAIN).0);
    advice.knee = advise::knee(&curve.points).map(|p| expected(p.0));
    advice.share = expected(share.blocks);
    advice.block_size = known.block_size();
    advice.mode = known.mode(best);
    advice.curve = thin(&curve.points);
    advice
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_curves_are_thinned_with_their_end() {
        let points: Vec<(f64, f64)> = (1..=4000)
            .map(|i| (f64::from(i), f64::from(i) / 4000.0))
            .collect();
        let thin = thin(&points);
        assert!(thin.len() <= POINTS_MAX);
        assert_eq!(thin.last().map(|p| p.hit_ratio), Some(1.0));
        assert!(super::thin(&[]).is_empty());
    }

    #[test]
    fn what_is_kept_stays_within_the_owners_limits() {
        let mut slot = Slot::new(1, Phase::Waiting(Error::internal("test")), 0);
        let mut record = DiskRecord {
            min_bytes: 10,
            max_bytes: 100,
            ..DiskRecord::default()
        };
        for (share, want) in [(None, 10), (Some(5), 10), (Some(50), 50), (Some(500), 100)] {
            slot.share = share;
            assert_eq!(floor(&slot, &record), want);
        }
        record.max_bytes = 0;
        assert_eq!(floor(&slot, &record), 500);
    }
}
