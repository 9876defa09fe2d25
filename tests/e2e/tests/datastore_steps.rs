//! The daemon is killed at each step of what it does for a change of a file: before it cuts, writes, makes durable,
//! renames or removes, and before what it puts on flash. Each time the file is afterwards as it was before the
//! change or as it is after it, for clients and, once it was flushed, on the host.
//!
//! strace kills it as it enters a call of the kernel. What the kernel itself loses in a power cut is tried in `guest_storage`.

mod stored;

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use hearth_rig::killer::Killer;
use hearth_rig::wait::until;
use stored::changes::{Change, Files, seen, sketch};
use stored::nfs::Client;
use stored::{Lab, lines, root};

/// Long enough for whatever a daemon does until it is killed.
const LIMIT: Duration = Duration::from_secs(30);
/// The calls of the kernel at which it is killed, and at which of them that one thread makes during a change.
const STEPS: &[(&str, u32)] = &[
    ("ftruncate", 1),
    ("fallocate", 1),
    ("pwritev", 2),
    ("pwrite64", 1),
    ("fsync", 2),
    ("fdatasync", 1),
    ("utimensat", 2),
    ("renameat2,renameat,rename", 1),
    ("unlinkat,unlink", 1),
    ("openat", 2),
    ("open_by_handle_at", 2),
    ("io_uring_enter", 5),
];

/// Large files from their first block on, and one that is none.
const CHANGES: &[Change] = &[
    Change::Create("a.img"),
    Change::Write("a.img", 0, 20_000, 1),
    Change::Write("a.img", 100_000, 50_000, 2),
    Change::Flush,
    Change::SetSize("a.img", 110_001),
    Change::Flush,
    Change::SetSize("a.img", 200_000),
    Change::Write("a.img", 5_000, 3_000, 3),
    Change::Create("b.log"),
    Change::Write("b.log", 10, 9_000, 4),
    Change::Rename("a.img", "c.img"),
    Change::Create("a.img"),
    Change::Write("a.img", 0, 70_000, 5),
    Change::Rename("c.img", "a.img"),
    Change::SetSize("a.img", 4_097),
    Change::Write("a.img", 8_192, 4_096, 6),
    Change::Flush,
    Change::Remove("b.log"),
    Change::Remove("a.img"),
];

/// A client and the directory, or nothing if the daemon has ended. It may still answer for a moment after strace has
/// passed its signal on, and is then found gone only by the next who asks.
fn open(lab: &mut Lab) -> Result<Option<(Client, Vec<u8>)>> {
    let opened = until("the datastore is served", LIMIT, || {
        if !lab.hearth.running() {
            return Some(None);
        }
        let shown = lab.show().ok()?;
        let address = shown["listen"].as_str().filter(|_| shown["served"] == true);
        let mut client = Client::connect(address?.parse().ok()?).ok()?;
        client.patient = true;
        let dir = root(&mut client).ok()?;
        Some(Some((client, dir)))
    });
    opened.with_context(|| format!("threads of the daemon: {}", threads(lab.hearth.pid())))
}

/// What the kernel says of the threads of a process.
fn threads(pid: Option<u32>) -> String {
    let tasks = pid.and_then(|pid| fs::read_dir(format!("/proc/{pid}/task")).ok());
    let told = |status: String| -> String {
        let wanted = ["Name:", "State:", "TracerPid:", "SigPnd:", "ShdPnd:"];
        let lines = status
            .lines()
            .filter(|line| wanted.iter().any(|w| line.starts_with(w)));
        lines.flat_map(|line| [line, " "]).collect()
    };
    let all = tasks.into_iter().flatten().flatten();
    all.filter_map(|task| fs::read_to_string(task.path().join("status")).ok())
        .map(|status| told(status) + "; ")
        .collect()
}

/// Waits for the end of a daemon that was killed, starts it again and opens the directory.
fn again(lab: &mut Lab) -> Result<(Client, Vec<u8>)> {
    until("the daemon is gone", LIMIT, || {
        (!lab.hearth.running()).then_some(())
    })?;
    // It has ended; this only says so.
    lab.hearth.kill9()?;
    lab.hearth.start()?;
    open(lab)?.context("it has ended again")
}

/// The same over two directories: what is done in each, and what is noted and marked beside.
const STEPS_OF_TWO: &[(&str, u32)] = &[
    ("ftruncate", 2),
    ("pwrite64", 3),
    ("fsync,fdatasync", 4),
    ("utimensat", 2),
    ("renameat2,renameat,rename", 2),
    ("unlinkat,unlink", 2),
    ("setxattr,fsetxattr", 2),
];

/// Of the changes, some of each kind.
const CHANGES_OF_TWO: &[Change] = &[
    Change::Create("a.img"),
    Change::Write("a.img", 0, 20_000, 1),
    Change::Flush,
    Change::SetSize("a.img", 10_001),
    Change::Create("b.log"),
    Change::Write("b.log", 10, 9_000, 4),
    Change::Rename("a.img", "c.img"),
    Change::Rename("b.log", "c.img"),
    Change::Remove("c.img"),
];

