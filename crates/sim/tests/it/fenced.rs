//! A disk whose storage shuts this host out answers nothing any more and writes nothing more to its
//! origin, whatever was under way, also when the storage would take it again.

use crate::common;
use hearth_engine::api::{DiskId, Effects, Mode, OriginState, Request};
use hearth_engine::{Engine, EngineOptions};
use hearth_io::{Buf, IoError, IoOp, Media, OpKind, Target};
use std::io;

const BLOCK: u64 = 4096;
const SEGMENT_BLOCKS: u32 = 256;
const SIZE: u64 = 1 << 20;

struct Ram(Vec<u8>);

impl Media for Ram {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }
    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        data.copy_from_slice(&self.0[offset as usize..][..data.len()]);
        Ok(())
    }
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0[offset as usize..][..data.len()].copy_from_slice(data);
        Ok(())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Rig {
    flash: Ram,
    engine: Engine,
    fx: Effects,
    now: u64,
    shut_out: bool,
    /// Changes of the origin that were asked for.
    changes: u64,
    /// Disk 1's origin answers nothing; what it was asked.
    hangs: bool,
    unanswered: Vec<IoOp>,
}

impl Rig {
    fn new(mode: Mode) -> Rig {
        let bytes = 24 * u64::from(SEGMENT_BLOCKS) * BLOCK;
        let mut flash = Ram(vec![0; bytes as usize]);
        common::format(&mut flash, bytes, SEGMENT_BLOCKS);
        let (engine, _) = Engine::open(&mut flash, EngineOptions::default(), &[]).unwrap();
        for id in [1, 2] {
            let mut config = common::disk(id, SIZE);
            config.mode = mode;
            engine.attach(config, OriginState::Flushed).unwrap();
        }
        Rig {
            flash,
            engine,
            fx: Effects::default(),
            now: 1,
            shut_out: false,
            changes: 0,
            hangs: false,
            unanswered: Vec::new(),
        }
    }

    fn serve(&mut self, op: &IoOp) -> Result<(), IoError> {
        if op.target == Target::Origin(1) {
            self.changes += u64::from(matches!(
                op.kind,
                OpKind::Write | OpKind::WriteZeroes { .. } | OpKind::Discard
            ));
            if self.shut_out {
                return Err(IoError::SHUT_OUT);
            }
        }
        let mut at = op.offset;
        for buf in &op.bufs {
            let mut buf = buf.clone();
            match (op.target, op.kind) {
                (Target::Flash(_), OpKind::Read) => {
                    self.flash.read_at(at, buf.bytes_mut()).unwrap()
                }
                (Target::Flash(_), OpKind::Write) => self.flash.write_at(at, buf.bytes()).unwrap(),
                (_, OpKind::Read) => buf.bytes_mut().fill(0),
                _ => {}
            }
            at += buf.len() as u64;
        }
        Ok(())
    }

    fn settle(&mut self) {
        while !self.fx.ios.is_empty() {
            let mut dones = Vec::new();
            for op in std::mem::take(&mut self.fx.ios) {
                if self.hangs && op.target == Target::Origin(1) {
                    self.unanswered.push(op);
                    continue;
                }
                let result = self.serve(&op);
                dones.push(op.done(result, 1000));
            }
            self.engine.io_done(self.now, &mut dones, &mut self.fx);
        }
    }

    /// Time passes, for so many seconds.
    fn rest(&mut self, seconds: u64) {
        let end = self.now + seconds * 1_000_000_000;
        while self.now < end {
            self.now += 50_000_000;
            self.engine.tick(self.now, &mut self.fx);
            self.settle();
        }
    }

    fn write(&mut self, disk: DiskId, block: u64) -> bool {
        let buf = Buf::zeroed(BLOCK as usize);
        buf.all().bytes_mut().fill(7);
        let write = Request::write(0, disk, block * BLOCK, BLOCK, false, &buf, self.now);
        self.ask(write)
    }

    fn read(&mut self, disk: DiskId, block: u64) -> bool {
        let buf = Buf::zeroed(BLOCK as usize);
        let read = Request::read(0, disk, block * BLOCK, BLOCK, &buf, self.now);
        self.ask(read)
    }

