//! What a guest sees when a disk dies, the SSD, both, or the power goes, for plain disks and mirrors in each mode: measured, checked,
//! and written down as `docs/crash-table.md` where `CRASH_TABLE` names that file.
//!
//! One guest has a disk of each kind, each served by a daemon with flash of its own. On each it writes a number after the
//! other, makes it durable, says so on its console, and reads what nobody has read before. Then something dies. When all have felt it
//! the operator does what `docs/recovery.md` says, and every number that was said to be durable is looked for.

use anyhow::{Context, Result, ensure};
use hearth_rig::clients::have;
use hearth_rig::daemon::path;
use hearth_rig::machine::{Job, Machine, Plan, copy_root};
use hearth_rig::servers::Server;
use hearth_rig::{Hearth, wait};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Bytes of each disk. Flash beyond the same place fails: what the daemon writes elsewhere lies before it.
const SIZE: u64 = 16 << 20;
const BLOCK: u64 = 4096;
/// Blocks that numbers are written to in turn, and how far apart they lie.
const SLOTS: u64 = 48;
const STRIDE: u64 = 17;
/// Longest wait for a state.
const LIMIT: Duration = Duration::from_secs(600);
/// Seconds after which an origin that does not answer counts as dead.
const DEADLINE: &str = "5";
/// Durable writes before something happens, and after it.
const BEFORE: usize = 4;
const AFTER: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    PowerCut,
    DiskLost,
    SsdLost,
    Both,
    SsdLostInResync,
    PulledAndBack,
}

const EVENTS: [Event; 6] = [
    Event::PowerCut,
    Event::DiskLost,
    Event::SsdLost,
    Event::Both,
    Event::SsdLostInResync,
    Event::PulledAndBack,
];

impl Event {
    fn words(self) -> &'static str {
        match self {
            Event::PowerCut => "power cut",
            Event::DiskLost => "disk lost",
            Event::SsdLost => "SSD lost",
            Event::Both => "both",
            Event::SsdLostInResync => "SSD lost during resync",
            Event::PulledAndBack => "disk pulled and put back",
        }
    }

    fn takes_ssd(self) -> bool {
        matches!(self, Event::SsdLost | Event::Both | Event::SsdLostInResync)
    }

    fn takes_disk(self) -> bool {
        matches!(self, Event::DiskLost | Event::Both)
    }
}

/// One disk, its daemon, and what came of it.
struct Subject {
    hearth: Hearth,
    server: Server,
    mirror: bool,
    mode: &'static str,
    name: String,
    device: String,
    /// Lines of the console that were looked at.
    durable: BTreeMap<u64, u64>,
    last: u64,
    answered: usize,
    failed: usize,
    unread: usize,
    heard: Instant,
    pause: Duration,
    commands: Vec<&'static str>,
    lost: u64,
    whole: Duration,
    note: String,
}

impl Subject {
    fn new(mirror: bool, mode: &'static str, number: usize) -> Result<Subject> {
        let mut hearth = Hearth::with_pool("160M")?;
        // What is dirty stays so for a while.
        hearth.serve_args = ["--destage-rate", "4K"].map(str::to_owned).to_vec();
        hearth.start()?;
        let file = blank(&hearth, "a")?;
        let server = Server::start(
            "nbdkit",
            &["-f", "-U", "{socket}", "file", path(&file)],
            hearth.dir().join("a.s"),
        )?;
        let name = format!("{}{number}", if mirror { "m" } else { "p" });
        let uri = server.uri("");
        let other = blank(&hearth, "b")?;
        let legs = match mirror {
            true => vec!["--mirror", &uri, "--mirror", path(&other)],
            false => vec!["--origin", &uri],
        };
        let more = ["--sole-user", "--mode", mode, "--origin-timeout", DEADLINE];
        hearth.ok(&[&["disk", "add", &name], &legs[..], &more].concat())?;
        let subject = Subject {
            hearth,
            server,
            mirror,
            mode,
            name,
            device: format!("vd{}", char::from(b'b' + number as u8)),
            durable: BTreeMap::new(),
            last: 0,
            answered: 0,
            failed: 0,
            unread: 0,
            heard: Instant::now(),
            pause: Duration::ZERO,
            commands: Vec::new(),
            lost: 0,
            whole: Duration::ZERO,
            note: String::new(),
        };
        if mirror {
            subject.wait_leg(1, "current")?;
        }
        Ok(subject)
    }

