//! `cargo run --release -p hearth-simulate --example cleaning -- [--traces DIR] [--part WORD]`
//!
//! How should a log be cleaned? Runs the segmented model of a cache over overwrites, read-only loads, made
//! workloads and traces with several rules and prints tables of read hits and flash writes. Parts: `rules`,
//! `curve`, `sizes`, `reads`, `made`, `traces`. What they say is in `docs/decisions/0006-cleaning.md`.

use std::error::Error;
use std::path::{Path, PathBuf};

use hearth_policy::cleaning::{Heads, Order, Plan};
use hearth_policy::{Config, reference::Kind, spread};
use hearth_simulate::segmented::{self, Setup, Shape};
use hearth_simulate::{Outcome, Policy, Request, Settings, Workload, WriteMode, made};
use hearth_trace::{Options, Reader};

const MIB: f64 = 256.0;
/// A pool of 128 MiB: 122 segments of a mebibyte, of which the summary takes two blocks.
const POOL: Shape = Shape {
    segments: 122,
    data: 254,
    reserve: 3,
};
const MODES: [WriteMode; 2] = [WriteMode::Back, WriteMode::Through];
/// Blocks below this are hot to the oracle.
const HOT: u64 = 1 << 20;
/// Room that is left for holes whatever the price, as a divisor.
const SPARE: u64 = 64;
/// The price that is recommended, in 1024ths of a hit.
const PRICE: u64 = 64;

#[derive(Clone, Copy)]
struct Rule {
    name: &'static str,
    order: Order,
    heads: Heads,
    span: u64,
    price: u64,
    oracle: bool,
    returns: bool,
}

const fn rule(name: &'static str, order: Order, heads: Heads, price: u64) -> Rule {
    Rule {
        name,
        order,
        heads,
        span: 8,
        price,
        oracle: false,
        returns: true,
    }
}

const OLDEST: Rule = rule("oldest first", Order::Oldest, Heads::One, 0);
const GREEDY: Rule = rule("greedy, one head", Order::Greedy, Heads::One, 0);
const BEST: Rule = rule("index, hot and cold", Order::Index, Heads::HotCold, 0);

fn setup(rule: Rule, mode: WriteMode, shape: Shape) -> Setup {
    let mut config = Config::of(shape.blocks() as usize);
    config.prefetch = false;
    config.dead_space = rule.order == Order::Oldest;
    let room = shape.room(rule.heads.count());
    Setup {
        config,
        mode,
        shape,
        plan: Plan {
            order: rule.order,
            heads: rule.heads,
            most: (room - room / SPARE).max(1),
            room,
            span: rule.span,
            price: rule.price,
        },
        destage_after: (shape.blocks() / 6).max(1),
        returns: rule.returns,
        oracle: rule.oracle.then_some(|key| key < HOT),
    }
}

fn cache(load: &Workload, blocks: usize, write_mode: WriteMode, dead_space: bool) -> Outcome {
    let settings = Settings {
        write_mode,
        dead_space,
        ..Settings::default()
    };
    hearth_simulate::run(Policy::HearthDemand, load, blocks, &settings).0
}

fn lru(load: &Workload, blocks: usize) -> Outcome {
    let kind = Policy::Reference(Kind::Lru);
    hearth_simulate::run(kind, load, blocks, &Settings::default()).0
}

/// Accesses of `blocks`, `writes` of 100 of them writes; of a hundred accesses `hot` go to a fifth.
fn overwrites(blocks: u64, accesses: u64, writes: u64, hot: u64) -> Workload {
    let mut n = spread(1);
    let mut next = || {
        n = n.wrapping_add(1);
        spread(n)
    };
    let requests = (0..accesses).map(|i| Request {
        time_us: i * 1000,
        block: if next() % 100 < hot {
            next() % (blocks / 5)
        } else {
            HOT + next() % (blocks - blocks / 5)
        },
        count: 1,
        write: next() % 100 < writes,
    });
    Workload::made("overwrites", requests.collect::<Vec<_>>())
}

fn percent(out: &Outcome) -> f64 {
    out.score() * 100.0
}

