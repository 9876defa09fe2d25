//! The daemon is killed at each step of what it does for a change of a file: before it cuts, writes, makes durable,
//! renames or removes, and before what it puts on flash. Each time the file is afterwards as it was before the
//! change or as it is after it, for clients and, once it was flushed, on the host.
//!
//! strace kills it as it enters a call of the kernel. What the kernel itself loses in a power cut is tried in `guest_storage`.
//!
//! And files are changed at random, with a seed, by a client that remembers all of them: what nobody thought of.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use crate::stored::changes::{Change, Files, seen, sketch};
use crate::stored::nfs::{self, Client, get, set_size};
use crate::stored::{Lab, create, lines, root};
use anyhow::{Context, Result, ensure};
use hearth_nfs::v3::{Args, SetAttributes, Stability};
use hearth_rig::killer::Killer;
use hearth_rig::rng::Rng;
use hearth_rig::wait::until;

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

/// One file as a client with a memory of its own sees it.
struct Played {
    name: &'static str,
    handle: Vec<u8>,
    /// No longer than this.
    max: u64,
    content: Vec<u8>,
    /// Unstable writes since the last commit, with the number they were answered with.
    unstable: Vec<(u64, Vec<u8>, [u8; 8])>,
}

/// What was asked and not answered when the daemon was killed.
enum Open {
    Writes(Vec<(u64, Vec<u8>)>),
    Size(u64),
}

fn put(content: &mut Vec<u8>, offset: u64, data: &[u8]) {
    let (from, to) = (offset as usize, offset as usize + data.len());
    content.resize(content.len().max(to), 0);
    content[from..to].copy_from_slice(data);
}

impl Played {
    fn write(
        &mut self,
        client: &mut Client,
        offset: u64,
        data: &[u8],
        stable: Stability,
    ) -> Result<()> {
        let args = Args::Write {
            file: &self.handle,
            offset,
            count: data.len() as u32,
            stable,
            data,
        };
        let results = client.call(&args)?.ok()?;
        let mut r = results.reader();
        nfs::wcc(&mut r)?;
        ensure!(r.u32()? as usize == data.len(), "a short write");
        let answered = r.u32()?;
        ensure!(
            answered >= stable as u32,
            "answered as {answered} and asked for {stable:?}"
        );
        if answered == Stability::Unstable as u32 {
            self.unstable.push((offset, data.to_vec(), r.fixed()?));
        }
        put(&mut self.content, offset, data);
        Ok(())
    }

    /// What was unstable is durable now, or was lost and is written again.
    fn commit(&mut self, client: &mut Client) -> Result<()> {
        let args = Args::Commit {
            file: &self.handle,
            offset: 0,
            count: 0,
        };
        let results = client.call(&args)?.ok()?;
        let mut r = results.reader();
        nfs::wcc(&mut r)?;
        let now: [u8; 8] = r.fixed()?;
        for (offset, data, verifier) in std::mem::take(&mut self.unstable) {
            if verifier != now {
                self.write(client, offset, &data, Stability::File)?;
            }
        }
        Ok(())
    }

    fn set_size(&mut self, client: &mut Client, size: u64) -> Result<()> {
        set_size(client, &self.handle, size)?.ok()?;
        self.content.resize(size as usize, 0);
        // What was cut off is not to be written again.
        for (offset, data, _) in &mut self.unstable {
            data.truncate(size.saturating_sub(*offset) as usize);
        }
        self.unstable.retain(|(_, data, _)| !data.is_empty());
        Ok(())
    }

    /// Reads a range, which ends where the file does, and the answer says so.
    fn read(&self, client: &mut Client, offset: u64, count: u32) -> Result<Vec<u8>> {
        let args = Args::Read {
            file: &self.handle,
            offset,
            count,
        };
        let results = client.call(&args)?.ok()?;
        let mut r = results.reader();
        let size = r.optional(nfs::attributes)?.context("attributes")?.size;
        r.u32()?;
        let end = r.bool()?;
        let data = r.opaque(count)?.to_vec();
        let read_to = offset + data.len() as u64;
        ensure!(
            end == (read_to >= size),
            "{}: end {end} at {read_to} of {size}",
            self.name
        );
        Ok(data)
    }

