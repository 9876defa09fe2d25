//! Each change is cut off at every write and flush there is.

use super::*;
use crate::map::MapHeader;
use hearth_io::{Joined, Sparse};
use std::io;
use std::sync::atomic::{AtomicI64, Ordering};

const SEGMENT: u32 = 256;
const STEPS_MAX: i64 = 100_000;

/// Bytes of a device with so many segments, but the first.
fn bytes(segments: u64) -> u64 {
    (1024 + segments * u64::from(SEGMENT)) * BLOCK
}

/// A device that takes so many writes and flushes, together with others, and no more.
struct Cut<'a>(&'a mut Sparse, &'a AtomicI64);

impl Cut<'_> {
    fn spend(&self) -> io::Result<()> {
        match self.1.fetch_sub(1, Ordering::Relaxed) > 0 {
            true => Ok(()),
            false => Err(io::Error::other("cut off")),
        }
    }
}

impl Media for Cut<'_> {
    fn len(&self) -> u64 {
        self.0.len()
    }
    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.0.read_at(offset, data)
    }
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.spend()?;
        self.0.write_at(offset, data)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.spend()
    }
}

fn number(n: u128) -> Uuid {
    Uuid::from_u128(0xD000 + n)
}

/// All of what is on devices, to begin there again and again.
struct Rig {
    media: Vec<Sparse>,
    /// What segments begin with.
    said: Vec<(u32, u64)>,
}

impl Rig {
    /// A pool of the first `members` of devices of these sizes, with something in every third segment.
    fn new(sizes: &[u64], members: usize) -> Rig {
        Rig::without(sizes, members, None)
    }

    /// The same with nothing on one of them.
    fn without(sizes: &[u64], members: usize, empty: Option<usize>) -> Rig {
        let (layout, extents) = Layout::for_devices(&sizes[..members], SEGMENT).unwrap();
        let mut media: Vec<Sparse> = sizes.iter().map(|size| Sparse::new(*size)).collect();
        let mut lead = Superblock::new(layout, Uuid::from_u128(7), number(0), "pool", 9);
        lead.incompat |= INCOMPAT_MAP;
        if members > 1 {
            let entries = extents.iter().zip(0..).map(|(extent, n)| DeviceEntry {
                device: number(n),
                extent: *extent,
            });
            lead.set_devices(layout, entries.collect());
            lead.stamp = 3;
        } else {
            lead.layout.device_blocks = sizes[0] / BLOCK;
        }
        lead.state = PoolState::Clean {
            checkpoint_id: 1,
            checkpoint_bytes: 3 * BLOCK,
        };
        for (place, media) in media.iter_mut().enumerate().take(members).skip(1) {
            let mut sb = lead.for_member(place as u16, number(place as u128), 9);
            sb.store(media).unwrap();
        }
        lead.store(&mut media[0]).unwrap();
        let mut rig = Rig {
            media,
            said: Vec::new(),
        };
        let all: Vec<usize> = (0..members).collect();
        let nothing = empty.map(|place| lead.segments()[place].clone());
        let seqs = |seg: u32| match seg % 3 {
            0 if nothing.as_ref().is_none_or(|n| !n.contains(&seg)) => u64::from(seg) + 100,
            _ => 0,
        };
        for seg in 0..layout.segment_count {
            rig.say(&lead, &all, seg, seqs(seg));
        }
        rig.map(&lead, &seqs);
        rig
    }

    /// A segment begins with a batch of this number, and its last block is filled with it.
    fn say(&mut self, lead: &Superblock, list: &[usize], seg: u32, seq: u64) {
        if seq == 0 {
            return;
        }
        self.said.push((seg, seq));
        let header = BatchHeader {
            pool_tag: lead.pool_tag(),
            segment_seq: seq,
            batch_seq: seq,
            ..BatchHeader::default()
        };
        let mut block = vec![0; BLOCK_BYTES];
        header.encode(&[], &mut block).unwrap();
        let at = lead.layout.segment_offset(seg);
        self.with(lead, list, |pool| {
            pool.write_at(at, &block).unwrap();
            let last = at + u64::from(SEGMENT - 1) * BLOCK;
            pool.write_at(last, &vec![seq as u8; BLOCK_BYTES]).unwrap();
        });
    }

