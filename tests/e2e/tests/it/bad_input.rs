//! What people and programs do wrong: each gets a clear sentence, and nothing is lost.

use anyhow::{Context, Result, ensure};
use hearth_rig::clients::find;
use hearth_rig::daemon::path;
use hearth_rig::nbd::Client;
use hearth_rig::{Hearth, rng::Rng, wait};
use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(30);

/// A served pool with one disk that has flushed, dirty data at 1 MiB.
fn with_data() -> Result<Hearth> {
    let hearth = Hearth::serving("256M")?;
    let origin = hearth.origin("o.img", 16 * MIB)?;
    hearth.add("d", path(&origin), &[])?;
    let mut client = hearth.connect("d")?;
    client.write(MIB, &[0xAB; 65536])?;
    client.flush()?;
    Ok(hearth)
}

fn data_is_there(hearth: &Hearth) -> Result<()> {
    let data = hearth.connect("d")?.read(MIB, 65536)?;
    ensure!(data == [0xAB; 65536], "flushed data is gone");
    Ok(())
}

#[test]
fn a_file_that_is_no_pool() -> Result<()> {
    let mut hearth = Hearth::bare()?;
    std::fs::write(hearth.flash(), vec![0x5A; 64 * MIB as usize])?;
    let words = hearth.start_refused()?;
    ensure!(
        words.contains("flash.img"),
        "does not name the file: {words}"
    );
    hearth.set_flash(hearth.dir().join("nowhere.img"));
    let words = hearth.start_refused()?;
    ensure!(
        words.contains("nowhere.img"),
        "does not name the file: {words}"
    );
    Ok(())
}

/// Formatting refuses what carries something, and says what it found.
#[test]
fn create_refuses_what_is_not_empty() -> Result<()> {
    let hearth = with_data()?;
    let mut other = Hearth::bare()?;
    let create = |h: &Hearth| h.refused(&["pool", "create", "--flash", path(h.flash())]);
    // A pool, in use and not.
    let words = other.refused(&["pool", "create", "--flash", path(hearth.flash())])?;
    ensure!(!words.is_empty(), "no reason");
    drop(hearth);
    other.create_pool("64M")?;
    let words = create(&other)?.to_lowercase();
    ensure!(
        words.contains("pool"),
        "does not say that it found a pool: {words}"
    );
    // A file system, if its tool is here.
    if find("mkfs.ext4").is_none() && !std::path::Path::new("/usr/sbin/mkfs.ext4").exists() {
        println!("SKIPPED ext4 on the flash file: mkfs.ext4 is not installed");
        return Ok(());
    }
    other.set_flash(other.dir().join("ext4.img"));
    std::fs::File::create(other.flash())?.set_len(64 * MIB)?;
    let tool = find("mkfs.ext4").unwrap_or_else(|| PathBuf::from("/usr/sbin/mkfs.ext4"));
    hearth_rig::clients::run_ok(path(&tool), &["-q", "-F", path(other.flash())], other.dir())?;
    let words = create(&other)?;
    ensure!(words.contains("ext"), "does not say what it found: {words}");
    other.ok(&["pool", "create", "--flash", path(other.flash()), "--force"])?;
    Ok(())
}

#[test]
fn a_truncated_flash_is_done_without_and_can_come_back() -> Result<()> {
    let mut hearth = with_data()?;
    hearth.kill9()?;
    let whole = std::fs::read(hearth.flash())?;
    let file = OpenOptions::new().write(true).open(hearth.flash())?;
    // Its disks are known from beside the flash.
    for len in [whole.len() as u64 / 2, 0] {
        file.set_len(len)?;
        hearth.start()?;
        let shown = hearth.ok(&["pool", "show"])?;
        ensure!(shown.contains("without"), "{len}: {shown}");
        hearth.kill9()?;
        ensure!(file.metadata()?.len() == len, "nothing is written to it");
    }
    // With the bytes back, so is the disk.
    file.write_all_at(&whole, 0)?;
    hearth.start()?;
    data_is_there(&hearth)
}

