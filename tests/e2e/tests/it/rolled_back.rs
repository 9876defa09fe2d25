//! Origins that changed while Hearth was stopped and have no times that would show it.

mod attacked;
mod devices;

use anyhow::{Context, Result, ensure};
use hearth_rig::daemon::{path, write_random};
use hearth_rig::servers::Server;
use hearth_rig::{Hearth, wait};
use serde_json::Value;
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest wait for a state that comes by itself.
const LIMIT: Duration = Duration::from_secs(120);
const MIB: u64 = 1 << 20;
const SIZE: u64 = 32 * MIB;
/// What is read often: 3,584 blocks between the marks at both ends.
const HOT: std::ops::Range<u64> = MIB..15 * MIB;

/// A daemon with a disk on an NBD server, its server and the server's file.
struct Setup {
    hearth: Hearth,
    server: Server,
    file: PathBuf,
}

fn setup(more: &[&str]) -> Result<Setup> {
    let hearth = Hearth::serving("256M")?;
    let file = hearth.dir().join("o.raw");
    write_random(&file, SIZE, 1)?;
    let server = Server::qemu_nbd(&file, "x", hearth.dir().join("nbd.sock"))?;
    add(&hearth, "d", "nbd.sock", more)?;
    Ok(Setup {
        hearth,
        server,
        file,
    })
}

fn add(hearth: &Hearth, name: &str, socket: &str, more: &[&str]) -> Result<()> {
    let origin = format!("nbd+unix:///x?socket={}", path(&hearth.dir().join(socket)));
    let more = [&["--sole-user", "--seq-cutoff", "0"], more].concat();
    hearth.add(name, &origin, &more).map(drop)
}

fn show(hearth: &Hearth, name: &str) -> Result<Value> {
    Ok(serde_json::from_str(
        &hearth.ok(&["disk", "show", name, "--json"])?,
    )?)
}

fn read_hot(hearth: &Hearth) -> Result<Vec<u8>> {
    let mut client = hearth.connect("d")?;
    let mut all = Vec::new();
    for at in HOT.step_by(MIB as usize) {
        all.extend(client.read(at, MIB as u32)?);
    }
    Ok(all)
}

/// Reads the hot blocks until all of them come from flash.
fn warm_up(hearth: &Hearth) -> Result<()> {
    wait::until("the hot blocks are cached", LIMIT, || {
        let before = hearth.counter("d", "read_miss_bytes").ok()?;
        read_hot(hearth).ok()?;
        (hearth.counter("d", "read_miss_bytes").ok()? == before).then_some(())
    })
}

/// Most hot blocks are still on flash (the others were in RAM), and they answer reads: a block that is cached and does not
/// count would be a miss each time.
fn is_still_cached(hearth: &Hearth) -> Result<()> {
    let cached = hearth.stats("d")?["cached"].as_u64();
    ensure!(cached >= Some((HOT.end - HOT.start) / 2), "{cached:?}");
    warm_up(hearth)
}

/// Waits until the cached blocks were compared; what is shown of the disk then.
fn until_checked(hearth: &Hearth) -> Result<Value> {
    wait::until("cached blocks were compared", LIMIT, || {
        let info = show(hearth, "d").ok()?;
        (info["state"] == "attached" && info["check"].is_null()).then_some(info)
    })
    .with_context(|| hearth.log())
}

/// Waits until the disk is refused; what is shown of it then.
fn until_refused(hearth: &Hearth) -> Result<Value> {
    wait::until("the disk is refused", LIMIT, || {
        let info = show(hearth, "d").ok()?;
        (info["state"] == "refused").then_some(info)
    })
    .with_context(|| hearth.log())
}

fn hot_of(file: &Path) -> Result<Vec<u8>> {
    let mut hot = vec![0; (HOT.end - HOT.start) as usize];
    OpenOptions::new()
        .read(true)
        .open(file)?
        .read_exact_at(&mut hot, HOT.start)?;
    Ok(hot)
}

fn write(file: &Path, offset: u64, data: &[u8]) -> Result<()> {
    let file = OpenOptions::new().write(true).open(file)?;
    Ok(file.write_all_at(data, offset)?)
}

