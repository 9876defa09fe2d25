//! What to read before it is asked for.
//!
//! A hard disk spends its time finding the place, not reading it: blocks that follow a miss cost
//! a hundredth of the miss. Two predictors share one allowance:
//!
//! - **streams**: requests that continue one another, up to [`STREAMS`] at once, are read ahead
//!   in proportion to what the stream has proven, so a stream that ends wastes no more than it
//!   was worth;
//! - **history**: requests that had to wait for the origin are remembered in order. When one
//!   comes again, what followed it last time is read ahead, one more request for every one that
//!   came true: a boot, an application's start or a nightly job repeats its order, not its
//!   addresses.
//!
//! It limits itself. Of streams that have just begun and of those that have come far, of history that came
//! true here and of guesses, it knows apart how many blocks were used and how many dropped unused; the
//! reach shrinks as the share of waste grows, down to a probe now and then.
//! Prefetched blocks wait in RAM and never go on flash before they were used.

use crate::{Range, spread};

/// Streams followed at once: guests interleave files, so as many as disks in a pool keep busy.
pub const STREAMS: usize = 32;
/// Blocks a request may leave out and still continue a stream: file systems skip what they have.
const SKIP: u64 = 8;
/// Blocks by which it may overlap what the stream has read.
const OVERLAP: u64 = 64;
/// Places in the history followed at once.
const FOLLOWERS: usize = 8;
/// Entries a follower looks ahead for the request that comes.
const LOOK: u32 = 8;
/// Most blocks of one history entry; longer runs take several.
const ENTRY_BLOCKS: u32 = 256;
/// Most blocks read ahead at once: 1 MiB, 7 ms of a disk's time.
pub const REACH_MAX: u32 = 256;
/// Most entries a follower reads ahead.
const DEPTH_MAX: u32 = 64;
/// Uses and drops over which usefulness is averaged.
const MEMORY: u32 = 256;
/// At this share it reaches as far as it asked for; also where it begins.
const USEFUL_FULL: u32 = 192;
/// Below this share of used blocks (of 256) a predictor only probes.
const USEFUL_MIN: u32 = 104;
/// Blocks from which on a stream has come far.
const OLD: u64 = 64;
/// Reach of a probe.
const PROBE_BLOCKS: u32 = 8;
/// While probing, one in this many chances is taken.
const PROBE: u32 = 16;

/// Who predicted a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A sequential stream that has come far.
    Stream,
    /// One that has just begun.
    Young,
    /// The history of requests, which came true here before.
    History,
    /// The same, on the strength of one request.
    Guess,
}

impl Source {
    /// All of them.
    const COUNT: usize = 4;
}

#[derive(Clone, Copy, Debug)]
struct Stream {
    /// Where its next request should begin.
    next: u64,
    /// Read ahead up to here.
    ahead: u64,
    /// Blocks it has covered.
    run: u64,
}

impl Stream {
    /// One that no request continues.
    const NONE: Stream = Stream {
        next: u64::MAX,
        ahead: u64::MAX,
        run: 0,
    };
}

#[derive(Clone, Copy, Debug, Default)]
struct Follower {
    /// Entry of the history whose request came.
    at: u32,
    /// Entries read ahead beyond it.
    ahead: u32,
    /// Entries it may reach.
    depth: u32,
    live: bool,
    used: u32,
}

/// How useful a predictor is: a moving share of used blocks, in 256ths.
#[derive(Clone, Copy, Debug)]
struct Useful {
    share: u32,
    chances: u32,
}

impl Default for Useful {
    fn default() -> Useful {
        Useful {
            share: USEFUL_FULL * MEMORY,
            chances: 0,
        }
    }
}

impl Useful {
    fn note(&mut self, used: bool) {
        self.share = self.share - self.share / MEMORY + if used { 256 } else { 0 };
    }

    fn share(&self) -> u32 {
        self.share / MEMORY
    }

    /// Scales a reach by usefulness; zero most of the time when there is none.
    fn reach(&mut self, blocks: u32) -> u32 {
        let share = self.share();
        if share < USEFUL_MIN {
            self.chances += 1;
            if self.chances % PROBE != 0 {
                return 0;
            }
            return blocks.min(PROBE_BLOCKS);
        }
        (blocks * share / USEFUL_FULL).clamp(1, REACH_MAX)
    }
}

/// A remembered request: 56 bits of key, 8 of count less one. Keys that need more are not
/// remembered.
#[derive(Clone, Copy, Debug, Default)]
struct Entry(u64);

impl Entry {
    fn new(start: u64, count: u32) -> Entry {
        Entry(start << 8 | u64::from(count.clamp(1, ENTRY_BLOCKS) - 1))
    }

