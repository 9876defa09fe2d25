//! Two hosts and an RBD image, on a real Ceph cluster.
//!
//! `scripts/ceph-lab.sh` starts the cluster and two network namespaces that stand for hosts, and says
//! where its files are in `HEARTH_CEPH_LAB`. Without it these tests are skipped.

use anyhow::{Context, Result, ensure};
use hearth_rig::Hearth;
use hearth_rig::child::bound_to_us;
use hearth_rig::clients::run_ok;
use hearth_rig::load::{BLOCKS, Writer};
use hearth_rig::pattern::BLOCK;
use hearth_rig::wait;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest wait for a state that comes by itself. Ceph ends a dead client's watch after 30 s.
const LIMIT: Duration = Duration::from_secs(120);
/// How long a load goes on before each kill.
const LOAD: Duration = Duration::from_millis(500);
/// Seconds a client is shut out: it must end during the test.
const SHUT_OUT: &str = "10";

/// The lab's directory, or a word that the test is skipped.
fn lab(test: &str) -> Option<PathBuf> {
    let dir = std::env::var_os("HEARTH_CEPH_LAB").map(PathBuf::from);
    if dir.is_none() {
        println!("SKIPPED {test}: needs the cluster of scripts/ceph-lab.sh");
    }
    dir
}

/// A pool on one of the two hosts.
fn host(name: &str) -> Result<Hearth> {
    let mut hearth = Hearth::with_pool("160M")?;
    let (space, called) = (format!("hearth-{name}"), format!("host-{name}"));
    hearth.wrap = [
        "ip",
        "netns",
        "exec",
        &space,
        "unshare",
        "--uts",
        "sh",
        "-c",
        "hostname \"$0\" && exec \"$@\"",
        &called,
    ]
    .map(str::to_owned)
    .to_vec();
    hearth.start()?;
    Ok(hearth)
}

fn ceph(program: &str, args: &[&str]) -> Result<String> {
    run_ok(program, args, Path::new("/"))
}

/// Makes an image; its origin.
fn image(name: &str, size: &str) -> Result<String> {
    let spec = format!("rbd/{name}");
    // Of an earlier run in the same lab.
    let _ = ceph("rbd", &["rm", "--no-progress", &spec]);
    ceph("rbd", &["create", "--size", size, &spec])?;
    Ok(format!("rbd:rbd/{name}:id=hearth"))
}

/// Addresses of those who have it open for writing.
fn watchers(name: &str) -> Result<Vec<String>> {
    let said = ceph(
        "rbd",
        &["status", &format!("rbd/{name}"), "--format", "json"],
    )?;
    let status: Value = serde_json::from_str(&said)?;
    let all = status["watchers"].as_array().cloned().unwrap_or_default();
    Ok(all
        .iter()
        .filter_map(|w| Some(w["address"].as_str()?.to_owned()))
        .collect())
}

/// What the image holds, without Hearth.
fn content(name: &str, dir: &Path) -> Result<Vec<u8>> {
    let file = dir.join("exported");
    let _ = std::fs::remove_file(&file);
    let to = file.to_str().context("a path that is no text")?;
    ceph(
        "rbd",
        &["export", "--no-progress", &format!("rbd/{name}"), to],
    )?;
    Ok(std::fs::read(&file)?)
}

fn show(hearth: &Hearth) -> Result<Value> {
    Ok(serde_json::from_str(
        &hearth.ok(&["disk", "show", "d", "--json"])?,
    )?)
}

fn is(hearth: &Hearth, state: &str) -> Result<()> {
    wait::until(&format!("the disk is {state}"), LIMIT, || {
        (show(hearth).ok()?["state"] == state).then_some(())
    })
    .with_context(|| hearth.log())
}

