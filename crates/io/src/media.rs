//! A flash device as plain synchronous storage, for what happens outside the data path:
//! formatting, superblocks, the registry, recovery, checkpoints.

use std::io;

/// Synchronous random access to one flash device. Offsets and lengths are whole blocks.
pub trait Media: Send {
    /// Size in bytes.
    fn len(&self) -> u64;
    /// True for a device of no size.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Fills `data` from `offset`; an error if that reaches past the end.
    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()>;
    /// Several reads, in parallel where the device gains by it.
    fn read_many(&mut self, reads: &mut [(u64, &mut [u8])]) -> io::Result<()> {
        for (offset, data) in reads.iter_mut() {
            self.read_at(*offset, data)?;
        }
        Ok(())
    }
    /// Stores `data` at `offset`.
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()>;
    /// Makes completed writes durable.
    fn flush(&mut self) -> io::Result<()>;
}

/// Reads in flight at once in [`read_parallel`]: what one SSD gains from, on few cores.
const PARALLEL_READS: usize = 8;

/// Runs several reads on a few threads; for implementations of [`Media::read_many`].
pub fn read_parallel(
    reads: &mut [(u64, &mut [u8])],
    read: impl Fn(u64, &mut [u8]) -> io::Result<()> + Sync,
) -> io::Result<()> {
    if reads.is_empty() {
        return Ok(());
    }
    let share = reads.len().div_ceil(PARALLEL_READS);
    let read = &read;
    std::thread::scope(|scope| {
        let workers: Vec<_> = reads
            .chunks_mut(share)
            .map(|part| {
                scope.spawn(move || {
                    part.iter_mut()
                        .try_for_each(|(offset, data)| read(*offset, data))
                })
            })
            .collect();
        workers.into_iter().try_for_each(|w| {
            w.join()
                .unwrap_or_else(|_| Err(io::Error::other("a reader thread died")))
        })
    })
}
