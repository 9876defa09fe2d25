//! A directory of a local file system, over the protocol.
//!
//! Everything is tried twice: with files found by handle, which only root may (without that these tests say so), and
//! with files found by number.

mod common;

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use common::{Client, Results, attributes, user, wcc};
use hearth_nfs::access::{Access, Rights};
use hearth_nfs::local::{By, Directory};
use hearth_nfs::server::{Config, Server};
use hearth_nfs::v3::{
    Args, Attributes, Create, How, Kind, Named, SetAttributes, SetTime, Stability, Status, Time,
};
use tempfile::TempDir;

const ALL: Rights = Rights {
    write: true,
    root: true,
};

struct Stage {
    place: TempDir,
    by: By,
    server: Option<Server>,
}

impl Stage {
    /// `None`, and a line that says why, where files cannot be found so.
    fn new(by: By, test: &str) -> Result<Option<Stage>> {
        let place = tempfile::tempdir()?;
        fs::create_dir(place.path().join("vms"))?;
        fs::set_permissions(place.path().join("vms"), fs::Permissions::from_mode(0o777))?;
        let mut stage = Stage {
            place,
            by,
            server: None,
        };
        match Directory::open_by(by, &stage.dir(), &stage.state()) {
            Ok(_) => {}
            Err(error) => {
                eprintln!("{test}: skipped: {error}");
                return Ok(None);
            }
        }
        stage.start()?;
        Ok(Some(stage))
    }

    fn dir(&self) -> PathBuf {
        self.place.path().join("vms")
    }

    fn state(&self) -> PathBuf {
        self.place.path().join("state")
    }

    /// As after a restart of the daemon.
    fn start(&mut self) -> Result<()> {
        self.server = None;
        let listen = vec![SocketAddr::from(([127, 0, 0, 1], 0))];
        let server = Server::start(&Config {
            listen,
            patience: common::LONG,
            ..Config::default()
        })?;
        let (directory, identity) = Directory::open_by(self.by, &self.dir(), &self.state())?;
        let access = Access::nobody().allow("127.0.0.1".parse()?, ALL);
        server.offer(directory.export("/vms", &identity), access)?;
        self.server = Some(server);
        Ok(())
    }

    fn client(&self) -> Result<(Client, Vec<u8>)> {
        let server = self.server.as_ref().context("a server")?;
        let mut client = Client::connect(server.addresses()[0])?;
        client.patient = true;
        let root = client.mount("/vms")?.ok().context("mounted")?;
        Ok((client, root))
    }
}

/// Without root's rights nobody can be given a file.
const OF_ROOT: [&str; 2] = [
    "attributes_are_set_and_guarded",
    "others_may_what_the_mode_says",
];

fn on_stage(by: By, test: &str, run: fn(Stage) -> Result<()>) -> Result<()> {
    if OF_ROOT.contains(&test) && !rustix::process::geteuid().is_root() {
        eprintln!("{test}: skipped: only root can give files away");
        return Ok(());
    }
    match Stage::new(by, test)? {
        Some(stage) => run(stage),
        None => Ok(()),
    }
}

macro_rules! twice {
    ($($test:ident),* $(,)?) => {
        mod by_handle {
            $(#[test]
            fn $test() -> anyhow::Result<()> {
                super::on_stage(super::By::Handle, stringify!($test), super::$test)
            })*
        }
        mod by_number {
            $(#[test]
            fn $test() -> anyhow::Result<()> {
                super::on_stage(super::By::Number, stringify!($test), super::$test)
            })*
        }
    };
}

twice!(
    what_is_written_is_read_and_in_the_file,
    files_are_sparse_and_large,
    a_commit_tells_the_verifier_of_the_writes_before_it_also_after_a_restart,
    handles_live_through_renames_and_restarts_and_die_with_the_file,
    creating_is_unchecked_guarded_or_exclusive,
    of_many_who_create_one_wins,
    attributes_are_set_and_guarded,
    others_may_what_the_mode_says,
    nothing_leads_out_of_the_directory,
    names_are_made_moved_linked_and_removed,
    five_thousand_names_are_listed_once_each,
    what_a_client_asks_of_the_whole,
    what_others_move_here_is_found_again,
    what_others_write_here_is_seen,
);

fn at<'a>(dir: &'a [u8], name: &'a str) -> Named<'a> {
    Named {
        dir,
        name: name.as_bytes(),
    }
}

