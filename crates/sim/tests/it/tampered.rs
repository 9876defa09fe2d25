//! Pools that somebody tampered with, checksums and all, do not bring the engine down: see
//! [`hearth_sim::tamper`].

use hearth_sim::prng::Prng;
use hearth_sim::tamper::Originals;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

/// Pools tried; `TAMPERED` says otherwise.
const POOLS: u64 = 400;
/// More of them: each was the end of an engine once.
const ONCE_FATAL: [u64; 1] = [
    // Several segments with the same number: the rescue raised the floor for ever.
    14_885,
];
/// Longest one pool may take: it takes milliseconds.
const LIMIT: Duration = Duration::from_secs(30);
/// Most memory the test may have taken, a dozen times what the pools have.
const MEMORY_MAX_KIB: u64 = 512 << 10;

fn plan(seed: u64) -> Vec<u8> {
    let mut rng = Prng::new(seed);
    let len = 6 + rng.below(120);
    (0..len).map(|_| rng.next_u64() as u8).collect()
}

#[test]
fn tampered_pools_neither_panic_nor_hang() {
    let number = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<u64>().ok());
    let pools = number("TAMPERED").unwrap_or(POOLS);
    let start = number("TAMPERED_START").unwrap_or(0);
    static AT: AtomicU64 = AtomicU64::new(0);
    let (told, done) = channel();
    let work = move || {
        let originals = Originals::make();
        let (mut served, mut wrong) = (0, Vec::new());
        if std::env::var_os("TAMPERED_TRACE").is_none() {
            std::panic::set_hook(Box::new(|_| {}));
        }
        for seed in ONCE_FATAL.into_iter().chain(start..start + pools) {
            AT.store(seed, Ordering::Relaxed);
            let tried = catch_unwind(AssertUnwindSafe(|| originals.try_plan(&plan(seed))));
            match tried {
                Ok(Ok(true)) => served += 1,
                Ok(Ok(false)) => {}
                Ok(Err(e)) => wrong.push(format!("seed {seed}: {e}")),
                Err(panic) => {
                    let text = panic.downcast_ref::<String>().cloned();
                    let text =
                        text.or_else(|| panic.downcast_ref().map(|s: &&str| (*s).to_owned()));
                    wrong.push(format!(
                        "seed {seed}: panicked: {}",
                        text.unwrap_or_default()
                    ));
                }
            }
            let _ = told.send(None);
        }
        drop(std::panic::take_hook());
        let _ = told.send(Some((served, wrong)));
    };
    let thread = std::thread::spawn(work);
    let (served, wrong) = loop {
        match done.recv_timeout(LIMIT) {
            Ok(Some(found)) => break found,
            Ok(None) => {}
            Err(e) => {
                drop(std::panic::take_hook());
                panic!(
                    "seed {} hangs or was the end ({e})",
                    AT.load(Ordering::Relaxed)
                );
            }
        }
    };
    thread.join().expect("it has told all it had to");
    assert!(
        wrong.is_empty(),
        "{} of {pools}:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    // Neither may be all of them, or nothing was tried.
    assert!(
        served > pools / 20 && served < pools,
        "{served} of {pools} were served"
    );
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let peak = status
        .lines()
        .find_map(|l| {
            l.strip_prefix("VmHWM:")?
                .split_whitespace()
                .next()?
                .parse::<u64>()
                .ok()
        })
        .expect("it says how much memory was used");
    assert!(peak < MEMORY_MAX_KIB, "{peak} KiB of memory were used");
}
