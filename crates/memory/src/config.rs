//! What an administrator may say: the section `[memory]` of the host's settings.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::MIB;

/// How much is done for room, in the terms of the settings that people know from ESXi.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Profile {
    /// Nothing until memory becomes short.
    #[default]
    Balanced,
    /// Sharing and compression from the start, balloons earlier.
    Keen,
}

impl Profile {
    /// As it is typed.
    pub fn word(self) -> &'static str {
        match self {
            Profile::Balanced => "balanced",
            Profile::Keen => "keen",
        }
    }
}

/// The values of a profile.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Values {
    /// Of the host's memory, what should be available (`Mem.MinFreePct`).
    pub min_free_percent: f64,
    /// What an idle page costs more than a used one (`Mem.IdleTax`).
    pub idle_tax_percent: f64,
    /// Of a guest's memory, what its balloon may take (`Mem.CtlMaxPercent`).
    pub balloon_max_percent: u64,
    /// Of the host's memory, what compressed pages may take (`Mem.MemZipMaxPct`).
    pub zip_max_percent: u64,
    /// Pages that are compared each time (`Mem.ShareScanGHz`, roughly).
    pub share_pages: u64,
    /// Sharing and compression are on before memory is short.
    pub early: bool,
}

impl Profile {
    /// Its values.
    pub fn values(self) -> Values {
        match self {
            Profile::Balanced => Values {
                min_free_percent: 6.0,
                idle_tax_percent: 75.0,
                balloon_max_percent: 65,
                zip_max_percent: 20,
                share_pages: 500,
                early: false,
            },
            Profile::Keen => Values {
                min_free_percent: 10.0,
                idle_tax_percent: 90.0,
                balloon_max_percent: 75,
                zip_max_percent: 35,
                share_pages: 2000,
                early: true,
            },
        }
    }
}

/// What is said of one guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestConfig {
    /// What it is called; libvirt's name of it, where libvirt runs it.
    pub name: String,
    /// Its QMP socket, where libvirt does not run it.
    pub qmp: Option<PathBuf>,
    /// What it keeps, whatever happens.
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
    /// How much is done.
    pub profile: Profile,
    /// Are libvirt's guests looked at?
    pub libvirt: bool,
    /// A control group with a limit that all guests are in, such as `/sys/fs/cgroup/machine.slice`: then that is
    /// the host.
    pub cgroup: Option<PathBuf>,
    /// What may be swapped out in the long run, GiB a day, for the flash's sake: with more, memory is taken back earlier.
    pub swap_out_gib_per_day: Option<u64>,
    /// Guests.
    pub guest: Vec<GuestConfig>,
}

impl Default for MemoryConfig {
    fn default() -> MemoryConfig {
        MemoryConfig {
            profile: Profile::default(),
            libvirt: true,
            cgroup: None,
            swap_out_gib_per_day: None,
            guest: Vec::new(),
        }
    }
}

/// A guest's bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// What it keeps.
    pub minimum: u64,
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
        let kept = 100 - self.profile.values().balloon_max_percent;
        let minimum = said
            .and_then(|g| g.min_mib)
            .map_or(assigned / 100 * kept, bytes)
            .min(maximum);
        let share = said
            .and_then(|g| g.share)
            .unwrap_or(SHARE_PER_MIB * (assigned / MIB))
            .max(1);
        Bounds {
            minimum,
            maximum,
            share,
        }
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
        config.guest = vec![GuestConfig {
            name: "a".into(),
            min_mib: Some(5000),
            max_mib: Some(700),
            share: Some(7),
            ..GuestConfig::default()
        }];
        let bounds = of(&config);
        assert_eq!((bounds.minimum, bounds.maximum), (700 * MIB, 700 * MIB));
        assert_eq!(bounds.share, 7);
        assert!(config.check().is_err());
        config.guest[0].max_mib = None;
        assert_eq!(config.check(), Ok(()));
        config.guest.push(config.guest[0].clone());
        assert!(config.check().unwrap_err().contains("twice"));
    }
}
