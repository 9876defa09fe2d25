#![allow(missing_docs)]
use crate::outcome::Outcome;
use crate::workload::Workload;
use hashbrown::HashMap;
use hearth_policy::{Sketch, Tuner, sketch_key};
use hearth_policy::prefetch::{Prefetcher, Source};
use std::collections::VecDeque;

#[derive(Clone, Copy, Debug)]
pub struct P {
    pub w: f64,      // cold share of flash
    pub gate: bool,  // duel for entry to flash
    pub promote: u8, // uses in cold that promote
    pub pre: u8,     // 1 streams 2 history
    pub tune: bool,
    pub skip: u8,
}

fn hash(k: u64) -> u64 {
    let mut h = (k ^ 0x1234_5678).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    h = (h ^ (h >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    h ^ (h >> 32)
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum At { Ram, Cold, Hot }

struct E { at: At, seq: u64, freq: u8, pre: Option<Source>, cov: bool }

pub struct Model {
    p: P,
    map: HashMap<u64, E>,
    ram: VecDeque<(u64, u64)>,
    cold: VecDeque<(u64, u64)>,
    hot: VecDeque<(u64, u64)>,
    nram: usize, ncold: usize, nhot: usize, npre: usize,
    ram_max: usize, cold_max: usize, flash_max: usize,
    seq: u64,
    sketch: Sketch,
    pub out: Outcome,
    pre: Prefetcher,
    pub tuner: Tuner,
    skipmode: u8,
}

impl Model {
    pub fn new(cap: usize, p: P) -> Model {
        let ram_max = (cap / 100).max((cap / 4).min(32)).max(1);
        let flash_max = cap.saturating_sub(ram_max).max(1);
        Model { p, map: HashMap::new(), ram: VecDeque::new(), cold: VecDeque::new(), hot: VecDeque::new(), nram: 0, ncold: 0, nhot: 0, npre: 0, ram_max, cold_max: (flash_max as f64 * p.w) as usize, flash_max, seq: 0, sketch: Sketch::new(cap.next_power_of_two() * 4, cap as u64 * 10), out: Outcome::default(), pre: Prefetcher::new(ram_max as u32 / 4, (cap as u32 / 16).max(1024)), tuner: Tuner::new(ram_max, flash_max), skipmode: p.skip }
    }
    fn push(&mut self, k: u64, at: At, freq: u8, pre: Option<Source>, cov: bool) {
        self.seq += 1;
        let q = match at { At::Ram => { self.nram += 1; &mut self.ram } At::Cold => { self.ncold += 1; &mut self.cold } At::Hot => { self.nhot += 1; &mut self.hot } };
        q.push_back((k, self.seq));
        if pre.is_some() { self.npre += 1; }
        self.map.insert(k, E { at, seq: self.seq, freq, pre, cov });
    }
    /// (hit, first use of prefetched, would have waited)
    fn access(&mut self, k: u64, write: bool, cov: bool) -> (bool, bool) {
        let h = hash(k);
        let cov = if self.skipmode & 8 != 0 { cov } else { self.map.get(&k).is_some_and(|e| e.pre.is_some()) };
        self.sketch.add(sketch_key(h as u32));
        if self.p.tune { self.tuner.access(h, write, cov, &self.sketch); let r = self.tuner.rules(); self.p.gate = r.gate; self.p.w = f64::from(r.cold) / 256.0; self.cold_max = r.cold_blocks(self.flash_max); }
        if let Some(e) = self.map.get_mut(&k) {
            let pre = e.pre.take(); e.cov &= cov;
            if let Some(s) = pre { self.npre -= 1; self.pre.outcome(s, true); } else { e.freq = (e.freq + 1).min(3); }
            if write && e.at != At::Ram {
                let (f, at, cov) = (e.freq, e.at, e.cov);
                if at == At::Cold { self.ncold -= 1 } else { self.nhot -= 1 }
                self.push(k, At::Ram, f, None, cov);
                self.shrink();
            }
            return (true, pre.is_some());
        }
        self.push(k, At::Ram, 0, None, cov);
        self.shrink();
        (false, false)
    }
    fn pop(map: &HashMap<u64, E>, q: &mut VecDeque<(u64, u64)>) -> Option<u64> {
        while let Some((k, s)) = q.pop_front() { if map.get(&k).is_some_and(|e| e.seq == s) { return Some(k); } }
        None
    }
    fn shrink(&mut self) {
        while self.nram > self.ram_max {
            let Some(k) = Self::pop(&self.map, &mut self.ram) else { return };
            self.nram -= 1;
            let e = self.map.remove(&k).unwrap();
            if let Some(s) = e.pre { self.npre -= 1; self.out.prefetch_wasted += 1; self.pre.outcome(s, false); continue; }
            if e.cov && e.freq == 0 { match self.skipmode & 7 { 1 => continue, 2 if self.ncold + self.nhot >= self.flash_max => continue, 3 if self.sketch.estimate(sketch_key(hash(k) as u32)) <= 1 => continue, 4 if self.ncold + self.nhot >= self.flash_max && self.sketch.estimate(sketch_key(hash(k) as u32)) <= 1 => continue, _ => {} } }
            self.offer(k, e.freq);
        }
    }
    fn offer(&mut self, k: u64, freq: u8) {
        let full = self.ncold + self.nhot >= self.flash_max;
        if !full { self.out.insertions += 1; self.push(k, if freq > 0 { At::Hot } else { At::Cold }, 0, None, false); return; }
        if self.p.gate {
            // victim: cold tail first if cold is over share
            let f = self.sketch.estimate(sketch_key(hash(k) as u32));
            let Some(v) = self.victim() else { return };
            if f <= self.sketch.estimate(sketch_key(hash(v) as u32)) { return; }
            self.drop(v);
        } else {
            let Some(v) = self.victim() else { return };
            self.drop(v);
        }
        self.out.insertions += 1;
        self.push(k, At::Cold, freq.min(1), None, false);
    }
    fn drop(&mut self, v: u64) {
        let e = self.map.remove(&v).unwrap();
        if e.at == At::Cold { self.ncold -= 1 } else { self.nhot -= 1 }
    }
    /// finds a victim (left at front of its queue)
    fn victim(&mut self) -> Option<u64> {
        loop {
            let cold = self.ncold > 0 && (self.ncold >= self.cold_max || self.nhot == 0);
            let q = if cold { &mut self.cold } else { &mut self.hot };
            let v = Self::pop(&self.map, q)?;
            let e = &self.map[&v];
            let (f, s) = (e.freq, e.seq);
            if cold {
                if f >= self.p.promote { self.ncold -= 1; self.out.reinsertions += 1; self.push(v, if self.p.w > 0.99 { At::Cold } else { At::Hot }, 0, None, false); continue; }
                self.cold.push_front((v, s));
            } else {
                if f > 0 { self.nhot -= 1; self.out.reinsertions += 1; self.push(v, At::Hot, f - 1, None, false); continue; }
                self.hot.push_front((v, s));
            }
            return Some(v);
        }
    }
}

pub fn run_proto(load: &Workload, cap: usize, p: P) -> Outcome {
    let mut m = Model::new(cap, p);
    let mut ranges = Vec::new();
    for r in &load.requests {
        let mut hits = 0; let mut ph = 0; let n = u64::from(r.count);
        let mut waited = false;
        ranges.clear();
        let cov = p.pre > 0 && !r.write && m.pre.request(r.block, r.count, &mut ranges);
        for b in r.block..r.block + n {
            let (h, pre) = m.access(b, r.write, cov);
            hits += u64::from(h); ph += u64::from(pre && !r.write);
            waited |= !h || pre;
        }
        if r.write { m.out.writes += n; m.out.write_hits += hits; } else {
            m.out.reads += n; m.out.read_hits += hits; m.out.prefetch_hits += ph;
            if p.pre > 0 {
                if waited && p.pre >= 2 { m.pre.waited(r.block, r.count, cov, &mut ranges); }
                for (range, s) in &ranges {
                    let mut any = false;
                    for b in range.key..range.key + u64::from(range.count) {
                        if m.npre * 2 > m.ram_max { break; }
                        if !m.map.contains_key(&b) { any = true; m.out.prefetched += 1; m.push(b, At::Ram, 0, Some(*s), true); }
                    }
                    m.out.prefetch_requests += u64::from(any);
                    m.shrink();
                }
            }
        }
    }
    m.out
}
