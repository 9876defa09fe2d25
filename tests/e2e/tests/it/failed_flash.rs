//! Flash that fails under a running daemon: not an outage for disks with nothing dirty on it, and
//! a plain list of what is gone for the others.
//!
//! A limit on file sizes makes the flash file refuse every write beyond it, for the daemon alone;
//! the origins are smaller than the limit and do not notice. It takes neither root nor a device
//! made for it.

use anyhow::{Context, Result, ensure};
use hearth_rig::daemon::path;
use hearth_rig::nbd::Command;
use hearth_rig::rng::Rng;
use hearth_rig::servers::Server;
use hearth_rig::{Hearth, mounted, wait};
use serde_json::{Value, json};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::time::Duration;

const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(30);
/// Bytes of each origin, and the end of what the daemon may write of any file.
const SIZE: u64 = 16 * MIB;
/// Requests on the write-through disk, before and after the failure is noticed.
const REQUESTS: u64 = 600;

fn state(hearth: &Hearth) -> Result<String> {
    let text = hearth.ok(&["pool", "show", "--json"])?;
    let pool: Value = serde_json::from_str(&text)?;
    let state = pool["state"].as_str().context("no state")?;
    Ok(state.to_owned())
}

/// No request says so while nobody asks for anything, and the kernel may swap to a part of it.
#[test]
fn dead_flash_is_noticed_while_idle() -> Result<()> {
    if let Some(missing) = mounted::missing() {
        println!("SKIPPED dead_flash_is_noticed_while_idle: no {missing}");
        return Ok(());
    }
    let mut hearth = Hearth::bare()?;
    let under = hearth.dir().join("under.img");
    File::create(&under)?.set_len(160 << 20)?;
    let mount = mounted::Mounted::new(hearth.dir(), "f", &under, 0)?;
    hearth.ok(&["pool", "create", "--flash", mount.path()])?;
    hearth.set_flash(mount.path().into());
    hearth.start()?;
    ensure!(state(&hearth)? == "serving");
    mount.fail(true)?;
    wait::until("it is noticed", LIMIT, || {
        (state(&hearth).ok()? == "failed").then_some(())
    })
    .with_context(|| hearth.log())?;
    let shown = hearth.ok(&["pool", "show"])?;
    ensure!(shown.contains("cannot be read any more"), "{shown}");
    Ok(())
}

