//! Low inter-reference recency set.

use super::Reference;
use super::list::{Links, List};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Is {
    Unknown,
    Lir,
    /// Resident, of high recency.
    Hir,
    /// Not resident, but in the stack.
    Ghost,
}

/// See [`super::Kind::Lirs`].
#[derive(Debug)]
pub struct Lirs {
    capacity: usize,
    lir_max: usize,
    stack_links: Links,
    stack: List,
    in_stack: Vec<bool>,
    queue_links: Links,
    /// Resident HIR blocks.
    queue: List,
    /// Non-resident ones, in the same links: a block is in one of the two at most.
    ghosts: List,
    is: Vec<Is>,
    lirs: usize,
}

impl Lirs {
    /// An empty cache.
    pub fn new(capacity: usize, universe: usize) -> Lirs {
        let hir = (capacity / 100).max(2).min(capacity);
        Lirs {
            capacity,
            lir_max: capacity - hir,
            stack_links: Links::new(universe),
            stack: List::default(),
            in_stack: vec![false; universe],
            queue_links: Links::new(universe),
            queue: List::default(),
            ghosts: List::default(),
            is: vec![Is::Unknown; universe],
            lirs: 0,
        }
    }

    fn raise(&mut self, id: u32) {
        if self.in_stack[id as usize] {
            self.stack.touch(&mut self.stack_links, id);
        } else {
            self.in_stack[id as usize] = true;
            self.stack.push_front(&mut self.stack_links, id);
        }
    }

    fn out_of_stack(&mut self, id: u32) {
        self.in_stack[id as usize] = false;
        self.stack.remove(&mut self.stack_links, id);
    }

    /// Leaves a LIR block at the stack's bottom.
    fn prune(&mut self) {
        while let Some(id) = self.stack.back() {
            match self.is[id as usize] {
                Is::Lir => return,
                Is::Ghost => {
                    self.ghosts.remove(&mut self.queue_links, id);
                    self.is[id as usize] = Is::Unknown;
                }
                _ => {}
            }
            self.out_of_stack(id);
        }
    }

    fn demote_bottom(&mut self) {
        if let Some(id) = self.stack.back() {
            self.out_of_stack(id);
            self.is[id as usize] = Is::Hir;
            self.lirs -= 1;
            self.queue.push_front(&mut self.queue_links, id);
            self.prune();
        }
    }

    fn evict(&mut self) {
        let Some(id) = self.queue.pop_back(&mut self.queue_links) else {
            return;
        };
        if !self.in_stack[id as usize] {
            self.is[id as usize] = Is::Unknown;
            return;
        }
        self.is[id as usize] = Is::Ghost;
        self.ghosts.push_front(&mut self.queue_links, id);
        if self.ghosts.len() > self.capacity
            && let Some(old) = self.ghosts.pop_back(&mut self.queue_links)
        {
            self.is[old as usize] = Is::Unknown;
            self.out_of_stack(old);
        }
    }

    fn promote(&mut self, id: u32) {
        self.is[id as usize] = Is::Lir;
        self.lirs += 1;
        self.raise(id);
        if self.lirs > self.lir_max {
            self.demote_bottom();
        }
    }
}

impl Reference for Lirs {
    fn access(&mut self, id: u32) -> bool {
        let i = id as usize;
        match self.is[i] {
            Is::Lir => {
                let bottom = self.stack.back() == Some(id);
                self.raise(id);
                if bottom {
                    self.prune();
                }
                true
            }
            Is::Hir => {
                if self.in_stack[i] && self.lir_max > 0 {
                    self.queue.remove(&mut self.queue_links, id);
                    self.promote(id);
                } else {
                    self.raise(id);
                    self.queue.touch(&mut self.queue_links, id);
                }
                true
            }
            Is::Ghost | Is::Unknown => {
                let known = self.is[i] == Is::Ghost;
                if self.lirs + self.queue.len() >= self.capacity {
                    self.evict();
                }
                // Evicting may have dropped this very block from the ghosts.
                if known && self.is[i] == Is::Ghost {
                    self.ghosts.remove(&mut self.queue_links, id);
                }
                if self.lirs < self.lir_max || (known && self.in_stack[i] && self.lir_max > 0) {
                    self.promote(id);
                } else {
                    self.is[i] = Is::Hir;
                    self.raise(id);
                    self.queue.push_front(&mut self.queue_links, id);
                    if self.lir_max == 0 {
                        self.prune();
                    }
                }
                false
            }
        }
    }
}
