//! Which devices are a pool together.

use super::*;
use hearth_io::Sparse;

const SIZES: [u64; 3] = [64 << 20, 40 << 20, 96 << 20];

/// A pool of three devices as it is formatted: superblocks and media.
fn formatted() -> (Superblock, Members, Vec<Sparse>) {
    let (layout, extents) = Layout::for_devices(&SIZES, 256).unwrap();
    let device = |n: u128| Uuid::from_u128(0xD000 + n);
    let mut lead = Superblock::new(layout, Uuid::from_u128(7), device(0), "three", 9);
    let entries = extents.iter().zip(0..).map(|(extent, n)| DeviceEntry {
        device: device(n),
        extent: *extent,
    });
    lead.set_devices(layout, entries.collect());
    lead.stamp = 1;
    let mut media: Vec<Sparse> = SIZES.map(Sparse::new).into();
    let mut others: Vec<Superblock> = Vec::new();
    for place in 1..3 {
        let mut sb = lead.for_member(place, device(place.into()), 9);
        sb.store(&mut media[usize::from(place)]).unwrap();
        others.push(sb);
    }
    lead.store(&mut media[0]).unwrap();
    (lead, Members::new(others), media)
}

fn loaded(media: &mut [Sparse]) -> Vec<Superblock> {
    media
        .iter_mut()
        .map(|m| Superblock::load(m).unwrap())
        .collect()
}

/// The superblocks on `media` after one opening more.
fn opened(media: &mut [Sparse]) -> Vec<Superblock> {
    let mut found = loaded(media);
    assert_eq!(judge(&found), Ok(vec![0, 1, 2]));
    let mut lead = found.remove(0);
    Members::new(found).stamp(&mut lead, media).unwrap();
    loaded(media)
}

#[test]
fn devices_are_found_in_any_order() {
    let (_, _, mut media) = formatted();
    let found = opened(&mut media);
    assert!(found.iter().all(|sb| (sb.stamp, sb.next_stamp) == (2, 0)));
    for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
        let given = order.map(|i| found[i].clone());
        let judged = judge(&given).unwrap();
        assert_eq!(judged.map_by(|at| given[*at].device_index), [0, 1, 2]);
    }
    let spread = found[0].spread();
    assert_eq!(spread.devices(), 3);
    assert_eq!(spread.len(), Some(found[0].layout.device_blocks * BLOCK));
}

trait MapBy {
    fn map_by<T>(&self, f: impl Fn(&usize) -> T) -> Vec<T>;
}

impl MapBy for Vec<usize> {
    fn map_by<T>(&self, f: impl Fn(&usize) -> T) -> Vec<T> {
        self.iter().map(f).collect()
    }
}

#[test]
fn what_is_not_the_pool_is_told_apart() {
    let (_, _, mut media) = formatted();
    let before = loaded(&mut media);
    let now = opened(&mut media);
    let [a, b, c] = [&now[0], &now[1], &now[2]].map(Clone::clone);
    let old = |n: usize| before[n].clone();
    let judge = |given: &[&Superblock]| {
        let given: Vec<Superblock> = given.iter().map(|sb| (*sb).clone()).collect();
        super::judge(&given)
    };
    assert_eq!(
        judge(&[&a, &c]),
        Err(Misfit::Missing(1, a.devices[1])),
        "one is missing"
    );
    assert_eq!(judge(&[&c, &b]), Err(Misfit::Missing(0, a.devices[0])));
    assert_eq!(judge(&[&a]), Err(Misfit::Missing(1, a.devices[1])));
    // Copies of an earlier time, of any of them.
    assert_eq!(judge(&[&a, &old(1), &c]), Err(Misfit::Older(1, 0)));
    assert_eq!(judge(&[&b, &old(0), &c]), Err(Misfit::Older(1, 0)));
    assert_eq!(judge(&[&a, &b, &c, &old(2)]), Err(Misfit::Copies(2, 3)));
    let foreign = Superblock {
        pool: Uuid::from_u128(8),
        ..b.clone()
    };
    assert_eq!(judge(&[&a, &foreign, &c]), Err(Misfit::OtherPool(0, 1)));
    let replaced = Superblock {
        device: Uuid::from_u128(0xE000),
        ..b.clone()
    };
    assert_eq!(judge(&[&a, &replaced, &c]), Err(Misfit::NotOfIt(1, 0)));
    assert_eq!(judge(&[]), Ok(Vec::new()));
    // The first device as it was before the pool had any other.
    let single = Superblock {
        devices: Vec::new(),
        device_count: 1,
        stamp: 0,
        ..a.clone()
    };
    assert_eq!(judge(&[&single, &b]), Err(Misfit::Older(0, 1)));
    assert_eq!(judge(&[&single]), Ok(vec![0]));
}

