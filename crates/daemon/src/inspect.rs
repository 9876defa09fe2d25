//! What is cached of a pool that nobody serves, found out without writing to it.
//!
//! Only opening the pool tells, and opening marks it as in use and puts its log in order. Here
//! that happens in RAM, so that looking at a pool leaves it as it was.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use hearth_engine::stats::DeviceStats;
use hearth_engine::{Engine, EngineOptions, KnownDisk};
use hearth_io::{BLOCK, Device, Joined, Media, Spread};

use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::pool::{FlashDevices, Pool};
use crate::size::human;

const BLOCK_BYTES: usize = BLOCK as usize;

/// What is cached of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contents {
    /// Bytes of it on flash.
    pub cached: u64,
    /// Bytes of it that the origin does not have yet.
    pub dirty: u64,
}

/// The disks of a registry, as the engine wants to know them.
pub(crate) fn known(pool: &Pool) -> Vec<KnownDisk> {
    let disks = pool.registry().disks.iter();
    disks
        .map(|d| KnownDisk {
            id: d.id,
            size: d.size,
            since_seq: d.since_seq,
            home: crate::settings::home(d.home),
        })
        .collect()
}

/// What is cached of each disk, in the order of the registry, of a pool that this process has
/// locked, for reading at least.
pub fn contents(pool: &Pool) -> Result<(Vec<Contents>, Vec<DeviceStats>)> {
    let need = pool.footprint(Some(0));
    if let Some(free) = memory::available().filter(|free| need > *free) {
        return Err(Error::unavailable(
            format!(
                "reading the log needs {} of RAM, and {} are free",
                human(need),
                human(free)
            ),
            "end other programs, or look at the pool on a larger machine",
        ));
    }
    let options = EngineOptions {
        ram_stage: Some(0),
        prefetch: false,
        trim: false,
        ..EngineOptions::default()
    };
    let mut media = Unwritten::over(pool.flash());
    let (engine, _) = Engine::open(&mut media, options, &known(pool))
        .map_err(|e| Error::of(Kind::Unavailable, e.fault()))?;
    let disks = pool.registry().disks.iter();
    let contents = disks
        .map(|d| {
            let status = engine.status(d.id).unwrap_or_default();
            Contents {
                cached: status.cached_blocks.saturating_mul(BLOCK),
                dirty: status.owed_bytes(),
            }
        })
        .collect();
    Ok((contents, engine.device_stats()))
}

/// A device with what was written to it in RAM instead.
pub(crate) struct Unwritten {
    device: Joined<Arc<Device>>,
    written: BTreeMap<u64, Box<[u8]>>,
}

impl Unwritten {
    pub(crate) fn over(flash: &FlashDevices) -> Unwritten {
        Unwritten {
            device: flash.joined(),
            written: BTreeMap::new(),
        }
    }

    fn overlay(&self, offset: u64, data: &mut [u8]) {
        let end = offset + data.len() as u64;
        for (at, block) in self.written.range(offset..end) {
            let from = (at - offset) as usize;
            if let Some(place) = data.get_mut(from..from + BLOCK_BYTES) {
                place.copy_from_slice(block);
            }
        }
    }
}

impl Media for Unwritten {
    fn len(&self) -> u64 {
        self.device.len()
    }

    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        Media::read_at(&mut self.device, offset, data)?;
        self.overlay(offset, data);
        Ok(())
    }

    fn read_many(&mut self, reads: &mut [(u64, &mut [u8])]) -> io::Result<()> {
        self.device.read_many(reads)?;
        for (offset, data) in reads {
            self.overlay(*offset, data);
        }
        Ok(())
    }

    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        for (at, block) in (offset..)
            .step_by(BLOCK_BYTES)
            .zip(data.chunks(BLOCK_BYTES))
        {
            self.written.insert(at, block.into());
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn spread(&self) -> Option<Spread> {
        self.device.spread()
    }

    fn read_first(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.device.read_first(offset, data)?;
        self.overlay(offset, data);
        Ok(())
    }

    fn read_other(&mut self, offset: u64, data: &mut [u8]) -> io::Result<bool> {
        let there = self.device.read_other(offset, data)?;
        self.overlay(offset, data);
        Ok(there)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_io::{BlockFile, OpenMode};

    #[test]
    fn writes_are_read_back_and_never_reach_the_device() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("flash");
        std::fs::write(&path, vec![1; 4 * BLOCK_BYTES]).unwrap();
        let mode = OpenMode {
            read_only: true,
            unlocked: false,
        };
        let device = Device::new(BlockFile::open(&path, mode).unwrap());
        let mut media = Unwritten::over(&FlashDevices::one(Arc::new(device)));
        media.write_at(BLOCK, &vec![2; 2 * BLOCK_BYTES]).unwrap();
        media.flush().unwrap();
        let mut all = vec![0; 4 * BLOCK_BYTES];
        media.read_at(0, &mut all).unwrap();
        let firsts = |data: &[u8]| -> Vec<u8> { data.chunks(BLOCK_BYTES).map(|b| b[0]).collect() };
        assert_eq!(firsts(&all), [1, 2, 2, 1]);
        let mut part = vec![0; 2 * BLOCK_BYTES];
        media.read_many(&mut [(2 * BLOCK, &mut part)]).unwrap();
        assert_eq!(firsts(&part), [2, 1]);
        assert_eq!(std::fs::read(&path).unwrap(), vec![1; 4 * BLOCK_BYTES]);
    }

    #[test]
    fn the_other_half_is_read_as_well() {
        let dir = tempfile::tempdir().unwrap();
        let mode = OpenMode {
            read_only: true,
            unlocked: false,
        };
        let device = |n: u8| {
            let path = dir.path().join(n.to_string());
            std::fs::write(&path, vec![n; 4 * BLOCK_BYTES]).unwrap();
            Arc::new(Device::new(BlockFile::open(&path, mode).unwrap()))
        };
        let spread = Spread::over(4 * BLOCK, [(0, 4 * BLOCK)]).twice(hearth_io::Twice {
            front: 4 * BLOCK,
            segment: BLOCK,
            own: [u64::MAX; 2],
            named: |_, _| None,
            lost: 0,
            once: false,
        });
        let devices = vec![device(1), device(2)];
        let mut media = Unwritten::over(&FlashDevices::several(devices, spread));
        assert!(media.spread().is_some_and(|spread| spread.is_twice()));
        media.write_at(BLOCK, &vec![3; BLOCK_BYTES]).unwrap();
        let mut data = vec![0; 2 * BLOCK_BYTES];
        assert!(media.read_other(0, &mut data).unwrap());
        assert_eq!((data[0], data[BLOCK_BYTES]), (2, 3));
    }
}
