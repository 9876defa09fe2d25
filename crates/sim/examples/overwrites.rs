//! How many hits does flash hold when guests overwrite, and what does that cost in flash writes?
//!
//! The engine itself, over devices in virtual time: a pool of 128 MiB (or of so many segments of 1 MiB), an origin of one arm, one disk. A guest
//! writes and reads blocks of a working set, all alike or four fifths of it in one fifth. Beside it, LRU in as
//! many blocks as the pool says it can hold. A row has the whole run, cold, and its second half alone.
//!
//!     cargo run --release -p hearth-sim --example overwrites -- [--writes PERCENT] [--accesses N] [--shares 60,77,95]
//!         [--access US] [--depth REQUESTS] [--segments N] [--loads uniform,80/20] [--modes back,through]
//!         [--ways one,moves] [--tell yes]

#[path = "../tests/it/played.rs"]
mod played;

use hearth_engine::EngineOptions;
use hearth_policy::cleaning::Heads;
use hearth_policy::reference::Kind;
use hearth_simulate::device::Device;
use hearth_simulate::twin::Freed;
use hearth_simulate::{Policy, Request, Settings, Workload, WriteMode, run};
use played::{Terms, cut, parts_with};

/// With the fixed areas, 128 MiB.
const SEGMENTS: u64 = 120;
const SEGMENT_BLOCKS: u64 = 254;

/// Numbers that look random, the same in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (x ^ (x >> 31)) % n
    }
}

fn load(blocks: u64, skewed: bool, writes: u64, accesses: u64, dice: &mut Dice) -> Workload {
    let requests = (0..accesses).map(|_| {
        let hot = skewed && dice.below(100) < 80;
        let block = match (skewed, hot) {
            (false, _) => dice.below(blocks),
            (true, true) => dice.below(blocks / 5),
            (true, false) => blocks / 5 + dice.below(blocks - blocks / 5),
        };
        Request {
            time_us: 0,
            block: block * 7 % blocks,
            count: 1,
            write: dice.below(100) < writes,
        }
    });
    let made = Workload::made("overwrites", requests.collect::<Vec<_>>());
    cut(made, accesses as usize)
}

/// What is appended together.
fn way(name: &str) -> Heads {
    match name {
        "one" => Heads::One,
        "moves" => Heads::MovesApart,
        _ => panic!("there is no way {name}"),
    }
}

fn main() {
    let mut tell = false;
    let (mut writes, mut accesses, mut access) = (70, 240_000u64, 100);
    let (mut depth, mut segments) = (1, SEGMENTS);
    let mut shares = vec![60u64, 77, 85, 95];
    let list = |s: &str| s.split(',').map(str::to_owned).collect::<Vec<_>>();
    let (mut loads, mut modes) = (list("uniform,80/20"), list("back,through"));
    let mut ways = list("one");
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = words.next().expect("a value");
        let number = |s: &str| s.parse::<u64>().expect("a number");
        match word.as_str() {
            "--writes" => writes = number(&value),
            "--accesses" => accesses = number(&value),
            "--access" => access = number(&value),
            "--tell" => tell = value == "yes",
            "--shares" => shares = value.split(',').map(number).collect(),
            "--depth" => depth = number(&value) as usize,
            "--segments" => segments = number(&value),
            "--loads" => loads = list(&value),
            "--modes" => modes = list(&value),
            "--ways" => ways = list(&value),
            _ => panic!("there is no {word}"),
        }
    }
    let device = Device {
        access_us: access,
        ..Device::HARD_DISK
    };
    println!(
        "| of the pool | load | mode | way | hits | LRU | flash writes | second half: hits | LRU | flash writes |"
    );
    println!("| --: | --- | --- | --- | --: | --: | --: | --: | --: | --: |");
    for share in shares {
        let blocks = segments * SEGMENT_BLOCKS * share / 100;
        for name in &loads {
            let skewed = match name.as_str() {
                "uniform" => false,
                "80/20" => true,
                _ => panic!("there is no load {name}"),
            };
            let mut dice = Dice(share);
            let halves: Vec<Workload> = (0..2)
                .map(|_| load(blocks, skewed, writes, accesses / 2, &mut dice))
                .collect();
            let both = halves.iter().flat_map(|h| h.requests.iter().copied());
            let whole = Workload::made("both", both.collect::<Vec<_>>());
            for mode in &modes {
                let mode = match mode.as_str() {
                    "back" => WriteMode::Back,
                    "through" => WriteMode::Through,
                    _ => panic!("there is no mode {mode}"),
                };
                let terms = Terms {
                    mode,
                    prefetch: false,
                    segments,
                    device,
                    depth,
                    freed: Freed::Oldest,
                };
                for name_of_way in &ways {
                    let options = EngineOptions {
                        heads: way(name_of_way),
                        ..EngineOptions::default()
                    };
                    let done = parts_with(&halves, &terms, options);
                    let capacity = done[1].capacity as usize;
                    let settings = Settings {
                        write_mode: mode,
                        ..Settings::default()
                    };
                    let lru = |load: &Workload| {
                        run(Policy::Reference(Kind::Lru), load, capacity, &settings).0
                    };
                    let (all, first) = (lru(&whole), lru(&halves[0]));
                    let score = |o: &hearth_simulate::Outcome| o.score() * 100.0;
                    let reads = (halves[0].reads as f64, halves[1].reads as f64);
                    let second =
                        (score(&all) * whole.reads as f64 - score(&first) * reads.0) / reads.1;
                    let hits =
                        (done[0].hits * reads.0 + done[1].hits * reads.1) / whole.reads as f64;
                    println!(
                        "| {share} % | {name} | {mode:?} | {name_of_way} | {hits:.1} | {:.1} | {} | {:.1} | {second:.1} | {} |",
                        score(&all),
                        done[0].flash + done[1].flash,
                        done[1].hits,
                        done[1].flash,
                    );
                    if tell {
                        println!("{}", done[1].words);
                    }
                }
            }
        }
    }
}
