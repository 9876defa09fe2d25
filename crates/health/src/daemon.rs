//! What the daemon itself tells, judged: its pool, its disks, its threads.
//!
//! The figures are those of its API, as far as they matter here.

use crate::model::{Item, Kind, Reason};

/// Limits an operator may set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Seconds that dirty data may wait on flash.
    pub dirty_age: f64,
    /// Share of the flash that may be dirty.
    pub dirty_share: f64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            dirty_age: 4.0 * 3600.0,
            dirty_share: 0.5,
        }
    }
}

/// Whether the daemon is there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Presence {
    /// It answers.
    #[default]
    Up,
    /// It listens and does not answer; what was heard instead.
    Hanging(String),
    /// This user may not ask it; why, and what helps.
    Hidden(String),
    /// It is not there, and was not told to stop.
    Down(String),
    /// Somebody stopped it.
    Stopped,
}

/// The daemon.
#[derive(Clone, Debug, Default)]
pub struct Daemon {
    /// Whether it is there.
    pub presence: Presence,
    /// Threads that do not come round: name and seconds.
    pub stuck: Vec<(String, u64)>,
    /// Starts within the last ten minutes.
    pub starts: u64,
}

/// Starts within ten minutes from which it is a loop.
pub const LOOP: u64 = 3;

impl Daemon {
    /// What is to be said of it.
    pub fn judge(&self) -> Item {
        let mut reasons = Vec::new();
        match &self.presence {
            Presence::Up => {}
            Presence::Hanging(why) => reasons.push(Reason::failed(
                "daemon-hanging",
                format!("the daemon does not answer: {why}"),
                "see its log and whether an origin or the flash hangs; what guests have flushed is safe",
            )),
            Presence::Hidden(why) => reasons.push(Reason::unknown(
                "daemon-hidden",
                format!("this user cannot ask the daemon: {why}"),
                "run this with sudo, or as a member of the daemon's control group",
            )),
            Presence::Down(why) => reasons.push(Reason::failed(
                "daemon-down",
                format!("the daemon is not there, and no disk is served: {why}"),
                "see `journalctl -u hearth`, and start it",
            )),
            Presence::Stopped => reasons.push(Reason::unknown(
                "daemon-stopped",
                "the daemon was stopped, and no disk is served",
                "start it",
            )),
        }
        for (thread, seconds) in &self.stuck {
            reasons.push(Reason::failed(
                "thread-stuck",
                format!("thread {thread} has not come round for {seconds} s, and its clients get no answers"),
                "see whether an origin's device or mount, or the flash, hangs",
            ));
        }
        if self.starts >= LOOP {
            reasons.push(Reason::failed(
                "daemon-loop",
                format!(
                    "the daemon started {} times within ten minutes",
                    self.starts
                ),
                "see `hearth events --since 1h` and its log for why it ends",
            ));
        }
        Item::new(Kind::Daemon, "hearth", reasons)
    }
}

/// The pool.
#[derive(Clone, Debug, Default)]
pub struct Pool {
    /// Its label, or number.
    pub name: String,
    /// The API's word for its state.
    pub state: String,
    /// What the daemon says of the flash.
    pub notices: Vec<String>,
    /// The flash failed.
    pub flash_failed: bool,
    /// Failed operations on flash within the hour.
    pub flash_errors_hour: u64,
    /// Bytes for cached data, if all of it is dirty.
    pub capacity: u64,
    /// Bytes the origins do not have yet.
    pub dirty: u64,
    /// How much of the endurance budget is used up lately, 0 to 1.
    pub endurance_used: f64,
    /// Blocks on flash within the day that did not match their checksums and were fetched again.
    pub bad_blocks_day: u64,
    /// Bytes of it that are set aside for the kernel's swap.
    pub swap: u64,
    /// Why the host's swap file cannot be read back.
    pub swap_trouble: Option<String>,
    /// Its flash devices.
    pub devices: Vec<FlashDevice>,
}

/// A flash device of a pool.
#[derive(Clone, Debug, Default)]
pub struct FlashDevice {
    /// Where it is.
    pub path: String,
    /// It answers much more slowly than the others.
    pub slow: bool,
    /// It is lost, and another one has what was on it.
    pub lost: bool,
    /// Operations on it that failed since the daemon started.
    pub errors: u64,
}

