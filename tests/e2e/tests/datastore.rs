//! A directory served as a datastore by the real daemon.

#[path = "../../../crates/nfs/tests/common/mod.rs"]
mod nfs;

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use hearth_nfs::v3::{Args, Attributes, Create, How, Named, SetAttributes, Stability, Status};
use hearth_rig::daemon::{Hearth, path};
use hearth_rig::wait::until;
use nfs::Client;
use serde_json::Value;

/// Far longer than anything here takes.
const LIMIT: Duration = Duration::from_secs(60);

/// A daemon, a directory it serves as `/vms`, and nobody else.
struct Lab {
    hearth: Hearth,
    vms: PathBuf,
}

impl Lab {
    fn new() -> Result<Lab> {
        let mut hearth = Hearth::with_pool("128M")?;
        let state = hearth.dir().join("state");
        hearth.serve_args = vec!["--state-dir".to_owned(), path(&state).to_owned()];
        hearth.start()?;
        let vms = hearth.dir().join("vms");
        fs::create_dir(&vms)?;
        let lab = Lab { hearth, vms };
        lab.hearth.ok(&[
            "datastore",
            "add",
            path(&lab.vms),
            "--nfs",
            "--listen",
            "127.0.0.1:0",
            "--client",
            "127.0.0.1=rw,root",
        ])?;
        Ok(lab)
    }

    fn show(&self) -> Result<Value> {
        let text = self.hearth.ok(&["datastore", "show", "vms", "--json"])?;
        Ok(serde_json::from_str(&text)?)
    }

    /// A client, as soon as the datastore is served: after a start that is a moment after the daemon answers.
    fn client(&self) -> Result<Client> {
        let shown = until("the datastore is served", Duration::from_secs(30), || {
            let shown = self.show().ok()?;
            (shown["served"] == true).then_some(shown)
        })?;
        let at: SocketAddr = shown["listen"].as_str().context("an address")?.parse()?;
        let mut client = Client::connect(at)?;
        client.patient = true;
        Ok(client)
    }
}

fn root(client: &mut Client) -> Result<Vec<u8>> {
    let mounted = client.mount("/vms")?;
    mounted.map_err(|status| anyhow::anyhow!("mount: {status}"))
}

fn create(client: &mut Client, dir: &[u8], name: &str) -> Result<Vec<u8>> {
    let what = Create::File(How::Guarded(SetAttributes {
        mode: Some(0o644),
        ..SetAttributes::default()
    }));
    let name = name.as_bytes();
    let at = Named { dir, name };
    let results = client.call(&Args::Create { at, what })?.ok()?;
    let handle = results
        .reader()
        .optional(|r| r.opaque(64).map(<[u8]>::to_vec))?;
    handle.context("a handle")
}

fn write(client: &mut Client, file: &[u8], offset: u64, data: &[u8]) -> Result<()> {
    let args = Args::Write {
        file,
        offset,
        count: data.len() as u32,
        stable: Stability::File,
        data,
    };
    client.call(&args)?.ok().map(drop)
}

fn read(client: &mut Client, file: &[u8], offset: u64, count: u32) -> Result<Vec<u8>> {
    let args = Args::Read {
        file,
        offset,
        count,
    };
    let results = client.call(&args)?.ok()?;
    let mut r = results.reader();
    r.optional(nfs::attributes)?;
    r.u32()?;
    r.u32()?;
    Ok(r.opaque(count)?.to_vec())
}

fn lines(dir: &Path) -> Result<Vec<String>> {
    let names = fs::read_dir(dir)?.map(|e| Ok(e?.file_name().to_string_lossy().into_owned()));
    names.collect()
}

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
    let try_write = |client: &mut Client| {
        client.call(&Args::Write {
            file: &file,
            offset: 0,
            count: 1,
            stable: Stability::File,
            data: b"x",
        })
    };
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
        .ok(&["datastore", "set", "vms", "--client", "127.0.0.1"])?;
    // Root counts as nobody now.
    try_write(&mut client)?.is(Status::Access)?;
    client.credential = nfs::user(0x7fff);
    ensure!(read(&mut client, &file, 0, 9)? == b"x");
    lab.hearth.ok(&["datastore", "remove", "vms"])?;
    ensure!(lab.hearth.ok(&["datastore", "list", "--json"])?.trim() == "[]");
    ensure!(fs::read(lab.vms.join("a"))? == b"x");
    Ok(())
}

