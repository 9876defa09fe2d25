//! The memory controller with a real guest: it is squeezed when memory is short, gets back when it is short itself, and all is
//! as before after the controller was killed. What a guest frees comes back by itself where it is reported.
//!
//! Exclusive: swap, processors

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use hearth_rig::machine::{Machine, Plan};
use hearth_rig::short::Group;
use hearth_rig::{Hearth, wait};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
/// An emulated guest on a busy machine takes its time.
const LIMIT: Duration = Duration::from_secs(300);
/// What the guest is made with.
const ASSIGNED: u64 = 512 * MIB;

/// A place for a controller, and whoever runs in it.
struct Controller {
    dir: PathBuf,
    socket: PathBuf,
    group: Option<PathBuf>,
    child: Option<Child>,
}

impl Controller {
    fn words(&self, command: &str) -> Vec<String> {
        let run = self.dir.join("r").display().to_string();
        let mut words = vec!["memory".into(), command.into(), "--run-dir".into(), run];
        if matches!(command, "run" | "status" | "plan") {
            words.extend(["--config".into(), self.dir.join("c").display().to_string()]);
            words.extend(["--guest".into(), format!("vm={}", self.socket.display())]);
            if let Some(group) = &self.group {
                words.extend(["--cgroup".into(), group.display().to_string()]);
            }
        }
        if matches!(command, "run" | "events") {
            words.extend([
                "--state-dir".into(),
                self.dir.join("s").display().to_string(),
            ]);
        }
        words
    }

    fn said(&self, command: &str) -> Result<String> {
        let mut words = self.words(command);
        words.push("--json".into());
        let out = Command::new(hearth_rig::daemon::binary()?)
            .args(&words)
            .output()?;
        let err = String::from_utf8_lossy(&out.stderr);
        ensure!(out.status.success(), "{command}: {err}");
        Ok(String::from_utf8(out.stdout)?)
    }

    fn json(&self, command: &str) -> Result<Value> {
        Ok(serde_json::from_str(&self.said(command)?)?)
    }

    fn start(&mut self) -> Result<()> {
        self.start_with(&[])
    }

    fn start_with(&mut self, env: &[(&str, &str)]) -> Result<()> {
        let mut command = Command::new(hearth_rig::daemon::binary()?);
        command
            .envs(env.iter().copied())
            .args(self.words("run"))
            .stdin(Stdio::null())
            .stderr(std::fs::File::create(self.dir.join("log"))?);
        // SAFETY: between fork and exec only prctl is called, with plain numbers.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(
                    libc::PR_SET_PDEATHSIG,
                    libc::SIGKILL as libc::c_ulong,
                    0,
                    0,
                    0,
                );
                Ok(())
            });
        }
        self.child = Some(command.spawn()?);
        Ok(())
    }

    /// Waits until the guest is as somebody expects, as the controller sees it.
    fn until(&self, what: &str, mut good: impl FnMut(&Value, &Value) -> bool) -> Result<Value> {
        let file = self.dir.join("r-memory/status.json");
        let seen = wait::until(what, LIMIT, || {
            let status: Value = serde_json::from_slice(&std::fs::read(&file).ok()?).ok()?;
            let guest = status["seen"]["guests"][0].clone();
            good(&status, &guest).then_some(guest)
        });
        seen.with_context(|| {
            let read =
                |name: &str| std::fs::read_to_string(self.dir.join(name)).unwrap_or_default();
            format!("{}\n{}", read("log"), read("r-memory/status.json"))
        })
    }

    /// Stops it in order.
    fn stop(&mut self, limit: Duration) -> Result<ExitStatus> {
        let mut child = self.child.take().context("not running")?;
        // SAFETY: a child of ours that was not waited for yet.
        unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGTERM) };
        let ended = wait::until("it ends", limit, || child.try_wait().ok().flatten());
        if ended.is_err() {
            child.kill()?;
            child.wait()?;
        }
        ended
    }

    fn kill(&mut self) -> Result<()> {
        let mut child = self.child.take().context("not running")?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        // Whatever became of the test: the host's switches are as before.
        let _ = self.said("undo");
    }
}

/// Bytes the guest says its balloon leaves it.
fn has(guest: &Value) -> u64 {
    guest["balloon"].as_u64().unwrap_or(0)
}

