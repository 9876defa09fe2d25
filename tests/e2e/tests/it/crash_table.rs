//! What a guest sees when a disk dies, an SSD, both, or the power goes, for plain disks and mirrors in each mode, with one SSD, with
//! two, and with everything on both: measured, checked, and written down as `docs/crash-table.md` where `CRASH_TABLE` names
//! that file.
//!
//! One guest has a disk of each kind, each served by a daemon with flash of its own. On each it writes a number after the
//! other, makes it durable, says so on its console, and reads what nobody has read before. Then something dies. When all have felt it
//! the operator does what `docs/recovery.md` says, and every number that was said to be durable is looked for.
//!
//! Exclusive: processors

use anyhow::{Context, Result, ensure};
use hearth_rig::clients::have;
use hearth_rig::daemon::path;
use hearth_rig::machine::{Job, Machine, Plan, copy_root};
use hearth_rig::mounted::{self, Mounted};
use hearth_rig::servers::Server;
use hearth_rig::{Hearth, wait};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

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
    PowerCutSsdLost,
    DiskLost,
    SsdLost,
    SsdsLost,
    Both,
    SsdLostInResync,
    PulledAndBack,
    SsdPulledAndBack,
}

/// What happens to guests whose daemons have one SSD, and to those with two.
const OF_ONE: [Event; 7] = [
    Event::PowerCut,
    Event::PowerCutSsdLost,
    Event::DiskLost,
    Event::SsdLost,
    Event::Both,
    Event::SsdLostInResync,
    Event::PulledAndBack,
];
const OF_TWO: [Event; 9] = [
    Event::PowerCut,
    Event::PowerCutSsdLost,
    Event::DiskLost,
    Event::SsdLost,
    Event::SsdsLost,
    Event::Both,
    Event::SsdLostInResync,
    Event::PulledAndBack,
    Event::SsdPulledAndBack,
];

impl Event {
    fn words(self, flash: Flash) -> &'static str {
        match self {
            Event::PowerCut => "power cut",
            Event::PowerCutSsdLost if flash == Flash::One => "power cut, and the SSD with it",
            Event::PowerCutSsdLost => "power cut, and one SSD with it",
            Event::DiskLost => "disk lost",
            Event::SsdLost if flash == Flash::One => "SSD lost",
            Event::SsdLost => "one SSD lost",
            Event::SsdsLost => "both SSDs lost",
            Event::Both if flash == Flash::One => "disk and SSD lost",
            Event::Both => "disk and one SSD lost",
            Event::SsdLostInResync if flash == Flash::One => "SSD lost during resync",
            Event::SsdLostInResync => "one SSD lost during resync",
            Event::PulledAndBack => "disk pulled and put back",
            Event::SsdPulledAndBack => "one SSD pulled, put back later",
        }
    }

    fn cuts_power(self) -> bool {
        matches!(self, Event::PowerCut | Event::PowerCutSsdLost)
    }

    /// An SSD is gone for good.
    fn takes_ssd(self) -> bool {
        matches!(
            self,
            Event::PowerCutSsdLost
                | Event::SsdLost
                | Event::SsdsLost
                | Event::Both
                | Event::SsdLostInResync
        )
    }

    fn takes_disk(self) -> bool {
        matches!(self, Event::DiskLost | Event::Both)
    }
}

/// What a daemon has for flash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flash {
    One,
    Two,
    /// What is dirty on both.
    Twice,
}

impl Flash {
    fn words(self) -> &'static str {
        match self {
            Flash::One => "one SSD",
            Flash::Two => "two SSDs",
            Flash::Twice => "two SSDs, two copies",
        }
    }

    /// Are all that are left enough for everything?
    fn survives(self, event: Event) -> bool {
        !event.takes_ssd() || self == Flash::Twice && event != Event::SsdsLost
    }
}

/// What a disk is and is served with.
#[derive(Clone, Copy, Debug)]
struct Kind {
    flash: Flash,
    mirror: bool,
    mode: &'static str,
}

