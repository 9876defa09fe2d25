//! Guests that libvirt runs, asked with `virsh`. It keeps their QMP sockets for itself.

use std::io;
use std::time::Duration;

use crate::ask::ask;
use crate::qmp::{Told, believed};

/// Longest an answer may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// The domains that run. An error where libvirt is not there.
pub fn domains() -> io::Result<Vec<String>> {
    let text = ask("virsh", &["--quiet", "list", "--name"], PATIENCE)?;
    let names = text.lines().map(str::trim).filter(|l| !l.is_empty());
    Ok(names.map(str::to_owned).collect())
}

/// A domain's process, as libvirt notes it.
pub fn pid(domain: &str) -> Option<u32> {
    let text = std::fs::read_to_string(format!("/run/libvirt/qemu/{domain}.pid")).ok()?;
    text.trim().parse().ok()
}

/// What a domain tells.
pub fn look(domain: &str) -> io::Result<Told> {
    let stats = ask("virsh", &["--quiet", "dommemstat", domain], PATIENCE)?;
    let info = ask("virsh", &["--quiet", "dominfo", domain], PATIENCE)?;
    let xml = ask("virsh", &["--quiet", "dumpxml", domain], PATIENCE)?;
    Ok(told(&stats, &info, &xml))
}

/// Figures are in KiB.
fn told(stats: &str, info: &str, xml: &str) -> Told {
    let bytes = |kib: u64| kib.checked_mul(1024).and_then(believed);
    let of = |name: &str| crate::kernel::field(stats, name).and_then(bytes);
    let most = info
        .lines()
        .find_map(|l| l.strip_prefix("Max memory:"))
        .and_then(|l| l.split_whitespace().next()?.parse().ok())
        .and_then(bytes)
        .unwrap_or(0);
    let balloon = xml.split("<memballoon").nth(1).map(|rest| {
        let end = rest.find("</memballoon>").or_else(|| rest.find("/>"));
        &rest[..end.unwrap_or(rest.len())]
    });
    let has = |word: &str| balloon.is_some_and(|b| b.contains(word));
    let there = balloon.is_some() && !has("model='none'");
    Told {
        assigned: most,
        balloon: of("actual").filter(|_| there),
        available: of("usable").or_else(|| of("unused")),
        swap_in: of("swap_in"),
        at: crate::kernel::field(stats, "last_update").unwrap_or(0),
        reporting: there.then(|| has("freePageReporting='on'")),
        shared: xml.contains("<access mode='shared'"),
        polling: balloon.and_then(|b| {
            let rest = b.split("<stats period='").nth(1)?;
            rest.split('\'').next()?.parse().ok()
        }),
    }
}

/// Leaves a domain so many bytes, until it is stopped.
pub fn set_balloon(domain: &str, bytes: u64) -> io::Result<()> {
    let kib = (bytes >> 10).to_string();
    ask(
        "virsh",
        &["--quiet", "setmem", domain, &kib, "--live"],
        PATIENCE,
    )
    .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_virsh_prints() {
        let stats = "actual 1048576\nswap_in 12\nswap_out 0\nmajor_fault 9\nunused 100\navailable 1000000\nusable 600\nlast_update 1700000000\nrss 500000\n";
        let info = "Id:             1\nName:           vm\nMax memory:     2097152 KiB\nUsed memory:    1048576 KiB\n";
        let xml = "<domain><memoryBacking><access mode='shared'/></memoryBacking><devices><memballoon model='virtio' freePageReporting='on'>\n<stats period='5'/>\n</memballoon></devices></domain>";
        let found = told(stats, info, xml);
        assert_eq!(
            found,
            Told {
                assigned: 2 << 30,
                balloon: Some(1 << 30),
                available: Some(600 << 10),
                swap_in: Some(12 << 10),
                at: 1_700_000_000,
                reporting: Some(true),
                shared: true,
                polling: Some(5),
            }
        );
        let none = told(stats, info, "<devices><memballoon model='none'/></devices>");
        assert_eq!(
            (none.balloon, none.reporting, none.polling),
            (None, None, None)
        );
        assert_eq!(told("", "", "").assigned, 0);
        // A guest makes up its statistics.
        let lies = "usable 18446744073709551615\nswap_in 18014398509481984\n";
        let found = told(lies, "Max memory:     18446744073709551615 KiB\n", xml);
        assert_eq!(
            (found.assigned, found.available, found.swap_in),
            (0, None, None)
        );
    }
}
