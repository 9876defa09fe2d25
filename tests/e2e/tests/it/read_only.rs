//! Origins that cannot be written: refused before a write is answered that could never reach them.
//!
//! Exclusive: loop devices

use crate::stored::{Lab, create, lasting_address, pattern, read, root, write};
use crate::users::Loop;
use anyhow::{Context, Result, ensure};
use hearth_nfs::v3::{Args, SetAttributes, Status};
use hearth_rig::Hearth;
use hearth_rig::clients::{have, run_ok};
use hearth_rig::daemon::path;
use hearth_rig::servers::Server;
use std::path::Path;
use std::process::Command;

const MIB: u64 = 1 << 20;
const QEMU: [&str; 2] = ["qemu-img", "qemu-storage-daemon"];

/// A directory that can be read and not written, until dropped.
struct ReadOnlyMount<'a>(&'a Path);

impl ReadOnlyMount<'_> {
    /// Nothing where this user may not mount.
    fn new<'a>(test: &str, dir: &'a Path) -> Option<ReadOnlyMount<'a>> {
        let mount = |args: &[&str]| {
            let done = Command::new("mount").args(args).status();
            done.is_ok_and(|status| status.success())
        };
        if !mount(&["--bind", path(dir), path(dir)]) {
            println!("SKIPPED {test}: this user may not mount");
            return None;
        }
        let mounted = ReadOnlyMount(dir);
        mount(&["-o", "remount,bind,ro", path(dir)]).then_some(mounted)
    }

    fn make_writable(&self) -> Result<()> {
        let args = ["-o", "remount,bind,rw", path(self.0)];
        ensure!(Command::new("mount").args(args).status()?.success());
        Ok(())
    }
}

impl Drop for ReadOnlyMount<'_> {
    fn drop(&mut self) {
        // Lazily: after a failure the daemon uses it still.
        let _ = Command::new("umount").arg("-l").arg(self.0).status();
    }
}

fn refused(hearth: &Hearth, args: &[&str]) -> Result<()> {
    let words = hearth.refused(&[&["disk", "add", "d"], args].concat())?;
    ensure!(
        words.contains("read-only") && words.contains("--read-only"),
        "{args:?}: {words}"
    );
    Ok(())
}

/// It is refused for writing, as a disk, as an image's file and as a leg, and served with --read-only.
fn serves_readers_only(hearth: &Hearth, origin: &str) -> Result<()> {
    refused(hearth, &["--origin", origin])?;
    let leg = hearth.origin("leg.raw", 4 * MIB)?;
    refused(hearth, &["--mirror", path(&leg), "--mirror", origin])?;
    if have("read-only: images", &QEMU) {
        refused(hearth, &["--origin", &format!("raw:{origin}")])?;
    }
    hearth.add("d", origin, &["--read-only"])?;
    let mut client = hearth.connect("d")?;
    ensure!(client.read(0, 4096)? == [7; 4096]);
    ensure!(client.write(0, &[1; 4096]).is_err());
    drop(client);
    hearth.ok(&["disk", "remove", "d"]).map(drop)
}

#[test]
fn read_only_device_is_refused_for_writing() -> Result<()> {
    let hearth = Hearth::serving("160M")?;
    let file = hearth.dir().join("o.img");
    std::fs::write(&file, vec![7; 4 * MIB as usize])?;
    let Some(device) = Loop::new("read-only: device", &file, &["--read-only"]) else {
        return Ok(());
    };
    serves_readers_only(&hearth, &device.0)
}

#[test]
fn read_only_mount_is_refused_for_writing() -> Result<()> {
    let hearth = Hearth::serving("160M")?;
    let dir = hearth.dir().join("ro");
    std::fs::create_dir(&dir)?;
    let file = dir.join("o.img");
    std::fs::write(&file, vec![7; 4 * MIB as usize])?;
    let Some(_mounted) = ReadOnlyMount::new("read-only: mount", &dir) else {
        return Ok(());
    };
    serves_readers_only(&hearth, path(&file))
}

/// QEMU opens one for writing, writes what has no place in it yet, and nothing twice.
#[test]
fn compressed_vmdk_is_refused_for_writing() -> Result<()> {
    if !have("read-only: VMDK", &QEMU) {
        return Ok(());
    }
    let hearth = Hearth::serving("160M")?;
    let (plain, image) = (hearth.dir().join("p.raw"), hearth.dir().join("d.vmdk"));
    std::fs::write(&plain, vec![7; 4 * MIB as usize])?;
    let convert = ["convert", "-f", "raw", "-O", "vmdk", "-o"];
    let how = ["subformat=streamOptimized", path(&plain), path(&image)];
    run_ok("qemu-img", &[&convert[..], &how].concat(), hearth.dir())?;
    // The same data as the extent of a description of its own.
    let described = hearth.dir().join("described.vmdk");
    let text = format!(
        "# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\n\
         createType=\"twoGbMaxExtentSparse\"\nRW {} SPARSE \"d.vmdk\"\n",
        4 * MIB / 512
    );
    std::fs::write(&described, text)?;
    let described = format!("vmdk:{}", path(&described));
    refused(&hearth, &["--origin", &described, "--allow-backing"])?;

    let origin = format!("vmdk:{}", path(&image));
    refused(&hearth, &["--origin", &origin])?;
    hearth.add("d", &origin, &["--read-only"])?;
    ensure!(hearth.connect("d")?.read(0, 4096)? == [7; 4096]);
    Ok(())
}

