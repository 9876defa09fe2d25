//! Requests taken through their states by hand, one operation after the other.

use crate::api::{Effects, FlashFault, Mode, ReqError, ReqOp, Request};
use crate::cache::index::Key;
use crate::cache::stage::policy_key;
use crate::core::{Core, EngineOptions};
use crate::engine::{Engine, KnownDisk};
use crate::ids::ReqId;
use crate::request::answer::{Answer, Asker};
use crate::request::read::{CleanCopy, padded_sums};
use crate::request::state::{Flush, State, Step};
use hearth_format::{DeviceEntry, Layout, Superblock, Uuid};
use hearth_io::checksum::crc32c;
use hearth_io::{BLOCK, Buf, IoError, IoOp, OpKind, Target};
use hearth_policy::cleaning::Why;
use std::mem::take;

const DISK: u16 = 1;
const FLASH: Target = Target::Flash(0);
const ORIGIN: Target = Target::Origin(DISK);
const EIO: IoError = IoError::Os(5);
const ENOSPC: IoError = IoError::Os(28);

/// An engine with one disk, and what it has asked for that was not carried out yet.
struct Rig {
    core: Core,
    fx: Effects,
    now: u64,
}

impl Rig {
    fn new(mode: Mode) -> Rig {
        let layout = Layout::for_device(16 << 20, 256).expect("it fits");
        let uuid = Uuid::from_u128(1);
        let sb = Superblock::new(layout, uuid, uuid, "test", 0);
        let known = KnownDisk {
            id: DISK,
            size: 64 << 20,
            since_seq: 0,
            home: crate::api::Home::Origin,
        };
        let mut core = Engine::blank(sb, None, EngineOptions::default(), &[known]);
        core.flash.log.free = (0..core.flash.log.segments.len() as u32).collect();
        core.flash.log.next_segment_seq = 1;
        let d = core.known_mut(DISK);
        d.attached = true;
        (d.cfg.mode, d.cfg.read_only, d.cfg.origin_align) = (mode, false, 512);
        Rig {
            core,
            fx: Effects::default(),
            now: 1_000_000,
        }
    }

    fn submit(&mut self, r: Request) {
        self.core.submit(r, self.now, &mut self.fx);
        self.settle();
    }

    fn write(&mut self, tag: u64, offset: u64, len: u64, fua: bool) {
        let buf = Buf::zeroed(Request::buffer_len(offset, len) as usize);
        let r = Request::write(tag, DISK, offset, len, fua, &buf, self.now);
        self.submit(r);
    }

    fn flush(&mut self, tag: u64) {
        self.submit(Request::new(tag, DISK, ReqOp::Flush, 0, 0, None, self.now));
    }

    fn settle(&mut self) {
        self.core.settle(self.now, &mut self.fx);
        self.core.check().expect("all counts are right");
    }

    /// Ends an operation that was asked for.
    fn end(&mut self, target: Target, kind: OpKind, result: Result<(), IoError>) {
        let at = |op: &IoOp| op.target == target && op.kind == kind;
        let at = self.fx.ios.iter().position(at);
        let at = at.unwrap_or_else(|| panic!("no {kind:?} of {target:?} in {:?}", self.fx.ios));
        let op = self.fx.ios.remove(at);
        self.now += 1000;
        self.core
            .done(op.done(result, 1000), self.now, &mut self.fx);
        self.settle();
    }

    /// The one request with this tag.
    fn state(&self, tag: u64) -> &State {
        let asker = Asker::Client { owner: 0, tag };
        let mut all = self.core.reqs.iter().map(|(_, req)| req);
        let req = all.find(|req| req.answer.is_to(asker));
        &req.unwrap_or_else(|| panic!("request {tag} was answered"))
            .state
    }

    fn step(&self, tag: u64) -> &Step {
        match self.state(tag) {
            State::Write(write) => &write.step,
            other => panic!("request {tag} is no write, but {other:?}"),
        }
    }

    /// What was answered since the last call: tag and result.
    fn answers(&mut self) -> Vec<(u64, Result<(), ReqError>)> {
        let answers = take(&mut self.fx.completions).into_iter();
        answers.map(|c| (c.tag, c.result)).collect()
    }

