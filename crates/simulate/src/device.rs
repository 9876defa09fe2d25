//! The origin as arithmetic: one arm that serves one read or write after the other.
//!
//! A hit ratio says nothing of when a block arrives, and a cache that reads ahead is worth what it
//! brings in time. So whatever goes to the origin takes time here: a fixed one to get to a place, none if the
//! arm is there already, and what the data takes at the disk's rate. Rotation, caches and queues inside the
//! drive are left out; `hearth_io::model` has them, for those who need a drive and not an estimate.

/// Nanoseconds in a microsecond.
pub(crate) const US: u64 = 1000;
const BLOCK: u64 = 4096;

/// What an origin takes for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// To get to a place, microseconds.
    pub access_us: u64,
    /// Bytes a second, once there; 0 for no limit.
    pub rate: u64,
}

impl Device {
    /// A desktop hard disk of 7200 turns a minute: 8 ms to get to a place, 150 MB/s from there.
    pub const HARD_DISK: Device = Device {
        access_us: 8000,
        rate: 150_000_000,
    };

    /// One that answers at once.
    pub const INSTANT: Device = Device {
        access_us: 0,
        rate: 0,
    };

    /// Nanoseconds for `count` blocks where the arm is.
    pub fn transfer_ns(&self, count: u64) -> u64 {
        let bytes = u128::from(count * BLOCK) * 1_000_000_000;
        bytes.checked_div(self.rate.into()).unwrap_or(0) as u64
    }
}

/// The arm of a device.
#[derive(Clone, Debug)]
pub struct Arm {
    device: Device,
    /// The block it stands at.
    at: u64,
    free_ns: u64,
    /// Times it had to move.
    pub moves: u64,
    /// Time it worked.
    pub busy_ns: u64,
}

impl Arm {
    /// One that stands nowhere.
    pub fn new(device: Device) -> Arm {
        Arm {
            device,
            at: u64::MAX,
            free_ns: 0,
            moves: 0,
            busy_ns: 0,
        }
    }

    /// It is sent for `count` blocks from `key`, after all that it was sent for before; when it has them.
    pub fn serve(&mut self, now_ns: u64, key: u64, count: u64) -> u64 {
        let away = self.at != key;
        let access = if away { self.device.access_us * US } else { 0 };
        let took = access + self.device.transfer_ns(count);
        self.moves += u64::from(away);
        self.busy_ns += took;
        self.at = key + count;
        self.free_ns = self.free_ns.max(now_ns) + took;
        self.free_ns
    }

    /// From when on nothing is left of what it was sent for.
    pub fn free_ns(&self) -> u64 {
        self.free_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_follows_takes_no_way_and_what_comes_later_waits() {
        let mut arm = Arm::new(Device {
            access_us: 10,
            rate: 4_096_000_000,
        });
        assert_eq!(arm.serve(0, 100, 4), 14 * US);
        assert_eq!(arm.serve(0, 104, 4), 18 * US);
        assert_eq!(arm.serve(100 * US, 5, 1), 111 * US);
        assert_eq!((arm.moves, arm.busy_ns), (2, 29 * US));
        let mut instant = Arm::new(Device::INSTANT);
        assert_eq!(instant.serve(7, 1, 1 << 20), 7);
    }
}
