//! Another program takes the daemon's place under its clients: who is connected over NBD goes on without an error,
//! a program that cannot take over changes nothing, and a death on the way is one like any other.

use anyhow::{Context, Result, ensure};
use hearth_rig::clients::have;
use hearth_rig::daemon::{binary, ok, path};
use hearth_rig::guest::{Guest, How};
use hearth_rig::nbd::{Client, Command};
use hearth_rig::qemu_io::{PROGRAMS, QemuIo};
use hearth_rig::rng::Rng;
use hearth_rig::{Hearth, pattern, servers, wait};
use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

const MIB: u64 = 1 << 20;
const BLOCK: usize = 4096;
const LIMIT: Duration = Duration::from_secs(60);

/// A daemon with disk `d` of 16 MiB.
fn serving(more: &[&str]) -> Result<Hearth> {
    let mut hearth = Hearth::with_pool("256M")?;
    hearth.serve_args = more.iter().map(|arg| (*arg).to_owned()).collect();
    hearth.start()?;
    let origin = hearth.origin("o.img", 16 * MIB)?;
    hearth.add("d", path(&origin), &[])?;
    Ok(hearth)
}

/// `hearth upgrade --json`, which must succeed.
fn upgrade(hearth: &Hearth, more: &[&str]) -> Result<Value> {
    let args = [&["upgrade", "--json"], more].concat();
    Ok(serde_json::from_str(&hearth.ok(&args)?)?)
}

/// A program of one's own, that is a shell script.
fn script(hearth: &Hearth, name: &str, text: &str) -> Result<PathBuf> {
    let file = hearth.dir().join(name);
    let draft = hearth.dir().join(format!("{name}.draft"));
    fs::write(&draft, format!("#!/bin/sh\n{text}\n"))?;
    fs::set_permissions(&draft, fs::Permissions::from_mode(0o755))?;
    // Written by another process: a child that another test starts may have a file open for a moment that is
    // written here, which then cannot be run.
    let copied = std::process::Command::new("cp")
        .args(["-p", "--remove-destination", path(&draft), path(&file)])
        .status()?;
    ensure!(copied.success(), "cannot copy {name}");
    Ok(file)
}

/// Writes and reads on one connection until told to stop, and knows what every block holds.
struct Load {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    thread: JoinHandle<Result<(Client, Vec<u64>)>>,
}

impl Load {
    fn start(mut client: Client, seed: u64) -> Load {
        let (stop, done) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let (stops, counts) = (stop.clone(), done.clone());
        let thread = std::thread::spawn(move || {
            let mut rng = Rng::new(seed);
            let blocks = client.size / BLOCK as u64;
            let mut versions = vec![0u64; blocks as usize];
            let mut data = vec![0; BLOCK];
            for round in 1.. {
                if stops.load(Ordering::Relaxed) {
                    break;
                }
                // Eight blocks apart from each other, so that requests in flight do not meet.
                let first = rng.below(blocks / 8);
                for i in 0..8 {
                    let block = first + i * (blocks / 8);
                    if rng.below(2) == 0 {
                        pattern::fill(&mut data, block, round);
                        versions[block as usize] = round;
                        let fua = rng.below(4) == 0;
                        client.send(
                            Command::Write { fua },
                            block * BLOCK as u64,
                            BLOCK as u32,
                            &data,
                        )?;
                    } else {
                        client.send(Command::Read, block * BLOCK as u64, BLOCK as u32, &[])?;
                    }
                }
                while client.in_flight() > 0 {
                    let reply = client.receive()?;
                    ensure!(reply.error == 0, "a request failed: {}", reply.error);
                }
                let block = first + rng.below(8) * (blocks / 8);
                check(&mut client, &versions, block)?;
                counts.fetch_add(1, Ordering::Relaxed);
            }
            Ok((client, versions))
        });
        Load { stop, done, thread }
    }

    /// Waits until it has got on.
    fn gets_on(&self) -> Result<()> {
        let before = self.done.load(Ordering::Relaxed);
        wait::until("the load gets on", LIMIT, || {
            (self.done.load(Ordering::Relaxed) > before + 3 || self.thread.is_finished())
                .then_some(())
        })
    }