    /// Writes past the cache wait until it is noted that flash failed.
    fn note_failure(&mut self) {
        for _ in 0..2 {
            self.end(FLASH, OpKind::Write, Ok(()));
            self.end(FLASH, OpKind::Flush, Ok(()));
        }
    }
}

#[test]
fn a_write_waits_for_its_range_for_room_and_until_it_is_durable() {
    let mut rig = Rig::new(Mode::WriteBack);
    rig.write(1, 0, 2 * BLOCK, false);
    assert_eq!(rig.step(1), &Step::Appends { pending: 1 });
    rig.write(2, BLOCK, 2 * BLOCK, true);
    rig.write(3, 2 * BLOCK, BLOCK, false);
    assert_eq!(rig.step(2), &Step::WaitsForRange { behind: 1, turn: 1 });
    assert_eq!(rig.step(3), &Step::WaitsForRange { behind: 1, turn: 2 });
    let free = take(&mut rig.core.flash.log.free);
    rig.end(FLASH, OpKind::Write, Ok(()));
    assert_eq!(rig.answers(), [(1, Ok(()))]);
    let (pending, for_runs) = (0, false);
    assert_eq!(rig.step(2), &Step::WaitsForRoom { pending, for_runs });
    rig.core.flash.log.free = free;
    rig.settle();
    assert_eq!(rig.step(2), &Step::Appends { pending: 1 });
    rig.end(FLASH, OpKind::Write, Ok(()));
    assert_eq!(rig.step(2), &Step::WaitsForFlash);
    assert_eq!(rig.answers(), []);
    rig.end(FLASH, OpKind::Flush, Ok(()));
    assert_eq!(rig.answers(), [(2, Ok(()))]);
    rig.end(FLASH, OpKind::Write, Ok(()));
    assert_eq!(rig.answers(), [(3, Ok(()))]);
    assert!(rig.core.reqs.is_empty());
}

#[test]
fn a_write_past_the_cache_waits_for_its_intent_and_the_origins_flush() {
    let mut rig = Rig::new(Mode::WriteThrough);
    rig.write(1, 0, BLOCK, true);
    assert_eq!(rig.step(1), &Step::WaitsForIntent);
    rig.end(FLASH, OpKind::Write, Ok(()));
    assert_eq!(rig.step(1), &Step::WaitsForIntent);
    rig.end(FLASH, OpKind::Flush, Ok(()));
    assert_eq!(rig.step(1), &Step::WritesOrigin { pending: 1 });
    rig.end(ORIGIN, OpKind::Write, Ok(()));
    assert_eq!(rig.step(1), &Step::WaitsForOrigin);
    assert_eq!(rig.answers(), []);
    rig.end(ORIGIN, OpKind::Flush, Ok(()));
    assert_eq!(rig.answers(), [(1, Ok(()))]);
    assert!(rig.core.reqs.is_empty());
}

#[test]
fn a_write_whose_partial_block_cannot_be_read_fails() {
    let mut rig = Rig::new(Mode::WriteBack);
    rig.write(1, 512, 2 * BLOCK, false);
    assert_eq!(rig.step(1), &Step::Merges { pending: 2 });
    rig.end(ORIGIN, OpKind::Read, Err(EIO));
    assert_eq!(rig.answers(), []);
    rig.end(ORIGIN, OpKind::Read, Ok(()));
    assert_eq!(rig.answers(), [(1, Err(ReqError::Io))]);
    assert!(rig.core.reqs.is_empty() && rig.fx.ios.is_empty());
}

#[test]
fn a_write_that_flash_does_not_take_goes_to_the_origin_and_gets_its_error() {
    let mut rig = Rig::new(Mode::WriteBack);
    rig.write(1, 0, BLOCK, false);
    while rig.core.flash.takes_writes() {
        assert!(matches!(rig.step(1), Step::Appends { .. }));
        rig.end(FLASH, OpKind::Write, Err(EIO));
    }
    assert_eq!(rig.step(1), &Step::WaitsForClean);
    rig.note_failure();
    assert_eq!(rig.step(1), &Step::WritesOrigin { pending: 1 });
    rig.end(ORIGIN, OpKind::Write, Err(ENOSPC));
    assert_eq!(rig.answers(), [(1, Err(ReqError::NoSpace))]);
    assert!(rig.core.reqs.is_empty());
}

