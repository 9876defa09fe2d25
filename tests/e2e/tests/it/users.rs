//! Other users of a disk's data: QEMU on the same file, the same data under another name.
//!
//! Exclusive: loop devices

use anyhow::{Context, Result, ensure};
use hearth_rig::child::bound_to_us;
use hearth_rig::clients::{find, have};
use hearth_rig::daemon::path;
use hearth_rig::{Hearth, wait};
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

/// Longest wait for a state that comes by itself.
const LIMIT: Duration = Duration::from_secs(60);
const QEMU: &str = "qemu-system-x86_64";
const MIB: u64 = 1 << 20;

/// A guest that never runs, with a disk.
struct Guest(Child);

impl Guest {
    fn start(disk: &Path, more: &str) -> Result<Guest> {
        let drive = format!("file={},format=raw,if=virtio{more}", path(disk));
        let mut command = Command::new(QEMU);
        command
            .args(["-name", "guest=web", "-S", "-display", "none"])
            .args(["-nodefaults", "-qmp", "stdio", "-m", "16", "-drive", &drive])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = bound_to_us(&mut command).spawn()?;
        // It greets at once, and answers when it has its disks, or ends.
        let answered = (|| {
            let (input, output) = (child.stdin.as_mut()?, child.stdout.as_mut()?);
            input
                .write_all(b"{\"execute\":\"qmp_capabilities\"}\n")
                .ok()?;
            let lines = BufReader::new(output).lines();
            lines
                .map_while(Result::ok)
                .find(|l| l.contains("\"return\""))
        })();
        if answered.is_none() {
            let out = child.wait_with_output()?;
            anyhow::bail!("{}", String::from_utf8_lossy(&out.stderr));
        }
        Ok(Guest(child))
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn run(program: &str, args: &[&str]) -> Result<Output> {
    Ok(Command::new(program).args(args).output()?)
}

fn write(disk: &Path) -> Result<Output> {
    let how = ["-f", "raw", "-c", "write -P 7 0 4k", path(disk)];
    run("qemu-io", &how)
}

fn is_refused(out: &Output) -> Result<()> {
    let words = String::from_utf8_lossy(&out.stderr);
    ensure!(
        !out.status.success() && words.contains("Failed to get \"write\" lock"),
        "{out:?}"
    );
    Ok(())
}

fn names(words: &str, all: &[&str]) -> Result<()> {
    for word in all {
        ensure!(words.contains(word), "\"{word}\" is not in: {words}");
    }
    Ok(())
}

fn disk(hearth: &Hearth, name: &str) -> Result<Value> {
    let text = hearth.ok(&["disk", "show", name, "--json"])?;
    Ok(serde_json::from_str(&text)?)
}

fn becomes(hearth: &Hearth, name: &str, state: &str) -> Result<()> {
    wait::until(&format!("{name} is {state}"), LIMIT, || {
        (disk(hearth, name).ok()?["state"] == state).then_some(())
    })
}

/// A loop device, taken away at the end.
pub struct Loop(pub String);

impl Loop {
    /// Nothing where this user may not make one.
    pub fn new(test: &str, file: &Path, more: &[&str]) -> Option<Loop> {
        let made = find("losetup").and_then(|program| {
            let out = Command::new(program)
                .args(["--find", "--show"])
                .args(more)
                .arg(file)
                .output()
                .ok()?;
            let name = String::from_utf8(out.stdout).ok()?.trim().to_owned();
            (out.status.success() && !name.is_empty()).then_some(Loop(name))
        });
        if made.is_none() {
            eprintln!("skipped: {test}: no loop devices here");
        }
        made
    }

    fn path(&self) -> &Path {
        self.0.as_ref()
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

/// Of a device that may be large only both ends are read.
#[test]
fn pool_on_used_device_needs_force() -> Result<()> {
    let hearth = Hearth::bare()?;
    let under = hearth.dir().join("under.img");
    let file = std::fs::File::create(&under)?;
    file.set_len(64 * MIB)?;
    let Some(device) = Loop::new("users: a used device", &under, &[]) else {
        return Ok(());
    };
    let create = ["pool", "create", "--flash", &device.0];
    for at in [8192, 64 * MIB - 4096] {
        std::os::unix::fs::FileExt::write_all_at(&file, &[1], at)?;
        file.sync_all()?;
        let words = hearth.refused(&create)?;
        names(&words, &[&device.0, "is not empty", "--force"])?;
        std::os::unix::fs::FileExt::write_all_at(&file, &[0], at)?;
        file.sync_all()?;
    }
    hearth.ok(&create).map(drop)
}

#[test]
fn qemu_and_hearth_see_each_other_on_a_file() -> Result<()> {
    if !have("users: a file", &[QEMU, "qemu-io", "qemu-img"]) {
        return Ok(());
    }
    let mut hearth = Hearth::serving("64M")?;
    let origin = hearth.origin("vm.raw", 8 * MIB)?;
    let add = ["disk", "add", "vm", "--origin", path(&origin)];
    let guest = Guest::start(&origin, "")?;
    let who = format!("qemu-system-x86_64 running web (pid {})", guest.pid());
    names(&hearth.refused(&add)?, &["vm.raw", &who])?;
    // What somebody writes cannot be cached either.
    let read_only = [&add[..], &["--read-only"]].concat();
    names(&hearth.refused(&read_only)?, &[&who])?;
    drop(guest);
    // Two that only read share.
    let guest = Guest::start(&origin, ",readonly=on")?;
    names(&hearth.refused(&add)?, &["vm.raw", "pid"])?;
    hearth.ok(&read_only)?;
    is_refused(&write(&origin)?)?;
    drop(guest);
    hearth.ok(&["disk", "remove", "vm"])?;

    hearth.ok(&add)?;
    is_refused(&write(&origin)?)?;
    ensure!(Guest::start(&origin, "").is_err());
    // Who only looks is treated as beside a running guest.
    let look = run("qemu-img", &["info", "-f", "raw", path(&origin)])?;
    ensure!(look.status.success(), "{look:?}");
    hearth.ok(&["disk", "remove", "vm"])?;
    ensure!(
        write(&origin)?.status.success(),
        "still locked after the removal"
    );

    hearth.ok(&add)?;
    hearth.kill9()?;
    // The kernel takes its rings down a moment later.
    wait::until("the locks of a killed daemon are gone", LIMIT, || {
        write(&origin).ok()?.status.success().then_some(())
    })?;
    Ok(())
}

#[test]
fn a_disk_waits_for_the_guest_that_has_its_file() -> Result<()> {
    if !have("users: waiting", &[QEMU]) {
        return Ok(());
    }
    let mut hearth = Hearth::serving("64M")?;
    let origin = hearth.origin("vm.raw", 8 * MIB)?;
    hearth.add("vm", path(&origin), &[])?;
    hearth.stop()?;
    let mut guest = Guest::start(&origin, "")?;
    hearth.start()?;
    let shown = disk(&hearth, "vm")?;
    ensure!(shown["state"] == "waiting", "{shown}");
    let reason = wait::until("the reason names the holder", LIMIT, || {
        let shown = disk(&hearth, "vm").ok()?;
        let reason = shown["reason"].as_str()?.to_owned();
        reason.contains("pid").then_some(reason)
    })?;
    let pid = format!("(pid {})", guest.pid());
    names(&reason, &["vm.raw", "qemu-system-x86_64", &pid])?;
    // After a kill -9 nothing stays behind.
    guest.0.kill()?;
    guest.0.wait()?;
    becomes(&hearth, "vm", "attached")
}

#[test]
fn no_pool_is_made_of_a_running_guests_disk() -> Result<()> {
    if !have("users: flash", &[QEMU, "qemu-io"]) {
        return Ok(());
    }
    let mut hearth = Hearth::bare()?;
    let blank = hearth.dir().join("blank.raw");
    std::fs::File::create(&blank)?.set_len(64 * MIB)?;
    let guest = Guest::start(&blank, "")?;
    let create = ["pool", "create", "--flash", path(&blank)];
    let pid = format!("(pid {})", guest.pid());
    for more in [&[][..], &["--force"], &["--force", "--size", "64M"]] {
        let words = hearth.refused(&[&create[..], more].concat())?;
        names(&words, &["blank.raw", "qemu-system-x86_64", &pid])?;
    }
    ensure!(std::fs::read(&blank)?.iter().all(|byte| *byte == 0));
    drop(guest);
    hearth.ok(&create)?;
    hearth.set_flash(blank.clone());
    hearth.start()?;
    is_refused(&write(&blank)?)?;
    let pid = format!("(pid {})", hearth.pid().unwrap_or_default());
    let words = hearth.refused(&[&create[..], &["--force"]].concat())?;
    names(&words, &["hearth", &pid])?;
    // Looking needs no lock.
    hearth.ok(&["pool", "show", "--flash", path(&blank)])?;
    hearth.stop()?;
    let guest = Guest::start(&blank, "")?;
    let words = hearth.start_refused()?;
    names(
        &words,
        &["qemu-system-x86_64", &format!("(pid {})", guest.pid())],
    )
}

#[test]
fn a_file_and_its_loop_device_are_one_disk() -> Result<()> {
    let hearth = Hearth::serving("64M")?;
    let origin = hearth.origin("a.raw", 8 * MIB)?;
    let Some(looped) = Loop::new("users: loop", &origin, &[]) else {
        return Ok(());
    };
    let add = |name, origin| ["disk", "add", name, "--origin", origin];
    hearth.ok(&add("a", path(&origin)))?;
    let words = hearth.refused(&add("b", &looped.0))?;
    names(&words, &[&looped.0, "a.raw", "disk a"])?;
    hearth.ok(&["disk", "remove", "a"])?;
    hearth.ok(&add("b", &looped.0))?;
    names(&hearth.refused(&add("a", path(&origin)))?, &["disk b"])?;
    // Others that use the file by its name are told as well.
    if have("users: loop", &["qemu-io"]) {
        is_refused(&write(&origin)?)?;
    }
    hearth.ok(&["disk", "remove", "b"])?;
    // The flash is a file like others.
    let Some(flash) = Loop::new("users: loop", hearth.flash(), &[]) else {
        return Ok(());
    };
    let words = hearth.refused(&add("c", &flash.0))?;
    names(&words, &[&flash.0, "flash.img"])?;
    Ok(())
}

#[test]
fn stretches_of_one_file_are_disks_of_their_own() -> Result<()> {
    let hearth = Hearth::serving("64M")?;
    let file = hearth.origin("a.raw", 16 * MIB)?;
    let half = MIB * 8;
    let (offset, size) = (half.to_string(), half.to_string());
    let low = Loop::new("users: stretches", &file, &["--sizelimit", &size]);
    let high = Loop::new("users: stretches", &file, &["--offset", &offset]);
    let across = Loop::new(
        "users: stretches",
        &file,
        &["--offset", "4M", "--sizelimit", &size],
    );
    let (Some(low), Some(high), Some(across)) = (low, high, across) else {
        return Ok(());
    };
    let add = |name, origin| ["disk", "add", name, "--origin", origin];
    hearth.ok(&add("low", &low.0))?;
    hearth.ok(&add("high", &high.0))?;
    names(&hearth.refused(&add("across", &across.0))?, &["disk low"])?;
    hearth.ok(&["disk", "remove", "low"])?;
    names(&hearth.refused(&add("across", &across.0))?, &["disk high"])?;
    Ok(())
}

/// As drives do that swap their names at a boot: dirty blocks must not go to the other one.
#[test]
fn devices_that_swapped_names_are_refused() -> Result<()> {
    let mut hearth = Hearth::serving("64M")?;
    let files = [
        hearth.origin("a.raw", 8 * MIB)?,
        hearth.origin("b.raw", 8 * MIB)?,
    ];
    let Some(one) = Loop::new("users: swapped", &files[0], &[]) else {
        return Ok(());
    };
    let Some(two) = Loop::new("users: swapped", &files[1], &[]) else {
        return Ok(());
    };
    hearth.add("a", &one.0, &[])?;
    let info = disk(&hearth, "a")?;
    ensure!(info["device"].to_string().contains("inode"), "{info}");
    let mut client = hearth.connect("a")?;
    client.write(4 * MIB, &[0xEE; 65536])?;
    client.flush()?;
    drop(client);
    hearth.kill9()?;
    let before = std::fs::read(&files[1])?;
    for (device, file) in [(&one, &files[1]), (&two, &files[0])] {
        ensure!(run("losetup", &["--detach", &device.0])?.status.success());
        ensure!(run("losetup", &[&device.0, path(file)])?.status.success());
    }
    hearth.start()?;
    becomes(&hearth, "a", "refused")?;
    let info = disk(&hearth, "a")?;
    names(&info["reason"].to_string(), &["another device", "inode"])?;
    hearth.stop()?;
    ensure!(
        std::fs::read(&files[1])? == before,
        "the wrong device was written"
    );
    Ok(())
}

#[test]
fn a_pool_is_not_opened_twice_through_a_loop_device() -> Result<()> {
    let hearth = Hearth::serving("64M")?;
    let Some(looped) = Loop::new("users: pool", hearth.flash(), &[]) else {
        return Ok(());
    };
    let mut second = Hearth::bare()?;
    second.set_flash(looped.path().to_owned());
    let words = second.start_refused()?;
    let pid = format!("(pid {})", hearth.pid().unwrap_or_default());
    names(&words, &[&looped.0, "flash.img", &pid])?;
    let create = ["pool", "create", "--force", "--flash", &looped.0];
    names(&second.refused(&create)?, &["flash.img", &pid])?;
    // And the other way round.
    drop(hearth);
    let mut first = Hearth::with_pool("64M")?;
    let flash = first.flash().to_owned();
    let Some(looped) = Loop::new("users: pool", &flash, &[]) else {
        return Ok(());
    };
    first.set_flash(looped.path().to_owned());
    first.start()?;
    second.set_flash(flash);
    let pid = format!("(pid {})", first.pid().unwrap_or_default());
    names(&second.start_refused()?, &["flash.img", &pid])
}

#[test]
fn guests_on_loop_devices_and_below_them_are_seen() -> Result<()> {
    if !have("users: guest and loop", &[QEMU, "qemu-io"]) {
        return Ok(());
    }
    let hearth = Hearth::serving("64M")?;
    let origin = hearth.origin("vm.raw", 8 * MIB)?;
    let Some(looped) = Loop::new("users: guest and loop", &origin, &[]) else {
        return Ok(());
    };
    let add = |origin| ["disk", "add", "vm", "--origin", origin];
    // On the file below the loop device, on the device, and on the device above the file.
    for (guest_has, origin) in [
        (&*origin, &*looped.0),
        (looped.path(), &looped.0),
        (looped.path(), path(&origin)),
    ] {
        let guest = Guest::start(guest_has, "")?;
        let pid = format!("(pid {})", guest.pid());
        names(
            &hearth.refused(&add(origin))?,
            &[path(guest_has), "qemu-system-x86_64", &pid],
        )?;
    }
    hearth.ok(&add(&looped.0))?;
    is_refused(&write(looped.path())?)?;
    ensure!(Guest::start(looped.path(), "").is_err());
    Ok(())
}

#[test]
fn what_is_mounted_is_named_with_its_mount_point() -> Result<()> {
    if !have("users: mount", &["mkfs.ext4", "mount"]) {
        return Ok(());
    }
    let hearth = Hearth::serving("64M")?;
    let origin = hearth.dir().join("fs.raw");
    std::fs::File::create(&origin)?.set_len(16 * MIB)?;
    let made = run("mkfs.ext4", &["-q", path(&origin)])?;
    ensure!(made.status.success(), "{made:?}");
    let Some(looped) = Loop::new("users: mount", &origin, &[]) else {
        return Ok(());
    };
    let point = hearth.dir().join("a mount");
    std::fs::create_dir(&point)?;
    if !run("mount", &[&looped.0, path(&point)])?.status.success() {
        eprintln!("skipped: users: mount: no right to mount");
        return Ok(());
    }
    let add = |origin| ["disk", "add", "vm", "--origin", origin];
    let by_device = hearth.refused(&add(&looped.0));
    let by_file = hearth.refused(&add(path(&origin)));
    let flash = hearth.refused(&["pool", "create", "--force", "--flash", path(&origin)]);
    let unmounted = run("umount", &[path(&point)])?;
    let place = format!("mounted at {}", path(&point));
    names(&by_device?, &[&place])?;
    for words in [by_file?, flash?] {
        names(&words, &[path(&origin), &looped.0, &place])?;
    }
    ensure!(unmounted.status.success(), "{unmounted:?}");
    hearth.ok(&add(path(&origin)))?;
    Ok(())
}

/// A file system, mounted for as long as this is there.
struct Mounted<'a>(&'a Path);

impl Mounted<'_> {
    fn new<'a>(device: &Loop, point: &'a Path) -> Option<Mounted<'a>> {
        let done = run("mount", &[&device.0, path(point)]).is_ok_and(|out| out.status.success());
        done.then_some(Mounted(point))
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _ = run("umount", &[path(self.0)]);
    }
}

