//! Files that a guest makes durable, one after the other, and says so on its console; and a judge of what is left of
//! them after the guest's power was cut.
#![allow(dead_code)]

use anyhow::{Context, Result, ensure};
use hearth_rig::clients::run_ok;
use hearth_rig::daemon::path;
use hearth_rig::machine::Machine;
use std::collections::BTreeMap;
use std::path::Path;

/// Names the guest writes to, over and over.
const NAMES: u64 = 30;

/// Writes files until told to stop. A file is a line with its number and the checksum of the rest,
/// then the rest; it is complete and durable before it takes its name, and the name is durable
/// before `DONE` is said. So a name holds what was last done, or something newer, whole.
pub fn writer(round: u64) -> String {
    format!(
        "mkdir -p /lab; n={round}00000; while [ ! -e /run/stop ]; do n=$((n+1)); f=/lab/f$((n%{NAMES})); \
         head -c $((n*977%150000+1)) /dev/urandom >/tmp/raw; h=$(sha256sum </tmp/raw); \
         {{ echo \"$n ${{h%% *}}\"; cat /tmp/raw; }} >$f.new && sync $f.new && mv $f.new $f && sync /lab || exit 1; \
         echo \"DONE ${{f#/lab/}} $n\" >/dev/console; done"
    )
}

/// Lists name and number of every file, after checking its content.
pub const READER: &str = "for f in /lab/f*; do case $f in *.new) continue;; esac; \
     { read -r n h; g=$(sha256sum); } <$f; \
     if [ \"${g%% *}\" = \"$h\" ]; then echo \"${f#/lab/} $n\"; else echo \"${f#/lab/} BAD\"; fi; done";

/// What the guest said is safe: the newest number of each name.
pub type Ledger = BTreeMap<String, u64>;

pub fn note_done(console: &str, ledger: &mut Ledger) {
    // The last line may be cut off in the middle of a number.
    let whole = &console[..console.rfind('\n').unwrap_or(0)];
    for line in whole.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        if let ["DONE", name, n] = words[..]
            && let Ok(n) = n.parse::<u64>()
        {
            let newest = ledger.entry(name.to_owned()).or_default();
            *newest = n.max(*newest);
        }
    }
}

pub fn done_in(console: &str, round: u64) -> u64 {
    let mut ledger = Ledger::new();
    note_done(console, &mut ledger);
    ledger
        .values()
        .filter_map(|n| n.checked_sub(round * 100_000))
        .max()
        .unwrap_or(0)
}

/// Every file the guest was told is safe is there, in that version or a newer one.
pub fn check(found: &str, ledger: &Ledger) -> Result<()> {
    let files: BTreeMap<&str, &str> = found.lines().filter_map(|l| l.split_once(' ')).collect();
    for (name, done) in ledger {
        let n = files
            .get(name.as_str())
            .with_context(|| format!("{name} is gone; found:\n{found}"))?;
        let n: u64 = n
            .parse()
            .with_context(|| format!("the content of {name} is wrong; found:\n{found}"))?;
        ensure!(n >= *done, "{name} is version {n}, but {done} was safe");
    }
    ensure!(
        !found.contains("BAD"),
        "a file's content is wrong:\n{found}"
    );
    Ok(())
}

/// The last verdict of the check before the root was mounted read-write.
pub fn checked_clean(machine: &Machine, times: usize) -> Result<()> {
    let console = machine.console();
    let verdicts: Vec<&str> = console
        .lines()
        .filter_map(|l| l.strip_prefix("HEARTH-GUEST FSCK "))
        .collect();
    ensure!(
        verdicts == vec!["0"; times],
        "the file system has faults after its journal was replayed ({verdicts:?}):\n{console}"
    );
    Ok(())
}

/// A root file system without its guest: e2fsck finds no fault in it, and every file that is safe is there. Copies of
/// files go below `dir`.
pub fn check_image(image: &Path, ledger: &Ledger, dir: &Path) -> Result<()> {
    let shown = path(image);
    run_ok("e2fsck", &["-f", "-n", shown], dir)?;
    let copy = dir.join("copy");
    for (name, done) in ledger {
        let request = format!("dump /lab/{name} {}", path(&copy));
        run_ok("debugfs", &["-R", &request, shown], dir)?;
        let content = std::fs::read(&copy).with_context(|| format!("{name} in {shown}"))?;
        let line = content
            .iter()
            .position(|b| *b == b'\n')
            .with_context(|| format!("{name} in {shown} has no first line"))?;
        let head = String::from_utf8_lossy(&content[..line]).into_owned();
        let (n, sum) = head.split_once(' ').context("no checksum")?;
        ensure!(n.parse::<u64>()? >= *done, "{name} in {shown} is old");
        std::fs::write(&copy, &content[line + 1..])?;
        let got = run_ok("sha256sum", &[path(&copy)], dir)?;
        ensure!(got.starts_with(sum), "{name} in {shown} is wrong");
        std::fs::remove_file(&copy)?;
    }
    Ok(())
}
