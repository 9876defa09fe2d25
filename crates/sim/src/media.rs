//! A simulated device as the synchronous storage that opening and closing a pool uses.
//!
//! Crashes in the middle of formatting, recovery and clean stops are the rarest in tests and the
//! worst in life; here the plug can be pulled at any write of them.

use crate::content::BLOCK;
use crate::device::{NOT_COMPLETED, SimDevice};
use hearth_io::Media;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// Counts writes and flushes, of one device or of several that one plug is for, until it is pulled.
#[derive(Clone, Debug)]
pub struct Meter(Arc<Counts>);

#[derive(Debug)]
struct Counts {
    cut: Option<u64>,
    used: AtomicU64,
    tripped: AtomicBool,
}

impl Meter {
    /// After `cut` writes and flushes the plug is pulled.
    pub fn new(cut: Option<u64>) -> Meter {
        Meter(Arc::new(Counts {
            cut,
            used: AtomicU64::new(0),
            tripped: AtomicBool::new(false),
        }))
    }

    /// Writes and flushes so far.
    pub fn used(&self) -> u64 {
        self.0.used.load(Relaxed)
    }

    /// True once the plug was pulled.
    pub fn tripped(&self) -> bool {
        self.0.tripped.load(Relaxed)
    }

    fn spend(&self) -> io::Result<bool> {
        if self.tripped() {
            return Err(io::Error::other("the plug was pulled (simulated)"));
        }
        let tripped = self.0.cut.is_some_and(|cut| self.used() >= cut);
        self.0.tripped.store(tripped, Relaxed);
        self.0.used.fetch_add(1, Relaxed);
        Ok(tripped)
    }
}

/// A [`SimDevice`] as synchronous storage.
pub struct SimMedia<'a> {
    device: &'a mut SimDevice,
    meter: Meter,
}

impl<'a> SimMedia<'a> {
    /// See [`SimDevice::media`].
    pub(crate) fn new(device: &'a mut SimDevice, cut: Option<u64>) -> SimMedia<'a> {
        Self::metered(device, Meter::new(cut))
    }

    /// One of several devices with the same plug.
    pub(crate) fn metered(device: &'a mut SimDevice, meter: Meter) -> SimMedia<'a> {
        SimMedia { device, meter }
    }

    /// Writes and flushes so far.
    pub fn used(&self) -> u64 {
        self.meter.used()
    }

    /// True once the plug was pulled.
    pub fn tripped(&self) -> bool {
        self.meter.tripped()
    }

    fn check(&mut self, offset: u64, len: usize) -> io::Result<()> {
        if !offset.is_multiple_of(BLOCK as u64) || !len.is_multiple_of(BLOCK) {
            self.device.complain(format!(
                "media access of {len} bytes at {offset} is not in whole blocks"
            ));
        }
        if offset + len as u64 > self.device.size() {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "access past the end of the device",
            ));
        }
        if self.device.is_dead() {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        Ok(())
    }

    fn spend(&mut self) -> io::Result<bool> {
        self.device.doom();
        if self.device.is_dead() {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        self.meter.spend()
    }
}

impl Media for SimMedia<'_> {
    fn len(&self) -> u64 {
        self.device.size()
    }

    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.check(offset, data.len())?;
        if self.meter.tripped() {
            return Err(io::Error::other("the plug was pulled (simulated)"));
        }
        let end = offset + data.len() as u64;
        let mut bad = self.device.faults.bad_ranges.iter();
        if bad.any(|bad| bad.start < end && offset < bad.end) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        if let Some((place, left)) = &mut self.device.faults.read_fails_once
            && (offset..end).contains(place)
        {
            let Some(less) = left.checked_sub(1) else {
                self.device.faults.read_fails_once = None;
                return Err(io::Error::from_raw_os_error(libc::EIO));
            };
            *left = less;
        }
        for (i, chunk) in data.chunks_mut(BLOCK).enumerate() {
            let index = (offset / BLOCK as u64) as usize + i;
            chunk.copy_from_slice(&self.device.visible_block(index)[..chunk.len()]);
        }
        Ok(())
    }

    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.check(offset, data.len())?;
        let torn = self.spend()?;
        self.device.seq += 1;
        for (i, chunk) in data.chunks(BLOCK).enumerate() {
            if torn && self.device.rng.chance(1, 2) {
                continue;
            }
            let index = (offset / BLOCK as u64) as usize + i;
            let mut block = self.device.visible_block(index);
            block[..chunk.len()].copy_from_slice(chunk);
            let mark = if torn { NOT_COMPLETED } else { self.device.seq };
            self.device.push(index, mark, block);
        }
        if torn {
            Err(io::Error::other("the plug was pulled (simulated)"))
        } else {
            Ok(())
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.device.is_dead() {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        if self.spend()? {
            return Err(io::Error::other("the plug was pulled (simulated)"));
        }
        self.device.seq += 1;
        let mark = self.device.seq;
        self.device.make_durable(mark);
        Ok(())
    }
}
