//! A guest whose disk lies on a datastore, one hop further than the others: its image is a file that QEMU opens over NFS, as a
//! hypervisor does that mounts Hearth's datastore. The guest makes files durable without pause; the daemon is killed, the
//! guest's power is cut, one of two directories is taken away and brought back. What the guest was told is safe is
//! there afterwards, and its file system has no fault, in the guest and in the image without Hearth.
//!
//! QEMU's NFS client asks a portmapper for ports and cannot be told any: the tests run once more in a network of their
//! own, in which Hearth is the portmapper.
//!
//! Exclusive: processors

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use crate::safe_files::{
    Ledger, READER, check, check_image, checked_clean, done_in, note_done, writer,
};
use crate::stored::Lab;
use anyhow::{Context, Result, ensure};
use hearth_rig::clients::run_ok;
use hearth_rig::daemon::path;
use hearth_rig::machine::{GUEST_LIMIT, Machine, Plan, copy_root};
use hearth_rig::wait::until;
use serde_json::Value;

/// That this is the run in a network of its own.
const INSIDE: &str = "HEARTH_TEST_INSIDE";
/// The only address there: none of the loopback ones, for on those nobody is a portmapper.
const HOST: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
const LISTEN: &str = "192.0.2.1:2049";
const NETWORK: &str = r#"
set -e
mount -t tmpfs tmpfs /run
ip link set lo up
ip addr add 192.0.2.1/32 dev lo
exec "$0" --exact "$1" --nocapture
"#;
/// Files that have to be safe before the next thing happens.
const FILES: u64 = 12;

/// True in the network of its own; else the test was run there and has passed, or cannot be run here.
fn inside(test: &str) -> Result<bool> {
    if env::var_os(INSIDE).is_some() {
        return Ok(true);
    }
    // Its QEMU has to have an NFS client.
    let asked = Command::new("qemu-img")
        .args(["info", "nfs://192.0.2.1/none/none"])
        .output()
        .context("cannot run qemu-img: install qemu-utils (scripts/setup.sh test)")?;
    if String::from_utf8_lossy(&asked.stderr).contains("Unknown protocol") {
        eprintln!("{test}: skipped: QEMU has no NFS client (package qemu-block-extra)");
        return Ok(false);
    }
    let mut command = Command::new("unshare");
    command.args(["--net", "--mount", "sh", "-c", NETWORK]);
    let output = command
        .arg(env::current_exe()?)
        .arg(test)
        .env(INSIDE, "1")
        .output()
        .context("unshare")?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    if let Some(why) = said.lines().find(|line| line.contains("not permitted")) {
        eprintln!("{test}: skipped: {why}");
        return Ok(false);
    }
    ensure!(said.contains("1 passed"), "{said}");
    for line in said.lines().filter(|line| line.starts_with("second hop:")) {
        eprintln!("{line}");
    }
    Ok(false)
}

/// A guest on a datastore, and what it was told is safe.
struct Hop {
    lab: Lab,
    plan: Plan,
    ledger: Ledger,
}

impl Hop {
    fn new(lab: Lab) -> Result<Hop> {
        let mut plan = Plan::new(1).nfs_image(HOST, "/vms/root.img");
        plan.words = "hearth.fsck".into();
        let ledger = Ledger::new();
        Ok(Hop { lab, plan, ledger })
    }

    /// Powers the guest on. What it finds has to be what it was told.
    fn boot(&self) -> Result<Machine> {
        self.lab.address()?;
        let mut machine = Machine::boot(self.lab.hearth.dir(), "g", &self.plan)
            .with_context(|| self.lab.hearth.log())?;
        checked_clean(&machine, 1)?;
        if !self.ledger.is_empty() {
            check(&machine.run(READER)?, &self.ledger)?;
        }
        Ok(machine)
    }

    /// Waits until so many more files are safe.
    fn more(&self, machine: &mut Machine, round: u64) -> Result<()> {
        let goal = done_in(&machine.console(), round) + FILES;
        let done = machine.wait_console("files are safe", |console| {
            (done_in(console, round) >= goal).then_some(())
        });
        done.with_context(|| self.lab.hearth.log())
    }

    fn restart(&mut self) -> Result<()> {
        self.lab.hearth.kill9()?;
        self.lab.hearth.start()?;
        self.lab.address().map(drop)
    }

    /// Stops everything when everything is in the files.
    fn stop(&mut self, machine: Machine) -> Result<()> {
        machine.shut_down()?;
        self.lab.hearth.ok(&["datastore", "flush", "vms"])?;
        self.lab.hearth.stop()?;
        ensure!(self.ledger.len() > 10, "too few files: {:?}", self.ledger);
        Ok(())
    }
}

/// Rounds of one run, if `GUEST_ROUNDS` does not say so.
fn rounds() -> Result<u64> {
    let rounds = env::var("GUEST_ROUNDS");
    let rounds = rounds.map_or(Ok(1), |rounds| rounds.parse());
    rounds.context("GUEST_ROUNDS is no number")
}

