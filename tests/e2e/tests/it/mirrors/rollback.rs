//! Legs that hold an older copy of themselves after a stop in order, of which no time of modification tells.

mod devices;

use super::*;
use std::os::unix::fs::FileExt;
use std::time::SystemTime;

/// Blocks that are written, all over the disk.
const PLACES: u64 = 40;

fn place(n: u64) -> u64 {
    n * (BLOCKS / PLACES) * BLOCK as u64
}

fn write(hearth: &Hearth, byte: u8) -> Result<()> {
    let mut client = hearth.connect("d")?;
    for n in 0..PLACES {
        client.write(place(n), &[byte; BLOCK])?;
    }
    Ok(client.flush()?)
}

fn modified(leg: &Path) -> Result<SystemTime> {
    Ok(std::fs::metadata(leg)?.modified()?)
}

/// Changes what a leg holds, and nothing tells when.
fn roll_back(leg: &Path, image: &[u8]) -> Result<()> {
    let then = modified(leg)?;
    let file = std::fs::OpenOptions::new().write(true).open(leg)?;
    file.write_all_at(image, 0)?;
    file.set_modified(then)?;
    Ok(file.sync_all()?)
}

/// A disk that was stopped in order twice; what its legs held the first time.
fn written_twice(mode: &str) -> Result<(Hearth, [PathBuf; 2], Vec<u8>)> {
    let (mut hearth, a, b) = two_legs()?;
    add(&hearth, &[path(&a), path(&b)], &["--mode", mode])?;
    let image = write_twice(&mut hearth, &a)?;
    Ok((hearth, [a, b], image))
}

/// Writes and stops twice; returns the content of the leg at the first stop.
fn write_twice(hearth: &mut Hearth, leg: &Path) -> Result<Vec<u8>> {
    wait_states(hearth, &["current", "current"])?;
    write(hearth, 1)?;
    hearth.ok(&["disk", "flush", "d"])?;
    hearth.stop()?;
    let image = std::fs::read(leg)?;
    hearth.start()?;
    attached(hearth)?;
    write(hearth, 2)?;
    hearth.ok(&["disk", "flush", "d"])?;
    hearth.stop()?;
    Ok(image)
}

/// No read returns content of the older copy. It leaves the mirror and is copied from the other leg.
fn older_copy_leaves(hearth: &mut Hearth, leg: usize) -> Result<()> {
    hearth.start()?;
    attached(hearth)?;
    let mut client = hearth.connect("d")?;
    for round in 0..3 {
        for n in (0..PLACES).map(|n| (n * 17 + round) % PLACES) {
            let held = client.read(place(n), BLOCK as u32)?;
            ensure!(held == [2; BLOCK], "place {n} of leg {leg} is {}", held[0]);
        }
    }
    drop(client);
    wait_event(hearth, "leg-changed", "that were written last")?;
    let said = hearth.ok(&["disk", "show", "d", "--json"])? + &hearth.log();
    ensure!(!said.contains("its cache is dropped"), "{said}");
    wait_states(hearth, &["current", "current"])?;
    hearth.stop()?;
    Ok(())
}

#[test]
fn leg_rolled_back_while_stopped_leaves_the_mirror() -> Result<()> {
    // With the cache on, what it holds is right, and stays.
    for (leg, mode) in [(0, "off"), (1, "off"), (0, "write-back"), (1, "write-back")] {
        let (mut hearth, legs, image) = written_twice(mode)?;
        roll_back(&legs[leg], &image)?;
        older_copy_leaves(&mut hearth, leg)?;
        ensure!(std::fs::read(&legs[0])? == std::fs::read(&legs[1])?);
    }
    Ok(())
}