fn lookup(client: &mut Client, dir: &[u8], name: &str) -> Result<(Vec<u8>, Attributes)> {
    let results = client.call(&Args::Lookup(at(dir, name)))?.ok()?;
    let mut r = results.reader();
    let handle = r.opaque(64)?.to_vec();
    let file = r.optional(attributes)?.context("attributes")?;
    ensure!(r.optional(attributes)?.context("of the directory")?.kind == Kind::Directory);
    r.end()?;
    Ok((handle, file))
}

fn made(results: Results) -> Result<(Vec<u8>, Attributes)> {
    let results = results.ok()?;
    let mut r = results.reader();
    let handle = r
        .optional(|r| r.opaque(64).map(<[u8]>::to_vec))?
        .context("a handle")?;
    let file = r.optional(attributes)?.context("attributes")?;
    let (before, after) = wcc(&mut r)?;
    ensure!(before.is_some() && after.is_some());
    r.end()?;
    Ok((handle, file))
}

fn create(client: &mut Client, dir: &[u8], name: &str, how: How) -> Result<Results> {
    client.call(&Args::Create {
        at: at(dir, name),
        what: Create::File(how),
    })
}

fn file(client: &mut Client, dir: &[u8], name: &str) -> Result<Vec<u8>> {
    Ok(made(create(
        client,
        dir,
        name,
        How::Guarded(SetAttributes::default()),
    )?)?
    .0)
}

fn get(client: &mut Client, file: &[u8]) -> Result<Attributes> {
    let results = client.call(&Args::GetAttr { file })?.ok()?;
    Ok(attributes(&mut results.reader())?)
}

/// Writes; the verifier.
fn write(
    client: &mut Client,
    file: &[u8],
    offset: u64,
    data: &[u8],
    stable: Stability,
) -> Result<[u8; 8]> {
    let count = data.len() as u32;
    let results = client
        .call(&Args::Write {
            file,
            offset,
            count,
            stable,
            data,
        })?
        .ok()?;
    let mut r = results.reader();
    let (before, after) = wcc(&mut r)?;
    ensure!(before.is_some() && after.context("after")?.size >= offset + u64::from(count));
    ensure!(r.u32()? == count && r.u32()? >= stable as u32);
    Ok(r.fixed()?)
}

/// Reads; whether the end was told.
fn read(client: &mut Client, file: &[u8], offset: u64, count: u32) -> Result<(Vec<u8>, bool)> {
    let results = client
        .call(&Args::Read {
            file,
            offset,
            count,
        })?
        .ok()?;
    let mut r = results.reader();
    r.optional(attributes)?.context("attributes")?;
    let count = r.u32()?;
    let end = r.bool()?;
    let data = r.opaque(1 << 20)?.to_vec();
    ensure!(data.len() == count as usize);
    r.end()?;
    Ok((data, end))
}

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
    let set = SetAttributes {
        size: Some(3 << 40),
        ..SetAttributes::default()
    };
    client
        .call(&Args::SetAttr {
            file: &disk,
            set,
            only_if: None,
        })?
        .ok()?;
    let offset = (2 << 40) + 512;
    write(&mut client, &disk, offset, &[7; 4096], Stability::File)?;
    let a = get(&mut client, &disk)?;
    ensure!(a.size == 3 << 40 && a.used < 1 << 20, "{a:?}");
    ensure!(read(&mut client, &disk, offset - 1, 3)? == (vec![0, 7, 7], false));
    ensure!(fs::metadata(stage.dir().join("vm-flat.vmdk"))?.blocks() * 512 == a.used);
    // What is cut off does not come back.
    for size in [offset + 1, 3 << 40] {
        let set = SetAttributes {
            size: Some(size),
            ..SetAttributes::default()
        };
        client
            .call(&Args::SetAttr {
                file: &disk,
                set,
                only_if: None,
            })?
            .ok()?;
    }
    ensure!(read(&mut client, &disk, offset, 3)? == (vec![7, 0, 0], false));
    let beyond = Args::Write {
        file: &disk,
        offset: u64::MAX,
        count: 1,
        stable: Stability::File,
        data: &[1],
    };
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