/// QEMU's process would write beneath the file system without a word.
#[test]
fn an_image_on_a_mounted_device_is_refused() -> Result<()> {
    let test = "users: image on a mounted device";
    let programs = ["mkfs.ext4", "mount", "qemu-img", "qemu-storage-daemon"];
    if !have(test, &programs) {
        return Ok(());
    }
    let mut hearth = Hearth::serving("64M")?;
    hearth.stop()?;
    hearth.serve_args = vec!["--backing-dir".to_owned(), "/dev".to_owned()];
    hearth.start()?;
    let file = tempfile::NamedTempFile::new()?;
    file.as_file().set_len(16 * MIB)?;
    let made = run("mkfs.ext4", &["-q", path(file.path())])?;
    ensure!(made.status.success(), "{made:?}");
    let Some(looped) = Loop::new(test, file.path(), &[]) else {
        return Ok(());
    };
    let dir = tempfile::tempdir()?;
    let Some(mounted) = Mounted::new(&looped, dir.path()) else {
        eprintln!("skipped: {test}: no right to mount");
        return Ok(());
    };
    let place = format!("mounted at {}", path(dir.path()));
    let origin = format!("raw:{}", looped.0);
    let add = ["disk", "add", "vm", "--origin", &origin];
    names(&hearth.refused(&add)?, &[&looped.0, &place])?;
    // An image may also keep its data there.
    let image = hearth.dir().join("data.qcow2");
    let made = |size: &str| {
        let option = format!("data_file={},data_file_raw=on", looped.0);
        let more = ["-o", &option, path(&image), size];
        run(
            "qemu-img",
            &[&["create", "-q", "-f", "qcow2"][..], &more].concat(),
        )
    };
    drop(mounted);
    let out = made("16M")?;
    ensure!(out.status.success(), "{out:?}");
    let remade = run("mkfs.ext4", &["-q", &looped.0])?;
    ensure!(remade.status.success(), "{remade:?}");
    let mounted = Mounted::new(&looped, dir.path()).context("mounted again")?;
    let over = format!("qcow2:{}", path(&image));
    let add_data = ["disk", "add", "data", "--origin", &over, "--allow-backing"];
    names(&hearth.refused(&add_data)?, &[&looped.0, &place])?;
    drop(mounted);

    // Ours, and nobody can mount it meanwhile, whatever becomes of the process that has it open.
    for (name, add) in [("data", &add_data[..]), ("vm", &add[..])] {
        hearth.ok(add)?;
        ensure!(Mounted::new(&looped, dir.path()).is_none(), "{name}");
        hearth.ok(&["disk", "set", name, "--size-from-origin"])?;
        hearth.connect(name)?.write(MIB, &[3; 4096])?;
        hearth.ok(&["disk", "flush", name])?;
        hearth.kill9()?;
        hearth.start()?;
        becomes(&hearth, name, "attached")?;
        ensure!(hearth.connect(name)?.read(MIB, 4096)? == [3; 4096]);
        hearth.ok(&["disk", "remove", name])?;
        let remade = run("mkfs.ext4", &["-q", "-F", &looped.0])?;
        ensure!(remade.status.success(), "{remade:?}");
        drop(Mounted::new(&looped, dir.path()).context("nobody has it")?);
    }

    // A disk that was there before waits for who has its device.
    hearth.ok(&add)?;
    hearth.stop()?;
    let mounted = Mounted::new(&looped, dir.path()).context("nobody has it")?;
    hearth.start()?;
    let shown = disk(&hearth, "vm")?;
    ensure!(shown["state"] == "waiting", "{shown}");
    names(
        shown["reason"].as_str().unwrap_or_default(),
        &[&looped.0, &place],
    )?;
    drop(mounted);
    hearth.ok(&["disk", "remove", "vm", "--yes"]).map(drop)
}

