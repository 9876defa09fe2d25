//! A verified write load: blocks that say which version they are, many in flight, with flushes
//! now and then and a note of what each flush covered. Whatever dies meanwhile, every block must
//! later hold, whole, the version of the last answered flush or a newer one that was written.

use crate::daemon::Hearth;
use crate::nbd::{Client, Command};
use crate::pattern::{BLOCK, fill, version_of};
use crate::rng::Rng;
use anyhow::{Context, Result, bail, ensure};
use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

/// Blocks of the disk, if nothing else is said: 64 MiB.
pub const BLOCKS: u64 = 16 << 10;
/// Requests in flight.
const DEPTH: usize = 32;
/// Blocks of a large write, at most.
const RUN_MAX: u64 = 32;

/// What the writer knows of one block.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    /// Newest version sent.
    sent: u64,
    /// Newest version answered.
    answered: u64,
    /// Newest version covered by an answered flush (or FUA), or seen after a restart.
    safe: u64,
    /// A write of it is in flight: only one at a time, so that versions are ordered.
    busy: bool,
}

/// The load's side of the truth.
#[derive(Debug)]
pub struct Writer {
    known: Vec<Known>,
    rng: Rng,
    /// Every version is a number of its own.
    version: u64,
    /// A read beside a write of the same block may see a part of it.
    may_tear: bool,
}

enum Flight {
    Write {
        first: u64,
        count: u64,
        fua: bool,
    },
    /// The blocks' answered versions when the flush was sent.
    Flush(Vec<u64>),
    Read {
        first: u64,
        count: u64,
        at_least: Vec<u64>,
    },
}

impl Writer {
    /// A writer of a disk full of zeros, that will do the same again with the same seed.
    pub fn new(seed: u64) -> Writer {
        Writer::of(BLOCKS, seed)
    }

    /// The same for a disk of so many blocks.
    pub fn of(blocks: u64, seed: u64) -> Writer {
        Writer {
            known: vec![Known::default(); blocks as usize],
            rng: Rng::new(seed),
            version: 0,
            may_tear: false,
        }
    }

    /// For a disk that passes everything through: no disk promises that a read beside a write of the same block
    /// is not torn, and neither does the kernel's page cache. The cache does.
    pub fn uncached(seed: u64) -> Writer {
        Writer {
            may_tear: true,
            ..Writer::new(seed)
        }
    }

    fn blocks(&self) -> u64 {
        self.known.len() as u64
    }

    /// A number below `n`, of the load's own dice.
    pub fn below(&mut self, n: u64) -> u64 {
        self.rng.below(n)
    }

    /// Load on disk `disk`, kill -9 in the middle of it, a start and a look at every block, `cycles` times. A cycle's
    /// load lasts between `life.0` and `life.1` milliseconds; `about` says what a failure is told of cycle `n`.
    pub fn survive(
        &mut self,
        hearth: &mut Hearth,
        disk: &str,
        cycles: u64,
        life: (u64, u64),
        about: &dyn Fn(u64) -> String,
    ) -> Result<()> {
        for cycle in 0..cycles {
            let about = || about(cycle);
            let mut client = hearth.connect(disk)?;
            let life = Duration::from_millis(life.0 + self.below(life.1 - life.0));
            self.load(&mut client, life, || hearth.kill9())
                .with_context(about)
                .with_context(|| hearth.log())?;
            hearth.start().with_context(about)?;
            let mut client = hearth.connect(disk).with_context(about)?;
            self.check(&mut client).with_context(about)?;
            // The same answer again: no flip without a write.
            self.check_stable(&mut client).with_context(about)?;
        }
        Ok(())
    }

    /// Keeps the disk busy for so long, then calls `end` in the middle of it (which may kill the
    /// daemon) and takes every answer that was on its way. No request may fail.
    pub fn load(
        &mut self,
        client: &mut Client,
        life: Duration,
        end: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let until = Instant::now() + life;
        self.load_while(client, || Instant::now() < until, end)
    }

