//! Disks whose origin is a mirror: legs that die, hang and come back while a guest works, and a daemon that
//! is killed in between.

mod becoming;
mod places;
mod rollback;
mod scrubs;

use anyhow::{Context, Result, ensure};
use hearth_rig::clients::{have, run_ok};
use hearth_rig::daemon::path;
use hearth_rig::load::{BLOCKS, Writer};
use hearth_rig::nbd::Client;
use hearth_rig::pattern::BLOCK;
use hearth_rig::servers::Server;
use hearth_rig::{Hearth, wait};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest wait for a state that comes by itself: longer than a leg is left alone that went out or could not be opened a few
/// times in a row, which is five minutes. On a busy host that is soon so: it is looked for while its server hangs, or is down.
const LIMIT: Duration = Duration::from_secs(600);
/// How long a load goes on before something happens.
const LOAD: Duration = Duration::from_millis(300);

/// How often a daemon is killed in a test that does so again and again: `few`, or what CYCLES says.
fn kills(few: u32) -> u32 {
    let told = std::env::var("CYCLES").ok();
    told.and_then(|n| n.parse().ok()).unwrap_or(few)
}

fn blank(hearth: &Hearth, name: &str) -> Result<PathBuf> {
    let file = hearth.dir().join(name);
    let made = std::fs::File::create(&file)?;
    made.set_len(BLOCKS * BLOCK as u64)?;
    Ok(file)
}

/// A daemon, and two legs with nothing on them.
fn two_legs() -> Result<(Hearth, PathBuf, PathBuf)> {
    let hearth = Hearth::serving("160M")?;
    let (a, b) = (blank(&hearth, "a")?, blank(&hearth, "b")?);
    Ok((hearth, a, b))
}

/// What each leg is.
fn states(hearth: &Hearth) -> Result<Vec<String>> {
    let info: serde_json::Value =
        serde_json::from_str(&hearth.ok(&["disk", "show", "d", "--json"])?)?;
    let legs = legs_of(&info);
    ensure!(!legs.is_empty(), "no legs");
    Ok(legs)
}

/// The same in what is said of a disk; none of one that is no mirror.
fn legs_of(info: &serde_json::Value) -> Vec<String> {
    let legs = info["legs"].as_array().into_iter().flatten();
    let state = |leg: &serde_json::Value| leg["state"].as_str().unwrap_or_default().to_owned();
    legs.map(state).collect()
}

/// Does this while the disk is used.
fn busy(
    hearth: &Hearth,
    writer: &mut Writer,
    client: &mut Client,
    args: &[&str],
) -> Result<String> {
    std::thread::scope(|scope| {
        let work = scope.spawn(|| hearth.ok(args));
        writer.load_while(client, || !work.is_finished(), || Ok(()))?;
        let said = work.join().map_err(|_| anyhow::anyhow!("it panicked"))?;
        said.with_context(|| format!("{args:?}"))
    })
}

/// Waits until an event of this kind says this of the disk.
fn wait_event(hearth: &Hearth, kind: &str, says: &str) -> Result<()> {
    let kind = format!("\"event\":\"{kind}\"");
    wait::until(&format!("{kind} with {says}"), LIMIT, || {
        let events = hearth.ok(&["events", "--disk", "d", "--json"]).ok()?;
        let told = |line: &str| line.contains(&kind) && line.contains(says);
        events.lines().any(told).then_some(())
    })
    .with_context(|| hearth.log())
}

fn wait_states(hearth: &Hearth, want: &[&str]) -> Result<()> {
    wait::until(&format!("legs are {want:?}"), LIMIT, || {
        (states(hearth).ok()? == want).then_some(())
    })
    .with_context(|| hearth.ok(&["disk", "show", "d"]).unwrap_or_default())
    .with_context(|| hearth.log())
}

fn attached(hearth: &Hearth) -> Result<()> {
    wait::until("attached", LIMIT, || {
        let shown = hearth.ok(&["disk", "show", "d", "--json"]).ok()?;
        shown.contains("\"attached\"").then_some(())
    })
    .with_context(|| hearth.log())
}

