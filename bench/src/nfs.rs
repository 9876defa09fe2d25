//! One timed run of a load over a connection of Hearth's own, by the same loop whether it speaks NBD or NFS.
//!
//! fio drives NBD in a way of its own and NFS not at all; a comparison of two protocols needs one client. This one is a
//! thread that sends a request as soon as one is answered, and copies nothing it need not.

use std::collections::HashMap;
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use hearth_nfs::message::Message;
use hearth_nfs::mount;
use hearth_nfs::record::{Assembler, mark};
use hearth_nfs::rpc::{self, Answer, Call, Credential};
use hearth_nfs::v3::{self, Args, Named, Stability};
use hearth_nfs::xdr::{Reader, Writer};
use hearth_rig::nbd::{self, Command};
use hearth_rig::process::cpu_us;

use crate::load::{Job, Sample};

/// An answer that does not come in this time never will.
const NEVER: Duration = Duration::from_secs(60);
/// Bytes received at once, beside what goes to where it is to lie.
const RECEIVED: usize = 64 << 10;
/// Most bytes of a part of a listing.
const LISTED: u32 = 64 << 10;
/// Bytes of a file's attributes (RFC 1813, `fattr3`).
const ATTRIBUTES: usize = 84;
/// Bytes of a handle of ours.
const BARE_HANDLE: usize = 36;

/// Begins a call, with room for the word in front of it.
fn call(xid: u32, program: u32, version: u32, procedure: u32) -> Writer {
    let call = Call {
        xid,
        program,
        version,
        procedure,
        credential: Credential::Sys {
            uid: 0,
            gid: 0,
            groups: Vec::new(),
        },
    };
    let mut w = Writer::new();
    w.u32(0);
    call.write(&mut w);
    w
}

fn written(args: &Args<'_>) -> Writer {
    let mut w = Writer::new();
    args.write(&mut w);
    w
}

/// Passes over attributes, if they are there.
fn attributes(r: &mut Reader<'_>) -> Result<()> {
    if r.bool()? {
        r.fixed::<ATTRIBUTES>()?;
    }
    Ok(())
}

/// A connection to an NFS server, and the file that is read and written over it.
#[derive(Debug)]
pub struct Client {
    stream: TcpStream,
    assembler: Assembler,
    bytes: Vec<u8>,
    xid: u32,
    dir: Vec<u8>,
    file: Vec<u8>,
    stable: Stability,
}

impl Client {
    /// Mounts `path` and finds the file `name` in it.
    pub fn connect(server: SocketAddr, path: &str, name: &str) -> Result<Client> {
        let both = (TcpStream::connect(server)?, TcpStream::connect(server)?);
        Client::over(both, path, name)
    }

    /// The same over connections to the NFS server and to that which mounts.
    pub fn over(both: (TcpStream, TcpStream), path: &str, name: &str) -> Result<Client> {
        let mut mount = Client::of(both.1)?;
        let mut w = mount.call(mount::PROGRAM, mount::VERSION, 1);
        w.opaque(path.as_bytes());
        let results = mount.ask(&w)?;
        let dir = Reader::new(&results).opaque(64)?.to_vec();
        let mut client = Client::of(both.0)?;
        client.dir = dir;
        client.find(name)?;
        Ok(client)
    }

    fn one(
        &mut self,
        procedure: v3::Procedure,
        args: impl FnOnce(&Client) -> Writer,
    ) -> Result<Vec<u8>> {
        let mut w = self.call(v3::PROGRAM, v3::VERSION, procedure as u32);
        w.append(&args(self));
        self.ask(&w)
    }

    /// From now on the file `name` is read and written.
    pub fn find(&mut self, name: &str) -> Result<()> {
        let results = self.one(v3::Procedure::Lookup, |client| {
            let (dir, name) = (client.dir.as_slice(), name.as_bytes());
            written(&Args::Lookup(Named { dir, name }))
        })?;
        self.file = Reader::new(&results).opaque(64)?.to_vec();
        Ok(())
    }

