//! What an outage of the server looks like from above: a stall, an error after the limit, and
//! never a lost write.

use crate::common::{LIMIT, Rig, SIZE, Server, lock, until};
use hearth_io::{IoError, OpKind};
use hearth_nbd_client::{ConnectError, Dial, NbdOrigin, Options};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const EIO: Result<(), IoError> = Err(IoError::Os(libc::EIO));

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u8).wrapping_mul(31) ^ seed)
        .collect()
}

#[test]
fn operations_do_what_they_say() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path());
    let mut rig = Rig::new(server.open(LIMIT));
    let data = pattern(300 << 10, 7);
    rig.write(4096, &data).unwrap();
    assert!(rig.read(4096, data.len() as u64) == (Ok(()), data.clone()));
    let zero = rig.submit(OpKind::WriteZeroes { punch: true }, 8192, Vec::new(), 4096);
    assert_eq!(rig.wait(zero).0, Ok(()));
    let trim = rig.submit(OpKind::Discard, 16384, Vec::new(), 4096);
    assert_eq!(rig.wait(trim).0, Ok(()));
    assert!(rig.read(8192, 4096).1 == vec![0; 4096]);
    rig.flush().unwrap();
    assert!(lock(&server.state).durable[4096..8192] == data[..4096]);
    // Past the end, and outside the data path.
    assert!(rig.read(SIZE, 4096).0.is_err());
    let mut some = vec![0; 1000];
    rig.device().read_at(5000, &mut some).unwrap();
    assert!(some[..] == data[904..1904]);
    rig.device().flush().unwrap();
}

#[test]
fn writes_answered_before_a_crash_are_there_after_it() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path());
    let mut rig = Rig::new(server.open(LIMIT));
    let (old, new) = (pattern(65536, 1), pattern(8192, 2));
    rig.write(0, &old).unwrap();
    rig.flush().unwrap();
    rig.write(4096, &new).unwrap();
    let zero = rig.submit(
        OpKind::WriteZeroes { punch: false },
        32768,
        Vec::new(),
        4096,
    );
    rig.wait(zero).0.unwrap();
    server.crash();
    assert!(lock(&server.state).now[4096..12288] != new[..]);
    // Nobody sees the server gone but those who wait for it.
    let read = rig.submit(OpKind::Read, 4096, Vec::new(), 8192);
    let flush = rig.submit(OpKind::Flush, 0, Vec::new(), 0);
    until("the loss is noticed", || !rig.link().connected);
    assert!(rig.waits(read, Duration::from_millis(50)));
    assert!(rig.link().reason.is_some());
    server.up();
    assert!(rig.wait(read) == (Ok(()), new.clone()));
    assert_eq!(rig.wait(flush).0, Ok(()));
    // The flush that was asked for after the crash covers what was answered before it.
    let state = lock(&server.state);
    assert!(state.durable[4096..12288] == new[..]);
    assert!(state.durable[..4096] == old[..4096]);
    assert!(state.durable[32768..36864] == [0; 4096]);
    drop(state);
    let link = rig.link();
    assert!(
        link.connected && link.reconnects == 1 && !link.failing,
        "{link:?}"
    );
}

#[test]
fn what_was_flushed_is_not_sent_again() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path());
    let mut rig = Rig::new(server.open(LIMIT));
    rig.write(0, &pattern(4096, 1)).unwrap();
    rig.flush().unwrap();
    let writes = server.writes.load(Ordering::SeqCst);
    server.cut();
    until("it is found again", || rig.link().reconnects == 1);
    assert!(rig.read(0, 4096).1 == pattern(4096, 1));
    assert_eq!(server.writes.load(Ordering::SeqCst), writes);
}

#[test]
fn a_flush_that_fails_covers_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path());
    let mut rig = Rig::new(server.open(LIMIT));
    let data = pattern(4096, 3);
    rig.write(0, &data).unwrap();
    server.flush_fails.store(true, Ordering::SeqCst);
    assert_eq!(rig.flush(), EIO);
    server.flush_fails.store(false, Ordering::SeqCst);
    server.crash();
    server.up();
    rig.flush().unwrap();
    assert!(lock(&server.state).durable[..4096] == data[..]);
}