fn add(hearth: &Hearth, legs: &[&str], more: &[&str]) -> Result<String> {
    let mut args = vec!["disk", "add", "d"];
    for leg in legs {
        args.extend(["--mirror", leg]);
    }
    args.extend(more);
    hearth.ok(&args)
}

/// An NBD server on `file` that answers with errors while the file `fail` is there.
fn server(hearth: &Hearth, file: &Path, fail: &Path) -> Result<Server> {
    failing(hearth, file, "error", fail)
}

/// The same, of which only what `kind` says fails.
fn failing(hearth: &Hearth, file: &Path, kind: &str, fail: &Path) -> Result<Server> {
    let error = format!("{kind}-file={}", path(fail));
    let (what, rate) = (format!("{kind}=EIO"), format!("{kind}-rate=100%"));
    let name = file.file_name().context("no name")?;
    let what = ["--filter=error", "file", path(file), &what, &rate, &error];
    Server::start(
        "nbdkit",
        &[&["-f", "-U", "{socket}"], &what[..]].concat(),
        hearth.dir().join(name).with_extension("s"),
    )
}

/// What was written is flushed, the client goes, and the disk is all on each leg.
fn end(hearth: &mut Hearth, writer: &mut Writer, mut client: Client, legs: &[&Path]) -> Result<()> {
    writer.flush(&mut client)?;
    drop(client);
    hearth.ok(&["disk", "flush", "d"])?;
    hearth.stop()?;
    for leg in legs {
        writer.check_file(leg)?;
    }
    let first = std::fs::read(legs[0])?;
    for leg in &legs[1..] {
        ensure!(std::fs::read(leg)? == first, "the legs are not the same");
    }
    Ok(())
}

#[test]
fn each_leg_is_the_disk() -> Result<()> {
    for mode in ["write-back", "write-through"] {
        let (mut hearth, a, b) = two_legs()?;
        add(&hearth, &[path(&a), path(&b)], &["--mode", mode])?;
        let mut writer = Writer::new(3);
        let mut client = hearth.connect("d")?;
        writer.load(&mut client, LOAD, || Ok(()))?;
        writer.flush(&mut client)?;
        writer.check_stable(&mut client)?;
        wait_states(&hearth, &["current", "current"])?;
        let shown = hearth.ok(&["disk", "show", "d"])?;
        ensure!(
            shown.contains("mirror") && shown.contains("current"),
            "{shown}"
        );
        end(&mut hearth, &mut writer, client, &[&a, &b])?;
        // And they are still believed.
        hearth.start()?;
        attached(&hearth)?;
        ensure!(states(&hearth)? == ["current", "current"]);
        writer.check(&mut hearth.connect("d")?)?;
    }
    Ok(())
}

