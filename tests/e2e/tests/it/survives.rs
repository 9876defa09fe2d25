//! Flash that is gone: what is kept beside it is enough to serve the disks that are whole in their origins, and
//! no disk has to be added anew.

use anyhow::{Context, Result, ensure};
use hearth_format::order::ORDER_NOTE_BYTES;
use hearth_rig::daemon::path;
use hearth_rig::load::{BLOCKS, Writer};
use hearth_rig::pattern::BLOCK;
use hearth_rig::{Hearth, wait};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest wait for a state that comes by itself.
const LIMIT: Duration = Duration::from_secs(60);
/// How long a load goes on before something happens.
const LOAD: Duration = Duration::from_millis(300);

fn blank(hearth: &Hearth, name: &str) -> Result<PathBuf> {
    let file = hearth.dir().join(name);
    let made = std::fs::File::create(&file)?;
    made.set_len(BLOCKS * BLOCK as u64)?;
    Ok(file)
}

fn state(hearth: &Hearth, disk: &str) -> Result<String> {
    let info = hearth.ok(&["disk", "show", disk, "--json"])?;
    let info: serde_json::Value = serde_json::from_str(&info)?;
    Ok(info["state"].as_str().unwrap_or_default().to_owned())
}

fn wait_state(hearth: &Hearth, disk: &str, want: &str) -> Result<()> {
    wait::until(&format!("{disk} is {want}"), LIMIT, || {
        (state(hearth, disk).ok()? == want).then_some(())
    })
    .with_context(|| hearth.ok(&["disk", "show", disk]).unwrap_or_default())
    .with_context(|| hearth.log())
}

/// The notes beside the pool, which there is one of. How far ordered disks are is in a file of its own.
fn notes(hearth: &Hearth) -> Result<hearth_format::PoolNotes> {
    let dir = std::fs::read_dir(hearth.dir().join("state/pools"))?;
    let mut files = dir.flatten().map(|entry| entry.path());
    let file = files.find(|path| path.extension().is_none());
    let file = file.context("no notes")?;
    Ok(hearth_format::PoolNotes::newest(&std::fs::read(file)?)?)
}

/// Up to when, in milliseconds since 1970, the first disk's origin is noted to hold everything; 0: it is of no one time.
fn noted_order(hearth: &Hearth) -> Option<u64> {
    let files = std::fs::read_dir(hearth.dir().join("state/pools")).ok()?;
    let mut files = files.flatten().map(|entry| entry.path());
    let file = files.find(|path| path.extension().is_some_and(|e| e == "order"))?;
    let bytes = std::fs::read(file).ok()?;
    let place = bytes.get(ORDER_NOTE_BYTES..)?;
    let note = hearth_format::OrderNote::newest(place).ok()??;
    Some(note.upto_ms)
}

/// It is noted that nothing of any disk is on flash only.
fn wait_whole(hearth: &Hearth) -> Result<()> {
    wait::until("all disks are noted as whole", LIMIT, || {
        notes(hearth).ok()?.dirty.is_empty().then_some(())
    })
    .with_context(|| hearth.log())
}

/// A daemon is killed, and its flash is not there any more.
fn flash_dies(hearth: &mut Hearth) -> Result<()> {
    hearth.kill9()?;
    Ok(std::fs::rename(
        hearth.flash(),
        hearth.flash().with_extension("away"),
    )?)
}

fn flash_comes_back(hearth: &Hearth) -> Result<()> {
    let flash = hearth.flash();
    Ok(std::fs::rename(flash.with_extension("away"), flash)?)
}

fn adopt(hearth: &Hearth, more: &[&str]) -> Result<String> {
    let state = hearth.dir().join("state");
    let args = ["pool", "adopt-flash", "--flash", path(hearth.flash())];
    hearth.ok(&[&args[..], &["--state-dir", path(&state)], more].concat())
}

