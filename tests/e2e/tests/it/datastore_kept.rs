//! Files of a datastore that are told by name to be all on flash, or on flash alone, and what is advised for files; many files; what
//! is dirty of them when Hearth is gone.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use crate::stored::nfs::{Client, get, set_size};
use crate::stored::{LIMIT, Lab, create, lasting_address, list, pattern, read, root, write};
use anyhow::{Context, Result, ensure};
use hearth_nfs::v3::{Args, Named, Status};
use hearth_rig::daemon::path;
use hearth_rig::wait::until;
use serde_json::Value;

const M: u64 = 1 << 20;

fn set(lab: &Lab, words: &[&str]) -> Result<()> {
    let words = [&["datastore", "set", "vms"], words].concat();
    lab.hearth.ok(&words).map(drop)
}

fn file(lab: &Lab, name: &str) -> Result<Value> {
    let text = lab.hearth.ok(&["datastore", "files", "vms", "--json"])?;
    let all: Vec<Value> = serde_json::from_str(&text)?;
    let found = all.iter().find(|file| file["path"] == name);
    Ok(found.with_context(|| format!("{name} in {all:?}"))?.clone())
}

fn promised(lab: &Lab) -> Result<Value> {
    let text = lab.hearth.ok(&["pool", "show", "--json"])?;
    Ok(serde_json::from_str::<Value>(&text)?["promised"].clone())
}

fn find(client: &mut Client, dir: &[u8], name: &str) -> Result<Vec<u8>> {
    let name = name.as_bytes();
    let found = client.call(&Args::Lookup(Named { dir, name }))?.ok()?;
    Ok(found.reader().opaque(64)?.to_vec())
}

fn remove(client: &mut Client, dir: &[u8], name: &str) -> Result<()> {
    let name = name.as_bytes();
    client.call(&Args::Remove(Named { dir, name }))?.ok()?;
    Ok(())
}

/// A datastore of two directories, unless this host's files cannot be given what it takes.
fn mirrored() -> Result<Option<Lab>> {
    match Lab::mirrored() {
        Err(e) if format!("{e:#}").contains("cannot be marked as a tree") => Ok(None),
        other => other.map(Some),
    }
}

#[test]
fn a_pinned_file_is_all_on_flash_and_advice_tells_of_it() -> Result<()> {
    pinned(Lab::new()?)
}

#[test]
fn a_pinned_file_in_two_directories_is_all_on_flash() -> Result<()> {
    mirrored()?.map_or(Ok(()), pinned)
}

