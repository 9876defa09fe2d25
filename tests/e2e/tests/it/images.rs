//! Disk images as origins: QEMU opens them in a process that Hearth keeps.

use anyhow::{Context, Result, ensure};
use hearth_rig::clients::{have, run, run_ok};
use hearth_rig::daemon::path;
use hearth_rig::load::{BLOCKS, Writer};
use hearth_rig::pattern::BLOCK;
use hearth_rig::{Hearth, wait};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest wait for a state that comes by itself.
const LIMIT: Duration = Duration::from_secs(60);
/// How long a load goes on before each kill.
const LOAD: Duration = Duration::from_millis(200);
const TOOLS: [&str; 2] = ["qemu-img", "qemu-storage-daemon"];

/// QEMU's name of a format.
fn driver(format: &str) -> &str {
    if format == "vhd" { "vpc" } else { format }
}

fn image(hearth: &Hearth, format: &str) -> Result<(PathBuf, String)> {
    let image = hearth.dir().join(format!("o.{format}"));
    let size = (BLOCKS as usize * BLOCK).to_string();
    let mut args = vec!["create", "-f", driver(format), path(&image), &size];
    if format == "vhd" {
        // Otherwise the size is one that has a geometry.
        args.extend(["-o", "force_size=on"]);
    }
    run_ok("qemu-img", &args, hearth.dir())?;
    let origin = format!("{format}:{}", path(&image));
    Ok((image, origin))
}

/// What an image holds, as a raw file beside it.
fn raw(hearth: &Hearth, format: &str, image: &Path) -> Result<PathBuf> {
    let out = hearth.dir().join("out.raw");
    run_ok(
        "qemu-img",
        &[
            "convert",
            "-f",
            driver(format),
            "-O",
            "raw",
            path(image),
            path(&out),
        ],
        hearth.dir(),
    )?;
    Ok(out)
}

fn show(hearth: &Hearth) -> Result<Value> {
    Ok(serde_json::from_str(
        &hearth.ok(&["disk", "show", "d", "--json"])?,
    )?)
}

fn attached(hearth: &Hearth) -> Result<()> {
    wait::until("attached", LIMIT, || {
        (show(hearth).ok()?["state"] == "attached").then_some(())
    })
    .with_context(|| hearth.log())
}

/// The process that has an image of this test open.
fn child(hearth: &Hearth) -> Option<u32> {
    let pids = std::fs::read_dir(hearth.run_dir().join("images")).ok()?;
    pids.flatten()
        .filter(|e| e.path().extension().is_some_and(|x| x == "pid"))
        .find_map(|e| {
            let text = std::fs::read_to_string(e.path()).ok()?;
            text.split(' ').next()?.parse().ok()
        })
}

/// The next process: the pid file of the one before stays for a moment.
fn another(hearth: &Hearth, last: u32) -> Result<u32> {
    wait::until("the process runs", LIMIT, || {
        child(hearth).filter(|pid| *pid != last)
    })
}

fn gone(pid: u32) -> Result<()> {
    wait::until("the process of the image ends", LIMIT, || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // A zombie waits for its new parent only.
        let ended = stat.is_empty()
            || stat
                .rsplit_once(')')
                .is_some_and(|(_, r)| r.starts_with(" Z"));
        ended.then_some(())
    })
}

fn kill9(pid: u32) -> Result<()> {
    // SAFETY: plain numbers; the process is one this test's daemon started.
    let sent = unsafe { libc::kill(pid as i32, libc::SIGKILL) };
    ensure!(sent == 0, "kill({pid})");
    Ok(())
}

