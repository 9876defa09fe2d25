//! nfs-ganesha, a server of NFS in user space, as a peer: its VFS back end on a directory.
//!
//! It will not start without a portmapper, and every address of the host's is one too many for that. So both are in a
//! network of their own, into which only the thread goes that connects. It reads and writes files by way of the kernel's page
//! cache, and what is to be measured is neither server's RAM: it runs with little memory where the host can
//! limit it.

use std::fs::{self, File};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use hearth_rig::wait;

const START_LIMIT: Duration = Duration::from_secs(60);
const PORT: u16 = 23_049;
const MOUNT_PORT: u16 = 23_050;

/// Memory for so many bytes, as a control group of the host's; removed when dropped.
#[derive(Debug)]
pub struct Limit(PathBuf);

impl Limit {
    /// `None` where groups cannot be made.
    pub fn of(name: &str, bytes: u64) -> Option<Limit> {
        let name = format!("hearth-bench-{name}-{}", std::process::id());
        let (v1, v2) = ("/sys/fs/cgroup/memory", "/sys/fs/cgroup");
        let (parent, file) = match Path::new(v1).is_dir() {
            true => (v1, "memory.limit_in_bytes"),
            false => (v2, "memory.max"),
        };
        let dir = Path::new(parent).join(name);
        fs::create_dir(&dir).ok()?;
        let limit = Limit(dir);
        fs::write(limit.0.join(file), bytes.to_string()).ok()?;
        Some(limit)
    }

    /// From now on a process counts for it.
    pub fn holds(&self, pid: u32) -> Result<()> {
        let procs = self.0.join("cgroup.procs");
        fs::write(&procs, pid.to_string()).with_context(|| procs.display().to_string())
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        // Only what is empty goes; a dead process leaves it a moment later.
        let _ = wait::until("the group is empty", Duration::from_secs(10), || {
            fs::remove_dir(&self.0).ok()
        });
    }
}

/// The server's process.
#[derive(Debug)]
pub struct Ganesha {
    child: Child,
    pid: u32,
}

impl Ganesha {
    /// Serves `vms` as it is; what it needs for itself goes to `dir`.
    pub fn start(vms: &Path, dir: &Path) -> Result<Ganesha> {
        let (config, log) = (dir.join("ganesha.conf"), dir.join("ganesha.log"));
        let vms = fs::canonicalize(vms)?;
        fs::write(
            &config,
            format!(
                "NFS_CORE_PARAM {{ NFS_Port = {PORT}; MNT_Port = {MOUNT_PORT}; Protocols = 3;\n\
                 Enable_NLM = false; Enable_RQUOTA = false; Enable_UDP = false; }}\n\
                 EXPORT_DEFAULTS {{ SecType = sys; }}\n\
                 EXPORT {{ Export_Id = 1; Path = \"{0}\"; Pseudo = /vms; Access_Type = RW; Squash = No_Root_Squash;\n\
                 Protocols = 3; Transports = TCP; FSAL {{ Name = VFS; }} }}\n",
                vms.display()
            ),
        )?;
        // The portmapper ends with the processes it is killed with: they are one group.
        let script = "mount -t tmpfs tmpfs /run && mkdir -p /run/rpcbind && ip link set lo up && \
                      { rpcbind -f -w & } && exec ganesha.nfsd -F -f \"$0\" -L \"$1\" -p /run/ganesha.pid";
        let mut command = Command::new("unshare");
        command.args([
            "--net",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "sh",
            "-c",
            script,
        ]);
        let child = command
            .arg(&config)
            .arg(&log)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let child = child.stderr(File::create(dir.join("ganesha.err"))?).spawn();
        let child = child.context("cannot start unshare")?;
        let mut server = Ganesha { pid: 0, child };
        wait::until("nfs-ganesha listens", START_LIMIT, || {
            if let Ok(Some(status)) = server.child.try_wait() {
                return Some(Err(anyhow::anyhow!("it ended: {status}")));
            }
            server.pid = child_of(server.child.id())?;
            server.connect().ok().map(|_| Ok(()))
        })
        .with_context(|| fs::read_to_string(&log).unwrap_or_default())??;
        let name = fs::read_to_string(format!("/proc/{}/comm", server.pid))?;
        ensure!(name.starts_with("ganesha"), "{name} is not the server");
        Ok(server)
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Connections to its NFS port and to its MOUNT port.
    pub fn connect(&self) -> Result<(TcpStream, TcpStream)> {
        let network = File::open(format!("/proc/{}/ns/net", self.pid))?;
        let connecting = std::thread::spawn(move || -> Result<(TcpStream, TcpStream)> {
            // SAFETY: a descriptor that is open; what it changes is this thread's network only, and the thread ends
            // with this function.
            let moved = unsafe { libc::setns(network.as_raw_fd(), libc::CLONE_NEWNET) };
            ensure!(moved == 0, std::io::Error::last_os_error());
            let to = |port| TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], port)));
            Ok((to(PORT)?, to(MOUNT_PORT)?))
        });
        connecting.join().expect("no panic")
    }
}

/// The first child of a process, as soon as it has one.
fn child_of(pid: u32) -> Option<u32> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok()
}

impl Drop for Ganesha {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
