//! A directory of a local file system, served, and what tests ask of it.
//!
//! Everything is tried twice: with files found by handle, which only root may (without that these tests say so), and
//! with files found by number.
#![allow(dead_code)]

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use hearth_nfs::access::{Access, NOBODY, Rights};
use hearth_nfs::local::{By, Directory};
use hearth_nfs::server::{Config, Server};
use hearth_nfs::v3::{Args, Attributes, Create, How, Kind, Named, SetAttributes, Stability};
use tempfile::TempDir;

use crate::common::{self, Client, Results, attributes, wcc};

pub const ALL: Rights = Rights {
    write: true,
    root: true,
    all_squash: false,
    anonymous: (NOBODY, NOBODY),
    insecure: true,
};

pub struct Stage {
    pub place: TempDir,
    pub by: By,
    pub server: Option<Server>,
}

impl Stage {
    /// `None`, and a line that says why, where files cannot be found so.
    pub fn new(by: By, test: &str) -> Result<Option<Stage>> {
        let place = tempfile::tempdir()?;
        fs::create_dir(place.path().join("vms"))?;
        fs::set_permissions(place.path().join("vms"), fs::Permissions::from_mode(0o777))?;
        let mut stage = Stage {
            place,
            by,
            server: None,
        };
        match Directory::open_by(by, &stage.dir(), &stage.state()) {
            Ok(_) => {}
            Err(error) => {
                eprintln!("{test}: skipped: {error}");
                return Ok(None);
            }
        }
        stage.start()?;
        Ok(Some(stage))
    }

    pub fn dir(&self) -> PathBuf {
        self.place.path().join("vms")
    }

    pub fn state(&self) -> PathBuf {
        self.place.path().join("state")
    }

    /// As after a restart of the daemon.
    pub fn start(&mut self) -> Result<()> {
        self.server = None;
        let listen = vec![SocketAddr::from(([127, 0, 0, 1], 0))];
        let server = Server::start(&Config {
            listen,
            locks: true,
            patience: common::LONG,
            ..Config::default()
        })?;
        let (directory, identity) = Directory::open_by(self.by, &self.dir(), &self.state())?;
        let access = Access::nobody().allow("127.0.0.1".parse()?, ALL);
        server.offer(directory.export("/vms", &identity), access)?;
        // As if the host's portmapper knew of it.
        server
            .locks()
            .store(true, std::sync::atomic::Ordering::Relaxed);
        self.server = Some(server);
        Ok(())
    }

    pub fn client(&self) -> Result<(Client, Vec<u8>)> {
        let server = self.server.as_ref().context("a server")?;
        let mut client = Client::connect(server.addresses()[0])?;
        client.patient = true;
        let root = client.mount("/vms")?.ok().context("mounted")?;
        Ok((client, root))
    }
}

/// Without root's rights nobody can be given a file.
pub const OF_ROOT: [&str; 3] = [
    "set_id_bits_of_others_are_stripped",
    "attributes_are_set_and_guarded",
    "others_may_what_the_mode_says",
];

pub fn on_stage(by: By, test: &str, run: fn(Stage) -> Result<()>) -> Result<()> {
    if OF_ROOT.contains(&test) && !rustix::process::geteuid().is_root() {
        eprintln!("{test}: skipped: only root can give files away");
        return Ok(());
    }
    match Stage::new(by, test)? {
        Some(stage) => run(stage),
        None => Ok(()),
    }
}

macro_rules! twice {
    ($($test:ident),* $(,)?) => {
        mod by_handle {
            $(#[test]
            fn $test() -> anyhow::Result<()> {
                super::on_stage(super::By::Handle, stringify!($test), super::$test)
            })*
        }
        mod by_number {
            $(#[test]
            fn $test() -> anyhow::Result<()> {
                super::on_stage(super::By::Number, stringify!($test), super::$test)
            })*
        }
    };
}

pub fn at<'a>(dir: &'a [u8], name: &'a str) -> Named<'a> {
    Named {
        dir,
        name: name.as_bytes(),
    }
}

pub fn lookup(client: &mut Client, dir: &[u8], name: &str) -> Result<(Vec<u8>, Attributes)> {
    let results = client.call(&Args::Lookup(at(dir, name)))?.ok()?;
    let mut r = results.reader();
    let handle = r.opaque(64)?.to_vec();
    let file = r.optional(attributes)?.context("attributes")?;
    ensure!(r.optional(attributes)?.context("of the directory")?.kind == Kind::Directory);
    r.end()?;
    Ok((handle, file))
}

pub fn made(results: Results) -> Result<(Vec<u8>, Attributes)> {
    let results = results.ok()?;
    let mut r = results.reader();
    let handle = r
        .optional(|r| r.opaque(64).map(<[u8]>::to_vec))?
        .context("a handle")?;
    let file = r.optional(attributes)?.context("attributes")?;
    let (before, after) = wcc(&mut r)?;
    ensure!(before.is_some() && after.is_some());
    r.end()?;
    Ok((handle, file))
}

pub fn create(client: &mut Client, dir: &[u8], name: &str, how: How) -> Result<Results> {
    client.call(&Args::Create {
        at: at(dir, name),
        what: Create::File(how),
    })
}

pub fn file(client: &mut Client, dir: &[u8], name: &str) -> Result<Vec<u8>> {
    Ok(made(create(
        client,
        dir,
        name,
        How::Guarded(SetAttributes::default()),
    )?)?
    .0)
}

/// Writes; the verifier.
pub fn write(
    client: &mut Client,
    file: &[u8],
    offset: u64,
    data: &[u8],
    stable: Stability,
) -> Result<[u8; 8]> {
    let count = data.len() as u32;
    let results = client
        .call(&Args::Write {
            file,
            offset,
            count,
            stable,
            data,
        })?
        .ok()?;
    let mut r = results.reader();
    let (before, after) = wcc(&mut r)?;
    ensure!(before.is_some() && after.context("after")?.size >= offset + u64::from(count));
    ensure!(r.u32()? == count && r.u32()? >= stable as u32);
    Ok(r.fixed()?)
}

/// Reads; whether the end was told.
pub fn read(client: &mut Client, file: &[u8], offset: u64, count: u32) -> Result<(Vec<u8>, bool)> {
    let results = client
        .call(&Args::Read {
            file,
            offset,
            count,
        })?
        .ok()?;
    let mut r = results.reader();
    r.optional(attributes)?.context("attributes")?;
    let count = r.u32()?;
    let end = r.bool()?;
    let data = r.opaque(1 << 20)?.to_vec();
    ensure!(data.len() == count as usize);
    r.end()?;
    Ok((data, end))
}