/// An earlier version took two disks on the same data, or the loop device was moved since.
#[test]
fn of_two_disks_on_the_same_data_the_first_is_served() -> Result<()> {
    let mut hearth = Hearth::serving("64M")?;
    let (a, b) = (
        hearth.origin("a.raw", 8 * MIB)?,
        hearth.origin("b.raw", 8 * MIB)?,
    );
    let Some(looped) = Loop::new("users: two disks", &b, &[]) else {
        return Ok(());
    };
    // In the registry the file comes first once, and the loop device once.
    for first in ["file", "loop"] {
        let second = if first == "file" { "loop" } else { "file" };
        for name in [first, second] {
            let origin = if name == "file" { path(&a) } else { &looped.0 };
            hearth.add(name, origin, &[])?;
        }
        hearth.stop()?;
        let node = looped.0.clone();
        let moved = |to: &Path| -> Result<()> {
            let gone = run("losetup", &["--detach", &node])?;
            ensure!(gone.status.success(), "{gone:?}");
            wait::until("the loop device is over another file", LIMIT, || {
                let out = run("losetup", &[&node, path(to)]).ok()?;
                out.status.success().then_some(())
            })
        };
        moved(&a)?;
        hearth.start()?;
        becomes(&hearth, first, "attached")?;
        let shown = disk(&hearth, second)?;
        ensure!(shown["state"] == "waiting", "{shown}");
        let reason = shown["reason"].as_str().unwrap_or_default();
        names(reason, &[&format!("disk {first}"), "same data"])?;
        // It is its turn when the other is gone.
        hearth.ok(&["disk", "remove", first])?;
        becomes(&hearth, second, "attached")?;
        hearth.ok(&["disk", "remove", second])?;
        moved(&b)?;
    }
    Ok(())
}

