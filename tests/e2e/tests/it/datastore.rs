//! A directory served as a datastore by the real daemon.
//!
//! Exclusive: processors

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::stored::nfs::{self, Client, get, set_size};
use crate::stored::{LIMIT, Lab, create, lines, list, pattern, read, root, write};
use anyhow::{Context, Result, ensure};
use hearth_nfs::rpc::Credential;
use hearth_nfs::v3::{Args, Create, How, Named, SetAttributes, Stability, Status};
use hearth_rig::daemon::path;
use hearth_rig::machine::copy_sparse;
use hearth_rig::namespace::is_in_own_mounts;
use hearth_rig::wait::until;
use serde_json::Value;

/// Clients go on with what they have when the daemon was killed: the same handles, and all that was
/// answered as durable.
#[test]
fn clients_go_on_after_a_kill() -> Result<()> {
    let mut lab = Lab::new()?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let file = create(&mut client, &dir, "vm.vmx")?;
    write(&mut client, &file, 3, b"displayName")?;
    lab.hearth.kill9()?;
    lab.hearth.start()?;
    let mut client = lab.client()?;
    ensure!(read(&mut client, &file, 0, 100)? == b"\0\0\0displayName");
    ensure!(root(&mut client)? == dir);
    // It is a file like any other.
    ensure!(fs::read(lab.vms.join("vm.vmx"))? == b"\0\0\0displayName");
    ensure!(lines(&lab.vms)? == ["vm.vmx"]);
    Ok(())
}

/// Who may come is changed under clients that stay, and a datastore that was removed is gone.
#[test]
fn clients_are_let_in_and_shut_out_while_it_is_in_use() -> Result<()> {
    let lab = Lab::new()?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let file = create(&mut client, &dir, "a")?;
    let try_write = |client: &mut Client| client.call(&Args::durable(&file, 0, b"x"));
    try_write(&mut client)?.ok()?;
    lab.hearth
        .ok(&["datastore", "set", "vms", "--read-only", "on"])?;
    try_write(&mut client)?.is(Status::RoFs)?;
    ensure!(read(&mut client, &file, 0, 9)? == b"x");
    lab.hearth.ok(&[
        "datastore",
        "set",
        "vms",
        "--read-only",
        "off",
        "--client",
        "192.0.2.1=rw",
    ])?;
    try_write(&mut client)?.is(Status::Access)?;
    lab.hearth
        .ok(&["datastore", "set", "vms", "--client", "127.0.0.1=insecure"])?;
    // Root counts as nobody now.
    try_write(&mut client)?.is(Status::Access)?;
    client.credential = nfs::user(0x7fff);
    ensure!(read(&mut client, &file, 0, 9)? == b"x");
    lab.hearth.ok(&["datastore", "remove", "vms", "--yes"])?;
    ensure!(lab.hearth.ok(&["datastore", "list", "--json"])?.trim() == "[]");
    ensure!(fs::read(lab.vms.join("a"))? == b"x");
    Ok(())
}

/// Any account of this host can name any user and group in a call. A datastore as it is by itself answers none of
/// them, says how one would be let in, and makes no program that runs as somebody else.
#[test]
fn default_datastore_gives_local_accounts_nothing() -> Result<()> {
    let lab = Lab::new()?;
    let dir = lab.hearth.dir().join("own");
    fs::create_dir(&dir)?;
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o777))?;
    let add = [
        "datastore",
        "add",
        path(&dir),
        "--nfs",
        "--listen",
        "127.0.0.1:0",
    ];
    let said = lab.hearth.ok(&add)?;
    for network in ["127.0.0.0/8", "::1"] {
        let line = said.lines().find(|line| line.starts_with(network));
        let line = line.with_context(|| said.clone())?;
        ensure!(line.contains("root as user 65534"), "{line}");
        ensure!(line.contains("privileged source ports only"), "{line}");
    }
    let show = || -> Result<Value> {
        let text = lab.hearth.ok(&["datastore", "show", "own", "--json"])?;
        Ok(serde_json::from_str(&text)?)
    };
    let at = show()?["listen"].as_str().context("an address")?.parse()?;
    let mut client = Client::connect(at)?;
    client.credential = Credential::Sys {
        uid: 64055,
        gid: 6,
        groups: Vec::new(),
    };
    ensure!(client.mount("/own")? == Err(Status::Access as u32));
    // The command that is told is the one that helps.
    let notice = show()?["notices"][0]
        .as_str()
        .context("a notice")?
        .to_owned();
    let command = notice.split('`').nth(1).with_context(|| notice.clone())?;
    let words: Vec<&str> = command.split(' ').skip(1).collect();
    ensure!(words[..3] == ["datastore", "set", "own"], "{notice}");
    let said = lab.hearth.ok(&words)?;
    ensure!(said.contains("every account of this host"), "{said}");
    let shown = show()?;
    ensure!(
        shown["notices"].is_null() && shown["clients"][0]["insecure"] == true,
        "{shown}"
    );
    ensure!(shown["clients"][1]["insecure"] == false, "{shown}");
    let root = client.mount("/own")?.ok().context("it may not mount")?;
    for name in ["program", "disk.img"] {
        let set = SetAttributes {
            mode: Some(0o6777),
            ..SetAttributes::default()
        };
        let what = Create::File(How::Guarded(set));
        let at = Named {
            dir: &root,
            name: name.as_bytes(),
        };
        let made = client.call(&Args::Create { at, what })?.ok()?;
        let file = made
            .reader()
            .optional(|r| r.opaque(64).map(<[u8]>::to_vec))?;
        let file = file.context("a handle")?;
        let mode = || Ok::<_, anyhow::Error>(fs::metadata(dir.join(name))?.mode() & 0o7777);
        ensure!(mode()? == 0o777, "{name}: {:o}", mode()?);
        // One that somebody on this host arms is disarmed by a write, and when it is cut.
        for round in 0..2 {
            fs::set_permissions(dir.join(name), fs::Permissions::from_mode(0o6777))?;
            get(&mut client, &file)?;
            match round {
                0 => write(&mut client, &file, 0, b"code")?,
                _ => set_size(&mut client, &file, 2)?.ok().map(drop)?,
            }
            ensure!(mode()? == 0o777, "{name}, round {round}: {:o}", mode()?);
        }
    }
    Ok(())
}

