//! A simulated device as the synchronous storage that opening and closing a pool uses.
//!
//! Crashes in the middle of formatting, recovery and clean stops are the rarest in tests and the
//! worst in life; here the plug can be pulled at any write of them.

use crate::content::BLOCK;
use crate::device::{NOT_COMPLETED, SimDevice};
use hearth_io::Media;
use std::io;

/// A [`SimDevice`] as synchronous storage.
pub struct SimMedia<'a> {
    device: &'a mut SimDevice,
    cut: Option<u64>,
    used: u64,
    tripped: bool,
}

impl<'a> SimMedia<'a> {
    /// See [`SimDevice::media`].
    pub(crate) fn new(device: &'a mut SimDevice, cut: Option<u64>) -> SimMedia<'a> {
        SimMedia {
            device,
            cut,
            used: 0,
            tripped: false,
        }
    }

    /// Writes and flushes so far.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// True once the plug was pulled.
    pub fn tripped(&self) -> bool {
        self.tripped
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
        if self.tripped {
            return Err(io::Error::other("the plug was pulled (simulated)"));
        }
        self.tripped = self.cut.is_some_and(|cut| self.used >= cut);
        self.used += 1;
        Ok(self.tripped)
    }
}

impl Media for SimMedia<'_> {
    fn len(&self) -> u64 {
        self.device.size()
    }

    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.check(offset, data.len())?;
        if self.tripped {
            return Err(io::Error::other("the plug was pulled (simulated)"));
        }
        let end = offset + data.len() as u64;
        let mut bad = self.device.faults.bad_ranges.iter();
        if bad.any(|bad| bad.start < end && offset < bad.end) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
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