    /// The same for as long as `going`. When that has become false while an answer was waited for, it need not
    /// come any more: whoever ends the load may kill the daemon at once.
    pub fn load_while(
        &mut self,
        client: &mut Client,
        going: impl Fn() -> bool,
        end: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let mut flights: HashMap<u64, Flight> = HashMap::new();
        let connection = self.keep_busy(client, &mut flights, &going)?;
        if going() {
            connection?;
        }
        end()?;
        // Answers that were on their way count: the client has them.
        while !flights.is_empty()
            && let Ok(reply) = client.receive()
        {
            if let (Some(flight), 0) = (flights.remove(&reply.cookie), reply.error) {
                self.answered(flight, &reply.data)?;
            }
        }
        self.known.iter_mut().for_each(|k| k.busy = false);
        Ok(())
    }

    /// The outer result is the judgement of what was read; the inner one says how the connection fared.
    fn keep_busy(
        &mut self,
        client: &mut Client,
        flights: &mut HashMap<u64, Flight>,
        going: &impl Fn() -> bool,
    ) -> Result<io::Result<()>> {
        let mut buffer = Vec::new();
        while going() {
            while flights.len() < DEPTH {
                match self.send(client, &mut buffer) {
                    Ok((cookie, flight)) => flights.insert(cookie, flight),
                    Err(e) => return Ok(Err(e)),
                };
            }
            let reply = match client.receive() {
                Ok(reply) => reply,
                Err(e) => return Ok(Err(e)),
            };
            ensure!(
                reply.error == 0,
                "request failed with error {}",
                reply.error
            );
            if let Some(flight) = flights.remove(&reply.cookie) {
                self.answered(flight, &reply.data)?;
            }
        }
        Ok(Ok(()))
    }

    fn send(&mut self, client: &mut Client, buffer: &mut Vec<u8>) -> io::Result<(u64, Flight)> {
        let dice = self.rng.below(100);
        if dice < 3 {
            let covered = self.known.iter().map(|k| k.answered).collect();
            return Ok((
                client.send(Command::Flush, 0, 0, &[])?,
                Flight::Flush(covered),
            ));
        }
        let wanted = if self.rng.below(8) == 0 {
            1 + self.rng.below(RUN_MAX)
        } else {
            1
        };
        // A hot tenth gets half of the load: overwrites of dirty blocks matter.
        let blocks = self.blocks();
        let span = if self.rng.below(2) == 0 {
            blocks / 10
        } else {
            blocks
        };
        let first = self.rng.below(span);
        let free = self.known[first as usize..]
            .iter()
            .take(wanted as usize)
            .take_while(|k| !k.busy)
            .count() as u64;
        let at = first * BLOCK as u64;
        if free == 0 || dice < 25 {
            let count = wanted.min(blocks - first);
            let at_least = self.known[first as usize..][..count as usize]
                .iter()
                .map(|k| k.answered)
                .collect();
            let cookie = client.send(Command::Read, at, (count as usize * BLOCK) as u32, &[])?;
            return Ok((
                cookie,
                Flight::Read {
                    first,
                    count,
                    at_least,
                },
            ));
        }
        self.version += 1;
        buffer.resize(free as usize * BLOCK, 0);
        for (i, block) in buffer.chunks_mut(BLOCK).enumerate() {
            let known = &mut self.known[first as usize + i];
            (known.sent, known.busy) = (self.version, true);
            fill(block, first + i as u64, self.version);
        }
        let fua = self.rng.below(50) == 0;
        let cookie = client.send(Command::Write { fua }, at, buffer.len() as u32, buffer)?;
        Ok((
            cookie,
            Flight::Write {
                first,
                count: free,
                fua,
            },
        ))
    }

    fn answered(&mut self, flight: Flight, data: &[u8]) -> Result<()> {
        match flight {
            Flight::Write { first, count, fua } => {
                for known in &mut self.known[first as usize..][..count as usize] {
                    known.busy = false;
                    known.answered = known.sent;
                    if fua {
                        known.safe = known.sent;
                    }
                }
            }
            Flight::Flush(covered) => {
                for (known, covered) in self.known.iter_mut().zip(covered) {
                    known.safe = known.safe.max(covered);
                }
            }
            Flight::Read {
                first,
                count,
                at_least,
            } => {
                ensure!(data.len() == count as usize * BLOCK, "short read");
                for (i, (block, at_least)) in data.chunks(BLOCK).zip(at_least).enumerate() {
                    let at = first as usize + i;
                    let sent = self.known[at].sent;
                    let found = match version_of(block, at as u64) {
                        Ok(found) => found,
                        // Newer than what was answered before the read: a write was beside it.
                        Err(_) if self.may_tear && sent > at_least => continue,
                        Err(why) => return Err(anyhow::Error::msg(why)),
                    };
                    ensure!(
                        (at_least..=sent).contains(&found),
                        "block {at} reads version {found}; answered before the read: {at_least}, newest sent: {sent}"
                    );
                }
            }
        }
        Ok(())
    }