    /// Gives a file another name.
    pub fn rename(&mut self, from: &str, to: &str) -> Result<()> {
        self.one(v3::Procedure::Rename, |client| {
            let named = |name| Named {
                dir: &client.dir,
                name,
            };
            let (from, to) = (named(from.as_bytes()), named(to.as_bytes()));
            written(&Args::Rename { from, to })
        })
        .map(drop)
    }

    /// Reads from the file, and waits for it.
    pub fn read_now(&mut self, offset: u64, count: u32) -> Result<()> {
        self.read_back(offset, count).map(drop)
    }

    /// The same, for what it holds there.
    pub fn read_back(&mut self, offset: u64, count: u32) -> Result<Vec<u8>> {
        let results = self.one(v3::Procedure::Read, |client| {
            let file = client.file.as_slice();
            written(&Args::Read {
                file,
                offset,
                count,
            })
        })?;
        let mut r = Reader::new(&results);
        attributes(&mut r)?;
        // How many, and whether the file ends there.
        let (len, _) = (r.u32()?, r.bool()?);
        ensure!(len == count, "a short read");
        Ok(r.opaque(count)?.to_vec())
    }

    /// Lists the directory with the attributes of all that is in it; how many there are.
    pub fn list(&mut self) -> Result<u64> {
        let (mut cookie, mut verifier, mut count) = (0, [0; 8], 0);
        loop {
            let results = self.one(v3::Procedure::ReadDirPlus, |client| {
                written(&Args::ReadDirPlus {
                    dir: &client.dir,
                    cookie,
                    verifier,
                    names: LISTED,
                    bytes: LISTED,
                })
            })?;
            let mut r = Reader::new(&results);
            attributes(&mut r)?;
            verifier = r.fixed()?;
            while r.bool()? {
                r.u64()?;
                r.opaque(255)?;
                cookie = r.u64()?;
                attributes(&mut r)?;
                if r.bool()? {
                    r.opaque(64)?;
                }
                count += 1;
            }
            if r.bool()? {
                return Ok(count);
            }
        }
    }

    /// Over a connection to a [bare loop](crate::bare_nfs), which has one file and asks for no handle.
    pub fn bare(stream: TcpStream) -> Result<Client> {
        let mut client = Client::of(stream)?;
        client.file = vec![0; BARE_HANDLE];
        Ok(client)
    }

    /// Bytes of a call to read, over such a connection, with the word in front of it.
    pub fn read_call_len() -> Result<usize> {
        let mut w = call(0, v3::PROGRAM, v3::VERSION, v3::Procedure::Read as u32);
        let args = Args::Read {
            file: &[0; BARE_HANDLE],
            offset: 0,
            count: 0,
        };
        args.write(&mut w);
        Ok(w.len())
    }

    /// Writes need not be durable when they are answered; a commit at the end makes them so.
    pub fn unstable(mut self) -> Client {
        self.stable = Stability::Unstable;
        self
    }

    fn of(stream: TcpStream) -> Result<Client> {
        stream.set_read_timeout(Some(NEVER))?;
        stream.set_nodelay(true)?;
        Ok(Client {
            stream,
            assembler: Assembler::new(),
            bytes: vec![0; RECEIVED],
            // As clients do: one that counted from the same number again would be taken for its predecessor.
            xid: SystemTime::now().duration_since(UNIX_EPOCH)?.subsec_nanos(),
            dir: Vec::new(),
            file: Vec::new(),
            stable: Stability::File,
        })
    }

    fn call(&mut self, program: u32, version: u32, procedure: u32) -> Writer {
        self.xid = self.xid.wrapping_add(1);
        call(self.xid, program, version, procedure)
    }

    fn send(&mut self, message: Writer) -> Result<u64> {
        self.send_with(message, &[])
    }

