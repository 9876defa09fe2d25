//! A virtual machine without a machine: memory, queues and a vhost-user front end by hand.
//!
//! libblkio and QEMU never write a wrong descriptor, and neither keeps in-flight memory where a
//! test could look into it. This front end does what a test tells it. It is written from the
//! documents (virtio 1.2, QEMU's vhost-user.rst) and shares no code with the exporter.

use crate::wait;
use anyhow::{Context, Result, bail, ensure};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU16, Ordering, fence};
use std::time::{Duration, Instant};
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

/// Longest wait for an answer.
const LIMIT: Duration = Duration::from_secs(30);
/// Where the guest sees its memory.
pub const BASE: u64 = 0x4000_0000;
/// Bytes of guest memory.
pub const MEMORY: usize = 32 << 20;
/// Descriptors of a queue.
pub const SIZE: u16 = 64;
/// Bytes of memory for each queue's rings, from the start.
const RING: usize = 0x4000;
/// Where requests' headers and status bytes are: one page for each head.
const HEADS: usize = 0x10_0000;
/// Where tests may put data.
pub const DATA: usize = 0x40_0000;

/// Descriptor flags.
pub mod flag {
    /// The chain goes on.
    pub const NEXT: u16 = 1;
    /// The device writes.
    pub const WRITE: u16 = 2;
    /// A table of descriptors.
    pub const INDIRECT: u16 = 4;
}

/// Request types.
pub mod kind {
    /// Read.
    pub const IN: u32 = 0;
    /// Write.
    pub const OUT: u32 = 1;
    /// Flush.
    pub const FLUSH: u32 = 4;
    /// Serial number.
    pub const GET_ID: u32 = 8;
    /// Discard.
    pub const DISCARD: u32 = 11;
    /// Write zeroes.
    pub const ZEROES: u32 = 13;
}

/// Feature bits.
pub mod feature {
    /// Read-only.
    pub const RO: u64 = 1 << 5;
    /// Flush.
    pub const FLUSH: u64 = 1 << 9;
    /// The write cache can be turned off.
    pub const CONFIG_WCE: u64 = 1 << 11;
    /// Discard.
    pub const DISCARD: u64 = 1 << 13;
    /// Write zeroes.
    pub const ZEROES: u64 = 1 << 14;
    /// Indirect descriptors.
    pub const INDIRECT: u64 = 1 << 28;
    /// Event indices.
    pub const EVENT_IDX: u64 = 1 << 29;
}

/// Message numbers of the protocol.
mod message {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
}

/// Protocol feature bits: MQ, REPLY_ACK, BACKEND_REQ, CONFIG, INFLIGHT_SHMFD.
const PROTOCOL: u64 = 1 | 1 << 3 | 1 << 5 | 1 << 9 | 1 << 12;

/// What a guest survives its hypervisor's connection with: its memory, and what is in flight.
pub struct Memory {
    file: File,
    ptr: *mut u8,
    /// The in-flight region and its description.
    inflight: Option<(File, [u8; 20])>,
    next_avail: Vec<u16>,
    next_used: Vec<u16>,
}

// SAFETY: memory without thread affinity, used by whoever has the guest.
unsafe impl Send for Memory {}

impl Memory {
    /// Fresh memory.
    pub fn new(queues: usize) -> Result<Memory> {
        // SAFETY: a literal name and plain flags.
        let fd = unsafe { libc::memfd_create(c"guest".as_ptr(), libc::MFD_CLOEXEC) };
        ensure!(fd >= 0, "memfd: {}", std::io::Error::last_os_error());
        // SAFETY: a descriptor just made by the kernel, owned by nobody else.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        file.set_len(MEMORY as u64)?;
        // SAFETY: a fresh shared mapping of the whole file.
        let ptr = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                MEMORY,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        ensure!(ptr != libc::MAP_FAILED, "mmap");
        Ok(Memory {
            file,
            ptr: ptr.cast(),
            inflight: None,
            next_avail: vec![0; queues],
            next_used: vec![0; queues],
        })
    }

