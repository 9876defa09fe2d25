//! Swap and the cache on one flash that has only so much to give: the cache gives way.
//!
//! The flash is a loop device that the kernel lets read only so many bytes a second (cgroup v1). What is read there by the destager,
//! with nobody waiting for it, makes pages from swap come back late.

use super::in_pool::{Loop, Swept};
use super::throttled::Throttled;
use super::*;
use hearth_rig::daemon::path;
use hearth_rig::rng::Rng;

/// Bytes a second that the flash reads.
const READ_RATE: u64 = 8 * MIB;
/// The disk whose blocks are dirty, in MiB.
const DIRTY: u64 = 112;
/// Memory of the program that is swapped out, in MiB, of which less than half fits.
const WANTED: u64 = 96;

/// A program that looks at its pages with a pause after each: it does not take all that the flash reads.
fn idler(group: &Group) -> Result<Ended> {
    const LOOK: &str = "
import sys, time
n = int(sys.argv[1]) << 8
b = bytearray(n << 12)
def of(i): return i * 0x9E3779B97F4A7C15 >> 8 & 0xff
for i in range(n): b[i << 12] = of(i)
i = 0
while True:
    i = (i + 4099) % n
    if b[i << 12] != of(i): sys.exit('page %d is wrong' % i)
    time.sleep(0.002)
";
    let wrap = group.wrap();
    let child = Command::new(&wrap[0])
        .args(&wrap[1..])
        .args(["python3", "-c", LOOK, &WANTED.to_string()])
        .stdin(Stdio::null())
        .spawn()?;
    Ok(Ended(child))
}

/// Ended when dropped.
struct Ended(std::process::Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// How much was destaged in how much time, while the cache stands back and while it does not.
#[derive(Default)]
struct Rates {
    seen: [(u64, f64); 2],
    before: Option<(std::time::Instant, bool, u64)>,
}

impl Rates {
    fn look(&mut self, stands_back: bool, destaged: u64) {
        let now = std::time::Instant::now();
        if let Some((then, back, was)) = self.before.replace((now, stands_back, destaged))
            && back == stands_back
        {
            let (bytes, seconds) = &mut self.seen[usize::from(back)];
            *bytes += destaged - was;
            *seconds += (now - then).as_secs_f64();
        }
    }

    fn of(&self, stands_back: bool) -> Option<f64> {
        let (bytes, seconds) = self.seen[usize::from(stands_back)];
        (seconds > 1.0).then(|| bytes as f64 / seconds)
    }
}

fn events(hearth: &Hearth, kind: &str) -> Result<usize> {
    let told = hearth.ok(&["events", "--json", "--limit", "1000"])?;
    Ok(told.matches(&format!("\"{kind}\"")).count())
}

#[test]
fn the_cache_stands_back_while_pages_come_back_late() -> Result<()> {
    let test = "the_cache_stands_back_while_pages_come_back_late";
    if daemon(test)?.is_none() || !have(test, &["losetup", "swapoff"]) {
        return Ok(());
    }
    let Some(group) = Group::of(test, 40 * MIB)? else {
        return Ok(());
    };
    let mut hearth = Hearth::bare()?;
    let file = hearth.dir().join("device");
    std::fs::File::create(&file)?.set_len(448 * MIB)?;
    let Some(flash) = Loop::over(&file) else {
        println!("SKIPPED {test}: no loop devices here");
        return Ok(());
    };
    let Loop(node) = &flash;
    hearth.set_flash(node.into());
    hearth.ok(&["pool", "create", "--flash", node])?;
    hearth.start()?;
    let origin = hearth.origin("origin", DIRTY * MIB)?;
    hearth.add("vm", path(&origin), &[])?;
    let _swept = Swept::of(&hearth)?;
    said(&hearth, &["on", "--size", "96M", "--in-pool"])?;
    let Some(_throttled) = Throttled::reads(test, node, READ_RATE)? else {
        return Ok(());
    };

    let mut program = idler(&group)?;
    let traffic = || -> Result<Value> { Ok(said(&hearth, &["show"])?["traffic"].clone()) };
    let usual = wait::until("it is known what is usual", LIMIT, || {
        let now = traffic().ok()?;
        now["usual_latency_us"].as_u64()
    })?;
    println!("alone, a page is back in {usual} µs");

    // Then so much is dirty that the destager works by itself, with nobody who waits for it: again and again, should it be done before
    // that is noticed.
    let blocks: Vec<Vec<u8>> = (0..DIRTY)
        .map(|n| {
            let mut out = vec![0; MIB as usize];
            Rng::new(9 << 32 | n).fill(&mut out);
            out
        })
        .collect();
    let mut client = hearth.connect("vm")?;
    let mut write = || -> Result<()> {
        for (n, block) in (0..).zip(&blocks) {
            client.write(n * MIB, block)?;
        }
        Ok(client.flush()?)
    };
    let dirty = || -> Result<u64> {
        let shown: Value = serde_json::from_str(&hearth.ok(&["disk", "show", "vm", "--json"])?)?;
        shown["dirty"].as_u64().context("not said")
    };
    let mut rates = Rates::default();
    let (mut slowest, mut rounds) = (0, 0);
    wait::until(
        "the cache stood back, and does not any more",
        2 * LIMIT,
        || {
            let now = traffic().ok()?;
            let back = now["cache_stands_back"].as_bool()?;
            slowest = slowest.max(now["latency_us"].as_u64().unwrap_or(0));
            rates.look(back, hearth.counter("vm", "destaged").ok()? * 4096);
            if events(&hearth, "swap-well").ok()? > 0 {
                return Some(());
            }
            if !back && dirty().ok()? < DIRTY / 4 * MIB {
                write().ok()?;
                rounds += 1;
            }
            None
        },
    )?;
    ensure!(events(&hearth, "swap-slow")? > 0);
    println!(
        "then in {slowest} µs at most; written {rounds} times; destaged a second: {:?} bytes, and {:?} while the cache stood back",
        rates.of(false),
        rates.of(true)
    );
    ensure!(program.0.try_wait()?.is_none(), "a page was wrong");
    drop(program);
    said(&hearth, &["off"])?;
    let mut client = hearth.connect("vm")?;
    for (n, block) in (0..).zip(&blocks) {
        ensure!(client.read(n * MIB, MIB as u32)? == *block, "block {n}");
    }
    Ok(())
}
