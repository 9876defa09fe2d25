//! The oracle: what every sector of every disk may hold, and nothing more.
//!
//! A disk may answer with different contents when writes overlap in time, when writes failed, or
//! after a crash. Naming one expected content is therefore wrong, and accepting any is useless.
//! The model keeps for every sector the writes that may be its content, and removes one as soon
//! as the contract of a disk excludes it:
//!
//! - a write acknowledged before another began cannot be newer than it;
//! - once durable (flush or FUA acknowledged), a write excludes everything before it for good;
//! - once a read has seen a content, what was complete by then is older (reads are stable);
//! - after a crash, each unflushed write may have happened or not, per block and whole.

use crate::content::{BLOCK, PER_BLOCK, SECTOR, Value, recognise, stamp};
use crate::device::{Base, base_value};
use smallvec::{SmallVec, smallvec};
use std::collections::{BTreeMap, BTreeSet};

/// A write's number; also the version in its stamps. 0 is a disk's first content.
pub type WriteId = u32;

const NOBODY: WriteId = u32::MAX;
/// Lists longer than this are pruned when they grow.
const PRUNE_AT: usize = 6;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    InFlight,
    Acked,
    /// Failed, or unflushed at a crash: happened or not.
    Maybe,
}

#[derive(Clone, Debug)]
struct Write {
    uid: u8,
    first: u64,
    count: u64,
    zero: bool,
    fua: bool,
    invoked: u64,
    completed: u64,
    state: State,
    durable: bool,
    /// When that was promised.
    promised: u64,
    failed: bool,
}

impl Write {
    fn covers(&self, sector: u64) -> bool {
        self.first <= sector && sector - self.first < self.count
    }
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    id: WriteId,
    /// The write a read saw when this one was already complete: that one is newer.
    dead_by: WriteId,
    dead_since: u64,
}

impl Entry {
    fn of(id: WriteId) -> Entry {
        Entry {
            id,
            dead_by: NOBODY,
            dead_since: u64::MAX,
        }
    }
}

type List = SmallVec<[Entry; 2]>;

#[derive(Debug)]
struct Disk {
    base: Base,
    size: u64,
    /// Blocks come whole out of a crash (false if the origin tears inside blocks).
    whole: bool,
    blocks: Vec<Option<Box<[List; 8]>>>,
}

/// The oracle of all disks of a world, each known by its uid.
#[derive(Debug)]
pub struct Model {
    /// Logical time: one per call, so that "before" is exact.
    now: u64,
    writes: Vec<Write>,
    disks: BTreeMap<u8, Disk>,
    unsettled: Vec<WriteId>,
    reads: BTreeSet<u64>,
}

impl Default for Model {
    fn default() -> Self {
        Self::new()
    }
}

/// How a process ends, to its guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// By itself or by kill -9: the devices keep all they were given.
    Process,
    /// Some devices lose power with it, so that what was not flushed may be there or not, and may go later.
    SomePower,
    /// All devices lose power with it.
    Power,
}

/// What a read that ended showed to be wrong, in words.
pub type Verdict = Result<(), String>;

impl Model {
    /// A model without disks.
    pub fn new() -> Model {
        let first = Write {
            uid: 0,
            first: 0,
            count: u64::MAX,
            zero: false,
            fua: true,
            invoked: 0,
            completed: 0,
            state: State::Acked,
            durable: true,
            promised: 0,
            failed: false,
        };
        Model {
            now: 1,
            writes: vec![first],
            disks: BTreeMap::new(),
            unsettled: Vec::new(),
            reads: BTreeSet::new(),
        }
    }

    fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// Logical time now.
    pub fn now(&self) -> u64 {
        self.now
    }

    /// A new disk holding `base`. `whole`: blocks must come whole out of a crash.
    pub fn add_disk(&mut self, uid: u8, base: Base, size: u64, whole: bool) {
        let blocks = size.div_ceil(BLOCK as u64) as usize;
        self.disks.insert(
            uid,
            Disk {
                base,
                size,
                whole,
                blocks: vec![None; blocks],
            },
        );
    }

    /// Nothing is left of what was ever written to a disk, which is at rest.
    pub fn clear(&mut self, uid: u8) {
        if let Some(disk) = self.disks.get_mut(&uid) {
            disk.blocks.fill_with(|| None);
        }
    }

