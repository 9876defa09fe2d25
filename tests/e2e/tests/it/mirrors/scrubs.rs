//! Scrubs of mirrors: what rots on one leg is found, repaired where something tells what is right, and told where
//! nothing does; also if the daemon is killed in between.

use super::*;
use hearth_rig::nbd::Command;
use serde_json::Value;
use std::os::unix::fs::FileExt;

/// What this leg holds at `offset` is something else from now on, and nobody is told.
fn rot(leg: &Path, offset: u64, len: usize) -> Result<()> {
    let file = std::fs::OpenOptions::new().write(true).open(leg)?;
    file.write_all_at(&vec![0xEE; len], offset)?;
    Ok(file.sync_all()?)
}

fn holds(leg: &Path, offset: u64, byte: u8) -> Result<bool> {
    let mut found = vec![0; BLOCK];
    std::fs::File::open(leg)?.read_exact_at(&mut found, offset)?;
    Ok(found == vec![byte; BLOCK])
}

fn scrub(hearth: &Hearth) -> Result<Value> {
    let info: Value = serde_json::from_str(&hearth.ok(&["disk", "show", "d", "--json"])?)?;
    Ok(info["upkeep"]["scrub"].clone())
}

/// A disk with the same on both legs, in this mode; some of it was read or written lately.
fn filled(mode: &str) -> Result<(Hearth, PathBuf, PathBuf)> {
    let (hearth, a, b) = two_legs()?;
    add(&hearth, &[path(&a), path(&b)], &["--mode", mode])?;
    wait_states(&hearth, &["current", "current"])?;
    let mut client = hearth.connect("d")?;
    client.write(0, &vec![7; 1 << 20])?;
    client.flush()?;
    client.read(0, 1 << 20)?;
    Ok((hearth, a, b))
}

#[test]
fn where_nothing_tells_somebody_has_to() -> Result<()> {
    let (mut hearth, a, b) = filled("off")?;
    rot(&b, 4096, 2 * BLOCK)?;
    rot(&a, 40 * 4096, BLOCK)?;
    let said = hearth.refused(&["disk", "scrub", "d", "--rate", "0"])?;
    ensure!(
        said.contains("differ in 2 places") && said.contains("--prefer"),
        "{said}"
    );
    let found = scrub(&hearth)?;
    let places: Vec<(u64, u64)> = (found["undecided"].as_array().context("none")?.iter())
        .filter_map(|u| Some((u["offset"].as_u64()?, u["length"].as_u64()?)))
        .collect();
    ensure!(places == [(4096, 8192), (40 * 4096, 4096)], "{found}");
    let sums = &found["undecided"][0]["legs"];
    ensure!(
        sums[0]["leg"] == path(&a) && sums[0]["sum"] != sums[1]["sum"],
        "{found}"
    );
    wait_event(&hearth, "scrub-undecided", "\"undecided\":2")?;
    // Nothing was written, and it is known after a restart.
    ensure!(holds(&a, 4096, 7)? && holds(&b, 4096, 0xEE)? && holds(&a, 40 * 4096, 0xEE)?);
    hearth.stop()?;
    // Files that somebody else has written while nobody looked would be copied as a whole.
    hearth.start()?;
    attached(&hearth)?;
    let kept = scrub(&hearth)?;
    ensure!(kept["undecided"] == found["undecided"], "{kept}");
    let wrong = hearth.refused(&["disk", "scrub", "d", "--prefer", "/nowhere"])?;
    ensure!(wrong.contains("no leg"), "{wrong}");
    hearth.ok(&["disk", "scrub", "d", "--prefer", path(&a)])?;
    wait_event(&hearth, "scrub-repaired", "\"repairs\":2")?;
    ensure!(holds(&b, 4096, 7)? && holds(&b, 40 * 4096, 0xEE)?);
    hearth.ok(&["disk", "scrub", "d"])?;
    wait_event(&hearth, "scrub-done", "\"partial\":0")?;
    hearth.stop()?;
    ensure!(std::fs::read(&a)? == std::fs::read(&b)?);
    Ok(())
}

