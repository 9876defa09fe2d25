//! A flash device is copied to another one while guests use it, and they hardly feel it.
//!
//! While somebody asks for something, pieces are small: what comes behind one waits no longer than it would behind another
//! guest. After each the devices are left alone for as long as it took. When nobody has asked for anything
//! for a while, the next piece is read while the one before is written, and there are no pauses.
//!
//! Guests write meanwhile, and what they wrote to is copied once more ([`Passes`]). If they write about as fast as this
//! copies, it becomes hastier, or all of that would be left to the moment at which they wait.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hearth_engine::Engine;
use hearth_io::Media;
use hearth_io::media::read_ahead;

use crate::error::{Error, Result};

/// Bytes of a piece beside guests, as of what the destager takes beside them.
const PIECE: u64 = 128 << 10;
/// The same when nobody asks: one is read while another is written, and shorter ones leave devices waiting.
const PIECE_ALONE: usize = 1 << 20;
/// After a piece the devices are left alone for so many times as long as it took: guests have them for half of the time. What they feel
/// most is how long a piece is, not how often one comes.
const PAUSE: u32 = 1;
/// Longest pause: of a device that hardly answers, guests would have nothing of more.
const PAUSE_MAX: Duration = Duration::from_millis(100);
/// So few segments are left to the moment at which clients wait.
const FEW: usize = 16;

/// The guests, and the time, as whoever copies beside them sees them.
pub(super) trait Beside: Sync {
    /// Has nobody asked for anything for a while?
    fn nobody_asks(&self) -> bool;
    /// A clock that only goes forward.
    fn now(&self) -> Duration;
    /// Does nothing for so long.
    fn rest(&self, pause: Duration);
}

impl Beside for Engine {
    fn nobody_asks(&self) -> bool {
        Engine::nobody_asks(self, hearth_io::now_ns())
    }

    fn now(&self) -> Duration {
        Duration::from_nanos(hearth_io::now_ns())
    }

    fn rest(&self, pause: Duration) {
        std::thread::sleep(pause);
    }
}

/// Leaves the devices to guests, if there are any, after something that began then.
pub(super) fn give_way(beside: &impl Beside, begun: Duration, times: u32) {
    if !beside.nobody_asks() {
        let took = beside.now().saturating_sub(begun);
        beside.rest(took.saturating_mul(times).min(PAUSE_MAX));
    }
}

/// Gives way after each step of something long: what is told of steps comes here first.
pub(super) struct Steps<'a, B> {
    beside: &'a B,
    since: Duration,
}

impl<'a, B: Beside> Steps<'a, B> {
    pub(super) fn new(beside: &'a B) -> Steps<'a, B> {
        let since = beside.now();
        Steps { beside, since }
    }

    /// One more has ended.
    pub(super) fn step(&mut self) {
        give_way(self.beside, self.since, PAUSE);
        self.since = self.beside.now();
    }
}

/// How often what has changed meanwhile is copied once more, and how hastily.
pub(super) struct Passes {
    /// Pauses in times of what a piece took; 0: as when nobody asks.
    pause: u32,
    before: Option<usize>,
}

impl Passes {
    pub(super) fn new() -> Passes {
        Passes {
            pause: PAUSE,
            before: None,
        }
    }

