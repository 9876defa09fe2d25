//! One policy over one workload, and many in parallel.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use hearth_policy::reference::Kind;
use hearth_policy::{Budget, Config, Rules};

use crate::cache::{Cache, WriteMode};
use crate::device::{Arm, Device, US};
use crate::outcome::Outcome;
use crate::twin::{Disk, Player};
use crate::workload::{Request, Workload};

/// What can be run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Hearth's own.
    Hearth,
    /// The same without prefetch.
    HearthDemand,
    /// One of the policies of others.
    Reference(Kind),
}

impl Policy {
    /// All, ours first.
    pub fn all() -> Vec<Policy> {
        let mut all = vec![Policy::Hearth, Policy::HearthDemand];
        all.extend(Kind::ALL.map(Policy::Reference));
        all
    }

    /// Its name in tables and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Hearth => "hearth",
            Policy::HearthDemand => "hearth-demand",
            Policy::Reference(kind) => kind.name(),
        }
    }

    /// The policy of that name.
    pub fn named(name: &str) -> Option<Policy> {
        Policy::all().into_iter().find(|p| p.name() == name)
    }
}

/// What Hearth's own policy runs in.
#[derive(Clone, Debug, Default)]
pub enum Model {
    /// A log without segments and a disk that answers after [`Settings::latency_us`], to compare rules.
    #[default]
    Rules,
    /// What the engine makes of them.
    Engine(Disk),
}

/// How to run.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What Hearth's own policy runs in.
    pub model: Model,
    /// What happens to written data; the policies of others know only
    /// [`WriteMode::Through`]: each write renews flash.
    pub write_mode: WriteMode,
    /// What may be written to flash.
    pub budget: Budget,
    /// Time a prefetched block takes to arrive, microseconds of the trace's time.
    pub latency_us: u64,
    /// Rules that stay; chosen by miniatures if `None`.
    pub rules: Option<Rules>,
    /// Blocks of the RAM stage, as a share of the cache; chosen while it runs if `None`.
    pub stage: Option<f64>,
    /// Does an overwritten copy keep its place until the log's end has passed it?
    pub dead_space: bool,
    /// Parts of the trace for which hits are counted apart, to show how a policy adapts.
    pub parts: usize,
}

impl Settings {
    /// Blocks of the RAM stage of a cache of `blocks`, at least and at most.
    pub(crate) fn stage_of(&self, blocks: usize, prefetch: bool) -> (usize, usize) {
        match self.stage {
            None => (
                Config::stage_of(blocks, prefetch),
                Config::stage_most_of(blocks),
            ),
            Some(share) => {
                let ram = ((blocks as f64 * share).round() as usize).max(1);
                (ram, ram)
            }
        }
    }
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            model: Model::Rules,
            write_mode: WriteMode::Through,
            budget: Budget::unlimited(),
            latency_us: 0,
            rules: None,
            stage: None,
            dead_space: true,
            parts: 1,
        }
    }
}

/// Runs a policy with a cache of `capacity` blocks, cold at first. Returns what it did in all
/// and in each part of the trace.
pub fn run(
    policy: Policy,
    load: &Workload,
    capacity: usize,
    settings: &Settings,
) -> (Outcome, Vec<Outcome>) {
    match policy {
        Policy::Reference(kind) => {
            let mut cache = kind.build(capacity, load.unique, &load.ids);
            let (mut out, mut at, mut misses) = (Outcome::default(), 0, 0);
            let device = match &settings.model {
                Model::Rules => Device::INSTANT,
                Model::Engine(disk) => disk.device,
            };
            let (mut arm, mut bare) = (Arm::new(device), Arm::new(device));
            in_parts(load, settings.parts, |request| {
                let n = request.count as usize;
                let (mut hits, mut run) = (0u64, 0);
                for (key, id) in (request.block..).zip(&load.ids[at..at + n]) {
                    let hit = cache.access(*id);
                    hits += u64::from(hit);
                    if !hit && !request.write {
                        run += 1;
                    } else if run > 0 {
                        arm.serve(0, key - run, run);
                        run = 0;
                    }
                }
                if run > 0 {
                    arm.serve(0, request.block + n as u64 - run, run);
                }
                if !request.write {
                    bare.serve(0, request.block, n as u64);
                }
                out.disk_us = arm.busy_ns / US;
                out.bare_disk_us = bare.busy_ns / US;
                at += n;
                misses += n as u64 - hits;
                out.insertions = misses - cache.bypassed();
                out.reinsertions = cache.moves();
                if request.write {
                    out.writes += n as u64;
                    out.write_hits += hits;
                    out.updates += hits;
                } else {
                    out.reads += n as u64;
                    out.read_hits += hits;
                }
                out
            })
        }
        Policy::Hearth | Policy::HearthDemand if matches!(settings.model, Model::Engine(_)) => {
            let Model::Engine(disk) = &settings.model else {
                return (Outcome::default(), Vec::new());
            };
            let setup = disk.setup(policy == Policy::Hearth, capacity, settings);
            let mut player = Player::new(setup, disk.depth);
            let (_, parts) = in_parts(load, settings.parts, |request| player.play(request));
            (player.end(), parts)
        }
        Policy::Hearth | Policy::HearthDemand => {
            let prefetch = policy == Policy::Hearth;
            let (ram, ram_most) = settings.stage_of(capacity, prefetch);
            let config = Config {
                ram,
                ram_most,
                flash: capacity.saturating_sub(ram).max(1),
                rules: settings.rules,
                prefetch,
                budget: settings.budget.clone(),
                dead_space: settings.dead_space,
            };
            let mut cache = Cache::new(config, settings.write_mode);
            cache.latency_us = settings.latency_us;
            in_parts(load, settings.parts, |request| {
                cache.request(request);
                cache.out
            })
        }
    }
}

