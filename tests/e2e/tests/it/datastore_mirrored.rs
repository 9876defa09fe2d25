//! A datastore over two directories: the daemon is killed while clients write, and a directory is taken away and brought back. In the end
//! both hold the same, and either alone is what clients were answered.
//!
//! Exclusive: loop devices

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};

use crate::stored::{LIMIT, Lab, create, lines, pattern, read, root, write};
use anyhow::{Context, Result, ensure};
use hearth_nfs::v3::{Args, Named};
use hearth_rig::daemon::path;
use hearth_rig::wait::until;
use serde_json::Value;

/// Bytes of a write, and how many of them a file has room for.
const STEP: usize = 8192;
const PLACES: u64 = 300;

/// Unless files of this host cannot be given what tells them apart in two trees.
pub(crate) fn lab() -> Result<Option<Lab>> {
    lab_filled(|_| Ok(()))
}

fn lab_filled(fill: impl FnOnce(&Path) -> Result<()>) -> Result<Option<Lab>> {
    match Lab::mirrored_filled(fill) {
        Err(e) if format!("{e:#}").contains("cannot be marked as a tree") => {
            eprintln!("skipped: {e:#}");
            Ok(None)
        }
        other => other.map(Some),
    }
}

fn tree_states(shown: &Value) -> Vec<String> {
    let trees = shown["trees"].as_array().cloned().unwrap_or_default();
    let states = trees
        .iter()
        .map(|tree| tree["state"].as_str().unwrap_or(""));
    states.map(str::to_owned).collect()
}

fn wait_states(lab: &Lab, wanted: impl Fn(&[String]) -> bool) -> Result<()> {
    let reached = until("the trees are as they should be", LIMIT, || {
        wanted(&tree_states(&lab.show().ok()?)).then_some(())
    });
    reached.with_context(|| format!("{:?}", lab.show()))
}

pub(crate) fn both_current(lab: &Lab) -> Result<()> {
    wait_states(lab, |states| states == ["current", "current"])
}

/// Everything in a directory: kind and mode, and content.
pub(crate) fn seen(dir: &Path) -> Result<BTreeMap<PathBuf, (u32, Vec<u8>)>> {
    let mut all = BTreeMap::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(at) = todo.pop() {
        for name in lines(&at)? {
            let path = at.join(name);
            let meta = path.symlink_metadata()?;
            let content = if meta.is_dir() {
                todo.push(path.clone());
                Vec::new()
            } else {
                fs::read(&path)?
            };
            all.insert(path.strip_prefix(dir)?.to_owned(), (meta.mode(), content));
        }
    }
    Ok(all)
}

/// Both directories, when everything was written to them.
pub(crate) fn same(lab: &Lab) -> Result<BTreeMap<PathBuf, (u32, Vec<u8>)>> {
    both_current(lab)?;
    lab.hearth.ok(&["datastore", "flush", "vms"])?;
    let a = seen(&lab.vms)?;
    let b = seen(&lab.hearth.dir().join("b"))?;
    let names = |all: &BTreeMap<PathBuf, (u32, Vec<u8>)>| all.keys().cloned().collect::<Vec<_>>();
    ensure!(
        names(&a) == names(&b),
        "{:?} and {:?}",
        names(&a),
        names(&b)
    );
    for (name, there) in &a {
        ensure!(b.get(name) == Some(there), "{} differs", name.display());
    }
    Ok(a)
}

/// Somebody who writes one place of a file after the other, and counts what was answered.
pub(crate) struct Writer {
    answered: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<()>>,
}

impl Writer {
    pub(crate) fn start(lab: &Lab, file: Vec<u8>, patient: bool) -> Result<Writer> {
        let mut client = lab.client()?;
        client.patient = patient;
        let (answered, stop) = (
            Arc::new(AtomicU64::new(0)),
            Arc::new(AtomicBool::new(false)),
        );
        let (count, ended) = (answered.clone(), stop.clone());
        let thread = thread::spawn(move || {
            for at in (0..PLACES).cycle() {
                if ended.load(Ordering::SeqCst) {
                    break;
                }
                let data = pattern(at * STEP as u64, at as u8, STEP);
                let written = write(&mut client, &file, at * STEP as u64, &data);
                written.inspect_err(|e| println!("the writer ends: {e:#}"))?;
                count.fetch_add(1, Ordering::SeqCst);
            }
            Ok(())
        });
        Ok(Writer {
            answered,
            stop,
            thread,
        })
    }

    pub(crate) fn wait(&self, more: u64) -> Result<()> {
        let goal = self.answered.load(Ordering::SeqCst) + more;
        until("writes are answered", LIMIT, || {
            (self.answered.load(Ordering::SeqCst) >= goal).then_some(())
        })
    }