/// Media that take so many writes and flushes, and no more.
struct Cut<'a>(&'a mut Sparse, &'a std::sync::atomic::AtomicI64);

impl Cut<'_> {
    fn spend(&self) -> std::io::Result<()> {
        match self.1.fetch_sub(1, std::sync::atomic::Ordering::Relaxed) > 0 {
            true => Ok(()),
            false => Err(std::io::Error::other("cut")),
        }
    }
}

impl Media for Cut<'_> {
    fn len(&self) -> u64 {
        self.0.len()
    }
    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> std::io::Result<()> {
        self.0.read_at(offset, data)
    }
    fn write_at(&mut self, offset: u64, data: &[u8]) -> std::io::Result<()> {
        self.spend()?;
        self.0.write_at(offset, data)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        self.spend()
    }
}

#[test]
fn an_opening_cut_off_anywhere_leaves_a_pool_and_old_copies_are_known_after_the_next() {
    for steps in 0.. {
        let (_, _, mut media) = formatted();
        opened(&mut media);
        let mut found = loaded(&mut media);
        let mut lead = found.remove(0);
        let budget = std::sync::atomic::AtomicI64::new(steps);
        let mut cut: Vec<_> = media.iter_mut().map(|m| Cut(m, &budget)).collect();
        let done = Members::new(found).stamp(&mut lead, &mut cut).is_ok();
        // Whatever was reached, it is one pool, and what is copied now is old once it was opened again.
        let copies = loaded(&mut media);
        let now = opened(&mut media);
        for n in 0..3 {
            let mut given = now.clone();
            given[n] = copies[n].clone();
            let at = judge(&given);
            assert!(
                matches!(at, Err(Misfit::Older(old, _)) if old == n),
                "cut after {steps}, device {n}: {at:?}"
            );
        }
        if done {
            assert!(steps > 10, "{steps}");
            return;
        }
    }
}

#[test]
fn lists_that_cannot_be_are_refused() {
    let (lead, ..) = formatted();
    assert_eq!(Superblock::decode(&lead.encode()[..]).unwrap(), lead);
    let refused = |change: &dyn Fn(&mut Superblock)| {
        let mut sb = lead.clone();
        change(&mut sb);
        Superblock::decode(&sb.encode()[..])
            .unwrap_err()
            .to_string()
    };
    type Case = (&'static dyn Fn(&mut Superblock), &'static str);
    let cases: [Case; 15] = [
        (
            &|sb: &mut Superblock| sb.devices[1].extent.segments += 1,
            "past its end",
        ),
        (
            &|sb: &mut Superblock| sb.devices[1].extent.segments -= 1,
            "another number",
        ),
        (
            &|sb| sb.devices[1].extent.segment_start = 256,
            "wrong place",
        ),
        (
            &|sb: &mut Superblock| sb.devices[1].extent.segment_start -= 1,
            "wrong place",
        ),
        (
            &|sb| sb.devices[0].extent.segment_start -= 256,
            "wrong place",
        ),
        (
            &|sb: &mut Superblock| sb.devices[1].extent.blocks = u64::MAX,
            "past its end",
        ),
        (
            &|sb: &mut Superblock| sb.devices[1].device = sb.device,
            "twice",
        ),
        (
            &|sb: &mut Superblock| sb.device = Uuid::nil(),
            "in its place",
        ),
        (&|sb: &mut Superblock| sb.device_index = 1, "in its place"),
        (&|sb: &mut Superblock| sb.device_index = 3, "do not fit"),
        (&|sb: &mut Superblock| sb.device_count = 65, "do not fit"),
        (&|sb: &mut Superblock| sb.incompat = 0, "do not fit"),
        (
            &|sb| (sb.device_count, sb.device_index) = (1, 0),
            "do not fit",
        ),
        (
            &|sb: &mut Superblock| sb.layout.added.segments = u32::MAX,
            "came later",
        ),
        (
            &|sb: &mut Superblock| sb.layout.added.map_shift = u32::MAX,
            "no room",
        ),
    ];
    for (change, why) in cases {
        let told = refused(change);
        assert!(told.contains(why), "{why}: {told}");
    }
}

