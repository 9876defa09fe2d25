//! The policy on made loads: what it must win, what it must not lose, how it adapts.

use hearth_policy::reference::Kind;
use hearth_policy::{Budget, spread};
use hearth_simulate::{Policy, Request, Settings, Size, Workload, judge, made, matrix, plot, run};

fn reads(keys: impl IntoIterator<Item = u64>) -> Vec<Request> {
    keys.into_iter()
        .enumerate()
        .map(|(i, block)| Request {
            time_us: i as u64 * 1000,
            block,
            count: 1,
            write: false,
        })
        .collect()
}

/// Scattered, so that neither streams nor neighbours help.
fn scattered(n: u64) -> u64 {
    spread(n) >> 30
}

fn zipf(n: u64, count: u64, seed: u64) -> impl Iterator<Item = u64> {
    (0..count).map(move |i| {
        let u = (spread(i ^ seed << 40) >> 11) as f64 / (1u64 << 53) as f64;
        scattered((n as f64).powf(u) as u64 + (seed << 32))
    })
}

fn score(policy: Policy, load: &Workload, blocks: usize) -> f64 {
    run(policy, load, blocks, &Settings::default()).0.score()
}

/// Ours without prefetch against LRU and the best of the others.
fn demand(load: &Workload, blocks: usize) -> (f64, f64, f64) {
    let others = [
        Kind::Arc,
        Kind::Lirs,
        Kind::TinyLfu,
        Kind::S3Fifo,
        Kind::Sieve,
        Kind::TwoQ,
    ];
    let best = others
        .into_iter()
        .map(|k| score(Policy::Reference(k), load, blocks))
        .fold(0.0, f64::max);
    (
        score(Policy::HearthDemand, load, blocks),
        score(Policy::Reference(Kind::Lru), load, blocks),
        best,
    )
}

#[test]
fn zipf_and_eighty_twenty_are_near_the_best() {
    let skewed = Workload::made("zipf", reads(zipf(100_000, 300_000, 1)));
    let hot = Workload::made(
        "80/20",
        reads((0..300_000u64).map(|i| {
            let (a, b) = (spread(i), spread(i + 1_000_000));
            scattered(if a % 10 < 8 {
                b % 4000
            } else {
                4000 + b % 16_000
            })
        })),
    );
    for load in [&skewed, &hot] {
        for share in [0.05, 0.2] {
            let (ours, lru, best) = demand(load, load.capacity(share));
            assert!(ours > lru - 0.01, "{} {share}: {ours} lru {lru}", load.name);
            assert!(
                ours > best * 0.93,
                "{} {share}: {ours} best {best}",
                load.name
            );
        }
    }
}

#[test]
fn a_loop_larger_than_the_cache_is_kept_in_part() {
    let load = Workload::made("loop", reads((0..200_000).map(|i| scattered(i % 5000))));
    let (ours, lru, _) = demand(&load, 2500);
    assert!(lru < 0.01);
    assert!(ours > 0.4, "{ours}");
    // One whose order fits into the history is read ahead.
    let short = Workload::made("loop", reads((0..50_000).map(|i| scattered(i % 900))));
    let ahead = score(Policy::Hearth, &short, 450);
    assert!(ahead > 0.9, "{ahead}");
}

#[test]
fn a_scan_does_not_wash_the_cache_out_and_does_not_reach_flash() {
    let hot: Vec<u64> = zipf(3000, 100_000, 2).collect();
    let mut requests = reads(hot.iter().copied());
    let scan = (0..40_000u64).map(|i| Request {
        time_us: 0,
        block: (1 << 36) + i * 8,
        count: 8,
        write: false,
    });
    requests.extend(scan);
    requests.extend(reads(hot.iter().copied().take(20_000)));
    let with = Workload::made("scan", requests);
    let settings = Settings {
        parts: 8,
        ..Settings::default()
    };
    let (total, parts) = run(Policy::Hearth, &with, 2000, &settings);
    let (before, after) = (parts[3].score(), parts[7].score());
    assert!(
        after > before - 0.05,
        "{before} before the scan, {after} after"
    );
    assert!(
        total.flash_writes() < 60_000,
        "{} of 420,000 blocks",
        total.flash_writes()
    );
    assert!(parts[6].prefetch_hits * 10 > parts[6].reads * 9);
}

