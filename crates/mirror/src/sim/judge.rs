//! What a client may see: of each block what a read may say now, and what may be there after a crash.

use super::{BLOCKS, Version};
use crate::machine::What;
use std::collections::BTreeMap;

#[derive(Clone, Debug)]
pub(super) struct Asked {
    pub(super) what: What,
    pub(super) first: usize,
    pub(super) len: usize,
    pub(super) version: Version,
    /// Of a write, by block: what could be there before, and whether another write was there meanwhile. Of a read:
    /// what it may say. Of a flush: what may be there after a crash, once it is answered.
    pub(super) sets: Vec<Vec<Version>>,
    pub(super) crossed: Vec<bool>,
}

/// What a client may see.
pub(super) struct Judge {
    pub(super) possible: Vec<Vec<Version>>,
    pub(super) after_crash: Vec<Vec<Version>>,
    pub(super) flying: Vec<Vec<Version>>,
    pub(super) written: Vec<bool>,
    pub(super) asked: BTreeMap<u64, Asked>,
    pub(super) next: Version,
}

pub(super) fn add(set: &mut Vec<Version>, version: Version) {
    if !set.contains(&version) {
        set.push(version);
    }
}

impl Judge {
    pub(super) fn new() -> Judge {
        Judge {
            possible: vec![vec![0]; BLOCKS],
            after_crash: vec![vec![0]; BLOCKS],
            flying: vec![Vec::new(); BLOCKS],
            written: vec![false; BLOCKS],
            asked: BTreeMap::new(),
            next: 1,
        }
    }

    pub(super) fn ask(&mut self, req: u64, what: What, first: usize, len: usize) -> Version {
        let blocks = first..first + len;
        let changes = matches!(what, What::Write | What::Zero { .. });
        // Zeros are a version of their own kind: the same one every time.
        let version = if what == What::Write { self.next } else { 0 };
        self.next += 1;
        let mut crossed = vec![false; len];
        let sets = match what {
            What::Flush => (0..BLOCKS)
                .map(|b| [&self.possible[b][..], &self.flying[b]].concat())
                .collect(),
            What::Read => blocks
                .clone()
                .map(|b| [&self.possible[b][..], &self.flying[b]].concat())
                .collect(),
            _ => blocks.clone().map(|b| self.possible[b].clone()).collect(),
        };
        for other in self.asked.values_mut() {
            for b in (0..BLOCKS).filter(|b| *b >= other.first && *b < other.first + other.len) {
                let here = blocks.contains(&b);
                let at = b - other.first;
                match other.what {
                    What::Read if changes && here => {
                        add(&mut other.sets[at], version);
                        other.crossed[at] = true;
                    }
                    What::Flush if changes && here => add(&mut other.sets[at], version),
                    What::Write | What::Zero { .. } if here => {
                        crossed[b - first] = true;
                        if changes {
                            other.crossed[at] = true;
                        }
                    }
                    _ => {}
                }
            }
        }
        if changes {
            for b in blocks {
                self.flying[b].push(version);
                add(&mut self.after_crash[b], version);
                self.written[b] = true;
            }
        }
        let whole = what == What::Flush;
        let asked = Asked {
            what,
            first: if whole { 0 } else { first },
            len: if whole { BLOCKS } else { len },
            version,
            sets,
            crossed: if whole { vec![false; BLOCKS] } else { crossed },
        };
        self.asked.insert(req, asked);
        version
    }

    pub(super) fn answer(
        &mut self,
        req: u64,
        well: bool,
        data: Option<&[Version]>,
    ) -> Result<(), String> {
        let asked = self.asked.remove(&req).ok_or("answered twice")?;
        for i in 0..asked.len {
            let b = asked.first + i;
            match asked.what {
                What::Read if well => {
                    let said = data.ok_or("no data")?[i];
                    if !asked.sets[i].contains(&said) {
                        return Err(format!(
                            "block {b} reads as {said}, may be {:?}",
                            asked.sets[i]
                        ));
                    }
                    if !asked.crossed[i] && self.flying[b].is_empty() {
                        self.possible[b] = vec![said];
                        if !self.written[b] {
                            // Nobody has written since the crash: it stays so, also after the next one.
                            self.after_crash[b] = vec![said];
                        }
                    }
                }
                What::Flush if well => {
                    let set = &asked.sets[i];
                    self.after_crash[b].retain(|v| set.contains(v));
                }
                What::Read | What::Flush => {}
                What::Write | What::Zero { .. } => {
                    let gone = self.flying[b].iter().position(|v| *v == asked.version);
                    self.flying[b].swap_remove(gone.ok_or("never asked")?);
                    if well && !asked.crossed[i] {
                        self.possible[b] = vec![asked.version];
                    } else {
                        if well {
                            let before = &asked.sets[i];
                            self.possible[b].retain(|v| !before.contains(v));
                        }
                        add(&mut self.possible[b], asked.version);
                    }
                }
            }
        }
        Ok(())
    }

    /// All clients are gone with the host; or, without `power`, with the program alone.
    pub(super) fn crash(&mut self, power: bool) {
        for b in 0..BLOCKS {
            if power {
                self.possible[b] = self.after_crash[b].clone();
            } else {
                for version in std::mem::take(&mut self.flying[b]) {
                    add(&mut self.possible[b], version);
                }
            }
            self.flying[b].clear();
            // What survived the program need not survive a power cut, until somebody has seen it.
            self.written[b] = false;
        }
        self.asked.clear();
    }
}
