//! What advice says a cache would do against what the simulator that does as the engine does makes of it, on real
//! traces if there are some.

use std::path::PathBuf;

use hearth_policy::advise::at;
use hearth_policy::ladder::{self, Ladder};
use hearth_policy::mrc::{Mrc, SAMPLES, place};
use hearth_simulate::twin::Disk;
use hearth_simulate::{Model, Policy, Settings, Workload, WriteMode, run};
use hearth_trace::{Options, Reader};

/// Longest trace taken, blocks.
const ACCESSES_MAX: u64 = 5_000_000;
/// Sizes as parts of the working set.
const PARTS: [f64; 5] = [0.05, 0.1, 0.2, 0.4, 0.8];

#[test]
fn advice_is_nearer_to_the_engine_than_lru_on_real_traces() {
    let Some(dir) = std::env::var_os("HEARTH_TRACES") else {
        return;
    };
    let dir = PathBuf::from(&dir);
    let mut files: Vec<PathBuf> = std::fs::read_dir(dir)
        .expect("traces")
        .flatten()
        .map(|e| e.path())
        .filter(|p| p.to_string_lossy().ends_with(".csv.zst"))
        .collect();
    files.sort();
    let (mut own_off, mut lru_off, mut cells) = (0.0, 0.0, 0.0);
    for path in files {
        let load = {
            let reader = Reader::open(&path, Options::default()).expect("recognised");
            Workload::load("trace", reader, |_| ()).expect("whole")
        };
        if load.accesses() > ACCESSES_MAX {
            continue;
        }
        let (mut mrc, mut ladder) = (Mrc::new(), Ladder::new(SAMPLES));
        for request in &load.requests {
            for key in request.block..request.block + u64::from(request.count) {
                if !request.write {
                    mrc.count(1.0);
                }
                if place(key) < mrc.threshold() {
                    let distance = mrc.sampled(key, !request.write);
                    ladder.sampled(&mrc, key, request.write, distance);
                }
            }
        }
        let lru = mrc.points();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let Some(own) = ladder.corrected(&lru) else {
            println!("{name:36} too little");
            continue;
        };
        let costs = ladder.flash_writes();
        for part in PARTS {
            let blocks = load.capacity(part);
            let settings = Settings {
                model: Model::Engine(Disk {
                    seq_cutoff: 0,
                    ..Disk::default()
                }),
                write_mode: WriteMode::Back,
                ..Settings::default()
            };
            let out = run(Policy::HearthDemand, &load, blocks, &settings).0;
            let size = blocks as f64;
            let (is, own, lru) = (out.score(), at(&own, size), at(&lru, size));
            let cost = out.flash_writes() as f64 / out.writes.max(1) as f64;
            println!(
                "{name:36} {blocks:8} is {:5.1} own {:5.1} lru {:5.1}   flash writes {cost:6.2} own {:6.2}",
                is * 100.0,
                own * 100.0,
                lru * 100.0,
                ladder::between(&costs, size),
            );
            own_off += (own - is).abs();
            lru_off += (lru - is).abs();
            cells += 1.0;
        }
    }
    let (own, lru) = (own_off / cells, lru_off / cells);
    println!("mean error: own {own:.4}, LRU's curve {lru:.4}, {cells} cells");
    assert!(own < lru, "{own} {lru}");
}
