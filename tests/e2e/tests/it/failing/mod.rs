//! Pools of which a flash device fails in one way or another, and disks whose guests may not notice: nothing was dirty there
//! alone.
#![allow(dead_code)]

use anyhow::{Context, Result, ensure};
use hearth_rig::daemon::path;
use hearth_rig::mounted::Mounted;
use hearth_rig::{Hearth, wait};
use serde_json::Value;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::Duration;

/// Longest wait for a state of the daemon.
const LIMIT: Duration = Duration::from_secs(120);
/// Bytes of each flash device, and of each disk.
const FLASH: u64 = 160 << 20;
pub const SIZE: u64 = 64 << 20;
/// Seconds after which flash that does not answer is left.
const FLASH_TIMEOUT: &str = "2";

/// What happens to a flash device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Reads and writes of it are answered with errors.
    Error,
    /// Who answers for it is gone.
    Vanish,
    /// Somebody discards all of it.
    Trim,
}

/// A disk, and what its pool is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    pub mode: &'static str,
    /// Everything is on two devices, of which this one fails; else there is only one.
    pub twice: Option<usize>,
}

/// Those whose guests may not notice, whatever happens.
pub const KINDS: [Kind; 4] = [
    Kind {
        mode: "write-through",
        twice: None,
    },
    // Of this one nothing is dirty when it happens.
    Kind {
        mode: "write-back",
        twice: None,
    },
    Kind {
        mode: "write-through",
        twice: Some(0),
    },
    Kind {
        mode: "write-back",
        twice: Some(1),
    },
];

impl Kind {
    /// It has to be clean when its flash fails.
    pub fn has_to_be_clean(self) -> bool {
        self.twice.is_none() && self.mode == "write-back"
    }
}

/// A daemon with a disk `d` on such a pool.
pub struct Subject {
    /// The device that fails. Goes before the daemon.
    device: Option<Mounted>,
    pub hearth: Hearth,
    pub kind: Kind,
}

impl Subject {
    pub fn new(kind: Kind) -> Result<Subject> {
        let mut hearth = Hearth::bare()?;
        let files = ["first.img", "second.img"].map(|name| hearth.dir().join(name));
        let count = if kind.twice.is_some() { 2 } else { 1 };
        for file in &files[..count] {
            File::create(file)?.set_len(FLASH)?;
        }
        let victim = kind.twice.unwrap_or(0);
        let device = Mounted::new(hearth.dir(), "f", &files[victim], 0)?;
        let mut places = files.map(|file| path(&file).to_owned());
        places[victim] = device.path().to_owned();
        let mut create = vec!["pool", "create"];
        if count > 1 {
            create.extend(["--dirty-copies", "2"]);
        }
        for place in &places[..count] {
            create.extend(["--flash", place]);
        }
        hearth.ok(&create)?;
        hearth.set_flash(places[0].clone().into());
        hearth.serve_args = ["--flash-timeout", FLASH_TIMEOUT]
            .map(str::to_owned)
            .to_vec();
        for place in &places[1..count] {
            hearth
                .serve_args
                .extend(["--flash".to_owned(), place.clone()]);
        }
        hearth.start()?;
        let origin = hearth.dir().join("o.raw");
        File::create(&origin)?.set_len(SIZE)?;
        let more = ["--mode", kind.mode, "--seq-cutoff", "0"];
        hearth.add("d", path(&origin), &more)?;
        Ok(Subject {
            device: Some(device),
            hearth,
            kind,
        })
    }

    fn pool(&self) -> Result<Value> {
        let shown = self.hearth.ok(&["pool", "show", "--json"])?;
        Ok(serde_json::from_str(&shown)?)
    }

    /// Everything is in the origin, and nobody writes.
    pub fn becomes_clean(&self) -> Result<()> {
        self.hearth.ok(&["disk", "flush", "d"])?;
        wait::until("nothing is dirty", LIMIT, || {
            (self.pool().ok()?["dirty"] == 0).then_some(())
        })
    }

    pub fn happens(&mut self, fault: Fault) -> Result<()> {
        let device = self.device.as_mut().context("it is gone")?;
        match fault {
            Fault::Error => device.fail(true),
            Fault::Vanish => device.server().kill9(),
            Fault::Trim => trim(Path::new(device.path())),
        }
    }

    /// Has the daemon noticed that its flash, or one of it, is of no use any more?
    pub fn has_noticed(&self) -> bool {
        let Ok(pool) = self.pool() else {
            return false;
        };
        let lost = |device: &Value| device["lost"] == true;
        let devices = pool["devices"].as_array();
        pool["state"] != "serving" || devices.is_some_and(|all| all.iter().any(lost))
    }

    /// Bytes that its guest has written since the daemon's start.
    pub fn written(&self) -> Result<u64> {
        self.hearth.counter("d", "write_bytes")
    }

    /// Ends well, and its origin alone is the disk.
    pub fn ends(mut self) -> Result<()> {
        self.hearth.ok(&["disk", "flush", "d"])?;
        let origin = std::fs::read(self.hearth.dir().join("o.raw"))?;
        let mut client = self.hearth.connect("d")?;
        for (at, piece) in (0..).step_by(1 << 20).zip(origin.chunks(1 << 20)) {
            let read = client.read(at, piece.len() as u32)?;
            ensure!(read == piece, "the origin is not the disk at {at}");
        }
        drop(client);
        self.device = None;
        self.hearth.kill9()
    }
}

/// Discards all of a file or device, under whoever uses it.
pub fn trim(device: &Path) -> Result<()> {
    let file = OpenOptions::new().write(true).open(device)?;
    let len = i64::try_from(file.metadata()?.len())?;
    let how = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: no pointers; the descriptor is open.
    let done = unsafe { libc::fallocate(file.as_raw_fd(), how, 0, len) };
    let why = std::io::Error::last_os_error();
    ensure!(done == 0, "{} cannot be discarded: {why}", device.display());
    Ok(())
}
