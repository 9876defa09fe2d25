//! Cut off at every write and flush there is.

use super::*;
use crate::layout::Layout;
use crate::superblock::INCOMPAT_MAP;
use hearth_io::Sparse;
use std::io;
use std::sync::atomic::{AtomicI64, Ordering};

const SEGMENT: u32 = 256;
const STEPS_MAX: i64 = 100_000;
/// Where the new device is, in the list of all.
const NEW: usize = 3;

/// A device that takes so many writes and flushes, together with others, and no more. Those that are not in the list
/// fail as one that is gone.
struct Cut<'a> {
    media: &'a mut Sparse,
    left: &'a AtomicI64,
    gone: bool,
}

impl Cut<'_> {
    fn spend(&self) -> io::Result<()> {
        match !self.gone && self.left.fetch_sub(1, Ordering::Relaxed) > 0 {
            true => Ok(()),
            false => Err(io::Error::other("cut off")),
        }
    }
}

impl Media for Cut<'_> {
    fn len(&self) -> u64 {
        self.media.len()
    }
    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        // Nothing is read that was cut off before: a power cut has no reader.
        match self.gone {
            true => Err(io::Error::other("gone")),
            false => self.media.read_at(offset, data),
        }
    }
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.spend()?;
        self.media.write_at(offset, data)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.spend()
    }
}

fn number(n: usize) -> Uuid {
    Uuid::from_u128(0xD000 + n as u128)
}

/// A pool that keeps everything twice on three devices, and a fourth device with something old on it.
struct Rig {
    media: Vec<Sparse>,
}

/// What is in the blocks of the pool that are looked at.
fn content(offset: u64) -> Vec<u8> {
    (offset.to_le_bytes().repeat(BLOCK_BYTES / 8)).to_vec()
}

/// Blocks that are looked at: before the segments, and of each segment the first and the last.
fn looked_at(layout: &Layout) -> Vec<u64> {
    let front = [8, layout.segment_start - 1].map(|at| at * BLOCK);
    let segments = (0..layout.segment_count).flat_map(|seg| {
        let at = layout.segment_offset(seg);
        [at, at + u64::from(SEGMENT - 1) * BLOCK]
    });
    front.into_iter().chain(segments).collect()
}

impl Rig {
    fn new() -> Rig {
        Rig::made(false)
    }

    /// Clean blocks may be there once.
    fn made(once: bool) -> Rig {
        let sizes = [24 << 20, 20 << 20, 28 << 20];
        let (layout, extents) = Layout::for_twice(&sizes, SEGMENT, once).unwrap();
        let mut lead = Superblock::new(layout, Uuid::from_u128(7), number(0), "twice", 9);
        let entries = extents.iter().enumerate().map(|(n, extent)| DeviceEntry {
            device: number(n),
            extent: *extent,
        });
        lead.set_twice(layout, entries.collect());
        lead.incompat |= INCOMPAT_MAP;
        lead.stamp = 3;
        let mut media: Vec<Sparse> = sizes.map(Sparse::new).into();
        let mut third = lead.for_member(2, number(2), 9);
        third.store(&mut media[2]).unwrap();
        let mut joined = Joined::new(lead.spread(), media.iter_mut().collect());
        lead.store(&mut joined).unwrap();
        for at in looked_at(&lead.layout) {
            joined.write_at(at, &content(at)).unwrap();
        }
        let mut new = Sparse::new(40 << 20);
        for at in (0..new.len()).step_by(BLOCK_BYTES * 64) {
            new.write_at(at, &[0xEE; BLOCK_BYTES]).unwrap();
        }
        media.push(new);
        Rig { media }
    }

    /// Replaces one device of the first three, of which `lost` are, with so many writes and flushes.
    fn replace(&mut self, old: usize, lost: u64, steps: i64) -> Result<Superblock, Failed> {
        let left = AtomicI64::new(steps);
        let cut = |(n, media)| Cut {
            media,
            left: &left,
            gone: n < NEW && lost & bit(n) != 0,
        };
        let mut all: Vec<Cut<'_>> = self.media.iter_mut().enumerate().map(cut).collect();
        let mut new = all.pop().unwrap();
        let newcomer = Newcomer {
            device: number(NEW),
            now_unix_s: 99,
        };
        let done = replace_half(
            &mut all,
            old,
            lost,
            &mut new,
            newcomer,
            &|_| false,
            &mut |_, _| true,
        );
        done.map(|(sb, copied)| {
            assert_eq!(copied.unreadable, 0);
            sb
        })
    }

