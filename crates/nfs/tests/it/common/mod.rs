//! A client that says exactly what it is told to, and takes answers apart.
#![allow(dead_code)]

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use hearth_nfs::record::{Assembler, mark};
use hearth_nfs::rpc::{self, Answer, Call, Credential};
use hearth_nfs::v3::{Args, Attributes, Kind, SetAttributes, Status, Time};
use hearth_nfs::xdr::{Reader, Writer};
use hearth_nfs::{mount, nlm, portmap, v3};

/// An answer that does not come in this time never will.
const NEVER: Duration = Duration::from_secs(30);

/// Patience for tests that are not about it: a disk that others keep busy is no fault of ours.
pub const LONG: Duration = Duration::from_secs(3600);

/// Each numbers its calls from another number on, as clients do: to the server one that counts the same is the same.
static CLIENTS: AtomicU32 = AtomicU32::new(0x1000);

pub fn root() -> Credential {
    Credential::Sys {
        uid: 0,
        gid: 0,
        groups: vec![],
    }
}

pub fn user(uid: u32) -> Credential {
    Credential::Sys {
        uid,
        gid: uid,
        groups: vec![],
    }
}

pub struct Client {
    pub stream: TcpStream,
    assembler: Assembler,
    /// Answers nobody has asked for yet.
    early: HashMap<u32, Vec<u8>>,
    pub credential: Credential,
    xid: u32,
    /// Asks again when told to, as clients do. A file's number that is being given out anew at this
    /// moment looks to the kernel like a want of memory, not like a file that is gone.
    pub patient: bool,
}

impl Client {
    pub fn connect(to: SocketAddr) -> Result<Client> {
        Client::over(TcpStream::connect(to)?)
    }

    pub fn over(stream: TcpStream) -> Result<Client> {
        stream.set_read_timeout(Some(NEVER))?;
        stream.set_nodelay(true)?;
        let (assembler, early) = (Assembler::new(), HashMap::new());
        Ok(Client {
            stream,
            assembler,
            early,
            credential: root(),
            xid: CLIENTS.fetch_add(1 << 20, Ordering::Relaxed),
            patient: false,
        })
    }

    pub fn next_xid(&mut self) -> u32 {
        self.xid += 1;
        self.xid
    }

    pub fn message(&self, xid: u32, args: &Args<'_>) -> Vec<u8> {
        let procedure = args.procedure() as u32;
        let credential = self.credential.clone();
        let call = Call {
            xid,
            program: v3::PROGRAM,
            version: v3::VERSION,
            procedure,
            credential,
        };
        let mut w = Writer::new();
        call.write(&mut w);
        args.write(&mut w);
        w.into_vec()
    }

    pub fn send_raw(&mut self, message: &[u8]) -> Result<()> {
        self.stream.write_all(&mark(message.len()))?;
        Ok(self.stream.write_all(message)?)
    }

    /// Sends a call; its number.
    pub fn send(&mut self, args: &Args<'_>) -> Result<u32> {
        let xid = self.next_xid();
        self.send_as(xid, args)?;
        Ok(xid)
    }

    pub fn send_as(&mut self, xid: u32, args: &Args<'_>) -> Result<()> {
        let message = self.message(xid, args);
        self.send_raw(&message)
    }

    /// The next answer, whatever it answers. `None` when the server has hung up.
    pub fn receive(&mut self) -> Result<Option<(u32, Vec<u8>)>> {
        let mut bytes = vec![0; 64 << 10];
        loop {
            if let Some(message) = self.assembler.next_message() {
                let xid = Reader::new(&message).u32()?;
                return Ok(Some((xid, message.to_vec())));
            }
            match self.stream.read(&mut bytes) {
                Ok(0) => return Ok(None),
                Ok(n) => self.assembler.feed(&bytes[..n])?,
                Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return Ok(None),
                // A child that ended, while others are being started.
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e).context("no answer"),
            }
        }
    }

    /// The answer to a call.
    pub fn answer(&mut self, xid: u32) -> Result<Vec<u8>> {
        loop {
            if let Some(message) = self.early.remove(&xid) {
                return Ok(message);
            }
            let (xid, message) = self.receive()?.context("the server has hung up")?;
            self.early.insert(xid, message);
        }
    }

    /// The results of a call, behind the status.
    pub fn results(&mut self, xid: u32) -> Result<Results> {
        Results::of(&self.answer(xid)?)
    }

    pub fn call(&mut self, args: &Args<'_>) -> Result<Results> {
        loop {
            let xid = self.send(args)?;
            let results = self.results(xid)?;
            if !self.patient || results.status != Status::JukeBox as u32 {
                return Ok(results);
            }
        }
    }

    /// Sends a call of MOUNT about a path; its number.
    fn send_mount(&mut self, procedure: u32, path: &str) -> Result<u32> {
        let xid = self.next_xid();
        let credential = self.credential.clone();
        let call = Call {
            xid,
            program: mount::PROGRAM,
            version: mount::VERSION,
            procedure,
            credential,
        };
        let mut w = Writer::new();
        call.write(&mut w);
        w.opaque(path.as_bytes());
        self.send_raw(w.as_slice())?;
        Ok(xid)
    }

    /// Unmounts a path (UMNT).
    pub fn unmount(&mut self, path: &str) -> Result<()> {
        let xid = self.send_mount(3, path)?;
        self.answer(xid).map(drop)
    }

    /// Mounts a path: its handle.
    pub fn mount(&mut self, path: &str) -> Result<std::result::Result<Vec<u8>, u32>> {
        let xid = self.send_mount(1, path)?;
        let results = self.results(xid)?;
        if results.status != 0 {
            return Ok(Err(results.status));
        }
        let mut r = Reader::new(&results.bytes);
        let handle = r.opaque(64)?.to_vec();
        let flavors = r.length(8)?;
        let flavors: Vec<u32> = (0..flavors).map(|_| r.u32()).collect::<Result<_, _>>()?;
        ensure!(flavors.contains(&1) && r.rest().is_empty());
        Ok(Ok(handle))
    }
}

