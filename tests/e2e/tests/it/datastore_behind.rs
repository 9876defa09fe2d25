//! What becomes of a datastore's directory behind the daemon's back: somebody on this host writes over files or replaces them, and the
//! disk below hangs.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::stored::nfs::{Client, attributes, get};
use crate::stored::{LIMIT, Lab, create, lasting_address, pattern, read, root, write};
use anyhow::{Context, Result, ensure};
use hearth_nfs::v3::{Args, Attributes, Named, Status};
use hearth_rig::child::bound_to_us;
use hearth_rig::clients::have;
use hearth_rig::daemon::path;
use hearth_rig::wait::until;

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

/// A name, as somebody looks it up who opens the file.
fn look_up(client: &mut Client, dir: &[u8], name: &str) -> Result<(Vec<u8>, Attributes)> {
    let name = name.as_bytes();
    let results = client.call(&Args::Lookup(Named { dir, name }))?.ok()?;
    let mut r = results.reader();
    let handle = r.opaque(64)?.to_vec();
    let told = r.optional(attributes)?.context("attributes")?;
    Ok((handle, told))
}

/// Whoever opens a file sees what it is then, however short a time ago it was looked at: written over, by name and by handle, and replaced
/// by another one.
#[test]
fn who_opens_a_file_sees_what_became_of_it() -> Result<()> {
    const MIB: usize = 1 << 20;
    let lab = Lab::new()?;
    let mut client = lab.client()?;
    let dir = root(&mut client)?;
    let file = create(&mut client, &dir, "a.img")?;
    write(&mut client, &file, 0, &pattern(0, 1, MIB))?;
    lab.hearth.ok(&["datastore", "flush", "vms"])?;
    let there = lab.vms.join("a.img");
    for round in 2..10u8 {
        // Just looked at, and in the cache.
        get(&mut client, &file)?;
        read(&mut client, &file, 0, 4096)?;
        let len = usize::from(round) * MIB;
        fs::write(&there, pattern(0, round, len))?;
        let told = match round % 2 {
            0 => get(&mut client, &file)?.size,
            _ => look_up(&mut client, &dir, "a.img")?.1.size,
        };
        ensure!(told == len as u64, "round {round}: {told} instead of {len}");
        let seen = read(&mut client, &file, 0, 4096)?;
        ensure!(seen == pattern(0, round, 4096), "round {round}");
    }
    for round in 10..14u8 {
        let (old, _) = look_up(&mut client, &dir, "a.img")?;
        read(&mut client, &old, 0, 4096)?;
        let new = lab.vms.join("new");
        fs::write(&new, pattern(0, round, 2 * MIB))?;
        fs::rename(&new, &there)?;
        // Who has the old one open is told at the next answer that it is gone.
        client
            .call(&Args::GetAttr { file: &old })?
            .is(Status::Stale)?;
        let again = Args::Read {
            file: &old,
            offset: 0,
            count: 4096,
        };
        client.call(&again)?.is(Status::Stale)?;
        let (new, told) = look_up(&mut client, &dir, "a.img")?;
        ensure!(new != old && told.size == 2 * MIB as u64, "round {round}");
        ensure!(read(&mut client, &new, 0, 4096)? == pattern(0, round, 4096));
    }
    // Who only reads on is told before long.
    let (old, _) = look_up(&mut client, &dir, "a.img")?;
    read(&mut client, &old, 0, 4096)?;
    fs::remove_file(&there)?;
    until("the file is gone for its reader, too", LIMIT, || {
        let again = Args::Read {
            file: &old,
            offset: 0,
            count: 4096,
        };
        let results = client.call(&again).ok()?;
        results.is(Status::Stale).ok()
    })
}

/// A directory that a process in user space shows as another one has it, and that hangs as long as that process is stopped.
struct Hanging {
    shows: Child,
    at: PathBuf,
}

impl Hanging {
    /// `None`, with a word, where none can be mounted.
    fn new(test: &str, of: &Path, at: PathBuf) -> Result<Option<Hanging>> {
        if !have(test, &["bindfs"]) {
            return Ok(None);
        }
        fs::create_dir(&at)?;
        fs::write(of.join("marker"), "")?;
        let mut command = Command::new("bindfs");
        command
            // Nothing that was asked before is answered by the kernel itself.
            .args(["-f", "-o", "attr_timeout=0,entry_timeout=0"])
            .args([of, &at])
            .stdin(Stdio::null())
            .stderr(Stdio::null());
        let mut hanging = Hanging {
            shows: bound_to_us(&mut command).spawn()?,
            at,
        };
        let seen = until("the directory is shown", LIMIT, || {
            if matches!(hanging.shows.try_wait(), Ok(Some(_))) {
                return Some(false);
            }
            hanging.at.join("marker").exists().then_some(true)
        })?;
        if !seen {
            println!("SKIPPED {test}: FUSE cannot be mounted here");
        }
        Ok(seen.then_some(hanging))
    }

    fn signal(&self, signal: i32) -> Result<()> {
        // SAFETY: a signal to a child that has not been waited for, so its pid is still its own.
        let sent = unsafe { libc::kill(self.shows.id() as i32, signal) };
        ensure!(sent == 0, "kill: {}", std::io::Error::last_os_error());
        Ok(())
    }
}

impl Drop for Hanging {
    fn drop(&mut self) {
        // Whoever was asking gets an error, or could never end.
        let _ = self.shows.kill();
        let _ = self.shows.wait();
        let _ = Command::new("umount").arg("-l").arg(&self.at).status();
    }
}