#[test]
fn a_guest_is_squeezed_helped_and_set_back() -> Result<()> {
    let test = "a_guest_is_squeezed_helped_and_set_back";
    // SAFETY: no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        println!("SKIPPED {test}: needs root");
        return Ok(());
    }
    let Some(group) = Group::of(test, 4096 * MIB)? else {
        return Ok(());
    };
    let hearth = Hearth::bare()?;
    let dir = hearth.dir();
    let at = group.dir().to_owned();
    let mut plan = Plan::new(1).own_root()?.balloon(&dir.join("m"));
    plan.memory = "512M".into();
    plan.wrap = group.wrap();
    let mut guest = Machine::boot(dir, "vm", &plan)?;
    guest.run("modprobe virtio_balloon")?;
    let mut controller = Controller {
        dir: dir.to_owned(),
        socket: dir.join("m"),
        group: Some(at.clone()),
        child: None,
    };
    std::fs::write(
        controller.dir.join("c"),
        "[memory]\nlibvirt = false\n[[memory.guest]]\nname = \"vm\"\nmin_mib = 160\n",
    )?;

    let sharing = || std::fs::read_to_string("/sys/kernel/mm/ksm/run").unwrap_or_default();
    let shared = sharing();

    // Before anything runs: what is seen, and how far it goes.
    let plan = controller.json("plan")?;
    ensure!(plan["assigned"] == ASSIGNED, "{plan}");
    let status = controller.json("status")?;
    ensure!(status["controller"] == "off", "{status}");
    ensure!(
        status["seen"]["guests"][0]["reporting"] == false,
        "{status}"
    );
    ensure!(
        status["gaps"]
            .to_string()
            .contains("free-page reporting is off"),
        "{status}"
    );

    controller.start()?;
    controller.until("the guest tells how it is", |_, g| g["inside"].is_object())?;
    // What the guest has touched and does not need; then there is less for it than that.
    guest.run("dd if=/dev/vda of=/tmp/f bs=1M count=150 2>/dev/null && rm /tmp/f")?;
    let mut limit = resident(guest.pid())? + 64 * MIB;
    group.allow(limit)?;
    let mut spare = 0;
    controller.until("the limit is seen", |status, _| {
        spare = status["seen"]["available"].as_u64().unwrap_or(0);
        status["seen"]["total"] == limit
    })?;
    // So that a twenty-fifth of it is left. The kernel may need more than one go to drop what it knows of files.
    limit = limit + 20 * MIB - spare;
    wait::until("the limit is taken", LIMIT, || group.allow(limit).ok())?;
    let squeezed = controller.until("it is squeezed", |status, g| {
        let took = |s: &Value| s["step"]["balloon"].is_object();
        has(g) <= ASSIGNED - 24 * MIB
            && status["steps"]
                .as_array()
                .is_some_and(|s| s.iter().any(took))
    })?;
    ensure!(has(&squeezed) >= 160 * MIB, "{squeezed}");

    // There is room again; the guest itself wants more than it was left.
    group.allow(4096 * MIB)?;
    let before =
        has(&controller.until("the guest tells how it is", |_, g| g["inside"].is_object())?);
    let free = free(&mut guest)?;
    // It is kept until it was seen.
    let job = guest.start(&format!(
        "mount -o remount,size=100% /tmp; dd if=/dev/zero of=/tmp/f bs=1M count={} 2>/dev/null",
        free.saturating_sub(12)
    ))?;
    controller.until("it gets back", |status, g| {
        let steps = status["steps"].as_array().into_iter().flatten();
        let short = |s: &Value| {
            s["why"]
                .as_str()
                .is_some_and(|w| w.contains("the guest itself"))
        };
        has(g) > before && steps.into_iter().any(short)
    })?;
    guest.wait(&job)?;
    guest.run("rm /tmp/f")?;

    // Somebody kills the controller; what it has changed is known.
    controller.kill()?;
    let undone = controller.json("undo")?;
    ensure!(
        undone.to_string().contains("memory of guest vm"),
        "{undone}"
    );
    wait::until("the guest has all of it", LIMIT, || {
        let answer = guest
            .qmp
            .execute("query-balloon", serde_json::json!({}))
            .ok()?;
        (answer["actual"] == ASSIGNED).then_some(())
    })?;
    let polling = guest.qmp.execute(
        "qom-get",
        serde_json::json!({"path": "/machine/peripheral/balloon", "property": "guest-stats-polling-interval"}),
    )?;
    ensure!(polling == 0, "{polling}");
    ensure!(sharing() == shared, "{}", sharing());
    ensure!(controller.json("undo")? == Value::Array(Vec::new()));
    let events = controller.said("events")?;
    for kind in ["memory-started", "memory-level", "memory-step"] {
        ensure!(events.contains(kind), "no {kind} in {events}");
    }

    // One that is stopped sets back itself, and leaves no word.
    controller.start()?;
    controller.until("it looks", |_, g| g.is_object())?;
    let ended = controller.stop(LIMIT)?;
    ensure!(ended.success(), "{ended}");
    ensure!(!controller.dir.join("r-memory/status.json").exists());
    guest.run("true")?;
    Ok(())
}

