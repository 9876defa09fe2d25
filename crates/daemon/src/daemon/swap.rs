//! What was made of swap on this host, by the notes of who made it; and who gives way where swap and the cache share flash.
//!
//! The kernel does not ask the daemon for a page. But it counts what it reads from the loop device over a part of the pool, and how long
//! that took. When that rises over what is usual there, what the cache does that nobody waits for stands back.
//!
//! It also counts what is swapped out. That wears the flash as what the cache writes does, so both are taken from one budget: what is
//! swapped out is never held up, so it is the cache that writes less.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearth_events::Event;
use hearth_metrics::Swap;
use hearth_swap::Areas;
use hearth_swap::areas::Shown;
use hearth_swap::contention::{Counters, Turn, Watch};
use hearth_swap::kernel;
use hearth_swap::written::{Counted, Meter};

use super::{Daemon, lock};
use crate::api::swap::{Endurance, SwapArea, SwapInfo, SwapSetting, SwapTraffic};
use crate::error::Result;
use crate::workers::{Class, Spot};

/// A window that is looked at.
const WINDOW: Duration = Duration::from_secs(1);
/// How often is looked which areas there are, and whether a file among them can be read.
const LIST: Duration = Duration::from_secs(5);
/// A look that takes longer means that flash does not answer.
const SILENT: Duration = Duration::from_secs(30);
/// Where a look at swap may get stuck.
const SWAP: &str = "the host's swap";

/// What goes over the flash, by whom.
#[derive(Default)]
pub(super) struct Shared {
    listed: Option<Instant>,
    /// When a look began that has not ended.
    looking: Option<Instant>,
    /// What is swapped to of Hearth's, as it was listed last.
    areas: Vec<Shown>,
    /// Why the file among them cannot be read back.
    trouble: Option<String>,
    /// When it was looked last, whether or not there was anything.
    at: Option<Instant>,
    meter: Meter,
    looked: Option<(Instant, Counters, [u64; 2])>,
    watch: Watch,
    traffic: Option<SwapTraffic>,
    /// Bytes that came back since the start.
    read: u64,
}

impl Shared {
    /// Takes what is counted by now, of swap and of the cache (read, written).
    fn take(&mut self, at: Instant, swap: Option<Counters>, cache: [u64; 2]) -> Option<Turn> {
        let Some(now) = swap else {
            self.looked = None;
            self.traffic = None;
            return self.watch.gone();
        };
        let turn = self.watch.look(now);
        let before = self.looked.replace((at, now, cache));
        let (began, then, cached) = before?;
        // It may be another device by now, which counts from zero.
        self.read += now.read_bytes.saturating_sub(then.read_bytes);
        let seconds = at.saturating_duration_since(began).as_secs_f64();
        let rate = |now: u64, then: u64| match seconds > 0.0 {
            true => (now.saturating_sub(then) as f64 / seconds) as u64,
            false => 0,
        };
        let (latency_us, usual_latency_us) = self.watch.latencies();
        self.traffic = Some(SwapTraffic {
            swap_read_bytes_per_s: rate(now.read_bytes, then.read_bytes),
            swap_write_bytes_per_s: rate(now.written_bytes, then.written_bytes),
            cache_read_bytes_per_s: rate(cache[0], cached[0]),
            cache_write_bytes_per_s: rate(cache[1], cached[1]),
            latency_us,
            usual_latency_us,
            cache_stands_back: self.watch.is_slow(),
        });
        turn
    }
}

/// A look at swap, until dropped.
struct SwapLook(Arc<Daemon>);

impl Drop for SwapLook {
    fn drop(&mut self) {
        lock(&self.0.shared_flash).looking = None;
    }
}

impl SwapLook {
    fn look(&self) {
        let areas = on(&self.0.state_dir);
        // Known before the file is read, which may not end.
        lock(&self.0.shared_flash).areas = areas.clone();
        let dead = files(&areas).find_map(|area| {
            let error = area.read_back().err().filter(hearth_io::is_dead)?;
            Some(unreadable(area, &error.to_string()))
        });
        lock(&self.0.shared_flash).trouble = dead;
    }
}

impl Daemon {
    /// Starts a check of the swap areas on a thread, unless one is running: it reads from flash, which may hang.
    fn look_at_swap_aside(self: &Arc<Daemon>) {
        let mut shared = lock(&self.shared_flash);
        if let Some(since) = shared.looking {
            if since.elapsed() >= SILENT {
                let silent = files(&shared.areas).next();
                shared.trouble = silent.map(|area| unreadable(area, "it does not answer"));
            }
            return;
        }
        if shared.listed.is_some_and(|at| at.elapsed() < LIST) {
            return;
        }
        shared.listed = Some(Instant::now());
        shared.looking = shared.listed;
        drop(shared);
        let look = SwapLook(self.clone());
        self.aside(&Spot::new(SWAP), Class::Due, move || look.look());
    }