/// All users of a client count as one, whatever they say, also after a restart.
#[test]
fn squashed_clients_own_what_they_make() -> Result<()> {
    let mut lab = Lab::new()?;
    fs::set_permissions(&lab.vms, fs::Permissions::from_mode(0o777))?;
    let options = "127.0.0.1=rw,all_squash,anonuid=4711,anongid=4712,insecure";
    lab.hearth
        .ok(&["datastore", "set", "vms", "--client", options])?;
    lab.hearth.kill9()?;
    lab.hearth.start()?;
    let shown = lab.hearth.ok(&["datastore", "show", "vms"])?;
    ensure!(
        shown.contains("127.0.0.1=rw,all_squash,insecure,anonuid=4711,anongid=4712"),
        "{shown}"
    );
    let client = &lab.show()?["clients"][0];
    ensure!(
        client["all_squash"] == true && client["anonuid"] == 4711,
        "{client}"
    );
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    for (name, credential) in [
        ("a", nfs::root()),
        ("b", nfs::user(1000)),
        ("c", Credential::None),
    ] {
        client.credential = credential;
        let file = create(&mut client, &dir, name)?;
        write(&mut client, &file, 0, b"x")?;
        let meta = fs::metadata(lab.vms.join(name))?;
        let daemons = fs::metadata(lab.hearth.dir())?.uid();
        // Without root's rights all files are the daemon's own.
        ensure!(
            daemons != 0 || (meta.uid(), meta.gid()) == (4711, 4712),
            "{name}: {meta:?}"
        );
    }
    Ok(())
}

/// What is durable when it is answered is there after a kill, in the cache and, once it was
/// flushed, in the plain file.
#[test]
fn durable_writes_outlive_a_kill_and_reach_the_file() -> Result<()> {
    let mut lab = Lab::new()?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let disk = create(&mut client, &dir, "vm-flat.vmdk")?;
    set_size(&mut client, &disk, 8 << 20)?.ok()?;
    let offsets: Vec<u64> = (0..200).map(|n| n * 7919 % 2047 * 4096).collect();
    for &at in &offsets {
        write(&mut client, &disk, at, &pattern(at, 1, 4096))?;
    }
    // Not aligned, and longer than the file was.
    write(&mut client, &disk, (8 << 20) - 100, &pattern(0, 2, 5000))?;
    let size = (8 << 20) + 4900;
    let told = get(&mut client, &disk)?;
    ensure!(told.size == size, "{}", told.size);
    let shown = lab.show()?;
    ensure!(shown["open"] == 1 && shown["disks"] == 1, "{shown}");

    lab.hearth.kill9()?;
    lab.hearth.start()?;
    let mut client = lab.client()?;
    let check = |client: &mut Client| -> Result<()> {
        for &at in &offsets {
            ensure!(
                read(client, &disk, at, 4096)? == pattern(at, 1, 4096),
                "{at}"
            );
        }
        ensure!(read(client, &disk, (8 << 20) - 100, 8192)? == pattern(0, 2, 5000));
        Ok(())
    };
    check(&mut client)?;
    let again = get(&mut client, &disk)?;
    ensure!(again.size == size && again.id == told.id && again.modified >= told.modified);

    lab.hearth.ok(&["datastore", "flush", "vms"])?;
    let plain = fs::read(lab.vms.join("vm-flat.vmdk"))?;
    ensure!(plain.len() as u64 == size);
    for &at in &offsets {
        ensure!(plain[at as usize..][..4096] == pattern(at, 1, 4096), "{at}");
    }
    ensure!(plain[(8 << 20) - 100..] == pattern(0, 2, 5000));
    check(&mut client)?;
    lab.hearth.ok(&["datastore", "remove", "vms", "--yes"])?;
    ensure!(fs::read(lab.vms.join("vm-flat.vmdk"))? == plain);
    Ok(())
}

