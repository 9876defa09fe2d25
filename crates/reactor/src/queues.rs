//! The queues of one data thread: what is in flight for each, and when it may go.

use crate::budget::Room;
use crate::queue::{Queue, QueueId};
use crate::session::SessionCx;
use crate::tags::Tag;
use crate::worker::{LARGE, Worker};
use hearth_engine::api::Completion;
use hearth_io::has_room;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

/// Marks the owner of a tag as a queue.
pub(crate) const QUEUE: u32 = 1 << 31;
const WATCH: u64 = 4 << 32;
const SIGNAL: u64 = 5 << 32;
const RING: u64 = 6 << 32;
/// How long the write of an eventfd may take where nobody waits for the client any more. One that
/// is not full takes it at once; one that is full, and blocks, would never.
const CALL_NS: u64 = 1_000_000_000;
/// Single calls under way on one thread. Each takes a moment, unless its client means harm.
const RINGS_MAX: usize = 256;

/// One queue and what the kernel and the engine have of it.
struct Place {
    id: QueueId,
    queue: Box<dyn Queue>,
    /// Requests the engine has not completed.
    requests: usize,
    /// Queued for a look in this round.
    dirty: bool,
    /// The kernel watches the doorbell.
    watching: bool,
    /// The client's eventfd, while the kernel writes it.
    signalling: Option<Arc<OwnedFd>>,
    /// Ring it once more after that.
    signal_next: Option<Arc<OwnedFd>>,
    /// When that write is given up; set once it is all that is left of a queue that goes.
    cancel_ns: Option<u64>,
    /// The write was given up: no other follows.
    given_up: bool,
    /// Who waits for it to go.
    leaving: Option<Vec<SyncSender<()>>>,
}

/// A call that belongs to no queue.
struct Ring {
    /// Kept open until the kernel is done with it.
    _fd: Arc<OwnedFd>,
    /// When it is given up; none if it was.
    cancel_ns: Option<u64>,
}

/// All queues of a thread.
#[derive(Default)]
pub(crate) struct Queues {
    places: Vec<Option<Box<Place>>>,
    free: Vec<u32>,
    dirty: Vec<u32>,
    rings: Vec<Option<Ring>>,
    /// Nothing is given up before.
    next_cancel: Option<u64>,
}

impl Queues {
    /// When a call is next to be given up.
    pub(crate) fn next_cancel(&self) -> Option<u64> {
        self.next_cancel
    }

    fn cancel_at(&mut self, at: u64) -> Option<u64> {
        self.next_cancel = Some(self.next_cancel.map_or(at, |next| next.min(at)));
        Some(at)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.free.len() == self.places.len()
    }

    fn get(&mut self, index: u32) -> Option<&mut Place> {
        self.places.get_mut(index as usize)?.as_deref_mut()
    }

    fn mark(&mut self, index: u32) {
        if let Some(Some(place)) = self.places.get_mut(index as usize)
            && !place.dirty
        {
            place.dirty = true;
            self.dirty.push(index);
        }
    }

    /// Marks queues that have requests waiting; true if any.
    pub(crate) fn look(&mut self) -> bool {
        let mut any = false;
        for index in 0..self.places.len() as u32 {
            if self.get(index).is_some_and(|p| p.queue.has_work()) {
                self.mark(index);
                any = true;
            }
        }
        any
    }
}

impl Worker {
    pub(crate) fn add_queue(&mut self, id: QueueId, mut queue: Box<dyn Queue>) {
        if self.is_stopping() {
            queue.shutdown();
        }
        let index = self.queues.free.pop().unwrap_or_else(|| {
            self.queues.places.push(None);
            (self.queues.places.len() - 1) as u32
        });
        let doorbell = queue.doorbell();
        let leaving = self.is_stopping().then(Vec::new);
        self.queues.places[index as usize] = Some(Box::new(Place {
            id,
            queue,
            requests: 0,
            dirty: false,
            watching: true,
            signalling: None,
            signal_next: None,
            cancel_ns: None,
            given_up: false,
            leaving,
        }));
        self.proactor.watch(WATCH | u64::from(index), doorbell);
        self.queues.mark(index);
    }