    fn check(&self, client: &mut Client, offset: u64, count: u32) -> Result<()> {
        let found = self.read(client, offset, count)?;
        let from = self.content.len().min(offset as usize);
        let to = self.content.len().min(offset as usize + count as usize);
        let wanted = &self.content[from..to];
        ensure!(
            found.len() == wanted.len(),
            "{}: {} bytes at {offset}, not {}",
            self.name,
            found.len(),
            wanted.len()
        );
        let wrong = found.iter().zip(wanted).position(|(a, b)| a != b);
        ensure!(
            wrong.is_none(),
            "{}: wrong at {} of {}",
            self.name,
            from + wrong.unwrap_or_default(),
            self.content.len()
        );
        Ok(())
    }

    fn check_all(&self, client: &mut Client) -> Result<()> {
        let size = get(client, &self.handle)?.size;
        ensure!(
            size == self.content.len() as u64,
            "{}: {size} bytes, not {}",
            self.name,
            self.content.len()
        );
        let step = 1 << 18;
        (0..=size / step).try_for_each(|n| self.check(client, n * step, step as u32))
    }

    /// Writes nobody waits for, side by side and not over each other; or a change of the size.
    fn leave_open(&self, client: &mut Client, rng: &mut Rng) -> Result<Open> {
        if rng.below(3) == 0 {
            let size = rng.below(self.max + 1);
            let set = SetAttributes {
                size: Some(size),
                ..SetAttributes::default()
            };
            client.send(&Args::SetAttr {
                file: &self.handle,
                set,
                only_if: None,
            })?;
            return Ok(Open::Size(size));
        }
        let slot = self.max / 8;
        let mut writes = Vec::new();
        for n in 0..8 {
            let from = rng.below(slot - 1);
            let len = 1 + rng.below((slot - from).min(20_000));
            let mut data = vec![0; len as usize];
            rng.fill(&mut data);
            let offset = n * slot + from;
            client.send(&Args::Write {
                file: &self.handle,
                offset,
                count: len as u32,
                stable: [Stability::File, Stability::Unstable][rng.below(2) as usize],
                data: &data,
            })?;
            writes.push((offset, data));
        }
        Ok(Open::Writes(writes))
    }

    /// What was not answered is there or is not, block by block, and nothing else has changed. Then it is asked for again, as
    /// clients do.
    fn settle(&mut self, client: &mut Client, open: Open) -> Result<()> {
        let size = get(client, &self.handle)?.size as usize;
        let mut found = Vec::new();
        while found.len() < size {
            let more = self.read(client, found.len() as u64, 1 << 18)?;
            ensure!(!more.is_empty(), "{}: ends at {}", self.name, found.len());
            found.extend(more);
        }
        let (before, mut after) = (self.content.clone(), self.content.clone());
        match &open {
            Open::Writes(writes) => {
                for (offset, data) in writes {
                    put(&mut after, *offset, data);
                }
                ensure!(
                    (before.len()..=after.len()).contains(&size),
                    "{}: {size} bytes, of {} before and {} after",
                    self.name,
                    before.len(),
                    after.len()
                );
            }
            Open::Size(size_after) => {
                after.resize(*size_after as usize, 0);
                ensure!(
                    [before.len(), after.len()].contains(&size),
                    "{}: {size} bytes, of {} before and {} after",
                    self.name,
                    before.len(),
                    after.len()
                );
            }
        }
        // Behind the end there are zeros, which a cut leaves as well while the file still has its length.
        let [mut old, mut new] = [before, after];
        old.resize(size, 0);
        new.resize(size, 0);
        // A write that begins or ends in a block shares it with no other one: the slots are whole blocks.
        for (n, block) in found.chunks(4096).enumerate() {
            let range = n * 4096..n * 4096 + block.len();
            ensure!(
                *block == old[range.clone()] || *block == new[range],
                "{}: block {n} is neither as it was nor as it was to be",
                self.name
            );
        }
        match open {
            Open::Writes(writes) => writes
                .iter()
                .try_for_each(|(at, data)| self.write(client, *at, data, Stability::File)),
            Open::Size(size) => self.set_size(client, size),
        }
    }
}

