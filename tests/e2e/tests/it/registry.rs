//! kill -9 while disks are added and removed: what was answered holds after the restart, nothing is half
//! done. The disks' origins have long names, so that few of them make a registry that has a journal.
//! `CHANGES` says how many changes there are at least; `SEED` repeats a run.

use anyhow::{Context, Result, ensure};
use hearth_rig::daemon::path;
use hearth_rig::{Hearth, wait};
use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Disks that stay.
const STAY: usize = 26;
/// Other disks' names.
const NAMES: u64 = 8;
/// A daemon answers fewer changes than this, and is killed within this time after the last one: at any step of the
/// next.
const LIFE: (u64, Duration) = (12, Duration::from_millis(60));
/// Until the changes of a life are answered.
const LIMIT: Duration = Duration::from_secs(60);
/// Lives at most, whatever they achieve.
const LIVES: u64 = 2000;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// xorshift.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

/// A directory whose name is some 3000 characters long.
fn long_dir(dir: &Path) -> Result<PathBuf> {
    let mut at = dir.to_owned();
    for _ in 0..13 {
        at.push("x".repeat(230));
    }
    std::fs::create_dir_all(&at)?;
    Ok(at)
}

fn listed(hearth: &Hearth) -> Result<BTreeSet<String>> {
    let text = hearth.ok(&["disk", "list", "--json"])?;
    let all: serde_json::Value = serde_json::from_str(&text)?;
    let disks = all.as_array().or_else(|| all["disks"].as_array());
    let names = disks.with_context(|| format!("no list: {text}"))?.iter();
    Ok(names
        .filter_map(|d| Some(d["name"].as_str()?.to_owned()))
        .collect())
}

/// The flags of the registry's two bases.
fn flags(hearth: &Hearth) -> Result<[u8; 2]> {
    let flash = std::fs::File::open(hearth.flash())?;
    let mut flags = [0; 2];
    for (flag, at) in flags.iter_mut().zip([2u64 << 20, 3 << 20]) {
        flash.read_exact_at(std::slice::from_mut(flag), at + 40)?;
    }
    Ok(flags)
}

/// Adds and removes until that fails; then the disk it was about.
fn change(
    hearth: &Hearth,
    dir: &Path,
    disks: &mut BTreeSet<String>,
    random: &mut Random,
    done: &AtomicU64,
) -> Result<String> {
    loop {
        let name = format!("d{}", random.below(NAMES));
        let there = disks.contains(&name);
        let origin = dir.join(&name);
        let out = if there {
            hearth.hearth(&["disk", "remove", &name, "--yes"])?
        } else {
            hearth.hearth(&["disk", "add", &name, "--origin", path(&origin)])?
        };
        if !out.status.success() {
            return Ok(name);
        }
        done.fetch_add(1, Ordering::SeqCst);
        if there {
            disks.remove(&name);
        } else {
            disks.insert(name);
        }
    }
}

#[test]
fn what_was_answered_of_adding_and_removing_disks_survives_kills() -> Result<()> {
    let wanted = number("CHANGES").unwrap_or(40);
    let seed = number("SEED").unwrap_or_else(|| {
        std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(1, |d| d.as_nanos() as u64 | 1)
    });
    println!("kill -9 during {wanted} changes, SEED={seed}");
    let mut random = Random(seed);
    let mut hearth = Hearth::serving("64M")?;
    let dir = long_dir(hearth.dir())?;
    let mut disks = BTreeSet::new();
    let names = (0..STAY as u64).map(|n| format!("s{n}"));
    for name in names.chain((0..NAMES).map(|n| format!("d{n}"))) {
        let origin = dir.join(&name);
        std::fs::File::create(&origin)?.set_len(1 << 20)?;
        if name.starts_with('s') {
            hearth.add(&name, path(&origin), &[])?;
            disks.insert(name);
        }
    }
    ensure!(flags(&hearth)? == [1, 1], "the registry has no journal");
    let (done, mut kills) = (AtomicU64::new(0), 0);
    let answered = || done.load(Ordering::SeqCst);
    while answered() < wanted {
        kills += 1;
        ensure!(
            kills < LIVES,
            "{} changes in {kills} lives, SEED={seed}",
            answered()
        );
        let pid = hearth.pid().context("no daemon")?;
        let last = answered() + random.below(LIFE.0);
        let after = Duration::from_nanos(random.below(LIFE.1.as_nanos() as u64));
        let doubtful = std::thread::scope(|scope| {
            let changes = scope.spawn(|| change(&hearth, &dir, &mut disks, &mut random, &done));
            let over = || answered() >= last || changes.is_finished();
            let lived = wait::until("a life's changes are answered", LIMIT, || {
                over().then_some(())
            })
            .and_then(|()| {
                let since = Instant::now();
                let time = || since.elapsed() >= after;
                wait::until("the next is under way", LIMIT, || time().then_some(()))
            });
            // SAFETY: a signal to a child that has not been waited for, so its pid is still its own.
            unsafe { libc::kill(pid as i32, libc::SIGKILL) };
            let doubtful = changes.join().expect("the changing thread lives");
            lived.and(doubtful)
        })?;
        hearth.kill9()?;
        hearth
            .start()
            .with_context(|| format!("kill {kills}, SEED={seed}"))?;
        let found = listed(&hearth)?;
        let without = |set: &BTreeSet<String>| {
            let mut set = set.clone();
            set.remove(&doubtful);
            set
        };
        ensure!(
            without(&found) == without(&disks),
            "kill {kills}, SEED={seed}: {found:?} instead of {disks:?}, {doubtful} in doubt"
        );
        disks = found;
    }
    println!("{} changes, {kills} kills", answered());
    // A kill changes nothing that was not being changed.
    hearth.kill9()?;
    hearth.start()?;
    ensure!(listed(&hearth)? == disks);
    Ok(())
}
