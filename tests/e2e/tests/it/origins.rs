//! Disks whose origin is behind an NBD server that lives its own life.

use anyhow::{Context, Result, ensure};
use hearth_rig::clients::have;
use hearth_rig::daemon::path;
use hearth_rig::load::{BLOCKS, Writer};
use hearth_rig::nbd::Command::Read;
use hearth_rig::pattern::BLOCK;
use hearth_rig::servers::Server;
use hearth_rig::{Hearth, wait};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longest wait for a state that comes by itself.
const LIMIT: Duration = Duration::from_secs(60);
/// How long a load goes on before and after each kill.
const LOAD: Duration = Duration::from_millis(200);

/// How a server is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Over {
    Unix,
    Tcp,
}

/// An nbdkit that forgets, when killed, everything that was not flushed.
fn forgetful(hearth: &Hearth, over: Over) -> Result<(Server, PathBuf)> {
    let file = hearth.dir().join("o.img");
    std::fs::write(&file, vec![0u8; BLOCKS as usize * BLOCK])?;
    let what = ["--filter=cache", "file", path(&file), "cache=writeback"];
    let server = match over {
        Over::Unix => Server::start(
            "nbdkit",
            &[&["-f", "-U", "{socket}"], &what[..]].concat(),
            hearth.dir().join("n"),
        )?,
        Over::Tcp => Server::start_tcp(
            "nbdkit",
            &[&["-f", "-i", "127.0.0.1", "-p", "{port}"], &what[..]].concat(),
        )?,
    };
    Ok((server, file))
}

fn link(hearth: &Hearth) -> Result<serde_json::Value> {
    let info: serde_json::Value =
        serde_json::from_str(&hearth.ok(&["disk", "show", "d", "--json"])?)?;
    Ok(info["link"].clone())
}

fn connected(hearth: &Hearth) -> Result<()> {
    wait::until("connected again", LIMIT, || {
        (link(hearth).ok()?["connected"] == true).then_some(())
    })
}

fn survives(mode: &str, over: Over) -> Result<()> {
    if !have("origins: server killed", &["nbdkit"]) {
        return Ok(());
    }
    let mut hearth = Hearth::serving("160M")?;
    let (mut server, file) = forgetful(&hearth, over)?;
    hearth.add("d", &server.uri(""), &["--sole-user", "--mode", mode])?;
    let mut writer = match mode {
        "off" => Writer::uncached(11),
        _ => Writer::new(11),
    };
    let mut client = hearth.connect("d")?;
    for cycle in 0..4 {
        // Killed in the middle of the load and back a moment later: no request may fail.
        writer
            .load(&mut client, LOAD, || {
                server.kill9()?;
                server.up()
            })
            .with_context(|| format!("{mode}, cycle {cycle}"))
            .with_context(|| hearth.log())?;
    }
    connected(&hearth)?;
    writer.flush(&mut client)?;
    writer.check_stable(&mut client)?;
    // What a guest's flush covered is in the origin, or on flash until it is.
    server.kill9()?;
    if mode == "write-back" {
        server.up()?;
        hearth.ok(&["disk", "flush", "d"])?;
        server.kill9()?;
    }
    writer.check_file(&file)?;
    server.up()?;
    // And after a crash of the daemon as well.
    hearth.kill9()?;
    hearth.start()?;
    wait::until("attached again", LIMIT, || {
        let list = hearth.ok(&["disk", "show", "d", "--json"]).ok()?;
        list.contains("\"attached\"").then_some(())
    })?;
    writer.check(&mut hearth.connect("d")?)?;
    Ok(())
}

#[test]
fn a_killed_server_is_a_pause_in_write_back() -> Result<()> {
    survives("write-back", Over::Unix)
}

#[test]
fn a_killed_server_is_a_pause_in_write_through() -> Result<()> {
    survives("write-through", Over::Unix)
}

#[test]
fn a_killed_server_is_a_pause_past_the_cache() -> Result<()> {
    survives("off", Over::Unix)
}

/// The same over TCP, where a killed server leaves connections behind that nobody closes at once.
#[test]
fn a_killed_server_over_tcp_is_a_pause() -> Result<()> {
    survives("write-back", Over::Tcp)?;
    survives("write-through", Over::Tcp)
}