/// Files of a directory are read in before anybody asks for them, and what they are read from is flash.
fn pinned(lab: Lab) -> Result<()> {
    fs::create_dir(lab.vms.join("web"))?;
    let content = pattern(0, 1, 12 << 20);
    for name in ["web/a.img", "b.img"] {
        fs::write(lab.vms.join(name), &content)?;
    }
    set(&lab, &["--match", "web/*", "--pin"])?;
    let pin = |wanted: &str| {
        until("the file is kept as is wanted", LIMIT, || {
            let known = file(&lab, "web/a.img").ok()?;
            (known["pin"] == wanted).then_some(known)
        })
    };
    let known = pin("filled")?;
    ensure!(known["cached"].as_u64() >= Some(12 * M), "{known}");
    ensure!(file(&lab, "b.img").is_err(), "nobody has asked for it");

    // Twice, so that there is something to advise.
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let web = find(&mut client, &dir, "web")?;
    let disk = find(&mut client, &web, "a.img")?;
    for _ in 0..2 {
        for at in (0..12 * M).step_by(128 << 10) {
            let got = read(&mut client, &disk, at, 128 << 10)?;
            ensure!(got == content[at as usize..][..128 << 10], "at {at}");
        }
    }
    let known = file(&lab, "web/a.img")?;
    ensure!(known["counters"]["read_misses"] == 0, "{known}");
    let advice = || -> Option<Value> {
        let text = lab.hearth.ok(&["advise", "vms/web/a.img", "--json"]).ok()?;
        let report: Value = serde_json::from_str(&text).ok()?;
        report["files"].as_array()?.first().cloned()
    };
    let advised = until("there is advice", LIMIT, || {
        advice().filter(|advice| advice["reason"].is_null())
    })?;
    ensure!(advised["name"] == "vms/web/a.img", "{advised}");
    ensure!(
        advised["measured_hit_ratio"].as_f64() > Some(0.9),
        "{advised}"
    );
    ensure!(advised["working_set"].as_u64() >= Some(8 * M), "{advised}");
    for words in [
        &["advise"][..],
        &["advise", "vms/"],
        &["datastore", "show", "vms"],
    ] {
        let said = lab.hearth.ok(words)?;
        ensure!(said.contains("vms/web/a.img"), "{words:?}: {said}");
    }
    lab.hearth.refused(&["advise", "vms/b.img"])?;

    // More than can be kept, and less again.
    File::options()
        .write(true)
        .open(lab.vms.join("web/a.img"))?
        .set_len(1 << 30)?;
    read(&mut client, &disk, 0, 4096)?;
    pin("no-room")?;
    set(&lab, &["--match", "web/*", "--pin=off"])?;
    until("it is a file like others", LIMIT, || {
        file(&lab, "web/a.img").ok()?["pin"].is_null().then_some(())
    })?;
    Ok(())
}

#[test]
fn a_scratch_file_is_on_flash_alone_until_a_crash() -> Result<()> {
    scratch(Lab::new()?)
}

#[test]
fn a_scratch_file_in_two_directories_is_on_flash_alone() -> Result<()> {
    mirrored()?.map_or(Ok(()), scratch)
}

/// All flash is lost: the datastore is what it was, and clients go on with the handles they have.
#[test]
fn a_datastore_outlives_the_loss_of_all_flash() -> Result<()> {
    let all = [
        Some(Lab::with(&[], None, &lasting_address()?.to_string())?),
        mirrored()?,
    ];
    for mut lab in all.into_iter().flatten() {
        set(&lab, &["--match", "*.iso", "--mode", "write-around"])?;
        let mut client = lab.client()?;
        let dir = root(&mut client)?;
        let disk = create(&mut client, &dir, "disk.img")?;
        let content = pattern(0, 1, 64 << 10);
        write(&mut client, &disk, M, &content)?;
        let id = get(&mut client, &disk)?.id;
        lab.hearth.ok(&["datastore", "flush", "vms"])?;
        let before = lab.show()?;
        lab.hearth.stop()?;
        fs::remove_file(lab.hearth.flash())?;
        let (flash, state) = (lab.hearth.flash().to_owned(), lab.state());
        lab.hearth.ok(&[
            "pool",
            "adopt-flash",
            "--flash",
            path(&flash),
            "--size",
            "128M",
            "--state-dir",
            path(&state),
        ])?;
        lab.hearth.start()?;
        let mut client = lab.client()?;
        ensure!(root(&mut client)? == dir, "the root has another handle");
        ensure!(get(&mut client, &disk)?.id == id, "{id}");
        ensure!(read(&mut client, &disk, M, 64 << 10)? == content);
        write(&mut client, &disk, 0, &content)?;
        let after = lab.show()?;
        for setting in ["rules", "listen", "clients", "path", "directory"] {
            ensure!(after[setting] == before[setting], "{before} {after}");
        }
        ensure!(after.to_string().contains("*.iso"), "{after}");
        lab.hearth.ok(&["datastore", "flush", "vms"])?;
        ensure!(fs::read(lab.vms.join("disk.img"))?[..content.len()] == content);
        lab.hearth.stop()?;
    }
    Ok(())
}