/// An image that stands alone may be a leg beside a file, also over a kill; one that names another file may not.
#[test]
fn an_image_that_names_no_other_file_may_be_a_leg() -> Result<()> {
    if !have(
        "mirrors: an image as a leg",
        &["qemu-img", "qemu-storage-daemon"],
    ) {
        return Ok(());
    }
    let (mut hearth, _, b) = two_legs()?;
    let image = hearth.dir().join("o.qcow2");
    let over = hearth.dir().join("over.qcow2");
    let out = hearth.dir().join("out.raw");
    let size = (BLOCKS * BLOCK as u64).to_string();
    let dir = hearth.dir().to_owned();
    let img = |args: &[&str]| run_ok("qemu-img", args, &dir);
    img(&["create", "-f", "qcow2", path(&image), &size])?;
    let backed = ["-b", path(&image), "-F", "qcow2", path(&over)];
    img(&[&["create", "-f", "qcow2"], &backed[..]].concat())?;
    let overlay = format!("qcow2:{}", path(&over));
    let refused = hearth.refused(&[
        "disk",
        "add",
        "d",
        "--mirror",
        &overlay,
        "--mirror",
        path(&b),
    ])?;
    ensure!(refused.contains("names another file"), "{refused}");
    // Neither does a disk that is served from one become a mirror: what lies below would not be opened for a leg.
    hearth.add("below", &overlay, &["--allow-backing"])?;
    let refused = hearth.refused(&["disk", "mirror", "below", "--add", path(&b)])?;
    ensure!(refused.contains("names another file"), "{refused}");
    hearth.ok(&["disk", "remove", "below"])?;
    add(
        &hearth,
        &[&format!("qcow2:{}", path(&image)), path(&b)],
        &[],
    )?;
    let mut writer = Writer::new(5);
    let mut client = hearth.connect("d")?;
    writer.load(&mut client, LOAD, || Ok(()))?;
    writer.load(&mut client, LOAD, || hearth.kill9())?;
    drop(client);
    hearth.start()?;
    attached(&hearth)?;
    let mut client = hearth.connect("d")?;
    writer.check(&mut client)?;
    wait_states(&hearth, &["current", "current"])?;
    end(&mut hearth, &mut writer, client, &[&b])?;
    img(&[
        "convert",
        "-f",
        "qcow2",
        "-O",
        "raw",
        path(&image),
        path(&out),
    ])?;
    writer.check_file(&out)
}

#[test]
fn legs_that_hold_something_else_are_not_overwritten() -> Result<()> {
    let (hearth, a, b) = two_legs()?;
    std::fs::write(hearth.dir().join("small"), vec![0; 4096])?;
    let small = hearth.dir().join("small");
    let refused = |legs: [&Path; 2]| {
        let (one, two) = (path(legs[0]), path(legs[1]));
        hearth.refused(&["disk", "add", "d", "--mirror", one, "--mirror", two])
    };
    ensure!(refused([&a, &small])?.contains("fewer than"));
    ensure!(refused([&a, &a])?.contains("twice"));
    let mut other = std::fs::read(&b)?;
    other[512] = 1;
    std::fs::write(&b, &other)?;
    ensure!(refused([&a, &b])?.contains("would be overwritten"));
    // As the first one its content counts.
    add(&hearth, &[path(&b), path(&a)], &[])?;
    wait_states(&hearth, &["current", "current"])?;
    ensure!(hearth.connect("d")?.read(512, 1)? == [1]);
    // No other disk may be on a leg.
    let taken = hearth.refused(&["disk", "add", "e", "--origin", path(&a)])?;
    ensure!(taken.contains('d'), "{taken}");
    Ok(())
}

/// A leg answers with errors, in the middle of a load; then it is well again.
#[test]
fn a_leg_that_fails_is_not_noticed() -> Result<()> {
    if !have("mirrors: a leg fails", &["nbdkit"]) {
        return Ok(());
    }
    for mode in ["write-through", "write-back"] {
        let (mut hearth, a, b) = two_legs()?;
        let fail = hearth.dir().join("fail");
        let mut remote = server(&hearth, &b, &fail)?;
        let legs = [path(&a), &remote.uri("")];
        add(
            &hearth,
            &legs,
            &["--sole-user", "--mode", mode, "--origin-timeout", "10"],
        )?;
        wait_states(&hearth, &["current", "current"])?;
        let mut writer = Writer::new(4);
        let mut client = hearth.connect("d")?;
        writer.load(&mut client, LOAD, || Ok(std::fs::write(&fail, b"")?))?;
        writer.load(&mut client, LOAD, || Ok(()))?;
        writer.flush(&mut client)?;
        hearth.ok(&["disk", "flush", "d"])?;
        wait_states(&hearth, &["current", "out"])?;
        let shown = hearth.ok(&["disk", "show", "d"])?;
        ensure!(shown.contains("out ("), "{shown}");
        wait_event(&hearth, "leg-lost", &remote.uri(""))?;
        writer.check_stable(&mut client)?;
        std::fs::remove_file(&fail)?;
        writer.load(&mut client, LOAD, || Ok(()))?;
        wait_states(&hearth, &["current", "current"])?;
        wait_event(&hearth, "leg-resyncing", &remote.uri(""))?;
        wait_event(&hearth, "leg-current", &remote.uri(""))?;
        end(&mut hearth, &mut writer, client, &[&a, &b])?;
        remote.stop()?;
    }
    Ok(())
}

