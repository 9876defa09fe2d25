//! A small log without data, cleaned under each rule.

use super::*;

const DATA: u32 = 32;
const SEGMENTS: u32 = 40;
const RESERVE: usize = 3;

fn plan(order: Order, heads: Heads, price: u64) -> Plan {
    let room = u64::from(SEGMENTS - RESERVE as u32 - heads.count() as u32) * u64::from(DATA);
    Plan {
        order,
        heads,
        most: room - room / 32,
        room,
        span: 8,
        price,
    }
}

/// A log without data: who lies where, and nothing else.
struct Log {
    cleaner: Cleaner,
    slots: Vec<Vec<u64>>,
    place: std::collections::HashMap<u64, (u32, usize, u8)>,
    free: Vec<u32>,
    heads: [Option<u32>; HEADS_MAX],
    moved: u64,
    dropped: u64,
    freed: u64,
    freed_live: u64,
}

impl Log {
    fn new(plan: Plan) -> Log {
        Log {
            cleaner: Cleaner::new(plan, SEGMENTS, DATA),
            slots: vec![Vec::new(); SEGMENTS as usize],
            place: std::collections::HashMap::new(),
            free: (0..SEGMENTS).collect(),
            heads: [None; HEADS_MAX],
            moved: 0,
            dropped: 0,
            freed: 0,
            freed_live: 0,
        }
    }

    fn kill(&mut self, key: u64) -> Option<u32> {
        let (seg, _, _) = self.place.remove(&key)?;
        self.cleaner.died(seg, false);
        Some(seg)
    }

    fn append(&mut self, key: u64, why: Why, freq: u8) {
        let head = self.cleaner.head(why);
        if let Some(seg) = self.heads[head]
            && self.slots[seg as usize].len() >= DATA as usize
        {
            self.cleaner.close(seg);
            self.heads[head] = None;
        }
        if self.heads[head].is_none() && !matches!(why, Why::Moved { .. }) {
            while self.free.len() <= RESERVE {
                self.clean();
            }
        }
        // Making room may have opened and filled this head.
        if let Some(seg) = self.heads[head]
            && self.slots[seg as usize].len() >= DATA as usize
        {
            return self.append(key, why, freq);
        }
        let seg = self.heads[head].unwrap_or_else(|| {
            let seg = self.free.pop().expect("the reserve is enough for moves");
            self.cleaner.open(seg, head);
            seg
        });
        self.heads[head] = Some(seg);
        self.place
            .insert(key, (seg, self.slots[seg as usize].len(), freq));
        self.slots[seg as usize].push(key);
        self.cleaner.append(seg, why, false);
    }

    fn clean(&mut self) {
        let seg = self.cleaner.pick().expect("something can be freed");
        let (live, _) = self.cleaner.counts(seg);
        let (moved, dropped) = (self.moved, self.dropped);
        let keys = std::mem::take(&mut self.slots[seg as usize]);
        for (slot, key) in keys.into_iter().enumerate() {
            let Some((s, n, freq)) = self.place.get(&key).copied() else {
                continue;
            };
            if (s, n) != (seg, slot) {
                continue;
            }
            self.kill(key);
            match self.cleaner.fate(seg, false, freq) {
                Fate::Drop => self.dropped += 1,
                Fate::Move { head, fades } => {
                    assert_eq!(head, self.cleaner.head(Why::Moved { from: seg }));
                    self.append(key, Why::Moved { from: seg }, freq - u8::from(fades));
                    self.moved += 1;
                }
            }
        }
        assert_eq!(self.moved - moved + self.dropped - dropped, u64::from(live));
        assert_eq!(
            self.cleaner.counts(seg).0,
            0,
            "nothing lives where it is freed"
        );
        self.cleaner.free(seg);
        self.free.insert(0, seg);
        self.freed += 1;
        self.freed_live += u64::from(live);
    }

    fn write(&mut self, key: u64) {
        let hot = match self.kill(key) {
            Some(seg) => {
                self.cleaner.rewrite(1);
                self.cleaner.hot(seg)
            }
            None => false,
        };
        if self.cleaner.live() < self.cleaner.plan().most {
            self.append(key, Why::Written { hot }, 1);
        }
    }

    fn check(&self) {
        assert_eq!(self.cleaner.live(), self.place.len() as u64);
        let counted: u64 = (0..SEGMENTS)
            .map(|s| u64::from(self.cleaner.counts(s).0))
            .sum();
        assert_eq!(counted, self.cleaner.live());
    }
}

#[test]
fn a_dirty_block_may_take_the_room_of_two_until_it_is_clean() {
    let mut cleaner =
        Cleaner::new(plan(Order::Greedy, Heads::One, 0), SEGMENTS, DATA).counting_dirty_twice();
    cleaner.open(0, 0);
    for i in 0..DATA / 2 {
        cleaner.append(0, Why::Filled, i % 2 == 0);
    }
    cleaner.close(0);
    let quarter = DATA / 4;
    assert_eq!(
        (cleaner.live(), cleaner.counts(0)),
        (24, (3 * quarter, quarter))
    );
    for _ in 0..quarter {
        cleaner.destaged(0);
    }
    assert_eq!((cleaner.live(), cleaner.counts(0)), (16, (2 * quarter, 0)));
    // One half is lost: everything takes the same.
    cleaner.count_all_alike(DATA / 2);
    assert_eq!((cleaner.live(), cleaner.counts(0)), (16, (2 * quarter, 0)));
    cleaner.open(1, 0);
    cleaner.append(1, Why::Filled, true);
    assert_eq!(cleaner.counts(1), (1, 1));
    cleaner.free(1);
    for _ in 0..2 * quarter {
        cleaner.died(0, false);
    }
    assert_eq!((cleaner.live(), cleaner.dead()), (0, Some(0)));
    cleaner.free(0);
    assert_eq!((cleaner.dead(), cleaner.turn()), (None, None));
}

