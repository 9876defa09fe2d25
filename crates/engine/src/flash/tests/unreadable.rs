//! Segments that nobody can read any more are not freed: the log goes round with what is left, or not at all.

use super::shelf::{Shelf, short_of_room};
use super::{
    DATA, Device, FlashFault, FlashOp, IO, append, batches, given_up, op_of, sent, write_all,
    written,
};
use crate::flash::choose::Verdict;

/// Every read of what a segment says fails.
fn refuse_reads(d: &mut Device) -> usize {
    let ops: Vec<_> = d.out.ios.drain(..).collect();
    let count = ops.len();
    for (op, io) in ops {
        let FlashOp::Entries { seg, whole } = op else {
            panic!("{op:?}");
        };
        let done = op_of(io).done(Err(IO), 0);
        d.entries_read(seg, whole, &done, 0);
    }
    count
}

/// Lets the next segment go, of which nothing can be read; false if there is none.
fn one_more(d: &mut Device, shelf: &mut Shelf) -> bool {
    let Some((seg, _)) = d.next_victim(0) else {
        return false;
    };
    while d.next_victim(0).is_some_and(|(next, _)| next == seg) {
        assert_eq!(d.judge(seg, shelf, 0), Verdict::Unknown);
        assert_eq!(refuse_reads(d), 1);
    }
    true
}

/// Two segments were free for ever, nothing else came free, and who waited for room waited for ever.
#[test]
fn flash_is_given_up_when_too_few_segments_can_be_read_to_go_round() {
    let (mut d, mut shelf) = short_of_room(0);
    let (all, room) = (d.log.usable(), d.log.blocks_kept());
    assert!(one_more(&mut d, &mut shelf));
    assert!(d.takes_writes(), "one is not many");
    assert_eq!(d.log.usable(), all - 1);
    assert!(
        d.log.blocks_kept() < room,
        "nothing is kept in it but what is there"
    );
    while d.takes_writes() {
        assert!(
            one_more(&mut d, &mut shelf),
            "nobody waits for what never comes"
        );
    }
    assert_eq!(d.given_up(), Some(FlashFault::Broken));
    given_up(&mut d);
    assert!(
        matches!(sent(&mut d)[..], [FlashOp::Mark]),
        "and it is noted"
    );
    assert!(d.log.usable() >= 2);
}

/// What it says was read while its last batch was on its way, counted as damaged, and the segment was never freed.
#[test]
fn what_a_segment_says_is_read_when_all_of_it_is_there() {
    let (mut d, shelf) = short_of_room(0);
    let seg = *d.log.free.front().expect("one is free");
    append(&mut d, u64::from(seg) * 1000, DATA, 1);
    d.pump(0);
    let seq = batches(&sent(&mut d))[0];
    d.roll();
    d.resume(vec![seg]);
    assert_eq!(d.next_victim(0), Some((seg, true)));
    assert_eq!(d.judge(seg, &shelf, 0), Verdict::Unknown);
    assert!(d.out.ios.is_empty(), "its last batch is missing");
    written(&mut d, seq);
    write_all(&mut d);
    assert_eq!(d.judge(seg, &shelf, 0), Verdict::Unknown);
    let ops = sent(&mut d);
    assert!(
        matches!(ops[..], [FlashOp::Entries { whole: false, .. }]),
        "{ops:?}"
    );
}
