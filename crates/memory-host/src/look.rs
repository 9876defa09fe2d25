//! One look at everything.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use hearth_memory::{MemoryConfig, Seen};

use crate::guests::Guests;
use crate::kernel::{self, Files};
use crate::line::PATIENCE;

/// Where things are looked for.
#[derive(Clone, Debug, Default)]
pub struct Places {
    pub(crate) files: Files,
}

/// The host alone, for whom no controller looks: its guests are not asked, and how fast is swapped takes two looks.
pub fn host() -> Result<Seen, String> {
    Files::default().host().map(|(seen, _)| seen)
}

/// Who looks, and remembers what a rate needs.
#[derive(Debug)]
pub struct Eyes {
    pub(crate) config: MemoryConfig,
    pub(crate) places: Places,
    pub(crate) guests: Guests,
    /// Up to where processes were swapped out.
    pub(crate) out_to: BTreeMap<u32, u64>,
    began: Instant,
    /// What was read back and swapped out by then.
    swapped: Option<(Instant, [u64; 2])>,
}

impl Eyes {
    /// With these settings.
    pub fn new(config: MemoryConfig, places: Places) -> Eyes {
        Eyes {
            config,
            places,
            guests: Guests::default(),
            out_to: BTreeMap::new(),
            began: Instant::now(),
            swapped: None,
        }
    }

    /// Looks; guests have so long to answer.
    pub fn look(&mut self, patience: Duration) -> Result<Seen, String> {
        let (mut seen, mut swapped) = self.places.files.host()?;
        if let Some(group) = &self.config.cgroup {
            // Whoever swaps out wears the host's flash.
            swapped[0] = kernel::within(group, &mut seen)?;
        }
        let now = Instant::now();
        seen.at_ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        if let Some((then, before)) = self.swapped.replace((now, swapped)) {
            let seconds = now.duration_since(then).as_secs_f64().max(0.001);
            let rate = |at: usize| (swapped[at].saturating_sub(before[at]) as f64 / seconds) as u64;
            (seen.swap_in, seen.swap_out) = (rate(0), rate(1));
        }
        let mut notes = Vec::new();
        seen.guests =
            self.guests
                .look(&self.config, &self.places.files, now + patience, &mut notes);
        seen.notes = notes;
        let there = |pid: &u32| seen.guests.iter().any(|g| g.pid == Some(*pid));
        self.out_to.retain(|pid, _| there(pid));
        Ok(seen)
    }

    /// Looks twice, for what only two looks tell.
    pub fn look_twice(&mut self, apart: Duration) -> Result<Seen, String> {
        self.look(PATIENCE)?;
        std::thread::sleep(apart);
        self.look(PATIENCE)
    }
}