impl Pool {
    /// What is to be said of it.
    pub fn judge(&self, limits: &Limits) -> Item {
        let mut reasons = Vec::new();
        let why = match self.notices.join("; ") {
            none if none.is_empty() => String::new(),
            why => format!(": {why}"),
        };
        if self.flash_failed {
            reasons.push(Reason::failed(
                "flash-failed",
                format!("the flash has failed, and disks go on from their origins{why}"),
                "see `hearth pool show`: mostly another device takes its place with `hearth pool adopt-flash`",
            ));
        } else if matches!(self.state.as_str(), "cache-off" | "leaving") {
            reasons.push(Reason::failed(
                "cache-off",
                format!("the cache is off, and disks go on from their origins{why}"),
                "see `hearth pool show`",
            ));
        } else {
            for notice in &self.notices {
                reasons.push(Reason::note("flash-notice", notice.clone(), ""));
            }
        }
        let in_pool = (self.flash_failed && self.swap > 0)
            .then_some("a part of the flash that failed is swap of this host");
        // The kernel causes this; Hearth cannot prevent it.
        if let Some(why) = self.swap_trouble.as_deref().or(in_pool) {
            reasons.push(Reason::failed(
                "swap-on-failed-flash",
                format!("{why}; a program, or a virtual machine, that touches a page swapped out there is killed by the kernel, or hangs"),
                "see `dmesg` for read errors on the swap device; `hearth swap off` reads back what can be read",
            ));
        }
        if self.flash_errors_hour > 0 && !self.flash_failed {
            reasons.push(Reason::degraded(
                "flash-errors",
                format!(
                    "{} operations on the flash failed within the hour",
                    self.flash_errors_hour
                ),
                "see the kernel's log and the device's health",
            ));
        }
        // Which one of several it was.
        let failing = self.devices.iter().filter(|d| d.errors > 0);
        for device in failing.filter(|_| self.devices.len() > 1) {
            reasons.push(Reason::note(
                "flash-device-errors",
                format!(
                    "{} operations on {} failed since the daemon started",
                    device.errors, device.path
                ),
                "see the kernel's log and the device's health",
            ));
        }
        // One that is lost is not asked any more, so how fast it was does not matter.
        for device in self.devices.iter().filter(|d| d.lost) {
            reasons.push(Reason::degraded(
                "flash-device-lost",
                format!(
                    "{} is lost: what was on it is on one device only, and the next one that dies takes what is dirty with it",
                    device.path
                ),
                "put another one in its place: `hearth pool replace-flash`",
            ));
        }
        for device in self.devices.iter().filter(|d| d.slow && !d.lost) {
            reasons.push(Reason::degraded(
                "flash-device-slow",
                format!(
                    "{} answers much more slowly than the other flash devices, and gets no more than it must",
                    device.path
                ),
                "see the device's health and what else uses it; an SSD that stays slow is best replaced",
            ));
        }
        if self.bad_blocks_day > 0 {
            reasons.push(Reason::degraded(
                "bad-blocks",
                format!("{} blocks on flash did not match their checksums within a day, and were fetched again", self.bad_blocks_day),
                "if they grow, the flash device is failing: replace it",
            ));
        }
        let share = self.dirty as f64 / self.capacity.max(1) as f64;
        if share >= limits.dirty_share {
            reasons.push(Reason::degraded(
                "destage-behind",
                format!(
                    "{:.0} % of the flash waits to be written to the origins, which do not keep up",
                    share * 100.0
                ),
                "raise --destage-rate, or take load off the origins",
            ));
        }
        if self.endurance_used >= 0.95 {
            reasons.push(Reason::note(
                "endurance-used",
                "the endurance budget is used up for now by what the cache writes and what is swapped out, and fewer reads are cached",
                "if that stays so, raise --endurance or give the pool more flash; `hearth swap show` says how much is swapped out",
            ));
        }
        Item::new(Kind::Pool, &self.name, reasons)
    }
}