/// The file of the state directory is lost: the pool knows it as well.
#[test]
fn rolled_back_leg_is_found_from_the_pool_alone() -> Result<()> {
    let (mut hearth, legs, image) = written_twice("off")?;
    let mut removed = 0;
    for dir in walk(hearth.dir())? {
        if dir.file_name().is_some_and(|name| name == "mirrors") {
            std::fs::remove_dir_all(&dir)?;
            removed += 1;
        }
    }
    ensure!(removed == 1, "{removed} directories with notes");
    roll_back(&legs[0], &image)?;
    hearth.start()?;
    attached(&hearth)?;
    wait_event(&hearth, "leg-changed", "that were written last")?;
    ensure!(hearth.connect("d")?.read(0, BLOCK as u32)? == [2; BLOCK]);
    Ok(())
}

fn walk(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() && !path.is_symlink() {
            found.extend(walk(&path)?);
            found.push(path);
        }
    }
    Ok(found)
}

#[test]
fn disk_whose_legs_are_all_older_is_refused() -> Result<()> {
    let (mut hearth, legs, image) = written_twice("off")?;
    for leg in &legs {
        roll_back(leg, &image)?;
    }
    hearth.start()?;
    let shown = wait::until("the disk is refused", LIMIT, || {
        let shown = hearth.ok(&["disk", "show", "d", "--json"]).ok()?;
        shown.contains("\"refused\"").then_some(shown)
    })?;
    for leg in &legs {
        ensure!(shown.contains(path(leg)), "{shown}");
    }
    ensure!(shown.contains("that were written last"), "{shown}");
    // Where nobody writes, nothing is written.
    for leg in &legs {
        ensure!(std::fs::read(leg)? == image);
    }
    Ok(())
}

/// A leg is an older copy, and of the other one nothing can be read that was written last: the disk waits for that one.
#[test]
fn older_copy_is_not_served_beside_unreadable_leg() -> Result<()> {
    let (mut hearth, a, b) = two_legs()?;
    let fail = hearth.dir().join("fail");
    let server = failing(&hearth, &b, "error-pread", &fail)?;
    let legs = [path(&a), &server.uri("")];
    add(
        &hearth,
        &legs,
        &["--mode", "off", "--sole-user", "--origin-timeout", "5"],
    )?;
    let image = write_twice(&mut hearth, &a)?;
    roll_back(&a, &image)?;
    std::fs::write(&fail, "")?;
    hearth.start()?;
    let shown = wait::until("the legs were looked at", LIMIT, || {
        let shown = hearth.ok(&["disk", "show", "d", "--json"]).ok()?;
        let is_judged = shown.contains("\"attached\"") || shown.contains("that were written last");
        is_judged.then_some(shown)
    })?;
    ensure!(shown.contains("\"waiting\""), "{shown}");
    ensure!(std::fs::read(&a)? == image, "it was written");
    std::fs::remove_file(&fail)?;
    attached(&hearth)?;
    wait_event(&hearth, "leg-changed", "that were written last")?;
    wait_states(&hearth, &["current", "current"])?;
    hearth.stop()?;
    ensure!(std::fs::read(&a)? == std::fs::read(&b)?);
    Ok(())
}

/// One block that differs is silent corruption: it is copied from the other leg, and no leg leaves.
#[test]
fn one_corrupt_block_does_not_expel_a_leg() -> Result<()> {
    let (mut hearth, legs, _) = written_twice("off")?;
    let mut held = std::fs::read(&legs[0])?;
    let at = place(PLACES - 5) as usize;
    held[at..at + BLOCK].fill(9);
    roll_back(&legs[0], &held)?;
    hearth.start()?;
    attached(&hearth)?;
    wait_states(&hearth, &["current", "current"])?;
    let held = hearth.connect("d")?.read(at as u64, BLOCK as u32)?;
    ensure!(held == [2; BLOCK], "{}", held[0]);
    let events = hearth.ok(&["events", "--disk", "d", "--json"])?;
    ensure!(!events.contains("leg-changed"), "{events}");
    hearth.stop()?;
    ensure!(std::fs::read(&legs[0])? == std::fs::read(&legs[1])?);
    Ok(())
}
