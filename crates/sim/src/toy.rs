//! Toy engines: one that is right because it caches nothing, and many that break one rule.
//!
//! A simulator that never fails proves nothing. Each [`Flaw`] is a bug a cache could have; the
//! tests assert that each is caught, and that the flawless toy never is.

use crate::runner::{first_failure, run_many, run_seed};
use crate::subject::{Known, Maker, Shape, Subject};
use hearth_engine::api::{
    Completion, DiskConfig, DiskId, Effects, Mode, OriginState, ReqError, ReqOp, Request,
};
use hearth_io::{Class, IoDone, IoOp, Media, OpKind, Target};
use smallvec::SmallVec;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    None,
    AckBeforeWrite,
    SkipFlush,
    FlushHidesError,
    ForgetFua,
    LoseRequest,
    AnswerTwice,
    StaleCache,
    WrongBlock,
    ZeroesForgotten,
    DropSomeWrites,
    SpuriousError,
    BusyTick,
    TouchBuffer,
    PastTheEnd,
    VolatileCacheOnFlash,
    ServePastTheEnd,
}

struct Toy {
    flaw: Flaw,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    disks: BTreeMap<DiskId, DiskConfig>,
    quiescing: bool,
    next: u64,
    running: BTreeMap<u64, Running>,
    waiting: VecDeque<Request>,
    cache: BTreeMap<(DiskId, u64), Vec<u8>>,
    served: u64,
    dropped: BTreeSet<u64>,
}

struct Running {
    request: Request,
    fua: bool,
}

fn overlaps(a: &Request, b: &Request) -> bool {
    a.disk == b.disk && a.offset < b.offset + b.len && b.offset < a.offset + a.len
}

impl Toy {
    fn refusal(&self, s: &State, request: &Request) -> Option<ReqError> {
        let disk = s.disks.get(&request.disk);
        if disk.is_none() {
            return Some(ReqError::NoDisk);
        }
        if s.quiescing {
            return Some(ReqError::Shutdown);
        }
        let past = disk.is_some_and(|d| request.offset + request.len > d.size);
        (past && self.flaw != Flaw::ServePastTheEnd).then_some(ReqError::Invalid)
    }

    fn start(&self, s: &mut State, request: Request, effects: &mut Effects) {
        let size = s.disks.get(&request.disk).map_or(0, |d| d.size);
        let writes = !matches!(request.op, ReqOp::Read | ReqOp::Flush | ReqOp::Prefetch);
        s.served += 1;
        let rare = s.served % 41 == 40;
        if request.op == ReqOp::Prefetch {
            return finish(effects, request, Ok(()));
        }
        if request.op == ReqOp::Flush && self.flaw == Flaw::SkipFlush {
            return finish(effects, request, Ok(()));
        }
        if self.flaw == Flaw::LoseRequest && rare {
            return;
        }
        if self.flaw == Flaw::SpuriousError && rare {
            return finish(effects, request, Err(ReqError::Io));
        }
        let (kind, fua) = match request.op {
            ReqOp::Read => (OpKind::Read, false),
            ReqOp::Write { fua } => (OpKind::Write, fua),
            ReqOp::Discard { fua } | ReqOp::WriteZeroes { fua, .. } => {
                (OpKind::WriteZeroes { punch: true }, fua)
            }
            ReqOp::Flush | ReqOp::Prefetch => (OpKind::Flush, false),
        };
        if self.flaw == Flaw::ZeroesForgotten && matches!(kind, OpKind::WriteZeroes { .. }) {
            return finish(effects, request, Ok(()));
        }
        if self.flaw == Flaw::DropSomeWrites && kind == OpKind::Write && rare {
            return finish(effects, request, Ok(()));
        }
        if self.flaw == Flaw::StaleCache
            && kind == OpKind::Read
            && request.len == 4096
            && let Some(data) = s.cache.get(&(request.disk, request.offset)).cloned()
        {
            let mut request = request;
            if let Some(buf) = &mut request.buf {
                buf.bytes_mut()[..4096].copy_from_slice(&data);
            }
            return finish(effects, request, Ok(()));
        }
        let id = s.next;
        s.next += 1;
        let mut op = IoOp {
            id,
            target: Target::Origin(request.disk),
            kind,
            offset: request.offset,
            len: request.len,
            bufs: SmallVec::new(),
            crcs: SmallVec::new(),
            sums: false,
            class: Class::Foreground,
        };
        if let Some(buf) = &request.buf {
            if kind == OpKind::Read {
                // Whole blocks: a mirror that copies what was read from one leg to another would tear a block.
                let end = (request.offset + request.len)
                    .next_multiple_of(4096)
                    .min(size);
                op.offset -= request.offset % 4096;
                op.len = end - op.offset;
            }
            let sub = buf.sub((op.offset % 4096) as usize, op.len as usize);
            op.bufs.push(sub);
            if self.flaw == Flaw::WrongBlock
                && rare
                && kind == OpKind::Read
                && request.offset >= 4096
            {
                op.offset -= 4096;
            }
            if self.flaw == Flaw::PastTheEnd && rare && kind == OpKind::Write {
                op.offset = size;
            }
        }
        if self.flaw == Flaw::TouchBuffer && rare && kind == OpKind::Write {
            // Changed at the next event, while the device owns it: see `io_done`.
            s.dropped.insert(id);
        }
        effects.ios.push(op);
        if self.flaw == Flaw::AckBeforeWrite && writes {
            let copy = Request::new(
                request.tag,
                request.disk,
                request.op,
                request.offset,
                request.len,
                None,
                0,
            );
            finish(effects, copy, Ok(()));
            s.dropped.insert(id);
        }
        s.running.insert(id, Running { request, fua });
    }

