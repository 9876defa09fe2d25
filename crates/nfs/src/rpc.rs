//! Who calls which procedure, and how calls are accepted and denied (ONC RPC, RFC 5531).
//!
//! Every message begins with a number by which the caller finds the answer to its call; that is why
//! answers may come in any order. A call whose header cannot be understood has no such number that
//! could be believed: it gets no answer, and its connection is cut.

use crate::xdr::{Malformed, Reader, Result, Writer};

/// The version of the call format.
const RPC_VERSION: u32 = 2;
const CALL: u32 = 0;
const REPLY: u32 = 1;
const ACCEPTED: u32 = 0;
const DENIED: u32 = 1;
/// Most bytes of a credential or verifier.
const AUTH_MAX: u32 = 400;
/// Most supplementary groups a caller may name.
pub const GROUPS_MAX: u32 = 16;
/// Longest name of a machine in a credential.
const MACHINE_MAX: u32 = 255;

const AUTH_NONE: u32 = 0;
const AUTH_SYS: u32 = 1;

/// Who a caller says it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Credential {
    /// It does not say.
    None,
    /// Numbers of a user and its groups, which nobody vouches for.
    Sys {
        /// User.
        uid: u32,
        /// Group.
        gid: u32,
        /// Further groups.
        groups: Vec<u32>,
    },
    /// A kind of proof that is not understood here.
    Unknown(u32),
}

/// The header of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// The caller's number for it.
    pub xid: u32,
    /// Program.
    pub program: u32,
    /// Its version.
    pub version: u32,
    /// Procedure.
    pub procedure: u32,
    /// Who calls.
    pub credential: Credential,
}

/// What the first bytes of a message are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Head {
    /// A call.
    Call(Call),
    /// A call in a version of the format that is not ours; denied by [`wrong_rpc_version`].
    WrongVersion(u32),
    /// A call whose credential cannot be read; denied by [`bad_credential`].
    BadCredential(u32),
}

impl Call {
    /// Takes the header off a message; what the reader then holds are the procedure's arguments.
    /// An error means that the sender does not speak this protocol.
    pub fn read(r: &mut Reader<'_>) -> Result<Head> {
        let xid = r.u32()?;
        match r.u32()? {
            CALL => {}
            other => return Err(Malformed::Choice(other)),
        }
        if r.u32()? != RPC_VERSION {
            return Ok(Head::WrongVersion(xid));
        }
        let (program, version, procedure) = (r.u32()?, r.u32()?, r.u32()?);
        let flavor = r.u32()?;
        let Ok(body) = r.opaque(AUTH_MAX) else {
            return Ok(Head::BadCredential(xid));
        };
        let credential = match flavor {
            AUTH_NONE => Credential::None,
            AUTH_SYS => match sys(body) {
                Ok(credential) => credential,
                Err(_) => return Ok(Head::BadCredential(xid)),
            },
            other => Credential::Unknown(other),
        };
        r.u32()?;
        if r.opaque(AUTH_MAX).is_err() {
            return Ok(Head::BadCredential(xid));
        }
        Ok(Head::Call(Call {
            xid,
            program,
            version,
            procedure,
            credential,
        }))
    }

    /// Writes the header; the arguments follow.
    pub fn write(&self, w: &mut Writer) {
        w.u32(self.xid).u32(CALL).u32(RPC_VERSION);
        w.u32(self.program).u32(self.version).u32(self.procedure);
        match &self.credential {
            Credential::None => {
                w.u32(AUTH_NONE).u32(0);
            }
            Credential::Unknown(flavor) => {
                w.u32(*flavor).u32(0);
            }
            Credential::Sys { uid, gid, groups } => {
                let mut body = Writer::new();
                body.u32(0)
                    .opaque(b"hearth")
                    .u32(*uid)
                    .u32(*gid)
                    .u32(groups.len() as u32);
                for group in groups {
                    body.u32(*group);
                }
                w.u32(AUTH_SYS).opaque(body.as_slice());
            }
        }
        w.u32(AUTH_NONE).u32(0);
    }
}

fn sys(body: &[u8]) -> Result<Credential> {
    let mut r = Reader::new(body);
    r.u32()?;
    r.opaque(MACHINE_MAX)?;
    let (uid, gid) = (r.u32()?, r.u32()?);
    let count = r.length(GROUPS_MAX)?;
    let groups = (0..count).map(|_| r.u32()).collect::<Result<Vec<u32>>>()?;
    r.end()?;
    Ok(Credential::Sys { uid, gid, groups })
}