#[test]
fn flash_fails_under_a_running_daemon() -> Result<()> {
    // A daemon told of a write beyond the limit by a signal would end; ignored ones stay so in
    // programs that are started.
    // SAFETY: no handler is installed.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let hearth = Hearth::serving("256M")?;
    let through = hearth.origin("through.img", SIZE)?;
    let back = hearth.origin("back.img", SIZE)?;
    let mut model = std::fs::read(&through)?;
    let plain = std::fs::read(&back)?;
    let more = ["--mode", "write-through", "--seq-cutoff", "0"];
    hearth.add("through", path(&through), &more)?;
    // Nothing of it reaches its origin: what is dirty stays so.
    let origin = format!("fault=eio-write:{}", path(&back));
    hearth.add("back", &origin, &["--mode", "write-back"])?;

    let mut client = hearth.connect("through")?;
    client.sweep(Command::Cache, 0..SIZE, 1 << 18, 8, |_, _| {})?;
    wait::until("all is cached", LIMIT, || {
        (hearth.stats("through").ok()?["cached"].as_u64()? == SIZE).then_some(())
    })?;
    let mut writer = hearth.connect("back")?;
    writer.write(MIB, &[0xAB; 65536])?;
    writer.flush()?;
    ensure!(state(&hearth)? == "serving");

    // The flash forgets everything beyond its first blocks, and takes no more.
    hearth.refuse_writes(SIZE)?;
    let flash = OpenOptions::new().write(true).open(hearth.flash())?;
    let size = flash.metadata()?.len();
    flash.set_len(2 * MIB)?;
    flash.set_len(size)?;

    let mut rng = Rng::new(3);
    let mut failed_at = None;
    for request in 0..REQUESTS {
        let len = (1 + rng.below(16)) * 4096;
        let offset = rng.below((SIZE - len) / 512) * 512;
        let range = offset as usize..(offset + len) as usize;
        if rng.below(2) == 0 {
            rng.fill(&mut model[range.clone()]);
            client
                .write(offset, &model[range])
                .with_context(|| format!("write {request}\n{}", hearth.log()))?;
        } else {
            let data = client
                .read(offset, len as u32)
                .with_context(|| format!("read {request}\n{}", hearth.log()))?;
            ensure!(data == model[range], "request {request}: wrong data");
        }
        if request % 16 == 0 {
            client
                .flush()
                .with_context(|| format!("flush {request}\n{}", hearth.log()))?;
            if failed_at.is_none() && state(&hearth)? == "failed" {
                failed_at = Some(request);
            }
        }
    }
    let failed_at = failed_at.context("the pool never failed")?;
    ensure!(failed_at < REQUESTS / 2, "noticed only at {failed_at}");
    let told = || hearth.log().matches("the flash has failed").count();
    wait::until("the failure is logged", LIMIT, || {
        (told() > 0).then_some(())
    })?;
    client.flush()?;
    ensure!(
        std::fs::read(&through)? == model,
        "the origin is not the disk"
    );

    // What was only on flash is gone and listed; the rest of that disk is there.
    let error = writer
        .read(MIB, 65536)
        .err()
        .context("data that is gone was read")?;
    ensure!(error.raw_os_error() == Some(libc::EIO), "{error}");
    ensure!(writer.read(2 * MIB, 65536)? == plain[2 << 20..][..65536]);
    let lost = || -> Result<Value> {
        let text = hearth.ok(&["disk", "show", "back", "--json"])?;
        Ok(serde_json::from_str::<Value>(&text)?["lost"].take())
    };
    let listed = lost()?;
    ensure!(
        listed == json!([{"offset": MIB, "length": 65536}]),
        "lost: {listed}"
    );
    hearth.ok(&["disk", "accept-loss", "back"])?;
    ensure!(lost()?.as_array().is_none_or(Vec::is_empty));
    ensure!(told() == 1, "logged {} times", told());
    ensure!(
        writer.read(MIB, 65536)? == plain[1 << 20..][..65536],
        "the origin's contents are not served"
    );
    Ok(())
}

/// Flash that takes no writes any more, not even the note that it was given up, but still gives back
/// what it holds: after a kill the next start must not destage what was dirty then over what the guest
/// has written and flushed since. The origin is a server's, which has no limit on its writes.
#[test]
fn what_was_dirty_on_dead_flash_does_not_come_back_over_newer_writes() -> Result<()> {
    // SAFETY: no handler is installed.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let mut hearth = Hearth::with_pool("256M")?;
    // What is dirty stays so for a while.
    hearth.serve_args = ["--destage-rate", "4K"].map(str::to_owned).to_vec();
    hearth.start()?;
    let file = hearth.origin("o.img", SIZE)?;
    let server = Server::qemu_nbd(&file, "o", hearth.dir().join("o.sock"))?;
    hearth.add("d", &server.uri("o"), &["--sole-user"])?;
    let mut client = hearth.connect("d")?;
    client.write(0, &[0x11; 1 << 20])?;
    client.flush()?;
    let at = MIB - 4096;
    let origin = File::open(&file)?;
    let there = |byte: u8| -> Result<bool> {
        let mut block = [0; 4096];
        origin.read_exact_at(&mut block, at)?;
        Ok(block == [byte; 4096])
    };
    ensure!(!there(0x11)?, "it is not only on flash");

    hearth.refuse_writes(0)?;
    client.write(at, &[0x22; 4096])?;
    wait::until("the newest is in the origin", LIMIT, || {
        there(0x22).ok()?.then_some(())
    })?;
    drop(client);
    hearth.kill9()?;
    hearth.start()?;

    // Somebody has to say which side is right; until then nothing is served and nothing destaged.
    let text = hearth.ok(&["disk", "show", "d", "--json"])?;
    let disk: Value = serde_json::from_str(&text)?;
    ensure!(disk["state"] == "refused", "{text}\n{}", hearth.log());
    hearth.ok(&["disk", "set", "d", "--trust", "origin"])?;
    let data = hearth.connect("d")?.read(at, 4096)?;
    ensure!(data == [0x22; 4096], "an old block came back");
    ensure!(there(0x22)?, "an old block is in the origin");
    Ok(())
}