/// What is set for names holds for files in use, for those renamed, for those made later and after a kill.
#[test]
fn files_are_cached_as_is_set_for_their_names() -> Result<()> {
    let mut lab = Lab::new()?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let set = |lab: &Lab, words: &[&str]| {
        let words = [&["datastore", "set", "vms"], words].concat();
        lab.hearth.ok(&words).map(drop)
    };
    let files = |lab: &Lab| -> Result<Vec<Value>> {
        let text = lab.hearth.ok(&["datastore", "files", "vms", "--json"])?;
        Ok(serde_json::from_str(&text)?)
    };
    let mode_of = |lab: &Lab, name: &str| -> Result<Value> {
        let all = files(lab)?;
        let found = all.iter().find(|file| file["path"] == name);
        Ok(found.with_context(|| format!("{name} in {all:?}"))?["mode"].clone())
    };
    // Written, and whether the host's file has it without a flush.
    let mut round = 0;
    let mut through = |lab: &Lab, client: &mut Client, file: &[u8], name: &str| -> Result<bool> {
        round += 1;
        let new = pattern(0, round, 8192);
        write(client, file, 4096, &new)?;
        ensure!(read(client, file, 4096, 8192)? == new);
        Ok(fs::read(lab.vms.join(name))?[4096..][..8192] == new)
    };
    let disk = create(&mut client, &dir, "a.img")?;
    let image = create(&mut client, &dir, "b.iso")?;
    for file in [&disk, &image] {
        set_size(&mut client, file, 4 << 20)?.ok()?;
    }
    ensure!(!through(&lab, &mut client, &image, "b.iso")?);
    // In use.
    set(
        &lab,
        &["--match", "*.ISO", "--mode", "write-through", "--max", "1M"],
    )?;
    ensure!(through(&lab, &mut client, &image, "b.iso")?);
    ensure!(!through(&lab, &mut client, &disk, "a.img")?);
    ensure!(mode_of(&lab, "a.img")? == "write-back");
    ensure!(mode_of(&lab, "b.iso")? == "write-through");
    // Renamed.
    let named = |name: &'static str| Named {
        dir: &dir,
        name: name.as_bytes(),
    };
    let (from, to) = (named("a.img"), named("c.iso"));
    client.call(&Args::Rename { from, to })?.ok()?;
    ensure!(through(&lab, &mut client, &disk, "c.iso")?);
    // Made later, and after a kill.
    lab.hearth.kill9()?;
    lab.hearth.start()?;
    let mut client = lab.client()?;
    ensure!(through(&lab, &mut client, &disk, "c.iso")?);
    let later = create(&mut client, &dir, "d.iso")?;
    set_size(&mut client, &later, 4 << 20)?.ok()?;
    ensure!(through(&lab, &mut client, &later, "d.iso")?);
    let shown = lab.show()?;
    ensure!(
        shown["rules"][0]["match"] == "*.ISO" && shown["rules"][0]["max"] == 1 << 20,
        "{shown}"
    );
    let counted = files(&lab)?;
    let later_file = counted.iter().find(|file| file["path"] == "d.iso");
    let later_file = later_file.context("d.iso")?;
    ensure!(later_file["counters"]["write_misses"] == 1, "{later_file}");
    // A block that was just written is still in memory.
    ensure!(later_file["counters"]["read_hits"] == 1, "{later_file}");
    ensure!(
        later_file["max"] == 1 << 20 && later_file["open"] == true,
        "{later_file}"
    );
    // No longer.
    set(&lab, &["--unmatch", "*.ISO"])?;
    ensure!(!through(&lab, &mut client, &later, "d.iso")?);
    for bad in [
        &["--unmatch", "*.ISO"][..],
        &["--match", "[", "--mode", "off"],
        &["--match", "*.iso"],
        &["--mode", "off"],
    ] {
        ensure!(set(&lab, bad).is_err(), "{bad:?}");
    }
    lab.hearth.ok(&["datastore", "flush", "vms"])?;
    ensure!(fs::read(lab.vms.join("d.iso"))?[4096..][..8192] == pattern(0, round, 8192));
    Ok(())
}

/// Somebody changed a file while the daemon was away: the cache of it goes, and what clients write then stays, also over
/// a kill.
#[test]
fn what_is_written_after_a_change_on_the_host_outlives_a_kill() -> Result<()> {
    let mut lab = Lab::new()?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let disk = create(&mut client, &dir, "a.img")?;
    set_size(&mut client, &disk, 4 << 20)?.ok()?;
    write(&mut client, &disk, 0, &pattern(0, 1, 65536))?;
    drop(client);
    ensure!(lab.hearth.stop()?.success());
    let changed = pattern(0, 2, 65536);
    File::options()
        .write(true)
        .open(lab.vms.join("a.img"))?
        .write_all_at(&changed, 0)?;
    lab.hearth.start()?;
    let mut client = lab.client()?;
    ensure!(read(&mut client, &disk, 0, 65536)? == changed);
    let newest = pattern(0, 3, 4096);
    write(&mut client, &disk, 8192, &newest)?;
    lab.hearth.kill9()?;
    lab.hearth.start()?;
    let mut client = lab.client()?;
    ensure!(read(&mut client, &disk, 8192, 4096)? == newest);
    ensure!(read(&mut client, &disk, 0, 8192)? == changed[..8192]);
    lab.hearth.ok(&["datastore", "flush", "vms"])?;
    ensure!(fs::read(lab.vms.join("a.img"))?[8192..12288] == newest);
    Ok(())
}

/// What was cut off does not come back, neither when the file grows again nor after a kill.
#[test]
fn what_was_cut_off_does_not_come_back() -> Result<()> {
    let mut lab = Lab::new()?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let disk = create(&mut client, &dir, "a.img")?;
    for at in (0..4u64 << 20).step_by(1 << 18) {
        write(&mut client, &disk, at, &pattern(at, 1, 1 << 18))?;
    }
    let cut = (1 << 20) + 777;
    set_size(&mut client, &disk, cut)?.ok()?;
    ensure!(get(&mut client, &disk)?.size == cut);
    set_size(&mut client, &disk, 4 << 20)?.ok()?;
    let check = |client: &mut Client| -> Result<()> {
        let kept = read(client, &disk, 1 << 20, 4096)?;
        ensure!(kept[..777] == pattern(1 << 20, 1, 1 << 18)[..777]);
        ensure!(kept[777..].iter().all(|b| *b == 0));
        for at in ((1u64 << 20) + 4096..4 << 20).step_by(1 << 16) {
            ensure!(
                read(client, &disk, at, 4096)?.iter().all(|b| *b == 0),
                "{at}"
            );
        }
        Ok(())
    };
    check(&mut client)?;
    lab.hearth.kill9()?;
    lab.hearth.start()?;
    let mut client = lab.client()?;
    check(&mut client)?;
    lab.hearth.ok(&["datastore", "flush", "vms"])?;
    let plain = fs::read(lab.vms.join("a.img"))?;
    ensure!(plain.len() == 4 << 20 && plain[cut as usize..].iter().all(|b| *b == 0));
    Ok(())
}

