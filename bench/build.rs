//! Which commit and which libblkio a benchmark was built from: its results name them.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rustc-env=HEARTH_COMMIT={}", commit());
    println!("cargo::rustc-env=BLKIO_VERSION={}", blkio());
}

/// The commit checked out, or why it is not known.
fn commit() -> String {
    let git = |args: &[&str]| {
        let out = Command::new("git").args(args).output().ok()?;
        let text = String::from_utf8(out.stdout).ok()?;
        out.status.success().then(|| text.trim().to_owned())
    };
    // The log of HEAD grows with every commit and checkout.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo::rerun-if-changed={log}");
    }
    git(&["rev-parse", "--short=12", "HEAD"])
        .unwrap_or_else(|| "unknown (built outside of a git repository)".to_owned())
}

fn blkio() -> String {
    let lock = Path::new("../Cargo.lock");
    println!("cargo::rerun-if-changed={}", lock.display());
    let text = std::fs::read_to_string(lock).unwrap_or_default();
    let mut lines = text.lines().skip_while(|l| *l != "name = \"blkio\"");
    lines
        .nth(1)
        .and_then(|l| l.strip_prefix("version = \""))
        .and_then(|l| l.strip_suffix('"'))
        .unwrap_or("of unknown version")
        .to_owned()
}
