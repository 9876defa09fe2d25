//! A connection at rest, as bytes: what the next process needs to go on with it.
//!
//! When the daemon is replaced by another program, a client keeps its socket, and must not notice. Between two
//! requests there is little to know of it: what was agreed on, and what it has sent of its next request. That is
//! written down here, by one program, and read by another, perhaps newer or older, which therefore believes none
//! of it: `docs/upgrade.md` has the layout, and a test its bytes.

use crate::input::RECV_LEN;
use crate::wire::{RequestHeader, STRING_MAX, Style, cmd};
use hearth_engine::api::REQUEST_MAX;
use hearth_io::BLOCK;

/// The layout written here, and the only one read.
pub const VERSION: u16 = 1;

/// What was agreed on so far in a handshake that is not over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Haggled {
    /// The client knows fixed newstyle.
    pub fixed: bool,
    /// It wants no zeroes after `EXPORT_NAME`.
    pub no_zeroes: bool,
    /// How requests will be framed.
    pub style: Style,
    /// Options it has sent.
    pub options: u32,
    /// The export whose metadata context was set.
    pub context_of: Option<String>,
}

/// What the next bytes of a client are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// A request.
    Header,
    /// More payload of a write, of which this was received.
    Payload(RequestHeader, Vec<u8>),
    /// So many bytes of a write that is refused, and with which error.
    Skip(RequestHeader, u64, u32),
}

/// How far a client is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It was not greeted.
    New,
    /// It was.
    Greeted,
    /// It is choosing.
    Options(Haggled),
    /// The same, with so many bytes to come of an option that is too long.
    SkipOption(Haggled, u64),
    /// It uses an export.
    Transmission {
        /// The export's name.
        export: String,
        /// The serial number of what is behind it, which no other disk has.
        serial: [u8; 16],
        /// Its size; it does not shrink under a client.
        size: u64,
        /// How requests are framed.
        style: Style,
        /// Block status may be asked for.
        status: bool,
        /// What comes next.
        next: Next,
    },
}

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// How far it is.
    pub phase: Phase,
    /// What was received and not looked at.
    pub input: Vec<u8>,
}

fn style_number(style: Style) -> u8 {
    match style {
        Style::Simple => 0,
        Style::Structured => 1,
        Style::Extended => 2,
    }
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    // Bounded by what a connection may hold, far below 4 GiB.
    out.extend((bytes.len() as u32).to_le_bytes());
    out.extend(bytes);
}

fn put_haggled(out: &mut Vec<u8>, haggled: &Haggled) {
    out.push(u8::from(haggled.fixed) | u8::from(haggled.no_zeroes) << 1);
    out.push(style_number(haggled.style));
    out.extend(haggled.options.to_le_bytes());
    put_bytes(out, haggled.context_of.as_deref().unwrap_or("").as_bytes());
}

fn put_header(out: &mut Vec<u8>, header: &RequestHeader) {
    out.extend(header.flags.to_le_bytes());
    out.extend(header.command.to_le_bytes());
    out.extend(header.cookie.to_le_bytes());
    out.extend(header.offset.to_le_bytes());
    out.extend(header.len.to_le_bytes());
}