    fn info(&self) -> Result<serde_json::Value> {
        let text = self.hearth.ok(&["disk", "show", &self.name, "--json"])?;
        Ok(serde_json::from_str(&text)?)
    }

    fn wait_leg(&self, leg: usize, state: &str) -> Result<()> {
        wait::until(
            &format!("the leg of {} is {state}", self.name),
            LIMIT,
            || (self.info().ok()?["legs"][leg]["state"] == state).then_some(()),
        )
        .with_context(|| self.hearth.log())
    }

    /// What the console says of it: numbers that are durable, and errors.
    fn look(&mut self, console: &str) {
        let mut last = 0;
        let (mut answered, mut failed, mut unread) = (0, 0, 0);
        for line in console.lines() {
            let mut words = line.split_whitespace();
            let (kind, device, number) = (words.next(), words.next(), words.next());
            let number = number.and_then(|n| n.parse::<u64>().ok());
            let Some(number) = number.filter(|_| device == Some(&self.device)) else {
                continue;
            };
            match kind {
                Some("D") => {
                    answered += 1;
                    last = number;
                    self.durable.insert(number % SLOTS, number);
                }
                Some("E") => failed += 1,
                Some("R") => unread += 1,
                _ => {}
            }
        }
        if last != self.last {
            self.pause = self.pause.max(self.heard.elapsed());
            self.heard = Instant::now();
        }
        (self.last, self.answered, self.failed, self.unread) = (last, answered, failed, unread);
    }

    /// The flash ends behind its first blocks, and takes no more.
    fn lose_ssd(&self) -> Result<()> {
        self.hearth.refuse_writes(SIZE)?;
        let flash = File::options().write(true).open(self.hearth.flash())?;
        Ok(flash.set_len(2 << 20)?)
    }

    /// What the operator does, and what happens by itself.
    fn recover(&mut self, event: Event) -> Result<()> {
        let begun = Instant::now();
        if event == Event::PowerCut {
            self.server.up()?;
            self.hearth.start()?;
        }
        if event.takes_ssd() {
            // It ends with an error if something was lost, which is looked for below.
            let _ = self.hearth.stop();
            std::fs::remove_file(self.hearth.flash())?;
            let state = self.hearth.dir().join("state");
            let flash = path(self.hearth.flash()).to_owned();
            let adopt = ["pool", "adopt-flash", "--flash", &flash, "--size", "160M"];
            self.hearth
                .ok(&[&adopt[..], &["--state-dir", path(&state)]].concat())?;
            self.commands
                .push("`systemctl stop`, `pool adopt-flash`, `systemctl start`");
            self.hearth.start()?;
        }
        let gone = event.takes_disk() && !self.mirror;
        if gone && event.takes_ssd() {
            self.commands.push("restore a backup");
            return Ok(());
        }
        if gone {
            self.commands.push("restore a backup, `disk set --trust`");
            return Ok(());
        }
        let state = wait::until("the disk is served or refused", LIMIT, || {
            let state = self.info().ok()?["state"].as_str()?.to_owned();
            ["attached", "refused"].contains(&&*state).then_some(state)
        })?;
        if state == "refused" {
            let name = self.name.clone();
            self.hearth
                .ok(&["disk", "set", &name, "--trust", "origin"])?;
            self.commands.push("`disk set --trust origin`");
        }
        if self.mirror && event.takes_disk() {
            let new = blank(&self.hearth, "c")?;
            let old = self.server.uri("");
            let name = self.name.clone();
            self.hearth
                .ok(&["disk", "replace", &name, &old, path(&new)])?;
            self.commands.push("`disk replace`");
        }
        if self.mirror {
            for leg in 0..2 {
                self.wait_leg(leg, "current")?;
            }
        }
        self.whole = begun.elapsed();
        Ok(())
    }