    /// A disk has grown; the new part reads as its base says.
    pub fn grow(&mut self, uid: u8, size: u64) {
        if let Some(disk) = self.disks.get_mut(&uid) {
            disk.size = size;
            disk.blocks
                .resize(size.div_ceil(BLOCK as u64) as usize, None);
        }
    }

    fn value(&self, uid: u8, id: WriteId, sector: u64) -> Value {
        let write = &self.writes[id as usize];
        match id {
            0 => self
                .disks
                .get(&uid)
                .map_or(Value::Zero, |d| base_value(d.base, sector)),
            _ if write.zero => Value::Zero,
            _ => Value::Stamp(stamp(uid, id, sector)),
        }
    }

    /// A write is submitted: `sectors` of 512 bytes from sector `first`. `zero`: it writes zeros.
    pub fn begin_write(
        &mut self,
        uid: u8,
        first: u64,
        count: u64,
        zero: bool,
        fua: bool,
    ) -> WriteId {
        let invoked = self.tick();
        let id = self.writes.len() as WriteId;
        self.writes.push(Write {
            uid,
            first,
            count,
            zero,
            fua,
            invoked,
            completed: u64::MAX,
            state: State::InFlight,
            durable: false,
            promised: u64::MAX,
            failed: false,
        });
        let horizon = self.reads.first().copied().unwrap_or(invoked);
        let writes = &self.writes;
        if let Some(disk) = self.disks.get_mut(&uid) {
            for sector in first..first + count {
                let Some(slot) = disk.blocks.get_mut((sector / PER_BLOCK) as usize) else {
                    break;
                };
                let lists = slot.get_or_insert_with(fresh_lists);
                let list = &mut lists[(sector % PER_BLOCK) as usize];
                if list.len() > PRUNE_AT {
                    prune(writes, list, horizon);
                }
                list.push(Entry::of(id));
            }
        }
        id
    }

    /// A write has ended.
    pub fn end_write(&mut self, id: WriteId, ok: bool) {
        let now = self.tick();
        let write = &mut self.writes[id as usize];
        write.completed = now;
        write.state = if ok { State::Acked } else { State::Maybe };
        write.failed = !ok;
        write.durable = ok && write.fua;
        if write.durable {
            write.promised = now;
        } else {
            self.unsettled.push(id);
        }
    }

    /// A flush is submitted; the mark is for [`end_flush`](Self::end_flush).
    pub fn begin_flush(&mut self) -> u64 {
        self.tick()
    }

    /// A flush of a disk was acknowledged: everything complete at `mark` is durable.
    pub fn end_flush(&mut self, uid: u8, mark: u64) {
        let now = self.tick();
        let writes = &mut self.writes;
        self.unsettled.retain(|id| {
            let write = &mut writes[*id as usize];
            if write.uid != uid || write.completed >= mark || write.failed {
                return true;
            }
            write.durable = true;
            // What was under way at a crash may never have happened.
            if write.state == State::Acked {
                write.promised = write.promised.min(now);
            }
            false
        });
    }