#[test]
fn a_second_daemon_is_refused() -> Result<()> {
    let hearth = with_data()?;
    let mut second = Hearth::bare()?;
    second.set_flash(hearth.flash().to_owned());
    let words = second.start_refused()?;
    ensure!(
        words.contains("flash.img"),
        "does not name the flash: {words}"
    );
    // The same run directory is refused, too, and the first goes on.
    let mut third = Hearth::with_pool("64M")?;
    third.serve_args = vec!["--run-dir".into(), path(&hearth.run_dir()).into()];
    let refused = std::process::Command::new(hearth_rig::daemon::binary()?)
        .args([
            "serve",
            "--flash",
            path(third.flash()),
            "--run-dir",
            path(&hearth.run_dir()),
        ])
        .stdin(std::process::Stdio::null())
        .output()?;
    ensure!(
        !refused.status.success(),
        "two daemons in one run directory"
    );
    data_is_there(&hearth)
}

#[test]
fn garbage_on_the_socket_hurts_nobody() -> Result<()> {
    let mut hearth = with_data()?;
    let mut rng = Rng::new(3);
    let mut stalled = Vec::new();
    for round in 0..64 {
        let mut stream = UnixStream::connect(hearth.socket())?;
        let mut junk = vec![0u8; 1 + rng.below(8192) as usize];
        rng.fill(&mut junk);
        if round % 3 == 0 {
            // Looks like a client for a moment: flags, then an option whose length lies.
            let mut head = 3u32.to_be_bytes().to_vec();
            head.extend(0x4948_4156_454F_5054u64.to_be_bytes());
            head.extend(7u32.to_be_bytes());
            head.extend(u32::MAX.to_be_bytes());
            junk.splice(0..0, head);
        }
        // The daemon may hang up in the middle: that is its right.
        let _ = stream.write_all(&junk);
        if round % 8 == 0 {
            stalled.push(stream);
        }
    }
    // Garbage after a correct negotiation, and a request cut in the middle.
    for cut in [false, true] {
        let client = hearth.connect("d")?;
        let mut raw = client.raw()?;
        if cut {
            let mut head = 0x2560_9513u32.to_be_bytes().to_vec();
            head.extend([0, 0, 0, 1]);
            head.extend([0; 16]);
            head.extend(4096u32.to_be_bytes());
            head.extend([0x77; 100]);
            raw.write_all(&head)?;
        } else {
            let mut junk = vec![0u8; 4096];
            rng.fill(&mut junk);
            let _ = raw.write_all(&junk);
            raw.set_read_timeout(Some(LIMIT))?;
            let mut rest = Vec::new();
            // Ends, one way or the other: the daemon closes what it cannot understand.
            let _ = raw.read_to_end(&mut rest);
        }
    }
    // Requests that lie about place and length are refused one by one; the connection lives.
    let mut client = hearth.connect("d")?;
    for (offset, len) in [
        (16 * MIB, 4096),
        (u64::MAX - 100, 4096),
        (16 * MIB - 512, 4096),
    ] {
        ensure!(
            client.read(offset, len).is_err(),
            "read at {offset}+{len} was answered"
        );
    }
    ensure!(hearth.running(), "the daemon died: {}", hearth.log());
    ensure!(!hearth.log().contains("panicked"), "{}", hearth.log());
    data_is_there(&hearth)?;
    drop(stalled);
    Ok(())
}

#[test]
fn unknown_exports_are_refused() -> Result<()> {
    let hearth = with_data()?;
    for name in ["nope", "D", "d/", "../d", &"x".repeat(300)] {
        let refused = Client::connect(&hearth.socket(), name);
        ensure!(refused.is_err(), "export {name:?} was served");
    }
    data_is_there(&hearth)
}

#[test]
fn the_command_line_refuses_nonsense() -> Result<()> {
    let hearth = with_data()?;
    let more = hearth.origin("more.img", MIB)?;
    for args in [
        &["disk", "add", "d", "--origin", path(&more)][..],
        &["disk", "add", "e", "--origin", "/nowhere/at/all"],
        &[
            "disk",
            "add",
            "e",
            "--origin",
            path(&more),
            "--mode",
            "write-sideways",
        ],
        &[
            "disk",
            "add",
            "e",
            "--origin",
            path(&more),
            "--block-size",
            "5000",
        ],
        &["disk", "add", "e/f", "--origin", path(&more)],
        &["disk", "add", "e", "--origin", path(hearth.flash())],
        &[
            "disk",
            "add",
            "e",
            "--origin",
            path(&hearth.dir().join("o.img")),
        ],
        &["disk", "show", "nope"],
        &["disk", "flush", "nope"],
        &["disk", "remove", "nope"],
        &["stats", "nope"],
    ] {
        hearth.refused(args)?;
    }
    data_is_there(&hearth)
}

