//! What the kernel says of the host: memory, swap, pressure, compression; and of a control group
//! that stands for it.

use std::fs;
use std::path::{Path, PathBuf};

use hearth_memory::{Pressure, Seen, Zswap};

/// Where the kernel's files are, so that rules about them can be tried on made ones.
#[derive(Clone, Debug)]
pub struct Files {
    /// `/proc`.
    pub proc: PathBuf,
    /// `/sys`.
    pub sys: PathBuf,
}

impl Default for Files {
    fn default() -> Files {
        Files {
            proc: "/proc".into(),
            sys: "/sys".into(),
        }
    }
}

/// Bytes of a page.
pub const PAGE: u64 = 4096;

fn text(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok()
}

/// A file that holds one number.
fn number(path: &Path) -> Option<u64> {
    text(path)?.trim().parse().ok()
}

/// A line `NAME VALUE` or `NAME: VALUE kB`; the value as it stands.
pub fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        let found = words.next()?.trim_end_matches(':') == name;
        found.then(|| words.next()?.parse().ok())?
    })
}

/// `some avg10=1.00 avg60=…` and `full avg10=…`.
fn pressure(text: &str) -> Option<Pressure> {
    let of = |kind: &str| {
        let line = text.lines().find(|l| l.starts_with(kind))?;
        let word = line
            .split_whitespace()
            .find_map(|w| w.strip_prefix("avg10="))?;
        word.parse::<f64>().ok().filter(|v| v.is_finite())
    };
    Some(Pressure {
        some: of("some")?,
        full: of("full").unwrap_or(0.0),
    })
}

/// Microseconds everything stood still, of a file like `memory.pressure`.
pub fn stalled_us(text: &str) -> Option<u64> {
    let line = text.lines().find(|l| l.starts_with("full"))?;
    let word = line
        .split_whitespace()
        .find_map(|w| w.strip_prefix("total="))?;
    word.parse().ok()
}

impl Files {
    /// The boot, which ends what was noted for it.
    pub fn boot(&self) -> String {
        let id = text(&self.proc.join("sys/kernel/random/boot_id"));
        id.unwrap_or_default().trim().to_owned()
    }

    /// Where the switches of compression are.
    pub fn zswap(&self) -> PathBuf {
        self.sys.join("module/zswap/parameters")
    }

    /// The whole host. Bytes read back and swapped out since it started, instead of rates, which need two looks.
    pub fn host(&self) -> Result<(Seen, [u64; 2]), String> {
        let meminfo = text(&self.proc.join("meminfo")).ok_or("cannot read /proc/meminfo")?;
        let kib = |name| field(&meminfo, name).map(|n| n << 10);
        let vmstat = text(&self.proc.join("vmstat")).unwrap_or_default();
        let seen = Seen {
            total: kib("MemTotal").ok_or("/proc/meminfo does not say how much there is")?,
            available: kib("MemAvailable").or(kib("MemFree")).unwrap_or(0),
            swap_total: kib("SwapTotal").unwrap_or(0),
            swap_free: kib("SwapFree").unwrap_or(0),
            pressure: text(&self.proc.join("pressure/memory")).and_then(|t| pressure(&t)),
            zswap: self.zswap_seen(&meminfo),
            ..Seen::default()
        };
        let bytes = |name| field(&vmstat, name).unwrap_or(0).saturating_mul(PAGE);
        Ok((seen, [bytes("pswpin"), bytes("pswpout")]))
    }

    fn zswap_seen(&self, meminfo: &str) -> Option<Zswap> {
        let dir = self.zswap();
        let word = |name: &str| text(&dir.join(name)).map(|t| t.trim().to_owned());
        let percent = number(&dir.join("max_pool_percent")).unwrap_or(0);
        let total = field(meminfo, "MemTotal").unwrap_or(0) << 10;
        Some(Zswap {
            on: word("enabled")? == "Y",
            compressor: word("compressor").unwrap_or_default(),
            pool_percent: percent,
            pool_max: (total / 100).saturating_mul(percent),
            pool: field(meminfo, "Zswap").map(|n| n << 10),
            stored: field(meminfo, "Zswapped").map(|n| n << 10),
        })
    }
}

/// A control group that all guests are in stands for the host: its limit is the memory, and what is below the limit or is only
/// a copy of files is available. `seen` is the whole host's; bytes read back since the group was made.
pub fn within(group: &Path, seen: &mut Seen) -> Result<u64, String> {
    let file = |name: &str| group.join(name);
    let stat = text(&file("memory.stat"))
        .ok_or_else(|| format!("{} is no control group for memory", group.display()))?;
    let v2 = file("memory.current").exists();
    let (limit, used) = if v2 {
        (number(&file("memory.max")), number(&file("memory.current")))
    } else {
        (
            number(&file("memory.limit_in_bytes")),
            number(&file("memory.usage_in_bytes")),
        )
    };
    let limit = limit.unwrap_or(u64::MAX).min(seen.total);
    let used = used.ok_or_else(|| format!("{} does not say what is used", group.display()))?;
    let of = |v2_name: &str, v1_name: &str| {
        field(&stat, if v2 { v2_name } else { v1_name }).unwrap_or(0)
    };
    // What guests have locked or share in memory counts as files and cannot be dropped: only the lists of real ones.
    let files = of("inactive_file", "total_inactive_file") + of("active_file", "total_active_file");
    let below = limit.saturating_sub(used).saturating_add(files);
    seen.total = limit;
    seen.available = below.min(limit).min(seen.available);
    // The host's waiting is that of everybody; the group's own is told by version 2 only.
    seen.pressure = text(&file("memory.pressure")).and_then(|t| pressure(&t));
    let faults = of("pgmajfault", "total_pgmajfault");
    Ok(field(&stat, "pswpin")
        .unwrap_or(faults)
        .saturating_mul(PAGE))
}

