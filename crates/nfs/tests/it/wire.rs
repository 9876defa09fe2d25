//! The records of NFS version 3 as bytes: some written out by hand after RFC 1813, all of them there
//! and back, and millions of damaged ones.

use hearth_nfs::v3::{
    Args, Attributes, Before, Create, How, Kind, Named, Procedure, SetAttributes, SetTime,
    Stability, Status, Time, Wcc, put_attributes, put_wcc, refusal,
};
use hearth_nfs::xdr::{Reader, Writer};
use proptest::prelude::*;

fn written(args: &Args<'_>) -> Vec<u8> {
    let mut w = Writer::new();
    args.write(&mut w);
    w.into_vec()
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_be_bytes()).collect()
}

/// ESXi's lock files: a guarded CREATE of `.lck-1` with mode 0644.
#[test]
fn a_guarded_create_looks_like_this() {
    let set = SetAttributes {
        mode: Some(0o644),
        modified: SetTime::Now,
        ..SetAttributes::default()
    };
    let at = Named {
        dir: &[1, 2, 3, 4, 5],
        name: b".lck-1",
    };
    let bytes = written(&Args::Create {
        at,
        what: Create::File(How::Guarded(set)),
    });
    let expected = [
        &words(&[5])[..],
        &[1, 2, 3, 4, 5, 0, 0, 0],
        &words(&[6]),
        b".lck-1\0\0",
        // guarded; mode, no owner, no group, no size, no atime, mtime by the server's clock
        &words(&[1, 1, 0o644, 0, 0, 0, 0, 1]),
    ]
    .concat();
    assert_eq!(bytes, expected);
}

#[test]
fn a_durable_write_looks_like_this() {
    let bytes = written(&Args::Write {
        file: &[9; 4],
        offset: 1 << 41,
        count: 3,
        stable: Stability::File,
        data: b"abc",
    });
    let expected = [
        &words(&[4])[..],
        &[9; 4],
        &words(&[512, 0, 3, 2, 3]),
        b"abc\0",
    ]
    .concat();
    assert_eq!(bytes, expected);
}

fn attributes() -> Attributes {
    let time = |n| Time {
        seconds: n,
        nanos: n + 1,
    };
    Attributes {
        kind: Kind::Regular,
        mode: 0o600,
        links: 2,
        uid: 3,
        gid: 4,
        size: (5 << 32) | 6,
        used: 7,
        device: (8, 9),
        tree: 10,
        id: 11,
        accessed: time(12),
        modified: time(14),
        changed: time(16),
    }
}

#[test]
fn attributes_look_like_this() {
    let mut w = Writer::new();
    put_attributes(&mut w, &attributes());
    let all = [
        1, 0o600, 2, 3, 4, 5, 6, 0, 7, 8, 9, 0, 10, 0, 11, 12, 13, 14, 15, 16, 17,
    ];
    assert_eq!(w.as_slice(), words(&all));
    let mut w = Writer::new();
    let before = Before {
        size: 1,
        modified: Time {
            seconds: 2,
            nanos: 3,
        },
        changed: Time::default(),
    };
    put_wcc(
        &mut w,
        &Wcc {
            before: Some(before),
            after: None,
        },
    );
    assert_eq!(w.as_slice(), words(&[1, 0, 1, 2, 3, 0, 0, 0]));
}

/// How many optional records follow the status of a call that failed, after RFC 1813.
#[test]
fn refusals_have_the_shape_of_their_procedure() {
    let absent = [
        (Procedure::GetAttr, 0),
        (Procedure::SetAttr, 2),
        (Procedure::Lookup, 1),
        (Procedure::Access, 1),
        (Procedure::ReadLink, 1),
        (Procedure::Read, 1),
        (Procedure::Write, 2),
        (Procedure::Create, 2),
        (Procedure::MkDir, 2),
        (Procedure::SymLink, 2),
        (Procedure::MkNod, 2),
        (Procedure::Remove, 2),
        (Procedure::RmDir, 2),
        (Procedure::Rename, 4),
        (Procedure::Link, 3),
        (Procedure::ReadDir, 1),
        (Procedure::ReadDirPlus, 1),
        (Procedure::FsStat, 1),
        (Procedure::FsInfo, 1),
        (Procedure::PathConf, 1),
        (Procedure::Commit, 2),
    ];
    for (procedure, absent) in absent {
        let answer = refusal(1, procedure, Status::JukeBox);
        let mut expected = vec![1, 1, 0, 0, 0, 0, 10008];
        expected.resize(7 + absent, 0);
        assert_eq!(answer.as_slice(), words(&expected), "{procedure:?}");
    }
}

fn set_time() -> impl Strategy<Value = SetTime> {
    prop_oneof![
        Just(SetTime::Keep),
        Just(SetTime::Now),
        any::<(u32, u32)>().prop_map(|(seconds, nanos)| SetTime::To(Time { seconds, nanos })),
    ]
}

prop_compose! {
    fn set()(
        mode in proptest::option::of(0u32..0o10000), uid: Option<u32>, gid: Option<u32>, size: Option<u64>,
        accessed in set_time(), modified in set_time(),
    ) -> SetAttributes {
        SetAttributes { mode, uid, gid, size, accessed, modified }
    }
}

