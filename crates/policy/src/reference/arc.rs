//! Adaptive replacement cache.

use super::Reference;
use super::list::{Links, List};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum At {
    Nowhere,
    T1,
    T2,
    B1,
    B2,
}

/// See [`super::Kind::Arc`].
#[derive(Debug)]
pub struct Arc {
    capacity: usize,
    /// Target size of T1, with a fraction as in the authors' pseudocode of later versions.
    p: f64,
    links: Links,
    t1: List,
    t2: List,
    b1: List,
    b2: List,
    at: Vec<At>,
}

impl Arc {
    /// An empty cache.
    pub fn new(capacity: usize, universe: usize) -> Arc {
        Arc {
            capacity,
            p: 0.0,
            links: Links::new(universe),
            t1: List::default(),
            t2: List::default(),
            b1: List::default(),
            b2: List::default(),
            at: vec![At::Nowhere; universe],
        }
    }

    fn replace(&mut self, hit_in_b2: bool) {
        let t1 = self.t1.len() as f64;
        let from_t1 = self.t1.len() > 0 && (t1 > self.p || (hit_in_b2 && t1 == self.p));
        if from_t1 || self.t2.len() == 0 {
            if let Some(id) = self.t1.pop_back(&mut self.links) {
                self.at[id as usize] = At::B1;
                self.b1.push_front(&mut self.links, id);
            }
        } else if let Some(id) = self.t2.pop_back(&mut self.links) {
            self.at[id as usize] = At::B2;
            self.b2.push_front(&mut self.links, id);
        }
    }

    fn forget(list: &mut List, links: &mut Links, at: &mut [At]) {
        if let Some(id) = list.pop_back(links) {
            at[id as usize] = At::Nowhere;
        }
    }
}

impl Reference for Arc {
    fn access(&mut self, id: u32) -> bool {
        let i = id as usize;
        let c = self.capacity;
        match self.at[i] {
            At::T1 => {
                self.t1.remove(&mut self.links, id);
                self.at[i] = At::T2;
                self.t2.push_front(&mut self.links, id);
                return true;
            }
            At::T2 => {
                self.t2.touch(&mut self.links, id);
                return true;
            }
            At::B1 => {
                let step = (self.b2.len() as f64 / self.b1.len() as f64).max(1.0);
                self.p = (self.p + step).min(c as f64);
                self.replace(false);
                self.b1.remove(&mut self.links, id);
                self.at[i] = At::T2;
                self.t2.push_front(&mut self.links, id);
            }
            At::B2 => {
                let step = (self.b1.len() as f64 / self.b2.len() as f64).max(1.0);
                self.p = (self.p - step).max(0.0);
                self.replace(true);
                self.b2.remove(&mut self.links, id);
                self.at[i] = At::T2;
                self.t2.push_front(&mut self.links, id);
            }
            At::Nowhere => {
                let l1 = self.t1.len() + self.b1.len();
                let all = l1 + self.t2.len() + self.b2.len();
                if l1 == c {
                    if self.t1.len() < c {
                        Self::forget(&mut self.b1, &mut self.links, &mut self.at);
                        self.replace(false);
                    } else {
                        Self::forget(&mut self.t1, &mut self.links, &mut self.at);
                    }
                } else if all >= c {
                    if all == 2 * c {
                        Self::forget(&mut self.b2, &mut self.links, &mut self.at);
                    }
                    self.replace(false);
                }
                self.at[i] = At::T1;
                self.t1.push_front(&mut self.links, id);
            }
        }
        false
    }
}