/// The origin may have got some of it, and what is clean may be kept when the pool goes on without a device.
#[test]
fn a_write_past_flash_that_the_origin_refuses_leaves_no_clean_copy() {
    let mut rig = Rig::new(Mode::WriteBack);
    rig.write(1, 0, 2 * BLOCK, false);
    rig.end(FLASH, OpKind::Write, Ok(()));
    let key = |block| Key::new(DISK, block);
    let slot = rig.core.cache.index.get(key(0)).expect("it is cached");
    rig.core.cache.index.set_clean(slot);
    rig.core.flash.slot_cleaned(slot);
    rig.core.known_mut(DISK).no_longer_dirty(0);
    rig.core.dirty_total -= 1;
    let now = rig.now;
    (rig.core).give_flash_up(FlashFault::Broken, false, now, &mut rig.fx);
    rig.write(2, 0, 2 * BLOCK, false);
    rig.end(ORIGIN, OpKind::Write, Err(EIO));
    assert_eq!(rig.core.cache.index.get(key(0)), None);
    // What is dirty there nobody else has.
    assert!(rig.core.cache.index.get(key(1)).is_some());
}

#[test]
fn a_write_that_flash_does_not_make_durable_fails() {
    let mut rig = Rig::new(Mode::WriteBack);
    rig.write(1, 0, BLOCK, true);
    rig.end(FLASH, OpKind::Write, Ok(()));
    assert_eq!(rig.step(1), &Step::WaitsForFlash);
    rig.end(FLASH, OpKind::Flush, Err(EIO));
    assert_eq!(rig.answers(), [(1, Err(ReqError::Io))]);
    assert!(rig.core.reqs.is_empty());
}

#[test]
fn a_write_whose_intent_flash_does_not_keep_goes_to_the_origin_without() {
    let mut rig = Rig::new(Mode::WriteThrough);
    rig.write(1, 0, BLOCK, false);
    rig.end(FLASH, OpKind::Write, Ok(()));
    assert_eq!(rig.step(1), &Step::WaitsForIntent);
    rig.end(FLASH, OpKind::Flush, Err(EIO));
    assert_eq!(rig.step(1), &Step::WaitsForClean);
    rig.note_failure();
    rig.end(ORIGIN, OpKind::Write, Ok(()));
    assert_eq!(rig.answers(), [(1, Ok(()))]);
    assert!(rig.core.reqs.is_empty());
}

#[test]
fn a_write_that_the_origin_does_not_take_or_keep_fails() {
    for keeps in [false, true] {
        let mut rig = Rig::new(Mode::WriteThrough);
        rig.write(1, 0, BLOCK, true);
        rig.end(FLASH, OpKind::Write, Ok(()));
        rig.end(FLASH, OpKind::Flush, Ok(()));
        let error = if keeps {
            rig.end(ORIGIN, OpKind::Write, Err(ENOSPC));
            ReqError::NoSpace
        } else {
            rig.end(ORIGIN, OpKind::Write, Ok(()));
            rig.end(ORIGIN, OpKind::Flush, Err(EIO));
            ReqError::Io
        };
        assert_eq!(rig.answers(), [(1, Err(error))]);
        assert!(rig.core.reqs.is_empty());
    }
}

#[test]
fn a_write_fails_if_what_it_waits_for_cannot_be_destaged() {
    let mut rig = Rig::new(Mode::WriteBack);
    rig.write(1, 0, BLOCK, false);
    rig.end(FLASH, OpKind::Write, Ok(()));
    assert_eq!(rig.answers(), [(1, Ok(()))]);
    rig.core.known_mut(DISK).cfg.mode = Mode::WriteThrough;
    rig.write(2, 0, BLOCK, false);
    assert_eq!(rig.step(2), &Step::WaitsForClean);
    // It holds zeros, as was written.
    rig.end(FLASH, OpKind::Read, Ok(()));
    rig.end(FLASH, OpKind::Flush, Ok(()));
    rig.end(ORIGIN, OpKind::Write, Err(EIO));
    assert_eq!(rig.answers(), [(2, Err(ReqError::Io))]);
    assert!(rig.core.reqs.is_empty());
}