#[test]
fn a_kill_at_any_step_leaves_a_file_as_before_or_after() -> Result<()> {
    killed_at_each(Lab::new()?, STEPS, CHANGES, 50)
}

/// In both directories, which are the same.
#[test]
fn a_kill_at_any_step_leaves_two_directories_the_same() -> Result<()> {
    let lab = match Lab::mirrored() {
        Err(e) if format!("{e:#}").contains("cannot be marked as a tree") => {
            eprintln!("skipped: {e:#}");
            return Ok(());
        }
        other => other?,
    };
    killed_at_each(lab, STEPS_OF_TWO, CHANGES_OF_TWO, 20)
}

/// Waits until all directories of a datastore hold everything.
fn all_current(lab: &Lab) -> Result<()> {
    until("all directories hold everything", LIMIT, || {
        let shown = lab.show().ok()?;
        let trees = shown["trees"].as_array().cloned().unwrap_or_default();
        let current = trees.iter().all(|tree| tree["state"] == "current");
        current.then_some(())
    })
}

fn killed_at_each(
    mut lab: Lab,
    steps: &[(&str, u32)],
    changes: &[Change],
    least: u32,
) -> Result<()> {
    let second = lab.hearth.dir().join("b");
    let mut places = vec![lab.vms.clone()];
    places.extend(second.exists().then_some(second));
    let pid = lab.hearth.pid().context("no daemon")?;
    match Killer::new(pid, "mount", 1) {
        Ok(killer) => drop(killer),
        Err(e) => {
            eprintln!("skipped: {e:#}; scripts/setup.sh test installs strace");
            return Ok(());
        }
    }
    let mut kills = BTreeMap::<&str, u32>::new();
    for &(calls, most) in steps {
        for at in 1..=most {
            let mut files = Files::new();
            for change in changes {
                let step = || format!("{change:?}, killed at {calls}, the {at}.");
                let opened = open(&mut lab).with_context(step)?;
                let (mut client, dir) = match opened {
                    Some(opened) => opened,
                    None => {
                        // The last step killed it, although it answered: what it answered holds.
                        println!("before {}: killed after its answer", step());
                        *kills.entry(calls).or_default() += 1;
                        let (mut client, dir) = again(&mut lab).with_context(step)?;
                        let found = seen(&mut client, &dir).with_context(step)?;
                        let (is, was) = (sketch(&found), sketch(&files));
                        ensure!(found == files, "before {}: {is} instead of {was}", step());
                        (client, dir)
                    }
                };
                let pid = lab.hearth.pid().context("no daemon")?;
                // It may be gone at once, for it has something to do of its own.
                let killer = Killer::new(pid, calls, at);
                let flush = || lab.hearth.ok(&["datastore", "flush", "vms"]).map(drop);
                let asked = killer.and_then(|_killer| change.ask(&mut client, &dir, flush));
                let mut after = files.clone();
                change.apply(&mut after);
                if asked.is_ok() && lab.hearth.running() {
                    files = after;
                    continue;
                }
                *kills.entry(calls).or_default() += 1;
                let restarted =
                    again(&mut lab).with_context(|| format!("{}: {asked:?}", step()))?;
                let (mut client, dir) = restarted;
                let found = seen(&mut client, &dir).with_context(step)?;
                let done = found == after;
                ensure!(
                    change.outcomes(&files).contains(&found) && (done || asked.is_err()),
                    "{}: {} instead of {} or {}",
                    step(),
                    sketch(&found),
                    sketch(&files),
                    sketch(&after)
                );
                if !done {
                    let flush = || lab.hearth.ok(&["datastore", "flush", "vms"]).map(drop);
                    change.ask(&mut client, &dir, flush).with_context(step)?;
                    let again = seen(&mut client, &dir).with_context(step)?;
                    ensure!(again == after, "{}: done again: {}", step(), sketch(&again));
                }
                lab.hearth.ok(&["datastore", "flush", "vms"])?;
                all_current(&lab).with_context(step)?;
                for place in &places {
                    let shown = place.display();
                    for (name, content) in &after {
                        let plain = fs::read(place.join(name))
                            .with_context(|| format!("{}: {name} in {shown}", step()))?;
                        ensure!(plain == *content, "{}: {name} in {shown}", step());
                    }
                    let names = lines(place)?;
                    ensure!(
                        names.len() == after.len(),
                        "{}: {names:?} in {shown}",
                        step()
                    );
                }
                files = after;
            }
            ensure!(files.is_empty());
        }
    }
    println!("killed: {kills:?}");
    ensure!(kills.values().sum::<u32>() > least, "{kills:?}");
    // Nothing is left of the files that are gone.
    until("their disks are forgotten", LIMIT, || {
        (lab.show().ok()?["disks"] == 0).then_some(())
    })
}
