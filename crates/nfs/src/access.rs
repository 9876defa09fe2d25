//! Who may come, what they may do, and whom they count as.
//!
//! NFS version 3 proves nothing about a caller: its address is all there is, and the user it names
//! is believed. So what may be done depends on addresses first; and user 0 is somebody without
//! rights unless the address is on a list, for else every machine that is let in would own every
//! file. ESXi needs to be root. An address of this host proves nothing about the account that calls
//! from it: only a privileged source port shows that it is not just any account.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::str::FromStr;

use hearth_fault::Fault;

use crate::rpc::Credential;

/// Who has no rights of his own.
pub const NOBODY: u32 = 65534;

/// Addresses that begin with the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    bits: u8,
}

/// This is no address or network.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.fault())]
pub struct NoNetwork(String);

impl NoNetwork {
    /// What is wrong, and what to do about it.
    pub fn fault(&self) -> Fault {
        Fault::new(
            format!("'{}' is no address and no network", self.0),
            "write 192.0.2.7 or 192.0.2.0/24",
        )
    }
}

impl Network {
    /// Every address that begins like this one. `None` if it has fewer bits.
    pub fn new(address: IpAddr, bits: u8) -> Option<Network> {
        let address = address.to_canonical();
        let width = if address.is_ipv4() { 32 } else { 128 };
        (bits <= width).then_some(Network { address, bits })
    }

    /// True if the address is one of them.
    pub fn contains(&self, address: IpAddr) -> bool {
        // An IPv4 client of a socket for both looks like ::ffff:192.0.2.7.
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(a), IpAddr::V4(b)) => {
                let differing = u32::from(a) ^ u32::from(b);
                differing.leading_zeros() >= u32::from(self.bits)
            }
            (IpAddr::V6(a), IpAddr::V6(b)) => {
                let differing = u128::from(a) ^ u128::from(b);
                differing.leading_zeros() >= u32::from(self.bits)
            }
            _ => false,
        }
    }
}

impl FromStr for Network {
    type Err = NoNetwork;

    fn from_str(text: &str) -> Result<Network, NoNetwork> {
        let wrong = || NoNetwork(text.to_owned());
        let (address, bits) = text
            .split_once('/')
            .map_or((text, None), |(a, b)| (a, Some(b)));
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let all = if address.to_canonical().is_ipv4() {
            32
        } else {
            128
        };
        let bits = bits.map_or(Ok(all), |bits| bits.parse().map_err(|_| wrong()))?;
        Network::new(address, bits).ok_or_else(wrong)
    }
}

/// What a client may do, and whom its users count as; the names are those of exports(5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights {
    /// Change files.
    pub write: bool,
    /// Be user 0 (`no_root_squash`).
    pub root: bool,
    /// All users count as the anonymous one.
    pub all_squash: bool,
    /// User and group of the anonymous user.
    pub anonymous: (u32, u32),
    /// Calls from this host's own addresses may come from any source port.
    pub insecure: bool,
}

impl Default for Rights {
    /// Only reads, and root counts as nobody.
    fn default() -> Rights {
        Rights {
            write: false,
            root: false,
            all_squash: false,
            anonymous: (NOBODY, NOBODY),
            insecure: false,
        }
    }
}

/// Ports below this one take rights to use, unless the host says otherwise.
const RESERVED: u16 = 1024;

/// The other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its address and port.
    pub from: SocketAddr,
    /// Any account of this host can call so: the address is this host's own and the port takes no rights.
    pub unprivileged: bool,
    /// The socket belongs to root of this host, who could use any port.
    pub is_root: bool,
}

impl Peer {
    /// Looks at the addresses and settings that the host has now. What cannot be found out counts as unprivileged.
    pub fn of(from: SocketAddr) -> Peer {
        let from = SocketAddr::new(from.ip().to_canonical(), from.port());
        Peer {
            from,
            unprivileged: from.port() >= unprivileged_from() && is_own(from.ip()),
            is_root: false,
        }
    }