/// The image's process is killed in the middle of a load, again and again; at the end the image
/// is whole and holds what was written, and nobody has it open.
fn survives(mode: &str) -> Result<()> {
    if !have("images: process killed", &TOOLS) {
        return Ok(());
    }
    let mut hearth = Hearth::serving("160M")?;
    let (image, origin) = image(&hearth, "qcow2")?;
    hearth.add("d", &origin, &["--mode", mode])?;
    let mut writer = Writer::new(23);
    let mut client = hearth.connect("d")?;
    let mut last = 0;
    for cycle in 0..4 {
        let pid = another(&hearth, last)?;
        last = pid;
        writer
            .load(&mut client, LOAD, || kill9(pid))
            .with_context(|| format!("{mode}, cycle {cycle}"))
            .with_context(|| hearth.log())?;
        gone(pid)?;
    }
    writer.flush(&mut client)?;
    writer.check_stable(&mut client)?;
    // Daemon and process die together; the next daemon finds the image free.
    let pid = another(&hearth, last)?;
    hearth.kill9()?;
    hearth.start()?;
    gone(pid)?;
    attached(&hearth)?;
    writer.check(&mut hearth.connect("d")?)?;
    hearth.ok(&["disk", "remove", "d"])?;
    ensure!(child(&hearth).is_none(), "a process is left");
    let check = run("qemu-img", &["check", path(&image)], hearth.dir())?;
    // 3: clusters nobody uses, which a killed process leaves and which harm nobody.
    ensure!(
        matches!(check.status.code(), Some(0 | 3)),
        "qemu-img check: {check:?}"
    );
    writer.check_file(&raw(&hearth, "qcow2", &image)?)
}

#[test]
fn a_killed_process_is_a_pause_in_write_back() -> Result<()> {
    survives("write-back")
}

#[test]
fn a_killed_process_is_a_pause_in_write_through() -> Result<()> {
    survives("write-through")
}

/// Every format: written through Hearth, left dirty over a clean stop, and whole at the end.
#[test]
fn formats() -> Result<()> {
    if !have("images: formats", &TOOLS) {
        return Ok(());
    }
    for format in ["qcow2", "vmdk", "vhdx", "vhd", "vdi", "raw"] {
        let formatted = || format!("format {format}");
        let mut hearth = Hearth::serving("160M")?;
        let (image, origin) = image(&hearth, format)?;
        hearth.add("d", &origin, &[]).with_context(formatted)?;
        let mut writer = Writer::new(5);
        let mut client = hearth.connect("d")?;
        writer
            .load(&mut client, LOAD, || Ok(()))
            .with_context(formatted)?;
        writer.flush(&mut client)?;
        drop(client);
        let pid = child(&hearth).context("no process")?;
        // Dirty blocks stay on flash, and the image is recognised as the one that was left.
        hearth.stop()?;
        gone(pid)?;
        hearth.start()?;
        attached(&hearth).with_context(formatted)?;
        let info = show(&hearth)?;
        ensure!(info["notices"].is_null(), "{format}: {info}");
        let mut client = hearth.connect("d")?;
        writer.check(&mut client).with_context(formatted)?;
        writer.load(&mut client, LOAD, || Ok(()))?;
        writer.flush(&mut client)?;
        drop(client);
        hearth
            .ok(&["disk", "remove", "d"])
            .with_context(formatted)?;
        if !matches!(format, "raw") {
            let check = run(
                "qemu-img",
                &["check", "-f", driver(format), path(&image)],
                hearth.dir(),
            )?;
            // 63: the format has no check.
            ensure!(
                matches!(check.status.code(), Some(0 | 63)),
                "{format}: qemu-img check: {check:?}"
            );
        }
        writer
            .check_file(&raw(&hearth, format, &image)?)
            .with_context(formatted)?;
    }
    Ok(())
}

/// An overlay on a base image; the base stays as it is.
#[test]
fn a_backing_chain() -> Result<()> {
    if !have("images: backing chain", &TOOLS) {
        return Ok(());
    }
    let hearth = Hearth::serving("160M")?;
    let base = hearth.origin("base.raw", 4 << 20)?;
    let before = std::fs::read(&base)?;
    let top = hearth.dir().join("top.qcow2");
    run_ok(
        "qemu-img",
        &[
            "create",
            "-f",
            "qcow2",
            "-F",
            "raw",
            "-b",
            path(&base),
            path(&top),
        ],
        hearth.dir(),
    )?;
    hearth.add("d", &format!("qcow2:{}", path(&top)), &["--allow-backing"])?;
    let mut client = hearth.connect("d")?;
    ensure!(
        client.read(0, 65536)? == before[..65536],
        "the base is not seen"
    );
    client.write(8192, &[9; 4096])?;
    drop(client);
    hearth.ok(&["disk", "remove", "d"])?;
    ensure!(std::fs::read(&base)? == before, "the base was written");
    let plain = std::fs::read(raw(&hearth, "qcow2", &top)?)?;
    ensure!(plain[8192..12288] == [9; 4096] && plain[..8192] == before[..8192]);
    Ok(())
}