/// The second host is refused and told who has the image; the first comes back from its own kill -9
/// unasked; a takeover waits for its last sign of life; and who comes back after that writes nothing.
#[test]
fn one_image_has_one_owner() -> Result<()> {
    let Some(_lab) = lab("ceph: one owner") else {
        return Ok(());
    };
    let origin = image("owned", "64M")?;
    let (mut a, b) = (host("a")?, host("b")?);
    a.add("d", &origin, &[])?;
    let mut client = a.connect("d")?;
    client.write(0, &[7; 4096])?;
    client.flush()?;
    drop(client);

    let add = ["disk", "add", "d", "--origin", &origin];
    let over = [&add[..], &["--takeover", "--yes"]].concat();
    let words = b.refused(&add)?;
    for want in ["belongs to disk d of the pool", "host-a", "since 2"] {
        ensure!(words.contains(want), "no {want:?} in: {words}");
    }
    let words = b.refused(&over)?;
    ensure!(
        words.contains("its owner is alive") && words.contains("10.99.0.2"),
        "{words}"
    );

    a.kill9()?;
    a.start()?;
    is(&a, "attached")?;
    ensure!(a.connect("d")?.read(0, 4096)? == [7; 4096]);
    b.refused(&add)?;
    // Its present client is known by now to whoever takes over.
    let mine = watchers("owned")?.pop().context("nobody has it open")?;
    wait::until("the owner's address is noted", LIMIT, || {
        let info = ceph("rbd", &["info", "rbd/owned", "--format", "json"]).ok()?;
        let id = serde_json::from_str::<Value>(&info).ok()?["id"]
            .as_str()?
            .to_owned();
        let object = format!("hearth.owner.{id}");
        let noted = ceph(
            "rados",
            &["-p", "rbd", "getxattr", &object, "hearth.clients"],
        )
        .ok()?;
        noted.contains(&mine).then_some(())
    })?;

    // Dirty data that nobody will ever see in the image.
    a.connect("d")?.write(1 << 20, &[8; 4096])?;
    a.kill9()?;
    b.refused(&add)?;
    wait::until("its watch ends", LIMIT, || {
        watchers("owned").ok()?.is_empty().then_some(())
    })?;
    b.ok(&over)?;
    b.logged("is shut out of the cluster")?;
    ensure!(ceph("ceph", &["osd", "blocklist", "ls"])?.contains(&mine));
    b.connect("d")?.write(1 << 20, &[9; 4096])?;
    b.ok(&["disk", "flush", "d"])?;

    a.start()?;
    is(&a, "fenced")?;
    let shown = show(&a)?;
    ensure!(shown["stranded"][0]["offset"].is_u64(), "{shown}");
    let words = a.refused(&["disk", "set", "d", "--trust", "flash"])?;
    ensure!(words.contains("host-b"), "{words}");
    ensure!(content("owned", a.dir())?[1 << 20..][..4096] == [9; 4096]);
    // Also not once the other has let go.
    b.ok(&["disk", "remove", "d"])?;
    a.stop()?;
    a.start()?;
    is(&a, "fenced")?;
    a.ok(&["disk", "set", "d", "--trust", "origin"])?;
    is(&a, "attached")?;
    ensure!(a.connect("d")?.read(1 << 20, 4096)? == [9; 4096]);
    Ok(())
}

/// A virtual machine that was started on the image, on the very host of its owner, while Hearth was down.
#[test]
fn a_guest_on_the_owners_host_is_waited_for() -> Result<()> {
    use std::io::Write as _;
    use std::process::{Command, Stdio};
    let Some(_lab) = lab("ceph: a guest on the owner's host") else {
        return Ok(());
    };
    let origin = image("beside", "64M")?;
    let mut a = host("a")?;
    a.add("d", &origin, &[])?;
    a.stop()?;
    wait::until("its watch ends", LIMIT, || {
        watchers("beside").ok()?.is_empty().then_some(())
    })?;
    let mut command = Command::new("ip");
    command
        .args(["netns", "exec", "hearth-a", "qemu-io", "-f", "raw"])
        .arg("rbd:rbd/beside:id=hearth")
        .stdin(Stdio::piped())
        .stdout(Stdio::null());
    let mut guest = bound_to_us(&mut command).spawn()?;
    let mut says = guest.stdin.take().context("no pipe")?;
    says.write_all(b"write -P 3 0 4096\nflush\n")?;
    wait::until("it has the image open", LIMIT, || {
        (!watchers("beside").ok()?.is_empty()).then_some(())
    })?;
    a.start()?;
    is(&a, "waiting")?;
    let shown = show(&a)?;
    ensure!(
        shown["reason"]
            .as_str()
            .is_some_and(|why| why.contains("10.99.0.2")),
        "{shown}"
    );
    // It ends when nothing more is said.
    drop(says);
    guest.wait()?;
    is(&a, "attached")?;
    ensure!(a.connect("d")?.read(0, 4096)? == [3; 4096]);
    Ok(())
}