/// A named export over TCP, of a server that has several: the right one is served, over its restart
/// too, and one that is not there is refused by name.
#[test]
fn exports_over_tcp_have_names() -> Result<()> {
    if !have("origins: exports over TCP", &["qemu-nbd"]) {
        return Ok(());
    }
    let hearth = Hearth::serving("160M")?;
    let file = hearth.origin("o.img", 8 << 20)?;
    let before = std::fs::read(&file)?;
    let mut server = Server::start_tcp(
        "qemu-nbd",
        &[
            "-t",
            "-e",
            "8",
            "-b",
            "127.0.0.1",
            "-p",
            "{port}",
            "-x",
            "vm 7/a",
            "-f",
            "raw",
            path(&file),
        ],
    )?;
    let words = hearth.refused(&[
        "disk",
        "add",
        "d",
        "--sole-user",
        "--origin",
        &server.uri("vm"),
    ])?;
    ensure!(words.contains("no export \"vm\""), "{words}");
    hearth.add(
        "d",
        &server.uri("vm%207/a"),
        &["--sole-user", "--mode", "write-through"],
    )?;
    let mut client = hearth.connect("d")?;
    ensure!(client.read(0, 65536)? == before[..65536]);
    client.write(4096, &[6; 8192])?;
    client.flush()?;
    // Copies of the origin gather before they go on flash. Besides, `disk add` has cached 64 blocks, one of them here.
    wait::until("what was read and written is cached", LIMIT, || {
        (hearth.stats("d").ok()?["cached"].as_u64()? >= 64 * 4096 + 61440).then_some(())
    })?;
    server.kill9()?;
    wait::until("the loss is noticed", LIMIT, || {
        (link(&hearth).ok()?["connected"] == false).then_some(())
    })?;
    // What is cached is served without it; what is not waits, and comes when the server does.
    ensure!(client.read(4096, 8192)? == [6; 8192]);
    let waiting = client.send(hearth_rig::nbd::Command::Read, 1 << 20, 4096, &[])?;
    server.up()?;
    let reply = client.receive()?;
    ensure!(reply.cookie == waiting && reply.error == 0, "{reply:?}");
    ensure!(reply.data == before[1 << 20..(1 << 20) + 4096]);
    connected(&hearth)?;
    ensure!(std::fs::read(&file)?[4096..12288] == [6; 8192]);
    Ok(())
}

/// Gone, or hanging, for longer than the limit: errors, visible; then recovery by itself.
#[test]
fn gone_for_long_is_an_error_until_it_is_back() -> Result<()> {
    if !have("origins: server gone", &["nbdkit"]) {
        return Ok(());
    }
    let hearth = Hearth::serving("160M")?;
    let (mut server, _) = forgetful(&hearth, Over::Unix)?;
    hearth.add(
        "d",
        &server.uri(""),
        &["--sole-user", "--mode", "off", "--origin-timeout", "5"],
    )?;
    let mut client = hearth.connect("d")?;
    let data = vec![7u8; 8192];
    client.write(0, &data)?;
    for hang in [false, true] {
        if hang {
            server.signal(libc::SIGSTOP)?;
        } else {
            server.kill9()?;
        }
        // A process does not stop all of its threads at once.
        wait::until("a read fails", LIMIT, || {
            client.read(0, 4096).is_err().then_some(())
        })?;
        let state = link(&hearth)?;
        ensure!(
            state["connected"] == false && state["failing"] == true,
            "{state}"
        );
        let shown = hearth.ok(&["disk", "show", "d"])?;
        ensure!(shown.contains("requests fail"), "{shown}");
        if hang {
            server.signal(libc::SIGCONT)?;
        } else {
            server.up()?;
        }
        connected(&hearth)?;
        ensure!(client.read(0, 8192)? == data, "a write was lost");
    }
    client.flush()?;
    Ok(())
}

