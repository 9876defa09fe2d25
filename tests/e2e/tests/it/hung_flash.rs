//! Flash that hangs is told and left, and meanwhile whoever asks the daemon anything is answered.
//!
//! What hangs is a file behind processes in user space, one of which is stopped: not even its name is told.

use anyhow::{Context, Result, ensure};
use hearth_rig::daemon::path;
use hearth_rig::mounted::{self, Mounted};
use hearth_rig::pattern::BLOCK;
use hearth_rig::{Hearth, wait};
use serde_json::Value;
use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

/// Longest wait for what comes by itself.
const LIMIT: Duration = Duration::from_secs(60);
/// Far longer than an answer takes. The flash hangs until the test ends.
const SOON: Duration = Duration::from_secs(20);

/// What a command says that must be answered although the flash hangs.
fn soon(hearth: &Hearth, args: &[&str]) -> Result<String> {
    let mut child = hearth.begin(args)?;
    let ends = wait::until(&args.join(" "), SOON, || child.try_wait().ok().flatten());
    if ends.is_err() {
        child.kill()?;
    }
    let out = child.wait_with_output()?;
    ends.with_context(|| hearth.log())?;
    hearth_rig::daemon::ok(out)
}

/// With a file that can hang; nothing if that cannot be here.
fn with_mount() -> Result<Option<(Hearth, Mounted)>> {
    if let Some(missing) = mounted::missing() {
        println!("SKIPPED hung flash: no {missing}");
        return Ok(None);
    }
    let mut hearth = Hearth::bare()?;
    hearth.serve_args = ["--flash-timeout", "2"].map(str::to_owned).to_vec();
    let under = hearth.dir().join("under.img");
    File::create(&under)?.set_len(160 << 20)?;
    let mount = Mounted::unknown(hearth.dir(), "f", &under)?;
    Ok(Some((hearth, mount)))
}

/// A daemon whose pool is on such a mount.
fn over_mount() -> Result<Option<(Hearth, Mounted)>> {
    let Some((mut hearth, mount)) = with_mount()? else {
        return Ok(None);
    };
    hearth.ok(&["pool", "create", "--flash", mount.path()])?;
    hearth.set_flash(mount.path().into());
    Ok(Some((hearth, mount)))
}

/// Waits until the daemon has said this.
fn said(hearth: &Hearth, words: &str) -> Result<()> {
    wait::until(words, LIMIT, || hearth.log().contains(words).then_some(()))
        .with_context(|| hearth.log())
}

/// By its name, or while it is read: a start ends either way.
#[test]
fn a_start_says_which_device_does_not_answer() -> Result<()> {
    let Some((mut hearth, mut mount)) = over_mount()? else {
        return Ok(());
    };
    hearth.start()?;
    hearth.stop()?;
    for named in [false, true] {
        let before = hearth.log().len();
        let hang = |mount: &mut Mounted, on: bool| match named {
            true => mount.hang(on),
            // The kernel still tells its name.
            false => {
                let signal = if on { libc::SIGSTOP } else { libc::SIGCONT };
                mount.server().signal(signal)
            }
        };
        hang(&mut mount, true)?;
        hearth.spawn()?;
        let says = wait::until("it is said", LIMIT, || {
            let says = hearth.log().split_off(before);
            let device = format!("{} has not answered for 2 s", mount.path());
            says.contains(&device).then_some(says)
        });
        hang(&mut mount, false)?;
        let says = says.with_context(|| hearth.log())?;
        ensure!(says.contains("--flash-timeout"), "no remedy: {says}");
        ensure!(!hearth.ended()?.success());
    }
    hearth.start()?;
    hearth.stop().map(drop)
}

/// Starts it, with a disk; where that one's origin is.
fn served(hearth: &mut Hearth) -> Result<PathBuf> {
    hearth.start()?;
    let origin = hearth.dir().join("o.raw");
    File::create(&origin)?.set_len(16 << 20)?;
    hearth.add("d", path(&origin), &["--mode", "write-through"])?;
    Ok(origin)
}