#[test]
fn who_waits_for_room_or_a_range_of_a_disk_that_is_shut_out_is_answered() {
    let mut rig = Rig::new(Mode::WriteBack);
    rig.core.flash.log.free.clear();
    rig.write(1, 0, BLOCK, false);
    rig.write(2, 0, BLOCK, false);
    assert!(matches!(rig.step(1), Step::WaitsForRoom { pending: 0, .. }));
    assert!(matches!(rig.step(2), Step::WaitsForRange { .. }));
    rig.core.fence(DISK, rig.now, &mut rig.fx);
    let failed = Err(ReqError::Io);
    assert_eq!(rig.answers(), [(1, failed), (2, failed)]);
    assert!(rig.core.reqs.is_empty());
}

#[test]
fn a_flush_waits_for_both_devices_and_fails_with_either() {
    for (flash, origin) in [(Ok(()), Ok(())), (Err(EIO), Ok(())), (Ok(()), Err(EIO))] {
        let mut rig = Rig::new(Mode::WriteBack);
        rig.write(1, 0, BLOCK, false);
        rig.end(FLASH, OpKind::Write, Ok(()));
        let d = rig.core.known_mut(DISK);
        d.origin.sync.wrote(true);
        rig.answers();
        rig.flush(2);
        let waits = |rig: &Rig, n: u32| matches!(rig.state(2), State::Flush(Flush::Devices { pending, .. }) if *pending == n);
        assert!(waits(&rig, 2));
        rig.end(FLASH, OpKind::Flush, flash);
        assert!(waits(&rig, 1));
        rig.end(ORIGIN, OpKind::Flush, origin);
        let right = flash.and(origin).map_err(|_| ReqError::Io);
        assert_eq!(rig.answers(), [(2, right)]);
        assert!(rig.core.reqs.is_empty());
    }
}

#[test]
fn a_read_in_parts_is_answered_once_whichever_part_fails() {
    for fails in 0..2 {
        let mut rig = Rig::new(Mode::WriteBack);
        rig.write(1, BLOCK, BLOCK, false);
        rig.end(FLASH, OpKind::Write, Ok(()));
        rig.answers();
        let buf = Buf::zeroed(3 * BLOCK as usize);
        let r = Request::read(2, DISK, 0, 3 * BLOCK, &buf, rig.now);
        rig.submit(r);
        assert!(matches!(rig.state(2), State::Read(read) if read.pending == 3 && read.hit));
        for part in 0..2 {
            let result = if part == fails { Err(EIO) } else { Ok(()) };
            rig.end(ORIGIN, OpKind::Read, result);
        }
        assert_eq!(rig.answers(), []);
        rig.end(FLASH, OpKind::Read, Ok(()));
        assert_eq!(rig.answers(), [(2, Err(ReqError::Io))]);
    }
}

#[test]
fn an_engine_may_go_with_requests_in_it() {
    let mut rig = Rig::new(Mode::WriteBack);
    rig.write(1, 0, BLOCK, false);
    drop(rig.core);
}

#[test]
#[should_panic(expected = "was not answered")]
fn a_request_cannot_be_dropped_without_an_answer() {
    let mut rig = Rig::new(Mode::WriteBack);
    rig.write(1, 0, BLOCK, false);
    let id = rig.core.reqs.iter().next().map(|(_, req)| req.id);
    drop(rig.core.reqs.remove(id.expect("it is in flight")));
}

#[test]
#[should_panic(expected = "was answered long ago")]
fn a_name_does_not_reach_the_next_request_at_its_place() {
    let mut rig = Rig::new(Mode::WriteBack);
    let flush = |rig: &mut Rig, tag| {
        let r = Request::new(tag, DISK, ReqOp::Flush, 0, 0, None, 0);
        let asker = Asker::client(&r);
        rig.core.reqs.insert(r, asker)
    };
    let first = flush(&mut rig, 1);
    let gone = rig.core.reqs.remove(first);
    gone.answer.client(Ok(()), None, &mut rig.fx);
    let next: ReqId = flush(&mut rig, 2);
    assert_eq!(next.place(), first.place());
    let _ = &rig.core.reqs[first];
}

