//! One of several devices has failed, and nothing is there twice: which one it was, and whether the pool can go on without it.
//!
//! Flash is given up as a whole then ([`crate::flash::fail`]): nothing is appended any more, writes go to the origins, and what is dirty is
//! destaged as far as it can be read. When nothing is dirty any more, what is left in the index is clean, and the half of it that lies on the
//! other devices is worth keeping. It may be kept: the index in RAM is what counts, and whatever passed flash since has taken its
//! copies out of it, whichever device they were on. What may *not* be believed from then on is the log on the other devices, in which older copies
//! lie that something on the lost one had made void. So the pool is closed with a checkpoint, which tells what counts, and with a *floor*
//! above everything that was written so far ([`hearth_format::superblock::INCOMPAT_FLOOR`]): a start that has to read the log leaves out
//! what lies below it.

use crate::api::FlashFault;
use crate::flash::device::{FlashDevice, Users};
use crate::flash::fail::Noted;
use hearth_format::superblock::INCOMPAT_FLOOR;
use hearth_io::{IoDone, OpKind};

/// Which devices fail.
#[derive(Debug, Default)]
pub(crate) struct Failing {
    /// Bit `n`: what was asked of device `n` last, and changes something, failed.
    now: u64,
    /// Flash was given up: those that did when that was, or have since.
    kept: Option<u64>,
}

fn bit(device: u16) -> u64 {
    1u64.checked_shl(u32::from(device)).unwrap_or(0)
}

impl Failing {
    /// An operation on a device has ended.
    pub fn note(&mut self, device: u16, done: &IoDone) {
        if !matches!(done.op.kind, OpKind::Write | OpKind::Flush) || done.is_memory_gone() {
            return;
        }
        match done.result {
            Ok(_) => self.now &= !bit(device),
            // It has no room, and is well otherwise.
            Err(e) if e.is_no_space() => {}
            Err(_) => self.blame(device),
        }
    }

    /// A device is known to fail.
    pub fn blame(&mut self, device: u16) {
        self.now |= bit(device);
        if let Some(kept) = &mut self.kept {
            *kept |= bit(device);
        }
    }

    /// Flash is given up for those that fail now.
    pub fn keep(&mut self) {
        self.kept = Some(self.now);
    }

    /// The only one that does, if it is not the first.
    pub fn only(&self) -> Option<u16> {
        let only = self.kept.filter(|kept| kept.is_power_of_two());
        let device = only?.trailing_zeros() as u16;
        (device > 0).then_some(device)
    }

    /// Is any device left out?
    pub fn is_any_left_out(&self) -> bool {
        self.kept.unwrap_or(0) & !1 != 0
    }

    /// Is this one not asked for a flush of what stands on the first? That one cannot be left out.
    pub fn is_left_out(&self, device: u16) -> bool {
        device > 0 && self.kept.unwrap_or(0) & bit(device) != 0
    }
}

impl<U: Users> FlashDevice<U> {
    /// The device that failed, if the others are well and the pool could go on with them.
    pub fn failed_alone(&self) -> Option<u16> {
        let left = matches!(
            self.given_up,
            Some(FlashFault::Broken | FlashFault::Leaving)
        );
        let able = left && self.devices.are_several() && !self.devices.are_twice();
        let device = self.devices.failing.only().filter(|_| able)?;
        // Else another place says that flash was given up, which a start believes.
        let noted = self.noted == Noted::Stored && !self.noted_beside;
        // An area is known by the place of its device, which would be another, to whoever writes it past the pool.
        (noted && self.sb.areas.is_empty()).then_some(device)
    }

    /// Everything that was said so far is older than what the log may tell.
    pub(crate) fn raise_log_floor(&mut self) {
        let last = self.log.segments.iter().map(|s| s.last_batch).max();
        self.log.next_batch_seq = self.log.next_batch_seq.max(last.unwrap_or(0) + 1);
        self.log.applied_seq = self.log.next_batch_seq - 1;
        self.log.durable_seq = self.log.applied_seq;
        self.sb.log_floor = self.sb.log_floor.max(self.log.next_segment_seq);
        self.sb.incompat |= INCOMPAT_FLOOR;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_that_fails_alone_and_is_not_the_first_can_be_left_behind() {
        let blamed = |devices: &[u16]| {
            let mut failing = Failing::default();
            devices.iter().for_each(|n| failing.blame(*n));
            failing.keep();
            failing
        };
        assert_eq!(blamed(&[]).only(), None);
        assert_eq!(blamed(&[0]).only(), None);
        assert_eq!(blamed(&[2]).only(), Some(2));
        assert_eq!(blamed(&[1, 2]).only(), None);
        let mut failing = blamed(&[1]);
        // Another one fails after flash was given up.
        failing.blame(2);
        assert_eq!(failing.only(), None);
        // It is found out later which one it was.
        let mut late = blamed(&[]);
        late.blame(1);
        assert_eq!(late.only(), Some(1));
        assert!(failing.is_left_out(1) && !failing.is_left_out(0));
    }
}
