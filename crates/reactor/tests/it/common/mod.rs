//! A pass-through engine and a toy protocol, to run reactors with.
#![allow(dead_code)]

use hearth_engine::api::{Completion, Effects, ReqError, ReqOp, Request};
use hearth_io::{Buf, BufSlice, Class, IoDone, IoOp, OpKind, Target};
use hearth_reactor::{BlockEngine, Memory, SendList, Session, SessionCx, Shares};
use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

struct Pending {
    owner: u32,
    tag: u64,
    buf: Option<BufSlice>,
}

/// Every request becomes one operation on its origin. Aligned requests only.
#[derive(Default)]
pub struct PassThrough {
    pending: Mutex<HashMap<u64, Pending>>,
    next: AtomicU64,
    pub ticks: AtomicU64,
    /// Completions of this disk are not handed out until released.
    pub hold: Mutex<Option<Vec<Completion>>>,
    /// Only those with so many bytes of memory.
    pub hold_from: AtomicU64,
    /// And with less than so many, if it is set.
    pub hold_below: AtomicU64,
}

impl BlockEngine for PassThrough {
    fn submit(&self, _now_ns: u64, reqs: &mut Vec<Request>, fx: &mut Effects) {
        let mut pending = self.pending.lock().unwrap();
        for req in reqs.drain(..) {
            let kind = match req.op {
                ReqOp::Read => OpKind::Read,
                ReqOp::Write { .. } => OpKind::Write,
                ReqOp::Flush => OpKind::Flush,
                ReqOp::Discard { .. } => OpKind::Discard,
                ReqOp::WriteZeroes { punch, .. } => OpKind::WriteZeroes { punch },
                ReqOp::Prefetch => {
                    fx.completions.push(Completion {
                        owner: req.owner,
                        tag: req.tag,
                        result: Ok(()),
                        buf: None,
                    });
                    continue;
                }
            };
            let id = self.next.fetch_add(1, Ordering::Relaxed);
            pending.insert(
                id,
                Pending {
                    owner: req.owner,
                    tag: req.tag,
                    buf: req.buf.clone(),
                },
            );
            fx.ios.push(IoOp {
                id,
                target: Target::Origin(req.disk),
                kind,
                offset: req.offset,
                len: req.len,
                bufs: req.buf.into_iter().collect(),
                crcs: Default::default(),
                sums: false,
                class: Class::Foreground,
            });
        }
    }

    fn io_done(&self, _now_ns: u64, dones: &mut Vec<IoDone>, fx: &mut Effects) {
        let mut pending = self.pending.lock().unwrap();
        for done in dones.drain(..) {
            let p = pending.remove(&done.op.id).unwrap();
            let completion = Completion {
                owner: p.owner,
                tag: p.tag,
                result: done.result.map_err(|_| ReqError::Io),
                buf: p.buf,
            };
            match &mut *self.hold.lock().unwrap() {
                Some(held)
                    if {
                        let len = completion.buf.as_ref().map_or(0, |b| b.len()) as u64;
                        let below = self.hold_below.load(Ordering::Relaxed);
                        len >= self.hold_from.load(Ordering::Relaxed) && (below == 0 || len < below)
                    } =>
                {
                    held.push(completion)
                }
                _ => fx.completions.push(completion),
            }
        }
    }

    fn tick(&self, now_ns: u64, _fx: &mut Effects) -> Option<u64> {
        self.ticks.fetch_add(1, Ordering::Relaxed);
        Some(now_ns + 1_000_000)
    }
}

impl PassThrough {
    /// Hands the held completions out, from whatever thread calls.
    pub fn release(&self, fx: &mut Effects) {
        fx.completions
            .extend(self.hold.lock().unwrap().take().unwrap_or_default());
    }

    pub fn held(&self) -> usize {
        self.hold.lock().unwrap().as_ref().map_or(0, Vec::len)
    }
}

/// Commands are 24 bytes: op (`R`, `W`, `F`, `Q`), 3 bytes nothing, u32 length, u64 offset,
/// u64 tag, little-endian; a write's payload follows. A reply is the tag, a u64 0 or 1, and a
/// read's payload. The first command ends the handshake.
pub struct Toy {
    disk: u16,
    input: Buf,
    have: usize,
    payload: Option<(u64, u64, Buf, usize, usize)>,
    direct: bool,
    out: VecDeque<BufSlice>,
    lens: HashMap<u64, (bool, usize)>,
    greeted: bool,
    ending: bool,
    waits: bool,
    shares: Option<Shares>,
}

pub const HEADER: usize = 24;
const IN_FLIGHT_MAX: usize = 64;

impl Toy {
    pub fn new(disk: u16) -> Box<Toy> {
        Box::new(Toy {
            disk,
            input: Buf::zeroed(64 << 10),
            have: 0,
            payload: None,
            direct: false,
            out: VecDeque::new(),
            lens: HashMap::new(),
            greeted: false,
            ending: false,
            waits: false,
            shares: None,
        })
    }

    /// A client with a share of its own.
    pub fn of(disk: u16, shares: Shares) -> Box<Toy> {
        let mut toy = Toy::new(disk);
        toy.shares = Some(shares);
        toy
    }