#[test]
#[should_panic(expected = "arrived on flash")]
fn what_a_write_does_not_wait_for_cannot_end() {
    let mut rig = Rig::new(Mode::WriteThrough);
    rig.write(1, 0, BLOCK, false);
    let id = rig.core.reqs.iter().next().map(|(_, req)| req.id);
    let id = id.expect("it waits for its intent");
    rig.core.request_applied(id, rig.now, &mut rig.fx);
}

#[test]
fn an_answer_reaches_the_client_that_asked() {
    let mut fx = Effects::default();
    let asker = Asker::Client { owner: 3, tag: 7 };
    Answer::to(asker).client(Err(ReqError::NoSpace), None, &mut fx);
    let told = fx.completions.iter().map(|c| (c.owner, c.tag, c.result));
    assert_eq!(told.collect::<Vec<_>>(), [(3, 7, Err(ReqError::NoSpace))]);
}

#[test]
fn what_a_reader_summed_up_is_believed_and_what_stands_behind_is_added() {
    let mut data = Buf::zeroed(3 * BLOCK as usize).all();
    data.bytes_mut()[..5000].fill(7);
    let crc = |block: usize| crc32c(&data.bytes()[block * 4096..(block + 1) * 4096]);
    // The reader knew nothing of the zeros behind byte 5000.
    let of_reader = [1234, crc32c(&data.bytes()[4096..5000])];
    let sums = padded_sums(of_reader.into_iter().collect(), 5000, &data);
    assert_eq!(sums.as_slice(), [1234, crc(1), crc(2)]);
    let sums = padded_sums(Default::default(), 5000, &data);
    assert_eq!(sums.as_slice(), [crc(0), crc(1), crc(2)]);
}

/// Where clean blocks are in one half of their segment and dirty ones in both, a pool has room for twice as much that is clean.
#[test]
fn no_more_may_be_dirty_than_there_is_room_for_in_both_halves() {
    let (layout, extents) = Layout::for_twice(&[64 << 20; 2], 256, true).expect("it fits");
    let devices = extents.into_iter().zip(1..).map(|(extent, n)| DeviceEntry {
        device: Uuid::from_u128(n),
        extent,
    });
    let uuid = Uuid::from_u128(1);
    let mut sb = Superblock::new(layout, uuid, uuid, "test", 0);
    sb.set_twice(layout, devices.collect());
    let mut core = Engine::blank(sb, None, EngineOptions::default(), &[]);
    let rows = u64::from(layout.segment_count) * u64::from(layout.data_blocks());
    assert!(core.capacity_blocks() > rows, "clean ones lie once");
    let room = core.dirty_room(100);
    assert_eq!(room, core.dirty_capacity_blocks());
    assert!(room < rows, "{room} of {rows} blocks of a half");
    // What is kept for disks that live on flash is dirty, too.
    core.totals.kept_blocks = room / 2;
    assert_eq!(core.dirty_room(100), room - room / 2);
    // With one device lost it is the same, and all that is clean takes as much.
    core.totals.kept_blocks = 0;
    assert!(core.flash.devices.spread().lose(1));
    core.flash.tighten();
    let now = [core.dirty_room(100), core.capacity_blocks()];
    // Halves are rounded.
    assert!(now.iter().all(|now| now.abs_diff(room) <= 1), "{now:?}");
}

