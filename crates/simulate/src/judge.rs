//! Is a policy good, or only good at what it was tuned on?
//!
//! One cell is a workload at a cache size: what we hit and write there, what the references do. The
//! judge sums cells up and does so by halves, so that a rule chosen on one half can be seen on the
//! other. It judges demand caching: prefetch would hide what the rules lose.

use std::fmt::Write as _;

use hearth_policy::reference::Kind;

use crate::run::{Policy, Settings, run};
use crate::workload::Workload;

/// Shares of a workload's different blocks that caches are given.
pub const SHARES: [f64; 5] = [0.01, 0.05, 0.10, 0.20, 0.40];
/// What ours is compared with.
pub const REFERENCES: [Kind; 10] = [
    Kind::Lru,
    Kind::TwoQ,
    Kind::Arc,
    Kind::Lirs,
    Kind::Sieve,
    Kind::S3Fifo,
    Kind::S3FifoD,
    Kind::Clock2QPlus,
    Kind::TinyLfu,
    Kind::Larc,
];
/// A cell counts if any reference reaches this; below, nothing is read again.
const WORTH_COUNTING: f64 = 0.005;
/// As far as this below LRU is a loss.
const LOSS: f64 = 0.01;
/// As near the best reference as this share of its hits is as good as it.
const NEAR: f64 = 0.95;
/// A cell mostly reads if this share of its accesses does.
const MOSTLY: f64 = 0.85;

/// Hits and flash writes of one policy in one cell.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Did {
    /// Read hit ratio, or that of everything where nothing is read.
    pub score: f64,
    /// Blocks written to flash.
    pub writes: u64,
}

/// A workload at a cache size, and what each reference does there.
#[derive(Clone, Debug)]
pub struct Cell {
    /// The workload's name.
    pub trace: String,
    /// Cache size as a share of its different blocks.
    pub share: f64,
    /// Cache size in blocks.
    pub blocks: usize,
    /// Share of its accesses that read.
    pub reads: f64,
    /// In the order of [`REFERENCES`].
    pub references: Vec<Did>,
    /// Which half it belongs to.
    pub half: usize,
}

impl Cell {
    /// The best score of the references.
    pub fn best(&self) -> f64 {
        self.references.iter().map(|d| d.score).fold(0.0, f64::max)
    }

    /// What LRU did.
    pub fn lru(&self) -> Did {
        self.references.first().copied().unwrap_or_default()
    }

    /// Is anything read again often enough to say something?
    pub fn counts(&self) -> bool {
        self.best() >= WORTH_COUNTING
    }
}

/// What one policy does at one size over one workload.
pub fn did(policy: Policy, load: &Workload, blocks: usize, settings: &Settings) -> Did {
    let out = run(policy, load, blocks, settings).0;
    Did {
        score: out.score(),
        writes: out.flash_writes(),
    }
}

/// The cells of a workload, its references run.
pub fn cells(load: &Workload, half: usize) -> Vec<Cell> {
    let mut cells = empty_cells(load, half);
    for cell in &mut cells {
        cell.references = REFERENCES
            .map(|kind| {
                did(
                    Policy::Reference(kind),
                    load,
                    cell.blocks,
                    &Settings::default(),
                )
            })
            .to_vec();
    }
    cells
}

/// The cells of a workload whose references are known from elsewhere and are still to be filled in.
pub fn empty_cells(load: &Workload, half: usize) -> Vec<Cell> {
    SHARES
        .map(|share| Cell {
            trace: load.name.clone(),
            share,
            blocks: load.capacity(share),
            reads: load.reads as f64 / load.accesses().max(1) as f64,
            references: Vec::new(),
            half,
        })
        .to_vec()
}

/// Cells in one line.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Summary {
    /// How many.
    pub cells: usize,
    /// Mean score.
    pub mean: f64,
    /// Mean of the best references' scores.
    pub best: f64,
    /// Mean of LRU's scores.
    pub lru: f64,
    /// The least lead over LRU; negative for a loss.
    pub worst: f64,
    /// Cells more than a point below LRU.
    pub losses: usize,
    /// Share of cells as good as the best reference, within 5 %.
    pub near: f64,
    /// Mean of the ratios of flash writes to LRU's.
    pub writes: f64,
    /// The highest such ratio where mostly reads happen.
    pub most_writes: f64,
}

/// Sums up what was done in cells; those that do not count are left out.
pub fn sum<'a>(cells: impl Iterator<Item = (&'a Cell, Did)>) -> Summary {
    let mut s = Summary {
        worst: f64::INFINITY,
        ..Summary::default()
    };
    for (cell, did) in cells.filter(|(cell, _)| cell.counts()) {
        let lru = cell.lru();
        let ratio = did.writes as f64 / lru.writes.max(1) as f64;
        s.cells += 1;
        s.mean += did.score;
        s.best += cell.best();
        s.lru += lru.score;
        s.worst = s.worst.min(did.score - lru.score);
        s.losses += usize::from(did.score < lru.score - LOSS);
        s.near += f64::from(u8::from(did.score >= cell.best() * NEAR));
        s.writes += ratio;
        if cell.reads >= MOSTLY {
            s.most_writes = s.most_writes.max(ratio);
        }
    }
    let n = s.cells.max(1) as f64;
    for part in [
        &mut s.mean,
        &mut s.best,
        &mut s.lru,
        &mut s.near,
        &mut s.writes,
    ] {
        *part /= n;
    }
    s
}