/// A drive of another owner that got a leg's name at a reboot.
#[test]
fn stranger_with_leg_name_is_not_overwritten() -> Result<()> {
    let mut hearth = Hearth::serving("64M")?;
    let legs = ["a.raw", "b.raw"].map(|name| hearth.dir().join(name));
    for leg in &legs {
        std::fs::File::create(leg)?.set_len(8 * MIB)?;
    }
    let stranger = hearth.origin("c.raw", 8 * MIB)?;
    let devices = legs
        .each_ref()
        .map(|file| Loop::new("users: a stranger", file, &[]));
    let [Some(one), Some(two)] = devices else {
        return Ok(());
    };
    let mirror = ["--mirror", &one.0, "--mirror", &two.0];
    hearth.ok(&[&["disk", "add", "d"][..], &mirror].concat())?;
    hearth.connect("d")?.write(0, &[0xEE; 65536])?;
    hearth.ok(&["disk", "flush", "d"])?;
    hearth.stop()?;
    let before = std::fs::read(&stranger)?;
    ensure!(run("losetup", &["--detach", &two.0])?.status.success());
    ensure!(run("losetup", &[&two.0, path(&stranger)])?.status.success());
    hearth.start()?;
    becomes(&hearth, "d", "attached")?;
    let words = hearth.ok(&["disk", "show", "d"])?;
    names(&words, &["another device is in its place"])?;
    ensure!(hearth.connect("d")?.read(0, 65536)? == [0xEE; 65536]);
    hearth.stop()?;
    ensure!(
        std::fs::read(&stranger)? == before,
        "the stranger's drive was written"
    );
    Ok(())
}

