//! An origin that is not quite the one that was left: what counts as a change, what is asked, and
//! what each answer does.

use anyhow::{Context, Result, ensure};
use hearth_rig::daemon::path;
use hearth_rig::nbd::Client;
use hearth_rig::{Hearth, wait};
use serde_json::Value;
use std::fs::{File, FileTimes, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Longest wait for a state that comes by itself.
const LIMIT: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;
/// Where guests' newest writes are, far from what was read.
const DIRTY_AT: u64 = 12 * MIB;

fn show(hearth: &Hearth) -> Result<Value> {
    Ok(serde_json::from_str(
        &hearth.ok(&["disk", "show", "d", "--json"])?,
    )?)
}

fn until_attached(hearth: &Hearth) -> Result<Value> {
    wait::until("attached", LIMIT, || {
        show(hearth).ok().filter(|info| info["state"] == "attached")
    })
    .with_context(|| hearth.log())
}

/// A killed daemon with `clean` bytes cached that the origin has, and 64 KiB at [`DIRTY_AT`], a number
/// for each block, that it does not have; `later` more flushed writes follow behind that.
fn left_dirty(clean: u64, later: u64) -> Result<(Hearth, PathBuf)> {
    let mut hearth = Hearth::serving("256M")?;
    let origin = hearth.origin("o.img", 16 * MIB)?;
    // Slow enough that the destager has written nothing when the daemon is killed.
    hearth.add(
        "d",
        &format!("model-latency=2s:{}", path(&origin)),
        &["--seq-cutoff", "0"],
    )?;
    let mut client = hearth.connect("d")?;
    if clean > 0 {
        for at in (4 * MIB..4 * MIB + clean).step_by(MIB as usize) {
            client.read(at, MIB as u32)?;
        }
        wait::until("what was read is cached", LIMIT, || {
            (hearth.stats("d").ok()?["cached"].as_u64()? >= clean).then_some(())
        })?;
    }
    let blocks: Vec<u8> = (0..16).flat_map(|n| [0xA0 + n; 4096]).collect();
    client.write(DIRTY_AT, &blocks)?;
    client.flush()?;
    for n in 0..later {
        client.write(DIRTY_AT + MIB + n * 8192, &[1; 4096])?;
        client.flush()?;
    }
    drop(client);
    hearth.kill9()?;
    Ok((hearth, origin))
}

fn dirty_is_there(client: &mut Client) -> Result<()> {
    let data = client.read(DIRTY_AT, 65536)?;
    for (n, block) in data.chunks(4096).enumerate() {
        ensure!(block.iter().all(|b| *b == 0xA0 + n as u8), "block {n}");
    }
    Ok(())
}

/// Changes content in place, and gives the file the times back that it had.
fn write_unseen(file: &Path, offset: u64, data: &[u8]) -> Result<()> {
    let open: File = OpenOptions::new().write(true).open(file)?;
    let before = open.metadata()?;
    open.write_all_at(data, offset)?;
    let times = FileTimes::new()
        .set_accessed(before.accessed()?)
        .set_modified(before.modified()?);
    open.set_times(times)?;
    Ok(())
}

/// chmod and mv leave everything as it was: no question, and the cache stays.
#[test]
fn chmod_and_mv_are_no_change() -> Result<()> {
    let (mut hearth, origin) = left_dirty(2 * MIB, 0)?;
    std::fs::set_permissions(&origin, Permissions::from_mode(0o640))?;
    let away = hearth.dir().join("away.img");
    std::fs::rename(&origin, &away)?;
    std::fs::rename(&away, &origin)?;
    hearth.start()?;
    let info = until_attached(&hearth)?;
    ensure!(
        info["notices"].to_string().contains("time of change"),
        "{info}"
    );
    ensure!(
        info["cached"].as_u64() >= Some(2 * MIB),
        "the cache is gone: {info}"
    );
    ensure!(info["dirty"].as_u64() > Some(0), "{info}");
    dirty_is_there(&mut hearth.connect("d")?)?;
    // Nor with nothing dirty, after a clean stop.
    hearth.ok(&["disk", "flush", "d"])?;
    hearth.stop()?;
    std::fs::set_permissions(&origin, Permissions::from_mode(0o600))?;
    hearth.start()?;
    let info = until_attached(&hearth)?;
    ensure!(
        info["cached"].as_u64() >= Some(2 * MIB),
        "the cache is gone: {info}"
    );
    dirty_is_there(&mut hearth.connect("d")?)
}

/// Content that changed behind unchanged times is found, and the question says what fits which story.
#[test]
fn changed_content_behind_old_times_is_a_question() -> Result<()> {
    let (mut hearth, origin) = left_dirty(2 * MIB, 0)?;
    write_unseen(&origin, 5 * MIB, &[0x55; 4096])?;
    hearth.start()?;
    let info = show(&hearth)?;
    ensure!(info["state"] == "refused", "{info}");
    let said = format!("{}; {}", info["reason"], info["remedy"]);
    for part in [
        "offset 5242880",
        "64 KiB",
        "changed between",
        "restored",
        "a VM",
        "--trust flash",
        "--trust origin",
    ] {
        ensure!(said.contains(part), "{part:?} is not in: {said}");
    }
    hearth.ok(&["disk", "set", "d", "--trust", "flash"])?;
    let mut client = hearth.connect("d")?;
    dirty_is_there(&mut client)?;
    ensure!(
        client.read(5 * MIB, 4096)? == [0x55; 4096],
        "a stale copy was served"
    );
    Ok(())
}

/// The same inode with the same modification time is the same content, also if nothing is cached to compare.
#[test]
fn chmod_with_only_dirty_blocks_is_no_change() -> Result<()> {
    let (mut hearth, origin) = left_dirty(0, 0)?;
    std::fs::set_permissions(&origin, Permissions::from_mode(0o640))?;
    hearth.start()?;
    let info = until_attached(&hearth)?;
    ensure!(info["dirty"] == 65536, "{info}");
    dirty_is_there(&mut hearth.connect("d")?)?;
    hearth.ok(&["disk", "flush", "d"])?;
    let mut written = [0; 4096];
    File::open(&origin)?.read_exact_at(&mut written, DIRTY_AT)?;
    ensure!(written == [0xA0; 4096]);
    Ok(())
}

/// When the flash is trusted, clean blocks stay if every one of them is what the origin has.
#[test]
fn the_clean_cache_outlives_the_answer() -> Result<()> {
    let (mut hearth, origin) = left_dirty(2 * MIB, 0)?;
    // As a copy that was put back: the same content, another time.
    let before = std::fs::read(&origin)?;
    std::fs::write(&origin, &before)?;
    hearth.start()?;
    let info = show(&hearth)?;
    let reason = info["reason"].as_str().context("a reason")?;
    ensure!(
        info["state"] == "refused" && reason.contains("modified"),
        "{info}"
    );
    let said: Value =
        serde_json::from_str(&hearth.ok(&["disk", "set", "d", "--trust", "flash", "--json"])?)?;
    ensure!(said["state"] == "attached", "{said}");
    ensure!(
        said["cached"].as_u64() >= Some(2 * MIB),
        "the cache is gone: {said}"
    );
    let mut client = hearth.connect("d")?;
    dirty_is_there(&mut client)?;
    let clean = client.read(4 * MIB, 2 * MIB as u32)?;
    ensure!(clean == before[4 * MIB as usize..6 * MIB as usize]);
    drop(client);
    // And the answer holds over a kill.
    hearth.kill9()?;
    hearth.start()?;
    until_attached(&hearth)?;
    dirty_is_there(&mut hearth.connect("d")?)
}

/// One block that rotted on flash does not hold up the answer: it is named, and all else is written.
#[test]
fn a_rotten_block_is_named() -> Result<()> {
    // Later writes: the very end of the log is checked after a crash, and cut where it is damaged.
    let (mut hearth, origin) = left_dirty(0, 4)?;
    let flash = OpenOptions::new()
        .read(true)
        .write(true)
        .open(hearth.flash())?;
    let mut block = [0; 4096];
    let mut at = 0;
    let size = flash.metadata()?.len();
    while block != [0xA5; 4096] {
        ensure!(at < size, "the block is not on flash");
        flash.read_exact_at(&mut block, at)?;
        at += 4096;
    }
    flash.write_all_at(&[0], at - 4096 + 17)?;
    let before = std::fs::read(&origin)?;
    std::fs::write(&origin, &before)?;
    hearth.start()?;
    ensure!(show(&hearth)?["state"] == "refused", "{}", show(&hearth)?);
    let offset = (DIRTY_AT + 5 * 4096).to_string();
    let start = Instant::now();
    let words = hearth.refused(&["disk", "set", "d", "--trust", "flash"])?;
    ensure!(
        words.contains(&offset) && words.contains("accept-loss"),
        "{words}"
    );
    // The limit this used to run into was 60 s.
    ensure!(
        start.elapsed() < Duration::from_secs(45),
        "{:?}",
        start.elapsed()
    );
    let info = show(&hearth)?;
    ensure!(
        info["state"] == "refused" && info["lost"][0]["offset"] == DIRTY_AT + 5 * 4096,
        "{info}"
    );
    // The rest is in the origin.
    let now = std::fs::read(&origin)?;
    for n in (0..16usize).filter(|n| *n != 5) {
        let at = DIRTY_AT as usize + n * 4096;
        ensure!(now[at..at + 4096] == [0xA0 + n as u8; 4096], "block {n}");
    }
    hearth.ok(&["disk", "accept-loss", "d"])?;
    until_attached(&hearth)?;
    let at = DIRTY_AT + 5 * 4096;
    let old = hearth.connect("d")?.read(at, 4096)?;
    ensure!(
        old == before[at as usize..at as usize + 4096],
        "the origin's older content"
    );
    Ok(())
}
