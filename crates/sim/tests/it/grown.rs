//! A disk of an odd size that grows, and the power cut at that very moment.

use crate::judge::{BLOCKS, Judged, disk};
use hearth_engine::ControlError;
use hearth_engine::api::{DiskConfig, Mode, Request};
use hearth_engine::faults::Faults;
use hearth_io::{BLOCK, Buf};
use hearth_sim::device::Tear;

/// Calls until a disk has grown; it takes a handful.
const GROW_TRIES: u32 = 1000;

/// Is what its last block was padded with served for what the origin holds there?
pub fn padding_is_served(seed: u64, faults: Faults) -> bool {
    let odd = BLOCKS * BLOCK - 2048;
    let last = BLOCKS - 1;
    let config = DiskConfig {
        size: odd,
        mode: Mode::WriteThrough,
        ..disk(1)
    };
    let mut j = Judged::faulty(vec![config.clone()], seed, Tear::Block, faults);
    // It is cached, with padding, durably: a power cut brings it back.
    let tail = |j: &mut Judged, len: u64| {
        let buf = Buf::zeroed(BLOCK as usize);
        let tag = j.submit(|tag, now| Request::read(tag, 1, last * BLOCK, len, &buf, now));
        j.wait(tag).expect("read");
        buf.all().bytes()[2048..].to_vec()
    };
    tail(&mut j, 2048);
    for _ in 0..8 {
        j.settle();
    }
    assert_eq!(j.cached(1), 1, "seed {seed}: the last block is not cached");
    let grown = DiskConfig {
        size: BLOCKS * BLOCK,
        ..config
    };
    let mut tries = 0;
    while let Err(e) = j.engine.set_size(1, grown.size) {
        assert_eq!(e, ControlError::Busy);
        tries += 1;
        assert!(tries < GROW_TRIES, "{}", j.engine.explain());
        if !j.step() {
            j.tick();
        }
    }
    // The registry has the new size now.
    j.disks = vec![grown];
    j.power_cut();
    tail(&mut j, BLOCK).iter().all(|b| *b == 0)
}