impl State {
    /// The export it uses.
    pub fn export(&self) -> Option<&str> {
        match &self.phase {
            Phase::Transmission { export, .. } => Some(export),
            _ => None,
        }
    }

    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = VERSION.to_le_bytes().to_vec();
        match &self.phase {
            Phase::New => out.push(0),
            Phase::Greeted => out.push(1),
            Phase::Options(haggled) => {
                out.push(2);
                put_haggled(&mut out, haggled);
            }
            Phase::SkipOption(haggled, left) => {
                out.push(3);
                put_haggled(&mut out, haggled);
                out.extend(left.to_le_bytes());
            }
            Phase::Transmission {
                export,
                serial,
                size,
                style,
                status,
                next,
            } => {
                out.push(4);
                out.push(style_number(*style));
                out.push(u8::from(*status));
                put_bytes(&mut out, export.as_bytes());
                out.extend(serial);
                out.extend(size.to_le_bytes());
                match next {
                    Next::Header => out.push(0),
                    Next::Payload(header, received) => {
                        out.push(1);
                        put_header(&mut out, header);
                        put_bytes(&mut out, received);
                    }
                    Next::Skip(header, left, error) => {
                        out.push(2);
                        put_header(&mut out, header);
                        out.extend(left.to_le_bytes());
                        out.extend(error.to_le_bytes());
                    }
                }
            }
        }
        put_bytes(&mut out, &self.input);
        out
    }

    /// From bytes; `None` if they are of another version, or anything in them cannot be.
    pub fn parse(bytes: &[u8]) -> Option<State> {
        let mut r = Source(bytes);
        if r.u16()? != VERSION {
            return None;
        }
        let phase = match r.u8()? {
            0 => Phase::New,
            1 => Phase::Greeted,
            2 => Phase::Options(r.haggled()?),
            3 => {
                let haggled = r.haggled()?;
                let left = r.u64()?;
                let sane = (1..=crate::OPTION_SKIP_MAX).contains(&left);
                sane.then_some(Phase::SkipOption(haggled, left))?
            }
            4 => {
                let style = r.style()?;
                let status = r.flag()?;
                let export = r.string()?;
                let (serial, size) = (r.array()?, r.u64()?);
                let next = match r.u8()? {
                    0 => Next::Header,
                    1 => {
                        let header = r.write_header()?;
                        let received = r.bytes(header.len as usize)?.to_vec();
                        Next::Payload(header, received)
                    }
                    2 => {
                        let header = r.header()?;
                        let (left, error) = (r.u64()?, r.u32()?);
                        let sane = left > 0 && left <= header.len && error != 0;
                        sane.then_some(Next::Skip(header, left, error))?
                    }
                    _ => return None,
                };
                Phase::Transmission {
                    export,
                    serial,
                    size,
                    style,
                    status,
                    next,
                }
            }
            _ => return None,
        };
        let input = r.bytes(RECV_LEN)?.to_vec();
        r.0.is_empty().then_some(State { phase, input })
    }
}

/// Bytes that are read from the front; `None` once they run out.
struct Source<'a>(&'a [u8]);