/// An image is opened by a process of ours, which locks it; what it lies on, we do.
#[test]
fn an_image_on_a_loop_device_has_one_user() -> Result<()> {
    let programs = [QEMU, "qemu-img", "qemu-io", "qemu-storage-daemon"];
    if !have("users: image", &programs) {
        return Ok(());
    }
    let hearth = Hearth::serving("64M")?;
    let file = hearth.dir().join("a.qcow2");
    let made = run(
        "qemu-img",
        &["create", "-q", "-f", "qcow2", path(&file), "8M"],
    )?;
    ensure!(made.status.success(), "{made:?}");
    std::fs::File::options()
        .write(true)
        .open(&file)?
        .set_len(4 * MIB)?;
    let add = |origin: &str| {
        let origin = format!("qcow2:{origin}");
        ["disk", "add", "vm", "--origin", &origin].map(str::to_owned)
    };
    let refused = |args: [String; 5]| hearth.refused(&args.each_ref().map(|a| &**a));
    let guest = Guest::start(&file, "")?;
    let pid = format!("(pid {})", guest.pid());
    names(&refused(add(path(&file)))?, &["a.qcow2", &pid])?;
    let Some(looped) = Loop::new("users: image", &file, &[]) else {
        return Ok(());
    };
    names(&refused(add(&looped.0))?, &["a.qcow2", &looped.0, &pid])?;
    drop(guest);
    hearth.ok(&add(&looped.0).each_ref().map(|a| &**a))?;
    is_refused(&write(&file)?)?;
    let words = hearth.refused(&["disk", "add", "b", "--origin", path(&file)])?;
    names(&words, &["disk vm"])?;
    Ok(())
}

