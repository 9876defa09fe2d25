//! What an ordered disk notes.

use super::pool;
use hearth_format::order::ORDER_NOTE_BYTES;
use hearth_format::{Mark, OrderNote};

#[test]
fn marks_of_ordered_disks_stand_in_block_and_word() {
    let golden = [
        (7, true, 7, 2),
        (7, false, 7, 1),
        (5 << 36 | 9, true, 9, 12),
    ];
    for (batch, in_order, block, word) in golden {
        let mark = Mark { batch, in_order };
        assert_eq!(mark.to_fields(), (block, word));
        assert_eq!(Mark::from_fields(block, word), mark);
    }
}

#[test]
fn notes_of_ordered_disks() {
    let note = OrderNote {
        serial: pool(),
        sequence: 3,
        upto_ms: 1_700_000_000_123,
    };
    let (at, bytes) = note.encode();
    assert_eq!(at, 512, "odd ones go to the second slot");
    assert_eq!(&bytes[..4], b"HORD");
    assert_eq!(bytes[8..16], [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(&bytes[16..32], pool().as_bytes());
    assert_eq!(bytes[32..40], [3, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(bytes[40..48], 1_700_000_000_123u64.to_le_bytes());
    assert!(bytes[48..].iter().all(|b| *b == 0));
    let mut place = [0; ORDER_NOTE_BYTES];
    assert_eq!(OrderNote::newest(&place).unwrap(), None);
    place[512..].copy_from_slice(&bytes);
    let older = OrderNote {
        sequence: 2,
        ..note
    };
    place[..512].copy_from_slice(&older.encode().1);
    assert_eq!(OrderNote::newest(&place).unwrap(), Some(note));
    // One that was torn leaves the one before.
    place[700] ^= 1;
    assert_eq!(OrderNote::newest(&place).unwrap(), Some(older));
    place[8] = 2;
    let crc = hearth_io::checksum::crc32c(&{
        let mut zeroed = place[..512].to_vec();
        zeroed[4..8].fill(0);
        zeroed
    });
    place[4..8].copy_from_slice(&crc.to_le_bytes());
    assert!(OrderNote::newest(&place).is_err(), "a later version");
}
