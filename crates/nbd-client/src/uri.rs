//! Where a server and its export are, as the NBD project writes it (`doc/uri.md` there):
//! `nbd://HOST[:PORT]/EXPORT` and `nbd+unix:///EXPORT?socket=PATH`.

use std::fmt;
use std::path::PathBuf;

use hearth_fault::Fault;

/// Port of NBD (IANA).
pub const PORT: u16 = 10809;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// A TCP port.
    Tcp {
        /// Name or number; a number of IPv6 without its brackets.
        host: String,
        /// Port.
        port: u16,
    },
    /// A unix socket.
    Unix(PathBuf),
}

/// An export of a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Uri {
    /// The server.
    pub address: Address,
    /// The export's name; empty for the server's default.
    pub export: String,
}

/// Why a URI was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.fault())]
pub enum UriError {
    /// Not a scheme this client speaks.
    Scheme(String),
    /// Encrypted.
    Tls(String),
    /// No host.
    NoHost,
    /// A host where none belongs.
    Host(String),
    /// A port that is none.
    Port(String),
    /// No socket.
    NoSocket,
    /// A parameter nobody knows.
    Parameter(String),
    /// A `%` that is not followed by two hexadecimal digits, or bytes that are no UTF-8.
    Encoding(String),
    /// Longer than the protocol allows.
    Long,
}

impl UriError {
    /// What is wrong, and what to do about it.
    pub fn fault(&self) -> Fault {
        match self {
            UriError::Scheme(text) => Fault::new(
                format!("\"{text}\" is no NBD address Hearth can use"),
                "write nbd://HOST:PORT/EXPORT or nbd+unix:///EXPORT?socket=PATH",
            ),
            UriError::Tls(text) => Fault::new(
                format!("\"{text}\" asks for TLS, which Hearth does not speak to origins"),
                "use nbd:// over a network you trust, or a tunnel",
            ),
            UriError::NoHost => Fault::new(
                "the NBD address names no host",
                "write nbd://HOST:PORT/EXPORT",
            ),
            UriError::Host(host) => Fault::new(
                format!("the NBD address names the host \"{host}\" with a unix socket"),
                "write nbd+unix:///EXPORT?socket=PATH, with three slashes",
            ),
            UriError::Port(port) => Fault::new(
                format!("\"{port}\" is no port"),
                "give a number from 1 to 65535",
            ),
            UriError::NoSocket => Fault::new(
                "the NBD address names no socket",
                "add ?socket=PATH with an absolute path",
            ),
            UriError::Parameter(name) => Fault::new(
                format!("the NBD address has the parameter \"{name}\", which Hearth does not know"),
                "leave it out",
            ),
            UriError::Encoding(text) => Fault::new(
                format!("\"{text}\" is not well encoded"),
                "write % as %25, and other bytes as % and two digits",
            ),
            UriError::Long => Fault::new(
                "the export's name is longer than 4096 bytes",
                "name it in fewer",
            ),
        }
    }
}

impl Uri {
    /// Reads what stands before and behind the first colon.
    pub fn parse(scheme: &str, rest: &str) -> Result<Uri, UriError> {
        let whole = || format!("{scheme}:{rest}");
        let unix = match scheme {
            "nbd" | "nbd+tcp" => false,
            "nbd+unix" => true,
            "nbds" | "nbds+tcp" | "nbds+unix" => return Err(UriError::Tls(whole())),
            _ => return Err(UriError::Scheme(whole())),
        };
        let rest = rest
            .strip_prefix("//")
            .ok_or_else(|| UriError::Scheme(whole()))?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let export = decode(path)?;
        if export.len() > hearth_nbd_wire::STRING_MAX {
            return Err(UriError::Long);
        }
        let mut socket = None;
        for pair in query.split('&').filter(|p| !p.is_empty()) {
            match pair.split_once('=') {
                Some(("socket", path)) if unix => socket = Some(decode(path)?),
                _ => return Err(UriError::Parameter(pair.to_owned())),
            }
        }
        let address = if unix {
            if !authority.is_empty() {
                return Err(UriError::Host(authority.to_owned()));
            }
            let path = socket
                .filter(|p| p.starts_with('/'))
                .ok_or(UriError::NoSocket)?;
            Address::Unix(path.into())
        } else {
            tcp(authority)?
        };
        Ok(Uri { address, export })
    }
}

