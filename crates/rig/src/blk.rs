//! A block client over libblkio's drivers: the same loop on a file and on a vhost-user socket.
//!
//! libblkio (here its Rust crate) is what QEMU and others use as front end outside of a guest,
//! so it stands for a real one, and with its io_uring driver the very same loop measures the
//! bare file.

use crate::rng::Rng;
use anyhow::{Context, Result, bail, ensure};
use blkio::{Blkio, Blkioq, Completion, MemoryRegion, ReqFlags};
use hdrhistogram::Histogram;
use std::mem::MaybeUninit;
use std::path::Path;
use std::time::{Duration, Instant};

/// Longest wait for one completion.
const LIMIT: Duration = Duration::from_secs(60);

/// What a loop does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Random reads.
    Read,
    /// Random writes.
    Write,
    /// Both.
    Mixed {
        /// Of 100 requests, how many are reads.
        reads: u32,
    },
}

/// A loop of random requests.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// What.
    pub kind: Kind,
    /// Requests in flight.
    pub depth: usize,
    /// Bytes of each.
    pub block: usize,
    /// Only this much of the front of the disk.
    pub span: u64,
    /// How long.
    pub time: Duration,
    /// Touch no place twice, and end when all were touched.
    pub once: bool,
    /// A flush after every so many writes; 0 for none. It takes a request's place in the queue
    /// and is not counted as one.
    pub flush_every: u32,
    /// So that two runs differ.
    pub seed: u64,
}

/// What a loop asks for next.
enum Ask {
    Read(u64),
    Write(u64),
    Flush,
}

/// The requests of a loop, one after the other.
struct Script {
    load: Load,
    places: u64,
    rng: Rng,
    /// With `once`: the places in the order of their turn.
    order: Vec<u32>,
    asked: usize,
    writes: u32,
}

impl Script {
    fn new(load: &Load, places: u64) -> Result<Script> {
        let mut rng = Rng::new(load.seed);
        let mut order = Vec::new();
        if load.once {
            let places = u32::try_from(places).context("too many places to touch each once")?;
            order = (0..places).collect();
            // Fisher and Yates.
            for i in (1..order.len()).rev() {
                order.swap(i, rng.below(i as u64 + 1) as usize);
            }
        }
        Ok(Script {
            load: *load,
            places,
            rng,
            order,
            asked: 0,
            writes: 0,
        })
    }

    /// The next request; `None` when every place was touched.
    fn next(&mut self) -> Option<Ask> {
        if self.load.flush_every > 0 && self.writes >= self.load.flush_every {
            self.writes = 0;
            return Some(Ask::Flush);
        }
        let place = if self.load.once {
            u64::from(*self.order.get(self.asked)?)
        } else {
            self.rng.below(self.places)
        };
        self.asked += 1;
        let write = match self.load.kind {
            Kind::Read => false,
            Kind::Write => true,
            Kind::Mixed { reads } => self.rng.below(100) >= u64::from(reads),
        };
        let offset = place * self.load.block as u64;
        Some(if write {
            self.writes += 1;
            Ask::Write(offset)
        } else {
            Ask::Read(offset)
        })
    }
}

/// What a loop measured.
#[derive(Clone, Copy, Debug, Default)]
pub struct Measured {
    /// Requests completed.
    pub requests: u64,
    /// Requests per second.
    pub iops: f64,
    /// Mean time of a request, microseconds.
    pub mean_us: f64,
    /// 99th percentile of it.
    pub p99_us: f64,
    /// Processor time of this thread per request, microseconds.
    pub client_us: f64,
}

/// A connected disk with one queue and memory for its requests.
pub struct Disk {
    queue: Blkioq,
    region: MemoryRegion,
    /// Bytes.
    pub capacity: u64,
    // Last: queues use it.
    blkio: Blkio,
}

fn said(e: blkio::Error) -> anyhow::Error {
    anyhow::anyhow!("{}", e.message())
}

impl Disk {
    /// A disk behind a vhost-user socket.
    pub fn vhost(socket: &Path, memory: usize) -> Result<Disk> {
        let blkio = Blkio::new("virtio-blk-vhost-user").map_err(said)?;
        Disk::open(blkio, socket, memory)
            .with_context(|| format!("vhost-user at {}", socket.display()))
    }

    /// A file, O_DIRECT through io_uring.
    pub fn file(path: &Path, memory: usize) -> Result<Disk> {
        let mut blkio = Blkio::new("io_uring").map_err(said)?;
        blkio.set_bool("direct", true).map_err(said)?;
        Disk::open(blkio, path, memory)
    }

    fn open(mut blkio: Blkio, path: &Path, memory: usize) -> Result<Disk> {
        let path = path.to_str().context("a path that is no text")?;
        blkio.set_str("path", path).map_err(said)?;
        blkio.connect().map_err(said)?;
        let capacity = blkio.get_u64("capacity").map_err(said)?;
        blkio.set_i32("num-queues", 1).map_err(said)?;
        let region = blkio.alloc_mem_region(memory).map_err(said)?;
        let mut outcome = blkio.start().map_err(said)?;
        blkio.map_mem_region(&region).map_err(said)?;
        let queue = outcome.queues.pop().context("no queue")?;
        Ok(Disk {
            queue,
            region,
            capacity,
            blkio,
        })
    }