    /// The superblock by which these devices are a pool, if they are, and all of its content is there in each half that is.
    fn opens(&mut self, given: &[usize]) -> Option<Superblock> {
        let mut found = Vec::new();
        let mut at = Vec::new();
        for n in given {
            if let Ok(sb) = Superblock::load(&mut self.media[*n]) {
                found.push(sb);
                at.push(*n);
            }
        }
        let together = judge_twice(&found).ok()?;
        let lead = together.lead.clone();
        let spread = lead.spread();
        for offset in looked_at(&lead.layout) {
            let mut halves = 0;
            for (place, there) in spread.halves(offset) {
                let n = at[together.places[usize::from(place)].unwrap()];
                let mut block = vec![0; BLOCK_BYTES];
                self.media[n].read_at(there, &mut block).unwrap();
                assert_eq!(block, content(offset), "{offset:#x} on device {n}");
                halves += 1;
            }
            assert!(halves > 0, "nothing has {offset:#x}");
        }
        Some(lead)
    }

    /// As an opening by who serves it.
    fn serve(&mut self, given: &[usize]) -> Option<Superblock> {
        let mut found = Vec::new();
        let mut at = Vec::new();
        for n in given {
            if let Ok(sb) = Superblock::load(&mut self.media[*n]) {
                found.push(sb);
                at.push(*n);
            }
        }
        let together = judge_twice(&found).ok()?;
        let (mut members, mut lead) = (together.members(&found), together.lead);
        let mut taken: Vec<Sparse> = Vec::new();
        for place in &together.places {
            taken.push(match place {
                Some(n) => std::mem::take(&mut self.media[at[*n]]),
                None => Sparse::new(0),
            });
        }
        let mut joined = Joined::new(lead.spread(), taken.iter_mut().collect());
        members.stamp_twice(&mut lead, &mut joined).unwrap();
        for (place, media) in together.places.iter().zip(taken) {
            if let Some(n) = place {
                self.media[at[*n]] = media;
            }
        }
        Some(lead)
    }
}

/// The devices of the pool before and after, in their order.
fn lists(old: usize) -> (Vec<usize>, Vec<usize>) {
    let before = vec![0, 1, 2];
    let mut after = before.clone();
    after[old] = NEW;
    (before, after)
}

#[test]
fn wherever_a_replacement_is_cut_off_one_list_opens_and_all_is_there() {
    for (old, is_lost) in [0, 1, 2].into_iter().flat_map(|n| [(n, false), (n, true)]) {
        let (before, after) = lists(old);
        let rest: Vec<usize> = before.iter().copied().filter(|n| *n != old).collect();
        let lost = if is_lost { bit(old) } else { 0 };
        let (mut were, mut halfway) = (0, 0);
        for steps in 0..STEPS_MAX {
            let about = format!("device {old}, lost: {is_lost}, cut after {steps}");
            let mut rig = Rig::new();
            if is_lost {
                // It was there, and the pool went on without it.
                rig.serve(&rest).unwrap();
            }
            let done = rig.replace(old, lost, steps).is_ok();
            // The new device is never believed alone, nor with nobody who says that it counts.
            if !done {
                assert!(rig.opens(&[NEW]).is_none(), "{about}");
            }
            let lead = rig.opens(&rest).expect(&about);
            let listed = lead.devices[old].device;
            if listed == number(old) {
                were += 1;
                assert!(!done, "{about}");
                let whole = rig.opens(&before).expect(&about);
                assert_eq!(whole.lost, lost, "{about}");
                // The new one is none of it.
                assert!(rig.opens(&after).is_none_or(|sb| sb.lost == bit(old)));
            } else {
                assert_eq!(listed, number(NEW), "{about}");
                // The old one is never believed beside any other, also if it is not erased yet.
                assert!(
                    rig.opens(&before)
                        .is_none_or(|sb| sb.devices == lead.devices && sb.lost == bit(old)),
                    "{about}"
                );
                let now = rig.opens(&after).expect(&about);
                assert!([0, bit(old)].contains(&now.lost), "{about}");
                halfway += usize::from(now.lost != 0);
                if done {
                    assert_eq!(now.lost, 0, "{about}");
                }
            }
            // Whatever it is, it is served, and once more; and what is done again gets to the end.
            let given = if listed == number(NEW) {
                &after
            } else {
                &before
            };
            let served = rig.serve(given).expect(&about);
            rig.opens(given).expect(&about);
            if served.lost != 0 || listed == number(old) {
                let again = rig.replace_at(given, old, served.lost).expect(&about);
                assert_eq!((again.lost, again.next_stamp), (0, 0), "{about}");
            }
            let now = rig.opens(&after).expect(&about);
            assert_eq!(now.lost, 0, "{about}");
            if done {
                assert!(were > 20 && halfway > 3, "{about}: {were}, {halfway}");
                break;
            }
        }
    }
}

