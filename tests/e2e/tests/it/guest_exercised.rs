//! What other people wrote to try file systems with, on a datastore of the daemon: fsx above all, which holds each read of a file against
//! what it did to it. It works through the client of a guest's kernel, while the daemon is killed beneath it again and again.
//!
//! The programs are no part of this repository: `LAB_PROGRAMS` names them, separated by colons, and `LAB_WORK` has a shell command
//! a line, each run in a directory of its own on the datastore; both as `scripts/nfs-lab.sh` sets them. Beside what a
//! program finds itself, the directories of this host must in the end hold what the client has.
//!
//! Exclusive: processors

use crate::kernel_client;
use std::path::PathBuf;

use crate::stored::{Lab, lasting_address};
use anyhow::{Context, Result, ensure};
use hearth_rig::clients::run_ok;
use hearth_rig::machine::{Machine, Plan};

/// Answers that a client has between two kills, if `LAB_ANSWERS` says nothing else.
const ANSWERS: u64 = 3000;
/// What a directory holds: names with what they are, and the content of files.
const HELD: &str = "find . -mindepth 1 -exec stat -c '%F %n' {} + | sort; find . -type f -exec sha256sum {} + | sort";

struct Given {
    programs: Vec<PathBuf>,
    work: Vec<String>,
    answers: u64,
}

/// `None`, and a line that says why, if nothing is given.
fn given(test: &str) -> Result<Option<Given>> {
    let (Ok(programs), Ok(work)) = (std::env::var("LAB_PROGRAMS"), std::env::var("LAB_WORK"))
    else {
        eprintln!("{test}: skipped: no programs are given (scripts/nfs-lab.sh gives some)");
        return Ok(None);
    };
    let answers = match std::env::var("LAB_ANSWERS") {
        Ok(answers) => answers.parse().context("LAB_ANSWERS is no number")?,
        Err(_) => ANSWERS,
    };
    let lines = work.lines().map(str::trim).filter(|line| !line.is_empty());
    let given = Given {
        programs: programs.split(':').map(PathBuf::from).collect(),
        work: lines.map(str::to_owned).collect(),
        answers,
    };
    ensure!(!given.work.is_empty(), "LAB_WORK has no command");
    Ok(Some(given))
}

/// Everything that is given, at once, beside kills; `dirs` must hold the same as the client in the end.
fn exercise(given: &Given, lab: &mut Lab, port: u16, dirs: &[PathBuf]) -> Result<()> {
    let image = kernel_client::brought(lab.hearth.dir(), &given.programs)?;
    let plan = Plan::new(2).own_root()?.image(&image).network();
    let mut guest = Machine::boot(lab.hearth.dir(), "g", &plan)?;
    guest.run("modprobe virtio_net && modprobe nfsv3")?;
    guest.run("ip link set lo up; ip link set eth0 up && ip addr add 10.0.2.15/24 dev eth0")?;
    guest.run("mkdir -p /program && mount -o ro /dev/vdb /program")?;
    kernel_client::mount(&mut guest, port, "/mnt", "")?;
    let mut jobs = Vec::new();
    for (n, work) in given.work.iter().enumerate() {
        let job = guest.start(&format!(
            "trap 'touch /tmp/ended.{n}' EXIT; PATH=/program:$PATH; mkdir /mnt/w{n} && cd /mnt/w{n} && {{ {work}; }}"
        ))?;
        jobs.push((job, work));
    }
    let ended = format!(
        "$(ls -d /tmp/ended.* 2>/dev/null | wc -l) -ge {}",
        jobs.len()
    );
    let answered = "$(awk '/xprt:/ { n += $9 } END { print n + 0 }' /proc/self/mountstats)";
    let mut kills = 0;
    loop {
        // Some work has to be done between two kills, or nothing would be disturbed.
        let before: u64 = guest.run(&format!("echo {answered}"))?.trim().parse()?;
        let goal = before + given.answers;
        let more = format!("test {ended} || test {answered} -ge {goal}");
        kernel_client::wait_until(&mut guest, port, &more)?;
        let mut going_on = Vec::new();
        for (job, work) in jobs {
            if !guest.has_ended(&job)? {
                going_on.push((job, work));
                continue;
            }
            let answer = guest.wait(&job)?;
            ensure!(
                answer.status == 0,
                "`{work}` ended with {} after {kills} kills:\n{}",
                answer.status,
                answer.text
            );
        }
        jobs = going_on;
        if jobs.is_empty() {
            break;
        }
        lab.hearth.kill9()?;
        lab.hearth.start()?;
        kills += 1;
    }
    ensure!(
        kills > 0,
        "over before the daemon was killed once: give more work"
    );
    let disks = lab.show()?["disks"].as_u64();
    ensure!(disks >= Some(1), "nothing was cached");
    let client = guest.run(&format!(
        "sync; echo 3 >/proc/sys/vm/drop_caches; cd /mnt && {HELD}"
    ))?;
    guest.run("umount /mnt")?;
    guest.no_disk_errors()?;
    lab.hearth.ok(&["datastore", "flush", "vms"])?;
    for dir in dirs {
        let host = run_ok("sh", &["-c", HELD], dir)?;
        ensure!(
            host == client,
            "{}:\n{host}\nthe client:\n{client}",
            dir.display()
        );
    }
    eprintln!(
        "{} commands, {kills} kills, {} lines held",
        given.work.len(),
        client.lines().count()
    );
    Ok(())
}

/// On one directory.
#[test]
fn programs_of_others_find_nothing() -> Result<()> {
    let Some(given) = given("programs_of_others_find_nothing")? else {
        return Ok(());
    };
    let address = lasting_address()?;
    let mut lab = Lab::with(&[], None, &address.to_string())?;
    let dirs = [lab.vms.clone()];
    exercise(&given, &mut lab, address.port(), &dirs)
}

/// On two, of which each must hold everything in the end.
#[test]
fn programs_of_others_find_nothing_of_two_directories() -> Result<()> {
    let Some(given) = given("programs_of_others_find_nothing_of_two_directories")? else {
        return Ok(());
    };
    let address = lasting_address()?;
    let mut lab = match Lab::mirrored_with(&address.to_string(), "127.0.0.1", |_| Ok(())) {
        Err(e) if format!("{e:#}").contains("cannot be marked as a tree") => {
            eprintln!("two directories: skipped: {e:#}");
            return Ok(());
        }
        other => other?,
    };
    let dirs = ["a", "b"].map(|name| lab.hearth.dir().join(name));
    exercise(&given, &mut lab, address.port(), &dirs)
}
