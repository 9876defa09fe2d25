//! An origin that hangs is the business of its own disk, whatever somebody is just doing with it: adding it, growing it, flushing
//! it, removing it, or stopping the daemon. Meanwhile a guest of another disk is served, and whoever controls other disks is
//! answered.
//!
//! What hangs is a file behind processes in user space, one of which is stopped: not even its size is told.

use anyhow::{Context, Result, bail, ensure};
use hearth_rig::daemon::path;
use hearth_rig::load::Writer;
use hearth_rig::mounted::{self, Mounted};
use hearth_rig::nbd::Command;
use hearth_rig::pattern::BLOCK;
use hearth_rig::{Hearth, wait};
use std::fs::File;
use std::path::PathBuf;
use std::process::Child;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Longest wait for what comes by itself.
const LIMIT: Duration = Duration::from_secs(60);
/// Far longer than an answer takes, and far shorter than the origin is waited for.
const SOON: Duration = Duration::from_secs(20);
/// How long the origin is waited for: no request of its own disk may end for that here.
const PATIENCE: &str = "600";
const BLOCKS: u64 = 4096;
const SIZE: u64 = BLOCKS * BLOCK as u64;
/// Times the guest has to have gone on.
const ROUNDS: u64 = 2;

/// A guest of the disk that is well. It checks what it reads, and no answer may be late.
struct Guest {
    end: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Guest {
    fn of(hearth: &Hearth, disk: &str) -> Result<Guest> {
        let mut client = hearth.connect(disk)?;
        client.raw()?.set_read_timeout(Some(SOON))?;
        let (end, rounds) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicU64::new(0)),
        );
        let (over, counted) = (end.clone(), rounds.clone());
        let thread = std::thread::spawn(move || {
            let mut writer = Writer::of(BLOCKS, 11);
            while !over.load(Ordering::Relaxed) {
                writer.load(&mut client, Duration::from_millis(50), || Ok(()))?;
                writer.flush(&mut client)?;
                counted.fetch_add(1, Ordering::Relaxed);
            }
            writer.check(&mut client)
        });
        Ok(Guest {
            end,
            rounds,
            thread: Some(thread),
        })
    }

    /// It is served, still or again.
    fn goes_on(&mut self) -> Result<()> {
        let from = self.rounds.load(Ordering::Relaxed);
        let thread = self.thread.as_ref();
        let ended = || thread.is_none_or(JoinHandle::is_finished);
        let went = wait::until("the guest of the other disk goes on", LIMIT, || {
            let on = self.rounds.load(Ordering::Relaxed) >= from + ROUNDS;
            (on || ended()).then_some(())
        });
        if ended() {
            self.ends()?;
            bail!("the guest of the other disk has ended");
        }
        went
    }

    fn ends(&mut self) -> Result<()> {
        self.end.store(true, Ordering::Relaxed);
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(outcome)) => outcome,
            Some(Err(_)) => bail!("the guest's thread has panicked"),
            None => Ok(()),
        }
    }
}

/// A daemon with one data thread, a disk that is well and its guest, and a file for another disk, which can be made to hang.
struct Lab {
    guest: Guest,
    /// Goes before the daemon: that cannot end while it waits for this.
    mount: Mounted,
    /// What is behind it.
    under: PathBuf,
    hearth: Hearth,
    others: u32,
}

impl Lab {
    /// `None`, with a word, where nothing can be mounted.
    fn new(test: &str, size: u64) -> Result<Option<Lab>> {
        if let Some(missing) = mounted::missing() {
            println!("SKIPPED hung origin: {test}: no {missing}");
            return Ok(None);
        }
        let mut hearth = Hearth::with_pool("160M")?;
        hearth.serve_args = ["--threads", "1"].map(str::to_owned).to_vec();
        hearth.start()?;
        let (well, under) = (
            hearth.dir().join("well.raw"),
            hearth.dir().join("under.raw"),
        );
        for file in [&well, &under] {
            File::create(file)?.set_len(size)?;
        }
        let mount = Mounted::unknown(hearth.dir(), "h", &under)?;
        hearth.add("well", path(&well), &[])?;
        let guest = Guest::of(&hearth, "well")?;
        Ok(Some(Lab {
            guest,
            mount,
            under,
            hearth,
            others: 0,
        }))
    }

