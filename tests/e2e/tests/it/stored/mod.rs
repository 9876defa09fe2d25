//! A directory served as a datastore by the real daemon, and a client of it.
#![allow(dead_code)]

pub mod changes;

pub(crate) use crate::common as nfs;

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use hearth_nfs::v3::{Args, Create, How, Named, SetAttributes};
use hearth_rig::daemon::{Hearth, path};
use hearth_rig::wait::until;
use nfs::Client;
use serde_json::Value;

/// Far longer than anything here takes.
pub const LIMIT: Duration = Duration::from_secs(60);

/// A daemon, a directory it serves as `/vms`, and nobody else.
pub struct Lab {
    pub hearth: Hearth,
    pub vms: PathBuf,
}

impl Lab {
    pub fn new() -> Result<Lab> {
        Lab::with(&[], None, "127.0.0.1:0")
    }

    /// With programs before the daemon's own, another directory, and an address of its own.
    pub fn with(wrap: &[&str], vms: Option<PathBuf>, listen: &str) -> Result<Lab> {
        let mut hearth = Hearth::with_pool("128M")?;
        hearth.wrap = wrap.iter().map(|word| (*word).to_owned()).collect();
        let state = hearth.dir().join("state");
        hearth.serve_args = vec!["--state-dir".to_owned(), path(&state).to_owned()];
        hearth.start()?;
        let vms = vms.unwrap_or_else(|| hearth.dir().join("vms"));
        fs::create_dir(&vms)?;
        let lab = Lab { hearth, vms };
        lab.hearth.ok(&[
            "datastore",
            "add",
            path(&lab.vms),
            "--nfs",
            "--listen",
            listen,
            "--client",
            "127.0.0.1=rw,root,insecure",
        ])?;
        Ok(lab)
    }

    /// Over two directories, `a` and `b` beside each other; `vms` is the first.
    pub fn mirrored() -> Result<Lab> {
        Lab::mirrored_filled(|_| Ok(()))
    }

    /// The same, over a first directory that `fill` fills.
    pub fn mirrored_filled(fill: impl FnOnce(&Path) -> Result<()>) -> Result<Lab> {
        Lab::mirrored_with(&lasting_address()?.to_string(), "127.0.0.1", fill)
    }

    /// The same at an address of its own, for the host `client`; `fill` puts into the first directory what the datastore begins with.
    pub fn mirrored_with(
        listen: &str,
        client: &str,
        fill: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<Lab> {
        let mut hearth = Hearth::with_pool("128M")?;
        let state = hearth.dir().join("state");
        hearth.serve_args = vec!["--state-dir".to_owned(), path(&state).to_owned()];
        hearth.start()?;
        let both = ["a", "b"].map(|name| hearth.dir().join(name));
        for dir in &both {
            fs::create_dir(dir)?;
        }
        fill(&both[0])?;
        let [a, b] = both.each_ref().map(|dir| path(dir));
        hearth.ok(&[
            "datastore",
            "add",
            "vms",
            "--mirror",
            a,
            "--mirror",
            b,
            "--nfs",
            "--listen",
            listen,
            "--client",
            &format!("{client}=rw,root,insecure"),
        ])?;
        let [vms, _] = both;
        Ok(Lab { hearth, vms })
    }

    pub fn show(&self) -> Result<Value> {
        let text = self.hearth.ok(&["datastore", "show", "vms", "--json"])?;
        Ok(serde_json::from_str(&text)?)
    }

    /// Where it is served, as soon as it is: after a start that is a moment after the daemon answers.
    pub fn address(&self) -> Result<SocketAddr> {
        let shown = until("the datastore is served", Duration::from_secs(30), || {
            let shown = self.show().ok()?;
            (shown["served"] == true).then_some(shown)
        })?;
        Ok(shown["listen"].as_str().context("an address")?.parse()?)
    }

    pub fn state(&self) -> PathBuf {
        self.hearth.dir().join("state")
    }

    pub fn client(&self) -> Result<Client> {
        let mut client = Client::connect(self.address()?)?;
        client.patient = true;
        Ok(client)
    }
}

/// An address that nobody listens on and that is given to nobody who asks for any: for clients that go on with it
/// after a restart.
pub fn lasting_address() -> Result<SocketAddr> {
    let ports = 10_000..30_000u16;
    // Two tests of one process must not find the same.
    static CALLS: AtomicU32 = AtomicU32::new(0);
    let first = std::process::id().wrapping_add(1000 * CALLS.fetch_add(1, Ordering::Relaxed));
    let first = first % u32::from(ports.end - ports.start);
    let mut tried = ports.clone().cycle().skip(first as usize).take(ports.len());
    let free = tried.find_map(|port| TcpListener::bind(("127.0.0.1", port)).ok());
    Ok(free.context("a free port")?.local_addr()?)
}

pub fn root(client: &mut Client) -> Result<Vec<u8>> {
    let mounted = client.mount("/vms")?;
    mounted.map_err(|status| anyhow::anyhow!("mount: {status}"))
}

pub fn create(client: &mut Client, dir: &[u8], name: &str) -> Result<Vec<u8>> {
    let what = Create::File(How::Guarded(SetAttributes {
        mode: Some(0o644),
        ..SetAttributes::default()
    }));
    let name = name.as_bytes();
    let at = Named { dir, name };
    let results = client.call(&Args::Create { at, what })?.ok()?;
    let handle = results
        .reader()
        .optional(|r| r.opaque(64).map(<[u8]>::to_vec))?;
    handle.context("a handle")
}

pub fn write(client: &mut Client, file: &[u8], offset: u64, data: &[u8]) -> Result<()> {
    let args = Args::durable(file, offset, data);
    client.call(&args)?.ok().map(drop)
}

pub fn read(client: &mut Client, file: &[u8], offset: u64, count: u32) -> Result<Vec<u8>> {
    let args = Args::Read {
        file,
        offset,
        count,
    };
    let results = client.call(&args)?.ok()?;
    let mut r = results.reader();
    r.optional(nfs::attributes)?;
    r.u32()?;
    r.u32()?;
    Ok(r.opaque(count)?.to_vec())
}

pub fn lines(dir: &Path) -> Result<Vec<String>> {
    let names = fs::read_dir(dir)?.map(|e| Ok(e?.file_name().to_string_lossy().into_owned()));
    names.collect()
}

/// Bytes that depend on where they are and on when they were written.
pub fn pattern(offset: u64, round: u8, len: usize) -> Vec<u8> {
    let at = |n: usize| (offset + n as u64) / 512;
    (0..len)
        .map(|n| ((at(n).wrapping_mul(0x9e37_79b9) >> 7) as u8 ^ round.wrapping_mul(37)) | 1)
        .collect()
}

/// Names in a listing, from the first to the last.
pub fn list(client: &mut Client, dir: &[u8]) -> Result<u64> {
    let (mut cookie, mut verifier, mut names) = (0, [0u8; 8], 0);
    loop {
        let args = Args::ReadDirPlus {
            dir,
            cookie,
            verifier,
            names: 8192,
            bytes: 65536,
        };
        let results = client.call(&args)?.ok()?;
        let mut r = results.reader();
        r.optional(nfs::attributes)?;
        verifier = r.fixed()?;
        while r.u32()? == 1 {
            r.u64()?;
            r.opaque(255)?;
            cookie = r.u64()?;
            r.optional(nfs::attributes)?;
            r.optional(|r| r.opaque(64).map(<[u8]>::to_vec))?;
            names += 1;
        }
        if r.u32()? == 1 {
            return Ok(names);
        }
    }
}