/// How many events of this kind say this.
fn told(hearth: &Hearth, kind: &str, says: &str) -> Result<usize> {
    let kind = format!("\"event\":\"{kind}\"");
    let events = hearth.ok(&["events", "--json"])?;
    let events = events.lines();
    Ok(events
        .filter(|e| e.contains(&kind) && e.contains(says))
        .count())
}

/// Two disks were whole when the flash died, one was not.
#[test]
fn whole_disks_are_served_without_flash_and_a_blank_one_takes_its_place() -> Result<()> {
    let mut hearth = Hearth::serving("160M")?;
    let files: Vec<PathBuf> = ["through", "flushed", "dirty"]
        .iter()
        .map(|name| blank(&hearth, &format!("{name}.raw")))
        .collect::<Result<_>>()?;
    hearth.add("through", path(&files[0]), &["--mode", "write-through"])?;
    hearth.add("flushed", path(&files[1]), &[])?;
    hearth.add("dirty", path(&files[2]), &[])?;
    let mut writers = [Writer::new(1), Writer::new(2)];
    for (name, writer) in ["through", "flushed"].iter().zip(&mut writers) {
        let mut client = hearth.connect(name)?;
        writer.load(&mut client, LOAD, || Ok(()))?;
        writer.flush(&mut client)?;
    }
    hearth.ok(&["disk", "flush", "flushed"])?;
    wait_whole(&hearth)?;
    let mut client = hearth.connect("dirty")?;
    client.write(0, &[7; 4096])?;
    // Noted before it was answered.
    ensure!(notes(&hearth)?.dirty.iter().count() == 1);
    drop(client);
    flash_dies(&mut hearth)?;

    hearth.start()?;
    for (name, writer) in ["through", "flushed"].iter().zip(&mut writers) {
        wait_state(&hearth, name, "attached")?;
        let mut client = hearth.connect(name)?;
        writer.check(&mut client)?;
        writer.load(&mut client, LOAD, || Ok(()))?;
        writer.flush(&mut client)?;
    }
    wait_state(&hearth, "dirty", "refused")?;
    let why = hearth.ok(&["disk", "show", "dirty"])?;
    ensure!(
        why.contains("does not exist") && why.contains("--trust origin"),
        "{why}"
    );
    ensure!(hearth.connect("dirty").is_err(), "a stale disk is served");
    ensure!(told(&hearth, "flash-gone", "\"refused\":1")? == 1);
    ensure!(told(&hearth, "flash-gone", "\"served\":2")? == 1);
    let pool = hearth.ok(&["pool", "show"])?;
    ensure!(pool.contains("adopt-flash"), "{pool}");
    // What is changed now is not forgotten.
    let more = blank(&hearth, "more.raw")?;
    hearth.add("more", path(&more), &[])?;
    hearth.ok(&["disk", "set", "through", "--mode", "write-back"])?;
    hearth.kill9()?;
    hearth.start()?;
    wait_state(&hearth, "more", "attached")?;
    wait_state(&hearth, "dirty", "refused")?;
    let refused = hearth.refused(&[
        "pool",
        "adopt-flash",
        "--flash",
        path(hearth.flash()),
        "--size",
        "160M",
        "--state-dir",
        path(&hearth.dir().join("state")),
    ])?;
    ensure!(refused.contains("stop its daemon"), "{refused}");
    hearth.stop()?;

    let said = adopt(&hearth, &["--size", "160M"])?;
    ensure!(said.contains("with 4 disks"), "{said}");
    hearth.start()?;
    for (name, writer) in ["through", "flushed"].iter().zip(&mut writers) {
        wait_state(&hearth, name, "attached")?;
        let mut client = hearth.connect(name)?;
        writer.check(&mut client)?;
        writer.load(&mut client, LOAD, || Ok(()))?;
        writer.check(&mut client)?;
    }
    ensure!(hearth.pool_stats()?["cached_bytes"].as_u64() != Some(0));
    ensure!(told(&hearth, "flash-adopted", "\"lost\":1")? == 1);
    // What was dirty is asked about until somebody answers, and then no more.
    wait_state(&hearth, "dirty", "refused")?;
    hearth.kill9()?;
    hearth.start()?;
    wait_state(&hearth, "dirty", "refused")?;
    hearth.ok(&["disk", "set", "dirty", "--trust", "origin"])?;
    wait_state(&hearth, "dirty", "attached")?;
    hearth.stop()?;
    hearth.start()?;
    wait_state(&hearth, "dirty", "attached")?;
    // It was told when it was news.
    ensure!(told(&hearth, "flash-adopted", "")? == 1);
    ensure!(told(&hearth, "flash-unused", "")? == 0);
    // The old device has no say any more.
    hearth.stop()?;
    hearth.set_flash(hearth.flash().with_extension("away"));
    let refused = hearth.start_refused()?;
    ensure!(refused.contains("took its place"), "{refused}");
    Ok(())
}

