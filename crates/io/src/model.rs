//! A hard disk as arithmetic: when would a 7200 rpm desktop drive have finished this?
//!
//! Demos, benchmarks and tests need a slow disk that is slow in the right way: cheap when
//! sequential, dear when random, better with a deep queue. The model is pure and runs on any
//! clock: tell it of commands with [`HddModel::submit`], ask for the next instant with
//! [`HddModel::next_event`], collect the finished with [`HddModel::advance`]. What it gives is
//! always to be labelled as a model.
//!
//! The arm moves in `settle + k·sqrt(distance)`, the platter turns, data passes the head at a
//! fixed rate; commands in the queue are served shortest access first, none left waiting for
//! ever. Reads stream on from where the head is (read-ahead); writes complete in a small cache
//! and are drained in the same order; a flush waits for the drain. The file's size is taken as
//! the whole disk, so random access over it costs what random access over a full drive costs.

/// The measures of a modelled drive. Times in nanoseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HddParams {
    /// One turn of the platter.
    pub rotation_ns: u64,
    /// Shortest move of the arm to another track.
    pub settle_ns: u64,
    /// Move across the whole disk.
    pub full_stroke_ns: u64,
    /// Extra settling before a write may begin.
    pub write_settle_ns: u64,
    /// Bytes per second passing the head.
    pub rate: u64,
    /// Command handling: earliest start after arrival, and cost of a cached answer.
    pub overhead_ns: u64,
    /// Commands the drive looks at when it chooses the next (its NCQ window).
    pub queue: usize,
    /// Separate runs its write cache holds.
    pub write_cache: usize,
    /// Bytes it reads ahead of a sequential reader.
    pub readahead: u64,
    /// No command waits longer than this before it is served whatever it costs.
    pub patience_ns: u64,
}

impl Default for HddParams {
    /// A 7200 rpm desktop drive: 4 KiB random reads about 77/s at depth 1 and 170/s at depth
    /// 24, random writes about 100/s, 165 MB/s sequential (see the tests of this module).
    fn default() -> Self {
        HddParams {
            rotation_ns: 60_000_000_000 / 7200,
            settle_ns: 1_200_000,
            full_stroke_ns: 15_000_000,
            write_settle_ns: 500_000,
            rate: 165_000_000,
            overhead_ns: 100_000,
            queue: 32,
            write_cache: 4,
            readahead: 8 << 20,
            patience_ns: 1_000_000_000,
        }
    }
}

/// What a command does to the drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HddCommand {
    /// Data from the platter.
    Read,
    /// Data into the write cache.
    Write,
    /// Wait until the write cache as it is now has drained.
    Flush,
}

/// Longest run of merged writes: one entry of the write cache.
const RUN_MAX: u64 = 1 << 20;

#[derive(Clone, Debug)]
struct Waiting {
    id: u64,
    offset: u64,
    len: u64,
    arrived: u64,
}

#[derive(Clone, Debug)]
struct Run {
    offset: u64,
    len: u64,
    since: u64,
    /// The oldest write in the run, counted from 1; a flush waits for all up to its own count.
    first: u64,
}

#[derive(Debug)]
enum Active {
    Read(u64),
    Drain(Run),
}

#[derive(Clone, Copy)]
enum Pick {
    Read(usize),
    Drain(usize),
}

/// The state of one modelled drive.
#[derive(Debug)]
pub struct HddModel {
    params: HddParams,
    capacity: u64,
    track_bytes: u64,
    reads: Vec<Waiting>,
    writes: std::collections::VecDeque<Waiting>,
    cache: Vec<Run>,
    flushes: Vec<(u64, u64)>,
    /// What the arm does now, until when.
    active: Option<(u64, Active)>,
    /// Answers that need no arm: (when, id).
    answers: Vec<(u64, u64)>,
    head: u64,
    /// When the head was at `head`; the arm is free from then on.
    head_ns: u64,
    /// The head came to `head` by reading, so read-ahead went on from there.
    streaming: bool,
    written: u64,
}

impl HddModel {
    /// A drive of `capacity` bytes, idle, its head at the start.
    pub fn new(capacity: u64, params: HddParams) -> HddModel {
        let track_bytes = (u128::from(params.rate) * u128::from(params.rotation_ns) / 1_000_000_000)
            .max(1) as u64;
        HddModel {
            capacity: capacity.max(1),
            track_bytes,
            params,
            reads: Vec::new(),
            writes: std::collections::VecDeque::new(),
            cache: Vec::new(),
            flushes: Vec::new(),
            active: None,
            answers: Vec::new(),
            head: 0,
            head_ns: 0,
            streaming: false,
            written: 0,
        }
    }

