//! A simulated device alone.

use super::*;
use hearth_io::{Buf, Class, Media};
use smallvec::SmallVec;

fn device(seed: u64, tear: Tear) -> SimDevice {
    SimDevice::new(
        Target::Flash(0),
        1 << 20,
        4096,
        Base::Zeros,
        tear,
        Prng::new(seed),
    )
}

fn op(kind: OpKind, offset: u64, len: u64, fill: u8) -> IoOp {
    let mut bufs = SmallVec::new();
    if len > 0 && matches!(kind, OpKind::Read | OpKind::Write) {
        let mut all = Buf::zeroed(len as usize).all();
        all.bytes_mut().fill(fill);
        bufs.push(all);
    }
    IoOp {
        id: 0,
        target: Target::Flash(0),
        kind,
        offset,
        len,
        bufs,
        crcs: SmallVec::new(),
        sums: false,
        class: Class::Foreground,
    }
}

fn run(d: &mut SimDevice, op: IoOp) -> IoDone {
    let (token, _) = d.submit(op);
    d.complete(token, 0).expect("in flight").done
}

#[test]
fn a_flush_covers_only_writes_completed_before_it_was_submitted() {
    for seed in 0..50 {
        let mut d = device(seed, Tear::Block);
        run(&mut d, op(OpKind::Write, 0, 4096, 1));
        let (late, _) = d.submit(op(OpKind::Write, 4096, 4096, 2));
        let (flush, _) = d.submit(op(OpKind::Flush, 0, 0, 0));
        d.complete(late, 0);
        d.complete(flush, 0);
        assert_eq!(d.stored_block(0)[0], 1);
        assert_eq!(
            d.stored_block(1)[0],
            0,
            "completed after the flush was submitted"
        );
        assert_eq!(d.visible_block(1)[0], 2);
    }
}

#[test]
fn a_power_cut_keeps_any_subset_and_stored_contents() {
    let mut outcomes = BTreeSet::new();
    for seed in 0..200 {
        let mut d = device(seed, Tear::Block);
        run(&mut d, op(OpKind::Write, 0, 4096, 9));
        run(&mut d, op(OpKind::Flush, 0, 0, 0));
        run(&mut d, op(OpKind::Write, 4096, 8192, 1));
        d.submit(op(OpKind::Write, 4096, 8192, 2));
        d.power_cut();
        assert_eq!(d.visible_block(0), [9; BLOCK]);
        assert_eq!(d.busy(), 0);
        let (a, b) = (d.visible_block(1), d.visible_block(2));
        assert!(
            a.iter().all(|x| *x == a[0]) && b.iter().all(|x| *x == b[0]),
            "blocks are whole"
        );
        outcomes.insert((a[0], b[0]));
    }
    assert_eq!(outcomes.len(), 9, "every mixture happens: {outcomes:?}");
}

#[test]
fn flash_tears_anywhere_and_sectors_at_their_borders() {
    let (mut odd, mut sectors) = (0, 0);
    for seed in 0..400 {
        for tear in [Tear::Anywhere, Tear::Sector] {
            let mut d = device(seed, tear);
            run(&mut d, op(OpKind::Write, 0, 4096, 7));
            d.power_cut();
            let block = d.visible_block(0);
            let cuts: Vec<usize> = (1..BLOCK).filter(|i| block[*i] != block[*i - 1]).collect();
            match tear {
                Tear::Sector => {
                    assert!(cuts.iter().all(|c| c % 512 == 0), "{cuts:?}");
                    sectors += usize::from(!cuts.is_empty());
                }
                _ => odd += usize::from(cuts.iter().any(|c| c % 512 != 0)),
            }
        }
    }
    assert!(odd > 5 && sectors > 5, "{odd} {sectors}");
}

#[test]
fn a_dead_process_leaves_contents_volatile() {
    let mut lost = false;
    for seed in 0..50 {
        let mut d = device(seed, Tear::Block);
        run(&mut d, op(OpKind::Write, 0, 4096, 5));
        d.process_death();
        assert_eq!(d.visible_block(0)[0], 5);
        d.power_cut();
        lost |= d.visible_block(0)[0] == 0;
    }
    assert!(lost);
}

#[test]
fn broken_contracts_are_noticed() {
    for bad in [
        op(OpKind::Write, 512, 4096, 0),
        op(OpKind::Write, 0, 100, 0),
        op(OpKind::Write, 1 << 20, 4096, 0),
        IoOp {
            len: 8192,
            ..op(OpKind::Read, 0, 4096, 0)
        },
    ] {
        let mut d = device(1, Tear::Block);
        d.submit(bad);
        assert!(d.violation.is_some());
    }
    let mut d = device(1, Tear::Block);
    let write = op(OpKind::Write, 0, 4096, 1);
    let mut window = write.bufs[0].clone();
    let (token, _) = d.submit(write);
    window.bytes_mut()[0] = 2;
    d.complete(token, 0);
    assert!(d.violation.is_some_and(|v| v.contains("changed")));
}

#[test]
fn injected_errors_are_marked_and_a_dead_device_answers_nothing() {
    let mut d = device(3, Tear::Block);
    d.faults = Faults {
        fail_op: Some(1),
        ..Faults::default()
    };
    assert!(run(&mut d, op(OpKind::Write, 0, 4096, 1)).result.is_ok());
    assert!(run(&mut d, op(OpKind::Read, 0, 4096, 1)).result.is_err());
    assert!(run(&mut d, op(OpKind::Read, 0, 4096, 1)).result.is_ok());
    d.faults = Faults {
    #[allow(clippy::single_range_in_vec_init)] // one range is what is meant
        bad_ranges: vec![4096..8192],
        ..Faults::default()
    };
    assert!(run(&mut d, op(OpKind::Read, 0, 8192, 1)).result.is_err());
    assert!(run(&mut d, op(OpKind::Read, 8192, 4096, 1)).result.is_ok());
    d.kill();
    assert!(run(&mut d, op(OpKind::Write, 0, 4096, 1)).result.is_err());
    assert!(d.media(None).write_at(0, &[0; 4096]).is_err());
}