/// A renamed file keeps its cache, one that is replaced or removed gives it back.
#[test]
fn names_and_caches_stay_in_step() -> Result<()> {
    let lab = Lab::new()?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let make = |client: &mut Client, name: &str, round: u8| -> Result<Vec<u8>> {
        let file = create(client, &dir, name)?;
        write(client, &file, 0, &pattern(0, round, 1 << 18))?;
        Ok(file)
    };
    let first = make(&mut client, "a.img", 1)?;
    let second = make(&mut client, "b.img", 2)?;
    let disks = |lab: &Lab| -> Result<Value> { Ok(lab.show()?["disks"].clone()) };
    ensure!(disks(&lab)? == 2);
    let named = |name: &'static str| Named {
        dir: &dir,
        name: name.as_bytes(),
    };
    let rename = Args::Rename {
        from: named("b.img"),
        to: named("a.img"),
    };
    client.call(&rename)?.ok()?;
    ensure!(disks(&lab)? == 1);
    // Another name of a file that is a disk now is told at once, and so is that it is gone.
    let links = |client: &mut Client| -> Result<u32> {
        let results = client.call(&Args::GetAttr { file: &second })?.ok()?;
        Ok(nfs::attributes(&mut results.reader())?.links)
    };
    ensure!(links(&mut client)? == 1);
    let link = Args::Link {
        file: &second,
        at: named("c.img"),
    };
    client.call(&link)?.ok()?;
    ensure!(links(&mut client)? == 2, "the second name");
    client.call(&Args::Remove(named("c.img")))?.ok()?;
    ensure!(links(&mut client)? == 1, "the second name is gone");
    client
        .call(&Args::GetAttr { file: &first })?
        .is(Status::Stale)?;
    ensure!(read(&mut client, &second, 0, 1 << 18)? == pattern(0, 2, 1 << 18));
    client.call(&Args::Remove(named("a.img")))?.ok()?;
    ensure!(disks(&lab)? == 0);
    client
        .call(&Args::GetAttr { file: &second })?
        .is(Status::Stale)?;
    ensure!(lines(&lab.vms)?.is_empty());
    Ok(())
}

/// The daemon is killed while many durable writes are under way: what was answered is there, whatever else
/// was happening to the file.
#[test]
fn kills_under_load_lose_nothing_that_was_answered() -> Result<()> {
    const BLOCKS: u64 = 512;
    let mut lab = Lab::new()?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let disk = create(&mut client, &dir, "a.img")?;
    let mut answered = vec![0u8; BLOCKS as usize];
    for round in 1..=4u8 {
        let mut client = lab.client()?;
        let mut asked = Vec::new();
        // Every block once, in an order of its own; the file grows meanwhile in the first round.
        for n in 0..BLOCKS {
            let block = (n * 37 + u64::from(round) * 11) % BLOCKS;
            let data = pattern(block * 4096, round, 4096);
            let args = Args::durable(&disk, block * 4096, &data);
            asked.push((client.send(&args)?, block));
        }
        let half = BLOCKS as usize / 2;
        let mut maybe = Vec::new();
        for (at, (xid, block)) in asked.into_iter().enumerate() {
            // "Ask again" is no answer.
            if at < half && client.results(xid)?.status == 0 {
                answered[block as usize] = round;
            } else {
                maybe.push(block);
            }
        }
        lab.hearth.kill9()?;
        lab.hearth.start()?;
        let mut client = lab.client()?;
        for block in 0..BLOCKS {
            let found = read(&mut client, &disk, block * 4096, 4096)?;
            let before = answered[block as usize];
            let old = match before {
                // The file may end before or in it.
                0 => found.iter().all(|b| *b == 0),
                before => found == pattern(block * 4096, before, 4096),
            };
            let new = maybe.contains(&block) && found == pattern(block * 4096, round, 4096);
            ensure!(old || new, "block {block} after round {round}");
            if new {
                answered[block as usize] = round;
            }
        }
    }
    lab.hearth.ok(&["datastore", "flush", "vms"])?;
    let plain = fs::read(lab.vms.join("a.img"))?;
    for (block, round) in answered.into_iter().enumerate() {
        let at = block * 4096;
        let found = plain.get(at..at + 4096).unwrap_or_default();
        ensure!(
            round == 0 || found == pattern(at as u64, round, 4096),
            "block {block}"
        );
    }
    Ok(())
}

/// Thousands of names cost the cache nothing: a file is a disk when it is used, and not before.
#[test]
fn listing_many_files_opens_none() -> Result<()> {
    let lab = Lab::new()?;
    for n in 0..2000 {
        fs::write(lab.vms.join(format!("{n}.img")), b"image")?;
    }
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let name = b"1234.img";
    let found = client
        .call(&Args::Lookup(Named { dir: &dir, name }))?
        .ok()?;
    let file = found.reader().opaque(64)?.to_vec();
    let names = list(&mut client, &dir)?;
    ensure!(names == 2002 || names == 2000, "{names}");
    ensure!(lab.show()?["disks"] == 0, "{}", lab.show()?);
    ensure!(read(&mut client, &file, 0, 100)? == b"image");
    ensure!(lab.show()?["open"] == 1, "{}", lab.show()?);
    Ok(())
}

