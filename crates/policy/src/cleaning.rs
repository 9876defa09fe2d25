//! Which segment of the log is freed next, what becomes of its blocks, and which head a block is
//! appended to.
//!
//! What is overwritten or dropped leaves a hole that nothing can be written into until its whole
//! segment is free, and to free it what still lives there must be written again. So the price of a free
//! segment is what lives in it, and the art is to wait until that is little: to free what has died, and to
//! append together what will die together. Three things are decided here from a few counts per segment:
//!
//! - **Eviction and cleaning** ([`Cleaner::pick`], [`Cleaner::fate`]): the segment whose freeing gives most for
//!   what is moved. While more lives than [`Cleaner::target`], what was not used is dropped and what was
//!   is moved with a use less; below, all that lives is moved. Only when flash is brimful is a block dropped
//!   where it lies, by a hand that goes over the segments in turn ([`Cleaner::turn`]).
//! - **Probation** ([`Cleaner::probation_first`]): segments that hold mostly guests' writes are freed first while they hold
//!   more than [`PROBATION_PERCENT`] of the blocks that may live. So the data of a restore or a bulk load displaces itself
//!   and not the hot set.
//! - **Heads** ([`Cleaner::head`]): what is rewritten often, what is not and what was moved lie apart.
//!
//! An event costs constant time, or the logarithm of the number of segments when a segment's live
//! blocks pass one of [`BUCKETS`] marks; a choice looks at one segment for each mark. It knows no
//! device. Measured in `docs/decisions/0006-cleaning.md`.

use std::collections::BTreeSet;

use crate::spread;

/// Marks by which segments are sorted by what lives in them.
pub const BUCKETS: usize = 32;
/// Heads at most.
pub const HEADS_MAX: usize = 3;

/// By what the next segment to be freed is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Written first, freed first.
    Oldest,
    /// Where least lives.
    Greedy,
    /// What it gives times how long it has been as it is, by what reading and moving it costs
    /// (Rosenblum and Ousterhout, 1991).
    CostBenefit,
    /// The same, by what is moved only (as in eNVy and CAT): what is nearly empty goes before anything.
    Aged,
    /// By what waiting would still give, see [`index`].
    Index,
    /// Where least lives among so many taken at random.
    Choices(u32),
}

/// What is appended together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heads {
    /// Everything.
    One,
    /// What is new; what is moved.
    MovesApart,
    /// What is rewritten often; everything else.
    HotCold,
    /// What is rewritten often; what else is new; what is moved.
    Three,
}

impl Heads {
    /// How many.
    pub const fn count(self) -> usize {
        match self {
            Heads::One => 1,
            Heads::MovesApart | Heads::HotCold => 2,
            Heads::Three => HEADS_MAX,
        }
    }
}

/// Settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plan {
    /// Which segment is freed.
    pub order: Order,
    /// What is appended together.
    pub heads: Heads,
    /// Blocks that may live on flash at most. What is above it is room for holes: the less of that, the
    /// more is moved. Nothing is evicted below it but for the price.
    pub most: u64,
    /// Blocks for which there is room, holes included: all segments but the reserve and the heads.
    pub room: u64,
    /// A copy that lived shorter than so many 16ths of [`most`](Self::most) (counted in blocks appended)
    /// was rewritten often.
    pub span: u64,
    /// What a block written to flash costs, in 1024ths of a hit: the dearer, the more room is left for
    /// holes, at the cost of hits. 0 for no price.
    pub price: u64,
}

/// Why a block is appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// A guest's write or what came of it; often rewritten, as [`Cleaner::hot`] said of its old copy?
    Written {
        /// Often rewritten?
        hot: bool,
    },
    /// Read from the origin.
    Filled,
    /// Its segment is to be freed.
    Moved {
        /// That segment.
        from: u32,
    },
}

impl Why {
    /// Reason for a block found on flash at a start: a dirty block was written by a guest; for a clean one it is unknown.
    pub fn of_found(dirty: bool) -> Why {
        match dirty {
            true => Why::Written { hot: false },
            false => Why::Filled,
        }
    }
}

/// What becomes of a live block of a segment that is being freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It may go.
    Drop,
    /// It is appended again, at this head.
    Move {
        /// The head's number.
        head: usize,
        /// Has it used up one of its uses? It has where more lives than should.
        fades: bool,
    },
}