/// The control groups of a process in which its memory is counted, as directories: version 2 if memory is there, else 1.
pub fn group_of(files: &Files, pid: u32) -> Option<PathBuf> {
    let own = text(&files.proc.join(format!("{pid}/cgroup")))?;
    let root = files.sys.join("fs/cgroup");
    let mut v2 = None;
    for line in own.lines() {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let path = path.trim_start_matches('/');
        if controllers.split(',').any(|c| c == "memory") {
            return Some(root.join("memory").join(path));
        }
        if controllers.is_empty() {
            v2 = [root.clone(), root.join("unified")]
                .into_iter()
                .map(|r| r.join(path))
                .find(|d| d.join("memory.current").exists());
        }
    }
    v2
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(root: &Path, files: &[(&str, &str)]) {
        for (name, text) in files {
            let path = root.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    #[test]
    fn a_host_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        put(
            dir.path(),
            &[
                (
                    "proc/meminfo",
                    "MemTotal: 100 kB\nMemAvailable: 40 kB\nSwapTotal: 10 kB\nSwapFree: 5 kB\nZswap: 1 kB\nZswapped: 3 kB\n",
                ),
                ("proc/vmstat", "pswpin 3\npswpout 4\n"),
                (
                    "proc/pressure/memory",
                    "some avg10=1.50 avg60=0.00 avg300=0.00 total=9\nfull avg10=0.25 avg60=0.00 avg300=0.00 total=7\n",
                ),
                ("sys/module/zswap/parameters/enabled", "N\n"),
                ("sys/module/zswap/parameters/compressor", "lzo\n"),
                ("sys/module/zswap/parameters/max_pool_percent", "20\n"),
            ],
        );
        let files = Files {
            proc: dir.path().join("proc"),
            sys: dir.path().join("sys"),
        };
        let (seen, swapped) = files.host().unwrap();
        assert_eq!((seen.total, seen.available), (100 << 10, 40 << 10));
        assert_eq!(swapped, [3 * PAGE, 4 * PAGE]);
        assert_eq!(
            seen.pressure,
            Some(Pressure {
                some: 1.5,
                full: 0.25
            })
        );
        let zswap = seen.zswap.unwrap();
        assert!(!zswap.on && zswap.stored == Some(3 << 10) && zswap.pool_percent == 20);
        assert_eq!(zswap.pool_max, (100 << 10) / 100 * 20);
        // An old kernel has none of this.
        for gone in ["proc/pressure", "sys/module"] {
            fs::remove_dir_all(dir.path().join(gone)).unwrap();
        }
        let (seen, _) = files.host().unwrap();
        assert!(seen.pressure.is_none() && seen.zswap.is_none());
    }

    #[test]
    fn groups_of_both_versions() {
        let dir = tempfile::tempdir().unwrap();
        put(
            dir.path(),
            &[
                (
                    "v1/memory.stat",
                    "total_inactive_file 10\ntotal_active_file 5\ntotal_pgmajfault 2\n",
                ),
                ("v1/memory.limit_in_bytes", "100\n"),
                ("v1/memory.usage_in_bytes", "90\n"),
                (
                    "v2/memory.stat",
                    "inactive_file 10\nactive_file 0\npgmajfault 3\npswpin 1\n",
                ),
                ("v2/memory.max", "max\n"),
                ("v2/memory.current", "90\n"),
                (
                    "v2/memory.pressure",
                    "some avg10=2.00 total=1\nfull avg10=1.00 total=1500\n",
                ),
            ],
        );
        let host = || Seen {
            total: 1000,
            available: 500,
            ..Seen::default()
        };
        let mut seen = host();
        assert_eq!(within(&dir.path().join("v1"), &mut seen), Ok(2 * PAGE));
        assert_eq!((seen.total, seen.available), (100, 25));
        let mut seen = host();
        assert_eq!(within(&dir.path().join("v2"), &mut seen), Ok(PAGE));
        assert_eq!((seen.total, seen.available), (1000, 500));
        assert_eq!(seen.pressure.map(|p| p.some), Some(2.0));
        assert!(within(&dir.path().join("v3"), &mut seen).is_err());
        let text = fs::read_to_string(dir.path().join("v2/memory.pressure")).unwrap();
        assert_eq!(stalled_us(&text), Some(1500));
    }

    #[test]
    fn the_group_that_counts_a_process() {
        let dir = tempfile::tempdir().unwrap();
        put(
            dir.path(),
            &[
                ("proc/1/cgroup", "4:memory:/a/b\n0::/c\n"),
                ("proc/2/cgroup", "0::/c\n"),
                ("proc/3/cgroup", "0::/d\n"),
                ("sys/fs/cgroup/c/memory.current", "1\n"),
            ],
        );
        let files = Files {
            proc: dir.path().join("proc"),
            sys: dir.path().join("sys"),
        };
        let root = dir.path().join("sys/fs/cgroup");
        assert_eq!(group_of(&files, 1), Some(root.join("memory/a/b")));
        assert_eq!(group_of(&files, 2), Some(root.join("c")));
        assert_eq!(group_of(&files, 3), None);
    }
}