    /// Lets a queue go once everything in flight has ended; `told` is dropped then.
    pub(crate) fn remove_queue(&mut self, id: QueueId, told: SyncSender<()>) {
        let found = self
            .queues
            .places
            .iter()
            .position(|p| p.as_ref().is_some_and(|p| p.id == id));
        if let Some(index) = found {
            self.retire(index as u32, Some(told));
        }
    }

    pub(crate) fn stop_queues(&mut self) {
        for index in 0..self.queues.places.len() as u32 {
            self.retire(index, None);
        }
    }

    fn retire(&mut self, index: u32, told: Option<SyncSender<()>>) {
        let Some(place) = self.queues.get(index) else {
            return;
        };
        place.queue.shutdown();
        if place.leaving.is_none() && place.watching {
            self.proactor.cancel(WATCH | u64::from(index));
        }
        if let Some(place) = self.queues.get(index) {
            place.leaving.get_or_insert_default().extend(told);
        }
        self.queues.mark(index);
    }

    pub(crate) fn rung(&mut self, token: u64, result: io::Result<()>) {
        let index = token as u32;
        if let Some(place) = self.queues.get(index)
            && let Err(e) = result
        {
            place.watching = false;
            if place.leaving.is_none() {
                tracing::error!("a queue's doorbell cannot be watched ({e}); it stops");
                place.queue.shutdown();
            }
        }
        self.queues.mark(index);
    }

    /// Rings an eventfd once.
    pub(crate) fn ring(&mut self, fd: Arc<OwnedFd>) {
        let raw = fd.as_raw_fd();
        let free = self.queues.rings.iter().position(Option::is_none);
        let index = free.unwrap_or(self.queues.rings.len());
        // Who has filled the counter has cause enough to look.
        if index >= RINGS_MAX || !has_room(raw) {
            return;
        }
        let cancel_ns = self.queues.cancel_at(self.now + CALL_NS);
        let ring = Some(Ring { _fd: fd, cancel_ns });
        match self.queues.rings.get_mut(index) {
            Some(place) => *place = ring,
            None => self.queues.rings.push(ring),
        }
        self.proactor.signal(RING | index as u64, raw);
    }

    /// Gives up calls that take too long: a client may have filled its eventfd's counter and made
    /// it blocking, and the kernel would wait for ever, and the queue with it.
    pub(crate) fn cancel_calls(&mut self) {
        if self.queues.next_cancel.is_none_or(|at| self.now < at) {
            return;
        }
        let (now, mut next, mut over) = (self.now, None::<u64>, Vec::new());
        let mut look = |due: &mut Option<u64>, token: u64| match *due {
            Some(at) if at <= now => {
                *due = None;
                over.push(token);
            }
            Some(at) => next = Some(next.map_or(at, |n| n.min(at))),
            None => {}
        };
        for (index, place) in self.queues.places.iter_mut().enumerate() {
            if let Some(place) = place {
                let before = place.cancel_ns;
                look(&mut place.cancel_ns, SIGNAL | index as u64);
                place.given_up |= before.is_some() && place.cancel_ns.is_none();
            }
        }
        for (index, ring) in self.queues.rings.iter_mut().enumerate() {
            if let Some(ring) = ring {
                look(&mut ring.cancel_ns, RING | index as u64);
            }
        }
        self.queues.next_cancel = next;
        for token in over {
            self.proactor.cancel(token);
        }
    }

    pub(crate) fn signalled(&mut self, token: u64) {
        let index = token as u32;
        if token & !u64::from(u32::MAX) == RING {
            if let Some(ring) = self.queues.rings.get_mut(index as usize) {
                *ring = None;
            }
            return;
        }
        if let Some(place) = self.queues.get(index) {
            let next = place.signal_next.take();
            place.signalling = next.filter(|_| !place.given_up);
            if let Some(fd) = &place.signalling {
                let fd = fd.as_raw_fd();
                self.proactor.signal(SIGNAL | u64::from(index), fd);
            } else if place.leaving.is_some() {
                self.queues.mark(index);
            }
        }
    }

