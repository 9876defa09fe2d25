//! Flash devices that answer late, hang, die and come back as they were: files behind a server in user space, mounted by
//! another one. It needs root. A mount that a killed test leaves is taken away by the next one at the same place.

use crate::child::bound_to_us;
use crate::daemon::path;
use crate::servers::Server;
use crate::wait;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Longest until a device is there.
const LIMIT: Duration = Duration::from_secs(60);

/// What this host lacks for such devices, if anything.
pub fn missing() -> Option<&'static str> {
    // SAFETY: no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        return Some("root");
    }
    let runs = |program: &&str| {
        let asked = Command::new(program).arg("--version").output();
        asked.is_ok_and(|out| out.status.success())
    };
    ["nbdkit", "nbdfuse"]
        .into_iter()
        .find(|program| !runs(program))
}

/// A file behind a server in user space, mounted.
#[derive(Debug)]
pub struct Mounted {
    server: Server,
    fuse: Child,
    mount: PathBuf,
    file: PathBuf,
}

impl Mounted {
    /// Of `file`, which lies in `dir` and is as large as it is to be; each read and each write takes so many milliseconds longer.
    pub fn new(dir: &Path, name: &str, file: &Path, delay_ms: u32) -> Result<Mounted> {
        let mount = dir.join(format!("{name}.mnt"));
        unmount(&mount)?;
        fs::create_dir_all(&mount)?;
        let (read, write) = (
            format!("rdelay={delay_ms}ms"),
            format!("wdelay={delay_ms}ms"),
        );
        let args = [
            "-f",
            "--exit-with-parent",
            "-U",
            "{socket}",
            "--filter=delay",
            "file",
            path(file),
            &read,
            &write,
        ];
        let socket = dir.join(format!("{name}.s"));
        let server = Server::start("nbdkit", &args, socket)?;
        let shown = mount.join("flash");
        let mut fuse = Command::new("nbdfuse");
        fuse.arg(&shown)
            .arg(server.uri(""))
            .stdin(Stdio::null())
            .stderr(Stdio::null());
        let fuse = bound_to_us(&mut fuse)
            .spawn()
            .context("cannot run nbdfuse")?;
        let mut mounted = Mounted {
            server,
            fuse,
            mount,
            file: shown,
        };
        let size = fs::metadata(file)?.len();
        wait::until("the device is mounted", LIMIT, || {
            if !matches!(mounted.fuse.try_wait(), Ok(None)) {
                return Some(Err(anyhow::anyhow!("nbdfuse ended")));
            }
            let there = fs::metadata(&mounted.file).is_ok_and(|m| m.len() == size);
            there.then_some(Ok(()))
        })??;
        Ok(mounted)
    }

    /// The device.
    pub fn path(&self) -> &str {
        path(&self.file)
    }

    /// Who answers for it.
    pub fn server(&mut self) -> &mut Server {
        &mut self.server
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // What it was asked must end, or nobody who asked it can.
        let _ = self.server.signal(libc::SIGCONT);
        let _ = self.server.kill9();
        let _ = self.fuse.kill();
        let _ = self.fuse.wait();
        let _ = unmount(&self.mount);
        let _ = fs::remove_dir(&self.mount);
    }
}

fn unmount(mount: &Path) -> Result<()> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let is_there = mounts
        .lines()
        .any(|l| l.split(' ').nth(1) == Some(path(mount)));
    if is_there {
        let ended = Command::new("umount").args(["-l", path(mount)]).status();
        let ended = ended.context("cannot run umount")?;
        ensure!(ended.success(), "umount {}: {ended}", mount.display());
    }
    Ok(())
}