/// No daemon and no state directory: what is dirty of a file is saved by the file's path.
#[test]
fn what_is_dirty_of_a_file_is_written_over_it_without_a_daemon() -> Result<()> {
    let mut lab = Lab::new()?;
    lab.hearth.stop()?;
    // Slow enough that hardly anything is written back meanwhile.
    let slow = ["--destage-rate", "4K"].map(str::to_owned);
    lab.hearth.serve_args.extend(slow);
    lab.hearth.start()?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let disk = create(&mut client, &dir, "a.img")?;
    // It ends within a block.
    let (head, tail) = (pattern(0, 1, 64 << 10), pattern(M, 2, (64 << 10) - 1000));
    write(&mut client, &disk, 0, &head)?;
    write(&mut client, &disk, M, &tail)?;
    let size = M + tail.len() as u64;
    lab.hearth.kill9()?;
    let (flash, file) = (lab.hearth.flash().to_owned(), lab.vms.join("a.img"));
    let nothing = lab.hearth.dir().join("nothing");
    let saved = lab.hearth.dir().join("saved");
    let moved = lab.vms.join("moved.img");
    let before = fs::read(&flash)?;
    let all = |more: &[&str]| {
        let first = ["rescue", path(&flash), "--state-dir", path(&nothing)];
        let words = first.iter().chain(more);
        words.map(|word| (*word).to_owned()).collect::<Vec<_>>()
    };
    let run = |more: &[&str]| -> Result<Value> {
        let words = all(&[more, &["--json"]].concat());
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        Ok(serde_json::from_str(&lab.hearth.ok(&words)?)?)
    };
    let refused = |more: &[&str]| {
        let words = all(more);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        lab.hearth.refused(&words)
    };

    let listed = run(&[])?;
    let found = &listed["disks"][0];
    ensure!(
        found["path"] == "vms/a.img" && found["file"] == path(&file),
        "{listed}"
    );
    ensure!(found["size"].as_u64() == Some(size), "{listed}");
    ensure!(found["dirty"].as_u64() > Some(0), "{listed}");
    let name = found["disk"].as_str().context("a name")?.to_owned();

    let report = run(&["--disk", "vms/a.img", "--to", path(&saved)])?;
    ensure!(report["written"].as_u64() > Some(0), "{report}");
    ensure!(fs::metadata(&saved)?.len() == size, "{report}");
    let said = refused(&["--disk", "vms/a.img", "--onto", path(&saved)])?;
    ensure!(said.contains("is not the file of disk vms/a.img"), "{said}");
    let said = refused(&["--disk", "vms/b.img", "--to", path(&moved)])?;
    ensure!(said.contains("there is no disk vms/b.img"), "{said}");

    // Somebody moves it, and it is named as the pool names it.
    fs::rename(&file, &moved)?;
    let report = run(&["--disk", &name, "--onto", path(&moved)])?;
    ensure!(report["disk"] == "vms/moved.img", "{report}");
    let bytes = fs::read(&moved)?;
    ensure!(bytes.len() as u64 == size, "{report}");
    ensure!(bytes[..head.len()] == head && bytes[M as usize..] == tail);
    ensure!(bytes[head.len()..M as usize].iter().all(|b| *b == 0));

    let away = lab.hearth.dir().join("away.img");
    fs::rename(&moved, &away)?;
    let listed = run(&[])?;
    let lost = listed["disks"][0]["lost"].as_str();
    ensure!(
        lost.is_some_and(|lost| lost.contains("not to be found in")),
        "{listed}"
    );
    // It was only read.
    ensure!(fs::read(&flash)? == before);
    Ok(())
}