    /// Bytes of the guest's memory; the device may be writing them.
    pub fn bytes(&mut self, at: usize, len: usize) -> &mut [u8] {
        assert!(at + len <= MEMORY);
        // SAFETY: inside the mapping; the tests look only at what the device is done with.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(at), len) }
    }

    /// Cuts the file behind the memory short.
    pub fn truncate(&self, len: u64) -> Result<()> {
        Ok(self.file.set_len(len)?)
    }

    fn u16_at(&self, at: usize) -> &AtomicU16 {
        // SAFETY: inside the mapping, even; both sides use atomics.
        unsafe { AtomicU16::from_ptr(self.ptr.add(at).cast()) }
    }

    /// How many requests the in-flight region says are in flight in queue 0.
    pub fn noted(&self) -> Result<usize> {
        let (file, _) = self.inflight.as_ref().context("no in-flight region")?;
        let mut raw = vec![0u8; 16 + 16 * usize::from(SIZE)];
        std::os::unix::fs::FileExt::read_exact_at(file, &mut raw, 0)?;
        Ok((0..usize::from(SIZE))
            .filter(|i| raw[16 + 16 * i] == 1)
            .count())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length.
        unsafe { libc::munmap(self.ptr.cast(), MEMORY) };
    }
}

/// How to connect.
#[derive(Clone, Copy, Debug)]
pub struct How {
    /// Features to agree on, of those offered.
    pub features: u64,
    /// Features to agree on although they are not offered, as a hypervisor does whose guest agreed
    /// on them with an older back end.
    pub insist: u64,
    /// Use in-flight memory.
    pub inflight: bool,
    /// How far the base given for a queue is behind its used index: QEMU looks at that index
    /// when a connection ends, and the device may have answered since.
    pub behind: u16,
}

impl Default for How {
    fn default() -> How {
        How {
            features: u64::MAX,
            insist: 0,
            inflight: false,
            behind: 0,
        }
    }
}

/// A guest whose hypervisor is connected.
pub struct Guest {
    socket: UnixStream,
    /// The way back.
    back: UnixStream,
    /// The guest's memory.
    pub memory: Memory,
    /// What was agreed on.
    pub features: u64,
    behind: u16,
    kicks: Vec<EventFd>,
    calls: Vec<EventFd>,
    /// Next head to use, per queue.
    heads: Vec<u16>,
    /// The available index when the device's wish for a kick was last looked at, per queue.
    looked: Vec<u16>,
}

impl Guest {
    /// A fresh guest with so many queues.
    pub fn connect(socket: &Path, queues: usize, how: How) -> Result<Guest> {
        Guest::resume(socket, Memory::new(queues)?, how)
    }

    /// A guest that goes on with its memory, as a hypervisor does that reconnects.
    pub fn resume(path: &Path, mut memory: Memory, how: How) -> Result<Guest> {
        let socket = wait::until("the disk's socket takes connections", LIMIT, || {
            UnixStream::connect(path).ok()
        })
        .with_context(|| path.display().to_string())?;
        socket.set_read_timeout(Some(LIMIT))?;
        let (back, theirs) = UnixStream::pair()?;
        back.set_read_timeout(Some(LIMIT))?;
        let queues = memory.next_avail.len();
        let mut guest = Guest {
            socket,
            back,
            features: 0,
            behind: how.behind,
            kicks: Vec::new(),
            calls: Vec::new(),
            heads: vec![0; queues],
            looked: memory.next_avail.clone(),
            memory: Memory {
                file: memory.file.try_clone()?,
                ptr: std::mem::replace(&mut memory.ptr, std::ptr::null_mut()),
                inflight: memory.inflight.take(),
                next_avail: std::mem::take(&mut memory.next_avail),
                next_used: std::mem::take(&mut memory.next_used),
            },
        };
        std::mem::forget(memory);
        guest.handshake(&theirs, how)?;
        (0..queues).try_for_each(|q| guest.start(q))?;
        Ok(guest)
    }

    /// Gives the memory back; the connection ends.
    pub fn into_memory(self) -> Memory {
        self.memory
    }