impl<'a> Source<'a> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk::<N>()?;
        self.0 = tail;
        Some(*head)
    }

    fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn flag(&mut self) -> Option<bool> {
        match self.u8()? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    fn style(&mut self) -> Option<Style> {
        match self.u8()? {
            0 => Some(Style::Simple),
            1 => Some(Style::Structured),
            2 => Some(Style::Extended),
            _ => None,
        }
    }

    fn bytes(&mut self, most: usize) -> Option<&'a [u8]> {
        let len = self.u32()? as usize;
        if len > most {
            return None;
        }
        let (head, tail) = self.0.split_at_checked(len)?;
        self.0 = tail;
        Some(head)
    }

    fn string(&mut self) -> Option<String> {
        let bytes = self.bytes(STRING_MAX)?;
        std::str::from_utf8(bytes).ok().map(str::to_owned)
    }

    fn haggled(&mut self) -> Option<Haggled> {
        let flags = self.u8()?;
        let style = self.style()?;
        let options = self.u32()?;
        let context = self.string()?;
        (flags & !3 == 0).then_some(Haggled {
            fixed: flags & 1 != 0,
            no_zeroes: flags & 2 != 0,
            style,
            options,
            context_of: (!context.is_empty()).then_some(context),
        })
    }

    fn header(&mut self) -> Option<RequestHeader> {
        Some(RequestHeader {
            flags: self.u16()?,
            command: self.u16()?,
            cookie: self.u64()?,
            offset: self.u64()?,
            len: self.u64()?,
        })
    }

    /// One of a write that was found good, so that its payload is being received.
    fn write_header(&mut self) -> Option<RequestHeader> {
        let header = self.header()?;
        let sane = header.command == cmd::WRITE
            && (1..=REQUEST_MAX).contains(&header.len)
            && (header.offset.checked_add(header.len))
                .is_some_and(|end| end.checked_next_multiple_of(BLOCK).is_some());
        sane.then_some(header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(command: u16, len: u64) -> RequestHeader {
        RequestHeader {
            flags: 1,
            command,
            cookie: 0x0807_0605_0403_0201,
            offset: 4096,
            len,
        }
    }

    fn using(next: Next) -> State {
        State {
            phase: Phase::Transmission {
                export: "vm1".to_owned(),
                serial: [0xee; 16],
                size: 1 << 20,
                style: Style::Structured,
                status: true,
                next,
            },
            input: b"in".to_vec(),
        }
    }

    fn all() -> Vec<State> {
        let haggled = Haggled {
            fixed: true,
            no_zeroes: false,
            style: Style::Extended,
            options: 3,
            context_of: Some("vm1".to_owned()),
        };
        let plain = |phase| State {
            phase,
            input: Vec::new(),
        };
        vec![
            plain(Phase::New),
            plain(Phase::Greeted),
            plain(Phase::Options(haggled.clone())),
            plain(Phase::SkipOption(haggled, 9)),
            using(Next::Header),
            using(Next::Payload(header(1, 8), b"pay".to_vec())),
            using(Next::Skip(header(1, 8), 5, 28)),
        ]
    }

    /// What one version writes another one reads: these bytes never change while [`VERSION`] stays.
    #[test]
    fn golden_bytes() {
        let hex = |state: &State| -> String {
            state.encode().iter().map(|b| format!("{b:02x}")).collect()
        };
        let written: Vec<String> = all().iter().map(hex).collect();
        let disk = "ee".repeat(16) + "0000100000000000";
        let head = "01000100010203040506070800100000000000000800000000000000";
        assert_eq!(
            written,
            [
                "01000000000000".to_owned(),
                "01000100000000".to_owned(),
                "01000201020300000003000000766d3100000000".to_owned(),
                "01000301020300000003000000766d31090000000000000000000000".to_owned(),
                format!("010004010103000000766d31{disk}0002000000696e"),
                format!("010004010103000000766d31{disk}01{head}0300000070617902000000696e"),
                format!(
                    "010004010103000000766d31{disk}02{head}05000000000000001c00000002000000696e"
                ),
            ]
        );
    }

    #[test]
    fn what_is_written_is_read_and_nothing_else_is() {
        for state in all() {
            let bytes = state.encode();
            assert_eq!(State::parse(&bytes), Some(state));
            for len in 0..bytes.len() {
                assert_eq!(State::parse(&bytes[..len]), None, "cut at {len}");
            }
            assert_eq!(State::parse(&[&bytes[..], &[0]].concat()), None);
            // Whatever a byte becomes, nothing more is asked for than there is.
            for at in 0..bytes.len() {
                let mut other = bytes.clone();
                other[at] ^= 0xff;
                let _ = State::parse(&other);
            }
        }
        assert_eq!(
            State::parse(&using(Next::Payload(header(1, 1 << 40), vec![])).encode()),
            None
        );
        assert_eq!(
            State::parse(&using(Next::Payload(header(1, 2), vec![0; 3])).encode()),
            None
        );
        assert_eq!(
            State::parse(&using(Next::Skip(header(1, 2), 3, 5)).encode()),
            None
        );
        // Rounded up to whole blocks, its end is no number.
        let far = RequestHeader {
            offset: u64::MAX - 9,
            ..header(1, 8)
        };
        assert_eq!(
            State::parse(&using(Next::Payload(far, vec![])).encode()),
            None
        );
    }
}