fn rules() {
    println!(
        "\n## Rules\n\nUniform: 240,000 accesses of 94 MiB, cold. 80/20: 85 % of the pool, the second half of 1,200,000.\n"
    );
    println!(
        "| mode | rule | uniform: read hits % | flash writes, of oldest first's | 80/20: read hits % | flash writes, of greedy's |\n| --- | --- | --: | --: | --: | --: |"
    );
    let loads = [
        (overwrites((94.0 * MIB) as u64, 240_000, 70, 20), 0),
        (
            overwrites(POOL.blocks() * 85 / 100, 1_200_000, 70, 80),
            600_000,
        ),
    ];
    let blocks = POOL.blocks() as usize;
    println!(
        "| | LRU | {:.2} | | | |",
        percent(&lru(&loads[0].0, blocks))
    );
    let mut all = vec![OLDEST, GREEDY];
    for (heads, word) in [
        (Heads::One, "one head"),
        (Heads::MovesApart, "moves apart"),
        (Heads::HotCold, "hot and cold"),
        (Heads::Three, "hot, cold, moved"),
    ] {
        for (order, name) in [
            (Order::Greedy, "greedy"),
            (Order::Choices(5), "5 choices"),
            (Order::CostBenefit, "cost-benefit"),
            (Order::Aged, "aged"),
            (Order::Index, "index"),
        ] {
            all.push(rule(format!("{name}, {word}").leak(), order, heads, 0));
        }
    }
    for (order, name) in [
        (Order::Greedy, "greedy, oracle"),
        (Order::Index, "index, oracle"),
    ] {
        all.push(Rule {
            oracle: true,
            ..rule(name, order, Heads::HotCold, 0)
        });
    }
    for span in [4, 6, 12, 16] {
        all.push(Rule {
            span,
            ..rule(
                format!("index, hot and cold, span {span}/16").leak(),
                Order::Index,
                Heads::HotCold,
                0,
            )
        });
    }
    all.push(rule(
        "index, hot and cold, price 64",
        Order::Index,
        Heads::HotCold,
        PRICE,
    ));
    for mode in MODES {
        let bounds = [true, false].map(|dead| cache(&loads[0].0, blocks, mode, dead));
        let base = segmented::run(setup(OLDEST, mode, POOL), &loads[0].0, 0)
            .0
            .flash_writes() as f64;
        for (out, name) in bounds.iter().zip(["Cache, dead space", "Cache, none"]) {
            println!(
                "| {mode:?} | {name} | {:.2} | {:.2} | | |",
                percent(out),
                out.flash_writes() as f64 / base
            );
        }
        let greedy = segmented::run(setup(GREEDY, mode, POOL), &loads[1].0, loads[1].1)
            .0
            .flash_writes() as f64;
        for rule in &all {
            let [a, b] = [&loads[0], &loads[1]]
                .map(|(load, unseen)| segmented::run(setup(*rule, mode, POOL), load, *unseen).0);
            println!(
                "| {mode:?} | {} | {:.2} | {:.2} | {:.2} | {:.2} |",
                rule.name,
                percent(&a),
                a.flash_writes() as f64 / base,
                percent(&b),
                b.flash_writes() as f64 / greedy
            );
        }
    }
}

fn curve() {
    println!("\n## What a hit costs\n\nThe uniform overwrites above.\n");
    println!(
        "| mode | price, 1024ths of a hit | read hits % | flash writes, of oldest first's | live at the end, MiB | writes saved for a hit lost |\n| --- | --: | --: | --: | --: | --: |"
    );
    let load = overwrites((94.0 * MIB) as u64, 240_000, 70, 20);
    for mode in MODES {
        let base = segmented::run(setup(OLDEST, mode, POOL), &load, 0)
            .0
            .flash_writes() as f64;
        let mut first: Option<Outcome> = None;
        for price in [0, 12, 24, 36, 40, 48, 56, 64, 80, 96, 128, 192, 396] {
            let (out, cleaned) =
                segmented::run(setup(Rule { price, ..BEST }, mode, POOL), &load, 0);
            let first = first.get_or_insert(out);
            let lost = first.read_hits.saturating_sub(out.read_hits).max(1) as f64;
            println!(
                "| {mode:?} | {price} | {:.2} | {:.2} | {:.1} | {:.1} |",
                percent(&out),
                out.flash_writes() as f64 / base,
                cleaned.live as f64 / MIB,
                (first.flash_writes() as f64 - out.flash_writes() as f64) / lost,
            );
        }
    }
}

