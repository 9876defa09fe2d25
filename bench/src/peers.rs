//! The contenders: a file as it is, and servers without a cache or with another one.

use anyhow::{Context, Result};
use hearth_rig::wait;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// How long a peer may take to listen.
const START_LIMIT: Duration = Duration::from_secs(20);

/// Where fio finds a contender.
#[derive(Clone, Debug)]
pub enum At {
    /// An NBD server.
    Uri(String),
    /// A file.
    File(PathBuf),
    /// A vhost-user-blk socket.
    Vhost(PathBuf),
}

/// Something that is measured.
#[derive(Clone, Debug)]
pub struct Contender {
    /// Its name in tables.
    pub name: String,
    /// Where it is.
    pub at: At,
    /// The server's process.
    pub pid: Option<u32>,
}

/// A file through fio's io_uring engine, O_DIRECT.
pub fn raw(path: &Path) -> Contender {
    Contender {
        name: "raw".into(),
        at: At::File(path.to_owned()),
        pid: None,
    }
}

/// A peer's process, ended when dropped.
#[derive(Debug)]
pub struct Server {
    child: Child,
    socket: PathBuf,
    name: String,
    export: &'static str,
}

impl Server {
    /// As a contender whose socket speaks vhost-user.
    pub fn vhost_contender(&self) -> Contender {
        Contender {
            name: self.name.clone(),
            at: At::Vhost(self.socket.clone()),
            pid: Some(self.child.id()),
        }
    }

    /// As a contender.
    pub fn contender(&self) -> Contender {
        let at = At::Uri(format!(
            "nbd+unix:///{}?socket={}",
            self.export,
            self.socket.display()
        ));
        Contender {
            name: self.name.clone(),
            at,
            pid: Some(self.child.id()),
        }
    }

    fn start(
        name: &str,
        export: &'static str,
        socket: PathBuf,
        mut command: Command,
    ) -> Result<Server> {
        let _ = std::fs::remove_file(&socket);
        // What it says goes beside its socket: looking whether it listens makes some complain.
        let log = std::fs::File::create(socket.with_extension("log"))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        let server = Server {
            child,
            socket,
            name: name.to_owned(),
            export,
        };
        wait::until(&format!("{name} listens"), START_LIMIT, || {
            std::os::unix::net::UnixStream::connect(&server.socket).ok()
        })?;
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// The bare loop on a file ([`bare`](crate::bare)): this program, asked to be that.
pub fn bare(file: &Path, dir: &Path) -> Result<Server> {
    let socket = dir.join("bare.sock");
    let mut command = Command::new(std::env::current_exe()?);
    command.arg(crate::bare::WORD).arg(file).arg(&socket);
    Server::start("bare loop", "", socket, command)
}

/// qemu-nbd on a file: O_DIRECT, io_uring. Without QEMU's locks: where peers only read, the file is
/// the flash of a daemon that serves.
pub fn qemu_nbd(file: &Path, dir: &Path) -> Result<Server> {
    let socket = dir.join("qemu.sock");
    let mut command = Command::new("qemu-nbd");
    command.args([
        "--cache=none",
        "--aio=io_uring",
        "--discard=unmap",
        "--persistent",
        "--shared=16",
    ]);
    command.arg("--socket").arg(&socket).arg("--image-opts");
    command.arg(format!(
        "driver=raw,file.driver=file,file.locking=off,file.filename={}",
        file.display().to_string().replace(',', ",,")
    ));
    Server::start("qemu-nbd", "", socket, command)
}

/// qemu-storage-daemon's vhost-user-blk export of a file: O_DIRECT, io_uring; without locks, as above.
pub fn qemu_vhost(file: &Path, dir: &Path) -> Result<Server> {
    let socket = dir.join("qsd.sock");
    let mut command = Command::new("qemu-storage-daemon");
    command.arg("--blockdev").arg(format!(
        "driver=file,node-name=file,locking=off,filename={},cache.direct=on,aio=io_uring,discard=unmap",
        file.display()
    ));
    command.args(["--blockdev", "driver=raw,node-name=disk,file=file"]);
    command.arg("--export").arg(format!(
        "type=vhost-user-blk,id=export,node-name=disk,writable=on,addr.type=unix,addr.path={}",
        socket.display()
    ));
    Server::start("qemu-storage-daemon", "", socket, command)
}

/// nbdkit's file plugin. It has no O_DIRECT: what it reads twice comes from the page cache.
pub fn nbdkit_file(file: &Path, dir: &Path) -> Result<Server> {
    let socket = dir.join("nbdkit.sock");
    let mut command = Command::new("nbdkit");
    command
        .arg("--foreground")
        .arg("--unix")
        .arg(&socket)
        .arg("file")
        .arg(file)
        .arg("cache=none");
    Server::start("nbdkit file", "", socket, command)
}

/// nbdkit's cache filter over another NBD export.
pub fn nbdkit_cache(origin: &Contender, dir: &Path, max_size: Option<u64>) -> Result<Server> {
    let At::Uri(uri) = &origin.at else {
        anyhow::bail!("the cache filter needs an NBD origin")
    };
    let socket = dir.join("nbdkit-cache.sock");
    let mut command = Command::new("nbdkit");
    // Its cache file is created in TMPDIR: the same file system as everybody's.
    command
        .env("TMPDIR", dir)
        .arg("--foreground")
        .arg("--unix")
        .arg(&socket);
    command
        .args(["--filter=cache", "nbd"])
        .arg(format!("uri={uri}"));
    command.args(["cache-on-read=true", "cache=writeback"]);
    if let Some(size) = max_size {
        command.arg(format!("cache-max-size={size}"));
    }
    Server::start("nbdkit cache", "", socket, command)
}