/// What is known of one segment.
#[derive(Clone, Copy, Debug, Default)]
struct Segment {
    /// Blocks that count.
    live: u32,
    /// Of these, those the origin does not have yet.
    dirty: u32,
    /// Blocks appended.
    filled: u32,
    /// Its number in the order in which segments were opened.
    seq: u64,
    /// Sum of the times its blocks were written at, until it is closed; then their mean.
    born: u64,
    /// The same of when eviction looked at them last.
    seen: u64,
    /// When it was closed.
    at: u64,
    head: u8,
    closed: bool,
    /// Blocks appended that a guest wrote.
    written: u32,
    /// A guest wrote most of it, and eviction has not looked at it yet.
    probation: bool,
}

impl Segment {
    /// Its place in [`Cleaner::turns`].
    fn turns(&self) -> usize {
        usize::from(!self.probation)
    }
}

/// Times the target is set while as much is appended as there is room.
const EPOCHS: u64 = 8;
/// One block in so many of those that may live at most is dropped where its segment is freed, before any
/// has to go at once.
const SLACK: u64 = 16;
/// Eviction spares what it looked at less than one part in so many as long ago as what it looks at next.
const YOUNG_SHARE: u64 = 2;

/// Blocks that may live where there is room for so many, holes included: batches have descriptors, too.
pub fn most_of(room: u64) -> u64 {
    room - room / 32
}

/// Share of the blocks that may live, in percent, that is left to written data which was not used again.
pub const PROBATION_PERCENT: u64 = 45;

/// What freeing a segment is worth that was filled `age` ago and in which `live` of `data` blocks live.
///
/// If its blocks die at the rate r, e^(-r age) of them live now, so r = -ln(u) / age with u = live / data.
/// Space and moves together are least if in all classes of segments the next block moved buys the same
/// space. Freed at u, blocks of a class that is written w times and lives L take L (-ln u) / (1 - u) of
/// space and cost w u / (1 - u) moves; the ratio of what these change by is r / ((1 - u) / u + ln u). So
/// the segment is next in which age ((1 - u) / (-u ln u) - 1) is largest: cold ones are freed with few holes,
/// hot ones are left alone until they have many.
pub fn index(live: u32, data: u32, age: u64) -> u64 {
    if live == 0 {
        return u64::MAX;
    }
    if live >= data {
        return 0;
    }
    let u = f64::from(live) / f64::from(data);
    (1024.0 * age.max(1) as f64 * ((1.0 - u) / (-u * u.ln()) - 1.0)) as u64
}

/// How many of `room` blocks may live if there are `hits` per 1024 blocks appended and a write costs `price`
/// 1024ths of a hit.
///
/// Segments freed with a share u of live blocks hold a = (1 - u) / (-ln u) in the mean and cost
/// u / (1 - u) moves for each block appended. One more block that lives costs as many more writes per block
/// appended as that rises with a, by room; it gives a hit in live / hits blocks appended, if it is like
/// the others. What may live is where both are equal.
pub fn worthwhile(hits: u64, price: u64, room: u64) -> u64 {
    let share = |u: f64| (1.0 - u) / -u.ln();
    let (mut low, mut high) = (0.01, 0.995);
    for _ in 0..16 {
        let u: f64 = (low + high) / 2.0;
        let a = share(u);
        // The derivatives of u / (1 - u) and of a.
        let moves = 1.0 / ((1.0 - u) * (1.0 - u));
        let held = (u.ln() + (1.0 - u) / u) / (u.ln() * u.ln());
        if a * moves / held * price as f64 > hits as f64 {
            high = u;
        } else {
            low = u;
        }
    }
    (share(low) * room as f64) as u64
}

/// Decides about the segments of one log.
#[derive(Debug)]
pub struct Cleaner {
    plan: Plan,
    /// Blocks a segment takes.
    data: u32,
    /// As how many of them a dirty one counts.
    dirty: u32,
    segments: Vec<Segment>,
    /// Closed segments by live blocks, then age.
    by_live: Vec<BTreeSet<(u64, u32)>>,
    /// Closed segments in the order in which eviction looks at them: those on probation, and the others.
    turns: [BTreeSet<(u64, u32)>; 2],
    /// Blocks that live in segments on probation.
    on_probation: u64,
    /// Blocks appended, moves aside.
    clock: u64,
    /// Segments opened.
    opened: u64,
    live: u64,
    dice: u64,
    /// Blocks appended in place of a copy, since the target was set.
    rewritten: u64,
    /// Has a segment been freed? Before, everything is welcome.
    begun: bool,
    /// Blocks that may live now, as the price has it.
    target: u64,
    /// Hits of what lies on flash, since the target was set.
    hits: u64,
    /// When that was.
    set_at: u64,
    /// For 1024 blocks appended, lately: hits, and how many were appended in place of a copy.
    rate: Option<(u64, u64)>,
}

