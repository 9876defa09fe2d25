//! What the daemon does when the ground gives way beneath it: too few descriptors, a thread that
//! dies or hangs.

use anyhow::{Context, Result, ensure};
use hearth_rig::daemon::path;
use hearth_rig::load::{BLOCKS, Writer};
use hearth_rig::nbd::Client;
use hearth_rig::pattern::BLOCK;
use hearth_rig::{Hearth, wait};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);
/// The watchdog's time, as systemd would set it.
const WATCHDOG: Duration = Duration::from_secs(4);
/// Exit status when the system refuses I/O to a data thread.
const DRIVER_FAILED: i32 = 71;

/// Puts limits on open files, soft and hard, in front of the daemon.
fn open_files(hearth: &mut Hearth, limits: &str) {
    hearth.wrap = vec!["prlimit".to_owned(), format!("--nofile={limits}")];
}

/// With twenty descriptors the daemon refuses to start, in a sentence, instead of dying half-way.
#[test]
fn too_few_descriptors_are_refused() -> Result<()> {
    let mut hearth = Hearth::with_pool("256M")?;
    for limit in [8, 12, 20, 40, 100] {
        open_files(&mut hearth, &format!("{limit}:{limit}"));
        let words = hearth.start_refused()?;
        ensure!(!words.contains("panicked"), "{limit}: {words}");
        ensure!(
            words.contains(&format!("limit on open files is {limit}"))
                && words.contains("LimitNOFILE"),
            "{limit}: does not say what to do: {words}"
        );
    }
    Ok(())
}

/// What the process may raise by itself, it raises.
#[test]
fn the_limit_on_open_files_is_raised() -> Result<()> {
    let mut hearth = Hearth::with_pool("256M")?;
    open_files(&mut hearth, "64:4000");
    hearth.start()?;
    let pid = hearth.pid().context("runs")?;
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits"))?;
    let line = limits
        .lines()
        .find(|l| l.starts_with("Max open files"))
        .context("no such limit")?;
    let words: Vec<&str> = line.split_whitespace().collect();
    ensure!(words[3] == "4000" && words[4] == "4000", "{line}");
    let origin = hearth.origin("o.img", MIB)?;
    hearth.add("d", origin.to_str().context("a path")?, &[])?;
    Ok(())
}

/// Keeps a data thread at work until the daemon has ended: what a load had on its way may all be
/// answered before the daemon is told to fail.
fn keep_busy(mut client: Client) {
    std::thread::spawn(move || while client.read(0, BLOCK as u32).is_ok() {});
}

/// Makes the daemon fail `at` a place after so many milliseconds of writes to the disk `d`; how it ended.
fn fails_under_load(
    hearth: &mut Hearth,
    writer: &mut Writer,
    at: &str,
    millis: u64,
) -> Result<ExitStatus> {
    fails_under_load_of(hearth, writer, "d", at, millis)
}

/// The same with another disk.
fn fails_under_load_of(
    hearth: &mut Hearth,
    writer: &mut Writer,
    disk: &str,
    at: &str,
    millis: u64,
) -> Result<ExitStatus> {
    let mut client = hearth.connect(disk)?;
    let other = hearth.connect(disk)?;
    let mut status = None;
    let fail = || {
        hearth.fail_at(at)?;
        keep_busy(other);
        status = Some(hearth.ended()?);
        Ok(())
    };
    writer.load(&mut client, Duration::from_millis(millis), fail)?;
    status.context("it has ended")
}