/// Flash that does not answer any more: after its limit the origins carry the disks, and only what is dirty cannot be
/// read until it answers again.
#[test]
fn flash_hangs_under_a_running_daemon() -> Result<()> {
    if let Some(missing) = mounted::missing() {
        println!("SKIPPED failed_flash: flash that hangs: no {missing}");
        return Ok(());
    }
    let mut hearth = Hearth::with_pool("256M")?;
    let file = hearth.dir().join("flash.img");
    let mut flash = mounted::Mounted::new(hearth.dir(), "f", &file, 0)?;
    hearth.set_flash(flash.path().into());
    hearth.serve_args = ["--flash-timeout", "2"].map(str::to_owned).to_vec();
    hearth.start()?;
    let clean = hearth.origin("clean.img", SIZE)?;
    let dirty = hearth.origin("dirty.img", SIZE)?;
    let mut model = std::fs::read(&clean)?;
    let more = ["--mode", "write-through", "--seq-cutoff", "0"];
    hearth.add("clean", path(&clean), &more)?;
    hearth.add("dirty", path(&dirty), &["--mode", "write-back"])?;
    let mut client = hearth.connect("clean")?;
    client.sweep(Command::Cache, 0..SIZE, 1 << 18, 8, |_, _| {})?;
    wait::until("all is cached", LIMIT, || {
        (hearth.stats("clean").ok()?["cached"].as_u64()? == SIZE).then_some(())
    })?;
    let mut writer = hearth.connect("dirty")?;
    writer.write(MIB, &[0xAB; 65536])?;
    writer.flush()?;
    ensure!(state(&hearth)? == "serving");

    flash.server().signal(libc::SIGSTOP)?;
    // Those that are in flight at that moment, of several kinds, and those that come after.
    for n in 0..8 {
        client.send(Command::Read, n * MIB, 65536, &[])?;
    }
    let new = [0x5A; 65536];
    client.send(Command::Write { fua: false }, 9 * MIB, 65536, &new)?;
    model[9 << 20..][..65536].copy_from_slice(&new);
    let mut read = 0;
    for _ in 0..9 {
        let reply = client.receive();
        let reply = reply.with_context(|| hearth.log())?;
        ensure!(reply.error == 0, "a request of a clean disk failed");
        read += usize::from(!reply.data.is_empty());
    }
    ensure!(read == 8);
    wait::until("flash is given up", LIMIT, || {
        client.write(10 * MIB, &new).ok()?;
        (state(&hearth).ok()? != "serving").then_some(())
    })?;
    model[10 << 20..][..65536].copy_from_slice(&new);
    client.flush().context("a flush of the clean disk")?;
    for n in 0..16 {
        let data = client.read(n * MIB, 65536);
        let data = data.context("a read of the clean disk")?;
        ensure!(
            data == model[(n << 20) as usize..][..65536],
            "block {n} MiB"
        );
    }
    ensure!(writer.read(MIB, 65536).is_err(), "it is only on flash");
    let wrote = writer.write(2 * MIB, &new);
    wrote.context("a write beside what is dirty")?;

    // It answers again: nothing that was dirty is lost.
    flash.server().signal(libc::SIGCONT)?;
    let back = wait::until("what is dirty can be read again", LIMIT, || {
        writer.read(MIB, 65536).ok()
    })?;
    ensure!(back == [0xAB; 65536]);
    wait::until("it can be flushed again", LIMIT, || writer.flush().ok())?;
    hearth.ok(&["disk", "flush", "dirty"])?;
    let origin = std::fs::read(&dirty)?;
    ensure!(origin[1 << 20..][..65536] == [0xAB; 65536]);
    ensure!(origin[2 << 20..][..65536] == new);
    ensure!(std::fs::read(&clean)? == model);
    drop((client, writer));
    // The pool knows that it was given up: what is old on it is not believed.
    hearth.stop()?;
    hearth.start()?;
    let data = hearth.connect("clean")?.read(9 * MIB, 65536)?;
    ensure!(data == new, "what flash had was believed");
    hearth.stop()?;
    Ok(())
}