    /// Looks for every number that was durable.
    fn check(&mut self) -> Result<()> {
        let Ok(mut client) = self.hearth.connect(&self.name) else {
            self.lost = self.durable.len() as u64;
            self.note = "not served".to_owned();
            return Ok(());
        };
        for (slot, number) in &self.durable {
            let held = client.read(slot * STRIDE * BLOCK, BLOCK as u32);
            let held = held.ok().and_then(|bytes| {
                let text = String::from_utf8_lossy(bytes.get(..16)?).into_owned();
                text.trim_start_matches('0').parse::<u64>().ok()
            });
            // A later one may have reached the disk before anybody was told.
            self.lost += u64::from(held.is_none_or(|held| held < *number));
        }
        Ok(())
    }

    fn row(&self, event: Event) -> String {
        let kind = if self.mirror { "mirror" } else { "one disk" };
        let saw = match (self.failed, self.unread) {
            (0, 0) if event == Event::PowerCut => "the power cut".to_owned(),
            // The guest's own cache has what it wrote.
            (0, 0) if self.lost > 0 => "nothing, until it reads what is lost".to_owned(),
            (0, 0) => format!("nothing but a pause of {:.1} s", self.pause.as_secs_f64()),
            (failed, unread) => {
                let mut words = Vec::new();
                if failed > 0 {
                    words.push("errors of writes");
                }
                if unread > 0 {
                    words.push("errors of reads");
                }
                words.join(", ")
            }
        };
        let lost = match (self.lost, self.note.as_str()) {
            _ if event == Event::Both && !self.mirror => "all that is not in a backup".to_owned(),
            _ if event.takes_disk() && !self.mirror => "all that is not cached".to_owned(),
            (0, _) => "nothing".to_owned(),
            (_, "not served") => "all that is not in a backup".to_owned(),
            (n, _) => format!("{n} of {} durable writes", self.durable.len()),
        };
        let did = match self.commands.len() {
            0 => "nothing".to_owned(),
            _ => self.commands.join(", "),
        };
        let time = match self.whole.is_zero() {
            true => "as the backup takes".to_owned(),
            false => format!("{:.1} s", self.whole.as_secs_f64()),
        };
        let (event, mode) = (event.words(), self.mode);
        format!("| {event} | {kind} | {mode} | {saw} | {lost} | {did} | {time} |\n")
    }

    /// What the design promises.
    fn judge(&self, event: Event) -> Result<()> {
        let what = || format!("{event:?}, mirror {}, {}", self.mirror, self.mode);
        let caches_writes = self.mode == "write-back";
        let whole = match event {
            Event::PowerCut | Event::PulledAndBack => true,
            Event::DiskLost => self.mirror,
            Event::SsdLost | Event::SsdLostInResync => !caches_writes,
            Event::Both => self.mirror && !caches_writes,
        };
        if whole {
            ensure!(self.lost == 0, "{}: {} writes are lost", what(), self.lost);
            ensure!(
                self.failed + self.unread == 0,
                "{}: {} writes and {} reads failed\n{}",
                what(),
                self.failed,
                self.unread,
                self.hearth.log()
            );
        }
        Ok(())
    }
}

fn blank(hearth: &Hearth, name: &str) -> Result<PathBuf> {
    let file = hearth.dir().join(name);
    File::create(&file)?.set_len(SIZE)?;
    Ok(file)
}

/// A guest that uses all disks.
struct Lab {
    /// Serves the guest's root, and does not die.
    _base: Hearth,
    subjects: Vec<Subject>,
    guest: Machine,
    _loads: Vec<Job>,
}