/// Partitions the kernel is told of, without a table.
struct Partitions<'a>(&'a Loop);

impl Partitions<'_> {
    fn new(disk: &Loop) -> Option<Partitions<'_>> {
        let added = Partitions(disk);
        // Sectors: 8 MiB each, behind the first MiB.
        for (number, start) in [("1", "2048"), ("2", "18432")] {
            let how = [&*disk.0, number, start, "16384"];
            if !run("addpart", &how).is_ok_and(|out| out.status.success()) {
                eprintln!("skipped: users: partitions: the kernel takes none");
                return None;
            }
        }
        Some(added)
    }
}

impl Drop for Partitions<'_> {
    fn drop(&mut self) {
        for number in ["1", "2"] {
            let _ = run("delpart", &[&self.0.0, number]);
        }
    }
}

#[test]
fn partitions_are_disks_of_their_own_and_parts_of_theirs() -> Result<()> {
    if !have("users: partitions", &["addpart", "delpart", QEMU]) {
        return Ok(());
    }
    let disk = tempfile::NamedTempFile::new()?;
    disk.as_file().set_len(32 * MIB)?;
    let Some(whole) = Loop::new("users: partitions", disk.path(), &[]) else {
        return Ok(());
    };
    let Some(_partitions) = Partitions::new(&whole) else {
        return Ok(());
    };
    let (one, two) = (format!("{}p1", whole.0), format!("{}p2", whole.0));
    // Dropped first: it has the partitions open.
    let hearth = Hearth::serving("64M")?;
    let add = |name, origin| ["disk", "add", name, "--origin", origin];
    hearth.ok(&add("one", &one))?;
    hearth.ok(&add("two", &two))?;
    for origin in [&whole.0, path(disk.path())] {
        names(&hearth.refused(&add("all", origin))?, &["disk one"])?;
    }
    hearth.ok(&["disk", "remove", "one"])?;
    hearth.ok(&["disk", "remove", "two"])?;
    for (guest_has, origin) in [(&one, &whole.0), (&whole.0, &two)] {
        let guest = Guest::start(guest_has.as_ref(), "")?;
        let pid = format!("(pid {})", guest.pid());
        names(&hearth.refused(&add("all", origin))?, &[guest_has, &pid])?;
    }
    hearth.ok(&add("all", &whole.0))?;
    Ok(())
}