/// The first host is shut out under load: it stops acknowledging, lists what it has, and writes nothing
/// more, not after the shutting out has ended, nor after a restart or a kill, until it is told to.
#[test]
fn a_host_that_is_shut_out_stops_for_good() -> Result<()> {
    let Some(_lab) = lab("ceph: shut out") else {
        return Ok(());
    };
    let origin = image("fenced", "64M")?;
    let mut a = host("a")?;
    a.add("d", &origin, &[])?;
    let mut client = a.connect("d")?;
    for i in 0..64u64 {
        client.write(i * 8192, &[1; 4096])?;
    }
    client.flush()?;
    a.ok(&["disk", "flush", "d"])?;
    let address = watchers("fenced")?.pop().context("nobody has it open")?;
    ceph("ceph", &["osd", "blocklist", "add", &address, SHUT_OUT])?;
    let before = content("fenced", a.dir())?;
    // Nobody has told this host yet. Then something has to go to the image.
    for i in 0..64u64 {
        client.write(i * 8192, &[2; 4096])?;
    }
    let words = a.refused(&["disk", "flush", "d"])?;
    ensure!(words.contains("did not complete"), "{words}");
    wait::until("writes fail", LIMIT, || {
        client.write(0, &[3; 4096]).is_err().then_some(())
    })?;
    is(&a, "fenced")?;
    let shown = show(&a)?;
    ensure!(shown["dirty"].as_u64() > Some(0), "{shown}");
    ensure!(
        shown["stranded"]
            .as_array()
            .is_some_and(|all| !all.is_empty()),
        "{shown}"
    );
    ensure!(
        shown["remedy"]
            .as_str()
            .is_some_and(|what| what.contains("--trust")),
        "{shown}"
    );
    ensure!(a.stats("d")?["fenced"] == true);
    ensure!(a.connect("d").is_err(), "it is still served");
    let tries = a.log().matches("is not connected").count();
    ensure!(tries < 10, "{tries} times:\n{}", a.log());

    wait::until("the shutting out ends", LIMIT, || {
        let list = ceph("ceph", &["osd", "blocklist", "ls"]).ok()?;
        (!list.contains(&address)).then_some(())
    })?;
    ensure!(content("fenced", a.dir())? == before);
    for kill in [false, true] {
        if kill {
            a.kill9()?;
        } else {
            a.stop()?;
        }
        a.start()?;
        is(&a, "fenced")?;
        a.refused(&["disk", "flush", "d"])?;
        ensure!(watchers("fenced")?.is_empty(), "the image is open");
    }
    ensure!(content("fenced", a.dir())? == before);
    a.ok(&["disk", "set", "d", "--trust", "flash"])?;
    is(&a, "attached")?;
    ensure!(content("fenced", a.dir())?[..4096] != before[..4096]);
    Ok(())
}

/// An image that was resized is seen to have grown, by the guest and at its end.
#[test]
fn a_resized_image_has_its_new_size() -> Result<()> {
    let Some(_lab) = lab("ceph: resize") else {
        return Ok(());
    };
    let origin = image("grown", "64M")?;
    let a = host("a")?;
    a.add("d", &origin, &[])?;
    let mut client = a.connect("d")?;
    client.write((64 << 20) - 4096, &[5; 4096])?;
    let same = a.ok(&["disk", "set", "d", "--size-from-origin"])?;
    ensure!(same.contains("nothing changed"), "{same}");
    ceph(
        "rbd",
        &["resize", "--no-progress", "--size", "96M", "rbd/grown"],
    )?;
    let grown = a.ok(&["disk", "set", "d", "--size-from-origin"])?;
    ensure!(!grown.contains("nothing changed"), "{grown}");
    ensure!(show(&a)?["size"] == 96u64 << 20, "{grown}");
    ensure!(client.read((64 << 20) - 4096, 4096)? == [5; 4096]);
    let mut client = a.connect("d")?;
    client.write((96 << 20) - 4096, &[6; 4096])?;
    a.ok(&["disk", "flush", "d"])?;
    let plain = content("grown", a.dir())?;
    ensure!(plain.len() == 96 << 20);
    ensure!(plain[(64 << 20) - 4096..64 << 20] == [5; 4096]);
    ensure!(plain[(96 << 20) - 4096..] == [6; 4096]);
    Ok(())
}

/// All object stores are killed under a verified load and come back: no request fails, and the image
/// holds what was written.
#[test]
fn object_stores_restart_under_load() -> Result<()> {
    let Some(lab) = lab("ceph: object stores restart") else {
        return Ok(());
    };
    let origin = image("stores", &format!("{}K", BLOCKS * BLOCK as u64 / 1024))?;
    let a = host("a")?;
    a.add(
        "d",
        &origin,
        &["--mode", "write-through", "--origin-timeout", "120"],
    )?;
    let mut writer = Writer::new(31);
    let mut client = a.connect("d")?;
    for cycle in 0..2 {
        writer
            .load(&mut client, LOAD, || {
                for id in 0..3 {
                    let pid = std::fs::read_to_string(lab.join(format!("run/osd.{id}.pid")))?;
                    run_ok("kill", &["-9", pid.trim()], &lab)?;
                }
                for id in 0..3 {
                    // One that was killed holds its file for a moment.
                    wait::until("an object store starts", LIMIT, || {
                        run_ok("ceph-osd", &["-i", &id.to_string()], &lab).ok()
                    })?;
                }
                Ok(())
            })
            .with_context(|| format!("cycle {cycle}"))
            .with_context(|| a.log())?;
    }
    writer.flush(&mut client)?;
    writer.check_stable(&mut client)?;
    drop(client);
    a.ok(&["disk", "remove", "d"])?;
    let file = a.dir().join("exported");
    content("stores", a.dir())?;
    writer.check_file(&file)
}
