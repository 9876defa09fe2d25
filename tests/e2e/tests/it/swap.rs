//! Swap of the host on flash: real swapping, also while the daemon is killed.
//!
//! The kernel's swap is the host's: the tests skip where it cannot be had.
//!
//! Exclusive: swap, loop devices

mod answers;
mod failed;
mod in_pool;
mod throttled;
mod yields;

use anyhow::{Context, Result, ensure};
use hearth_rig::clients::have;
use hearth_rig::short::Group;
use hearth_rig::{Hearth, wait};
use serde_json::Value;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(120);
const ZSWAP: &str = "/sys/module/zswap/parameters/enabled";
const PAGE_CLUSTER: &str = "/proc/sys/vm/page-cluster";

/// Words of a command about swap, noted in the test's own directory.
fn words(hearth: &Hearth, words: &[&str]) -> Vec<String> {
    let state = hearth.dir().join("state").display().to_string();
    let mut all: Vec<String> = vec!["swap".into()];
    all.extend(words.iter().map(|w| (*w).to_owned()));
    all.extend(["--state-dir".into(), state]);
    all
}

fn said(hearth: &Hearth, about: &[&str]) -> Result<Value> {
    let mut all = words(hearth, about);
    all.push("--json".into());
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    Ok(serde_json::from_str(&hearth.ok(&all)?)?)
}

fn refused(hearth: &Hearth, about: &[&str]) -> Result<String> {
    let all = words(hearth, about);
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    hearth.refused(&all)
}

/// The only area, as it is shown.
fn area(hearth: &Hearth) -> Result<Value> {
    let shown = said(hearth, &["show"])?;
    let areas = shown["areas"].as_array().context("no list")?;
    ensure!(areas.len() == 1, "{shown}");
    Ok(areas[0].clone())
}

fn used(hearth: &Hearth) -> Result<u64> {
    area(hearth)?["used"].as_u64().context("not said")
}

/// Bytes that are swapped out to it, by the quickest way to know.
fn kernel_says(area: &Path) -> Option<u64> {
    let all = std::fs::read_to_string("/proc/swaps").ok()?;
    let line = all
        .lines()
        .find(|l| l.starts_with(&*area.to_string_lossy()))?;
    let kib = line.split_whitespace().nth(3)?;
    Some(kib.parse::<u64>().ok()? << 10)
}

/// Whatever becomes of the test: the host's swap and settings are as before.
struct After {
    area: PathBuf,
    page_cluster: String,
    /// Where the kernel has it.
    zswap: Option<String>,
}

impl After {
    fn of(hearth: &Hearth) -> Result<After> {
        let mut area = std::fs::canonicalize(hearth.flash())?.into_os_string();
        area.push(".swap");
        Ok(After {
            area: area.into(),
            page_cluster: page_cluster()?,
            zswap: zswap(),
        })
    }
}

impl Drop for After {
    fn drop(&mut self) {
        swapoff(&self.area);
        if let Some(zswap) = &self.zswap {
            let _ = std::fs::write(ZSWAP, zswap);
        }
        let _ = std::fs::write(PAGE_CLUSTER, &self.page_cluster);
    }
}

fn swapoff(area: &Path) {
    let mut command = Command::new("swapoff");
    let _ = command.arg(area).stderr(Stdio::null()).status();
}

fn zswap() -> Option<String> {
    std::fs::read_to_string(ZSWAP).ok()
}

fn page_cluster() -> Result<String> {
    Ok(std::fs::read_to_string(PAGE_CLUSTER)?.trim().to_owned())
}

/// Can swap be encrypted here?
fn has_crypt() -> bool {
    let run = |program: &str, word: &str| Command::new(program).arg(word).output();
    let targets = run("dmsetup", "targets");
    let crypt = targets.is_ok_and(|out| String::from_utf8_lossy(&out.stdout).contains("crypt"));
    crypt && run("cryptsetup", "--version").is_ok()
}

/// A daemon, where a test can swap.
fn daemon(test: &str) -> Result<Option<Hearth>> {
    // SAFETY: no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        println!("SKIPPED {test}: needs root");
        return Ok(None);
    }
    let settings = std::fs::OpenOptions::new().write(true).open(PAGE_CLUSTER);
    if settings.is_err() || !Path::new("/proc/swaps").exists() {
        println!("SKIPPED {test}: there is no swap to be had here");
        return Ok(None);
    }
    if !have(test, &["mkswap", "swapoff", "python3"]) {
        return Ok(None);
    }
    Ok(Some(Hearth::serving("128M")?))
}

