//! What watching costs a request, on one core: `cargo bench -p hearth-observe`.
//!
//! Requests go through the very calls a data thread makes, the keeper's part included, so the
//! figure is CPU time, not only the time a guest waits. Three workloads: a hot set smaller than
//! the sample (every access sampled: the worst), a large skewed one (the usual), and the same
//! with a recording.

use std::time::Instant;

use hearth_engine::api::{ReqOp, Request};
use hearth_observe::{Observer, RecordOptions};
use hearth_reactor::{Ended, Watcher};

const REQUESTS: u64 = 4_000_000;
const DISK: u64 = 64 << 30;

fn cpu_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: a valid pointer to a timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Nanoseconds per request: on the data thread (wall), and of the whole process (CPU).
fn run(observer: Option<&Observer>, batch: u64, blocks: u64) -> (f64, f64) {
    let mut watch = observer.map(|o| {
        o.watch_disk(1, DISK);
        o.watch()
    });
    let (wall, cpu) = (Instant::now(), cpu_ns());
    let mut state = 1u64;
    let mut requests = Vec::new();
    for round in 0..REQUESTS / batch {
        let now = round * 10_000;
        requests.clear();
        for _ in 0..batch {
            state = hearth_policy::spread(state);
            // The product of two even numbers favours the low blocks.
            let a = ((state >> 40) * blocks) >> 24;
            let block = (a * ((state & 0xFF_FFFF) + 1)) >> 24;
            let op = if state % 4 == 0 {
                ReqOp::Write { fua: false }
            } else {
                ReqOp::Read
            };
            requests.push(Request::new(0, 1, op, block * 4096, 4096, None, now));
        }
        std::hint::black_box(&requests);
        if let Some(watch) = &mut watch {
            watch.arrived(&requests);
            for request in &requests {
                watch.ended(Ended {
                    disk: 1,
                    op: request.op,
                    start_ns: now,
                    end_ns: now + 80_000 + (state & 0xFFFF),
                });
            }
            watch.settle();
        }
    }
    let n = REQUESTS as f64;
    (
        wall.elapsed().as_nanos() as f64 / n,
        (cpu_ns() - cpu) as f64 / n,
    )
}

fn main() -> std::io::Result<()> {
    // Under `cargo test --all-targets` it is enough that it builds.
    if !std::env::args().any(|a| a == "--bench") {
        return Ok(());
    }
    println!("nanoseconds per 4 KiB request: on the data thread, and CPU of all threads");
    for (name, blocks, recording) in [
        ("hot set of 10,000 blocks", 10_000u64, false),
        ("skewed over 4 million blocks", 4_000_000, false),
        ("the same, recorded", 4_000_000, true),
    ] {
        for batch in [1, 16] {
            let bare = run(None, batch, blocks);
            let observer = Observer::start()?;
            observer.watch_disk(1, DISK);
            let file = std::env::temp_dir().join(format!("hearth-cost-{}", std::process::id()));
            if recording {
                let options = RecordOptions {
                    path: file.clone(),
                    duration_ns: None,
                    bytes_max: 64 << 20,
                };
                observer.record(1, options).map_err(std::io::Error::other)?;
            }
            let with = run(Some(&observer), batch, blocks);
            let dropped = observer.recording(1).map_or(0, |r| r.dropped);
            println!(
                "{name:30} {batch:3} a round: {:6.0} {:6.0}   (dropped from the recording: {dropped})",
                with.0 - bare.0,
                with.1 - bare.1
            );
            drop(observer);
            let _ = std::fs::remove_file(&file);
            let mut older = file.into_os_string();
            older.push(".1");
            let _ = std::fs::remove_file(older);
        }
    }
    Ok(())
}
