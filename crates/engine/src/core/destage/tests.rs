//! The destager alone, without devices.

use super::*;
use crate::{Engine, EngineOptions, KnownDisk};
use hearth_format::{Layout, Superblock, Uuid};

/// An engine whose disk 1 has these zeros, of which its origin knows nothing.
fn with_zeros(zeros: &[(u64, u64)]) -> Core {
    let layout = Layout::for_device(16 << 20, 256).expect("it fits");
    let uuid = Uuid::from_u128(1);
    let sb = Superblock::new(layout, uuid, uuid, "test", 0);
    let known = KnownDisk {
        id: 1,
        size: 1 << 20,
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
