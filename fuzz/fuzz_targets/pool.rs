//! A pool somebody tampered with, checksums put right, is refused or served: the engine opens it,
//! serves its disks for a while and stops, without a panic and without a request left unanswered.
#![no_main]

use hearth_sim::tamper::Originals;
use libfuzzer_sys::fuzz_target;
use std::sync::OnceLock;

fuzz_target!(|plan: &[u8]| {
    static ORIGINALS: OnceLock<Originals> = OnceLock::new();
    let originals = ORIGINALS.get_or_init(Originals::make);
    if let Err(e) = originals.try_plan(plan) {
        panic!("{e}");
    }
});