/// Five blocks are rolled back while the daemon is stopped in order. No read returns what they were, neither at once nor
/// later.
#[test]
fn rolled_back_nbd_origin_is_noticed() -> Result<()> {
    let mut s = setup(&[])?;
    warm_up(&s.hearth)?;
    let before = hot_of(&s.file)?;
    let places = [2, 5, 8, 11, 14].map(|n| n * MIB + 64 * 4096);
    let mut client = s.hearth.connect("d")?;
    for at in places {
        client.write(at, &[0xEE; 4096])?;
    }
    client.flush()?;
    drop(client);
    s.hearth.ok(&["disk", "flush", "d"])?;
    // Ordinary work of a guest: reads, some of them of other blocks.
    warm_up(&s.hearth)?;
    s.hearth.connect("d")?.read(20 * MIB, 4 * MIB as u32)?;
    s.hearth.stop()?;
    s.server.kill9()?;
    for at in places {
        let old = (at - HOT.start) as usize;
        write(&s.file, at, &before[old..old + 4096])?;
    }
    s.server.up()?;
    s.hearth.start()?;
    ensure!(read_hot(&s.hearth)? == before, "a stale block was served");
    let info = until_checked(&s.hearth)?;
    ensure!(
        info["notices"].to_string().contains("origin changed"),
        "{info}"
    );
    ensure!(read_hot(&s.hearth)? == before, "a stale block was served");
    // Nor does a crash bring them back.
    s.hearth.kill9()?;
    s.hearth.start()?;
    until_checked(&s.hearth)?;
    ensure!(read_hot(&s.hearth)? == before, "a stale block came back");
    Ok(())
}

/// An origin that did not change is in full use after the comparison, and its dirty blocks are written back.
#[test]
fn unchanged_nbd_origin_is_warm_after_check() -> Result<()> {
    let mut s = setup(&[])?;
    warm_up(&s.hearth)?;
    s.hearth.connect("d")?.write(HOT.start, &[7; 65536])?;
    s.hearth.connect("d")?.flush()?;
    s.hearth.kill9()?;
    s.hearth.start()?;
    let info = until_checked(&s.hearth)?;
    ensure!(info["notices"].is_null(), "{info}");
    is_still_cached(&s.hearth)?;
    let hot = read_hot(&s.hearth)?;
    ensure!(hot[..65536] == [7; 65536]);
    s.hearth.ok(&["disk", "flush", "d"])?;
    ensure!(hot_of(&s.file)? == hot);
    Ok(())
}

/// Two servers swap their files while only dirty blocks are cached: nothing is written to the wrong one.
#[test]
fn dirty_blocks_are_not_written_to_another_disk() -> Result<()> {
    let mut s = setup(&[])?;
    let other = s.hearth.dir().join("other.raw");
    // A clone: it differs in the middle only.
    std::fs::copy(&s.file, &other)?;
    write(&other, 20 * MIB, &vec![0x11; 4 * MIB as usize])?;
    let before = std::fs::read(&other)?;
    let mut client = s.hearth.connect("d")?;
    client.write(10 * MIB, &[0xEE; 65536])?;
    client.flush()?;
    drop(client);
    s.hearth.kill9()?;
    s.server.kill9()?;
    let away = s.hearth.dir().join("away.raw");
    std::fs::rename(&s.file, &away)?;
    std::fs::rename(&other, &s.file)?;
    s.server.up()?;
    s.hearth.start()?;
    let info = until_refused(&s.hearth)?;
    ensure!(info["dirty"] == 65536, "{info}");
    s.hearth.refused(&["disk", "flush", "d"])?;
    s.hearth.stop()?;
    ensure!(
        std::fs::read(&s.file)? == before,
        "the wrong disk was written"
    );
    Ok(())
}