const ORDERED: &str = "write-back-ordered";

const MODES: [&str; 5] = [
    "write-back",
    ORDERED,
    "write-through",
    "write-around",
    "off",
];

/// The disks that something happens to, by the guest that has them: an emulated one has no use for more than these.
fn guests(event: Event, two: bool) -> Vec<Vec<Kind>> {
    let of = |flash: Flash, mirror: bool, modes: &[&'static str]| -> Vec<Kind> {
        let kind = |mode: &&'static str| Kind {
            flash,
            mirror,
            mode,
        };
        modes.iter().map(kind).collect()
    };
    let resync = event == Event::SsdLostInResync;
    if !two {
        let disks = of(Flash::One, false, if resync { &[] } else { &MODES });
        let guests = [disks, of(Flash::One, true, &MODES)];
        return guests.into_iter().filter(|g| !g.is_empty()).collect();
    }
    let of_two = |flash: Flash| match resync {
        true => of(flash, true, &MODES),
        // What a mirror adds to one disk is the same in the modes left out.
        false => [
            of(flash, false, &MODES),
            of(flash, true, &["write-back", "write-through"]),
        ]
        .concat(),
    };
    [Flash::Two, Flash::Twice].map(of_two).into()
}

/// One disk, its daemon, and what came of it.
struct Subject {
    /// The second SSD. Goes before the daemon: this cannot end while a device hangs.
    ssd: Option<Mounted>,
    hearth: Hearth,
    server: Server,
    kind: Kind,
    name: String,
    device: String,
    /// Lines of the console that were looked at.
    durable: BTreeMap<u64, u64>,
    /// When each number was known to be durable, at the latest.
    known: BTreeMap<u64, SystemTime>,
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
    /// Of an ordered disk without its flash: up to when its origin holds everything, milliseconds since 1970.
    told: Option<u64>,
}