/// What is written to a scratch file is on flash and nowhere else, outlives a stop and no kill, and takes no more than is promised.
fn scratch(mut lab: Lab) -> Result<()> {
    set(&lab, &["--match", "*.vswp", "--scratch"])?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let swap = create(&mut client, &dir, "vm.vswp")?;
    set_size(&mut client, &swap, 8 * M)?.ok()?;
    let (old, new) = (pattern(0, 1, 64 << 10), pattern(M, 2, 64 << 10));
    write(&mut client, &swap, 0, &old)?;
    write(&mut client, &swap, M, &new)?;
    let known = file(&lab, "vm.vswp")?;
    ensure!(known["scratch"] == true && known["dirty"] == 0, "{known}");
    ensure!(promised(&lab)? == 16 * M, "{}", promised(&lab)?);
    // Nothing waits to be written back, and nothing was.
    lab.hearth.ok(&["datastore", "flush", "vms"])?;
    let plain = fs::metadata(lab.vms.join("vm.vswp"))?;
    ensure!(plain.len() == 8 * M && plain.blocks() == 0, "{plain:?}");
    ensure!(read(&mut client, &swap, M, 64 << 10)? == new);
    // Cut off and grown again.
    set_size(&mut client, &swap, M + 4096)?.ok()?;
    set_size(&mut client, &swap, 8 * M)?.ok()?;
    let left = read(&mut client, &swap, M, 64 << 10)?;
    ensure!(left[..4096] == new[..4096] && left[4096..].iter().all(|b| *b == 0));
    // No more than can be promised, and what there is stays.
    let results = set_size(&mut client, &swap, 1 << 30)?;
    results.is(Status::NoSpace)?;

    lab.hearth.stop()?;
    lab.hearth.start()?;
    let mut client = lab.client()?;
    ensure!(
        read(&mut client, &swap, 0, 64 << 10)? == old,
        "a stop in order"
    );
    ensure!(file(&lab, "vm.vswp")?["scratch"] == true);
    lab.hearth.kill9()?;
    lab.hearth.start()?;
    let mut client = lab.client()?;
    ensure!(
        read(&mut client, &swap, 0, 64 << 10).is_err(),
        "it was made up"
    );
    write(&mut client, &swap, 0, &new)?;
    ensure!(read(&mut client, &swap, 0, 64 << 10)? == new);
    ensure!(
        read(&mut client, &swap, M, 64 << 10).is_err(),
        "it was made up"
    );
    set_size(&mut client, &swap, 0)?.ok()?;
    set_size(&mut client, &swap, 8 * M)?.ok()?;
    let left = read(&mut client, &swap, M, 64 << 10)?;
    ensure!(left.iter().all(|b| *b == 0), "it was made anew");

    // It stays what it is; what is made from now on is not.
    set(&lab, &["--unmatch", "*.vswp"])?;
    ensure!(file(&lab, "vm.vswp")?["scratch"] == true);
    let other = create(&mut client, &dir, "other.vswp")?;
    set_size(&mut client, &other, 8 * M)?.ok()?;
    write(&mut client, &other, 0, &old)?;
    lab.hearth.ok(&["datastore", "flush", "vms"])?;
    ensure!(fs::read(lab.vms.join("other.vswp"))?[..old.len()] == old);
    remove(&mut client, &dir, "vm.vswp")?;
    until("what was promised is free", LIMIT, || {
        (promised(&lab).ok()? == 0).then_some(())
    })?;
    lab.hearth.stop()?;
    Ok(())
}

/// Microseconds of each of so many.
fn each(began: Instant, count: u64) -> f64 {
    began.elapsed().as_micros() as f64 / count.max(1) as f64
}