/// A QEMU that answers: one client, until it goes.
fn answers(socket: &Path) -> Result<()> {
    let listener = UnixListener::bind(socket)?;
    std::thread::spawn(move || -> Result<()> {
        let (mut stream, _) = listener.accept()?;
        writeln!(stream, "{}", json!({"QMP": {}}))?;
        for line in BufReader::new(stream.try_clone()?).lines() {
            let question: Value = serde_json::from_str(&line?)?;
            let answer = match question["execute"].as_str() {
                Some("qom-list") => json!([]),
                Some("query-memory-size-summary") => json!({"base-memory": ASSIGNED}),
                _ => json!({}),
            };
            writeln!(stream, "{}", json!({"return": answer}))?;
        }
        Ok(())
    });
    Ok(())
}

/// Far longer than an answer takes, and far less than all those that hang would take one after the
/// other.
const SOON: Duration = Duration::from_secs(20);

/// A socket that hangs, or that another program holds, takes a controller's time for its own guest
/// only, and a stop is a stop.
#[test]
fn hung_qmp_sockets_hold_up_nothing_else() -> Result<()> {
    let hearth = Hearth::bare()?;
    let dir = hearth.dir();
    let mut config = "[memory]\nlibvirt = false\n".to_owned();
    let mut held = Vec::new();
    for n in 0..30 {
        // Whoever connects waits until the one before has gone.
        let socket = dir.join(format!("held{n}"));
        held.push(UnixListener::bind(&socket)?);
        config += &format!("[[memory.guest]]\nname = \"a{n:02}\"\nqmp = {socket:?}\n");
    }
    std::fs::write(dir.join("c"), config)?;
    answers(&dir.join("m"))?;
    let mut controller = Controller {
        dir: dir.to_owned(),
        socket: dir.join("m"),
        group: None,
        child: None,
    };
    controller.start()?;
    let file = dir.join("r-memory/status.json");
    let seen = wait::until("the one that answers is seen", SOON, || {
        let status: Value = serde_json::from_slice(&std::fs::read(&file).ok()?).ok()?;
        let guests = status["seen"]["guests"].as_array()?;
        let one = guests.len() == 1 && guests[0]["name"] == "vm";
        (one && status["seen"]["notes"].as_array()?.len() == 30).then_some(guests[0].clone())
    })?;
    ensure!(seen["assigned"] == ASSIGNED, "{seen}");
    ensure!(controller.stop(SOON)?.success());
    Ok(())
}

/// One call of virsh tells of all guests; one that hangs holds up neither the others nor a stop.
#[test]
fn libvirt_guests_take_one_call_for_all() -> Result<()> {
    let hearth = Hearth::bare()?;
    let dir = hearth.dir();
    let bin = dir.join("bin");
    std::fs::create_dir(&bin)?;
    let (calls, hang) = (dir.join("calls"), dir.join("hang"));
    let script = format!(
        "#!/bin/sh\necho \"$*\" >>{}\n[ -e {} ] && exec sleep 1000\ncase \"$*\" in *domstats*)\nfor d in a b c; do printf \"Domain: '$d'\\n  balloon.current=1024\\n  balloon.maximum=2048\\n\\n\"; done;;\n*list*) printf 'a\\nb\\nc\\n';; esac\n",
        calls.display(),
        hang.display()
    );
    std::fs::write(bin.join("virsh"), script)?;
    std::fs::set_permissions(bin.join("virsh"), PermissionsExt::from_mode(0o755))?;
    std::fs::write(
        dir.join("c"),
        "[memory]\n[[memory.guest]]\nname = \"b\"\nexempt = true\n",
    )?;
    answers(&dir.join("m"))?;
    let mut controller = Controller {
        dir: dir.to_owned(),
        socket: dir.join("m"),
        group: None,
        child: None,
    };
    let path = std::env::var("PATH").unwrap_or_default();
    controller.start_with(&[("PATH", &format!("{}:{path}", bin.display()))])?;
    let file = dir.join("r-memory/status.json");
    let guests = |known: &[&str]| {
        wait::until("they are seen", SOON, || {
            let status: Value = serde_json::from_slice(&std::fs::read(&file).ok()?).ok()?;
            let guests = status["seen"]["guests"].as_array()?.clone();
            let names: Vec<&str> = guests.iter().filter_map(|g| g["name"].as_str()).collect();
            (names == known).then_some(guests)
        })
    };
    let all = guests(&["a", "b", "c", "vm"])?;
    ensure!(
        all[1]["exempt"] == true && all[0]["exempt"] == false,
        "{all:?}"
    );
    ensure!(all[0]["assigned"] == 2 * MIB, "{all:?}");
    wait::until("it has looked some times", SOON, || {
        (std::fs::read_to_string(&calls).ok()?.lines().count() > 3).then_some(())
    })?;
    let said = std::fs::read_to_string(&calls)?;
    ensure!(said.lines().all(|l| l.contains("domstats")), "{said}");
    // From now on libvirt does not answer: what the exempt one is called is in the settings.
    std::fs::write(&hang, b"")?;
    guests(&["b", "vm"])?;
    ensure!(controller.stop(SOON)?.success());
    Ok(())
}