impl Subject {
    fn new(kind: Kind, number: usize) -> Result<Subject> {
        let Kind {
            flash,
            mirror,
            mode,
        } = kind;
        let mut hearth = Hearth::bare()?;
        // What is dirty stays so for a while.
        hearth.serve_args = ["--destage-rate", "4K"].map(str::to_owned).to_vec();
        let mut ssd = None;
        match flash {
            Flash::One => drop(hearth.create_pool("160M")?),
            Flash::Two | Flash::Twice => {
                let first = hearth.flash().to_owned();
                let second = hearth.dir().join("second.img");
                for file in [&first, &second] {
                    File::create(file)?.set_len(160 << 20)?;
                }
                let mounted = Mounted::new(hearth.dir(), "ssd", &second, 0)?;
                let copies = if flash == Flash::Twice { "2" } else { "1" };
                let both = ["--flash", path(&first), "--flash", mounted.path()];
                let create = ["pool", "create", "--dirty-copies", copies];
                hearth.ok(&[&create[..], &both].concat())?;
                hearth
                    .serve_args
                    .extend(["--flash", mounted.path()].map(str::to_owned));
                ssd = Some(mounted);
            }
        }
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
            ssd,
            hearth,
            server,
            kind,
            name,
            device: format!("vd{}", char::from(b'b' + number as u8)),
            durable: BTreeMap::new(),
            known: BTreeMap::new(),
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
            told: None,
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
        let now = SystemTime::now();
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
                    self.known.entry(number).or_insert(now);
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

    /// The second SSD does not answer any more; of the only one, or of both, the first one ends behind its first blocks, and
    /// takes no more.
    fn lose_ssd(&mut self, event: Event) -> Result<()> {
        if let Some(ssd) = &mut self.ssd {
            ssd.server().kill9()?;
            if event != Event::SsdsLost {
                return Ok(());
            }
        }
        self.hearth.refuse_writes(SIZE)?;
        let flash = File::options().write(true).open(self.hearth.flash())?;
        Ok(flash.set_len(2 << 20)?)
    }

    /// Is it noticed that an SSD is gone?
    fn misses_ssd(&self) -> bool {
        let pool = self.hearth.ok(&["pool", "show", "--json"]);
        let pool = pool.ok().and_then(|text| serde_json::from_str(&text).ok());
        pool.is_some_and(|pool: serde_json::Value| {
            pool["state"] != "serving" || pool["devices"][1]["lost"] == true
        })
    }

    /// Is it noted beside the flash up to when the origin holds everything?
    fn order_is_noted(&self) -> bool {
        let Ok(files) = std::fs::read_dir(self.hearth.dir().join("state/pools")) else {
            return false;
        };
        let mut files = files.flatten().map(|entry| entry.path());
        let file = files.find(|path| path.extension().is_some_and(|e| e == "order"));
        // The disk is the pool's first.
        let bytes = file.and_then(|file| std::fs::read(file).ok());
        let note = bytes.and_then(|bytes| {
            let place = bytes.get(hearth_format::order::ORDER_NOTE_BYTES..)?;
            hearth_format::OrderNote::newest(place).ok()?
        });
        note.is_some_and(|note| note.upto_ms > 0)
    }

    /// Blank flash takes the place of what is left; false if the daemon had gone on with another SSD already, which is served then.
    fn adopt(&mut self, event: Event) -> Result<bool> {
        // It ends with an error if something was lost, which is looked for below.
        let _ = self.hearth.stop();
        self.ssd = None;
        let new = self.hearth.dir().join("new.img");
        if self.kind.flash == Flash::One {
            std::fs::remove_file(self.hearth.flash())?;
        }
        let kept = |arg: &String| !arg.ends_with(".mnt/flash") && arg != "--flash";
        self.hearth.serve_args.retain(kept);
        let state = self.hearth.dir().join("state");
        let flash = path(&new).to_owned();
        let adopt = ["pool", "adopt-flash", "--flash", &flash, "--size", "160M"];
        let adopted = (self.hearth).ok(&[&adopt[..], &["--state-dir", path(&state)]].concat());
        let has_left = self.kind.flash == Flash::Two && event.takes_ssd();
        match adopted {
            Err(e) if has_left && format!("{e:#}").contains("is still there") => {
                self.hearth.start()?;
                return Ok(false);
            }
            other => drop(other?),
        }
        self.hearth.set_flash(new);
        self.hearth.start()?;
        if self.kind.mode == ORDERED && !event.takes_disk() {
            let known = wait::until("the disk is refused or served", LIMIT, || {
                let info = self.info().ok()?;
                let state = info["state"].as_str()?;
                ["attached", "refused"].contains(&state).then_some(info)
            })?;
            let order = &known["order"];
            let holds = known["state"] == "refused" && order["in_order"] == true;
            self.told = order["upto"].as_u64().filter(|_| holds);
        }
        Ok(true)
    }

    /// Nothing dirty is lost with one of two SSDs: once no guest has to connect again for it, the daemon goes on with the other, if
    /// the origin has made durable what was written meanwhile.
    fn goes_on_without(&self, event: Event) -> bool {
        let one = event.takes_ssd() && event != Event::SsdsLost && !event.cuts_power();
        let used = !self.kind.mode.starts_with("write-back") && self.kind.mode != "off";
        let answers = self.kind.mirror || !event.takes_disk();
        self.kind.flash == Flash::Two && one && used && answers
    }

    fn wait_without(&self) -> Result<()> {
        wait::until("the pool goes on without the SSD", LIMIT, || {
            let pool = self.hearth.ok(&["pool", "show", "--json"]).ok()?;
            let pool: serde_json::Value = serde_json::from_str(&pool).ok()?;
            let devices = pool["devices"].as_array().map(Vec::len);
            (pool["state"] == "serving" && devices == Some(1)).then_some(())
        })
        .with_context(|| self.hearth.log())
    }

    /// What the operator does, and what happens by itself.
    fn recover(&mut self, event: Event) -> Result<()> {
        let begun = Instant::now();
        let flash = self.kind.flash;
        if event.cuts_power() {
            self.server.up()?;
        }
        if self.goes_on_without(event) {
            self.wait_without()?;
        } else if !flash.survives(event) {
            let is_new = self.adopt(event)?;
            self.commands.push(match (is_new, event.cuts_power()) {
                (true, true) => "`pool adopt-flash`, `systemctl start`",
                (true, false) => "`systemctl stop`, `pool adopt-flash`, `systemctl start`",
                (false, _) => "`systemctl restart`",
            });
        } else if event.cuts_power() {
            self.hearth.start()?;
        } else if event == Event::SsdPulledAndBack {
            let _ = self.hearth.stop();
            self.ssd = None;
            let second = self.hearth.dir().join("second.img");
            self.ssd = Some(Mounted::new(self.hearth.dir(), "ssd", &second, 0)?);
            self.hearth.start()?;
            self.commands.push("put it back, `systemctl restart`");
        }
        let gone = event.takes_disk() && !self.kind.mirror;
        if gone && !flash.survives(event) && !self.goes_on_without(event) {
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
        if self.kind.mirror && event.takes_disk() {
            let new = blank(&self.hearth, "c")?;
            let old = self.server.uri("");
            let name = self.name.clone();
            self.hearth
                .ok(&["disk", "replace", &name, &old, path(&new)])?;
            self.commands.push("`disk replace`");
        }
        if self.kind.mirror {
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
        let mut found = BTreeMap::new();
        for (slot, number) in &self.durable {
            let held = client.read(slot * STRIDE * BLOCK, BLOCK as u32);
            let held = held.ok().and_then(|bytes| {
                let text = String::from_utf8_lossy(bytes.get(..16)?).into_owned();
                text.trim_start_matches('0').parse::<u64>().ok()
            });
            // A later one may have reached the disk before anybody was told.
            self.lost += u64::from(held.is_none_or(|held| held < *number));
            found.insert(*slot, held.unwrap_or(0));
        }
        if let Some(told) = self.told {
            self.check_order(&found, told)?;
        }
        Ok(())
    }

    /// The origin of an ordered disk holds every number up to one, none after it, and all that were durable at the time that
    /// is told.
    fn check_order(&self, found: &BTreeMap<u64, u64>, told: u64) -> Result<()> {
        let upto = found.values().copied().max().unwrap_or(0);
        for (slot, held) in found {
            let wanted = (1..=upto).rev().find(|n| n % SLOTS == *slot);
            let wanted = wanted.unwrap_or(0);
            ensure!(
                *held == wanted,
                "of what was written in order slot {slot} has {held} and not {wanted}, others have up to {upto}"
            );
        }
        let told = UNIX_EPOCH + Duration::from_millis(told);
        for (number, known) in &self.known {
            ensure!(
                *number <= upto || *known > told,
                "{number} was durable before the time that is told, and is not there"
            );
        }
        Ok(())
    }

    fn row(&self, event: Event) -> String {
        let kind = if self.kind.mirror {
            "mirror"
        } else {
            "one disk"
        };
        let saw = match (self.failed, self.unread) {
            (0, 0) if event.cuts_power() => "the power cut".to_owned(),
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
            _ if event == Event::Both && !self.kind.mirror && !self.kind.flash.survives(event) => {
                "all that is not in a backup".to_owned()
            }
            _ if event.takes_disk() && !self.kind.mirror => "all that is not cached".to_owned(),
            (0, _) => "nothing".to_owned(),
            (_, "not served") => "all that is not in a backup".to_owned(),
            (n, _) => {
                let all = self.durable.len();
                let which = match (self.told, self.kind.mode == ORDERED) {
                    (Some(_), _) => ": the last ones; Hearth tells up to when nothing is lost",
                    (None, true) => ": not the last ones only; Hearth says that there is no order",
                    _ => "",
                };
                format!("{n} of {all} durable writes{which}")
            }
        };
        // Not done here: the guest needs nothing of it.
        let one_lost = event.takes_ssd() && event != Event::SsdsLost;
        let half_lost =
            self.kind.flash == Flash::Twice && (one_lost || event == Event::SsdPulledAndBack);
        let did = match self.commands.len() {
            0 if half_lost => "nothing at once".to_owned(),
            0 => "nothing".to_owned(),
            _ => self.commands.join(", "),
        };
        let did = match half_lost {
            true => did + "; later `pool replace-flash`",
            false => did,
        };
        let time = match self.whole.is_zero() {
            true => "as the backup takes".to_owned(),
            false => format!("{:.1} s", self.whole.as_secs_f64()),
        };
        let Kind { flash, mode, .. } = self.kind;
        let (event, flash) = (event.words(flash), flash.words());
        format!("| {event} | {flash} | {kind} | {mode} | {saw} | {lost} | {did} | {time} |\n")
    }

    /// What the design promises.
    fn judge(&self, event: Event) -> Result<()> {
        let what = || format!("{event:?}, {:?}", self.kind);
        let caches_writes = self.kind.mode.starts_with("write-back");
        let flash = self.kind.flash.survives(event);
        let whole = match event {
            Event::PowerCut | Event::PulledAndBack => true,
            Event::DiskLost => self.kind.mirror,
            Event::Both => self.kind.mirror && (flash || !caches_writes),
            // What was dirty on the one that was pulled could not be read meanwhile.
            Event::SsdPulledAndBack => self.kind.flash == Flash::Twice || !caches_writes,
            _ => flash || !caches_writes,
        };
        if self.kind.mode == ORDERED && event == Event::PowerCutSsdLost && !flash {
            ensure!(self.told.is_some(), "{}: no time is told", what());
        }
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
    fn new(kinds: Vec<Kind>) -> Result<Lab> {
        let mut subjects = Vec::new();
        for kind in kinds {
            subjects.push(Subject::new(kind, subjects.len())?);
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
                    s.name, s.kind.mode, s.answered, s.failed, s.unread
                )
            })
            .collect::<String>()
        })
    }