/// Grown, written at one place and cut: what is made zeros is what was written, and not all that the file could have held.
#[test]
fn cut_of_a_sparse_file_follows_its_data() -> Result<()> {
    const M: u64 = 1 << 20;
    const T: u64 = 1 << 40;
    let lab = Lab::new()?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let disk = create(&mut client, &dir, "a.img")?;
    let places = [M, 3 * T, 3 * T + 8 * M, 7 * T];
    set_size(&mut client, &disk, 8 * T)?.ok()?;
    for (n, at) in (1..).zip(places) {
        write(&mut client, &disk, at, &pattern(at, n, 4096))?;
    }
    // A part of it is in the file, and a part on flash only.
    lab.hearth.ok(&["datastore", "flush", "vms"])?;
    write(&mut client, &disk, 5 * T, &pattern(0, 9, 4096))?;
    set_size(&mut client, &disk, 2 * M)?.ok()?;
    let shown = lab.show()?;
    ensure!(shown["dirty"].as_u64() < Some(1 << 30), "{shown}");
    // What was cut off does not come back, and what was not is there.
    set_size(&mut client, &disk, 8 * T)?.ok()?;
    for at in [3 * T, 3 * T + 8 * M, 5 * T, 7 * T] {
        ensure!(read(&mut client, &disk, at, 4096)? == [0; 4096], "{at}");
    }
    ensure!(read(&mut client, &disk, M, 4096)? == pattern(M, 1, 4096));
    lab.hearth.ok(&["datastore", "flush", "vms"])?;
    let file = File::open(lab.vms.join("a.img"))?;
    let mut found = [1; 4096];
    file.read_exact_at(&mut found, 5 * T)?;
    ensure!(found == [0; 4096]);
    Ok(())
}

/// A clean stop and start keeps the cache, and an export of the pool leaves nothing on flash only, served or not.
#[test]
fn a_stop_keeps_the_cache_and_an_export_empties_it_into_the_files() -> Result<()> {
    let mut lab = Lab::new()?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let disk = create(&mut client, &dir, "a.img")?;
    write(&mut client, &disk, 0, &pattern(0, 1, 1 << 19))?;
    lab.hearth.ok(&["datastore", "flush", "vms"])?;
    let cached = |lab: &Lab| -> Result<u64> {
        let text = lab.hearth.ok(&["pool", "show", "--json"])?;
        let pool: Value = serde_json::from_str(&text)?;
        ensure!(pool["disks"] == Value::Array(Vec::new()), "{pool}");
        pool["cached"].as_u64().context("a number")
    };
    ensure!(cached(&lab)? >= 1 << 19);
    lab.hearth.stop()?;
    lab.hearth.start()?;
    let mut client = lab.client()?;
    ensure!(read(&mut client, &disk, 4096, 4096)? == pattern(4096, 1, 4096));
    ensure!(cached(&lab)? >= 1 << 19, "{}", cached(&lab)?);

    // Dirty when the daemon ends, and exported while nobody serves the pool.
    write(&mut client, &disk, 8192, &pattern(8192, 2, 4096))?;
    lab.hearth.kill9()?;
    let flash = path(lab.hearth.flash()).to_owned();
    // Elsewhere, too, where nothing is known of the datastore; and nothing of it stays there.
    let elsewhere = lab.hearth.dir().join("elsewhere");
    let state = lab.state();
    let kept = lines(&state.join("datastores"))?;
    ensure!(kept.len() == 1);
    for state in [&elsewhere, &state] {
        let at = ["--flash", &flash, "--state-dir", path(state)];
        let export = [&["pool", "export"], &at[..]].concat();
        if state == &elsewhere {
            // Whoever has not confirmed the directory has nothing written into it.
            let refused = lab.hearth.refused(&export)?;
            ensure!(refused.contains("pool import --accept"), "{refused}");
            lab.hearth
                .ok(&[&["pool", "import", "--accept"], &at[..]].concat())?;
        }
        lab.hearth.ok(&export)?;
    }
    ensure!(!elsewhere.join("datastores").exists());
    ensure!(lines(&state.join("datastores"))? == kept);
    let plain = fs::read(lab.vms.join("a.img"))?;
    ensure!(plain[8192..12288] == pattern(8192, 2, 4096));

    // And while it is served.
    lab.hearth.start()?;
    let mut client = lab.client()?;
    ensure!(read(&mut client, &disk, 8192, 4096)? == pattern(8192, 2, 4096));
    write(&mut client, &disk, 12288, &pattern(12288, 3, 4096))?;
    lab.hearth.ok(&["pool", "export", "--yes"])?;
    lab.hearth.ended()?;
    let plain = fs::read(lab.vms.join("a.img"))?;
    ensure!(plain[12288..16384] == pattern(12288, 3, 4096));
    Ok(())
}