    /// Calls a queue and takes the requests it made.
    fn call_queue<T>(
        &mut self,
        index: u32,
        f: impl FnOnce(&mut Place, &mut SessionCx<'_>) -> T,
    ) -> Option<T> {
        let place = self.queues.places.get_mut(index as usize)?.as_deref_mut()?;
        let before = self.requests.len();
        let mut cx = SessionCx {
            requests: &mut self.requests,
            bufs: &mut self.bufs,
            now_ns: self.now,
            // A queue bounds its copies itself.
            room: Room::AMPLE,
        };
        let out = f(place, &mut cx);
        for request in &mut self.requests[before..] {
            // A guest's own memory is no memory of ours.
            let budget = match &request.buf {
                Some(b) if b.len() > LARGE && !b.is_shared() => b.len() as u64,
                _ => 0,
            };
            self.shared.hold(budget);
            place.requests += 1;
            request.owner = self.index;
            request.tag = self.tags.put(Tag::new(QUEUE | index, budget, request));
        }
        if let Some(watch) = &mut self.watch
            && let Some(new @ [_, ..]) = self.requests.get(before..)
        {
            watch.arrived(new);
        }
        Some(out)
    }

    pub(crate) fn deliver_to_queue(&mut self, index: u32, completion: Completion) {
        self.call_queue(index, |place, cx| {
            place.requests = place.requests.saturating_sub(1);
            place.queue.completed(completion, cx);
        });
        self.queues.mark(index);
    }

    /// Takes requests out of queues something happened to; true if some have more.
    pub(crate) fn pump_queues(&mut self) -> bool {
        let mut more = false;
        for i in 0..self.queues.dirty.len() {
            let index = self.queues.dirty[i];
            more |= self
                .call_queue(index, |place, cx| place.queue.pump(cx))
                .unwrap_or(false);
        }
        more
    }

    /// Tells clients what the round completed, and lets go what is finished. If the thread is
    /// about to sleep (`sleepy`), clients are asked to ring; true if one had requests already.
    pub(crate) fn settle_queues(&mut self, sleepy: bool) -> bool {
        if self.queues.dirty.is_empty() {
            return false;
        }
        let mut dirty = std::mem::take(&mut self.queues.dirty);
        let (mut more, now, mut due) = (false, self.now, None);
        dirty.retain(|&index| {
            let Some(place) = self.queues.get(index) else {
                return false;
            };
            if let Some(fd) = place.queue.publish() {
                if place.signalling.is_some() {
                    place.signal_next = Some(fd);
                } else {
                    let raw = fd.as_raw_fd();
                    place.signalling = Some(fd);
                    self.proactor.signal(SIGNAL | u64::from(index), raw);
                }
            }
            let Some(place) = self.queues.get(index) else {
                return false;
            };
            let idle = place.leaving.is_some() && place.requests == 0 && !place.watching;
            let over = idle && place.signalling.is_none();
            if idle && !over && place.cancel_ns.is_none() && !place.given_up {
                place.cancel_ns = Some(now + CALL_NS);
                due.get_or_insert(now + CALL_NS);
            }
            if over {
                self.queues.places[index as usize] = None;
                self.queues.free.push(index);
                return false;
            }
            let takes = place.leaving.is_none() && !place.queue.is_broken();
            // It stays here until it has asked to be rung with nothing left to do.
            let early = takes && sleepy && place.queue.arm();
            more |= early;
            place.dirty = takes && (early || !sleepy);
            place.dirty
        });
        dirty.append(&mut self.queues.dirty);
        self.queues.dirty = dirty;
        if let Some(at) = due {
            self.queues.cancel_at(at);
        }
        more
    }
}