/// One of many cached blocks differs, and something is dirty: the disk is served at first, and taken out of service when
/// the comparison finds the difference. It is not shown as another host's, and its owner can decide.
#[test]
fn misfit_found_in_service_is_a_question() -> Result<()> {
    let mut s = setup(&[])?;
    warm_up(&s.hearth)?;
    let mut client = s.hearth.connect("d")?;
    client.write(20 * MIB, &[0xEE; 65536])?;
    client.flush()?;
    drop(client);
    s.hearth.kill9()?;
    s.server.kill9()?;
    // Between two blocks that a first look reads.
    let changed = HOT.start + 1000 * 4096;
    write(&s.file, changed, &[0x33; 4096])?;
    let before = std::fs::read(&s.file)?;
    s.server.up()?;
    for is_last in [false, true] {
        s.hearth.start()?;
        let info = until_refused(&s.hearth)?;
        let why = info["reason"].to_string();
        ensure!(why.contains("does not fit the cache"), "{info}");
        ensure!(info["dirty"] == 65536 && info["check"].is_null(), "{info}");
        ensure!(
            !s.hearth.log().contains("another host"),
            "{}",
            s.hearth.log()
        );
        ensure!(
            std::fs::read(&s.file)? == before,
            "the origin was written before its owner decided"
        );
        if !is_last {
            // Nor does a crash answer the question.
            s.hearth.kill9()?;
            continue;
        }
        s.hearth
            .ok(&["disk", "set", "d", "--trust", "origin"])
            .context("decide")?;
        until_checked(&s.hearth)?;
        let hot = read_hot(&s.hearth)?;
        ensure!(hot == hot_of(&s.file)?, "a stale block was served");
        ensure!(
            s.hearth.connect("d")?.read(20 * MIB, 65536)? == before[(20 * MIB) as usize..][..65536]
        );
    }
    Ok(())
}

/// A disk that was refused is no disk that was served until now: an upgrade must not take it over without a look.
#[test]
fn refused_disk_stays_refused_over_upgrade() -> Result<()> {
    let mut s = setup(&[])?;
    // With the same name in the log: what was dirty at the stop waits on flash.
    let mut client = s.hearth.connect("d")?;
    client.write(10 * MIB, &[0xEE; 65536])?;
    client.flush()?;
    drop(client);
    s.server.kill9()?;
    s.hearth.stop()?;
    write_random(&s.file, SIZE, 2)?;
    let before = std::fs::read(&s.file)?;
    s.server.up()?;
    s.hearth.start()?;
    until_refused(&s.hearth)?;
    s.hearth.ok(&["upgrade", "--yes"])?;
    let info = until_refused(&s.hearth)?;
    ensure!(info["dirty"] == 65536, "{info}");
    s.hearth.stop()?;
    ensure!(std::fs::read(&s.file)? == before, "the origin was written");
    Ok(())
}

/// Copies files and directories with all that belongs to them.
fn copy(from: &Path, to: &Path) -> Result<()> {
    let copied = std::process::Command::new("cp")
        .arg("-a")
        .args([from, to])
        .status()?;
    ensure!(copied.success());
    Ok(())
}

/// Writes blocks all over the hot ones, to the origin as well.
fn write_hot(hearth: &Hearth, byte: u8, blocks: u64) -> Result<()> {
    let mut client = hearth.connect("d")?;
    for n in 0..blocks {
        client.write(HOT.start + n * 16 * 4096, &[byte; 4096])?;
    }
    client.flush()?;
    drop(client);
    hearth.ok(&["disk", "flush", "d"])?;
    Ok(())
}

/// Reads return the content of the origin, at once and after the comparison, which drops the cached blocks.
fn nothing_stale_is_served(hearth: &Hearth, file: &Path) -> Result<()> {
    ensure!(
        read_hot(hearth)? == hot_of(file)?,
        "a stale block was served"
    );
    let info = until_checked(hearth)?;
    let notices = info["notices"].to_string();
    ensure!(notices.contains("origin changed"), "{info}");
    ensure!(
        read_hot(hearth)? == hot_of(file)?,
        "a stale block was served"
    );
    Ok(())
}

/// Flash and state directory of an earlier moment, put back while the origin is newer.
#[test]
fn restored_flash_serves_no_older_blocks() -> Result<()> {
    let mut hearth = Hearth::serving("256M")?;
    let file = hearth.origin("o.img", SIZE)?;
    hearth.add("d", path(&file), &["--seq-cutoff", "0"])?;
    warm_up(&hearth)?;
    write_hot(&hearth, 1, 1)?;
    hearth.kill9()?;
    let state = hearth.dir().join("state");
    let kept = hearth.dir().join("kept");
    copy(&state, &kept)?;
    let kept_flash = hearth.dir().join("kept-flash");
    copy(hearth.flash(), &kept_flash)?;
    hearth.start()?;
    write_hot(&hearth, 2, 208)?;
    hearth.kill9()?;
    std::fs::remove_dir_all(&state)?;
    copy(&kept, &state)?;
    copy(&kept_flash, hearth.flash())?;
    hearth.start()?;
    nothing_stale_is_served(&hearth, &file)
}

