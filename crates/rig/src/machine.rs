//! A real guest on Hearth's disks: QEMU, a Linux kernel, and a line to a shell inside.
//!
//! What a file system does to a disk, and what a guest notices of a restarted daemon, cannot be
//! made up; it takes a kernel. The guest is made by `scripts/guest-lab.sh` from the distribution's
//! packages. Commands go to an agent in it over a serial port and their results come back framed,
//! so a test waits for what happened and never for a time. QMP tells what the machine is doing and
//! resets it; power is cut by killing QEMU, which takes the guest's page cache with it.
//!
//! Guests are emulated unless `HEARTH_GUEST_ACCEL` says otherwise: they prove that things are
//! right, not that they are fast.

use crate::child::bound_to_us;
use crate::daemon::{Hearth, path};
use crate::qmp::Qmp;
use crate::wait;
use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Longest a guest may take for anything before it counts as hung. Emulated guests on a busy
/// machine are slow, so this bounds a hang and judges nothing.
pub const GUEST_LIMIT: Duration = Duration::from_secs(600);
/// Bytes of output of one command that are taken: more is a mistake of the test.
const OUTPUT_MAX: usize = 4 << 20;

/// The directory with the guest's `kernel`, `initrd` and `root.img`, made first if need be.
pub fn image() -> Result<&'static Path> {
    static IMAGE: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    IMAGE
        .get_or_init(|| make_image().map_err(|e| format!("{e:#}")))
        .as_deref()
        .map_err(|e| anyhow::anyhow!("no guest to test with: {e}"))
}

fn make_image() -> Result<PathBuf> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/guest-lab.sh");
    let out = Command::new(&script)
        .arg("image")
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {}", script.display()))?;
    let said = String::from_utf8_lossy(&out.stderr);
    ensure!(
        out.status.success(),
        "{}",
        said.trim_end().lines().last().unwrap_or("it said nothing")
    );
    Ok(PathBuf::from(String::from_utf8(out.stdout)?.trim_end()))
}

/// A copy of the guest's root file system, for one guest to write to.
pub fn copy_root(to: &Path) -> Result<()> {
    copy_sparse(&image()?.join("root.img"), to)
}

/// A copy of a disk image that takes no more room than it must.
pub fn copy_sparse(from: &Path, to: &Path) -> Result<()> {
    let status = Command::new("cp")
        .args(["--sparse=always", "--reflink=auto"])
        // The image is read-only, what is made of it is not.
        .args(["--no-preserve=mode", "--"])
        .arg(from)
        .arg(to)
        .status()?;
    ensure!(status.success(), "cp to {} failed", to.display());
    Ok(())
}

/// QEMU's arguments for a disk, as `hearth attach-help` prints them.
pub fn attach_args(hearth: &Hearth, disk: &str, over: &str) -> Result<Vec<String>> {
    let text = hearth.ok(&[
        "attach-help",
        disk,
        "--for",
        "qemu",
        "--over",
        over,
        "--json",
    ])?;
    let help: serde_json::Value = serde_json::from_str(&text)?;
    let args = help["ways"][0]["args"].as_array().context("no arguments")?;
    Ok(args
        .iter()
        .filter_map(|a| a.as_str().map(str::to_owned))
        .collect())
}

/// What a machine is made of.
#[derive(Clone, Debug)]
pub struct Plan {
    /// RAM, as `-m` spells it. Arguments for vhost-user disks name it, too.
    pub memory: String,
    /// Processors.
    pub cpus: u32,
    /// More words on the kernel's command line.
    pub words: String,
    /// A program and its arguments that put themselves in front of QEMU and become it.
    pub wrap: Vec<String>,
    /// Option and value pairs for the disks and the network; a pair that is there already is not repeated.
    disks: Vec<[String; 2]>,
}

impl Plan {
    /// A machine without disks.
    pub fn new(cpus: u32) -> Plan {
        Plan {
            // As attach-help prints it; pages the guest never touches cost nothing.
            memory: "4G".into(),
            cpus,
            words: String::new(),
            wrap: Vec::new(),
            disks: Vec::new(),
        }
    }