/// A file system that is full: what does not fit beside what is dirty is refused, and all that was answered reaches
/// the file.
#[test]
fn a_full_file_system_refuses_what_would_not_fit() -> Result<()> {
    const TEST: &str = "datastore::a_full_file_system_refuses_what_would_not_fit";
    const ROOM: u64 = 48 << 20;
    const STEP: u64 = 256 << 10;
    let mount = format!("mount -t tmpfs -o size={ROOM} tmpfs /mnt");
    if !is_in_own_mounts(TEST, &mount)? {
        return Ok(());
    }
    let vms = PathBuf::from("/mnt/vms");
    let lab = Lab::with(&[], Some(vms.clone()), "127.0.0.1:0")?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let disk = create(&mut client, &dir, "a.img")?;
    // A thin disk, larger than all there is.
    set_size(&mut client, &disk, 1 << 30)?.ok()?;
    let put = |client: &mut Client, file: &[u8], offset: u64, round: u8, len: u64| {
        client.call(&Args::durable(
            file,
            offset,
            &pattern(offset, round, len as usize),
        ))
    };
    // Every other step, so that holes stay between them.
    let mut answered = Vec::new();
    loop {
        let at = answered.len() as u64 * 2 * STEP;
        let results = put(&mut client, &disk, at, 1, STEP)?;
        if results.status != 0 {
            results.is(Status::NoSpace)?;
            break;
        }
        answered.push(at);
        ensure!(answered.len() as u64 * STEP < ROOM, "it is no larger");
    }
    let taken = answered.len() as u64 * STEP;
    ensure!(taken > ROOM / 2, "{taken}");
    let results = client.call(&Args::FsStat { root: &dir })?.ok()?;
    let mut r = results.reader();
    r.optional(nfs::attributes)?;
    let (total, free) = (r.u64()?, r.u64()?);
    ensure!(
        total == ROOM && free <= ROOM - taken,
        "{free} free of {total}"
    );
    let plain = File::open(vms.join("a.img"))?;
    let stored = |at: u64| -> Result<Vec<u8>> {
        let mut data = vec![0; STEP as usize];
        plain.read_exact_at(&mut data, at)?;
        Ok(data)
    };
    // All that was answered has room. What is being written back counts twice for a moment, so that there may be a
    // little more afterwards.
    loop {
        lab.hearth.ok(&["datastore", "flush", "vms"])?;
        for &at in &answered {
            ensure!(stored(at)? == pattern(at, 1, STEP as usize), "{at}");
        }
        let at = answered.len() as u64 * 2 * STEP;
        let results = put(&mut client, &disk, at, 1, STEP)?;
        if results.status != 0 {
            results.is(Status::NoSpace)?;
            break;
        }
        answered.push(at);
        ensure!(answered.len() as u64 * STEP < ROOM, "it is no larger");
    }
    // Full, in every hole; but what has its room is written over, down to the last byte of the file system.
    put(&mut client, &disk, STEP, 2, STEP)?.is(Status::NoSpace)?;
    let mut rest = File::create(vms.join("rest.log"))?;
    while rest.write_all(&[1; 4096]).is_ok() {}
    put(&mut client, &disk, 513 << 20, 2, 1)?.is(Status::NoSpace)?;
    for &at in &answered {
        put(&mut client, &disk, at, 3, STEP)?.ok()?;
    }
    lab.hearth.ok(&["datastore", "flush", "vms"])?;
    for &at in &answered {
        ensure!(stored(at)? == pattern(at, 3, STEP as usize), "{at}");
    }
    drop(plain);
    // What is removed gives its room back.
    let name = b"a.img";
    client
        .call(&Args::Remove(Named { dir: &dir, name }))?
        .ok()?;
    let second = create(&mut client, &dir, "b.img")?;
    set_size(&mut client, &second, 1 << 30)?.ok()?;
    let again = || Ok(put(&mut client, &second, 0, 4, STEP)?.ok().ok());
    let mut again = again;
    until("there is room again", LIMIT, || again().transpose())?.map(drop)
}

/// While it is held, the directory has every write before it is answered, also after a kill; and it is not the slower for it
/// afterwards.
#[test]
fn a_held_directory_is_true_until_it_is_let_go() -> Result<()> {
    const PIECE: u64 = 64 << 10;
    let mut lab = Lab::new()?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let open = create(&mut client, &dir, "open.img")?;
    let vms = lab.vms.clone();
    let is = |name: &str, at: u64, round: u8| -> Result<()> {
        let mut found = vec![0; PIECE as usize];
        let file = File::open(vms.join(name))?;
        file.read_exact_at(&mut found, at * PIECE)?;
        let wanted = pattern(at * PIECE, round, PIECE as usize);
        ensure!(found == wanted, "{name}: piece {at}, round {round}");
        Ok(())
    };
    let put = |client: &mut Client, file: &[u8], at: u64, round: u8| {
        write(
            client,
            file,
            at * PIECE,
            &pattern(at * PIECE, round, PIECE as usize),
        )
    };
    for at in 0..16 {
        put(&mut client, &open, at, 1)?;
    }
    lab.hearth.ok(&["datastore", "flush", "vms", "--hold"])?;
    let shown = lab.show()?;
    ensure!(shown["hold"] == true && shown["dirty"] == 0, "{shown}");
    for at in 0..16 {
        is("open.img", at, 1)?;
    }
    // One that is a disk already, and one that becomes one.
    let new = create(&mut client, &dir, "new.img")?;
    for at in 0..16 {
        put(&mut client, &open, at, 2)?;
        is("open.img", at, 2)?;
        put(&mut client, &new, at, 2)?;
        is("new.img", at, 2)?;
    }
    ensure!(lab.show()?["dirty"] == 0);
    lab.hearth.kill9()?;
    lab.hearth.start()?;
    let mut client = lab.client()?;
    ensure!(lab.show()?["hold"] == true);
    for at in 0..16 {
        put(&mut client, &open, at, 3)?;
        is("open.img", at, 3)?;
    }
    lab.hearth
        .ok(&["datastore", "set", "vms", "--hold", "off"])?;
    ensure!(lab.show()?["hold"] == false);
    // Answered from flash again: sooner or later something is dirty.
    let mut at = 0;
    until("something is dirty", LIMIT, || {
        at = (at + 1) % 16;
        let dirty = put(&mut client, &open, at, 4).and_then(|()| lab.show());
        dirty
            .map(|shown| (shown["dirty"] != 0).then_some(()))
            .transpose()
    })??;
    lab.hearth.ok(&["datastore", "flush", "vms"])?;
    is("open.img", at, 4)
}

/// A copy that cannot be told from what it is of; one that was there stays the same file.
fn copy_with_times(from: &Path, to: &Path) -> Result<()> {
    let status = Command::new("cp")
        .args(["--preserve=timestamps", "--"])
        .args([from, to])
        .status()?;
    ensure!(status.success(), "cp to {} failed", to.display());
    Ok(())
}

