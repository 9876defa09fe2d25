//! Our own NBD client against somebody else's server: what it finds wrong later is not itself.

use anyhow::Result;
use hearth_rig::clients::have;
use hearth_rig::nbd::{Client, Command};
use hearth_rig::pattern::{BLOCK, fill, version_of};
use hearth_rig::wait;
use std::time::Duration;

#[test]
fn speaks_to_nbdkit() -> Result<()> {
    if !have("own client against nbdkit", &["nbdkit"]) {
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    let socket = dir.path().join("s");
    let mut server = std::process::Command::new("nbdkit")
        .args(["--foreground", "--unix"])
        .arg(&socket)
        .args(["memory", "64M"])
        .stderr(std::process::Stdio::null())
        .spawn()?;
    let outcome = talk(&socket);
    server.kill()?;
    server.wait()?;
    outcome
}

fn talk(socket: &std::path::Path) -> Result<()> {
    let mut client = wait::until("nbdkit listens", Duration::from_secs(10), || {
        Client::connect(socket, "").ok()
    })?;
    assert_eq!(client.size, 64 << 20);
    let end = 16 << 20;
    client.sweep(
        Command::Write { fua: false },
        0..end,
        64 << 10,
        16,
        |at, data| {
            for (i, block) in data.chunks_mut(BLOCK).enumerate() {
                fill(block, at / BLOCK as u64 + i as u64, 9);
            }
        },
    )?;
    client.flush()?;
    client.call(Command::WriteZeroes, 8192, 4096, &[])?;
    let data = client.read(0, 64 << 10)?;
    for (i, block) in data.chunks(BLOCK).enumerate() {
        let expected = if i == 2 { 0 } else { 9 };
        assert_eq!(version_of(block, i as u64), Ok(expected));
    }
    assert!(client.read(64 << 20, 4096).is_err());
    client.read(0, 4096)?;
    Ok(())
}
