//! From counters that only grow to what happened in each ten seconds.
//!
//! The daemon is looked at every few seconds, not on the beat of the slots, and now and then it does not answer for a while. So
//! what was counted between two looks is divided among the slots they lie in, by time. How long it was between
//! them is known from a clock that nobody sets; when it was, from the one that people read.

use std::collections::BTreeMap;

use hearth_daemon::api::stats::{Counters, DiskSpan, FlashCounters, FlashSpan, StatsReport};
use hearth_daemon::windows::Since;

use super::row::Row;
use super::store::RINGS;

/// All disks together, in the place of a disk's name, which cannot begin so.
pub const POOL: &str = "-pool";
/// The flash.
pub const FLASH: &str = "-flash";
/// Longest time between two looks that is divided; of a longer one the end is taken.
const GAP_MAX: f64 = 900.0;

/// What is known of one name.
#[derive(Debug, Default)]
struct Series {
    before: Option<Counted>,
    /// Slots that are not over.
    open: BTreeMap<u64, Row>,
}

/// Counters of one sort or the other.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(clippy::large_enum_variant)] // There is one of the flash.
enum Counted {
    Disk(Counters),
    Flash(FlashCounters),
}

impl Counted {
    /// What was counted since `before`. A disk that was attached again, and a daemon that was started, count from zero.
    fn since(&self, before: &Counted) -> Counted {
        match (self, before) {
            (Counted::Disk(now), Counted::Disk(then)) => {
                let again = now.reads() < then.reads() || now.writes() < then.writes();
                Counted::Disk(if again { *now } else { now.since(then) })
            }
            (Counted::Flash(now), Counted::Flash(then)) => {
                let again = now.flash_write_bytes < then.flash_write_bytes;
                Counted::Flash(if again { *now } else { now.since(then) })
            }
            (now, _) => *now,
        }
    }
}

/// Looks at the daemon, as they become slots.
#[derive(Debug, Default)]
pub struct Sampler {
    series: BTreeMap<String, Series>,
    /// The last look: when, by the clock that nobody sets, and for how long the daemon had been there.
    last: Option<(f64, u64)>,
}

/// A slot that is over: of whom, its number, and what it holds.
pub type Over = (String, u64, Row);

fn total(spans: &[DiskSpan]) -> Option<Counters> {
    let span = spans.iter().find(|s| s.span == "total")?;
    Some(span.counters)
}

fn flash(spans: &[FlashSpan]) -> Option<FlashCounters> {
    let span = spans.iter().find(|s| s.span == "total")?;
    Some(span.counters)
}