/// The guest read half of what had rotted on one leg, from that leg. What is cached of it decides nothing; when a leg is
/// preferred, it is dropped, and so the guest reads what that leg holds.
#[test]
fn copies_read_from_legs_decide_nothing() -> Result<()> {
    let (mut hearth, a, b) = filled("off")?;
    hearth.ok(&["disk", "set", "d", "--mode", "write-through"])?;
    const PLACES: u64 = 40;
    let mut client = hearth.connect("d")?;
    // Which leg is read here?
    rot(&a, 0, BLOCK)?;
    let (bad, good) = match client.read(0, BLOCK as u32)? == [7; BLOCK] {
        true => (b, a),
        false => (a, b),
    };
    client.write(0, &[7; BLOCK])?;
    for n in 0..PLACES {
        rot(&bad, (n + 1) * 6 * 4096, BLOCK)?;
    }
    let mut wrong = 0;
    for n in (0..PLACES).step_by(2) {
        // Some of it in RAM, some on flash.
        if n % 4 == 0 {
            client.call(Command::Cache, (n + 1) * 6 * 4096, BLOCK as u32, &[])?;
        }
        wrong += usize::from(client.read((n + 1) * 6 * 4096, BLOCK as u32)? != [7; BLOCK]);
    }
    ensure!(wrong > 0, "no block was read from the leg that is wrong");
    let said = hearth.refused(&["disk", "scrub", "d", "--rate", "0"])?;
    ensure!(
        said.contains(&format!("differ in {PLACES} places")),
        "{said}"
    );
    ensure!(scrub(&hearth)?["repairs"] == 0, "something was written");
    for n in 0..PLACES {
        let at = (n + 1) * 6 * 4096;
        ensure!(holds(&good, at, 7)? && holds(&bad, at, 0xEE)?, "block {n}");
    }
    hearth.ok(&["disk", "scrub", "d", "--prefer", path(&good)])?;
    for n in 0..PLACES {
        let at = (n + 1) * 6 * 4096;
        ensure!(
            client.read(at, BLOCK as u32)? == [7; BLOCK],
            "block {n} is cached as it was"
        );
        ensure!(holds(&bad, at, 7)?, "block {n}");
    }
    drop(client);
    hearth.ok(&["disk", "scrub", "d"])?;
    wait_event(&hearth, "scrub-done", "\"partial\":0")?;
    hearth.stop()?;
    ensure!(std::fs::read(&bad)? == std::fs::read(&good)?);
    Ok(())
}

#[test]
fn copy_written_by_guest_decides_between_legs() -> Result<()> {
    let (mut hearth, a, b) = filled("write-back")?;
    hearth.ok(&["disk", "flush", "d"])?;
    rot(&b, 4096, BLOCK)?;
    rot(&a, 8192, BLOCK)?;
    let said = hearth.ok(&["disk", "scrub", "d", "--rate", "0"])?;
    ensure!(said.contains("2 places repaired"), "{said}");
    wait_event(&hearth, "scrub-repaired", "\"repairs\":2")?;
    for leg in [&a, &b] {
        ensure!(holds(leg, 4096, 7)? && holds(leg, 8192, 7)?);
    }
    // Both legs the same, and something else than what is cached: nobody can know.
    rot(&a, 4096, BLOCK)?;
    rot(&b, 4096, BLOCK)?;
    hearth.ok(&["disk", "scrub", "d"])?;
    let found = scrub(&hearth)?;
    ensure!(found["undecided"][0]["cached"] == true, "{found}");
    let mut client = hearth.connect("d")?;
    client.write(4096, &[7; BLOCK])?;
    client.flush()?;
    drop(client);
    hearth.ok(&["disk", "scrub", "d"])?;
    wait_event(&hearth, "scrub-done", "\"partial\":0")?;
    hearth.stop()?;
    ensure!(std::fs::read(&a)? == std::fs::read(&b)?);
    Ok(())
}