    /// Makes the drive larger by `bytes` at its end; seeks over the same distance get shorter, as
    /// they are measured against the whole.
    pub fn grow(&mut self, bytes: u64) {
        self.capacity = self.capacity.saturating_add(bytes);
    }

    /// Takes a command. `now_ns` must not go backwards between calls; `id` comes back from
    /// [`advance`](Self::advance) exactly once.
    pub fn submit(&mut self, now_ns: u64, id: u64, command: HddCommand, offset: u64, len: u64) {
        let waiting = Waiting {
            id,
            offset,
            len,
            arrived: now_ns,
        };
        match command {
            HddCommand::Read
                if self
                    .cache
                    .iter()
                    .any(|r| r.offset <= offset && offset + len <= r.offset + r.len) =>
            {
                self.answers.push((now_ns + self.params.overhead_ns, id));
            }
            HddCommand::Read => self.reads.push(waiting),
            HddCommand::Write => {
                self.writes.push_back(waiting);
                self.accept_writes(now_ns);
            }
            HddCommand::Flush => {
                self.flushes
                    .push((self.written + self.writes.len() as u64, id));
                self.answer_flushes(now_ns);
            }
        }
        self.start(now_ns);
    }

    /// When [`advance`](Self::advance) will next have something to do; `None` if idle.
    pub fn next_event(&self) -> Option<u64> {
        let answer = self.answers.iter().map(|a| a.0).min();
        match (&self.active, answer) {
            (Some((at, _)), Some(other)) => Some((*at).min(other)),
            (Some((at, _)), None) => Some(*at),
            (None, other) => other,
        }
    }

    /// Lets time pass up to `now_ns`; pushes the ids of commands that finished, in order.
    pub fn advance(&mut self, now_ns: u64, finished: &mut Vec<u64>) {
        while let Some(at) = self.next_event().filter(|at| *at <= now_ns) {
            if let Some(i) = self.answers.iter().position(|a| a.0 == at) {
                finished.push(self.answers.swap_remove(i).1);
                continue;
            }
            match self.active.take() {
                Some((_, Active::Read(id))) => finished.push(id),
                Some((_, Active::Drain(_))) => {
                    self.accept_writes(at);
                    self.answer_flushes(at);
                }
                None => return,
            }
            self.start(at);
        }
    }

    fn accept_writes(&mut self, now: u64) {
        while let Some(write) = self.writes.front() {
            let (offset, len, id) = (write.offset, write.len, write.id);
            let end = offset + len;
            let used =
                self.cache.len() + usize::from(matches!(self.active, Some((_, Active::Drain(_)))));
            // Extends or overlaps a run: one entry, while it stays of a size to drain at once.
            let touches = |r: &&mut Run| {
                r.offset <= offset && offset <= r.offset + r.len && end - r.offset <= RUN_MAX
            };
            if let Some(run) = self.cache.iter_mut().find(touches) {
                run.len = run.len.max(end - run.offset);
            } else if used < self.params.write_cache {
                self.cache.push(Run {
                    offset,
                    len,
                    since: now,
                    first: self.written + 1,
                });
            } else {
                return;
            }
            self.written += 1;
            // Longer writes take their time to cross the bus; it is never the bottleneck.
            self.answers.push((now + self.params.overhead_ns, id));
            self.writes.pop_front();
        }
    }

    fn answer_flushes(&mut self, now: u64) {
        let draining = match &self.active {
            Some((_, Active::Drain(run))) => Some(run),
            _ => None,
        };
        let oldest = self
            .cache
            .iter()
            .chain(draining)
            .map(|r| r.first)
            .min()
            .unwrap_or(u64::MAX);
        let (written, at) = (self.written, now + self.params.overhead_ns);
        for (_, id) in self
            .flushes
            .extract_if(.., |(upto, _)| written >= *upto && oldest > *upto)
        {
            self.answers.push((at, id));
        }
    }

