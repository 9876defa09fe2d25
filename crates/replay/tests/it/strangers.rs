//! NBD servers that are none, or mean no good: an error in a sentence, never a wedge or a panic.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use hearth_io::{Buf, now_ns};
use hearth_replay::{Job, Kind, NbdTarget, ReplayError, Target};

const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;

fn greeting() -> Vec<u8> {
    let mut bytes = b"NBDMAGICIHAVEOPT".to_vec();
    bytes.extend(3u16.to_be_bytes());
    bytes
}

fn option_reply(kind: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION_REPLY.to_be_bytes().to_vec();
    bytes.extend(7u32.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend((payload.len() as u32).to_be_bytes());
    bytes.extend(payload);
    bytes
}

fn export(size: u64) -> Vec<u8> {
    let mut info = 0u16.to_be_bytes().to_vec();
    info.extend(size.to_be_bytes());
    info.extend(1u16.to_be_bytes());
    [option_reply(3, &info), option_reply(1, &[])].concat()
}

/// Connects to a server that says these bytes, whatever it is told, and then does `then`.
fn against(
    said: Vec<u8>,
    then: impl FnOnce(UnixStream) + Send + 'static,
) -> Result<NbdTarget, ReplayError> {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let listener = UnixListener::bind(&socket).unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.write_all(&said);
        then(stream);
    });
    let uri = format!("nbd+unix:///x?socket={}", socket.display());
    let target = NbdTarget::connect(&uri);
    // A thread that waits for more requests ends with the connection, later.
    drop(server);
    target
}

#[test]
fn who_does_not_speak_nbd_is_refused() {
    for said in [
        b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
        b"NBDMAGIC\0\0\x42\x02\x81\x86\x12\x53\0\0".to_vec(),
        [greeting(), vec![0; 64]].concat(),
        // An option reply of 4 GiB.
        [
            greeting(),
            option_reply(3, &[])[..16].to_vec(),
            vec![0xFF; 4],
        ]
        .concat(),
        [greeting(), option_reply(0x8000_0006, b"no such export")].concat(),
        // Block sizes that make no sense.
        [
            greeting(),
            option_reply(3, &[0, 3, 0, 0, 0, 3, 0, 0, 0, 9, 0, 0, 0, 1]),
            export(4096),
        ]
        .concat(),
        // Replies without end.
        [greeting(), option_reply(3, &[0, 9]).repeat(1000)].concat(),
        greeting(),
    ] {
        let target = against(said, |_| {});
        let error = target.err().expect("must be refused").to_string();
        assert!(error.starts_with("cannot use nbd+unix:"), "{error}");
    }
}

#[test]
fn an_answer_nobody_asked_for_ends_it() {
    let said = [greeting(), export(1 << 20)].concat();
    let mut target = against(said, |mut stream| {
        let mut sent = [0; 4096];
        let _ = stream.read(&mut sent);
        let mut answer = 0x6744_6698u32.to_be_bytes().to_vec();
        answer.extend([0; 4]);
        answer.extend(99u64.to_be_bytes());
        let _ = stream.write_all(&answer);
        let _ = stream.read(&mut sent);
    })
    .unwrap();
    assert_eq!((target.size(), target.align()), (1 << 20, 1));
    let job = Job {
        id: 1,
        kind: Kind::Read,
        offset: 0,
        len: 4096,
        buf: Some(Buf::zeroed(4096).all()),
    };
    target.submit(job).unwrap();
    let mut done = Vec::new();
    let error = loop {
        match target.wait(now_ns() + 1_000_000_000, &mut done) {
            Ok(()) => assert!(done.is_empty()),
            Err(e) => break e,
        }
    };
    assert!(error.to_string().contains("nobody sent"), "{error}");
}

#[test]
fn a_server_that_goes_away_is_told() {
    let said = [greeting(), export(1 << 20)].concat();
    let mut target = against(said, |mut stream| {
        // What was not read would reset the connection, and the export with it.
        let mut sent = [0; 4096];
        let _ = stream.read(&mut sent);
    })
    .unwrap();
    let mut done = Vec::new();
    let error = loop {
        if let Err(e) = target.wait(now_ns() + 1_000_000_000, &mut done) {
            break e;
        }
    };
    assert!(matches!(error, ReplayError::Broken { .. }), "{error}");
}