    /// Waits until what died is noticed, and each disk has gone on since, or has said that it does not.
    fn felt(&mut self, event: Event) -> Result<()> {
        if event.takes_ssd() || event == Event::SsdPulledAndBack {
            // A disk without a cache has nothing on flash, and asks it for nothing.
            self.wait("it is noticed that an SSD is gone", |s| {
                s.kind.mode == "off" && s.ssd.is_some() || s.misses_ssd()
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

fn happens(event: Event, kinds: Vec<Kind>, table: &mut String) -> Result<()> {
    let mut lab = Lab::new(kinds)?;
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
    if event == Event::PowerCutSsdLost {
        lab.wait("it is noted how far ordered disks are", |subject| {
            subject.kind.mode != ORDERED || subject.order_is_noted()
        })?;
    }
    lab.look();
    for subject in &mut lab.subjects {
        subject.heard = Instant::now();
        subject.pause = Duration::ZERO;
    }
    match event {
        Event::PowerCut | Event::PowerCutSsdLost => {}
        Event::DiskLost => {
            for subject in &mut lab.subjects {
                subject.server.kill9()?;
            }
        }
        Event::SsdLost | Event::SsdsLost | Event::SsdLostInResync | Event::SsdPulledAndBack => {
            for subject in &mut lab.subjects {
                subject.lose_ssd(event)?;
            }
        }
        Event::Both => {
            for subject in &mut lab.subjects {
                subject.lose_ssd(event)?;
                subject.server.kill9()?;
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
                    subject.kind.mirror != mirror || subject.info().is_ok_and(away)
                })?;
                for subject in lab.subjects.iter_mut().filter(|s| s.kind.mirror == mirror) {
                    subject.server.up()?;
                }
            }
        }
    }
    let rest = match event {
        _ if event.cuts_power() => {
            let console = lab.guest.cut_power()?;
            for subject in &mut lab.subjects {
                subject.hearth.kill9()?;
                subject.server.kill9()?;
                if let Some(ssd) = subject.ssd.as_mut().filter(|_| event.takes_ssd()) {
                    ssd.server().kill9()?;
                }
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
        subject.check().with_context(|| subject.hearth.log())?;
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
    if let Some(missing) = mounted::missing() {
        println!("skipped: it needs {missing}");
        return Ok(());
    }
    // SAFETY: no handler is installed. A daemon told of a write beyond the limit by a signal would end.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let mut table = String::new();
    let of_one = OF_ONE.iter().map(|event| (*event, false));
    let of_two = OF_TWO.iter().map(|event| (*event, true));
    // A part of the table, to look at one thing again.
    let only = std::env::var("CRASH_EVENT").ok();
    let wanted = |event: &Event| {
        only.as_ref()
            .is_none_or(|name| *name == format!("{event:?}"))
    };
    for (event, two) in of_one.chain(of_two).filter(|(event, _)| wanted(event)) {
        for kinds in guests(event, two) {
            happens(event, kinds, &mut table)
                .with_context(|| format!("{event:?}, two SSDs: {two}"))?;
        }
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
[crash_table.rs](../tests/e2e/tests/it/crash_table.rs). A guest in QEMU writes to a disk of each kind, number after number, makes each durable, and
reads elsewhere what is not cached. Then something dies, and the operator does what [recovery.md](recovery.md) says. Every number that
was durable is looked for afterwards.

| what dies | flash | the disk is | mode | the guest sees | lost | the operator does | time the commands took |
| --- | --- | --- | --- | --- | --- | --- | --- |
";

const TAIL: &str = "
What is behind it:

- A power cut is QEMU, the daemon and the origins' servers killed at one moment. What the host's own kernel holds survives
  that; what a device loses is tried in the simulation and in `guest_storage`.
- The disk that is lost is behind an NBD server that is killed; its deadline (`--origin-timeout`) was 5 s. The other leg of a mirror is a
  file.
- Where the pool has one SSD, and for the first of two that are both lost, the SSD is a file that is cut to 2 MiB and cannot grow again. The other of
  two SSDs is served by a process, which is killed. Destaging was slowed down to 4 KiB/s, so that nearly all that is written is dirty in write-back.
- With two SSDs and one copy (`two SSDs`), what was dirty on the second, which is the one that is lost, is lost with it. If nothing was, the daemon goes on
  with what the first holds, warm, as soon as no client has to connect again for that and every origin answers: a guest over vhost-user has to, so it waits for the guest's end or for
  `hearth pool remove-flash SSD --yes`. Until then, and where something dirty is lost, the cache is off; the operator of this table then puts the pool on other
  flash. With two copies all that is dirty is on both: the one that is left has it, and what was clean on the other alone is read from the origins
  again. Writes go to the origin before they are answered.
- An SSD that was pulled and is put back is an older state. With two copies it is not used, and the
  pool goes on with one copy until `pool replace-flash`.
- With two copies the operator need do nothing at once, or only restart the daemon. There is only one copy of what is dirty until
  `hearth pool replace-flash OLD NEW` has copied it to another SSD; one that came back may be NEW. The time of that is not in the table;
  `several_flash.rs` tests it.
- An ordered disk (`write-back-ordered`) that loses its SSD in a power cut: the test checks that the origin holds an unbroken run of the guest's
  writes, from the first up to some write and nothing later, and at least those durable at the time `disk show` reports. If the daemon runs on without
  flash, writes reach the origin in any order, and the reported time is withdrawn.
- Times are those of a loaded machine that emulates its guest.
";