fn handles_live_through_renames_and_restarts_and_die_with_the_file(mut stage: Stage) -> Result<()> {
    let (mut client, root) = stage.client()?;
    let dir = made(client.call(&Args::Create {
        at: at(&root, "dir"),
        what: Create::Directory(SetAttributes::default()),
    })?)?
    .0;
    let a = file(&mut client, &root, "a")?;
    write(&mut client, &a, 0, b"data", Stability::File)?;
    let id = get(&mut client, &a)?.id;
    client
        .call(&Args::Rename {
            from: at(&root, "a"),
            to: at(&dir, "b"),
        })?
        .ok()?;
    fs::rename(stage.dir().join("dir"), stage.dir().join("moved"))?;
    stage.start()?;
    let (mut client, again) = stage.client()?;
    ensure!(again == root);
    ensure!(read(&mut client, &a, 0, 9)?.0 == b"data");
    ensure!(
        get(&mut client, &a)?.id == id && id == fs::metadata(stage.dir().join("moved/b"))?.ino()
    );
    ensure!(lookup(&mut client, &dir, "b")?.0 == a);
    client.call(&Args::Remove(at(&dir, "b")))?.ok()?;
    client
        .call(&Args::GetAttr { file: &a })?
        .is(Status::Stale)?;
    // One that takes its place is another.
    let c = file(&mut client, &dir, "b")?;
    ensure!(c != a);
    client
        .call(&Args::Read {
            file: &a,
            offset: 0,
            count: 1,
        })?
        .is(Status::Stale)?;
    // Of another datastore with the same files, handles are others.
    let elsewhere = tempfile::tempdir()?;
    let (_, other) = Directory::open(&stage.dir(), elsewhere.path())?;
    let (_, own) = Directory::open(&stage.dir(), &stage.state())?;
    ensure!(other.store != own.store && other.secret != own.secret);
    Ok(())
}

fn creating_is_unchecked_guarded_or_exclusive(stage: Stage) -> Result<()> {
    let (mut client, root) = stage.client()?;
    let set = SetAttributes {
        mode: Some(0o640),
        size: Some(100),
        ..SetAttributes::default()
    };
    let (a, attributes) = made(create(&mut client, &root, "a", How::Guarded(set))?)?;
    ensure!(attributes.mode == 0o640 && attributes.size == 100 && attributes.kind == Kind::Regular);
    create(&mut client, &root, "a", How::Guarded(set))?.is(Status::Exist)?;
    create(&mut client, &root, "a", How::Exclusive([1; 8]))?.is(Status::Exist)?;
    // Unchecked keeps what is there, but for what is asked.
    write(&mut client, &a, 0, b"data", Stability::File)?;
    let (same, _) = made(create(
        &mut client,
        &root,
        "a",
        How::Unchecked(SetAttributes::default()),
    )?)?;
    ensure!(same == a && read(&mut client, &a, 0, 4)?.0 == b"data");
    let empty = SetAttributes {
        size: Some(0),
        ..SetAttributes::default()
    };
    let (_, cut) = made(create(&mut client, &root, "a", How::Unchecked(empty))?)?;
    ensure!(cut.size == 0);
    // Exclusive: the same call again is answered as before, whoever else comes is refused.
    let mine = How::Exclusive(*b"\xffmy call");
    let (b, _) = made(create(&mut client, &root, "b", mine)?)?;
    let (again, _) = made(create(&mut client, &root, "b", mine)?)?;
    ensure!(again == b);
    create(&mut client, &root, "b", How::Exclusive(*b"another!"))?.is(Status::Exist)?;
    write(&mut client, &b, 0, b"x", Stability::File)?;
    create(&mut client, &root, "b", mine)?.is(Status::Exist)?;
    Ok(())
}

fn of_many_who_create_one_wins(stage: Stage) -> Result<()> {
    for round in 0..20 {
        let won: Vec<Result<u32>> = std::thread::scope(|scope| {
            let tries: Vec<_> = (0..4u8)
                .map(|n| {
                    let stage = &stage;
                    scope.spawn(move || -> Result<u32> {
                        let (mut client, root) = stage.client()?;
                        let how = if n % 2 == 0 {
                            How::Exclusive([n; 8])
                        } else {
                            How::Guarded(SetAttributes::default())
                        };
                        Ok(create(&mut client, &root, &format!(".lck-{round}"), how)?.status)
                    })
                })
                .collect();
            tries
                .into_iter()
                .map(|t| t.join().expect("no panic"))
                .collect()
        });
        let won: Vec<u32> = won.into_iter().collect::<Result<_>>()?;
        ensure!(won.iter().filter(|s| **s == 0).count() == 1, "{won:?}");
        ensure!(
            won.iter().all(|s| *s == 0 || *s == Status::Exist as u32),
            "{won:?}"
        );
    }
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
    client
        .call(&Args::SetAttr {
            file: &a,
            set,
            only_if: None,
        })?
        .ok()?;
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
    client
        .call(&Args::SetAttr {
            file: &a,
            set,
            only_if: None,
        })?
        .is(Status::Inval)?;
    Ok(())
}