/// The first word of an accepted call's results: in this protocol, how it went.
pub fn result(answer: &[u8]) -> Option<u32> {
    let head = success(0).len();
    let word = answer.get(head..)?.first_chunk()?;
    Some(u32::from_be_bytes(*word))
}

/// True if a whole message has a credential that begins with a stamp.
pub fn has_stamp(message: &[u8]) -> bool {
    message.get(24..28) == Some(&AUTH_SYS.to_be_bytes())
}

/// What a caller says its machine is called; nothing if it does not say. Of a whole message, so that only who asks for it
/// pays for it.
pub fn machine(message: &[u8]) -> &[u8] {
    let name = |message| {
        let mut r = Reader::new(message);
        // Number, kind, version; program, version, procedure.
        for _ in 0..6 {
            r.u32()?;
        }
        if r.u32()? != AUTH_SYS {
            return Ok(Default::default());
        }
        let mut r = Reader::new(r.opaque(AUTH_MAX)?);
        r.u32()?;
        r.opaque(MACHINE_MAX)
    };
    let name: Result<&[u8]> = name(message);
    name.unwrap_or_default()
}

/// Begins the answer to an accepted call; the procedure's results follow.
pub fn success(xid: u32) -> Writer {
    accepted(xid, 0)
}

/// The program is not served here.
pub fn no_program(xid: u32) -> Writer {
    accepted(xid, 1)
}

/// The program is served in versions `low` to `high` only.
pub fn wrong_version(xid: u32, low: u32, high: u32) -> Writer {
    let mut w = accepted(xid, 2);
    w.u32(low).u32(high);
    w
}

/// The program has no such procedure.
pub fn no_procedure(xid: u32) -> Writer {
    accepted(xid, 3)
}

/// The procedure's arguments cannot be understood.
pub fn garbage(xid: u32) -> Writer {
    accepted(xid, 4)
}

/// The call was understood and cannot be carried out for want of something here.
pub fn system_error(xid: u32) -> Writer {
    accepted(xid, 5)
}

fn accepted(xid: u32, how: u32) -> Writer {
    // Most answers are short; reads of data bring their own.
    let mut w = Writer::with_room(256);
    w.u32(xid).u32(REPLY).u32(ACCEPTED);
    w.u32(AUTH_NONE).u32(0).u32(how);
    w
}

/// Denies a call in another version of the call format.
pub fn wrong_rpc_version(xid: u32) -> Writer {
    let mut w = Writer::new();
    w.u32(xid).u32(REPLY).u32(DENIED);
    w.u32(0).u32(RPC_VERSION).u32(RPC_VERSION);
    w
}

/// Denies a call whose credential cannot be read.
pub fn bad_credential(xid: u32) -> Writer {
    denied(xid, 1)
}

/// Denies a call whose credential proves too little.
pub fn weak_credential(xid: u32) -> Writer {
    denied(xid, 5)
}

fn denied(xid: u32, why: u32) -> Writer {
    let mut w = Writer::new();
    w.u32(xid).u32(REPLY).u32(DENIED);
    w.u32(1).u32(why);
    w
}

/// What a caller learns from the header of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The results follow.
    Success,
    /// It was not carried out: the number of the reason.
    Failed(u32),
    /// It was denied.
    Denied,
}

