//! A full file system under a sparse flash file: the disks go on from their origins, through
//! restarts, and nothing that flash kept from before is ever read again. And under a sparse origin: what is
//! answered has a place there.
//!
//! Needs root, for a small file system of its own; says so and does nothing without.

use anyhow::{Context, Result, ensure};
use hearth_rig::daemon::path;
use hearth_rig::nbd::Client;
use hearth_rig::rng::Rng;
use hearth_rig::{Hearth, wait};
use serde_json::Value;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);
const SIZE: u64 = 32 * MIB;

/// A small ext4 in a file, mounted; unmounted when dropped.
struct SmallFs {
    at: PathBuf,
}

impl SmallFs {
    /// `None` if this user may not mount.
    fn new(dir: &Path, bytes: u64) -> Result<Option<SmallFs>> {
        // SAFETY: geteuid has no preconditions and cannot fail.
        if unsafe { libc::geteuid() } != 0 {
            eprintln!("skipped: mounting a small file system needs root");
            return Ok(None);
        }
        let (image, at) = (dir.join("flash-small.ext4"), dir.join("flash-small"));
        File::create(&image)?.set_len(bytes)?;
        std::fs::create_dir(&at)?;
        let run = |program: &str, args: &[&str]| -> Result<()> {
            let out = Command::new(program).args(args).output()?;
            let words = String::from_utf8_lossy(&out.stderr).into_owned();
            ensure!(out.status.success(), "{program}: {words}");
            Ok(())
        };
        // Nothing set aside for root: the daemon under test is root.
        run(
            "mkfs.ext4",
            &["-q", "-m", "0", "-O", "^has_journal", path(&image)],
        )?;
        run("mount", &["-o", "loop", path(&image), path(&at)])?;
        Ok(Some(SmallFs { at }))
    }

    /// Takes all the room there is.
    fn fill(&self) -> Result<()> {
        let mut file = File::create(self.at.join("filler"))?;
        let mut piece = vec![0x5A; MIB as usize];
        while !piece.is_empty() {
            match file.write(&piece) {
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::StorageFull => piece.truncate(piece.len() / 2),
                Err(e) => return Err(e.into()),
            }
        }
        file.sync_all()?;
        Ok(())
    }

    /// Gives it back.
    fn free(&self) -> Result<()> {
        std::fs::remove_file(self.at.join("filler"))?;
        // Freed blocks count once the file system has written that they are free.
        File::open(&self.at)?.sync_all()?;
        Ok(())
    }
}

impl Drop for SmallFs {
    fn drop(&mut self) {
        // Lazily: after a failure the daemon still has its flash there.
        let _ = Command::new("umount").arg("-l").arg(&self.at).output();
    }
}

fn pool(hearth: &Hearth) -> Result<Value> {
    Ok(serde_json::from_str(
        &hearth.ok(&["pool", "show", "--json"])?,
    )?)
}

fn wait_for_state(hearth: &Hearth, state: &str) -> Result<()> {
    wait::until(state, LIMIT, || {
        (pool(hearth).ok()?["state"] == state).then_some(())
    })
    .with_context(|| hearth.log())
}

/// Random writes that go into the model as well.
fn write(client: &mut Client, model: &mut [u8], rng: &mut Rng, count: u64) -> Result<()> {
    for _ in 0..count {
        let len = (1 + rng.below(16)) * 4096;
        let at = rng.below((SIZE - len) / 4096) * 4096;
        let range = at as usize..(at + len) as usize;
        rng.fill(&mut model[range.clone()]);
        client.write(at, &model[range])?;
    }
    client.flush()?;
    Ok(())
}

fn same(client: &mut Client, model: &[u8]) -> Result<()> {
    for at in (0..SIZE).step_by(MIB as usize) {
        let data = client.read(at, MIB as u32)?;
        ensure!(
            data == model[at as usize..(at + MIB) as usize],
            "wrong data in the MiB at {at}"
        );
    }
    Ok(())
}

/// Writes until there is no room on flash for it; no request fails. How soon that is depends on how much
/// of its room the flash file has already.
fn until_off(hearth: &Hearth, model: &mut [u8], rng: &mut Rng) -> Result<Client> {
    let mut client = hearth.connect("vm")?;
    for _ in 0..100 {
        if pool(hearth)?["state"] == "cache-off" {
            break;
        }
        write(&mut client, model, rng, 20)?;
    }
    wait_for_state(hearth, "cache-off")?;
    same(&mut client, model)?;
    Ok(client)
}