/// Rounds in which the guest outlives the daemon and loses its power; in every second one the daemon dies with it.
#[test]
fn a_guest_on_a_datastore_outlives_kills_and_power_cuts() -> Result<()> {
    if !inside("guest_second_hop::a_guest_on_a_datastore_outlives_kills_and_power_cuts")? {
        return Ok(());
    }
    let lab = Lab::with(&[], None, LISTEN)?;
    allow(&lab)?;
    let image = lab.vms.join("root.img");
    copy_root(&image)?;
    let mut hop = Hop::new(lab)?;
    let mut machine = hop.boot()?;
    for round in 1..=rounds()? {
        let _writer = machine.start(&writer(round))?;
        hop.more(&mut machine, round)?;
        hop.restart()?;
        hop.more(&mut machine, round)?;
        machine.no_disk_errors()?;
        if round % 2 == 0 {
            hop.lab.hearth.kill9()?;
        }
        note_done(&machine.cut_power()?, &mut hop.ledger);
        if round % 2 == 0 {
            hop.lab.hearth.start()?;
        }
        machine = hop.boot().with_context(|| format!("round {round}"))?;
    }
    hop.stop(machine)?;
    check_image(&image, &hop.ledger, hop.lab.hearth.dir())?;
    eprintln!("second hop: {} names are right", hop.ledger.len());
    Ok(())
}

fn allow(lab: &Lab) -> Result<()> {
    let client = format!("{HOST}=rw,root,insecure");
    let words = ["datastore", "set", "vms", "--client", &client];
    lab.hearth.ok(&words).map(drop)
}

fn wait_states(lab: &Lab, wanted: [&str; 2]) -> Result<()> {
    let states = |shown: &Value| -> Option<Vec<String>> {
        let trees = shown["trees"].as_array()?.iter();
        Some(trees.map(|tree| tree["state"].to_string()).collect())
    };
    let wanted = wanted.map(|state| format!("\"{state}\""));
    let reached = until("the trees are as they should be", GUEST_LIMIT, || {
        (states(&lab.show().ok()?)? == wanted).then_some(())
    });
    reached.with_context(|| format!("{:?}\n{}", lab.show(), lab.hearth.log()))
}

/// A directory of two, which goes and comes.
struct Gone {
    place: PathBuf,
    away: PathBuf,
}

impl Gone {
    fn take(place: &Path) -> Result<Gone> {
        let away = place.with_extension("away");
        let place = place.to_owned();
        fs::rename(&place, &away)?;
        Ok(Gone { place, away })
    }

    fn back(self) -> Result<()> {
        Ok(fs::rename(self.away, self.place)?)
    }
}

/// Over two directories, of which the first goes and comes back under load, the daemon being killed while it gets what it
/// missed; then the second is away when the power goes. In the end either alone has the guest's disk.
#[test]
fn a_guest_on_two_directories_outlives_the_loss_of_either() -> Result<()> {
    if !inside("guest_second_hop::a_guest_on_two_directories_outlives_the_loss_of_either")? {
        return Ok(());
    }
    let fill = |dir: &Path| copy_root(&dir.join("root.img"));
    let lab = match Lab::mirrored_with(LISTEN, &HOST.to_string(), fill) {
        Err(e) if format!("{e:#}").contains("cannot be marked as a tree") => {
            eprintln!("second hop: skipped: {e:#}");
            return Ok(());
        }
        other => other?,
    };
    let dirs = ["a", "b"].map(|name| lab.hearth.dir().join(name));
    let mut hop = Hop::new(lab)?;
    let mut machine = hop.boot()?;
    for round in 1..=rounds()? {
        let writer = machine.start(&writer(round))?;
        wait_states(&hop.lab, ["current", "current"])?;
        hop.more(&mut machine, round)?;
        let gone = Gone::take(&dirs[0])?;
        wait_states(&hop.lab, ["out", "current"])?;
        hop.more(&mut machine, round)?;
        gone.back()?;
        until("the tree is on its way back", GUEST_LIMIT, || {
            let shown = hop.lab.show().ok()?;
            (shown["trees"][0]["state"] != "out").then_some(())
        })?;
        hop.restart()?;
        wait_states(&hop.lab, ["current", "current"])?;
        hop.more(&mut machine, round)?;
        let gone = Gone::take(&dirs[1])?;
        wait_states(&hop.lab, ["current", "out"])?;
        hop.more(&mut machine, round)?;
        machine.no_disk_errors()?;
        ensure!(!machine.has_ended(&writer)?, "the writer has ended");
        note_done(&machine.cut_power()?, &mut hop.ledger);
        if round % 2 == 0 {
            hop.restart()?;
        }
        gone.back()?;
        machine = hop.boot().with_context(|| format!("round {round}"))?;
    }
    wait_states(&hop.lab, ["current", "current"])?;
    hop.stop(machine)?;
    let images = dirs.map(|dir| dir.join("root.img"));
    for image in &images {
        check_image(image, &hop.ledger, hop.lab.hearth.dir())?;
    }
    let [a, b] = images.each_ref().map(|image| path(image));
    run_ok("cmp", &[a, b], hop.lab.hearth.dir())?;
    eprintln!(
        "second hop: {} names are right in either directory",
        hop.ledger.len()
    );
    Ok(())
}
