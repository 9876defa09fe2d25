//! A flash file that is removed, truncated or moved while it is in use: noticed, said, and what is
//! dirty gets to the origins while it still can.

use anyhow::{Context, Result, ensure};
use hearth_rig::daemon::path;
use hearth_rig::nbd::Client;
use hearth_rig::pattern::{BLOCK, fill, version_of};
use hearth_rig::{Hearth, wait};
use serde_json::Value;
use std::time::Duration;

const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(30);
const SIZE: u64 = 64 * MIB;
/// Where no file is written behind.
const END: u64 = 16 * MIB;
/// What the guest writes, and flushes.
const DIRTY: std::ops::Range<u64> = 8 * MIB..40 * MIB;

fn pool(hearth: &Hearth) -> Result<Value> {
    Ok(serde_json::from_str(
        &hearth.ok(&["pool", "show", "--json"])?,
    )?)
}

fn wait_for(hearth: &Hearth, what: &str, is: impl Fn(&Value) -> bool) -> Result<()> {
    wait::until(what, LIMIT, || is(&pool(hearth).ok()?).then_some(())).with_context(|| hearth.log())
}

/// A daemon with a disk of which a part is dirty on flash, and what the disk holds.
fn dirty(wrapper: &str) -> Result<(Hearth, Client, Vec<u8>)> {
    let hearth = Hearth::serving("256M")?;
    let origin = hearth.origin("vm.img", SIZE)?;
    let mut model = std::fs::read(&origin)?;
    let spec = format!("{wrapper}{}", path(&origin));
    hearth.add("vm", &spec, &["--mode", "write-back"])?;
    let mut client = hearth.connect("vm")?;
    for at in DIRTY.step_by(MIB as usize) {
        let piece = &mut model[at as usize..(at + MIB) as usize];
        piece.fill((at / MIB) as u8);
        client.write(at, piece)?;
    }
    client.flush()?;
    Ok((hearth, client, model))
}

#[test]
fn a_stop_right_after_the_flash_was_removed_saves_what_is_dirty() -> Result<()> {
    let (mut hearth, client, model) = dirty("")?;
    std::fs::remove_file(hearth.flash())?;
    hearth.stop()?;
    drop(client);
    ensure!(
        std::fs::read(hearth.dir().join("vm.img"))? == model,
        "what was dirty is lost:\n{}",
        hearth.log()
    );
    Ok(())
}

#[test]
fn a_removed_flash_file_is_noticed_and_left() -> Result<()> {
    let (mut hearth, mut client, mut model) = dirty("")?;
    std::fs::remove_file(hearth.flash())?;
    wait_for(&hearth, "it is noticed", |pool| pool["state"] == "leaving")?;
    let said = hearth.ok(&["pool", "show"])?;
    ensure!(said.contains("was removed while in use"), "{said}");
    ensure!(said.contains("hearth pool adopt-flash"), "{said}");
    for said in [hearth.ok(&["stats"])?, hearth.said(&["disk", "list"])?] {
        ensure!(
            said.contains("removed") || said.contains("cache is off"),
            "{said}"
        );
    }
    wait::until("it is logged", LIMIT, || {
        hearth
            .log()
            .contains("was removed while in use")
            .then_some(())
    })?;
    // The guest goes on, and what it flushes is durable where it will last.
    model[..65536].fill(0xEE);
    client.write(0, &model[..65536])?;
    client.flush()?;
    ensure!(
        pool(&hearth)?["dirty"] == 0,
        "flushed while something was dirty"
    );
    let origin = std::fs::read(hearth.dir().join("vm.img"))?;
    ensure!(origin == model, "the origin is not the disk");
    ensure!(client.read(DIRTY.start, 65536)? == model[DIRTY.start as usize..][..65536]);
    drop(client);
    hearth.stop()?;
    Ok(())
}