/// Takes the header off an answer: the number of its call, and how it went.
pub fn read_answer(r: &mut Reader<'_>) -> Result<(u32, Answer)> {
    let xid = r.u32()?;
    match r.u32()? {
        REPLY => {}
        other => return Err(Malformed::Choice(other)),
    }
    match r.u32()? {
        ACCEPTED => {
            r.u32()?;
            r.opaque(AUTH_MAX)?;
            match r.u32()? {
                0 => Ok((xid, Answer::Success)),
                how => Ok((xid, Answer::Failed(how))),
            }
        }
        DENIED => Ok((xid, Answer::Denied)),
        other => Err(Malformed::Choice(other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A NULL call to NFS version 3, byte for byte.
    #[test]
    fn a_call_looks_like_this() {
        let call = Call {
            xid: 0x1234_5678,
            program: 100_003,
            version: 3,
            procedure: 0,
            credential: Credential::Sys {
                uid: 0,
                gid: 1,
                groups: vec![5],
            },
        };
        let mut w = Writer::new();
        call.write(&mut w);
        let expected: &[u8] = &[
            0x12, 0x34, 0x56, 0x78, 0, 0, 0, 0, 0, 0, 0, 2, 0, 1, 0x86, 0xa3, 0, 0, 0, 3, 0, 0, 0,
            0, //
            0, 0, 0, 1, 0, 0, 0, 32, // AUTH_SYS
            0, 0, 0, 0, 0, 0, 0, 6, b'h', b'e', b'a', b'r', b't', b'h', 0, 0, //
            0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 5, //
            0, 0, 0, 0, 0, 0, 0, 0, // no verifier
        ];
        assert_eq!(w.as_slice(), expected);
        let mut r = Reader::new(expected);
        assert_eq!(Call::read(&mut r), Ok(Head::Call(call)));
        assert_eq!(r.end(), Ok(()));
    }

    #[test]
    fn answers_look_like_this() {
        let head = [0, 0, 0, 9, 0, 0, 0, 1];
        let accepted = [&head[..], &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]].concat();
        let how = |how: &[u8]| [&accepted[..], how].concat();
        assert_eq!(success(9).as_slice(), how(&[0, 0, 0, 0]));
        assert_eq!(no_program(9).as_slice(), how(&[0, 0, 0, 1]));
        assert_eq!(
            wrong_version(9, 3, 4).as_slice(),
            how(&[0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4])
        );
        assert_eq!(no_procedure(9).as_slice(), how(&[0, 0, 0, 3]));
        assert_eq!(garbage(9).as_slice(), how(&[0, 0, 0, 4]));
        assert_eq!(system_error(9).as_slice(), how(&[0, 0, 0, 5]));
        let denied = [&head[..], &[0, 0, 0, 1]].concat();
        assert_eq!(
            wrong_rpc_version(9).as_slice(),
            [&denied[..], &[0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 2]].concat()
        );
        assert_eq!(
            bad_credential(9).as_slice(),
            [&denied[..], &[0, 0, 0, 1, 0, 0, 0, 1]].concat()
        );
        assert_eq!(
            weak_credential(9).as_slice(),
            [&denied[..], &[0, 0, 0, 1, 0, 0, 0, 5]].concat()
        );
        for (answer, reads) in [
            (success(9), Answer::Success),
            (garbage(9), Answer::Failed(4)),
            (bad_credential(9), Answer::Denied),
        ] {
            assert_eq!(
                read_answer(&mut Reader::new(answer.as_slice())),
                Ok((9, reads))
            );
        }
    }

    fn header(credential: &[u8]) -> Vec<u8> {
        let mut w = Writer::new();
        w.u32(7).u32(CALL).u32(RPC_VERSION).u32(1).u32(1).u32(1);
        let mut bytes = w.into_vec();
        bytes.extend_from_slice(credential);
        bytes
    }

    #[test]
    fn credentials_are_bounded() {
        let mut sys = Writer::new();
        sys.u32(0).opaque(b"").u32(0).u32(0).u32(GROUPS_MAX + 1);
        for _ in 0..=GROUPS_MAX {
            sys.u32(1);
        }
        let mut w = Writer::new();
        w.u32(AUTH_SYS).opaque(sys.as_slice()).u32(0).u32(0);
        let many = header(w.as_slice());
        assert_eq!(
            Call::read(&mut Reader::new(&many)),
            Ok(Head::BadCredential(7))
        );
        let mut w = Writer::new();
        w.u32(AUTH_NONE).opaque(&[0; 401]).u32(0).u32(0);
        let long = header(w.as_slice());
        assert_eq!(
            Call::read(&mut Reader::new(&long)),
            Ok(Head::BadCredential(7))
        );
        let other = header(&[0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let Ok(Head::Call(call)) = Call::read(&mut Reader::new(&other)) else {
            panic!("a call");
        };
        assert_eq!(call.credential, Credential::Unknown(6));
    }

    proptest! {
        #[test]
        fn no_bytes_upset_the_reader(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Call::read(&mut Reader::new(&bytes));
            let _ = read_answer(&mut Reader::new(&bytes));
            let _ = Call::read(&mut Reader::new(&header(&bytes)));
            let _ = machine(&bytes);
            let _ = machine(&header(&bytes));
        }

        #[test]
        fn calls_survive(xid: u32, uid: u32, gid: u32, groups in proptest::collection::vec(any::<u32>(), 0..17)) {
            let call = Call { xid, program: 1, version: 2, procedure: 3,
                credential: Credential::Sys { uid, gid, groups } };
            let mut w = Writer::new();
            call.write(&mut w);
            prop_assert_eq!(machine(w.as_slice()), b"hearth");
            prop_assert_eq!(Call::read(&mut Reader::new(w.as_slice())), Ok(Head::Call(call)));
        }
    }
}