impl Lab {
    fn new(event: Event) -> Result<Lab> {
        let mut subjects = Vec::new();
        for mirror in [false, true] {
            if event == Event::SsdLostInResync && !mirror {
                continue;
            }
            for mode in ["write-back", "write-through", "off"] {
                subjects.push(Subject::new(mirror, mode, subjects.len())?);
            }
        }
        let base = Hearth::serving("160M")?;
        let root = base.dir().join("root.img");
        copy_root(&root)?;
        base.add("root", path(&root), &[])?;
        let mut plan = Plan::new(1).disk(&base, "root", "vhost-user")?;
        for subject in &subjects {
            plan = plan.disk(&subject.hearth, &subject.name, "vhost-user")?;
        }
        let mut guest = Machine::boot(base.dir(), "t", &plan)?;
        let mut loads = Vec::new();
        for subject in &subjects {
            let device = &subject.device;
            // Errors are told at most once a second.
            loads.push(guest.start(&format!(
                "n=0; while [ ! -e /run/stop ]; do n=$((n+1)); \
                 if printf %016d $n | dd of=/dev/{device} bs=4096 seek=$((n%{SLOTS}*{STRIDE})) conv=sync,fsync,notrunc 2>/dev/null; \
                 then echo D {device} $n >/dev/ttyS0; else echo E {device} $n >/dev/ttyS0; sleep 1; fi; \
                 dd if=/dev/{device} of=/dev/null bs=4096 count=1 skip=$((1024+n*37%3000)) 2>/dev/null \
                 || {{ echo R {device} $n >/dev/ttyS0; sleep 1; }}; done"
            ))?);
        }
        let mut lab = Lab {
            _base: base,
            subjects,
            guest,
            _loads: loads,
        };
        lab.wait("all disks are written", |s| s.answered >= BEFORE)?;
        Ok(lab)
    }

    fn look(&mut self) {
        let console = self.guest.console();
        self.subjects.iter_mut().for_each(|s| s.look(&console));
    }

    fn wait(&mut self, what: &str, done: impl Fn(&Subject) -> bool) -> Result<()> {
        wait::until(what, LIMIT, || {
            let console = self.guest.console();
            self.subjects.iter_mut().for_each(|s| s.look(&console));
            self.subjects.iter().all(&done).then_some(())
        })
        .with_context(|| {
            let all = self.subjects.iter();
            all.map(|s| {
                format!(
                    "{} {}: {} {} {}\n",
                    s.name, s.mode, s.answered, s.failed, s.unread
                )
            })
            .collect::<String>()
        })
    }

    /// Waits until what died is noticed, and each disk has gone on since, or has said that it does not.
    fn felt(&mut self, event: Event) -> Result<()> {
        if event.takes_ssd() {
            self.wait("it is noticed that the SSDs are gone", |subject| {
                let pool = subject.hearth.ok(&["pool", "show", "--json"]);
                let pool = pool.ok().and_then(|text| serde_json::from_str(&text).ok());
                pool.is_some_and(|pool: serde_json::Value| pool["state"] != "serving")
            })?;
        }
        let before: BTreeMap<String, usize> = self
            .subjects
            .iter()
            .map(|s| (s.name.clone(), s.answered))
            .collect();
        self.wait("all disks have gone on or failed", |s| {
            s.answered >= before[&s.name] + AFTER || s.failed + s.unread > 0
        })
    }
}