/// A leg cannot read any more, and takes what is written.
#[test]
fn what_a_leg_cannot_read_is_written_again() -> Result<()> {
    if !have("scrubs: a leg cannot read", &["nbdkit"]) {
        return Ok(());
    }
    let mut hearth = Hearth::serving("160M")?;
    let small = |name: &str| -> Result<PathBuf> {
        let file = hearth.dir().join(name);
        std::fs::File::create(&file)?.set_len(40 * BLOCK as u64)?;
        Ok(file)
    };
    let (a, b) = (small("a")?, small("b")?);
    let fail = hearth.dir().join("fail");
    let mut remote = failing(&hearth, &b, "error-pread", &fail)?;
    let legs = [path(&a), &remote.uri("")];
    add(&hearth, &legs, &["--sole-user", "--mode", "off"])?;
    wait_states(&hearth, &["current", "current"])?;
    let mut client = hearth.connect("d")?;
    client.write(0, &vec![7; 40 * BLOCK])?;
    client.flush()?;
    drop(client);
    rot(&b, 3 * 4096, BLOCK)?;
    std::fs::write(&fail, b"")?;
    let said = hearth.ok(&["disk", "scrub", "d"])?;
    ensure!(said.contains("40 places repaired"), "{said}");
    ensure!(states(&hearth)? == ["current", "current"]);
    std::fs::remove_file(&fail)?;
    hearth.ok(&["disk", "scrub", "d"])?;
    hearth.stop()?;
    ensure!(std::fs::read(&a)? == std::fs::read(&b)?);
    remote.stop()
}

/// How a mirror is copied to and scrubbed is kept, and a scrub that was called off is gone on with.
#[test]
fn a_scrub_is_called_off_and_gone_on_with() -> Result<()> {
    let (mut hearth, _, _) = filled("off")?;
    hearth.ok(&["disk", "mirror", "d", "--rate", "5M", "--pause"])?;
    let said = hearth.ok(&["disk", "scrub", "d", "--every", "7"])?;
    ensure!(said.contains("every 7 days"), "{said}");
    hearth.ok(&["disk", "scrub", "d", "--rate", "8M", "--no-wait"])?;
    let at = |least: u64| {
        wait::until("it goes on", LIMIT, || {
            let at = scrub(&hearth).ok()?["at"].as_u64()?;
            (at >= least).then_some(at)
        })
    };
    let before = at(4 << 20)?;
    hearth.ok(&["disk", "scrub", "d", "--cancel"])?;
    wait_event(&hearth, "scrub-called-off", "\"at\"")?;
    let off = scrub(&hearth)?;
    ensure!(off["called_off"] == true && off["active"] == false, "{off}");
    hearth.ok(&["disk", "scrub", "d", "--no-wait"])?;
    let begun = scrub(&hearth)?["at"].as_u64().context("no place")?;
    ensure!(begun >= before, "it began anew at {begun}");
    hearth.stop()?;
    hearth.start()?;
    attached(&hearth)?;
    let info: Value = serde_json::from_str(&hearth.ok(&["disk", "show", "d", "--json"])?)?;
    let upkeep = &info["upkeep"];
    ensure!(
        upkeep["rate"] == 5 << 20 && upkeep["paused"] == true,
        "{info}"
    );
    ensure!(
        upkeep["scrub_every_days"] == 7 && upkeep["scrub_rate"] == 8 << 20,
        "{info}"
    );
    ensure!(upkeep["scrub"]["active"] == true, "{info}");
    ensure!(upkeep["scrub"]["at"].as_u64() >= Some(begun), "{info}");
    let said = hearth.ok(&["disk", "scrub", "d", "--rate", "0"])?;
    ensure!(said.contains("all the same"), "{said}");
    Ok(())
}