    /// If the arm is free, chooses what it does next.
    fn start(&mut self, now: u64) {
        if self.active.is_some() {
            return;
        }
        let Some(pick) = self.pick(now) else { return };
        let (from, offset, len, write) = match pick {
            Pick::Read(i) => {
                let r = &self.reads[i];
                (
                    now.max(r.arrived + self.params.overhead_ns),
                    r.offset,
                    r.len,
                    false,
                )
            }
            Pick::Drain(i) => (now, self.cache[i].offset, self.cache[i].len, true),
        };
        let transfer = self.transfer_ns(len);
        let end = if !write && self.continues(offset) {
            // The platter went on turning under the head: the data may be there already, but
            // at most a read-ahead buffer's worth of it.
            let ahead = self.transfer_ns(self.params.readahead);
            let media = (self.head_ns + transfer).max(now.saturating_sub(ahead));
            self.head_ns = media;
            media.max(from)
        } else {
            let end = from + self.access_ns(from, offset, write) + transfer;
            self.head_ns = end;
            end
        };
        self.head = offset + len;
        self.streaming = !write;
        let active = match pick {
            Pick::Read(i) => Active::Read(self.reads.remove(i).id),
            Pick::Drain(i) => Active::Drain(self.cache.swap_remove(i)),
        };
        self.active = Some((end, active));
    }

    fn pick(&self, now: u64) -> Option<Pick> {
        let late = |since: u64| now.saturating_sub(since) > self.params.patience_ns;
        if let Some(i) = self.cache.iter().position(|r| late(r.since)) {
            return Some(Pick::Drain(i));
        }
        if self.reads.first().is_some_and(|r| late(r.arrived)) {
            return Some(Pick::Read(0));
        }
        let reads = self
            .reads
            .iter()
            .take(self.params.queue)
            .enumerate()
            .map(|(i, r)| {
                let from = now.max(r.arrived + self.params.overhead_ns);
                let cost = if self.continues(r.offset) {
                    0
                } else {
                    self.access_ns(from, r.offset, false)
                };
                (cost, Pick::Read(i))
            });
        // Somebody waits for a read; for a drain only if the cache is full or a flush waits.
        let urgent = !self.writes.is_empty() || !self.flushes.is_empty();
        let penalty = if urgent { 0 } else { self.params.rotation_ns };
        let drains = self.cache.iter().enumerate().map(|(i, r)| {
            (
                self.access_ns(now, r.offset, true) + penalty,
                Pick::Drain(i),
            )
        });
        reads
            .chain(drains)
            .min_by_key(|(cost, _)| *cost)
            .map(|(_, pick)| pick)
    }

    fn continues(&self, offset: u64) -> bool {
        self.streaming && offset == self.head
    }

    fn transfer_ns(&self, len: u64) -> u64 {
        (u128::from(len) * 1_000_000_000 / u128::from(self.params.rate.max(1))) as u64
    }

    /// Time from `from` until `offset` passes under the head: arm, then platter.
    fn access_ns(&self, from: u64, offset: u64, write: bool) -> u64 {
        if offset == self.head && from == self.head_ns {
            return 0;
        }
        let distance = offset.abs_diff(self.head);
        let seek = if distance < self.track_bytes {
            0
        } else {
            let share = (distance as f64 / self.capacity as f64).min(1.0).sqrt();
            let travel = self
                .params
                .full_stroke_ns
                .saturating_sub(self.params.settle_ns);
            self.params.settle_ns + (share * travel as f64) as u64
        };
        let seek = seek
            + if write {
                self.params.write_settle_ns
            } else {
                0
            };
        let turn = self.params.rotation_ns.max(1);
        let angle = (u128::from(offset % self.track_bytes) * u128::from(turn)
            / u128::from(self.track_bytes)) as u64;
        seek + (angle + turn - (from + seek) % turn) % turn
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;

    struct Lcg(u64);
    impl Lcg {
        fn below(&mut self, n: u64) -> u64 {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) % n
        }
    }

    /// Commands per second of a closed loop of `depth` on virtual time.
    fn rate(
        depth: u64,
        count: u64,
        command: HddCommand,
        len: u64,
        mut offset: impl FnMut(u64) -> u64,
    ) -> f64 {
        let mut disk = HddModel::new(500 * GB, HddParams::default());
        let (mut now, mut sent, mut done) = (0, 0, 0);
        let mut finished = Vec::new();
        while done < count {
            while sent < count && sent - done < depth {
                disk.submit(now, sent, command, offset(sent), len);
                sent += 1;
            }
            now = disk.next_event().expect("commands are waiting");
            disk.advance(now, &mut finished);
            done += finished.drain(..).count() as u64;
        }
        count as f64 * 1e9 / now as f64
    }

