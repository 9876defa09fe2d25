//! A storage VM: Hearth inside a guest, with a disk and a piece of flash handed through to it, serves a datastore over NFS
//! and loses its power.
//!
//! Power is cut by killing QEMU: what was only in the guest's page cache is gone, and so is what Hearth had in memory. What was
//! answered must be there afterwards, name by name and byte by byte; what was under way may be, whole or
//! not at all, but for writes of several blocks, of which each may be.
//!
//! Exclusive: processors

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::stored::changes::{Change, Files, seen, sketch};
use crate::stored::nfs::Client;
use crate::stored::{lasting_address, root};
use anyhow::{Context, Result, ensure};
use hearth_rig::daemon::{binary, path};
use hearth_rig::machine::{Machine, Plan};
use hearth_rig::wait::until;

/// Emulated guests on a busy machine are slow.
const LIMIT: Duration = Duration::from_secs(300);
/// Names of large files, and of one that is none.
const NAMES: &[&str] = &["a.img", "b.log", "c.img"];
/// Longest that a file becomes.
const SIZE: u64 = 400_000;

/// The server.
struct Storage {
    dir: tempfile::TempDir,
    address: SocketAddr,
    plan: Plan,
}

impl Storage {
    fn new() -> Result<Storage> {
        let dir = tempfile::tempdir_in(binary()?.parent().context("a directory")?)?;
        let place = |name: &str| dir.path().join(name);
        // The program comes on a disk of its own, without what only debuggers read.
        fs::create_dir(place("program"))?;
        let hearth = place("program").join("hearth");
        run(
            "strip",
            &["--strip-debug", "-o", path(&hearth), path(&binary()?)],
        )?;
        for (name, size) in [("program.img", 256), ("flash.img", 192), ("data.img", 192)] {
            File::create(place(name))?.set_len(size << 20)?;
        }
        let program = place("program.img");
        run(
            "mke2fs",
            &[
                "-q",
                "-t",
                "ext4",
                "-d",
                path(&place("program")),
                path(&program),
            ],
        )?;
        run("mke2fs", &["-q", "-t", "ext4", path(&place("data.img"))])?;
        let address = lasting_address()?;
        let plan = Plan::new(2).own_root()?;
        let plan = ["program.img", "flash.img", "data.img"]
            .iter()
            .fold(plan, |plan, name| plan.image(&place(name)));
        let plan = plan.reached_at(address, 2049);
        Ok(Storage { dir, address, plan })
    }

    /// Powers it on and starts Hearth; the first time it makes a pool and a datastore.
    fn boot(&self, first: bool) -> Result<Machine> {
        let mut machine = Machine::boot(self.dir.path(), "s", &self.plan)?;
        machine.run("modprobe virtio_net && ip link set lo up && ip link set eth0 up && ip addr add 10.0.2.15/24 dev eth0 && ip route add default via 10.0.2.2")?;
        machine.run("mkdir -p /program /data && mount -o ro /dev/vdb /program && mount /dev/vdd /data && mkdir -p /data/vms")?;
        if first {
            machine.run("/program/hearth pool create --flash /dev/vdc")?;
        }
        machine.run("(/program/hearth serve --flash /dev/vdc --run-dir /run/hearth --state-dir /data/state >/run/log 2>&1 &) ; i=0; until /program/hearth pool show --run-dir /run/hearth >/dev/null 2>&1; do i=$((i+1)); test $i -lt 3000 || { cat /run/log; exit 1; }; usleep 100000; done")?;
        if first {
            machine.run("/program/hearth datastore add /data/vms --nfs --run-dir /run/hearth --listen 10.0.2.15 --client 10.0.2.2=rw,root")?;
        }
        Ok(machine)
    }

    /// A client, and what it has mounted.
    fn mount(&self, machine: &mut Machine) -> Result<(Client, Vec<u8>)> {
        let mounted = until("the datastore is served", LIMIT, || {
            let mut client = Client::connect(self.address).ok()?;
            client.patient = true;
            let dir = root(&mut client).ok()?;
            Some((client, dir))
        });
        match mounted {
            Ok(mounted) => Ok(mounted),
            Err(e) => Err(e.context(machine.run("cat /run/log; dmesg | tail -5")?)),
        }
    }
}