/// A leg of a mirrored origin.
#[derive(Clone, Debug, Default)]
pub struct Leg {
    /// What it is, as it was given.
    pub origin: String,
    /// The API's word for its state.
    pub state: String,
    /// Bytes it still has to get.
    pub behind: u64,
    /// Why it is out.
    pub reason: String,
}

/// A disk.
#[derive(Clone, Debug, Default)]
pub struct Disk {
    /// Its name.
    pub name: String,
    /// Its origin.
    pub origin: String,
    /// The API's word for its state.
    pub state: String,
    /// Why it is waiting or refused, and what to do.
    pub reason: Option<(String, String)>,
    /// Why the origin's server is not connected, and whether requests fail for it.
    pub unconnected: Option<(String, bool)>,
    /// Why nothing can be written back.
    pub cannot_write_back: Option<String>,
    /// Two clients wrote it in turn lately: which.
    pub two_writers: Option<String>,
    /// The legs of a mirror.
    pub legs: Vec<Leg>,
    /// Ranges that were lost.
    pub lost_ranges: u64,
    /// Bytes the origin does not have yet.
    pub dirty: u64,
    /// Seconds since it last had nothing dirty.
    pub dirty_for: f64,
    /// Bytes written back within the hour.
    pub destaged_hour: u64,
    /// Requests answered with an error within five minutes.
    pub errors_lately: u64,
    /// Failed operations on the origin within the hour.
    pub origin_errors_hour: u64,
}

/// Two clients that wrote the same disk or file in turn.
pub(crate) fn two_writers(which: &str) -> Reason {
    Reason::degraded(
        "two-clients-write",
        which,
        "stop one of them and check the file system",
    )
}

impl Disk {
    /// What is to be said of it.
    pub fn judge(&self, limits: &Limits) -> Item {
        let mut reasons = Vec::new();
        let (why, remedy) = self.reason.clone().unwrap_or_default();
        if matches!(self.state.as_str(), "waiting" | "refused" | "fenced") {
            let remedy = match remedy.as_str() {
                "" => format!("see `hearth disk show {}`", self.name),
                remedy => remedy.to_owned(),
            };
            reasons.push(Reason::failed(
                &format!("disk-{}", self.state),
                format!("the disk is not served: {why}"),
                remedy,
            ));
        }
        if self.lost_ranges > 0 {
            reasons.push(Reason::failed(
                "data-lost",
                format!("{} ranges were lost with the flash", self.lost_ranges),
                format!(
                    "`hearth disk show {}` lists them; restore them, or `hearth disk accept-loss`",
                    self.name
                ),
            ));
        }
        if let Some((why, failing)) = &self.unconnected {
            let what = format!("the origin {} is not connected: {why}", self.origin);
            let remedy = "see to the server and the network; it is tried again by itself";
            reasons.push(if *failing {
                Reason::failed("origin-lost", what, remedy)
            } else {
                Reason::degraded("origin-lost", what, remedy)
            });
        }
        if let Some(why) = &self.cannot_write_back {
            reasons.push(Reason::degraded(
                "write-back-failing",
                format!("what is dirty cannot be written back: {why}"),
                "see to the origin; nothing is lost while the flash lives",
            ));
        }
        if let Some(which) = &self.two_writers {
            reasons.push(two_writers(which));
        }
        self.judge_legs(&mut reasons);
        // A disk that is written all the time is never clean. But what has passed to the origin since tells that
        // nothing old is left.
        let passed = self.destaged_hour as f64 * (limits.dirty_age / 3600.0);
        if self.dirty > 0 && self.dirty_for > limits.dirty_age && passed < self.dirty as f64 {
            reasons.push(Reason::degraded(
                "dirty-old",
                format!(
                    "data has waited on flash for {:.1} hours without reaching the origin",
                    self.dirty_for / 3600.0
                ),
                format!(
                    "see whether the origin keeps up; `hearth disk flush {}`",
                    self.name
                ),
            ));
        }
        if self.errors_lately > 0 {
            reasons.push(Reason::degraded(
                "errors",
                format!("{} requests failed within five minutes", self.errors_lately),
                format!("see `hearth events --disk {} --since 1h`", self.name),
            ));
        }
        if self.origin_errors_hour > 0 {
            reasons.push(Reason::degraded(
                "origin-errors",
                format!(
                    "{} operations on the origin failed within the hour",
                    self.origin_errors_hour
                ),
                "see the kernel's log, or that of the origin's server",
            ));
        }
        Item::new(Kind::Disk, &self.name, reasons).about(&self.origin)
    }