/// The table of summaries, one a line, as Markdown.
pub fn table(rows: &[(String, Summary)]) -> String {
    let mut text = String::from(
        "| rules | cells | mean % | LRU % | best % | worst against LRU | cells > 1 point below LRU | \
         within 5 % of the best | flash writes of LRU's | most where mostly read |\n\
         | --- | --: | --: | --: | --: | --: | --: | --: | --: | --: |\n",
    );
    for (name, s) in rows {
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "| {name} | {} | {:.2} | {:.2} | {:.2} | {:+.1} | {} | {:.0} % | {:.2} | {:.2} |",
            s.cells,
            s.mean * 100.0,
            s.lru * 100.0,
            s.best * 100.0,
            s.worst * 100.0,
            s.losses,
            s.near * 100.0,
            s.writes,
            s.most_writes,
        );
    }
    text
}

/// The line of a cell: what was done, what LRU and the best reference do, and whether that is a loss
/// (`!`) or not near the best (`-`).
pub fn line(cell: &Cell, did: Did) -> String {
    let (lru, best) = (cell.lru(), cell.best());
    let name = REFERENCES
        .iter()
        .zip(&cell.references)
        .max_by(|a, b| a.1.score.total_cmp(&b.1.score))
        .map_or("", |(kind, _)| kind.name());
    format!(
        "{:26} {:3.0} % {:7} blocks {:3.0} % reads | ours {:6.2} {} | lru {:6.2} best {:6.2} {:9} | writes {:5.2} of lru's",
        cell.trace,
        cell.share * 100.0,
        cell.blocks,
        cell.reads * 100.0,
        did.score * 100.0,
        if did.score < lru.score - LOSS {
            '!'
        } else if did.score < best * NEAR {
            '-'
        } else {
            ' '
        },
        lru.score * 100.0,
        best * 100.0,
        name,
        did.writes as f64 / lru.writes.max(1) as f64,
    )
}

/// Which of several settings each half would choose, and what that choice gives on the other half.
/// `all` holds what each setting did in each cell.
pub fn halves(cells: &[Cell], names: &[String], all: &[Vec<Did>]) -> Vec<(String, Summary)> {
    let of = |variant: usize, half: usize| {
        sum(cells
            .iter()
            .zip(all[variant].iter().copied())
            .filter(|(cell, _)| cell.half == half))
    };
    let mut rows = Vec::new();
    for half in 0..2 {
        let chosen =
            (0..all.len()).max_by(|a, b| worth(&of(*a, half)).total_cmp(&worth(&of(*b, half))));
        if let Some(chosen) = chosen {
            let letter = ["A", "B"][half];
            let other = ["B", "A"][half];
            rows.push((
                format!("{}, chosen on {letter}, there", names[chosen]),
                of(chosen, half),
            ));
            rows.push((
                format!("{}, chosen on {letter}, judged on {other}", names[chosen]),
                of(chosen, 1 - half),
            ));
        }
    }
    rows
}

/// What settings are chosen by: hits, less a tenth of a point for each cell that loses to LRU and
/// for each hundredth of LRU's flash writes above six tenths.
fn worth(s: &Summary) -> f64 {
    s.mean - 0.001 * s.losses as f64 - 0.1 * (s.writes - 0.6).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(best: f64, half: usize) -> Cell {
        Cell {
            trace: "t".into(),
            share: 0.1,
            blocks: 10,
            reads: 1.0,
            references: vec![
                Did {
                    score: best - 0.1,
                    writes: 100,
                },
                Did {
                    score: best,
                    writes: 100,
                },
            ],
            half,
        }
    }

    #[test]
    fn a_choice_is_shown_on_the_half_it_was_not_made_on() {
        let cells = [cell(0.5, 0), cell(0.5, 1)];
        let did = |score| Did { score, writes: 50 };
        // The first setting is better on A, the second on B.
        let all = [vec![did(0.6), did(0.2)], vec![did(0.3), did(0.48)]];
        let rows = halves(&cells, &["one".into(), "two".into()], &all);
        assert_eq!(rows.len(), 4);
        assert!(rows[1].0.starts_with("one") && rows[3].0.starts_with("two"));
        assert_eq!((rows[1].1.mean, rows[1].1.losses), (0.2, 1));
        assert_eq!((rows[3].1.mean, rows[3].1.losses), (0.3, 1));
        assert_eq!((rows[2].1.near, rows[2].1.writes), (1.0, 0.5));
        assert!(table(&rows).contains("| 20.00 |"));
        assert!(line(&cells[0], did(0.2)).contains("20.00 !"));
    }
}