/// The status of a call to the lock manager.
pub fn nlm(client: &mut Client, args: &nlm::Args<'_>) -> Result<u32> {
    let mut w = Writer::new();
    let procedure = args.write(b"cookie", &mut w).context("a call of clients")?;
    let xid = client.next_xid();
    let mut message = Writer::new();
    Call {
        xid,
        program: nlm::PROGRAM,
        version: nlm::VERSION,
        procedure,
        credential: client.credential.clone(),
    }
    .write(&mut message);
    message.append(&w);
    client.send_raw(message.as_slice())?;
    let answer = client.answer(xid)?;
    let mut r = Reader::new(&answer);
    ensure!(rpc::read_answer(&mut r)? == (xid, Answer::Success));
    if matches!(args, nlm::Args::Null | nlm::Args::FreeAll { .. }) {
        return Ok(0);
    }
    ensure!(r.opaque(64)? == b"cookie");
    Ok(r.u32()?)
}

/// What a call gave.
#[derive(Debug)]
pub struct Results {
    pub status: u32,
    pub bytes: Vec<u8>,
}

impl Results {
    pub fn of(message: &[u8]) -> Result<Results> {
        let mut r = Reader::new(message);
        match rpc::read_answer(&mut r)? {
            (_, Answer::Success) => {}
            (_, other) => bail!("{other:?}"),
        }
        Ok(Results {
            status: r.u32()?,
            bytes: r.rest().to_vec(),
        })
    }

    pub fn ok(self) -> Result<Results> {
        ensure!(self.status == 0, "status {}", self.status);
        Ok(self)
    }

    pub fn is(&self, status: Status) -> Result<()> {
        ensure!(
            self.status == status as u32,
            "{} and not {status:?}",
            self.status
        );
        Ok(())
    }

    pub fn reader(&self) -> Reader<'_> {
        Reader::new(&self.bytes)
    }
}

pub fn time(r: &mut Reader<'_>) -> hearth_nfs::xdr::Result<Time> {
    Ok(Time {
        seconds: r.u32()?,
        nanos: r.u32()?,
    })
}

pub fn attributes(r: &mut Reader<'_>) -> hearth_nfs::xdr::Result<Attributes> {
    let kinds = [
        Kind::Regular,
        Kind::Directory,
        Kind::Block,
        Kind::Character,
        Kind::Link,
        Kind::Socket,
        Kind::Fifo,
    ];
    Ok(Attributes {
        kind: kinds[r.u32()? as usize - 1],
        mode: r.u32()?,
        links: r.u32()?,
        uid: r.u32()?,
        gid: r.u32()?,
        size: r.u64()?,
        used: r.u64()?,
        device: (r.u32()?, r.u32()?),
        tree: r.u64()?,
        id: r.u64()?,
        accessed: time(r)?,
        modified: time(r)?,
        changed: time(r)?,
    })
}

/// Where a program listens over TCP, as a portmapper says; 0 if it knows of none.
pub fn port_of(portmapper: SocketAddr, program: u32) -> Result<u16> {
    let mut client = Client::connect(portmapper)?;
    let call = Call {
        xid: 1,
        program: portmap::PROGRAM,
        version: 2,
        procedure: 3,
        credential: Credential::None,
    };
    let mut w = Writer::new();
    call.write(&mut w);
    w.u32(program).u32(3).u32(portmap::TCP).u32(0);
    client.send_raw(w.as_slice())?;
    Ok(u16::try_from(Results::of(&client.answer(1)?)?.status)?)
}

pub fn get(client: &mut Client, file: &[u8]) -> Result<Attributes> {
    let results = client.call(&Args::GetAttr { file })?.ok()?;
    Ok(attributes(&mut results.reader())?)
}

/// Sets attributes of a file, whatever they are at that time.
pub fn set_attributes(client: &mut Client, file: &[u8], set: SetAttributes) -> Result<Results> {
    let only_if = None;
    client.call(&Args::SetAttr { file, set, only_if })
}

pub fn set_size(client: &mut Client, file: &[u8], size: u64) -> Result<Results> {
    let size = Some(size);
    set_attributes(
        client,
        file,
        SetAttributes {
            size,
            ..SetAttributes::default()
        },
    )
}

/// Size, mtime and ctime of a file.
pub type Before = (u64, Time, Time);

/// A file before a change, if that is told, and after it.
pub fn wcc(r: &mut Reader<'_>) -> hearth_nfs::xdr::Result<(Option<Before>, Option<Attributes>)> {
    Ok((
        r.optional(|r| Ok((r.u64()?, time(r)?, time(r)?)))?,
        r.optional(attributes)?,
    ))
}
