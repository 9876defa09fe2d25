//! The guests: who they are, what their hypervisor and the kernel tell of them, and what follows from two looks.

use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};

use hearth_memory::{Guest, Inside, MemoryConfig};

use crate::kernel::{self, Files};
use crate::libvirt;
use crate::line::{Answer, Line, once};
use crate::qmp::{Qmp, Told};

/// Before a guest that did not answer is asked again.
const AGAIN: Duration = Duration::from_secs(5);
/// Before libvirt is, where it is not there.
const LIBVIRT_AGAIN: Duration = Duration::from_secs(15);
/// What a guest told is believed for so long, while it does not answer.
const FRESH: Duration = Duration::from_secs(3);
/// Statistics that did not change for so long are of the past.
const STALE: Duration = Duration::from_secs(12);
/// Of a core: a guest that keeps so much busy is thought to use all that it takes.
const BUSY: f64 = 0.10;
/// What an idle guest is thought to use of what it takes: its kernel and what runs every minute.
const IDLE_PART: f64 = 0.05;
/// Weight of the newest look in what a guest is thought to use.
const NEWEST: f64 = 0.2;
/// Pages a guest has read back from swap each second, above which it uses what is out.
const FAULTS: f64 = 50.0;

/// How a guest is reached.
#[derive(Debug)]
pub enum Way {
    /// Over its QMP socket.
    Qmp(Line),
    /// Over libvirt.
    Libvirt,
}

/// What is remembered of a guest from look to look.
#[derive(Debug)]
pub struct Known {
    /// How it is reached.
    pub way: Way,
    /// What it told last, and when.
    told: Option<(Instant, Told)>,
    /// What it was asked and has not answered yet.
    asked: Option<Answer<Told>>,
    /// When that failed last, and why.
    failed: Option<(Instant, String)>,
    /// When its statistics changed last, and what its balloon left it then.
    news: Option<(Instant, u64, u64)>,
    swap_in: Option<(Instant, u64, u64)>,
    ticks: Option<(Instant, u64, u64)>,
    part: Option<f64>,
    cpu: f64,
}

impl Known {
    fn new(way: Way) -> Known {
        Known {
            way,
            told: None,
            asked: None,
            failed: None,
            news: None,
            swap_in: None,
            ticks: None,
            part: None,
            cpu: 0.0,
        }
    }

    /// What it told last, as far as that is not of the past.
    pub fn told(&self) -> Option<&Told> {
        let (at, told) = self.told.as_ref()?;
        (at.elapsed() < FRESH).then_some(told)
    }

    /// Asks it, unless it is asked already or failed a moment ago. The answer is not waited for.
    fn ask(&mut self) {
        let Way::Qmp(line) = &self.way else { return };
        let failed = |(at, _): &(Instant, String)| at.elapsed() < AGAIN;
        if self.asked.is_some() || self.failed.as_ref().is_some_and(failed) {
            return;
        }
        match line.ask(Qmp::look) {
            Ok(answer) => self.asked = Some(answer),
            Err(e) => self.failed = Some((Instant::now(), e.to_string())),
        }
    }

    /// Takes its answer, if that comes by `end`.
    fn take(&mut self, end: Instant) {
        let Some(told) = self.asked.as_ref().and_then(|asked| asked.by(end)) else {
            return;
        };
        self.asked = None;
        match told {
            Ok(told) => self.set(told),
            Err(e) => {
                self.told = None;
                self.failed = Some((Instant::now(), e.to_string()));
            }
        }
    }

    fn set(&mut self, told: Told) {
        let before = self.told.as_ref().and_then(|(_, t)| t.pid);
        if before != told.pid {
            // It is another machine under the old name.
            (self.news, self.swap_in, self.ticks) = (None, None, None);
        }
        self.told = Some((Instant::now(), told));
        self.failed = None;
    }

    /// Why nothing is known of it.
    fn silence(&self) -> String {
        match (&self.failed, &self.asked) {
            (Some((_, why)), _) => why.clone(),
            (None, Some(asked)) => asked.late().to_string(),
            (None, None) => "it has told nothing yet".to_owned(),
        }
    }

