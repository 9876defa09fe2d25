//! A modelled hard disk below what knows files only: a block device that is as slow, and a directory on it.
//!
//! Hearth serves the model without its cache, nbdfuse mounts it (QEMU 7.2's FUSE export gives wrong bytes below a loop device
//! with direct I/O), and a loop device lies over it. It needs root. What a killed run leaves is taken away by the next one
//! at the same place.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use hearth_rig::child::bound_to_us;
use hearth_rig::daemon::path;
use hearth_rig::{Hearth, wait};

use crate::devices::tool;

/// Longest that something made is waited for, or something ended.
const LIMIT: Duration = Duration::from_secs(60);

/// What this host lacks for one, if anything.
pub fn missing() -> Option<&'static str> {
    // SAFETY: no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        return Some("root");
    }
    if !Path::new("/dev/loop-control").exists() {
        return Some("loop devices");
    }
    let runs = |program: &&str| {
        let asked = Command::new(program).arg("-V").output();
        asked.is_ok_and(|out| out.status.success())
    };
    ["nbdfuse", "mkfs.ext4"]
        .into_iter()
        .find(|program| !runs(program))
}

/// The block device.
#[derive(Debug)]
pub struct Disk {
    device: String,
    fuse: Child,
    mount: PathBuf,
    image: PathBuf,
    _hearth: Box<Hearth>,
}

impl Disk {
    /// One of `size` bytes; `dir` is its own. Its daemon ends with this process.
    pub fn new(dir: &Path, binary: &Path, size: u64) -> Result<Disk> {
        let mut hearth = Hearth::bare_in(binary.to_owned(), dir)?;
        hearth.bound = true;
        hearth.create_pool("64M")?;
        hearth.start()?;
        let image = dir.join("disk.img");
        File::create(&image)?.set_len(size)?;
        let origin = format!("model-hdd:{}", path(&image));
        hearth.add("disk", &origin, &["--mode", "off"])?;
        let mount = dir.join("mnt");
        fs::create_dir_all(&mount)?;
        let file = mount.join("disk");
        let mut fuse = bound_to_us(
            Command::new("nbdfuse")
                .arg(&file)
                .arg(hearth.uri("disk"))
                .stdin(std::process::Stdio::null()),
        )
        .spawn()
        .context("cannot run nbdfuse (package nbdfuse)")?;
        wait::until("the modelled disk is mounted", LIMIT, || {
            if !matches!(fuse.try_wait(), Ok(None)) {
                return Some(Err(anyhow::anyhow!("nbdfuse ended")));
            }
            fs::metadata(&file)
                .is_ok_and(|m| m.len() == size)
                .then_some(Ok(()))
        })??;
        let device = tool(
            "losetup",
            &["--find", "--show", "--direct-io=on", path(&file)],
        )?;
        let name = device.trim_start_matches("/dev/");
        let direct = fs::read_to_string(format!("/sys/block/{name}/loop/dio"))?;
        ensure!(
            direct.trim() == "1",
            "the loop device has the page cache in between"
        );
        Ok(Disk {
            device,
            fuse,
            mount,
            image,
            _hearth: Box::new(hearth),
        })
    }

    /// The device.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// Takes it away. Nobody has it open any more.
    pub fn off(mut self) -> Result<()> {
        tool("losetup", &["-d", &self.device])?;
        // The loop device lets go of it a moment later.
        wait::until("the modelled disk is unmounted", LIMIT, || {
            tool("umount", &[path(&self.mount)]).ok()
        })?;
        wait::until("nbdfuse ends", LIMIT, || {
            self.fuse.try_wait().ok().flatten()
        })?;
        Ok(fs::remove_file(&self.image)?)
    }
}

/// A directory on such a disk.
#[derive(Debug)]
pub struct Tree {
    disk: Option<Disk>,
    root: PathBuf,
}

impl Tree {
    /// An empty one, with room for `size` bytes of files.
    pub fn new(dir: &Path, binary: &Path, size: u64) -> Result<Tree> {
        let (own, root) = (dir.join("hdd"), dir.join("tree"));
        // Of a run that was killed.
        for left in [&root, &own.join("mnt")] {
            let _ = tool("umount", &["--lazy", path(left)]);
        }
        let _ = fs::remove_dir_all(&own);
        fs::create_dir_all(&own)?;
        fs::create_dir_all(&root)?;
        let disk = Disk::new(&own, binary, size + size / 4 + (64 << 20))?;
        let tree = Tree {
            disk: Some(disk),
            root,
        };
        let device = tree.disk.as_ref().context("just made")?.device();
        // What is made later would be made beside what is measured.
        let now = "lazy_itable_init=0,lazy_journal_init=0";
        tool("mkfs.ext4", &["-q", "-F", "-E", now, device])?;
        tool("mount", &[device, path(&tree.root)])?;
        Ok(tree)
    }

    /// Where it is.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Takes it away from those who use it: nothing is found in its place any more.
    pub fn pull(&self) -> Result<()> {
        tool("umount", &["--lazy", path(&self.root)]).map(drop)
    }

    /// Puts it back.
    pub fn plug(&self) -> Result<()> {
        let device = self.disk.as_ref().context("it is gone")?.device();
        tool("mount", &[device, path(&self.root)]).map(drop)
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let gone = wait::until("the tree is unmounted", LIMIT, || {
            tool("umount", &[path(&self.root)]).ok()
        });
        let done = gone.and_then(|_| match self.disk.take() {
            Some(disk) => disk.off(),
            None => Ok(()),
        });
        if let Err(e) = done {
            eprintln!("a modelled disk is left behind: {e:#}");
        }
    }
}
