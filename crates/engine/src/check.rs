//! What the engine keeps count of, counted again.
//!
//! Most numbers the engine goes by (blocks cached, dirty or read just now; requests in flight) are kept by
//! adding and taking away. One that was forgotten once shows late if ever: a segment that never comes
//! free, one that is overwritten while it is read, a disk that is never left alone. Here each of them
//! is counted again from the things it is a number of. For tests only: it looks at every slot.

use crate::api::DiskId;
use crate::core::apply::{Purpose, Then};
use crate::core::route::FlashWaiter;
use crate::core::{Core, OpCtx};
use crate::engine::Engine;
use crate::flash::device::FlashOp;
use crate::flash::log::Item;
use crate::ids::ReqId;
use crate::origin::job::NOWHERE;
use crate::origin::progress::Written;
use crate::origin::sync::SyncWaiter;
use crate::request::state::{State, Step};
use std::collections::BTreeMap;
use std::fmt::Display;

/// What was found to be different first.
type Checked = Result<(), String>;

fn same(what: impl Display, kept: u64, counted: u64) -> Checked {
    if kept == counted {
        return Ok(());
    }
    Err(format!(
        "{what}: {kept} by the engine's count, {counted} in fact"
    ))
}

/// What slots say of a segment or of a disk.
#[derive(Clone, Copy, Default)]
struct Blocks {
    live: u64,
    second: u64,
    dirty: u64,
    lost: u64,
}

fn waits_for_range(state: &State) -> bool {
    matches!(state, State::Write(write) if matches!(write.step, Step::WaitsForRange { .. }))
}

impl Engine {
    /// Counts again what is kept by counting, at any time between two calls: how many requests of clients are
    /// in flight, or the first difference in words.
    #[doc(hidden)]
    pub fn check(&self) -> Result<u64, String> {
        let core = self.core();
        core.check()?;
        Ok(core.reqs.foreground + core.shared.check()?)
    }
}

impl Core {
    pub fn check(&self) -> Checked {
        self.check_slots()?;
        self.check_pins()?;
        self.check_log()?;
        self.check_requests()?;
        self.check_waits()?;
        self.check_tickets()?;
        self.check_progress()
    }

    /// Segments that are freed make room, for those who wait for it.
    fn check_progress(&self) -> Checked {
        match self.flash.in_vain() {
            (went, most) if went > most => Err(format!(
                "{went} segments were freed while a request waited, and it got no room"
            )),
            _ => Ok(()),
        }
    }

    /// What the index holds: of each segment, of each disk, and in all.
    fn check_slots(&self) -> Checked {
        let mut segments = vec![Blocks::default(); self.flash.log.segments.len()];
        let mut disks: BTreeMap<DiskId, Blocks> = BTreeMap::new();
        for slot in 0..self.cache.index.slots() {
            let Some(info) = self.cache.index.slot(slot) else {
                continue;
            };
            let (disk, block) = (info.key.disk(), info.key.block());
            let Some(d) = self.disk(disk) else {
                return Err(format!(
                    "slot {slot} holds block {block} of disk {disk}, which is not there"
                ));
            };
            if info.dirty != d.dirty.contains(block) {
                return Err(format!(
                    "block {block} of disk {disk} is dirty in the index: {}, in the disk's list: {}",
                    info.dirty, !info.dirty
                ));
            }
            if d.zero.contains(block) {
                return Err(format!(
                    "block {block} of disk {disk} is zeros, and is cached"
                ));
            }
            let segment = self.flash.log.segment_of(slot);
            for count in [&mut segments[segment], disks.entry(disk).or_default()] {
                count.live += 1;
                count.second += u64::from(self.flash.log.is_second(slot));
                count.dirty += u64::from(info.dirty);
                count.lost += u64::from(info.lost);
            }
        }
        for (n, (kept, counted)) in self.flash.log.segments.iter().zip(&segments).enumerate() {
            same(
                format!("blocks in segment {n}"),
                kept.live.into(),
                counted.live,
            )?;
            same(
                format!("dirty blocks in segment {n}"),
                kept.dirty.into(),
                counted.dirty,
            )?;
            same(
                format!("blocks in the second half of segment {n}"),
                kept.second.into(),
                counted.second,
            )?;
        }
        let mut held = vec![0u64; self.flash.log.segments.len()];
        for order in self
            .disks
            .iter()
            .flatten()
            .filter_map(|d| d.order.as_deref())
        {
            for slot in order.held() {
                held[self.flash.log.segment_of(slot)] += 1;
            }
        }
        let holding = held.iter().filter(|n| **n > 0).count();
        same(
            "segments held for ordered disks",
            self.flash.held_segments as u64,
            holding as u64,
        )?;
        for (n, (kept, counted)) in self.flash.log.segments.iter().zip(held).enumerate() {
            same(
                format!("versions held in segment {n}"),
                kept.held.into(),
                counted,
            )?;
        }
        let mut dirty = 0;
        let mut zero_runs = 0;
        for d in self.disks.iter().flatten() {
            let (id, counted) = (d.cfg.id, disks.remove(&d.cfg.id).unwrap_or_default());
            same(
                format!("cached blocks of disk {id}"),
                d.cached,
                counted.live,
            )?;
            same(
                format!("dirty blocks of disk {id}"),
                d.dirty.len(),
                counted.dirty,
            )?;
            same(
                format!("lost blocks of disk {id}"),
                d.lost.len(),
                counted.lost,
            )?;
            dirty += if d.is_promised() { 0 } else { counted.dirty };
            zero_runs += d.zero.run_count();
        }
        same("dirty blocks of all disks", self.dirty_total, dirty)?;
        same("runs of zeros of all disks", self.zero_runs, zero_runs)
    }