    /// True if it was answered without an error.
    fn ask(&mut self, request: Request) -> bool {
        self.engine
            .submit(self.now, &mut vec![request], &mut self.fx);
        self.settle();
        assert_eq!(self.fx.completions.len(), 1, "{}", self.engine.explain());
        self.fx.completions.pop().unwrap().result.is_ok()
    }
}

#[test]
fn a_disk_that_is_shut_out_stops_for_good() {
    let mut rig = Rig::new(Mode::WriteBack);
    for block in [3, 4, 9] {
        assert!(rig.write(1, block));
    }
    rig.shut_out = true;
    rig.engine.drain(1, true).unwrap();
    rig.rest(1);
    assert!(rig.engine.status(1).unwrap().fenced);
    let changes = rig.changes;
    // The storage takes everything again: too late.
    rig.shut_out = false;
    rig.rest(60);
    assert!(!rig.write(1, 5) && !rig.read(1, 3) && !rig.read(1, 100));
    rig.engine.drain(1, true).unwrap();
    rig.rest(60);
    assert_eq!(rig.changes, changes);
    let stranded = [(3 * BLOCK, 2 * BLOCK), (9 * BLOCK, BLOCK)];
    assert_eq!(rig.engine.dirty_ranges(1, 10), stranded);
    assert_eq!(rig.engine.dirty_ranges(1, 1), stranded[..1]);
    // Other disks go on.
    assert!(rig.write(2, 0) && rig.read(2, 0));
    rig.engine.detach(1).unwrap();
    rig.rest(60);
    assert_eq!(rig.changes, changes);
    // Only who attaches it anew has it go on.
    rig.engine
        .attach(common::disk(1, SIZE), OriginState::Flushed)
        .unwrap();
    assert!(rig.read(1, 3));
    rig.engine.drain(1, true).unwrap();
    rig.rest(5);
    assert!(rig.changes > changes);
    assert_eq!(rig.engine.dirty_ranges(1, 10), []);
}

#[test]
fn a_disk_that_was_taken_over_is_stopped_by_a_word() {
    for mode in [Mode::WriteBack, Mode::WriteThrough, Mode::Off] {
        let mut rig = Rig::new(mode);
        assert!(rig.write(1, 3));
        let changes = rig.changes;
        rig.engine.fence(1, rig.now, &mut rig.fx).unwrap();
        assert!(!rig.write(1, 4) && !rig.read(1, 3));
        rig.rest(60);
        assert_eq!(rig.changes, changes, "{mode:?}");
        rig.engine.detach(1).unwrap();
    }
}

/// An origin hangs, its disk fills up with what is dirty, writes wait for room, and then it shuts the host
/// out: that is the order in which it happens under load. Nobody may go on waiting.
#[test]
fn who_waits_for_room_is_answered_when_the_disk_is_shut_out() {
    const BLOCKS: u64 = 64;
    let mut rig = Rig::new(Mode::WriteBack);
    rig.hangs = true;
    rig.engine.detach(1).unwrap();
    rig.engine
        .attach(common::disk(1, 256 << 20), OriginState::Flushed)
        .unwrap();
    let buf = Buf::zeroed((BLOCKS * BLOCK) as usize);
    let (mut sent, mut answered) = (0, 0);
    while sent < 300 {
        let (at, len) = (sent * BLOCKS * BLOCK, BLOCKS * BLOCK);
        let write = Request::write(sent, 1, at, len, false, &buf, rig.now);
        rig.engine.submit(rig.now, &mut vec![write], &mut rig.fx);
        rig.settle();
        answered += rig.fx.completions.drain(..).count() as u64;
        sent += 1;
    }
    assert!(answered < sent, "there was room for all");
    rig.engine.fence(1, rig.now, &mut rig.fx).unwrap();
    rig.hangs = false;
    rig.shut_out = true;
    rig.fx.ios.append(&mut rig.unanswered);
    rig.settle();
    rig.rest(2);
    let failed = rig.fx.completions.drain(..).map(|c| c.result.is_err());
    assert_eq!(
        failed.filter(|failed| *failed).count() as u64,
        sent - answered
    );
    rig.engine.detach(1).unwrap();
    assert!(rig.write(2, 0));
}
