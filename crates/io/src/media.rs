//! A flash device as plain synchronous storage, for what happens outside the data path:
//! formatting, superblocks, the registry, recovery, checkpoints.

use crate::BLOCK;
use crate::buf::{Buf, BufSlice};
use crate::spread::Spread;
use std::collections::HashMap;
use std::io;
use std::sync::mpsc::{channel, sync_channel};

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
    /// Of several devices as one: where what lies.
    fn spread(&self) -> Option<Spread> {
        None
    }
    /// Where everything is there twice: what the half has that [`read_at`](Self::read_at) reads, which asks the other one for what cannot
    /// be read there. Here that is an error.
    fn read_first(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.read_at(offset, data)
    }
    /// What the other half has. False: there is none.
    fn read_other(&mut self, _offset: u64, _data: &mut [u8]) -> io::Result<bool> {
        Ok(false)
    }
    /// Writes to that half alone, if there is one.
    fn write_other(&mut self, _offset: u64, _data: &[u8]) -> io::Result<()> {
        Ok(())
    }
}

/// What the half has that is read first, to be looked at alone. Nothing is written by it.
pub struct FirstHalf<'a>(pub &'a mut dyn Media);

impl Media for FirstHalf<'_> {
    fn len(&self) -> u64 {
        self.0.len()
    }
    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.0.read_first(offset, data)
    }
    fn write_at(&mut self, _: u64, _: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What the half has that is not read otherwise, to be looked at alone. Nothing is written by it.
pub struct OtherHalf<'a>(pub &'a mut dyn Media);

impl Media for OtherHalf<'_> {
    fn len(&self) -> u64 {
        self.0.len()
    }
    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        match self.0.read_other(offset, data)? {
            true => Ok(()),
            false => Err(io::ErrorKind::NotFound.into()),
        }
    }
    fn write_at(&mut self, _: u64, _: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<M: Media + ?Sized> Media for &mut M {
    fn len(&self) -> u64 {
        (**self).len()
    }
    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        (**self).read_at(offset, data)
    }
    fn read_many(&mut self, reads: &mut [(u64, &mut [u8])]) -> io::Result<()> {
        (**self).read_many(reads)
    }
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        (**self).write_at(offset, data)
    }
    fn flush(&mut self) -> io::Result<()> {
        (**self).flush()
    }
    fn spread(&self) -> Option<Spread> {
        (**self).spread()
    }
    fn read_first(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        (**self).read_first(offset, data)
    }
    fn read_other(&mut self, offset: u64, data: &mut [u8]) -> io::Result<bool> {
        (**self).read_other(offset, data)
    }
    fn write_other(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        (**self).write_other(offset, data)
    }
}

/// A device in memory that keeps only blocks that are not zeros: for tests and measurements of what stands above.
#[derive(Debug, Default)]
pub struct Sparse {
    bytes: u64,
    blocks: HashMap<u64, Box<[u8]>>,
}

impl Sparse {
    /// One of this size, all zeros.
    pub fn new(bytes: u64) -> Sparse {
        Sparse {
            bytes,
            blocks: HashMap::new(),
        }
    }
}

impl Media for Sparse {
    fn len(&self) -> u64 {
        self.bytes
    }

    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        for (at, out) in (offset / BLOCK..).zip(data.chunks_mut(BLOCK as usize)) {
            match self.blocks.get(&at) {
                Some(block) => out.copy_from_slice(block),
                None => out.fill(0),
            }
        }
        Ok(())
    }

    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        for (at, bytes) in (offset / BLOCK..).zip(data.chunks(BLOCK as usize)) {
            if bytes.iter().all(|b| *b == 0) {
                self.blocks.remove(&at);
            } else {
                self.blocks.insert(at, bytes.into());
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads piece after piece into memory of `bytes` each, the next while `look` is busy with the one before.
///
/// `look` gets the pieces in order, on the caller's thread, with what `read` returned and all of the memory:
/// behind what `read` wrote, that of an earlier piece. If the system gives no other thread, they take turns.
pub fn read_ahead<P: Send, R: Send>(
    media: &mut dyn Media,
    mut pieces: impl Iterator<Item = P> + Send,
    bytes: usize,
    mut read: impl FnMut(&mut dyn Media, &P, &mut [u8]) -> R + Send,
    mut look: impl FnMut(P, &[u8], R),
) {
    let (give_back, spare) = channel::<BufSlice>();
    let mut next = move || {
        let piece = pieces.next()?;
        let new = |_| Buf::zeroed(bytes).all();
        let mut buf = spare.try_recv().unwrap_or_else(new);
        let read = read(media, &piece, buf.bytes_mut());
        Some((piece, buf, read))
    };
    let mut take = |(piece, buf, read): (P, BufSlice, R)| {
        look(piece, buf.bytes(), read);
        // Once all is read nobody takes it back.
        let _ = give_back.send(buf);
    };
    let other_thread = std::thread::scope(|scope| {
        let next = &mut next;
        // No room: one piece is looked at, and one is read or waits.
        let (send, receive) = sync_channel(0);
        let reader = std::thread::Builder::new().name("hearth-read".to_owned());
        let reader = reader.spawn_scoped(scope, move || {
            while let Some(piece) = next() {
                if send.send(piece).is_err() {
                    return;
                }
            }
        });
        receive.into_iter().for_each(&mut take);
        reader.is_ok()
    });
    if !other_thread {
        while let Some(piece) = next() {
            take(piece);
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    struct Numbers;

    impl Media for Numbers {
        fn len(&self) -> u64 {
            u64::MAX
        }
        fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
            data.fill(offset as u8);
            Ok(())
        }
        fn write_at(&mut self, _: u64, _: &[u8]) -> io::Result<()> {
            Err(io::ErrorKind::Unsupported.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn pieces_come_in_order_with_what_was_read() {
        let mut seen = Vec::new();
        read_ahead(
            &mut Numbers,
            0..20u64,
            8,
            |media, piece, data| media.read_at(*piece, &mut data[..4]).is_ok(),
            |piece, data, ok| seen.push((piece, data[..4].to_vec(), ok)),
        );
        let want: Vec<_> = (0..20u64).map(|p| (p, vec![p as u8; 4], true)).collect();
        assert_eq!(seen, want);
    }
}
