//! A pool that keeps everything twice: whatever rots in one half, a start after a crash goes by the other one, and leaves both whole.
//!
//! What was promised last no later batch says is durable. Its checksums decide whether the log ends there, and so does its descriptor;
//! either may have rotted where it is read first.

use crate::judge::{Judged, disk};
use hearth_io::BLOCK;
use hearth_sim::device::SimDevice;

/// What is written last, and what is there before it.
const LAST: u8 = 33;
const FIRST: u8 = 11;

fn half(j: &mut Judged, n: usize) -> &mut SimDevice {
    match n {
        0 => &mut j.flash,
        _ => j.second.as_mut().expect("two devices"),
    }
}

/// Where the one block of a device is that holds nothing but `fill`.
fn place(j: &mut Judged, n: usize, fill: u8) -> Option<usize> {
    let device = half(j, n);
    let is_it = |i: &usize| device.visible_block(*i)[..] == [fill; BLOCK as usize];
    (0..device.blocks()).find(is_it)
}

/// In a pool whose clean blocks are there once, or twice: what is so many blocks before the last one rots in a half.
fn rots(before: usize, later: bool) {
    for once in [false, true] {
        for rotten in [0, 1] {
            let what = format!("once {once}, half {rotten}");
            let mut j = Judged::twice(vec![disk(1)], once);
            j.write_fua(1, 3, FIRST).expect("written");
            j.settle();
            j.write_fua(1, 4, LAST).expect("written");
            if later {
                // Batches that say it is durable.
                for block in 10..14 {
                    j.write_fua(1, block, 5).expect("written");
                }
            }
            let at = place(&mut j, rotten, LAST).expect("it is there");
            half(&mut j, rotten).rot(at - before);
            j.crash();
            assert_eq!(j.read(1, 3), Ok(FIRST), "{what}");
            assert_eq!(j.read(1, 4), Ok(LAST), "{what}");
            assert_eq!(j.lost(1), [], "{what}");
            // Whichever device is left is enough from here on.
            for n in [0, 1] {
                assert!(place(&mut j, n, LAST).is_some(), "{what}: not in half {n}");
            }
            half(&mut j, 1 - rotten).kill();
            assert_eq!(j.read(1, 4), Ok(LAST), "{what}, which alone is left");
        }
    }
}

#[test]
fn a_block_that_was_written_last_and_rotted_in_one_half_is_read_from_the_other() {
    rots(0, false);
}

/// It was trusted unseen, as it was known to be durable, and then the half that was whole was given what had rotted.
#[test]
fn a_durable_block_that_rotted_in_one_half_is_not_written_over_the_other() {
    rots(0, true);
}

#[test]
fn a_descriptor_that_rotted_in_one_half_does_not_end_the_log() {
    rots(1, false);
    rots(1, true);
}

/// Nothing else says then that there is such a segment, and the other half, which was promised, was wiped.
#[test]
fn a_segment_whose_beginning_rotted_in_one_half_is_read_from_the_other() {
    for once in [false, true] {
        for rotten in [0, 1] {
            let what = format!("once {once}, half {rotten}");
            let mut j = Judged::twice(vec![disk(1)], once);
            let mut before = None;
            // A batch is a descriptor and its one block, and the next one stands behind it unless it begins a segment.
            let begins = (40..=u8::MAX).find_map(|fill| {
                j.write_fua(1, 4, fill).expect("written");
                let at = place(&mut j, rotten, fill).expect("it is there");
                let begins = before.is_some_and(|before| at != before + 2);
                before = Some(at);
                begins.then_some((fill, at - 1))
            });
            let (fill, start) = begins.expect("a segment is full some time");
            half(&mut j, rotten).rot(start);
            j.crash();
            assert_eq!(j.read(1, 4), Ok(fill), "{what}");
            assert_eq!(j.lost(1), [], "{what}");
            half(&mut j, 1 - rotten).kill();
            assert_eq!(j.read(1, 4), Ok(fill), "{what}, which alone is left");
        }
    }
}

/// What is found in the other half may not be read again a moment later; then it was given what had rotted.
#[test]
fn what_is_whole_in_one_half_stays_although_it_is_not_read_when_the_other_is_mended() {
    for once in [false, true] {
        for rotten in [0, 1] {
            for before in [0, 1] {
                let what = format!("once {once}, half {rotten}, {before} before");
                let mut j = Judged::twice(vec![disk(1)], once);
                j.write_fua(1, 3, FIRST).expect("written");
                j.settle();
                j.write_fua(1, 4, LAST).expect("written");
                let at = place(&mut j, rotten, LAST).expect("it is there") - before;
                half(&mut j, rotten).rot(at);
                let good = (at * BLOCK as usize) as u64;
                half(&mut j, 1 - rotten).faults.read_fails_once = Some((good, 1));
                j.crash();
                assert_eq!(j.read(1, 4), Ok(LAST), "{what}");
                assert_eq!(j.lost(1), [], "{what}");
                half(&mut j, 1 - rotten).faults.read_fails_once = None;
                // The next start mends it.
                j.crash();
                assert!(
                    place(&mut j, rotten, LAST).is_some(),
                    "{what}, after another start"
                );
                half(&mut j, 1 - rotten).kill();
                assert_eq!(j.read(1, 4), Ok(LAST), "{what}, after another start");
            }
        }
    }
}