/// Both superblocks are damaged: the device is as good as gone, whole disks are served, and what is dirty on it can be saved.
#[test]
fn flash_that_lost_both_superblocks_is_gone_and_can_be_read() -> Result<()> {
    for junk in [0, 0xff] {
        let mut hearth = Hearth::with_pool("160M")?;
        // What is dirty stays so for a while.
        hearth.serve_args = ["--destage-rate", "4K"].map(str::to_owned).to_vec();
        hearth.start()?;
        let (a, b) = (blank(&hearth, "a.raw")?, blank(&hearth, "b.raw")?);
        hearth.add("a", path(&a), &["--mode", "write-through"])?;
        hearth.add("b", path(&b), &[])?;
        let mut writer = Writer::new(5);
        let mut client = hearth.connect("a")?;
        writer.load(&mut client, LOAD, || Ok(()))?;
        writer.flush(&mut client)?;
        drop(client);
        let mut client = hearth.connect("b")?;
        client.write(0, &[9; 1 << 20])?;
        client.flush()?;
        drop(client);
        hearth.kill9()?;
        let flash = std::fs::File::options().write(true).open(hearth.flash())?;
        for copy in [0, 1 << 20] {
            flash.write_all_at(&[junk; 4096], copy)?;
        }
        hearth.start()?;
        wait_state(&hearth, "a", "attached")?;
        writer.check(&mut hearth.connect("a")?)?;
        wait_state(&hearth, "b", "refused")?;
        ensure!(told(&hearth, "flash-gone", "\"refused\":1")? == 1);
        ensure!(hearth.stop()?.success(), "{}", hearth.log());
        let state = hearth.dir().join("state");
        let (flash, state) = (path(hearth.flash()), path(&state));
        // It does not vouch for what it concludes, and says so.
        hearth.hearth(&[
            "rescue",
            flash,
            "--state-dir",
            state,
            "--disk",
            "b",
            "--onto",
            path(&b),
        ])?;
        ensure!(std::fs::read(&b)?[..1 << 20] == [9; 1 << 20]);
        adopt(&hearth, &["--force"])?;
        hearth.start()?;
        wait_state(&hearth, "a", "attached")?;
        wait_state(&hearth, "b", "refused")?;
        hearth.ok(&["disk", "set", "b", "--trust", "origin"])?;
        ensure!(hearth.connect("b")?.read(0, 1 << 20)? == [9; 1 << 20]);
        writer.check(&mut hearth.connect("a")?)?;
    }
    Ok(())
}