/// What it answers is kept to be sent again, up to a limit; a server that cannot flush is not asked to
/// without pause because of that.
#[test]
fn a_flush_that_keeps_failing_is_asked_for_now_and_then() {
    const MIB: usize = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start_sized(dir.path(), 64 << 20);
    let mut rig = Rig::new(server.open(LIMIT));
    server.flush_fails.store(true, Ordering::SeqCst);
    for i in 0..40 {
        let _ = rig.write((i * MIB) as u64, &pattern(MIB, 5));
    }
    until("it is asked", || server.flushes.load(Ordering::SeqCst) > 1);
    for _ in 0..400 {
        let _ = rig.write(0, &pattern(4096, 6));
    }
    let flushes = server.flushes.load(Ordering::SeqCst);
    assert!(flushes < 100, "{flushes}");
    server.flush_fails.store(false, Ordering::SeqCst);
    until("it is asked again, and all is durable", || {
        lock(&server.state).durable[..4096] == pattern(4096, 6)[..]
    });
}

/// One that shrank serves, to those who know it, what it has: it may have its size back at any time.
#[test]
fn a_smaller_size_is_told_and_not_taken_over() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path());
    let mut rig = Rig::new(server.open(LIMIT));
    server.size.store(SIZE / 2, Ordering::SeqCst);
    assert_eq!(rig.device().refresh_size().unwrap(), SIZE / 2);
    assert_eq!(rig.device().size(), SIZE);
    rig.write(SIZE - 4096, &pattern(4096, 1)).unwrap();
    // Nor is a smaller one good enough for a new connection.
    server.cut();
    until("it is seen", || !rig.link().connected);
    let id = rig.submit(OpKind::Read, SIZE - 4096, Vec::new(), 4096);
    until("it is refused", || {
        rig.link()
            .reason
            .is_some_and(|why| why.remedy.contains("size"))
    });
    server.size.store(SIZE, Ordering::SeqCst);
    assert_eq!(rig.wait(id).1, pattern(4096, 1));
}

/// A server that was cut off from its storage, and what begins it anew.
struct Renewed {
    server: Arc<Server>,
    /// It helps, but the new one has lost what was not flushed.
    helps: bool,
    renewals: AtomicU64,
}

impl Dial for Renewed {
    fn dial(&self, deadline: Instant) -> Result<OwnedFd, ConnectError> {
        self.server.uri().dial(deadline)
    }

    fn name(&self) -> String {
        "renewed".to_owned()
    }

    fn renew(&self) {
        self.renewals.fetch_add(1, Ordering::SeqCst);
        if self.helps {
            self.server.crash();
            self.server.flush_fails.store(false, Ordering::SeqCst);
            self.server.up();
        }
    }
}

fn open_renewed(server: &Arc<Server>, helps: bool, timeout: Duration) -> (Rig, Arc<Renewed>) {
    let dial = Arc::new(Renewed {
        server: server.clone(),
        helps,
        renewals: AtomicU64::new(0),
    });
    let options = Options {
        errors_are_losses: true,
        ..server.options(timeout)
    };
    (
        Rig::new(NbdOrigin::open(dial.clone(), options).unwrap()),
        dial,
    )
}

#[test]
fn an_error_that_is_a_loss_is_a_pause() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path());
    let (mut rig, dial) = open_renewed(&server, true, LIMIT);
    let data = pattern(4096, 3);
    rig.write(0, &data).unwrap();
    server.flush_fails.store(true, Ordering::SeqCst);
    // Answered with an error, asked again of the next server, after what that one lacks.
    rig.flush().unwrap();
    assert_eq!(dial.renewals.load(Ordering::SeqCst), 1);
    assert!(lock(&server.state).durable[..4096] == data[..]);
    assert_eq!(rig.link().reconnects, 1);
}

