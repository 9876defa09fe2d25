//! Files of a datastore and other users of them on this host: locks, and disks of the same daemon.
//!
//! Exclusive: loop devices

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::stored::{LIMIT, Lab, create, pattern, read, root, write};
use crate::users::Loop;
use anyhow::{Result, ensure};
use hearth_nfs::v3::{Args, Named, Status};
use hearth_rig::child::bound_to_us;
use hearth_rig::clients::have;
use hearth_rig::daemon::path;
use hearth_rig::wait::until;

const M: u64 = 1 << 20;

/// Whether QEMU gets a file for writing. It writes nothing.
fn qemu_may_write(file: &Path) -> Result<bool> {
    let how = ["-f", "raw", "-c", "read -q 0 4k", path(file)];
    let out = Command::new("qemu-io").args(how).output()?;
    let words = String::from_utf8_lossy(&out.stderr);
    ensure!(
        out.status.success() || words.contains("Failed to get \"write\" lock"),
        "{out:?}"
    );
    Ok(out.status.success())
}

/// While a client uses it, and while something of it is on flash only, which outlives a restart.
#[test]
fn used_file_is_locked_until_written_back() -> Result<()> {
    if !have("datastore locks", &["qemu-io"]) {
        return Ok(());
    }
    let mut lab = Lab::new()?;
    lab.hearth.stop()?;
    let slow = ["--destage-rate", "4K"].map(str::to_owned);
    lab.hearth.serve_args.extend(slow);
    lab.hearth.start()?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let file = create(&mut client, &dir, "vm-flat.vmdk")?;
    let data = pattern(0, 1, 65536);
    write(&mut client, &file, 0, &data)?;
    let plain = lab.vms.join("vm-flat.vmdk");
    ensure!(!qemu_may_write(&plain)?, "QEMU may write a dirty file");
    drop(client);
    lab.hearth.kill9()?;
    lab.hearth.start()?;
    until("it is locked after a crash", LIMIT, || {
        (!qemu_may_write(&plain).ok()?).then_some(())
    })?;
    ensure!(read(&mut lab.client()?, &file, 0, 65536)? == data);
    lab.hearth.ok(&["datastore", "remove", "vms", "--yes"])?;
    ensure!(fs::read(&plain)? == data);
    ensure!(qemu_may_write(&plain)?, "the lock outlives its use");
    Ok(())
}

/// Of two directories that hold the same, the file is locked in both.
#[test]
fn mirrored_file_is_locked_in_both_trees() -> Result<()> {
    if !have("datastore locks", &["qemu-io"]) {
        return Ok(());
    }
    let lab = match Lab::mirrored() {
        Err(e) if format!("{e:#}").contains("cannot be marked as a tree") => {
            println!("SKIPPED datastore locks: {e:#}");
            return Ok(());
        }
        lab => lab?,
    };
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let file = create(&mut client, &dir, "vm-flat.vmdk")?;
    for tree in ["a", "b"] {
        let plain = lab.hearth.dir().join(tree).join("vm-flat.vmdk");
        until(&format!("it is locked in {tree}"), LIMIT, || {
            write(&mut client, &file, 0, &pattern(0, 1, 65536)).ok()?;
            (!qemu_may_write(&plain).ok()?).then_some(())
        })?;
    }
    Ok(())
}

