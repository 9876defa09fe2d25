//! Pools of an earlier build in this one: whatever that was told to keep, this one gives back, block for
//! block. Pools that were stopped, killed with data only on flash, killed after their log had gone round, and
//! given up because flash failed. A pool that this build has opened, whoever made it, is none of the earlier build's any
//! more: it has a segment map, which that does not know. The earlier build says so, and leaves it as it is.
//!
//! `HEARTH_OLD_BIN` names the earlier build; scripts/old-builds.sh makes one and runs this. `KEEP_POOLS` names a
//! directory for the pools of that build, as `crates/engine/tests/pools` has them.

use anyhow::{Context, Result, bail, ensure};
use hearth_rig::daemon::{binary, path};
use hearth_rig::nbd::{Client, Command};
use hearth_rig::{Hearth, wait};
use std::path::{Path, PathBuf};
use std::time::Duration;

const BLOCK: usize = 4096;
/// Blocks of each disk.
const BLOCKS: u64 = 256;
const LIMIT: Duration = Duration::from_secs(30);
/// Overwrites that take the log round more than once.
const PASSES: u64 = 160;
/// The disks and how they are cached.
const DISKS: [(&str, &str); 2] = [("back", "write-back"), ("through", "write-through")];

/// How the pool was left.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Left {
    Stopped,
    Killed,
    /// Killed when its log had gone round.
    Worn,
    /// Flash took no more writes; killed after that.
    Failed,
}

/// The word a block of a disk is full of, in one of its versions. It takes no room when it is packed.
fn word(disk: usize, block: u64, version: u64) -> [u8; 8] {
    ((disk as u64 + 1) << 48 | version << 32 | block).to_le_bytes()
}

/// What is known of two disks.
struct Model {
    disks: [Vec<u8>; 2],
}

impl Model {
    fn fill(&mut self, disk: usize, blocks: std::ops::Range<u64>, version: u64) -> Vec<u8> {
        let data: Vec<u8> = blocks
            .clone()
            .flat_map(|block| word(disk, block, version).repeat(BLOCK / 8))
            .collect();
        self.put(disk, blocks.start * BLOCK as u64, &data);
        data
    }

    fn put(&mut self, disk: usize, offset: u64, data: &[u8]) {
        self.disks[disk][offset as usize..][..data.len()].copy_from_slice(data);
    }

    /// Origins full of version 1.
    fn new(dir: &Path) -> Result<Model> {
        let mut model = Model {
            disks: [(); 2].map(|()| vec![0; BLOCKS as usize * BLOCK]),
        };
        for (disk, (name, _)) in DISKS.iter().enumerate() {
            let data = model.fill(disk, 0..BLOCKS, 1);
            std::fs::write(dir.join(name), data)?;
        }
        Ok(model)
    }

    /// Writes blocks, and makes that durable.
    fn write(
        &mut self,
        client: &mut Client,
        disk: usize,
        blocks: std::ops::Range<u64>,
        version: u64,
    ) -> Result<()> {
        let offset = blocks.start * BLOCK as u64;
        let data = self.fill(disk, blocks, version);
        client.write(offset, &data)?;
        Ok(client.flush()?)
    }

    /// Overwrites more than flash takes.
    fn wear(&mut self, hearth: &Hearth, version: u64) -> Result<()> {
        for (disk, (name, _)) in DISKS.iter().enumerate() {
            let mut client = hearth.connect(name)?;
            for pass in 0..PASSES {
                let start = pass * 37 % BLOCKS;
                let blocks = start..(start + 64).min(BLOCKS);
                self.write(&mut client, disk, blocks, version + pass)?;
            }
        }
        Ok(())
    }