    /// What operations in flight are for: a read that is made again is what it was.
    fn ops_in_flight(&self) -> impl Iterator<Item = &OpCtx> {
        self.ops.iter().map(|(_, op)| match op {
            OpCtx::Second(op) => &**op,
            OpCtx::Alone(alone) => alone.ctx(),
            op => op,
        })
    }

    /// Who reads a segment, or still writes its summary, and reads of flash in flight.
    fn check_pins(&self) -> Checked {
        let log = &self.flash.log;
        let mut pins = vec![0u64; log.segments.len()];
        let mut reads = 0;
        for op in self.ops_in_flight() {
            match op {
                OpCtx::HitRead { slot, .. } | OpCtx::Flash(FlashOp::Move { slot, .. }) => {
                    reads += 1;
                    pins[log.segment_of(*slot)] += 1;
                }
                OpCtx::DestageRead { .. } => reads += 1,
                OpCtx::Flash(FlashOp::Entries { seg, .. }) => {
                    reads += 1;
                    pins[*seg as usize] += 1;
                }
                OpCtx::Flash(FlashOp::Summary { seg }) => pins[*seg as usize] += 1,
                _ => {}
            }
        }
        // A head that is left as a device begins to be emptied is sealed with the next event.
        let unsent = self.flash.out.ios.iter().map(|(op, _)| op);
        for op in self.flash.devices.under_way().chain(unsent) {
            if let FlashOp::Summary { seg } = op {
                pins[*seg as usize] += 1;
            }
        }
        for sealing in &log.sealing {
            pins[sealing.seg as usize] += 1;
        }
        let held = self.destaging.jobs.iter().flat_map(|(_, job)| &job.slots);
        let disks = self.disks.iter().flatten();
        let written = disks.flat_map(|d| &d.origin.destage.written);
        let written = written.filter_map(|w| match w {
            Written::Data { slot, .. } => Some(slot),
            Written::Zero { .. } => None,
        });
        for slot in held.chain(written).filter(|slot| **slot != NOWHERE) {
            pins[log.segment_of(*slot)] += 1;
        }
        for (n, (s, counted)) in log.segments.iter().zip(pins).enumerate() {
            same(format!("pins of segment {n}"), s.pins.into(), counted)?;
        }
        same("reads of flash", self.flash.inflight.into(), reads)
    }

    /// What is on its way to the log.
    fn check_log(&self) -> Checked {
        let log = &self.flash.log;
        let data = log.queue.iter().filter(|i| i.kind.is_data());
        let blocks: u64 = data.clone().map(|i| u64::from(i.count)).sum();
        same("blocks in the queue", log.queued_blocks.into(), blocks)?;
        let records = log.queue.len() - data.count();
        same(
            "records in the queue",
            log.queued_records.into(),
            records as u64,
        )?;
        for (n, s) in log.segments.iter().enumerate() {
            let batches = log.batches.iter().filter(|b| b.seg as usize == n);
            same(
                format!("batches for segment {n}"),
                s.batches.into(),
                batches.count() as u64,
            )?;
        }
        let mut moving: u64 = 0;
        for item in self.items() {
            moving += u64::from(item.ends && matches!(item.token.then, Then::Moved));
        }
        for op in self.ops_in_flight() {
            if let OpCtx::Flash(FlashOp::Move { count, .. }) = op {
                moving += u64::from(*count);
            }
        }
        same("blocks being moved", self.flash.moving().into(), moving)
    }

    /// Requests there are, of clients and of each disk, and what they hold.
    fn check_requests(&self) -> Checked {
        let mut clients = 0;
        let mut of: BTreeMap<DiskId, u64> = BTreeMap::new();
        let mut writes: BTreeMap<(DiskId, u32), u64> = BTreeMap::new();
        let mut holds: BTreeMap<DiskId, u64> = BTreeMap::new();
        let mut queues: BTreeMap<DiskId, u64> = BTreeMap::new();
        for (_, req) in self.reqs.iter() {
            clients += u64::from(req.is_clients());
            *of.entry(req.disk).or_default() += 1;
            *holds.entry(req.disk).or_default() += u64::from(req.holds_range());
            *queues.entry(req.disk).or_default() += u64::from(waits_for_range(&req.state));
            for region in req.regions().into_iter().flat_map(|(from, to)| from..=to) {
                *writes.entry((req.disk, region)).or_default() += 1;
            }
        }
        same("requests of clients", self.reqs.foreground, clients)?;
        for d in self.disks.iter().flatten() {
            let id = d.cfg.id;
            let count = |of: &BTreeMap<DiskId, u64>| of.get(&id).copied().unwrap_or(0);
            same(format!("requests of disk {id}"), d.in_flight, count(&of))?;
            same(
                format!("ranges held of disk {id}"),
                d.locks.len() as u64,
                count(&holds),
            )?;
            same(
                format!("requests waiting for a range of disk {id}"),
                d.lock_queue.len() as u64,
                count(&queues),
            )?;
            for (region, inflight) in d.origin.intents.writes() {
                let counted = writes.remove(&(id, region)).unwrap_or(0);
                same(
                    format!("writes in region {region} of disk {id}"),
                    inflight.into(),
                    counted,
                )?;
            }
        }
        match writes.first_key_value() {
            Some(((disk, region), _)) => Err(format!(
                "region {region} of disk {disk} is written without its intent"
            )),
            None => Ok(()),
        }
    }