/// Nobody has asked it anything before that, so nobody knows.
#[test]
fn a_stop_does_not_wait_for_it() -> Result<()> {
    let Some((mut hearth, mount)) = over_mount()? else {
        return Ok(());
    };
    served(&mut hearth)?;
    mount.hang(true)?;
    let pid = hearth.pid().context("it runs")?;
    // SAFETY: a signal to a child that has not been waited for, so its pid is still its own.
    unsafe { libc::kill(pid as i32, libc::SIGTERM) };
    let ends = said(&hearth, "cannot close the pool cleanly");
    mount.hang(false)?;
    ends?;
    ensure!(!hearth.ended()?.success());
    hearth.start()?;
    let mut client = hearth.connect("d")?;
    ensure!(client.read(0, BLOCK as u32)? == [0; BLOCK]);
    drop(client);
    hearth.stop().map(drop)
}

/// State and notices of the pool, requested while the flash hangs.
fn pool(hearth: &Hearth) -> Result<(String, String)> {
    let shown = soon(hearth, &["pool", "show", "--json"])?;
    let shown: Value = serde_json::from_str(&shown)?;
    let state = shown["state"].as_str().context("no state")?;
    Ok((state.to_owned(), shown["notices"].to_string()))
}

/// Waits until the pool reports that `device` does not answer, followed by `then`.
fn noticed(hearth: &Hearth, device: &str, then: &str) -> Result<()> {
    let words = format!("{device} does not answer");
    wait::until("it is noticed", LIMIT, || match pool(hearth) {
        Ok((state, notices)) => {
            let told = notices.contains(&words) && notices.contains(then);
            (state == "failed" && told).then_some(Ok(()))
        }
        Err(e) => Some(Err(e)),
    })
    .with_context(|| hearth.log())?
}

/// No client asks it for anything, and the kernel may swap to a part of it.
#[test]
fn hung_flash_is_noticed_while_idle() -> Result<()> {
    let Some((mut hearth, mut mount)) = over_mount()? else {
        return Ok(());
    };
    let origin = served(&mut hearth)?;
    let mut client = hearth.connect("d")?;
    client.raw()?.set_read_timeout(Some(SOON))?;
    // The file system answers; the device below it does not.
    mount.server().signal(libc::SIGSTOP)?;
    let seen = noticed(&hearth, mount.path(), "").and_then(|()| {
        // The rest is as with flash that failed: disks go on from their origins.
        client.write(0, &[2; BLOCK])?;
        ensure!(client.read(0, BLOCK as u32)? == [2; BLOCK]);
        let events = soon(&hearth, &["events"])?;
        ensure!(events.contains("does not answer"), "{events}");
        Ok(())
    });
    mount.server().signal(libc::SIGCONT)?;
    seen?;
    ensure!(std::fs::read(&origin)?[..BLOCK] == [2; BLOCK]);
    drop(client);
    hearth.kill9()
}

/// The daemon would begin anew without it, which a thread that hangs in the kernel keeps it from.
#[test]
fn hung_device_of_several_is_waited_for() -> Result<()> {
    let Some((mut hearth, mount)) = with_mount()? else {
        return Ok(());
    };
    let (first, second) = (hearth.dir().join("first.img"), mount.path().to_owned());
    File::create(&first)?.set_len(160 << 20)?;
    let devices = ["--flash", path(&first), "--flash", &second];
    hearth.ok(&[&["pool", "create"], &devices[..]].concat())?;
    hearth.set_flash(first);
    hearth.serve_args.extend(["--flash".into(), second.clone()]);
    served(&mut hearth)?;
    let mut client = hearth.connect("d")?;
    client.raw()?.set_read_timeout(Some(SOON))?;
    mount.hang(true)?;
    let seen = noticed(&hearth, &second, "would hold up every client").and_then(|()| {
        client.write(0, &[2; BLOCK])?;
        ensure!(client.read(0, BLOCK as u32)? == [2; BLOCK]);
        Ok(())
    });
    mount.hang(false)?;
    seen?;
    // The pool continues on the other device.
    wait::until("it goes on without", LIMIT, || {
        (pool(&hearth).ok()?.0 == "serving").then_some(())
    })
    .with_context(|| hearth.log())?;
    ensure!(client.read(0, BLOCK as u32)? == [2; BLOCK]);
    drop(client);
    hearth.stop().map(drop)
}