    fn with<T>(
        &mut self,
        lead: &Superblock,
        list: &[usize],
        work: impl FnOnce(&mut dyn Media) -> T,
    ) -> T {
        let mut taken: Vec<Sparse> = list
            .iter()
            .map(|i| std::mem::take(&mut self.media[*i]))
            .collect();
        let mut joined = Joined::new(lead.spread(), taken.iter_mut().map(Lent).collect());
        let out = work(&mut joined);
        drop(joined);
        for (i, media) in list.iter().zip(taken.drain(..)) {
            self.media[*i] = media;
        }
        out
    }

    fn map(&mut self, lead: &Superblock, seqs: &dyn Fn(u32) -> u64) {
        let entries = (0..lead.layout.segment_count).map(|seg| MapEntry {
            seq: seqs(seg),
            last_batch: seqs(seg),
            clean: false,
        });
        let map = SegmentMap {
            header: MapHeader {
                pool_tag: lead.pool_tag(),
                generation: 4,
                through: 1 << 20,
                segments: lead.layout.segment_count,
                table_crc: 0,
            },
            entries: entries.collect(),
            copy: 0,
        };
        map.store(&mut self.media[0], &lead.layout).unwrap();
    }

    /// The superblock by which these devices are the pool, if they are; then with all that it had in its segments.
    fn opens(&mut self, list: &[usize]) -> Option<Superblock> {
        let found: Option<Vec<Superblock>> = list
            .iter()
            .map(|i| Superblock::load(&mut self.media[*i]).ok())
            .collect();
        let found = found?;
        let order = judge(&found).ok()?;
        assert!(
            order.iter().enumerate().all(|(at, i)| at == *i),
            "{order:?}"
        );
        let lead = found[0].clone();
        let map = SegmentMap::load(&mut self.media[list[0]], &lead.layout, lead.pool_tag());
        let map = map.expect("the map of a pool that opens can be read");
        let named = (0..).zip(&map.entries).filter(|(_, e)| e.seq != 0);
        let named: Vec<(u32, u64)> = named.map(|(seg, e)| (seg, e.seq)).collect();
        assert_eq!(named, self.said, "the map tells of the same segments");
        let gaps = lead.gaps();
        for (seg, seq) in self.said.clone() {
            assert!(!gaps.contains(&seg));
            let at = lead.layout.segment_offset(seg);
            self.with(&lead, list, |pool| {
                let mut block = vec![0; BLOCK_BYTES];
                pool.read_at(at, &mut block).unwrap();
                let head = BatchHeader::decode(&block, &mut Vec::new()).unwrap();
                assert_eq!(head.segment_seq, seq);
                let last = at + u64::from(SEGMENT - 1) * BLOCK;
                pool.read_at(last, &mut block).unwrap();
                assert_eq!(block, vec![seq as u8; BLOCK_BYTES], "segment {seg}");
            });
        }
        Some(lead)
    }

    /// As an opening by who serves it.
    fn stamp(&mut self, list: &[usize]) {
        let mut found: Vec<Superblock> = list
            .iter()
            .map(|i| Superblock::load(&mut self.media[*i]).unwrap())
            .collect();
        let mut lead = found.remove(0);
        let mut taken: Vec<Sparse> = list
            .iter()
            .map(|i| std::mem::take(&mut self.media[*i]))
            .collect();
        if found.is_empty() {
            lead.store(&mut taken[0]).unwrap();
        } else {
            Members::new(found).stamp(&mut lead, &mut taken).unwrap();
        }
        for (i, media) in list.iter().zip(taken) {
            self.media[*i] = media;
        }
    }

    /// Does `change` with the devices of `list`, which after so many steps take nothing any more.
    fn cut<T>(&mut self, list: &[usize], steps: i64, change: impl FnOnce(Vec<Cut<'_>>) -> T) -> T {
        let budget = AtomicI64::new(steps);
        let mut taken: Vec<Sparse> = list
            .iter()
            .map(|i| std::mem::take(&mut self.media[*i]))
            .collect();
        let out = change(taken.iter_mut().map(|m| Cut(m, &budget)).collect());
        for (i, media) in list.iter().zip(taken) {
            self.media[*i] = media;
        }
        out
    }
}

struct Lent<'a>(&'a mut Sparse);