/// A leg hangs: it answers nothing, and closes nothing.
#[test]
fn a_leg_that_hangs_is_a_pause() -> Result<()> {
    if !have("mirrors: a leg hangs", &["nbdkit"]) {
        return Ok(());
    }
    let (mut hearth, a, b) = two_legs()?;
    let mut remote = server(&hearth, &b, &hearth.dir().join("fail"))?;
    let legs = [&remote.uri(""), path(&a)];
    add(
        &hearth,
        &legs,
        &["--sole-user", "--mode", "off", "--origin-timeout", "600"],
    )?;
    wait_states(&hearth, &["current", "current"])?;
    // It holds for the legs there are.
    hearth.ok(&["disk", "set", "d", "--origin-timeout", "5"])?;
    let mut writer = Writer::new(5);
    let mut client = hearth.connect("d")?;
    writer.load(&mut client, LOAD, || remote.signal(libc::SIGSTOP))?;
    writer.load(&mut client, LOAD, || Ok(()))?;
    writer.flush(&mut client)?;
    wait_states(&hearth, &["out", "current"])?;
    writer.check_stable(&mut client)?;
    // What it was asked before it was given up ends with it.
    remote.signal(libc::SIGCONT)?;
    remote.kill9()?;
    remote.up()?;
    wait_states(&hearth, &["current", "current"])?;
    writer.load(&mut client, LOAD, || Ok(()))?;
    end(&mut hearth, &mut writer, client, &[&a, &b])?;
    remote.stop()
}

/// The daemon is killed in the middle of writes, and of the copying that follows.
#[test]
fn a_killed_daemon_leaves_legs_that_become_the_same() -> Result<()> {
    let (mut hearth, a, b) = two_legs()?;
    add(&hearth, &[path(&a), path(&b)], &["--mode", "off"])?;
    let mut writer = Writer::new(6);
    for cycle in 0..kills(8) {
        let mut client = hearth.connect("d")?;
        let kill = || hearth.kill9();
        writer
            .load(&mut client, LOAD / 2, kill)
            .with_context(|| format!("cycle {cycle}"))?;
        hearth.start()?;
        attached(&hearth)?;
        writer
            .check(&mut hearth.connect("d")?)
            .with_context(|| format!("cycle {cycle}"))?;
    }
    wait_states(&hearth, &["current", "current"])?;
    let client = hearth.connect("d")?;
    end(&mut hearth, &mut writer, client, &[&a, &b])
}

/// One leg misses writes; then only that one is there. It is not believed, in whatever order they come back.
#[test]
fn a_stale_leg_is_never_used() -> Result<()> {
    let (mut hearth, a, b) = two_legs()?;
    add(&hearth, &[path(&a), path(&b)], &["--mode", "off"])?;
    wait_states(&hearth, &["current", "current"])?;
    let mut writer = Writer::new(7);
    let mut client = hearth.connect("d")?;
    writer.load(&mut client, LOAD, || Ok(()))?;
    drop(client);
    hearth.stop()?;
    let away = |file: &Path| std::fs::rename(file, file.with_extension("away"));
    let back = |file: &Path| std::fs::rename(file.with_extension("away"), file);
    away(&b)?;
    hearth.start()?;
    attached(&hearth)?;
    ensure!(states(&hearth)? == ["current", "out"]);
    let mut client = hearth.connect("d")?;
    writer.load(&mut client, LOAD, || hearth.kill9())?;
    // Now the other way round.
    away(&a)?;
    back(&b)?;
    hearth.start()?;
    wait::until("the disk waits for the leg that holds it", LIMIT, || {
        let shown = hearth.ok(&["disk", "show", "d"]).ok()?;
        shown.contains("no leg of the mirror").then_some(())
    })
    .with_context(|| hearth.log())?;
    ensure!(
        hearth.connect("d").is_err(),
        "it is served from a stale leg"
    );
    wait_event(&hearth, "leg-stale", path(&b))?;
    back(&a)?;
    attached(&hearth)?;
    writer.check(&mut hearth.connect("d")?)?;
    wait_states(&hearth, &["current", "current"])?;
    let client = hearth.connect("d")?;
    end(&mut hearth, &mut writer, client, &[&a, &b])
}