/// Unstable writes, as clients have to treat them: sent again unless a commit gave the number that the write was
/// answered with. However the daemon ends, even with all that was not durable, nothing is lost.
#[test]
fn what_is_unstable_is_there_or_its_writer_knows() -> Result<()> {
    const TEST: &str = "datastore::what_is_unstable_is_there_or_its_writer_knows";
    const BLOCKS: u64 = 300;
    // The host's boot, as the daemon sees it.
    let place = tempfile::tempdir()?;
    let boot = place.path().join("boot");
    fs::write(&boot, "first\n")?;
    let script = format!(
        "mount --bind {} /proc/sys/kernel/random/boot_id && exec \"$@\"",
        path(&boot)
    );
    let wrap = ["unshare", "--mount", "sh", "-c", &script, "sh"];
    let tried = Command::new(wrap[0])
        .args(&wrap[1..])
        .arg("true")
        .output()?;
    if !tried.status.success() {
        eprintln!("{TEST}: skipped: this user may not mount a file");
        return Ok(());
    }
    let mut lab = Lab::with(&wrap, None, "127.0.0.1:0")?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    // One that is a disk, and one that is none.
    let files = [
        create(&mut client, &dir, "a.img")?,
        create(&mut client, &dir, "a.log")?,
    ];
    let send = |client: &mut Client, file: &[u8], block: u64, round: u8| -> Result<[u8; 8]> {
        let data = pattern(block * 512, round, 512);
        let args = Args::Write {
            file,
            offset: block * 512,
            count: 512,
            stable: Stability::Unstable,
            data: &data,
        };
        let results = client.call(&args)?.ok()?;
        let mut r = results.reader();
        nfs::wcc(&mut r)?;
        ensure!(r.u32()? == 512);
        r.u32()?;
        Ok(r.fixed()?)
    };
    let commit = |client: &mut Client, file: &[u8]| -> Result<[u8; 8]> {
        let args = Args::Commit {
            file,
            offset: 0,
            count: 0,
        };
        let results = client.call(&args)?.ok()?;
        let mut r = results.reader();
        nfs::wcc(&mut r)?;
        Ok(r.fixed()?)
    };
    let mut seen = Vec::new();
    for round in 1..=4u8 {
        // Two of the four lives end with the host.
        let host = round % 2 == 0;
        let mut client = lab.client()?;
        let saved = place.path().join(format!("saved-{round}"));
        if host {
            // What a power cut leaves: what was durable before the writes.
            drop(client);
            lab.hearth.kill9()?;
            copy_sparse(lab.hearth.flash(), &saved)?;
            fs::create_dir(place.path().join("vms"))?;
            for name in ["a.img", "a.log"] {
                copy_with_times(&lab.vms.join(name), &place.path().join("vms").join(name))?;
            }
            lab.hearth.start()?;
            client = lab.client()?;
        }
        let mut pending = Vec::new();
        for block in 0..BLOCKS {
            for file in &files {
                pending.push((file, block, send(&mut client, file, block, round)?));
            }
        }
        lab.hearth.kill9()?;
        if host {
            copy_sparse(&saved, lab.hearth.flash())?;
            for name in ["a.img", "a.log"] {
                copy_with_times(&place.path().join("vms").join(name), &lab.vms.join(name))?;
            }
            fs::remove_dir_all(place.path().join("vms"))?;
            fs::write(&boot, format!("boot-{round}\n"))?;
        }
        lab.hearth.start()?;
        let mut client = lab.client()?;
        let mut again = 0;
        for file in &files {
            let now = commit(&mut client, file)?;
            seen.push(now);
            for (of, block, verifier) in &pending {
                if of == &file && *verifier != now {
                    send(&mut client, file, *block, round)?;
                    again += 1;
                }
            }
            ensure!(commit(&mut client, file)? == now);
        }
        let all = 2 * BLOCKS;
        ensure!(again == if host { all } else { 0 }, "{again} of {all}");
        for file in &files {
            for block in 0..BLOCKS {
                let found = read(&mut client, file, block * 512, 512)?;
                ensure!(
                    found == pattern(block * 512, round, 512),
                    "block {block} in life {round}"
                );
            }
        }
    }
    seen.dedup();
    ensure!(seen.len() >= 3, "{seen:?}");
    lab.hearth.ok(&["datastore", "flush", "vms"])?;
    for name in ["a.img", "a.log"] {
        let plain = fs::read(lab.vms.join(name))?;
        for block in 0..BLOCKS {
            let at = block as usize * 512;
            ensure!(
                plain[at..at + 512] == pattern(block * 512, 4, 512),
                "{block}"
            );
        }
    }
    Ok(())
}

/// The files that events of this name are about.
fn told_of(lab: &Lab, name: &str) -> Result<Vec<String>> {
    let text = lab.hearth.ok(&["events", "--json"])?;
    let mut files = Vec::new();
    for line in text.lines() {
        let event: Value = serde_json::from_str(line)?;
        if event["event"] == name {
            let file = event["details"]["file"].as_str().context("a file")?;
            files.push(file.to_owned());
        }
    }
    Ok(files)
}

/// Somebody who opens a file on this host while something of it is on flash only is told of, once; whoever reads what is
/// in the file anyway is not, and neither are we.
#[test]
fn who_opens_a_dirty_file_on_the_host_is_told_of_once() -> Result<()> {
    const TEST: &str = "datastore::who_opens_a_dirty_file_on_the_host_is_told_of_once";
    let lab = Lab::new()?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let [dirty, clean] = ["a.img", "b.img"].map(|name| lab.vms.join(name));
    let file = create(&mut client, &dir, "a.img")?;
    let other = create(&mut client, &dir, "b.img")?;
    write(&mut client, &file, 0, &pattern(0, 1, 65536))?;
    write(&mut client, &other, 0, &pattern(0, 1, 65536))?;
    if lab.hearth.log().contains("cannot be seen here") {
        eprintln!("{TEST}: skipped: this kernel or file system does not tell who opens files");
        return Ok(());
    }
    lab.hearth.ok(&["datastore", "flush", "vms", "--hold"])?;
    fs::read(&clean)?;
    lab.hearth
        .ok(&["datastore", "set", "vms", "--hold", "off"])?;
    // What is written back meanwhile is no reason to be told of.
    let open_dirty = |client: &mut Client| -> Result<Vec<String>> {
        for block in 0..4 {
            write(client, &file, block * 4096, &pattern(0, 2, 4096))?;
        }
        ensure!(fs::read(&dirty)?.len() == 65536);
        lab.hearth.ok(&["datastore", "files", "vms"])?;
        told_of(&lab, "dirty-file-opened")
    };
    let told = until("the open is told of", LIMIT, || {
        let told = open_dirty(&mut client).ok()?;
        (!told.is_empty()).then_some(told)
    })?;
    ensure!(told == [path(&dirty)], "{told:?}");
    let events = lab.hearth.ok(&["events", "--json"])?;
    let own = format!("process {}", std::process::id());
    ensure!(
        events.contains(&own) || events.contains("another process"),
        "{events}"
    );
    lab.hearth.logged("flush vms --hold")?;
    for _ in 0..5 {
        let told = open_dirty(&mut client)?;
        ensure!(told.len() == 1, "{told:?}");
    }
    Ok(())
}