/// A pool of three devices that keeps everything twice, as it is formatted.
fn mirrored() -> (Superblock, Vec<Sparse>) {
    let (layout, extents) = Layout::for_twice(&SIZES, 256, false).unwrap();
    let device = |n: u128| Uuid::from_u128(0xD000 + n);
    let mut lead = Superblock::new(layout, Uuid::from_u128(7), device(0), "twice", 9);
    let entries = extents.iter().zip(0..).map(|(extent, n)| DeviceEntry {
        device: device(n),
        extent: *extent,
    });
    lead.set_twice(layout, entries.collect());
    lead.stamp = 1;
    let mut media: Vec<Sparse> = SIZES.map(Sparse::new).into();
    let mut third = lead.for_member(2, device(2), 9);
    third.store(&mut media[2]).unwrap();
    let each = media.iter_mut().collect();
    lead.store(&mut Joined::new(lead.spread(), each)).unwrap();
    (lead, media)
}

/// Opens what is there of it; the superblocks of all devices after that.
fn reopened(media: &mut [Sparse], there: &[usize]) -> Result<Vec<Superblock>, Misfit> {
    let all = loaded(media);
    let found: Vec<Superblock> = there.iter().map(|n| all[*n].clone()).collect();
    let together = judge_twice(&found)?;
    let (mut members, mut lead) = (together.members(&found), together.lead);
    let mut joined = Joined::new(lead.spread(), media.iter_mut().collect());
    members.stamp_twice(&mut lead, &mut joined).unwrap();
    Ok(loaded(media))
}

#[test]
fn a_pool_that_keeps_everything_twice_is_there_without_any_one_device() {
    for gone in 0..3 {
        let (_, mut media) = mirrored();
        let before = reopened(&mut media, &[2, 0, 1]).unwrap();
        assert!(
            before
                .iter()
                .all(|sb| (sb.stamp, sb.next_stamp, sb.lost) == (2, 0, 0))
        );
        assert_eq!(before[0].generation, before[1].generation);
        let rest: Vec<usize> = (0..3).filter(|n| *n != gone).collect();
        let after = reopened(&mut media, &rest).unwrap();
        assert_eq!(after[gone], before[gone], "a lost device is left alone");
        for n in rest.iter().filter(|n| **n < 2) {
            assert_eq!((after[*n].lost, after[*n].stamp), (1 << gone, 3));
        }
        // It is back, and too old.
        let judged = judge_twice(&after).unwrap();
        assert_eq!((judged.older, judged.lead.lost), (vec![gone], 1 << gone));
        // Without another one there are segments of which no half is left.
        assert!(matches!(
            reopened(&mut media, &rest[..1]),
            Err(Misfit::Missing(..))
        ));
    }
}