/// Somebody uses one leg alone while Hearth is not running.
#[test]
fn a_leg_that_somebody_else_wrote_is_not_mixed_in() -> Result<()> {
    let (mut hearth, a, b) = two_legs()?;
    add(&hearth, &[path(&a), path(&b)], &["--mode", "off"])?;
    wait_states(&hearth, &["current", "current"])?;
    let mut client = hearth.connect("d")?;
    client.write(0, &[5; 4096])?;
    client.flush()?;
    drop(client);
    hearth.stop()?;
    let mut other = std::fs::read(&a)?;
    other[0] = 6;
    std::fs::write(&a, other)?;
    hearth.start()?;
    attached(&hearth)?;
    ensure!(hearth.connect("d")?.read(0, 4096)? == [5; 4096]);
    wait_event(&hearth, "leg-changed", path(&a))?;
    wait_states(&hearth, &["current", "current"])?;
    hearth.stop()?;
    ensure!(std::fs::read(&a)? == std::fs::read(&b)?);
    Ok(())
}

/// A leg is added and another one replaced while a guest writes.
#[test]
fn legs_come_and_go_under_a_load() -> Result<()> {
    let (mut hearth, a, b) = two_legs()?;
    let c = blank(&hearth, "c")?;
    add(&hearth, &[path(&a)], &["--mode", "write-through"])?;
    let mut writer = Writer::new(8);
    let mut client = hearth.connect("d")?;
    writer.load(&mut client, LOAD, || Ok(()))?;
    let last = hearth.refused(&["disk", "mirror", "d", "--remove", path(&a)])?;
    ensure!(last.contains("no other leg"), "{last}");
    let full = hearth.origin("full", BLOCKS * BLOCK as u64)?;
    let refused = hearth.refused(&["disk", "mirror", "d", "--add", path(&full)])?;
    ensure!(refused.contains("holds something"), "{refused}");
    busy(
        &hearth,
        &mut writer,
        &mut client,
        &["disk", "mirror", "d", "--add", path(&b)],
    )?;
    busy(
        &hearth,
        &mut writer,
        &mut client,
        &["disk", "replace", "d", path(&a), path(&c)],
    )?;
    wait_states(&hearth, &["current", "current"])?;
    let shown = hearth.ok(&["disk", "show", "d"])?;
    ensure!(!shown.contains(&format!("{}:", path(&a))), "{shown}");
    wait_event(&hearth, "leg-added", path(&c))?;
    wait_event(&hearth, "leg-removed", path(&a))?;
    // Nothing was lost.
    let events = hearth.ok(&["events", "--disk", "d", "--json"])?;
    ensure!(!events.contains("\"leg-lost\""), "{events}");
    // What was taken out is free for somebody else.
    hearth.add("old", path(&a), &[])?;
    writer.load(&mut client, LOAD, || Ok(()))?;
    writer.flush(&mut client)?;
    writer.check_stable(&mut client)?;
    end(&mut hearth, &mut writer, client, &[&b, &c])?;
    hearth.start()?;
    attached(&hearth)?;
    ensure!(states(&hearth)? == ["current", "current"]);
    writer.check(&mut hearth.connect("d")?)
}