#[test]
fn memory_is_right_while_the_daemon_is_killed() -> Result<()> {
    let test = "memory_is_right_while_the_daemon_is_killed";
    let Some(mut hearth) = daemon(test)? else {
        return Ok(());
    };
    let Some(group) = Group::of(test, 64 * MIB)? else {
        return Ok(());
    };
    let after = After::of(&hearth)?;
    // The flash file is the running daemon's.
    let mut on = vec!["on", "--size", "256M"];
    on.extend(after.zswap.is_some().then_some("--zswap"));
    let made = said(&hearth, &on)?;
    ensure!(made["areas"][0]["on"] == true, "{made}");
    ensure!(after.zswap.is_none() || zswap().is_some_and(|now| now.trim() == "Y"));
    ensure!(page_cluster()? == "0");
    let file = std::fs::metadata(&after.area)?;
    ensure!(file.len() == 256 * MIB && file.blocks() * 512 >= 256 * MIB);
    ensure!(file.mode() & 0o777 == 0o600);
    let again = refused(&hearth, &["on", "--size", "256M"])?;
    ensure!(again.contains("already"), "{again}");

    let mut hog = group.hog(150)?;
    hog.looked()?;
    ensure!(used(&hearth)? > 60 * MIB, "{}", area(&hearth)?);
    hearth.kill9()?;
    hog.looked()?;
    hearth.start()?;
    hog.looked()?;
    ensure!(used(&hearth)? > 60 * MIB, "{}", area(&hearth)?);
    drop(hog);

    let gone = said(&hearth, &["off"])?;
    ensure!(gone["areas"] == Value::Array(Vec::new()), "{gone}");
    ensure!(!after.area.exists() && page_cluster()? == after.page_cluster);
    ensure!(zswap() == after.zswap, "{:?}", zswap());
    ensure!(!hearth.dir().join("state/swap.json").exists());
    Ok(())
}

/// A program in a control group at its limit is not killed for reading back what does not fit
/// there, however much the host has.
#[test]
fn off_beyond_a_groups_limit_is_refused() -> Result<()> {
    let test = "off_beyond_a_groups_limit_is_refused";
    let Some(hearth) = daemon(test)? else {
        return Ok(());
    };
    let Some(group) = Group::of(test, 64 * MIB)? else {
        return Ok(());
    };
    let after = After::of(&hearth)?;
    said(&hearth, &["on", "--size", "256M"])?;
    let mut hog = group.hog(150)?;
    hog.looked()?;
    let told = refused(&hearth, &["off"])?;
    ensure!(
        told.contains("would kill programs in it")
            && told.contains("raise the group's memory limit"),
        "{told}"
    );
    hog.looked()?;
    ensure!(area(&hearth)?["on"] == true && area(&hearth)?["stage"] == "used");
    // With the limit raised it goes, and the program keeps what it has.
    group.allow(512 * MIB)?;
    said(&hearth, &["off"])?;
    hog.looked()?;
    ensure!(!after.area.exists());
    Ok(())
}

/// A path that the daemon was given in its own directory is no reason to take a part of the pool.
#[test]
fn relative_flash_path_has_swap_beside_it() -> Result<()> {
    let Some(mut hearth) = daemon("relative_flash_path_has_swap_beside_it")? else {
        return Ok(());
    };
    let after = After::of(&hearth)?;
    let _swept = in_pool::Swept::of(&hearth)?;
    hearth.stop()?;
    let flash = hearth.flash().to_owned();
    let enter = format!("cd '{}' && exec \"$@\"", hearth.dir().display());
    hearth.wrap = ["sh", "-c", &enter, "sh"].map(String::from).to_vec();
    hearth.set_flash(flash.file_name().context("no name")?.into());
    hearth.start()?;
    let made = said(&hearth, &["on", "--size", "8M"])?;
    ensure!(made["areas"][0]["in_pool"].is_null(), "{made}");
    ensure!(after.area.exists(), "{made}");
    said(&hearth, &["off"])?;
    ensure!(!after.area.exists());
    Ok(())
}

#[test]
fn a_boot_takes_it_up_again_and_nothing_else() -> Result<()> {
    let test = "a_boot_takes_it_up_again_and_nothing_else";
    let Some(hearth) = daemon(test)? else {
        return Ok(());
    };
    let after = After::of(&hearth)?;
    let flash = hearth.flash().display().to_string();
    let on = ["on", "--size", "8M", "--flash", &flash, "--priority", "7"];
    said(&hearth, &on)?;
    let boot = || -> Result<()> {
        swapoff(&after.area);
        std::fs::write(PAGE_CLUSTER, &after.page_cluster)?;
        ensure!(area(&hearth)?["on"] == false);
        Ok(())
    };
    boot()?;
    said(&hearth, &["resume"])?;
    let now = area(&hearth)?;
    ensure!(now["on"] == true && now["priority"] == 7, "{now}");
    ensure!(page_cluster()? == "0");
    // Once more changes nothing.
    said(&hearth, &["resume"])?;

    boot()?;
    let made = Command::new("mkswap").arg(&after.area).output()?;
    ensure!(made.status.success());
    let told = refused(&hearth, &["resume"])?;
    ensure!(told.contains("other swap"), "{told}");
    ensure!(area(&hearth)?["on"] == false);
    said(&hearth, &["off"])?;
    ensure!(!after.area.exists() && page_cluster()? == after.page_cluster);
    Ok(())
}