/// A pool on a sparse file in a file system with little room, served, with one disk.
fn serving(hearth: &mut Hearth, fs: &SmallFs, bytes: u64) -> Result<Vec<u8>> {
    let flash = fs.at.join("flash.img");
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(&flash)?
        .set_len(bytes)?;
    hearth.set_flash(flash.clone());
    hearth.ok(&["pool", "create", "--flash", path(&flash)])?;
    hearth.start()?;
    let origin = hearth.origin("vm.img", SIZE)?;
    hearth.add("vm", path(&origin), &["--mode", "write-back"])?;
    Ok(std::fs::read(origin)?)
}

#[test]
fn a_full_file_system_under_the_flash_takes_no_disk_down() -> Result<()> {
    let mut hearth = Hearth::bare()?;
    let Some(fs) = SmallFs::new(hearth.dir(), 96 * MIB)? else {
        return Ok(());
    };
    let mut model = serving(&mut hearth, &fs, 128 * MIB)?;
    let mut rng = Rng::new(11);
    let mut client = hearth.connect("vm")?;
    write(&mut client, &mut model, &mut rng, 100)?;
    same(&mut client, &model)?;

    // While it runs: no request fails, and the reason is named.
    fs.fill()?;
    drop(client);
    let client = until_off(&hearth, &mut model, &mut rng)?;
    let said = hearth.ok(&["pool", "show"])?;
    ensure!(
        said.contains("file system that holds") && said.contains("is full"),
        "{said}"
    );
    for said in [hearth.ok(&["stats"])?, hearth.said(&["disk", "list"])?] {
        ensure!(said.contains("cache is off"), "{said}");
    }
    wait::until("it is logged", LIMIT, || {
        hearth.log().contains("cache is off").then_some(())
    })?;
    drop(client);
    // Everything gets to the origin, so this is an end like any other.
    hearth.stop()?;
    ensure!(
        std::fs::read(hearth.dir().join("vm.img"))? == model,
        "the origin is not the disk"
    );

    // A start on the full file system, and one after a crash there.
    for crash in [true, false] {
        hearth.start()?;
        let mut client = until_off(&hearth, &mut model, &mut rng)?;
        write(&mut client, &mut model, &mut rng, 100)?;
        same(&mut client, &model)?;
        if crash {
            hearth.kill9()?;
        } else {
            hearth.stop()?;
        }
    }

    // With room, what flash has from before must not be read.
    fs.free()?;
    hearth.start()?;
    ensure!(pool(&hearth)?["state"] == "serving", "{}", hearth.log());
    let mut client = hearth.connect("vm")?;
    same(&mut client, &model)?;
    write(&mut client, &mut model, &mut rng, 100)?;
    same(&mut client, &model)?;
    hearth.stop()?;
    Ok(())
}

#[test]
fn what_is_dirty_on_a_full_file_system_is_served_and_destaged() -> Result<()> {
    let mut hearth = Hearth::bare()?;
    let Some(fs) = SmallFs::new(hearth.dir(), 96 * MIB)? else {
        return Ok(());
    };
    let mut model = serving(&mut hearth, &fs, 128 * MIB)?;
    let mut client = hearth.connect("vm")?;
    write(&mut client, &mut model, &mut Rng::new(12), 100)?;
    // The log's last segment has no summary, which is what a start has to write.
    hearth.kill9()?;
    fs.fill()?;
    hearth.start()?;
    ensure!(pool(&hearth)?["state"] == "cache-off", "{}", hearth.log());
    let mut client = hearth.connect("vm")?;
    same(&mut client, &model)?;
    write(&mut client, &mut model, &mut Rng::new(13), 100)?;
    same(&mut client, &model)?;
    wait::until("all is destaged", LIMIT, || {
        (pool(&hearth).ok()?["dirty"] == 0).then_some(())
    })?;
    client.flush()?;
    ensure!(
        std::fs::read(hearth.dir().join("vm.img"))? == model,
        "the origin is not the disk"
    );
    hearth.stop()?;
    fs.free()?;
    hearth.start()?;
    let mut client = hearth.connect("vm")?;
    same(&mut client, &model)?;
    hearth.stop()?;
    Ok(())
}