    fn check(&self, hearth: &Hearth, who: &str) -> Result<()> {
        for (disk, (name, _)) in DISKS.iter().enumerate() {
            let mut client = hearth.connect(name)?;
            let data = client.read(0, (BLOCKS as usize * BLOCK) as u32)?;
            for (block, (found, known)) in
                (data.chunks(BLOCK).zip(self.disks[disk].chunks(BLOCK))).enumerate()
            {
                ensure!(
                    found == known,
                    "{who}: block {block} of {name} is not what was kept"
                );
            }
        }
        Ok(())
    }
}

/// Everything that leaves its own kind of trace in a log: fills, overwrites, a part of a block, zeros, and
/// for the disk past whose cache is written: copies that are renewed or void.
fn story(hearth: &Hearth, model: &mut Model) -> Result<()> {
    for (disk, (name, _)) in DISKS.iter().enumerate() {
        let mut client = hearth.connect(name)?;
        let half = BLOCKS / 2 * BLOCK as u64;
        client.sweep(Command::Cache, 0..half, 1 << 18, 2, |_, _| {})?;
        wait::until("half of it is cached", LIMIT, || {
            (hearth.stats(name).ok()?["cached"].as_u64()? >= half).then_some(())
        })?;
        model.write(&mut client, disk, 8..24, 2)?;
        model.write(&mut client, disk, 16..20, 3)?;
        // Not cached before.
        model.write(&mut client, disk, 200..203, 4)?;
        let part = [0x5A; 1024];
        let offset = 100 * BLOCK as u64 + 512;
        model.put(disk, offset, &part);
        client.write(offset, &part)?;
        let zeros = vec![0; 8 * BLOCK];
        model.put(disk, 40 * BLOCK as u64, &zeros);
        client.call(
            Command::WriteZeroes,
            40 * BLOCK as u64,
            zeros.len() as u32,
            &[],
        )?;
        client.flush()?;
    }
    Ok(())
}

fn new_pool(bin: &Path) -> Result<(Hearth, Model)> {
    // Beside the binary under test, whichever makes the pool.
    let scratch = binary()?;
    let scratch = scratch.parent().context("no directory")?;
    let mut hearth = Hearth::bare_in(bin.to_owned(), scratch)?;
    // What is dirty stays so, but for a little.
    hearth.serve_args = ["--destage-rate", "4K"].map(str::to_owned).to_vec();
    hearth.create_pool("64M")?;
    hearth.start()?;
    let model = Model::new(hearth.dir())?;
    for (name, mode) in DISKS {
        let origin = hearth.dir().join(name);
        let more = ["--mode", mode, "--seq-cutoff", "0"];
        hearth.add(name, path(&origin), &more)?;
    }
    Ok((hearth, model))
}

fn leave(hearth: &mut Hearth, model: &mut Model, left: Left) -> Result<()> {
    match left {
        Left::Stopped => return hearth.stop().map(drop),
        Left::Killed => {}
        Left::Worn => model.wear(hearth, 100)?,
        Left::Failed => {
            // Nothing may be dirty, or it is missing afterwards whatever reads the pool.
            hearth.ok(&["disk", "flush", "back"])?;
            hearth.refuse_writes(4 << 20)?;
            let (mut back, mut through) = (hearth.connect("back")?, hearth.connect("through")?);
            model.write(&mut back, 0, 60..64, 5)?;
            model.write(&mut through, 1, 60..64, 5)?;
            wait::until("the pool has failed", LIMIT, || {
                let text = hearth.ok(&["pool", "show", "--json"]).ok()?;
                let pool: serde_json::Value = serde_json::from_str(&text).ok()?;
                (pool["state"] == "failed").then_some(())
            })?;
            // Past the flash, to the origins.
            model.write(&mut back, 0, 62..70, 6)?;
            model.write(&mut through, 1, 62..70, 6)?;
        }
    }
    hearth.kill9()
}

