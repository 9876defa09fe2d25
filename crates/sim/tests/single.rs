//! One I/O of a fixed workload fails, and nothing else: nobody may notice, but who needed just that of an origin. And where there is
//! another device that has the same, nobody at all. `hearth-sim --single` tries all of them.

use hearth_sim::real::Real;
use hearth_sim::single::run_all;

/// Of so many I/Os one is tried, another one in each workload and each way to fail.
const STRIDE: u64 = 11;

#[test]
fn one_failure_alone_does_no_harm() {
    let tally = run_all(STRIDE, 2, &Real::default()).expect("without any failure all is well");
    println!("{} runs over {:?}", tally.runs, tally.ios);
    assert!(tally.runs > 500, "{} runs", tally.runs);
    let first = tally.findings.first().map(ToString::to_string);
    assert!(first.is_none(), "{}", first.unwrap_or_default());
}