impl Cleaner {
    /// For a log of `segments` segments of `data` blocks each, all free.
    pub fn new(plan: Plan, segments: u32, data: u32) -> Cleaner {
        Cleaner {
            plan,
            data: data.max(1),
            dirty: 1,
            segments: vec![Segment::default(); segments as usize],
            by_live: vec![BTreeSet::new(); BUCKETS + 1],
            turns: Default::default(),
            on_probation: 0,
            clock: 0,
            opened: 0,
            live: 0,
            dice: 0,
            rewritten: 0,
            begun: false,
            target: plan.most - plan.most / SLACK,
            hits: 0,
            set_at: 0,
            rate: None,
        }
    }

    /// The same where a dirty block takes the room of two: what lives is counted so, and it is said so of `data`, too.
    pub fn counting_dirty_twice(self) -> Cleaner {
        Cleaner { dirty: 2, ..self }
    }

    /// From now on a dirty block takes no more room than any other, and a segment takes so many blocks.
    pub fn count_all_alike(&mut self, data: u32) {
        let more = self.dirty - 1;
        self.dirty = 1;
        self.data = data.max(1);
        self.by_live.iter_mut().for_each(BTreeSet::clear);
        for seg in 0..self.segments.len() as u32 {
            let s = &mut self.segments[seg as usize];
            s.live -= s.dirty * more;
            self.live -= u64::from(s.dirty * more);
            if s.probation {
                self.on_probation -= u64::from(s.dirty * more);
            }
            let s = *s;
            if s.closed {
                let (bucket, rank) = (self.bucket(s.live), self.rank(&s));
                self.by_live[bucket].insert((rank, seg));
            }
        }
    }

    fn blocks(&self, dirty: bool) -> u32 {
        if dirty { self.dirty } else { 1 }
    }

    /// The settings.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Blocks that live.
    pub fn live(&self) -> u64 {
        self.live
    }

    /// Of a segment: blocks that live, and of these the dirty ones.
    pub fn counts(&self, seg: u32) -> (u32, u32) {
        let s = &self.segments[seg as usize];
        (s.live, s.dirty)
    }

    fn bucket(&self, live: u32) -> usize {
        (live as usize * BUCKETS)
            .div_ceil(self.data as usize)
            .min(BUCKETS)
    }

    fn age(&self, s: &Segment) -> u64 {
        self.clock.saturating_sub(s.at)
    }

    /// What orders segments within a bucket: the first is the best of them, whatever the rule.
    fn rank(&self, s: &Segment) -> u64 {
        match self.plan.order {
            Order::Oldest => s.seq,
            _ => s.at,
        }
    }

    /// Blocks that may live now.
    pub fn target(&self) -> u64 {
        self.target
    }

    /// Sets for how many blocks there is room: segments have become unusable.
    pub fn set_room(&mut self, room: u64) {
        self.plan.room = room;
        self.plan.most = most_of(room);
        self.target = self.target.min(self.plan.most - self.plan.most / SLACK);
    }

    /// Sets what a block written to flash costs, in 1024ths of a hit.
    pub fn set_price(&mut self, price: u64) {
        self.plan.price = price;
    }

    /// So many blocks that lie on flash are rewritten.
    pub fn rewrite(&mut self, blocks: u64) {
        self.rewritten += blocks;
    }

    /// A guest read a block that lies on flash.
    pub fn hit(&mut self) {
        self.hits += 1;
    }

