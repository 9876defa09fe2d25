//! What stands beside a pool or a mirror.

use super::{device, hex, pool};
use hearth_format::mirror::{LegStamp, LegState, MirrorNotes, MirrorStamps};
use hearth_format::{PoolNotes, Uuid};

const MIRROR_STAMPS: &[&str] = &[
    "0900000000000000010300000000000011111111111111111111111111111111",
    "0900000000000000000000000000000001000000000000000807060504030201",
    "0c00000000000000222222222222222222222222222222220700000000000000",
    "0000000200000000020100000000000000000000000000000000000000000000",
    "3333333333333333333333333333333304000000000000000000000000000000",
    "0300000000000000ffffffffffffffff0700000000000000",
];

/// The first 64 bytes of a slot; then come the stamps, and from 4096 on the regions.
const MIRROR_NOTES: &[&str] = &[
    "484d4952581f1cde0100b80000200000a0a1a2a3a4a5a6a7a8a9aaabacadaeaf",
    "0700000000000000000000010000000046000000000000000000000000000000",
];

#[test]
fn a_mirrors_stamps_and_notes() {
    let leg = |n: u8, generation, state, whole, copied, left| LegStamp {
        id: Uuid::from_bytes([n; 16]),
        generation,
        state,
        whole,
        copied,
        left,
    };
    let stamps = MirrorStamps {
        generation: 9,
        open: true,
        unknown: false,
        legs: vec![
            leg(
                0x11,
                9,
                LegState::Current,
                false,
                0,
                (0x0102_0304_0506_0708, 12),
            ),
            leg(0x22, 7, LegState::Behind, true, 32 << 20, (0, 0)),
            leg(0x33, 4, LegState::Out, false, 0, (-1, 7)),
        ],
        marks: Vec::new(),
    };
    let stamped = hex(&MIRROR_STAMPS.concat());
    assert_eq!(stamps.encode().unwrap(), stamped);
    assert_eq!(MirrorStamps::decode(&stamped).unwrap(), stamps);
    let notes = MirrorNotes {
        serial: device(),
        sequence: 7,
        region: 16 << 20,
        regions: 70,
        stamps,
        touched: vec![1 | 1 << 63, 1 << 5],
    };
    let mut slot = hex(&MIRROR_NOTES.concat());
    slot.extend(&stamped);
    slot.resize(4096, 0);
    slot.extend([1, 0, 0, 0, 0, 0, 0, 0x80, 0x20]);
    slot.resize(8192, 0);
    assert_eq!(notes.encode().unwrap(), (32 << 10, slot.clone()));
    assert_eq!(MirrorNotes::newest(&slot, &device()), Some(notes));
}

/// The first 96 bytes of a slot; then come the path at 128, the label at 3200 and the sets from 4096 on.
const POOL_NOTES: &[&str] = &[
    "48504e423d8f6a3b0100010000700000101112131415161718191a1b1c1d1e1f",
    "a0a1a2a3a4a5a6a7a8a9aaabacadaeaf07000000000000000807060504030201",
    "000000000300000022110000000000000c000200000000000000000000000000",
];

#[test]
fn the_notes_beside_a_pool() {
    let notes = PoolNotes {
        sequence: 7,
        opened: 3 << 32,
        started: 0x1122,
        alone: true,
        flash: "/dev/nvme0n1".to_owned(),
        label: "ab".to_owned(),
        dirty: [1, 65535].into_iter().collect(),
        left: [64].into_iter().collect(),
        lost: [10].into_iter().collect(),
        ..PoolNotes::new(pool(), device(), 0x0102_0304_0506_0708)
    };
    let mut slot = hex(&POOL_NOTES.concat());
    slot.resize(28 << 10, 0);
    slot[128..140].copy_from_slice(b"/dev/nvme0n1");
    slot[3200..3202].copy_from_slice(b"ab");
    (slot[4096], slot[12287], slot[12296], slot[20481]) = (0x02, 0x80, 0x01, 0x04);
    assert_eq!(notes.encode(), (32 << 10, slot.clone()));
    assert_eq!(PoolNotes::newest(&slot).unwrap(), notes);
    // Where the registry lies once it has outgrown its first places, and how large those are then.
    let layout = hearth_format::beside::layout().unwrap();
    assert_eq!(layout.registry_room(), Some((91136, 4096)));
}