/// A device that became read-only while the daemon was stopped: nothing is answered before it can be
/// written again.
#[test]
fn protected_device_waits_after_restart() -> Result<()> {
    let mut hearth = Hearth::serving("160M")?;
    let file = hearth.origin("o.img", 4 * MIB)?;
    let Some(device) = Loop::new("read-only: restart", &file, &[]) else {
        return Ok(());
    };
    hearth.add("d", &device.0, &[])?;
    hearth.stop()?;
    let protect = |how: &str| run_ok("blockdev", &[how, &device.0], hearth.dir());
    protect("--setro")?;
    hearth.start()?;
    let shown = hearth.ok(&["disk", "show", "d"])?;
    let protect = |how: &str| run_ok("blockdev", &[how, &device.0], hearth.dir());
    protect("--setrw")?;
    ensure!(shown.contains("the block device is read-only"), "{shown}");
    hearth_rig::wait::until(
        "it is served again",
        std::time::Duration::from_secs(60),
        || hearth.connect("d").ok()?.write(0, &[1; 4096]).ok(),
    )
}

/// A read-only export is refused for a new disk. A disk that has one waits.
#[test]
fn protected_export_waits_after_restart() -> Result<()> {
    let mut hearth = Hearth::serving("160M")?;
    let file = hearth.dir().join("o.img");
    std::fs::write(&file, vec![7; 4 * MIB as usize])?;
    let socket = hearth.dir().join("o.sock");
    let serve = |more: &[&str]| {
        let lasting = ["--socket={socket}", "--persistent", "-f", "raw", "-x", "x"];
        let args = [&lasting[..], more, &[path(&file)]].concat();
        Server::start("qemu-nbd", &args, socket.clone())
    };
    let protected = serve(&["--read-only"])?;
    let origin = protected.uri("x");
    refused(&hearth, &["--origin", &origin, "--sole-user"])?;
    drop(protected);
    let writable = serve(&[])?;
    hearth.add("d", &origin, &["--sole-user"])?;
    hearth.connect("d")?.write(0, &[1; 4096])?;
    hearth.ok(&["disk", "flush", "d"])?;
    hearth.stop()?;
    drop(writable);
    let protected = serve(&["--read-only"])?;
    hearth.start()?;
    let shown = hearth.ok(&["disk", "show", "d"])?;
    ensure!(shown.contains("read-only"), "{shown}");
    let connected = hearth.connect("d");
    ensure!(connected.is_err() || connected?.write(0, &[2; 4096]).is_err());
    drop(protected);
    let _writable = serve(&[])?;
    hearth_rig::wait::until(
        "it is served again",
        std::time::Duration::from_secs(60),
        || hearth.connect("d").ok()?.write(0, &[2; 4096]).ok(),
    )
}

/// Below a datastore on a mount that became read-only while the daemon was away. Reads get what was answered last, also where
/// only flash has it, and nothing is written before the mount is writable.
#[test]
fn datastore_on_read_only_mount_serves_readers() -> Result<()> {
    const TEST: &str = "datastore_on_read_only_mount_serves_readers";
    const LEN: u64 = 4 * MIB;
    const STEP: u32 = 64 << 10;
    let mut lab = Lab::with(&[], None, &lasting_address()?.to_string())?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let [clean, dirty] = ["clean.img", "dirty.img"].map(|name| create(&mut client, &dir, name));
    let (clean, dirty) = (clean?, dirty?);
    let content = pattern(0, 1, LEN as usize);
    let pieces = || (0..LEN).step_by(STEP as usize);
    let piece = |at: u64| content.get(at as usize..at as usize + STEP as usize);
    for at in pieces() {
        write(&mut client, &clean, at, piece(at).context("a piece")?)?;
    }
    lab.hearth.ok(&["datastore", "flush", "vms"])?;
    for at in pieces() {
        write(&mut client, &dirty, at, piece(at).context("a piece")?)?;
    }
    lab.hearth.kill9()?;
    let behind = std::fs::read(lab.vms.join("dirty.img"))?;
    ensure!(behind != content, "nothing is left to be written back");

    let Some(mounted) = ReadOnlyMount::new(TEST, &lab.vms) else {
        return Ok(());
    };
    lab.hearth.start()?;
    let mut client = lab.client()?;
    for file in [&clean, &dirty, &clean] {
        for at in pieces() {
            let got = read(&mut client, file, at, STEP)?;
            ensure!(Some(&got[..]) == piece(at), "at {at}");
        }
    }
    let files = lab.hearth.ok(&["datastore", "files", "vms", "--json"])?;
    let files: Vec<serde_json::Value> = serde_json::from_str(&files)?;
    let cached = |file: &serde_json::Value| file["cached"].as_u64();
    ensure!(files.len() == 2, "{files:?}");
    ensure!(files.iter().all(|file| cached(file) > Some(0)), "{files:?}");
    let set = SetAttributes {
        size: Some(LEN / 2),
        ..SetAttributes::default()
    };
    for file in [&clean, &dirty] {
        let args = Args::durable(file, 0, &[1; 4096]);
        client.call(&args)?.is(Status::RoFs)?;
        let args = Args::SetAttr {
            file,
            set,
            only_if: None,
        };
        client.call(&args)?.is(Status::RoFs)?;
    }
    ensure!(std::fs::read(lab.vms.join("dirty.img"))? == behind);

    mounted.make_writable()?;
    write(&mut client, &clean, 0, &[1; 4096])?;
    ensure!(read(&mut client, &clean, 0, 4096)? == [1; 4096]);
    lab.hearth.ok(&["datastore", "flush", "vms"])?;
    let now = std::fs::read(lab.vms.join("clean.img"))?;
    ensure!(now[..4096] == [1; 4096] && now[4096..] == content[4096..]);
    ensure!(std::fs::read(lab.vms.join("dirty.img"))? == content);
    lab.hearth.stop()?;
    Ok(())
}
