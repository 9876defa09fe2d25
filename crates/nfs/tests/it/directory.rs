//! A directory of a local file system, over the protocol: what is in its files, and who may do what with them.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};

use crate::common::{
    Client, attributes, get, root as common_root, set_attributes, set_size, user, wcc,
};
use crate::stage::{Stage, at, create, file, lookup, made, on_stage, read, write};
use anyhow::{Result, ensure};
use hearth_nfs::local::By;
use hearth_nfs::rpc::Credential;
use hearth_nfs::v3::{Args, Create, How, SetAttributes, SetTime, Stability, Status, Time};

twice!(
    what_is_written_is_read_and_in_the_file,
    files_are_sparse_and_large,
    a_commit_tells_the_verifier_of_the_writes_before_it_also_after_a_restart,
    attributes_are_set_and_guarded,
    others_may_what_the_mode_says,
    set_id_bits_of_others_are_stripped,
    what_a_client_asks_of_the_whole,
    what_others_write_here_is_seen,
);

fn what_is_written_is_read_and_in_the_file(stage: Stage) -> Result<()> {
    let (mut client, root) = stage.client()?;
    let a = file(&mut client, &root, "a")?;
    ensure!(a.len() <= 56, "ESXi takes no more");
    write(&mut client, &a, 0, b"hello", Stability::File)?;
    write(&mut client, &a, 3, b"p!", Stability::Data)?;
    ensure!(read(&mut client, &a, 0, 100)? == (b"help!".to_vec(), true));
    ensure!(fs::read(stage.dir().join("a"))? == b"help!");
    // Every read that reaches the end says so, and no other.
    ensure!(read(&mut client, &a, 0, 5)? == (b"help!".to_vec(), true));
    ensure!(read(&mut client, &a, 0, 4)? == (b"help".to_vec(), false));
    ensure!(read(&mut client, &a, 5, 4)? == (vec![], true));
    ensure!(read(&mut client, &a, u64::MAX, 4)? == (vec![], true));
    ensure!(read(&mut client, &a, 0, 0)? == (vec![], false));
    // All of what a client may ask for at once.
    let big = vec![9; 1 << 20];
    write(&mut client, &a, 0, &big, Stability::File)?;
    ensure!(read(&mut client, &a, 0, u32::MAX)? == (big, true));
    Ok(())
}

fn files_are_sparse_and_large(stage: Stage) -> Result<()> {
    let (mut client, root) = stage.client()?;
    // As ESXi makes a thin disk.
    let disk = file(&mut client, &root, "vm-flat.vmdk")?;
    set_size(&mut client, &disk, 3 << 40)?.ok()?;
    let offset = (2 << 40) + 512;
    write(&mut client, &disk, offset, &[7; 4096], Stability::File)?;
    let a = get(&mut client, &disk)?;
    ensure!(a.size == 3 << 40 && a.used < 1 << 20, "{a:?}");
    ensure!(read(&mut client, &disk, offset - 1, 3)? == (vec![0, 7, 7], false));
    ensure!(fs::metadata(stage.dir().join("vm-flat.vmdk"))?.blocks() * 512 == a.used);
    // What is cut off does not come back.
    for size in [offset + 1, 3 << 40] {
        set_size(&mut client, &disk, size)?.ok()?;
    }
    ensure!(read(&mut client, &disk, offset, 3)? == (vec![7, 0, 0], false));
    let beyond = Args::durable(&disk, u64::MAX, &[1]);
    client.call(&beyond)?.is(Status::FBig)?;
    Ok(())
}

fn a_commit_tells_the_verifier_of_the_writes_before_it_also_after_a_restart(
    mut stage: Stage,
) -> Result<()> {
    let (mut client, root) = stage.client()?;
    let a = file(&mut client, &root, "a")?;
    let commit = |client: &mut Client| -> Result<[u8; 8]> {
        let results = client
            .call(&Args::Commit {
                file: &a,
                offset: 0,
                count: 0,
            })?
            .ok()?;
        let mut r = results.reader();
        wcc(&mut r)?;
        let verifier = r.fixed()?;
        r.end()?;
        Ok(verifier)
    };
    let first = write(&mut client, &a, 0, b"data", Stability::Unstable)?;
    ensure!(commit(&mut client)? == first);
    // The kernel keeps what it was given when we end: nothing is lost, nothing has to be sent again.
    let second = write(&mut client, &a, 4, b"more", Stability::Unstable)?;
    stage.start()?;
    let (mut client, _) = stage.client()?;
    ensure!(commit(&mut client)? == second && second == first);
    ensure!(read(&mut client, &a, 0, 9)? == (b"datamore".to_vec(), true));
    // Another boot of the host is another memory.
    fs::write(
        stage.state().join("verifier"),
        format!("another-boot {:016x}\n", u64::from_be_bytes(first)),
    )?;
    stage.start()?;
    let (mut client, _) = stage.client()?;
    ensure!(commit(&mut client)? != first);
    Ok(())
}

