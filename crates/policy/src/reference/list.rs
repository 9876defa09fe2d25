//! Doubly linked lists over dense numbers; a number is in one list of a [`Links`] at a time.

const NONE: u32 = u32::MAX;

/// The links all lists of one kind share.
#[derive(Debug)]
pub(super) struct Links {
    prev: Vec<u32>,
    next: Vec<u32>,
}

/// A list's ends; newest at the front.
#[derive(Debug)]
pub(super) struct List {
    front: u32,
    back: u32,
    len: usize,
}

impl Default for List {
    fn default() -> List {
        List {
            front: NONE,
            back: NONE,
            len: 0,
        }
    }
}

impl Links {
    pub fn new(universe: usize) -> Links {
        Links {
            prev: vec![NONE; universe],
            next: vec![NONE; universe],
        }
    }

    /// The neighbour towards the front.
    pub fn newer(&self, id: u32) -> Option<u32> {
        let n = self.prev[id as usize];
        (n != NONE).then_some(n)
    }
}

impl List {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn push_front(&mut self, links: &mut Links, id: u32) {
        links.prev[id as usize] = NONE;
        links.next[id as usize] = self.front;
        if self.front == NONE {
            self.back = id;
        } else {
            links.prev[self.front as usize] = id;
        }
        self.front = id;
        self.len += 1;
    }

    pub fn remove(&mut self, links: &mut Links, id: u32) {
        let (p, n) = (links.prev[id as usize], links.next[id as usize]);
        if p == NONE {
            self.front = n;
        } else {
            links.next[p as usize] = n;
        }
        if n == NONE {
            self.back = p;
        } else {
            links.prev[n as usize] = p;
        }
        self.len -= 1;
    }

    pub fn back(&self) -> Option<u32> {
        (self.back != NONE).then_some(self.back)
    }

    pub fn pop_back(&mut self, links: &mut Links) -> Option<u32> {
        let id = self.back()?;
        self.remove(links, id);
        Some(id)
    }

    pub fn touch(&mut self, links: &mut Links, id: u32) {
        if self.front != id {
            self.remove(links, id);
            self.push_front(links, id);
        }
    }
}