    /// Writes answered. Whether the last one failed is the caller's business.
    pub(crate) fn end(self) -> (u64, Result<()>) {
        self.stop.store(true, Ordering::SeqCst);
        let ended = self.thread.join();
        let ended = ended.unwrap_or_else(|_| Err(anyhow::anyhow!("the writer panicked")));
        (self.answered.load(Ordering::SeqCst), ended)
    }
}

fn check(content: &[u8], answered: u64) -> Result<()> {
    for at in 0..answered.min(PLACES) {
        let from = at as usize * STEP;
        let wanted = pattern(at * STEP as u64, at as u8, STEP);
        let got = content.get(from..from + STEP);
        ensure!(
            got == Some(&wanted[..]),
            "what was written at {from} is not there"
        );
    }
    Ok(())
}

#[test]
fn a_kill_under_load_leaves_both_directories_the_same() -> Result<()> {
    let Some(mut lab) = lab()? else { return Ok(()) };
    both_current(&lab)?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let disk = create(&mut client, &dir, "disk.img")?;
    let note = create(&mut client, &dir, "vm.vmx")?;
    write(&mut client, &note, 0, b"memsize = 4096")?;
    let writer = Writer::start(&lab, disk.clone(), false)?;
    writer.wait(60)?;
    lab.hearth.kill9()?;
    let (answered, _) = writer.end();
    lab.hearth.start()?;
    let mut client = lab.client()?;
    // Handles outlive the daemon.
    let got = read(&mut client, &disk, 0, STEP as u32)?;
    ensure!(got == pattern(0, 0, STEP));
    let files = same(&lab)?;
    let (_, content) = files.get(Path::new("disk.img")).context("disk.img")?;
    check(content, answered)?;
    let (_, content) = files.get(Path::new("vm.vmx")).context("vm.vmx")?;
    ensure!(content == b"memsize = 4096");
    lab.hearth.stop()?;
    Ok(())
}

#[test]
fn a_directory_is_lost_under_load_and_comes_back_and_a_stale_one_is_refused() -> Result<()> {
    let Some(mut lab) = lab()? else { return Ok(()) };
    both_current(&lab)?;
    let (a, away) = (lab.vms.clone(), lab.hearth.dir().join("away"));
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let disk = create(&mut client, &dir, "disk.img")?;
    create(&mut client, &dir, "old.log")?;
    let writer = Writer::start(&lab, disk, true)?;
    writer.wait(20)?;
    fs::rename(&a, &away)?;
    wait_states(&lab, |states| states == ["out", "current"])?;
    writer.wait(20)?;
    let made = create(&mut client, &dir, "new.vmx")?;
    write(&mut client, &made, 0, b"made while a tree was away")?;
    let at = Named {
        dir: &dir,
        name: b"old.log",
    };
    client.call(&Args::Remove(at))?.ok()?;
    fs::rename(&away, &a)?;
    both_current(&lab)?;
    let (answered, ended) = writer.end();
    ended?;
    let files = same(&lab)?;
    ensure!(files.len() == 2, "{:?}", files.keys());
    let (_, content) = files.get(Path::new("disk.img")).context("disk.img")?;
    check(content, answered)?;
    let events = lab.hearth.ok(&["events", "--json"])?;
    for event in ["tree-lost", "tree-resyncing", "tree-current"] {
        ensure!(events.contains(event), "no {event}");
    }

    // It misses something, and then it is the only one that is there.
    fs::rename(&a, &away)?;
    wait_states(&lab, |states| states == ["out", "current"])?;
    write(&mut client, &made, 0, b"MADE")?;
    lab.hearth.stop()?;
    let (b, gone) = (lab.hearth.dir().join("b"), lab.hearth.dir().join("gone"));
    fs::rename(&b, &gone)?;
    fs::rename(&away, &a)?;
    lab.hearth.start()?;
    let shown = until("it is known that it cannot be served", LIMIT, || {
        let shown = lab.show().ok()?;
        let reason = shown["reason"].as_str()?;
        reason.contains("has missed changes").then_some(shown)
    })?;
    ensure!(shown["served"] == false, "{shown}");
    lab.hearth.stop()?;
    fs::rename(&gone, &b)?;
    lab.hearth.start()?;
    lab.address()?;
    let files = same(&lab)?;
    let (_, content) = files.get(Path::new("new.vmx")).context("new.vmx")?;
    ensure!(content.starts_with(b"MADE while"), "{content:?}");
    lab.hearth.stop()?;
    Ok(())
}