/// The daemon starts without the server: the disk waits, and comes by itself.
#[test]
fn a_disk_waits_for_its_server() -> Result<()> {
    if !have("origins: no server at start", &["nbdkit"]) {
        return Ok(());
    }
    let mut hearth = Hearth::serving("160M")?;
    let (mut server, _) = forgetful(&hearth, Over::Unix)?;
    hearth.add("d", &server.uri(""), &["--sole-user"])?;
    hearth.connect("d")?.write(4096, &[3; 4096])?;
    hearth.stop()?;
    server.kill9()?;
    hearth.start()?;
    let shown = hearth.ok(&["disk", "show", "d"])?;
    ensure!(shown.contains("waiting"), "{shown}");
    server.up()?;
    wait::until("attached", LIMIT, || {
        hearth
            .ok(&["disk", "show", "d", "--json"])
            .ok()?
            .contains("\"attached\"")
            .then_some(())
    })?;
    ensure!(hearth.connect("d")?.read(4096, 4096)? == [3; 4096]);
    Ok(())
}

/// Addresses that will not do are refused with a sentence.
#[test]
fn refusals() -> Result<()> {
    let hearth = Hearth::serving("160M")?;
    for (origin, want) in [
        ("nbd://", "names no host"),
        ("nbds://h/e", "TLS"),
        ("nbd+unix:///x", "names no socket"),
        ("nbd+unix:///x?socket=/nowhere/s", "cannot connect"),
        ("nbd://127.0.0.1:1/x", "cannot connect"),
        ("zip:/x", "no kind of origin"),
        ("model-hdd:nbd://h/x", "needs a file underneath"),
    ] {
        let words = hearth.refused(&["disk", "add", "d", "--sole-user", "--origin", origin])?;
        ensure!(words.contains(want), "{origin}: {words}");
    }
    let own = hearth.uri("d");
    let words = hearth.refused(&["disk", "add", "e", "--origin", &own])?;
    ensure!(words.contains("this daemon's own NBD socket"), "{words}");
    let other = Hearth::serving("160M")?;
    let wrong = other.uri("nope");
    let words = hearth.refused(&["disk", "add", "d", "--sole-user", "--origin", &wrong])?;
    ensure!(words.contains("no export \"nope\""), "{words}");
    Ok(())
}

/// A file served by a process (FUSE), which can be made to hang. Goes on, and ends, when dropped.
struct Mount {
    child: Child,
    file: PathBuf,
}

impl Mount {
    fn start(dir: &Path, size: u64) -> Result<Mount> {
        let (under, file) = (dir.join("under.raw"), dir.join("mounted.raw"));
        std::fs::File::create(&under)?.set_len(size)?;
        std::fs::File::create(&file)?;
        let child = Command::new("qemu-storage-daemon")
            .arg("--blockdev")
            .arg(format!("file,node-name=f,filename={}", path(&under)))
            .arg("--export")
            .arg(format!(
                "fuse,id=e,node-name=f,mountpoint={},writable=on,growable=off",
                path(&file)
            ))
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let mount = Mount { child, file };
        wait::until("the file is served", LIMIT, || {
            let there = std::fs::metadata(&mount.file).ok()?;
            (there.len() == size).then_some(())
        })?;
        Ok(mount)
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a signal to a child that has not been waited for, so its pid is still its own.
        unsafe { libc::kill(self.child.id() as i32, signal) };
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.signal(libc::SIGCONT);
        // In order, so that nothing stays mounted.
        self.signal(libc::SIGTERM);
        let _ = self.child.wait();
    }
}