/// An origin that shrank under dirty data is not attached; put right, everything is there.
#[test]
fn an_origin_that_shrank() -> Result<()> {
    let mut hearth = with_data()?;
    hearth.kill9()?;
    let origin = hearth.dir().join("o.img");
    let before = std::fs::read(&origin)?;
    OpenOptions::new()
        .write(true)
        .open(&origin)?
        .set_len(4 * MIB)?;
    hearth.start()?;
    ensure!(
        Client::connect(&hearth.socket(), "d").is_err(),
        "a shrunken origin was attached"
    );
    let words = hearth.ok(&["disk", "show", "d"])?;
    ensure!(
        words.contains("refused") || words.contains("smaller") || words.contains("shrank"),
        "{words}"
    );
    hearth.stop()?;
    std::fs::write(&origin, &before)?;
    hearth.start()?;
    if Client::connect(&hearth.socket(), "d").is_err() {
        // Its times changed, and there is dirty data: Hearth asks which side wins.
        hearth.ok(&["disk", "set", "d", "--trust", "flash"])?;
    }
    data_is_there(&hearth)
}

/// An origin changed behind Hearth's back, nothing dirty: the clean cache is dropped, not served.
#[test]
fn an_origin_changed_elsewhere() -> Result<()> {
    let mut hearth = with_data()?;
    hearth.ok(&["disk", "flush", "d"])?;
    hearth.connect("d")?.read(MIB, 65536)?;
    hearth.stop()?;
    let origin = hearth.dir().join("o.img");
    OpenOptions::new()
        .write(true)
        .open(&origin)?
        .write_all_at(&[0xCD; 65536], MIB)?;
    hearth.start()?;
    ensure!(
        hearth.connect("d")?.read(MIB, 65536)? == [0xCD; 65536],
        "stale cache was served"
    );
    Ok(())
}

/// The same with dirty data: refused until told which side wins; each answer is obeyed.
#[test]
fn an_origin_changed_under_dirty_data() -> Result<()> {
    for (trust, expected) in [("flash", 0xABu8), ("origin", 0xCD)] {
        let mut hearth = Hearth::serving("256M")?;
        let origin = hearth.origin("o.img", 16 * MIB)?;
        // Slow enough that the destager has not finished when the daemon is killed.
        hearth.add("d", &format!("model-latency=2s:{}", path(&origin)), &[])?;
        let mut client = hearth.connect("d")?;
        client.write(MIB, &[0xAB; 65536])?;
        client.flush()?;
        hearth.kill9()?;
        OpenOptions::new()
            .write(true)
            .open(&origin)?
            .write_all_at(&[0xCD; 65536], MIB)?;
        hearth.start()?;
        ensure!(
            Client::connect(&hearth.socket(), "d").is_err(),
            "attached although both sides changed"
        );
        hearth.ok(&["disk", "set", "d", "--trust", trust])?;
        let data = hearth.connect("d")?.read(MIB, 65536)?;
        ensure!(data == [expected; 65536], "--trust {trust} was not obeyed");
    }
    Ok(())
}

/// EIO from the origin reaches the client as an error, for that range only.
#[test]
fn an_origin_with_bad_sectors() -> Result<()> {
    let hearth = Hearth::serving("256M")?;
    let origin = hearth.origin("o.img", 16 * MIB)?;
    hearth.add(
        "d",
        &format!("fault=eio-read@1M+64K:{}", path(&origin)),
        &[],
    )?;
    let mut client = hearth.connect("d")?;
    let error = client
        .read(MIB + 8192, 4096)
        .err()
        .context("a bad sector was read")?;
    ensure!(error.raw_os_error() == Some(libc::EIO), "{error}");
    let plain = std::fs::read(&origin)?;
    ensure!(
        client.read(2 * MIB, 65536)? == plain[2 << 20..][..65536],
        "a good sector suffered"
    );
    // Written anew, it is on flash and can be read.
    client.write(MIB + 8192, &[1; 4096])?;
    ensure!(
        client.read(MIB + 8192, 4096)? == [1; 4096],
        "the new contents are not served"
    );
    ensure!(
        hearth.counter("d", "origin_errors")? >= 1,
        "the error was not counted"
    );
    Ok(())
}

