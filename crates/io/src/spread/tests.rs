//! Where what lies, and what several devices are as one.

use super::*;
use crate::media::Sparse;

/// Three devices: bytes up to 100 blocks on the first, then 50 from block 4 on, then 20 from block 8 on.
fn three() -> Spread {
    Spread::over(100 * 4096, [(4 * 4096, 50 * 4096), (8 * 4096, 20 * 4096)])
}

#[test]
fn one_device_is_itself() {
    let one = Spread::one();
    assert_eq!(one.devices(), 1);
    assert_eq!(one.place(u64::MAX - 1), (0, u64::MAX - 1));
    assert_eq!(one.whole(0, 77), Some(77));
    assert_eq!(Spread::over(1 << 20, []), one);
}

#[test]
fn a_part_that_lies_on_no_device_leaves_the_others_where_they_were() {
    let spread = Spread::with_gaps(100, [(0, 4, 50), (30, 8, 20)]);
    assert_eq!(spread.len(), Some(200));
    assert_eq!(spread.place(149), (1, 53));
    assert_eq!(spread.place(150).0, 0, "it is on none");
    assert_eq!(spread.place(179).0, 0);
    assert_eq!(spread.place(180), (2, 8));
    assert_eq!(spread.whole(1, 54), None);
    assert_eq!(spread.whole(2, 8), Some(180));
    assert_eq!(spread.range(1), Some(100..150));
}

#[test]
fn every_offset_lies_on_one_device_and_is_found_back() {
    let spread = three();
    assert_eq!(spread.len(), Some(170 * 4096));
    assert_eq!(spread.place(0), (0, 0));
    assert_eq!(spread.place(100 * 4096 - 1), (0, 100 * 4096 - 1));
    assert_eq!(spread.place(100 * 4096), (1, 4 * 4096));
    assert_eq!(spread.place(150 * 4096 - 1), (1, 54 * 4096 - 1));
    assert_eq!(spread.place(150 * 4096), (2, 8 * 4096));
    for block in 0..170 {
        let (device, at) = spread.place(block * 4096);
        assert_eq!(spread.whole(device, at), Some(block * 4096));
    }
    // What lies before a device's segments, or behind its part, is none of the whole.
    assert_eq!(spread.whole(1, 4096), None);
    assert_eq!(spread.whole(1, 54 * 4096), None);
    assert_eq!(spread.whole(2, 28 * 4096), None);
    assert_eq!(spread.whole(3, 0), None);
}

#[test]
fn what_is_written_to_the_whole_is_read_from_it_and_lies_on_the_devices() {
    let device = |blocks: u64| Sparse::new(blocks * 4096);
    let mut joined = Joined::new(three(), vec![device(100), device(200), device(200)]);
    assert_eq!(joined.len(), 170 * 4096);
    // Across both seams.
    let data: Vec<u8> = (0..60 * 4096u32).map(|i| (i / 4096) as u8 + 1).collect();
    joined.write_at(95 * 4096, &data).unwrap();
    let mut back = vec![0; data.len()];
    joined.read_at(95 * 4096, &mut back).unwrap();
    assert_eq!(back, data);
    let (mut a, mut b) = (vec![0; 30 * 4096], vec![0; 30 * 4096]);
    joined
        .read_many(&mut [(95 * 4096, &mut a), (125 * 4096, &mut b)])
        .unwrap();
    assert_eq!([a, b].concat(), data);
    let mut block = [0; 4096];
    for (device, at, want) in [(0, 99, 5), (1, 4, 6), (1, 53, 55), (2, 8, 56)] {
        joined.devices[device]
            .read_at(at * 4096, &mut block)
            .unwrap();
        assert_eq!(block, [want; 4096], "block {at} of device {device}");
    }
}

/// Two devices of four segments of two blocks, behind two blocks that both have.
fn mirrored(lost: u64) -> Spread {
    let named = |data: &[u8], place: u16| {
        let mut named = data.to_vec();
        named[0] = place as u8;
        Some(named)
    };
    Spread::over(10 * 4096, [(2 * 4096, 8 * 4096)]).twice(Twice {
        front: 2 * 4096,
        segment: 2 * 4096,
        own: [0, u64::MAX],
        named,
        lost,
        once: false,
    })
}