#[test]
fn an_error_that_stays_is_one_after_the_limit() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path());
    let (mut rig, dial) = open_renewed(&server, false, Duration::from_millis(700));
    server.flush_fails.store(true, Ordering::SeqCst);
    let begin = Instant::now();
    assert_eq!(rig.flush(), EIO);
    assert!(begin.elapsed() >= Duration::from_millis(700));
    // At growing intervals, not as fast as it can.
    let renewals = dial.renewals.load(Ordering::SeqCst);
    assert!((2..20).contains(&renewals), "{renewals}");
    until("it recovers", || rig.link().connected);
    assert_eq!(rig.write(0, &pattern(4096, 1)), Ok(()));
}

#[test]
fn requests_in_flight_at_a_crash_are_done_once_it_is_back() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path());
    let mut rig = Rig::new(server.open(LIMIT));
    server.hang.store(true, Ordering::SeqCst);
    let data = pattern(4096, 9);
    let ids: Vec<u64> = (0..100)
        .map(|i| rig.submit(OpKind::Write, i * 4096, data.clone(), 4096))
        .collect();
    assert!(rig.waits(ids[0], Duration::from_millis(20)));
    server.crash();
    server.resume();
    server.up();
    for id in ids {
        assert_eq!(rig.wait(id).0, Ok(()));
    }
    let state = lock(&server.state);
    assert!(state.now[..100 * 4096].chunks(4096).all(|b| b == data));
}

#[test]
fn a_limit_on_requests_in_flight_starves_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path());
    let options = Options {
        in_flight_max: 3,
        ..server.options(LIMIT)
    };
    let mut rig = Rig::new(NbdOrigin::open(Arc::new(server.uri()), options).unwrap());
    let ids: Vec<u64> = (0..50)
        .map(|i| rig.submit(OpKind::Write, i * 4096, pattern(4096, i as u8), 4096))
        .collect();
    for id in ids {
        assert_eq!(rig.wait(id).0, Ok(()));
    }
}

#[test]
fn after_the_limit_requests_fail_and_then_recover() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path());
    let mut rig = Rig::new(server.open(Duration::from_millis(700)));
    let data = pattern(4096, 5);
    rig.write(8192, &data).unwrap();
    server.crash();
    let begin = Instant::now();
    assert_eq!(rig.read(0, 4096).0, EIO);
    assert!(begin.elapsed() >= Duration::from_millis(700));
    // From now on nobody waits.
    until("it is said", || rig.link().failing);
    assert_eq!(rig.write(0, &data), EIO);
    assert_eq!(rig.flush(), EIO);
    assert!(rig.link().attempts > 0);
    server.up();
    until("it recovers", || rig.link().connected);
    // The failed write was not done; the answered one is there.
    assert!(rig.read(0, 4096) == (Ok(()), vec![0; 4096]));
    assert!(rig.read(8192, 4096) == (Ok(()), data));
    assert!(!rig.link().failing);
}

#[test]
fn a_server_that_hangs_is_left_after_the_limit() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path());
    let mut rig = Rig::new(server.open(Duration::from_millis(600)));
    server.hang.store(true, Ordering::SeqCst);
    assert_eq!(rig.read(0, 4096).0, EIO);
    // It accepts connections and says nothing: that is no recovery.
    until("it is tried again", || lock(&server.state).accepted > 1);
    assert!(!rig.link().connected);
    assert_eq!(rig.read(0, 4096).0, EIO);
    server.resume();
    server.cut();
    until("it recovers", || rig.link().connected);
    assert_eq!(rig.read(0, 4096).0, Ok(()));
}

/// A server that zeroes slowly is busy, not dead: nothing fails while it answers something.
#[test]
fn a_server_that_is_slow_but_answers_is_not_left() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path());
    let limit = Duration::from_millis(1000);
    let mut rig = Rig::new(server.open(limit));
    server.zeroing_ms.store(50, Ordering::SeqCst);
    let begin = Instant::now();
    let ids: Vec<u64> = (0..50)
        .map(|i| {
            let kind = OpKind::WriteZeroes { punch: true };
            rig.submit(kind, i * 4096, Vec::new(), 4096)
        })
        .collect();
    for id in ids {
        assert_eq!(rig.wait(id).0, Ok(()));
    }
    assert!(begin.elapsed() > 2 * limit, "too fast for this test");
    let link = rig.link();
    assert!(link.connected && link.reconnects == 0, "{link:?}");
    // Silence counts from when an answer is owed, not from the last one before.
    assert!(rig.waits(0, 2 * limit));
    assert_eq!(rig.read(0, 4096).0, Ok(()));
    assert_eq!(rig.link().reconnects, 0);
    server.hang.store(true, Ordering::SeqCst);
    assert_eq!(rig.read(0, 4096).0, EIO);
    server.resume();
}

