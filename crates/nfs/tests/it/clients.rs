//! Somebody else's client: the utilities of libnfs (package libnfs-utils).

use std::fs;
use std::net::SocketAddr;

use crate::programs::{have, run};
use anyhow::{Context, Result, ensure};
use hearth_nfs::access::{Access, Rights};
use hearth_nfs::local::Directory;
use hearth_nfs::server::{Config, Server};

#[test]
fn libnfs_lists_reads_and_writes() -> Result<()> {
    let test = "libnfs_lists_reads_and_writes";
    if !have(test, &["nfs-ls", "nfs-cat", "nfs-cp"]) {
        return Ok(());
    }
    let place = tempfile::tempdir()?;
    let dir = place.path().join("vms");
    fs::create_dir_all(dir.join("vm1"))?;
    let data: Vec<u8> = (0..5_000_001u32)
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    fs::write(dir.join("vm1/disk.img"), &data)?;
    let listen = vec![SocketAddr::from(([127, 0, 0, 1], 0))];
    let server = Server::start(&Config {
        listen,
        // A disk that others keep busy is no fault of ours.
        patience: std::time::Duration::from_secs(3600),
        ..Config::default()
    })?;
    let (directory, identity) = match Directory::open(&dir, &place.path().join("state")) {
        Ok(opened) => opened,
        Err(error) => {
            eprintln!("{test}: skipped: {error}");
            return Ok(());
        }
    };
    let access = Access::nobody().allow(
        "127.0.0.1".parse()?,
        Rights {
            write: true,
            root: true,
            insecure: true,
            ..Rights::default()
        },
    );
    server.offer(directory.export("/vms", &identity), access)?;
    let port = server.addresses()[0].port();
    let url =
        |path: &str| format!("nfs://127.0.0.1/vms{path}?version=3&nfsport={port}&mountport={port}");

    let list = run("nfs-ls", &["-R", &url("")])?;
    let list = String::from_utf8(list.stdout)?;
    ensure!(
        list.contains("vm1") && list.contains("disk.img") && list.contains("5000001"),
        "{list}"
    );
    ensure!(run("nfs-cat", &[&url("/vm1/disk.img")])?.stdout == data);
    let copy = place.path().join("copy");
    run(
        "nfs-cp",
        &[&url("/vm1/disk.img"), copy.to_str().context("a name")?],
    )?;
    ensure!(fs::read(&copy)? == data);
    run(
        "nfs-cp",
        &[copy.to_str().context("a name")?, &url("/vm1/second.img")],
    )?;
    ensure!(fs::read(dir.join("vm1/second.img"))? == data);
    // What is not there is told as such, not found elsewhere.
    ensure!(run("nfs-cat", &[&url("/vm1/../../copy")]).is_err());
    Ok(())
}
