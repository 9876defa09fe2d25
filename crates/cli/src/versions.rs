//! Which libvirt and QEMU are installed, as far as they say.

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde::Serialize;

/// Longest a program may take to say its version.
const LIMIT: Duration = Duration::from_secs(5);
/// How often is looked whether it has.
const POLL: Duration = Duration::from_millis(10);
/// Most of what it says that is read.
const TEXT_MAX: u64 = 4096;

/// A version, as far as it matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Version {
    /// Before the first dot.
    pub major: u32,
    /// Behind it.
    pub minor: u32,
}

/// libvirt with whose NBD disks `<reconnect delay=…>` has an effect. Older ones drop it in silence.
pub const LIBVIRT_RECONNECTS: Version = Version { major: 9, minor: 1 };

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The libvirt of this host.
pub fn libvirt() -> Option<Version> {
    first(&["libvirtd", "virtqemud", "virsh"])
}

/// The QEMU of this host.
pub fn qemu() -> Option<Version> {
    first(&["qemu-system-x86_64", "/usr/libexec/qemu-kvm", "qemu-kvm"])
}

fn first(programs: &[&str]) -> Option<Version> {
    programs.iter().find_map(|program| parse(&said(program)?))
}

/// What a program says of its version, if it does within [`LIMIT`].
fn said(program: &str) -> Option<String> {
    let mut child = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let end = Instant::now() + LIMIT;
    while matches!(child.try_wait(), Ok(None)) {
        if Instant::now() >= end {
            // It ends, or it has ended.
            let _ = child.kill();
            let _ = child.wait();
            return None;
        }
        std::thread::sleep(POLL);
    }
    let mut text = String::new();
    let stdout = child.stdout.take()?;
    stdout.take(TEXT_MAX).read_to_string(&mut text).ok()?;
    Some(text)
}

/// The first word that begins with two numbers and a dot.
fn parse(text: &str) -> Option<Version> {
    text.split_whitespace().find_map(|word| {
        let mut parts = word.split('.');
        let major = parts.next()?.parse().ok()?;
        let digits: String = (parts.next()?.chars())
            .take_while(char::is_ascii_digit)
            .collect();
        Some(Version {
            major,
            minor: digits.parse().ok()?,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_as_they_are_said() {
        let version = |major, minor| Some(Version { major, minor });
        assert_eq!(parse("9.0.0\n"), version(9, 0));
        assert_eq!(parse("libvirtd (libvirt) 10.10.0"), version(10, 10));
        assert_eq!(
            parse("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7)"),
            version(7, 2)
        );
        assert_eq!(parse("QEMU emulator version 9.2.50-rc1"), version(9, 2));
        assert_eq!(parse("no version here."), None);
        assert_eq!(said("no-such-program-here"), None);
    }

    #[test]
    fn debian_12_does_not_reconnect() {
        assert!(parse("9.0.0").unwrap() < LIBVIRT_RECONNECTS);
        assert!(parse("10.0.0").unwrap() > LIBVIRT_RECONNECTS);
    }
}