    /// Why the host's swap file cannot be read back, if that is known.
    pub(super) fn swap_trouble(&self) -> Option<String> {
        lock(&self.shared_flash).trouble.clone()
    }

    /// Looks whether pages that come back from swap are held up. Called by housekeeping.
    pub(super) fn swap_round(self: &Arc<Daemon>) {
        self.look_at_swap_aside();
        let mut shared = lock(&self.shared_flash);
        let now = Instant::now();
        let passed = |at: Option<Instant>, time| at.is_none_or(|at| now.duration_since(at) >= time);
        if !passed(shared.at, WINDOW) {
            return;
        }
        shared.at = Some(now);
        let counted = match shared.areas.is_empty() {
            true => Counted::default(),
            false => Counted::now(&shared.areas, &kernel::in_use().unwrap_or_default()),
        };
        let written = shared.meter.look(counted);
        if written > 0 {
            self.engine.wrote_beside(written);
        }
        let devices = in_pool(&shared.areas);
        let counted: Vec<Counters> = devices.filter_map(Counters::of).collect();
        let swap = (!counted.is_empty()).then(|| {
            counted.iter().fold(Counters::default(), |sum, c| Counters {
                reads: sum.reads + c.reads,
                read_ms: sum.read_ms + c.read_ms,
                read_bytes: sum.read_bytes + c.read_bytes,
                written_bytes: sum.written_bytes + c.written_bytes,
                in_flight: sum.in_flight + c.in_flight,
            })
        });
        let flash = self.engine.pool_stats().counters;
        match shared.take(now, swap, [flash.flash_read_bytes, flash.flash_write_bytes]) {
            Some(Turn::Slow(microseconds, usual)) => {
                self.engine.stand_back(true);
                self.events.tell(Event::SwapSlow {
                    microseconds,
                    usual,
                });
            }
            Some(Turn::Well) => {
                self.engine.stand_back(false);
                self.events.tell(Event::SwapWell {});
                self.poke();
            }
            None => {}
        }
    }

    /// True while swap is held up: what nobody waits for is not begun.
    pub(super) fn swap_waits(&self) -> bool {
        lock(&self.shared_flash).watch.is_slow()
    }

    /// What was made of swap, and what it shares the flash with.
    pub(super) fn swap_info(&self) -> Result<SwapInfo> {
        let traffic = lock(&self.shared_flash).traffic.clone();
        Ok(SwapInfo {
            traffic,
            trouble: self.swap_trouble(),
            endurance: self.endurance(),
            ..info(&self.state_dir)?
        })
    }

    /// The budget of what may be written to flash, if there is one, and who wrote.
    pub(super) fn endurance(&self) -> Option<Endurance> {
        let stats = self.engine.pool_stats();
        let (bytes_per_s, left) = stats.endurance?;
        Some(Endurance {
            bytes_per_s,
            left,
            used: f64::from(stats.endurance_pressure) / 256.0,
            cache_write_bytes: stats.counters.flash_write_bytes,
            swap_write_bytes: self.swapped_out(),
        })
    }

    /// Bytes that were swapped out to the flash since the start.
    fn swapped_out(&self) -> u64 {
        lock(&self.shared_flash).meter.total()
    }

    /// What is measured of it.
    pub(super) fn swap_figures(&self) -> Swap {
        let shared = lock(&self.shared_flash);
        let traffic = shared.traffic.as_ref();
        let latency_us = traffic.and_then(|t| t.latency_us).unwrap_or(0);
        Swap {
            written: shared.meter.total(),
            read: shared.read,
            latency: latency_us as f64 / 1e6,
            yields: shared.watch.is_slow(),
        }
    }
}

#[cfg(test)]
impl Daemon {
    /// Makes it look as if pages that come back were held up, or were not any more.
    pub(super) fn hold_swap_up(&self, on: bool) {
        let mut shared = lock(&self.shared_flash);
        shared.watch.gone();
        let us = |at: u64| if on && at > 1 { 50_000 } else { 100 };
        let mut now = Counters::default();
        for at in 0..8 {
            now.reads += 1000;
            now.read_ms += us(at);
            shared.watch.look(now);
        }
        assert_eq!(shared.watch.is_slow(), on);
        // Nobody looks at what there really is.
        shared.at = Some(Instant::now() + Duration::from_secs(3600));
    }
}