    fn judge_legs(&self, reasons: &mut Vec<Reason>) {
        let out = |leg: &&Leg| leg.state == "out";
        let none_left = !self.legs.is_empty() && self.legs.iter().all(|leg| out(&leg));
        for leg in self.legs.iter().filter(out) {
            let what = format!("the leg {} is out: {}", leg.origin, leg.reason);
            let remedy = format!(
                "put it right, or `hearth disk mirror {}` another",
                self.name
            );
            reasons.push(if none_left {
                Reason::failed("leg-out", what, remedy)
            } else {
                Reason::degraded("leg-out", what, remedy)
            });
        }
        for leg in self.legs.iter().filter(|leg| leg.state == "resyncing") {
            let mib = leg.behind as f64 / f64::from(1 << 20);
            reasons.push(Reason::rebuilding(
                "leg-resyncing",
                format!(
                    "the leg {} gets what it lacks: {mib:.0} MiB left",
                    leg.origin
                ),
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Condition;

    fn disk(change: impl FnOnce(&mut Disk)) -> (Condition, String) {
        let mut disk = Disk {
            name: "vm1".to_owned(),
            state: "attached".to_owned(),
            ..Disk::default()
        };
        change(&mut disk);
        let item = disk.judge(&Limits::default());
        let code = item
            .reasons
            .first()
            .map_or(String::new(), |r| r.code.clone());
        (item.condition, code)
    }

    #[test]
    fn a_disk_in_each_of_its_troubles() {
        let is = |condition, code: &str| (condition, code.to_owned());
        assert_eq!(disk(|_| {}), is(Condition::Healthy, ""));
        let waiting = |d: &mut Disk| {
            d.state = "waiting".to_owned();
            d.reason = Some(("gone".to_owned(), String::new()));
        };
        assert_eq!(disk(waiting), is(Condition::Failed, "disk-waiting"));
        assert_eq!(
            disk(|d| d.lost_ranges = 1),
            is(Condition::Failed, "data-lost")
        );
        assert_eq!(
            disk(|d| d.two_writers = Some("a and b".to_owned())),
            is(Condition::Degraded, "two-clients-write")
        );
        let link = |failing| move |d: &mut Disk| d.unconnected = Some(("gone".to_owned(), failing));
        assert_eq!(disk(link(false)), is(Condition::Degraded, "origin-lost"));
        assert_eq!(disk(link(true)), is(Condition::Failed, "origin-lost"));
        let full = |d: &mut Disk| d.cannot_write_back = Some("no space".to_owned());
        assert_eq!(disk(full), is(Condition::Degraded, "write-back-failing"));
        assert_eq!(
            disk(|d| d.errors_lately = 2),
            is(Condition::Degraded, "errors")
        );
        assert_eq!(
            disk(|d| d.origin_errors_hour = 2),
            is(Condition::Degraded, "origin-errors")
        );
    }

    #[test]
    fn old_dirty_data_is_told_from_a_disk_that_is_always_written() {
        let busy = |d: &mut Disk| {
            (d.dirty, d.dirty_for, d.destaged_hour) = (1 << 30, 1e6, 1 << 30);
        };
        assert_eq!(disk(busy).0, Condition::Healthy);
        let stays = |d: &mut Disk| (d.dirty, d.dirty_for) = (1 << 30, 5.0 * 3600.0);
        assert_eq!(disk(stays).1, "dirty-old");
        let young = |d: &mut Disk| (d.dirty, d.dirty_for) = (1 << 30, 3600.0);
        assert_eq!(disk(young).0, Condition::Healthy);
    }

    #[test]
    fn a_mirror_lives_on_one_leg() {
        let leg = |state: &str| Leg {
            origin: format!("/{state}"),
            state: state.to_owned(),
            ..Leg::default()
        };
        let legs = |states: &[&str]| {
            let legs = states.iter().map(|s| leg(s)).collect();
            disk(|d| d.legs = legs).0
        };
        assert_eq!(legs(&["current", "current"]), Condition::Healthy);
        assert_eq!(legs(&["current", "checking"]), Condition::Healthy);
        assert_eq!(legs(&["current", "resyncing"]), Condition::Rebuilding);
        assert_eq!(legs(&["current", "out"]), Condition::Degraded);
        assert_eq!(legs(&["out", "out"]), Condition::Failed);
    }

    #[test]
    fn a_pool_in_each_of_its_troubles() {
        let pool = |change: &dyn Fn(&mut Pool)| {
            let mut pool = Pool {
                capacity: 100,
                state: "serving".to_owned(),
                ..Pool::default()
            };
            change(&mut pool);
            pool.judge(&Limits::default())
        };
        assert_eq!(pool(&|_| {}).condition, Condition::Healthy);
        assert_eq!(
            pool(&|p| p.flash_failed = true).reasons[0].code,
            "flash-failed"
        );
        let swapped = pool(&|p| (p.flash_failed, p.swap) = (true, 1));
        assert_eq!(swapped.reasons.len(), 2);
        assert_eq!(swapped.reasons[1].code, "swap-on-failed-flash");
        assert_eq!(pool(&|p| p.swap = 1).condition, Condition::Healthy);
        let file = pool(&|p| p.swap_trouble = Some("swap file /f cannot be read".to_owned()));
        assert_eq!(file.reasons.len(), 1);
        assert_eq!(file.reasons[0].code, "swap-on-failed-flash");
        assert!(file.reasons[0].what.starts_with("swap file /f"));
        assert_eq!(
            pool(&|p| p.state = "cache-off".to_owned()).condition,
            Condition::Failed
        );
        assert_eq!(pool(&|p| p.dirty = 60).reasons[0].code, "destage-behind");
        assert_eq!(
            pool(&|p| p.bad_blocks_day = 1).condition,
            Condition::Degraded
        );
        let devices = |slow: bool, errors: u64| {
            move |p: &mut Pool| {
                let device = |slow, errors| FlashDevice {
                    path: "/dev/x".to_owned(),
                    slow,
                    errors,
                    lost: false,
                };
                p.devices = vec![device(false, 0), device(slow, errors)];
            }
        };
        let slow = pool(&devices(true, 0));
        assert_eq!(slow.reasons[0].code, "flash-device-slow");
        assert_eq!(slow.condition, Condition::Degraded);
        let lost = pool(&|p| {
            devices(true, 0)(p);
            p.devices[1].lost = true;
        });
        let codes: Vec<_> = lost.reasons.iter().map(|r| &*r.code).collect();
        assert_eq!(
            (codes, lost.condition),
            (vec!["flash-device-lost"], Condition::Degraded)
        );
        // Long ago, perhaps.
        let errors = pool(&devices(false, 3));
        assert_eq!(errors.reasons[0].code, "flash-device-errors");
        assert_eq!(errors.condition, Condition::Healthy);
        assert_eq!(
            pool(&|p| p.notices = vec!["on nfs".to_owned()]).condition,
            Condition::Healthy
        );
        assert_eq!(
            pool(&|p| p.endurance_used = 1.0).condition,
            Condition::Healthy
        );
    }

    #[test]
    fn a_daemon_that_was_stopped_is_no_failure() {
        let judged = |presence| {
            let daemon = Daemon {
                presence,
                ..Daemon::default()
            };
            daemon.judge().condition
        };
        assert_eq!(judged(Presence::Up), Condition::Healthy);
        assert_eq!(judged(Presence::Stopped), Condition::Unknown);
        assert_eq!(judged(Presence::Down("x".to_owned())), Condition::Failed);
        assert_eq!(judged(Presence::Hanging("x".to_owned())), Condition::Failed);
        let looping = Daemon {
            starts: 3,
            ..Daemon::default()
        };
        assert_eq!(looping.judge().reasons[0].code, "daemon-loop");
    }
}
