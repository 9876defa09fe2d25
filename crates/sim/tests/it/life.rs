//! An engine whose devices answer at once, for tests that look at one request after the other.

use hearth_engine::api::{Completion, DiskConfig, Effects, OriginState, ReqError, Request};
use hearth_engine::{Engine, EngineOptions, KnownDisk, OpenError, OpenReport};
use hearth_io::{BLOCK, OpKind, Target};
use hearth_sim::device::{Base, SimDevice, Tear};
use hearth_sim::prng::Prng;

pub const FLASH_SIZE: u64 = 16 << 20;
const SEGMENT_BLOCKS: u32 = 256;

pub fn device(target: Target, size: u64) -> SimDevice {
    SimDevice::new(target, size, BLOCK, Base::Zeros, Tear::Block, Prng::new(7))
}

/// A flash device with an empty pool.
pub fn pool() -> SimDevice {
    let mut flash = device(Target::Flash(0), FLASH_SIZE);
    crate::common::format(&mut flash.media(None), FLASH_SIZE, SEGMENT_BLOCKS);
    flash
}

/// Opens a pool that knows one disk, before the disk is attached.
pub fn open(
    flash: &mut SimDevice,
    options: EngineOptions,
    disk: &DiskConfig,
) -> Result<(Engine, OpenReport), OpenError> {
    let known = [KnownDisk {
        id: disk.id,
        size: disk.size,
        since_seq: 0,
        home: hearth_engine::api::Home::Origin,
    }];
    Engine::open(&mut flash.media(None), options, &known)
}

/// A life of a daemon, which ends without a stop. Every operation ends at once.
pub struct Life<'a> {
    pub engine: Engine,
    pub flash: &'a mut SimDevice,
    pub origin: SimDevice,
    pub now: u64,
    /// Writes of flash, in order.
    pub written: Vec<(u64, u64)>,
}

impl<'a> Life<'a> {
    /// Opens the pool and attaches the disk.
    pub fn new(flash: &'a mut SimDevice, options: EngineOptions, config: DiskConfig) -> Life<'a> {
        let (engine, _) = open(flash, options, &config).expect("opened");
        let origin = device(
            Target::Origin(config.id),
            config.size.next_multiple_of(BLOCK),
        );
        engine
            .attach(config, OriginState::Flushed)
            .expect("attached");
        Life {
            engine,
            flash,
            origin,
            now: 1,
            written: Vec::new(),
        }
    }

    pub fn ask(&mut self, request: Request) {
        self.try_ask(request).expect("served");
    }

    pub fn try_ask(&mut self, request: Request) -> Result<(), ReqError> {
        let mut fx = Effects::default();
        self.engine.submit(self.now, &mut vec![request], &mut fx);
        loop {
            if let Some(answer) = self.carry_out(&mut fx) {
                return answer.result;
            }
            self.tick(&mut fx);
        }
    }

    /// Carries out all operations; the answer to the request if it came meanwhile.
    pub fn carry_out(&mut self, fx: &mut Effects) -> Option<Completion> {
        while !fx.ios.is_empty() {
            let mut dones = Vec::new();
            for op in std::mem::take(&mut fx.ios) {
                let device = match op.target {
                    Target::Flash(_) => &mut *self.flash,
                    Target::Origin(_) => &mut self.origin,
                };
                if op.target == Target::Flash(0) && op.kind == OpKind::Write {
                    self.written.push((op.offset / BLOCK, op.len / BLOCK));
                }
                let token = device.submit(op).0;
                dones.push(device.complete(token, 50_000).expect("in flight").done);
            }
            self.engine.io_done(self.now, &mut dones, fx);
        }
        fx.completions.pop()
    }

    pub fn tick(&mut self, fx: &mut Effects) {
        self.now += 50_000_000;
        self.engine.tick(self.now, fx);
    }

    /// Lets what gathers be written.
    pub fn settle(&mut self) {
        for _ in 0..10 {
            let mut fx = Effects::default();
            self.tick(&mut fx);
            self.carry_out(&mut fx);
        }
    }
}