/// Bytes that depend on where they are and on when they were written.
fn pattern(offset: u64, round: u8, len: usize) -> Vec<u8> {
    let at = |n: usize| (offset + n as u64) / 512;
    (0..len)
        .map(|n| ((at(n).wrapping_mul(0x9e37_79b9) >> 7) as u8 ^ round.wrapping_mul(37)) | 1)
        .collect()
}

fn set_size(client: &mut Client, file: &[u8], size: u64) -> Result<()> {
    let set = SetAttributes {
        size: Some(size),
        ..SetAttributes::default()
    };
    let args = Args::SetAttr {
        file,
        set,
        only_if: None,
    };
    client.call(&args)?.ok().map(drop)
}

fn get(client: &mut Client, file: &[u8]) -> Result<Attributes> {
    let results = client.call(&Args::GetAttr { file })?.ok()?;
    Ok(nfs::attributes(&mut results.reader())?)
}

/// What is durable when it is answered is there after a kill, in the cache and, once it was
/// flushed, in the plain file.
#[test]
fn durable_writes_outlive_a_kill_and_reach_the_file() -> Result<()> {
    let mut lab = Lab::new()?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let disk = create(&mut client, &dir, "vm-flat.vmdk")?;
    set_size(&mut client, &disk, 8 << 20)?;
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
    lab.hearth.ok(&["datastore", "remove", "vms"])?;
    ensure!(fs::read(lab.vms.join("vm-flat.vmdk"))? == plain);
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
    set_size(&mut client, &disk, cut)?;
    ensure!(get(&mut client, &disk)?.size == cut);
    set_size(&mut client, &disk, 4 << 20)?;
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

/// Somebody on this host writes over a file: clients see what he wrote.
#[test]
fn a_file_replaced_behind_our_back_is_noticed() -> Result<()> {
    let lab = Lab::new()?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let file = create(&mut client, &dir, "a.img")?;
    write(&mut client, &file, 0, &pattern(0, 1, 1 << 20))?;
    lab.hearth.ok(&["datastore", "flush", "vms"])?;
    ensure!(read(&mut client, &file, 0, 4096)? == pattern(0, 1, 4096));
    fs::write(lab.vms.join("a.img"), pattern(0, 2, 3 << 20))?;
    until("the change is noticed", LIMIT, || {
        let now = read(&mut client, &file, 0, 4096).ok()?;
        (now == pattern(0, 2, 4096)).then_some(())
    })?;
    ensure!(get(&mut client, &file)?.size == 3 << 20);
    for at in (0..3u64 << 20).step_by(1 << 19) {
        ensure!(
            read(&mut client, &file, at, 4096)? == pattern(at, 2, 4096),
            "{at}"
        );
    }
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
            let args = Args::Write {
                file: &disk,
                offset: block * 4096,
                count: 4096,
                stable: Stability::File,
                data: &data,
            };
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
    let (mut cookie, mut verifier, mut names) = (0, [0u8; 8], 0);
    loop {
        let args = Args::ReadDirPlus {
            dir: &dir,
            cookie,
            verifier,
            names: 8192,
            bytes: 65536,
        };
        let results = client.call(&args)?.ok()?;
        let mut r = results.reader();
        r.optional(nfs::attributes)?;
        verifier = r.fixed()?;
        while r.u32()? == 1 {
            r.u64()?;
            r.opaque(255)?;
            cookie = r.u64()?;
            r.optional(nfs::attributes)?;
            r.optional(|r| r.opaque(64).map(<[u8]>::to_vec))?;
            names += 1;
        }
        if r.u32()? == 1 {
            break;
        }
    }
    ensure!(names == 2002 || names == 2000, "{names}");
    ensure!(lab.show()?["disks"] == 0, "{}", lab.show()?);
    ensure!(read(&mut client, &file, 0, 100)? == b"image");
    ensure!(lab.show()?["open"] == 1, "{}", lab.show()?);
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
    lab.hearth.ok(&["pool", "export", "--flash", &flash])?;
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