    fn add_hung(&self, more: &[&str]) -> Result<()> {
        let more = [more, &["--sole-user", "--origin-timeout", PATIENCE]].concat();
        self.hearth.add("hung", self.mount.path(), &more).map(drop)
    }

    /// A command that must be answered, and not only when the origin is.
    fn soon(&self, args: &[&str]) -> Result<String> {
        let said = ended(self.hearth.begin(args)?, &args.join(" "), SOON)?;
        said.with_context(|| self.hearth.log())
    }

    /// All others can do what they want while somebody waits for the origin that hangs.
    fn nobody_else_waits(&mut self, waiting: &mut Child) -> Result<()> {
        self.guest.goes_on()?;
        self.others += 1;
        let name = format!("other{}", self.others);
        let file = self.hearth.dir().join(format!("{name}.raw"));
        File::create(&file)?.set_len(SIZE)?;
        self.soon(&["disk", "add", &name, "--origin", path(&file)])?;
        let mut client = self.hearth.connect(&name)?;
        client.raw()?.set_read_timeout(Some(SOON))?;
        client.write(0, &[3; BLOCK])?;
        client.flush()?;
        drop(client);
        File::options().write(true).open(&file)?.set_len(2 * SIZE)?;
        self.soon(&["disk", "set", &name, "--size-from-origin"])?;
        for args in [
            &["disk", "list"][..],
            &["disk", "show", "well"],
            &["disk", "flush", &name],
            &["pool", "show"],
            &["disk", "remove", &name, "--yes"],
        ] {
            self.soon(args)?;
        }
        ensure!(std::fs::read(&file)?[..BLOCK] == [3; BLOCK]);
        self.guest.goes_on()?;
        ensure!(
            waiting.try_wait()?.is_none(),
            "the origin hangs, and somebody has had an answer from it"
        );
        Ok(())
    }

    /// All goes on, and ends well.
    fn end(mut self) -> Result<()> {
        self.guest.goes_on()?;
        self.guest.ends().with_context(|| self.hearth.log())?;
        self.hearth.stop().map(drop)
    }
}

/// What a command said that has to end by itself: an error if it failed.
fn ended(mut child: Child, what: &str, limit: Duration) -> Result<Result<String>> {
    let ends = wait::until(what, limit, || child.try_wait().ok().flatten());
    if ends.is_err() {
        child.kill()?;
    }
    let out = child.wait_with_output()?;
    ends?;
    Ok(hearth_rig::daemon::ok(out))
}

#[test]
fn while_it_is_added_nobody_else_waits() -> Result<()> {
    let Some(mut lab) = Lab::new("add", SIZE)? else {
        return Ok(());
    };
    lab.mount.hang(true)?;
    let origin = lab.mount.path().to_owned();
    let add = ["disk", "add", "hung", "--origin", &origin, "--sole-user"];
    let mut adding = lab.hearth.begin(&add)?;
    lab.nobody_else_waits(&mut adding)?;
    lab.mount.hang(false)?;
    ended(adding, "it is added", LIMIT)??;
    ensure!(lab.hearth.connect("hung")?.read(0, 4096)? == [0; 4096]);
    lab.end()
}

#[test]
fn while_it_is_grown_nobody_else_waits() -> Result<()> {
    let Some(mut lab) = Lab::new("resize", SIZE)? else {
        return Ok(());
    };
    lab.add_hung(&[])?;
    lab.mount.hang(true)?;
    let grow = ["disk", "set", "hung", "--size-from-origin"];
    let mut growing = lab.hearth.begin(&grow)?;
    lab.nobody_else_waits(&mut growing)?;
    lab.mount.hang(false)?;
    // It has not grown, which may be said in either way.
    drop(ended(growing, "its size is known", LIMIT)?);
    lab.hearth.ok(&["disk", "show", "hung"])?;
    lab.end()
}

/// A disk of which something is dirty, whose origin hangs.
fn dirty(test: &str) -> Result<Option<Lab>> {
    let Some(lab) = Lab::new(test, SIZE)? else {
        return Ok(None);
    };
    lab.add_hung(&[])?;
    lab.mount.hang(true)?;
    let mut client = lab.hearth.connect("hung")?;
    client.raw()?.set_read_timeout(Some(SOON))?;
    client.write(1 << 20, &[8; BLOCK])?;
    client.flush()?;
    ensure!(client.read(1 << 20, BLOCK as u32)? == [8; BLOCK]);
    Ok(Some(lab))
}