    /// Asks again how large the disk is.
    pub fn ask_capacity(&self) -> Result<u64> {
        self.blkio.get_u64("capacity").map_err(said)
    }

    /// The memory requests may use.
    pub fn memory(&mut self) -> &mut [u8] {
        // SAFETY: mapped by libblkio with this length for as long as `self` lives; between
        // requests nobody else writes it.
        unsafe { std::slice::from_raw_parts_mut(self.region.addr as *mut u8, self.region.len) }
    }

    fn finish(&mut self) -> Result<()> {
        let mut done = [MaybeUninit::<Completion>::uninit(); 1];
        let mut limit = LIMIT;
        let n = self
            .queue
            .do_io(&mut done, 1, Some(&mut limit), None)
            .map_err(said)?;
        ensure!(n == 1, "no completion");
        // SAFETY: the driver filled in as many as it said.
        let ret = unsafe { done[0].assume_init_ref() }.ret;
        ensure!(
            ret == 0,
            "the request failed: {}",
            std::io::Error::from_raw_os_error(-ret)
        );
        Ok(())
    }

    /// Reads `len` bytes of the disk into memory from byte `at`.
    pub fn read(&mut self, offset: u64, at: usize, len: usize) -> Result<()> {
        ensure!(at + len <= self.region.len, "beyond the memory");
        let buf = (self.region.addr + at) as *mut u8;
        self.queue.read(offset, buf, len, 0, ReqFlags::empty());
        self.finish()
    }

    /// Writes `len` bytes of memory from byte `at`.
    pub fn write(&mut self, offset: u64, at: usize, len: usize) -> Result<()> {
        ensure!(at + len <= self.region.len, "beyond the memory");
        let buf = (self.region.addr + at) as *const u8;
        self.queue.write(offset, buf, len, 0, ReqFlags::empty());
        self.finish()
    }

    /// Reads into pieces of memory (where, length), in order.
    pub fn read_pieces(&mut self, offset: u64, pieces: &[(usize, usize)]) -> Result<()> {
        let iov = self.pieces(pieces)?;
        self.queue
            .readv(offset, iov.as_ptr(), iov.len() as u32, 0, ReqFlags::empty());
        self.finish()
    }

    /// Writes pieces of memory (where, length), in order.
    pub fn write_pieces(&mut self, offset: u64, pieces: &[(usize, usize)]) -> Result<()> {
        let iov = self.pieces(pieces)?;
        self.queue
            .writev(offset, iov.as_ptr(), iov.len() as u32, 0, ReqFlags::empty());
        self.finish()
    }

    fn pieces(&self, pieces: &[(usize, usize)]) -> Result<Vec<blkio::iovec>> {
        let mut iov = Vec::new();
        for (at, len) in pieces {
            ensure!(at + len <= self.region.len, "beyond the memory");
            iov.push(blkio::iovec {
                iov_base: (self.region.addr + at) as *mut _,
                iov_len: *len,
            });
        }
        Ok(iov)
    }

    /// Makes completed writes durable.
    pub fn flush(&mut self) -> Result<()> {
        self.queue.flush(0, ReqFlags::empty());
        self.finish()
    }

    /// Discards a range.
    pub fn discard(&mut self, offset: u64, len: u64) -> Result<()> {
        self.queue.discard(offset, len, 0, ReqFlags::empty());
        self.finish()
    }

    /// Zeroes a range.
    pub fn zero(&mut self, offset: u64, len: u64) -> Result<()> {
        self.queue.write_zeroes(offset, len, 0, ReqFlags::empty());
        self.finish()
    }

    /// Runs a loop of random requests.
    pub fn run(&mut self, load: &Load) -> Result<Measured> {
        self.run_unless(load, &|| Ok(()))
    }