#[test]
fn a_stop_that_cannot_save_what_was_dirty_says_so() -> Result<()> {
    let (mut hearth, client, _) = dirty("fault=eio-write:")?;
    std::fs::OpenOptions::new()
        .write(true)
        .open(hearth.flash())?
        .set_len(2 * MIB)?;
    wait_for(&hearth, "it is noticed", |pool| pool["state"] == "failed")?;
    // Reads may have failed before the file was looked at.
    wait_for(&hearth, "the reason is named", |pool| {
        let said = pool["notices"].to_string();
        said.contains("was truncated") && said.contains("hearth pool adopt-flash")
    })?;
    let lost = || -> Option<u64> {
        let text = hearth.ok(&["disk", "show", "vm", "--json"]).ok()?;
        let disk: Value = serde_json::from_str(&text).ok()?;
        let ranges = disk["lost"].as_array()?;
        Some(ranges.iter().filter_map(|r| r["length"].as_u64()).sum())
    };
    let all = DIRTY.end - DIRTY.start;
    wait::until("what is gone is listed", LIMIT, || {
        (lost()? == all).then_some(())
    })?;
    drop(client);
    let error = hearth
        .stop()
        .err()
        .context("the end should have said what is lost")?;
    let words = format!("{error:#}");
    ensure!(words.contains("vm (32 MiB)"), "{words}");
    Ok(())
}

/// Three sound dirty blocks among lost ones that lie apart, while the origin takes nothing: once it does, they are there.
#[test]
fn truncated_flash_gives_up_what_can_be_read() -> Result<()> {
    // SAFETY: no handler is installed. The daemon would be ended by the signal that comes with a refused write.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let mut hearth = Hearth::serving("64M")?;
    let file = hearth.dir().join("vm.img");
    std::fs::File::create(&file)?.set_len(SIZE)?;
    hearth.add("vm", path(&file), &["--mode", "write-back"])?;
    // All that is written lies behind this on the disk, and before it on flash.
    hearth.refuse_writes(END)?;
    let mut client = hearth.connect("vm")?;
    let mut write = |at: u64, version: u64| -> Result<()> {
        let mut block = vec![0; BLOCK];
        fill(&mut block, at, version);
        Ok(client.write(at * BLOCK as u64, &block)?)
    };
    let first = END / BLOCK as u64;
    let sound = [301, 303, 305].map(|n| first + n);
    sound.iter().try_for_each(|at| write(*at, 1))?;
    let gone: Vec<u64> = (0..300).map(|n| first + 2 * n).collect();
    gone.iter().try_for_each(|at| write(*at, 2))?;
    client.flush()?;
    let flash = std::fs::read(hearth.flash())?;
    let is_gone = |block: &[u8]| {
        let number = |at: usize| {
            block
                .get(at..at + 8)?
                .try_into()
                .ok()
                .map(u64::from_le_bytes)
        };
        number(8) == Some(2) && number(0).is_some_and(|at| version_of(block, at) == Ok(2))
    };
    let mut blocks = (0u64..).step_by(BLOCK).zip(flash.chunks(BLOCK));
    let (end, _) = blocks
        .find(|(_, block)| is_gone(block))
        .context("nothing is on flash")?;
    let flash = std::fs::OpenOptions::new()
        .write(true)
        .open(hearth.flash())?;
    flash.set_len(end)?;
    let shown = || -> Option<(u64, u64)> {
        let shown = hearth.ok(&["disk", "show", "vm", "--json"]).ok()?;
        let shown: Value = serde_json::from_str(&shown).ok()?;
        let lost = shown["lost"].as_array()?.iter();
        let lost: u64 = lost.filter_map(|run| run["length"].as_u64()).sum();
        Some((shown["dirty"].as_u64()?, lost))
    };
    let all = (gone.len() * BLOCK) as u64;
    wait::until("what is gone is listed", 2 * LIMIT, || {
        (shown()?.1 == all).then_some(())
    })
    .with_context(|| format!("{:?}", shown()))?;
    hearth.refuse_writes(libc::RLIM_INFINITY)?;
    wait::until("what is there is in the origin", 2 * LIMIT, || {
        (shown()? == (all, all)).then_some(())
    })
    .with_context(|| format!("{:?}", shown()))?;
    drop(client);
    let _ = hearth.stop();
    let origin = std::fs::read(&file)?;
    for at in sound {
        let held = &origin[at as usize * BLOCK..][..BLOCK];
        ensure!(
            version_of(held, at) == Ok(1),
            "block {at} was not written back"
        );
    }
    Ok(())
}

#[test]
fn a_flash_file_that_was_moved_is_missed() -> Result<()> {
    let (mut hearth, client, model) = dirty("")?;
    let elsewhere = hearth.dir().join("elsewhere.img");
    std::fs::rename(hearth.flash(), &elsewhere)?;
    wait_for(&hearth, "it is noticed", |pool| {
        pool["notices"]
            .to_string()
            .contains("was moved while in use")
    })?;
    drop(client);
    hearth.stop()?;
    ensure!(std::fs::read(hearth.dir().join("vm.img"))? == model);
    Ok(())
}