    /// The contents of a disk's sectors, found on its origin alone: are they what a disk may hold after a power cut
    /// at one time not before `least`? That is: each write whose durability was promised by then is there, or
    /// something that is not older; and of each other only what had begun.
    pub fn check_cut(&self, uid: u8, least: u64, found: &[(u64, Value)]) -> Verdict {
        let mut covering: BTreeMap<u64, Vec<WriteId>> = BTreeMap::new();
        for (id, write) in (0..).zip(&self.writes).filter(|(_, w)| w.uid == uid) {
            for sector in write.first..write.first + write.count {
                covering.entry(sector).or_default().push(id);
            }
        }
        let none = Vec::new();
        // From when, until before when, and where.
        let (mut from, mut until) = ((least, None), (u64::MAX, None));
        let mut several = Vec::new();
        let mut times = BTreeSet::new();
        for &(sector, got) in found {
            let ids = covering.get(&sector).unwrap_or(&none);
            let mut spans: SmallVec<[(u64, u64); 2]> = SmallVec::new();
            for id in std::iter::once(&0).chain(ids) {
                if self.value(uid, *id, sector) != got {
                    continue;
                }
                let write = &self.writes[*id as usize];
                let later = ids.iter().map(|id| &self.writes[*id as usize]);
                let later = later.filter(|w| w.invoked > write.completed);
                let end = later.map(|w| w.promised).min().unwrap_or(u64::MAX);
                spans.push((write.invoked, end));
            }
            match spans.as_slice() {
                [] => {
                    return Err(format!(
                        "disk #{uid} sector {sector}: the origin holds {got}, which was never written there"
                    ));
                }
                [(start, end)] => {
                    if *start > from.0 {
                        from = (*start, Some((sector, got)));
                    }
                    if *end < until.0 {
                        until = (*end, Some((sector, got)));
                    }
                }
                _ => {
                    times.extend(spans.iter().map(|(start, _)| *start));
                    several.push((sector, spans));
                }
            }
        }
        let place = |at: Option<(u64, Value)>| match at {
            Some((sector, got)) => format!(
                "sector {sector} (block {}), which holds {got}",
                sector / PER_BLOCK
            ),
            None => "what was told".to_owned(),
        };
        if from.0 >= until.0 {
            return Err(format!(
                "disk #{uid}: the origin is of no one time: not before t{} by {}, and before t{} by {}; told were t{least}",
                from.0,
                place(from.1),
                until.0,
                place(until.1)
            ));
        }
        times.insert(from.0);
        let fits = |at: u64| {
            let holds = |spans: &[(u64, u64)]| spans.iter().any(|(s, e)| *s <= at && at < *e);
            several.iter().all(|(_, spans)| holds(spans))
        };
        match times.range(from.0..until.0).any(|at| fits(*at)) {
            true => Ok(()),
            false => Err(format!(
                "disk #{uid}: the origin is of no one time from t{} by {} until before t{} by {}",
                from.0,
                place(from.1),
                until.0,
                place(until.1)
            )),
        }
    }

    /// A read is submitted; the mark is for [`end_read`](Self::end_read).
    pub fn begin_read(&mut self) -> u64 {
        let mark = self.tick();
        self.reads.insert(mark);
        mark
    }

    /// A read has failed or was given up.
    pub fn drop_read(&mut self, mark: u64) {
        self.reads.remove(&mark);
    }

    /// A read has ended with `data` from sector `first`.
    pub fn end_read(&mut self, uid: u8, mark: u64, first: u64, data: &[u8]) -> Verdict {
        self.tick();
        self.reads.remove(&mark);
        self.check(uid, mark, first, data)
    }

    /// A block looked at on the origin itself while nothing is in flight: it must be what a
    /// read would return.
    pub fn check_block(&mut self, uid: u8, block: u64, data: &[u8]) -> Verdict {
        let mark = self.tick();
        let size = self.disks.get(&uid).map_or(0, |d| d.size);
        let len = size.saturating_sub(block * BLOCK as u64).min(BLOCK as u64) as usize;
        self.tick();
        self.check(uid, mark, block * PER_BLOCK, &data[..len])
    }

    fn check(&mut self, uid: u8, mark: u64, first: u64, data: &[u8]) -> Verdict {
        let Some(disk) = self.disks.get(&uid) else {
            return Err(format!("no model of disk #{uid}"));
        };
        let whole = disk.whole;
        let mut at = 0usize;
        let mut sector = first;
        while at < data.len() {
            let in_block = (PER_BLOCK - sector % PER_BLOCK) as usize;
            let mut seen: SmallVec<[(u64, Value, WriteId); 8]> = SmallVec::new();
            for _ in 0..in_block {
                if at >= data.len() {
                    break;
                }
                let end = (at + SECTOR as usize).min(data.len());
                let got = recognise(&data[at..end]);
                let id = self.judge(uid, mark, sector, got)?;
                seen.push((sector, got, id));
                at = end;
                sector += 1;
            }
            if whole {
                self.check_whole(uid, mark, &seen)?;
            }
            for (sector, got, id) in seen {
                self.observe(uid, mark, sector, got, id);
            }
        }
        Ok(())
    }

    fn list(&self, uid: u8, sector: u64) -> List {
        self.disks
            .get(&uid)
            .and_then(|d| d.blocks.get((sector / PER_BLOCK) as usize))
            .and_then(|b| b.as_ref())
            .map_or_else(
                || smallvec![Entry::of(0)],
                |lists| lists[(sector % PER_BLOCK) as usize].clone(),
            )
    }

