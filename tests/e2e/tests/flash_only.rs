//! Disks that live on flash: what is promised, what outlives a stop and a crash, and how they go.

use anyhow::{Result, ensure};
use hearth_rig::Hearth;
use hearth_rig::daemon::path;
use hearth_rig::nbd::Command;

const MIB: usize = 1 << 20;

fn bytes(of: u8) -> Vec<u8> {
    vec![of; MIB]
}

#[test]
fn what_it_holds_outlives_stops_and_crashes_and_can_be_rescued() -> Result<()> {
    let mut hearth = Hearth::serving("128M")?;
    let said = hearth.said(&["disk", "add", "d", "--flash-only", "16M"])?;
    ensure!(
        said.contains("if the flash device dies, it is lost"),
        "{said}"
    );
    let mut client = hearth.connect("d")?;
    ensure!(client.size == 16 << 20);
    ensure!(client.read(0, 4096)? == vec![0; 4096], "never written");
    client.write(0, &bytes(1))?;
    client.write(8 << 20, &bytes(2))?;
    // A discard leaves nothing that is dirty: it is durable all the same once the flush is answered.
    client.write(4 << 20, &bytes(3))?;
    client.flush()?;
    client.call(Command::Trim, 4 << 20, MIB as u32, &[])?;
    client.flush()?;
    hearth.kill9()?;
    hearth.start()?;
    let holds = |hearth: &Hearth| -> Result<()> {
        let mut client = hearth.connect("d")?;
        ensure!(client.read(0, MIB as u32)? == bytes(1));
        ensure!(client.read(8 << 20, MIB as u32)? == bytes(2));
        ensure!(client.read(4 << 20, MIB as u32)? == bytes(0), "discarded");
        Ok(())
    };
    holds(&hearth)?;
    hearth.stop()?;
    hearth.start()?;
    holds(&hearth)?;

    // Nothing that is about an origin can be done with it, and what is only here goes only if that is said.
    let refused = hearth.refused(&["disk", "flush", "d"])?;
    ensure!(refused.contains("lives on flash"), "{refused}");
    let refused = hearth.refused(&["disk", "set", "d", "--mode", "off"])?;
    ensure!(refused.contains("lives on flash"), "{refused}");
    let refused = hearth.refused(&["disk", "remove", "d"])?;
    ensure!(refused.contains("nowhere else"), "{refused}");

    hearth.ok(&["disk", "set", "d", "--size", "20M"])?;
    ensure!(hearth.connect("d")?.size == 20 << 20);
    hearth.refused(&["disk", "set", "d", "--size", "8M"])?;
    let more = hearth.refused(&["disk", "set", "d", "--size", "120M"])?;
    ensure!(more.contains("cannot be promised"), "{more}");
    hearth.stop()?;
    let file = hearth.dir().join("rescued.img");
    let flash = path(hearth.flash()).to_owned();
    let state = hearth.dir().join("state");
    hearth.ok(&[
        "rescue",
        &flash,
        "--disk",
        "d",
        "--to",
        path(&file),
        "--state-dir",
        path(&state),
    ])?;
    let rescued = std::fs::read(&file)?;
    ensure!(rescued.len() == 20 << 20, "{} bytes", rescued.len());
    ensure!(rescued[..MIB] == bytes(1) && rescued[8 << 20..9 << 20] == bytes(2));

    hearth.start()?;
    holds(&hearth)?;
    hearth.ok(&["disk", "remove", "d", "--discard-dirty", "--yes"])?;
    // The number comes again, and nothing of the old disk with it.
    hearth.ok(&["disk", "add", "e", "--flash-only", "16M"])?;
    ensure!(hearth.connect("e")?.read(0, MIB as u32)? == bytes(0));
    Ok(())
}

#[test]
fn what_cannot_be_promised_is_refused_with_figures() -> Result<()> {
    let hearth = Hearth::serving("128M")?;
    let refused = hearth.refused(&["disk", "add", "big", "--flash-only", "100M"])?;
    ensure!(
        refused.contains("100 MiB of flash cannot be promised"),
        "{refused}"
    );
    hearth.ok(&["disk", "add", "a", "--flash-only", "32M"])?;
    let refused = hearth.refused(&["disk", "add", "b", "--flash-only", "32M"])?;
    ensure!(refused.contains("32 MiB are"), "{refused}");
    let shown = hearth.ok(&["pool", "show"])?;
    ensure!(shown.contains("32 MiB of "), "{shown}");
    hearth.refused(&["disk", "add", "odd", "--flash-only", "1000"])?;
    hearth.refused(&["disk", "add", "kept", "--flash-only", "1M", "--max", "1M"])?;
    Ok(())
}

#[test]
fn a_scratch_disk_outlives_a_stop_and_is_empty_after_a_crash() -> Result<()> {
    let mut hearth = Hearth::serving("128M")?;
    let said = hearth.said(&["disk", "add", "s", "--flash-only", "16M", "--scratch"])?;
    ensure!(said.contains("the disk is empty"), "{said}");
    let mut client = hearth.connect("s")?;
    client.write(0, &bytes(7))?;
    client.flush()?;
    drop(client);
    hearth.stop()?;
    hearth.start()?;
    let mut client = hearth.connect("s")?;
    ensure!(client.read(0, MIB as u32)? == bytes(7), "after a stop");
    client.write(2 << 20, &bytes(8))?;
    client.flush()?;
    hearth.kill9()?;
    hearth.start()?;
    let mut client = hearth.connect("s")?;
    ensure!(client.read(0, MIB as u32)? == bytes(0), "after a crash");
    ensure!(
        client.read(2 << 20, MIB as u32)? == bytes(0),
        "after a crash"
    );
    let shown = hearth.said(&["disk", "show", "s"])?;
    ensure!(shown.contains("nothing of it was left"), "{shown}");
    // It goes on as one that was never written.
    client.write(0, &bytes(9))?;
    drop(client);
    hearth.stop()?;
    hearth.start()?;
    ensure!(hearth.connect("s")?.read(0, MIB as u32)? == bytes(9));
    Ok(())
}