    fn handshake(&mut self, back: &UnixStream, how: How) -> Result<()> {
        use message as m;
        let offered = self.ask_u64(m::GET_FEATURES)?;
        ensure!(offered & 1 << 30 != 0, "no protocol features");
        let protocol = self.ask_u64(m::GET_PROTOCOL_FEATURES)?;
        ensure!(protocol & PROTOCOL == PROTOCOL, "{protocol:#x}");
        self.send(m::SET_PROTOCOL_FEATURES, &PROTOCOL.to_ne_bytes(), &[])?;
        self.tell(m::SET_OWNER, &[], &[])?;
        self.features = offered & (how.features | 1 << 30 | 1 << 32) | how.insist;
        self.tell(m::SET_FEATURES, &self.features.to_ne_bytes(), &[])?;
        ensure!(self.ask_u64(m::GET_QUEUE_NUM)? >= self.heads.len() as u64);
        self.tell(m::SET_BACKEND_REQ_FD, &[], &[back.as_raw_fd()])?;
        if how.inflight {
            self.share_inflight()?;
        }
        let mut table = Vec::new();
        table.extend_from_slice(&1u32.to_ne_bytes());
        table.extend_from_slice(&0u32.to_ne_bytes());
        for word in [BASE, MEMORY as u64, self.memory.ptr.addr() as u64, 0] {
            table.extend_from_slice(&word.to_ne_bytes());
        }
        let fd = self.memory.file.as_raw_fd();
        self.tell(m::SET_MEM_TABLE, &table, &[fd])
    }

    fn share_inflight(&mut self) -> Result<()> {
        if self.memory.inflight.is_none() {
            let mut wanted = [0u8; 20];
            wanted[16..18].copy_from_slice(&(self.heads.len() as u16).to_ne_bytes());
            wanted[18..].copy_from_slice(&SIZE.to_ne_bytes());
            // On the wire the structure is padded to whole words.
            self.send(message::GET_INFLIGHT_FD, &padded(&wanted), &[])?;
            let (body, file) = self.receive(message::GET_INFLIGHT_FD)?;
            let file = file.context("no in-flight memory came")?;
            let area = body.get(..20).context("short")?.try_into()?;
            self.memory.inflight = Some((file, area));
        }
        let Some((file, area)) = &self.memory.inflight else {
            bail!("no in-flight memory")
        };
        let (fd, body) = (file.as_raw_fd(), padded(area));
        self.tell(message::SET_INFLIGHT_FD, &body, &[fd])
    }

    /// Starts a queue where it is.
    pub fn start(&mut self, q: usize) -> Result<()> {
        use message as m;
        let state = |n: u32| {
            let mut raw = (q as u32).to_ne_bytes().to_vec();
            raw.extend_from_slice(&n.to_ne_bytes());
            raw
        };
        self.tell(m::SET_VRING_NUM, &state(SIZE.into()), &[])?;
        // What QEMU does after a connection was lost: go on where the used ring ends.
        let used = self.memory.u16_at(used_at(q) + 2).load(Ordering::Acquire);
        let base = used.wrapping_sub(self.behind);
        self.tell(m::SET_VRING_BASE, &state(base.into()), &[])?;
        let base = self.memory.ptr.addr() as u64;
        let mut addr = state(0);
        for at in [desc_at(q), used_at(q), avail_at(q)] {
            addr.extend_from_slice(&(base + at as u64).to_ne_bytes());
        }
        addr.extend_from_slice(&0u64.to_ne_bytes());
        self.tell(m::SET_VRING_ADDR, &addr, &[])?;
        let (kick, call) = (EventFd::new(0)?, EventFd::new(libc::EFD_NONBLOCK)?);
        let index = (q as u64).to_ne_bytes();
        self.tell(m::SET_VRING_CALL, &index, &[call.as_raw_fd()])?;
        self.tell(m::SET_VRING_KICK, &index, &[kick.as_raw_fd()])?;
        self.tell(m::SET_VRING_ENABLE, &state(1), &[])?;
        self.kicks.truncate(q);
        self.calls.truncate(q);
        self.kicks.push(kick);
        self.calls.push(call);
        // A kick may have come before anybody listened.
        self.kicks[q].write(1)?;
        Ok(())
    }

