//! What of an origin is durable.
//!
//! Writes that an origin has answered are counted, and a flush covers those that were answered before it
//! was submitted. So "its first n writes are durable" says all there is to say, and whoever waits for
//! durability waits for a number. One flush is in flight at a time; whoever it does not cover waits for the
//! next.

use crate::ids::ReqId;
use hearth_io::IoError;

/// First wait after a flush failed before one that no guest waits for is tried again.
const BACKOFF_NS: u64 = 20_000_000;
/// How often that wait doubles: to 1.28 s, so that a stop with a time limit still gets its tries.
const BACKOFF_DOUBLINGS: u32 = 6;

/// Who waits for a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SyncWaiter {
    /// A client's flush.
    Flush(ReqId),
    /// A client's write that is to be durable: of what it wrote before, its failure says nothing.
    Fua(ReqId),
    Destage,
    Intents,
    Nobody,
}

/// What became of a wish to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// It is durable already.
    Over,
    /// A flush in flight, or the next one, ends it.
    Begun,
}

/// Flush bookkeeping of an origin.
#[derive(Debug, Default)]
pub(crate) struct OriginSync {
    /// Writes answered.
    completed: u64,
    /// Of these, known to be durable.
    durable: u64,
    /// `completed` when a client last wrote past the cache: what its flush must cover.
    guest: u64,
    /// Up to which write a client was told that its flush failed: what becomes of those is no surprise to it.
    told: u64,
    /// Nobody can be told anything any more.
    clients_left: bool,
    /// `completed` when the origin was last written without an intent (the cache was off, or an
    /// earlier run of the daemon did): until that is durable, nothing read from the origin may
    /// be cached, or a power cut could take it from the origin and leave it on flash.
    unguarded: u64,
    /// As `completed` was when the origin was last written past a copy on flash that is written no
    /// more. Until that is durable, the copy may still be the only one that survives a power cut.
    superseded: u64,
    /// A flush is in flight and will cover this many.
    inflight: Option<u64>,
    /// Who waits for which count.
    waiters: Vec<(u64, SyncWaiter)>,
    /// Flushes that failed, in a row.
    failures: u32,
    /// Why the last one did, if it failed.
    pub error: Option<IoError>,
    /// No flush that nobody asked for before this time.
    not_before_ns: u64,
}

impl OriginSync {
    pub fn completed(&self) -> u64 {
        self.completed
    }

    pub fn durable(&self) -> u64 {
        self.durable
    }

    /// Up to which write the origin must be durable for a client's flush.
    pub fn guest(&self) -> u64 {
        self.guest
    }

    /// Up to which write it must be durable before anything read from it may be cached.
    pub fn unguarded(&self) -> u64 {
        self.unguarded
    }

    /// The destager's write was answered.
    pub fn destaged(&mut self) {
        self.completed += 1;
    }

    /// A client's write was answered, `guarded` by an intent or not; returns its number.
    pub fn wrote(&mut self, guarded: bool) -> u64 {
        self.completed += 1;
        self.guest = self.completed;
        if !guarded {
            self.unguarded = self.completed;
        }
        self.completed
    }

    /// That write took the place of what is dirty on flash that is written no more.
    pub fn supersedes(&mut self) {
        self.superseded = self.completed;
    }

    /// True if the origin durably has everything that took the place of a copy on flash that is written no
    /// more.
    pub fn is_superseded_durably(&self) -> bool {
        self.durable >= self.superseded
    }

    /// The origin was opened anew, and nobody knows whether what an earlier run wrote is durable: the first
    /// flush must reach it, whether or not anything is written before.
    pub fn opened_unknown(&mut self) {
        self.wrote(false);
    }

    /// The origin was opened anew, and flushed. Nothing is written to one that is not attached: that covers
    /// all.
    pub fn opened_flushed(&mut self) {
        self.durable = self.completed;
    }

    /// The log tells of intents that an earlier run left open.
    pub fn restore(&mut self) {
        self.completed = self.completed.max(1);
    }

    /// Intents say nothing any more of what was written so far.
    pub fn unguard(&mut self) {
        self.unguarded = self.completed;
    }

    /// True if everything that was written to the origin without an intent is durable there.
    pub fn is_guarded(&self) -> bool {
        self.durable >= self.unguarded
    }

    /// Clients were cut off: what fails from here on none of them hears of, and when they come again they ask anew.
    pub fn clients_have_left(&mut self) {
        self.clients_left = true;
    }

    fn is_told(&mut self, upto: u64) {
        if !self.clients_left {
            self.told = self.told.max(upto);
        }
    }

    /// True if clients know of all that they wrote past the cache that it is durable, or that it may be lost.
    pub fn is_guest_told(&self) -> bool {
        self.durable.max(self.told) >= self.guest
    }

    /// A client's flush fails, and the origin is not asked any more.
    pub fn flush_refused(&mut self) {
        self.is_told(self.guest);
    }

    /// True if everything that was written to the origin is durable there.
    pub fn is_durable(&self) -> bool {
        self.durable >= self.completed
    }

    pub fn is_flushing(&self) -> bool {
        self.inflight.is_some()
    }

    /// The last flush failed, and it is too early for another one that no guest waits for.
    pub fn backing_off(&self, now: u64) -> bool {
        self.failures > 0 && now < self.not_before_ns
    }

    /// Whoever asks has perhaps just put the origin right.
    pub fn try_at_once(&mut self) {
        self.not_before_ns = 0;
    }

    /// Waits until the first `target` writes are durable.
    pub fn wait(&mut self, target: u64, who: SyncWaiter) -> Wait {
        if self.durable >= target {
            return Wait::Over;
        }
        self.waiters.push((target, who));
        Wait::Begun
    }

