//! The user at the other end of a TCP connection, and listeners that one user cannot fill.
//!
//! All programs of this host share one address. Without their users, one account could use up everybody's share of
//! connections or wrong passwords.

use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// Connections that wait to be taken. Beyond that the kernel drops them, and a client tries again after a second or more.
const BACKLOG: i32 = 4096;

/// Listens with a longer queue than the standard library asks for: a flood of connections by one program must not have
/// those of others dropped.
pub fn listen(at: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(at)?;
    // SAFETY: an open descriptor; listen(2) on a listening socket changes the length of its queue.
    if unsafe { libc::listen(listener.as_raw_fd(), BACKLOG) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(listener)
}

/// A user, for limits per user.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum User {
    /// An account of this host.
    Uid(u32),
    /// Another host, or a program of this host whose user is not known.
    Address(IpAddr),
}

/// The user of a connection between `own` and `peer`, as the socket names them.
pub fn user(own: SocketAddr, peer: SocketAddr) -> User {
    let is_here = peer.ip().is_loopback() || peer.ip() == own.ip();
    match is_here.then(|| uid(own, peer)).flatten() {
        Some(uid) => User::Uid(uid),
        // All of 127.0.0.0/8 is one host.
        None if peer.ip().is_loopback() => User::Address(IpAddr::from([127, 0, 0, 1])),
        None => User::Address(network(peer.ip())),
    }
}

/// The owner of one IPv6 address owns its /64 network.
pub fn network(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V6(v6) => match v6.to_ipv4_mapped() {
            Some(v4) => IpAddr::V4(v4),
            None => IpAddr::V6((u128::from(v6) & !u128::from(u64::MAX)).into()),
        },
        v4 => v4,
    }
}

/// The account whose socket is `peer`. Only of an established connection: one that its program closed belongs to nobody
/// and is listed as root's.
///
/// A listener asks for each connection. The kernel's answer about one socket costs the same however many there are; its
/// table is read where it does not answer such questions.
fn uid(own: SocketAddr, peer: SocketAddr) -> Option<u32> {
    /// The kernel has answered before, so "no such socket" is an answer as well.
    static ANSWERS: AtomicBool = AtomicBool::new(false);
    match asked(own, peer) {
        Some(uid) => {
            ANSWERS.store(true, Ordering::Relaxed);
            Some(uid)
        }
        None if ANSWERS.load(Ordering::Relaxed) => None,
        None => listed(own, peer),
    }
}

/// What the kernel says about one socket (sock_diag(7), `inet_diag_req_v2`).
fn asked(own: SocketAddr, peer: SocketAddr) -> Option<u32> {
    const HEADER: usize = 16;
    const ESTABLISHED: u8 = 1;
    /// Of <linux/sock_diag.h>.
    const BY_FAMILY: u16 = 20;
    let family = match peer {
        SocketAddr::V4(_) => libc::AF_INET,
        SocketAddr::V6(_) => libc::AF_INET6,
    };
    let mut request = Vec::with_capacity(72);
    // Its length, the kind of message, "a request", a number and no port.
    request.extend(72u32.to_ne_bytes());
    request.extend(BY_FAMILY.to_ne_bytes());
    request.extend((libc::NLM_F_REQUEST as u16).to_ne_bytes());
    request.extend([0; 8]);
    request.extend([family as u8, libc::IPPROTO_TCP as u8, 0, 0]);
    request.extend((1u32 << ESTABLISHED).to_ne_bytes());
    for address in [peer, own] {
        request.extend(address.port().to_be_bytes());
    }
    for address in [peer, own] {
        let mut octets = match address.ip() {
            IpAddr::V4(v4) => v4.octets().to_vec(),
            IpAddr::V6(v6) => v6.octets().to_vec(),
        };
        octets.resize(16, 0);
        request.extend(octets);
    }
    // Any interface, any cookie.
    request.extend(0u32.to_ne_bytes());
    request.extend([0xFF; 8]);
    let answer = exchange(&request)?;
    let word = |at: usize| Some(u32::from_ne_bytes(answer.get(at..at + 4)?.try_into().ok()?));
    let kind = u16::from_ne_bytes(answer.get(4..6)?.try_into().ok()?);
    let is_it = kind == BY_FAMILY && answer.get(HEADER + 1) == Some(&ESTABLISHED);
    // Behind the state, the names of both ends and three counters.
    is_it.then(|| word(HEADER + 4 + 48 + 12)).flatten()
}