fn run(program: &str, args: &[&str]) -> Result<()> {
    let output = Command::new(program).args(args).output();
    let output = output.with_context(|| format!("cannot run {program}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program}: {said}");
    Ok(())
}

/// Some change that makes sense, by lot.
fn change(state: &mut u64, files: &Files, round: u8) -> Change {
    let mut lot = |of: u64| {
        *state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (*state >> 33) % of
    };
    let there: Vec<&str> = files.keys().copied().collect();
    let free: Vec<&str> = NAMES
        .iter()
        .copied()
        .filter(|name| !files.contains_key(name))
        .collect();
    let kind = lot(20);
    if there.is_empty() || kind == 0 && !free.is_empty() {
        return Change::Create(free[lot(free.len() as u64) as usize]);
    }
    let name = there[lot(there.len() as u64) as usize];
    match kind {
        1 => Change::Remove(name),
        2 | 3 => match NAMES[lot(NAMES.len() as u64) as usize] {
            to if to == name => Change::SetSize(name, lot(SIZE)),
            to => Change::Rename(name, to),
        },
        4 | 5 => Change::SetSize(name, lot(SIZE)),
        _ => {
            let len = 1 + lot(30_000);
            Change::Write(name, lot(SIZE - len), len as usize, round)
        }
    }
}

/// True if this may be what is left when the power went during a change.
fn may_be(change: Change, files: &Files, found: &Files) -> bool {
    if change.outcomes(files).contains(found) {
        return true;
    }
    // Of a long write each block is there or not.
    let Change::Write(name, ..) = change else {
        return false;
    };
    let mut after = files.clone();
    change.apply(&mut after);
    let others = |files: &Files| {
        let others = files.iter().filter(|(other, _)| **other != name);
        others
            .map(|(name, data)| (*name, data.clone()))
            .collect::<Files>()
    };
    let (Some(old), Some(new), Some(is)) = (files.get(name), after.get(name), found.get(name))
    else {
        return false;
    };
    let old_at = |at: usize| old.get(at).copied().unwrap_or(0);
    others(files) == others(found)
        && is.len() == new.len()
        && is
            .iter()
            .enumerate()
            .all(|(at, byte)| *byte == new[at] || *byte == old_at(at))
}

#[test]
fn what_a_storage_vm_answered_outlives_a_power_cut() -> Result<()> {
    let rounds: u64 = std::env::var("GUEST_ROUNDS")
        .unwrap_or_else(|_| "2".to_owned())
        .parse()
        .context("GUEST_ROUNDS is no number")?;
    let storage = Storage::new()?;
    let mut files = Files::new();
    // What was under way when the power went.
    let mut open: Option<Change> = None;
    let mut answered = 0;
    let mut kinds = BTreeSet::new();
    let mut machine = storage.boot(true)?;
    for round in 1..=rounds + 1 {
        let (mut client, dir) = storage.mount(&mut machine)?;
        let found = seen(&mut client, &dir)?;
        let fits = open.map_or(found == files, |change| may_be(change, &files, &found));
        ensure!(
            fits,
            "round {round}, after {open:?}: {} instead of {}",
            sketch(&found),
            sketch(&files)
        );
        files = found;
        if round > rounds {
            break;
        }
        let mut state = round.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let last = 40 + state % 60;
        for n in 0.. {
            let next = change(&mut state, &files, n as u8);
            kinds.insert(
                format!("{next:?}")
                    .split('(')
                    .next()
                    .unwrap_or_default()
                    .to_owned(),
            );
            if n < last {
                next.ask(&mut client, &dir, || Ok(()))
                    .with_context(|| format!("round {round}: {next:?}"))?;
                next.apply(&mut files);
                answered += 1;
                continue;
            }
            // The power goes while it is on its way.
            open = Some(next);
            let asking = std::thread::spawn(move || next.ask(&mut client, &dir, || Ok(())).is_ok());
            machine.cut_power()?;
            if asking.join().expect("no panic") {
                next.apply(&mut files);
                open = None;
            }
            break;
        }
        machine = storage.boot(false)?;
    }
    ensure!(kinds.len() >= 4, "{kinds:?}");
    // Without Hearth it is a directory of plain files.
    machine.run("/program/hearth datastore remove vms --run-dir /run/hearth")?;
    for (name, content) in &files {
        let sum = machine.run(&format!(
            "md5sum </data/vms/{name}; stat -c %s /data/vms/{name}"
        ))?;
        let size = sum.split_whitespace().last().unwrap_or_default();
        ensure!(size == content.len().to_string(), "{name}: {sum}");
        ensure!(
            sum.starts_with(&md5(storage.dir.path(), content)?),
            "{name}: {sum}"
        );
    }
    machine.no_disk_errors()?;
    eprintln!("{answered} changes and {rounds} power cuts");
    Ok(())
}

fn md5(dir: &Path, content: &[u8]) -> Result<String> {
    let file = dir.join("content");
    fs::write(&file, content)?;
    let output = Command::new("md5sum").arg(&file).output()?;
    let text = String::from_utf8(output.stdout)?;
    Ok(text.split_whitespace().next().context("a sum")?.to_owned())
}
