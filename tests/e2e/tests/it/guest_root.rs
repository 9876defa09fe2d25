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
//!
//! Exclusive: processors

use crate::safe_files::{
    Ledger, READER, check, check_image, checked_clean, done_in, note_done, writer,
};
use anyhow::{Context, Result, ensure};
use hearth_rig::Hearth;
use hearth_rig::daemon::path;
use hearth_rig::machine::{Machine, Plan, copy_root};

/// Rounds of one run, if `GUEST_ROUNDS` does not say so: each way of failing once.
const ROUNDS: u64 = 4;
/// Files the guest makes durable in a round before the power may fail.
const FILES_BEFORE: u64 = 20;
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
                machine.reset().with_context(|| hearth.log())?;
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
    check_image(&origin, &ledger, hearth.dir())?;
    ensure!(!hearth.log().contains("cut off"), "{}", hearth.log());
    Ok(())
}