    /// Stops a queue; the index of the next request it would have taken.
    pub fn stop(&mut self, q: usize) -> Result<u16> {
        let mut body = (q as u32).to_ne_bytes().to_vec();
        body.extend_from_slice(&0u32.to_ne_bytes());
        self.send(message::GET_VRING_BASE, &body, &[])?;
        let (body, _) = self.receive(message::GET_VRING_BASE)?;
        let [_, _, _, _, a, b, c, d] = body[..] else {
            bail!("{} bytes", body.len())
        };
        Ok(u32::from_ne_bytes([a, b, c, d]) as u16)
    }

    /// Sends a message as it is given, and waits for nothing.
    pub fn send(&self, code: u32, body: &[u8], fds: &[RawFd]) -> Result<()> {
        self.send_flags(code, 1, body, fds)
    }

    fn send_flags(&self, code: u32, flags: u32, body: &[u8], fds: &[RawFd]) -> Result<()> {
        let mut raw = code.to_ne_bytes().to_vec();
        raw.extend_from_slice(&flags.to_ne_bytes());
        raw.extend_from_slice(&(body.len() as u32).to_ne_bytes());
        raw.extend_from_slice(body);
        self.socket
            .send_with_fds(&[raw.as_slice()], fds)
            .map_err(std::io::Error::from)?;
        Ok(())
    }

    /// Gives a queue another eventfd for its calls.
    pub fn set_call(&self, q: usize, call: &EventFd) -> Result<()> {
        let index = (q as u64).to_ne_bytes();
        self.tell(message::SET_VRING_CALL, &index, &[call.as_raw_fd()])
    }

    /// Shares one region of the guest's memory behind a file of the caller's.
    pub fn share(&self, file: &File) -> Result<()> {
        let mut table = Vec::new();
        table.extend_from_slice(&1u32.to_ne_bytes());
        table.extend_from_slice(&0u32.to_ne_bytes());
        for word in [BASE, 1 << 20, self.memory.ptr.addr() as u64, 0] {
            table.extend_from_slice(&word.to_ne_bytes());
        }
        self.tell(message::SET_MEM_TABLE, &table, &[file.as_raw_fd()])
    }

    /// Sends a message and waits until it was accepted.
    fn tell(&self, code: u32, body: &[u8], fds: &[RawFd]) -> Result<()> {
        self.send_flags(code, 1 | 8, body, fds)?;
        let (body, _) = self.receive(code)?;
        ensure!(body == [0; 8], "message {code} was refused");
        Ok(())
    }

    fn ask_u64(&self, code: u32) -> Result<u64> {
        self.send(code, &[], &[])?;
        let (body, _) = self.receive(code)?;
        Ok(u64::from_ne_bytes(body.as_slice().try_into()?))
    }

    fn receive(&self, code: u32) -> Result<(Vec<u8>, Option<File>)> {
        let mut header = [0u8; 12];
        let (n, file) = self
            .socket
            .recv_with_fd(&mut header)
            .map_err(std::io::Error::from)
            .with_context(|| format!("waiting for the answer to message {code}"))?;
        ensure!(n == 12, "the connection ended at message {code}");
        let word = |i: usize| u32::from_ne_bytes(header[i..i + 4].try_into().unwrap_or_default());
        ensure!(word(0) == code && word(4) & 7 == 5, "{header:?}");
        let mut body = vec![0u8; word(8) as usize];
        (&self.socket).read_exact(&mut body)?;
        Ok((body, file))
    }

    /// Bytes of the configuration space.
    pub fn config(&self, offset: u32, len: u32) -> Result<Vec<u8>> {
        let mut body = Vec::new();
        for word in [offset, len, 0] {
            body.extend_from_slice(&word.to_ne_bytes());
        }
        body.resize(12 + len as usize, 0);
        self.send(message::GET_CONFIG, &body, &[])?;
        let (body, _) = self.receive(message::GET_CONFIG)?;
        ensure!(body.len() == 12 + len as usize, "{} bytes", body.len());
        Ok(body[12..].to_vec())
    }

