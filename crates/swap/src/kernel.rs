//! What the kernel says of swap and memory, and the two system calls.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// A line of `/proc/swaps`, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InUse {
    /// File or device.
    pub path: PathBuf,
    /// Bytes that can be swapped out to it.
    pub size: u64,
    /// Bytes that are.
    pub used: u64,
    /// Of several, the kernel takes that with the highest first.
    pub priority: i32,
}

/// What the kernel swaps to.
pub fn in_use() -> io::Result<Vec<InUse>> {
    Ok(parse(&std::fs::read_to_string("/proc/swaps")?))
}

fn parse(text: &str) -> Vec<InUse> {
    // Columns from the right: names may hold anything; blanks in them are written as \040.
    let lines = text.lines().skip(1);
    let each = lines.filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [name, _, size, used, priority] = fields[..] else {
            return None;
        };
        Some(InUse {
            path: PathBuf::from(unescaped(name)),
            size: size.parse::<u64>().ok()? << 10,
            used: used.parse::<u64>().ok()? << 10,
            priority: priority.parse().ok()?,
        })
    });
    each.collect()
}

/// The kernel writes blanks, tabs, line ends and backslashes as three octal digits.
fn unescaped(name: &str) -> std::ffi::OsString {
    use std::os::unix::ffi::OsStringExt;
    let bytes = name.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let octal = bytes
            .get(at + 1..at + 4)
            .filter(|_| bytes[at] == b'\\')
            .and_then(|d| std::str::from_utf8(d).ok())
            .and_then(|d| u8::from_str_radix(d, 8).ok());
        match octal {
            Some(byte) => {
                out.push(byte);
                at += 4;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    std::ffi::OsString::from_vec(out)
}

/// Bytes of memory that could be given to programs without swapping (`MemAvailable`).
pub fn available() -> io::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    field(&text, "MemAvailable:")
        .ok_or_else(|| io::Error::other("/proc/meminfo does not say what is available"))
}

/// A control group that limits the memory of its programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Its directory.
    pub dir: PathBuf,
    /// Bytes its programs, and those of the groups below, may have in memory.
    pub limit: u64,
    /// Bytes of it that are taken, without the pages of files that can be dropped.
    pub used: u64,
    /// Bytes of its programs that are swapped out.
    pub swapped: u64,
}

/// A larger limit is none: version 1 has a number of that size for it.
const LIMIT_MAX: u64 = 1 << 62;

/// The control groups below `root` that have a limit and something swapped out. The kernel charges
/// a page that is read back to the group that had it, whoever reads it, and kills programs of a
/// group that is at its limit. A group may go while it is looked at, and is not listed then.
pub fn limited_groups(root: &Path) -> Vec<Group> {
    let mut found = Vec::new();
    let mut dirs = vec![root.join("memory"), root.join("unified"), root.to_owned()];
    while let Some(dir) = dirs.pop() {
        found.extend(group(&dir));
        // The mounts of version 1 and of both together are in the list already.
        if dir == root && !root.join("cgroup.controllers").exists() {
            continue;
        }
        let entries = std::fs::read_dir(&dir).into_iter().flatten().flatten();
        let below = entries.filter(|e| e.file_type().is_ok_and(|kind| kind.is_dir()));
        dirs.extend(below.map(|e| e.path()));
    }
    found
}

fn group(dir: &Path) -> Option<Group> {
    let text = |name: &str| std::fs::read_to_string(dir.join(name)).ok();
    let number = |name: &str| text(name)?.trim().parse::<u64>().ok();
    let v2 = dir.join("memory.max").exists();
    let limit = number(if v2 {
        "memory.max"
    } else {
        "memory.limit_in_bytes"
    });
    let limit = limit.filter(|limit| *limit < LIMIT_MAX)?;
    let stat = text("memory.stat")?;
    let of = |name: &str| {
        let value = stat.lines().find_map(|l| l.strip_prefix(name))?;
        value.trim().parse::<u64>().ok()
    };
    let (used, files, swapped) = match v2 {
        true => (
            number("memory.current")?,
            ["inactive_file ", "active_file "],
            number("memory.swap.current")?,
        ),
        false => (
            number("memory.usage_in_bytes")?,
            ["total_inactive_file ", "total_active_file "],
            of("total_swap ")?,
        ),
    };
    let files: u64 = files.into_iter().filter_map(of).sum();
    (swapped > 0).then(|| Group {
        dir: dir.to_owned(),
        limit,
        used: used.saturating_sub(files),
        swapped,
    })
}

/// Bytes that were ever swapped out to files and devices (`pswpout`); what is compressed in memory is not among them.
pub fn swapped_out() -> io::Result<u64> {
    let text = std::fs::read_to_string("/proc/vmstat")?;
    let pages = pages_out(&text)
        .ok_or_else(|| io::Error::other("/proc/vmstat does not say what was swapped out"))?;
    // SAFETY: it has no preconditions.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    Ok(pages.saturating_mul(page.max(0) as u64))
}