    /// Stops it; everything it has written is there.
    fn end(self) -> Result<Client> {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.join();
        let (mut client, versions) = ended.map_err(|_| anyhow::anyhow!("the load panicked"))??;
        for block in 0..versions.len() {
            check(&mut client, &versions, block as u64)?;
        }
        Ok(client)
    }
}

/// A block that was written holds what was written last.
fn check(client: &mut Client, versions: &[u64], block: u64) -> Result<()> {
    let wanted = versions[block as usize];
    if wanted > 0 {
        let data = client.read(block * BLOCK as u64, BLOCK as u32)?;
        let version = pattern::version_of(&data, block).map_err(anyhow::Error::msg)?;
        ensure!(
            version == wanted,
            "block {block} has version {version}, not {wanted}"
        );
    }
    Ok(())
}

/// Descriptors that stay open: as many in several looks one after the other, for some are open for a moment.
fn descriptors(pid: u32) -> Result<usize> {
    let (mut last, mut same) = (0, 0);
    wait::until("as many descriptors as a moment before", LIMIT, || {
        let now = fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
        same = if now == last { same + 1 } else { 0 };
        last = now;
        (same == 20).then_some(now)
    })
}

#[test]
fn one_connection_goes_over_three_times_under_load() -> Result<()> {
    let hearth = serving(&[])?;
    let pid = hearth.pid().context("not running")?;
    let mut loaded = hearth.connect("d")?;
    // The last part is left to the long write below.
    loaded.size -= MIB;
    let load = Load::start(loaded, 11);
    // One that is in the middle of a long write, and one that has only just come.
    let half = hearth.connect("d")?;
    let fresh = std::os::unix::net::UnixStream::connect(hearth.socket())?;
    fresh.set_read_timeout(Some(LIMIT))?;
    let mut greeting = [0; 18];
    (&fresh).read_exact(&mut greeting)?;
    let mut message = Vec::new();
    message.extend(0x2560_9513u32.to_be_bytes());
    message.extend([0, 0, 0, 1]);
    message.extend(77u64.to_be_bytes());
    message.extend((15 * MIB).to_be_bytes());
    message.extend((MIB as u32).to_be_bytes());
    let mut after = Vec::new();
    let mut open = Vec::new();
    for round in 1..=3u64 {
        load.gets_on()?;
        if round == 1 {
            (&half.raw()?).write_all(&message)?;
        }
        let outcome = upgrade(&hearth, &[])?;
        ensure!(
            outcome["ended"] == 0 && outcome["carried"] == 3,
            "{outcome}"
        );
        ensure!(outcome["failure"].is_null(), "{outcome}");
        println!("paused for {} ms", outcome["pause_ms"]);
        ensure!(hearth.pid() == Some(pid), "it is another process");
        let state = hearth.api().get("/v1/upgrade")?;
        ensure!(state["generation"] == round, "{state}");
        if round < 3 {
            load.gets_on()?;
            open.push(descriptors(pid)?);
        }
    }
    // The long write goes on where it was. At once: each program gives a client 30 s.
    after.resize(MIB as usize, 7);
    let mut raw = half.raw()?;
    raw.set_read_timeout(Some(LIMIT))?;
    raw.write_all(&after)?;
    let mut reply = [0; 16];
    raw.read_exact(&mut reply)?;
    ensure!(
        reply[4..8] == [0; 4] && reply[8..] == 77u64.to_be_bytes(),
        "{reply:?}"
    );
    // Who was greeted by the first program is answered by the last one.
    let mut abort = vec![0, 0, 0, 3];
    abort.extend(0x4948_4156_454f_5054u64.to_be_bytes());
    abort.extend([0, 0, 0, 2, 0, 0, 0, 0]);
    (&fresh).write_all(&abort)?;
    let mut answer = [0; 20];
    (&fresh).read_exact(&mut answer)?;
    ensure!(
        answer[12..16] == [0, 0, 0, 1],
        "no acknowledgement: {answer:?}"
    );
    let mut client = load.end()?;
    // Nothing is left open by a program that is gone.
    wait::until("the descriptors are as many as before", LIMIT, || {
        descriptors(pid)
            .is_ok_and(|now| now <= open[0] + 2)
            .then_some(())
    })?;
    ensure!(
        client.read(15 * MIB, MIB as u32)? == after,
        "the long write is not whole"
    );
    // And the pool is as warm as it was.
    let pool = hearth.ok(&["pool", "show"])?;
    ensure!(pool.contains("checkpoint of a clean stop"), "{pool}");
    let events = hearth.ok(&["events", "--json"])?;
    ensure!(events.matches("daemon-upgraded").count() == 3, "{events}");
    Ok(())
}