    /// So many segments are due: how long pauses are while they are copied. None: the rest is for the moment at which
    /// clients wait. There is an end to it: either half as many are due each time, or it becomes hastier.
    pub(super) fn next(&mut self, due: usize) -> Option<u32> {
        if due == 0 || self.before.is_some() && due <= FEW {
            return None;
        }
        if self.before.is_some_and(|before| due > before / 2) {
            if self.pause == 0 {
                return None;
            }
            self.pause /= 2;
        }
        self.before = Some(due);
        Some(self.pause)
    }
}

fn cannot_write(e: &io::Error) -> Error {
    Error::unavailable(
        format!("cannot write to the new device: {e}"),
        "check the device's health",
    )
}

/// Makes what was copied durable.
pub(super) fn settle(to: &mut impl Media) -> Result<()> {
    to.flush().map_err(|e| cannot_write(&e))
}

/// Copies `bytes` from one place to another one. False: they cannot all be read.
pub(super) fn copy(
    from: (&mut impl Media, u64),
    to: (&mut impl Media, u64),
    bytes: u64,
    beside: &impl Beside,
    pause: u32,
) -> Result<bool> {
    let ((from, from_at), (to, to_at)) = (from, to);
    let mut piece = vec![0; PIECE.min(bytes) as usize];
    let mut done = 0;
    while done < bytes {
        if pause == 0 || beside.nobody_asks() {
            let (from, to) = ((&mut *from, from_at), (&mut *to, to_at));
            match copy_alone(from, to, done..bytes, beside, pause)? {
                Some(upto) => done = upto,
                None => return Ok(false),
            }
            continue;
        }
        let begun = beside.now();
        let piece = &mut piece[..PIECE.min(bytes - done) as usize];
        if from.read_at(from_at + done, piece).is_err() {
            return Ok(false);
        }
        to.write_at(to_at + done, piece)
            .map_err(|e| cannot_write(&e))?;
        done += piece.len() as u64;
        give_way(beside, begun, pause);
    }
    Ok(true)
}

/// The same, as fast as the devices allow, until somebody asks for something if there are pauses to be made then. Up to where it came; none:
/// that cannot be read.
fn copy_alone(
    from: (&mut impl Media, u64),
    to: (&mut impl Media, u64),
    range: std::ops::Range<u64>,
    beside: &impl Beside,
    pause: u32,
) -> Result<Option<u64>> {
    let ((from, from_at), (to, to_at)) = (from, to);
    let over = AtomicBool::new(false);
    let mut next = range.start;
    let pieces = std::iter::from_fn(|| {
        let asked = next > range.start && pause > 0 && !beside.nobody_asks();
        if next >= range.end || asked || over.load(Ordering::Relaxed) {
            return None;
        }
        let at = next;
        next = range.end.min(at + PIECE_ALONE as u64);
        Some(at..next)
    });
    let mut done = Ok(Some(range.start));
    read_ahead(
        from,
        pieces,
        PIECE_ALONE,
        |from, piece, into| from.read_at(from_at + piece.start, part(into, piece)),
        |piece, bytes, read| {
            if !matches!(done, Ok(Some(_))) {
                return;
            }
            let len = (piece.end - piece.start) as usize;
            done = match (read, bytes.get(..len)) {
                (Ok(()), Some(bytes)) => to
                    .write_at(to_at + piece.start, bytes)
                    .map(|()| Some(piece.end))
                    .map_err(|e| cannot_write(&e)),
                _ => Ok(None),
            };
            over.store(!matches!(done, Ok(Some(_))), Ordering::Relaxed);
        },
    );
    done
}

/// As much of the memory as a piece has.
fn part<'a>(memory: &'a mut [u8], piece: &std::ops::Range<u64>) -> &'a mut [u8] {
    let len = memory.len().min((piece.end - piece.start) as usize);
    &mut memory[..len]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    const SEGMENT: u64 = 4 << 20;
    /// What each access to a device takes, on the clock of the test.
    const TAKES: Duration = Duration::from_millis(1);

    #[derive(Default)]
    struct Seen {
        now: Duration,
        /// Pieces read and written, and pauses.
        reads: Vec<usize>,
        writes: Vec<usize>,
        rests: Vec<Duration>,
        /// Somebody asks from that write on, and before that one.
        asked: std::ops::Range<usize>,
    }

    #[derive(Clone, Default)]
    struct World(Arc<Mutex<Seen>>);

    impl World {
        fn asked(during: std::ops::Range<usize>) -> World {
            let world = World::default();
            world.seen().asked = during;
            world
        }

        fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
            self.0.lock().unwrap()
        }
    }

    impl Beside for World {
        fn nobody_asks(&self) -> bool {
            let seen = self.seen();
            !seen.asked.contains(&seen.writes.len())
        }
        fn now(&self) -> Duration {
            self.seen().now
        }
        fn rest(&self, pause: Duration) {
            let mut seen = self.seen();
            seen.now += pause;
            seen.rests.push(pause);
        }
    }

    /// A device in memory that tells what is asked of it.
    struct Told {
        world: World,
        bytes: Vec<u8>,
        bad: Option<u64>,
    }

    impl Told {
        fn new(world: &World, fill: impl Fn(usize) -> u8) -> Told {
            Told {
                world: world.clone(),
                bytes: (0..SEGMENT as usize + 4096).map(fill).collect(),
                bad: None,
            }
        }
    }

    impl Media for Told {
        fn len(&self) -> u64 {
            self.bytes.len() as u64
        }
        fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
            let mut seen = self.world.seen();
            seen.now += TAKES;
            seen.reads.push(data.len());
            let range = offset..offset + data.len() as u64;
            if self.bad.is_some_and(|bad| range.contains(&bad)) {
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
            data.copy_from_slice(&self.bytes[offset as usize..][..data.len()]);
            Ok(())
        }
        fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
            let mut seen = self.world.seen();
            seen.now += TAKES;
            seen.writes.push(data.len());
            self.bytes[offset as usize..][..data.len()].copy_from_slice(data);
            Ok(())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Copies a segment. Whether it is whole, and if so, whether it arrived.
    fn copied(world: &World, bad: Option<u64>, pause: u32) -> (bool, bool) {
        let mut old = Told::new(world, |at| (at / 4096) as u8 ^ at as u8);
        old.bad = bad;
        let mut new = Told::new(world, |_| 0);
        let whole = copy((&mut old, 4096), (&mut new, 0), SEGMENT, world, pause).unwrap();
        (whole, new.bytes[..SEGMENT as usize] == old.bytes[4096..])
    }

    #[test]
    fn beside_guests_pieces_are_short_and_the_devices_are_left_alone_after_each() {
        let world = World::asked(0..usize::MAX);
        assert_eq!(copied(&world, None, PAUSE), (true, true));
        let seen = world.seen();
        let pieces = (SEGMENT / PIECE) as usize;
        assert_eq!(seen.reads, vec![PIECE as usize; pieces]);
        assert_eq!(seen.writes, seen.reads);
        // Each took a read and a write.
        assert_eq!(seen.rests, vec![2 * TAKES * PAUSE; pieces]);
    }

    #[test]
    fn while_nobody_asks_it_is_copied_in_large_pieces_without_a_pause() {
        for (asked, pause) in [(0..0, PAUSE), (0..usize::MAX, 0)] {
            let world = World::asked(asked);
            assert_eq!(copied(&world, None, pause), (true, true));
            let seen = world.seen();
            assert_eq!(
                seen.writes,
                vec![PIECE_ALONE; SEGMENT as usize / PIECE_ALONE]
            );
            assert_eq!(seen.rests, []);
        }
    }

    #[test]
    fn who_comes_meanwhile_is_given_way_to_and_when_he_has_gone_it_goes_on_as_before() {
        let world = World::asked(1..9);
        assert_eq!(copied(&world, None, PAUSE), (true, true));
        let seen = world.seen();
        // One more may have been on its way when it was asked.
        let large = |writes: &[usize]| writes.iter().filter(|len| **len == PIECE_ALONE).count();
        let begun = seen.writes.iter().position(|len| *len == PIECE as usize);
        let (before, after) = seen.writes.split_at(begun.expect("it gives way"));
        assert!((1..=2).contains(&large(before)), "{:?}", seen.writes);
        let small = after.iter().take_while(|len| **len == PIECE as usize);
        assert!(small.count() >= 7, "{:?}", seen.writes);
        assert!(large(after) > 0, "{:?}", seen.writes);
        assert!(!seen.rests.is_empty());
    }

    #[test]
    fn a_pause_has_an_end_where_a_device_hardly_answers() {
        let world = World::asked(0..usize::MAX);
        world.seen().now = Duration::from_secs(3600);
        give_way(&world, Duration::ZERO, PAUSE);
        assert_eq!(world.seen().rests, [PAUSE_MAX]);
    }

    #[test]
    fn what_cannot_be_read_is_not_taken_for_copied() {
        for asked in [0..0, 0..usize::MAX] {
            let world = World::asked(asked);
            let bad = Some(4096 + SEGMENT / 2 + 1);
            assert_eq!(copied(&world, bad, PAUSE), (false, false));
            let written: usize = world.seen().writes.iter().sum();
            assert_eq!(written as u64, SEGMENT / 2);
        }
    }

    #[test]
    fn steps_of_something_long_give_way_as_well() {
        let world = World::asked(0..usize::MAX);
        let mut steps = Steps::new(&world);
        for _ in 0..2 {
            world.seen().now += TAKES;
            steps.step();
        }
        assert_eq!(world.seen().rests, [TAKES * PAUSE; 2]);
        let alone = World::default();
        let mut steps = Steps::new(&alone);
        alone.seen().now += TAKES;
        steps.step();
        assert_eq!(alone.seen().rests, []);
    }

    #[test]
    fn what_changed_is_copied_again_until_little_is_left() {
        let passes = |dues: &[usize]| {
            let mut passes = Passes::new();
            let next = dues.iter().map(|due| passes.next(*due));
            next.collect::<Vec<_>>()
        };
        assert_eq!(passes(&[0]), [None], "nothing is there");
        // Few are copied while guests go on, too; only what is few at the end is left.
        assert_eq!(passes(&[5, 0]), [Some(PAUSE), None]);
        assert_eq!(
            passes(&[1000, 300, 90, 27, FEW]),
            [Some(PAUSE), Some(PAUSE), Some(PAUSE), Some(PAUSE), None]
        );
        // Guests write as fast as it copies.
        assert_eq!(
            passes(&[1000, 900, 900, 900]),
            [Some(PAUSE), Some(0), None, None]
        );
        assert_eq!(
            passes(&[1000, 900, 400, 300]),
            [Some(PAUSE), Some(0), Some(0), None]
        );
        assert_eq!(
            passes(&[1000, 900, 400, 150, 5]),
            [Some(PAUSE), Some(0), Some(0), Some(0), None]
        );
    }
}