fn happens(event: Event, table: &mut String) -> Result<()> {
    let mut lab = Lab::new(event)?;
    if event == Event::SsdLostInResync {
        for subject in &mut lab.subjects {
            subject.server.kill9()?;
            subject.wait_leg(0, "out")?;
            let slow = ["disk", "mirror", &subject.name, "--rate", "64K"];
            subject.hearth.ok(&slow)?;
            subject.server.up()?;
            subject.wait_leg(0, "resyncing")?;
        }
    }
    lab.look();
    for subject in &mut lab.subjects {
        subject.heard = Instant::now();
        subject.pause = Duration::ZERO;
    }
    match event {
        Event::PowerCut => {}
        Event::DiskLost => {
            for subject in &mut lab.subjects {
                subject.server.kill9()?;
            }
        }
        Event::SsdLost => {
            for subject in &lab.subjects {
                subject.lose_ssd()?;
            }
        }
        Event::Both => {
            for subject in &mut lab.subjects {
                subject.lose_ssd()?;
                subject.server.kill9()?;
            }
        }
        Event::SsdLostInResync => {
            for subject in &lab.subjects {
                subject.lose_ssd()?;
            }
        }
        Event::PulledAndBack => {
            for subject in &mut lab.subjects {
                subject.server.kill9()?;
            }
            // A single disk is back before its deadline, a leg after it.
            for mirror in [false, true] {
                lab.wait("it is noticed that the disks are away", |subject| {
                    let away = |info: serde_json::Value| {
                        info["link"]["connected"] == false || info["legs"][0]["state"] == "out"
                    };
                    subject.mirror != mirror || subject.info().is_ok_and(away)
                })?;
                for subject in lab.subjects.iter_mut().filter(|s| s.mirror == mirror) {
                    subject.server.up()?;
                }
            }
        }
    }
    let rest = match event {
        Event::PowerCut => {
            let console = lab.guest.cut_power()?;
            for subject in &mut lab.subjects {
                subject.hearth.kill9()?;
                subject.server.kill9()?;
                subject.look(&console);
            }
            lab.subjects
        }
        _ => {
            lab.felt(event)?;
            lab.look();
            // What was under way must not change what is looked for.
            let console = lab.guest.cut_power()?;
            lab.subjects.iter_mut().for_each(|s| s.look(&console));
            lab.subjects
        }
    };
    for mut subject in rest {
        if event == Event::SsdLostInResync {
            subject
                .hearth
                .ok(&["disk", "mirror", &subject.name, "--rate", "0"])?;
        }
        subject
            .recover(event)
            .with_context(|| subject.hearth.log())?;
        subject.check()?;
        let row = subject.row(event);
        print!("{row}");
        table.push_str(&row);
        subject.judge(event)?;
    }
    Ok(())
}

#[test]
fn what_a_guest_sees_of_what_dies() -> Result<()> {
    let file = std::env::var_os("CRASH_TABLE");
    if file.is_none() && std::env::var_os("GUEST_ROUNDS").is_none() {
        println!("skipped: takes long; scripts/guest-lab.sh test runs it");
        return Ok(());
    }
    if !have("the crash table", &["nbdkit"]) {
        return Ok(());
    }
    // SAFETY: no handler is installed. A daemon told of a write beyond the limit by a signal would end.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let mut table = String::new();
    for event in EVENTS {
        happens(event, &mut table).with_context(|| format!("{event:?}"))?;
    }
    if let Some(file) = file {
        let mut text = String::new();
        write!(text, "{HEAD}{table}{TAIL}")?;
        std::fs::write(file, text)?;
    }
    Ok(())
}

const HEAD: &str = "# What a guest sees of what dies

Made by a program: `CRASH_TABLE=docs/crash-table.md scripts/crash-table.sh`, the test
[crash_table.rs](../tests/e2e/tests/crash_table.rs). A guest in QEMU writes to a disk of each kind, number after number, makes each durable, and
reads elsewhere what is not cached. Then something dies, and the operator does what [recovery.md](recovery.md) says. Every number that
was durable is looked for afterwards.

| what dies | the disk is | mode | the guest sees | lost | the operator does | time of that |
| --- | --- | --- | --- | --- | --- | --- |
";

const TAIL: &str = "
What is behind it:

- A power cut is QEMU, the daemon and the origins' servers killed at one moment. What the host's own kernel holds survives
  that; what a device loses is tried in the simulation and in `guest_storage`.
- The disk that is lost is behind an NBD server that is killed; its deadline (`--origin-timeout`) was 5 s. The other leg of a mirror is a
  file.
- The SSD that is lost is a file that is cut to its first 2 MiB, and grows no more. Destaging was slowed down to 4 KiB/s, so
  that nearly all that is written is dirty in write-back.
- Times are those of a loaded machine that emulates its guest.
- Flash is one device in all rows.
";
