//! Rolled back legs without file times: block devices and exports of servers.
//!
//! Exclusive: loop devices

use super::*;
use crate::users::Loop;

/// Two legs on loop devices, with their files.
fn loop_legs(hearth: &Hearth) -> Result<Option<Vec<(Loop, PathBuf)>>> {
    let mut legs = Vec::new();
    for name in ["a", "b"] {
        let file = blank(hearth, name)?;
        match Loop::new("mirrors: legs on loop devices", &file, &[]) {
            Some(device) => legs.push((device, file)),
            None => return Ok(None),
        }
    }
    Ok(Some(legs))
}

#[test]
fn loop_leg_rolled_back_leaves_the_mirror() -> Result<()> {
    for (leg, mode) in [(0, "off"), (1, "write-back")] {
        let mut hearth = Hearth::serving("160M")?;
        let Some(legs) = loop_legs(&hearth)? else {
            return Ok(());
        };
        let [(a, _), (b, _)] = &legs[..] else {
            anyhow::bail!("two legs");
        };
        add(&hearth, &[&a.0, &b.0], &["--mode", mode])?;
        let image = write_twice(&mut hearth, &legs[0].1)?;
        let device = std::fs::OpenOptions::new()
            .write(true)
            .open(&legs[leg].0.0)?;
        device.write_all_at(&image, 0)?;
        device.sync_all()?;
        drop(device);
        older_copy_leaves(&mut hearth, leg)?;
        ensure!(std::fs::read(&legs[0].1)? == std::fs::read(&legs[1].1)?);
    }
    Ok(())
}

#[test]
fn loop_legs_that_are_all_older_are_refused() -> Result<()> {
    let mut hearth = Hearth::serving("160M")?;
    let Some(legs) = loop_legs(&hearth)? else {
        return Ok(());
    };
    let [(a, _), (b, _)] = &legs[..] else {
        anyhow::bail!("two legs");
    };
    add(&hearth, &[&a.0, &b.0], &["--mode", "off"])?;
    let image = write_twice(&mut hearth, &legs[0].1)?;
    for (device, _) in &legs {
        let device = std::fs::OpenOptions::new().write(true).open(&device.0)?;
        device.write_all_at(&image, 0)?;
        device.sync_all()?;
    }
    hearth.start()?;
    let shown = wait::until("the disk is refused", LIMIT, || {
        let shown = hearth.ok(&["disk", "show", "d", "--json"]).ok()?;
        shown.contains("\"refused\"").then_some(shown)
    })?;
    for (device, file) in &legs {
        ensure!(shown.contains(&device.0), "{shown}");
        ensure!(std::fs::read(file)? == image, "it was written");
    }
    ensure!(shown.contains("that were written last"), "{shown}");
    Ok(())
}

#[test]
fn nbd_leg_rolled_back_leaves_the_mirror() -> Result<()> {
    for (leg, mode) in [(0, "write-back"), (1, "off")] {
        let mut hearth = Hearth::serving("160M")?;
        let files = [blank(&hearth, "a")?, blank(&hearth, "b")?];
        let server = |file: &PathBuf| Server::qemu_nbd(file, "x", file.with_extension("s"));
        let mut servers = [server(&files[0])?, server(&files[1])?];
        let names = [servers[0].uri("x"), servers[1].uri("x")];
        let how = ["--mode", mode, "--sole-user"];
        add(&hearth, &[&names[0], &names[1]], &how)?;
        let image = write_twice(&mut hearth, &files[0])?;
        servers[leg].stop()?;
        std::fs::write(&files[leg], &image)?;
        servers[leg].up()?;
        older_copy_leaves(&mut hearth, leg)?;
        for server in &mut servers {
            server.stop()?;
        }
        ensure!(std::fs::read(&files[0])? == std::fs::read(&files[1])?);
    }
    Ok(())
}