impl Media for Lent<'_> {
    fn len(&self) -> u64 {
        self.0.len()
    }
    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.0.read_at(offset, data)
    }
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_at(offset, data)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

fn newcomer(n: u128) -> Newcomer {
    Newcomer {
        device: number(n),
        now_unix_s: 50,
    }
}

/// Cuts a change off after every step, and looks which of two lists is the pool then: one of them always is, the other never,
/// also after the pool was served again.
fn cut_everywhere(
    make: impl Fn() -> Rig,
    before: &[usize],
    after: &[usize],
    change: impl Fn(&mut Rig, i64) -> bool,
) -> Superblock {
    let mut switched = false;
    for steps in 0..STEPS_MAX {
        let mut rig = make();
        let done = change(&mut rig, steps);
        let mut lists = [rig.opens(before).is_some(), rig.opens(after).is_some()];
        if lists == [false, false] {
            // Only where the first device is replaced, and doing it again finishes it.
            let (old, new) = (before[0], after[0]);
            assert_ne!(old, new, "after {steps} steps there is no pool");
            let finished = rig.cut(&[old, new], STEPS_MAX, |mut media| {
                let mut new = media.pop().unwrap();
                finish_replacement(&mut media[0], &mut new).unwrap()
            });
            assert!(finished, "after {steps} steps");
            lists = [rig.opens(before).is_some(), rig.opens(after).is_some()];
        }
        let is_new = lists == [false, true];
        assert!(is_new || lists == [true, false], "{steps}: {lists:?}");
        assert!(
            is_new || !switched,
            "after {steps} steps it is the old one again"
        );
        switched = is_new;
        let (pool, other) = match is_new {
            true => (after, before),
            false => (before, after),
        };
        rig.stamp(pool);
        assert!(rig.opens(pool).is_some(), "after {steps} steps");
        assert!(rig.opens(other).is_none(), "after {steps} steps");
        if !is_new {
            // Doing it again.
            assert!(change(&mut rig, STEPS_MAX), "again after {steps} steps");
            assert!(rig.opens(after).is_some() && rig.opens(before).is_none());
        }
        if done {
            assert!(steps > 5 && is_new, "{steps}");
            return rig.opens(after).unwrap();
        }
    }
    panic!("it never ends");
}

#[test]
fn a_device_is_added_to_one_and_to_several() {
    for members in [1, 2] {
        let sizes = [bytes(30), bytes(12), bytes(20)];
        let sizes = &sizes[..=members];
        let before: Vec<usize> = (0..members).collect();
        let after: Vec<usize> = (0..=members).collect();
        let was = Rig::new(sizes, members).opens(&before).unwrap();
        let sb = cut_everywhere(
            || Rig::new(sizes, members),
            &before,
            &after,
            |rig, steps| {
                rig.cut(&after, steps, |mut media| {
                    add(&mut media, newcomer(9)).is_ok()
                })
            },
        );
        assert_eq!(sb.devices.len(), members + 1);
        let more = sb.devices.last().unwrap().extent.segments;
        assert_eq!(sb.layout.segment_count, was.layout.segment_count + more);
        // What a clean stop left is good still.
        assert_eq!(sb.state, was.state);
        assert_eq!(sb.incompat & INCOMPAT_CHANGED, 0);
    }
}

#[test]
fn a_device_takes_the_place_of_another_one() {
    let sizes = [bytes(30), bytes(12), bytes(40)];
    for (old, members) in [(0, 1), (0, 2), (1, 2)] {
        let before: Vec<usize> = (0..members).collect();
        let mut after = before.clone();
        after[old] = 2;
        let was = Rig::new(&sizes, members).opens(&before).unwrap();
        let sb = cut_everywhere(
            || Rig::new(&sizes, members),
            &before,
            &after,
            |rig, steps| {
                let mut all = before.clone();
                all.push(2);
                rig.cut(&all, steps, |mut media| {
                    let mut new = media.pop().unwrap();
                    let none = |_| false;
                    let progress = &mut |_, _| true;
                    replace(&mut media, old, &mut new, newcomer(9), &none, progress).is_ok()
                })
            },
        );
        assert_eq!(sb.all_devices()[old].device, number(9));
        assert_eq!(sb.state, was.state);
        assert_eq!(sb.segments(), was.segments());
        assert_eq!(
            sb.incompat, was.incompat,
            "nothing of it needs a newer version"
        );
    }
}