/// One file in ten is large and was used. What things take is printed and never judged; `FILES=20000` is the full size.
#[test]
fn many_files_are_listed_opened_renamed_and_there_again_after_a_kill() -> Result<()> {
    let wanted = std::env::var("FILES").ok().and_then(|n| n.parse().ok());
    let files: u64 = wanted.unwrap_or(300).max(100);
    let both: [&dyn Fn() -> Result<Lab>; 2] = [&Lab::new, &Lab::mirrored];
    for (trees, lab) in (1..).zip(both) {
        let mut lab = match lab() {
            Err(e) if format!("{e:#}").contains("cannot be marked as a tree") => continue,
            other => other?,
        };
        // What the pool alone needs.
        lab.hearth.kill9()?;
        let began = Instant::now();
        lab.hearth.start()?;
        lab.address()?;
        let alone = began.elapsed();
        let mut client = lab.client()?;
        let top = root(&mut client)?;
        let mut used = 0;
        for share in [10, 1] {
            let count = files / share;
            let name = format!("of-{count}");
            let dir = make_directory(&mut client, &top, &name)?;
            // Made where clients make them, for these have numbers then.
            let began = Instant::now();
            let made: Vec<Vec<u8>> = (0..count)
                .map(|n| create(&mut client, &dir, &format!("{n}.{}", end_of(n))))
                .collect::<Result<_>>()?;
            let create_us = each(began, count);
            let large: Vec<&Vec<u8>> = made.iter().step_by(10).collect();
            let began = Instant::now();
            for (n, file) in (0..).zip(&large) {
                write(&mut client, file, 0, &pattern(n, 3, 4096))?;
            }
            let first_us = each(began, large.len() as u64);
            used += large.len() as u64;
            let began = Instant::now();
            let names = list(&mut client, &dir)?;
            let list_us = each(began, names);
            ensure!(names == count || names == count + 2, "{names}");
            let few = count.min(100);
            let began = Instant::now();
            for n in 0..few {
                find(&mut client, &dir, &format!("{n}.{}", end_of(n)))?;
            }
            let open_us = each(began, few);
            let began = Instant::now();
            for n in 0..few {
                let (old, new) = (
                    format!("{n}.{}", end_of(n)),
                    format!("new-{n}.{}", end_of(n)),
                );
                let named = |name| Named { dir: &dir, name };
                let (from, to) = (named(old.as_bytes()), named(new.as_bytes()));
                client.call(&Args::Rename { from, to })?.ok()?;
            }
            let rename_us = each(began, few);
            println!(
                "trees {trees}, {count} files: µs each: create {create_us:.0}, first write {first_us:.0}, \
                 listed {list_us:.1}, looked up {open_us:.0}, renamed {rename_us:.0}"
            );
        }
        let shown = lab.show()?;
        ensure!(shown["disks"] == used, "{shown}");
        lab.hearth.kill9()?;
        let began = Instant::now();
        lab.hearth.start()?;
        lab.address()?;
        let start = began.elapsed();
        println!(
            "trees {trees}, {used} files known: served {:.2} s after kill -9 (an empty pool {:.2} s)",
            start.as_secs_f64(),
            alone.as_secs_f64()
        );
        let mut client = lab.client()?;
        let dir = find(&mut client, &top, &format!("of-{files}"))?;
        let disk = find(&mut client, &dir, "new-10.img")?;
        ensure!(read(&mut client, &disk, 0, 4096)? == pattern(1, 3, 4096));
        // They are written back and closed by themselves, and then cost nothing.
        let idle = until("nothing waits on flash", Duration::from_secs(120), || {
            let shown = lab.show().ok()?;
            (shown["dirty"] == 0).then_some(shown)
        })?;
        ensure!(idle["disks"] == used, "{idle}");
        lab.hearth.stop()?;
    }
    Ok(())
}

/// One in ten is an image.
fn end_of(n: u64) -> &'static str {
    if n.is_multiple_of(10) { "img" } else { "log" }
}

fn make_directory(client: &mut Client, dir: &[u8], name: &str) -> Result<Vec<u8>> {
    let what = hearth_nfs::v3::Create::Directory(hearth_nfs::v3::SetAttributes {
        mode: Some(0o755),
        ..Default::default()
    });
    let name = name.as_bytes();
    let at = Named { dir, name };
    client.call(&Args::Create { at, what })?.ok()?;
    find(client, dir, std::str::from_utf8(name)?)
}
