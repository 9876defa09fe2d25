//! A client that does what an ESXi host does with a datastore: it finds the ports by the portmapper, and works with
//! the datastore as in `common/esxi.rs`.

use crate::common;
use crate::host;
use std::fs;
use std::net::SocketAddr;

use crate::common::{Client, port_of};
use anyhow::{Context, Result};
use hearth_nfs::access::{Access, Rights};
use hearth_nfs::local::Directory;
use hearth_nfs::mount;
use hearth_nfs::server::{Config, Server};
use hearth_nfs::v3;

#[test]
fn a_host_keeps_its_datastore_under_load() -> Result<()> {
    let place = tempfile::tempdir()?;
    let dir = place.path().join("vms");
    fs::create_dir(&dir)?;
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let server = Server::start(&Config {
        listen: vec![any],
        portmap: Some(any),
        patience: common::LONG,
        ..Config::default()
    })?;
    let (directory, identity) = match Directory::open(&dir, &place.path().join("state")) {
        Ok(opened) => opened,
        Err(error) => {
            eprintln!("a_host_keeps_its_datastore_under_load: skipped: {error}");
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

    let portmapper = server.portmap().context("a portmapper")?;
    let at = |program| {
        Ok::<_, anyhow::Error>(SocketAddr::from((
            [127, 0, 0, 1],
            port_of(portmapper, program)?,
        )))
    };
    let root = Client::connect(at(mount::PROGRAM)?)?
        .mount("/vms")?
        .ok()
        .context("mounted")?;
    host::work(at(v3::PROGRAM)?, &root, &dir, || Ok(()))
}