/// Makes room, and the cache comes back: at the next start, or by itself under a supervisor.
#[test]
fn room_that_is_there_again_is_told_and_used() -> Result<()> {
    let mut hearth = Hearth::bare()?;
    let Some(fs) = SmallFs::new(hearth.dir(), 96 * MIB)? else {
        return Ok(());
    };
    let mut model = serving(&mut hearth, &fs, 48 * MIB)?;
    let mut rng = Rng::new(14);
    let told = "there is room for all of the flash file again";
    fs.fill()?;
    until_off(&hearth, &mut model, &mut rng)?;
    wait::until("how much room lacks", LIMIT, || {
        let said = hearth.ok(&["pool", "show"]).ok()?;
        said.contains("the file system lacks").then_some(())
    })?;
    ensure!(!hearth.said(&["disk", "list"])?.contains(told));
    fs.free()?;
    wait::until("it is said", LIMIT, || {
        let said = hearth.ok(&["pool", "show"]).ok()?;
        said.contains(told).then_some(())
    })?;
    ensure!(hearth.said(&["disk", "list"])?.contains(told));
    wait::until("it is logged", LIMIT, || {
        hearth.log().contains(told).then_some(())
    })?;
    hearth.stop()?;

    // It stays while it lacks room, and ends for the supervisor to start it once there is some.
    fs.fill()?;
    hearth.serve_args = vec!["--exit-when-room".to_owned(), "1s".to_owned()];
    hearth.start()?;
    until_off(&hearth, &mut model, &mut rng)?;
    fs.free()?;
    let status = hearth.ended()?;
    ensure!(status.code() == Some(1), "ended with {status}");
    ensure!(hearth.log().contains("stopped because"), "{}", hearth.log());
    hearth.start()?;
    wait_for_state(&hearth, "serving")?;
    let mut client = hearth.connect("vm")?;
    same(&mut client, &model)?;
    write(&mut client, &mut model, &mut rng, 20)?;
    same(&mut client, &model)?;
    hearth.stop()?;
    Ok(())
}

/// Writes whole MiB that are no piece's yet, until one is refused; that is for want of room, and no other reason. Tells
/// how many were taken.
fn until_no_room(client: &mut Client, model: &mut [u8], taken: &mut Vec<u64>) -> Result<u64> {
    let mut count = 0;
    for piece in (0..SPARSE / MIB).filter(|piece| piece % 2 == 0) {
        if taken.contains(&piece) {
            continue;
        }
        let range = (piece * MIB) as usize..((piece + 1) * MIB) as usize;
        let data = vec![piece as u8 + 1; MIB as usize];
        match client.write(piece * MIB, &data) {
            Ok(()) => {
                model[range].copy_from_slice(&data);
                taken.push(piece);
                count += 1;
            }
            Err(e) => {
                ensure!(e.kind() == ErrorKind::StorageFull, "refused with {e}");
                return Ok(count);
            }
        }
    }
    anyhow::bail!("all of {count} MiB were taken, more than there is room for")
}

/// Bytes of a sparse origin: more than the file system it lies on has.
const SPARSE: u64 = 256 * MIB;

fn sparse(dir: &Path, name: &str) -> Result<PathBuf> {
    let file = dir.join(name);
    File::create(&file)?.set_len(SPARSE)?;
    Ok(file)
}

fn same_sparse(client: &mut Client, model: &[u8]) -> Result<()> {
    for at in (0..SPARSE).step_by(MIB as usize) {
        let range = at as usize..(at + MIB) as usize;
        ensure!(
            client.read(at, MIB as u32)? == model[range],
            "wrong data at {at}"
        );
    }
    Ok(())
}

