//! The destager alone, without devices.

use super::*;
use crate::flash::replay::Copied;
use crate::{Engine, EngineOptions, KnownDisk};
use hearth_format::{Layout, Superblock, Uuid};

/// An engine whose disk 1 has these zeros, of which its origin knows nothing.
fn with_zeros(zeros: &[(u64, u64)]) -> Core {
    let layout = Layout::for_device(16 << 20, 256).expect("it fits");
    let uuid = Uuid::from_u128(1);
    let sb = Superblock::new(layout, uuid, uuid, "test", 0);
    let known = KnownDisk {
        id: 1,
        size: 64 << 20,
        since_seq: 0,
        home: crate::api::Home::Origin,
    };
    let mut core = Engine::blank(sb, None, EngineOptions::default(), &[known]);
    core.alter(1, |d| d.attached = true);
    core.change_zeros(1, |zero| {
        for (start, end) in zeros {
            zero.insert_range(*start, *end);
        }
    });
    core
}

/// Tells the origin of the next zeros.
fn tell(core: &mut Core, fx: &mut Effects) {
    let zeros = core.next_zeros(core.disk(1).unwrap(), 0);
    let (block, limit) = zeros.expect("some are left");
    core.destage_zero(1, block, limit, 0, fx);
    let (_, _, job) = core.disk(1).unwrap().origin.destage.busy[0];
    core.destage_write_done(job, Ok(()), 0, fx);
}

#[test]
fn zeros_told_anew_while_a_flush_is_under_way_wait_for_the_next_one() {
    let mut core = with_zeros(&[(4, 8)]);
    let mut fx = Effects::default();
    tell(&mut core, &mut fx);
    // The flush is sent, and covers them. Meanwhile they are written and zeroed again, with what lies before.
    let way = |core: &mut Core, covered| {
        core.disk_mut(1).unwrap().origin.destage.covered = covered;
    };
    way(&mut core, 1);
    core.disk_mut(1).unwrap().origin.destage.void_zeros(0, 8);
    core.change_zeros(1, |zero| zero.insert_range(0, 4));
    tell(&mut core, &mut fx);
    way(&mut core, 0);
    core.mark_clean(1, 1, 0, &mut fx);
    assert_eq!(core.disk(1).unwrap().zero.len(), 8, "not flushed since");
    core.mark_clean(1, 1, 0, &mut fx);
    assert!(core.disk(1).unwrap().zero.is_empty());
}

#[test]
fn zeros_that_were_written_and_zeroed_again_become_clean_though_others_always_wait_for_the_flush() {
    let mut core = with_zeros(&[(0, 4), (8, 12)]);
    let mut fx = Effects::default();
    tell(&mut core, &mut fx);
    // Written and zeroed again: the first was told of the zeros before.
    core.disk_mut(1).unwrap().origin.destage.void_zeros(0, 4);
    tell(&mut core, &mut fx);
    core.mark_clean(1, 1, 0, &mut fx);
    assert_eq!(core.disk(1).unwrap().zero.len(), 8);
    tell(&mut core, &mut fx);
    core.mark_clean(1, 1, 0, &mut fx);
    assert_eq!(core.disk(1).unwrap().zero.len(), 4);
    core.mark_clean(1, 1, 0, &mut fx);
    assert!(core.disk(1).unwrap().zero.is_empty());
}

/// An engine whose disk 1 has these dirty blocks on flash, of which it has lost some.
fn with_dirty(blocks: impl Iterator<Item = u64>, is_lost: impl Fn(u64) -> bool) -> Core {
    let mut core = with_zeros(&[]);
    for (slot, block) in (0..).zip(blocks) {
        let copy = Copied {
            disk: 1,
            block,
            slot,
            crc: 0,
            dirty: true,
        };
        core.apart().1.map(copy, 0, 0);
        if is_lost(block) {
            core.lose(1, block, slot);
        }
    }
    core
}

#[test]
fn dirty_block_behind_many_lost_ones_is_found() {
    let last = 2 * 200;
    let core = with_dirty((0..=last).step_by(2), |block| block != last);
    let next = core.next_run(core.disk(1).unwrap(), false, 0);
    assert_eq!(next, Next::Run(last, 1));
    assert!(core.could_destage(core.disk(1).unwrap(), 0));
}

/// A look under the engine's lock is bounded; the sweep continues where it ended.
#[test]
fn sweep_over_lost_blocks_ends_in_several_looks() {
    let last = 2 * u64::from(LOST_RUNS_MAX) + 10;
    let mut core = with_dirty((0..=last).step_by(2), |block| block != last);
    let mut fx = Effects::default();
    let turns = [0, 1].map(|_| core.destage_one(1, false, 0, &mut fx));
    assert_eq!(turns, [Turn::Moved, Turn::Started]);
    let busy = &core.disk(1).unwrap().origin.destage.busy;
    assert!(
        busy.iter()
            .any(|(start, end, _)| (*start, *end) == (last, last + 1))
    );
}

#[test]
fn disk_with_only_lost_blocks_has_nothing_to_destage() {
    let mut core = with_dirty(0..300, |_| true);
    assert_eq!(
        core.destage_one(1, false, 0, &mut Effects::default()),
        Turn::Blocked
    );
    assert!(!core.could_destage(core.disk(1).unwrap(), 0));
}