/// A data thread panics under load: the process ends at once, nothing acknowledged is lost, and after
/// the third time the flash is left alone: what is clean is served, what is dirty is refused by name.
#[test]
fn a_panic_ends_the_process_and_the_third_takes_the_flash_away() -> Result<()> {
    let Some(mut hearth) = Hearth::breakable("160M")? else {
        return Ok(());
    };
    hearth.start()?;
    let origin = hearth.dir().join("o.img");
    std::fs::write(&origin, vec![0u8; BLOCKS as usize * BLOCK])?;
    hearth.add("d", path(&origin), &[])?;
    let clean = hearth.origin("c.img", 4 * MIB)?;
    hearth.add("c", path(&clean), &["--mode", "write-through"])?;
    let mut writer = Writer::new(7);
    for cycle in 0..3 {
        let status = fails_under_load(&mut hearth, &mut writer, "panic", 200)?;
        ensure!(
            status.signal() == Some(libc::SIGABRT),
            "ended with {status}"
        );
        ensure!(
            hearth.log().contains("PANIC in thread hearth-data"),
            "{}",
            hearth.log()
        );
        hearth.start()?;
        if cycle < 2 {
            ensure!(!hearth.log().contains("THE FLASH IS NOT USED"));
            let mut client = hearth.connect("d")?;
            writer.check(&mut client)?;
        }
    }
    hearth.logged("THE FLASH IS NOT USED")?;
    let expected = std::fs::read(&clean)?;
    let read = hearth.connect("c")?.read(0, 2 << 20)?;
    ensure!(
        read == expected[..2 << 20],
        "the clean disk is not what it was"
    );
    ensure!(hearth.connect("d").is_err(), "the dirty disk is served");
    let words = hearth.ok(&["disk", "show", "d"])?;
    ensure!(
        words.contains("aborted 3 times"),
        "does not say why: {words}"
    );
    // Until somebody says otherwise; and then nothing is missing.
    hearth.stop()?;
    hearth.serve_args = vec!["--release-brake".to_owned()];
    hearth.start()?;
    let mut client = hearth.connect("d")?;
    writer.check(&mut client)?;
    drop(client);
    hearth.ok(&["disk", "flush", "d"])?;
    writer.check_file(&origin)
}

/// A data thread panics under a load of several disks, and somebody starts the daemon again: a client that
/// reconnects sees a pause, no failed request and nothing lost; one that does not, finds all that was flushed. The
/// client that reconnects is another Hearth, which has a disk of the first as its origin, cached nowhere else.
#[test]
fn a_panic_is_a_pause_for_clients_that_reconnect() -> Result<()> {
    let Some(mut behind) = Hearth::breakable("160M")? else {
        return Ok(());
    };
    behind.start()?;
    let disks = ["far", "near"];
    let origins = disks.map(|name| behind.dir().join(name));
    for (name, origin) in disks.iter().zip(&origins) {
        std::fs::write(origin, vec![0u8; BLOCKS as usize * BLOCK])?;
        behind.add(name, path(origin), &[])?;
    }
    let front = Hearth::serving("64M")?;
    let more = ["--sole-user", "--mode", "off"];
    front.add("d", &behind.uri("far"), &more)?;
    let (mut far, mut near) = (Writer::new(21), Writer::new(22));
    for _ in 0..2 {
        let going = AtomicBool::new(true);
        let mut through = front.connect("d")?;
        let writes = || front.counter("d", "origin_writes");
        std::thread::scope(|scope| -> Result<()> {
            let going = &going;
            let far = &mut far;
            let load = scope.spawn(move || {
                far.load_while(&mut through, || going.load(Ordering::Relaxed), || Ok(()))
            });
            let outcome = fails_under_load_of(&mut behind, &mut near, "near", "panic", 100)
                .and_then(|status| {
                    ensure!(
                        status.signal() == Some(libc::SIGABRT),
                        "ended with {status}"
                    );
                    behind.start()?;
                    // The load has gone on when more of it is answered than before.
                    let before = writes()?;
                    wait::until("the load goes on", LIMIT, || {
                        (writes().ok()? > before + 1000).then_some(())
                    })
                });
            going.store(false, Ordering::Relaxed);
            load.join().ok().context("the load panicked")??;
            outcome
        })
        .with_context(|| front.log())?;
        far.check(&mut front.connect("d")?)?;
        near.check(&mut behind.connect("near")?)?;
    }
    far.flush(&mut front.connect("d")?)?;
    for name in disks {
        behind.ok(&["disk", "flush", name])?;
    }
    far.check_file(&origins[0])?;
    near.check_file(&origins[1])
}