/// A file that QEMU uses is refused to clients, until QEMU has ended.
#[test]
fn file_in_use_by_qemu_is_refused() -> Result<()> {
    if !have("datastore locks", &["qemu-io"]) {
        return Ok(());
    }
    let lab = Lab::new()?;
    let plain = lab.vms.join("a.img");
    fs::write(&plain, vec![5; 2 * M as usize])?;
    let mut command = Command::new("qemu-io");
    command
        .args(["-f", "raw", path(&plain)])
        .stdin(Stdio::piped())
        .stdout(Stdio::null());
    let mut qemu = bound_to_us(&mut command).spawn()?;
    // QEMU shares a file with another `qemu-io`, so that cannot be asked.
    let inode = format!(":{} ", fs::metadata(&plain)?.ino());
    until("QEMU has it", LIMIT, || {
        let locks = fs::read_to_string("/proc/locks").ok()?;
        locks.contains(&inode).then_some(())
    })?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let name = b"a.img".as_slice();
    let found = client.call(&Args::Lookup(Named { dir: &dir, name }))?;
    let file = found.ok()?.reader().opaque(64)?.to_vec();
    client
        .call(&Args::durable(&file, 0, &[1; 4096]))?
        .is(Status::Access)?;
    // It ends when nothing more is said.
    drop(qemu.stdin.take());
    qemu.wait()?;
    write(&mut client, &file, 0, &[1; 4096])
}

/// The same daemon refuses a disk on a file that its datastore serves, under whatever name.
#[test]
fn disk_on_datastore_file_is_refused() -> Result<()> {
    let mut lab = Lab::new()?;
    lab.hearth.stop()?;
    let backing = ["--backing-dir", path(&lab.vms)].map(str::to_owned);
    lab.hearth.serve_args.extend(backing);
    lab.hearth.start()?;
    let sub = lab.vms.join("sub");
    fs::create_dir(&sub)?;
    let file = sub.join("a.img");
    fs::write(&file, vec![0; 4 * M as usize])?;
    let elsewhere = lab.hearth.dir().join("elsewhere");
    std::os::unix::fs::symlink(&lab.vms, &elsewhere)?;
    let mut origins = vec![
        path(&file).to_owned(),
        path(&elsewhere.join("sub/a.img")).to_owned(),
    ];
    let looped = Loop::new("datastore locks: loop", &file, &[]);
    origins.extend(looped.iter().map(|device| device.0.clone()));
    for origin in &origins {
        let add = ["disk", "add", "d", "--origin", origin];
        let words = lab.hearth.refused(&add)?;
        ensure!(words.contains("datastore vms"), "{origin}: {words}");
    }
    let tools = ["qemu-img", "qemu-storage-daemon"];
    if have("datastore locks: base", &tools) {
        let top = lab.hearth.dir().join("top.qcow2");
        let made = "create -q -f qcow2 -F raw -b".split(' ');
        let mut command = Command::new("qemu-img");
        ensure!(command.args(made).args([&file, &top]).status()?.success());
        let origin = format!("qcow2:{}", path(&top));
        let add = ["disk", "add", "d", "--origin", &origin, "--allow-backing"];
        let words = lab.hearth.refused(&add)?;
        ensure!(words.contains("datastore vms"), "{words}");
    }
    drop(looped);
    // Beside the datastore nothing is refused.
    let own = lab.hearth.origin("own.raw", 4 * M)?;
    lab.hearth.add("own", path(&own), &[])?;
    Ok(())
}

/// And a datastore over a directory that holds the data of a disk.
#[test]
fn datastore_over_disk_origin_is_refused() -> Result<()> {
    let lab = Lab::new()?;
    let dir = lab.hearth.dir().join("disks");
    fs::create_dir_all(dir.join("sub"))?;
    fs::write(dir.join("sub/a.raw"), vec![0; 4 * M as usize])?;
    let link = lab.hearth.dir().join("link.raw");
    std::os::unix::fs::symlink(dir.join("sub/a.raw"), &link)?;
    let add = [
        "datastore",
        "add",
        path(&dir),
        "--nfs",
        "--listen",
        "127.0.0.1:0",
    ];
    for origin in [&dir.join("sub/a.raw"), &link] {
        lab.hearth.add("d", path(origin), &[])?;
        let words = lab.hearth.refused(&add)?;
        ensure!(words.contains("the data of disk d"), "{words}");
        lab.hearth.ok(&["disk", "remove", "d"])?;
    }
    lab.hearth.ok(&add)?;
    Ok(())
}
