//! A directory of a local file system, over the protocol: how names are made, found, moved and removed, and that
//! handles stay true meanwhile.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};

use crate::common::{Client, attributes, get, set_attributes, wcc};
use crate::stage::{Stage, at, create, file, lookup, made, on_stage, read, write};
use anyhow::{Context, Result, ensure};
use hearth_nfs::local::{By, Directory};
use hearth_nfs::v3::{Args, Create, How, Kind, SetAttributes, Stability, Status};

twice!(
    handles_live_through_renames_and_restarts_and_die_with_the_file,
    creating_is_unchecked_guarded_or_exclusive,
    of_many_who_create_one_wins,
    nothing_leads_out_of_the_directory,
    names_are_made_moved_linked_and_removed,
    five_thousand_names_are_listed_once_each,
    what_others_move_here_is_found_again,
    directory_moved_out_is_stale,
);

/// What root of this host takes out of the datastore is not its clients' any more, whatever handles they have.
fn directory_moved_out_is_stale(stage: Stage) -> Result<()> {
    let (mut client, root) = stage.client()?;
    let directory = |client: &mut Client, dir: &[u8], name| -> Result<Vec<u8>> {
        let what = Create::Directory(SetAttributes::default());
        Ok(made(client.call(&Args::Create {
            at: at(dir, name),
            what,
        })?)?
        .0)
    };
    let dir = directory(&mut client, &root, "dir")?;
    let below = directory(&mut client, &dir, "below")?;
    file(&mut client, &below, "a")?;
    let outside = stage.place.path().join("outside");
    fs::rename(stage.dir().join("dir"), &outside)?;
    for handle in [&dir, &below] {
        let set = SetAttributes {
            mode: Some(0o777),
            ..SetAttributes::default()
        };
        create(&mut client, handle, "new", How::Guarded(set))?.is(Status::Stale)?;
        set_attributes(&mut client, handle, set)?.is(Status::Stale)?;
        for args in [
            Args::Lookup(at(handle, "a")),
            Args::Remove(at(handle, "a")),
            Args::GetAttr { file: handle },
            Args::Rename {
                from: at(handle, "a"),
                to: at(&root, "a"),
            },
        ] {
            client.call(&args)?.is(Status::Stale)?;
        }
    }
    ensure!(!outside.join("new").exists() && outside.join("below/a").exists());
    // What comes back is found again.
    fs::rename(&outside, stage.dir().join("back"))?;
    let (again, _) = lookup(&mut client, &root, "back")?;
    ensure!(again == dir);
    lookup(&mut client, &again, "below")?;
    file(&mut client, &below, "new")?;
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