    fn next(&self, s: &mut State, effects: &mut Effects) {
        let mut still = VecDeque::new();
        while let Some(request) = s.waiting.pop_front() {
            let busy = request.op != ReqOp::Flush
                && (s.running.values().any(|r| overlaps(&r.request, &request))
                    || still.iter().any(|r| overlaps(r, &request)));
            if busy {
                still.push_back(request);
            } else {
                self.start(s, request, effects);
            }
        }
        s.waiting = still;
    }
}

fn finish(effects: &mut Effects, request: Request, result: Result<(), ReqError>) {
    effects.completions.push(Completion {
        owner: request.owner,
        tag: request.tag,
        result,
        buf: request.buf,
    });
}

impl Subject for Toy {
    fn attach(&self, config: DiskConfig, _: OriginState) -> Result<(), String> {
        self.state.borrow_mut().disks.insert(config.id, config);
        Ok(())
    }
    fn detach(&self, id: DiskId) -> Result<bool, String> {
        let s = &mut *self.state.borrow_mut();
        let mut open = s.running.values().map(|r| &r.request).chain(&s.waiting);
        if open.any(|request| request.disk == id) {
            return Ok(false);
        }
        s.disks.remove(&id);
        Ok(true)
    }
    fn remove(&self, id: DiskId) -> Result<bool, String> {
        Ok(!self.state.borrow().disks.contains_key(&id))
    }
    fn forget(&self, _: DiskId, _: &mut Effects) -> Result<Option<u64>, String> {
        Ok(Some(0))
    }
    fn set_mode(&self, _: DiskId, _: Mode) -> Result<(), String> {
        Ok(())
    }
    fn set_limits(&self, _: DiskId, _: u64, _: u64) -> Result<(), String> {
        Ok(())
    }
    fn set_size(&self, id: DiskId, size: u64) -> Result<bool, String> {
        if let Some(d) = self.state.borrow_mut().disks.get_mut(&id) {
            d.size = size;
        }
        Ok(true)
    }
    fn drain(&self, _: DiskId, _: bool) -> Result<(), String> {
        Ok(())
    }
    fn clean(&self, _: DiskId) -> bool {
        true
    }
    fn quiesce(&self, on: bool) {
        self.state.borrow_mut().quiescing = on;
    }
    fn idle(&self) -> bool {
        self.state.borrow().running.is_empty()
    }
    fn close(self: Box<Self>, media: &mut dyn Media) -> Result<(), String> {
        media.flush().map_err(|e| e.to_string())
    }
    fn submit(&self, _: u64, requests: &mut Vec<Request>, effects: &mut Effects) {
        let s = &mut *self.state.borrow_mut();
        for request in requests.drain(..) {
            match self.refusal(s, &request) {
                Some(error) => finish(effects, request, Err(error)),
                None => s.waiting.push_back(request),
            }
        }
        self.next(s, effects);
    }
    fn io_done(&self, _: u64, done: &mut Vec<IoDone>, effects: &mut Effects) {
        let s = &mut *self.state.borrow_mut();
        for io in done.drain(..) {
            let Some(mut r) = s.running.remove(&io.op.id) else {
                continue;
            };
            if s.dropped.remove(&io.op.id) && self.flaw == Flaw::AckBeforeWrite {
                continue;
            }
            if self.flaw == Flaw::TouchBuffer {
                for other in s
                    .running
                    .iter_mut()
                    .filter(|(id, _)| s.dropped.contains(id))
                {
                    if let Some(buf) = &mut other.1.request.buf {
                        let at = (other.1.request.offset % 4096) as usize + 8;
                        buf.bytes_mut()[at] ^= 1;
                    }
                }
                s.dropped.clear();
            }
            if self.flaw == Flaw::FlushHidesError && r.request.op == ReqOp::Flush {
                finish(effects, r.request, Ok(()));
                continue;
            }
            if r.fua && io.result.is_ok() && self.flaw != Flaw::ForgetFua {
                r.fua = false;
                let id = s.next;
                s.next += 1;
                effects.ios.push(IoOp {
                    id,
                    target: io.op.target,
                    kind: OpKind::Flush,
                    offset: 0,
                    len: 0,
                    bufs: SmallVec::new(),
                    crcs: SmallVec::new(),
                    sums: false,
                    class: Class::Foreground,
                });
                s.running.insert(id, r);
                continue;
            }
            if self.flaw == Flaw::StaleCache
                && r.request.op == ReqOp::Read
                && r.request.len == 4096
                && io.result.is_ok()
            {
                let data = io.op.bufs[0].bytes().to_vec();
                s.cache.insert((r.request.disk, r.request.offset), data);
            }
            if self.flaw == Flaw::AnswerTwice && s.served % 17 == 3 {
                let copy = Request::new(r.request.tag, r.request.disk, r.request.op, 0, 0, None, 0);
                finish(effects, copy, Ok(()));
            }
            let full = matches!(io.result, Err(e) if e.is_no_space());
            let error = if full {
                ReqError::NoSpace
            } else {
                ReqError::Io
            };
            finish(effects, r.request, io.result.map_err(|_| error));
        }
        self.next(s, effects);
    }
    fn tick(&self, now_ns: u64, _: &mut Effects) -> Option<u64> {
        (self.flaw == Flaw::BusyTick).then_some(now_ns)
    }
}