#[test]
fn it_follows_a_workload_that_changes_phase() {
    // A loop that wants the old kept, a drift that wants the new kept, the loop again.
    let looped = |n: u64| (0..n).map(|i| scattered(i % 3000));
    let drift = (0..150_000u64).map(|i| scattered(1_000_000 + i / 10 + spread(i) % 700));
    let keys: Vec<u64> = looped(150_000)
        .chain(drift)
        .chain(looped(150_000))
        .collect();
    let load = Workload::made("phases", reads(keys));
    let settings = Settings {
        parts: 9,
        ..Settings::default()
    };
    let parts = |policy| -> Vec<f64> {
        run(policy, &load, 1500, &settings)
            .1
            .iter()
            .map(|p| p.score())
            .collect()
    };
    let ours = parts(Policy::HearthDemand);
    let lru = parts(Policy::Reference(Kind::Lru));
    println!("ours {ours:.2?}\nlru  {lru:.2?}");
    // The last third of each phase, when it has had time to adapt.
    assert!(ours[2] > 0.4 && lru[2] < 0.01);
    assert!(ours[5] > lru[5] - 0.05, "{} {}", ours[5], lru[5]);
    assert!(ours[8] > 0.4, "{}", ours[8]);
}

/// Requests of a phase of [`phases`].
const PHASE: u64 = 60_000;
/// Requests over which hits are averaged to say that they are back.
const WINDOW: usize = 2000;
/// Requests of the parts that hits are counted in.
const PART: usize = 1000;

/// A loop of twice the cache; a Zipf whose most popular block is another every 20 requests; a new hot
/// set of twice the cache, every other request going to a scan; the loop again.
fn phases() -> Workload {
    let looped = (0..PHASE).map(|i| scattered(i % 3000));
    let moving = (0..PHASE).map(|i| {
        let u = (spread(i ^ 5 << 40) >> 11) as f64 / (1u64 << 53) as f64;
        scattered((1 << 34) + i / 20 + 20_000f64.powf(u) as u64)
    });
    let hot = zipf(3000, PHASE, 6).enumerate();
    let scan = hot.map(|(i, key)| {
        if i % 2 == 0 {
            key
        } else {
            (1 << 40) + i as u64 / 2
        }
    });
    let again = (0..PHASE).map(|i| scattered(i % 3000));
    Workload::made(
        "phases",
        reads(looped.chain(moving).chain(scan).chain(again)),
    )
}

#[test]
fn hits_come_back_after_each_change_of_phase() {
    const NAMES: [&str; 4] = ["loop", "moving zipf", "scan", "loop again"];
    // Requests until ours has four fifths of what the best of the others has in the end.
    const BACK_WITHIN: [usize; 4] = [10_000, 12_000, 8_000, 15_000];
    let load = phases();
    let settings = Settings {
        parts: load.requests.len() / PART,
        ..Settings::default()
    };
    let all: Vec<Policy> = Policy::all()
        .into_iter()
        .filter(|p| *p != Policy::Reference(Kind::Opt))
        .collect();
    let mean = |parts: &[f64]| parts.iter().sum::<f64>() / parts.len() as f64;
    let runs: Vec<Vec<Vec<f64>>> = all
        .iter()
        .map(|policy| {
            let parts = run(*policy, &load, 1500, &settings).1;
            let scores: Vec<f64> = parts.iter().map(|p| p.score()).collect();
            scores
                .chunks(PHASE as usize / PART)
                .map(<[f64]>::to_vec)
                .collect()
        })
        .collect();
    for (phase, name) in NAMES.iter().enumerate() {
        let end = |run: &Vec<Vec<f64>>| mean(&run[phase][PHASE as usize / PART / 2..]);
        let best = all
            .iter()
            .zip(&runs)
            .filter(|(p, _)| matches!(p, Policy::Reference(_)))
            .map(|(_, run)| end(run))
            .fold(0.0, f64::max);
        for (policy, run) in all.iter().zip(&runs) {
            let back = run[phase]
                .windows(WINDOW / PART)
                .position(|w| mean(w) >= best * 0.8)
                .map(|at| at * PART + WINDOW);
            println!(
                "{name:12} {:14} whole {:5.1} second half {:5.1} back after {back:?}",
                policy.name(),
                mean(&run[phase]) * 100.0,
                end(run) * 100.0
            );
            let ours = *policy == Policy::Hearth
                // Without prefetch, a loop that comes back to a flash full of what was hot is slow to
                // get in; of the others only W-TinyLFU lets it in at all.
                || *policy == Policy::HearthDemand && phase < 3;
            if ours {
                assert!(
                    back.is_some_and(|n| n <= BACK_WITHIN[phase]),
                    "{} in {name}: {back:?}",
                    policy.name()
                );
            }
        }
    }
}

