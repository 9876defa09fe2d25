//! The player: sends what is due, takes what has ended, measures both.

use std::collections::HashMap;

use hearth_io::{Buf, BufPool, BufSlice, now_ns};
use hearth_policy::spread;

use crate::error::ReplayError;
use crate::outcome::{Measured, Outcome, Timeline};
use crate::source::{Piece, Source};
use crate::target::{Done, Job, Kind, SECTOR, Target};
use crate::verify::Verifier;

/// Requests in flight at the trace's own pace: beyond, they wait, which is counted as lag.
const OPEN_MAX: usize = 1024;
/// Bytes in flight: RAM the player may take for them. One request is always allowed.
const BYTES_MAX: u64 = 256 << 20;
/// How long what is in flight is waited for, as a rule, once the replay was called off:
/// nanoseconds. A busy disk answers in that time, and people do not wait longer after Ctrl-C.
pub const GRACE_NS: u64 = 10_000_000_000;
/// Slowest pace, a thousandth of the trace's: slower, and a day takes years.
pub const SPEED_MIN: f64 = 0.001;
/// Requests in flight flat out.
const FLAT_OUT: usize = 128;
/// Requests in flight when everything written is read again at the end.
const SWEEP: usize = 16;
/// A request sent later than this is late.
const LATE_NS: u64 = 1_000_000;
/// How often progress is told.
const TELL_NS: u64 = 500_000_000;
/// Bytes of noise that writes are cut from. Incompressible, as a file system's data mostly is.
const NOISE: usize = 1 << 20;

/// When requests go out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pace {
    /// When they did in the trace, so many times faster.
    Original(f64),
    /// So many in flight at a time.
    Depth(usize),
    /// As many as there can be.
    FlatOut,
}

/// How to play.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// When.
    pub pace: Pace,
    /// Check what is read, and read everything written again at the end.
    pub verify: bool,
    /// Tells this run's data from others'.
    pub run: u64,
    /// How long what is in flight is waited for once it was called off, nanoseconds; as a rule
    /// [`GRACE_NS`].
    pub grace_ns: u64,
}

/// How far it is.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    /// Requests sent.
    pub sent: u64,
    /// Requests that have ended.
    pub done: u64,
    /// Seconds it has taken.
    pub seconds: f64,
    /// Seconds of the trace played.
    pub trace_seconds: f64,
    /// How late the last request was, seconds.
    pub lag_seconds: f64,
    /// Reading back what was written.
    pub sweeping: bool,
}

struct Flying {
    piece: Piece,
    /// Number of a write that is verified.
    write: u32,
    /// Its memory, to be used again.
    buf: Option<Buf>,
    sent_ns: u64,
    due_ns: u64,
}

/// Bytes of memory a piece needs.
fn moved(piece: &Piece) -> u64 {
    match piece.kind {
        Kind::Read | Kind::Write => piece.len,
        Kind::Discard | Kind::Flush => 0,
    }
}

struct Player<'a> {
    target: &'a mut dyn Target,
    options: Options,
    flying: HashMap<u64, Flying>,
    /// Bytes of reads and writes in flight.
    bytes: u64,
    next_id: u64,
    bufs: BufPool,
    noise: Buf,
    verifier: Option<Verifier>,
    start_ns: u64,
    reads: Measured,
    writes: Measured,
    response: Measured,
    timeline: Timeline,
    outcome: Outcome,
    dones: Vec<Done>,
    sweeping: bool,
    last_lag_ns: u64,
    sent: u64,
    ended: u64,
}

/// Plays `source` against `target`. `tell` is called now and then; `false` calls it off.
///
/// # Errors
///
/// When the trace or the target cannot be used any more. Requests that fail one by one are
/// counted, not errors here.
pub fn run(
    source: &mut Source,
    target: &mut dyn Target,
    options: Options,
    tell: &mut dyn FnMut(&Progress) -> bool,
) -> Result<Outcome, ReplayError> {
    let noise = Buf::zeroed(NOISE);
    let mut state = options.run;
    for word in noise.all().bytes_mut().chunks_exact_mut(8) {
        state = spread(state);
        word.copy_from_slice(&state.to_le_bytes());
    }
    let mut player = Player {
        target,
        options,
        flying: HashMap::new(),
        bytes: 0,
        next_id: 1,
        bufs: BufPool::default(),
        noise,
        verifier: options.verify.then(|| Verifier::new(options.run)),
        start_ns: now_ns(),
        reads: Measured::new(),
        writes: Measured::new(),
        response: Measured::new(),
        timeline: Timeline::new(),
        outcome: Outcome::default(),
        dones: Vec::new(),
        sweeping: false,
        last_lag_ns: 0,
        sent: 0,
        ended: 0,
    };
    player.play(source, tell)?;
    if !player.outcome.interrupted {
        player.sweep(tell)?;
    }
    Ok(player.finish())
}

