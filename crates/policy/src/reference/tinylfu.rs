//! W-TinyLFU with a fixed window.

use super::Reference;
use super::list::{Links, List};
use super::sketch::Sketch;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum At {
    Nowhere,
    Window,
    Probation,
    Protected,
}

/// See [`super::Kind::TinyLfu`].
#[derive(Debug)]
pub struct TinyLfu {
    window_max: usize,
    main_max: usize,
    protected_max: usize,
    links: Links,
    window: List,
    probation: List,
    protected: List,
    at: Vec<At>,
    sketch: Sketch,
    moves: u64,
}

fn hash(id: u32) -> u64 {
    let mut h = (u64::from(id) + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    h = (h ^ (h >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    h ^ (h >> 32)
}

impl TinyLfu {
    /// An empty cache.
    pub fn new(capacity: usize, universe: usize) -> TinyLfu {
        let window_max = (capacity / 100).max(1);
        let main_max = capacity - window_max.min(capacity);
        TinyLfu {
            window_max,
            main_max,
            protected_max: main_max * 4 / 5,
            links: Links::new(universe),
            window: List::default(),
            probation: List::default(),
            protected: List::default(),
            at: vec![At::Nowhere; universe],
            sketch: Sketch::new(capacity.next_power_of_two() * 4, capacity as u64 * 10),
            moves: 0,
        }
    }

    fn leave_window(&mut self, id: u32) {
        if self.probation.len() + self.protected.len() >= self.main_max {
            let victim = self.probation.back().or(self.protected.back());
            let beaten =
                victim.filter(|v| self.sketch.estimate(hash(id)) > self.sketch.estimate(hash(*v)));
            let Some(victim) = beaten else {
                self.at[id as usize] = At::Nowhere;
                return;
            };
            let list = if self.at[victim as usize] == At::Probation {
                &mut self.probation
            } else {
                &mut self.protected
            };
            list.remove(&mut self.links, victim);
            self.at[victim as usize] = At::Nowhere;
        }
        self.at[id as usize] = At::Probation;
        self.probation.push_front(&mut self.links, id);
        self.moves += 1;
    }
}

impl Reference for TinyLfu {
    fn access(&mut self, id: u32) -> bool {
        self.sketch.add(hash(id));
        match self.at[id as usize] {
            At::Window => {
                self.window.touch(&mut self.links, id);
                true
            }
            At::Protected => {
                self.protected.touch(&mut self.links, id);
                true
            }
            At::Probation => {
                self.probation.remove(&mut self.links, id);
                self.at[id as usize] = At::Protected;
                self.protected.push_front(&mut self.links, id);
                if self.protected.len() > self.protected_max
                    && let Some(old) = self.protected.pop_back(&mut self.links)
                {
                    self.at[old as usize] = At::Probation;
                    self.probation.push_front(&mut self.links, old);
                }
                true
            }
            At::Nowhere => {
                self.at[id as usize] = At::Window;
                self.window.push_front(&mut self.links, id);
                if self.window.len() > self.window_max
                    && let Some(old) = self.window.pop_back(&mut self.links)
                {
                    self.leave_window(old);
                }
                false
            }
        }
    }

    fn moves(&self) -> u64 {
        self.moves
    }
}