#[test]
fn a_device_on_which_nothing_lies_is_taken_out() {
    for (gone, members) in [(1, 2), (1, 3), (2, 3)] {
        let sizes = [bytes(30), bytes(12), bytes(20)];
        let sizes = &sizes[..members];
        let before: Vec<usize> = (0..members).collect();
        let mut after = before.clone();
        after.remove(gone);
        let make = || Rig::without(sizes, members, Some(gone));
        let was = make().opens(&before).unwrap();
        let sb = cut_everywhere(make, &before, &after, |rig, steps| {
            rig.cut(&before, steps, |media| remove(media, gone).is_ok())
        });
        assert_eq!(sb.all_devices().len(), members - 1);
        let numbers = was.segments();
        let mut kept = numbers.clone();
        kept.remove(gone);
        assert_eq!(sb.segments(), kept, "all others keep their numbers");
        let last = kept.last().unwrap().end;
        assert_eq!(
            sb.layout.segment_count, last,
            "what lies behind all is cut off"
        );
        assert_eq!(sb.gaps().len(), if gone < members - 1 { 12 } else { 0 });
        assert_ne!(sb.incompat & INCOMPAT_CHANGED, 0);
        assert_eq!(sb.layout.registry_room(), was.layout.registry_room());
    }
}

#[test]
fn what_was_taken_out_comes_again_as_a_new_one() {
    let sizes = [bytes(30), bytes(12)];
    let mut rig = Rig::without(&sizes, 2, Some(1));
    for round in 0..30 {
        let removed = rig.cut(&[0, 1], STEPS_MAX, |media| remove(media, 1).is_ok());
        assert!(removed, "round {round}");
        assert!(rig.opens(&[0]).is_some() && rig.opens(&[0, 1]).is_none());
        rig.stamp(&[0]);
        let added = rig.cut(&[0, 1], STEPS_MAX, |mut media| {
            let lead = Superblock::load(&mut media[0]).unwrap();
            clear(&lead, &mut media[1], &mut |_, _| true).unwrap();
            add(&mut media, newcomer(20 + round)).is_ok()
        });
        assert!(added, "round {round}");
        assert!(rig.opens(&[0, 1]).is_some());
        rig.stamp(&[0, 1]);
    }
}

#[test]
fn a_device_that_holds_what_counts_is_not_taken_out_and_nor_is_the_first() {
    let sizes = [bytes(30), bytes(12), bytes(20)];
    let mut rig = Rig::new(&sizes, 3);
    let refused = |rig: &mut Rig, place| {
        let out = rig.cut(&[0, 1, 2], STEPS_MAX, |media| {
            remove(media, place).map(drop)
        });
        assert!(rig.opens(&[0, 1, 2]).is_some());
        out.unwrap_err().1.to_string()
    };
    assert!(refused(&mut rig, 1).contains("still holds"));
    assert!(refused(&mut rig, 0).contains("tables"));
    // The map does not tell of it yet.
    let mut rig = Rig::without(&sizes, 3, Some(1));
    let lead = rig.opens(&[0, 1, 2]).unwrap();
    let seg = lead.segments()[1].start + 2;
    rig.say(&lead, &[0, 1, 2], seg, (1 << 20) + 1);
    rig.said.pop();
    assert!(refused(&mut rig, 1).contains("still holds"));
}