    /// True if a sector can hold only one content, so that seeing it tells nothing.
    fn lonely(&self, uid: u8, sector: u64) -> bool {
        let lists = self
            .disks
            .get(&uid)
            .and_then(|d| d.blocks.get((sector / PER_BLOCK) as usize)?.as_ref());
        lists.is_none_or(|l| l[(sector % PER_BLOCK) as usize].len() < 2)
    }

    /// May `entry` be what a read that began at `mark` returns?
    fn current(&self, list: &List, entry: &Entry, mark: u64) -> bool {
        let write = &self.writes[entry.id as usize];
        entry.dead_since >= mark
            && !list.iter().any(|other| {
                let newer = &self.writes[other.id as usize];
                newer.state == State::Acked
                    && newer.completed < mark
                    && newer.invoked > write.completed
            })
    }

    /// Finds the write that explains a sector; `NOBODY` if several do.
    fn judge(&self, uid: u8, mark: u64, sector: u64, got: Value) -> Result<WriteId, String> {
        let untouched = self
            .disks
            .get(&uid)
            .and_then(|d| d.blocks.get((sector / PER_BLOCK) as usize)?.as_ref());
        if untouched.is_none() {
            // The common case: never written.
            if self.value(uid, 0, sector) == got {
                return Ok(0);
            }
        }
        let list = self.list(uid, sector);
        let mut found = None;
        let mut count = 0;
        for entry in list.iter() {
            if self.value(uid, entry.id, sector) == got && self.current(&list, entry, mark) {
                found = Some(entry.id);
                count += 1;
            }
        }
        match (found, count) {
            (Some(id), 1) => Ok(id),
            (Some(_), _) => Ok(NOBODY),
            (None, _) => Err(self.explain(uid, sector, mark, got, &list)),
        }
    }

    fn explain(&self, uid: u8, sector: u64, mark: u64, got: Value, list: &List) -> String {
        let mut text = format!(
            "disk #{uid} block {} (sector {sector}, byte {}): read began at t{mark} and returned {got}; acceptable were:",
            sector / PER_BLOCK,
            sector * SECTOR
        );
        for entry in list.iter().filter(|e| self.current(list, e, mark)) {
            text.push_str(&format!("\n    {}", self.describe(uid, entry.id, sector)));
        }
        let stale = list.iter().filter(|e| !self.current(list, e, mark));
        for entry in stale.filter(|e| self.value(uid, e.id, sector) == got) {
            text.push_str(&format!(
                "\n  it is the OLDER {}",
                self.describe(uid, entry.id, sector)
            ));
            if entry.dead_by != NOBODY {
                text.push_str(&format!(
                    ", which a read at t{} had shown to be replaced by write {}",
                    entry.dead_since, entry.dead_by
                ));
            }
        }
        if let Value::Stamp(s) = got {
            let (owner, version, of) = crate::content::unstamp(s);
            if owner != uid {
                text.push_str(&format!(
                    "\n  it belongs to ANOTHER disk, #{owner} sector {of}"
                ));
            } else if of != sector & 0xFFFF_FFFF {
                text.push_str(&format!("\n  it belongs to ANOTHER sector, {of}"));
            } else if !list.iter().any(|e| e.id == version) {
                text.push_str(&format!(
                    "\n  it was durably replaced or lost at a crash: {}",
                    self.describe(uid, version, sector)
                ));
            }
        }
        text
    }

    fn describe(&self, uid: u8, id: WriteId, sector: u64) -> String {
        let Some(w) = self.writes.get(id as usize) else {
            return format!("unknown write {id}");
        };
        if id == 0 {
            return format!("{} (the disk's first content)", self.value(uid, 0, sector));
        }
        let state = match (w.state, w.failed) {
            (State::InFlight, _) => "in flight".to_string(),
            (State::Acked, _) => format!("acknowledged at t{}", w.completed),
            (State::Maybe, true) => format!("failed at t{}", w.completed),
            (State::Maybe, false) => format!("unflushed at the crash at t{}", w.completed),
        };
        format!(
            "write {id}{} of sectors {}+{} begun at t{}, {state}{}",
            if w.zero { " (zeros)" } else { "" },
            w.first,
            w.count,
            w.invoked,
            if w.durable { ", durable" } else { "" }
        )
    }