/// Each replacement that is called off leaves as many legs as there were; one that was killed is brought to its end by the same
/// command.
#[test]
fn replacements_called_off_leave_no_legs() -> Result<()> {
    let (hearth, a, b) = two_legs()?;
    add(&hearth, &[path(&a), path(&b)], &["--mode", "off"])?;
    wait_states(&hearth, &["current", "current"])?;
    hearth.connect("d")?.write(0, &[1; BLOCK])?;
    // No copy gets anywhere.
    hearth.ok(&["disk", "mirror", "d", "--pause"])?;
    let c = blank(&hearth, "c")?;
    let replace = || -> Result<std::process::Child> {
        let replace = std::process::Command::new(hearth_rig::daemon::binary()?)
            .args(["disk", "replace", "d", path(&b), path(&c), "--run-dir"])
            .arg(hearth.run_dir())
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()?;
        wait::until("the new leg is there", LIMIT, || {
            (states(&hearth).ok()?.len() == 3).then_some(())
        })?;
        Ok(replace)
    };
    for _ in 0..9 {
        let mut replace = replace()?;
        // SAFETY: a signal to a child that was not waited for.
        unsafe { libc::kill(replace.id() as i32, libc::SIGINT) };
        ensure!(replace.wait()?.code() == Some(130));
        ensure!(states(&hearth)? == ["current", "current"]);
    }
    let mut replace = replace()?;
    replace.kill()?;
    replace.wait()?;
    ensure!(states(&hearth)?.len() == 3);
    hearth.ok(&["disk", "mirror", "d", "--resume"])?;
    hearth.ok(&["disk", "replace", "d", path(&b), path(&c)])?;
    wait_states(&hearth, &["current", "current"])?;
    let shown = hearth.ok(&["disk", "show", "d"])?;
    ensure!(!shown.contains(&format!("{}:", path(&b))), "{shown}");
    Ok(())
}

/// A copy that is paused waits, over a stop and a kill, and goes on from where it was when it is told to.
#[test]
fn a_paused_copy_waits_over_restarts() -> Result<()> {
    let (mut hearth, a, b) = two_legs()?;
    add(&hearth, &[path(&a)], &["--mode", "off"])?;
    let mut writer = Writer::new(14);
    let mut client = hearth.connect("d")?;
    writer.load(&mut client, LOAD, || Ok(()))?;
    writer.flush(&mut client)?;
    drop(client);
    hearth.ok(&["disk", "mirror", "d", "--pause", "--add", path(&b)])?;
    for kills in [false, true] {
        match kills {
            true => hearth.kill9()?,
            false => drop(hearth.stop()?),
        }
        hearth.start()?;
        attached(&hearth)?;
        let info = hearth.ok(&["disk", "show", "d", "--json"])?;
        let info: serde_json::Value = serde_json::from_str(&info)?;
        ensure!(info["upkeep"]["paused"] == true, "{info}");
        ensure!(legs_of(&info) == ["current", "resyncing"], "{info}");
    }
    hearth.ok(&["disk", "mirror", "d", "--resume"])?;
    wait_states(&hearth, &["current", "current"])?;
    let client = hearth.connect("d")?;
    end(&mut hearth, &mut writer, client, &[&a, &b])
}

/// The daemon is killed while a new leg is copied to.
#[test]
fn a_kill_while_a_leg_is_copied_to() -> Result<()> {
    let (mut hearth, a, b) = two_legs()?;
    add(&hearth, &[path(&a)], &["--mode", "off"])?;
    let mut writer = Writer::new(9);
    let mut client = hearth.connect("d")?;
    writer.load(&mut client, LOAD, || Ok(()))?;
    writer.flush(&mut client)?;
    hearth.ok(&["disk", "mirror", "d", "--rate", "4M", "--add", path(&b)])?;
    ensure!(states(&hearth)? == ["current", "resyncing"]);
    for cycle in 0..kills(6) {
        let kill = || hearth.kill9();
        writer
            .load(&mut client, LOAD / 3, kill)
            .with_context(|| format!("cycle {cycle}"))?;
        hearth.start()?;
        attached(&hearth)?;
        hearth.ok(&["disk", "mirror", "d", "--rate", "4M"])?;
        client = hearth.connect("d")?;
        writer
            .check(&mut client)
            .with_context(|| format!("cycle {cycle}"))?;
    }
    hearth.ok(&["disk", "mirror", "d", "--rate", "0"])?;
    wait_states(&hearth, &["current", "current"])?;
    writer.load(&mut client, LOAD, || Ok(()))?;
    end(&mut hearth, &mut writer, client, &[&a, &b])
}

