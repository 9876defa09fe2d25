//! `cargo run --release -p hearth-simulate --example judge -- --traces DIR`
//!
//! Runs the demand policy in the model of the engine, in write-back and in write-through, over traces and made workloads at
//! five sizes, alongside the references, and prints the results for all of them and for each half. Without `--traces`, only made
//! workloads run.
//!
//! `--cells` prints every cell, `--ablation` compares settings, `--references FILE` takes what the
//! references did from a table (`trace,cache_pct,…` as in `baselines.csv`) instead of running them,
//! `--check FILE` runs them and compares, `--seeds N` takes so many seeds of each made kind (two),
//! `--accesses N` their length (200,000), `--only WORD,WORD` the workloads with one of
//! these in their names.

use std::collections::HashMap;
use std::error::Error;
use std::path::{Path, PathBuf};

use hearth_policy::{EXPERTS, reference::Kind};
use hearth_simulate::judge::{self, Cell, Did, REFERENCES};
use hearth_simulate::twin::Disk;
use hearth_simulate::{Model, Policy, Settings, Workload, WriteMode, in_parallel, made};
use hearth_trace::{Options, Reader};

#[derive(Default)]
struct Args {
    traces: Option<PathBuf>,
    references: Option<PathBuf>,
    check: Option<PathBuf>,
    cells: bool,
    ablation: bool,
    seeds: u64,
    accesses: u64,
    only: String,
    variant: String,
}

impl Args {
    fn parse() -> Result<Args, Box<dyn Error>> {
        let mut args = Args {
            seeds: 2,
            accesses: 200_000,
            ..Args::default()
        };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("{word} needs a value"));
            match word.as_str() {
                "--traces" => args.traces = Some(value()?.into()),
                "--references" => args.references = Some(value()?.into()),
                "--check" => args.check = Some(value()?.into()),
                "--cells" => args.cells = true,
                "--ablation" => args.ablation = true,
                "--seeds" => args.seeds = value()?.parse()?,
                "--accesses" => args.accesses = value()?.parse()?,
                "--only" => args.only = value()?,
                "--variant" => args.variant = value()?,
                _ => return Err(format!("unknown argument {word}").into()),
            }
        }
        Ok(args)
    }
}

/// Did of (trace, share in per cent, policy).
type Known = HashMap<(String, u32, String), Did>;

fn known(path: &Path) -> Result<Known, Box<dyn Error>> {
    let mut known = Known::new();
    for line in std::fs::read_to_string(path)?.lines().skip(1) {
        let f: Vec<&str> = line.split(',').collect();
        if f.len() < 11 {
            return Err(format!("not a line of a table of references: {line}").into());
        }
        let score = if f[6].is_empty() { f[7] } else { f[6] };
        let did = Did {
            score: score.parse()?,
            // What is moved within the cache is one more write in a log.
            writes: f[10].parse::<u64>()? + f[11].parse::<u64>()?,
        };
        known.insert((f[0].to_owned(), f[1].parse()?, f[3].to_lowercase()), did);
    }
    Ok(known)
}

fn look_up(known: &Known, cell: &Cell, kind: Kind) -> Option<Did> {
    let trace = cell.trace.trim_end_matches(".csv.zst").to_owned();
    let key = (
        trace,
        (cell.share * 100.0).round() as u32,
        kind.name().to_owned(),
    );
    known.get(&key).copied()
}

fn traces(dir: &Path) -> Result<Vec<PathBuf>, Box<dyn Error>> {
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
    // By name, whatever directory they are in, so that halves stay halves.
    found.sort_by(|a, b| a.file_name().cmp(&b.file_name()));
    Ok(found)
}

/// The settings that are compared, in both write modes.
fn variants(ablation: bool) -> Vec<(String, Settings)> {
    let mut variants = Vec::new();
    for (name, write_mode) in [
        ("write-back", WriteMode::Back),
        ("write-through", WriteMode::Through),
    ] {
        let plain = Settings {
            model: Model::Engine(Disk::default()),
            write_mode,
            ..Settings::default()
        };
        variants.push((name.to_owned(), plain.clone()));
        if !ablation {
            continue;
        }
        for rules in EXPERTS {
            variants.push((
                format!("{name}, always {rules:?}"),
                Settings {
                    rules: Some(rules),
                    ..plain.clone()
                },
            ));
        }
    }
    variants
}

struct Run {
    variants: Vec<(String, Settings)>,
    cells: Vec<Cell>,
    did: Vec<Vec<Did>>,
    known: Option<Known>,
    check: Option<Known>,
    worst: HashMap<&'static str, f64>,
    print: bool,
    threads: usize,
}