/// Two clients that write one disk in turn are told of, once; one client with two connections is not, nor are two that share
/// a small file.
#[test]
fn two_clients_that_write_one_file_are_told_of_once() -> Result<()> {
    let lab = Lab::new()?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let mut made = |name| create(&mut client, &dir, name);
    let (shared, own, small) = (made("a.img")?, made("b.img")?, made("a.log")?);
    let mut both = [lab.client()?, lab.client()?];
    let mut turn = |file: &[u8], names: [&[u8; 6]; 2]| -> Result<()> {
        for (client, name) in both.iter_mut().zip(names) {
            let data = pattern(0, 1, 4096);
            let args = Args::durable(file, 0, &data);
            loop {
                let xid = client.next_xid();
                let mut message = client.message(xid, &args);
                // Where the name of the client's machine is.
                ensure!(message[40..46] == *b"hearth");
                message[40..46].copy_from_slice(name);
                client.send_raw(&message)?;
                let results = client.results(xid)?;
                if results.status != Status::JukeBox as u32 {
                    results.ok()?;
                    break;
                }
            }
        }
        Ok(())
    };
    for _ in 0..5 {
        turn(&own, [b"host-1", b"host-1"])?;
        turn(&small, [b"host-1", b"host-2"])?;
    }
    let told = until("the two are told of", LIMIT, || {
        turn(&shared, [b"host-1", b"host-2"]).ok()?;
        let told = told_of(&lab, "two-clients-write").ok()?;
        (!told.is_empty()).then_some(told)
    })?;
    ensure!(told == [path(&lab.vms.join("a.img"))], "{told:?}");
    let events = lab.hearth.ok(&["events", "--json"])?;
    for name in ["127.0.0.1 (host-1)", "127.0.0.1 (host-2)"] {
        ensure!(events.contains(name), "{name} in {events}");
    }
    Ok(())
}

/// Programs that copy sparse files take a file without space for one hole: what is on flash only counts.
#[test]
fn used_space_counts_flash_only_data() -> Result<()> {
    const M: u64 = 1 << 20;
    let mut lab = Lab::new()?;
    lab.hearth.stop()?;
    let slow = ["--destage-rate", "4K"].map(str::to_owned);
    lab.hearth.serve_args.extend(slow);
    lab.hearth.start()?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let file = create(&mut client, &dir, "a.img")?;
    set_size(&mut client, &file, 64 * M)?.ok()?;
    ensure!(get(&mut client, &file)?.used < M);
    for block in 0..256u64 {
        let at = block * 65536 * 2;
        write(&mut client, &file, at, &pattern(at, 1, 65536))?;
    }
    let told = get(&mut client, &file)?;
    let plain = fs::metadata(lab.vms.join("a.img"))?;
    let allocated = std::os::unix::fs::MetadataExt::blocks(&plain) * 512;
    ensure!(allocated < 16 * M, "nothing of it is on flash only");
    ensure!(
        (16 * M..=16 * M + allocated).contains(&told.used),
        "{} bytes are said to be used of 16 MiB, {allocated} of them in the file",
        told.used
    );
    // And once the daemon has found it again.
    lab.hearth.kill9()?;
    lab.hearth.start()?;
    let mut client = lab.client()?;
    ensure!(get(&mut client, &file)?.used >= 16 * M);
    lab.hearth.ok(&["datastore", "flush", "vms"])?;
    let told = get(&mut client, &file)?.used;
    ensure!((16 * M..32 * M).contains(&told), "{told}");
    Ok(())
}

/// A write sets the time of change to the present, also where it lay in the future: incremental backups would skip the
/// file until then.
#[test]
fn write_ends_a_future_time() -> Result<()> {
    use std::time::{Duration, SystemTime};
    let lab = Lab::new()?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let file = create(&mut client, &dir, "a.img")?;
    write(&mut client, &file, 0, &pattern(0, 1, 4096))?;
    lab.hearth.ok(&["datastore", "flush", "vms"])?;
    let plain = lab.vms.join("a.img");
    for years in [300, 1] {
        let future = SystemTime::now() + Duration::from_secs(years * 365 * 86400);
        File::options()
            .write(true)
            .open(&plain)?
            .set_modified(future)?;
        let later = fs::metadata(&plain)?.modified()?;
        if later < SystemTime::now() {
            println!("SKIPPED datastore: this file system has no such times");
            return Ok(());
        }
        get(&mut client, &file)?;
        write(&mut client, &file, 0, &pattern(0, 2, 4096))?;
        lab.hearth.ok(&["datastore", "flush", "vms"])?;
        let now = fs::metadata(&plain)?.modified()?;
        ensure!(now <= SystemTime::now(), "{years} years: {now:?}");
    }
    Ok(())
}
