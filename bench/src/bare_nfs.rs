//! The bare NFS loop: the least a server of a file has to do over TCP with NFS's messages.
//!
//! As with [`bare`](crate::bare), for the other protocol: how near a server comes to its device says little until it is known how
//! near anything comes over a TCP connection with records, headers and attributes, from one client. One thread, one ring: it
//! receives a call's header, receives data into its place, gives the device one O_DIRECT operation per call, and sends
//! one answer. It knows only what our own client sends, believes all of it, and serves nobody else.

use std::fs::File;
use std::io::{BufRead, BufReader, IoSlice};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use hearth_io::{BLOCK, Buf};
use hearth_nfs::record::mark;
use hearth_nfs::rpc;
use hearth_nfs::v3::{Procedure, TRANSFER_MAX};
use io_uring::{IoUring, opcode, squeue, types};

use crate::bare::{DEPTH, RECEIVED, push, receive, send};
use crate::nfs::Client;

/// The word by which `hearth-bench` is asked to be this loop.
pub const WORD: &str = "--bare-nfs";
/// A write has two words more than a read in front of its data: how durable, and how long.
const MORE: usize = 8;
/// Attributes of a file, and that they follow.
const ATTRIBUTES: usize = 88;

/// The process of such a loop, ended when dropped.
#[derive(Debug)]
pub struct Server {
    child: Child,
    at: SocketAddr,
}

impl Server {
    /// On a file: this program, asked to be that.
    pub fn start(file: &Path) -> Result<Server> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(WORD).arg(file).stdout(Stdio::piped());
        let mut child = command.spawn().context("cannot start the bare loop")?;
        let said = child.stdout.take().context("no output")?;
        let mut server = Server {
            child,
            at: SocketAddr::from(([127, 0, 0, 1], 0)),
        };
        let mut line = String::new();
        BufReader::new(said).read_line(&mut line)?;
        server.at = line.trim().parse().context("no address of the bare loop")?;
        Ok(server)
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// A connection to it.
    pub fn client(&self) -> Result<Client> {
        Client::bare(TcpStream::connect(self.at)?)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Serves `file` to one client after the other, until it is killed. Says where on its output.
pub fn serve(file: &Path) -> Result<()> {
    let file = File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(file)
        .with_context(|| format!("cannot open {}", file.display()))?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    println!("{}", listener.local_addr()?);
    for client in listener.incoming() {
        let client = client?;
        client.set_nodelay(true)?;
        if let Err(e) = transmit(&client, &file) {
            eprintln!("{e:#}");
        }
    }
    Ok(())
}

/// A call the device works on.
struct Flight {
    xid: u32,
    procedure: Procedure,
    offset: u64,
    len: usize,
    /// Data from its second block on, so that what comes before it can be received with it.
    buf: Buf,
}

enum Awaits {
    Header,
    Data(Flight),
}

/// What the kernel may write into while calls are under way.
struct Memory {
    header: Buf,
    awaits: Awaits,
    flights: Vec<Option<Flight>>,
}

fn transmit(client: &TcpStream, file: &File) -> Result<()> {
    let len = Client::read_call_len()?;
    let mut memory = Memory {
        header: Buf::zeroed(len),
        awaits: Awaits::Header,
        flights: (0..DEPTH).map(|_| None).collect(),
    };
    let served = rounds(client, file.as_raw_fd(), &mut memory, len);
    if served.is_err() {
        // Who knows what is still under way: rather lost than written into when it is somebody else's.
        std::mem::forget(memory);
    }
    served
}

fn rounds(client: &TcpStream, file: RawFd, memory: &mut Memory, head: usize) -> Result<()> {
    let mut ring = IoUring::builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .build(DEPTH as u32)?;
    let socket = client.as_raw_fd();
    let mut spare: Vec<Buf> = Vec::new();
    push(&mut ring, receive(socket, &memory.header, 0, head));
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
            let wanted = match flight.procedure {
                Procedure::Commit => 0,
                _ => flight.len as i32,
            };
            ensure!(result == wanted, "the device answered {result}");
            reply(client, &flight)?;
            spare.push(flight.buf);
        }
        let Some(result) = received else { continue };
        let flight = match std::mem::replace(&mut memory.awaits, Awaits::Header) {
            Awaits::Header => {
                if result != head as i32 {
                    // It has left. Nothing may write into memory that is given back.
                    let left = memory.flights.iter().flatten().count();
                    ring.submit_and_wait(left)?;
                    return Ok(());
                }
                let raw = memory.header.slice(0, head);
                let flight = understand(raw.bytes(), &mut spare)?;
                if flight.procedure == Procedure::Write {
                    let at = BLOCK as usize - MORE;
                    push(
                        &mut ring,
                        receive(socket, &flight.buf, at, MORE + flight.len),
                    );
                    memory.awaits = Awaits::Data(flight);
                    continue;
                }
                flight
            }
            Awaits::Data(flight) => {
                ensure!(result as usize == MORE + flight.len, "data ended half-way");
                flight
            }
        };
        let at = memory.flights.iter().position(Option::is_none);
        let at = at.context("more calls than there is room for")?;
        push(&mut ring, start(file, &flight)?.user_data(at as u64));
        memory.flights[at] = Some(flight);
        push(&mut ring, receive(socket, &memory.header, 0, head));
    }
}