#[test]
fn in_a_hurry_nobody_waits() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path());
    let mut rig = Rig::new(server.open(LIMIT));
    server.crash();
    let id = rig.submit(OpKind::Read, 0, Vec::new(), 4096);
    assert!(rig.waits(id, Duration::from_millis(20)));
    rig.device().as_remote().unwrap().hurry();
    assert_eq!(rig.wait(id).0, EIO);
}

/// Closing flushes what was answered.
#[test]
fn the_last_flush_is_ours() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path());
    let mut rig = Rig::new(server.open(LIMIT));
    let data = pattern(4096, 4);
    rig.write(0, &data).unwrap();
    drop(rig);
    assert!(lock(&server.state).durable[..4096] == data[..]);
}

/// Storage that has shut us out is left for good: the process before it is ended, nothing is sent again,
/// not even when it would be taken.
#[test]
fn who_is_shut_out_stays_out() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path());
    let dial = Arc::new(Renewed {
        server: server.clone(),
        helps: false,
        renewals: AtomicU64::new(0),
    });
    let options = Options {
        errors_are_losses: true,
        shutdown_is_fencing: true,
        ..server.options(LIMIT)
    };
    let mut rig = Rig::new(NbdOrigin::open(dial.clone(), options).unwrap());
    let out = Err(IoError::SHUT_OUT);
    rig.write(0, &pattern(4096, 3)).unwrap();
    server.flush_error.store(108, Ordering::SeqCst);
    server.flush_fails.store(true, Ordering::SeqCst);
    assert_eq!(rig.flush(), out);
    until("it is seen", || rig.link().fenced);
    until("its process is ended", || {
        dial.renewals.load(Ordering::SeqCst) == 1
    });
    server.flush_fails.store(false, Ordering::SeqCst);
    let writes = server.writes.load(Ordering::SeqCst);
    let accepted = lock(&server.state).accepted;
    for _ in 0..3 {
        assert_eq!(rig.write(8192, &pattern(4096, 4)), out);
        assert_eq!(rig.read(0, 4096).0, out);
        assert_eq!(rig.flush(), out);
    }
    assert!(rig.device().refresh_size().is_err());
    drop(rig);
    assert_eq!(server.writes.load(Ordering::SeqCst), writes);
    assert_eq!(lock(&server.state).accepted, accepted);
}

/// A server that says so of itself, again and again, is not asked as fast as it can answer.
#[test]
fn a_server_that_goes_on_shutting_down_is_asked_at_growing_intervals() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path());
    let mut rig = Rig::new(server.open(Duration::from_millis(700)));
    server.flush_error.store(108, Ordering::SeqCst);
    server.flush_fails.store(true, Ordering::SeqCst);
    assert_eq!(rig.flush(), EIO);
    let accepted = lock(&server.state).accepted;
    assert!((2..20).contains(&accepted), "{accepted}");
    server.flush_fails.store(false, Ordering::SeqCst);
    until("it recovers", || rig.link().connected);
    assert_eq!(rig.write(0, &pattern(4096, 1)), Ok(()));
    assert_eq!(rig.flush(), Ok(()));
}

/// A server that sends a byte of its answer now and then is as silent as one that hangs.
#[test]
fn dribbled_answer_fails_after_limit() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path());
    let mut rig = Rig::new(server.open(Duration::from_millis(500)));
    server.dribble.store(true, Ordering::SeqCst);
    // The whole answer would take three minutes.
    assert_eq!(rig.read(0, 4096).0, EIO);
    assert!(rig.link().reason.is_some());
    server.dribble.store(false, Ordering::SeqCst);
    until("the server is used again", || rig.link().connected);
    assert_eq!(rig.read(0, 4096).0, Ok(()));
}
