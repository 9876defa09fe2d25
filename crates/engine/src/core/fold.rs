//! What the core learns of hits.

use crate::api::{DiskId, Effects, Mode};
use crate::cache::index::Key;
use crate::cache::stage::policy_key;
use crate::core::{Core, OpCtx};
use crate::lanes::{Counts, LANES, Reads, SLOW_NS, Seen, Use};
use crate::request::answer::Asker;
use hearth_policy::Use as Used;

/// What folding keeps between two times.
#[derive(Default)]
pub(crate) struct Folding {
    /// Kept for its memory.
    uses: Vec<Use>,
    /// When lanes were last looked through for disks that are quiet.
    swept_ns: u64,
}

/// How often lanes are looked through for disks that are quiet.
const SWEEP_NS: u64 = 1_000_000_000;

impl Core {
    /// Tells hits whether there may be any, and how a disk is.
    pub fn publish(&self, id: DiskId) {
        let known = self.disk(id).map(|d| {
            let plain = d.attached && !d.fenced && !d.unverified && d.cfg.mode != Mode::Off;
            Seen {
                size: if plain { d.cfg.size } else { 0 },
                fenced: d.fenced,
            }
        });
        self.shared.publish(id, known.unwrap_or_default());
    }

    /// Tells hits what holds for all of them. Whenever something of it may have changed.
    pub fn publish_pool(&self, now: u64) {
        let open = !self.quiescing && self.flash.takes_writes() && self.flash.ewma_ns <= SLOW_NS;
        self.shared.open(open);
        if !self.flash.is_evicting() {
            self.shared.want(false);
        }
        let moves = self.flash.is_evicting() || self.flash.moves_off_slow();
        let work =
            self.dirty_total > 0 || self.totals.moving > 0 || moves || !self.flash.log.quiet();
        self.shared.settle_later(now, work);
    }

    /// Takes over what all lanes have noted.
    pub fn fold_all(&mut self, now: u64, fx: &mut Effects) {
        (0..LANES).for_each(|n| self.fold(n, now, fx));
    }

    /// Takes over what a lane has noted: hits that need the core, uses, how fast flash is.
    pub fn fold(&mut self, n: usize, now: u64, fx: &mut Effects) {
        if self.fold_notes(n, fx) {
            self.take_over(n, now, fx);
        }
    }

    /// Takes over only what says something of blocks and flash, of all lanes.
    pub fn fold_all_notes(&mut self, fx: &mut Effects) {
        for n in 0..LANES {
            self.fold_notes(n, fx);
        }
    }

    /// The same of one lane; true if it has hits that need the core.
    fn fold_notes(&mut self, n: usize, fx: &mut Effects) -> bool {
        let mut uses = std::mem::take(&mut self.folding.uses);
        let (reads, trouble) = self.shared.take_notes(n, &mut uses);
        self.fold_reads(reads);
        self.fold_uses(uses, fx);
        trouble
    }

    /// How flash answered.
    fn fold_reads(&mut self, reads: Reads) {
        self.flash
            .account_good_reads(reads.count, reads.bytes, reads.ns);
    }

    /// The same of all lanes.
    pub fn fold_all_reads(&mut self) {
        for n in 0..LANES {
            let reads = self.shared.take_reads(n);
            self.fold_reads(reads);
        }
    }

    fn fold_uses(&mut self, mut uses: Vec<Use>, fx: &mut Effects) {
        let mut wishes = std::mem::take(&mut self.cache.ahead.wishes);
        wishes.clear();
        let mut last = (0, false);
        for u in uses.drain(..) {
            if last.0 != u.disk {
                last = (u.disk, self.reads_ahead(u.disk));
            }
            if let Some((offset, len)) = u.request {
                if let Some(d) = self.disk_mut(u.disk) {
                    d.sequential.observe(offset, u64::from(len));
                }
                if last.1 {
                    let blocks = (offset + u64::from(len)).div_ceil(4096) - u.block;
                    let key = policy_key(u.disk, u.block);
                    self.cache.policy.read(key, blocks as u32, &mut wishes);
                }
            }
            self.flash.cleaner.hits(u64::from(u.count));
            self.flash.note_read(u.slot, u.count);
            for i in 0..u.count {
                let (slot, block) = (u.slot + i, u.block + u64::from(i));
                self.cache
                    .policy
                    .used(policy_key(u.disk, block), false, Used::Hit);
                let key = Key::new(u.disk, block);
                // It may hold something else by now.
                if u.touch && self.cache.index.slot(slot).is_some_and(|s| s.key == key) {
                    self.cache.index.touch(slot);
                }
            }
        }
        self.folding.uses = uses;
        if !wishes.is_empty() {
            self.read_ahead(&wishes, fx);
        }
        self.cache.ahead.wishes = wishes;
    }

    /// Goes on with hits that ended badly, as if they had been the core's own from the start.
    fn take_over(&mut self, n: usize, now: u64, fx: &mut Effects) {
        loop {
            let shared = self.shared.clone();
            let Some(hit) = shared.take_bad(n, |slot| self.flash.pin(slot)) else {
                return;
            };
            if let Some(d) = self.disk_mut(hit.r.disk) {
                d.in_flight += 1;
            }
            let asker = Asker::client(&hit.r);
            let id = self.reqs.insert(hit.r, asker);
            let read = self.reqs[id].read_mut();
            read.hit = true;
            read.pending = hit.bad.len() as u32;
            for (op, done) in hit.bad {
                self.flash.inflight += 1;
                self.flash.account(&done, now);
                let ctx = OpCtx::HitRead {
                    req: id,
                    block: op.block,
                    slot: op.slot,
                };
                // One of them may have to be read from elsewhere.
                if let Some((_, done)) = self.read_other_half(ctx, done, fx) {
                    self.hit_read_done(id, op.block, op.slot, done, now, fx);
                }
            }
        }
    }

    /// Looks which of several flash devices answer slowly.
    pub fn look_at_devices(&mut self, now: u64) {
        if !self.flash.devices.is_look_due(now) {
            return;
        }
        let past = self.shared.reads_by_device();
        let past = past.into_iter().map(|reads| (reads.count, reads.ns));
        if self.flash.devices.look(now, past) {
            self.flash.sort_by_speed();
            let slow = |device: u16| self.flash.devices.is_slow(device);
            self.shared.tell_slow(slow);
        }
    }

    /// Adds to a disk's statistics what lanes have counted.
    pub fn gather(&mut self, id: DiskId) {
        let shared = self.shared.clone();
        shared.gather(id, |counts| self.add(id, counts));
    }

    fn add(&mut self, id: DiskId, counts: &mut Counts) {
        let Some(d) = self.disk_mut(id) else { return };
        d.counters.read_hits += std::mem::take(&mut counts.hits);
        d.counters.read_hit_bytes += std::mem::take(&mut counts.hit_bytes);
        d.counters.read_ns += std::mem::take(&mut counts.read_ns);
        d.counters.errors += std::mem::take(&mut counts.errors);
        d.hit_latency.absorb(&mut counts.latency);
    }

    /// Now and then takes from lanes what they count of disks that have been quiet since the last time.
    pub fn sweep_lanes(&mut self, now: u64) {
        if now.saturating_sub(self.folding.swept_ns) <= SWEEP_NS {
            return;
        }
        self.folding.swept_ns = now;
        let shared = self.shared.clone();
        shared.sweep(|id, counts| self.add(id, counts));
    }
}