/// Whatever writes asks first, also without a daemon.
#[test]
fn a_replay_does_not_write_what_a_guest_has() -> Result<()> {
    if !have("users: replay", &[QEMU, "qemu-io"]) {
        return Ok(());
    }
    let hearth = Hearth::serving("64M")?;
    let origin = hearth.origin("vm.raw", 8 * MIB)?;
    hearth.add("vm", path(&origin), &[])?;
    let trace = hearth.dir().join("a.trace");
    hearth.ok(&["trace", "record", "vm", "--out", path(&trace)])?;
    let wrote = run(
        "qemu-io",
        &["-f", "raw", "-c", "write 0 4k", &hearth.uri("vm")],
    )?;
    ensure!(wrote.status.success(), "{wrote:?}");
    hearth.ok(&["trace", "record", "vm", "--stop"])?;
    let other = hearth.origin("other.raw", 8 * MIB)?;
    let before = std::fs::read(&other)?;
    let guest = Guest::start(&other, "")?;
    let replay = [
        "trace",
        "replay",
        path(&trace),
        "--to",
        path(&other),
        "--overwrite",
    ];
    let pid = format!("(pid {})", guest.pid());
    names(&hearth.refused(&replay)?, &["qemu-system-x86_64", &pid])?;
    ensure!(std::fs::read(&other)? == before);
    drop(guest);
    hearth.ok(&replay)?;
    Ok(())
}