/// A disk "d" is there. Its flash is put back to an earlier moment and its state directory is gone, after crashes and
/// after stops in order.
fn older_flash_without_state(mut hearth: Hearth, file: &Path) -> Result<()> {
    let kept = hearth.dir().join("kept-flash");
    for (round, in_order) in [(0, false), (2, true)] {
        let end = |hearth: &mut Hearth| match in_order {
            true => hearth.stop().map(drop),
            false => hearth.kill9(),
        };
        warm_up(&hearth)?;
        write_hot(&hearth, 10 + round, 1)?;
        end(&mut hearth)?;
        copy(hearth.flash(), &kept)?;
        hearth.start()?;
        write_hot(&hearth, 11 + round, 208)?;
        end(&mut hearth)?;
        std::fs::remove_dir_all(hearth.dir().join("state"))?;
        copy(&kept, hearth.flash())?;
        hearth.start()?;
        hearth.ok(&["pool", "import", "--accept"])?;
        wait::until("the disk is served", LIMIT, || {
            let state = show(&hearth, "d").ok()?["state"].clone();
            (state == "attached").then_some(())
        })?;
        nothing_stale_is_served(&hearth, file)?;
    }
    Ok(())
}

#[test]
fn older_flash_without_state_over_file() -> Result<()> {
    let hearth = Hearth::serving("256M")?;
    let file = hearth.origin("o.img", SIZE)?;
    hearth.add("d", path(&file), &["--seq-cutoff", "0"])?;
    older_flash_without_state(hearth, &file)
}

#[test]
fn older_flash_without_state_over_nbd() -> Result<()> {
    let Setup {
        hearth,
        server: _server,
        file,
    } = setup(&[])?;
    older_flash_without_state(hearth, &file)
}

/// What `--on-start` says holds from the next start on.
#[test]
fn on_start_drops_or_keeps_cached_blocks() -> Result<()> {
    let mut s = setup(&["--on-start", "drop"])?;
    warm_up(&s.hearth)?;
    s.hearth.stop()?;
    s.hearth.start()?;
    until_checked(&s.hearth)?;
    ensure!(
        s.hearth.stats("d")?["cached"] == 0,
        "{}",
        s.hearth.stats("d")?
    );
    s.hearth.ok(&["disk", "set", "d", "--on-start", "keep"])?;
    warm_up(&s.hearth)?;
    s.hearth.stop()?;
    s.hearth.start()?;
    let info = show(&s.hearth, "d")?;
    ensure!(
        info["check"].is_null() && info["on_start"] == "keep",
        "{info}"
    );
    is_still_cached(&s.hearth)
}

/// Dirty blocks are no part of what is dropped at a start: the disk they belong to is still looked at.
#[test]
fn on_start_drop_compares_for_dirty_blocks() -> Result<()> {
    let mut s = setup(&["--on-start", "drop"])?;
    warm_up(&s.hearth)?;
    let mut client = s.hearth.connect("d")?;
    client.write(20 * MIB, &[0xEE; 65536])?;
    client.flush()?;
    drop(client);
    s.hearth.kill9()?;
    s.server.kill9()?;
    // Nearly all of what is cached, but not where a first look reads.
    let before = hot_of(&s.file)?;
    let changed: Vec<u8> = before.iter().map(|byte| byte ^ 1).collect();
    write(&s.file, HOT.start, &changed)?;
    let before = std::fs::read(&s.file)?;
    s.server.up()?;
    s.hearth.start()?;
    until_refused(&s.hearth)?;
    s.hearth.stop()?;
    ensure!(std::fs::read(&s.file)? == before, "the origin was written");
    Ok(())
}

/// A daemon whose disks lie on one modelled hard disk: block devices of another host, which have no times.
fn storage(names: &[String]) -> Result<Hearth> {
    let storage = Hearth::serving("64M")?;
    for (n, name) in names.iter().enumerate() {
        let file = storage.dir().join(format!("{name}.raw"));
        write_random(&file, SIZE, n as u64)?;
        let origin = format!("model-hdd=one:{}", path(&file));
        storage.add(name, &origin, &["--mode", "off"])?;
    }
    Ok(storage)
}