#[test]
fn a_write_into_a_hole_is_taken_only_while_there_is_room_for_all_that_is_dirty() -> Result<()> {
    let mut hearth = Hearth::bare()?;
    let Some(fs) = SmallFs::new(hearth.dir(), 64 * MIB)? else {
        return Ok(());
    };
    // Somebody else's, who will give it back: of what the disk leaves to the file system nothing more is to be had.
    let others = fs.at.join("others");
    std::fs::write(&others, vec![0x5A; 8 << 20])?;
    // What is dirty stays so.
    hearth.serve_args = vec!["--destage-rate".to_owned(), "64K".to_owned()];
    hearth.create_pool("512M")?;
    hearth.start()?;
    let origin = sparse(&fs.at, "thin.img")?;
    hearth.add("vm", path(&origin), &["--mode", "write-back"])?;
    hearth.add(
        "twin",
        path(&sparse(&fs.at, "twin.img")?),
        &["--mode", "write-back"],
    )?;
    let full = hearth.origin("full.img", SIZE)?;
    hearth.add("full", path(&full), &["--mode", "write-back"])?;
    let mut model = vec![0; SPARSE as usize];
    let (mut client, mut taken) = (hearth.connect("vm")?, Vec::new());
    let count = until_no_room(&mut client, &mut model, &mut taken)?;
    ensure!(
        (36..56).contains(&count),
        "{count} MiB were taken of about 50"
    );
    client.flush()?;
    // What one has taken another one has not got; what lies elsewhere is not concerned.
    let refused = hearth.connect("twin")?.write(0, &vec![7; MIB as usize]);
    let refused = refused.err().map(|e| e.kind());
    ensure!(refused == Some(ErrorKind::StorageFull), "{refused:?}");
    hearth.connect("full")?.write(0, &vec![7; MIB as usize])?;
    let events = hearth.ok(&["events", "--disk", "vm", "--json"])?;
    ensure!(events.contains("origin-no-room"), "{events}");

    // Nothing that was answered is lost, and all of it finds its place.
    hearth.kill9()?;
    hearth.serve_args.clear();
    hearth.start()?;
    let mut client = hearth.connect("vm")?;
    same_sparse(&mut client, &model)?;
    hearth.ok(&["disk", "flush", "vm"])?;
    ensure!(
        std::fs::read(&origin)? == model,
        "the origin is not the disk"
    );

    // Others take the rest: what has a place is written over, and nothing else.
    fs.fill()?;
    let refused = until_no_room(&mut client, &mut model, &mut taken.clone())?;
    ensure!(
        refused == 0,
        "{refused} MiB were taken, and there is no room"
    );
    let over = taken.first().copied().context("nothing was taken")?;
    let range = (over * MIB) as usize..((over + 1) * MIB) as usize;
    model[range.clone()].fill(0xEE);
    client.write(over * MIB, &model[range])?;
    same_sparse(&mut client, &model)?;

    // With room it goes on.
    std::fs::remove_file(&others)?;
    fs.free()?;
    let piece = (SPARSE / MIB - 1) * MIB;
    model[piece as usize..].fill(0xDD);
    wait::until("there is room again", LIMIT, || {
        client.write(piece, &model[piece as usize..]).ok()
    })?;
    same_sparse(&mut client, &model)?;
    hearth.ok(&["disk", "flush", "vm"])?;
    ensure!(
        std::fs::read(&origin)? == model,
        "the origin is not the disk"
    );
    hearth.stop()?;
    Ok(())
}

#[test]
fn a_mirror_needs_room_at_each_of_its_legs() -> Result<()> {
    let mut hearth = Hearth::bare()?;
    let Some(fs) = SmallFs::new(hearth.dir(), 64 * MIB)? else {
        return Ok(());
    };
    hearth.create_pool("512M")?;
    hearth.start()?;
    let (near, tight) = (sparse(hearth.dir(), "near")?, sparse(&fs.at, "tight")?);
    hearth.ok(&[
        "disk",
        "add",
        "vm",
        "--mirror",
        path(&near),
        "--mirror",
        path(&tight),
    ])?;
    let legs = |want: &str| {
        wait::until(want, LIMIT, || {
            let said = hearth.ok(&["disk", "show", "vm", "--json"]).ok()?;
            let info: Value = serde_json::from_str(&said).ok()?;
            let legs = info["legs"].as_array()?;
            legs.iter()
                .all(|leg| leg["state"] == "current")
                .then_some(())
        })
        .with_context(|| hearth.ok(&["disk", "show", "vm"]).unwrap_or_default())
    };
    legs("both legs hold the disk")?;
    fs.fill()?;
    let mut model = vec![0; SPARSE as usize];
    let (mut client, mut taken) = (hearth.connect("vm")?, Vec::new());
    let count = until_no_room(&mut client, &mut model, &mut taken)?;
    ensure!(
        count == 0,
        "{count} MiB were taken, and one leg has no room"
    );
    fs.free()?;
    wait::until("there is room again", LIMIT, || {
        let data = vec![1; MIB as usize];
        client.write(0, &data).ok()
    })?;
    model[..MIB as usize].fill(1);
    taken.push(0);
    until_no_room(&mut client, &mut model, &mut taken)?;
    same_sparse(&mut client, &model)?;
    hearth.ok(&["disk", "flush", "vm"])?;
    legs("no leg was taken out")?;
    drop(client);
    hearth.stop()?;
    for leg in [&near, &tight] {
        ensure!(
            std::fs::read(leg)? == model,
            "{} is not the disk",
            leg.display()
        );
    }
    Ok(())
}
