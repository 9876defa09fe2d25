//! Where a disk's data really lives: one device, or a mirror of several.

use crate::content::BLOCK;
use crate::device::{Faults, SimDevice};
use crate::mirrored::Mirrored;

/// See the module.
pub(crate) enum Origin {
    One(Box<SimDevice>),
    Mirror(Box<Mirrored>),
}

impl Origin {
    pub fn one(&mut self) -> Option<&mut SimDevice> {
        match self {
            Origin::One(device) => Some(device),
            Origin::Mirror(_) => None,
        }
    }

    /// The only device.
    pub fn device(&self) -> Option<&SimDevice> {
        match self {
            Origin::One(device) => Some(device),
            Origin::Mirror(_) => None,
        }
    }

    pub fn mirror(&mut self) -> Option<&mut Mirrored> {
        match self {
            Origin::One(_) => None,
            Origin::Mirror(mirror) => Some(mirror),
        }
    }

    pub fn is_mirror(&self) -> bool {
        matches!(self, Origin::Mirror(_))
    }

    /// No trouble any more.
    pub fn heal(&mut self) {
        match self {
            Origin::One(device) => device.faults = Faults::default(),
            Origin::Mirror(mirror) => mirror.heal(),
        }
    }

    /// It makes nothing durable any more.
    pub fn refuse_flushes(&mut self) {
        if let Origin::One(device) = self {
            device.faults = Faults {
                flush_eio: 10_000,
                ..Faults::default()
            };
        }
    }

    /// Operations of the engine that are not answered.
    pub fn busy(&self) -> usize {
        match self {
            Origin::One(device) => device.busy(),
            Origin::Mirror(mirror) => mirror.busy(),
        }
    }

    /// What was answered for ends.
    pub fn pay(&mut self) {
        if let Origin::One(device) = self {
            device.pay();
        }
    }

    /// Somebody else than the engine flushes.
    pub fn flush_now(&mut self) {
        match self {
            Origin::One(device) => device.flush_now(),
            Origin::Mirror(mirror) => mirror.flush_now(),
        }
    }

    /// The process dies. `power`: it loses its power as well; `some`: only some devices of the host did.
    pub fn crash(&mut self, power: bool, some: bool) {
        match self {
            Origin::One(device) if power => device.power_cut(),
            Origin::One(device) => device.process_death(),
            Origin::Mirror(mirror) => mirror.crash(power, some),
        }
    }

    /// Each of its legs holds it, durably.
    pub fn is_whole(&self) -> bool {
        match self {
            Origin::One(_) => true,
            Origin::Mirror(mirror) => mirror.is_whole(),
        }
    }

    /// What a mirror is doing.
    pub fn explain(&self) -> Option<String> {
        match self {
            Origin::One(_) => None,
            Origin::Mirror(mirror) => Some(mirror.explain()),
        }
    }

    pub fn volatile_blocks(&self) -> Vec<u64> {
        match self {
            Origin::One(device) => device.volatile_blocks().collect(),
            Origin::Mirror(mirror) => mirror.volatile_blocks().into_iter().collect(),
        }
    }

    /// A block as it is stored, in each place where it is, with the place's name.
    pub fn stored(&self, block: usize) -> Vec<(u8, [u8; BLOCK])> {
        match self {
            Origin::One(device) => vec![(0, device.stored_block(block))],
            Origin::Mirror(mirror) => mirror.stored(block),
        }
    }
}
