//! Clients that lie, stall or die, next to one that wants its data.

use crate::common::*;
use crate::socket::{Running, serve};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(30);

/// A client in the transmission phase of simple replies.
fn connect(server: &Running) -> UnixStream {
    let mut stream = UnixStream::connect(&server.socket).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
        .write_all(&[&3u32.to_be_bytes()[..], &option_bytes(1, b"vm1")].concat())
        .unwrap();
    stream.read_exact(&mut [0; 18 + 10]).unwrap();
    stream
}

fn read(stream: &mut UnixStream, offset: u64, len: usize) -> Vec<u8> {
    stream
        .write_all(&Req::new(0, offset, len as u64).bytes(Style::Simple))
        .unwrap();
    let mut reply = vec![0; 16 + len];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(reply[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0]);
    reply.split_off(16)
}

#[test]
fn bad_company_hurts_nobody() {
    let disk = Disk::new(3, "vm1", 4 << 20);
    let server = serve(vec![disk.clone()], None);
    let mut good = connect(&server);
    let mut bad = Vec::new();
    for i in 0..60u8 {
        let mut stream = if i % 2 == 0 {
            UnixStream::connect(&server.socket).unwrap()
        } else {
            connect(&server)
        };
        let sent = match i % 12 {
            // Nothing, and half a greeting.
            0 => stream.write_all(&[]),
            2 => stream.write_all(&[0, 0]),
            // An option longer than any, and one that never comes whole.
            4 => stream.write_all(
                &[
                    &3u32.to_be_bytes()[..],
                    b"IHAVEOPT\0\0\0\x03\xff\xff\xff\xff",
                ]
                .concat(),
            ),
            6 => stream
                .write_all(&[&3u32.to_be_bytes()[..], b"IHAVEOPT\0\0\0\x03\0\0\xff\xff"].concat()),
            8 | 10 => stream.write_all(&[i; 5000]),
            // Garbage in place of a request.
            1 => stream.write_all(&[i; 5000]),
            // Payloads that stop half-way, a short and a long one.
            3 => stream.write_all(&Req::write(0, vec![1; 4096]).bytes(Style::Simple)[..1000]),
            5 => stream.write_all(&Req::write(0, vec![1; 1 << 20]).bytes(Style::Simple)[..100_000]),
            // Requests without end, and nobody to read the answers.
            7 => {
                stream.set_nonblocking(true).unwrap();
                let many = Req::new(0, 0, 1 << 20).bytes(Style::Simple).repeat(10_000);
                stream.write(&many).map(|_| ())
            }
            // Death in the middle of an answer.
            9 => {
                let many = Req::new(0, 0, 1 << 20).bytes(Style::Simple).repeat(20);
                let sent = stream.write_all(&many);
                let _ = stream.shutdown(std::net::Shutdown::Both);
                sent
            }
            _ => stream.write_all(&Req::new(2, 0, 0).bytes(Style::Simple)),
        };
        // The server may have cut it off already; that is its good right.
        let _ = sent;
        bad.push(stream);
        let want = disk.data.lock().unwrap()[usize::from(i)..usize::from(i) + 70_000].to_vec();
        assert!(read(&mut good, u64::from(i), 70_000) == want);
    }
    drop(bad);
    // All of them are forgotten, and the good one is not.
    let start = Instant::now();
    while disk.clients.load(Ordering::Relaxed) > 1 {
        assert!(
            start.elapsed() < LIMIT,
            "{} clients are left",
            disk.clients.load(Ordering::Relaxed)
        );
        read(&mut good, 0, 4096);
    }
    assert_eq!(read(&mut good, 0, 10), disk.data.lock().unwrap()[..10]);
}

#[test]
fn clients_of_an_export_that_is_gone_are_let_go() {
    let (disk, other) = (Disk::new(3, "vm1", 4 << 20), Disk::new(4, "vm2", 4 << 20));
    let server = serve(vec![disk.clone(), other], None);
    let (mut idle, mut half) = (connect(&server), connect(&server));
    let mut bystander = UnixStream::connect(&server.socket).unwrap();
    bystander.set_read_timeout(Some(LIMIT)).unwrap();
    bystander
        .write_all(&[&3u32.to_be_bytes()[..], &option_bytes(1, b"vm2")].concat())
        .unwrap();
    bystander.read_exact(&mut [0; 18 + 10]).unwrap();
    read(&mut idle, 0, 512);
    read(&mut half, 0, 512);
    half.write_all(&Req::write(0, vec![1; 1 << 20]).bytes(Style::Simple)[..100_000])
        .unwrap();
    // One that is only being taken away refuses, and may come back.
    disk.closing.store(true, Ordering::Relaxed);
    server.reactors.look();
    idle.write_all(&Req::new(0, 0, 512).bytes(Style::Simple))
        .unwrap();
    let mut reply = [0; 16];
    idle.read_exact(&mut reply).unwrap();
    assert_eq!(reply[4..8], 108u32.to_be_bytes());
    // One that is gone lets go of clients that ask for nothing.
    disk.gone.store(true, Ordering::Relaxed);
    server.reactors.look();
    for mut client in [idle, half] {
        // What was unread at the server makes it a reset.
        let end = client.read(&mut [0]);
        assert!(
            matches!(&end, Ok(0))
                || end.is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset)
        );
    }
    let start = Instant::now();
    while disk.clients.load(Ordering::Relaxed) > 0 {
        assert!(start.elapsed() < LIMIT, "a client is left");
        read(&mut bystander, 0, 512);
    }
}

#[test]
fn what_was_asked_before_goodbye_is_answered() {
    let disk = Disk::new(3, "vm1", 4 << 20);
    let server = serve(vec![disk.clone()], None);
    let mut stream = connect(&server);
    let write = Req::write(4096, vec![5; 8192]).bytes(Style::Simple);
    let bye = Req::new(2, 0, 0).bytes(Style::Simple);
    stream.write_all(&[write, bye].concat()).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    assert_eq!(answer.len(), 16);
    assert!(
        disk.data.lock().unwrap()[4096..12288]
            .iter()
            .all(|b| *b == 5)
    );
}
