//! The simulated cache does as it is set.

use super::setup::BLOCK;
use super::*;
use crate::device::Device;
use crate::run::{Model, Policy, Settings, run};
use crate::workload::Workload;
use hearth_policy::spread;

fn mixed(blocks: u64, count: u64, salt: u64) -> Workload {
    let requests = (0..count).map(|i| {
        let r = spread(i ^ salt << 32);
        Request {
            time_us: i * 500,
            block: if r.is_multiple_of(3) {
                i * 2 % blocks
            } else {
                spread(r) % blocks
            },
            count: 1 + (r >> 20) as u32 % 9,
            write: r >> 40 & 3 == 0,
        }
    });
    Workload::made("mixed", requests)
}

fn play(disk: Disk, load: &Workload, blocks: usize, write_mode: WriteMode) -> Outcome {
    let settings = Settings {
        model: Model::Engine(disk),
        write_mode,
        ..Settings::default()
    };
    run(Policy::Hearth, load, blocks, &settings).0
}

/// Whatever a user asks for: the log never runs out of segments, and what is counted adds up.
#[test]
fn any_shape_of_a_log_serves() {
    let modes = [WriteMode::Back, WriteMode::Through, WriteMode::Around];
    for i in 0..240u64 {
        let r = |n: u64| spread(i << 8 | n);
        let blocks = 1 + (r(0) % 3000) as usize;
        let disk = Disk {
            seq_cutoff: [0, 4096, 1 << 20][r(1) as usize % 3],
            block_size: 4096 << (r(2) % 5),
            min: r(3) % (blocks as u64 * 8192),
            max: r(4) % 2 * (r(5) % (blocks as u64 * 4096)),
            segments: (r(6) % 2 == 0).then_some((r(7) % 200) as u32),
            reserve: (r(8) % 2 == 0).then_some((r(9) % 300) as u32),
            freed: [Heads::One, Heads::HotCold]
                .map(|heads| Freed::Cheapest { price: 64, heads })
                .get(r(10) as usize % 3)
                .copied()
                .unwrap_or(Freed::Oldest),
            device: [Device::HARD_DISK, Device::INSTANT][r(11) as usize % 2],
            depth: 1 + r(12) as usize % 9,
        };
        let load = mixed(1 + r(13) % 4000, 2000, i);
        let out = play(disk, &load, blocks, modes[r(14) as usize % 3]);
        assert_eq!((out.reads, out.writes), (load.reads, load.writes));
        assert!(out.read_hits <= out.reads);
        let judged = out.prefetch_hits + out.prefetch_late + out.prefetch_wasted;
        assert!(judged <= out.prefetched, "{out:?}");
    }
}

#[test]
fn what_is_read_ahead_takes_the_disks_time() {
    let requests = (0..4000u64).map(|i| Request {
        time_us: 0,
        block: i * 4 % 8000,
        count: 4,
        write: false,
    });
    let load = Workload::made("loop", requests);
    let disk = |access_us| Disk {
        device: Device {
            access_us,
            ..Device::HARD_DISK
        },
        seq_cutoff: 0,
        ..Disk::default()
    };
    // A loop in a cache of ten blocks, as fast as it can be read.
    let out = play(disk(8000), &load, 10, WriteMode::Through);
    assert!(out.score() < 0.1, "{out:?}");
    assert!(out.bare_disk_us >= 4000 * 4 * 27, "it has to be read");
    assert!(out.saved_disk_time() < 0.01, "{}", out.saved_disk_time());
}

#[test]
fn a_long_stream_passes_by_and_a_maximum_holds() {
    let twice = || (0..2).flat_map(|_| (0..500u64).map(|i| (i * 8, 8)));
    let requests = twice().map(|(block, count)| Request {
        time_us: block * 1000,
        block,
        count,
        write: false,
    });
    let load = Workload::made("scans", requests);
    let hits = |disk| {
        let settings = Settings {
            model: Model::Engine(disk),
            ..Settings::default()
        };
        run(Policy::HearthDemand, &load, 20_000, &settings)
            .0
            .read_hits
    };
    let all = Disk {
        seq_cutoff: 0,
        ..Disk::default()
    };
    assert!(hits(all.clone()) > 3900);
    assert!(
        hits(Disk::default()) < 600,
        "only its first mebibyte is cached"
    );
    let limited = Disk {
        max: 1000 * BLOCK,
        ..all
    };
    assert!(hits(limited) <= 1000);
}