fn attributes_are_set_and_guarded(stage: Stage) -> Result<()> {
    let (mut client, root) = stage.client()?;
    let a = file(&mut client, &root, "a")?;
    let old = get(&mut client, &a)?;
    let to = Time {
        seconds: 1_000_000_000,
        nanos: 5,
    };
    let set = SetAttributes {
        mode: Some(0o4711),
        uid: Some(1000),
        gid: Some(1001),
        size: Some(77),
        accessed: SetTime::To(to),
        modified: SetTime::To(to),
    };
    client
        .call(&Args::SetAttr {
            file: &a,
            set,
            only_if: Some(Time::default()),
        })?
        .is(Status::NotSync)?;
    ensure!(get(&mut client, &a)? == old);
    let results = client
        .call(&Args::SetAttr {
            file: &a,
            set,
            only_if: Some(old.changed),
        })?
        .ok()?;
    let (before, after) = wcc(&mut results.reader())?;
    ensure!(before == Some((old.size, old.modified, old.changed)));
    let now = get(&mut client, &a)?;
    ensure!(after == Some(now));
    ensure!(
        (now.mode, now.uid, now.gid, now.size) == (0o4711, 1000, 1001, 77),
        "{now:?}"
    );
    ensure!(now.modified == to && now.accessed == to);
    let set = SetAttributes {
        modified: SetTime::Now,
        ..SetAttributes::default()
    };
    set_attributes(&mut client, &a, set)?.ok()?;
    let later = get(&mut client, &a)?;
    ensure!(later.modified > to && later.accessed == to);
    let wrong = Time {
        seconds: 0,
        nanos: 1_000_000_000,
    };
    let set = SetAttributes {
        modified: SetTime::To(wrong),
        ..SetAttributes::default()
    };
    set_attributes(&mut client, &a, set)?.is(Status::Inval)?;
    Ok(())
}

/// A client names any user and any group but root. A program that it makes must not run as them on this host.
fn set_id_bits_of_others_are_stripped(stage: Stage) -> Result<()> {
    let (mut client, root) = stage.client()?;
    let with = |mode| SetAttributes {
        mode: Some(mode),
        ..SetAttributes::default()
    };
    let on_host = |name: &str| -> Result<(u32, u32)> {
        let meta = fs::metadata(stage.dir().join(name))?;
        Ok((meta.mode() & 0o7777, meta.gid()))
    };
    let arm = |name: &str, mode| {
        fs::set_permissions(stage.dir().join(name), fs::Permissions::from_mode(mode))
    };
    let disk_group = Credential::Sys {
        uid: 64055,
        gid: 6,
        groups: vec![6, 27],
    };
    client.credential = disk_group.clone();
    let (a, _) = made(create(&mut client, &root, "a", How::Guarded(with(0o6755)))?)?;
    ensure!(on_host("a")? == (0o755, 6));
    set_attributes(&mut client, &a, with(0o7777))?.ok()?;
    ensure!(on_host("a")? == (0o1777, 6));
    // Together with another group that it names, too.
    let group = SetAttributes {
        gid: Some(27),
        ..with(0o6755)
    };
    set_attributes(&mut client, &a, group)?.ok()?;
    ensure!(on_host("a")? == (0o755, 27));
    // Whoever changes the data of a program of this host disarms it.
    arm("a", 0o6755)?;
    write(&mut client, &a, 0, b"own code", Stability::File)?;
    ensure!(on_host("a")? == (0o755, 27));
    arm("a", 0o6755)?;
    set_size(&mut client, &a, 3)?.ok()?;
    ensure!(on_host("a")? == (0o755, 27));
    arm("a", 0o6755)?;
    let cut = SetAttributes {
        size: Some(0),
        ..SetAttributes::default()
    };
    create(&mut client, &root, "a", How::Unchecked(cut))?.ok()?;
    ensure!(on_host("a")? == (0o755, 27));
    // What is made in a directory with the bit has its group and no bit, but for directories.
    client.credential = common_root();
    let dir = |client: &mut Client, at_dir: &[u8], name, mode| -> Result<Vec<u8>> {
        let what = Create::Directory(with(mode));
        let at = at(at_dir, name);
        Ok(made(client.call(&Args::Create { at, what })?)?.0)
    };
    let shared = dir(&mut client, &root, "shared", 0o2777)?;
    client.credential = disk_group;
    made(create(
        &mut client,
        &shared,
        "b",
        How::Guarded(with(0o2755)),
    )?)?;
    ensure!(on_host("shared/b")? == (0o755, 0));
    let below = dir(&mut client, &shared, "below", 0o755)?;
    ensure!(on_host("shared/below")? == (0o2755, 0));
    set_attributes(&mut client, &below, with(0o6750))?.ok()?;
    ensure!(on_host("shared/below")? == (0o2750, 0));
    let plain = dir(&mut client, &root, "plain", 0o6755)?;
    ensure!(on_host("plain")? == (0o755, 6));
    set_attributes(&mut client, &plain, with(0o2755))?.ok()?;
    ensure!(on_host("plain")? == (0o755, 6));
    for what in [Create::Fifo(with(0o6755)), Create::Socket(with(0o6755))] {
        client
            .call(&Args::Create {
                at: at(&root, "special"),
                what,
            })?
            .ok()?;
        ensure!(on_host("special")?.0 == 0o755);
        client.call(&Args::Remove(at(&root, "special")))?.ok()?;
    }
    // No devices, not for root either.
    client.credential = common_root();
    let what = Create::Device {
        block: true,
        device: (8, 0),
        set: with(0o666),
    };
    client
        .call(&Args::Create {
            at: at(&root, "sda"),
            what,
        })?
        .is(Status::NotSupp)?;
    // Root of a host that may be root keeps what it sets.
    set_attributes(&mut client, &a, with(0o6755))?.ok()?;
    ensure!(on_host("a")?.0 == 0o6755);
    Ok(())
}