    fn random(depth: u64, command: HddCommand) -> f64 {
        let mut lcg = Lcg(depth + 1);
        rate(depth, 4000, command, 4096, |_| {
            lcg.below(500 * GB / 4096) * 4096
        })
    }

    fn close(what: &str, got: f64, want: f64, tolerance: f64) {
        assert!(
            (got - want).abs() <= want * tolerance,
            "{what}: {got:.1}, calibrated to {want}"
        );
    }

    #[test]
    fn calibration_random() {
        close(
            "random read, depth 1",
            random(1, HddCommand::Read),
            77.0,
            0.04,
        );
        close(
            "random read, depth 24",
            random(24, HddCommand::Read),
            170.0,
            0.05,
        );
        close(
            "random write, depth 1",
            random(1, HddCommand::Write),
            100.0,
            0.06,
        );
    }

    #[test]
    fn deeper_queues_never_hurt() {
        let rates: Vec<f64> = [1, 2, 4, 8, 16, 32]
            .iter()
            .map(|d| random(*d, HddCommand::Read))
            .collect();
        assert!(rates.windows(2).all(|w| w[1] > w[0] * 0.98), "{rates:?}");
    }

    #[test]
    fn calibration_sequential() {
        for (depth, len, least) in [
            (1, 1 << 20, 150.0),
            (1, 64 << 10, 150.0),
            (8, 128 << 10, 150.0),
            (32, 4096, 150.0),
        ] {
            for command in [HddCommand::Read, HddCommand::Write] {
                // Much more than the write cache holds, so that it does not flatter the result.
                let mb =
                    rate(depth, (512 << 20) / len, command, len, |i| i * len) * len as f64 / 1e6;
                assert!(
                    (least..185.0).contains(&mb),
                    "{command:?} depth {depth}, {len} bytes: {mb:.1} MB/s"
                );
            }
        }
    }

    #[test]
    fn flush_waits_for_the_drain_and_nobody_starves() {
        let mut disk = HddModel::new(500 * GB, HddParams::default());
        disk.submit(0, 1, HddCommand::Write, 250 * GB, 4096);
        disk.submit(0, 2, HddCommand::Flush, 0, 0);
        let mut finished = Vec::new();
        disk.advance(500_000, &mut finished);
        assert_eq!(finished, [1]);
        disk.advance(3_000_000, &mut finished);
        assert_eq!(finished, [1], "the platter has not been written yet");
        disk.advance(40_000_000, &mut finished);
        assert_eq!(finished, [1, 2]);
        disk.submit(50_000_000, 3, HddCommand::Flush, 0, 0);
        disk.advance(50_200_000, &mut finished);
        assert_eq!(finished, [1, 2, 3], "an empty cache has nothing to drain");
        // A far read among a never-ending run of near ones.
        let mut now = 60_000_000;
        disk.submit(now, 10, HddCommand::Read, 499 * GB, 4096);
        for i in 0.. {
            disk.submit(now, 100 + i, HddCommand::Read, i * 4096, 4096);
            now += 2_000_000;
            finished.clear();
            disk.advance(now, &mut finished);
            if finished.contains(&10) {
                break;
            }
            assert!(now < 5 * GB, "starved");
        }
    }

    #[test]
    fn every_command_ends_once() {
        let mut lcg = Lcg(3);
        let mut disk = HddModel::new(10 * GB, HddParams::default());
        let mut seen = [0u8; 2000];
        let (mut now, mut finished) = (0, Vec::new());
        for id in 0..2000 {
            let command = match lcg.below(5) {
                0 | 1 => HddCommand::Read,
                4 => HddCommand::Flush,
                _ => HddCommand::Write,
            };
            disk.submit(now, id, command, lcg.below(10 * GB), 4096 << lcg.below(5));
            now += lcg.below(20_000_000);
            disk.advance(now, &mut finished);
        }
        while let Some(at) = disk.next_event() {
            disk.advance(at, &mut finished);
        }
        for id in finished {
            seen[id as usize] += 1;
        }
        assert!(seen.iter().all(|n| *n == 1));
    }
}