    /// With the guest's own system, straight from its image: what it writes there is lost with it.
    pub fn own_root(mut self) -> Result<Plan> {
        let image = image()?.join("root.img");
        let drive = format!("file={},format=raw,if=virtio,snapshot=on", path(&image));
        self.disks.push(["-drive".into(), drive]);
        Ok(self)
    }

    /// With a network of its own, in which this host's loopback is 10.0.2.2.
    pub fn network(mut self) -> Plan {
        let net = [
            ["-netdev", "user,id=net"],
            ["-device", "virtio-net-pci,netdev=net,romfile="],
        ];
        self.disks.extend(net.map(|pair| pair.map(String::from)));
        self
    }

    /// On the network that the host's interface `tap` leads to, as one of several guests: `number` makes its address.
    pub fn tap(mut self, tap: &str, number: u8) -> Plan {
        let device = format!("virtio-net-pci,netdev=net,romfile=,mac=52:54:00:00:00:{number:02x}");
        let net = [
            [
                "-netdev".to_owned(),
                format!("tap,id=net,ifname={tap},script=no,downscript=no"),
            ],
            ["-device".to_owned(), device],
        ];
        self.disks.extend(net);
        self
    }

    /// With a network of its own, in which what listens on port `inside` is reached at `outside` of this host.
    pub fn reached_at(mut self, outside: SocketAddr, inside: u16) -> Plan {
        let net = [
            [
                "-netdev".to_owned(),
                format!("user,id=net,hostfwd=tcp:{outside}-:{inside}"),
            ],
            [
                "-device".to_owned(),
                "virtio-net-pci,netdev=net,romfile=".to_owned(),
            ],
        ];
        self.disks.extend(net);
        self
    }

    /// With an image of this host, as it is, for a disk.
    pub fn image(mut self, image: &Path) -> Plan {
        let drive = format!(
            "file={},format=raw,if=virtio,cache=writeback,discard=unmap",
            path(image)
        );
        self.disks.push(["-drive".into(), drive]);
        self
    }

    /// With a raw image on an NFS server, by its address, for a disk: QEMU is the NFS client. A flush of the guest is a commit.
    pub fn nfs_image(mut self, server: IpAddr, at: &str) -> Plan {
        let drive = format!("file=nfs://{server}{at},format=raw,if=virtio,cache=writeback");
        self.disks.push(["-drive".into(), drive]);
        self
    }

    /// With a balloon, which somebody else may move over this QMP socket. Nothing is reported that the guest frees.
    pub fn balloon(self, socket: &Path) -> Plan {
        self.with_balloon(socket, "virtio-balloon-pci,id=balloon")
    }

    /// The same, and what the guest frees is reported, so that QEMU gives it back to the host.
    pub fn reporting_balloon(self, socket: &Path) -> Plan {
        let device = "virtio-balloon-pci,id=balloon,free-page-reporting=on,deflate-on-oom=on";
        self.with_balloon(socket, device)
    }

    fn with_balloon(mut self, socket: &Path, device: &str) -> Plan {
        let pairs = [
            ["-device".to_owned(), device.to_owned()],
            [
                "-qmp".to_owned(),
                format!("unix:{},server=on,wait=off", path(socket)),
            ],
        ];
        self.disks.extend(pairs);
        self
    }

    /// With one more disk, after those it has: `/dev/vda` is the first.
    pub fn disk(mut self, hearth: &Hearth, disk: &str, over: &str) -> Result<Plan> {
        for pair in attach_args(hearth, disk, over)?.chunks(2) {
            let pair: [String; 2] = pair.to_vec().try_into().ok().context("an odd argument")?;
            if !self.disks.contains(&pair) {
                self.disks.push(pair);
            }
        }
        Ok(self)
    }
}

/// A command that runs in the guest.
#[derive(Debug)]
#[must_use]
pub struct Job {
    id: u64,
    command: String,
}

