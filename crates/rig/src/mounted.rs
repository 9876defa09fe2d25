//! Devices that answer late, return errors, hang, die and come back as they were: files behind a server in user space, mounted by
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
    /// While it is there, everything fails.
    fail: PathBuf,
}

impl Mounted {
    /// Of `file`, which lies in `dir` and is as large as it is to be; each read and each write takes so many milliseconds longer.
    pub fn new(dir: &Path, name: &str, file: &Path, delay_ms: u32) -> Result<Mounted> {
        Mounted::with(dir, name, file, delay_ms, &[])
    }

    /// The same, not late, of which the kernel knows nothing by itself: what is asked of it by name is asked of the one who may hang,
    /// each time.
    pub fn unknown(dir: &Path, name: &str, file: &Path) -> Result<Mounted> {
        Mounted::with(dir, name, file, 0, &["-o", "attr_timeout=0"])
    }

    fn with(
        dir: &Path,
        name: &str,
        file: &Path,
        delay_ms: u32,
        options: &[&str],
    ) -> Result<Mounted> {
        let mount = dir.join(format!("{name}.mnt"));
        unmount(&mount)?;
        fs::create_dir_all(&mount)?;
        let fail = dir.join(format!("{name}.fail"));
        let errors = format!("error-file={}", path(&fail));
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
            "--filter=error",
            "file",
            path(file),
            &read,
            &write,
            "error=EIO",
            "error-rate=100%",
            &errors,
        ];
        let socket = dir.join(format!("{name}.s"));
        let server = Server::start("nbdkit", &args, socket)?;
        let shown = mount.join("flash");
        let mut fuse = Command::new("nbdfuse");
        fuse.args(options)
            .arg(&shown)
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
            fail,
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

    /// From now on reads and writes of it fail, or do no more.
    pub fn fail(&self, on: bool) -> Result<()> {
        match on {
            true => fs::write(&self.fail, b"")?,
            false => fs::remove_file(&self.fail)?,
        }
        Ok(())
    }

    /// From now on it answers nothing at all, not even what it is called or how large it is; or goes on. A process that has
    /// asked it something cannot end meanwhile.
    pub fn hang(&self, on: bool) -> Result<()> {
        let signal = if on { libc::SIGSTOP } else { libc::SIGCONT };
        // SAFETY: a signal to a child that has not been waited for, so its pid is still its own.
        let sent = unsafe { libc::kill(self.fuse.id() as i32, signal) };
        ensure!(sent == 0, "kill({})", self.fuse.id());
        Ok(())
    }

    /// Who answers for it.
    pub fn server(&mut self) -> &mut Server {
        &mut self.server
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // What it was asked must end, or nobody who asked it can.
        let _ = self.hang(false);
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