struct Factory(Flaw);

impl Maker for Factory {
    fn tune(&self, config: &mut DiskConfig) {
        // A toy does not read, modify and write.
        config.origin_align = 512;
        config.home = hearth_engine::api::Home::Origin;
    }
    fn format(&self, media: &mut dyn Media, _: Shape) -> Result<(), String> {
        media.write_at(0, &[1u8; 4096]).map_err(|e| e.to_string())?;
        if self.0 == Flaw::VolatileCacheOnFlash {
            return Ok(());
        }
        media.flush().map_err(|e| e.to_string())
    }
    fn open(
        &self,
        media: &mut dyn Media,
        _: Shape,
        _: &[Known],
    ) -> Result<Box<dyn Subject>, String> {
        let mut label = [0u8; 4096];
        media.read_at(0, &mut label).map_err(|e| e.to_string())?;
        if label[0] != 1 {
            return Err("not formatted".into());
        }
        media.write_at(4096, &label).map_err(|e| e.to_string())?;
        media.flush().map_err(|e| e.to_string())?;
        Ok(Box::new(Toy {
            flaw: self.0,
            state: RefCell::default(),
        }))
    }
}

/// The profiles of what it can do: it has one device, keeps no order, and asks once.
fn known() -> impl Iterator<Item = &'static str> + Clone {
    let known = |p: &&crate::profile::Profile| {
        p.devices == (1, 1) && !p.ordered && p.overdue == 0 && !p.flash_erased
    };
    crate::profile::PROFILES
        .iter()
        .filter(known)
        .map(|p| p.name)
}

#[test]
fn the_flawless_toy_passes_everything() {
    for profile in known() {
        let summary = run_many(1000, 30, 2, profile, &Factory(Flaw::None), &|_, _| {});
        assert!(summary.failures.is_empty(), "{}", summary.failures[0]);
    }
}

#[test]
fn same_seed_same_digest() {
    for (seed, profile) in (0..40).zip(known().cycle()) {
        let digests: Vec<_> = (0..2)
            .map(|_| {
                run_seed(seed, profile, &Factory(Flaw::None))
                    .map(|r| r.digest)
                    .ok()
            })
            .collect();
        assert!(
            digests[0].is_some() && digests[0] == digests[1],
            "seed {seed}: {digests:?}"
        );
    }
    let other = run_seed(1, "crash", &Factory(Flaw::None))
        .map(|r| r.digest)
        .ok();
    assert_ne!(
        other,
        run_seed(2, "crash", &Factory(Flaw::None))
            .map(|r| r.digest)
            .ok()
    );
}

#[test]
fn every_flaw_is_caught() {
    let flaws = [
        Flaw::AckBeforeWrite,
        Flaw::SkipFlush,
        Flaw::ForgetFua,
        Flaw::LoseRequest,
        Flaw::AnswerTwice,
        Flaw::StaleCache,
        Flaw::WrongBlock,
        Flaw::ZeroesForgotten,
        Flaw::DropSomeWrites,
        Flaw::SpuriousError,
        Flaw::BusyTick,
        Flaw::TouchBuffer,
        Flaw::PastTheEnd,
        Flaw::VolatileCacheOnFlash,
        Flaw::ServePastTheEnd,
    ];
    for flaw in flaws {
        let found = known().find_map(|name| first_failure(0, 60, name, &Factory(flaw)));
        assert!(found.is_some(), "{flaw:?} was not caught");
        let text = found.map(|f| f.to_string()).unwrap_or_default();
        assert!(text.contains("--seed"), "{text}");
    }
    let found = first_failure(0, 400, "origin-errors", &Factory(Flaw::FlushHidesError));
    assert!(
        found.is_some(),
        "a flush that ignores its error was not caught"
    );
}