/// What is cached of the disk is dropped once it is off. From then on it has nothing to do with flash, which is not given up
/// for hanging here.
#[test]
fn disk_switched_off_does_not_wait_for_flash() -> Result<()> {
    let Some((mut hearth, mount)) = over_mount()? else {
        return Ok(());
    };
    hearth.serve_args = ["--flash-timeout", "600"].map(str::to_owned).to_vec();
    let origin = served(&mut hearth)?;
    let mut client = hearth.connect("d")?;
    client.raw()?.set_read_timeout(Some(SOON))?;
    let mut model = vec![1; 4 << 20];
    for (at, piece) in (0..).step_by(1 << 16).zip(model.chunks(1 << 16)) {
        client.write(at, piece)?;
        client.read(at, 1 << 16)?;
    }
    let cached = |hearth: &Hearth| hearth.stats("d").ok()?["cached"].as_u64();
    wait::until("it is cached", LIMIT, || {
        (cached(&hearth)? > 0).then_some(())
    })?;
    hearth.ok(&["disk", "set", "d", "--mode", "off"])?;
    wait::until("its copies are dropped", LIMIT, || {
        (cached(&hearth)? == 0).then_some(())
    })?;
    mount.hang(true)?;
    let mut goes_on = || -> Result<()> {
        for (at, piece) in (0..).step_by(1 << 16).zip(model.chunks_mut(1 << 16)) {
            piece.fill(2);
            client.write(at, piece)?;
            ensure!(client.read(at, 1 << 16)? == piece);
        }
        Ok(client.flush()?)
    };
    let went = goes_on();
    hearth.kill9()?;
    mount.hang(false)?;
    went?;
    // Nothing of it comes back from flash.
    hearth.start()?;
    hearth.ok(&["disk", "set", "d", "--mode", "write-through"])?;
    let mut client = hearth.connect("d")?;
    ensure!(client.read(0, model.len() as u32)? == model);
    ensure!(std::fs::read(&origin)?[..model.len()] == model);
    drop(client);
    hearth.stop().map(drop)
}

#[test]
fn whoever_asks_is_answered() -> Result<()> {
    let Some((mut hearth, mount)) = over_mount()? else {
        return Ok(());
    };
    let origin = served(&mut hearth)?;
    let mut client = hearth.connect("d")?;
    client.write(0, &[1; BLOCK])?;
    client.raw()?.set_read_timeout(Some(SOON))?;
    mount.hang(true)?;
    client.write(0, &[2; BLOCK])?;
    let mut hang = || -> Result<()> {
        // That it is left is shown by what must be answered all the while; by then the kernel has forgotten its name.
        wait::until("the flash is left", LIMIT, || {
            let shown = match soon(&hearth, &["pool", "show", "--json"]) {
                Ok(shown) => shown,
                Err(e) => return Some(Err(e)),
            };
            let pool: Value = serde_json::from_str(&shown).ok()?;
            (pool["state"] != "serving").then_some(Ok(()))
        })??;
        for args in [
            &["pool", "show"][..],
            &["disk", "list"],
            &["disk", "show", "d"],
            &["stats"],
            &["events"],
            // This one is done by the daemon's own rounds.
            &["disk", "flush", "d"],
        ] {
            soon(&hearth, args)?;
        }
        client.write(0, &[3; BLOCK])?;
        ensure!(client.read(0, BLOCK as u32)? == [3; BLOCK]);
        Ok(())
    };
    let went = hang();
    mount.hang(false)?;
    went?;
    drop(client);
    ensure!(std::fs::read(&origin)?[..BLOCK] == [3; BLOCK]);
    drop(mount);
    hearth.kill9()
}
