//! A device that does not answer: after its limit what it was asked counts as failed, and so does all else until it
//! has answered.
//!
//! The kernel gives an operation back when the device, a driver's own limit, or the server behind a mount says so, which may
//! be never. So a driver answers for it ([`IoError::OVERDUE`]) and goes on owning it, with its memory, until the kernel
//! is done with it. What was told may still happen: a write may reach the device at any later moment. Nothing newer may be
//! written there before, or the old would cover it; so as long as a device owes an answer, whatever it is asked fails at
//! once ([`Device::owes`](crate::Device::owes)). To whoever asks, then, the operation failed at the moment at which it really ended.
//!
//! What is in a guest's own memory ([`Buf::foreign`](crate::Buf::foreign)) is not answered for, only counted: the guest would use the memory for
//! something else, and then the device would write to it.

use crate::device::Device;
use crate::helper::lock;
use crate::op::{IoDone, IoError, IoOp};
use crate::sys::now_ns;
use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// How often drivers look, at least: an operation is answered for when its time is over, which they find when they look.
pub(crate) const LOOK_NS: u64 = 500_000_000;

/// How long a device is waited for, and how much it owes beyond that.
#[derive(Debug, Default)]
pub(crate) struct Patience {
    /// Nanoseconds; 0: for ever.
    limit_ns: AtomicU64,
    owed: AtomicU32,
    /// When it last ended anything, to some milliseconds.
    ended_ns: AtomicU64,
}

/// A device that works through a long operation moves at least so many bytes a second.
const SLOWEST_PER_S: u64 = 16 << 20;
/// That something has ended is noted so often: all threads write to that place.
const ENDED_EVERY_NS: u64 = 100_000_000;

impl Patience {
    pub(crate) fn set(&self, limit_ns: u64) {
        self.limit_ns.store(limit_ns, Ordering::Relaxed);
    }

    /// Is it not waited for for ever?
    pub(crate) fn is_limited(&self) -> bool {
        self.limit_ns.load(Ordering::Relaxed) > 0
    }

    pub(crate) fn owes(&self) -> bool {
        // Before an answer for an operation is seen, that the device owes it is.
        self.owed.load(Ordering::Acquire) > 0
    }

    /// An operation of the device with this name is answered for.
    pub(crate) fn note_owed(&self, name: &str) {
        if self.owed.fetch_add(1, Ordering::AcqRel) == 0 {
            tracing::error!(
                "{name} has not answered for {} s: until it does, what it is asked fails",
                self.limit_ns.load(Ordering::Relaxed) / 1_000_000_000
            );
        }
    }

    /// It has ended.
    pub(crate) fn note_paid(&self, name: &str) {
        if self.owed.fetch_sub(1, Ordering::AcqRel) == 1 {
            tracing::warn!("{name} has answered what it was asked");
        }
    }

    /// Something has ended.
    pub(crate) fn note_ended(&self, now_ns: u64) {
        if now_ns.saturating_sub(self.ended_ns.load(Ordering::Relaxed)) > ENDED_EVERY_NS {
            self.ended_ns.store(now_ns, Ordering::Relaxed);
        }
    }

    /// From when on an operation of so many bytes that was begun then is to be answered for, if the device ends nothing before.
    /// None: never.
    pub(crate) fn over_at(&self, begun_ns: u64, len: u64) -> Option<u64> {
        let limit = self.limit_ns.load(Ordering::Relaxed);
        let silent = self.ended_ns.load(Ordering::Relaxed).saturating_add(limit);
        let late = begun_ns.saturating_add(longest(limit, len));
        (limit > 0).then(|| late.max(silent).saturating_add(1))
    }
}

/// How long an operation of so many bytes may take.
fn longest(limit_ns: u64, len: u64) -> u64 {
    limit_ns.saturating_add(len / SLOWEST_PER_S * 1_000_000_000)
}

/// Has an operation of so many bytes taken longer than a device is waited for?
pub(crate) fn is_late(limit_ns: u64, took_ns: u64, len: u64) -> bool {
    limit_ns > 0 && took_ns > longest(limit_ns, len)
}

/// The answer for an operation that goes on.
pub(crate) fn answer_for(op: &IoOp, begun_ns: u64, now_ns: u64) -> IoDone {
    op.copy()
        .done(Err(IoError::OVERDUE), now_ns.saturating_sub(begun_ns))
}

/// True if it may be answered for.
pub(crate) fn may_answer(op: &IoOp) -> bool {
    !op.bufs.iter().any(|buf| buf.is_shared())
}