/// A boot ends all settings: what has such a value afterwards was set by somebody else, or is
/// another disk's.
#[test]
fn settings_of_another_boot_stay_as_found() -> Result<()> {
    let Some(hearth) = daemon("settings_of_another_boot_stay_as_found")? else {
        return Ok(());
    };
    let after = After::of(&hearth)?;
    std::fs::write(PAGE_CLUSTER, "3")?;
    let flash = hearth.flash().display().to_string();
    said(&hearth, &["on", "--size", "8M", "--flash", &flash])?;
    ensure!(page_cluster()? == "0");
    swapoff(&after.area);
    let path = hearth.dir().join("state/swap.json");
    let mut noted: Value = serde_json::from_slice(&std::fs::read(&path)?)?;
    noted["boot"] = "another".into();
    std::fs::write(&path, noted.to_string())?;
    said(&hearth, &["off"])?;
    ensure!(!after.area.exists() && page_cluster()? == "0");
    Ok(())
}

#[test]
fn taking_it_away_can_be_called_off() -> Result<()> {
    let test = "taking_it_away_can_be_called_off";
    let Some(hearth) = daemon(test)? else {
        return Ok(());
    };
    let Some(group) = Group::of(test, 64 * MIB)? else {
        return Ok(());
    };
    let after = After::of(&hearth)?;
    said(&hearth, &["on", "--size", "512M"])?;
    // The kernel looks for signals between processes only.
    let mut hogs = Vec::new();
    for _ in 0..5 {
        hogs.push(group.hog(80)?);
    }
    hogs.iter_mut().try_for_each(|hog| hog.looked())?;
    let before = used(&hearth)?;
    ensure!(before > 250 * MIB, "{before}");
    // There is room for it now.
    group.allow(1 << 30)?;
    let off = Command::new(hearth_rig::daemon::binary()?)
        .args(words(&hearth, &["off"]))
        .stderr(Stdio::piped())
        .spawn()?;
    wait::until("some is read back", LIMIT, || {
        (kernel_says(&after.area)? < before / 10 * 9).then_some(())
    })?;
    // SAFETY: a child of ours that was not waited for yet.
    unsafe { libc::kill(off.id() as libc::pid_t, libc::SIGINT) };
    let off = off.wait_with_output()?;
    ensure!(off.status.code() == Some(130), "{off:?}");
    let now = area(&hearth)?;
    ensure!(now["on"] == true && now["stage"] == "used", "{now}");
    ensure!(now["used"].as_u64().is_some_and(|n| n > 0), "{now}");
    hogs.iter_mut().try_for_each(|hog| hog.looked())?;

    // The kernel gives up where it does not get down to it at once.
    wait::until("less memory is allowed", LIMIT, || {
        group.allow(128 * MIB).is_ok().then_some(())
    })?;
    hogs.iter_mut().try_for_each(|hog| hog.looked())?;
    ensure!(used(&hearth)? > 100 * MIB, "{}", area(&hearth)?);
    drop(hogs);
    said(&hearth, &["off"])?;
    Ok(())
}

#[test]
fn what_cannot_be_is_told() -> Result<()> {
    let Some(hearth) = daemon("what_cannot_be_is_told")? else {
        return Ok(());
    };
    let huge = refused(&hearth, &["on", "--size", "1000T"])?;
    ensure!(huge.contains("--size"), "{huge}");
    let device = refused(&hearth, &["on", "--size", "8M", "--flash", "/dev/null"])?;
    ensure!(
        device.contains("no file") && device.contains("--in-pool"),
        "{device}"
    );
    let in_clear = ["on", "--size", "8M", "--in-pool", "--encrypt"];
    if !has_crypt() {
        let clear = refused(&hearth, &in_clear)?;
        ensure!(
            clear.contains("cannot be encrypted") && clear.contains("leave --encrypt out"),
            "{clear}"
        );
        let aside = said(&hearth, &["show"])?;
        ensure!(
            aside["areas"] == aside["idle"] && aside["idle"] == Value::Array(Vec::new()),
            "{aside}"
        );
    }
    let mut foreign = std::fs::canonicalize(hearth.flash())?.into_os_string();
    foreign.push(".swap");
    std::fs::write(&foreign, b"somebody's")?;
    let there = refused(&hearth, &["on", "--size", "8M"])?;
    ensure!(there.contains("nobody noted"), "{there}");
    ensure!(std::fs::read(&foreign)? == b"somebody's");
    Ok(())
}