    fn start(self) -> u64 {
        self.0 >> 8
    }

    fn count(self) -> u32 {
        (self.0 & 0xFF) as u32 + 1
    }
}

/// The predictors of a pool.
#[derive(Debug)]
pub struct Prefetcher {
    streams: [Stream; STREAMS],
    /// Lower halves of where the streams' next requests should begin, to look through all at once.
    nexts: [u32; STREAMS],
    /// A bit per stream: continued since the hand passed it.
    proven: u32,
    /// The stream to give up next, unless it was proven.
    hand: u32,
    followers: [Follower; FOLLOWERS],
    history: Vec<Entry>,
    /// Where in `history` a request that begins at a block was last seen, by hash.
    places: Vec<u32>,
    /// Next entry to write, and whether all have been written once.
    head: u32,
    wrapped: bool,
    clock: u32,
    reach_max: u32,
    useful: [Useful; Source::COUNT],
}

/// Requests remembered at least and at most.
const ENTRIES_MIN: usize = 16;
const ENTRIES_MAX: usize = 1 << 24;

impl Prefetcher {
    /// A prefetcher that reads at most `reach_max` blocks ahead at once and remembers `entries`
    /// requests.
    pub fn new(reach_max: u32, entries: u32) -> Prefetcher {
        let entries = entries.clamp(ENTRIES_MIN as u32, ENTRIES_MAX as u32);
        Prefetcher {
            streams: [Stream::NONE; STREAMS],
            nexts: [Stream::NONE.next as u32; STREAMS],
            proven: 0,
            hand: 0,
            followers: [Follower::default(); FOLLOWERS],
            history: vec![Entry::default(); entries as usize],
            places: vec![u32::MAX; (entries as usize * 2).next_power_of_two()],
            head: 0,
            wrapped: false,
            clock: 0,
            reach_max: reach_max.clamp(1, REACH_MAX),
            useful: Default::default(),
        }
    }

    /// Notes a read of `count` blocks from `key`; adds what should be read ahead to `out`. True if
    /// it continues a stream that was read ahead.
    pub fn request(&mut self, key: u64, count: u32, out: &mut Vec<(Range, Source)>) -> bool {
        self.clock = self.clock.wrapping_add(1);
        self.follow_stream(key, count, out)
    }

    /// Notes that a read had to wait, i.e. needed a block that was neither on flash nor in RAM or
    /// was there only because it was prefetched.
    pub fn waited(
        &mut self,
        key: u64,
        count: u32,
        in_stream: bool,
        out: &mut Vec<(Range, Source)>,
    ) {
        self.follow_history(key, count, in_stream, out);
    }

    /// A prefetched block was used, or dropped without a use.
    pub fn outcome(&mut self, source: Source, used: bool) {
        self.useful[source as usize].note(used);
    }

    /// Share of prefetched blocks that were used lately, in 256ths: streams, history.
    pub fn useful(&self) -> (u32, u32) {
        let share = |source: Source| self.useful[source as usize].share();
        (share(Source::Stream), share(Source::History))
    }

    /// The stream that a request from `key` to `end` continues.
    #[inline]
    fn find_stream(&self, key: u64, end: u64) -> Option<usize> {
        // Most requests continue none: the lower halves tell, and are compared many at a time.
        let low = (key as u32).wrapping_sub(SKIP as u32);
        let mut near = 0u32;
        for (i, next) in self.nexts.iter().enumerate() {
            near |= u32::from(next.wrapping_sub(low) < (SKIP + OVERLAP) as u32) << i;
        }
        while near != 0 {
            let i = near.trailing_zeros() as usize;
            let next = self.streams[i].next;
            if key <= next.saturating_add(SKIP) && key.saturating_add(OVERLAP) > next && end >= next
            {
                return Some(i);
            }
            near &= near - 1;
        }
        None
    }

    /// A stream that was not continued for a while, for another to take its place.
    fn give_up(&mut self) -> usize {
        // From the hand on, the first not proven; those it passes must prove themselves again.
        let passed = self.proven.rotate_right(self.hand).trailing_ones();
        let i = (self.hand + passed) % STREAMS as u32;
        if passed >= STREAMS as u32 {
            self.proven = 0;
        } else {
            let mask = ((1u64 << passed) - 1) as u32;
            self.proven &= !mask.rotate_left(self.hand);
        }
        self.hand = (i + 1) % STREAMS as u32;
        i as usize
    }

