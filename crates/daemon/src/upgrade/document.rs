//! What a daemon that is replaced leaves for the program in its place, as bytes.
//!
//! It lies in memory (memfd_create(2)) and is read once, by the next program, whose version may be another one.
//! Descriptors are named in it by their numbers. `docs/upgrade.md` has the layout, and a test its bytes. Nothing
//! of it is believed: a document that is cut, damaged or of another version is none, and then the program starts
//! as after a crash.

use hearth_io::checksum::crc32c;

/// The layout written here, and the only one read.
pub const VERSION: u16 = 1;

const MAGIC: &[u8; 8] = b"HEARTHUP";
/// Longest document: as much as connections may hold together, and as much again.
pub const LENGTH_MAX: u64 = 4 << 30;
/// Longest text in it.
const TEXT_MAX: usize = 4096;
/// Most sockets, and most connections.
const COUNT_MAX: usize = 1 << 20;

/// A connection that goes over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    /// What its protocol is called.
    pub protocol: String,
    /// Its socket.
    pub fd: i32,
    /// What the protocol needs to go on.
    pub state: Vec<u8>,
}

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Document {
    /// The version of the program that wrote it.
    pub from: String,
    /// How often this process has become another program, this time included.
    pub generation: u64,
    /// When clients began to wait: `CLOCK_MONOTONIC`, nanoseconds.
    pub begun_ns: u64,
    /// Connections that had to end.
    pub ended: u64,
    /// Why another program than the one that was asked for reads this; empty if it does not.
    pub failure: String,
    /// The run directory's lock, held.
    pub lock: i32,
    /// Listening sockets: what they are called, and their descriptors.
    pub sockets: Vec<(String, i32)>,
    /// Connections.
    pub connections: Vec<Connection>,
}

impl Document {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend(VERSION.to_le_bytes());
        put(&mut out, self.from.as_bytes());
        out.extend(self.generation.to_le_bytes());
        out.extend(self.begun_ns.to_le_bytes());
        out.extend(self.ended.to_le_bytes());
        put(&mut out, clip(&self.failure).as_bytes());
        out.extend(self.lock.to_le_bytes());
        out.extend((self.sockets.len() as u32).to_le_bytes());
        for (name, fd) in &self.sockets {
            put(&mut out, name.as_bytes());
            out.extend(fd.to_le_bytes());
        }
        out.extend((self.connections.len() as u32).to_le_bytes());
        for connection in &self.connections {
            put(&mut out, connection.protocol.as_bytes());
            out.extend(connection.fd.to_le_bytes());
            put(&mut out, &connection.state);
        }
        out.extend(crc32c(&out).to_le_bytes());
        out
    }

    /// From bytes; what is wrong with them, if they are none.
    pub fn parse(bytes: &[u8]) -> Result<Document, &'static str> {
        let Some(rest) = bytes.strip_prefix(MAGIC) else {
            return Err("it does not begin as one");
        };
        let mut r = Source(rest);
        if r.array().map(u16::from_le_bytes) != Some(VERSION) {
            return Err("it is of another version");
        }
        let Some((body, sum)) = bytes.split_last_chunk::<4>() else {
            return Err("it is cut");
        };
        if crc32c(body) != u32::from_le_bytes(*sum) {
            return Err("its checksum is wrong");
        }
        // Not the sum.
        r.0 = r.0.get(..r.0.len().saturating_sub(4)).unwrap_or_default();
        let document = r.document().ok_or("something in it cannot be")?;
        match r.0 {
            [] => Ok(document),
            _ => Err("there is more in it than there should be"),
        }
    }
}

/// As much of a text as is read again.
fn clip(text: &str) -> &str {
    let mut len = text.len().min(TEXT_MAX);
    while !text.is_char_boundary(len) {
        len -= 1;
    }
    &text[..len]
}

fn put(out: &mut Vec<u8>, bytes: &[u8]) {
    // A connection's state is below 34 MiB, and all else far shorter.
    out.extend((bytes.len() as u32).to_le_bytes());
    out.extend(bytes);
}

/// Bytes that are read from the front; `None` once they run out.
struct Source<'a>(&'a [u8]);