/// Files are written, read, cut and made longer at random, while the daemon is killed or stopped now and then, and are
/// always as the client's memory has them: one that is a disk from its first byte on, one that is none, and one that becomes a disk
/// as it grows. `SEED` repeats a run, `OPS` makes it longer.
#[test]
fn files_at_random_are_as_a_client_remembers_them() -> Result<()> {
    let number = |name| std::env::var(name).ok().and_then(|n| n.parse().ok());
    let seed: u64 = number("SEED").unwrap_or(1);
    let ops: u64 = number("OPS").unwrap_or(500);
    println!("seed {seed}, {ops} operations: SEED={seed} OPS={ops} repeats it");
    play(seed, ops).with_context(|| format!("seed {seed}, {ops} operations"))
}

fn play(seed: u64, ops: u64) -> Result<()> {
    let mut rng = Rng::new(seed);
    let mut lab = Lab::new()?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let mut files = Vec::new();
    for (name, max) in [("a.img", 4 << 20), ("a.log", 256 << 10), ("a.bin", 2 << 20)] {
        files.push(Played {
            name,
            handle: create(&mut client, &dir, name)?,
            max,
            content: Vec::new(),
            unstable: Vec::new(),
        });
    }
    for op in 0..ops {
        let step = || format!("operation {op}");
        if rng.below(120) == 0 {
            if rng.below(3) == 0 {
                lab.hearth.stop()?;
                lab.hearth.start()?;
                client = lab.client()?;
            } else {
                let at = rng.below(files.len() as u64) as usize;
                let open = files[at].leave_open(&mut client, &mut rng)?;
                lab.hearth.kill9()?;
                lab.hearth.start()?;
                client = lab.client()?;
                files[at].settle(&mut client, open).with_context(step)?;
            }
            for file in &mut files {
                file.commit(&mut client).with_context(step)?;
                file.check_all(&mut client).with_context(step)?;
            }
            continue;
        }
        let at = rng.below(files.len() as u64) as usize;
        let file = &mut files[at];
        let size = file.content.len() as u64;
        let done = match rng.below(100) {
            0..40 => {
                // Half of them where there is something, some at the very end, some behind it.
                let offset = match rng.below(4) {
                    0 => size,
                    1 => rng.below(file.max),
                    _ => rng.below(size + 1),
                };
                let len = match rng.below(3) {
                    0 => 4096 * (1 + rng.below(16)),
                    _ => 1 + rng.below(30_000),
                };
                let offset = match rng.below(3) {
                    0 => offset / 4096 * 4096,
                    _ => offset,
                };
                let offset = offset.min(file.max - len);
                let mut data = vec![0; len as usize];
                rng.fill(&mut data);
                let stable = [Stability::Unstable, Stability::Data, Stability::File];
                let stable = stable[rng.below(3) as usize];
                file.write(&mut client, offset, &data, stable)
            }
            40..75 => {
                let offset = rng.below(file.max);
                let count = 1 + rng.below(128 << 10) as u32;
                file.check(&mut client, offset, count)
            }
            75..83 => file.set_size(&mut client, rng.below(size + 1)),
            83..89 => file.set_size(&mut client, size + rng.below(file.max - size + 1)),
            89..96 => file.commit(&mut client),
            _ => lab.hearth.ok(&["datastore", "flush", "vms"]).map(drop),
        };
        done.with_context(step)?;
    }
    for file in &mut files {
        file.commit(&mut client)?;
        file.check_all(&mut client)?;
    }
    lab.hearth.ok(&["datastore", "flush", "vms"])?;
    for file in &files {
        let plain = fs::read(lab.vms.join(file.name))?;
        ensure!(plain == file.content, "{} on the host", file.name);
    }
    Ok(())
}