/// The first of the ways in which memory comes back needs no controller, only a guest that has it.
#[test]
fn what_a_guest_frees_comes_back_where_it_is_reported() -> Result<()> {
    /// Freed by the guest, in MiB.
    const FREED: u64 = 200;
    let hearth = Hearth::bare()?;
    let dir = hearth.dir();
    let mut plan = Plan::new(1).own_root()?.reporting_balloon(&dir.join("m"));
    plan.memory = "512M".into();
    let mut guest = Machine::boot(dir, "vm", &plan)?;
    guest.run("modprobe virtio_balloon")?;
    let controller = Controller {
        dir: dir.to_owned(),
        socket: dir.join("m"),
        group: None,
        child: None,
    };
    std::fs::write(dir.join("c"), "[memory]\nlibvirt = false\n")?;
    let status = controller.json("status")?;
    ensure!(status["controller"] == "off", "{status}");
    ensure!(status["seen"]["guests"][0]["reporting"] == true, "{status}");
    ensure!(
        !status["gaps"]
            .to_string()
            .contains("free-page reporting is off"),
        "{status}"
    );

    let before = resident(guest.pid())?;
    guest.run(&format!(
        "dd if=/dev/zero of=/tmp/f bs=1M count={FREED} 2>/dev/null"
    ))?;
    let full = resident(guest.pid())?;
    // Some of what it took may have been the host's already, from when the guest booted.
    ensure!(full > before + FREED / 2 * MIB, "{before}, then {full}");
    guest.run("rm /tmp/f")?;
    let begun = std::time::Instant::now();
    let mut told = Vec::new();
    let after = wait::until("what was freed is given back", LIMIT, || {
        let now = resident(guest.pid()).ok()?;
        let back = full.saturating_sub(now) / MIB;
        if told.last().is_none_or(|(_, before)| back >= before + 20) {
            told.push((begun.elapsed().as_millis(), back));
        }
        (back >= FREED / 10 * 9).then_some(now)
    })?;
    println!(
        "{} MiB at first, {} with what it took, {} after it freed {FREED}; (ms, MiB back): {told:?}",
        before / MIB,
        full / MIB,
        after / MIB
    );
    // Nobody took it: the guest has as much as before, and can have it again.
    let answer = guest.qmp.execute("query-balloon", serde_json::json!({}))?;
    ensure!(answer["actual"] == ASSIGNED, "{answer}");
    guest.run(&format!(
        "dd if=/dev/zero bs=1M count={FREED} 2>/dev/null | tr '\\0' x >/tmp/f && [ $(tr -d x </tmp/f | wc -c) = 0 ]"
    ))?;
    Ok(())
}

fn resident(pid: u32) -> Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = text.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    let kib = line
        .and_then(|l| l.split_whitespace().next())
        .context("not said")?;
    Ok(kib.parse::<u64>()? << 10)
}

/// MiB that are free in the guest.
fn free(guest: &mut Machine) -> Result<u64> {
    let text = guest.run("grep MemAvailable /proc/meminfo")?;
    let kib = text.split_whitespace().nth(1).context("not said")?;
    Ok(kib.parse::<u64>()? >> 10)
}