    /// Sets the target by what hits there were for what was appended.
    fn adapt(&mut self) {
        let passed = self.clock - self.set_at;
        if passed < (self.plan.room / EPOCHS).max(1) {
            return;
        }
        let lately = |before: Option<u64>, now: u64| before.map_or(now, |b| (b * 3 + now) / 4);
        let rate = lately(self.rate.map(|r| r.0), self.hits * 1024 / passed);
        let rewritten = lately(self.rate.map(|r| r.1), self.rewritten * 1024 / passed);
        self.rate = Some((rate, rewritten));
        (self.hits, self.rewritten, self.set_at) = (0, 0, self.clock);
        if rewritten < 1024 / SLACK {
            // Holes come from eviction alone: what is freed is what is evicted, the oldest first.
            self.target = 0;
            return;
        }
        let price = self.plan.price * rewritten / 1024;
        self.target =
            worthwhile(rate, price, self.plan.room).min(self.plan.most - self.plan.most / SLACK);
    }

    /// A free segment becomes the head's.
    pub fn open(&mut self, seg: u32, head: usize) {
        self.opened += 1;
        self.segments[seg as usize] = Segment {
            seq: self.opened,
            head: head as u8,
            ..Segment::default()
        };
    }

    /// A block was appended to an open segment.
    pub fn append(&mut self, seg: u32, why: Why, dirty: bool) {
        let (born, seen) = match why {
            Why::Moved { from } => {
                let from = &self.segments[from as usize];
                // Where blocks fade as they are moved, eviction has looked at them.
                let seen = match self.is_due(from) {
                    true => self.clock,
                    false => from.seen,
                };
                (from.born, seen)
            }
            _ => {
                self.clock += 1;
                self.adapt();
                (self.clock, self.clock)
            }
        };
        let blocks = self.blocks(dirty);
        self.live += u64::from(blocks);
        let s = &mut self.segments[seg as usize];
        s.live += blocks;
        s.filled += 1;
        s.dirty += u32::from(dirty);
        s.written += u32::from(matches!(why, Why::Written { .. }));
        s.born += born;
        s.seen += seen;
    }

    /// Nothing more is appended to it.
    pub fn close(&mut self, seg: u32) {
        let s = &mut self.segments[seg as usize];
        let n = u64::from(s.filled.max(1));
        s.born /= n;
        s.seen /= n;
        s.closed = true;
        s.at = self.clock;
        if !s.probation && s.written * 2 > s.filled {
            s.probation = true;
            self.on_probation += u64::from(s.live);
        }
        let s = *s;
        let (bucket, rank) = (self.bucket(s.live), self.rank(&s));
        self.by_live[bucket].insert((rank, seg));
        self.turns[s.turns()].insert((s.seen, seg));
    }

    /// A live block is overwritten, discarded, dropped or was moved away.
    pub fn died(&mut self, seg: u32, dirty: bool) {
        self.segments[seg as usize].dirty -= u32::from(dirty);
        self.lives_less(seg, self.blocks(dirty));
    }

    fn lives_less(&mut self, seg: u32, blocks: u32) {
        self.live -= u64::from(blocks);
        let s = &mut self.segments[seg as usize];
        s.live -= blocks;
        let s = *s;
        if s.probation {
            self.on_probation -= u64::from(blocks);
        }
        let (before, now) = (self.bucket(s.live + blocks), self.bucket(s.live));
        if s.closed && before != now {
            let rank = self.rank(&s);
            self.by_live[before].remove(&(rank, seg));
            self.by_live[now].insert((rank, seg));
        }
    }

    /// A place of an open segment was used, and nothing that counts lies there.
    pub fn skip(&mut self, seg: u32) {
        let s = &mut self.segments[seg as usize];
        s.filled += 1;
        s.born += self.clock;
        s.seen += self.clock;
    }

    /// So many reads of guests were hits on flash.
    pub fn hits(&mut self, count: u64) {
        self.hits += count;
    }

    /// A segment that was [withdrawn](Self::withdraw) counts again.
    pub fn give_back(&mut self, seg: u32) {
        self.segments[seg as usize].closed = true;
        let s = self.segments[seg as usize];
        let (bucket, rank) = (self.bucket(s.live), self.rank(&s));
        self.by_live[bucket].insert((rank, seg));
        self.turns[s.turns()].insert((s.seen, seg));
    }

    /// A closed segment is left alone from now on, whatever lies in it.
    pub fn withdraw(&mut self, seg: u32) {
        let s = self.segments[seg as usize];
        let (bucket, rank) = (self.bucket(s.live), self.rank(&s));
        self.by_live[bucket].remove(&(rank, seg));
        self.turns[s.turns()].remove(&(s.seen, seg));
        self.segments[seg as usize].closed = false;
    }