#[test]
fn rot_before_the_segments_of_one_device_is_not_given_to_the_other() {
    for (victim, other) in [(0, 1), (1, 0)] {
        let (lead, mut media) = mirrored();
        let (layout, pool) = (&lead.layout, lead.pool);
        let mut joined = Joined::new(lead.spread(), media.iter_mut().collect());
        let mut registry = crate::registry::Registry {
            next_disk_id: 7,
            ..Default::default()
        };
        let mut places = Places::new(layout).unwrap();
        let old = crate::registry::Registry::default();
        (places.store(&mut joined, layout, pool, &old, &mut registry)).unwrap();
        let map = SegmentMap {
            header: crate::map::MapHeader {
                pool_tag: 5,
                generation: 3,
                through: 1,
                segments: layout.segment_count,
                table_crc: 0,
            },
            entries: vec![crate::map::MapEntry::default(); layout.segment_count as usize],
            copy: 1,
        };
        map.store(&mut joined, layout).unwrap();
        let bad = [0xEE; 4096];
        for copy in [0, 1] {
            media[victim]
                .write_at(REGISTRY_BLOCKS[copy] * BLOCK, &bad)
                .unwrap();
            media[victim]
                .write_at(layout.map_offset(copy as u8) + BLOCK, &bad)
                .unwrap();
        }
        assert!(Places::load(&mut media[victim], layout, pool).is_err());
        // Who only looks is told all the same.
        let mut joined = Joined::new(lead.spread(), media.iter_mut().collect());
        let (read, places) = Places::load(&mut joined, layout, pool).unwrap();
        assert_eq!((read, places.is_sound()), (registry.clone(), victim == 1));
        reopened(&mut media, &[0, 1, 2]).unwrap();
        for n in [victim, other] {
            let (read, _) = Places::load(&mut media[n], layout, pool).unwrap();
            assert_eq!(read, registry, "device {n}");
            assert!(SegmentMap::load(&mut media[n], layout, 5).is_some());
        }
    }
}

#[test]
fn two_devices_that_were_each_served_alone_are_not_put_together() {
    let (_, mut media) = mirrored();
    let mut other = Vec::new();
    for m in &mut media {
        let mut copy = Sparse::new(m.len());
        for at in (0..8 << 20).step_by(4096) {
            let mut block = [0; 4096];
            m.read_at(at, &mut block).unwrap();
            copy.write_at(at, &block).unwrap();
        }
        other.push(copy);
    }
    let first = reopened(&mut media, &[0, 2]).unwrap();
    let second = reopened(&mut other, &[1, 2]).unwrap();
    let found = [first[0].clone(), second[1].clone()];
    assert!(matches!(judge_twice(&found), Err(Misfit::Apart(..))));
}

#[test]
fn a_crash_anywhere_in_an_opening_leaves_a_pool() {
    for writes in 0..40 {
        let (_, mut media) = mirrored();
        cut_off(&mut media, writes);
        let judged = judge_twice(&loaded(&mut media)).unwrap();
        assert_eq!(
            (judged.lead.lost, judged.older.len()),
            (0, 0),
            "after {writes}"
        );
        // The next one is cut off as well.
        for more in 0..40 {
            let (_, mut media) = mirrored();
            cut_off(&mut media, writes);
            cut_off(&mut media, more);
            let judged = judge_twice(&loaded(&mut media)).unwrap();
            assert_eq!(
                (judged.lead.lost, judged.older.len()),
                (0, 0),
                "after {writes} and {more}"
            );
        }
    }
}

/// An opening that is cut off after so many writes and flushes.
fn cut_off(media: &mut [Sparse], steps: i64) {
    let found = loaded(media);
    let together = judge_twice(&found).unwrap();
    let (mut members, mut lead) = (together.members(&found), together.lead);
    let budget = std::sync::atomic::AtomicI64::new(steps);
    let cut = media.iter_mut().map(|m| Cut(m, &budget));
    let mut joined = Joined::new(lead.spread(), cut.collect());
    drop(members.stamp_twice(&mut lead, &mut joined));
}