    /// Its own statistics, as they are now: what its balloon took since they were made is not available any more.
    fn inside(&mut self, told: &Told) -> Option<Inside> {
        let (available, balloon) = (told.available?, told.balloon?);
        let now = Instant::now();
        match self.news {
            Some((_, at, _)) if at == told.at => {}
            // Of the first nobody knows how old they are.
            None if told.at == 0 || wall().abs_diff(told.at) > STALE.as_secs() => return None,
            _ => self.news = Some((now, told.at, balloon)),
        }
        let (since, _, then) = self.news?;
        if since.elapsed() > STALE {
            return None;
        }
        let available = if balloon < then {
            available.saturating_sub(then - balloon)
        } else {
            available
        };
        let swap_in = told.swap_in.map_or(0, |bytes| {
            let (rate, kept) = rate(self.swap_in, bytes, told.at);
            self.swap_in = Some(kept);
            rate
        });
        Some(Inside { available, swap_in })
    }
}

/// Bytes each second between two statistics, which may be the same ones.
fn rate(before: Option<(Instant, u64, u64)>, bytes: u64, at: u64) -> (u64, (Instant, u64, u64)) {
    let now = Instant::now();
    match before {
        Some((_, then, old)) if at > then => {
            (bytes.saturating_sub(old) / (at - then), (now, at, bytes))
        }
        Some(kept) => (0, kept),
        None => (0, (now, at, bytes)),
    }
}

fn wall() -> u64 {
    hearth_events::time::now_ms() / 1000
}

/// All guests.
#[derive(Debug, Default)]
pub struct Guests {
    /// By name.
    pub known: BTreeMap<String, Known>,
    /// What libvirt was asked of all of its guests.
    libvirt: Option<Answer<Vec<(String, Told)>>>,
    /// When it was not there.
    libvirt_gone: Option<Instant>,
    no_libvirt: Option<String>,
}

impl Guests {
    /// Looks at all of them, each by itself: what has not answered by `end` is told as it was a
    /// moment ago, or as not seen. What could not be seen is added to `notes`.
    pub fn look(
        &mut self,
        config: &MemoryConfig,
        files: &Files,
        end: Instant,
        notes: &mut Vec<String>,
    ) -> Vec<Guest> {
        for guest in config.guest.iter().filter(|g| !g.exempt) {
            if let Some(path) = &guest.qmp
                && !self.known.contains_key(&guest.name)
            {
                match Line::new(path) {
                    Ok(line) => {
                        let known = Known::new(Way::Qmp(line));
                        self.known.insert(guest.name.clone(), known);
                    }
                    Err(e) => notes.push(format!("guest {} is not seen: {e}", guest.name)),
                }
            }
        }
        self.known.values_mut().for_each(Known::ask);
        self.look_at_libvirt(config, end);
        if let Some(why) = &self.no_libvirt {
            notes.push(format!("guests of libvirt are not seen: {why}"));
        }
        let mut found = Vec::new();
        for (name, known) in &mut self.known {
            known.take(end);
            match known.told().cloned() {
                Some(told) => found.push(guest(name, known, &told, config, files)),
                None => notes.push(format!("guest {name} is not seen: {}", known.silence())),
            }
        }
        // They are not asked, and not forgotten either.
        let exempt = config.guest.iter().filter(|g| g.exempt);
        for guest in exempt {
            if !found.iter().any(|g| g.name == guest.name) {
                found.push(Guest {
                    name: guest.name.clone(),
                    exempt: true,
                    ..Guest::default()
                });
            }
        }
        found.sort_by(|a, b| a.name.cmp(&b.name));
        found
    }

    fn look_at_libvirt(&mut self, config: &MemoryConfig, end: Instant) {
        let gone = |at: Instant| at.elapsed() < LIBVIRT_AGAIN;
        if config.libvirt && self.libvirt.is_none() && !self.libvirt_gone.is_some_and(gone) {
            self.libvirt = once(libvirt::look).ok();
        }
        let Some(told) = self.libvirt.as_ref().and_then(|asked| asked.by(end)) else {
            return;
        };
        self.libvirt = None;
        match told {
            Ok(domains) => {
                (self.no_libvirt, self.libvirt_gone) = (None, None);
                self.known.retain(|name, known| {
                    matches!(known.way, Way::Qmp(_)) || domains.iter().any(|(d, _)| d == name)
                });
                for (name, told) in domains {
                    let known = self.known.entry(name);
                    let known = known.or_insert_with(|| Known::new(Way::Libvirt));
                    if matches!(known.way, Way::Libvirt) {
                        known.set(told);
                    }
                }
            }
            Err(e) => {
                let why = e.to_string();
                // Where there is no libvirt there is nothing to say.
                let off = e.kind() == io::ErrorKind::NotFound
                    || why.to_lowercase().contains("failed to connect");
                self.libvirt_gone = off.then(Instant::now);
                self.no_libvirt = (!off).then_some(why);
            }
        }
    }
}