    /// The origin has a block that was dirty.
    pub fn destaged(&mut self, seg: u32) {
        self.segments[seg as usize].dirty -= 1;
        if self.dirty > 1 {
            self.lives_less(seg, self.dirty - 1);
        }
    }

    /// The segment may be opened again; nothing lives in it.
    pub fn free(&mut self, seg: u32) {
        let s = std::mem::take(&mut self.segments[seg as usize]);
        self.live -= u64::from(s.live);
        if s.probation {
            self.on_probation -= u64::from(s.live);
        }
        let (bucket, rank) = (self.bucket(s.live), self.rank(&s));
        self.by_live[bucket].remove(&(rank, seg));
        self.turns[s.turns()].remove(&(s.seen, seg));
    }

    /// The segment to be freed next: `None` if no closed segment has a hole or, where eviction is left to
    /// freeing, there is none.
    pub fn pick(&mut self) -> Option<u32> {
        self.begun = true;
        let best = match self.plan.order {
            Order::Oldest => self
                .by_live
                .iter()
                .filter_map(|b| b.first())
                .min()
                .map(|(_, seg)| *seg),
            Order::Greedy => self.best(|s, _| u64::from(u32::MAX - s.live)),
            Order::CostBenefit => self.best(|s, c| {
                let gain = u64::from(c.data - s.live.min(c.data));
                gain * 1024 * c.age(s).max(1) / u64::from(c.data + s.live)
            }),
            Order::Aged => self.best(|s, c| {
                let gain = u64::from(c.data - s.live.min(c.data));
                match s.live {
                    0 => u64::MAX,
                    live => gain * 1024 * c.age(s).max(1) / u64::from(live),
                }
            }),
            Order::Choices(n) => self.sampled(n),
            Order::Index => self.best(|s, c| index(s.live, c.data, c.age(s))),
        };
        if self.plan.order == Order::Oldest {
            return best;
        }
        // Where more lives than should and no segment is cheap, one is freed in which most was not used for long.
        let dear =
            |seg: &u32| u64::from(self.segments[*seg as usize].live) * 4 > u64::from(self.data) * 3;
        let crowded = self.crowded();
        best.filter(|seg| !crowded || !dear(seg))
            .or_else(|| self.turn().filter(|_| crowded))
            .filter(|seg| crowded || self.segments[*seg as usize].live < self.data)
    }

    /// A closed segment in which nothing lives, if there is one.
    pub fn dead(&self) -> Option<u32> {
        self.by_live[0].first().map(|(_, seg)| *seg)
    }

    /// The best by score among the oldest of every bucket.
    fn best(&self, score: impl Fn(&Segment, &Cleaner) -> u64) -> Option<u32> {
        self.by_live
            .iter()
            .filter_map(|b| b.first())
            .max_by_key(|(_, seg)| score(&self.segments[*seg as usize], self))
            .map(|(_, seg)| *seg)
    }

    fn sampled(&mut self, n: u32) -> Option<u32> {
        let mut best: Option<u32> = None;
        // Some of those looked at are open or free.
        for _ in 0..u64::from(n.max(1)) * 8 {
            self.dice += 1;
            let at = (spread(self.dice) % self.segments.len() as u64) as u32;
            if !self.segments[at as usize].closed {
                continue;
            }
            let live = |seg: u32| self.segments[seg as usize].live;
            best = best.filter(|b| live(*b) <= live(at)).or(Some(at));
        }
        best
    }

    /// What becomes of a live block of a segment that is being freed, used `freq` times lately.
    pub fn fate(&self, seg: u32, dirty: bool, freq: u8) -> Fate {
        let fades = self.fades(seg);
        if !dirty && freq == 0 && fades {
            return Fate::Drop;
        }
        Fate::Move {
            head: self.head(Why::Moved { from: seg }),
            fades: fades && !dirty,
        }
    }

    /// Was a block whose copy lay in this segment, and is now rewritten, rewritten often?
    pub fn hot(&self, seg: u32) -> bool {
        let s = &self.segments[seg as usize];
        match s.head {
            // What is hot needs more to be cold than what is cold needs to stay so.
            0 => self.is_young(s, 2),
            1 => self.is_young(s, 1),
            _ => false,
        }
    }

