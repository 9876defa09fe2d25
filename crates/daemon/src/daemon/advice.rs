//! Advice from live curves, and shares of flash that follow it.
//!
//! The pure part is `hearth_policy::advise`; here its inputs come together (a disk's curve, its
//! measured latencies, its settings) and its division of the pool is turned into flash kept for
//! disks. What is kept is a floor, not a ceiling: flash another disk does not use is not wasted.

use std::sync::atomic::Ordering;

use hearth_engine::ControlError;
use hearth_engine::api::DiskId;
use hearth_engine::stats::{DiskCounters, PoolCounters};
use hearth_format::DiskRecord;
use hearth_io::BLOCK;
use hearth_observe::Curve;
use hearth_policy::advise::{self, Demand, Share};
use hearth_policy::histogram::Mix;
use hearth_policy::ladder;

use super::{Daemon, control_error, lock};
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
/// Requests before there is advice on a disk's mode, and reads before there is on its block size.
const REQUESTS_MIN: u64 = 1000;
/// A share without advice to support it is halved at each look, and gone below this: 64 MiB.
const SHARE_MIN: u64 = 64 << 20;
/// A step of flash, blocks: 1 GiB.
const STEP: f64 = (1 << 30) as f64 / BLOCK as f64;
/// More hits such a step has to bring to pay: one point.
const GAIN: f64 = 0.01;
/// Points of a curve reported.
const POINTS_MAX: usize = 200;
/// Latencies while nothing is measured, microseconds: an SSD's, a hard disk's.
const HIT_US: f64 = 100.0;
const MISS_US: f64 = 8000.0;
/// An origin whose reads take no longer than so many times those of flash is as fast.
const AS_FAST: f64 = 1.1;
/// Share of writes below which write-back has little to win.
const FEW_WRITES: f64 = 0.1;
/// Best possible hit ratio below which reads have little to win.
const FEW_HITS: f64 = 0.05;

/// A disk, the bytes kept for it, and what the engine says to that.
type Kept = (String, u64, std::result::Result<(), ControlError>);

fn blocks(bytes: u64) -> f64 {
    bytes as f64 / BLOCK as f64
}

fn bytes(blocks: f64) -> u64 {
    (blocks.max(0.0).round() as u64).saturating_mul(BLOCK)
}