struct Lent {
    op: IoOp,
    device: Arc<Device>,
    /// When a thread began it; 0 before. What waits for a thread is not the device's fault.
    begun_ns: Arc<AtomicU64>,
    told: bool,
}

/// What a driver has given to other threads.
#[derive(Default)]
pub(crate) struct Lending {
    lent: HashMap<u64, Lent>,
    next: u64,
    told: usize,
}

impl Lending {
    /// Something is given away: its number, and where to say that it was begun.
    pub(crate) fn lend(&mut self, op: &IoOp, device: &Arc<Device>) -> (u64, Arc<AtomicU64>) {
        self.next += 1;
        let begun_ns = Arc::new(AtomicU64::new(0));
        let lent = Lent {
            op: op.copy(),
            device: device.clone(),
            begun_ns: begun_ns.clone(),
            told: false,
        };
        self.lent.insert(self.next, lent);
        (self.next, begun_ns)
    }

    /// It came back. True: it was answered for.
    pub(crate) fn is_told(&mut self, number: u64, now_ns: u64) -> bool {
        let Some(lent) = self.lent.remove(&number) else {
            return false;
        };
        lent.device.patience().note_ended(now_ns);
        if !lent.told {
            return false;
        }
        lent.device.patience().note_paid(&lent.device.name());
        self.told -= 1;
        true
    }

    /// How many were answered for, and have not come back.
    pub(crate) fn told(&self) -> usize {
        self.told
    }

    /// Answers for what should have ended by now. When it is to be looked again at the latest.
    pub(crate) fn look(&mut self, now_ns: u64, dones: &mut Vec<IoDone>) -> u64 {
        let mut next_ns = now_ns.saturating_add(LOOK_NS);
        for lent in self.lent.values_mut() {
            let begun_ns = lent.begun_ns.load(Ordering::Acquire);
            if lent.told || begun_ns == 0 {
                continue;
            }
            match lent.device.patience().over_at(begun_ns, lent.op.len) {
                Some(at) if at > now_ns => next_ns = next_ns.min(at),
                Some(_) if may_answer(&lent.op) => {
                    lent.told = true;
                    self.told += 1;
                    lent.device.patience().note_owed(&lent.device.name());
                    dones.push(answer_for(&lent.op, begun_ns, now_ns));
                }
                _ => {}
            }
        }
        next_ns
    }
}

/// Something that a thread does of its own, while another one waits for it only as long as the device is waited for.
pub(crate) struct Errand {
    patience: Arc<Patience>,
    name: String,
    begun_ns: u64,
    state: Mutex<Outcome>,
    ended: Condvar,
}

enum Outcome {
    Open,
    /// It was answered for.
    Told,
    Ended(io::Result<()>),
}

impl Errand {
    pub(crate) fn begin(patience: Arc<Patience>, name: String) -> Arc<Errand> {
        Arc::new(Errand {
            patience,
            name,
            begun_ns: now_ns(),
            state: Mutex::new(Outcome::Open),
            ended: Condvar::new(),
        })
    }

    /// It has ended.
    pub(crate) fn end(&self, result: io::Result<()>) {
        self.patience.note_ended(now_ns());
        let mut state = lock(&self.state);
        if matches!(*state, Outcome::Told) {
            return self.patience.note_paid(&self.name);
        }
        *state = Outcome::Ended(result);
        drop(state);
        self.ended.notify_all();
    }