/// The flash was only away: what it holds of disks that went on without it does not count, what it holds of the others does.
#[test]
fn flash_that_comes_back_is_believed_where_nobody_went_on() -> Result<()> {
    let mut hearth = Hearth::serving("160M")?;
    let (a, b) = (blank(&hearth, "a.raw")?, blank(&hearth, "b.raw")?);
    hearth.add("a", path(&a), &["--mode", "write-through"])?;
    hearth.add("b", path(&b), &[])?;
    let mut writer = Writer::new(3);
    let mut client = hearth.connect("a")?;
    writer.load(&mut client, LOAD, || Ok(()))?;
    writer.flush(&mut client)?;
    writer.check_stable(&mut client)?;
    drop(client);
    let mut client = hearth.connect("b")?;
    client.write(4096, &[9; 4096])?;
    client.flush()?;
    drop(client);
    flash_dies(&mut hearth)?;
    hearth.start()?;
    wait_state(&hearth, "a", "attached")?;
    wait_state(&hearth, "b", "refused")?;
    let mut client = hearth.connect("a")?;
    writer.load(&mut client, LOAD, || Ok(()))?;
    writer.flush(&mut client)?;
    drop(client);
    hearth.kill9()?;
    flash_comes_back(&hearth)?;
    hearth.start()?;
    wait_state(&hearth, "a", "attached")?;
    wait_state(&hearth, "b", "attached")?;
    writer.check(&mut hearth.connect("a")?)?;
    ensure!(hearth.connect("b")?.read(4096, 4096)? == [9; 4096]);
    // And a crash later it is still so.
    hearth.kill9()?;
    hearth.start()?;
    wait_state(&hearth, "a", "attached")?;
    writer.check(&mut hearth.connect("a")?)
}

/// The flash dies, then a leg, then the power goes: the leg that missed writes is never read.
#[test]
fn a_stale_leg_is_not_used_though_flash_and_the_other_leg_are_gone() -> Result<()> {
    let mut hearth = Hearth::serving("160M")?;
    let (a, b) = (blank(&hearth, "a")?, blank(&hearth, "b")?);
    hearth.ok(&[
        "disk",
        "add",
        "d",
        "--mirror",
        path(&a),
        "--mirror",
        path(&b),
    ])?;
    let mut writer = Writer::new(4);
    let mut client = hearth.connect("d")?;
    writer.load(&mut client, LOAD, || Ok(()))?;
    writer.flush(&mut client)?;
    drop(client);
    hearth.ok(&["disk", "flush", "d"])?;
    wait_whole(&hearth)?;
    flash_dies(&mut hearth)?;
    let away = |file: &Path| std::fs::rename(file, file.with_extension("away"));
    let back = |file: &Path| std::fs::rename(file.with_extension("away"), file);
    // Without flash, on one leg; the power goes in the middle of a load.
    away(&b)?;
    hearth.start()?;
    wait_state(&hearth, "d", "attached")?;
    let mut client = hearth.connect("d")?;
    writer.load(&mut client, LOAD, || hearth.kill9())?;
    away(&a)?;
    back(&b)?;
    let waits = |hearth: &Hearth| -> Result<()> {
        wait::until("the disk waits for the leg that holds it", LIMIT, || {
            let shown = hearth.ok(&["disk", "show", "d"]).ok()?;
            shown.contains("no leg of the mirror").then_some(())
        })
        .with_context(|| hearth.log())?;
        ensure!(hearth.connect("d").is_err(), "a stale leg is served");
        Ok(())
    };
    hearth.start()?;
    waits(&hearth)?;
    hearth.stop()?;
    // Neither does a new device believe it, nor the old one.
    adopt(&hearth, &["--size", "160M"])?;
    hearth.start()?;
    waits(&hearth)?;
    back(&a)?;
    wait_state(&hearth, "d", "attached")?;
    writer.check(&mut hearth.connect("d")?)
}

