//! Traces played against files: what is sent, when, and whether wrong data is noticed.

use std::collections::VecDeque;
use std::path::Path;

use hearth_replay::{
    Done, FileTarget, GRACE_NS, Job, Kind, Options, Outcome, Pace, ReplayError, Select, Source,
    Target, run, scan,
};

const MIB: u64 = 1 << 20;

/// A directory on a real disk: direct I/O does not work everywhere.
fn dir() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn trace(dir: &Path, lines: impl Iterator<Item = String>) -> Select {
    let path = dir.join("t.csv");
    let text: Vec<String> = std::iter::once("time_us,op,offset_bytes,length_bytes".to_owned())
        .chain(lines)
        .collect();
    std::fs::write(&path, text.join("\n") + "\n").unwrap();
    Select {
        path,
        ..Select::default()
    }
}

fn mixed(n: u64) -> impl Iterator<Item = String> {
    (0..n).map(|i| {
        let op = if i % 3 == 0 { 'R' } else { 'W' };
        let offset = i * 7919 % 2000 * 512;
        let length = 512 * (1 + i % 40);
        format!("{},{op},{offset},{length}", i * 100)
    })
}

fn file(dir: &Path) -> FileTarget {
    let path = dir.join("disk.img");
    std::fs::write(&path, vec![0u8; 2 * MIB as usize]).unwrap();
    FileTarget::open(path.to_str().unwrap(), false).unwrap()
}

fn play(select: &Select, target: &mut dyn Target, pace: Pace, verify: bool) -> Outcome {
    let plan = scan(select).unwrap();
    let align = target.align().max(512);
    let mut source = Source::open(select, &plan, target.size(), align, target.len_max()).unwrap();
    let options = Options {
        pace,
        verify,
        run: 42,
        grace_ns: GRACE_NS,
    };
    run(&mut source, target, options, &mut |_| true).unwrap()
}

#[test]
fn everything_is_played_and_verified() {
    let dir = dir();
    let select = trace(dir.path(), mixed(2000));
    for pace in [Pace::Depth(1), Pace::Depth(16), Pace::FlatOut] {
        let out = play(&select, &mut file(dir.path()), pace, true);
        assert_eq!(
            (out.requests, out.errors),
            (2000, 0),
            "{:?}",
            out.first_error
        );
        assert_eq!(out.reads.count + out.writes.count, 2000);
        let found = out.verified.unwrap();
        assert!(found.sectors > 1000 && found.wrong == 0, "{found:?}");
        assert!(out.response.is_none());
    }
}

/// A disk that does something wrong now and then.
struct Wrong {
    inner: FileTarget,
    seen: u64,
}

impl Target for Wrong {
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn size(&self) -> u64 {
        self.inner.size()
    }
    fn align(&self) -> u64 {
        self.inner.align()
    }
    fn len_max(&self) -> u64 {
        self.inner.len_max()
    }
    fn read_only(&self) -> bool {
        false
    }
    fn can(&self, kind: Kind) -> bool {
        self.inner.can(kind)
    }
    fn submit(&mut self, mut job: Job) -> Result<(), ReplayError> {
        self.seen += 1;
        if self.seen % 97 == 0 && job.kind == Kind::Write {
            // Lost: answered as if it were written.
            job.kind = Kind::Flush;
            job.offset = 0;
            job.len = 0;
            job.buf = None;
        }
        self.inner.submit(job)
    }
    fn wait(&mut self, until_ns: u64, done: &mut Vec<Done>) -> Result<(), ReplayError> {
        self.inner.wait(until_ns, done)
    }
}

#[test]
fn a_lost_write_is_noticed() {
    let dir = dir();
    let select = trace(dir.path(), mixed(2000));
    let mut target = Wrong {
        inner: file(dir.path()),
        seen: 0,
    };
    let found = play(&select, &mut target, Pace::Depth(8), true)
        .verified
        .unwrap();
    assert!(found.wrong > 0, "{found:?}");
    assert!(!found.mismatches.is_empty() && found.mismatches.len() <= 10);
}

#[test]
fn the_traces_own_pace_is_kept_and_a_slow_disk_is_told() {
    let dir = dir();
    // 100 reads over 300 ms.
    let select = trace(
        dir.path(),
        (0..100u64).map(|i| format!("{},R,{},4096", i * 3000, i * 8192)),
    );
    let out = play(&select, &mut file(dir.path()), Pace::Original(1.0), false);
    assert!(out.seconds >= 0.297, "{}", out.seconds);
    assert_eq!(out.response.unwrap().count, 100);
    assert!((out.trace_seconds - 0.297).abs() < 0.001);
    let fast = play(&select, &mut file(dir.path()), Pace::Original(3.0), false);
    assert!(fast.seconds >= 0.099, "{}", fast.seconds);

    // 1200 requests at once on a disk that takes 5 ms: only 1024 go out at a time.
    let path = dir.path().join("disk.img");
    let spec = format!("model-latency=5ms:{}", path.display());
    let burst = trace(
        dir.path(),
        (0..1200u64).map(|i| format!("0,R,{},512", i * 512)),
    );
    let mut slow = FileTarget::open(&spec, false).unwrap();
    let out = play(&burst, &mut slow, Pace::Original(1.0), false);
    assert!(out.late >= 100 && out.lag_max_seconds >= 0.004, "{out:?}");
    assert!(out.response.unwrap().max_us >= 9000.0);
}