    /// A block must be explained by whole writes: if one write shows in one sector, it cannot be
    /// missing from another it covers unless something newer is there.
    fn check_whole(&self, uid: u8, mark: u64, seen: &[(u64, Value, WriteId)]) -> Verdict {
        if seen.windows(2).all(|w| w[0].2 == w[1].2) {
            return Ok(());
        }
        for (s, _, a) in seen.iter().filter(|x| x.2 != NOBODY) {
            for (t, _, b) in seen.iter().filter(|x| x.2 != NOBODY && x.2 != *a) {
                let (wa, wb) = (&self.writes[*a as usize], &self.writes[*b as usize]);
                if wa.completed >= mark || wb.completed >= mark {
                    continue;
                }
                // `a` shows at `s`, so if `b` covers `s`, `a` is newer; and the other way round.
                let a_newer = wb.covers(*s);
                let b_newer = wa.covers(*t);
                if a_newer && (b_newer || wa.completed < wb.invoked) {
                    return Err(format!(
                        "disk #{uid} block {}: not whole: sector {s} holds {}, sector {t} holds {}",
                        s / PER_BLOCK,
                        self.describe(uid, *a, *s),
                        self.describe(uid, *b, *t)
                    ));
                }
            }
        }
        Ok(())
    }

    /// A read that began at `mark` saw write `id`: what was complete by then is older.
    fn observe(&mut self, uid: u8, mark: u64, sector: u64, got: Value, id: WriteId) {
        // While a write is under way, reads may see either: like a disk, the cache does not order
        // a read of its old copy after a read of the origin.
        if id != NOBODY && self.writes[id as usize].state == State::InFlight {
            return;
        }
        if self.lonely(uid, sector) {
            return;
        }
        let list = self.list(uid, sector);
        // Several writes of zeros may explain zeros. What is older than all of them is dead to
        // later reads, but none of them can be said to have replaced it for good.
        let explains =
            |e: &&Entry| self.value(uid, e.id, sector) == got && self.current(&list, e, mark);
        let under_way = |e: &Entry| self.writes[e.id as usize].state == State::InFlight;
        if id == NOBODY && list.iter().filter(explains).any(under_way) {
            return;
        }
        let by = id;
        let mut list = list;
        for i in 0..list.len() {
            let entry = list[i];
            let same = self.value(uid, entry.id, sector) == got;
            if !same
                && entry.dead_since == u64::MAX
                && self.writes[entry.id as usize].completed < mark
            {
                list[i].dead_by = by;
                list[i].dead_since = self.now;
            }
        }
        if let Some(Some(lists)) = self
            .disks
            .get_mut(&uid)
            .and_then(|d| d.blocks.get_mut((sector / PER_BLOCK) as usize))
        {
            lists[(sector % PER_BLOCK) as usize] = list;
        }
    }

    /// The process ends; all requests in flight are given up.
    pub fn crash(&mut self, end: End) {
        let power = end == End::Power;
        let now = self.tick();
        self.reads.clear();
        // First what is certain: durable writes exclude what they replaced.
        let Model { writes, disks, .. } = self;
        for lists in disks
            .values_mut()
            .flat_map(|d| d.blocks.iter_mut().flatten())
        {
            for list in lists.iter_mut() {
                prune(writes, list, now);
                for entry in list.iter_mut() {
                    (entry.dead_by, entry.dead_since) = (NOBODY, u64::MAX);
                }
            }
        }
        for (id, write) in writes.iter_mut().enumerate() {
            if write.state == State::InFlight {
                write.completed = now;
                self.unsettled.push(id as WriteId);
            }
            // No device lost anything: what was acknowledged is there. A later power cut may take it.
            let kept = end == End::Process && write.state == State::Acked;
            if !write.durable && !kept {
                write.state = State::Maybe;
                // What survived a power cut is stored; after a mere kill it may still be volatile.
                write.durable = power;
                write.failed &= !power;
            }
        }
        if power {
            self.unsettled.clear();
        }
    }

    /// Blocks of a disk that any write has touched.
    pub fn written_blocks(&self, uid: u8) -> Vec<u64> {
        let Some(disk) = self.disks.get(&uid) else {
            return Vec::new();
        };
        (0..disk.blocks.len() as u64)
            .filter(|b| disk.blocks[*b as usize].is_some())
            .collect()
    }
}

fn fresh_lists() -> Box<[List; 8]> {
    Box::new(std::array::from_fn(|_| smallvec![Entry::of(0)]))
}

