//! 2Q, full version.

use super::Reference;
use super::list::{Links, List};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum At {
    Nowhere,
    In,
    Out,
    Main,
}

/// See [`super::Kind::TwoQ`].
#[derive(Debug)]
pub struct TwoQ {
    capacity: usize,
    in_max: usize,
    out_max: usize,
    links: Links,
    a1in: List,
    a1out: List,
    main: List,
    at: Vec<At>,
}

impl TwoQ {
    /// An empty cache.
    pub fn new(capacity: usize, universe: usize) -> TwoQ {
        TwoQ {
            capacity,
            in_max: (capacity / 4).max(1),
            out_max: (capacity / 2).max(1),
            links: Links::new(universe),
            a1in: List::default(),
            a1out: List::default(),
            main: List::default(),
            at: vec![At::Nowhere; universe],
        }
    }

    fn make_room(&mut self) {
        if self.a1in.len() + self.main.len() < self.capacity {
            return;
        }
        if self.a1in.len() > self.in_max || self.main.len() == 0 {
            if let Some(id) = self.a1in.pop_back(&mut self.links) {
                self.at[id as usize] = At::Out;
                self.a1out.push_front(&mut self.links, id);
                if self.a1out.len() > self.out_max
                    && let Some(old) = self.a1out.pop_back(&mut self.links)
                {
                    self.at[old as usize] = At::Nowhere;
                }
            }
        } else if let Some(id) = self.main.pop_back(&mut self.links) {
            self.at[id as usize] = At::Nowhere;
        }
    }
}

impl Reference for TwoQ {
    fn access(&mut self, id: u32) -> bool {
        match self.at[id as usize] {
            At::Main => {
                self.main.touch(&mut self.links, id);
                true
            }
            At::In => true,
            At::Out => {
                self.a1out.remove(&mut self.links, id);
                self.make_room();
                self.at[id as usize] = At::Main;
                self.main.push_front(&mut self.links, id);
                false
            }
            At::Nowhere => {
                self.make_room();
                self.at[id as usize] = At::In;
                self.a1in.push_front(&mut self.links, id);
                false
            }
        }
    }
}
