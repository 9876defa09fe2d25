//! Disks that live on flash: what is promised, what outlives a stop and a crash, and how they go. And those of which all is
//! on flash besides.

mod meanwhile;

use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::process::{Command as Program, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use hearth_rig::Hearth;
use hearth_rig::daemon::{binary, path, write_random};
use hearth_rig::nbd::{Client, Command};
use hearth_rig::wait::until;
use serde_json::Value;

/// Far longer than anything here takes.
const LIMIT: Duration = Duration::from_secs(120);

const MIB: usize = 1 << 20;

fn bytes(of: u8) -> Vec<u8> {
    vec![of; MIB]
}

#[test]
fn what_it_holds_outlives_stops_and_crashes_and_can_be_rescued() -> Result<()> {
    let mut hearth = Hearth::serving("128M")?;
    let said = hearth.said(&["disk", "add", "d", "--flash-only", "16M"])?;
    ensure!(
        said.contains("if the flash device dies, it is lost"),
        "{said}"
    );
    let mut client = hearth.connect("d")?;
    ensure!(client.size == 16 << 20);
    ensure!(client.read(0, 4096)? == vec![0; 4096], "never written");
    client.write(0, &bytes(1))?;
    client.write(8 << 20, &bytes(2))?;
    // A discard leaves nothing that is dirty: it is durable all the same once the flush is answered.
    client.write(4 << 20, &bytes(3))?;
    client.flush()?;
    client.call(Command::Trim, 4 << 20, MIB as u32, &[])?;
    client.flush()?;
    hearth.kill9()?;
    hearth.start()?;
    let holds = |hearth: &Hearth| -> Result<()> {
        let mut client = hearth.connect("d")?;
        ensure!(client.read(0, MIB as u32)? == bytes(1));
        ensure!(client.read(8 << 20, MIB as u32)? == bytes(2));
        ensure!(client.read(4 << 20, MIB as u32)? == bytes(0), "discarded");
        Ok(())
    };
    holds(&hearth)?;
    hearth.stop()?;
    hearth.start()?;
    holds(&hearth)?;

    // Nothing that is about an origin can be done with it, and what is only here goes only if that is said.
    let refused = hearth.refused(&["disk", "flush", "d"])?;
    ensure!(refused.contains("lives on flash"), "{refused}");
    let refused = hearth.refused(&["disk", "set", "d", "--mode", "off"])?;
    ensure!(refused.contains("lives on flash"), "{refused}");
    let refused = hearth.refused(&["disk", "remove", "d"])?;
    ensure!(refused.contains("nowhere else"), "{refused}");

    hearth.ok(&["disk", "set", "d", "--size", "20M"])?;
    ensure!(hearth.connect("d")?.size == 20 << 20);
    hearth.refused(&["disk", "set", "d", "--size", "8M"])?;
    let more = hearth.refused(&["disk", "set", "d", "--size", "120M"])?;
    ensure!(more.contains("cannot be promised"), "{more}");
    hearth.stop()?;
    let file = hearth.dir().join("rescued.img");
    let flash = path(hearth.flash()).to_owned();
    let state = hearth.dir().join("state");
    hearth.ok(&[
        "rescue",
        &flash,
        "--disk",
        "d",
        "--to",
        path(&file),
        "--state-dir",
        path(&state),
    ])?;
    let rescued = std::fs::read(&file)?;
    ensure!(rescued.len() == 20 << 20, "{} bytes", rescued.len());
    ensure!(rescued[..MIB] == bytes(1) && rescued[8 << 20..9 << 20] == bytes(2));

    hearth.start()?;
    holds(&hearth)?;
    hearth.ok(&["disk", "remove", "d", "--discard-dirty", "--yes"])?;
    // The number comes again, and nothing of the old disk with it.
    hearth.ok(&["disk", "add", "e", "--flash-only", "16M"])?;
    ensure!(hearth.connect("e")?.read(0, MIB as u32)? == bytes(0));
    Ok(())
}

#[test]
fn what_cannot_be_promised_is_refused_with_figures() -> Result<()> {
    let hearth = Hearth::serving("128M")?;
    let refused = hearth.refused(&["disk", "add", "big", "--flash-only", "100M"])?;
    ensure!(
        refused.contains("100 MiB of flash cannot be promised"),
        "{refused}"
    );
    hearth.ok(&["disk", "add", "a", "--flash-only", "32M"])?;
    let refused = hearth.refused(&["disk", "add", "b", "--flash-only", "32M"])?;
    ensure!(refused.contains("32 MiB are"), "{refused}");
    let shown = hearth.ok(&["pool", "show"])?;
    ensure!(shown.contains("32 MiB of "), "{shown}");
    hearth.refused(&["disk", "add", "odd", "--flash-only", "1000"])?;
    hearth.refused(&["disk", "add", "kept", "--flash-only", "1M", "--max", "1M"])?;
    Ok(())
}

/// Of two copies there is room for half as much as of what is clean, and with one of the devices gone for no less.
#[test]
fn what_is_promised_on_two_devices_is_served_from_one() -> Result<()> {
    let mut hearth = Hearth::bare()?;
    let second = hearth.dir().join("second.img");
    let (a, b) = (path(hearth.flash()).to_owned(), path(&second).to_owned());
    let create = ["pool", "create", "--dirty-copies", "2", "--flash"];
    hearth.ok(&[&create[..], &[&a, "--flash", &b, "--size", "64M"]].concat())?;
    hearth.serve_args = ["--flash", &b, "--endurance", "1000dwpd"]
        .map(String::from)
        .to_vec();
    hearth.start()?;
    // As many writes of a device, and not of both: each gets all that is dirty.
    let stats: Value = serde_json::from_str(&hearth.ok(&["stats", "--json"])?)?;
    let rate = stats["pool"]["endurance"]["bytes_per_s"].as_u64();
    let most = (64 << 20) * 1000 / (24 * 60 * 60);
    ensure!(
        rate.is_some_and(|rate| rate > most / 2 && rate <= most),
        "{rate:?}"
    );
    let refused = hearth.refused(&["disk", "add", "big", "--flash-only", "40M"])?;
    ensure!(refused.contains("40 MiB of flash cannot be"), "{refused}");
    hearth.ok(&["disk", "add", "d", "--flash-only", "24M"])?;
    // Nor is more kept for a disk than there is if all of it is dirty.
    let origin = hearth.dir().join("o.img");
    std::fs::write(&origin, vec![0; 4096])?;
    let min = [
        "disk",
        "add",
        "kept",
        "--origin",
        path(&origin),
        "--min",
        "50M",
    ];
    let refused = hearth.refused(&min)?;
    ensure!(refused.contains("50 MiB cannot be kept"), "{refused}");
    let mut client = hearth.connect("d")?;
    for at in 0..24 {
        client.write((at * MIB) as u64, &bytes(at as u8 + 1))?;
    }
    client.flush()?;
    drop(client);
    hearth.stop()?;
    std::fs::remove_file(&second)?;
    hearth.start()?;
    let mut client = hearth.connect("d")?;
    for at in 0..24 {
        let read = client.read((at * MIB) as u64, MIB as u32)?;
        ensure!(read == bytes(at as u8 + 1), "{at}");
    }
    Ok(())
}

#[test]
fn scratch_disk_fails_reads_after_crash_until_reset() -> Result<()> {
    let mut hearth = Hearth::serving("128M")?;
    hearth.ok(&["disk", "add", "s", "--flash-only", "16M", "--scratch"])?;
    let lost = |client: &mut Client, at: u64| -> Result<()> {
        let error = client
            .read(at, MIB as u32)
            .err()
            .context("it was made up")?;
        ensure!(error.raw_os_error() == Some(libc::EIO), "{error}");
        Ok(())
    };
    let mut client = hearth.connect("s")?;
    client.write(0, &bytes(7))?;
    client.flush()?;
    drop(client);
    hearth.stop()?;
    hearth.start()?;
    let mut client = hearth.connect("s")?;
    ensure!(client.read(0, MIB as u32)? == bytes(7), "after a stop");
    ensure!(
        client.read(4 << 20, MIB as u32)? == bytes(0),
        "never written"
    );
    client.write(2 << 20, &bytes(8))?;
    client.flush()?;
    hearth.kill9()?;
    hearth.start()?;
    let mut client = hearth.connect("s")?;
    [0, 2 << 20, 4 << 20]
        .into_iter()
        .try_for_each(|at| lost(&mut client, at))?;
    let shown = hearth.said(&["disk", "show", "s"])?;
    ensure!(shown.contains("hearth disk reset"), "{shown}");
    // What is written again is there, and the rest still is not, also after a stop.
    client.write(0, &bytes(9))?;
    ensure!(client.read(0, MIB as u32)? == bytes(9));
    lost(&mut client, 2 << 20)?;
    drop(client);
    hearth.stop()?;
    hearth.start()?;
    let mut client = hearth.connect("s")?;
    ensure!(client.read(0, MIB as u32)? == bytes(9), "after a stop");
    lost(&mut client, 2 << 20)?;
    // Its guest would lose what it has written.
    let used = hearth.refused(&["disk", "reset", "s"])?;
    ensure!(used.contains("in use"), "{used}");
    drop(client);
    let said = hearth.said(&["disk", "reset", "s"])?;
    ensure!(!said.contains("cannot be read"), "{said}");
    for _ in 0..2 {
        let mut client = hearth.connect("s")?;
        for at in [0, 2 << 20, 4 << 20] {
            ensure!(client.read(at, MIB as u32)? == bytes(0), "it was reset");
        }
        drop(client);
        hearth.stop()?;
        hearth.start()?;
    }
    hearth.ok(&["disk", "add", "f", "--flash-only", "4M"])?;
    let kept = hearth.refused(&["disk", "reset", "f"])?;
    ensure!(kept.contains("not a scratch disk"), "{kept}");
    Ok(())
}

fn shown(hearth: &Hearth, name: &str) -> Result<Value> {
    let text = hearth.ok(&["disk", "show", name, "--json"])?;
    Ok(serde_json::from_str(&text)?)
}

/// Waits until all of a pinned disk is on flash.
fn filled(hearth: &Hearth, name: &str, least: u64) -> Result<Value> {
    until("all of the disk is on flash", LIMIT, || {
        let now = shown(hearth, name).ok()?;
        let there = now["pinned"]["state"] == "filled" && now["cached"].as_u64() >= Some(least);
        there.then_some(now)
    })
}

#[test]
fn all_of_a_pinned_disk_is_on_flash_after_kills_and_floods_and_when_it_grows() -> Result<()> {
    const SIZE: u64 = 48 << 20;
    let mut hearth = Hearth::serving("256M")?;
    let file = hearth.dir().join("p.raw");
    write_random(&file, SIZE, 7)?;
    hearth.add("p", path(&file), &[])?;
    hearth.ok(&["disk", "set", "p", "--pin"])?;
    until("something of it was read in", LIMIT, || {
        let now = shown(&hearth, "p").ok()?;
        (now["cached"].as_u64() > Some(0)).then_some(())
    })?;
    // In the midst of it, or just after.
    hearth.kill9()?;
    hearth.start()?;
    let now = filled(&hearth, "p", SIZE)?;
    ensure!(
        now["pin"] == true && now["pinned"]["bytes_left"] == 0,
        "{now}"
    );
    let told = hearth.ok(&["disk", "show", "p"])?;
    ensure!(told.contains("all of it is on flash"), "{told}");
    let content = std::fs::read(&file)?;
    let holds = |hearth: &Hearth, content: &[u8]| -> Result<()> {
        let mut client = hearth.connect("p")?;
        for (n, piece) in content.chunks(MIB).enumerate() {
            let at = (n * MIB) as u64;
            ensure!(client.read(at, piece.len() as u32)? == piece, "at {at}");
        }
        Ok(())
    };
    holds(&hearth, &content)?;
    ensure!(
        hearth.counter("p", "read_misses")? == 0,
        "nobody waited for the origin"
    );

    // More than fits beside it passes by, twice; where the log had to take something, it comes back.
    let other = hearth.origin("q", 320 << 20)?;
    hearth.add("q", path(&other), &["--seq-cutoff", "0"])?;
    let mut client = hearth.connect("q")?;
    for at in (0..320u64 << 20).step_by(MIB) {
        client.read(at, MIB as u32)?;
    }
    drop(client);
    filled(&hearth, "p", SIZE)?;
    holds(&hearth, &content)?;

    // It grows with its origin, unless not so much can be kept.
    let content = [content, bytes(9).repeat(8)].concat();
    let grown = std::fs::File::options().append(true).open(&file)?;
    (&grown).write_all(&content[SIZE as usize..])?;
    grown.set_len(1 << 30)?;
    let said = hearth.refused(&["disk", "set", "p", "--size-from-origin"])?;
    ensure!(said.contains("1 GiB cannot be kept for p"), "{said}");
    grown.set_len(SIZE + (8 << 20))?;
    hearth.ok(&["disk", "set", "p", "--size-from-origin"])?;
    filled(&hearth, "p", SIZE + (8 << 20))?;
    holds(&hearth, &content)?;

    // What cannot be kept is refused with figures, and what makes no sense with the reason.
    let said = hearth.refused(&["disk", "set", "q", "--pin"])?;
    ensure!(said.contains("320 MiB cannot be kept for q"), "{said}");
    ensure!(said.contains("56 MiB are kept for other disks"), "{said}");
    let said = hearth.refused(&["disk", "set", "p", "--max", "8M"])?;
    ensure!(said.contains("it has a limit"), "{said}");
    let said = hearth.refused(&["disk", "set", "p", "--mode", "off"])?;
    ensure!(said.contains("--no-pin"), "{said}");
    hearth.ok(&["disk", "add", "f", "--flash-only", "8M"])?;
    let said = hearth.refused(&["disk", "set", "f", "--pin"])?;
    ensure!(said.contains("being pinned"), "{said}");

    // Given back, also over a restart.
    hearth.ok(&["disk", "set", "p", "--no-pin"])?;
    ensure!(shown(&hearth, "p")?["pinned"].is_null());
    hearth.stop()?;
    hearth.start()?;
    let now = shown(&hearth, "p")?;
    ensure!(now["pin"] == false && now["pinned"].is_null(), "{now}");
    Ok(())
}

/// Bytes of disks that move: some are written, some of those discarded, and the rest never written.
const MOVED: u64 = 24 << 20;

fn content_of(round: u8) -> Vec<u8> {
    let mut all = vec![0; MOVED as usize];
    for n in (0..20).filter(|n| n % 4 != 3) {
        all[n * MIB..][..MIB].fill(round.wrapping_mul(20).wrapping_add(n as u8 + 1));
    }
    all[5 * MIB..][..MIB].fill(0);
    all
}

/// A disk on flash that holds that, durably.
fn holding(hearth: &Hearth, name: &str, round: u8) -> Result<Vec<u8>> {
    hearth.ok(&["disk", "add", name, "--flash-only", "24M"])?;
    let content = content_of(round);
    let mut client = hearth.connect(name)?;
    for n in (0..20).filter(|n| n % 4 != 3) {
        client.write((n * MIB) as u64, &bytes(content[n * MIB].max(1)))?;
    }
    client.call(Command::Trim, 5 << 20, MIB as u32, &[])?;
    client.flush()?;
    Ok(content)
}

fn holds(hearth: &Hearth, name: &str, content: &[u8]) -> Result<()> {
    let mut client = hearth.connect(name)?;
    for (n, piece) in content.chunks(MIB).enumerate() {
        let got = client.read((n * MIB) as u64, MIB as u32)?;
        ensure!(got == piece, "{name}: MiB {n} is not what was flushed");
    }
    Ok(())
}

/// Waits until its origin has everything, and looks at it.
fn moved(hearth: &Hearth, name: &str, file: &std::path::Path, content: &[u8]) -> Result<()> {
    hearth.ok(&["disk", "flush", name])?;
    until("its flash is everybody's again", LIMIT, || {
        let now = shown(hearth, name).ok()?;
        (now["home"] == "origin").then_some(())
    })?;
    ensure!(
        std::fs::read(file)? == content,
        "the origin alone is the disk"
    );
    Ok(())
}

#[test]
fn a_disk_on_flash_is_given_an_origin_while_it_is_used() -> Result<()> {
    let mut hearth = Hearth::serving("128M")?;
    let mut content = holding(&hearth, "d", 0)?;
    let file = hearth.dir().join("d.raw");
    let mut client = hearth.connect("d")?;

    // What will not do is refused, and leaves it as it is.
    let taken = hearth.dir().join("taken.raw");
    std::fs::write(&taken, bytes(1).repeat(24))?;
    let small = hearth.dir().join("small.raw");
    std::fs::write(&small, bytes(0))?;
    hearth.ok(&["disk", "add", "s", "--flash-only", "4M", "--scratch"])?;
    hearth.origin("o", 1 << 20)?;
    for (name, origin, why) in [
        ("d", path(&taken), "holds something"),
        ("d", path(&small), "and the disk 25165824"),
        ("d", "/dev/null", "a file that does not exist"),
        ("d", "qcow2:/x.qcow2", "a file that does not exist"),
        ("d", "/no/such/directory/d.raw", "/no/such/directory"),
        ("s", path(&file), "scratch"),
        ("nobody", path(&file), "nobody"),
    ] {
        let said = hearth.refused(&["disk", "move", name, "--origin", origin])?;
        ensure!(said.contains(why), "{origin}: {said}");
        ensure!(!file.exists(), "{origin}: nothing is left");
    }
    ensure!(shown(&hearth, "d")?["home"] == "flash");

    // The client that is connected goes on.
    let said = hearth.said(&["disk", "move", "d", "--origin", path(&file)])?;
    ensure!(said.contains("in the background"), "{said}");
    client.write(21 << 20, &bytes(99))?;
    client.call(Command::Trim, 0, MIB as u32, &[])?;
    client.flush()?;
    content[21 * MIB..22 * MIB].fill(99);
    content[..MIB].fill(0);
    ensure!(client.read(21 << 20, MIB as u32)? == bytes(99));
    ensure!(client.read(5 << 20, MIB as u32)? == bytes(0));
    let said = hearth.refused(&["disk", "move", "d", "--origin", path(&file)])?;
    ensure!(said.contains("has an origin"), "{said}");
    hearth.kill9()?;
    hearth.start()?;
    holds(&hearth, "d", &content)?;
    moved(&hearth, "d", &file, &content)?;
    let promised = |hearth: &Hearth| -> Result<Value> {
        let text = hearth.ok(&["pool", "show", "--json"])?;
        Ok(serde_json::from_str::<Value>(&text)?["promised"].clone())
    };
    ensure!(promised(&hearth)? == 4 << 20, "{}", promised(&hearth)?);
    hearth.stop()?;
    hearth.start()?;
    holds(&hearth, "d", &content)?;
    // It is a disk like others.
    hearth.ok(&["disk", "set", "d", "--mode", "write-through"])?;
    hearth.ok(&["disk", "remove", "d", "--yes"])?;
    ensure!(std::fs::read(&file)? == content);
    Ok(())
}

#[test]
fn a_kill_in_the_midst_of_a_move_leaves_the_old_disk_or_the_new_one() -> Result<()> {
    let mut hearth = Hearth::serving("128M")?;
    for round in 0..4u8 {
        let name = format!("d{round}");
        let content = holding(&hearth, &name, round)?;
        let file = hearth.dir().join(format!("{name}.raw"));
        // Slow to take it, so that it is killed while much is dirty.
        let origin = format!("model-hdd:{}", path(&file));
        let mut order = Program::new(binary()?)
            .arg("--run-dir")
            .arg(hearth.run_dir())
            .args(["disk", "move", &name, "--origin", &origin])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let reached = |hearth: &Hearth| match round {
            // Between the file and the registry, most likely.
            0 => Some(file.exists()),
            // Just after the registry.
            1 | 2 => Some(shown(hearth, &name).ok()?["home"] != "flash"),
            // Some of it was written.
            _ => Some(std::fs::metadata(&file).ok()?.blocks() > 0),
        };
        until("the move has come so far", LIMIT, || {
            reached(&hearth).filter(|so| *so)
        })?;
        hearth.kill9()?;
        // It was answered, or not.
        order.wait()?;
        hearth.start()?;
        holds(&hearth, &name, &content)?;
        if shown(&hearth, &name)?["home"] == "flash" {
            hearth.ok(&["disk", "move", &name, "--origin", &origin])?;
            holds(&hearth, &name, &content)?;
        }
        moved(&hearth, &name, &file, &content)?;
        hearth.ok(&["disk", "remove", &name, "--yes"])?;
    }
    Ok(())
}

/// A file of which a part is data, and the rest a hole; and what is in it.
fn partly_written(hearth: &Hearth, name: &str, round: u8) -> Result<(std::path::PathBuf, Vec<u8>)> {
    let file = hearth.dir().join(name);
    let content = content_of(round);
    let written = std::fs::File::create(&file)?;
    written.set_len(MOVED)?;
    for n in (0..20).filter(|n| n % 4 != 3) {
        let at = n * MIB;
        std::os::unix::fs::FileExt::write_all_at(&written, &content[at..][..MIB], at as u64)?;
    }
    Ok((file, content))
}

/// Waits until a disk lives on flash.
fn lives_on_flash(hearth: &Hearth, name: &str) -> Result<Value> {
    until("it lives on flash", LIMIT, || {
        let now = shown(hearth, name).ok()?;
        (now["home"] == "flash").then_some(now)
    })
}

#[test]
fn a_disk_with_an_origin_comes_to_live_on_flash_while_it_is_used() -> Result<()> {
    let mut hearth = Hearth::serving("128M")?;
    let (file, mut content) = partly_written(&hearth, "d.raw", 3)?;
    hearth.add("d", path(&file), &["--pin"])?;
    let other = hearth.origin("other", 80 << 20)?;
    hearth.add("large", path(&other), &[])?;
    let odd = hearth.origin("odd", (1 << 20) + 512)?;
    hearth.add("odd", path(&odd), &[])?;
    hearth.add(
        "through",
        path(&hearth.origin("t", 1 << 20)?),
        &["--mode", "write-through"],
    )?;
    hearth.add(
        "less",
        path(&hearth.origin("l", 4 << 20)?),
        &["--max", "1M"],
    )?;
    hearth.ok(&["disk", "add", "f", "--flash-only", "4M"])?;

    // What cannot be is refused, and stays as it is.
    for (name, why) in [
        ("large", "cannot be promised"),
        ("odd", "multiples of 4K"),
        ("through", "--mode write-back"),
        ("less", "--max 0"),
        ("f", "lives on flash already"),
        ("nobody", "nobody"),
    ] {
        let said = hearth.refused(&["disk", "move", name, "--flash-only"])?;
        ensure!(said.contains(why), "{name}: {said}");
    }
    ensure!(shown(&hearth, "large")?["home"] == "origin");
    let both = hearth.refused(&["disk", "move", "d", "--flash-only", "--origin", "/x"])?;
    ensure!(both.contains("--flash-only"), "{both}");

    // Some of it is dirty, some was discarded, and the client that is connected goes on.
    let mut client = hearth.connect("d")?;
    client.write(2 << 20, &bytes(77))?;
    content[2 * MIB..3 * MIB].fill(77);
    client.call(Command::Trim, 8 << 20, MIB as u32, &[])?;
    content[8 * MIB..9 * MIB].fill(0);
    let said = hearth.said(&["disk", "move", "d", "--flash-only"])?;
    ensure!(said.contains("in the background"), "{said}");
    for round in 0..8u8 {
        let n = 9 + usize::from(round);
        client.write((n * MIB) as u64, &bytes(100 + round))?;
        content[n * MIB..][..MIB].fill(100 + round);
    }
    client.call(Command::Trim, 0, MIB as u32, &[])?;
    content[..MIB].fill(0);
    client.flush()?;
    let now = lives_on_flash(&hearth, "d")?;
    ensure!(now["pin"] == false && now["onto_flash"].is_null(), "{now}");
    ensure!(
        now["origin"]
            .as_str()
            .is_some_and(|o| o.starts_with("flash:")),
        "{now}"
    );
    client.write(23 << 20, &bytes(55))?;
    content[23 * MIB..].fill(55);
    client.flush()?;
    ensure!(client.read(23 << 20, MIB as u32)? == bytes(55));

    // Its origin is nobody's any more: nothing is read there, and nothing written.
    drop(client);
    std::fs::write(&file, bytes(13).repeat(24))?;
    holds(&hearth, "d", &content)?;
    hearth.kill9()?;
    hearth.start()?;
    holds(&hearth, "d", &content)?;
    ensure!(shown(&hearth, "d")?["home"] == "flash");
    hearth.stop()?;
    hearth.start()?;
    holds(&hearth, "d", &content)?;
    ensure!(std::fs::read(&file)? == bytes(13).repeat(24));

    // And back.
    let new = hearth.dir().join("new.raw");
    hearth.ok(&["disk", "move", "d", "--origin", path(&new)])?;
    moved(&hearth, "d", &new, &content)
}

#[test]
fn a_move_onto_flash_that_is_called_off_or_killed_leaves_the_disk_on_its_origin() -> Result<()> {
    let mut hearth = Hearth::serving("128M")?;
    for round in 0..4u8 {
        let name = format!("d{round}");
        let (file, mut content) = partly_written(&hearth, &format!("{name}.raw"), round)?;
        // It takes long to be read, so that something comes between.
        hearth.add(&name, &format!("model-hdd:{}", path(&file)), &[])?;
        let mut client = hearth.connect(&name)?;
        client.write(2 << 20, &bytes(200 + round))?;
        content[2 * MIB..3 * MIB].fill(200 + round);
        client.flush()?;
        drop(client);
        hearth.ok(&["disk", "move", &name, "--flash-only"])?;
        match round {
            0 => {
                let said = hearth.refused(&["disk", "move", &name, "--flash-only"]);
                // Unless it was over already.
                if let Ok(said) = said {
                    ensure!(said.contains("flash"), "{said}");
                }
                hearth.ok(&["disk", "flush", &name])?;
            }
            1 => {
                hearth.kill9()?;
                hearth.start()?;
            }
            2 => {
                let begun = |hearth: &Hearth| -> Option<()> {
                    let now = shown(hearth, &name).ok()?;
                    let some = now["cached"].as_u64()? > 4 << 20;
                    (some || now["home"] == "flash").then_some(())
                };
                until("some of it is on flash", LIMIT, || begun(&hearth))?;
                hearth.kill9()?;
                hearth.start()?;
            }
            _ => {
                hearth.stop()?;
                hearth.start()?;
            }
        }
        holds(&hearth, &name, &content)?;
        match shown(&hearth, &name)?["home"] == "flash" {
            true => println!("round {round}: it was over before"),
            false => moved(&hearth, &name, &file, &content)?,
        }
        hearth.ok(&["disk", "remove", &name, "--discard-dirty", "--yes"])?;
    }
    Ok(())
}
