//! The promises of docs/decisions/0001-policy.md, on real traces where there are some.
//!
//! `HEARTH_TRACES` names a directory of traces in any form Hearth reads; without it the same
//! promises are checked on made loads only (`made.rs`). Run with `--release -- --nocapture` to
//! see the cells.

use std::path::{Path, PathBuf};

use hearth_policy::reference::Kind;
use hearth_simulate::{Policy, Row, Settings, Size, Workload, matrix};
use hearth_trace::{Options, Reader};

const SIZES: [f64; 5] = [0.01, 0.05, 0.10, 0.20, 0.40];
/// Times a prefetched block takes to arrive, microseconds, beside none: a remote SSD's, a hard disk's.
const LATENCIES: [u64; 2] = [1000, 10_000];
/// A cell counts if any reference reaches this.
const WORTH_COUNTING: f64 = 0.005;

/// What one trace did at one size.
struct Cell {
    rows: Vec<Row>,
    /// Hearth's score at each of [`LATENCIES`].
    late: [f64; LATENCIES.len()],
    /// Does the trace say when its requests came?
    timed: bool,
}

fn traces(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut dirs = vec![dir.to_owned()];
    while let Some(dir) = dirs.pop() {
        let Ok(entries) = std::fs::read_dir(&dir) else {
            continue;
        };
        for path in entries.flatten().map(|e| e.path()) {
            let name = path.to_string_lossy().into_owned();
            if path.is_dir() {
                dirs.push(path);
            } else if [".csv.zst", ".csv.gz", ".vscsi", ".vscsi.zst", ".hearth"]
                .iter()
                .any(|end| name.ends_with(end))
            {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

#[test]
fn targets_hold_on_real_traces() {
    let Some(dir) = std::env::var_os("HEARTH_TRACES") else {
        return;
    };
    let only = std::env::var("HEARTH_TRACES_ONLY").unwrap_or_default();
    let policies = Policy::all();
    let sizes = SIZES.map(Size::Fraction);
    let mut cells: Vec<Cell> = Vec::new();
    for path in traces(Path::new(&dir)) {
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if !name.contains(&only) {
            continue;
        }
        let load = Reader::open(&path, Options::default())
            .and_then(|r| Workload::load(&name, r, |_| ()))
            .expect("the trace is read");
        let loads = [load];
        let rows = matrix(
            &loads,
            &sizes,
            &policies,
            &Settings::default(),
            1,
            |_, _| (),
        );
        // Traces of block numbers only are read as one request in a microsecond.
        let requests = &loads[0].requests;
        let timed = requests
            .windows(2)
            .any(|two| two[1].time_us != two[0].time_us + 1);
        let late = LATENCIES.map(|latency_us| {
            let settings = Settings {
                latency_us,
                ..Settings::default()
            };
            matrix(&loads, &sizes, &[Policy::Hearth], &settings, 1, |_, _| ())
        });
        for (i, rows) in rows.chunks(policies.len()).enumerate() {
            let late = late.each_ref().map(|rows| rows[i].score);
            cells.push(Cell {
                rows: rows.to_vec(),
                late,
                timed,
            });
        }
    }
    let of = |cell: &Cell, p: Policy| -> Row {
        cell.rows
            .iter()
            .find(|r| r.policy == p.name())
            .expect("every policy ran")
            .clone()
    };
    let references: Vec<Policy> = Kind::ALL
        .into_iter()
        .filter(|k| *k != Kind::Opt)
        .map(Policy::Reference)
        .collect();
    let best = |cell: &Cell| {
        references
            .iter()
            .map(|p| of(cell, *p).score)
            .fold(0.0, f64::max)
    };
    cells.retain(|cell| best(cell) >= WORTH_COUNTING);
    assert!(!cells.is_empty(), "no trace in {dir:?} has reuse");
    let n = cells.len() as f64;
    let mean = |p: Policy| cells.iter().map(|c| of(c, p).score).sum::<f64>() / n * 100.0;
    let lru = Policy::Reference(Kind::Lru);
    for cell in &cells {
        let (ours, demand) = (of(cell, Policy::Hearth), of(cell, Policy::HearthDemand));
        println!(
            "{:32} {:4.0}% lru {:6.2} best {:6.2} opt {:6.2} | demand {:6.2}{} hearth {:6.2}{} | writes {:5.2} of lru's, prefetch used {:3.0}% requests {}",
            ours.trace,
            ours.fraction * 100.0,
            of(cell, lru).score * 100.0,
            best(cell) * 100.0,
            of(cell, Policy::Reference(Kind::Opt)).score * 100.0,
            demand.score * 100.0,
            if demand.score < best(cell) * 0.95 {
                '-'
            } else {
                ' '
            },
            ours.score * 100.0,
            if ours.score < of(cell, lru).score - 0.01 {
                '!'
            } else if ours.score < best(cell) * 0.95 {
                '-'
            } else {
                ' '
            },
            ours.flash_writes as f64 / of(cell, lru).flash_writes as f64,
            100.0
                - 100.0 * ours.outcome.prefetch_wasted as f64
                    / ours.outcome.prefetched.max(1) as f64,
            ours.outcome.prefetch_requests,
        );
        if cell.timed {
            for (us, score) in LATENCIES.iter().zip(cell.late) {
                println!("    after {us} us {:6.2}", score * 100.0);
            }
        }
    }
    for p in &policies {
        let writes = cells
            .iter()
            .map(|c| of(c, *p).flash_writes as f64 / of(c, lru).flash_writes as f64)
            .sum::<f64>()
            / n;
        println!(
            "{:14} {:6.2} % flash writes {writes:.3} of lru's",
            p.name(),
            mean(*p)
        );
    }
    for (what, some) in [("cells", false), ("cells of traces with times", true)] {
        let of_them: Vec<&Cell> = cells.iter().filter(|c| c.timed || !some).collect();
        let mean = |score: &dyn Fn(&Cell) -> f64| {
            of_them.iter().map(|c| score(c)).sum::<f64>() / of_them.len() as f64 * 100.0
        };
        print!("{} {what}:", of_them.len());
        for p in [Policy::HearthDemand, lru, Policy::Reference(Kind::S3Fifo)] {
            print!(" {} {:.2}", p.name(), mean(&|c| of(c, p).score));
        }
        print!(" best {:.2}", mean(&best));
        print!(
            " | prefetch at once {:.2}",
            mean(&|c| of(c, Policy::Hearth).score)
        );
        for (i, us) in LATENCIES.iter().enumerate() {
            let below = of_them
                .iter()
                .filter(|c| c.late[i] < of(c, lru).score - 0.01)
                .count();
            print!(
                ", after {us} us {:.2} ({below} below lru)",
                mean(&|c| c.late[i])
            );
        }
        println!();
    }
    let ours = mean(Policy::Hearth);
    for p in &references {
        assert!(ours > mean(*p), "{} is better", p.name());
    }
    let near = cells
        .iter()
        .filter(|c| of(c, Policy::Hearth).score >= best(c) * 0.95)
        .count() as f64;
    println!(
        "{} cells, within 5 % of the best: {:.1} %",
        cells.len(),
        near / n * 100.0
    );
    assert!(near / n >= 0.8);
    for cell in &cells {
        let (ours, lru) = (of(cell, Policy::Hearth), of(cell, lru));
        assert!(
            ours.score >= lru.score - 0.01,
            "{} at {}: more than a point below lru",
            ours.trace,
            ours.fraction
        );
    }
    let writes = cells
        .iter()
        .map(|c| of(c, Policy::Hearth).flash_writes as f64 / of(c, lru).flash_writes as f64)
        .sum::<f64>()
        / n;
    assert!(writes <= 0.5, "flash writes {writes} of lru's");
}
