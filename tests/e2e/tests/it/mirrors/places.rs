//! Other disks in the place of legs, legs that grow, and a daemon that is killed while a leg is replaced.

use super::*;
use hearth_rig::daemon::binary;
use std::process::{Command, Stdio};

/// A blank file in the place of this one, as if somebody had put in another disk.
fn put_in_another(file: &Path) -> Result<()> {
    let new = file.with_extension("new");
    let size = std::fs::metadata(file)?.len();
    std::fs::File::create(&new)?.set_len(size)?;
    Ok(std::fs::rename(&new, file)?)
}

fn told(hearth: &Hearth, kind: &str) -> Result<usize> {
    let kind = format!("\"event\":\"{kind}\"");
    let events = hearth.ok(&["events", "--disk", "d", "--json"])?;
    Ok(events.lines().filter(|line| line.contains(&kind)).count())
}

/// A server has no times, and its path says nothing: another disk is told by what it holds, and gets all of it.
#[test]
fn another_disk_in_a_legs_place_gets_everything() -> Result<()> {
    if !have("mirrors: another disk", &["nbdkit"]) {
        return Ok(());
    }
    let (mut hearth, a, b) = two_legs()?;
    let mut remote = server(&hearth, &b, &hearth.dir().join("fail"))?;
    let legs = [path(&a), &*remote.uri("")];
    let more = ["--sole-user", "--mode", "off", "--origin-timeout", "5"];
    add(&hearth, &legs, &more)?;
    wait_states(&hearth, &["current", "current"])?;
    let mut writer = Writer::uncached(13);
    let mut client = hearth.connect("d")?;
    writer.load(&mut client, LOAD, || Ok(()))?;
    writer.flush(&mut client)?;
    drop(client);
    // While nobody looks.
    hearth.stop()?;
    remote.kill9()?;
    put_in_another(&b)?;
    remote.up()?;
    hearth.start()?;
    attached(&hearth)?;
    wait_event(&hearth, "leg-changed", &remote.uri(""))?;
    writer.check(&mut hearth.connect("d")?)?;
    wait_states(&hearth, &["current", "current"])?;
    // A clean stop leaves no region in which the legs may differ: then it is known what they hold.
    hearth.stop()?;
    hearth.start()?;
    attached(&hearth)?;
    wait_states(&hearth, &["current", "current"])?;
    ensure!(
        told(&hearth, "leg-changed")? == 1,
        "the same leg is the same"
    );
    // While it is served: whoever reads finds the server gone.
    let read_all_over = |client: &mut Client| -> Result<()> {
        for mib in 0..64 {
            client.read(mib << 20, BLOCK as u32)?;
        }
        Ok(())
    };
    remote.kill9()?;
    let mut client = hearth.connect("d")?;
    read_all_over(&mut client)?;
    wait_states(&hearth, &["current", "out"])?;
    put_in_another(&b)?;
    remote.up()?;
    wait_states(&hearth, &["current", "current"])?;
    ensure!(told(&hearth, "leg-changed")? == 2, "{}", hearth.log());
    writer.check_stable(&mut client)?;
    // And one that was only away is the same.
    remote.kill9()?;
    read_all_over(&mut client)?;
    wait_states(&hearth, &["current", "out"])?;
    remote.up()?;
    wait_states(&hearth, &["current", "current"])?;
    ensure!(told(&hearth, "leg-changed")? == 2, "{}", hearth.log());
    end(&mut hearth, &mut writer, client, &[&a, &b])?;
    remote.stop()
}