    pub fn waiters(&self) -> impl Iterator<Item = SyncWaiter> {
        self.waiters.iter().map(|(_, who)| *who)
    }

    /// Nobody waits any more: returns who did.
    pub fn take_waiters(&mut self) -> Vec<SyncWaiter> {
        let waiters = std::mem::take(&mut self.waiters);
        waiters.into_iter().map(|(_, who)| who).collect()
    }

    /// Begins a flush, unless one is in flight: how many writes it covers.
    pub fn begin_flush(&mut self) -> Option<u64> {
        if self.inflight.is_some() {
            return None;
        }
        self.inflight = Some(self.completed);
        self.inflight
    }

    /// The flush in flight has ended: the first `covers` writes are durable, or with an error nothing is
    /// known. Returns who waited for no more than that; after an error that is everybody.
    pub fn end_flush(&mut self, covers: u64, error: Option<IoError>, now: u64) -> Vec<SyncWaiter> {
        self.inflight = None;
        self.error = error;
        if error.is_some() {
            self.not_before_ns = now + (BACKOFF_NS << self.failures.min(BACKOFF_DOUBLINGS));
            self.failures += 1;
            let of_clients = self.waiters.iter();
            let of_clients = of_clients.filter(|(_, who)| matches!(who, SyncWaiter::Flush(_)));
            let told = of_clients.map(|(target, _)| *target).max();
            self.is_told(told.unwrap_or(0));
            return self.take_waiters();
        }
        self.failures = 0;
        self.durable = self.durable.max(covers);
        let waiters = std::mem::take(&mut self.waiters);
        let (ready, rest) = waiters
            .into_iter()
            .partition(|(target, _)| *target <= covers);
        self.waiters = rest;
        let ready: Vec<(u64, SyncWaiter)> = ready;
        ready.into_iter().map(|(_, who)| who).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(n: usize) -> SyncWaiter {
        SyncWaiter::Flush(ReqId::new(n, 0))
    }

    #[test]
    fn a_flush_covers_what_was_answered_before_it_began() {
        let mut sync = OriginSync::default();
        let first = sync.wrote(true);
        assert_eq!(sync.wait(first, request(1)), Wait::Begun);
        let covers = sync.begin_flush().expect("none is in flight");
        let second = sync.wrote(true);
        assert_eq!(sync.wait(second, request(2)), Wait::Begun);
        assert_eq!(sync.begin_flush(), None);
        assert_eq!(sync.end_flush(covers, None, 0), [request(1)]);
        assert_eq!(sync.wait(first, request(3)), Wait::Over);
        assert!(!sync.is_durable());
        let covers = sync.begin_flush().expect("the other one has ended");
        assert_eq!(sync.end_flush(covers, None, 0), [request(2)]);
        assert!(sync.is_durable() && sync.waiters().count() == 0);
    }

    #[test]
    fn a_client_is_told_by_a_flush_of_its_own_that_fails() {
        let mut sync = OriginSync::default();
        let write = sync.wrote(false);
        assert_eq!(sync.wait(write, SyncWaiter::Nobody), Wait::Begun);
        let covers = sync.begin_flush().expect("none is under way");
        sync.end_flush(covers, Some(IoError::Os(5)), 1);
        assert!(!sync.is_guest_told(), "nobody asked");
        let one = SyncWaiter::Fua(ReqId::new(1, 0));
        assert_eq!(sync.wait(write, one), Wait::Begun);
        let covers = sync.begin_flush().expect("none is under way");
        sync.end_flush(covers, Some(IoError::Os(5)), 1);
        assert!(!sync.is_guest_told(), "only of that write");
        assert_eq!(sync.wait(write, request(1)), Wait::Begun);
        let covers = sync.begin_flush().expect("none is under way");
        sync.end_flush(covers, Some(IoError::Os(5)), 2);
        assert!(sync.is_guest_told() && !sync.is_durable());
        sync.wrote(true);
        assert!(!sync.is_guest_told(), "not of what came later");
        sync.flush_refused();
        assert!(sync.is_guest_told());
        sync.wrote(true);
        sync.clients_have_left();
        sync.flush_refused();
        assert!(!sync.is_guest_told(), "nobody heard it");
    }

    #[test]
    fn after_an_error_nothing_is_durable_and_the_next_try_waits_longer_each_time() {
        let mut sync = OriginSync::default();
        let written = sync.wrote(true);
        let mut waits = Vec::new();
        for _ in 0..8 {
            sync.wait(written, SyncWaiter::Nobody);
            sync.begin_flush();
            let all = sync.end_flush(written, Some(IoError::Os(5)), 0);
            assert_eq!(all, [SyncWaiter::Nobody]);
            assert!(!sync.is_durable());
            let over = (0..1000u64).find(|n| !sync.backing_off(n * BACKOFF_NS));
            waits.push(over.expect("a wait that ends"));
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64, 64]);
        sync.try_at_once();
        assert!(!sync.backing_off(0));
        sync.begin_flush();
        sync.end_flush(written, None, 0);
        assert!(sync.is_durable() && sync.error.is_none());
        assert!(sync.is_guest_told());
    }

    #[test]
    fn what_was_written_without_an_intent_keeps_the_cache_waiting() {
        let mut sync = OriginSync::default();
        sync.wrote(true);
        sync.destaged();
        assert!(sync.is_guarded() && !sync.is_durable());
        sync.wrote(false);
        assert!(!sync.is_guarded());
        let covers = sync.begin_flush().expect("none is in flight");
        sync.end_flush(covers, None, 0);
        assert!(sync.is_guarded());
        sync.opened_unknown();
        assert!(!sync.is_guarded() && sync.guest() > sync.durable());
        sync.opened_flushed();
        assert!(sync.is_guarded() && sync.guest() == sync.durable());
    }
}