fn pages_out(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix("pswpout "))?;
    line.trim().parse().ok()
}

fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(name))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

/// Whether the kernel tells the device what is free again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Discard {
    /// No.
    #[default]
    Off,
    /// All of it, when it is taken into use.
    Once,
    /// Also what becomes free later.
    Pages,
}

const SWAP_FLAG_PREFER: libc::c_int = 0x8000;
const SWAP_FLAG_PRIO_MASK: libc::c_int = 0x7fff;
const SWAP_FLAG_DISCARD: libc::c_int = 0x10000;
const SWAP_FLAG_DISCARD_ONCE: libc::c_int = 0x20000;
const SWAP_FLAG_DISCARD_PAGES: libc::c_int = 0x40000;

/// Highest priority there is.
pub const PRIORITY_MAX: u16 = SWAP_FLAG_PRIO_MASK as u16;

/// Has the kernel swap to `path` (`swapon(2)`).
pub fn on(path: &Path, priority: u16, discard: Discard) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let discard = match discard {
        Discard::Off => 0,
        Discard::Once => SWAP_FLAG_DISCARD | SWAP_FLAG_DISCARD_ONCE,
        Discard::Pages => SWAP_FLAG_DISCARD | SWAP_FLAG_DISCARD_PAGES,
    };
    let flags = SWAP_FLAG_PREFER | (libc::c_int::from(priority) & SWAP_FLAG_PRIO_MASK) | discard;
    // SAFETY: a string that ends with a zero and lives across the call.
    match unsafe { libc::swapon(path.as_ptr(), flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Reads all of it back and swaps there no more (`swapoff(2)`). A signal to this thread ends it with
/// `Interrupted`, and the area is used as before; the kernel looks for signals between two processes only.
pub fn off(path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: a string that ends with a zero and lives across the call.
    match unsafe { libc::swapoff(path.as_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_lists() {
        let text = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n\
            /dev/sda2                               partition\t8388604\t\t0\t\t-2\n\
            /srv/a\\040b\\134c.swap                 file\t\t1020\t\t512\t\t100\n";
        let found = parse(text);
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].priority, -2);
        assert_eq!(found[0].size, 8_388_604 << 10);
        assert_eq!(found[1].path, Path::new("/srv/a b\\c.swap"));
        assert_eq!((found[1].size, found[1].used), (1020 << 10, 512 << 10));
        assert_eq!(parse(""), []);
        assert_eq!(parse("x\ny z\n/a b c d e\n"), []);
    }

    #[test]
    fn what_was_swapped_out_is_counted_in_pages() {
        assert_eq!(
            pages_out("pswpin 3\npswpout 12\npswpout_zero 4\n"),
            Some(12)
        );
        assert_eq!(pages_out("pswpin 3\n"), None);
        assert_eq!(pages_out("pswpout x\n"), None);
        assert!(swapped_out().is_ok());
    }

    #[test]
    fn groups_of_both_versions_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let put = |group: &str, files: &[(&str, &str)]| {
            let group = dir.path().join(group);
            std::fs::create_dir_all(&group).unwrap();
            for (name, text) in files {
                std::fs::write(group.join(name), text).unwrap();
            }
        };
        let v1 = |limit| {
            [
                ("memory.limit_in_bytes", limit),
                ("memory.usage_in_bytes", "90\n"),
                (
                    "memory.stat",
                    "swap 0\ntotal_swap 70\ntotal_inactive_file 20\ntotal_active_file 10\n",
                ),
            ]
        };
        put("memory", &v1("9223372036854771712\n"));
        put("memory/machine/vm", &v1("100\n"));
        let v2 = |limit, swapped| {
            [
                ("memory.max", limit),
                ("memory.current", "50\n"),
                ("memory.swap.current", swapped),
                ("memory.stat", "inactive_file 5\nactive_file 0\n"),
            ]
        };
        put("unified/a", &v2("60\n", "7\n"));
        put("unified/b", &v2("max\n", "7\n"));
        put("unified/c", &v2("60\n", "0\n"));
        let mut found = limited_groups(dir.path());
        found.sort_by(|a, b| a.dir.cmp(&b.dir));
        let group = |at: &str, limit, used, swapped| Group {
            dir: dir.path().join(at),
            limit,
            used,
            swapped,
        };
        let expected = [
            group("memory/machine/vm", 100, 60, 70),
            group("unified/a", 60, 45, 7),
        ];
        assert_eq!(found, expected);
        assert_eq!(limited_groups(&dir.path().join("none")), []);
    }

    #[test]
    fn memory_is_said_in_bytes() {
        let text = "MemTotal: 10 kB\nMemAvailable:    7 kB\n";
        assert_eq!(field(text, "MemAvailable:"), Some(7 << 10));
        assert_eq!(field("", "MemAvailable:"), None);
    }
}