#[test]
fn qemu_notices_nothing_over_tcp() -> Result<()> {
    if !have("upgrade under qemu", &PROGRAMS) {
        return Ok(());
    }
    let port = servers::free_port()?.to_string();
    let hearth = serving(&["--nbd-listen", &format!("127.0.0.1:{port}")])?;
    // No reconnect-delay: a connection that ends is an error.
    let node =
        format!("driver=nbd,server.type=inet,server.host=127.0.0.1,server.port={port},export=d");
    let mut qemu = QemuIo::start(&node, LIMIT)?;
    qemu.ask("write -f -P 7 0 64k", "wrote 65536/65536")?;
    for _ in 0..2 {
        ensure!(
            upgrade(&hearth, &[])?["carried"] == 1,
            "qemu-io did not go over"
        );
        qemu.ask("read -P 7 0 64k", "read 65536/65536")?;
        qemu.ask("write -P 7 64k 4k", "wrote 4096/4096")?;
    }
    qemu.end()
}

#[test]
fn a_program_that_cannot_take_over_changes_nothing() -> Result<()> {
    let hearth = serving(&[])?;
    let pid = hearth.pid();
    let mut client = hearth.connect("d")?;
    client.write(0, &[9; BLOCK])?;
    let text = hearth.dir().join("text");
    fs::write(&text, "no program")?;
    let real = path(&binary()?).to_owned();
    let says = |json: &str| format!("cat <<'END'\n{json}\nEND");
    let older = says(r#"{"version":"0.0.9","documents":[],"nbd":[],"refusal":null}"#);
    let elsewhere = format!("exec {real} can-take-over -- serve --flash /no/such/flash");
    let fussy = format!("exec {real} can-take-over -- serve --flash / --no-such-option");
    let cases = [
        (text, "cannot be run"),
        ("/bin/true".into(), "no Hearth"),
        ("/no/such/program".into(), "cannot see"),
        (script(&hearth, "older", &older)?, "does not understand"),
        (script(&hearth, "elsewhere", &elsewhere)?, "/no/such/flash"),
        (script(&hearth, "fussy", &fussy)?, "--no-such-option"),
    ];
    for (program, why) in &cases {
        let words = hearth.refused(&["upgrade", "--yes", "--program", path(program)])?;
        ensure!(words.contains(why), "{}: {words}", program.display());
    }
    let check = hearth.ok(&["upgrade", "--check", "--json"])?;
    let check: Value = serde_json::from_str(&check)?;
    ensure!(check["carried"] == 1 && check["generation"] == 0, "{check}");
    // One that is gone after it has promised: the program before goes on, with its clients.
    let promise = format!("rm \"$0\"; exec {real} \"$@\"");
    let gone = script(&hearth, "gone", &promise)?;
    // It is asked twice, by the check and by the upgrade itself.
    let keep =
        format!("if [ -e \"$0.once\" ]; then {promise}; fi; : >\"$0.once\"; exec {real} \"$@\"");
    script(&hearth, "gone", &keep)?;
    let words = hearth.refused(&["upgrade", "--program", path(&gone)])?;
    ensure!(words.contains("goes on as version"), "{words}");
    ensure!(hearth.pid() == pid, "it is another process");
    ensure!(
        client.read(0, BLOCK as u32)? == [9; BLOCK],
        "the client's connection is another one"
    );
    let events = hearth.ok(&["events", "--json"])?;
    ensure!(events.contains("daemon-upgrade-failed"), "{events}");
    Ok(())
}

#[test]
fn guests_that_share_memory_are_named_and_come_again() -> Result<()> {
    let hearth = serving(&[])?;
    let guest = Guest::connect(&hearth.vhost_socket("d"), 1, How::default())?;
    let words = hearth.refused(&["upgrade"])?;
    ensure!(
        words.contains("on disk d") && words.contains("--yes"),
        "{words}"
    );
    ensure!(words.contains(&std::process::id().to_string()), "{words}");
    let check: Value = serde_json::from_str(&hearth.ok(&["upgrade", "--check", "--json"])?)?;
    ensure!(
        check["at_risk"][0]["client"]["kind"] == "vhost-user",
        "{check}"
    );
    // Nothing has happened to it.
    ensure!(
        guest.capacity()? == 16 * MIB,
        "the guest's disk is another one"
    );
    let inode = fs::metadata(hearth.vhost_socket("d"))?;
    let outcome = upgrade(&hearth, &["--yes"])?;
    ensure!(
        outcome["ended"] == 1 && outcome["carried"] == 0,
        "{outcome}"
    );
    guest.wait_cut()?;
    // The very same socket takes it again.
    let now = fs::metadata(hearth.vhost_socket("d"))?;
    use std::os::unix::fs::MetadataExt;
    ensure!(inode.ino() == now.ino(), "the socket is another one");
    let again = Guest::resume(
        &hearth.vhost_socket("d"),
        guest.into_memory(),
        How::default(),
    )?;
    ensure!(
        again.capacity()? == 16 * MIB,
        "the guest's disk is another one"
    );
    Ok(())
}

/// Wherever on the way the process dies, the next start has everything that was flushed.
#[test]
fn killed_on_the_way_the_pool_opens() -> Result<()> {
    let mut hearth = serving(&[])?;
    // What the log says at each stage, of which the upgrade's is one more than those before.
    let stages = [
        "takes over from",
        "data threads started",
        "serving NBD",
        "pool opened",
    ];
    for (round, stage) in (1u64..).zip(stages) {
        let mut client = hearth.connect("d")?;
        let mut data = vec![0; BLOCK];
        for block in 0..64 {
            pattern::fill(&mut data, block, round);
            client.write(block * BLOCK as u64, &data)?;
        }
        client.flush()?;
        let before = hearth.log().matches(stage).count();
        let mut order = std::process::Command::new(binary()?)
            .arg("--run-dir")
            .arg(hearth.run_dir())
            .arg("upgrade")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let reached = wait::until(stage, LIMIT, || {
            (hearth.log().matches(stage).count() > before).then_some(())
        });
        hearth.kill9()?;
        order.wait()?;
        reached.with_context(|| hearth.log())?;
        hearth.start()?;
        let mut client = hearth.connect("d")?;
        for block in 0..64 {
            let data = client.read(block * BLOCK as u64, BLOCK as u32)?;
            let version = pattern::version_of(&data, block).map_err(anyhow::Error::msg)?;
            ensure!(
                version == round,
                "{stage}: block {block} has version {version}"
            );
        }
    }
    Ok(())
}

/// What is no document of another program is none: the daemon starts as at any other time.
#[test]
fn garbage_for_a_document_is_a_plain_start() -> Result<()> {
    let mut hearth = Hearth::with_pool("64M")?;
    let file = hearth.dir().join("garbage");
    fs::write(&file, [0x48; 4096])?;
    for garbage in ["", "0", "7", "-1", "99999", "x"] {
        hearth.env = vec![("HEARTH_HANDOVER".to_owned(), garbage.to_owned())];
        hearth.start().with_context(|| format!("{garbage:?}"))?;
        hearth.stop()?;
    }
    ok(hearth.hearth(&["pool", "show", "--flash", path(hearth.flash())])?)?;
    Ok(())
}
