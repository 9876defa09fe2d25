//! What reading ahead gains on traces with times, and what of it is wasted.
//!
//!     cargo run -p hearth-simulate --example ahead -- --traces DIR [--part WORD] [--requests N] [--own-times yes]
//!
//! For each trace and two cache sizes: read hits without and with it at 1 and 10 ms to get to a place,
//! the part of what was read ahead that was dropped unused, and disk time saved. With `--own-times` requests come when
//! they did in the trace, however long the disk takes (and it takes any number of reads at once); else a
//! guest has one request in flight and waits.

use std::path::PathBuf;

use hearth_simulate::device::Device;
use hearth_simulate::twin::Disk;
use hearth_simulate::{Model, Outcome, Policy, Settings, Workload, WriteMode, run};
use hearth_trace::{Options, Reader};

const SHARES: [f64; 2] = [0.05, 0.20];
const ACCESS_US: [u64; 2] = [1000, 10_000];

fn percent(part: u64, whole: u64) -> f64 {
    part as f64 * 100.0 / whole.max(1) as f64
}

fn main() {
    let (mut traces, mut part, mut most, mut own) = (None, String::new(), 60_000, false);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = words.next().expect("a value");
        match word.as_str() {
            "--traces" => traces = Some(PathBuf::from(value)),
            "--part" => part = value,
            "--requests" => most = value.parse().expect("a number"),
            "--own-times" => own = true,
            _ => panic!("there is no {word}"),
        }
    }
    let dir = traces.expect("--traces DIR");
    let mut paths: Vec<PathBuf> = std::fs::read_dir(dir)
        .expect("a directory")
        .filter_map(|e| e.ok().map(|e| e.path()))
        .filter(|p| p.to_string_lossy().ends_with(".csv.zst"))
        .collect();
    paths.sort();
    println!(
        "| trace | cache | ms | demand | with | gain | wasted | disk time saved: demand | with |"
    );
    println!("| --- | --: | --: | --: | --: | --: | --: | --: | --: |");
    let mut all: [(f64, u64, u64, u32); 2] = Default::default();
    for path in paths {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let name = name.trim_end_matches(".csv.zst");
        if !name.contains(&part) {
            continue;
        }
        let reader = Reader::open(&path, Options::default()).expect("a trace");
        let load = Workload::load(name, reader, |_| {}).expect("a trace");
        let load = Workload::made(name, load.requests.into_iter().take(most));
        // Where next to nothing is read there is nothing to read ahead.
        if load.reads * 50 < load.accesses() {
            continue;
        }
        for share in SHARES {
            for (ms, access_us) in ACCESS_US.into_iter().enumerate() {
                let does = |policy| -> Outcome {
                    let model = match own {
                        true => Model::Rules,
                        false => Model::Engine(Disk {
                            device: Device {
                                access_us,
                                ..Device::HARD_DISK
                            },
                            ..Disk::default()
                        }),
                    };
                    let settings = Settings {
                        model,
                        latency_us: access_us,
                        write_mode: WriteMode::Back,
                        ..Settings::default()
                    };
                    run(policy, &load, load.capacity(share), &settings).0
                };
                let (demand, with) = (does(Policy::HearthDemand), does(Policy::Hearth));
                let gain = (with.score() - demand.score()) * 100.0;
                let sum = &mut all[ms];
                sum.0 += gain;
                sum.1 += with.prefetch_wasted;
                sum.2 += with.prefetched;
                sum.3 += 1;
                println!(
                    "| {name} | {} % | {} | {:.2} | {:.2} | {gain:+.2} | {:.0} % of {} | {:.1} | {:.1} |",
                    share * 100.0,
                    access_us / 1000,
                    demand.score() * 100.0,
                    with.score() * 100.0,
                    percent(with.prefetch_wasted, with.prefetched),
                    with.prefetched,
                    demand.saved_disk_time() * 100.0,
                    with.saved_disk_time() * 100.0,
                );
            }
        }
    }
    for (sum, access_us) in all.iter().zip(ACCESS_US) {
        println!(
            "\nat {} ms: {:+.2} points in the mean of {} cells, {:.1} % of {} blocks wasted",
            access_us / 1000,
            sum.0 / f64::from(sum.3.max(1)),
            sum.3,
            percent(sum.1, sum.2),
            sum.2,
        );
    }
}