/// Plays all requests; `step` returns the running totals.
fn in_parts(
    load: &Workload,
    parts: usize,
    mut step: impl FnMut(&Request) -> Outcome,
) -> (Outcome, Vec<Outcome>) {
    let parts = parts.max(1);
    let each = load.requests.len().div_ceil(parts).max(1);
    let (mut total, mut before) = (Outcome::default(), Outcome::default());
    let mut out = Vec::with_capacity(parts);
    for chunk in load.requests.chunks(each) {
        for request in chunk {
            total = step(request);
        }
        out.push(total.since(&before));
        before = total;
    }
    (total, out)
}

/// One line of a comparison.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Row {
    /// The trace.
    pub trace: String,
    /// Cache size as a share of the trace's different blocks; 0 if it was given in blocks.
    pub fraction: f64,
    /// Cache size in blocks.
    pub blocks: usize,
    /// The policy.
    pub policy: &'static str,
    /// Read hit ratio, or that of everything where nothing is read.
    pub score: f64,
    /// Hit ratio of reads and writes together.
    pub hit_ratio: f64,
    /// Blocks written to flash.
    pub flash_writes: u64,
    /// Share of the origin's time for reads that was saved: seeks and transfer.
    pub disk_time_saved: f64,
    /// The counts behind it.
    pub outcome: Outcome,
    /// Score in each part of the trace, if parts were asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<f64>,
}

/// A cache size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Size {
    /// A share of the trace's different blocks.
    Fraction(f64),
    /// So many blocks.
    Blocks(usize),
}

/// Runs every policy at every size over every workload, on `threads` threads. Rows come in the
/// order of their arguments, whatever ran first.
///
/// `told` is called at the start and after each row, on any thread, with how many are done and how
/// many there are.
pub fn matrix(
    loads: &[Workload],
    sizes: &[Size],
    policies: &[Policy],
    settings: &Settings,
    threads: usize,
    told: impl Fn(usize, usize) + Sync,
) -> Vec<Row> {
    let mut jobs = Vec::new();
    for load in loads {
        for size in sizes {
            for policy in policies {
                jobs.push((load, *size, *policy, None));
            }
        }
    }
    let done = AtomicUsize::new(0);
    told(0, jobs.len());
    let count = jobs.len();
    in_parallel(&mut jobs, threads, |(load, size, policy, row)| {
        *row = Some(one(load, *size, *policy, settings));
        told(done.fetch_add(1, Ordering::Relaxed) + 1, count);
    });
    jobs.into_iter().filter_map(|job| job.3).collect()
}

/// Runs `job` once for each element, on `threads` threads, at least one.
pub fn in_parallel<T: Send>(all: &mut [T], threads: usize, job: impl Fn(&mut T) + Sync) {
    let threads = threads.clamp(1, all.len().max(1));
    let next = Mutex::new(all.iter_mut());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let mut next = next.lock().unwrap_or_else(PoisonError::into_inner);
                    let Some(one) = next.next() else { return };
                    drop(next);
                    job(one);
                }
            });
        }
    });
}

fn one(load: &Workload, size: Size, policy: Policy, settings: &Settings) -> Row {
    let (fraction, blocks) = match size {
        Size::Fraction(f) => (f, load.capacity(f)),
        Size::Blocks(n) => (0.0, n.max(1)),
    };
    let (outcome, parts) = run(policy, load, blocks, settings);
    Row {
        trace: load.name.clone(),
        fraction,
        blocks,
        policy: policy.name(),
        score: outcome.score(),
        hit_ratio: outcome.hit_ratio(),
        flash_writes: outcome.flash_writes(),
        disk_time_saved: outcome.saved_disk_time(),
        outcome,
        parts: if settings.parts > 1 {
            parts.iter().map(Outcome::score).collect()
        } else {
            Vec::new()
        },
    }
}
