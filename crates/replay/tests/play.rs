//! Traces played against files: what is sent, when, and whether wrong data is noticed.

#![allow(missing_docs)]

use std::path::Path;
use std::time::Duration;

use hearth_replay::{
    FileTarget, Job, Kind, Options, Outcome, Pace, ReplayError, Select, Source, Target, run, scan,
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
    fn wait(
        &mut self,
        until_ns: u64,
        done: &mut Vec<hearth_replay::Done>,
    ) -> Result<(), ReplayError> {
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
    let select = trace(
        dir.path(),
        (0..100u64).map(|i| format!("{},R,{},4096", i * 1_000_000, i * 8192)),
    );
    let plan = scan(&select).unwrap();
    let mut target = file(dir.path());
    let mut source = Source::open(&select, &plan, target.size(), 4096, MIB).unwrap();
    let options = Options {
        pace: Pace::Original(1.0),
        verify: false,
        run: 1,
    };
    let start = std::time::Instant::now();
    let out = run(&mut source, &mut target, options, &mut |_| false).unwrap();
    assert!(out.interrupted && out.requests < 10);
    assert!(start.elapsed() < Duration::from_secs(30));
}
