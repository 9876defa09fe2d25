//! Several devices are written in turn, a batch each, so that who reads on has more than one at work.

use super::{Device, SEGMENT_BLOCKS, append};
use hearth_format::superblock::INCOMPAT_MAP;
use hearth_format::{BATCH_ENTRIES_MAX, DeviceEntry, Layout, Superblock, Uuid};
use hearth_io::Target;
use hearth_policy::cleaning::Heads;

/// Two devices with all their segments free.
fn two() -> Device {
    let (layout, extents) =
        Layout::for_devices(&[64 << 20, 64 << 20], SEGMENT_BLOCKS).expect("they fit");
    let uuid = |n: usize| Uuid::from_u128(1 + n as u128);
    let mut sb = Superblock::new(layout, uuid(9), uuid(0), "test", 0);
    let entries = extents.into_iter().enumerate();
    let entries = entries.map(|(n, extent)| DeviceEntry {
        device: uuid(n),
        extent,
    });
    sb.set_devices(layout, entries.collect());
    sb.incompat |= INCOMPAT_MAP;
    let mut d = Device::new(0, sb, true, Default::default());
    d.log.free = (0..d.log.segments.len() as u32).collect();
    d.log.next_segment_seq = 1;
    d.spread_free();
    d.set_heads(Heads::MovesApart);
    d
}

/// Writes so many batches on end; the devices they went to.
fn written(d: &mut Device, batches: u64) -> Vec<u16> {
    for n in 0..batches {
        append(d, n * 1000, BATCH_ENTRIES_MAX as u32, n as u32);
    }
    let mut went = Vec::new();
    loop {
        d.pump(0);
        let ops: Vec<_> = d.out.ios.drain(..).collect();
        if ops.is_empty() {
            return went;
        }
        for (op, io) in ops {
            let super::FlashOp::Batch { seq } = op else {
                continue;
            };
            if let (Target::Flash(device), _) = d.devices.place(io.target, io.offset) {
                went.push(device);
            }
            super::written(d, seq);
        }
    }
}

#[test]
fn what_is_written_on_end_lies_on_both_in_turn() {
    let mut d = two();
    let went = written(&mut d, 12);
    let full: Vec<u16> = went[..11].to_vec();
    assert!(
        full.windows(2).all(|pair| pair[0] != pair[1]),
        "not in turn: {went:?}"
    );
}

#[test]
fn where_little_is_free_one_segment_is_written_at_a_time() {
    let mut d = two();
    d.log.free.truncate(2 * d.log.free_wanted());
    written(&mut d, 2);
    assert_eq!(d.log.open_heads().count(), 1);
}
