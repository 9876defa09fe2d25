//! Serves a directory over NFS version 3, without a cache: for trying the protocol out.
//!
//! `serve_directory DIRECTORY STATE [ADDRESS [PORTMAP]]`: everyone on this host may do everything. It prints its
//! addresses, and ends when its standard input does.

use std::io::Read;
use std::net::SocketAddr;
use std::path::Path;

use anyhow::{Context, Result};
use hearth_nfs::access::{Access, Rights};
use hearth_nfs::local::Directory;
use hearth_nfs::server::{Config, Server};

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [dir, state, rest @ ..] = &args[..] else {
        anyhow::bail!("serve_directory DIRECTORY STATE [ADDRESS [PORTMAP]]");
    };
    let address = |at: usize| rest.get(at).map(|a| a.parse::<SocketAddr>()).transpose();
    let listen = address(0)?.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 0)));
    let config = Config {
        listen: vec![listen],
        portmap: address(1)?,
        ..Config::default()
    };
    let server = Server::start(&config)?;
    let (directory, identity) = Directory::open(Path::new(dir), Path::new(state))?;
    let all = Rights {
        write: true,
        root: true,
        insecure: true,
        ..Rights::default()
    };
    let access = Access::nobody()
        .allow("127.0.0.0/8".parse()?, all)
        .allow("::1".parse()?, all);
    server.offer(directory.export("/vms", &identity), access)?;
    for address in server.addresses() {
        println!("{address}");
    }
    std::io::stdin()
        .read_to_end(&mut Vec::new())
        .context("standard input")?;
    Ok(())
}