/// Of an ordered disk the origin alone is a state of one time, which is told.
#[test]
fn an_ordered_disk_without_flash_is_as_after_a_power_cut() -> Result<()> {
    let mut hearth = Hearth::with_pool("160M")?;
    // What is dirty stays so for a while.
    hearth.serve_args = ["--destage-rate", "16K"].map(str::to_owned).to_vec();
    hearth.start()?;
    let file = blank(&hearth, "o.raw")?;
    let ordered = ["--mode", "write-back-ordered", "--max-age", "1h"];
    hearth.add("o", path(&file), &ordered)?;
    let mut client = hearth.connect("o")?;
    // Each round writes its number into its own block and into one that is written every time, and flushes.
    let mut rounds = 0u8;
    let mut round = |client: &mut hearth_rig::nbd::Client| -> Result<u8> {
        rounds += 1;
        client.write(u64::from(rounds) * BLOCK as u64, &[rounds; BLOCK])?;
        client.write(0, &[rounds; BLOCK])?;
        client.flush()?;
        Ok(rounds)
    };
    round(&mut client)?;
    let shown = |hearth: &Hearth| -> Result<serde_json::Value> {
        Ok(serde_json::from_str(
            &hearth.ok(&["disk", "show", "o", "--json"])?,
        )?)
    };
    wait::until("it is known how far the origin is", LIMIT, || {
        shown(&hearth).ok()?["order"]["upto"].as_u64().map(drop)
    })?;
    // And that is noted beside the flash; the disk is the pool's first.
    let noted = |hearth: &Hearth| noted_order(hearth).filter(|upto| *upto > 0);
    // A disk that is whole needs no note; before anything becomes dirty again it has one.
    wait_whole(&hearth)?;
    round(&mut client)?;
    ensure!(noted(&hearth).is_some(), "{:?}", shown(&hearth)?);
    let text = hearth.ok(&["disk", "show", "o"])?;
    ensure!(text.contains("origin holds everything up to"), "{text}");
    ensure!(shown(&hearth)?["max_age"] == 3600.0);
    let mut last = 0;
    for _ in 0..100 {
        last = round(&mut client)?;
    }
    drop(client);
    flash_dies(&mut hearth)?;
    hearth.start()?;
    wait_state(&hearth, "o", "refused")?;
    let why = hearth.ok(&["disk", "show", "o"])?;
    ensure!(
        why.contains("everything that was flushed up to 20"),
        "{why}"
    );
    ensure!(why.contains("--trust origin"), "{why}");
    let told = shown(&hearth)?["order"]["upto"].as_u64();
    ensure!(told.is_some() && told == noted(&hearth), "{told:?}");
    hearth.ok(&["disk", "set", "o", "--trust", "origin"])?;
    wait_state(&hearth, "o", "attached")?;
    let mut client = hearth.connect("o")?;
    let own: Vec<u8> = (1..=last)
        .map(|n| Ok(client.read(u64::from(n) * BLOCK as u64, BLOCK as u32)?[0]))
        .collect::<Result<_>>()?;
    let every = client.read(0, BLOCK as u32)?[0];
    // A prefix, and perhaps one more.
    let there = own.iter().take_while(|n| **n != 0).count();
    ensure!(own[there..].iter().all(|n| *n == 0), "{own:?}");
    let there = there as u8;
    ensure!(
        there == every || there == every + 1 || there + 1 == every,
        "{there} and {every}"
    );
    // It is written without flash, so what was told then does not hold.
    client.write(0, &[9; BLOCK])?;
    Ok(())
}