#[test]
fn it_can_be_called_off() {
    let dir = dir();
    // The second one is due in ages, further away than a clock of nanoseconds reaches.
    let select = trace(
        dir.path(),
        [0, 9_000_000_000_000_000_000u64]
            .into_iter()
            .map(|at| format!("{at},R,0,4096")),
    );
    let plan = scan(&select).unwrap();
    let mut target = file(dir.path());
    let mut source = Source::open(&select, &plan, target.size(), 4096, MIB).unwrap();
    let options = Options {
        pace: Pace::Original(1e-300),
        verify: false,
        run: 1,
        grace_ns: GRACE_NS,
    };
    let mut calls = 0;
    let out = run(&mut source, &mut target, options, &mut |_| {
        calls += 1;
        calls < 2
    })
    .unwrap();
    assert!(out.interrupted && out.unanswered == 0);
    assert_eq!((out.requests, calls), (1, 2));
}

/// A disk without memory that answers as it is told.
#[derive(Default)]
struct Made {
    waiting: VecDeque<Job>,
    bytes: u64,
    bytes_max: u64,
    answered: u64,
    /// Never answers.
    hangs: bool,
    /// Every third request fails.
    fails: bool,
    abandoned: bool,
}

impl Target for Made {
    fn name(&self) -> &str {
        "made"
    }
    fn size(&self) -> u64 {
        4096 * MIB
    }
    fn align(&self) -> u64 {
        512
    }
    fn len_max(&self) -> u64 {
        32 * MIB
    }
    fn read_only(&self) -> bool {
        false
    }
    fn can(&self, _kind: Kind) -> bool {
        true
    }
    fn submit(&mut self, job: Job) -> Result<(), ReplayError> {
        self.bytes += job.len;
        self.bytes_max = self.bytes_max.max(self.bytes);
        self.waiting.push_back(job);
        Ok(())
    }
    fn abandon(&mut self) {
        self.abandoned = true;
    }
    fn wait(&mut self, _until_ns: u64, done: &mut Vec<Done>) -> Result<(), ReplayError> {
        if self.hangs {
            return Ok(());
        }
        if let Some(job) = self.waiting.pop_front() {
            self.bytes -= job.len;
            self.answered += 1;
            let failed = self.fails && self.answered % 3 == 0;
            done.push(Done {
                id: job.id,
                buf: job.buf,
                result: if failed { Err("no".to_owned()) } else { Ok(()) },
                at_ns: hearth_io::now_ns(),
            });
        }
        Ok(())
    }
}

#[test]
fn memory_in_flight_is_bounded() {
    let dir = dir();
    let select = trace(
        dir.path(),
        (0..40u64).map(|i| format!("0,R,{},{}", i * 32 * MIB, 32 * MIB)),
    );
    let mut target = Made::default();
    let out = play(&select, &mut target, Pace::Original(1.0), false);
    assert_eq!(out.read_bytes, 40 * 32 * MIB);
    assert_eq!(target.bytes_max, 256 * MIB);
}

#[test]
fn failed_requests_are_in_no_latency() {
    let dir = dir();
    let select = trace(
        dir.path(),
        (0..9u64).map(|i| format!("0,R,{},512", i * 512)),
    );
    let mut target = Made {
        fails: true,
        ..Made::default()
    };
    let out = play(&select, &mut target, Pace::Depth(4), false);
    assert_eq!((out.requests, out.errors, out.reads.count), (9, 3, 6));
    assert_eq!(out.read_bytes, 6 * 512);
    let slots: u64 = out.timeline.iter().map(|s| s.requests).sum();
    assert_eq!(slots, 6);
}

#[test]
fn a_disk_that_hangs_is_left_and_the_rest_reported() {
    let dir = dir();
    let select = trace(
        dir.path(),
        (0..9u64).map(|i| format!("0,R,{},512", i * 512)),
    );
    let plan = scan(&select).unwrap();
    let mut target = Made {
        hangs: true,
        ..Made::default()
    };
    let mut source = Source::open(&select, &plan, target.size(), 512, MIB).unwrap();
    let options = Options {
        pace: Pace::Depth(4),
        verify: true,
        run: 1,
        grace_ns: 1,
    };
    let out = run(&mut source, &mut target, options, &mut |_| false).unwrap();
    assert!(out.interrupted && target.abandoned);
    assert_eq!((out.requests, out.unanswered), (4, 4));
}

#[test]
fn late_requests_are_counted_once_however_many_pieces_they_have() {
    let dir = dir();
    // One request, in pieces, behind one that keeps it waiting.
    let select = trace(
        dir.path(),
        (0..12u64).map(|i| format!("0,R,{},{}", i * 64 * MIB, 64 * MIB)),
    );
    let out = play(&select, &mut Made::default(), Pace::Original(1.0), false);
    assert_eq!((out.requests, out.reads.count), (12, 24));
    assert!(out.late <= 12, "{}", out.late);
}