impl Sampler {
    /// Takes in a look at second `steady` of a clock that nobody sets, which is second `wall` since 1970. Gives the slots that
    /// are over by then.
    pub fn look(&mut self, steady: f64, wall: f64, stats: &StatsReport) -> Vec<Over> {
        let (elapsed, restarted) = match self.last {
            // Nothing is known of when that was which was counted before the first look.
            None => (0.0, false),
            Some((then, uptime)) => {
                let restarted = stats.uptime < uptime;
                let elapsed = (steady - then).max(0.0);
                // What a daemon counted, it counted while it was there.
                let there = match restarted {
                    true => elapsed.min(stats.uptime as f64 + 1.0),
                    false => elapsed,
                };
                (there.min(GAP_MAX), restarted)
            }
        };
        let first = self.last.is_none();
        self.last = Some((steady, stats.uptime));
        let parts = slots(wall - elapsed, wall);
        let pool = &stats.pool;
        let mut now: Vec<(&str, Counted, u64, u64)> = (stats.disks.iter())
            .filter_map(|d| {
                let counters = total(&d.spans)?;
                Some((d.name.as_str(), Counted::Disk(counters), d.cached, d.dirty))
            })
            .collect();
        now.extend(total(&pool.disks).map(|c| (POOL, Counted::Disk(c), pool.cached, pool.dirty)));
        now.extend(flash(&pool.spans).map(|c| (FLASH, Counted::Flash(c), 0, 0)));
        let mut over = Vec::new();
        // The sum of all disks falls when one goes; what the others counted meanwhile is known all the same.
        let mut together: Option<Counters> = None;
        for (name, counted, cached, dirty) in now {
            let series = self.series.entry(name.to_owned()).or_default();
            // A disk that appears was added just now, and a daemon that was started began at zero.
            let zero = match counted {
                Counted::Disk(_) => Counted::Disk(Counters::default()),
                Counted::Flash(_) => Counted::Flash(FlashCounters::default()),
            };
            let before = match series.before.replace(counted) {
                Some(before) if !restarted => before,
                _ if first => counted,
                _ => zero,
            };
            let mut grown = counted.since(&before);
            if let Counted::Disk(counters) = &mut grown {
                if name == POOL {
                    *counters = together.unwrap_or_default();
                } else {
                    together.get_or_insert_default().add(counters);
                }
            }
            let row = match grown {
                Counted::Disk(c) => Row::of_disk(&c, cached, dirty),
                Counted::Flash(c) => Row::of_flash(&c),
            };
            let seconds: Vec<f64> = parts.iter().map(|(_, s)| *s).collect();
            for ((index, _), part) in parts.iter().zip(row.divided(&seconds)) {
                series.open.entry(*index).or_default().add(&part);
            }
        }
        self.series.retain(|name, series| {
            let there = stats.disks.iter().any(|d| d.name == *name) || name.starts_with('-');
            let current = wall as u64 / RINGS[0].step;
            // After the clock was set back, those of before are over, too.
            let ended = |index: u64| !there || index != current;
            let indices: Vec<u64> = series.open.keys().copied().filter(|i| ended(*i)).collect();
            for index in indices {
                over.extend((series.open.remove(&index)).map(|row| (name.clone(), index, row)));
            }
            there
        });
        over
    }

    /// All slots as they are, for there is no next look.
    pub fn end(&mut self) -> Vec<Over> {
        let series = std::mem::take(&mut self.series);
        self.last = None;
        let slots = |(name, series): (String, Series)| {
            let open = series.open.into_iter();
            open.map(move |(index, row)| (name.clone(), index, row))
        };
        series.into_iter().flat_map(slots).collect()
    }
}

