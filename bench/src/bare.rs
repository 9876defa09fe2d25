//! The bare loop: the least an NBD server of a file has to do.
//!
//! How near a server comes to its device says little until it is known how near anything comes over this
//! protocol. So this peer does what no server can leave out: it receives a header, it receives a payload into
//! its place, it gives the device one O_DIRECT operation per request, and sends one reply. One thread, one ring,
//! one client; no cache, no log, no checksums, no limits on who may ask for how much. It is measured, and
//! serves nobody else.

use anyhow::{Context, Result, bail, ensure};
use hearth_io::Buf;
use hearth_nbd_wire::{
    FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, INIT_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, Reader,
    RequestHeader, SIMPLE_REPLY_MAGIC, STRING_MAX, Style, cmd, info, opt, rep, tflag,
};
use io_uring::{IoUring, opcode, squeue, types};
use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

/// The word by which `hearth-bench` is asked to be this loop.
pub const WORD: &str = "--bare-nbd";
/// Requests in flight; the client says how many it sends, and it is ours.
pub(crate) const DEPTH: usize = 256;
/// Bytes of a request header with compact requests.
const HEADER: usize = 28;
/// Longest payload.
const PAYLOAD_MAX: u64 = 32 << 20;
/// User data of the one receive; what the device does carries the number of its request.
pub(crate) const RECEIVED: u64 = u64::MAX;

/// Serves `file` to one client after the other on a unix socket, until it is killed.
pub fn serve(file: &Path, socket: &Path) -> Result<()> {
    let file = File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(file)
        .with_context(|| format!("cannot open {}", file.display()))?;
    let size = file.metadata()?.len();
    for client in UnixListener::bind(socket)?.incoming() {
        let mut client = client?;
        // A client that goes away, or only looked whether we listen, is not the next one's trouble.
        if let Err(e) = agree(&mut client, size).and_then(|_| transmit(&client, &file)) {
            eprintln!("{e:#}");
        }
    }
    Ok(())
}

/// The handshake, up to the option with which transmission begins.
fn agree(client: &mut UnixStream, size: u64) -> Result<()> {
    let mut hello = Vec::new();
    hello.extend(INIT_MAGIC.to_be_bytes());
    hello.extend(OPTION_MAGIC.to_be_bytes());
    hello.extend(((FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES) as u16).to_be_bytes());
    client.write_all(&hello)?;
    client.read_exact(&mut [0; 4])?;
    loop {
        let mut head = [0; 16];
        client.read_exact(&mut head)?;
        let mut head = Reader(&head);
        ensure!(head.u64() == Some(OPTION_MAGIC), "no option");
        let (option, len) = head.u32().zip(head.u32()).context("an option's head")?;
        ensure!(
            len as usize <= 2 * STRING_MAX,
            "an option of {len} bytes is too long"
        );
        client.read_exact(&mut vec![0; len as usize])?;
        let mut reply = |kind: u32, data: &[u8]| {
            let mut bytes = Vec::new();
            bytes.extend(OPTION_REPLY_MAGIC.to_be_bytes());
            bytes.extend(option.to_be_bytes());
            bytes.extend(kind.to_be_bytes());
            bytes.extend((data.len() as u32).to_be_bytes());
            bytes.extend(data);
            client.write_all(&bytes)
        };
        match option {
            opt::GO | opt::INFO => {
                let flags = tflag::HAS_FLAGS | tflag::SEND_FLUSH;
                let mut export = info::EXPORT.to_be_bytes().to_vec();
                export.extend(size.to_be_bytes());
                export.extend(flags.to_be_bytes());
                reply(rep::INFO, &export)?;
                reply(rep::ACK, &[])?;
                if option == opt::GO {
                    return Ok(());
                }
            }
            opt::ABORT => bail!("the client gave up"),
            _ => reply(rep::ERR_UNSUP, &[])?,
        }
    }
}

/// A request the device works on.
struct Flight {
    header: RequestHeader,
    buf: Buf,
}

/// What the outstanding receive is for.
enum Awaits {
    Header,
    Payload(Flight),
}

/// What the kernel may write into while requests are under way.
struct Memory {
    header: Buf,
    awaits: Awaits,
    flights: Vec<Option<Flight>>,
}

/// Serves requests until the client leaves.
fn transmit(client: &UnixStream, file: &File) -> Result<()> {
    let mut memory = Memory {
        header: Buf::zeroed(HEADER),
        awaits: Awaits::Header,
        flights: (0..DEPTH).map(|_| None).collect(),
    };
    let served = rounds(client, file.as_raw_fd(), &mut memory);
    if served.is_err() {
        // Who knows what is still under way: rather lost than written into when it is somebody else's.
        std::mem::forget(memory);
    }
    served
}