    /// True if the request continues a stream.
    fn follow_stream(&mut self, key: u64, count: u32, out: &mut Vec<(Range, Source)>) -> bool {
        let end = key.saturating_add(u64::from(count));
        let Some(i) = self.find_stream(key, end) else {
            let i = self.give_up();
            self.nexts[i] = end as u32;
            self.streams[i] = Stream {
                next: end,
                ahead: end,
                run: u64::from(count),
            };
            return false;
        };
        self.proven |= 1 << i;
        let s = &mut self.streams[i];
        if end <= s.next {
            return true;
        }
        s.run += end - s.next;
        s.next = end;
        self.nexts[i] = end as u32;
        let want = s.run.min(u64::from(self.reach_max)) as u32;
        let left = s.ahead.saturating_sub(end) as u32;
        // Read on when half of what was read ahead is used up: fewer, larger reads.
        if left * 2 <= want {
            let source = if s.run < OLD {
                Source::Young
            } else {
                Source::Stream
            };
            let reach = self.useful[source as usize].reach(want);
            let from = s.ahead.max(end);
            let to = end + u64::from(reach);
            if to > from {
                s.ahead = to;
                out.push((
                    Range {
                        key: from,
                        count: (to - from) as u32,
                    },
                    source,
                ));
            }
        }
        true
    }

    fn entry(&self, at: u32) -> Entry {
        self.history[at as usize]
    }

    fn after(&self, at: u32, n: u32) -> u32 {
        ((u64::from(at) + u64::from(n)) % self.history.len() as u64) as u32
    }

    /// Is entry `at` in the past, `n` entries from it still before the head?
    fn reachable(&self, at: u32, n: u32) -> bool {
        let len = self.history.len() as u32;
        let to_head = (self.head + len - at - 1) % len + 1;
        n < to_head && (self.wrapped || at < self.head)
    }

    fn remember(&mut self, key: u64, count: u32) {
        let place = self.place(key);
        self.places[place] = self.head;
        self.history[self.head as usize] = Entry::new(key, count);
        self.head += 1;
        if self.head as usize == self.history.len() {
            self.head = 0;
            self.wrapped = true;
        }
    }

    fn place(&self, key: u64) -> usize {
        (spread(key) >> 32) as usize & (self.places.len() - 1)
    }