/// Five of 3,584 hot blocks are changed while the daemon is stopped, in turn those that were written last and any, on a modelled
/// hard disk. `RUNS` says how often; at least 99 % must be noticed.
#[test]
fn few_changed_blocks_among_many_are_noticed() -> Result<()> {
    let runs: u64 = std::env::var("RUNS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(2);
    let storage = storage(&["x".to_owned()])?;
    let mut hearth = Hearth::serving("256M")?;
    let origin = format!("nbd+unix:///x?socket={}", path(&storage.socket()));
    hearth.add("d", &origin, &["--sole-user", "--seq-cutoff", "0"])?;
    let (mut noticed, mut longest) = (0, Duration::ZERO);
    for run in 0..runs {
        warm_up(&hearth)?;
        // Ordinary work of a guest: it writes here and there, and reads.
        let mut state = run * 0x9E37_79B9 + 1;
        let mut place = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            HOT.start + (state >> 33) % ((HOT.end - HOT.start) / 4096) * 4096
        };
        let mut client = hearth.connect("d")?;
        let written: Vec<u64> = (0..40).map(|_| place()).collect();
        for (n, at) in written.iter().enumerate() {
            client.write(*at, &[n as u8 + run as u8; 4096])?;
        }
        client.flush()?;
        drop(client);
        hearth.ok(&["disk", "flush", "d"])?;
        warm_up(&hearth)?;
        hearth.stop()?;
        let mut device = storage.connect("x")?;
        let changed: Vec<u64> = match run % 2 {
            0 => written[35..].to_vec(),
            _ => (0..5).map(|_| place()).collect(),
        };
        for at in &changed {
            device.write(*at, &[0xD5 ^ run as u8; 4096])?;
        }
        device.flush()?;
        drop(device);
        hearth.start()?;
        let began = std::time::Instant::now();
        let info = until_checked(&hearth)?;
        longest = longest.max(began.elapsed());
        noticed += u64::from(info["notices"].to_string().contains("origin changed"));
    }
    eprintln!("{noticed} of {runs} noticed; longest comparison {longest:?}");
    ensure!(noticed * 100 >= runs * 99, "{noticed} of {runs}");
    Ok(())
}

/// Thirty disks on one modelled hard disk: each is served at once and in full use after its turn.
#[test]
fn many_disks_on_one_drive_take_turns() -> Result<()> {
    let count: usize = std::env::var("RUNS").ok().map_or(3, |_| 30);
    let names: Vec<String> = (0..count).map(|n| format!("x{n}")).collect();
    let storage = storage(&names)?;
    let mut hearth = Hearth::serving("1G")?;
    for name in &names {
        let origin = format!("nbd+unix:///{name}?socket={}", path(&storage.socket()));
        hearth.add(name, &origin, &["--sole-user", "--seq-cutoff", "0"])?;
        let mut client = hearth.connect(name)?;
        for _ in 0..2 {
            for at in (0..SIZE / 2).step_by(MIB as usize) {
                client.read(at, MIB as u32)?;
            }
        }
        client.write(SIZE / 2, &[1; 65536])?;
        client.flush()?;
    }
    hearth.kill9()?;
    hearth.start()?;
    let began = std::time::Instant::now();
    let state = |name: &String| -> Result<(bool, bool)> {
        let info = show(&hearth, name)?;
        Ok((info["state"] == "attached", info["check"].is_null()))
    };
    let served = wait::until("all are served", LIMIT, || {
        let all = names
            .iter()
            .all(|name| state(name).is_ok_and(|(served, _)| served));
        all.then(|| began.elapsed())
    })?;
    let used = wait::until("all are in full use", LIMIT, || {
        let all = names
            .iter()
            .all(|name| state(name).is_ok_and(|(_, used)| used));
        all.then(|| began.elapsed())
    })
    .with_context(|| hearth.log())?;
    eprintln!("{count} disks: served after {served:?}, in full use after {used:?}");
    for name in &names {
        let info = show(&hearth, name)?;
        ensure!(info["notices"].is_null(), "{info}");
    }
    Ok(())
}
