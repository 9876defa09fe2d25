//! The destager alone, without devices.

use super::*;
use crate::{Engine, EngineOptions, KnownDisk};
use hearth_format::{Layout, Superblock, Uuid};

#[test]
fn zeros_that_were_written_and_zeroed_again_become_clean_though_others_always_wait_for_the_flush() {
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
    let mut fx = Effects::default();
    core.alter(1, |d| d.attached = true);
    core.change_zeros(1, |zero| {
        zero.insert_range(0, 4);
        zero.insert_range(8, 12);
    });
    let tell = |core: &mut Core, fx: &mut Effects| {
        let zeros = core.next_zeros(core.disk(1).unwrap(), 0);
        let (block, limit) = zeros.expect("some are left");
        core.destage_zero(1, block, limit, 0, fx);
        let (_, _, job) = core.disk(1).unwrap().origin.destage.busy[0];
        core.destage_write_done(job, Ok(()), 0, fx);
    };
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
