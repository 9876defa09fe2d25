//! Flash that hangs is told and left, and meanwhile whoever asks the daemon anything is answered.
//!
//! What hangs is a file behind processes in user space, one of which is stopped: not even its name is told.

use anyhow::{Context, Result, ensure};
use hearth_rig::daemon::path;
use hearth_rig::mounted::{self, Mounted};
use hearth_rig::pattern::BLOCK;
use hearth_rig::{Hearth, wait};
use serde_json::Value;
use std::fs::File;
use std::time::Duration;

/// Longest wait for what comes by itself.
const LIMIT: Duration = Duration::from_secs(60);
/// Far longer than an answer takes. The flash hangs until the test ends.
const SOON: Duration = Duration::from_secs(20);

/// What a command says that must be answered although the flash hangs.
fn soon(hearth: &Hearth, args: &[&str]) -> Result<String> {
    let mut child = hearth.begin(args)?;
    let ends = wait::until(&args.join(" "), SOON, || child.try_wait().ok().flatten());
    if ends.is_err() {
        child.kill()?;
    }
    let out = child.wait_with_output()?;
    ends.with_context(|| hearth.log())?;
    hearth_rig::daemon::ok(out)
}

#[test]
fn whoever_asks_is_answered() -> Result<()> {
    if let Some(missing) = mounted::missing() {
        println!("SKIPPED hung flash: no {missing}");
        return Ok(());
    }
    let mut hearth = Hearth::bare()?;
    let under = hearth.dir().join("under.img");
    File::create(&under)?.set_len(160 << 20)?;
    let mount = Mounted::unknown(hearth.dir(), "f", &under)?;
    hearth.ok(&["pool", "create", "--flash", mount.path()])?;
    hearth.set_flash(mount.path().into());
    hearth.serve_args = ["--flash-timeout", "2"].map(str::to_owned).to_vec();
    hearth.start()?;
    let origin = hearth.dir().join("o.raw");
    File::create(&origin)?.set_len(16 << 20)?;
    hearth.add("d", path(&origin), &["--mode", "write-through"])?;
    let mut client = hearth.connect("d")?;
    client.write(0, &[1; BLOCK])?;
    client.raw()?.set_read_timeout(Some(SOON))?;
    mount.hang(true)?;
    client.write(0, &[2; BLOCK])?;
    let mut hang = || -> Result<()> {
        // That it is left is shown by what must be answered all the while; by then the kernel has forgotten its name.
        wait::until("the flash is left", LIMIT, || {
            let shown = match soon(&hearth, &["pool", "show", "--json"]) {
                Ok(shown) => shown,
                Err(e) => return Some(Err(e)),
            };
            let pool: Value = serde_json::from_str(&shown).ok()?;
            (pool["state"] != "serving").then_some(Ok(()))
        })??;
        for args in [
            &["pool", "show"][..],
            &["disk", "list"],
            &["disk", "show", "d"],
            &["stats"],
            &["events"],
            // This one is done by the daemon's own rounds.
            &["disk", "flush", "d"],
        ] {
            soon(&hearth, args)?;
        }
        client.write(0, &[3; BLOCK])?;
        ensure!(client.read(0, BLOCK as u32)? == [3; BLOCK]);
        Ok(())
    };
    let went = hang();
    mount.hang(false)?;
    went?;
    drop(client);
    ensure!(std::fs::read(&origin)?[..BLOCK] == [3; BLOCK]);
    drop(mount);
    hearth.kill9()
}