const ORDERS: [Order; 5] = [
    Order::Greedy,
    Order::CostBenefit,
    Order::Aged,
    Order::Index,
    Order::Choices(8),
];

/// Whatever is written, cleaning goes on with the reserve there is, and what it frees is all
/// moved or dropped.
#[test]
fn every_block_of_a_freed_segment_is_moved_or_dropped() {
    for order in ORDERS {
        for heads in [Heads::One, Heads::MovesApart, Heads::HotCold, Heads::Three] {
            for seed in 0..3 {
                let mut log = Log::new(plan(order, heads, 64 * seed));
                let blocks = log.cleaner.plan().most * (60 + 15 * seed) / 100;
                for n in 0..20_000 {
                    let r = spread(seed << 32 | n);
                    let key = if r % 5 > 0 {
                        r >> 8 & 63
                    } else {
                        (r >> 8) % blocks
                    };
                    log.write(key);
                    if n % 512 == 0 {
                        log.check();
                    }
                }
                log.check();
                assert!(log.freed > 100, "{order:?} {heads:?}: {}", log.freed);
                assert!(
                    log.freed_live < log.freed * u64::from(DATA),
                    "moves give room"
                );
            }
        }
    }
}

/// Greedy: the emptiest segment has at most the mean of all, so moves are bounded by what lives.
#[test]
fn what_is_moved_is_bounded_by_what_lives() {
    for share in [50, 70, 85] {
        let mut log = Log::new(plan(Order::Greedy, Heads::One, 0));
        let blocks = log.cleaner.plan().most * share / 100;
        for n in 0..60_000 {
            log.write(spread(n) % blocks);
        }
        let u = blocks as f64 / (f64::from(SEGMENTS - RESERVE as u32 - 2) * f64::from(DATA));
        let moved = log.freed_live as f64 / (log.freed * u64::from(DATA)) as f64;
        // Buckets are a 32nd of a segment wide.
        assert!(moved <= u + 1.0 / BUCKETS as f64, "{share}: {moved} of {u}");
    }
}

#[test]
fn hot_and_cold_apart_cost_less_than_one_head_with_greedy() {
    let cost = |order, heads| {
        let mut log = Log::new(plan(order, heads, 0));
        let blocks = log.cleaner.plan().most * 88 / 100;
        for n in 0..200_000u64 {
            let r = spread(n);
            let key = if r % 100 < 80 {
                (r >> 8) % (blocks / 5)
            } else {
                blocks / 5 + (r >> 8) % (blocks - blocks / 5)
            };
            log.write(key);
        }
        log.moved + 200_000
    };
    let (one, apart) = (
        cost(Order::Greedy, Heads::One),
        cost(Order::Index, Heads::HotCold),
    );
    assert!(apart * 100 < one * 90, "{apart} of {one}");
}

/// What is rewritten makes its neighbours' segments cheap, and they go all the same only when their turn comes.
#[test]
fn a_young_block_is_not_dropped_for_what_was_overwritten_beside_it() {
    let mut log = Log::new(plan(Order::Greedy, Heads::One, 1));
    let most = log.cleaner.plan().most;
    (0..most).for_each(|key| log.write(key));
    // Nothing is hit, so hardly anything is worth a move.
    for n in 0..most / 2 {
        log.write(n % 64);
    }
    assert!(log.cleaner.crowded() && log.cleaner.target() > 0);
    let old = log.cleaner.turn().expect("segments are closed");
    assert_eq!(log.cleaner.fate(old, false, 0), Fate::Drop);
    let closed = |seg: &u32| log.cleaner.segments[*seg as usize].closed;
    let seen = |seg: &u32| log.cleaner.segments[*seg as usize].seen;
    let young = (0..SEGMENTS).filter(closed).max_by_key(seen);
    let young = young.expect("segments are closed");
    let fate = log.cleaner.fate(young, false, 0);
    assert!(matches!(fate, Fate::Move { fades: false, .. }), "{fate:?}");
    assert_eq!(
        log.cleaner.fate(old, true, 0),
        Fate::Move {
            head: 0,
            fades: false
        }
    );
}

#[test]
fn the_dearer_a_write_the_fewer_blocks_live_and_hits_keep_them() {
    let room = 1_000_000;
    let mut before = room;
    for price in [1, 12, 48, 64, 128, 396] {
        let live = worthwhile(400, price, room);
        assert!(live <= before && live > 0, "{price}: {live}");
        before = live;
    }
    assert!(worthwhile(4000, 64, room) > worthwhile(400, 64, room));
    assert!(worthwhile(400, 0, room) > room * 99 / 100);
}

#[test]
fn the_index_prefers_holes_and_age() {
    assert!(index(10, 100, 50) > index(50, 100, 50));
    assert!(index(50, 100, 90) > index(50, 100, 50));
    assert_eq!(index(0, 100, 1), u64::MAX);
    assert_eq!(index(100, 100, 1000), 0);
}