    /// True if any account of this host could call so, as far as the rights of its address tell accounts apart: where root
    /// counts as root, its own sockets may have any port.
    pub fn is_anyone(&self, rights: Rights) -> bool {
        self.unprivileged && !rights.insecure && !(self.is_root && rights.root)
    }

    /// Its address.
    pub fn address(&self) -> IpAddr {
        self.from.ip()
    }
}

/// The first port that any account of this host can use.
fn unprivileged_from() -> u16 {
    let set = std::fs::read_to_string("/proc/sys/net/ipv4/ip_unprivileged_port_start");
    let set = set.ok().and_then(|text| text.trim().parse().ok());
    set.map_or(RESERVED, |first: u16| first.min(RESERVED))
}

/// True if an address is this host's own: then a socket can be bound to it.
pub(crate) fn is_own(address: IpAddr) -> bool {
    match UdpSocket::bind((address, 0)) {
        Ok(_) => true,
        Err(error) => error.kind() != ErrorKind::AddrNotAvailable,
    }
}

/// Clients and what they may do. Of several networks that hold an address the narrowest counts.
#[derive(Clone, Debug, Default)]
pub struct Access(Vec<(Network, Rights)>);

impl Access {
    /// Nobody yet.
    pub fn nobody() -> Access {
        Access::default()
    }

    /// Lets a network in, or changes what it may do.
    pub fn allow(mut self, network: Network, rights: Rights) -> Access {
        self.0.retain(|(n, _)| *n != network);
        self.0.push((network, rights));
        self
    }

    /// What a client of this address may do; `None` if it may not come.
    pub fn of(&self, address: IpAddr) -> Option<Rights> {
        let fits = self
            .0
            .iter()
            .filter(|(network, _)| network.contains(address));
        fits.max_by_key(|(network, _)| network.bits)
            .map(|(_, rights)| *rights)
    }

    /// The networks that are let in.
    pub fn networks(&self) -> impl Iterator<Item = &Network> {
        self.0.iter().map(|(network, _)| network)
    }
}

impl std::fmt::Display for Network {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.address, self.bits)
    }
}

/// On whose behalf something is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Who {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Further groups.
    pub groups: Vec<u32>,
}

/// What somebody wants to do with a file; bits as in a mode's lowest digit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
#[repr(u32)]
pub enum Want {
    Search = 1,
    Write = 2,
    Read = 4,
}

impl Who {
    /// Somebody for whom nobody asks for rights.
    pub fn root() -> Who {
        Who {
            uid: 0,
            gid: 0,
            groups: Vec::new(),
        }
    }

    /// Whom a caller counts as.
    pub fn of(credential: &Credential, rights: Rights) -> Who {
        let (anonuid, anongid) = rights.anonymous;
        let squash = |id: u32, anonymous| {
            if id == 0 && !rights.root {
                anonymous
            } else {
                id
            }
        };
        match credential {
            Credential::Sys { uid, gid, groups } if !rights.all_squash => Who {
                uid: squash(*uid, anonuid),
                gid: squash(*gid, anongid),
                groups: groups.iter().map(|g| squash(*g, anongid)).collect(),
            },
            _ => Who {
                uid: anonuid,
                gid: anongid,
                groups: Vec::new(),
            },
        }
    }

    /// May do everything.
    pub fn is_root(&self) -> bool {
        self.uid == 0
    }

    /// Is in a group.
    pub fn is_in(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }

