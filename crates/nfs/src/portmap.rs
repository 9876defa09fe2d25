//! On which port a program is found (portmapper version 2, RFC 1833, section 3).
//!
//! Some hosts cannot be told a server's ports: they ask its port 111. Most Linux servers have
//! somebody there already (rpcbind), who takes registrations from this host; where nobody is, we
//! answer ourselves. Versions 3 and 4, which Linux tries first, are answered with "version 2 only", after which it asks again.

use crate::rpc::{self, Call, Credential};
use crate::xdr::{Malformed, Reader, Result, Writer};

/// The program's number.
pub const PROGRAM: u32 = 100_000;
/// The version spoken here.
pub const VERSION: u32 = 2;
/// Where it listens.
pub const PORT: u16 = 111;
/// The number that stands for TCP.
pub const TCP: u32 = 6;
/// The number that stands for UDP.
pub const UDP: u32 = 17;

const NULL: u32 = 0;
const SET: u32 = 1;
const UNSET: u32 = 2;
const GETPORT: u32 = 3;
const DUMP: u32 = 4;

/// A program that is found on a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Its number.
    pub program: u32,
    /// Its version.
    pub version: u32,
    /// [`TCP`] or [`UDP`].
    pub protocol: u32,
    /// Where it is.
    pub port: u16,
}

impl Mapping {
    fn write(&self, w: &mut Writer) {
        w.u32(self.program)
            .u32(self.version)
            .u32(self.protocol)
            .u32(u32::from(self.port));
    }
}

/// Answers a call to the portmapper. Registrations are refused: nobody but ourselves is found here.
pub fn answer(call: &Call, args: &mut Reader<'_>, known: &[Mapping]) -> Writer {
    if call.version != VERSION {
        return rpc::wrong_version(call.xid, VERSION, VERSION);
    }
    match call.procedure {
        NULL => rpc::success(call.xid),
        SET | UNSET => {
            let mut w = rpc::success(call.xid);
            w.bool(false);
            w
        }
        GETPORT => match wanted(args) {
            Ok((program, version, protocol)) => {
                let mut w = rpc::success(call.xid);
                w.u32(find(known, program, version, protocol));
                w
            }
            Err(_) => rpc::garbage(call.xid),
        },
        DUMP => {
            let mut w = rpc::success(call.xid);
            for mapping in known {
                w.bool(true);
                mapping.write(&mut w);
            }
            w.bool(false);
            w
        }
        _ => rpc::no_procedure(call.xid),
    }
}

fn wanted(args: &mut Reader<'_>) -> Result<(u32, u32, u32)> {
    let wanted = (args.u32()?, args.u32()?, args.u32()?);
    // The port, which means nothing in a question.
    args.u32()?;
    Ok(wanted)
}

/// The port of a program: that of the version asked for, else of any, whose answer then says which
/// versions there are. 0 if there is none.
fn find(known: &[Mapping], program: u32, version: u32, protocol: u32) -> u32 {
    let mut fits = known
        .iter()
        .filter(|m| m.program == program && m.protocol == protocol);
    let any = fits.clone().next();
    fits.find(|m| m.version == version)
        .or(any)
        .map_or(0, |m| u32::from(m.port))
}

/// The call by which a program is registered with the host's own portmapper, or with `gone`, by which it is
/// taken out again.
pub fn register(xid: u32, mapping: &Mapping, gone: bool) -> Vec<u8> {
    let mut w = call(xid, if gone { UNSET } else { SET });
    mapping.write(&mut w);
    w.into_vec()
}

/// The call that asks for the port of a program.
pub fn get_port(xid: u32, mapping: &Mapping) -> Vec<u8> {
    let mut w = call(xid, GETPORT);
    mapping.write(&mut w);
    w.into_vec()
}

/// The call that asks for all programs.
pub fn dump(xid: u32) -> Vec<u8> {
    call(xid, DUMP).into_vec()
}

fn call(xid: u32, procedure: u32) -> Writer {
    let mut w = Writer::new();
    Call {
        xid,
        program: PROGRAM,
        version: VERSION,
        procedure,
        credential: Credential::None,
    }
    .write(&mut w);
    w
}