    /// The same, but gives up with the error of `stop`, which is asked whenever requests complete.
    pub fn run_unless(&mut self, load: &Load, stop: &dyn Fn() -> Result<()>) -> Result<Measured> {
        let Load { depth, block, .. } = *load;
        ensure!(depth * block <= self.region.len, "too little memory");
        let places = load.span.min(self.capacity) / block as u64;
        ensure!(places > 0, "the disk is smaller than a request");
        if load.kind != Kind::Read {
            Rng::new(load.seed).fill(self.memory());
        }
        let mut script = Script::new(load, places)?;
        let mut started = vec![Instant::now(); depth];
        let mut flushing = vec![false; depth];
        let mut latencies = Latencies::new()?;
        let mut called_off = None;
        let cpu = thread_cpu();
        let begin = Instant::now();
        let mut idle: Vec<usize> = (0..depth).collect();
        let mut done: Vec<MaybeUninit<Completion>> =
            (0..depth).map(|_| MaybeUninit::uninit()).collect();
        loop {
            // What is in flight uses the memory: it ends before this does.
            called_off = called_off.or_else(|| stop().err());
            let open = called_off.is_none() && begin.elapsed() < load.time;
            while open && let Some(slot) = idle.pop() {
                let Some(ask) = script.next() else {
                    idle.push(slot);
                    break;
                };
                let at = self.region.addr + slot * block;
                started[slot] = Instant::now();
                flushing[slot] = matches!(ask, Ask::Flush);
                let none = ReqFlags::empty();
                match ask {
                    Ask::Read(from) => self.queue.read(from, at as *mut u8, block, slot, none),
                    Ask::Write(to) => self.queue.write(to, at as *const u8, block, slot, none),
                    Ask::Flush => self.queue.flush(slot, none),
                }
            }
            if idle.len() == depth {
                break;
            }
            let mut limit = LIMIT;
            let n = self
                .queue
                .do_io(&mut done, 1, Some(&mut limit), None)
                .map_err(said)?;
            let now = Instant::now();
            for completion in &done[..n] {
                // SAFETY: the driver filled in as many as it said.
                let completion = unsafe { completion.assume_init_ref() };
                if completion.ret != 0 {
                    bail!("a request failed with {}", completion.ret);
                }
                let slot = completion.user_data;
                idle.push(slot);
                if flushing[slot] {
                    continue;
                }
                latencies.note(now.duration_since(started[slot]));
            }
        }
        if let Some(e) = called_off {
            return Err(e);
        }
        let seconds = begin.elapsed().as_secs_f64();
        let spent = thread_cpu() - cpu;
        let requests = latencies.count();
        Ok(Measured {
            requests,
            iops: requests as f64 / seconds,
            mean_us: latencies.mean_us(),
            p99_us: latencies.p99_us(),
            client_us: spent.as_secs_f64() * 1e6 / requests.max(1) as f64,
        })
    }
}

/// Times of all requests of a loop, however many: room and precision are fixed.
struct Latencies {
    /// Nanoseconds; longer ones than [`LIMIT`] count as that.
    histogram: Histogram<u64>,
    total_ns: u64,
}

impl Latencies {
    fn new() -> Result<Latencies> {
        Ok(Latencies {
            // Three digits: a percentile is off by a thousandth at most.
            histogram: Histogram::new_with_max(LIMIT.as_nanos() as u64, 3)?,
            total_ns: 0,
        })
    }

    fn note(&mut self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.total_ns = self.total_ns.saturating_add(ns);
        self.histogram.saturating_record(ns);
    }

    fn count(&self) -> u64 {
        self.histogram.len()
    }

    /// Exact.
    fn mean_us(&self) -> f64 {
        self.total_ns as f64 / self.count().max(1) as f64 / 1e3
    }

    fn p99_us(&self) -> f64 {
        self.histogram.value_at_quantile(0.99) as f64 / 1e3
    }
}

/// Processor time of the calling thread.
fn thread_cpu() -> Duration {
    let mut ts = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: an out-pointer that lives across the call.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut ts) };
    Duration::new(ts.tv_sec as u64, ts.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(kind: Kind, once: bool, flush_every: u32) -> Load {
        Load {
            kind,
            depth: 1,
            block: 4096,
            span: 0,
            time: Duration::ZERO,
            once,
            flush_every,
            seed: 5,
        }
    }

    #[test]
    fn all_times_count_and_long_ones_do_not_wrap() {
        let mut times = Latencies::new().unwrap();
        assert_eq!(
            (times.count(), times.mean_us(), times.p99_us()),
            (0, 0.0, 0.0)
        );
        let fast = 2 << 20;
        for _ in 0..fast {
            times.note(Duration::from_micros(10));
        }
        // Late ones, each longer than 32 bits of nanoseconds.
        for _ in 0..fast / 50 {
            times.note(Duration::from_secs(5));
        }
        let near = |a: f64, b: f64| (a / b - 1.0).abs() < 0.002;
        assert!(near(times.p99_us(), 5e6), "{}", times.p99_us());
        assert!(
            near(times.mean_us(), (10.0 + 5e6 / 50.0) / 1.02),
            "{}",
            times.mean_us()
        );
        times.note(LIMIT * 10);
        assert_eq!(times.count(), fast + fast / 50 + 1);
    }

    #[test]
    fn every_place_is_touched_once() {
        let mut script = Script::new(&load(Kind::Read, true, 0), 100).unwrap();
        let mut seen = Vec::new();
        while let Some(Ask::Read(at)) = script.next() {
            seen.push(at / 4096);
        }
        assert!(!seen.is_sorted());
        seen.sort_unstable();
        assert_eq!(seen, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn mixed_loads_keep_their_share_and_flush() {
        let mut script = Script::new(&load(Kind::Mixed { reads: 60 }, false, 40), 1000).unwrap();
        let (mut reads, mut writes, mut flushes, mut since) = (0, 0, 0, 0);
        for _ in 0..10_000 {
            match script.next().unwrap() {
                Ask::Read(_) => reads += 1,
                Ask::Write(_) => (writes, since) = (writes + 1, since + 1),
                Ask::Flush => {
                    assert_eq!(since, 40);
                    (flushes, since) = (flushes + 1, 0);
                }
            }
        }
        assert!((5600..6200).contains(&reads), "{reads}");
        assert_eq!(flushes, writes / 40);
    }
}