impl<'a> Source<'a> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk::<N>()?;
        self.0 = tail;
        Some(*head)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn descriptor(&mut self) -> Option<i32> {
        self.array().map(i32::from_le_bytes).filter(|fd| *fd > 2)
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = self.array().map(u32::from_le_bytes)? as usize;
        let (head, tail) = self.0.split_at_checked(len)?;
        self.0 = tail;
        Some(head)
    }

    fn text(&mut self) -> Option<String> {
        let bytes = self.bytes().filter(|b| b.len() <= TEXT_MAX)?;
        std::str::from_utf8(bytes).ok().map(str::to_owned)
    }

    fn list<T>(&mut self, mut item: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let count = self.array().map(u32::from_le_bytes)? as usize;
        if count > COUNT_MAX {
            return None;
        }
        // Not reserved: the number may be anything, and each item takes its bytes.
        let mut all = Vec::new();
        for _ in 0..count {
            all.push(item(self)?);
        }
        Some(all)
    }

    fn document(&mut self) -> Option<Document> {
        Some(Document {
            from: self.text()?,
            generation: self.u64()?,
            begun_ns: self.u64()?,
            ended: self.u64()?,
            failure: self.text()?,
            lock: self.descriptor()?,
            sockets: self.list(|r| Some((r.text()?, r.descriptor()?)))?,
            connections: self.list(|r| {
                Some(Connection {
                    protocol: r.text()?,
                    fd: r.descriptor()?,
                    state: r.bytes()?.to_vec(),
                })
            })?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document() -> Document {
        Document {
            from: "0.1.0".to_owned(),
            generation: 2,
            begun_ns: 3,
            ended: 1,
            failure: String::new(),
            lock: 5,
            sockets: vec![("unix:nbd.sock".to_owned(), 6)],
            connections: vec![Connection {
                protocol: "nbd".to_owned(),
                fd: 7,
                state: vec![1, 0, 1],
            }],
        }
    }

    /// What one version writes another one reads: these bytes never change while [`VERSION`] stays.
    #[test]
    fn golden_bytes() {
        let bytes = document().encode();
        let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
        let (body, sum) = hex.split_at(hex.len() - 8);
        assert_eq!(
            body,
            concat!(
                "4845415254485550",
                "0100",
                "05000000302e312e30",
                "0200000000000000",
                "0300000000000000",
                "0100000000000000",
                "00000000",
                "05000000",
                "01000000",
                "0d000000756e69783a6e62642e736f636b",
                "06000000",
                "01000000",
                "030000006e6264",
                "07000000",
                "03000000010001",
            )
        );
        let crc = crc32c(&bytes[..bytes.len() - 4]).to_le_bytes();
        let crc: String = crc.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(sum, crc);
    }

    /// With a right sum, so that what is behind it is reached.
    fn summed(mut body: Vec<u8>) -> Vec<u8> {
        body.extend(crc32c(&body).to_le_bytes());
        body
    }

    #[test]
    fn what_is_written_is_read_and_nothing_else_is() {
        let bytes = document().encode();
        assert_eq!(Document::parse(&bytes), Ok(document()));
        let body = &bytes[..bytes.len() - 4];
        for len in 0..body.len() {
            assert!(Document::parse(&bytes[..len]).is_err(), "cut at {len}");
            assert!(
                Document::parse(&summed(body[..len].to_vec())).is_err(),
                "cut and summed at {len}"
            );
        }
        for at in 0..body.len() {
            let mut other = body.to_vec();
            other[at] ^= 0xff;
            // Whatever it becomes: no more is asked for than there is, and it is no other document's sum.
            let _ = Document::parse(&summed(other.clone()));
            other.extend(&bytes[body.len()..]);
            assert!(Document::parse(&other).is_err(), "damaged at {at}");
        }
        let longer = summed([body, &[0]].concat());
        assert!(Document::parse(&longer).unwrap_err().contains("more"));
        let mut newer = body.to_vec();
        newer[8] = 2;
        let told = Document::parse(&summed(newer)).unwrap_err();
        assert!(told.contains("version"), "{told}");
    }

    #[test]
    fn a_long_reason_is_cut_rather_than_not_understood() {
        let long = Document {
            failure: "x".to_owned() + &"ä".repeat(TEXT_MAX),
            ..document()
        };
        let read = Document::parse(&long.encode()).unwrap();
        assert_eq!(read.failure.len(), TEXT_MAX - 1);
        assert!(long.failure.starts_with(&read.failure));
    }
}
