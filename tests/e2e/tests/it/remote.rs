//! Images on other hosts, opened by QEMU over iSCSI, ssh, NFS and https, and servers that die under
//! load.
//!
//! The servers are real ones, which want a machine of their own: `scripts/remote-lab.sh` makes a
//! network and file system view for them, starts these tests in it, and says where the servers
//! are in `HEARTH_REMOTE_LAB`. Without it they are skipped.

use anyhow::{Context, Result, ensure};
use hearth_rig::child::bound_to_us;
use hearth_rig::clients::run_ok;
use hearth_rig::daemon::{path, write_random};
use hearth_rig::load::{BLOCKS, Writer};
use hearth_rig::nbd::Command::Read;
use hearth_rig::pattern::BLOCK;
use hearth_rig::{Hearth, wait};
use std::collections::HashMap;
use std::fs::File;
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Longest wait for a state that comes by itself.
const LIMIT: Duration = Duration::from_secs(60);
/// How long a load goes on before each kill.
const LOAD: Duration = Duration::from_millis(300);
const TARGET: &str = "iqn.2026-01.example.hearth:disk";
/// tgtd's control port, of its own.
const CONTROL: [&str; 2] = ["-C", "9"];

/// The lab's directory, or a word that the test is skipped.
fn lab(test: &str) -> Option<PathBuf> {
    let dir = std::env::var_os("HEARTH_REMOTE_LAB").map(PathBuf::from);
    if dir.is_none() {
        println!("SKIPPED {test}: needs the servers of scripts/remote-lab.sh");
    }
    dir
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Iscsi,
    Ssh,
    Nfs,
    /// By a certificate of an authority the host knows, or of a stranger.
    Https {
        known: bool,
    },
}

/// A server with one image. Killed when dropped.
struct Service {
    kind: Kind,
    /// Where its configuration and its image are.
    dir: PathBuf,
    child: Option<Child>,
}

impl Service {
    fn start(kind: Kind, lab: &Path) -> Result<Service> {
        let mut service = Service {
            kind,
            dir: lab.to_owned(),
            child: None,
        };
        let image = File::create(service.image())?;
        image.set_len(0)?;
        image.set_len(BLOCKS * BLOCK as u64)?;
        service.up()?;
        Ok(service)
    }

    fn image(&self) -> PathBuf {
        self.dir.join("share/disk.img")
    }

    fn origin(&self) -> String {
        match self.kind {
            Kind::Iscsi => format!("iscsi://127.0.0.1/{TARGET}/1"),
            Kind::Ssh => format!("ssh://127.0.0.1{}", path(&self.image())),
            Kind::Nfs => format!("nfs://127.0.0.1{}", path(&self.image())),
            Kind::Https { .. } => "https://127.0.0.1/disk.img".to_owned(),
        }
    }

    fn port(&self) -> u16 {
        match self.kind {
            Kind::Iscsi => 3260,
            Kind::Ssh => 22,
            Kind::Nfs => 2049,
            Kind::Https { .. } => 443,
        }
    }

    /// Starts it (again), and waits until it serves the image.
    fn up(&mut self) -> Result<()> {
        let config = |name: &str| path(&self.dir.join(name)).to_owned();
        let mut command = match self.kind {
            Kind::Iscsi => {
                let mut tgtd = Command::new("tgtd");
                tgtd.args(["-f", "--iscsi", "portal=127.0.0.1:3260"])
                    .args(CONTROL);
                tgtd
            }
            Kind::Ssh => {
                // Connections have processes of their own, which must die with it.
                let mut unshare = Command::new("unshare");
                unshare.args([
                    "--pid",
                    "--fork",
                    "--kill-child",
                    "sshd-here",
                    "-D",
                    "-e",
                    "-f",
                ]);
                unshare.arg(config("sshd_config"));
                unshare
            }
            Kind::Nfs => {
                let mut ganesha = Command::new("ganesha.nfsd");
                ganesha.args(["-F", "-N", "EVENT", "-p", "/run/ganesha.pid", "-L"]);
                ganesha
                    .arg(config("ganesha.log"))
                    .args(["-f", &config("ganesha.conf")]);
                ganesha
            }
            Kind::Https { known } => {
                let name = if known { "known" } else { "unknown" };
                let mut web = Command::new("python3");
                web.args([&config("web.py"), "443", &config("share")])
                    .args([
                        config(&format!("{name}.crt")),
                        config(&format!("{name}.key")),
                    ]);
                web
            }
        };
        let log = File::create(self.dir.join("server.log"))?;
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let child = bound_to_us(&mut command)
            .spawn()
            .context("cannot start the server")?;
        self.child = Some(child);
        if self.kind == Kind::Iscsi {
            self.export()?;
        }
        if self.kind == Kind::Nfs {
            wait::until("mountd is registered", LIMIT, || {
                run_ok("rpcinfo", &["-t", "127.0.0.1", "100005", "3"], &self.dir).ok()
            })?;
        }
        wait::until("the server listens", LIMIT, || {
            TcpStream::connect((Ipv4Addr::LOCALHOST, self.port())).ok()
        })?;
        Ok(())
    }