/// A directory with a file system of its own, until dropped.
struct Disk {
    image: PathBuf,
    at: PathBuf,
}

impl Disk {
    /// Nothing where this user may not mount.
    fn new(at: PathBuf, how: &[&str]) -> Result<Option<Disk>> {
        let image = at.with_extension("ext4");
        fs::File::create(&image)?.set_len(64 << 20)?;
        run("mkfs.ext4", &[&["-q", path(&image)], how].concat())?;
        let disk = Disk { image, at };
        if let Err(e) = disk.mount() {
            println!("SKIPPED datastore_mirrored: {e:#}");
            return Ok(None);
        }
        Ok(Some(disk))
    }

    fn mount(&self) -> Result<()> {
        let how = "loop,errors=remount-ro";
        run("mount", &["-o", how, path(&self.image), path(&self.at)])?;
        // Not part of the datastore, so one directory may have it alone.
        let _ = fs::remove_dir(self.at.join("lost+found"));
        Ok(())
    }

    /// The file system becomes read-only, as after an error.
    fn fail(&self) -> Result<()> {
        run("mount", &["-o", "remount,abort", path(&self.at)])
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.at).output();
    }
}

fn run(program: &str, args: &[&str]) -> Result<()> {
    let done = Command::new(program).args(args).output()?;
    let words = String::from_utf8_lossy(&done.stderr).into_owned();
    ensure!(done.status.success(), "{program} {args:?}: {words}");
    Ok(())
}

/// Under a load that has a file open all the time.
#[test]
fn lost_directory_is_unmounted_checked_and_mounted_again() -> Result<()> {
    let mut disk = None;
    let lab = lab_filled(|a| {
        disk = Disk::new(a.with_file_name("b"), &[])?;
        Ok(())
    })?;
    let Some(mut lab) = lab else { return Ok(()) };
    let Some(disk) = disk else { return Ok(()) };
    both_current(&lab)?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let file = create(&mut client, &dir, "disk.img")?;
    let writer = Writer::start(&lab, file, true)?;
    writer.wait(20)?;
    disk.fail()?;
    create(&mut client, &dir, "new.vmx")?;
    wait_states(&lab, |states| states == ["current", "out"])?;
    writer.wait(20)?;
    // The daemon looks now and then whether it is back.
    until("the lost directory is unmounted", LIMIT, || {
        run("umount", &[path(&disk.at)]).ok()
    })?;
    writer.wait(20)?;
    let checked = Command::new("e2fsck")
        .arg("-fp")
        .arg(&disk.image)
        .output()?;
    // 1: errors were corrected.
    ensure!(matches!(checked.status.code(), Some(0 | 1)), "{checked:?}");
    disk.mount()?;
    both_current(&lab)?;
    writer.wait(20)?;
    let (answered, ended) = writer.end();
    ended?;
    let files = same(&lab)?;
    let (_, content) = files.get(Path::new("disk.img")).context("disk.img")?;
    check(content, answered)?;
    ensure!(files.contains_key(Path::new("new.vmx")));
    lab.hearth.stop()?;
    Ok(())
}

/// The first directory dies while the daemon is stopped, and the second one's file system keeps whole seconds.
#[test]
fn second_directory_with_coarse_times_keeps_dirty_data() -> Result<()> {
    let mut disk = None;
    let lab = lab_filled(|a| {
        disk = Disk::new(a.with_file_name("b"), &["-I", "128"])?;
        Ok(())
    })?;
    let Some(mut lab) = lab else { return Ok(()) };
    let Some(disk) = disk else { return Ok(()) };
    both_current(&lab)?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let file = create(&mut client, &dir, "disk.img")?;
    let content = pattern(0, 1, 4 << 20);
    for (at, piece) in (0..).step_by(64 << 10).zip(content.chunks(64 << 10)) {
        write(&mut client, &file, at, piece)?;
    }
    lab.hearth.stop()?;
    let behind = fs::read(disk.at.join("disk.img"))?;
    ensure!(behind != content, "nothing is left to be written back");
    fs::rename(&lab.vms, lab.hearth.dir().join("gone"))?;
    lab.hearth.start()?;
    let mut client = lab.client()?;
    for (at, piece) in (0..).step_by(64 << 10).zip(content.chunks(64 << 10)) {
        let got = read(&mut client, &file, at, 64 << 10)?;
        ensure!(got == piece, "at {at}: thrown away");
    }
    lab.hearth.ok(&["datastore", "flush", "vms"])?;
    ensure!(fs::read(disk.at.join("disk.img"))? == content);
    lab.hearth.stop()?;
    Ok(())
}