/// What of Hearth's the kernel swaps to.
fn on(state_dir: &Path) -> Vec<Shown> {
    let shown = Areas::open(state_dir).and_then(|areas| areas.show());
    let mut shown = shown.unwrap_or_default();
    shown.retain(|area| area.on);
    shown
}

/// The devices among them that show a part of the pool.
fn in_pool(areas: &[Shown]) -> impl Iterator<Item = &Path> {
    let ours = areas.iter().filter(|area| area.noted.in_pool.is_some());
    ours.map(|area| area.noted.path.as_path())
}

/// Swap files among the areas. The state of the pool covers areas inside the pool.
fn files(areas: &[Shown]) -> impl Iterator<Item = &Shown> {
    areas.iter().filter(|area| area.noted.in_pool.is_none())
}

fn unreadable(area: &Shown, why: &str) -> String {
    format!(
        "swap file {} cannot be read: {why}",
        area.noted.path.display()
    )
}

/// As the notes in `state_dir` and the kernel say.
fn info(state_dir: &Path) -> Result<SwapInfo> {
    let areas = Areas::open(state_dir)?;
    let settings = areas.settings().iter().map(|set| SwapSetting {
        path: set.path.display().to_string(),
        before: set.before.clone(),
        now: set.now.clone(),
        why: set.why.clone(),
    });
    let shown = areas.show()?.into_iter().map(|area| SwapArea {
        path: area.noted.path.display().to_string(),
        size: area.noted.size,
        used: area.used,
        priority: area.noted.priority,
        on: area.on,
    });
    Ok(SwapInfo {
        areas: shown.collect(),
        settings: settings.collect(),
        trouble: None,
        traffic: None,
        endurance: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_are_told_as_they_are_noted() {
        let tmp = tempfile::tempdir().unwrap();
        assert_eq!(info(tmp.path()).unwrap(), SwapInfo::default());
        let host = hearth_swap::notes::this_host();
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        let boot = boot.trim();
        let text = format!(
            r#"{{"version":1,"host":{host:?},"areas":[{{"path":"/none/flash.swap","size":8388608,
            "uuid":"67e55044-10b1-426f-9247-bb680e5fe0c8","priority":100,"discard":"off","stage":"used"}}],
            "settings":[{{"path":"/proc/sys/vm/page-cluster","before":"3","now":"0","why":"flash"}}],
            "boot":{boot:?}}}"#
        );
        std::fs::write(tmp.path().join("swap.json"), text).unwrap();
        let told = info(tmp.path()).unwrap();
        assert_eq!(told.areas.len(), 1);
        let area = &told.areas[0];
        assert_eq!((area.size, area.used, area.priority), (8 << 20, 0, 100));
        assert!(!area.on, "the kernel knows no such file");
        assert_eq!(told.settings[0].before, "3");
        std::fs::write(tmp.path().join("swap.json"), "{}").unwrap();
        let wrong = info(tmp.path()).unwrap_err();
        assert!(wrong.what.contains("swap.json"), "{wrong}");
    }

    #[test]
    fn both_traffics_are_told_beside_each_other() {
        let mut shared = Shared::default();
        let start = Instant::now();
        let counters = |reads: u64, read_ms: u64| Counters {
            reads,
            read_ms,
            read_bytes: reads * 4096,
            written_bytes: reads * 8192,
            in_flight: 0,
        };
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(shared.take(at(0), Some(counters(0, 0)), [0, 0]), None);
        assert_eq!(shared.traffic, None);
        shared.take(at(2), Some(counters(2000, 400)), [4000, 6000]);
        let told = shared.traffic.clone().unwrap();
        assert_eq!(
            (told.swap_read_bytes_per_s, told.swap_write_bytes_per_s),
            (1000 * 4096, 1000 * 8192)
        );
        assert_eq!(
            (told.cache_read_bytes_per_s, told.cache_write_bytes_per_s),
            (2000, 3000)
        );
        assert_eq!(
            (told.latency_us, told.cache_stands_back),
            (Some(200), false)
        );
        assert_eq!(shared.read, 2000 * 4096);
        shared.take(at(3), Some(counters(3000, 9400)), [0, 0]);
        let turn = shared.take(at(4), Some(counters(4000, 18_400)), [0, 0]);
        assert!(matches!(turn, Some(Turn::Slow(9000, _))), "{turn:?}");
        assert!(shared.traffic.as_ref().unwrap().cache_stands_back);
        // With the area all of it ends.
        assert_eq!(shared.take(at(5), None, [0, 0]), Some(Turn::Well));
        assert_eq!(shared.traffic, None);
    }
}