    fn follow_history(
        &mut self,
        key: u64,
        count: u32,
        in_stream: bool,
        out: &mut Vec<(Range, Source)>,
    ) {
        let mut matched = None;
        'all: for (i, f) in self.followers.iter().enumerate() {
            if !f.live {
                continue;
            }
            for n in 1..=LOOK {
                if !self.reachable(f.at, n) {
                    break;
                }
                let e = self.entry(self.after(f.at, n));
                if key >= e.start() && key < e.start() + u64::from(e.count()) {
                    matched = Some((i, n));
                    break 'all;
                }
            }
        }
        if let Some((i, n)) = matched {
            let f = &mut self.followers[i];
            let len = self.history.len() as u64;
            f.at = ((u64::from(f.at) + u64::from(n)) % len) as u32;
            f.ahead = f.ahead.saturating_sub(n);
            f.depth = (f.depth * 2).min(DEPTH_MAX);
            f.used = self.clock;
            self.read_ahead(i, out);
        } else {
            let at = self.places[self.place(key)];
            if at != u32::MAX && self.entry(at).start() == key && self.reachable(at, 1) {
                let clock = self.clock;
                let i = (0..FOLLOWERS)
                    .max_by_key(|i| {
                        let f = &self.followers[*i];
                        if f.live {
                            clock.wrapping_sub(f.used)
                        } else {
                            u32::MAX
                        }
                    })
                    .unwrap_or(0);
                self.followers[i] = Follower {
                    at,
                    ahead: 0,
                    depth: 1,
                    live: true,
                    used: clock,
                };
                self.read_ahead(i, out);
            }
        }
        // What continues the entry before is part of it, so that long runs take little memory.
        let last = if self.head == 0 {
            self.history.len() - 1
        } else {
            self.head as usize - 1
        };
        let e = self.history[last];
        let joins = in_stream && e.start() + u64::from(e.count()) == key;
        if joins && e.count().saturating_add(count) <= ENTRY_BLOCKS {
            self.history[last] = Entry::new(e.start(), e.count() + count);
        } else if key >> 56 == 0 {
            self.remember(key, count);
        }
    }

    fn read_ahead(&mut self, i: usize, out: &mut Vec<(Range, Source)>) {
        let f = self.followers[i];
        let mut ahead = f.ahead;
        // What is ahead already waits in the same RAM as what comes now.
        let waiting: u32 = (1..=ahead)
            .map(|n| self.entry(self.after(f.at, n)).count())
            .sum();
        let source = if f.depth == 1 {
            Source::Guess
        } else {
            Source::History
        };
        let useful = &mut self.useful[source as usize];
        let mut budget = useful.reach(self.reach_max).saturating_sub(waiting);
        while ahead < f.depth && budget > 0 && self.reachable(f.at, ahead + 1) {
            let e = self.entry(self.after(f.at, ahead + 1));
            let count = e.count().min(budget);
            out.push((
                Range {
                    key: e.start(),
                    count,
                },
                source,
            ));
            budget -= count;
            ahead += 1;
        }
        self.followers[i].ahead = ahead;
    }

    /// Bytes one that remembers `entries` requests takes.
    pub fn footprint_of(entries: usize) -> usize {
        let entries = entries.clamp(ENTRIES_MIN, ENTRIES_MAX);
        entries * std::mem::size_of::<Entry>() + (entries * 2).next_power_of_two() * 4
    }

    /// Bytes it takes.
    pub fn footprint(&self) -> usize {
        self.history.len() * std::mem::size_of::<Entry>() + self.places.len() * 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(out: &[(Range, Source)]) -> Vec<u64> {
        out.iter()
            .flat_map(|(r, _)| r.key..r.key + u64::from(r.count))
            .collect()
    }

    #[test]
    fn a_stream_is_read_ahead_and_a_random_read_is_not() {
        let mut p = Prefetcher::new(64, 64);
        let mut out = Vec::new();
        assert!(!p.request(1000, 4, &mut out));
        assert!(out.is_empty(), "one request is no stream");
        let mut ahead = Vec::new();
        for i in 1..50u64 {
            out.clear();
            assert!(p.request(1000 + i * 4, 4, &mut out));
            ahead.extend(blocks(&out));
        }
        let want: Vec<u64> = (1008..1008 + ahead.len() as u64).collect();
        assert_eq!(ahead, want, "every block once, in order");
        assert!(ahead.len() > 190);
        out.clear();
        assert!(!p.request(9_000_000, 4, &mut out));
        assert!(out.is_empty());
    }

    #[test]
    fn interleaved_streams_do_not_disturb_each_other() {
        let mut p = Prefetcher::new(64, 64);
        let mut out = Vec::new();
        for i in 0..20u64 {
            for s in 0..STREAMS as u64 {
                out.clear();
                let known = p.request(s << 30 | (i * 8), 8, &mut out);
                assert_eq!(known, i > 0);
            }
        }
    }

    #[test]
    fn what_happened_before_happens_again() {
        let mut p = Prefetcher::new(256, 1024);
        let mut out = Vec::new();
        let order: Vec<u64> = (0..100u64).map(|i| spread(i) >> 24).collect();
        for key in &order {
            p.waited(*key, 2, false, &mut out);
        }
        assert!(out.is_empty());
        let mut foreseen = std::collections::HashSet::new();
        let mut hits = 0;
        for key in &order {
            hits += usize::from(foreseen.contains(key));
            out.clear();
            p.waited(*key, 2, false, &mut out);
            foreseen.extend(blocks(&out));
        }
        assert!(hits >= 98, "{hits} of 100 foreseen");
    }

    #[test]
    fn useless_prefetch_stops_itself_and_probes() {
        let mut p = Prefetcher::new(256, 64);
        let mut out = Vec::new();
        let run = |p: &mut Prefetcher, out: &mut Vec<(Range, Source)>, base: u64| {
            out.clear();
            for i in 0..16u64 {
                p.request(base + i * 8, 8, out);
            }
            blocks(out).len()
        };
        let at_first = run(&mut p, &mut out, 0);
        let all = [Source::Young, Source::Stream];
        for source in all.iter().cycle().take(4000) {
            p.outcome(*source, false);
        }
        let wasted: usize = (1..33).map(|i| run(&mut p, &mut out, i << 20)).sum();
        assert!(
            wasted / 32 < at_first / 4,
            "{wasted} blocks after waste, {at_first} before"
        );
        assert!(wasted > 0, "it must go on probing");
        for source in all.iter().cycle().take(4000) {
            p.outcome(*source, true);
        }
        assert!(run(&mut p, &mut out, 99 << 20) * 2 >= at_first);
    }
    #[test]
    fn short_streams_do_not_spoil_long_ones() {
        let mut p = Prefetcher::new(256, 64);
        for _ in 0..2000 {
            p.outcome(Source::Young, false);
        }
        let mut out = Vec::new();
        let mut ahead = [0, 0];
        for i in 0..64u64 {
            out.clear();
            p.request(i * 8, 8, &mut out);
            ahead[usize::from(i >= 7)] += blocks(&out).len();
        }
        assert!(ahead[0] <= 8, "{ahead:?}: it has just begun");
        assert!(ahead[1] >= 400, "{ahead:?}: it has come far");
    }
}
