//! One policy over one workload.

use hearth_policy::reference::Kind;

use crate::outcome::Outcome;
use crate::workload::Workload;

/// What can be run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// One of the policies of others.
    Reference(Kind),
}

/// Runs a policy with a cache of `capacity` blocks, cold at first.
pub fn run(policy: Policy, load: &Workload, capacity: usize) -> Outcome {
    match policy {
        Policy::Reference(kind) => reference(kind, load, capacity),
    }
}

fn reference(kind: Kind, load: &Workload, capacity: usize) -> Outcome {
    let mut cache = kind.build(capacity, load.unique, &load.ids);
    let mut out = Outcome::default();
    let mut at = 0;
    for request in &load.requests {
        let n = request.count as usize;
        let mut hits = 0u64;
        for id in &load.ids[at..at + n] {
            hits += u64::from(cache.access(*id));
        }
        at += n;
        let misses = n as u64 - hits;
        out.insertions += misses;
        if request.write {
            out.writes += n as u64;
            out.write_hits += hits;
            out.updates += hits;
        } else {
            out.reads += n as u64;
            out.read_hits += hits;
        }
    }
    out.reinsertions = cache.moves();
    out
}