    /// Bytes of the disk, as the device says.
    pub fn capacity(&self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.config(0, 8)?.as_slice().try_into()?) * 512)
    }

    /// Writes into the configuration space.
    pub fn set_config(&self, offset: u32, value: &[u8]) -> Result<()> {
        let mut body = Vec::new();
        for word in [offset, value.len() as u32, 0] {
            body.extend_from_slice(&word.to_ne_bytes());
        }
        body.extend_from_slice(value);
        self.tell(message::SET_CONFIG, &body, &[])
    }

    /// Waits for a message on the way back; its number.
    pub fn wait_back(&self) -> Result<u32> {
        let mut header = [0u8; 12];
        (&self.back).read_exact(&mut header)?;
        Ok(u32::from_ne_bytes(header[..4].try_into()?))
    }

    /// Sends bytes that are no message.
    pub fn send_raw(&self, raw: &[u8]) -> Result<()> {
        (&self.socket).write_all(raw)?;
        Ok(())
    }

    /// Waits until the other side ends the connection.
    pub fn wait_cut(&self) -> Result<()> {
        let mut byte = [0u8; 1];
        match (&self.socket).read(&mut byte) {
            Ok(0) => Ok(()),
            Ok(_) => bail!("unexpected bytes"),
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => Ok(()),
            Err(e) => Err(e).context("the connection was not cut"),
        }
    }

    /// Writes a descriptor into a queue's table.
    pub fn desc(&mut self, q: usize, index: u16, at: u64, len: u32, flags: u16, next: u16) {
        let place = desc_at(q) + 16 * usize::from(index);
        self.memory
            .bytes(place, 16)
            .copy_from_slice(&encode(at, len, flags, next));
    }

    /// Makes a chain available, without a kick.
    pub fn offer(&mut self, q: usize, head: u16) {
        let next = self.memory.next_avail[q];
        let entry = avail_at(q) + 4 + 2 * usize::from(next % SIZE);
        self.memory.u16_at(entry).store(head, Ordering::Relaxed);
        self.memory.next_avail[q] = next.wrapping_add(1);
        self.show(q, next.wrapping_add(1));
    }

    /// Sets the available index, whatever it says.
    pub fn show(&mut self, q: usize, index: u16) {
        self.memory
            .u16_at(avail_at(q) + 2)
            .store(index, Ordering::Release);
    }

    /// Rings, if the device wants it; true if it did.
    pub fn kick(&mut self, q: usize) -> Result<bool> {
        fence(Ordering::SeqCst);
        let wanted = if self.features & feature::EVENT_IDX != 0 {
            let event = used_at(q) + 4 + 8 * usize::from(SIZE);
            let event = self.memory.u16_at(event).load(Ordering::Relaxed);
            let (new, old) = (self.memory.next_avail[q], self.looked[q]);
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            self.memory.u16_at(used_at(q)).load(Ordering::Relaxed) & 1 == 0
        };
        self.looked[q] = self.memory.next_avail[q];
        if wanted {
            self.kicks[q].write(1)?;
        }
        Ok(wanted)
    }

    /// Rings.
    pub fn kick_anyway(&self, q: usize) -> Result<()> {
        Ok(self.kicks[q].write(1)?)
    }

    /// Submits a request made of pieces of memory: where, how many bytes. Its head.
    pub fn submit(
        &mut self,
        q: usize,
        kind: u32,
        sector: u64,
        data: &[(usize, u32)],
    ) -> Result<u16> {
        let n = data.len() as u16 + 2;
        ensure!(n < SIZE, "too many pieces");
        let head = if self.heads[q] + n > SIZE {
            0
        } else {
            self.heads[q]
        };
        self.heads[q] = head + n;
        let page = HEADS + 4096 * (usize::from(head) + usize::from(SIZE) * q);
        let bytes = self.memory.bytes(page, 64);
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[4..8].fill(0);
        bytes[8..16].copy_from_slice(&sector.to_le_bytes());
        bytes[32] = 0xee;
        let written = matches!(kind, kind::IN | kind::GET_ID);
        let flags = flag::NEXT | if written { flag::WRITE } else { 0 };
        self.desc(q, head, BASE + page as u64, 16, flag::NEXT, head + 1);
        for (i, (at, len)) in data.iter().enumerate() {
            let index = head + 1 + i as u16;
            self.desc(q, index, BASE + *at as u64, *len, flags, index + 1);
        }
        let status = BASE + page as u64 + 32;
        self.desc(q, head + n - 1, status, 1, flag::WRITE, 0);
        self.offer(q, head);
        Ok(head)
    }

    /// The status byte of a request.
    pub fn status(&mut self, q: usize, head: u16) -> u8 {
        let page = HEADS + 4096 * (usize::from(head) + usize::from(SIZE) * q);
        self.memory.bytes(page + 32, 1)[0]
    }

    /// The next used request, if there is one: head, bytes written.
    pub fn used(&mut self, q: usize) -> Option<(u16, u32)> {
        let next = self.memory.next_used[q];
        if self.memory.u16_at(used_at(q) + 2).load(Ordering::Acquire) == next {
            return None;
        }
        self.memory.next_used[q] = next.wrapping_add(1);
        let at = used_at(q) + 4 + 8 * usize::from(next % SIZE);
        let raw = self.memory.bytes(at, 8);
        let word = |i: usize| u32::from_le_bytes(raw[i..i + 4].try_into().unwrap_or_default());
        Some((word(0) as u16, word(4)))
    }

    /// Waits for the next used request, sleeping on the call as a guest would.
    pub fn wait_used(&mut self, q: usize) -> Result<(u16, u32)> {
        let start = Instant::now();
        loop {
            let next = self.memory.next_used[q];
            let event = avail_at(q) + 4 + 2 * usize::from(SIZE);
            self.memory.u16_at(event).store(next, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            if let Some(used) = self.used(q) {
                return Ok(used);
            }
            ensure!(start.elapsed() < LIMIT, "a request was never answered");
            let mut poll = [libc::pollfd {
                fd: self.calls[q].as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            }];
            // SAFETY: one pollfd, alive across the call.
            let n = unsafe { libc::poll(poll.as_mut_ptr(), 1, LIMIT.as_millis() as i32) };
            ensure!(n == 1, "a request was never answered, or nobody was told");
            let _ = self.calls[q].read();
        }
    }

    /// One request from start to end; its status and the bytes written.
    pub fn request(
        &mut self,
        q: usize,
        kind: u32,
        sector: u64,
        data: &[(usize, u32)],
    ) -> Result<(u8, u32)> {
        let head = self.submit(q, kind, sector, data)?;
        self.kick(q)?;
        let (used, written) = self.wait_used(q)?;
        ensure!(used == head, "{used} was answered instead of {head}");
        Ok((self.status(q, head), written))
    }

    /// Asks to be called for the next request that is used.
    pub fn want_call(&self, q: usize) {
        let event = avail_at(q) + 4 + 2 * usize::from(SIZE);
        let next = self.memory.next_used[q];
        self.memory.u16_at(event).store(next, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Makes all queues' calls wait for room in their counters, and fills these.
    pub fn clog_calls(&self) -> Result<()> {
        for call in &self.calls {
            let _ = call.read();
            call.write(u64::MAX - 1)?;
            // SAFETY: plain numbers on a descriptor of ours.
            let done = unsafe { libc::fcntl(call.as_raw_fd(), libc::F_SETFL, 0) };
            ensure!(done == 0, "fcntl: {}", std::io::Error::last_os_error());
        }
        Ok(())
    }

    /// How often the device has called since this was last asked.
    pub fn calls(&self, q: usize) -> u64 {
        self.calls[q].read().unwrap_or(0)
    }
}

/// A descriptor's bytes.
pub fn encode(at: u64, len: u32, flags: u16, next: u16) -> [u8; 16] {
    let mut raw = [0u8; 16];
    raw[..8].copy_from_slice(&at.to_le_bytes());
    raw[8..12].copy_from_slice(&len.to_le_bytes());
    raw[12..14].copy_from_slice(&flags.to_le_bytes());
    raw[14..].copy_from_slice(&next.to_le_bytes());
    raw
}

fn padded(area: &[u8; 20]) -> Vec<u8> {
    let mut body = area.to_vec();
    body.resize(24, 0);
    body
}

fn desc_at(q: usize) -> usize {
    RING * q
}

fn avail_at(q: usize) -> usize {
    RING * q + 0x1000
}

fn used_at(q: usize) -> usize {
    RING * q + 0x2000
}