fn sizes() {
    println!(
        "\n## Sizes\n\nThe second half of 800,000 accesses, 70 % writes; flash writes for each block written or missed.\n"
    );
    println!(
        "| mode | load | of the pool | LRU % | oldest first | greedy, one head | index, hot and cold | the same, price {PRICE} | oracle |\n| --- | --- | --: | --: | --: | --: | --: | --: | --: |"
    );
    for mode in MODES {
        for (hot, name) in [(20, "uniform"), (80, "80/20")] {
            for share in [60, 70, 78, 85, 90, 95] {
                let load = overwrites(POOL.blocks() * share / 100, 800_000, 70, hot);
                let unseen = load.requests.len() / 2;
                let settings = Settings {
                    parts: 2,
                    ..Settings::default()
                };
                let reference = hearth_simulate::run(
                    Policy::Reference(Kind::Lru),
                    &load,
                    POOL.blocks() as usize,
                    &settings,
                )
                .1;
                let mut line = format!(
                    "| {mode:?} | {name} | {share} % | {:.1} |",
                    percent(&reference[1])
                );
                for rule in [
                    OLDEST,
                    GREEDY,
                    BEST,
                    Rule {
                        price: PRICE,
                        ..BEST
                    },
                    Rule {
                        oracle: true,
                        ..BEST
                    },
                ] {
                    let out = segmented::run(setup(rule, mode, POOL), &load, unseen).0;
                    line += &format!(
                        " {:.1}, {:.2} |",
                        percent(&out),
                        out.flash_writes() as f64 / out.writes as f64
                    );
                }
                println!("{line}");
            }
        }
    }
}

fn reads() {
    println!("\n## Read only\n\nRead hits %, blocks written to flash in thousands.\n");
    println!(
        "| load | LRU | Cache | oldest first | greedy, one head | index, hot and cold | the same, price {PRICE} |\n| --- | --: | --: | --: | --: | --: | --: |"
    );
    let n = POOL.blocks();
    let mut at = spread(5);
    let mut next = |below: u64| {
        at = at.wrapping_add(1);
        spread(at) % below
    };
    let made: [(&str, Vec<u64>); 5] = [
        (
            "80 % in a fifth of five pools",
            (0..600_000)
                .map(|_| {
                    if next(100) < 80 {
                        next(n)
                    } else {
                        HOT + next(n * 4)
                    }
                })
                .collect(),
        ),
        (
            "loop of one and a half pools",
            (0..400_000).map(|i| i % (n * 3 / 2)).collect(),
        ),
        (
            "half a pool, and a scan",
            (0..600_000)
                .map(|i| if i % 2 == 0 { HOT + i } else { next(n / 2) })
                .collect(),
        ),
        (
            "a set of half a pool that moves",
            (0..600_000).map(|i| i / 5 + next(n / 2)).collect(),
        ),
        (
            "like 1/n over eight pools",
            (0..600_000)
                .map(|_| ((n * 8) as f64).powf(next(1 << 40) as f64 / (1u64 << 40) as f64) as u64)
                .collect(),
        ),
    ];
    for (name, keys) in made {
        let requests = keys.iter().enumerate().map(|(i, block)| Request {
            time_us: i as u64 * 1000,
            block: *block,
            count: 1,
            write: false,
        });
        let load = Workload::made(name, requests);
        let blocks = n as usize;
        let mut outs = vec![
            lru(&load, blocks),
            cache(&load, blocks, WriteMode::Back, true),
        ];
        for rule in [
            OLDEST,
            GREEDY,
            BEST,
            Rule {
                price: PRICE,
                ..BEST
            },
        ] {
            outs.push(segmented::run(setup(rule, WriteMode::Back, POOL), &load, 0).0);
        }
        let mut line = format!("| {name} |");
        for out in outs {
            line += &format!(
                " {:.2}, {:.0} |",
                percent(&out),
                out.flash_writes() as f64 / 1000.0
            );
        }
        println!("{line}");
    }
}

/// Rules compared over many cells.
struct Cells {
    mode: WriteMode,
    rules: Vec<Rule>,
    cells: Vec<Vec<(f64, f64)>>,
}