    /// A flush outside the load, after which every answered write is safe.
    pub fn flush(&mut self, client: &mut Client) -> Result<()> {
        client.flush()?;
        for known in &mut self.known {
            known.safe = known.answered;
        }
        Ok(())
    }

    /// After a restart: every block holds its safe version or a later one; that one is it now.
    pub fn check(&mut self, client: &mut Client) -> Result<()> {
        let mut wrong = Vec::new();
        for (at, found) in read_all(client, self.blocks())?.into_iter().enumerate() {
            let known = &mut self.known[at];
            match found {
                Ok(found) if (known.safe..=known.sent).contains(&found) => {
                    // Stable from here on: what was read is what it is.
                    *known = Known {
                        sent: found,
                        answered: found,
                        safe: found,
                        busy: false,
                    };
                }
                Ok(found) => wrong.push(format!(
                    "block {at} holds version {found}; flushed: {}, newest sent: {}",
                    known.safe, known.sent
                )),
                Err(why) => wrong.push(why),
            }
        }
        ensure!(
            wrong.is_empty(),
            "{} blocks are wrong after a restart:\n{}",
            wrong.len(),
            wrong[..wrong.len().min(10)].join("\n")
        );
        Ok(())
    }

    /// The same answer again: no flip without a write.
    pub fn check_stable(&self, client: &mut Client) -> Result<()> {
        for (at, found) in read_all(client, self.blocks())?.into_iter().enumerate() {
            if found != Ok(self.known[at].safe) {
                bail!(
                    "block {at} flipped from version {} to {found:?} without a write",
                    self.known[at].safe
                );
            }
        }
        Ok(())
    }
}

impl Writer {
    /// Nothing is in flight and everything is flushed: a file or image as raw bytes must hold
    /// exactly what is known.
    pub fn check_file(&self, path: &Path) -> Result<()> {
        let plain = std::fs::read(path).with_context(|| path.display().to_string())?;
        for (block, known) in self.known.iter().enumerate() {
            let data = plain
                .get(block * BLOCK..)
                .and_then(|rest| rest.get(..BLOCK))
                .with_context(|| format!("{} is too short", path.display()))?;
            let found = version_of(data, block as u64).map_err(anyhow::Error::msg)?;
            ensure!(
                found == known.safe,
                "origin: block {block} holds version {found}, not {}",
                known.safe
            );
        }
        Ok(())
    }
}

fn read_all(client: &mut Client, blocks: u64) -> Result<Vec<Result<u64, String>>> {
    const PIECE: u64 = 256;
    let mut versions = Vec::with_capacity(blocks as usize);
    for first in (0..blocks).step_by(PIECE as usize) {
        let count = PIECE.min(blocks - first) as usize;
        let data = client.read(first * BLOCK as u64, (count * BLOCK) as u32)?;
        versions.extend(
            data.chunks(BLOCK)
                .enumerate()
                .map(|(i, block)| version_of(block, first + i as u64)),
        );
    }
    Ok(versions)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_of_half_a_write(mut writer: Writer, beside_a_write: bool) -> Result<()> {
        let (mut old, mut new) = (vec![0; BLOCK], vec![0; BLOCK]);
        fill(&mut old, 0, 1);
        fill(&mut new, 0, 2);
        old[..BLOCK / 2].copy_from_slice(&new[..BLOCK / 2]);
        writer.known[0] = Known {
            sent: 1 + u64::from(beside_a_write),
            answered: 1,
            safe: 0,
            busy: beside_a_write,
        };
        let read = Flight::Read {
            first: 0,
            count: 1,
            at_least: vec![1],
        };
        writer.answered(read, &old)
    }

    #[test]
    fn only_uncached_reads_beside_a_write_may_be_torn() {
        assert!(read_of_half_a_write(Writer::uncached(1), true).is_ok());
        assert!(read_of_half_a_write(Writer::uncached(1), false).is_err());
        assert!(read_of_half_a_write(Writer::new(1), true).is_err());
    }
}
