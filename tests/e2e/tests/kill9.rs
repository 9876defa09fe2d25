//! kill -9 under a verified write load.
//!
//! A client writes blocks that say which version they are, many in flight, flushes now and then
//! and notes what a flush covered. The daemon is killed at a random moment. After the restart
//! every block must hold, whole, the version of the last acknowledged flush or a later one that
//! was written, and keep giving the same answer. `CYCLES` says how often; `SEED` repeats a run.

use anyhow::{Context, Result, bail, ensure};
use hearth_e2e::daemon::path;
use hearth_e2e::nbd::{Client, Command};
use hearth_e2e::pattern::{BLOCK, fill, version_of};
use hearth_e2e::{Hearth, rng::Rng};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Blocks of the disk: 64 MiB, on a flash of twice that, so that segments are freed and reused.
const BLOCKS: u64 = 16 << 10;
/// Requests in flight.
const DEPTH: usize = 32;
/// Blocks of a large write, at most.
const RUN_MAX: u64 = 32;
/// A cycle's load lasts between these, in milliseconds.
const LOAD_MS: (u64, u64) = (30, 600);

#[test]
fn write_back() -> Result<()> {
    cycles("write-back", "", cycles_wanted())
}

#[test]
fn write_through() -> Result<()> {
    cycles("write-through", "", cycles_wanted())
}

#[test]
fn write_around() -> Result<()> {
    cycles("write-around", "", cycles_wanted())
}

/// A slow origin keeps much dirty data on flash and destaging under way at the kill.
#[test]
fn write_back_slow_origin() -> Result<()> {
    cycles(
        "write-back",
        "model-latency=2ms:",
        cycles_wanted().div_ceil(2),
    )
}

fn cycles_wanted() -> u64 {
    number("CYCLES").unwrap_or(5)
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

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

struct Writer {
    known: Vec<Known>,
    rng: Rng,
    /// Every version is a number of its own.
    version: u64,
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

fn cycles(mode: &str, wrapper: &str, count: u64) -> Result<()> {
    let seed = number("SEED").unwrap_or_else(|| {
        std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(1, |d| d.as_nanos() as u64)
    });
    println!("kill -9, {mode} {wrapper}: {count} cycles, SEED={seed}");
    let mut hearth = Hearth::serving("160M")?;
    let origin = hearth.dir().join("o.img");
    std::fs::write(&origin, vec![0u8; BLOCKS as usize * BLOCK])?;
    hearth.add(
        "d",
        &format!("{wrapper}{}", path(&origin)),
        &["--mode", mode],
    )?;
    let mut writer = Writer {
        known: vec![Known::default(); BLOCKS as usize],
        rng: Rng::new(seed),
        version: 0,
    };
    for cycle in 0..count {
        let about = || format!("{mode} {wrapper}, cycle {cycle}, SEED={seed}");
        writer.load(&mut hearth).with_context(about)?;
        hearth.start().with_context(about)?;
        let mut client = hearth.connect("d").with_context(about)?;
        writer.check(&mut client).with_context(about)?;
        // The same answer again: no flip without a write.
        writer.check_stable(&mut client).with_context(about)?;
    }
    // What is left must reach the origin, and be the same there.
    hearth.ok(&["disk", "flush", "d"])?;
    let plain = std::fs::read(&origin)?;
    for (block, known) in writer.known.iter().enumerate() {
        let found = version_of(&plain[block * BLOCK..][..BLOCK], block as u64)
            .map_err(anyhow::Error::msg)?;
        ensure!(
            found == known.safe,
            "origin: block {block} holds version {found}, not {} (SEED={seed})",
            known.safe
        );
    }
    Ok(())
}

impl Writer {
    /// Loads the daemon until it dies by our hand.
    fn load(&mut self, hearth: &mut Hearth) -> Result<()> {
        let mut client = hearth.connect("d")?;
        let mut flights: HashMap<u64, Flight> = HashMap::new();
        let life = Duration::from_millis(LOAD_MS.0 + self.rng.below(LOAD_MS.1 - LOAD_MS.0));
        let end = Instant::now() + life;
        let mut buffer = Vec::new();
        while Instant::now() < end {
            while flights.len() < DEPTH {
                let (cookie, flight) = self.send(&mut client, &mut buffer)?;
                flights.insert(cookie, flight);
            }
            let reply = client.receive().with_context(|| hearth.log())?;
            ensure!(
                reply.error == 0,
                "request failed with error {}: {}",
                reply.error,
                hearth.log()
            );
            if let Some(flight) = flights.remove(&reply.cookie) {
                self.answered(flight, &reply.data)?;
            }
        }
        hearth.kill9()?;
        // Answers that were on their way count: the client has them.
        while let Ok(reply) = client.receive() {
            if let (Some(flight), 0) = (flights.remove(&reply.cookie), reply.error) {
                self.answered(flight, &reply.data)?;
            }
        }
        self.known.iter_mut().for_each(|k| k.busy = false);
        Ok(())
    }

    fn send(&mut self, client: &mut Client, buffer: &mut Vec<u8>) -> Result<(u64, Flight)> {
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
        let span = if self.rng.below(2) == 0 {
            BLOCKS / 10
        } else {
            BLOCKS
        };
        let first = self.rng.below(span);
        let free = self.known[first as usize..]
            .iter()
            .take(wanted as usize)
            .take_while(|k| !k.busy)
            .count() as u64;
        let at = first * BLOCK as u64;
        if free == 0 || dice < 25 {
            let count = wanted.min(BLOCKS - first);
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
                    let found = version_of(block, at as u64).map_err(anyhow::Error::msg)?;
                    let sent = self.known[at].sent;
                    ensure!(
                        (at_least..=sent).contains(&found),
                        "block {at} reads version {found}; answered before the read: {at_least}, newest sent: {sent}"
                    );
                }
            }
        }
        Ok(())
    }

    /// After a restart: every block holds its safe version or a later one; that one is it now.
    fn check(&mut self, client: &mut Client) -> Result<()> {
        let mut wrong = Vec::new();
        for (at, found) in read_all(client)?.into_iter().enumerate() {
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
            "{} blocks are wrong after kill -9:\n{}",
            wrong.len(),
            wrong[..wrong.len().min(10)].join("\n")
        );
        Ok(())
    }

    fn check_stable(&self, client: &mut Client) -> Result<()> {
        for (at, found) in read_all(client)?.into_iter().enumerate() {
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

fn read_all(client: &mut Client) -> Result<Vec<Result<u64, String>>> {
    const PIECE: u64 = 256;
    let mut versions = Vec::with_capacity(BLOCKS as usize);
    for first in (0..BLOCKS).step_by(PIECE as usize) {
        let data = client.read(first * BLOCK as u64, (PIECE as usize * BLOCK) as u32)?;
        versions.extend(
            data.chunks(BLOCK)
                .enumerate()
                .map(|(i, block)| version_of(block, first + i as u64)),
        );
    }
    Ok(versions)
}