#[test]
fn a_place_with_halves_of_its_own_has_two_addresses() {
    let mirrored = mirrored(0);
    let halves = mirrored.halves.as_ref().unwrap();
    let once = Twice {
        once: true,
        ..halves.how
    };
    let spread = Spread::over(10 * 4096, [(2 * 4096, 8 * 4096)]).twice(once);
    let (front, segment, apart) = (2 * 4096, 2 * 4096, 8 * 4096);
    for seg in 0..4u64 {
        let at = front + seg * segment + 4096;
        // Which half is the first takes turns.
        let (one, other) = ((seg % 2) as u16, 1 - (seg % 2) as u16);
        assert_eq!(spread.read_place(at).0, one);
        assert_eq!(spread.read_place(at + apart).0, other);
        assert_eq!(
            (spread.only_device(at), spread.only_device(at + apart)),
            (one, other)
        );
        let sides: Vec<_> = spread.sides(at).map(|(side, n, _)| (side, n)).collect();
        assert_eq!(sides, [(0, one), (1, other)]);
        for (_, n, there) in spread.sides(at) {
            assert_eq!(spread.whole(n, there), Some(at));
        }
        // A start that reads the other half of what both have.
        assert_eq!(spread.media_place(at).0, one);
    }
    assert!(spread.turn());
    let at = front + 4096;
    assert_eq!((spread.media_place(at).0, spread.read_place(at).0), (1, 0));
    assert!(spread.lose(0));
    assert_eq!(spread.read_place(at).0, 1);
    let sides: Vec<_> = spread.sides(at).map(|(side, n, _)| (side, n)).collect();
    assert_eq!(sides, [(1, 1)]);
    assert_eq!(
        spread.only_device(at),
        0,
        "that it is lost changes no place"
    );
}

#[test]
fn everything_is_on_two_devices_and_is_read_from_what_is_there() {
    let device = || Sparse::new(10 * 4096);
    let spread = mirrored(0);
    let mut joined = Joined::new(spread.clone(), vec![device(), device()]);
    let data: Vec<u8> = (0..10 * 4096u32).map(|i| (i / 4096) as u8 + 1).collect();
    joined.write_at(0, &data[..4096]).unwrap();
    joined.write_at(4096, &data[4096..]).unwrap();
    let mut block = [0; 4096];
    for n in 0..2usize {
        for at in 1..10u64 {
            joined.devices[n].read_at(at * 4096, &mut block).unwrap();
            assert_eq!(block, [at as u8 + 1; 4096], "block {at} of device {n}");
        }
        assert_eq!(spread.whole(n as u16, 4096), Some(4096));
        assert_eq!(spread.whole(n as u16, 5 * 4096), Some(5 * 4096));
    }
    // The block that says whose it is.
    for n in 0..2u8 {
        joined.devices[usize::from(n)]
            .read_at(0, &mut block)
            .unwrap();
        assert_eq!((block[0], block[1]), (n, 1));
    }
    // Segments are read by turns.
    assert_eq!(spread.read_place(2 * 4096), (0, 2 * 4096));
    assert_eq!(spread.read_place(4 * 4096), (1, 4 * 4096));
    assert!(spread.lose(0));
    assert_eq!(spread.read_place(2 * 4096), (1, 2 * 4096));
    assert!(!spread.lose(1), "nothing would be left");
    assert_eq!(spread.lost(), 1);
    joined.write_at(3 * 4096, &[77; 4096]).unwrap();
    joined.devices[0].read_at(3 * 4096, &mut block).unwrap();
    assert_eq!(block, [4; 4096], "a lost device is left alone");
    let mut back = vec![0; 9 * 4096];
    joined.read_at(4096, &mut back).unwrap();
    let mut want = data[4096..].to_vec();
    want[2 * 4096..3 * 4096].fill(77);
    assert_eq!(back, want);
}

#[test]
fn halves_can_be_told_apart_and_made_the_same() {
    let device = || Sparse::new(10 * 4096);
    let mut joined = Joined::new(mirrored(0), vec![device(), device()]);
    joined.write_at(4 * 4096, &[9; 8192]).unwrap();
    // This segment is read from the second.
    joined.devices[0].write_at(5 * 4096, &[3; 4096]).unwrap();
    let mut back = vec![0; 8192];
    assert!(joined.read_other(4 * 4096, &mut back).unwrap());
    assert_eq!((back[0], back[4096]), (9, 3));
    joined.write_other(5 * 4096, &[9; 4096]).unwrap();
    assert!(joined.read_other(4 * 4096, &mut back).unwrap());
    assert_eq!(back, vec![9; 8192]);
    let mut alone = Joined::new(mirrored(2), vec![device(), device()]);
    assert!(!alone.read_other(4 * 4096, &mut back).unwrap());
}

#[test]
fn whoever_waits_is_not_told_before_it_is_durable_that_a_device_is_lost() {
    let device = || Sparse::new(10 * 4096);
    let spread = mirrored(0);
    let mut joined = Joined::new(spread.clone(), vec![device(), device()]).waiting();
    joined.write_at(4096, &[1; 4096]).unwrap();
    assert!(spread.lose(0));
    // Nobody will ever say so: it is not waited for.
    spread.note_none();
    assert!(joined.write_at(4096, &[1; 4096]).is_err());
    assert!(joined.flush().is_err());
    spread.note_lost();
    joined.write_at(4096, &[1; 4096]).unwrap();
    joined.flush().unwrap();
}

#[test]
fn who_notes_losses_elsewhere_is_asked_as_long_as_somebody_does() {
    let spread = mirrored(0);
    assert!(!spread.ask_elsewhere(5));
    spread.note_elsewhere(true);
    assert!(spread.clone().ask_elsewhere(7));
    assert_eq!(spread.wait_asked(), Some(7));
    spread.note_elsewhere(false);
    assert_eq!(spread.wait_asked(), None);
    assert!(!Spread::one().ask_elsewhere(7));
}