fn others_may_what_the_mode_says(stage: Stage) -> Result<()> {
    let (mut client, root) = stage.client()?;
    let a = file(&mut client, &root, "a")?;
    write(&mut client, &a, 0, b"root's", Stability::File)?;
    client.credential = user(1000);
    ensure!(read(&mut client, &a, 0, 9)?.0 == b"root's");
    let data = b"mine?";
    let args = Args::durable(&a, 0, data);
    client.call(&args)?.is(Status::Access)?;
    let mode = SetAttributes {
        mode: Some(0o777),
        ..SetAttributes::default()
    };
    set_attributes(&mut client, &a, mode)?.is(Status::Perm)?;
    set_size(&mut client, &a, 0)?.is(Status::Access)?;
    // What is made is the maker's, who may write it also where nobody may.
    let set = SetAttributes {
        mode: Some(0o400),
        uid: Some(0),
        ..SetAttributes::default()
    };
    let (own, attributes) = made(create(&mut client, &root, "own", How::Guarded(set))?)?;
    ensure!((attributes.uid, attributes.gid, attributes.mode) == (1000, 1000, 0o400));
    write(&mut client, &own, 0, b"mine", Stability::File)?;
    let give = SetAttributes {
        uid: Some(1001),
        ..SetAttributes::default()
    };
    set_attributes(&mut client, &own, give)?.is(Status::Perm)?;
    client.credential = user(1001);
    client
        .call(&Args::Read {
            file: &own,
            offset: 0,
            count: 1,
        })?
        .is(Status::Access)?;
    // Directories that nobody else may search, write or empty.
    fs::create_dir(stage.dir().join("private"))?;
    fs::write(stage.dir().join("private/x"), b"")?;
    fs::set_permissions(
        stage.dir().join("private"),
        fs::Permissions::from_mode(0o700),
    )?;
    let (private, _) = lookup(&mut client, &root, "private")?;
    client
        .call(&Args::Lookup(at(&private, "x")))?
        .is(Status::Access)?;
    client
        .call(&Args::Remove(at(&private, "x")))?
        .is(Status::Access)?;
    let list = Args::ReadDir {
        dir: &private,
        cookie: 0,
        verifier: [0; 8],
        bytes: 4096,
    };
    client.call(&list)?.is(Status::Access)?;
    create(
        &mut client,
        &private,
        "y",
        How::Guarded(SetAttributes::default()),
    )?
    .is(Status::Access)?;
    fs::set_permissions(stage.dir(), fs::Permissions::from_mode(0o1777))?;
    client
        .call(&Args::Remove(at(&root, "own")))?
        .is(Status::Access)?;
    let (from, to) = (at(&root, "own"), at(&root, "stolen"));
    client
        .call(&Args::Rename { from, to })?
        .is(Status::Access)?;
    client.credential = user(1000);
    client.call(&Args::Remove(at(&root, "own")))?.ok()?;
    // A program that somebody else writes to runs as nobody's any more.
    fs::write(stage.dir().join("suid"), b"x")?;
    fs::set_permissions(stage.dir().join("suid"), fs::Permissions::from_mode(0o6777))?;
    let (suid, _) = lookup(&mut client, &root, "suid")?;
    write(&mut client, &suid, 0, b"y", Stability::File)?;
    ensure!(get(&mut client, &suid)?.mode == 0o777);
    Ok(())
}