/// What is there after what was flushed and then written over by what was not: whichever of it counts, it does so from then on.
struct Unflushed {
    blocks: u64,
}

impl Unflushed {
    fn write(j: &mut Judged, blocks: u64) -> Unflushed {
        for block in 0..blocks {
            j.write(1, block, 1, FIRST).expect("written");
        }
        j.flush(1).expect("flushed");
        j.settle();
        for block in 0..blocks {
            j.write(1, block, 1, 100 + block as u8).expect("written");
        }
        Unflushed { blocks }
    }

    fn read(&self, j: &mut Judged, what: &str) -> Vec<u8> {
        assert_eq!(j.lost(1), [], "{what}");
        let read = (0..self.blocks).map(|block| {
            let is = j.read(1, block);
            let whole = is == Ok(FIRST) || is == Ok(100 + block as u8);
            assert!(whole, "{what}: block {block} is {is:?}");
            is.expect("it is read")
        });
        read.collect()
    }
}

/// All of a segment was taken from the other half then, and what this half lacks written over it.
#[test]
fn a_sector_that_cannot_be_read_does_not_hide_what_its_half_lacks() {
    for once in [false, true] {
        for poor in [0, 1] {
            for behind in [2, 6] {
                let what = format!("once {once}, half {poor}, {behind} behind");
                let mut j = Judged::twice(vec![disk(1)], once);
                let unflushed = Unflushed::write(&mut j, 8);
                let last = place(&mut j, poor, 107).expect("it is there") + behind;
                half(&mut j, poor).power_cut();
                let bad = (last * BLOCK as usize) as u64;
                half(&mut j, poor).faults.bad_ranges.push(bad..bad + BLOCK);
                j.crash();
                half(&mut j, poor).faults.bad_ranges.clear();
                let read = unflushed.read(&mut j, &what);
                j.crash();
                half(&mut j, 1 - poor).kill();
                assert_eq!(
                    unflushed.read(&mut j, &what),
                    read,
                    "{what}, which alone is left"
                );
            }
        }
    }
}

/// What was found may be on the device alone that is lost while the other one is given something else.
#[test]
fn a_device_that_is_lost_while_a_start_mends_takes_nothing_along_that_was_flushed() {
    for once in [false, true] {
        for dying in [0, 1] {
            for steps in 0..40 {
                let what = format!("once {once}, half {dying} dies after {steps}");
                let mut j = Judged::twice(vec![disk(1)], once);
                let unflushed = Unflushed::write(&mut j, 40);
                half(&mut j, 1 - dying).power_cut();
                half(&mut j, dying).dies_after(Some(steps));
                j.crash();
                let read = unflushed.read(&mut j, &what);
                j.crash();
                assert_eq!(unflushed.read(&mut j, &what), read, "{what}, started again");
            }
        }
    }
}

/// Of a half that is not there nothing is known: not that it holds zeros. What was written last, promised to nobody and torn in the
/// half that is left, is as if it had not been written.
#[test]
fn what_is_torn_is_no_block_of_zeros_because_the_other_half_is_gone() {
    for once in [false, true] {
        let mut j = Judged::twice(vec![disk(1)], once);
        j.write_fua(1, 4, FIRST).expect("written");
        j.settle();
        j.write_fua(1, 4, 0).expect("written");
        let at = place(&mut j, 0, FIRST).expect("it is there");
        // A batch is a descriptor and its one block.
        assert_eq!(
            half(&mut j, 0).visible_block(at + 2)[..],
            [0; BLOCK as usize]
        );
        half(&mut j, 0).rot(at + 2);
        half(&mut j, 1).kill();
        j.crash();
        assert_eq!(j.lost(1), [], "once {once}");
        assert_eq!(j.read(1, 4), Ok(FIRST), "once {once}");
    }
}

#[cfg(feature = "mutations")]
#[test]
fn a_start_that_goes_by_one_half_is_caught() {
    use hearth_engine::faults::Fault;
    let tests: [fn(); 3] = [
        a_block_that_was_written_last_and_rotted_in_one_half_is_read_from_the_other,
        a_durable_block_that_rotted_in_one_half_is_not_written_over_the_other,
        a_descriptor_that_rotted_in_one_half_does_not_end_the_log,
    ];
    let begins: fn() = a_segment_whose_beginning_rotted_in_one_half_is_read_from_the_other;
    let mut pairs = tests.map(|test| (Fault::OneHalfWalked, test)).to_vec();
    pairs.push((Fault::BeginningOfOne, begins));
    let unnoticed = crate::judge::unnoticed(&pairs);
    assert!(unnoticed.is_empty(), "{unnoticed:?}");
}
