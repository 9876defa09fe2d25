//! kill -9 while disks are added and removed: what was answered holds after the restart, nothing is half
//! done. The disks' origins have long names, so that few of them make a registry that has a journal.
//! `CHANGES` says how many changes there are at least; `SEED` repeats a run.

use anyhow::{Context, Result, ensure};
use hearth_rig::Hearth;
use hearth_rig::daemon::path;
use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Disks that stay.
const STAY: usize = 26;
/// Other disks' names.
const NAMES: u64 = 8;
/// A daemon lives between these, in milliseconds.
const LIFE_MS: (u64, u64) = (100, 900);
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
    done: &mut u64,
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
        *done += 1;
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
    let (mut done, mut kills) = (0, 0);
    while done < wanted {
        kills += 1;
        ensure!(
            kills < LIVES,
            "{done} changes in {kills} lives, SEED={seed}"
        );
        let pid = hearth.pid().context("no daemon")?;
        let life = Duration::from_millis(LIFE_MS.0 + random.below(LIFE_MS.1 - LIFE_MS.0));
        let doubtful = std::thread::scope(|scope| {
            let changes = scope.spawn(|| change(&hearth, &dir, &mut disks, &mut random, &mut done));
            // How long it lives is the test's choice, not a wait for anything.
            std::thread::sleep(life);
            // SAFETY: a signal to a child that has not been waited for, so its pid is still its own.
            unsafe { libc::kill(pid as i32, libc::SIGKILL) };
            changes.join().expect("the changing thread lives")
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
    println!("{done} changes, {kills} kills");
    // A kill changes nothing that was not being changed.
    hearth.kill9()?;
    hearth.start()?;
    ensure!(listed(&hearth)? == disks);
    Ok(())
}
