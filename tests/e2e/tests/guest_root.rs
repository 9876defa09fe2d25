//! A guest that lives on a Hearth disk, and power that fails again and again.
//!
//! The guest writes files without pause, each made durable with fsync before it says so. Then its
//! power is cut, or the daemon is killed, or both. What the guest finds when it boots again must
//! be a file system without a fault, and in it every file it was told is safe.
//!
//! What this cannot show: a kill, of QEMU or of the daemon, leaves the host's page cache and the
//! device alive, so a device flush that the daemon forgot would cost nothing here. Power that fails
//! for the flash itself, with every order of writes that were not flushed, is the simulator's
//! (`hearth-sim`).

use anyhow::{Context, Result, ensure};
use hearth_rig::Hearth;
use hearth_rig::clients::run_ok;
use hearth_rig::daemon::path;
use hearth_rig::machine::{Machine, Plan, copy_root};
use std::collections::BTreeMap;

/// Rounds of one run, if `GUEST_ROUNDS` does not say so: each way of failing once.
const ROUNDS: u64 = 4;
/// Files the guest makes durable in a round before the power may fail.
const FILES_BEFORE: u64 = 20;
/// Names the guest writes to, over and over.
const NAMES: u64 = 30;

/// Writes files until told to stop. A file is a line with its number and the checksum of the rest,
/// then the rest; it is complete and durable before it takes its name, and the name is durable
/// before `DONE` is said. So a name holds what was last done, or something newer, whole.
fn writer(round: u64) -> String {
    format!(
        "mkdir -p /lab; n={round}00000; while [ ! -e /run/stop ]; do n=$((n+1)); f=/lab/f$((n%{NAMES})); \
         head -c $((n*977%150000+1)) /dev/urandom >/tmp/raw; h=$(sha256sum </tmp/raw); \
         {{ echo \"$n ${{h%% *}}\"; cat /tmp/raw; }} >$f.new && sync $f.new && mv $f.new $f && sync /lab || exit 1; \
         echo \"DONE ${{f#/lab/}} $n\" >/dev/console; done"
    )
}

/// Lists name and number of every file, after checking its content.
const READER: &str = "for f in /lab/f*; do case $f in *.new) continue;; esac; \
     { read -r n h; g=$(sha256sum); } <$f; \
     if [ \"${g%% *}\" = \"$h\" ]; then echo \"${f#/lab/} $n\"; else echo \"${f#/lab/} BAD\"; fi; done";

/// What the guest said is safe: the newest number of each name.
type Ledger = BTreeMap<String, u64>;

