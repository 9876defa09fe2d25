//! What a run counted.

/// Counts of one policy at one size over one workload. Units are blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Outcome {
    /// Blocks read.
    pub reads: u64,
    /// Blocks written.
    pub writes: u64,
    /// Blocks read that were cached when their request came.
    pub read_hits: u64,
    /// Blocks written whose old content was cached.
    pub write_hits: u64,
    /// Of the read hits, those that only prefetch brought in (their first use).
    pub prefetch_hits: u64,
    /// Blocks prefetched.
    pub prefetched: u64,
    /// Blocks prefetched and dropped without a use.
    pub prefetch_wasted: u64,
    /// Blocks prefetched but asked for before they had arrived; counted as misses.
    pub prefetch_late: u64,
    /// Requests to the origin that carried nothing but prefetched blocks.
    pub prefetch_requests: u64,
    /// Missed blocks written to flash.
    pub insertions: u64,
    /// Cached blocks written to flash again to keep them.
    pub reinsertions: u64,
    /// Written blocks put on flash because of the write itself.
    pub updates: u64,
    /// Time the origin spent on reads, those ahead of their use among them, microseconds.
    pub disk_us: u64,
    /// Time it would have spent on them without a cache.
    pub bare_disk_us: u64,
}

impl Outcome {
    /// Read hit ratio; the hit ratio of everything where nothing was read.
    pub fn score(&self) -> f64 {
        if self.reads > 0 {
            ratio(self.read_hits, self.reads)
        } else {
            self.hit_ratio()
        }
    }

    /// Hits among all blocks read and written.
    pub fn hit_ratio(&self) -> f64 {
        ratio(self.read_hits + self.write_hits, self.reads + self.writes)
    }

    /// Hit ratio as [`score`](Self::score), without the hits that prefetch made.
    pub fn demand_score(&self) -> f64 {
        let without = Outcome {
            read_hits: self.read_hits - self.prefetch_hits.min(self.read_hits),
            ..*self
        };
        without.score()
    }

    /// Share of the origin's time for reads that the cache saved; negative if it cost more.
    pub fn saved_disk_time(&self) -> f64 {
        match self.bare_disk_us {
            0 => 0.0,
            bare => 1.0 - self.disk_us as f64 / bare as f64,
        }
    }

    /// What happened after `before`.
    pub fn since(&self, before: &Outcome) -> Outcome {
        Outcome {
            reads: self.reads - before.reads,
            writes: self.writes - before.writes,
            read_hits: self.read_hits - before.read_hits,
            write_hits: self.write_hits - before.write_hits,
            prefetch_hits: self.prefetch_hits - before.prefetch_hits,
            prefetched: self.prefetched - before.prefetched,
            prefetch_wasted: self.prefetch_wasted - before.prefetch_wasted,
            prefetch_late: self.prefetch_late - before.prefetch_late,
            prefetch_requests: self.prefetch_requests - before.prefetch_requests,
            insertions: self.insertions - before.insertions,
            reinsertions: self.reinsertions - before.reinsertions,
            updates: self.updates - before.updates,
            disk_us: self.disk_us - before.disk_us,
            bare_disk_us: self.bare_disk_us - before.bare_disk_us,
        }
    }

    /// Blocks written to flash.
    pub fn flash_writes(&self) -> u64 {
        self.insertions + self.reinsertions + self.updates
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        part as f64 / whole as f64
    }
}