fn rounds(client: &UnixStream, file: RawFd, memory: &mut Memory) -> Result<()> {
    let mut ring = IoUring::builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .build(DEPTH as u32)?;
    let socket = client.as_raw_fd();
    let mut spare: Vec<Buf> = Vec::new();
    push(&mut ring, receive(socket, &memory.header, 0, HEADER));
    loop {
        ring.submit_and_wait(1)?;
        let mut received = None;
        while let Some(ended) = ring.completion().next() {
            let (who, result) = (ended.user_data(), ended.result());
            if who == RECEIVED {
                received = Some(result);
                continue;
            }
            let flight = memory.flights[who as usize].take();
            let flight = flight.context("nobody's answer")?;
            ensure!(
                result == answer(&flight.header),
                "the device answered {result}"
            );
            reply(client, &flight)?;
            spare.push(flight.buf);
        }
        let Some(result) = received else { continue };
        let flight = match std::mem::replace(&mut memory.awaits, Awaits::Header) {
            Awaits::Header => {
                let raw = memory.header.slice(0, HEADER);
                let header = match RequestHeader::parse(Style::Simple, raw.bytes()) {
                    Some(Ok(header)) if result == HEADER as i32 && header.command != cmd::DISC => {
                        header
                    }
                    // It has left. Nothing may write into memory that is given back.
                    _ => {
                        let left = memory.flights.iter().flatten().count();
                        ring.submit_and_wait(left)?;
                        return Ok(());
                    }
                };
                ensure!(header.len <= PAYLOAD_MAX, "a request is too long");
                let len = header.len as usize;
                let at = spare.iter().position(|b| b.len() >= len);
                let buf = at.map_or_else(|| Buf::zeroed(len), |at| spare.swap_remove(at));
                let flight = Flight { header, buf };
                if header.command == cmd::WRITE {
                    push(&mut ring, receive(socket, &flight.buf, 0, len));
                    memory.awaits = Awaits::Payload(flight);
                    continue;
                }
                flight
            }
            Awaits::Payload(flight) => {
                ensure!(
                    i64::from(result) == flight.header.len as i64,
                    "a payload ended half-way"
                );
                flight
            }
        };
        let at = memory.flights.iter().position(Option::is_none);
        let at = at.context("more requests than there is room for")?;
        push(&mut ring, start(file, &flight)?.user_data(at as u64));
        memory.flights[at] = Some(flight);
        push(&mut ring, receive(socket, &memory.header, 0, HEADER));
    }
}

/// What the device has to answer.
fn answer(header: &RequestHeader) -> i32 {
    match header.command {
        cmd::READ | cmd::WRITE => header.len as i32,
        _ => 0,
    }
}

/// The device's part of a request.
fn start(file: RawFd, flight: &Flight) -> Result<squeue::Entry> {
    let (fd, ptr) = (types::Fd(file), flight.buf.all().as_ptr());
    let (offset, len) = (flight.header.offset, flight.header.len as u32);
    Ok(match flight.header.command {
        cmd::READ => opcode::Read::new(fd, ptr, len).offset(offset).build(),
        cmd::WRITE => opcode::Write::new(fd, ptr, len).offset(offset).build(),
        cmd::FLUSH => opcode::Fsync::new(fd)
            .flags(types::FsyncFlags::DATASYNC)
            .build(),
        other => bail!("command {other} is not offered"),
    })
}

/// All of `len` bytes from the client, into a buffer from `at` on.
pub(crate) fn receive(socket: RawFd, buf: &Buf, at: usize, len: usize) -> squeue::Entry {
    opcode::Recv::new(types::Fd(socket), buf.slice(at, len).as_ptr(), len as u32)
        .flags(libc::MSG_WAITALL)
        .build()
        .user_data(RECEIVED)
}

/// Gives the ring an entry, whose memory is in the loop's `Memory`.
pub(crate) fn push(ring: &mut IoUring, entry: squeue::Entry) {
    // SAFETY: what an entry points to is in `Memory`, which goes only when nothing is under way any more, and is
    // leaked after an error.
    let pushed = unsafe { ring.submission().push(&entry) };
    pushed.expect("each request has one entry and the client one more");
}

fn reply(mut client: &UnixStream, flight: &Flight) -> Result<()> {
    let mut head = [0; 16];
    head[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    head[8..].copy_from_slice(&flight.header.cookie.to_be_bytes());
    let data = match flight.header.command {
        cmd::READ => flight.buf.slice(0, flight.header.len as usize),
        _ => flight.buf.slice(0, 0),
    };
    send(
        &mut client,
        &mut [IoSlice::new(&head), IoSlice::new(data.bytes())],
    )
}

/// Sends a reply in its parts, all of it.
pub(crate) fn send(client: &mut impl Write, mut parts: &mut [IoSlice<'_>]) -> Result<()> {
    while !parts.is_empty() {
        let n = client.write_vectored(parts)?;
        ensure!(n > 0, "the client takes no replies");
        IoSlice::advance_slices(&mut parts, n);
    }
    Ok(())
}