/// Sends a request to the kernel and takes its answer, which is there when the request is sent.
fn exchange(request: &[u8]) -> Option<Vec<u8>> {
    // SAFETY: no pointers are passed.
    let raw = unsafe {
        libc::socket(
            libc::AF_NETLINK,
            libc::SOCK_DGRAM | libc::SOCK_CLOEXEC,
            libc::NETLINK_SOCK_DIAG,
        )
    };
    if raw < 0 {
        return None;
    }
    // SAFETY: a descriptor that was just opened and belongs to nothing else.
    let socket = unsafe { OwnedFd::from_raw_fd(raw) };
    let mut answer = vec![0; 1024];
    // SAFETY: a buffer of this length that outlives the call.
    let sent = unsafe {
        libc::send(
            socket.as_raw_fd(),
            request.as_ptr().cast(),
            request.len(),
            0,
        )
    };
    if sent != request.len() as isize {
        return None;
    }
    let (to, room) = (answer.as_mut_ptr().cast(), answer.len());
    // SAFETY: as above; the kernel writes no more than the length.
    let got = unsafe { libc::recv(socket.as_raw_fd(), to, room, libc::MSG_DONTWAIT) };
    answer.truncate(usize::try_from(got).ok()?);
    Some(answer)
}

/// The same from the list of all sockets (proc(5), `/proc/net/tcp`).
fn listed(own: SocketAddr, peer: SocketAddr) -> Option<u32> {
    let table = match peer {
        SocketAddr::V4(_) => "/proc/net/tcp",
        SocketAddr::V6(_) => "/proc/net/tcp6",
    };
    let (peer, own) = (in_hex(peer), in_hex(own));
    let text = fs::read_to_string(table).ok()?;
    text.lines().find_map(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let found = fields.next()? == peer && fields.next()? == own && fields.next()? == "01";
        found.then(|| fields.nth(3)?.parse().ok()).flatten()
    })
}

/// An address as the kernel's tables have it: words in the byte order of the host.
fn in_hex(address: SocketAddr) -> String {
    let octets = match address.ip() {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    let words = octets.chunks_exact(4).map(|word| {
        let word = u32::from_ne_bytes([word[0], word[1], word[2], word[3]]);
        format!("{word:08X}")
    });
    format!("{}:{:04X}", words.collect::<String>(), address.port())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;

    #[test]
    fn connection_of_this_host_has_its_user() {
        for on in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = listen(on.parse().unwrap()) else {
                eprintln!("skipped: no {on}");
                continue;
            };
            let own = listener.local_addr().unwrap();
            let client = TcpStream::connect(own).unwrap();
            let (_served, peer) = listener.accept().unwrap();
            // SAFETY: no arguments, and it cannot fail.
            let uid = unsafe { libc::getuid() };
            assert_eq!(user(own, peer), User::Uid(uid));
            assert_eq!(listed(own, peer), Some(uid));
            // The kernel may lack it.
            assert!(asked(own, peer).is_none_or(|asked| asked == uid));
            drop(client);
            assert!(matches!(user(own, peer), User::Address(_)));
        }
    }

    #[test]
    fn hosts_and_networks_are_users() {
        let own = "192.0.2.1:1".parse().unwrap();
        let from = |text: &str| user(own, text.parse().unwrap());
        assert_eq!(from("127.0.0.9:5"), from("127.0.0.1:6"));
        assert_eq!(from("192.0.2.7:5"), from("192.0.2.7:6"));
        assert_ne!(from("192.0.2.7:5"), from("192.0.2.8:5"));
        assert_eq!(from("[2001:db8::1]:5"), from("[2001:db8::ffff:1]:6"));
    }
}