/// The daemon is killed while it compares and repairs, and a guest writes.
#[test]
fn a_daemon_killed_in_a_scrub_goes_on_with_it() -> Result<()> {
    let (mut hearth, a, b) = two_legs()?;
    add(&hearth, &[path(&a), path(&b)], &["--mode", "write-through"])?;
    wait_states(&hearth, &["current", "current"])?;
    let mut writer = Writer::new(12);
    let mut client = hearth.connect("d")?;
    writer.load(&mut client, LOAD, || Ok(()))?;
    drop(client);
    for cycle in 0..kills(6) {
        let anew = ["disk", "scrub", "d", "--anew", "--rate", "64M", "--no-wait"];
        if cycle % 2 == 0 {
            // A guest that reads what has rotted would see it; so there is none. Only the second leg rots: the first
            // one counts where both were being written when the daemon was killed before.
            for _ in 0..3 {
                rot(&b, writer.below(BLOCKS) * BLOCK as u64, BLOCK)?;
            }
            hearth.ok(&anew)?;
            let until = writer.below(BLOCKS) * BLOCK as u64;
            wait::until("it goes on", LIMIT, || {
                (scrub(&hearth).ok()?["at"].as_u64()? >= until).then_some(())
            })?;
            hearth.kill9()?;
        } else {
            hearth.ok(&anew)?;
            let mut client = hearth.connect("d")?;
            writer.load(&mut client, LOAD / 2, || hearth.kill9())?;
        }
        hearth.start()?;
        attached(&hearth)?;
        wait_states(&hearth, &["current", "current"])?;
        let went_on = hearth.ok(&["disk", "scrub", "d"]);
        if cycle % 2 == 1 {
            went_on.with_context(|| format!("cycle {cycle}: nothing had rotted"))?;
        } else if went_on.is_err() {
            // Nothing tells of what is not cached, but we know.
            hearth.ok(&["disk", "scrub", "d", "--prefer", path(&a)])?;
        }
        writer
            .check(&mut hearth.connect("d")?)
            .with_context(|| format!("cycle {cycle}"))?;
    }
    let said = hearth.ok(&["disk", "scrub", "d", "--rate", "0"])?;
    ensure!(said.contains("all the same"), "{said}");
    let client = hearth.connect("d")?;
    end(&mut hearth, &mut writer, client, &[&a, &b])
}

/// When a month has passed since the last scrub a daemon begins one by itself, and not another one when it is started again.
#[test]
fn a_scrub_that_is_due_is_run_once() -> Result<()> {
    const DAY_MS: u64 = 86_400_000;
    let (mut hearth, _, _) = filled("off")?;
    hearth.ok(&["disk", "scrub", "d", "--rate", "0"])?;
    let told = |hearth: &Hearth, kind: &str| -> Result<usize> {
        let kind = format!("\"event\":\"{kind}\"");
        let events = hearth.ok(&["events", "--json"])?;
        Ok(events.lines().filter(|e| e.contains(&kind)).count())
    };
    ensure!(told(&hearth, "scrub-done")? == 1);
    hearth.stop()?;
    // As if it had been so many days ago.
    let days_ago = |hearth: &Hearth, days: u64| -> Result<()> {
        let mut kept = std::fs::read_dir(hearth.dir().join("state/mirrors"))?.flatten();
        let kept = kept.find(|file| file.path().extension().is_some_and(|e| e == "json"));
        let file = kept.context("nothing is kept of scrubs")?.path();
        let mut habits: Value = serde_json::from_slice(&std::fs::read(&file)?)?;
        let ended = habits["scrub"]["ended_ms"].as_u64().context("no time")?;
        habits["scrub"]["ended_ms"] = (ended - days * DAY_MS).into();
        Ok(std::fs::write(&file, habits.to_string())?)
    };
    days_ago(&hearth, 29)?;
    hearth.start()?;
    attached(&hearth)?;
    // One that is asked for comes after what the mirror does by itself at a start.
    hearth.ok(&["disk", "mirror", "d", "--rate", "0"])?;
    ensure!(told(&hearth, "scrub-started")? == 1);
    hearth.stop()?;
    days_ago(&hearth, 2)?;
    hearth.start()?;
    wait::until("it is scrubbed", LIMIT, || {
        (told(&hearth, "scrub-done").ok()? == 2).then_some(())
    })
    .with_context(|| hearth.log())?;
    for _ in 0..2 {
        hearth.stop()?;
        hearth.start()?;
        attached(&hearth)?;
    }
    hearth.ok(&["disk", "scrub", "d"])?;
    ensure!(told(&hearth, "scrub-started")? == 3, "{}", hearth.log());
    Ok(())
}