/// The documented steps, without a start in between that would show what is lost: new flash knows nothing of the disk,
/// and what is known of its origin stays as it was.
#[test]
fn adopted_flash_keeps_time_of_ordered_disk() -> Result<()> {
    let mut hearth = Hearth::with_pool("160M")?;
    hearth.serve_args = ["--destage-rate", "16K"].map(str::to_owned).to_vec();
    hearth.start()?;
    let file = blank(&hearth, "o.raw")?;
    hearth.add("o", path(&file), &["--mode", "write-back-ordered"])?;
    let mut client = hearth.connect("o")?;
    let shown = |hearth: &Hearth| -> Result<serde_json::Value> {
        let shown = hearth.ok(&["disk", "show", "o", "--json"])?;
        Ok(serde_json::from_str(&shown)?)
    };
    client.write(0, &[1; BLOCK])?;
    client.flush()?;
    wait::until("it is known how far the origin is", LIMIT, || {
        shown(&hearth).ok()?["order"]["upto"].as_u64().map(drop)
    })?;
    wait_whole(&hearth)?;
    for block in 1..200 {
        client.write(block * BLOCK as u64, &[1; BLOCK])?;
        client.flush()?;
    }
    drop(client);
    flash_dies(&mut hearth)?;
    let known = noted_order(&hearth).filter(|upto| *upto > 0);
    ensure!(known.is_some(), "nothing was noted");
    adopt(&hearth, &["--size", "160M"])?;
    for _ in 0..2 {
        hearth.start()?;
        wait_state(&hearth, "o", "refused")?;
        let why = hearth.ok(&["disk", "show", "o"])?;
        ensure!(
            why.contains("everything that was flushed up to 20"),
            "{why}"
        );
        ensure!(shown(&hearth)?["order"]["upto"].as_u64() == known, "{why}");
        hearth.stop()?;
        ensure!(noted_order(&hearth) == known, "it was overwritten");
    }
    hearth.start()?;
    hearth.ok(&["disk", "set", "o", "--trust", "origin"])?;
    wait_state(&hearth, "o", "attached")
}

/// Writes that went on past flash that had failed are in no order, also if the daemon is stopped at once.
#[test]
fn no_time_is_told_of_an_ordered_disk_that_was_written_past_its_flash() -> Result<()> {
    // SAFETY: no handler is installed. The daemon is told of a write beyond the limit by a signal that would end it.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let mut hearth = Hearth::with_pool("160M")?;
    hearth.serve_args = ["--destage-rate", "16K"].map(str::to_owned).to_vec();
    hearth.start()?;
    let file = blank(&hearth, "o.raw")?;
    hearth.add("o", path(&file), &["--mode", "write-back-ordered"])?;
    let shown = |hearth: &Hearth| -> Result<serde_json::Value> {
        Ok(serde_json::from_str(
            &hearth.ok(&["disk", "show", "o", "--json"])?,
        )?)
    };
    let mut client = hearth.connect("o")?;
    client.write(0, &[1; BLOCK])?;
    client.flush()?;
    wait::until("it is known how far the origin is", LIMIT, || {
        shown(&hearth).ok()?["order"]["upto"].as_u64().map(drop)
    })?;
    // Whoever is whole needs no note; before anything becomes dirty again there is one.
    wait_whole(&hearth)?;
    for block in 1..200 {
        client.write(block * BLOCK as u64, &[1; BLOCK])?;
    }
    client.flush()?;
    ensure!(noted_order(&hearth).is_some_and(|upto| upto > 0));
    hearth.refuse_writes(16 << 20)?;
    let flash = std::fs::File::options().write(true).open(hearth.flash())?;
    flash.set_len(2 << 20)?;
    // Until one of them went past: from then on the origin has some of what came later.
    let mut block = 300;
    wait::until("it is said that there is no order", LIMIT, || {
        block += 1;
        let _ = client.write(block * BLOCK as u64, &[2; BLOCK]);
        let info = shown(&hearth).ok()?;
        (info["order"]["in_order"] == false).then_some(())
    })?;
    drop(client);
    let _ = hearth.stop();
    ensure!(noted_order(&hearth) == Some(0), "a time is still noted");
    std::fs::remove_file(hearth.flash())?;
    hearth.start()?;
    wait_state(&hearth, "o", "refused")?;
    let why = hearth.ok(&["disk", "show", "o"])?;
    ensure!(!why.contains("flushed up to"), "{why}");
    Ok(())
}

/// A name that was never a pool's flash is a mistake, whatever else is known.
#[test]
fn a_mistyped_name_is_refused() -> Result<()> {
    let mut hearth = Hearth::serving("160M")?;
    hearth.stop()?;
    hearth.set_flash(hearth.dir().join("flahs.img"));
    let refused = hearth.start_refused()?;
    ensure!(refused.contains("flahs.img"), "{refused}");
    Ok(())
}