fn guest(
    name: &str,
    known: &mut Known,
    told: &Told,
    config: &MemoryConfig,
    files: &Files,
) -> Guest {
    let bounds = config.bounds(name, told.assigned);
    let inside = known.inside(told);
    let pid = told.pid;
    let mut guest = Guest {
        name: name.to_owned(),
        pid,
        assigned: told.assigned,
        balloon: told.balloon,
        inside,
        reporting: told.reporting,
        exempt: config.is_exempt(name),
        minimum: bounds.minimum,
        reserved: bounds.reserved,
        maximum: bounds.maximum,
        share: bounds.share,
        ..Guest::default()
    };
    if let Some(pid) = pid {
        process(&mut guest, pid, known, files);
    }
    guest.cpu = known.cpu;
    guest.active = (guest.used() as f64 * known.part.unwrap_or(1.0)) as u64;
    guest
}

/// What the kernel tells of a guest's process.
fn process(guest: &mut Guest, pid: u32, known: &mut Known, files: &Files) {
    let read = |name: &str| {
        std::fs::read_to_string(files.proc.join(format!("{pid}/{name}"))).unwrap_or_default()
    };
    let status = read("status");
    let kib = |name| kernel::field(&status, name).unwrap_or(0) << 10;
    guest.resident = kib("RssAnon") + kib("RssShmem");
    guest.swapped = kib("VmSwap");
    if let Some(group) = kernel::group_of(files, pid) {
        let text = |name: &str| std::fs::read_to_string(group.join(name)).ok();
        guest.compressed = text("memory.stat").and_then(|t| kernel::field(&t, "zswapped"));
        guest.stalled_ms = text("memory.pressure")
            .and_then(|t| kernel::stalled_us(&t))
            .map(|us| us / 1000);
    }
    let Some((ticks, faults)) = ticks(&read("stat")) else {
        return;
    };
    let now = Instant::now();
    if let Some((then, old_ticks, old_faults)) = known.ticks.replace((now, ticks, faults)) {
        let seconds = now.duration_since(then).as_secs_f64();
        if seconds > 0.0 {
            known.cpu = ticks.saturating_sub(old_ticks) as f64 / per_second() / seconds;
            let faults = faults.saturating_sub(old_faults) as f64 / seconds;
            let part = if faults > FAULTS {
                1.0
            } else {
                (known.cpu / BUSY).clamp(IDLE_PART, 1.0)
            };
            let before = known.part.unwrap_or(part);
            known.part = Some(before + (part - before) * NEWEST);
        }
    }
}

/// Ticks of the processor and major faults, of `/proc/PID/stat`; the name in it may hold anything.
fn ticks(stat: &str) -> Option<(u64, u64)> {
    let rest = &stat[stat.rfind(')')? + 1..];
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let of = |n: usize| fields.get(n)?.parse::<u64>().ok();
    Some((of(11)? + of(12)?, of(9)?))
}

fn per_second() -> f64 {
    // SAFETY: no preconditions.
    let hz = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    if hz > 0 { hz as f64 } else { 100.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_any_name() {
        let stat = "7 (a) b) S 1 1 1 0 -1 4194560 100 0 33 0 20 30 0 0 20 0 3 0 5 6 7";
        assert_eq!(ticks(stat), Some((50, 33)));
        assert_eq!(ticks(""), None);
        assert_eq!(ticks("7 (a) S"), None);
    }

    #[test]
    fn statistics_age() {
        let mut known = Known::new(Way::Libvirt);
        let told = |at, balloon, available| Told {
            at,
            balloon: Some(balloon),
            available: Some(available),
            ..Told::default()
        };
        assert_eq!(known.inside(&told(0, 100, 50)), None, "never");
        assert_eq!(known.inside(&told(wall() - 600, 100, 50)), None, "long ago");
        let now = wall();
        let of = |inside: Option<Inside>| inside.map(|i| i.available);
        assert_eq!(of(known.inside(&told(now, 100, 50))), Some(50));
        assert_eq!(
            of(known.inside(&told(now, 90, 50))),
            Some(40),
            "taken since"
        );
        assert_eq!(of(known.inside(&told(now + 1, 90, 45))), Some(45));
    }
}
