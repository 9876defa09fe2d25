//! A swap file on a failed device: the kernel reports nothing before a program needs a page.

use super::in_pool::Loop;
use super::*;
use hearth_rig::daemon::path;
use hearth_rig::mounted::{self, Mounted};

/// A file system, unmounted when dropped.
struct Mount(PathBuf);

impl Mount {
    /// Makes one without a journal: a device that fails does not change how it is mounted.
    fn of(node: &str, at: &Path) -> Result<Mount> {
        let run = |program: &str, words: &[&str]| -> Result<()> {
            let out = Command::new(program).args(words).output()?;
            ensure!(out.status.success(), "{program}: {out:?}");
            Ok(())
        };
        run("mkfs.ext4", &["-q", "-O", "^has_journal", node])?;
        std::fs::create_dir_all(at)?;
        run("mount", &["-o", "errors=continue", node, path(at)])?;
        Ok(Mount(at.to_owned()))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-l", path(&self.0)]).status();
    }
}

#[test]
fn dead_swap_file_is_reported() -> Result<()> {
    let test = "dead_swap_file_is_reported";
    if let Some(missing) = mounted::missing() {
        println!("SKIPPED {test}: no {missing}");
        return Ok(());
    }
    if daemon(test)?.is_none() || !have(test, &["losetup", "mkfs.ext4", "swapoff"]) {
        return Ok(());
    }
    let mut hearth = Hearth::bare()?;
    let under = hearth.dir().join("under.img");
    std::fs::File::create(&under)?.set_len(160 * MIB)?;
    let device = Mounted::new(hearth.dir(), "f", &under, 0)?;
    let Some(node) = Loop::past_cache(Path::new(device.path())) else {
        println!("SKIPPED {test}: no loop devices here");
        return Ok(());
    };
    let ssd = Mount::of(&node.0, &hearth.dir().join("ssd"))?;
    // The pool is on another device, so its state does not show this failure.
    hearth.create_pool("96M")?;
    hearth.start()?;
    let beside = ssd.0.join("flash");
    std::fs::write(&beside, b"")?;
    let after = After {
        area: ssd.0.join("flash.swap"),
        page_cluster: page_cluster()?,
        zswap: zswap(),
    };
    said(&hearth, &["on", "--size", "8M", "--flash", path(&beside)])?;
    let trouble = || -> Result<Value> {
        let shown = hearth.ok(&["pool", "show", "--json"])?;
        let shown: Value = serde_json::from_str(&shown)?;
        ensure!(shown["state"] == "serving", "{shown}");
        Ok(shown["swap_trouble"].clone())
    };
    ensure!(trouble()?.is_null());
    device.fail(true)?;
    let told = wait::until("it is noticed", LIMIT, || match trouble() {
        Ok(told) => told.as_str().map(|told| Ok(told.to_owned())),
        Err(e) => Some(Err(e)),
    })
    .with_context(|| hearth.log())??;
    ensure!(told.contains("flash.swap cannot be read"), "{told}");
    wait::until("the event", LIMIT, || {
        let events = hearth.ok(&["events"]).ok()?;
        events.contains(&told).then_some(())
    })?;
    let health = hearth.hearth(&["health", "--json"])?;
    let health = String::from_utf8_lossy(&health.stdout).into_owned();
    ensure!(health.contains("swap-on-failed-flash"), "{health}");
    device.fail(false)?;
    wait::until("it is over", LIMIT, || {
        trouble().ok()?.is_null().then_some(())
    })?;
    said(&hearth, &["off"])?;
    drop((after, ssd, node));
    Ok(())
}