    fn parse(&mut self, cx: &mut SessionCx<'_>) {
        let input = self.input.all();
        let mut at = 0;
        self.waits = false;
        while self.payload.is_none()
            && !self.ending
            && self.lens.len() < IN_FLIGHT_MAX
            && self.have - at >= HEADER
        {
            let h = &input.bytes()[at..at + HEADER];
            let word = |i: usize| u64::from_le_bytes(h[i..i + 8].try_into().unwrap());
            let len = u32::from_le_bytes(h[4..8].try_into().unwrap()) as u64;
            let (op, offset, tag) = (h[0], word(8), word(16));
            self.greeted = true;
            if matches!(op, b'R' | b'W') && !cx.room.allows(self.memory().held, len) {
                self.waits = true;
                break;
            }
            at += HEADER;
            match op {
                b'R' => {
                    let buf = cx.bufs.get(len as usize);
                    self.lens.insert(tag, (true, len as usize));
                    cx.requests
                        .push(Request::read(tag, self.disk, offset, len, &buf, cx.now_ns));
                }
                b'W' => {
                    let buf = cx.bufs.get(len as usize);
                    let got = (len as usize).min(self.have - at);
                    let mut window = buf.slice(0, len as usize);
                    window.bytes_mut()[..got].copy_from_slice(&input.bytes()[at..at + got]);
                    at += got;
                    self.payload = Some((offset, tag, buf, len as usize, got));
                    self.finish_payload(cx);
                }
                b'F' => {
                    self.lens.insert(tag, (false, 0));
                    cx.requests.push(Request::new(
                        tag,
                        self.disk,
                        ReqOp::Flush,
                        0,
                        0,
                        None,
                        cx.now_ns,
                    ));
                }
                _ => self.ending = true,
            }
        }
        self.input.all().bytes_mut().copy_within(at..self.have, 0);
        self.have -= at;
    }

    fn finish_payload(&mut self, cx: &mut SessionCx<'_>) {
        if let Some((offset, tag, buf, len, got)) = self.payload.take() {
            if got < len {
                self.payload = Some((offset, tag, buf, len, got));
            } else {
                self.lens.insert(tag, (false, len));
                cx.requests.push(Request::write(
                    tag, self.disk, offset, len as u64, false, &buf, cx.now_ns,
                ));
            }
        }
    }
}

impl Session for Toy {
    fn recv_buf(&mut self, cx: &mut SessionCx<'_>) -> Option<BufSlice> {
        self.parse(cx);
        self.direct = false;
        if self.ending {
            return None;
        }
        if let Some((.., buf, len, got)) = &self.payload {
            self.direct = true;
            return Some(buf.slice(*got, len - got));
        }
        (self.lens.len() < IN_FLIGHT_MAX && !self.waits)
            .then(|| self.input.slice(self.have, self.input.len() - self.have))
    }

    fn received(&mut self, n: usize, cx: &mut SessionCx<'_>) {
        if n == 0 {
            self.ending = true;
        } else if self.direct
            && let Some((.., got)) = &mut self.payload
        {
            *got += n;
            self.finish_payload(cx);
        } else {
            self.have += n;
        }
        self.parse(cx);
    }

    fn completed(&mut self, completion: Completion, _cx: &mut SessionCx<'_>) {
        let (read, len) = self
            .lens
            .remove(&completion.tag)
            .expect("each request completes once");
        let mut head = Buf::zeroed(16).slice(0, 16);
        head.bytes_mut()[..8].copy_from_slice(&completion.tag.to_le_bytes());
        head.bytes_mut()[8] = completion.result.is_err() as u8;
        self.out.push_back(head);
        if read && completion.result.is_ok() {
            self.out.push_back(completion.buf.unwrap().sub(0, len));
        }
    }

    fn shares(&self) -> Option<&Shares> {
        self.shares.as_ref()
    }

    fn send_list(&mut self, out: &mut SendList) {
        out.extend(self.out.iter().take(64).cloned());
    }

    fn sent(&mut self, mut n: usize, _cx: &mut SessionCx<'_>) {
        while n > 0 {
            let front = self.out.pop_front().unwrap();
            if front.len() > n {
                self.out.push_front(front.sub(n, front.len() - n));
                return;
            }
            n -= front.len();
        }
    }

    fn closing(&self) -> bool {
        self.ending && self.lens.is_empty()
    }

    fn memory(&self) -> Memory {
        let payload = self.payload.as_ref().map_or(0, |p| p.3 as u64);
        let replies = self.out.iter().map(|piece| piece.len() as u64).sum();
        let requests: u64 = self.lens.values().map(|(_, len)| *len as u64).sum();
        Memory {
            held: payload + replies + requests,
            payload,
            replies,
            waits: self.waits && !self.ending,
        }
    }

    fn resume(&mut self, cx: &mut SessionCx<'_>) {
        self.parse(cx);
    }

    fn shutdown(&mut self) {
        self.ending = true;
    }

    fn in_flight(&self) -> usize {
        self.lens.len()
    }

    fn handshaking(&self) -> bool {
        !self.greeted
    }
}

/// A command as the client sends it.
pub fn command(op: u8, offset: u64, len: u32, tag: u64) -> [u8; HEADER] {
    let mut h = [0; HEADER];
    h[0] = op;
    h[4..8].copy_from_slice(&len.to_le_bytes());
    h[8..16].copy_from_slice(&offset.to_le_bytes());
    h[16..24].copy_from_slice(&tag.to_le_bytes());
    h
}