    /// Sends a call that ends with `data`, of whole words.
    fn send_with(&mut self, message: Writer, data: &[u8]) -> Result<u64> {
        let mut message = message.into_vec();
        let mark = mark(message.len() - 4 + data.len());
        message[..4].copy_from_slice(&mark);
        let mut parts = [IoSlice::new(&message), IoSlice::new(data)];
        let mut parts = &mut parts[..];
        while !parts.is_empty() {
            let n = self.stream.write_vectored(parts)?;
            ensure!(n > 0, "the server takes no calls");
            IoSlice::advance_slices(&mut parts, n);
        }
        Ok(u64::from(self.xid))
    }

    /// The next answer: its number, and where what is behind its status begins. It must be a good one.
    fn receive(&mut self) -> Result<(u64, Message, usize)> {
        let (xid, status, message, at) = self.receive_any()?;
        ensure!(status == 0, "status {status}");
        Ok((xid, message, at))
    }

    /// The next answer, whatever it says: its number, its status, and where what is behind that begins.
    fn receive_any(&mut self) -> Result<(u64, u32, Message, usize)> {
        let message = loop {
            if let Some(message) = self.assembler.next_message() {
                break message;
            }
            let space = self.assembler.space();
            let direct = space.len();
            let mut parts = [IoSliceMut::new(space), IoSliceMut::new(&mut self.bytes)];
            let n = self.stream.read_vectored(&mut parts).context("no answer")?;
            ensure!(n > 0, "the server has hung up");
            self.assembler.filled(n.min(direct));
            self.assembler
                .feed(&self.bytes[..n.saturating_sub(direct)])?;
        };
        let mut r = Reader::new(&message);
        let (xid, answer) = rpc::read_answer(&mut r)?;
        ensure!(answer == Answer::Success, "{answer:?}");
        let status = r.u32()?;
        let at = message.len() - r.rest().len();
        Ok((u64::from(xid), status, message, at))
    }

    /// Sends a call without waiting for its answer; its number.
    pub(crate) fn begin(&mut self, args: &Args<'_>) -> Result<u64> {
        let mut w = self.call(v3::PROGRAM, v3::VERSION, args.procedure() as u32);
        args.write(&mut w);
        self.send(w)
    }

    /// The number and the status of the next answer.
    pub(crate) fn answered(&mut self) -> Result<(u64, u32)> {
        let (xid, status, ..) = self.receive_any()?;
        Ok((xid, status))
    }

    /// The directory that is mounted, and the file that was found.
    pub(crate) fn handles(&self) -> (&[u8], &[u8]) {
        (&self.dir, &self.file)
    }

    fn ask_marked(&mut self, message: Writer) -> Result<()> {
        self.send(message)?;
        self.receive().map(drop)
    }

    fn ask(&mut self, message: &Writer) -> Result<Vec<u8>> {
        let mut own = Writer::new();
        own.append(message);
        self.send(own)?;
        let (_, message, at) = self.receive()?;
        Ok(message[at..].to_vec())
    }
}

/// How a write becomes durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durable {
    /// It is so when it is answered: FUA, FILE_SYNC.
    Itself,
    /// By a flush after it.
    ByFlush,
}

/// A connection.
#[derive(Debug)]
pub enum Wire {
    /// NBD.
    Nbd(nbd::Client, Durable),
    /// NFS.
    Nfs(Client),
}

impl Wire {
    fn read(&mut self, offset: u64, len: u32) -> Result<u64> {
        match self {
            Wire::Nbd(client, _) => Ok(client.send(Command::Read, offset, len, &[])?),
            Wire::Nfs(client) => {
                let procedure = v3::Procedure::Read as u32;
                let mut w = client.call(v3::PROGRAM, v3::VERSION, procedure);
                let args = Args::Read {
                    file: &client.file,
                    offset,
                    count: len,
                };
                args.write(&mut w);
                client.send(w)
            }
        }
    }

