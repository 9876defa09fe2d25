//! How much swap has written to the flash that it shares with the cache.
//!
//! An SSD is worn out by whoever writes to it, so what is swapped out counts against the same budget as what the cache writes. Of a
//! device the kernel counts that by itself. Of a file it does not; there it is all that was swapped out, less what went to devices.
//! Should the host swap to files elsewhere as well, these count too: the budget is then used up sooner, never later.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use crate::areas::Shown;
use crate::contention::Counters;
use crate::kernel::InUse;

/// What is counted at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Bytes that were ever swapped out, wherever to.
    pub out: Option<u64>,
    /// Of each device that is swapped to, the bytes that were written to it.
    pub devices: BTreeMap<PathBuf, u64>,
    /// Those of them that are on the flash.
    pub ours: BTreeSet<PathBuf>,
    /// One of the files is on the flash.
    pub file: bool,
}

impl Counted {
    /// By what the kernel says now.
    pub fn now(shown: &[Shown], in_use: &[InUse]) -> Counted {
        let real = |path: &PathBuf| path.canonicalize().unwrap_or_else(|_| path.clone());
        let on = || shown.iter().filter(|area| area.on);
        let devices = in_use.iter().filter_map(|swap| {
            let path = real(&swap.path);
            let counters = Counters::of(&path)?;
            Some((path, counters.written_bytes))
        });
        let in_pool = on().filter(|area| area.noted.in_pool.is_some());
        Counted {
            out: crate::kernel::swapped_out().ok(),
            devices: devices.collect(),
            ours: in_pool.map(|area| real(&area.noted.path)).collect(),
            file: on().any(|area| area.noted.in_pool.is_none()),
        }
    }
}

/// Adds up what was written since it looked first.
#[derive(Clone, Debug, Default)]
pub struct Meter {
    before: Option<Counted>,
    total: u64,
}

impl Meter {
    /// Takes what is counted by now; how many bytes were written to the flash since the last look.
    pub fn look(&mut self, now: Counted) -> u64 {
        let Some(before) = self.before.replace(now.clone()) else {
            return 0;
        };
        let (mut devices, mut ours) = (0u64, 0u64);
        for (path, bytes) in &now.devices {
            // One that came meanwhile was used by somebody else before, or is new: what it wrote since is not known.
            let Some(then) = before.devices.get(path) else {
                continue;
            };
            // It may be another by the same name, which counts from zero.
            let more = bytes.checked_sub(*then).unwrap_or(*bytes);
            devices = devices.saturating_add(more);
            if now.ours.contains(path) {
                ours = ours.saturating_add(more);
            }
        }
        let out = match (before.out, now.out) {
            (Some(then), Some(now)) => now.saturating_sub(then),
            _ => 0,
        };
        let files = match before.file && now.file {
            true => out.saturating_sub(devices),
            false => 0,
        };
        let written = ours.saturating_add(files);
        self.total = self.total.saturating_add(written);
        written
    }

    /// Bytes since it looked first.
    pub fn total(&self) -> u64 {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(out: u64, devices: &[(&str, u64)], ours: &[&str], file: bool) -> Counted {
        let devices = devices.iter().map(|(name, n)| (PathBuf::from(name), *n));
        Counted {
            out: Some(out),
            devices: devices.collect(),
            ours: ours.iter().map(PathBuf::from).collect(),
            file,
        }
    }

    #[test]
    fn of_devices_only_those_on_the_flash_count() {
        let mut meter = Meter::default();
        let look = |a, b| {
            counted(
                0,
                &[("/dev/loop0", a), ("/dev/sda2", b)],
                &["/dev/loop0"],
                false,
            )
        };
        assert_eq!(
            meter.look(look(500, 100)),
            0,
            "what was before is not known"
        );
        assert_eq!(meter.look(look(700, 900)), 200);
        assert_eq!(meter.look(look(700, 900)), 0);
        // Another device by that name.
        assert_eq!(meter.look(look(30, 900)), 30);
        assert_eq!(meter.total(), 230);
    }

    #[test]
    fn a_file_has_what_did_not_go_to_devices() {
        let mut meter = Meter::default();
        let look = |out, sda, file| counted(out, &[("/dev/sda2", sda)], &[], file);
        meter.look(look(1000, 1000, true));
        assert_eq!(meter.look(look(5000, 2000, true)), 3000);
        // A device may have been written for other reasons, as when it is made.
        assert_eq!(meter.look(look(5100, 9000, true)), 0);
        assert_eq!(meter.look(look(9000, 9000, false)), 0);
        // It has just come: what was swapped out before it was there went elsewhere.
        assert_eq!(meter.look(look(9500, 9000, true)), 0);
        assert_eq!(meter.look(look(9600, 9000, true)), 100);
        let untold = Counted {
            out: None,
            ..look(0, 9000, true)
        };
        assert_eq!(meter.look(untold), 0);
        assert_eq!(meter.total(), 3100);
    }

    #[test]
    fn a_device_that_comes_later_counts_from_then_on() {
        let mut meter = Meter::default();
        meter.look(counted(0, &[], &[], false));
        let look = |n| counted(0, &[("/dev/loop0", n)], &["/dev/loop0"], false);
        assert_eq!(meter.look(look(1 << 20)), 0);
        assert_eq!(meter.look(look((1 << 20) + 4096)), 4096);
    }
}
