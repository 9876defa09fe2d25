//! Scrubs of a datastore in two directories: silent corruption and changes by another program are found, only what a guest
//! wrote decides, and everything else waits for an administrator.

use std::fs::{self, File, FileTimes, OpenOptions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::datastore_mirrored::{Writer, both_current, lab, same, seen};
use crate::stored::{LIMIT, Lab, create, pattern, read, root, write};
use anyhow::{Context, Result, ensure};
use hearth_nfs::v3::{Args, Named};
use hearth_rig::daemon::path;
use hearth_rig::wait::until;
use serde_json::Value;

const BLOCK: u64 = 4096;
const SIZE: u64 = 4 << 20;

/// Overwrites a part of a file as a failing disk does: its times stay.
fn corrupt(file: &Path, offset: u64) -> Result<()> {
    let times = File::open(file)?.metadata()?;
    let times = FileTimes::new()
        .set_accessed(times.accessed()?)
        .set_modified(times.modified()?);
    let file = OpenOptions::new().write(true).open(file)?;
    file.write_all_at(&[0xBD; BLOCK as usize], offset)?;
    file.set_times(times)?;
    Ok(())
}

fn second(lab: &Lab) -> PathBuf {
    lab.hearth.dir().join("b")
}

fn scrub(lab: &Lab) -> Result<Value> {
    Ok(lab.show()?["scrub"].clone())
}

/// A file of blocks that a client wrote, all of them in both directories.
fn written_disk(lab: &Lab) -> Result<Vec<u8>> {
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let disk = create(&mut client, &dir, "disk.img")?;
    for at in (0..SIZE).step_by(64 << 10) {
        write(&mut client, &disk, at, &pattern(at, 3, 64 << 10))?;
    }
    lab.hearth.ok(&["datastore", "flush", "vms"])?;
    Ok(disk)
}

#[test]
fn scrub_repairs_what_a_guest_wrote() -> Result<()> {
    let Some(mut lab) = lab()? else { return Ok(()) };
    both_current(&lab)?;
    let disk = written_disk(&lab)?;
    let before = same(&lab)?;
    let (a, b) = (lab.vms.join("disk.img"), second(&lab).join("disk.img"));
    for block in [7, 8, 300] {
        corrupt(&b, block * BLOCK)?;
    }
    for block in [100, 301, SIZE / BLOCK - 1] {
        corrupt(&a, block * BLOCK)?;
    }
    let said = lab
        .hearth
        .ok(&["datastore", "scrub", "vms", "--rate", "0"])?;
    ensure!(said.contains("places repaired"), "{said}");
    ensure!(same(&lab)? == before, "the directories are not as before");
    let found = scrub(&lab)?;
    ensure!(
        found["repaired"] == 6 * BLOCK && found["undecided"] == 0,
        "{found}"
    );
    let events = lab.hearth.ok(&["events", "--json"])?;
    ensure!(events.contains("datastore-scrub-repaired"), "{events}");
    // The repairs are no change by another program: what is cached stays.
    let mut client = lab.client()?;
    ensure!(read(&mut client, &disk, 0, 65536)? == pattern(0, 3, 65536));
    let files = lab.hearth.ok(&["datastore", "files", "vms", "--json"])?;
    let files: Value = serde_json::from_str(&files)?;
    ensure!(files[0]["cached"].as_u64() > Some(SIZE / 2), "{files}");
    let said = lab.hearth.ok(&["datastore", "scrub", "vms", "--json"])?;
    let info: Value = serde_json::from_str(&said)?;
    ensure!(
        info["scrub"]["repairs"] == 0 && info["scrub"]["checked"] == SIZE,
        "{info}"
    );
    lab.hearth.stop()?;
    Ok(())
}

/// A copy that was read from a corrupt directory proves nothing, and neither does anything about names, owners and small files.
#[test]
fn scrub_lists_undecided_places_until_told() -> Result<()> {
    let lab = Lab::mirrored_filled(|first| {
        fs::write(first.join("old.img"), pattern(0, 9, SIZE as usize))?;
        fs::write(first.join("vm.vmx"), b"memsize = 4096")?;
        fs::write(first.join("gone.log"), b"log")?;
        Ok(fs::create_dir(first.join("iso"))?)
    });
    let mut lab = match lab {
        Err(e) if format!("{e:#}").contains("cannot be marked as a tree") => return Ok(()),
        other => other?,
    };
    both_current(&lab)?;
    let (first, second) = (lab.vms.clone(), second(&lab));
    corrupt(&first.join("old.img"), 5 * BLOCK)?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let at = Named {
        dir: &dir,
        name: b"old.img",
    };
    let found = client.call(&Args::Lookup(at))?.ok()?;
    let old = found.reader().opaque(64)?.to_vec();
    // The corrupt block is cached now.
    for at in (0..SIZE).step_by(64 << 10) {
        read(&mut client, &old, at, 64 << 10)?;
    }
    fs::write(second.join("vm.vmx"), b"memsize = 1024")?;
    fs::write(second.join("iso/strange.iso"), b"strange")?;
    fs::remove_file(second.join("gone.log"))?;
    fs::set_permissions(second.join("iso"), fs::Permissions::from_mode(0o700))?;
    let before = (seen(&first)?, seen(&second)?);
    let refused = lab
        .hearth
        .refused(&["datastore", "scrub", "vms", "--rate", "0"])?;
    ensure!(
        refused.contains("nothing shows which one is right"),
        "{refused}"
    );
    ensure!(
        (seen(&first)?, seen(&second)?) == before,
        "something undecided was written"
    );
    let found = scrub(&lab)?;
    let places = found["differences"].as_array().context("differences")?;
    let mut listed: Vec<String> = places
        .iter()
        .map(|place| {
            format!(
                "{} {}",
                place["path"].as_str().unwrap_or(""),
                place["what"].as_str().unwrap_or("")
            )
        })
        .collect();
    listed.sort();
    ensure!(
        listed == ["/ names", "iso names", "old.img content", "vm.vmx content"],
        "{listed:?}"
    );
    // Over a restart the list stays, and nothing is decided by itself.
    lab.hearth.stop()?;
    lab.hearth.start()?;
    lab.address()?;
    ensure!(scrub(&lab)?["differences"] == found["differences"]);
    lab.hearth
        .refused(&["datastore", "scrub", "vms", "--prefer", "/nowhere"])?;
    lab.hearth
        .ok(&["datastore", "scrub", "vms", "--prefer", path(&second)])?;
    both_current(&lab)?;
    let now = same(&lab)?;
    let content = |name: &str| now.get(Path::new(name)).map(|(_, content)| content.clone());
    ensure!(content("vm.vmx") == Some(b"memsize = 1024".to_vec()));
    ensure!(content("iso/strange.iso") == Some(b"strange".to_vec()));
    ensure!(content("gone.log").is_none());
    ensure!(content("old.img") == Some(pattern(0, 9, SIZE as usize)));
    let mut client = lab.client()?;
    ensure!(
        read(&mut client, &old, 0, 65536)? == pattern(0, 9, 65536),
        "the copy of the corrupt block was served"
    );
    lab.hearth
        .ok(&["datastore", "scrub", "vms", "--rate", "0"])?;
    lab.hearth.stop()?;
    Ok(())
}

/// Writes in progress are no differences, and a scrub continues after a crash.
#[test]
fn scrub_under_load_survives_kill() -> Result<()> {
    let Some(mut lab) = lab()? else { return Ok(()) };
    both_current(&lab)?;
    written_disk(&lab)?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let busy = create(&mut client, &dir, "busy.img")?;
    let small = create(&mut client, &dir, "small.log")?;
    let start = |lab: &Lab| -> Result<Vec<Writer>> {
        let files = [busy.clone(), small.clone()];
        let started = files.map(|file| Writer::start(lab, file, true));
        started.into_iter().collect()
    };
    let writers = start(&lab)?;
    lab.hearth
        .ok(&["datastore", "scrub", "vms", "--rate", "1M", "--no-wait"])?;
    writers.iter().try_for_each(|writer| writer.wait(20))?;
    lab.hearth.kill9()?;
    writers.into_iter().for_each(|writer| drop(writer.end()));
    lab.hearth.start()?;
    let writers = start(&lab)?;
    let found = scrub(&lab)?;
    ensure!(found["active"] == true, "{found}");
    lab.hearth
        .ok(&["datastore", "scrub", "vms", "--rate", "0", "--every", "7"])?;
    for _ in 0..10 {
        until("the scrub ends", LIMIT, || {
            (scrub(&lab).ok()?["active"] == false).then_some(())
        })?;
        let found = scrub(&lab)?;
        ensure!(
            found["undecided"] == 0 && found["repairs"] == 0 && found["every_days"] == 7,
            "{found}"
        );
        writers.iter().try_for_each(|writer| writer.wait(5))?;
        lab.hearth
            .ok(&["datastore", "scrub", "vms", "--anew", "--no-wait"])?;
    }
    for writer in writers {
        writer.end().1?;
    }
    lab.hearth.stop()?;
    Ok(())
}

/// After a crash a file's times say nothing. One corrupt block is no reason to throw away what was acknowledged.
#[test]
fn corrupt_block_keeps_dirty_data_after_crash() -> Result<()> {
    let mut lab = Lab::new()?;
    let disk = written_disk(&lab)?;
    let mut client = lab.client()?;
    let newest = pattern(2 << 20, 8, 64 << 10);
    write(&mut client, &disk, 2 << 20, &newest)?;
    lab.hearth.kill9()?;
    corrupt(&lab.vms.join("disk.img"), 5 * BLOCK)?;
    lab.hearth.start()?;
    let mut client = lab.client()?;
    ensure!(
        read(&mut client, &disk, 2 << 20, 64 << 10)? == newest,
        "{}",
        lab.hearth.log()
    );
    lab.hearth.ok(&["datastore", "flush", "vms"])?;
    let content = fs::read(lab.vms.join("disk.img"))?;
    ensure!(
        content[2 << 20..][..64 << 10] == newest,
        "acknowledged data was thrown away"
    );
    // A file that another program changed as a whole is another one, and the loss is reported.
    write(&mut client, &disk, 2 << 20, &pattern(2 << 20, 9, 64 << 10))?;
    lab.hearth.kill9()?;
    fs::write(lab.vms.join("disk.img"), pattern(0, 77, SIZE as usize))?;
    lab.hearth.start()?;
    let mut client = lab.client()?;
    ensure!(read(&mut client, &disk, 0, 65536)? == pattern(0, 77, 65536));
    ensure!(lab.hearth.ok(&["events", "--json"])?.contains("data-lost"));
    lab.hearth.stop()?;
    Ok(())
}

/// A file without dirty blocks is served at once after a crash, and no cached copy answers before it was compared.
#[test]
fn file_changed_after_crash_serves_no_older_blocks() -> Result<()> {
    let mut lab = Lab::new()?;
    let disk = written_disk(&lab)?;
    let mut client = lab.client()?;
    for round in 1..=2u8 {
        lab.hearth.kill9()?;
        let file = lab.vms.join("disk.img");
        corrupt(&file, 300 * BLOCK)?;
        corrupt(&file, u64::from(round) * 400 * BLOCK)?;
        let content = fs::read(&file)?;
        lab.hearth.start()?;
        client = lab.client()?;
        let reads_all = |client: &mut _| -> Result<bool> {
            let mut all = Vec::new();
            for at in (0..SIZE).step_by(64 << 10) {
                all.extend(read(client, &disk, at, 64 << 10)?);
            }
            Ok(all == content)
        };
        ensure!(reads_all(&mut client)?, "a stale block was served");
        // The drop of the copies survives the next crash, and so does a write.
        until("the copies are compared", LIMIT, || {
            let log = lab.hearth.log();
            log.contains("the file changed while Hearth was stopped")
                .then_some(())
        })
        .with_context(|| lab.hearth.log())?;
        ensure!(reads_all(&mut client)?, "a stale block was served");
        write(
            &mut client,
            &disk,
            2 << 20,
            &pattern(2 << 20, round, 64 << 10),
        )?;
        lab.hearth.ok(&["datastore", "flush", "vms"])?;
    }
    drop(client);
    lab.hearth.stop()?;
    Ok(())
}
