//! Does `hearth simulate` say what the engine does?
//!
//! The same requests go through the engine, over devices in virtual time, and through the simulator: an
//! origin of one arm, flash that answers after 100 µs, a guest with so many requests in flight. Compared are
//! hits by blocks. All data is zeros, so that the devices need to keep only the engine's own structures.
//!
//!     cargo run -p hearth-sim --example agree -- [--traces DIR] [--part WORD] [--requests N] [--share PERCENT]
//!         [--depth N] [--access US] [--price P] [--heads 1|2] [--oldest yes] [--tell yes]

#[path = "../tests/it/played.rs"]
mod played;

use hearth_policy::cleaning::Heads;
use hearth_simulate::device::Device;
use hearth_simulate::twin::Freed;
use hearth_simulate::{Workload, WriteMode, made};
use hearth_trace::{Options, Reader};
use played::{SEGMENTS_MIN, Terms, compare, cut};
use std::path::PathBuf;

struct Args {
    traces: Option<PathBuf>,
    part: String,
    requests: usize,
    share: f64,
    depth: usize,
    access: u64,
    price: u64,
    heads: Heads,
    oldest: bool,
    tell: bool,
}

fn args() -> Args {
    let mut args = Args {
        traces: None,
        part: String::new(),
        requests: 30_000,
        share: 0.2,
        depth: 1,
        access: Device::HARD_DISK.access_us,
        price: 56,
        heads: Heads::One,
        oldest: false,
        tell: false,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = words.next().expect("a value");
        let number = || value.parse::<u64>().expect("a number");
        match word.as_str() {
            "--requests" => args.requests = number() as usize,
            "--share" => args.share = number() as f64 / 100.0,
            "--depth" => args.depth = number() as usize,
            "--access" => args.access = number(),
            "--price" => args.price = number(),
            "--heads" => args.heads = [Heads::One, Heads::HotCold][usize::from(number() == 2)],
            "--oldest" => args.oldest = true,
            "--traces" => args.traces = Some(value.into()),
            "--part" => args.part = value,
            "--tell" => args.tell = true,
            _ => panic!("there is no {word}"),
        }
    }
    args
}

/// Traces cut short; made workloads where there are none.
fn loads(args: &Args) -> Vec<Workload> {
    let Some(dir) = &args.traces else {
        let all = made::Kind::ALL.iter();
        return all
            .map(|k| cut(k.make(1, 200_000), args.requests))
            .collect();
    };
    let mut paths: Vec<PathBuf> = std::fs::read_dir(dir)
        .expect("a directory")
        .filter_map(|e| e.ok().map(|e| e.path()))
        .filter(|p| p.to_string_lossy().ends_with(".csv.zst"))
        .collect();
    paths.sort();
    let mut loads = Vec::new();
    for path in paths {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let name = name.trim_end_matches(".csv.zst");
        let reader = Reader::open(&path, Options::default()).expect("a trace");
        let load = Workload::load(name, reader, |_| {}).expect("a trace");
        loads.push(cut(load, args.requests));
    }
    loads
}

fn main() {
    let args = args();
    let device = Device {
        access_us: args.access,
        ..Device::HARD_DISK
    };
    let freed = match args.oldest {
        true => Freed::Oldest,
        false => Freed::Cheapest {
            price: args.price,
            heads: args.heads,
        },
    };
    println!("| workload | pool | mode | | engine | simulated | apart |");
    println!("| --- | --: | --- | --- | --: | --: | --: |");
    let mut apart = [Vec::new(), Vec::new()];
    for load in loads(&args) {
        if !load.name.contains(&args.part) || load.reads == 0 {
            continue;
        }
        let segments = load.capacity(args.share) as u64 / 254;
        for mode in [WriteMode::Back, WriteMode::Through, WriteMode::Around] {
            for prefetch in [false, true] {
                let both = compare(
                    &load,
                    &Terms {
                        mode,
                        prefetch,
                        segments: segments.max(SEGMENTS_MIN),
                        device,
                        depth: args.depth,
                        freed,
                    },
                );
                apart[usize::from(prefetch)].push(both.apart().abs());
                println!(
                    "| {} | {} MiB | {mode:?} | {} | {:.2} | {:.2} | {:+.2} |",
                    load.name,
                    both.capacity >> 20,
                    if prefetch { "reads ahead" } else { "demand" },
                    both.engine,
                    both.simulated,
                    both.apart(),
                );
                if args.tell {
                    println!("{}", both.words);
                }
            }
        }
    }
    for (apart, name) in apart.iter().zip(["demand", "reading ahead"]) {
        println!(
            "\n{name}: {} cells, apart {:.2} points in the mean, {:.2} at worst",
            apart.len(),
            apart.iter().sum::<f64>() / apart.len().max(1) as f64,
            apart.iter().fold(0.0, |a: f64, b| a.max(*b)),
        );
    }
}
