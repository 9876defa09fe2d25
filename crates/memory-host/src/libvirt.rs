//! Guests that libvirt runs, all asked with one call of `virsh`. It keeps their QMP sockets for
//! itself.

use std::io;

use crate::ask::ask;
use crate::line::PATIENCE;
use crate::qmp::{Told, believed};

/// What libvirt notes of the domains that run.
const NOTES: &str = "/run/libvirt/qemu";

/// A domain's process, as libvirt notes it.
pub fn pid(domain: &str) -> Option<u32> {
    let text = std::fs::read_to_string(format!("{NOTES}/{domain}.pid")).ok()?;
    text.trim().parse().ok()
}

/// What the domains that run tell. A domain that does not answer is passed over: what libvirt
/// itself knows of it is told. An error where libvirt is not there.
pub fn look() -> io::Result<Vec<(String, Told)>> {
    let args = [
        "--quiet",
        "domstats",
        "--balloon",
        "--nowait",
        "--list-running",
    ];
    let stats = ask("virsh", &args, PATIENCE)?;
    let each = domains(&stats).into_iter().map(|(name, stats)| {
        let xml = std::fs::read_to_string(format!("{NOTES}/{name}.xml")).ok();
        let told = Told {
            pid: pid(name),
            ..told(&stats, xml.as_deref())
        };
        (name.to_owned(), told)
    });
    Ok(each.collect())
}

/// The lines of each domain, by its name.
fn domains(text: &str) -> Vec<(&str, String)> {
    let mut found: Vec<(&str, String)> = Vec::new();
    for line in text.lines() {
        let name = line
            .strip_prefix("Domain: '")
            .and_then(|l| l.strip_suffix('\''));
        match (name, found.last_mut()) {
            (Some(name), _) => found.push((name, String::new())),
            (None, Some((_, stats))) => {
                stats.push_str(line.trim());
                stats.push('\n');
            }
            (None, None) => {}
        }
    }
    found
}

/// Figures are in KiB. `xml` is what libvirt notes of the domain, where that can be read.
fn told(stats: &str, xml: Option<&str>) -> Told {
    let of = |name: &str| -> Option<u64> {
        let line = stats
            .lines()
            .find_map(|l| l.strip_prefix("balloon.")?.strip_prefix(name));
        line?.strip_prefix('=')?.trim().parse().ok()
    };
    let bytes = |name: &str| of(name)?.checked_mul(1024).and_then(believed);
    let balloon = xml
        .and_then(|xml| xml.split("<memballoon").nth(1))
        .map(|rest| {
            let end = rest.find("</memballoon>").or_else(|| rest.find("/>"));
            &rest[..end.unwrap_or(rest.len())]
        });
    let has = |word: &str| balloon.is_some_and(|b| b.contains(word));
    // Without the notes a balloon is there if it has told something.
    let there = match xml {
        Some(_) => balloon.is_some() && !has("model='none'"),
        None => of("last-update").is_some(),
    };
    Told {
        pid: None,
        assigned: bytes("maximum").unwrap_or(0),
        balloon: bytes("current").filter(|_| there),
        available: bytes("usable").or_else(|| bytes("unused")),
        swap_in: bytes("swap_in"),
        at: of("last-update").unwrap_or(0),
        reporting: (there && xml.is_some()).then(|| has("freePageReporting='on'")),
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
    fn one_answer_tells_of_all_domains() {
        let text = "Domain: 'vm'\n  balloon.current=1048576\n  balloon.maximum=2097152\n  balloon.swap_in=12\n  balloon.swap_out=0\n  balloon.unused=100\n  balloon.available=1000000\n  balloon.usable=600\n  balloon.last-update=1700000000\n  balloon.rss=500000\n\nDomain: 'it's'\n  balloon.current=1024\n  balloon.maximum=1024\n";
        let all = domains(text);
        let names: Vec<&str> = all.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["vm", "it's"]);
        let xml = "<domstatus><domain><devices><memballoon model='virtio' freePageReporting='on'>\n<stats period='5'/>\n</memballoon></devices></domain></domstatus>";
        let found = told(&all[0].1, Some(xml));
        assert_eq!(
            found,
            Told {
                pid: None,
                assigned: 2 << 30,
                balloon: Some(1 << 30),
                available: Some(600 << 10),
                swap_in: Some(12 << 10),
                at: 1_700_000_000,
                reporting: Some(true),
                polling: Some(5),
            }
        );
        let none = told(
            &all[0].1,
            Some("<devices><memballoon model='none'/></devices>"),
        );
        assert_eq!(
            (none.balloon, none.reporting, none.polling),
            (None, None, None)
        );
        // One that does not answer: libvirt says what it knows itself.
        let silent = told(&all[1].1, None);
        assert_eq!(
            (silent.assigned, silent.balloon, silent.at),
            (1 << 20, None, 0)
        );
        assert_eq!(told("", None).assigned, 0);
        assert_eq!(domains("x\n"), []);
        // A guest makes up its statistics.
        let lies = "balloon.usable=18446744073709551615\nballoon.swap_in=18014398509481984\nballoon.maximum=18446744073709551615\n";
        let found = told(lies, Some(xml));
        assert_eq!(
            (found.assigned, found.available, found.swap_in),
            (0, None, None)
        );
    }
}