/// A mirror grows when all its legs have, and what they held behind their old end does not matter.
#[test]
fn a_mirror_grows_with_its_legs() -> Result<()> {
    let (mut hearth, a, b) = two_legs()?;
    add(&hearth, &[path(&a), path(&b)], &["--mode", "write-through"])?;
    wait_states(&hearth, &["current", "current"])?;
    let mut writer = Writer::new(14);
    let mut client = hearth.connect("d")?;
    writer.load(&mut client, LOAD, || Ok(()))?;
    let old = BLOCKS * BLOCK as u64;
    let new = old + (20 << 20);
    let resize = |leg: &Path, size: u64| -> Result<()> {
        Ok(std::fs::OpenOptions::new()
            .write(true)
            .open(leg)?
            .set_len(size)?)
    };
    resize(&a, new)?;
    let said = hearth.ok(&["disk", "set", "d", "--size-from-origin"])?;
    ensure!(said.contains("nothing changed"), "{said}");
    resize(&b, new)?;
    for (leg, byte) in [(&a, 1), (&b, 2)] {
        let file = std::fs::OpenOptions::new().write(true).open(leg)?;
        std::os::unix::fs::FileExt::write_all_at(&file, &vec![byte; 20 << 20], old)?;
    }
    hearth.ok(&["disk", "set", "d", "--size-from-origin"])?;
    let info: serde_json::Value =
        serde_json::from_str(&hearth.ok(&["disk", "show", "d", "--json"])?)?;
    ensure!(info["size"] == new, "{info}");
    drop(client);
    let mut client = hearth.connect("d")?;
    let first = client.read(old, 4096)?;
    ensure!(first == [1; 4096] || first == [2; 4096]);
    client.write(new - 8192, &[3; 8192])?;
    client.flush()?;
    writer.load(&mut client, LOAD, || Ok(()))?;
    hearth.kill9()?;
    hearth.start()?;
    attached(&hearth)?;
    let mut client = hearth.connect("d")?;
    ensure!(
        client.read(old, 4096)? == first,
        "a read has changed its mind"
    );
    wait_states(&hearth, &["current", "current"])?;
    writer.check(&mut client)?;
    writer.flush(&mut client)?;
    drop(client);
    hearth.ok(&["disk", "flush", "d"])?;
    hearth.stop()?;
    ensure!(
        std::fs::read(&a)? == std::fs::read(&b)?,
        "the legs are not the same"
    );
    Ok(())
}

/// The daemon is killed anywhere between naming the new leg and letting the old one go.
#[test]
fn a_kill_while_a_leg_is_replaced() -> Result<()> {
    let (mut hearth, a, b) = two_legs()?;
    add(&hearth, &[path(&a), path(&b)], &["--mode", "off"])?;
    wait_states(&hearth, &["current", "current"])?;
    let mut writer = Writer::new(15);
    let mut client = hearth.connect("d")?;
    let mut old = b;
    for cycle in 0..kills(5) {
        let new = blank(&hearth, &format!("leg{cycle}"))?;
        let mut replace = Command::new(binary()?)
            .args(["disk", "replace", "d", path(&old), path(&new), "--run-dir"])
            .arg(hearth.run_dir())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let time = Duration::from_millis(writer.below(400));
        let killed = writer.load(&mut client, time, || hearth.kill9());
        replace.wait()?;
        killed.with_context(|| format!("cycle {cycle}"))?;
        hearth.start()?;
        attached(&hearth)?;
        client = hearth.connect("d")?;
        writer
            .check(&mut client)
            .with_context(|| format!("cycle {cycle}"))?;
        // Whatever it had come to, it can be brought to its end.
        let shown = hearth.ok(&["disk", "show", "d"])?;
        let has = |leg: &Path| shown.contains(&format!("{}:", path(leg)));
        match (has(&old), has(&new)) {
            (true, false) => {
                hearth.ok(&["disk", "replace", "d", path(&old), path(&new)])?;
            }
            (true, true) => {
                wait_states(&hearth, &["current", "current", "current"])?;
                hearth.ok(&["disk", "mirror", "d", "--remove", path(&old)])?;
            }
            (false, true) => {}
            (false, false) => anyhow::bail!("cycle {cycle}: a leg is lost\n{shown}"),
        }
        wait_states(&hearth, &["current", "current"])?;
        std::fs::remove_file(&old)?;
        old = new;
    }
    end(&mut hearth, &mut writer, client, &[&a, &old])
}
