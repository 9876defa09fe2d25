//! Servers that do not keep to the protocol: the connection ends with a reason, the request is
//! asked again, and no byte that was not sent for it reaches a guest.

use crate::common::{LIMIT, Rig, Server, lock, until};
use hearth_nbd_wire::{SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC};
use std::io::Write;
use std::os::unix::net::UnixListener;

fn chunk(flags: u16, kind: u16, payload: &[u8]) -> Vec<u8> {
    let mut raw = STRUCTURED_REPLY_MAGIC.to_be_bytes().to_vec();
    raw.extend(flags.to_be_bytes());
    raw.extend(kind.to_be_bytes());
    raw.extend(b"CCCCCCCC");
    raw.extend((payload.len() as u32).to_be_bytes());
    raw.extend(payload);
    raw
}

fn data(offset: u64, len: usize) -> Vec<u8> {
    let mut payload = offset.to_be_bytes().to_vec();
    payload.extend(vec![0xAA; len]);
    payload
}

fn simple(error: u32, cookie: &[u8; 8]) -> Vec<u8> {
    let mut raw = SIMPLE_REPLY_MAGIC.to_be_bytes().to_vec();
    raw.extend(error.to_be_bytes());
    raw.extend(cookie);
    raw
}

#[test]
fn lies_end_the_connection_and_nothing_else() {
    let twice = [chunk(0, 1, &data(0, 4096)), chunk(1, 1, &data(0, 4096))].concat();
    let huge_hole = [0u64.to_be_bytes().as_slice(), &u32::MAX.to_be_bytes()].concat();
    let lies: Vec<(&str, Vec<u8>)> = vec![
        ("begins with", b"garbage and more garbage".to_vec()),
        ("not in flight", simple(0, b"whowhowh")),
        ("without chunks", simple(0, b"CCCCCCCC")),
        ("outside", chunk(1, 1, &data(4096, 4096))),
        ("outside", chunk(1, 1, &data(u64::MAX, 16))),
        ("less than", chunk(1, 1, &data(0, 512))),
        ("less than", chunk(1, 0, &[])),
        ("twice", twice),
        ("cannot have", chunk(1, 1, &data(0, 8192))),
        ("cannot have", chunk(1, 7, &[0; 16])),
        ("cannot have", chunk(1, 0x8001, &[0; 5])),
        ("outside", chunk(1, 2, &huge_hole)),
        ("shutting down", chunk(1, 0x8001, &[0, 0, 0, 108, 0, 0])),
    ];
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path());
    let truth: Vec<u8> = (0..4096u32).map(|i| i as u8).collect();
    lock(&server.state).now[..4096].copy_from_slice(&truth);
    let mut rig = Rig::new(server.open(LIMIT));
    for (i, (why, lie)) in lies.into_iter().enumerate() {
        *lock(&server.lie) = Some(lie);
        assert!(rig.read(0, 4096) == (Ok(()), truth.clone()), "{why}");
        until("it is connected again", || rig.link().connected);
        let link = rig.link();
        assert_eq!(link.reconnects, i as u64 + 1, "{why}");
        assert!(link.reason.unwrap().what.contains(why), "{why}");
    }
}

/// What stands before the lie, in the same packet, was answered: nobody would ask for it again.
#[test]
fn an_answer_before_a_lie_counts() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path());
    let mut rig = Rig::new(server.open(LIMIT));
    *lock(&server.lie) = Some([chunk(1, 1, &data(0, 4096)), b"garbage".to_vec()].concat());
    assert!(rig.read(0, 4096) == (Ok(()), vec![0xAA; 4096]));
    until("it is connected again", || {
        rig.link().connected && rig.link().reconnects == 1
    });
}

#[test]
fn errors_and_holes_are_no_lies() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path());
    let mut rig = Rig::new(server.open(LIMIT));
    let text = [5u32.to_be_bytes().as_slice(), &4u16.to_be_bytes(), b"oops"].concat();
    *lock(&server.lie) = Some(chunk(1, 0x8001, &text));
    assert_eq!(rig.read(0, 4096).0, Err(hearth_io::IoError::Os(libc::EIO)));
    let hole = [2048u64.to_be_bytes().as_slice(), &2048u32.to_be_bytes()].concat();
    *lock(&server.lie) = Some(
        [
            chunk(0, 2, &hole),
            chunk(0, 1, &data(0, 2048)),
            chunk(1, 0, &[]),
        ]
        .concat(),
    );
    let (result, got) = rig.read(0, 4096);
    assert_eq!(result, Ok(()));
    assert!(got == [vec![0xAA; 2048], vec![0; 2048]].concat());
    assert_eq!(rig.link().reconnects, 0);
}

/// What listens there speaks something else, or hangs up.
#[test]
fn what_is_no_server_is_refused() {
    for (greeting, want) in [
        (&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], "no NBD server"),
        (&b""[..], "closed the connection"),
        (
            &b"NBDMAGIC\0\0\x42\x02\x81\x86\x12\x53"[..],
            "closed the connection",
        ),
        (
            &b"NBDMAGIC\0\0\x42\x02\x81\x86\x12\x53\0\0"[..],
            "no NBD server",
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let thread = std::thread::spawn(move || {
            if let Ok((mut stream, _)) = listener.accept() {
                let _ = stream.write_all(greeting);
            }
        });
        let uri =
            hearth_nbd_client::Uri::parse("nbd+unix", &format!("///x?socket={}", path.display()))
                .unwrap();
        let options = hearth_nbd_client::Options {
            export: "x".into(),
            read_only: false,
            timeout: LIMIT,
            errors_are_losses: false,
            shutdown_is_fencing: false,
            in_flight_max: usize::MAX,
        };
        let error = hearth_nbd_client::NbdOrigin::open(std::sync::Arc::new(uri), options)
            .unwrap_err()
            .to_string();
        assert!(error.contains(want), "{error}");
        thread.join().unwrap();
    }
}