/// The programs that the host's portmapper named in answer to call `xid` of [`dump`]; `None` if it did not.
pub fn dumped(xid: u32, answer: &[u8]) -> Result<Option<Vec<Mapping>>> {
    let mut r = Reader::new(answer);
    if rpc::read_answer(&mut r)? != (xid, rpc::Answer::Success) {
        return Ok(None);
    }
    let mut all = Vec::new();
    // Each takes 20 bytes of the answer.
    while r.bool()? {
        let (program, version, protocol) = (r.u32()?, r.u32()?, r.u32()?);
        let port = r.u32()?;
        all.push(Mapping {
            program,
            version,
            protocol,
            port: u16::try_from(port).map_err(|_| Malformed::Choice(port))?,
        });
    }
    Ok(Some(all))
}

/// What the host's portmapper answered to call `xid` of [`register`]: whether it did so.
pub fn registered(xid: u32, answer: &[u8]) -> Result<bool> {
    let mut r = Reader::new(answer);
    match rpc::read_answer(&mut r)? {
        (x, rpc::Answer::Success) if x == xid => r.bool(),
        _ => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::Head;

    const NFS: Mapping = Mapping {
        program: 100_003,
        version: 3,
        protocol: TCP,
        port: 2049,
    };
    const MOUNT: Mapping = Mapping {
        program: 100_005,
        version: 3,
        protocol: TCP,
        port: 2050,
    };

    fn ask(version: u32, procedure: u32, args: &[u32]) -> Vec<u8> {
        let call = Call {
            xid: 1,
            program: PROGRAM,
            version,
            procedure,
            credential: Credential::None,
        };
        let mut w = Writer::new();
        for arg in args {
            w.u32(*arg);
        }
        answer(&call, &mut Reader::new(w.as_slice()), &[NFS, MOUNT]).into_vec()
    }

    fn results(words: &[u32]) -> Vec<u8> {
        let mut w = rpc::success(1);
        for word in words {
            w.u32(*word);
        }
        w.into_vec()
    }

    #[test]
    fn ports_are_told() {
        assert_eq!(ask(2, NULL, &[]), results(&[]));
        assert_eq!(ask(2, GETPORT, &[100_003, 3, TCP, 0]), results(&[2049]));
        assert_eq!(ask(2, GETPORT, &[100_005, 1, TCP, 0]), results(&[2050]));
        assert_eq!(ask(2, GETPORT, &[100_003, 3, UDP, 0]), results(&[0]));
        assert_eq!(ask(2, GETPORT, &[100_021, 4, TCP, 0]), results(&[0]));
        assert_eq!(
            ask(2, DUMP, &[]),
            results(&[1, 100_003, 3, TCP, 2049, 1, 100_005, 3, TCP, 2050, 0])
        );
    }

    #[test]
    fn dump_is_read() {
        let answer = ask(2, DUMP, &[]);
        assert_eq!(dumped(1, &answer), Ok(Some(vec![NFS, MOUNT])));
        assert_eq!(dumped(2, &answer), Ok(None));
        for len in 0..answer.len() {
            assert!(dumped(1, &answer[..len]).is_err(), "{len}");
        }
        let mut wide = rpc::success(1);
        wide.u32(1).u32(1).u32(1).u32(6).u32(65_536).u32(0);
        assert_eq!(dumped(1, wide.as_slice()), Err(Malformed::Choice(65_536)));
    }

    #[test]
    fn the_rest_is_refused() {
        assert_eq!(ask(2, SET, &[100_003, 3, TCP, 1]), results(&[0]));
        assert_eq!(ask(2, GETPORT, &[1]), rpc::garbage(1).into_vec());
        assert_eq!(ask(2, 5, &[]), rpc::no_procedure(1).into_vec());
        assert_eq!(ask(4, 3, &[]), rpc::wrong_version(1, 2, 2).into_vec());
    }

    #[test]
    fn registering_is_a_call_of_56_bytes() {
        let bytes = register(3, &NFS, false);
        assert_eq!(bytes.len(), 56);
        let mut r = Reader::new(&bytes);
        let Ok(Head::Call(call)) = Call::read(&mut r) else {
            panic!("a call");
        };
        assert_eq!(
            (call.program, call.version, call.procedure),
            (PROGRAM, 2, SET)
        );
        assert_eq!(wanted(&mut r), Ok((100_003, 3, TCP)));
        let mut yes = rpc::success(3);
        yes.bool(true);
        assert_eq!(registered(3, yes.as_slice()), Ok(true));
        assert_eq!(registered(4, yes.as_slice()), Ok(false));
        assert_eq!(registered(3, rpc::bad_credential(3).as_slice()), Ok(false));
    }
}