/// A mount that hangs is the business of its own disk: not of the others on the same data thread,
/// and not of the stop.
#[test]
fn a_mount_that_hangs_stops_nobody_else() -> Result<()> {
    if !have("origins: hung mount", &["qemu-storage-daemon", "nbdinfo"])
        || !Path::new("/dev/fuse").exists()
    {
        return Ok(());
    }
    let mut hearth = Hearth::with_pool("160M")?;
    hearth.serve_args = vec!["--threads".to_owned(), "1".to_owned()];
    hearth.start()?;
    let Ok(mount) = Mount::start(hearth.dir(), 64 << 20) else {
        println!("SKIPPED origins: hung mount: no file can be served here");
        return Ok(());
    };
    hearth.add("hung", path(&mount.file), &["--origin-timeout", "2"])?;
    hearth.add("well", path(&hearth.origin("well.raw", 16 << 20)?), &[])?;
    let mut hung = hearth.connect("hung")?;
    let mut well = hearth.connect("well")?;
    // Far longer than an answer takes.
    well.raw()?
        .set_read_timeout(Some(Duration::from_secs(20)))?;
    // Its own requests fail when the limit is over, those that come later at once, and it comes back by itself.
    mount.signal(libc::SIGSTOP);
    for n in 0..4 {
        hung.send(Read, n << 20, 4096, &[])?;
    }
    for _ in 0..4 {
        ensure!(hung.receive()?.error != 0, "who answered that?");
    }
    // Flash takes what is written, and gives it back.
    hung.write(0, &[8; 4096])?;
    hung.flush()?;
    ensure!(hung.read(0, 4096)? == [8; 4096]);
    mount.signal(libc::SIGCONT);
    wait::until("the disk is back", LIMIT, || hung.read(4 << 20, 4096).ok())?;
    hearth.ok(&["disk", "set", "hung", "--origin-timeout", "600"])?;

    mount.signal(libc::SIGSTOP);
    // More than the kernel has workers, if nobody asks it for more.
    for n in 0..40 {
        hung.send(Read, (n << 20) + 8192, 4096, &[])?;
    }
    for n in 0..8 {
        well.read(n << 20, 4096)?;
        well.write(n << 20, &[7; 4096])?;
        well.flush()?;
    }
    let mut map = Command::new("nbdinfo")
        .args(["--map", &hearth.uri("hung")])
        .stdout(Stdio::null())
        .spawn()?;
    let mapped = wait::until("a map of the hung disk", Duration::from_secs(20), || {
        map.try_wait().ok().flatten()
    });
    if mapped.is_err() {
        map.kill()?;
        map.wait()?;
    }
    ensure!(mapped?.success());
    ensure!(well.read(0, 4096)? == [7; 4096]);
    let pid = hearth.pid().context("not running")?;
    // SAFETY: a signal to a child that has not been waited for, so its pid is still its own.
    unsafe { libc::kill(pid as i32, libc::SIGTERM) };
    // The kernel does not let go of a process before the mount has answered: what the daemon has to
    // say about its stop must be enough. Its limits add up to some 90 s.
    let start = Instant::now();
    wait::until("the daemon stops", Duration::from_secs(150), || {
        hearth
            .log()
            .contains("so there is no checkpoint")
            .then_some(())
    })?;
    println!("stopped after {} s", start.elapsed().as_secs());
    mount.signal(libc::SIGCONT);
    wait::until("its process ends", LIMIT, || {
        (!hearth.running()).then_some(())
    })?;
    hearth.kill9()?;
    hearth.start()?;
    ensure!(hearth.connect("well")?.read(0, 4096)? == [7; 4096]);
    hearth.stop()?;
    Ok(())
}

/// Nor does one that hangs when it is back keep others from coming back.
#[test]
fn a_mount_that_hangs_keeps_no_disk_waiting() -> Result<()> {
    if !have("origins: hung mount, waiting", &["qemu-storage-daemon"])
        || !Path::new("/dev/fuse").exists()
    {
        return Ok(());
    }
    let mut hearth = Hearth::serving("160M")?;
    let Ok(mount) = Mount::start(hearth.dir(), 64 << 20) else {
        println!("SKIPPED origins: hung mount, waiting: no file can be served here");
        return Ok(());
    };
    // They are looked for in this order.
    hearth.add("hung", path(&mount.file), &[])?;
    let (later, away) = (
        hearth.origin("later.raw", 16 << 20)?,
        hearth.dir().join("away"),
    );
    hearth.add("later", path(&later), &[])?;
    hearth.stop()?;
    let file = mount.file.clone();
    drop(mount);
    std::fs::remove_file(file)?;
    std::fs::rename(&later, &away)?;
    hearth.start()?;
    let mount = Mount::start(hearth.dir(), 64 << 20)?;
    mount.signal(libc::SIGSTOP);
    std::fs::rename(&away, &later)?;
    wait::until("the other disk is back", LIMIT, || {
        let shown = hearth.ok(&["disk", "show", "later", "--json"]).ok()?;
        shown.contains("\"attached\"").then_some(())
    })?;
    mount.signal(libc::SIGCONT);
    hearth.stop()?;
    Ok(())
}