    fn is_young(&self, s: &Segment, spans: u64) -> bool {
        self.born_ago(s) * 16 < self.plan.most * self.plan.span * spans
    }

    fn born_ago(&self, s: &Segment) -> u64 {
        let born = if s.closed {
            s.born
        } else {
            s.born / u64::from(s.filled.max(1))
        };
        self.clock.saturating_sub(born)
    }

    /// The head a block is appended to.
    pub fn head(&self, why: Why) -> usize {
        match (self.plan.heads, why) {
            (Heads::One, _) => 0,
            (Heads::MovesApart, Why::Moved { .. }) => 1,
            (Heads::MovesApart, _) => 0,
            (_, Why::Written { hot: true }) => 0,
            (_, Why::Written { hot: false } | Why::Filled) => 1,
            (_, Why::Moved { from }) => {
                // What survives among the hot is hot still, for a while: most of it had no time to be
                // rewritten.
                let s = &self.segments[from as usize];
                if s.head == 0 && self.is_young(s, 2) {
                    0
                } else {
                    self.plan.heads.count() - 1
                }
            }
        }
    }

    /// True if segments on probation hold more than their share. They are then freed first, and other segments keep their
    /// use counts.
    pub fn probation_first(&self) -> bool {
        self.on_probation * 100 > self.plan.most * PROBATION_PERCENT
    }

    /// Share of the room, in percent, of blocks that are not on probation.
    pub fn kept_percent(&self) -> u64 {
        ((self.live - self.on_probation) * 100 / self.plan.room.max(1)).min(100)
    }

    /// Does more live than should?
    pub fn crowded(&self) -> bool {
        self.live > self.target
    }

    /// Does eviction look at what lives in a segment that is freed? Where more lives than should, it does if that is
    /// its turn or will be soon.
    ///
    /// A segment is chosen by how little lives in it, which says nothing of how long what does was not used. Were
    /// that dropped because its neighbours were overwritten, it would go while older blocks stay, for
    /// in their segments nothing is ever overwritten.
    pub fn fades(&self, seg: u32) -> bool {
        self.is_due(&self.segments[seg as usize])
    }

    fn is_due(&self, s: &Segment) -> bool {
        if !s.probation && self.probation_first() {
            return false;
        }
        if !self.crowded() || self.target == 0 {
            // Where nothing is rewritten, what is freed is what is evicted.
            return self.crowded();
        }
        let ago = |s: &Segment| self.clock.saturating_sub(s.seen);
        let next = self
            .turn()
            .map_or(0, |seg| ago(&self.segments[seg as usize]));
        ago(s) * YOUNG_SHARE >= next
    }

    /// Must a newcomer be worth more than what it displaces?
    pub fn full(&self) -> bool {
        self.begun && self.live >= self.target
    }

    /// Has a block to go at once for a newcomer, not only when its segment is freed?
    pub fn brimful(&self) -> bool {
        self.target > 0 && self.live >= self.plan.most
    }

    /// The segment in which eviction looks for what to drop.
    pub fn turn(&self) -> Option<u32> {
        let [probation, others] = self.turns.each_ref().map(BTreeSet::first);
        let next = match self.probation_first() {
            true => probation.or(others),
            false => others.or(probation),
        };
        next.map(|(_, seg)| *seg)
    }

    /// Closed segments in the order of eviction, from one of them on, which may be free meanwhile.
    pub fn turns_from(&self, seg: u32) -> impl Iterator<Item = u32> + '_ {
        let from = self.segments.get(seg as usize).filter(|s| s.closed);
        let first = from.map_or(usize::from(!self.probation_first()), Segment::turns);
        let from = from.map_or((0, 0), |s| (s.seen, seg));
        let rest = self.turns[first].range(from..);
        rest.chain(&self.turns[1 - first]).map(|(_, seg)| *seg)
    }

    /// Eviction has looked at all of it; it comes last now.
    pub fn turned(&mut self, seg: u32) {
        let s = &mut self.segments[seg as usize];
        self.turns[s.turns()].remove(&(s.seen, seg));
        if std::mem::take(&mut s.probation) {
            self.on_probation -= u64::from(s.live);
        }
        s.seen = self.clock;
        self.turns[s.turns()].insert((s.seen, seg));
    }
}

#[cfg(test)]
mod tests;
