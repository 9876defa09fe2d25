//! When a mirror is scrubbed although nobody asks: by the calendar, which here is set. It is monthly, once each time, and a restart
//! neither forgets that one is due nor runs one again.

use hearth_format::Uuid;
use hearth_format::mirror::{LegStamp, LegState, MirrorNotes, MirrorStamps};
use hearth_io::{BlockFile, Device, OpenMode};
use hearth_mirror::{
    Book, Habits, LegOpener, Mirror, News, ScrubOrder, ScrubState, Setup, Witness,
};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const DAY: u64 = 86_400_000;
/// Some day, from which on it is told.
const TODAY: u64 = 20_000 * DAY;
const SIZE: u64 = 4 << 20;
/// Longest wait for what comes by itself.
const LIMIT: Duration = Duration::from_secs(60);

/// A clock that is set, and says each time that it was looked at.
struct Calendar {
    now_ms: Arc<AtomicU64>,
    looked: Receiver<()>,
    look: Sender<()>,
}

impl Calendar {
    fn set(&self, now_ms: u64) {
        self.now_ms.store(now_ms, Ordering::SeqCst);
    }

    /// It has been looked at since it was set, and what came of that has been done: it is looked at again.
    fn is_looked_at(&self) {
        while self.looked.try_recv().is_ok() {}
        for _ in 0..2 {
            self.looked.recv_timeout(LIMIT).expect("it is looked at");
        }
    }
}

/// What the state directory would have.
#[derive(Clone, Default)]
struct Kept(Arc<Mutex<(Habits, Option<MirrorNotes>)>>);

impl Kept {
    fn scrub(&self) -> ScrubState {
        self.0.lock().expect("no panic").0.scrub.clone()
    }
}

impl Book for Kept {
    fn store(&self, notes: &MirrorNotes, _changed: bool) -> io::Result<()> {
        self.0.lock().expect("no panic").1 = Some(notes.clone());
        Ok(())
    }

    fn remember(&self, habits: &Habits) -> io::Result<()> {
        self.0.lock().expect("no panic").0 = habits.clone();
        Ok(())
    }
}

struct Told(Sender<News>);

impl Witness for Told {
    fn tell(&self, news: News) {
        // The test may have ended.
        let _ = self.0.send(news);
    }
}

fn open(path: &Path) -> Device {
    let file = BlockFile::open(path, OpenMode::default()).expect("a leg opens");
    Device::new(file)
}

struct Files;

impl LegOpener for Files {
    fn open(&self, name: &str) -> Result<Device, hearth_fault::Fault> {
        Ok(open(Path::new(name)))
    }
}

struct World {
    legs: [PathBuf; 2],
    kept: Kept,
    calendar: Calendar,
    news: Receiver<News>,
    teller: Sender<News>,
    _dir: tempfile::TempDir,
}

impl World {
    fn new() -> World {
        let dir = tempfile::tempdir().expect("a directory");
        let legs = ["a", "b"].map(|name| dir.path().join(name));
        for leg in &legs {
            let file = std::fs::File::create(leg).expect("a file");
            file.set_len(SIZE).expect("it grows");
        }
        let (look, looked) = channel();
        let (teller, news) = channel();
        World {
            legs,
            kept: Kept::default(),
            calendar: Calendar {
                now_ms: Arc::new(AtomicU64::new(TODAY)),
                looked,
                look,
            },
            news,
            teller,
            _dir: dir,
        }
    }

    fn start(&self) -> Mirror {
        let (habits, notes) = self.kept.0.lock().expect("no panic").clone();
        let first = MirrorStamps {
            generation: 1,
            open: false,
            unknown: false,
            legs: [1, 2]
                .map(|n| LegStamp {
                    id: Uuid::from_bytes([n; 16]),
                    generation: 1,
                    state: LegState::Current,
                    whole: false,
                    copied: 0,
                    left: (0, 0),
                })
                .to_vec(),
            marks: Vec::new(),
        };
        let (now_ms, look) = (self.calendar.now_ms.clone(), self.calendar.look.clone());
        let opened = self.legs.iter();
        let opened = opened.map(|leg| (leg.display().to_string(), Ok(open(leg))));
        let setup = Setup {
            name: "m".to_owned(),
            serial: Uuid::from_bytes([7; 16]),
            size: SIZE,
            stamps: notes.as_ref().map_or(first, |n| n.stamps.clone()),
            notes,
            legs: opened.collect(),
            samples: vec![Vec::new(), Vec::new()],
            timeout: Duration::from_secs(30),
            read_only: false,
            book: Arc::new(self.kept.clone()),
            opener: Arc::new(Files),
            witness: Arc::new(Told(self.teller.clone())),
            habits,
            wall: Arc::new(move || {
                // The test may have ended.
                let _ = look.send(());
                now_ms.load(Ordering::SeqCst)
            }),
        };
        Mirror::open(setup).expect("the mirror opens")
    }