/// Removes the entries that a durable write excludes for good, as far as no read that began
/// before `horizon` could still return them.
fn prune(writes: &[Write], list: &mut List, horizon: u64) {
    loop {
        let before = list.len();
        let all = list.clone();
        list.retain(|entry| {
            let write = &writes[entry.id as usize];
            let replaced = all.iter().any(|other| {
                let newer = &writes[other.id as usize];
                newer.durable
                    && newer.state == State::Acked
                    && newer.completed < horizon
                    && newer.invoked > write.completed
            });
            let seen_replaced = entry.dead_by != NOBODY
                && entry.dead_since < horizon
                && (writes[entry.dead_by as usize].durable
                    || !all.iter().any(|e| e.id == entry.dead_by));
            !(replaced || seen_replaced)
        });
        if list.len() == before || list.len() < 2 {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::content::fill;

    const BASE: Base = Base::Stamped {
        uid: 1,
        holes: 0,
        size: 1 << 20,
    };

    fn model() -> Model {
        let mut m = Model::new();
        m.add_disk(1, BASE, 1 << 20, true);
        m
    }

    fn block(ids: [WriteId; 8], first: u64) -> Vec<u8> {
        let mut data = vec![0u8; 4096];
        for (i, sector) in data.chunks_mut(512).enumerate() {
            fill(Value::Stamp(stamp(1, ids[i], first + i as u64)), sector);
        }
        data
    }

    fn write(m: &mut Model, fua: bool) -> WriteId {
        let id = m.begin_write(1, 0, 8, false, fua);
        m.end_write(id, true);
        id
    }

    fn read(m: &mut Model, id: WriteId) -> Verdict {
        let mark = m.begin_read();
        m.end_read(1, mark, 0, &block([id; 8], 0))
    }

    #[test]
    fn a_read_returns_the_newest_acknowledged_write() {
        let mut m = model();
        assert!(read(&mut m, 0).is_ok());
        let a = write(&mut m, false);
        let b = write(&mut m, false);
        assert!(read(&mut m, a).unwrap_err().contains("OLDER"));
        assert!(read(&mut m, 0).is_err());
        assert!(read(&mut m, b).is_ok());
    }

    #[test]
    fn a_write_under_way_may_show_or_not() {
        let mut m = model();
        let a = m.begin_write(1, 0, 8, false, false);
        assert!(read(&mut m, 0).is_ok());
        assert!(read(&mut m, a).is_ok());
        assert!(read(&mut m, 0).is_ok());
        m.end_write(a, true);
        assert!(read(&mut m, a).is_ok());
        assert!(read(&mut m, 0).is_err());
    }

    #[test]
    fn unflushed_writes_may_be_lost_flushed_ones_not() {
        let mut m = model();
        let a = write(&mut m, false);
        let mark = m.begin_flush();
        let b = write(&mut m, false);
        m.end_flush(1, mark);
        m.crash(End::Power);
        for ok in [a, b] {
            let mut fork = model();
            let (fa, _) = (write(&mut fork, false), ());
            let mark = fork.begin_flush();
            write(&mut fork, false);
            fork.end_flush(1, mark);
            fork.crash(End::Power);
            assert_eq!(fa, a);
            assert!(read(&mut fork, 0).is_err(), "flushed");
            assert!(read(&mut fork, ok).is_ok());
            assert!(
                read(&mut fork, if ok == a { b } else { a }).is_err(),
                "pinned"
            );
            fork.crash(End::Power);
            assert!(
                read(&mut fork, if ok == a { b } else { a }).is_err(),
                "pinned through a second crash"
            );
        }
        assert!(read(&mut m, 0).is_err());
    }

    #[test]
    fn fua_is_durable_alone() {
        let mut m = model();
        write(&mut m, false);
        let b = write(&mut m, true);
        m.crash(End::Power);
        assert!(read(&mut m, 0).is_err());
        assert!(read(&mut m, 1).is_err());
        assert!(read(&mut m, b).is_ok());
    }

    #[test]
    fn a_failed_write_is_old_or_new_and_stays_so() {
        for new in [false, true] {
            let mut m = model();
            let a = m.begin_write(1, 0, 8, false, false);
            m.end_write(a, false);
            let (see, other) = if new { (a, 0) } else { (0, a) };
            assert!(read(&mut m, see).is_ok());
            assert!(read(&mut m, other).is_err());
        }
    }

    #[test]
    fn a_torn_block_is_not_whole() {
        let mut m = model();
        let a = m.begin_write(1, 0, 8, false, false);
        m.crash(End::Power);
        let mark = m.begin_read();
        let torn = block([a, a, a, 0, 0, 0, 0, 0], 0);
        assert!(
            m.end_read(1, mark, 0, &torn)
                .unwrap_err()
                .contains("not whole")
        );
    }

    #[test]
    fn partial_writes_survive_independently() {
        let mut m = model();
        let a = m.begin_write(1, 0, 2, false, false);
        m.end_write(a, true);
        let b = m.begin_write(1, 4, 2, false, false);
        m.end_write(b, true);
        m.crash(End::Power);
        let mark = m.begin_read();
        assert!(
            m.end_read(1, mark, 0, &block([0, 0, 0, 0, b, b, 0, 0], 0))
                .is_ok()
        );
        let mark = m.begin_read();
        assert!(
            m.end_read(1, mark, 0, &block([a, a, 0, 0, b, b, 0, 0], 0))
                .is_err(),
            "flipped"
        );
    }

    #[test]
    fn a_killed_process_loses_no_promise_but_may_lose_the_unflushed_at_the_next_power_cut() {
        let mut m = model();
        let a = write(&mut m, false);
        m.crash(End::Process);
        assert!(read(&mut m, 0).is_err(), "no device lost it");
        assert!(read(&mut m, a).is_ok());
        m.crash(End::SomePower);
        assert!(read(&mut m, 0).is_ok(), "it was still volatile");
        let mut m = model();
        write(&mut m, false);
        m.crash(End::Process);
        m.crash(End::Power);
        assert!(read(&mut m, 0).is_ok(), "it was still volatile");
        let mut m = model();
        let a = write(&mut m, false);
        m.crash(End::Process);
        assert!(read(&mut m, a).is_ok());
        let mark = m.begin_flush();
        m.end_flush(1, mark);
        m.crash(End::Power);
        assert!(read(&mut m, 0).is_err(), "flushed after the kill");
        assert!(read(&mut m, a).is_ok());
    }

    #[test]
    fn an_origin_alone_must_be_of_one_time() {
        let mut m = model();
        let put = |m: &mut Model, first| {
            let id = m.begin_write(1, first, 1, false, false);
            m.end_write(id, true);
            id
        };
        let flush = |m: &mut Model| {
            let mark = m.begin_flush();
            m.end_flush(1, mark);
            m.now()
        };
        let stamped = |id, sector| (sector, Value::Stamp(stamp(1, id, sector)));
        let a = put(&mut m, 0);
        let first = flush(&mut m);
        let b = put(&mut m, 0);
        let c = put(&mut m, 8);
        let d = put(&mut m, 16);
        let second = flush(&mut m);
        let e = put(&mut m, 0);
        // Part of what came between the flushes, and all of it.
        assert!(
            m.check_cut(1, first, &[stamped(a, 0), stamped(c, 8), stamped(0, 16)])
                .is_ok()
        );
        assert!(
            m.check_cut(1, second, &[stamped(b, 0), stamped(c, 8), stamped(d, 16)])
                .is_ok()
        );
        // More was told than is there.
        assert!(
            m.check_cut(1, second, &[stamped(a, 0), stamped(c, 8), stamped(d, 16)])
                .is_err()
        );
        // Something of after the second flush, and not all of before.
        let mixed = [stamped(e, 0), stamped(0, 8), stamped(d, 16)];
        assert!(
            m.check_cut(1, 0, &mixed)
                .unwrap_err()
                .contains("no one time")
        );
        assert!(m.check_cut(1, first, &[stamped(0, 0)]).is_err());
        assert!(m.check_cut(1, 0, &[stamped(0, 0), stamped(0, 8)]).is_ok());
        assert!(m.check_cut(1, 0, &[stamped(c, 0)]).is_err());
    }

    #[test]
    fn zeros_and_grown_parts() {
        let mut m = model();
        let z = m.begin_write(1, 0, 8, true, false);
        m.end_write(z, true);
        let mark = m.begin_read();
        assert!(m.end_read(1, mark, 0, &[0u8; 4096]).is_ok());
        m.grow(1, 2 << 20);
        let mark = m.begin_read();
        assert!(m.end_read(1, mark, 2048, &[0u8; 4096]).is_ok());
    }
}