fn has_it(lab: &Lab) -> Result<bool> {
    Ok(std::fs::read(&lab.under)?[1 << 20..][..BLOCK] == [8; BLOCK])
}

#[test]
fn while_it_is_flushed_nobody_else_waits() -> Result<()> {
    let Some(mut lab) = dirty("flush")? else {
        return Ok(());
    };
    let mut flushing = lab.hearth.begin(&["disk", "flush", "hung"])?;
    lab.nobody_else_waits(&mut flushing)?;
    lab.mount.hang(false)?;
    ended(flushing, "it is flushed", LIMIT)??;
    ensure!(has_it(&lab)?, "what was dirty is not in the origin");
    lab.end()
}

#[test]
fn while_it_is_removed_nobody_else_waits() -> Result<()> {
    let Some(mut lab) = dirty("remove")? else {
        return Ok(());
    };
    let mut removing = lab.hearth.begin(&["disk", "remove", "hung", "--yes"])?;
    lab.nobody_else_waits(&mut removing)?;
    lab.mount.hang(false)?;
    ended(removing, "it is removed", LIMIT)??;
    ensure!(has_it(&lab)?, "what was dirty is not in the origin");
    ensure!(lab.hearth.connect("hung").is_err());
    lab.end()
}

/// The daemon says that it is done although the origin hangs: what others wrote is where it must be, and what the disk's guest
/// wrote is on flash. (The kernel does not let go of a process that waits for such a file, so the process itself is not waited for.)
#[test]
fn a_stop_is_not_held_up() -> Result<()> {
    let Some(mut lab) = dirty("stop")? else {
        return Ok(());
    };
    lab.guest.goes_on()?;
    lab.guest.ends()?;
    let mut client = lab.hearth.connect("well")?;
    client.write(0, &[5; BLOCK])?;
    client.flush()?;
    drop(client);
    let pid = lab.hearth.pid().context("not running")?;
    // SAFETY: a signal to a child that has not been waited for, so its pid is still its own.
    unsafe { libc::kill(pid as i32, libc::SIGTERM) };
    // Its limits add up to some 90 s.
    wait::until("the daemon stops", Duration::from_secs(150), || {
        let says = lab.hearth.log().contains("so there is no checkpoint");
        (says || !lab.hearth.running()).then_some(())
    })
    .with_context(|| lab.hearth.log())?;
    lab.mount.hang(false)?;
    wait::until("its process ends", LIMIT, || {
        (!lab.hearth.running()).then_some(())
    })?;
    lab.hearth.kill9()?;
    lab.hearth.start()?;
    ensure!(lab.hearth.connect("well")?.read(0, BLOCK as u32)? == [5; BLOCK]);
    let mut client = wait::until("the disk is served", LIMIT, || {
        lab.hearth.connect("hung").ok()
    })?;
    ensure!(client.read(1 << 20, BLOCK as u32)? == [8; BLOCK]);
    drop(client);
    lab.hearth.ok(&["disk", "flush", "hung"])?;
    ensure!(has_it(&lab)?);
    lab.hearth.stop().map(drop)
}

/// The end of a file of odd size is read by threads that others need as well: no device may have all of them.
#[test]
fn what_blocks_threads_blocks_only_its_own() -> Result<()> {
    let size = SIZE + 512;
    let Some(mut lab) = Lab::new("odd end", size)? else {
        return Ok(());
    };
    let odd = lab.hearth.dir().join("odd.raw");
    File::create(&odd)?.set_len(size)?;
    lab.hearth.add("odd", path(&odd), &["--mode", "off"])?;
    lab.add_hung(&["--mode", "off"])?;
    let mut hung = lab.hearth.connect("hung")?;
    let mut client = lab.hearth.connect("odd")?;
    client.raw()?.set_read_timeout(Some(SOON))?;
    lab.mount.hang(true)?;
    for _ in 0..32 {
        hung.send(Command::Read, SIZE, 512, &[])?;
    }
    for round in 0..8 {
        client.write(SIZE, &[round; 512])?;
        ensure!(client.read(SIZE, 512)? == [round; 512]);
    }
    lab.guest.goes_on()?;
    lab.mount.hang(false)?;
    for _ in 0..32 {
        ensure!(hung.receive()?.error == 0);
    }
    drop((hung, client));
    lab.end()
}