#[test]
fn a_loop_that_comes_back_gets_in_again() {
    // Who gets past the gate hangs on which blocks share a counter, so one size alone says nothing: hits vary
    // fourfold between neighbours.
    let load = phases();
    let settings = Settings {
        parts: 8,
        ..Settings::default()
    };
    let sizes = [
        1300, 1350, 1400, 1450, 1475, 1500, 1525, 1550, 1600, 1650, 1700,
    ];
    let ends = sizes.map(|blocks| run(Policy::HearthDemand, &load, blocks, &settings).1[7].score());
    let mean = ends.iter().sum::<f64>() / ends.len() as f64;
    println!("{ends:.3?}, mean {mean:.3}");
    // With a stage of one size, a 12th of these caches, it was 8.7 %.
    assert!(mean > 0.087, "{mean}");
}

#[test]
fn random_reads_are_not_read_ahead_for_long() {
    let load = Workload::made(
        "random",
        reads((0..100_000).map(|i| spread(i) % 10_000_000)),
    );
    let (out, _) = run(Policy::Hearth, &load, 1000, &Settings::default());
    assert!(
        out.prefetched * 20 < out.reads,
        "{} blocks ahead",
        out.prefetched
    );
}

#[test]
fn an_endurance_budget_is_kept() {
    let load = Workload::made("zipf", reads(zipf(100_000, 300_000, 3)));
    let free = run(Policy::Hearth, &load, 5000, &Settings::default()).0;
    // 300 s of trace; the bucket begins with an hour's worth.
    let rate = 4096;
    let tight = Settings {
        budget: Budget::bytes_per_second(rate),
        ..Settings::default()
    };
    let limited = run(Policy::Hearth, &load, 5000, &tight).0;
    assert!(free.flash_writes() > 8000, "{}", free.flash_writes());
    assert!(limited.flash_writes() < 5000, "{}", limited.flash_writes());
    assert!(limited.score() > 0.1);
}

#[test]
fn runs_repeat_exactly_and_plots_hold_every_row() {
    let load = Workload::made("zipf", reads(zipf(20_000, 50_000, 4)));
    let sizes = [Size::Fraction(0.05), Size::Blocks(500)];
    let all = Policy::all();
    let loads = [load];
    let rows = matrix(&loads, &sizes, &all, &Settings::default(), 2, |_, _| ());
    let again = matrix(&loads, &sizes, &all, &Settings::default(), 1, |_, _| ());
    assert_eq!(rows.len(), all.len() * 2);
    for (a, b) in rows.iter().zip(&again) {
        assert_eq!(
            (a.policy, a.blocks, a.outcome),
            (b.policy, b.blocks, b.outcome)
        );
    }
    let svg = plot::svg(&rows);
    assert_eq!(svg.matches("<polyline").count(), all.len());
    assert_eq!(svg.matches("<circle").count(), rows.len());
}

#[test]
fn made_kinds_are_no_worse_than_they_were() {
    // What docs/decisions/0005-policy-judged.md found, as bounds: whoever changes a rule sees here, without
    // any trace, what it costs the kinds of load that public traces lack.
    let (mut cells, mut did) = (Vec::new(), Vec::new());
    for (i, kind) in made::Kind::ALL.into_iter().enumerate() {
        let load = kind.make(0, 60_000);
        for cell in judge::cells(&load, i % 2) {
            did.push(judge::did(
                Policy::HearthDemand,
                &load,
                cell.blocks,
                &Settings::default(),
            ));
            cells.push(cell);
        }
    }
    let all = judge::sum(cells.iter().zip(did));
    println!("{all:?}");
    assert_eq!(all.cells, 50);
    assert!(all.mean > all.lru - 0.012, "{all:?}");
    assert!(all.losses <= 22, "{all:?}");
    assert!(all.near >= 0.44, "{all:?}");
    assert!(all.writes <= 1.13, "{all:?}");
}