    /// Ends it in order, and waits until all is kept.
    fn stop(&self, mirror: Mirror) {
        drop(mirror);
        let end = Instant::now() + LIMIT;
        while Arc::strong_count(&self.kept.0) > 1 {
            assert!(Instant::now() < end, "somebody still has notes to make");
            std::thread::yield_now();
        }
    }

    /// Begins, and where; what else is told meanwhile is not expected.
    fn begins(&self) -> u64 {
        match self.news.recv_timeout(LIMIT) {
            Ok(News::ScrubStarted { at }) => at,
            other => panic!("{other:?}"),
        }
    }

    fn ends(&self) -> ScrubState {
        match self.news.recv_timeout(LIMIT) {
            Ok(News::Scrubbed {
                whole: true, state, ..
            }) => *state,
            other => panic!("{other:?}"),
        }
    }

    /// Nothing begins, although the calendar was looked at.
    fn rests(&self) {
        self.calendar.is_looked_at();
        let told = self.news.try_recv();
        assert!(told.is_err(), "{told:?}");
    }
}

#[test]
fn a_mirror_is_scrubbed_once_a_month_also_over_restarts() {
    let world = World::new();
    let mirror = world.start();
    world.rests();
    world.calendar.set(TODAY + 30 * DAY - 1);
    world.rests();
    // A restart in between does not begin the month anew.
    world.stop(mirror);
    assert_eq!(world.kept.scrub().ended_ms, TODAY);
    let mirror = world.start();
    world.rests();
    let first = TODAY + 30 * DAY;
    world.calendar.set(first);
    assert_eq!(world.begins(), 0);
    let state = world.ends();
    assert_eq!((state.began_ms, state.ended_ms), (first, first));
    assert_eq!(state.checked, SIZE);
    world.rests();
    // Neither a restart nor the rest of the month brings a second one.
    world.stop(mirror);
    let mirror = world.start();
    world.rests();
    world.calendar.set(first + 30 * DAY - 1);
    world.rests();
    // It is due while nobody serves: the next start sees to it.
    world.stop(mirror);
    world.calendar.set(first + 300 * DAY);
    let mirror = world.start();
    assert_eq!(world.begins(), 0);
    assert_eq!(world.ends().ended_ms, first + 300 * DAY);
    world.rests();
    world.stop(mirror);
}

/// One that is under way when the daemon stops is gone on with, and is the same one: it is not run again after its end.
#[test]
fn a_restart_in_the_middle_goes_on_with_the_same_scrub() {
    let world = World::new();
    let mirror = world.start();
    world.rests();
    let slowly = ScrubOrder {
        rate: Some(64 << 10),
        ..ScrubOrder::default()
    };
    mirror.scrub(slowly).expect("a rate is set");
    world.calendar.set(TODAY + 31 * DAY);
    assert_eq!(world.begins(), 0);
    world.stop(mirror);
    let kept = world.kept.scrub();
    assert!(kept.active && !kept.called_off, "{kept:?}");
    world.calendar.set(TODAY + 32 * DAY);
    let mirror = world.start();
    assert_eq!(world.begins(), kept.at);
    let quickly = ScrubOrder {
        rate: Some(0),
        ..ScrubOrder::default()
    };
    mirror.scrub(quickly).expect("a rate is set");
    let state = world.ends();
    assert_eq!(
        (state.began_ms, state.ended_ms),
        (TODAY + 31 * DAY, TODAY + 32 * DAY)
    );
    world.rests();
    world.stop(mirror);
    let mirror = world.start();
    world.rests();
    world.stop(mirror);
}

/// A host whose clock was years ahead when a scrub ended.
#[test]
fn a_clock_that_is_put_right_does_not_put_scrubs_off() {
    let world = World::new();
    world.calendar.set(TODAY + 10_000 * DAY);
    let mirror = world.start();
    world.rests();
    world.calendar.set(TODAY);
    world.rests();
    world.calendar.set(TODAY + 30 * DAY - 1);
    world.rests();
    world.calendar.set(TODAY + 30 * DAY);
    assert_eq!(world.begins(), 0);
    world.ends();
    world.stop(mirror);
}