impl Cells {
    fn new(mode: WriteMode) -> Cells {
        let rules = vec![
            OLDEST,
            Rule {
                returns: false,
                ..GREEDY
            },
            GREEDY,
            Rule {
                name: "index, hot and cold, rewritten compete",
                returns: false,
                ..BEST
            },
            BEST,
            Rule {
                name: "index, hot and cold, price 64",
                price: PRICE,
                ..BEST
            },
        ];
        Cells {
            mode,
            rules,
            cells: Vec::new(),
        }
    }

    fn play(&mut self, load: &Workload) {
        for share in [0.05, 0.1, 0.2, 0.4] {
            let blocks = load.capacity(share);
            // Fewer blocks make no log of segments.
            if blocks < 2000 {
                continue;
            }
            let lru = lru(load, blocks);
            if lru.score() < 0.005 {
                continue;
            }
            let did = |out: Outcome| {
                (
                    percent(&out),
                    out.flash_writes() as f64 / lru.flash_writes().max(1) as f64,
                )
            };
            let mut cell = vec![
                did(lru),
                did(cache(load, blocks, self.mode, true)),
                did(cache(load, blocks, self.mode, false)),
            ];
            let data = (blocks as u32 / 122).clamp(8, 1020);
            let shape = Shape {
                segments: blocks as u32 / data,
                data,
                reserve: 3,
            };
            for rule in &self.rules {
                cell.push(did(
                    segmented::run(setup(*rule, self.mode, shape), load, 0).0
                ));
            }
            self.cells.push(cell);
        }
    }

    fn report(&self, title: &str) {
        println!(
            "\n## {title}, {:?}, {} cells\n",
            self.mode,
            self.cells.len()
        );
        println!(
            "| rules | mean read hits % | worst against LRU | cells > 1 point below LRU | flash writes, of LRU's |\n| --- | --: | --: | --: | --: |"
        );
        let names = ["LRU", "Cache, dead space", "Cache, none"]
            .into_iter()
            .chain(self.rules.iter().map(|r| r.name));
        let n = self.cells.len().max(1) as f64;
        for (i, name) in names.enumerate() {
            let mean = self.cells.iter().map(|c| c[i].0).sum::<f64>() / n;
            let writes = self.cells.iter().map(|c| c[i].1).sum::<f64>() / n;
            let worst = self
                .cells
                .iter()
                .map(|c| c[i].0 - c[0].0)
                .fold(f64::INFINITY, f64::min);
            let losses = self.cells.iter().filter(|c| c[i].0 < c[0].0 - 1.0).count();
            println!("| {name} | {mean:.2} | {worst:+.1} | {losses} | {writes:.2} |");
        }
    }
}

fn files(dir: &Path) -> Result<Vec<PathBuf>, Box<dyn Error>> {
    let (mut found, mut dirs) = (Vec::new(), vec![dir.to_owned()]);
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir)? {
            let path = entry?.path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.to_string_lossy().ends_with(".csv.zst") {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

fn main() -> Result<(), Box<dyn Error>> {
    let (mut dir, mut part): (Option<PathBuf>, Option<String>) = (None, None);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = words.next().ok_or(format!("{word} needs a value"))?;
        match word.as_str() {
            "--traces" => dir = Some(value.into()),
            "--part" => part = Some(value),
            _ => return Err(format!("unknown argument {word}").into()),
        }
    }
    let wanted = |word: &str| part.as_deref().is_none_or(|p| p == word);
    for (word, run) in [
        ("rules", rules as fn()),
        ("curve", curve),
        ("sizes", sizes),
        ("reads", reads),
    ] {
        if wanted(word) {
            run();
        }
    }
    if wanted("made") {
        let mut cells = MODES.map(Cells::new);
        for kind in made::Kind::ALL {
            let load = kind.make(0, 300_000);
            cells.iter_mut().for_each(|c| c.play(&load));
        }
        cells.iter().for_each(|c| c.report("Made workloads"));
    }
    if let Some(dir) = dir.filter(|_| wanted("traces")) {
        let mut cells = MODES.map(Cells::new);
        for path in files(&dir)? {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let load = Workload::load(&name, Reader::open(&path, Options::default())?, |_| ())?;
            cells.iter_mut().for_each(|c| c.play(&load));
        }
        cells.iter().for_each(|c| c.report("Traces"));
    }
    Ok(())
}
