//! What an administrator may say: the section `[memory]` of the host's settings.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::MIB;

/// Of the host's memory, what should be available, in percent (`Mem.MinFreePct`).
pub const MIN_FREE_PERCENT: f64 = 6.0;
/// What an idle page costs more than a used one (`Mem.IdleTax`).
pub const IDLE_TAX_PERCENT: f64 = 75.0;
/// Of a guest's memory, what its balloon may take (`Mem.CtlMaxPercent`).
pub const BALLOON_MAX_PERCENT: u64 = 65;
/// Of the host's memory, what compressed pages may take (`Mem.MemZipMaxPct`).
pub const ZIP_MAX_PERCENT: u64 = 20;

/// What is said of one guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestConfig {
    /// What it is called; libvirt's name of it, where libvirt runs it.
    pub name: String,
    /// Its QMP socket, where libvirt does not run it.
    pub qmp: Option<PathBuf>,
    /// Nothing is taken from it, and it is not asked how it is.
    #[serde(default)]
    pub exempt: bool,
    /// What neither a balloon nor swapping out takes from it.
    pub min_mib: Option<u64>,
    /// What it gets at most, if that is less than it is assigned.
    pub max_mib: Option<u64>,
    /// Against others'. Of two that use as much, the one with the smaller share pays.
    pub share: Option<u64>,
}

/// The section.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MemoryConfig {
    /// Are libvirt's guests looked at?
    pub libvirt: bool,
    /// A control group with a limit that all guests are in, such as `/sys/fs/cgroup/machine.slice`: then that is
    /// the host.
    pub cgroup: Option<PathBuf>,
    /// Guests.
    pub guest: Vec<GuestConfig>,
}

impl Default for MemoryConfig {
    fn default() -> MemoryConfig {
        MemoryConfig {
            libvirt: true,
            cgroup: None,
            guest: Vec::new(),
        }
    }
}

/// A guest's bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// What its balloon leaves it.
    pub minimum: u64,
    /// What swapping out leaves it.
    pub reserved: u64,
    /// What it gets.
    pub maximum: u64,
    /// Against others'.
    pub share: u64,
}

/// A share that nobody has said is in proportion to what is assigned, as ESXi's is: ten for each MiB.
const SHARE_PER_MIB: u64 = 10;

impl MemoryConfig {
    /// What is wrong with it, if something is.
    pub fn check(&self) -> Result<(), String> {
        let mut names: Vec<&str> = self.guest.iter().map(|g| g.name.as_str()).collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|w| w[0] == w[1]) {
            return Err(format!("guest {} is there twice", twice[0]));
        }
        for guest in &self.guest {
            if guest.name.is_empty() {
                return Err("a guest needs a name".to_owned());
            }
            if let (Some(min), Some(max)) = (guest.min_mib, guest.max_mib)
                && min > max
            {
                return Err(format!(
                    "guest {}: min_mib {min} is more than max_mib {max}",
                    guest.name
                ));
            }
            if guest.share == Some(0) {
                return Err(format!(
                    "guest {}: a share of 0 is none, give at least 1",
                    guest.name
                ));
            }
        }
        Ok(())
    }

    /// The bounds of a guest that is assigned so many bytes.
    pub fn bounds(&self, name: &str, assigned: u64) -> Bounds {
        let said = self.guest.iter().find(|g| g.name == name);
        let bytes = |mib: u64| mib.saturating_mul(MIB);
        let maximum = said
            .and_then(|g| g.max_mib)
            .map_or(assigned, |mib| bytes(mib).min(assigned));
        let reserved = said
            .and_then(|g| g.min_mib)
            .map(|mib| bytes(mib).min(maximum));
        let kept = assigned / 100 * (100 - BALLOON_MAX_PERCENT);
        let minimum = reserved.unwrap_or(kept.min(maximum));
        let share = said
            .and_then(|g| g.share)
            .unwrap_or(SHARE_PER_MIB * (assigned / MIB))
            .max(1);
        Bounds {
            minimum,
            reserved: reserved.unwrap_or(0),
            maximum,
            share,
        }
    }

    /// Is nothing to be done to this guest?
    pub fn is_exempt(&self, name: &str) -> bool {
        self.guest.iter().any(|g| g.exempt && g.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_hold_whatever_is_said() {
        let mut config = MemoryConfig::default();
        let of = |config: &MemoryConfig| config.bounds("a", 1000 * MIB);
        assert_eq!(of(&config).maximum, 1000 * MIB);
        assert_eq!(of(&config).minimum / MIB, 350, "65 % may go");
        assert_eq!(of(&config).reserved, 0);
        config.guest = vec![GuestConfig {
            name: "a".into(),
            min_mib: Some(5000),
            max_mib: Some(700),
            share: Some(7),
            ..GuestConfig::default()
        }];
        let bounds = of(&config);
        assert_eq!((bounds.minimum, bounds.maximum), (700 * MIB, 700 * MIB));
        assert_eq!((bounds.reserved, bounds.share), (700 * MIB, 7));
        assert!(config.check().is_err());
        config.guest[0].max_mib = None;
        assert_eq!(config.check(), Ok(()));
        config.guest.push(config.guest[0].clone());
        assert!(config.check().unwrap_err().contains("twice"));
    }
}
