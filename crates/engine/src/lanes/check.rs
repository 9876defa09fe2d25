//! What lanes keep count of, counted again: see [`crate::check`].

use super::Shared;
use crate::api::DiskId;
use std::collections::BTreeMap;

impl Shared {
    /// The first difference in words, else how many hits are in flight.
    pub fn check(&self) -> Result<u64, String> {
        let mut result = Ok(0);
        let mut n = 0;
        self.lanes.each(|lane| {
            let mut pins = vec![0u32; lane.pins.len().max(self.segments)];
            let mut waits: BTreeMap<usize, u32> = BTreeMap::new();
            for (_, op) in &lane.ops {
                pins[self.segment_of(op.slot)] += 1;
                *waits.entry(op.hit).or_default() += 1;
            }
            let mut hits: BTreeMap<DiskId, u64> = BTreeMap::new();
            for (at, hit) in &lane.hits {
                *hits.entry(hit.r.disk).or_default() += 1;
                for (op, _) in &hit.bad {
                    pins[self.segment_of(op.slot)] += 1;
                }
                if hit.pending != waits.remove(&at).unwrap_or(0) && result.is_ok() {
                    result = Err(format!(
                        "a hit in lane {n} waits for {} reads, not for those there are",
                        hit.pending
                    ));
                }
            }
            let kept = |seg: usize| lane.pins.get(seg).copied().unwrap_or(0);
            if let Some(seg) = (0..pins.len()).find(|seg| kept(*seg) != pins[*seg]) {
                result = Err(format!(
                    "pins of segment {seg} in lane {n}: {} by its count, {} in fact",
                    kept(seg),
                    pins[seg]
                ));
            }
            for (id, counts) in lane.counts.iter().enumerate() {
                let kept = counts.as_ref().map_or(0, |c| c.in_flight);
                let counted = hits.remove(&(id as DiskId)).unwrap_or(0);
                if kept != counted {
                    result = Err(format!(
                        "hits of disk {id} in lane {n}: {kept} by its count, {counted} in fact"
                    ));
                }
            }
            n += 1;
            result = std::mem::replace(&mut result, Ok(0)).map(|sum| sum + lane.hits.len() as u64);
        });
        result
    }
}