/// An image somebody else writes while Hearth is stopped is noticed; one in use is refused; what is
/// no image, or not there, says so.
#[test]
fn refusals() -> Result<()> {
    if !have(
        "images: refusals",
        &["qemu-img", "qemu-storage-daemon", "qemu-nbd", "qemu-io"],
    ) {
        return Ok(());
    }
    let mut hearth = Hearth::serving("160M")?;
    let (image, origin) = image(&hearth, "qcow2")?;
    let user = hearth_rig::servers::Server::start(
        "qemu-nbd",
        &["-t", "-f", "qcow2", "-k", "{socket}", path(&image)],
        hearth.dir().join("q"),
    )?;
    let words = hearth.refused(&["disk", "add", "d", "--origin", &origin])?;
    ensure!(words.contains("in use by qemu-nbd"), "{words}");
    drop(user);
    let fake = hearth.dir().join("fake.qcow2");
    std::fs::write(&fake, vec![1; 65536])?;
    for (origin, want) in [
        (format!("qcow2:{}", path(&fake)), "not in qcow2 format"),
        ("vmdk:/nowhere".to_owned(), "No such file"),
        ("https://h/x".to_owned(), "--read-only"),
        ("rbd:x".to_owned(), "rbd:POOL/IMAGE"),
    ] {
        let words = hearth.refused(&["disk", "add", "d", "--origin", &origin])?;
        ensure!(words.contains(want), "{origin}: {words}");
    }
    ensure!(child(&hearth).is_none(), "a process is left");
    hearth.add("d", &origin, &[])?;
    let words = hearth.refused(&["disk", "add", "e", "--origin", &origin])?;
    ensure!(words.contains("already the origin"), "{words}");
    let mut client = hearth.connect("d")?;
    client.write(0, &[1; 4096])?;
    client.flush()?;
    drop(client);
    hearth.ok(&["disk", "flush", "d"])?;
    hearth.stop()?;
    run_ok(
        "qemu-io",
        &["-f", "qcow2", "-c", "write -P 2 32M 4k", path(&image)],
        hearth.dir(),
    )?;
    hearth.start()?;
    attached(&hearth)?;
    let info = show(&hearth)?;
    ensure!(
        info["notices"].to_string().contains("changed while"),
        "{info}"
    );
    ensure!(hearth.connect("d")?.read(32 << 20, 4096)? == [2; 4096]);
    Ok(())
}

/// Without QEMU: one sentence that says what to install.
#[test]
fn without_qemu() -> Result<()> {
    let mut hearth = Hearth::with_pool("160M")?;
    hearth.path = Some(hearth.dir().to_owned());
    hearth.start()?;
    let file = hearth.dir().join("x.qcow2");
    std::fs::write(&file, [0; 512])?;
    let origin = format!("qcow2:{}", path(&file));
    let words = hearth.refused(&["disk", "add", "d", "--origin", &origin])?;
    ensure!(
        words.contains("qemu-storage-daemon is not installed") && words.contains("install"),
        "{words}"
    );
    Ok(())
}

/// An image of another format is refused in words for people, not with QEMU's arguments.
#[test]
fn a_wrong_format_is_said_in_a_sentence() -> Result<()> {
    if !have("images: wrong format", &TOOLS) {
        return Ok(());
    }
    let hearth = Hearth::serving("160M")?;
    let (image, _) = image(&hearth, "qcow2")?;
    let origin = format!("vmdk:{}", path(&image));
    let out = hearth.hearth(&["disk", "add", "d", "--origin", &origin, "--json"])?;
    let said: Value = serde_json::from_slice(&out.stderr)?;
    let error = said["error"].as_str().context("an error")?;
    ensure!(
        error.contains(&origin) && !error.contains("node-name") && !error.contains("{"),
        "{said}"
    );
    ensure!(
        said["remedy"]
            .as_str()
            .is_some_and(|r| r.contains("qemu-img info")),
        "{said}"
    );
    Ok(())
}