/// Puts a pool away, packed.
fn keep(hearth: &Hearth, left: Left) -> Result<()> {
    let Some(dir) = std::env::var_os("KEEP_POOLS") else {
        return Ok(());
    };
    for (from, what) in [
        (hearth.flash().to_owned(), "flash"),
        (hearth.dir().join("back"), "back"),
        (hearth.dir().join("through"), "through"),
    ] {
        let to = Path::new(&dir).join(format!("{left:?}.{what}.zst").to_lowercase());
        let packed = std::process::Command::new("zstd")
            .args(["-19", "-q", "-f", path(&from), "-o", path(&to)])
            .status()
            .context("cannot run zstd")?;
        ensure!(packed.success(), "zstd failed");
    }
    Ok(())
}

/// A build that does not know the segment map says so of a pool that has one, and writes nothing.
fn refused(hearth: &mut Hearth, old: &Path) -> Result<()> {
    hearth.set_binary(old.to_owned());
    let before = std::fs::read(hearth.flash())?;
    let flash = path(hearth.flash()).to_owned();
    let said = hearth.refused(&["pool", "show", "--flash", &flash])?;
    let served = match hearth.start() {
        Ok(_) => bail!("{} serves a pool it cannot know", old.display()),
        Err(e) => format!("{e:#}"),
    };
    for said in [said, served] {
        ensure!(
            said.contains("the superblock needs incompatible features 0x84")
                && said.contains("open it with a newer Hearth"),
            "{said}"
        );
    }
    ensure!(
        std::fs::read(hearth.flash())? == before,
        "{} wrote to a pool it refused",
        old.display()
    );
    Ok(())
}

/// One of the builds leaves a pool; this one gives back what is in it, goes on with it, and again after the earlier
/// one has refused it.
fn goes_on(maker: &Path, old: &Path, new: &Path, left: Left) -> Result<()> {
    let about = || format!("{left:?}, made by {}", maker.display());
    let (mut hearth, mut model) = new_pool(maker)?;
    story(&hearth, &mut model).with_context(about)?;
    leave(&mut hearth, &mut model, left).with_context(about)?;
    if maker == old {
        keep(&hearth, left)?;
    } else {
        refused(&mut hearth, old).with_context(about)?;
    }
    for turn in 0..2 {
        hearth.set_binary(new.to_owned());
        hearth.start().with_context(about)?;
        model
            .check(&hearth, &format!("turn {turn}"))
            .with_context(about)
            .with_context(|| hearth.log())?;
        for (disk, (name, _)) in DISKS.iter().enumerate() {
            let mut client = hearth.connect(name)?;
            model.write(&mut client, disk, 18..30, 10 + turn)?;
            model.write(&mut client, disk, 210..214, 10 + turn)?;
        }
        if left == Left::Worn {
            model.wear(&hearth, 1000 * (1 + turn))?;
            model.check(&hearth, "overwritten").with_context(about)?;
        }
        if turn == 0 && left == Left::Stopped {
            hearth.stop()?;
        } else {
            hearth.kill9()?;
        }
        refused(&mut hearth, old).with_context(about)?;
    }
    // What is left reaches the origins.
    hearth.set_binary(new.to_owned());
    hearth.start()?;
    model.check(&hearth, "at last").with_context(about)?;
    for (disk, (name, _)) in DISKS.iter().enumerate() {
        hearth.ok(&["disk", "flush", name])?;
        ensure!(
            std::fs::read(hearth.dir().join(name))? == model.disks[disk],
            "{name}'s origin is not the disk: {}",
            about()
        );
    }
    Ok(())
}

#[test]
fn pools_of_an_earlier_build_are_this_one_s_and_never_the_other_way() -> Result<()> {
    let Some(old) = std::env::var_os("HEARTH_OLD_BIN").map(PathBuf::from) else {
        println!("SKIPPED pools of another build: HEARTH_OLD_BIN names none");
        return Ok(());
    };
    // SAFETY: no handler is installed; programs that are started go on ignoring it.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let new = binary()?;
    for left in [Left::Stopped, Left::Killed, Left::Worn, Left::Failed] {
        goes_on(&old, &old, &new, left)?;
        goes_on(&new, &old, &new, left)?;
    }
    Ok(())
}