fn others_may_what_the_mode_says(stage: Stage) -> Result<()> {
    let (mut client, root) = stage.client()?;
    let a = file(&mut client, &root, "a")?;
    write(&mut client, &a, 0, b"root's", Stability::File)?;
    client.credential = user(1000);
    ensure!(read(&mut client, &a, 0, 9)?.0 == b"root's");
    let data = b"mine?";
    let args = Args::Write {
        file: &a,
        offset: 0,
        count: 5,
        stable: Stability::File,
        data,
    };
    client.call(&args)?.is(Status::Access)?;
    let mode = SetAttributes {
        mode: Some(0o777),
        ..SetAttributes::default()
    };
    client
        .call(&Args::SetAttr {
            file: &a,
            set: mode,
            only_if: None,
        })?
        .is(Status::Perm)?;
    let size = SetAttributes {
        size: Some(0),
        ..SetAttributes::default()
    };
    client
        .call(&Args::SetAttr {
            file: &a,
            set: size,
            only_if: None,
        })?
        .is(Status::Access)?;
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
    client
        .call(&Args::SetAttr {
            file: &own,
            set: give,
            only_if: None,
        })?
        .is(Status::Perm)?;
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

fn nothing_leads_out_of_the_directory(stage: Stage) -> Result<()> {
    let (mut client, root) = stage.client()?;
    fs::write(stage.place.path().join("secret"), b"secret")?;
    fs::create_dir_all(stage.dir().join("sub/deep"))?;
    symlink("../secret", stage.dir().join("link"))?;
    symlink("..", stage.dir().join("up"))?;
    // A link is what it is, and never followed here: it means something on the client only.
    let (link, a) = lookup(&mut client, &root, "link")?;
    ensure!(a.kind == Kind::Link);
    let results = client.call(&Args::ReadLink { link: &link })?.ok()?;
    let mut r = results.reader();
    r.optional(attributes)?;
    ensure!(r.opaque(100)? == b"../secret");
    client
        .call(&Args::Read {
            file: &link,
            offset: 0,
            count: 9,
        })?
        .is(Status::Inval)?;
    let (up, _) = lookup(&mut client, &root, "up")?;
    client
        .call(&Args::Lookup(at(&up, "secret")))?
        .is(Status::NotDir)?;
    ensure!(client.mount("/vms/up")? == Err(20) && client.mount("/vms/../state")? == Err(2));
    // Above the root is the root.
    ensure!(lookup(&mut client, &root, "..")?.0 == root);
    let (sub, _) = lookup(&mut client, &root, "sub")?;
    let (deep, _) = lookup(&mut client, &sub, "deep")?;
    ensure!(
        lookup(&mut client, &deep, "..")?.0 == sub && lookup(&mut client, &sub, "..")?.0 == root
    );
    ensure!(client.mount("/vms/sub/deep")? == Ok(deep.clone()));
    // Somebody on the host moves a directory out: from there nothing leads further.
    fs::rename(
        stage.dir().join("sub/deep"),
        stage.place.path().join("outside"),
    )?;
    client
        .call(&Args::Lookup(at(&deep, "..")))?
        .is(Status::Stale)?;
    // A device is not made, and what can hang is not opened.
    let device = Create::Device {
        block: true,
        device: (8, 0),
        set: SetAttributes::default(),
    };
    client
        .call(&Args::Create {
            at: at(&root, "sda"),
            what: device,
        })?
        .is(Status::NotSupp)?;
    let fifo = Create::Fifo(SetAttributes::default());
    let (fifo, a) = made(client.call(&Args::Create {
        at: at(&root, "fifo"),
        what: fifo,
    })?)?;
    ensure!(a.kind == Kind::Fifo);
    client
        .call(&Args::Read {
            file: &fifo,
            offset: 0,
            count: 9,
        })?
        .is(Status::Inval)?;
    Ok(())
}

fn names_are_made_moved_linked_and_removed(stage: Stage) -> Result<()> {
    let (mut client, root) = stage.client()?;
    let set = SetAttributes::default();
    let (dir, a) = made(client.call(&Args::Create {
        at: at(&root, "dir"),
        what: Create::Directory(set),
    })?)?;
    ensure!(a.kind == Kind::Directory && a.mode == 0o755);
    let link = Create::Link {
        to: b"some/where",
        set,
    };
    let (link, a) = made(client.call(&Args::Create {
        at: at(&dir, "link"),
        what: link,
    })?)?;
    ensure!(a.kind == Kind::Link && a.size == 10);
    let socket = Create::Socket(set);
    ensure!(
        made(client.call(&Args::Create {
            at: at(&dir, "socket"),
            what: socket
        })?)?
        .1
        .kind
            == Kind::Socket
    );
    client
        .call(&Args::Create {
            at: at(&dir, "other"),
            what: Create::Other,
        })?
        .is(Status::BadType)?;
    let a = file(&mut client, &dir, "a")?;
    let results = client
        .call(&Args::Link {
            file: &a,
            at: at(&root, "b"),
        })?
        .ok()?;
    let mut r = results.reader();
    ensure!(r.optional(attributes)?.context("attributes")?.links == 2);
    ensure!(lookup(&mut client, &root, "b")?.0 == a);
    client
        .call(&Args::Link {
            file: &dir,
            at: at(&root, "c"),
        })?
        .is(Status::IsDir)?;
    client
        .call(&Args::Link {
            file: &a,
            at: at(&root, "b"),
        })?
        .is(Status::Exist)?;
    // A rename over a file takes its place in one step; over a full directory it is refused.
    let c = file(&mut client, &root, "c")?;
    let results = client
        .call(&Args::Rename {
            from: at(&root, "c"),
            to: at(&root, "b"),
        })?
        .ok()?;
    let mut r = results.reader();
    ensure!(wcc(&mut r)?.1 == wcc(&mut r)?.1);
    ensure!(lookup(&mut client, &root, "b")?.0 == c && get(&mut client, &a)?.links == 1);
    client
        .call(&Args::Lookup(at(&root, "c")))?
        .is(Status::NoEnt)?;
    client
        .call(&Args::Rename {
            from: at(&root, "b"),
            to: at(&root, "dir"),
        })?
        .is(Status::IsDir)?;
    client
        .call(&Args::Rename {
            from: at(&root, "x"),
            to: at(&root, "y"),
        })?
        .is(Status::NoEnt)?;
    client
        .call(&Args::Rename {
            from: at(&root, "dir"),
            to: at(&dir, "in"),
        })?
        .is(Status::Inval)?;
    client
        .call(&Args::Remove(at(&root, "dir")))?
        .is(Status::IsDir)?;
    client
        .call(&Args::RmDir(at(&root, "b")))?
        .is(Status::NotDir)?;
    client
        .call(&Args::RmDir(at(&root, "dir")))?
        .is(Status::NotEmpty)?;
    for name in ["link", "socket", "a"] {
        let results = client.call(&Args::Remove(at(&dir, name)))?.ok()?;
        let (before, after) = wcc(&mut results.reader())?;
        ensure!(before.is_some() && after.is_some());
    }
    client.call(&Args::RmDir(at(&root, "dir")))?.ok()?;
    client
        .call(&Args::GetAttr { file: &link })?
        .is(Status::Stale)?;
    ensure!(fs::read_dir(stage.dir())?.count() == 1);
    Ok(())
}

fn five_thousand_names_are_listed_once_each(stage: Stage) -> Result<()> {
    for n in 0..5000 {
        fs::write(stage.dir().join(format!("name-{n}")), b"")?;
    }
    let (mut client, root) = stage.client()?;
    for plus in [false, true] {
        let (mut cookie, mut names) = (0, std::collections::HashSet::new());
        loop {
            let verifier = [0; 8];
            let args = if plus {
                Args::ReadDirPlus {
                    dir: &root,
                    cookie,
                    verifier,
                    names: 8192,
                    bytes: 32 << 10,
                }
            } else {
                Args::ReadDir {
                    dir: &root,
                    cookie,
                    verifier,
                    bytes: 8192,
                }
            };
            let results = client.call(&args)?.ok()?;
            let mut r = results.reader();
            r.optional(attributes)?.context("of the directory")?;
            r.u64()?;
            while r.bool()? {
                let id = r.u64()?;
                let name = String::from_utf8(r.opaque(255)?.to_vec())?;
                cookie = r.u64()?;
                if plus {
                    let a = r.optional(attributes)?.context("attributes")?;
                    let handle = r
                        .optional(|r| r.opaque(64).map(<[u8]>::to_vec))?
                        .context("a handle")?;
                    ensure!(a.id == id);
                    if names.len() % 500 == 0 {
                        ensure!(lookup(&mut client, &root, &name)?.0 == handle, "{name}");
                    }
                    // Nothing of what lies above is told.
                    ensure!(name != ".." || handle == root);
                }
                ensure!(names.insert(name.clone()), "{name} came twice");
            }
            if r.bool()? {
                break;
            }
        }
        ensure!(names.len() == 5002, "{}", names.len());
    }
    let wrong = Args::ReadDir {
        dir: &root,
        cookie: u64::MAX,
        verifier: [0; 8],
        bytes: 8192,
    };
    client.call(&wrong)?.is(Status::BadCookie)?;
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

/// What somebody on the host moves is the same file still, wherever it lies, in either order of looking.
fn what_others_move_here_is_found_again(mut stage: Stage) -> Result<()> {
    let (mut client, root) = stage.client()?;
    let a = file(&mut client, &root, "a")?;
    let b = file(&mut client, &root, "b")?;
    write(&mut client, &a, 0, b"a", Stability::File)?;
    write(&mut client, &b, 0, b"b", Stability::File)?;
    let dir = stage.dir();
    fs::create_dir_all(dir.join("x/y/z"))?;
    // Each now has the other's name.
    fs::rename(dir.join("a"), dir.join("x/y/z/a"))?;
    fs::rename(dir.join("b"), dir.join("a"))?;
    fs::rename(dir.join("x/y/z/a"), dir.join("b"))?;
    ensure!(read(&mut client, &a, 0, 9)?.0 == b"a" && read(&mut client, &b, 0, 9)?.0 == b"b");
    fs::rename(dir.join("b"), dir.join("x/y/z/b"))?;
    fs::rename(dir.join("x"), dir.join("v"))?;
    stage.start()?;
    let (mut client, root) = stage.client()?;
    ensure!(read(&mut client, &a, 0, 9)?.0 == b"a" && read(&mut client, &b, 0, 9)?.0 == b"b");
    ensure!(lookup(&mut client, &root, "a")?.0 == b);
    // By a second name when the first is gone; and once that is gone as well, not at all.
    fs::hard_link(dir.join("a"), dir.join("v/second"))?;
    fs::remove_file(dir.join("a"))?;
    ensure!(read(&mut client, &b, 0, 9)?.0 == b"b");
    fs::remove_file(dir.join("v/second"))?;
    client
        .call(&Args::GetAttr { file: &b })?
        .is(Status::Stale)?;
    client
        .call(&Args::GetAttr { file: &b })?
        .is(Status::Stale)?;
    // Another one in the same place is another.
    fs::write(dir.join("a"), "new")?;
    client
        .call(&Args::Read {
            file: &b,
            offset: 0,
            count: 9,
        })?
        .is(Status::Stale)
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
    const TEST: &str = "a_full_file_system_says_so";
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
        let args = Args::Write {
            file: &a,
            offset: written,
            count: 1 << 20,
            stable: Stability::File,
            data: &mega,
        };
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
    let set = SetAttributes {
        size: Some(1 << 30),
        ..SetAttributes::default()
    };
    client
        .call(&Args::SetAttr {
            file: &a,
            set,
            only_if: None,
        })?
        .ok()?;
    let b = file(&mut client, &root, "b")?;
    let args = Args::Write {
        file: &b,
        offset: 0,
        count: 1 << 20,
        stable: Stability::File,
        data: &mega,
    };
    client.call(&Args::Remove(at(&root, "a")))?.ok()?;
    let results = client.call(&args)?.ok()?;
    let mut r = results.reader();
    wcc(&mut r)?;
    ensure!(r.u32()? == 1 << 20);
    Ok(())
}