fn tcp(authority: &str) -> Result<Address, UriError> {
    // A user name means nothing here.
    let place = authority.rsplit('@').next().unwrap_or(authority);
    let (host, port) = match place.strip_prefix('[').and_then(|p| p.split_once(']')) {
        Some((host, "")) => (host, None),
        Some((host, port)) => (host, Some(port.strip_prefix(':').unwrap_or(port))),
        None => match place.rsplit_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (place, None),
        },
    };
    if host.is_empty() {
        return Err(UriError::NoHost);
    }
    let port = match port {
        None => PORT,
        Some(text) => text
            .parse()
            .ok()
            .filter(|p| *p > 0)
            .ok_or_else(|| UriError::Port(text.to_owned()))?,
    };
    Ok(Address::Tcp {
        host: decode(host)?,
        port,
    })
}

/// Turns `%41` into `A` (RFC 3986, 2.1).
pub fn decode(text: &str) -> Result<String, UriError> {
    let bad = || UriError::Encoding(text.to_owned());
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((byte, tail)) = rest.split_first() {
        rest = tail;
        if *byte != b'%' {
            out.push(*byte);
            continue;
        }
        let (digits, tail) = rest.split_first_chunk::<2>().ok_or_else(bad)?;
        let digit = |b: u8| char::from(b).to_digit(16);
        match (digit(digits[0]), digit(digits[1])) {
            (Some(high), Some(low)) => out.push((high * 16 + low) as u8),
            _ => return Err(bad()),
        }
        rest = tail;
    }
    // A zero byte ends a path for the kernel, and no name has one.
    if out.contains(&0) {
        return Err(bad());
    }
    String::from_utf8(out).map_err(|_| bad())
}

/// The address without what a reader does not need decoded.
impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.address {
            Address::Tcp { host, port } if host.contains(':') => {
                write!(f, "nbd://[{host}]:{port}/{}", self.export)
            }
            Address::Tcp { host, port } => write!(f, "nbd://{host}:{port}/{}", self.export),
            Address::Unix(path) => {
                write!(f, "nbd+unix:///{}?socket={}", self.export, path.display())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Uri, UriError> {
        let (scheme, rest) = text.split_once(':').unwrap();
        Uri::parse(scheme, rest)
    }

    fn tcp(host: &str, port: u16, export: &str) -> Uri {
        Uri {
            address: Address::Tcp {
                host: host.into(),
                port,
            },
            export: export.into(),
        }
    }

    #[test]
    fn addresses() {
        assert_eq!(parse("nbd://h/e"), Ok(tcp("h", PORT, "e")));
        assert_eq!(parse("nbd://h"), Ok(tcp("h", PORT, "")));
        assert_eq!(parse("nbd://h:1/a/b%20c"), Ok(tcp("h", 1, "a/b c")));
        assert_eq!(parse("nbd://[::1]/"), Ok(tcp("::1", PORT, "")));
        assert_eq!(parse("nbd://[::1]:99/"), Ok(tcp("::1", 99, "")));
        let unix = |path: &str, export: &str| Uri {
            address: Address::Unix(path.into()),
            export: export.into(),
        };
        assert_eq!(
            parse("nbd+unix:///e?socket=/run/s"),
            Ok(unix("/run/s", "e"))
        );
        assert_eq!(
            parse("nbd+unix://?socket=/run/a%26b"),
            Ok(unix("/run/a&b", ""))
        );
    }

    #[test]
    fn what_is_no_address() {
        for (text, want) in [
            ("nbds://h/e", UriError::Tls("nbds://h/e".into())),
            ("nbd:h", UriError::Scheme("nbd:h".into())),
            ("http://h", UriError::Scheme("http://h".into())),
            ("nbd:///e", UriError::NoHost),
            ("nbd://h:0/e", UriError::Port("0".into())),
            ("nbd://h:99999/e", UriError::Port("99999".into())),
            ("nbd://h/e?x=1", UriError::Parameter("x=1".into())),
            ("nbd+unix:///e", UriError::NoSocket),
            ("nbd+unix:///e?socket=rel", UriError::NoSocket),
            ("nbd+unix://e?socket=/s", UriError::Host("e".into())),
            ("nbd://h/%", UriError::Encoding("%".into())),
            ("nbd://h/%zz", UriError::Encoding("%zz".into())),
            ("nbd://h/%ff", UriError::Encoding("%ff".into())),
            ("nbd://h/%00", UriError::Encoding("%00".into())),
        ] {
            assert_eq!(parse(text), Err(want), "{text}");
        }
        let long = format!("nbd://h/{}", "x".repeat(4097));
        assert_eq!(parse(&long), Err(UriError::Long));
    }
}
