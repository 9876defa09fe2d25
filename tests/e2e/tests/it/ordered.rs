//! Ordered write-back over an origin that does not keep up: where there is a limit on how far behind it may be (`--max-age`),
//! writes wait for it. That is told, and so is its end, and nothing fails.

use anyhow::{Context, Result, ensure};
use hearth_rig::clients::have;
use hearth_rig::daemon::path;
use hearth_rig::pattern::BLOCK;
use hearth_rig::servers::Server;
use hearth_rig::{Hearth, wait};
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Longest wait for what comes by itself.
const LIMIT: Duration = Duration::from_secs(120);
const BLOCKS: u64 = 256;

/// How many events of this kind there were.
fn told(hearth: &Hearth, kind: &str) -> Result<usize> {
    let events = hearth.ok(&["events", "--json"])?;
    let kind = format!("\"event\":\"{kind}\"");
    Ok(events.lines().filter(|e| e.contains(&kind)).count())
}

fn wait_told(hearth: &Hearth, kind: &str) -> Result<()> {
    wait::until(kind, LIMIT, || {
        (told(hearth, kind).ok()? == 1).then_some(())
    })
    .with_context(|| hearth.log())
}

/// A guest that writes one block after the other, each when the one before is answered, until it is told to end. It flushes
/// when it has been through so many. What the disk holds then.
struct Guest {
    end: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    thread: std::thread::JoinHandle<Result<Vec<u8>>>,
}

impl Guest {
    fn of(hearth: &Hearth, flush_every: u64) -> Result<Guest> {
        let mut client = hearth.connect("d")?;
        let (end, answered) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicU64::new(0)),
        );
        let (over, count) = (end.clone(), answered.clone());
        let thread = std::thread::spawn(move || {
            let mut model = vec![0; BLOCKS as usize * BLOCK];
            let mut number = 0u64;
            while !over.load(Ordering::Relaxed) {
                number += 1;
                let at = number * 7 % BLOCKS * BLOCK as u64;
                let block = &mut model[at as usize..][..BLOCK];
                block.fill(number as u8);
                client.write(at, block)?;
                if number % flush_every == 0 {
                    client.flush()?;
                }
                count.fetch_add(1, Ordering::Relaxed);
            }
            client.flush()?;
            Ok(model)
        });
        Ok(Guest {
            end,
            answered,
            thread,
        })
    }

    fn answered(&self) -> u64 {
        self.answered.load(Ordering::Relaxed)
    }

    fn ends(self) -> Result<Vec<u8>> {
        self.end.store(true, Ordering::Relaxed);
        self.thread.join().ok().context("the guest has panicked")?
    }
}

/// The origin takes nothing for a while. From the time at which that is told on nothing more is answered, or it would be
/// further behind than it may be; when it takes something again, all goes on.
#[test]
fn writes_wait_for_an_origin_that_is_too_far_behind_and_it_is_told() -> Result<()> {
    if !have("ordered: an origin too far behind", &["qemu-nbd"]) {
        return Ok(());
    }
    let mut hearth = Hearth::serving("160M")?;
    let file = hearth.dir().join("o.raw");
    File::create(&file)?.set_len(BLOCKS * BLOCK as u64)?;
    let server = Server::qemu_nbd(&file, "o", hearth.dir().join("o.sock"))?;
    let ordered = ["--mode", "write-back-ordered", "--max-age", "1s"];
    let more = [&ordered[..], &["--sole-user", "--origin-timeout", "600"]].concat();
    hearth.add("d", &server.uri("o"), &more)?;
    server.signal(libc::SIGSTOP)?;
    let guest = Guest::of(&hearth, 16)?;
    wait_told(&hearth, "origin-too-far-behind")?;
    let before = guest.answered();
    let shown = hearth.ok(&["disk", "show", "d"])?;
    ensure!(shown.contains("behind"), "{shown}");
    ensure!(told(&hearth, "origin-in-time")? == 0, "{}", hearth.log());
    ensure!(guest.answered() == before, "it was let go on");
    server.signal(libc::SIGCONT)?;
    wait::until("the guest goes on", LIMIT, || {
        (guest.answered() > before + 16).then_some(())
    })?;
    let model = guest.ends()?;
    wait_told(&hearth, "origin-in-time")?;
    ensure!(told(&hearth, "origin-too-far-behind")? == 1);
    hearth.ok(&["disk", "flush", "d"])?;
    ensure!(std::fs::read(&file)? == model, "the origin is not the disk");
    hearth.stop()?;
    Ok(())
}

/// An origin that is only slow: a guest that flushes each write is slowed down to about its rate, from the first second on, and
/// never stands still until the origin has a backlog of what flash took meanwhile.
#[test]
fn an_origin_that_is_slow_slows_its_guest_down_and_does_not_stop_it() -> Result<()> {
    let mut hearth = Hearth::serving("160M")?;
    let file = hearth.dir().join("o.raw");
    File::create(&file)?.set_len(BLOCKS * BLOCK as u64)?;
    let ordered = ["--mode", "write-back-ordered", "--max-age", "1s"];
    hearth.add(
        "d",
        &format!("model-latency=60ms:{}", path(&file)),
        &ordered,
    )?;
    let guest = Guest::of(&hearth, 1)?;
    // Far more than may wait while nothing is known of the origin.
    wait::until("the guest goes on at the origin's rate", LIMIT, || {
        (guest.answered() > 40).then_some(())
    })
    .with_context(|| hearth.log())?;
    let shown: serde_json::Value =
        serde_json::from_str(&hearth.ok(&["disk", "show", "d", "--json"])?)?;
    let waiting = shown["dirty"].as_u64().context("no dirty bytes")? / BLOCK as u64;
    ensure!(
        waiting <= 24,
        "{waiting} epochs wait for the origin: {shown}"
    );
    let model = guest.ends()?;
    hearth.ok(&["disk", "flush", "d"])?;
    ensure!(std::fs::read(&file)? == model, "the origin is not the disk");
    hearth.stop()?;
    Ok(())
}
