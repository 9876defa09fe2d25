//! A file system on a modelled hard disk, for servers of files.
//!
//! What serves a directory knows no block device, so the modelled disk goes beneath the file system: a daemon of its own offers
//! it uncached over NBD, qemu-storage-daemon makes a file of that (FUSE), the kernel a loop device of the file, and ext4 lies
//! on it. All of the file system is then as slow as the disk: data, its tables and its journal.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use hearth_rig::child::bound_to_us;
use hearth_rig::daemon::path;
use hearth_rig::{Hearth, wait};

use crate::args::Args;
use crate::fixture;

/// Far longer than a program takes to get ready.
const START_LIMIT: Duration = Duration::from_secs(60);

/// Mounted; everything is taken down when dropped.
#[derive(Debug)]
pub struct ModelFs {
    mounted: bool,
    at: PathBuf,
    disk: PathBuf,
    export: Child,
    _hearth: Hearth,
}

fn run(program: &str, args: &[&str]) -> Result<()> {
    let done = Command::new(program).args(args).output();
    let done = done.with_context(|| program.to_owned())?;
    let said = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "{program}: {}", said.trim());
    Ok(())
}

impl ModelFs {
    /// On a disk of `size` bytes. An error where the host has not what it takes.
    pub fn mount(args: &Args, size: u64) -> Result<ModelFs> {
        let dir = args.dir.join("model");
        std::fs::create_dir_all(&dir)?;
        let (image, disk, at) = (dir.join("platters"), dir.join("disk"), dir.join("mounted"));
        std::fs::File::create(&image)?.set_len(size)?;
        std::fs::File::create(&disk)?;
        std::fs::create_dir_all(&at)?;
        let hearth = fixture::pool_in(&args.hearth, &dir, 64 << 20)?;
        fixture::add(
            &hearth,
            "hdd",
            &format!("model-hdd:{}", path(&image)),
            "off",
        )?;
        let mut command = Command::new("qemu-storage-daemon");
        command.arg("--blockdev").arg(format!(
            "driver=nbd,node-name=disk,server.type=unix,server.path={},export=hdd",
            path(&hearth.socket())
        ));
        command.arg("--export").arg(format!(
            "type=fuse,id=export,node-name=disk,writable=on,mountpoint={}",
            path(&disk)
        ));
        let export = bound_to_us(&mut command).stdout(Stdio::null()).spawn();
        let mut fs = ModelFs {
            mounted: false,
            at,
            disk,
            export: export.context("qemu-storage-daemon")?,
            _hearth: hearth,
        };
        let disk = fs.disk.clone();
        wait::until("the modelled disk is a file", START_LIMIT, || {
            if fs.export.try_wait().ok().flatten().is_some() {
                return Some(Err(anyhow::anyhow!(
                    "qemu-storage-daemon exports nothing over FUSE"
                )));
            }
            (std::fs::metadata(&disk).ok()?.len() == size).then_some(Ok(()))
        })??;
        // Nothing is written later that mkfs has left for later.
        let now = "lazy_itable_init=0,lazy_journal_init=0";
        run("mkfs.ext4", &["-q", "-F", "-E", now, path(&disk)])?;
        run("mount", &["-o", "loop", path(&disk), path(&fs.at)])?;
        fs.mounted = true;
        Ok(fs)
    }

    /// Its root.
    pub fn at(&self) -> &Path {
        &self.at
    }

    /// What lies between the file system and the disk, in the kernel's memory.
    pub fn below(&self) -> &Path {
        &self.disk
    }
}

impl Drop for ModelFs {
    fn drop(&mut self) {
        if self.mounted {
            // Who serves it may still be ending.
            let _ = wait::until("it is unmounted", START_LIMIT, || {
                run("umount", &[path(&self.at)]).ok()
            });
        }
        // SAFETY: a process of ours that was not waited for, so the number is its own.
        unsafe { libc::kill(self.export.id() as libc::pid_t, libc::SIGTERM) };
        let _ = self.export.wait();
    }
}