    /// Begins a durable write.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<u64> {
        match self {
            Wire::Nbd(client, durable) => {
                let fua = *durable == Durable::Itself;
                let command = Command::Write { fua };
                Ok(client.send(command, offset, data.len() as u32, data)?)
            }
            Wire::Nfs(client) => {
                let procedure = v3::Procedure::Write as u32;
                let mut w = client.call(v3::PROGRAM, v3::VERSION, procedure);
                let args = Args::Write {
                    file: &client.file,
                    offset,
                    count: data.len() as u32,
                    stable: client.stable,
                    data: &[],
                };
                args.write(&mut w);
                // The data goes from where it lies; here, only how long it is.
                w.truncate(w.len() - 4);
                w.u32(data.len() as u32);
                client.send_with(w, data)
            }
        }
    }

    /// Makes durable what was answered and is not.
    fn commit(&mut self) -> Result<()> {
        match self {
            Wire::Nfs(client) if client.stable == Stability::Unstable => {
                let procedure = v3::Procedure::Commit as u32;
                let mut w = client.call(v3::PROGRAM, v3::VERSION, procedure);
                let args = Args::Commit {
                    file: &client.file,
                    offset: 0,
                    count: 0,
                };
                args.write(&mut w);
                client.ask_marked(w)
            }
            _ => Ok(()),
        }
    }

    /// The next that was answered.
    pub fn receive(&mut self) -> Result<u64> {
        match self {
            Wire::Nbd(client, _) => {
                let reply = client.receive()?;
                ensure!(reply.error == 0, "error {}", reply.error);
                Ok(reply.cookie)
            }
            Wire::Nfs(client) => Ok(client.receive()?.0),
        }
    }

    /// A write was answered; the flush that has to follow, if one has.
    fn settle(&mut self) -> Result<Option<u64>> {
        match self {
            Wire::Nbd(client, Durable::ByFlush) => {
                Ok(Some(client.send(Command::Flush, 0, 0, &[])?))
            }
            _ => Ok(None),
        }
    }
}

/// Runs `job`, of reads or writes, over `wire`; `pid` is the server's.
pub fn run(job: &Job, wire: &mut Wire, pid: u32) -> Result<Sample> {
    let (reads, random) = match job.rw {
        "randread" => (true, true),
        "randwrite" => (false, true),
        "read" => (true, false),
        "write" => (false, false),
        other => anyhow::bail!("this loop has no {other}"),
    };
    let data = vec![0xa5; job.bs as usize];
    let mut state = job.seed;
    let mut next = |wire: &mut Wire| -> Result<u64> {
        state = match random {
            true => hearth_policy::spread(state),
            false => state + 1,
        };
        let at = state % (job.size / job.bs) * job.bs;
        match reads {
            true => wire.read(at, job.bs as u32),
            false => wire.write(at, &data),
        }
    };
    let (server, client) = (cpu_us(pid)?, crate::rows::cpu_ns());
    let start = Instant::now();
    let end = start + Duration::from_secs(job.seconds);
    // By the number of what is waited for: since when, and whether it is the flush.
    let mut waiting = HashMap::new();
    for _ in 0..job.depth {
        waiting.insert(next(wire)?, (Instant::now(), false));
    }
    let mut took = Vec::new();
    while !waiting.is_empty() {
        let id = wire.receive()?;
        let (since, flushed) = waiting.remove(&id).context("an answer to nothing")?;
        if !reads
            && !flushed
            && let Some(flush) = wire.settle()?
        {
            waiting.insert(flush, (since, true));
            continue;
        }
        let now = Instant::now();
        took.push((now - since).as_nanos() as u64);
        if now < end {
            waiting.insert(next(wire)?, (now, false));
        }
    }
    if !reads {
        wire.commit()?;
    }
    let time = start.elapsed();
    let requests = took.len() as f64;
    took.sort_unstable();
    let p99 = took.get(took.len() * 99 / 100).copied().unwrap_or(0);
    Ok(Sample {
        iops: requests / time.as_secs_f64(),
        mean_us: took.iter().sum::<u64>() as f64 / requests / 1e3,
        p99_us: p99 as f64 / 1e3,
        server_us: Some((cpu_us(pid)? - server) / requests),
        client_busy: (crate::rows::cpu_ns() - client) as f64 / time.as_nanos() as f64,
        requests,
    })
}