    /// Each request waits for as many things as there are that will tell it that they ended.
    fn check_waits(&self) -> Checked {
        let mut comes: BTreeMap<ReqId, u64> = BTreeMap::new();
        let mut coming = |id: ReqId| *comes.entry(id).or_default() += 1;
        for op in self.ops_in_flight() {
            match op {
                OpCtx::HitRead { req, .. } | OpCtx::OriginWrite { req } => coming(*req),
                OpCtx::MissRead(miss) => coming(miss.req),
                _ => {}
            }
        }
        self.cache.ahead.waiting().for_each(&mut coming);
        for item in self.items() {
            if let Then::Request(id) = item.token.then
                && item.ends
            {
                coming(id);
            }
        }
        for w in &self.flash.waiters {
            if let FlashWaiter::Request(id) = w.who {
                coming(id);
            }
        }
        let disks = self.disks.iter().flatten();
        for who in disks.flat_map(|d| d.origin.sync.waiters()) {
            if let SyncWaiter::Flush(id) | SyncWaiter::Fua(id) = who {
                coming(id);
            }
        }
        for (_, req) in self.reqs.iter() {
            req.answer.request().into_iter().for_each(&mut coming);
        }
        // And those that somebody will look at again.
        for id in self.reqs.queued() {
            coming(id);
        }
        for d in self.disks.iter().flatten() {
            d.clean_waiters.iter().copied().for_each(&mut coming);
            d.lock_queue.iter().for_each(|span| coming(span.req));
            for span in d.locks.iter() {
                if self.reqs[span.req].write().step == Step::WaitsForIntent {
                    coming(span.req);
                }
            }
        }
        for (_, req) in self.reqs.iter() {
            let counted = comes.remove(&req.id).unwrap_or(0);
            same(
                format!(
                    "what {:?} waits for ({:?}, {:?})",
                    req.id, req.op, req.state
                ),
                req.state.waits_for(),
                counted,
            )?;
        }
        match comes.first_key_value() {
            Some((id, _)) => Err(format!("{id:?} is waited for, and was answered")),
            None => Ok(()),
        }
    }

    /// Every copy of an origin that is on its way to flash has its ticket, and every ticket such a copy; no block is on its way
    /// twice.
    fn check_tickets(&self) -> Checked {
        let mut copies: BTreeMap<(DiskId, u64), u64> = BTreeMap::new();
        let mut copy = |disk: DiskId, ticket: u64| *copies.entry((disk, ticket)).or_default() += 1;
        for (_, op) in &self.ops {
            if let OpCtx::MissRead(miss) = op {
                copy(miss.disk, miss.ticket);
            }
        }
        self.cache
            .ahead
            .tickets()
            .for_each(|(disk, ticket)| copy(disk, ticket));
        for item in self.items() {
            if let Then::Ticket { disk, ticket } = item.token.then
                && item.ends
            {
                copy(disk, ticket);
            }
        }
        for d in self.disks.iter().flatten() {
            for (at, t) in d.tickets.iter().enumerate() {
                let first = |block: &u64| d.queued_run(*block, block + 1).map(|(first, ..)| first);
                let twice = |block: &u64| !t.voids(*block) && first(block) != Some(at);
                if let Some(block) = (t.start..t.end).find(|b| !t.is_reading() && twice(b)) {
                    let id = d.cfg.id;
                    return Err(format!(
                        "block {block} of disk {id} is on its way to flash twice"
                    ));
                }
                let counted = copies.remove(&(d.cfg.id, t.id)).unwrap_or(0);
                same(
                    format!(
                        "copies with the ticket for {}..{} of disk {}",
                        t.start, t.end, d.cfg.id
                    ),
                    1,
                    counted,
                )?;
            }
        }
        match copies.first_key_value() {
            Some(((disk, _), _)) => Err(format!(
                "a copy of disk {disk} is on its way without a ticket"
            )),
            None => Ok(()),
        }
    }

    /// All that is on its way to the log.
    fn items(&self) -> impl Iterator<Item = &Item<Purpose>> {
        let log = &self.flash.log;
        log.batches.iter().flat_map(|b| &b.items).chain(&log.queue)
    }
}