/// The slots between two times, and seconds in each.
fn slots(from: f64, to: f64) -> Vec<(u64, f64)> {
    let step = RINGS[0].step as f64;
    let mut slots = Vec::new();
    let mut at = from.max(0.0);
    while at < to {
        let index = (at / step).floor();
        let end = ((index + 1.0) * step).min(to);
        slots.push((index as u64, end - at));
        at = end;
    }
    slots
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_daemon::api::stats::{DiskReport, PoolReport};

    const T0: f64 = 1_767_225_600.0;

    fn spans(reads: u64) -> Vec<DiskSpan> {
        vec![DiskSpan {
            span: "total".to_owned(),
            counters: Counters {
                read_hits: reads,
                ..Counters::default()
            },
            ..DiskSpan::default()
        }]
    }

    fn stats(uptime: u64, disks: &[(&str, u64)]) -> StatsReport {
        let all = disks.iter().map(|(_, n)| n).sum();
        StatsReport {
            uptime,
            pool: PoolReport {
                disks: spans(all),
                ..PoolReport::default()
            },
            disks: (disks.iter())
                .map(|(name, reads)| DiskReport {
                    name: (*name).to_owned(),
                    spans: spans(*reads),
                    ..DiskReport::default()
                })
                .collect(),
        }
    }

    fn reads(rows: &[Over], of: &str) -> Vec<(u64, u64)> {
        let base = T0 as u64 / 10;
        let mine = rows.iter().filter(|(name, _, _)| name == of);
        mine.map(|(_, i, row)| (i - base, row.counters().read_hits))
            .collect()
    }

    #[test]
    fn looks_off_the_beat_are_divided_by_time() {
        let mut sampler = Sampler::default();
        let mut over = sampler.look(0.0, T0 + 7.0, &stats(100, &[("vm", 5000)]));
        over.extend(sampler.look(5.0, T0 + 12.0, &stats(105, &[("vm", 5050)])));
        over.extend(sampler.look(10.0, T0 + 17.0, &stats(110, &[("vm", 5100)])));
        over.extend(sampler.look(15.0, T0 + 22.0, &stats(115, &[("vm", 5150)])));
        over.extend(sampler.end());
        assert_eq!(reads(&over, "vm"), [(0, 30), (1, 100), (2, 20)]);
        assert_eq!(reads(&over, POOL), reads(&over, "vm"));
        let seconds: Vec<f64> = over.iter().map(|(_, _, row)| row.seconds).collect();
        assert!(
            (seconds.iter().sum::<f64>() - 30.0).abs() < 1e-6,
            "{seconds:?}"
        );
    }

    #[test]
    fn a_daemon_that_hung_or_was_restarted_loses_nothing_that_can_be_known() {
        let mut sampler = Sampler::default();
        let mut over = sampler.look(0.0, T0, &stats(100, &[("vm", 1000)]));
        // It hung for half a minute, and served all the same.
        over.extend(sampler.look(30.0, T0 + 30.0, &stats(130, &[("vm", 1300)])));
        assert_eq!(reads(&over, "vm"), [(0, 100), (1, 100), (2, 100)]);
        // It was started again, and has been there for four seconds.
        over.clear();
        over.extend(sampler.look(40.0, T0 + 40.0, &stats(4, &[("vm", 70)])));
        over.extend(sampler.end());
        assert_eq!(reads(&over, "vm"), [(3, 70)]);
        assert!(
            over.iter().all(|(_, _, row)| row.seconds <= 5.0),
            "{over:?}"
        );
    }

    #[test]
    fn disks_that_come_and_go_do_not_bend_the_sum() {
        let mut sampler = Sampler::default();
        sampler.look(0.0, T0, &stats(100, &[("a", 1000), ("b", 9000)]));
        let mut over = sampler.look(5.0, T0 + 5.0, &stats(105, &[("a", 1010), ("c", 3)]));
        over.extend(sampler.look(10.0, T0 + 10.0, &stats(110, &[("a", 1020), ("c", 5)])));
        assert_eq!(reads(&over, POOL), [(0, 25)]);
        assert_eq!(reads(&over, "c"), [(0, 5)]);
        assert_eq!(reads(&over, "b"), []);
    }

    #[test]
    fn clocks_that_jump_move_when_it_was_and_not_how_much() {
        let mut sampler = Sampler::default();
        sampler.look(0.0, T0, &stats(100, &[("vm", 0)]));
        // A day ahead, and back.
        let mut over = sampler.look(5.0, T0 + 86_405.0, &stats(105, &[("vm", 50)]));
        over.extend(sampler.look(10.0, T0 + 10.0, &stats(110, &[("vm", 100)])));
        over.extend(sampler.end());
        assert_eq!(reads(&over, "vm"), [(0, 50), (8640, 50)]);
        let far = over.iter().all(|(_, _, row)| row.seconds <= 10.0);
        assert!(far, "{over:?}");
    }

    #[test]
    fn a_suspended_host_is_a_gap() {
        let mut sampler = Sampler::default();
        sampler.look(0.0, T0, &stats(100, &[("vm", 0)]));
        let over = sampler.look(90_000.0, T0 + 90_000.0, &stats(90_100, &[("vm", 900)]));
        let slots = reads(&over, "vm");
        assert_eq!(slots.len(), 90);
        assert_eq!(slots.iter().map(|(_, n)| n).sum::<u64>(), 900);
    }
}