/// Destaging that fails keeps the data on flash and says so; nothing acknowledged is lost.
#[test]
fn an_origin_that_cannot_be_written() -> Result<()> {
    let mut hearth = Hearth::serving("256M")?;
    let origin = hearth.origin("o.img", 16 * MIB)?;
    hearth.add("d", &format!("fault=eio-write:{}", path(&origin)), &[])?;
    let mut client = hearth.connect("d")?;
    client.write(MIB, &[0xAB; 65536])?;
    client.flush()?;
    wait::until("the destager has tried", LIMIT, || {
        (hearth.counter("d", "origin_errors").ok()? > 0).then_some(())
    })?;
    data_is_there(&hearth)?;
    hearth.kill9()?;
    hearth.start()?;
    data_is_there(&hearth)
}

/// A sparse flash file on a file system that runs full: errors or pass-through, no loss.
#[test]
fn sparse_flash_on_a_full_file_system() -> Result<()> {
    // SAFETY: geteuid has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        println!("SKIPPED full file system: mounting needs root");
        return Ok(());
    }
    let mut hearth = Hearth::bare()?;
    let mount = hearth.dir().join("m");
    let image = hearth.dir().join("fs.img");
    std::fs::create_dir(&mount)?;
    std::fs::File::create(&image)?.set_len(96 * MIB)?;
    let Some(tool) = [
        PathBuf::from("/usr/sbin/mkfs.ext4"),
        PathBuf::from("/sbin/mkfs.ext4"),
    ]
    .into_iter()
    .find(|p| p.exists()) else {
        println!("SKIPPED full file system: mkfs.ext4 is not installed");
        return Ok(());
    };
    hearth_rig::clients::run_ok(path(&tool), &["-q", "-F", path(&image)], hearth.dir())?;
    if hearth_rig::clients::run_ok(
        "mount",
        &["-o", "loop", path(&image), path(&mount)],
        hearth.dir(),
    )
    .is_err()
    {
        println!("SKIPPED full file system: no loop devices here");
        return Ok(());
    }
    let outcome = full_file_system(&mut hearth, &mount);
    hearth.kill9()?;
    // The kernel closes what a ring held some time after its process has ended.
    let limit = std::time::Duration::from_secs(60);
    hearth_rig::wait::until("unmounted", limit, || {
        hearth_rig::clients::run_ok("umount", &[path(&mount)], hearth.dir()).ok()
    })?;
    outcome
}

fn full_file_system(hearth: &mut Hearth, mount: &std::path::Path) -> Result<()> {
    hearth.set_flash(mount.join("flash.img"));
    // Sparse and larger than the file system; refusing it at once, with a reason, is as good.
    if hearth.create_pool("256M").is_err() {
        let words = hearth.refused(&[
            "pool",
            "create",
            "--flash",
            path(hearth.flash()),
            "--size",
            "256M",
        ])?;
        println!(
            "a pool larger than its file system is refused: {}",
            words.trim()
        );
        hearth.create_pool("64M")?;
        let mut filler = std::fs::File::create(mount.join("filler"))?;
        while filler.write_all(&[0x11; 1 << 16]).is_ok() {}
    }
    hearth.start()?;
    let origin = hearth.origin("o.img", 128 * MIB)?;
    let mut model = std::fs::read(&origin)?;
    hearth.add("d", path(&origin), &[])?;
    let mut client = hearth.connect("d")?;
    let mut refused = 0u32;
    let mut unsure = [false; 128];
    for (piece, unsure) in unsure.iter_mut().enumerate() {
        let range = piece << 20..(piece + 1) << 20;
        let data = vec![piece as u8; 1 << 20];
        match client.write((piece as u64) << 20, &data) {
            Ok(()) => model[range].copy_from_slice(&data),
            Err(_) => {
                refused += 1;
                *unsure = true;
            }
        }
    }
    let flushed = client.flush().is_ok();
    println!(
        "full file system: {refused} of 128 writes refused, flush {}",
        if flushed { "answered" } else { "refused" }
    );
    ensure!(hearth.running(), "the daemon died:\n{}", hearth.log());
    ensure!(!hearth.log().contains("panicked"), "{}", hearth.log());
    let check = |client: &mut Client, model: &[u8]| -> Result<()> {
        for piece in (0..128usize).filter(|p| !unsure[*p]) {
            let data = client.read((piece as u64) << 20, 1 << 20)?;
            ensure!(
                data == model[piece << 20..(piece + 1) << 20],
                "piece {piece} is wrong"
            );
        }
        Ok(())
    };
    check(&mut client, &model)?;
    if flushed {
        hearth.kill9()?;
        hearth.start()?;
        check(&mut hearth.connect("d")?, &model)?;
    }
    Ok(())
}