impl Rig {
    /// The same again, with what there is of it.
    fn replace_at(&mut self, given: &[usize], old: usize, lost: u64) -> Result<Superblock, Failed> {
        if given[old] == NEW {
            // The new device is in the list already, and lost: it is put there as a new one once more.
            let mut new = std::mem::take(&mut self.media[NEW]);
            let mut rest: Vec<Sparse> = (0..3)
                .map(|n| match n == old {
                    true => Sparse::new(0),
                    false => std::mem::take(&mut self.media[n]),
                })
                .collect();
            let newcomer = Newcomer {
                device: number(NEW + 1),
                now_unix_s: 100,
            };
            let done = replace_half(
                &mut rest,
                old,
                lost,
                &mut new,
                newcomer,
                &|_| false,
                &mut |_, _| true,
            );
            for (n, media) in rest.into_iter().enumerate() {
                match n == old {
                    true => self.media[NEW] = media,
                    false => self.media[n] = media,
                }
            }
            return done.map(|(sb, _)| sb);
        }
        self.replace(old, lost, STEPS_MAX)
    }
}

#[test]
fn the_old_device_is_not_believed_when_it_comes_back() {
    for old in 0..3 {
        let (before, after) = lists(old);
        let mut rig = Rig::new();
        let rest: Vec<usize> = before.iter().copied().filter(|n| *n != old).collect();
        rig.serve(&rest).unwrap();
        rig.replace(old, bit(old), STEPS_MAX).unwrap();
        // It was lost, so it has its superblock still.
        assert!(Superblock::load(&mut rig.media[old]).is_ok());
        assert!(rig.opens(&before).is_none());
        assert!(rig.opens(&[0, 1, 2, NEW]).is_none());
        let served = rig.serve(&after).unwrap();
        assert_eq!(served.lost, 0);
        // And any other may go now.
        for gone in 0..3 {
            let left: Vec<usize> = (0..3).filter(|n| *n != gone).map(|n| after[n]).collect();
            assert_eq!(rig.opens(&left).unwrap().lost, bit(gone));
        }
    }
    // One that was there is no pool any more.
    let mut rig = Rig::new();
    rig.replace(1, 0, STEPS_MAX).unwrap();
    assert!(Superblock::load(&mut rig.media[1]).is_err());
    let gone = Superblock::load_any(&mut rig.media[1]).unwrap();
    assert_eq!(gone.part, Role::Gone);
    let new = Superblock::load(&mut rig.media[NEW]).unwrap();
    assert_eq!(gone.peer, new.device);
}

#[test]
fn what_is_refused_changes_nothing() {
    let mut rig = Rig::new();
    let was = rig.opens(&[0, 1, 2]).unwrap();
    rig.media[NEW] = Sparse::new(8 << 20);
    assert!(matches!(
        rig.replace(2, 0, STEPS_MAX),
        Err((NEW, FormatError::TooSmall { .. }))
    ));
    let now = rig.opens(&[0, 1, 2]).unwrap();
    assert_eq!(
        (now.generation, &now.devices),
        (was.generation, &was.devices)
    );
    // With one lost, the halves of the other are all there is.
    rig.media[NEW] = Sparse::new(40 << 20);
    rig.serve(&[0, 2]).unwrap();
    let (_, e) = rig.replace(0, bit(1), STEPS_MAX).unwrap_err();
    assert!(e.to_string().contains("another device is lost"), "{e}");
    assert_eq!(rig.opens(&[0, 1, 2]).unwrap().lost, bit(1));
}

#[test]
fn clean_blocks_of_a_lost_device_do_not_count_in_the_one_that_takes_its_place() {
    // What stands there may look like them: it may be the very device that was lost.
    for (old, lost) in [(0, 1), (1, 2), (2, 4)] {
        let mut rig = Rig::made(true);
        let before = Superblock::load(&mut rig.media[usize::from(old == 0)]).unwrap();
        let sb = rig.replace(old, lost, i64::MAX).unwrap();
        assert_eq!(sb.once.behind, bit(old));
        // Segments opened so far have the numbers of generations up to that one, and later ones larger numbers.
        assert!(sb.once.floor > before.generation << 32);
        assert!(sb.once.floor <= sb.generation << 32);
    }
    let mut rig = Rig::made(true);
    let sb = rig.replace(1, 0, i64::MAX).unwrap();
    assert_eq!(sb.once, Default::default(), "what was there was copied");
}