fn what_a_client_asks_of_the_whole(stage: Stage) -> Result<()> {
    let (mut client, root) = stage.client()?;
    let results = client.call(&Args::FsInfo { root: &root })?.ok()?;
    let mut r = results.reader();
    r.optional(attributes)?;
    let sizes: Vec<u32> = (0..7).map(|_| r.u32()).collect::<Result<_, _>>()?;
    ensure!(
        sizes[..6] == [1 << 20, 1 << 20, 4096, 1 << 20, 1 << 20, 4096],
        "{sizes:?}"
    );
    ensure!(r.u64()? > 1 << 42 && r.u64()? == 1 && r.u32()? == 0x1b);
    r.end()?;
    let results = client.call(&Args::FsStat { root: &root })?.ok()?;
    let mut r = results.reader();
    r.optional(attributes)?;
    let (all, free, available) = (r.u64()?, r.u64()?, r.u64()?);
    let statfs = rustix::fs::statvfs(stage.dir())?;
    ensure!(all == statfs.f_blocks * statfs.f_frsize && available <= free && free <= all);
    let results = client.call(&Args::PathConf { file: &root })?.ok()?;
    let mut r = results.reader();
    r.optional(attributes)?;
    ensure!(r.u32()? >= 1000 && r.u32()? == 255);
    Ok(())
}

fn what_others_write_here_is_seen(stage: Stage) -> Result<()> {
    let (mut client, root) = stage.client()?;
    let a = file(&mut client, &root, "a")?;
    let local = fs::OpenOptions::new()
        .write(true)
        .open(stage.dir().join("a"))?;
    local.write_all_at(b"local", 10)?;
    ensure!(read(&mut client, &a, 10, 5)? == (b"local".to_vec(), true));
    ensure!(get(&mut client, &a)?.size == 15);
    Ok(())
}

/// A file system that is full: what does not fit is refused, what was promised stays.
#[test]
fn a_full_file_system_says_so() -> Result<()> {
    const TEST: &str = "directory::a_full_file_system_says_so";
    const INSIDE: &str = "HEARTH_TEST_INSIDE";
    if std::env::var_os(INSIDE).is_none() {
        // A small file system that nobody else sees.
        let own = std::env::current_exe()?;
        let script = format!(
            "mount -t tmpfs -o size=4M tmpfs /mnt && exec {} --exact {TEST} --nocapture",
            own.display()
        );
        let output = std::process::Command::new("unshare")
            .args(["--mount", "sh", "-c", &script])
            .env(INSIDE, "1")
            .output()?;
        let said = format!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        if said.contains("Operation not permitted") {
            eprintln!("{TEST}: skipped: this user may not mount a file system");
            return Ok(());
        }
        ensure!(
            output.status.success() && said.contains("1 passed"),
            "{said}"
        );
        return Ok(());
    }
    let place = tempfile::tempdir_in("/mnt")?;
    fs::create_dir(place.path().join("vms"))?;
    let mut stage = Stage {
        place,
        by: By::Handle,
        server: None,
    };
    stage.start()?;
    let (mut client, root) = stage.client()?;
    let a = file(&mut client, &root, "a")?;
    let mega = vec![5; 1 << 20];
    let mut written = 0;
    let refused = loop {
        let args = Args::durable(&a, written, &mega);
        let results = client.call(&args)?;
        if results.status != 0 {
            break results;
        }
        let mut r = results.reader();
        wcc(&mut r)?;
        written += u64::from(r.u32()?);
        ensure!(written < 5 << 20, "it is no larger than 4 MiB");
    };
    refused.is(Status::NoSpace)?;
    ensure!(written > 2 << 20);
    let results = client.call(&Args::FsStat { root: &root })?.ok()?;
    let mut r = results.reader();
    r.optional(attributes)?;
    ensure!(r.u64()? == 4 << 20 && r.u64()? < 1 << 20);
    ensure!(get(&mut client, &a)?.size == written);
    ensure!(read(&mut client, &a, written - 1, 9)? == (vec![5], true));
    // A hole takes no room, and what is removed gives it back.
    set_size(&mut client, &a, 1 << 30)?.ok()?;
    let b = file(&mut client, &root, "b")?;
    let args = Args::durable(&b, 0, &mega);
    client.call(&Args::Remove(at(&root, "a")))?.ok()?;
    let results = client.call(&args)?.ok()?;
    let mut r = results.reader();
    wcc(&mut r)?;
    ensure!(r.u32()? == 1 << 20);
    Ok(())
}