#[test]
fn a_device_that_does_not_fit_is_refused_with_what_it_needs() {
    let sizes = [bytes(30), bytes(12)];
    let lead = Rig::new(&sizes, 2).opens(&[0, 1]).unwrap();
    let small = with_more(&lead, bytes(7), number(9)).unwrap_err();
    assert!(matches!(small, FormatError::TooSmall { needed, .. } if needed == bytes(8)));
    assert!(with_more(&lead, bytes(8), number(9)).is_ok());
    assert!(can_replace(&lead, 1, bytes(12)).is_ok());
    assert!(can_replace(&lead, 1, bytes(11)).is_err());
    assert!(can_replace(&lead, 2, bytes(99)).is_err());
    let first = (lead.layout.segment_start + u64::from(lead.segments()[0].end * SEGMENT)) * BLOCK;
    assert!(can_replace(&lead, 0, first).is_ok());
    assert!(can_replace(&lead, 0, first - BLOCK).is_err());
}

/// One that is lost is not asked for anything: the list is the old one or the new one wherever that is cut off, and once it is the new
/// one, what was written so far is below the floor.
#[test]
fn a_lost_device_is_left_out_wherever_that_is_cut_off() {
    for (gone, members) in [(1, 2), (1, 3), (2, 3)] {
        let sizes = [bytes(30), bytes(12), bytes(20)];
        let all: Vec<usize> = (0..members).collect();
        let mut rest = all.clone();
        rest.remove(gone);
        let lose = |rig: &mut Rig, steps| {
            rig.cut(&rest, steps, |mut media| {
                go_on_without(&mut media, gone, 500).is_ok()
            })
        };
        let judged = |rig: &mut Rig, list: &[usize]| {
            let found = list.iter().map(|i| Superblock::load(&mut rig.media[*i]));
            let found: Vec<Superblock> = found.map(Result::unwrap).collect();
            judge(&found).map(|_| found[0].clone())
        };
        let mut steps = 0;
        loop {
            let mut rig = Rig::new(&sizes[..members], members);
            let done = lose(&mut rig, steps);
            let lead = match (judged(&mut rig, &all), judged(&mut rig, &rest)) {
                (Ok(_), Err(_)) => {
                    assert!(!done, "{steps}");
                    assert!(lose(&mut rig, STEPS_MAX), "again after {steps} steps");
                    judged(&mut rig, &rest).unwrap()
                }
                (Err(_), Ok(lead)) => lead,
                both => panic!("after {steps} steps: {both:?}"),
            };
            assert_eq!(lead.floor_of_log(), 500);
            assert_eq!(lead.all_devices().len(), members - 1);
            assert!(matches!(lead.state, PoolState::Clean { .. }));
            // It is back, and no part of the pool.
            let found = judged(&mut rig, &all).unwrap_err();
            assert!(matches!(found, crate::devices::Misfit::NotOfIt(at, 0) if at == gone));
            let map = SegmentMap::load(&mut rig.media[0], &lead.layout, lead.pool_tag());
            assert!(map.is_some(), "after {steps} steps");
            if done {
                break;
            }
            steps += 1;
        }
        assert!(steps > 3, "{steps}");
    }
}

#[test]
fn a_pool_that_was_not_closed_in_order_or_has_other_devices_does_not_go_on_without_one() {
    let sizes = [bytes(30), bytes(12), bytes(20)];
    let mut rig = Rig::new(&sizes, 3);
    let refused = |rig: &mut Rig, list: &[usize], gone| {
        rig.cut(list, STEPS_MAX, |mut media| {
            go_on_without(&mut media, gone, 500).is_err()
        })
    };
    assert!(refused(&mut rig, &[0], 1), "two are missing");
    assert!(refused(&mut rig, &[1, 2], 0), "the first is");
    assert!(refused(&mut rig, &[0, 1], 1), "it is another one");
    let mut sb = Superblock::load(&mut rig.media[2]).unwrap();
    sb.stamp -= 1;
    sb.store(&mut rig.media[2]).unwrap();
    assert!(refused(&mut rig, &[0, 2], 1), "one is older");
    let mut rig = Rig::new(&sizes, 3);
    let mut sb = Superblock::load(&mut rig.media[0]).unwrap();
    sb.state = PoolState::Open;
    sb.store(&mut rig.media[0]).unwrap();
    assert!(refused(&mut rig, &[0, 2], 1), "it was not closed");
}
