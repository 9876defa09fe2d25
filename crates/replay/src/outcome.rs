//! What came out of a replay.

use hdrhistogram::Histogram;
use hearth_policy::Percentiles;
use serde::Serialize;

/// Intervals of the timeline; when they are used up, two become one.
const SLOTS: usize = 120;

/// Percentiles being measured: 1 µs to 1 h, three digits.
pub(crate) struct Measured(Histogram<u64>);

impl Measured {
    pub(crate) fn new() -> Measured {
        // Constant bounds within the library's limits.
        let mut h =
            Histogram::new_with_bounds(1, 3_600_000_000_000, 3).expect("constant bounds are valid");
        h.auto(false);
        Measured(h)
    }

    pub(crate) fn add(&mut self, ns: u64) {
        self.0.saturating_record(ns.max(1));
    }

    pub(crate) fn sum(&self) -> Percentiles {
        let (h, us) = (&self.0, |ns: f64| ns / 1000.0);
        Percentiles::of(h.len(), us(h.mean()), us(h.max() as f64), |share| {
            us(h.value_at_quantile(share) as f64)
        })
    }
}

/// A piece of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Slot {
    /// Requests that ended in it.
    pub requests: u64,
    /// Bytes they moved.
    pub bytes: u64,
    /// Their mean latency, microseconds.
    pub mean_us: f64,
}

#[derive(Clone, Copy, Default)]
struct Raw {
    requests: u64,
    bytes: u64,
    ns: u64,
}

/// The timeline being made.
pub(crate) struct Timeline {
    slots: Vec<Raw>,
    width_ns: u64,
}

impl Timeline {
    pub(crate) fn new() -> Timeline {
        Timeline {
            slots: Vec::new(),
            width_ns: 250_000_000,
        }
    }

    pub(crate) fn add(&mut self, since_start_ns: u64, bytes: u64, latency_ns: u64) {
        while (since_start_ns / self.width_ns) as usize >= SLOTS {
            self.slots = self
                .slots
                .chunks(2)
                .map(|pair| {
                    pair.iter().fold(Raw::default(), |a, b| Raw {
                        requests: a.requests + b.requests,
                        bytes: a.bytes + b.bytes,
                        ns: a.ns + b.ns,
                    })
                })
                .collect();
            self.width_ns *= 2;
        }
        let at = (since_start_ns / self.width_ns) as usize;
        if self.slots.len() <= at {
            self.slots.resize(at + 1, Raw::default());
        }
        let slot = &mut self.slots[at];
        slot.requests += 1;
        slot.bytes += bytes;
        slot.ns += latency_ns;
    }

    pub(crate) fn slots(&self) -> (f64, Vec<Slot>) {
        let slots = self
            .slots
            .iter()
            .map(|raw| Slot {
                requests: raw.requests,
                bytes: raw.bytes,
                mean_us: raw.ns as f64 / 1000.0 / raw.requests.max(1) as f64,
            })
            .collect();
        (self.width_ns as f64 / 1e9, slots)
    }
}

/// A sector that was not what it should be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Mismatch {
    /// Its first byte.
    pub offset: u64,
    /// What was found instead of what.
    pub what: String,
}

/// What verification found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Verified {
    /// Sectors read that this replay had written, and compared.
    pub sectors: u64,
    /// Sectors that were not what they should be.
    pub wrong: u64,
    /// The first of these.
    pub mismatches: Vec<Mismatch>,
    /// Sectors written that were too many to be remembered, so not compared.
    pub untracked: u64,
}

/// What came out.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Outcome {
    /// Requests played.
    pub requests: u64,
    /// Requests of the trace the target does not understand, left out.
    pub skipped: u64,
    /// Requests answered with an error; they are in no latency and no count of bytes.
    pub errors: u64,
    /// The first error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_error: Option<String>,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Seconds it took.
    pub seconds: f64,
    /// Seconds the trace took when it was recorded, as far as it was played.
    pub trace_seconds: f64,
    /// From sending to the answer: reads.
    pub reads: Percentiles,
    /// From sending to the answer: writes.
    pub writes: Percentiles,
    /// From when it was due to the answer, all requests; only with the original timing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response: Option<Percentiles>,
    /// Requests sent more than a millisecond after they were due.
    pub late: u64,
    /// Longest such delay, seconds.
    pub lag_max_seconds: f64,
    /// Seconds of one interval of the timeline.
    pub interval_seconds: f64,
    /// How it went over time.
    pub timeline: Vec<Slot>,
    /// What verification found, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verified: Option<Verified>,
    /// Requests that were in flight and given up, after it was called off.
    pub unanswered: u64,
    /// It was called off before the end.
    pub interrupted: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_replay_has_a_short_timeline() {
        let mut t = Timeline::new();
        for second in 0..10_000u64 {
            t.add(second * 1_000_000_000, 4096, 1000);
        }
        let (width, slots) = t.slots();
        assert!(slots.len() <= SLOTS && width >= 10_000.0 / SLOTS as f64);
        assert_eq!(slots.iter().map(|s| s.requests).sum::<u64>(), 10_000);
        assert!((slots[0].mean_us - 1.0).abs() < 1e-9);
    }

    #[test]
    fn nothing_measured_is_no_number() {
        assert_eq!(Measured::new().sum(), Percentiles::default());
    }
}
