//! The machine's memory.

/// Bytes of RAM that programs may still take without others being paged out or ended, as the
/// kernel estimates it; `None` if it does not say.
pub fn available() -> Option<u64> {
    parse(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn parse(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_says() {
        let text = "MemTotal:       32768 kB\nMemFree:  1 kB\nMemAvailable:      24576 kB\n";
        assert_eq!(parse(text), Some(24 << 20));
        assert_eq!(parse("MemTotal:       32768 kB\n"), None);
        assert!(available() > Some(0));
    }
}
