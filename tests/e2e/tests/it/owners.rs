//! Two pools and one origin that both can reach: only one of them has it.
//!
//! The two "hosts" see one directory through mounts of their own, served by a process each (FUSE), as
//! they would see a file server's: what one locks the other does not see.

use anyhow::{Context, Result, ensure};
use hearth_rig::child::bound_to_us;
use hearth_rig::clients::have;
use hearth_rig::daemon::path;
use hearth_rig::servers::Server;
use hearth_rig::{Hearth, wait};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Longest wait for a state that comes by itself.
const LIMIT: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

/// A directory as another host sees it. Unmounted when dropped.
struct View {
    child: Child,
    dir: PathBuf,
}

impl View {
    /// `None`, with a word, where nothing can be mounted.
    fn of(test: &str, shared: &Path, dir: &Path) -> Result<Option<View>> {
        if !have(test, &["bindfs"]) {
            return Ok(None);
        }
        std::fs::create_dir(dir)?;
        let mut command = Command::new("bindfs");
        command
            .args(["-f", "-o", "attr_timeout=0"])
            .args([shared, dir])
            .stdin(Stdio::null())
            .stderr(Stdio::null());
        let mut view = View {
            child: bound_to_us(&mut command).spawn()?,
            dir: dir.to_owned(),
        };
        let marker = shared.join("marker");
        std::fs::write(&marker, "")?;
        let seen = wait::until("the directory is seen", LIMIT, || {
            if matches!(view.child.try_wait(), Ok(Some(_))) {
                return Some(false);
            }
            dir.join("marker").exists().then_some(true)
        })?;
        if !seen {
            println!("SKIPPED {test}: FUSE cannot be mounted here");
        }
        Ok(seen.then_some(view))
    }
}

impl Drop for View {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.dir).status();
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Two daemons and a directory with a file that both see, each in its own way.
struct Hosts {
    shared: PathBuf,
    here: View,
    there: View,
    one: Hearth,
    two: Hearth,
}

impl Hosts {
    /// `None`, with a word, where nothing can be mounted.
    fn start(test: &str) -> Result<Option<Hosts>> {
        let (one, two) = (Hearth::serving("160M")?, Hearth::serving("160M")?);
        let shared = one.dir().join("shared");
        std::fs::create_dir(&shared)?;
        hearth_rig::daemon::write_random(&shared.join("d.raw"), 4 * MIB, 1)?;
        let (Some(here), Some(there)) = (
            View::of(test, &shared, &one.dir().join("v"))?,
            View::of(test, &shared, &two.dir().join("v"))?,
        ) else {
            return Ok(None);
        };
        Ok(Some(Hosts {
            shared,
            here,
            there,
            one,
            two,
        }))
    }
}

fn state(hearth: &Hearth, name: &str) -> Result<String> {
    let info: serde_json::Value =
        serde_json::from_str(&hearth.ok(&["disk", "show", name, "--json"])?)?;
    Ok(info["state"].as_str().unwrap_or_default().to_owned())
}

fn is_fenced(hearth: &Hearth) -> Result<()> {
    wait::until("the disk is fenced", LIMIT, || {
        (state(hearth, "d").ok()? == "fenced").then_some(())
    })
    .with_context(|| hearth.log())
}

/// The second host is refused, told whose the file is, and gets it when the first has let go.
#[test]
fn a_file_on_shared_storage_has_one_owner() -> Result<()> {
    let Some(Hosts {
        mut one,
        two,
        shared,
        here,
        there,
    }) = Hosts::start("owners: a shared file")?
    else {
        return Ok(());
    };
    let (mine, theirs) = (here.dir.join("d.raw"), there.dir.join("d.raw"));
    one.add("d", path(&mine), &[])?;
    one.connect("d")?.write(0, &[7; 4096])?;

    let add = ["disk", "add", "x", "--origin", path(&theirs)];
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname")?;
    let words = two.refused(&add)?;
    for want in [
        "belongs to disk d of the pool",
        host.trim(),
        "since 2",
        "--takeover",
    ] {
        ensure!(words.contains(want), "no {want:?} in: {words}");
    }
    // Vouching for something that can be seen changes nothing.
    two.refused(&[&add[..], &["--sole-user"]].concat())?;
    let words = two.refused(&[&add[..], &["--takeover"]].concat())?;
    ensure!(words.contains("may be missing"), "{words}");
    let words = two.refused(&[&add[..], &["--takeover", "--yes"]].concat())?;
    ensure!(words.contains("its owner is alive"), "{words}");

    // It comes back from its own kill -9 unasked.
    one.kill9()?;
    one.start()?;
    ensure!(state(&one, "d")? == "attached", "{}", one.log());
    two.refused(&add)?;

    one.ok(&["disk", "remove", "d"])?;
    two.ok(&add)?;
    let owner = std::fs::read_to_string(shared.join(".d.raw.hearth-owner"))?;
    ensure!(owner.contains("\"disk\":\"x\""), "{owner}");
    ensure!(two.connect("x")?.read(0, 4096)? == [7; 4096]);
    // An exported pool owns nothing.
    let mut two = two;
    two.ok(&["pool", "export"])?;
    wait::until("the export ends", LIMIT, || (!two.running()).then_some(()))?;
    ensure!(!shared.join(".d.raw.hearth-owner").exists());
    Ok(())
}