    /// Waits for the end of something that is about so many bytes.
    pub(crate) fn wait(&self, len: u64) -> io::Result<()> {
        let mut state = lock(&self.state);
        loop {
            let now_ns = now_ns();
            let over_at = self.patience.over_at(self.begun_ns, len);
            match std::mem::replace(&mut *state, Outcome::Open) {
                Outcome::Ended(result) => return result,
                _ if over_at.is_some_and(|at| now_ns >= at) => {
                    *state = Outcome::Told;
                    self.patience.note_owed(&self.name);
                    return Err(io::Error::from_raw_os_error(libc::ETIMEDOUT));
                }
                _ => {}
            }
            let left_ns = over_at.map_or(LOOK_NS, |at| at - now_ns).min(LOOK_NS);
            let waited = (self.ended).wait_timeout(state, Duration::from_nanos(left_ns));
            state = waited.unwrap_or_else(|e| e.into_inner()).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::{BlockFile, OpenMode};
    use crate::op::{Class, OpKind, Target};
    use smallvec::SmallVec;

    fn op() -> IoOp {
        IoOp {
            id: 1,
            target: Target::Flash(0),
            kind: OpKind::Flush,
            offset: 0,
            len: 0,
            bufs: SmallVec::new(),
            crcs: SmallVec::new(),
            sums: false,
            class: Class::Foreground,
        }
    }

    #[test]
    fn what_is_late_is_answered_once_and_the_device_takes_nothing_until_it_has_ended() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        file.as_file().set_len(4096).expect("it grows");
        let file = BlockFile::open(file.path(), OpenMode::default()).expect("it opens");
        let device = Arc::new(Device::new(file));
        device.set_patience(std::time::Duration::from_nanos(100));
        let (mut lending, mut dones) = (Lending::default(), Vec::new());
        let (number, begun_ns) = lending.lend(&op(), &device);
        let often = |now_ns| now_ns + LOOK_NS;
        assert_eq!(lending.look(1_000, &mut dones), often(1_000));
        assert!(dones.is_empty(), "no thread has begun it");
        begun_ns.store(1_000, Ordering::Release);
        // It is not left to chance when somebody looks: at the moment from which on it is late.
        assert_eq!(lending.look(1_050, &mut dones), 1_101);
        assert_eq!(lending.look(1_100, &mut dones), 1_101);
        assert!(dones.is_empty() && !device.owes(), "not late yet");
        assert_eq!(lending.look(1_101, &mut dones), often(1_101));
        assert_eq!(lending.look(2_000, &mut dones), often(2_000));
        assert_eq!(dones.len(), 1);
        assert!(dones[0].is_overdue() && device.owes());
        assert!(dones[0].goes_on(), "its memory is not free");
        assert_eq!(device.admit(&op()), Err(IoError::SILENT));
        assert!(device.read_at(0, &mut [0; 512]).is_err());
        assert!(lending.is_told(number, 2_000), "nobody hears of its end");
        assert!(!device.owes() && lending.told() == 0);
        assert_eq!(device.admit(&op()), Ok(()));
        let (number, _) = lending.lend(&op(), &device);
        assert!(!lending.is_told(number, 2_000), "it ended in time");
    }

    #[test]
    fn a_device_that_ended_something_is_waited_for_from_then_on() {
        let patience = Patience::default();
        assert_eq!(patience.over_at(1_000, 0), None, "for ever");
        patience.set(500_000_000);
        assert_eq!(patience.over_at(1_000, 0), Some(500_001_001));
        let long = 2 * SLOWEST_PER_S;
        assert_eq!(patience.over_at(1_000, long), Some(2_500_001_001));
        patience.note_ended(300_000_000);
        assert_eq!(patience.over_at(1_000, 0), Some(800_000_001));
        assert_eq!(patience.over_at(1_000, long), Some(2_500_001_001));
    }

    #[test]
    fn what_is_read_within_a_limit_is_what_was_written_or_an_error() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        file.as_file().set_len(8192).expect("it grows");
        let file = BlockFile::open(file.path(), OpenMode::default()).expect("it opens");
        let device = Device::new(file);
        device.set_patience(std::time::Duration::from_secs(60));
        device.write_at(4096, &[7; 4096]).expect("it is written");
        let mut data = [1; 8192];
        device.read_at(0, &mut data).expect("it is read");
        assert!(data[..4096] == [0; 4096] && data[4096..] == [7; 4096]);
        let past = device.read_at(4096, &mut data).expect_err("past its end");
        assert_eq!(past.kind(), io::ErrorKind::UnexpectedEof);
        assert!(!device.owes());
    }

    #[test]
    fn who_waits_for_a_thread_waits_only_so_long_and_the_rest_fails_until_it_has_ended() {
        let patience = Arc::new(Patience::default());
        patience.set(1_000_000);
        let errand = Errand::begin(patience.clone(), "a device".to_owned());
        let late = errand.wait(0).expect_err("nobody ends it");
        assert_eq!(late.raw_os_error(), Some(libc::ETIMEDOUT));
        assert!(patience.owes());
        errand.end(Ok(()));
        assert!(!patience.owes());
        // One that ends is answered as it ended.
        patience.set(60_000_000_000);
        let errand = Errand::begin(patience.clone(), "a device".to_owned());
        let ends = errand.clone();
        let thread = std::thread::spawn(move || ends.end(Err(io::ErrorKind::WriteZero.into())));
        let ended = errand.wait(0).expect_err("so it ended");
        assert_eq!(ended.kind(), io::ErrorKind::WriteZero);
        thread.join().expect("no panic");
        assert!(!patience.owes());
    }
}