fn note_done(console: &str, ledger: &mut Ledger) {
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

fn done_in(console: &str, round: u64) -> u64 {
    let mut ledger = Ledger::new();
    note_done(console, &mut ledger);
    ledger
        .values()
        .filter_map(|n| n.checked_sub(round * 100_000))
        .max()
        .unwrap_or(0)
}

/// Every file the guest was told is safe is there, in that version or a newer one.
fn check(found: &str, ledger: &Ledger) -> Result<()> {
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
fn checked_clean(machine: &Machine, times: usize) -> Result<()> {
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

/// The judge must not nod at everything.
#[test]
fn lost_old_and_damaged_files_are_noticed() -> Result<()> {
    let mut ledger = Ledger::new();
    note_done(
        "DONE f1 7\nnoise\nDONE f2 8\nDONE f1 9\nDONE f2 1",
        &mut ledger,
    );
    ensure!(ledger == Ledger::from([("f1".into(), 9), ("f2".into(), 8)]));
    check("f1 9\nf2 11\nf3 1\n", &ledger)?;
    for wrong in [
        "f1 9\n",
        "f1 7\nf2 8\n",
        "f1 BAD\nf2 8\n",
        "f1 9\nf2 8\nf3 BAD\n",
    ] {
        ensure!(check(wrong, &ledger).is_err(), "{wrong}");
    }
    Ok(())
}

#[test]
fn fsynced_files_survive_power_cuts_and_kills() -> Result<()> {
    let rounds = std::env::var("GUEST_ROUNDS")
        .ok()
        .map_or(Ok(ROUNDS), |r| r.parse())
        .context("GUEST_ROUNDS is no number")?;
    let mut hearth = Hearth::serving("256M")?;
    let origin = hearth.dir().join("root.img");
    copy_root(&origin)?;
    hearth.add("root", path(&origin), &[])?;
    let mut plan = Plan::new(1).disk(&hearth, "root", "vhost-user")?;
    plan.words = "hearth.fsck".into();
    let mut ledger = Ledger::new();
    let mut machine = Machine::boot(hearth.dir(), "g", &plan)?;
    for round in 1..=rounds {
        // Every way of failing in write-back, then every way in the next mode.
        let mode = ["write-back", "write-through", "write-around"][(round as usize - 1) / 4 % 3];
        hearth.ok(&["disk", "set", "root", "--mode", mode])?;
        let _writer = machine.start(&writer(round))?;
        let enough = |machine: &mut Machine, n: u64| {
            machine.wait_console("files are safe", |console| {
                (done_in(console, round) >= n).then_some(())
            })
        };
        enough(&mut machine, FILES_BEFORE)?;
        let mut fscks = 1;
        let how = match round % 4 {
            1 => {
                note_done(&machine.cut_power()?, &mut ledger);
                machine = Machine::boot(hearth.dir(), "g", &plan)?;
                "the guest's power"
            }
            2 => {
                // The host's power: the guest goes down while it waits for the daemon.
                hearth.kill9()?;
                note_done(&machine.cut_power()?, &mut ledger);
                hearth.start()?;
                machine = Machine::boot(hearth.dir(), "g", &plan)?;
                "the daemon, then the guest's power"
            }
            3 => {
                note_done(&machine.cut_power()?, &mut ledger);
                hearth.kill9()?;
                hearth.start()?;
                machine = Machine::boot(hearth.dir(), "g", &plan)?;
                "the guest's power, then the daemon"
            }
            _ => {
                // The guest outlives the daemon, goes on, and is reset.
                hearth.kill9()?;
                hearth.start()?;
                let so_far = done_in(&machine.console(), round);
                enough(&mut machine, so_far + FILES_BEFORE)?;
                machine.reset()?;
                note_done(&machine.console(), &mut ledger);
                fscks = machine.console().matches("HEARTH-GUEST FSCK").count();
                ensure!(fscks >= 2, "it was not checked after the reset");
                "the daemon, then a reset"
            }
        };
        checked_clean(&machine, fscks).with_context(|| format!("after {how}"))?;
        check(&machine.run(READER)?, &ledger).with_context(|| format!("after {how}, {mode}"))?;
        machine.no_disk_errors()?;
        println!(
            "round {round}, {mode}: {how}; {} names are right",
            ledger.len()
        );
    }
    ensure!(ledger.len() > 10, "the guest wrote too little: {ledger:?}");
    machine.shut_down()?;

    // With everything destaged the origin alone is the disk.
    hearth.ok(&["disk", "flush", "root"])?;
    hearth.stop()?;
    let origin = path(&origin);
    run_ok("e2fsck", &["-f", "-n", origin], hearth.dir())?;
    for (name, done) in &ledger {
        let copy = hearth.dir().join("copy");
        let request = format!("dump /lab/{name} {}", path(&copy));
        run_ok("debugfs", &["-R", &request, origin], hearth.dir())?;
        let content = std::fs::read(&copy).with_context(|| format!("{name} on the origin"))?;
        let line = content
            .iter()
            .position(|b| *b == b'\n')
            .with_context(|| format!("{name} on the origin has no first line"))?;
        let head = String::from_utf8_lossy(&content[..line]).into_owned();
        let (n, sum) = head.split_once(' ').context("no checksum")?;
        ensure!(n.parse::<u64>()? >= *done, "{name} on the origin is old");
        std::fs::write(&copy, &content[line + 1..])?;
        let got = run_ok("sha256sum", &[path(&copy)], hearth.dir())?;
        ensure!(got.starts_with(sum), "{name} on the origin is wrong");
    }
    ensure!(!hearth.log().contains("cut off"), "{}", hearth.log());
    Ok(())
}