/// An owner that shows no sign of life is set aside when the user says so; should it go on after all, it
/// notices, stops, and stays stopped over restarts until the user has decided.
#[test]
fn a_takeover_waits_for_signs_of_life() -> Result<()> {
    let Some(Hosts {
        mut one,
        two,
        here,
        there,
        ..
    }) = Hosts::start("owners: takeover")?
    else {
        return Ok(());
    };
    one.add("d", path(&here.dir.join("d.raw")), &[])?;
    let pid = one.pid().context("not running")?;
    // SAFETY: a signal to a child that has not been waited for, so its pid is still its own.
    unsafe { libc::kill(pid as i32, libc::SIGSTOP) };
    let origin = there.dir.join("d.raw");
    let add = ["disk", "add", "d", "--origin", path(&origin)];
    two.refused(&add)?;
    two.ok(&[&add[..], &["--takeover", "--yes"]].concat())
        .context("takeover")?;
    two.connect("d")?.write(0, &[9; 4096])?;
    two.ok(&["disk", "flush", "d"])?;
    // SAFETY: as above.
    unsafe { libc::kill(pid as i32, libc::SIGCONT) };
    is_fenced(&one)?;
    // It is told first, and then taken off offer.
    wait::until("it is served no more", LIMIT, || {
        one.connect("d").is_err().then_some(())
    })?;
    one.kill9()?;
    one.start()?;
    is_fenced(&one)?;
    // Somebody else has it.
    let words = one.refused(&["disk", "set", "d", "--trust", "origin"])?;
    ensure!(words.contains("belongs to disk d"), "{words}");
    two.ok(&["disk", "remove", "d"])?;
    one.stop()?;
    one.start()?;
    is_fenced(&one)?;
    one.ok(&["disk", "set", "d", "--trust", "origin"])?;
    ensure!(one.connect("d")?.read(0, 4096)? == [9; 4096]);
    Ok(())
}

/// Another host that took a disk over and removed it leaves no record. Dirty blocks from before are not written then.
#[test]
fn missing_record_with_dirty_blocks_is_fenced() -> Result<()> {
    let Some(Hosts {
        mut one,
        two,
        shared,
        here,
        ..
    }) = Hosts::start("owners: a missing record")?
    else {
        return Ok(());
    };
    drop(two);
    let file = here.dir.join("d.raw");
    one.stop()?;
    one.serve_args = ["--destage-rate", "4K"].map(str::to_owned).to_vec();
    one.start()?;
    one.add("d", path(&file), &[])?;
    let mut client = one.connect("d")?;
    client.write(0, &[7; 1 << 20])?;
    client.flush()?;
    one.kill9()?;
    std::fs::remove_file(shared.join(".d.raw.hearth-owner"))?;
    let before = std::fs::read(shared.join("d.raw"))?;
    one.start()?;
    is_fenced(&one)?;
    one.kill9()?;
    one.start()?;
    is_fenced(&one)?;
    ensure!(
        std::fs::read(shared.join("d.raw"))? == before,
        "dirty blocks were written"
    );
    one.ok(&["disk", "set", "d", "--trust", "flash"])?;
    ensure!(one.connect("d")?.read(0, 4096)? == [7; 4096]);
    one.stop().map(drop)
}

/// Where nobody can see who else writes an origin, the user is asked.
#[test]
fn a_bare_export_wants_a_word() -> Result<()> {
    if !have("owners: a bare export", &["nbdkit"]) {
        return Ok(());
    }
    let hearth = Hearth::serving("160M")?;
    let socket = hearth.dir().join("n");
    let server = Server::start("nbdkit", &["-f", "-U", "{socket}", "memory", "4M"], socket)?;
    let uri = server.uri("");
    let words = hearth.refused(&["disk", "add", "d", "--origin", &uri])?;
    ensure!(words.contains("--sole-user"), "{words}");
    hearth.add("r", &uri, &["--read-only"])?;
    hearth.ok(&["disk", "remove", "r"])?;
    hearth.add("d", &uri, &["--sole-user"])?;
    ensure!(state(&hearth, "d")? == "attached");
    Ok(())
}