    /// Whether a file's mode lets them do all of `want`. The owner's digit counts for the owner, even
    /// where others may do more. User 0 may everything, but search or run only what anybody could.
    pub fn may(&self, attributes: &crate::v3::Attributes, want: u32) -> bool {
        use crate::v3::Kind;
        let mode = attributes.mode;
        if self.is_root() {
            let search = want & Want::Search as u32 == 0
                || attributes.kind == Kind::Directory
                || mode & 0o111 != 0;
            return search;
        }
        let digit = if self.uid == attributes.uid {
            mode >> 6
        } else if self.is_in(attributes.gid) {
            mode >> 3
        } else {
            mode
        };
        digit & want == want
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(text: &str) -> Network {
        text.parse().expect("a network")
    }

    const RO: Rights = Rights {
        write: false,
        root: false,
        all_squash: false,
        anonymous: (NOBODY, NOBODY),
        insecure: false,
    };
    const RW: Rights = Rights {
        write: true,
        root: true,
        ..RO
    };

    #[test]
    fn the_narrowest_network_counts() {
        let access = Access::nobody()
            .allow(net("10.0.0.0/8"), RO)
            .allow(net("10.1.2.3"), RW);
        let of = |a: &str| access.of(a.parse().expect("an address"));
        assert_eq!(of("10.1.2.3"), Some(RW));
        assert_eq!(of("::ffff:10.1.2.3"), Some(RW));
        assert_eq!(of("10.1.2.4"), Some(RO));
        assert_eq!(of("11.0.0.1"), None);
        assert_eq!(of("::1"), None);
        assert_eq!(
            Access::nobody().of("127.0.0.1".parse().expect("an address")),
            None
        );
    }

    #[test]
    fn networks_are_read() {
        assert!(net("::/0").contains("2001:db8::1".parse().expect("an address")));
        assert!(net("0.0.0.0/0").contains("1.2.3.4".parse().expect("an address")));
        assert!(!net("192.0.2.0/25").contains("192.0.2.128".parse().expect("an address")));
        for wrong in ["", "host", "1.2.3.4/33", "1.2.3.4/x", "::1/129", "1.2.3/8"] {
            assert_eq!(wrong.parse::<Network>(), Err(NoNetwork(wrong.to_owned())));
        }
    }

    #[test]
    fn root_is_squashed_in_every_place() {
        let root = Credential::Sys {
            uid: 0,
            gid: 0,
            groups: vec![0, 5],
        };
        let squashed = Who {
            uid: NOBODY,
            gid: NOBODY,
            groups: vec![NOBODY, 5],
        };
        assert_eq!(Who::of(&root, RO), squashed);
        assert_eq!(
            Who::of(&root, RW),
            Who {
                uid: 0,
                gid: 0,
                groups: vec![0, 5]
            }
        );
        let nobody = Who {
            uid: NOBODY,
            gid: NOBODY,
            groups: vec![],
        };
        assert_eq!(Who::of(&Credential::None, RW), nobody);
        assert_eq!(Who::of(&Credential::Unknown(6), RW), nobody);
    }

    #[test]
    fn squashed_users_are_the_anonymous_one() {
        let claims = |uid, gid, groups: &[u32]| Credential::Sys {
            uid,
            gid,
            groups: groups.to_vec(),
        };
        let who = |uid, gid, groups: &[u32]| Who {
            uid,
            gid,
            groups: groups.to_vec(),
        };
        let anonymous = (1000, 1001);
        let some = Rights { anonymous, ..RO };
        let all = Rights {
            all_squash: true,
            ..some
        };
        let disk = claims(64055, 6, &[0, 6]);
        assert_eq!(Who::of(&disk, some), who(64055, 6, &[1001, 6]));
        assert_eq!(Who::of(&claims(0, 0, &[]), some), who(1000, 1001, &[]));
        let every = [disk, claims(0, 0, &[]), Credential::None];
        // All are squashed also where root is not.
        for rights in [all, Rights { root: true, ..all }] {
            for credential in &every {
                assert_eq!(Who::of(credential, rights), who(1000, 1001, &[]));
            }
        }
    }

    #[test]
    fn only_own_addresses_need_privileged_ports() {
        let peer = |text: &str| Peer::of(text.parse().expect("an address"));
        for own in [
            "127.0.0.1:40000",
            "127.9.9.9:1024",
            "[::ffff:127.0.0.1]:2049",
        ] {
            assert!(peer(own).unprivileged, "{own}");
        }
        // Port 0 is below what any account may use, whatever the host is set to.
        assert!(!peer("127.0.0.1:0").unprivileged || unprivileged_from() == 0);
        assert!(!peer("192.0.2.77:40000").unprivileged);
        assert_eq!(
            peer("[::ffff:192.0.2.77]:9").address(),
            "192.0.2.77".parse::<IpAddr>().expect("an address")
        );
    }
}