/// The system refuses a data thread its I/O: the daemon ends and says so, and does not go on without
/// answers. That is no fault of the flash.
#[test]
fn a_driver_that_fails_ends_the_process() -> Result<()> {
    let Some(mut hearth) = Hearth::breakable("160M")? else {
        return Ok(());
    };
    hearth.start()?;
    let origin = hearth.dir().join("o.img");
    std::fs::write(&origin, vec![0u8; BLOCKS as usize * BLOCK])?;
    hearth.add("d", path(&origin), &[])?;
    let mut writer = Writer::new(11);
    for _ in 0..4 {
        let status = fails_under_load(&mut hearth, &mut writer, "driver", 100)?;
        ensure!(status.code() == Some(DRIVER_FAILED), "ended with {status}");
        let log = hearth.log();
        ensure!(
            log.contains("the system refuses I/O to a data thread"),
            "{log}"
        );
        hearth.start()?;
        writer.check(&mut hearth.connect("d")?)?;
    }
    ensure!(
        !hearth.log().contains("THE FLASH IS NOT USED"),
        "{}",
        hearth.log()
    );
    Ok(())
}

/// A data thread hangs: the watchdog is not fed any more, and log and control API name the thread. It
/// goes on: all is as before. An idle daemon feeds it.
#[test]
fn a_thread_that_hangs_is_named_and_starves_the_watchdog() -> Result<()> {
    let Some(mut hearth) = Hearth::breakable("160M")? else {
        return Ok(());
    };
    let socket = hearth.dir().join("notify");
    let notify = UnixDatagram::bind(&socket)?;
    notify.set_read_timeout(Some(LIMIT))?;
    let watchdog = WATCHDOG.as_micros().to_string();
    let env = [
        ("NOTIFY_SOCKET", path(&socket)),
        ("WATCHDOG_USEC", &watchdog),
    ];
    hearth
        .env
        .extend(env.map(|(k, v)| (k.to_owned(), v.to_owned())));
    let fed = || -> Result<bool> {
        let mut buf = [0u8; 256];
        match notify.recv(&mut buf) {
            Ok(n) => Ok(buf[..n].starts_with(b"WATCHDOG=1")),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => Ok(false),
            Err(e) => Err(e.into()),
        }
    };
    hearth.start()?;
    let origin = hearth.origin("o.img", 16 * MIB)?;
    hearth.add("d", path(&origin), &[])?;
    let mut seen = 0;
    while seen < 3 {
        // Nobody asks for anything meanwhile.
        seen += u32::from(fed()?);
    }
    hearth.fail_at("hang")?;
    let uri = hearth.socket();
    let reader = std::thread::spawn(move || -> std::io::Result<Vec<u8>> {
        Client::connect(&uri, "d")?.read(0, 65536)
    });
    wait::until("the log names the thread", LIMIT, || {
        hearth.log().contains("a thread is stuck").then_some(())
    })?;
    hearth.logged("hearth-data")?;
    let info = hearth.ok(&["--json", "pool", "show"])?;
    let info: serde_json::Value = serde_json::from_str(&info)?;
    let thread = info["stuck"][0]["thread"].as_str().unwrap_or_default();
    ensure!(thread.starts_with("hearth-data"), "{info}");
    ensure!(
        hearth.ok(&["stats"])?.contains("STUCK"),
        "stats do not say so"
    );
    // What was sent before it hung is taken; then nothing comes for a whole period.
    notify.set_read_timeout(Some(Duration::from_millis(1)))?;
    while fed()? {}
    notify.set_read_timeout(Some(WATCHDOG))?;
    ensure!(!fed()?, "the watchdog is fed although a data thread hangs");
    // It goes on.
    hearth.fail_at("go on")?;
    notify.set_read_timeout(Some(LIMIT))?;
    ensure!(fed()?, "the watchdog is not fed any more");
    let read = reader.join().ok().context("the reader panicked")??;
    ensure!(
        read == std::fs::read(&origin)?[..65536],
        "not what was there"
    );
    hearth.stop()?;
    Ok(())
}