/// The disk below one of two datastores hangs: whatever is asked of it is answered "ask again", reads and writes of cached files
/// and of others, names and attributes; the other datastore, at the same address and for the same host, goes on. When it
/// hangs no more everything is there that was answered, and what was asked.
#[test]
fn a_disk_that_hangs_is_answered_for_and_holds_up_no_other() -> Result<()> {
    const TEST: &str = "a_disk_that_hangs_is_answered_for_and_holds_up_no_other";
    let at = lasting_address()?.to_string();
    let lab = Lab::with(&[], None, &at)?;
    let behind = lab.hearth.dir().join("behind");
    fs::create_dir(&behind)?;
    let Some(hanging) = Hanging::new(TEST, &behind, lab.hearth.dir().join("hung"))? else {
        return Ok(());
    };
    let cold = pattern(0, 1, 8 << 20);
    fs::write(behind.join("cold.img"), &cold)?;
    lab.hearth.ok(&[
        "datastore",
        "add",
        path(&hanging.at),
        "--nfs",
        "--listen",
        &at,
        "--client",
        "127.0.0.1=rw,root,insecure",
    ])?;

    let mut client = lab.client()?;
    let mounted = client.mount("/hung")?;
    let dir = mounted.map_err(|status| anyhow::anyhow!("mount: {status}"))?;
    let (image, _) = look_up(&mut client, &dir, "cold.img")?;
    let disk = create(&mut client, &dir, "warm.img")?;
    write(&mut client, &disk, 0, &pattern(0, 2, 1 << 20))?;
    // What is between has no place yet, so a write there asks what is free.
    write(&mut client, &disk, 8 << 20, &pattern(8 << 20, 2, 4096))?;
    let small = create(&mut client, &dir, "small.log")?;
    write(&mut client, &small, 0, b"before")?;
    ensure!(read(&mut client, &image, 0, 4096)? == cold[..4096]);
    let other_dir = root(&mut client)?;
    let other = create(&mut client, &other_dir, "other.img")?;
    write(&mut client, &other, 0, &pattern(0, 3, 1 << 20))?;

    hanging.signal(libc::SIGSTOP)?;
    // Nothing of these can be had without the disk.
    let far = 4 << 20;
    let name = |name: &'static str| Named {
        dir: &dir,
        name: name.as_bytes(),
    };
    let late = pattern(far, 4, 4096);
    let asked = [
        Args::Read {
            file: &image,
            offset: far,
            count: 4096,
        },
        Args::durable(&small, 6, b"after"),
        Args::GetAttr { file: &small },
        Args::Lookup(name("cold.img")),
        Args::Rename {
            from: name("small.log"),
            to: name("renamed.log"),
        },
        Args::FsStat { root: &dir },
    ];
    let mut hung = Client::connect(lab.address()?)?;
    let holes = [1, 2, 3].map(|n| (8 << 20) - n * 8192);
    let mut into_holes = Vec::new();
    for hole in holes {
        let block = pattern(hole, 6, 4096);
        into_holes.push(hung.send(&Args::durable(&disk, hole, &block))?);
    }
    let mut waiting = Vec::new();
    for args in &asked {
        waiting.push(hung.send(args)?);
    }
    // All the while.
    let mut beats = 0;
    let mut goes_on = |client: &mut Client| -> Result<()> {
        get(client, &other_dir)?;
        write(
            client,
            &other,
            beats * 4096,
            &pattern(beats * 4096, 5, 4096),
        )?;
        ensure!(read(client, &other, beats * 4096, 4096)? == pattern(beats * 4096, 5, 4096));
        beats += 1;
        Ok(())
    };
    for xid in into_holes {
        goes_on(&mut client)?;
        let written = hung.results(xid)?;
        ensure!(written.is(Status::JukeBox).is_ok() || written.status == 0);
    }
    for (xid, args) in waiting.into_iter().zip(&asked) {
        goes_on(&mut client)?;
        let results = hung.results(xid)?;
        results
            .is(Status::JukeBox)
            .with_context(|| format!("{args:?}"))?;
    }
    // Again and again, as clients do, and the host beside them is none the slower for it.
    for args in asked.iter().cycle().take(2 * asked.len()) {
        let xid = hung.send(args)?;
        goes_on(&mut client)?;
        hung.results(xid)?.is(Status::JukeBox)?;
    }
    // What is in the log needs no disk. The file was looked at lately, or it is answered as the others are.
    let xid = hung.send(&Args::durable(&disk, far, &late))?;
    let logged = hung.results(xid)?;
    ensure!(logged.is(Status::JukeBox).is_ok() || logged.status == 0);
    ensure!(lab.show()?["served"] == true);
    lab.hearth.ok(&["datastore", "list"])?;
    let made = lab.hearth.ok(&["datastore", "show", "hung", "--json"])?;
    ensure!(made.contains("\"served\""), "{made}");

    hanging.signal(libc::SIGCONT)?;
    client.patient = true;
    ensure!(read(&mut client, &image, far, 4096)? == cold[far as usize..][..4096]);
    write(&mut client, &disk, far, &late)?;
    ensure!(read(&mut client, &disk, 0, 1 << 20)? == pattern(0, 2, 1 << 20));
    // It was asked for before, and is done by now, once.
    let (renamed, _) = until("the file has its new name and all its bytes", LIMIT, || {
        let found = look_up(&mut client, &dir, "renamed.log").ok();
        found.filter(|(_, told)| told.size == 11)
    })?;
    ensure!(renamed == small);
    ensure!(read(&mut client, &small, 0, 64)? == b"beforeafter");
    lab.hearth.ok(&["datastore", "flush", "hung"])?;
    let file = fs::File::open(behind.join("warm.img"))?;
    let mut now = vec![0; 4096];
    file.read_exact_at(&mut now, far)?;
    ensure!(now == late);
    ensure!(fs::read(behind.join("renamed.log"))? == b"beforeafter");
    Ok(())
}