/// One call to each procedure, with parts of any content.
fn calls<'a>(
    a: &'a [u8],
    b: &'a [u8],
    name: &'a [u8],
    data: &'a [u8],
    set: SetAttributes,
    n: u64,
    m: u32,
) -> Vec<Args<'a>> {
    let at = Named { dir: a, name };
    let create = |what| Args::Create { at, what };
    vec![
        Args::Null,
        Args::GetAttr { file: a },
        Args::SetAttr {
            file: a,
            set,
            only_if: Some(Time {
                seconds: m,
                nanos: m,
            }),
        },
        Args::SetAttr {
            file: a,
            set,
            only_if: None,
        },
        Args::Lookup(at),
        Args::Access { file: a, asked: m },
        Args::ReadLink { link: a },
        Args::Read {
            file: a,
            offset: n,
            count: m,
        },
        Args::Write {
            file: a,
            offset: n,
            count: m,
            stable: Stability::Unstable,
            data,
        },
        Args::Write {
            file: a,
            offset: n,
            count: m,
            stable: Stability::Data,
            data,
        },
        create(Create::File(How::Unchecked(set))),
        create(Create::File(How::Guarded(set))),
        create(Create::File(How::Exclusive(n.to_be_bytes()))),
        create(Create::Directory(set)),
        create(Create::Link { to: data, set }),
        create(Create::Device {
            block: m % 2 == 0,
            device: (m, 7),
            set,
        }),
        create(Create::Socket(set)),
        create(Create::Fifo(set)),
        create(Create::Other),
        Args::Remove(at),
        Args::RmDir(at),
        Args::Rename {
            from: at,
            to: Named { dir: b, name },
        },
        Args::Link { file: b, at },
        Args::ReadDir {
            dir: a,
            cookie: n,
            verifier: n.to_be_bytes(),
            bytes: m,
        },
        Args::ReadDirPlus {
            dir: a,
            cookie: n,
            verifier: n.to_be_bytes(),
            names: m,
            bytes: m,
        },
        Args::FsStat { root: a },
        Args::FsInfo { root: a },
        Args::PathConf { file: a },
        Args::Commit {
            file: a,
            offset: n,
            count: m,
        },
    ]
}

fn bytes(max: usize) -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(any::<u8>(), 0..max)
}

proptest! {
    #[test]
    fn every_call_survives(
        a in bytes(65), b in bytes(65), name in bytes(300), data in bytes(4000), set in set(), n: u64, m: u32,
    ) {
        let calls = calls(&a, &b, &name, &data, set, n, m);
        let mut seen: Vec<Procedure> = calls.iter().map(Args::procedure).collect();
        seen.dedup();
        prop_assert_eq!(&seen[..], &Procedure::ALL[..]);
        for call in calls {
            let bytes = written(&call);
            let mut r = Reader::new(&bytes);
            prop_assert_eq!(Args::read(call.procedure(), &mut r), Ok(call));
            prop_assert_eq!(r.end(), Ok(()));
        }
    }
}

/// A generator that needs no state worth keeping: a failure names its round.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % below as u64) as usize
    }
}

/// Well-formed calls with some bytes changed, cut or swapped: whatever is understood of them is what
/// writing it again gives, but for the padding.
#[test]
fn damaged_calls_are_refused_or_mean_what_they_say() {
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15);
    let base = calls(
        &[1; 40],
        &[2; 56],
        b"name",
        &[3; 90],
        SetAttributes::default(),
        1 << 33,
        4096,
    );
    let base: Vec<(Procedure, Vec<u8>)> =
        base.iter().map(|c| (c.procedure(), written(c))).collect();
    let mut understood = 0u32;
    for round in 0..2_000_000 {
        let (procedure, bytes) = &base[dice.roll(base.len())];
        let mut bytes = bytes.clone();
        for _ in 0..=dice.roll(3) {
            match dice.roll(4) {
                0 => bytes.truncate(dice.roll(bytes.len() + 1)),
                1 => bytes.extend_from_slice(&[0xff; 4][..dice.roll(5)]),
                _ if bytes.is_empty() => {}
                2 => {
                    let at = dice.roll(bytes.len());
                    bytes[at] = dice.roll(256) as u8;
                }
                _ => {
                    let at = dice.roll(bytes.len()) & !3;
                    let word = [0, 1, 64, 255, 4096, u32::MAX][dice.roll(6)].to_be_bytes();
                    let end = bytes.len().min(at + 4);
                    bytes[at..end].copy_from_slice(&word[..end - at]);
                }
            }
        }
        // Sometimes it is taken for another procedure's.
        let procedure = if dice.roll(8) == 0 {
            Procedure::ALL[dice.roll(22)]
        } else {
            *procedure
        };
        let mut r = Reader::new(&bytes);
        if let Ok(args) = Args::read(procedure, &mut r) {
            understood += 1;
            assert_eq!(args.procedure(), procedure, "round {round}");
            let again = written(&args);
            let back = Args::read(procedure, &mut Reader::new(&again));
            assert_eq!(back, Ok(args), "round {round}");
            assert_eq!(again.len(), bytes.len() - r.rest().len(), "round {round}");
        }
    }
    assert!(
        understood > 100_000,
        "only {understood} were understood: the damage is too great"
    );
}