impl Run {
    fn play(&mut self, load: &Workload, half: usize) {
        let mut cells = judge::empty_cells(load, half);
        in_parallel(&mut cells, self.threads, |cell| {
            let references = REFERENCES.map(|kind| {
                let from = self.known.as_ref().and_then(|k| look_up(k, cell, kind));
                from.unwrap_or_else(|| {
                    let plain = Settings {
                        model: Model::Engine(Disk::default()),
                        ..Settings::default()
                    };
                    judge::did(Policy::Reference(kind), load, cell.blocks, &plain)
                })
            });
            cell.references = references.to_vec();
        });
        for cell in &cells {
            if let Some(check) = &self.check {
                for (kind, did) in REFERENCES.iter().zip(&cell.references) {
                    if let Some(known) = look_up(check, cell, *kind) {
                        let worst = self.worst.entry(kind.name()).or_default();
                        *worst = worst.max((known.score - did.score).abs());
                    }
                }
            }
        }
        let mut jobs = Vec::new();
        for cell in cells.iter().filter(|c| c.counts()) {
            for (_, settings) in &self.variants {
                jobs.push((cell.blocks, settings.clone(), Did::default()));
            }
        }
        in_parallel(&mut jobs, self.threads, |(blocks, settings, did)| {
            *did = judge::did(Policy::HearthDemand, load, *blocks, settings);
        });
        let mut jobs = jobs.into_iter();
        for cell in cells.into_iter().filter(Cell::counts) {
            for did in &mut self.did {
                did.extend(jobs.next().map(|j| j.2));
            }
            if self.print {
                for ((name, _), did) in self.variants.iter().zip(&self.did) {
                    if let Some(did) = did.last() {
                        println!("{} {name}", judge::line(&cell, *did));
                    }
                }
            }
            self.cells.push(cell);
        }
    }

    fn report(&self, title: &str) {
        println!("\n## {title}\n");
        let names: Vec<String> = self.variants.iter().map(|(name, _)| name.clone()).collect();
        let of = |did: &[Did], half: Option<usize>| {
            let some = self.cells.iter().zip(did.iter().copied());
            judge::sum(some.filter(|(cell, _)| half.is_none_or(|h| cell.half == h)))
        };
        let mut rows = Vec::new();
        for (i, kind) in REFERENCES.iter().enumerate() {
            let did: Vec<Did> = self.cells.iter().map(|c| c.references[i]).collect();
            rows.push((kind.name().to_owned(), of(&did, None)));
        }
        for (name, did) in names.iter().zip(&self.did) {
            rows.push((format!("**{name}**"), of(did, None)));
            for (letter, half) in [("A", 0), ("B", 1)] {
                rows.push((format!("{name}, half {letter}"), of(did, Some(half))));
            }
        }
        println!("{}", judge::table(&rows));
        // Each mode judges by itself.
        for mode in ["write-back", "write-through"] {
            let at: Vec<usize> = (0..names.len())
                .filter(|i| names[*i].starts_with(mode))
                .collect();
            if at.len() < 2 {
                continue;
            }
            let some_names: Vec<String> = at.iter().map(|i| names[*i].clone()).collect();
            let some_did: Vec<Vec<Did>> = at.iter().map(|i| self.did[*i].clone()).collect();
            println!("Chosen on one half, judged on the other, {mode}:\n");
            println!(
                "{}",
                judge::table(&judge::halves(&self.cells, &some_names, &some_did))
            );
        }
        let mut worst: Vec<_> = self.worst.iter().collect();
        worst.sort_by(|a, b| a.0.cmp(b.0));
        for (kind, off) in worst {
            println!("{kind}: at most {:.3} points off the table", off * 100.0);
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse()?;
    let new = || -> Result<Run, Box<dyn Error>> {
        let mut variants = variants(args.ablation);
        variants.retain(|(name, _)| name.contains(&args.variant));
        Ok(Run {
            did: vec![Vec::new(); variants.len()],
            variants,
            cells: Vec::new(),
            known: args.references.as_deref().map(known).transpose()?,
            check: args.check.as_deref().map(known).transpose()?,
            worst: HashMap::new(),
            print: args.cells,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
        })
    };
    if let Some(dir) = &args.traces {
        let mut run = new()?;
        for (i, path) in traces(dir)?.iter().enumerate() {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if !args.only.split(',').any(|word| name.contains(word)) {
                continue;
            }
            let load = Workload::load(&name, Reader::open(path, Options::default())?, |_| ())?;
            run.play(&load, i % 2);
        }
        run.report(&format!("Traces of {}", dir.display()));
    }
    let mut run = new()?;
    for (i, kind) in made::Kind::ALL.into_iter().enumerate() {
        for seed in 0..args.seeds {
            let name = format!("{}-{seed}", kind.name());
            if args.only.split(',').any(|word| name.contains(word)) {
                run.play(&kind.make(seed, args.accesses), i % 2);
            }
        }
    }
    run.report("Made workloads; the halves are kinds");
    Ok(())
}