/// What a call asks for. All of ours have the same length up to here.
fn understand(bytes: &[u8], spare: &mut Vec<Buf>) -> Result<Flight> {
    let word = |at: usize| -> Result<u32> {
        let word = bytes.get(at..).and_then(<[u8]>::first_chunk);
        Ok(u32::from_be_bytes(*word.context("a short call")?))
    };
    let end = bytes.len();
    let (offset, count) = (
        u64::from(word(end - 12)?) << 32 | u64::from(word(end - 8)?),
        word(end - 4)?,
    );
    ensure!(count <= TRANSFER_MAX, "a call is too long");
    let procedure = Procedure::of(word(24)?).context("an unknown call")?;
    let len = count as usize;
    let room = BLOCK as usize + len;
    let at = spare.iter().position(|b| b.len() >= room);
    let buf = at.map_or_else(|| Buf::zeroed(room), |at| spare.swap_remove(at));
    Ok(Flight {
        xid: word(4)?,
        procedure,
        offset,
        len,
        buf,
    })
}

/// The device's part of a call.
fn start(file: RawFd, flight: &Flight) -> Result<squeue::Entry> {
    let data = flight.buf.slice(BLOCK as usize, flight.len);
    let (fd, ptr, len) = (types::Fd(file), data.as_ptr(), flight.len as u32);
    Ok(match flight.procedure {
        Procedure::Read => opcode::Read::new(fd, ptr, len)
            .offset(flight.offset)
            .build(),
        Procedure::Write => opcode::Write::new(fd, ptr, len)
            .offset(flight.offset)
            .build(),
        Procedure::Commit => opcode::Fsync::new(fd)
            .flags(types::FsyncFlags::DATASYNC)
            .build(),
        other => bail!("{other:?} is not offered"),
    })
}

fn reply(mut client: &TcpStream, flight: &Flight) -> Result<()> {
    let mut w = rpc::success(flight.xid);
    w.u32(0);
    let len = match flight.procedure {
        Procedure::Read => {
            w.fixed(&[0; ATTRIBUTES]);
            w.u32(flight.len as u32).bool(false).u32(flight.len as u32);
            flight.len
        }
        Procedure::Write => {
            w.bool(false).fixed(&[0; ATTRIBUTES]);
            w.u32(flight.len as u32).u32(0).fixed(&[0; 8]);
            0
        }
        _ => {
            w.bool(false).fixed(&[0; ATTRIBUTES]).fixed(&[0; 8]);
            0
        }
    };
    let data = flight.buf.slice(BLOCK as usize, len);
    let mark = mark(w.len() + len);
    send(
        &mut client,
        &mut [
            IoSlice::new(&mark),
            IoSlice::new(w.as_slice()),
            IoSlice::new(data.bytes()),
        ],
    )
}