    fn export(&self) -> Result<()> {
        let image = self.image();
        let admin = |args: &str| {
            let args: Vec<&str> = CONTROL
                .into_iter()
                .chain(["--lld", "iscsi"])
                .chain(args.split(' '))
                .collect();
            run_ok("tgtadm", &args, &self.dir)
        };
        wait::until("tgtd takes commands", LIMIT, || {
            admin("--op show --mode sys").ok()
        })?;
        admin(&format!("--op new --mode target --tid 1 -T {TARGET}"))?;
        admin(&format!(
            "--op new --mode logicalunit --tid 1 --lun 1 -b {}",
            path(&image)
        ))?;
        admin("--op bind --mode target --tid 1 -I ALL")?;
        Ok(())
    }

    fn kill9(&mut self) -> Result<()> {
        if let Some(mut child) = self.child.take() {
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.kill9();
    }
}

/// The server is killed under a verified load, and is back a moment later: no request fails, and
/// in the end its image holds what was written.
fn survives(kind: Kind) -> Result<()> {
    let Some(lab) = lab(&format!("remote images: {kind:?}")) else {
        return Ok(());
    };
    for mode in ["write-through", "write-back"] {
        let during = || format!("{kind:?}, {mode}");
        let hearth = Hearth::serving("160M")?;
        let mut service = Service::start(kind, &lab)?;
        hearth.add("d", &service.origin(), &["--sole-user", "--mode", mode])?;
        let mut writer = Writer::new(31);
        let mut client = hearth.connect("d")?;
        for cycle in 0..3 {
            writer
                .load(&mut client, LOAD, || {
                    service.kill9()?;
                    service.up()
                })
                .with_context(|| format!("{}, cycle {cycle}", during()))
                .with_context(|| hearth.log())?;
        }
        writer.flush(&mut client)?;
        writer.check_stable(&mut client)?;
        drop(client);
        hearth.ok(&["disk", "remove", "d"])?;
        writer.check_file(&service.image()).with_context(during)?;
        // What Hearth left is what a new disk finds.
        hearth.add("e", &service.origin(), &["--sole-user", "--mode", "off"])?;
        let mut client = hearth.connect("e")?;
        let plain = std::fs::read(service.image())?;
        ensure!(client.read(1 << 20, 1 << 20)? == plain[1 << 20..2 << 20]);
    }
    Ok(())
}

#[test]
fn iscsi() -> Result<()> {
    survives(Kind::Iscsi)
}

#[test]
fn ssh() -> Result<()> {
    survives(Kind::Ssh)
}

#[test]
fn nfs() -> Result<()> {
    survives(Kind::Nfs)
}

/// Over https an image is only read: reads wait for a server that was killed, and find the right
/// bytes; a server with a certificate of nobody's is refused.
#[test]
fn https() -> Result<()> {
    let Some(lab) = lab("remote images: https") else {
        return Ok(());
    };
    let hearth = Hearth::serving("160M")?;
    let stranger = Service::start(Kind::Https { known: false }, &lab)?;
    let origin = stranger.origin();
    let words = hearth.refused(&["disk", "add", "d", "--origin", &origin, "--read-only"])?;
    ensure!(words.contains("certificate"), "{words}");
    drop(stranger);
    let mut service = Service::start(Kind::Https { known: true }, &lab)?;
    write_random(&service.image(), BLOCKS * BLOCK as u64, 3)?;
    let plain = std::fs::read(service.image())?;
    for mode in ["off", "write-back"] {
        hearth.add("d", &origin, &["--read-only", "--mode", mode])?;
        let mut client = hearth.connect("d")?;
        for cycle in 0..3usize {
            // A stretch of its own in each cycle, so that nothing is cached.
            let from = cycle * (16 << 20);
            let mut sent = HashMap::new();
            for i in 0..64 {
                let at = from + i * (128 << 10);
                sent.insert(client.send(Read, at as u64, 65536, &[])?, at);
                if i == 32 {
                    // Some are under way, some come while nobody listens.
                    service.kill9()?;
                }
            }
            service.up()?;
            for _ in 0..sent.len() {
                let reply = client.receive().with_context(|| hearth.log())?;
                let at = sent[&reply.cookie];
                ensure!(
                    reply.error == 0,
                    "{mode}: error {}\n{}",
                    reply.error,
                    hearth.log()
                );
                ensure!(reply.data == plain[at..at + 65536], "{mode}: wrong at {at}");
            }
        }
        ensure!(
            client.write(0, &[0; 4096]).is_err(),
            "it could be written to"
        );
        drop(client);
        hearth.ok(&["disk", "remove", "d"])?;
    }
    Ok(())
}
