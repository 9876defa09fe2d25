//! The user at the other end of a TCP connection.
//!
//! All programs of this host share one address. Without their users, one account could use up everybody's share of
//! connections or wrong passwords.

use std::fs;
use std::net::{IpAddr, SocketAddr};

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

/// The account whose socket is `peer`, as the kernel lists it (proc(5), `/proc/net/tcp`). Only of an established connection:
/// one that its program closed belongs to nobody and is listed as root's.
fn uid(own: SocketAddr, peer: SocketAddr) -> Option<u32> {
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
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn connection_of_this_host_has_its_user() {
        for on in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(on) else {
                eprintln!("skipped: no {on}");
                continue;
            };
            let own = listener.local_addr().unwrap();
            let client = TcpStream::connect(own).unwrap();
            let (_served, peer) = listener.accept().unwrap();
            // SAFETY: no arguments, and it cannot fail.
            let uid = unsafe { libc::getuid() };
            assert_eq!(user(own, peer), User::Uid(uid));
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