impl Player<'_> {
    fn depth(&self) -> usize {
        match self.options.pace {
            _ if self.sweeping => SWEEP,
            Pace::Original(_) => OPEN_MAX,
            Pace::Depth(depth) => depth.clamp(1, OPEN_MAX),
            Pace::FlatOut => FLAT_OUT,
        }
    }

    fn due(&self, piece: &Piece) -> Option<u64> {
        match self.options.pace {
            Pace::Original(speed) if !self.sweeping => {
                // A cast of what is too large is the largest there is.
                let ns = (piece.time_us as f64 * 1000.0 / speed.max(SPEED_MIN)) as u64;
                Some(self.start_ns.saturating_add(ns))
            }
            _ => None,
        }
    }

    fn play(
        &mut self,
        source: &mut Source,
        tell: &mut dyn FnMut(&Progress) -> bool,
    ) -> Result<(), ReplayError> {
        let mut feed = || source.next_piece();
        self.pump(&mut feed, tell)
    }

    /// Reads everything written once more.
    fn sweep(&mut self, tell: &mut dyn FnMut(&Progress) -> bool) -> Result<(), ReplayError> {
        let Some(verifier) = &self.verifier else {
            return Ok(());
        };
        // Its own time is not the trace's.
        self.outcome.seconds = (now_ns() - self.start_ns) as f64 / 1e9;
        self.sweeping = true;
        let align = self.target.align().max(SECTOR);
        let size = self.target.size();
        let mut runs = verifier.written_runs().into_iter().map(|(offset, len)| {
            let from = offset / align * align;
            let to = (offset + len).next_multiple_of(align).min(size);
            Piece {
                time_us: 0,
                kind: Kind::Read,
                offset: from,
                len: to.saturating_sub(from),
                first: false,
            }
        });
        let mut feed = || Ok(runs.next());
        self.pump(&mut feed, tell)
    }

    /// Plays pieces until there are no more, or it is called off.
    fn pump(
        &mut self,
        feed: &mut dyn FnMut() -> Result<Option<Piece>, ReplayError>,
        tell: &mut dyn FnMut(&Progress) -> bool,
    ) -> Result<(), ReplayError> {
        let mut next = feed()?;
        let mut told_ns = now_ns();
        let mut give_up_ns = u64::MAX;
        while next.is_some() || !self.flying.is_empty() {
            let mut until = told_ns + TELL_NS;
            while let Some(piece) = next {
                let now = now_ns();
                if self.flying.len() >= self.depth()
                    || !self.has_room(&piece)
                    || self.must_wait(&piece)
                {
                    break;
                }
                if let Some(due) = self.due(&piece).filter(|due| *due > now) {
                    until = until.min(due);
                    break;
                }
                if now >= told_ns + TELL_NS {
                    until = now;
                    break;
                }
                self.send(piece, now)?;
                next = feed()?;
            }
            if next.is_none() && self.flying.is_empty() {
                break;
            }
            if now_ns() >= give_up_ns {
                self.target.abandon();
                self.outcome.unanswered = self.flying.len() as u64;
                break;
            }
            let mut dones = std::mem::take(&mut self.dones);
            self.target.wait(until, &mut dones)?;
            for done in dones.drain(..) {
                self.ended(done);
            }
            self.dones = dones;
            let now = now_ns();
            if now >= told_ns + TELL_NS {
                told_ns = now;
                if !tell(&self.progress(now)) {
                    // What is in flight is still taken, for a while.
                    if !self.outcome.interrupted {
                        give_up_ns = now.saturating_add(self.options.grace_ns);
                    }
                    self.outcome.interrupted = true;
                    next = None;
                }
            }
        }
        Ok(())
    }

    fn progress(&self, now: u64) -> Progress {
        Progress {
            sent: self.sent,
            done: self.ended,
            seconds: (now - self.start_ns) as f64 / 1e9,
            trace_seconds: self.outcome.trace_seconds,
            lag_seconds: self.last_lag_ns as f64 / 1e9,
            sweeping: self.sweeping,
        }
    }

    /// There is memory for it.
    fn has_room(&self, piece: &Piece) -> bool {
        self.flying.is_empty() || self.bytes + moved(piece) <= BYTES_MAX
    }

    fn must_wait(&self, piece: &Piece) -> bool {
        let changes = matches!(piece.kind, Kind::Write | Kind::Discard);
        self.verifier
            .as_ref()
            .is_some_and(|v| v.conflicts(piece.offset, piece.len, changes))
    }

    fn send(&mut self, piece: Piece, now: u64) -> Result<(), ReplayError> {
        if !self.sweeping {
            self.outcome.trace_seconds = piece.time_us as f64 / 1e6;
            self.outcome.requests += u64::from(piece.first);
        }
        if !self.target.can(piece.kind) {
            self.outcome.skipped += u64::from(piece.first);
            return Ok(());
        }
        let due_ns = self.due(&piece).unwrap_or(now);
        self.last_lag_ns = now.saturating_sub(due_ns);
        if self.last_lag_ns > LATE_NS {
            self.outcome.late += u64::from(piece.first);
        }
        self.outcome.lag_max_seconds = self
            .outcome
            .lag_max_seconds
            .max(self.last_lag_ns as f64 / 1e9);
        let id = self.next_id;
        self.next_id += 1;
        let len = piece.len as usize;
        let (mut write, mut own) = (0, None);
        let window: Option<BufSlice> = match piece.kind {
            Kind::Write if self.verifier.is_none() && len <= NOISE => {
                let room = (NOISE - len) / 4096 + 1;
                let at = (spread(id) % room as u64) as usize * 4096;
                Some(self.noise.slice(at, len))
            }
            Kind::Read | Kind::Write => {
                let buf = self.bufs.get(len);
                let mut window = buf.slice(0, len);
                if piece.kind == Kind::Write {
                    write = self.fill(piece.offset, window.bytes_mut());
                }
                own = Some(buf);
                Some(window)
            }
            Kind::Discard | Kind::Flush => None,
        };
        if let Some(verifier) = self.verifier.as_mut().filter(|_| piece.kind != Kind::Flush) {
            let changes = piece.kind != Kind::Read;
            verifier.begin(id, piece.offset, piece.len, changes);
        }
        self.flying.insert(
            id,
            Flying {
                piece,
                write,
                buf: own,
                sent_ns: now,
                due_ns,
            },
        );
        self.sent += 1;
        self.bytes += moved(&piece);
        self.target.submit(Job {
            id,
            kind: piece.kind,
            offset: piece.offset,
            len: piece.len,
            buf: window,
        })
    }

    /// Fills a write's memory; the write's number if it is verified.
    fn fill(&mut self, offset: u64, data: &mut [u8]) -> u32 {
        if let Some(verifier) = &mut self.verifier {
            return verifier.stamp(offset, data);
        }
        let noise = self.noise.all();
        for part in data.chunks_mut(NOISE) {
            part.copy_from_slice(&noise.bytes()[..part.len()]);
        }
        0
    }

    fn ended(&mut self, done: Done) {
        let Some(flying) = self.flying.remove(&done.id) else {
            return;
        };
        self.ended += 1;
        let piece = flying.piece;
        self.bytes -= moved(&piece);
        let ok = done.result.is_ok();
        if let Err(why) = done.result {
            self.outcome.errors += 1;
            self.outcome.first_error.get_or_insert_with(|| {
                format!(
                    "{:?} of {} bytes at {}: {why}",
                    piece.kind, piece.len, piece.offset
                )
            });
        }
        if let Some(verifier) = &mut self.verifier {
            match piece.kind {
                Kind::Read => {
                    let data = done.buf.as_ref().filter(|_| ok).map(|b| b.bytes());
                    verifier.check(done.id, piece.offset, data);
                }
                Kind::Write | Kind::Discard => {
                    verifier.written(done.id, piece.offset, piece.len, flying.write, ok);
                }
                Kind::Flush => {}
            }
        }
        // An error that comes at once is no fast disk.
        if ok && !self.sweeping {
            self.measure(&flying, done.at_ns);
        }
        drop(done.buf);
        if let Some(buf) = flying.buf {
            self.bufs.put(buf);
        }
    }

    fn measure(&mut self, flying: &Flying, at_ns: u64) {
        let ns = at_ns.saturating_sub(flying.sent_ns);
        let bytes = match flying.piece.kind {
            Kind::Read => {
                self.reads.add(ns);
                self.outcome.read_bytes += flying.piece.len;
                flying.piece.len
            }
            Kind::Write => {
                self.writes.add(ns);
                self.outcome.written_bytes += flying.piece.len;
                flying.piece.len
            }
            Kind::Discard | Kind::Flush => return,
        };
        self.response.add(at_ns.saturating_sub(flying.due_ns));
        self.timeline
            .add(at_ns.saturating_sub(self.start_ns), bytes, ns);
    }

    fn finish(mut self) -> Outcome {
        if !self.sweeping {
            self.outcome.seconds = (now_ns() - self.start_ns) as f64 / 1e9;
        }
        let (interval_seconds, timeline) = self.timeline.slots();
        Outcome {
            reads: self.reads.sum(),
            writes: self.writes.sum(),
            response: matches!(self.options.pace, Pace::Original(_)).then(|| self.response.sum()),
            interval_seconds,
            timeline,
            verified: self.verifier.map(|v| v.found),
            ..self.outcome
        }
    }
}
