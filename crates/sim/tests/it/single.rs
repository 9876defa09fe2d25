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

/// It is not only that nothing happens: a second copy that is not durable is found by one failure.
#[cfg(feature = "mutations")]
#[test]
fn a_second_copy_that_is_not_flushed_is_found() {
    use hearth_engine::faults::Fault;
    use hearth_sim::single::{cases, run_some};
    std::panic::set_hook(Box::new(|_| {}));
    let cases = cases().into_iter();
    let cases: Vec<_> = cases.filter(|c| c.twice && c.legs == 1).collect();
    assert!(cases.len() > 4, "{cases:?}");
    let broken = Real::with(Fault::SecondHalfUnflushed).expect("it is built in");
    let tally = run_some(&cases, STRIDE, 2, &broken).expect("it takes a failure");
    drop(std::panic::take_hook());
    println!("{} of {} runs", tally.findings.len(), tally.runs);
    assert!(!tally.findings.is_empty());
}