/// How a command ended.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Its exit status.
    pub status: i32,
    /// What it printed, on both streams.
    pub text: String,
}

/// A running guest. Killed when dropped.
#[derive(Debug)]
pub struct Machine {
    child: Child,
    console: PathBuf,
    log: PathBuf,
    agent: UnixStream,
    /// Bytes of the agent not understood yet.
    input: Vec<u8>,
    ended: HashMap<u64, Answer>,
    /// How often the agent said that it is there.
    greetings: u64,
    next: u64,
    /// The machine's control socket.
    pub qmp: Qmp,
}

impl Machine {
    /// Starts a guest below `dir` and waits until it is up. `name` is a short one: it becomes
    /// part of socket paths.
    pub fn boot(dir: &Path, name: &str, plan: &Plan) -> Result<Machine> {
        let mut machine = Machine::power_on(dir, name, plan)?;
        machine.wait_up(1)?;
        Ok(machine)
    }

    /// Starts a guest without waiting for it to come up. QEMU ends with the thread that calls this,
    /// however that ends: a killed test run leaves none behind.
    pub fn power_on(dir: &Path, name: &str, plan: &Plan) -> Result<Machine> {
        let image = image()?;
        let file = |ending: &str| dir.join(format!("{name}.{ending}"));
        let (console, log) = (file("console"), file("log"));
        let (agent, qmp) = (file("a"), file("q"));
        for old in [&console, &agent, &qmp] {
            let _ = fs::remove_file(old);
        }
        let accel = std::env::var("HEARTH_GUEST_ACCEL").unwrap_or_else(|_| "tcg".into());
        let words = format!(
            "console=ttyS0 root=/dev/vda quiet panic=-1 hearth.agent=ttyS1 {}",
            plan.words
        );
        let qemu = "qemu-system-x86_64".to_owned();
        let mut first = plan.wrap.iter().chain([&qemu]);
        let mut command = Command::new(first.next().unwrap_or(&qemu));
        command
            .args(first)
            .args(["-accel", &accel, "-nodefaults", "-display", "none"])
            .args(["-m", &plan.memory, "-smp", &plan.cpus.to_string()])
            .args(["-serial", &format!("file:{}", path(&console))])
            .args([
                "-serial",
                &format!("unix:{},server=on,wait=off", path(&agent)),
            ])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", path(&qmp))])
            .arg("-kernel")
            .arg(image.join("kernel"))
            .arg("-initrd")
            .arg(image.join("initrd"))
            .args(["-append", &words])
            .args(plan.disks.iter().flatten())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log)?);
        let mut child = bound_to_us(&mut command).spawn().context(
            "cannot run qemu-system-x86_64: install qemu-system-x86 (scripts/setup.sh test)",
        )?;
        let connect = |socket: &Path, child: &mut Child| -> Result<UnixStream> {
            wait::until("QEMU listens", GUEST_LIMIT, || {
                match UnixStream::connect(socket) {
                    Ok(stream) => Some(Ok(stream)),
                    Err(_) => match child.try_wait() {
                        Ok(None) => None,
                        ended => Some(Err(anyhow::anyhow!("QEMU ended: {ended:?}"))),
                    },
                }
            })?
        };
        let reached = connect(&agent, &mut child).and_then(|agent| {
            // A guest that takes no input any more is hung, too.
            agent.set_write_timeout(Some(GUEST_LIMIT))?;
            Ok((agent, Qmp::new(connect(&qmp, &mut child)?)?))
        });
        match reached {
            Ok((agent, qmp)) => Ok(Machine {
                child,
                console,
                log,
                agent,
                input: Vec::new(),
                ended: HashMap::new(),
                greetings: 0,
                next: 0,
                qmp,
            }),
            Err(e) => {
                child.kill()?;
                child.wait()?;
                Err(e.context(fs::read_to_string(&log).unwrap_or_default()))
            }
        }
    }

    /// QEMU's process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the agent has greeted so many times since power on (once per start).
    pub fn wait_up(&mut self, greetings: u64) -> Result<()> {
        self.pump_until("the guest is up", |m| {
            (m.greetings >= greetings).then_some(())
        })
    }

    /// How often the agent has greeted since power on, as far as it was heard.
    pub fn greeted(&mut self) -> Result<u64> {
        self.pump(Duration::from_millis(1))?;
        Ok(self.greetings)
    }

    /// Starts a shell command in the guest; others may be running.
    pub fn start(&mut self, command: &str) -> Result<Job> {
        ensure!(!command.contains('\n'), "one line only: {command}");
        self.next += 1;
        let id = self.next;
        self.agent
            .write_all(format!("{id} {command}\n").as_bytes())
            .context("the guest's serial port")?;
        Ok(Job {
            id,
            command: command.to_owned(),
        })
    }

    /// True if the command has ended.
    pub fn has_ended(&mut self, job: &Job) -> Result<bool> {
        self.pump(Duration::from_millis(1))?;
        Ok(self.ended.contains_key(&job.id))
    }

    /// Waits for a command's end.
    pub fn wait(&mut self, job: &Job) -> Result<Answer> {
        let what = format!("`{}` ends", job.command);
        self.pump_until(&what, |m| m.ended.remove(&job.id))
    }

    /// The same, for no longer than `limit`; nothing if it has not ended then.
    pub fn wait_within(&mut self, job: &Job, limit: Duration) -> Result<Option<Answer>> {
        let start = Instant::now();
        loop {
            let ended = self.ended.remove(&job.id);
            if ended.is_some() || start.elapsed() >= limit {
                return Ok(ended);
            }
            self.pump(Duration::from_secs(1))
                .with_context(|| self.state())?;
        }
    }

    /// Waits for a command that must succeed; what it printed.
    pub fn wait_ok(&mut self, job: &Job) -> Result<String> {
        let answer = self.wait(job)?;
        if answer.status != 0 {
            let kernel = self.start("dmesg | tail -20")?;
            let kernel = self.wait(&kernel)?;
            bail!(
                "in the guest, `{}` failed with {}:\n{}\nkernel:\n{}",
                job.command,
                answer.status,
                answer.text,
                kernel.text
            );
        }
        Ok(answer.text)
    }

    /// Runs a shell command to its end; it must succeed.
    pub fn run(&mut self, command: &str) -> Result<String> {
        let job = self.start(command)?;
        self.wait_ok(&job)
    }

    /// What the guest's console has shown since power on.
    pub fn console(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.console).unwrap_or_default()).replace('\r', "")
    }

    /// Waits until the console shows what `seen` looks for.
    pub fn wait_console<T>(&mut self, what: &str, seen: impl Fn(&str) -> Option<T>) -> Result<T> {
        wait::until(what, GUEST_LIMIT, || match self.child.try_wait() {
            Ok(None) => seen(&self.console()).map(Ok),
            ended => Some(Err(anyhow::anyhow!("QEMU ended: {ended:?}"))),
        })
        .and_then(|outcome| outcome)
        .with_context(|| self.state())
    }

    /// What the guest's kernel has said until now is nobody's business any more: it is about how the guest booted.
    pub fn forget_kernel_log(&mut self) -> Result<()> {
        self.run("dmesg -c >/dev/null").map(drop)
    }

    /// Fails if the guest's kernel has complained about a disk or a file system.
    pub fn no_disk_errors(&mut self) -> Result<()> {
        let said = self.run(
            // Of firmware some kernels say in lower case that it has a bug.
            "dmesg | grep -E 'I/O error|EXT4-fs error|blocked for more|[Rr]emounting filesystem read-only|Oops:|BUG:' || true",
        )?;
        ensure!(said.is_empty(), "the guest's kernel says:\n{said}");
        Ok(())
    }

    /// Cuts the power: QEMU is killed, and all that was only in the guest's memory is gone. What
    /// the console has shown until then.
    pub fn cut_power(mut self) -> Result<String> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(self.console())
    }

    /// Presses the reset button and waits until the guest is up again.
    pub fn reset(&mut self) -> Result<()> {
        // Half an answer would swallow the greeting: take what there is while nothing can come.
        self.qmp.execute("stop", json!({}))?;
        self.agent.set_nonblocking(true)?;
        let mut rest = Vec::new();
        let drained = self.agent.read_to_end(&mut rest);
        self.agent.set_nonblocking(false)?;
        ensure!(drained.is_err(), "QEMU ended");
        // What was running does not end any more, and nobody will say so.
        self.input.clear();
        self.ended.clear();
        let before = self.greetings;
        self.qmp.execute("system_reset", json!({}))?;
        self.qmp.execute("cont", json!({}))?;
        self.wait_up(before + 1)
    }

    /// Shuts the guest down in order: the root is read-only before the power goes.
    pub fn shut_down(mut self) -> Result<()> {
        self.run("sync; mount -o remount,ro /")?;
        let _job = self.start("poweroff -f")?;
        let ended = wait::until("the guest powers off", GUEST_LIMIT, || {
            self.child.try_wait().ok().flatten()
        })
        .with_context(|| self.state())?;
        ensure!(ended.success(), "QEMU ended with {ended}: {}", self.state());
        Ok(())
    }

    fn state(&self) -> String {
        format!(
            "console:\n{}\nQEMU:\n{}",
            self.console(),
            fs::read_to_string(&self.log).unwrap_or_default()
        )
    }

    fn pump_until<T>(
        &mut self,
        what: &str,
        mut done: impl FnMut(&mut Machine) -> Option<T>,
    ) -> Result<T> {
        let start = Instant::now();
        loop {
            if let Some(value) = done(self) {
                return Ok(value);
            }
            ensure!(
                start.elapsed() < GUEST_LIMIT,
                "{what}: not so after {GUEST_LIMIT:?}\n{}",
                self.state()
            );
            self.pump(Duration::from_secs(1))
                .with_context(|| format!("until {what}\n{}", self.state()))?;
        }
    }

    /// Takes what the agent says, or nothing if it is silent for `patience`.
    fn pump(&mut self, patience: Duration) -> Result<()> {
        self.agent.set_read_timeout(Some(patience))?;
        let mut chunk = [0u8; 4096];
        match self.agent.read(&mut chunk) {
            Ok(0) => bail!("QEMU ended"),
            Ok(n) => self.input.extend_from_slice(&chunk[..n]),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e).context("the guest's serial port"),
        }
        while self.take_frame()? {}
        Ok(())
    }

    /// Takes one whole answer off the input, if there is one.
    fn take_frame(&mut self) -> Result<bool> {
        // A reset may leave half an answer, and firmware may leave noise: skip to a frame's start.
        let Some(start) = self.input.iter().position(|b| *b == 1) else {
            self.input.clear();
            return Ok(false);
        };
        self.input.drain(..start);
        let Some(end) = self.input.iter().position(|b| *b == b'\n') else {
            return Ok(false);
        };
        let head = String::from_utf8_lossy(&self.input[1..end]).into_owned();
        let fields: Vec<&str> = head.split_whitespace().collect();
        let [id, status, len] = fields[..] else {
            bail!("no answer's head: {head:?}")
        };
        let len: usize = len.parse().with_context(|| format!("in {head:?}"))?;
        ensure!(len <= OUTPUT_MAX, "{len} bytes of output");
        if id == "ready" {
            self.greetings += 1;
            self.input.drain(..=end);
            return Ok(true);
        }
        if self.input.len() < end + 1 + len {
            return Ok(false);
        }
        let text = String::from_utf8_lossy(&self.input[end + 1..end + 1 + len]).into_owned();
        self.ended.insert(
            id.parse().with_context(|| format!("in {head:?}"))?,
            Answer {
                status: status.parse().with_context(|| format!("in {head:?}"))?,
                text,
            },
        );
        self.input.drain(..end + 1 + len);
        Ok(true)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