/// The flash takes no writes any more; then a leg dies; then the power goes, and the flash is as it was before.
#[test]
fn a_stale_leg_is_not_used_though_the_flash_died_first() -> Result<()> {
    if !have("mirrors: flash and a leg die", &["nbdkit"]) {
        return Ok(());
    }
    // SAFETY: no handler is installed. A daemon told of a write beyond the limit by a signal would end.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let (mut hearth, a, b) = two_legs()?;
    let fail = hearth.dir().join("fail");
    let mut one = server(&hearth, &a, &hearth.dir().join("never"))?;
    let mut two = server(&hearth, &b, &fail)?;
    let legs = [&*one.uri(""), &two.uri("")];
    add(
        &hearth,
        &legs,
        &["--sole-user", "--mode", "off", "--origin-timeout", "5"],
    )?;
    wait_states(&hearth, &["current", "current"])?;
    let mut writer = Writer::new(10);
    let mut client = hearth.connect("d")?;
    writer.load(&mut client, LOAD, || Ok(()))?;
    // The pool's registry begins at 2 MiB.
    hearth.refuse_writes(1 << 20)?;
    writer.load(&mut client, LOAD, || Ok(std::fs::write(&fail, b"")?))?;
    writer.load(&mut client, LOAD, || Ok(()))?;
    wait_states(&hearth, &["current", "out"])?;
    hearth
        .logged(" alone: ")
        .context("the flash has taken the note")?;
    writer.load(&mut client, LOAD, || hearth.kill9())?;
    std::fs::remove_file(&fail)?;
    one.kill9()?;
    hearth.start()?;
    wait::until("the disk waits for the leg that holds it", LIMIT, || {
        let shown = hearth.ok(&["disk", "show", "d"]).ok()?;
        shown.contains("no leg of the mirror").then_some(())
    })
    .with_context(|| hearth.log())?;
    one.up()?;
    attached(&hearth)?;
    writer.check(&mut hearth.connect("d")?)?;
    wait_states(&hearth, &["current", "current"])?;
    let client = hearth.connect("d")?;
    end(&mut hearth, &mut writer, client, &[&a, &b])?;
    two.stop()
}

/// A leg cannot read, and takes what is written: what it cannot read comes from the other one.
#[test]
fn what_a_leg_cannot_read_comes_from_another() -> Result<()> {
    if !have("mirrors: a leg cannot read", &["nbdkit"]) {
        return Ok(());
    }
    let (mut hearth, a, b) = two_legs()?;
    let fail = hearth.dir().join("fail");
    let mut remote = failing(&hearth, &b, "error-pread", &fail)?;
    let legs = [path(&a), &remote.uri("")];
    add(&hearth, &legs, &["--sole-user", "--mode", "off"])?;
    wait_states(&hearth, &["current", "current"])?;
    let mut writer = Writer::new(11);
    let mut client = hearth.connect("d")?;
    writer.load(&mut client, LOAD, || Ok(std::fs::write(&fail, b"")?))?;
    writer.load(&mut client, LOAD, || Ok(()))?;
    writer.flush(&mut client)?;
    writer.check_stable(&mut client)?;
    wait_event(&hearth, "leg-repaired", &remote.uri(""))?;
    wait_states(&hearth, &["current", "current"])?;
    std::fs::remove_file(&fail)?;
    end(&mut hearth, &mut writer, client, &[&a, &b])?;
    remote.stop()
}