/// Whose advice is wanted.
#[derive(Clone, Copy)]
enum Asked<'a> {
    All,
    Disk(&'a str),
    Store(&'a str),
}

/// What is known of one disk.
struct Known {
    name: String,
    /// A datastore's file, called as the datastore and the path in it.
    file: bool,
    record: DiskRecord,
    attached: bool,
    cached: u64,
    hit_us: Option<f64>,
    miss_us: Option<f64>,
    /// The pool's mean read of flash: what a hit takes where none was measured.
    flash_us: Option<f64>,
    measured: Option<f64>,
    /// Bytes written to flash for each that the guest wrote.
    flash_writes: Option<f64>,
    curve: Option<Curve>,
    mix: Option<Mix>,
}

impl Known {
    fn enough(&self) -> Option<&Curve> {
        self.curve
            .as_ref()
            .filter(|c| self.attached && c.is_enough())
    }

    /// Microseconds of a hit, as far as anything was measured.
    fn hit(&self) -> Option<f64> {
        self.hit_us.or(self.flash_us)
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
            min: blocks(self.record.kept_bytes()),
            max: self.max_blocks(),
        }
    }

    fn block_size(&self) -> Option<Suggestion<u64>> {
        let mix = self.mix.as_ref().filter(|m| m.reads >= REQUESTS_MIN)?;
        let advised = advise::block_size(&mix.read_octaves)?;
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
        let mix = self.mix.as_ref().filter(|m| m.count() >= REQUESTS_MIN)?;
        let writes = mix.writes as f64 / mix.count() as f64;
        let now = match mode_of(self.record.mode) {
            // In which order it reaches the origin says nothing about what is cached.
            CacheMode::WriteBackOrdered => CacheMode::WriteBack,
            mode => mode,
        };
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

/// Bytes written to flash for each byte of data among them: descriptors and summaries are the difference.
fn log_share(pool: &PoolCounters) -> f64 {
    let data = pool.flash_payload_bytes + pool.flash_reinsert_bytes;
    if data == 0 {
        return 1.0;
    }
    (pool.flash_write_bytes as f64 / data as f64).max(1.0)
}

/// Bytes written to flash on behalf of a disk for each that its guest wrote; `None` if there were none, or not all
/// of them go to flash: then nothing counts those that do.
fn flash_writes(disk: &DiskCounters, mode: CacheMode, log_share: f64) -> Option<f64> {
    if !hearth_engine::api::Mode::from(mode).is_write_back() || disk.write_bytes == 0 {
        return None;
    }
    let data = disk.write_bytes + (disk.fills + disk.reinsertions) * BLOCK;
    Some(data as f64 * log_share / disk.write_bytes as f64)
}

/// What a written block costs at a size; `None` far beyond the largest miniature that was ever full: what comes
/// when such a cache is, nobody has seen.
fn cost_at(costs: &[(f64, f64)], size: f64) -> Option<f64> {
    let largest = costs.last()?.0;
    (size <= largest * 2.0).then(|| ladder::between(costs, size))
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
        let files = self.watched_files();
        let disks = self.disks.lock();
        let pool = lock(&self.pool);
        let flash = self.engine.pool_stats();
        let log_share = log_share(&flash.counters);
        let flash_us = Some(flash.flash_read_ns)
            .filter(|ns| *ns > 0)
            .map(|ns| ns as f64 / 1000.0);
        let of = |id: DiskId, name: String, file: bool, attached: bool| {
            let record = pool.record(id)?.clone();
            let stats = self.engine.stats(id, hearth_io::now_ns());
            let stats = stats.unwrap_or_default();
            let record_mode = record.mode;
            let hit = stats.read_hit_latency;
            let miss = stats.read_miss_latency;
            let counters = Counters::from(&stats.counters);
            let known = Known {
                name,
                file,
                record,
                attached,
                cached: stats.cached_blocks,
                hit_us: (hit.count > 0).then_some(hit.mean_us),
                miss_us: (miss.count > 0).then_some(miss.mean_us),
                flash_us,
                measured: counters.ratios(&counters).read_hit_ratio_bytes,
                flash_writes: flash_writes(&stats.counters, mode_of(record_mode), log_share),
                curve: None,
                mix: None,
            };
            Some((id, known, counters))
        };
        let of_disks = disks.iter().filter_map(|(name, slot)| {
            let attached = slot.life.is_served();
            let (id, mut known, counters) = of(slot.id, name.to_owned(), false, attached)?;
            let hour = slot.session.windows.values(now, &counters);
            known.measured = hour
                .iter()
                .find(|w| w.span.name == "1h")
                .and_then(|w| w.value.ratios(&counters).read_hit_ratio_bytes);
            Some((id, known))
        });
        let mut list: Vec<(u16, Known)> = of_disks.collect();
        // One that rests is looked at as it was used.
        let of_files = files.into_iter().filter_map(|(id, name)| {
            let (id, known, _) = of(id, name, true, true)?;
            Some((id, known)).filter(|(_, known)| !known.record.is_flash_only())
        });
        list.extend(of_files);
        // Curves take longer than anybody should wait for these locks.
        drop(pool);
        drop(disks);
        list.into_iter()
            .map(|(id, mut known)| {
                known.curve = self.observer.curve(id);
                known.mix = self.observer.mix(id);
                known
            })
            .collect()
    }

    /// Advice for one disk or all, files of datastores among them; the division is over all in any case.
    pub(super) fn advise(&self, only: Option<&str>) -> Result<AdviceReport> {
        self.advise_of(only.map_or(Asked::All, Asked::Disk))
    }

    /// Advice for the files of a datastore that are watched.
    pub(super) fn advise_files(&self, store: &str) -> Result<AdviceReport> {
        self.datastore_info(store)?;
        self.advise_of(Asked::Store(store))
    }

    fn advise_of(&self, asked: Asked<'_>) -> Result<AdviceReport> {
        let all = self.known();
        if let Asked::Disk(name) = asked
            && !all.iter().any(|k| !k.file && k.name == name)
        {
            return Err(Error::no_disk(name));
        }
        let wanted = |k: &Known| match asked {
            Asked::All => true,
            Asked::Disk(name) => !k.file && k.name == name,
            Asked::Store(name) => k.file && k.record.datastore == name,
        };
        let mean = |of: fn(&Known) -> Option<f64>, guess: f64| {
            let (sum, n) = all
                .iter()
                .filter_map(of)
                .fold((0.0, 0.0), |(sum, n), us| (sum + us, n + 1.0));
            if n > 0.0 { sum / n } else { guess }
        };
        let (hit_us, miss_us) = (mean(Known::hit, HIT_US), mean(|k| k.miss_us, MISS_US));
        let capacity = self.engine.pool_stats().capacity_blocks * BLOCK;
        let demands: Vec<Demand> = all
            .iter()
            .map(|k| k.demand(k.hit().unwrap_or(hit_us), k.miss_us.unwrap_or(miss_us)))
            .collect();
        let shares = advise::divide(&demands, blocks(capacity));
        let given: f64 = shares.iter().map(|s| s.blocks).sum();
        let of = |files: bool| {
            let some = all.iter().zip(demands.iter().zip(&shares));
            some.filter(|(k, _)| k.file == files && wanted(k))
                .map(|(k, (demand, share))| advice(k, demand, share))
                .collect()
        };
        Ok(AdviceReport {
            capacity,
            left_over: bytes(blocks(capacity) - given),
            disks: of(false),
            files: of(true),
            applied: Vec::new(),
        })
    }

    /// Keeps for one disk, or all, what the division gives it. Together they get no more than may
    /// be kept, so one disk's share may lower others'.
    pub(super) fn apply_shares(&self, only: Option<&str>) -> Result<AdviceReport> {
        let mut report = self.advise(only)?;
        {
            let mut disks = self.disks.lock();
            for advice in &report.disks {
                // It may have gone meanwhile.
                if let Some(slot) = disks.get_mut(&advice.name) {
                    slot.session.share = match &advice.reason {
                        None => Some(part_kept(advice)),
                        Some(_) => slot.session.share.and_then(faded),
                    };
                    if slot.session.share.is_some() {
                        lock(&self.sharing).insert(slot.id);
                    }
                }
            }
        }
        let kept = self.keep_shares();
        for advice in report.disks.iter().filter(|a| a.reason.is_none()) {
            match kept.iter().find(|(name, _, _)| *name == advice.name) {
                None => {}
                Some((name, _, Err(e))) => {
                    return Err(control_error(&format!("apply advice to {name}"), *e));
                }
                Some((name, bytes, Ok(()))) => {
                    self.events.tell(hearth_events::Event::ShareChanged {
                        disk: name.clone(),
                        bytes: *bytes,
                    });
                    report.applied.push(Applied {
                        name: name.clone(),
                        kept: *bytes,
                    });
                }
            }
        }
        Ok(report)
    }

    /// Flash may have to be kept for a disk.
    pub(super) fn note_share(&self, record: &DiskRecord) {
        if record.kept_bytes() > 0 {
            lock(&self.sharing).insert(record.id);
        }
    }

    /// Tells the engine what disks keep: what their owners set, or more if so advised, as far as
    /// there is flash for all. What was told to it, by disk.
    ///
    /// Those that keep nothing and never did have nothing to be told: what may be kept of flash is divided
    /// among the others alone, however many there are.
    pub(super) fn keep_shares(&self) -> Vec<Kept> {
        self.keep_shares_of(None)
    }

    fn keep_shares_of(&self, also: Option<DiskId>) -> Vec<Kept> {
        let mut disks = self.disks.lock();
        let mut sharing = lock(&self.sharing);
        sharing.extend(also);
        if sharing.is_empty() {
            return Vec::new();
        }
        let pool = lock(&self.pool);
        sharing.retain(|id| disks.contains(*id) && pool.record(*id).is_some());
        let (mut known, mut wishes) = (Vec::new(), Vec::new());
        for id in sharing.iter() {
            if let (Some(slot), Some(record)) = (disks.by_id(*id), pool.record(*id)) {
                known.push((*id, slot.session.kept, record.max_bytes));
                wishes.push(Wish::of(slot.session.share, record));
            }
        }
        let limit = (pool.log_bytes() as f64 * KEPT) as u64;
        let mut all: Vec<_> = known.into_iter().zip(floors(&wishes, limit)).collect();
        // What is lowered goes first, so that the sum is never too large on the way.
        all.sort_by_key(|((_, kept, _), floor)| floor > kept);
        let told = all.into_iter().filter_map(|((id, _, max), floor)| {
            let slot = disks.by_id_mut(id)?;
            let told = self.engine.set_limits(id, floor, max);
            if told.is_ok() {
                slot.session.kept = floor;
            }
            if floor == 0 && slot.session.kept == 0 && slot.session.share.is_none() {
                sharing.remove(&id);
            }
            Some((slot.name.clone(), floor, told))
        });
        told.collect()
    }

    /// Tells the engine what disks keep; an error is that of one disk.
    pub(super) fn keep_share(&self, name: &str) -> std::result::Result<(), ControlError> {
        let id = self.disks.lock().get(name).map(|slot| slot.id);
        self.keep_shares_of(Some(id.ok_or(ControlError::NoDisk)?))
            .into_iter()
            .find(|(told, _, _)| told == name)
            .map_or(Err(ControlError::NoDisk), |(_, _, told)| told)
    }

    /// Renews the shares of disks that follow the advice, every few minutes.
    pub(super) fn auto_round(&self) {
        let now = self.now_s();
        if now < self.auto_due.load(Ordering::Relaxed) {
            return;
        }
        self.auto_due.store(now + AUTO_SECONDS, Ordering::Relaxed);
        let any = {
            let pool = lock(&self.pool);
            pool.registry().disks.iter().any(|r| r.auto)
        };
        if !any {
            return;
        }
        let Ok(report) = self.advise(None) else {
            return;
        };
        let changed = {
            let mut disks = self.disks.lock();
            let pool = lock(&self.pool);
            let mut changed = false;
            for advice in &report.disks {
                let Some(slot) = disks.get_mut(&advice.name) else {
                    continue;
                };
                if !pool.record(slot.id).is_some_and(|r| r.auto) {
                    continue;
                }
                let share = if advice.reason.is_none() {
                    let (want, have) = (part_kept(advice), slot.session.share.unwrap_or(0));
                    if want.abs_diff(have) as f64 <= have as f64 * CHANGE_MIN {
                        continue;
                    }
                    Some(want)
                } else {
                    slot.session.share.and_then(faded)
                };
                if slot.session.share != share {
                    tracing::info!(disk = %advice.name, share, "the share of flash follows the advice");
                    slot.session.share = share;
                    lock(&self.sharing).insert(slot.id);
                    changed = true;
                }
            }
            changed
        };
        if !changed {
            return;
        }
        for (name, _, told) in self.keep_shares() {
            if let Err(e) = told {
                tracing::debug!(disk = %name, "its share stays as it is: {e}");
            }
        }
    }
}

/// What is kept of a division's part.
fn part_kept(advice: &Advice) -> u64 {
    (advice.share.bytes as f64 * KEPT) as u64 / BLOCK * BLOCK
}

/// A share that no advice supports any more, at the next look.
fn faded(share: u64) -> Option<u64> {
    Some(share / 2 / BLOCK * BLOCK).filter(|left| *left >= SHARE_MIN)
}

/// What one disk should keep.
struct Wish {
    /// Its owner's, in any case.
    min: u64,
    /// Beyond that, if there is room: as advised.
    more: u64,
}

impl Wish {
    fn of(share: Option<u64>, record: &DiskRecord) -> Wish {
        let most = if record.max_bytes == 0 {
            u64::MAX
        } else {
            record.max_bytes
        };
        Wish {
            min: record.kept_bytes(),
            more: share
                .unwrap_or(0)
                .min(most)
                .saturating_sub(record.kept_bytes()),
        }
    }
}

/// Bytes kept for each disk. What owners set is kept whole; what is advised is scaled so that all
/// together is at most `limit`: with all flash kept, eviction would find nothing to drop.
fn floors(wishes: &[Wish], limit: u64) -> Vec<u64> {
    let sum = |of: fn(&Wish) -> u64| wishes.iter().map(of).fold(0, u64::saturating_add);
    let room = limit.saturating_sub(sum(|w| w.min));
    let scale = (room as f64 / sum(|w| w.more).max(1) as f64).min(1.0);
    wishes
        .iter()
        .map(|w| w.min + (w.more as f64 * scale) as u64 / BLOCK * BLOCK)
        .collect()
}

fn advice(known: &Known, demand: &Demand, share: &Share) -> Advice {
    let mut advice = Advice {
        name: known.name.clone(),
        measured_hit_ratio: known.measured,
        measured_flash_writes: known.flash_writes,
        hit_us: demand.hit_us,
        miss_us: demand.miss_us,
        latency_guessed: known.hit_us.is_none() || known.miss_us.is_none(),
        ..Advice::default()
    };
    let Some(curve) = known.enough() else {
        let read = known.curve.as_ref().map_or(0.0, |c| c.accesses);
        advice.reason = Some(if known.attached {
            format!(
                "only {} read lately (older reads count less), {:.0} blocks of it sampled; there is advice from {} and {:.0} sampled on",
                human(bytes(read)),
                known.curve.as_ref().map_or(0.0, |c| c.sample_reads),
                human(bytes(Curve::READS_MIN)),
                Curve::SAMPLE_READS_MIN
            )
        } else {
            "the disk is not attached".to_owned()
        });
        return advice;
    };
    let expected = |size: f64| Expected {
        bytes: bytes(size),
        hit_ratio: advise::at(&curve.points, size),
        lru_hit_ratio: advise::at(&curve.lru, size),
        flash_writes: cost_at(&curve.flash_writes, size),
        latency_us: advise::latency(demand, size),
    };
    let best = curve.points.last().map_or(0.0, |p| p.1);
    advice.own_rules = curve.own;
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
    if !advice.latency_guessed && demand.miss_us <= demand.hit_us * AS_FAST {
        // One answer: hits that save no time are no reason for flash, however many there would be.
        advice.advised = expected(0.0);
        advice.share = expected(0.0);
        advice.knee = None;
        advice.block_size = None;
        advice.mode = Some(Suggestion {
            now: mode_of(known.record.mode),
            advised: CacheMode::Off,
            because: format!(
                "the origin is as fast as the flash (it takes {:.0} µs for a read, flash {:.0} µs), so \
                 flash saves this disk no time",
                demand.miss_us, demand.hit_us
            ),
        });
    }
    advice
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_as_fast_as_flash_gets_one_answer() {
        let curve = Curve {
            points: (1..=2000)
                .map(|i| (f64::from(i) * 1000.0, f64::from(i) / 2000.0))
                .collect(),
            working_set: 2e6,
            accesses: 1e9,
            rate: 1000.0,
            seconds: 3600.0,
            sampled: 1.0,
            sample_blocks: 2000.0,
            sample_reads: 1e6,
            ..Curve::default()
        };
        let known = |miss_us: f64| Known {
            name: "d".to_owned(),
            file: false,
            record: DiskRecord::default(),
            attached: true,
            cached: 0,
            hit_us: Some(100.0),
            miss_us: Some(miss_us),
            flash_us: None,
            measured: None,
            flash_writes: None,
            curve: Some(curve.clone()),
            mix: None,
        };
        let advised = |miss_us: f64| {
            let known = known(miss_us);
            let demand = known.demand(100.0, miss_us);
            let share = Share {
                blocks: 5000.0,
                ..advise::divide(std::slice::from_ref(&demand), 1e6).remove(0)
            };
            advice(&known, &demand, &share)
        };
        let fast = advised(95.0);
        assert_eq!((fast.advised.bytes, fast.share.bytes), (0, 0));
        assert_eq!((fast.knee, fast.block_size), (None, None));
        let mode = fast.mode.unwrap();
        assert_eq!(mode.advised, CacheMode::Off);
        assert!(mode.because.contains("as fast as the flash"), "{mode:?}");
        let slow = advised(5000.0);
        assert!(slow.advised.bytes > 0 && slow.share.bytes > 0);
    }

    #[test]
    fn what_writes_cost_is_what_was_written_to_flash_for_them() {
        let disk = DiskCounters {
            write_bytes: 100 * BLOCK,
            fills: 30,
            reinsertions: 20,
            ..DiskCounters::default()
        };
        let pool = PoolCounters {
            flash_payload_bytes: 900,
            flash_reinsert_bytes: 100,
            flash_write_bytes: 1100,
            ..PoolCounters::default()
        };
        let share = log_share(&pool);
        let cost = |mode| flash_writes(&disk, mode, share).map(|c| (c * 1000.0).round());
        assert_eq!(cost(CacheMode::WriteBack), Some(1650.0));
        for past in [
            CacheMode::WriteThrough,
            CacheMode::WriteAround,
            CacheMode::Off,
        ] {
            assert_eq!(cost(past), None);
        }
        let idle = DiskCounters::default();
        assert_eq!(flash_writes(&idle, CacheMode::WriteBack, 1.0), None);
        assert_eq!(log_share(&PoolCounters::default()), 1.0);
    }

    #[test]
    fn what_writes_cost_is_not_made_up_for_sizes_that_were_never_full() {
        let costs = [(100.0, 1.5), (200.0, 2.0)];
        assert_eq!(cost_at(&costs, 150.0), Some(1.75));
        assert_eq!(cost_at(&costs, 400.0), Some(2.0));
        assert_eq!(cost_at(&costs, 401.0), None);
        assert_eq!(cost_at(&[], 1.0), None);
    }

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
        const M: u64 = 1 << 20;
        let mut record = DiskRecord {
            min_bytes: 10 * M,
            max_bytes: 100 * M,
            ..DiskRecord::default()
        };
        let kept = |share, record: &DiskRecord| floors(&[Wish::of(share, record)], 1000 * M);
        for (share, want) in [(None, 10), (Some(5), 10), (Some(50), 50), (Some(500), 100)] {
            assert_eq!(kept(share.map(|m| m * M), &record), [want * M]);
        }
        record.max_bytes = 0;
        assert_eq!(kept(Some(500 * M), &record), [500 * M]);
    }

    #[test]
    fn all_that_is_kept_fits_the_flash() {
        let wish = |min: u64, more: u64| Wish {
            min: min << 20,
            more: more << 20,
        };
        let sum = |floors: &[u64]| floors.iter().sum::<u64>() >> 20;
        // Two disks, each given nearly all at a time when the other needed nothing.
        let both = floors(&[wish(0, 700), wish(0, 700)], 750 << 20);
        assert_eq!(both[0], both[1]);
        assert!((749..=750).contains(&sum(&both)));
        // What owners set comes first, even if it is all there is, or more.
        assert_eq!(
            floors(&[wish(700, 0), wish(50, 500)], 750 << 20),
            [700 << 20, 50 << 20]
        );
        assert_eq!(sum(&floors(&[wish(900, 0), wish(0, 500)], 750 << 20)), 900);
        // Enough for all.
        assert_eq!(sum(&floors(&[wish(10, 20), wish(30, 40)], 750 << 20)), 100);
        assert!(floors(&[], 5).is_empty());
    }

    #[test]
    fn a_share_without_advice_fades() {
        let mut share = Some(100 << 30);
        let mut looks = 0;
        while let Some(bytes) = share {
            share = faded(bytes);
            assert!(share.is_none_or(|s| s <= bytes / 2));
            looks += 1;
        }
        assert_eq!(looks, 11);
    }

    fn known() -> Known {
        Known {
            name: "d".to_owned(),
            file: false,
            record: DiskRecord::default(),
            attached: true,
            cached: 0,
            hit_us: None,
            miss_us: Some(8000.0),
            flash_us: Some(90.0),
            measured: None,
            flash_writes: None,
            curve: None,
            mix: None,
        }
    }

    #[test]
    fn there_is_no_advice_from_a_handful_of_samples() {
        let mut known = known();
        known.curve = Some(Curve {
            points: vec![(1000.0, 1.0)],
            accesses: 1e6,
            sampled: 0.001,
            sample_reads: 1000.0,
            sample_blocks: 3.0,
            ..Curve::default()
        });
        assert!(known.enough().is_none());
        if let Some(curve) = &mut known.curve {
            curve.sample_blocks = 500.0;
        }
        assert!(known.enough().is_some());
        if let Some(curve) = &mut known.curve {
            curve.sample_reads = 3.0;
        }
        assert!(known.enough().is_none());
        // Nor on mode and block size.
        let mut mix = Mix::default();
        (0..REQUESTS_MIN - 1).for_each(|_| mix.add(false, 65_536));
        known.mix = Some(mix.clone());
        assert!(known.mode(0.5).is_none() && known.block_size().is_none());
        mix.add(false, 65_536);
        known.mix = Some(mix);
        assert_eq!(known.block_size().map(|s| s.advised), Some(65_536));
        assert!(known.mode(0.5).is_some());
    }

    #[test]
    fn the_pools_mean_is_a_guess_of_a_disks_hits() {
        let mut known = known();
        let share = Share {
            name: "d".to_owned(),
            blocks: 0.0,
            hit_ratio: 0.0,
            latency_us: 0.0,
        };
        let made = |k: &Known| advice(k, &k.demand(k.hit().unwrap_or(1.0), 8000.0), &share);
        assert!(made(&known).latency_guessed);
        assert_eq!(made(&known).hit_us, 90.0);
        known.hit_us = Some(70.0);
        assert!(!made(&known).latency_guessed);
    }
}