/// What is cached and is not as an origin's replicas are is dropped wherever it is, and what is dirty stays.
#[test]
fn copies_unlike_the_origin_are_dropped_everywhere() {
    let mut rig = Rig::new(Mode::WriteBack);
    let zeros = crc32c(&[0; BLOCK as usize]);
    let cached = |rig: &Rig, block: u64| {
        let staged = rig.core.cache.stage.contains(policy_key(DISK, block));
        staged || rig.core.cache.index.get(Key::new(DISK, block)).is_some()
    };
    // Block 0 is on flash, 2 in RAM, 4 being read, 6 dirty.
    let copy = CleanCopy {
        data: Buf::zeroed(BLOCK as usize).all(),
        crcs: [zeros].into_iter().collect(),
        written: false,
    };
    rig.core.append_clean(DISK, 0, copy, Why::Filled, 0);
    rig.write(2, 6 * BLOCK, BLOCK, false);
    rig.end(FLASH, OpKind::Write, Ok(()));
    let stay = hearth_policy::Stay {
        freq: 0,
        covered: false,
        unused: None,
        written: false,
    };
    let data = Buf::zeroed(BLOCK as usize).all();
    rig.core.stage_put(DISK, 2, &data, &[zeros], |_| stay);
    let ticket = rig.core.take_ticket(DISK, 4, 5, None);
    assert!(cached(&rig, 0) && cached(&rig, 2) && cached(&rig, 6));
    rig.core.drop_unlike(DISK, 0, &[zeros; 3]);
    assert!(cached(&rig, 0) && cached(&rig, 2));
    rig.core.drop_unlike(DISK, 0, &[!zeros; 8]);
    assert!(!cached(&rig, 0) && !cached(&rig, 2) && cached(&rig, 6));
    let d = rig.core.known_mut(DISK);
    let voids = d.ticket(ticket).is_some_and(|t| t.voids(4));
    assert!(voids, "it may have been read before");
    d.drop_ticket(ticket);
    rig.settle();
    assert_eq!(rig.core.dirty_total, 1);
}

impl Rig {
    /// A client reads the first block of the disk; true if that needs no operation.
    fn is_block_0_in_memory(&mut self, tag: u64) -> bool {
        let buf = Buf::zeroed(BLOCK as usize);
        let before = self.fx.ios.len();
        self.submit(Request::read(tag, DISK, 0, BLOCK, &buf, self.now));
        self.fx.ios.len() == before
    }
}

/// A queued copy serves reads until a write replaces it. The data of the write serves no read before its answer.
#[test]
fn queued_copy_answers_until_write_holds_its_range() {
    let mut rig = Rig::new(Mode::WriteAround);
    assert!(!rig.is_block_0_in_memory(1));
    rig.end(ORIGIN, OpKind::Read, Ok(()));
    assert!(rig.is_block_0_in_memory(2));
    assert_eq!(rig.answers(), [(1, Ok(())), (2, Ok(()))]);
    rig.write(3, 0, BLOCK, false);
    assert!(!rig.is_block_0_in_memory(4), "a write is under way");
    rig.end(ORIGIN, OpKind::Read, Ok(()));
    rig.end(FLASH, OpKind::Write, Ok(()));
    rig.end(FLASH, OpKind::Flush, Ok(()));
    rig.end(ORIGIN, OpKind::Write, Ok(()));
    assert_eq!(rig.answers(), [(4, Ok(())), (3, Ok(()))]);
    assert!(!rig.is_block_0_in_memory(5), "the write is not cached");
}

#[test]
fn queued_copy_of_failed_flash_answers_nothing() {
    let mut rig = Rig::new(Mode::WriteThrough);
    assert!(!rig.is_block_0_in_memory(1));
    rig.end(ORIGIN, OpKind::Read, Ok(()));
    while rig.core.flash.takes_writes() {
        rig.core.flash.log.urgent = true;
        rig.settle();
        assert!(rig.is_block_0_in_memory(2), "its batch is sent again");
        rig.end(FLASH, OpKind::Write, Err(EIO));
    }
    assert!(!rig.is_block_0_in_memory(3), "flash was given up");
}

/// Uses before it is in the index count as one there.
#[test]
fn use_of_queued_copy_reaches_its_slot_once() {
    for uses in 0..3 {
        let mut rig = Rig::new(Mode::WriteBack);
        assert!(!rig.is_block_0_in_memory(1));
        rig.end(ORIGIN, OpKind::Read, Ok(()));
        for _ in 0..uses {
            assert!(rig.is_block_0_in_memory(2));
        }
        rig.core.flash.log.urgent = true;
        rig.settle();
        rig.end(FLASH, OpKind::Write, Ok(()));
        let index = &rig.core.cache.index;
        let slot = index.get(Key::new(DISK, 0)).expect("it is cached");
        let freq = index.slot(slot).expect("it is cached").freq;
        assert_eq!(freq, uses.min(1));
        let hits = rig.core.known(DISK).counters.read_hits;
        assert_eq!(hits, uses);
    }
}
